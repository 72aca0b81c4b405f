"""Tables as aligned text, Markdown or CSV, and quantities in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

PREFIXES = ('', 'k', 'M', 'G', 'T', 'P')


def quantity(number: float | None, unit: str = '') -> str:
  """A number to three digits with a decimal prefix: 26.0 GB; None: a dash."""
  if number is None:
    return '-'
  power = 0
  while abs(number) >= 999.5 and power < len(PREFIXES) - 1:
    number /= 1000
    power += 1
  if not power and number == int(number):
    digits = 0
  else:
    digits = (abs(number) < 9.995) + (abs(number) < 99.95)
  return f'{number:.{digits}f} {PREFIXES[power]}{unit}'.rstrip()


def text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Aligns columns: the last to the left, the others to the right.

  A head may have several lines.
  """
  stacked = [name.split('\n') for name in head]
  depth = max(map(len, stacked))
  stacked = [[''] * (depth - len(lines)) + lines for lines in stacked]
  lines = [list(line) for line in zip(*stacked, strict=True)]
  widths = [max(map(len, column)) for column in zip(*lines, *rows, strict=True)]
  lines = [*lines, ['-' * width for width in widths], *rows]
  return '\n'.join(
    '  '.join(
      [
        *(
          cell.rjust(width)
          for cell, width in zip(line[:-1], widths, strict=False)
        ),
        line[-1],
      ]
    ).rstrip()
    for line in lines
  )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table, aligned likewise."""
  lines = [
    [name.replace('\n', ' ') for name in head],
    ['---:'] * (len(head) - 1) + ['---'],
    *([cell.replace('|', '\\|') for cell in row] for row in rows),
  ]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
  """Rows under the names that any of them has, as CSV."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  file = io.StringIO()
  writer = csv.DictWriter(file, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue().removesuffix('\n')
