"""What is counted, against hand computation and against real arrays."""

import dataclasses
import math

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from gqa import cache as cache_lib
from gqa import cost, devices, presets, relatives, roofline, sharding
from gqa import model as model_lib
from gqa.config import ModelConfig, divisors
from gqa.cost import Setting
from gqa.devices import Device

DEVICE = Device('round numbers', 1e6, 1e6, 1e9, 0.5e9)
H100 = devices.find('h100')


@st.composite
def configs(draw, min_heads=1):
  """Small configs with all that changes what is counted."""
  num_heads = draw(st.sampled_from([min_heads, 2 * min_heads, 6 * min_heads]))
  num_layers = draw(st.integers(1, 2))
  kv_heads = st.sampled_from(divisors(num_heads))
  window = draw(st.sampled_from([None, 1, 5, 40]))
  global_layers = ()
  if window and num_layers > 1:
    global_layers = draw(st.sampled_from([(), (0,), (num_layers - 1,)]))
  tied, parallel, qk_norm = (draw(st.booleans()) for _ in range(3))
  norm_position = draw(st.sampled_from(['pre', 'post', 'both']))
  return ModelConfig(
    vocab_size=16,
    num_layers=num_layers,
    embed_dim=8,
    num_heads=num_heads,
    num_kv_heads=draw(
      st.one_of(
        st.none(), kv_heads, st.tuples(*[kv_heads for _ in range(num_layers)])
      )
    ),
    head_dim=draw(st.sampled_from([2, 6])),
    mlp_dim=12,
    max_len=32,
    position=draw(st.sampled_from(['rope', 'learned'])),
    norm=draw(st.sampled_from(['rmsnorm', 'layernorm'])),
    norm_position=norm_position,
    mlp=draw(st.sampled_from(['swiglu', 'gelu'])),
    qkv_bias=draw(st.booleans()),
    out_bias=draw(st.booleans()),
    mlp_bias=draw(st.booleans()),
    qk_norm=qk_norm,
    qk_norm_axes=draw(st.sampled_from(['head', 'heads']))
    if qk_norm
    else 'head',
    sliding_window=window,
    global_layers=global_layers,
    tie_embeddings=tied,
    head_bias=not tied and draw(st.booleans()),
    parallel_residual=parallel,
    shared_norm=parallel and norm_position == 'pre' and draw(st.booleans()),
    dtype=draw(st.sampled_from(['float32', 'bfloat16'])),
  )


@settings(max_examples=100, deadline=None)
@given(
  config=configs(),
  batch_size=st.integers(1, 4),
  context=st.integers(1, 60),
  kind=st.sampled_from(cost.KINDS),
  dtype=st.sampled_from([None, 'float32', 'bfloat16', 'float8_e4m3fn']),
)
def test_cache_bytes_are_those_of_the_real_cache(
  config, batch_size, context, kind, dtype
):
  if kind == 'ring' and config.sliding_window is None:
    kind = 'full'
  if kind == 'int8':
    dtype = None
  real = jax.eval_shape(
    lambda: cache_lib.init_cache(config, batch_size, context, kind, dtype)
  )
  setting = Setting(
    batch_size=batch_size, context=context, kind=kind, cache_dtype=dtype
  )
  assert cost.cache_bytes(config, setting) == cache_lib.cache_bytes(real)
  assert cost.device_cache_bytes(config, setting) == cost.cache_bytes(
    config, setting
  )


MIXED = ModelConfig(
  vocab_size=16,
  num_layers=2,
  embed_dim=8,
  num_heads=4,
  num_kv_heads=(2, 1),  # no layer's are split, as 1 cannot be
  head_dim=2,
  mlp_dim=12,
  max_len=32,
  qk_norm=True,
  qk_norm_axes='heads',
)


@settings(max_examples=10, deadline=None)
@example(config=MIXED, model_axis=2)
@given(config=configs(min_heads=2), model_axis=st.sampled_from([1, 2]))
def test_weights_are_those_of_the_real_parameters(config, model_axis):
  params = jax.eval_shape(
    lambda: model_lib.init_params(config, jax.random.key(0))
  )
  assert cost.param_count(config) == model_lib.param_count(params)
  mesh = jax.make_mesh(
    (1, 1, model_axis),
    sharding.MESH_AXES,
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:model_axis],
  )
  specs = sharding.param_specs(params, mesh, config)
  shards = jax.tree.map(
    lambda x, spec: math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)),
    params,
    specs,
  )
  setting = Setting(tensor_parallel=model_axis, weight_dtype='float32')
  assert cost.weight_bytes(config, setting) == 4 * sum(jax.tree.leaves(shards))


