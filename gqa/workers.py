"""Other systems in processes of their own, told what to do by JSON lines.

A peer is a module that is started as `python -m MODULE`. It answers each line
of its standard input by one of its standard output:

  {"do": "start", "system": NAME, "keep_memory": BOOL, "threads": INT}
      -> {"ok": {"versions": {...}}}
  {"do": "open", "id": INT, "cell": {...}}   weights, cache, prompt, one step
      -> {"ok": {"compile_seconds", "cache_bytes", "weight_bytes"}}
  {"do": "prefill", "id": INT}   reads the prompts of the cell once more
      -> {"ok": {"seconds": FLOAT}}
  {"do": "decode", "id": INT}   makes the cell's steps, from its context on
      -> {"ok": {"seconds": FLOAT, "tokens": INT, "logits": [B, V]}}
  {"do": "close", "id": INT} -> {"ok": {}}

Instead of "ok" there may be a reason: "missing", the system is not installed;
"unsupported", it cannot run this cell; "error", what went wrong. "cell" is
`Cell.to_dict()`. The library knows no other framework: which module to start
is a field of the config.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from gqa.cells import Cell

_PATIENCE = 30  # seconds for a process to end


class Refused(Exception):
  """A peer does not do what it was told, for the reason given."""


class Missing(Refused):
  """The system is not installed."""


class Worker:
  """One system's process.

  Args:
    module: what to start.
    system: which of the module's systems.
    keep_memory: whether it gets the allocator settings that gqa has.
    threads: at most so many; 0 for all cores.

  Raises:
    Missing: it is not installed.
    ValueError: there is no such module, or no such system in it.
  """

  def __init__(self, module: str, system: str, keep_memory: bool, threads: int):
    if not _exists(module):
      raise ValueError(
        f'peers.module={module!r} is not found; start from the root of the '
        'repository, or name another module.'
      )
    self.system = system
    self._process = subprocess.Popen(
      [sys.executable, '-m', module],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._ids = itertools.count()
    try:
      self.versions = self.ask(
        do='start', system=system, keep_memory=keep_memory, threads=threads
      )['versions']
    except Refused as refused:
      self.close()
      if isinstance(refused, Missing):
        raise
      raise ValueError(f'peers.systems: {refused}') from refused

  @property
  def alive(self) -> bool:
    """Whether it can be asked."""
    return self._process.poll() is None

  def ask(self, **request: Any) -> Mapping[str, Any]:
    """Sends a request and returns what is under "ok" in the answer.

    Raises:
      Refused: it is not ok.
    """
    try:
      self._process.stdin.write(json.dumps(request) + '\n')
      self._process.stdin.flush()
      line = self._process.stdout.readline()
    except OSError:  # a broken pipe
      line = ''
    try:
      answer = json.loads(line)
    except ValueError:
      self._process.kill()
      self._process.wait()
      said = f'said {line.strip()!r}' if line else 'ended'
      raise Refused(
        f'the process of {self.system} {said} when told to {request["do"]}'
      ) from None
    if 'ok' in answer:
      return answer['ok']
    ((kind, reason),) = answer.items()
    raise (Missing if kind == 'missing' else Refused)(reason)

  def open(self, cell: Cell) -> WorkerRun:
    """Prepares a cell; see WorkerRun."""
    return WorkerRun(self, cell, next(self._ids))

  def close(self) -> None:
    """Ends the process."""
    with contextlib.suppress(OSError):
      self._process.stdin.close()
    try:
      self._process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()


class WorkerRun:
  """A cell that a peer holds, used like `measure.Run`.

  Raises:
    Refused: the peer cannot run it.
  """

  def __init__(self, worker: Worker, cell: Cell, number: int):
    self._worker, self._cell, self._number = worker, cell, number
    self.info = dict(self._ask('open', cell=cell.to_dict()))

  def prefill(self) -> float:
    """Reads the prompts once and returns the seconds."""
    return self._ask('prefill')['seconds']

  def decode(self) -> float:
    """Makes the cell's steps once and returns the seconds of all of them."""
    cell, done = self._cell, self._ask('decode')
    expected = {
      'tokens': cell.batch_size * cell.steps,
      'logits': [cell.batch_size, cell.model.vocab_size],
    }
    for name, value in expected.items():
      if done[name] != value:
        raise Refused(
          f'{name} are {done[name]}, not {value}: not the same work'
        )
    return done['seconds']

  def close(self) -> None:
    """Frees what the peer holds."""
    if self._worker.alive:
      with contextlib.suppress(Refused):
        self._ask('close')

  def _ask(self, what, **arguments):
    return self._worker.ask(do=what, id=self._number, **arguments)


def _exists(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:
    return False
