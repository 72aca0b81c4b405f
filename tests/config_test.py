"""The model config: what it refuses, and what it survives."""

import json
import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gqa import model
from gqa.config import (
  ATTENTIONS,
  DTYPES,
  MLPS,
  NORM_POSITIONS,
  NORMS,
  POSITIONS,
  QK_NORM_AXES,
  REMATS,
  ROPE_SCALINGS,
  ModelConfig,
  divisors,
)

SIZES = dict(
  vocab_size=17,
  num_layers=2,
  embed_dim=10,
  num_heads=6,
  head_dim=8,
  mlp_dim=14,
  max_len=16,
)
GATED, PLAIN = 'swiglu', 'gelu'
QK = dict(qk_norm=True)


def make(**fields):
  return ModelConfig(**(SIZES | fields))


def count_params(config):
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


# What is refused.


@pytest.mark.parametrize('num_kv_heads', [4, 5, 0, -1, 7, 12])
def test_impossible_kv_heads_name_both_counts_and_list_the_possible(
  num_kv_heads,
):
  message = (
    rf'num_kv_heads={num_kv_heads} must divide num_heads=6; '
    r'choose one of \[6, 3, 2, 1\]'
  )
  with pytest.raises(ValueError, match=message):
    make(num_kv_heads=num_kv_heads)


def test_impossible_kv_heads_of_one_layer_name_the_layer():
  message = r'num_kv_heads=4 \(layer 1\) must divide num_heads=6'
  with pytest.raises(ValueError, match=message):
    make(num_kv_heads=(3, 4))


@pytest.mark.parametrize('num_kv_heads', [(), (3,), (3, 2, 1)])
def test_kv_heads_are_one_for_each_layer(num_kv_heads):
  message = (
    rf'num_kv_heads={re.escape(str(num_kv_heads))} has {len(num_kv_heads)} '
    r'entries, but num_layers=2; give one int, or one per layer'
  )
  with pytest.raises(ValueError, match=message):
    make(num_kv_heads=num_kv_heads)


@pytest.mark.parametrize('num_kv_heads', [2.0, '2', True, (2, 1.0), (2, None)])
def test_kv_heads_are_ints(num_kv_heads):
  value = re.escape(repr(num_kv_heads))
  message = rf'num_kv_heads={value} must be an int, or a tuple with one int'
  with pytest.raises(TypeError, match=message):
    make(num_kv_heads=num_kv_heads)


@pytest.mark.parametrize('name', SIZES)
@pytest.mark.parametrize('value', [0, -3])
def test_sizes_are_at_least_one(name, value):
  with pytest.raises(ValueError, match=rf'{name}={value} must be at least 1'):
    make(**{name: value})


