"""Turning heads towards each other before they are merged.

Trained heads share structure in bases of their own, and the mean of heads in
different bases is noise. What may be done to a head without changing the model
(Jin et al. 2024, arXiv 2412.20677): any orthogonal matrix to a value, as the
output projection undoes it; to a key one rotation in each plane of RoPE, which
commutes with RoPE and is undone by the queries, and any orthogonal matrix to
the part that is not rotated.
"""

from __future__ import annotations

import numpy as np

from gqa.convert import heads as heads_lib
from gqa.convert import merging
from gqa.convert.heads import Merge

_ROUNDS = 100
_TOLERANCE = 1e-10  # of the energy; a smaller gain ends the rounds


def align_keys(
  keys: np.ndarray, num_groups: int, second: np.ndarray, rope_dim: int
) -> Merge:
  """Turns the keys of each group towards their mean, and takes it.

  Args:
    keys: [K, H, E], groups in order.
    num_groups: k.
    second: [E, E], moments of the inputs.
    rope_dim: how many dimensions RoPE rotates; 0 for none.
  """
  K, H, _ = keys.shape
  g = K // num_groups
  factors = np.ones((K, rope_dim // 2), complex)
  planes = heads_lib.to_planes(keys, rope_dim)
  for start in range(0, K, g):
    part = slice(start, start + g)
    factors[part] = _phases(planes[part], second)
  rest = align_values(keys[:, rope_dim:], num_groups, second).maps
  return _turned(keys, heads_lib.plane_maps(factors, rest), num_groups)


def align_values(
  values: np.ndarray, num_groups: int, second: np.ndarray
) -> Merge:
  """Orthogonal Procrustes, generalised over the group; arguments as there."""
  K, H, _ = values.shape
  g = K // num_groups
  maps = np.broadcast_to(np.eye(H), (K, H, H)).copy()
  if H and g > 1:
    for start in range(0, K, g):
      part = slice(start, start + g)
      maps[part] = _procrustes(values[part], second)
  return _turned(values, maps, num_groups)


def key_similarity(
  keys: np.ndarray, second: np.ndarray, rope_dim: int, aligned: bool
) -> np.ndarray:
  """The cosine [K, K] of each two keys over the inputs.

  Args:
    keys: [K, H, E].
    second: [E, E], moments of the inputs.
    rope_dim: how many dimensions RoPE rotates.
    aligned: whether after turning one of the two towards the other.
  """
  planes = heads_lib.to_planes(keys, rope_dim)
  inner = _plane_products(planes, second)  # [P, K, K]
  inner = np.abs(inner) if aligned else inner.real
  rest = _inner(keys[:, rope_dim:], second, aligned)
  return _cosines(inner.sum(axis=0) + rest)


def value_similarity(
  values: np.ndarray, second: np.ndarray, aligned: bool
) -> np.ndarray:
  """`key_similarity` of heads that any orthogonal matrix may turn."""
  return _cosines(_inner(values, second, aligned))


def within_groups(similarity: np.ndarray, num_groups: int) -> float:
  """The mean similarity of two heads of one group; 1 where heads are alone."""
  K = len(similarity)
  group = np.arange(K) // (K // num_groups)
  inside = (group[:, None] == group[None, :]) & ~np.eye(K, dtype=bool)
  return float(similarity[inside].mean()) if inside.any() else 1.0


def _turned(weights, maps, num_groups):
  turned = maps.swapaxes(-1, -2) @ weights
  return Merge(merging.mean(turned, num_groups).shared, maps)


def _phases(planes, second):
  """Unit factors [g, P]: head i in plane p is factors[i, p] times the mean.

  The energy of the mean climbs from the heads as they are, and from the phases
  of the leading eigenvector; the better one counts.
  """
  products = _plane_products(planes, second)  # [P, g, g]
  leading = np.linalg.eigh(products)[1][..., -1]  # [P, g]
  as_they_are = np.ones_like(leading)
  best, score = _climb(products, as_they_are)
  other, other_score = _climb(products, _unit(leading, as_they_are))
  better = other_score > score * (1.0 + _TOLERANCE)
  best = np.where(better[:, None], other, best)
  return (best * best[:, :1].conj()).T  # The first head stays as it is.


def _climb(products, factors):
  """Turns a head after the other towards the rest; returns the energy too."""
  for _ in range(_ROUNDS):
    before = factors.copy()
    for i in range(factors.shape[1]):
      towards = np.einsum('pj,pj->p', products[:, i], factors)
      towards = towards - products[:, i, i] * factors[:, i]
      factors[:, i] = _unit(towards, factors[:, i])
    if np.abs(factors - before).max(initial=0.0) < _TOLERANCE:
      break
  energy = np.einsum('pi,pij,pj->p', factors.conj(), products, factors).real
  return factors, energy


def _unit(numbers, otherwise):
  """Complex numbers at size one; where they are zero, `otherwise`."""
  size = np.abs(numbers)
  return np.where(size > 0, numbers / np.where(size > 0, size, 1), otherwise)


def _procrustes(weights, second):
  """Orthogonal [g, H, H]: head i is maps[i] times the mean, nearly."""
  products = _products(weights, second)  # [g, g, H, H]
  g, H = weights.shape[:2]
  best, best_score = None, -np.inf
  for start in range(g + 1):
    maps = np.broadcast_to(np.eye(H), (g, H, H)).copy()
    if start < g:  # all turned towards head `start`
      maps = _nearest_orthogonal(products[:, start])
    score = -np.inf
    for _ in range(_ROUNDS):
      for i in range(g):
        # Sum over the others of W_i C W_j^T maps[j].
        others = sum(products[i, j] @ maps[j] for j in range(g) if j != i)
        maps[i] = _nearest_orthogonal(others)
      before, score = score, _agreement(products, maps)
      if score - before <= _TOLERANCE * abs(score):
        break
    if score > best_score + _TOLERANCE * abs(score):
      best, best_score = maps, score
  return best @ best[0].T


def _agreement(products, maps):
  """The energy of the sum of turned heads."""
  return np.einsum('iab,ijac,jcb->', maps, products, maps, optimize=True)


def _nearest_orthogonal(matrices):
  left, _, right = np.linalg.svd(matrices)
  return left @ right


def _products(weights, second):
  """W_i C W_j^T for each two heads, [g, g, H, H]."""
  return np.einsum('iae,jbe->ijab', weights @ second, weights, optimize=True)


def _plane_products(planes, second):
  """E[z_i conj(z_j)] in each plane, [P, K, K]."""
  moved = (planes @ second).swapaxes(0, 1)  # [P, K, E]
  return moved @ planes.swapaxes(0, 1).conj().swapaxes(-1, -2)


def _inner(weights, second, aligned):
  """Inner products [K, K] of heads, or the largest that turning can reach."""
  K, H, _ = weights.shape
  if not H:
    return np.zeros((K, K))
  products = _products(weights, second)
  if not aligned:
    return np.trace(products, axis1=-2, axis2=-1)
  return np.linalg.svd(products, compute_uv=False).sum(axis=-1)


def _cosines(inner):
  size = np.sqrt(np.diag(inner))
  size = np.where(size > 0, size, 1.0)
  return inner / size[:, None] / size[None, :]