@pytest.mark.parametrize(
  ('name', 'num_kv_heads', 'expected'),
  [
    ('gpt2-small', 12, 36_864),
    ('llama2-7b', 32, 524_288),
    ('llama2-13b', 40, 819_200),
    ('llama2-70b', 8, 327_680),
    ('llama2-70b', 64, 2_621_440),
    ('llama3-8b', 8, 131_072),
    ('mistral-7b', 8, 131_072),
    ('gemma-2b', 1, 18_432),
    ('falcon-40b', 8, 122_880),
    ('falcon-40b', 128, 1_966_080),
    ('palm-540b', 1, 120_832),
  ],
)
def test_kv_bytes_of_published_models(name, num_kv_heads, expected):
  shape = presets.find(name).shape.with_kv_heads(num_kv_heads)
  assert cost.kv_bytes_per_token(shape.config, 2) == expected
  assert cost.token_bytes(shape, Setting()) == expected
  assert cost.sequence_bytes(shape, Setting(context=4000)) == 4000 * expected


def test_an_int8_cache_has_a_scale_for_each_key_and_value():
  shape = presets.find('llama2-13b').shape
  expected = 2 * 40 * 40 * (128 + 4)
  assert cost.token_bytes(shape, Setting(kind='int8')) == expected


def test_a_ring_keeps_the_window_of_the_layers_that_have_one():
  gemma = presets.find('gemma3-27b').shape  # 52 of 62 layers see 1,024
  token = 2 * 16 * 128 * 2
  for context in (1_000, 8_192):
    setting = Setting(context=context, kind='ring')
    kept = 52 * min(context, 1_024) + 10 * context
    assert cost.sequence_bytes(gemma, setting) == kept * token
    # A full cache holds more, but is read no further.
    full = dataclasses.replace(setting, kind='full')
    assert cost.sequence_bytes(gemma, full) == 62 * context * token
    assert cost.step_traffic(gemma, full) == cost.step_traffic(gemma, setting)
  with pytest.raises(ValueError, match='choose the kind full'):
    cost.sequence_bytes(presets.find('llama2-7b').shape, setting)


def test_cross_attention_caches_the_source_too():
  t5 = presets.find('t5-xxl-decoder').shape
  setting = Setting(context=512, source_len=2048)
  assert cost.sequence_bytes(t5, setting) == 2560 * 2 * 24 * 64 * 64 * 2
  alone = dataclasses.replace(t5, cross_attention=False)
  assert cost.sequence_bytes(alone, setting) == 512 * 2 * 24 * 64 * 64 * 2
  # The projections of the source are not read in a step.
  more = cost.step_traffic(t5, Setting()).weight_bytes
  more -= cost.step_traffic(alone, Setting()).weight_bytes
  assert more == 2 * 24 * (2 * 4096 * 4096 + 4096)


@pytest.mark.parametrize(
  ('num_kv_heads', 'kv_split', 'held', 'copies'),
  [
    (64, 'heads', 8, 1),
    (8, 'heads', 1, 1),
    (4, 'heads', 4, 8),
    (4, 'needed', 1, 2),
    (1, 'heads', 1, 8),
    (1, 'needed', 1, 8),
    (1, 'batch', 1 / 8, 1),
  ],
)
def test_kv_heads_that_do_not_divide_are_held_by_several_devices(
  num_kv_heads, kv_split, held, copies
):
  shape = presets.find('llama2-70b').shape.with_kv_heads(num_kv_heads)
  setting = Setting(
    batch_size=16, context=100, tensor_parallel=8, kv_split=kv_split
  )
  head = 16 * 100 * 2 * 80 * 128 * 2  # a KV head in all layers
  counters = 4 + 4 * 16
  assert cost.device_cache_bytes(shape, setting) == held * head + counters
  assert cost.kv_copies(shape, setting) == copies
  kernels = 2 * 80 * 8192 * 128 * 2  # of a KV head
  weights = cost.weight_bytes(shape, setting)
  without = cost.weight_bytes(shape.with_kv_heads(64), setting)
  if kv_split != 'batch':
    assert weights - without == (held - 8) * kernels


def test_devices_that_split_the_batch_hold_whole_sequences():
  shape = presets.find('llama2-70b').shape
  for batch_size, rows in ((16, 2), (17, 3), (1, 1)):
    setting = Setting(
      batch_size=batch_size, tensor_parallel=8, kv_split='batch'
    )
    expected = rows * cost.sequence_bytes(shape, setting) + 4 + 4 * batch_size
    assert cost.device_cache_bytes(shape, setting) == expected


