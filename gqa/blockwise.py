"""Grouped attention that never holds T x S scores, forward and backward.

Rows of scores are made, used and dropped (Rabe and Staats 2021; Dao et al.
2022), and what lies right of the diagonal is not computed at all. Axes as in
attention.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gqa import linear
from gqa import scores as scores_lib

BLOCK = 128  # query rows at a time
UNROLLED_BLOCKS = 16  # up to here blocks are unrolled, above they are looped


def blockwise_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  window: int | None = None,
  block: int = BLOCK,
  softcap: float | None = None,
) -> jax.Array:
  """`attention` in blocks of query rows; arguments as there.

  Up to UNROLLED_BLOCKS blocks each row block meets the keys left of its
  diagonal in one product. Longer inputs loop over square tiles with a running
  softmax, so memory is linear in T and the program's size does not grow.
  """
  out = _blockwise(*_head_major(q, k, v), segments, window, softcap, block)
  return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def blockwise_with_lse(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  window: int | None = None,
  block: int = BLOCK,
  softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`blockwise_attention` to be merged with attention to other keys.

  It has no gradient of its own.

  Returns:
    [B, K, G, T, H] in q's dtype, and the log-sum-exp of scores [B, K, G, T].
  """
  return _forward(*_head_major(q, k, v), segments, window, softcap, block)


def _head_major(q, k, v):
  """[B, T, heads, H] -> q [B, K, G, T, H] and k, v [B, K, T, H]."""
  B, T, N, H = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  return q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _blockwise(q, k, v, segments, window, softcap, block):
  """Rows q [B, K, G, T, H] attend to k, v [B, K, T, H]; returns like q."""
  out, _ = _forward(q, k, v, segments, window, softcap, block)
  return out


def _blockwise_fwd(q, k, v, segments, window, softcap, block):
  out, lse = _forward(q, k, v, segments, window, softcap, block)
  return out, (q, k, v, segments, out, lse)


def _blockwise_bwd(window, softcap, block, residuals, grad):
  q, k, v, segments, out, lse = residuals
  # Written as a product: XLA's sums over so short an axis are slow on CPU.
  delta = jnp.einsum(
    'BKGTH,BKGTH->BKGT',
    grad.astype(jnp.float32),
    out.astype(jnp.float32),
    precision=lax.Precision.HIGHEST,
  )
  backward = _unrolled_backward if _unrolls(q, block) else _looped_backward
  dq, dk, dv = backward(
    q, k, v, segments, grad, lse, delta, window, softcap, block
  )
  # The tiles' dk and dv are [B, K, H, T].
  dk, dv = linear.transposed(dk), linear.transposed(dv)
  return *(x.astype(q.dtype) for x in (dq, dk, dv)), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _unrolls(q: jax.Array, block: int) -> bool:
  return q.shape[3] <= block * UNROLLED_BLOCKS


def _forward(q, k, v, segments, window, softcap, block):
  """Returns out like q, and the log-sum-exp of scores [B, K, G, T]."""
  forward = _unrolled_forward if _unrolls(q, block) else _looped_forward
  return forward(q, k, v, segments, window, softcap, block)


def _ranges(T: int, window: int | None, block: int):
  """Row blocks as (first row, end row, first key, end key)."""
  for start in range(0, T, block):
    end = min(start + block, T)
    left = 0 if window is None else max(0, start - window + 1)
    yield start, end, left, end


def _tile_mask(rows, columns, window, row_segments, column_segments):
  """[B or 1, 1, 1, rows, columns] bool."""
  mask = scores_lib.causal_mask(rows, columns, window)[None]
  if row_segments is not None:
    mask = mask & (row_segments[:, :, None] == column_segments[:, None, :])
  return mask[:, None, None]


def _scores(q, k, mask, softcap):
  """[B, K, G, T, S] float32 from q [B, K, G, T, H] and k [B, K, S, H]."""
  scores = jnp.einsum(
    'BKGTH,BKSH->BKGTS', q, k, preferred_element_type=jnp.float32
  )
  return jnp.where(mask, scores_lib.capped(scores, softcap), scores_lib.MASKED)


def _tile_backward(q, k, v, grad, lse, delta, mask, softcap):
  """Gradients that one tile of scores sends to its q, k and v, float32.

  Shapes: q, grad [B, K, G, T, H]; k, v [B, K, S, H]; lse, delta [B, K, G, T].
  """
  scores = _scores(q, k, mask, softcap)
  weights = jnp.exp(scores - lse[..., None])
  pulled = jnp.einsum(
    'BKGTH,BKSH->BKGTS', grad, v, preferred_element_type=jnp.float32
  )
  dscores = weights * (pulled - delta[..., None])
  if softcap is not None:
    # Where masked the weight is 0, but the score too large for the slope.
    scores = jnp.where(mask, scores, 0.0)
    dscores = dscores * (1.0 - (scores / softcap) ** 2)
  dscores = dscores.astype(q.dtype)
  # dk and dv with the head dim before the length: the products are then
  # plain row-major ones, up to twice as fast on CPU.
  into = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  dv = into('BKGTS,BKGTH->BKHS', weights.astype(q.dtype), grad)
  dk = into('BKGTS,BKGTH->BKHS', dscores, q)
  dq = into('BKGTS,BKSH->BKGTH', dscores, k)
  return dq, dk, dv


def _segments_of(segments, start, end):
  return None if segments is None else segments[:, start:end]


