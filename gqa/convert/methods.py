"""One layer's heads merged by a method of choice.

The table of methods: which merge heads as they are, which turn them first, and
what is possible where queries and keys are normalised.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gqa.config import ModelConfig
from gqa.convert import alignment, grouping, low_rank, merging
from gqa.convert import heads as heads_lib
from gqa.convert.heads import Heads, Merge, Moments

# Methods that merge heads as they are, and those that turn them first.
PLAIN_METHODS = ('mean', 'mean_renorm', 'first', 'random', 'medoid')
METHODS = (*PLAIN_METHODS, 'aligned', 'aligned_renorm', 'low_rank')
GROUPINGS = ('contiguous', 'similarity', 'raw_similarity', 'error')
_EXACT_SUBSETS = 100  # groups whose error is computed rather than their pairs'

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How to convert; see the flags of the command for what each means."""

  method: str = 'low_rank'
  grouping: str = 'contiguous'
  sequential: bool = False
  refit: bool = False
  reconstruct_steps: int = 0
  seed: int = 0

  def __post_init__(self):
    for name, choices in (('method', METHODS), ('grouping', GROUPINGS)):
      if getattr(self, name) not in choices:
        raise ValueError(
          f'{name}={getattr(self, name)!r} is unknown; choose one of {choices}.'
        )

  def check(self, has_text: bool):
    """Raises ValueError if these options need a text and there is none."""
    if has_text:
      return
    for name in ('sequential', 'refit', 'reconstruct_steps'):
      if value := getattr(self, name):
        raise ValueError(
          f'{name}={value} needs a text; give --calibration=FILE.'
        )


def merge_layer(
  attention: dict[str, Any],
  config: ModelConfig,
  num_kv_heads: int,
  options: Options,
  moments: Moments,
  index: int = 0,
) -> tuple[dict[str, Any], Report]:
  """`merge_heads` on the parameters of one layer's attention."""
  heads, report = merge_heads(
    heads_lib.from_params(attention),
    config,
    num_kv_heads,
    options,
    moments,
    index,
  )
  order = np.concatenate(report['groups'])
  attention = heads_lib.to_params(heads, attention)
  return _merge_norms(attention, config, order, num_kv_heads), report


def merge_heads(
  heads: Heads,
  config: ModelConfig,
  num_kv_heads: int,
  options: Options,
  moments: Moments,
  index: int = 0,
) -> tuple[Heads, Report]:
  """Groups and merges the heads of one layer.

  Args:
    heads: of the layer.
    config: of the model.
    num_kv_heads: to be left.
    options: how.
    moments: of the inputs.
    index: of the layer; `random` draws by it.

  Returns:
    Other heads, and how alike the old ones were and how well captured.
  """
  order = choose_order(heads, config, num_kv_heads, options, moments)
  heads = heads_lib.select(heads, order)
  rng = np.random.default_rng((options.seed, index))
  keys, values, key_method = _merges(
    heads, config, num_kv_heads, options.method, moments, rng
  )
  report = {
    'groups': order.reshape(num_kv_heads, -1).tolist(),
    'key_method': key_method,
  }
  for what, similarity in _similarities(heads, config, moments).items():
    report[what] = alignment.within_groups(similarity, num_kv_heads)
  report |= _captured(heads, keys, values, moments)
  return heads_lib.merged(heads, keys, values), report


def choose_order(
  heads: Heads,
  config: ModelConfig,
  num_kv_heads: int,
  options: Options,
  moments: Moments,
) -> np.ndarray:
  """The order of KV heads in which groups are contiguous."""
  K = heads.num_kv_heads
  if options.grouping == 'contiguous' or num_kv_heads in (1, K):
    return grouping.contiguous(K)
  if options.grouping == 'error':
    return _order_by_error(heads, config, num_kv_heads, options, moments)
  aligned = options.method not in PLAIN_METHODS
  aligned = aligned and options.grouping == 'similarity'
  found = _similarities(heads, config, moments)
  suffix = '_aligned' if aligned else ''
  similarity = sum(found[f'{x}_similarity{suffix}'] for x in ('key', 'value'))
  return grouping.by_similarity(similarity, num_kv_heads)


