"""What does the KV cache save, over 1,000 new tokens of GPT-2's shape?

  python -m experiments.cached_vs_uncached [--target=experiments/results]

Both ways are one model, one dtype and greedy; they differ in that each token
reads one token and the cache, or reads its whole prefix again. The latter is a
program for each length, so a prefix is padded on its right to a multiple of
--bucket: at most so many tokens are computed in vain, and are part of its time.
Compiling is part of neither.

The cached text is drawn first. The uncached way then continues every one of
its prefixes by one token, which is the work of drawing the text without a
cache, and gives the same tokens (how many is recorded). Every position is
measured: about ten minutes on 2 CPU cores, nearly all of it without a cache.
The cached text is drawn again in between, in case the machine's speed changes.

With --target results and plot are written there, and the same command goes on
where it was stopped. Published, for GPT-2 on a T4 in the article "Transformers
KV Caching Explained": 1,000 tokens in 11.885 s with and 56.197 s without.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags
from jax import lax

from configs import gpt2_small
from gqa import cache, cli, decode, limits, measure, runtime, sampling
from gqa.config import ModelConfig
from gqa.model import Decoder

NAME = 'cached_vs_uncached'
PUBLISHED = {'cached_seconds': 11.885, 'uncached_seconds': 56.197}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What is compared."""

  config: ModelConfig
  prompt_len: int = 24  # with 1,000 new tokens GPT-2's 1,024 are full
  new_tokens: int = 1000
  steps: int = 9  # of one cached call; they divide the tokens after the first
  bucket: int = 32
  repeats: int = 3  # of the cached text
  seed: int = 0

  def __post_init__(self):
    total = self.prompt_len + self.new_tokens
    if total > self.config.max_len:
      raise ValueError(
        f'{total} tokens are more than max_len={self.config.max_len} of the '
        'model; draw fewer.'
      )
    if self.bucket < 1:
      raise ValueError(f'bucket={self.bucket} must be at least 1.')
    if (self.new_tokens - 1) % self.steps:
      raise ValueError(
        f'new_tokens={self.new_tokens} must be one more than a multiple of '
        f'{self.steps}: so many are drawn in a call.'
      )


