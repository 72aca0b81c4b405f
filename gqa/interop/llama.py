"""Llama 1 to 3 and SmolLM, Mistral, Qwen2 and Qwen3.

One decoder with RMSNorm, SwiGLU and rotary positions. Mistral adds a sliding
window, Qwen2 biases of queries, keys and values (whatever its config says, for
it has no field for them), and Qwen3 a norm of each query and key head.
"""

from __future__ import annotations

import functools
from typing import Any

from gqa.config import ModelConfig
from gqa.interop import layout, positions
from gqa.interop.fields import Fields, activation_name

NORMS = {
  'attention_norm': 'input_layernorm',
  'mlp_norm': 'post_attention_layernorm',
}
INERT_TENSORS = ('rotary_emb.inv_freq',)
_ACTIVATIONS = {
  'silu': 'swiglu',
  'swish': 'swiglu',
  'gelu_new': 'geglu',
  'gelu_pytorch_tanh': 'geglu',
}
_ACTIVATION_NAMES = {'swiglu': 'silu', 'geglu': 'gelu_pytorch_tanh'}


def read_sizes(
  fields: Fields, head_dim: int | None = None, norm_eps: float = 1e-6
) -> dict[str, Any]:
  """Reads the sizes that all of Llama's relatives name alike.

  Args:
    fields: of the config.json.
    head_dim: the family's default; unset: the share of a head in hidden_size.
    norm_eps: the family's default.
  """
  embed_dim = fields.take('hidden_size', int)
  num_heads = fields.take('num_attention_heads', int)
  derived = embed_dim // num_heads if num_heads > 0 else 0
  return {
    'vocab_size': fields.take('vocab_size', int),
    'num_layers': fields.take('num_hidden_layers', int),
    'embed_dim': embed_dim,
    'num_heads': num_heads,
    'num_kv_heads': fields.take('num_key_value_heads', int, num_heads),
    'head_dim': fields.take('head_dim', int, head_dim or derived),
    'mlp_dim': fields.take('intermediate_size', int),
    'norm_eps': fields.take('rms_norm_eps', float, norm_eps),
  }


def write_sizes(config: ModelConfig) -> dict[str, Any]:
  """Undoes `read_sizes`; all layers have the same number of KV heads."""
  return {
    'vocab_size': config.vocab_size,
    'num_hidden_layers': config.num_layers,
    'hidden_size': config.embed_dim,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.kv_heads[0],
    'head_dim': config.head_dim,
    'intermediate_size': config.mlp_dim,
    'max_position_embeddings': config.max_len,
    'rms_norm_eps': config.norm_eps,
    'tie_word_embeddings': config.tie_embeddings,
  }


def _read(kind: str, fields: Fields) -> ModelConfig:
  sizes = read_sizes(fields, 128 if kind == 'qwen3' else None)
  max_len = fields.take('max_position_embeddings', int, _MAX_LEN[kind])
  read = sizes | {
    'max_len': max_len,
    'mlp': fields.choose('hidden_act', _ACTIVATIONS, 'silu'),
    'tie_embeddings': fields.take('tie_word_embeddings', bool, False),
    **positions.read_rope(fields, max_len),
  }
  if kind in ('llama', 'qwen3'):
    bias = fields.take('attention_bias', bool, False)
    read |= {'qkv_bias': bias, 'out_bias': bias}
  if kind == 'llama':
    fields.expect('rope_interleaved', False)
    read['mlp_bias'] = fields.take('mlp_bias', bool, False)
  elif kind == 'mistral':
    read['sliding_window'] = fields.nullable('sliding_window', int, 4096)
  else:
    read |= _read_qwen_windows(fields, sizes['num_layers'])
    read |= {'qkv_bias': True} if kind == 'qwen2' else {'qk_norm': True}
  fields.finish()
  return ModelConfig(**read)


def _read_qwen_windows(fields: Fields, num_layers: int) -> dict[str, Any]:
  window = fields.take('sliding_window', int, 4096)
  first = fields.take('max_window_layers', int, 28)
  if not fields.take('use_sliding_window', bool, False):
    window = None
  default = [
    positions.SLIDING if window is not None and i >= first else positions.FULL
    for i in range(num_layers)
  ]
  return positions.read_windows(fields, num_layers, window, default)


def _write(kind: str, config: ModelConfig) -> dict[str, Any]:
  written = write_sizes(config) | positions.write_rope(config)
  written['hidden_act'] = activation_name(config.mlp, _ACTIVATION_NAMES)
  if kind in ('llama', 'qwen3'):
    written['attention_bias'] = config.qkv_bias
  if kind == 'llama':
    if config.embed_dim % config.num_heads:
      raise ValueError(
        f'transformers refuses a Llama whose embed_dim={config.embed_dim} is '
        f'no multiple of num_heads={config.num_heads}.'
      )
    written['mlp_bias'] = config.mlp_bias
  elif kind == 'mistral':
    written['sliding_window'] = config.sliding_window
  else:
    written |= positions.write_windows(config)
    written['use_sliding_window'] = config.sliding_window is not None
    # Only a default for layer_types, which are given.
    written['max_window_layers'] = config.num_layers
  return written


_MAX_LEN = {
  'llama': 2048,
  'mistral': 131_072,
  'qwen2': 32_768,
  'qwen3': 32_768,
}
_CLASSES = {
  'llama': 'LlamaForCausalLM',
  'mistral': 'MistralForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}
FAMILIES = {
  kind: layout.Family(
    read_config=functools.partial(_read, kind),
    write_config=functools.partial(_write, kind),
    tensors=functools.partial(layout.decoder, norms=NORMS),
    prefix='model.',
    architecture=architecture,
    inert=INERT_TENSORS,
  )
  for kind, architecture in _CLASSES.items()
}
