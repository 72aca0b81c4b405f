"""What the cache holds, where, and how many bytes that takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_test import make, random_params, random_tokens

from gqa import cache, decode
from gqa.config import ModelConfig

WINDOWED = make(sliding_window=5, num_kv_heads=(1, 4))
RAGGED = jnp.array([0, 4], jnp.int32)


def kinds_of(config):
  return cache.KINDS if config.sliding_window else ('full', 'int8')


extend = jax.jit(decode.extend, static_argnums=1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_are_those_of_the_formula(data):
  draw = lambda strategy: data.draw(strategy)
  num_heads = draw(st.sampled_from([1, 2, 4, 6]))
  heads = st.sampled_from([d for d in range(1, 7) if num_heads % d == 0])
  num_layers = draw(st.integers(1, 4))
  config = ModelConfig(
    vocab_size=8,
    num_layers=num_layers,
    embed_dim=draw(st.integers(1, 40)),
    num_heads=num_heads,
    num_kv_heads=draw(
      st.one_of(st.none(), heads, st.tuples(*[heads] * num_layers))
    ),
    head_dim=2 * draw(st.integers(1, 64)),
    mlp_dim=4,
    max_len=1 << 20,
    sliding_window=draw(st.integers(1, 10_000)),
    dtype=draw(st.sampled_from(['float32', 'bfloat16'])),
  )
  kind = draw(st.sampled_from(cache.KINDS))
  dtype = None
  if kind != 'int8':
    dtype = draw(st.sampled_from([None, 'bfloat16', 'float32', 'float16']))
  arguments = (
    config,
    draw(st.integers(1, 1000)),
    draw(st.integers(1, 100_000)),
    kind,
    dtype,
  )
  for layout in cache.LAYOUTS:
    made = jax.eval_shape(lambda *, at=layout: cache.init_cache(*arguments, at))
    assert cache.cache_bytes(made) == cache.predicted_bytes(*arguments)


def test_bytes_of_arrays_are_counted_as_they_are():
  # By hand: 3 rows x 7 slots x (4 + 2) heads x (key + value) x 8 numbers.
  config = make(num_kv_heads=(4, 2))
  made = cache.init_cache(config, 3, 7, dtype='bfloat16')
  numbers = 3 * 7 * 6 * 2 * 8
  counters = made.length.nbytes + made.starts.nbytes
  assert cache.cache_bytes(made) == numbers * 2 + counters
  made = cache.init_cache(config, 3, 7, 'int8')
  assert cache.cache_bytes(made) == numbers + numbers // 8 * 4 + counters


def test_a_multi_query_cache_is_num_heads_times_smaller():
  sizes = [
    cache.predicted_bytes(make(num_kv_heads=k), 2, 64) - (4 + 4 * 2)
    for k in (4, 2, 1)
  ]
  assert sizes == [4 * sizes[2], 2 * sizes[2], sizes[2]]


def test_a_ring_has_no_more_slots_than_the_window_or_the_text():
  assert cache.init_cache(WINDOWED, 1, 999, 'ring').layers[0].num_slots == 5
  assert cache.init_cache(WINDOWED, 1, 3, 'ring').layers[0].num_slots == 3


def by_slot(layer, name):
  """An array of a layer's cache, [S, ...]; None if it has none."""
  array = getattr(layer, name)
  if array is None:
    return None
  axes = layer.v_axes if name == 'v' else layer.scale_axes
  if name == 'k':
    axes = layer.k_axes
    if layer.layout == 'tiled':
      array, axes = cache.join_tiles(array), 'BKHS'
  here = np.moveaxis(np.asarray(array), axes.index('S'), 0)
  if layer.more is None:
    return here
  return np.concatenate([here, by_slot(layer.more, name)])


@pytest.mark.parametrize('layout', cache.LAYOUTS)
@pytest.mark.parametrize('kind', cache.KINDS)
def test_a_step_changes_only_the_slot_of_its_token(kind, layout, monkeypatch):
  monkeypatch.setattr(cache, 'TILE', 4)
  params, tokens = random_params(WINDOWED), random_tokens()
  before = cache.init_cache(WINDOWED, 2, 12, kind, layout=layout)
  before = before.replace(starts=RAGGED)
  _, before = extend(params, WINDOWED, before, tokens[:, :7])
  _, after = extend(params, WINDOWED, before, tokens[:, 7:8])
  assert int(after.length) == 8
  np.testing.assert_array_equal(after.starts, RAGGED)
  slot = 7 % 5 if kind == 'ring' else 7
  for old, new in zip(before.layers, after.layers, strict=True):
    for name in ('k', 'v', 'k_scale', 'v_scale'):
      a, b = by_slot(old, name), by_slot(new, name)
      if a is None:
        assert name.endswith('_scale') and kind != 'int8'
        continue
      same = (a == b).reshape(len(a), -1).all(axis=1)
      np.testing.assert_array_equal(same, np.arange(len(same)) != slot)


