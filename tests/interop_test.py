"""Other people's checkpoints against numpy, and back without a changed bit."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_files_test import encode

from gqa import checkpoint, evaluate, generate, model, sharding, tokenizer
from gqa.config import ModelConfig
from gqa.interop import families, hugging_face, weights
from gqa.interop.directory import Directory
from gqa.interop.layout import Tensor

ROOT = pathlib.Path(__file__).parents[1]
V, L, T = 17, 2, 7

# Sizes in which no two axes of a tensor are alike, and 3 = group size is not 2
# = KV heads; `square` ones in which a wrong transpose has the right shape.
LLAMA = dict(
  model_type='llama',
  vocab_size=V,
  hidden_size=12,
  num_hidden_layers=L,
  num_attention_heads=6,
  num_key_value_heads=2,
  head_dim=4,
  intermediate_size=14,
  max_position_embeddings=16,
  rms_norm_eps=1e-3,
  rope_theta=50.0,
)
QWEN2 = LLAMA | dict(
  model_type='qwen2',
  head_dim=2,  # 6 heads of 2: q_proj and o_proj are square
  intermediate_size=12,  # and so are those of the MLP
  tie_word_embeddings=True,
)
# No width of 12 / 6 heads anywhere.
MISTRAL = LLAMA | dict(
  model_type='mistral',
  hidden_size=10,
  num_attention_heads=4,
  head_dim=8,
  sliding_window=3,
)
GPT2 = dict(
  model_type='gpt2',
  vocab_size=V,
  n_embd=8,
  n_layer=L,
  n_head=2,
  n_inner=8,  # square, as attention's c_proj is
  n_positions=16,
  layer_norm_epsilon=1e-3,
)


def draw(rng, shape, name):
  """A tensor with numbers as large as trained ones, and no bias near 0."""
  x = rng.normal(size=shape)
  if name.endswith('norm.weight') or '.ln_' in name and x.ndim == 1:
    return (1 + 0.3 * x).astype(np.float32)
  return (0.7 * x).astype(np.float32)


def tensors_of(config, seed=0):
  """Random tensors by the names that the family gives them."""
  kind, ours = families.read_config(config)
  rng = np.random.default_rng(seed)
  return {
    tensor.name: draw(rng, tensor.shape, tensor.name)
    for tensor in families.FAMILIES[kind].tensors(ours)
  }


def write(directory, config, tensors):
  """A Hugging Face directory."""
  directory.mkdir(exist_ok=True, parents=True)
  (directory / 'config.json').write_text(json.dumps(config))
  (directory / 'model.safetensors').write_bytes(encode(tensors))
  return str(directory)


def opened(workdir):
  """The config and the parameters of a workdir, as arrays of numpy."""
  config = ModelConfig.from_dict(checkpoint.load_config(workdir)['model'])
  params, _ = checkpoint.load_params(workdir)
  return config, jax.tree.map(np.asarray, params)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, tokens):
  return model.Decoder(config).apply({'params': params}, tokens)


def logits_of(config, tensors, tokens, tmp_path, name='x'):
  source = write(tmp_path / name, config, tensors)
  target = str(tmp_path / f'{name} imported')
  hugging_face.import_directory(source, target)
  return np.asarray(apply(*opened(target), tokens))


def equal_trees(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


# Decoders in numpy, on the tensors as the checkpoints name them.


def rms_norm(x, scale, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def layer_norm(x, w, name, eps):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
  return x * w[f'{name}.weight'] + w[f'{name}.bias']


def attend(q, k, v, window=None):
  """q [T, N, H]; k and v [T, K, H]; head n reads n // (N / K)."""
  length, num_heads, head_dim = q.shape
  out = np.zeros_like(q)
  for n in range(num_heads):
    m = n // (num_heads // k.shape[1])
    scores = q[:, n] @ k[:, m].T / np.sqrt(head_dim)
    ago = np.arange(length)[:, None] - np.arange(length)
    seen = (ago >= 0) & (ago < (window or length))
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out[:, n] = p / p.sum(-1, keepdims=True) @ v[:, m]
  return out.reshape(length, -1)


