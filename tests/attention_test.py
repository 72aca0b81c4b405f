"""Attention: every formulation against a numpy reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa import attention, blockwise, rope

B, N, H = 2, 4, 8


def numpy_attention(q, k, v, segments=None, window=None, softcap=None):
  """One query, one head at a time, in float64; KV head n // G."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(*q.shape[:3]):
    visible = np.arange(q.shape[1]) <= t
    if window is not None:
      visible &= np.arange(q.shape[1]) > t - window
    if segments is not None:
      visible &= np.asarray(segments[b]) == int(segments[b, t])
    scores = k[b, visible, n // group] @ q[b, t, n]
    if softcap is not None:
      scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    out[b, t, n] = (weights / weights.sum()) @ v[b, visible, n // group]
  return out


def make_inputs(K, T, packed):
  keys = jax.random.split(jax.random.key(K), 4)
  q = jax.random.normal(keys[0], (B, T, N, H))
  k = jax.random.normal(keys[1], (B, T, K, H))
  v = jax.random.normal(keys[2], (B, T, K, H))
  segments = None
  if packed:
    starts = jax.random.bernoulli(keys[3], 0.2, (B, T))
    segments = jnp.cumsum(starts, axis=1).astype(jnp.int32)
  return q, k, v, segments


IMPLEMENTATIONS = {
  'einsum': lambda *a: attention.attention(
    *a[:4], window=a[4], implementation='einsum'
  ),
  'fused': lambda *a: attention.attention(
    *a[:4], window=a[4], implementation='fused'
  ),
  'unrolled': lambda *a: blockwise.blockwise_attention(*a, 7),
  # 19 tokens are more than 16 blocks of one.
  'looped': lambda *a: blockwise.blockwise_attention(*a, 1),
}


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(q, k, v, segments, window, name):
  return IMPLEMENTATIONS[name](q, k, v, segments, window)


@pytest.mark.parametrize('K', [4, 2, 1])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('window', [None, 4])
def test_all_implementations_match_numpy(K, packed, window):
  inputs = make_inputs(K, 19, packed)
  expected = numpy_attention(*inputs, window)
  for name in IMPLEMENTATIONS:
    np.testing.assert_allclose(
      run(*inputs, window, name), expected, atol=2e-6, err_msg=name
    )


@pytest.mark.parametrize('K', [4, 2, 1])
@pytest.mark.parametrize('window', [None, 4])
def test_blockwise_gradients_match_those_of_the_reference(K, window):
  q, k, v, segments = make_inputs(K, 19, packed=True)
  cotangent = jax.random.normal(jax.random.key(9), q.shape)

  def gradients(name):
    value = lambda *qkv: (run(*qkv, segments, window, name) * cotangent).sum()
    return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(q, k, v)

  expected = gradients('einsum')
  for name in ('unrolled', 'looped'):
    for got, want in zip(gradients(name), expected, strict=True):
      np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


def test_a_softcap_bounds_scores_forward_and_backward():
  q, k, v, segments = make_inputs(2, 19, packed=True)
  cotangent = jax.random.normal(jax.random.key(9), q.shape)
  softcap, window = 0.7, 5
  functions = {
    'einsum': lambda q, k, v: attention.attention(
      q,
      k,
      v,
      segments,
      window=window,
      softcap=softcap,
      implementation='einsum',
    ),
    'unrolled': lambda q, k, v: blockwise.blockwise_attention(
      q, k, v, segments, window, 7, softcap
    ),
    'looped': lambda q, k, v: blockwise.blockwise_attention(
      q, k, v, segments, window, 1, softcap
    ),
  }

  def value(name, *qkv):
    out = functions[name](*qkv)
    return (out * cotangent).sum(), out

  pulls = {
    name: jax.jit(
      jax.value_and_grad(functools.partial(value, name), (0, 1, 2), True)
    )(q, k, v)
    for name in functions
  }
  expected = numpy_attention(q, k, v, segments, window, softcap)
  plain = numpy_attention(q, k, v, segments, window)
  assert np.abs(expected - plain).max() > 0.1
  for name, ((_, out), grads) in pulls.items():
    np.testing.assert_allclose(out, expected, atol=2e-6, err_msg=name)
    for got, want in zip(grads, pulls['einsum'][1], strict=True):
      np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


def test_fused_attention_refuses_a_softcap_and_auto_goes_round_it():
  q, k, v, _ = make_inputs(2, 8, packed=False)
  options = dict(softcap=1.0)
  with pytest.raises(ValueError, match='fused attention has no softcap=1.0'):
    attention.attention(q, k, v, None, implementation='fused', **options)
  np.testing.assert_allclose(
    attention.attention(q, k, v, None, **options),
    numpy_attention(q, k, v, softcap=1.0),
    atol=2e-6,
  )


def test_loop_pads_a_last_block_without_nan():
  q, k, v, segments = make_inputs(2, 35, packed=True)  # 18 blocks of two
  value = lambda *qkv: blockwise.blockwise_attention(
    *qkv, segments, None, 2
  ).sum()
  with jax.debug_nans(True):
    got, grads = jax.jit(jax.value_and_grad(value, (0, 1, 2)))(q, k, v)
  expected = numpy_attention(q, k, v, segments).sum()
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  assert all(np.isfinite(g).all() for g in grads)


def test_unrolled_program_has_no_full_score_matrix():
  T, block = 256, 32
  shape = jax.ShapeDtypeStruct((1, T, N, H), jnp.float32)
  value = lambda q, k, v: blockwise.blockwise_attention(
    q, k, v, None, None, block
  ).sum()
  text = (
    jax.jit(jax.grad(value, (0, 1, 2))).lower(shape, shape, shape).as_text()
  )
  assert f'{block}x{T}xf32' in text
  assert f'{T}x{T}xf32' not in text


def test_half_precision_keeps_float32_accuracy_of_the_softmax():
  q, k, v, _ = make_inputs(2, 64, packed=False)
  half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
  exact = numpy_attention(*half)
  out = blockwise.blockwise_attention(*half, None, None, 16)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


def test_query_heads_read_kv_heads_in_blocks_never_in_tiles():
  q, k, v, _ = make_inputs(2, 8, packed=False)
  grouped = attention.attention(q, k, v, None)
  block = lambda x: jnp.repeat(x, 2, axis=2)  # 0 0 1 1
  tile = lambda x: jnp.tile(x, (1, 1, 2, 1))  # 0 1 0 1
  np.testing.assert_allclose(
    grouped, attention.attention(q, block(k), block(v), None), atol=1e-6
  )
  wrong = attention.attention(q, tile(k), tile(v), None)
  assert np.abs(grouped - wrong).max() > 1e-3


def test_rope_scores_depend_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, H))
  frequencies = rope.rope_frequencies(H, 10_000.0)
  angles = lambda t: rope.rope_angles(jnp.array([[t]]), frequencies)
  rotate = lambda x, t: rope.apply_rope(x, rope.rotation(angles(t), x.dtype))
  near = (rotate(q, 7) * rotate(k, 3)).sum()
  far = (rotate(q, 1007) * rotate(k, 1003)).sum()
  other = (rotate(q, 8) * rotate(k, 3)).sum()
  np.testing.assert_allclose(near, far, rtol=1e-3)
  assert abs(near - other) > 1e-3


