"""A plan in words: tables for the terminal and Markdown, or JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gqa import tables
from gqa.tables import quantity

FORMATS = ('table', 'json', 'csv', 'md')
_WITH = {
  'full': 'With a full cache',
  'ring': 'With a ring cache',
  'int8': 'With an int8 cache',
}


def render(plan: Mapping[str, Any], style: str) -> str:
  """Writes what `plan.make_plan` returns in one of FORMATS."""
  if style == 'json':
    return json.dumps(plan, indent=2, allow_nan=False)
  if style == 'csv':
    return tables.csv_text([*map(_flat, plan['rows']), *_relatives(plan)])
  table = tables.markdown if style == 'md' else tables.text
  blocks = [
    '\n'.join(_header(plan)),
    table(*_costs(plan)),
    _paragraph(_answers(plan), style),
    table(*_kinds(plan)),
  ]
  if 'relatives' in plan:
    blocks += [
      'Relatives, in cost only: none of them is built here.',
      table(*_relatives_table(plan)),
    ]
  blocks.append(_paragraph(_notes(plan), style))
  return '\n\n'.join(blocks)


def render_audit(rows: Sequence[Mapping[str, Any]], style: str) -> str:
  """Writes what `claims.audit` returns in one of FORMATS."""
  if style == 'json':
    return json.dumps(list(rows), indent=2, allow_nan=False)
  names = ('claim', 'source', 'setting', 'theirs', 'ours', 'verdict')
  cells = [{name: row[name] for name in names} for row in rows]
  if style == 'csv':
    return tables.csv_text(cells)
  if style == 'md':
    return tables.markdown(names, [list(row.values()) for row in cells])
  return '\n\n'.join(
    '\n'.join([row.pop('claim')] + [f'  {name:7}  {row[name]}' for name in row])
    for row in cells
  )


def _paragraph(lines, style):
  return ('\n\n' if style == 'md' else '\n').join(lines)


def _header(plan):
  device, setting = plan['device'], plan['setting']
  count = setting['tensor_parallel']
  types = [setting['dtype']]
  for name in ('weight_dtype', 'cache_dtype'):
    if setting[name]:
      types.append(f'{name.removesuffix("_dtype")} {setting[name]}')
  devices = device['title'] if count == 1 else f'{count} x {device["title"]}'
  line = (
    f'{plan["model"]["title"]} on {devices} '
    f'({quantity(device["memory"], "B")}, '
    f'{quantity(device["bandwidth"], "B/s")}, '
    f'{quantity(device["flops"], "FLOP/s")}), {", ".join(types)}, '
    f'{setting["kind"]} cache'
  )
  need = f'{setting["batch_size"]:,} sequences of {setting["context"]:,} tokens'
  if setting['batch_size'] == 1:
    need = f'1 sequence of {setting["context"]:,} tokens'
  if setting['source_len']:
    need += f' after {setting["source_len"]:,} of the source'
  if plan['target_ms'] is not None:
    need += f', at most {plan["target_ms"]:g} ms per token'
  need += f', in {quantity(plan["limits"]["room"], "B")}'
  if count > 1:
    need += ' of each device'
  return [line, need]


def _costs(plan):
  """The main table: a row for each grouping."""
  many = plan['setting']['tensor_parallel'] > 1
  graded = any(row['runs'] for row in plan['rows'])
  each = '\nper device' if many else ''
  columns = [
    ('KV\nheads', _heads),
    ('KV per\ntoken, B', lambda r: f'{r["kv_bytes_per_token"]:,}'),
    (
      'KV per\nsequence',
      lambda r: quantity(r['kv_bytes_per_sequence'], 'B'),
    ),
    (f'weights{each}', lambda r: quantity(r['device_weight_bytes'], 'B')),
    (f'cache{each}', lambda r: quantity(r['device_cache_bytes'], 'B')),
    (f'in use{each}', lambda r: quantity(r['device_bytes'], 'B')),
    ('step,\nms', lambda r: f'{r["step_ms"]:.1f}'),
    ('tokens\n/s', lambda r: _count(r['tokens_per_second'])),
    ('bound\nby', lambda r: r['bound']),
    ('KV = weights\nat tokens', lambda r: _count(r['balance_tokens'])),
    ('largest\nbatch', lambda r: _limit(r['largest_batch'])),
    (
      'tokens/s\nthere',
      lambda r: _count(r['largest_batch_tokens_per_second']),
    ),
    ('longest\ncontext', lambda r: _limit(r['largest_context'])),
  ]
  if many:
    columns.insert(3, ('devices\nwith a KV', lambda r: f'{r["kv_copies"]:.3g}'))
  if plan['target_ms'] is not None:
    columns += [
      ('batch\nin time', lambda r: _limit(r['largest_batch_in_time'])),
      ('of the\ntarget', lambda r: f'{r["share_of_target"]:.0%}'),
    ]
  if graded:
    columns.append(('loss', _loss))
  columns.append(('verdict', _verdict))
  head = [name for name, _ in columns]
  return head, [[cell(row) for _, cell in columns] for row in plan['rows']]


def _kinds(plan):
  """What a token and a sequence take in every kind of cache."""
  kinds = list(plan['rows'][0]['by_kind'])
  head = ['KV\nheads']
  for kind in kinds:
    head += [f'{kind}:\nKV per token, B', f'{kind}:\nKV per sequence']
  rows = []
  for row in plan['rows']:
    cells = [_heads(row)]
    for kind in kinds:
      sizes = row['by_kind'][kind]
      cells += [
        f'{sizes["kv_bytes_per_token"]:,}',
        quantity(sizes['kv_bytes_per_sequence'], 'B'),
      ]
    rows.append(cells)
  return head, rows


def _relatives_table(plan):
  columns = (
    ('method', lambda r: r['method']),
    ('KV per\ntoken, B', lambda r: f'{r["kv_bytes_per_token"]:,}'),
    ('KV per\nsequence', lambda r: quantity(r['kv_bytes_per_sequence'], 'B')),
    ('as much as\nKV heads', lambda r: f'{r["same_as_kv_heads"]:.2f}'),
    (
      'per token\nand device, B',
      lambda r: f'{r["device_kv_bytes_per_token"]:,.0f}',
    ),
    ('FLOPs\nper byte', lambda r: f'{r["flops_per_byte"]:.0f}'),
    ('attention,\nms a step', lambda r: f'{r["attention_ms"]:.1f}'),
    ('sizes', lambda r: r['detail']),
  )
  head = [name for name, _ in columns]
  rows = plan['relatives']
  return head, [[cell(row) for _, cell in columns] for row in rows]


def _answers(plan):
  """Which grouping to take, a line for each kind of cache."""
  timed = plan['target_ms'] is not None
  does = 'meets the need' if timed else 'fits'
  lines = []
  for kind, best in plan['choices'].items():
    if best is None:
      text = f'no grouping {does}.'
    else:
      text = f'num_kv_heads={_plain(best)}, {_why(best, does)}: '
      text += f'{_bill(best, plan)}.'
    lead = 'Answer' if kind == plan['setting']['kind'] else _WITH[kind]
    lines.append(f'{lead}: {text}')
  if plan['choices'][plan['setting']['kind']] is None:
    least = min(plan['rows'], key=lambda r: r['kv_bytes_per_token'])
    most = least['largest_batch_in_time' if timed else 'largest_batch']
    lines[0] += f' With num_kv_heads={_plain(least)} '
    lines[0] += f'{_limit(most)} sequences do.' if most else 'not one does.'
  return lines


def _why(row, does):
  if row['loss'] is None:
    return f'the most that {does}'
  return f'the lowest loss that {does} ({_loss(row)})'


def _bill(row, plan):
  memory = quantity(row['device_bytes'], 'B')
  text = f'{row["step_ms"]:.1f} ms and {memory}'
  if row['share_of_target'] is None:
    return text
  overhead = 1e3 * plan['limits']['overhead']
  working = (row['step_ms'] - overhead) * plan['limits']['efficiency']
  share = working / (plan['target_ms'] - overhead)
  return f'{text}, if the device reaches {share:.0%} of its limits'


def _notes(plan):
  setting, limits = plan['setting'], plan['limits']
  config, rows = plan['model']['config'], plan['rows']
  lines = []
  for row in rows:
    if row['own']:
      note = f"{_heads(row)} is the model's own"
      if any(row['above_own'] for row in rows):
        note += '; one cannot convert to more'
      lines.append(f'{note}.')
  if limits['efficiency'] == 1 and not limits['overhead']:
    lines.append(
      'Step times are floors, at the full bandwidth and peak; give '
      '--efficiency and --overhead_ms as measured.'
    )
  if setting['tensor_parallel'] > 1:
    lines.append('Communication between devices is not counted.')
  if setting['kv_split'] != 'heads':
    lines.append(
      f'This library splits a cache by heads, not as kv_split='
      f'{setting["kv_split"]} does.'
    )
  if setting['context'] > config['max_len']:
    lines.append(f'The model was made for {config["max_len"]:,} tokens.')
  return lines


def _flat(row):
  """A row of scalars for CSV."""
  flat = {'method': 'GQA', 'label': 'predicted'}
  for name, value in row.items():
    if name == 'by_kind':
      for kind, sizes in value.items():
        flat |= {f'{size}_{kind}': sizes[size] for size in sizes}
    else:
      flat[name] = _plain(row) if name == 'num_kv_heads' else value
  return flat


def _relatives(plan):
  return plan.get('relatives', [])


def _plain(row):
  heads = row['num_kv_heads']
  return str(heads) if isinstance(heads, int) else ' '.join(map(str, heads))


def _heads(row):
  heads = row['num_kv_heads']
  if not isinstance(heads, int):
    heads = f'{min(heads)} to {max(heads)}'
  return f'{heads}{"*" if row["own"] else " "}'


def _count(number):
  """A rounded number; with decimals where it is small."""
  if number is None or number < 100:
    return quantity(number)
  return f'{number:,.0f}'


def _limit(number):
  return 'any' if number is None else f'{number:,}'


def _loss(row):
  if not row['runs']:
    return '-'
  failed = f', {row["failed_runs"]} failed' if row['failed_runs'] else ''
  if row['loss'] is None:
    return f'{row["failed_runs"]} failed'
  spread = '' if row['loss_sd'] is None else f' ± {row["loss_sd"]:.4f}'
  return f'{row["loss"]:.4f}{spread}{failed}'


def _verdict(row):
  if row['meets']:
    return 'fits' if row['share_of_target'] is None else 'meets it'
  faults = [] if row['fits'] else ['too large']
  if row['share_of_target'] and row['share_of_target'] > 1:
    faults.append('too slow')
  return ', '.join(faults)