@pytest.mark.parametrize('num_kv_heads', [6, 4, 2, 1])
def test_the_cache_is_split_as_the_model_lays_it_out(num_kv_heads):
  mesh = jax.make_mesh(
    (1, 1, 2),
    sharding.MESH_AXES,
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:2],
  )
  names = ('batch', None, 'kv_heads', None)
  with jax.set_mesh(mesh):
    keys = jax.jit(
      lambda: sharding.constrain(
        jax.numpy.zeros((3, 5, num_kv_heads, 2)), names
      )
    )()
  config = ModelConfig(
    vocab_size=8,
    num_layers=1,
    embed_dim=8,
    num_heads=12,
    num_kv_heads=num_kv_heads,
    head_dim=2,
    mlp_dim=8,
    max_len=8,
  )
  setting = Setting(batch_size=3, context=5, tensor_parallel=2)
  shard = math.prod(keys.sharding.shard_shape(keys.shape))
  expected = 2 * 4 * shard + 4 + 4 * 3
  assert cost.device_cache_bytes(config, setting) == expected


def test_a_needed_head_may_cross_the_border_of_two_devices():
  """12 query heads in 4 groups of 3, on 6 devices with 2 of them each."""
  shape = presets.find('qwen2-1.5b').shape.with_kv_heads(4)
  setting = Setting(
    batch_size=1, context=1, tensor_parallel=6, kv_split='needed'
  )
  # Heads 2 and 3 are of groups 0 and 1.
  assert cost.kv_copies(shape, setting) == 6 * 2 / 4


def test_devices_must_divide_the_heads():
  shape = presets.find('llama2-13b').shape
  with pytest.raises(ValueError, match=r'num_heads=40.*tensor_parallel=16.*20'):
    cost.weight_bytes(shape, Setting(tensor_parallel=16))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'batch_size': 0}, 'batch_size=0 must be at least 1'),
    ({'context': -1}, 'context=-1'),
    ({'kind': 'paged'}, "kind='paged' is unknown.*ring"),
    ({'dtype': 'int8'}, "dtype='int8' is unknown.*bfloat16"),
    ({'kv_split': 'x'}, "kv_split='x'"),
    ({'kind': 'int8', 'cache_dtype': 'bfloat16'}, 'does not fit'),
  ],
)
def test_settings_that_cannot_be_name_the_field(fields, message):
  with pytest.raises(ValueError, match=message):
    Setting(**fields)


@pytest.mark.parametrize(
  ('dtype', 'kind', 'intensity'),
  [('bfloat16', 'full', 1), ('float32', 'full', 0.5), ('bfloat16', 'int8', 2)],
)
@pytest.mark.parametrize('num_kv_heads', [40, 8, 1])
def test_attention_makes_flops_of_a_byte_as_heads_share_it(
  dtype, kind, intensity, num_kv_heads
):
  shape = presets.find('llama2-13b').shape.with_kv_heads(num_kv_heads)
  short, long = (
    cost.step_traffic(shape, Setting(context=context, dtype=dtype, kind=kind))
    for context in (1_000, 3_000)
  )
  flops, kv = long.flops - short.flops, long.kv_bytes - short.kv_bytes
  if kind == 'int8':
    intensity *= 128 / 132  # of the scales no FLOPs are made
  assert flops / kv == pytest.approx(intensity * 40 / num_kv_heads)
  assert long.weight_bytes == short.weight_bytes


def test_a_step_by_hand():
  shape = presets.find('llama2-13b').shape
  setting = Setting(batch_size=16, context=4096)
  # All weights but the rows of the embedding, and the cache.
  weights = 2 * (13_015_864_320 - 32_000 * 5120)
  kv = 16 * 4096 * 819_200
  products = 32_000 * 5120 + 40 * (4 * 5120 * 5120 + 3 * 5120 * 13_824)
  flops = 2 * 16 * products + 4 * 16 * 4096 * 40 * 128 * 40
  seconds, bound, traffic = roofline.step(shape, H100, setting)
  assert traffic == (weights, kv, flops)
  assert seconds == pytest.approx((weights + kv) / 3.35e12)
  assert bound == 'KV'
  slower = roofline.Limits(efficiency=0.5, overhead=1e-3)
  assert roofline.step_time(shape, H100, setting, slower) == pytest.approx(
    2 * (weights + kv) / 3.35e12 + 1e-3
  )


def test_many_sequences_make_a_step_bound_by_its_products():
  shape = presets.find('llama2-13b').shape.with_kv_heads(1)
  setting = Setting(batch_size=2_000, context=16)
  seconds, bound, traffic = roofline.step(shape, H100, setting)
  assert bound == 'compute'
  assert seconds == pytest.approx(traffic.flops / 989e12)
  float32 = dataclasses.replace(setting, dtype='float32')
  assert roofline.step_time(shape, H100, float32) == pytest.approx(2 * seconds)


