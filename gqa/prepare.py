"""Text to a token directory, which `data.open_tokens` reads.

It holds

  train.bin, valid.bin            flat token ids, uint16 or uint32
  train.docs.npy, valid.docs.npy  where each document starts, int64
  tokenizer.json                  (see tokenizer.py)
  manifest.json                   sizes, hashes, and where the text came from

A document is [bos] + tokens + [eos].
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from array import array

import numpy as np

from gqa import text as text_lib
from gqa import tokenizer as tokenizer_lib

FORMAT = 1  # of the token directory
SPLITS = ('train', 'valid')
MANIFEST = 'manifest.json'

_BATCH = 1 << 22  # bytes of text tokenised in parallel


def prepare(
  source,
  tokenizer,
  target,
  *,
  valid=None,
  valid_fraction=0.05,
  overwrite=False,
):
  """Writes the token directory `target` and returns its manifest.

  The directory appears when it is complete. While it is made, the text lies
  uncompressed beside it.

  Args:
    source: where the text is; see `text.SOURCES`.
    tokenizer: 'bytes', 'bpe:SIZE' to learn one from the training text, or
      what `tokenizer.load` takes.
    target: directory.
    valid: source of the validation text; else a part of `source` is taken.
    valid_fraction: how much of the text that is.
    overwrite: whether to replace tokens that `target` already holds.
  """
  if not 0 < valid_fraction <= 0.5:
    raise ValueError(f'valid_fraction={valid_fraction} is not in (0, 0.5].')
  size = _bpe_size(tokenizer)
  ready = tokenizer_lib.load(tokenizer) if size is None else None
  target = os.path.abspath(target)
  _check_target(target, overwrite)
  with _workspace(target) as work:
    corpus = text_lib.Corpus(source, os.path.join(work, 'text'))
    if valid is None:
      train_documents, valid_documents = corpus.split(valid_fraction)
      valid_corpus = corpus
    else:
      train_documents = corpus.documents
      valid_corpus = text_lib.Corpus(valid, os.path.join(work, 'valid_text'))
      valid_documents = valid_corpus.documents
    if ready is None:
      ready = _train_bpe(corpus, train_documents, size)

    made = os.path.join(work, 'made')
    os.mkdir(made)
    ready.save(made)
    manifest = describe(source, tokenizer, ready)
    manifest['tokenizer']['sha256'] = sha256(tokenizer_path(made))
    manifest['splits'] = {
      'train': write_split(made, 'train', corpus, train_documents, ready),
      'valid': write_split(made, 'valid', valid_corpus, valid_documents, ready),
    }
    with open(os.path.join(made, MANIFEST), 'w', encoding='utf-8') as f:
      json.dump(manifest, f, indent=2, ensure_ascii=False)
      f.write('\n')
    if os.path.isdir(target):
      os.rename(target, os.path.join(work, 'old'))
    os.rename(made, target)
  return manifest


def _bpe_size(spec):
  """Returns the size of a 'bpe:SIZE', None for any other tokenizer."""
  if not spec.startswith('bpe:'):
    return None
  size = spec.removeprefix('bpe:')
  if not size.isdecimal():
    raise ValueError(f'tokenizer={spec}: {size!r} is not a vocabulary size.')
  if int(size) < tokenizer_lib.MIN_BPE_SIZE:
    tokenizer_lib.train_bpe([], int(size))
  return int(size)


def _train_bpe(corpus, documents, size):
  total = int((documents[:, 1] - documents[:, 0]).sum())
  with text_lib.Progress('learning the tokenizer', total) as progress:

    def texts():
      for piece, _, _ in corpus.pieces(documents):
        progress.add(len(piece))
        yield piece.decode()

    return tokenizer_lib.train_bpe(texts(), size)


def describe(source, spec, tokenizer):
  """Returns the manifest of tokens, but for its `splits`."""
  vocab_size = tokenizer.vocab_size
  return {
    'format': FORMAT,
    'source': source,
    'tokenizer': {'spec': spec, 'file': tokenizer_lib.FILE},
    'vocab_size': vocab_size,
    'bos_id': tokenizer.bos_id,
    'eos_id': tokenizer.eos_id,
    'dtype': _dtype(vocab_size),
  }


def _dtype(vocab_size):
  return 'uint16' if vocab_size <= 1 << 16 else 'uint32'


def write_split(directory, split, corpus, documents, tokenizer):
  """Writes a split's two files and returns its entry in the manifest."""
  dtype = np.dtype(_dtype(tokenizer.vocab_size))
  total = int((documents[:, 1] - documents[:, 0]).sum())
  starts, count, digest = array('q'), 0, hashlib.sha256()
  path = os.path.join(directory, f'{split}.bin')
  with (
    open(path, 'wb') as f,
    text_lib.Progress(f'tokenising {split}', total) as bar,
  ):
    for batch in _batches(corpus.pieces(documents)):
      texts = [piece.decode() for piece, _, _ in batch]
      encoded = tokenizer.encode_batch(texts)
      for (piece, first, last), ids in zip(batch, encoded, strict=True):
        if first:
          starts.append(count)
        before = np.full(int(first), tokenizer.bos_id, dtype)
        after = np.full(int(last), tokenizer.eos_id, dtype)
        ids = np.concatenate([before, ids.astype(dtype), after])
        f.write(ids)
        digest.update(ids)
        count += len(ids)
        bar.add(len(piece))
  np.save(
    os.path.join(directory, f'{split}.docs.npy'), np.array(starts, np.int64)
  )
  files = [corpus.files[i] for i in np.unique(documents[:, 2])]
  return {
    'tokens': count,
    'documents': len(starts),
    'bytes': total,
    'sha256': digest.hexdigest(),
    'sources': files,
  }


def _batches(pieces):
  """Yields lists of pieces of about `_BATCH` bytes."""
  batch, size = [], 0
  for piece in pieces:
    batch.append(piece)
    size += len(piece[0])
    if size >= _BATCH:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def _check_target(target, overwrite):
  if not os.path.lexists(target):
    return
  if not os.path.isdir(target):
    raise ValueError(f'target={target} is a file; choose another one.')
  files = set(os.listdir(target))
  if files and MANIFEST not in files:
    raise ValueError(
      f'target={target} is not empty and holds no tokens; choose another one.'
    )
  if files and not overwrite:
    raise ValueError(
      f'target={target} already holds tokens; --overwrite replaces them.'
    )
  ours = {MANIFEST, *tokenizer_lib.FILES}
  ours |= {f'{s}.{kind}' for s in SPLITS for kind in ('bin', 'docs.npy')}
  if foreign := sorted(files - ours):
    raise ValueError(
      f'target={target} also holds {foreign[0]}, which --overwrite would '
      'remove; choose another one.'
    )


@contextlib.contextmanager
def _workspace(target):
  """A directory beside `target`, removed at the end."""
  parent, name = os.path.split(target)
  try:
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp('.tmp', f'.{name}.', parent)
  except OSError as e:
    reason = (
      e.strerror if os.path.isdir(parent) else f'{parent} is no directory'
    )
    raise OSError(f'target={target} cannot be written: {reason}.') from e
  try:
    yield work
  except OSError as e:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
      raise OSError(
        f'no space is left for target={target}; it needs about the size of the '
        'text and of the tokens: free some, or choose another one.'
      ) from e
    raise
  finally:
    shutil.rmtree(work, ignore_errors=True)


def sha256(path):
  """Returns the hash of a file, as the manifest holds it."""
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def tokenizer_path(directory):
  """Returns where the tokenizer of a token directory is."""
  return os.path.join(directory, tokenizer_lib.FILE)