@pytest.mark.parametrize(
  ('name', 'choices'),
  [
    ('position', POSITIONS),
    ('rope_scaling', ROPE_SCALINGS),
    ('norm', NORMS),
    ('norm_position', NORM_POSITIONS),
    ('qk_norm_axes', QK_NORM_AXES),
    ('mlp', MLPS),
    ('attention', ATTENTIONS),
    ('remat', REMATS),
    ('dtype', DTYPES),
  ],
)
def test_unknown_choices_list_the_known(name, choices):
  message = re.escape(f"{name}='other' is unknown; choose one of {choices}")
  with pytest.raises(ValueError, match=message):
    make(**{name: 'other'})
  needed = {'rope_scaling': dict(rope_original_len=8), 'qk_norm_axes': QK}
  for choice in choices:
    made = make(**{name: choice} | needed.get(name, {}))
    assert getattr(made, name) == choice


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'rope_fraction': 0.0}, 'rope_fraction=0.0 must be above 0 and at most 1'),
    ({'rope_fraction': 1.5}, 'rope_fraction=1.5 must be above 0 and at most 1'),
    (
      {'head_dim': 7},
      'head_dim=7 times rope_fraction=1.0 must be even: .*; change one',
    ),
    (
      {'rope_fraction': 0.4},
      'head_dim=8 times rope_fraction=0.4 must be even: .*; change one',
    ),
    (
      {'rope_fraction': 0.1},
      'rope_fraction=0.1 of head_dim=8 rotates nothing; raise it',
    ),
    ({'rope_theta': 0.0}, 'rope_theta=0.0 must be positive'),
    ({'norm_eps': -1e-6}, 'norm_eps=-1e-06 must be positive'),
    ({'norm_eps': float('nan')}, 'norm_eps=nan must be positive'),
    ({'rope_theta': float('inf')}, 'rope_theta=inf must be positive'),
    ({'sliding_window': 0}, 'sliding_window=0 must be positive'),
    ({'logit_softcap': -2.0}, 'logit_softcap=-2.0 must be positive'),
    ({'attention_softcap': 0.0}, 'attention_softcap=0.0 must be positive'),
    ({'query_scale_dim': 0}, 'query_scale_dim=0 must be positive'),
    ({'rope_local_theta': -1.0}, 'rope_local_theta=-1.0 must be positive'),
    ({'rope_magnitude': 0.0}, 'rope_magnitude=0.0 must be positive'),
    (
      {'rope_slow_turns': 40.0},
      'rope_slow_turns=40.0 must be below rope_fast_turns=32.0',
    ),
    ({'dropout': 1.0}, r'dropout=1.0 must be in \[0, 1\)'),
    ({'dropout': -0.1}, r'dropout=-0.1 must be in \[0, 1\)'),
    ({'dropout': float('nan')}, r'dropout=nan must be in \[0, 1\)'),
  ],
)
def test_numbers_out_of_range_name_field_value_and_rule(fields, message):
  with pytest.raises(ValueError, match=message):
    make(**fields)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'global_layers': (0,)},
      r'global_layers=\(0,\).*sliding_window is not se',
    ),
    (
      {'global_layers': (2,), 'sliding_window': 4},
      r'global_layers=\(2,\) must be increasing numbers of layers, from 0 to 1',
    ),
    (
      {'global_layers': (0, 0), 'sliding_window': 4},
      'must be increasing numbers',
    ),
    (
      {'global_layers': (0, 1), 'sliding_window': 4},
      'are all layers; unset sliding_window',
    ),
    (
      {'rope_scaling': 'linear', 'position': 'learned'},
      "rope_scaling='linear' needs position='rope'",
    ),
    (
      {'rope_factor': 2.0},
      "rope_factor=2.0 does nothing with .*'none'; choose",
    ),
    ({'rope_scaling': 'yarn'}, "'yarn' needs rope_original_len.*; set it"),
    (
      dict(rope_scaling='yarn', rope_original_len=8, rope_theta=1.0),
      "rope_theta=1.0 must be above 1 with rope_scaling='yarn'",
    ),
    ({'rope_scaling': 'llama3'}, "'llama3' needs rope_original_len"),
    (
      {'rope_magnitude': 1.2, 'rope_scaling': 'linear'},
      "rope_magnitude=1.2 needs rope_scaling='yarn', not 'linear'",
    ),
    (
      {'rope_local_theta': 10.0},
      "rope_local_theta=10.0 needs position='rope' and a sliding_window",
    ),
    ({'qk_norm_axes': 'heads'}, "qk_norm_axes='heads' needs qk_norm=True"),
    ({'head_bias': True}, 'head_bias=True needs tie_embeddings=False'),
    ({'shared_norm': True}, 'shared_norm=True needs parallel_residual=True'),
    (
      dict(shared_norm=True, parallel_residual=True, norm_position='both'),
      "shared_norm=True needs .*norm_position='pre'",
    ),
    (
      {'attention_softcap': 5.0, 'attention': 'fused'},
      "attention_softcap=5.0 needs another attention than 'fused'",
    ),
  ],
)
def test_a_field_without_its_companion_is_named_with_it(fields, message):
  with pytest.raises(ValueError, match=message):
    make(**fields)


