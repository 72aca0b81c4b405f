"""One cell of the benchmark on this library: the programs people run.

`decode.start` reads the prompts and `decode.advance` makes all steps of a call
as one scan over a donated cache, greedily, as `generate` does; nothing here is
a copy of them. Each call starts at the cell's context again: the cache's
length is set back, and what lies beyond is overwritten.

Reading a long prompt can take longer than everything else. A cell whose
`prefill` is 'filled' therefore reads only its first tokens; the other slots
hold made-up numbers, which cost a step as much as real ones.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gqa import cache as cache_lib
from gqa import decode
from gqa import model as model_lib
from gqa import sampling as sampling_lib
from gqa.cache import KVCache
from gqa.cells import Cell
from gqa.config import ModelConfig
from gqa.limits import timed

_SHORT = 16  # tokens of the prompt of a made-up cache
_BLOCK = 2**16  # made-up numbers before they repeat


class Run:
  """Weights, cache and compiled programs of a cell.

  Attributes:
    info: what was found out before any step: seconds of compiling, bytes.
  """

  def __init__(self, cell: Cell, params: model_lib.Params):
    self._cell, self._params = cell, params
    B, config = cell.batch_size, cell.model
    filled = cell.prefill == 'filled'
    T = min(cell.context, _SHORT) if filled else cell.context
    rng = np.random.default_rng(cell.seed)
    tokens = rng.integers(0, config.vocab_size, (B, T), dtype=np.int32)
    self._prompts = (jnp.asarray(tokens), jnp.full((B,), T, jnp.int32))
    self._settings = (
      sampling_lib.Sampling.create(B),
      sampling_lib.row_keys(cell.seed, np.arange(B, dtype=np.int32)),
      jnp.zeros((0,), jnp.int32),  # nothing ends a row
    )
    cache = cache_lib.init_cache(
      config,
      B,
      cell.slots,
      cell.cache_kind,
      None if cell.cache_kind == 'int8' else cell.cache_dtype,
    )
    if filled:
      cache = fill(cache, cell.seed)
    self._start, start_seconds = compiled(
      decode.start,
      'cache',
      (params, config, *self._prompts, cache, *self._settings),
      chunk_size=cell.prefill_chunk,
    )
    self._state, _ = self._call_start(cache)
    del cache  # donated
    self._advance, advance_seconds = compiled(
      decode.advance,
      'state',
      (params, config, self._state),
      num_steps=cell.steps,
    )
    self.info: Mapping[str, Any] = {
      'compile_seconds': start_seconds + advance_seconds,
      'compile_prefill_seconds': start_seconds,
      'compile_decode_seconds': advance_seconds,
      'cache_bytes': _bytes(self._state.cache),
      'weight_bytes': _bytes(params),
      'temporary_bytes': _temporary_bytes(self._advance),
    }

  def prefill(self) -> float:
    """Reads the prompts once and returns the seconds."""
    cache, self._state = self._state.cache, None
    seconds, (self._state, _) = timed(self._call_start, cache)
    return seconds

  def decode(self) -> float:
    """Makes the cell's steps once and returns the seconds of all of them."""
    length = jnp.asarray(self._cell.context, jnp.int32)
    state, self._state = self._state, None
    state = state.replace(cache=state.cache.replace(length=length))
    seconds, (self._state, *_) = timed(self._advance, self._params, state)
    return seconds

  def close(self) -> None:
    """Frees the cache."""
    self._state = self._start = self._advance = None

  def _call_start(self, cache):
    return self._start(self._params, *self._prompts, cache, *self._settings)


def make_params(config: ModelConfig, dtype: str, seed: int) -> model_lib.Params:
  """Random parameters for decoding in `dtype`."""
  config = dataclasses.replace(config, dtype='float32')

  def make(key):
    return model_lib.decoding_params(model_lib.init_params(config, key), dtype)

  return jax.jit(make)(jax.random.key(seed))


def compiled(
  function: Callable, donated: str, arguments: Sequence[Any], **static: Any
) -> tuple[Callable, float]:
  """Compiles a function of `decode` for arguments of these shapes.

  Args:
    function: one that takes a `config`.
    donated: name of the argument that its result takes the place of.
    arguments: the others than `static`; the program takes them without config.
    **static: further arguments, fixed in the program.

  Returns:
    The program, and the seconds it took.
  """
  jitted = jax.jit(
    function,
    static_argnames=('config', *static),
    donate_argnames=(donated,),
  )
  begun = time.perf_counter()
  program = jitted.lower(*arguments, **static).compile()
  return program, time.perf_counter() - begun


def fill(cache: KVCache, seed: int) -> KVCache:
  """Puts made-up numbers in all slots of a cache, which is donated."""
  normal = jax.random.normal(jax.random.key(seed), (_BLOCK,))

  # What a program does not read is left out of its arguments, and then not
  # donated either.
  @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
  def fill_array(x):
    # int8 numbers use their range, and scales undo it.
    numbers = normal
    if x.dtype == jnp.int8:
      numbers = jnp.clip(jnp.round(normal * 40), -127, 127)
    return jnp.resize(numbers.astype(x.dtype), x.shape)

  def fill_layer(layer):
    scale = lambda x: None if x is None else jnp.full_like(x, 1 / 40)
    return layer.replace(
      k=fill_array(layer.k),
      v=fill_array(layer.v),
      k_scale=scale(layer.k_scale),
      v_scale=scale(layer.v_scale),
      more=fill_layer(layer.more) if layer.more else None,
    )

  return cache.replace(layers=tuple(map(fill_layer, cache.layers)))


def _bytes(tree: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def _temporary_bytes(program) -> int | None:
  """What a program takes besides arguments and results, where it is known."""
  analysis = program.memory_analysis()
  return None if analysis is None else analysis.temp_size_in_bytes
