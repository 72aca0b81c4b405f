"""Which family a checkpoint is of, and which one a model can be written as."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gqa.config import ModelConfig
from gqa.interop import gemma, gpt2, gpt_neox, llama, olmo2, phi
from gqa.interop.fields import Fields
from gqa.interop.layout import Family

# A model is written as the first of them that has all its features.
FAMILIES: dict[str, Family] = {
  **llama.FAMILIES,
  **gpt2.FAMILIES,
  **gpt_neox.FAMILIES,
  **olmo2.FAMILIES,
  **phi.FAMILIES,
  **gemma.FAMILIES,
}
# Of layers or heads; what is counted in them is made before it is compared.
MAX_COUNT = 1 << 14
_COUNTS = (
  'num_hidden_layers',
  'n_layer',
  'num_attention_heads',
  'n_head',
  'num_key_value_heads',
)
# Fields that say how to compute, not what.
_FREE = {
  'dropout': 0.0,
  'dtype': 'float32',
  'attention': 'auto',
  'remat': 'none',
}


def read_config(config: Mapping[str, Any]) -> tuple[str, ModelConfig]:
  """Returns the family and the config that a config.json describes.

  Raises:
    ValueError: the family or one of its fields is not known, or not supported.
  """
  config = dict(config)
  kind = config.get('model_type')
  if kind == 'gemma3':
    config = gemma.text_part(config)
    kind = config['model_type']
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f'config.json has model_type={kind!r}, which is not supported; known are '
      f'{", ".join(FAMILIES)}.'
    )
  for name in _COUNTS:
    if type(config.get(name)) is int and config[name] > MAX_COUNT:
      raise ValueError(
        f'config.json has {name}={config[name]}, more than {MAX_COUNT}.'
      )
  if config.get('quantization_config') is not None:
    raise ValueError(
      'config.json has a quantization_config, and quantised weights are not '
      'supported; use the original checkpoint.'
    )
  try:
    return kind, FAMILIES[kind].read_config(Fields(config))
  except TypeError as error:
    raise ValueError(f'config.json is not valid: {error}') from error


def write_config(
  config: ModelConfig, family: str | None = None, preferred: str | None = None
) -> tuple[str, dict[str, Any]]:
  """Returns a family that has all features of a model, and its config.json.

  Args:
    config: of the model.
    family: the only one that will do.
    preferred: the one to be tried first.

  Raises:
    ValueError: there is none; the message says what each lacks.
  """
  if family is not None and family not in FAMILIES:
    raise ValueError(
      f'family={family!r} is not known; choose one of {", ".join(FAMILIES)}.'
    )
  if len(set(config.kv_heads)) > 1:
    raise ValueError(
      f'num_kv_heads={config.kv_heads} differ between layers; no family has '
      'more than one number of KV heads, so this model cannot be exported.'
    )
  kinds = [family] if family else list(FAMILIES)
  if preferred in kinds:
    kinds = [preferred, *(kind for kind in kinds if kind != preferred)]
  reasons = {}
  for kind in kinds:
    try:
      written = FAMILIES[kind].write_config(config)
      _, again = read_config(written | {'model_type': kind})
      reasons[kind] = _difference(config, again)
    except ValueError as error:
      reasons[kind] = str(error)
    if not reasons[kind]:
      architecture = FAMILIES[kind].architecture
      head = {'architectures': [architecture], 'model_type': kind}
      return kind, head | written
  shown = [kind for kind in (preferred, 'llama') if kind in reasons] or kinds
  text = '; '.join(f'{kind}: {reasons[kind]}' for kind in dict.fromkeys(shown))
  others = '' if family else ', and no other family does'
  raise ValueError(f'this model cannot be exported exactly. {text}{others}.')


def _difference(config: ModelConfig, written: ModelConfig) -> str:
  """What a family cannot say of a model, '' if nothing."""
  wanted, got = _comparable(config), _comparable(written)
  return ', '.join(
    f'it has no {name}={wanted[name]!r} (but {got[name]!r})'
    for name in wanted
    if wanted[name] != got[name]
  )


def _comparable(config: ModelConfig) -> dict[str, Any]:
  """The fields that say what is computed, with defaults spelled out."""
  fields = dataclasses.asdict(dataclasses.replace(config, **_FREE))
  fields['num_kv_heads'] = config.kv_heads[0]
  fields['query_scale_dim'] = config.query_scale_dim or config.head_dim
  return fields