def test_global_layers_are_the_ones_without_a_window():
  config = make(sliding_window=5, global_layers=(1,))
  assert config.windows == (5, None)
  assert make().windows == (None, None)
  assert make(sliding_window=5).windows == (5, 5)


@pytest.mark.parametrize(
  ('name', 'value', 'expected'),
  [
    ('vocab_size', 17.0, 'int'),
    ('num_layers', '2', 'int'),
    ('embed_dim', True, 'int'),
    ('mlp_dim', None, 'int'),
    ('norm', 1, 'str'),
    ('qkv_bias', 1, 'bool'),
    ('rope_theta', '1e4', 'float'),
    ('dropout', None, 'float'),
    ('dropout', False, 'float'),
    ('sliding_window', 4.0, 'int'),
    ('logit_softcap', '30', 'float'),
  ],
)
def test_wrong_types_name_field_value_and_both_types(name, value, expected):
  message = re.escape(
    f'{name}={value!r} must be of type {expected}, not {type(value).__name__}'
  )
  with pytest.raises(TypeError, match=message):
    make(**{name: value})


@pytest.mark.parametrize('value', [3, (1.0,), ('0',), None, (True,)])
def test_global_layers_are_a_tuple_of_ints(value):
  message = re.escape(f'global_layers={value!r} must be a tuple of ints')
  with pytest.raises(TypeError, match=message):
    make(sliding_window=4, global_layers=value)


def test_a_near_name_is_suggested_for_an_unknown_field():
  message = 'num_kv_head is not a field.*did you mean num_kv_heads'
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_dict(SIZES | {'num_kv_head': 2})
  with pytest.raises(ValueError, match="xyzzy is not.*known are.*'vocab_size'"):
    ModelConfig.from_dict(SIZES | {'xyzzy': 2})


def test_a_missing_size_is_named():
  fields = {k: v for k, v in SIZES.items() if k != 'head_dim'}
  with pytest.raises(TypeError, match='head_dim'):
    ModelConfig.from_dict(fields)


# What is accepted.


def test_kv_heads_are_one_int_for_each_layer():
  assert make().kv_heads == (6, 6)
  assert make(num_kv_heads=2).kv_heads == (2, 2)
  assert make(num_kv_heads=(6, 1)).kv_heads == (6, 1)


def test_ints_become_floats_where_a_float_is_meant():
  config = make(rope_theta=500_000, dropout=0, logit_softcap=30)
  assert config == make(rope_theta=5e5, dropout=0.0, logit_softcap=30.0)
  for name in ('rope_theta', 'dropout', 'logit_softcap'):
    assert type(getattr(config, name)) is float


@settings(deadline=None)
@given(st.integers(1, 128), st.data())
def test_a_fraction_of_the_head_rotates_that_many_dimensions(half, data):
  rope_dim = 2 * data.draw(st.integers(1, half))
  config = make(head_dim=2 * half, rope_fraction=rope_dim / (2 * half))
  assert config.rope_dim == rope_dim


def test_learned_positions_rotate_nothing_and_allow_odd_heads():
  assert make(position='learned', head_dim=7).rope_dim == 0


def test_equal_configs_are_one_key():
  one, other = make(num_kv_heads=(3, 1)), make(num_kv_heads=(3, 1))
  assert one is not other
  assert hash(one) == hash(other)
  assert {one: 1}[other] == 1
  assert make(num_kv_heads=(1, 3)) != one
  with pytest.raises(AttributeError):
    one.num_heads = 4


