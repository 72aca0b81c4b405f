"""The decoder: modules own parameters, the arithmetic is `rope.py`'s and
`attention.py`'s.

Every parameter tree has the same four attention kernels, query, key, value
and out, whatever num_kv_heads is: converting a checkpoint changes the shape
of two leaves per layer and nothing else. The cache of a decoding model is an
argument and a return value.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from gqa import attention, cached_attention, linear, rope, sharding
from gqa.cache import KVCache, LayerCache, check_room
from gqa.config import ModelConfig

Params = dict[str, Any]

ACTIVATIONS = {
  'swiglu': jax.nn.silu,
  'geglu': jax.nn.gelu,
  'gelu': jax.nn.gelu,
  'gelu_exact': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu,
}


OUT_INPUTS = 2  # axes that attention's output projection contracts: heads


class Projection(nn.Module):
  """A kernel contracted with the trailing axes of its input, and a bias.

  `shape` is the kernel's; its first `inputs` axes are contracted. Parameters
  are float32. `decoding_params` may put the kernel's rows in its place.
  """

  shape: tuple[int, ...]
  inputs: int = 1
  use_bias: bool = False
  init_scale: float = 1.0

  def setup(self):
    fan_in = math.prod(self.shape[: self.inputs])
    init = nn.initializers.normal(self.init_scale * fan_in**-0.5)
    self.rows = self.get_variable('params', 'rows')
    if self.rows is None:
      self.kernel = self.param('kernel', init, self.shape, jnp.float32)
    if self.use_bias:
      self.bias = self.param(
        'bias', nn.initializers.zeros, self.shape[self.inputs :], jnp.float32
      )

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., inputs] -> [..., outputs], in x's dtype."""
    if self.rows is None:
      y = linear.project(x, self.kernel, self.inputs)
    else:
      y = linear.project_rows(x, self.rows, self.inputs)
    if not self.use_bias:
      return y
    shape = (1,) * (y.ndim - self.bias.ndim) + self.bias.shape
    return y + self.bias.astype(y.dtype).reshape(shape)


class Norm(nn.Module):
  """RMSNorm, or LayerNorm with bias, over the last axis; in float32.

  With `offset` the parameter is the scale's difference from 1.
  """

  kind: str
  eps: float
  offset: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., size] -> the same, in x's dtype."""
    shape = x.shape[-1:]
    init = nn.initializers.zeros if self.offset else nn.initializers.ones
    scale = self.param('scale', init, shape, jnp.float32)
    if self.offset:
      scale = scale + 1.0
    y = x.astype(jnp.float32)
    if self.kind == 'layernorm':
      y = y - y.mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + self.eps)
    y = y * scale.reshape((1,) * (y.ndim - 1) + shape)
    if self.kind == 'layernorm':
      bias = self.param('bias', nn.initializers.zeros, shape, jnp.float32)
      y = y + bias.reshape((1,) * (y.ndim - 1) + shape)
    return y.astype(x.dtype)


def norm(c: ModelConfig, name: str, kind: str | None = None) -> Norm:
  """A norm of the model, of its own kind unless given."""
  return Norm(kind or c.norm, c.norm_eps, c.norm_offset, name=name)


class Past(NamedTuple):
  """What a layer attends to besides its input."""

  layer: LayerCache
  length: jax.Array  # of the KVCache, as starts
  starts: jax.Array
  fresh: bool  # whether length is known to be 0
  last_only: bool  # whether only the last token's output is asked for

  @property
  def arrays(self):
    """The arguments of `cached_attention.attend` after q, k and v."""
    return self.layer, self.length, self.starts


