"""A report in TensorBoard: tables as text, plots as images, and a layout."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Sequence

from gqa import metrics, results
from gqa import tables as tables_lib
from gqa.report import page
from gqa.report.join import Timing
from gqa.report.table import Table

# Curves that belong on one plot; TensorBoard draws those that a run has.
_CHARTS = {
  'loss': ('train/loss', 'eval/loss', 'eval/parent_loss'),
  'bits per byte': ('train/bits_per_byte', 'eval/bits_per_byte'),
  'gradient norm': ('train/grad_norm',),
  'tokens per second of training': ('speed/tokens_per_second',),
  'similarity of keys, by layer': (
    'convert/key_similarity',
    'convert/key_similarity_aligned',
  ),
  'similarity of values, by layer': (
    'convert/value_similarity',
    'convert/value_similarity_aligned',
  ),
  'error of the output, by layer': (
    'convert/output_error_merged',
    'convert/output_error',
  ),
}


def write(
  target: pathlib.Path,
  tables: Iterable[Table],
  figures: Iterable[tuple[str, object]],
  absent: Sequence[tuple[str, str]],
  timings: Iterable[Timing],
) -> None:
  """Writes events that take the place of an earlier report's."""
  with metrics.Writer(target) as writer:
    for table in tables:
      text = tables_lib.markdown(table.head, table.cells)
      writer.text(0, f'report/{page.title_of(table)}', text)
    if absent:
      text = '\n'.join(f'- **{name}** needs {needs}' for name, needs in absent)
      writer.text(0, 'report/Not drawn', text)
    for name, figure in figures:
      writer.figure(0, f'report/{name}', figure)
    writer.charts(_CHARTS | _decoding_charts(timings))
  (target / 'metrics.jsonl').unlink()  # it has no scalars


def _decoding_charts(timings: Iterable[Timing]) -> dict[str, list[str]]:
  """The curves of benchmarks, one plot for each measure and axis."""
  charts = collections.defaultdict(dict)
  for timing in timings:
    for _, values in results.curves(timing.row):
      for tag in values:
        charts[tag.partition('/')[0].replace('_', ' ')][tag] = None
  return {title: list(tags) for title, tags in charts.items()}
