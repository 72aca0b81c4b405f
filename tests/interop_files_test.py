"""Files of strangers: read to the byte, or refused before they cost anything."""

import json
import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_samples import encode, gguf_file, with_header

from gqa.interop import tensor_file
from gqa.interop.directory import Directory


def entry(dtype='F32', shape=(2,), offsets=(0, 8), **more):
  return {
    'dtype': dtype,
    'shape': list(shape),
    'data_offsets': list(offsets),
  } | more


@pytest.fixture(scope='module')
def scratch(tmp_path_factory):
  """A file to write over and over."""
  return tmp_path_factory.mktemp('scratch') / 'file'


EXAMPLE = {
  'a': np.arange(6, dtype=np.float32).reshape(2, 3),
  'empty': np.zeros((0, 4), np.float32),
  'half': np.array([1.5, -2], np.float16),
  'odd': np.arange(3, dtype=np.uint8),
  'unaligned': np.array([[0.1]], np.float32),
  'scalar': np.array(7, np.float32),
}


def test_mixed_types_are_read_bit_for_bit(tmp_path):
  path = tmp_path / 'x.safetensors'
  path.write_bytes(encode(EXAMPLE, {'format': 'pt'}))
  header = tensor_file.read_header(path)
  assert set(header) == set(EXAMPLE)
  for name, array in EXAMPLE.items():
    read = tensor_file.read_tensor(path, header[name])
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_bfloat16_bits_are_their_numbers(tmp_path):
  path = tmp_path / 'x.safetensors'
  bits = np.array([0x3F80, 0xC049], np.uint16).view(ml_dtypes.bfloat16)
  path.write_bytes(encode({'x': bits}))
  read = tensor_file.read_tensor(path, tensor_file.read_header(path)['x'])
  assert np.array(read, np.float32).tolist() == [1.0, -3.140625]


def test_what_is_written_is_read_by_us_and_by_the_format_s_own_package(
  tmp_path,
):
  safetensors = pytest.importorskip('safetensors.numpy')
  path = tmp_path / 'x.safetensors'
  tensor_file.write_file(
    path,
    {name: (array.dtype, array.shape) for name, array in EXAMPLE.items()},
    EXAMPLE.__getitem__,
  )
  theirs = safetensors.load_file(path)
  header = tensor_file.read_header(path)
  for name, array in EXAMPLE.items():
    np.testing.assert_array_equal(theirs[name], array)
    ours = tensor_file.read_tensor(path, header[name])
    np.testing.assert_array_equal(ours, array)


BROKEN = {
  'no bytes': (b'', 'it has 0 bytes'),
  'a header longer than the file': (
    struct.pack('<Q', 1 << 20),
    'a header of 1048576 bytes exceeds the 8 of the file',
  ),
  'a header of 2^63 bytes': (struct.pack('<Q', 1 << 63), 'is above 16777216'),
  'no JSON': (with_header(b'{'), 'the header is not JSON'),
  'no UTF-8': (with_header(b'"\xff"'), 'the header is not JSON'),
  'nested too deep': (with_header(b'[' * 100_000), 'the header is not JSON'),
  'a list': (with_header(b'[]'), 'the header is no JSON object'),
  'a name twice': (
    with_header(b'{"x": 1, "x": 2}'),
    "'x' is there twice",
  ),
  'no entry': (with_header(b'{"x": 3}'), "'x' must have dtype, shape"),
  'an unknown type': (
    with_header(json.dumps({'x': entry('F31')}).encode(), bytes(8)),
    "the dtype 'F31', which is unknown",
  ),
  'another field': (
    with_header(json.dumps({'x': entry(strides=[1])}).encode(), bytes(8)),
    "'x' must have dtype, shape and data_offsets only",
  ),
  'a negative size': (
    with_header(json.dumps({'x': entry(shape=(-2,))}).encode(), bytes(8)),
    r"the shape of 'x' is \[-2\]",
  ),
  'a size that is no int': (
    with_header(json.dumps({'x': entry(shape=(2.0,))}).encode(), bytes(8)),
    r"the shape of 'x' is \[2.0\]",
  ),
  'a bool as a size': (
    with_header(json.dumps({'x': entry(shape=(True, 2))}).encode(), bytes(8)),
    r"the shape of 'x' is \[True, 2\]",
  ),
  'a shape of more bytes than its data': (
    with_header(
      json.dumps({'x': entry(shape=(1 << 40, 1 << 40))}).encode(), bytes(8)
    ),
    "'x' has 8 bytes, but",
  ),
  'offsets the wrong way': (
    with_header(json.dumps({'x': entry(offsets=(8, 0))}).encode(), bytes(8)),
    r"the data_offsets of 'x' are \[8, 0\]",
  ),
  'the end cut off': (
    encode(EXAMPLE)[:-1],
    'after the end of the file at .*: was it cut off',
  ),
  'tensors on top of each other': (
    with_header(
      json.dumps({'x': entry(), 'y': entry(offsets=(4, 12))}).encode(),
      bytes(12),
    ),
    "'y' begins at byte",
  ),
  'a hole': (
    with_header(
      json.dumps({'x': entry(), 'y': entry(offsets=(9, 17))}).encode(),
      bytes(17),
    ),
    "'y' begins at byte",
  ),
  'bytes of no tensor': (encode(EXAMPLE) + b'x', 'the tensors end at byte'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_header_is_refused_with_its_reason(name, tmp_path):
  content, reason = BROKEN[name]
  path = tmp_path / 'x.safetensors'
  path.write_bytes(content)
  with pytest.raises(
    ValueError, match=f'no valid safetensors file: .*{reason}'
  ):
    tensor_file.read_header(path)


def read_within(path, limit):
  """Reads a file; it must not allocate more than `limit` bytes."""
  tracemalloc.start()
  try:
    header = tensor_file.read_header(path)
    assert sum(info.size for info in header.values()) <= os.path.getsize(path)
    for info in header.values():
      tensor_file.read_tensor(path, info).sum()
  except ValueError as error:
    assert str(path) in str(error)
  finally:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  assert peak < limit


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_is_our_error_and_costs_no_memory(scratch, data):
  content = bytearray(encode(EXAMPLE))
  length = struct.unpack('<Q', content[:8])[0]
  for _ in range(data.draw(st.integers(0, 4))):
    at = data.draw(st.integers(0, 8 + length - 1))
    content[at] = data.draw(st.integers(0, 255))
  content = content[: data.draw(st.integers(0, len(content)))]
  scratch.write_bytes(content)
  read_within(scratch, 1 << 20)


numbers = st.integers(-5, 1 << 70) | st.floats() | st.none() | st.text()
values = st.recursive(numbers | st.booleans(), st.lists, max_leaves=5)
entries = st.fixed_dictionaries(
  {
    'dtype': st.sampled_from([*tensor_file.DTYPES, 'F128', 3]),
    'shape': st.lists(st.integers(0, 4), max_size=3) | values,
    'data_offsets': st.lists(st.integers(0, 40), min_size=2, max_size=2)
    | values,
  }
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), entries | values, max_size=4), st.binary())
def test_any_header_is_read_or_refused(scratch, header, content):
  scratch.write_bytes(with_header(json.dumps(header).encode(), content))
  read_within(scratch, 1 << 20)


