"""Points under a real SLURM, of virtual nodes on the loopback interface.

Needs Debian's packages slurm-wlm and munge.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from gqa import data, experiment
from gqa.launch import layout, slurm
from gqa.points import Step

pytestmark = pytest.mark.skipif(
  not all(map(shutil.which, ('sbatch', 'slurmctld', 'slurmd', 'munged'))),
  reason='SLURM is not installed',
)
ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = pathlib.Path(__file__).parent / 'slurm'
CONFIG = """
from configs import base

def get_config():
  config = base.get_config()
  config.compilation_cache = {cache!r}
  config.data.path = {data!r}
  model, train = config.model, config.train
  model.num_layers, model.embed_dim, model.mlp_dim = 2, 32, 64
  model.num_heads, model.head_dim, model.max_len = 4, 8, 32
  train.num_steps, train.batch_size, train.seq_len = 3000, 4, 32
  train.log_every = 50
  config.optim.warmup_steps = 4
  config.eval.every_steps = 0
  config.eval.num_batches = 2
  config.checkpoint.every_steps = 0
  return config
"""


def _free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


@pytest.fixture
def cluster(monkeypatch, request):
  """A cluster of as many nodes as the test's parameter says."""
  # A socket's path must be short.
  directory = tempfile.mkdtemp(prefix='slurm')
  monkeypatch.setenv('SLURM_CONF', f'{directory}/slurm.conf')
  up = ['bash', SCRIPTS / 'up.sh', directory, str(request.param)]
  subprocess.run([*up, str(_free_port())], check=True, timeout=60)
  yield
  subprocess.run(['bash', SCRIPTS / 'down.sh', directory], timeout=60)
  shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def config(tmp_path):
  """A config file of a model that takes some seconds to train."""
  text = b'\n'.join(b'word%d' % (i * i % 97) for i in range(3000))
  (tmp_path / 'text.txt').write_bytes(text)
  target = str(tmp_path / 'data')
  data.prepare(str(tmp_path / 'text.txt'), 'bytes', target)
  path = tmp_path / 'config.py'
  path.write_text(CONFIG.format(cache=str(tmp_path / 'cache'), data=target))
  return str(path)


def _make(workdir, steps):
  expanded = experiment.expand(steps, workdir, sys.executable)
  return layout.make_sweep(workdir, 'x.py', '', str(ROOT), expanded)


def _command(*words):
  return subprocess.run(
    words, check=True, capture_output=True, text=True
  ).stdout


def _wait_for(condition, seconds=600):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.1)


def _last_step(directory):
  path = directory / 'metrics.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  return json.loads(lines[-1])['step'] if lines else 0


def _curves(directory):
  """All that the seed decides, by step."""
  rows = map(json.loads, (directory / 'metrics.jsonl').read_text().splitlines())
  return [
    {
      k: v
      for k, v in row.items()
      if k == 'step' or k.startswith(('train', 'e'))
    }
    for row in rows
  ]


def _preempt(sweep, job, step, total):
  """Lets an urgent job take the place of a point in the middle of its run."""
  point = sweep.points[0]
  directory = sweep.directory(point)
  _wait_for(lambda: _last_step(directory) >= step)
  nodes = _command('sinfo', '--noheader', '--format=%D', '--partition=main')
  _command(
    *('sbatch', '--partition=urgent', f'--nodes={nodes.strip()}'),
    *('--exclusive', f'--output={sweep.workdir}/urgent.txt', '--wrap=sleep 1'),
  )
  _wait_for(lambda: layout.read_state(directory)['state'] == 'stopped')
  assert step <= _last_step(directory) < total

  def runs_again():
    # A requeued job rests for two minutes otherwise.
    subprocess.run(
      ['scontrol', 'update', f'jobid={job}_0', 'StartTime=now'],
      capture_output=True,
    )
    return layout.read_state(directory)['attempts'] == 2

  _wait_for(runs_again)


