"""What a run of uptraining goes back to: its parent, teacher and heads.

All that is read of other checkpoints than the one it starts from. The parent
is found by what `python -m gqa.convert` wrote into the converted checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gqa import checkpoint
from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.mixing import KINDS, Mixing


@dataclasses.dataclass(frozen=True)
class Source:
  """Parameters on disk."""

  path: str
  step: str
  config: ModelConfig

  @classmethod
  def find(cls, path: str, step: int | str = 'latest') -> Source:
    """Reads the config; raises ValueError where there is no checkpoint."""
    config = ModelConfig.from_dict(workdir_lib.load_config(path)['model'])
    checkpoint.load_meta(path, step)
    return cls(path, str(step), config)

  def load(self, mesh: jax.sharding.Mesh) -> model_lib.Params:
    """Reads the parameters onto a mesh."""
    return checkpoint.load_on_mesh(self.path, self.step, self.config, mesh)[0]


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a run has besides its own config; of an ordinary run, nothing."""

  mixing: Mixing
  parent: Source | None = None  # the model before conversion
  teacher: Source | None = None
  orders: tuple[tuple[int, ...], ...] = ()  # see `Mixing.start`
  notice: str = ''  # what the user is to know

  def start(
    self, params: model_lib.Params, mesh: jax.sharding.Mesh
  ) -> model_lib.Params:
    """The parameters that training starts with, from those of init_from."""
    if not self.mixing.active:
      return params
    start = jax.jit(lambda a, b: self.mixing.start(a, b, self.orders))
    started = start(params, self.parent.load(mesh))
    _check_mean(params, self.mixing.fold(started), self.parent.path)
    return started


def find(config, model_config: ModelConfig) -> Origin:
  """Finds the parent of a resolved config's checkpoint, and the teacher.

  Raises:
    ValueError: one that is needed is not there or does not fit.
  """
  plain = Mixing(model_config, model_config)
  if config.uptrain.alpha is None:
    return Origin(plain)
  u = config.uptrain
  recorded = _converted_from(checkpoint.load_meta(config.init_from))
  parent, notice = None, f'init_from={config.init_from} records no parent'
  if recorded is not None:
    try:
      parent, notice = Source.find(recorded['path'], recorded['step']), ''
    except ValueError as error:
      notice = f'the parent is not there: {error}'
  teacher = Source.find(u.teacher) if u.teacher else parent
  if parent is None and u.learned_mixing:
    raise ValueError(f'uptrain.learned_mixing=True needs a parent; {notice}')
  if u.distill:
    if teacher is None:
      raise ValueError(
        f'uptrain.distill={u.distill} needs a teacher, and {notice}; give '
        '--config.uptrain.teacher=DIR.'
      )
    _check_teacher(teacher, model_config, config.train.seq_len)
  mixing, orders = plain, ()
  if u.learned_mixing:
    heads = parent.config.num_kv_heads
    heads = dataclasses.replace(model_config, num_kv_heads=heads)
    mixing = Mixing(model_config, heads)
    if not mixing.active:
      raise ValueError(
        f'uptrain.learned_mixing=True: init_from={config.init_from} has as '
        f'many KV heads as its parent {parent.path}; convert it to fewer.'
      )
    orders = _orders(config.init_from, mixing)
  return Origin(mixing, parent, teacher if u.distill else None, orders, notice)


def distilled_loss(
  config,
  teacher_config: ModelConfig,
  teacher: model_lib.Params,
  features: jax.Array,
  head: jax.Array,
  batch: Mapping[str, jax.Array],
  softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`loss.distillation` from a teacher that reads the same batch."""
  goal = model_lib.Decoder(teacher_config).apply(
    {'params': teacher},
    batch['tokens'],
    batch['positions'],
    batch['segments'],
    method='features',
  )
  return loss_lib.distillation(
    features,
    head,
    goal,
    model_lib.head_rows(teacher_config, teacher),
    batch['targets'],
    batch['weights'],
    part=config.uptrain.distill,
    temperature=config.uptrain.temperature,
    z_loss=config.train.z_loss,
    softcap=softcap,
    teacher_softcap=teacher_config.logit_softcap,
  )


def _converted_from(meta: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """What a checkpoint remembers of the last conversion before it, if any."""
  parent = meta.get('parent')
  while parent is not None and 'method' not in parent:
    parent = parent.get('parent')
  return parent


def _check_teacher(teacher: Source, model: ModelConfig, seq_len: int):
  t = teacher.config
  if t.vocab_size != model.vocab_size:
    raise ValueError(
      f'the teacher {teacher.path} has vocab_size={t.vocab_size} and the '
      f'model {model.vocab_size}; they must agree: choose another '
      'uptrain.teacher.'
    )
  if seq_len > t.max_len:
    raise ValueError(
      f'train.seq_len={seq_len} exceeds max_len={t.max_len} of the teacher '
      f'{teacher.path}; lower it.'
    )


def _orders(path: str, mixing: Mixing) -> tuple[tuple[int, ...], ...]:
  """The order of the parent's KV heads in each mixed layer."""
  file = pathlib.Path(path).expanduser() / 'convert.json'
  try:
    reports = json.loads(file.read_text(encoding='utf-8'))['layers']
  except (OSError, ValueError, KeyError):
    raise ValueError(
      f'uptrain.learned_mixing=True needs {file}, which says what heads were '
      'merged; give the workdir that python -m gqa.convert made.'
    ) from None
  groups = {f'layer_{r["layer"]}': r['groups'] for r in reports}
  return tuple(
    tuple(head for group in groups[name] for head in group)
    for name, _, _ in mixing.mixed_layers
  )


def _check_mean(params, folded, parent):
  """Raises unless weights of 1/g give back the converted model."""
  for name in params:
    if not name.startswith('layer_'):
      continue
    for kind in KINDS:
      wanted = params[name]['attention'][kind]['kernel']
      found = folded[name]['attention'][kind]['kernel']
      if float(jnp.abs(wanted - found).max()) > 1e-4 * float(
        jnp.abs(wanted).max()
      ):
        raise ValueError(
          'uptrain.learned_mixing=True starts from the mean of heads, but '
          f'init_from does not hold the mean of those of {parent}; convert '
          'with --method=mean.'
        )
