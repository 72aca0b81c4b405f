"""The model's own layers on a text: what a layer is given, and what it gives.

A text is a few windows of a token file, spread over it. The residual stream of
all of them is held at one layer at a time, in batches of one shape, so each
program is compiled once. Sums are kept in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from gqa import data, evaluate
from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa.config import ModelConfig
from gqa.convert.heads import Moments

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Text:
  """Batches of windows to calibrate on, and others to measure the loss on."""

  calibration: Sequence[Batch]
  held_out: Sequence[Batch]
  source: data.TokenFile  # of `calibration`
  tokens: data.TokenFile  # of `held_out`


def open_text(
  tokens: data.TokenFile,
  seq_len: int,
  num_tokens: int,
  held_out_tokens: int,
  batch_size: int,
  held_out: data.TokenFile | None = None,
) -> Text:
  """Chooses windows of a token file.

  Without a file of its own the loss is measured on windows from the tail of
  the text, which are not calibrated on.

  Args:
    tokens: to calibrate on.
    seq_len: tokens of a window.
    num_tokens: to calibrate on, about; at most what there is.
    held_out_tokens: to measure the loss on, about.
    batch_size: windows in a batch, at most.
    held_out: another text to measure the loss on.
  """
  count = tokens.num_examples(seq_len)
  wanted = max(1, held_out_tokens // seq_len)
  tail = min(wanted, max(1, count // 4)) if held_out is None else 0
  if count - tail < 1:
    raise ValueError(
      f'the {tokens} are only {len(tokens)}, fewer than {1 + (tail > 0)} '
      f'windows of seq_len={seq_len} and a last target; use more text or a '
      'smaller --seq_len.'
    )
  last = np.arange(count - tail, count)
  other = tokens
  if held_out is not None:
    other = held_out
    last = _spread(wanted, max(1, held_out.num_examples(seq_len)))
  chosen = _spread(max(1, num_tokens // seq_len), count - tail)
  size = min(batch_size, len(chosen))
  return Text(
    calibration=_batches(tokens, chosen, seq_len, size),
    held_out=_batches(other, last, seq_len, size, whole=True),
    source=tokens,
    tokens=other,
  )


def _spread(wanted, count):
  """So many of the numbers below count, or all, at even distances."""
  wanted = min(wanted, count)
  return np.arange(wanted) * count // wanted


def _batches(tokens, index, seq_len, size, whole=False):
  """Batches of `size` windows; what does not fill one is dropped, or padded."""
  if whole:
    beyond = np.full(-len(index) % size, tokens.num_examples(seq_len) + 1)
    index = np.concatenate([index, beyond])
  index = index[: len(index) // size * size].reshape(-1, size)
  return [data.windows(tokens, rows, seq_len) for rows in index]


@struct.dataclass
class Place:
  """Where the tokens of a batch are: what a layer takes besides its stream."""

  rotations: dict[bool, Any]  # of RoPE, by whether a layer is local
  segments: jax.Array


@dataclasses.dataclass(frozen=True)
class Shape:
  """Which layer a program is for; equal for all layers that look alike."""

  config: ModelConfig
  num_kv_heads: int
  window: int | None

  @property
  def is_local(self) -> bool:
    """Which of a place's rotations the layer takes."""
    return model_lib.is_local(self.config, self.window)


def exact(config: ModelConfig) -> ModelConfig:
  """A model's config for sums over a text: float32, forward only."""
  return dataclasses.replace(config, dtype='float32', remat='none')


def shape_of(config: ModelConfig, layer: int, num_kv_heads: int) -> Shape:
  """The shape of a layer of `config` if it had that many KV heads."""
  # Other layers' heads play no part, so they do not make another program.
  one_for_all = dataclasses.replace(exact(config), num_kv_heads=None)
  return Shape(one_for_all, num_kv_heads, config.windows[layer])


def enter(
  config: ModelConfig, params: model_lib.Params, batch: Batch
) -> tuple[jax.Array, Place]:
  """The stream [B, T, D] before the first layer, and its place."""
  arrays = {k: batch[k] for k in ('tokens', 'positions', 'segments')}
  return _enter(exact(config), _outer(params), **arrays)


@functools.partial(jax.jit, static_argnums=0)
def _enter(config, params, tokens, positions, segments):
  seen = {'rotations': {}}

  def layer(module, x, rotation, *_):
    seen['x'] = x
    local = model_lib.is_local(config, module.window)
    seen['rotations'][local] = rotation
    return x, None

  _without_layers(config, params, tokens, positions, segments, layer)
  return seen['x'], Place(seen['rotations'], segments)


def frequencies(
  config: ModelConfig, params: model_lib.Params
) -> dict[bool, np.ndarray]:
  """Radians per token [P] of RoPE's planes, by whether a layer is local.

  Read off the rotation of a token at position 1; none without RoPE.
  """
  batch = {
    'tokens': np.zeros((1, 2), np.int32),
    'positions': np.array([[0, 1]], np.int32),
    'segments': np.ones((1, 2), np.int32),
  }
  found = {}
  for local, rotation in enter(config, params, batch)[1].rotations.items():
    if rotation is None:
      found[local] = np.zeros(0)
    else:
      sin, cos = (np.asarray(x, np.float64)[0, 1, 0] for x in rotation)
      found[local] = np.arctan2(sin, cos)
  return found


