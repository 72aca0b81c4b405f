"""The files of a sweep: its workdir is all that anyone knows about it.

sweep.json              the points, in an order that respects what waits
results.jsonl           a line for each point that is done or failed
NAME/point.json         the point's own entry
NAME/state.json         how it stands
NAME/log.txt            what its command printed, all attempts
NAME/...                what the command itself writes: NAME is its workdir
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gqa.launch import lock

WAITING, RUNNING, DONE, FAILED, STOPPED = (
  'waiting',
  'running',
  'done',
  'failed',
  'stopped',
)
Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Point:
  """One run of a sweep.

  Attributes:
    index: its place in the sweep.
    name: of its directory.
    group: what points have in common that differ by their seed alone.
    verb: 'train', 'convert', 'evaluate' or 'benchmark'.
    config: config file, None for a verb without.
    overrides: fields or flags; the directory of a step in place of the step.
    after: the points that must be done before, by index.
    command: one line for a shell.
    columns: config fields in which the sweep's training points may differ.
  """

  index: int
  name: str
  group: str
  verb: str
  config: str | None
  overrides: Mapping[str, Any]
  after: tuple[int, ...]
  command: str
  columns: tuple[str, ...] = ()

  def to_dict(self) -> dict[str, Any]:
    """Plain values, as JSON would give them back."""
    return json.loads(json.dumps(dataclasses.asdict(self)))

  @classmethod
  def from_dict(cls, entry: Mapping[str, Any]) -> Point:
    """The point of an entry."""
    tuples = {name: tuple(entry[name]) for name in ('after', 'columns')}
    return cls(**{**entry, **tuples})


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A sweep on disk."""

  workdir: pathlib.Path
  points: tuple[Point, ...]
  cwd: str  # where the commands are to be run

  def directory(self, point: Point) -> pathlib.Path:
    """The workdir of a point."""
    return self.workdir / point.name

  def find(self, name: str) -> Point:
    """The point of that name.

    Raises:
      ValueError: there is none.
    """
    for point in self.points:
      if point.name == name:
        return point
    raise ValueError(f'{self.workdir} has no point {name!r}.')

  def units(self, together: bool) -> list[tuple[Point, ...]]:
    """What is started at once: a point, or those that differ by their seed.

    Args:
      together: whether training points of one config share a program.
    """
    units: dict[Any, list[Point]] = {}
    for point in self.points:
      what = point.index
      if together and point.verb == 'train' and 'seed' in point.overrides:
        rest = {k: v for k, v in point.overrides.items() if k != 'seed'}
        what = json.dumps([point.config, rest], sort_keys=True)
      units.setdefault(what, []).append(point)
    return [tuple(unit) for unit in units.values()]

  def states(self) -> list[dict[str, Any]]:
    """How each point stands."""
    return [read_state(self.directory(point)) for point in self.points]


def command_of(unit: Sequence[Point]) -> str:
  """One line for a shell that runs the points of a unit."""
  if len(unit) == 1:
    return unit[0].command
  words, given = [], ('--config.seed=', '--workdir=')
  for word in shlex.split(unit[0].command):
    if not word.startswith(given):
      words.append(word)
  seeds = ','.join(str(point.overrides['seed']) for point in unit)
  workdirs = [
    word
    for point in unit
    for word in shlex.split(point.command)
    if word.startswith('--workdir=')
  ]
  return shlex.join([*words, f'--seeds={seeds}', *workdirs])


def open_sweep(workdir: Path) -> Sweep:
  """Reads a sweep.

  Raises:
    ValueError: there is none.
  """
  workdir = pathlib.Path(workdir).expanduser().absolute()
  try:
    content = json.loads((workdir / 'sweep.json').read_text())
  except FileNotFoundError:
    raise ValueError(
      f'workdir={workdir} has no sweep.json, so no sweep was started there; '
      'give another --workdir, or --config to start one.'
    ) from None
  points = tuple(map(Point.from_dict, content['points']))
  return Sweep(workdir, points, content['cwd'])


