"""Hands points to SLURM: a job array for each stage of what waits for what.

A task of an array runs one point, by `srun`, with as many processes as the
options say. Preempted, or near the end of its time, a point saves, exits with
code 75 and is requeued; the same command then goes on where it was.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gqa.launch import layout, runner, table

_FILE = 'slurm.json'  # the jobs of a sweep
_ARRAY = 1000  # tasks in one array; SLURM's own default limit is 1001
_PERIOD = 2.0  # seconds between two looks
# SLURM's signal may come up to a minute early, and saving takes its time.
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --output={workdir}/slurm/%A_%a.txt --open-mode=append
#SBATCH --requeue --signal=TERM@120
points=(
{points}
)
cd {cwd} || exit
{python} -m gqa.launch.runner --patience=120{options} \\
  --prefix='srun --kill-on-bad-exit=0 --wait=0' \\
  --directory={workdir}/"${{points[SLURM_ARRAY_TASK_ID]}}"
code=$?
if [ $code -eq {stopped} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 1000 ]; then
  # Not after the exit, which would make it a failed job.
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
  sleep 120
fi
exit $code
"""


def submit(
  sweep: layout.Sweep,
  parallel: int | None,
  options: Sequence[str],
  together: bool = False,
) -> list[str]:
  """Submits what is not done and not in the queue; returns the new jobs' ids.

  Args:
    sweep: whose workdir all nodes see under the same path.
    parallel: tasks of an array that run at once; None for all.
    options: of sbatch, such as '--partition=gpu'.
    together: whether a task runs all seeds of a config.

  Raises:
    ValueError: sbatch refuses, or is not there.
  """
  if shutil.which('sbatch') is None:
    raise ValueError(
      'launcher=slurm: there is no sbatch here; start from a login node, or '
      'choose another --launcher.'
    )
  (sweep.workdir / 'slurm').mkdir(exist_ok=True)
  with layout.locked(sweep.workdir):
    jobs = _jobs(sweep)
    jobs_of = _queued(jobs)  # point -> id of the array that will run it
    new = []
    for stage in _stages(sweep, jobs_of, together):
      for start in range(0, len(stage), _ARRAY):
        part = stage[start : start + _ARRAY]
        after = {i for unit in part for i in unit[0].after}
        waits = sorted({jobs_of[i] for i in after if i in jobs_of})
        job = _sbatch(sweep, part, parallel, options, waits, together)
        tasks = [[point.index for point in unit] for unit in part]
        jobs.append({'job': job, 'points': tasks})
        # Written at once: what is in the queue is known if the next one fails.
        layout.write_json(sweep.workdir / _FILE, jobs)
        jobs_of |= {index: job for task in tasks for index in task}
        new.append(job)
  return new


def watch(sweep: layout.Sweep) -> int:
  """Shows the table until no job of the sweep is left; returns an exit code.

  To stop watching leaves the jobs alone.
  """
  live = table.Live(sweep)
  try:
    while True:
      queued = _queued(_jobs(sweep))
      states = sweep.states()
      live.update(states)
      if not queued:
        break
      time.sleep(_PERIOD)
  except KeyboardInterrupt:
    return runner.STOPPED
  if all(state['state'] == layout.DONE for state in states):
    return 0
  failed = any(state['state'] == layout.FAILED for state in states)
  return 1 if failed else runner.STOPPED


def _stages(
  sweep: layout.Sweep, queued: Mapping[int, str], together: bool
) -> list[list[tuple[layout.Point, ...]]]:
  """What to submit, by how many others each waits for in a row."""
  depth: dict[int, int] = {}
  stages: dict[int, list[tuple[layout.Point, ...]]] = {}
  states, ended = sweep.states(), (layout.DONE, layout.FAILED, layout.RUNNING)
  for unit in sweep.units(together):
    left = tuple(
      point
      for point in unit
      if states[point.index]['state'] not in ended and point.index not in queued
    )
    if left:
      level = 1 + max((depth.get(i, -1) for i in left[0].after), default=-1)
      depth |= {point.index: level for point in left}
      stages.setdefault(level, []).append(left)
  return [stages[level] for level in sorted(stages)]


def _sbatch(sweep, units, parallel, options, waits, together) -> str:
  quote = shlex.quote
  script = _SCRIPT.format(
    name=quote(sweep.workdir.name),
    workdir=quote(str(sweep.workdir)),
    points='\n'.join(quote(unit[0].name) for unit in units),
    cwd=quote(sweep.cwd),
    python=quote(sys.executable),
    stopped=runner.STOPPED,
    options=' --seeds_together' if together else '',
  )
  limit = f'%{parallel}' if parallel else ''
  command = ['sbatch', '--parsable', f'--array=0-{len(units) - 1}{limit}']
  if waits:
    # Not afterok: a failed point holds up only those that wait for it, which
    # they find out themselves.
    command.append(f'--dependency=afterany:{":".join(waits)}')
  done = subprocess.run(
    [*command, *options], input=script, capture_output=True, text=True
  )
  if done.returncode:
    raise ValueError(f'sbatch refused: {done.stderr.strip()}')
  return done.stdout.strip().split(';')[0]


def _jobs(sweep: layout.Sweep) -> list[dict[str, Any]]:
  path = sweep.workdir / _FILE
  return json.loads(path.read_text()) if path.exists() else []


def _queued(jobs: Sequence[Mapping[str, Any]]) -> dict[int, str]:
  """The points that are in SLURM's queue, with the job of each."""
  if not jobs:
    return {}
  listed = subprocess.run(
    ['squeue', '--noheader', '--array', '--format=%F %K'],
    capture_output=True,
    text=True,
  )
  if listed.returncode:
    raise ValueError(f'squeue failed: {listed.stderr.strip()}')
  queued = {}
  tasks = {tuple(line.split()) for line in listed.stdout.splitlines()}
  for job in jobs:
    for task, indexes in enumerate(job['points']):
      if (job['job'], str(task)) in tasks:
        queued |= dict.fromkeys(indexes, job['job'])
  return queued
