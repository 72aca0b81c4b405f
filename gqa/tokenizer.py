"""Text to token ids and back: UTF-8 bytes, or a `tokenizers` file.

Text is only text: the characters `<eos>` in it encode as five characters and
never as the special token, so no document can end another one. Both kinds of
tokenizer have the same interface:

  vocab_size, bos_id, eos_id: ints; every id is in [0, vocab_size).
  stop_ids: the ids that end a text, eos_id and bos_id among them.
  add_bos: whether the model expects a text to begin with bos_id.
  encode(text): [n] int32, without special tokens.
  encode_prompt(text): [n] int32 to continue, with bos_id if add_bos; not empty.
  encode_batch(texts): a list of the same.
  decode(ids): text; special tokens are dropped and invalid UTF-8 replaced.
  token_bytes(id): the bytes that one token stands for, b'' for a special one.
  save(directory): writes what `load(directory)` reads.
"""

import json
import os

import numpy as np

FILE = 'tokenizer.json'
_NAMES_FILE = 'tokenizer_config.json'
_GENERATION_FILE = 'generation_config.json'
# Kept for other programs that a model may be exported to; not read here.
COMPANIONS = (
  'added_tokens.json',
  'chat_template.jinja',
  'merges.txt',
  'special_tokens_map.json',
  'tokenizer.model',
  'vocab.json',
)
FILES = (FILE, _NAMES_FILE, _GENERATION_FILE, *COMPANIONS)  # of `save`

# Usual names of special tokens, the first one in the vocabulary is taken. A
# tokenizer_config.json beside the file goes before them. Where only one of
# the two is found it serves as both, as in GPT-2 and Qwen.
BOS_NAMES = (
  '<bos>',
  '<s>',
  '<|begin_of_text|>',
  '<|startoftext|>',
  '<｜begin▁of▁sentence｜>',
)
EOS_NAMES = (
  '<eos>',
  '</s>',
  '<|end_of_text|>',
  '<|endoftext|>',
  '<｜end▁of▁sentence｜>',
  '<|im_end|>',
)
MIN_BPE_SIZE = 258  # all bytes and two special tokens

_CHECK_IDS = 1 << 24  # ids looked at in one go


class _Tokenizer:
  """What the kinds have in common."""

  add_bos = True

  def encode_prompt(self, text):
    """Returns the ids of a text to continue."""
    ids = self.encode(text)
    if self.add_bos or not ids.size:
      ids = np.concatenate([np.array([self.bos_id], np.int32), ids])
    return ids


