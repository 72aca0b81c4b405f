"""Tensors of every family become parameters, and go back bit for bit."""

import pathlib
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from interop_samples import (
  ALL,
  GPT2,
  LLAMA,
  OTHERS,
  equal_trees,
  export,
  opened,
  tensors_of,
  write,
)

from gqa import checkpoint, model, sharding
from gqa.interop import directory, families, hugging_face, weights
from gqa.interop.directory import Directory
from gqa.interop.layout import Tensor

HALF = ('qwen2', 'gpt2', 'gpt_neox', 'gemma2')  # layouts of their own


@pytest.mark.parametrize(
  ('name', 'dtype'),
  [(name, 'float32') for name in ALL] + [(name, 'bfloat16') for name in HALF],
)
def test_import_export_import_changes_no_bit(
  name, dtype, tmp_path, monkeypatch
):
  tensors = tensors_of(ALL[name])
  if dtype == 'bfloat16':
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}
    monkeypatch.setattr(directory, 'MAX_SHARD', 1000)
  source = write(tmp_path / 'source', ALL[name], tensors)
  first, back, second = (str(tmp_path / n) for n in ('1', 'back', '2'))
  hugging_face.import_directory(source, first)
  assert export(first, back, dtype=dtype) == ALL[name]['model_type']
  exported = Directory(back)
  assert set(exported.tensors) == set(tensors)
  for n, x in tensors.items():
    np.testing.assert_array_equal(exported.read(n), x)
    assert exported.tensors[n].dtype == x.dtype
  hugging_face.import_directory(back, second)
  (config, params), (again, same) = opened(first), opened(second)
  assert again == config
  equal_trees(params, same)
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
  if dtype == 'bfloat16':
    assert len(list(pathlib.Path(back).glob('*.safetensors'))) > 1


@pytest.mark.parametrize('name', ALL)
def test_the_tensors_of_a_family_are_the_parameters_of_the_model(name):
  kind, config = families.read_config(ALL[name])
  shapes = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
  found = {}
  for tensor in families.FAMILIES[kind].tensors(config):
    parts = tensor.split(np.zeros(tensor.shape, np.int8))
    for path, part in zip(tensor.paths, parts, strict=True):
      assert path not in found
      found[path] = part.shape
  paths = jax.tree_util.tree_leaves_with_path(shapes)
  assert found == {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in paths
  }


