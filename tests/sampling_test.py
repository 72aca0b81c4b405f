import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from gqa import sampling
from gqa.sampling import Sampling

create = Sampling.create
sample = jax.jit(sampling.sample)
support = jax.jit(lambda *args: sampling._filtered(*args) > 0)


@functools.partial(jax.jit, static_argnames='count')
def draws(logits, rules, count):
  """Tokens [count, B] of as many steps over the same logits [B, V]."""
  keys = sampling.row_keys(7, jnp.arange(logits.shape[0]))

  def step(_, index):
    token, _ = sampling.sample(logits, rules, sampling.step_keys(keys, index))
    return None, token

  return lax.scan(step, None, jnp.arange(count))[1]


def keys_of(ids, step=0):
  return sampling.step_keys(sampling.row_keys(3, jnp.asarray(ids)), step)


def reference(row, temperature, top_k, top_p, min_p):
  """Probabilities of one row by a sort in float64, after every filter."""
  row = np.asarray(row, np.float64)
  if temperature == 0:
    top_k, temperature = 1, 1.0
  order = np.lexsort((np.arange(row.size), -row))
  mass = np.exp((row - row.max()) / temperature)[order]
  if top_k:
    mass[top_k:] = 0
  if top_p < 1:
    before = (np.cumsum(mass) - mass) / mass.sum()
    mass[(before >= top_p) & (np.arange(mass.size) > 0)] = 0
  mass[mass < min_p * mass[0]] = 0
  result = np.zeros_like(mass)
  result[order] = mass / mass.sum()
  return result


NUCLEI = ((0.45, 1), (0.6, 2), (1.0, 4), (0.0, 1), (1e-8, 1))  # p, tokens


def test_nucleus_is_the_smallest_prefix_that_reaches_p():
  probs = np.array([0.5, 0.3, 0.1, 0.1], np.float32)
  rules = create(5, temperature=1.0, top_p=[p for p, _ in NUCLEI])
  logits = jnp.tile(jnp.log(probs), (5, 1))
  tokens = np.asarray(draws(logits, rules, 1000))
  for row, (_, size) in enumerate(NUCLEI):
    assert set(tokens[:, row]) == set(range(size))


def test_nucleus_boundary_is_exact_where_sums_are():
  rules = create(6, temperature=1.0, top_p=[0.25, 0.26, 0.5, 0.51, 0.75, 0.76])
  kept = np.asarray(support(jnp.zeros((6, 4)), rules))
  np.testing.assert_array_equal(kept.sum(-1), [1, 2, 2, 3, 3, 4])


def test_nucleus_of_a_large_bfloat16_vocabulary_with_minus_infinity():
  rng = np.random.default_rng(0)
  row = rng.normal(size=4096) * 3
  row[rng.random(4096) < 0.3] = -np.inf
  row[[5, 9]] = 12.0  # the top is tied
  row = jnp.asarray(row, jnp.bfloat16)
  rules = create(5, temperature=1.0, top_p=[p for p, _ in NUCLEI])
  tokens = np.asarray(draws(jnp.tile(row, (5, 1)), rules, 1000))
  for index, (p, _) in enumerate(NUCLEI):
    inside = reference(row, 1.0, 0, p + 1e-6, 0) > 0
    assert inside[tokens[:, index]].all()
    assert len(set(tokens[:, index])) > 1 or p < 1e-6
  assert (tokens[:, 3:] == 5).all()


# Each filter against a sort.


def assert_support(logits, rows):
  """rows: (temperature, top_k, top_p, min_p) of each row of logits."""
  temperature, top_k, top_p, min_p = (list(x) for x in zip(*rows, strict=True))
  rules = create(len(rows), temperature, top_k, top_p, min_p)
  scores = jnp.asarray(logits).astype(jnp.float32)
  kept = np.asarray(support(scores, rules))
  for row, (t, k, p, m) in enumerate(rows):
    values = np.asarray(scores[row])
    low = reference(values, t, k, p - 1e-6, m * (1 + 1e-6)) > 0
    high = reference(values, t, k, min(p + 1e-6, 1), m * (1 - 1e-6)) > 0
    high &= values > -np.inf
    low &= np.exp((values - values.max()) / t) > 1e-37  # no float32 underflow
    assert not (low & ~kept[row]).any(), rows[row]
    assert not (kept[row] & ~high).any(), rows[row]
    ids = np.arange(values.size)[kept[row]]
    assert np.argmax(values) in ids
    if k and p == 1 and m == 0:  # exactly k tokens, ties included
      finite = (values > -np.inf).sum()
      assert len(ids) == min(k, finite) or not low.sum() == min(k, finite)