@pytest.mark.parametrize('count', [1, 2, 4, 5, 6, 13])
def test_a_ring_holds_the_last_tokens_however_many_are_written(count):
  layer = cache.init_cache(WINDOWED, 1, 99, 'ring').layers[0]
  numbers = jnp.arange(1.0, 40.0)  # token i is i + 1 in all its numbers
  length = 0
  write = jax.jit(cache.write)
  while length + count < 30:
    new = numbers[length : length + count]
    new = jnp.broadcast_to(new[None, :, None, None], (1, count, 1, 8))
    layer = write(layer, new, -new, None, None, jnp.int32(length))
    length += count
    held = cache.token_index(layer, jnp.arange(5), jnp.int32(length))
    expected = np.where(held >= 0, held + 1, 0)
    k, v = (by_slot(layer, name).reshape(5, -1) for name in 'kv')
    np.testing.assert_array_equal(k[:, 0], expected)
    np.testing.assert_array_equal(v[:, -1], -expected)
    assert set(range(max(0, length - 5), length)) <= set(held.tolist())


@pytest.mark.parametrize('kind', ['full', 'ring'])
@pytest.mark.parametrize('count', [1, 2, 3, 4, 5, 9, 15, 16])
def test_tiles_hold_each_token_in_its_slot_however_many_are_written(
  count, kind, monkeypatch
):
  monkeypatch.setattr(cache, 'TILE', 4)
  config = make(num_kv_heads=2, sliding_window=16)
  layer = cache.init_cache(config, 1, 16, kind).layers[0]
  assert layer.k.shape == (1, 2, 4, 8, 4)
  write = jax.jit(cache.write)
  rng = np.random.default_rng(0)
  expected, length = np.zeros((16, 1, 2, 8), np.float32), 0
  while length + count <= (16 if kind == 'full' else 50):
    new = rng.normal(size=(1, count, 2, 8)).astype(np.float32)
    layer = write(layer, new, new, None, None, jnp.int32(length))
    for i in range(count):
      expected[(length + i) % 16] = new[:, i]
    length += count
    np.testing.assert_array_equal(by_slot(layer, 'k'), expected)
    np.testing.assert_array_equal(by_slot(layer, 'v'), expected)


@pytest.mark.parametrize('layout', ['split', 'tiled'])
@pytest.mark.parametrize('kind', ['full', 'int8'])
@pytest.mark.parametrize('count', [1, 3, 8, 45, 128])
def test_spans_hold_each_token_in_its_slot_however_many_are_written(
  count, kind, layout, monkeypatch
):
  for name in ('SPAN_BYTES', 'SPANNED'):
    monkeypatch.setattr(cache, name, 1)
  for name, value in (('TILE', 4), ('SPAN', 4)):
    monkeypatch.setattr(cache, name, value)
  config = make(num_kv_heads=2, max_len=128)
  layer = cache.init_cache(config, 1, 128, kind, layout=layout).layers[0]
  assert sizes_of_spans(layer) == [4, 28, 96]
  write = jax.jit(cache.write)
  rng = np.random.default_rng(0)
  expected, scales = np.zeros((128, 1, 2, 8)), np.zeros((128, 1, 2))
  for length in range(0, 129 - count, count):
    new = rng.integers(1, 99, size=(1, count, 2, 8))
    scale = rng.random((1, count, 2), np.float32) if kind == 'int8' else None
    numbers = new.astype(np.float32 if kind == 'full' else np.int8)
    layer = write(layer, numbers, numbers, scale, scale, jnp.int32(length))
    expected[length : length + count] = np.moveaxis(new, 1, 0)
    np.testing.assert_array_equal(by_slot(layer, 'k'), expected)
    np.testing.assert_array_equal(by_slot(layer, 'v'), expected)
    if kind == 'int8':
      scales[length : length + count] = np.moveaxis(scale, 1, 0)
      np.testing.assert_array_equal(by_slot(layer, 'k_scale'), scales)
      np.testing.assert_array_equal(by_slot(layer, 'v_scale'), scales)


def sizes_of_spans(layer):
  return [layer.own_slots] + (sizes_of_spans(layer.more) if layer.more else [])


def test_long_caches_are_in_spans_where_these_have_enough_bytes():
  config = make(
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    max_len=1 << 14,
    sliding_window=4096,
    global_layers=(0,),
  )

  def spans(batch_size, num_slots, kind='full', dtype=None, layout='split'):
    arguments = (config, batch_size, num_slots, kind, dtype)
    made = jax.eval_shape(lambda: cache.init_cache(*arguments, layout=layout))
    assert made.layers[0].num_slots == num_slots
    assert cache.cache_bytes(made) == cache.predicted_bytes(*arguments)
    return [sizes_of_spans(layer) for layer in made.layers]

  assert spans(8, 8192) == [[256, 1792, 6144]] * 2
  assert spans(1, 8192) == [[2048, 6144]] * 2
  assert spans(8, 8192, 'int8') == [[2048, 6144]] * 2
  assert spans(8, 8192, 'ring') == [[256, 1792, 6144], [4096]]
  assert spans(8, 8192, layout='token') == [[8192]] * 2
  for dtype in ('bfloat16', 'float16'):
    assert spans(8, 8192, dtype=dtype) == [[8192]] * 2
  assert spans(8, 2112) == [[2112]] * 2


