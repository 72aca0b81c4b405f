"""Properties of experiments: steps, names, commands and checks."""

import json
import pathlib
import shlex
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import flags
from ml_collections import config_dict

from gqa import experiment, sweep, sweep_checks, train
from gqa.launch import layout
from gqa.points import Step

# From ml_collections.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

ROOT = pathlib.Path(__file__).parents[1]
HEAD = """
from configs import tiny
from gqa import points
from gqa.points import Step

def get_config():
  return tiny.get_config()

"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT))
  monkeypatch.chdir(ROOT)


@pytest.fixture
def write(tmp_path):
  """Writes an experiment whose `sweep` has the given body."""

  def write(body, head='def sweep():'):
    path = tmp_path / 'experiment.py'
    lines = ''.join(f'  {line}\n' for line in body.split('\n'))
    path.write_text(f'{HEAD}{head}\n{lines}')
    return str(path)

  return write


def _expand(path, arguments=(), common=()):
  common = dict(common)
  steps = experiment.load(path, dict(arguments), common)
  return steps, experiment.expand(steps, '/sweep', 'python', common)


def _check(path, **kwargs):
  steps, expanded = _expand(path, **kwargs)
  sweep_checks.check(steps, expanded, data=False)
  return expanded


PIPELINE = """
for heads in (4, 2):
  parent = Step('train', {'model.num_kv_heads': 8})
  converted = Step(
    'convert', {'source': parent, 'num_kv_heads': heads, 'method': 'mean'}
  )
  yield Step('evaluate', {'checkpoint': converted})
  yield {'init_from': converted, 'model.num_kv_heads': heads}
