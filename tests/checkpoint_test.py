import math
import os
import pathlib
import shutil
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gqa import checkpoint

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
DATA = {'next_index': 7}


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: tuple
  nonfinite: jax.Array
  skipped: jax.Array


def make_params(num_layers=2, num_kv_heads=2, embed_dim=8, vocab_size=16):
  count = iter(range(1000))

  def array(*shape):
    return jax.random.normal(jax.random.key(next(count)), shape)

  def layer():
    return {
      'attention': {
        'query': {'kernel': array(embed_dim, 4, 2)},
        'key': {'kernel': array(embed_dim, num_kv_heads, 2)},
        'value': {'kernel': array(embed_dim, num_kv_heads, 2)},
        'out': {'kernel': array(4, 2, embed_dim)},
      },
      'mlp_norm': {'scale': array(embed_dim)},
    }

  return {
    'embed': {'embedding': array(vocab_size, embed_dim)},
    **{f'layer_{i}': layer() for i in range(num_layers)},
  }


def make_state(step=1, optimizer=OPTIMIZER, **sizes):
  params = make_params(**sizes)
  opt_state = jax.tree.map(
    lambda x: x + jnp.ones((), x.dtype), optimizer.init(params)
  )
  return State(
    step=jnp.int32(step),
    params=params,
    opt_state=opt_state,
    nonfinite=jnp.int32(2),
    skipped=jnp.int32(3),
  )


def shapes_of(state):
  return jax.eval_shape(lambda: state)


def open_run(workdir, every_steps=5, keep_latest=2, keep_best=1):
  return checkpoint.Checkpointer(workdir, every_steps, keep_latest, keep_best)


def save_one(workdir, state=None, **kwargs):
  state = make_state() if state is None else state
  with open_run(workdir) as checkpointer:
    assert checkpointer.save(state, DATA, {'tokens': 9}, force=True, **kwargs)
  return state


def saved_steps(workdir):
  return sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir())


def run_python(script, timeout=None):
  tests = pathlib.Path(__file__).parent
  path = os.pathsep.join([str(tests), str(tests.parent)])
  return subprocess.run(
    [sys.executable, '-c', script],
    env={**os.environ, 'PYTHONPATH': path},
    timeout=timeout,
    capture_output=True,
    text=True,
  )


def assert_bit_equal(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)
  assert jax.tree.map(lambda x: x.dtype, tree) == jax.tree.map(
    lambda x: x.dtype, other
  )


def test_restore_gives_back_what_was_saved(tmp_path):
  state = save_one(tmp_path, make_state(step=2**24 + 1))
  with open_run(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 2**24 + 1
    restored, data, meta = checkpointer.restore(shapes_of(state))
  assert_bit_equal(restored, state)
  assert type(restored.opt_state[1][0]) is type(state.opt_state[1][0])
  assert data == DATA
  assert meta['tokens'] == 9
  assert meta['step'] == 2**24 + 1


def test_a_save_is_not_changed_by_updating_in_place(tmp_path):
  state = make_state()
  expected = jax.tree.map(np.array, state.params)
  update = jax.jit(
    lambda params: jax.tree.map(lambda x: x - 1, params), donate_argnums=0
  )
  with open_run(tmp_path) as checkpointer:
    checkpointer.save(state, DATA, {}, force=True)
    params = update(state.params)
    for _ in range(3):
      params = update(params)
  assert_bit_equal(checkpoint.load_params(tmp_path)[0], expected)


@pytest.mark.parametrize(
  'sizes, path, saved, expected, field',
  [
    (
      {'num_layers': 3},
      'layer_2/attention/query/kernel',
      'nothing',
      'float32[8, 4, 2]',
      'num_layers: saved 2, expected 3',
    ),
    (
      {'num_layers': 1},
      'layer_1/attention/query/kernel',
      'float32[8, 4, 2]',
      'nothing',
      'num_layers: saved 2, expected 1',
    ),
    (
      {'num_kv_heads': 1},
      'layer_0/attention/key/kernel',
      'float32[8, 2, 2]',
      'float32[8, 1, 2]',
      'num_kv_heads: saved 2, expected 1',
    ),
    (
      {'embed_dim': 16},
      'embed/embedding',
      'float32[16, 8]',
      'float32[16, 16]',
      'embed_dim: saved 8, expected 16',
    ),
    (
      {'vocab_size': 17},
      'embed/embedding',
      'float32[16, 8]',
      'float32[17, 8]',
      'vocab_size: saved 16, expected 17',
    ),
  ],
)
def test_another_model_is_refused_by_path_shapes_and_field(
  tmp_path, sizes, path, saved, expected, field
):
  save_one(tmp_path)
  with open_run(tmp_path) as checkpointer:
    with pytest.raises(ValueError) as error:
      checkpointer.restore(shapes_of(make_state(**sizes)))
  line = str(error.value)
  assert f'params/{path}: saved {saved}, expected {expected}' in line
  assert f'model.{field}' in line
  assert '\n' not in line
  with pytest.raises(ValueError, match='does not fit'):
    checkpoint.load_params(tmp_path, template=make_params(**sizes))


def test_stacked_layers_are_refused(tmp_path):
  state = save_one(tmp_path)
  layers = [state.params[f'layer_{i}'] for i in range(2)]
  stacked = {
    'embed': state.params['embed'],
    'layers': jax.tree.map(lambda *x: jnp.stack(x), *layers),
  }
  with pytest.raises(ValueError, match='layers/attention/key/kernel: saved no'):
    checkpoint.load_params(tmp_path, template=stacked)


def test_another_type_is_refused(tmp_path):
  state = save_one(tmp_path)
  template = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
  with pytest.raises(ValueError, match=r'saved float32.*expected bfloat16'):
    checkpoint.load_params(tmp_path, template=template)


def test_another_optimizer_is_refused(tmp_path):
  save_one(tmp_path)
  with open_run(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match=r'opt_state/.*Look at optim'):
      checkpointer.restore(shapes_of(make_state(optimizer=optax.lion(1e-3))))


def test_eight_devices_save_and_one_restores(tmp_path):
  mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))

  def split(x):
    axis = PartitionSpec('fsdp') if x.ndim and x.shape[0] == 8 else None
    return jax.device_put(x, NamedSharding(mesh, axis or PartitionSpec()))

  state = jax.tree.map(split, make_state())
  kernel = state.params['layer_0']['attention']['query']['kernel']
  assert len(kernel.sharding.device_set) == 8
  save_one(tmp_path, state)
  one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  template = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state
  )
  with open_run(tmp_path) as checkpointer:
    restored, _, _ = checkpointer.restore(template)
  assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {one}
  assert_bit_equal(restored, state)

  params, _ = checkpoint.load_params(tmp_path, sharding=one)
  assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {one}
  assert_bit_equal(params, state.params)


