"""The sliced loss against plain ones, and what it never holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa import loss

B, T, V, D = 2, 12, 20, 6
CASES = {
  'plain': {},
  'z_loss': dict(z_loss=0.1),
  'softcap': dict(softcap=2.0),
  'both': dict(z_loss=0.1, softcap=2.0),
}


def inputs(dtype=np.float32):
  rng = np.random.default_rng(0)
  features = rng.normal(size=(B, T, D)).astype(dtype)
  head = rng.normal(size=(V, D)).astype(dtype)
  targets = rng.integers(V, size=(B, T)).astype(np.int32)
  weights = rng.uniform(size=(B, T)).astype(np.float32)
  weights[:, ::5] = 0
  return features, head, targets, weights


def limit_slices(monkeypatch, elements, heads=0):
  monkeypatch.setattr(loss, 'SLICE_ELEMENTS', elements)
  monkeypatch.setattr(loss, 'SLICE_HEADS', heads)


def numpy_cross_entropy(
  features, head, targets, weights, *, z_loss=0.0, softcap=None
):
  """Position by position, in float64."""
  total, rows = 0.0, np.zeros(len(features))
  for b, t in np.ndindex(*targets.shape):
    logits = head.astype(np.float64) @ features[b, t].astype(np.float64)
    if softcap is not None:
      logits = softcap * np.tanh(logits / softcap)
    log_z = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    nll = log_z - logits[targets[b, t]]
    rows[b] += weights[b, t] * nll
    total += weights[b, t] * (nll + z_loss * log_z**2)
  return total, rows


def naive_objective(
  features, head, targets, weights, *, z_loss=0.0, softcap=None
):
  """Whole logits and automatic differentiation."""
  logits = jnp.einsum('BTD,VD->BTV', features, head)
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  hot = jax.nn.one_hot(targets, V)
  nll = -(jax.nn.log_softmax(logits) * hot).sum(axis=-1)
  return ((nll + z_loss * log_z**2) * weights).sum()


def values_and_grads(*arrays, **settings):
  """((objective, rows), (dfeatures, dhead)) of 3 times the objective."""

  def objective(features, head, targets, weights):
    total, rows = loss.cross_entropy(
      features, head, targets, weights, **settings
    )
    return 3.0 * total, (total, rows)

  step = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
  grads, values = step(*arrays)
  return values, grads


@pytest.fixture(params=['whole', 'sliced'])
def slices(request, monkeypatch):
  """Runs a test with one slice, and with slices of 5, 5 and 2 positions."""
  if request.param == 'sliced':
    limit_slices(monkeypatch, B * V * 5)
  return request.param


@pytest.mark.parametrize('case', CASES)
def test_values_and_gradients_match_plain_ones(case, slices):
  arrays, settings = inputs(), CASES[case]
  (total, rows), grads = values_and_grads(*arrays, **settings)
  expected_total, expected_rows = numpy_cross_entropy(*arrays, **settings)
  np.testing.assert_allclose(total, expected_total, rtol=1e-5)
  np.testing.assert_allclose(rows, expected_rows, rtol=1e-5)
  naive = jax.grad(functools.partial(naive_objective, **settings), (0, 1))
  for got, want in zip(grads, naive(*arrays), strict=True):
    np.testing.assert_allclose(got, 3.0 * want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('positions', [1, 4, 5, 7, 11, 12, 99])
def test_slices_cover_each_position_once_and_stay_small(positions, monkeypatch):
  limit_slices(monkeypatch, B * V * positions)
  features, head, *_ = inputs()
  parts = loss._slices(features, head)
  covered = [t for part in parts for t in range(part.start, part.stop)]
  assert covered == list(range(T))
  assert max(part.stop - part.start for part in parts) <= positions


def test_a_slice_is_no_smaller_than_the_head_it_is_added_to(monkeypatch):
  features, head, *_ = inputs()
  limit_slices(monkeypatch, 1, heads=1)  # D positions of one row, D / B of B
  parts = loss._slices(features, head)
  assert [part.stop - part.start for part in parts] == [D // B] * (T * B // D)


def test_one_position_is_a_slice_even_if_it_is_too_large(monkeypatch):
  limit_slices(monkeypatch, 1)
  arrays = inputs()
  assert len(loss._slices(*arrays[:2])) == T
  (total, _), _ = values_and_grads(*arrays)
  np.testing.assert_allclose(total, numpy_cross_entropy(*arrays)[0], rtol=1e-5)


def largest_array(compiled):
  """Elements of the largest array in a compiled program."""
  shapes = re.findall(r'\b[a-z]+\d+\[([\d,]+)\]', compiled.as_text())
  return max(np.prod([int(n) for n in s.split(',')]) for s in shapes)


@pytest.mark.parametrize('training', [False, True])
def test_no_array_of_all_logits_exists_in_the_sliced_program(
  training, monkeypatch
):
  def compile_():
    objective = lambda *arrays: loss.cross_entropy(*arrays)[0]
    step = jax.grad(objective, argnums=(0, 1)) if training else objective
    return jax.jit(step).lower(*inputs()).compile()

  assert largest_array(compile_()) == B * T * V  # One slice: all of them.
  limit_slices(monkeypatch, B * V * 3)
  assert largest_array(compile_()) <= max(B * V * 3, B * T * D, V * D)


def test_rows_do_not_depend_on_other_rows():
  features, head, targets, weights = inputs()
  _, rows = loss.cross_entropy(features, head, targets, weights, z_loss=0.1)
  assert rows.shape == (B,)
  for b in range(B):
    part = slice(b, b + 1)
    alone = loss.cross_entropy(
      features[part], head, targets[part], weights[part], z_loss=0.1
    )
    np.testing.assert_allclose(rows[b], alone[1][0], rtol=1e-6)


def test_rows_have_no_gradient():
  features, head, targets, weights = inputs()
  value = lambda x: loss.cross_entropy(x, head, targets, weights)[1].sum()
  np.testing.assert_array_equal(
    jax.grad(value)(features), np.zeros_like(features)
  )


def test_positions_of_weight_zero_do_not_count(slices):
  features, head, targets, weights = inputs()
  (total, rows), (dfeatures, dhead) = values_and_grads(
    features, head, targets, weights, z_loss=0.1
  )
  ignored = weights == 0
  assert ignored.any()
  np.testing.assert_array_equal(dfeatures[ignored], 0)
  other = np.where(ignored[..., None], 50 * features[::-1], features)
  changed = values_and_grads(
    other, head, np.where(ignored, 0, targets), weights, z_loss=0.1
  )
  np.testing.assert_allclose(changed[0][0], total, rtol=1e-5)
  np.testing.assert_allclose(changed[0][1], rows, rtol=1e-5)
  np.testing.assert_allclose(changed[1][1], dhead, rtol=1e-4, atol=1e-5)


def test_a_batch_without_any_weight_is_zero_with_zero_gradients(slices):
  features, head, targets, weights = inputs()
  with jax.debug_nans(True):
    values, grads = values_and_grads(
      features, head, targets, 0 * weights, z_loss=0.1, softcap=2.0
    )
  for leaf in (*values, *grads):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_large_logits_stay_finite():
  features, head, targets, weights = inputs()
  (total, _), grads = values_and_grads(1e3 * features, head, targets, weights)
  expected, _ = numpy_cross_entropy(1e3 * features, head, targets, weights)
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert all(np.isfinite(g).all() for g in grads)


def test_bfloat16_features_are_summed_in_float32(slices):
  arrays = inputs(jnp.bfloat16)
  (total, rows), grads = values_and_grads(*arrays, z_loss=0.1)
  assert total.dtype == rows.dtype == jnp.float32
  assert all(g.dtype == jnp.bfloat16 for g in grads)
  expected, expected_rows = numpy_cross_entropy(*arrays, z_loss=0.1)
  # The products are exact in float32: only inputs and gradients are rounded.
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  np.testing.assert_allclose(rows, expected_rows, rtol=1e-5)
  exact = [np.float32(x) if x.dtype == jnp.bfloat16 else x for x in arrays]
  naive = jax.grad(functools.partial(naive_objective, z_loss=0.1), (0, 1))
  for got, want in zip(grads, naive(*exact), strict=True):
    np.testing.assert_allclose(
      np.float32(got), 3.0 * want, rtol=0.03, atol=0.05
    )


def test_bfloat16_gradients_are_rounded_once_whatever_the_slices(monkeypatch):
  arrays = inputs(jnp.bfloat16)
  _, whole = values_and_grads(*arrays)
  limit_slices(monkeypatch, 1)
  _, sliced = values_and_grads(*arrays)
  for got, want in zip(sliced, whole, strict=True):
    np.testing.assert_allclose(
      np.float32(got), np.float32(want), rtol=2.0**-7, atol=1e-4
    )
