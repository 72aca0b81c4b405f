"""GGUF files of llama.cpp: the architectures llama, qwen2 and gemma3.

A file is read as the Hugging Face checkpoint that it was made of: names and
metadata are translated back, weights dequantised, and what the conversion did
to them undone. It stores query and key rows of Llama in the order of an
interleaved RoPE, and norms of Gemma with the 1 added.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from gqa.config import ModelConfig
from gqa.interop import families, gguf_tokenizer, hugging_face
from gqa.interop.fields import Fields
from gqa.interop.gguf_file import GgufFile
from gqa.rope import rope_frequencies

_MODEL_TYPES = {'llama': 'llama', 'qwen2': 'qwen2', 'gemma3': 'gemma3_text'}
_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
}
_LAYER_NAMES = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_GEMMA_NAMES = {
  'ffn_norm': 'pre_feedforward_layernorm',
  'post_attention_norm': 'post_attention_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
}
_ROPE_FREQS = 'rope_freqs.weight'
# Of Llama 3.1 and later; a file keeps what follows from them, not themselves.
_LLAMA3 = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def import_file(
  source: str, target: str, dtype: str = 'float32'
) -> ModelConfig:
  """Makes a workdir of a GGUF file.

  Args:
    source: the file.
    target: as in `hugging_face.import_directory`.
    dtype: as there; weights are dequantised first.

  Raises:
    ValueError: the file is not supported or not valid, or the target holds
      something.
  """
  file = GgufFile(source)
  arch = file.values.get('general.architecture')
  if arch not in _MODEL_TYPES:
    raise ValueError(
      f'{source} has the architecture {arch!r}, which is not supported; known '
      f'are {", ".join(_MODEL_TYPES)}.'
    )
  kind, config = families.read_config(read_config(file, arch))
  files = gguf_tokenizer.files(file.values, config.vocab_size)
  file.values.clear()  # a vocabulary takes tens of megabytes
  return hugging_face.write_workdir(
    target,
    kind,
    config,
    GgufSource(file, arch, config),
    files,
    dtype=dtype,
    origin=os.path.abspath(os.path.expanduser(source)),
  )


class GgufSource:
  """The tensors of a file under the names of its Hugging Face checkpoint."""

  def __init__(self, file: GgufFile, arch: str, config: ModelConfig):
    self._file, self._arch, self._config = file, arch, config
    self._names = {
      _hugging_face_name(name, arch): name
      for name in file.tensors
      if name != _ROPE_FREQS
    }
    self.tensors = {
      name: file.tensors[theirs] for name, theirs in self._names.items()
    }

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as it was before the conversion, up to quantisation."""
    array = self._file.read(self._names[name])
    if self._arch == 'llama' and '.q_proj.' in name:
      return half_rotations(array, self._config.num_heads)
    if self._arch == 'llama' and '.k_proj.' in name:
      return half_rotations(array, self._config.kv_heads[0])
    if self._arch == 'gemma3' and name.endswith('norm.weight'):
      return array - np.float32(1)
    return array


