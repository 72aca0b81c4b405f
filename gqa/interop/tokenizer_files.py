"""The files of a tokenizer in a Hugging Face directory, read and written."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from gqa import tokenizer as tokenizer_lib
from gqa.interop import directory as directory_lib
from gqa.interop.directory import Directory

MAX_FILE = 1 << 28  # bytes
_TOKENIZER_CONFIG = 'tokenizer_config.json'
_GENERATION_CONFIG = 'generation_config.json'
_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def begins_with_bos(directory: str | os.PathLike[str]) -> bool:
  """Whether transformers would begin a text with the token of beginnings."""
  directory = pathlib.Path(directory)
  names = directory / _TOKENIZER_CONFIG
  if names.exists():
    given = json.loads(names.read_text()).get('add_bos_token')
    if isinstance(given, bool):
      return given
  loaded = tokenizer_lib.load(os.fspath(directory))
  if not isinstance(loaded, tokenizer_lib.FileTokenizer):
    return True
  plain = tokenizers.Tokenizer.from_file(str(directory / tokenizer_lib.FILE))
  return plain.encode('').ids[:1] == [loaded.bos_id]


def read(source: Directory) -> dict[str, bytes]:
  """The files of the tokenizer, with the ids that config.json names."""
  files = {}
  for name in tokenizer_lib.FILES:
    path = source.file(name)
    if path is None:
      continue
    if path.stat().st_size > MAX_FILE:
      raise ValueError(f'{path} has more than {MAX_FILE} bytes.')
    files[name] = path.read_bytes()
  text = source.config.get('text_config')
  config = source.config | (text if isinstance(text, dict) else {})
  given = {name: config.get(name) for name in _IDS}
  generation = source.json(_GENERATION_CONFIG) or {}
  generation = {k: v for k, v in given.items() if v is not None} | generation
  if generation:
    files[_GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
  return files


def write(
  tokenizer: Any, target: pathlib.Path, add_bos: bool
) -> dict[str, Any]:
  """Writes a tokenizer's files; returns the ids that config.json repeats.

  Args:
    tokenizer: see tokenizer.py.
    target: directory.
    add_bos: whether a text begins with the tokenizer's token for it.
  """
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    tokenizer = _byte_level(tokenizer)
  tokenizer.save(target)
  names = json.loads((target / _TOKENIZER_CONFIG).read_text())
  names.setdefault('tokenizer_class', 'PreTrainedTokenizerFast')
  directory_lib.write_json(target / _TOKENIZER_CONFIG, names)
  bos, eos = tokenizer.bos_id, tokenizer.eos_id
  if add_bos and not begins_with_bos(target):
    _prepend_bos(target / tokenizer_lib.FILE, bos)
  stops = [i for i in tokenizer.stop_ids if i != bos] or [eos]
  ids = {
    'bos_token_id': bos,
    'eos_token_id': stops[0] if len(stops) == 1 else stops,
  }
  generation = target / _GENERATION_CONFIG
  if not generation.exists():
    directory_lib.write_json(generation, ids)
  return ids


def _byte_level(
  plain: tokenizer_lib.ByteTokenizer,
) -> tokenizer_lib.FileTokenizer:
  """The same ids from the tokenizers library: a BPE without merges."""
  alphabet = tokenizer_lib.byte_alphabet()
  made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(['<bos>', '<eos>'])
  return tokenizer_lib.FileTokenizer(made, plain.bos_id, plain.eos_id)


def _prepend_bos(path: pathlib.Path, bos_id: int) -> None:
  """Makes a tokenizer.json begin texts as the model was trained."""
  made = tokenizers.Tokenizer.from_file(str(path))
  token = made.id_to_token(bos_id)
  made.post_processor = processors.TemplateProcessing(
    single=f'{token} $A',
    pair=f'{token} $A {token} $B',
    special_tokens=[(token, bos_id)],
  )
  made.save(str(path))