def rotate(x, theta):
  """The second half of a head is the imaginary part of the first."""
  length, _, head_dim = x.shape
  half = head_dim // 2
  angle = np.arange(length)[:, None] * theta ** (-np.arange(half) / half)
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
  return np.concatenate([z.real, z.imag], axis=-1)


def llama_logits(c, w, tokens):
  w = {name: x.astype(np.float64) for name, x in w.items()}
  heads = lambda x: x.reshape(len(tokens), -1, c['head_dim'])
  linear = lambda x, name: (
    x @ w[f'{name}.weight'].T + w.get(f'{name}.bias', 0.0)
  )
  norm = lambda x, name: rms_norm(x, w[f'{name}.weight'], c['rms_norm_eps'])
  x = w['model.embed_tokens.weight'][tokens]
  for i in range(L):
    at = f'model.layers.{i}'
    y = norm(x, f'{at}.input_layernorm')
    q, k, v = (heads(linear(y, f'{at}.self_attn.{n}_proj')) for n in 'qkv')
    q, k = rotate(q, c['rope_theta']), rotate(k, c['rope_theta'])
    y = attend(q, k, v, c.get('sliding_window'))
    x = x + linear(y, f'{at}.self_attn.o_proj')
    y = norm(x, f'{at}.post_attention_layernorm')
    gate = linear(y, f'{at}.mlp.gate_proj')
    y = gate / (1 + np.exp(-gate)) * linear(y, f'{at}.mlp.up_proj')
    x = x + linear(y, f'{at}.mlp.down_proj')
  head = w.get('lm_head.weight', w['model.embed_tokens.weight'])
  return norm(x, 'model.norm') @ head.T


def gpt2_logits(c, w, tokens):
  w = {name: x.astype(np.float64) for name, x in w.items()}
  conv = lambda x, name: x @ w[f'{name}.weight'] + w[f'{name}.bias']
  norm = lambda x, name: layer_norm(x, w, name, c['layer_norm_epsilon'])
  top = 'transformer'
  x = w[f'{top}.wte.weight'][tokens] + w[f'{top}.wpe.weight'][: len(tokens)]
  for i in range(L):
    at = f'{top}.h.{i}'
    y = conv(norm(x, f'{at}.ln_1'), f'{at}.attn.c_attn')
    q, k, v = np.split(y.reshape(len(tokens), 3 * c['n_head'], -1), 3, axis=1)
    x = x + conv(attend(q, k, v), f'{at}.attn.c_proj')
    y = conv(norm(x, f'{at}.ln_2'), f'{at}.mlp.c_fc')
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    x = x + conv(y, f'{at}.mlp.c_proj')
  return norm(x, f'{top}.ln_f') @ w[f'{top}.wte.weight'].T


REFERENCES = {
  'llama': (LLAMA, llama_logits),
  'mistral': (MISTRAL, llama_logits),
  'qwen2': (QWEN2, llama_logits),
  'gpt2': (GPT2, gpt2_logits),
}
SQUARE = {
  'llama': (),
  'mistral': (),
  'qwen2': ('self_attn.q_proj', 'self_attn.o_proj', 'mlp.gate_proj'),
  'gpt2': ('attn.c_proj', 'mlp.c_fc'),
}


@pytest.mark.parametrize('name', REFERENCES)
def test_logits_are_those_of_numpy_and_no_transpose_hides(name, tmp_path):
  config, reference = REFERENCES[name]
  tensors = tensors_of(config)
  tokens = np.random.default_rng(1).integers(V, size=T).astype(np.int32)
  expected = reference(config, tensors, tokens)
  assert expected.std() > 0.3
  got = logits_of(config, tensors, tokens[None], tmp_path)[0]
  np.testing.assert_allclose(got, expected, atol=1e-4)
  for part in SQUARE[name]:
    wrong = {n: x.T if part in n else x for n, x in tensors.items()}
    got = logits_of(config, wrong, tokens[None], tmp_path, part)[0]
    assert np.abs(got - expected).max() > 0.01, part


