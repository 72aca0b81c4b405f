"""Properties of tokenizers: nothing is lost, and text is only text."""

import codecs
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from gqa import tokenizer

TEXTS = ['the cat sat on the mat', 'größe 日本語 <eos> the cat\n\n  sat'] * 3


@pytest.fixture(scope='module')
def bpe():
  return tokenizer.train_bpe(TEXTS, 280)


def _word_level(path, names):
  """Writes a tokenizer.json whose vocabulary is 'a', 'b' and `names`."""
  import tokenizers
  from tokenizers import models, pre_tokenizers

  vocab = {name: i for i, name in enumerate(['a', 'b', *names])}
  made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token='a'))
  made.pre_tokenizer = pre_tokenizers.Whitespace()
  made.add_special_tokens(list(names))
  made.save(str(path))
  return made


@hypothesis.given(st.text())
@hypothesis.example('<bos>a<eos>')
@hypothesis.example('a\r\n\f\x00  \n')
def test_byte_level_tokenizers_return_the_text_they_were_given(bpe, text):
  for t in (tokenizer.ByteTokenizer(), bpe):
    ids = t.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert t.decode(ids) == text
    assert b''.join(t.token_bytes(int(i)) for i in ids) == text.encode()
    assert not {t.bos_id, t.eos_id} & set(ids.tolist())


@hypothesis.given(st.lists(st.integers(0, 279)))
def test_any_ids_decode_and_stream_to_the_same_text(bpe, ids):
  for t in (tokenizer.ByteTokenizer(), bpe):
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    parts = [decoder.decode(t.token_bytes(i)) for i in ids]
    assert ''.join(parts) + decoder.decode(b'', True) == t.decode(ids)


def test_encoding_of_the_byte_tokenizer_is_utf8():
  t = tokenizer.ByteTokenizer()
  assert t.encode('aé').tolist() == [97, 195, 169]
  assert (t.vocab_size, t.bos_id, t.eos_id) == (258, 256, 257)
  assert t.decode([256, 104, 255, 105, 257]) == 'h\ufffdi'


def test_decoding_drops_special_tokens(bpe):
  ids = [bpe.bos_id, *bpe.encode('the cat'), bpe.eos_id]
  assert bpe.decode(ids) == 'the cat'
  assert bpe.token_bytes(bpe.eos_id) == b''


def test_batches_encode_like_single_texts(bpe):
  for one, row in zip(TEXTS, bpe.encode_batch(TEXTS), strict=True):
    np.testing.assert_array_equal(bpe.encode(one), row)


def test_bpe_learns_frequent_words(bpe):
  assert bpe.vocab_size == 280
  assert len(bpe.encode('the cat')) < len('the cat')


@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_a_saved_tokenizer_loads_again(kind, bpe, tmp_path):
  t = bpe if kind == 'bpe' else tokenizer.ByteTokenizer()
  t.save(tmp_path)
  for spec in (str(tmp_path), str(tmp_path / 'tokenizer.json')):
    again = tokenizer.load(spec)
    assert type(again) is type(t)
    for name in ('vocab_size', 'bos_id', 'eos_id'):
      assert getattr(again, name) == getattr(t, name)
    np.testing.assert_array_equal(
      again.encode('the <eos>'), t.encode('the <eos>')
    )


@pytest.mark.parametrize(
  'names, expected',
  [
    (['<s>', '</s>'], ('<s>', '</s>')),
    (['<|endoftext|>'], ('<|endoftext|>', '<|endoftext|>')),
    (['<|im_end|>', '<|endoftext|>'], ('<|endoftext|>', '<|endoftext|>')),
    (['<|begin_of_text|>', '<|end_of_text|>'], None),
    (['<s>'], ('<s>', '<s>')),
  ],
)
def test_special_tokens_are_found_by_their_usual_names(
  names, expected, tmp_path
):
  made = _word_level(tmp_path / 'tokenizer.json', names)
  t = tokenizer.load(str(tmp_path / 'tokenizer.json'))
  bos, eos = expected or names
  assert t.bos_id == made.token_to_id(bos)
  assert t.eos_id == made.token_to_id(eos)


def test_names_beside_the_file_go_before_the_usual_ones(tmp_path):
  names = ['<s>', '</s>', '<start>', '<end>']
  made = _word_level(tmp_path / 'tokenizer.json', names)
  given = {'bos_token': '<start>', 'eos_token': {'content': '<end>'}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(given))
  t = tokenizer.load(str(tmp_path))
  assert t.bos_id == made.token_to_id('<start>')
  assert t.eos_id == made.token_to_id('<end>')
  (tmp_path / 'copy').mkdir()
  t.save(tmp_path / 'copy')
  again = tokenizer.load(str(tmp_path / 'copy'))
  assert (again.bos_id, again.eos_id) == (t.bos_id, t.eos_id)


