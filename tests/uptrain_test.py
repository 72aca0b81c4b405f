"""Uptraining: what it starts from, how far it goes, teachers and mixing."""

import collections
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from configs import base
from configs import uptrain as uptrain_config
from experiments import recovery
from gqa import (
  checkpoint,
  data,
  evaluate,
  experiment,
  model,
  sharding,
  sweep_checks,
  train,
  update,
  uptrain,
)
from gqa import loss as loss_lib
from gqa import origin as origin_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.convert import checkpoints
from gqa.mixing import Mixing
from gqa.report import join, read, recipes, series

KEY = jax.random.key(0)
ROOT = pathlib.Path(__file__).parents[1]

TEXT = 'It was the best of times, it was the worst of times. ' * 200
MODEL = dict(
  vocab_size=264,  # more than the tokenizer's, so that 4 devices split it
  num_layers=2,
  embed_dim=16,
  num_heads=4,
  head_dim=8,
  mlp_dim=24,
  max_len=16,
)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A parent of 40 steps, so it says, and its heads merged by the mean."""
  root = tmp_path_factory.mktemp('runs')
  (root / 'book.txt').write_text('\n'.join(TEXT.split('. ')))
  data.prepare(str(root / 'book.txt'), 'bytes', str(root / 'tokens'))
  c = base.get_config()
  c.compilation_cache = ''
  c.data.path = str(root / 'tokens')
  c.model.update(MODEL)
  c.train.update(num_steps=40, batch_size=8, seq_len=16)
  c.optim.update(learning_rate=1e-2, weight_decay=0.3)
  mc = ModelConfig.from_dict(c.model.to_dict())
  params = jax.jit(lambda: model.init_params(mc, jax.random.key(3)))()
  # As far from its start as trained heads are.
  noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)
  parent = root / 'parent'
  parent.mkdir()
  workdir_lib.save_config(parent, c.to_dict())
  data.open_tokens(c.data.path).tokenizer().save(parent)
  checkpoint.save_params(parent, jax.tree.map(noise, params), {}, step=40)
  for name, grouping in (('mean', 'contiguous'), ('similar', 'raw_similarity')):
    checkpoints.convert(
      str(parent),
      str(root / name),
      num_kv_heads=2,
      method='mean',
      grouping=grouping,
      calibration='none',
    )
  return root


@pytest.fixture
def config(runs):
  c = uptrain_config.get_config()
  c.lock()
  c.compilation_cache = ''
  c.init_from = str(runs / 'mean')
  c.uptrain.alpha = 0.1
  c.train.log_every = 1
  c.eval.update(every_steps=2, num_batches=2)
  c.mesh.cpu_devices = 8
  return c


def read_metrics(workdir):
  lines = (pathlib.Path(workdir) / 'metrics.jsonl').read_text().splitlines()
  timed = ('wall_time', 'speed/', 'memory/')
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
    for line in lines
  ]


def config_of(path):
  return ModelConfig.from_dict(workdir_lib.load_config(path)['model'])


def loss_of(path, config):
  """By a route that has no run: the checkpoint's own loss."""
  tokens = data.open_tokens(
    workdir_lib.load_config(path)['data']['path'], 'valid'
  )
  batches = data.eval_batches(tokens, batch_size=8, seq_len=16, num_batches=2)
  mesh = sharding.make_mesh(config.mesh)
  params, _ = checkpoint.load_on_mesh(
    str(path), 'latest', config_of(path), mesh
  )
  step = evaluate.make_eval_step(config_of(path))
  return evaluate.evaluate(step, params, batches, mesh, tokens)['loss']


def one_batch(seed=0, rows=8, length=16, vocab=258):
  rng = np.random.default_rng(seed)
  return {
    'tokens': rng.integers(0, vocab, (rows, length), dtype=np.int32),
    'targets': rng.integers(0, vocab, (rows, length), dtype=np.int32),
    'positions': np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    'segments': np.ones((rows, length), np.int32),
    'weights': rng.integers(0, 2, (rows, length)).astype(np.float32),
  }


