"""From a workdir to another one with fewer KV heads."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import jax

from gqa import checkpoint, cost, metrics, peaks, runtime, sharding
from gqa import data as data_lib
from gqa import model as model_lib
from gqa import progress as progress_lib
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.convert import budget as budget_lib
from gqa.convert import calibrate, walk
from gqa.convert.methods import PLAIN_METHODS, Options, Report

RESULT = 'convert.json'
BATCH_TOKENS = 2048  # in one call of a layer
BYTES_PER_TOKEN = 8  # of text that is tokenised, to be sure that it is enough


def convert(
  source: str,
  target: str,
  *,
  num_kv_heads: int | Sequence[int] | None = None,
  budget: int | None = None,
  step: str = 'latest',
  method: str = 'low_rank',
  grouping: str | None = None,
  calibration: str | None = None,
  calibration_tokens: int = 24_576,
  data: str | None = None,
  data_tokens: int = 8_192,
  seq_len: int | None = None,
  sequential: bool | None = None,
  refit: bool | None = None,
  reconstruct_steps: int = 0,
  seed: int = 0,
) -> dict[str, Any]:
  """Writes the workdir `target`; returns what its `convert.json` holds.

  The arguments are the flags of `python -m gqa.convert`.
  """
  begun = time.perf_counter()
  if (num_kv_heads is None) == (budget is None):
    raise ValueError('give one of num_kv_heads and budget.')
  raw = workdir_lib.load_config(source)
  config = ModelConfig.from_dict(raw['model'])
  if isinstance(num_kv_heads, int):
    num_kv_heads = (num_kv_heads,) * config.num_layers
  if num_kv_heads is not None:
    walk.check_kv_heads(config, num_kv_heads)
  workdir = _new_workdir(target)
  tokenizer = tokenizer_lib.load(os.path.expanduser(source))
  text = _open_text(
    raw,
    config,
    tokenizer,
    calibration=calibration,
    num_tokens=calibration_tokens,
    held_out=data,
    held_out_tokens=data_tokens,
    seq_len=seq_len,
  )
  thorough = method not in PLAIN_METHODS
  calibrated = thorough and text is not None
  options = Options(
    method=method,
    grouping=grouping or ('similarity' if thorough else 'contiguous'),
    sequential=calibrated if sequential is None else sequential,
    refit=calibrated if refit is None else refit,
    reconstruct_steps=reconstruct_steps,
    seed=seed,
  )
  options.check(text is not None)
  runtime.cache_compiled_programs(raw['compilation_cache'])
  params, meta = _load(source, step, config)
  runtime.return_freed_memory()  # What reading no longer needs.
  batches = None if text is None else text.calibration
  losses = {'loss_before': _loss(config, params, text)}
  if num_kv_heads is None:
    if batches is None:
      raise ValueError('budget needs a text; give --calibration=FILE.')
    damages = walk.damages(params, config, options, batches)
    num_kv_heads = budget_lib.choose(config, damages, budget)
  with progress_lib.Progress(config.num_layers) as progress:
    new_params, new_config, layers = walk.convert(
      params,
      config,
      num_kv_heads,
      options,
      batches,
      lambda report: progress.update(report['layer'] + 1),
    )
  losses['loss_after'] = _loss(new_config, new_params, text)
  how = {
    **dataclasses.asdict(options),
    'budget': budget,
    'calibration': _describe(text),
  }
  parent = {
    'path': str(pathlib.Path(source).expanduser().absolute()),
    'step': meta['step'],
    'steps': checkpoint.trained_steps(meta),
    **how,
    **losses,
  }
  result = {
    'what': 'convert',
    'source': source,
    'target': target,
    'num_kv_heads': new_config.num_kv_heads,
    'parent_kv_heads': config.num_kv_heads or config.num_heads,
    **losses,
    **how,
    **_sizes(config, new_config, params, new_params),
    **_circumstances(),
    'seconds': time.perf_counter() - begun,
    'layers': layers,
  }
  tokenizer.save(workdir)
  checkpoint.save_params(
    workdir, new_params, {'parent': parent, 'tokens_seen': 0}
  )
  _write_result(workdir, result)
  workdir_lib.save_config(workdir, _new_raw(raw, new_config))
  return result


def _new_workdir(target):
  """A directory for the result, made and found to be empty and writable."""
  workdir = workdir_lib.resolve_workdir(target)
  if others := workdir_lib.contents(workdir):
    raise ValueError(
      f'target={target} is not empty (it holds {others[0]}); choose another '
      'one.'
    )
  return workdir


def _open_text(
  raw,
  config,
  tokenizer,
  calibration,
  num_tokens,
  held_out,
  held_out_tokens,
  seq_len,
):
  """The text to calibrate on; None if there is none, which is said."""
  if calibration == 'none':
    return None
  if calibration is None:
    calibration = raw['data']['path']
    if calibration is None or not data_lib.is_token_directory(calibration):
      print(
        'no text to calibrate on: going by the weights alone; give '
        '--calibration=TEXT',
        file=sys.stderr,
      )
      return None
  opened = [
    None if path is None else _open(path, split, tokenizer, wanted)
    for path, split, wanted in (
      (calibration, 'train', num_tokens + held_out_tokens),
      (held_out, 'valid', held_out_tokens),
    )
  ]
  for tokens in opened:
    if tokens is not None:
      tokens.check_vocab(config.vocab_size)
  seq_len = seq_len or raw['train']['seq_len']
  if seq_len > config.max_len:
    raise ValueError(
      f"seq_len={seq_len} exceeds the model's max_len={config.max_len}; give "
      'a smaller --seq_len.'
    )
  return calibrate.open_text(
    opened[0],
    seq_len,
    num_tokens,
    held_out_tokens,
    max(1, BATCH_TOKENS // seq_len),
    opened[1],
  )


def _open(path, split, tokenizer, num_tokens):
  """A split of a token directory, or enough of a text."""
  if data_lib.is_token_directory(path):
    return data_lib.open_tokens(path, split)
  return data_lib.tokens_from_text(
    path, tokenizer, BYTES_PER_TOKEN * num_tokens
  )


def _load(source, step, config):
  """Parameters on one device, and the checkpoint's `meta`."""
  mesh = sharding.make_mesh(
    types.SimpleNamespace(data=1, fsdp=1, model=1), jax.local_devices()[:1]
  )
  return checkpoint.load_on_mesh(source, step, config, mesh)


