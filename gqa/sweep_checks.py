"""Checks all points of a sweep before the first one starts.

What a command would refuse after a day in a queue is found here, by the same
checks, and without starting a backend.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from gqa import cells, cli, evaluate, experiment, optim, run, uptrain
from gqa import data as data_lib
from gqa.config import ModelConfig
from gqa.convert import __main__ as convert
from gqa.convert import walk
from gqa.launch.layout import Point
from gqa.points import Step

_MODULES = {'convert': convert, 'evaluate': evaluate}
# Fields that a checkpoint's shapes follow from.
_SHAPES = (
  'vocab_size',
  'num_layers',
  'embed_dim',
  'num_heads',
  'head_dim',
  'kv_heads',
)


def check(steps: Sequence[Step], points: Sequence[Point], data: bool) -> None:
  """Raises ValueError for the first point that could not run.

  Args:
    steps: of the sweep.
    points: the same, expanded.
    data: whether the data must be there already.
  """
  checker = _Checker(data)
  seen: dict[str, str] = {}
  for step, point in zip(steps, points, strict=True):
    try:
      resolved = checker.resolve(step, point)
    except (ValueError, TypeError, OSError, flags.Error) as error:
      raise ValueError(f'point {point.name}: {cli.reason(error)}') from error
    key = json.dumps([step.verb, resolved], sort_keys=True, default=str)
    if key in seen:
      raise ValueError(
        f'points {seen[key]} and {point.name} are the same run; leave one out.'
      )
    seen[key] = point.name


class _Checker:
  """Goes through the steps in order and remembers the models they make."""

  def __init__(self, data: bool):
    self._data = data
    self._models: dict[Step, ModelConfig | None] = {}
    self._vocab_sizes: set[tuple[str, int]] = set()

  def resolve(self, step: Step, point: Point) -> dict[str, Any]:
    """All that the step's command goes by; its model is remembered."""
    argv = experiment.arguments_of(step, point.overrides, 'W')[1:]
    if step.verb == 'train':
      return self._train(step, _config(argv))
    if step.verb == 'benchmark':
      config = _config(argv)
      cells.from_config(config, False)
      return config.to_dict()
    values = _flags(step.verb, argv)
    self._models[step] = self._converted(step, values)
    return values.flag_values_dict()

  def _train(self, step, config):
    source = step.overrides.get('init_from')
    if uptrain.is_on(config) and isinstance(source, Step):
      # What is unset is known when that step is done.
      uptrain.check_fields(config)
      self._models[step] = self._models.get(source)
      return config.to_dict()
    config = uptrain.resolve(config)
    run.check_run(config)
    optim.check_optim(config.optim, max(config.train.num_steps, 1))
    model = ModelConfig.from_dict(config.model.to_dict())
    self._models[step] = model
    parent = self._model_of(step.overrides.get('init_from'))
    if parent is not None:
      for name in _SHAPES:
        theirs, ours = getattr(parent, name), getattr(model, name)
        if theirs != ours:
          raise ValueError(
            f'model.{name}={ours}, but init_from is a step whose model has '
            f'{theirs}; set the one to the other.'
          )
    if self._data:
      self._check_data(config.data.path, model.vocab_size)
    return config.to_dict()

  def _check_data(self, path, vocab_size):
    if (path, vocab_size) not in self._vocab_sizes:
      for split in ('train', 'valid'):
        data_lib.open_tokens(path, split).check_vocab(vocab_size)
      self._vocab_sizes.add((path, vocab_size))

  def _converted(self, step, values) -> ModelConfig | None:
    """The model that a conversion makes, as far as one knows it now."""
    if step.verb != 'convert':
      return None
    heads = convert._heads(values['num_kv_heads'].value)
    if (heads is None) == (values['budget'].value is None):
      raise ValueError('give one of num_kv_heads and budget.')
    parent = self._model_of(step.overrides.get('source'))
    if parent is None or heads is None:
      return None
    if isinstance(heads, int):
      heads = (heads,) * parent.num_layers
    walk.check_kv_heads(parent, heads)
    return dataclasses.replace(parent, num_kv_heads=heads)

  def _model_of(self, value: Any) -> ModelConfig | None:
    return self._models.get(value) if isinstance(value, Step) else None


def _config(argv: Sequence[str]):
  """The config that a command line gives to train or benchmark."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', flag_values=values, sys_argv=list(argv), lock_config=True
  )
  flags.DEFINE_multi_string('workdir', None, '', flag_values=values)
  cli.read_flags(argv, values)
  return values.config


def _flags(verb: str, argv: Sequence[str]) -> flags.FlagValues:
  """The flags of a verb, parsed apart from those of this process."""
  own, values = flags.FLAGS, flags.FlagValues()
  before = flags.FlagValues()
  before.append_flag_values(own)
  own.remove_flag_values(before)
  try:
    _MODULES[verb]._define_flags()
    values.append_flag_values(own)
    own.remove_flag_values(values)
  finally:
    own.append_flag_values(before)
  cli.read_flags(argv, values)
  return values
