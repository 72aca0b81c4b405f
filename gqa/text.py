"""Text sources: files, directories, packages and datasets, as documents.

A form feed ends a document of a text file, as do its own end and the end of a
.jsonl line or of a dataset's row; documents without text are dropped. A
`Corpus` holds them all, and says which of them are for validation.
"""

import codecs
import importlib.util
import json
import lzma
import mmap
import os
import re
import sys
import time
import zlib
from array import array

import numpy as np

SUFFIXES = ('.txt', '.md', '.jsonl')
COMPRESSED = ('.gz', '.bz2', '.xz')
SOURCES = (
  'a text file (.gz, .bz2, .xz too; .jsonl: one {"text": ...} a line), a '
  'directory of them, hf:NAME[:CONFIG[:SPLIT]], or package:NAME'
)
MIN_DOCUMENTS = 5  # with fewer, validation is the tail of the longest one

_SAMPLES = 16  # parts of a text that is sampled
_LONG_LINE = 1 << 12  # bytes within which a line break is looked for
_READ = 1 << 20  # bytes of text read at once
_PIECE = 1 << 20  # bytes of a document given as one; longer ones are cut
_REPORT = 10.0  # seconds between lines where there is no terminal


# Reading text. A stream of (name, chunk) holds documents as UTF-8; a chunk
# that is None ends one.


def _read_source(source):
  """Yields (name, chunk or None) for a file, directory, package or dataset."""
  kind, _, name = source.partition(':')
  if kind == 'hf' and name:
    yield from _read_dataset(name)
  elif kind == 'package' and name:
    yield from _read_directory(_package_directory(name), source)
  elif os.path.isdir(source):
    yield from _read_directory(source, source)
  elif os.path.exists(source):
    yield from _read_file(source, os.path.basename(source))
  else:
    raise FileNotFoundError(f'{source} does not exist; give {SOURCES}.')


def _package_directory(name):
  # A dotted name would import its parent.
  found = None if '.' in name else importlib.util.find_spec(name)
  if found is None or not found.submodule_search_locations:
    raise ValueError(
      f'package:{name} is not an installed package; pip install {name}'
    )
  return found.submodule_search_locations[0]


def _read_directory(directory, source):
  paths = []
  for folder, folders, files in os.walk(directory):
    folders[:] = [f for f in folders if not f.startswith('.')]
    for file in files:
      stem, suffix = os.path.splitext(file)
      plain = stem if suffix in COMPRESSED else file
      if plain.endswith(SUFFIXES) and not file.startswith('.'):
        paths.append(os.path.join(folder, file))
  if not paths:
    raise ValueError(
      f'{source} holds no file that ends in {", ".join(SUFFIXES)}.'
    )
  for path in sorted(paths):
    yield from _read_file(path, os.path.relpath(path, directory))


def _read_file(path, name):
  stem, suffix = os.path.splitext(path)
  module = {'.gz': 'gzip', '.bz2': 'bz2', '.xz': 'lzma'}.get(suffix)
  opener = importlib.import_module(module).open if module else open
  try:
    with opener(path, 'rb') as f:
      if (stem if module else path).endswith('.jsonl'):
        yield from _read_lines(f, path, name)
      else:
        yield from _read_text(f, path, name)
  except (EOFError, zlib.error, lzma.LZMAError) as e:
    raise ValueError(f'{path} is damaged: {e}') from e
  except OSError as e:
    if e.errno is None:  # What bz2 and gzip say of a damaged file.
      raise ValueError(f'{path} is damaged: {e}') from e
    raise


def _read_text(f, path, name):
  """Form feeds end documents."""
  decoder = codecs.getincrementaldecoder('utf-8')()
  offset = 0  # of the chunk in the text
  while True:
    chunk = f.read(_READ)
    held = len(decoder.getstate()[0])  # bytes of a character that was cut
    try:
      decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as e:
      raise ValueError(
        f'{path} is not UTF-8: byte {offset - held + e.start} of its text is '
        f'0x{e.object[e.start]:02x} ({e.reason}); convert it first.'
      ) from None
    if not chunk:
      break
    offset += len(chunk)
    first, *others = chunk.split(b'\f')
    yield name, first
    for other in others:
      yield name, None
      yield name, other
  yield name, None