def test_biases_of_qwen2_count_and_are_there_in_every_layer(tmp_path):
  tensors = tensors_of(QWEN2)
  biases = [name for name in tensors if name.endswith('bias')]
  assert len(biases) == 3 * L
  tokens = np.arange(T, dtype=np.int32)[None]
  whole = logits_of(QWEN2, tensors, tokens, tmp_path, 'whole')
  for part in ('q_proj', 'v_proj'):
    without = tensors | {n: 0 * tensors[n] for n in biases if part in n}
    got = logits_of(QWEN2, without, tokens, tmp_path, part)
    assert np.abs(got - whole).max() > 0.01, part
  target = str(tmp_path / 'exported')
  assert export(str(tmp_path / 'whole imported'), target) == 'qwen2'
  assert biases == [n for n in Directory(target).tensors if 'bias' in n]
  exported = [n for n in tensors_of(LLAMA) if 'bias' in n]
  assert not exported


def export(workdir, target, **options):
  return hugging_face.export_directory(workdir, target, **options)


def test_an_explicit_head_dim_is_used_everywhere(tmp_path):
  source = write(tmp_path / 'x', MISTRAL, tensors_of(MISTRAL))
  hugging_face.import_directory(source, str(tmp_path / 'imported'))
  config, params = opened(str(tmp_path / 'imported'))
  attention = params['layer_0']['attention']
  assert config.head_dim == 8
  assert attention['query']['kernel'].shape == (10, 4, 8)
  assert attention['key']['kernel'].shape == (10, 2, 8)
  assert attention['out']['kernel'].shape == (4, 8, 10)
  export(str(tmp_path / 'imported'), str(tmp_path / 'exported'))
  written = json.loads((tmp_path / 'exported' / 'config.json').read_text())
  assert written['head_dim'] == 8
  assert written['num_key_value_heads'] == 2


# Every family: there and back.

OTHERS = {
  'qwen3': LLAMA
  | dict(model_type='qwen3', use_sliding_window=True, sliding_window=3)
  | dict(max_window_layers=1),
  'llama3': LLAMA
  | dict(
    attention_bias=True,
    mlp_bias=True,
    rope_scaling={
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 8,
    },
  ),
  'llama linear': LLAMA | dict(rope_scaling={'type': 'linear', 'factor': 2.0}),
  'qwen2 yarn': QWEN2
  | dict(
    tie_word_embeddings=False,
    rope_scaling={
      'type': 'yarn',
      'factor': 4.0,
      'original_max_position_embeddings': 16,
    },
  ),
  'gpt_neox': dict(
    model_type='gpt_neox',
    vocab_size=V,
    hidden_size=24,
    num_hidden_layers=L,
    num_attention_heads=3,
    intermediate_size=20,
    max_position_embeddings=16,
    rotary_pct=0.25,
    rotary_emb_base=100,
  ),
  'gpt_neox tied': dict(
    model_type='gpt_neox',
    vocab_size=V,
    hidden_size=24,
    num_hidden_layers=L,
    num_attention_heads=3,
    intermediate_size=20,
    tie_word_embeddings=True,
    use_parallel_residual=False,
    attention_bias=False,
    hidden_act='gelu_fast',
  ),
  'olmo2': LLAMA | dict(model_type='olmo2'),
  'phi': dict(
    model_type='phi',
    vocab_size=V,
    hidden_size=24,
    num_hidden_layers=L,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=20,
  ),
  'gemma': LLAMA
  | dict(model_type='gemma', hidden_act='gelu', hidden_activation=None),
  'gemma2': LLAMA
  | dict(
    model_type='gemma2',
    query_pre_attn_scalar=7,
    sliding_window=3,
    hidden_act='gelu_pytorch_tanh',
    attn_logit_softcapping=2.0,
  ),
  'gemma3_text': LLAMA
  | dict(
    model_type='gemma3_text',
    num_hidden_layers=3,
    query_pre_attn_scalar=7,
    sliding_window=3,
    sliding_window_pattern=2,
    rope_local_base_freq=20.0,
    rope_scaling={'rope_type': 'linear', 'factor': 8.0},
  ),
}
ALL = {name: config for name, (config, _) in REFERENCES.items()} | OTHERS


