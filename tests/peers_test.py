"""The same weights give the logits and gradients of published models."""

import functools

import jax
import numpy as np
import pytest

from gqa import loss, model
from gqa.config import ModelConfig

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

V, D, L, N, H, F, T = 23, 12, 2, 4, 8, 20, 11


def randomize(peer):
  """Gives every parameter, norms and biases too, a random value."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, x in peer.named_parameters():
      noise = 0.3 * torch.randn(x.shape, generator=generator)
      norm = ('norm' in name or 'ln_' in name) and name.endswith('weight')
      x.copy_(1 + noise if norm else noise)
  return peer.eval()


def random_tokens():
  return np.random.default_rng(0).integers(V, size=(2, T + 1)).astype(np.int32)


def llama(num_kv_heads, tied):
  """A peer, our config of it, and the function from its weights to ours."""
  peer = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=V,
      hidden_size=D,
      num_hidden_layers=L,
      num_attention_heads=N,
      num_key_value_heads=num_kv_heads,
      head_dim=H,
      intermediate_size=F,
      max_position_embeddings=16,
      rms_norm_eps=1e-3,
      rope_parameters={'rope_type': 'default', 'rope_theta': 500.0},
      tie_word_embeddings=tied,
    )
  )
  config = ModelConfig(
    vocab_size=V,
    num_layers=L,
    embed_dim=D,
    num_heads=N,
    num_kv_heads=num_kv_heads,
    head_dim=H,
    mlp_dim=F,
    max_len=16,
    norm_eps=1e-3,
    rope_theta=500.0,
    tie_embeddings=tied,
  )
  heads = lambda x, n: {'kernel': x.T.reshape(D, n, H)}
  transposed = lambda x: {'kernel': x.T}

  def layer(w, prefix):
    attention, mlp = f'{prefix}.self_attn', f'{prefix}.mlp'
    return {
      'attention_norm': {'scale': w[f'{prefix}.input_layernorm.weight']},
      'attention': {
        'query': heads(w[f'{attention}.q_proj.weight'], N),
        'key': heads(w[f'{attention}.k_proj.weight'], num_kv_heads),
        'value': heads(w[f'{attention}.v_proj.weight'], num_kv_heads),
        'out': {
          'kernel': w[f'{attention}.o_proj.weight'].T.reshape(N, H, D),
        },
      },
      'mlp_norm': {'scale': w[f'{prefix}.post_attention_layernorm.weight']},
      'mlp': {
        name: transposed(w[f'{mlp}.{name}_proj.weight'])
        for name in ('gate', 'up', 'down')
      },
    }

  def convert(w):
    params = {f'layer_{i}': layer(w, f'model.layers.{i}') for i in range(L)}
    params['embed'] = {'embedding': w['model.embed_tokens.weight']}
    params['final_norm'] = {'scale': w['model.norm.weight']}
    if not tied:
      params['head'] = transposed(w['lm_head.weight'])
    return params

  return randomize(peer), config, convert


def gpt2():
  """Like `llama`; the kernels of this peer are stored inputs first."""
  peer = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
      vocab_size=V,
      n_embd=D,
      n_layer=L,
      n_head=N,
      n_inner=F,
      n_positions=16,
      layer_norm_epsilon=1e-3,
      bos_token_id=0,
      eos_token_id=0,
    )
  )
  head_dim = D // N
  config = ModelConfig(
    vocab_size=V,
    num_layers=L,
    embed_dim=D,
    num_heads=N,
    head_dim=head_dim,
    mlp_dim=F,
    max_len=16,
    position='learned',
    norm='layernorm',
    norm_eps=1e-3,
    mlp='gelu',
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
  )
  norm = lambda w, name: {
    'scale': w[f'{name}.weight'],
    'bias': w[f'{name}.bias'],
  }
  dense = lambda w, name: {
    'kernel': w[f'{name}.weight'],
    'bias': w[f'{name}.bias'],
  }

  def layer(w, prefix):
    names = ('query', 'key', 'value')
    kernels = np.split(w[f'{prefix}.attn.c_attn.weight'], 3, axis=1)
    biases = np.split(w[f'{prefix}.attn.c_attn.bias'], 3)
    attention = {
      name: {
        'kernel': kernel.reshape(D, N, head_dim),
        'bias': bias.reshape(N, head_dim),
      }
      for name, kernel, bias in zip(names, kernels, biases, strict=True)
    }
    out = dense(w, f'{prefix}.attn.c_proj')
    attention['out'] = out | {'kernel': out['kernel'].reshape(N, head_dim, D)}
    return {
      'attention_norm': norm(w, f'{prefix}.ln_1'),
      'attention': attention,
      'mlp_norm': norm(w, f'{prefix}.ln_2'),
      'mlp': {
        'up': dense(w, f'{prefix}.mlp.c_fc'),
        'down': dense(w, f'{prefix}.mlp.c_proj'),
      },
    }

  def convert(w):
    params = {f'layer_{i}': layer(w, f'transformer.h.{i}') for i in range(L)}
    params['embed'] = {'embedding': w['transformer.wte.weight']}
    params['position_embed'] = {'embedding': w['transformer.wpe.weight']}
    params['final_norm'] = norm(w, 'transformer.ln_f')
    return params

  return randomize(peer), config, convert


PEERS = {
  'llama grouped': functools.partial(llama, 2, tied=False),
  'llama tied': functools.partial(llama, 2, tied=True),
  'llama multi-query': functools.partial(llama, 1, tied=False),
  'gpt2': gpt2,
}


@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_match_those_of_a_peer(name):
  peer, config, convert = PEERS[name]()
  tokens = random_tokens()
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  out = peer(torch.tensor(inputs.astype(np.int64)))
  torch.nn.functional.cross_entropy(
    out.logits.reshape(-1, V),
    torch.tensor(targets.reshape(-1).astype(np.int64)),
  ).backward()
  parameters = dict(peer.named_parameters())
  params = convert({k: x.detach().numpy() for k, x in parameters.items()})
  expected = convert({k: x.grad.numpy() for k, x in parameters.items()})

  def objective(params):
    features = model.Decoder(config).apply(
      {'params': params}, inputs, method='features'
    )
    total, _ = loss.cross_entropy(
      features,
      model.head_rows(config, params),
      targets,
      np.ones(targets.shape, np.float32),
    )
    return total / targets.size

  logits = jax.jit(model.Decoder(config).apply)({'params': params}, inputs)
  peer_logits = out.logits.detach().numpy()
  assert peer_logits.std() > 0.3
  np.testing.assert_allclose(logits, peer_logits, atol=1e-4)

  grads = jax.jit(jax.grad(objective))(params)
  paths = jax.tree_util.tree_leaves_with_path
  for (path, got), (_, want) in zip(paths(grads), paths(expected), strict=True):
    name = jax.tree_util.keystr(path)
    # A bias of all keys cancels in the softmax: its gradient is rounding.
    assert np.abs(want).max() > 1e-3 or name.endswith("['key']['bias']")
    np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)
