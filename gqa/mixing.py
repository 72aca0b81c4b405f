"""Merged KV heads as weighted sums whose weights are trained, then folded away.

Each KV head of the model is a sum of a group of the parent's heads (weighted
grouped-query attention, arXiv 2407.10855). Heads and weights are trained; as
projections and RoPE are linear for each head, the sum of kernels is the sum of
heads, and what is saved is an ordinary model. Weights start at 1/g, where the
model is the mean of its groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gqa.config import ModelConfig

Params = dict[str, Any]
KINDS = ('key', 'value')


@dataclasses.dataclass(frozen=True)
class Mixing:
  """How trained parameters become those of a model.

  With equal configs nothing is mixed, and both trees are the same.

  Attributes:
    model: the model's config.
    heads: the same but for `num_kv_heads`, those that are mixed.
  """

  model: ModelConfig
  heads: ModelConfig

  def __post_init__(self):
    if not self.active:
      return
    if self.model.qk_norm and self.model.qk_norm_axes == 'heads':
      raise ValueError(
        "uptrain.learned_mixing=True is impossible with qk_norm_axes='heads': "
        'the norm is over all heads, so a sum of heads is not a head; set it '
        'to False.'
      )

  @property
  def active(self) -> bool:
    """Whether any layer has heads to mix."""
    return self.model.kv_heads != self.heads.kv_heads

  @property
  def mixed_layers(self) -> list[tuple[str, int, int]]:
    """(name, KV heads of the model, KV heads that are mixed) of each."""
    counts = zip(self.model.kv_heads, self.heads.kv_heads, strict=True)
    return [(f'layer_{i}', k, K) for i, (k, K) in enumerate(counts) if k != K]

  def with_weights(self, params: Params) -> Params:
    """Adds weights of 1/g to the parameters of `heads`."""
    params = dict(params)
    for name, k, K in self.mixed_layers:
      weights = {
        f'{kind}_mix': {'scale': jnp.full((K,), k / K, jnp.float32)}
        for kind in KINDS
      }
      attention = params[name]['attention'] | weights
      params[name] = params[name] | {'attention': attention}
    return params

  def fold(self, params: Params) -> Params:
    """The parameters of `model` that trained ones stand for."""
    params = dict(params)
    for name, k, _ in self.mixed_layers:
      attention = dict(params[name]['attention'])
      for kind in KINDS:
        weights = attention.pop(f'{kind}_mix')['scale']
        attention[kind] = {
          leaf: _mix(x, weights, k) for leaf, x in attention[kind].items()
        }
      params[name] = params[name] | {'attention': attention}
    return params

  def start(
    self, params: Params, parent: Params, orders: Sequence[Sequence[int]]
  ) -> Params:
    """Trained parameters that stand for `params`, the mean of its parent's.

    Args:
      params: of the model.
      parent: of the model before conversion; its keys and values are taken.
      orders: for each layer the parent's KV heads, group after group.
    """
    params = dict(params)
    for (name, _, _), order in zip(self.mixed_layers, orders, strict=True):
      index = np.asarray(order)
      old = parent[name]['attention']
      heads = {
        kind: jax.tree.map(lambda x, i=index: jnp.take(x, i, -2), old[kind])
        for kind in KINDS
      }
      attention = params[name]['attention'] | heads
      params[name] = params[name] | {'attention': attention}
    return self.with_weights(params)

  def pack(self, state: Any, params: Params) -> Any:
    """A train state as it is saved: `params` are those of the model.

    What is trained lies with the optimizer's state, so that a checkpoint at
    any step is an ordinary one.

    Args:
      state: the train state.
      params: what its parameters fold to.
    """
    if not self.active:
      return state
    kept = {'mixed': state.params, 'optimizer': state.opt_state}
    return state.replace(params=params, opt_state=kept)

  def unpack(self, state: Any) -> Any:
    """Inverse of `pack`."""
    if not self.active:
      return state
    kept = state.opt_state
    return state.replace(params=kept['mixed'], opt_state=kept['optimizer'])


def _mix(x, weights, num_groups):
  """[..., K, H] and [K] -> [..., k, H]."""
  *leading, K, H = x.shape
  grouped = x.reshape(*leading, num_groups, K // num_groups, H)
  return jnp.einsum(
    '...kgH,kg->...kH', grouped, weights.reshape(num_groups, -1)
  )