def test_alpha_0_evaluates_and_saves_the_converted_checkpoint(
  runs, config, tmp_path
):
  config.uptrain.alpha = 0.0
  assert train.train(config, tmp_path) == 0
  (row,) = [r for r in read_metrics(tmp_path) if 'eval/loss' in r]
  assert row['step'] == 0
  np.testing.assert_allclose(
    [row['eval/loss'], row['eval/parent_loss']],
    [loss_of(runs / 'mean', config), loss_of(runs / 'parent', config)],
    rtol=1e-6,
  )
  assert abs(row['eval/loss'] - row['eval/parent_loss']) > 1e-3
  params, meta = checkpoint.load_params(tmp_path)
  jax.tree.map(
    np.testing.assert_array_equal,
    params,
    checkpoint.load_params(runs / 'mean')[0],
  )
  assert (meta['step'], meta['parent']['steps']) == (0, 40)
  before = (tmp_path / 'metrics.jsonl').read_text()
  assert train.train(config, tmp_path) == 0
  assert (tmp_path / 'metrics.jsonl').read_text() == before


@pytest.mark.parametrize(
  ('alpha', 'steps_per_call', 'steps', 'warmup'),
  [
    (0.0, 1, 0, 0),
    (0.001, 1, 1, 0),
    (0.05, 1, 2, 0),
    (0.5, 1, 20, 2),
    (0.12, 2, 4, 0),
    (2.0, 1, 80, 8),
  ],
)
def test_alpha_is_a_fraction_of_the_parents_steps(
  config, alpha, steps_per_call, steps, warmup
):
  config.uptrain.alpha = alpha
  config.train.steps_per_call = steps_per_call
  resolved = uptrain.resolve(config)
  assert resolved.train.num_steps == steps
  assert resolved.optim.warmup_steps == warmup
  assert config.train.num_steps is None
  assert uptrain.resolve(resolved).to_dict() == resolved.to_dict()


def test_what_is_unset_is_the_parents(runs, config):
  resolved = uptrain.resolve(config)
  assert resolved.data.path == str(runs / 'tokens')
  assert (resolved.train.batch_size, resolved.train.seq_len) == (8, 16)
  assert resolved.optim.weight_decay == 0.3
  assert resolved.optim.learning_rate == 0.5 * 1e-2
  assert ModelConfig.from_dict(resolved.model.to_dict()) == config_of(
    runs / 'mean'
  )
  config.optim.weight_decay = 0.0
  config.model.dtype = 'bfloat16'
  config.model.num_kv_heads = 2
  resolved = uptrain.resolve(config)
  assert (resolved.optim.weight_decay, resolved.model.dtype) == (
    0.0,
    'bfloat16',
  )


BAD = [
  ('model.num_kv_heads', 1, r'num_kv_heads=1, but it has \(?2'),
  ('model.embed_dim', 32, 'model.embed_dim=32, but it has 16'),
  ('model.match_params', True, 'match_params=True, but it has False'),
  ('uptrain.parent_steps', 50, 'parent_steps=50, but .* records 40 steps'),
  ('train.num_steps', 7, 'train.num_steps=7, but .* of 40 steps is 4'),
  ('uptrain.alpha', -0.1, 'uptrain.alpha=-0.1 must be finite and >= 0'),
  ('uptrain.distill', 1.5, r'uptrain.distill=1.5 must be in \[0, 1\]'),
  ('uptrain.teacher', '/x', 'is of no use with uptrain.distill=0'),
  ('init_from', '', 'needs a checkpoint to start from'),
  ('init_from', '/nowhere', '/nowhere/config.json does not exist'),
]


@pytest.mark.parametrize(('field', 'value', 'message'), BAD)
def test_contradictions_are_refused_with_both_values(
  config, field, value, message
):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=message):
    uptrain.resolve(config)


def test_fields_of_uptraining_need_alpha(config):
  config = base.get_config()
  config.uptrain.distill = 0.5
  with pytest.raises(ValueError, match='distill=0.5 needs uptrain.alpha'):
    uptrain.resolve(config)


