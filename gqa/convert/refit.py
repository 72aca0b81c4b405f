"""The output projection that fits best once a layer's heads are merged.

A merge decides what a head can say; what the stream makes of it is linear and
solved again, in closed form, towards what the parent adds to the stream. It
may undo errors of earlier layers as well as of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

RIDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
DEFAULT_RIDGE = 1e-2  # where there are too few batches to choose by
CHECKED = 4  # every so many batches one is kept to choose the ridge by


@dataclasses.dataclass(frozen=True)
class Sums:
  """Of a weighted least-squares problem in contexts f and targets y."""

  inner: np.ndarray  # [N * H (+ 1), N * H (+ 1)], f f^T
  cross: np.ndarray  # [N * H (+ 1), D], f y^T
  energy: float  # |y|^2

  def __add__(self, other: Sums) -> Sums:
    return Sums(
      self.inner + other.inner,
      self.cross + other.cross,
      self.energy + other.energy,
    )

  def error(self, weights: np.ndarray) -> float:
    """The sum of |weights^T f - y|^2 over that of |y|^2."""
    fitted = ((self.inner @ weights - 2.0 * self.cross) * weights).sum()
    return float((fitted + self.energy) / max(self.energy, 1e-300))


def sums(
  contexts: Sequence[jax.Array],
  targets: Sequence[jax.Array],
  scales: Sequence[jax.Array],
  bias: bool,
) -> list[Sums]:
  """Sums over the batches, in two parts where there are enough of them.

  The second is over every `CHECKED`th batch, the first over the others.

  Args:
    contexts: what the output projection reads, [B, T, N, H] for each batch.
    targets: what it should give, [B, T, D] for each batch.
    scales: of a token's error, [B, T] for each batch.
    bias: whether it has one; then f ends in a 1.
  """
  parts: dict[bool, Sums] = {}
  for i, batch in enumerate(zip(contexts, targets, scales, strict=True)):
    inner, cross, energy = (
      x.astype(np.float64) for x in jax.device_get(_sums(*batch, bias))
    )
    one = Sums(inner, cross, float(energy))
    checks = i % CHECKED == CHECKED - 1
    parts[checks] = parts[checks] + one if checks in parts else one
  return list(parts.values())


def to_matrix(out: dict[str, np.ndarray]) -> np.ndarray:
  """The projection's parameters as [N * H (+ 1), D] float64."""
  kernel = np.asarray(out['kernel'], np.float64)
  kernel = kernel.reshape(-1, kernel.shape[-1])
  if 'bias' not in out:
    return kernel
  return np.concatenate([kernel, np.asarray(out['bias'], np.float64)[None]])


def from_matrix(
  weights: np.ndarray, out: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Inverse of `to_matrix`, in the shapes of `out`."""
  weights = weights.astype(np.float32)
  shape = out['kernel'].shape
  size = shape[0] * shape[1]
  new = {'kernel': weights[:size].reshape(shape)}
  if 'bias' in out:
    new['bias'] = weights[size]
  return new


def fit(
  parts: Sequence[Sums], start: np.ndarray
) -> tuple[np.ndarray, float | None]:
  """Minimises the error plus ridge times the mean of inner times |w - start|^2.

  The ridge is the one that does best on the second part when it is solved on
  the first, unless nothing does better there than `start`.

  Args:
    parts: as `sums` returns.
    start: [N * H (+ 1), D].

  Returns:
    The weights, and the ridge; None: the weights are `start`.
  """
  ridge = DEFAULT_RIDGE
  if len(parts) == 2:
    rest, check = parts
    errors = {r: check.error(_solve(rest, start, r)) for r in RIDGES}
    ridge = min(errors, key=errors.get)
    if errors[ridge] >= check.error(start):
      return start, None
  return _solve(_total(parts), start, ridge), ridge


def error(parts: Sequence[Sums], weights: np.ndarray) -> float:
  """The error over all parts, relative to the targets' energy."""
  return _total(parts).error(weights)


def _total(parts):
  return functools.reduce(operator.add, parts)


def _solve(total, start, ridge):
  size = len(total.inner)
  strength = ridge * max(np.trace(total.inner) / size, 1e-300)
  return np.linalg.solve(
    total.inner + strength * np.eye(size), total.cross + strength * start
  )


def _flat(contexts, bias):
  f = contexts.astype(jnp.float32)
  f = f.reshape(-1, f.shape[-2] * f.shape[-1])
  if not bias:
    return f
  return jnp.concatenate([f, jnp.ones_like(f[:, :1])], axis=-1)


@functools.partial(jax.jit, static_argnums=3)
def _sums(contexts, targets, scales, bias):
  scales = scales.reshape(-1, 1)
  f = _flat(contexts, bias) * scales
  y = targets.astype(jnp.float32).reshape(len(f), -1) * scales
  return f.T @ f, f.T @ y, (y * y).sum()


@jax.jit
def apply(contexts: jax.Array, weights: jax.Array) -> jax.Array:
  """What weights [N * H (+ 1), D] give of contexts [B, T, N, H], [B, T, D]."""
  B, T, N, H = contexts.shape
  f = _flat(contexts, weights.shape[0] > N * H)
  return (f @ weights).reshape(B, T, -1).astype(contexts.dtype)
