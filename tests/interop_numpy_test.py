"""Logits of imported checkpoints against decoders written in numpy."""

import json
import math

import numpy as np
import pytest
from interop_samples import (
  GPT2,
  LLAMA,
  MISTRAL,
  OTHERS,
  QWEN2,
  L,
  T,
  V,
  apply,
  export,
  opened,
  tensors_of,
  write,
)

from gqa.interop import hugging_face
from gqa.interop.directory import Directory


def logits_of(config, tensors, tokens, tmp_path, name='x'):
  source = write(tmp_path / name, config, tensors)
  target = str(tmp_path / f'{name} imported')
  hugging_face.import_directory(source, target)
  return np.asarray(apply(*opened(target), tokens))


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
    if c['model_type'] == 'qwen3':
      q, k = (
        norm(x, f'{at}.self_attn.{n}_norm') for n, x in (('q', q), ('k', k))
      )
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


def neox_logits(c, w, tokens):
  w = {name: x.astype(np.float64) for name, x in w.items()}
  linear = lambda x, name: x @ w[f'{name}.weight'].T + w[f'{name}.bias']
  norm = lambda x, name: layer_norm(x, w, name, 1e-5)
  erf = np.vectorize(math.erf)

  def turned(x):
    rotary = int(x.shape[-1] * c['rotary_pct'])
    parts = [rotate(x[..., :rotary], c['rotary_emb_base']), x[..., rotary:]]
    return np.concatenate(parts, axis=-1)

  x = w['gpt_neox.embed_in.weight'][tokens]
  for i in range(L):
    at = f'gpt_neox.layers.{i}'
    y = linear(
      norm(x, f'{at}.input_layernorm'), f'{at}.attention.query_key_value'
    )
    y = y.reshape(len(tokens), c['num_attention_heads'], 3, -1)
    q, k, v = turned(y[:, :, 0]), turned(y[:, :, 1]), y[:, :, 2]
    attention = linear(attend(q, k, v), f'{at}.attention.dense')
    y = norm(x, f'{at}.post_attention_layernorm')
    y = linear(y, f'{at}.mlp.dense_h_to_4h')
    y = y / 2 * (1 + erf(y / np.sqrt(2)))
    x = x + attention + linear(y, f'{at}.mlp.dense_4h_to_h')
  return norm(x, 'gpt_neox.final_layer_norm') @ w['embed_out.weight'].T


REFERENCES = {
  'llama': (LLAMA, llama_logits),
  'mistral': (MISTRAL, llama_logits),
  'qwen2': (QWEN2, llama_logits),
  'qwen3': (LLAMA | dict(model_type='qwen3'), llama_logits),
  'gpt2': (GPT2, gpt2_logits),
  'gpt_neox': (OTHERS['gpt_neox'], neox_logits),
}
SQUARE = {
  'qwen2': ('self_attn.q_proj', 'self_attn.o_proj', 'mlp.gate_proj'),
  'gpt2': ('attn.c_proj', 'mlp.c_fc'),
  'gpt_neox': ('attention.dense',),
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
  for part in SQUARE.get(name, ()):
    wrong = {n: x.T if f'{part}.' in n else x for n, x in tensors.items()}
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
