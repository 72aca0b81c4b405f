"""Converting a model layer by layer, on a text and without one."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from gqa import cost, data, evaluate, model, sharding
from gqa.config import ModelConfig
from gqa.convert import (
  budget,
  calibrate,
  disguise,
  layers,
  methods,
  refit,
  walk,
)
from gqa.convert import heads as heads_lib
from gqa.convert.methods import Options

LLAMA = ModelConfig(
  vocab_size=31,
  num_layers=2,
  embed_dim=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=16,
  max_len=16,
)
GPT2 = dataclasses.replace(
  LLAMA,
  position='learned',
  norm='layernorm',
  mlp='gelu',
  qkv_bias=True,
  out_bias=True,
  mlp_bias=True,
)
# Only a part of a head is rotated, and MLP and attention read the same stream.
NEOX = dataclasses.replace(
  GPT2, position='rope', rope_fraction=0.67, parallel_residual=True
)
CONFIGS = {'llama': LLAMA, 'gpt2': GPT2, 'neox': NEOX}
EACH_CONFIG = pytest.mark.parametrize('name', CONFIGS)
THOROUGH = Options(
  method='low_rank', grouping='similarity', sequential=True, refit=True
)


def draw_params(config, seed=0):
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  rng = np.random.default_rng(seed)
  draw = lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.3
  params = jax.tree.map(draw, shapes)
  for layer in [params, *(params[f'layer_{i}'] for i in (0, 1))]:
    for name in ('attention_norm', 'mlp_norm', 'final_norm'):
      if name in layer:
        layer[name]['scale'] += 1
  return params


def draw_text(batches=5, seed=1):
  """Batches of two windows of twelve tokens, the second of two documents."""
  rng = np.random.default_rng(seed)
  second = np.arange(12) >= 7
  segments = np.stack([np.ones(12), 1 + second]).astype(np.int32)
  positions = np.stack([np.arange(12), np.arange(12) - 7 * second])
  return [
    {
      'tokens': rng.integers(0, 31, (2, 12), dtype=np.int32),
      'targets': rng.integers(0, 31, (2, 12), dtype=np.int32),
      'positions': positions.astype(np.int32),
      'segments': segments,
      'weights': (rng.random((2, 12)) < 0.8).astype(np.float32),
    }
    for _ in range(batches)
  ]


@pytest.fixture(scope='module')
def text():
  return draw_text()


def logits_of(config, params, batch):
  return _logits(config, params, batch['tokens'], batch['segments'])


def _logits(config, params, tokens, segments):
  apply = jax.jit(model.Decoder(config).apply)
  return np.asarray(apply({'params': params}, tokens, None, segments))


@EACH_CONFIG
def test_a_disguised_grouped_model_is_recovered(name, text):
  config = CONFIGS[name]
  params = draw_params(config)
  multi_head, parent = disguise.expand(params, config, np.random.default_rng(2))
  expected = logits_of(config, params, text[0])
  np.testing.assert_allclose(
    logits_of(parent, multi_head, text[0]), expected, atol=2e-5
  )
  for method, thorough in itertools.product(('aligned', 'low_rank'), (0, 1)):
    options = dataclasses.replace(
      THOROUGH, method=method, sequential=bool(thorough), refit=bool(thorough)
    )
    back, config_back, _ = walk.convert(
      multi_head, parent, (2, 2), options, text if thorough else None
    )
    assert config_back == config
    np.testing.assert_allclose(
      logits_of(config, back, text[0]), expected, atol=1e-4
    )
  mean = Options(method='mean', grouping='similarity')
  failed, _, _ = walk.convert(multi_head, parent, (2, 2), mean)
  assert np.abs(logits_of(config, failed, text[0]) - expected).max() > 0.1


@pytest.mark.parametrize('method', methods.METHODS)
def test_as_many_heads_as_before_are_the_same_model(method, text):
  params = draw_params(LLAMA)
  options = dataclasses.replace(THOROUGH, method=method, reconstruct_steps=2)
  same, config, reports = walk.convert(params, LLAMA, (2, 2), options, text)
  assert config == LLAMA and len(reports) == 2
  jax.tree.map(np.testing.assert_array_equal, same, params)


@EACH_CONFIG
def test_parameters_and_cache_shrink_by_the_formula(name):
  config = CONFIGS[name]
  params = draw_params(config)
  options = Options(method='mean')
  small, new, _ = walk.convert(params, config, (2, 1), options)
  assert new.num_kv_heads == (2, 1)
  jax.tree.map(
    np.testing.assert_array_equal, small['layer_0'], params['layer_0']
  )
  inputs = config.embed_dim + config.qkv_bias
  lost = 2 * config.head_dim * inputs  # a key and a value of one layer
  count = model.param_count
  assert count(params) - count(small) == lost
  shapes = jax.eval_shape(lambda: model.init_params(new, jax.random.key(0)))
  same = lambda x, shape: x.shape == shape.shape and x.dtype == shape.dtype
  assert jax.tree.all(jax.tree.map(same, small, shapes))
  size = lambda c: cost.kv_bytes_per_token(c, 4)
  assert size(config) - size(new) == 2 * config.head_dim * 4


@EACH_CONFIG
@pytest.mark.parametrize('method', ['mean', 'aligned_renorm', 'low_rank'])
def test_a_refit_layer_is_never_worse(name, method, text):
  config = CONFIGS[name]
  options = dataclasses.replace(THOROUGH, method=method)
  for sequential in (False, True):
    _, _, reports = walk.convert(
      draw_params(config),
      config,
      (1, 1),
      dataclasses.replace(options, sequential=sequential),
      text,
    )
    for report in reports:
      assert report['output_error'] <= report['output_error_merged'] * (
        1 + 1e-6
      )


def test_reconstruction_comes_nearer_than_closed_forms(text):
  params = draw_params(LLAMA)
  errors = []
  for steps in (0, 30):
    options = dataclasses.replace(THOROUGH, reconstruct_steps=steps)
    _, _, reports = walk.convert(params, LLAMA, (1, 1), options, text)
    errors.append(reports[0]['output_error'])
  assert errors[1] < 0.95 * errors[0]


@EACH_CONFIG
def test_a_layer_that_is_corrected_gives_the_parents_stream(name, text):
  """If its attention gave exactly what it is asked for."""
  config, params = CONFIGS[name], draw_params(CONFIGS[name])
  one = walk.Walk(config, params, text, THOROUGH)
  layer = params['layer_0']
  one.look(0, layer)
  attention, _ = methods.merge_layer(
    layer['attention'],
    config,
    1,
    THOROUGH,
    calibrate.moments_without_text(config, layer),
  )
  one.go_on(0, 1, layer | {'attention': attention}, True)
  before = one.converted
  one.look(1, params['layer_1'])
  shape = layers.shape_of(config, 1, 2)
  for i, place in enumerate(one.places):
    assert np.abs(before[i] - one.parent[i]).max() > 0.01
    stream = layers.after(
      shape, params['layer_1'], before[i], place, one.targets[i]
    )
    np.testing.assert_allclose(stream, one.parent[i], atol=1e-4)


@EACH_CONFIG
def test_parts_of_a_layer_fit_together(name, text):
  config, params = CONFIGS[name], draw_params(CONFIGS[name])
  layer, shape = params['layer_0'], layers.shape_of(CONFIGS[name], 0, 2)
  x, place = layers.enter(config, params, text[0])
  mixed, after = layers.through(shape, layer, x, place)
  contexts = layers.contexts(shape, layer, x, place)
  weights = refit.to_matrix(layer['attention']['out']).astype(np.float32)
  np.testing.assert_allclose(refit.apply(contexts, weights), mixed, atol=1e-5)
  np.testing.assert_allclose(
    layers.after(shape, layer, x, place, mixed), after, atol=1e-5
  )
  moments = calibrate.moments(shape, layer, [x], [place], np.zeros(0))
  x = np.asarray(x, np.float64).reshape(-1, config.embed_dim)
  scale = layer['attention_norm']['scale']
  if config.norm == 'layernorm':
    x = x - x.mean(axis=-1, keepdims=True)
  h = x * scale / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
  if config.norm == 'layernorm':
    h = h + layer['attention_norm']['bias']
  if config.qkv_bias:
    h = np.concatenate([h, np.ones_like(h[:, :1])], axis=-1)
  np.testing.assert_allclose(moments.mean, h.mean(axis=0), atol=1e-5)
  np.testing.assert_allclose(moments.second, h.T @ h / len(h), atol=1e-5)


@EACH_CONFIG
def test_frequencies_are_those_of_the_models_rotation(name):
  config = CONFIGS[name]
  found = layers.frequencies(config, draw_params(config))
  j = np.arange(config.rope_dim // 2)
  expected = 10_000.0 ** (-2 * j / max(config.rope_dim, 1))
  np.testing.assert_allclose(found[False], expected, rtol=1e-5)


@EACH_CONFIG
def test_the_loss_is_that_of_the_whole_model(name, text):
  config, params = CONFIGS[name], draw_params(CONFIGS[name])
  mesh = sharding.make_mesh(
    types.SimpleNamespace(data=1, fsdp=1, model=1), jax.devices()[:1]
  )
  tokens = types.SimpleNamespace(num_targets=7, bytes=9)
  batches = [batch | {'index': np.arange(2)} for batch in text]
  step = evaluate.make_eval_step(config)
  expected = evaluate.evaluate(step, params, batches, mesh, tokens)
  found = calibrate.loss(config, params, text, tokens)
  assert found == pytest.approx(expected, rel=1e-5)


def test_normalised_queries_and_keys_convert_by_their_mean(text):
  """A norm over all heads has a scale for each, which goes where it goes."""
  for axes in ('head', 'heads'):
    config = dataclasses.replace(LLAMA, qk_norm=True, qk_norm_axes=axes)
    params = draw_params(config)
    wide = {}
    for name, scale in params['layer_0']['attention'].items():
      wide[name] = scale
    heads = disguise.repeat(heads_lib.from_params(wide), 2)
    wide = heads_lib.to_params(heads, wide)
    if axes == 'heads':
      scale = wide['key_norm']['scale'].reshape(2, 6)
      wide['key_norm'] = {'scale': np.repeat(scale, 2, axis=0).reshape(-1)}
    options = dataclasses.replace(THOROUGH, grouping='contiguous')
    parent = dataclasses.replace(config, num_kv_heads=None)
    back, report = methods.merge_layer(
      wide,
      parent,
      2,
      options,
      calibrate.moments_without_text(config, params['layer_0']),
    )
    assert report['key_method'] == 'mean_renorm'
    both = [
      layers.through(
        layers.shape_of(config, 0, 2),
        params['layer_0'] | {'attention': attention},
        *layers.enter(config, params, text[0]),
      )[0]
      for attention in (back, params['layer_0']['attention'])
    ]
    np.testing.assert_allclose(*both, atol=1e-5)


def test_no_perturbation_beats_the_refit():
  rng = np.random.default_rng(0)
  planted = rng.normal(size=(8, 5))
  f = rng.normal(size=(6, 2, 10, 4, 2)).astype(np.float32)
  y = f.reshape(6, 2, 10, 8) @ planted + rng.normal(size=(6, 2, 10, 5))
  scales = rng.random((6, 2, 10)).astype(np.float32)
  parts = refit.sums(f, y.astype(np.float32), scales, bias=False)
  start = planted + rng.normal(size=planted.shape)
  weights, ridge = refit.fit(parts, start)
  assert refit.error(parts, weights) < 0.5 * refit.error(parts, start)
  energy = sum(part.energy for part in parts)
  strength = ridge * sum(np.trace(part.inner) for part in parts) / 8 / energy

  def objective(w):
    return refit.error(parts, w) + strength * np.square(w - start).sum()

  for size in np.repeat([1e-4, 1e-2, 1.0], 20):
    other = weights + size * rng.normal(size=weights.shape)
    assert objective(other) > objective(weights)


def test_a_refit_that_would_not_last_is_not_made():
  """On noise the batches that are kept for checking speak against it."""
  rng = np.random.default_rng(1)
  f = rng.normal(size=(4, 1, 9, 4, 2)).astype(np.float32)
  y = rng.normal(size=(4, 1, 9, 5)).astype(np.float32)
  start = np.zeros((8, 5))
  weights, ridge = refit.fit(
    refit.sums(f, y, np.ones((4, 1, 9)), bias=False), start
  )
  assert ridge is None
  np.testing.assert_array_equal(weights, start)


def test_a_budget_is_divided_so_that_damage_is_least():
  rng = np.random.default_rng(2)
  config = dataclasses.replace(LLAMA, num_layers=4, num_kv_heads=None)
  size = budget.head_bytes(config)
  assert size * 16 == cost.kv_bytes_per_token(config, 4)
  damages = [{4: 0.0, 2: a, 1: a + b} for a, b in rng.random((4, 2))]
  for heads in range(4, 17):
    chosen = budget.choose(config, damages, heads * size + size - 1)
    assert sum(chosen) <= heads
    total = lambda choice: sum(
      options[k] for options, k in zip(damages, choice, strict=True)
    )
    assert total(chosen) == min(
      total(choice)
      for choice in itertools.product((4, 2, 1), repeat=4)
      if sum(choice) <= heads
    )
  with pytest.raises(ValueError, match=f'at least {4 * size}'):
    budget.choose(config, damages, 4 * size - 1)


def test_damage_is_measured_for_every_number_of_heads(text):
  found = walk.damages(draw_params(LLAMA), LLAMA, THOROUGH, text)
  for options in found:
    assert list(options) == [2, 1]
    assert options[2] == 0 < options[1] < 1


@pytest.mark.parametrize(
  ('heads', 'message'),
  [((2,), '2 layers'), ((2, 3), 'layer 1; choose one of .2, 1.')],
)
def test_impossible_numbers_of_heads_are_refused(heads, message):
  with pytest.raises(ValueError, match=message):
    walk.convert({}, LLAMA, heads, Options())


def test_what_needs_a_text_says_so():
  with pytest.raises(ValueError, match='refit=True needs a text'):
    walk.convert({}, LLAMA, (1, 1), Options(refit=True))


def test_windows_are_spread_over_the_text_and_held_out_from_its_end():
  ids = np.arange(161, dtype=np.uint16) % 256
  manifest = {
    'splits': {'text': {'documents': 1, 'bytes': 161}},
    'source': 'x',
  }
  tokens = data.TokenFile(ids, np.array([0]), manifest, 'text')
  found = calibrate.open_text(
    tokens, 8, num_tokens=40, held_out_tokens=24, batch_size=2
  )
  starts = [b['tokens'][:, 0].tolist() for b in found.calibration]
  assert starts == [[0, 24], [48, 80]]
  held_out = np.concatenate([b['targets'] for b in found.held_out])
  weights = np.concatenate([b['weights'] for b in found.held_out])
  assert weights.sum() == 24
  assert sorted(held_out[weights > 0]) == list(range(137, 161))
  with pytest.raises(ValueError, match='seq_len=200'):
    calibrate.open_text(tokens, 200, 1, 1, 1)
