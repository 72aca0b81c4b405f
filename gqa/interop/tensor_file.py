"""Safetensors files: checked before anything is allocated, one tensor at a time.

A file is the length of a header (8 bytes, little-endian), the header in JSON
and the bytes of the tensors. The header is not trusted: lengths, offsets, types
and shapes must fit each other and the file, to the byte.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  'I64': np.dtype(np.int64),
  'I32': np.dtype(np.int32),
  'I16': np.dtype(np.int16),
  'I8': np.dtype(np.int8),
  'U64': np.dtype(np.uint64),
  'U32': np.dtype(np.uint32),
  'U16': np.dtype(np.uint16),
  'U8': np.dtype(np.uint8),
  'BOOL': np.dtype(np.bool_),
}
MAX_HEADER = 1 << 24  # bytes; real ones have some hundred thousand
MAX_RANK = 16
_PREFIX = 8


class TensorInfo(NamedTuple):
  """Where a tensor lies in its file."""

  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int  # byte of the file
  size: int  # bytes


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
  """Returns the tensors of a file by name; reads none of them.

  Raises:
    ValueError: the file is not what the format says; the message has the path
      and the reason.
  """
  try:
    with open(path, 'rb') as file:
      file_size = os.fstat(file.fileno()).st_size
      length = _header_length(file.read(_PREFIX), file_size)
      text = file.read(length)
    header = _parse(text)
    return _check(header, _PREFIX + length, file_size)
  except _Malformed as error:
    raise ValueError(f'{path} is no valid safetensors file: {error}.') from None


def read_tensor(path: str | os.PathLike[str], info: TensorInfo) -> np.ndarray:
  """Maps a tensor into memory; read-only, and as large only as it is read."""
  if not info.size:
    return np.zeros(info.shape, info.dtype)
  data = np.memmap(path, np.uint8, 'r', info.begin, (info.size,))
  return data.view(info.dtype).reshape(info.shape)


def write_file(
  path: str | os.PathLike[str],
  tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
  get: Callable[[str], np.ndarray],
) -> None:
  """Writes a file, holding one tensor at a time.

  Args:
    path: of the file.
    tensors: type and shape of each.
    get: returns one by name.
  """
  names = {dtype: name for name, dtype in DTYPES.items()}
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, (dtype, shape) in tensors.items():
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    header[name] = {
      'dtype': names[dtype],
      'shape': list(shape),
      'data_offsets': [begin, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % _PREFIX)
  with open(path, 'wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for name, (dtype, shape) in tensors.items():
      array = np.asarray(get(name), order='C')
      if (array.dtype, array.shape) != (dtype, shape):
        raise ValueError(
          f'{name} is {array.dtype}{list(array.shape)}, not the '
          f'{dtype}{list(shape)} that was announced.'
        )
      file.write(array.reshape(-1).view(np.uint8).data)


class _Malformed(Exception):
  pass


def _header_length(prefix, file_size):
  if len(prefix) < _PREFIX:
    raise _Malformed(f'it has {len(prefix)} bytes')
  (length,) = struct.unpack('<Q', prefix)
  if length > MAX_HEADER:
    raise _Malformed(f'a header of {length} bytes is above {MAX_HEADER}')
  if _PREFIX + length > file_size:
    raise _Malformed(
      f'a header of {length} bytes exceeds the {file_size} of the file'
    )
  return length


def _parse(text):
  def unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
      names = [name for name, _ in pairs]
      twice = next(name for name in names if names.count(name) > 1)
      raise _Malformed(f'{twice!r} is there twice')
    return found

  try:
    header = json.loads(text.decode(), object_pairs_hook=unique)
  except (ValueError, RecursionError) as error:
    raise _Malformed(f'the header is not JSON ({error})') from None
  if not isinstance(header, dict):
    raise _Malformed('the header is no JSON object')
  return header


def _check(header, start, file_size):
  """Turns a header into TensorInfos of a file whose tensors begin at `start`."""
  metadata = header.pop('__metadata__', {})
  if not isinstance(metadata, dict):
    raise _Malformed('__metadata__ is no JSON object')
  found = {}
  for name, entry in header.items():
    if not isinstance(entry, dict) or set(entry) != {
      'dtype',
      'shape',
      'data_offsets',
    }:
      raise _Malformed(f'{name!r} must have dtype, shape and data_offsets only')
    dtype = entry['dtype']
    if not isinstance(dtype, str) or dtype not in DTYPES:
      raise _Malformed(f'{name!r} has the dtype {dtype!r}, which is unknown')
    shape = _sizes(entry['shape'], f'the shape of {name!r}')
    offsets = _sizes(entry['data_offsets'], f'the data_offsets of {name!r}')
    if len(offsets) != 2 or offsets[0] > offsets[1]:
      raise _Malformed(f'the data_offsets of {name!r} are {list(offsets)}')
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
      raise _Malformed(
        f'{name!r} has {offsets[1] - offsets[0]} bytes, but {dtype}'
        f'{list(shape)} takes {size}'
      )
    if start + offsets[1] > file_size:
      raise _Malformed(
        f'{name!r} ends at byte {start + offsets[1]}, after the end of the '
        f'file at {file_size}: was it cut off?'
      )
    found[name] = TensorInfo(DTYPES[dtype], shape, start + offsets[0], size)
  end = start
  for name, info in sorted(found.items(), key=lambda item: item[1].begin):
    if info.size and info.begin != end:
      raise _Malformed(
        f'{name!r} begins at byte {info.begin}, not at {end} where the tensor '
        'before it ends'
      )
    end += info.size
  if end != file_size:
    raise _Malformed(f'the tensors end at byte {end}, the file at {file_size}')
  return found


def _sizes(value, what):
  if (
    not isinstance(value, list)
    or len(value) > MAX_RANK
    or not all(type(n) is int and 0 <= n < 1 << 63 for n in value)
  ):
    raise _Malformed(f'{what} is {str(value)[:80]}')
  return tuple(value)