# Directories.


@pytest.fixture
def model(tmp_path):
  """A directory of one shard and what lies outside of it."""
  (tmp_path / 'outside.safetensors').write_bytes(encode(EXAMPLE))
  directory = tmp_path / 'model'
  directory.mkdir()
  (directory / 'config.json').write_text('{}')
  (directory / 'model.safetensors').write_bytes(encode(EXAMPLE))
  return directory


def shard(directory, weight_map):
  (directory / 'model.safetensors').unlink()
  (directory / 'model.safetensors.index.json').write_text(
    json.dumps({'metadata': {}, 'weight_map': weight_map})
  )


def test_shards_are_read_by_their_index(model):
  shard(model, {'x': 'one.safetensors', 'y': 'two.safetensors'})
  one, two = np.ones(2, np.float32), np.ones(3, np.float16)
  (model / 'one.safetensors').write_bytes(encode({'x': one}))
  (model / 'two.safetensors').write_bytes(encode({'y': two}))
  opened = Directory(model)
  np.testing.assert_array_equal(opened.read('x'), one)
  np.testing.assert_array_equal(opened.read('y'), two)


@pytest.mark.parametrize(
  'name',
  ['../outside.safetensors', '{outside}', '..', 'a/../../outside.safetensors'],
)
def test_an_index_that_leads_out_of_the_directory_is_refused(name, model):
  name = name.format(outside=model.parent / 'outside.safetensors')
  shard(model, dict.fromkeys(EXAMPLE, name))
  with pytest.raises(ValueError, match='outside of itself'):
    Directory(model)


@pytest.mark.parametrize(
  'file', ['config.json', 'model.safetensors', 'model.safetensors.index.json']
)
def test_a_link_out_of_the_directory_is_refused(file, model):
  if file.endswith('index.json'):
    (model / 'model.safetensors').unlink()
  else:
    (model / file).unlink()
  (model / file).symlink_to(model.parent / 'outside.safetensors')
  with pytest.raises(ValueError, match='link that leads out.*cp -rL'):
    Directory(model)


def test_a_pipe_in_place_of_a_file_does_not_hang(model):
  (model / 'model.safetensors').unlink()
  os.mkfifo(model / 'model.safetensors')
  with pytest.raises(ValueError, match='is no plain file'):
    Directory(model)


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pth'])
def test_pickles_are_refused_with_a_way_out(name, model):
  (model / 'model.safetensors').rename(model / name)
  with pytest.raises(
    ValueError, match=f'only {name}.*run code.*save_pretrained'
  ):
    Directory(model)