def _read_lines(f, path, name):
  """The 'text' of each line is a document."""
  for number, line in enumerate(f, 1):
    if not line.strip():
      continue
    try:
      text = json.loads(line)['text'].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise ValueError(
        f'{path}, line {number}: not an object with a string "text" ({e!r})'
      ) from e
    yield name, text
    yield name, None


def _read_dataset(name):
  """The 'text' column of a Hugging Face dataset; its train split by default."""
  try:
    import datasets
  except ImportError as e:
    raise ValueError(
      f'hf:{name} needs the datasets library; pip install "gqa[datasets]"'
    ) from e
  path, config, split, *_ = [*name.split(':'), '', '']
  saved = ('state.json', 'dataset_dict.json')  # of save_to_disk
  try:
    if any(os.path.exists(os.path.join(path, file)) for file in saved):
      rows = _saved_split(datasets.load_from_disk(path), config, split)
    else:
      rows = datasets.load_dataset(path, config or None, split=split or 'train')
  except (ValueError, OSError) as e:
    raise ValueError(f'hf:{name} cannot be read: {e}') from e
  if 'text' not in rows.column_names:
    raise ValueError(f'hf:{name} has no column "text": {rows.column_names}')
  for row in rows.select_columns('text'):
    yield name, (row['text'] or '').encode()
    yield name, None


def _saved_split(saved, config, split):
  """Returns the rows of a split of what `save_to_disk` wrote."""
  if config:
    raise ValueError(
      f'what was saved on disk has no config {config}; a split is ::{config}'
    )
  if isinstance(saved, dict):
    split = split or 'train'
    if split not in saved:
      raise ValueError(f'split {split} is not in {[*saved]}; give ::SPLIT')
    return saved[split]
  if split and split != str(saved.split):
    raise ValueError(f'it is one unsplit dataset; leave ::{split} out')
  return saved


# Documents, and which of them are for validation.


