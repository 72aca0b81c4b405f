"""Loss, perplexity and bits per byte of a checkpoint on a text.

  python -m gqa.evaluate --checkpoint=DIR [--data=FILE]

The text is cut into consecutive windows of seq_len tokens; each token of each
document counts once, given what precedes it in its window. The result does
not depend on the batch size.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import tqdm
from absl import flags

from gqa import checkpoint, cli, data, runtime, sharding
from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig

EvalStep = Callable[[model_lib.Params, dict[str, jax.Array]], Any]


def make_eval_step(config: ModelConfig) -> EvalStep:
  """Returns a compiled (params, batch) -> sums of cross-entropy and weights."""
  decoder = model_lib.Decoder(config)

  @jax.jit
  def eval_step(params, batch):
    features = decoder.apply(
      {'params': params},
      batch['tokens'],
      batch['positions'],
      batch['segments'],
      method='features',
    )
    _, nll = loss_lib.cross_entropy(
      features,
      model_lib.head_rows(config, params),
      batch['targets'],
      batch['weights'],
      softcap=config.logit_softcap,
    )
    return nll.sum(), batch['weights'].sum()

  return eval_step


def evaluate(
  eval_step: EvalStep,
  params: model_lib.Params,
  batches: Iterable[dict[str, np.ndarray]],
  mesh: jax.sharding.Mesh,
  tokens: data.TokenFile,
) -> dict[str, float]:
  """Sums over `batches` of `tokens`; see `summarize`."""
  sums, pending = [], None
  for batch in batches:
    arrays = {name: x for name, x in batch.items() if name != 'index'}
    with jax.set_mesh(mesh):
      running = eval_step(params, sharding.put_batch(arrays, mesh))
    # Fetched while the next batch is computed.
    if pending is not None:
      sums.append(jax.device_get(pending))
    pending = running
  sums.append(jax.device_get(pending))
  nll = math.fsum(float(s) for s, _ in sums)
  targets = math.fsum(float(count) for _, count in sums)
  return summarize(nll, targets, tokens)


def summarize(
  nll: float, targets: float, tokens: data.TokenFile
) -> dict[str, float]:
  """Turns a sum of nats over `targets` tokens of a text into its figures.

  `loss` is in nats per token. `bits_per_byte` divides by the UTF-8 bytes of
  the text, in the proportion of its tokens that were evaluated.
  """
  loss = nll / targets
  nats_per_byte = loss * tokens.num_targets / tokens.bytes
  return {
    'loss': loss,
    'perplexity': math.exp(min(loss, 700.0)),
    'bits_per_byte': nats_per_byte / math.log(2),
    'tokens': int(targets),
  }


def main(argv):
  """Evaluates the checkpoint of the flags and prints one JSON line."""
  del argv
  flag = flags.FLAGS
  raw = workdir_lib.load_config(flag.checkpoint)
  config = ModelConfig.from_dict(raw['model'])
  seq_len = flag.seq_len or raw['train']['seq_len']
  if not (flag.data or raw['data']['path']):
    raise ValueError(
      f'{flag.checkpoint} was not trained here and has no data of its own; '
      'give --data=TEXT.'
    )
  tokens = _open(flag.data or raw['data']['path'], flag.split, flag.checkpoint)
  tokens.check_vocab(config.vocab_size)
  runtime.keep_freed_memory()
  runtime.cache_compiled_programs(raw['compilation_cache'])
  mesh = sharding.make_mesh(
    types.SimpleNamespace(data=-1, fsdp=flag.fsdp, model=flag.model)
  )
  sharding.check_batch(flag.batch_size, mesh)
  params, meta = checkpoint.load_on_mesh(
    flag.checkpoint, flag.step, config, mesh
  )
  batches = data.eval_batches(
    tokens, batch_size=flag.batch_size, seq_len=seq_len
  )
  total = -(-(len(tokens) - 1) // (seq_len * flag.batch_size))
  batches = tqdm.tqdm(batches, total=total, unit='batch', disable=None)
  result = evaluate(make_eval_step(config), params, batches, mesh, tokens)
  result |= {
    'bytes': tokens.bytes,
    'step': meta['step'],
    'checkpoint': flag.checkpoint,
    'data': flag.data or raw['data']['path'],
    'seq_len': seq_len,
  }
  print(json.dumps(result))


def _open(source: str, split: str, run: str) -> data.TokenFile:
  """Opens a token directory, or tokenises a text as the run's was."""
  if data.is_token_directory(source):
    return data.open_tokens(source, split)
  return data.tokens_from_text(source, tokenizer_lib.load(run))


def _define_flags():
  flags.DEFINE_string('checkpoint', None, 'workdir of a run', required=True)
  flags.DEFINE_string('step', 'latest', "'latest', 'best' or a step")
  flags.DEFINE_string('data', None, "text or token directory; the run's own")
  flags.DEFINE_string('split', 'valid', 'part of a token directory')
  flags.DEFINE_integer('batch_size', 16, 'windows at once', lower_bound=1)
  flags.DEFINE_integer('seq_len', None, "tokens; the run's own", lower_bound=1)
  flags.DEFINE_integer('fsdp', 1, 'devices that split parameters')
  flags.DEFINE_integer('model', 1, 'devices that split heads and MLP')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