def test_imported_model_needs_its_steps_and_a_recipe(runs, config, tmp_path):
  raw = workdir_lib.load_config(runs / 'mean')
  imported = {
    'model': raw['model'],
    'data': {'path': None},
    'train': {'seq_len': 16},
  }
  workdir_lib.save_config(tmp_path, imported)
  params, _ = checkpoint.load_params(runs / 'mean')
  checkpoint.save_params(tmp_path, params, {})
  config.init_from = str(tmp_path)
  with pytest.raises(
    ValueError, match='data.path, .*train.batch_size, .*optim'
  ):
    uptrain.resolve(config)
  config.data.path = raw['data']['path']
  config.train.batch_size = 8
  config.optim.update(name='adamw', learning_rate=1e-3, weight_decay=0.0)
  with pytest.raises(ValueError, match='give --config.uptrain.parent_steps'):
    uptrain.resolve(config)
  config.uptrain.parent_steps = 300
  assert uptrain.resolve(config).train.num_steps == 30
  config.uptrain.learned_mixing = True
  resolved = uptrain.resolve(config)
  with pytest.raises(ValueError, match='records no parent'):
    origin_lib.find(resolved, config_of(tmp_path))


@pytest.mark.parametrize(
  ('part', 'temperature', 'z_loss', 'softcap'),
  [(1.0, 1.0, 0.0, None), (0.3, 2.0, 0.01, 5.0)],
)
def test_distillation_in_slices_is_the_plain_formula(
  monkeypatch, part, temperature, z_loss, softcap
):
  monkeypatch.setattr(loss_lib, 'SLICE_ELEMENTS', 2 * 5 * 11)
  monkeypatch.setattr(loss_lib, 'SLICE_HEADS', 0)
  keys = iter(jax.random.split(jax.random.key(0), 4))
  B, T, V = 2, 7, 11
  x, head = (jax.random.normal(next(keys), s) for s in ((B, T, 4), (V, 4)))
  goal, rows = (jax.random.normal(next(keys), s) for s in ((B, T, 6), (V, 6)))
  batch = one_batch(1, B, T, V)
  targets, weights = batch['targets'], batch['weights']

  def sliced(x, head):
    total, nll, divergence = loss_lib.distillation(
      x,
      head,
      goal,
      rows,
      targets,
      weights,
      part=part,
      temperature=temperature,
      z_loss=z_loss,
      softcap=softcap,
      teacher_softcap=softcap and 3.0,
    )
    return 2.0 * total, (nll.sum(), divergence)

  def plain(x, head):
    cap = lambda y, c: y if c is None else c * jnp.tanh(y / c)
    z = cap(jnp.einsum('BTD,VD->BTV', x, head), softcap)
    t = cap(jnp.einsum('BTD,VD->BTV', goal, rows), softcap and 3.0)
    log_p = jax.nn.log_softmax(z)
    nll = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    p, q = (jax.nn.log_softmax(y / temperature) for y in (z, t))
    kl = (jnp.exp(q) * (q - p)).sum(-1)
    lse = jax.nn.logsumexp(z, axis=-1)
    total = (1 - part) * nll + part * temperature**2 * kl + z_loss * lse**2
    sums = ((nll * weights).sum(), (kl * weights).sum())
    return 2.0 * (total * weights).sum(), sums

  assert len(loss_lib._slices(x, head, 2)) > 1
  found, expected = (
    jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(x, head)
    for f in (sliced, plain)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    found,
    expected,
  )


def test_a_model_does_not_diverge_from_itself(runs, config):
  config.uptrain.distill = 1.0
  config.uptrain.teacher = str(runs / 'mean')
  config = uptrain.resolve(config)
  mc = config_of(runs / 'mean')
  origin = origin_lib.find(config, mc)
  optimizer, step = update.make_train_step(config, mc, origin)
  params, _ = checkpoint.load_params(runs / 'mean')
  state = update.init_state(mc, optimizer, KEY).replace(params=params)
  _, values = jax.jit(step)(state, one_batch(), KEY, params)
  assert values['train/loss'] > 1
  assert abs(values['train/divergence']) < 1e-6
  assert values['train/grad_norm'] < 1e-5


def mixed(runs, name='mean'):
  """(mixing, start, converted parameters, the parent's parameters)."""
  mc = config_of(runs / name)
  mixing = Mixing(mc, dataclasses.replace(mc, num_kv_heads=4))
  params, _ = checkpoint.load_params(runs / name)
  parent, _ = checkpoint.load_params(runs / 'parent')
  orders = origin_lib._orders(str(runs / name), mixing)
  return mixing, mixing.start(params, parent, orders), params, parent


@pytest.mark.parametrize('name', ['mean', 'similar'])
def test_mixing_starts_at_the_mean_conversion(runs, name):
  mixing, start, params, _ = mixed(runs, name)
  found = mixing.fold(start)
  assert jax.tree.structure(found) == jax.tree.structure(params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, params
  )


