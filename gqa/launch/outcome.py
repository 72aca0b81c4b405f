"""What a point came to: the numbers that its command left behind."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

TAIL = 1 << 16  # bytes at the end of a file that progress is read from


def metrics(verb: str, directory: pathlib.Path, log_start: int = 0):
  """The numbers and words of a result, flat.

  Args:
    verb: of the point.
    directory: of the point.
    log_start: where the last attempt begins in its `log.txt`.
  """
  if verb == 'train':
    last: dict[str, Any] = {}
    for row in _rows(directory / 'metrics.jsonl'):
      last |= row
    last.pop('wall_time', None)
    return last
  if verb == 'convert':
    rows = list(_rows(directory / 'convert.json'))
  elif verb == 'evaluate':
    rows = list(_rows(directory / 'log.txt', log_start))
  else:
    rows = list(_rows(directory / 'results.jsonl'))
    if len(rows) != 1:
      measured = sum(row.get('status') == 'measured' for row in rows)
      return {'cells': len(rows), 'measured': measured}
  return _scalars(rows[-1]) if rows else {}


def progress(directory: pathlib.Path) -> dict[str, Any]:
  """`step`, `total`, `loss` and `seconds_left` of a training run, if known."""
  found: dict[str, Any] = {}
  path = directory / 'metrics.jsonl'
  try:
    size = path.stat().st_size
    config = json.loads((directory / 'config.json').read_text())
    found['total'] = config['train']['num_steps']
  except (OSError, ValueError, KeyError):
    return found
  rows = [
    row
    for row in _rows(path, max(0, size - TAIL))
    if isinstance(row.get('step'), int)
  ]
  for row in rows:
    found['step'] = row['step']
    found['loss'] = row.get('train/loss', found.get('loss'))
  timed = [row for row in rows if 'speed/step_time' in row]
  if timed:
    left = found['total'] - found['step']
    found['seconds_left'] = left * timed[-1]['speed/step_time']
  return found


def _rows(path: pathlib.Path, start: int = 0) -> Iterator[dict[str, Any]]:
  """The lines of a file that are JSON objects."""
  try:
    with open(path, 'rb') as file:
      file.seek(start)
      for line in file:
        try:
          row = json.loads(line)
        except ValueError:
          continue
        if isinstance(row, dict):
          yield row
  except OSError:
    return


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
  kinds = (str, int, float, bool)
  return {name: v for name, v in row.items() if isinstance(v, kinds)}
