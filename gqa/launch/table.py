"""The table of a sweep's points: printed once, or kept up to date."""

from __future__ import annotations

import collections
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gqa import tables
from gqa.launch import layout, outcome

_HEAD = ('state', 'step', 'loss', 'left', 'point')


def blockers(
  sweep: layout.Sweep, states: Sequence[Mapping[str, Any]]
) -> dict[int, int]:
  """Which failed point each point waits for that can never start, by index."""
  blocked: dict[int, int] = {}
  for point, state in zip(sweep.points, states, strict=True):
    for index in point.after:
      if state['state'] != layout.DONE and index not in blocked:
        if states[index]['state'] == layout.FAILED:
          blocked[point.index] = index
      if index in blocked and state['state'] != layout.DONE:
        blocked[point.index] = blocked[index]
  return blocked


def text(
  sweep: layout.Sweep,
  states: Sequence[Mapping[str, Any]],
  height: int | None = None,
) -> str:
  """The table and a line of totals.

  With more points than `height` those that wait or are done are left out of
  the table, the last ones first; the totals count them.
  """
  blocked = blockers(sweep, states)
  rows = []
  for point, state in zip(sweep.points, states, strict=True):
    rows.append(_row(sweep, point, state, blocked.get(point.index)))
  if height is not None and len(rows) > height:
    rows = _shortened(rows, height)
  counts = collections.Counter(
    'blocked' if point.index in blocked else state['state']
    for point, state in zip(sweep.points, states, strict=True)
  )
  totals = ', '.join(f'{count} {name}' for name, count in counts.items())
  return f'{tables.text(_HEAD, rows)}\n{len(states)} points: {totals}'


class Live:
  """A table that replaces itself on a terminal, else a line for each change."""

  def __init__(self, sweep: layout.Sweep, stream: TextIO | None = None):
    self._sweep = sweep
    self._stream = sys.stderr if stream is None else stream
    self._lines = 0
    self._shown: list[str | None] = [None] * len(sweep.points)

  def update(self, states: Sequence[Mapping[str, Any]]) -> None:
    """Shows how the points stand."""
    if self._stream.isatty():
      self._redraw(states)
      return
    first = None in self._shown
    for point, state in zip(self._sweep.points, states, strict=True):
      name = state['state']
      if name == self._shown[point.index]:
        continue
      self._shown[point.index] = name
      if name == layout.WAITING or (first and name != layout.RUNNING):
        continue
      code = state.get('exit_code')
      failed = f' with exit code {code}' if name == layout.FAILED else ''
      attempt = f' (attempt {state["attempts"]})' if name == 'running' else ''
      print(
        f'{name}{failed}{attempt}: {point.name}', file=self._stream, flush=True
      )

  def message(self, line: str) -> None:
    """Shows a line, below which the table goes on."""
    print(line, file=self._stream, flush=True)
    self._lines = 0

  def clear(self) -> None:
    """Takes the table off a terminal."""
    if self._lines:
      self._stream.write(f'\x1b[{self._lines}A\x1b[J')
      self._stream.flush()
    self._lines = 0

  def _redraw(self, states) -> None:
    columns, lines = shutil.get_terminal_size()
    table = text(self._sweep, states, max(3, lines - 6)).split('\n')
    up = f'\x1b[{self._lines}A' if self._lines else ''
    cut = ''.join(f'{line[: columns - 1]}\x1b[K\n' for line in table)
    self._stream.write(f'{up}{cut}\x1b[J')
    self._stream.flush()
    self._lines = len(table)


def _row(sweep, point, state, blocker) -> list[str]:
  name, note = state['state'], ''
  if blocker is not None:
    name, note = 'blocked', f' (by {sweep.points[blocker].name})'
  elif name == layout.FAILED:
    note = f' (exit code {state["exit_code"]}, see its log.txt)'
  found: Mapping[str, Any] = {}
  if point.verb == 'train' and name != layout.WAITING and blocker is None:
    found = outcome.progress(sweep.directory(point))
  step = loss = left = ''
  if 'step' in found:
    step, loss = f'{found["step"]}/{found["total"]}', _loss(found['loss'])
  if name == layout.RUNNING and 'seconds_left' in found:
    left = _duration(found['seconds_left'])
  if name == layout.DONE and 'loss' not in found:
    loss = _loss(state.get('metrics', {}).get('loss'))
  return [name, step, loss, left, f'{point.name}{note}']


def _loss(value: Any) -> str:
  return '' if value is None else f'{float(value):.4f}'


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}'


def _shortened(rows: list[list[str]], height: int) -> list[list[str]]:
  """The most telling rows in their order."""
  ranks = {
    layout.FAILED: 0,
    layout.RUNNING: 1,
    layout.STOPPED: 2,
    'blocked': 3,
    layout.WAITING: 4,
    layout.DONE: 5,
  }
  order = sorted(range(len(rows)), key=lambda i: (ranks[rows[i][0]], i))
  return [rows[i] for i in sorted(order[:height])]
