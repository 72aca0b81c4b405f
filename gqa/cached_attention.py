"""Attention of new tokens over the KV cache, at the cost of the live tokens.

The cache is read in blocks of slots with a running softmax, from the first
slot that a row may see to the last one written: a step costs what the live
length costs, however large the cache is. Cutting a block out copies it, so one
token reads a span that is mostly live in one piece, which is up to three times
as fast. Keys and values are read at their K heads, for the G query heads that
share one in the same product.

One new token, or the last of several where no other's result is asked for, is
written first and then attends to the cache. Several new tokens attend to the
cache and to each other apart, and the two results are merged by their
log-sum-exp: a ring forgets a token that its first new neighbours still see, and
among themselves new tokens need no cache. They see each other as the cache will
show them, rounded to its type: it does not matter how a prompt is cut into
chunks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gqa import attention, blockwise
from gqa import cache as cache_lib
from gqa import scores as scores_lib
from gqa.cache import LayerCache

BLOCK = 256  # slots read at a time, a multiple of cache.TILE
WHOLE = 0.5  # live share of a span above which it is read in one piece
ROWS = 128  # queries at a time
LONG = 1024  # slots of bfloat16 values from which on tiles are faster


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  layer: LayerCache,
  length: jax.Array,
  starts: jax.Array,
  *,
  window: int | None = None,
  softcap: float | None = None,
  fresh: bool = False,
  implementation: str = 'auto',
) -> tuple[jax.Array, LayerCache]:
  """Attends from T new tokens to all before them, and stores the new ones.

  Args:
    q: [B, T, N, H], scaled and rotated; or [B, 1, N, H], of the last of them.
    k: [B, T, K, H], rotated.
    v: [B, T, K, H].
    layer: the layer's cache, with room for T tokens.
    length: [] int32, slots written before.
    starts: [B] int32, first slot of each row that is no padding.
    window: a token sees itself and window - 1 tokens before it. None: all.
    softcap: scores become softcap * tanh(scores / softcap). None: as they are.
    fresh: whether length is known to be 0: there is no cache to read.
    implementation: as in `attention.attention`, of a fresh cache.

  Returns:
    Like q, finite for padding too; and the layer's cache.
  """
  B, Q, N, H = q.shape
  T, K = k.shape[1:3]
  (k, k_scale), (v, v_scale) = (cache_lib.encode(layer, x) for x in (k, v))
  stored = cache_lib.write(layer, k, v, k_scale, v_scale, length)
  grouped = q.reshape(B, Q, K, N // K, H).transpose(0, 2, 3, 1, 4)
  if Q == 1:
    out, _ = over_cache(
      grouped, stored, length + T, length + T - 1, starts, window, softcap
    )
    return _ungroup(out, q), stored
  k = cache_lib.decode(k, k_scale, q.dtype)
  v = cache_lib.decode(v, v_scale, q.dtype)
  slots = length + jnp.arange(T, dtype=jnp.int32)
  segments = (slots[None, :] >= starts[:, None]).astype(jnp.int32)
  if fresh:
    out = attention.attention(
      q,
      k,
      v,
      segments,
      window=window,
      softcap=softcap,
      implementation=implementation,
    )
    return out, stored
  among, among_lse = blockwise.blockwise_with_lse(
    q, k, v, segments, window, softcap=softcap
  )
  past, past_lse = over_cache(
    grouped, layer, length, length, starts, window, softcap
  )
  out = _merge(among, among_lse, past, past_lse)
  return _ungroup(out, q), stored


def over_cache(
  q: jax.Array,
  layer: LayerCache,
  length: jax.Array,
  first_query: jax.Array,
  starts: jax.Array,
  window: int | None,
  softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attends to the cache alone, from queries that are not before its end.

  Args:
    q: [B, K, G, T, H].
    layer: the layer's cache.
    length: [] int32, slots written.
    first_query: [] int32, the slot of the first query.
    starts: [B] int32.
    window: as in `attend`.
    softcap: as there.

  Returns:
    [B, K, G, T, H] float32, and the log-sum-exp of its scores [B, K, G, T];
    zeros and a very low number where nothing is visible.
  """
  B, K, G, T, H = q.shape
  options = (starts, window, softcap)
  if T <= ROWS:
    return _over_blocks(q, layer, length, first_query, *options)
  chunks = -(-T // ROWS)
  q = jnp.pad(q, ((0, 0),) * 3 + ((0, chunks * ROWS - T), (0, 0)))
  q = jnp.moveaxis(q.reshape(B, K, G, chunks, ROWS, H), 3, 0)
  firsts = first_query + ROWS * jnp.arange(chunks, dtype=jnp.int32)

  def chunk(inputs):
    return _over_blocks(inputs[0], layer, length, inputs[1], *options)

  out, lse = lax.map(chunk, (q, firsts))
  out = jnp.moveaxis(out, 0, 3).reshape(B, K, G, -1, H)[..., :T, :]
  return out, jnp.moveaxis(lse, 0, 3).reshape(B, K, G, -1)[..., :T]


def _over_blocks(q, layer, length, first_query, starts, window, softcap):
  """`over_cache` with all queries at once."""
  G, T = q.shape[2:4]
  # XLA on CPU multiplies two rows of bfloat16 in half the time of one.
  twice = layer.layout == 'tiled' and q.dtype == jnp.bfloat16 and G == T == 1
  if twice:
    q = jnp.concatenate([q, q], axis=2)
  queries = first_query + jnp.arange(T, dtype=jnp.int32)
  first, end = jnp.int32(0), jnp.minimum(length, layer.num_slots)
  if not layer.ring:
    first = jnp.min(starts)
    if window is not None:
      first = jnp.maximum(first, first_query - window + 1)

  skip = lambda carry: carry

  def over_spans(span, carry):
    carry = over_span(span, carry)
    if span.more is None:
      return carry
    more = functools.partial(over_spans, span.more)
    return lax.cond(end > span.more.first, more, skip, carry)

  def over_span(span, carry):
    size = span.own_slots
    block = min(BLOCK, size)
    begin = jnp.clip(first - span.first, 0, size) // block
    stop = jnp.clip(end - span.first, 0, size)
    one = lambda i, carry: attend(span, i * block, block, carry)
    by_blocks = lambda carry: lax.fori_loop(
      begin, (stop + block - 1) // block, one, carry
    )
    whole = lambda carry: attend(span, jnp.int32(0), size, carry)
    if size == layer.num_slots <= BLOCK:
      return whole(carry)
    if size <= BLOCK:
      return lax.cond(stop > begin * block, whole, skip, carry)
    if T > 1 or span.k.dtype != q.dtype:
      return by_blocks(carry)
    mostly = stop - begin * block > size * WHOLE
    return lax.cond(mostly, whole, by_blocks, carry)

  def attend(span, begin, count, carry):
    out, top, total = carry
    # The last block ends with the span.
    at = jnp.minimum(begin, span.own_slots - count)
    slots = at + jnp.arange(count, dtype=jnp.int32)
    tokens = cache_lib.token_index(span, span.first + slots, length)
    held = (tokens >= 0) & (tokens < length) & (slots >= begin)
    visible = held[None] & (tokens[None] >= starts[:, None])
    visible = visible[:, None, None]  # [B, 1, 1 or T, count]
    if window is not None:
      recent = queries[:, None] - tokens[None, :] < window
      visible = visible & recent[None, None]
    scores, values, scale = _block_scores(q, span, at, count)
    scores = scores_lib.capped(scores, softcap)
    tiles = scores.ndim > 5
    slot_axes = (2, 5) if tiles else (4,)
    mask = _spread(visible, tiles)
    scores = jnp.where(mask, scores, scores_lib.MASKED)
    new_top = jnp.maximum(top, scores.max(axis=slot_axes))
    # Above all that is masked, so that a row which sees nothing weighs 0.
    base = jnp.maximum(new_top, 0.5 * scores_lib.MASKED)
    weights = jnp.exp(scores - jnp.expand_dims(base, slot_axes))
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(axis=slot_axes)
    if scale is not None:
      weights = weights * scale
    by_tile = twice or q.dtype == jnp.bfloat16 and count >= LONG
    weights = weights.astype(q.dtype)
    weighted = _weighted(weights, values, span.v_axes, by_tile)
    return out * shrink[..., None] + weighted, new_top, total

  nothing = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(q.shape[:-1], scores_lib.MASKED, jnp.float32),
    jnp.zeros(q.shape[:-1], jnp.float32),
  )
  out, top, total = over_spans(layer, nothing)
  seen = total > 0
  total = jnp.where(seen, total, 1.0)
  lse = jnp.where(seen, top + jnp.log(total), scores_lib.MASKED)
  out = out / total[..., None]
  return out[:, :, :G], lse[:, :, :G]


