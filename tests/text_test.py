"""Properties of text sources: each document is read once, whole, in order."""

import bz2
import gzip
import lzma
import os
import sys
import types

import pytest

from gqa import text


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content.encode() if isinstance(content, str) else content)
  return str(path)


def _corpus(tmp_path, source):
  return text.Corpus(str(source), str(tmp_path / 'scratch'))


def _texts(corpus, documents=None):
  documents = corpus.documents if documents is None else documents
  return [corpus.text[start:end].decode() for start, end, _ in documents]


def _split(tmp_path, content, fraction=0.05):
  """Returns the texts (for training, for validation)."""
  corpus = _corpus(tmp_path, _write(tmp_path / 'text.txt', content))
  return [_texts(corpus, part) for part in corpus.split(fraction)]


# Sources.


def test_form_feeds_separate_documents_and_blank_ones_are_dropped(tmp_path):
  source = _write(tmp_path / 'x.txt', '\fone\n\f \n\ftwo\x0cthree\f')
  assert _texts(_corpus(tmp_path, source)) == ['one\n', 'two', 'three']


def test_a_directory_is_read_in_order_with_compressed_files(tmp_path):
  _write(tmp_path / 's/b.txt', 'second')
  _write(tmp_path / 's/a/z.md.gz', gzip.compress(b'first'))
  _write(tmp_path / 's/c.txt.bz2', bz2.compress('thïrd'.encode()))
  _write(tmp_path / 's/d.jsonl', '{"text": "4\\f"}\n\n{"text": "5", "n": 1}\n')
  _write(tmp_path / 's/.git/x.txt', 'hidden')
  _write(tmp_path / 's/code.py', 'other')
  _write(tmp_path / 's/empty.txt', '')
  corpus = _corpus(tmp_path, tmp_path / 's')
  assert _texts(corpus) == ['first', 'second', 'thïrd', '4\f', '5']
  assert corpus.files == ['a/z.md.gz', 'b.txt', 'c.txt.bz2', 'd.jsonl']
  assert corpus.documents[:, 2].tolist() == [0, 1, 2, 3, 3]