class Attention(nn.Module):
  """Projects to heads, attends, projects back (Ainslie et al., section 2.2)."""

  config: ModelConfig
  num_kv_heads: int
  window: int | None = None  # as in `attention.attention`

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    rotation: rope.Rotation | None,
    segments: jax.Array | None = None,
    past: Past | None = None,
  ) -> tuple[jax.Array, LayerCache | None]:
    """[B, T, D] -> [B, T, D], and the cache of `past` with T more tokens.

    [B, 1, D] where `past.last_only`.
    """
    c = self.config
    D, N, K, H = c.embed_dim, c.num_heads, self.num_kv_heads, c.head_dim
    query = Projection((D, N, H), use_bias=c.qkv_bias, name='query')
    key = Projection((D, K, H), use_bias=c.qkv_bias, name='key')
    value = Projection((D, K, H), use_bias=c.qkv_bias, name='value')
    last_only = past is not None and past.last_only
    q, k, v = query(x[:, -1:] if last_only else x), key(x), value(x)
    if c.qk_norm:
      q = self._normalize(q, 'query_norm')
      k = self._normalize(k, 'key_norm')
    if rotation is not None:
      q = rope.apply_rope(q, rotation.last() if last_only else rotation)
      k = rope.apply_rope(k, rotation)
    q = q * jnp.asarray((c.query_scale_dim or H) ** -0.5, q.dtype)
    q = sharding.constrain(q, ('batch', None, 'heads', None))
    k = sharding.constrain(k, ('batch', None, 'kv_heads', None))
    v = sharding.constrain(v, ('batch', None, 'kv_heads', None))
    options = dict(
      window=self.window,
      softcap=c.attention_softcap,
      implementation=c.attention,
    )
    layer = None
    if past is None:
      out = attention.attention(q, k, v, segments, **options)
    else:
      out, layer = cached_attention.attend(
        q, k, v, *past.arrays, fresh=past.fresh, **options
      )
      layer = _constrain(layer)
    project = Projection(
      (N, H, D),
      inputs=OUT_INPUTS,
      use_bias=c.out_bias,
      init_scale=(2 * c.num_layers) ** -0.5,
      name='out',
    )
    return project(out), layer

  def _normalize(self, x, name):
    """The norm of queries or keys [B, T, heads, H]."""
    if self.config.qk_norm_axes == 'head':
      return norm(self.config, name, 'rmsnorm')(x)
    joined = x.reshape(*x.shape[:2], -1)
    return norm(self.config, name, 'rmsnorm')(joined).reshape(x.shape)


def is_local(c: ModelConfig, window: int | None) -> bool:
  """Whether a layer of this window has the angles of `rope_local_theta`."""
  return window is not None and c.rope_local_theta is not None


def _constrain(layer: LayerCache) -> LayerCache:
  """Lays out a layer's cache like the keys and values that it takes."""
  names = {'B': 'batch', 'K': 'kv_heads'}
  constrain = lambda x, axes: sharding.constrain(x, [*map(names.get, axes)])
  return layer.replace(
    k=constrain(layer.k, layer.k_axes),
    v=constrain(layer.v, layer.v_axes),
    more=_constrain(layer.more) if layer.more else None,
  )


class Mlp(nn.Module):
  """Gated (Shazeer 2020) or plain two-layer perceptron."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[B, T, D] -> [B, T, D]."""
    c = self.config
    D, F, bias = c.embed_dim, c.mlp_dim, c.mlp_bias
    activation = ACTIVATIONS[c.mlp]
    up = Projection((D, F), use_bias=bias, name='up')
    if c.gated:
      gate = Projection((D, F), use_bias=bias, name='gate')
      hidden = gated(activation, gate(x), up(x))
    else:
      hidden = activation(up(x))
    return Projection(
      (F, D),
      use_bias=bias,
      init_scale=(2 * c.num_layers) ** -0.5,
      name='down',
    )(hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation, gate: jax.Array, up: jax.Array) -> jax.Array:
  """activation(gate) * up, which keeps nothing else for its gradient."""
  return activation(gate) * up


def _gated_fwd(activation, gate, up):
  return gated(activation, gate, up), (gate, up)


def _gated_bwd(activation, residuals, grad):
  gate, up = residuals
  y, pull = jax.vjp(activation, gate)
  return *pull(grad * up), grad * y


gated.defvjp(_gated_fwd, _gated_bwd)


class Layer(nn.Module):
  """Attention and MLP around the residual stream, with their norms."""

  config: ModelConfig
  num_kv_heads: int
  window: int | None = None
  deterministic: bool = True

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    rotation: rope.Rotation | None,
    segments: jax.Array | None = None,
    past: Past | None = None,
  ) -> tuple[jax.Array, LayerCache | None]:
    """[B, T, D] -> [B, T, D], and the cache of `past` with T more tokens.

    [B, 1, D] where `past.last_only`.
    """
    c = self.config
    drop = nn.Dropout(c.dropout, deterministic=self.deterministic)
    before = c.norm_position != 'post'
    after = c.norm_position != 'pre'
    normed = norm(c, 'attention_norm')(x) if before else x
    attend = Attention(c, self.num_kv_heads, self.window, name='attention')
    mixed, layer = attend(normed, rotation, segments, past)
    if past is not None and past.last_only:
      x, normed = x[:, -1:], normed[:, -1:]
    if after:
      mixed = norm(c, 'attention_post_norm')(mixed)
    mixed = drop(mixed)
    if not c.parallel_residual:
      x = x + mixed
    if not c.shared_norm:
      normed = norm(c, 'mlp_norm')(x) if before else x
    hidden = Mlp(c, name='mlp')(normed)
    if after:
      hidden = norm(c, 'mlp_post_norm')(hidden)
    x = x + drop(hidden)
    if c.parallel_residual:
      x = x + mixed
    return sharding.constrain(x, ('batch', None, None)), layer


