"""Stopping a run between two steps when a scheduler asks for it."""

from __future__ import annotations

import os
import signal

import jax

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: run the same command again


class Preemption:
  """Turns a scheduler's signals into a flag that is read between steps."""

  def __init__(self):
    self._several = jax.process_count() > 1
    self._received = False
    # With several processes jax's own handler of SIGTERM agrees on a step.
    signals = [signal.SIGUSR1, signal.SIGUSR2]
    if not self._several:
      signals.append(signal.SIGTERM)
    self._previous = {s: signal.signal(s, self._receive) for s in signals}

  def _receive(self, number, frame):
    del frame
    self._received = True
    if self._several and number != signal.SIGTERM:
      os.kill(os.getpid(), signal.SIGTERM)

  def reached(self, step: int) -> bool:
    """Whether all processes are to stop after this step."""
    if not self._several:
      return self._received
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

  def close(self):
    """Gives the signals back."""
    for number, handler in self._previous.items():
      signal.signal(number, handler)
