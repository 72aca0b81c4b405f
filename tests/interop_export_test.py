"""What may be written, and as which family; the command line."""

import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from interop_samples import (
  ALL,
  LLAMA,
  T,
  apply,
  encode,
  equal_trees,
  export,
  opened,
  tensors_of,
  trained_here,
  workdir_of,
  write,
)

from gqa import checkpoint, generate
from gqa import workdir as workdir_lib
from gqa.interop import example, families, hugging_face

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
  ('fields', 'family'),
  [
    ({}, 'llama'),
    (dict(qkv_bias=True), 'qwen2'),
    (dict(qk_norm=True), 'qwen3'),
    (dict(sliding_window=4), 'mistral'),
    (dict(embed_dim=10), 'mistral'),  # 6 heads do not divide it
    (dict(mlp='geglu', norm_offset=True, embed_scale=True), 'gemma'),
  ],
)
def test_a_model_is_written_as_the_first_family_with_its_features(
  fields, family
):
  kind, written = families.write_config(trained_here(**fields))
  assert (kind, written['model_type']) == (family, family)


@pytest.mark.parametrize(
  ('config', 'options', 'message'),
  [
    (
      trained_here(num_kv_heads=(6,)),
      dict(family='qwen3'),
      'qwen3: it has no qk_norm=False',
    ),
    (
      trained_here(num_layers=2, num_kv_heads=(6, 2)),
      {},
      r'num_kv_heads=\(6, 2\) differ between layers',
    ),
    (trained_here(logit_softcap=3.0), {}, 'llama: it has no logit_softcap=3.0'),
    (
      trained_here(
        position='learned',
        norm='layernorm',
        mlp='gelu',
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_dim=2,
      ),
      dict(preferred='gpt2'),
      'gpt2: it has no num_kv_heads=2.*but 6.*llama: .*no other family.*'
      '--repeat_kv_heads writes',
    ),
    (
      trained_here(
        norm='layernorm',
        mlp='gelu',
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_dim=2,
        parallel_residual=True,
      ),
      dict(preferred='gpt_neox'),
      "gpt_neox: it has no num_kv_heads=2.*; llama: it has no mlp='gelu'",
    ),
    (trained_here(), dict(family='bert'), "family='bert' is not known"),
  ],
)
def test_a_model_that_cannot_be_said_exactly_is_not_exported(
  config, options, message
):
  with pytest.raises(ValueError, match=message):
    families.write_config(config, **options)


def test_a_converted_model_keeps_its_family_and_says_its_kv_heads(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  hugging_face.import_directory(source, str(tmp_path / '1'))
  config, params = opened(str(tmp_path / '1'))
  for layer in ('layer_0', 'layer_1'):
    for name in ('key', 'value'):
      leaf = params[layer]['attention'][name]
      leaf['kernel'] = leaf['kernel'].mean(axis=1, keepdims=True)
  fewer = dataclasses.replace(config, num_kv_heads=1)
  (tmp_path / '2').mkdir()
  checkpoint.save_params(tmp_path / '2', params, {})
  run = workdir_lib.load_config(tmp_path / '1')
  workdir_lib.save_config(tmp_path / '2', run | {'model': fewer.to_dict()})
  export(str(tmp_path / '2'), str(tmp_path / 'back'))
  hugging_face.import_directory(str(tmp_path / 'back'), str(tmp_path / '3'))
  again, same = opened(str(tmp_path / '3'))
  assert again == fewer
  equal_trees(params, same)


@pytest.mark.parametrize('name', ['gpt2', 'olmo2'])
def test_repeated_kv_heads_are_the_same_model(name, tmp_path):
  _, config = families.read_config(ALL[name])
  heads = (1, config.num_heads // 2)
  config = dataclasses.replace(config, num_kv_heads=heads)
  source = workdir_of(config, tmp_path / '1')
  with pytest.raises(ValueError, match='--repeat_kv_heads writes'):
    export(source, str(tmp_path / 'hf'))
  assert export(source, str(tmp_path / 'hf'), repeat_kv_heads=True) == name
  hugging_face.import_directory(str(tmp_path / 'hf'), str(tmp_path / '2'))
  again, params = opened(str(tmp_path / '2'))
  assert again.kv_heads == (config.num_heads,) * 2
  tokens = np.arange(T, dtype=np.int32)[None]
  expected = apply(*opened(source), tokens)
  assert expected.std() > 0.3
  np.testing.assert_allclose(apply(again, params, tokens), expected, atol=1e-5)


@pytest.mark.parametrize('family', example.CONFIGS)
def test_an_example_goes_in_and_comes_out_to_the_byte(family, tmp_path):
  first, run, back = (str(tmp_path / name) for name in ('x', 'run', 'back'))
  example.write_example(family, first)
  hugging_face.import_directory(first, run)
  if family in ('gpt2', 'gpt_neox'):
    (text,) = generate.generate_text(run, 'a', max_new_tokens=1, top_k=9)
    assert isinstance(text, str)
  assert export(run, back) == family
  names = sorted(p.name for p in pathlib.Path(first).iterdir())
  assert 'tokenizer.json' in names
  for name in names:
    one, two = (pathlib.Path(d, name).read_bytes() for d in (first, back))
    assert one == two, name


def test_every_family_has_an_example():
  assert set(example.CONFIGS) == set(families.FAMILIES)
  with pytest.raises(ValueError, match="family='bert' has no example"):
    example.write_example('bert', 'x')


def test_a_target_that_holds_something_is_left_alone(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  target = tmp_path / 'empty'
  target.mkdir()
  hugging_face.import_directory(source, str(target))
  for verb, start in (
    (hugging_face.import_directory, source),
    (export, str(target)),
  ):
    with pytest.raises(ValueError, match='exists and is not empty'):
      verb(start, str(target))
  assert opened(str(target))[0].num_heads == 6


# The command line.


def run(*arguments):
  code = (
    'import runpy, sys; sys.argv = sys.argv[1:]\n'
    'try: runpy.run_module("gqa.interop", run_name="__main__")\n'
    'finally: print("torch" in sys.modules, file=sys.stderr)'
  )
  return subprocess.run(
    [sys.executable, '-c', code, 'gqa.interop', *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_the_command_imports_without_torch_and_says_what_is_missing(tmp_path):
  source = write(tmp_path / 'x', LLAMA, tensors_of(LLAMA))
  done = run('import', f'--source={source}', f'--target={tmp_path / "run"}')
  assert done.returncode == 0, done.stderr
  assert '2 layers of 6 query and 2 KV heads' in done.stdout
  assert 'has no tokenizer.json' in done.stdout
  assert done.stderr.rstrip().endswith('False')
  opened(str(tmp_path / 'run'))


def test_a_failure_is_one_line(tmp_path):
  (tmp_path / 'config.json').write_text('{"model_type": "mamba"}')
  (tmp_path / 'model.safetensors').write_bytes(encode({}))
  done = run('import', f'--source={tmp_path}', '--target=x')
  assert done.returncode == 1
  lines = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(lines) == 1 and "model_type='mamba'" in lines[0]
  assert not (ROOT / 'x').exists()
  done = run('example', '--target=x')
  assert done.returncode == 1
  assert 'error: --family must be given' in done.stderr
