"""A small random checkpoint of each family, to try things without a download.

The directories are those that transformers writes; the text that such a model
generates is noise.
"""

from __future__ import annotations

import numpy as np

from gqa.interop import families, hugging_face, weights
from gqa.interop.layout import Tensor
from gqa.tokenizer import ByteTokenizer

_SIZES = {
  'vocab_size': ByteTokenizer.vocab_size,
  'hidden_size': 64,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'intermediate_size': 128,
  'max_position_embeddings': 256,
}
_GROUPED = _SIZES | {'num_key_value_heads': 2, 'head_dim': 32}
# What config.json says; the rest is each family's own default.
CONFIGS = {
  'llama': _GROUPED,
  'mistral': _GROUPED | {'sliding_window': 16},
  'qwen2': _GROUPED | {'tie_word_embeddings': True},
  'qwen3': _GROUPED,
  'gpt2': {
    'vocab_size': ByteTokenizer.vocab_size,
    'n_embd': 64,
    'n_layer': 2,
    'n_head': 4,
    'n_positions': 256,
  },
  'gpt_neox': _SIZES,
  'olmo2': _GROUPED,
  'phi': _GROUPED,
  'gemma': _GROUPED,
  'gemma2': _GROUPED | {'sliding_window': 16},
  'gemma3_text': _GROUPED | {'sliding_window': 16, 'num_hidden_layers': 6},
}


def write_example(
  family: str, target: str, dtype: str = 'float32', seed: int = 0
) -> None:
  """Writes a Hugging Face directory of a random model with byte tokens.

  Args:
    family: one of `CONFIGS`.
    target: as in `hugging_face.export_directory`.
    dtype: of the tensors.
    seed: of the numbers.

  Raises:
    ValueError: the family is not known, or the target holds something.
  """
  if family not in CONFIGS:
    raise ValueError(
      f'family={family!r} has no example; choose one of {", ".join(CONFIGS)}.'
    )
  kind, config = families.read_config(CONFIGS[family] | {'model_type': family})
  _, written = families.write_config(config, kind)
  rng = np.random.default_rng(seed)

  def draw(tensor: Tensor) -> np.ndarray:
    x = 0.1 * rng.standard_normal(tensor.shape, np.float32)
    is_scale = tensor.paths[0].endswith('/scale') and not config.norm_offset
    return weights.cast(x + np.float32(is_scale), dtype, tensor.name)

  hugging_face.write_directory(
    target,
    kind,
    written,
    config,
    draw,
    ByteTokenizer(),
    dtype=dtype,
    add_bos=True,
  )