def test_similar_heads_are_not_neighbours_here(runs):
  orders = origin_lib._orders(str(runs / 'similar'), mixed(runs)[0])
  assert orders != ((0, 1, 2, 3),) * 2


def test_folded_model_gives_the_logits_of_its_mixed_heads(runs):
  mixing, start, _, _ = mixed(runs)
  rng = np.random.default_rng(0)
  wide = jax.tree.map(lambda x: x, start)
  for i in range(2):
    attention = start[f'layer_{i}']['attention']
    for kind in ('key', 'value'):
      weights = rng.normal(size=4).astype(np.float32)
      attention[f'{kind}_mix']['scale'] = weights
      kernel = np.asarray(attention[kind]['kernel'])
      # Each query head reads the same sum as its neighbour.
      sums = [
        sum(weights[h] * kernel[:, h] for h in (2 * group, 2 * group + 1))
        for group in (0, 1)
      ]
      wide[f'layer_{i}']['attention'][kind] = {
        'kernel': np.stack([sums[0], sums[0], sums[1], sums[1]], axis=1)
      }
      wide[f'layer_{i}']['attention'].pop(f'{kind}_mix')
  tokens = one_batch()['tokens'][:2]
  found = model.Decoder(mixing.model).apply(
    {'params': mixing.fold(start)}, tokens
  )
  expected = model.Decoder(mixing.heads).apply({'params': wide}, tokens)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_mixing_needs_the_mean_of_the_parents_heads(runs, config, tmp_path):
  checkpoints.convert(
    str(runs / 'parent'),
    str(tmp_path / 'first'),
    num_kv_heads=2,
    method='first',
    calibration='none',
  )
  config.init_from = str(tmp_path / 'first')
  config.uptrain.learned_mixing = True
  with pytest.raises(ValueError, match='convert with --method=mean'):
    train.train(config, tmp_path / 'run')


def test_seeds_share_a_teacher_in_one_program(runs, config, tmp_path):
  config.uptrain.update(learned_mixing=True, distill=0.5)
  config.init_from = str(runs / 'similar')
  for seed in (0, 1):
    config.seed = seed
    train.train(config, tmp_path / f'alone{seed}')
  workdirs = [tmp_path / 'seed0', tmp_path / 'seed1']
  assert train.train_seeds(config, [0, 1], workdirs) == 0
  for seed, workdir in enumerate(workdirs):
    together = read_metrics(workdir)
    alone = read_metrics(tmp_path / f'alone{seed}')
    assert [row['step'] for row in together] == [row['step'] for row in alone]
    for a, b in zip(together, alone, strict=True):
      for name in b.keys() & {'train/loss', 'train/divergence', 'eval/loss'}:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)
  assert together[-1]['eval/loss'] != read_metrics(workdirs[0])[-1]['eval/loss']


def test_mixed_and_distilled_run_resumes_to_the_bit_and_saves_an_ordinary_model(
  runs, config, tmp_path, monkeypatch
):
  config.uptrain.update(learned_mixing=True, distill=0.5, temperature=2.0)
  config.init_from = str(runs / 'similar')
  config.mesh.update(data=1, fsdp=2, model=4)  # 2 KV heads do not divide by 4
  config.train.grad_accum = 2
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  run = train.Run(config, str(whole))
  assert train.advance([run]) == 0
  (teacher,) = run.program.teacher
  assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))
  with monkeypatch.context() as patch:
    stop = lambda self, now: now == 3
    patch.setattr(train.Preemption, 'reached', stop)
    assert train.train(config, parts) == train.EXIT_PREEMPTED
  mc = config_of(runs / 'similar')
  shapes = jax.eval_shape(lambda: model.init_params(mc, jax.random.key(0)))
  halfway, _ = checkpoint.load_params(parts, template=shapes)
  assert train.train(config, parts) == 0
  assert read_metrics(parts) == read_metrics(whole)
  rows = read_metrics(whole)
  assert [r['step'] for r in rows if 'eval/loss' in r] == [0, 2, 4]
  assert all(r['train/divergence'] > 0 for r in rows if 'train/loss' in r)
  params, meta = checkpoint.load_params(parts, template=shapes)
  jax.tree.map(
    np.testing.assert_array_equal, params, checkpoint.load_params(whole)[0]
  )
  kernel = lambda tree: tree['layer_0']['attention']['key']['kernel']
  assert not np.array_equal(kernel(params), kernel(halfway))
  assert meta['parent_loss'] == rows[-1]['eval/parent_loss']
  np.testing.assert_allclose(
    rows[-1]['eval/loss'], loss_of(parts, config), rtol=1e-6
  )
  mixing = run.program.origin.mixing
  trained = run.state.params['layer_0']['attention']
  assert trained['key']['kernel'].shape[1] == 4
  weights = trained['key_mix']['scale']
  assert 0 < float(jnp.abs(weights - 0.5).max()) < 0.1
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    mixing.fold(run.state.params),
    checkpoint.load_params(whole)[0],
  )


