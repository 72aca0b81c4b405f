"""What a config.json says, and what of it is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_samples import ALL, GPT2, LLAMA, MISTRAL, OTHERS, QWEN2

from gqa.config import ModelConfig
from gqa.interop import families


def test_older_and_newer_forms_of_rope_are_the_same_config():
  forms = [
    dict(rope_theta=50.0, rope_scaling={'type': 'linear', 'factor': 2.0}),
    dict(rope_theta=50, rope_scaling={'rope_type': 'linear', 'factor': 2}),
    dict(
      rope_parameters={'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 50.0}
    ),
  ]
  bare = {k: v for k, v in LLAMA.items() if k != 'rope_theta'}
  configs = [families.read_config(bare | form)[1] for form in forms]
  assert configs[0] == configs[1] == configs[2]
  assert (configs[0].rope_scaling, configs[0].rope_factor) == ('linear', 2.0)


def test_older_and_newer_forms_of_two_ropes_are_the_same_config():
  old = OTHERS['gemma3_text']
  new = {k: v for k, v in old.items() if not k.startswith('rope_')} | dict(
    rope_parameters={
      'full_attention': old['rope_scaling'] | {'rope_theta': 50.0},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 20.0},
    },
    layer_types=['sliding_attention', 'full_attention', 'sliding_attention'],
  )
  del new['sliding_window_pattern']
  config = families.read_config(old)[1]
  assert families.read_config(new)[1] == config
  assert config.windows == (3, None, 3)
  assert (config.rope_theta, config.rope_local_theta) == (50.0, 20.0)


def test_yarn_scales_sines_as_advised_unless_told():
  scaling = dict(type='yarn', factor=4.0, original_max_position_embeddings=16)
  magnitude = lambda **more: (
    families.read_config(QWEN2 | {'rope_scaling': scaling | more})[
      1
    ].rope_magnitude
  )
  assert magnitude() == pytest.approx(0.1 * np.log(4) + 1)
  assert magnitude(attention_factor=1.25) == 1.25
  assert magnitude(mscale=0.5, mscale_all_dim=0.25) == pytest.approx(
    (0.05 * np.log(4) + 1) / (0.025 * np.log(4) + 1)
  )


def test_a_null_window_is_none_and_an_absent_one_the_default():
  window = lambda **more: (
    families.read_config(
      {k: v for k, v in MISTRAL.items() if k != 'sliding_window'} | more
    )[1].sliding_window
  )
  assert window() == 4096
  assert window(sliding_window=None) is None


def test_the_first_gemmas_gelu_is_the_approximation_and_neox_s_is_not():
  assert families.read_config(OTHERS['gemma'])[1].mlp == 'geglu'
  assert families.read_config(OTHERS['gpt_neox'])[1].mlp == 'gelu_exact'
  assert families.read_config(GPT2)[1].mlp == 'gelu'
  exact = families.read_config(GPT2 | dict(activation_function='gelu'))[1]
  assert exact.mlp == 'gelu_exact'


@pytest.mark.parametrize(
  ('config', 'change', 'message'),
  [
    (LLAMA, dict(model_type='mamba'), "model_type='mamba', which is not supp"),
    (LLAMA, dict(model_type=None), 'model_type=None'),
    (LLAMA, dict(new_trick=3), 'has new_trick=3, which this family'),
    (LLAMA, dict(hidden_size=None), 'has no hidden_size'),
    (LLAMA, dict(hidden_size='12'), "hidden_size='12', which must be of type"),
    (LLAMA, dict(hidden_size=True), 'hidden_size=True, which must be of type'),
    (LLAMA, dict(num_key_value_heads=4), 'num_kv_heads=4 must divide'),
    (LLAMA, dict(num_hidden_layers=1 << 40), 'more than 16384'),
    (LLAMA, dict(hidden_act='gelu'), "hidden_act='gelu', which is not supp"),
    (LLAMA, dict(rope_interleaved=True), 'rope_interleaved=True'),
    (LLAMA, dict(quantization_config={'bits': 4}), 'quantised weights'),
    (LLAMA, dict(rope_scaling={'type': 'dynamic', 'factor': 2.0}), 'dynamic'),
    (
      LLAMA,
      dict(rope_scaling={'type': 'longrope', 'factor': 2.0}),
      "RoPE by 'longrope'",
    ),
    (LLAMA, dict(rope_scaling={'type': 'linear'}), 'factor=None for RoPE'),
    (
      LLAMA,
      dict(rope_scaling={'type': 'linear', 'factor': 2.0, 'beta_fast': 3}),
      'beta_fast=3 in a RoPE scaling',
    ),
    (
      LLAMA,
      dict(rope_scaling={'type': 'yarn', 'factor': 2.0, 'truncate': False}),
      'truncate=False',
    ),
    (
      LLAMA,
      dict(
        rope_scaling={'type': 'linear', 'factor': 2.0},
        rope_parameters={'rope_type': 'default'},
      ),
      'both rope_scaling and rope_parameters',
    ),
    (QWEN2, dict(layer_types=['full_attention']), 'must be 2 times'),
    (GPT2, dict(scale_attn_weights=False), 'scale_attn_weights=False'),
    (
      GPT2,
      dict(scale_attn_by_inverse_layer_idx=True),
      'scale_attn_by_inverse_layer_idx=True',
    ),
    (GPT2, dict(n_head=3), 'must be a multiple of n_head=3'),
    (OTHERS['phi'], dict(qk_layernorm=True), 'qk_layernorm=True'),
    (
      OTHERS['gemma2'],
      dict(use_bidirectional_attention=True),
      'use_bidirectional_attention=True',
    ),
    (
      OTHERS['gemma3_text'],
      dict(attn_logit_softcapping=3.0),
      'attn_logit_softcapping=3.0',
    ),
  ],
)
def test_what_would_change_the_result_is_refused_by_name(
  config, change, message
):
  families.read_config(config)
  with pytest.raises(ValueError, match=message):
    families.read_config(config | change)


json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-5, 1 << 80)
  | st.floats()
  | st.sampled_from(['yarn', 'linear', 'full_attention', '']),
  lambda x: (
    st.lists(x, max_size=3)
    | st.dictionaries(st.sampled_from(['rope_type', 'factor', 'type']), x)
  ),
  max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_config_is_understood_or_refused(data):
  config = ALL[data.draw(st.sampled_from(sorted(ALL)))]
  names = st.sampled_from([*config, 'rope_scaling', 'rope_parameters'])
  change = data.draw(st.dictionaries(names, json_values, max_size=3))
  try:
    kind, read = families.read_config(config | change)
  except ValueError:
    return
  assert kind in families.FAMILIES and isinstance(read, ModelConfig)
