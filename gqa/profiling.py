"""A trace of some steps of a run, for TensorBoard's profile plugin."""

from __future__ import annotations

from typing import Any

import jax


def profiled_steps(text: str) -> tuple[int, int]:
  """Parses 'FIRST:LAST'; ('' gives steps that are never reached)."""
  if not text:
    return -1, -1
  try:
    first, last = map(int, text.split(':'))
  except ValueError:
    first, last = 0, 0
  if not 1 <= first <= last:
    raise ValueError(
      f"train.profile={text!r} must be 'FIRST:LAST' with 1 <= FIRST <= LAST, "
      "such as '10:15'."
    )
  return first, last


class Profiler:
  """Writes a trace of some steps for TensorBoard's profile plugin."""

  def __init__(self, steps: str, workdir):
    self._first, self._last = profiled_steps(steps)
    self._workdir = workdir
    self._running = False

  def before(self, first: int, last: int):
    """Starts if the call of steps first..last has a profiled one."""
    wanted = first <= self._last and last >= self._first
    if wanted and not self._running:
      jax.profiler.start_trace(str(self._workdir))
      self._running = True

  def after(self, step: int, state: Any):
    """Stops after the last profiled step, once the device is done."""
    if self._running and step >= self._last:
      jax.block_until_ready(state)
      jax.profiler.stop_trace()
      self._running = False
