"""Trains a decoder with any number of KV heads.

  python -m gqa.train --config=configs/tiny.py --workdir=DIR \
      [--config.model.num_kv_heads=2 ...]
  python -m gqa.train --config=configs/tiny.py \
      --seeds=0,1 --workdir=DIR_0 --workdir=DIR_1

The workdir is the whole state of a run: the same command goes on where it was
stopped, to the bit. SIGTERM, SIGUSR1 and SIGUSR2 save at the next step boundary
and exit with code 75, for a scheduler that requeues the command.

With --seeds, runs that differ in nothing else are updated by one program, for
models too small to keep a device busy; each has its own workdir, as if it had
been alone, and tells the speed of its own tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import jax
from absl import flags
from ml_collections import config_flags

from gqa import cli, profiling, runtime
from gqa.preemption import EXIT_PREEMPTED, Preemption
from gqa.run import Run


def train(config, workdir: str, allow_config_change: bool = False) -> int:
  """Runs, or goes on with, the run of `config` in `workdir`.

  Returns:
    0 when all steps are done, 75 when a signal stopped it after saving.

  Raises:
    ValueError, TypeError, OSError: bad input, found before compilation where
      that can be.
    FloatingPointError: too many updates in a row were not finite.
  """
  return advance([Run(config, workdir, allow_config_change)])


def train_seeds(
  config,
  seeds: Sequence[int],
  workdirs: Sequence[str],
  allow_config_change: bool = False,
) -> int:
  """Like `train`, for several seeds in one program, each in its own workdir.

  Raises:
    ValueError: there is not a workdir for each seed, or one is given twice.
  """
  for name, values in (('seeds', seeds), ('workdir', workdirs)):
    if len(set(values)) < len(values):
      raise ValueError(f'--{name} has {list(values)}; give each one once.')
  if len(seeds) != len(workdirs):
    raise ValueError(
      f'--seeds has {len(seeds)} values and --workdir is given '
      f'{len(workdirs)} times; give one workdir for each seed, in their order.'
    )
  runs: list[Run] = []
  for seed, workdir in zip(seeds, workdirs, strict=True):
    config = config.copy_and_resolve_references()
    config.seed = seed
    name = f'seed {seed}' if len(seeds) > 1 else ''
    runs.append(Run(config, workdir, allow_config_change, runs, name))
  return advance(runs)


def advance(runs: Sequence[Run]) -> int:
  """Trains runs of one program to their end, or to a signal; see `train`."""
  preemption = Preemption()
  program = runs[0].program
  try:
    with contextlib.ExitStack() as stack:
      for run in runs:
        stack.enter_context(run)
      program.load_teacher()
      stack.enter_context(jax.set_mesh(program.mesh))
      profiler = profiling.Profiler(
        program.config.train.profile, runs[0].workdir
      )
      for run in runs:
        if run.awaits_evaluation:
          run.evaluate_and_save(False)
      stopped = False
      # Those that are behind go on without the others until they are there.
      marks = {run.step for run in runs} | {program.config.train.num_steps}
      for start, until in itertools.pairwise(sorted(marks)):
        behind = [run for run in runs if run.step <= start]
        if not stopped:
          stopped = _advance(behind, until, profiler, preemption)
      for run in runs:
        run.end(stopped)
  finally:
    preemption.close()
  return EXIT_PREEMPTED if stopped else 0


def _advance(
  runs: Sequence[Run],
  until: int,
  profiler: profiling.Profiler,
  preemption: Preemption,
) -> bool:
  """Updates runs that are at one step; returns whether a signal stopped it."""
  program, step = runs[0].program, runs[0].step
  steps, per_call = (
    program.steps(len(runs)),
    program.config.train.steps_per_call,
  )
  keys = steps.keys([run.key for run in runs])
  states = steps.join([run.state for run in runs])
  pending = None
  stopped = False
  while step < until and not stopped:
    batches = steps.put([run.next_batches(per_call) for run in runs])
    if jax.default_backend() == 'cpu':
      # Two calls under way would hold the temporaries of both.
      _report(runs, steps, pending)
      pending = None
    profiler.before(step + 1, step + per_call)
    states, values = steps.update(states, batches, keys, *program.teacher)
    step += per_call
    # The previous call's metrics, now that this one is under way.
    _report(runs, steps, pending)
    pending = step, values
    for run in runs:
      run.rate.step(per_call)
    profiler.after(step, states)
    stopped = preemption.reached(step)
    if stopped or step == until or runs[0].at_boundary(step):
      _report(runs, steps, pending)
      pending = None
      with contextlib.ExitStack() as stack:
        for run in runs:
          stack.enter_context(run.rate.paused())
        for run, state in zip(runs, steps.split(states), strict=True):
          run.state, run.step = state, step
          run.evaluate_and_save(stopped)
  return stopped


def _report(runs, steps, pending) -> None:
  if pending is None:
    return
  last, values = pending
  values = jax.device_get(values)
  for index, run in enumerate(runs):
    run.report(last, steps.values_of(index, values))


def _whole_numbers(seeds: Sequence[str]) -> list[int]:
  try:
    return [int(seed) for seed in seeds]
  except ValueError:
    raise ValueError(
      f'--seeds={",".join(seeds)} must be whole numbers, such as 0,1,2.'
    ) from None


def main(argv):
  """Trains as the flags say."""
  del argv
  flag = flags.FLAGS
  runtime.start(flag.config)
  seeds = _whole_numbers(flag.seeds) or [flag.config.seed]
  code = train_seeds(flag.config, seeds, flag.workdir, flag.allow_config_change)
  if jax.process_count() > 1:
    jax.distributed.shutdown()
  return code


def _define_flags():
  config_flags.DEFINE_config_file('config', lock_config=True)
  flags.mark_flag_as_required('config')
  flags.DEFINE_multi_string(
    'workdir',
    None,
    'directory of the run; one for each of --seeds',
    required=True,
  )
  flags.DEFINE_list(
    'seeds', [], 'of runs to train together, in place of config.seed'
  )
  flags.DEFINE_bool(
    'allow_config_change', False, 'resume although the config differs'
  )


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
