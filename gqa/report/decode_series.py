"""The rows behind the plots and tables of decoding."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from gqa import roofline
from gqa.cost import Setting
from gqa.devices import Device
from gqa.report import recipes
from gqa.report.join import Data, Timing
from gqa.report.recipes import heads_order

Rows = list[dict[str, Any]]


def times(data: Data) -> Rows:
  """Time of a step, measured and predicted, with what the machine can do."""
  rows = []
  for timing in [*data.timings, *data.peers]:
    row = timing.row
    flops, seconds = timing.get('step_flops'), row['step_seconds']
    rows.append(
      {
        'subject': timing.title,
        'system': row['system'],
        'kv_heads': timing.heads,
        **time_fields(timing),
        'tokens_per_second': row['tokens_per_second'],
        'flops_per_byte': timing.get('flops_per_byte'),
        'flops_per_second': flops and flops / seconds,
        'bandwidth': timing.get('bandwidth'),
        'kv_bandwidth': timing.get('kv_bandwidth'),
        'read_bandwidth': timing.get('read_bandwidth'),
        'matrix_flops': timing.get('matrix_flops'),
      }
    )
  return rows


def throughput(data: Data) -> Rows:
  """Tokens per second against batch, and the batch that memory refuses."""
  rows = []
  for key, group in _by_line(data.timings).items():
    sizes = {t.row['batch_size'] for t in group}
    refused = [
      t.row['batch_size']
      for t in data.refused
      if _line_key(t) == key and t.get('obstacle') == 'memory'
    ]
    if len(sizes) < 2 and not refused:
      continue
    for timing in group:
      row = timing.row
      size = row['batch_size']
      rows.append(
        {
          'subject': timing.title,
          'kv_heads': timing.heads,
          'context': row['context'],
          'batch_size': size,
          'tokens_per_second': row['tokens_per_second'],
          'tokens_per_second_low': _over(size, row, 'step_seconds_high'),
          'tokens_per_second_high': _over(size, row, 'step_seconds_low'),
          'refused_batch': min(refused, default=None),
          'largest': size == max(sizes) and bool(refused),
          'runs': timing.benchmark,
        }
      )
  return sorted(
    rows, key=lambda r: (heads_order(r['kv_heads']), r['batch_size'])
  )


def positions(data: Data) -> Rows:
  """Seconds of each token with a cache and without."""
  rows = []
  for name, result in data.found.positions:
    work = result.get('work') or {}
    first = work.get('prompt_len', 0)
    config = work.get('config') or {}
    for way in ('cached', 'uncached'):
      total = 0.0
      for i, seconds in enumerate(result.get(f'{way}_token_seconds', [])):
        total += seconds
        rows.append(
          {
            'way': way,
            'position': first + i,
            'ms': 1e3 * seconds,
            'total_seconds': total,
            'num_layers': config.get('num_layers'),
            'embed_dim': config.get('embed_dim'),
            'dtype': config.get('dtype'),
            'runs': name,
          }
        )
  return rows


def contexts(data: Data) -> Rows:
  """Time of a step against the tokens in the cache."""
  rows = []
  for group in _by_line(data.timings, 'batch_size').values():
    if len({t.row['context'] for t in group}) > 1:
      rows += [
        {'subject': t.title, 'kv_heads': t.heads, **time_fields(t)}
        for t in group
      ]
  return sorted(rows, key=lambda r: (heads_order(r['kv_heads']), r['context']))


def speedups(data: Data) -> Rows:
  """Time of the multi-head model over that of fewer heads, where both ran."""
  rows, timings = [], collections.defaultdict(list)
  for timing in data.timings:
    if timing.model is not None:
      timings[timing.subject, timing.setting].append(timing)
  for group in timings.values():
    whole = [t for t in group if recipes.multi_head(t.model)]
    if not whole:
      continue
    base = whole[-1]
    for t in group:
      size, context = t.row['batch_size'], t.row['context']
      setting = Setting(
        batch_size=size,
        context=context,
        kind=t.row['cache_kind'],
        weight_dtype=t.row['weights_dtype'],
        cache_dtype=_cache_dtype(t),
      )
      predicted = _predicted(base, setting) / _predicted(t, setting)
      rows.append(
        {
          'subject': t.title,
          'kv_heads': t.heads,
          'batch_size': size,
          'context': context,
          'tokens': size * context,
          'speedup': base.row['step_seconds'] / t.row['step_seconds'],
          'predicted_speedup': predicted,
          'balance_tokens': roofline.balance_tokens(t.model, setting),
          'runs': t.benchmark,
        }
      )
  return rows


@dataclasses.dataclass(frozen=True)
class Map:
  """Predicted speedups over batch x context and KV heads."""

  heads: Sequence[int]
  tokens: Sequence[float]
  speedup: Sequence[Sequence[float]]  # [heads, tokens]
  balance: Sequence[float]  # of each heads, in tokens


def crossover(base: Timing, tokens: Sequence[float]) -> Map:
  """The map of one model on the machine whose limits its row has.

  A step of many short sequences reads what one of few long ones does, so a
  number of tokens is predicted as one sequence of them.
  """
  config = base.model
  counts = [
    k for k in range(1, config.num_heads + 1) if not config.num_heads % k
  ]
  grid, balance = [], []
  settings = [_setting(base, int(n)) for n in tokens]
  whole = [_predicted(base, s, config.num_heads) for s in settings]
  for k in counts:
    times = [_predicted(base, s, k) for s in settings]
    grid.append([w / t for w, t in zip(whole, times, strict=True)])
    model = dataclasses.replace(config, num_kv_heads=k)
    balance.append(roofline.balance_tokens(model, settings[0]))
  return Map(counts, tokens, grid, balance)


def time_fields(timing: Timing) -> dict[str, Any]:
  """Setting and time of a step in ms, with what it was predicted to be."""
  row = timing.row
  scaled = lambda name: None if row.get(name) is None else 1e3 * row[name]
  return {
    'batch_size': row['batch_size'],
    'context': row['context'],
    'cache_len': row.get('cache_len') or 0,
    'cache_kind': row.get('cache_kind'),
    'dtype': row.get('dtype'),
    'weights_dtype': row.get('weights_dtype'),
    'cache_dtype': row.get('cache_dtype'),
    'ms': scaled('step_seconds'),
    'ms_low': scaled('step_seconds_low'),
    'ms_high': scaled('step_seconds_high'),
    'predicted_ms': scaled('predicted_step_seconds'),
    'benchmark': timing.benchmark,
    'runs': timing.benchmark,
  }


def _setting(timing, context):
  return Setting(
    batch_size=1,
    context=context,
    kind=timing.row['cache_kind'],
    weight_dtype=timing.row['weights_dtype'],
    cache_dtype=_cache_dtype(timing),
  )


def _cache_dtype(timing):
  kind = timing.row['cache_kind']
  return None if kind == 'int8' else timing.row['cache_dtype']


def _predicted(timing: Timing, setting: Setting, num_kv_heads=None) -> float:
  """Seconds of the bytes of a step on the machine of a row.

  A batch shares the weights and not the cache, and its products are few: only
  bytes count here.
  """
  model = timing.model
  if num_kv_heads is not None:
    model = dataclasses.replace(model, num_kv_heads=num_kv_heads)
  rate = timing.row['read_bandwidth']
  device = Device('measured', 0.0, rate, math.inf, math.inf)
  return roofline.step_time(model, device, setting)


def _line_key(timing: Timing, other: str = 'context') -> tuple:
  return timing.subject, timing.heads, timing.row[other]


def _by_line(timings: Iterable[Timing], other: str = 'context'):
  """Timings that differ in one of batch and context, under the rest."""
  lines = collections.defaultdict(list)
  for timing in timings:
    lines[_line_key(timing, other)].append(timing)
  return lines


def _over(number, row, name):
  return number / row[name] if row.get(name) else None
