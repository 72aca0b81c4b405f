"""Reads an experiment: its steps in order, their names and their commands."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import pathlib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gqa import cli, points
from gqa.launch.layout import Point
from gqa.points import Step

# The flag of each verb that names the workdir it makes.
_TARGETS = {'train': 'workdir', 'convert': 'target', 'benchmark': 'workdir'}
# Fields that a table of runs shows in another way.
_OWN_COLUMNS = {'model.num_kv_heads', 'seed', 'init_from'}
_NAME_LENGTH = 120  # of a directory, which may have 255 bytes


def load(
  path: str, arguments: Mapping[str, str], common: Mapping[str, str]
) -> list[Step]:
  """Returns the steps of an experiment, each after those it waits for.

  Args:
    path: experiment file, as `--config` names it.
    arguments: of its `sweep`, as typed.
    common: fields of every training step, as typed.

  Raises:
    ValueError: the file or an argument cannot be used.
  """
  file, colon, argument = path.partition(':')
  file = os.path.normpath(file)
  path = f'{file}{colon}{argument}'
  module = cli.load_config_file(file)
  if not hasattr(module, 'sweep'):
    raise ValueError(f'--config={file} defines no sweep().')
  keywords = _typed(module.sweep, arguments)
  with cli.line_named(file):
    yielded = [points.as_step(point) for point in module.sweep(**keywords)]
  if not yielded:
    raise ValueError(f'--config={file}: sweep() yields no point.')
  ordered: dict[Step, None] = {}
  common = {field: literal(text) for field, text in common.items()}
  for step in yielded:
    _add(_completed(step, path, common), ordered)
  return list(ordered)


def expand(
  steps: Sequence[Step],
  root: str | os.PathLike[str],
  python: str,
  common: Collection[str] = (),
) -> list[Point]:
  """Names the steps and writes their commands.

  Args:
    steps: each after those it waits for.
    root: the sweep's workdir, where the commands run.
    python: the interpreter of the commands.
    common: fields that say nothing about a step.
  """
  fields = {f for s in steps if s.verb == 'train' for f in s.overrides}
  columns = tuple(sorted(fields - set(common) - _OWN_COLUMNS))
  expanded: dict[Step, Point] = {}
  for index, step in enumerate(steps):
    words = _words(step, expanded, common, steps[0].config)
    name = f'{index:03}-{_shortened(",".join(words))}'
    overrides = {
      field: f'{root}/{expanded[value].name}'
      if isinstance(value, Step)
      else value
      for field, value in step.overrides.items()
    }
    command = [python, *arguments_of(step, overrides, f'{root}/{name}')]
    expanded[step] = Point(
      index=index,
      name=name,
      group=_group(step, words, expanded),
      verb=step.verb,
      config=step.config,
      overrides=overrides,
      after=tuple(sorted(expanded[other].index for other in step.after)),
      command=shlex.join(command),
      columns=columns,
    )
  return list(expanded.values())


def arguments_of(
  step: Step, overrides: Mapping[str, Any], workdir: str
) -> list[str]:
  """What follows the interpreter in the command of a step."""
  prefix = '--'
  arguments = ['-m', f'gqa.{step.verb}']
  if step.config is not None:
    arguments.append(f'--config={step.config}')
    prefix = '--config.'
  if step.verb in _TARGETS:
    arguments.append(f'--{_TARGETS[step.verb]}={workdir}')
  return arguments + [
    f'{prefix}{field}={typed(field, value)}'
    for field, value in overrides.items()
  ]


def typed(field: str, value: Any) -> str:
  """A value as one types it on a command line.

  Raises:
    ValueError: that cannot be typed.
  """
  if isinstance(value, (tuple, list)):
    text = ','.join(typed(field, item) for item in value)
    return f'({text},)' if len(value) == 1 else text
  if isinstance(value, (bool, int, float, str)):
    return str(value)
  raise ValueError(
    f'{field}={value!r} cannot be given on a command line; use a number, a '
    'word or a tuple, or leave the field out for its default.'
  )


def literal(text: str) -> Any:
  """What was typed, as a number, bool or tuple if it is one."""
  if text.lower() in ('true', 'false'):
    return text.lower() == 'true'
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
  return value if isinstance(value, (int, float, tuple)) else text


def _typed(sweep, arguments: Mapping[str, str]) -> dict[str, Any]:
  """Arguments of `sweep` in the types of its defaults."""
  parameters = inspect.signature(sweep).parameters
  keywords = {}
  for name, text in arguments.items():
    if name not in parameters:
      raise ValueError(
        f'--sweep.{name}={text}: sweep() has no such argument; it has '
        f'{list(parameters)}.'
      )
    default = parameters[name].default
    value = _like(default, text)
    if not isinstance(value, type(default)):
      raise ValueError(
        f'--sweep.{name}={text} must be like its default, {default!r}.'
      )
    keywords[name] = value
  return keywords


def _like(default: Any, text: str) -> Any:
  """What was typed, in the default's type if that is possible."""
  if isinstance(default, str):
    return text
  value = literal(text)
  if isinstance(default, tuple):
    if default and isinstance(default[0], str):
      # Quotes, which a tuple of strings has in Python, may be left out.
      if isinstance(value, tuple) and all(isinstance(x, str) for x in value):
        return value
      return tuple(part.strip() for part in text.split(','))
    # A string among numbers stays one, which is refused.
    return value if isinstance(value, tuple | str) else (value,)
  if isinstance(default, float) and type(value) is int:
    return float(value)
  return value