GRID = [
  (1.0, 1, 1.0, 0.0),
  (1.0, 50, 1.0, 0.0),
  (0.7, 5000, 1.0, 0.0),
  (1.0, 0, 0.9, 0.0),
  (2.0, 0, 0.999, 0.0),
  (1.0, 0, 0.3, 0.0),
  (1.0, 0, 1.0, 0.05),
  (0.8, 40, 0.95, 0.02),
]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_support_equals_a_sort(dtype):
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(len(GRID), 4096)) * 2
  logits[:, rng.random(4096) < 0.1] = -np.inf
  assert_support(jnp.asarray(logits, dtype), GRID)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_support_equals_a_sort_with_ties_of_any_kind(data):
  value = st.sampled_from(
    [-math.inf, -88.0, -1.5, -1e-3, -0.0, 0.0, 1e-3, 0.5, 1.0, 1.0, 3.0, 40.0]
  )
  rule = st.tuples(
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(0, 9),
    st.sampled_from([0.0, 1e-8, 0.2, 0.5, 0.77, 0.99, 1.0]),
    st.sampled_from([0.0, 0.1, 0.9]),
  )
  rows = data.draw(st.lists(rule, min_size=4, max_size=4))
  logits = [
    data.draw(st.lists(value, min_size=7, max_size=7)) + [-2.0]
    for _ in range(4)
  ]
  assert_support(np.array(logits, np.float32), rows)


def test_top_k_keeps_exactly_k_of_equal_logits():
  rules = create(4, temperature=1.0, top_k=[1, 2, 3, 9])
  logits = jnp.tile(jnp.array([0.0, 2.0, 1.0, 2.0, 1.0]), (4, 1))
  kept = np.asarray(support(logits, rules))
  expected = [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3, 4]]
  assert [list(np.flatnonzero(row)) for row in kept] == expected


# The draw.


def test_draws_have_the_exact_distribution():
  rows = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.5, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.0, 0, 1.0, 0.0),
  ]
  logits = np.random.default_rng(2).normal(size=(6, 300)).astype(np.float32)
  logits[:, 40:90] = -np.inf
  columns = (list(x) for x in zip(*rows, strict=True))
  count = 20_000
  tokens = np.asarray(draws(logits, create(6, *columns), count))
  for row, rule in enumerate(rows):
    expected = reference(logits[row], *rule) * count
    seen = np.bincount(tokens[:, row], minlength=300)
    assert seen[expected == 0].sum() == 0
    large = expected >= 5
    expected = np.append(expected[large], expected[~large].sum())
    seen = np.append(seen[large], seen[~large].sum())
    expected, seen = expected[expected > 0], seen[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    spread = 2 / (9 * freedom)  # Wilson and Hilferty's normal approximation
    limit = freedom * (1 - spread + 3.7 * math.sqrt(spread)) ** 3  # p = 1e-4
    assert statistic < limit, rule


def test_picked_weight_is_above_zero_at_both_ends():
  weights = np.zeros((3, 300), np.float32)
  weights[:, 100:200] = np.random.default_rng(0).random(100) * 1e-7
  weights[1, 120] = 1.0  # what follows it is lost in the sum
  weights[2] = 0
  weights[2, 137] = 1e-30
  for uniform in (0.0, 0.5, 1 - 2**-23, 1.0):
    index = sampling._pick(jnp.asarray(weights), jnp.full(3, uniform))
    assert (weights[np.arange(3), np.asarray(index)] > 0).all()


def test_rounding_of_sums_never_picks_a_weight_of_zero():
  rng = np.random.default_rng(0)
  weights = rng.random((64, 400)) * (rng.random((64, 400)) < 0.3)
  weights = jnp.asarray(weights, jnp.float32)
  sums = jnp.cumsum(weights, axis=-1)  # by blocks: not quite monotone
  pick = jax.jit(jax.vmap(sampling._pick, (None, 1), 1))
  index = np.asarray(pick(weights, sums / sums[:, -1:]))
  assert (np.take_along_axis(np.asarray(weights), index, axis=1) > 0).all()


def test_greedy_is_argmax_with_ties_and_any_filter():
  rng = np.random.default_rng(3)
  logits = np.float32(np.round(rng.normal(size=(4, 64))))  # many ties
  rules = create(4, 0.0, top_k=3, top_p=0.5, min_p=0.1)
  tokens, _ = sample(logits, rules, keys_of(range(4)))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))
  assert tokens.dtype == jnp.int32


def test_temperature_near_zero_is_argmax():
  logits = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
  rules = create(4, temperature=[0.0, 1e-45, 1e-38, 1e-20])
  tokens, _ = sample(logits, rules, keys_of(range(4)))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))
  kept = np.asarray(support(logits, rules))
  np.testing.assert_array_equal(kept.sum(-1), 1)