def test_a_package_is_read_without_importing_it(tmp_path, monkeypatch):
  _write(tmp_path / 'fake_plays/__init__.py', 'raise ImportError')
  _write(tmp_path / 'fake_plays/acts/one.md', '# One\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  assert _texts(_corpus(tmp_path, 'package:fake_plays')) == ['# One\n']
  with pytest.raises(ValueError, match='pip install no_such_package'):
    _corpus(tmp_path, 'package:no_such_package')


class _Rows(list):
  column_names = ('text', 'label')
  split = None

  def select_columns(self, name):
    return [{name: row} for row in self]


@pytest.fixture
def datasets(monkeypatch):
  """Stands for the library; `asked` holds what it was asked to load."""
  fake = types.SimpleNamespace(asked=[])

  def load_dataset(name, config, split):
    fake.asked.append((name, config, split))
    if split == 'nosuch':
      raise ValueError('Unknown split "nosuch". Should be one of ["train"].')
    if name == 'no/such':
      raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub")
    return _Rows(['one', None, 'two'])

  fake.load_dataset = load_dataset
  monkeypatch.setitem(sys.modules, 'datasets', fake)
  return fake


def test_a_dataset_gives_its_text_column(datasets, tmp_path, monkeypatch):
  for source in ('hf:a/b', 'hf:a/b:small', 'hf:a/b::test'):
    assert _texts(_corpus(tmp_path, source)) == ['one', 'two']
  assert datasets.asked == [
    ('a/b', None, 'train'),
    ('a/b', 'small', 'train'),
    ('a/b', None, 'test'),
  ]
  monkeypatch.setattr(_Rows, 'column_names', ('content',))
  with pytest.raises(ValueError, match='no column "text".*content'):
    _corpus(tmp_path, 'hf:a/b')


@pytest.mark.parametrize(
  'source, message',
  [
    ('hf:a/b::nosuch', 'hf:a/b::nosuch cannot be read: Unknown split "nosuch"'),
    ('hf:no/such', "hf:no/such cannot be read: .*doesn't exist"),
  ],
)
@pytest.mark.usefixtures('datasets')
def test_a_dataset_that_is_not_there_is_named(source, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    _corpus(tmp_path, source)


def test_splits_saved_on_disk_are_chosen_by_name(datasets, tmp_path):
  saved = os.path.dirname(_write(tmp_path / 'saved/dataset_dict.json', '{}'))
  splits = {'train': _Rows(['one']), 'test': _Rows(['two'])}
  datasets.load_from_disk = {saved: splits}.get
  assert _texts(_corpus(tmp_path, f'hf:{saved}')) == ['one']
  assert _texts(_corpus(tmp_path, f'hf:{saved}::test')) == ['two']
  with pytest.raises(ValueError, match=r"split dev is not in \['train', 'test"):
    _corpus(tmp_path, f'hf:{saved}::dev')
  with pytest.raises(ValueError, match='no config test; a split is ::test'):
    _corpus(tmp_path, f'hf:{saved}:test')
  assert not datasets.asked


def test_a_dataset_saved_without_splits_has_none_to_choose(datasets, tmp_path):
  saved = os.path.dirname(_write(tmp_path / 'saved/state.json', '{}'))
  datasets.load_from_disk = {saved: _Rows(['one'])}.get
  assert _texts(_corpus(tmp_path, f'hf:{saved}')) == ['one']
  with pytest.raises(ValueError, match='one unsplit dataset; leave ::test'):
    _corpus(tmp_path, f'hf:{saved}::test')


def test_a_dataset_without_the_library_says_what_to_install(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ValueError, match=r'pip install "gqa\[datasets\]"'):
    _corpus(tmp_path, 'hf:a/b')


# Splits.


def test_validation_documents_are_whole_and_spread_evenly(tmp_path):
  texts = [f'document {i:02}\n' for i in range(40)]
  train, valid = _split(tmp_path, '\f'.join(texts), 0.1)
  assert valid == [texts[i] for i in (5, 15, 25, 35)]
  assert train == [t for t in texts if t not in valid]


def test_a_document_much_longer_than_the_rest_stays_in_training(tmp_path):
  texts = ['a\n', 'b\n', 'long\n' * 100, 'c\n', 'd\n']
  assert texts[2] in _split(tmp_path, '\f'.join(texts))[0]


@pytest.mark.parametrize('before', [[], ['short\n']])
def test_of_few_documents_the_tail_of_the_longest_is_cut(before, tmp_path):
  lines = [f'line {i:02}\n' for i in range(50)]
  train, valid = _split(tmp_path, '\f'.join([*before, ''.join(lines)]), 0.1)
  assert train == [*before, ''.join(lines[:-5])]
  assert valid == [''.join(lines[-5:])]


@pytest.mark.parametrize('end', ['two\n', 'two', 'two\n\n\n\n\n\n'])
def test_the_tail_of_a_short_text_is_its_last_line(end, tmp_path):
  assert _split(tmp_path, 'one\n' + end) == [['one\n'], [end]]


@pytest.mark.parametrize(
  'content', ['one line', 'one line\n\n\n', '\n\none line']
)
def test_a_single_line_leaves_nothing_to_validate_on(content, tmp_path):
  with pytest.raises(ValueError, match='nothing to validate on.*--valid=FILE'):
    _split(tmp_path, content)


# Pieces.


def test_pieces_are_the_text_cut_between_lines(tmp_path, monkeypatch):
  lines = 'Some words.\n\n  And  more,\nin lines;\n\n\nof 日本語\n' * 9
  content = f'short\f{lines}\f' + 'ö' * 99
  monkeypatch.setattr(text, '_READ', 7)
  monkeypatch.setattr(text, '_PIECE', 64)
  corpus = _corpus(tmp_path, _write(tmp_path / 'x.txt', content))
  texts, pieces = [], list(corpus.pieces(corpus.documents))
  for piece, first, last in pieces:
    assert len(piece) <= 64
    texts += [''] if first else []
    texts[-1] += piece.decode()
    if not last and 'ö' not in piece.decode():
      assert piece.endswith(b'\n') and not piece.endswith(b'\n\n')
  assert texts == content.split('\f')
  assert [piece for piece, *_ in pieces][0] == b'short'


# Text that cannot be read.


@pytest.mark.parametrize('content', ['', ' \n\f\n'])
def test_text_without_text_is_refused(content, tmp_path):
  source = _write(tmp_path / 'text.txt', content)
  with pytest.raises(ValueError, match=r'text\.txt is empty'):
    _corpus(tmp_path, source)


@pytest.mark.parametrize('read', [4, 5, 1 << 20])
@pytest.mark.parametrize(
  'raw, offset',
  [(b'abc\xffd', 3), ('aé日'.encode()[:-1], 3), (b'\xe9t\xe9', 0)],
)
def test_invalid_utf8_names_file_and_byte(
  raw, offset, read, tmp_path, monkeypatch
):
  monkeypatch.setattr(text, '_READ', read)
  source = _write(tmp_path / 'text.txt', b'x' * 10 + raw)
  with pytest.raises(
    ValueError, match=rf'text\.txt is not UTF-8: byte {10 + offset} '
  ):
    _corpus(tmp_path, source)


def test_a_missing_source_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere.txt does not exist'):
    _corpus(tmp_path, 'nowhere.txt')
  (tmp_path / 'none').mkdir()
  with pytest.raises(ValueError, match=r'no file that ends in \.txt'):
    _corpus(tmp_path, tmp_path / 'none')


@pytest.mark.parametrize('module', [gzip, bz2, lzma])
@pytest.mark.parametrize('content', [None, b'not compressed'])
def test_a_damaged_archive_is_named(module, content, tmp_path):
  if content is None:
    content = module.compress(os.urandom(1000).hex().encode())[:-50]
  suffix = {gzip: 'gz', bz2: 'bz2', lzma: 'xz'}[module]
  source = _write(tmp_path / f'x.txt.{suffix}', content)
  with pytest.raises(ValueError, match=rf'x\.txt\.{suffix} is damaged'):
    _corpus(tmp_path, source)


@pytest.mark.parametrize('line', ['{"content": "a"}', 'text', '{"text": 3}'])
def test_a_line_without_text_is_named(line, tmp_path):
  source = _write(tmp_path / 'x.jsonl', '{"text": "a"}\n' + line)
  with pytest.raises(ValueError, match=r'x\.jsonl, line 2'):
    _corpus(tmp_path, source)
