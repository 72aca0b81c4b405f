"""Schedules against closed forms; what decays; moments; clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from gqa import optim


def config_with(**fields):
  config = base.get_config().optim
  config.update(fields)
  return config


def one_layer(prefix=()):
  """A tree with every role; `prefix` is the axis of stacked layers, if any."""

  def ones(*shape):
    return np.ones((*prefix, *shape), np.float32)

  return {
    'attention_norm': {'scale': ones(4), 'bias': ones(4)},
    'attention': {
      'query': {'kernel': ones(4, 2, 3), 'bias': ones(2, 3)},
      'query_norm': {'scale': ones(3)},
      'out': {'kernel': ones(2, 3, 4), 'bias': ones(4)},
    },
    'mlp': {'up': {'kernel': ones(4, 5), 'bias': ones(5)}},
  }


def params_tree(stacked):
  if stacked:
    layers = {'layers': one_layer((2,))}
  else:
    layers = {'layer_0': one_layer(), 'layer_1': one_layer()}
  return {
    'embed': {'embedding': np.ones((7, 4), np.float32)},
    'position_embed': {'embedding': np.ones((6, 4), np.float32)},
    **layers,
    'final_norm': {'scale': np.ones(4, np.float32)},
    'head': {'kernel': np.ones((4, 7), np.float32)},
  }


def step(config, params, grads, num_steps=10):
  optimizer, _ = optim.make_optimizer(config, num_steps)

  @jax.jit
  def update(params, grads):
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return jax.tree.map(jnp.add, params, updates)

  return update(params, grads)


@pytest.mark.parametrize(
  'name, expected',
  [
    # peak 8, 4 of 12 steps of warm-up, end 8 / 4 at count 12.
    ('constant', [2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]),
    ('linear', [2, 4, 6, 8, 8, 7.25, 6.5, 5.75, 5, 4.25, 3.5, 2.75, 2]),
    ('wsd', [2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 6, 4, 2]),
    (
      'cosine',
      [2, 4, 6, 8]
      + [2 + 6 * (1 + np.cos(np.pi * i / 8)) / 2 for i in range(9)],
    ),
  ],
)
def test_schedule_has_its_closed_form(name, expected):
  config = config_with(
    schedule=name,
    learning_rate=8.0,
    warmup_steps=4,
    end_fraction=0.25,
    decay_fraction=0.25,
  )
  schedule = optim.make_schedule(config, 12)
  np.testing.assert_allclose(schedule(np.arange(13)), expected, rtol=1e-6)
  np.testing.assert_allclose(schedule(100), expected[-1], rtol=1e-6)
  np.testing.assert_allclose(
    jax.jit(schedule)(jnp.int32(9)), expected[9], rtol=1e-6
  )


@pytest.mark.parametrize('name', ['constant', 'linear', 'wsd', 'cosine'])
@pytest.mark.parametrize('warmup', [0, 6])
def test_schedule_without_warmup_or_without_decay_starts_right(name, warmup):
  config = config_with(
    schedule=name, learning_rate=0.3, warmup_steps=warmup, decay_fraction=0.0
  )
  schedule = optim.make_schedule(config, 6)
  np.testing.assert_allclose(schedule(0), 0.3 / max(warmup, 1), rtol=1e-6)
  assert np.all(np.isfinite(schedule(np.arange(7))))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'name': 'adam'}, "optim.name='adam' .*adamw.*did you mean 'adamw'"),
    ({'schedule': 'cosin'}, "optim.schedule='cosin' .*mean 'cosine'"),
    ({'schedule': 'step'}, "optim.schedule='step' must be one of cosine, "),
    ({'warmup_steps': 11}, 'optim.warmup_steps=11 .*train.num_steps=10'),
    ({'warmup_steps': -1}, 'optim.warmup_steps=-1 must be from 0'),
    ({'end_fraction': 1.5}, r'optim.end_fraction=1.5 must be in \[0, 1\]'),
    ({'decay_fraction': -0.1}, r'optim.decay_fraction=-0.1 must be in'),
    (
      {'schedule': 'wsd', 'decay_fraction': 0.5, 'warmup_steps': 6},
      'optim.decay_fraction=0.5 is 5 steps.*optim.warmup_steps=6 .*=10',
    ),
    ({'learning_rate': -1.0}, 'optim.learning_rate=-1.0 must be'),
    ({'learning_rate': float('nan')}, 'optim.learning_rate=nan must be'),
    ({'weight_decay': -0.1}, 'optim.weight_decay=-0.1 must be'),
    ({'clip_norm': -1.0}, 'optim.clip_norm=-1.0 must be'),
    ({'eps': 0.0}, 'optim.eps=0.0 must be'),
    ({'betas': (0.9, 1.0)}, r'optim.betas=\(0.9, 1.0\) must be'),
    ({'betas': (0.9,)}, r'optim.betas=\(0.9,\) must be two'),
  ],
)
def test_invalid_field_is_named_with_its_value_and_rule(fields, message):
  config = config_with(warmup_steps=2)
  config.update(fields)
  with pytest.raises(ValueError, match=message):
    optim.make_optimizer(config, 10)


def test_no_steps_is_an_error():
  with pytest.raises(ValueError, match='train.num_steps=0 must be at least 1'):
    optim.make_schedule(config_with(), 0)


@pytest.mark.parametrize('stacked', [False, True])
@pytest.mark.parametrize('decay_embeddings', [False, True])
@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'lion'])
def test_only_kernels_and_chosen_embeddings_decay(
  name, decay_embeddings, stacked
):
  config = config_with(
    name=name,
    learning_rate=0.1,
    weight_decay=0.1,
    schedule='constant',
    warmup_steps=0,
    decay_embeddings=decay_embeddings,
  )
  params = params_tree(stacked)
  after = step(config, params, jax.tree.map(np.zeros_like, params))
  for path, value in jax.tree_util.tree_leaves_with_path(after):
    role = path[-1].key
    if role == 'kernel' or (role == 'embedding' and decay_embeddings):
      np.testing.assert_allclose(value, 0.99, rtol=1e-6, err_msg=str(path))
    else:
      np.testing.assert_array_equal(value, 1.0, err_msg=str(path))


def test_parameter_without_a_role_is_refused():
  with pytest.raises(ValueError, match='parameter adapter/lora: .*one of'):
    optim.decay_mask({'adapter': {'lora': jnp.ones(2)}}, True)


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'lion'])
def test_first_update_has_the_size_of_the_learning_rate(name):
  config = config_with(
    name=name,
    learning_rate=0.01,
    schedule='constant',
    warmup_steps=4,
    weight_decay=0.0,
  )
  params = {'head': {'kernel': np.full((64, 64), 5, np.float32)}}
  after = step(config, params, jax.tree.map(np.ones_like, params))
  np.testing.assert_allclose(after['head']['kernel'], 5 - 0.01 / 4, rtol=1e-6)


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'lion'])
def test_every_moment_is_float32(name):
  optimizer, _ = optim.make_optimizer(config_with(name=name, warmup_steps=0), 9)
  state = jax.eval_shape(optimizer.init, params_tree(False))
  moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape]
  assert moments and all(leaf.dtype == jnp.float32 for leaf in moments)


def test_small_updates_add_up():
  config = config_with(
    learning_rate=6e-4, schedule='constant', warmup_steps=0, weight_decay=0.0
  )
  optimizer, _ = optim.make_optimizer(config, 100)
  params = {'head': {'kernel': jnp.ones((1, 1))}}

  def body(carry, _):
    params, state = carry
    updates, state = optimizer.update(params_gradient, state, params)
    return (jax.tree.map(jnp.add, params, updates), state), None

  params_gradient = jax.tree.map(lambda p: jnp.full_like(p, 0.3), params)
  (params, _), _ = jax.lax.scan(
    body, (params, optimizer.init(params)), length=100
  )
  np.testing.assert_allclose(params['head']['kernel'], 0.94, atol=1e-4)


def test_clipping_scales_to_the_norm_and_leaves_small_gradients():
  assert optim.clip_factor(jnp.float32(5.0), 1.0) == np.float32(0.2)
  for max_norm in (0, 5.0, 6.0):
    assert optim.clip_factor(jnp.float32(5.0), max_norm) == 1
  assert optim.clip_factor(jnp.float32(0.0), 1.0) == 1


@pytest.mark.parametrize('branch', [False, True])
def test_update_happens_only_if_finite(branch):
  old = {'params': jnp.array([1.0, 2.0]), 'moments': {'count': jnp.int32(3)}}
  update = lambda old: jax.tree.map(lambda x: 2 * x, old)
  step = jax.jit(lambda finite: optim.update_if(finite, update, old, branch))
  jax.tree.map(np.testing.assert_array_equal, step(True), update(old))
  jax.tree.map(np.testing.assert_array_equal, step(False), old)
