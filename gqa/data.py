"""Token files to batches; and the command that makes token files of text.

`python -m gqa.data --source=... --target=DIR` tokenises once (see prepare.py),
and `--verify=DIR` tells whether a copy of the result is whole.
Example i of length T is the window tokens[i*T : i*T + T+1]; its inputs are the
window without its last token and its targets the window without its first.
That is the one place where labels are shifted: nothing after it shifts again.
Documents are packed, so a window may hold several, and `segments` and
`positions` keep them apart.
"""

import json
import os
import tempfile

import numpy as np
from absl import flags

from gqa import prepare as prepare_lib
from gqa import text as text_lib
from gqa import tokenizer as tokenizer_lib

FORMAT, SPLITS = prepare_lib.FORMAT, prepare_lib.SPLITS
MANIFEST, SOURCES = prepare_lib.MANIFEST, text_lib.SOURCES
prepare = prepare_lib.prepare


# Reading token files.


class TokenFile:
  """One split of a token directory, or a text that was tokenised in memory.

  Attributes:
    tokens: [n] unsigned ints, memory-mapped.
    documents: [m] int64, where each document starts.
    manifest: of the whole directory.
    split: name of this part.
    directory: None in memory.
  """

  def __init__(
    self, tokens, documents, manifest, split, directory=None, tokenizer=None
  ):
    self.tokens, self.documents = tokens, documents
    self.manifest, self.split, self.directory = manifest, split, directory
    self._tokenizer = tokenizer
    if not np.issubdtype(tokens.dtype, np.integer):
      raise TypeError(f'{self} has dtype {tokens.dtype}; ids are integers.')
    entry = manifest['splits'][split]
    if (
      documents.shape != (entry['documents'],)
      or documents[0] != 0
      or (np.diff(documents) <= 0).any()
      or documents[-1] >= len(tokens)
    ):
      raise ValueError(
        f'{self}: its document starts are damaged; make it anew.'
      )

  def __str__(self):
    return f'{self.split} tokens of {self.directory or self.manifest["source"]}'

  def __len__(self):
    return len(self.tokens)

  @property
  def bytes(self):
    """UTF-8 bytes of the text; special tokens have none."""
    return self.manifest['splits'][self.split]['bytes']

  @property
  def vocab_size(self):
    """Ids that the tokenizer may give, not those of a model."""
    return self.manifest['vocab_size']

  def tokenizer(self):
    """Returns the tokenizer that made the tokens."""
    if self._tokenizer is None:
      self._tokenizer = tokenizer_lib.load(self.directory)
      for name in ('vocab_size', 'bos_id', 'eos_id'):
        found = getattr(self._tokenizer, name)
        if found != self.manifest[name]:
          raise ValueError(
            f'{prepare_lib.tokenizer_path(self.directory)} has {name}={found}, but '
            f'{MANIFEST} says {self.manifest[name]}: it is another tokenizer.'
          )
    return self._tokenizer

  def check_vocab(self, model_vocab_size):
    """Raises unless a model of that many ids can read all tokens."""
    if self.vocab_size > model_vocab_size:
      raise ValueError(
        f'the tokenizer of the {self} is larger than the model: '
        f'vocab_size={self.vocab_size} against model.vocab_size='
        f'{model_vocab_size}; set --config.model.vocab_size={self.vocab_size}.'
      )
    tokenizer_lib.check_ids(self.tokens, self.vocab_size, f'the {self}')

  def verify(self):
    """Reads everything and raises where it is not what was written."""
    if not (self.tokens[self.documents] == self.manifest['bos_id']).all():
      raise ValueError(f'{self}: a document does not begin with bos.')
    if self.directory is None:
      return
    ids = os.path.join(self.directory, f'{self.split}.bin')
    for path, entry in (
      (ids, self.manifest['splits'][self.split]),
      (prepare_lib.tokenizer_path(self.directory), self.manifest['tokenizer']),
    ):
      if prepare_lib.sha256(path) != entry['sha256']:
        raise ValueError(f'{path} is not what was written: sha256 differs.')

  @property
  def num_targets(self):
    """Targets that count: all tokens but the one each document begins with."""
    return len(self.tokens) - len(self.documents)

  def num_examples(self, seq_len):
    """Returns the number of whole windows."""
    return (len(self.tokens) - 1) // seq_len