def test_mesh_accumulation_and_chains_do_not_change_a_mixed_update(
  runs, config, monkeypatch
):
  config.uptrain.update(learned_mixing=True, distill=0.5)
  config = uptrain.resolve(config)
  mc = config_of(runs / 'mean')
  origin = origin_lib.find(config, mc)
  _, start, _, parent = mixed(runs)
  batch = one_batch()

  def one_update(mesh=None):
    optimizer, step = update.make_train_step(config, mc, origin)
    make = lambda: update.init_state(mc, optimizer, KEY, origin.mixing)
    state = jax.jit(make)().replace(params=start)
    if mesh is None:
      return jax.jit(step)(state, batch, KEY, parent)[1]
    shardings = sharding.state_shardings(
      jax.eval_shape(make), mesh, origin.mixing.heads
    )
    steps = update.Steps(step, mesh, shardings, distilled=True)
    batches = jax.tree.map(lambda x: x[None], batch)
    teacher = origin.teacher.load(mesh)
    with jax.set_mesh(mesh):
      state = jax.device_put(state, shardings)
      _, values = steps.update(state, steps.put([batches]), KEY, teacher)
    return jax.tree.map(lambda x: x[0], values)

  monkeypatch.setattr(update, 'CHAINS', {})
  expected = one_update()
  config.train.grad_accum = 2
  config.mesh.update(data=2, fsdp=2, model=2)
  for values in (one_update(), one_update(sharding.make_mesh(config.mesh))):
    for name in ('loss', 'divergence', 'objective', 'grad_norm'):
      np.testing.assert_allclose(
        values[f'train/{name}'], expected[f'train/{name}'], rtol=1e-5
      )


def test_update_that_is_not_finite_leaves_heads_and_weights(runs, config):
  config.uptrain.update(learned_mixing=True, distill=0.5)
  config = uptrain.resolve(config)
  mc = config_of(runs / 'mean')
  origin = origin_lib.find(config, mc)
  _, start, _, parent = mixed(runs)
  optimizer, step = update.make_train_step(config, mc, origin)
  state = update.init_state(mc, optimizer, KEY, origin.mixing)
  state = state.replace(params=start)
  bad = one_batch() | {'weights': np.full((8, 16), np.nan, np.float32)}
  new, _ = jax.jit(step)(state, bad, KEY, parent)
  assert (new.step, new.skipped) == (1, 1)
  jax.tree.map(np.testing.assert_array_equal, new.params, start)


def test_loss_and_the_parents_are_on_one_plot(config, tmp_path):
  config.uptrain.alpha = 0.0
  train.train(config, tmp_path)
  events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
  tag = metadata.CONFIG_SUMMARY_TAG
  assert tag in events.PluginTagToContent(metadata.PLUGIN_NAME)
  (event,) = events.Tensors(tag)
  layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
  (chart,) = layout.category[0].chart
  assert list(chart.multiline.tag) == ['^eval/loss$', '^eval/parent_loss$']
  assert {'eval/loss', 'eval/parent_loss'} <= set(events.Tags()['tensors'])


@pytest.mark.parametrize(
  ('curve', 'tokens'),
  [
    ([(0, 4.0), (100, 2.0)], 75.0),
    ([(0, 4.0), (100, 3.0), (200, 1.0), (300, 3.0)], 125.0),
    ([(0, 2.0), (100, 1.0)], 0.0),
    ([(0, 4.0), (100, 2.6)], None),
  ],
)
def test_tokens_to_a_loss_are_interpolated_to_its_first_crossing(curve, tokens):
  assert recovery.tokens_to(curve, 2.5) == tokens