def test_parameters_open_without_the_optimizer(tmp_path):
  state = save_one(tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints' / '1' / 'opt_state')
  params, meta = checkpoint.load_params(tmp_path)
  assert_bit_equal(params, state.params)
  assert meta['step'] == 1
  params, _ = checkpoint.load_params(
    tmp_path / 'checkpoints' / '1', template=shapes_of(state).params
  )
  assert_bit_equal(params, state.params)
  with open_run(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match='no optimizer state.*init_from'):
      checkpointer.restore(shapes_of(state))


def test_parameters_alone_are_saved_once(tmp_path):
  params = jax.tree.map(np.asarray, make_params())
  checkpoint.save_params(tmp_path, params, {'parent': 'x'}, step=4)
  loaded, meta = checkpoint.load_params(tmp_path)
  assert_bit_equal(loaded, params)
  assert meta == {'parent': 'x', 'step': 4}
  with pytest.raises(ValueError, match='exists already'):
    checkpoint.save_params(tmp_path, params, {}, step=4)


def test_latest_and_best_are_kept_independently(tmp_path):
  state = make_state()
  losses = {1: math.nan, 2: 1.0, 3: None, 4: 2.0, 5: 3.0, 6: 5.0, 7: None}
  with open_run(tmp_path, keep_latest=2, keep_best=2) as checkpointer:
    for step, loss in losses.items():
      state = state.replace(step=jnp.int32(step))
      checkpointer.save(state, DATA, {}, eval_loss=loss, force=True)
  assert saved_steps(tmp_path) == [2, 4, 6, 7]
  assert checkpoint.load_params(tmp_path, 'best')[1]['step'] == 2
  assert checkpoint.load_params(tmp_path, 'latest')[1]['step'] == 7
  assert checkpoint.load_params(tmp_path, 4)[1]['eval_loss'] == 2.0

  with open_run(tmp_path, keep_latest=2, keep_best=2) as checkpointer:
    state = state.replace(step=jnp.int32(8))
    checkpointer.save(state, DATA, {}, eval_loss=1.5, force=True)
  assert saved_steps(tmp_path) == [2, 7, 8]


@pytest.mark.parametrize(
  'keep_latest, keep_best, kept',
  [(0, 0, [3]), (1, None, [3]), (None, 0, [1, 2, 3]), (1, 1, [1, 3])],
)
def test_keeping_none_and_keeping_all(tmp_path, keep_latest, keep_best, kept):
  state = make_state()
  with open_run(tmp_path, 1, keep_latest, keep_best) as checkpointer:
    for step in (1, 2, 3):
      state = state.replace(step=jnp.int32(step))
      assert checkpointer.save(state, DATA, {}, eval_loss=float(step))
  assert saved_steps(tmp_path) == kept


def test_saves_at_multiples_when_forced_and_never_twice(tmp_path):
  state = make_state()
  with open_run(tmp_path, 5, None, 0) as checkpointer:
    for step in (1, 4, 5, 5, 6, 11, 12):  # a call may pass over a multiple
      state = state.replace(step=jnp.int32(step))
      checkpointer.save(state, DATA, {})
    assert checkpointer.save(state, DATA, {}, force=True)
    assert not checkpointer.save(state, DATA, {}, force=True)
  assert saved_steps(tmp_path) == [5, 11, 12]
  with open_run(tmp_path, 5, None, 0) as checkpointer:
    assert not checkpointer.save(state, DATA, {}, force=True)


def test_a_failed_final_save_ends_the_process_with_its_step(tmp_path):
  script = f"""
import pathlib, shutil
import checkpoint_test
workdir = pathlib.Path({str(tmp_path)!r})
state = checkpoint_test.make_state(step=5)
with checkpoint_test.open_run(workdir) as checkpointer:
  checkpointer.save(state, {{}}, {{}})
  checkpointer.wait()
  shutil.rmtree(workdir / 'checkpoints')
  (workdir / 'checkpoints').write_text('in the way')
  checkpointer.save(state.replace(step=7), {{}}, {{}}, force=True)
"""
  done = run_python(script, timeout=100)
  assert done.returncode == 1
  last = done.stderr.splitlines()[-1]
  assert last.startswith('OSError: Saving the checkpoint of step 7 in')


def test_a_save_that_fails_in_the_background_raises_at_exit(
  tmp_path, monkeypatch
):
  with pytest.raises(OSError, match='step 5 in .*: disk full'):
    with open_run(tmp_path) as checkpointer:

      def fail():
        raise RuntimeError('disk full')

      monkeypatch.setattr(
        checkpointer._manager, '_wait_for_checkpointers', fail
      )
      assert checkpointer.save(make_state(step=5), DATA, {})


def test_an_error_in_the_loop_still_flushes_the_pending_save(tmp_path):
  state = make_state(step=5)
  with pytest.raises(ZeroDivisionError):
    with open_run(tmp_path) as checkpointer:
      checkpointer.save(state, DATA, {})
      raise ZeroDivisionError
  assert_bit_equal(checkpoint.load_params(tmp_path)[0], state.params)


def test_incomplete_checkpoints_are_named_and_do_not_block(tmp_path):
  state = save_one(tmp_path, make_state(step=5))
  root = tmp_path / 'checkpoints'
  (root / '9' / 'params').mkdir(parents=True)
  with pytest.raises(ValueError, match=r'step=9 \(incomplete: 9\).*of 5,'):
    checkpoint.load_params(tmp_path, 9)
  assert checkpoint.steps(tmp_path) == [5]
  with open_run(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 5
    assert checkpointer.save(
      state.replace(step=jnp.int32(9)), DATA, {}, force=True
    )
  assert checkpoint.steps(tmp_path) == [5, 9]


def test_damaged_arrays_are_an_error_of_one_line(tmp_path):
  save_one(tmp_path)
  params = tmp_path / 'checkpoints' / '1' / 'params'
  for path in params.rglob('d/*'):
    path.write_bytes(b'')
  with pytest.raises(ValueError, match='is damaged') as error:
    checkpoint.load_params(tmp_path)
  assert '\n' not in str(error.value)


def test_missing_checkpoints_are_errors_that_say_what_there_is(tmp_path):
  with pytest.raises(ValueError, match='has no checkpoint;'):
    checkpoint.load_params(tmp_path)
  save_one(tmp_path)
  with pytest.raises(ValueError, match='of step=3; choose one of 1,'):
    checkpoint.load_params(tmp_path, 3)
  with pytest.raises(ValueError, match='none is the best'):
    checkpoint.load_params(tmp_path, 'best')


def test_a_path_may_be_relative_or_at_home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  state = save_one(tmp_path / 'runs/x')
  for path in ('./runs/x', 'runs/../runs/x', '~/runs/x'):
    assert_bit_equal(checkpoint.load_params(path)[0], state.params)


def test_orbax_is_quiet(tmp_path):
  script = f"""
import absl.logging, jax.numpy as jnp
from gqa import checkpoint
absl.logging.set_verbosity(absl.logging.INFO)
checkpoint.save_params({str(tmp_path)!r}, {{'a': jnp.ones(3)}}, {{}})
checkpoint.load_params({str(tmp_path)!r})
absl.logging.info('ours')
"""
  done = run_python(script)
  assert done.returncode == 0
  assert len(done.stderr.splitlines()) == 1 and 'ours' in done.stderr
