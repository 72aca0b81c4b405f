"""Merging KV heads as they are: the paper's mean, first and random, and two.

A method takes weights [K, H, E] of keys or values and returns a `Merge`; heads
are in the order of their groups.
"""

from __future__ import annotations

import numpy as np

from gqa.convert.heads import Merge


def mean(weights: np.ndarray, num_groups: int) -> Merge:
  """The mean of each group (Ainslie et al. 2023, section 2.1)."""
  return _as_they_are(_grouped(weights, num_groups).mean(axis=1), weights)


def mean_renorm(
  weights: np.ndarray, num_groups: int, second: np.ndarray
) -> Merge:
  """The mean, scaled to the energy that a head of the group has on average.

  The mean of g unrelated heads is sqrt(g) times too small.
  """
  return renormed(mean(weights, num_groups), weights, second)


def first(weights: np.ndarray, num_groups: int) -> Merge:
  """The first head of each group."""
  return _as_they_are(_grouped(weights, num_groups)[:, 0], weights)


def random(
  weights: np.ndarray, num_groups: int, rng: np.random.Generator
) -> Merge:
  """New heads, drawn as a new model's are, without biases."""
  _, H, E = weights.shape
  shared = rng.normal(size=(num_groups, H, E)) * E**-0.5
  return _as_they_are(shared, weights)


def pick(weights: np.ndarray, num_groups: int, similarity: np.ndarray) -> Merge:
  """The medoid of each group: the head that is most similar to the others.

  Args:
    weights: [K, H, E].
    num_groups: k.
    similarity: [K, K], the same for keys and values so that both come from one
      head.
  """
  K = len(weights)
  group = np.arange(K) // (K // num_groups)
  inside = group[:, None] == group[None, :]
  totals = np.where(inside, similarity, 0.0).sum(axis=1).reshape(num_groups, -1)
  chosen = totals.argmax(axis=1) + np.arange(num_groups) * (K // num_groups)
  return _as_they_are(weights[chosen], weights)


def renormed(merge: Merge, weights: np.ndarray, second: np.ndarray) -> Merge:
  """Scales shared heads to the mean energy of the heads that they replace."""
  wanted = _grouped(energies(weights, second), len(merge.shared)).mean(axis=1)
  found = energies(merge.shared, second)
  scale = np.sqrt(wanted / np.where(found > 0, found, 1.0))
  scale = np.where(found > 0, scale, 1.0)
  return Merge(merge.shared * scale[:, None, None], merge.maps)


def energies(weights: np.ndarray, second: np.ndarray) -> np.ndarray:
  """The mean of |W x|^2 for each head [..., H, E] of weights."""
  return ((weights @ second) * weights).sum(axis=(-1, -2))


def _grouped(x: np.ndarray, num_groups: int) -> np.ndarray:
  return x.reshape(num_groups, len(x) // num_groups, *x.shape[1:])


def _as_they_are(shared: np.ndarray, weights: np.ndarray) -> Merge:
  K, H, _ = weights.shape
  return Merge(shared, np.broadcast_to(np.eye(H), (K, H, H)))
