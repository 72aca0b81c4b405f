"""Stop strings: cut a stream of bytes where one of them first ends.

On the host and on bytes, because a stop string may span tokens and a token
may hold half a character. Stop ids are in sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
  """Matcher for the text of one row; the same cut however it is chunked.

  `feed` returns what is safe to show: a tail that may yet become a stop string
  is held back. The first stop string to be complete ends the text, which then
  holds nothing of it; of those that end together, the longest.
  """

  def __init__(self, strings: Sequence[str | bytes]):
    if isinstance(strings, (str, bytes)):
      raise ValueError(
        f'stop strings={strings!r} must be a list of strings; write '
        f'[{strings!r}].'
      )
    self._stops = tuple(
      s.encode() if isinstance(s, str) else bytes(s) for s in strings
    )
    if not all(self._stops):
      raise ValueError(
        f'stop strings={list(strings)!r} must not hold an empty string: it '
        'would stop before the first token; remove it.'
      )
    self._longest = max(map(len, self._stops), default=0)
    self._held = b''
    self.matched: bytes | None = None  # the stop string that ended the text

  @property
  def stopped(self) -> bool:
    """Whether a stop string was found; what is fed after it is dropped."""
    return self.matched is not None

  def feed(self, data: bytes) -> bytes:
    """Takes the next bytes and returns those that are certain to stay."""
    if self.stopped:
      return b''
    text = self._held + data
    ends = []
    for stop in self._stops:
      start = text.find(stop)
      if start >= 0:
        ends.append((start + len(stop), -len(stop), stop))
    if ends:
      end, _, self.matched = min(ends)
      self._held = b''
      return text[: end - len(self.matched)]
    cut = len(text) - self._tail(text)
    self._held = text[cut:]
    return text[:cut]

  def finish(self) -> bytes:
    """Returns what is still held back, at the end of the text."""
    held, self._held = self._held, b''
    return held

  def _tail(self, text: bytes) -> int:
    """Length of the longest tail of text that begins a stop string."""
    for size in range(min(self._longest - 1, len(text)), 0, -1):
      tail = text[-size:]
      if any(stop.startswith(tail) for stop in self._stops):
        return size
    return 0