class Decoder(nn.Module):
  """A decoder-only language model."""

  config: ModelConfig

  def setup(self):
    c = self.config
    self.embed = Embedding(c.vocab_size, c.embed_dim)
    if c.position == 'learned':
      self.position_embed = Embedding(c.max_len, c.embed_dim)
    self.final_norm = Norm(c.norm, c.norm_eps, c.norm_offset)
    if not c.tie_embeddings:
      self.head = Head(c.embed_dim, c.vocab_size, c.head_bias)

  @nn.compact
  def features(
    self,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    cache: KVCache | None = None,
    *,
    deterministic: bool = True,
    fresh: bool = False,
    last_only: bool = False,
  ) -> jax.Array | tuple[jax.Array, KVCache]:
    """Returns [B, T, D] after the final norm, in the compute dtype.

    With `head_bias` they are [B, T, D + 1] and end in a 1, by which the head's
    products add its bias.

    Args:
      tokens: [B, T] int32.
      positions: [B, T] int32 of each token in its document; None counts from
        0. A cache has its own.
      segments: [B, T] int32, the document of each token; attention stays
        within. None: one document. A cache has its own.
      cache: what came before the tokens; then the cache that holds them too
        is returned beside the features.
      deterministic: False draws dropout from the rng 'dropout'.
      fresh: whether the cache is known to be empty, which saves reading it.
      last_only: with a cache, return [B, 1, D] of the last token: of the other
        tokens the last layer only makes keys and values.

    Raises:
      ValueError: T exceeds max_len, or the room of the cache.
    """
    c = self.config
    B, T = tokens.shape
    if cache is not None:
      check_room(cache, T)
      slots = cache.length + jnp.arange(T, dtype=jnp.int32)
      # What is left of a row's start is padding, at any position.
      positions = jnp.maximum(slots[None] - cache.starts[:, None], 0)
    elif T > c.max_len:
      raise ValueError(
        f'{T} tokens exceed max_len={c.max_len}; shorten the input or raise '
        'model.max_len.'
      )
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    dtype = jnp.dtype(c.dtype)
    x = self.embed(tokens, dtype)
    if c.embed_scale:
      x = x * jnp.asarray(c.embed_dim**0.5, dtype)
    if c.position == 'learned':
      x = x + self.position_embed(positions, dtype)
    rotations = _rotations(c, positions, dtype)
    x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
    x = sharding.constrain(x, ('batch', None, None))
    layer = _remat(Layer, c.remat if cache is None else 'none')
    layers = []
    for i, (heads, window) in enumerate(
      zip(c.kv_heads, c.windows, strict=True)
    ):
      past = None
      if cache is not None:
        is_last = last_only and i == c.num_layers - 1
        past = Past(cache.layers[i], cache.length, cache.starts, fresh, is_last)
      x, new = layer(c, heads, window, deterministic, name=f'layer_{i}')(
        x, rotations[is_local(c, window)], segments, past
      )
      layers.append(new)
    x = self.final_norm(x)
    if c.head_bias:
      x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
    if cache is None:
      return x
    return x, cache.replace(layers=tuple(layers), length=cache.length + T)

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
  ) -> jax.Array:
    """Returns float32 logits [B, T, V]; arguments as in `features`."""
    return self.logits(self.features(tokens, positions, segments))

  def logits(self, x: jax.Array) -> jax.Array:
    """Returns float32 logits [B, T, V] of what `features` returns."""
    logits = linear.against_rows(x, self.head_rows(x.dtype))
    softcap = self.config.logit_softcap
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

  def head_rows(self, dtype: jnp.dtype) -> jax.Array:
    """The output embedding [V, D], or [V, D + 1] with its bias."""
    head = self.embed if self.config.tie_embeddings else self.head
    return head.rows(dtype)


def _rotations(c, positions, dtype):
  """RoPE's rotation in layers that are not local and in those that are."""
  if c.position != 'rope':
    return None, None
  frequencies = rope.rope_frequencies(
    c.rope_dim,
    c.rope_theta,
    c.rope_scaling,
    factor=c.rope_factor,
    original_len=c.rope_original_len,
    slow_turns=c.rope_slow_turns,
    fast_turns=c.rope_fast_turns,
  )
  angles = rope.rope_angles(positions, frequencies)
  rotation = rope.rotation(angles, dtype, c.rope_magnitude)
  if c.rope_local_theta is None:
    return rotation, None
  local = rope.rope_frequencies(c.rope_dim, c.rope_local_theta)
  angles = rope.rope_angles(positions, local)
  return rotation, rope.rotation(angles, dtype)


