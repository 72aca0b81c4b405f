"""The rows behind each plot: what is drawn, and what its CSV file holds."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from gqa.report import decode_series, recipes
from gqa.report.join import Data
from gqa.report.read import Conversion
from gqa.report.recipes import heads_order

Rows = list[dict[str, Any]]
LINE = ('model', 'kv_heads', 'method')  # equal along a line over alpha
_MAX_POINTS = 400  # of a curve that is drawn


def pareto(data: Data) -> Rows:
  """Quality against latency, of each recipe that was trained and timed."""
  rows = []
  for recipe in data.recipes:
    if not recipe.done or recipe.alpha == 0:
      continue
    for timing in data.matching(recipe):
      rows.append(
        {
          'recipe': recipe.label,
          'kv_heads': recipe.heads,
          'kind': recipe.kind,
          'study': recipe.study,
          **loss_fields(recipe.loss()),
          **decode_series.time_fields(timing),
          'runs': '; '.join(run.name for run in recipe.done),
        }
      )
  return rows


def conversion_losses(data: Data) -> Rows:
  """Loss of a model before and after it was converted, and uptrained."""
  found = collections.defaultdict(list)
  for conversion in data.found.conversions:
    how = recipes.how_of(conversion.result)
    heads = recipes.heads(conversion.result['num_kv_heads'])
    found[_model_name(conversion), heads, how].append(conversion)
  rows = []
  for (model, heads, how), group in found.items():
    after = [c.result.get('loss_after') for c in group]
    before = [c.result.get('loss_before') for c in group]
    common = {
      'kv_heads': heads,
      'method': str(how),
      'model': model,
      'parent_kv_heads': recipes.heads(group[0].result['parent_kv_heads']),
    }
    if None not in (*after, *before):
      parent = recipes.mean_and_sd(before)['mean']
      rows.append(
        common
        | {
          'alpha': 0.0,
          'stage': 'converted',
          **loss_fields(recipes.mean_and_sd(after)),
        }
        | {'parent_loss': parent, 'tokens': 0}
        | {'runs': '; '.join(c.name for c in group)}
      )
  for row in uptrained(data):
    if row['method'] and row['alpha'] is not None and row['alpha'] > 0:
      rows.append(row | {'stage': f'uptrained, alpha {row["alpha"]:g}'})
  return sorted(
    rows, key=lambda r: (heads_order(r['kv_heads']), r['method'], r['alpha'])
  )


def uptrained(data: Data) -> Rows:
  """Validation loss of each uptrained recipe, also before its first step."""
  rows, starts = [], {}
  for recipe in data.recipes:
    if recipe.origin == recipes.SCRATCH:
      continue
    parents = [data.parent_loss(run) for run in recipe.runs]
    parents = [loss for loss in parents if loss is not None]
    common = {
      'kv_heads': recipe.heads,
      'model': recipes.size(recipe.model),
      'method': '' if recipe.how is None else str(recipe.how),
      'parent_loss': recipes.mean_and_sd(parents)['mean'],
      'text': recipe.study,
    }
    if recipe.done and recipe.alpha != 0:
      config = recipe.config['train']
      tokens = config['num_steps'] * recipe.runs[0].tokens_per_step
      rows.append(
        common
        | {
          'alpha': recipe.alpha,
          'tokens': tokens,
          **loss_fields(recipe.loss()),
        }
        | {'runs': '; '.join(run.name for run in recipe.done)}
      )
    for run in recipe.runs:
      if any(step == 0 for step, _ in run.curve('eval/loss')):
        key = tuple(common[name] for name in (*LINE, 'text'))
        start = starts.setdefault(key, (common, {}))[1]
        start[run.parent_paths[0]] = run
  for common, runs in starts.values():
    losses = [run.curve('eval/loss')[0][1] for run in runs.values()]
    rows.append(
      common
      | {'alpha': 0.0, 'tokens': 0, **loss_fields(recipes.mean_and_sd(losses))}
      | {'runs': '; '.join(run.name for run in runs.values())}
    )
  return sorted(
    [*rows, *_published(data)],
    key=lambda r: (heads_order(r['kv_heads']), r['method'], r['alpha'] or 0),
  )


def _published(data: Data) -> Rows:
  """Rows of `uptrained` from lines of results."""
  groups = collections.defaultdict(list)
  for run in data.found.uptrainings:
    text = f'that of {run.name}'
    groups[run.num_kv_heads, run.model, run.method, text].append(run)
  rows = []
  for (heads, model, method, text), runs in groups.items():
    parents = [r.parent_loss for r in runs if r.parent_loss is not None]
    common = {
      'kv_heads': heads,
      'model': model,
      'method': method,
      'parent_loss': recipes.mean_and_sd(parents)['mean'],
      'text': text,
      'runs': runs[0].name,
    }
    starts = {loss for run in runs for at, loss in run.curve if at == 0}
    if starts:
      loss = loss_fields(recipes.mean_and_sd(sorted(starts)))
      rows.append(common | {'alpha': 0.0, 'tokens': 0, **loss})
    for alpha in sorted({run.alpha for run in runs} - {0.0}):
      ends = [run.curve[-1] for run in runs if run.alpha == alpha]
      loss = loss_fields(recipes.mean_and_sd([loss for _, loss in ends]))
      rows.append(common | {'alpha': alpha, 'tokens': ends[0][0], **loss})
  return rows


def alphas(data: Data) -> Rows:
  """`uptrained`; where nothing was evaluated before the first step, what the
  conversion says of its own text stands for it.
  """
  rows = uptrained(data)
  line_of = lambda row: tuple(row[name] for name in LINE)
  lines = {line_of(row) for row in rows}
  known = {line_of(row) for row in rows if row['alpha'] == 0}
  for row in conversion_losses(data):
    line = line_of(row)
    if row['stage'] == 'converted' and line in lines - known:
      rows.append(row)
  return sorted(
    rows,
    key=lambda r: (heads_order(r['kv_heads']), r['method'], r['alpha'] or 0),
  )


def training(data: Data) -> Rows:
  """Loss and gradient norm of every run, whatever became of it."""
  rows, most = [], collections.defaultdict(float)
  for recipe in data.recipes:
    key = recipe.heads, recipe.how
    most[key] = max(most[key], recipe.alpha or 0)
  for recipe in data.recipes:
    for run in recipe.runs:
      parent = data.parent_loss(run)
      longest = (recipe.alpha or 0) == most[recipe.heads, recipe.how]
      for tag in ('train/loss', 'eval/loss', 'train/grad_norm'):
        for step, value in _thinned(run.curve(tag)):
          rows.append(
            {
              'run': run.name,
              'recipe': recipe.label,
              'kv_heads': recipe.heads,
              'kind': recipe.kind,
              'scratch': recipe.origin == recipes.SCRATCH,
              'longest': longest,
              'seed': run.config.get('seed'),
              'state': run.state,
              'tag': tag,
              'step': step,
              'tokens': step * run.tokens_per_step,
              'value': value,
              'parent_loss': parent,
              'runs': run.name,
            }
          )
  return rows


def similarities(data: Data) -> Rows:
  """How alike the heads of a group were, layer by layer."""
  rows = []
  for conversion in data.found.conversions:
    how = recipes.how_of(conversion.result)
    for layer in conversion.result.get('layers', []):
      for what in ('key', 'value'):
        for suffix in ('', '_aligned'):
          name = f'{what}_similarity{suffix}'
          if name in layer:
            rows.append(
              {
                'conversion': conversion.name,
                'model': _model_name(conversion),
                'kv_heads': recipes.heads(conversion.result['num_kv_heads']),
                'method': str(how),
                'layer': layer['layer'],
                'what': f'{what}s, {"aligned" if suffix else "as they are"}',
                'similarity': layer[name],
                'runs': conversion.name,
              }
            )
  return rows


def loss_fields(spread: dict[str, Any]) -> dict[str, Any]:
  """A mean loss, its spread and its runs as fields of a row."""
  return {
    'loss': spread['mean'],
    'loss_sd': spread['sd'],
    'seeds': spread['count'],
  }


def _model_name(conversion: Conversion) -> str:
  """Its size, or the file of results that knows of it."""
  if conversion.model is None:
    return conversion.path.name
  return recipes.size(conversion.model)


def _thinned(curve: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
  """At most so many points, the last one and all that are not finite kept."""
  every = math.ceil(len(curve) / _MAX_POINTS) if curve else 1
  return [
    point
    for i, point in enumerate(curve)
    if i % every == 0 or i == len(curve) - 1 or not math.isfinite(point[1])
  ]
