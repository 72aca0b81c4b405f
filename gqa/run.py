"""One run: what its workdir holds, and what it writes there.

A `Program` is all that runs have in common that differ by their seed alone; a
`Run` is one of them, between two calls of the program.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gqa import (
  checkpoint,
  cost,
  data,
  evaluate,
  metrics,
  optim,
  peaks,
  points,
  profiling,
  runtime,
  sharding,
  update,
  uptrain,
)
from gqa import model as model_lib
from gqa import origin as origin_lib
from gqa import progress as progress_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig

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


class Program:
  """What is compiled for a config, whatever its seed.

  Attributes:
    config: resolved.
    model_config: its model.
    origin: what the model goes back to.
    mesh: the devices.
    template: shapes and shardings of what is saved.
    shardings: of a train state.
    init: key -> train state.
    eval_step: see `evaluate.make_eval_step`.
    teacher: its parameters once they are loaded, or nothing.
  """

  def __init__(self, config, model_config: ModelConfig):
    self.config, self.model_config = config, model_config
    optim.check_optim(config.optim, max(config.train.num_steps, 1))
    self.origin = origin_lib.find(config, self.model_config)
    self.mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(
      config.train.batch_size, self.mesh, config.train.grad_accum
    )
    mixing = self.origin.mixing
    optimizer, self._train_step = update.make_train_step(
      config, self.model_config, self.origin
    )

    def make(key):
      return update.init_state(self.model_config, optimizer, key, mixing)

    abstract = jax.eval_shape(make, jax.random.key(0))
    self.shardings = sharding.state_shardings(abstract, self.mesh, mixing.heads)
    model = jax.eval_shape(mixing.fold, abstract.params)
    model_shardings = jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(self.mesh, spec),
      sharding.param_specs(model, self.mesh, self.model_config),
    )
    # Of what is saved: parameters are the model's, whatever is trained.
    self.template = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      mixing.pack(abstract, model),
      mixing.pack(self.shardings, model_shardings),
    )
    self.init = jax.jit(make, out_shardings=self.shardings)
    self._fold = jax.jit(mixing.fold, out_shardings=model_shardings)
    self.eval_step = evaluate.make_eval_step(self.model_config)
    self.teacher: tuple[model_lib.Params, ...] = ()
    self._steps: dict[int, update.Steps] = {}

  def fold(self, params: model_lib.Params) -> model_lib.Params:
    """The model's parameters, by what is trained."""
    return self._fold(params) if self.origin.mixing.active else params

  def steps(self, num_runs: int) -> update.Steps:
    """The updates of `num_runs` runs; compiled at its first call."""
    if num_runs not in self._steps:
      self._steps[num_runs] = update.Steps(
        self._train_step,
        self.mesh,
        self.shardings,
        num_runs,
        self.origin.teacher is not None,
      )
    return self._steps[num_runs]

  def load_teacher(self) -> None:
    """Reads the teacher's parameters, if there is one."""
    if self.origin.teacher is not None:
      self.teacher = (self.origin.teacher.load(self.mesh),)

  @functools.cached_property
  def flops_per_token(self) -> float:
    """Of a step, without recomputation and a teacher."""
    return cost.train_flops_per_token(
      self.model_config, self.config.train.seq_len
    )


