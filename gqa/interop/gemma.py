"""Gemma 1, 2 and 3 (text).

Norms keep the difference of their scale from 1, embeddings are scaled, and the
MLP is a GeGLU by tanh (whose first configs call it 'gelu'). Gemma 2 adds norms
after each branch, soft caps and a window in every other layer; Gemma 3 a norm
of queries and keys and another RoPE base in layers with a window.
"""

from __future__ import annotations

import functools
from typing import Any

from gqa.config import ModelConfig
from gqa.interop import layout, llama, positions
from gqa.interop.fields import Fields, activation_name
from gqa.interop.positions import FULL, SLIDING

_TANH = {'gelu_pytorch_tanh': 'geglu', 'gelu_new': 'geglu'}
_NORMS = {
  'attention_norm': 'input_layernorm',
  'attention_post_norm': 'post_attention_layernorm',
  'mlp_norm': 'pre_feedforward_layernorm',
  'mlp_post_norm': 'post_feedforward_layernorm',
}


def _read(kind: str, fields: Fields) -> ModelConfig:
  fields.expect('use_bidirectional_attention', False)
  sizes = llama.read_sizes(fields, 256)
  num_layers = sizes['num_layers']
  bias = fields.take('attention_bias', bool, False)
  max_len = fields.take(
    'max_position_embeddings', int, 131_072 if kind == 'gemma3_text' else 8192
  )
  read = sizes | {
    'max_len': max_len,
    'norm_offset': True,
    'qkv_bias': bias,
    'out_bias': bias,
    'tie_embeddings': fields.take('tie_word_embeddings', bool, True),
    'embed_scale': True,
  }
  if kind == 'gemma':
    # The first releases say 'gelu' and mean the approximation.
    acts = _TANH | {'gelu': 'geglu'}
    read['mlp'] = fields.choose('hidden_act', acts, 'gelu')
    fields.expect('hidden_activation', *acts)
    read |= positions.read_rope(fields, max_len)
  else:
    fields.expect('hidden_act', *_TANH)
    read['mlp'] = fields.choose('hidden_activation', _TANH, 'gelu_pytorch_tanh')
    read |= _read_later(kind, fields, num_layers, max_len)
  fields.finish()
  return ModelConfig(**read)


def _read_later(
  kind: str, fields: Fields, num_layers: int, max_len: int
) -> dict[str, Any]:
  """What Gemma 2 and 3 have and the first has not."""
  if kind == 'gemma2':
    every = 2
    caps = {
      'logit_softcap': fields.nullable('final_logit_softcapping', float, 30.0),
      'attention_softcap': fields.nullable(
        'attn_logit_softcapping', float, 50.0
      ),
    }
  else:
    every = fields.take('_sliding_window_pattern', int, 6)
    every = fields.take('sliding_window_pattern', int, every)
    final = fields.take('final_logit_softcapping', float, None)
    caps = {'logit_softcap': final}
    fields.expect('attn_logit_softcapping', None)
  default = [
    FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers)
  ]
  window = fields.take('sliding_window', int, 4096)
  read = caps | {
    'norm_position': 'both',
    'query_scale_dim': fields.take('query_pre_attn_scalar', int, 256),
    'qk_norm': kind == 'gemma3_text',
    **positions.read_windows(fields, num_layers, window, default),
  }
  if kind == 'gemma2':
    return read | positions.read_rope(fields, max_len)
  return read | _read_two_ropes(fields, max_len, 'sliding_window' in read)


def _read_two_ropes(
  fields: Fields, max_len: int, has_local: bool
) -> dict[str, Any]:
  """RoPE of layers that see all tokens and of those with a window."""
  nested = fields.take('rope_parameters', dict, None)
  scaling = fields.take('rope_scaling', dict, None)
  theta = fields.take('rope_theta', float, 1_000_000.0)
  local_theta = fields.take('rope_local_base_freq', float, 10_000.0)
  if nested and scaling:
    raise ValueError('config.json has both rope_scaling and rope_parameters.')
  whole = dict(scaling or {})
  if nested is not None:
    if not set(nested) <= {FULL, SLIDING}:
      raise ValueError(
        f'config.json has rope_parameters={nested!r}, which must hold '
        f'{FULL!r} and {SLIDING!r} only.'
      )
    whole = dict(nested.get(FULL) or {})
    local = dict(nested.get(SLIDING) or {})
    theta = float(whole.pop('rope_theta', theta))
    local_theta = float(local.pop('rope_theta', local_theta))
    if positions.read_scaling(local, max_len):
      raise ValueError(
        f'config.json scales RoPE in {SLIDING!r} layers, which is not '
        'supported.'
      )
  read = {'rope_theta': theta, **positions.read_scaling(whole, max_len)}
  return read | {'rope_local_theta': local_theta} if has_local else read


def _write(kind: str, config: ModelConfig) -> dict[str, Any]:
  written = llama.write_sizes(config) | {'attention_bias': config.qkv_bias}
  written |= positions.write_rope(config)
  activation = activation_name(config.mlp, {'geglu': 'gelu_pytorch_tanh'})
  if kind == 'gemma':
    # Older versions read the second one.
    return written | {
      'hidden_act': activation,
      'hidden_activation': activation,
    }
  if kind == 'gemma3_text' and config.rope_local_theta is not None:
    written['rope_local_base_freq'] = config.rope_local_theta
  return (
    written
    | positions.write_windows(config)
    | {
      'hidden_activation': activation,
      'query_pre_attn_scalar': config.query_scale_dim or config.head_dim,
      'final_logit_softcapping': config.logit_softcap,
      'attn_logit_softcapping': config.attention_softcap,
    }
  )


# What a text_config leaves out has these values.
_TEXT_DEFAULTS = {
  'vocab_size': 262_208,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
}
_NO_TEXT = ('vision_tower.', 'multi_modal_projector.')


def text_part(config: dict[str, Any]) -> dict[str, Any]:
  """Returns the config of the text model in a Gemma 3 that also sees."""
  text = config.get('text_config')
  if not isinstance(text, dict):
    raise ValueError('config.json has no text_config, which is needed.')
  tied = config.get('tie_word_embeddings')
  outer = {} if tied is None else {'tie_word_embeddings': tied}
  return _TEXT_DEFAULTS | outer | text | {'model_type': 'gemma3_text'}


def _canonical(name: str) -> str | None:
  """Names of the text model, also inside of one that sees; None: no part."""
  bare = name.removeprefix('model.')
  if bare.startswith(_NO_TEXT):
    return None
  if bare.startswith('language_model.'):
    inner = bare.removeprefix('language_model.')
    return (
      inner if inner.startswith(('model.', 'lm_head.')) else f'model.{inner}'
    )
  return name


FAMILIES = {
  kind: layout.Family(
    read_config=functools.partial(_read, kind),
    write_config=functools.partial(_write, kind),
    tensors=functools.partial(
      layout.decoder, norms=llama.NORMS if kind == 'gemma' else _NORMS
    ),
    prefix='model.',
    architecture=architecture,
    inert=llama.INERT_TENSORS,
    canonical=_canonical,
  )
  for kind, architecture in {
    'gemma': 'GemmaForCausalLM',
    'gemma2': 'Gemma2ForCausalLM',
    'gemma3_text': 'Gemma3ForCausalLM',
  }.items()
}
