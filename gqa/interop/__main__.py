"""Imports other people's checkpoints, and exports what was made of them.

  python -m gqa.interop import --source=DIR_OR_FILE.gguf --target=WORKDIR
  python -m gqa.interop export --source=WORKDIR --target=DIR
  python -m gqa.interop example --family=gpt2 --target=DIR

The first takes a Hugging Face directory (config.json and safetensors) or a
GGUF file; the second writes a directory that transformers loads; the third
makes such a directory of a small random model.
"""

from __future__ import annotations

import os
import pathlib

import jax
from absl import flags

from gqa import cli
from gqa.interop import (
  directory,
  example,
  families,
  gguf,
  hugging_face,
  weights,
)

VERBS = ('import', 'export', 'example')


def main(argv):
  """Runs the verb of the command line."""
  if len(argv) != 2 or argv[1] not in VERBS:
    raise ValueError(
      f'give one verb of {", ".join(VERBS)}: python -m gqa.interop import '
      '--source=DIR --target=DIR'
    )
  flag, verb = flags.FLAGS, argv[1]
  needed = 'family' if verb == 'example' else 'source'
  if not getattr(flag, needed):
    raise ValueError(f'--{needed} must be given; see --help.')
  # Nothing is computed, so no accelerator is taken.
  jax.config.update('jax_platforms', 'cpu')
  if verb == 'import':
    _import(flag.source, flag.target, flag.dtype)
    return
  if verb == 'export':
    step = int(flag.step) if flag.step.isdecimal() else flag.step
    kind = hugging_face.export_directory(
      flag.source,
      flag.target,
      flag.dtype,
      flag.family,
      step,
      flag.repeat_kv_heads,
    )
  else:
    example.write_example(flag.family, flag.target, flag.dtype)
    kind = flag.family
  print(f'{flag.target}: a model of the family {kind}')


def _import(source, target, dtype):
  file = _gguf_file(source)
  if file is None:
    config = hugging_face.import_directory(source, target, dtype)
  else:
    config = gguf.import_file(file, target, dtype)
  print(
    f'{target}: {config.num_layers} layers of {config.num_heads} query and '
    f'{config.kv_heads[0]} KV heads'
  )
  if not (pathlib.Path(target).expanduser() / 'tokenizer.json').exists():
    print(
      f'{source} has no tokenizer.json, which gqa.generate and gqa.evaluate '
      'need; load its tokenizer with transformers and call '
      f'save_pretrained({target!r}).'
    )


def _gguf_file(source: str) -> str | None:
  """The GGUF file that a path is, or the only one in a directory of them."""
  path = pathlib.Path(os.path.expanduser(source))
  if path.suffix == '.gguf' and not path.is_dir():
    return str(path)
  if path.is_dir() and not (path / directory.CONFIG).exists():
    files = sorted(path.glob('*.gguf'))
    if len(files) > 1:
      raise ValueError(
        f'{source} has {len(files)} GGUF files; give one of them, such as '
        f'{files[0]}.'
      )
    return str(files[0]) if files else None
  return None


def _define_flags():
  flags.DEFINE_string('source', None, 'what to read')
  flags.DEFINE_string('target', None, 'directory to make', required=True)
  flags.DEFINE_enum(
    'dtype', 'float32', list(weights.DTYPES), 'type of what is written'
  )
  flags.DEFINE_string(
    'family', None, f'to write, one of {", ".join(families.FAMILIES)}'
  )
  flags.DEFINE_string('step', 'latest', "export: 'latest', 'best' or a step")
  flags.DEFINE_bool(
    'repeat_kv_heads', False, 'export the multi-head model of the same logits'
  )


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