@pytest.mark.parametrize(
  ('weight_map', 'message'),
  [
    ({'x': 'gone.safetensors'}, 'names gone.safetensors, which is missing'),
    ({'x': 'config.json'}, 'config.json, which is no safetensors file'),
    ({}, 'has no weight_map'),
    ({'x': 3}, "gives 'x' no file"),
    ({'x': 'one.safetensors', 'z': 'one.safetensors'}, "'z' is in .*, but not"),
    ({'w': 'one.safetensors'}, 'is in .*, but not in'),
  ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
  weight_map, message, model
):
  shard(model, weight_map)
  (model / 'one.safetensors').write_bytes(encode({'x': np.ones(2, np.float32)}))
  with pytest.raises(ValueError, match=message):
    Directory(model)


@pytest.mark.parametrize('content', ['[]', 'x', '{"a": ' * 10_000, '"\\ud800'])
def test_a_config_that_is_no_json_object_is_refused(content, model):
  (model / 'config.json').write_text(content)
  with pytest.raises(ValueError, match=r'config\.json is (no JSON|not JSON)'):
    Directory(model)


def test_a_directory_without_a_model_is_named(tmp_path):
  with pytest.raises(ValueError, match='has no config.json'):
    Directory(tmp_path)
  with pytest.raises(ValueError, match='is not a directory'):
    Directory(tmp_path / 'nowhere')
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(ValueError, match='has neither model.safetensors nor'):
    Directory(tmp_path)


# GGUF files.


PAIRS = [
  ('a', 4, struct.pack('<I', 7)),
  ('b', 8, struct.pack('<Q', 2) + b'hi'),
  ('c', 9, struct.pack('<IQ', 5, 2) + struct.pack('<ii', -1, 5)),
  ('d', 9, struct.pack('<IQQ', 8, 1, 1) + b'x'),
]
TENSORS = [
  ('t', (2, 3), 0, np.arange(6, dtype=np.float32).tobytes()),
  ('u', (2,), 1, np.array([1.5, 2], np.float16).tobytes()),
]


@pytest.fixture(scope='module')
def gguf_lib():
  pytest.importorskip('gguf')
  from gqa.interop import gguf_file as lib

  return lib


def test_a_gguf_file_is_read_by_its_description(gguf_lib, tmp_path):
  (tmp_path / 'x.gguf').write_bytes(gguf_file(PAIRS, TENSORS))
  opened = gguf_lib.GgufFile(tmp_path / 'x.gguf')
  assert opened.values == {'a': 7, 'b': 'hi', 'c': [-1, 5], 'd': ['x']}
  np.testing.assert_array_equal(opened.read('t'), np.arange(6.0).reshape(2, 3))
  np.testing.assert_array_equal(opened.read('u'), [1.5, 2])


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'exceed the 0'),
    (b'GGML' + bytes(40), 'does not begin with GGUF'),
    (b'GGUF' + struct.pack('<I', 9) + bytes(40), 'version 9'),
    (gguf_file([], counts=(1 << 60, 0)), 'entries at byte .* are too many'),
    (gguf_file([], counts=(0, 1 << 60)), 'entries at byte .* are too many'),
    # An endless list of numbers, of which none is there.
    (
      gguf_file([('c', 9, struct.pack('<IQ', 4, 1 << 62))]),
      'are too many',
    ),
    (gguf_file([('c', 9, struct.pack('<IQ', 99, 1))]), 'of the type 99'),
    (gguf_file([('b', 8, struct.pack('<Q', 1) + b'\xff')]), 'not UTF-8'),
    (gguf_file([PAIRS[0]] * 2), "'a' is there twice"),
    (gguf_file(PAIRS, [TENSORS[0]] * 2), "'t' is there twice"),
    (gguf_file(PAIRS, TENSORS)[:-40], 'after the end of the file'),
    (gguf_file(PAIRS, [('t', (2,), 77, b'')]), 'of the type 77'),
    (gguf_file(PAIRS, [('t', (31,), 8, b'')]), 'no multiple of blocks of 32'),
    (gguf_file(PAIRS, [('t', (1,) * 9, 0, b'')]), 'has 9 axes'),
    (gguf_file(PAIRS, [('t', (0, 2), 0, b'')]), 'no multiple of blocks'),
    (
      gguf_file([('general.alignment', 4, struct.pack('<I', 3))], TENSORS),
      'general.alignment is 3',
    ),
  ],
)
def test_a_broken_gguf_file_is_refused_with_its_reason(
  content, message, gguf_lib, tmp_path
):
  (tmp_path / 'x.gguf').write_bytes(content)
  with pytest.raises(ValueError, match=f'no valid GGUF file: .*{message}'):
    gguf_lib.GgufFile(tmp_path / 'x.gguf')


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_of_a_gguf_file_is_our_error(gguf_lib, scratch, data):
  content = bytearray(gguf_file(PAIRS, TENSORS))
  for _ in range(data.draw(st.integers(0, 4))):
    at = data.draw(st.integers(4, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
  content = content[: data.draw(st.integers(0, len(content)))]
  scratch.write_bytes(content)
  tracemalloc.start()
  try:
    opened = gguf_lib.GgufFile(scratch)
    for name in opened.tensors:
      opened.read(name)
  except ValueError:
    pass
  finally:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  assert peak < 1 << 20
