"""Runs points on this machine, some at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gqa.launch import layout, lock, runner, table
from gqa.launch.slots import Slot

_PERIOD = 0.5  # seconds between two looks
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
  sweep: layout.Sweep, slots: Sequence[Slot], together: bool = False
) -> int:
  """Runs what is not done, as far as it goes; returns an exit code.

  A signal stops all points, which save where they can; a second one kills
  them. Points that another launcher runs are waited for. If `together`, the
  seeds of a config run as one process.

  Returns:
    0 if all points are done; 75 if some were stopped and go on by the same
    command; 1 if some failed.
  """
  return _Local(sweep, slots, together).run()


class _Local:
  def __init__(self, sweep, slots, together):
    self._sweep, self._together = sweep, together
    units = sweep.units(together)
    self._unit_of = {point.index: unit for unit in units for point in unit}
    self._free = list(reversed(slots))
    self._running: dict[int, tuple[subprocess.Popen, Slot]] = {}
    self._tried: set[int] = set()  # a point is started once in a launch
    self._signals = 0

  def run(self) -> int:
    previous = {s: signal.signal(s, self._receive) for s in _SIGNALS}
    live = table.Live(self._sweep)
    said = False
    try:
      while True:
        self._reap()
        if self._signals and self._running and not said:
          live.message('stopping: points save and end; once more kills them')
          said = True
        states = self._sweep.states()
        if not self._signals:
          self._start(states)
          states = self._sweep.states()
        live.update(states)
        if not self._running and not self._goes_on(states):
          live.clear()  # for the whole one
          return _exit_code(self._sweep, states)
        time.sleep(_PERIOD)
    finally:
      for number, handler in previous.items():
        signal.signal(number, handler)

  def _receive(self, number, frame) -> None:
    del number, frame
    self._signals += 1
    for process, _ in self._running.values():
      if self._signals == 1:
        process.terminate()
      elif process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)

  def _reap(self) -> None:
    for index, (process, slot) in list(self._running.items()):
      if process.poll() is None:
        continue
      del self._running[index]
      self._free.append(slot)
      if process.returncode == runner.BUSY:
        self._tried.discard(index)
      directory = self._sweep.directory(self._sweep.points[index])
      state = layout.read_state(directory)
      if state['state'] == layout.WAITING and process.returncode in (1, 2):
        # It could not even begin; why is in the log.
        failed = {'state': layout.FAILED, 'exit_code': process.returncode}
        layout.write_json(directory / 'state.json', state | failed)
        layout.write_results(self._sweep)

  def _start(self, states: Sequence[Mapping[str, Any]]) -> None:
    for point, state in zip(self._sweep.points, states, strict=True):
      if not self._free:
        return
      if point.index in self._tried or not self._ready(point, state, states):
        continue
      self._tried.add(point.index)
      slot = self._free.pop()
      self._running[point.index] = self._spawn(point, slot), slot
      if self._signals:  # it came while the point was started
        self._running[point.index][0].terminate()

  def _ready(self, point, state, states) -> bool:
    if state['state'] not in (layout.WAITING, layout.STOPPED):
      return False
    if any(states[i]['state'] != layout.DONE for i in point.after):
      return False
    if any(
      other.index in self._running for other in self._unit_of[point.index]
    ):
      return False
    return lock.holder(self._sweep.directory(point) / '.lock') is None

  def _spawn(self, point, slot: Slot) -> subprocess.Popen:
    directory = self._sweep.directory(point)
    command = [
      sys.executable,
      '-m',
      'gqa.launch.runner',
      f'--directory={directory}',
      '--tethered',
      f'--cores={",".join(map(str, slot.cores))}',
      f'--seeds_together={self._together}',
    ]
    with open(directory / 'log.txt', 'ab') as log:
      return subprocess.Popen(
        command,
        cwd=self._sweep.cwd,
        env=os.environ | slot.environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the launcher alone
      )

  def _goes_on(self, states) -> bool:
    """Whether there is something left to start, or to wait for."""
    if self._signals:
      return False
    for point, state in zip(self._sweep.points, states, strict=True):
      if state['state'] == layout.RUNNING:
        return True  # by another launcher
      if point.index not in self._tried and self._ready(point, state, states):
        return True
    return False


def _exit_code(sweep, states) -> int:
  if any(state['state'] == layout.FAILED for state in states):
    return 1
  if all(state['state'] == layout.DONE for state in states):
    return 0
  return runner.STOPPED
