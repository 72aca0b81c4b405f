"""What a model holds and computes, counted from its shape.

Parameters, bytes of weights and cache, FLOPs, in all and on each of the
devices that share a model. It is ints throughout: no array is made, and jax
is not imported. How long that takes is roofline.py.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

from gqa.config import ModelConfig, divisors

KINDS = ('full', 'ring', 'int8')  # of caches, as cache.py makes them
KV_SPLITS = ('heads', 'needed', 'batch')
COMPUTE_DTYPES = ('float32', 'bfloat16', 'float16')
ITEMSIZE = {
  'float32': 4,
  'bfloat16': 2,
  'float16': 2,
  'float8_e4m3fn': 1,
  'float8_e5m2': 1,
  'int8': 1,
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """A model as its cost sees it: a config, and what configs cannot say.

  Attributes:
    config: the decoder.
    cross_attention: whether each layer attends to an encoder too, with as many
      heads; the keys and values of the source are cached as well.
    extra_params: numbers beside those of the above.
  """

  config: ModelConfig
  cross_attention: bool = False
  extra_params: int = 0

  def with_kv_heads(self, num_kv_heads: int | tuple[int, ...]) -> Shape:
    """The same shape with another number of KV heads."""
    config = dataclasses.replace(self.config, num_kv_heads=num_kv_heads)
    return dataclasses.replace(self, config=config)


Model = Shape | ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """How a model decodes.

  Attributes:
    batch_size: sequences.
    context: tokens of each sequence in the cache.
    source_len: tokens that the encoder has read, for cross attention.
    kind: one of KINDS.
    dtype: of compute, one of COMPUTE_DTYPES; unset, the model's.
    weight_dtype: one of ITEMSIZE; unset, dtype.
    cache_dtype: one of ITEMSIZE; unset, dtype. The kind 'int8' has its own.
    tensor_parallel: devices that split heads, MLP and vocabulary.
    kv_split: how they split the cache. 'heads' is the rule of sharding.py: a
      layer's KV heads are split if that divides them, else each device holds
      all. 'needed': each holds the KV heads that its query heads read.
      'batch': each holds all heads of its own sequences (Pope et al. 2022,
      section 3.3).
  """

  batch_size: int = 1
  context: int = 4096
  source_len: int = 0
  kind: str = 'full'
  dtype: str | None = None
  weight_dtype: str | None = None
  cache_dtype: str | None = None
  tensor_parallel: int = 1
  kv_split: str = 'heads'

  def __post_init__(self):
    for name, low in (
      ('batch_size', 1),
      ('context', 1),
      ('source_len', 0),
      ('tensor_parallel', 1),
    ):
      if getattr(self, name) < low:
        raise ValueError(
          f'{name}={getattr(self, name)} must be at least {low}.'
        )
    for name, choices in (
      ('kind', KINDS),
      ('kv_split', KV_SPLITS),
      ('dtype', (None, *COMPUTE_DTYPES)),
      ('weight_dtype', (None, *ITEMSIZE)),
      ('cache_dtype', (None, *ITEMSIZE)),
    ):
      if getattr(self, name) not in choices:
        known = tuple(choice for choice in choices if choice)
        raise ValueError(
          f'{name}={getattr(self, name)!r} is unknown; choose one of {known}.'
        )
    if self.cache_dtype == 'int8' or (self.kind == 'int8' and self.cache_dtype):
      raise ValueError(
        f'cache_dtype={self.cache_dtype!r} does not fit kind={self.kind!r}; '
        "an int8 cache is kind='int8' without a cache_dtype."
      )


class Traffic(NamedTuple):
  """What each device reads and computes in one step of decoding."""

  weight_bytes: int
  kv_bytes: int
  flops: int


class _Part(NamedTuple):
  """Parameters that lie on the devices in the same way."""

  axis: str | None  # what `tensor_parallel` splits
  units: int  # along the axis
  unit: int  # numbers in each
  read: bool = True  # in every step of decoding
  product: bool = True  # as a matrix
  copies: int = 1  # such parts

  @property
  def size(self) -> int:
    """Numbers in all."""
    return self.copies * self.units * self.unit


def kv_bytes_per_token(
  config: ModelConfig, dtype_bytes: int, scale_bytes: int = 0
) -> int:
  """Counts the bytes that one token takes in the cache of all layers.

  Args:
    config: the decoder.
    dtype_bytes: of a number.
    scale_bytes: of the scale of a key or value; 4 in an int8 cache.
  """
  per_head = 2 * (config.head_dim * dtype_bytes + scale_bytes)
  return sum(config.kv_heads) * per_head


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
  """Counts the FLOPs that training one token takes.

  Matrix multiplications only, two FLOPs per multiply-add, times three: the
  backward pass costs twice the forward pass. Attention is counted causal: the
  token at position t (from 1) reads t keys, (seq_len + 1) / 2 on average, or
  the window where there is one. The embedding lookup is free, the head counts.
  What remat recomputes is not counted, so MFU is of useful work.
  """
  query_dim = config.num_heads * config.head_dim
  parts = _parts(Shape(config))
  multiply_adds = sum(part.size for part in parts if part.product)
  for window in config.windows:
    keys = min(seq_len, window or seq_len)  # of the last token
    mean_keys = keys - keys * (keys - 1) / (2 * seq_len)
    multiply_adds += 2 * query_dim * mean_keys
  return 3 * 2 * multiply_adds


def param_count(model: Model) -> int:
  """Counts the parameters."""
  return sum(part.size for part in _parts(as_shape(model)))


def weight_bytes(model: Model, setting: Setting) -> int:
  """Bytes of the weights on each device."""
  shape = as_shape(model)
  return _weight_itemsize(shape, setting) * sum(
    _held_size(part, shape, setting) for part in _parts(shape)
  )


def token_bytes(model: Model, setting: Setting) -> int:
  """Bytes of the keys and values of one token in all layers, of one copy."""
  itemsize, scale = _kv_itemsize(as_shape(model), setting)
  return kv_bytes_per_token(as_shape(model).config, itemsize, scale)


def sequence_bytes(model: Model, setting: Setting) -> int:
  """Bytes of the keys and values of one sequence, of one copy."""
  shape = as_shape(model)
  return _kv_bytes(shape, setting, shape.config.kv_heads, _slots)


def cache_bytes(model: Model, setting: Setting) -> int:
  """Bytes of the cache of one device that holds it all.

  They are those of `cache.predicted_bytes`.
  """
  rows = setting.batch_size
  return rows * sequence_bytes(model, setting) + _counter_bytes(setting)


def device_cache_bytes(model: Model, setting: Setting) -> int:
  """Bytes of the cache on each device."""
  shape = as_shape(model)
  rows = _device_rows(setting)
  size = _kv_bytes(shape, setting, _held_kv_heads(shape, setting), _slots)
  return rows * size + _counter_bytes(setting)


def kv_copies(model: Model, setting: Setting) -> float:
  """How many devices hold a token's keys and values, on average."""
  shape = as_shape(model)
  held = sum(_held_kv_heads(shape, setting))
  if setting.kv_split == 'batch':
    return 1.0
  return setting.tensor_parallel * held / sum(shape.config.kv_heads)


