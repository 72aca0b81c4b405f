"""Decoding from the cache against the model that sees everything at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_test import (
  CONFIGS,
  logits_of,
  make,
  random_params,
  random_tokens,
)

from gqa import cache, cached_attention, decode, model, sampling
from gqa.sampling import Sampling

TOLERANCE = dict(atol=1e-4, rtol=1e-4)
LONG = make(max_len=64)
GROUPINGS = {
  'multi-head': dict(num_kv_heads=4),
  'grouped': dict(num_kv_heads=2),
  'multi-query': dict(num_kv_heads=1, sliding_window=4),
  'layers differ': dict(num_kv_heads=(4, 1), sliding_window=5),
}
CHUNKS = ((12,), (5, 7), (4, 4, 4), (1,) * 12)
FEW = ((5, 7), (1,) * 12)  # of sizes that stand for the others

extend = jax.jit(decode.extend, static_argnums=1)
prefill = jax.jit(decode.prefill, static_argnames=('config', 'chunk_size'))


@pytest.fixture
def small_blocks(monkeypatch):
  """Several spans, blocks of slots and of rows in a cache of a few tokens."""
  monkeypatch.setattr(cached_attention, 'BLOCK', 4)
  monkeypatch.setattr(cache, 'TILE', 2)
  monkeypatch.setattr(cache, 'SPAN', 2)
  monkeypatch.setattr(cache, 'SPAN_BYTES', 1)
  monkeypatch.setattr(cache, 'SPANNED', 1)
  monkeypatch.setattr(cached_attention, 'ROWS', 4)
  monkeypatch.setattr(cached_attention, 'LONG', 4)
  jax.clear_caches()
  yield
  jax.clear_caches()


def cached_logits(config, params, tokens, chunks, made):
  logits, at = [], 0
  for size in chunks:
    part, made = extend(params, config, made, tokens[:, at : at + size])
    logits.append(part)
    at += size
  return np.concatenate(logits, axis=1)


def in_chunks(config, kind, dtype=None, layout=None, atol=1e-4, all_chunks=FEW):
  params, tokens = random_params(config), random_tokens()
  expected = logits_of(config, params, tokens)
  for chunks in all_chunks:
    made = cache.init_cache(config, 2, 12, kind, dtype, layout)
    actual = cached_logits(config, params, tokens, chunks, made)
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize('name', GROUPINGS)
def test_any_grouping_gives_the_logits_without_a_cache(name, small_blocks):
  in_chunks(make(**GROUPINGS[name]), 'full')


@pytest.mark.parametrize('layout', cache.LAYOUTS)
def test_any_chunks_and_layout_give_the_same(layout, small_blocks):
  config = make(**GROUPINGS['layers differ'])
  in_chunks(config, 'full', layout=layout)
  all_chunks = CHUNKS if layout == 'tiled' else FEW
  in_chunks(config, 'ring', layout=layout, all_chunks=all_chunks)


@pytest.mark.parametrize('layout', cache.LAYOUTS)
def test_an_int8_cache_is_near(layout, small_blocks):
  # Far from what a lost scale (0.7 and more) would give.
  in_chunks(make(), 'int8', layout=layout, atol=0.12)


def test_a_bfloat16_cache_serves_a_float32_model(small_blocks):
  in_chunks(make(), 'full', dtype='bfloat16', atol=0.08, all_chunks=FEW[:1])


@pytest.mark.parametrize('num_kv_heads', [4, 2])
def test_tiles_of_bfloat16_give_the_logits_without_a_cache(
  num_kv_heads, small_blocks
):
  # One query head of a KV head is multiplied twice; values are in tiles too.
  config = make(num_kv_heads=num_kv_heads, dtype='bfloat16')
  made = cache.init_cache(config, 2, 12, layout='tiled')
  assert made.layers[0].layout == 'tiled'
  in_chunks(config, 'full', layout='tiled', atol=0.1)


def test_chunks_do_not_matter_even_where_the_cache_rounds():
  config = make(num_kv_heads=1)
  params, tokens = random_params(config), random_tokens()
  first, second = (
    cached_logits(
      config, params, tokens, chunks, cache.init_cache(config, 2, 12, 'int8')
    )
    for chunks in FEW
  )
  np.testing.assert_allclose(first, second, **TOLERANCE)


@pytest.mark.parametrize('name', CONFIGS)
def test_every_feature_of_the_model_is_cached(name):
  """QK norm, biases, partial RoPE, learned positions, and so on.

  The cached model has the rows of its kernels, and of a prompt its last layer
  only looks at the last token.
  """
  config = make(**CONFIGS[name])
  params, tokens = random_params(config), random_tokens()
  expected = logits_of(config, params, tokens)
  rows = model.decoding_params(params, 'float32', kernels='rows')
  made = cache.init_cache(config, 2, 12)
  lengths = jnp.array([7, 7], jnp.int32)
  last, made = prefill(rows, config, tokens[:, :7], lengths, made)
  np.testing.assert_allclose(last, expected[:, 6], **TOLERANCE)
  actual = cached_logits(config, rows, tokens[:, 7:], (1,) * 5, made)
  np.testing.assert_allclose(actual, expected[:, 7:], **TOLERANCE)


def test_prefill_in_chunks_is_prefill_at_once():
  params, tokens = random_params(LONG), random_tokens((3, 12))
  lengths = jnp.array([12, 3, 7], jnp.int32)
  made = cache.init_cache(LONG, 3, 14)
  expected, full = prefill(params, LONG, tokens, lengths, made)
  for chunk_size in (5, 99):
    logits, chunked = prefill(
      params, LONG, tokens, lengths, made, chunk_size=chunk_size
    )
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    assert int(chunked.length) == int(full.length) == 12
  # What comes after is the same too; a used cache starts anew.
  token = tokens[:, 0]
  step = jax.jit(decode.decode_step, static_argnums=1)
  next_logits, _ = step(params, LONG, full, token)
  _, again = prefill(params, LONG, tokens, lengths, full, chunk_size=5)
  actual, _ = step(params, LONG, again, token)
  np.testing.assert_allclose(actual, next_logits, **TOLERANCE)


def test_left_context_counts_and_right_context_does_not():
  config = make(num_kv_heads=(1, 4))
  params, tokens = random_params(config), random_tokens((1, 12))
  run = lambda tokens: cached_logits(
    config, params, tokens, (4, 4, 4), cache.init_cache(config, 1, 12)
  )
  logits = run(tokens)
  np.testing.assert_array_equal(run(tokens), logits)  # Calls share nothing.
  edited = tokens.copy()
  edited[0, 5] = (edited[0, 5] + 1) % config.vocab_size
  changed = np.abs(run(edited) - logits).max(axis=-1)[0]
  np.testing.assert_array_equal(changed[:5], 0)
  assert (changed[5:] > 1e-4).all()


def test_a_ring_goes_on_as_the_model_with_its_window_does(small_blocks):
  config = make(sliding_window=7, num_kv_heads=(2, 1), max_len=40)
  params, tokens = random_params(config), random_tokens((2, 40))
  expected = logits_of(config, params, tokens)
  made = cache.init_cache(config, 2, 40, 'ring')
  assert {layer.num_slots for layer in made.layers} == {7}
  # Pieces shorter than the window, as long, and longer.
  chunks = (3, 7, 1, 1, 9, 16, 1, 1, 1)
  actual = cached_logits(config, params, tokens, chunks, made)
  np.testing.assert_allclose(actual, expected, **TOLERANCE)


# Batches of prompts of different lengths.

PROMPTS = [random_tokens((n,), seed=n) for n in (3, 7, 12)]


def settings_of(rows, temperature):
  return Sampling.create(rows, temperature=temperature, top_k=8)


@functools.lru_cache
def alone(index, temperature, kind):
  """Eight tokens of one prompt by itself, and their log-probabilities."""
  config = long_config(kind)
  # Without padding for one kind; padding itself is compared elsewhere.
  width = 1 if kind == 'full' else 12
  tokens, _, logprobs = decode.generate(
    random_params(config),
    config,
    *decode.pack([PROMPTS[index]], width),
    8,
    sampling=settings_of(1, temperature),
    keys=sampling.row_keys(7, jnp.array([index])),
    cache_kind=kind,
  )
  return np.asarray(tokens)[0], np.asarray(logprobs)[0]


def long_config(kind):
  config = make(max_len=64, num_kv_heads=(1, 2))
  if kind == 'ring':
    return dataclasses.replace(config, sliding_window=6)
  # RoPE would not notice if all positions of a row were off by the same.
  return dataclasses.replace(config, position='learned')


@pytest.mark.parametrize('temperature', [0.0, 1.5])
@pytest.mark.parametrize('kind', ['full', 'ring'])
@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 1)])
def test_a_row_of_a_ragged_batch_is_what_it_is_alone(order, kind, temperature):
  config = long_config(kind)
  prompts, lengths = decode.pack([PROMPTS[i] for i in order])
  tokens, _, logprobs = decode.generate(
    random_params(config),
    config,
    prompts,
    lengths,
    8,
    sampling=settings_of(3, temperature),
    keys=sampling.row_keys(7, jnp.array(order)),
    cache_kind=kind,
  )
  for row, index in enumerate(order):
    expected, expected_logprobs = alone(index, temperature, kind)
    np.testing.assert_array_equal(tokens[row], expected)
    np.testing.assert_allclose(logprobs[row], expected_logprobs, **TOLERANCE)


def test_padding_on_either_side_and_of_any_id_is_the_same():
  prompts, lengths = decode.pack(PROMPTS)
  right = np.full_like(prompts, 5)
  for row, prompt in zip(right, PROMPTS, strict=True):
    row[: prompt.size] = prompt
  aligned = np.asarray(decode.right_align(right, lengths))
  live = np.arange(12) >= 12 - lengths[:, None]
  np.testing.assert_array_equal(aligned[live], prompts[live])
  params = random_params(LONG)
  made = cache.init_cache(LONG, 3, 14)
  expected, _ = prefill(params, LONG, prompts, lengths, made)
  strange = np.where(live, prompts, -(10**6))
  for tokens in (aligned, strange):
    logits, _ = prefill(params, LONG, tokens, lengths, made)
    np.testing.assert_array_equal(logits, expected)
  for row, prompt in enumerate(PROMPTS):
    reference = logits_of(LONG, params, prompt[None])[:, -1]
    np.testing.assert_allclose(expected[row], reference[0], **TOLERANCE)


def test_padding_gives_no_nan():
  # In every intermediate value, cached keys of padding included.
  config = make(max_len=64, num_kv_heads=1, qk_norm=True, sliding_window=4)
  params = random_params(config)
  prompts, lengths = decode.pack(PROMPTS)
  with jax.debug_nans(True):
    for kind in ('ring', 'int8'):
      made = cache.init_cache(config, 3, 16, kind)
      logits, made = prefill(
        params, config, prompts, lengths, made, chunk_size=4
      )
      logits, made = extend(params, config, made, prompts[:, -1:])
      assert all(
        np.isfinite(np.asarray(leaf, np.float32)).all()
        for leaf in jax.tree.leaves((logits, made))
      )


# `generate`.


def test_a_row_that_sees_nothing_of_the_cache_gets_zeros():
  config = make()
  made = cache.init_cache(config, 2, 6)
  layer = jax.tree.map(jnp.ones_like, made.layers[0])
  K, H = config.kv_heads[0], config.head_dim
  q = jnp.ones((2, K, config.num_heads // K, 1, H))
  starts = jnp.array([0, 3], jnp.int32)
  out, lse = cached_attention.over_cache(q, layer, 2, 2, starts, None)
  np.testing.assert_allclose(out[0], 1.0, rtol=1e-6)
  assert not out[1].any() and (lse[1] < -1e29).all()


def greedy_reference(config, params, prompt, steps, penalty=1.0):
  """Argmax of the model without a cache, one token after another."""
  tokens = np.zeros((1, prompt.size + steps), np.int32)
  tokens[0, : prompt.size] = prompt
  logprobs = []
  for end in range(prompt.size, tokens.shape[1]):
    logits = np.array(logits_of(config, params, tokens)[0, end - 1])
    logprob = jax.nn.log_softmax(logits)
    seen = np.unique(tokens[0, :end])
    logits[seen] *= np.where(logits[seen] > 0, 1 / penalty, penalty)
    tokens[0, end] = np.argmax(logits)
    logprobs.append(logprob[tokens[0, end]])
  return tokens[0, prompt.size :], np.array(logprobs)


def generate(*arguments, **options):
  prompts, lengths = decode.pack(options.pop('prompts', PROMPTS[:2]))
  outs = decode.generate(
    random_params(LONG), LONG, prompts, lengths, *arguments, **options
  )
  return [np.asarray(x) for x in outs]


def test_greedy_is_the_argmax_without_a_cache():
  tokens, lengths, logprobs = generate(13)
  assert tokens.shape == logprobs.shape == (2, 13)
  np.testing.assert_array_equal(lengths, 13)
  for row in range(2):
    expected = greedy_reference(LONG, random_params(LONG), PROMPTS[row], 13)
    np.testing.assert_array_equal(tokens[row], expected[0])
    np.testing.assert_allclose(logprobs[row], expected[1], **TOLERANCE)


@pytest.mark.parametrize('temperature', [0.0, 2.0])
def test_a_stop_id_is_kept_and_padding_follows(temperature):
  budget = 40  # of several scans
  options = dict(
    sampling=settings_of(2, temperature), keys=sampling.row_keys(3, [0, 1])
  )
  plain, _, plain_logprobs = generate(budget, **options)
  # An id that row 0 has and row 1 has not, or has later.
  first = lambda row, i: np.append(plain[row], i).tolist().index(i)
  stop = min(plain[0], key=lambda i: first(0, i) - 99 * (first(1, i) > 7))
  pad = 16 if stop != 16 else 15
  tokens, lengths, logprobs = generate(
    budget, stop_ids=[int(stop)], pad_id=pad, **options
  )
  assert tokens.shape == (2, budget)
  assert first(0, stop) != first(1, stop)
  for row in range(2):
    end = min(first(row, stop) + 1, budget)
    assert lengths[row] == end
    np.testing.assert_array_equal(tokens[row, :end], plain[row, :end])
    np.testing.assert_array_equal(tokens[row, end:], pad)
    np.testing.assert_allclose(
      logprobs[row, :end], plain_logprobs[row, :end], **TOLERANCE
    )
    np.testing.assert_array_equal(logprobs[row, end:], 0)


def test_a_batch_that_is_done_is_not_computed_further():
  tokens, lengths, _ = generate(40)
  stops = tokens[:, 0].tolist()
  draws = []
  original = sampling.sample
  try:
    # Counts steps at run time.
    def counted(*arguments):
      jax.debug.callback(lambda: draws.append(1))
      return original(*arguments)

    sampling.sample = counted
    jax.clear_caches()
    stopped, lengths, _ = generate(40, stop_ids=stops)
    jax.effects_barrier()
  finally:
    sampling.sample = original
    jax.clear_caches()
  np.testing.assert_array_equal(lengths, 1)
  assert stopped.shape == (2, 40)
  assert len(draws) == 1


def test_the_prompt_and_the_text_count_for_the_repetition_penalty():
  rules = Sampling.create(2, repetition_penalty=[1.0, 3.0])
  tokens, _, _ = generate(13, sampling=rules)
  params = random_params(LONG)
  for row, penalty in enumerate((1.0, 3.0)):
    expected, _ = greedy_reference(LONG, params, PROMPTS[row], 13, penalty)
    np.testing.assert_array_equal(tokens[row], expected)
  plain, _ = greedy_reference(LONG, params, PROMPTS[1], 13)
  assert (tokens[1] != plain).any()


def test_rows_and_steps_are_drawn_independently():
  flat = jax.tree.map(np.zeros_like, random_params(LONG))
  tokens, _, logprobs = decode.generate(
    flat, LONG, *decode.pack(PROMPTS[:2]), 40, sampling=settings_of(2, 1.0)
  )
  tokens = np.asarray(tokens)
  np.testing.assert_allclose(logprobs, -np.log(LONG.vocab_size), rtol=1e-5)
  # Eight tokens are as likely as each other.
  assert all(len(set(row)) > 4 for row in tokens.tolist())
  assert (tokens[0] == tokens[1]).mean() < 0.5


def test_generating_in_parts_is_generating_at_once():
  config, params = LONG, random_params(LONG)
  settings, keys = settings_of(2, 1.0), sampling.row_keys(5, jnp.arange(2))
  expected, _, expected_logprobs = generate(13, sampling=settings, keys=keys)
  prompts, lengths = decode.pack(PROMPTS[:2])
  start = jax.jit(decode.start, static_argnames='config')
  advance = jax.jit(
    decode.advance,
    static_argnames=('config', 'num_steps'),
    donate_argnames='state',
  )
  state, logprob = start(
    params,
    config,
    prompts,
    lengths,
    cache.init_cache(config, 2, 30),
    settings,
    keys,
    jnp.zeros((0,), jnp.int32),
  )
  parts = [(np.asarray(state.token)[:, None], np.asarray(logprob)[:, None])]
  for _ in range(3):
    state, *part = advance(params, config, state, 4)
    parts.append(tuple(np.asarray(x) for x in part))
  tokens, logprobs = (
    np.concatenate(x, axis=1) for x in zip(*parts, strict=True)
  )
  np.testing.assert_array_equal(tokens, expected)
  np.testing.assert_allclose(logprobs, expected_logprobs, **TOLERANCE)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (dict(max_len=8), ['10', '8']),
    (dict(max_new_tokens=59), ['65', '64', 'max_new_tokens=59']),
    (dict(max_new_tokens=0), ['max_new_tokens=0']),
    (dict(prompts=[[0, 17, 2]], lengths=[3]), ['17', 'vocabulary']),
    (dict(prompts=[[0, -1, 2]], lengths=[3]), ['-1', '17']),
    (dict(lengths=[7]), ['[7]', '6']),
    (dict(lengths=[0]), ['[0]']),
    (dict(lengths=[3, 3]), ['[3, 3]']),
    (dict(prompts=[0, 1]), ['(2,)']),
  ],
)
def test_what_cannot_be_is_refused_before_tracing(change, words, monkeypatch):
  monkeypatch.setattr(decode, '_generate', None)
  arguments = dict(prompts=[[1] * 6], lengths=[6], max_new_tokens=4) | change
  with pytest.raises(ValueError) as error:
    decode.generate(None, LONG, **arguments)
  for word in words:
    assert word in str(error.value)


def test_ids_that_are_no_integers_are_refused():
  with pytest.raises(TypeError, match='float'):
    decode.generate(None, LONG, np.ones((1, 3)), [3], 4)


def test_what_just_fits_is_right():
  params = random_params(LONG)
  tokens, _, _ = generate(2, prompts=[PROMPTS[2][:6]], max_len=8)
  expected, _ = greedy_reference(LONG, params, PROMPTS[2][:6], 2)
  np.testing.assert_array_equal(tokens[0], expected)


def test_64_bit_mode_changes_nothing():
  config = make(max_len=64, num_kv_heads=(1, 4), sliding_window=6)
  params = random_params(config)

  def run():
    logits = cached_logits(
      config,
      params,
      random_tokens(),
      (1,) * 3,
      cache.init_cache(config, 2, 12, 'int8'),
    )
    tokens, lengths, logprobs = decode.generate(
      params,
      config,
      *decode.pack(PROMPTS),
      20,
      sampling=Sampling.create(3, temperature=1.0, repetition_penalty=1.2),
      stop_ids=[3],
      cache_kind='ring',
      chunk_size=5,
    )
    assert tokens.dtype == lengths.dtype == np.int32
    assert logits.dtype == logprobs.dtype == np.float32
    return np.asarray(tokens), logprobs, logits

  expected = run()
  with jax.enable_x64(True):
    actual = run()
  np.testing.assert_array_equal(actual[0], expected[0])
  for new, old in zip(actual[1:], expected[1:], strict=True):
    np.testing.assert_allclose(new, old, **TOLERANCE)


def test_cached_keys_are_rotated_in_float32_far_into_a_text():
  """In bfloat16 positions 4095 and 257 would become 4096 and 256."""
  config = make(max_len=5000, dtype='bfloat16', rope_theta=1e4)
  params, token = random_params(config), jnp.array([[3]], jnp.int32)
  made = cache.init_cache(config, 1, 4096, layout='token')

  def key_at(position):
    at = made.replace(length=jnp.int32(position))
    _, after = extend(params, config, at, token)
    return np.asarray(after.layers[0].k[0, position, 0], np.float64)

  first, second = np.split(key_at(0), 2)
  frequencies = 1e4 ** (-np.arange(4) / 4)
  for position in (256, 257, 4095):
    angles = position * frequencies
    expected = np.concatenate(
      [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
      ]
    )
    size = np.abs(first).max() + np.abs(second).max()
    # Sine and cosine, both products and their sum are rounded to bfloat16.
    np.testing.assert_allclose(
      key_at(position), expected, atol=2e-2 * size, rtol=0
    )


# What the compiled programs hold and do.


def compiled_advance(config, batch_size, slots, kind='full', steps=4):
  """A donated scan of steps, compiled from shapes alone."""
  params = jax.eval_shape(
    lambda: model.decoding_params(random_params(config), config.dtype)
  )

  def make_state():
    tokens = jnp.zeros((batch_size, 1), jnp.int32)
    return decode.start(
      jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
      config,
      tokens,
      jnp.ones((batch_size,), jnp.int32),
      cache.init_cache(config, batch_size, slots, kind),
      Sampling.create(batch_size),
      sampling.row_keys(0, jnp.arange(batch_size)),
      jnp.zeros((0,), jnp.int32),
    )[0]

  state = jax.eval_shape(make_state)
  compiled = jax.jit(
    decode.advance,
    static_argnames=('config', 'num_steps'),
    donate_argnames='state',
  ).lower(params, config, state, steps)
  return compiled.compile(), cache.cache_bytes(state.cache)


@pytest.mark.parametrize(
  'kind, dtype, num_kv_heads',
  [
    *((kind, 'float32', heads) for kind in cache.KINDS for heads in (4, 1)),
    # Scores of one KV head alone would be more than the bound below.
    *(('full', 'bfloat16', heads) for heads in (4, 2)),
  ],
)
def test_steps_write_in_place_and_never_copy_the_cache(
  kind, dtype, num_kv_heads
):
  config = make(
    dtype=dtype,
    head_dim=64,
    num_kv_heads=num_kv_heads,
    max_len=17_000,
    sliding_window=4096 if kind == 'ring' else None,
  )
  compiled, size = compiled_advance(config, 4, 16_384, kind)
  memory = compiled.memory_analysis()
  # One of the four arrays of the two layers would be a quarter.
  assert memory.temp_size_in_bytes < size / 16
  assert memory.alias_size_in_bytes >= size


@pytest.mark.parametrize('window', [None, 300])
@pytest.mark.parametrize('spans', [1, 3])
def test_a_step_reads_the_visible_blocks_or_a_mostly_live_span_whole(
  spans, window, monkeypatch
):
  reads = []
  original = cache.read

  def counted(layer, first, count):
    jax.debug.callback(
      lambda at: reads.append((layer.first + int(at), count)), first
    )
    return original(layer, first, count)

  monkeypatch.setattr(cache, 'SPAN_BYTES', 1 if spans > 1 else 1 << 30)
  monkeypatch.setattr(cache, 'read', counted)
  config = make(num_kv_heads=1, num_layers=1, sliding_window=window)
  made = cache.init_cache(config, 2, 8192)
  layer = made.layers[0]
  q, k = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 1, 8))
  step = jax.jit(functools.partial(cached_attention.attend, window=window))

  def blocks(length, starts):
    reads.clear()
    out, _ = step(q, k, k, layer, jnp.int32(length), jnp.array(starts))
    jax.block_until_ready(out)
    jax.effects_barrier()
    return sorted(reads)

  def each(first, last):
    size = cached_attention.BLOCK
    return [(i * size, size) for i in range(first, last + 1)]

  whole = [(0, 8192)] if spans == 1 else [(0, 256), (256, 1792), (2048, 6144)]
  assert blocks(200, [0, 3]) == each(0, 0)
  assert blocks(256, [0, 3]) == each(0, 1)
  last = 3000 // 256
  if window is not None:
    assert blocks(3000, [0, 0]) == each(last - 1, last)
  elif spans == 1:
    assert blocks(3000, [0, 0]) == each(0, last)
  else:
    assert blocks(3000, [0, 0]) == whole[:2] + each(8, last)
  # Padding on the left of all rows costs nothing either.
  last = 6000 // 256
  assert blocks(6000, [5900, 5950]) == each(last, last)
  assert blocks(6000, [0, 0]) == (
    whole if window is None else each(last - 1, last)
  )


def test_blocks_of_bfloat16_are_read_without_a_copy_of_the_cache():
  config = make(num_kv_heads=1, num_layers=1, head_dim=64, max_len=9000)
  layer = cache.init_cache(config, 2, 8192, dtype='bfloat16').layers[0]
  q = jnp.ones((2, 1, 4, 2, 64), jnp.bfloat16)
  at = jnp.int32(100)
  compiled = (
    jax.jit(cached_attention.over_cache, static_argnums=5)
    .lower(q, layer, at, at, jnp.zeros((2,), jnp.int32), None)
    .compile()
  )
  assert compiled.memory_analysis().temp_size_in_bytes < layer.k.nbytes / 2


def test_a_long_chunk_on_a_warm_cache_holds_no_matrix_of_all_its_scores():
  config = make(max_len=1 << 14, num_layers=1)
  T = S = 4096
  params = jax.eval_shape(lambda: random_params(config))
  made = jax.eval_shape(lambda: cache.init_cache(config, 1, T + S))
  tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
  memory = (
    jax.jit(lambda p, t, m: decode._features(p, config, m, t), donate_argnums=2)
    .lower(params, tokens, made)
    .compile()
    .memory_analysis()
  )
  # Scores of one query head alone.
  assert memory.temp_size_in_bytes < T * S * 4 / 2


@pytest.mark.parametrize('kernels', ['rows', 'columns'])
def test_decoding_params_cast_kernels_and_embeddings_only(kernels):
  config = make(qk_norm=True, qkv_bias=True)
  cast = model.decoding_params(
    random_params(config), 'bfloat16', kernels=kernels
  )
  for path, leaf in jax.tree_util.tree_leaves_with_path(cast):
    narrow = path[-1].key in ('kernel', 'rows', 'embedding')
    assert leaf.dtype == (jnp.bfloat16 if narrow else jnp.float32), path
  narrow = make(qk_norm=True, qkv_bias=True, dtype='bfloat16')
  tokens = random_tokens((1, 12))
  logits, _ = extend(cast, narrow, cache.init_cache(narrow, 1, 12), tokens)
  expected = logits_of(config, random_params(config), tokens)
  np.testing.assert_allclose(logits, expected, atol=0.3)


def test_kernels_of_an_unknown_layout_are_refused():
  with pytest.raises(ValueError, match="kernels='row' is unknown"):
    model.decoding_params(random_params(LONG), 'float32', kernels='row')


def test_donated_params_are_deleted_where_others_take_their_place():
  config = make(tie_embeddings=False, head_bias=True)
  params = jax.tree.map(jnp.asarray, random_params(config))
  same = model.decoding_params(
    params, 'float32', kernels='columns', donate=True
  )
  assert jax.tree.all(jax.tree.map(lambda a, b: a is b, same, params))
  expected = logits_of(config, params, random_tokens())
  rows = model.decoding_params(params, 'float32', kernels='rows', donate=True)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    assert leaf.is_deleted() == (path[-1].key == 'kernel'), path
  actual = logits_of(config, rows, random_tokens())
  np.testing.assert_allclose(actual, expected, **TOLERANCE)
  columns = model.head_rows(config, random_params(config))
  np.testing.assert_array_equal(model.head_rows(config, rows), columns)
