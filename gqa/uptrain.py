"""Training on after conversion, for a fraction of the parent's steps.

The paper's second stage (Ainslie et al. 2023, section 2.2): a run whose
`uptrain.alpha` is set starts from the checkpoint `init_from` with a fresh
optimizer and a schedule that warms up again. Model, data and recipe are the
checkpoint's own wherever the config leaves them unset. What else such a run
has, its parent's loss, a teacher and mixed heads, is in origin.py.
"""

from __future__ import annotations

import math
import pathlib

from ml_collections import config_dict

from gqa import checkpoint
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig

# Fields of the model that say how it is computed, not what it is.
FREE_FIELDS = ('attention', 'dropout', 'dtype', 'remat')
_SECTIONS = ('data', 'train', 'optim')  # where unset means as in init_from
_FORMULAS = ('train.num_steps', 'optim.warmup_steps', 'optim.learning_rate')


def is_on(config) -> bool:
  """Whether a run's config is one of uptraining."""
  return config.uptrain.alpha is not None


def resolve(config) -> config_dict.ConfigDict:
  """Returns a run's config with all fields set that init_from decides.

  The config of an ordinary run is returned as it is.

  Raises:
    ValueError: fields contradict init_from or each other, or are unknown.
  """
  check_fields(config)
  if not is_on(config):
    return config
  raw = workdir_lib.load_config(config.init_from)
  meta = checkpoint.load_meta(config.init_from)
  config = config.copy_and_resolve_references()
  with config.unlocked():
    _take_model(config, raw)
    _take_recipe(config, raw)
    _take_steps(config, _parent_steps(config, meta))
  return config


def check_tokenizer(config, tokenizer) -> None:
  """Raises ValueError if the data was tokenised unlike init_from's."""
  path = pathlib.Path(config.init_from).expanduser()
  if not (path / tokenizer_lib.FILE).exists():
    return
  own = tokenizer_lib.load(path)
  for name in ('vocab_size', 'bos_id', 'eos_id'):
    if getattr(own, name) != getattr(tokenizer, name):
      raise ValueError(
        f'data.path={config.data.path} was made with another tokenizer than '
        f'init_from={config.init_from} has ({name}={getattr(tokenizer, name)} '
        f'against {getattr(own, name)}); make the data with --tokenizer='
        f'{path / tokenizer_lib.FILE}.'
      )


def check_fields(config) -> None:
  """Raises ValueError for fields that no checkpoint would make right."""
  u = config.uptrain
  if u.alpha is None:
    for name, off in (
      ('parent_steps', None),
      ('distill', 0),
      ('teacher', None),
      ('learned_mixing', False),
    ):
      if u[name] != off:
        raise ValueError(
          f'uptrain.{name}={u[name]!r} needs uptrain.alpha, the fraction of '
          "the parent's steps; set it, or use configs/uptrain.py."
        )
    return
  if not config.init_from:
    raise ValueError(
      f'uptrain.alpha={u.alpha} needs a checkpoint to start from; give '
      '--config.init_from=DIR, as python -m gqa.convert makes it.'
    )
  for name, valid, rule in (
    ('alpha', 0 <= u.alpha < math.inf, 'must be finite and >= 0'),
    ('distill', 0 <= u.distill <= 1, 'must be in [0, 1]'),
    ('temperature', 0 < u.temperature < math.inf, 'must be finite and > 0'),
    ('peak_fraction', 0 < u.peak_fraction < math.inf, 'must be > 0'),
    ('warmup_fraction', 0 <= u.warmup_fraction <= 1, 'must be in [0, 1]'),
    (
      'parent_steps',
      u.parent_steps is None or u.parent_steps > 0,
      'must be at least 1',
    ),
  ):
    if not valid:
      raise ValueError(f'uptrain.{name}={u[name]} {rule}.')
  if u.teacher and not u.distill:
    raise ValueError(
      f'uptrain.teacher={u.teacher} is of no use with uptrain.distill=0; set '
      'that to a part of the objective, such as 0.5.'
    )


def _take_model(config, raw):
  """Sets the fields of the model, and refuses those that contradict."""
  model = ModelConfig.from_dict(raw['model'])
  # What `match_params` once added to the MLP is in its size.
  saved = model.to_dict() | {'match_params': False}
  wrong = []
  for name, value in saved.items():
    given = config.model[name]
    if given is None:
      config.model[name] = value
    elif name not in FREE_FIELDS and not _same(model, name, given, value):
      shown = model.num_heads if name == 'num_kv_heads' else None
      shown = shown if value is None else value
      wrong.append(f'model.{name}={given!r}, but it has {shown!r}')
  if wrong:
    raise ValueError(
      f'init_from={config.init_from} is another model: {"; ".join(wrong)}; '
      'leave unset what it decides, or convert it first.'
    )


def _same(model, name, given, value):
  if name == 'num_kv_heads':
    heads = (given,) * model.num_layers if isinstance(given, int) else given
    return tuple(heads) == model.kv_heads
  return (tuple(given) if isinstance(given, list) else given) == value


def _take_recipe(config, raw):
  """Sets what is unset of data, training and optimizer."""
  missing = []
  for section in _SECTIONS:
    recorded = raw.get(section) or {}
    for name, value in config[section].items():
      field = f'{section}.{name}'
      if value is not None or field in _FORMULAS:
        continue
      if recorded.get(name) is None:
        missing.append(f'--config.{field}')
      else:
        config[section][name] = recorded[name]
  if config.optim.learning_rate is None:
    peak = (raw.get('optim') or {}).get('learning_rate')
    if peak is None:
      missing.append('--config.optim.learning_rate')
    else:
      config.optim.learning_rate = config.uptrain.peak_fraction * peak
  if missing:
    raise ValueError(
      f'init_from={config.init_from} does not record how it was trained; give '
      f'{", ".join(missing)}.'
    )


def _parent_steps(config, meta):
  """The parent's steps, by the checkpoint's metadata or by the config."""
  known, given = checkpoint.trained_steps(meta), config.uptrain.parent_steps
  if not known and given is None:
    raise ValueError(
      f'init_from={config.init_from} does not record its steps of training, '
      f'of which uptrain.alpha={config.uptrain.alpha} is a fraction; give '
      '--config.uptrain.parent_steps.'
    )
  if known and given not in (None, known):
    raise ValueError(
      f'uptrain.parent_steps={given}, but init_from={config.init_from} '
      f'records {known} steps; leave it unset.'
    )
  return known or given


def _take_steps(config, parent_steps):
  """Sets the number of steps and of those that warm up."""
  u, t = config.uptrain, config.train
  calls = u.alpha * parent_steps / t.steps_per_call
  steps = max(round(calls), 1) * t.steps_per_call if u.alpha else 0
  if t.num_steps not in (None, steps):
    raise ValueError(
      f'train.num_steps={t.num_steps}, but uptrain.alpha={u.alpha} of '
      f'{parent_steps} steps is {steps}; leave it unset.'
    )
  u.parent_steps, t.num_steps = parent_steps, steps
  if config.optim.warmup_steps is None:
    config.optim.warmup_steps = round(u.warmup_fraction * steps)
