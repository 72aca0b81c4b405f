"""Checkpoints that transformers made give its logits, and go back to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_samples import equal_trees, opened

from gqa import cache, checkpoint, decode, model
from gqa import workdir as workdir_lib
from gqa.interop import hugging_face
from gqa.interop.directory import Directory

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

V, L, NEW = 29, 2, 6
LENGTHS = (4, 9, 1)  # of ragged prompts, longer than every window
TOLERANCE = dict(atol=1e-4, rtol=1e-4)

# 6 query and 2 KV heads: groups of 3. head_dim is no embed_dim / num_heads
# where the family has a field for it.
SIZES = dict(
  vocab_size=V,
  hidden_size=24,
  num_hidden_layers=L,
  num_attention_heads=6,
  num_key_value_heads=2,
  intermediate_size=20,
  max_position_embeddings=32,
  bos_token_id=0,
  eos_token_id=None,
  pad_token_id=0,
)
WIDE = SIZES | dict(head_dim=8)
ROPE = dict(rope_type='default', rope_theta=50.0)
FAMILIES = {
  'llama': lambda: transformers.LlamaConfig(
    **WIDE,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=ROPE
    | dict(
      rope_type='llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=16,
    ),
  ),
  'smollm': lambda: transformers.LlamaConfig(
    **SIZES | dict(tie_word_embeddings=True),
    rope_parameters=ROPE | dict(rope_type='linear', factor=2.5),
  ),
  'mistral': lambda: transformers.MistralConfig(
    **WIDE, sliding_window=3, rope_parameters=ROPE
  ),
  'qwen2': lambda: transformers.Qwen2Config(
    **SIZES | dict(tie_word_embeddings=True),
    use_sliding_window=True,
    sliding_window=3,
    max_window_layers=1,
    rope_parameters=ROPE
    | dict(
      rope_type='yarn',
      factor=4.0,
      beta_fast=4.0,
      original_max_position_embeddings=16,
    ),
  ),
  'qwen3': lambda: transformers.Qwen3Config(**WIDE, rope_parameters=ROPE),
  'gpt2': lambda: transformers.GPT2Config(
    vocab_size=V,
    n_embd=12,
    n_layer=L,
    n_head=3,
    n_inner=20,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
  ),
  'gpt2 untied': lambda: transformers.GPT2Config(
    **FAMILIES['gpt2']().to_dict() | dict(tie_word_embeddings=False)
  ),
  'gpt_neox': lambda: transformers.GPTNeoXConfig(
    **{k: v for k, v in SIZES.items() if k != 'num_key_value_heads'}
    | dict(num_attention_heads=3),
    rope_parameters=ROPE | dict(partial_rotary_factor=0.5),
  ),
  'gpt_neox in turn': lambda: transformers.GPTNeoXConfig(
    **{k: v for k, v in SIZES.items() if k != 'num_key_value_heads'}
    | dict(num_attention_heads=3, tie_word_embeddings=True),
    use_parallel_residual=False,
    rope_parameters=ROPE | dict(partial_rotary_factor=0.25),
  ),
  'olmo2': lambda: transformers.Olmo2Config(**SIZES, rope_parameters=ROPE),
  'phi': lambda: transformers.PhiConfig(
    **SIZES, rope_parameters=ROPE | dict(partial_rotary_factor=0.5)
  ),
  'gemma': lambda: transformers.GemmaConfig(**WIDE, rope_parameters=ROPE),
  'gemma2': lambda: transformers.Gemma2Config(
    **WIDE,
    query_pre_attn_scalar=5,
    sliding_window=3,
    final_logit_softcapping=2.0,
    attn_logit_softcapping=1.5,
    rope_parameters=ROPE,
  ),
  'gemma3_text': lambda: transformers.Gemma3TextConfig(
    **WIDE,
    query_pre_attn_scalar=5,
    sliding_window=3,
    layer_types=['sliding_attention', 'full_attention'],
    rope_parameters={
      'full_attention': ROPE | dict(rope_type='linear', factor=8.0),
      'sliding_attention': dict(rope_type='default', rope_theta=20.0),
    },
  ),
}


def make_peer(name):
  """A model with random numbers in every parameter, norms and biases too."""
  config = FAMILIES[name]()
  peer = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation='eager'
  )
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for key, x in peer.named_parameters():
      noise = torch.randn(x.shape, generator=generator)
      is_norm = ('norm' in key or 'ln_' in key) and key.endswith('weight')
      ones = is_norm and 'gemma' not in name
      scale = 0.3 if is_norm or key.endswith('bias') else x.shape[-1] ** -0.5
      x.copy_(scale * noise + (1 if ones else 0))
  return peer.eval()


def peer_logits(peer, tokens):
  with torch.no_grad():
    return peer(torch.tensor(np.asarray(tokens, np.int64))).logits.numpy()


def greedy(peer, prompts):
  """What the peer generates, a prompt at a time, [rows, NEW]."""
  rows = []
  for prompt in prompts:
    ids = torch.tensor(prompt[None].astype(np.int64))
    out = peer.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=NEW,
      do_sample=False,
    )
    rows.append(out[0, len(prompt) :].numpy())
  return np.stack(rows)


@functools.partial(jax.jit, static_argnums=0)
def whole(config, params, tokens):
  return model.Decoder(config).apply({'params': params}, tokens)


@functools.partial(jax.jit, static_argnums=0)
def cached(config, params, prompts, lengths, tokens):
  """Logits [NEW, rows, V]: after the prompts, then after each token."""
  kind = 'ring' if config.sliding_window else 'full'
  slots = prompts.shape[1] + NEW
  made = cache.init_cache(config, prompts.shape[0], slots, kind)
  first, made = decode.prefill(params, config, prompts, lengths, made)

  def step(made, token):
    logits, made = decode.decode_step(params, config, made, token)
    return made, logits

  _, rest = jax.lax.scan(step, made, tokens[:, :-1].T)
  return jnp.concatenate([first[None], rest])


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
  peer = make_peer(name)
  peer.save_pretrained(tmp_path / 'hf', max_shard_size='5KB')
  assert len(list((tmp_path / 'hf').glob('*.safetensors'))) > 1
  first = str(tmp_path / '1')
  hugging_face.import_directory(str(tmp_path / 'hf'), first)
  config, params = opened(first)

  rng = np.random.default_rng(0)
  tokens = rng.integers(V, size=(2, 12)).astype(np.int32)
  expected = peer_logits(peer, tokens)
  assert expected.std() > 0.3
  logits = whole(config, params, tokens)
  np.testing.assert_allclose(logits, expected, **TOLERANCE)

  prompts = [rng.integers(1, V, size=n).astype(np.int32) for n in LENGTHS]
  new = greedy(peer, prompts)
  packed, lengths = decode.pack(prompts)
  got = np.asarray(cached(config, params, packed, lengths, new))
  for row, (prompt, answer) in enumerate(zip(prompts, new, strict=True)):
    text = np.concatenate([prompt, answer])[None]
    want = peer_logits(peer, text)[0, len(prompt) - 1 : -1]
    np.testing.assert_allclose(got[:, row], want, **TOLERANCE)
    assert got[:, row].argmax(-1).tolist() == answer.tolist()

  # And back: the same tensors, the same logits, the same import.
  kind = hugging_face.export_directory(first, str(tmp_path / 'back'))
  assert kind == peer.config.model_type
  again = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'back', attn_implementation='eager'
  )
  assert type(again) is type(peer)
  state, other = peer.state_dict(), again.state_dict()
  assert state.keys() == other.keys()
  for key in state:
    assert torch.equal(state[key], other[key]), key
  np.testing.assert_allclose(peer_logits(again, tokens), logits, **TOLERANCE)
  hugging_face.import_directory(str(tmp_path / 'back'), str(tmp_path / '2'))
  config_again, params_again = opened(str(tmp_path / '2'))
  assert config_again == config
  equal_trees(params, params_again)


@pytest.mark.parametrize('name', FAMILIES)
def test_half_precision_in_one_file_is_the_same_numbers(name, tmp_path):
  peer = make_peer(name).to(torch.bfloat16)
  peer.save_pretrained(tmp_path / 'half')
  peer.to(torch.float32).save_pretrained(tmp_path / 'whole')
  assert {x.dtype.name for x in Directory(tmp_path / 'half').tensors.values()}
  for source in ('half', 'whole'):
    hugging_face.import_directory(
      str(tmp_path / source), str(tmp_path / f'{source} imported')
    )
  (one, params), (two, same) = (
    opened(str(tmp_path / f'{source} imported')) for source in ('half', 'whole')
  )
  assert one == two
  equal_trees(params, same)


def test_a_model_with_fewer_kv_heads_is_what_transformers_computes(tmp_path):
  peer = make_peer('qwen3')
  peer.save_pretrained(tmp_path / 'hf')
  hugging_face.import_directory(str(tmp_path / 'hf'), str(tmp_path / '1'))
  config, params = opened(str(tmp_path / '1'))
  for layer in (f'layer_{i}' for i in range(L)):
    for part in ('key', 'value'):
      leaf = params[layer]['attention'][part]
      leaf['kernel'] = leaf['kernel'].mean(axis=1, keepdims=True)
  run = workdir_lib.load_config(tmp_path / '1')
  fields = config.to_dict() | {'num_kv_heads': 1}
  (tmp_path / '2').mkdir()
  checkpoint.save_params(tmp_path / '2', params, {})
  workdir_lib.save_config(tmp_path / '2', run | {'model': fields})
  hugging_face.export_directory(str(tmp_path / '2'), str(tmp_path / 'back'))
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'back')
  assert again.config.num_key_value_heads == 1
  fewer, params = opened(str(tmp_path / '2'))
  tokens = np.arange(12, dtype=np.int32)[None]
  np.testing.assert_allclose(
    peer_logits(again, tokens), whole(fewer, params, tokens), **TOLERANCE
  )