def test_a_file_without_special_tokens_is_refused(tmp_path):
  _word_level(tmp_path / 'tokenizer.json', ['<mask>'])
  with pytest.raises(ValueError, match='no token that begins or ends'):
    tokenizer.load(str(tmp_path))


def test_truncation_in_a_file_loses_no_text(tmp_path):
  made = _word_level(tmp_path / 'tokenizer.json', ['<s>'])
  made.enable_truncation(4)
  made.enable_padding(length=8)
  made.save(str(tmp_path / 'tokenizer.json'))
  t = tokenizer.load(str(tmp_path))
  assert t.encode('a b a b a b').tolist() == [0, 1] * 3
  assert t.encode('a').tolist() == [0]


def test_vocab_size_covers_ids_beyond_gaps(tmp_path):
  made = _word_level(tmp_path / 'tokenizer.json', ['<s>'])
  content = json.loads(made.to_str())
  content['model']['vocab']['b'] = 40
  (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
  assert tokenizer.load(str(tmp_path)).vocab_size == 41


@pytest.mark.parametrize('spec', ['words', 'bpe:4096', '/nowhere/t.json'])
def test_an_unknown_tokenizer_names_what_there_is(spec):
  with pytest.raises(ValueError, match=f'{spec} is neither "bytes"'):
    tokenizer.load(spec)


@pytest.mark.parametrize('content', ['no JSON', '{"model": 3}'])
def test_a_file_of_another_kind_is_named(content, tmp_path):
  path = tmp_path / 'x.json'
  path.write_text(content)
  with pytest.raises(ValueError, match=r'x\.json is not'):
    tokenizer.load(str(path))


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
  with pytest.raises(ValueError, match='bpe:257.*at least bpe:258'):
    tokenizer.train_bpe(TEXTS, 257)


@pytest.mark.parametrize('bad', [32, -1])
def test_ids_outside_of_the_vocabulary_are_named(bad, monkeypatch):
  monkeypatch.setattr(tokenizer, '_CHECK_IDS', 2)
  tokenizer.check_ids(np.array([[0, 31], [5, 6]]), 32)
  with pytest.raises(ValueError, match=rf'{bad}\b.*\b32\b'):
    tokenizer.check_ids(np.array([[0, 31, 5], [1, bad, 6]]), 32)


def test_ids_that_are_no_integers_are_refused():
  with pytest.raises(TypeError, match='float32'):
    tokenizer.check_ids(np.zeros(3, np.float32), 32)


# What other libraries keep beside a file.


def test_ids_that_end_a_text_are_those_of_the_generation_config_too(tmp_path):
  names = ['<s>', '</s>', '<turn>']
  made = _word_level(tmp_path / 'tokenizer.json', names)
  turn = made.token_to_id('<turn>')
  write = lambda **x: (tmp_path / 'generation_config.json').write_text(
    json.dumps(x)
  )
  write(eos_token_id=[made.token_to_id('</s>'), turn])
  t = tokenizer.load(str(tmp_path))
  assert t.stop_ids == (t.eos_id, t.bos_id, turn)
  write(eos_token_id=turn)
  t = tokenizer.load(str(tmp_path))
  # The file names the one that ends a text, and goes before usual names.
  assert (t.eos_id, t.stop_ids) == (turn, (turn, t.bos_id))
  assert tokenizer.ByteTokenizer().stop_ids == (257, 256)


def test_what_lies_beside_a_file_is_saved_with_it(tmp_path):
  _word_level(tmp_path / 'tokenizer.json', ['<s>', '</s>'])
  beside = {
    'tokenizer_config.json': {'bos_token': '<s>', 'chat_template': '{{ x }}'},
    'generation_config.json': {'eos_token_id': [3, 1], 'top_p': 0.9},
    'special_tokens_map.json': {'pad_token': '</s>'},
  }
  for name, content in beside.items():
    (tmp_path / name).write_text(json.dumps(content))
  (tmp_path / 'tokenizer.model').write_bytes(b'\x00\xff')
  (tmp_path / 'copy').mkdir()
  loaded = tokenizer.load(str(tmp_path))
  loaded.save(tmp_path / 'copy')
  for name, content in beside.items():
    copied = json.loads((tmp_path / 'copy' / name).read_text())
    assert content.items() <= copied.items()
  assert (tmp_path / 'copy' / 'tokenizer.model').read_bytes() == b'\x00\xff'
  again = tokenizer.load(str(tmp_path / 'copy'))
  assert again.stop_ids == loaded.stop_ids


@pytest.mark.parametrize('add_bos', [True, False])
def test_a_prompt_begins_as_the_model_expects_and_is_not_empty(bpe, add_bos):
  for t in (tokenizer.ByteTokenizer(), bpe):
    t.add_bos = add_bos
    begin = [t.bos_id] if add_bos else []
    assert t.encode_prompt('cat').tolist() == [*begin, *t.encode('cat')]
    assert t.encode_prompt('').tolist() == [t.bos_id]
    t.add_bos = True