def test_a_run_that_never_arrives_is_the_slowest():
  assert recovery.median_reached([None, 5.0, 7.0]) == 7.0
  assert recovery.median_reached([None, None, 7.0]) is None


def fake_run(method, alpha, losses, seed=0):
  config = {
    'model': MODEL | {'vocab_size': 258, 'num_kv_heads': [1, 1]},
    'train': {'num_steps': 10, 'batch_size': 2, 'seq_len': 5},
    'uptrain': {'alpha': alpha, 'distill': 0.0, 'learned_mixing': False},
    'seed': seed,
  }
  lines = [
    {'step': step, 'eval/loss': loss, 'eval/parent_loss': 1.0}
    for step, loss in losses
  ]
  meta = {'parent': {'path': 'x', 'steps': 100, 'parent': {'method': method}}}
  return read.Run('r', pathlib.Path('r'), config, None, lines, meta, 'done')


@pytest.fixture
def uptrainings():
  runs = [
    fake_run('mean', 0.0, [(0, 3.0)]),
    fake_run('mean', 0.1, [(0, 3.0), (5, 2.0), (10, 1.05)]),
    fake_run('mean', 0.05, [(0, 3.0), (5, 1.5)]),
    fake_run('low_rank', 0.1, [(0, 1.3), (10, 1.1)]),
    fake_run('low_rank', 0.1, [(0, 1.3), (10, 1.0)], seed=1),
  ]
  return [recipes.uptraining_of(run) for run in runs]


def test_every_method_is_measured_by_the_gap_of_the_mean(uptrainings):
  low_rank, mean = recovery.rows(uptrainings)
  assert (low_rank['num_kv_heads'], mean['num_kv_heads']) == ('1', '1')
  assert mean['goal'] == low_rank['goal'] == pytest.approx(1.1)
  assert {a: s['mean'] for a, s in mean['loss'].items()} == {
    0.0: 3.0,
    0.05: 1.5,
    0.1: 1.05,
  }
  assert mean['tokens'] == pytest.approx(10 * (5 + 5 * 0.9 / 0.95))
  assert low_rank['tokens'] == pytest.approx((100 + 100 * 2 / 3) / 2)
  assert low_rank['loss'][0.1]['count'] == 2


def test_lines_of_results_say_what_the_runs_said(uptrainings, tmp_path):
  lines = [json.dumps(run.to_line()) for run in uptrainings]
  torn = dict(json.loads(lines[0]))
  del torn['curve']
  derived = json.dumps({'what': 'uptraining_recovery'})
  path = tmp_path / 'results.jsonl'
  empty = json.dumps(torn | {'curve': []})
  path.write_text('\n'.join([*lines, derived, json.dumps(torn), empty]))
  found = read.read([tmp_path])
  assert recovery.rows(recovery.uptrainings(found)) == recovery.rows(
    uptrainings
  )
  for number, problem in zip((7, 8), found.problems, strict=True):
    assert f'line {number} is no whole run of uptraining' in problem.what
  drawn = [
    (r['kv_heads'], r['method'].split(',')[0], r['alpha'], r['loss'])
    for r in series.alphas(join.join(found))
  ]
  assert drawn == [
    ('1', 'low_rank', 0.0, 1.3),
    ('1', 'low_rank', 0.1, pytest.approx(1.05)),
    ('1', 'mean', 0.0, 3.0),
    ('1', 'mean', 0.05, 1.5),
    ('1', 'mean', 0.1, 1.05),
  ]


@pytest.mark.parametrize(
  ('name', 'verbs'),
  [
    ('conversion_methods', {'train': 36, 'convert': 35}),
    ('uptraining_proportion', {'train': 91, 'convert': 9}),
    ('from_scratch_vs_uptrained', {'train': 33, 'convert': 18}),
    ('smollm2_uptraining', {'train': 2, 'convert': 2}),
  ],
)
def test_experiments_have_valid_points_of_the_number_they_state(
  monkeypatch, name, verbs
):
  monkeypatch.chdir(ROOT)
  path = f'experiments/{name}.py'
  steps = experiment.load(path, {}, {})
  points = experiment.expand(steps, '/nowhere', 'python')
  sweep_checks.check(steps, points, data=False)
  assert collections.Counter(step.verb for step in steps) == verbs
