"""Training: resuming, accumulation, sharding, and what stops a run."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from gqa import checkpoint, data, sharding, train, update
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
KEY = jax.random.key(0)
TEXT = 'It was the best of times, it was the worst of times. ' * 200


@pytest.fixture(scope='session')
def token_directory(tmp_path_factory):
  directory = tmp_path_factory.mktemp('text')
  source = directory / 'book.txt'
  source.write_text('\n'.join(TEXT.split('. ')))
  data.prepare(str(source), 'bytes', str(directory / 'tokens'))
  return str(directory / 'tokens')


@pytest.fixture
def config(token_directory):
  c = base.get_config()
  c.compilation_cache = ''
  c.data.path = token_directory
  c.model.update(
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    max_len=16,
  )
  c.train.update(num_steps=6, batch_size=8, seq_len=16, log_every=1)
  c.optim.update(warmup_steps=2, learning_rate=1e-2)
  c.eval.update(every_steps=3, num_batches=2)
  c.checkpoint.every_steps = 3
  c.mesh.cpu_devices = 8
  return c


def read_metrics(workdir):
  lines = (pathlib.Path(workdir) / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  timed = ('wall_time', 'speed/', 'memory/')
  return [
    {k: v for k, v in row.items() if not k.startswith(timed)} for row in rows
  ]


def saved_arrays(workdir, step):
  root = pathlib.Path(workdir) / 'checkpoints' / str(step)
  with_optimizer = {}
  import orbax.checkpoint as ocp

  for item in ('params', 'opt_state'):
    with_optimizer[item] = ocp.StandardCheckpointer().restore(root / item)
  return with_optimizer


def stop_after(monkeypatch, step):
  monkeypatch.setattr(
    train.Preemption, 'reached', lambda self, now: now == step
  )


def one_batch(rng, rows=8, length=16, vocab=258):
  return {
    'tokens': rng.integers(0, vocab, (rows, length), dtype=np.int32),
    'targets': rng.integers(0, vocab, (rows, length), dtype=np.int32),
    'positions': np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    'segments': np.ones((rows, length), np.int32),
    'weights': np.ones((rows, length), np.float32),
  }


def model_config(config):
  return ModelConfig.from_dict(config.model.to_dict())


def start(config, optimizer):
  make = lambda: update.init_state(model_config(config), optimizer, KEY)
  return jax.jit(make)()


def test_resumed_run_equals_uninterrupted_run_to_the_bit(
  config, tmp_path, monkeypatch
):
  config.model.dropout = 0.2
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert train.train(config, whole) == 0
  with monkeypatch.context() as patch:
    stop_after(patch, 2)  # not a step that would be saved anyway
    assert train.train(config, parts) == train.EXIT_PREEMPTED
  assert checkpoint.steps(parts) == [2]
  assert train.train(config, parts) == 0
  assert read_metrics(parts) == read_metrics(whole)
  jax.tree.map(
    np.testing.assert_array_equal,
    saved_arrays(parts, 6),
    saved_arrays(whole, 6),
  )


@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'fsdp': 2, 'model': 2}])
def test_seeds_in_one_program_equal_separate_runs(
  config, mesh, tmp_path, monkeypatch
):
  config.model.update(dropout=0.2, vocab_size=264)
  config.mesh.update(mesh)
  config.train.log_every = 1
  for seed in (0, 5):
    config.seed = seed
    train.train(config, tmp_path / f'alone{seed}')
  config.seed = 0
  workdirs = [tmp_path / 'seed0', tmp_path / 'seed5']
  for step in (2, 4):  # first one of them alone, then both
    with monkeypatch.context() as patch:
      stop_after(patch, step)
      first = train.train_seeds(
        config, [0, 5][: step // 2], workdirs[: step // 2]
      )
      assert first == train.EXIT_PREEMPTED
  assert train.train_seeds(config, [0, 5], workdirs) == 0
  for seed, workdir in zip((0, 5), workdirs, strict=True):
    together, alone = (
      read_metrics(path) for path in (workdir, tmp_path / f'alone{seed}')
    )
    assert [row.keys() for row in together] == [row.keys() for row in alone]
    for a, b in zip(together, alone, strict=True):
      for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=2e-4, err_msg=name)
    saved = [
      checkpoint.load_params(path)[0]
      for path in (workdir, tmp_path / f'alone{seed}')
    ]
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *saved
    )
    assert workdir_lib.load_config(workdir)['seed'] == seed


def test_the_seed_decides_the_first_parameters(config, tmp_path):
  queries = []
  for name, seed in (('a', 0), ('b', 1), ('c', 1)):
    config.seed = seed
    with train.Run(config, tmp_path / name) as run:
      layer = run.state.params['layer_0']
      queries.append(np.asarray(layer['attention']['query']['kernel']))
  assert np.abs(queries[0] - queries[1]).max() > 1e-3
  np.testing.assert_array_equal(queries[1], queries[2])


@pytest.mark.parametrize(
  ('seeds', 'workdirs', 'words'),
  [
    ([0, 1], ['a'], 'one workdir for each seed'),
    ([0, 0], ['a', 'b'], '--seeds has .0, 0.'),
    ([0, 1], ['a', 'a'], '--workdir has'),
  ],
)
def test_seeds_need_a_workdir_each(config, seeds, workdirs, words):
  with pytest.raises(ValueError, match=words):
    train.train_seeds(config, seeds, workdirs)


def test_dropout_differs_between_steps(config):
  config.model.dropout = 0.5
  config.optim.learning_rate = 0.0
  optimizer, step = update.make_train_step(config, model_config(config))
  state = start(config, optimizer)
  batch = one_batch(np.random.default_rng(0))
  step = jax.jit(step)
  state, first = step(state, batch, KEY)
  state, second = step(state, batch, KEY)
  assert first['train/loss'] != second['train/loss']


def test_accumulation_divides_once_by_all_valid_tokens(config):
  rng = np.random.default_rng(0)
  batch = one_batch(rng)
  # Row r is in micro-batch r % 4: of 31, 8, 0 and 5 tokens.
  batch['weights'][:] = 0
  for row, count in ((0, 16), (4, 15), (1, 8), (3, 5)):
    batch['weights'][row, :count] = 1
  losses, states = [], []
  for accum in (1, 4):
    config.train.grad_accum = accum
    optimizer, step = update.make_train_step(config, model_config(config))
    state = start(config, optimizer)
    step = jax.jit(step)
    for _ in range(3):
      state, values = step(state, batch, KEY)
    losses.append(values['train/loss'])
    states.append(state.params)
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *states
  )


def test_chains_do_not_change_an_update(config, monkeypatch):
  batch = one_batch(np.random.default_rng(0))
  batch['weights'][::2, 3:] = 0
  params, losses = [], []
  for chains in (1, 2, 3):  # 3 does not divide 8 rows
    monkeypatch.setattr(update, 'CHAINS', {'cpu': (chains, 5)})
    optimizer, step = update.make_train_step(config, model_config(config))
    state = start(config, optimizer)
    text = jax.jit(step).lower(state, batch, KEY).as_text()
    assert ('tensor<4x16x16xf32>' in text) == (chains == 2)
    state, values = jax.jit(step)(state, batch, KEY)
    params.append(state.params)
    losses.append(values['train/loss'])
  np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
  jax.tree.map(
    lambda *leaves: np.testing.assert_allclose(
      np.stack(leaves), np.stack(leaves[:1] * 3), atol=1e-5
    ),
    *params,
  )


@pytest.mark.parametrize(
  ('rows', 'seq_len', 'chains'),
  [(16, 256, 4), (15, 256, 1), (4, 512, 2), (10, 4096, 2)],
)
def test_more_chains_where_they_divide_the_rows_and_have_tokens_enough(
  rows, seq_len, chains
):
  assert update._num_chains(rows, seq_len) == chains


def test_loss_is_weighted_by_tokens_not_by_micro_batches(config, monkeypatch):
  config.train.grad_accum = 2
  sums = lambda features, head, targets, weights, **_: (
    (0 * features.sum() + (targets * weights).sum(), (targets * weights).sum(1))
  )
  monkeypatch.setattr(update.loss_lib, 'cross_entropy', sums)
  optimizer, _ = update.make_train_step(config, model_config(config))
  state = start(config, optimizer)
  batch = one_batch(np.random.default_rng(0), rows=2, length=100)
  batch['positions'] = np.minimum(batch['positions'], 15)
  config.model.max_len = 100
  batch['targets'][:] = [[2], [4]]  # the mean loss of each micro-batch
  batch['weights'][0, 10:] = 0  # 10 tokens and 100
  _, step = update.make_train_step(config, model_config(config))
  _, values = step(state, batch, KEY)
  np.testing.assert_allclose(values['train/loss'], 3.818182, rtol=1e-6)


def test_update_that_is_not_finite_is_skipped_and_counted(config):
  optimizer, step = update.make_train_step(config, model_config(config))
  state = start(config, optimizer)
  step = jax.jit(step)
  good = one_batch(np.random.default_rng(0))
  bad = good | {'weights': np.full((8, 16), np.nan, np.float32)}
  state, _ = step(state, good, KEY)
  skipped, values = step(state, bad, KEY)
  assert (skipped.step, skipped.nonfinite, skipped.skipped) == (2, 1, 1)
  for name in ('params', 'opt_state'):
    jax.tree.map(
      np.testing.assert_array_equal,
      skipped.__dict__[name],
      state.__dict__[name],
    )
  again, values = step(skipped, good, KEY)
  assert (again.nonfinite, values['train/skipped_updates']) == (0, 1)


def test_run_that_diverges_stops_and_keeps_the_last_good_checkpoint(
  config, tmp_path, monkeypatch
):
  config.train.nonfinite_limit = 2
  next_batches = train.Run.next_batches
  calls = itertools.count()

  def poisoned(run, count):
    batches = next_batches(run, count)
    if next(calls) >= 3:
      batches['weights'] = batches['weights'] * np.nan
    return batches

  monkeypatch.setattr(train.Run, 'next_batches', poisoned)
  with pytest.raises(FloatingPointError, match='step 5.*checkpoint is step 3'):
    train.train(config, tmp_path / 'run')
  assert checkpoint.steps(tmp_path / 'run') == [3]


def test_several_updates_in_one_call_equal_single_calls(config, tmp_path):
  config.train.log_every = 3
  train.train(config, tmp_path / 'single')
  config.train.steps_per_call = 3
  train.train(config, tmp_path / 'three')
  single, three = (
    read_metrics(tmp_path / 'single'),
    read_metrics(tmp_path / 'three'),
  )
  assert [r['step'] for r in single] == [r['step'] for r in three]
  for a, b in zip(single, three, strict=True):
    for name in a.keys() & {'train/loss', 'eval/loss', 'train/grad_norm'}:
      np.testing.assert_allclose(a[name], b[name], rtol=1e-5)


def test_final_step_off_the_interval_is_saved(config, tmp_path):
  config.train.num_steps = 4
  train.train(config, tmp_path)
  assert 4 in checkpoint.steps(tmp_path)
  last = [row for row in read_metrics(tmp_path) if 'eval/loss' in row][-1]
  assert last['step'] == 4


def test_one_program_is_compiled_for_a_whole_run(config, tmp_path):
  run = train.Run(config, tmp_path)
  train.advance([run])
  assert run.program.steps(1)._update._cache_size() == 1
  assert run.program.eval_step._cache_size() == 1


def test_on_cpu_no_update_starts_before_the_one_before_has_ended(
  config, tmp_path, monkeypatch
):
  order = []

  def noted(owner, name):
    original = getattr(owner, name)

    def call(*arguments):
      order.append(name)
      return original(*arguments)

    monkeypatch.setattr(owner, name, call)

  noted(update.Steps, 'update')
  noted(train.Run, 'report')
  train.train(config, tmp_path)
  assert order == ['update', 'report'] * config.train.num_steps


def test_state_is_donated(config):
  mc = model_config(config)
  optimizer, step = update.make_train_step(config, mc)
  abstract = jax.eval_shape(lambda: update.init_state(mc, optimizer, KEY))
  mesh = sharding.make_mesh(config.mesh)
  shardings = sharding.state_shardings(abstract, mesh, mc)
  steps = update.Steps(step, mesh, shardings)
  state = jax.device_put(start(config, optimizer), shardings)
  batch = jax.tree.map(lambda x: x[None], one_batch(np.random.default_rng(0)))
  with jax.set_mesh(mesh):
    steps.update(state, steps.put([batch]), KEY)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'lion'])
def test_parameters_and_moments_stay_float32_under_bfloat16(config, name):
  config.model.dtype = 'bfloat16'
  config.optim.name = name
  optimizer, step = update.make_train_step(config, model_config(config))
  state = start(config, optimizer)
  state, _ = jax.eval_shape(
    step, state, one_batch(np.random.default_rng(0)), KEY
  )
  for leaf in jax.tree.leaves((state.params, state.opt_state)):
    assert leaf.dtype in (jnp.float32, jnp.int32)


@pytest.mark.parametrize(
  ('data_axis', 'fsdp', 'model', 'num_kv_heads'),
  [(8, 1, 1, 1), (1, 8, 1, 4), (2, 2, 2, 8), (1, 2, 4, 2), (1, 1, 8, (8, 1))],
)
def test_every_mesh_gives_the_loss_of_one_device(
  config, data_axis, fsdp, model, num_kv_heads
):
  config.model.update(
    num_heads=8, num_kv_heads=num_kv_heads, vocab_size=264, head_dim=4
  )
  config.mesh.update(data=data_axis, fsdp=fsdp, model=model)
  mc = model_config(config)
  optimizer, step = update.make_train_step(config, mc)
  first = start(config, optimizer)
  batch = one_batch(np.random.default_rng(0), vocab=264)
  alone = first
  single = jax.jit(step)
  for _ in range(2):
    alone, expected = single(alone, batch, KEY)

  mesh = sharding.make_mesh(config.mesh)
  abstract = jax.eval_shape(lambda: first)
  shardings = sharding.state_shardings(abstract, mesh, mc)
  steps = update.Steps(step, mesh, shardings)
  state = jax.device_put(first, shardings)
  batches = jax.tree.map(lambda x: np.stack([x, x]), batch)
  with jax.set_mesh(mesh):
    _, values = steps.update(state, steps.put([batches]), KEY)
  for metric in ('train/loss', 'train/grad_norm'):
    np.testing.assert_allclose(
      values[metric][-1], expected[metric], rtol=1e-5, err_msg=metric
    )


def test_training_learns_the_text(config, tmp_path):
  config.train.num_steps = 60
  config.eval.every_steps = config.checkpoint.every_steps = 60
  train.train(config, tmp_path)
  losses = [
    r['train/loss'] for r in read_metrics(tmp_path) if 'train/loss' in r
  ]
  unigram = 2.9  # nats per byte of this text, about
  assert losses[0] > 5 and losses[-1] < unigram


def test_init_from_starts_from_the_parameters_of_another_run(config, tmp_path):
  train.train(config, tmp_path / 'parent')
  config.init_from = str(tmp_path / 'parent')
  config.optim.learning_rate = 0.0
  train.train(config, tmp_path / 'child')
  jax.tree.map(
    np.testing.assert_array_equal,
    checkpoint.load_params(tmp_path / 'parent')[0],
    checkpoint.load_params(tmp_path / 'child')[0],
  )
  _, meta = checkpoint.load_params(tmp_path / 'child')
  assert meta['parent']['path'] == str(tmp_path / 'parent')
  assert meta['parent']['step'] == 6


def test_other_config_is_refused_in_the_same_workdir(config, tmp_path):
  config.train.num_steps = 3
  train.train(config, tmp_path)
  config.optim.weight_decay = 0.3
  with pytest.raises(ValueError, match='optim.weight_decay: 0.1 -> 0.3'):
    train.train(config, tmp_path)
  config.train.log_every = 3
  assert train.train(config, tmp_path, allow_config_change=True) == 0


BAD = [
  ('model.vocab_size', 100, '258.*100|100.*258'),
  ('train.seq_len', 17, 'train.seq_len=17 exceeds model.max_len=16'),
  ('train.batch_size', 6, 'train.batch_size=6'),
  ('train.steps_per_call', 4, 'train.num_steps=6 must be a multiple'),
  ('train.profile', '5', "train.profile='5' must be 'FIRST:LAST'"),
  ('train.grad_accum', 0, 'train.grad_accum=0 must be at least 1'),
  ('data.path', '/nowhere', 'not a token directory'),
  ('model.num_kv_heads', 3, r'num_kv_heads=3 must divide num_heads=4'),
  ('optim.name', 'adam', 'adamw'),
  ('mesh.model', 3, 'mesh'),
]


@pytest.mark.parametrize(('field', 'value', 'message'), BAD)
def test_bad_input_is_refused_before_any_compilation(
  config, tmp_path, monkeypatch, field, value, message
):
  config.update_from_flattened_dict({field: value})
  monkeypatch.setattr(jax, 'jit', None)
  with pytest.raises(ValueError, match=message):
    train.train(config, tmp_path / 'run')


def test_workdir_below_a_file_is_refused(config, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='is a file, not a directory'):
    train.train(config, tmp_path / 'file' / 'run')


def test_relative_workdir_resumes_under_any_spelling(
  config, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  config.train.num_steps = 3
  train.train(config, 'runs/x')
  for spelling in ('./runs/x', tmp_path / 'runs' / 'x'):
    assert train.train(config, spelling) == 0
  assert checkpoint.steps(tmp_path / 'runs' / 'x') == [3]


def test_profile_writes_a_trace(config, tmp_path):
  config.train.update(profile='2:3', num_steps=3)
  train.train(config, tmp_path)
  assert list(tmp_path.glob('plugins/profile/*/*.xplane.pb'))


def test_a_stop_at_a_step_of_evaluation_loses_no_evaluation(
  config, tmp_path, monkeypatch
):
  reached = lambda _, step: step == config.eval.every_steps
  monkeypatch.setattr(train.Preemption, 'reached', reached)
  assert train.train(config, tmp_path) == train.EXIT_PREEMPTED
  assert train.train(config, tmp_path) == 0
  rows = read_metrics(tmp_path)
  assert [r['step'] for r in rows if 'eval/loss' in r] == [3, 6]


def test_signal_saves_and_exits_75_and_the_same_command_goes_on(
  token_directory, tmp_path
):
  command = [
    sys.executable,
    '-m',
    'gqa.train',
    '--config=configs/base.py',
    f'--workdir={tmp_path}',
    f'--config.data.path={token_directory}',
    '--config.model.num_layers=1',
    '--config.model.embed_dim=16',
    '--config.train.seq_len=16',
    '--config.train.num_steps=400',
    '--config.train.log_every=1',
    '--config.eval.num_batches=1',
    f'--config.compilation_cache={tmp_path}/../cache',
  ]
  env = os.environ | {'JAX_PLATFORMS': 'cpu'}
  process = subprocess.Popen(
    command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
  )
  for line in process.stderr:
    if line.startswith('step 5/'):
      break
  process.send_signal(signal.SIGTERM)
  rest = process.stderr.read()
  assert process.wait() == train.EXIT_PREEMPTED, rest
  (step,) = checkpoint.steps(tmp_path)
  assert 5 <= step < 400
  assert f'saved step {step}' in rest
  time.sleep(0.1)
  result = subprocess.run(
    command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
  )
  assert result.returncode == 0, result.stderr
  steps = [r['step'] for r in read_metrics(tmp_path) if 'train/loss' in r]
  assert steps == list(range(1, 401))
