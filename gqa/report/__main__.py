"""Tables and plots of what was trained, converted and measured.

  python -m gqa.report --workdir=DIR[,DIR_OR_FILE ...] [--target=DIR/report]

Reads every run, sweep, conversion and benchmark below the directories and
writes `index.html`, one page that needs no network, the same as `index.md`,
each plot as SVG and PNG, and each table and plot as CSV. TensorBoard on the
workdir shows them too. What is missing or failed is listed, and so is each
plot whose data are not there, with what it needs. Nothing else is changed.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Sequence

from absl import flags

from gqa import cli
from gqa import tables as tables_lib
from gqa.report import (
  board,
  cost_tables,
  join,
  page,
  plots,
  quality_tables,
  read,
  style,
)
from gqa.report import inventory as inventory_lib
from gqa.report.page import Drawn, Report

PAGE = 'index.html'


def write(
  workdirs: Sequence[str | os.PathLike],
  target: str | os.PathLike | None = None,
  tensorboard: bool = True,
) -> pathlib.Path:
  """Writes the report of some directories; returns the path of its page.

  Args:
    workdirs: directories, or .jsonl files of results.
    target: where it goes; `report` in the first of them unless given.
    tensorboard: whether events are written too.

  Raises:
    OSError: one of them does not exist, or target cannot be written to.
    ValueError: there is nothing to report.
  """
  if target is None:
    target = pathlib.Path(workdirs[0]) / 'report'
  target = pathlib.Path(target).expanduser().absolute()
  found = read.read(workdirs)
  if found.is_empty:
    raise ValueError(
      f'{", ".join(map(str, workdirs))} has no run, sweep, conversion or '
      'benchmark; give the workdir of one, or a directory of workdirs.'
    )
  data = join.join(found)
  tables = _tables(data)
  shown = [table for table in tables if table.rows]
  inventory = [table for table in inventory_lib.make(data) if table.rows]
  absent = [
    (page.title_of(table), table.needs) for table in tables if not table.rows
  ]
  target.mkdir(parents=True, exist_ok=True)
  _remove_old(target)
  drawn, figures = [], []
  with plots.settings():
    for plot in plots.make(data):
      figure = plot.draw(plot.rows) if plot.rows else None
      if figure is None:
        absent.append((f'{plot.key}: {plot.title}', plot.needs))
        continue
      picture = style.svg(figure, plot.key)
      figure.set_layout_engine('none')  # it has found its places
      (target / f'{plot.key}.svg').write_text(picture, encoding='utf-8')
      (target / f'{plot.key}.png').write_bytes(style.png(figure))
      _write_csv(target / f'{plot.key}.csv', tables_lib.csv_text(plot.rows))
      drawn.append(
        Drawn(plot.key, plot.title, plot.note, plot.sources, picture)
      )
      figures.append((f'{plot.key}: {plot.title}', figure))
    for table in [*shown, *inventory]:
      _write_csv(target / f'{table.key}.csv', table.csv())
    report = Report(
      _title(found), _summary(found), shown, inventory, drawn, absent
    )
    (target / PAGE).write_text(page.html(report), encoding='utf-8')
    (target / 'index.md').write_text(page.markdown(report), encoding='utf-8')
    summary = {
      'plots': [plot.key for plot in drawn],
      'tables': [table.key for table in [*shown, *inventory]],
      'not_drawn': [{'what': n, 'needs': w} for n, w in absent],
    }
    text = json.dumps(summary, indent=2) + '\n'
    (target / read.REPORT).write_text(text, encoding='utf-8')
    if tensorboard:
      board.write(target, [*shown, *inventory], figures, absent, data.timings)
  return target / PAGE


def _tables(data):
  return [
    quality_tables.main(data),
    quality_tables.conversions(data),
    quality_tables.from_scratch(data),
    quality_tables.matched(data),
    cost_tables.cache_bytes(data),
    cost_tables.audit(),
    cost_tables.throughput(data),
    cost_tables.decoding(data),
    cost_tables.training(data),
  ]


def _remove_old(target: pathlib.Path) -> None:
  """Removes what an earlier report left, so that all is of one reading."""
  if not (target / read.REPORT).is_file():
    return
  summary = json.loads((target / read.REPORT).read_text())
  for key in [*summary['plots'], *summary['tables']]:
    for suffix in ('csv', 'png', 'svg'):
      (target / f'{key}.{suffix}').unlink(missing_ok=True)


def _write_csv(path: pathlib.Path, text: str) -> None:
  path.write_text(text + '\n', encoding='utf-8')


def _title(found) -> str:
  return f'Report of {", ".join(root.name for root in found.roots)}'


def _summary(found) -> list[str]:
  done = sum(run.state == read.DONE for run in found.runs)
  rows = sum(len(benchmark.rows) for benchmark in found.benchmarks)
  sweeps = len({point.sweep for point in found.points})
  counts = [
    f'{_count(len(found.runs), "training run")} ({done} came to their end)',
    _count(len(found.conversions), 'conversion'),
    f'{_count(rows, "row")} of {_count(len(found.benchmarks), "benchmark")}',
    f'{_count(len(found.points), "point")} of {_count(sweeps, "sweep")}',
  ]
  where = ', '.join(map(str, found.roots))
  today = datetime.date.today().isoformat()
  return [f'Read on {today} from {where}: {", ".join(counts)}.']


def _count(number: int, what: str) -> str:
  return f'{number} {what}' if number == 1 else f'{number} {what}s'


def main(argv):
  """Writes the report of the flags and prints where its page is."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]} is no flag; write --workdir=DIR.')
  flag = flags.FLAGS
  path = write(flag.workdir, flag.target, flag.tensorboard)
  print(path)


def _define_flags():
  flags.DEFINE_list(
    'workdir', None, 'directories, or .jsonl files of results', required=True
  )
  flags.DEFINE_string('target', None, 'directory to write; WORKDIR/report')
  flags.DEFINE_bool('tensorboard', True, 'write events too')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