class ByteTokenizer(_Tokenizer):
  """Ids 0..255 are bytes; it needs no file and loses nothing."""

  vocab_size, bos_id, eos_id = 258, 256, 257
  stop_ids = (257, 256)

  def encode(self, text):
    """Returns the UTF-8 bytes of `text`, [n] int32."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def encode_batch(self, texts):
    """Returns one array per text."""
    return [self.encode(text) for text in texts]

  def decode(self, ids):
    """Returns text; ids that are no byte are dropped."""
    ids = np.asarray(ids, np.int64).ravel()
    ids = ids[(ids >= 0) & (ids < 256)].astype(np.uint8)
    return ids.tobytes().decode(errors='replace')

  def token_bytes(self, token):
    """Returns one byte, or none for a special token."""
    return bytes([token]) if 0 <= token < 256 else b''

  def save(self, directory):
    """Writes a tokenizer.json that only this module understands."""
    _write_json(os.path.join(directory, FILE), {'type': 'bytes'})


class FileTokenizer(_Tokenizer):
  """A tokenizer of the `tokenizers` library.

  Args:
    tokenizer: of that library.
    bos_id: of the token that begins a text.
    eos_id: of the token that ends it.
    settings: JSON objects by the name of the file they came from, of
      tokenizer_config.json and generation_config.json, which may name more
      ids that end a text.
    companions: bytes of other files by name, to be saved again.
  """

  def __init__(self, tokenizer, bos_id, eos_id, settings=None, companions=None):
    tokenizer.encode_special_tokens = True  # in a text they are text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    self._tokenizer = tokenizer
    self.bos_id, self.eos_id = bos_id, eos_id
    # Ids may have gaps, so the number of tokens is not enough.
    self.vocab_size = 1 + max(tokenizer.get_vocab().values())
    added = tokenizer.get_added_tokens_decoder()
    self._special = {i for i, token in added.items() if token.special}
    self._special |= {bos_id, eos_id}
    self._settings, self._companions = settings or {}, companions or {}
    given = self._settings.get(_GENERATION_FILE, {}).get('eos_token_id')
    given = given if isinstance(given, list) else [given]
    others = [i for i in given if type(i) is int and i >= 0]
    self.stop_ids = tuple(dict.fromkeys([eos_id, bos_id, *others]))
    decoder = json.loads(tokenizer.to_str())['decoder'] or {}
    parts = [decoder, *decoder.get('decoders', ())]
    kinds = [part.get('type') for part in parts]
    self._bytes_of = byte_alphabet() if 'ByteLevel' in kinds else None

  def encode(self, text):
    """Returns the ids of `text` without special tokens, [n] int32."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts):
    """Returns one array per text; the texts are encoded in parallel."""
    encodings = self._tokenizer.encode_batch_fast(
      list(texts), add_special_tokens=False
    )
    return [np.array(e.ids, np.int32) for e in encodings]

  def decode(self, ids):
    """Returns text; ids that the tokenizer does not know are dropped."""
    ids = np.asarray(ids, np.int64).ravel()
    keep = (ids >= 0) & ~np.isin(ids, list(self._special))
    return self._tokenizer.decode(ids[keep].tolist())

  def token_bytes(self, token):
    """Returns the bytes of one token, for output while it is generated."""
    if token < 0 or token in self._special:
      return b''
    text = self._tokenizer.id_to_token(token) or ''
    if self._bytes_of is not None:
      if all(c in self._bytes_of for c in text):
        return bytes(self._bytes_of[c] for c in text)
      return text.encode()
    if len(text) == 6 and text.startswith('<0x') and text.endswith('>'):
      return bytes([int(text[3:5], 16)])
    return text.replace('▁', ' ').encode()

  def save(self, directory):
    """Writes the file, and beside it the names of the special tokens."""
    self._tokenizer.save(os.path.join(directory, FILE))
    names = {
      'bos_token': self._tokenizer.id_to_token(self.bos_id),
      'eos_token': self._tokenizer.id_to_token(self.eos_id),
    }
    names = self._settings.get(_NAMES_FILE, {}) | names
    _write_json(os.path.join(directory, _NAMES_FILE), names)
    if _GENERATION_FILE in self._settings:
      _write_json(
        os.path.join(directory, _GENERATION_FILE),
        self._settings[_GENERATION_FILE],
      )
    for name, content in self._companions.items():
      with open(os.path.join(directory, name), 'wb') as f:
        f.write(content)


def load(spec):
  """Returns the tokenizer that `spec` names.

  Args:
    spec: 'bytes', a tokenizer.json, or a directory that holds one (written by
      `save`, or a checkpoint of another library).
  """
  if spec == 'bytes':
    return ByteTokenizer()
  path = os.path.join(spec, FILE) if os.path.isdir(spec) else spec
  if not os.path.isfile(path):
    hint = ''
    if str(spec).startswith('bpe'):
      hint = ' ("bpe:4096" trains one, but only in python -m gqa.data)'
    raise ValueError(
      f'tokenizer={spec} is neither "bytes", nor a tokenizer.json, nor a '
      f'directory that holds one{hint}.'
    )
  try:
    with open(path, encoding='utf-8') as f:
      text = f.read()
    content = json.loads(text)
  except ValueError as e:
    raise ValueError(f'tokenizer={path} is not JSON: {e}') from e
  if content == {'type': 'bytes'}:
    return ByteTokenizer()

  import tokenizers

  try:
    tokenizer = tokenizers.Tokenizer.from_str(text)
  except Exception as e:  # The library raises bare Exceptions.
    raise ValueError(
      f'tokenizer={path} is not a file of the tokenizers library: {e}'
    ) from e
  directory = os.path.dirname(path)
  settings, companions = {}, {}
  for name in (_NAMES_FILE, _GENERATION_FILE):
    beside = os.path.join(directory, name)
    if os.path.isfile(beside):
      settings[name] = _read_json(beside)
  for name in COMPANIONS:
    beside = os.path.join(directory, name)
    if os.path.isfile(beside):
      with open(beside, 'rb') as f:
        companions[name] = f.read()
  ids = _special_ids(tokenizer, path, settings)
  return FileTokenizer(tokenizer, *ids, settings, companions)