class Cached:
  """Draws the text with a cache."""

  def __init__(self, work, params):
    self.work, self.params = work, params
    rng = np.random.default_rng(work.seed)
    size = (1, work.prompt_len)
    prompt = rng.integers(work.config.vocab_size, size=size, dtype=np.int32)
    self.prompt = jnp.asarray(prompt)
    self.settings = (
      jnp.full((1,), work.prompt_len, jnp.int32),
      sampling.Sampling.create(1),
      sampling.row_keys(work.seed, np.arange(1, dtype=np.int32)),
      jnp.zeros((0,), jnp.int32),
    )
    arguments = (params, work.config, *self.arguments())
    self.start, start_seconds = measure.compiled(
      decode.start, 'cache', arguments
    )
    state, _ = self.start(params, *self.arguments())
    self.advance, advance_seconds = measure.compiled(
      decode.advance,
      'state',
      (params, work.config, state),
      num_steps=work.steps,
    )
    self.compile_seconds = start_seconds + advance_seconds

  def arguments(self):
    """What `start` takes besides the parameters; the cache is new."""
    work, (lengths, *settings) = self.work, self.settings
    slots = cache.whole_tiles(work.prompt_len + work.new_tokens)
    empty = cache.init_cache(work.config, 1, slots)
    return self.prompt, lengths, empty, *settings

  def draw(self):
    """Returns prompt and text [prompt_len + new_tokens], and seconds.

    The seconds are those of the prompt with the first token, and those of
    each later token.
    """
    arguments = self.arguments()
    prefill, (state, _) = limits.timed(self.start, self.params, *arguments)
    text, seconds = [self.prompt[0], np.asarray(state.token)], []
    for _ in range((self.work.new_tokens - 1) // self.work.steps):
      taken, (state, new, _) = limits.timed(self.advance, self.params, state)
      text.append(new[0])
      seconds += [taken / self.work.steps] * self.work.steps
    return np.concatenate(text), [prefill, *seconds]


@functools.partial(jax.jit, static_argnames='config')
def next_token(params, config, tokens, length):
  """The likeliest token after the first `length` of tokens [1, T]."""
  model, variables = Decoder(config), {'params': params}
  features = model.apply(variables, tokens, method='features')
  last = lax.dynamic_slice_in_dim(features, length - 1, 1, axis=1)
  return model.apply(variables, last, method='logits')[0, 0].argmax()


def uncached(work, params, text, lengths, padded):
  """Continues prefixes of one padded length; returns tokens and seconds.

  The last of the returned is what compiling took.
  """
  tokens = np.zeros((1, padded), np.int32)
  tokens[0, : min(padded, text.size)] = text[:padded]
  tokens = jnp.asarray(tokens)  # causal: a prefix does not see what follows
  begun = time.perf_counter()
  program = next_token.lower(params, work.config, tokens, lengths[0]).compile()
  compile_seconds = time.perf_counter() - begun
  program(params, tokens, lengths[0]).block_until_ready()
  drawn, seconds = [], []
  for length in lengths:
    taken, token = limits.timed(program, params, tokens, length)
    drawn.append(int(token))
    seconds.append(taken)
  return drawn, seconds, compile_seconds


class Log:
  """Lines of a file, or of this run alone, that tell what is done."""

  def __init__(self, about, path=None):
    self.about, self.path, self.lines = about, path, []
    if path is not None and path.exists():
      lines = map(json.loads, path.read_text().splitlines())
      self.lines = [x for x in lines if about.items() <= x.items()]

  def find(self, **key):
    """The line of a key, or None."""
    for line in self.lines:
      if key.items() <= line.items():
        return line
    return None

  def add(self, **line):
    """Keeps a line."""
    line = self.about | line
    self.lines.append(line)
    if self.path is not None:
      with open(self.path, 'a', encoding='utf-8') as f:
        f.write(json.dumps(line) + '\n')


def compare(work, log, say=lambda text: None):
  """Measures what the log does not have; returns the summary."""
  params = measure.make_params(work.config, work.config.dtype, work.seed)
  cached = Cached(work, params)
  text, _ = cached.draw()
  buckets = {}
  for i in range(work.new_tokens):
    length = work.prompt_len + i
    padded = -(-length // work.bucket) * work.bucket
    buckets.setdefault(min(padded, work.config.max_len), []).append(length)
  again = -(-len(buckets) // work.repeats)
  whole = sum(padded * len(lengths) for padded, lengths in buckets.items())
  begun, done, total = time.monotonic(), 0, whole
  for i, (padded, lengths) in enumerate(buckets.items()):
    if i % again == 0 and log.find(what='cached', before=padded) is None:
      _, seconds = cached.draw()
      log.add(
        what='cached',
        before=padded,
        seconds=rounded(seconds),
        compile_seconds=cached.compile_seconds,
      )
    if log.find(what='uncached', padded=padded) is not None:
      total -= padded * len(lengths)
      continue
    drawn, seconds, compile_seconds = uncached(
      work, params, text, lengths, padded
    )
    same = sum(int(text[n]) == t for n, t in zip(lengths, drawn, strict=True))
    log.add(
      what='uncached',
      padded=padded,
      first=lengths[0],
      seconds=rounded(seconds),
      same_tokens=same,
      compile_seconds=compile_seconds,
    )
    done += padded * len(lengths)
    left = (time.monotonic() - begun) * (total / done - 1)
    say(
      f'{lengths[-1]} tokens: {1e3 * statistics.median(seconds):.1f} ms for '
      f'one more without a cache, eta {tqdm.tqdm.format_interval(left)}'
    )
  return summary(work, log.lines)


def summary(work, lines):
  """Totals, and seconds by position."""
  passes = [x['seconds'] for x in lines if x['what'] == 'cached']
  buckets = [x for x in lines if x['what'] == 'uncached']
  buckets.sort(key=lambda line: line['first'])
  without = [s for line in buckets for s in line['seconds']]
  totals = [sum(seconds) for seconds in passes]
  with_cache = [statistics.median(at) for at in zip(*passes, strict=True)]
  published = PUBLISHED['uncached_seconds'] / PUBLISHED['cached_seconds']
  return {
    'new_tokens': work.new_tokens,
    'cached_seconds': statistics.median(totals),
    'cached_seconds_low': min(totals),
    'cached_seconds_high': max(totals),
    'uncached_seconds': sum(without),
    'times_faster': sum(without) / statistics.median(totals),
    'published_times_faster_t4': round(published, 2),
    'same_tokens': sum(line['same_tokens'] for line in buckets),
    'cached_token_seconds': rounded(with_cache),
    'uncached_token_seconds': rounded(without),
  }


def plot(work, result, path):
  """Draws time against position, for each token and in all."""
  import matplotlib

  matplotlib.use('agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout='constrained')
  positions = work.prompt_len + np.arange(work.new_tokens)
  for name, label, color, style in (
    ('uncached_token_seconds', 'prefix read again', '#D55E00', '--'),
    ('cached_token_seconds', 'KV cache', '#0072B2', '-'),
  ):
    seconds = np.array(result[name])
    # The first token of both ways reads the prompt.
    axes[0].plot(
      positions[1:], 1e3 * seconds[1:], style, color=color, label=label
    )
    axes[1].plot(positions, seconds.cumsum(), style, color=color, label=label)
  axes[0].set(ylabel='ms per token', yscale='log')
  axes[1].set(ylabel='seconds in all', yscale='log')
  for one in axes:
    one.set(xlabel='position (tokens before it)')
    one.grid(alpha=0.3)
    one.legend()
  figure.suptitle(
    f"{work.new_tokens:,} tokens of GPT-2's shape, {work.config.dtype}: "
    f'{result["cached_seconds"]:.1f} s with and '
    f'{result["uncached_seconds"]:.1f} s without a cache '
    f'({result["times_faster"]:.1f} times)'
  )
  figure.savefig(path)
  pyplot.close(figure)


def rounded(seconds):
  return [float(f'{s:.4g}') for s in seconds]


def main(argv):
  del argv
  flag = flags.FLAGS
  fields = gpt2_small.get_config().model.to_dict()
  fields |= {'dtype': flag.dtype, 'num_kv_heads': flag.num_kv_heads}
  work = Work(config=ModelConfig.from_dict(fields), bucket=flag.bucket)
  runtime.keep_freed_memory()
  about = {
    'work': json.loads(json.dumps(dataclasses.asdict(work))),
    'device': limits.describe_device(),
  }
  target = path = None
  if flag.target:
    target = pathlib.Path(flag.target).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    path = target / f'{NAME}.jsonl'
  log = Log(about, path)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  result = compare(work, log, say)
  if log.find(what=NAME) is None:
    log.add(what=NAME, **result, **runtime.circumstances())
  if target is not None:
    plot(work, result, target / f'{NAME}.svg')
    plot(work, result, target / f'{NAME}.png')
  for name, value in result.items():
    if not isinstance(value, list):
      print(
        f'{name}: {value:.4g}'
        if isinstance(value, float)
        else f'{name}: {value}'
      )


if __name__ == '__main__':
  flags.DEFINE_string('target', None, 'folder of results; nothing is written')
  flags.DEFINE_string('dtype', 'float32', 'of weights, compute and cache')
  flags.DEFINE_integer('num_kv_heads', 12, 'of 12 heads')
  flags.DEFINE_integer('bucket', 32, 'tokens; see above')
  cli.run(main)
