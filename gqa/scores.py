"""What is done to attention's scores before their softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row without any key stays free of NaN


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
  """Scores within (-softcap, softcap), almost unchanged where small."""
  return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def causal_mask(
  rows: jax.Array, columns: jax.Array, window: int | None
) -> jax.Array:
  """[T, S] bool: key `columns[s]` is visible to query `rows[t]`."""
  distance = rows[:, None] - columns[None, :]
  visible = distance >= 0
  return visible if window is None else visible & (distance < window)
