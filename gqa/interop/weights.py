"""From the tensors of a checkpoint to parameters and back, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
import tqdm

from gqa.config import ModelConfig
from gqa.interop.layout import Family, Tensor

DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
}
_SHOWN = 5  # names listed in an error
_HEADS = ('lm_head.weight', 'embed_out.weight')


class Source(Protocol):
  """Where tensors come from."""

  tensors: Mapping[str, Any]  # values have a shape and a dtype

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor."""


def load(
  family: Family, config: ModelConfig, source: Source, dtype: str
) -> dict[str, Any]:
  """Reads all parameters of a model into the memory of the host.

  Args:
    family: of the checkpoint.
    config: what it must hold, no less and no more.
    source: of the tensors; one is held at a time.
    dtype: of the parameters.

  Raises:
    ValueError: tensors are missing, unexpected, or of another shape or type.
  """
  expected = family.tensors(config)
  names = match(family, expected, source)
  params: dict[str, Any] = {}
  cpu = jax.local_devices(backend='cpu')[0]
  for tensor in tqdm.tqdm(expected, unit='tensor', disable=None):
    array = source.read(names[tensor.name])
    parts = tensor.split(array)
    for path, part in zip(tensor.paths, parts, strict=True):
      branch = params
      *keys, leaf = path.split('/')
      for key in keys:
        branch = branch.setdefault(key, {})
      branch[leaf] = jax.device_put(cast(part, dtype, tensor.name), cpu)
    del array, parts
  return params


def match(
  family: Family, expected: list[Tensor], source: Source
) -> dict[str, str]:
  """Returns the source's name of each tensor, and checks that it is right.

  Raises:
    ValueError: see `load`.
  """
  names = _canonical_names(family, expected, source)
  shapes = {tensor.name: tensor.shape for tensor in expected}
  missing = [name for name in shapes if name not in names]
  unexpected = [
    theirs
    for name, theirs in names.items()
    if name not in shapes and not name.endswith(family.inert or '\0')
  ]
  for name in _HEADS:
    if names.get(name) in unexpected:
      _check_tied(names, name, expected, source)
      unexpected.remove(names[name])
  problems = []
  for what, found in (('missing', missing), ('unexpected', unexpected)):
    if found:
      more = f' and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''
      problems.append(f'{what}: {", ".join(found[:_SHOWN])}{more}')
  for name, shape in shapes.items():
    info = source.tensors.get(names.get(name))
    if info is None:
      continue
    if tuple(info.shape) != shape:
      problems.append(
        f'{names[name]} has shape {list(info.shape)}, but config.json makes it '
        f'{list(shape)}'
      )
    elif info.dtype not in DTYPES.values():
      problems.append(
        f'{names[name]} is of type {info.dtype}, not one of {", ".join(DTYPES)}'
      )
  if problems:
    shown = '; '.join(problems[:_SHOWN])
    raise ValueError(f'the tensors do not fit the config.json: {shown}.')
  return names


def cast(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
  """Returns a copy in row-major order.

  Raises:
    ValueError: a finite number does not fit the dtype.
  """
  with np.errstate(over='ignore'):
    made = np.array(array, DTYPES[dtype], order='C')
  if dtype == 'float16' and array.dtype != made.dtype:
    if not np.isfinite(made[np.isfinite(array)]).all():
      raise ValueError(
        f'{name} has numbers that float16 cannot hold; use bfloat16.'
      )
  return made


def repeat_kv_heads(
  params: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
  """Returns the parameters of a multi-head model with the same logits.

  Each KV head of `config` is there once for every query head that reads it.
  """
  new = dict(params)
  for i, K in enumerate(config.kv_heads):
    attention = dict(params[f'layer_{i}']['attention'])
    times = config.num_heads // K
    for part in ('key', 'value'):
      # [D, K, H] and [K, H]
      attention[part] = {
        name: np.repeat(np.asarray(x), times, axis=-2)
        for name, x in attention[part].items()
      }
    if config.qk_norm and config.qk_norm_axes == 'heads':
      scale = np.asarray(attention['key_norm']['scale']).reshape(K, -1)
      attention['key_norm'] = {'scale': np.repeat(scale, times, 0).reshape(-1)}
    new[f'layer_{i}'] = {**params[f'layer_{i}'], 'attention': attention}
  return new


def leaf(params: Mapping[str, Any], path: str) -> Any:
  """Returns the parameter at a path."""
  for key in path.split('/'):
    params = params[key]
  return params


def join(params: Mapping[str, Any], tensor: Tensor, dtype: str) -> np.ndarray:
  """Returns one tensor of a checkpoint."""
  parts = [np.asarray(leaf(params, path)) for path in tensor.paths]
  return cast(tensor.join(parts), dtype, tensor.name)


def paths(params: Mapping[str, Any]) -> set[str]:
  """The paths of all parameters."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  return {name(path) for path, _ in leaves}


def _canonical_names(family, expected, source):
  """The source's names by those of the family."""
  names = {}
  for theirs in source.tensors:
    name = family.canonical(theirs)
    if name is not None:
      names[name] = theirs
  if any(name.startswith(family.prefix) for name in names):
    return names
  known = {tensor.name for tensor in expected} | set(_HEADS)
  return {
    name if name in known else family.prefix + name: theirs
    for name, theirs in names.items()
  }


def _check_tied(names, head, expected, source):
  """A head stored beside the embedding that it is tied to must equal it."""
  for tensor in expected:
    if tensor.paths == ('embed/embedding',) and tensor.name in names:
      table = source.read(names[tensor.name])
      other = source.read(names[head])
      if not np.array_equal(table, other, equal_nan=True):
        raise ValueError(
          f'config.json ties the embeddings, but {names[head]} differs from '
          f'{names[tensor.name]}; set tie_word_embeddings to false to use it.'
        )
