"""Next-token cross-entropy that never holds the whole of batch x length x vocab.

The head's product, the softmax and both gradients of a slice of positions are
made together and dropped before the next slice: the loss is a sum, so its
gradient is known up to one factor in the forward pass already. Three matrix
products are made in all, none of them twice.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from gqa import linear

# Logits alive at once in one slice, about: so many, or a multiple of the head's
# size. Each slice is added to the head's gradient, so that smaller ones would
# cost more than they save.
SLICE_ELEMENTS = 2**23
SLICE_HEADS = 2
MAX_SLICES = 16  # slices are unrolled: the program's size grows with them


def cross_entropy(
  features: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  z_loss: float = 0.0,
  softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Weighted sums over all positions; divide once by the sum of weights.

  Args:
    features: [B, T, D] after the final norm.
    head: [V, D], the rows of the output embedding, in features' dtype.
    targets: [B, T] int32, the token that follows each position.
    weights: [B, T] float32.
    z_loss: weight of log(Z)^2 (PaLM, Chowdhery et al. 2022, section 5).
    softcap: logits become softcap * tanh(logits / softcap).

  Returns:
    The objective (cross-entropy plus z-loss) summed over everything, and [B]
    the cross-entropy alone summed over each row; nats, float32. Only the
    objective has a gradient.
  """
  total, nll = _summed(features, head, targets, weights, z_loss, softcap)
  return total, jax.lax.stop_gradient(nll)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(features, head, targets, weights, z_loss, softcap):
  total = jnp.zeros((), jnp.float32)
  nll = jnp.zeros(features.shape[:1], jnp.float32)
  for part in _slices(features, head):
    logits, _ = _logits(features[:, part], head, softcap)
    sums = _sums(logits, targets[:, part], weights[:, part], z_loss)
    total, nll = total + sums[0], nll + sums[1]
  return total, nll


def _summed_fwd(features, head, targets, weights, z_loss, softcap):
  total = jnp.zeros((), jnp.float32)
  nll = jnp.zeros(features.shape[:1], jnp.float32)
  dfeatures, dhead = [], jnp.zeros(head.shape[::-1], jnp.float32)
  into = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  for part in _slices(features, head):
    x, labels, weight = features[:, part], targets[:, part], weights[:, part]
    logits, slope = _logits(x, head, softcap)
    part_total, part_nll, lse = _sums(logits, labels, weight, z_loss)
    total, nll = total + part_total, nll + part_nll
    scale = (1.0 + 2.0 * z_loss * lse) * weight  # [B, t]
    dlogits = jnp.exp(logits - lse[..., None]) * scale[..., None]
    hit = jnp.arange(head.shape[0])[None, None, :] == labels[..., None]
    dlogits = dlogits - jnp.where(hit, weight[..., None], 0.0)
    dlogits = (dlogits * slope).astype(features.dtype)  # [B, t, V]
    dfeatures.append(into('BTV,VD->BTD', dlogits, head))
    # [D, V]: of the two operands x is the one that is cheap to transpose.
    dhead = dhead + into('BTD,BTV->DV', x, dlogits)
  dfeatures = jnp.concatenate(dfeatures, axis=1).astype(features.dtype)
  return (total, nll), (dfeatures, linear.transposed(dhead).astype(head.dtype))


def _summed_bwd(z_loss, softcap, residuals, grads):
  dfeatures, dhead = residuals
  grad = grads[0]  # of the objective
  scale = lambda x: (x * grad).astype(x.dtype)
  return scale(dfeatures), scale(dhead), None, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _slices(features, head):
  """At most MAX_SLICES of positions, of a limited number of logits."""
  B, T, _ = features.shape
  most = max(SLICE_ELEMENTS, SLICE_HEADS * head.size)
  count = -(-B * T * head.shape[0] // most)
  size = -(-T // min(count, T, MAX_SLICES))
  return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def _logits(x, head, softcap):
  """[B, t, V] float32 logits and their slope over the uncapped ones."""
  logits = jnp.einsum(
    'BTD,VD->BTV', x, head, preferred_element_type=jnp.float32
  )
  if softcap is None:
    return logits, 1.0
  squashed = jnp.tanh(logits / softcap)
  return softcap * squashed, 1.0 - squashed**2


def _sums(logits, targets, weights, z_loss):
  lse = jax.nn.logsumexp(logits, axis=-1)
  hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  nll = ((lse - hit) * weights).sum(axis=-1)
  return nll.sum() + z_loss * (lse**2 * weights).sum(), nll, lse
