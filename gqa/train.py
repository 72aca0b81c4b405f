"""Trains a decoder with any number of KV heads.

  python -m gqa.train --config=configs/tiny.py --workdir=DIR \
      [--config.model.num_kv_heads=2 ...]

The workdir is the whole state of a run: the same command goes on where it was
stopped, to the bit. SIGTERM, SIGUSR1 and SIGUSR2 save at the next step boundary
and exit with code 75, for a scheduler that requeues the command.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import struct
from ml_collections import config_flags

from gqa import (
  checkpoint,
  cli,
  data,
  evaluate,
  metrics,
  optim,
  runtime,
  sharding,
)
from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa.config import ModelConfig

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: run the same command again
# Parts of a batch whose updates are computed independently of each other in
# one program, by backend. XLA's element-wise code on a CPU runs on one thread;
# with two parts the other threads have the products of the other part.
CHAINS = {'cpu': 2}
_HPARAMS = ('model.', 'optim.', 'train.')  # sections in TensorBoard's table


@struct.dataclass
class TrainState:
  """All that an update reads and writes."""

  step: jax.Array  # [] int32, batches seen
  params: Any  # nested dict of float32 arrays
  opt_state: Any
  nonfinite: jax.Array  # [] int32, skipped updates in a row, up to now
  skipped: jax.Array  # [] int32, skipped updates in all


def init_state(
  config: ModelConfig, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
  """A state before the first update, from the seed alone."""
  params = model_lib.init_params(config, jax.random.key(seed))
  # An array each: one buffer cannot be donated twice.
  step, nonfinite, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
  return TrainState(
    step=step,
    params=params,
    opt_state=optimizer.init(params),
    nonfinite=nonfinite,
    skipped=skipped,
  )


def make_train_step(config, model_config: ModelConfig):
  """Returns (optimizer, train_step).

  `train_step(state, batch) -> (state, metrics)` is one update from a batch of
  [B, T] arrays. Its gradient is the sum over all micro-batches (and devices)
  of the gradients of summed token losses, divided once by the sum of weights.
  An update whose gradient is not finite is skipped and counted.
  """
  optimizer, schedule = optim.make_optimizer(
    config.optim, config.train.num_steps
  )
  decoder = model_lib.Decoder(model_config)
  accum, z_loss = config.train.grad_accum, config.train.z_loss
  clip_norm, seed = config.optim.clip_norm, config.seed

  def objective(params, batch, key):
    """Sum of token losses, and the cross-entropy part of it."""
    features = decoder.apply(
      {'params': params},
      batch['tokens'],
      batch['positions'],
      batch['segments'],
      deterministic=model_config.dropout == 0,
      rngs={'dropout': key},
      method='features',
    )
    total, nll = loss_lib.cross_entropy(
      features,
      model_lib.head_rows(model_config, params),
      batch['targets'],
      batch['weights'],
      z_loss=z_loss,
      softcap=model_config.logit_softcap,
    )
    return total, nll.sum()

  one_chain = jax.value_and_grad(objective, has_aux=True)

  def gradient(params, batch, key):
    """(objective, cross-entropy), gradient: sums over the batch."""
    chains = _num_chains(batch['tokens'].shape[0])
    parts = [
      one_chain(
        params,
        jax.tree.map(lambda x, i=i: x[i::chains], batch),
        jax.random.fold_in(key, i),
      )
      for i in range(chains)
    ]
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *parts)

  def summed_gradient(params, batch, key):
    """(objective, cross-entropy), gradient: sums over all micro-batches."""
    if accum == 1:
      return gradient(params, batch, key)
    # Row r goes to micro-batch r % accum, so that each device keeps its rows.
    split = lambda x: jnp.moveaxis(
      x.reshape(-1, accum, *x.shape[1:]), 1, 0
    )  # [accum, B / accum, T]

    def add(carry, inputs):
      index, micro = inputs
      new = gradient(params, micro, jax.random.fold_in(key, index))
      return jax.tree.map(jnp.add, carry, new), None

    micros = jax.tree.map(split, batch)
    one = jax.tree.map(lambda x: x[0], micros)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(gradient, params, one, key),
    )
    carry, _ = jax.lax.scan(add, zeros, (jnp.arange(accum), micros))
    return carry

  def train_step(state: TrainState, batch) -> tuple[TrainState, dict]:
    key = jax.random.fold_in(jax.random.key(seed + 1), state.step)
    (total, nll), grads = summed_gradient(state.params, batch, key)
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
      'train/loss': nll * scale,
      'train/objective': total * scale,
      'train/grad_norm': grad_norm,
      'train/param_norm': optax.tree.norm(new_state.params),
      'train/learning_rate': schedule(state.step - state.skipped),
      'train/skipped_updates': new_state.skipped,
      'train/nonfinite': new_state.nonfinite,
    }

  return optimizer, train_step


def _num_chains(rows: int) -> int:
  """How many independent parts a batch of `rows` is computed in."""
  mesh = jax.sharding.get_abstract_mesh()
  divided = not mesh.empty and mesh.size > 1
  chains = CHAINS.get(jax.default_backend(), 1)
  return 1 if divided or rows % chains else chains


def compile_steps(train_step, mesh, shardings):
  """Jits `steps_per_call` updates as one program; the state is donated.

  The returned function takes batches of [steps, B, T] arrays and returns
  metrics of [steps] arrays.
  """

  def train_steps(state, batches):
    if jax.tree.leaves(batches)[0].shape[0] == 1:
      state, values = train_step(state, jax.tree.map(lambda x: x[0], batches))
      return state, jax.tree.map(lambda x: x[None], values)
    return jax.lax.scan(train_step, state, batches)

  return jax.jit(
    train_steps,
    donate_argnums=0,
    in_shardings=(shardings, sharding.batch_sharding(mesh, axis=1)),
    out_shardings=(shardings, None),
  )


def check_run(config) -> None:
  """Raises ValueError for fields of `train`, `eval` and others that clash."""
  t = config.train
  for name in ('num_steps', 'batch_size', 'seq_len', 'grad_accum'):
    _at_least(1, f'train.{name}', t[name])
  for name in ('steps_per_call', 'log_every', 'nonfinite_limit'):
    _at_least(1, f'train.{name}', t[name])
  _at_least(0, 'train.z_loss', t.z_loss)
  for name, steps in (
    ('train.num_steps', t.num_steps),
    ('train.log_every', t.log_every),
    ('eval.every_steps', config.eval.every_steps),
    ('checkpoint.every_steps', config.checkpoint.every_steps),
  ):
    _at_least(0, name, steps)
    if steps % t.steps_per_call:
      raise ValueError(
        f'{name}={steps} must be a multiple of train.steps_per_call='
        f'{t.steps_per_call}; change one of them.'
      )
  if t.seq_len > config.model.max_len:
    raise ValueError(
      f'train.seq_len={t.seq_len} exceeds model.max_len='
      f'{config.model.max_len}; change one of them.'
    )
  if not config.data.path:
    raise ValueError(
      'data.path is not set; make a token directory with python -m gqa.data '
      'and give it as --config.data.path=DIR.'
    )
  profiled_steps(t.profile)


def profiled_steps(text: str) -> tuple[int, int]:
  """Parses 'FIRST:LAST'; ('' gives steps that are never reached)."""
  if not text:
    return -1, -1
  try:
    first, last = map(int, text.split(':'))
  except ValueError:
    first, last = 0, 0
  if not 1 <= first <= last:
    raise ValueError(
      f"train.profile={text!r} must be 'FIRST:LAST' with 1 <= FIRST <= LAST, "
      "such as '10:15'."
    )
  return first, last


def _at_least(least, name, value):
  if value < least:
    raise ValueError(f'{name}={value} must be at least {least}.')


class Preemption:
  """Turns a scheduler's signals into a flag that is read between steps."""

  def __init__(self):
    self._several = jax.process_count() > 1
    self._received = False
    # With several processes jax's own handler of SIGTERM agrees on a step.
    signals = [signal.SIGUSR1, signal.SIGUSR2]
    if not self._several:
      signals.append(signal.SIGTERM)
    self._previous = {s: signal.signal(s, self._receive) for s in signals}

  def _receive(self, number, frame):
    del frame
    self._received = True
    if self._several and number != signal.SIGTERM:
      os.kill(os.getpid(), signal.SIGTERM)

  def reached(self, step: int) -> bool:
    """Whether all processes are to stop after this step."""
    if not self._several:
      return self._received
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

  def close(self):
    """Gives the signals back."""
    for number, handler in self._previous.items():
      signal.signal(number, handler)


