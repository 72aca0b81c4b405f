"""The KV cache: what is kept of the tokens seen, an array pytree to scan over.

One `LayerCache` per layer, stored at that layer's own number of KV heads and
never repeated; the layers are a tuple, because one stacked array would be
copied at each step of a scan. Under donation a write is in place. On CPU the
slots of a long cache are in spans, arrays of their own: a part of an array must
be copied to be read, but an array can be left out.

Rows of a batch are right-aligned: the token in slot s of row b has position
s - starts[b], what lies left of starts[b] is padding, and all rows write their
next token to the same slot, `length`. What is visible follows from these
numbers, never from token ids.

A cache takes its memory from three choices, and `predicted_bytes` says how
much: `full` has a slot for each token; `ring` only for the tokens that a
sliding window still shows, and overwrites the oldest; `int8` is `full` with
one byte per number and a float32 scale per token and KV head.

Shape comments: B batch, T new tokens, S slots, K KV heads, H head dim; n tiles
of t slots, which are all S.
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
LAYOUTS = {
  'split': ('BKHS', 'BKSH'),
  'tiled': ('BKnHt', 'BKSH'),
  'token': ('BSKH', 'BSKH'),
}
PLATFORM_LAYOUTS = {'cpu': 'tiled'}  # elsewhere 'token'

# Slots of a tile of keys. A product for each tile and one token is faster on CPU
# than one for all keys, but wants a copy of the queries for each; where it pays,
# `_fits_tiles` says. In bfloat16 it is faster to read the values so too. Steps of
# M110 (experiments/decode_cost.py, 8 rows) against PLATFORM_LAYOUTS of 'split', 2
# cores of an AMD EPYC (Zen 4), 2026-11-30: 0.85 to 0.93 of the time with 4 and 6 KV heads at
# 2,048 and 8,192 tokens, 0.93 to 0.98 with 12 at up to 512; in bfloat16 0.70 with
# 12 KV heads at 128 and 0.49 at 2,048, 0.87 with 4 at 2,048.
TILE = 64

# Slots at which the spans of a layer end: SPAN, 8 SPAN and so on, as far as three
# times as many follow, and with at least SPAN_BYTES, because a further span
# costs some microseconds. Steps as above in float32, 2026-11-30 and 12-01, against
# one span for all (SPAN_BYTES = 1 << 42): with 12 and 4 KV heads 0.75 and 0.95 of the time where 200 of
# 8,192 slots are live, 0.64 and 0.88 where 3,000 are, 1.01 to 1.04 where all are;
# at 2,112 slots, all live, 1.04, which nothing makes up for: caches below SPANNED
# are one span.
SPAN = 256
SPAN_BYTES = 1 << 22
SPANNED = 4096


@struct.dataclass
class LayerCache:
  """Keys and values of one layer, axes as LAYOUTS says, and their scales.

  They are of a span of the slots, S of them from `first` on.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None  # float32; int8 only
  v_scale: jax.Array | None
  layout: str = struct.field(pytree_node=False)
  ring: bool = struct.field(pytree_node=False)  # slot = token index % S
  first: int = struct.field(pytree_node=False, default=0)
  more: LayerCache | None = None  # the slots that follow

  @property
  def k_axes(self) -> str:
    """Axes of k, a letter each."""
    return LAYOUTS[self.layout][0]

  @property
  def v_axes(self) -> str:
    """Axes of v."""
    return LAYOUTS[self.layout][1]

  @property
  def scale_axes(self) -> str:
    """Axes of k_scale and v_scale."""
    return self.v_axes.replace('H', '')

  @property
  def own_slots(self) -> int:
    """S."""
    return self.v.shape[self.v_axes.index('S')]

  @property
  def num_slots(self) -> int:
    """Slots of this span and all that follow."""
    return self.own_slots + (self.more.num_slots if self.more else 0)


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


