"""Finds and reads what other commands left below a directory.

Nothing is changed, and nothing that is broken is left out: a file that cannot
be read is a problem with a place, and a run that stopped, diverged or never
began is a run in that state.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gqa import cost
from gqa.config import ModelConfig
from gqa.launch import layout

REPORT = 'report.json'  # marks a folder that a report was written to
DONE = 'done'
_SKIPPED = ('checkpoints', 'plugins')  # folders without results of their own
# What a line of a .jsonl file says it is, beside rows of a benchmark.
POSITIONS = 'cached_vs_uncached'
CONVERSIONS = ('conversion', 'recovery')
UPTRAINING = 'uptraining'
# What POSITIONS sums up, and what sums up UPTRAINING.
_DERIVED = ('cached', 'uncached', 'uptraining_recovery')

Row = Mapping[str, Any]


@dataclasses.dataclass
class Problem:
  """Something that could not be read, or not whole."""

  where: str
  what: str


@dataclasses.dataclass
class Run:
  """The workdir of a training run.

  Attributes:
    name: its path below the directory that was read.
    path: absolute.
    config: of the run; None where it cannot be read.
    model: as the config says; None likewise.
    lines: of metrics.jsonl, in its order.
    meta: of the latest checkpoint.
    state: 'done', 'unfinished', 'diverged', 'failed' or 'empty'; of a point of
      a sweep also what the sweep says.
    why: in words.
    cwd: where its command ran, if a sweep says so: paths may start there.
  """

  name: str
  path: pathlib.Path
  config: Row | None = None
  model: ModelConfig | None = None
  lines: Sequence[Row] = ()
  meta: Row = dataclasses.field(default_factory=dict)
  state: str = 'empty'
  why: str = ''
  cwd: str = '.'

  def curve(self, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a tag; values may be NaN."""
    return [
      (line['step'], float(line[tag])) for line in self.lines if tag in line
    ]

  def last(self, tag: str) -> float | None:
    """The last value of a tag."""
    curve = self.curve(tag)
    return curve[-1][1] if curve else None

  @property
  def step(self) -> int:
    """The last one that was logged."""
    return max((line['step'] for line in self.lines), default=0)

  @property
  def tokens_per_step(self) -> int:
    """Of one update."""
    train = self.config['train']
    return train['batch_size'] * train['seq_len']

  @property
  def loss(self) -> float | None:
    """Validation loss at the end, in nats per token; None unless done."""
    return self.last('eval/loss') if self.state == DONE else None

  @property
  def alpha(self) -> float | None:
    """Steps over those of the parent, of a run that was uptrained."""
    recorded = (self.config.get('uptrain') or {}).get('alpha')
    if recorded is not None or not self.config.get('init_from'):
      return recorded
    steps = find_key(self.meta, 'steps')
    return self.config['train']['num_steps'] / steps if steps else None

  @property
  def parent_loss(self) -> float | None:
    """What it logged of the model before conversion, on its own batches."""
    return self.last('eval/parent_loss')

  @property
  def parent_paths(self) -> list[pathlib.Path]:
    """Workdirs it came from, the nearest first."""
    paths, node = [], self.meta.get('parent')
    if node is None and (self.config or {}).get('init_from'):
      node = {'path': self.config['init_from']}
    while isinstance(node, Mapping):
      if node.get('path'):
        paths.append(workdir_of(node['path'], self.cwd))
      node = node.get('parent')
    return paths


@dataclasses.dataclass
class Conversion:
  """A convert.json, or a line of results that says as much."""

  name: str
  path: pathlib.Path
  result: Row
  model: ModelConfig | None = None  # as it came out; unknown of a line