def make_sweep(
  workdir: Path, config: str, git: str, cwd: str, points: Sequence[Point]
) -> Sweep:
  """Writes a sweep, or finds that it is there already.

  The points of an earlier start must be the first of `points`; there may be
  more of them now.

  Raises:
    ValueError: the workdir has another sweep, or something else.
  """
  workdir = pathlib.Path(workdir).expanduser().absolute()
  workdir.mkdir(parents=True, exist_ok=True)
  with locked(workdir):
    _check_extends(workdir, points)
    content = {
      'config': config,
      'git': git,
      'cwd': cwd,
      'points': [point.to_dict() for point in points],
    }
    for point in points:
      directory = workdir / point.name
      directory.mkdir(exist_ok=True)
      write_json(directory / 'point.json', point.to_dict())
      if not (directory / 'state.json').exists():
        write_json(directory / 'state.json', {'state': WAITING, 'attempts': 0})
    write_json(workdir / 'sweep.json', content)
  return open_sweep(workdir)


def read_state(directory: Path) -> dict[str, Any]:
  """How a point stands; one whose process died without a word is stopped."""
  path = pathlib.Path(directory)
  try:
    state = json.loads((path / 'state.json').read_text())
  except FileNotFoundError:
    return {'state': WAITING, 'attempts': 0}
  if state['state'] == RUNNING and lock.holder(path / '.lock') is None:
    # It may have ended between the two looks.
    state = json.loads((path / 'state.json').read_text())
    if state['state'] == RUNNING:
      state |= {'state': STOPPED, 'exit_code': None}
  return state


def write_json(path: Path, content: Any) -> None:
  """Writes a file that is there whole or not at all."""
  path = pathlib.Path(path)
  with tempfile.NamedTemporaryFile(
    'w', dir=path.parent, prefix='.', suffix='.tmp', delete=False
  ) as file:
    json.dump(content, file, indent=2)
    file.write('\n')
  os.chmod(file.name, 0o644)
  os.replace(file.name, path)


def write_results(sweep: Sweep) -> None:
  """Writes `results.jsonl` anew from what each point's state says."""
  with locked(sweep.workdir):
    lines = []
    for point, state in zip(sweep.points, sweep.states(), strict=True):
      if state['state'] in (DONE, FAILED):
        row = {
          'index': point.index,
          'name': point.name,
          'verb': point.verb,
          'overrides': point.overrides,
          'state': state['state'],
          'exit_code': state['exit_code'],
          'metrics': state.get('metrics', {}),
          'workdir': str(sweep.directory(point)),
        }
        lines.append(json.dumps(row) + '\n')
    path = sweep.workdir / 'results.jsonl'
    temporary = path.with_name('.results.tmp')
    temporary.write_text(''.join(lines))
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Holds the lock on what the points of a sweep share.

  Raises:
    OSError: somebody keeps it.
  """
  own = lock.Lock(workdir / '.lock')
  if not own.acquire(patience=120.0):
    raise OSError(
      f'{workdir}/.lock is kept by {lock.holder(workdir / ".lock")}.'
    )
  try:
    yield
  finally:
    own.release()


def _check_extends(workdir: pathlib.Path, points: Sequence[Point]) -> None:
  path = workdir / 'sweep.json'
  if not path.exists():
    others = [e.name for e in workdir.iterdir() if not e.name.startswith('.')]
    if others:
      raise ValueError(
        f'workdir={workdir} is not empty (it holds {min(others)}) and has no '
        'sweep.json; choose another one.'
      )
    return
  given = [_identity(point.to_dict()) for point in points]
  for old in json.loads(path.read_text())['points']:
    index = old['index']
    new = given[index] if index < len(given) else 'nothing'
    if new != _identity(old):
      raise ValueError(
        f'workdir={workdir} has another sweep: its point {old["name"]} is '
        f'{_identity(old)} there and {new} now. Points can be added after the '
        'last one only; choose another workdir.'
      )


def _identity(entry: Mapping[str, Any]) -> str:
  what = [entry['verb'], entry['config'], entry['overrides'], entry['name']]
  return json.dumps(what)
