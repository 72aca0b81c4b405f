"""Which layers keep more KV heads when the cache may only be so large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gqa import cost
from gqa.config import ModelConfig


def choose(
  config: ModelConfig,
  damages: Sequence[Mapping[int, float]],
  bytes_per_token: int,
) -> tuple[int, ...]:
  """The numbers of KV heads with the least sum of damages that fit.

  Args:
    config: of the model.
    damages: for each layer, damage by number of KV heads.
    bytes_per_token: the most that a token may take in the cache of all layers,
      in the model's dtype.

  Raises:
    ValueError: not even the fewest heads fit.
  """
  size = head_bytes(config)
  most = bytes_per_token // size
  least = sum(min(options) for options in damages)
  if least > most:
    raise ValueError(
      f'budget={bytes_per_token} bytes per token is less than the fewest KV '
      f'heads take; raise it to at least {least * size}.'
    )
  # Layer after layer: heads spent so far -> (damage, choices).
  states = {0: (0.0, ())}
  for options in damages:
    reached: dict[int, tuple[float, tuple[int, ...]]] = {}
    for spent, (damage, choices) in states.items():
      for heads, more in options.items():
        total = spent + heads
        best = reached.get(total, (math.inf,))[0]
        if total <= most and damage + more < best:
          reached[total] = (damage + more, (*choices, heads))
    states = reached
  return min(states.values())[1]


def head_bytes(config: ModelConfig) -> int:
  """Bytes of one head's key and value of a token in the cache of a layer."""
  return 2 * config.head_dim * cost.ITEMSIZE[config.dtype]
