"""The KV cache: what is kept of the tokens seen, an array pytree to scan over.

One `LayerCache` per layer, stored at that layer's own number of KV heads and
never repeated; the layers are a tuple, because one stacked array would be
copied at each step of a scan. Under donation a write is in place.

Rows of a batch are right-aligned: the token in slot s of row b has position
s - starts[b], what lies left of starts[b] is padding, and all rows write their
next token to the same slot, `length`. What is visible follows from these
numbers, never from token ids.

A cache takes its memory from three choices, and `predicted_bytes` says how
much: `full` has a slot for each token; `ring` only for the tokens that a
sliding window still shows, and overwrites the oldest; `int8` is `full` with
one byte per number and a float32 scale per token and KV head.

Shape comments: B batch, T new tokens, S slots, K KV heads, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

KINDS = ('full', 'ring', 'int8')

# Axes of stored keys and values. Products of one token with all keys are
# fastest on CPU with the slots innermost, and those of the weights with all
# values with the head dim innermost; a GPU reads a token's heads together.
LAYOUTS = {'split': ('BKHS', 'BKSH'), 'token': ('BSKH', 'BSKH')}
PLATFORM_LAYOUTS = {'cpu': 'split'}  # elsewhere 'token'


@struct.dataclass
class LayerCache:
  """Keys and values of one layer, axes as LAYOUTS says, and their scales."""

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None  # float32, the axes of k without H; int8 only
  v_scale: jax.Array | None
  layout: str = struct.field(pytree_node=False)
  ring: bool = struct.field(pytree_node=False)  # slot = token index % S

  @property
  def k_axes(self) -> str:
    """Axes of k, a letter each."""
    return LAYOUTS[self.layout][0]

  @property
  def v_axes(self) -> str:
    """Axes of v."""
    return LAYOUTS[self.layout][1]

  @property
  def num_slots(self) -> int:
    """S."""
    return self.k.shape[self.k_axes.index('S')]


@struct.dataclass
class KVCache:
  """All layers, and where in them the rows of the batch lie."""

  layers: tuple[LayerCache, ...]
  length: jax.Array  # [] int32, slots written so far, counting padding
  starts: jax.Array  # [B] int32, the first slot of each row that is no padding

  @property
  def capacity(self) -> int | None:
    """Slots that can be written; None where all layers are rings."""
    sizes = [layer.num_slots for layer in self.layers if not layer.ring]
    return min(sizes, default=None)


def default_layout() -> str:
  """The layout of this platform."""
  return PLATFORM_LAYOUTS.get(jax.default_backend(), 'token')


def init_cache(
  config,
  batch_size: int,
  max_len: int,
  kind: str = 'full',
  dtype=None,
  layout: str | None = None,
) -> KVCache:
  """Makes an empty cache.

  Args:
    config: a ModelConfig.
    batch_size: rows.
    max_len: slots: the longest prompt and all that is generated after it.
    kind: one of KINDS; 'ring' needs `config.sliding_window`, and keeps all
      slots of layers without one.
    dtype: type of the stored numbers, `config.dtype` unless given. The kind
      'int8' has its own.
    layout: one of LAYOUTS, the platform's unless given.

  Raises:
    ValueError: the model or a size does not fit the kind.
  """
  slots, dtype = _plan(config, batch_size, max_len, kind, dtype)
  layout = default_layout() if layout is None else layout
  if layout not in LAYOUTS:
    raise ValueError(
      f'layout={layout!r} is unknown; choose one of {tuple(LAYOUTS)}.'
    )

  def zeros(axes, num_kv_heads, num_slots, dtype):
    sizes = {'B': batch_size, 'S': num_slots, 'H': config.head_dim}
    shape = tuple((sizes | {'K': num_kv_heads})[axis] for axis in axes)
    return jnp.zeros(shape, dtype)

  k_axes, v_axes = LAYOUTS[layout]
  layers = []
  for num_kv_heads, window, num_slots in zip(
    config.kv_heads, config.windows, slots, strict=True
  ):
    shape = (num_kv_heads, num_slots)
    scales = [
      zeros(axes.replace('H', ''), *shape, jnp.float32)
      if kind == 'int8'
      else None
      for axes in (k_axes, v_axes)
    ]
    layers.append(
      LayerCache(
        zeros(k_axes, *shape, dtype),
        zeros(v_axes, *shape, dtype),
        *scales,
        layout=layout,
        # A window that is never left needs no wrapping.
        ring=kind == 'ring' and window is not None and window <= max_len,
      )
    )
  return KVCache(
    layers=tuple(layers),
    length=jnp.zeros((), jnp.int32),
    starts=jnp.zeros((batch_size,), jnp.int32),
  )


def cache_bytes(cache: KVCache) -> int:
  """Bytes of the arrays of a cache (or of its shapes)."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def predicted_bytes(
  config, batch_size: int, max_len: int, kind: str = 'full', dtype=None
) -> int:
  """Bytes of the cache that `init_cache` makes of the same arguments.

  Keys and values of a token take 2 K (H itemsize + scale) bytes in a layer of
  K KV heads; the scale is 4 bytes in an int8 cache, else nothing.
  """
  slots, dtype = _plan(config, batch_size, max_len, kind, dtype)
  scale = 4 if kind == 'int8' else 0
  per_head = 2 * (config.head_dim * dtype.itemsize + scale)
  counters = 4 + 4 * batch_size  # length and starts
  heads = sum(k * n for k, n in zip(config.kv_heads, slots, strict=True))
  return batch_size * heads * per_head + counters