def half_rotations(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """Reorders rows of heads from pairs (2j, 2j + 1) to (j, j + H / 2)."""
  shape = rows.shape
  pairs = rows.reshape(num_heads, -1, 2, *shape[1:])
  return pairs.swapaxes(1, 2).reshape(shape)


def read_config(file: GgufFile, arch: str) -> dict[str, Any]:
  """Translates metadata to the fields of a config.json."""
  prefix = f'{arch}.'
  values = {
    key.removeprefix(prefix): _exact(value)
    for key, value in file.values.items()
    if key.startswith(prefix)
  }
  fields = Fields(values, str(file.path))
  num_heads = fields.take('attention.head_count', int)
  embed_dim = fields.take('embedding_length', int)
  if num_heads < 1:
    raise ValueError(f'{file.path} has attention.head_count={num_heads}.')
  head_dim = fields.take('attention.key_length', int, embed_dim // num_heads)
  if 'token_embd.weight' not in file.tensors:
    raise ValueError(f'{file.path} has no tensor token_embd.weight.')
  num_layers = fields.take('block_count', int)
  config = {
    'model_type': _MODEL_TYPES[arch],
    'vocab_size': file.tensors['token_embd.weight'].shape[0],
    'hidden_size': embed_dim,
    'num_hidden_layers': num_layers,
    'num_attention_heads': num_heads,
    'num_key_value_heads': fields.take(
      'attention.head_count_kv', int, num_heads
    ),
    'head_dim': head_dim,
    'intermediate_size': fields.take('feed_forward_length', int),
    'max_position_embeddings': fields.take('context_length', int),
    'rms_norm_eps': fields.take('attention.layer_norm_rms_epsilon', float),
    'rope_theta': fields.take('rope.freq_base', float, 10_000.0),
    'rope_scaling': _read_scaling(fields),
    'tie_word_embeddings': 'output.weight' not in file.tensors,
  }
  fields.ignore('vocab_size')
  fields.expect('attention.value_length', head_dim)
  fields.expect('rope.dimension_count', head_dim)
  fields.expect('expert_count', 0)
  fields.expect('expert_used_count', 0)
  if arch == 'llama':
    config['attention_bias'] = 'blk.0.attn_q.bias' in file.tensors
    if _ROPE_FREQS in file.tensors:
      config['rope_scaling'] = _llama3(file, head_dim, config['rope_theta'])
  if arch == 'gemma3':
    config |= _read_gemma(fields, embed_dim, num_heads, head_dim, num_layers)
  fields.finish()
  return config


def _read_gemma(fields, embed_dim, num_heads, head_dim, num_layers):
  """What llama.cpp knows of Gemma 3 without being told, and what it is told."""
  return {
    'sliding_window': fields.take('attention.sliding_window', int, 1024),
    'sliding_window_pattern': fields.take(
      'attention.sliding_window_pattern', int, 6
    ),
    'rope_local_base_freq': fields.take('rope.freq_base_swa', float, 10_000.0),
    'final_logit_softcapping': fields.take(
      'final_logit_softcapping', float, None
    ),
    # The largest of them, of 62 layers, scales by the share of a head.
    'query_pre_attn_scalar': (
      embed_dim // num_heads if num_layers == 62 else head_dim
    ),
  }


def _read_scaling(fields: Fields) -> dict[str, Any] | None:
  kind = fields.take('rope.scaling.type', str, 'none')
  factor = fields.take('rope.scaling.factor', float, None)
  original = fields.take('rope.scaling.original_context_length', int, None)
  fields.ignore('rope.scaling.finetuned')
  if kind == 'none':
    return None
  scaling = {'rope_type': kind, 'factor': factor}
  if kind == 'linear' or original is None:
    return scaling
  return scaling | {'original_max_position_embeddings': original}


def _llama3(file: GgufFile, head_dim: int, theta: float) -> Mapping[str, Any]:
  """The scaling whose divisors of frequencies a file holds."""
  divisors = file.read(_ROPE_FREQS).reshape(-1)
  factor = float(divisors.max())
  plain = rope_frequencies(head_dim, theta)
  scaled = rope_frequencies(
    head_dim,
    theta,
    'llama3',
    factor=factor,
    original_len=_LLAMA3['original_max_position_embeddings'],
    slow_turns=_LLAMA3['low_freq_factor'],
    fast_turns=_LLAMA3['high_freq_factor'],
  )
  expected = np.array(plain) / np.array(scaled)
  if divisors.shape != expected.shape or not np.allclose(
    divisors, expected, rtol=1e-4
  ):
    raise ValueError(
      f'{file.path} scales RoPE by {_ROPE_FREQS}, and not as Llama 3 does; '
      'import the Hugging Face checkpoint instead.'
    )
  return {'rope_type': 'llama3', 'factor': factor, **_LLAMA3}


def _hugging_face_name(name: str, arch: str) -> str:
  """The name in the original checkpoint; an unknown one stays."""
  stem, _, end = name.rpartition('.')
  if stem in _NAMES:
    return f'{_NAMES[stem]}.{end}'
  layer = re.fullmatch(r'blk\.(\d+)\.(\w+)', stem)
  names = _LAYER_NAMES | (_GEMMA_NAMES if arch == 'gemma3' else {})
  if layer and layer[2] in names:
    return f'model.layers.{layer[1]}.{names[layer[2]]}.{end}'
  return name


def _exact(value: Any) -> Any:
  """Floats are stored in single precision: the shortest of their decimals."""
  if isinstance(value, float) and math.isfinite(value):
    return float(str(np.float32(value)))
  return value
