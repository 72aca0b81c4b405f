"""One update of a run: its state, its gradient and its compiled program.

The gradient is of a sum of token losses, over chains of a batch, micro-batches
and devices, divided once by the number of tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

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

Batch = dict[str, Any]


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
  key: jax.Array,
  mixing: Mixing | None = None,
) -> TrainState:
  """A state before the first update, from the key alone."""
  heads = config if mixing is None else mixing.heads
  params = model_lib.init_params(heads, key)
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

  `train_step(state, batch, key) -> (state, metrics)` is one update from a batch
  of [B, T] arrays; the key is the run's own. Its gradient is the sum over all
  micro-batches (and devices) of the gradients of summed token losses, divided
  once by the sum of weights. An update whose gradient is not finite is skipped
  and counted. Where `origin` has a teacher its parameters are one more
  argument.
  """
  # Without a step nothing is updated, but there is a state.
  num_steps = max(config.train.num_steps, 1)
  optimizer, schedule = optim.make_optimizer(config.optim, num_steps)
  decoder = model_lib.Decoder(model_config)
  accum, z_loss = config.train.grad_accum, config.train.z_loss
  clip_norm, softcap = config.optim.clip_norm, model_config.logit_softcap

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
    state: TrainState, batch, key, teacher=None
  ) -> tuple[TrainState, dict]:
    key = jax.random.fold_in(key, state.step)
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


class Steps:
  """`steps_per_call` updates of one run, or of several, as one program.

  The arrays of several runs are stacked: each has one more axis, which is not
  divided over devices.

  Args:
    train_step: see `make_train_step`.
    mesh: the devices.
    shardings: of the state of one run.
    num_runs: how many are updated together.
    distilled: whether there is a teacher.
  """

  def __init__(
    self,
    train_step,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    num_runs: int = 1,
    distilled: bool = False,
  ):
    self._mesh, self._num_runs = mesh, num_runs
    joined = shardings
    if num_runs > 1:
      axes = (0, 0, 0, None) if distilled else 0
      train_step = jax.vmap(train_step, in_axes=axes)
      joined = jax.tree.map(_with_runs, shardings)

    def train_steps(states, batches, keys, *teacher):
      step = lambda states, batch: train_step(states, batch, keys, *teacher)
      if jax.tree.leaves(batches)[0].shape[0] == 1:
        states, values = step(states, jax.tree.map(lambda x: x[0], batches))
        return states, jax.tree.map(lambda x: x[None], values)
      return jax.lax.scan(step, states, batches)

    def split(states):
      part = lambda run: jax.tree.map(lambda x: x[run], states)
      return [part(run) for run in range(num_runs)]

    # A teacher's parameters stay where they were loaded.
    inputs = (joined, sharding.batch_sharding(mesh, self._batch_axis), None)
    self._update = jax.jit(
      train_steps,
      donate_argnums=0,
      in_shardings=(*inputs, None) if distilled else inputs,
      out_shardings=(joined, None),
    )
    self._join = jax.jit(_stacked, out_shardings=joined)
    self._split = jax.jit(split, out_shardings=[shardings] * num_runs)

  @property
  def _batch_axis(self) -> int:
    return 1 if self._num_runs == 1 else 2  # that counts sequences

  def join(self, states: Sequence[TrainState]) -> TrainState:
    """What `update` takes, of the runs' states; a single one is not copied."""
    return states[0] if self._num_runs == 1 else self._join(states)

  def split(self, states: TrainState) -> list[TrainState]:
    """The states of the runs."""
    return [states] if self._num_runs == 1 else self._split(states)

  def keys(self, keys: Sequence[jax.Array]) -> jax.Array:
    """What `update` takes, of the runs' keys."""
    return keys[0] if self._num_runs == 1 else jnp.stack(keys)

  def put(self, batches: Sequence[Batch]) -> Batch:
    """What `update` takes, of the runs' batches of [steps, B, T] arrays."""
    joined = batches[0]
    if self._num_runs > 1:
      joined = {k: np.stack([b[k] for b in batches], axis=1) for k in joined}
    return sharding.put_batch(joined, self._mesh, self._batch_axis)

  def update(
    self, states: TrainState, batches: Batch, keys: jax.Array, *teacher
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns new states, and metrics of [steps] or [steps, runs] arrays.

    `states` are donated. `teacher` is its parameters, if `distilled`.
    """
    return self._update(states, batches, keys, *teacher)

  def values_of(
    self, run: int, values: Mapping[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """The metrics of one run, [steps] each."""
    if self._num_runs == 1:
      return dict(values)
    return {name: value[:, run] for name, value in values.items()}


def _stacked(trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _with_runs(one: NamedSharding) -> NamedSharding:
  return NamedSharding(one.mesh, PartitionSpec(None, *one.spec))
