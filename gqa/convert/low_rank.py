"""Merges that are optimal in least squares, in closed form.

Alignment forces the maps of a group to be rotations. Nothing in the model
does: a query may take any complex number in each plane of RoPE, and the output
projection any matrix. What is left is to find the subspace that holds most of
what a group computes, weighted by how strongly it is read.

Two facts decide how keys are compared. A constant added to all scores of a
query changes nothing, so what a key is on average matters only as far as RoPE
turns it within a window. And planes that hardly turn within a window may be
mixed like dimensions that are not rotated: there g times as many dimensions
are reduced at once, where a plane that turns is reduced by itself.
"""

from __future__ import annotations

import functools

import numpy as np

from gqa.convert import heads as heads_lib
from gqa.convert.heads import Heads, Merge, Moments

SLOW = 0.5  # radians in a window; planes that turn less count as not rotated
_FLOOR = 1e-9  # of the mean eigenvalue: what is below is taken for this
_WEAKEST = 0.05  # dimension of a shared head, of their mean


def keys(
  heads: Heads, num_groups: int, moments: Moments, rope_dim: int
) -> Merge:
  """The best shared keys, if queries and keys are drawn independently.

  In a plane that turns, the phase between query and key is taken to be
  uniform.
  """
  K, H, _ = heads.key.shape
  g = K // num_groups
  readers = key_readers(heads, moments)
  plane_readers = np.diagonal(readers, axis1=-2, axis2=-1)[:, : rope_dim // 2]
  planes = heads_lib.to_planes(heads.key, rope_dim)
  still = _still(H, moments)
  shared, maps = [], []
  for start in range(0, K, g):
    part = slice(start, start + g)
    plane, factors = _complex_rank_one(
      planes[part], plane_readers[part], moments
    )
    rest, rest_maps = _subspace(
      heads.key[part, rope_dim:],
      readers[part, rope_dim:, rope_dim:],
      _still_roots(moments),
    )
    one = heads_lib.from_planes(plane, rest)
    its_maps = heads_lib.plane_maps(factors, rest_maps)
    if len(still) > H - rope_dim:
      block = np.ix_(np.arange(g), still, still)
      one[still], its_maps[block] = _subspace(
        heads.key[part][:, still],
        readers[part][block],
        _still_roots(moments),
        one[still],
      )
    shared.append(one)
    maps.append(its_maps)
  return Merge(np.stack(shared), np.concatenate(maps))


def values(heads: Heads, num_groups: int, moments: Moments) -> Merge:
  """The best shared values for the summed error of all heads' outputs.

  The truncated singular value decomposition of the group's output maps,
  weighted by the second moment of the inputs (Eckart and Young).
  """
  g = heads.num_kv_heads // num_groups
  readers = value_readers(heads)
  shared, maps = [], []
  for start in range(0, heads.num_kv_heads, g):
    part = slice(start, start + g)
    one, its_maps = _subspace(
      heads.value[part], readers[part], _second_roots(moments)
    )
    shared.append(one)
    maps.append(its_maps)
  return Merge(np.stack(shared), np.concatenate(maps))


def value_readers(heads: Heads) -> np.ndarray:
  """[K, H, H]: sum over the query heads of a KV head of out out^T."""
  out = heads.per_kv_head(heads.out)
  return np.einsum('kgad,kgbd->kab', out, out, optimize=True)


def key_readers(heads: Heads, moments: Moments) -> np.ndarray:
  """[K, H, H]: what the queries of a KV head make of an error of its key.

  Sum over them of E[q q^T] in the part that does not turn; in a plane that
  does, an error of any phase counts the same, by half of the queries' energy.
  """
  query = heads.per_kv_head(heads.query)
  moved = query @ moments.second
  readers = np.einsum('kgae,kgbe->kab', moved, query, optimize=True)
  H, half = readers.shape[-1], len(moments.turns)
  energy = np.diagonal(readers, axis1=-2, axis2=-1)  # [K, H]
  plane = (energy[:, :half] + energy[:, half : 2 * half]) / 2
  still = np.isin(np.arange(H), _still(H, moments))
  readers = readers * np.outer(still, still)
  turning = np.flatnonzero(~still[:half])
  for j in (turning, turning + half):
    readers[:, j, j] = plane[:, turning]
  return readers


def key_error(heads: Heads, merge: Merge | None, moments: Moments) -> float:
  """What `keys` makes least: the expected square of all errors of scores.

  With no merge, that of leaving the keys out.
  """
  lost = heads.key if merge is None else heads.key - merge.expanded()
  readers, still = key_readers(heads, moments), _still(lost.shape[1], moments)
  block = np.ix_(np.arange(len(lost)), still, still)
  total = _energy(lost[:, still], readers[block], _still_second(moments))
  turning = np.setdiff1d(np.arange(len(moments.turns)), still)
  planes = heads_lib.to_planes(lost, 2 * len(moments.turns)).swapaxes(0, 1)
  energy = np.diagonal(_products(planes, moments), axis1=-2, axis2=-1).real
  weights = np.diagonal(readers, axis1=-2, axis2=-1).T  # [H, K]
  return total + float((energy[turning] * weights[turning]).sum())


def value_error(heads: Heads, merge: Merge | None, second: np.ndarray) -> float:
  """What `values` makes least: the expected square of all errors of outputs.

  With no merge, that of leaving the values out.
  """
  lost = heads.value if merge is None else heads.value - merge.expanded()
  return _energy(lost, value_readers(heads), second)


def _energy(weights, readers, second):
  return float(((readers @ weights @ second) * weights).sum())


def _slow(moments):
  return np.flatnonzero(moments.turns <= SLOW)


def _still(head_dim, moments):
  """The dimensions of a head that do not turn: slow planes and the rest."""
  slow, half = _slow(moments), len(moments.turns)
  rest = np.arange(2 * half, head_dim)
  return np.concatenate([slow, slow + half, rest])


def _mean_share(turns):
  """How much of the mean's square a turn by 0 to `turns` makes visible."""
  return np.minimum(turns**2 / 12.0, 1.0)


def _products(planes, moments):
  """E[z z^H] of complex heads [P, g, E], plane by plane [P, g, g]."""
  transposed = planes.conj().swapaxes(-1, -2)
  mean = planes @ moments.mean  # [P, g]
  outer = mean[..., None] * mean[..., None, :].conj()
  share = _mean_share(moments.turns)[:, None, None]
  return planes @ moments.around_mean(0.0) @ transposed + share * outer


def _still_second(moments):
  """Moments as they count in what does not turn, or in its fastest plane."""
  turns = moments.turns[_slow(moments)]
  return moments.around_mean(_mean_share(turns.max(initial=0.0)))


def _complex_rank_one(planes, readers, moments):
  """One complex head for g, plane by plane.

  Args:
    planes: complex [g, P, E].
    readers: [g, P], how much an error counts.
    moments: of the inputs.

  Returns:
    The shared planes [P, E], and factors [g, P] to write each head with them.
  """
  top = readers.max(axis=0, initial=0.0)
  weights = np.sqrt(np.maximum(readers, 1e-12 * top) + (top == 0))  # [g, P]
  scaled = (planes * weights[..., None]).swapaxes(0, 1)  # [P, g, E]
  values, vectors = np.linalg.eigh(_products(scaled, moments))
  vectors = vectors[..., -1]  # [P, g], the leading ones
  shared = np.einsum('pi,pie->pe', vectors.conj(), scaled)
  factors = vectors.T / weights  # [g, P]
  # The energy of a head of the group on average, and the phase of their sum.
  size = np.sqrt((np.abs(factors) ** 2).mean(axis=0))
  phase = factors.sum(axis=0)
  phase = np.where(np.abs(phase) > 0, phase, 1.0)
  scale = size * phase / np.abs(phase)
  alive = values[..., -1] > 0
  scale = np.where(alive, scale, 1.0)
  return shared * scale[:, None], np.where(alive, factors / scale, 0.0)


def _subspace(weights, readers, inputs, like=None):
  """H dimensions for g times H, weighted by readers and inputs.

  Args:
    weights: [g, H, E].
    readers: [g, H, H], positive semidefinite.
    inputs: `roots` of their second moment [E, E].
    like: [H, E], a head that the shared one should be like, as far as one
      basis is as good as another; None: the group's own.

  Returns:
    The shared head [H, E] and maps [g, H, H].
  """
  g, H, E = weights.shape
  if not H:
    return np.zeros((0, E)), np.zeros((g, 0, 0))
  root, inverse = inputs
  moved = weights @ root  # [g, H, E]
  stacked = (roots(readers)[0] @ moved).reshape(g * H, E)
  basis = np.linalg.svd(stacked, full_matrices=False)[2][:H]  # [H, E]
  maps = moved @ basis.T  # [g, H, H]
  if like is None:
    # Every dimension as strong as the heads are in it on average, in the basis
    # that is closest to theirs.
    scale = np.sqrt((maps**2).sum(axis=1).mean(axis=0))  # [H]
    scale = np.maximum(scale, _FLOOR * scale.mean() + (scale.mean() == 0))
    left, _, right = np.linalg.svd((maps / scale).sum(axis=0))
    turn = (left @ right) * scale
  else:
    left, size, right = np.linalg.svd(like @ root @ basis.T)
    size = np.maximum(size, _WEAKEST * size.mean() + (size.mean() == 0))
    turn = (left * size) @ right
  return turn @ basis @ inverse, maps @ np.linalg.inv(turn)


@functools.lru_cache(maxsize=1)
def _second_roots(moments):
  return roots(moments.second)


@functools.lru_cache(maxsize=1)
def _still_roots(moments):
  return roots(_still_second(moments))


def roots(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Symmetric roots of positive semidefinite matrices, and their inverses."""
  values, vectors = np.linalg.eigh(matrices)
  size = np.abs(values).mean(axis=-1, keepdims=True)
  values = np.maximum(values, _FLOOR * size + (size == 0))
  root = np.sqrt(values)[..., None, :]
  transposed = vectors.swapaxes(-1, -2)
  return (vectors * root) @ transposed, (vectors / root) @ transposed
