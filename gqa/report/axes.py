"""Figures and axes: what the plots of a report have in common."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gqa.report import style
from gqa.report.recipes import heads_order
from gqa.tables import PREFIXES

Rows = Sequence[Mapping[str, Any]]
PANELS = 4  # of one plot; its caption says what is left out
_TITLE = 52  # characters of a line
_WIDTH = 8.6  # inches of a page


def make(panels: int, height: float = 3.2, columns: int = 2):
  """A figure, and its axes in a flat list."""
  from matplotlib.figure import Figure

  columns = min(panels, columns)
  lines = -(-panels // columns)
  width = _WIDTH if columns > 1 else _WIDTH * 0.68
  figure = Figure(figsize=(width, height * lines))
  grid = figure.subplots(lines, columns, squeeze=False)
  axes = list(grid.flat)
  for extra in axes[panels:]:
    extra.set_visible(False)
  return figure, axes[:panels]


def split(rows: Rows, *names: str) -> dict[tuple, list]:
  """Rows by the values of some fields, in their order."""
  groups = collections.defaultdict(list)
  for row in rows:
    groups[tuple(row.get(name) for name in names)].append(row)
  return groups


def ends(
  groups: Mapping[tuple, list], number: int, size: Callable[[tuple], float]
) -> list[tuple[tuple, list]]:
  """Of the groups with the most rows so many, from the least size to the most."""
  full = max(map(len, groups.values()), default=0)
  chosen = [(key, rows) for key, rows in groups.items() if len(rows) == full]
  chosen.sort(key=lambda item: size(item[0]))
  if len(chosen) <= number:
    return chosen
  step = (len(chosen) - 1) / (number - 1)
  return [chosen[round(i * step)] for i in range(number)]


def most(groups: Mapping[tuple, list]) -> list[tuple[tuple, list]]:
  """The groups with the most rows, in their order."""
  chosen = sorted(groups, key=lambda key: -len(groups[key]))[:PANELS]
  return [(key, groups[key]) for key in groups if key in chosen]


def heads_styles(rows: Rows):
  """A style for each number of KV heads, the fewest first."""
  return style.styles(sorted({r['kv_heads'] for r in rows}, key=heads_order))


def count(heads: str) -> str:
  """KV heads in words."""
  return '1 KV head' if heads == '1' else f'{heads} KV heads'


def error(rows: Rows, value: str, low: str, high: str):
  """Lengths of error bars below and above; None where they are not known."""
  if any(r.get(low) is None or r.get(high) is None for r in rows):
    return None
  below = [max(0.0, r[value] - r[low]) for r in rows]
  above = [max(0.0, r[high] - r[value]) for r in rows]
  return below, above


def log2(axis, values: Sequence[float]) -> None:
  """A logarithmic axis with a tick at each value."""
  from matplotlib.ticker import FixedLocator, NullLocator

  axis.axes.set_xscale('log', base=2)
  values = sorted(set(values))
  axis.set_major_locator(FixedLocator(values))
  axis.set_minor_locator(NullLocator())
  axis.set_ticklabels([f'{v:,g}' for v in values])


def plain(axis) -> None:
  """Numbers rather than powers on a logarithmic axis, and not too few."""
  from matplotlib.ticker import FuncFormatter, LogLocator

  axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
  axis.set_minor_formatter(FuncFormatter(lambda value, at: ''))
  axis.set_major_formatter(FuncFormatter(lambda value, at: f'{value:,g}'))


def powers(axis) -> None:
  """Powers of two, as numbers."""
  from matplotlib.ticker import FuncFormatter, LogLocator

  axis.set_major_locator(LogLocator(base=2))
  axis.set_major_formatter(FuncFormatter(lambda value, at: f'{value:,g}'))


def tokens(axis) -> None:
  """Numbers of tokens with a prefix."""
  from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

  if axis.get_scale() == 'linear':
    axis.set_major_locator(MaxNLocator(5))
  axis.set_major_formatter(FuncFormatter(lambda value, at: compact(value)))
  axis.set_minor_formatter(NullFormatter())


def compact(number: float) -> str:
  """A number with a prefix and no more digits than it needs: 2.5k."""
  power = 0
  while abs(number) >= 1000 and power < len(PREFIXES) - 1:
    number /= 1000
    power += 1
  return f'{number:.3g}{PREFIXES[power]}'


def legend_below(figure, axes) -> None:
  """One legend for all panels, under them."""
  entries = {}
  for axis in axes:
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
      entries.setdefault(label, handle)
  _legend(figure, entries)


def legend_of(figure, entries: Mapping[str, Mapping[str, Any]]) -> None:
  """A legend of lines and marks, by label, under all panels."""
  from matplotlib.lines import Line2D

  _legend(
    figure, {name: Line2D([], [], **look) for name, look in entries.items()}
  )


def _legend(figure, entries: Mapping[str, Any]) -> None:
  if not entries:
    return
  longest = max(map(len, entries))
  columns = int(figure.get_figwidth() * 15 / (longest + 7))
  columns = max(1, min(len(entries), columns))
  lines = -(-len(entries) // columns)
  figure.set_figheight(figure.get_figheight() + 0.18 * lines)
  figure.legend(
    entries.values(), entries, loc='outside lower center', ncols=columns
  )


def short(subject: str) -> str:
  """A subject in two lines."""
  first, end, rest = subject.partition('), ')
  if len(rest) > _TITLE:
    rest = f'{rest[: _TITLE - 14]} ... {rest[-9:]}'
  return f'{first})\n{rest}' if end else subject
