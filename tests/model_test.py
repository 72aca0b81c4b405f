"""The decoder against a numpy one, and what must hold for any grouping."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa import model
from gqa.config import ModelConfig

# head_dim is not embed_dim / num_heads, and num_kv_heads is neither 1 nor
# num_heads: no size can stand in for another.
BASE = ModelConfig(
  vocab_size=17,
  num_layers=2,
  embed_dim=10,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=14,
  max_len=12,
)
B, T = 2, 12
CONFIGS = {
  'base': {},
  'gpt2-like': dict(
    num_kv_heads=None,
    position='learned',
    norm='layernorm',
    norm_eps=0.01,
    mlp='gelu',
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
  ),
  'gemma-like': dict(
    num_kv_heads=1,
    mlp='geglu',
    qk_norm=True,
    sliding_window=3,
    logit_softcap=2.0,
    embed_scale=True,
  ),
  'neox-like': dict(
    rope_theta=100.0,
    rope_fraction=0.5,
    norm='layernorm',
    mlp='gelu',
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=False,
    parallel_residual=True,
  ),
  'layers differ': dict(
    num_kv_heads=(1, 2),
    position='learned',
    mlp='relu',
    qk_norm=True,
    embed_scale=True,
    tie_embeddings=False,
  ),
  'gated with bias': dict(
    num_kv_heads=(4, 1),
    mlp_bias=True,
    sliding_window=5,
    logit_softcap=4.0,
    tie_embeddings=False,
  ),
  'gemma3-like': dict(
    num_kv_heads=1,
    rope_theta=300.0,
    rope_scaling='linear',
    rope_factor=8.0,
    rope_local_theta=10.0,
    norm_position='both',
    norm_offset=True,
    mlp='geglu',
    qk_norm=True,
    query_scale_dim=5,
    attention_softcap=1.5,
    sliding_window=3,
    global_layers=(1,),
    embed_scale=True,
  ),
  'olmo2-like': dict(
    rope_theta=100.0,
    rope_scaling='llama3',
    rope_factor=8.0,
    rope_original_len=32,
    rope_fast_turns=4.0,
    norm_position='post',
    qk_norm=True,
    qk_norm_axes='heads',
  ),
  'phi-like': dict(
    rope_theta=100.0,
    rope_fraction=0.75,
    rope_scaling='yarn',
    rope_factor=4.0,
    rope_original_len=64,
    rope_slow_turns=0.5,
    rope_magnitude=1.14,
    norm='layernorm',
    mlp='gelu_exact',
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=False,
    head_bias=True,
    parallel_residual=True,
    shared_norm=True,
  ),
}


def make(**fields):
  return dataclasses.replace(BASE, **fields)


def shapes_of(config):
  return jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))


def flat(params):
  """{'layer_0/attention/query/kernel': leaf, ...}."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def random_params(config, seed=0):
  """Every leaf random and as large as a trained one, norms and biases too."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = path[-1].key
    x = rng.normal(size=leaf.shape)
    if name == 'scale':
      x = 1 + 0.3 * x
    elif name == 'kernel':
      module = path[-2].key
      inputs = leaf.shape[:2] if module == 'out' else leaf.shape[:1]
      x = x / np.sqrt(np.prod(inputs))
    else:
      x = 0.5 * x
    return x.astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes_of(config))


def random_tokens(shape=(B, T), seed=1):
  rng = np.random.default_rng(seed)
  return rng.integers(BASE.vocab_size, size=shape).astype(np.int32)


PACKED = (
  np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], list(range(12))], np.int32),
  np.array([[1] * 5 + [2] * 7, [1] * 12], np.int32),
)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, positions=None, segments=None):
  return model.Decoder(config).apply(
    {'params': params}, tokens, positions, segments
  )


def test_sines_are_taken_once_for_all_heads_and_layers():
  config = make(num_layers=3)
  program = jax.jit(logits_of, static_argnums=0).lower(
    config, shapes_of(config), random_tokens()
  )
  text = program.compile().as_text()
  assert text.count(' cosine(') == text.count(' sine(') == 1


# An independent decoder, in float64.


def numpy_decoder(config, params, tokens, positions, segments):
  c = config
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = p['embed']['embedding'][tokens]
  if c.embed_scale:
    x = x * np.sqrt(c.embed_dim)
  if c.position == 'learned':
    x = x + p['position_embed']['embedding'][positions]
  for i in range(c.num_layers):
    layer = p[f'layer_{i}']
    norm = lambda name, x, layer=layer: (
      numpy_norm(c, x, layer[name]) if name in layer else x
    )
    normed = norm('attention_norm', x)
    mixed = numpy_attention(
      c, i, layer['attention'], normed, positions, segments
    )
    mixed = norm('attention_post_norm', mixed)
    stream = x if c.parallel_residual else x + mixed
    if not c.shared_norm:
      normed = norm('mlp_norm', stream)
    hidden = numpy_mlp(c.mlp, layer['mlp'], normed)
    x = x + mixed + norm('mlp_post_norm', hidden)
  x = numpy_norm(c, x, p['final_norm'])
  if c.tie_embeddings:
    logits = x @ p['embed']['embedding'].T
  else:
    logits = x @ p['head']['kernel'] + p['head'].get('bias', 0)
  if c.logit_softcap is not None:
    logits = c.logit_softcap * np.tanh(logits / c.logit_softcap)
  return logits


def numpy_norm(c, x, p, kind=None):
  scale = p['scale'] + (1 if c.norm_offset else 0)
  if (kind or c.norm) == 'rmsnorm':
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c.norm_eps) * scale
  centred = x - np.mean(x, -1, keepdims=True)
  variance = np.var(x, -1, keepdims=True)
  return centred / np.sqrt(variance + c.norm_eps) * scale + p['bias']


def numpy_attention(c, layer, p, x, positions, segments):
  project = lambda name: (
    np.einsum('btd,dnh->btnh', x, p[name]['kernel']) + p[name].get('bias', 0)
  )
  q, k, v = project('query'), project('key'), project('value')
  if c.qk_norm:
    size = (
      (lambda y: y[0, 0].size)
      if c.qk_norm_axes == 'heads'
      else (lambda y: c.head_dim)
    )
    q, k = (
      numpy_norm(
        c, y.reshape(*y.shape[:2], -1, size(y)), p[name], 'rmsnorm'
      ).reshape(y.shape)
      for y, name in ((q, 'query_norm'), (k, 'key_norm'))
    )
  window = None if layer in c.global_layers else c.sliding_window
  if c.position == 'rope':
    local = window is not None and c.rope_local_theta is not None
    turn = numpy_local_rope if local else numpy_rope
    q, k = turn(c, q, positions), turn(c, k, positions)
  out = np.zeros_like(q)
  group = c.num_heads // k.shape[2]
  for b, t, n in np.ndindex(*q.shape[:3]):
    seen = [
      s
      for s in range(t + 1)
      if segments[b, s] == segments[b, t] and (window is None or t - s < window)
    ]
    scores = k[b, seen, n // group] @ q[b, t, n]
    scores = scores / np.sqrt(c.query_scale_dim or c.head_dim)
    if c.attention_softcap is not None:
      scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
    weights = np.exp(scores - scores.max())
    out[b, t, n] = weights @ v[b, seen, n // group] / weights.sum()
  out = np.einsum('btnh,nhd->btd', out, p['out']['kernel'])
  return out + p['out'].get('bias', 0)


def numpy_rope(c, x, positions):
  dim = int(c.head_dim * c.rope_fraction)
  frequencies = c.rope_theta ** (-np.arange(0, dim, 2) / dim)
  turns = (c.rope_original_len or 0) * frequencies / (2 * np.pi)
  slow, fast = c.rope_slow_turns, c.rope_fast_turns
  if c.rope_scaling == 'linear':
    frequencies = frequencies / c.rope_factor
  elif c.rope_scaling == 'llama3':
    mix = np.interp(turns, [slow, fast], [0, 1])
    frequencies = frequencies * (mix + (1 - mix) / c.rope_factor)
  elif c.rope_scaling == 'yarn':
    # The (fractional) pair that turns so often.
    pair = lambda n: np.interp(
      np.log(n), np.log(turns[::-1]), np.arange(dim // 2)[::-1]
    )
    ends = [np.floor(pair(fast)), np.ceil(pair(slow))]
    mix = np.interp(np.arange(dim // 2), ends, [1, 0])
    frequencies = frequencies * (mix + (1 - mix) / c.rope_factor)
  return numpy_rotation(x, positions, frequencies, c.rope_magnitude)


def numpy_local_rope(c, x, positions):
  dim = int(c.head_dim * c.rope_fraction)
  frequencies = c.rope_local_theta ** (-np.arange(0, dim, 2) / dim)
  return numpy_rotation(x, positions, frequencies, 1.0)


def numpy_rotation(x, positions, frequencies, magnitude):
  x, half = x.copy(), len(frequencies)
  for b, t in np.ndindex(*positions.shape):
    for j, frequency in enumerate(frequencies):
      angle = positions[b, t] * frequency
      rotation = magnitude * np.array(
        [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
      )
      pair = [j, j + half]
      x[b, t][:, pair] = x[b, t][:, pair] @ rotation.T
  return x


def numpy_mlp(kind, p, x):
  gelu = lambda y: (
    y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
  )
  exact = lambda y: y / 2 * (1 + np.vectorize(math.erf)(y / np.sqrt(2)))
  silu = lambda y: y / (1 + np.exp(-y))
  relu = lambda y: np.maximum(y, 0)
  dense = lambda name, y: y @ p[name]['kernel'] + p[name].get('bias', 0)
  hidden = {
    'swiglu': lambda: silu(dense('gate', x)) * dense('up', x),
    'geglu': lambda: gelu(dense('gate', x)) * dense('up', x),
    'gelu': lambda: gelu(dense('up', x)),
    'gelu_exact': lambda: exact(dense('up', x)),
    'relu': lambda: relu(dense('up', x)),
  }[kind]()
  return dense('down', hidden)


@pytest.mark.parametrize('name', CONFIGS)
def test_logits_match_an_independent_float64_decoder(name):
  config = make(**CONFIGS[name])
  params, tokens = random_params(config), random_tokens()
  expected = numpy_decoder(config, params, tokens, *PACKED)
  logits = logits_of(config, params, tokens, *PACKED)
  assert expected.std() > 0.3  # Else the tolerance would say little.
  np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize(
  'name', ['base', 'gpt2-like', 'gemma-like', 'olmo2-like', 'phi-like']
)
def test_gradients_match_finite_differences_of_that_decoder(name):
  config = make(**CONFIGS[name], num_layers=1)
  params, tokens = random_params(config), random_tokens()
  cotangent = np.random.default_rng(3).normal(size=(B, T, 17))

  def objective(params):
    logits = model.Decoder(config).apply({'params': params}, tokens, *PACKED)
    return (logits * cotangent.astype(np.float32)).sum()

  def reference(params):
    logits = numpy_decoder(config, params, tokens, *PACKED)
    return (logits * cotangent).sum()

  grads = flat(jax.jit(jax.grad(objective))(params))
  leaves, structure = jax.tree.flatten(
    jax.tree.map(lambda x: x.astype(np.float64), params)
  )
  rng = np.random.default_rng(4)
  for i, (path, grad) in enumerate(grads.items()):
    direction = rng.normal(size=grad.shape)
    direction /= np.linalg.norm(direction)
    moved = [
      structure.unflatten([*leaves[:i], leaves[i] + step, *leaves[i + 1 :]])
      for step in (1e-5 * direction, -1e-5 * direction)
    ]
    slope = (reference(moved[0]) - reference(moved[1])) / 2e-5
    np.testing.assert_allclose(
      (grad * direction).sum(), slope, rtol=1e-3, atol=1e-3, err_msg=path
    )


def test_the_numpy_comparison_covers_every_field():
  elsewhere = {'dropout', 'dtype', 'attention', 'remat'}
  sizes = {f.name for f in dataclasses.fields(ModelConfig)} - elsewhere
  defaults = {
    f.name: f.default
    for f in dataclasses.fields(ModelConfig)
    if f.default is not dataclasses.MISSING and f.name not in elsewhere
  }
  varied = {
    name
    for name, default in defaults.items()
    if any(
      getattr(make(**fields), name) != default for fields in CONFIGS.values()
    )
  }
  assert varied == set(defaults)
  assert sizes - set(defaults) == {
    'vocab_size',
    'num_layers',
    'embed_dim',
    'num_heads',
    'head_dim',
    'mlp_dim',
    'max_len',
  }


def test_positions_count_from_zero_in_one_document_by_default():
  config = make(position='learned')
  params, tokens = random_params(config), random_tokens()
  positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  given = logits_of(config, params, tokens, positions, np.ones_like(positions))
  np.testing.assert_allclose(
    logits_of(config, params, tokens), given, atol=1e-6
  )


# The parameter tree.


def test_kernel_shapes_follow_the_explicit_head_dim():
  shapes = {k: v.shape for k, v in flat(shapes_of(make(num_layers=1))).items()}
  assert shapes == {
    'embed/embedding': (17, 10),
    'layer_0/attention_norm/scale': (10,),
    'layer_0/attention/query/kernel': (10, 4, 8),
    'layer_0/attention/key/kernel': (10, 2, 8),
    'layer_0/attention/value/kernel': (10, 2, 8),
    'layer_0/attention/out/kernel': (4, 8, 10),
    'layer_0/mlp_norm/scale': (10,),
    'layer_0/mlp/gate/kernel': (10, 14),
    'layer_0/mlp/up/kernel': (10, 14),
    'layer_0/mlp/down/kernel': (14, 10),
    'final_norm/scale': (10,),
  }


def test_optional_parameters_have_the_shapes_of_the_contract():
  config = make(
    num_layers=1,
    position='learned',
    norm='layernorm',
    mlp='gelu',
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_embeddings=False,
  )
  shapes = {k: v.shape for k, v in flat(shapes_of(config)).items()}
  plain = flat(shapes_of(make(num_layers=1)))
  assert set(plain) - set(shapes) == {'layer_0/mlp/gate/kernel'}
  assert {k: v for k, v in shapes.items() if k not in plain} == {
    'position_embed/embedding': (12, 10),
    'layer_0/attention_norm/bias': (10,),
    'layer_0/attention/query/bias': (4, 8),
    'layer_0/attention/query_norm/scale': (8,),
    'layer_0/attention/key/bias': (2, 8),
    'layer_0/attention/key_norm/scale': (8,),
    'layer_0/attention/value/bias': (2, 8),
    'layer_0/attention/out/bias': (10,),
    'layer_0/mlp_norm/bias': (10,),
    'layer_0/mlp/up/bias': (14,),
    'layer_0/mlp/down/bias': (10,),
    'final_norm/bias': (10,),
    'head/kernel': (10, 17),
  }


@pytest.mark.parametrize('num_kv_heads', [4, 2, 1, (4, 1), (1, 2)])
def test_grouping_changes_the_shapes_of_key_and_value_only(num_kv_heads):
  fields = dict(qkv_bias=True, out_bias=True, qk_norm=True)
  config = make(num_kv_heads=num_kv_heads, **fields)
  whole = flat(shapes_of(make(num_kv_heads=None, **fields)))
  grouped = flat(shapes_of(config))
  assert list(grouped) == list(whole)
  for path, leaf in grouped.items():
    assert leaf.dtype == jnp.float32
    layer, _, name = path.partition('/attention/')
    if name.split('/')[0] not in ('key', 'value'):
      assert leaf.shape == whole[path].shape
      continue
    heads = config.kv_heads[int(layer.removeprefix('layer_'))]
    expected = {'kernel': (10, heads, 8), 'bias': (heads, 8)}
    assert leaf.shape == expected[name.split('/')[1]]


@pytest.mark.parametrize(
  ('sizes', 'num_params'),
  [
    (
      dict(embed_dim=4096, num_layers=32, num_heads=32, mlp_dim=11008),
      6_738_415_616,  # Llama 2 7B
    ),
    (
      dict(
        embed_dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        mlp_dim=28672,
      ),
      68_976_648_192,  # Llama 2 70B
    ),
  ],
)
def test_published_sizes_without_memory(sizes, num_params):
  config = ModelConfig(
    vocab_size=32_000,
    head_dim=128,
    max_len=4096,
    tie_embeddings=False,
    **sizes,
  )
  shapes = shapes_of(config)
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == num_params
  tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
  logits = jax.eval_shape(functools.partial(logits_of, config), shapes, tokens)
  assert (logits.shape, logits.dtype) == ((1, 4096, 32_000), jnp.float32)


def test_head_rows_are_the_head_that_makes_the_logits():
  for tied in (True, False):
    config = make(num_layers=1, tie_embeddings=tied)
    params, tokens = random_params(config), random_tokens()
    apply = jax.jit(
      functools.partial(model.Decoder(config).apply, method='features')
    )
    features = apply({'params': params}, tokens)
    np.testing.assert_allclose(
      features @ model.head_rows(config, params).T,
      logits_of(config, params, tokens),
      atol=1e-5,
    )


# What a token may see.


@pytest.mark.parametrize('fields', [{}, CONFIGS['gemma-like']])
def test_editing_a_token_changes_no_logits_before_it(fields):
  config = make(**fields)
  params = random_params(config)
  tokens = np.tile(random_tokens((1, T)), (T + 1, 1))
  for t in range(T):  # Row t has another token t; the last row has none.
    tokens[t, t] = (tokens[t, t] + 1) % config.vocab_size
  logits = np.asarray(logits_of(config, params, tokens))
  change = np.abs(logits[:T] - logits[T]).max(axis=-1)  # [edited, read]
  for t in range(T):
    assert change[t, :t].max(initial=0) == 0
    assert change[t, t:].min() >= 0
    assert change[t, t] > 1e-3
    assert t == T - 1 or change[t, t + 1 :].max() > 1e-3


@pytest.mark.parametrize('position', ['rope', 'learned'])
def test_packed_documents_have_the_logits_they_have_alone(position):
  config = make(position=position)
  params = random_params(config)
  lengths = [4, 5, 3]
  documents = np.split(random_tokens((T,)), np.cumsum(lengths)[:-1])
  rows = lambda x: np.tile(x, (3, 1)).astype(np.int32)
  counted = rows(np.arange(T)), rows(np.ones(T))
  restarted = (
    rows(np.concatenate([np.arange(n) for n in lengths])),
    rows(np.repeat([1, 2, 3], lengths)),
  )
  packed = rows(np.concatenate(documents))
  together = logits_of(config, params, packed, *restarted)[0]
  padded = np.stack([np.pad(d, (0, T - len(d))) for d in documents])
  alone = logits_of(config, params, padded, *counted)
  parts = np.split(together, np.cumsum(lengths)[:-1])
  for part, own, length in zip(parts, alone, lengths, strict=True):
    np.testing.assert_allclose(part, own[:length], atol=1e-5)
  mixed = logits_of(config, params, packed, *counted)[0]
  assert np.abs(mixed[4:] - together[4:]).max() > 1e-3


def expand_kv(params, num_heads, expand):
  """Gives each query head a KV head of its own: `expand` of the grouped."""

  def change(path, leaf):
    if path[-2].key not in ('key', 'value'):
      return leaf
    axis = leaf.ndim - 2
    return expand(leaf, num_heads // leaf.shape[axis], axis)

  return jax.tree_util.tree_map_with_path(change, params)


def tile(x, times, axis):
  return np.concatenate([x] * times, axis)


@pytest.mark.parametrize('num_kv_heads', [4, 2, 1])
def test_query_heads_share_kv_heads_in_blocks_never_in_tiles(num_kv_heads):
  grouped = make(num_kv_heads=num_kv_heads, qkv_bias=True)
  whole = make(num_kv_heads=4, qkv_bias=True)
  params, tokens = random_params(grouped), random_tokens()
  expected = logits_of(grouped, params, tokens)
  blocks = expand_kv(params, 4, np.repeat)  # 0 0 1 1
  np.testing.assert_allclose(
    logits_of(whole, blocks, tokens), expected, atol=1e-5
  )
  if num_kv_heads == 2:
    tiles = expand_kv(params, 4, tile)  # 0 1 0 1
    wrong = logits_of(whole, tiles, tokens)
    assert np.abs(wrong - expected).max() > 1e-3


def test_more_tokens_than_max_len_are_refused():
  tokens = random_tokens((1, 13))
  with pytest.raises(ValueError, match='13 tokens exceed max_len=12; shorten'):
    logits_of(make(), random_params(make()), tokens)


# Ways of computing the same.


@pytest.mark.parametrize('fields', [{}, {'sliding_window': 3}])
def test_all_attention_implementations_give_the_same_logits(fields):
  config = make(attention='einsum', num_layers=1, **fields)
  params, tokens = random_params(config), random_tokens()
  expected = logits_of(config, params, tokens, *PACKED)
  for name in ('auto', 'blockwise', 'fused'):
    other = dataclasses.replace(config, attention=name)
    np.testing.assert_allclose(
      logits_of(other, params, tokens, *PACKED),
      expected,
      atol=1e-5,
      err_msg=name,
    )


def test_recomputing_gives_the_same_gradients_and_keeps_less():
  config = make(num_layers=1)
  params, tokens = random_params(config), random_tokens()
  cotangent = np.random.default_rng(3).normal(size=(B, T, 17))
  grads, kept = {}, {}
  for remat in ('none', 'dots', 'full'):
    decoder = model.Decoder(dataclasses.replace(config, remat=remat))

    def objective(params, decoder=decoder):
      logits = decoder.apply({'params': params}, tokens, *PACKED)
      return (logits * cotangent.astype(np.float32)).sum()

    grads[remat] = jax.jit(jax.grad(objective))(params)
    # The pullback is a tree of what backward needs of forward.
    pullback = jax.eval_shape(lambda p: jax.vjp(objective, p)[1], params)
    kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(pullback))
  assert kept['full'] < kept['dots'] < kept['none']
  for remat in ('dots', 'full'):
    jax.tree.map(
      lambda got, want: np.testing.assert_allclose(
        got, want, rtol=1e-4, atol=1e-5
      ),
      grads[remat],
      grads['none'],
    )


def test_dropout_is_off_by_default_and_drawn_from_the_key():
  config = make(num_layers=1)
  params, tokens = random_params(config), random_tokens()

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def features(dropout, deterministic, key):
    return model.Decoder(dataclasses.replace(config, dropout=dropout)).apply(
      {'params': params},
      tokens,
      deterministic=deterministic,
      method='features',
      rngs={'dropout': jax.random.key(key)},
    )

  plain = features(0.0, True, 0)
  np.testing.assert_array_equal(features(0.5, True, 0), plain)
  np.testing.assert_array_equal(features(0.0, False, 0), plain)
  dropped = features(0.5, False, 0)
  np.testing.assert_array_equal(features(0.5, False, 0), dropped)
  assert np.abs(dropped - plain).max() > 1e-2
  assert np.abs(features(0.5, False, 1) - dropped).max() > 1e-2
  np.testing.assert_allclose(
    logits_of(dataclasses.replace(config, dropout=0.5), params, tokens),
    logits_of(config, params, tokens),
    atol=1e-6,
  )


def test_dropout_reaches_embeddings_and_both_branches():
  config = make(num_layers=1, out_bias=True, mlp_bias=True, dropout=0.5)
  nothing = jax.tree.map(np.zeros_like, random_params(config))

  @jax.jit
  def features(params):
    return model.Decoder(config).apply(
      {'params': params},
      random_tokens(),
      deterministic=False,
      method='features',
      rngs={'dropout': jax.random.key(0)},
    )

  # Only one of these writes to the residual stream, the same everywhere.
  for source in (
    'embed/embedding',
    'layer_0/attention/out/bias',
    'layer_0/mlp/down/bias',
  ):
    params = jax.tree_util.tree_map_with_path(
      lambda path, leaf, source=source: (
        np.ones_like(leaf)
        if jax.tree_util.keystr(path, simple=True, separator='/')
        in (source, 'final_norm/scale')
        else leaf
      ),
      nothing,
    )
    dropped = np.asarray(features(params)) == 0
    assert 0.3 < dropped.mean() < 0.7, source


@pytest.mark.parametrize('name', ['gpt2-like', 'gemma-like'])
def test_bfloat16_computes_near_float32_and_keeps_its_parameters(name):
  config = make(**CONFIGS[name])
  half = dataclasses.replace(config, dtype='bfloat16')
  for leaf in jax.tree.leaves(shapes_of(half)):
    assert leaf.dtype == jnp.float32
  params, tokens = random_params(config), random_tokens()
  features = jax.eval_shape(
    lambda p: model.Decoder(half).apply(
      {'params': p}, tokens, method='features'
    ),
    params,
  )
  assert features.dtype == jnp.bfloat16
  logits = logits_of(half, params, tokens)
  exact = logits_of(config, params, tokens)
  assert logits.dtype == jnp.float32
  assert 0 < np.abs(logits - exact).mean() < 0.05 * np.abs(exact).mean()


def test_bfloat16_gradients_are_float32_and_near_the_exact_ones():
  config = make(num_layers=1, dtype='bfloat16')
  params, tokens = random_params(config), random_tokens()
  cotangent = np.random.default_rng(3).normal(size=(B, T, 17))

  def grads(dtype):
    decoder = model.Decoder(dataclasses.replace(config, dtype=dtype))

    def objective(params):
      logits = decoder.apply({'params': params}, tokens, *PACKED)
      return (logits * cotangent.astype(np.float32)).sum()

    return flat(jax.jit(jax.grad(objective))(params))

  half = grads('bfloat16')
  for path, exact in grads('float32').items():
    assert half[path].dtype == jnp.float32
    error = np.linalg.norm(half[path] - exact)
    assert error < 0.05 * np.linalg.norm(exact), path


def test_initial_parameters_differ_by_key_and_layer_and_predict_nothing():
  init = jax.jit(functools.partial(model.init_params, BASE))
  trees = [init(jax.random.key(i, impl='rbg')) for i in (0, 0, 1)]
  one, again, other = map(flat, trees)
  for path, leaf in one.items():
    np.testing.assert_array_equal(leaf, again[path])
    if path.endswith('scale'):
      np.testing.assert_array_equal(leaf, np.ones_like(leaf))
    else:
      assert (np.asarray(leaf) != other[path]).all()
  kernel = 'attention/query/kernel'
  assert (one[f'layer_0/{kernel}'] != one[f'layer_1/{kernel}']).all()
  assert np.abs(logits_of(BASE, trees[0], random_tokens())).max() < 1
