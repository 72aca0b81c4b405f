"""Hugging Face directories to workdirs and back.

A workdir that was imported is like any other; what only an export needs to
know, and how prompts begin, is in the section `interop` of its config.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from gqa import checkpoint
from gqa import tokenizer as tokenizer_lib
from gqa.config import ModelConfig
from gqa.interop import directory as directory_lib
from gqa.interop import families, tensor_file, weights
from gqa.interop.directory import Directory

MAX_SHARD = 5 * 10**9  # bytes of a file that is written
SEQ_LEN = 1024  # tokens that evaluate takes at once unless told otherwise
MAX_FILE = 1 << 28  # bytes of a tokenizer's file
_TOKENIZER_CONFIG = 'tokenizer_config.json'
_GENERATION_CONFIG = 'generation_config.json'
_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def import_directory(
  source: str, target: str, dtype: str = 'float32'
) -> ModelConfig:
  """Makes a workdir of a Hugging Face directory.

  Args:
    source: with config.json and safetensors.
    target: workdir to make; it must be new or empty.
    dtype: of the parameters and of what is computed with them.

  Raises:
    ValueError: the checkpoint is not supported, not whole or not safe, or the
      target holds something.
    OSError: the target cannot be written.
  """
  opened = Directory(source)
  kind, config = families.read_config(opened.config)
  files = _tokenizer_files(opened)
  return write_workdir(
    target,
    kind,
    config,
    opened,
    files,
    dtype=dtype,
    origin=str(opened.path.resolve()),
  )


def write_workdir(
  target: str,
  kind: str,
  config: ModelConfig,
  source: weights.Source,
  files: Mapping[str, bytes],
  *,
  dtype: str,
  origin: str,
) -> ModelConfig:
  """Writes parameters, config and tokenizer of a model as a workdir.

  Args:
    target: as in `import_directory`.
    kind: name of the family.
    config: of the model.
    source: of the tensors.
    files: of the tokenizer, by name.
    dtype: as in `import_directory`.
    origin: what the checkpoint says it was made of.
  """
  config = ModelConfig.from_dict(config.to_dict() | {'dtype': dtype})
  family = families.FAMILIES[kind]
  weights.match(family, family.tensors(config), source)
  with replaced(target) as work:
    for name, content in files.items():
      (work / name).write_bytes(content)
    add_bos = tokenizer_lib.FILE in files and begins_with_bos(work)
    params = weights.load(family, config, source, dtype)
    meta = {'imported_from': origin, 'family': kind, 'tokens_seen': 0}
    checkpoint.save_params(work, params, meta)
    run = {
      'model': config.to_dict(),
      'compilation_cache': '~/.cache/gqa',
      'data': {'path': None},
      'train': {'seq_len': min(config.max_len, SEQ_LEN)},
      'interop': {'family': kind, 'add_bos': add_bos},
    }
    checkpoint.save_config(work, run)
  return config


def export_directory(
  source: str,
  target: str,
  dtype: str = 'float32',
  family: str | None = None,
  step: int | str | None = None,
) -> str:
  """Writes a checkpoint as a Hugging Face directory; returns its family.

  Args:
    source: workdir of a run.
    target: directory to make; it must be new or empty.
    dtype: of the tensors.
    family: to write; unset: the one that was imported, or else the first that
      has all features of the model.
    step: as in `checkpoint.load_params`.

  Raises:
    ValueError: no family has what the model has, there is no checkpoint, or
      the target holds something.
    OSError: the target cannot be written.
  """
  raw = checkpoint.load_config(source)
  config = ModelConfig.from_dict(raw['model'])
  origin = raw['interop'] if 'interop' in raw else {'family': None}
  kind, written = families.write_config(config, family, origin['family'])
  params, _ = checkpoint.load_params(source, step)
  tensors = families.FAMILIES[kind].tensors(config)
  covered = {path for tensor in tensors for path in tensor.paths}
  if covered != weights.paths(params):
    differing = ', '.join(sorted(covered ^ weights.paths(params))[:5])
    raise ValueError(
      f'{source}: the parameters are not those of its config.json ({differing}'
      ').'
    )
  workdir = pathlib.Path(os.path.expanduser(source))
  if workdir.parent.name == 'checkpoints':
    workdir = workdir.parent.parent
  with replaced(target) as work:
    ids = {}
    if (workdir / tokenizer_lib.FILE).exists():
      ids = _export_tokenizer(
        workdir, work, add_bos=origin.get('add_bos', True)
      )
    written |= {'torch_dtype': dtype} | ids
    _write_json(work / directory_lib.CONFIG, written)
    _write_shards(work, tensors, params, dtype)
  return kind


@contextlib.contextmanager
def replaced(target: str) -> Iterator[pathlib.Path]:
  """Gives a directory to fill, which becomes `target` if nothing fails.

  Raises:
    ValueError: the target holds something.
  """
  path = pathlib.Path(os.path.abspath(os.path.expanduser(target)))
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f'{target} exists and is not empty; choose another target.'
    )
  parent = checkpoint.resolve_workdir(path.parent)
  work = pathlib.Path(tempfile.mkdtemp(prefix=f'.{path.name}.', dir=parent))
  try:
    yield work
    work.chmod(0o777 & ~_umask())
    os.replace(work, path)
  finally:
    shutil.rmtree(work, ignore_errors=True)


def begins_with_bos(directory: str | os.PathLike[str]) -> bool:
  """Whether transformers would begin a text with the token of beginnings."""
  directory = pathlib.Path(directory)
  names = directory / _TOKENIZER_CONFIG
  if names.exists():
    given = json.loads(names.read_text()).get('add_bos_token')
    if isinstance(given, bool):
      return given
  loaded = tokenizer_lib.load(os.fspath(directory))
  if not isinstance(loaded, tokenizer_lib.FileTokenizer):
    return True
  plain = tokenizers.Tokenizer.from_file(str(directory / tokenizer_lib.FILE))
  return plain.encode('').ids[:1] == [loaded.bos_id]


def _tokenizer_files(source: Directory) -> dict[str, bytes]:
  """The files of the tokenizer, with the ids that config.json names."""
  files = {}
  for name in tokenizer_lib.FILES:
    path = source.file(name)
    if path is None:
      continue
    if path.stat().st_size > MAX_FILE:
      raise ValueError(f'{path} has more than {MAX_FILE} bytes.')
    files[name] = path.read_bytes()
  text = source.config.get('text_config')
  config = source.config | (text if isinstance(text, dict) else {})
  given = {name: config.get(name) for name in _IDS}
  generation = source.json(_GENERATION_CONFIG) or {}
  generation = {k: v for k, v in given.items() if v is not None} | generation
  if generation:
    files[_GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
  return files


def _export_tokenizer(
  source: pathlib.Path, target: pathlib.Path, add_bos: bool
) -> dict[str, Any]:
  """Writes the tokenizer's files; returns the ids for config.json."""
  loaded = tokenizer_lib.load(os.fspath(source))
  if isinstance(loaded, tokenizer_lib.ByteTokenizer):
    loaded = _byte_level(loaded)
  loaded.save(target)
  names = json.loads((target / _TOKENIZER_CONFIG).read_text())
  names.setdefault('tokenizer_class', 'PreTrainedTokenizerFast')
  _write_json(target / _TOKENIZER_CONFIG, names)
  if add_bos and not begins_with_bos(target):
    _prepend_bos(target / tokenizer_lib.FILE, loaded.bos_id)
  stops = [i for i in loaded.stop_ids if i != loaded.bos_id] or [loaded.eos_id]
  ids = {
    'bos_token_id': loaded.bos_id,
    'eos_token_id': stops[0] if len(stops) == 1 else stops,
  }
  generation = target / _GENERATION_CONFIG
  if not generation.exists():
    _write_json(generation, ids)
  return ids


