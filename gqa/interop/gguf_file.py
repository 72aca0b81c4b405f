"""GGUF files: checked before anything is allocated, one tensor at a time.

A file is a header of typed key-value pairs, a list of tensors, and their bytes.
The header is not trusted: every length must fit into what is left of the file.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, NamedTuple

import numpy as np

MAGIC = b'GGUF'
VERSIONS = (2, 3)
MAX_RANK = 4
ROWS = 1_024  # dequantised at a time, which takes several copies
MAX_DEPTH = 4  # of arrays of arrays
MAX_LENGTH = 1 << 24  # of an array or a string; vocabularies have 2^18 tokens
_SCALARS = {
  0: 'B',
  1: 'b',
  2: 'H',
  3: 'h',
  4: 'I',
  5: 'i',
  6: 'f',
  7: '?',
  10: 'Q',
  11: 'q',
  12: 'd',
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
  """Where a tensor lies in its file; the type is that after dequantising."""

  kind: int  # a GGMLQuantizationType
  shape: tuple[int, ...]  # the axis that runs fastest last
  begin: int  # byte of the file
  size: int  # bytes
  dtype: np.dtype = np.dtype(np.float32)


class GgufFile:
  """A checkpoint in a file.

  Attributes:
    values: the key-value pairs.
    tensors: by name.

  Raises:
    ValueError: the file is not what the format says.
  """

  def __init__(self, path: str | os.PathLike[str]):
    try:
      from gguf import constants, quants
    except ImportError as error:
      raise ValueError(
        'reading GGUF needs the package gguf; pip install -e ".[gguf]"'
      ) from error
    self._dequantize = quants.dequantize
    self._kind = constants.GGMLQuantizationType
    self.path = path
    self.values: dict[str, Any] = {}
    self.tensors: dict[str, TensorInfo] = {}
    try:
      with open(path, 'rb') as file:
        self._read_header(_Reader(file), constants.GGML_QUANT_SIZES)
    except _Malformed as error:
      raise ValueError(f'{path} is no valid GGUF file: {error}.') from None

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32."""
    info = self.tensors[name]
    kind = self._kind(info.kind)
    data = np.fromfile(self.path, np.uint8, info.size, offset=info.begin)
    rows = data.reshape(math.prod(info.shape[:-1]), -1)
    made = np.empty((len(rows), info.shape[-1]), np.float32)
    try:
      for at in range(0, len(rows), ROWS):
        made[at : at + ROWS] = self._dequantize(rows[at : at + ROWS], kind)
      return made.reshape(info.shape)
    except NotImplementedError:
      raise ValueError(
        f'{self.path}: {name} is of the type {kind.name}, which the package '
        'gguf cannot dequantise; use a file of another type.'
      ) from None

  def _read_header(self, reader, sizes):
    if reader.take(4) != MAGIC:
      raise _Malformed('it does not begin with GGUF')
    version = reader.scalar('I')
    if version not in VERSIONS:
      raise _Malformed(f'version {version} is not one of {VERSIONS}')
    num_tensors, num_values = reader.count(24), reader.count(13)
    for _ in range(num_values):
      key = reader.string()
      if key in self.values:
        raise _Malformed(f'{key!r} is there twice')
      self.values[key] = reader.value(reader.scalar('I'), MAX_DEPTH)
    listed = [self._read_info(reader, sizes) for _ in range(num_tensors)]
    align = self.values.get('general.alignment', 32)
    if type(align) is not int or align < 1 or align & (align - 1):
      raise _Malformed(f'general.alignment is {align!r}')
    start = -(-reader.at // align) * align
    for name, info in listed:
      if name in self.tensors:
        raise _Malformed(f'{name!r} is there twice')
      if start + info.begin + info.size > reader.size:
        raise _Malformed(
          f'{name!r} ends after the end of the file: was it cut off?'
        )
      self.tensors[name] = info._replace(begin=start + info.begin)

  def _read_info(self, reader, sizes):
    name = reader.string()
    rank = reader.scalar('I')
    if rank > MAX_RANK:
      raise _Malformed(f'{name!r} has {rank} axes')
    shape = tuple(reader.scalar('Q') for _ in range(rank))[::-1]
    kind, offset = reader.scalar('I'), reader.scalar('Q')
    known = {int(k): size for k, size in sizes.items()}
    if kind not in known:
      raise _Malformed(f'{name!r} is of the type {kind}, which is unknown')
    block, block_bytes = known[kind]
    if not shape or not all(shape) or shape[-1] % block:
      raise _Malformed(
        f'{name!r} has shape {list(shape)}, no multiple of blocks of {block}'
      )
    size = math.prod(shape) // block * block_bytes
    return name, TensorInfo(kind, shape, offset, size)


class _Malformed(Exception):
  pass


class _Reader:
  """Reads values one after the other, and never beyond the end."""

  def __init__(self, file):
    self._file = file
    self.size = os.fstat(file.fileno()).st_size
    self.at = 0

  def take(self, count):
    if count > self.size - self.at:
      raise _Malformed(
        f'{count} bytes at {self.at} exceed the {self.size} of the file'
      )
    self.at += count
    return self._file.read(count)

  def scalar(self, code):
    return struct.unpack('<' + code, self.take(struct.calcsize('<' + code)))[0]

  def count(self, smallest):
    """A number of things that take at least so many bytes each."""
    count = self.scalar('Q')
    if count * smallest > self.size - self.at or count > MAX_LENGTH:
      raise _Malformed(f'{count} entries at byte {self.at} are too many')
    return count

  def string(self):
    text = self.take(self.count(1))
    try:
      return text.decode()
    except UnicodeDecodeError:
      raise _Malformed(f'a string at byte {self.at} is not UTF-8') from None

  def value(self, kind, depth):
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind == _STRING:
      return self.string()
    if kind != _ARRAY or not depth:
      raise _Malformed(f'a value at byte {self.at} is of the type {kind}')
    inner = self.scalar('I')
    if inner in _SCALARS:
      code = _SCALARS[inner]
      size = struct.calcsize('<' + code)
      count = self.count(size)
      return list(struct.unpack(f'<{count}{code}', self.take(count * size)))
    count = self.count(8)
    return [self.value(inner, depth - 1) for _ in range(count)]
