"""Which KV heads become one.

Groups have equal sizes, so that the result is an ordinary grouped model once
heads are put in the order of their groups. A partition is that order: [K] head
indices, g after g for each group.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

EXACT_HEADS = 16  # up to so many, no partition is better than the one found
_RESTARTS = 32


def contiguous(num_kv_heads: int) -> np.ndarray:
  """The order that leaves every head where it is."""
  return np.arange(num_kv_heads)


def by_similarity(similarity: np.ndarray, num_groups: int) -> np.ndarray:
  """The partition with the largest sum of similarities within groups.

  Exact for up to `EXACT_HEADS` heads; else the best of several descents by
  swaps, the same in every call.

  Args:
    similarity: symmetric [K, K]; the diagonal plays no part.
    num_groups: divides K.
  """
  K = len(similarity)
  size = K // num_groups
  if size == 1:
    return contiguous(K)
  if K > EXACT_HEADS:
    return _by_swaps(similarity, size)
  members = subsets(K, size)
  pairs = np.array(list(itertools.combinations(range(size), 2)))
  scores = similarity[members[:, pairs[:, 0]], members[:, pairs[:, 1]]]
  return by_score(members, scores.sum(axis=1), K)


def subsets(num_kv_heads: int, size: int) -> np.ndarray:
  """All sets of `size` heads, [sets, size] ascending."""
  sets = itertools.combinations(range(num_kv_heads), size)
  return np.array(list(sets), np.int64).reshape(-1, size)


def num_subsets(num_kv_heads: int, num_groups: int) -> int:
  """How many `subsets` of a group's size there are."""
  return math.comb(num_kv_heads, num_kv_heads // num_groups)


def by_score(
  members: np.ndarray, scores: np.ndarray, num_kv_heads: int
) -> np.ndarray:
  """The partition into some of `members` with the largest sum of scores.

  Dynamic programming over the sets of heads that are placed; the next group
  always holds the first head that is not.

  Args:
    members: [sets, g], as `subsets` returns.
    scores: [sets].
    num_kv_heads: K, which g divides.
  """
  masks = (1 << members).sum(axis=1)
  of_first = [np.flatnonzero(members[:, 0] == i) for i in range(num_kv_heads)]
  states = {0: (0.0, ())}  # placed heads -> (score, groups)
  for _ in range(num_kv_heads // members.shape[1]):
    reached: dict[int, tuple[float, tuple[int, ...]]] = {}
    for placed, (score, groups) in states.items():
      first = (~placed & (placed + 1)).bit_length() - 1
      candidates = of_first[first]
      candidates = candidates[masks[candidates] & placed == 0]
      for i, mask, gain in zip(
        candidates.tolist(),
        masks[candidates].tolist(),
        scores[candidates].tolist(),
        strict=True,
      ):
        if gain + score > reached.get(placed | mask, (-math.inf,))[0]:
          reached[placed | mask] = (gain + score, (*groups, i))
    states = reached
  ((_, groups),) = states.values()
  return members[list(groups)].reshape(-1)


def _by_swaps(similarity: np.ndarray, size: int) -> np.ndarray:
  """Swaps two heads of different groups while that helps, from many starts."""
  K = len(similarity)
  similarity = similarity * (1.0 - np.eye(K))
  rng = np.random.default_rng(0)
  best, best_score = None, -math.inf
  for restart in range(_RESTARTS):
    start = _greedy(similarity, size) if restart == 0 else rng.permutation(K)
    group = np.empty(K, np.int64)  # of each head
    group[start] = np.arange(K) // size
    while True:
      inside = np.eye(K // size)[group]  # [K, groups]
      to_group = similarity @ inside  # [K, groups]
      own = to_group[np.arange(K), group]
      # Of swapping i with j: each leaves its group for the other's place.
      gain = to_group[:, group] - own[:, None]
      gain = gain + gain.T - 2.0 * similarity
      gain[group[:, None] == group[None, :]] = -math.inf
      i, j = np.unravel_index(gain.argmax(), gain.shape)
      if gain[i, j] <= 1e-12:
        break
      group[[i, j]] = group[[j, i]]
    score = own.sum()
    if score > best_score + 1e-12:
      best, best_score = group, score
  first = [np.flatnonzero(best == i)[0] for i in range(K // size)]
  return np.concatenate(
    [np.flatnonzero(best == best[i]) for i in sorted(first)]
  )


def _greedy(similarity: np.ndarray, size: int) -> np.ndarray:
  """Fills a group after another with what is most similar to it."""
  left = list(range(len(similarity)))
  order = []
  while left:
    group = [left.pop(0)]
    while len(group) < size:
      sums = similarity[np.ix_(left, group)].sum(axis=1)
      group.append(left.pop(int(sums.argmax())))
    order += sorted(group)
  return np.array(order)