def test_only_layers_whose_keys_are_faster_in_tiles_have_them():
  config = make(
    num_heads=12,
    num_kv_heads=(12, 6, 4, 3, 1),
    num_layers=5,
    head_dim=64,
    max_len=1 << 13,
  )

  def layouts(config, num_slots):
    # The batch of one is in one span.
    made = jax.eval_shape(
      lambda: cache.init_cache(config, 1, num_slots, layout='tiled')
    )
    assert made.capacity == num_slots
    return [layer.layout for layer in made.layers]

  slots = cache.whole_tiles(70)
  assert slots == 128
  made = cache.init_cache(config, 1, slots, layout='tiled')
  assert made.layers[1].k.shape == (1, 6, 2, 64, 64)
  assert layouts(config, 512) == ['tiled'] * 5
  assert layouts(config, 1024) == ['split'] + ['tiled'] * 4
  assert layouts(config, 1984) == ['split'] + ['tiled'] * 3 + ['split']
  assert layouts(config, 70) == ['split'] * 5  # no whole tiles
  narrow = dataclasses.replace(config, dtype='bfloat16')
  assert layouts(narrow, 1984) == ['tiled'] * 5


def test_int8_keeps_each_token_and_head_within_half_a_step_of_its_scale():
  layer = cache.init_cache(make(), 1, 4, 'int8').layers[0]
  rng = np.random.default_rng(0)
  # Heads and tokens of very different sizes, and one of zeros.
  sizes = 10.0 ** rng.uniform(-6, 6, size=(1, 4, 2, 1))
  x = rng.normal(size=(1, 4, 2, 8)) * sizes
  x[0, 1, 1] = 0
  stored, scale = cache.encode(layer, jnp.asarray(x, jnp.float32))
  back = cache.decode(stored, scale, jnp.float32)
  top = np.abs(x).max(axis=-1, keepdims=True)
  assert (np.abs(back - x) <= 0.501 * top / 127).all()
  assert (np.asarray(back)[0, 1, 1] == 0).all()


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    (dict(kind='paged'), ['paged', 'ring']),
    (dict(kind='ring'), ['sliding_window', 'full']),
    (dict(kind='int8', dtype='bfloat16'), ['bfloat16', 'int8']),
    (dict(dtype='int8'), ['int8', 'kind']),
    (dict(dtype='fp8'), ['fp8']),
    (dict(max_len=0), ['max_len=0']),
    (dict(batch_size=0), ['batch_size=0']),
    (dict(layout='BSHK'), ['BSHK', 'tiled']),
  ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(fields, words):
  arguments = dict(batch_size=1, max_len=8) | fields
  with pytest.raises(ValueError) as error:
    cache.init_cache(make(), **arguments)
  for word in words:
    assert word in str(error.value)


def test_a_full_cache_is_an_error_with_both_numbers_and_a_ring_never_full():
  params, tokens = random_params(WINDOWED), random_tokens((1, 6))
  full = cache.init_cache(WINDOWED, 1, 8)
  _, full = extend(params, WINDOWED, full, tokens)
  with pytest.raises(ValueError, match=r'\b9\b.*\b6\b.*\b3\b.*\b8\b'):
    decode.extend(params, WINDOWED, full, tokens[:, :3])
  cache.check_room(full, 2)
  with pytest.raises(ValueError, match=r'\b9\b.*\b8\b'):  # Under jit as well.
    extend(params, WINDOWED, full, random_tokens((1, 9)))
  ring = cache.init_cache(WINDOWED, 1, 8, 'ring')
  cache.check_room(ring.replace(length=jnp.int32(10**6)), 10**6)
  # A ring that is smaller than the window would forget what is still seen.
  short = cache.init_cache(WINDOWED, 1, 4, 'ring')
  with pytest.raises(ValueError, match='max_len=4'):
    cache.check_room(short, 5)


def test_head_dim_is_a_field_of_its_own():
  config = make(embed_dim=10, num_heads=4, num_kv_heads=2, head_dim=8)
  layer = cache.init_cache(config, 3, 7, layout='token').layers[0]
  assert layer.k.shape == layer.v.shape == (3, 7, 2, 8)
  config = dataclasses.replace(config, head_dim=6)
  layer = cache.init_cache(config, 3, 7, layout='tiled').layers[0]
  assert layer.k.shape == (3, 2, 6, 7) and layer.v.shape == (3, 2, 7, 6)