def is_token_directory(path):
  """Whether `open_tokens` would take `path` for one, damaged or not."""
  return os.path.isfile(os.path.join(path, MANIFEST))


def open_tokens(path, split='train'):
  """Returns a split of a directory made by `python -m gqa.data`."""
  manifest_path = os.path.join(path, MANIFEST)
  if not is_token_directory(path):
    raise ValueError(
      f'{path} is not a token directory: it has no {MANIFEST}; make one with '
      f'python -m gqa.data --source=FILE --tokenizer=bytes --target={path}'
    )
  try:
    with open(manifest_path, encoding='utf-8') as f:
      manifest = json.load(f)
    found = manifest['format']
    if found != FORMAT:
      raise ValueError(f'format {found}; this program reads {FORMAT}')
    dtype = np.dtype(manifest['dtype'])
    splits = manifest['splits']
    entry = splits[split]
    size = entry['tokens'] * dtype.itemsize
  except (ValueError, KeyError, TypeError) as e:
    if isinstance(e, KeyError) and e.args == (split,):
      raise ValueError(
        f'split={split} is not in {manifest_path}; it has {sorted(splits)}.'
      ) from None
    raise ValueError(f'{manifest_path} cannot be used: {e!r}') from e

  file = os.path.join(path, f'{split}.bin')
  found = os.path.getsize(file)
  if found != size:
    raise ValueError(
      f'{file} has {found} bytes where {MANIFEST} says {size}: it was '
      'truncated or replaced; make it anew with --overwrite.'
    )
  tokens = np.memmap(file, dtype, 'r')
  starts = os.path.join(path, f'{split}.docs.npy')
  try:
    documents = np.load(starts)
  except (ValueError, EOFError) as e:
    raise ValueError(f'{starts} is damaged: {e}') from e
  return TokenFile(tokens, documents, manifest, split, directory=path)


def tokens_from_text(source, tokenizer, max_bytes=None):
  """Returns a `TokenFile` of the text of `source`, held in memory.

  Args:
    source: see `SOURCES`.
    tokenizer: an object, as `tokenizer.load` returns.
    max_bytes: of text, about, if all is too much; see `text.Corpus.sample`.
  """
  with tempfile.TemporaryDirectory() as work:
    corpus = text_lib.Corpus(source, os.path.join(work, 'text'))
    documents = corpus.documents
    if max_bytes is not None:
      documents = corpus.sample(max_bytes)
    entry = prepare_lib.write_split(work, 'text', corpus, documents, tokenizer)
    manifest = prepare_lib.describe(source, 'given', tokenizer)
    manifest['splits'] = {'text': entry}
    tokens = np.fromfile(os.path.join(work, 'text.bin'), manifest['dtype'])
    documents = np.load(os.path.join(work, 'text.docs.npy'))
  return TokenFile(tokens, documents, manifest, 'text', tokenizer=tokenizer)


# Batches.


def windows(tokens, index, seq_len):
  """Returns the batch of the examples `index`, [B] ints.

  What lies behind the end of the file is padding: segment 0, weight 0, and
  zeros elsewhere.

  tokens, targets: [B, T] int32.
  segments: [B, T] int32, documents of the window counted from 1.
  positions: [B, T] int32, from 0 in each document; in one that began before
    the window, from the window's start.
  weights: [B, T] float32, 0 where the target belongs to the next document.
  index: [B] int64.
  """
  index = np.asarray(index, np.int64)
  last = len(tokens.tokens) - 1
  offset = index[:, None] * seq_len + np.arange(seq_len + 1)  # [B, T+1]
  real = offset[:, 1:] <= last  # [B, T]
  offset = np.minimum(offset, last)
  ids = tokens.tokens[offset].astype(np.int32)
  document = np.searchsorted(tokens.documents, offset, 'right') - 1
  here = document[:, :-1]
  start = np.maximum(tokens.documents[here], offset[:, :1])
  return {
    'tokens': np.where(real, ids[:, :-1], 0),
    'targets': np.where(real, ids[:, 1:], 0),
    'positions': np.where(real, offset[:, :-1] - start, 0).astype(np.int32),
    'segments': np.where(real, here - here[:, :1] + 1, 0).astype(np.int32),
    'weights': (real & (here == document[:, 1:])).astype(np.float32),
    'index': index,
  }


