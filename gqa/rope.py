"""Rotary position embedding (Su et al. 2021): angles, and the rotation by them.

Axes in shape comments: B batch, T tokens, H head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def rope_frequencies(
  dim: int,
  theta: float,
  scaling: str = 'none',
  *,
  factor: float = 1.0,
  original_len: int | None = None,
  slow_turns: float = 1.0,
  fast_turns: float = 32.0,
) -> tuple[float, ...]:
  """Angles per token of rotary position embedding (Su et al. 2021).

  Pair j of `dim` / 2 turns by theta^(-2j / dim), and by `factor` less where it
  is stretched to reach beyond the sequences of the training.

  Args:
    dim: number of rotated dimensions of a head, even.
    theta: base of the geometric progression of wavelengths.
    scaling: 'none'; 'linear' stretches all pairs; 'llama3' and 'yarn' (Peng et
      al. 2023, section 3.2) those that turn less than slow_turns times in
      original_len tokens, none that turn more than fast_turns times, and a mix
      of both in between, which is linear in the turns or in j.
    factor: see scaling.
    original_len: see scaling.
    slow_turns: see scaling.
    fast_turns: see scaling.
  """
  plain = [theta ** (-2.0 * j / dim) for j in range(dim // 2)]
  if scaling == 'none':
    kept = [1.0] * len(plain)
  elif scaling == 'linear':
    kept = [0.0] * len(plain)
  elif scaling == 'llama3':
    turns = [original_len * frequency / (2 * math.pi) for frequency in plain]
    kept = [(t - slow_turns) / (fast_turns - slow_turns) for t in turns]
  else:
    turning = lambda turns: (
      dim
      * math.log(original_len / (turns * 2 * math.pi))
      / (2 * math.log(theta))
    )
    first = max(math.floor(turning(fast_turns)), 0)
    last = min(math.ceil(turning(slow_turns)), dim - 1)
    last = last + 0.001 if first == last else last
    kept = [1 - (j - first) / (last - first) for j in range(len(plain))]
  kept = [min(max(share, 0.0), 1.0) for share in kept]
  return tuple(
    frequency * (share + (1 - share) / factor)
    for frequency, share in zip(plain, kept, strict=True)
  )


def rope_angles(
  positions: jax.Array, frequencies: tuple[float, ...]
) -> jax.Array:
  """Angles [B, T, dim / 2] float32 of [B, T] int32 positions."""
  frequencies = jnp.asarray(frequencies, jnp.float32)
  return positions.astype(jnp.float32)[..., None] * frequencies[None, None]


class Rotation(NamedTuple):
  """Sines and cosines [B, T, 1, dim / 2] of RoPE's angles."""

  sin: jax.Array
  cos: jax.Array

  def last(self) -> Rotation:
    """Of the last token alone."""
    return Rotation(self.sin[:, -1:], self.cos[:, -1:])


def rotation(
  angles: jax.Array, dtype: jnp.dtype, magnitude: float = 1.0
) -> Rotation:
  """What `apply_rope` takes, made once for all layers and heads.

  Args:
    angles: [B, T, dim / 2] float32.
    dtype: of what will be rotated. Sines and cosines are taken in float32 and
      cast once.
    magnitude: what is rotated is multiplied by it.
  """

  def table(take_cos):
    x = jnp.where(take_cos, jnp.cos(angles), jnp.sin(angles)) * magnitude
    return x.astype(dtype)[:, :, None, :]

  # A loop, as XLA would take them anew for each head of each layer, barrier or
  # not; on CPU that costs far more than the rotation itself.
  return Rotation(*lax.map(table, jnp.array([False, True])))


@jax.custom_vjp
def apply_rope(x: jax.Array, by: Rotation) -> jax.Array:
  """Rotates pairs (j, j + dim / 2) of each head; the rest passes through.

  Args:
    x: [B, T, heads, H], dim at most H.
    by: the angles of each position, from `rotation`; not trained.

  Returns:
    [B, T, heads, H] in x's dtype.
  """
  half = by.cos.shape[-1]
  first, second = x[..., :half], x[..., half : 2 * half]
  return jnp.concatenate(
    [
      first * by.cos - second * by.sin,
      second * by.cos + first * by.sin,
      x[..., 2 * half :],
    ],
    axis=-1,
  )


def _apply_rope_fwd(x, by):
  return apply_rope(x, by), by


def _apply_rope_bwd(by, grad):
  # A rotation's transpose is the rotation back.
  return apply_rope(grad, Rotation(-by.sin, by.cos)), None


apply_rope.defvjp(_apply_rope_fwd, _apply_rope_bwd)
