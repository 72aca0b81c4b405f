"""The plots of a report, each from the rows of its CSV file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from gqa.report import decode_series, decoding, quality, series, style
from gqa.report.axes import Rows
from gqa.report.join import Data


@dataclasses.dataclass(frozen=True)
class Plot:
  """A plot, or what it would need.

  Attributes:
    key: such as 'P1'; names its files.
    rows: what is drawn, and what its CSV file holds.
    draw: gives the figure, or None if there is nothing to draw.
    needs: what it would take.
    note: what a reader should know.
  """

  key: str
  title: str
  rows: Rows
  draw: Callable[[Rows], Any]
  needs: str
  note: str = ''

  @property
  def sources(self) -> list[str]:
    """Names of the runs and files it was drawn from."""
    names = [name for r in self.rows for name in r['runs'].split('; ')]
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def settings():
  """How figures look that are drawn and saved inside."""
  import matplotlib

  with matplotlib.rc_context(style.SETTINGS):
    yield


def make(data: Data) -> list[Plot]:
  """All plots, those without rows too."""
  own = [r for r in decode_series.times(data) if r['system'] == 'gqa']
  maps = [t for t in data.timings if t.model is not None]
  return [
    Plot(
      'P1',
      'Quality against latency',
      series.pareto(data),
      quality.pareto,
      'trained runs, and a benchmark of the same models (experiments/pareto.py)',
      'Bars: standard deviation over seeds, and lowest to highest time of a '
      'step. The line joins what nothing else beats in both. The CSV file '
      'has every batch and context that was measured.',
    ),
    Plot(
      'P2',
      'Conversion methods, before and after uptraining',
      series.conversion_losses(data),
      quality.bars,
      'a convert.json with a calibration text',
      "Zero-shot loss less the parent's on the same text: that of the "
      'conversion right after it, the validation text after uptraining.',
    ),
    Plot(
      'P3',
      'Loss against the length of uptraining',
      series.alphas(data),
      quality.alphas,
      'uptrained runs (configs/uptrain.py) of two values of alpha, or of one '
      'with its loss before the first step',
      'Zero-shot loss, where the paper has fine-tuned scores: compare orders, '
      'not levels. Open marks are on the held-out text of the conversion.',
    ),
    Plot(
      'P4',
      'Time of a step against KV heads',
      own,
      decoding.by_heads,
      'a benchmark of two or more numbers of KV heads '
      '(experiments/kv_heads_decode_cost.py)',
      'Median, with lowest and highest; thin lines are predicted from bytes '
      'and FLOPs at the limits measured in the same run. Of many batches and '
      'contexts some are drawn, from the least tokens to the most.',
    ),
    Plot(
      'P5',
      'Time against position, with a cache and without',
      [*decode_series.positions(data), *decode_series.contexts(data)],
      decoding.positions,
      'lines of experiments/cached_vs_uncached.py, or a benchmark of two '
      'contexts',
      'With a cache a token costs the weights and its prefix once; without '
      'one the prefix is computed again for each token.',
    ),
    Plot(
      'P6',
      'Roofline and bandwidth',
      [r for r in own if r['flops_per_second'] and r['read_bandwidth']],
      decoding.roofline,
      'rows of a benchmark with step_flops and the limits of the machine',
      'Roofs are the bandwidth and the matrix peak measured in the same run '
      '(medians over rows).',
    ),
    Plot(
      'P7',
      'Throughput against batch',
      decode_series.throughput(data),
      decoding.throughput,
      'a benchmark with several batches (--config.grid.fill_memory)',
      'A cross marks the largest batch that fits into the memory limit.',
    ),
    Plot(
      'P8',
      'Training and uptraining',
      series.training(data),
      quality.training,
      'a metrics.jsonl of python -m gqa.train',
      'Runs that did not come to their end are drawn as far as they go, with '
      'a cross where they stopped. Thin: training; marks: validation. Of '
      'several values of alpha the largest is drawn, the others are rows.',
    ),
    Plot(
      'P9',
      'How alike the heads of a group are',
      series.similarities(data),
      quality.similarities,
      'a convert.json with layers',
      'Mean cosine over the inputs of two heads of a group: as they are, and '
      'after turning one towards the other without changing the model.',
    ),
    Plot(
      'P10',
      'Where fewer KV heads pay',
      decode_series.speedups(data),
      lambda rows: decoding.crossover(rows, maps),
      'a benchmark that has the multi-head model too',
      'Colour: predicted from bytes at the measured bandwidth. Circles: '
      'measured. Dashes: where KV traffic equals that of the weights.',
    ),
  ]