def _loss(config, params, text):
  if text is None:
    return None
  return calibrate.loss(config, params, text.held_out, text.tokens)['loss']


def _describe(text):
  if text is None:
    return None
  batches, first = text.calibration, text.calibration[0]['tokens']
  return {
    'text': str(text.source),
    'tokens': first.size * len(batches),
    'held_out_text': str(text.tokens),
    'held_out_tokens': sum(int(b['weights'].sum()) for b in text.held_out),
    'seq_len': first.shape[1],
  }


def _sizes(config, new_config, params, new_params):
  size = lambda c: cost.kv_bytes_per_token(c, cost.ITEMSIZE[c.dtype])
  return {
    'params': model_lib.param_count(new_params),
    'parent_params': model_lib.param_count(params),
    'kv_bytes_per_token': size(new_config),
    'parent_kv_bytes_per_token': size(config),
  }


def _circumstances():
  device = jax.local_devices()[0]
  return {
    'device': device.device_kind,
    **runtime.circumstances(),
    'peak_bytes': peaks.memory_stats()['memory/host_peak_bytes'],
  }


def _new_raw(raw, config):
  """The parent's config with the model's own, which is what `raw` resolves to.

  What `match_params` once added to the MLP stays as it is.
  """
  model = config.to_dict()
  if 'match_params' in raw['model']:
    model['match_params'] = False
  return {**raw, 'model': model}


def _write_result(workdir: pathlib.Path, result: dict[str, Any]):
  """One JSON line, and curves over the layers."""
  line = json.dumps(result, allow_nan=False)
  (workdir / RESULT).write_text(line + '\n', encoding='utf-8')
  with metrics.make_writer(workdir) as writer:
    for report in result['layers']:
      writer.scalars(report['layer'], _scalars(report))
    losses = ('loss_before', 'loss_after')
    if result['loss_after'] is not None:
      writer.scalars(0, {f'convert/{name}': result[name] for name in losses})


def _scalars(report: Report) -> dict[str, float]:
  """The numbers of a layer's report as curves of TensorBoard."""
  return {
    f'convert/{name}': value
    for name, value in report.items()
    if name != 'layer' and isinstance(value, int | float)
  }