def test_rope_angles_stay_exact_beyond_what_bfloat16_can_count():
  positions = jnp.array([[256, 257, 4095]])
  frequencies = rope.rope_frequencies(H, 10_000.0)
  angles = rope.rope_angles(positions, frequencies)
  exact = np.array([256, 257, 4095])[:, None] * 10_000.0 ** (
    -np.arange(0, H, 2) / H
  )
  np.testing.assert_allclose(np.cos(angles[0]), np.cos(exact), atol=4e-3)
  np.testing.assert_allclose(np.sin(angles[0]), np.sin(exact), atol=4e-3)
  ones = jnp.ones((1, 3, 1, H), jnp.bfloat16)
  rotated = rope.apply_rope(ones, rope.rotation(angles, ones.dtype))
  assert (rotated[0, 0] != rotated[0, 1]).any()


def test_partial_rope_leaves_the_rest_of_the_head():
  x = jax.random.normal(jax.random.key(0), (1, 3, 2, H))
  frequencies = rope.rope_frequencies(4, 10_000.0)
  angles = rope.rope_angles(jnp.array([[0, 5, 9]]), frequencies)
  rotated = rope.apply_rope(x, rope.rotation(angles, x.dtype))
  np.testing.assert_array_equal(rotated[..., 4:], x[..., 4:])
  assert (rotated[0, 1, :, :4] != x[0, 1, :, :4]).all()
