"""Runs an experiment: all points of a sweep, wherever there are machines.

  python -m gqa.sweep --config=experiments/NAME.py --workdir=DIR \
      --launcher=local|slurm|cloud|print [--parallel=N] [--sweep.NAME=VALUE ...]
  python -m gqa.sweep --workdir=DIR --status

An experiment is a config file with `get_config()` and `sweep()`; points.py says
what `sweep` yields. Every point is an ordinary command with a workdir of its
own, and the sweep's workdir is all that is known about it: the same command
goes on where it was stopped, and two at once share the work. Fields given as
--config.FIELD=VALUE hold for every training point.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from gqa import cli, experiment
from gqa.launch import cloud, layout, local, slots, slurm, table

LAUNCHERS = ('local', 'slurm', 'cloud', 'print')


def launch(sweep: layout.Sweep, options: Mapping[str, Any]) -> int:
  """Starts what is not done by the launcher of the options; an exit code."""
  launcher, parallel = options['launcher'], options['parallel']
  together = options['seeds_together']
  if launcher == 'slurm':
    jobs = slurm.submit(sweep, parallel, options['sbatch'], together)
    for job in jobs:
      print(f'submitted {job}; cancel it by: scancel {job}')
    if not jobs:
      print('nothing to submit: all points have ended, or are in the queue')
    return slurm.watch(sweep) if options['wait'] else 0
  if launcher == 'cloud':
    *files, script = cloud.write(
      sweep, options['bucket'], _fields(options['sky']), together
    )
    print(f'wrote {len(files)} task files; launch them by: bash {script}')
    return 0
  if launcher == 'print':
    states = sweep.states()
    for unit in sweep.units(together):
      left = [p for p in unit if states[p.index]['state'] != layout.DONE]
      if left:
        print(layout.command_of(left))
    return 0
  parts = slots.divide(parallel or 1, options['devices'])
  code = local.run(sweep, parts, together)
  print(table.text(sweep, sweep.states()))
  return code


def retry(sweep: layout.Sweep) -> None:
  """Lets failed points run again; their logs go on."""
  for point, state in zip(sweep.points, sweep.states(), strict=True):
    if state['state'] == layout.FAILED:
      path = sweep.directory(point) / 'state.json'
      layout.write_json(path, state | {'state': layout.WAITING})
  layout.write_results(sweep)


def status(sweep: layout.Sweep) -> int:
  """Prints the table; 0 if all points are done."""
  states = sweep.states()
  print(table.text(sweep, states))
  layout.write_results(sweep)
  return int(any(state['state'] != layout.DONE for state in states))


def _make(options: Mapping[str, Any], extra: Mapping[str, Any]):
  """Reads the experiment, checks every point and writes the sweep."""
  config, workdir = options['config'], options['workdir']
  in_cloud = options['launcher'] == 'cloud'
  steps = experiment.load(config, extra['sweep'], extra['config'])
  points = experiment.expand(
    steps,
    cloud.MOUNT if in_cloud else str(pathlib.Path(workdir).absolute()),
    'python' if in_cloud else sys.executable,
    extra['config'],
  )
  # Only now what imports jax.
  from gqa import runtime, sweep_checks

  here = options['launcher'] in ('local', 'slurm')
  sweep_checks.check(steps, points, data=here)
  return layout.make_sweep(
    workdir,
    config,
    runtime.git_revision(),
    '.' if in_cloud else os.getcwd(),
    points,
  )


def _fields(texts: Sequence[str]) -> dict[str, Any]:
  """NAME=VALUE each."""
  fields = {}
  for text in texts:
    name, equals, value = text.partition('=')
    if not equals:
      raise ValueError(f'--sky={text} must be NAME=VALUE.')
    fields[name] = experiment.literal(value)
  return fields


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
  """Takes --sweep.NAME=VALUE and --config.FIELD=VALUE out of arguments."""
  rest, extra = [], {'sweep': {}, 'config': {}}
  for argument in argv:
    name, equals, value = argument.lstrip('-').partition('=')
    kind, dot, name = name.partition('.')
    if argument.startswith('-') and dot and kind in extra:
      if not equals:
        cli.fail(f'{argument} must be --{kind}.NAME=VALUE.')
      extra[kind][name] = value
    else:
      rest.append(argument)
  return rest, extra


def main(extra: Mapping[str, Mapping[str, str]], argv: Sequence[str]) -> int:
  """Launches, or shows, the sweep of the flags."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]} is no flag; write --config=FILE.')
  options = flags.FLAGS.flag_values_dict()
  if options['status']:
    return status(layout.open_sweep(options['workdir']))
  if options['config'] is None:
    raise ValueError('--config must be given; see --help.')
  sweep = _make(options, extra)
  if options['retry']:
    retry(sweep)
  return launch(sweep, options)


def _define_flags():
  flags.DEFINE_string('config', None, 'experiment file[:argument]')
  flags.DEFINE_string('workdir', None, 'directory of the sweep', required=True)
  flags.DEFINE_enum('launcher', 'local', LAUNCHERS, 'where points run')
  flags.DEFINE_integer(
    'parallel', None, 'points at once; local: 1, slurm: all', lower_bound=1
  )
  flags.DEFINE_string(
    'devices',
    'auto',
    "what local points divide: 'auto', 'none', or GPUs such as 0,1,2,3",
  )
  flags.DEFINE_bool(
    'seeds_together', False, 'train the seeds of a config in one program'
  )
  flags.DEFINE_bool('status', False, 'only print the table')
  flags.DEFINE_bool('retry', False, 'run failed points again')
  flags.DEFINE_bool('wait', False, 'slurm: show the table until all have ended')
  flags.DEFINE_multi_string(
    'sbatch', [], 'slurm: an option of sbatch, such as --sbatch=--gres=gpu:1'
  )
  flags.DEFINE_string('bucket', 'gqa-sweeps', 'cloud: name, or URL of a bucket')
  flags.DEFINE_multi_string(
    'sky',
    ['accelerators=tpu-v5litepod-8', 'use_spot=true'],
    'cloud: a resource of SkyPilot, such as --sky=accelerators=H100:1',
  )


if __name__ == '__main__':
  _define_flags()
  sys.argv, _extra = _split(sys.argv)
  cli.run(functools.partial(main, _extra))