class Corpus:
  """The documents of a source, in a scratch file: memory holds none of them.

  Attributes:
    text: all bytes, memory-mapped.
    documents: [n, 3] int64, the start, end and file of each.
    files: names; index of the third column.
  """

  def __init__(self, source, scratch):
    rows, self.files = array('q'), []
    start = end = 0
    blank = True
    with open(scratch, 'wb') as f, Progress('reading') as progress:
      for name, chunk in _read_source(source):
        if chunk is not None:
          f.write(chunk)
          end += len(chunk)
          blank = blank and not chunk.strip()
          progress.add(len(chunk))
          continue
        if not blank:
          if not self.files or self.files[-1] != name:
            self.files.append(name)
          rows.extend((start, end, len(self.files) - 1))
        start, blank = end, True
    if not rows:
      raise ValueError(f'{source} is empty: it holds no text.')
    with open(scratch, 'rb') as f:
      self.text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    self.documents = np.array(rows, np.int64).reshape(-1, 3)

  def pieces(self, documents):
    """Yields (text, first, last): bytes, and whether a document begins, ends.

    Only a document of more than `_PIECE` bytes is cut: between two lines of
    text, where byte-level BPE cuts anyway. A tokenizer that marks the
    beginning of its input marks a cut as well.
    """
    for start, end, _ in documents.tolist():
      first = True
      while end - start > _PIECE:
        piece = self.text[start : start + _PIECE]
        piece = piece[: _last_cut(piece)]
        yield piece, first, False
        start, first = start + len(piece), False
      yield self.text[start:end], first, True

  def sample(self, size):
    """Returns documents of about `size` bytes, from all over the text.

    Each is a part of one of the text's: a sixteenth of `size`, from the
    beginning of a line, or of a character, to another. All documents as they
    are if together they are no longer.
    """
    starts, ends, files = self.documents.T
    lengths = np.cumsum(ends - starts)
    if lengths[-1] <= size:
      return self.documents
    rows = []
    for i in range(_SAMPLES):
      place = i * lengths[-1] // _SAMPLES
      which = int(np.searchsorted(lengths, place, 'right'))
      end = int(ends[which])
      start = end - int(lengths[which] - place)
      if start > starts[which]:
        start = self._next_line(start, end)
      stop = self._next_line(min(start + size // _SAMPLES, end), end)
      if stop > start:
        rows.append((start, stop, files[which]))
    return np.array(rows, np.int64)

  def _next_line(self, place, end):
    """Where a line begins, soon after a place; else where a character does."""
    line = self.text.find(b'\n', place, min(place + _LONG_LINE, end))
    if line >= 0:
      return line + 1
    while place < end and self.text[place] & 0xC0 == 0x80:
      place += 1
    return place

  def split(self, fraction):
    """Returns the documents (for training, for validation).

    Whole documents, spread evenly so that validation is like the rest, until
    `fraction` of the text is reached; of a corpus of fewer than
    `MIN_DOCUMENTS`, the tail of the longest one.
    """
    documents = self.documents
    sizes = documents[:, 1] - documents[:, 0]
    wanted = fraction * sizes.sum()
    if len(documents) < MIN_DOCUMENTS:
      return self._cut_tail(int(sizes.argmax()), int(wanted))
    usual = np.flatnonzero(sizes <= max(wanted, np.median(sizes)))
    count, most = 1, len(usual) // 2
    while True:
      chosen = usual[(2 * np.arange(count) + 1) * len(usual) // (2 * count)]
      if sizes[chosen].sum() >= wanted or count == most:
        break
      count = min(most, max(count + 1, count * 21 // 20))
    valid = np.zeros(len(documents), bool)
    valid[chosen] = True
    return documents[~valid], documents[valid]

  def _cut_tail(self, which, size):
    """Makes the last `size` bytes of one document, or fewer, another one."""
    start, end, file = self.documents[which].tolist()
    near = max(end - size, (start + end) // 2)
    words = re.compile(rb'\S')
    cut = self.text.find(b'\n', near - 1, end - 1) + 1
    cut = cut or self.text.rfind(b'\n', start, near) + 1
    while cut and not words.search(self.text, cut, end):  # only blank lines
      cut = self.text.rfind(b'\n', start, cut - 1) + 1
    if cut and words.search(self.text, start, cut):
      train = self.documents.copy()
      train[which, 1] = cut
      return train, np.array([[cut, end, file]])
    raise ValueError(
      f'nothing to validate on: {self.files[file]} has no line break to cut '
      'its tail at; give --valid=FILE.'
    )


def _last_cut(data):
  """Returns where to cut text: after a line that another one follows."""
  at = len(data) - 1
  while (at := data.rfind(b'\n', 1, at)) > 0:
    if not data[at - 1 : at].isspace() and not data[at + 1 : at + 2].isspace():
      return at + 1
  at = data.rfind(b'\n', 0, len(data) - 1) + 1
  if not at:
    at = len(data) - 1
    while data[at] & 0xC0 == 0x80:  # inside of a character
      at -= 1
  return at


class Progress:
  """Bytes done: a bar on a terminal, a line now and then elsewhere."""

  def __init__(self, label, total=None):
    self.label, self.total, self.done = label, total, 0
    self.bar = None
    self.reported = time.monotonic()
    if sys.stderr.isatty():
      import tqdm

      self.bar = tqdm.tqdm(
        desc=label, total=total, unit='B', unit_scale=True, leave=False
      )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self.bar is not None:
      self.bar.close()

  def add(self, count):
    """Says that `count` more bytes are done."""
    self.done += count
    if self.bar is not None:
      self.bar.update(count)
    elif time.monotonic() - self.reported > _REPORT:
      self.reported = time.monotonic()
      of = f' of {self.total / 1e6:.1f}' if self.total else ''
      print(f'{self.label}: {self.done / 1e6:.1f}{of} MB', file=sys.stderr)