def _byte_level(
  plain: tokenizer_lib.ByteTokenizer,
) -> tokenizer_lib.FileTokenizer:
  """The same ids from the tokenizers library: a BPE without merges."""
  alphabet = tokenizer_lib.byte_alphabet()
  made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(['<bos>', '<eos>'])
  return tokenizer_lib.FileTokenizer(made, plain.bos_id, plain.eos_id)


def _prepend_bos(path: pathlib.Path, bos_id: int) -> None:
  """Makes a tokenizer.json begin texts as the model was trained."""
  made = tokenizers.Tokenizer.from_file(str(path))
  token = made.id_to_token(bos_id)
  made.post_processor = processors.TemplateProcessing(
    single=f'{token} $A',
    pair=f'{token} $A {token} $B',
    special_tokens=[(token, bos_id)],
  )
  made.save(str(path))


def _write_shards(work, tensors, params, dtype) -> None:
  """Writes model.safetensors, or several files with an index."""
  by_name = {tensor.name: tensor for tensor in tensors}
  kind = weights.DTYPES[dtype]
  shards, sizes = [{}], [0]
  for tensor in tensors:
    size = math.prod(tensor.shape) * kind.itemsize
    if shards[-1] and sizes[-1] + size > MAX_SHARD:
      shards.append({})
      sizes.append(0)
    shards[-1][tensor.name] = (kind, tensor.shape)
    sizes[-1] += size
  get = lambda name: weights.join(params, by_name[name], dtype)
  if len(shards) == 1:
    tensor_file.write_file(work / directory_lib.WEIGHTS, shards[0], get)
    return
  weight_map = {}
  for i, shard in enumerate(shards, 1):
    file = f'model-{i:05}-of-{len(shards):05}.safetensors'
    tensor_file.write_file(work / file, shard, get)
    weight_map |= dict.fromkeys(shard, file)
  _write_json(
    work / directory_lib.INDEX,
    {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map},
  )


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask


def _write_json(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n')
