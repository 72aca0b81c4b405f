"""GPT-NeoX and Pythia: partial rotary positions and a parallel residual.

Attention and MLP each have a LayerNorm of the same stream. Queries, keys and
values lie in one tensor, those of a head together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gqa.config import ModelConfig
from gqa.interop import layout, positions
from gqa.interop.fields import ACTIVATIONS, Fields, activation_name
from gqa.interop.layout import Tensor

_ROPE_NAMES = dict(theta_name='rotary_emb_base', fraction_name='rotary_pct')


def _read(fields: Fields) -> ModelConfig:
  heads = fields.divided('hidden_size', 'num_attention_heads')
  max_len = fields.take('max_position_embeddings', int, 2048)
  bias = fields.take('attention_bias', bool, True)
  read = positions.read_rope(fields, max_len, fraction=0.25, **_ROPE_NAMES)
  config = ModelConfig(
    vocab_size=fields.take('vocab_size', int),
    num_layers=fields.take('num_hidden_layers', int),
    **heads,
    mlp_dim=fields.take('intermediate_size', int),
    max_len=max_len,
    norm='layernorm',
    norm_eps=fields.take('layer_norm_eps', float, 1e-5),
    mlp=fields.choose('hidden_act', ACTIVATIONS, 'gelu'),
    qkv_bias=bias,
    out_bias=bias,
    mlp_bias=True,
    tie_embeddings=fields.take('tie_word_embeddings', bool, False),
    parallel_residual=fields.take('use_parallel_residual', bool, True),
    **read,
  )
  fields.finish()
  return config


def _write(config: ModelConfig) -> dict[str, Any]:
  return {
    'vocab_size': config.vocab_size,
    'num_hidden_layers': config.num_layers,
    'hidden_size': config.embed_dim,
    'num_attention_heads': config.num_heads,
    'intermediate_size': config.mlp_dim,
    'max_position_embeddings': config.max_len,
    'layer_norm_eps': config.norm_eps,
    'hidden_act': activation_name(config.mlp),
    'attention_bias': config.qkv_bias,
    'tie_word_embeddings': config.tie_embeddings,
    'use_parallel_residual': config.parallel_residual,
    **positions.write_rope(config, **_ROPE_NAMES),
  }


def _fused(
  name: str, path: str, D: int, N: int, H: int, bias: bool
) -> list[Tensor]:
  """Of each head the query, the key and the value: [N 3 H, D]."""
  paths = [f'{path}/{part}' for part in ('query', 'key', 'value')]
  tensors = [
    Tensor(
      f'{name}.weight',
      (N * 3 * H, D),
      tuple(f'{path}/kernel' for path in paths),
      lambda x: list(x.reshape(N, 3, H, D).transpose(1, 3, 0, 2)),
      lambda xs: np.stack(xs).transpose(2, 0, 3, 1).reshape(N * 3 * H, D),
    )
  ]
  if bias:
    tensors.append(
      Tensor(
        f'{name}.bias',
        (N * 3 * H,),
        tuple(f'{path}/bias' for path in paths),
        lambda x: list(x.reshape(N, 3, H).swapaxes(0, 1)),
        lambda xs: np.stack(xs, axis=1).reshape(N * 3 * H),
      )
    )
  return tensors


def _tensors(c: ModelConfig) -> list[Tensor]:
  D, N, H, F = c.embed_dim, c.num_heads, c.head_dim, c.mlp_dim
  top = 'gpt_neox'
  tensors = [
    layout.same(f'{top}.embed_in.weight', 'embed/embedding', (c.vocab_size, D))
  ]
  for i in range(c.num_layers):
    theirs, ours = f'{top}.layers.{i}', f'layer_{i}'
    attn, attention = f'{theirs}.attention', f'{ours}/attention'
    norm = f'{theirs}.post_attention_layernorm'
    up, down = f'{theirs}.mlp.dense_h_to_4h', f'{theirs}.mlp.dense_4h_to_h'
    tensors += [
      *layout.norm(
        f'{theirs}.input_layernorm', f'{ours}/attention_norm', D, True
      ),
      *_fused(f'{attn}.query_key_value', attention, D, N, H, c.qkv_bias),
      *layout.dense(
        f'{attn}.dense', f'{attention}/out', (N, H), (D,), c.out_bias
      ),
      *layout.norm(norm, f'{ours}/mlp_norm', D, True),
      *layout.dense(up, f'{ours}/mlp/up', (D,), (F,), True),
      *layout.dense(down, f'{ours}/mlp/down', (F,), (D,), True),
    ]
  tensors += layout.norm(f'{top}.final_layer_norm', 'final_norm', D, True)
  if not c.tie_embeddings:
    tensors.append(
      layout.linear('embed_out.weight', 'head/kernel', (D,), (c.vocab_size,))
    )
  return tensors


FAMILIES = {
  'gpt_neox': layout.Family(
    read_config=_read,
    write_config=_write,
    tensors=_tensors,
    prefix='gpt_neox.',
    canonical=lambda name: name.replace('lm_head.', 'embed_out.'),
    architecture='GPTNeoXForCausalLM',
    inert=(
      '.attention.bias',
      '.attention.masked_bias',
      '.attention.rotary_emb.inv_freq',
    ),
  )
}
