"""Tokens that uptraining needs to recover a part of what conversion lost.

  python -m experiments.recovery --workdir=DIR[,DIR ...] [--part=0.95] [--json]

Reads the runs of uptraining below the directories, or the lines that --json
printed of them. The gap is the loss of the reference method right after
conversion less the parent's, for the same model and number of KV heads, so that
all methods are measured by the same goal. Losses are on the validation batches;
between two evaluations they are taken to be linear in tokens. A method's curve
is that of its longest alpha: a shorter run ends with a learning rate of its
own. Where not every run reaches the goal, the number of those that do is given,
and their median only if they are more than half.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

from gqa import cli, tables
from gqa.report import read, recipes
from gqa.report.read import Uptraining

Curve = Sequence[tuple[int, float]]  # tokens, loss


def tokens_to(curve: Curve, goal: float) -> float | None:
  """Tokens at which a curve first comes down to a loss; None: never."""
  before = None
  for tokens, loss in curve:
    if loss <= goal:
      if before is None:
        return float(tokens)
      start, high = before
      return start + (tokens - start) * (high - goal) / (high - loss)
    before = tokens, loss
  return None


def median_reached(reached: Sequence[float | None]) -> float | None:
  """The median over all runs, a run that never arrives being the slowest."""
  middle = statistics.median(math.inf if t is None else t for t in reached)
  return None if middle == math.inf else middle


def uptrainings(found: read.Found) -> list[Uptraining]:
  """Runs of uptraining that are done, and what lines of results say of some."""
  runs = [recipes.uptraining_of(run) for run in found.runs]
  return [run for run in runs if run is not None] + found.uptrainings


def rows(
  runs: Iterable[Uptraining], part: float = 0.95, reference: str = 'mean'
) -> list[dict[str, Any]]:
  """One row for each model, KV heads and method, and its losses by alpha.

  Args:
    runs: of `uptrainings`.
    part: of the gap that is to be recovered.
    reference: the method whose loss at alpha 0 begins the gap.
  """
  found = collections.defaultdict(lambda: collections.defaultdict(list))
  for run in runs:
    key = run.model, run.num_kv_heads, run.method
    found[key][run.alpha].append(run)
  gaps = collections.defaultdict(list)
  for (model, heads, method), by_alpha in found.items():
    if method.split(',')[0] == reference:
      for run in by_alpha[max(by_alpha)]:
        if run.parent_loss is not None:
          gaps[model, heads].append(_start(run) - run.parent_loss)
  table = []
  for (model, heads, method), by_alpha in found.items():
    longest = by_alpha[max(by_alpha)]
    parent = longest[0].parent_loss
    row = {
      'model': model,
      'num_kv_heads': heads,
      'method': method,
      'parent_loss': parent,
      'loss': {0.0: recipes.mean_and_sd([_start(longest[0])])},
      'seeds': len(longest),
    }
    for alpha in sorted(by_alpha.keys() - {0.0}):
      row['loss'][alpha] = recipes.mean_and_sd(
        [run.curve[-1][1] for run in by_alpha[alpha]]
      )
    if gaps[model, heads] and parent is not None:
      goal = parent + (1.0 - part) * statistics.mean(gaps[model, heads])
      reached = [tokens_to(run.curve, goal) for run in longest]
      row |= {
        'goal': goal,
        'tokens': median_reached(reached),
        'reached': sum(t is not None for t in reached),
        'trained_tokens': longest[0].curve[-1][0],
      }
    table.append(row)
  order = lambda row: (
    row['model'],
    -recipes.heads_order(row['num_kv_heads'])[0],
    row['method'],
  )
  return sorted(table, key=order)


def markdown(table: Sequence[dict[str, Any]]) -> str:
  """The rows as a table in Markdown."""
  alphas = sorted({alpha for row in table for alpha in row['loss']})
  several = len({row['model'] for row in table}) > 1
  head = ['model'] if several else []
  head += ['KV heads', 'method', "parent's loss"]
  head += [f'alpha {alpha:g}' for alpha in alphas] + ['goal', 'tokens to it']
  lines = []
  for row in table:
    line = [row['model']] if several else []
    line += [row['num_kv_heads'], row['method'], _number(row['parent_loss'])]
    for alpha in alphas:
      loss = row['loss'].get(alpha)
      text = '-' if loss is None else _number(loss['mean'])
      if loss is not None and loss['sd'] is not None:
        text += f' +- {loss["sd"]:.3f}'
      line.append(text)
    line += [_number(row.get('goal')), _tokens(row)]
    lines.append(line)
  return tables.markdown(head, lines)


def _start(run: Uptraining) -> float:
  """The loss right after conversion."""
  return run.curve[0][1]


def _number(value: float | None) -> str:
  return '-' if value is None else f'{value:.3f}'


def _tokens(row) -> str:
  if 'goal' not in row:
    return '-'
  if row['tokens'] is None:
    text = f'more than {row["trained_tokens"]:,}'
  else:
    text = f'{row["tokens"]:,.0f}'
  if row['reached'] < row['seeds']:
    text += f' ({row["reached"]} of {row["seeds"]} runs)'
  return text


def main(argv):
  """Prints the table of the flags' directories."""
  del argv
  flag = flags.FLAGS
  if not 0 < flag.part < 1:
    raise ValueError(f'part={flag.part} must be between 0 and 1.')
  runs = uptrainings(read.read(flag.workdir))
  table = rows(runs, flag.part, flag.reference)
  if not table:
    raise ValueError(
      f'{", ".join(flag.workdir)} has no finished run of uptraining.'
    )
  if flag.json:
    order = lambda run: (run.num_kv_heads, run.method, run.alpha, run.seed)
    for run in sorted(runs, key=order):
      print(json.dumps(run.to_line()))
    for row in table:
      print(json.dumps({'what': 'uptraining_recovery'} | row))
  else:
    print(markdown(table))


def _define_flags():
  flags.DEFINE_list(
    'workdir',
    None,
    'directories with runs, or with lines of them',
    required=True,
  )
  flags.DEFINE_float('part', 0.95, 'of the gap')
  flags.DEFINE_string('reference', 'mean', 'method whose loss begins the gap')
  flags.DEFINE_bool('json', False, 'print runs and rows as JSON lines instead')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
