"""The fields of a config.json: each is used, known to be inert, or an error.

A field that is not known could change what a model computes, so it is refused
by name rather than passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# They describe training, storage or generation, and no logits depend on them.
INERT = {
  '_attn_implementation_autoset',
  '_name_or_path',
  'architectures',
  'attention_dropout',
  'attn_pdrop',
  'auto_map',
  'begin_suppress_tokens',
  'bos_token_id',
  'chunk_size_feed_forward',
  'classifier_dropout',
  'cache_implementation',
  'dtype',
  'embd_pdrop',
  'eos_token_id',
  'gradient_checkpointing',
  'head_dropout',
  'hidden_dropout',
  'id2label',
  'initializer_range',
  'is_decoder',
  'is_llama_config',
  'keys_to_ignore_at_inference',
  'label2id',
  'model_type',
  'n_ctx',
  'output_attentions',
  'output_hidden_states',
  'pad_token_id',
  'pretraining_tp',
  'problem_type',
  'resid_pdrop',
  'return_dict',
  'summary_activation',
  'summary_first_dropout',
  'summary_proj_to_labels',
  'summary_type',
  'summary_use_proj',
  'task_specific_params',
  'torch_dtype',
  'transformers.js_config',
  'transformers_version',
  'unsloth_fixed',
  'unsloth_version',
  'use_cache',
  '_commit_hash',
}
# Activations of an MLP without a gate, by their names and back.
ACTIVATIONS = {
  'gelu_new': 'gelu',
  'gelu_fast': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu': 'gelu_exact',
  'relu': 'relu',
}
_ACTIVATION_NAMES = {'gelu': 'gelu_new', 'gelu_exact': 'gelu', 'relu': 'relu'}
_REQUIRED = object()


class Fields:
  """Reads a config.json field by field; `finish` refuses what is left over.

  Args:
    values: by name.
    where: what they are from, for messages.
  """

  def __init__(self, values: Mapping[str, Any], where: str = 'config.json'):
    self._left, self._where = dict(values), where

  def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Returns a field and crosses it off; null counts as absent.

    Raises:
      ValueError: it is absent without a default, or of another type.
    """
    value = self._left.pop(name, None)
    if value is None:
      if default is _REQUIRED:
        raise ValueError(f'{self._where} has no {name}, which is needed.')
      return default
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is not kind:
      raise ValueError(
        f'{self._where} has {name}={value!r}, which must be of type '
        f'{kind.__name__}.'
      )
    return value

  def nullable(self, name: str, kind: type, absent: Any) -> Any:
    """Returns a field in which null is a value of its own: None."""
    if name in self._left and self._left[name] is None:
      del self._left[name]
      return None
    return self.take(name, kind, absent)

  def expect(self, name: str, *allowed: Any) -> None:
    """Refuses a field with any other value; absent and null pass."""
    value = self._left.pop(name, None)
    if value is not None and value not in allowed:
      raise ValueError(
        f'{self._where} has {name}={value!r}, which is not supported; only '
        f'{" or ".join(map(repr, allowed))} is.'
      )

  def choose(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
    """Translates a field's value by a table."""
    value = self.take(name, str, default)
    if value not in choices:
      raise ValueError(
        f'{self._where} has {name}={value!r}, which is not supported; only '
        f'{", ".join(map(repr, choices))} are.'
      )
    return choices[value]

  def divided(self, width: str, parts: str) -> dict[str, int]:
    """Reads the sizes of a multi-head model whose heads share its width."""
    embed_dim, num_heads = self.take(width, int), self.take(parts, int)
    if num_heads < 1 or embed_dim % num_heads:
      raise ValueError(
        f'{self._where} has {width}={embed_dim}, which must be a multiple of '
        f'{parts}={num_heads}.'
      )
    return {
      'embed_dim': embed_dim,
      'num_heads': num_heads,
      'num_kv_heads': num_heads,
      'head_dim': embed_dim // num_heads,
    }

  def ignore(self, *names: str) -> None:
    """Crosses fields off that change nothing in this family."""
    for name in names:
      self._left.pop(name, None)

  def finish(self) -> None:
    """Raises ValueError if a field is left that might change the result."""
    unknown = [
      name
      for name, value in self._left.items()
      if value is not None and name not in INERT
    ]
    if unknown:
      raise ValueError(
        f'{self._where} has {unknown[0]}={self._left[unknown[0]]!r}, which this '
        'family is not known to have and which may change the result'
        + (f' (so may {", ".join(unknown[1:])})' if unknown[1:] else '')
        + '; take it out if you know that it does not.'
      )


def activation_name(
  mlp: str, names: Mapping[str, str] = _ACTIVATION_NAMES
) -> str:
  """Returns the name that a config.json gives to `ModelConfig.mlp`.

  Raises:
    ValueError: the family has no such MLP.
  """
  if mlp not in names:
    raise ValueError(f'it has no mlp={mlp!r}')
  return names[mlp]
