"""One page of all tables and plots: HTML that needs nothing else, or Markdown.

The HTML holds its pictures and its style, and is for screens in light and
dark, and for paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gqa import tables as tables_lib
from gqa.report import style
from gqa.report.style import escape
from gqa.report.table import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a;
  --line: #d0d7de; --paper: #ffffff; --stripe: #f6f8fa; --link: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3;
  --soft: #9aa4af; --line: #3a424c; --paper: #14181d; --stripe: #1b2027;
  --link: #79b8ff; } }
@media print { :root { color-scheme: light; --ink: #000000; --soft: #333333;
  --line: #999999; --paper: #ffffff; --stripe: #ffffff; --link: #000000; }
  nav { display: none; } figure, tr { break-inside: avoid; }
  h2, h3, figcaption { break-after: avoid; } body { max-width: none; }
  details > *:not(summary) { display: block; } .wide { overflow: visible; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 66rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
p, li, figcaption { color: var(--soft); margin: .3rem 0; }
a { color: var(--link); }
nav { font-size: .85rem; margin: .8rem 0; }
nav a { margin-right: .7rem; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word;
  max-width: 22rem; }
th { vertical-align: bottom; }
td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
td:not(.n):first-child { min-width: 11rem; }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: .4rem 0 1rem; color: var(--ink); }
figure svg { width: 100%; height: auto; display: block; }
figcaption, summary { font-size: .85rem; }
summary { color: var(--soft); cursor: pointer; }
"""
_SHOWN = 40  # rows of a table before the rest is folded away
_NAMED = 8  # sources named in a caption before the rest is folded away


@dataclasses.dataclass(frozen=True)
class Drawn:
  """A plot that was drawn."""

  key: str
  title: str
  note: str
  sources: Sequence[str]
  svg: str


@dataclasses.dataclass(frozen=True)
class Report:
  """What a page shows.

  Attributes:
    summary: lines on what was read.
    tables: those with rows.
    inventory: tables of what was read, with rows.
    plots: those that were drawn.
    absent: key and title of what was not, and what it needs.
  """

  title: str
  summary: Sequence[str]
  tables: Sequence[Table]
  inventory: Sequence[Table]
  plots: Sequence[Drawn]
  absent: Sequence[tuple[str, str]]


def html(report: Report) -> str:
  """The page as one file."""
  links = [(plot.key, plot.key) for plot in report.plots]
  links += [(t.key, t.key) for t in [*report.tables, *report.inventory]]
  if report.absent:
    links.append(('absent', 'not drawn'))
  body = [
    f'<h1>{escape(report.title)}</h1>',
    *(f'<p>{escape(line)}</p>' for line in report.summary),
    '<nav>',
    *(f'<a href="#{key}">{escape(name)}</a>' for key, name in links),
    '</nav>',
  ]
  first, *rest = report.inventory or [None]
  if first is not None and first.key == 'incomplete':
    body.append(_html_table(first, 'h2'))
  else:
    rest = list(report.inventory)
  if report.plots:
    body.append('<h2>Plots</h2>')
    body += map(_html_plot, report.plots)
  if report.tables:
    body.append('<h2>Tables</h2>')
    body += map(_html_table, report.tables)
  if report.absent:
    body.append('<h2 id="absent">Not drawn</h2><ul>')
    body += [
      f'<li><strong>{escape(name)}</strong> needs {escape(needs)}</li>'
      for name, needs in report.absent
    ]
    body.append('</ul>')
  if rest:
    body.append('<h2>What was read</h2>')
    body += map(_html_table, rest)
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="icon" href="data:,">'
    f'<title>{escape(report.title)}</title><style>{_STYLE}</style></head>'
    f'<body>\n{"".join(f"{part}{chr(10)}" for part in body)}</body></html>\n'
  )


def markdown(report: Report) -> str:
  """The same, with pictures as files beside it."""
  parts = [f'# {report.title}', *report.summary]
  inventory = list(report.inventory)
  if inventory and inventory[0].key == 'incomplete':
    parts += _markdown_table(inventory.pop(0), '##')
  if report.plots:
    parts.append('## Plots')
  for plot in report.plots:
    parts += [
      f'### {plot.key}: {plot.title}',
      f'![{plot.title}]({plot.key}.png)',
      f'{plot.note} From: {", ".join(plot.sources)}. '
      f'([rows]({plot.key}.csv), [SVG]({plot.key}.svg))',
    ]
  if report.tables:
    parts.append('## Tables')
  for table in report.tables:
    parts += _markdown_table(table)
  if report.absent:
    parts.append('## Not drawn')
    parts.append('\n'.join(f'- **{n}** needs {w}' for n, w in report.absent))
  if inventory:
    parts.append('## What was read')
  for table in inventory:
    parts += _markdown_table(table)
  return '\n\n'.join(parts) + '\n'


def _html_plot(plot: Drawn) -> str:
  title = escape(f'{plot.key}: {plot.title}')
  named = ', '.join(plot.sources)
  if len(plot.sources) > _NAMED:
    named = (
      f'<details><summary>From {len(plot.sources)} runs and files</summary>'
      f'{escape(named)}</details>'
    )
  else:
    named = f'From: {escape(named)}.'
  return (
    f'<h3 id="{plot.key}">{title}</h3><figure>'
    f'{style.inline(plot.svg, title)}'
    f'<figcaption>{escape(plot.note)} {named} '
    f'<a href="{plot.key}.csv">rows</a>, <a href="{plot.key}.png">PNG</a>, '
    f'<a href="{plot.key}.svg">SVG</a></figcaption></figure>'
  )


def _html_table(table: Table, level: str = 'h3') -> str:
  title = escape(title_of(table))
  note = f'<p>{escape(table.note)}</p>' if table.note else ''
  body = _html_rows(table, table.cells[:_SHOWN])
  if rest := table.cells[_SHOWN:]:
    body += (
      f'<details><summary>{len(rest)} more rows</summary>'
      f'{_html_rows(table, rest)}</details>'
    )
  return (
    f'<{level} id="{table.key}">{title}</{level}>{note}{body}'
    f'<p><a href="{table.key}.csv">CSV</a></p>'
  )


def _html_rows(table: Table, cells) -> str:
  numeric = [
    all(map(_is_number, column)) for column in zip(*cells, strict=True)
  ]
  mark = lambda i: ' class="n"' if numeric[i] else ''
  head = ''.join(
    f'<th{mark(i)}>{escape(name)}</th>' for i, name in enumerate(table.head)
  )
  rows = ''.join(
    '<tr>'
    + ''.join(f'<td{mark(i)}>{escape(c)}</td>' for i, c in enumerate(line))
    + '</tr>\n'
    for line in cells
  )
  return (
    f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
    f'<tbody>{rows}</tbody></table></div>'
  )


def _is_number(text: str) -> bool:
  return text == '-' or (text[:1] in '+-.0123456789' and len(text) < 24)


def _markdown_table(table: Table, level: str = '###') -> list[str]:
  parts = [f'{level} {title_of(table)}']
  parts += [table.note] if table.note else []
  return [
    *parts,
    tables_lib.markdown(table.head, table.cells),
    f'([CSV]({table.key}.csv))',
  ]


def title_of(table: Table) -> str:
  """With its key, where that is a number of ours."""
  numbered = table.key[1:].isdigit()
  return f'{table.key}: {table.title}' if numbered else table.title
