"""Runs the command of one point: one attempt, with its log and its state.

  python -m gqa.launch.runner --directory=SWEEP/NAME

Every launcher starts points through it. Several of these on one point are
harmless: one of them runs it. Exit codes: 0 the point is done; 75 it was
stopped and goes on by the same command; 76 somebody else runs it; 77 a point
that it waits for is not done; others are the failure's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from gqa import cli, points
from gqa.launch import layout, lock, outcome

STOPPED, BUSY, BLOCKED = 75, 76, 77
_SIGNALS = (
  signal.SIGTERM,
  signal.SIGINT,
  signal.SIGHUP,
  signal.SIGUSR1,
  signal.SIGUSR2,
)
# Ends by a signal before a command could catch it, as Popen or a shell put it.
_SIGNALLED = {
  code
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  for code in (-number, 128 + number)
}


def run_point(
  directory: str | os.PathLike[str],
  prefix: str = '',
  patience: float = 2.0,
  tethered: bool = False,
  together: bool = False,
) -> int:
  """Runs a point unless it has ended; returns an exit code as above.

  Args:
    directory: of the point, in the workdir of its sweep.
    prefix: words before the command, such as those of srun.
    patience: seconds to wait for somebody who holds the point.
    tethered: whether the end of standard input stops it, so that it does not
      outlive the launcher that has the other end.
    together: whether to run with it those that differ by their seed alone, as
      one process. If that fails each of them runs alone, to tell which failed.
  """
  directory = pathlib.Path(directory).absolute()
  sweep = layout.open_sweep(directory.parent)
  point = sweep.find(directory.name)
  for index in point.after:
    other = sweep.points[index]
    state = layout.read_state(sweep.directory(other))['state']
    if state != layout.DONE:
      print(f'{point.name} waits for {other.name}, which is {state}.')
      return BLOCKED
  how = prefix, patience, tethered
  unit = next(unit for unit in sweep.units(together) if point in unit)
  result, left = _attempt(sweep, point, unit, *how)
  for alone in left:
    code, _ = _attempt(sweep, alone, (alone,), *how)
    if code == STOPPED:
      return code
    result = result or code
  return result


def _attempt(
  sweep, point, unit, prefix, patience, tethered
) -> tuple[int, Sequence[layout.Point]]:
  """Runs a point and what it can of its unit, as one process.

  Returns:
    (exit code, the points that are to be tried alone).
  """
  with contextlib.ExitStack() as stack:
    members = []
    for member in sorted(unit, key=lambda other: other != point):
      directory = sweep.directory(member)
      own = lock.Lock(directory / '.lock')
      if not own.acquire(patience if member == point else 0.0):
        if member == point:
          print(f'{point.name} is run by {lock.holder(directory / ".lock")}.')
          return BUSY, ()
        continue
      stack.callback(own.release)
      state = layout.read_state(directory)
      if state['state'] not in (layout.DONE, layout.FAILED):
        members.append(
          _Member(member, directory, own.fd, state['attempts'] + 1)
        )
      elif member == point:
        failed = state['state'] == layout.FAILED
        return (state['exit_code'] or 1) if failed else 0, ()
    members.sort(key=lambda member: member.point.index)
    attempt = _Attempt(sweep, members, prefix)
    code = attempt.run(tethered)
    if len(members) == 1 or attempt.ended:
      return code, ()
    return 0, [member.point for member in members]


@dataclasses.dataclass(frozen=True)
class _Member:
  """A point of an attempt."""

  point: layout.Point
  directory: pathlib.Path
  fd: int  # of its lock
  attempts: int  # with this one


class _Attempt:
  """One life of a command, of a point or of several."""

  def __init__(self, sweep, members, prefix):
    self.ended = True  # or each member is to be tried alone
    self._sweep, self._members = sweep, members
    command = layout.command_of([member.point for member in members])
    self._argv = shlex.split(prefix) + shlex.split(command)
    self._stopping = False
    self._process: subprocess.Popen | None = None
    self._state = {
      'state': layout.RUNNING,
      'exit_code': None,
      'started': time.time(),
      'ended': None,
      'host': socket.gethostname(),
      'pid': os.getpid(),
    }

  def run(self, tethered: bool) -> int:
    """Starts the command, waits for its end and writes down what it was."""
    for number in _SIGNALS:
      signal.signal(number, self._stop)
    for member in self._members:
      self._save(member)
      # In a cloud nobody has made the directory before.
      entry = member.point.to_dict()
      layout.write_json(member.directory / 'point.json', entry)
      if member.point.verb == 'convert':
        _clear(member.directory)
    first, *others = self._members
    for member in others:
      with open(member.directory / 'log.txt', 'ab') as log:
        what = f'with {first.point.name}, whose log has what it printed'
        log.write(_headline(member, what))
    with open(first.directory / 'log.txt', 'ab') as log:
      start = log.tell()
      log.write(_headline(first, shlex.join(self._argv)))
      log.flush()
      code = self._run(log, tethered)
    self._end(code, start)
    layout.write_results(self._sweep)
    if self._state['state'] == layout.STOPPED:
      return STOPPED
    return code if 0 <= code < 256 else 1

  def _run(self, log, tethered: bool) -> int:
    if self._stopping:
      return -signal.SIGTERM
    try:
      self._process = subprocess.Popen(
        self._argv,
        cwd=self._sweep.cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[
          member.fd for member in self._members
        ],  # the points are taken while it lives
      )
    except OSError as error:
      log.write(f'error: {error}\n'.encode())
      return 127
    if self._stopping:  # the signal came while it was started
      self._process.terminate()
    if tethered:
      threading.Thread(target=self._watch_launcher, daemon=True).start()
    return self._process.wait()

  def _stop(self, number, frame) -> None:
    del number, frame
    self._stopping = True
    if self._process is not None:
      self._process.terminate()

  def _watch_launcher(self) -> None:
    with contextlib.suppress(OSError):
      while os.read(sys.stdin.fileno(), 1):
        pass
    self._stop(None, None)

  def _end(self, code: int, log_start: int) -> None:
    stopped = code == STOPPED or code in _SIGNALLED
    if code == 0:
      name = layout.DONE
    elif stopped or self._stopping:
      name = layout.STOPPED
    elif len(self._members) > 1:
      name, self.ended = layout.STOPPED, False
    else:
      name = layout.FAILED
    self._state |= {'state': name, 'exit_code': code, 'ended': time.time()}
    for member in self._members:
      verb = member.point.verb
      found = outcome.metrics(verb, member.directory, log_start)
      self._save(member, metrics=found)

  def _save(self, member: _Member, **more: Any) -> None:
    state = self._state | {'attempts': member.attempts} | more
    layout.write_json(member.directory / 'state.json', state)


def _headline(member: _Member, what: str) -> bytes:
  """The line before what an attempt prints."""
  when = time.strftime('%Y-%m-%d %H:%M:%S')
  names = ('CUDA_VISIBLE_DEVICES', 'TPU_VISIBLE_CHIPS')
  shown = [f'{n}={os.environ[n]}' for n in names if n in os.environ]
  attempt = f'attempt {member.attempts} on {socket.gethostname()}'
  return f'[{when}] {attempt}: {" ".join([*shown, what])}\n'.encode()


def _clear(directory: pathlib.Path) -> None:
  """Removes what an attempt left that did not end: it cannot go on from it."""
  for entry in directory.iterdir():
    if entry.name.startswith('.') or entry.name in points.LAUNCHER_FILES:
      continue
    if entry.is_dir() and not entry.is_symlink():
      shutil.rmtree(entry)
    else:
      entry.unlink()


def main(argv: Any) -> int:
  """Runs the point of the flags."""
  del argv
  flag = flags.FLAGS
  if flag.cores:
    os.sched_setaffinity(0, {int(core) for core in flag.cores})
  return run_point(
    flag.directory,
    flag.prefix,
    flag.patience,
    flag.tethered,
    flag.seeds_together,
  )


def _define_flags():
  flags.DEFINE_string('directory', None, 'of the point', required=True)
  flags.DEFINE_string('prefix', '', 'words before the command')
  flags.DEFINE_float('patience', 2.0, 'seconds to wait for who holds the point')
  flags.DEFINE_bool('tethered', False, 'stop at the end of standard input')
  flags.DEFINE_bool(
    'seeds_together', False, 'run with it what differs by its seed alone'
  )
  flags.DEFINE_list('cores', [], 'CPU cores to use; all')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