def whole_tiles(num_slots: int) -> int:
  """The next number of slots that tiles divide: a cache is then fastest."""
  return -(-num_slots // TILE) * TILE


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
    max_len: slots: the longest prompt and all that is generated after it;
      `whole_tiles` of them are fastest.
    kind: one of KINDS; 'ring' needs `config.sliding_window`, and keeps all
      slots of layers without one.
    dtype: type of the stored numbers, `config.dtype` unless given. The kind
      'int8' has its own.
    layout: one of LAYOUTS, the platform's unless given. Of 'tiled' layers are
      'split' where tiles do not fit or do not pay.

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
    sizes = {
      'B': batch_size,
      'S': num_slots,
      'H': config.head_dim,
      'K': num_kv_heads,
      'n': num_slots // TILE,
      't': TILE,
    }
    return jnp.zeros([sizes[axis] for axis in axes], dtype)

  def span(num_kv_heads, first, ends, ring):
    """The span from `first` to the first of `ends`, and the ones after it."""
    num_slots = ends[0] - first
    own = layout
    if layout == 'tiled' and not _fits_tiles(config, num_kv_heads, num_slots):
      own = 'split'
    k_axes, v_axes = LAYOUTS[own]
    shape = (num_kv_heads, num_slots)
    scales = [
      zeros(v_axes.replace('H', ''), *shape, jnp.float32)
      if kind == 'int8'
      else None
      for _ in range(2)
    ]
    return LayerCache(
      zeros(k_axes, *shape, dtype),
      zeros(v_axes, *shape, dtype),
      *scales,
      layout=own,
      ring=ring,
      first=first,
      more=span(num_kv_heads, ends[0], ends[1:], ring) if ends[1:] else None,
    )

  layers = []
  for num_kv_heads, window, num_slots in zip(
    config.kv_heads, config.windows, slots, strict=True
  ):
    # A window that is never left needs no wrapping.
    ring = kind == 'ring' and window is not None and window <= max_len
    ends = [num_slots]
    if layout != 'token' and not ring:
      slot_numbers = 2 * batch_size * num_kv_heads * config.head_dim
      ends = _span_ends(num_slots, slot_numbers, dtype)
    layers.append(span(num_kv_heads, 0, ends, ring))
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
  v_axes, scale_axes = layer.v_axes, layer.scale_axes
  alone = layer.first == 0 and layer.more is None

  def put(old, new, axes, put_bits=_put):
    if old is None:
      return None
    letters = 'BSKH'[: new.ndim]
    new = new.transpose([letters.index(axis) for axis in axes])
    at = (axes.index('S'), length - layer.first, layer.ring, alone)
    return _numbers(put_bits(_bits(old), _bits(new), *at), old.dtype)

  new = (k, v, k_scale, v_scale)
  return layer.replace(
    k=put(layer.k, k, 'BKHS', _put_in_tiles)
    if layer.layout == 'tiled'
    else put(layer.k, k, layer.k_axes),
    v=put(layer.v, v, v_axes),
    k_scale=put(layer.k_scale, k_scale, scale_axes),
    v_scale=put(layer.v_scale, v_scale, scale_axes),
    more=write(layer.more, *new, length) if layer.more else None,
  )


def read(
  layer: LayerCache, first: jax.Array | int, count: int
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Slots [first, first + count) of a span as stored: k, v and their scales.

  Args:
    layer: of any kind.
    first: counted from the span's own, a multiple of TILE if it is tiled.
    count: another.
  """

  def cut(x, first, count, axis):
    if x is None or count == x.shape[axis]:
      return x
    # Or else, before a loop over blocks, all of x would be turned to bits.
    x, first = lax.optimization_barrier((x, first))
    cut = lax.dynamic_slice_in_dim(_bits(x), first, count, axis)
    return _numbers(lax.optimization_barrier(cut), x.dtype)

  slots = (first, count)
  if layer.layout == 'tiled':
    k = cut(layer.k, first // TILE, count // TILE, layer.k_axes.index('n'))
  else:
    k = cut(layer.k, *slots, layer.k_axes.index('S'))
  return (
    k,
    cut(layer.v, *slots, layer.v_axes.index('S')),
    cut(layer.k_scale, *slots, layer.scale_axes.index('S')),
    cut(layer.v_scale, *slots, layer.scale_axes.index('S')),
  )


def join_tiles(k: jax.Array) -> jax.Array:
  """[B, K, n, H, t] -> [B, K, H, S]."""
  B, K, n, H, t = k.shape
  return k.swapaxes(2, 3).reshape(B, K, H, n * t)


def _bits(x):
  """Numbers to be moved only; XLA on CPU would move bfloat16 as float32."""
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


def _fits_tiles(config, num_kv_heads, num_slots):
  """Whether a layer's keys fill tiles, and are faster in them."""
  if num_slots % TILE:
    return False
  if config.dtype != 'float32':
    return True
  group = config.num_heads // num_kv_heads
  if group == 1:
    return num_slots * config.head_dim <= 1 << 15
  return group <= 4 or num_slots <= 1024


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


def _span_ends(num_slots, slot_numbers, dtype):
  """Where the spans of a layer end that keeps so many numbers for a slot."""
  ends, end = [], SPAN
  # XLA on CPU would write all of a span that no new token is in where it is of
  # bfloat16; of float16 nothing was won.
  if num_slots < SPANNED or dtype.itemsize == 2:
    return [num_slots]
  while 4 * end <= num_slots:
    if end * slot_numbers * dtype.itemsize >= SPAN_BYTES:
      ends.append(end)
    end *= 8
  return [*ends, num_slots]


def _put_in_tiles(old, new, axis, slot, ring, alone):
  """`_put` of [B, K, H, T] into tiles [B, K, n, H, t]."""
  B, K, n, H, t = old.shape
  T = new.shape[axis]
  cut = lambda x: x.reshape(B, K, H, -1, t).swapaxes(2, 3)
  if T == 1:
    slot, new = slot % (n * t) if ring else slot, new[:, :, None]
    zero = jnp.zeros_like(slot)
    at = (zero, zero, slot // t, zero, slot % t)
    if not alone:
      inside = (slot >= 0) & (slot < n * t)
      at = jax.tree.map(lambda i: jnp.where(inside, i, zero), at)
      held = lax.dynamic_slice(old, at, new.shape)
      new = jnp.where(inside, new, held)
    return lax.dynamic_update_slice(old, new, at)
  if ring:
    return cut(_put(join_tiles(old), new, axis, slot, ring, alone))
  # As many tiles as T tokens may lie in, from whichever slot of one on.
  count = min(n, (T - 2) // t + 2)
  first = jnp.clip(slot // t, 0, n - count)
  part = join_tiles(lax.dynamic_slice_in_dim(old, first, count, 2))
  part = _put(part, new, axis, slot - first * t, ring, alone)
  return lax.dynamic_update_slice_in_dim(old, cut(part), first, 2)


def _put(old, new, axis, slot, ring, alone):
  """Writes `new` into `old` along the slot axis, from `slot` on.

  Of a ring the slot is an index of a token. Where `old` is not alone but one of
  several spans, `slot` may lie before or behind it.
  """
  size, count = old.shape[axis], new.shape[axis]
  if not ring and not alone:
    return _put_what_is_inside(old, new, axis, slot)
  if not ring or count == 1:
    slot = slot % size if ring else slot
    return lax.dynamic_update_slice_in_dim(old, new, slot, axis)
  # The last tokens, turned to where they belong, over what they replace.
  kept = min(size, count)
  new = lax.slice_in_dim(new, count - kept, count, axis=axis)
  widths = [(0, size - kept if i == axis else 0) for i in range(old.ndim)]
  slot = (slot + count - kept) % size
  new = jnp.roll(jnp.pad(new, widths), slot, axis)
  shape = [size if i == axis else 1 for i in range(old.ndim)]
  fresh = jnp.roll(jnp.arange(size) < kept, slot).reshape(shape)
  return jnp.where(fresh, new, old)


def _put_what_is_inside(old, new, axis, slot):
  """Writes those of `new` that `old` has slots for, see `_put`."""
  size, count = old.shape[axis], new.shape[axis]
  width = min(size, count)
  slot = jnp.clip(slot, -count, size)
  at = jnp.clip(slot, 0, size - width)  # the part of `old` that is replaced
  index = at - slot + jnp.arange(width, dtype=jnp.int32)  # in `new`
  if count > 1:
    widths = [(width if i == axis else 0,) * 2 for i in range(new.ndim)]
    new = lax.dynamic_slice_in_dim(
      jnp.pad(new, widths), at - slot + width, width, axis
    )
  inside = (index >= 0) & (index < count)
  inside = inside.reshape([-1 if i == axis else 1 for i in range(old.ndim)])
  held = lax.dynamic_slice_in_dim(old, at, width, axis)
  part = jnp.where(inside, new, held)
  return lax.dynamic_update_slice_in_dim(old, part, at, axis)
