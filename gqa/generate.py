"""Text from any checkpoint.

  python -m gqa.generate --checkpoint=DIR --prompt=TEXT [--prompt=TEXT ...]

Without --prompt the prompt is --prompt_file, or standard input. Several
prompts are one batch. A prompt and its continuation go to standard output,
token by token on a terminal; what it cost goes to standard error.

`generate_text` is the same for notebooks.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from gqa import cache as cache_lib
from gqa import checkpoint, cli, decode, runtime, sharding
from gqa import model as model_lib
from gqa import sampling as sampling_lib
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.sampling import Sampling
from gqa.stopping import StopStrings

STEPS = 8  # tokens drawn in one call, between two looks at stop strings
WIDTH = 32  # prompts are padded to a multiple: fewer programs are compiled
_PROGRAMS = {}  # compiled ones by function, static arguments and shapes


class Model(NamedTuple):
  """What is needed to continue a text."""

  params: model_lib.Params
  config: ModelConfig
  tokenizer: Any  # see tokenizer.py


class Cost:
  """What a generation took; filled in while it runs."""

  compile_seconds = 0.0
  prefill_seconds = 0.0
  prompt_tokens = 0
  decode_seconds = 0.0  # after the first token
  steps = 0  # tokens of each row after the first
  tokens = 0  # of all rows, without padding
  cache_bytes = 0

  def __str__(self):
    step = self.decode_seconds / max(self.steps, 1)
    total = self.prefill_seconds + self.decode_seconds
    return (
      f'prefill {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s, '
      f'{1e3 * step:.2f} ms per token, '
      f'{self.tokens / max(total, 1e-9):.1f} tokens/s, '
      f'cache {self.cache_bytes / 2**20:.2f} MiB, '
      f'compiled in {self.compile_seconds:.1f} s'
    )


def load(
  path: str,
  step: str = 'latest',
  devices: int = 1,
  dtype: str | None = None,
) -> Model:
  """Opens a checkpoint, its parameters as `decoding_params` lays them out.

  Args:
    path: a workdir, or one of its checkpoints/<step>.
    step: 'latest', 'best' or a number.
    devices: how many split heads and MLP.
    dtype: the compute type, the checkpoint's unless given.
  """
  raw = workdir_lib.load_config(path)
  config = ModelConfig.from_dict(raw['model'])
  if dtype:
    config = dataclasses.replace(config, dtype=dtype)
  tokenizer = tokenizer_lib.load(str(workdir_lib.locate(path)[0]))
  if 'interop' in raw:
    tokenizer.add_bos = raw['interop']['add_bos']
  mesh = sharding.make_mesh(
    types.SimpleNamespace(data=1, fsdp=1, model=devices),
    jax.devices()[:devices],
  )
  params, _ = checkpoint.load_on_mesh(path, step, config, mesh)
  params = model_lib.decoding_params(params, config.dtype, donate=True)
  return Model(params, config, tokenizer)


def generate_text(
  model: str | os.PathLike | Model, prompts: str | Sequence[str], **settings
) -> list[str]:
  """Continues prompts and returns the continuations.

  Args:
    model: a checkpoint's directory, or what `load` returns: parameters, config
      and tokenizer.
    prompts: one text or several.
    **settings: as in `stream`.
  """
  if isinstance(model, (str, os.PathLike)):
    model = load(os.fspath(model))
  if isinstance(prompts, str):
    prompts = [prompts]
  texts = [''] * len(prompts)
  for pieces in stream(Model(*model), prompts, **settings):
    texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
  return texts


def stream(
  model: Model,
  prompts: Sequence[str],
  *,
  max_new_tokens: int = 128,
  temperature: float | Sequence[float] = 0.8,
  top_k: int | Sequence[int] = 0,
  top_p: float | Sequence[float] = 1.0,
  min_p: float | Sequence[float] = 0.0,
  repetition_penalty: float | Sequence[float] = 1.0,
  seed: int = 0,
  stop: Sequence[str] = (),
  cache_kind: str | None = None,
  cache_dtype: str | None = None,
  cost: Cost | None = None,
) -> Iterator[list[str]]:
  """Yields the next piece of each continuation while they are generated.

  A document's end ends a continuation. The text of a prompt depends on seed
  and its place among the prompts, not on the others.

  Args:
    model: what `load` returns.
    prompts: B texts, each the beginning of a document.
    max_new_tokens: at most so many for each.
    temperature: 0 takes the likeliest token, 1 draws from the model's own
      distribution, in between it is sharper.
    top_k: keeps the k likeliest tokens; 0 all.
    top_p: keeps the likeliest tokens with this share of probability.
    min_p: keeps tokens with at least this share of the top probability.
    repetition_penalty: above 1 avoids tokens that were there before.
    seed: of all draws.
    stop: strings that end a continuation, and are not part of it.
    cache_kind: 'full', 'ring' or 'int8'; unset, 'ring' if the model has a
      sliding window, else 'full'.
    cache_dtype: type of the cache; the model's unless given.
    cost: is filled in.
  """
  params, config, tokenizer = model
  params = jax.tree.map(jnp.asarray, params)
  cost = Cost() if cost is None else cost
  if not prompts:
    raise ValueError('there is no prompt; give at least one.')
  ids = [tokenizer.encode_prompt(text) for text in prompts]
  tokens, lengths = decode.pack(ids, WIDTH)
  decode.check_prompts(config, tokens, lengths, max_new_tokens)
  B, T = tokens.shape
  calls = -(-(max_new_tokens - 1) // STEPS)
  if cache_kind is None:
    cache_kind = 'full' if config.sliding_window is None else 'ring'
  settings = Sampling.create(
    B, temperature, top_k, top_p, min_p, repetition_penalty
  )
  rows = [_Text(tokenizer, stop) for _ in prompts]
  cache = cache_lib.init_cache(
    config,
    B,
    cache_lib.whole_tiles(T + 1 + calls * STEPS),
    cache_kind,
    cache_dtype,
  )
  cost.cache_bytes = cache_lib.cache_bytes(cache)
  cost.prompt_tokens = int(lengths.sum())
  arrays = (
    jnp.asarray(tokens),
    jnp.asarray(lengths),
    cache,
    settings,
    sampling_lib.row_keys(seed, np.arange(B, dtype=np.int32)),
    jnp.asarray(tokenizer.stop_ids, jnp.int32),
    jnp.asarray(tokenizer.eos_id, jnp.int32),
  )
  start = _compiled(
    cost, 'start', params, config, *arrays, track_seen=settings.needs_seen()
  )
  begun = time.perf_counter()
  state, _ = start(params, *arrays)
  del arrays, cache  # donated
  new = np.asarray(state.token)[:, None]
  cost.prefill_seconds += time.perf_counter() - begun
  left = max_new_tokens
  while True:
    new = new[:, :left]
    pieces = [row.feed(part) for row, part in zip(rows, new, strict=True)]
    left -= new.shape[1]
    cost.tokens = sum(row.count for row in rows)
    ended = left == 0 or all(row.ended for row in rows)
    if ended:
      pieces = [a + row.finish() for a, row in zip(pieces, rows, strict=True)]
    yield pieces
    if ended:
      return
    if stop:
      done = np.array([row.ended for row in rows])
      state = state.replace(done=jax.device_put(done, state.done.sharding))
    advance = _compiled(cost, 'advance', params, config, state, num_steps=STEPS)
    begun = time.perf_counter()
    state, new, _ = advance(params, state)
    new = np.asarray(new)
    cost.decode_seconds += time.perf_counter() - begun
    cost.steps += STEPS


def main(argv):
  """Continues the prompts of the flags."""
  del argv
  flag = flags.FLAGS
  prompts = _prompts(flag.prompt, flag.prompt_file)
  raw = workdir_lib.load_config(flag.checkpoint)
  runtime.keep_freed_memory()
  runtime.cache_compiled_programs(raw['compilation_cache'])
  model = load(flag.checkpoint, flag.step, flag.model, flag.dtype)
  cost = Cost()
  pieces = stream(
    model,
    prompts,
    cost=cost,
    **{name: getattr(flag, name) for name in _SETTINGS},
  )
  if len(prompts) == 1:
    _print_while_it_comes(prompts[0], pieces)
  else:
    _print_each(prompts, pieces)
  print(cost, file=sys.stderr)


def _print_while_it_comes(prompt, pieces):
  for first, (piece,) in enumerate(pieces):
    # Not before: a failure prints no text.
    print(piece if first else prompt + piece, end='', flush=True)
  print()


def _print_each(prompts, pieces):
  texts = list(prompts)
  for new in pieces:
    texts = [text + piece for text, piece in zip(texts, new, strict=True)]
  for i, text in enumerate(texts):
    print(f'==> {i + 1} of {len(texts)} <==\n{text}')


class _Text:
  """The text of one row while its tokens come."""

  def __init__(self, tokenizer, stop):
    self._tokenizer = tokenizer
    self._stop = StopStrings(stop)
    self._decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
    self._ends = tokenizer.stop_ids
    self._end_seen = False
    self.count = 0  # tokens, with the one that ended it

  @property
  def ended(self) -> bool:
    return self._end_seen or self._stop.stopped

  def feed(self, tokens) -> str:
    """Takes tokens, returns the characters that are certain to stay."""
    text = b''
    for token in tokens.tolist():
      if self.ended:
        break
      self.count += 1
      self._end_seen = token in self._ends
      text += self._stop.feed(self._tokenizer.token_bytes(token))
    return self._decoder.decode(text)

  def finish(self) -> str:
    """Returns what was held back."""
    return self._decoder.decode(self._stop.finish(), final=True)


def _compiled(cost, name, params, config, *arrays, **static):
  """Compiles `decode.start` or `decode.advance` once for these shapes.

  Apart from the call, so that its time is not taken for the model's. What the
  program returns is made of its donated argument.
  """
  leaves, tree = jax.tree.flatten((params, arrays))
  shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
  key = (name, config, tuple(static.items()), tree, shapes)
  if key not in _PROGRAMS:
    jitted = jax.jit(
      getattr(decode, name),
      static_argnames=('config', *static),
      donate_argnames=('cache',) if name == 'start' else ('state',),
    )
    begun = time.perf_counter()
    mesh = getattr(leaves[0].sharding, 'mesh', None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
      program = jitted.lower(params, config, *arrays, **static).compile()
    cost.compile_seconds += time.perf_counter() - begun
    _PROGRAMS[key] = program
  return _PROGRAMS[key]


def _prompts(prompts, path) -> list[str]:
  """The prompts of the flags, or standard input."""
  if prompts and path:
    raise ValueError('--prompt and --prompt_file are both given; drop one.')
  if prompts:
    return prompts
  if path:
    data = pathlib.Path(path).expanduser().read_bytes()
  elif sys.stdin.isatty():
    raise ValueError(
      'there is no prompt; give --prompt=TEXT, --prompt_file=FILE or pipe a '
      'text into standard input.'
    )
  else:
    path, data = 'standard input', sys.stdin.buffer.read()
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8: {error}; convert it.') from error
  return [text.removesuffix('\n')]  # editors and echo end a file with it


_SETTINGS = (
  'max_new_tokens',
  'temperature',
  'top_k',
  'top_p',
  'min_p',
  'repetition_penalty',
  'seed',
  'stop',
  'cache_kind',
  'cache_dtype',
)


def _define_flags():
  flags.DEFINE_string('checkpoint', None, 'workdir of a run', required=True)
  flags.DEFINE_string('step', 'latest', "'latest', 'best' or a step")
  flags.DEFINE_multi_string('prompt', [], 'text; repeat it for a batch')
  flags.DEFINE_string('prompt_file', None, 'one prompt; else standard input')
  flags.DEFINE_integer('max_new_tokens', 128, 'for each prompt, at most')
  flags.DEFINE_float('temperature', 0.8, '0 takes the likeliest token')
  flags.DEFINE_integer('top_k', 0, 'keep the k likeliest tokens; 0 for all')
  flags.DEFINE_float('top_p', 1.0, 'keep the likeliest with this probability')
  flags.DEFINE_float('min_p', 0.0, 'keep what has this share of the likeliest')
  flags.DEFINE_float('repetition_penalty', 1.0, 'above 1 avoids seen tokens')
  flags.DEFINE_integer('seed', 0, 'of the draws')
  flags.DEFINE_multi_string('stop', [], 'string that ends a text; repeatable')
  flags.DEFINE_enum(
    'cache_kind', None, cache_lib.KINDS, 'ring with a sliding window, else full'
  )
  flags.DEFINE_string('cache_dtype', None, "type of the cache; the model's own")
  flags.DEFINE_string('dtype', None, "type of weights and compute; the model's")
  flags.DEFINE_integer('model', 1, 'devices that split heads and MLP')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