def train_bpe(texts, vocab_size):
  """Returns a byte-level BPE tokenizer learnt from an iterable of texts.

  Its vocabulary is smaller than `vocab_size` when the texts have no more
  pairs to merge.
  """
  if vocab_size < MIN_BPE_SIZE:
    raise ValueError(
      f'tokenizer=bpe:{vocab_size} is too small: 256 bytes and 2 special '
      f'tokens need at least bpe:{MIN_BPE_SIZE}.'
    )
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=['<bos>', '<eos>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return FileTokenizer(
    tokenizer, tokenizer.token_to_id('<bos>'), tokenizer.token_to_id('<eos>')
  )


def check_ids(ids, vocab_size, where='tokens'):
  """Raises unless `ids` are integers in [0, vocab_size).

  An embedding look-up clamps what is out of range and trains on, so this is
  asked on the host. Memory-mapped ids are read in pieces.
  """
  ids = np.asanyarray(ids)
  if not np.issubdtype(ids.dtype, np.integer):
    raise TypeError(f'{where} have dtype {ids.dtype}; ids must be integers.')
  flat = ids.reshape(-1)
  for start in range(0, flat.size, _CHECK_IDS):
    part = flat[start : start + _CHECK_IDS]
    for bad in (int(part.min()), int(part.max())):
      if not 0 <= bad < vocab_size:
        raise ValueError(
          f'{where} hold the id {bad}, outside of [0, {vocab_size}), the '
          f'vocabulary of vocab_size={vocab_size}.'
        )


def _special_ids(tokenizer, path, settings):
  """Returns (bos_id, eos_id) of a file, by the names given or the usual ones.

  Args:
    tokenizer: of the `tokenizers` library.
    path: of its file.
    settings: as of `FileTokenizer`; ids in generation_config.json go after the
      names in tokenizer_config.json and before the usual names.
  """
  names = settings.get(_NAMES_FILE, {})
  generation = settings.get(_GENERATION_FILE, {})
  found = []
  for key, usual in (('bos_token', BOS_NAMES), ('eos_token', EOS_NAMES)):
    name = names.get(key)
    name = name.get('content') if isinstance(name, dict) else name
    given = generation.get(f'{key}_id')
    given = given[0] if isinstance(given, list) and given else given
    known = type(given) is int and tokenizer.id_to_token(given) is not None
    ids = [
      tokenizer.token_to_id(name) if name else None,
      given if known else None,
      *(tokenizer.token_to_id(n) for n in usual),
    ]
    found.append(next((i for i in ids if i is not None), None))
  bos, eos = found
  if bos is None and eos is None:
    raise ValueError(
      f'tokenizer={path} has no token that begins or ends a document: none of '
      f'{", ".join(BOS_NAMES + EOS_NAMES)} is in it; name them as bos_token '
      f'and eos_token in a {_NAMES_FILE} beside it.'
    )
  return (eos if bos is None else bos), (bos if eos is None else eos)


def byte_alphabet():
  """Returns the byte for each character that byte-level BPE writes it as.

  Printable characters of Latin-1 stand for themselves; the other bytes, in
  order, are written as the characters from 256 on.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = [b for b in range(256) if b not in printable]
  alphabet = {chr(b): b for b in printable}
  return alphabet | {chr(256 + i): b for i, b in enumerate(others)}


def _read_json(path):
  try:
    with open(path, encoding='utf-8') as f:
      value = json.load(f)
  except ValueError as e:
    raise ValueError(f'{path} is not JSON: {e}') from e
  if not isinstance(value, dict):
    raise ValueError(f'{path} is no JSON object.')
  return value


def _write_json(path, value):
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(value, f, indent=2, ensure_ascii=False)
    f.write('\n')