def _order_by_error(heads, config, num_kv_heads, options, moments):
  """By the error of each possible group, or of pairs where those are many."""
  K = heads.num_kv_heads
  size = K // num_kv_heads
  exact = K <= grouping.EXACT_HEADS and (
    grouping.num_subsets(K, num_kv_heads) <= _EXACT_SUBSETS
  )
  members = grouping.subsets(K, size if exact else 2)
  whole_keys = low_rank.key_error(heads, None, moments)
  whole_values = low_rank.value_error(heads, None, moments.second)
  costs = np.empty(len(members))
  for i, chosen in enumerate(members):
    few = heads_lib.select(heads, chosen)
    rng = np.random.default_rng((options.seed, i))
    keys, values, _ = _merges(few, config, 1, options.method, moments, rng)
    costs[i] = low_rank.key_error(few, keys, moments) / max(
      whole_keys, 1e-300
    ) + low_rank.value_error(few, values, moments.second) / max(
      whole_values, 1e-300
    )
  if exact:
    return grouping.by_score(members, -costs, K)
  similarity = np.zeros((K, K))
  similarity[members[:, 0], members[:, 1]] = -costs
  return grouping.by_similarity(similarity + similarity.T, num_kv_heads)


def _merges(
  heads: Heads, config, num_groups, method, moments, rng
) -> tuple[Merge, Merge, str]:
  """Merges of keys and values, and the method that keys were merged by."""
  second, rope_dim = moments.second, config.rope_dim
  if num_groups == heads.num_kv_heads:
    method = 'mean'  # of heads that are alone
  if method == 'medoid':
    found = _similarities(heads, config, moments)
    likeness = found['key_similarity'] + found['value_similarity']
    return *(
      merging.pick(w, num_groups, likeness) for w in (heads.key, heads.value)
    ), method
  plain = {
    'mean': merging.mean,
    'mean_renorm': lambda w, k: merging.mean_renorm(w, k, second),
    'first': merging.first,
    'random': lambda w, k: merging.random(w, k, rng),
  }
  if method in plain:
    merge = plain[method]
    return merge(heads.key, num_groups), merge(heads.value, num_groups), method
  if method == 'low_rank':
    values = low_rank.values(heads, num_groups, moments)
  else:
    values = alignment.align_values(heads.value, num_groups, second)
  if config.qk_norm:
    # Between projection and RoPE there is a norm with a scale of its own for
    # each dimension: no turn of a key leaves the model as it is.
    keys = merging.mean_renorm(heads.key, num_groups, second)
    key_method = 'mean_renorm'
  elif method == 'low_rank':
    keys, key_method = (
      low_rank.keys(heads, num_groups, moments, rope_dim),
      method,
    )
  else:
    keys = alignment.align_keys(heads.key, num_groups, second, rope_dim)
    key_method = method
  if method == 'aligned_renorm':
    values = merging.renormed(values, heads.value, second)
    keys = merging.renormed(keys, heads.key, second)
  return keys, values, key_method


def _similarities(heads, config, moments) -> dict[str, np.ndarray]:
  second, found = moments.second, {}
  for aligned, suffix in ((False, ''), (True, '_aligned')):
    found[f'key_similarity{suffix}'] = alignment.key_similarity(
      heads.key, second, config.rope_dim, aligned and not config.qk_norm
    )
    found[f'value_similarity{suffix}'] = alignment.value_similarity(
      heads.value, second, aligned
    )
  return found


def _captured(heads, keys, values, moments) -> Report:
  """Which part of the energy that readers see is left, at most 1."""
  second = moments.second
  key_energy = low_rank.key_error(heads, None, moments)
  value_energy = low_rank.value_error(heads, None, second)
  key_error = low_rank.key_error(heads, keys, moments)
  value_error = low_rank.value_error(heads, values, second)
  return {
    'key_captured': 1.0 - key_error / max(key_energy, 1e-300),
    'value_captured': 1.0 - value_error / max(value_energy, 1e-300),
  }


def _merge_norms(attention, config, order, num_kv_heads):
  """Norms over all heads have scales for each, which go where heads go."""
  if not config.qk_norm or config.qk_norm_axes == 'head':
    return attention
  H = config.head_dim
  queries, keys = (
    np.asarray(attention[name]['scale'], np.float64).reshape(len(order), -1, H)
    for name in ('query_norm', 'key_norm')
  )
  keys = keys[order].reshape(num_kv_heads, -1, H).mean(axis=1)
  scales = {'query_norm': queries[order], 'key_norm': keys}
  return attention | {
    name: {'scale': scale.reshape(-1).astype(np.float32)}
    for name, scale in scales.items()
  }
