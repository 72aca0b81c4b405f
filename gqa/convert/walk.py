"""The walk over the layers: merge, refit, and go on with what came of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gqa import model as model_lib
from gqa.config import ModelConfig
from gqa.convert import calibrate, layers, methods, reconstruct, refit
from gqa.convert.heads import Moments
from gqa.convert.methods import Options, Report

LOST = 10.0  # what a target's size counts against the stream's in `_scale`


def check_kv_heads(config: ModelConfig, wanted: Sequence[int]):
  """Raises ValueError unless each layer can be brought to `wanted` heads."""
  if len(wanted) != config.num_layers:
    raise ValueError(
      f'num_kv_heads={wanted} has {len(wanted)} entries, but the model has '
      f'{config.num_layers} layers; give one int, or one per layer.'
    )
  for layer, (have, want) in enumerate(
    zip(config.kv_heads, wanted, strict=True)
  ):
    choices = possible_kv_heads(have)
    if want not in choices:
      raise ValueError(
        f'num_kv_heads={want} must divide the {have} KV heads of layer '
        f'{layer}; choose one of {choices}.'
      )


def possible_kv_heads(num_kv_heads: int) -> list[int]:
  """The numbers that heads can be merged to, largest first."""
  return [k for k in range(num_kv_heads, 0, -1) if num_kv_heads % k == 0]


def convert(
  params: model_lib.Params,
  config: ModelConfig,
  num_kv_heads: Sequence[int],
  options: Options,
  text: Sequence[layers.Batch] | None = None,
  on_layer: Callable[[Report], None] = lambda report: None,
) -> tuple[model_lib.Params, ModelConfig, list[Report]]:
  """Brings each layer to its number of KV heads.

  Layers before the first one that changes are left as they are.

  Args:
    params: of the parent; not changed.
    config: of the parent.
    num_kv_heads: of each layer.
    options: how.
    text: batches to calibrate on; None: by the weights alone.
    on_layer: is given the report of each layer when it is done.

  Returns:
    Parameters and config of the converted model, and a report for each layer.
  """
  check_kv_heads(config, num_kv_heads)
  options.check(text is not None)
  walk = None if text is None else Walk(config, params, text, options)
  new, reports = dict(params), []
  for i, k in enumerate(num_kv_heads):
    layer = params[f'layer_{i}']
    if walk is None:
      moments = calibrate.moments_without_text(config, layer)
    else:
      moments = walk.look(i, layer)
    report: Report = {'layer': i, 'num_kv_heads': k}
    changes = k != config.kv_heads[i]
    if changes:
      attention, merge_report = methods.merge_layer(
        layer['attention'], config, k, options, moments, i
      )
      layer = layer | {'attention': attention}
      report |= merge_report
    if walk is not None:
      layer, fit_report = walk.go_on(i, k, layer, changes)
      report |= fit_report
    new[f'layer_{i}'] = layer
    reports.append(report)
    on_layer(report)
  heads = tuple(num_kv_heads)
  same = len(set(heads)) == 1
  config = dataclasses.replace(config, num_kv_heads=heads[0] if same else heads)
  return new, config, reports


class Walk:
  """A text on its way through the parent and through the converted model.

  Attributes:
    parent: the parent's stream [B, T, D] for each batch, where it is now.
    converted: the converted model's; None until it differs.
    places: of each batch.
    before: what the layer at hand reads.
    targets: what its attention should give.
    scales: of a token's error, [B, T].
  """

  def __init__(self, config, params, text, options: Options):
    self._config, self._options = config, options
    entered = [layers.enter(config, params, batch) for batch in text]
    self.parent = [x for x, _ in entered]
    self.places = [place for _, place in entered]
    self.converted = None
    length = text[0]['tokens'].shape[1]
    self._turns = {
      local: length * frequency
      for local, frequency in layers.frequencies(config, params).items()
    }

  def look(self, index: int, layer) -> Moments:
    """Takes the parent through a layer; returns moments of what it reads.

    Args:
      index: of the layer.
      layer: parameters of the parent's.
    """
    shape = self._shape(index, self._config.kv_heads[index])
    self.before = self.converted or list(self.parent)
    self.targets, self.scales = [], []
    for i, place in enumerate(self.places):
      x = self.converted[i] if self.converted else None
      found = _look(shape, layer, self.parent[i], x, place)
      # One batch after the other: what many of them need is not held at once.
      target, scale, self.parent[i] = jax.block_until_ready(found)
      self.targets.append(target)
      self.scales.append(scale)
    turns = self._turns[shape.is_local]
    self._moments = calibrate.moments(
      shape, layer, self.before, self.places, turns
    )
    return self._moments

  def go_on(self, index: int, num_kv_heads: int, layer, changes: bool):
    """Repairs a layer of the converted model, and takes its stream through.

    Args:
      index: of the layer.
      num_kv_heads: of the layer.
      layer: parameters of the converted model's.
      changes: whether its heads were merged.

    Returns:
      Parameters of the layer, and a report.
    """
    if not changes and not self.converted:
      return layer, {}
    shape, options = self._shape(index, num_kv_heads), self._options
    layer, contexts, report = self._fitted(shape, layer)
    if options.reconstruct_steps:
      contexts.clear()
      layer, contexts, report = self._reconstructed(shape, layer, report, index)
    if options.sequential:
      weights = refit.to_matrix(layer['attention']['out'])
      weights = jnp.asarray(weights, jnp.float32)
      self.converted = self.before
      for i, place in enumerate(self.places):  # Large: replaced one by one.
        mixed, contexts[i] = refit.apply(contexts[i], weights), None
        x = layers.after(shape, layer, self.converted[i], place, mixed)
        self.converted[i] = jax.block_until_ready(x)
    return layer, report

  def _reconstructed(self, shape, layer, report, index):
    """Takes gradient steps, and keeps what is better; returns as `_fitted`."""
    moved = reconstruct.reconstruct(
      shape,
      layer,
      self.before,
      self.places,
      self.targets,
      self.scales,
      self._moments.second,
      self._options.reconstruct_steps,
      self._options.seed + index,
    )
    moved, contexts, moved_report = self._fitted(shape, moved)
    if moved_report['output_error'] < report['output_error']:
      kept = ('output_error', 'damage', 'ridge')
      kept = {k: v for k, v in moved_report.items() if k in kept}
      return moved, contexts, report | kept
    contexts.clear()
    return layer, self._contexts(shape, layer), report

  def _fitted(self, shape, layer):
    """Refits the output projection, if that is wanted; measures it anyway.

    Errors are relative: to the targets, and, as damage, to the stream.

    Returns:
      The layer, the contexts of its attention, and a report.
    """
    out = layer['attention']['out']
    contexts = self._contexts(shape, layer)
    parts = refit.sums(contexts, self.targets, self.scales, 'bias' in out)
    weights = refit.to_matrix(out)
    report = {'output_error_merged': refit.error(parts, weights)}
    if self._options.refit:
      weights, report['ridge'] = refit.fit(parts, weights)
      out = refit.from_matrix(weights, out)
      layer = layer | {'attention': layer['attention'] | {'out': out}}
    report['output_error'] = refit.error(parts, weights)
    numbers = sum(y.size for y in self.targets)
    energy = sum(part.energy for part in parts)
    report['damage'] = report['output_error'] * energy / numbers
    return layer, contexts, report

  def _contexts(self, shape, layer):
    return [
      jax.block_until_ready(layers.contexts(shape, layer, x, place))
      for x, place in zip(self.before, self.places, strict=True)
    ]

  def _shape(self, index, num_kv_heads):
    return layers.shape_of(self._config, index, num_kv_heads)


@functools.partial(jax.jit, static_argnums=0)
def _look(shape, layer, parent, converted, place):
  """Takes a batch through the parent's layer.

  Args:
    shape: of the parent's layer.
    layer: parameters of the parent's layer.
    parent: the parent's stream [B, T, D].
    converted: the converted model's; None: the same.
    place: of the batch.

  Returns:
    What the converted layer's attention should give, [B, T, D], which brings
    its stream back to the parent's; the scale of an error in it, [B, T]; and
    the parent's stream after the layer.
  """
  after, seen = layers.run(shape, layer, parent, place)
  target = stream = seen['mixed']
  if shape.config.norm_position == 'pre':
    stream = parent + target
    if converted is not None and shape.config.parallel_residual:
      nothing = jnp.zeros_like(target)
      target = after - layers.run(shape, layer, converted, place, nothing)[0]
    elif converted is not None:
      target = stream - converted
  return target, _scale(stream, target), after


def _scale(stream, target):
  """How much the error of a token counts, [B, T].

  Its size against the parent's stream is what the next norm sees of it, so a
  few tokens of huge activations do not outweigh all others. Nor do those where
  the converted model has left the parent too far to come back.
  """
  size = lambda x: (x.astype(jnp.float32) ** 2).mean(axis=-1)
  return jax.lax.rsqrt(size(stream) + LOST * size(target) + 1e-30)


def damages(
  params: model_lib.Params,
  config: ModelConfig,
  options: Options,
  text: Sequence[layers.Batch],
) -> list[dict[int, float]]:
  """What each layer would lose with fewer heads, if it were the only one.

  Returns:
    For each layer, by number of KV heads, the energy of the attention's error
    over that of the stream, a mean over tokens.
  """
  options = dataclasses.replace(options, sequential=False, reconstruct_steps=0)
  walk, found = Walk(config, params, text, options), []
  for i, have in enumerate(config.kv_heads):
    layer = params[f'layer_{i}']
    moments = walk.look(i, layer)
    found.append({have: 0.0})
    for k in possible_kv_heads(have)[1:]:
      attention, _ = methods.merge_layer(
        layer['attention'], config, k, options, moments, i
      )
      _, report = walk.go_on(i, k, layer | {'attention': attention}, True)
      found[-1][k] = report['damage']
  return found
