"""Decoding: read a prompt, then draw one token after another from the cache.

`prefill` and `decode_step` are pure functions of parameters and cache;
`generate` is one compiled program around them. `start` and `advance` are the
same in two parts, for whoever wants the tokens while they come: a call of
`advance` runs several steps without the host.

Prompts are right-aligned: row b of [B, T] ends with its lengths[b] tokens, and
what lies left of them is padding, whatever its ids (`pack`, `right_align`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from gqa import cache as cache_lib
from gqa import sampling as sampling_lib
from gqa.cache import KVCache
from gqa.config import ModelConfig
from gqa.model import Decoder, Params
from gqa.sampling import Sampling

STEPS = 16  # at most so many between two looks at whether all rows are done


@struct.dataclass
class DecodeState:
  """All that `advance` reads and writes besides the parameters."""

  cache: KVCache  # of all tokens but the last
  token: jax.Array  # [B] int32, the last token, drawn and not yet read
  step: jax.Array  # [] int32, tokens drawn
  lengths: jax.Array  # [B] int32, tokens drawn up to and with a stop id
  done: jax.Array  # [B] bool, whether the row has ended
  seen: jax.Array | None  # [B, V] bool, tokens under a repetition penalty
  keys: jax.Array  # [B] typed keys of the rows
  sampling: Sampling
  stop_ids: jax.Array  # [n] int32
  pad_id: jax.Array  # [] int32, what a row that has ended is filled with


def extend(
  params: Params, config: ModelConfig, cache: KVCache, tokens: jax.Array
) -> tuple[jax.Array, KVCache]:
  """Reads T more tokens [B, T] of each row; returns logits [B, T, V]."""
  features, cache = _features(params, config, cache, tokens)
  return _logits(params, config, features), cache


def decode_step(
  params: Params, config: ModelConfig, cache: KVCache, token: jax.Array
) -> tuple[jax.Array, KVCache]:
  """Reads one more token [B] of each row; returns logits [B, V]."""
  logits, cache = extend(params, config, cache, token[:, None])
  return logits[:, 0], cache


def prefill(
  params: Params,
  config: ModelConfig,
  tokens: jax.Array,
  lengths: jax.Array,
  cache: KVCache,
  chunk_size: int | None = None,
) -> tuple[jax.Array, KVCache]:
  """Reads prompts into a cache, whose former content is forgotten.

  Args:
    params: of `config`.
    config: the model.
    tokens: [B, T] right-aligned prompts.
    lengths: [B] int32, tokens of each that are no padding, at least 1.
    cache: with room for T tokens.
    chunk_size: read so many tokens at a time, to bound the memory of
      activations; the result does not depend on it. None: all at once.

  Returns:
    Logits [B, V] after the last token of each row, and the cache.
  """
  B, T = tokens.shape
  starts = (T - lengths).astype(jnp.int32)
  cache = cache.replace(length=jnp.zeros((), jnp.int32), starts=starts)
  cache_lib.check_room(cache, T)
  padding = jnp.arange(T, dtype=jnp.int32)[None] < starts[:, None]
  tokens = jnp.where(padding, 0, tokens)
  chunk_size = T if chunk_size is None else min(chunk_size, T)
  first = T % chunk_size or chunk_size  # the others are of one size
  last, cache = _features(
    params, config, cache, tokens[:, :first], fresh=True, last_only=True
  )
  if first < T:

    def read(carry, chunk):
      return _features(params, config, carry[1], chunk, last_only=True), None

    chunks = tokens[:, first:].reshape(B, -1, chunk_size).swapaxes(0, 1)
    (last, cache), _ = lax.scan(read, (last, cache), chunks)
  return _logits(params, config, last)[:, 0], cache


def start(
  params: Params,
  config: ModelConfig,
  tokens: jax.Array,
  lengths: jax.Array,
  cache: KVCache,
  sampling: Sampling,
  keys: jax.Array,
  stop_ids: jax.Array,
  pad_id: int | jax.Array = 0,
  *,
  track_seen: bool = False,
  chunk_size: int | None = None,
) -> tuple[DecodeState, jax.Array]:
  """Reads prompts and draws the first token of each row, `state.token`.

  Args:
    params: of `config`.
    config: the model.
    tokens: as in `prefill`.
    lengths: as in `prefill`.
    cache: as in `prefill`; donate it.
    sampling: settings of the rows.
    keys: [B], `sampling.row_keys`.
    stop_ids: [n] int32, ids that end a row.
    pad_id: what follows in a row that has ended.
    track_seen: whether a row has a repetition penalty
      (`Sampling.needs_seen`); the prompt counts as seen.
    chunk_size: as in `prefill`.

  Returns:
    The state, and the log-probability [B] of the first token.
  """
  B, T = tokens.shape
  logits, cache = prefill(params, config, tokens, lengths, cache, chunk_size)
  seen = None
  if track_seen:
    slots = jnp.arange(T, dtype=jnp.int32)
    seen = sampling_lib.mark_seen(
      jnp.zeros((B, config.vocab_size), bool),
      tokens,
      slots[None] >= cache.starts[:, None],
    )
  state = DecodeState(
    cache=cache,
    token=jnp.zeros((B,), jnp.int32),
    step=jnp.zeros((), jnp.int32),
    lengths=jnp.zeros((B,), jnp.int32),
    done=jnp.zeros((B,), bool),
    seen=seen,
    keys=keys,
    sampling=sampling,
    stop_ids=jnp.asarray(stop_ids, jnp.int32),
    pad_id=jnp.asarray(pad_id, jnp.int32),
  )
  return _draw(state, logits)


def advance(
  params: Params, config: ModelConfig, state: DecodeState, num_steps: int
) -> tuple[DecodeState, jax.Array, jax.Array]:
  """Draws num_steps more tokens of each row.

  Returns:
    The state, which is to be donated; the tokens [B, num_steps], and their
    log-probabilities, 0 for padding.
  """

  def step(state, _):
    logits, cache = decode_step(params, config, state.cache, state.token)
    state, logprob = _draw(state.replace(cache=cache), logits)
    return state, (state.token, logprob)

  state, (tokens, logprobs) = lax.scan(step, state, length=num_steps)
  return state, tokens.T, logprobs.T


def generate(
  params: Params,
  config: ModelConfig,
  prompts: Any,
  lengths: Any,
  max_new_tokens: int,
  *,
  sampling: Sampling | None = None,
  keys: jax.Array | None = None,
  stop_ids: Sequence[int] = (),
  pad_id: int = 0,
  max_len: int | None = None,
  cache_kind: str = 'full',
  cache_dtype: str | None = None,
  cache_layout: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Continues prompts, in one compiled program.

  Args:
    params: of `config`.
    config: the model.
    prompts: [B, T] right-aligned ids.
    lengths: [B], tokens of each that are no padding.
    max_new_tokens: tokens drawn for each row.
    sampling: settings of the B rows; greedy unless given.
    keys: [B], `sampling.row_keys`; of seed 0 and the row numbers unless given.
    stop_ids: ids that end a row. Such an id is kept, and pad_id follows; when
      all rows have ended, nothing more is computed.
    pad_id: see stop_ids.
    max_len: tokens that the cache has room for at least; as many as are needed
      unless given.
    cache_kind: as `kind` in `cache.init_cache`.
    cache_dtype: as `dtype` there.
    cache_layout: as `layout` there.
    chunk_size: as in `prefill`.

  Returns:
    Tokens [B, max_new_tokens]; how many of them each row has [B], with its
    stop id; and their log-probabilities under the model.

  Raises:
    ValueError: the tokens do not fit the cache or the model, or an id is none
      of the model's.
  """
  prompts, lengths = np.asarray(prompts), np.asarray(lengths)
  check_prompts(config, prompts, lengths, max_new_tokens, max_len)
  B, T = prompts.shape
  if sampling is None:
    sampling = Sampling.create(B)
  if keys is None:
    keys = sampling_lib.row_keys(0, np.arange(B, dtype=np.int32))
  return _generate(
    params,
    jnp.asarray(prompts, jnp.int32),
    jnp.asarray(lengths, jnp.int32),
    sampling,
    keys,
    jnp.asarray(stop_ids, jnp.int32),
    jnp.asarray(pad_id, jnp.int32),
    config=config,
    max_new_tokens=max_new_tokens,
    max_len=T + max_new_tokens if max_len is None else max_len,
    track_seen=sampling.needs_seen(),
    cache_options=(cache_kind, cache_dtype, cache_layout),
    chunk_size=chunk_size,
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    'config',
    'max_new_tokens',
    'max_len',
    'track_seen',
    'cache_options',
    'chunk_size',
  ),
)
def _generate(
  params,
  prompts,
  lengths,
  sampling,
  keys,
  stop_ids,
  pad_id,
  *,
  config,
  max_new_tokens,
  max_len,
  track_seen,
  cache_options,
  chunk_size,
):
  B, T = prompts.shape
  rest = max_new_tokens - 1
  # Scans of one size. Without stop ids one scan; else the last may run over
  # by fewer steps than there are scans, into slots of its own.
  scans = -(-rest // STEPS) if stop_ids.size else min(rest, 1)
  size = -(-rest // max(scans, 1))
  slots = cache_lib.whole_tiles(max(max_len, T + 1 + scans * size))
  cache = cache_lib.init_cache(config, B, slots, *cache_options)
  state, logprob = start(
    params,
    config,
    prompts,
    lengths,
    cache,
    sampling,
    keys,
    stop_ids,
    pad_id,
    track_seen=track_seen,
    chunk_size=chunk_size,
  )
  width = 1 + scans * size
  tokens = jnp.full((B, width), pad_id, jnp.int32).at[:, 0].set(state.token)
  logprobs = jnp.zeros((B, width), jnp.float32).at[:, 0].set(logprob)

  def unfinished(carry):
    index, state, _, _ = carry
    return (index < scans) & ~jnp.all(state.done)

  def scan(carry):
    index, state, tokens, logprobs = carry
    state, *new = advance(params, config, state, size)
    tokens, logprobs = (
      lax.dynamic_update_slice_in_dim(old, x, 1 + index * size, 1)
      for old, x in zip((tokens, logprobs), new, strict=True)
    )
    return index + 1, state, tokens, logprobs

  carry = (jnp.zeros((), jnp.int32), state, tokens, logprobs)
  if scans == 1:
    carry = scan(carry)
  elif scans:
    carry = lax.while_loop(unfinished, scan, carry)
  _, state, tokens, logprobs = carry
  return (
    tokens[:, :max_new_tokens],
    jnp.minimum(state.lengths, max_new_tokens),
    logprobs[:, :max_new_tokens],
  )


def check_prompts(
  config: ModelConfig,
  prompts: np.ndarray,
  lengths: np.ndarray,
  max_new_tokens: int,
  max_len: int | None = None,
) -> None:
  """Raises unless prompts and what is to follow fit the model and the cache.

  On the host, before anything is traced: inside a program an id or a slot out
  of range is clamped silently. Arguments are as in `generate`.
  """
  if prompts.ndim != 2 or not prompts.size:
    raise ValueError(
      f'prompts have shape {prompts.shape}; they must be [batch, tokens], both '
      'at least 1.'
    )
  for name, ids in (('prompts', prompts), ('lengths', lengths)):
    if not np.issubdtype(ids.dtype, np.integer):
      raise TypeError(f'{name} have dtype {ids.dtype}; they must be integers.')
  B, T = prompts.shape
  if lengths.shape != (B,) or lengths.min() < 1 or lengths.max() > T:
    raise ValueError(
      f'lengths={lengths.tolist()} must be {B} numbers from 1 to {T}, for '
      f'prompts of shape {prompts.shape}; begin an empty prompt with a token.'
    )
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens={max_new_tokens} must be at least 1.')
  live = prompts[np.arange(T)[None] >= T - lengths[:, None]]
  for bad in (int(live.min()), int(live.max())):
    if not 0 <= bad < config.vocab_size:
      raise ValueError(
        f'prompts hold the id {bad}, outside of [0, {config.vocab_size}), the '
        'vocabulary of the model; use its own tokenizer.'
      )
  for what, used, limit in (
    ('the model', int(lengths.max()), config.max_len),
    ('the cache', T, max_len),
  ):
    if limit is not None and used + max_new_tokens > limit:
      raise ValueError(
        f'{used} prompt tokens and max_new_tokens={max_new_tokens} are '
        f'{used + max_new_tokens} tokens, more than the max_len={limit} of '
        f'{what}; shorten one of them.'
      )


def pack(
  prompts: Sequence[Sequence[int]], multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """Right-aligns prompts of any lengths.

  Args:
    prompts: B sequences of ids.
    multiple: the width is rounded up to it, so that fewer widths are compiled.

  Returns:
    Ids [B, T] int32 with zeros as padding, and lengths [B] int32.
  """
  rows = [np.asarray(prompt) for prompt in prompts]
  lengths = np.array([row.size for row in rows], np.int32)
  width = -(-max(lengths, default=0) // multiple) * multiple
  tokens = np.zeros((len(rows), width), np.int32)
  for target, row in zip(tokens, rows, strict=True):
    target[width - row.size :] = row
  return tokens, lengths


def right_align(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
  """Moves the padding of [B, T] prompts from their right to their left."""
  shift = lambda row, length: jnp.roll(row, -length)
  return jax.vmap(shift)(jnp.asarray(tokens), jnp.asarray(lengths))


def _features(params, config, cache, tokens, **options):
  return Decoder(config).apply(
    {'params': params}, tokens, cache=cache, method='features', **options
  )


def _logits(params, config, features):
  return Decoder(config).apply({'params': params}, features, method='logits')


def _draw(state, logits):
  """Draws a token of each row that has not ended; returns its logprob [B]."""
  done = state.done
  token, logprob = sampling_lib.sample(
    logits,
    state.sampling,
    sampling_lib.step_keys(state.keys, state.step),
    state.seen,
  )
  seen = state.seen
  if seen is not None:
    seen = sampling_lib.mark_seen(seen, token, ~done)
  token = jnp.where(done, state.pad_id, token)
  state = state.replace(
    token=token,
    step=state.step + 1,
    lengths=state.lengths + ~done,
    done=done | sampling_lib.is_stop(token, state.stop_ids),
    seen=seen,
  )
  return state, jnp.where(done, 0.0, logprob)
