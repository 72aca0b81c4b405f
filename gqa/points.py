"""Points of a sweep: plain lists of overrides, and steps that wait for others.

An experiment file has `get_config()` and `sweep()`. What `sweep` yields is a
flat dict of config fields, the same that one types after `--config.`, or a
`Step`:

  def sweep(num_seeds=3):
    parent = points.Step('train', {'model.num_kv_heads': 8})
    for heads in (4, 2, 1):
      converted = points.Step(
        'convert', {'source': parent, 'num_kv_heads': heads}
      )
      yield points.Step('evaluate', {'checkpoint': converted})
    yield from points.product(
      points.over('model.num_kv_heads', [8, 4, 2, 1]), points.seeds(num_seeds)
    )
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Overrides = dict[str, Any]

VERBS = ('train', 'convert', 'evaluate', 'benchmark')
# What a launcher keeps in the workdir of a point, beside the command's own.
LAUNCHER_FILES = ('point.json', 'state.json', 'log.txt')


def over(name: str, values: Iterable[Any]) -> list[Overrides]:
  """One point for each value of a field."""
  return [{name: value} for value in values]


def seeds(count: int, first: int = 0) -> list[Overrides]:
  """`count` points that differ in `seed` alone."""
  return over('seed', range(first, first + count))


def product(*lists: Iterable[Overrides]) -> list[Overrides]:
  """Every combination of the lists' points; the last list varies fastest.

  Raises:
    ValueError: two lists set the same field.
  """
  combined: list[Overrides] = [{}]
  for points in map(list, lists):
    combined = [_merged(left, right) for left in combined for right in points]
  return combined


def zipped(*lists: Iterable[Overrides]) -> list[Overrides]:
  """The first points of all lists as one, then the second ones, and so on.

  Raises:
    ValueError: the lists differ in length, or set the same field.
  """
  columns = [list(points) for points in lists]
  lengths = [len(points) for points in columns]
  if len(set(lengths)) > 1:
    raise ValueError(
      f'zipped() got lists of {lengths} points, which must be equally long; '
      'use product() for every combination.'
    )
  return [_merged(*together) for together in zip(*columns, strict=True)]


def chain(*lists: Iterable[Overrides]) -> list[Overrides]:
  """The points of all lists, one list after the other."""
  return [point for points in lists for point in points]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """One run of a sweep; equal steps are one point.

  Attributes:
    verb: 'train', 'convert', 'evaluate' or 'benchmark'.
    overrides: config fields (train, benchmark) or flags (convert, evaluate). A
      value that is itself a step stands for that step's workdir, and makes
      this one wait for it.
    config: config file of train and benchmark; the experiment's own if None.

  Raises:
    ValueError: there is no such verb, or it takes no config.
  """

  verb: str
  overrides: Mapping[str, Any]
  config: str | None = None

  def __post_init__(self):
    if self.verb not in VERBS:
      raise ValueError(f'verb={self.verb!r} is unknown; choose one of {VERBS}.')
    if self.config is not None and self.verb not in ('train', 'benchmark'):
      raise ValueError(
        f'config={self.config!r}: {self.verb} takes flags, not a config; '
        'leave it out.'
      )
    object.__setattr__(self, 'overrides', dict(self.overrides))

  @property
  def after(self) -> list[Step]:
    """The steps that this one waits for."""
    steps = [v for v in self.overrides.values() if isinstance(v, Step)]
    return list(dict.fromkeys(steps))

  def __eq__(self, other):
    return isinstance(other, Step) and self._key == other._key

  def __hash__(self):
    return hash(self._key)

  @property
  def _key(self):
    items = ((name, _frozen(v)) for name, v in self.overrides.items())
    return self.verb, self.config, frozenset(items)


def as_step(point: Step | Mapping[str, Any]) -> Step:
  """What a sweep yielded, as a step: a dict trains the experiment's config."""
  return point if isinstance(point, Step) else Step('train', point)


def entry_of(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """What the launcher of a sweep wrote about the point of a workdir, if any."""
  path = pathlib.Path(workdir) / LAUNCHER_FILES[0]
  return json.loads(path.read_text()) if path.exists() else {}


def _merged(*points: Mapping[str, Any]) -> Overrides:
  merged: Overrides = {}
  for point in points:
    twice = sorted(merged.keys() & point.keys())
    if twice:
      raise ValueError(
        f'{twice[0]} is set by two of the combined lists, to '
        f'{merged[twice[0]]!r} and {point[twice[0]]!r}; leave it to one.'
      )
    merged |= point
  return merged


def _frozen(value: Any):
  """A value that can be hashed; 1, 1.0 and True stay different."""
  if isinstance(value, Sequence) and not isinstance(value, str):
    return tuple(map(_frozen, value))
  if isinstance(value, Step):
    return value
  return type(value).__name__, value