@st.composite
def configs(draw):
  num_heads = draw(st.integers(1, 12))
  num_layers = draw(st.integers(1, 4))
  kv_heads = st.sampled_from(divisors(num_heads))
  size, flag = st.integers(1, 99), st.booleans()
  positive = st.floats(1e-9, 1e9)
  slow, fast = sorted(draw(st.tuples(positive, positive)))
  more = {}
  if draw(flag) and slow < fast:
    more = dict(
      rope_scaling='yarn',
      rope_theta=1 + draw(positive),
      rope_factor=draw(positive),
      rope_original_len=draw(size),
      rope_slow_turns=slow,
      rope_fast_turns=fast,
      rope_magnitude=draw(positive),
    )
  if draw(flag) and num_layers > 1:
    layers = st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1)
    more |= dict(
      sliding_window=draw(size), global_layers=tuple(sorted(draw(layers)))
    )
  fields = dict(
    vocab_size=draw(size),
    num_layers=num_layers,
    embed_dim=draw(size),
    num_heads=num_heads,
    head_dim=4 * draw(size),
    mlp_dim=draw(size),
    max_len=draw(size),
    num_kv_heads=draw(
      st.none() | kv_heads | st.tuples(*[kv_heads] * num_layers)
    ),
    position='rope' if more else draw(st.sampled_from(POSITIONS)),
    rope_theta=draw(positive),
    rope_fraction=draw(st.sampled_from([0.5, 1.0])),
    norm=draw(st.sampled_from(NORMS)),
    norm_eps=draw(positive),
    mlp=draw(st.sampled_from(MLPS)),
    qkv_bias=draw(flag),
    out_bias=draw(flag),
    mlp_bias=draw(flag),
    qk_norm=draw(flag),
    sliding_window=draw(st.none() | size),
    tie_embeddings=draw(flag),
    logit_softcap=draw(st.none() | positive),
    embed_scale=draw(flag),
    parallel_residual=draw(flag),
    dropout=draw(st.floats(0, 1, exclude_max=True)),
    dtype=draw(st.sampled_from(DTYPES)),
    attention=draw(st.sampled_from(ATTENTIONS)),
    remat=draw(st.sampled_from(REMATS)),
    norm_position=draw(st.sampled_from(NORM_POSITIONS)),
    norm_offset=draw(flag),
    query_scale_dim=draw(st.none() | size),
  )
  return ModelConfig(**fields | more)


@settings(deadline=None)
@given(configs())
def test_json_and_back_is_the_same_config(config):
  text = json.dumps(config.to_dict(), allow_nan=False)
  restored = ModelConfig.from_dict(json.loads(text))
  assert restored == config
  assert hash(restored) == hash(config)


# Comparing groupings at an equal number of parameters.


@pytest.mark.parametrize('mlp', [GATED, PLAIN])
@pytest.mark.parametrize('num_kv_heads', [3, 2, 1, (6, 1), (2, 3)])
def test_fewer_kv_heads_save_exactly_their_kernels(mlp, num_kv_heads):
  whole, grouped = make(mlp=mlp), make(mlp=mlp, num_kv_heads=num_kv_heads)
  saved_heads = sum(6 - k for k in grouped.kv_heads)
  saved = 2 * 10 * 8 * saved_heads  # 2 * L * D * H * (N - K)
  assert count_params(whole) - count_params(grouped) == saved > 0


@pytest.mark.parametrize('mlp', [GATED, PLAIN])
@pytest.mark.parametrize('num_kv_heads', [3, 2, 1, (6, 1), (2, 3)])
def test_matched_models_have_the_parameters_of_the_multi_head_one(
  mlp, num_kv_heads
):
  whole = count_params(make(mlp=mlp))
  fields = SIZES | {
    'mlp': mlp,
    'num_kv_heads': num_kv_heads,
    'match_params': True,
  }
  grouped = ModelConfig.from_dict(fields)
  kernels = 3 if mlp == GATED else 2
  half_a_column = 2 * 10 * kernels / 2  # of every layer
  assert abs(count_params(grouped) - whole) <= half_a_column
  assert grouped.mlp_dim > 14


def test_matching_a_multi_head_model_changes_nothing():
  assert make().matched() == make()
  assert ModelConfig.from_dict(SIZES | {'match_params': True}) == make()
  assert ModelConfig.from_dict(SIZES | {'match_params': False}) == make()
