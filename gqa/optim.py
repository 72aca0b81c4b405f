"""Learning-rate schedules and optimizers, built from `config.optim`.

Every optimizer is the same chain: a rule that turns the gradient into a
direction, decoupled weight decay, and the learning rate. So `learning_rate`
and `weight_decay` mean the same thing whatever the rule: an update removes
learning_rate * weight_decay of a weight.

What decays is decided by a parameter's role, the last name of its path, never
by its rank: kernels decay, embeddings when `decay_embeddings` says so, norm
scales and biases never. A tree whose layers are stacked along a leading axis
is therefore treated as one with a subtree for each layer.

The chain does not clip. The train step multiplies gradients by `clip_factor`
together with their other factors, in one pass.
"""

import difflib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[Any], jax.Array]

# The smallest two axes whose second moments Adafactor stores as row and column
# sums: the usual head_dim of 64 is included, so attention kernels are factored.
_FACTOR_FROM = 64

# Learning rate over its range, as a function of the part of the decay done.
_DECAYS = {
  'cosine': lambda part: 0.5 * (1 + jnp.cos(jnp.pi * part)),
  'linear': lambda part: 1 - part,
  'wsd': lambda part: 1 - part,
  'constant': jnp.ones_like,
}

# Direction of an update before weight decay and learning rate. Adafactor has
# no first moment and keeps its updates below one in root mean square; it does
# not multiply by the size of the parameter, as learning_rate is absolute.
_RULES = {
  'adamw': lambda c: optax.scale_by_adam(
    *c.betas, eps=c.eps, mu_dtype=jnp.float32
  ),
  'adafactor': lambda c: optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=_FACTOR_FROM),
    optax.clip_by_block_rms(1.0),
  ),
  'lion': lambda c: optax.scale_by_lion(*c.betas, mu_dtype=jnp.float32),
}


def check_optim(config, num_steps: int) -> None:
  """Raises ValueError for the first field of `config.optim` that is invalid."""
  if num_steps < 1:
    raise ValueError(
      f'train.num_steps={num_steps} must be at least 1; set the number of '
      'optimizer updates.'
    )
  _check_name(config, 'name', _RULES)
  _check_name(config, 'schedule', _DECAYS)
  for name in ('learning_rate', 'weight_decay', 'clip_norm'):
    value = getattr(config, name)
    off = '; 0 means none' if name != 'learning_rate' else '; 1e-3 is usual'
    _check(config, name, 0 <= value < math.inf, f'must be finite and >= 0{off}')
  _check(config, 'eps', 0 < config.eps < math.inf, 'must be > 0; 1e-8 is usual')
  _check(
    config,
    'betas',
    len(config.betas) == 2 and all(0 <= b < 1 for b in config.betas),
    'must be two numbers in [0, 1); (0.9, 0.95) is usual',
  )
  for name in ('decay_fraction', 'end_fraction'):
    _check(
      config,
      name,
      0 <= getattr(config, name) <= 1,
      'must be in [0, 1]; 0.1 is a tenth',
    )
  _check(
    config,
    'warmup_steps',
    0 <= config.warmup_steps <= num_steps,
    f'must be from 0 to train.num_steps={num_steps}; shorten the warm-up or '
    'lengthen the run',
  )
  decay_steps = round(config.decay_fraction * num_steps)
  _check(
    config,
    'decay_fraction',
    config.schedule != 'wsd' or config.warmup_steps + decay_steps <= num_steps,
    f'is {decay_steps} steps, which must fit after optim.warmup_steps='
    f'{config.warmup_steps} in train.num_steps={num_steps}; lower either',
  )


def make_schedule(config, num_steps: int) -> Schedule:
  """Returns the learning rate as a function of the updates made before.

  The first update has count 0 and, with a warm-up, the learning rate
  learning_rate / warmup_steps: the line starts at 0 one update earlier, so no
  update is spent on nothing. Update `warmup_steps` is the first at the peak.
  The decay starts from there ('wsd': decay_fraction * num_steps from the end)
  and would reach end_fraction * learning_rate at count num_steps, just after
  the last update.
  """
  check_optim(config, num_steps)
  peak, warmup = config.learning_rate, config.warmup_steps
  end = 1.0 if config.schedule == 'constant' else config.end_fraction
  decay = _DECAYS[config.schedule]
  start = warmup
  if config.schedule == 'wsd':
    start = num_steps - round(config.decay_fraction * num_steps)
  length = max(num_steps - start, 1)

  def schedule(count):
    count = jnp.asarray(count, jnp.float32)
    warm = (count + 1) / max(warmup, 1)
    part = jnp.clip((count - start) / length, 0, 1)
    return peak * jnp.minimum(warm, end + (1 - end) * decay(part))

  return schedule


def decay_mask(params, decay_embeddings: bool):
  """Returns a tree like `params`: True where weight decay applies."""
  decays = {
    'kernel': True,
    'embedding': decay_embeddings,
    'scale': False,
    'bias': False,
  }

  def decide(path, _):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    role = name.rpartition('/')[2]
    if role not in decays:
      raise ValueError(
        f'parameter {name}: the last name of a path must be one of '
        f'{", ".join(decays)}, for it decides the weight decay; rename it.'
      )
    return decays[role]

  return jax.tree_util.tree_map_with_path(decide, params)


def make_optimizer(
  config, num_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
  """Returns the optimizer of `config.optim` and its learning-rate schedule.

  The moments in its state mirror the tree of parameters, under the same names
  and in float32; `sharding.state_shardings` relies on the names.
  """
  schedule = make_schedule(config, num_steps)
  decay_embeddings = config.decay_embeddings
  optimizer = optax.chain(
    _RULES[config.name](config),
    optax.add_decayed_weights(
      config.weight_decay,
      mask=lambda params: decay_mask(params, decay_embeddings),
    ),
    optax.scale_by_learning_rate(schedule),
  )
  return optimizer, schedule


def clip_factor(norm: jax.Array, max_norm: float) -> jax.Array:
  """What a gradient of this norm is multiplied by to have at most max_norm.

  With max_norm 0 nothing is clipped.
  """
  if not max_norm:
    return jnp.ones_like(norm)
  return max_norm / jnp.maximum(norm, max_norm)


def update_if(
  finite: jax.Array, update: Callable, old, branch: bool | None = None
):
  """Returns update(old) if finite, else old; both are trees of one shape.

  Args:
    finite: [] bool.
    update: the function.
    old: its argument.
    branch: whether to decide before updating or to select afterwards, with the
      same result. A selection is free where it is fused with the update, which
      XLA on CPU does not: there it takes as long as the update itself. None:
      the faster one for the platform.
  """
  if branch is None:
    branch = jax.default_backend() == 'cpu'
  if branch:
    return jax.lax.cond(finite, update, lambda old: old, old)
  keep = lambda new, old: jnp.where(finite, new, old)
  return jax.tree.map(keep, update(old), old)


def _check_name(config, field, table):
  value = getattr(config, field)
  close = difflib.get_close_matches(str(value), table, n=1)
  hint = f'; did you mean {close[0]!r}?' if close else ''
  _check(
    config, field, value in table, f'must be one of {", ".join(table)}{hint}'
  )


def _check(config, field, valid, rule):
  if not valid:
    end = '' if rule.endswith('?') else '.'
    raise ValueError(f'optim.{field}={getattr(config, field)!r} {rule}{end}')