def mixed(count=4):
  logits = np.random.default_rng(4).normal(size=(count, 64)) * 2
  rules = create(
    count,
    temperature=[0.0, 1.0, 1.5, 0.7],
    top_k=[0, 5, 0, 20],
    top_p=[1.0, 1.0, 0.8, 0.95],
    min_p=[0.0, 0.0, 0.0, 0.01],
  )
  return jnp.asarray(logits, jnp.float32), rules


def test_a_row_alone_draws_what_it_draws_in_a_batch():
  logits, rules = mixed()
  for step in range(6):
    together = sample(logits, rules, keys_of([10, 11, 12, 13], step))
    for row in range(4):
      one = slice(row, row + 1)
      alone = sample(
        logits[one],
        jax.tree.map(lambda x, one=one: x[one], rules),
        keys_of([10 + row], step),
      )
      assert together[0][row] == alone[0][0]
      np.testing.assert_allclose(together[1][row], alone[1][0], rtol=1e-6)


def test_permuting_the_batch_permutes_the_draws():
  logits, rules = mixed()
  order = np.array([2, 0, 3, 1])
  ids = np.array([10, 11, 12, 13])
  changed = False
  for step in range(6):
    tokens, _ = sample(logits, rules, keys_of(ids, step))
    moved, _ = sample(
      logits[order],
      jax.tree.map(lambda x: x[order], rules),
      keys_of(ids[order], step),
    )
    np.testing.assert_array_equal(moved, tokens[order])
    other, _ = sample(logits, rules, keys_of(ids + 100, step))
    changed |= bool((other != tokens).any())
    assert other[0] == tokens[0]  # greedy
  assert changed


def test_keys_differ_by_seed_row_and_step():
  data = [
    jax.random.key_data(sampling.step_keys(sampling.row_keys(seed, ids), step))
    for seed in (0, 1)
    for ids in (jnp.arange(3), jnp.arange(3, 6))
    for step in (0, 1)
  ]
  rows = np.concatenate(data)
  assert len({tuple(row) for row in rows}) == len(rows)


# Log-probabilities and the repetition penalty.


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_logprob_is_of_the_model_whatever_the_filters(dtype):
  logits, rules = mixed()
  logits = logits.at[:, 7].set(-jnp.inf).astype(dtype)
  tokens, logprobs = sample(logits, rules, keys_of(range(4)))
  values = np.asarray(logits.astype(jnp.float32), np.float64)
  values -= np.log(np.exp(values).sum(-1, keepdims=True))
  chosen = values[np.arange(4), np.asarray(tokens)]
  np.testing.assert_allclose(logprobs, chosen, rtol=1e-5, atol=1e-6)
  assert logprobs.dtype == jnp.float32


def test_repetition_penalty_divides_positive_and_multiplies_negative():
  logits = jnp.array([[3.0, 2.0, -1.0, 1.9], [-1.0, -1.2, -1.5, -4.0]] * 2)
  seen = np.zeros((4, 4), bool)
  seen[:, 0] = True
  rules = create(4, repetition_penalty=[2.0, 1.3, 1.2, 1.0])
  tokens, logprobs = sample(logits, rules, keys_of(range(4)), seen)
  np.testing.assert_array_equal(tokens, [1, 1, 0, 0])
  raw = jax.nn.log_softmax(logits)[np.arange(4), tokens]
  np.testing.assert_allclose(logprobs, raw, rtol=1e-5)
  assert rules.needs_seen() and not create(4).needs_seen()


def test_repetition_penalty_acts_before_the_filters():
  logits = jnp.tile(jnp.array([4.0, 3.0, 2.0, -jnp.inf]), (4, 1))
  seen = np.array([[True, False, False, True]] * 4)
  rules = create(4, 1.0, top_k=[1, 2, 1, 1], repetition_penalty=10.0)
  drawn = {0: set(), 1: set()}
  for step in range(40):
    tokens, _ = sample(logits, rules, keys_of(range(4), step), seen)
    for row in drawn:
      drawn[row].add(int(tokens[row]))
  assert drawn == {0: {1}, 1: {1, 2}}


def test_seen_takes_a_prompt_without_padding_and_then_steps():
  seen = jnp.zeros((2, 6), bool)
  prompt = jnp.array([[5, 1, 1], [2, 3, 4]])
  valid = jnp.array([[False, True, True], [True, True, True]])
  seen = sampling.mark_seen(seen, prompt, valid)
  seen = sampling.mark_seen(seen, jnp.array([0, 2]))
  assert [list(np.flatnonzero(row)) for row in seen] == [[0, 1], [2, 3, 4]]


