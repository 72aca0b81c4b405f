"""One update of a run: its state, its gradient and its compiled program.

The gradient is of a sum of token losses, over chains of a batch, micro-batches
and devices, divided once by the number of tokens that count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa import optim, sharding
from gqa import origin as origin_lib
from gqa.config import ModelConfig
from gqa.mixing import Mixing

# Parts of a batch whose updates are computed independently of each other in
# one program, by backend. XLA's element-wise code on a CPU runs on one thread;
# with several parts the other threads have the products of the others. Four are
# as fast as two or faster where each has tokens enough, but take twice as long
# to compile.
CHAINS = {'cpu': (2, 4)}
CHAIN_TOKENS = 1_024  # of each, for more than the fewest


@struct.dataclass
class TrainState:
  """All that an update reads and writes."""

  step: jax.Array  # [] int32, batches seen
  params: Any  # nested dict of float32 arrays
  opt_state: Any
  nonfinite: jax.Array  # [] int32, skipped updates in a row, up to now
  skipped: jax.Array  # [] int32, skipped updates in all


def init_state(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  seed: int,
  mixing: Mixing | None = None,
) -> TrainState:
  """A state before the first update, from the seed alone."""
  heads = config if mixing is None else mixing.heads
  params = model_lib.init_params(heads, jax.random.key(seed))
  if mixing is not None:
    params = mixing.with_weights(params)
  # An array each: one buffer cannot be donated twice.
  step, nonfinite, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
  return TrainState(
    step=step,
    params=params,
    opt_state=optimizer.init(params),
    nonfinite=nonfinite,
    skipped=skipped,
  )


def make_train_step(
  config, model_config: ModelConfig, origin: origin_lib.Origin | None = None
):
  """Returns (optimizer, train_step).

  `train_step(state, batch) -> (state, metrics)` is one update from a batch of
  [B, T] arrays. Its gradient is the sum over all micro-batches (and devices)
  of the gradients of summed token losses, divided once by the sum of weights.
  An update whose gradient is not finite is skipped and counted. Where `origin`
  has a teacher its parameters are a third argument.
  """
  # Without a step nothing is updated, but there is a state.
  num_steps = max(config.train.num_steps, 1)
  optimizer, schedule = optim.make_optimizer(config.optim, num_steps)
  decoder = model_lib.Decoder(model_config)
  accum, z_loss = config.train.grad_accum, config.train.z_loss
  clip_norm, seed = config.optim.clip_norm, config.seed
  softcap = model_config.logit_softcap

  def objective(params, teacher, batch, key):
    """Sum of token losses, and the sums that are reported of it."""
    if origin is not None:
      params = origin.mixing.fold(params)
    features = decoder.apply(
      {'params': params},
      batch['tokens'],
      batch['positions'],
      batch['segments'],
      deterministic=model_config.dropout == 0,
      rngs={'dropout': key},
      method='features',
    )
    head = model_lib.head_rows(model_config, params)
    if teacher is None:
      total, nll = loss_lib.cross_entropy(
        features,
        head,
        batch['targets'],
        batch['weights'],
        z_loss=z_loss,
        softcap=softcap,
      )
      return total, {'loss': nll.sum()}
    total, nll, divergence = origin_lib.distilled_loss(
      config, origin.teacher.config, teacher, features, head, batch, softcap
    )
    return total, {'loss': nll.sum(), 'divergence': divergence}

  one_chain = jax.value_and_grad(objective, has_aux=True)

  def gradient(params, teacher, batch, key):
    """(objective, reported), gradient: sums over the batch."""
    chains = _num_chains(*batch['tokens'].shape)
    parts = [
      one_chain(
        params,
        teacher,
        jax.tree.map(lambda x, i=i: x[i::chains], batch),
        jax.random.fold_in(key, i),
      )
      for i in range(chains)
    ]
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *parts)

  def summed_gradient(params, teacher, batch, key):
    """(objective, reported), gradient: sums over all micro-batches."""
    if accum == 1:
      return gradient(params, teacher, batch, key)
    # Row r goes to micro-batch r % accum, so that each device keeps its rows.
    split = lambda x: jnp.moveaxis(
      x.reshape(-1, accum, *x.shape[1:]), 1, 0
    )  # [accum, B / accum, T]

    def add(carry, inputs):
      index, micro = inputs
      new = gradient(params, teacher, micro, jax.random.fold_in(key, index))
      return jax.tree.map(jnp.add, carry, new), None

    micros = jax.tree.map(split, batch)
    one = jax.tree.map(lambda x: x[0], micros)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(gradient, params, teacher, one, key),
    )
    carry, _ = jax.lax.scan(add, zeros, (jnp.arange(accum), micros))
    return carry

  def train_step(
    state: TrainState, batch, teacher=None
  ) -> tuple[TrainState, dict]:
    key = jax.random.fold_in(jax.random.key(seed + 1), state.step)
    (total, sums), grads = summed_gradient(state.params, teacher, batch, key)
    count = batch['weights'].sum()
    scale = 1.0 / jnp.maximum(count, 1.0)
    grad_norm = optax.tree.norm(grads) * scale
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(total)
    factor = scale * optim.clip_factor(grad_norm, clip_norm)

    def update(old):
      params, opt_state = old
      mean = jax.tree.map(lambda g: g * factor, grads)
      updates, opt_state = optimizer.update(mean, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    old = state.params, state.opt_state
    params, opt_state = optim.update_if(finite, update, old)
    new_state = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      nonfinite=jnp.where(finite, 0, state.nonfinite + 1),
      skipped=state.skipped + jnp.where(finite, 0, 1),
    )
    return new_state, {
      **{f'train/{name}': value * scale for name, value in sums.items()},
      'train/objective': total * scale,
      'train/grad_norm': grad_norm,
      'train/param_norm': optax.tree.norm(new_state.params),
      'train/learning_rate': schedule(state.step - state.skipped),
      'train/skipped_updates': new_state.skipped,
      'train/nonfinite': new_state.nonfinite,
    }

  return optimizer, train_step


def _num_chains(rows: int, seq_len: int) -> int:
  """How many independent parts a batch [rows, seq_len] is computed in."""
  mesh = jax.sharding.get_abstract_mesh()
  few, many = CHAINS.get(jax.default_backend(), (1, 1))
  if not mesh.empty and mesh.size > 1:
    return 1
  if rows % many == 0 and rows * seq_len >= many * CHAIN_TOKENS:
    return many
  return 1 if rows % few else few


def compile_steps(train_step, mesh, shardings, distilled: bool = False):
  """Jits `steps_per_call` updates as one program; the state is donated.

  The returned function takes batches of [steps, B, T] arrays and returns
  metrics of [steps] arrays. If `distilled`, it takes the teacher's parameters
  too, which are not donated.
  """

  def train_steps(state, batches, *teacher):
    step = lambda state, batch: train_step(state, batch, *teacher)
    if jax.tree.leaves(batches)[0].shape[0] == 1:
      state, values = step(state, jax.tree.map(lambda x: x[0], batches))
      return state, jax.tree.map(lambda x: x[None], values)
    return jax.lax.scan(step, state, batches)

  inputs = (shardings, sharding.batch_sharding(mesh, axis=1))
  return jax.jit(
    train_steps,
    donate_argnums=0,
    # A teacher's parameters stay where they were loaded.
    in_shardings=(*inputs, None) if distilled else inputs,
    out_shardings=(shardings, None),
  )