def _block_scores(q, layer, first, count):
  """Scores as of `_products`, the values, and the scales of these."""
  k, v, k_scale, v_scale = cache_lib.read(layer, first, count)
  scores = _products(q, k.astype(q.dtype), layer.k_axes)
  if k_scale is None:
    return scores, v.astype(q.dtype), None
  if layer.scale_axes == 'BSK':
    k_scale, v_scale = (x.swapaxes(1, 2) for x in (k_scale, v_scale))
  tiles = scores.ndim > 5
  k_scale, v_scale = (_spread(x[:, :, None], tiles) for x in (k_scale, v_scale))
  return scores * k_scale, v.astype(q.dtype), v_scale


def _products(q, k, k_axes):
  """Queries [B, K, G, T, H] times keys: [B, K, G, T, S].

  One token's times keys in tiles: [B, K, n, G, T, t].
  """
  if k_axes != 'BKnHt':
    return _einsum(f'BKGTH,{k_axes}->BKGTS', q, k)
  if q.shape[3] > 1:
    return _einsum('BKGTH,BKHS->BKGTS', q, cache_lib.join_tiles(k))
  q = jnp.broadcast_to(q[:, :, None], (*k.shape[:3], *q.shape[2:]))
  return _einsum('BKnGTH,BKnHt->BKnGTt', q, k)