def check_room(cache: KVCache, num_tokens: int) -> None:
  """Raises unless num_tokens more fit; waits for the cache's length.

  A write beyond the end would not fail, but overwrite the last slots.
  """
  capacity = cache.capacity
  if capacity is None:
    return
  length = 0
  if not isinstance(cache.length, jax.core.Tracer):
    length = int(cache.length)
  if length + num_tokens > capacity:
    raise ValueError(
      f'{length + num_tokens} tokens ({length} in the cache and {num_tokens} '
      f'more) exceed its max_len={capacity}; make a larger cache or use fewer '
      'tokens.'
    )


def encode(layer: LayerCache, x: jax.Array) -> tuple[jax.Array, ...]:
  """Turns x [B, T, K, H] into stored numbers and scales [B, T, K] or None."""
  if layer.k_scale is None:
    return x.astype(layer.k.dtype), None
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=-1) * (1 / 127)
  divisor = jnp.where(scale > 0, scale, 1.0)
  return jnp.round(x / divisor[..., None]).astype(jnp.int8), scale


def decode(stored: jax.Array, scale: jax.Array | None, dtype) -> jax.Array:
  """Undoes `encode`, up to its rounding."""
  if scale is None:
    return stored.astype(dtype)
  return (stored.astype(jnp.float32) * scale[..., None]).astype(dtype)


def write(
  layer: LayerCache,
  k: jax.Array,
  v: jax.Array,
  k_scale: jax.Array | None,
  v_scale: jax.Array | None,
  length: jax.Array,
) -> LayerCache:
  """Stores T encoded tokens from slot `length` on, around the end of a ring.

  Args:
    layer: of any kind. It must have room, see `check_room`.
    k: [B, T, K, H].
    v: [B, T, K, H].
    k_scale: [B, T, K], or None.
    v_scale: like k_scale.
    length: [] int32, slots written before.
  """
  k_axes, v_axes = layer.k_axes, layer.v_axes

  def put(old, new, axes):
    if old is None:
      return None
    letters = 'BSKH' if 'H' in axes else 'BSK'
    new = new.transpose([letters.index(axis) for axis in axes])
    axis = axes.index('S')
    new = _put(_bits(old), _bits(new), axis, length, layer.ring)
    return _numbers(new, old.dtype)

  return layer.replace(
    k=put(layer.k, k, k_axes),
    v=put(layer.v, v, v_axes),
    k_scale=put(layer.k_scale, k_scale, k_axes.replace('H', '')),
    v_scale=put(layer.v_scale, v_scale, v_axes.replace('H', '')),
  )


