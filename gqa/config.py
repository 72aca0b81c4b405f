"""The shape of a model: one frozen, validated, hashable dataclass.

`ModelConfig` is what every part of the library below the command lines sees.
It is static under `jax.jit`, and goes to JSON and back without loss.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

POSITIONS = ('rope', 'learned')
ROPE_SCALINGS = ('none', 'linear', 'llama3', 'yarn')
NORMS = ('rmsnorm', 'layernorm')
NORM_POSITIONS = ('pre', 'post', 'both')
QK_NORM_AXES = ('head', 'heads')
MLPS = ('swiglu', 'geglu', 'gelu', 'gelu_exact', 'relu')
GATED_MLPS = ('swiglu', 'geglu')
ATTENTIONS = ('auto', 'einsum', 'blockwise', 'fused')
REMATS = ('none', 'dots', 'full')
DTYPES = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape and arithmetic of a decoder; `configs/base.py` says what each means.

  `num_kv_heads` is an int or one int per layer; None stands for `num_heads`
  (multi-head attention). Query head n reads KV head n // group_size of its
  layer (blocks, never tiles).

  Raises:
    TypeError: a field has the wrong type.
    ValueError: a field breaks a rule; the message names the way out.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  max_len: int
  num_kv_heads: int | tuple[int, ...] | None = None
  position: str = 'rope'
  rope_theta: float = 10_000.0
  rope_fraction: float = 1.0
  rope_scaling: str = 'none'
  rope_factor: float = 1.0
  rope_original_len: int | None = None
  rope_slow_turns: float = 1.0
  rope_fast_turns: float = 32.0
  rope_magnitude: float = 1.0
  rope_local_theta: float | None = None
  norm: str = 'rmsnorm'
  norm_eps: float = 1e-6
  norm_position: str = 'pre'
  norm_offset: bool = False
  mlp: str = 'swiglu'
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  qk_norm_axes: str = 'head'
  query_scale_dim: int | None = None
  attention_softcap: float | None = None
  sliding_window: int | None = None
  global_layers: tuple[int, ...] = ()
  tie_embeddings: bool = True
  head_bias: bool = False
  logit_softcap: float | None = None
  embed_scale: bool = False
  parallel_residual: bool = False
  shared_norm: bool = False
  dropout: float = 0.0
  dtype: str = 'float32'
  attention: str = 'auto'
  remat: str = 'none'

  def __post_init__(self):
    self._check_types()
    for name in (
      'vocab_size',
      'num_layers',
      'embed_dim',
      'num_heads',
      'head_dim',
      'mlp_dim',
      'max_len',
    ):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1.')
    self._check_kv_heads()
    self._check_choices()
    self._check_ranges()
    self._check_windows()
    self._check_rope_scaling()
    self._check_companions()

  @property
  def kv_heads(self) -> tuple[int, ...]:
    """The number of KV heads of each layer."""
    if self.num_kv_heads is None:
      return (self.num_heads,) * self.num_layers
    if isinstance(self.num_kv_heads, int):
      return (self.num_kv_heads,) * self.num_layers
    return self.num_kv_heads

  @property
  def windows(self) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: it sees all tokens."""
    return tuple(
      None if layer in self.global_layers else self.sliding_window
      for layer in range(self.num_layers)
    )

  @property
  def rope_dim(self) -> int:
    """How many leading dimensions of each head are rotated; even."""
    if self.position != 'rope':
      return 0
    # Rounded down, but 98 * (2 / 98) is slightly below 2.
    return int(self.head_dim * self.rope_fraction + 1e-6)

  @property
  def gated(self) -> bool:
    """Whether the MLP has a gate projection beside `up` and `down`."""
    return self.mlp in GATED_MLPS

  def to_dict(self) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a config from plain values (JSON, or a ConfigDict's items).

    `match_params=True` widens `mlp_dim` by what fewer KV heads save, so that
    groupings are compared at an equal number of parameters (Shazeer 2019,
    section 4.1; Ainslie et al. leave the sizes unequal).

    Raises:
      ValueError: a field is unknown (a near name is suggested) or invalid.
    """
    fields = dict(fields)
    match_params = fields.pop('match_params', False)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
      if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f'; did you mean {near[0]}?' if near else f': known are {known}.'
        raise ValueError(f'model.{name} is not a field of the model{hint}')
    for name in ('num_kv_heads', 'global_layers'):
      if isinstance(fields.get(name), list):
        fields[name] = tuple(fields[name])
    config = cls(**fields)
    return config.matched() if match_params else config

  def matched(self) -> ModelConfig:
    """Returns this config with `mlp_dim` widened to the multi-head size.

    The saved 2 * embed_dim * head_dim * (num_heads - num_kv_heads) kernel
    entries of a layer (averaged over layers) become columns of the MLP,
    rounded to the nearest whole column.
    """
    saved_heads = self.num_heads * self.num_layers - sum(self.kv_heads)
    kernels = 3 if self.gated else 2
    extra = 2 * self.head_dim * saved_heads / (kernels * self.num_layers)
    return dataclasses.replace(self, mlp_dim=self.mlp_dim + round(extra))

  def _check_types(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is None and field.default is None:
        continue
      if field.name == 'num_kv_heads':
        _check_kv_type(value)
        continue
      if field.name == 'global_layers':
        _check_layers_type(value)
        continue
      expected = field.type.split(' ')[0]
      if expected == 'float' and type(value) is int:
        object.__setattr__(self, field.name, float(value))
      elif type(value).__name__ != expected:
        raise TypeError(
          f'model.{field.name}={value!r} must be of type {expected}, not '
          f'{type(value).__name__}.'
        )

  def _check_kv_heads(self):
    heads = self.kv_heads
    if len(heads) != self.num_layers:
      raise ValueError(
        f'num_kv_heads={heads} has {len(heads)} entries, but num_layers='
        f'{self.num_layers}; give one int, or one per layer.'
      )
    possible = divisors(self.num_heads)
    for layer, count in enumerate(heads):
      if count not in possible:
        where = (
          '' if isinstance(self.num_kv_heads, int) else f' (layer {layer})'
        )
        raise ValueError(
          f'num_kv_heads={count}{where} must divide num_heads='
          f'{self.num_heads}; choose one of {possible}.'
        )

  def _check_choices(self):
    for name, choices in (
      ('position', POSITIONS),
      ('rope_scaling', ROPE_SCALINGS),
      ('norm', NORMS),
      ('norm_position', NORM_POSITIONS),
      ('qk_norm_axes', QK_NORM_AXES),
      ('mlp', MLPS),
      ('attention', ATTENTIONS),
      ('remat', REMATS),
      ('dtype', DTYPES),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
          f'model.{name}={getattr(self, name)!r} is unknown; choose one of '
          f'{choices}.'
        )

  def _check_ranges(self):
    if not 0 < self.rope_fraction <= 1:
      raise ValueError(
        f'rope_fraction={self.rope_fraction} must be above 0 and at most 1.'
      )
    if self.rope_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} times rope_fraction={self.rope_fraction} '
        'must be even: RoPE rotates pairs; change one of them.'
      )
    if self.position == 'rope' and not self.rope_dim:
      raise ValueError(
        f'rope_fraction={self.rope_fraction} of head_dim={self.head_dim} '
        'rotates nothing; raise it.'
      )
    for name in (
      'rope_theta',
      'rope_factor',
      'rope_original_len',
      'rope_slow_turns',
      'rope_fast_turns',
      'rope_magnitude',
      'rope_local_theta',
      'norm_eps',
      'query_scale_dim',
      'attention_softcap',
      'sliding_window',
      'logit_softcap',
    ):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f'{name}={value} must be positive and finite.')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'dropout={self.dropout} must be in [0, 1).')

  def _check_windows(self):
    layers = self.global_layers
    if not layers:
      return
    if self.sliding_window is None:
      raise ValueError(
        f'global_layers={layers} sees all tokens despite a sliding window, '
        'but sliding_window is not set; set it, or drop global_layers.'
      )
    if list(layers) != sorted(set(layers) & set(range(self.num_layers))):
      raise ValueError(
        f'global_layers={layers} must be increasing numbers of layers, from 0 '
        f'to {self.num_layers - 1}.'
      )
    if len(layers) == self.num_layers:
      raise ValueError(
        f'global_layers={layers} are all layers; unset sliding_window instead.'
      )

  def _check_rope_scaling(self):
    kind = self.rope_scaling
    if kind != 'none' and self.position != 'rope':
      raise ValueError(
        f"rope_scaling={kind!r} needs position='rope', not {self.position!r}."
      )
    if kind == 'none' and self.rope_factor != 1:
      raise ValueError(
        f'rope_factor={self.rope_factor} does nothing with rope_scaling='
        f"'none'; choose one of {ROPE_SCALINGS[1:]}."
      )
    if kind in ('llama3', 'yarn') and self.rope_original_len is None:
      raise ValueError(
        f'rope_scaling={kind!r} needs rope_original_len, the tokens of a '
        'sequence before scaling; set it.'
      )
    if kind == 'yarn' and self.rope_theta <= 1:
      raise ValueError(
        f'rope_theta={self.rope_theta} must be above 1 with rope_scaling='
        f'{kind!r}.'
      )
    if not self.rope_slow_turns < self.rope_fast_turns:
      raise ValueError(
        f'rope_slow_turns={self.rope_slow_turns} must be below '
        f'rope_fast_turns={self.rope_fast_turns}.'
      )
    if kind != 'yarn' and self.rope_magnitude != 1:
      raise ValueError(
        f"rope_magnitude={self.rope_magnitude} needs rope_scaling='yarn', "
        f'not {kind!r}.'
      )

  def _check_companions(self):
    for field, active, companion, met in (
      (
        'rope_local_theta',
        self.rope_local_theta is not None,
        "position='rope' and a sliding_window",
        self.position == 'rope' and self.sliding_window is not None,
      ),
      (
        'qk_norm_axes',
        self.qk_norm_axes == 'heads',
        'qk_norm=True',
        self.qk_norm,
      ),
      (
        'head_bias',
        self.head_bias,
        'tie_embeddings=False',
        not self.tie_embeddings,
      ),
      (
        'shared_norm',
        self.shared_norm,
        "parallel_residual=True and norm_position='pre'",
        self.parallel_residual and self.norm_position == 'pre',
      ),
      (
        'attention_softcap',
        self.attention_softcap is not None,
        "another attention than 'fused', which has none",
        self.attention != 'fused',
      ),
    ):
      if active and not met:
        raise ValueError(
          f'{field}={getattr(self, field)!r} needs {companion}; change one of '
          'them.'
        )


def divisors(number: int) -> list[int]:
  """The divisors of a positive number, largest first."""
  return [d for d in range(number, 0, -1) if number % d == 0]


def _check_kv_type(value: int | Sequence[int]):
  values = value if isinstance(value, tuple) else (value,)
  if not all(type(v) is int for v in values):
    raise TypeError(
      f'model.num_kv_heads={value!r} must be an int, or a tuple with one int '
      'per layer such as 4,2,2,1.'
    )


def _check_layers_type(value: tuple[int, ...]):
  if type(value) is not tuple or not all(type(v) is int for v in value):
    raise TypeError(
      f'model.global_layers={value!r} must be a tuple of ints such as 5,11.'
    )
