import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqa.stopping import StopStrings


def run(stops, chunks):
  matcher = StopStrings(stops)
  shown = b''.join([matcher.feed(chunk) for chunk in chunks])
  return shown + matcher.finish(), matcher.matched


def reference(stops, text):
  """Cuts where a stop string first ends, byte by byte."""
  for end in range(1, len(text) + 1):
    hits = [stop for stop in stops if text[:end].endswith(stop)]
    if hits:
      longest = max(hits, key=len)
      return text[: end - len(longest)], longest
  return text, None


def test_a_stop_string_that_spans_tokens_is_cut_whole():
  matcher = StopStrings(['\nUser:'])
  assert matcher.feed(b'Hello\nUs') == b'Hello'
  assert matcher.feed(b'er') == b''
  assert matcher.feed(b': hi') == b''
  assert matcher.stopped and matcher.matched == b'\nUser:'
  assert matcher.feed(b'more') == b'' and matcher.finish() == b''


def test_what_turns_out_not_to_be_a_stop_string_is_shown():
  matcher = StopStrings(['###'])
  assert matcher.feed(b'a##') == b'a'
  assert matcher.feed(b'b#') == b'##b'
  assert matcher.finish() == b'#'
  assert not matcher.stopped


def test_only_the_possible_beginning_is_held_back():
  matcher = StopStrings(['aab'])
  assert [matcher.feed(b'a') for _ in range(4)] == [b'', b'', b'a', b'a']


def test_half_a_character_may_be_fed():
  data = 'né→'.encode()
  pieces = [bytes([byte]) for byte in data]
  assert run(['→'], pieces) == ('né'.encode(), '→'.encode())


@given(
  st.lists(st.text('ab', min_size=1, max_size=4), max_size=3),
  st.lists(st.text('ab', max_size=4), max_size=8),
)
def test_the_cut_does_not_depend_on_the_chunks(stops, chunks):
  stops = [stop.encode() for stop in stops]
  chunks = [chunk.encode() for chunk in chunks]
  text = b''.join(chunks)
  assert run(stops, chunks) == reference(stops, text)
  assert run(stops, [text]) == reference(stops, text)


@pytest.mark.parametrize('stops', [[''], ['a', ''], 'abc'])
def test_empty_strings_and_a_bare_string_are_refused(stops):
  with pytest.raises(ValueError, match='stop strings'):
    StopStrings(stops)
