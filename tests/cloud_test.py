"""Properties of the task files for SkyPilot.

Those that need its own parser run where `skypilot` is installed, or where
GQA_SKY_PYTHON names an interpreter that has it: it wants an environment of its
own.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from gqa import experiment
from gqa.launch import cloud, layout
from gqa.points import Step

yaml = pytest.importorskip('yaml')
ROOT = pathlib.Path(__file__).parents[1]
SKY_PYTHON = os.environ.get('GQA_SKY_PYTHON', sys.executable)
TPU = {'accelerators': 'tpu-v5litepod-8', 'use_spot': True}
GPU = {'accelerators': 'H100:8', 'use_spot': True, 'infra': 'gcp/us-central1'}


def _steps():
  parent = Step('train', {'model.num_kv_heads': 8})
  converted = Step('convert', {'source': parent, 'num_kv_heads': 2})
  yield from (parent, converted, Step('train', {'init_from': converted}))
  yield Step('train', {'seed': 1, 'model.num_kv_heads': (4, 2, 2, 1)})
  yield Step('train', {'seed': 2, 'model.num_kv_heads': (4, 2, 2, 1)})


@pytest.fixture
def written(tmp_path, monkeypatch):
  """Writes task files; returns the sweep, their content and the script."""
  monkeypatch.chdir(ROOT)

  def write(resources, bucket='my-bucket', together=False):
    steps = [
      step if step.verb != 'train' else Step('train', step.overrides, 'x.py')
      for step in _steps()
    ]
    steps[1] = Step('convert', {'source': steps[0], 'num_kv_heads': 2})
    steps[2] = Step('train', {'init_from': steps[1]}, 'x.py')
    points = experiment.expand(steps, cloud.MOUNT, 'python')
    sweep = layout.make_sweep(tmp_path / 'my sweep', 'x.py', '', '.', points)
    *files, script = cloud.write(sweep, bucket, resources, together)
    return sweep, files, script

  return write


def _documents(path):
  return list(yaml.safe_load_all(path.read_text()))


def test_what_hangs_together_is_a_pipeline_and_the_rest_a_file_each(written):
  _, files, script = written(TPU)
  assert [path.name for path in files] == [
    '000-pipeline.yaml',
    '003-seed=1,num_kv_heads=4-2-2-1.yaml',
    '004-seed=2,num_kv_heads=4-2-2-1.yaml',
  ]
  head, *tasks = _documents(files[0])
  assert list(head) == ['name'] and len(tasks) == 3
  (alone,) = _documents(files[1])
  assert alone['resources']['accelerators'] == 'tpu-v5litepod-8'
  assert alone['resources']['use_spot'] is True
  assert alone['resources']['job_recovery']['recover_on_exit_codes'] == [75]
  assert alone['setup'].endswith('[tpu]')
  assert alone['file_mounts'][cloud.MOUNT] == {
    'mode': 'MOUNT_CACHED',
    'name': 'my-bucket',
  }
  done = subprocess.run(['bash', '-n', script], capture_output=True)
  assert (
    done.returncode == 0 and script.read_text().count('sky jobs launch') == 3
  )


def test_seeds_together_share_a_task(written):
  _, files, _ = written(TPU, together=True)
  assert [path.name for path in files] == [
    '000-pipeline.yaml',
    '003-seed=1,num_kv_heads=4-2-2-1.yaml',
  ]
  (task,) = _documents(files[1])
  made, _, run = task['run'].rstrip().split('\n')
  assert all(f'/{i}-seed=' in made for i in ('003', '004'))
  assert '--seeds_together --directory=/runs/003-' in run


def test_a_bucket_that_exists_is_mounted_and_gpus_bring_their_packages(written):
  _, files, _ = written(GPU, 'gs://there/is')
  (alone,) = _documents(files[1])
  mount = alone['file_mounts'][cloud.MOUNT]
  assert mount == {'mode': 'MOUNT_CACHED', 'source': 'gs://there/is'}
  assert alone['setup'].endswith('[gpu]')


def test_a_task_runs_the_point_of_the_sweep_in_the_bucket(
  written, tmp_path, monkeypatch
):
  sweep, files, _ = written(TPU)
  (task,) = _documents(files[1])
  # The machine: a bucket that is empty, and what sky copies there.
  bucket = tmp_path / 'bucket'
  bucket.mkdir()
  entry = task['file_mounts']['/tmp/sweep.json']
  run = task['run'].replace(cloud.MOUNT, str(bucket))
  run = run.replace('/tmp/sweep.json', f"'{entry}'")
  monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
  (tmp_path / 'bin').mkdir()
  # Training is another's matter.
  (tmp_path / 'bin/python').write_text(
    f'#!/bin/sh\ncase "$2" in gqa.train) echo "$@";;'
    f' *) exec {sys.executable} "$@";; esac\n'
  )
  (tmp_path / 'bin/python').chmod(0o755)
  subprocess.run(['bash', '-c', run], check=True, cwd=ROOT)
  point = sweep.points[3]
  log = (bucket / point.name / 'log.txt').read_text().splitlines()
  assert log[1] == point.command.removeprefix('python ')
  assert layout.read_state(bucket / point.name)['state'] == 'done'
  assert (bucket / 'results.jsonl').read_text().count('\n') == 1


CHECK = """
import sys, sky
from sky.utils import dag_utils
for path in sys.argv[1:]:
  dag = dag_utils.load_chain_dag_from_yaml(path)
  for task in dag.tasks:
    print(path, task.name, *task.resources)
"""


@pytest.mark.parametrize('resources', [TPU, GPU])
def test_the_parser_of_skypilot_takes_the_files(resources, written):
  env = os.environ | {'SKYPILOT_DISABLE_USAGE_COLLECTION': '1'}
  probe = [SKY_PYTHON, '-c', 'import sky']
  if subprocess.run(probe, env=env, capture_output=True).returncode:
    pytest.skip('SkyPilot is not installed')
  _, files, _ = written(resources)
  done = subprocess.run(
    [SKY_PYTHON, '-c', CHECK, *files],
    env=env,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count(' gqa-my-sweep-') == 5
