"""Imports run one way; the table is the design."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'gqa'

# Module -> the modules of the package that it may import. A folder is one.
ALLOWED = {
  '__init__': set(),
  'attention': {'blockwise', 'scores'},
  'benchmark': {
    'cells',
    'cli',
    'limits',
    'measure',
    'results',
    'runtime',
    'workers',
  },
  'blockwise': {'linear', 'scores'},
  'cache': set(),
  'cached_attention': {'attention', 'blockwise', 'cache', 'scores'},
  'cells': {'cache', 'config', 'cost', 'devices', 'roofline'},
  'checkpoint': {'config', 'matching', 'model', 'sharding', 'workdir'},
  'claims': {'cost', 'devices', 'presets', 'roofline'},
  'cli': set(),
  'config': set(),
  'convert': {
    'checkpoint',
    'cli',
    'config',
    'cost',
    'data',
    'evaluate',
    'loss',
    'metrics',
    'model',
    'peaks',
    'progress',
    'runtime',
    'sharding',
    'tokenizer',
    'workdir',
  },
  'cost': {'config'},
  'data': {'cli', 'prepare', 'text', 'tokenizer'},
  'decode': {'cache', 'config', 'model', 'sampling'},
  'devices': set(),
  'evaluate': {
    'checkpoint',
    'cli',
    'config',
    'data',
    'loss',
    'model',
    'runtime',
    'sharding',
    'tokenizer',
    'workdir',
  },
  'experiment': {'cli', 'launch', 'points'},
  'generate': {
    'cache',
    'checkpoint',
    'cli',
    'config',
    'decode',
    'model',
    'runtime',
    'sampling',
    'sharding',
    'stopping',
    'tokenizer',
    'workdir',
  },
  'interop': {
    'checkpoint',
    'cli',
    'config',
    'rope',
    'tokenizer',
    'workdir',
  },
  'launch': {'cli', 'points', 'tables'},
  'limits': {'peaks'},
  'linear': set(),
  'loss': {'linear'},
  'matching': set(),
  'measure': {
    'cache',
    'cells',
    'config',
    'decode',
    'limits',
    'model',
    'sampling',
  },
  'metrics': set(),
  'mixing': {'config'},
  'model': {
    'attention',
    'cache',
    'cached_attention',
    'config',
    'linear',
    'rope',
    'sharding',
  },
  'optim': set(),
  'origin': {'checkpoint', 'config', 'loss', 'mixing', 'model', 'workdir'},
  'peaks': {'devices'},
  'plan': {
    'claims',
    'cli',
    'config',
    'cost',
    'devices',
    'plan_text',
    'presets',
    'relatives',
    'roofline',
  },
  'plan_text': {'tables'},
  'points': set(),
  'preemption': set(),
  'prepare': {'text', 'tokenizer'},
  'presets': {'config', 'cost'},
  'profiling': set(),
  'progress': set(),
  'relatives': {'config', 'cost', 'devices', 'roofline'},
  'report': {
    'cells',
    'claims',
    'cli',
    'config',
    'cost',
    'devices',
    'launch',
    'metrics',
    'results',
    'roofline',
    'tables',
  },
  'results': {'cells', 'metrics', 'tables'},
  'roofline': {'cost', 'devices'},
  'runtime': {'sharding'},
  'rope': set(),
  'run': {
    'checkpoint',
    'config',
    'cost',
    'data',
    'evaluate',
    'metrics',
    'model',
    'optim',
    'origin',
    'peaks',
    'points',
    'profiling',
    'progress',
    'runtime',
    'sharding',
    'update',
    'uptrain',
    'workdir',
  },
  'sampling': set(),
  'scores': set(),
  'sharding': set(),
  'stopping': set(),
  'sweep': {'cli', 'experiment', 'launch', 'runtime', 'sweep_checks'},
  'sweep_checks': {
    'cells',
    'cli',
    'config',
    'convert',
    'data',
    'evaluate',
    'experiment',
    'launch',
    'optim',
    'points',
    'run',
    'uptrain',
  },
  'tables': set(),
  'text': set(),
  'tokenizer': set(),
  'train': {'cli', 'preemption', 'profiling', 'run', 'runtime'},
  'update': {
    'config',
    'loss',
    'mixing',
    'model',
    'optim',
    'origin',
    'sharding',
  },
  'uptrain': {'checkpoint', 'config', 'tokenizer', 'workdir'},
  'workdir': {'points'},
  'workers': {'cells'},
}
# Not even inside of functions.
FOREIGN = {'configs', 'experiments', 'scripts', 'tests', 'tensorflow', 'torch'}
MODULES = sorted(
  path.stem
  for path in PACKAGE.iterdir()
  if path.suffix == '.py' or (path / '__init__.py').exists()
)


def imports(source):
  """Returns the dotted names that a source imports, anywhere in it."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      if base == 'gqa':
        names |= {f'gqa.{alias.name}' for alias in node.names}
      else:
        names.add(base)
  return names


def imports_of(module):
  path = PACKAGE / module
  files = path.rglob('*.py') if path.is_dir() else [path.with_suffix('.py')]
  names = set()
  for file in files:
    names |= imports(file.read_text(encoding='utf-8'))
  own = f'gqa.{module}'
  return {n for n in names if n != own and not n.startswith(f'{own}.')}


def inner(names):
  """The modules of the package among dotted names."""
  return {name.split('.')[1] for name in names if name.startswith('gqa.')}


def roots(names):
  return {name.partition('.')[0] for name in names}


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('import jax.numpy as jnp, os', {'jax.numpy', 'os'}),
    ('from gqa import text, data as d', {'gqa.text', 'gqa.data'}),
    ('from gqa.config import ModelConfig', {'gqa.config'}),
    ('def f():\n  if x:\n    import torch', {'torch'}),
    ('from . import text', {'.'}),
    ('from .text import f', {'.text'}),
  ],
)
def test_every_form_of_import_is_seen(source, expected):
  assert imports(source) == expected


def test_every_module_has_its_place_in_the_table():
  assert set(ALLOWED) == set(MODULES)


@pytest.mark.parametrize('module', MODULES)
def test_modules_import_only_what_lies_below(module):
  names = imports_of(module)
  relative = {name for name in names if name.startswith('.')}
  assert not relative, 'write from gqa import ...'
  extra = inner(names) - ALLOWED.get(module, set())
  assert not extra, f'{module} may not import {sorted(extra)}'


def test_the_table_has_no_cycle():
  done = set()
  while len(done) < len(ALLOWED):
    ready = {m for m in ALLOWED if m not in done and ALLOWED[m] <= done}
    assert ready, f'a cycle among {sorted(set(ALLOWED) - done)}'
    done |= ready


def test_the_table_allows_nothing_that_is_not_used():
  for module in ALLOWED:
    assert ALLOWED[module] <= inner(imports_of(module)), module


@pytest.mark.parametrize('module', MODULES)
def test_the_package_imports_neither_configs_nor_another_framework(module):
  assert not roots(imports_of(module)) & FOREIGN


@pytest.mark.parametrize(
  'module',
  ['attention', 'cache', 'cached_attention', 'linear', 'loss', 'sharding'],
)
def test_arithmetic_needs_jax_only(module):
  allowed = {'gqa', 'jax', 'numpy'} | sys.stdlib_module_names
  if module in ('attention', 'cache', 'cached_attention'):
    allowed.remove('numpy')
  if module == 'cache':
    allowed.add('flax')
  assert roots(imports_of(module)) <= allowed
