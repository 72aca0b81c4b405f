"""Properties of running points: locks, stops, failures, two launchers.

The commands here are a few lines of Python that count steps as training does;
slurm_test.py has the real one.
"""

import concurrent.futures
import functools
import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from gqa import points
from gqa.launch import layout, lock, outcome, runner, slots, slurm, table

ROOT = pathlib.Path(__file__).parents[1]
# Counts to TOTAL, goes on where it was stopped, and notes each of its lives.
COUNT = """
import json, os, pathlib, signal, sys, time
workdir, total, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
stop = []
signal.signal(signal.SIGTERM, lambda *args: stop.append(1))
with open(workdir / 'lives', 'a') as file:
  file.write(f'{os.getpid()}\\n')
lines = workdir / 'metrics.jsonl'
done = len(lines.read_text().splitlines()) if lines.exists() else 0
print('from', done, flush=True)
for step in range(done + 1, total + 1):
  time.sleep(float(pause))
  with open(lines, 'a') as file:
    file.write(json.dumps({'step': step, 'train/loss': 1 / step}) + '\\n')
  if stop:
    sys.exit(75)
"""


def _make(tmp_path, *commands, after=None, verb='train'):
  """A sweep of commands, in which {workdir} is the point's own."""
  entries = [
    layout.Point(
      index=i,
      name=f'{i:03}',
      group=str(i),
      verb=verb,
      config=None,
      overrides={'i': i},
      after=tuple((after or {}).get(i, ())),
      command=shlex.join(
        word.replace('{workdir}', f'{tmp_path}/sweep/{i:03}') for word in words
      ),
    )
    for i, words in enumerate(commands)
  ]
  return layout.make_sweep(tmp_path / 'sweep', 'x.py', '', str(ROOT), entries)


def _count(total=3, pause=0.01):
  return [sys.executable, '-c', COUNT, '{workdir}', str(total), str(pause)]


def _shell(text):
  return ['sh', '-c', text]


# A unit of seeds: fails while seed 2 is in it, and says who ran.
SEEDS = """
import json, sys
seeds, workdirs = [], []
for word in sys.argv[1:]:
  name, _, value = word.partition('=')
  if name == '--workdir':
    workdirs.append(value)
  elif name in ('--seeds', '--config.seed'):
    seeds += value.split(',')
print('ran:', *seeds, flush=True)
if '2' in seeds:
  sys.exit(3)
for workdir, seed in zip(workdirs, seeds, strict=True):
  with open(workdir + '/metrics.jsonl', 'a') as file:
    file.write(json.dumps({'step': 1, 'train/loss': int(seed)}) + '\\n')
"""


def _make_seeds(tmp_path, seeds):
  """A sweep of two configs, each with the given seeds."""
  points = [
    layout.Point(
      index=i,
      name=f'{i:03}',
      group=heads,
      verb='train',
      config='c.py',
      overrides={'heads': heads, 'seed': seed},
      after=(),
      command=shlex.join(
        [
          *(sys.executable, '-c', SEEDS, '--config=c.py'),
          *(f'--workdir={tmp_path}/sweep/{i:03}', f'--config.heads={heads}'),
          f'--config.seed={seed}',
        ]
      ),
    )
    for i, (heads, seed) in enumerate((h, s) for h in 'ab' for s in seeds)
  ]
  return layout.make_sweep(tmp_path / 'sweep', 'x.py', '', str(ROOT), points)


def _ran(sweep, name):
  """The seeds of each command that wrote into a point's log."""
  log = (sweep.workdir / name / 'log.txt').read_text().splitlines()
  return [line.split()[1:] for line in log if line.startswith('ran:')]


LAUNCH = """
import sys
from gqa.launch import layout, local, slots
sweep = layout.open_sweep(sys.argv[1])
slots = slots.divide(int(sys.argv[2]), 'none')
sys.exit(local.run(sweep, slots, together=len(sys.argv) > 3))
"""


