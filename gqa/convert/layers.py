"""The model's own layers, one at a time, and what their attention sees.

The modules of model.py run as they are; what is to be seen or replaced is
intercepted. Programs are compiled once for layers of one shape.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import struct

from gqa import model as model_lib
from gqa.config import ModelConfig

Batch = dict[str, np.ndarray]


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
  return _enter(exact(config), outer_params(params), **arrays)


@functools.partial(jax.jit, static_argnums=0)
def _enter(config, params, tokens, positions, segments):
  seen = {'rotations': {}}

  def layer(module, x, rotation, *_):
    seen['x'] = x
    local = model_lib.is_local(config, module.window)
    seen['rotations'][local] = rotation
    return x, None

  without_layers(config, params, tokens, positions, segments, layer)
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


def outer_params(params: model_lib.Params) -> model_lib.Params:
  """What is not of a layer."""
  return {k: v for k, v in params.items() if not k.startswith('layer_')}


def without_layers(config, params, tokens, positions, segments, layer):
  """Returns the decoder's features with `layer(module, *args)` for layers."""

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