def read(
  layer: LayerCache, first: jax.Array | int, count: int
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Slots [first, first + count) as stored: k, v and their scales."""

  def cut(x, axes):
    if x is None or count == layer.num_slots:
      return x
    cut = lax.dynamic_slice_in_dim(_bits(x), first, count, axes.index('S'))
    return _numbers(lax.optimization_barrier(cut), x.dtype)

  return (
    cut(layer.k, layer.k_axes),
    cut(layer.v, layer.v_axes),
    cut(layer.k_scale, layer.k_axes.replace('H', '')),
    cut(layer.v_scale, layer.v_axes.replace('H', '')),
  )


def _bits(x):
  """Numbers to be moved only; XLA on CPU would move bfloat16 as float32.

  A loop over blocks still takes a copy in 16 bits instead of one in 32.
  """
  if x.dtype == jnp.bfloat16:
    return lax.bitcast_convert_type(x, jnp.uint16)
  return x


def _numbers(bits, dtype):
  """Undoes `_bits`."""
  if bits.dtype == dtype:
    return bits
  return lax.bitcast_convert_type(bits, dtype)


def token_index(
  layer: LayerCache, slots: jax.Array, length: jax.Array
) -> jax.Array:
  """The index of the token that each slot holds; negative or >= length: none.

  Args:
    layer: of any kind.
    slots: [n] int32.
    length: [] int32, tokens written.
  """
  if not layer.ring:
    return slots
  # The last of the tokens that were written to the slot.
  return length - 1 - jnp.mod(length - 1 - slots, layer.num_slots)


def _plan(config, batch_size, max_len, kind, dtype):
  """Checks a cache's arguments, returns the slots of each layer and the type."""
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r} is unknown; choose one of {KINDS}.')
  for name, value in (('batch_size', batch_size), ('max_len', max_len)):
    if value < 1:
      raise ValueError(f'{name}={value} of a cache must be at least 1.')
  if kind == 'int8':
    if dtype not in (None, 'int8', jnp.int8):
      raise ValueError(
        f'dtype={dtype} does not fit an int8 cache; leave it '
        'out, or choose the kind full.'
      )
    return (max_len,) * config.num_layers, jnp.dtype(jnp.int8)
  given = config.dtype if dtype is None else dtype
  try:
    dtype = jnp.dtype(given)
  except TypeError:
    dtype = jnp.dtype(bool)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f'dtype={given} of a cache must be a float; for one byte per '
      'number choose the kind int8.'
    )
  if kind == 'full':
    return (max_len,) * config.num_layers, dtype
  if config.sliding_window is None:
    raise ValueError(
      'a ring cache keeps a sliding window, but this model has '
      'sliding_window=None and sees all tokens; choose the kind full.'
    )
  return tuple(min(w or max_len, max_len) for w in config.windows), dtype


def _put(old, new, axis, length, ring):
  """Writes `new` into `old` along the slot axis, from slot `length` on."""
  size, count = old.shape[axis], new.shape[axis]
  if not ring or count == 1:
    slot = length % size if ring else length
    return lax.dynamic_update_slice_in_dim(old, new, slot, axis)
  # The last tokens, turned to where they belong, over what they replace.
  kept = min(size, count)
  new = lax.slice_in_dim(new, count - kept, count, axis=axis)
  widths = [(0, size - kept if i == axis else 0) for i in range(old.ndim)]
  slot = (length + count - kept) % size
  new = jnp.roll(jnp.pad(new, widths), slot, axis)
  shape = [size if i == axis else 1 for i in range(old.ndim)]
  fresh = jnp.roll(jnp.arange(size) < kept, slot).reshape(shape)
  return jnp.where(fresh, new, old)
