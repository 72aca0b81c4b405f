"""Rows of the benchmark: JSON lines, curves of TensorBoard, and a table."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gqa import metrics, tables
from gqa.cells import Cell, heads

FILE = 'results.jsonl'
Row = Mapping[str, Any]

# Head of a column: field, what it is multiplied by, format.
_COLUMNS = {
  'ms per\nstep': ('step_seconds', 1e3, '.2f'),
  'lowest': ('step_seconds_low', 1e3, '.2f'),
  'highest': ('step_seconds_high', 1e3, '.2f'),
  'predicted': ('predicted_step_seconds', 1e3, '.2f'),
  'error %': ('relative_error', 100, '+.0f'),
  'tokens\nper s': ('tokens_per_second', 1, ',.1f'),
  'GB/s': ('bandwidth', 1e-9, '.1f'),
  'limit': ('read_bandwidth', 1e-9, '.1f'),
  'cache\nMiB': ('cache_bytes', 2**-20, ',.1f'),
  'prompt\ntokens per s': ('prefill_tokens_per_second', 1, ',.0f'),
  'compile\ns': ('compile_seconds', 1, '.1f'),
}
# Tag of a curve: field, what it is multiplied by.
_CURVES = {
  'step_ms': ('step_seconds', 1e3),
  'predicted_step_ms': ('predicted_step_seconds', 1e3),
  'tokens_per_second': ('tokens_per_second', 1),
  'cache_mib': ('cache_bytes', 2**-20),
  'gb_per_second': ('bandwidth', 1e-9),
  'prefill_tokens_per_second': ('prefill_tokens_per_second', 1),
}


class Results:
  """The rows in a workdir.

  A cell that was skipped is tried again by the next run, and has another row
  only if that says something else.

  Args:
    workdir: is made if it is not there.
    device: what computes; rows of others stay, and are not taken for ours.
  """

  def __init__(self, workdir: str | os.PathLike, device: Row):
    path = pathlib.Path(workdir).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    self._path, self._device = path / FILE, device
    self._rows = read(self._path)
    self._writer = metrics.make_writer(path)
    for row in self._rows:
      self._draw(row)

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self._writer.close()

  def find(self, cell: Cell) -> Row | None:
    """The last row of a cell on this device."""
    wanted = cell.to_dict() | {'device': self._device}
    for row in reversed(self._rows):
      if all(row.get(name) == value for name, value in wanted.items()):
        return row
    return None

  def is_measured(self, cell: Cell) -> bool:
    """Whether there is nothing left to do for a cell."""
    row = self.find(cell)
    return row is not None and row['status'] == 'measured'

  def next_group(self) -> int:
    """A number that no group in the workdir has."""
    return 1 + max((row.get('group', 0) for row in self._rows), default=0)

  def add(self, cell: Cell, values: Row) -> None:
    """Keeps the row of a cell that was measured."""
    self._add(cell, 'measured', values)

  def skip(self, cell: Cell, reason: str, values: Row) -> bool:
    """Keeps why a cell has no numbers; False if that is known already."""
    row = self.find(cell)
    if row is not None and row.get('reason') == reason:
      return False
    self._add(cell, 'skipped', {'reason': reason, **values})
    return True

  def _add(self, cell: Cell, status: str, values: Row) -> None:
    row = {'what': 'decode', 'status': status, **cell.to_dict()}
    row['device'] = self._device
    for name, value in values.items():
      row.setdefault(name, value)  # what defines a cell stands
    with open(self._path, 'a', encoding='utf-8') as f:
      f.write(json.dumps(row, allow_nan=False) + '\n')
    self._rows.append(row)
    self._draw(row)

  def _draw(self, row: Row) -> None:
    for step, values in curves(row):
      self._writer.scalars(step, values)


def read(path: pathlib.Path) -> list[Row]:
  """The rows of a file; a last line that was torn is cut off.

  Raises:
    ValueError: another line is no row.
  """
  if not path.exists():
    return []
  content = path.read_bytes()
  whole, newline, torn = content.rpartition(b'\n')
  if torn:
    with open(path, 'r+b') as f:
      f.truncate(len(whole) + len(newline))
  rows = []
  for number, line in enumerate(whole.splitlines(), 1):
    try:
      row = json.loads(line)
      row['status']
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(
        f'{path}, line {number} is no row of a benchmark; mend it, or choose '
        'another workdir.'
      ) from error
    rows.append(row)
  return rows


def curves(row: Row) -> Iterator[tuple[int, dict[str, float]]]:
  """Gives step and scalars: against the context, and against the batch."""
  if row['status'] != 'measured':
    return
  kv_heads, types = heads(row['num_kv_heads']), '_'.join(_types(row))
  name = f'{row["system"]}_kv{kv_heads}_{types}'
  for axis, other in (('context', 'batch_size'), ('batch_size', 'context')):
    values = {
      f'{tag}_by_{axis}/{name}_{other}{row[other]}': row[field] * scale
      for tag, (field, scale) in _CURVES.items()
      if row.get(field) is not None
    }
    yield row[axis], values


def table(rows: Sequence[Row]) -> str:
  """Lays out rows for a terminal; those without numbers come last."""
  measured = [row for row in rows if row['status'] == 'measured']
  ours = {_same_work(r): r for r in measured if r['system'] == 'gqa'}
  parts = []
  if measured:
    head = ['KV\nheads', 'batch', 'context', *_COLUMNS, 'times\ngqa', 'system']
    lines = [_line(row, ours.get(_same_work(row))) for row in measured]
    parts.append(tables.text(head, lines))
  for row in rows:
    if row['status'] != 'measured':
      parts.append(f'skipped: {described(row)}: {row["reason"]}')
  return '\n'.join(parts)


def _line(row: Row, gqa: Row | None) -> list[str]:
  """A line of the table; `gqa` is our row of the same work."""
  line = [heads(row['num_kv_heads']), str(row['batch_size'])]
  line.append(str(row['context']))
  for field, scale, form in _COLUMNS.values():
    value = row.get(field)
    line.append('-' if value is None else format(value * scale, form))
  ratio = row['step_seconds'] / gqa['step_seconds'] if gqa else None
  line.append('-' if ratio is None else f'{ratio:.2f}')
  return [*line, ' '.join([row['system'], *_types(row)])]


def described(row: Row) -> str:
  """Says which cell a row is of."""
  return (
    f'{row["system"]}, num_kv_heads={heads(row["num_kv_heads"])}, '
    f'batch_size={row["batch_size"]}, context={row["context"]}, '
    + ' '.join(_types(row))
  )


def _types(row: Row) -> list[str]:
  """Kind of cache; types of compute, weights and cache that differ; room."""
  names = ('cache_kind', 'dtype', 'weights_dtype', 'cache_dtype')
  types = list(dict.fromkeys(row[name] for name in names))
  if row.get('cache_len'):  # of rows that have it and are not as long as needed
    types.append(f'cache_len={row["cache_len"]}')
  return types


def _same_work(row: Row) -> str:
  """Equal for the rows of one cell on several systems."""
  fields = ('model', 'batch_size', 'context', 'cache_kind', 'cache_dtype')
  fields += ('weights_dtype', 'steps', 'cache_len')
  return json.dumps([row.get(name) for name in fields])