class Run:
  """A run in its workdir; within a `with` block it is open.

  Attributes:
    state: its train state, between two calls of the program.
    step: the updates that it has made.
    key: of what is random in an update.
  """

  def __init__(
    self,
    config,
    workdir: str,
    allow_config_change: bool = False,
    others: Sequence[Run] = (),
    name: str = '',
  ):
    """Checks all that can be checked before compilation.

    Args:
      config: of the run.
      workdir: its directory.
      allow_config_change: whether it may go on with another config.
      others: runs of the same config but for its seed.
      name: what tells its messages from theirs.
    """
    config = uptrain.resolve(config)
    check_run(config)
    self.config = config
    self._name = name
    model = ModelConfig.from_dict(config.model.to_dict())
    self.workdir = workdir_lib.resolve_workdir(workdir)
    plain = config.to_dict()
    workdir_lib.check_same_config(self.workdir, plain, allow_config_change)
    self.tokens = data.open_tokens(config.data.path, 'train')
    self.valid = data.open_tokens(config.data.path, 'valid')
    for tokens in (self.tokens, self.valid):
      tokens.check_vocab(model.vocab_size)
    if uptrain.is_on(config):
      uptrain.check_tokenizer(config, self.tokens.tokenizer())
    self.program = others[0].program if others else Program(config, model)
    self.rows = sharding.process_rows(self.program.mesh)
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
    self.state: update.TrainState | None = None
    self.key = jax.random.key(config.seed + 1)

  def __enter__(self) -> Run:
    """Restores the state, or makes it, and opens what is written to."""
    c = self.config
    with contextlib.ExitStack() as stack:
      enter = stack.enter_context
      self._checkpointer = enter(
        checkpoint.Checkpointer(
          self.workdir,
          c.checkpoint.every_steps,
          c.checkpoint.keep_latest,
          c.checkpoint.keep_best,
        )
      )
      self.step = self._restore()
      self._started = time.time() - self._meta['wall_time']
      self._writer = enter(
        metrics.make_writer(self.workdir, self.step + self._resumed)
      )
      self._progress = enter(
        progress_lib.Progress(c.train.num_steps, self.step, name=self._name)
      )
      self._describe()
      self.rate = progress_lib.Throughput(c.train.batch_size * c.train.seq_len)
      if self.step == c.train.num_steps and self._resumed:
        self._progress.message(f'step {self.step}: all steps were done before.')
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exc_info):
    if exc_info[0] is not None:
      self._writer.session_end(False)
    return self._stack.__exit__(*exc_info)

  def _restore(self) -> int:
    """Makes the state: resume this workdir, else init_from, else scratch."""
    program, path = self.program, self.config.init_from
    origin, git = program.origin, {'git': runtime.git_revision()}
    self._resumed = self._checkpointer.latest_step() is not None
    if self._resumed:
      saved, position, meta = self._checkpointer.restore(program.template)
      self.state = origin.mixing.unpack(saved)
      self.batches.set_state(position['batches'])
      self._meta = meta | git
      return meta['step']
    self._meta = {**git, 'wall_time': 0.0, 'tokens_seen': 0}
    if uptrain.is_on(self.config):
      self._meta['parent_loss'] = self._parent_loss()
    self.state = program.init(jax.random.key(self.config.seed))
    if path:
      params, parent = checkpoint.load_params(
        path, template=program.template.params
      )
      params = origin.start(params, program.mesh)
      params = jax.device_put(params, program.shardings.params)
      self.state = self.state.replace(params=params)
      steps = checkpoint.trained_steps(parent)
      self._meta['parent'] = {**parent, 'path': path, 'steps': steps}
    return 0

  def _parent_loss(self) -> float | None:
    """The parent's loss on the validation batches; None without a parent."""
    parent = self.program.origin.parent
    if parent is None:
      return None
    eval_step = evaluate.make_eval_step(parent.config)
    params = parent.load(self.program.mesh)
    return self._loss(eval_step, params)['loss']

  @property
  def awaits_evaluation(self) -> bool:
    """Whether it is measured as it is, before its first update."""
    return uptrain.is_on(self.config) and not self._resumed

  def next_batches(self, count: int) -> dict[str, np.ndarray]:
    """The next batches of this process, [count, B, T] each."""
    hosts = [next(self.batches) for _ in range(count)]
    return {
      name: np.stack([batch[name] for batch in hosts])
      for name in hosts[0]
      if name != 'index'
    }

  def at_boundary(self, step: int) -> bool:
    """Whether something is measured or saved after a step."""
    every = self.config.eval.every_steps
    return (
      step == self.config.train.num_steps
      or self._checkpointer.should_save(step)
      or (every > 0 and step % every == 0)
    )

  def evaluate_and_save(self, stopped: bool) -> None:
    """Measures and saves what is due after this step, or after a signal."""
    c, step = self.config, self.step
    params = self.program.fold(self.state.params)
    last = step == c.train.num_steps
    every = c.eval.every_steps
    loss = None
    # Also when stopped: a resumed run begins after this step.
    if last or not step or (every and step % every == 0):
      loss = self._evaluate(params)
    if not (last or stopped or self._checkpointer.should_save(step)):
      return
    self._checkpointer.save(
      self.program.origin.mixing.pack(self.state, params),
      {'batches': self.batches.get_state()},
      self._meta
      | {
        'wall_time': time.time() - self._started,
        'tokens_seen': step * c.train.batch_size * c.train.seq_len,
      },
      eval_loss=loss,
      force=last or stopped,
    )

  def _evaluate(self, params: model_lib.Params) -> float:
    result = self._loss(self.program.eval_step, params)
    values = {f'eval/{k}': v for k, v in result.items() if k != 'tokens'}
    text = f'step {self.step}: validation loss {result["loss"]:.4f}'
    if (parent := self._meta.get('parent_loss')) is not None:
      values['eval/parent_loss'] = parent
      text += f" (the parent's {parent:.4f})"
    self._writer.scalars(self.step, values)
    self._progress.message(
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
    mesh = self.program.mesh
    return evaluate.evaluate(eval_step, params, batches, mesh, self.valid)

  def report(self, last: int, values: dict[str, np.ndarray]) -> None:
    """Writes what the call of updates that ended at step `last` measured.

    Args:
      last: its last step.
      values: of each of its updates.

    Raises:
      FloatingPointError: too many updates in a row were not finite.
    """
    t = self.config.train
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
          f'{self._checkpointer.latest_step()}; lower optim.learning_rate or '
          'optim.clip_norm, or raise train.nonfinite_limit.'
        )

  def _log(self, step: int, row: dict[str, Any]):
    loss = float(row['train/loss'])
    nats_per_byte = loss * self.tokens.num_targets / self.tokens.bytes
    row['train/perplexity'] = np.exp(np.minimum(loss, 80.0))
    row['train/bits_per_byte'] = nats_per_byte / np.log(2)
    rate = self.rate.rate()
    row |= {f'speed/{name}': value for name, value in rate.items()}
    mfu = rate and peaks.mfu(
      self.program.flops_per_token, rate['tokens_per_second'], self._peak_flops
    )
    if mfu:
      row['speed/mfu'] = mfu
    row |= peaks.memory_stats()
    self._writer.scalars(step, row)
    self._progress.update(step, loss, rate.get('tokens_per_second'))

  def _describe(self):
    """Writes what stays the same in a run: config, hyperparameters, sizes."""
    c, program = self.config, self.program
    m, devices = program.model_config, list(program.mesh.devices.flat)
    self._peak_flops = peaks.total_peak_flops(devices)
    count = model_lib.param_count(program.template.params)
    kv_bytes = cost.kv_bytes_per_token(m, jnp.dtype(m.dtype).itemsize)
    self._progress.message(
      f'{count:,} parameters, num_kv_heads {m.kv_heads}, {kv_bytes:,} KV bytes '
      f'per token, {len(devices)} device(s), from step {self.step}'
    )
    if uptrain.is_on(c):
      u = c.uptrain
      self._progress.message(
        f'uptraining {c.init_from} for {c.train.num_steps} steps, {u.alpha} of '
        f"its parent's {u.parent_steps}"
      )
      if program.origin.notice:
        self._progress.message(f'no reference line: {program.origin.notice}')
    flat = dict(workdir_lib.flat_config(c.to_dict()))
    self._writer.hparams(
      self._columns(flat),
      '/'.join(self.workdir.parts[-2:]),
      _HPARAMS_METRICS,
    )
    if self._resumed:
      return
    if uptrain.is_on(c):
      self._writer.charts(
        {"loss, and the parent's": ('eval/loss', 'eval/parent_loss')}
      )
    self._writer.text(0, 'config', metrics.markdown_table(flat))
    self._writer.scalars(
      0, {'model/parameters': count, 'model/kv_bytes_per_token': kv_bytes}
    )

  def _columns(self, flat: dict[str, Any]) -> dict[str, Any]:
    """The run's row in a table: in a sweep, what tells it from the others."""
    c, heads = self.config, self.program.model_config.kv_heads
    row = {'num_kv_heads': sum(heads) / len(heads), 'seed': c.seed}
    if entry := points.entry_of(self.workdir):
      row['group'] = entry['group']
      return row | {k: flat[k] for k in entry['columns'] if k in flat}
    shown = (*_HPARAMS, 'uptrain.') if uptrain.is_on(c) else _HPARAMS
    return row | {k: v for k, v in flat.items() if k.startswith(shown)}

  def end(self, stopped: bool) -> None:
    """Says how it ended, when all is saved."""
    if stopped:
      self._checkpointer.wait()
      self._progress.message(
        f'stopped by a signal: saved step {self.step}; the same command goes '
        'on.'
      )
      return
    self._writer.session_end(True)
    self._progress.message(f'done: {self.workdir} at step {self.step}')
    self._progress.message(f'see it: tensorboard --logdir {self.workdir}')
