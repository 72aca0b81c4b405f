"""Properties of command lines: one clear line for each mistake, exit code 1."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from gqa import cli
from gqa.config import ModelConfig

# From ml_collections.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

ROOT = pathlib.Path(__file__).parent.parent
TINY = str(ROOT / 'configs/tiny.py')


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT))  # as python -m there does


def _parse(*arguments):
  """Parses what follows `python -m gqa.train`; returns the flags."""
  argv = ['train', *arguments]
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', flag_values=values, sys_argv=argv, lock_config=True
  )
  flags.mark_flag_as_required('config', values)
  flags.DEFINE_string('workdir', None, '', values, required=True)
  flags.DEFINE_float('fraction', 0.1, '', 0.0, 0.5, flag_values=values)
  assert cli.parse_flags(argv, values) == ['train']
  return values


def _config(*overrides, path=TINY):
  return _parse(f'--config={path}', '--workdir=w', *overrides).config


@pytest.fixture
def error(capsys):
  """Returns the one line that a call which must fail prints."""

  def of(call, *args, **kwargs):
    with pytest.raises(SystemExit) as exit_info:
      call(*args, **kwargs)
    printed = capsys.readouterr()
    assert exit_info.value.code == 1
    assert printed.out == ''
    assert printed.err.startswith('error: ') and printed.err.count('\n') == 1
    return printed.err.removeprefix('error: ').rstrip()

  return of


# Fields.


@pytest.mark.parametrize(
  'override, expected',
  [
    ('model.num_kv_heads=2', 2),
    ('model.num_kv_heads=4,2,2,1', (4, 2, 2, 1)),
    ('model.num_kv_heads=(4,2,2,1)', (4, 2, 2, 1)),
    ('model.sliding_window=128', 128),
    ('model.logit_softcap=30', 30.0),
    ('model.qk_norm=true', True),
    ('data.path=some/where', 'some/where'),
    ('optim.learning_rate=1', 1.0),
    ('optim.betas=(0.9,0.95)', (0.9, 0.95)),
    ('optim.betas=0.8,0.99', (0.8, 0.99)),
    ('optim.betas=3', (3,)),
  ],
)
def test_a_field_takes_a_value_of_its_type(override, expected):
  value = _config(f'--config.{override}')
  for name in override.split('=')[0].split('.'):
    value = value[name]
  assert value == expected and type(value) is type(expected)


def test_fields_may_follow_a_space_or_a_no():
  config = _config('--config.train.num_steps', '5', '--noconfig.model.qk_norm')
  assert config.train.num_steps == 5 and config.model.qk_norm is False
  assert _config().model.num_kv_heads is None


@pytest.mark.parametrize(
  'override',
  [
    'train.num_steps=2.5',
    'train.num_steps=many',
    'optim.learning_rate=high',
    'model.sliding_window=1.5',
    'model.qk_norm=perhaps',
    'model=3',
  ],
)
def test_a_value_of_another_type_is_refused_by_name(override, error):
  message = error(_config, f'--config.{override}')
  assert message.startswith(f'--config.{override}: ')


def test_a_word_for_kv_heads_is_refused_by_the_model():
  config = _config('--config.model.num_kv_heads=abc')
  with pytest.raises(TypeError, match="num_kv_heads='abc' must be an int"):
    ModelConfig.from_dict(config.model.to_dict())


@pytest.mark.parametrize(
  'override, expected',
  [
    (
      'model.kv_head=2',
      '--config.model.kv_head: kv_head is not a field; '
      'did you mean num_kv_heads?',
    ),
    (
      'modle.num_heads=2',
      '--config.modle.num_heads: modle is not a field; did you mean model?',
    ),
    (
      'model.num_heads.x=2',
      '--config.model.num_heads.x: --config.model.num_heads has no fields.',
    ),
  ],
)
@pytest.mark.parametrize('dashes', ['-', '--'])
def test_a_mistyped_field_names_the_near_one(override, expected, dashes, error):
  assert error(_config, f'{dashes}config.{override}') == expected


def test_a_mistyped_field_after_a_no_names_the_near_one(error):
  message = error(_config, '--noconfig.model.qk_nrom')
  assert message.endswith('did you mean qk_norm?')


def test_a_field_like_no_other_lists_what_there_is(error):
  message = error(_config, '--config.optim.zzz=1')
  assert "known are ['" in message and "'learning_rate'" in message


# Flags.


def test_all_missing_flags_are_named(error):
  assert error(_parse) == '--config and --workdir must be given; see --help.'
  assert error(_parse, f'--config={TINY}') == (
    '--workdir must be given; see --help.'
  )


def test_a_field_without_a_config_asks_for_it(error):
  assert error(_parse, '--config.seed=1', '--workdir=w') == (
    '--config.seed needs --config=FILE before it.'
  )
  message = error(_parse, '--config.seed=1', f'--config={TINY}', '--workdir=w')
  assert 'before a value for --config' in message


def test_a_flag_out_of_range_is_named_with_its_range(error):
  message = error(_config, '--fraction=0.9')
  assert message.startswith('--fraction=0.9: ') and '[0.0, 0.5]' in message
  assert error(_config, '--fraction=x').startswith('--fraction=x: ')


def test_an_unknown_flag_is_named_with_the_near_one(error):
  message = error(_config, '--wrokdir=w')
  assert "'wrokdir'" in message and 'workdir' in message


# Config files.


@pytest.mark.parametrize('override', [[], ['--config.seed=1']])
def test_a_missing_config_file_is_named(override, error, tmp_path):
  assert error(_config, *override, path='nofile.py') == (
    '--config=nofile.py: No such file or directory.'
  )
  assert 'Is a directory' in error(_config, *override, path=tmp_path)
  (tmp_path / 'empty.py').write_text('')
  assert 'defines no get_config()' in error(
    _config, *override, path=tmp_path / 'empty.py'
  )


BASE = 'from configs import base\ndef get_config():\n  c = base.get_config()\n'


@pytest.mark.parametrize('override', [[], ['--config.seed=1']])
@pytest.mark.parametrize(
  'content, line, reason',
  [
    ('x = 1\ny = = 2\n', 2, 'invalid syntax'),
    ('import no_such_module\n', 1, "No module named 'no_such_module'"),
    (BASE + '  c.train.num_steps = 2.5\n', 4, 'TypeError'),
    (BASE + '  c.model.num_heads = 1 / 0\n', 4, 'ZeroDivisionError'),
    (BASE + '  open("nowhere.json")\n', 4, 'No such file or directory'),
    ('def f():\n  return {}[1]\ndef get_config():\n  f()\n', 2, 'KeyError: 1'),
    (BASE + '  c.modle.num_heads = 2\n', 4, 'Did you mean "model"'),
  ],
)
def test_a_broken_config_file_is_named_with_its_line(
  content, line, reason, override, error, tmp_path
):
  path = tmp_path / 'broken.py'
  path.write_text(content)
  message = error(_config, *override, path=path)
  assert message.startswith(f'{path}, line {line}: ')
  assert reason in message


def test_what_follows_a_colon_reaches_get_config(error, tmp_path):
  path = tmp_path / 'sized.py'
  path.write_text(
    'from ml_collections import config_dict\n'
    'def get_config(size):\n'
    '  return config_dict.ConfigDict(dict(size=int(size)))\n'
  )
  assert _config(path=f'{path}:3').size == 3
  assert _config('--config.size=5', path=f'{path}:3').size == 5
  assert f'{path}, line 3: ValueError' in error(_config, path=f'{path}:x')


def test_a_traceback_is_kept_when_asked_for(monkeypatch):
  monkeypatch.setenv('GQA_TRACEBACK', '1')
  with pytest.raises(flags.Error, match='num_steps'):
    _config('--config.train.num_steps=2.5')


# Commands.


def _run(*command, **environment):
  return subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'nonexistent'} | environment,
    capture_output=True,
    text=True,
  )


def test_importing_any_module_starts_no_backend():
  modules = [f'gqa.{path.stem}' for path in (ROOT / 'gqa').glob('[!_]*.py')]
  code = f'import importlib\nfor n in {modules}: importlib.import_module(n)'
  done = _run('-c', code)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  'module, option, flag',
  [
    ('gqa.train', '--help', '--workdir'),
    ('gqa.data', '--helpshort', '--target'),
    ('gqa.data', '--helpfull', '--target'),
  ],
)
def test_help_needs_no_backend(module, option, flag):
  done = _run('-m', module, option)
  assert done.returncode == 0, done.stderr
  assert flag in done.stdout


def test_a_mistake_on_a_command_line_needs_no_backend():
  done = _run(
    '-m',
    'gqa.train',
    '--config=configs/tiny.py',
    '--workdir=w',
    '--config.model.kv_head=2',
  )
  assert done.returncode == 1
  assert done.stderr.startswith('error: --config.model.kv_head: ')
  assert done.stderr.count('\n') == 1


def test_a_failure_of_main_is_one_line_and_others_keep_their_traceback():
  code = """
import sys
from gqa import cli
def main(argv):
  if argv[1] == 'user':
    raise ValueError('a=1 must be\\\\n2.')
  if argv[1] == 'file':
    open('nowhere')
  if argv[1] == 'fault':
    raise RuntimeError('broken')
  return int(argv[1])
for argument in sys.argv[1:]:
  sys.argv[1:] = [argument]
  try:
    cli._guarded(main, sys.argv)
  except SystemExit as e:
    print(argument, e.code)
  except RuntimeError:
    print(argument, 'kept')
"""
  done = _run('-c', code.replace('\\\\n', '\\n'), 'user', 'file', 'fault', '75')
  assert done.stdout.splitlines() == ['user 1', 'file 1', 'fault kept', '75 75']
  assert done.stderr.splitlines() == [
    'error: a=1 must be 2.',
    'error: No such file or directory: nowhere',
  ]


def test_a_reader_that_stops_early_is_no_error_to_speak_of():
  command = [sys.executable, '-m', 'gqa.plan', '--audit']
  read, write = os.pipe()
  os.close(read)
  with open(write, 'wb') as closed:
    done = subprocess.run(
      command, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True
    )
  assert (done.returncode, done.stderr) == (1, '')
