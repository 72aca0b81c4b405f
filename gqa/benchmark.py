"""What decoding costs with any number of KV heads, measured beside predicted.

  python -m gqa.benchmark --config=experiments/decode_cost.py --workdir=DIR
      [--config.grid.batch_size=1,8 ...] [--config.grid.fill_memory] [--peers]

Each combination of the config's grid is a cell: compile time, prefill, the
time of a step at a context, tokens per second, bytes, and the least time that
bytes and FLOPs allow on this machine, whose limits are measured in between.
With --peers other systems run the same cells, in processes of their own.

Cells that are compared take turns: all cells of a group are in memory, and
each round runs every one of them once. WORKDIR/results.jsonl has a line for
each cell, also for one that could not be measured, which has the reason. The
same command goes on where it was stopped and measures what is missing; code
of another revision wants another workdir.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import tqdm
from absl import flags
from ml_collections import config_flags

from gqa import cells as cells_lib
from gqa import cli, limits, measure, runtime
from gqa import results as results_lib
from gqa.cells import Cell
from gqa.results import Results, Row
from gqa.workers import Missing, Refused, Worker


def run(config, workdir: str, peers: bool = False) -> list[Row]:
  """Measures the cells of a config that the workdir does not have yet.

  Args:
    config: as in experiments/decode_cost.py.
    workdir: where results are, or will be.
    peers: whether other systems run the cells too.

  Returns:
    The rows of all cells of the config, in its order.

  Raises:
    ValueError: a field breaks a rule; nothing was computed.
  """
  cells = cells_lib.from_config(config, peers)
  names = dict.fromkeys(cell.system for cell in cells if cell.system != 'gqa')
  with (
    Peers(config.peers, names) as peers,
    Results(workdir, limits.describe_device()) as results,
  ):
    _Benchmark(config, peers, results).run(cells)
    return [results.find(cell) for cell in cells]


class Peers:
  """The processes of other systems.

  Attributes:
    missing: why a system is not there, by name.
    versions: of what a system consists of, by name.

  Raises:
    ValueError: there is no such system.
  """

  def __init__(self, settings, names: Iterable[str]):
    self._settings = settings
    self._workers: dict[str, Worker] = {}
    self.missing: dict[str, str] = {}
    self.versions: dict[str, Mapping[str, str]] = {}
    try:
      for name in names:
        self._start(name)
    except ValueError:
      self.close()
      raise

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def open(self, cell: Cell):
    """Prepares a cell, in a new process if the last one has ended."""
    if not self._workers[cell.system].alive:
      self._start(cell.system)
    return self._workers[cell.system].open(cell)

  def close(self) -> None:
    """Ends the processes."""
    for worker in self._workers.values():
      worker.close()

  def _start(self, name):
    try:
      worker = Worker(
        self._settings.module,
        name,
        self._settings.keep_memory,
        self._settings.threads,
      )
    except Missing as missing:
      self.missing[name] = str(missing)
      _say(f'going on without {name}: {missing}')
      return
    self._workers[name] = worker
    self.versions[name] = worker.versions


class _Benchmark:
  """Groups and rounds."""

  def __init__(self, config, peers: Peers, results: Results):
    self._config, self._peers, self._results = config, peers, results

  def run(self, cells: Sequence[Cell]) -> None:
    """Measures what is missing; where that cannot be, a row says why."""
    wanted = []
    for cell in cells:
      if self._results.is_measured(cell):
        continue
      obstacle = self._obstacle(cell)
      if obstacle is None:
        wanted.append(cell)
      else:
        self._skip(cell, *obstacle)
    if not wanted:
      return
    machine = limits.Machine(
      dict.fromkeys(cell.model.dtype for cell in wanted),
      self._config.read_bytes,
    )
    progress = _Progress(wanted)
    for group in cells_lib.groups(wanted, self._config.memory_limit):
      self._measure(group, machine, progress)

  def _obstacle(self, cell: Cell) -> tuple[str, str] | None:
    """What keeps a cell from being measured, as far as one knows before."""
    if cell.system in self._peers.missing:
      return 'system', self._peers.missing[cell.system]
    needed, limit = cells_lib.memory_bytes([cell]), self._config.memory_limit
    if needed > limit:
      return (
        'memory',
        f'weights and cache of {needed} bytes exceed memory_limit={limit}',
      )
    return None

  def _measure(self, group, machine, progress) -> None:
    """Measures cells in turns and writes their rows."""
    number = self._results.next_group()
    runs, params = {}, {}
    for cell in group:
      one = self._try(cell, functools.partial(self._open, cell, params))
      if one is not None:
        runs[cell] = one
      progress.opened(cell)
    seconds = {cell: ([], []) for cell in runs}  # of prefills and of calls
    reading = any(cell.prefill == 'measured' for cell in runs)
    for _ in range(self._config.prefill.rounds if reading else 0):
      self._round(runs, 'prefill', {c: s for c, (s, _) in seconds.items()})
      progress.round_done(number, 'prefill', runs)
    warmup = self._config.warmup
    for i in range(warmup + self._config.rounds):
      counts = i >= warmup
      if i == warmup:
        machine.clear()
      machine.sample()
      self._round(
        runs,
        'decode',
        {c: s if counts else [] for c, (_, s) in seconds.items()},
      )
      progress.round_done(number, 'decode', runs)
    for cell, one in runs.items():
      values = {'group': number, 'group_cells': len(runs)}
      values |= _values(cell, one.info, *seconds[cell], machine)
      self._results.add(cell, values | self._circumstances(cell))
      one.close()
    # The next group is of other sizes, which may not fit where this one lay.
    runs.clear()
    params.clear()
    runtime.return_freed_memory()

  def _open(self, cell: Cell, params: dict):
    if cell.system != 'gqa':
      return self._peers.open(cell)
    if cell.weights not in params:
      params[cell.weights] = measure.make_params(
        cell.model, cell.weights_dtype, cell.seed
      )
    return measure.Run(cell, params[cell.weights])

  def _round(self, runs: dict, method: str, seconds: Mapping[Cell, list]):
    """Calls a method of each run once; a run that fails is taken out."""
    for cell in list(runs):
      if method == 'prefill' and cell.prefill != 'measured':
        continue
      taken = self._try(cell, getattr(runs[cell], method))
      if taken is None:
        runs.pop(cell).close()
      else:
        seconds[cell].append(taken)

  def _try(self, cell: Cell, function: Callable):
    """Calls a function; None, and a row, if the machine or a peer gives up."""
    try:
      return function()
    except Refused as refused:
      self._skip(cell, 'system', str(refused))
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      reason = f'out of memory: {str(error).splitlines()[0]}'
      self._skip(cell, 'memory', reason)
    return None

  def _skip(self, cell: Cell, obstacle: str, reason: str) -> None:
    values = {'obstacle': obstacle} | self._circumstances(cell)
    if self._results.skip(cell, reason, values):
      _say(f'skipped {results_lib.described(cell.to_dict())}: {reason}')

  def _circumstances(self, cell: Cell) -> dict[str, Any]:
    found = runtime.circumstances()
    found['versions'] |= self._peers.versions.get(cell.system, {})
    return found


class _Progress:
  """A line for each round, with the time that is left.

  It goes by the bytes and FLOPs of what is done and of what is not.
  """

  def __init__(self, cells: Sequence[Cell]):
    self._total = sum(map(_whole_work, cells))
    self._begun, self._done = time.monotonic(), 0.0

  def opened(self, cell: Cell) -> None:
    """A cell is compiled, or given up."""
    self._done += _work(cell)['open']
    self._show(results_lib.described(cell.to_dict()))

  def round_done(self, group: int, what: str, cells: Sequence[Cell]) -> None:
    """All cells of a group have run once."""
    self._done += sum(_work(cell)[what] for cell in cells)
    self._show(f'group {group}: a {what} round of {len(cells)} cells')

  def _show(self, text: str) -> None:
    passed = time.monotonic() - self._begun
    share = min(self._done / self._total, 1.0)
    left = tqdm.tqdm.format_interval(passed * (1 / max(share, 1e-9) - 1))
    _say(f'{share:4.0%}  eta {left}  {text}')


def _work(cell: Cell) -> dict[str, float]:
  """Seconds of opening a cell and of a round, on a machine of round numbers."""
  prompt = cell.prefill_flops / 1e11 if cell.prefill == 'measured' else 0.0
  step = cell.predict(1e10, 1e11).seconds
  return {'open': 4.0 + prompt, 'prefill': prompt, 'decode': cell.steps * step}


def _whole_work(cell: Cell) -> float:
  work = _work(cell)
  rounds = cell.warmup + cell.rounds
  prefills = cell.prefill_rounds * work['prefill']
  return work['open'] + prefills + rounds * work['decode']


def _values(
  cell: Cell,
  info: Mapping[str, Any],
  prefills: Sequence[float],
  calls: Sequence[float],
  machine: limits.Machine,
) -> dict[str, Any]:
  """What was measured of a cell, and what was to be expected."""
  steps = [seconds / cell.steps for seconds in calls]
  values = limits.spread('step_seconds', steps)
  seconds = values['step_seconds']
  rates = machine.row(cell.model.dtype)
  predicted = cell.predict(rates['read_bandwidth'], rates['matrix_flops'])
  traffic = predicted.traffic
  step_bytes = traffic.weight_bytes + traffic.kv_bytes
  values |= {
    'step_seconds_samples': steps,
    'tokens_per_second': cell.batch_size / seconds,
    'predicted_step_seconds': predicted.seconds,
    'relative_error': seconds / predicted.seconds - 1,  # above 0: slower
    'predicted_bound': predicted.bound,
    'step_weight_bytes': traffic.weight_bytes,
    'step_kv_bytes': traffic.kv_bytes,
    'step_flops': traffic.flops,
    'flops_per_byte': traffic.flops / step_bytes,
    'bandwidth': step_bytes / seconds,
    'kv_bandwidth': traffic.kv_bytes / seconds,
    'cache_bytes_by_formula': cell.cache_bytes,
    'weight_bytes_by_formula': cell.weight_bytes,
  }
  if prefills:
    values |= limits.spread('prefill_seconds', prefills)
    tokens = cell.batch_size * cell.context
    values['prefill_tokens_per_second'] = tokens / values['prefill_seconds']
  return values | dict(info) | rates


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv):
  """Measures as the flags say and prints a table."""
  del argv
  flag = flags.FLAGS
  runtime.keep_freed_memory()
  rows = run(flag.config, flag.workdir, flag.peers)
  print(results_lib.table(rows))


def _define_flags():
  config_flags.DEFINE_config_file('config', lock_config=True)
  flags.mark_flag_as_required('config')
  flags.DEFINE_string('workdir', None, 'directory of results', required=True)
  flags.DEFINE_bool('peers', False, 'whether other systems run the cells too')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
