"""Saved arrays against expected ones: the same in tree, shape and type.

What differs is listed with the config fields that are behind it, for an array
of another shape means a model of another config.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Leaves = Mapping[tuple[str, ...], Any]  # with shape and dtype, by path

_SHOWN = 5  # differences listed in an error
# The config field behind each axis of a parameter, by the end of its path.
_AXIS_FIELDS = (
  (r'^embed/embedding$', ('vocab_size', 'embed_dim')),
  (r'position_embed/embedding$', ('max_len', 'embed_dim')),
  (r'head/kernel$', ('embed_dim', 'vocab_size')),
  (r'head/bias$', ('vocab_size',)),
  (r'query/kernel$', ('embed_dim', 'num_heads', 'head_dim')),
  (r'(key|value)/kernel$', ('embed_dim', 'num_kv_heads', 'head_dim')),
  (r'out/kernel$', ('num_heads', 'head_dim', 'embed_dim')),
  (r'(gate|up)/kernel$', ('embed_dim', 'mlp_dim')),
  (r'down/kernel$', ('mlp_dim', 'embed_dim')),
)
# The config field behind a parameter that only one side has.
_PRESENCE_FIELDS = (
  (r'^position_embed/', 'position'),
  (r'^head/bias$', 'head_bias'),
  (r'^head/', 'tie_embeddings'),
  (r'(query|key)_norm/', 'qk_norm'),
  (r'(query|key|value)/bias$', 'qkv_bias'),
  (r'out/bias$', 'out_bias'),
  (r'mlp/\w+/bias$', 'mlp_bias'),
  (r'mlp/gate/', 'mlp'),
  (r'norm/bias$', 'norm'),
  (r'post_norm/', 'norm_position'),
  (r'mlp_norm/', 'shared_norm'),
  (r'attention_norm/', 'norm_position'),
)


def check_match(directory: pathlib.Path, items: Mapping[str, tuple]):
  """Compare saved with expected leaves, and list what differs."""
  lines, hints = [], {}
  for item, (saved, expected) in items.items():
    for path in dict.fromkeys([*expected, *saved]):
      old, new = saved.get(path), expected.get(path)
      if _described(old) != _described(new):
        name = '/'.join(path)
        lines.append(
          f'{item}/{name}: saved {_described(old)}, expected {_described(new)}'
        )
        if item == 'params':
          hints |= _hints(name, old, new)
  if not lines:
    return
  saved, expected = items['params']
  if _num_layers(saved) != _num_layers(expected):
    hints = {
      'num_layers': (_num_layers(saved), _num_layers(expected)),
      **{name: sizes for name, sizes in hints.items() if sizes},
    }
  more = f' and {len(lines) - _SHOWN} more' if len(lines) > _SHOWN else ''
  shown = [
    'model.{}: saved {}, expected {}'.format(name, *sizes)
    if sizes
    else f'model.{name}'
    for name, sizes in hints.items()
  ] or ['model' if lines[0].startswith('params') else 'optim']
  raise ValueError(
    f'{directory} does not fit, {len(lines)} arrays differ: '
    f'{"; ".join(lines[:_SHOWN])}{more}. Look at {"; ".join(shown)}.'
  )


def is_wider(expected: Any, saved: Any) -> bool:
  """Tell whether only the type differs, and takes every number as it is."""
  return (
    expected is not None
    and expected.shape == saved.shape
    and expected.dtype == np.float32
    and saved.dtype.name in ('bfloat16', 'float16')
  )


def _described(leaf: Any) -> str:
  if leaf is None:
    return 'nothing'
  return f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'


def _num_layers(leaves: Leaves) -> int:
  return len({path[0] for path in leaves if path[0].startswith('layer_')})


def _hints(name: str, old: Any, new: Any) -> dict[str, tuple[int, int] | None]:
  """Name the config fields behind one difference, with sizes if it has any."""
  if old is None or new is None:
    fields = [f for end, f in _PRESENCE_FIELDS if re.search(end, name)]
    return dict.fromkeys(fields[:1])
  fields = [f for end, f in _AXIS_FIELDS if re.search(end, name)]
  if not fields or len(old.shape) != len(new.shape):
    return {}
  sizes = zip(fields[0], old.shape, new.shape, strict=False)
  return {field: (a, b) for field, a, b in sizes if a != b}
