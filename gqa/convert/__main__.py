"""Brings a checkpoint to fewer KV heads.

  python -m gqa.convert --source=DIR --target=DIR --num_kv_heads=2 \
      [--method=low_rank] [--calibration=TEXT]

The target is a workdir like any other. `convert.json` in it says how alike the
heads of each layer were, how much of them was captured, and what the model's
loss was before and after; TensorBoard shows the same by layer.
"""

from __future__ import annotations

import json

from absl import flags

from gqa import cli, runtime
from gqa.convert import checkpoints, methods

# The flags are the arguments of this function, and so are their defaults.
_DEFAULTS = checkpoints.convert.__kwdefaults__


def main(argv):
  """Converts as the flags say, and prints the result but for its layers."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]} is no flag; write --source=DIR --target=DIR.')
  flag = flags.FLAGS
  runtime.keep_freed_memory()
  how = {name: getattr(flag, name) for name in _DEFAULTS}
  how['num_kv_heads'] = _heads(flag.num_kv_heads)
  result = checkpoints.convert(flag.source, flag.target, **how)
  del result['layers']
  print(json.dumps(result))


def _heads(text: str | None) -> int | tuple[int, ...] | None:
  """One int for all layers, or one for each."""
  if text is None:
    return None
  parts = text.strip('()').split(',')
  try:
    heads = tuple(int(part) for part in parts if part.strip())
  except ValueError:
    heads = ()
  if not heads:
    raise ValueError(
      f'num_kv_heads={text!r} must be an int, or one per layer such as 4,2,2,1.'
    )
  return heads[0] if len(parts) == 1 else heads


def _define_flags():
  default = _DEFAULTS
  flags.DEFINE_string('source', None, 'workdir of the parent', required=True)
  flags.DEFINE_string('step', default['step'], "'latest', 'best' or a step")
  flags.DEFINE_string('target', None, 'workdir to make', required=True)
  flags.DEFINE_string('num_kv_heads', None, 'one int, or one per layer')
  flags.DEFINE_integer(
    'budget', None, 'or bytes of a token in the cache, to divide over layers'
  )
  flags.DEFINE_enum(
    'method', default['method'], methods.METHODS, 'how to merge heads'
  )
  flags.DEFINE_enum(
    'grouping',
    None,
    methods.GROUPINGS,
    'which heads to merge; similarity for the aligned methods and low_rank, '
    'contiguous for others',
  )
  flags.DEFINE_string(
    'calibration',
    None,
    "text or token directory; the parent's own if it is there; none: go by "
    'the weights alone',
  )
  flags.DEFINE_integer(
    'calibration_tokens', default['calibration_tokens'], 'at most', 1
  )
  flags.DEFINE_string(
    'data', None, 'text for the loss; the end of the calibration text'
  )
  flags.DEFINE_integer('data_tokens', default['data_tokens'], 'at most', 1)
  flags.DEFINE_integer('seq_len', None, "tokens of a window; the parent's", 1)
  flags.DEFINE_bool(
    'sequential',
    None,
    'convert on what the converted layers before give; the default of the '
    'aligned methods and low_rank with a text',
  )
  flags.DEFINE_bool(
    'refit', None, 'solve output projections anew; default as of --sequential'
  )
  flags.DEFINE_integer(
    'reconstruct_steps',
    default['reconstruct_steps'],
    'gradient steps on each layer',
    0,
  )
  flags.DEFINE_integer('seed', default['seed'], 'of random heads, of batches')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