def test_values_of_one_head_stay_together_in_the_fused_tensor():
  _, config = families.read_config(OTHERS['gpt_neox'])
  fused: Tensor = next(
    t
    for t in families.FAMILIES['gpt_neox'].tensors(config)
    if t.name.endswith('0.attention.query_key_value.weight')
  )
  rows = np.arange(72)[:, None] * 100 + np.arange(24)
  query, key, value = fused.split(rows)
  # Head 1 has rows 24 to 47: its query first, then its key, then its value.
  np.testing.assert_array_equal(query[:, 1], rows[24:32].T)
  np.testing.assert_array_equal(key[:, 1], rows[32:40].T)
  np.testing.assert_array_equal(value[:, 1], rows[40:48].T)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'model.layers.1.mlp.up_proj.weight': None},
      r'missing: model\.layers\.1\.mlp\.up_proj\.weight',
    ),
    (
      {'model.layers.0.self_attn.q_proj.bias': np.ones(24, np.float32)},
      r'unexpected: model\.layers\.0\.self_attn\.q_proj\.bias',
    ),
    (
      {'model.norm.weight': np.ones(13, np.float32)},
      r'model\.norm\.weight has shape \[13\], but config\.json makes it \[12\]',
    ),
    (
      {'model.norm.weight': np.ones(12, np.uint8)},
      r'model\.norm\.weight is of type uint8, not one of float32',
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named_and_leave_no_target(
  change, message, tmp_path
):
  tensors = tensors_of(LLAMA) | change
  tensors = {n: x for n, x in tensors.items() if x is not None}
  source = write(tmp_path / 'x', LLAMA, tensors)
  with pytest.raises(ValueError, match=message):
    hugging_face.import_directory(source, str(tmp_path / 'imported'))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


def test_names_of_other_versions_and_dead_buffers_are_understood(tmp_path):
  tensors = tensors_of(GPT2)
  hugging_face.import_directory(
    write(tmp_path / 'x', GPT2, tensors), str(tmp_path / '1')
  )
  others = {n.removeprefix('transformer.'): x for n, x in tensors.items()}
  others['h.0.attn.bias'] = np.ones((1, 1, 16, 16), np.uint8)
  others['lm_head.weight'] = tensors['transformer.wte.weight']
  hugging_face.import_directory(
    write(tmp_path / 'y', GPT2, others), str(tmp_path / '2')
  )
  equal_trees(opened(str(tmp_path / '1'))[1], opened(str(tmp_path / '2'))[1])
  others['lm_head.weight'] = -tensors['transformer.wte.weight']
  with pytest.raises(ValueError, match='ties the embeddings, but lm_head'):
    hugging_face.import_directory(
      write(tmp_path / 'y', GPT2, others), str(tmp_path / '3')
    )


@pytest.mark.parametrize('prefix', ['language_model.', 'model.language_model.'])
def test_the_text_part_of_a_gemma_that_sees_is_imported(prefix, tmp_path):
  inner = OTHERS['gemma3_text']
  tensors = tensors_of(inner)
  outer = {'vision_tower.x.weight': np.ones(2, np.float32)}
  for name, x in tensors.items():
    bare = name.removeprefix('model.') if 'model.l' in prefix else name
    outer[prefix + bare] = x
  config = {'model_type': 'gemma3', 'text_config': inner, 'vision_config': {}}
  hugging_face.import_directory(
    write(tmp_path / 'x', inner, tensors), str(tmp_path / '1')
  )
  hugging_face.import_directory(
    write(tmp_path / 'y', config, outer), str(tmp_path / '2')
  )
  (one, params), (two, same) = (opened(str(tmp_path / n)) for n in '12')
  assert one == two
  equal_trees(params, same)


def test_half_precision_is_kept_on_disk_and_widened_without_loss(tmp_path):
  tensors = {
    n: x.astype(ml_dtypes.bfloat16) for n, x in tensors_of(LLAMA).items()
  }
  source = write(tmp_path / 'x', LLAMA, tensors)
  whole, half = str(tmp_path / 'whole'), str(tmp_path / 'half')
  hugging_face.import_directory(source, whole)
  hugging_face.import_directory(source, half, 'bfloat16')
  config, params = opened(half)
  assert config.dtype == 'bfloat16'
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {'bfloat16'}
  mesh = sharding.make_mesh(
    type('Sizes', (), dict(data=1, fsdp=1, model=1)), jax.devices()[:1]
  )
  widened, _ = checkpoint.load_on_mesh(half, 'latest', config, mesh)
  equal_trees(jax.tree.map(np.asarray, widened), opened(whole)[1])


def test_memory_while_reading_is_that_of_the_parameters(tmp_path):
  config = LLAMA | dict(
    hidden_size=192, intermediate_size=768, num_hidden_layers=6
  )
  tensors = {
    n: x.astype(ml_dtypes.bfloat16) for n, x in tensors_of(config).items()
  }
  kind, ours = families.read_config(config)
  source = Directory(write(tmp_path / 'x', config, tensors))
  size = 4 * sum(x.size for x in tensors.values())
  del tensors
  tracemalloc.start()
  params = weights.load(families.FAMILIES[kind], ours, source, 'float32')
  kept, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert sum(x.nbytes for x in jax.tree.leaves(params)) == size > 8e6
  assert peak < 1.2 * size
  # Besides what is kept (by jax itself, or as arrays of numpy).
  assert peak - kept < 0.4 * size