HALF = ('qwen2', 'gpt2', 'gpt_neox', 'gemma2')  # layouts of their own


@pytest.mark.parametrize(
  ('name', 'dtype'),
  [(name, 'float32') for name in ALL] + [(name, 'bfloat16') for name in HALF],
)
def test_import_export_import_changes_no_bit(
  name, dtype, tmp_path, monkeypatch
):
  tensors = tensors_of(ALL[name])
  if dtype == 'bfloat16':
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}
    monkeypatch.setattr(hugging_face, 'MAX_SHARD', 1000)
  source = write(tmp_path / 'source', ALL[name], tensors)
  first, back, second = (str(tmp_path / n) for n in ('1', 'back', '2'))
  hugging_face.import_directory(source, first)
  assert export(first, back, dtype=dtype) == ALL[name]['model_type']
  exported = Directory(back)
  assert set(exported.tensors) == set(tensors)
  for n, x in tensors.items():
    np.testing.assert_array_equal(exported.read(n), x)
    assert exported.tensors[n].dtype == x.dtype
  hugging_face.import_directory(back, second)
  (config, params), (again, same) = opened(first), opened(second)
  assert again == config
  equal_trees(params, same)
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
  if dtype == 'bfloat16':
    assert len(list(pathlib.Path(back).glob('*.safetensors'))) > 1


@pytest.mark.parametrize('name', ALL)
def test_the_tensors_of_a_family_are_the_parameters_of_the_model(name):
  kind, config = families.read_config(ALL[name])
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  found = {}
  for tensor in families.FAMILIES[kind].tensors(config):
    parts = tensor.split(np.zeros(tensor.shape, np.int8))
    for path, part in zip(tensor.paths, parts, strict=True):
      assert path not in found
      found[path] = part.shape
  paths = jax.tree_util.tree_leaves_with_path(shapes)
  assert found == {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in paths
  }


def test_values_of_one_head_stay_together_in_the_fused_tensor():
  _, config = families.read_config(OTHERS['gpt_neox'])
  fused: Tensor = next(
    t
    for t in families.FAMILIES['gpt_neox'].tensors(config)
    if t.name.endswith('0.attention.query_key_value.weight')
  )
  rows = np.arange(72)[:, None] * 100 + np.arange(24)
  query, key, value = fused.split(rows)
  # Head 1 has rows 24 to 47: its query first, then its key, then its value.
  np.testing.assert_array_equal(query[:, 1], rows[24:32].T)
  np.testing.assert_array_equal(key[:, 1], rows[32:40].T)
  np.testing.assert_array_equal(value[:, 1], rows[40:48].T)


# What config.json says.


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


