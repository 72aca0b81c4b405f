"""OLMo-2: Llama's decoder with its norms elsewhere.

A norm follows attention and MLP instead of preceding them, and queries and keys
are normalised over all heads as one.
"""

from __future__ import annotations

import functools
from typing import Any

from gqa.config import ModelConfig
from gqa.interop import layout, llama, positions
from gqa.interop.fields import Fields

_NORMS = {
  'attention_post_norm': 'post_attention_layernorm',
  'mlp_post_norm': 'post_feedforward_layernorm',
}


def _read(fields: Fields) -> ModelConfig:
  fields.expect('hidden_act', 'silu')
  max_len = fields.take('max_position_embeddings', int, 2048)
  bias = fields.take('attention_bias', bool, False)
  read = llama.read_sizes(fields, norm_eps=1e-5) | {
    'max_len': max_len,
    'tie_embeddings': fields.take('tie_word_embeddings', bool, False),
    'qkv_bias': bias,
    'out_bias': bias,
    'norm_position': 'post',
    'qk_norm': True,
    'qk_norm_axes': 'heads',
    **positions.read_rope(fields, max_len),
  }
  fields.finish()
  return ModelConfig(**read)


def _write(config: ModelConfig) -> dict[str, Any]:
  return (
    llama.write_sizes(config)
    | positions.write_rope(config)
    | {'hidden_act': 'silu', 'attention_bias': config.qkv_bias}
  )


FAMILIES = {
  'olmo2': layout.Family(
    read_config=_read,
    write_config=_write,
    tensors=functools.partial(layout.decoder, norms=_NORMS),
    prefix='model.',
    architecture='Olmo2ForCausalLM',
    inert=llama.INERT_TENSORS,
  )
}
