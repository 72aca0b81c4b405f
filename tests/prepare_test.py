"""Properties of token directories: all of the text, or nothing at all."""

import json
import os

import numpy as np
import pytest

from gqa import data, prepare, text, tokenizer


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content.encode() if isinstance(content, str) else content)
  return str(path)


def _prepare(tmp_path, content='a b\nc d\n' * 8, spec='bytes', **kwargs):
  source = _write(tmp_path / 'text.txt', content)
  target = str(tmp_path / 'tokens')
  prepare.prepare(source, spec, target, **kwargs)
  return target


def _documents(tokens):
  """Returns the text of each document, after a look at its special tokens."""
  t = tokens.tokenizer()
  ends = [*tokens.documents[1:], len(tokens)]
  texts = []
  for start, end in zip(tokens.documents, ends, strict=True):
    ids = tokens.tokens[start:end]
    assert ids[0] == t.bos_id and ids[-1] == t.eos_id
    assert not {t.bos_id, t.eos_id} & set(ids[1:-1].tolist())
    texts.append(t.decode(ids))
  return texts


# What is written.


def test_given_validation_text_leaves_the_source_whole(tmp_path):
  valid = _write(tmp_path / 'v.txt', 'held out')
  path = _prepare(tmp_path, 'one line', valid=valid)
  assert _documents(data.open_tokens(path, 'train')) == ['one line']
  assert _documents(data.open_tokens(path, 'valid')) == ['held out']


@pytest.mark.parametrize('spec', ['bytes', 'bpe:300'])
def test_both_splits_together_are_the_text(spec, tmp_path):
  texts = [f'Dòcument {i}\n\nof some text <eos>\n' for i in range(9)]
  path = _prepare(tmp_path, '\f'.join(texts), spec=spec)
  splits = [data.open_tokens(path, s) for s in ('train', 'valid')]
  assert sorted(sum(map(_documents, splits), [])) == sorted(texts)
  assert sum(s.bytes for s in splits) == len(''.join(texts).encode())
  for split in splits:
    split.verify()
    split.check_vocab(split.vocab_size)
    assert isinstance(split.tokens, np.memmap)
  manifest = json.loads((tmp_path / 'tokens/manifest.json').read_text())
  assert manifest == splits[0].manifest
  assert manifest['tokenizer']['spec'] == spec


def test_a_given_tokenizer_file_is_used_and_copied(tmp_path):
  (tmp_path / 't').mkdir()
  bpe = tokenizer.train_bpe(['aaaa bbbb'] * 3, 262)
  bpe.save(tmp_path / 't')
  path = _prepare(tmp_path, spec=str(tmp_path / 't/tokenizer.json'))
  tokens = data.open_tokens(path)
  assert tokens.vocab_size == bpe.vocab_size
  np.testing.assert_array_equal(
    tokens.tokenizer().encode('aaaa'), bpe.encode('aaaa')
  )


def test_bpe_learns_nothing_from_validation_text(tmp_path):
  valid = _write(tmp_path / 'v.txt', 'zqzq ' * 50)
  path = _prepare(tmp_path, 'abab ' * 50, spec='bpe:300', valid=valid)
  t = data.open_tokens(path).tokenizer()
  assert len(t.encode('abab')) < 4 == len(t.encode('zqzq'))


@pytest.mark.parametrize('spec', ['bytes', 'bpe:300'])
def test_long_documents_tokenise_as_they_would_in_one_piece(
  spec, tmp_path, monkeypatch
):
  content = 'Some words.\n\n  And  more,\nin lines;\n\n\nof 日本語\n' * 20
  source = _write(tmp_path / 'x.txt', content + 'ö' * 200)
  t = tokenizer.ByteTokenizer()
  if spec != 'bytes':
    t = tokenizer.train_bpe([content], 300)
  whole = data.tokens_from_text(source, t)
  monkeypatch.setattr(text, '_READ', 7)
  monkeypatch.setattr(text, '_PIECE', 64)
  monkeypatch.setattr(prepare, '_BATCH', 150)
  in_pieces = data.tokens_from_text(source, t)
  lines = whole.tokens[: len(t.encode(content))]  # 'ööö...' has no place to cut
  np.testing.assert_array_equal(in_pieces.tokens[: len(lines)], lines)
  assert _documents(in_pieces) == [content + 'ö' * 200]


def test_a_large_vocabulary_takes_four_bytes():
  assert prepare._dtype(1 << 16) == 'uint16'
  assert prepare._dtype((1 << 16) + 1) == 'uint32'


def test_tokens_are_only_replaced_when_asked_to(tmp_path):
  path = _prepare(tmp_path)
  with pytest.raises(ValueError, match='already holds tokens; --overwrite'):
    _prepare(tmp_path, 'other\n' * 50)
  assert _documents(data.open_tokens(path))[0].startswith('a b')
  _prepare(tmp_path, 'other\n' * 50, overwrite=True)
  assert _documents(data.open_tokens(path))[0].startswith('other')
  assert sorted(os.listdir(tmp_path)) == ['text.txt', 'tokens']


def test_files_of_others_are_never_replaced(tmp_path):
  path = _prepare(tmp_path)
  _write(tmp_path / 'tokens/notes.txt', 'mine')
  with pytest.raises(ValueError, match='also holds notes.txt'):
    _prepare(tmp_path, overwrite=True)
  os.remove(os.path.join(path, 'manifest.json'))
  with pytest.raises(ValueError, match='not empty and holds no tokens'):
    _prepare(tmp_path, overwrite=True)
  assert (tmp_path / 'tokens/notes.txt').read_text() == 'mine'


def test_a_failure_leaves_nothing_behind(tmp_path):
  with pytest.raises(ValueError, match='not UTF-8'):
    _prepare(tmp_path, b'good\n' * 9 + b'\xff')
  assert os.listdir(tmp_path) == ['text.txt']


# Errors in what the user gave.


@pytest.mark.parametrize(
  'spec, message',
  [
    ('words', 'words is neither "bytes"'),
    ('bpe:x', "'x' is not a vocabulary size"),
    ('bpe:100', 'at least bpe:258'),
  ],
)
def test_a_bad_tokenizer_is_refused_before_reading(spec, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    prepare.prepare('nowhere.txt', spec, str(tmp_path / 'd'))


@pytest.mark.parametrize('fraction', [0.0, 0.6])
def test_valid_fraction_must_leave_both_parts(fraction, tmp_path):
  with pytest.raises(ValueError, match=f'valid_fraction={fraction}'):
    _prepare(tmp_path, valid_fraction=fraction)


def test_a_target_that_cannot_be_written_is_named(tmp_path):
  source = _write(tmp_path / 'text.txt', 'a\n' * 9)
  with pytest.raises(OSError, match='cannot be written.*is no directory'):
    prepare.prepare(source, 'bytes', source + '/tokens')
  with pytest.raises(ValueError, match=r'text\.txt is a file'):
    prepare.prepare(source, 'bytes', source)


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
@pytest.mark.parametrize('full', ['text', 'valid.bin'])
def test_a_full_disk_is_said_in_one_line(full, tmp_path, monkeypatch):
  def opened(path, *args, **kwargs):
    name = '/dev/full' if str(path).endswith('/' + full) else path
    return open(name, *args, **kwargs)

  for module in (prepare, text):
    monkeypatch.setattr(module, 'open', opened, raising=False)
  with pytest.raises(OSError, match='no space is left for target=.*tokens'):
    _prepare(tmp_path)
  assert os.listdir(tmp_path) == ['text.txt']