def test_devices_share_weights_and_products():
  shape = presets.find('llama2-70b').shape
  one, eight = (
    cost.step_traffic(shape, Setting(batch_size=8, tensor_parallel=devices))
    for devices in (1, 8)
  )
  norms = 2 * (2 * 80 + 1) * 8192
  assert 8 * (eight.weight_bytes - norms) == one.weight_bytes - norms
  assert 8 * eight.kv_bytes == one.kv_bytes
  assert 8 * eight.flops == one.flops


@pytest.mark.parametrize('kv_split', cost.KV_SPLITS)
@pytest.mark.parametrize('devices_', [1, 4])
def test_kv_traffic_equals_that_of_weights_at_the_balance(kv_split, devices_):
  shape = presets.find('llama3-8b').shape
  setting = Setting(context=512, tensor_parallel=devices_, kv_split=kv_split)
  balance = roofline.balance_tokens(shape, setting)
  batch_size = devices_ * round(balance / 512 / devices_)
  weights, kv, _ = cost.step_traffic(
    shape, dataclasses.replace(setting, batch_size=batch_size)
  )
  assert kv == pytest.approx(weights, rel=0.02)
  if devices_ == 1:
    assert balance == pytest.approx(weights / 131_072)


@settings(max_examples=25, deadline=None)
@given(
  config=configs(),
  memory=st.integers(10_000, 200_000),
  context=st.integers(1, 300),
  seconds=st.sampled_from([None, 0.02, 0.1]),
)
def test_the_largest_batch_and_context_are_the_last_that_fit(
  config, memory, context, seconds
):
  device = dataclasses.replace(DEVICE, memory=memory)
  setting = Setting(context=context)

  def does(**change):
    tried = dataclasses.replace(setting, **change)
    if roofline.device_bytes(config, tried) > 0.95 * memory:
      return False
    if seconds is None or 'context' in change:
      return True
    return roofline.step_time(config, device, tried) <= seconds

  batch = roofline.largest_batch(config, device, setting, seconds=seconds)
  longest = roofline.largest_context(config, device, setting)
  assert batch == 0 or does(batch_size=batch)
  assert not does(batch_size=batch + 1)
  assert longest == 0 or does(context=longest)
  assert not does(context=longest + 1)


def test_a_ring_has_no_longest_context():
  shape = presets.find('mistral-7b').shape
  setting = Setting(kind='ring')
  assert roofline.largest_context(shape, H100, setting) is None


def test_relatives_by_hand():
  """DeepSeek-V2's heads: 128 of dimension 128 in 60 layers."""
  config = ModelConfig(
    vocab_size=8,
    num_layers=60,
    embed_dim=8,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=8,
    max_len=8,
    dtype='bfloat16',
  )
  setting = Setting(batch_size=2, context=1000, tensor_parallel=2)
  rows = {r['method']: r for r in relatives.rows(config, H100, setting)}
  assert {r['label'] for r in rows.values()} == {'cost only'}
  sizes = {name: r['kv_bytes_per_token'] / 120 for name, r in rows.items()}
  assert sizes == {
    'MLA': 512 + 64,
    'GLA-2': 512 + 64,
    'GTA-8': 8 * 128 + 64,
    'TPA': 4 * (128 + 128),
    'CLA2, GQA-8': 8 * 128,
    'MLKV': 2 * 128 / 6,
  }
  held = {
    name: r['device_kv_bytes_per_token'] / 120 for name, r in rows.items()
  }
  assert held == {
    'MLA': 512 + 64,  # every device holds the latent
    'GLA-2': 256 + 64,
    'GTA-8': 4 * 128 + 64,
    'TPA': 4 * (64 + 128),
    'CLA2, GQA-8': 4 * 128,
    'MLKV': 2 * 128 / 6,
  }
  assert rows['MLA']['same_as_kv_heads'] == 2.25
  # About twice and once the query heads, and twice those of a KV head.
  assert rows['MLA']['flops_per_byte'] == pytest.approx(256, rel=0.06)
  assert rows['GLA-2']['flops_per_byte'] == pytest.approx(128)
  assert rows['GTA-8']['flops_per_byte'] == pytest.approx(2 * 16, rel=0.06)
  # Sharing across layers saves memory, not traffic.
  assert rows['CLA2, GQA-8']['flops_per_byte'] == 16
  assert rows['CLA2, GQA-8']['attention_ms'] == pytest.approx(
    1e3 * 2000 * 120 * 2 * 4 * 128 / 3.35e12
  )
