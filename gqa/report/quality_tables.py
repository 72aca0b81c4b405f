"""Tables of quality: models, conversions, and fair comparisons."""

from __future__ import annotations

import collections
import statistics

from gqa.report import read, recipes, series
from gqa.report.join import Data
from gqa.report.table import Table, loss_text, number, spread
from gqa.tables import quantity

_WIDTH = ('match_params', 'mlp_dim')  # what match_params changes in a model


def main(data: Data) -> Table:
  """T1: what a model is worth and costs."""
  settings = main_settings(data)
  rows = []
  for recipe in data.recipes:
    row = {
      'recipe': recipe.label,
      'kv_heads': recipe.heads,
      'origin': recipe.origin,
      'parameters': read.params_of(recipe.model),
      'kv_bytes_per_token': read.kv_bytes(recipe.model),
      **series.loss_fields(recipe.loss()),
      'not_done': len(recipe.runs) - len(recipe.done),
    }
    timings = data.matching(recipe)
    for i, setting in enumerate(settings, 1):
      timing = next((t for t in timings if t.setting == setting), None)
      row |= {f'batch_size_{i}': setting[0], f'context_{i}': setting[1]}
      row[f'ms_{i}'] = timing and 1e3 * timing.row['step_seconds']
      base = timing and _multi_head(data, timing)
      row[f'speedup_{i}'] = base and 1e3 * base / row[f'ms_{i}']
    row['largest_batch'] = '; '.join(
      f'{size:,} of {context:,} tokens'
      for context, size in sorted(data.largest_batches(recipe).items())
    )
    rows.append(row | {'runs': recipe.names})
  columns = [
    ('model', lambda r: r['recipe']),
    ('parameters', lambda r: quantity(r['parameters'])),
    ('KV bytes per token', lambda r: f'{r["kv_bytes_per_token"]:,}'),
    ('validation loss, nats per token', loss_text),
    ('seeds', lambda r: str(r['seeds'])),
  ]
  for i, setting in enumerate(settings, 1):
    where = f'batch {setting[0]:,}, {setting[1]:,} tokens'
    columns += [
      (f'ms per step, {where}', number(f'ms_{i}', '.2f')),
      ('times as fast as multi-head', number(f'speedup_{i}', '.2f')),
    ]
  columns.append(('largest batch', lambda r: r['largest_batch'] or '-'))
  return Table(
    'T1',
    'Quality, size and time of each model',
    columns,
    rows,
    'a training run with its config.json',
    'Loss is the mean over seeds that came to their end, and \u00b1 their '
    'standard deviation. A step gives each sequence of the batch a token.',
  )


def main_settings(data: Data) -> list[tuple]:
  """Two settings of decoding in which the most recipes were timed."""
  counts = collections.Counter()
  for recipe in data.recipes:
    counts.update({t.setting for t in data.matching(recipe)})
  most = max(counts.values(), default=0)
  full = sorted(s for s, n in counts.items() if n == most)
  full.sort(key=lambda s: s[0] * s[1])
  return full if len(full) < 2 else [full[0], full[-1]]


def _multi_head(data, timing):
  """Seconds of the multi-head model of the same shape and setting."""
  if timing.model is None:
    return None
  for other in data.timings:
    if (
      other.model is not None
      and other.setting == timing.setting
      and other.subject == timing.subject
      and recipes.multi_head(other.model)
    ):
      return other.row['step_seconds']
  return None


def conversions(data: Data) -> Table:
  """T2: methods and groupings."""
  groups = collections.defaultdict(list)
  rows = series.conversion_losses(data)
  rows += [
    row | {'stage': 'alpha 0'}
    for row in series.uptrained(data)
    if row['alpha'] == 0 and row['method']
  ]
  for row in rows:
    groups[tuple(row[name] for name in series.LINE)].append(row)
  recovered = _recovered(data)
  alphas, rows = [], []
  for line, group in groups.items():
    row = dict(zip(series.LINE, line, strict=True))
    row['parent_kv_heads'] = next(
      (r['parent_kv_heads'] for r in group if r.get('parent_kv_heads')), None
    )
    for one in group:
      if one['stage'] == 'converted':
        name = 'converted'
        row.setdefault('parent', one['parent_loss'])
      else:
        name = f'alpha {one["alpha"]:g}'
        alphas.append(one['alpha'])
        row.setdefault('trained_parent', one['parent_loss'])
      row[name], row[f'{name} sd'] = one['loss'], one['loss_sd']
    row['tokens_to_recover'] = recovered.get(line)
    runs = dict.fromkeys(n for r in group for n in r['runs'].split('; '))
    rows.append(row | {'runs': '; '.join(runs)})
  columns = [
    ('model', lambda r: r['model'] or '-'),
    ('KV heads', lambda r: f'{r["parent_kv_heads"] or "?"} to {r["kv_heads"]}'),
    ('method and grouping', lambda r: r['method']),
    ('parent, conversion text', number('parent', '.3f')),
    ('right after, conversion text', number('converted', '.3f')),
    ('parent, validation', number('trained_parent', '.3f')),
  ]
  for alpha in sorted(set(alphas)):
    name = f'alpha {alpha:g}'
    columns.append((f'{name}, validation', spread(name, f'{name} sd')))
  columns.append(
    (
      'tokens to win back 95%',
      lambda r: quantity(r['tokens_to_recover']) or '-',
    )
  )
  return Table(
    'T2',
    'Conversion: loss right after it, and after uptraining',
    columns,
    rows,
    'a convert.json (python -m gqa.convert) with a text',
    'Nats per token, zero-shot. Losses of the conversion are on its held-out '
    'text, those of uptraining on the validation text: compare within each.',
  )


