"""Shapes of published models, exact to the number of their parameters.

Only what costs something is set. What does not, such as the base of rotary
positions, is left at the defaults of ModelConfig: to run such a model, import
its checkpoint.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from gqa.config import ModelConfig
from gqa.cost import Shape


class Preset(NamedTuple):
  """A published model."""

  title: str
  shape: Shape


def find(name: str) -> Preset | None:
  """The preset of a name, however it is punctuated; None if there is none."""
  return _BY_KEY.get(_key(name))


def unknown(name: str) -> str:
  """Says that there is no such model, which is near, and which there are."""
  near = difflib.get_close_matches(_key(name), _BY_KEY, n=1, cutoff=0.5)
  hint = ''
  if near:
    hint = f'did you mean {_BY_KEY[near[0]].title}? '
  return (
    f'model {name!r} is neither a preset nor a config file nor the workdir of '
    f'a run; {hint}Presets are {", ".join(PRESETS)}.'
  )


def _key(name: str) -> str:
  return re.sub(r'[^a-z0-9.]', '', name.lower())


def _shape(
  layers: int,
  embed_dim: int,
  heads: tuple[int, int, int],
  mlp_dim: int,
  vocab: int,
  max_len: int,
  **fields,
) -> Shape:
  """`heads` are query heads, KV heads and their dimension."""
  config = ModelConfig(
    num_layers=layers,
    embed_dim=embed_dim,
    num_heads=heads[0],
    num_kv_heads=heads[1],
    head_dim=heads[2],
    mlp_dim=mlp_dim,
    vocab_size=vocab,
    max_len=max_len,
    dtype='bfloat16',
    **fields,
  )
  return Shape(config)


def _llama(layers, embed_dim, heads, kv_heads, mlp_dim, vocab, max_len, **more):
  """Touvron et al. (2023), and models that follow it."""
  heads = heads, kv_heads, more.pop('head_dim', 128)
  more = {'tie_embeddings': False} | more
  return _shape(layers, embed_dim, heads, mlp_dim, vocab, max_len, **more)


def _qwen2(*sizes, **more):
  return _llama(*sizes, 32_768, qkv_bias=True, **more)


def _qwen3(layers, embed_dim, heads, mlp_dim, **more):
  sizes = layers, embed_dim, heads, 8, mlp_dim, 151_936, 40_960
  return _llama(*sizes, qk_norm=True, **more)


def _gemma(layers, embed_dim, heads, mlp_dim):
  return _shape(layers, embed_dim, heads, mlp_dim, 256_000, 8_192, mlp='geglu')


def _gemma2(layers, embed_dim, heads, mlp_dim):
  return _shape(
    *(layers, embed_dim, heads, mlp_dim, 256_000, 8_192),
    mlp='geglu',
    norm_position='both',
    sliding_window=4_096,
    global_layers=tuple(range(1, layers, 2)),
  )


def _gemma3(layers, embed_dim, heads, mlp_dim, window=1_024, max_len=131_072):
  return _shape(
    *(layers, embed_dim, heads, mlp_dim, 262_144, max_len),
    mlp='geglu',
    norm_position='both',
    qk_norm=True,
    sliding_window=window,
    global_layers=tuple(range(5, layers, 6)),
  )


def _falcon(layers, embed_dim, heads, kv_heads, shared_norm):
  return _shape(
    *(layers, embed_dim, (heads, kv_heads, 64), 4 * embed_dim, 65_024, 2_048),
    mlp='gelu',
    norm='layernorm',
    parallel_residual=True,
    shared_norm=shared_norm,
  )


_BIASES = {'qkv_bias': True, 'out_bias': True, 'mlp_bias': True}


def _gpt2(layers, embed_dim, heads):
  return _shape(
    *(layers, embed_dim, (heads, heads, 64), 4 * embed_dim, 50_257, 1_024),
    position='learned',
    norm='layernorm',
    mlp='gelu',
    **_BIASES,
  )


def _pythia(layers, embed_dim, heads, vocab=50_304):
  heads = heads, heads, embed_dim // heads
  return _shape(
    *(layers, embed_dim, heads, 4 * embed_dim, vocab, 2_048),
    norm='layernorm',
    mlp='gelu',
    tie_embeddings=False,
    **_BIASES,
  )


def _palm(layers, embed_dim, heads):
  """Chowdhery et al. (2022), table 1: multi-query."""
  return _shape(
    *(layers, embed_dim, (heads, 1, 256), 4 * embed_dim, 256_000, 2_048),
    parallel_residual=True,
    shared_norm=True,
  )


def _t5_decoder(layers, embed_dim, heads, head_dim, mlp_dim):
  """T5.1.1, whose positions are a table of 32 biases for each head."""
  decoder = _shape(
    *(layers, embed_dim, (heads, heads, head_dim), mlp_dim, 32_128, 512),
    mlp='geglu',
    tie_embeddings=False,
  )
  return Shape(decoder.config, cross_attention=True, extra_params=32 * heads)


_QWEN2 = {
  '0.5b': _qwen2(
    *(24, 896, 14, 2, 4864, 151_936), head_dim=64, tie_embeddings=True
  ),
  '1.5b': _qwen2(28, 1536, 12, 2, 8960, 151_936, tie_embeddings=True),
  '7b': _qwen2(28, 3584, 28, 4, 18944, 152_064),
  '72b': _qwen2(80, 8192, 64, 8, 29568, 152_064),
}
_FAMILIES = (
  (
    'llama',
    'LLaMA',
    {
      '7b': _llama(32, 4096, 32, 32, 11008, 32_000, 2_048),
      '13b': _llama(40, 5120, 40, 40, 13824, 32_000, 2_048),
      '33b': _llama(60, 6656, 52, 52, 17920, 32_000, 2_048),
      '65b': _llama(80, 8192, 64, 64, 22016, 32_000, 2_048),
    },
  ),
  (
    'llama2',
    'LLaMA-2',
    {
      '7b': _llama(32, 4096, 32, 32, 11008, 32_000, 4_096),
      '13b': _llama(40, 5120, 40, 40, 13824, 32_000, 4_096),
      '70b': _llama(80, 8192, 64, 8, 28672, 32_000, 4_096),
    },
  ),
  (
    'llama3',
    'Llama-3',
    {
      '8b': _llama(32, 4096, 32, 8, 14336, 128_256, 8_192),
      '70b': _llama(80, 8192, 64, 8, 28672, 128_256, 8_192),
    },
  ),
  (
    'llama3.1',
    'Llama-3.1',
    {
      '8b': _llama(32, 4096, 32, 8, 14336, 128_256, 131_072),
      '70b': _llama(80, 8192, 64, 8, 28672, 128_256, 131_072),
      '405b': _llama(126, 16384, 128, 8, 53248, 128_256, 131_072),
    },
  ),
  (
    'llama3.2',
    'Llama-3.2',
    {
      '1b': _llama(
        *(16, 2048, 32, 8, 8192, 128_256, 131_072),
        head_dim=64,
        tie_embeddings=True,
      ),
      '3b': _llama(
        *(28, 3072, 24, 8, 8192, 128_256, 131_072), tie_embeddings=True
      ),
    },
  ),
  (
    'mistral',
    'Mistral',
    {
      '7b': _llama(
        *(32, 4096, 32, 8, 14336, 32_000, 32_768), sliding_window=4_096
      ),
    },
  ),
  (
    'mistral-v0.3',
    'Mistral v0.3',
    {'7b': _llama(32, 4096, 32, 8, 14336, 32_768, 32_768)},
  ),
  ('qwen2', 'Qwen2', _QWEN2),
  (
    'qwen2.5',
    'Qwen2.5',
    _QWEN2
    | {
      '3b': _qwen2(36, 2048, 16, 2, 11008, 151_936, tie_embeddings=True),
      '14b': _qwen2(48, 5120, 40, 8, 13824, 152_064),
      '32b': _qwen2(64, 5120, 40, 8, 27648, 152_064),
    },
  ),
  (
    'qwen3',
    'Qwen3',
    {
      '0.6b': _qwen3(28, 1024, 16, 3072, tie_embeddings=True),
      '1.7b': _qwen3(28, 2048, 16, 6144, tie_embeddings=True),
      '4b': _qwen3(36, 2560, 32, 9728, tie_embeddings=True),
      '8b': _qwen3(36, 4096, 32, 12288),
      '14b': _qwen3(40, 5120, 40, 17408),
      '32b': _qwen3(64, 5120, 64, 25600),
    },
  ),
  (
    'gemma',
    'Gemma',
    {
      '2b': _gemma(18, 2048, (8, 1, 256), 16384),
      '7b': _gemma(28, 3072, (16, 16, 256), 24576),
    },
  ),
  (
    'gemma2',
    'Gemma 2',
    {
      '2b': _gemma2(26, 2304, (8, 4, 256), 9216),
      '9b': _gemma2(42, 3584, (16, 8, 256), 14336),
      '27b': _gemma2(46, 4608, (32, 16, 128), 36864),
    },
  ),
  (
    'gemma3',
    'Gemma 3',
    {
      '1b': _gemma3(26, 1152, (4, 1, 256), 6912, window=512, max_len=32_768),
      '4b': _gemma3(34, 2560, (8, 4, 256), 10240),
      '12b': _gemma3(48, 3840, (16, 8, 256), 15360),
      '27b': _gemma3(62, 5376, (32, 16, 128), 21504),
    },
  ),
  (
    'falcon',
    'Falcon',
    {
      '7b': _falcon(32, 4544, 71, 1, shared_norm=True),
      '40b': _falcon(60, 8192, 128, 8, shared_norm=False),
    },
  ),
  (
    'gpt2',
    'GPT-2',
    {
      'small': _gpt2(12, 768, 12),
      'medium': _gpt2(24, 1024, 16),
      'large': _gpt2(36, 1280, 20),
      'xl': _gpt2(48, 1600, 25),
    },
  ),
  (
    'pythia',
    'Pythia',
    {
      '70m': _pythia(6, 512, 8),
      '160m': _pythia(12, 768, 12),
      '410m': _pythia(24, 1024, 16),
      '1b': _pythia(16, 2048, 8),
      '1.4b': _pythia(24, 2048, 16),
      '2.8b': _pythia(32, 2560, 32),
      '6.9b': _pythia(32, 4096, 32, vocab=50_432),
      '12b': _pythia(36, 5120, 40, vocab=50_688),
    },
  ),
  (
    'palm',
    'PaLM',
    {
      '8b': _palm(32, 4096, 16),
      '62b': _palm(64, 8192, 32),
      '540b': _palm(118, 18432, 48),
    },
  ),
  ('t5-xxl', 'T5-XXL', {'decoder': _t5_decoder(24, 4096, 64, 64, 10240)}),
)
PRESETS = {
  f'{family}-{size}': Preset(
    f'{title} {size.upper() if len(size) < 5 else size}', shape
  )
  for family, title, shapes in _FAMILIES
  for size, shape in shapes.items()
}
_BY_KEY = {_key(name): preset for name, preset in PRESETS.items()}