class Embedding(nn.Module):
  """A table of rows, read by index or as a matrix."""

  num_rows: int
  embed_dim: int

  def setup(self):
    self.embedding = self.param(
      'embedding',
      nn.initializers.normal(0.02),
      (self.num_rows, self.embed_dim),
      jnp.float32,
    )

  def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[B, T] ids -> [B, T, D]."""
    if self.embedding.dtype != jnp.bfloat16:
      return self.embedding[ids].astype(dtype)
    # By its bits: XLA on CPU would make a float32 copy of the whole table.
    bits = jax.lax.bitcast_convert_type(self.embedding, jnp.uint16)[ids]
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)

  def rows(self, dtype: jnp.dtype) -> jax.Array:
    """[rows, D]."""
    return self.embedding.astype(dtype)


class Head(nn.Module):
  """The output embedding of a model that does not tie it, kernel [D, V].

  `decoding_params` may put what `rows` returns in its place.
  """

  embed_dim: int
  vocab_size: int
  use_bias: bool = False

  def setup(self):
    self.laid_out = self.get_variable('params', 'rows')
    if self.laid_out is not None:
      return
    self.kernel = self.param(
      'kernel',
      nn.initializers.normal(self.embed_dim**-0.5),
      (self.embed_dim, self.vocab_size),
      jnp.float32,
    )
    if self.use_bias:
      self.bias = self.param(
        'bias', nn.initializers.zeros, (self.vocab_size,), jnp.float32
      )

  def rows(self, dtype: jnp.dtype) -> jax.Array:
    """[V, D], or [V, D + 1] with the bias."""
    if self.laid_out is not None:
      return self.laid_out.astype(dtype)
    return _rows(self.kernel, self.bias if self.use_bias else None, dtype)


def head_rows(config: ModelConfig, params: Params) -> jax.Array:
  """The output embedding of a parameter tree, in the compute dtype.

  [V, D], or [V, D + 1] with the bias that `Decoder.features` provides for.
  """
  return Decoder(config).apply(
    {'params': params}, config.dtype, method='head_rows'
  )


def _rows(kernel, bias, dtype):
  """A head's kernel [D, V] and bias [V] as rows."""
  rows = kernel.T.astype(dtype)
  if bias is None:
    return rows
  return jnp.concatenate([rows, bias.astype(dtype)[:, None]], axis=1)


def decoding_params(
  params: Params,
  dtype: str,
  *,
  kernels: str | None = None,
  donate: bool = False,
) -> Params:
  """Parameters as decoding reads them.

  Kernels and embeddings are of the compute type; norms and biases stay
  float32. Where `linear.PLATFORM_KERNELS` says so the rows of a kernel
  [*out, *in] take its place, under the name 'rows', and a head's bias is a
  column of its rows. It is not for training, conversion or checkpoints.

  Args:
    params: as `init_params` returns them.
    dtype: the compute type; the config must have the same.
    kernels: 'rows', or 'columns' as in training; the platform's unless given.
    donate: whether an array is deleted once there is another in its place.

  Raises:
    ValueError: kernels is neither.
  """
  if kernels is None:
    platform = jax.default_backend()
    kernels = linear.PLATFORM_KERNELS.get(platform, 'columns')
  if kernels not in ('rows', 'columns'):
    raise ValueError(
      f'kernels={kernels!r} is unknown; choose one of rows, columns.'
    )
  flat = traverse_util.flatten_dict(params)
  made = {}
  for path, old in flat.items():
    *module, name = path
    new = old
    if name in ('kernel', 'embedding'):
      new = old.astype(dtype)
    if kernels == 'rows' and name == 'kernel':
      path = (*module, 'rows')
      if module == ['head']:
        new = _rows(new, flat.get(('head', 'bias')), dtype)
      else:
        new = linear.rows_of(new, OUT_INPUTS if module[-1] == 'out' else 1)
    if kernels == 'rows' and path == ('head', 'bias'):
      continue
    made[path] = new
    if donate and new is not old:
      new.block_until_ready()
      old.delete()
  return traverse_util.unflatten_dict(made)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
  """Fresh float32 parameters: a plain nested dict of arrays."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Decoder(config).init(key, tokens)['params']


def _remat(layer: type[nn.Module], policy: str) -> type[nn.Module]:
  """Trades memory for recomputing a layer (or all but its products)."""
  if policy == 'none':
    return layer
  if policy == 'full':
    return nn.remat(layer)
  saved = jax.checkpoint_policies.save_only_these_names(linear.SAVED)
  return nn.remat(layer, policy=saved)


def param_count(params: Any) -> int:
  """Count the numbers in a tree of arrays or of their shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