# What the tensors are.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'model.layers.1.mlp.up_proj.weight': None},
      r'missing: model\.layers\.1\.mlp\.up_proj\.weight',
    ),
    (
      {'model.layers.0.self_attn.q_proj.bias': np.ones(24, np.float32)},
      r'unexpected: model\.layers\.0\.self_attn\.q_proj\.bias',
    ),
    (
      {'model.norm.weight': np.ones(13, np.float32)},
      r'model\.norm\.weight has shape \[13\], but config\.json makes it \[12\]',
    ),
    (
      {'model.norm.weight': np.ones(12, np.uint8)},
      r'model\.norm\.weight is of type uint8, not one of float32',
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named_and_leave_no_target(
  change, message, tmp_path
):
  tensors = tensors_of(LLAMA) | change
  tensors = {n: x for n, x in tensors.items() if x is not None}
  source = write(tmp_path / 'x', LLAMA, tensors)
  with pytest.raises(ValueError, match=message):
    hugging_face.import_directory(source, str(tmp_path / 'imported'))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


def test_names_of_other_versions_and_dead_buffers_are_understood(tmp_path):
  tensors = tensors_of(GPT2)
  hugging_face.import_directory(
    write(tmp_path / 'x', GPT2, tensors), str(tmp_path / '1')
  )
  others = {n.removeprefix('transformer.'): x for n, x in tensors.items()}
  others['h.0.attn.bias'] = np.ones((1, 1, 16, 16), np.uint8)
  others['lm_head.weight'] = tensors['transformer.wte.weight']
  hugging_face.import_directory(
    write(tmp_path / 'y', GPT2, others), str(tmp_path / '2')
  )
  equal_trees(opened(str(tmp_path / '1'))[1], opened(str(tmp_path / '2'))[1])
  others['lm_head.weight'] = -tensors['transformer.wte.weight']
  with pytest.raises(ValueError, match='ties the embeddings, but lm_head'):
    hugging_face.import_directory(
      write(tmp_path / 'y', GPT2, others), str(tmp_path / '3')
    )


@pytest.mark.parametrize('prefix', ['language_model.', 'model.language_model.'])
def test_the_text_part_of_a_gemma_that_sees_is_imported(prefix, tmp_path):
  inner = OTHERS['gemma3_text']
  tensors = tensors_of(inner)
  outer = {'vision_tower.x.weight': np.ones(2, np.float32)}
  for name, x in tensors.items():
    bare = name.removeprefix('model.') if 'model.l' in prefix else name
    outer[prefix + bare] = x
  config = {'model_type': 'gemma3', 'text_config': inner, 'vision_config': {}}
  hugging_face.import_directory(
    write(tmp_path / 'x', inner, tensors), str(tmp_path / '1')
  )
  hugging_face.import_directory(
    write(tmp_path / 'y', config, outer), str(tmp_path / '2')
  )
  (one, params), (two, same) = (opened(str(tmp_path / n)) for n in '12')
  assert one == two
  equal_trees(params, same)


def test_half_precision_is_kept_on_disk_and_widened_without_loss(tmp_path):
  tensors = {
    n: x.astype(ml_dtypes.bfloat16) for n, x in tensors_of(LLAMA).items()
  }
  source = write(tmp_path / 'x', LLAMA, tensors)
  whole, half = str(tmp_path / 'whole'), str(tmp_path / 'half')
  hugging_face.import_directory(source, whole)
  hugging_face.import_directory(source, half, 'bfloat16')
  config, params = opened(half)
  assert config.dtype == 'bfloat16'
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {'bfloat16'}
  mesh = sharding.make_mesh(
    type('Sizes', (), dict(data=1, fsdp=1, model=1)), jax.devices()[:1]
  )
  widened, _ = evaluate.load_params(half, 'latest', config, mesh)
  equal_trees(jax.tree.map(np.asarray, widened), opened(whole)[1])


def test_memory_while_reading_is_that_of_the_parameters(tmp_path):
  config = LLAMA | dict(
    hidden_size=192, intermediate_size=768, num_hidden_layers=6
  )
  tensors = {
    n: x.astype(ml_dtypes.bfloat16) for n, x in tensors_of(config).items()
  }
  kind, ours = families.read_config(config)
  source = Directory(write(tmp_path / 'x', config, tensors))
  size = 4 * sum(x.size for x in tensors.values())
  del tensors
  tracemalloc.start()
  params = weights.load(families.FAMILIES[kind], ours, source, 'float32')
  kept, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert sum(x.nbytes for x in jax.tree.leaves(params)) == size > 8e6
  assert peak < 1.2 * size
  # Besides what is kept (by jax itself, or as arrays of numpy).
  assert peak - kept < 0.4 * size


# What may be written, and as what.


def trained_here(**fields):
  base = dict(
    vocab_size=258,
    num_layers=1,
    embed_dim=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=14,
    max_len=16,
  )
  return ModelConfig(**base | fields)


def workdir_of(config, path, **sections):
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  path.mkdir()
  checkpoint.save_params(path, params, {})
  run = {'model': config.to_dict(), 'compilation_cache': ''} | sections
  checkpoint.save_config(path, run)
  return str(path)


@pytest.mark.parametrize(
  ('fields', 'family'),
  [
    ({}, 'llama'),
    (dict(qkv_bias=True), 'qwen2'),
    (dict(qk_norm=True), 'qwen3'),
    (dict(sliding_window=4), 'mistral'),
    (dict(embed_dim=10), 'mistral'),  # 6 heads do not divide it
    (dict(mlp='geglu', norm_offset=True, embed_scale=True), 'gemma'),
  ],
)
def test_a_model_is_written_as_the_first_family_with_its_features(
  fields, family
):
  kind, written = families.write_config(trained_here(**fields))
  assert (kind, written['model_type']) == (family, family)


@pytest.mark.parametrize(
  ('config', 'options', 'message'),
  [
    (
      trained_here(num_kv_heads=(6,)),
      dict(family='qwen3'),
      'qwen3: it has no qk_norm=False',
    ),
    (
      trained_here(num_layers=2, num_kv_heads=(6, 2)),
      {},
      r'num_kv_heads=\(6, 2\) differ between layers',
    ),
    (trained_here(logit_softcap=3.0), {}, 'llama: it has no logit_softcap=3.0'),
    (
      trained_here(
        position='learned',
        norm='layernorm',
        mlp='gelu',
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_dim=2,
      ),
      dict(preferred='gpt2'),
      'gpt2: it has no num_kv_heads=2.*but 6.*llama: .*no other family',
    ),
    (trained_here(), dict(family='bert'), "family='bert' is not known"),
  ],
)
def test_a_model_that_cannot_be_said_exactly_is_not_exported(
  config, options, message
):
  with pytest.raises(ValueError, match=message):
    families.write_config(config, **options)


def test_a_converted_model_keeps_its_family_and_says_its_kv_heads(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  hugging_face.import_directory(source, str(tmp_path / '1'))
  config, params = opened(str(tmp_path / '1'))
  for layer in ('layer_0', 'layer_1'):
    for name in ('key', 'value'):
      leaf = params[layer]['attention'][name]
      leaf['kernel'] = leaf['kernel'].mean(axis=1, keepdims=True)
  fewer = dataclasses.replace(config, num_kv_heads=1)
  (tmp_path / '2').mkdir()
  checkpoint.save_params(tmp_path / '2', params, {})
  run = checkpoint.load_config(tmp_path / '1')
  checkpoint.save_config(tmp_path / '2', run | {'model': fewer.to_dict()})
  export(str(tmp_path / '2'), str(tmp_path / 'back'))
  hugging_face.import_directory(str(tmp_path / 'back'), str(tmp_path / '3'))
  again, same = opened(str(tmp_path / '3'))
  assert again == fewer
  equal_trees(params, same)


def test_a_target_that_holds_something_is_left_alone(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  target = tmp_path / 'empty'
  target.mkdir()
  hugging_face.import_directory(source, str(target))
  for verb, start in (
    (hugging_face.import_directory, source),
    (export, str(target)),
  ):
    with pytest.raises(ValueError, match='exists and is not empty'):
      verb(start, str(target))
  assert opened(str(target))[0].num_heads == 6


# Tokenizers.


@pytest.fixture(scope='module')
def bpe():
  texts = ['the cat sat on the mat', 'größe 日本語 the cat'] * 3
  return tokenizer.train_bpe(texts, 270)


def with_tokenizer(directory, bpe, **files):
  config = LLAMA | dict(
    vocab_size=270, bos_token_id=bpe.bos_id, eos_token_id=bpe.eos_id
  )
  source = write(directory, config, tensors_of(config))
  bpe.save(source)
  for name, value in files.items():
    path = directory / name.replace('__', '.')
    path.write_text(json.dumps(value))
  return source


def test_stop_ids_and_files_of_a_tokenizer_come_along_and_go_back(
  bpe, tmp_path
):
  source = with_tokenizer(
    tmp_path / 'x',
    bpe,
    generation_config__json={'eos_token_id': [bpe.eos_id, 9], 'top_k': 5},
    special_tokens_map__json={'bos_token': '<bos>'},
  )
  (tmp_path / 'x' / 'chat_template.jinja').write_text('{{ messages }}')
  target = str(tmp_path / '1')
  hugging_face.import_directory(source, target)
  loaded = generate.load(target).tokenizer
  assert {bpe.eos_id, 9} <= set(loaded.stop_ids)
  assert not loaded.add_bos  # the file has no template that adds it
  assert loaded.encode_prompt('cat').tolist() == bpe.encode('cat').tolist()
  assert loaded.encode_prompt('').tolist() == [loaded.bos_id]
  export(target, str(tmp_path / 'back'))
  for name in ('generation_config.json', 'special_tokens_map.json'):
    kept = json.loads((tmp_path / 'back' / name).read_text())
    given = json.loads((tmp_path / 'x' / name).read_text())
    assert given.items() <= kept.items()
  assert (tmp_path / 'back' / 'chat_template.jinja').read_text()
  written = json.loads((tmp_path / 'back' / 'config.json').read_text())
  assert written['eos_token_id'] == [bpe.eos_id, 9]


@pytest.mark.parametrize('how', ['a flag', 'a template'])
def test_a_text_begins_as_the_tokenizer_of_the_model_begins_it(
  how, bpe, tmp_path
):
  source = with_tokenizer(tmp_path / 'x', bpe)
  if how == 'a flag':
    names = {'bos_token': '<bos>', 'eos_token': '<eos>', 'add_bos_token': True}
    (tmp_path / 'x' / 'tokenizer_config.json').write_text(json.dumps(names))
  else:
    path = tmp_path / 'x' / 'tokenizer.json'
    hugging_face._prepend_bos(path, bpe.bos_id)
  hugging_face.import_directory(source, str(tmp_path / '1'))
  loaded = generate.load(str(tmp_path / '1')).tokenizer
  bos = loaded.bos_id
  assert loaded.encode_prompt('cat').tolist() == [bos, *bpe.encode('cat')]


@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_an_exported_tokenizer_gives_the_ids_that_the_model_was_trained_on(
  kind, bpe, tmp_path
):
  tokenizers = pytest.importorskip('tokenizers')
  ours = bpe if kind == 'bpe' else tokenizer.ByteTokenizer()
  config = trained_here(vocab_size=270)
  workdir = workdir_of(config, tmp_path / 'run')
  ours.save(workdir)
  export(workdir, str(tmp_path / 'out'))
  path = tmp_path / 'out' / 'tokenizer.json'
  theirs = tokenizers.Tokenizer.from_file(str(path))
  text = 'the größte cat\n'
  expected = [ours.bos_id, *ours.encode(text).tolist()]
  assert theirs.encode(text).ids == expected
  assert theirs.decode(expected) == text
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['bos_token_id'] == ours.bos_id
  assert written['eos_token_id'] == ours.eos_id


# The command line.


def run(*arguments):
  code = (
    'import runpy, sys; sys.argv = sys.argv[1:]\n'
    'try: runpy.run_module("gqa.interop", run_name="__main__")\n'
    'finally: print("torch" in sys.modules, file=sys.stderr)'
  )
  return subprocess.run(
    [sys.executable, '-c', code, 'gqa.interop', *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_the_command_imports_without_torch_and_says_what_is_missing(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  done = run('import', f'--source={source}', f'--target={tmp_path / "run"}')
  assert done.returncode == 0, done.stderr
  assert '2 layers of 6 query and 2 KV heads' in done.stdout
  assert 'has no tokenizer.json' in done.stdout
  assert done.stderr.rstrip().endswith('False')
  opened(str(tmp_path / 'run'))


def test_a_failure_is_one_line(tmp_path):
  (tmp_path / 'config.json').write_text('{"model_type": "mamba"}')
  (tmp_path / 'model.safetensors').write_bytes(encode({}))
  done = run('import', f'--source={tmp_path}', '--target=x')
  assert done.returncode == 1
  lines = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(lines) == 1 and "model_type='mamba'" in lines[0]
  assert not (ROOT / 'x').exists()
