"""GPT-2: LayerNorm, learned positions, and kernels stored inputs first.

Its Conv1D is the transpose of a Linear, so kernels are taken as they are, and
queries, keys and values lie in one tensor side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gqa.config import ModelConfig
from gqa.interop import layout
from gqa.interop.fields import ACTIVATIONS, Fields, activation_name
from gqa.interop.layout import Tensor


def _read(fields: Fields) -> ModelConfig:
  heads = fields.divided('n_embd', 'n_head')
  fields.expect('scale_attn_weights', True)
  fields.expect('scale_attn_by_inverse_layer_idx', False)
  fields.expect('add_cross_attention', False)
  fields.ignore('reorder_and_upcast_attn')
  config = ModelConfig(
    vocab_size=fields.take('vocab_size', int),
    num_layers=fields.take('n_layer', int),
    **heads,
    mlp_dim=fields.take('n_inner', int, 4 * heads['embed_dim']),
    max_len=fields.take('n_positions', int, 1024),
    position='learned',
    norm='layernorm',
    norm_eps=fields.take('layer_norm_epsilon', float, 1e-5),
    mlp=fields.choose('activation_function', ACTIVATIONS, 'gelu_new'),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=fields.take('tie_word_embeddings', bool, True),
  )
  fields.finish()
  return config


def _write(config: ModelConfig) -> dict[str, Any]:
  return {
    'vocab_size': config.vocab_size,
    'n_layer': config.num_layers,
    'n_embd': config.embed_dim,
    'n_head': config.num_heads,
    'n_inner': config.mlp_dim,
    'n_positions': config.max_len,
    'n_ctx': config.max_len,  # the same, which llama.cpp reads
    'layer_norm_epsilon': config.norm_eps,
    'activation_function': activation_name(config.mlp),
    'tie_word_embeddings': config.tie_embeddings,
  }


def _conv(
  name: str, path: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> list[Tensor]:
  """The weight and bias of a Conv1D."""
  shape = (int(np.prod(inputs)), int(np.prod(outputs)))
  return [
    layout.kernel(f'{name}.weight', f'{path}/kernel', shape, inputs + outputs),
    layout.kernel(f'{name}.bias', f'{path}/bias', shape[1:], outputs),
  ]


def _fused(name: str, path: str, D: int, N: int, H: int) -> list[Tensor]:
  """Queries, keys and values [..., 3 N H], one after the other."""

  def tensor(leaf, kind, leading):
    return Tensor(
      f'{name}.{leaf}',
      (*leading, 3 * N * H),
      tuple(f'{path}/{part}/{kind}' for part in ('query', 'key', 'value')),
      lambda x: [
        part.reshape(*leading, N, H) for part in np.split(x, 3, axis=-1)
      ],
      lambda xs: np.concatenate(
        [x.reshape(*leading, N * H) for x in xs], axis=-1
      ),
    )

  return [tensor('weight', 'kernel', (D,)), tensor('bias', 'bias', ())]


def _tensors(c: ModelConfig) -> list[Tensor]:
  D, N, H, F = c.embed_dim, c.num_heads, c.head_dim, c.mlp_dim
  top = 'transformer'
  tensors = [
    layout.same(f'{top}.wte.weight', 'embed/embedding', (c.vocab_size, D)),
    layout.same(
      f'{top}.wpe.weight', 'position_embed/embedding', (c.max_len, D)
    ),
  ]
  for i in range(c.num_layers):
    theirs, ours = f'{top}.h.{i}', f'layer_{i}'
    tensors += [
      *layout.norm(f'{theirs}.ln_1', f'{ours}/attention_norm', D, True),
      *_fused(f'{theirs}.attn.c_attn', f'{ours}/attention', D, N, H),
      *_conv(f'{theirs}.attn.c_proj', f'{ours}/attention/out', (N, H), (D,)),
      *layout.norm(f'{theirs}.ln_2', f'{ours}/mlp_norm', D, True),
      *_conv(f'{theirs}.mlp.c_fc', f'{ours}/mlp/up', (D,), (F,)),
      *_conv(f'{theirs}.mlp.c_proj', f'{ours}/mlp/down', (F,), (D,)),
    ]
  tensors += layout.norm(f'{top}.ln_f', 'final_norm', D, True)
  if not c.tie_embeddings:
    tensors.append(
      layout.linear('lm_head.weight', 'head/kernel', (D,), (c.vocab_size,))
    )
  return tensors


FAMILIES = {
  'gpt2': layout.Family(
    read_config=_read,
    write_config=_write,
    tensors=_tensors,
    prefix='transformer.',
    architecture='GPT2LMHeadModel',
    inert=('.attn.bias', '.attn.masked_bias'),
  )
}
