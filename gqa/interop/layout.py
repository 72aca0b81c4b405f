"""How a family lays out parameters in its tensors: by moving numbers only.

A `Tensor` says how one tensor of a checkpoint becomes parameters of a model and
back. Both ways are reshapes, transposes and cuts, so they are exact in any
dtype, and one undoes the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gqa.config import ModelConfig
from gqa.interop.fields import Fields

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint, and the parameters that it holds.

  Attributes:
    name: in the checkpoint.
    shape: in the checkpoint.
    paths: of the parameters, such as 'layer_0/mlp/up/kernel'.
    split: turns the tensor into the parameters.
    join: turns the parameters into the tensor.
  """

  name: str
  shape: tuple[int, ...]
  paths: tuple[str, ...]
  split: Callable[[np.ndarray], Arrays]
  join: Callable[[Arrays], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Family:
  """What makes the checkpoints of one model_type.

  Attributes:
    read_config: turns the fields of a config.json into a config.
    write_config: undoes it as far as the family has the fields; what it has
      not is found by reading the result back.
    tensors: all tensors of a model.
    prefix: what all names but the head's begin with; checkpoints of the model
      without its head lack it.
    architecture: the name of the class in transformers.
    inert: ends of names of tensors that older versions stored and nobody reads.
    canonical: the name in `tensors` of one that another version gave it; None:
      it is no part of the model.
  """

  read_config: Callable[[Fields], ModelConfig]
  write_config: Callable[[ModelConfig], dict[str, Any]]
  tensors: Callable[[ModelConfig], list[Tensor]]
  prefix: str
  architecture: str
  inert: tuple[str, ...] = ()
  canonical: Callable[[str], str | None] = lambda name: name


def same(name: str, path: str, shape: tuple[int, ...]) -> Tensor:
  """A tensor that is a parameter as it is, up to the cut of axes."""
  return kernel(name, path, shape, shape)


def kernel(
  name: str, path: str, shape: tuple[int, ...], ours: tuple[int, ...]
) -> Tensor:
  """A tensor whose order of numbers is the parameter's."""
  return Tensor(
    name,
    shape,
    (path,),
    lambda x: [x.reshape(ours)],
    lambda xs: xs[0].reshape(shape),
  )


def linear(
  name: str, path: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Tensor:
  """PyTorch's Linear, stored outputs first; a parameter has inputs first."""
  ours, shape = inputs + outputs, (math.prod(outputs), math.prod(inputs))
  return Tensor(
    name,
    shape,
    (path,),
    lambda x: [x.T.reshape(ours)],
    lambda xs: xs[0].reshape(shape[::-1]).T,
  )


def dense(
  name: str,
  path: str,
  inputs: tuple[int, ...],
  outputs: tuple[int, ...],
  bias: bool,
) -> list[Tensor]:
  """The weight and, with `bias`, the bias of a Linear."""
  tensors = [linear(f'{name}.weight', f'{path}/kernel', inputs, outputs)]
  if bias:
    size = (math.prod(outputs),)
    tensors.append(kernel(f'{name}.bias', f'{path}/bias', size, outputs))
  return tensors


def norm(name: str, path: str, size: int, bias: bool = False) -> list[Tensor]:
  """The scale and, with `bias`, the bias of a norm."""
  tensors = [same(f'{name}.weight', f'{path}/scale', (size,))]
  if bias:
    tensors.append(same(f'{name}.bias', f'{path}/bias', (size,)))
  return tensors


def decoder(
  c: ModelConfig,
  norms: Mapping[str, str],
  prefix: str = 'model.',
) -> list[Tensor]:
  """The tensors that Llama named and most families after it took over.

  Args:
    c: the config.
    norms: the names of a layer's norms by ours.
    prefix: as of `Family`.
  """
  D, N, H, F = c.embed_dim, c.num_heads, c.head_dim, c.mlp_dim
  table = (c.vocab_size, D)
  tensors = [same(f'{prefix}embed_tokens.weight', 'embed/embedding', table)]
  for i, K in enumerate(c.kv_heads):
    theirs, ours = f'{prefix}layers.{i}', f'layer_{i}'
    for path, name in norms.items():
      tensors += norm(f'{theirs}.{name}', f'{ours}/{path}', D)
    attn, attention = f'{theirs}.self_attn', f'{ours}/attention'
    for name, path, heads in (
      ('q_proj', 'query', N),
      ('k_proj', 'key', K),
      ('v_proj', 'value', K),
    ):
      tensors += dense(
        f'{attn}.{name}', f'{attention}/{path}', (D,), (heads, H), c.qkv_bias
      )
    tensors += dense(
      f'{attn}.o_proj', f'{attention}/out', (N, H), (D,), c.out_bias
    )
    if c.qk_norm:
      joined = c.qk_norm_axes == 'heads'
      for name, path, heads in (
        ('q_norm', 'query_norm', N),
        ('k_norm', 'key_norm', K),
      ):
        size = heads * H if joined else H
        tensors += norm(f'{attn}.{name}', f'{attention}/{path}', size)
    for name, ins, outs in (
      ('gate', D, F),
      ('up', D, F),
      ('down', F, D),
    ):
      tensors += dense(
        f'{theirs}.mlp.{name}_proj',
        f'{ours}/mlp/{name}',
        (ins,),
        (outs,),
        c.mlp_bias,
      )
  tensors += norm(f'{prefix}norm', 'final_norm', D)
  if not c.tie_embeddings:
    tensors.append(
      linear('lm_head.weight', 'head/kernel', (D,), (c.vocab_size,))
    )
  return tensors