def _recovered(data):
  """Tokens after which 95% of the gap to the parent is closed.

  Of the recipe with the largest alpha; the median over its runs if all of them
  come so far.
  """
  found = collections.defaultdict(lambda: collections.defaultdict(list))
  for recipe in data.recipes:
    if recipe.how is not None:
      line = recipes.size(recipe.model), recipe.heads, str(recipe.how)
      for run in recipe.done:
        size = run.tokens_per_step
        curve = [(step * size, loss) for step, loss in run.curve('eval/loss')]
        tokens = _tokens_to_recover(data.parent_loss(run), curve)
        found[line][recipe.alpha or 0].append(tokens)
  for run in data.found.uptrainings:
    line = run.model, run.num_kv_heads, run.method
    tokens = _tokens_to_recover(run.parent_loss, run.curve)
    found[line][run.alpha].append(tokens)
  longest = {line: by_alpha[max(by_alpha)] for line, by_alpha in found.items()}
  return {
    line: statistics.median(tokens)
    for line, tokens in longest.items()
    if None not in tokens
  }


def _tokens_to_recover(parent, curve):
  if parent is None or not curve or curve[0][0] != 0:
    return None
  goal = parent + 0.05 * (curve[0][1] - parent)
  return next((at for at, loss in curve if at and loss <= goal), None)


def from_scratch(data: Data) -> Table:
  """T3: the comparison at equal tokens."""
  rows = []
  for recipe in data.recipes:
    if recipe.origin == recipes.SCRATCH or not (recipe.done and recipe.alpha):
      continue
    parent = data.parent_run(recipe.runs[0])
    if parent is None or parent.model is None:
      continue
    own = recipe.done[0].step * recipe.runs[0].tokens_per_step
    total = own + parent.step * parent.tokens_per_step
    for other in data.recipes:
      comparable = (
        other.origin == recipes.SCRATCH
        and other.study == recipe.study
        and recipes.shape_key(other.model) == recipes.shape_key(recipe.model)
      )
      at = [_loss_at(run, total) for run in other.done] if comparable else []
      at = [point for point in at if point]
      if at:
        scratch = recipes.mean_and_sd([loss for _, loss in at])
        rows.append(
          {
            'kv_heads': recipe.heads,
            'origin': recipe.origin,
            'total_tokens': total,
            **series.loss_fields(recipe.loss()),
            'scratch': other.label,
            'scratch_tokens': min(tokens for tokens, _ in at),
            'scratch_loss': scratch['mean'],
            'scratch_loss_sd': scratch['sd'],
            'scratch_seeds': scratch['count'],
            'runs': f'{recipe.names}; {other.names}',
          }
        )
  return Table(
    'T3',
    'From scratch and uptrained at an equal number of tokens',
    [
      ('KV heads', lambda r: r['kv_heads']),
      ('uptrained how', lambda r: r['origin']),
      ("tokens, parent's and own", lambda r: quantity(r['total_tokens'])),
      ('uptrained loss', loss_text),
      ('from scratch', lambda r: r['scratch']),
      ('its tokens', lambda r: quantity(r['scratch_tokens'])),
      ('its loss', spread('scratch_loss', 'scratch_loss_sd')),
      ('equal', lambda r: _equal(r['scratch_tokens'], r['total_tokens'])),
    ],
    rows,
    'an uptrained run, its parent, and runs of as many KV heads from scratch '
    'on the same text',
    'From scratch it is the last evaluation within the tokens of the other; '
    '"equal" says whether that is within 1%.',
  )


def _loss_at(run, tokens):
  """(tokens, loss) of the last evaluation within so many tokens."""
  seen = [
    (step * run.tokens_per_step, loss)
    for step, loss in run.curve('eval/loss')
    if 0 < step * run.tokens_per_step <= tokens
  ]
  return seen[-1] if seen else None


def _equal(a, b):
  return 'yes' if abs(a / b - 1) <= 0.01 else f'{a / b:.2f} of them'


def matched(data: Data) -> Table:
  """T4: with match_params and without."""
  pairs = collections.defaultdict(dict)
  for recipe in data.recipes:
    if recipe.origin == recipes.SCRATCH and recipe.done:
      matched = recipe.matched
      pairs[recipe.key(_WIDTH)][matched] = recipe
  rows = []
  for pair in pairs.values():
    if len(pair) == 2:
      plain, widened = pair[False], pair[True]
      row = {'kv_heads': plain.heads}
      for name, recipe in (('plain', plain), ('matched', widened)):
        loss = recipe.loss()
        row |= {
          f'{name}_mlp_dim': recipe.model.mlp_dim,
          f'{name}_parameters': read.params_of(recipe.model),
          f'{name}_loss': loss['mean'],
          f'{name}_loss_sd': loss['sd'],
          f'{name}_seeds': loss['count'],
        }
      row['difference'] = row['matched_loss'] - row['plain_loss']
      rows.append(row | {'runs': f'{plain.names}; {widened.names}'})
  return Table(
    'T4',
    'With the parameters that fewer KV heads save given to the MLP, and not',
    [
      ('KV heads', lambda r: r['kv_heads']),
      ('parameters', lambda r: quantity(r['plain_parameters'])),
      ('loss', spread('plain_loss', 'plain_loss_sd')),
      ('parameters, matched', lambda r: quantity(r['matched_parameters'])),
      ('MLP', lambda r: f'{r["plain_mlp_dim"]} to {r["matched_mlp_dim"]}'),
      ('loss, matched', spread('matched_loss', 'matched_loss_sd')),
      ('difference', number('difference', '+.4f')),
    ],
    rows,
    'runs of equal KV heads with model.match_params and without',
  )
