"""GGUF files are the Hugging Face checkpoints that they were made of."""

import json
import struct

import numpy as np
import pytest
import tokenizers
from interop_samples import (
  LLAMA,
  OTHERS,
  QWEN2,
  equal_trees,
  gguf_file,
  opened,
  tensors_of,
  write,
)

from gqa import generate, tokenizer
from gqa.interop import gguf_tokenizer, hugging_face, tokenizer_files

gguf = pytest.importorskip('gguf')
gguf_lib = pytest.importorskip('gqa.interop.gguf')

# The names of llama.cpp, in the order of the longest first.
RENAMED = (
  ('model.embed_tokens', 'token_embd'),
  ('model.layers.', 'blk.'),
  ('self_attn.q_norm', 'attn_q_norm'),
  ('self_attn.k_norm', 'attn_k_norm'),
  ('self_attn.q_proj', 'attn_q'),
  ('self_attn.k_proj', 'attn_k'),
  ('self_attn.v_proj', 'attn_v'),
  ('self_attn.o_proj', 'attn_output'),
  ('mlp.gate_proj', 'ffn_gate'),
  ('mlp.up_proj', 'ffn_up'),
  ('mlp.down_proj', 'ffn_down'),
  ('input_layernorm', 'attn_norm'),
  ('model.norm', 'output_norm'),
  ('lm_head', 'output'),
)
AFTER = {
  'llama': (('post_attention_layernorm', 'ffn_norm'),),
  'gemma3': (
    ('post_attention_layernorm', 'post_attention_norm'),
    ('pre_feedforward_layernorm', 'ffn_norm'),
    ('post_feedforward_layernorm', 'post_ffw_norm'),
  ),
}
AFTER['qwen2'] = AFTER['llama']


