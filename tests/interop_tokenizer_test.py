"""The tokenizer of a checkpoint comes along, and is written for others."""

import json

import pytest
from interop_samples import (
  LLAMA,
  export,
  tensors_of,
  trained_here,
  workdir_of,
  write,
)

from gqa import generate, tokenizer
from gqa.interop import hugging_face, tokenizer_files


@pytest.fixture(scope='module')
def bpe():
  texts = ['the cat sat on the mat', 'größe 日本語 the cat'] * 3
  return tokenizer.train_bpe(texts, 270)


def with_tokenizer(directory, bpe, **files):
  config = LLAMA | dict(
    vocab_size=270, bos_token_id=bpe.bos_id, eos_token_id=bpe.eos_id
  )
  source = write(directory, config, tensors_of(config))
  bpe.save(source)
  for name, value in files.items():
    path = directory / name.replace('__', '.')
    path.write_text(json.dumps(value))
  return source


def test_stop_ids_and_files_of_a_tokenizer_come_along_and_go_back(
  bpe, tmp_path
):
  source = with_tokenizer(
    tmp_path / 'x',
    bpe,
    generation_config__json={'eos_token_id': [bpe.eos_id, 9], 'top_k': 5},
    special_tokens_map__json={'bos_token': '<bos>'},
  )
  (tmp_path / 'x' / 'chat_template.jinja').write_text('{{ messages }}')
  target = str(tmp_path / '1')
  hugging_face.import_directory(source, target)
  loaded = generate.load(target).tokenizer
  assert {bpe.eos_id, 9} <= set(loaded.stop_ids)
  assert not loaded.add_bos  # the file has no template that adds it
  assert loaded.encode_prompt('cat').tolist() == bpe.encode('cat').tolist()
  assert loaded.encode_prompt('').tolist() == [loaded.bos_id]
  export(target, str(tmp_path / 'back'))
  for name in ('generation_config.json', 'special_tokens_map.json'):
    kept = json.loads((tmp_path / 'back' / name).read_text())
    given = json.loads((tmp_path / 'x' / name).read_text())
    assert given.items() <= kept.items()
  assert (tmp_path / 'back' / 'chat_template.jinja').read_text()
  written = json.loads((tmp_path / 'back' / 'config.json').read_text())
  assert written['eos_token_id'] == [bpe.eos_id, 9]


@pytest.mark.parametrize('how', ['a flag', 'a template'])
def test_a_text_begins_as_the_tokenizer_of_the_model_begins_it(
  how, bpe, tmp_path
):
  source = with_tokenizer(tmp_path / 'x', bpe)
  if how == 'a flag':
    names = {'bos_token': '<bos>', 'eos_token': '<eos>', 'add_bos_token': True}
    (tmp_path / 'x' / 'tokenizer_config.json').write_text(json.dumps(names))
  else:
    path = tmp_path / 'x' / 'tokenizer.json'
    tokenizer_files._prepend_bos(path, bpe.bos_id)
  hugging_face.import_directory(source, str(tmp_path / '1'))
  loaded = generate.load(str(tmp_path / '1')).tokenizer
  bos = loaded.bos_id
  assert loaded.encode_prompt('cat').tolist() == [bos, *bpe.encode('cat')]


@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_an_exported_tokenizer_gives_the_ids_that_the_model_was_trained_on(
  kind, bpe, tmp_path
):
  tokenizers = pytest.importorskip('tokenizers')
  ours = bpe if kind == 'bpe' else tokenizer.ByteTokenizer()
  config = trained_here(vocab_size=270)
  workdir = workdir_of(config, tmp_path / 'run')
  ours.save(workdir)
  export(workdir, str(tmp_path / 'out'))
  path = tmp_path / 'out' / 'tokenizer.json'
  theirs = tokenizers.Tokenizer.from_file(str(path))
  text = 'the größte cat\n'
  expected = [ours.bos_id, *ours.encode(text).tolist()]
  assert theirs.encode(text).ids == expected
  assert theirs.decode(expected) == text
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['bos_token_id'] == ours.bos_id
  assert written['eos_token_id'] == ours.eos_id