def train(config, workdir: str, allow_config_change: bool = False) -> int:
  """Runs, or goes on with, the run of `config` in `workdir`.

  Returns:
    0 when all steps are done, 75 when a signal stopped it after saving.

  Raises:
    ValueError, TypeError, OSError: bad input, found before compilation where
      that can be.
    FloatingPointError: too many updates in a row were not finite.
  """
  return Run(config, workdir, allow_config_change).run()


class Run:
  """One life of a run, read from top to bottom: build, restore, loop, end."""

  def __init__(self, config, workdir: str, allow_config_change: bool):
    check_run(config)
    self.config = config
    self.model_config = ModelConfig.from_dict(config.model.to_dict())
    optim.check_optim(config.optim, config.train.num_steps)
    self.workdir = checkpoint.resolve_workdir(workdir)
    plain = config.to_dict()
    checkpoint.check_same_config(self.workdir, plain, allow_config_change)
    self.tokens = data.open_tokens(config.data.path, 'train')
    self.valid = data.open_tokens(config.data.path, 'valid')
    for tokens in (self.tokens, self.valid):
      tokens.check_vocab(self.model_config.vocab_size)

    self.mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(
      config.train.batch_size, self.mesh, config.train.grad_accum
    )
    self.rows = sharding.process_rows(self.mesh)
    self.batches = data.train_batches(
      self.tokens,
      batch_size=config.train.batch_size,
      seq_len=config.train.seq_len,
      seed=config.seed,
      process_index=self.rows[0],
      process_count=self.rows[1],
    )
    if jax.process_index() == 0:
      checkpoint.save_config(self.workdir, plain)
      self.tokens.tokenizer().save(self.workdir)
    self._build()

  def _build(self):
    optimizer, train_step = make_train_step(self.config, self.model_config)
    make = lambda: init_state(self.model_config, optimizer, self.config.seed)
    abstract = jax.eval_shape(make)
    shardings = sharding.state_shardings(abstract, self.mesh, self.model_config)
    self.template = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      abstract,
      shardings,
    )
    self.init = jax.jit(make, out_shardings=shardings)
    self.step_fn = compile_steps(train_step, self.mesh, shardings)
    self.eval_step = evaluate.make_eval_step(self.model_config)

  def run(self) -> int:
    """Restores, then trains to the end or to a signal."""
    c = self.config
    preemption = Preemption()
    with checkpoint.Checkpointer(
      self.workdir,
      c.checkpoint.every_steps,
      c.checkpoint.keep_latest,
      c.checkpoint.keep_best,
    ) as self.checkpointer:
      try:
        first = self._restore()
        with jax.set_mesh(self.mesh):
          return self._train(first, preemption)
      finally:
        preemption.close()

  def _restore(self) -> int:
    """Makes the state: resume this workdir, else init_from, else scratch."""
    self.meta = {
      'git': runtime.git_revision(),
      'wall_time': 0.0,
      'tokens_seen': 0,
    }
    if self.checkpointer.latest_step() is not None:
      self.state, position, meta = self.checkpointer.restore(self.template)
      self.batches.set_state(position['batches'])
      self.meta |= {key: meta[key] for key in ('wall_time', 'tokens_seen')}
      return meta['step']
    self.state = self.init()
    if self.config.init_from:
      params, parent = checkpoint.load_params(
        self.config.init_from, template=self.template.params
      )
      self.state = self.state.replace(params=params)
      self.meta['parent'] = {'path': self.config.init_from, **parent}
    return 0

  def _train(self, first: int, preemption: Preemption) -> int:
    t = self.config.train
    step = first
    self.started = time.time() - self.meta['wall_time']
    with (
      metrics.make_writer(self.workdir, first + 1 if first else 0) as writer,
      metrics.Progress(t.num_steps, first) as self.progress,
    ):
      self.writer = writer
      self._describe(first)
      self.rate = metrics.Throughput(t.batch_size * t.seq_len)
      profiler = Profiler(t.profile, self.workdir)
      pending = None
      stopped = False
      try:
        while step < t.num_steps and not stopped:
          batches = self._next_batches(t.steps_per_call)
          profiler.before(step + 1, step + t.steps_per_call)
          self.state, values = self.step_fn(self.state, batches)
          step += t.steps_per_call
          # The previous call's metrics, now that this one is under way.
          self._report(pending)
          pending = (step, values)
          self.rate.step(t.steps_per_call)
          profiler.after(step, self.state)
          stopped = preemption.reached(step)
          if stopped or self._boundary(step):
            self._report(pending)
            pending = None
            with self.rate.paused():
              self._evaluate_and_save(step, stopped)
        self._report(pending)
        if step == first:
          self.progress.message(f'step {step}: all steps were done before.')
      except BaseException:
        writer.session_end(False)
        raise
      if not stopped:
        writer.session_end(True)
    return self._end(step, stopped)

  def _next_batches(self, count: int):
    """`count` batches of this process on the devices: [count, B, T] each."""
    hosts = [next(self.batches) for _ in range(count)]
    stacked = {
      name: np.stack([batch[name] for batch in hosts])
      for name in hosts[0]
      if name != 'index'
    }
    return sharding.put_batch(stacked, self.mesh, axis=1)

  def _boundary(self, step: int) -> bool:
    every = self.config.eval.every_steps
    return (
      step == self.config.train.num_steps
      or self.checkpointer.should_save(step)
      or (every > 0 and step % every == 0)
    )

  def _evaluate_and_save(self, step: int, stopped: bool):
    c = self.config
    last = step == c.train.num_steps
    every = c.eval.every_steps
    loss = None
    if last or (every and step % every == 0 and not stopped):
      loss = self._evaluate(step)
    self.checkpointer.save(
      self.state,
      {'batches': self.batches.get_state()},
      self.meta
      | {
        'wall_time': time.time() - self.started,
        'tokens_seen': step * c.train.batch_size * c.train.seq_len,
      },
      eval_loss=loss,
      force=last or stopped,
    )

  def _evaluate(self, step: int) -> float:
    c = self.config
    batches = data.eval_batches(
      self.valid,
      batch_size=c.train.batch_size,
      seq_len=c.train.seq_len,
      num_batches=c.eval.num_batches,
      process_index=self.rows[0],
      process_count=self.rows[1],
    )
    result = evaluate.evaluate(
      self.eval_step, self.state.params, batches, self.mesh, self.valid
    )
    self.writer.scalars(
      step,
      {f'eval/{k}': v for k, v in result.items() if k != 'tokens'},
    )
    self.progress.message(
      f'step {step}: validation loss {result["loss"]:.4f}, '
      f'{result["bits_per_byte"]:.4f} bits per byte'
    )
    return result['loss']

  def _report(self, pending):
    """Writes what one call measured, and stops a run that has diverged."""
    if pending is None:
      return
    t = self.config.train
    last, values = pending
    values = jax.device_get(values)
    for i in range(t.steps_per_call):
      step = last - t.steps_per_call + 1 + i
      row = {name: column[i] for name, column in values.items()}
      nonfinite = row.pop('train/nonfinite')
      if step % t.log_every == 0 or step == t.num_steps:
        self._log(step, row)
      if nonfinite >= t.nonfinite_limit:
        raise FloatingPointError(
          f'step {step}: {t.nonfinite_limit} updates in a row had a gradient '
          'that is not finite; the last good checkpoint is step '
          f'{self.checkpointer.latest_step()}; lower optim.learning_rate or '
          'optim.clip_norm, or raise train.nonfinite_limit.'
        )

  def _log(self, step: int, row: dict[str, Any]):
    loss = float(row['train/loss'])
    nats_per_byte = loss * self.tokens.num_targets / self.tokens.bytes
    row['train/perplexity'] = np.exp(np.minimum(loss, 80.0))
    row['train/bits_per_byte'] = nats_per_byte / np.log(2)
    rate = self.rate.rate()
    row |= {f'speed/{name}': value for name, value in rate.items()}
    mfu = rate and metrics.mfu(
      self.flops_per_token, rate['tokens_per_second'], self.peak_flops
    )
    if mfu:
      row['speed/mfu'] = mfu
    row |= metrics.memory_stats()
    self.writer.scalars(step, row)
    self.progress.update(step, loss, rate.get('tokens_per_second'))

  def _describe(self, first: int):
    """Writes what stays the same in a run: config, hyperparameters, sizes."""
    c, m = self.config, self.model_config
    self.flops_per_token = metrics.train_flops_per_token(m, c.train.seq_len)
    self.peak_flops = metrics.total_peak_flops(list(self.mesh.devices.flat))
    count = metrics.param_count(self.template.params)
    kv_bytes = metrics.kv_bytes_per_token(m, jnp.dtype(m.dtype).itemsize)
    self.progress.message(
      f'{count:,} parameters, num_kv_heads {m.kv_heads}, {kv_bytes:,} KV bytes '
      f'per token, {self.mesh.devices.size} device(s), from step {first}'
    )
    flat = dict(checkpoint.flat_config(c.to_dict()))
    self.writer.hparams(
      {'num_kv_heads': c.model.num_kv_heads or m.num_heads, 'seed': c.seed}
      | {k: v for k, v in flat.items() if k.startswith(_HPARAMS)},
      '/'.join(self.workdir.parts[-2:]),
    )
    if first:
      return
    self.writer.text(0, 'config', metrics.markdown_table(flat))
    self.writer.scalars(
      0, {'model/parameters': count, 'model/kv_bytes_per_token': kv_bytes}
    )

  def _end(self, step: int, stopped: bool) -> int:
    if stopped:
      self.checkpointer.wait()
      self.progress.message(
        f'stopped by a signal: saved step {step}; the same command goes on.'
      )
      return EXIT_PREEMPTED
    self.progress.message(f'done: {self.workdir} at step {step}')
    self.progress.message(f'see it: tensorboard --logdir {self.workdir}')
    return 0


