"""A Hugging Face directory: config.json and safetensors, nothing outside of it.

Of one that is read only plain files of itself are opened: no file that a name
or a symbolic link points to elsewhere, no pickle, and no code.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gqa.interop import tensor_file
from gqa.interop.tensor_file import TensorInfo

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
MAX_SHARD = 5 * 10**9  # bytes of a file that is written
MAX_JSON = 1 << 26  # bytes; an index of 100,000 tensors has some 10 million
# Formats of weights that can run code when they are read, or that are not read.
_OTHER_WEIGHTS = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.h5', '.msgpack')


class Directory:
  """The checkpoint in a directory; every file is checked when it is opened.

  Attributes:
    config: what config.json says.
    tensors: type and shape of each tensor by name.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(os.path.expanduser(path))
    if not self.path.is_dir():
      raise ValueError(f'{path} is not a directory.')
    self._root = self.path.resolve()
    self.config = self.json(CONFIG)
    if self.config is None:
      raise ValueError(
        f'{path} has no {CONFIG}, so it is not the directory of a Hugging Face '
        'model.'
      )
    files = self._weights()
    self.tensors: dict[str, TensorInfo] = {}
    self._files: dict[str, pathlib.Path] = {}
    for file, names in files.items():
      self._add(file, names)

  def file(self, name: str) -> pathlib.Path | None:
    """Returns the path of a file of this directory, None if there is none.

    Raises:
      ValueError: the name or a link leads out of the directory, or it is no
        plain file.
    """
    path = self.path / name
    if (
      name in ('', '.', '..') or os.path.basename(name) != name or '\0' in name
    ):
      raise ValueError(
        f'{self.path} names the file {name!r}, outside of itself; such a '
        'checkpoint is not read.'
      )
    if not os.path.lexists(path):
      return None
    if path.resolve().parent != self._root:
      raise ValueError(
        f'{path} is a link that leads out of the directory; make a copy with '
        'cp -rL.'
      )
    if not path.is_file():
      raise ValueError(f'{path} is no plain file.')
    return path

  def json(self, name: str) -> dict[str, Any] | None:
    """Returns a JSON object of the directory, None if there is none."""
    path = self.file(name)
    if path is None:
      return None
    size = path.stat().st_size
    if size > MAX_JSON:
      raise ValueError(f'{path} has {size} bytes, more than {MAX_JSON}.')
    try:
      value = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{path} is not JSON: {error}.') from None
    if not isinstance(value, dict):
      raise ValueError(f'{path} is no JSON object.')
    return value

  def read(self, name: str) -> np.ndarray:
    """Maps a tensor into memory."""
    return tensor_file.read_tensor(self._files[name], self.tensors[name])

  def _weights(self) -> dict[str, set[str] | None]:
    """The files with tensors, and the names that an index gives to each."""
    if self.file(WEIGHTS) is not None:
      return {WEIGHTS: None}
    index = self.json(INDEX)
    if index is None:
      raise ValueError(self._no_weights())
    shards: dict[str, set[str]] = {}
    weight_map = index.get('weight_map')
    if not isinstance(weight_map, Mapping) or not weight_map:
      raise ValueError(f'{self.path / INDEX} has no weight_map.')
    for name, file in weight_map.items():
      if not isinstance(file, str):
        raise ValueError(f'{self.path / INDEX} gives {name!r} no file.')
      shards.setdefault(file, set()).add(name)
    for file in shards:
      if self.file(file) is None:
        raise ValueError(
          f'{self.path / INDEX} names {file}, which is missing: was the '
          'download interrupted?'
        )
      if not file.endswith('.safetensors'):
        raise ValueError(
          f'{self.path / INDEX} names {file}, which is no safetensors file.'
        )
    return shards

  def _no_weights(self) -> str:
    others = sorted(
      entry.name
      for entry in self.path.iterdir()
      if entry.suffix in _OTHER_WEIGHTS
    )
    if not others:
      return f'{self.path} has neither {WEIGHTS} nor {INDEX}.'
    return (
      f'{self.path} has no safetensors, only {", ".join(others[:3])}. Such a '
      'file can run code when it is opened, so it is not read: if you trust '
      'it, load it with transformers and call save_pretrained, which writes '
      'safetensors.'
    )

  def _add(self, file: str, names: set[str] | None) -> None:
    path = self.file(file)
    header = tensor_file.read_header(path)
    if names is not None and names != set(header):
      name = min(names ^ set(header))
      has, other = (INDEX, file) if name in names else (file, INDEX)
      raise ValueError(f'{path}: {name!r} is in {has}, but not in {other}.')
    for name, info in header.items():
      if name in self.tensors:
        raise ValueError(f'{name!r} is in {self._files[name]} and in {path}.')
      self.tensors[name] = info
      self._files[name] = path


def write_weights(
  path: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: np.dtype,
  get: Callable[[str], np.ndarray],
) -> None:
  """Writes model.safetensors, or several files with an index.

  Args:
    path: directory.
    shapes: of the tensors.
    dtype: of the tensors.
    get: returns one by name; one is held at a time.
  """
  shards, sizes = [{}], [0]
  for name, shape in shapes.items():
    size = math.prod(shape) * dtype.itemsize
    if shards[-1] and sizes[-1] + size > MAX_SHARD:
      shards.append({})
      sizes.append(0)
    shards[-1][name] = (dtype, shape)
    sizes[-1] += size
  if len(shards) == 1:
    tensor_file.write_file(path / WEIGHTS, shards[0], get)
    return
  weight_map = {}
  for i, shard in enumerate(shards, 1):
    file = f'model-{i:05}-of-{len(shards):05}.safetensors'
    tensor_file.write_file(path / file, shard, get)
    weight_map |= dict.fromkeys(shard, file)
  index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
  write_json(path / INDEX, index)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON value as transformers does."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n')
