"""The same model with more KV heads, in which merging has to find the old ones.

What a converter should undo without loss: KV heads are repeated until each
query head has its own, every one is turned by what leaves the model as it is,
and all are shuffled.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gqa import model as model_lib
from gqa.config import ModelConfig
from gqa.convert import heads as heads_lib
from gqa.convert.heads import Heads


def expand(
  params: model_lib.Params, config: ModelConfig, rng: np.random.Generator
) -> tuple[model_lib.Params, ModelConfig]:
  """Returns a multi-head model, and its config, with the logits of a grouped one.

  Raises:
    ValueError: keys are normalised, so that turning them changes the model.
  """
  if config.qk_norm:
    raise ValueError(
      'qk_norm=True: normalised keys cannot be turned; choose a model without.'
    )
  new = dict(params)
  for i, num_kv_heads in enumerate(config.kv_heads):
    layer = params[f'layer_{i}']
    heads = heads_lib.from_params(layer['attention'])
    heads = repeat(heads, config.num_heads // num_kv_heads)
    heads = scramble(heads, config.rope_dim, rng)
    attention = heads_lib.to_params(heads, layer['attention'])
    new[f'layer_{i}'] = layer | {'attention': attention}
  return new, dataclasses.replace(config, num_kv_heads=None)


def repeat(heads: Heads, times: int) -> Heads:
  """Writes every KV head `times` times, for a part of its queries each."""
  return dataclasses.replace(
    heads,
    key=np.repeat(heads.key, times, axis=0),
    value=np.repeat(heads.value, times, axis=0),
  )


def scramble(heads: Heads, rope_dim: int, rng: np.random.Generator) -> Heads:
  """Turns every KV head at random, and shuffles them with their queries."""
  K, H, _ = heads.key.shape
  phases = np.exp(2j * np.pi * rng.random((K, rope_dim // 2)))
  keys = heads_lib.plane_maps(phases, _orthogonal(rng, K, H - rope_dim))
  heads = turn(heads, keys, _orthogonal(rng, K, H))
  return heads_lib.select(heads, rng.permutation(K))


def turn(heads: Heads, keys: np.ndarray, values: np.ndarray) -> Heads:
  """Applies orthogonal [K, H, H] to keys and to values.

  Queries are turned like their keys, and `out` undoes what is done to values.
  """
  query = keys[:, None] @ heads.per_kv_head(heads.query)
  out = values[:, None] @ heads.per_kv_head(heads.out)
  return Heads(
    query=query.reshape(heads.query.shape),
    key=keys @ heads.key,
    value=values @ heads.value,
    out=out.reshape(heads.out.shape),
  )


def _orthogonal(rng, count, size):
  return np.linalg.qr(rng.normal(size=(count, size, size)))[0]
