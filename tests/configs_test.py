"""Every config is valid, and the large ones have their shapes without memory."""

import importlib
import math
import pathlib
import types

import jax
import pytest

from gqa import model, optim, run, sharding, update
from gqa.config import ModelConfig

KEY = jax.random.key(0)

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'
# uptrain.py has no model of its own.
NAMES = sorted({path.stem for path in CONFIGS.glob('*.py')} - {'uptrain'})
PARAMETERS = {'gpt2_small': 124_475_904, 'llama_1b': 1_100_048_384}


def load(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  return config, ModelConfig.from_dict(config.model.to_dict())


@pytest.mark.parametrize('name', NAMES)
def test_config_is_valid_and_fits_its_mesh(name):
  config, model_config = load(name)
  config.data.path = config.data.path or 'somewhere'
  run.check_run(config)
  optimizer, _ = optim.make_optimizer(config.optim, config.train.num_steps)
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_batch(config.train.batch_size, mesh, config.train.grad_accum)
  state = jax.eval_shape(
    lambda: update.init_state(model_config, optimizer, KEY)
  )
  shardings = sharding.state_shardings(state, mesh, model_config)
  largest = max(jax.tree.leaves(state.params), key=lambda x: x.size)
  split = jax.tree.leaves(shardings.params)[
    jax.tree.leaves(state.params).index(largest)
  ]
  parts = largest.size / math.prod(split.shard_shape(largest.shape))
  assert parts == config.mesh.fsdp * config.mesh.model


@pytest.mark.parametrize('name', PARAMETERS)
def test_large_config_has_its_published_size(name):
  _, config = load(name)
  params = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  assert count == PARAMETERS[name]


@pytest.mark.parametrize('name', PARAMETERS)
@pytest.mark.parametrize('model_axis', [1, 2, 8])
def test_large_config_traces_a_sharded_update_without_memory(name, model_axis):
  config, _ = load(name)
  config.model.update(vocab_size=config.model.vocab_size, num_layers=2)
  if name == 'gpt2_small' and model_axis == 8:
    config.model.num_heads = 16  # 12 do not split over 8
  config.mesh.update(data=1, fsdp=8 // model_axis, model=model_axis)
  model_config = ModelConfig.from_dict(config.model.to_dict())
  optimizer, step = update.make_train_step(config, model_config)
  state = jax.eval_shape(
    lambda: update.init_state(model_config, optimizer, KEY)
  )
  mesh = sharding.make_mesh(types.SimpleNamespace(**config.mesh.to_dict()))
  shardings = sharding.state_shardings(state, mesh, model_config)
  shape = (1, config.train.batch_size, config.train.seq_len)
  ints = jax.ShapeDtypeStruct(shape, 'int32')
  batch = dict.fromkeys(('tokens', 'targets', 'positions', 'segments'), ints)
  batch['weights'] = jax.ShapeDtypeStruct(shape, 'float32')
  with jax.set_mesh(mesh):
    steps = update.Steps(step, mesh, shardings)
    new, _ = jax.eval_shape(steps.update, state, batch, KEY)
  assert jax.tree.map(lambda x: x.shape, new) == jax.tree.map(
    lambda x: x.shape, state
  )
