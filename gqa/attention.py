"""Masks and grouped attention: pure functions, one for any num_kv_heads.

Multi-head, grouped-query (Ainslie et al. 2023, section 2.2) and multi-query
attention (Shazeer 2019) are the same program: query head n reads KV head
n // G, and K and V are never repeated. Axes in einsums and shape comments:

  B batch   T query length   S key length   N query heads   K KV heads
  G = N / K query heads that share a KV head   H head dim

`einsum` is the reference, exact and simple, and holds T x S scores.
`blockwise` (blockwise.py) never does. `fused` is the platform's own kernel
behind `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gqa import blockwise
from gqa import scores as scores_lib


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  *,
  window: int | None = None,
  softcap: float | None = None,
  implementation: str = 'auto',
) -> jax.Array:
  """Causal self-attention within documents.

  Args:
    q: [B, T, N, H], already scaled and rotated.
    k: [B, T, K, H], already rotated.
    v: [B, T, K, H].
    segments: [B, T] int32; a token sees only its own segment. None: all one.
    window: a token sees itself and window - 1 tokens before it. None: all.
    softcap: scores become softcap * tanh(scores / softcap). None: as they are.
    implementation: 'einsum', 'blockwise', 'fused', or 'auto' for the
      platform's best. The fused kernels know no softcap.

  Returns:
    [B, T, N, H] in q's dtype.
  """
  if implementation == 'auto':
    fused = jax.default_backend() == 'gpu' and softcap is None
    implementation = 'fused' if fused else 'blockwise'
  if implementation == 'fused':
    if softcap is not None:
      raise ValueError(
        f'fused attention has no softcap={softcap}; use blockwise.'
      )
    return fused_attention(q, k, v, segments, window)
  if implementation == 'blockwise':
    return blockwise.blockwise_attention(
      q, k, v, segments, window, softcap=softcap
    )
  T = q.shape[1]
  mask = scores_lib.causal_mask(jnp.arange(T), jnp.arange(T), window)[None]
  if segments is not None:
    mask = mask & (segments[:, :, None] == segments[:, None, :])
  return einsum_attention(q, k, v, mask, softcap)


def einsum_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  softcap: float | None = None,
) -> jax.Array:
  """The reference: grouped attention with an explicit mask.

  Args:
    q: [B, T, N, H], scaled.
    k: [B, S, K, H].
    v: [B, S, K, H].
    mask: [B or 1, T, S] bool, True where visible.
    softcap: as in `attention`.

  Returns:
    [B, T, N, H]; a row that sees nothing is the mean of all values, finite.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, N // K, H)
  scores = jnp.einsum(
    'BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(
    mask[:, None, None], scores_lib.capped(scores, softcap), scores_lib.MASKED
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum('BKGTS,BSKH->BTKGH', weights, v)
  return out.reshape(B, T, N, H)


def fused_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  window: int | None,
) -> jax.Array:
  """The platform's kernel: cuDNN on GPU for half precision, else XLA's own."""
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  cudnn = jax.default_backend() == 'gpu' and half
  mask = None
  if segments is not None:
    mask = (segments[:, :, None] == segments[:, None, :])[:, None]
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    mask=mask,
    scale=1.0,
    is_causal=True,
    local_window_size=None if window is None else (window - 1, 0),
    implementation='cudnn' if cudnn else 'xla',
  )