def loss(
  config: ModelConfig,
  params: model_lib.Params,
  batches: Sequence[Batch],
  tokens: data.TokenFile,
) -> dict[str, float]:
  """What `evaluate.evaluate` gives, layer by layer.

  The layers' programs serve for this too, where a program of the whole model
  would have to be compiled for the parent and again for the converted one.
  """
  entered = [enter(config, params, batch) for batch in batches]
  for i, heads in enumerate(config.kv_heads):
    shape, layer = shape_of(config, i, heads), params[f'layer_{i}']
    entered = [(through(shape, layer, *one)[1], one[1]) for one in entered]
  arrays = ('tokens', 'positions', 'segments', 'targets', 'weights')
  nll = [
    _nll(exact(config), _outer(params), x, **{k: batch[k] for k in arrays})
    for (x, _), batch in zip(entered, batches, strict=True)
  ]
  count = math.fsum(float(batch['weights'].sum()) for batch in batches)
  return evaluate.summarize(math.fsum(map(float, nll)), count, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _nll(config, params, x, tokens, positions, segments, targets, weights):
  features = _without_layers(
    config, params, tokens, positions, segments, lambda *_: (x, None)
  )
  _, nll = loss_lib.cross_entropy(
    features,
    model_lib.head_rows(config, params),
    targets,
    weights,
    softcap=config.logit_softcap,
  )
  return nll.sum()


def _outer(params):
  return {k: v for k, v in params.items() if not k.startswith('layer_')}


def _without_layers(config, params, tokens, positions, segments, layer):
  """Runs the decoder with `layer(module, *args)` for each of its layers."""

  def intercept(call, args, kwargs, context):
    if isinstance(context.module, model_lib.Layer):
      return layer(context.module, *args)
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    return model_lib.Decoder(config).apply(
      {'params': params}, tokens, positions, segments, method='features'
    )


def run(
  shape: Shape,
  params: model_lib.Params,
  x: jax.Array,
  place: Place,
  mixed: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs a layer; returns its output and what its attention saw and gave.

  Args:
    shape: of the layer.
    params: of the layer.
    x: [B, T, D].
    place: of the batch.
    mixed: [B, T, D], to go on with in place of what the attention returns.

  Returns:
    [B, T, D], and 'inputs' [B, T, D] of the projections, 'contexts'
    [B, T, N, H], which the output projection reads, and 'mixed' [B, T, D],
    which it gives.
  """
  seen = {}

  def intercept(call, args, kwargs, context):
    name = context.module.name
    if context.method_name != '__call__' or name not in ('attention', 'out'):
      return call(*args, **kwargs)
    if name == 'out':
      seen['contexts'] = args[0]
      return call(*args, **kwargs)
    seen['inputs'] = args[0]
    out, _ = (mixed, None) if mixed is not None else call(*args, **kwargs)
    seen['mixed'] = out
    return out, None

  layer = model_lib.Layer(shape.config, shape.num_kv_heads, shape.window)
  rotation = place.rotations[shape.is_local]
  with nn.intercept_methods(intercept):
    y, _ = layer.apply({'params': params}, x, rotation, place.segments)
  return y, seen


@functools.partial(jax.jit, static_argnums=0)
def through(shape, params, x, place):
  """(what the attention gives [B, T, D], the stream after the layer)."""
  y, seen = run(shape, params, x, place)
  return seen['mixed'], y


@functools.partial(jax.jit, static_argnums=0)
def contexts(shape, params, x, place):
  """What the output projection reads, [B, T, N, H]."""
  return run(shape, params, x, place)[1]['contexts']


@functools.partial(jax.jit, static_argnums=0)
def after(shape, params, x, place, mixed):
  """The stream after the layer if its attention gave `mixed`."""
  return run(shape, params, x, place, mixed)[0]


@functools.partial(jax.jit, static_argnums=0)
def _input_sums(shape, params, x, place):
  h = run(shape, params, x, place)[1]['inputs']
  h = h.astype(jnp.float32).reshape(-1, h.shape[-1])
  return h.sum(axis=0), h.T @ h


def moments(
  shape: Shape,
  params: model_lib.Params,
  stream: Sequence[jax.Array],
  places: Sequence[Place],
  turns: np.ndarray,
) -> Moments:
  """Moments of a layer's projection inputs, a last 1 included under biases.

  Args:
    shape: of the layer.
    params: of the layer.
    stream: before the layer, [B, T, D] for each batch.
    places: of each batch.
    turns: [P], see `Moments`.
  """
  mean = second = 0.0
  for x, place in zip(stream, places, strict=True):
    sums = jax.device_get(_input_sums(shape, params, x, place))
    mean = mean + sums[0].astype(np.float64)
    second = second + sums[1].astype(np.float64)
  count = sum(x.shape[0] * x.shape[1] for x in stream)
  return _with_bias(shape.config, mean / count, second / count, turns)


def moments_without_text(
  config: ModelConfig, params: model_lib.Params
) -> Moments:
  """Moments of a norm's output if its entries were independent.

  What is known of a layer's input without a text: unit variance times the
  norm's scale, and its bias.
  """
  mean, scale = np.zeros(config.embed_dim), np.ones(config.embed_dim)
  if 'attention_norm' in params:
    norm = params['attention_norm']
    scale = np.asarray(norm['scale'], np.float64) + config.norm_offset
    if 'bias' in norm:
      mean = np.asarray(norm['bias'], np.float64)
  second = np.diag(scale**2) + np.outer(mean, mean)
  # How far a model attends is not known: every plane turns all the way.
  turns = np.full(config.rope_dim // 2, np.inf)
  return _with_bias(config, mean, second, turns)


def _with_bias(
  config: ModelConfig, mean: np.ndarray, second: np.ndarray, turns: np.ndarray
) -> Moments:
  """Moments of inputs [D], and of a last one that is 1 under biases."""
  if config.qkv_bias:
    second = np.block([[second, mean[:, None]], [mean[None], np.ones((1, 1))]])
    mean = np.append(mean, 1.0)
  return Moments(mean, second, turns)