def _spread(x, tiles):
  """[B, K, T, S] -> axes that broadcast with the scores of `_products`."""
  if not tiles:
    return x[:, :, None]
  return x.reshape(*x.shape[:2], -1, 1, 1, cache_lib.TILE)


def _weighted(weights, v, v_axes, by_tile):
  """Values times weights, axes as of `_products`: [B, K, G, T, H]."""
  if weights.ndim == 5:
    return _einsum(f'BKGTS,{v_axes}->BKGTH', weights, v)
  if by_tile:
    v = v.reshape(*v.shape[:2], *weights.shape[2::3], v.shape[3])
    return _einsum('BKnGTt,BKntH->BKnGTH', weights, v).sum(2)
  weights = jnp.moveaxis(weights, 2, 4)
  weights = weights.reshape(*weights.shape[:4], -1)
  return _einsum('BKGTS,BKSH->BKGTH', weights, v)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _merge(a, a_lse, b, b_lse):
  """Joins attention over two sets of keys; b may have seen nothing."""
  top = jnp.maximum(a_lse, b_lse)
  a_weight, b_weight = jnp.exp(a_lse - top), jnp.exp(b_lse - top)
  total = (a_weight + b_weight)[..., None]
  return (
    a.astype(jnp.float32) * a_weight[..., None] + b * b_weight[..., None]
  ) / total


def _ungroup(out, like):
  """[B, K, G, T, H] -> the shape [B, T, N, H] and dtype of `like`."""
  return out.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)