def interleaved(rows, num_heads):
  """Rows of each head in the order 0, H/2, 1, H/2 + 1, ..."""
  head_dim = len(rows) // num_heads
  order = [
    n * head_dim + half * head_dim // 2 + j
    for n in range(num_heads)
    for j in range(head_dim // 2)
    for half in range(2)
  ]
  return rows[order]


def converted(arch, config, tensors):
  """The tensors as llama.cpp's converter stores them: (name, array)."""
  for name, x in tensors.items():
    for old, new in RENAMED + AFTER[arch]:
      name = name.replace(old, new)
    if arch == 'llama' and '.attn_q.' in name:
      x = interleaved(x, config['num_attention_heads'])
    elif arch == 'llama' and '.attn_k.' in name:
      x = interleaved(x, config['num_key_value_heads'])
    elif arch == 'gemma3' and name.endswith('norm.weight'):
      x = x + np.float32(1)
    yield name, x


def value(x):
  """A value and its kind, as a pair of the file."""
  if isinstance(x, str):
    return 8, struct.pack('<Q', len(x.encode())) + x.encode()
  if isinstance(x, bool):
    return 7, struct.pack('<?', x)
  if isinstance(x, int):
    return 4, struct.pack('<I', x)
  if isinstance(x, float):
    return 6, struct.pack('<f', x)
  kind = value(x[0])[0]
  return 9, struct.pack('<IQ', kind, len(x)) + b''.join(value(y)[1] for y in x)


def metadata(arch, config, vocabulary, **more):
  keys = {
    'block_count': config['num_hidden_layers'],
    'context_length': config['max_position_embeddings'],
    'embedding_length': config['hidden_size'],
    'feed_forward_length': config['intermediate_size'],
    'attention.head_count': config['num_attention_heads'],
    'attention.head_count_kv': config['num_key_value_heads'],
    'attention.key_length': config['head_dim'],
    'attention.value_length': config['head_dim'],
    'attention.layer_norm_rms_epsilon': config['rms_norm_eps'],
    'rope.freq_base': config['rope_theta'],
    'rope.dimension_count': config['head_dim'],
  } | more
  pairs = {'general.architecture': arch} | vocabulary
  pairs |= {f'{arch}.{key}': x for key, x in keys.items()}
  return [(key, *value(x)) for key, x in pairs.items()]


def vocabulary(size):
  """A byte-level tokenizer without merges but one."""
  tokens = [f't{i}' for i in range(size - 5)] + ['a', 'b', 'ab', '<s>', '</s>']
  return {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [1] * (size - 2) + [3, 3],
    'tokenizer.ggml.merges': ['a b'],
    'tokenizer.ggml.bos_token_id': size - 2,
    'tokenizer.ggml.eos_token_id': size - 1,
  }


GEMMA = {k: v for k, v in OTHERS['gemma3_text'].items() if 'pattern' not in k}
CASES = {
  'llama': (
    'llama',
    LLAMA | dict(rope_scaling={'type': 'linear', 'factor': 2.0}),
    {'rope.scaling.type': 'linear', 'rope.scaling.factor': 2.0},
  ),
  'qwen2': (
    'qwen2',
    QWEN2
    | dict(
      rope_scaling={
        'type': 'yarn',
        'factor': 4.0,
        'original_max_position_embeddings': 8,
      }
    ),
    {
      'rope.scaling.type': 'yarn',
      'rope.scaling.factor': 4.0,
      'rope.scaling.original_context_length': 8,
    },
  ),
  'gemma3': (
    'gemma3',
    # What llama.cpp takes for granted.
    GEMMA
    | dict(
      num_hidden_layers=7, query_pre_attn_scalar=4, rope_local_base_freq=1e4
    ),
    {
      'attention.sliding_window': 3,
      'rope.scaling.type': 'linear',
      'rope.scaling.factor': 8.0,
    },
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_a_file_is_imported_like_the_checkpoint_it_was_made_of(name, tmp_path):
  arch, config, more = CASES[name]
  tensors = tensors_of(config)
  hugging_face.import_directory(
    write(tmp_path / 'x', config, tensors), str(tmp_path / '1')
  )
  stored = [
    (n, x.shape, 0, x.tobytes()) for n, x in converted(arch, config, tensors)
  ]
  pairs = metadata(arch, config, vocabulary(config['vocab_size']), **more)
  (tmp_path / 'x.gguf').write_bytes(gguf_file(pairs, stored))
  gguf_lib.import_file(str(tmp_path / 'x.gguf'), str(tmp_path / '2'))
  (one, params), (two, same) = (opened(str(tmp_path / n)) for n in '12')
  assert one == two
  if arch == 'gemma3':
    # A float32 that 1 was added to has lost its last bits.
    np.testing.assert_allclose(
      params['final_norm'].pop('scale'),
      same['final_norm'].pop('scale'),
      atol=1e-6,
    )
    for layer in [key for key in params if key.startswith('layer_')]:
      for tree in (params, same):
        tree[layer] = {k: v for k, v in tree[layer].items() if 'norm' not in k}
        for part in ('query_norm', 'key_norm'):
          tree[layer]['attention'].pop(part)
  equal_trees(params, same)
  loaded = generate.load(str(tmp_path / '2')).tokenizer
  assert loaded.encode('abba').tolist() == [14, 13, 12]
  assert loaded.stop_ids == (16, 15) and not loaded.add_bos


def test_quantised_weights_are_what_the_package_makes_of_them(tmp_path):
  config = LLAMA | dict(hidden_size=64, intermediate_size=64, head_dim=32)
  tensors = tensors_of(config)
  stored, expected = [], {}
  kinds = gguf.GGMLQuantizationType
  for n, x in converted('llama', config, tensors):
    kind = kinds.Q8_0 if x.ndim == 2 else kinds.F32
    data = gguf.quants.quantize(x, kind)
    stored.append((n, x.shape, int(kind), data.tobytes()))
    expected[n] = gguf.quants.dequantize(data, kind)
  pairs = metadata('llama', config, vocabulary(17))
  (tmp_path / 'x.gguf').write_bytes(gguf_file(pairs, stored))
  gguf_lib.import_file(str(tmp_path / 'x.gguf'), str(tmp_path / '1'))
  _, params = opened(str(tmp_path / '1'))
  up = params['layer_0']['mlp']['up']['kernel']
  np.testing.assert_array_equal(up, expected['blk.0.ffn_up.weight'].T)
  original = tensors['model.layers.0.mlp.up_proj.weight'].T
  assert 0 < np.abs(up - original).max() < 0.02


def test_llama_3_s_scaling_is_recognised_by_what_follows_from_it(tmp_path):
  scaling = dict(
    rope_type='llama3',
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
  )
  config = LLAMA | dict(
    head_dim=32, rope_theta=5e5, rope_scaling=scaling, num_hidden_layers=1
  )
  tensors = tensors_of(config)
  stored = [
    (n, x.shape, 0, x.tobytes()) for n, x in converted('llama', config, tensors)
  ]
  turns = 8192 * 5e5 ** (-np.arange(16) / 16) / (2 * np.pi)
  mix = np.clip((turns - 1) / 3, 0, 1)
  divisors = (1 / (mix + (1 - mix) / 32)).astype(np.float32)
  assert len(set(divisors.tolist())) > 2
  pairs = metadata('llama', config, vocabulary(17))
  path = tmp_path / 'x.gguf'
  store = lambda x: path.write_bytes(
    gguf_file(pairs, [*stored, ('rope_freqs.weight', (16,), 0, x.tobytes())])
  )
  store(divisors)
  got = gguf_lib.import_file(str(path), str(tmp_path / '1'))
  assert (got.rope_scaling, got.rope_factor) == ('llama3', 32.0)
  assert (got.rope_fast_turns, got.rope_original_len) == (4.0, 8192)
  store(divisors[::-1].copy())
  with pytest.raises(ValueError, match='not as Llama 3 does'):
    gguf_lib.import_file(str(path), str(tmp_path / '2'))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'general.architecture': 'mamba'}, "architecture 'mamba'"),
    ({'llama.new_trick': 3}, 'has new_trick=3'),
    ({'llama.expert_count': 8}, 'expert_count=8'),
    ({'llama.rope.dimension_count': 2}, 'rope.dimension_count=2'),
    ({'llama.rope.scaling.type': 'su'}, "'su'"),
    ({'tokenizer.ggml.model': 'bert'}, "model='bert' is not supported"),
    ({'tokenizer.ggml.pre': 'odd'}, "pre='odd' is not supported"),
    ({'tokenizer.ggml.merges': ['a x']}, "merges has 'a x'"),
    ({'tokenizer.ggml.tokens': ['a'] * 17}, '17 entries, 1 of them different'),
  ],
)
def test_what_is_not_known_is_refused_by_name(change, message, tmp_path):
  tensors = tensors_of(LLAMA)
  stored = [
    (n, x.shape, 0, x.tobytes()) for n, x in converted('llama', LLAMA, tensors)
  ]
  pairs = metadata('llama', LLAMA, vocabulary(17))
  known = {key: (key, kind, data) for key, kind, data in pairs}
  known |= {key: (key, *value(x)) for key, x in change.items()}
  (tmp_path / 'x.gguf').write_bytes(gguf_file([*known.values()], stored))
  with pytest.raises(ValueError, match=message):
    gguf_lib.import_file(str(tmp_path / 'x.gguf'), str(tmp_path / '1'))


