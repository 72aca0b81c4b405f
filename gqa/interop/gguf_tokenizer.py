"""The tokenizer inside of a GGUF file, as the files of a Hugging Face one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_PREFIX = 'tokenizer.ggml.'
_CONTROL, _USER_DEFINED = 3, 4  # token types; a control token is never text
_SPACE = '▁'
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def files(values: Mapping[str, Any], vocab_size: int) -> dict[str, bytes]:
  """Returns tokenizer.json and what lies beside it, by name.

  Args:
    values: the metadata of the file.
    vocab_size: of the model.

  Raises:
    ValueError: the tokenizer is of a kind that is not known, or damaged.
  """
  own = {
    key.removeprefix(_PREFIX): value
    for key, value in values.items()
    if key.startswith(_PREFIX)
  }
  kind, tokens = own.get('model'), own.get('tokens')
  if kind not in _KINDS:
    raise ValueError(
      f'{_PREFIX}model={kind!r} is not supported; known are '
      f'{", ".join(_KINDS)}.'
    )
  _check_strings(tokens, 'tokens')
  if len(set(tokens)) != len(tokens) or len(tokens) > vocab_size:
    raise ValueError(
      f'{_PREFIX}tokens has {len(tokens)} entries, {len(set(tokens))} of them '
      f'different, for a vocabulary of {vocab_size}.'
    )
  made = _KINDS[kind](own)
  types = own.get('token_type') or [1] * len(tokens)
  added = [
    tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)
    for token, type_ in zip(tokens, types, strict=False)
    if type_ in (_CONTROL, _USER_DEFINED)
  ]
  made.add_tokens(added)
  bos, eos = (_token(own, f'{name}_token_id') for name in ('bos', 'eos'))
  add_bos = bool(own.get('add_bos_token', kind == 'llama')) and bos is not None
  if add_bos:
    made.post_processor = processors.TemplateProcessing(
      single=f'{bos} $A',
      pair=f'{bos} $A {bos} $B',
      special_tokens=[(bos, own['bos_token_id'])],
    )
  return {
    'tokenizer.json': made.to_str().encode(),
    'tokenizer_config.json': _dump(
      {
        'bos_token': bos,
        'eos_token': eos,
        'unk_token': _token(own, 'unknown_token_id'),
        'pad_token': _token(own, 'padding_token_id'),
        'add_bos_token': add_bos,
        'chat_template': values.get('tokenizer.chat_template'),
        'clean_up_tokenization_spaces': False,
        'tokenizer_class': 'PreTrainedTokenizerFast',
      }
    ),
    'generation_config.json': _dump(_ids(own)),
  }


def _byte_level(own: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Byte-level BPE, as of GPT-2, with one of the known ways to cut words."""
  kind = own.get('pre')
  if kind not in _WORD_CUTS:
    raise ValueError(
      f'{_PREFIX}pre={kind!r} is not supported; known are '
      f'{", ".join(_WORD_CUTS)}.'
    )
  merges = own.get('merges')
  _check_strings(merges, 'merges')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  vocab = {token: i for i, token in enumerate(own['tokens'])}
  bad = [pair for pair in pairs if len(pair) != 2 or ''.join(pair) not in vocab]
  if bad:
    raise ValueError(f'{_PREFIX}merges has {" ".join(bad[0])!r}.')
  ignore_merges = kind in ('llama-bpe', 'llama3')
  made = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
  )
  if kind == 'qwen2':
    made.normalizer = normalizers.NFC()
  made.pre_tokenizer = _WORD_CUTS[kind]()
  made.decoder = decoders.ByteLevel()
  return made


def _sentence_piece(own: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """SentencePiece's BPE: pairs merge by the score of what they become."""
  tokens, scores = own['tokens'], own.get('scores')
  if not isinstance(scores, list) or len(scores) != len(tokens):
    raise ValueError(f'{_PREFIX}scores has not one number for each token.')
  vocab = {token: i for i, token in enumerate(tokens)}
  order = sorted(vocab, key=lambda token: (-scores[vocab[token]], vocab[token]))
  types = own.get('token_type') or [1] * len(tokens)
  merges = [
    (token[:cut], token[cut:])
    for token in order
    if types[vocab[token]] == 1
    for cut in range(1, len(token))
    if token[:cut] in vocab and token[cut:] in vocab
  ]
  made = tokenizers.Tokenizer(
    models.BPE(
      vocab=vocab,
      merges=merges,
      unk_token=_token(own, 'unknown_token_id'),
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  spaces = normalizers.Replace(' ', _SPACE)
  back = [decoders.Replace(_SPACE, ' '), decoders.ByteFallback()]
  back.append(decoders.Fuse())
  if own.get('add_space_prefix', True):
    spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    back.append(decoders.Strip(' ', 1, 0))
  made.normalizer = spaces
  made.decoder = decoders.Sequence(back)
  return made


_KINDS = {'gpt2': _byte_level, 'llama': _sentence_piece}
_plain = lambda **options: pre_tokenizers.ByteLevel(
  add_prefix_space=False, **options
)
_split = lambda digits: pre_tokenizers.Sequence(
  [
    pre_tokenizers.Split(tokenizers.Regex(_WORDS % digits), 'isolated'),
    _plain(use_regex=False),
  ]
)
_WORD_CUTS = {
  'gpt-2': _plain,
  'smollm': lambda: pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _plain()]
  ),
  'llama-bpe': lambda: _split('{1,3}'),
  'llama3': lambda: _split('{1,3}'),
  'qwen2': lambda: _split(''),
}


def _ids(own: Mapping[str, Any]) -> dict[str, Any]:
  """The ids that begin and end a text; more than one may end it."""
  names = ('eos', 'eot', 'eom')
  ends = [own.get(f'{name}_token_id') for name in names]
  ends = list(dict.fromkeys(i for i in ends if type(i) is int))
  ids = {'bos_token_id': own.get('bos_token_id')}
  if ends:
    ids['eos_token_id'] = ends[0] if len(ends) == 1 else ends
  return {name: value for name, value in ids.items() if value is not None}


def _token(own: Mapping[str, Any], name: str) -> str | None:
  i = own.get(name)
  known = type(i) is int and 0 <= i < len(own['tokens'])
  return own['tokens'][i] if known else None


def _check_strings(value: Sequence[Any] | None, name: str) -> None:
  if not isinstance(value, list) or not all(type(x) is str for x in value):
    raise ValueError(f'{_PREFIX}{name} is no list of strings.')


def _dump(value: Mapping[str, Any]) -> bytes:
  kept = {name: item for name, item in value.items() if item is not None}
  return (json.dumps(kept, indent=2, ensure_ascii=False) + '\n').encode()
