"""Next-token cross-entropy that never holds the whole of batch x length x vocab.

The head's product, the softmax and both gradients of a slice of positions are
made together and dropped before the next slice: the loss is a sum, so its
gradient is known up to one factor in the forward pass already. Three matrix
products are made in all, none of them twice. The divergence from a teacher
(Hinton et al. 2015) shares them and needs one more, of the teacher's head.
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


def distillation(
  features: jax.Array,
  head: jax.Array,
  teacher_features: jax.Array,
  teacher_head: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  part: float,
  temperature: float = 1.0,
  z_loss: float = 0.0,
  softcap: float | None = None,
  teacher_softcap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cross-entropy mixed with the divergence from a teacher; weighted sums.

  The objective is (1 - part) * cross-entropy + part * temperature^2 * KL, and
  the z-loss; KL is of the student's distribution from the teacher's, both at
  the temperature.

  Args:
    features: [B, T, D] of the student, as in `cross_entropy`.
    head: [V, D] of the student.
    teacher_features: [B, T, E]; E need not be D.
    teacher_head: [V, E].
    targets: [B, T] int32.
    weights: [B, T] float32.
    part: from 0 to 1.
    temperature: that logits are divided by.
    z_loss: as in `cross_entropy`.
    softcap: of the student's logits.
    teacher_softcap: of the teacher's.

  Returns:
    The objective summed over everything, [B] the cross-entropy summed over
    each row, and the KL summed over everything. Only the objective has a
    gradient, and only for the student.
  """
  total, nll, divergence = _distilled(
    features,
    head,
    jax.lax.stop_gradient(teacher_features),
    jax.lax.stop_gradient(teacher_head),
    targets,
    weights,
    (part, temperature, z_loss, softcap, teacher_softcap),
  )
  stop = jax.lax.stop_gradient
  return total, stop(nll), stop(divergence)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _distilled(
  features, head, teacher_features, teacher_head, targets, weights, how
):
  return _distilled_fwd(
    features, head, teacher_features, teacher_head, targets, weights, how
  )[0]


def _distilled_fwd(
  features, head, teacher_features, teacher_head, targets, weights, how
):
  part, temperature, z_loss, softcap, teacher_softcap = how
  total, divergence = jnp.zeros((2,), jnp.float32)
  nll = jnp.zeros(features.shape[:1], jnp.float32)
  dfeatures, dhead = [], jnp.zeros(head.shape[::-1], jnp.float32)
  into = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  for where in _slices(features, head, arrays=2):
    x, labels, weight = features[:, where], targets[:, where], weights[:, where]
    logits, slope = _logits(x, head, softcap)
    goal, _ = _logits(teacher_features[:, where], teacher_head, teacher_softcap)
    _, part_nll, lse = _sums(logits, labels, weight, 0.0)
    log_student = jax.nn.log_softmax(logits / temperature, axis=-1)
    log_teacher = jax.nn.log_softmax(goal / temperature, axis=-1)
    teacher = jnp.exp(log_teacher)
    kl = (teacher * (log_teacher - log_student)).sum(axis=-1)  # [B, t]
    kl_sum = (kl * weight).sum()
    nll, divergence = nll + part_nll, divergence + kl_sum
    total += (
      (1 - part) * part_nll.sum()
      + part * temperature**2 * kl_sum
      + z_loss * (lse**2 * weight).sum()
    )
    probabilities = jnp.exp(logits - lse[..., None])
    dlogits = probabilities * (1 - part + 2.0 * z_loss * lse)[..., None]
    dlogits += part * temperature * (jnp.exp(log_student) - teacher)
    hit = jnp.arange(head.shape[0])[None, None, :] == labels[..., None]
    dlogits = (dlogits - jnp.where(hit, 1.0 - part, 0.0)) * weight[..., None]
    dlogits = (dlogits * slope).astype(features.dtype)  # [B, t, V]
    dfeatures.append(into('BTV,VD->BTD', dlogits, head))
    dhead = dhead + into('BTD,BTV->DV', x, dlogits)
  dfeatures = jnp.concatenate(dfeatures, axis=1).astype(features.dtype)
  dhead = linear.transposed(dhead).astype(head.dtype)
  return (total, nll, divergence), (dfeatures, dhead)


def _distilled_bwd(how, residuals, grads):
  del how
  dfeatures, dhead = residuals
  scale = lambda x: (x * grads[0]).astype(x.dtype)
  return scale(dfeatures), scale(dhead), None, None, None, None


_distilled.defvjp(_distilled_fwd, _distilled_bwd)


def _slices(features, head, arrays=1):
  """At most MAX_SLICES of positions, of a limited number of logits.

  Args:
    features: [B, T, D].
    head: [V, D].
    arrays: of logits that are alive at once.
  """
  B, T, _ = features.shape
  most = max(SLICE_ELEMENTS, SLICE_HEADS * head.size) // arrays
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