# Tokenizers.

TEXT = "The größte cat's 1234 mats,\n\n  isn't it?  日本語 \t ok"
WORDS = ['the cat sat on the mat', "isn't it 1234 größte 日本語"] * 4


def rebuilt(tmp_path, values, size):
  for name, content in gguf_tokenizer.files(values, size).items():
    (tmp_path / name).write_bytes(content)
  return tokenizer.load(str(tmp_path))


def test_a_byte_level_tokenizer_is_rebuilt_from_tokens_and_merges(tmp_path):
  made = tokenizer.train_bpe(WORDS, 300)
  made.save(tmp_path)
  plain = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  model = json.loads(plain.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  values = {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'gpt-2',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [
      3 if t[0] == '<' and len(t) > 3 else 1 for t in tokens
    ],
    'tokenizer.ggml.merges': [' '.join(pair) for pair in model['merges']],
    'tokenizer.ggml.bos_token_id': made.bos_id,
    'tokenizer.ggml.eos_token_id': made.eos_id,
    'tokenizer.ggml.eot_token_id': 5,
    'tokenizer.ggml.add_bos_token': True,
  }
  (tmp_path / 'out').mkdir()
  again = rebuilt(tmp_path / 'out', values, len(tokens))
  assert again.encode(TEXT).tolist() == made.encode(TEXT).tolist()
  assert again.decode(again.encode(TEXT)) == TEXT
  assert again.stop_ids == (made.eos_id, made.bos_id, 5)
  assert tokenizer_files.begins_with_bos(tmp_path / 'out')


@pytest.mark.parametrize('prefix', [True, False])
def test_a_sentence_piece_tokenizer_is_rebuilt_from_scores(prefix, tmp_path):
  pieces = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256))]
  words = ['▁', 't', 'h', 'e', 'c', 'a', '▁t', 'he', '▁the', 'at', '▁c', '▁cat']
  size = len(pieces) + len(words)
  values = {
    'tokenizer.ggml.model': 'llama',
    'tokenizer.ggml.tokens': pieces + words,
    'tokenizer.ggml.token_type': [2, 3, 3] + [6] * 256 + [1] * len(words),
    'tokenizer.ggml.scores': [0.0] * len(pieces)
    + [-float(i) for i in range(len(words))],
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.unknown_token_id': 0,
    'tokenizer.ggml.add_space_prefix': prefix,
  }
  made = rebuilt(tmp_path, values, size)
  names = dict(zip(pieces + words, range(size), strict=True))
  expected = ['▁the'] if prefix else ['t', 'he']
  expected += ['▁cat', '▁', '<0xC3>', '<0xB6>']
  assert made.encode('the cat ö').tolist() == [names[p] for p in expected]
  assert made.decode(made.encode('the cat ö')) == 'the cat ö'
  assert tokenizer_files.begins_with_bos(tmp_path)