def _completed(step: Step, path: str, common: Mapping[str, Any]) -> Step:
  """A step with all that its experiment says about it."""
  overrides = {
    field: _completed(value, path, common) if isinstance(value, Step) else value
    for field, value in step.overrides.items()
  }
  if step.verb == 'train':
    twice = sorted(overrides.keys() & common.keys())
    if twice:
      raise ValueError(
        f'--config.{twice[0]}={common[twice[0]]} is set by sweep() too, to '
        f'{overrides[twice[0]]}; leave it out.'
      )
    overrides |= common
  config = step.config
  if config is None and step.verb in ('train', 'benchmark'):
    config = path
  return Step(step.verb, overrides, config)


def _add(step: Step, ordered: dict[Step, None]) -> None:
  for other in step.after:
    _add(other, ordered)
  ordered.setdefault(step)


def _words(
  step: Step,
  expanded: Mapping[Step, Point],
  common: Collection[str],
  main_config: str | None,
) -> list[str]:
  """What tells a step from others: a verb or config, and overrides."""
  last = [field.rpartition('.')[2] for field in step.overrides]
  words = []
  for field, value in step.overrides.items():
    name = field.rpartition('.')[2]
    if last.count(name) > 1:
      name = field
    if isinstance(value, Step):
      words.append(f'{name}={expanded[value].index:03}')
    elif not (step.verb == 'train' and field in common):
      items = value if isinstance(value, (tuple, list)) else [value]
      words.append(f'{name}={"-".join(typed(field, i) for i in items)}')
  words = [re.sub(r'[^\w.=+-]+', '-', word).strip('-') for word in words]
  if step.verb != 'train':
    return [step.verb, *words]
  if step.config != main_config:
    return [pathlib.Path(step.config.partition(':')[0]).stem, *words]
  return words or [step.verb]


def _group(
  step: Step, words: Sequence[str], expanded: Mapping[Step, Point]
) -> str:
  """What a step is but for seeds, its own and those of what it waits for."""
  names = [field.rpartition('.')[2] for field in step.overrides]
  of_steps = {
    f'{name}={expanded[value].index:03}'
    for name, value in zip(names, step.overrides.values(), strict=True)
    if isinstance(value, Step)
  }
  own = [w for w in words if w not in of_steps and not w.startswith('seed=')]
  return ' < '.join(
    [','.join(own) or step.verb, *(expanded[s].group for s in step.after)]
  )


def _shortened(name: str) -> str:
  if len(name.encode()) <= _NAME_LENGTH:
    return name
  digest = hashlib.sha256(name.encode()).hexdigest()[:8]
  cut = name.encode()[: _NAME_LENGTH - 9].decode(errors='ignore')
  return f'{cut}-{digest}'
