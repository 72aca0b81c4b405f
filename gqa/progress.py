"""How fast a long job goes, and how far it has come."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

import jax
import tqdm


class Throughput:
  """Step time and tokens per second between two log points.

  The first `step` call only starts the clock, so compilation is left out, and
  so is what happens between `pause` and `resume`: evaluation, checkpoints.
  Dispatch is asynchronous, so wait for the device before `rate` and `pause`.
  """

  def __init__(
    self,
    tokens_per_step: int,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._tokens_per_step = tokens_per_step
    self._clock = clock
    self._start = None  # of the window; None before the first step
    self._paused_at = None
    self._steps = 0

  def step(self, num_steps: int = 1):
    """Count updates that were made."""
    if self._start is None:
      self._start = self._clock()
    else:
      self._steps += num_steps

  def pause(self):
    """Stop the clock, if it runs."""
    if self._paused_at is None:
      self._paused_at = self._clock()

  def resume(self):
    """Let the clock run again."""
    if self._paused_at is not None and self._start is not None:
      self._start += self._clock() - max(self._paused_at, self._start)
    self._paused_at = None

  @contextlib.contextmanager
  def paused(self):
    """Keep the clock stopped in a `with` block."""
    self.pause()
    try:
      yield
    finally:
      self.resume()

  def rate(self) -> dict[str, float]:
    """Give the speed since the last call that had one; {} without a step."""
    if not self._steps:
      return {}
    now = self._clock() if self._paused_at is None else self._paused_at
    step_time = (now - self._start) / self._steps
    self._start, self._steps = now, 0
    return {
      'step_time': step_time,
      'tokens_per_second': self._tokens_per_step / step_time,
    }


class Progress:
  """How far a run is: a bar on a terminal, else a line for each log point.

  Args:
    total: steps of the whole run.
    first: steps done before this life began.
    stream: where it shows; standard error unless given.
    enabled: whether it shows at all; process 0 only unless given.
    name: of the run, before each line, where several show at once.
  """

  def __init__(
    self,
    total: int,
    first: int = 0,
    stream: TextIO | None = None,
    enabled: bool | None = None,
    name: str = '',
  ):
    self._total = total
    self._name = name
    self._stream = sys.stderr if stream is None else stream
    self._enabled = jax.process_index() == 0 if enabled is None else enabled
    self._origin = None  # (step, time) of the first update
    self._bar = None
    if self._enabled and self._stream.isatty():
      self._bar = tqdm.tqdm(
        total=total,
        initial=first,
        file=self._stream,
        unit='step',
        desc=name or None,
        dynamic_ncols=True,
      )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def update(
    self,
    step: int,
    loss: float | None = None,
    tokens_per_second: float | None = None,
  ):
    """Show that `step` of the total are done."""
    if not self._enabled:
      return
    shown = {}
    if loss is not None:
      shown['loss'] = f'{float(loss):.4f}'
    if tokens_per_second is not None:
      shown['tokens/s'] = f'{float(tokens_per_second):,.0f}'
    if self._bar is not None:
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update(step - self._bar.n)
      return
    parts = [f'step {step}/{self._total}']
    parts += [f'{name} {value}' for name, value in shown.items()]
    self.message('  '.join([*parts, f'eta {self._eta(step)}']))

  def message(self, text: str):
    """Show a line, above the bar where there is one."""
    if self._name:
      text = f'{self._name}: {text}'
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    elif self._enabled:
      print(text, file=self._stream, flush=True)

  def close(self):
    """Leave the bar as it stands."""
    if self._bar is not None:
      self._bar.close()

  def _eta(self, step: int) -> str:
    now = time.monotonic()
    if self._origin is None:
      self._origin = (step, now)
    first, start = self._origin
    if step >= self._total:
      return '0:00'
    if step <= first:
      return '?'
    seconds = (now - start) / (step - first) * (self._total - step)
    return tqdm.tqdm.format_interval(seconds)