yield Step('train', {'seed': 3}, config='configs/books.py')
"""


def test_steps_come_after_what_they_wait_for_and_equal_ones_once(write):
  _, expanded = _expand(write(PIPELINE))
  assert [(p.index, p.verb, p.after) for p in expanded] == [
    (0, 'train', ()),
    (1, 'convert', (0,)),
    (2, 'evaluate', (1,)),
    (3, 'train', (1,)),
    (4, 'convert', (0,)),
    (5, 'evaluate', (4,)),
    (6, 'train', (4,)),
    (7, 'train', ()),
  ]


def test_names_say_what_differs(write):
  _, expanded = _expand(write(PIPELINE))
  assert [point.name for point in expanded] == [
    '000-num_kv_heads=8',
    '001-convert,source=000,num_kv_heads=4,method=mean',
    '002-evaluate,checkpoint=001',
    '003-init_from=001,num_kv_heads=4',
    '004-convert,source=000,num_kv_heads=2,method=mean',
    '005-evaluate,checkpoint=004',
    '006-init_from=004,num_kv_heads=2',
    '007-books,seed=3',
  ]


def test_the_workdir_of_a_step_stands_for_it(write):
  path = write(PIPELINE)
  _, expanded = _expand(path)
  workdirs = [f'/sweep/{point.name}' for point in expanded]
  assert expanded[3].overrides == {
    'init_from': workdirs[1],
    'model.num_kv_heads': 4,
  }
  assert [shlex.split(expanded[i].command) for i in (1, 2, 3)] == [
    [
      *('python', '-m', 'gqa.convert', f'--target={workdirs[1]}'),
      *(f'--source={workdirs[0]}', '--num_kv_heads=4', '--method=mean'),
    ],
    ['python', '-m', 'gqa.evaluate', f'--checkpoint={workdirs[1]}'],
    [
      *('python', '-m', 'gqa.train', f'--config={path}'),
      f'--workdir={workdirs[3]}',
      f'--config.init_from={workdirs[1]}',
      '--config.model.num_kv_heads=4',
    ],
  ]


def test_seeds_have_a_group_in_common(write):
  _, expanded = _expand(
    write("return points.product(points.over('a', [1, 2]), points.seeds(2))")
  )
  assert [p.group for p in expanded] == ['a=1', 'a=1', 'a=2', 'a=2']
  assert len({p.name for p in expanded}) == 4


def test_the_group_of_a_step_is_one_for_all_seeds_of_what_it_waits_for(write):
  _, expanded = _expand(
    write(
      """for seed in range(2):
  parent = Step('train', {'seed': seed})
  heads = Step('convert', {'source': parent, 'num_kv_heads': 2})
  yield {'init_from': heads, 'seed': seed}"""
    )
  )
  groups = [point.group for point in expanded]
  assert (
    groups[:3]
    == groups[3:]
    == [
      'train',
      'convert,num_kv_heads=2 < train',
      'train < convert,num_kv_heads=2 < train',
    ]
  )


def test_all_points_know_in_which_fields_the_sweep_differs(write):
  _, expanded = _expand(
    write("yield {'b.c': 1, 'seed': 1}\nyield {'a': 2, 'init_from': 'x'}"),
    common={'train.num_steps': '9'},
  )
  assert [p.columns for p in expanded] == [('a', 'b.c')] * 2


@pytest.mark.parametrize(
  'overrides, name',
  [
    ({}, '000-train'),
    ({'model.num_kv_heads': (4, 2, 2, 1)}, '000-num_kv_heads=4-2-2-1'),
    ({'model.num_kv_heads': (4,)}, '000-num_kv_heads=4'),
    ({'data.path': 'some/where is it'}, '000-path=some-where-is-it'),
    ({'train.name': 'a', 'optim.name': 'b'}, '000-train.name=a,optim.name=b'),
    ({'optim.learning_rate': 3e-4}, '000-learning_rate=0.0003'),
    ({'model.match_params': True}, '000-match_params=True'),
  ],
)
def test_a_name_is_one_for_files(overrides, name):
  step = Step('train', overrides, 'x.py')
  assert experiment.expand([step], '/s', 'python')[0].name == name


def test_long_names_are_cut_and_stay_different():
  long = [
    Step('train', {f'section.field{i}': i + j for i in range(40)}, 'x.py')
    for j in range(2)
  ]
  names = [p.name for p in experiment.expand(long, '/s', 'python')]
  assert len({name[4:] for name in names}) == 2
  assert all(len(name) < 130 for name in names)


@pytest.mark.parametrize(
  'value, text',
  [
    (True, 'True'),
    (3e-4, '0.0003'),
    ((4, 2), '4,2'),
    ([3], '(3,)'),
    (('a', 'b'), 'a,b'),
    ('', ''),
  ],
)
def test_a_value_is_typed_as_the_command_line_reads_it(value, text):
  assert experiment.typed('field', value) == text


@pytest.mark.parametrize('value', [None, {}, object()])
def test_a_value_that_cannot_be_typed_is_refused(value):
  with pytest.raises(ValueError, match='field=.* cannot be given'):
    experiment.typed('field', value)


SIZED = (
  'def sweep(size="tiny", rate=0.1, steps=3, deep=False, heads=(4,), '
  'ways=("mean",)):'
)


@pytest.mark.parametrize(
  'arguments, expected',
  [
    ({}, {}),
    (
      {'size': '7', 'rate': '1', 'steps': '5'},
      {'size': '7', 'rate': 1.0, 'steps': 5},
    ),
    ({'deep': 'true', 'heads': '4,2'}, {'deep': True, 'heads': (4, 2)}),
    ({'heads': '2', 'ways': 'first'}, {'heads': (2,), 'ways': ('first',)}),
    ({'ways': 'first, random'}, {'ways': ('first', 'random')}),
    ({'ways': 'first,random'}, {'ways': ('first', 'random')}),
    ({'ways': "('first', 'random')"}, {'ways': ('first', 'random')}),
    ({'ways': '1,2'}, {'ways': ('1', '2')}),
  ],
)
def test_arguments_of_a_sweep_have_the_types_of_its_defaults(
  arguments, expected, write
):
  defaults = {
    'size': 'tiny',
    'rate': 0.1,
    'steps': 3,
    'deep': False,
    'heads': (4,),
    'ways': ('mean',),
  }
  fields = ', '.join(f'"{name}": {name}' for name in defaults)
  (step,) = experiment.load(write(f'yield {{{fields}}}', SIZED), arguments, {})
  assert repr(dict(step.overrides)) == repr(defaults | expected)


@pytest.mark.parametrize(
  'arguments, message',
  [
    ({'sized': '1'}, "no such argument; it has ['size', 'rate'"),
    ({'steps': 'many'}, '--sweep.steps=many must be like its default, 3'),
    ({'steps': '2.5'}, 'must be like its default'),
    ({'heads': 'two,4'}, '--sweep.heads=two,4 must be like its default, (4,)'),
  ],
)
def test_a_wrong_argument_of_a_sweep_is_named(arguments, message, write):
  with pytest.raises(ValueError) as error:
    experiment.load(write('yield {}', SIZED), arguments, {})
  assert message in str(error.value)


def test_common_fields_hold_for_training_and_are_not_in_names(write):
  _, expanded = _expand(write(PIPELINE), common={'train.num_steps': '80'})
  for point in expanded:
    assert ('--config.train.num_steps=80' in point.command) == (
      point.verb == 'train'
    )
    assert 'num_steps' not in point.name
  with pytest.raises(ValueError, match='num_kv_heads=2 is set by sweep'):
    _expand(write(PIPELINE), common={'model.num_kv_heads': '2'})


@pytest.mark.parametrize(
  'body, message',
  [
    ('return []', 'yields no point'),
    ('return [1 / 0]', 'line 10: ZeroDivisionError'),
    ('return [points.Step("fly", {})]', "line 10: ValueError: verb='fly'"),
  ],
)
def test_an_experiment_that_fails_is_named(body, message, write):
  with pytest.raises(ValueError) as error:
    _expand(write(body))
  assert message in str(error.value)


# Checks.


def test_a_good_pipeline_passes(write):
  assert len(_check(write(PIPELINE))) == 8


@pytest.mark.parametrize(
  'body, message',
  [
    ("yield {'model.num_kv_head': 2}", 'did you mean num_kv_heads?'),
    ("yield {'model.num_kv_heads': 3}", 'must divide num_heads=8'),
    ("yield {'model.num_kv_heads': (8, 4)}", 'has 2 entries'),
    ("yield {'train.num_steps': 2.5}", 'train.num_steps=2.5'),
    (
      "yield {'train.num_steps': 47, 'train.steps_per_call': 5}",
      'multiple of train.steps_per_call',
    ),
    ("yield {'optim.name': 'sgd'}", 'sgd'),
    (
      "yield Step('convert', {'source': 'x', 'num_kv_heads': 2, 'how': 1})",
      "Unknown command line flag 'how'",
    ),
    (
      "yield Step('convert', {'source': 'x', 'method': 'magic'})",
      '--method=magic',
    ),
    ("yield Step('convert', {'source': 'x'})", 'num_kv_heads and budget'),
    ("yield Step('convert', {'num_kv_heads': 2})", '--source must be given'),
    (
      "parent = Step('train', {'model.num_kv_heads': 4})\n"
      "yield Step('convert', {'source': parent, 'num_kv_heads': 8})",
      'num_kv_heads=8',
    ),
    (
      "parent = Step('train', {'model.num_kv_heads': 4})\n"
      "yield {'init_from': parent, 'model.num_kv_heads': 2}",
      'init_from is a step whose model has (4, 4, 4, 4)',
    ),
    ("yield Step('evaluate', {'checkpoints': 'x'})", "'checkpoints'"),
    (
      "yield Step('benchmark', {'grid.batch_sizes': (1,)},"
      " config='experiments/decode_cost.py')",
      'did you mean batch_size?',
    ),
    (
      "yield {'optim.learning_rate': 3e-3}\nyield {}",
      'points 000-learning_rate=0.003 and 001-train are the same run',
    ),
  ],
)
def test_a_point_that_cannot_run_is_named_before_any_starts(
  body, message, write
):
  with pytest.raises(ValueError) as error:
    _check(write(body))
  assert message in str(error.value)
  assert str(error.value).startswith('point')


def test_checks_leave_the_flags_of_the_process_alone(write):
  before = set(flags.FLAGS)
  _check(write("yield Step('evaluate', {'checkpoint': 'x'})"))
  assert set(flags.FLAGS) == before


@pytest.mark.parametrize('size, count', [('tiny', 21), ('books', 21)])
def test_the_experiment_on_kv_heads_has_its_points(size, count):
  expanded = _check(
    'experiments/kv_heads_from_scratch.py', arguments={'size': size}
  )
  assert len(expanded) == count
  assert len({point.group for point in expanded}) == count / 3


# Files and the command.


def _sweep_command(*arguments, code=0):
  done = subprocess.run(
    [sys.executable, '-m', 'gqa.sweep', *arguments],
    cwd=ROOT,
    env={'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'nonexistent'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == code, done.stderr
  return done


def test_print_gives_a_command_for_each_point_and_starts_no_backend(
  write, tmp_path
):
  path = write(PIPELINE)
  flags = (f'--config={path}', f'--workdir={tmp_path}/sweep')
  done = _sweep_command(*flags, '--launcher=print')
  content = json.loads((tmp_path / 'sweep/sweep.json').read_text())
  assert content['config'] == path and content['cwd'] == str(ROOT)
  entries = content['points']
  assert done.stdout.splitlines() == [entry['command'] for entry in entries]
  for entry in entries:
    directory = tmp_path / 'sweep' / entry['name']
    assert json.loads((directory / 'point.json').read_text()) == entry
    assert layout.read_state(directory)['state'] == 'waiting'
  table = _sweep_command(f'--workdir={tmp_path}/sweep', '--status', code=1)
  assert '8 points: 8 waiting' in table.stdout


def _make(tmp_path, *fields):
  steps = [Step('train', f, 'x.py') for f in fields]
  expanded = experiment.expand(steps, tmp_path / 's', 'python')
  return layout.make_sweep(tmp_path / 's', 'x.py', '', '.', expanded)


def test_a_sweep_may_grow_but_not_change(tmp_path):
  _make(tmp_path, {'a': 1}, {'a': 2})
  layout.write_json(
    tmp_path / 's/000-a=1/state.json', {'state': 'done', 'attempts': 1}
  )
  grown = _make(tmp_path, {'a': 1}, {'a': 2}, {'a': 3})
  assert [s['state'] for s in grown.states()] == ['done', 'waiting', 'waiting']
  for fields in ([{'a': 1}], [{'a': 1}, {'b': 2}, {'a': 3}]):
    with pytest.raises(ValueError, match='has another sweep: its point 001'):
      _make(tmp_path, *fields)


@pytest.mark.parametrize('heads, number', [(2, 2.0), ((8, 4, 2, 1), 3.75)])
def test_the_row_of_a_run_has_the_columns_of_its_sweep(heads, number, tmp_path):
  config = config_dict.ConfigDict({'seed': 7})
  run = types.SimpleNamespace(
    workdir=tmp_path,
    config=config,
    program=types.SimpleNamespace(
      model_config=types.SimpleNamespace(kv_heads=np.broadcast_to(heads, 4))
    ),
  )
  entry = {'group': 'a=1', 'columns': ['a', 'uptrain.alpha']}
  layout.write_json(tmp_path / 'point.json', entry)
  assert train.Run._columns(run, {'a': 1, 'model.b': 2}) == {
    'num_kv_heads': number,
    'seed': 7,
    'group': 'a=1',
    'a': 1,
  }


def test_a_directory_of_something_else_is_refused(tmp_path):
  (tmp_path / 's').mkdir()
  (tmp_path / 's/thesis.tex').write_text('')
  with pytest.raises(ValueError, match='holds thesis.tex'):
    _make(tmp_path, {'a': 1})


def test_arguments_of_sweeps_and_configs_are_told_from_flags():
  rest, extra = sweep._split(
    ['sweep', '--config=x.py', '--sweep.size=a=b', '--config.seed=1', '-v']
  )
  assert rest == ['sweep', '--config=x.py', '-v']
  assert extra == {'sweep': {'size': 'a=b'}, 'config': {'seed': '1'}}
