"""Layouts over eight devices, and that they change no number."""

import os
import socket
import subprocess
import sys
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs import base
from gqa import optim, sharding

B, T, N, H, D, F, V = 8, 4, 8, 2, 16, 16, 24

# (mesh, KV heads of each layer): above and below the model axis, and mixed.
LAYOUTS = [
  ((8, 1, 1), (2,)),
  ((1, 8, 1), (2,)),
  ((2, 2, 2), (8,)),
  ((2, 2, 2), (2,)),
  ((1, 2, 4), (8,)),
  ((1, 2, 4), (2,)),
  ((1, 2, 4), (8, 1)),
  ((1, 1, 8), (8,)),
  ((1, 1, 8), (2,)),
]


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: tuple


def mesh_of(data, fsdp, model):
  config = types.SimpleNamespace(data=data, fsdp=fsdp, model=model)
  return sharding.make_mesh(config)


def model_config(*kv_heads):
  return types.SimpleNamespace(kv_heads=kv_heads)


def params_of(*kv_heads, scale=0.3):
  """Random parameters; biases and norms in the places a model has them."""
  shapes = {'embed': {'embedding': (V, D)}, 'head': {'kernel': (D, V)}}
  shapes['position_embed'] = {'embedding': (T, D)}
  for i, num_kv_heads in enumerate(kv_heads):
    heads, kv = (N, H), (num_kv_heads, H)
    shapes[f'layer_{i}'] = {
      'attention_norm': {'scale': (D,), 'bias': (D,)},
      'attention': {
        'query': {'kernel': (D, *heads), 'bias': heads},
        'key': {'kernel': (D, *kv), 'bias': kv},
        'value': {'kernel': (D, *kv), 'bias': kv},
        'out': {'kernel': (*heads, D), 'bias': (D,)},
        'key_norm': {'scale': (H,)},
      },
      'mlp': {
        'gate': {'kernel': (D, F), 'bias': (F,)},
        'up': {'kernel': (D, F), 'bias': (F,)},
        'down': {'kernel': (F, D), 'bias': (D,)},
      },
    }
  leaves, tree = jax.tree.flatten(
    shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  rng = np.random.default_rng(0)
  return tree.unflatten(
    [rng.normal(scale=scale, size=s).astype(np.float32) for s in leaves]
  )


def loss_of(params, tokens):
  """The loss of a small decoder: every parameter of `params_of` matters."""
  x = params['embed']['embedding'][tokens]
  x += params['position_embed']['embedding'][None]
  x = sharding.constrain(x, ('batch', 'length', None))  # [B, T, D]
  for i in range(sum(name.startswith('layer_') for name in params)):
    p = params[f'layer_{i}']
    a = p['attention']
    y = jnp.tanh(x) * p['attention_norm']['scale'][None, None]
    y += p['attention_norm']['bias'][None, None]
    q, k, v = (
      jnp.einsum('BTD,DNH->BTNH', y, a[name]['kernel'])
      + a[name]['bias'][None, None]
      for name in ('query', 'key', 'value')
    )
    k *= a['key_norm']['scale'][None, None, None]
    q = sharding.constrain(q, ('batch', 'length', 'heads', 'head_dim'))
    k = sharding.constrain(k, ('batch', 'length', 'kv_heads', 'head_dim'))
    v = sharding.constrain(v, ('batch', 'length', 'kv_heads', 'head_dim'))
    num_kv_heads = k.shape[2]
    q = q.reshape(B, T, num_kv_heads, N // num_kv_heads, H)
    weights = jax.nn.softmax(jnp.einsum('BTKGH,BSKH->BKGTS', q, k))
    out = jnp.einsum('BKGTS,BSKH->BTKGH', weights, v).reshape(B, T, N, H)
    x += jnp.einsum('BTNH,NHD->BTD', out, a['out']['kernel'])
    x += a['out']['bias'][None, None]
    m = p['mlp']
    gate, up = (
      jnp.einsum('BTD,DF->BTF', x, m[name]['kernel'])
      + m[name]['bias'][None, None]
      for name in ('gate', 'up')
    )
    hidden = jax.nn.silu(gate) * up
    hidden = sharding.constrain(hidden, ('batch', 'length', 'mlp'))
    x += jnp.einsum('BTF,FD->BTD', hidden, m['down']['kernel'])
    x += m['down']['bias'][None, None]
    x = sharding.constrain(x, ('batch', 'length', None))
  logits = jnp.einsum('BTD,DV->BTV', x, params['head']['kernel'])
  logits = sharding.constrain(logits, ('batch', 'length', 'vocab'))
  logprobs = jax.nn.log_softmax(logits)[:, :-1]
  return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


def tokens_of():
  return np.random.default_rng(1).integers(V, size=(B, T), dtype=np.int32)


@pytest.fixture(scope='module')
def unsharded():
  """(loss, gradients) on one device, by KV heads."""
  kinds = {kv_heads for _, kv_heads in LAYOUTS}
  step = jax.jit(jax.value_and_grad(loss_of))
  return {kind: step(params_of(*kind), tokens_of()) for kind in kinds}


@pytest.mark.parametrize('shape, kv_heads', LAYOUTS)
def test_sharded_loss_and_gradients_are_those_of_one_device(
  shape, kv_heads, unsharded
):
  mesh = mesh_of(*shape)
  params = params_of(*kv_heads)
  specs = sharding.param_specs(params, mesh, model_config(*kv_heads))
  params = jax.tree.map(
    lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs
  )
  with jax.set_mesh(mesh):
    tokens = sharding.put_batch(tokens_of(), mesh)
    result = jax.jit(jax.value_and_grad(loss_of))(params, tokens)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    result,
    unsharded[kv_heads],
  )


@pytest.mark.parametrize('num_kv_heads', [8, 4, 2, 1])
def test_kv_heads_are_split_only_where_they_divide(num_kv_heads):
  specs = sharding.param_specs(
    params_of(num_kv_heads), mesh_of(1, 2, 4), model_config(num_kv_heads)
  )
  axis = 'model' if num_kv_heads % 4 == 0 else None
  attention = specs['layer_0']['attention']
  for name in ('key', 'value'):
    assert attention[name]['kernel'] == P('fsdp', axis, None)
    assert attention[name]['bias'] == P(axis, None)
  assert attention['query']['kernel'] == P('fsdp', 'model', None)
  assert attention['query']['bias'] == P('model', None)
  assert attention['out']['kernel'] == P('model', None, 'fsdp')
  assert attention['out']['bias'] == P('fsdp')
  assert attention['key_norm']['scale'] == P(None)
  mlp = specs['layer_0']['mlp']
  assert mlp['gate']['kernel'] == mlp['up']['kernel'] == P('fsdp', 'model')
  assert mlp['down']['kernel'] == P('model', 'fsdp')
  assert mlp['up']['bias'] == P('model')
  assert mlp['down']['bias'] == P('fsdp')
  assert specs['embed']['embedding'] == P('model', 'fsdp')
  assert specs['position_embed']['embedding'] == P(None, 'fsdp')
  assert specs['head']['kernel'] == P('fsdp', 'model')
  assert specs['layer_0']['attention_norm']['bias'] == P(None)


def test_one_layer_that_does_not_divide_replicates_all_kv_kernels():
  specs = sharding.param_specs(
    params_of(8, 2), mesh_of(2, 1, 4), model_config(8, 2)
  )
  for i in (0, 1):
    key = specs[f'layer_{i}']['attention']['key']
    assert key['kernel'] == P('fsdp', None, None)


@pytest.mark.parametrize('num_kv_heads', [8, 4, 2, 1])
def test_activations_are_split_as_the_table_says(num_kv_heads):
  kv = jnp.zeros((B, T, num_kv_heads, H))
  x = jnp.zeros((B, T, D))

  def place(kv, x):
    return (
      sharding.constrain(kv, ('batch', 'length', 'kv_heads', 'head_dim')),
      sharding.constrain(x, ('batch', 'length', None)),
    )

  assert place(kv, x)[0] is kv  # no mesh
  mesh = mesh_of(1, 2, 4)
  with jax.set_mesh(mesh):
    kv, x = jax.jit(place)(kv, x)
  shard = num_kv_heads // 4 if num_kv_heads % 4 == 0 else num_kv_heads
  assert kv.sharding.shard_shape(kv.shape) == (B // 2, T, shard, H)
  assert x.sharding.shard_shape(x.shape) == (B // 2, T, D)


def test_activation_that_does_not_divide_is_refused():
  with jax.set_mesh(mesh_of(8, 1, 1)):
    with pytest.raises(ValueError, match='batch_size=6 .*mesh.data=8'):
      sharding.constrain(jnp.zeros((6, 2)), ('batch', None))
    with pytest.raises(ValueError, match='3 logical axes for 2 axes'):
      sharding.constrain(jnp.zeros((8, 2)), ('batch', 'length', None))


@pytest.mark.parametrize(
  'name, shape, mesh, message',
  [
    (
      'layer_0/attention/query/kernel',
      (16, 6, 2),
      (2, 1, 4),
      'model.num_heads=6 must be a multiple of mesh.model=4 .*query/kernel.*'
      'use 8, or split it over 1 or 2 or 3',
    ),
    ('layer_0/mlp/up/kernel', (16, 9), (4, 1, 2), 'model.mlp_dim=9 .*model=2'),
    ('embed/embedding', (258, 16), (2, 1, 4), 'model.vocab_size=258 .*use 260'),
    ('head/kernel', (10, 16), (1, 4, 2), 'model.embed_dim=10 .*mesh.fsdp=4'),
  ],
)
def test_size_that_does_not_divide_is_named(name, shape, mesh, message):
  tree = jax.ShapeDtypeStruct(shape, jnp.float32)
  for key in reversed(name.split('/')):
    tree = {key: tree}
  with pytest.raises(ValueError, match=message):
    sharding.param_specs(tree, mesh_of(*mesh), model_config(2))


@pytest.mark.parametrize(
  'tree',
  [
    {'adapter': {'kernel': np.zeros((2, 2))}},
    {'query': {'kernel': np.zeros((2, 2))}},
  ],
)
def test_parameter_outside_the_table_is_refused(tree):
  with pytest.raises(ValueError, match='parameter .*/kernel of shape .2, 2'):
    sharding.param_specs(tree, mesh_of(8, 1, 1), model_config(2))


def abstract_state(optimizer, params):
  def init(params):
    return State(jnp.int32(0), params, optimizer.init(params))

  return init, jax.eval_shape(init, params)


@pytest.mark.parametrize('name, moments', [('adamw', 2), ('lion', 1)])
def test_moments_are_split_like_their_parameters(name, moments):
  config = base.get_config().optim
  config.name = name
  optimizer, _ = optim.make_optimizer(config, 1000)
  mesh = mesh_of(1, 2, 4)
  _, abstract = abstract_state(optimizer, params_of(8, 2))
  shardings = sharding.state_shardings(abstract, mesh, model_config(8, 2))
  assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
  expected = [s.spec for s in jax.tree.leaves(shardings.params)]
  rest = [s.spec for s in jax.tree.leaves(shardings.opt_state) if s.spec]
  assert rest == expected * moments
  assert shardings.step.spec == P()


def test_factored_moments_are_replicated_and_change_no_update():
  config = base.get_config().optim
  config.update(name='adafactor', warmup_steps=0)
  optimizer, _ = optim.make_optimizer(config, 10)
  rng = np.random.default_rng(0)
  params = {
    'embed': {'embedding': rng.normal(size=(64, 128)).astype(np.float32)},
    'final_norm': {'scale': np.ones(128, np.float32)},
    'up': {'bias': np.ones(8, np.float32)},
  }
  init, abstract = abstract_state(optimizer, params)

  def steps(state):
    for _ in range(2):
      grads = jax.tree.map(jnp.cos, state.params)
      updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params
      )
      params = jax.tree.map(jnp.add, state.params, updates)
      state = State(state.step + 1, params, opt_state)
    return state

  mesh = mesh_of(1, 2, 4)
  shardings = sharding.state_shardings(abstract, mesh, model_config(2))
  factored = shardings.opt_state[0][0]
  assert factored.v_row['embed']['embedding'].spec == P()
  assert factored.v_col['embed']['embedding'].spec == P()
  assert factored.v['up']['bias'].spec == P('model')
  with jax.set_mesh(mesh):
    state = jax.jit(init, out_shardings=shardings)(params)
    sharded = jax.jit(steps, out_shardings=shardings)(state)
  assert sharded.params['embed']['embedding'].sharding.spec == P(
    'model', 'fsdp'
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    sharded,
    jax.jit(steps)(init(params)),
  )


@pytest.mark.parametrize(
  'shape, expected',
  [((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((1, 8, -1), (1, 8, 1))],
)
def test_minus_one_stands_for_all_that_remain(shape, expected):
  mesh = mesh_of(*shape)
  assert mesh.axis_names == ('data', 'fsdp', 'model')
  assert mesh.devices.shape == expected
  assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 3


@pytest.mark.parametrize(
  'shape, message',
  [
    ((-1, -1, 1), 'only one may be -1'),
    ((4, 1, 1), 'mesh.data=4, .*product 4 must equal .*devices, 8'),
    ((-1, 3, 1), 'mesh.fsdp=3, .*product 3 must divide .*devices, 8'),
    ((16, -1, 1), 'product 16 must divide .*devices, 8'),
    ((0, 1, 8), 'mesh.data=0, .*must be at least 1'),
    ((-2, 1, 8), 'mesh.data=-2, .*must be at least 1'),
  ],
)
def test_mesh_that_does_not_fit_the_devices_is_refused(shape, message):
  with pytest.raises(ValueError, match=message):
    mesh_of(*shape)


def test_mesh_can_be_of_some_devices():
  config = types.SimpleNamespace(data=1, fsdp=1, model=-1)
  mesh = sharding.make_mesh(config, jax.devices()[2:4])
  assert mesh.devices.shape == (1, 1, 2)


def test_batch_is_split_over_data_and_fsdp():
  mesh = mesh_of(2, 2, 2)
  batch = {'tokens': np.arange(24, dtype=np.int32).reshape(8, 3)}
  put = sharding.put_batch(batch, mesh)['tokens']
  assert put.sharding.shard_shape(put.shape) == (2, 3)
  np.testing.assert_array_equal(put, batch['tokens'])
  stacked = sharding.put_batch(np.zeros((5, 8, 3)), mesh, axis=1)
  assert stacked.sharding.shard_shape(stacked.shape) == (5, 2, 3)


def test_batch_must_divide_over_devices_and_micro_batches():
  mesh = mesh_of(2, 2, 2)
  sharding.check_batch(8, mesh)
  sharding.check_batch(8, mesh, grad_accum=2)
  with pytest.raises(ValueError, match='train.batch_size=6 .*= 4'):
    sharding.check_batch(6, mesh)
  with pytest.raises(ValueError, match='batch_size=8 .*grad_accum=4 = 16'):
    sharding.check_batch(8, mesh, grad_accum=4)


@pytest.mark.parametrize(
  'processes, process, expected',
  [
    ([[[0, 0]], [[1, 1]]], 1, (1, 2)),
    ([[[0, 1]], [[2, 3]]], 3, (1, 2)),
    ([[[0, 1, 2, 3]]], 2, (0, 1)),
    ([[[0], [0], [1], [1]]], 0, (0, 2)),
  ],
)
def test_processes_that_share_sequences_read_the_same(
  processes, process, expected, monkeypatch
):
  monkeypatch.setattr(jax, 'process_index', lambda: process)
  assert sharding.process_rows(fake_mesh(processes)) == expected


@pytest.mark.parametrize(
  'processes', [[[[0, 0, 1]], [[1, 2, 2]]], [[[0, 0]], [[0, 0]], [[1, 1]]]]
)
def test_model_axis_that_cuts_processes_unevenly_is_refused(processes):
  with pytest.raises(ValueError, match='splits processes unevenly'):
    sharding.process_rows(fake_mesh(processes))


def fake_mesh(processes):
  devices = np.array(processes, object)
  for place, index in np.ndenumerate(devices):
    devices[place] = types.SimpleNamespace(process_index=index)
  return types.SimpleNamespace(
    devices=devices, shape={'model': devices.shape[2]}
  )


def test_cpu_devices_can_not_change_after_the_start():
  assert jax.device_count() == 8
  sharding.set_cpu_devices(8)
  with pytest.raises(ValueError, match='mesh.cpu_devices=4, .*with 8 CPU'):
    sharding.set_cpu_devices(4)
  with pytest.raises(ValueError, match='mesh.cpu_devices=0 must be'):
    sharding.set_cpu_devices(0)


def test_a_single_process_is_not_distributed(monkeypatch):
  for name in ('GQA_COORDINATOR', 'SLURM_STEP_NUM_TASKS'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('SLURM_NTASKS', '4')
  monkeypatch.setenv('SLURM_PROCID', '0')
  calls = []
  monkeypatch.setattr(
    jax.distributed, 'initialize', lambda *a, **k: calls.append((a, k))
  )
  sharding.initialize_distributed()
  monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '1')
  sharding.initialize_distributed()
  assert not calls
  monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '2')
  sharding.initialize_distributed()
  assert calls == [((), {})]


def test_coordinator_without_ranks_is_refused(monkeypatch):
  monkeypatch.setenv('GQA_COORDINATOR', '127.0.0.1:1')
  monkeypatch.delenv('GQA_NUM_PROCESSES', raising=False)
  with pytest.raises(ValueError, match="GQA_NUM_PROCESSES='' must be"):
    sharding.initialize_distributed()


PROCESS = """
import sys, types
import jax, numpy as np
from gqa import sharding
sharding.set_cpu_devices(2)
sharding.initialize_distributed()
for shape in ((2, 1, 2), (1, 2, 2), (1, 1, 4)):
  mesh = sharding.make_mesh(types.SimpleNamespace(**dict(
    zip(('data', 'fsdp', 'model'), shape))))
  index, count = sharding.process_rows(mesh)
  rows = np.arange(1, 5, dtype=np.float32)
  batch = sharding.put_batch({'x': rows[index::count]}, mesh)['x']
  assert batch.shape == (4,), batch.shape
  total = jax.jit(lambda x: (x ** 2).sum())(batch)
  print(index, count, float(total))
jax.distributed.shutdown()
"""


def test_two_processes_share_one_batch():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  env = {name: v for name, v in os.environ.items() if name != 'XLA_FLAGS'}
  env.update(
    GQA_COORDINATOR=f'127.0.0.1:{port}',
    GQA_NUM_PROCESSES='2',
    JAX_PLATFORMS='cpu',
    PYTHONPATH=os.pathsep.join(sys.path),
  )
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', PROCESS],
      env=env | {'GQA_PROCESS_ID': str(rank)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in (0, 1)
  ]
  try:
    for rank, process in enumerate(processes):
      out, err = process.communicate(timeout=120)
      assert process.returncode == 0, err
      lines = [line for line in out.splitlines() if line.endswith(' 30.0')]
      assert lines == [f'{rank} 2 30.0'] * 2 + ['0 1 30.0'], out
  finally:
    for process in processes:
      process.kill()