def step_traffic(model: Model, setting: Setting) -> Traffic:
  """Counts one step of decoding, a token for each sequence.

  Left out are communication between devices, activations, the few rows of an
  embedding that are looked up, and what softmax and norms compute.
  """
  shape = as_shape(model)
  parts = [(part, _held_size(part, shape, setting)) for part in _parts(shape)]
  rows, held = _device_rows(setting), _held_kv_heads(shape, setting)
  queries = rows * shape.config.num_heads
  if setting.kv_split != 'batch':
    queries //= setting.tensor_parallel
  pairs = queries * sum(_tokens_read(shape, setting))
  products = setting.batch_size * sum(n for part, n in parts if part.product)
  return Traffic(
    _weight_itemsize(shape, setting) * sum(n for part, n in parts if part.read),
    rows * _kv_bytes(shape, setting, held, _tokens_read),
    2 * products + 4 * pairs * shape.config.head_dim,
  )


def as_shape(model: Model) -> Shape:
  """The shape of a config, or the shape itself."""
  return model if isinstance(model, Shape) else Shape(model)


def compute_dtype(model: Model, setting: Setting) -> str:
  """The type of the products."""
  return setting.dtype or as_shape(model).config.dtype


def _weight_itemsize(shape, setting):
  return ITEMSIZE[setting.weight_dtype or compute_dtype(shape, setting)]


def _parts(shape):
  """All parameters."""
  c = shape.config
  V, D, tied = c.vocab_size, c.embed_dim, c.tie_embeddings
  others = _norm_size(c) + shape.extra_params
  parts = [
    _Part('vocab', V, D, read=tied, product=tied),
    _Part(None, 1, others, product=False),
  ]
  if not tied:
    parts.append(_Part('vocab', V, D))
    parts.append(_Part('vocab', V, int(c.head_bias), product=False))
  if c.position == 'learned':
    parts.append(_Part(None, c.max_len, D, read=False, product=False))
  for num_kv_heads, count in collections.Counter(c.kv_heads).items():
    layer = _layer_parts(shape, num_kv_heads)
    parts += [part._replace(copies=count) for part in layer]
  return parts


