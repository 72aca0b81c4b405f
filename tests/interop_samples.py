"""Checkpoints of every family that the tests of gqa.interop read and write."""

import functools
import json
import struct

import jax
import ml_dtypes
import numpy as np

from gqa import checkpoint, model
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.interop import families, hugging_face

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

NEOX = dict(
  model_type='gpt_neox',
  vocab_size=V,
  hidden_size=24,
  num_hidden_layers=L,
  num_attention_heads=3,
  intermediate_size=20,
)

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
  'gpt_neox': NEOX
  | dict(max_position_embeddings=16, rotary_pct=0.5, rotary_emb_base=100),
  'gpt_neox tied': NEOX
  | dict(
    tie_word_embeddings=True,
    use_parallel_residual=False,
    attention_bias=False,
    hidden_act='gelu_fast',
  ),
  'gpt2 untied': GPT2 | dict(tie_word_embeddings=False, n_inner=20),
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
ALL = {
  'llama': LLAMA,
  'mistral': MISTRAL,
  'qwen2': QWEN2,
  'gpt2': GPT2,
} | OTHERS
NAMES = {
  np.dtype(np.float32): 'F32',
  np.dtype(np.float16): 'F16',
  np.dtype(ml_dtypes.bfloat16): 'BF16',
  np.dtype(np.uint8): 'U8',
}


def encode(tensors, metadata=None):
  """A safetensors file of arrays, written by the format's description."""
  header, data = {}, b''
  if metadata is not None:
    header['__metadata__'] = metadata
  for name, array in tensors.items():
    begin = len(data)
    data += array.tobytes()
    header[name] = {
      'dtype': NAMES[array.dtype],
      'shape': list(array.shape),
      'data_offsets': [begin, len(data)],
    }
  return with_header(json.dumps(header).encode(), data)


def with_header(header, data=b''):
  return struct.pack('<Q', len(header)) + header + data


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
  config = ModelConfig.from_dict(workdir_lib.load_config(workdir)['model'])
  params, _ = checkpoint.load_params(workdir)
  return config, jax.tree.map(np.asarray, params)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, tokens):
  return model.Decoder(config).apply({'params': params}, tokens)


def equal_trees(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


def export(workdir, target, **options):
  return hugging_face.export_directory(workdir, target, **options)


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
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), shapes
  )
  path.mkdir()
  checkpoint.save_params(path, params, {})
  run = {'model': config.to_dict(), 'compilation_cache': ''} | sections
  workdir_lib.save_config(path, run)
  return str(path)


def gguf_file(pairs, tensors=(), counts=None):
  """A header by the format's description: pairs of (key, kind, bytes)."""
  text = lambda s: struct.pack('<Q', len(s)) + s.encode()
  num_tensors, num_pairs = counts or (len(tensors), len(pairs))
  made = b'GGUF' + struct.pack('<IQQ', 3, num_tensors, num_pairs)
  for key, kind, value in pairs:
    made += text(key) + struct.pack('<I', kind) + value
  data = b''
  for name, shape, kind, content in tensors:
    made += text(name) + struct.pack('<I', len(shape))
    made += b''.join(struct.pack('<Q', n) for n in shape[::-1])
    made += struct.pack('<IQ', kind, len(data))
    data += content + bytes(-len(content) % 32)
  return made + bytes(-len(made) % 32) + data
