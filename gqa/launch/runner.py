"""Runs the command of one point: one attempt, with its log and its state.

  python -m gqa.launch.runner --directory=SWEEP/NAME

Every launcher starts points through it. Several of these on one point are
harmless: one of them runs it. Exit codes: 0 the point is done; 75 it was
stopped and goes on by the same command; 76 somebody else runs it; 77 a point
that it waits for is not done; others are the failure's own.
"""

from __future__ import annotations

import contextlib
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
) -> int:
  """Runs a point unless it has ended; returns an exit code as above.

  Args:
    directory: of the point, in the workdir of its sweep.
    prefix: words before the command, such as those of srun.
    patience: seconds to wait for somebody who holds the point.
    tethered: whether the end of standard input stops it, so that it does not
      outlive the launcher that has the other end.
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
  held = lock.Lock(directory / '.lock')
  if not held.acquire(patience):
    print(f'{point.name} is run by {lock.holder(directory / ".lock")}.')
    return BUSY
  try:
    state = layout.read_state(directory)
    if state['state'] == layout.DONE:
      return 0
    if state['state'] == layout.FAILED:
      return state['exit_code'] or 1
    return _Attempt(sweep, point, state, prefix, held).run(tethered)
  finally:
    held.release()


class _Attempt:
  """One life of a point's command."""

  def __init__(self, sweep, point, state, prefix, held):
    self._directory = sweep.directory(point)
    self._sweep, self._point, self._held = sweep, point, held
    self._argv = shlex.split(prefix) + shlex.split(point.command)
    self._stopping = False
    self._process: subprocess.Popen | None = None
    self._state = {
      'state': layout.RUNNING,
      'exit_code': None,
      'attempts': state['attempts'] + 1,
      'started': time.time(),
      'ended': None,
      'host': socket.gethostname(),
      'pid': os.getpid(),
    }

  def run(self, tethered: bool) -> int:
    """Starts the command, waits for its end and writes down what it was."""
    for number in _SIGNALS:
      signal.signal(number, self._stop)
    self._save()
    # In a cloud nobody has made the directory before.
    layout.write_json(self._directory / 'point.json', self._point.to_dict())
    if self._point.verb == 'convert':
      _clear(self._directory)
    log_path = self._directory / 'log.txt'
    with open(log_path, 'ab') as log:
      start = log.tell()
      log.write(f'{self._headline()}\n'.encode())
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
        pass_fds=(self._held.fd,),  # the point is taken while it lives
      )
    except OSError as error:
      log.write(f'error: {error}\n'.encode())
      return 127
    if self._stopping:  # the signal came while it was started
      self._process.terminate()
    if tethered:
      threading.Thread(target=self._watch_launcher, daemon=True).start()
    return self._process.wait()

  def _headline(self) -> str:
    when = time.strftime('%Y-%m-%d %H:%M:%S')
    shown = [
      f'{name}={os.environ[name]}'
      for name in ('CUDA_VISIBLE_DEVICES', 'TPU_VISIBLE_CHIPS')
      if name in os.environ
    ]
    attempt = f'attempt {self._state["attempts"]} on {self._state["host"]}'
    return f'[{when}] {attempt}: {" ".join([*shown, shlex.join(self._argv)])}'

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
    else:
      name = layout.FAILED
    verb = self._point.verb
    self._state |= {
      'state': name,
      'exit_code': code,
      'ended': time.time(),
      'metrics': outcome.metrics(verb, self._directory, log_start),
    }
    self._save()

  def _save(self) -> None:
    layout.write_json(self._directory / 'state.json', self._state)


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
  return run_point(flag.directory, flag.prefix, flag.patience, flag.tethered)


def _define_flags():
  flags.DEFINE_string('directory', None, 'of the point', required=True)
  flags.DEFINE_string('prefix', '', 'words before the command')
  flags.DEFINE_float('patience', 2.0, 'seconds to wait for who holds the point')
  flags.DEFINE_bool('tethered', False, 'stop at the end of standard input')
  flags.DEFINE_list('cores', [], 'CPU cores to use; all')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