def test_seen_is_updated_in_place_under_scan():
  def run(seen, tokens):
    step = lambda seen, token: (sampling.mark_seen(seen, token), None)
    return lax.scan(step, seen, tokens)[0]

  seen = jax.ShapeDtypeStruct((8, 50_000), bool)
  tokens = jax.ShapeDtypeStruct((5, 8), jnp.int32)
  compiled = jax.jit(run, donate_argnums=0).lower(seen, tokens).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < seen.size // 10


# What is compiled.


def primitives(jaxpr, into):
  """Names of the primitives of a jaxpr; `into` tells what to descend into."""
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    yield name
    if into(name):
      for value in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr'),
      ):
        inner = getattr(value, 'jaxpr', value)
        if hasattr(inner, 'eqns'):
          yield from primitives(inner, into)


def test_greedy_skips_the_filters_and_nothing_sorts():
  logits, rules = mixed()
  jaxpr = jax.make_jaxpr(sampling.sample)(logits, rules, keys_of(range(4)))
  outside = set(primitives(jaxpr.jaxpr, lambda name: name != 'cond'))
  costly = {'while', 'scan', 'cumsum', 'random_bits', 'threefry2x32'}
  assert not outside & costly
  everywhere = set(primitives(jaxpr.jaxpr, lambda name: True))
  assert everywhere & costly >= {'cumsum', 'random_bits'}
  assert {'while', 'scan'} & everywhere
  assert not everywhere & {'sort', 'top_k', 'approx_top_k'}


def test_one_program_runs_only_what_its_settings_ask_for(monkeypatch):
  runs = []

  def counted(name):
    original = getattr(sampling, name)

    def wrapped(*args):
      jax.debug.callback(lambda: runs.append(name))
      return original(*args)

    monkeypatch.setattr(sampling, name, wrapped)

  counted('_prefix')
  counted('_draw')
  run = jax.jit(lambda *args: sampling.sample(*args))
  logits, _ = mixed()
  for rules, expected in (
    (create(4, 0.0, 3, 0.5), []),
    (create(4, [0.0, 1.0, 1.0, 1.0]), ['_draw']),
    (create(4, [0.0, 1.0, 1.0, 1.0], top_k=[3, 0, 0, 0]), ['_draw']),
    (create(4, 1.0, top_k=[0, 3, 0, 0]), ['_draw', '_prefix']),
    (create(4, 1.0, top_p=[1, 1, 1, 0.5]), ['_draw', '_prefix']),
    (create(4, 1.0, 3, 0.5), ['_draw', '_prefix', '_prefix']),
  ):
    runs.clear()
    jax.block_until_ready(run(logits, rules, keys_of(range(4))))
    jax.effects_barrier()
    assert sorted(runs) == expected
  assert run._cache_size() == 1


def scanned():
  """Tokens, log-probabilities and stops of five steps, compiled anew."""
  logits, rules = mixed()
  logits = logits.at[:, 5].set(-jnp.inf).astype(jnp.bfloat16)
  stops = np.array([3, -1], np.int32)

  def program(logits, rules, seen):
    keys = sampling.row_keys(0, jnp.arange(4))

    def step(seen, index):
      token, logprob = sampling.sample(
        logits, rules, sampling.step_keys(keys, index), seen
      )
      stop = sampling.is_stop(token, stops)
      return sampling.mark_seen(seen, token), (token, logprob, stop)

    return lax.scan(step, seen, jnp.arange(5))

  results = jax.jit(program)(logits, rules, np.zeros((4, 64), bool))
  return [np.asarray(x) for x in jax.tree.leaves(results)]


def test_same_tokens_under_x64_and_debug_nans():
  plain = scanned()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_debug_nans', True)
  try:
    other = scanned()
  finally:
    jax.config.update('jax_enable_x64', False)
    jax.config.update('jax_debug_nans', False)
  for a, b in zip(plain, other, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-6)


# Settings and stop ids.


@pytest.mark.parametrize(
  'field, value',
  [
    ('temperature', -0.1),
    ('temperature', math.nan),
    ('temperature', 'hot'),
    ('top_k', -1),
    ('top_k', 2.5),
    ('top_p', 1.1),
    ('top_p', -0.1),
    ('min_p', [0.1, 2.0]),
    ('repetition_penalty', 0.0),
    ('repetition_penalty', math.inf),
    ('top_p', [0.1, 0.2, 0.3]),
  ],
)
def test_settings_are_refused_with_field_and_rule(field, value):
  with pytest.raises(ValueError, match=rf'{field}.*(must be|give one)'):
    create(2, **{field: value})


def test_stop_ids_match_and_padding_does_not():
  tokens = jnp.array([0, 3, 5, -1], jnp.int32)
  stops = jnp.array([5, 3, -1], jnp.int32)
  np.testing.assert_array_equal(
    sampling.is_stop(tokens, stops), [False, True, True, False]
  )
  assert not sampling.is_stop(tokens, jnp.zeros((0,), jnp.int32)).any()
