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
      'more than one number of KV heads; --repeat_kv_heads writes the '
      'multi-head model with the same logits.'
    )
  kinds = [family] if family else list(FAMILIES)
  if preferred in kinds:
    kinds = [preferred, *(kind for kind in kinds if kind != preferred)]
  lacks, reasons = {}, {}  # reasons: why a family cannot be written at all
  for kind in kinds:
    try:
      written = FAMILIES[kind].write_config(config)
      _, again = read_config(written | {'model_type': kind})
      lacks[kind] = _differences(config, again)
    except ValueError as error:
      reasons[kind] = str(error)
      continue
    if not lacks[kind]:
      architecture = FAMILIES[kind].architecture
      head = {'architectures': [architecture], 'model_type': kind}
      return kind, head | written
  reasons |= {kind: ', '.join(found) for kind, found in lacks.items()}
  nearest = min(lacks, key=lambda kind: len(lacks[kind]), default=kinds[0])
  shown = dict.fromkeys([preferred, nearest, 'llama'])
  text = '; '.join(f'{k}: {reasons[k]}' for k in shown if k in reasons)
  others = '' if family else ', and no other family does'
  way_out = ''
  if 'num_kv_heads' in text:
    way_out = (
      ' --repeat_kv_heads writes the multi-head model with the same logits.'
    )
  raise ValueError(
    f'this model cannot be exported exactly. {text}{others}.{way_out}'
  )


def _differences(config: ModelConfig, written: ModelConfig) -> list[str]:
  """What a family cannot say of a model."""
  wanted, got = _comparable(config), _comparable(written)
  return [
    f'it has no {name}={wanted[name]!r} (but {got[name]!r})'
    for name in wanted
    if wanted[name] != got[name]
  ]


def _comparable(config: ModelConfig) -> dict[str, Any]:
  """The fields that say what is computed, with defaults spelled out."""
  fields = dataclasses.asdict(dataclasses.replace(config, **_FREE))
  fields['num_kv_heads'] = config.kv_heads[0]
  fields['query_scale_dim'] = config.query_scale_dim or config.head_dim
  return fields
