"""From logits to the next token: pure functions, every setting one per row.

The settings are arrays, so rows that differ share one compiled program, and
what no row asks for is skipped inside it: a greedy batch pays for an argmax.
Randomness is keyed by (seed, row id, step): a row's text does not depend on
the batch it is in.

The vocabulary is never sorted. top_k and top_p keep a prefix of the tokens in
the order (higher logit, then lower id), and the end of a prefix is found
exactly by bisection on the bits of the logit that ends it, 32 passes of
compare and sum. On a CPU that is 10 to 40 times cheaper than a sort, and the
draw below is about 20 times cheaper than one Gumbel variable per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

_TINY = float(np.finfo(np.float32).tiny)
_BLOCK = 128  # tokens whose mass is summed before the draw
_INT32 = np.iinfo(np.int32)


@struct.dataclass
class Sampling:
  """How each row draws its next token; filters apply in the order below."""

  repetition_penalty: jax.Array  # [B] float32, 1 = off; > 1 avoids seen tokens
  temperature: jax.Array  # [B] float32, 0 = greedy
  top_k: jax.Array  # [B] int32, 0 = off
  top_p: jax.Array  # [B] float32, 1 = off
  min_p: jax.Array  # [B] float32, 0 = off; share of the top probability

  @classmethod
  def create(
    cls,
    batch_size: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
  ) -> Sampling:
    """Checks settings, each one value or one per row, and makes the arrays."""

    def rows(name, value, rule, holds, integer=False):
      values = np.asarray(value)
      if values.shape not in ((), (batch_size,)):
        raise ValueError(
          f'{name} has shape {values.shape} for a batch of {batch_size}; give '
          'one value, or one per row.'
        )
      for item in values.reshape(-1).tolist():
        number = isinstance(item, int if integer else (int, float))
        if not number or isinstance(item, bool) or not holds(item):
          raise ValueError(f'{name}={item!r} must be {rule}.')
      dtype = np.int32 if integer else np.float32
      return jnp.asarray(np.broadcast_to(values, (batch_size,)).astype(dtype))

    return cls(
      repetition_penalty=rows(
        'repetition_penalty',
        repetition_penalty,
        'between 0.001 and 1000; 1 switches it off',
        lambda x: 0.001 <= x <= 1000,
      ),
      temperature=rows(
        'temperature',
        temperature,
        'between 0 and 1e6; 0 is greedy',
        lambda x: 0 <= x <= 1e6,
      ),
      top_k=rows(
        'top_k',
        top_k,
        'a whole number, at least 0; 0 switches it off',
        lambda x: 0 <= x <= _INT32.max,
        integer=True,
      ),
      top_p=rows(
        'top_p',
        top_p,
        'between 0 and 1; 1 switches it off',
        lambda x: 0 <= x <= 1,
      ),
      min_p=rows(
        'min_p',
        min_p,
        'between 0 and 1; 0 switches it off',
        lambda x: 0 <= x <= 1,
      ),
    )

  def needs_seen(self) -> bool:
    """Whether a row has a repetition penalty; on the host, before tracing."""
    return bool(np.any(np.asarray(self.repetition_penalty) != 1))


def row_keys(seed: int | jax.Array, row_ids: jax.Array) -> jax.Array:
  """One key per (seed, row id): [B] ids to [B] typed keys."""
  root = jax.random.key(seed, impl='threefry2x32')
  return jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.asarray(row_ids))


def step_keys(keys: jax.Array, step: int | jax.Array) -> jax.Array:
  """The keys [B] of `row_keys` at one step of decoding."""
  return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.asarray(step))


def sample(
  logits: jax.Array,
  settings: Sampling,
  keys: jax.Array,
  seen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token per row, in float32 whatever the type of the logits.

  Equal logits are ordered by token id: top_k keeps exactly k tokens, top_p the
  smallest prefix whose mass reaches p (the token that crosses p included), and
  a greedy row, top_k 1 or top_p 0 is the first of the largest logits. top_p
  counts the mass that top_k left. A logit of -inf is never drawn; a row must
  have at least one finite logit.

  Args:
    logits: [B, V].
    settings: of B rows.
    keys: [B] typed keys of this step (`step_keys`); unused by greedy rows.
    seen: [B, V] bool, tokens under the repetition penalty (`mark_seen`); None
      where no row has one.

  Returns:
    tokens [B] int32 and logprobs [B] float32: the log-probability of the token
    under the model, the log-softmax of `logits` before penalty, temperature
    and filters.
  """
  logits = logits.astype(jnp.float32)
  scores = logits
  if seen is not None:
    penalty = settings.repetition_penalty[:, None]
    penalised = jnp.where(scores > 0, scores / penalty, scores * penalty)
    scores = jnp.where(seen, penalised, scores)
  greedy = _argmax(scores)

  def draw():
    tokens = _draw(_filtered(scores, settings), keys)
    return jnp.where(settings.temperature > 0, tokens, greedy)

  tokens = lax.cond(jnp.any(settings.temperature > 0), draw, lambda: greedy)
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def mark_seen(
  seen: jax.Array, tokens: jax.Array, valid: jax.Array | None = None
) -> jax.Array:
  """Adds tokens to the mask of the repetition penalty, in place under jit.

  Args:
    seen: [B, V] bool.
    tokens: [B] of one step or [B, T] of a prompt.
    valid: bool like tokens, False where a token is padding; None for all.
  """
  batch, vocab = seen.shape
  if valid is not None:
    tokens = jnp.where(valid, tokens, vocab)  # dropped
  rows = jnp.arange(batch, dtype=jnp.int32)
  rows = rows.reshape((batch,) + (1,) * (tokens.ndim - 1))
  rows = jnp.broadcast_to(rows, tokens.shape)
  return seen.at[rows, tokens].set(True, mode='drop')