@dataclasses.dataclass(frozen=True)
class Uptraining:
  """What a run of uptraining came to, also as a line of results."""

  name: str  # of the run, or of the file of results
  model: str
  num_kv_heads: str
  method: str  # and grouping, and what else tells it from others
  alpha: float
  seed: int
  parent_loss: float | None
  curve: Sequence[tuple[int, float]]  # tokens, and validation loss in nats

  def to_line(self) -> Row:
    """As a line of results."""
    fields = dataclasses.asdict(self)
    del fields['name']
    return {'what': UPTRAINING} | fields

  @classmethod
  def from_line(cls, name: str, line: Row) -> Uptraining:
    """Undoes `to_line`.

    Raises:
      KeyError, TypeError, ValueError: it is not whole, or has no loss.
    """
    names = [f.name for f in dataclasses.fields(cls)][1:]
    fields = {name: line[name] for name in names}
    fields['curve'] = [(int(at), float(loss)) for at, loss in line['curve']]
    if not fields['curve']:
      raise ValueError('curve is empty')
    return cls(name, **fields)


@dataclasses.dataclass
class Benchmark:
  """Rows of one file."""

  name: str
  rows: Sequence[Row]


@dataclasses.dataclass
class Point:
  """One step of a sweep, as far as it came."""

  sweep: str
  name: str
  verb: str
  path: pathlib.Path
  entry: Row
  state: Row
  cwd: str

  @property
  def status(self) -> str:
    """'waiting', 'running', 'done', 'failed' or 'stopped'."""
    return self.state['state']


@dataclasses.dataclass
class Found:
  """All that was read."""

  roots: Sequence[pathlib.Path]
  runs: list[Run] = dataclasses.field(default_factory=list)
  conversions: list[Conversion] = dataclasses.field(default_factory=list)
  benchmarks: list[Benchmark] = dataclasses.field(default_factory=list)
  points: list[Point] = dataclasses.field(default_factory=list)
  uptrainings: list[Uptraining] = dataclasses.field(default_factory=list)
  positions: list[tuple[str, Row]] = dataclasses.field(default_factory=list)
  training_speeds: list[tuple[str, Row]] = dataclasses.field(
    default_factory=list
  )
  problems: list[Problem] = dataclasses.field(default_factory=list)

  @property
  def is_empty(self) -> bool:
    """Whether there is no result at all."""
    results = (self.runs, self.conversions, self.benchmarks, self.points)
    results += (self.uptrainings, self.positions, self.training_speeds)
    return not any(results)

  def conversion_at(self, path: pathlib.Path) -> Conversion | None:
    """The conversion whose workdir that is."""
    return next((c for c in self.conversions if c.path == path), None)

  def run_at(self, path: pathlib.Path) -> Run | None:
    """The run whose workdir that is."""
    return next((r for r in self.runs if r.path == path), None)

  def decode_rows(self) -> Iterator[tuple[Benchmark, Row]]:
    """Every row of every benchmark."""
    for benchmark in self.benchmarks:
      for row in benchmark.rows:
        yield benchmark, row


def read(roots: Iterable[str | os.PathLike]) -> Found:
  """Reads everything below some directories, or in some .jsonl files.

  Raises:
    OSError: one of them does not exist.
  """
  roots = [pathlib.Path(root).expanduser().absolute() for root in roots]
  found = Found(roots)
  for root in roots:
    if root.is_file():
      _read_lines(found, root, root.name)
      continue
    if not root.is_dir():
      raise FileNotFoundError(2, 'No such file or directory', str(root))
    for directory in _walk(root):
      name = os.path.relpath(directory, root)
      _read_directory(found, directory, root.name if name == '.' else name)
  for run in found.runs:
    _judge(run, found)
  return found


def workdir_of(path: str, cwd: str = '.') -> pathlib.Path:
  """The workdir of a checkpoint's path, absolute."""
  path = os.path.join(cwd, os.path.expanduser(path))
  path = pathlib.Path(os.path.abspath(path))
  if path.parent.name == 'checkpoints':
    return path.parent.parent
  return path.parent if path.name == 'checkpoints' else path


def find_key(node: Any, key: str) -> Any:
  """The value of a key in nested parents, the nearest first."""
  while isinstance(node, Mapping):
    if node.get(key) is not None and 'path' in node:
      return node[key]
    node = node.get('parent')
  return None


