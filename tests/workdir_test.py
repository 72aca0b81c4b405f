import json

import pytest

from gqa import workdir as workdir_lib


def test_workdir_may_be_relative_or_at_home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  for path in ('./runs/x', 'runs/../runs/x', '~/runs/x', tmp_path / 'runs/x'):
    assert workdir_lib.resolve_workdir(path) == tmp_path / 'runs/x'
  assert list((tmp_path / 'runs/x').iterdir()) == []


def test_workdir_that_cannot_be_written_is_refused_at_once(
  tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'run'):
    with pytest.raises(ValueError, match='file is a file, not a directory'):
      workdir_lib.resolve_workdir(path)
  with pytest.raises(ValueError, match='is a URL'):
    workdir_lib.resolve_workdir('gs://bucket/run')

  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('os.fsync', full)
  with pytest.raises(OSError, match='cannot be written to: No space left'):
    workdir_lib.resolve_workdir(tmp_path / 'run')


def test_a_run_resumes_only_under_its_config(tmp_path):
  config = {
    'model': {'num_kv_heads': None, 'betas': (0.9, 0.95)},
    'train': {'num_steps': 10, 'log_every': 1},
    'eval': {'every_steps': 5},
    'seed': 0,
  }
  (tmp_path / '.hidden').write_text('')
  workdir_lib.check_same_config(tmp_path, config)
  workdir_lib.save_config(tmp_path, config)
  assert workdir_lib.load_config(tmp_path) == json.loads(json.dumps(config))
  workdir_lib.check_same_config(tmp_path, config)

  config['train']['log_every'] = 2
  config['eval']['every_steps'] = 2
  workdir_lib.check_same_config(tmp_path, config)

  config['train']['num_steps'] = 20
  config['model']['num_kv_heads'] = 2
  with pytest.raises(ValueError) as error:
    workdir_lib.check_same_config(tmp_path, config)
  line = str(error.value)
  assert 'model.num_kv_heads: None -> 2; train.num_steps: 10 -> 20' in line
  assert 'log_every' not in line
  assert '--allow_config_change' in line
  workdir_lib.check_same_config(tmp_path, config, allow=True)


def test_a_directory_of_something_else_is_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(ValueError, match='not a run .it holds thesis.tex.'):
    workdir_lib.check_same_config(tmp_path, {})


def test_config_opens_from_a_checkpoint_directory(tmp_path):
  with pytest.raises(ValueError, match='config.json does not exist'):
    workdir_lib.load_config(tmp_path)
  workdir_lib.save_config(tmp_path, {'seed': 1})
  for path in ('checkpoints', 'checkpoints/1'):
    assert workdir_lib.load_config(tmp_path / path) == {'seed': 1}
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='is not valid JSON'):
    workdir_lib.load_config(tmp_path)
