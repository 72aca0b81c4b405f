"""Gradient steps on one layer's attention towards what it should give.

All four projections move at once, so that keys and queries learn what closed
forms leave out: which tokens are attended to. A step goes by the inputs'
covariance, so that no direction of the stream is learnt late because it is
weak. One small program serves for all layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gqa.convert import layers, low_rank

LEARNING_RATE = 1e-2  # of a parameter's root mean square, at first
DAMPING = 1e-3  # of the inputs' mean square, added to it
_ADAM = optax.scale_by_adam(b1=0.9, b2=0.95)


def reconstruct(
  shape: layers.Shape,
  params: dict[str, Any],
  stream: Sequence[jax.Array],
  places: Sequence[layers.Place],
  targets: Sequence[jax.Array],
  scales: Sequence[jax.Array],
  second: np.ndarray,
  steps: int,
  seed: int,
) -> dict[str, Any]:
  """Returns the layer's parameters after `steps` updates of its attention.

  Args:
    shape: of the layer.
    params: of the layer.
    stream: before the layer, [B, T, D] for each batch.
    places: of each batch.
    targets: what the attention should give, [B, T, D] for each batch.
    scales: of a token's error, [B, T] for each batch.
    second: [E, E], the second moment of the projections' inputs.
    steps: updates, each on one batch.
    seed: of the order of batches.
  """
  attention = jax.tree.map(jnp.asarray, params['attention'])
  D = shape.config.embed_dim
  second = second[:D, :D]
  second = second + DAMPING * np.trace(second) / D * np.eye(D)
  root, inverse = (
    jnp.asarray(matrix, jnp.float32) for matrix in low_rank.roots(second)
  )
  sizes = _sizes(root, attention)
  state = _ADAM.init(attention)
  rng = np.random.default_rng(seed)
  for step in range(steps):
    if step % len(stream) == 0:
      order = rng.permutation(len(stream))
    i = order[step % len(stream)]
    rate = LEARNING_RATE * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    rates = jax.tree.map(lambda size, rate=rate: rate * size, sizes)
    batch = stream[i], places[i], targets[i], scales[i]
    attention, state = _update(
      shape, attention, state, params, rates, inverse, *batch
    )
  return params | {'attention': attention}


@functools.partial(jax.jit, static_argnums=0)
def _update(
  shape, attention, state, params, rates, inverse, x, place, target, scale
):
  def error(attention):
    layer = params | {'attention': attention}
    mixed = layers.run(shape, layer, x, place)[1]['mixed']
    return (((mixed - target) * scale[..., None]) ** 2).mean()

  # In the coordinates in which all directions of the inputs are as strong.
  grad = _on_inputs(inverse, jax.grad(error)(attention))
  step, state = _ADAM.update(grad, state)
  step = jax.tree.map(lambda rate, s: -rate * s, rates, step)
  return optax.apply_updates(attention, _on_inputs(inverse, step)), state


@jax.jit
def _sizes(root, attention):
  """The root mean square of each parameter in those coordinates."""
  size = lambda p: jnp.sqrt((p**2).mean())
  return jax.tree.map(size, _on_inputs(root, attention))


def _on_inputs(matrix, attention):
  """Applies [D, D] to the kernels that read the stream."""
  return attention | {
    name: attention[name]
    | {'kernel': jnp.einsum('DE,ENH->DNH', matrix, attention[name]['kernel'])}
    for name in ('query', 'key', 'value')
  }
