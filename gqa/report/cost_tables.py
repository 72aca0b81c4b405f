"""Tables of cost: bytes, throughput, and what is claimed about both."""

from __future__ import annotations

import collections

from gqa import claims, cost
from gqa.config import divisors
from gqa.cost import Setting
from gqa.report import decode_series
from gqa.report.join import Data
from gqa.report.recipes import heads_order
from gqa.report.table import Table, number

_TENSOR_PARALLEL = (1, 2, 4, 8)


def cache_bytes(data: Data) -> Table:
  """T5: bytes of caches."""
  rows = []
  for timing in [*data.timings, *data.peers]:
    row = timing.row
    measured, formula = (
      row.get('cache_bytes'),
      timing.get('cache_bytes_by_formula'),
    )
    if measured is None or (formula is None and timing.model is None):
      continue
    line = {
      'subject': timing.title,
      'system': row['system'],
      'kv_heads': timing.heads,
      'batch_size': row['batch_size'],
      'context': row['context'],
      'cache_kind': row.get('cache_kind'),
      'measured_bytes': measured,
      'predicted_bytes': formula,
      'difference': None if formula is None else measured - formula,
    }
    if timing.model is not None and row['system'] == 'gqa':
      for devices in _TENSOR_PARALLEL:
        if devices in divisors(timing.model.num_heads):
          setting = Setting(
            batch_size=row['batch_size'],
            context=_slots(row),
            kind=row['cache_kind'],
            cache_dtype=None
            if row['cache_kind'] == 'int8'
            else row['cache_dtype'],
            tensor_parallel=devices,
          )
          line[f'device_bytes_{devices}'] = cost.device_cache_bytes(
            timing.model, setting
          )
    rows.append(line | {'runs': timing.benchmark})
  columns = [
    ('model', lambda r: r['subject']),
    ('system', lambda r: r['system']),
    ('KV heads', lambda r: r['kv_heads']),
    ('batch', lambda r: f'{r["batch_size"]:,}'),
    ('context', lambda r: f'{r["context"]:,}'),
    ('measured bytes', number('measured_bytes', ',')),
    ('predicted', number('predicted_bytes', ',')),
    ('difference', number('difference', '+,')),
  ]
  for devices in _TENSOR_PARALLEL[1:]:
    columns.append(
      (
        f'each of {devices} devices, predicted',
        number(f'device_bytes_{devices}', ','),
      )
    )
  return Table(
    'T5',
    'Bytes of the cache: measured, predicted, and on each device',
    columns,
    rows,
    'rows of python -m gqa.benchmark',
    'On several devices KV heads are split where that divides them, and held '
    'by each device where it does not.',
  )


def _slots(row):
  """Tokens that a cache had room for; rows of early versions do not say."""
  needed = row['context'] + row.get('steps', 0)
  return row.get('slots') or row.get('cache_len') or needed


def audit() -> Table:
  """T6: what is claimed elsewhere."""
  names = ('claim', 'source', 'setting', 'theirs', 'ours', 'verdict')
  rows = [{name: row[name] for name in names} for row in claims.audit()]
  columns = [(name, lambda r, name=name: r[name]) for name in names]
  return Table(
    'T6',
    'Well-known claims, computed anew',
    columns,
    rows,
    note='Counted and predicted (python -m gqa.plan --audit), never measured.',
  )


def throughput(data: Data) -> Table:
  """T7: at an equal batch, and at the largest."""
  lines = collections.defaultdict(dict)
  for row in decode_series.throughput(data):
    line = lines[row['subject'], row['context']]
    line.setdefault(row['kv_heads'], {})[row['batch_size']] = row
  rows = []
  for (subject, context), line in lines.items():
    common = set.intersection(*(set(sizes) for sizes in line.values()))
    equal = max(common, default=None)
    for heads in sorted(line, key=heads_order):
      sizes = line[heads]
      most = max(sizes)
      rows.append(
        {
          'subject': subject,
          'context': context,
          'kv_heads': heads,
          'equal_batch': equal,
          'equal_tokens_per_second': equal
          and sizes[equal]['tokens_per_second'],
          'largest_batch': most,
          'largest_tokens_per_second': sizes[most]['tokens_per_second'],
          'memory_ended': sizes[most]['largest'],
          'runs': sizes[most]['runs'],
        }
      )
  return Table(
    'T7',
    'Throughput at an equal batch, and at the largest',
    [
      ('model', lambda r: r['subject']),
      ('context', lambda r: f'{r["context"]:,}'),
      ('KV heads', lambda r: r['kv_heads']),
      ('equal batch', number('equal_batch', ',')),
      ('tokens/s there', number('equal_tokens_per_second', ',.1f')),
      ('largest batch', number('largest_batch', ',')),
      ('tokens/s there', number('largest_tokens_per_second', ',.1f')),
      ('ended by memory', lambda r: 'yes' if r['memory_ended'] else 'no'),
    ],
    rows,
    'rows of one model and context with several batches '
    '(--config.grid.fill_memory)',
    'The equal batch is the largest that all of them were measured with. '
    'Where memory did not end it, the largest is the largest that was tried.',
  )


def training(data: Data) -> Table:
  """T9: speed of training beside other systems."""
  rows = [row | {'runs': name} for name, row in data.found.training_speeds]
  return Table(
    'T9',
    'Speed of training beside other systems',
    [
      ('shape', lambda r: r['shape']),
      ('run', lambda r: str(r.get('run', '-'))),
      ('system', lambda r: r['system']),
      ('tokens/s', number('tokens_per_second', ',.0f')),
      ('lowest', number('low', ',.0f')),
      ('highest', number('high', ',.0f')),
      ('share of the peak', number('share_of_float32_peak', '.0%')),
      ('machine', lambda r: r.get('machine', '-')),
    ],
    rows,
    'lines of experiments/training_speed.py',
    'Only numbers of one run compare. The peak is that of float32 matrices.',
  )


def decoding(data: Data) -> Table:
  """T8: every row."""
  rows = [row | {'status': 'measured'} for row in decode_series.times(data)]
  for timing in data.refused:
    rows.append(
      {
        'subject': timing.title,
        'system': timing.row['system'],
        'kv_heads': timing.heads,
        'batch_size': timing.row['batch_size'],
        'context': timing.row['context'],
        'status': f'{timing.row["status"]}: {timing.get("reason")}',
        'runs': timing.benchmark,
      }
    )
  return Table(
    'T8',
    'Every measurement of decoding',
    [
      ('model', lambda r: r['subject']),
      ('system', lambda r: r['system']),
      ('KV heads', lambda r: r['kv_heads']),
      ('batch', lambda r: f'{r["batch_size"]:,}'),
      ('context', lambda r: f'{r["context"]:,}'),
      ('ms per step', number('ms', '.2f')),
      ('lowest', number('ms_low', '.2f')),
      ('highest', number('ms_high', '.2f')),
      ('predicted', number('predicted_ms', '.2f')),
      ('GB/s', number('bandwidth', '.1f', 1e-9)),
      ('status', lambda r: r['status']),
    ],
    rows,
    'rows of python -m gqa.benchmark',
  )
