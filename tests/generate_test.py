"""Text from checkpoints: the same in batches, in pieces and by commands."""

import io
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from gqa import checkpoint, decode, generate, model, sampling
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.sampling import Sampling
from gqa.tokenizer import ByteTokenizer

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ModelConfig(
  vocab_size=258,
  num_layers=1,
  embed_dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=16,
  max_len=96,
  norm='layernorm',
  tie_embeddings=False,
)
PROMPTS = ['a', 'once upon a time', 'höhö']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A workdir with a checkpoint that writes lower-case letters."""
  workdir = tmp_path_factory.mktemp('run')
  shapes = jax.eval_shape(lambda: model.init_params(CONFIG, jax.random.key(0)))
  rng = np.random.default_rng(0)
  draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)
  params = jax.tree.map(draw, shapes)
  params['final_norm']['scale'][0] = 0
  params['final_norm']['bias'][0] = 10
  params['head']['kernel'] *= 0.3
  params['head']['kernel'][0] = -10
  params['head']['kernel'][0, ord('a') : ord('z') + 1] = 0
  config = {'model': CONFIG.to_dict(), 'compilation_cache': ''}
  workdir_lib.save_config(workdir, config)
  checkpoint.save_params(workdir, params, {}, step=7)
  ByteTokenizer().save(workdir)
  return workdir


@pytest.fixture(scope='module')
def loaded(run):
  return generate.load(str(run))


def test_a_checkpoint_is_read_from_the_workdir_and_from_its_own_directory(
  run, loaded
):
  other = generate.load(str(run / 'checkpoints' / '7'), '7')
  assert other.config == loaded.config == CONFIG
  jax.tree.map(np.testing.assert_array_equal, other.params, loaded.params)


def test_text_is_what_the_one_program_generates(run, loaded):
  texts = generate.generate_text(
    str(run), PROMPTS, max_new_tokens=21, temperature=1.0, top_k=50, seed=3
  )
  bos, eos = loaded.tokenizer.bos_id, loaded.tokenizer.eos_id
  prompts = [[bos, *loaded.tokenizer.encode(text)] for text in PROMPTS]
  tokens, lengths, _ = decode.generate(
    loaded.params,
    CONFIG,
    *decode.pack(prompts),
    21,
    sampling=Sampling.create(3, temperature=1.0, top_k=50),
    keys=sampling.row_keys(3, np.arange(3)),
    stop_ids=[eos, bos],
    pad_id=eos,
  )
  for text, row, length in zip(
    texts, np.asarray(tokens), lengths.tolist(), strict=True
  ):
    assert text == loaded.tokenizer.decode(row[:length])
    assert len(text) == 21


def test_pieces_make_the_text_and_each_one_is_counted(loaded):
  options = dict(max_new_tokens=19, temperature=0.0)
  whole = generate.generate_text(loaded, PROMPTS[1], **options)[0]
  cost = generate.Cost()
  pieces = list(generate.stream(loaded, PROMPTS[1:2], cost=cost, **options))
  assert ''.join(piece for (piece,) in pieces) == whole
  assert len(pieces) == 1 + -(-18 // generate.STEPS)
  assert cost.tokens == 19 and cost.prompt_tokens == 17
  assert cost.cache_bytes > 0 and cost.steps == 18 + -18 % generate.STEPS
  for word in ('prefill 17 tokens', 'ms per token', 'tokens/s', 'MiB'):
    assert word in str(cost)


def test_the_same_settings_compile_nothing_again(loaded):
  options = dict(max_new_tokens=19, temperature=0.0)
  generate.generate_text(loaded, 'warm', **options)
  cost = generate.Cost()
  # Another prompt, seed and temperature are no new program.
  options |= dict(temperature=1.0, seed=8, cost=cost)
  generate.generate_text(loaded, 'other', **options)
  assert cost.compile_seconds == 0


def test_a_stop_string_ends_a_text_and_is_not_in_it(loaded):
  options = dict(max_new_tokens=40, temperature=1.0, seed=1)
  plain = generate.generate_text(loaded, PROMPTS, **options)
  stop = plain[1][9:12]
  texts = generate.generate_text(loaded, PROMPTS, stop=[stop], **options)
  assert len(texts[1]) <= 9
  for text, full in zip(texts, plain, strict=True):
    assert text == full.partition(stop)[0]
  # When all have ended nothing more is computed.
  cost = generate.Cost()
  stops = [text[:2] for text in plain]
  texts = generate.generate_text(
    loaded, PROMPTS, stop=stops, cost=cost, **options
  )
  assert texts == [''] * 3
  assert cost.steps == generate.STEPS and cost.tokens == 6


def test_the_end_of_a_document_ends_a_text(loaded):
  params = jax.tree.map(np.array, loaded.params)
  params['head']['rows'][loaded.tokenizer.eos_id, 0] = 5
  cost = generate.Cost()
  texts = generate.generate_text(
    (params, *loaded[1:]),
    PROMPTS,
    max_new_tokens=40,
    temperature=0.0,
    cost=cost,
  )
  assert texts == [''] * 3
  assert cost.tokens == 3 and cost.steps == 0


def test_two_devices_that_split_the_heads_write_the_same(run, loaded):
  options = dict(max_new_tokens=12, temperature=0.0)
  split = generate.load(str(run), devices=2)
  assert len(jax.tree.leaves(split.params)[0].sharding.device_set) == 2
  assert generate.generate_text(split, PROMPTS, **options) == (
    generate.generate_text(loaded, PROMPTS, **options)
  )


def test_what_cannot_be_is_an_error_before_any_work(loaded):
  for prompts, options, words in (
    ([], {}, ['no prompt']),
    (['a'], dict(max_new_tokens=95), ['97', '96']),
    (['a'], dict(temperature=-1.0), ['temperature=-1.0']),
    (['a'], dict(cache_kind='ring'), ['sliding_window']),
    (['a'], dict(cache_dtype='fp3'), ['fp3']),
    (['a'], dict(stop=['']), ['stop']),
  ):
    with pytest.raises(ValueError) as error:
      generate.generate_text(loaded, prompts, **{'max_new_tokens': 8} | options)
    for word in words:
      assert word in str(error.value)


# The command line.


def command(run, *arguments):
  return subprocess.run(
    [
      sys.executable,
      '-m',
      'gqa.generate',
      f'--checkpoint={run}',
      '--temperature=0',
      '--max_new_tokens=10',
      *arguments,
    ],
    capture_output=True,
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


def test_commands_print_prompt_and_text_and_the_cost_apart(run, loaded):
  texts = generate.generate_text(
    loaded, PROMPTS[:2], max_new_tokens=10, temperature=0
  )
  done = command(run, *[f'--prompt={p}' for p in PROMPTS[:2]])
  assert done.returncode == 0, done.stderr.decode()
  expected = ''.join(
    f'==> {i} of 2 <==\n{prompt}{text}\n'
    for i, (prompt, text) in enumerate(
      zip(PROMPTS, texts, strict=False), start=1
    )
  )
  assert done.stdout.decode() == expected
  assert b'tokens/s' in done.stderr and done.stderr.count(b'\n') == 1


def test_prompts_are_read_or_refused(tmp_path, monkeypatch):
  stdin = io.TextIOWrapper(io.BytesIO('höhö\n'.encode()))
  monkeypatch.setattr(sys, 'stdin', stdin)
  assert generate._prompts([], None) == ['höhö']
  path = tmp_path / 'prompt.txt'
  path.write_bytes('zwölf\n\n'.encode())
  assert generate._prompts([], str(path)) == ['zwölf\n']
  assert generate._prompts(['a', 'b'], None) == ['a', 'b']
  with pytest.raises(ValueError, match='drop one'):
    generate._prompts(['a'], str(path))
  path.write_bytes(b'\xff')
  with pytest.raises(ValueError, match='UTF-8'):
    generate._prompts([], str(path))
  with pytest.raises(OSError):
    generate._prompts([], str(tmp_path / 'none'))
