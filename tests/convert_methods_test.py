"""Merging heads: what leaves a model unchanged, and what is least in squares."""

import dataclasses
import itertools

import numpy as np
import pytest

from gqa.config import ModelConfig
from gqa.convert import (
  alignment,
  disguise,
  grouping,
  low_rank,
  merging,
  methods,
)
from gqa.convert import heads as heads_lib
from gqa.convert.heads import Heads, Moments

CONFIG = ModelConfig(
  vocab_size=11,
  num_layers=1,
  embed_dim=20,
  num_heads=8,
  num_kv_heads=4,
  head_dim=6,
  mlp_dim=8,
  max_len=16,
)
ALIGNING = ('aligned', 'aligned_renorm', 'low_rank')
# Of the planes of a head in a window: the last two are slow.
TURNS = np.array([9.0, 0.4, 0.2])
# How much of a head RoPE rotates: all, a part, nothing.
ROPE = pytest.mark.parametrize('rope_dim', [6, 4, 0])


def config_of(rope_dim, **fields):
  position = 'rope' if rope_dim else 'learned'
  fraction = rope_dim / CONFIG.head_dim or 1.0
  return dataclasses.replace(
    CONFIG, position=position, rope_fraction=fraction, **fields
  )


def draw_moments(rng, size, rope_dim=6):
  x = rng.normal(size=(3 * size, size)) @ rng.normal(size=(size, size))
  x = x + rng.normal(size=size)
  turns = TURNS[: rope_dim // 2]
  return Moments(x.mean(axis=0), x.T @ x / len(x), turns)


def draw_heads(rng, num_heads=8, num_kv_heads=4, head_dim=6, embed_dim=20):
  draw = lambda heads: rng.normal(size=(heads, head_dim, embed_dim))
  return Heads(
    query=draw(num_heads),
    key=draw(num_kv_heads),
    value=draw(num_kv_heads),
    out=draw(num_heads),
  )


def attention(heads, x, rope_dim):
  """A plain attention in float64: loops over heads, RoPE as complex numbers."""
  T, H = len(x), heads.key.shape[1]
  half = rope_dim // 2
  turn = np.exp(1j * np.outer(np.arange(T), 0.7 ** np.arange(half)))

  def rotated(y):  # [T, H]
    z = (y[:, :half] + 1j * y[:, half:rope_dim]) * turn
    return np.concatenate([z.real, z.imag, y[:, rope_dim:]], axis=-1)

  out = 0.0
  group = len(heads.query) // len(heads.key)
  for n, (query, project) in enumerate(
    zip(heads.query, heads.out, strict=True)
  ):
    q = rotated(x @ query.T)
    k = rotated(x @ heads.key[n // group].T)
    scores = np.where(np.tri(T, dtype=bool), q @ k.T * H**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = out + weights @ x @ heads.value[n // group].T @ project
  return out


def merge(heads, config, num_kv_heads, method, moments, grouping='contiguous'):
  """`methods.merge_layer` on heads instead of parameters."""
  options = methods.Options(method=method, grouping=grouping)
  return methods.merge_heads(heads, config, num_kv_heads, options, moments)


@ROPE
def test_turning_heads_leaves_the_attention_unchanged(rope_dim):
  rng = np.random.default_rng(0)
  heads = draw_heads(rng)
  x = rng.normal(size=(7, 20)) * 0.3
  turned = disguise.scramble(heads, rope_dim, rng)
  assert np.abs(turned.key - heads.key).max() > 0.1
  np.testing.assert_allclose(
    attention(turned, x, rope_dim), attention(heads, x, rope_dim), atol=1e-9
  )


@pytest.mark.parametrize('method', methods.METHODS)
def test_as_many_heads_as_before_are_the_same_heads(method):
  rng = np.random.default_rng(1)
  heads, moments = draw_heads(rng), draw_moments(rng, 20)
  for how in methods.GROUPINGS:
    same, _ = merge(heads, CONFIG, 4, method, moments, how)
    for name in ('query', 'key', 'value', 'out'):
      np.testing.assert_allclose(
        getattr(same, name), getattr(heads, name), atol=1e-6
      )


@ROPE
@pytest.mark.parametrize('method', sorted(set(methods.METHODS) - {'random'}))
def test_repeated_heads_come_back_in_their_places(method, rope_dim):
  rng = np.random.default_rng(2)
  heads, moments = draw_heads(rng), draw_moments(rng, 20, rope_dim)
  back, _ = merge(
    disguise.repeat(heads, 2), config_of(rope_dim), 4, method, moments
  )
  x = rng.normal(size=(7, 20)) * 0.3
  np.testing.assert_allclose(
    attention(back, x, rope_dim), attention(heads, x, rope_dim), atol=1e-6
  )
  if method != 'low_rank':  # which is free to take another basis
    np.testing.assert_allclose(back.key, heads.key, atol=1e-6)
    np.testing.assert_allclose(back.value, heads.value, atol=1e-6)


@ROPE
@pytest.mark.parametrize('method', ALIGNING)
@pytest.mark.parametrize('how', ['similarity', 'error'])
def test_scrambled_heads_are_recovered(method, how, rope_dim):
  rng = np.random.default_rng(3)
  heads, moments = draw_heads(rng), draw_moments(rng, 20, rope_dim)
  x = rng.normal(size=(7, 20)) * 0.3
  scrambled = disguise.scramble(disguise.repeat(heads, 2), rope_dim, rng)
  config = config_of(rope_dim)
  back, report = merge(scrambled, config, 4, method, moments, how)
  expected = attention(heads, x, rope_dim)
  np.testing.assert_allclose(attention(back, x, rope_dim), expected, atol=1e-6)
  assert report['key_captured'] > 1 - 1e-9
  assert report['value_captured'] > 1 - 1e-9
  mean, _ = merge(scrambled, config, 4, 'mean', moments, 'similarity')
  assert np.abs(attention(mean, x, rope_dim) - expected).max() > 0.1


@ROPE
def test_each_method_does_best_by_its_own_measure(rope_dim):
  rng = np.random.default_rng(4)
  heads, moments = draw_heads(rng), draw_moments(rng, 20, rope_dim)
  second = moments.second
  mean = [merging.mean(w, 2) for w in (heads.key, heads.value)]
  aligned = [
    alignment.align_keys(heads.key, 2, second, rope_dim),
    alignment.align_values(heads.value, 2, second),
  ]
  for weights, one, other in zip(
    (heads.key, heads.value), aligned, mean, strict=True
  ):
    lost = [weights - m.expanded() for m in (one, other)]
    errors = [merging.energies(x, second).sum() for x in lost]
    assert errors[0] < 0.99 * errors[1]
  keys = low_rank.keys(heads, 2, moments, rope_dim)
  values = low_rank.values(heads, 2, moments)
  error_of = lambda m: low_rank.key_error(heads, m, moments)
  assert error_of(keys) < 0.99 * min(error_of(aligned[0]), error_of(mean[0]))
  error_of = lambda m: low_rank.value_error(heads, m, second)
  assert error_of(values) < 0.99 * min(error_of(aligned[1]), error_of(mean[1]))


@ROPE
def test_no_perturbation_beats_the_least_squares_optimum(rope_dim):
  rng = np.random.default_rng(5)
  heads, moments = draw_heads(rng), draw_moments(rng, 20, rope_dim)
  K, H = 4, 6
  still = np.setdiff1d(np.arange(H), [0, rope_dim // 2] if rope_dim else [])
  keys = low_rank.keys(heads, 2, moments, rope_dim)
  values = low_rank.values(heads, 2, moments)
  best_key = low_rank.key_error(heads, keys, moments)
  best_value = low_rank.value_error(heads, values, moments.second)
  for size in np.repeat([1e-4, 1e-2, 1.0], 20):
    draw = lambda like, size=size: size * rng.normal(size=like.shape)
    # What planes that turn may be multiplied by; all else may be mixed.
    phases = rng.normal(size=(2, K, rope_dim // 2))
    moved = heads_lib.plane_maps(
      phases[0] + 1j * phases[1], np.zeros((K, H - rope_dim, H - rope_dim))
    )
    moved[:, still[:, None], still] = rng.normal(
      size=(K, len(still), len(still))
    )
    other = heads_lib.Merge(
      keys.shared + draw(keys.shared), keys.maps + size * moved
    )
    assert low_rank.key_error(heads, other, moments) >= best_key
    other = heads_lib.Merge(
      values.shared + draw(values.shared), values.maps + draw(values.maps)
    )
    assert low_rank.value_error(heads, other, moments.second) >= best_value


def test_the_value_error_is_that_of_all_heads_outputs():
  rng = np.random.default_rng(6)
  heads = draw_heads(rng)
  x = rng.normal(size=(50, 20))
  second = x.T @ x / len(x)
  moments = Moments(x.mean(axis=0), second, TURNS)
  values = low_rank.values(heads, 2, moments)
  lost = heads.value - values.expanded()
  expected = sum(
    np.square(x @ lost[n // 2].T @ heads.out[n]).sum(axis=-1).mean()
    for n in range(8)
  )
  error = low_rank.value_error(heads, values, second)
  np.testing.assert_allclose(error, expected)


@ROPE
def test_the_key_error_is_that_of_all_scores(rope_dim):
  """Of queries and keys of any two tokens: one plane turns, at any angle.

  Elsewhere a score's mean over the keys does not count, or only in as far as
  slow planes turn it, by angles from 0 to 0.4.
  """
  rng = np.random.default_rng(7)
  heads = draw_heads(rng)
  x = rng.normal(size=(40, 20)) + 1.0
  turns = TURNS[: rope_dim // 2]
  moments = Moments(x.mean(axis=0), x.T @ x / len(x), turns)
  keys = low_rank.keys(heads, 2, moments, rope_dim)
  lost = heads.key - keys.expanded()
  turning = [0, rope_dim // 2] if rope_dim else []
  still = np.setdiff1d(np.arange(6), turning)
  share = np.linspace(0, 0.4, 10_001).var() if rope_dim else 0.0
  expected = 0.0
  for n, query in enumerate(heads.query):
    q, k = x @ query.T, x @ lost[n // 2].T
    scores = q[:, still] @ k[:, still].T
    expected += (scores.var(axis=1) + share * scores.mean(axis=1) ** 2).mean()
    if turning:  # By thirds of a circle the squares of both parts are alike.
      phases = np.exp(2j * np.pi * np.arange(3) / 3)
      q, k = (y[:, turning[0]] + 1j * y[:, turning[1]] for y in (q, k))
      scores = (q.conj()[:, None] * k[None])[..., None] * phases
      expected += np.square(scores.real).mean()
  error = low_rank.key_error(heads, keys, moments)
  np.testing.assert_allclose(error, expected, rtol=1e-3)


def test_normalised_keys_are_not_turned():
  rng = np.random.default_rng(8)
  heads, moments = draw_heads(rng), draw_moments(rng, 20)
  config = dataclasses.replace(CONFIG, qk_norm=True)
  merged, report = merge(heads, config, 2, 'low_rank', moments)
  assert report['key_method'] == 'mean_renorm'
  np.testing.assert_array_equal(merged.query, heads.query)
  assert np.abs(merged.out - heads.out).max() > 0.1


def test_a_model_with_normalised_keys_is_not_disguised():
  config = dataclasses.replace(CONFIG, qk_norm=True)
  with pytest.raises(ValueError, match='qk_norm=True'):
    disguise.expand({}, config, np.random.default_rng(0))


@pytest.mark.parametrize(('heads', 'groups'), [(6, 2), (6, 3), (8, 4)])
def test_no_partition_is_more_alike_than_the_one_found(heads, groups):
  rng = np.random.default_rng(heads + groups)
  similarity = rng.normal(size=(heads, heads))
  similarity = similarity + similarity.T
  size = heads // groups

  def score(order):
    blocks = np.asarray(order).reshape(groups, size)
    return sum(
      similarity[a, b]
      for block in blocks
      for a, b in itertools.combinations(block, 2)
    )

  order = grouping.by_similarity(similarity, groups)
  assert sorted(order) == list(range(heads))
  best = max(score(p) for p in itertools.permutations(range(heads)))
  np.testing.assert_allclose(score(order), best)


def test_many_heads_find_the_groups_that_were_planted():
  rng = np.random.default_rng(9)
  group = rng.permutation(np.arange(24) // 4)
  similarity = rng.normal(size=(24, 24)) * 0.3
  similarity = similarity + similarity.T + (group[:, None] == group)
  order = grouping.by_similarity(similarity, 6)
  assert sorted(order) == list(range(24))
  assert (group[order].reshape(6, 4) == group[order[::4], None]).all()


def test_heads_stay_where_they_are_when_groups_are_contiguous():
  similarity = np.kron(np.eye(3), np.ones((2, 2)))
  order = grouping.by_similarity(similarity, 3)
  np.testing.assert_array_equal(order, grouping.contiguous(6))