def _layer_parts(shape, num_kv_heads):
  c = shape.config
  D, N, K, H, F = c.embed_dim, c.num_heads, num_kv_heads, c.head_dim, c.mlp_dim
  norms = 4 if c.norm_position == 'both' else 2 - c.shared_norm
  others = norms * _norm_size(c) + D * (c.out_bias + c.mlp_bias)
  if c.qk_norm:
    others += 2 * H if c.qk_norm_axes == 'head' else (N + K) * H
  up = 2 if c.gated else 1
  parts = [
    _Part('heads', N, 2 * D * H),  # query and out
    _Part('heads', N, c.qkv_bias * H, product=False),
    _Part('kv_heads', K, 2 * D * H),
    _Part('kv_heads', K, c.qkv_bias * 2 * H, product=False),
    _Part('mlp', F, (up + 1) * D),
    _Part('mlp', F, c.mlp_bias * up, product=False),
    _Part(None, 1, others, product=False),
  ]
  if shape.cross_attention:
    parts += [
      _Part('heads', N, 2 * D * H),
      # The source is projected once, before decoding.
      _Part('kv_heads', K, 2 * D * H, read=False, product=False),
      _Part(None, 1, _norm_size(c), product=False),
    ]
  return parts


def _norm_size(c):
  return c.embed_dim * (2 if c.norm == 'layernorm' else 1)


def _held_size(part, shape, setting):
  """Numbers of a part on one device; the last may have fewer."""
  return part.copies * _held_units(part, shape, setting) * part.unit


def _held_units(part, shape, setting):
  _check_devices(shape, setting)
  devices = setting.tensor_parallel
  if part.axis is None:
    return part.units
  if part.axis != 'kv_heads':
    return -(-part.units // devices)
  if setting.kv_split == 'needed':
    return _needed_heads(part.units, shape, devices)
  # All layers are laid out alike.
  if any(k % devices for k in shape.config.kv_heads):
    return part.units
  return part.units // devices


def _held_kv_heads(shape, setting):
  """KV heads of each layer whose cache one device holds."""
  _check_devices(shape, setting)
  heads, devices = shape.config.kv_heads, setting.tensor_parallel
  if setting.kv_split == 'batch':
    return heads
  if setting.kv_split == 'needed':
    return tuple(_needed_heads(k, shape, devices) for k in heads)
  return tuple(k if k % devices else k // devices for k in heads)


def _needed_heads(num_kv_heads, shape, devices):
  """KV heads that the query heads of a device read, the most of any."""
  heads = shape.config.num_heads
  local, group = heads // devices, heads // num_kv_heads
  firsts = range(0, heads, local)
  return max((i + local - 1) // group - i // group + 1 for i in firsts)


def _check_devices(shape, setting):
  heads = shape.config.num_heads
  if heads % setting.tensor_parallel:
    raise ValueError(
      f'num_heads={heads} must be a multiple of tensor_parallel='
      f'{setting.tensor_parallel}; choose one of {divisors(heads)}.'
    )


def _device_rows(setting):
  """Sequences whose cache one device holds."""
  if setting.kv_split == 'batch':
    return -(-setting.batch_size // setting.tensor_parallel)
  return setting.batch_size


def _counter_bytes(setting):
  return 4 + 4 * setting.batch_size  # KVCache.length and starts, int32


def _kv_bytes(shape, setting, heads, tokens):
  """Bytes of KV heads of each layer over tokens(shape, setting) of each."""
  counts = zip(heads, tokens(shape, setting), strict=True)
  itemsize, scale = _kv_itemsize(shape, setting)
  per_head = 2 * (shape.config.head_dim * itemsize + scale)
  return sum(k * n for k, n in counts) * per_head


def _kv_itemsize(shape, setting):
  """Bytes of a number in the cache, and of a scale."""
  if setting.kind == 'int8':
    return ITEMSIZE['int8'], 4
  return ITEMSIZE[setting.cache_dtype or compute_dtype(shape, setting)], 0


def _slots(shape, setting):
  """Tokens of each layer that the cache has room for."""
  if setting.kind == 'ring':
    if not any(shape.config.windows):
      raise ValueError(
        'a ring cache keeps a sliding window, but this model has none and sees '
        'all tokens; choose the kind full.'
      )
    return _tokens_read(shape, setting)
  source = setting.source_len if shape.cross_attention else 0
  return (setting.context + source,) * shape.config.num_layers


def _tokens_read(shape, setting):
  """Tokens of each layer that one step attends to."""
  source = setting.source_len if shape.cross_attention else 0
  context = setting.context
  return tuple(
    min(w or context, context) + source for w in shape.config.windows
  )