@pytest.mark.parametrize('cluster', [1], indirect=True)
def test_a_preempted_point_is_requeued_and_ends_as_if_it_had_not_been(
  cluster, config, tmp_path, monkeypatch
):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  step = Step('train', {'model.num_kv_heads': 2, 'seed': 3}, config)
  sweep = _make(tmp_path / 'sweep', [step])
  (job,) = slurm.submit(sweep, None, ['--exclusive'])
  assert slurm.submit(sweep, None, []) == []  # it is in the queue
  _preempt(sweep, job, 300, 3000)
  assert slurm.watch(sweep) == 0
  (state,) = sweep.states()
  assert state['attempts'] == 2 and state['exit_code'] == 0

  alone = _make(tmp_path / 'alone', [step])
  subprocess.run(alone.points[0].command, shell=True, cwd=ROOT, check=True)
  directories = [s.directory(s.points[0]) for s in (sweep, alone)]
  curves = [_curves(directory) for directory in directories]
  assert curves[0] == curves[1] and curves[0][-1]['step'] == 3000
  results = json.loads((sweep.workdir / 'results.jsonl').read_text())
  assert results['metrics']['eval/loss'] == curves[1][-1]['eval/loss']


@pytest.mark.parametrize('cluster', [2], indirect=True)
def test_a_point_on_two_nodes_is_preempted_and_goes_on(
  cluster, config, tmp_path, monkeypatch
):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  # Names of virtual nodes do not resolve.
  address = f'127.0.0.1:{_free_port()}'
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', address)
  monkeypatch.setenv('JAX_COORDINATOR_BIND_ADDRESS', address)
  step = Step('train', {'train.num_steps': 1000}, config)
  sweep = _make(tmp_path / 'sweep', [step])
  (job,) = slurm.submit(sweep, None, ['--nodes=2', '--ntasks-per-node=1'])
  _preempt(sweep, job, 100, 1000)
  assert slurm.watch(sweep) == 0
  (directory,) = map(sweep.directory, sweep.points)
  log = (directory / 'log.txt').read_text()
  assert '2 device(s), from step 0' in log
  curves = _curves(directory)
  steps = [row['step'] for row in curves if 'train/loss' in row]
  assert steps == list(range(50, 1001, 50))
  assert np.isfinite(curves[-1]['eval/loss'])


@pytest.mark.parametrize('cluster', [1], indirect=True)
def test_stages_wait_and_a_failure_holds_up_its_own_followers_alone(
  cluster, tmp_path
):
  def point(index, command, after=()):
    return layout.Point(
      *(index, f'{index:03}', '', 'train', None, {}, after, command)
    )

  points = [
    point(0, 'true'),
    point(1, f'test -e {tmp_path}/flag'),
    point(2, f'test -e {tmp_path}/sweep/000/state.json', (0,)),
    point(3, 'true', (1,)),
  ]
  sweep = layout.make_sweep(tmp_path / 'sweep', 'x', '', str(ROOT), points)
  jobs = slurm.submit(sweep, 1, ['--job-name=mine'])
  assert len(jobs) == 2
  assert 'JobName=mine' in _command('scontrol', 'show', 'job', jobs[0])
  assert slurm.watch(sweep) == 1
  names = [state['state'] for state in sweep.states()]
  assert names == ['done', 'failed', 'done', 'waiting']
  assert 'waits for 001, which is failed' in ''.join(
    path.read_text() for path in (sweep.workdir / 'slurm').iterdir()
  )

  (tmp_path / 'flag').touch()
  from gqa import sweep as command

  command.retry(sweep)
  assert len(slurm.submit(sweep, None, [])) == 2
  assert slurm.watch(sweep) == 0


def test_what_sbatch_says_is_passed_on(tmp_path, monkeypatch):
  sweep = _make(tmp_path / 'sweep', [Step('train', {}, 'x.py')])
  monkeypatch.setenv('SLURM_CONF', os.devnull)
  with pytest.raises(ValueError, match='sbatch refused'):
    slurm.submit(sweep, None, [])