@pytest.fixture
def launch():
  """Starts launchers, none of which is left at the end."""
  processes = []

  def start(sweep, parallel=1, *together):
    process = subprocess.Popen(
      [
        *(sys.executable, '-c', LAUNCH, str(sweep.workdir), str(parallel)),
        *together,
      ],
      cwd=ROOT,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
    return process

  yield start
  for process in processes:
    process.kill()
    process.communicate()


def _wait_for(condition):
  deadline = time.monotonic() + 600
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def _states(sweep):
  return [state['state'] for state in sweep.states()]


def _lines(sweep, index, name='metrics.jsonl'):
  path = sweep.directory(sweep.points[index]) / name
  return path.read_text().splitlines() if path.exists() else []


def _results(sweep):
  text = (sweep.workdir / 'results.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


# Locks.


def test_a_lock_has_one_holder(tmp_path):
  first, second = lock.Lock(tmp_path / 'l'), lock.Lock(tmp_path / 'l')
  assert lock.holder(tmp_path / 'l') is None
  assert first.acquire() and not second.acquire()
  assert lock.holder(tmp_path / 'l').endswith(f':{os.getpid()}')
  first.release()
  assert lock.holder(tmp_path / 'l') is None
  assert second.acquire()
  second.release()


def test_a_lock_goes_with_its_process_but_not_before_its_child(tmp_path):
  code = f"""
import os, subprocess, sys
from gqa.launch import lock
held = lock.Lock({str(tmp_path / 'l')!r})
assert held.acquire()
child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, pass_fds=[held.fd])
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
  read_end, write_end = os.pipe()
  process = subprocess.Popen(
    [sys.executable, '-c', code.replace('subprocess.PIPE', 'sys.stdin')],
    cwd=ROOT,
    stdin=read_end,
    stdout=subprocess.PIPE,
  )
  os.close(read_end)
  process.stdout.readline()
  assert process.wait() == -signal.SIGKILL
  process.stdout.close()
  assert lock.holder(tmp_path / 'l') is not None
  os.close(write_end)  # ends the child
  _wait_for(lambda: lock.holder(tmp_path / 'l') is None)


def test_a_holder_on_another_machine_is_believed_as_long_as_it_lives(tmp_path):
  path = tmp_path / 'l'
  path.write_text('elsewhere:1')  # and this file system locks only here
  assert lock.holder(path) == 'elsewhere:1'
  assert not lock.Lock(path).acquire()
  past = time.time() - lock.LAPSE - 1
  os.utime(path, (past, past))
  assert lock.holder(path) is None
  held = lock.Lock(path)
  assert held.acquire()
  held.release()


# Points.


def test_all_points_run_once_and_the_results_have_a_line_each(tmp_path, launch):
  sweep = _make(tmp_path, *[_count()] * 4, after={2: [0], 3: [2]})
  assert launch(sweep, parallel=2).wait() == 0
  assert _states(sweep) == ['done'] * 4
  for row, point in zip(_results(sweep), sweep.points, strict=True):
    assert row == {
      'index': point.index,
      'name': point.name,
      'verb': 'train',
      'overrides': {'i': point.index},
      'state': 'done',
      'exit_code': 0,
      'metrics': {'step': 3, 'train/loss': 1 / 3},
      'workdir': str(sweep.directory(point)),
    }
  states = sweep.states()
  assert states[0]['ended'] <= states[2]['started']
  assert states[2]['ended'] <= states[3]['started']
  assert launch(sweep).wait() == 0
  assert [len(_lines(sweep, i, 'lives')) for i in range(4)] == [1] * 4


def test_a_failure_holds_up_what_waits_for_it_alone(tmp_path, launch):
  flag = tmp_path / 'flag'
  fragile = _shell(f'echo trying; test -e {flag} || exit 3')
  sweep = _make(tmp_path, fragile, *[_count()] * 3, after={1: [0], 2: [1]})
  assert launch(sweep, parallel=2).wait() == 1
  assert _states(sweep) == ['failed', 'waiting', 'waiting', 'done']
  assert [row['exit_code'] for row in _results(sweep)] == [3, 0]
  shown = table.text(sweep, sweep.states())
  assert '4 points: 1 failed, 2 blocked, 1 done' in shown
  assert 'exit code 3' in shown and shown.count('blocked') == 3

  flag.touch()
  assert launch(sweep).wait() == 1  # a failed point is not tried by itself
  assert _states(sweep)[0] == 'failed'
  from gqa import sweep as command

  command.retry(sweep)
  assert [row['index'] for row in _results(sweep)] == [3]
  assert launch(sweep).wait() == 0
  assert _states(sweep) == ['done'] * 4
  assert sweep.states()[0]['attempts'] == 2
  log = _lines(sweep, 0, 'log.txt')
  assert log.count('trying') == 2 and sum('attempt' in s for s in log) == 2


def test_a_command_that_is_not_there_fails(tmp_path, launch):
  sweep = _make(tmp_path, ['/no/such/program'])
  assert launch(sweep).wait() == 1
  assert sweep.states()[0]['exit_code'] == 127
  assert 'No such file' in _lines(sweep, 0, 'log.txt')[-1]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_all_and_a_relaunch_goes_on(number, tmp_path, launch):
  sweep = _make(tmp_path, *[_count(40, 0.05)] * 2, _count())
  first = launch(sweep, parallel=2)
  _wait_for(lambda: all(len(_lines(sweep, i)) > 1 for i in range(2)))
  first.send_signal(number)
  assert first.wait() == runner.STOPPED
  assert _states(sweep) == ['stopped', 'stopped', 'waiting']
  assert [s['exit_code'] for s in sweep.states()[:2]] == [75, 75]
  assert _results(sweep) == []
  assert launch(sweep, parallel=3).wait() == 0
  for index, total in enumerate([40, 40, 3]):
    steps = [json.loads(line)['step'] for line in _lines(sweep, index)]
    assert steps == list(range(1, total + 1))
  assert [s['attempts'] for s in sweep.states()] == [2, 2, 1]


def test_a_killed_launcher_takes_its_points_along_and_a_relaunch_goes_on(
  tmp_path, launch
):
  sweep = _make(tmp_path, _count(40, 0.05), _count())
  first = launch(sweep)
  _wait_for(lambda: len(_lines(sweep, 0)) > 1)
  first.kill()
  first.wait()
  assert launch(sweep).wait() == 0  # waits for the last one's point to end
  steps = [json.loads(line)['step'] for line in _lines(sweep, 0)]
  assert steps == list(range(1, 41))
  assert len(_lines(sweep, 0, 'lives')) == 2


def test_everything_killed_counts_as_stopped_and_goes_on(tmp_path, launch):
  sweep = _make(tmp_path, _count(40, 0.05))
  first = launch(sweep)
  _wait_for(lambda: len(_lines(sweep, 0)) > 1)
  assert _states(sweep) == ['running']
  group = sweep.states()[0]['pid']
  first.kill()
  os.killpg(group, signal.SIGKILL)
  _wait_for(lambda: _states(sweep) == ['stopped'])
  assert launch(sweep).wait() == 0
  assert _states(sweep) == ['done']


def test_a_command_without_its_runner_keeps_its_point(tmp_path, launch):
  sweep = _make(tmp_path, _count(40, 0.05))
  first = launch(sweep)
  _wait_for(lambda: len(_lines(sweep, 0)) > 1)
  os.kill(sweep.states()[0]['pid'], signal.SIGKILL)
  first.kill()
  time.sleep(0.2)
  assert _states(sweep) == ['running']
  assert launch(sweep).wait() == 0
  steps = [json.loads(line)['step'] for line in _lines(sweep, 0)]
  assert steps == list(range(1, 41))
  assert _lines(sweep, 0, 'log.txt')[-1] == 'from 40'


def test_a_sweep_that_is_started_twice_at_once_is_one(tmp_path):
  commands = [_shell('true')] * 20
  with concurrent.futures.ThreadPoolExecutor() as pool:
    made = [pool.submit(_make, tmp_path, *commands) for _ in range(4)]
  sweeps = [future.result() for future in made]
  assert sweeps == [sweeps[0]] * 4 and _states(sweeps[0]) == ['waiting'] * 20


def test_two_launchers_share_the_points(tmp_path, launch):
  sweep = _make(tmp_path, *[_count(5, 0.02)] * 6, after={5: [0]})
  both = [launch(sweep, parallel=2) for _ in range(2)]
  assert [process.wait() for process in both] == [0, 0]
  assert _states(sweep) == ['done'] * 6
  assert [len(_lines(sweep, i, 'lives')) for i in range(6)] == [1] * 6
  assert len(_results(sweep)) == 6


def test_a_second_signal_kills(tmp_path, launch):
  deaf = _shell('trap "" TERM; echo ready; while :; do sleep 0.1; done')
  sweep = _make(tmp_path, deaf)
  process = launch(sweep)
  _wait_for(lambda: 'ready' in _lines(sweep, 0, 'log.txt'))
  process.terminate()
  time.sleep(0.2)
  process.terminate()
  assert process.wait() == runner.STOPPED
  assert _states(sweep) == ['stopped']


def test_a_runner_refuses_what_is_not_its_turn(tmp_path, capsys):
  sweep = _make(tmp_path, _count(), _count(), after={1: [0]})
  assert runner.run_point(sweep.workdir / '001') == runner.BLOCKED
  held = lock.Lock(sweep.workdir / '000/.lock')
  held.acquire()
  assert runner.run_point(sweep.workdir / '000', patience=0) == runner.BUSY
  held.release()
  assert capsys.readouterr().out.count('\n') == 2
  assert _states(sweep) == ['waiting', 'waiting']


def test_a_conversion_that_was_cut_short_begins_anew(tmp_path, launch):
  half = _shell(
    'test ! -e {workdir}/half || exit 5; mkdir {workdir}/half;'
    ' test -e {workdir}/../ready && echo \'{"loss_after": 2}\''
    ' > {workdir}/convert.json && exit 0; kill -TERM $$'
  )
  sweep = _make(tmp_path, half, verb='convert')
  assert launch(sweep).wait() == runner.STOPPED
  (sweep.workdir / 'ready').touch()
  assert launch(sweep).wait() == 0
  assert _results(sweep)[0]['metrics'] == {'loss_after': 2}


def test_points_of_a_slot_see_its_devices(tmp_path):
  code = 'import os; print(sorted(os.sched_getaffinity(0)), flush=True)'
  sweep = _make(tmp_path, [sys.executable, '-c', code])
  core = min(os.sched_getaffinity(0))
  subprocess.run(
    [
      *(sys.executable, '-m', 'gqa.launch.runner', f'--cores={core}'),
      f'--directory={sweep.workdir}/000',
    ],
    cwd=ROOT,
    env=os.environ | {'CUDA_VISIBLE_DEVICES': '3'},
    check=True,
  )
  log = _lines(sweep, 0, 'log.txt')
  assert 'CUDA_VISIBLE_DEVICES=3' in log[0] and log[1] == f'[{core}]'


# What is left behind.


def test_the_files_of_a_launcher_are_those_that_commands_overlook(
  tmp_path, launch
):
  sweep = _make(tmp_path, _shell('true'))
  assert launch(sweep).wait() == 0
  names = {e.name for e in (sweep.workdir / '000').iterdir()}
  assert names - {'.lock'} == set(points.LAUNCHER_FILES)


def test_metrics_are_the_last_of_each(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text(
    '{"step": 1, "wall_time": 5.0, "a": 1, "b": 1}\n{"step": 2, "a": "NaN"}\n{"s'
  )
  assert outcome.metrics('train', tmp_path) == {'step': 2, 'a': 'NaN', 'b': 1}


def test_metrics_of_an_evaluation_are_those_of_its_last_attempt(tmp_path):
  first = b'{"loss": 9.0}\n'
  (tmp_path / 'log.txt').write_bytes(first + b'warning\n{"loss": 1.5}\n')
  assert outcome.metrics('evaluate', tmp_path, len(first)) == {'loss': 1.5}
  (tmp_path / 'log.txt').write_bytes(first + b'error: none\n')
  assert outcome.metrics('evaluate', tmp_path, len(first)) == {}


def test_progress_has_step_loss_and_the_time_that_is_left(tmp_path):
  assert outcome.progress(tmp_path) == {}
  (tmp_path / 'config.json').write_text('{"train": {"num_steps": 50}}')
  (tmp_path / 'metrics.jsonl').write_text(
    '{"step": 10, "train/loss": 2.0, "speed/step_time": 0.5}\n'
    '{"step": 10, "eval/loss": 3.0}\n'
  )
  assert outcome.progress(tmp_path) == {
    'step': 10,
    'total': 50,
    'loss': 2.0,
    'seconds_left': 20.0,
  }


def test_a_table_that_is_too_long_keeps_what_matters(tmp_path):
  sweep = _make(tmp_path, *[_count()] * 9)
  for index, name in {4: 'failed', 7: 'done'}.items():
    layout.write_json(
      sweep.workdir / f'{index:03}/state.json',
      {'state': name, 'exit_code': 1, 'attempts': 1},
    )
  shown = table.text(sweep, sweep.states(), height=3).splitlines()
  assert len(shown) == 2 + 3 + 1
  assert [line.split()[0] for line in shown[2:5]] == [
    'waiting',
    'waiting',
    'failed',
  ]
  assert shown[-1] == '9 points: 7 waiting, 1 failed, 1 done'


# Slots.


@pytest.mark.parametrize(
  'parallel, expected', [(1, ['0,1,2,3']), (2, ['0,1', '2,3'])]
)
def test_gpus_are_divided_evenly(parallel, expected):
  parts = slots.divide(parallel, '0,1,2,3')
  assert [s.environment['CUDA_VISIBLE_DEVICES'] for s in parts] == expected
  with pytest.raises(ValueError, match=r'parallel=3 must divide the 4 GPUs'):
    slots.divide(3, '0,1,2,3')


def test_visible_gpus_are_the_ones_to_divide(monkeypatch):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5,7')
  parts = slots.divide(2, 'auto')
  assert [s.environment['CUDA_VISIBLE_DEVICES'] for s in parts] == ['5', '7']


def test_cores_are_divided_where_there_are_enough(monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1, 2, 5, 6})
  assert [s.cores for s in slots._cpus(2)] == [(0, 1), (2, 5)]
  assert [s.cores for s in slots._cpus(1)] == [()]
  assert [s.cores for s in slots._cpus(8)] == [()] * 8


def test_tpu_chips_are_divided_into_shapes_that_libtpu_knows():
  parts = [s.environment for s in slots._tpus(4, 8)]
  assert [p['TPU_VISIBLE_CHIPS'] for p in parts] == ['0,1', '2,3', '4,5', '6,7']
  assert {p['TPU_CHIPS_PER_PROCESS_BOUNDS'] for p in parts} == {'1,2,1'}
  assert len({p['TPU_MESH_CONTROLLER_PORT'] for p in parts}) == 4
  with pytest.raises(ValueError, match='leaves 3 TPU chips'):
    slots._tpus(2, 6)


def test_seeds_of_a_config_run_as_one_process(tmp_path, launch):
  sweep = _make_seeds(tmp_path, (0, 1, 5))
  assert launch(sweep, 2, 'together').wait() == 0
  assert _states(sweep) == ['done'] * 6
  assert _ran(sweep, '000') == _ran(sweep, '003') == [['0', '1', '5']]
  for name in ('001', '002', '004', '005'):
    assert _ran(sweep, name) == []
    log = (sweep.workdir / name / 'log.txt').read_text()
    assert f'with {"000" if name < "003" else "003"}, whose log' in log
  rows = (sweep.workdir / 'results.jsonl').read_text().splitlines()
  losses = [json.loads(row)['metrics']['train/loss'] for row in rows]
  assert losses == [0, 1, 5, 0, 1, 5]


def test_a_failing_seed_does_not_fail_the_others(tmp_path, launch):
  sweep = _make_seeds(tmp_path, (0, 2, 5))
  assert launch(sweep, 1, 'together').wait() == 1
  assert _states(sweep) == ['done', 'failed', 'done'] * 2
  assert _ran(sweep, '000') == [['0', '2', '5'], ['0']]
  assert _ran(sweep, '001') == [['2']]
  assert [s['attempts'] for s in sweep.states()] == [2] * 6


def test_only_what_is_not_done_runs_with_the_other_seeds(tmp_path):
  sweep = _make_seeds(tmp_path, (0, 1, 5))
  done = {'state': layout.DONE, 'attempts': 1, 'exit_code': 0}
  layout.write_json(sweep.workdir / '001/state.json', done)
  taken = lock.Lock(sweep.workdir / '003' / '.lock')
  assert taken.acquire()
  run = functools.partial(runner.run_point, together=True, patience=0)
  assert run(sweep.workdir / '002') == 0
  assert run(sweep.workdir / '003') == runner.BUSY
  assert run(sweep.workdir / '004') == 0
  assert _ran(sweep, '000') == [['0', '5']]
  assert _ran(sweep, '004') == [['1', '5']]
  taken.release()


def test_seeds_run_alone_unless_told_otherwise(tmp_path):
  sweep = _make_seeds(tmp_path, (0, 1))
  assert [len(unit) for unit in sweep.units(False)] == [1] * 4
  assert [len(unit) for unit in sweep.units(True)] == [2, 2]
  for unit in sweep.units(False):
    assert layout.command_of(unit) == unit[0].command


def test_a_task_of_slurm_has_the_seeds_that_are_left(tmp_path):
  sweep = _make_seeds(tmp_path, (0, 1, 5))
  done = {'state': layout.DONE, 'attempts': 1, 'exit_code': 0}
  layout.write_json(sweep.workdir / '003/state.json', done)

  def tasks(queued, together):
    stages = slurm._stages(sweep, queued, together)
    return [[[p.index for p in unit] for unit in units] for units in stages]

  assert tasks({}, True) == [[[0, 1, 2], [4, 5]]]
  assert tasks({1: '77'}, True) == [[[0, 2], [4, 5]]]
  assert tasks({1: '77'}, False) == [[[0], [2], [4], [5]]]


@pytest.mark.parametrize('terminal', [True, False])
def test_the_live_table_replaces_itself_on_a_terminal_alone(tmp_path, terminal):
  sweep = _make(tmp_path, _count(), _count())
  stream = io.StringIO()
  stream.isatty = lambda: terminal
  live = table.Live(sweep, stream)
  live.update(sweep.states())
  first = stream.getvalue()
  live.update(sweep.states())
  live.clear()
  rows = first.count('\n')
  assert rows == (5 if terminal else 0)  # a head, a rule, two points, totals
  taken_off = f'\x1b[{rows}A'
  assert stream.getvalue().count(taken_off) == (2 if terminal else 0)
  assert not terminal or stream.getvalue().endswith(f'{taken_off}\x1b[J')
