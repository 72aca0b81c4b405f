"""Properties of token files and batches: each token counts once, in order."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from gqa import data, prepare, tokenizer

BOS, EOS = 256, 257


def _prepare(tmp_path, content='a b\nc d\n' * 8):
  source, target = tmp_path / 'text.txt', str(tmp_path / 'tokens')
  source.write_text(content)
  data.prepare(str(source), 'bytes', target)
  return target


def _in_memory(*texts):
  """A token file of byte documents."""
  rows = [[BOS, *text.encode(), EOS] for text in texts]
  tokens = np.array([i for row in rows for i in row], np.uint16)
  starts = np.cumsum([0, *map(len, rows[:-1])])
  manifest = prepare.describe('memory', 'bytes', tokenizer.ByteTokenizer())
  entry = {'documents': len(rows), 'tokens': len(tokens), 'bytes': 0}
  manifest['splits'] = {'train': entry}
  return data.TokenFile(tokens, starts, manifest, 'train')


@pytest.fixture
def numbers():
  """32 whole examples of 4 tokens and a rest."""
  return _in_memory('0123456789' * 5, 'abcdefgh' * 8, 'xyz' * 4)


# Token files.


def test_num_targets_is_what_evaluation_counts(numbers):
  batches = data.eval_batches(numbers, batch_size=3, seq_len=7)
  assert numbers.num_targets == sum(b['weights'].sum() for b in batches)
  assert numbers.num_targets == 50 + 64 + 12 + 3  # each character and eos


def test_a_text_in_memory_has_the_tokens_of_a_directory(tmp_path):
  path = _prepare(tmp_path, 'one\ntwo\fthree\n')
  whole = data.tokens_from_text(
    str(tmp_path / 'text.txt'), tokenizer.ByteTokenizer()
  )
  ids = [BOS, *b'one\ntwo', EOS, BOS, *b'three\n', EOS]
  assert whole.tokens.tolist() == ids
  assert whole.bytes == len(b'one\ntwothree\n')
  splits = [data.open_tokens(path, split) for split in data.SPLITS]
  assert sum(s.bytes for s in splits) == whole.bytes


def test_a_token_directory_is_told_from_others(tmp_path):
  path = _prepare(tmp_path)
  assert data.is_token_directory(path)
  assert not data.is_token_directory(str(tmp_path))
  assert not data.is_token_directory(str(tmp_path / 'text.txt'))
  assert not data.is_token_directory(str(tmp_path / 'nowhere'))


def test_a_directory_without_tokens_names_the_command(tmp_path):
  with pytest.raises(ValueError, match='python -m gqa.data --source=FILE'):
    data.open_tokens(str(tmp_path))


def test_a_truncated_file_is_refused(tmp_path):
  path = _prepare(tmp_path)
  file = os.path.join(path, 'train.bin')
  size = os.path.getsize(file)
  os.truncate(file, size - 2)
  with pytest.raises(ValueError, match=rf'train\.bin has {size - 2}.*{size}'):
    data.open_tokens(path)


@pytest.mark.parametrize('starts', [[0], [1, 4], [0, 0], [0, 99]])
def test_damaged_document_starts_are_refused(starts, tmp_path):
  path = _prepare(tmp_path, 'one\n\ftwo\nthree\n')
  assert len(data.open_tokens(path).documents) == 2
  np.save(os.path.join(path, 'train.docs.npy'), np.array(starts))
  with pytest.raises(ValueError, match='document starts are damaged'):
    data.open_tokens(path)
  (tmp_path / 'tokens/train.docs.npy').write_bytes(b'')
  with pytest.raises(ValueError, match='train.docs.npy is damaged'):
    data.open_tokens(path)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'format': 99}, 'format 99'),
    ({'dtype': 'words'}, 'words'),
    ({'splits': {}}, 'split=train is not in'),
    ({'splits': 3}, 'cannot be used'),
  ],
)
def test_a_manifest_of_another_kind_is_refused(change, message, tmp_path):
  path = _prepare(tmp_path)
  file = tmp_path / 'tokens/manifest.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | change))
  with pytest.raises(ValueError, match=message):
    data.open_tokens(path)


def test_tokens_that_are_no_integers_are_refused(tmp_path):
  path = _prepare(tmp_path)
  file = tmp_path / 'tokens/manifest.json'
  manifest = json.loads(file.read_text()) | {'dtype': 'float16'}
  file.write_text(json.dumps(manifest))
  with pytest.raises(TypeError, match='float16'):
    data.open_tokens(path)


def test_verify_finds_a_changed_token_or_tokenizer(tmp_path):
  path = _prepare(tmp_path)
  ids = np.memmap(os.path.join(path, 'train.bin'), np.uint16, 'r+')
  ids[2] += 1
  ids.flush()
  with pytest.raises(ValueError, match='train.bin is not what was written'):
    data.open_tokens(path).verify()
  ids[2] -= 1
  ids.flush()
  data.open_tokens(path).verify()
  (tmp_path / 'tokens/tokenizer.json').write_text('{"type":  "bytes"}')
  with pytest.raises(ValueError, match='tokenizer.json is not what was'):
    data.open_tokens(path).verify()


def test_a_tokenizer_larger_than_the_model_is_refused(numbers):
  numbers.check_vocab(258)
  numbers.check_vocab(1000)
  with pytest.raises(ValueError, match='larger than the model.*258.*257'):
    numbers.check_vocab(257)


def test_an_id_outside_of_the_vocabulary_is_named(tmp_path):
  path = _prepare(tmp_path)
  ids = np.memmap(os.path.join(path, 'train.bin'), np.uint16, 'r+')
  ids[7] = 258
  ids.flush()
  with pytest.raises(ValueError, match='id 258.*vocab_size=258'):
    data.open_tokens(path).check_vocab(1000)


def test_another_tokenizer_in_the_directory_is_refused(tmp_path):
  path = _prepare(tmp_path)
  tokenizer.train_bpe(['a'], 258).save(path)
  with pytest.raises(ValueError, match='it is another tokenizer'):
    data.open_tokens(path).tokenizer()


# Windows.


def test_a_window_over_three_documents_literally():
  tokens = _in_memory('ab', 'c', 'defgh')
  a, b, c, d, e, f, g, h = range(97, 105)
  #   0:BOS a b EOS 4:BOS c EOS 7:BOS d e f g h EOS
  batch = data.windows(tokens, [0, 1, 2], 6)
  expected = {
    'tokens': [
      [BOS, a, b, EOS, BOS, c],
      [EOS, BOS, d, e, f, g],
      [h, 0, 0, 0, 0, 0],
    ],
    'targets': [
      [a, b, EOS, BOS, c, EOS],
      [BOS, d, e, f, g, h],
      [EOS, 0, 0, 0, 0, 0],
    ],
    'segments': [
      [1, 1, 1, 1, 2, 2],
      [1, 2, 2, 2, 2, 2],
      [1, 0, 0, 0, 0, 0],
    ],
    'positions': [
      [0, 1, 2, 3, 0, 1],
      [0, 0, 1, 2, 3, 4],
      [0, 0, 0, 0, 0, 0],
    ],
    'weights': [
      [1, 1, 1, 0, 1, 1],
      [0, 1, 1, 1, 1, 1],
      [1, 0, 0, 0, 0, 0],
    ],
    'index': [0, 1, 2],
  }
  assert batch.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(batch[name], value, err_msg=name)
  types = {name: value.dtype.name for name, value in batch.items()}
  assert types.pop('weights') == 'float32' and types.pop('index') == 'int64'
  assert set(types.values()) == {'int32'}


@pytest.mark.parametrize('seq_len', [1, 4, 7])
def test_each_target_is_the_token_after_its_input(numbers, seq_len):
  for batch in data.eval_batches(numbers, batch_size=3, seq_len=seq_len):
    row, column = np.nonzero(batch['segments'])
    at = batch['index'][row] * seq_len + column
    np.testing.assert_array_equal(
      batch['tokens'][row, column], numbers.tokens[at]
    )
    np.testing.assert_array_equal(
      batch['targets'][row, column], numbers.tokens[at + 1]
    )


# Evaluation.


@pytest.mark.parametrize('seq_len', [1, 4, 7, 500])
@pytest.mark.parametrize('batch_size', [1, 3, 64])
def test_evaluation_counts_every_target_once(numbers, seq_len, batch_size):
  targets = []
  for batch in data.eval_batches(
    numbers, batch_size=batch_size, seq_len=seq_len
  ):
    assert batch['tokens'].shape == (batch_size, seq_len)
    targets += batch['targets'][batch['weights'] > 0].tolist()
  # All but what each document begins with.
  assert targets == [i for i in numbers.tokens.tolist() if i != BOS]


def test_processes_share_an_evaluation_batch(numbers):
  sizes = {'batch_size': 4, 'seq_len': 4}
  whole = list(data.eval_batches(numbers, **sizes))
  parts = [
    list(data.eval_batches(numbers, **sizes, process_index=p, process_count=2))
    for p in (0, 1)
  ]
  for batch, first, second in zip(whole, *parts, strict=True):
    np.testing.assert_array_equal(batch['tokens'][0::2], first['tokens'])
    np.testing.assert_array_equal(batch['tokens'][1::2], second['tokens'])


def test_num_batches_is_a_limit(numbers):
  sizes = {'batch_size': 4, 'seq_len': 4}
  assert len(list(data.eval_batches(numbers, **sizes, num_batches=2))) == 2
  assert len(list(data.eval_batches(numbers, **sizes, num_batches=99))) == 9
  with pytest.raises(ValueError, match='num_batches=0'):
    data.eval_batches(numbers, **sizes, num_batches=0)


# Training.


def _ids(batches, count):
  return [next(batches)['index'].tolist() for _ in range(count)]


def test_an_epoch_visits_each_example_once_in_a_new_order(numbers):
  n = numbers.num_examples(4)
  assert n == 32
  batches = data.train_batches(numbers, batch_size=8, seq_len=4, seed=0)
  first, second = (sum(_ids(batches, n // 8), []) for _ in range(2))
  assert sorted(first) == sorted(second) == list(range(n))
  assert first != second
  other = data.train_batches(numbers, batch_size=8, seq_len=4, seed=1)
  assert sum(_ids(other, n // 8), []) != first


def test_training_windows_are_whole(numbers):
  batches = data.train_batches(numbers, batch_size=32, seq_len=4, seed=0)
  batch = next(batches)
  assert batch['segments'].all()
  expected = data.windows(numbers, batch['index'], 4)
  for name, value in expected.items():
    np.testing.assert_array_equal(batch[name], value)
    assert batch[name].dtype == value.dtype


def test_a_resumed_run_sees_the_examples_of_an_uninterrupted_one(numbers):
  def batches():
    return data.train_batches(numbers, batch_size=4, seq_len=4, seed=3)

  straight = _ids(batches(), 10)
  first = batches()
  before = _ids(first, 5)
  state = json.loads(json.dumps(first.get_state()))
  resumed = batches()
  resumed.set_state(state)
  assert before + _ids(resumed, 5) == straight


def test_processes_together_see_the_batches_of_one(numbers):
  sizes = {'batch_size': 6, 'seq_len': 4, 'seed': 0}
  one = data.train_batches(numbers, **sizes)
  two = [
    data.train_batches(numbers, **sizes, process_index=p, process_count=2)
    for p in (0, 1)
  ]
  for _ in range(8):
    whole = next(one)['index'].tolist()
    assert next(two[0])['index'].tolist() == whole[0::2]
    assert next(two[1])['index'].tolist() == whole[1::2]
  assert one.get_state() == two[0].get_state() == two[1].get_state()


def test_a_batch_must_divide_over_the_processes(numbers):
  for batches, more in (
    (data.train_batches, {'seed': 0}),
    (data.eval_batches, {}),
  ):
    with pytest.raises(ValueError, match='batch_size=5.*processes, 2'):
      batches(numbers, batch_size=5, seq_len=4, process_count=2, **more)


def test_text_shorter_than_one_example_names_both_lengths(numbers):
  n = len(numbers)
  data.train_batches(numbers, batch_size=1, seq_len=n - 1, seed=0)
  with pytest.raises(ValueError, match=rf'only {n}, fewer.*seq_len={n}'):
    data.train_batches(numbers, batch_size=1, seq_len=n, seed=0)


# The command.


def test_the_command_makes_tokens_and_fails_in_one_line(tmp_path):
  source = tmp_path / 'text.txt'
  source.write_text('some text\n' * 50)
  target = str(tmp_path / 'tokens')
  command = [sys.executable, '-m', 'gqa.data', f'--source={source}']
  command += [f'--target={target}']
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert 'valid: 1 documents' in done.stdout
  again = subprocess.run(command, capture_output=True, text=True)
  assert again.returncode == 1
  assert again.stderr.startswith('error: target=')
  assert again.stderr.count('\n') == 1

  verify = [*command[:3], f'--verify={target}']
  whole = subprocess.run(verify, capture_output=True, text=True)
  assert (whole.returncode, whole.stdout) == (0, done.stdout)
  with open(tmp_path / 'tokens/valid.bin', 'r+b') as file:
    file.seek(-1, os.SEEK_END)  # the high byte of an eos
    file.write(b'\0')
  damaged = subprocess.run(verify, capture_output=True, text=True)
  assert damaged.returncode == 1
  assert 'valid.bin is not what was written' in damaged.stderr


def test_importing_the_module_defines_no_flag():
  code = 'import gqa.data, absl.flags as f; assert "source" not in f.FLAGS'
  subprocess.run([sys.executable, '-c', code], check=True)