class Profiler:
  """Writes a trace of some steps for TensorBoard's profile plugin."""

  def __init__(self, steps: str, workdir):
    self._first, self._last = profiled_steps(steps)
    self._workdir = workdir
    self._running = False

  def before(self, first: int, last: int):
    """Starts if the call of steps first..last has a profiled one."""
    wanted = first <= self._last and last >= self._first
    if wanted and not self._running:
      jax.profiler.start_trace(str(self._workdir))
      self._running = True

  def after(self, step: int, state: TrainState):
    """Stops after the last profiled step, once the device is done."""
    if self._running and step >= self._last:
      jax.block_until_ready(state)
      jax.profiler.stop_trace()
      self._running = False


def main(argv):
  """Trains as the flags say."""
  del argv
  flag = flags.FLAGS
  runtime.start(flag.config)
  code = train(flag.config, flag.workdir, flag.allow_config_change)
  if jax.process_count() > 1:
    jax.distributed.shutdown()
  return code


def _define_flags():
  config_flags.DEFINE_config_file('config', lock_config=True)
  flags.mark_flag_as_required('config')
  flags.DEFINE_string('workdir', None, 'directory of the run', required=True)
  flags.DEFINE_bool(
    'allow_config_change', False, 'resume although the config differs'
  )


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
