"""Saved against expected arrays: what differs is named, with its fields."""

import jax
import numpy as np
import pytest

from gqa import matching

KEY = ('layer_0', 'attention', 'key', 'kernel')


def leaf(*shape, dtype=np.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_the_same_arrays_match():
  leaves = {KEY: leaf(8, 2, 4)}
  matching.check_match('x', {'params': (leaves, dict(leaves))})


@pytest.mark.parametrize(
  ('saved', 'expected', 'message'),
  [
    (
      {KEY: leaf(8, 2, 4)},
      {KEY: leaf(8, 1, 4)},
      r'params/layer_0/attention/key/kernel: saved float32\[8, 2, 4\], expected '
      r'float32\[8, 1, 4\]. Look at model.num_kv_heads: saved 2, expected 1',
    ),
    (
      {KEY: leaf(8, 2, 4)},
      {KEY: leaf(8, 2, 4), ('head', 'kernel'): leaf(8, 9)},
      'head/kernel: saved nothing.*Look at model.tie_embeddings',
    ),
    (
      {KEY: leaf(8, 2, 4), ('layer_1', *KEY[1:]): leaf(8, 2, 4)},
      {KEY: leaf(8, 2, 4)},
      'expected nothing.*Look at model.num_layers: saved 2, expected 1',
    ),
    (
      {('count',): leaf(dtype=np.int32)},
      {('count',): leaf(dtype=np.float32)},
      r'saved int32\[\], expected float32\[\]',
    ),
  ],
)
def test_a_difference_is_named_with_its_field(saved, expected, message):
  with pytest.raises(ValueError, match=f'x does not fit, 1 arrays.*{message}'):
    matching.check_match('x', {'params': (saved, expected)})


def test_only_half_precision_is_widened():
  half = leaf(3, dtype=jax.numpy.bfloat16)
  assert matching.is_wider(leaf(3), half)
  assert not matching.is_wider(half, leaf(3))
  assert not matching.is_wider(leaf(4), half)
  assert not matching.is_wider(None, half)
