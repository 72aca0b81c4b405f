"""What does a real model lose when its KV heads are made fewer, untrained?

  bash scripts/smollm2.sh
  python -m experiments.smollm2_conversion --workdir=runs/smollm2 \
      --calibration=BOOKS.txt --data=OTHER_BOOKS.txt [--num_seeds=3]

Two questions, in float32 and without a training step. Recovery: the model is
written with a KV head for each query head, every one turned by what leaves it
as it is, and shuffled; how near does converting back to the number of KV heads
that it has come to its loss? Conversion: what is the loss with one KV head, for
each method, as it is and layer by layer with the output projections refitted?
A seed is another disguise, or other calibration text. Each line of --results
is an answer; those that are there are not sought again.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys

import jax
import numpy as np
from absl import flags

from gqa import checkpoint, cli, data, runtime
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.convert import calibrate, disguise, methods, walk
from gqa.convert.methods import Options

METHODS = ('low_rank', 'mean', 'aligned', 'mean_renorm', 'first', 'medoid')
BY_WEIGHTS = ('mean', 'first')  # a text says nothing to these
REPAIRED = {'sequential': True, 'refit': True}


def cases(num_seeds, reconstruct_steps):
  """Yields the fields by which a line of the results is known."""
  seeds = range(num_seeds)
  for seed in seeds:
    yield _case('recovery', 'low_rank', seed, grouping='similarity')
    yield _case('conversion', 'low_rank', seed, **REPAIRED)
  for seed, method in itertools.product(seeds, METHODS):
    if seed == 0 or method not in BY_WEIGHTS:
      yield _case('conversion', method, seed)
  for seed, method in itertools.product(seeds, ('aligned', 'mean')):
    yield _case('recovery', method, seed, grouping='similarity')
  for seed, method in itertools.product(seeds, METHODS[1:]):
    yield _case('conversion', method, seed, **REPAIRED)
  steps = {'reconstruct_steps': reconstruct_steps}
  for seed in seeds:
    yield _case('conversion', 'low_rank', seed, **REPAIRED, **steps)


def _case(what, method, seed, **fields):
  options = Options(method=method, seed=seed, **fields)
  return {'what': what, **dataclasses.asdict(options)}


class Study:
  """A parent, and texts to convert it by and to measure losses on."""

  def __init__(self, flag):
    raw = workdir_lib.load_config(flag.workdir)
    self.config = ModelConfig.from_dict(raw['model'])
    runtime.cache_compiled_programs(raw['compilation_cache'])
    tokenizer = tokenizer_lib.load(flag.workdir)
    self._seeds = flag.num_seeds
    wanted = (flag.calibration_tokens * self._seeds, flag.data_tokens)
    texts = [
      data.tokens_from_text(path, tokenizer, 8 * count)
      for path, count in zip((flag.calibration, flag.data), wanted, strict=True)
    ]
    self.text = calibrate.open_text(
      texts[0], flag.seq_len, *wanted, 2048 // flag.seq_len, texts[1]
    )
    self.params, _ = checkpoint.load_params(flag.workdir)
    self._moments = None, []  # seed, of each layer
    self.loss_of_parent = self._loss(self.config, self.params)

  def run(self, case):
    """Returns what a line says besides its case and its circumstances."""
    case = dict(case)
    what, options = case.pop('what'), Options(**case)
    if what == 'recovery':
      return self._recovery(options)
    batches = self.text.calibration[options.seed :: self._seeds]
    if options.sequential:
      heads = (1,) * self.config.num_layers
      new, config, _ = walk.convert(
        self.params, self.config, heads, options, batches
      )
    else:
      new, config = self._merged(options, batches)
    return {
      **self._answer(self.config, config, new),
      'calibration_tokens': sum(b['tokens'].size for b in batches),
    }

  def _recovery(self, options):
    rng = np.random.default_rng(options.seed)
    params, parent = disguise.expand(self.params, self.config, rng)
    heads = self.config.kv_heads
    new, config, _ = walk.convert(params, parent, heads, options)
    return {
      **self._answer(parent, config, new),
      'loss_in_disguise': self._loss(parent, params),
    }

  def _merged(self, options, batches):
    """Merges heads by the parent's own streams, which all methods share."""
    if self._moments[0] != options.seed:
      one = walk.Walk(self.config, self.params, batches, options)
      moments = [one.look(i, layer) for i, layer in enumerate(self._layers())]
      self._moments = options.seed, moments
    new = dict(self.params)
    for i, layer in enumerate(self._layers()):
      attention, _ = methods.merge_layer(
        layer['attention'], self.config, 1, options, self._moments[1][i], i
      )
      new[f'layer_{i}'] = layer | {'attention': attention}
    return new, dataclasses.replace(self.config, num_kv_heads=1)

  def _layers(self):
    return [self.params[f'layer_{i}'] for i in range(self.config.num_layers)]

  def _answer(self, parent, config, params):
    loss = self._loss(config, params)
    return {
      'parent_kv_heads': parent.num_kv_heads or parent.num_heads,
      'num_kv_heads': config.num_kv_heads,
      'loss_of_parent': self.loss_of_parent,
      'loss': loss,
      'lost': loss - self.loss_of_parent,
    }

  def _loss(self, config, params):
    text = self.text
    return calibrate.loss(config, params, text.held_out, text.tokens)['loss']


def main(argv):
  del argv
  flag = flags.FLAGS
  runtime.keep_freed_memory()
  results = pathlib.Path(flag.results)
  rows = results.read_text().splitlines() if results.exists() else ()
  rows = [json.loads(row) for row in rows]
  study = Study(flag)
  given = [re.sub('=.*/', '=', argument) for argument in sys.argv[1:]]
  circumstances = {
    'seq_len': flag.seq_len,
    'calibration_text': os.path.basename(flag.calibration),
    'data': os.path.basename(flag.data),
    'data_tokens': int(sum(b['weights'].sum() for b in study.text.held_out)),
    'device': jax.local_devices()[0].device_kind,
    **runtime.circumstances(),
    'command': ' '.join(['python -m experiments.smollm2_conversion', *given]),
  }
  for case in cases(flag.num_seeds, flag.reconstruct_steps):
    if any(case.items() <= row.items() for row in rows):
      continue
    rows.append({**case, **study.run(case), **circumstances})
    with results.open('a') as file:
      file.write(json.dumps(rows[-1]) + '\n')
    print(json.dumps(rows[-1]), flush=True)


def _define_flags():
  flags.DEFINE_string('workdir', None, "SmolLM2's", required=True)
  flags.DEFINE_string('calibration', None, 'text to convert by', required=True)
  flags.DEFINE_string('data', None, 'other text, for the loss', required=True)
  flags.DEFINE_string(
    'results', 'experiments/results/smollm2_conversion.jsonl', 'file to add to'
  )
  flags.DEFINE_integer('num_seeds', 3, 'of each case', lower_bound=1)
  flags.DEFINE_integer(
    'calibration_tokens', 24_576, 'for each seed, others', lower_bound=2048
  )
  flags.DEFINE_integer('data_tokens', 8_192, 'at most', lower_bound=1)
  flags.DEFINE_integer('seq_len', 256, 'tokens of a window', lower_bound=1)
  flags.DEFINE_integer(
    'reconstruct_steps', 30, 'of the case with gradient steps', lower_bound=1
  )


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