def _unrolled_forward(q, k, v, segments, window, softcap, block):
  outs, lses = [], []
  for start, end, left, right in _ranges(q.shape[3], window, block):
    mask = _tile_mask(
      jnp.arange(start, end),
      jnp.arange(left, right),
      window,
      _segments_of(segments, start, end),
      _segments_of(segments, left, right),
    )
    scores = _scores(q[..., start:end, :], k[:, :, left:right], mask, softcap)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum(
      'BKGTS,BKSH->BKGTH',
      weights.astype(q.dtype),
      v[:, :, left:right],
      preferred_element_type=jnp.float32,
    )
    outs.append((out / total).astype(q.dtype))
    lses.append((top + jnp.log(total))[..., 0])
  return jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)


def _unrolled_backward(
  q, k, v, segments, grad, lse, delta, window, softcap, block
):
  B, K, T, H = k.shape
  dq = []
  dk = dv = jnp.zeros((B, K, H, T), jnp.float32)
  for start, end, left, right in _ranges(T, window, block):
    mask = _tile_mask(
      jnp.arange(start, end),
      jnp.arange(left, right),
      window,
      _segments_of(segments, start, end),
      _segments_of(segments, left, right),
    )
    tile = _tile_backward(
      q[..., start:end, :],
      k[:, :, left:right],
      v[:, :, left:right],
      grad[..., start:end, :],
      lse[..., start:end],
      delta[..., start:end],
      mask,
      softcap,
    )
    dq.append(tile[0])
    dk = dk.at[..., left:right].add(tile[1])
    dv = dv.at[..., left:right].add(tile[2])
  return jnp.concatenate(dq, axis=3), dk, dv


def _blocks(x: jax.Array, block: int, axis: int) -> jax.Array:
  """Pads a length axis, splits it in blocks, and moves those to the front."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % block)
  x = jnp.pad(x, widths)
  shape = (*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _unblocks(x: jax.Array, length: int, axis: int) -> jax.Array:
  """Undoes `_blocks`."""
  x = jnp.moveaxis(x, 0, axis)
  shape = (*x.shape[:axis], -1, *x.shape[axis + 2 :])
  return jax.lax.slice_in_dim(x.reshape(shape), 0, length, axis=axis)


def _block_segments(segments, batch, length, block):
  """[n, B, block]; padding is a segment of its own."""
  if segments is None:
    segments = jnp.zeros((batch, length), jnp.int32)
  padding = ((0, 0), (0, -length % block))
  return _blocks(jnp.pad(segments, padding, constant_values=-1), block, 1)


def _first_tile(row, window, block):
  """The first key block that row block `row` sees any key of."""
  if window is None:
    return 0
  return jnp.maximum(0, row * block - window + 1) // block


def _loop_mask(row, column, segments, window, block):
  ids = jnp.arange(block)
  return _tile_mask(
    row * block + ids,
    column * block + ids,
    window,
    segments[row],
    segments[column],
  )


def _looped_forward(q, k, v, segments, window, softcap, block):
  B, T, dtype = q.shape[0], q.shape[3], q.dtype
  segments = _block_segments(segments, B, T, block)
  rows = _blocks(q, block, 3)  # [n, B, K, G, block, H]
  keys, values = _blocks(k, block, 2), _blocks(v, block, 2)

  def attend_row(row):
    def attend_tile(column, carry):
      out, top, total = carry
      mask = _loop_mask(row, column, segments, window, block)
      scores = _scores(rows[row], keys[column], mask, softcap)
      new_top = jnp.maximum(top, scores.max(axis=-1))
      weights = jnp.exp(scores - new_top[..., None])
      shrink = jnp.exp(top - new_top)
      total = total * shrink + weights.sum(axis=-1)
      out = out * shrink[..., None] + jnp.einsum(
        'BKGTS,BKSH->BKGTH',
        weights.astype(dtype),
        values[column],
        preferred_element_type=jnp.float32,
      )
      return out, new_top, total

    shape = rows.shape[1:]
    carry = (
      jnp.zeros(shape, jnp.float32),
      jnp.full(shape[:-1], scores_lib.MASKED, jnp.float32),
      jnp.zeros(shape[:-1], jnp.float32),
    )
    first = _first_tile(row, window, block)
    out, top, total = lax.fori_loop(first, row + 1, attend_tile, carry)
    return (out / total[..., None]).astype(dtype), top + jnp.log(total)

  out, lse = lax.map(attend_row, jnp.arange(rows.shape[0]))
  return _unblocks(out, T, 3), _unblocks(lse, T, 3)


def _looped_backward(
  q, k, v, segments, grad, lse, delta, window, softcap, block
):
  B, K, T, H = k.shape
  segments = _block_segments(segments, B, T, block)
  rows, grads, lse, delta = (
    _blocks(x, block, 3) for x in (q, grad, lse, delta)
  )
  keys, values = _blocks(k, block, 2), _blocks(v, block, 2)

  def pull_row(carry, row):
    def pull_tile(column, carry):
      dq, dk, dv = carry
      tile = _tile_backward(
        rows[row],
        keys[column],
        values[column],
        grads[row],
        lse[row],
        delta[row],
        _loop_mask(row, column, segments, window, block),
        softcap,
      )
      return (
        dq + tile[0],
        dk.at[column].add(tile[1]),
        dv.at[column].add(tile[2]),
      )

    first = _first_tile(row, window, block)
    dq = jnp.zeros(rows.shape[1:], jnp.float32)
    dq, *carry = lax.fori_loop(first, row + 1, pull_tile, (dq, *carry))
    return tuple(carry), dq

  n = rows.shape[0]
  zeros = jnp.zeros((n, B, K, H, block), jnp.float32)
  (dk, dv), dq = lax.scan(pull_row, (zeros, zeros), jnp.arange(n))
  return _unblocks(dq, T, 3), _unblocks(dk, T, 3), _unblocks(dv, T, 3)