def is_stop(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
  """Which of tokens [B] are among stop_ids [n]; -1 there stands for none."""
  hits = tokens[:, None] == stop_ids[None, :]
  return jnp.any(hits & (stop_ids >= 0)[None, :], axis=-1)


def _argmax(x: jax.Array) -> jax.Array:
  """First index of the maximum over the last axis of [B, V], as int32.

  Two plain reductions run about six times faster than XLA's argmax on a CPU.
  """
  size = x.shape[-1]
  ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  top = jnp.max(x, axis=-1, keepdims=True)
  first = jnp.min(jnp.where(x == top, ids, size), axis=-1)
  return jnp.minimum(first, size - 1)  # a row of NaN stays in range


def _filtered(scores: jax.Array, settings: Sampling) -> jax.Array:
  """Unnormalised probabilities [B, V]: the top token 1, removed tokens 0."""
  top = jnp.max(scores, axis=-1, keepdims=True)
  temperature = jnp.maximum(settings.temperature, _TINY)
  weights = jnp.exp((scores - top) / temperature[:, None])
  random = settings.temperature > 0
  use_k = random & (settings.top_k > 0)
  use_p = random & (settings.top_p < 1)
  count = jnp.where(use_k, settings.top_k.astype(jnp.float32), jnp.inf)

  def keep(stage, weights):  # top_k counts tokens, then top_p their mass
    mass = jnp.where(stage == 0, 1.0, weights)
    share = jnp.maximum(settings.top_p * jnp.sum(mass, axis=-1), _TINY)
    target = jnp.where(stage == 0, count, jnp.where(use_p, share, jnp.inf))
    return jnp.where(_prefix(scores, mass, target), weights, 0.0)

  def maybe_keep(stage, weights):
    used = jnp.where(stage == 0, jnp.any(use_k), jnp.any(use_p))
    return lax.cond(used, keep, lambda _, same: same, stage, weights)

  # A loop, so that the two are compiled once.
  weights = lax.fori_loop(0, 2, maybe_keep, weights)
  return jnp.where(weights >= settings.min_p[:, None], weights, 0.0)


def _prefix(scores: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
  """Marks the smallest prefix whose mass reaches the target.

  The order is (higher score, then lower id).

  Args:
    scores: [B, V] float32.
    mass: [B, V] float32 of each token.
    target: [B] float32, above 0. All is kept where it is not reached.

  Returns:
    [B, V] bool.
  """
  batch, vocab = scores.shape

  def total(chosen):
    return jnp.sum(jnp.where(chosen, mass, 0.0), axis=-1)

  # The last score of the prefix: the largest whose upper set has the mass.
  lowest = jnp.full((batch,), -jnp.inf, jnp.float32)
  last = _from_ordered(
    _bisect(
      lambda at: total(scores >= _from_ordered(at)[:, None]) >= target,
      _to_ordered(lowest),
      _to_ordered(jnp.max(scores, axis=-1)),
      steps=32,
    )
  )
  above, tied = scores > last[:, None], scores == last[:, None]

  # The last id among tokens of that score, where not all of them are needed.
  def cut():
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    short = lambda end: total(above | (tied & (ids < end[:, None]))) < target
    ends = _bisect(
      short,
      jnp.zeros((batch,), jnp.int32),
      jnp.full((batch,), vocab, jnp.int32),
      steps=vocab.bit_length(),
    )
    return above | (tied & (ids <= ends[:, None]))

  one = jnp.max(jnp.where(tied, mass, 0.0), axis=-1)
  spare = total(above) + (total(tied) - one) >= target
  return lax.cond(jnp.any(spare), cut, lambda: above | tied)


def _bisect(
  holds: Callable[[jax.Array], jax.Array],
  low: jax.Array,
  high: jax.Array,
  steps: int,
) -> jax.Array:
  """Largest int32 in [low, high] per row at which a falling predicate holds.

  It is taken to hold at low. The trip count is static, so that no step waits
  for data to know whether there is another.
  """

  def body(_, bounds):
    low, high = bounds
    middle = (low | high) - ((low ^ high) >> 1)  # rounded up, cannot overflow
    inside = holds(middle)
    low = jnp.where(inside, middle, low)
    return low, jnp.where(inside, high, jnp.maximum(middle - 1, low))

  return lax.fori_loop(0, steps, body, (low, high))[0]


def _to_ordered(x: jax.Array) -> jax.Array:
  """float32 to int32 of the same order."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return bits ^ ((bits >> 31) & _INT32.max)


def _from_ordered(ordered: jax.Array) -> jax.Array:
  """Inverse of `_to_ordered`."""
  bits = ordered ^ ((ordered >> 31) & _INT32.max)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _draw(weights: jax.Array, keys: jax.Array) -> jax.Array:
  """Draws an index per row of [B, V] in proportion to the weights.

  Inverse of the cumulative sum in two levels, a block and then a token of it,
  with one uniform each: the product of both resolves a tail that 23 bits of
  one uniform would not.
  """
  batch, vocab = weights.shape
  blocks = -(-vocab // _BLOCK)
  weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab)))
  weights = weights.reshape(batch, blocks, _BLOCK)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))
  uniforms = uniform(keys)
  block = _pick(jnp.sum(weights, axis=-1), uniforms[:, 0])
  inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
  token = block * _BLOCK + _pick(inside, uniforms[:, 1])
  return jnp.minimum(token, vocab - 1)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """Index per row of [B, n] at a share `uniform` [B] of the cumulative sum.

  Its weight is above 0 however the sums are rounded.
  """
  size = weights.shape[-1]
  ids = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
  sums = jnp.cumsum(weights, axis=-1)
  positive = weights > 0
  crossed = positive & (sums > (uniform * sums[:, -1])[:, None])
  first = jnp.min(jnp.where(crossed, ids, size), axis=-1)
  return jnp.minimum(first, jnp.max(jnp.where(positive, ids, 0), axis=-1))
