"""Evaluation against a plain one: each document and window by itself."""

import json
import math
import types

import jax
import numpy as np
import pytest

from gqa import data, evaluate, model, sharding
from gqa.config import ModelConfig

SEQ_LEN = 16
CONFIG = ModelConfig(
  vocab_size=258,
  num_layers=1,
  embed_dim=12,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=16,
  max_len=SEQ_LEN,
  position='learned',
  logit_softcap=3.0,
)
BOS = 256


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
  """Documents of several lengths, some longer than a window."""
  directory = tmp_path_factory.mktemp('text')
  rng = np.random.default_rng(0)
  letters = np.array(list('abcdefg äöü'))
  lengths = (3, 40, 1, 17, 9, 25, 30, 2)
  documents = [''.join(rng.choice(letters, n)) + 'z' for n in lengths]
  source = directory / 'text.txt'
  source.write_text('\f'.join(documents), encoding='utf-8')
  data.prepare(str(source), 'bytes', str(directory / 'tokens'))
  return data.open_tokens(str(directory / 'tokens'), 'train')


@pytest.fixture(scope='module')
def params():
  shapes = jax.eval_shape(lambda: model.init_params(CONFIG, jax.random.key(0)))
  rng = np.random.default_rng(1)
  draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.5
  return jax.tree.map(draw, shapes)


@pytest.fixture(scope='module')
def eval_step():
  return evaluate.make_eval_step(CONFIG)


@pytest.fixture(scope='module')
def mesh():
  sizes = types.SimpleNamespace(data=1, fsdp=1, model=1)
  return sharding.make_mesh(sizes, jax.devices()[:1])


def plain_nll(params, ids):
  """Sums over ids alone: no packing, no loss of our own, no batches.

  Windows are cut at documents, and each piece is a sequence of its own.
  """
  logits_of = jax.jit(
    lambda params, tokens: model.Decoder(CONFIG).apply(
      {'params': params}, tokens
    )
  )
  nll, count = 0.0, 0
  for start in range(0, len(ids) - 1, SEQ_LEN):
    window = ids[start : start + SEQ_LEN + 1]
    starts = [i for i, token in enumerate(window) if i and token == BOS]
    for first, end in zip([0, *starts], [*starts, len(window)], strict=True):
      piece = window[first:end]
      padded = np.zeros((1, SEQ_LEN), np.int32)  # Causal: the rest is unseen.
      inputs = piece[:-1]
      padded[0, : len(inputs)] = inputs
      logits = np.asarray(logits_of(params, padded)[0], np.float64)
      for t, target in enumerate(piece[1:]):
        nll += np.log(np.exp(logits[t]).sum()) - logits[t, target]
        count += 1
  return nll, count


@pytest.fixture(scope='module')
def expected(params, tokens):
  return plain_nll(params, np.asarray(tokens.tokens, np.int64))


@pytest.mark.parametrize('batch_size', [1, 3, 8])
def test_every_batch_size_gives_the_sum_of_documents_and_windows_alone(
  batch_size, params, tokens, eval_step, mesh, expected
):
  num_windows = -(-(len(tokens) - 1) // SEQ_LEN)
  assert (len(tokens) - 1) % SEQ_LEN  # The last window is a partial one,
  assert num_windows % 3 and num_windows % 8  # and so is the last batch.
  batches = data.eval_batches(tokens, batch_size=batch_size, seq_len=SEQ_LEN)
  result = evaluate.evaluate(eval_step, params, batches, mesh, tokens)
  nll, count = expected
  num_bytes = sum(token < BOS for token in tokens.tokens.tolist())
  assert result['tokens'] == count == tokens.num_targets
  assert result['loss'] == pytest.approx(nll / count, rel=1e-5)
  assert result['perplexity'] == pytest.approx(math.exp(nll / count), rel=1e-4)
  assert result['bits_per_byte'] == pytest.approx(
    nll / math.log(2) / num_bytes, rel=1e-5
  )


def test_parameters_and_batches_on_several_devices_give_the_same(
  params, tokens, eval_step, mesh, expected
):
  sizes = types.SimpleNamespace(data=2, fsdp=2, model=2)
  mesh = sharding.make_mesh(sizes, jax.devices())
  placed = jax.tree.map(
    lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)),
    params,
    sharding.param_specs(params, mesh, CONFIG),
  )
  batches = data.eval_batches(tokens, batch_size=8, seq_len=SEQ_LEN)
  result = evaluate.evaluate(eval_step, placed, batches, mesh, tokens)
  nll, count = expected
  assert result['loss'] == pytest.approx(nll / count, rel=1e-5)
  assert result['tokens'] == count


def test_a_part_of_the_text_has_bits_per_byte_in_proportion(
  params, tokens, eval_step, mesh
):
  batches = data.eval_batches(
    tokens, batch_size=3, seq_len=SEQ_LEN, num_batches=1
  )
  result = evaluate.evaluate(eval_step, params, batches, mesh, tokens)
  assert 0 < result['tokens'] < tokens.num_targets
  tokens_per_byte = tokens.num_targets / tokens.bytes
  assert result['bits_per_byte'] == pytest.approx(
    result['loss'] / math.log(2) * tokens_per_byte
  )


def test_a_uniform_model_has_the_entropy_of_its_vocabulary(
  params, tokens, eval_step, mesh
):
  flat = jax.tree.map(np.zeros_like, params)
  batches = data.eval_batches(tokens, batch_size=3, seq_len=SEQ_LEN)
  result = evaluate.evaluate(eval_step, flat, batches, mesh, tokens)
  assert result['perplexity'] == pytest.approx(258, rel=1e-5)


def test_a_diverged_model_has_finite_figures(tokens):
  result = evaluate.summarize(1e9, 10, tokens)
  assert math.isfinite(result['perplexity'])
  json.loads(json.dumps(result, allow_nan=False))
