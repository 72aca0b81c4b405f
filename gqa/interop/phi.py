"""Phi-1, 1.5 and 2: a parallel residual with one LayerNorm for both branches.

Rotary positions are partial, every projection has a bias, the head too.
"""

from __future__ import annotations

from typing import Any

from gqa.config import ModelConfig
from gqa.interop import layout, llama, positions
from gqa.interop.fields import ACTIVATIONS, Fields, activation_name
from gqa.interop.layout import Tensor


def _read(fields: Fields) -> ModelConfig:
  fields.expect('qk_layernorm', False)
  fields.expect('tie_word_embeddings', False)
  max_len = fields.take('max_position_embeddings', int, 2048)
  sizes = llama.read_sizes(fields)
  read = sizes | {
    'max_len': max_len,
    'norm': 'layernorm',
    'norm_eps': fields.take('layer_norm_eps', float, 1e-5),
    'mlp': fields.choose('hidden_act', ACTIVATIONS, 'gelu_new'),
    'qkv_bias': True,
    'out_bias': True,
    'mlp_bias': True,
    'tie_embeddings': False,
    'head_bias': True,
    'parallel_residual': True,
    'shared_norm': True,
    **positions.read_rope(fields, max_len, fraction=0.5),
  }
  fields.finish()
  return ModelConfig(**read)


def _write(config: ModelConfig) -> dict[str, Any]:
  written = llama.write_sizes(config) | positions.write_rope(config)
  return written | {
    'layer_norm_eps': written.pop('rms_norm_eps'),
    'partial_rotary_factor': config.rope_fraction,
    'hidden_act': activation_name(config.mlp),
    'qk_layernorm': False,
  }


def _tensors(c: ModelConfig) -> list[Tensor]:
  D, N, H, F = c.embed_dim, c.num_heads, c.head_dim, c.mlp_dim
  table = (c.vocab_size, D)
  tensors = [layout.same('model.embed_tokens.weight', 'embed/embedding', table)]
  for i, K in enumerate(c.kv_heads):
    theirs, ours = f'model.layers.{i}', f'layer_{i}'
    attn, attention = f'{theirs}.self_attn', f'{ours}/attention'
    tensors += layout.norm(
      f'{theirs}.input_layernorm', f'{ours}/attention_norm', D, True
    )
    for name, path, ins, outs in (
      (f'{attn}.q_proj', f'{attention}/query', (D,), (N, H)),
      (f'{attn}.k_proj', f'{attention}/key', (D,), (K, H)),
      (f'{attn}.v_proj', f'{attention}/value', (D,), (K, H)),
      (f'{attn}.dense', f'{attention}/out', (N, H), (D,)),
      (f'{theirs}.mlp.fc1', f'{ours}/mlp/up', (D,), (F,)),
      (f'{theirs}.mlp.fc2', f'{ours}/mlp/down', (F,), (D,)),
    ):
      tensors += layout.dense(name, path, ins, outs, True)
  tensors += layout.norm('model.final_layernorm', 'final_norm', D, True)
  tensors += layout.dense('lm_head', 'head', (D,), (c.vocab_size,), True)
  return tensors


FAMILIES = {
  'phi': layout.Family(
    read_config=_read,
    write_config=_write,
    tensors=_tensors,
    prefix='model.',
    architecture='PhiForCausalLM',
    inert=('rotary_emb.inv_freq',),
  )
}