def parse(text: str) -> tuple[list[Row], list[str]]:
  """The objects of JSON lines, and what is wrong with the other lines."""
  rows, wrong = [], []
  for number, line in enumerate(text.split('\n'), 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError
      rows.append(row)
    except ValueError:
      last = number == text.count('\n') + 1
      wrong.append(
        f'the last line, {number}, is torn'
        if last
        else f'line {number} is no JSON object'
      )
  return rows, wrong


def _walk(root: pathlib.Path) -> Iterator[pathlib.Path]:
  for directory, folders, files in os.walk(root):
    if REPORT in files:
      folders.clear()
      continue
    folders[:] = sorted(
      f for f in folders if f not in _SKIPPED and not f.startswith('.')
    )
    yield pathlib.Path(directory)


def _read_directory(found: Found, path: pathlib.Path, name: str) -> None:
  has = lambda file: (path / file).is_file()
  if has('sweep.json'):
    _read_sweep(found, path, name)
  if has('convert.json'):
    result = _read_json(found, path / 'convert.json', name)
    if result is not None:
      _add_conversion(found, name, path, result)
  elif has('config.json'):
    _read_run(found, path, name)
  for file in sorted(path.glob('*.jsonl')):
    owned = file.name == 'metrics.jsonl' or (
      file.name == 'results.jsonl' and has('sweep.json')
    )
    if not owned:
      own = file.name == 'results.jsonl'
      _read_lines(found, file, name if own else f'{name}/{file.name}')


def _read_run(found: Found, path: pathlib.Path, name: str) -> None:
  config = _read_json(found, path / 'config.json', name)
  if config is not None and 'num_steps' not in config.get('train', {}):
    return  # brought from elsewhere, never trained here
  run = Run(name, path, config)
  found.runs.append(run)
  if config is None:
    run.state, run.why = 'failed', 'config.json cannot be read'
    return
  try:
    run.model = ModelConfig.from_dict(config['model'])
    config['train']['batch_size'], config['train']['seq_len']
  except (ValueError, TypeError, KeyError) as error:
    found.problems.append(Problem(name, f'config.json: {error}'))
    run.model = None
  metrics = path / 'metrics.jsonl'
  if metrics.is_file():
    lines, wrong = parse(metrics.read_text(encoding='utf-8', errors='replace'))
    run.lines = [line for line in lines if isinstance(line.get('step'), int)]
    found.problems += [Problem(f'{name}/metrics.jsonl', w) for w in wrong]
  run.meta = _latest_meta(path)


def _latest_meta(path: pathlib.Path) -> Row:
  """The `meta` of the latest checkpoint that has one."""
  steps = [
    int(entry.name)
    for entry in (path / 'checkpoints').glob('*')
    if entry.name.isdigit()
  ]
  for step in sorted(steps, reverse=True):
    file = path / 'checkpoints' / str(step) / 'meta' / 'metadata'
    try:
      return json.loads(file.read_text())
    except (OSError, ValueError):
      continue
  return {}


def _read_lines(found: Found, file: pathlib.Path, name: str) -> None:
  """Reads rows of a benchmark, and other results that say what they are."""
  rows, wrong = parse(file.read_text(encoding='utf-8', errors='replace'))
  found.problems += [Problem(f'{name}', w) for w in wrong]
  decode = [row for row in rows if row.get('what') == 'decode']
  whole = [row for row in decode if _is_whole(row)]
  if len(whole) < len(decode):
    found.problems.append(
      Problem(name, f'{len(decode) - len(whole)} rows lack a field')
    )
  if whole:
    found.benchmarks.append(Benchmark(name, whole))
  unknown = 0
  for number, row in enumerate(rows, 1):
    if 'share_of_float32_peak' in row:  # of experiments/training_speed.py
      found.training_speeds.append((name, row))
    elif row.get('what') == POSITIONS:
      found.positions.append((name, row))
    elif row.get('what') in CONVERSIONS:
      result = row | {
        'loss_before': row.get('loss_of_parent'),
        'loss_after': row.get('loss'),
        'calibration': {'held_out_text': row.get('data')},
      }
      _add_conversion(found, f'{name}:{number}', file, result)
    elif row.get('what') == UPTRAINING:
      try:
        found.uptrainings.append(Uptraining.from_line(name, row))
      except (KeyError, TypeError, ValueError) as error:
        problem = f'line {number} is no whole run of uptraining: {error!r}'
        found.problems.append(Problem(name, problem))
    elif row.get('what') not in ('decode', *_DERIVED):
      unknown += 1
  if unknown:
    problem = f'{unknown} lines are results of no kind that is known here'
    found.problems.append(Problem(name, problem))


def _is_whole(row: Row) -> bool:
  fields = ['status', 'system', 'batch_size', 'context', 'num_kv_heads']
  if row.get('status') == 'measured':
    fields += ['step_seconds', 'tokens_per_second']
  return all(row.get(field) is not None for field in fields)


def _add_conversion(
  found: Found, name: str, path: pathlib.Path, result: Row
) -> None:
  fields = ('method', 'num_kv_heads', 'parent_kv_heads')
  missing = [field for field in fields if result.get(field) is None]
  if missing:
    found.problems.append(Problem(name, f'a conversion lacks {missing[0]}'))
    return
  model = None
  if (path / 'config.json').is_file():
    config = _read_json(found, path / 'config.json', name) or {}
    try:
      model = ModelConfig.from_dict(config['model'])
    except (ValueError, TypeError, KeyError) as error:
      found.problems.append(Problem(name, f'config.json: {error}'))
  found.conversions.append(Conversion(name, path, result, model))


def _read_sweep(found: Found, path: pathlib.Path, name: str) -> None:
  sweep = _read_json(found, path / 'sweep.json', name)
  if sweep is None:
    return
  for entry in sweep.get('points', []):
    directory = path / entry['name']
    try:
      state = layout.read_state(directory)
    except (OSError, ValueError, KeyError) as error:
      file = f'{name}/{entry["name"]}/state.json'
      found.problems.append(Problem(file, str(error)))
      state = {'state': 'unreadable'}
    found.points.append(
      Point(
        sweep=name,
        name=entry['name'],
        verb=entry.get('verb', 'train'),
        path=directory,
        entry=entry,
        state=state,
        cwd=sweep.get('cwd', '.'),
      )
    )


def _judge(run: Run, found: Found) -> None:
  """Says how a run ended, from what it logged and what its sweep knows."""
  point = next((p for p in found.points if p.path == run.path), None)
  if point is not None:
    run.cwd = point.cwd
  if run.config is not None:
    run.state, run.why = _state(run)
  if point is not None and run.state != DONE:
    if point.status == 'failed' and run.state != 'diverged':
      run.state = 'failed'
    code = point.state.get('exit_code')
    said = f'the sweep says {point.status}'
    if code is not None:
      said += f', exit code {code}'
    run.why = f'{run.why}; {said}' if run.why else said


def _state(run: Run) -> tuple[str, str]:
  steps = run.config['train']['num_steps']
  if run.model is None:
    return 'failed', 'config.json has no valid model'
  losses = run.curve('train/loss') + run.curve('eval/loss')
  if not losses:
    return 'empty', 'nothing was logged'
  last_train, last_eval = run.last('train/loss'), run.last('eval/loss')
  for name, value in (('training', last_train), ('validation', last_eval)):
    if value is not None and not math.isfinite(value):
      return 'diverged', f'{name} loss is {value} at step {run.step}'
  if run.step < steps:
    return 'unfinished', f'step {run.step:,} of {steps:,}'
  evaluated = run.curve('eval/loss')
  if not evaluated or evaluated[-1][0] < steps:
    return 'unfinished', 'not evaluated at its last step'
  return DONE, ''


def _read_json(found: Found, file: pathlib.Path, name: str) -> Row | None:
  try:
    value = json.loads(file.read_text(encoding='utf-8'))
    if not isinstance(value, dict):
      raise ValueError('no JSON object')
    return value
  except (OSError, ValueError) as error:
    found.problems.append(Problem(f'{name}/{file.name}', str(error)))
    return None


@functools.cache
def params_of(model: ModelConfig) -> int:
  """Parameters, by formula."""
  return cost.param_count(model)


def kv_bytes(model: ModelConfig) -> int:
  """Bytes of a token in the cache, in the compute type."""
  return cost.kv_bytes_per_token(model, cost.ITEMSIZE[model.dtype])
