"""How positions rotate, and which of them a layer sees, in a config.json.

Versions of transformers differ in where they keep it; all are read, and the
form that all of them read is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gqa.interop.fields import Fields

FULL, SLIDING = 'full_attention', 'sliding_attention'
_SCALING_FIELDS = {
  'default': set(),
  'linear': {'factor'},
  'llama3': {
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  },
  'yarn': {
    'factor',
    'attention_factor',
    'beta_fast',
    'beta_slow',
    'mscale',
    'mscale_all_dim',
    'original_max_position_embeddings',
    'truncate',
  },
}


def read_rope(
  fields: Fields,
  max_len: int,
  *,
  theta: float = 10_000.0,
  fraction: float = 1.0,
  theta_name: str = 'rope_theta',
  fraction_name: str = 'partial_rotary_factor',
) -> dict[str, Any]:
  """Reads how positions rotate, as fields of `ModelConfig`.

  Args:
    fields: of the config.json, in the form of any version of transformers.
    max_len: of the model.
    theta: the family's default.
    fraction: the family's default.
    theta_name: of the field of older versions.
    fraction_name: of the field of older versions.
  """
  scaling = fields.take('rope_scaling', dict, None)
  parameters = fields.take('rope_parameters', dict, None)
  if scaling and parameters:
    raise ValueError(
      'config.json has both rope_scaling and rope_parameters; take out the one '
      'that the model was not trained with.'
    )
  given = dict(scaling or parameters or {})
  theta = fields.take(theta_name, float, theta)
  fraction = fields.take(fraction_name, float, fraction)
  theta = _number(given, 'rope_theta', theta)
  fraction = _number(given, 'partial_rotary_factor', fraction)
  return {
    'rope_theta': theta,
    'rope_fraction': fraction,
    **read_scaling(given, max_len),
  }


def read_scaling(given: dict[str, Any], max_len: int) -> dict[str, Any]:
  """Reads what is left of a rope_scaling as fields of `ModelConfig`."""
  kinds = {given.pop('rope_type', None), given.pop('type', None)} - {None}
  kind = kinds.pop() if kinds else 'default'
  if kinds or kind not in _SCALING_FIELDS:
    raise ValueError(
      f'config.json scales RoPE by {kind!r}, which is not supported; only '
      f'{", ".join(map(repr, _SCALING_FIELDS))} are.'
    )
  for name in given:
    if given[name] is not None and name not in _SCALING_FIELDS[kind]:
      raise ValueError(
        f'config.json has {name}={given[name]!r} in a RoPE scaling of the kind '
        f'{kind!r}, where it is not known.'
      )
  if kind == 'default':
    return {}
  factor = _number(given, 'factor')
  if kind == 'linear':
    return {'rope_scaling': kind, 'rope_factor': factor}
  original = int(_number(given, 'original_max_position_embeddings', max_len))
  common = {
    'rope_scaling': kind,
    'rope_factor': factor,
    'rope_original_len': original,
  }
  if kind == 'llama3':
    return common | {
      'rope_slow_turns': _number(given, 'low_freq_factor'),
      'rope_fast_turns': _number(given, 'high_freq_factor'),
    }
  if given.get('truncate') not in (None, True):
    raise ValueError(
      f'config.json has truncate={given["truncate"]!r} in its RoPE scaling, '
      'which is not supported; only True is.'
    )
  return common | {
    'rope_slow_turns': _number(given, 'beta_slow', 1.0),
    'rope_fast_turns': _number(given, 'beta_fast', 32.0),
    'rope_magnitude': _yarn_magnitude(given, factor),
  }


def write_rope(
  config: Any,
  *,
  theta_name: str = 'rope_theta',
  fraction_name: str = 'partial_rotary_factor',
) -> dict[str, Any]:
  """Undoes `read_rope`, in the form that all versions of transformers read."""
  written: dict[str, Any] = {
    theta_name: config.rope_theta,
    'rope_scaling': write_scaling(config),
  }
  if config.rope_fraction != 1 or fraction_name != 'partial_rotary_factor':
    written[fraction_name] = config.rope_fraction
  return written


def write_scaling(config: Any) -> dict[str, Any] | None:
  """Undoes `read_scaling`."""
  kind = config.rope_scaling
  if kind == 'none':
    return None
  written = {'rope_type': kind, 'factor': config.rope_factor}
  if kind == 'linear':
    return written
  written['original_max_position_embeddings'] = config.rope_original_len
  if kind == 'llama3':
    return written | {
      'low_freq_factor': config.rope_slow_turns,
      'high_freq_factor': config.rope_fast_turns,
    }
  return written | {
    'beta_slow': config.rope_slow_turns,
    'beta_fast': config.rope_fast_turns,
    'attention_factor': config.rope_magnitude,
  }


def read_windows(
  fields: Fields,
  num_layers: int,
  window: int | None,
  default: Sequence[str],
) -> dict[str, Any]:
  """Reads which layers have a sliding window, as fields of `ModelConfig`.

  Args:
    fields: of the config.json, with or without layer_types.
    num_layers: of the model.
    window: tokens.
    default: the layer_types that the family has without the field.
  """
  kinds = fields.take('layer_types', list, list(default))
  if len(kinds) != num_layers or any(k not in (FULL, SLIDING) for k in kinds):
    raise ValueError(
      f'config.json has layer_types={kinds!r}, which must be {num_layers} '
      f'times {FULL!r} or {SLIDING!r}.'
    )
  full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
  if len(full) == num_layers:
    return {}
  if window is None:
    raise ValueError(
      'config.json has layers with sliding attention, but no sliding_window.'
    )
  return {'sliding_window': window, 'global_layers': full}


def write_windows(config: Any) -> dict[str, Any]:
  """Undoes `read_windows`."""
  return {
    'sliding_window': config.sliding_window,
    'layer_types': [FULL if w is None else SLIDING for w in config.windows],
  }


def _number(given: dict[str, Any], name: str, default: Any = None) -> float:
  value = given.pop(name, None)
  value = default if value is None else value
  if type(value) not in (int, float) or not math.isfinite(value):
    raise ValueError(
      f'config.json has {name}={value!r} for RoPE, which must be a number.'
    )
  return float(value)


def _yarn_magnitude(given: dict[str, Any], factor: float) -> float:
  """The attention factor, as given or as Peng et al. 2023 advise it."""
  if given.get('attention_factor') is not None:
    return _number(given, 'attention_factor')

  def advised(weight):
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

  scale, scale_all = given.get('mscale'), given.get('mscale_all_dim')
  if scale and scale_all:
    weights = (_number(given, name) for name in ('mscale', 'mscale_all_dim'))
    return advised(next(weights)) / advised(next(weights))
  return advised(1.0)
