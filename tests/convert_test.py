"""From a workdir to another one, and the command that does it."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from experiments import smollm2_conversion
from gqa import checkpoint, data, decode, evaluate, generate, model
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.convert import calibrate, checkpoints
from gqa.interop import hugging_face
from gqa.tokenizer import ByteTokenizer

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ModelConfig(
  vocab_size=258,
  num_layers=2,
  embed_dim=16,
  num_heads=4,
  head_dim=4,
  mlp_dim=16,
  max_len=16,
)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp('text') / 'text.txt'
  path.write_text('The quick brown fox jumps over the lazy dog.\n' * 40)
  return str(path)


@pytest.fixture(scope='module')
def source(tmp_path_factory, text):
  """A run that was trained for seven steps on a text that is still there."""
  workdir = tmp_path_factory.mktemp('run')
  shapes = jax.eval_shape(lambda: model.init_params(CONFIG, jax.random.key(0)))
  rng = np.random.default_rng(0)
  draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)
  data.prepare(text, 'bytes', str(workdir / 'data'))
  config = {
    'model': CONFIG.to_dict() | {'match_params': True},
    'compilation_cache': '',
    'data': {'path': str(workdir / 'data')},
    'train': {'seq_len': 12, 'num_steps': 9},
  }
  workdir_lib.save_config(workdir, config)
  meta = {'tokens_seen': 84}
  checkpoint.save_params(workdir, jax.tree.map(draw, shapes), meta, step=7)
  ByteTokenizer().save(workdir)
  return workdir


@pytest.fixture(scope='module')
def converted(source, tmp_path_factory):
  target = tmp_path_factory.mktemp('targets') / 'new'
  result = checkpoints.convert(str(source), str(target), num_kv_heads=(2, 1))
  return target, result


def test_the_target_is_a_workdir_like_any_other(source, converted):
  target, result = converted
  loaded = generate.load(str(target))
  assert loaded.config.kv_heads == (2, 1)
  assert loaded.config.mlp_dim == CONFIG.mlp_dim
  shapes = jax.eval_shape(
    lambda: model.decoding_params(
      model.init_params(loaded.config, jax.random.key(0)), loaded.config.dtype
    )
  )
  assert jax.tree.map(np.shape, loaded.params) == jax.tree.map(
    lambda x: x.shape, shapes
  )
  raw = workdir_lib.load_config(target)
  assert raw['train'] == workdir_lib.load_config(source)['train']
  _, meta = checkpoint.load_params(target)
  parent = meta['parent']
  assert parent['path'] == str(source)
  assert parent['step'] == parent['steps'] == 7
  assert parent['method'] == result['method'] == 'low_rank'
  assert parent['grouping'] == 'similarity'
  assert parent['loss_before'] == result['loss_before']
  assert parent['loss_after'] == result['loss_after']


def test_a_converted_model_is_converted_again(converted, tmp_path):
  target, _ = converted
  checkpoints.convert(
    str(target), str(tmp_path / 'again'), num_kv_heads=1, method='mean'
  )
  _, meta = checkpoint.load_params(tmp_path / 'again')
  assert meta['parent']['step'] == 0
  assert meta['parent']['steps'] == 7
  assert generate.load(str(tmp_path / 'again')).config.kv_heads == (1, 1)


def test_the_result_is_one_line_and_curves_over_layers(converted):
  target, result = converted
  (line,) = (target / checkpoints.RESULT).read_text().splitlines()
  assert json.loads(line) == json.loads(json.dumps(result))
  saved = 2 * CONFIG.embed_dim * CONFIG.head_dim * (2 + 3)
  assert result['parent_params'] - result['params'] == saved
  size = result['kv_bytes_per_token'] * 8
  assert size == result['parent_kv_bytes_per_token'] * 3
  assert result['calibration']['tokens'] > result['calibration']['seq_len']
  events = event_accumulator.EventAccumulator(str(target))
  events.Reload()
  for name in (
    'key_similarity',
    'key_similarity_aligned',
    'value_similarity',
    'value_similarity_aligned',
    'key_captured',
    'value_captured',
    'output_error',
  ):
    curve = events.Tensors(f'convert/{name}')
    assert [event.step for event in curve] == [0, 1]
    assert [
      pytest.approx(layer[name], rel=1e-6) for layer in result['layers']
    ] == [event.tensor_proto.float_val[0] for event in curve]
  (after,) = events.Tensors('convert/loss_after')
  assert after.tensor_proto.float_val[0] == pytest.approx(result['loss_after'])


def test_the_loss_is_what_evaluating_says(converted, source):
  """On the windows that were held out, the last ones of the text."""
  target, result = converted
  tokens = data.open_tokens(str(source / 'data'), 'train')
  opened = calibrate.open_text(tokens, 12, 24_576, 8_192, 2048 // 12)
  batches = [
    batch | {'index': np.arange(len(batch['tokens']))}
    for batch in opened.held_out
  ]
  for path, loss in ((source, 'loss_before'), (target, 'loss_after')):
    loaded = generate.load(str(path))
    mesh = jax.tree.leaves(loaded.params)[0].sharding.mesh
    step = evaluate.make_eval_step(loaded.config)
    found = evaluate.evaluate(step, loaded.params, batches, mesh, tokens)
    assert found['loss'] == pytest.approx(result[loss], rel=1e-5)


def test_a_long_text_is_sampled_all_over(tmp_path):
  documents = [f'{i}: Größe\n' * 200 for i in range(40)]
  path = tmp_path / 'text.txt'
  path.write_text('\f'.join(documents), encoding='utf-8')
  size = 8_000
  tokens = data.tokens_from_text(str(path), ByteTokenizer(), size)
  ids = tokens.tokens.tolist()
  bounds = [*tokens.documents.tolist(), len(ids)]
  seen = set()
  for start, end in zip(bounds[:-1], bounds[1:], strict=True):
    assert ids[start] == 256 and ids[end - 1] == 257
    text = bytes(ids[start + 1 : end - 1]).decode()
    (which,) = {line.split(':')[0] for line in text.splitlines()}
    assert text in documents[int(which)]
    seen.add(int(which))
  assert max(seen) - min(seen) > 30 and len(seen) == 16
  assert 0.8 * size < tokens.bytes < 1.3 * size
  whole = data.tokens_from_text(str(path), ByteTokenizer(), 10**9)
  assert len(whole.documents) == 40


def test_transformers_continues_a_converted_model_as_we_do(source, tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  target = str(tmp_path / 'new')
  checkpoints.convert(
    str(source), target, num_kv_heads=2, calibration_tokens=240
  )
  hugging_face.export_directory(target, str(tmp_path / 'exported'))
  peer = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'exported'
  )
  assert peer.config.num_key_value_heads == 2
  loaded = generate.load(target)
  prompt = np.array([[256, 84, 104, 101, 32]], np.int32)
  ours, *_ = decode.generate(
    loaded.params, loaded.config, prompt, np.array([5]), 8
  )
  ids = torch.tensor(prompt.astype(np.int64))
  theirs = peer.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    max_new_tokens=8,
    do_sample=False,
    eos_token_id=None,
  )
  assert np.asarray(ours)[0].tolist() == theirs[0, 5:].tolist()


def test_the_published_study_tells_recovery_from_loss(source, text, tmp_path):
  grouped = str(tmp_path / 'grouped')
  checkpoints.convert(
    str(source), grouped, num_kv_heads=2, method='mean', calibration='none'
  )
  flag = types.SimpleNamespace(
    workdir=grouped,
    calibration=text,
    data=text,
    num_seeds=1,
    calibration_tokens=240,
    data_tokens=120,
    seq_len=12,
  )
  study = smollm2_conversion.Study(flag)
  cases = list(smollm2_conversion.cases(1, 2))
  assert [case for i, case in enumerate(cases) if case in cases[:i]] == []
  lost = {}
  for case in cases:
    if case['method'] in ('low_rank', 'mean') and not case['refit']:
      answer = study.run(case)
      assert answer['loss'] - answer['loss_of_parent'] == answer['lost']
      lost[case['what'], case['method']] = abs(answer['lost'])
  assert lost.pop(('recovery', 'low_rank')) < 1e-4 < min(lost.values())
  assert len(lost) == 3


def test_without_a_text_the_weights_decide(source, tmp_path):
  result = checkpoints.convert(
    str(source), str(tmp_path / 'new'), num_kv_heads=2, calibration='none'
  )
  assert not result['sequential'] and not result['refit']
  assert result['loss_after'] is None and result['calibration'] is None


def test_a_budget_decides_for_each_layer(source, text, tmp_path):
  result = checkpoints.convert(
    str(source),
    str(tmp_path / 'new'),
    budget=6 * 2 * 4 * 4,
    method='mean',
    calibration=text,
    data=text,
  )
  assert sum(generate.load(str(tmp_path / 'new')).config.kv_heads) == 6
  assert result['kv_bytes_per_token'] == 6 * 2 * 4 * 4


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({}, 'one of num_kv_heads and budget'),
    ({'num_kv_heads': 3}, 'choose one of .4, 2, 1.'),
    ({'num_kv_heads': 2, 'method': 'best'}, "method='best' is unknown"),
    (
      {'num_kv_heads': 2, 'calibration': 'none', 'refit': True},
      'refit=True needs a text',
    ),
    ({'budget': 1000, 'calibration': 'none'}, 'budget needs a text'),
    ({'num_kv_heads': 2, 'seq_len': 10**6}, 'max_len=16'),
  ],
)
def test_what_cannot_be_done_is_refused(source, tmp_path, arguments, message):
  with pytest.raises(ValueError, match=message):
    checkpoints.convert(str(source), str(tmp_path / 'new'), **arguments)
  assert not (tmp_path / 'new' / 'config.json').exists()


def test_a_target_that_holds_something_is_left_alone(source, converted):
  target, _ = converted
  before = sorted(os.listdir(target))
  with pytest.raises(ValueError, match='not empty'):
    checkpoints.convert(str(source), str(target), num_kv_heads=2)
  assert sorted(os.listdir(target)) == before


@pytest.mark.parametrize(
  ('flags', 'code', 'output'),
  [
    (['--num_kv_heads=2,x'], 1, "num_kv_heads='2,x' must be an int"),
    (['--num_kv_heads=2,2', '--method=mean'], 0, '"num_kv_heads": 2'),
  ],
)
def test_the_command(source, tmp_path, flags, code, output):
  run = subprocess.run(
    [sys.executable, '-m', 'gqa.convert', f'--source={source}', *flags]
    + [f'--target={tmp_path / "new"}', '--calibration=none'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert run.returncode == code
  assert output in run.stdout + run.stderr
  assert 'Traceback' not in run.stderr
