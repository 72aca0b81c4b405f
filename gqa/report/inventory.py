"""What was read, and in which state it is."""

from __future__ import annotations

from gqa.report import read, recipes
from gqa.report.join import Data
from gqa.report.table import Table, number


def make(data: Data) -> list[Table]:
  """What was read, and in which state."""
  return [_not_whole(data), _runs(data), _converted(data), _points(data)]


def _not_whole(data):
  found = data.found
  rows = [
    {'what': 'run', 'where': run.name, 'state': run.state, 'why': run.why}
    for run in found.runs
    if run.state != read.DONE
  ]
  known = {run.path for run in found.runs}
  for point in found.points:
    if point.path not in known and point.status != 'done':
      code = point.state.get('exit_code')
      rows.append(
        {
          'what': f'{point.verb} of a sweep',
          'where': f'{point.sweep}/{point.name}',
          'state': point.status,
          'why': '' if code is None else f'exit code {code}',
        }
      )
  for problem in found.problems:
    rows.append(
      {
        'what': 'file',
        'where': problem.where,
        'state': 'unreadable',
        'why': problem.what,
      }
    )
  return Table(
    'incomplete',
    'What is missing, partial, diverged or failed',
    [(n, lambda r, n=n: r[n]) for n in ('what', 'where', 'state', 'why')],
    rows,
    note='None of these is part of a mean; their curves are drawn as far as '
    'they go.',
  )


def _runs(data):
  labels = {run.name: r.label for r in data.recipes for run in r.runs}
  rows = [
    {
      'run': run.name,
      'recipe': labels.get(run.name, ''),
      'seed': (run.config or {}).get('seed'),
      'state': run.state,
      'step': run.step,
      'loss': run.last('eval/loss'),
      'bits_per_byte': run.last('eval/bits_per_byte'),
      'best_loss': min((v for _, v in run.curve('eval/loss')), default=None),
      'tokens_per_second': run.last('speed/tokens_per_second'),
      'skipped_updates': run.last('train/skipped_updates'),
      'path': str(run.path),
    }
    for run in data.found.runs
  ]
  return Table(
    'runs',
    'Training runs',
    [
      ('run', lambda r: r['run']),
      ('model', lambda r: r['recipe']),
      ('seed', lambda r: '-' if r['seed'] is None else str(r['seed'])),
      ('state', lambda r: r['state']),
      ('step', number('step', ',')),
      ('last validation loss', number('loss', '.4f')),
      ('lowest', number('best_loss', '.4f')),
      ('bits per byte', number('bits_per_byte', '.4f')),
      ('tokens/s', number('tokens_per_second', ',.0f')),
      ('updates skipped', number('skipped_updates', ',.0f')),
    ],
    rows,
    'a workdir of python -m gqa.train',
  )


def _converted(data):
  rows = []
  for conversion in data.found.conversions:
    result = conversion.result
    rows.append(
      {
        'conversion': conversion.name,
        'parent': result.get('source'),
        'parent_kv_heads': recipes.heads(result['parent_kv_heads']),
        'kv_heads': recipes.heads(result['num_kv_heads']),
        'method': str(recipes.how_of(result)),
        'loss_before': result.get('loss_before'),
        'loss_after': result.get('loss_after'),
        'seconds': result.get('seconds'),
      }
    )
  return Table(
    'conversions',
    'Conversions',
    [
      ('conversion', lambda r: r['conversion']),
      ('KV heads', lambda r: f'{r["parent_kv_heads"]} to {r["kv_heads"]}'),
      ('method', lambda r: r['method']),
      ('loss before', number('loss_before', '.4f')),
      ('loss after', number('loss_after', '.4f')),
      ('seconds', number('seconds', ',.0f')),
    ],
    rows,
    'a workdir of python -m gqa.convert',
  )


def _points(data):
  rows = [
    {
      'sweep': point.sweep,
      'point': point.name,
      'verb': point.verb,
      'state': point.status,
      'exit_code': point.state.get('exit_code'),
      'loss': _loss(point),
      'attempts': point.state.get('attempts'),
    }
    for point in data.found.points
  ]
  names = ('sweep', 'point', 'verb', 'state', 'exit_code', 'attempts', 'loss')
  dash = lambda value: f'{value:.4f}' if type(value) is float else str(value)
  return Table(
    'points',
    'Points of sweeps',
    [
      (n.replace('_', ' '), lambda r, n=n: '-' if r[n] is None else dash(r[n]))
      for n in names
    ],
    rows,
    'a sweep.json (python -m gqa.sweep)',
  )


def _loss(point):
  """The loss that a point came to, if its verb has one."""
  found = point.state.get('metrics') or {}
  for name in ('eval/loss', 'loss_after', 'loss'):
    if name in found:
      return found[name]
  return None
