"""Trains a decoder with any number of KV heads.

  python -m gqa.train --config=configs/tiny.py --workdir=DIR \
      [--config.model.num_kv_heads=2 ...]

The workdir is the whole state of a run: the same command goes on where it was
stopped, to the bit. SIGTERM, SIGUSR1 and SIGUSR2 save at the next step boundary
and exit with code 75, for a scheduler that requeues the command.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from gqa import (
  checkpoint,
  cli,
  data,
  evaluate,
  metrics,
  optim,
  points,
  profiling,
  runtime,
  sharding,
  update,
  uptrain,
)
from gqa import model as model_lib
from gqa import origin as origin_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.preemption import EXIT_PREEMPTED, Preemption

_HPARAMS = ('model.', 'optim.', 'train.')  # sections in TensorBoard's table
_HPARAMS_METRICS = (
  'eval/loss',
  'eval/bits_per_byte',
  'model/parameters',
  'model/kv_bytes_per_token',
)


def check_run(config) -> None:
  """Raises ValueError for fields of `train`, `eval` and others that clash."""
  t = config.train
  _at_least(0 if uptrain.is_on(config) else 1, 'train.num_steps', t.num_steps)
  for name in ('batch_size', 'seq_len', 'grad_accum'):
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
  profiling.profiled_steps(t.profile)


def _at_least(least, name, value):
  if value < least:
    raise ValueError(f'{name}={value} must be at least {least}.')


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
    config = uptrain.resolve(config)
    check_run(config)
    self.config = config
    self.model_config = ModelConfig.from_dict(config.model.to_dict())
    optim.check_optim(config.optim, max(config.train.num_steps, 1))
    self.origin = origin_lib.find(config, self.model_config)
    self.workdir = workdir_lib.resolve_workdir(workdir)
    plain = config.to_dict()
    workdir_lib.check_same_config(self.workdir, plain, allow_config_change)
    self.tokens = data.open_tokens(config.data.path, 'train')
    self.valid = data.open_tokens(config.data.path, 'valid')
    for tokens in (self.tokens, self.valid):
      tokens.check_vocab(self.model_config.vocab_size)
    if uptrain.is_on(config):
      uptrain.check_tokenizer(config, self.tokens.tokenizer())

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
      workdir_lib.save_config(self.workdir, plain)
      self.tokens.tokenizer().save(self.workdir)
    self._build()

  def _build(self):
    c, mc, mixing = self.config, self.model_config, self.origin.mixing
    optimizer, train_step = update.make_train_step(c, mc, self.origin)
    make = lambda: update.init_state(mc, optimizer, c.seed, mixing)
    abstract = jax.eval_shape(make)
    shardings = sharding.state_shardings(abstract, self.mesh, mixing.heads)
    model = jax.eval_shape(mixing.fold, abstract.params)
    self.model_shardings = jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(self.mesh, spec),
      sharding.param_specs(model, self.mesh, mc),
    )
    # Of what is saved: parameters are the model's, whatever is trained.
    self.template = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      mixing.pack(abstract, model),
      mixing.pack(shardings, self.model_shardings),
    )
    self.shardings = shardings
    self.init = jax.jit(make, out_shardings=shardings)
    self.step_fn = update.compile_steps(
      train_step, self.mesh, shardings, self.origin.teacher is not None
    )
    self.eval_step = evaluate.make_eval_step(mc)

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
    origin, path = self.origin, self.config.init_from
    git = {'git': runtime.git_revision()}
    self.teacher = ()
    if origin.teacher is not None:
      self.teacher = (origin.teacher.load(self.mesh),)
    self.resumed = self.checkpointer.latest_step() is not None
    if self.resumed:
      saved, position, meta = self.checkpointer.restore(self.template)
      self.state = origin.mixing.unpack(saved)
      self.batches.set_state(position['batches'])
      self.meta = meta | git
      return meta['step']
    self.meta = {**git, 'wall_time': 0.0, 'tokens_seen': 0}
    if uptrain.is_on(self.config):
      self.meta['parent_loss'] = self._parent_loss()
    self.state = self.init()
    if path:
      params, parent = checkpoint.load_params(
        path, template=self.template.params
      )
      params = origin.start(params, self.mesh)
      params = jax.device_put(params, self.shardings.params)
      self.state = self.state.replace(params=params)
      steps = checkpoint.trained_steps(parent)
      self.meta['parent'] = {**parent, 'path': path, 'steps': steps}
    return 0

  def _parent_loss(self) -> float | None:
    """The parent's loss on the validation batches; None without a parent."""
    parent = self.origin.parent
    if parent is None:
      return None
    eval_step = evaluate.make_eval_step(parent.config)
    params = parent.load(self.mesh)
    return self._loss(eval_step, params)['loss']

  def _train(self, first: int, preemption: Preemption) -> int:
    t = self.config.train
    step = first
    self.started = time.time() - self.meta['wall_time']
    with (
      metrics.make_writer(self.workdir, first + self.resumed) as writer,
      metrics.Progress(t.num_steps, first) as self.progress,
    ):
      self.writer = writer
      self._describe(first)
      self.rate = metrics.Throughput(t.batch_size * t.seq_len)
      profiler = profiling.Profiler(t.profile, self.workdir)
      pending = None
      stopped = False
      try:
        if uptrain.is_on(self.config) and not self.resumed:
          self._evaluate_and_save(0, stopped)
        while step < t.num_steps and not stopped:
          batches = self._next_batches(t.steps_per_call)
          profiler.before(step + 1, step + t.steps_per_call)
          self.state, values = self.step_fn(self.state, batches, *self.teacher)
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
        if step == first and self.resumed:
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
    # Also when stopped: a resumed run begins after this step.
    if last or not step or (every and step % every == 0):
      loss = self._evaluate(step)
    if not (last or stopped or self.checkpointer.should_save(step)):
      return
    self.checkpointer.save(
      self.origin.mixing.pack(self.state, self._params()),
      {'batches': self.batches.get_state()},
      self.meta
      | {
        'wall_time': time.time() - self.started,
        'tokens_seen': step * c.train.batch_size * c.train.seq_len,
      },
      eval_loss=loss,
      force=last or stopped,
    )

  def _params(self) -> model_lib.Params:
    """The model's parameters, by what is trained."""
    mixing = self.origin.mixing
    if not mixing.active:
      return self.state.params
    fold = jax.jit(mixing.fold, out_shardings=self.model_shardings)
    return fold(self.state.params)

  def _evaluate(self, step: int) -> float:
    result = self._loss(self.eval_step, self._params())
    values = {f'eval/{k}': v for k, v in result.items() if k != 'tokens'}
    text = f'step {step}: validation loss {result["loss"]:.4f}'
    if (parent := self.meta.get('parent_loss')) is not None:
      values['eval/parent_loss'] = parent
      text += f" (the parent's {parent:.4f})"
    self.writer.scalars(step, values)
    self.progress.message(
      f'{text}, {result["bits_per_byte"]:.4f} bits per byte'
    )
    return result['loss']

  def _loss(self, eval_step, params: model_lib.Params) -> dict[str, float]:
    """Figures of a model on the validation batches."""
    c = self.config
    batches = data.eval_batches(
      self.valid,
      batch_size=c.train.batch_size,
      seq_len=c.train.seq_len,
      num_batches=c.eval.num_batches,
      process_index=self.rows[0],
      process_count=self.rows[1],
    )
    return evaluate.evaluate(eval_step, params, batches, self.mesh, self.valid)

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
    if uptrain.is_on(c):
      u = c.uptrain
      self.progress.message(
        f'uptraining {c.init_from} for {c.train.num_steps} steps, {u.alpha} of '
        f"its parent's {u.parent_steps}"
      )
      if self.origin.notice:
        self.progress.message(f'no reference line: {self.origin.notice}')
    flat = dict(workdir_lib.flat_config(c.to_dict()))
    self.writer.hparams(
      self._columns(flat),
      '/'.join(self.workdir.parts[-2:]),
      _HPARAMS_METRICS,
    )
    if self.resumed:
      return
    if uptrain.is_on(c):
      self.writer.charts(
        {"loss, and the parent's": ('eval/loss', 'eval/parent_loss')}
      )
    self.writer.text(0, 'config', metrics.markdown_table(flat))
    self.writer.scalars(
      0, {'model/parameters': count, 'model/kv_bytes_per_token': kv_bytes}
    )

  def _columns(self, flat: dict[str, Any]) -> dict[str, Any]:
    """The run's row in a table: in a sweep, what tells it from the others."""
    c, heads = self.config, self.model_config.kv_heads
    row = {'num_kv_heads': sum(heads) / len(heads), 'seed': c.seed}
    if entry := points.entry_of(self.workdir):
      row['group'] = entry['group']
      return row | {k: flat[k] for k in entry['columns'] if k in flat}
    shown = (*_HPARAMS, 'uptrain.') if uptrain.is_on(c) else _HPARAMS
    return row | {k: v for k, v in flat.items() if k.startswith(shown)}

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
