"""Recipes: runs that differ in their seed, labelled by what tells them apart."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gqa import cells
from gqa.config import ModelConfig
from gqa.report import read
from gqa.report.read import Found, Row, Run, Uptraining

SCRATCH = 'from scratch'
# Fields that change neither what a step of decoding reads nor what it computes.
_FREE_MODEL = ('max_len', 'dtype', 'attention', 'remat', 'dropout')
# Fields of a run in which repetitions of it may differ, besides the seed.
_FREE_RUN = ('compilation_cache', 'checkpoint', 'mesh', 'init_from', 'seed')


@dataclasses.dataclass(frozen=True)
class How:
  """How a model got its KV heads from a parent that had more."""

  method: str
  grouping: str
  sequential: bool
  refit: bool
  reconstruct_steps: int

  def __str__(self):
    parts = [f'{self.method}, {self.grouping}']
    parts += ['refit'] if self.refit else []
    if self.sequential and not self.refit:
      parts.append('sequential')
    if self.reconstruct_steps:
      parts.append(f'{self.reconstruct_steps} steps on each layer')
    return ', '.join(parts)


@dataclasses.dataclass
class Recipe:
  """Runs that differ in their seed only.

  Attributes:
    label: unlike that of any other recipe.
    how: of the conversion it started from; None: from scratch.
    study: equal where validation losses can be compared.
  """

  label: str
  runs: list[Run]
  how: How | None
  alpha: float | None
  study: str

  @property
  def model(self) -> ModelConfig:
    """Of each run."""
    return self.runs[0].model

  @property
  def config(self) -> Row:
    """Of the first run."""
    return self.runs[0].config

  @property
  def heads(self) -> str:
    """KV heads, as one types them."""
    return heads(self.model.num_kv_heads or self.model.num_heads)

  @property
  def done(self) -> list[Run]:
    """The runs that came to their end."""
    return [run for run in self.runs if run.loss is not None]

  @property
  def origin(self) -> str:
    """Where its parameters came from, in words."""
    if self.how is None and not self.config.get('init_from'):
      return SCRATCH
    how = 'uptrained' if self.how is None else f'uptrained ({self.how})'
    return how if self.alpha is None else f'{how}, alpha {self.alpha:g}'

  @property
  def matched(self) -> bool:
    """Whether its MLP got the parameters that fewer KV heads save."""
    matched = self.config['model'].get('match_params')
    return bool(matched) and not multi_head(self.model)

  @property
  def kind(self) -> str:
    """All of its label but the KV heads."""
    return self.label.split(', ', 1)[1]

  @property
  def names(self) -> str:
    """Of its runs."""
    return '; '.join(run.name for run in self.runs)

  def key(self, without: Sequence[str] = ()) -> str:
    """Equal for recipes that differ in these fields of the model only."""
    return _recipe_key(self.runs[0], self.how, without)

  def loss(self) -> dict[str, Any]:
    """Mean and standard deviation over the runs that are done."""
    return mean_and_sd([run.loss for run in self.done])


def make(found: Found) -> list[Recipe]:
  """The recipes of all runs that have a model, each with a label."""
  groups = collections.defaultdict(list)
  for run in found.runs:
    if run.model is not None:
      groups[_recipe_key(run, _run_how(run, found))].append(run)
  recipes = [
    Recipe('', runs, _run_how(runs[0], found), runs[0].alpha, _study(runs[0]))
    for runs in groups.values()
  ]
  recipes.sort(
    key=lambda r: (r.study, -heads_order(r.heads)[0], r.origin, r.names)
  )
  _label(recipes)
  return recipes


def heads(num_kv_heads: int | Sequence[int]) -> str:
  """KV heads as one types them; one int if all layers have as many."""
  if not isinstance(num_kv_heads, int) and len(set(num_kv_heads)) == 1:
    return str(num_kv_heads[0])
  return cells.heads(num_kv_heads)


def heads_order(label: str) -> tuple:
  """Sorts by the KV heads of all layers."""
  numbers = [float(n) for n in label.split(',')]
  return statistics.mean(numbers), label


def mean_and_sd(values: Sequence[float]) -> dict[str, Any]:
  """Mean, standard deviation of a sample, and how many."""
  return {
    'mean': statistics.mean(values) if values else None,
    'sd': statistics.stdev(values) if len(values) > 1 else None,
    'count': len(values),
  }


def how_of(fields: Any) -> How | None:
  """Of the nearest conversion in the parents of a checkpoint."""
  while isinstance(fields, Mapping):
    if fields.get('method'):
      return How(
        fields['method'],
        fields.get('grouping') or '',
        bool(fields.get('sequential')),
        bool(fields.get('refit')),
        fields.get('reconstruct_steps') or 0,
      )
    fields = fields.get('parent')
  return None


def uptraining_of(run: Run) -> Uptraining | None:
  """What a run of uptraining came to; None if it is not one, or not done."""
  how = how_of(run.meta.get('parent'))
  if how is None or run.alpha is None or run.loss is None:
    return None
  method, options = str(how), run.config.get('uptrain') or {}
  if options.get('distill'):
    method += f', distilled {options["distill"]:g}'
  if options.get('learned_mixing'):
    method += ', learned mixing'
  model = run.config['model']
  return Uptraining(
    name=run.name,
    model='' if run.model is None else size(run.model),
    num_kv_heads=heads(model['num_kv_heads'] or model['num_heads']),
    method=method,
    alpha=run.alpha,
    seed=run.config['seed'],
    parent_loss=run.parent_loss,
    curve=[
      (step * run.tokens_per_step, loss)
      for step, loss in run.curve('eval/loss')
    ],
  )


def size(model: ModelConfig) -> str:
  """A model in a few words."""
  millions = read.params_of(dataclasses.replace(model, num_kv_heads=None)) / 1e6
  return (
    f'{model.num_layers} x {model.embed_dim}, {model.num_heads} heads '
    f'({millions:,.3g}M with all KV heads)'
  )


def shape_key(model: ModelConfig) -> str:
  """Equal for models that decode at the same cost."""
  fields = model.to_dict() | {'num_kv_heads': list(model.kv_heads)}
  for name in _FREE_MODEL:
    fields.pop(name, None)
  return json.dumps(fields, sort_keys=True)


def family(model: ModelConfig) -> str:
  """Equal for models that differ in their KV heads only."""
  return shape_key(dataclasses.replace(model, num_kv_heads=None))


def multi_head(model: ModelConfig) -> bool:
  """Whether each query head has a KV head of its own."""
  return set(model.kv_heads) == {model.num_heads}


def _run_how(run: Run, found: Found) -> How | None:
  how = how_of(run.meta.get('parent'))
  if how is None:  # it has no checkpoint yet
    for path in run.parent_paths[:1]:
      conversion = found.conversion_at(path)
      how = how_of(conversion.result) if conversion else None
  return how


def _recipe_key(run: Run, how: How | None, without: Sequence[str] = ()) -> str:
  config = {k: v for k, v in run.config.items() if k not in _FREE_RUN}
  for section, names in (
    ('train', ('log_every', 'profile')),
    ('eval', ('every_steps',)),
  ):
    kept = {k: v for k, v in config.get(section, {}).items() if k not in names}
    config[section] = kept
  config['model'] = run.model.to_dict() | {'kv_heads': run.model.kv_heads}
  for name in ('num_kv_heads', *without):
    config['model'].pop(name, None)
  started = bool(run.config.get('init_from'))
  return json.dumps([config, str(how), started], sort_keys=True)


def _study(run: Run) -> str:
  config = run.config
  fields = {
    'text': (config.get('data') or {}).get('path'),
    'vocabulary': config['model'].get('vocab_size'),
    'window': config['train'].get('seq_len'),
    'batches': (config.get('eval') or {}).get('num_batches'),
  }
  return ', '.join(f'{k} {v}' for k, v in fields.items() if v is not None)


def _label(recipes: Sequence[Recipe]) -> None:
  """Labels recipes by what they differ in, and by no more."""
  for recipe in recipes:
    count = '1 KV head' if recipe.heads == '1' else f'{recipe.heads} KV heads'
    if multi_head(recipe.model):
      count += ' (multi-head)'
    recipe.label = f'{count}, {recipe.origin}'
    if recipe.matched:
      recipe.label += ', MLP widened'
  for add in (_added_params, _added_fields, _added_study, _added_name):
    groups = collections.defaultdict(list)
    for recipe in recipes:
      groups[recipe.label].append(recipe)
    for group in groups.values():
      if len(group) > 1:
        add(group)


def _added_params(group: Iterable[Recipe]) -> None:
  counts = [read.params_of(recipe.model) for recipe in group]
  if len(set(counts)) > 1:
    for recipe, count in zip(group, counts, strict=True):
      recipe.label += f', {count / 1e6:.3g}M'


def _added_fields(group: Sequence[Recipe]) -> None:
  flat = [_flat(recipe.config) for recipe in group]
  names = sorted(set().union(*flat))
  differing = [
    name
    for name in names
    if name.split('.')[0] not in (*_FREE_RUN, 'eval', 'data')
    and len({json.dumps(fields.get(name)) for fields in flat}) > 1
  ]
  for recipe, fields in zip(group, flat, strict=True):
    for name in differing[:3]:
      recipe.label += f', {name.split(".")[-1]}={fields.get(name)}'


def _added_study(group: Sequence[Recipe]) -> None:
  if len({recipe.study for recipe in group}) > 1:
    for recipe in group:
      recipe.label += f', {recipe.study}'


def _added_name(group: Sequence[Recipe]) -> None:
  for recipe in group:
    recipe.label += f', {recipe.runs[0].name}'


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      flat |= _flat(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat
