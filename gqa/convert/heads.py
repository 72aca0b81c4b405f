"""A layer's attention weights, head by head, and what leaves them unchanged.

Everything here is numpy in float64 on one layer at a time. Axes:

  N query heads   K KV heads   g KV heads of a group   H head dim   D embed
  E inputs of a projection: D, and one more that is always 1 under biases
  P planes that RoPE rotates: pair (j, j + P) of a head is one complex number

A merge writes KV head i as `maps[i] @ shared[group of i]`, [H, H] times [H, E].
The map of a key goes to the queries that read it, the map of a value to the
output projection, and only the shared heads stay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Heads:
  """Projections of a layer; y = sum over n of out[n].T @ context[n]."""

  query: np.ndarray  # [N, H, E]
  key: np.ndarray  # [K, H, E]
  value: np.ndarray  # [K, H, E]
  out: np.ndarray  # [N, H, D]

  @property
  def num_kv_heads(self) -> int:
    """K."""
    return self.key.shape[0]

  def per_kv_head(self, x: np.ndarray) -> np.ndarray:
    """[N, ...] -> [K, N / K, ...], the query heads of each KV head."""
    return x.reshape(self.num_kv_heads, -1, *x.shape[1:])


@dataclasses.dataclass(frozen=True)
class Merge:
  """KV heads as images of shared ones: head i is maps[i] @ shared[i // g]."""

  shared: np.ndarray  # [k, H, E]
  maps: np.ndarray  # [K, H, H]

  def expanded(self) -> np.ndarray:
    """The KV heads [K, H, E] that the shared ones stand for."""
    g = len(self.maps) // len(self.shared)
    return self.maps @ np.repeat(self.shared, g, axis=0)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of what is cached
class Moments:
  """What is known of the inputs of a layer's projections."""

  mean: np.ndarray  # [E]
  second: np.ndarray  # [E, E], the mean of x x^T
  turns: np.ndarray  # [P], angle that RoPE turns a plane by in a window

  def around_mean(self, share: float) -> np.ndarray:
    """The second moment with only a share of the mean's own square.

    With 0 it is the covariance.
    """
    return self.second - (1.0 - share) * np.outer(self.mean, self.mean)


def from_params(attention: dict[str, Any]) -> Heads:
  """Reads the parameters of one layer's `attention`."""

  def projection(name):
    kernel = np.asarray(attention[name]['kernel'], np.float64)
    kernel = kernel.transpose(1, 2, 0)  # [heads, H, D]
    if 'bias' in attention[name]:
      bias = np.asarray(attention[name]['bias'], np.float64)
      kernel = np.concatenate([kernel, bias[..., None]], axis=-1)
    return kernel

  return Heads(
    query=projection('query'),
    key=projection('key'),
    value=projection('value'),
    out=np.asarray(attention['out']['kernel'], np.float64),
  )


def to_params(heads: Heads, attention: dict[str, Any]) -> dict[str, Any]:
  """Returns `attention` with other projections; norms and out's bias stay."""
  new = dict(attention)
  embed_dim = heads.out.shape[-1]
  for name in ('query', 'key', 'value'):
    weights = getattr(heads, name).astype(np.float32)
    new[name] = {
      'kernel': np.ascontiguousarray(
        weights[..., :embed_dim].transpose(2, 0, 1)
      )
    }
    if weights.shape[-1] > embed_dim:
      new[name]['bias'] = np.ascontiguousarray(weights[..., embed_dim])
  new['out'] = attention['out'] | {'kernel': heads.out.astype(np.float32)}
  return new


def select(heads: Heads, order: np.ndarray) -> Heads:
  """Puts KV heads in an order, or takes some of them only.

  Their query heads and rows of `out` go with them.
  """

  def follow(x):
    return heads.per_kv_head(x)[order].reshape(-1, *x.shape[1:])

  return Heads(
    query=follow(heads.query),
    key=heads.key[order],
    value=heads.value[order],
    out=follow(heads.out),
  )


def merged(heads: Heads, keys: Merge, values: Merge) -> Heads:
  """Keeps the shared heads; queries and out take over the maps."""
  query = _transposed(keys.maps) @ heads.per_kv_head(heads.query)
  out = _transposed(values.maps) @ heads.per_kv_head(heads.out)
  return Heads(
    query=query.reshape(heads.query.shape),
    key=keys.shared,
    value=values.shared,
    out=out.reshape(heads.out.shape),
  )


def _transposed(maps):
  return maps.swapaxes(-1, -2)[:, None]


def to_planes(weights: np.ndarray, rope_dim: int) -> np.ndarray:
  """The rotated part of [..., H, E] as complex [..., P, E]."""
  half = rope_dim // 2
  return weights[..., :half, :] + 1j * weights[..., half:rope_dim, :]


def from_planes(planes: np.ndarray, rest: np.ndarray) -> np.ndarray:
  """Inverse of `to_planes`; rest is the unrotated part [..., H - 2P, E]."""
  return np.concatenate([planes.real, planes.imag, rest], axis=-2)


def plane_maps(factors: np.ndarray, rest: np.ndarray) -> np.ndarray:
  """Matrices that multiply each plane by a complex number.

  Args:
    factors: complex [K, P].
    rest: [K, H - 2P, H - 2P], what is done to the unrotated part.

  Returns:
    [K, H, H].
  """
  K, P = factors.shape
  H = 2 * P + rest.shape[-1]
  maps = np.zeros((K, H, H))
  j = np.arange(P)
  maps[:, j, j] = maps[:, j + P, j + P] = factors.real
  maps[:, j, j + P] = -factors.imag
  maps[:, j + P, j] = factors.imag
  maps[:, 2 * P :, 2 * P :] = rest
  return maps