def train_batches(
  tokens, *, batch_size, seq_len, seed, process_index=0, process_count=1
):
  """Returns an endless iterator over shuffled batches of whole windows.

  Every epoch visits each window once, in another order. Process p of P takes
  the examples p, p+P, ... of the global order, so that the global batch does
  not depend on P, and neither does `get_state()`, a JSON value that
  `set_state` takes up again; it counts batches of `batch_size`.

  Args:
    tokens: a `TokenFile`.
    batch_size: examples over all processes; each one yields its share.
    seq_len: tokens of an example.
    seed: of the order.
    process_index: of this process.
    process_count: how many processes share a batch.
  """
  count = tokens.num_examples(seq_len)
  if count < 1:
    raise ValueError(
      f'the {tokens} are only {len(tokens)}, fewer than seq_len={seq_len} and '
      'a last target; use more text or a smaller seq_len.'
    )
  local = _local_batch(batch_size, process_count)
  import grain

  dataset = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
  dataset = dataset[process_index::process_count]
  dataset = dataset.batch(local, drop_remainder=True)
  dataset = dataset.map(lambda index: windows(tokens, index, seq_len))
  ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
  return iter(dataset.to_iter_dataset(ahead))


def eval_batches(
  tokens,
  *,
  batch_size,
  seq_len,
  num_batches=None,
  process_index=0,
  process_count=1,
):
  """Returns an iterator over every window once, in order.

  The last window and the last batch are padded to the full shape, so each
  target counts exactly once whatever the sizes are.

  Args:
    tokens: a `TokenFile`.
    batch_size: windows over all processes; each one yields its share.
    seq_len: tokens of a window.
    num_batches: how many at most; None for all.
    process_index: of this process.
    process_count: how many processes share a batch.
  """
  _local_batch(batch_size, process_count)
  count = -(-(len(tokens) - 1) // (seq_len * batch_size))
  if num_batches is not None:
    if num_batches < 1:
      raise ValueError(f'num_batches={num_batches} must be positive.')
    count = min(count, num_batches)
  rows = np.arange(process_index, batch_size, process_count)
  return (windows(tokens, i * batch_size + rows, seq_len) for i in range(count))


def _local_batch(batch_size, process_count):
  if batch_size < 1 or batch_size % process_count:
    raise ValueError(
      f'batch_size={batch_size} must be a positive multiple of the number of '
      f'processes, {process_count}.'
    )
  return batch_size // process_count


def main(argv):
  """Makes or verifies what the flags say, and says what it is."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]} is no flag; write --source=FILE --target=DIR.')
  args = flags.FLAGS
  if args.verify:
    target, splits = args.verify, [open_tokens(args.verify, s) for s in SPLITS]
    for split in splits:
      split.verify()
    manifest = splits[0].manifest
  elif args.source and args.target:
    target = args.target
    manifest = prepare(
      args.source,
      args.tokenizer,
      target,
      valid=args.valid,
      valid_fraction=args.valid_fraction,
      overwrite=args.overwrite,
    )
  else:
    raise ValueError('give --source=FILE and --target=DIR, or --verify=DIR.')
  for split, entry in manifest['splits'].items():
    print(
      f'{split}: {entry["documents"]:,} documents, {entry["bytes"]:,} bytes, '
      f'{entry["tokens"]:,} tokens'
    )
  print(f'{target}: vocab_size={manifest["vocab_size"]}')


def _define_flags():
  # Not at import: the commands that read tokens have flags of these names.
  flags.DEFINE_string('source', None, SOURCES)
  flags.DEFINE_string('target', None, 'directory to make')
  flags.DEFINE_string(
    'verify', None, 'directory that was made; reads all of it and makes nothing'
  )
  flags.DEFINE_string(
    'tokenizer', 'bytes', 'bytes, bpe:SIZE, or a tokenizer.json'
  )
  flags.DEFINE_string('valid', None, 'source of the validation text')
  flags.DEFINE_float(
    'valid_fraction', 0.05, 'of the text, without --valid', 0.0, 0.5
  )
  flags.DEFINE_bool('overwrite', False, 'replace the tokens in --target')


if __name__ == '__main__':
  from gqa import cli

  _define_flags()
  cli.run(main)
