"""Hugging Face directories to workdirs and back.

A workdir that was imported is like any other; what only an export needs to
know, and how prompts begin, is in the section `interop` of its config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gqa import checkpoint
from gqa import tokenizer as tokenizer_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.interop import directory as directory_lib
from gqa.interop import families, tokenizer_files, weights
from gqa.interop.directory import Directory
from gqa.interop.layout import Tensor

SEQ_LEN = 1024  # tokens that evaluate takes at once unless told otherwise


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
  files = tokenizer_files.read(opened)
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
    add_bos = tokenizer_lib.FILE in files and tokenizer_files.begins_with_bos(
      work
    )
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
    workdir_lib.save_config(work, run)
  return config


def export_directory(
  source: str,
  target: str,
  dtype: str = 'float32',
  family: str | None = None,
  step: int | str | None = None,
  repeat_kv_heads: bool = False,
) -> str:
  """Writes a checkpoint as a Hugging Face directory; returns its family.

  Args:
    source: workdir of a run.
    target: directory to make; it must be new or empty.
    dtype: of the tensors.
    family: to write; unset: the one that was imported, or else the first that
      has all features of the model.
    step: as in `checkpoint.load_params`.
    repeat_kv_heads: write the multi-head model with the same logits, for
      families that have no number of KV heads or only one for all layers.

  Raises:
    ValueError: no family has what the model has, there is no checkpoint, or
      the target holds something.
    OSError: the target cannot be written.
  """
  raw = workdir_lib.load_config(source)
  config = ModelConfig.from_dict(raw['model'])
  origin = raw['interop'] if 'interop' in raw else {'family': None}
  told = config
  if repeat_kv_heads:
    told = dataclasses.replace(config, num_kv_heads=config.num_heads)
  kind, written = families.write_config(told, family, origin['family'])
  params, _ = checkpoint.load_params(source, step)
  tensors = families.FAMILIES[kind].tensors(told)
  covered = {path for tensor in tensors for path in tensor.paths}
  if repeat_kv_heads:
    params = weights.repeat_kv_heads(params, config)
  if covered != weights.paths(params):
    differing = ', '.join(sorted(covered ^ weights.paths(params))[:5])
    raise ValueError(
      f'{source}: the parameters are not those of its config.json ({differing}'
      ').'
    )
  workdir, _ = workdir_lib.locate(source)
  tokenizer = None
  if (workdir / tokenizer_lib.FILE).exists():
    tokenizer = tokenizer_lib.load(os.fspath(workdir))
  write_directory(
    target,
    kind,
    written,
    told,
    lambda tensor: weights.join(params, tensor, dtype),
    tokenizer,
    dtype=dtype,
    add_bos=origin.get('add_bos', True),
  )
  return kind


def write_directory(
  target: str,
  kind: str,
  written: Mapping[str, Any],
  config: ModelConfig,
  get: Callable[[Tensor], np.ndarray],
  tokenizer: Any,
  *,
  dtype: str,
  add_bos: bool,
) -> None:
  """Writes the directory of a model as transformers would.

  Args:
    target: as in `export_directory`.
    kind: name of the family.
    written: the model's config.json.
    config: of the model.
    get: makes one tensor, of `dtype`.
    tokenizer: see tokenizer.py; None: there is none.
    dtype: of the tensors.
    add_bos: whether a text begins with the tokenizer's token for it.
  """
  tensors = {t.name: t for t in families.FAMILIES[kind].tensors(config)}
  with replaced(target) as work:
    ids = {}
    if tokenizer is not None:
      ids = tokenizer_files.write(tokenizer, work, add_bos)
    directory_lib.write_json(
      work / directory_lib.CONFIG, {**written, 'torch_dtype': dtype, **ids}
    )
    directory_lib.write_weights(
      work,
      {name: tensor.shape for name, tensor in tensors.items()},
      weights.DTYPES[dtype],
      lambda name: get(tensors[name]),
    )


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
  parent = workdir_lib.resolve_workdir(path.parent)
  work = pathlib.Path(tempfile.mkdtemp(prefix=f'.{path.name}.', dir=parent))
  try:
    yield work
    work.chmod(0o777 & ~_umask())
    os.replace(work, path)
  finally:
    shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask
