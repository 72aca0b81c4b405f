"""A workdir of runs as the commands leave them, made up in a moment.

Files are written by the writers of the commands themselves; only numbers are
made up, by `loss_at` and `FakeMachine`. Some runs are not whole: see `build`.
"""

import json
import math

from configs import base
from experiments import decode_cost
from gqa import benchmark, limits, measure, metrics
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.launch import layout

STEPS, EVERY = 60, 20
HEADS = 8
SHAPE = {
  'vocab_size': 258,
  'num_layers': 4,
  'embed_dim': 128,
  'num_heads': HEADS,
  'head_dim': 16,
  'mlp_dim': 352,
  'max_len': 4096,
}
ALPHAS = (0.0, 0.01, 0.05, 0.1)


def config_of(num_kv_heads, seed=0, **overrides):
  config = base.get_config()
  config.model.update(**SHAPE, num_kv_heads=num_kv_heads)
  config.seed = seed
  config.data.path = 'data/shakespeare'
  config.train.update(num_steps=STEPS, batch_size=4, seq_len=64)
  config.update_from_flattened_dict(overrides)
  return config.to_dict()


def loss_at(step, num_kv_heads, seed=0, start=5.5):
  """A loss that falls, to a floor that is higher for fewer heads."""
  floor = 1.4 + 0.03 * math.log2(HEADS / num_kv_heads) + 0.012 * seed
  return floor + (start - floor) * math.exp(-step / 14)


def write_run(path, config, loss, last=STEPS, spike=0, parent=None, first=1):
  """A training run until step `last`; NaN from step `spike` on."""
  path.mkdir(parents=True)
  workdir_lib.save_config(path, config)
  with metrics.Writer(path) as writer:
    if parent is not None:
      writer.scalars(0, {'eval/loss': loss(0), 'eval/parent_loss': 1.41})
    for step in range(first, last + 1, 2):
      value = math.nan if spike and step >= spike else loss(step)
      writer.scalars(
        step,
        {
          'train/loss': value + 0.05 * math.sin(step),
          'train/grad_norm': 0.3 + 2 / step,
          'train/skipped_updates': 0,
          'speed/tokens_per_second': 4000.0 + step,
        },
      )
      if step // EVERY > (step - 2) // EVERY and not spike:
        at = step // EVERY * EVERY
        writer.scalars(at, {'eval/loss': loss(at), 'eval/bits_per_byte': 2.0})
    if last == config['train']['num_steps'] and not spike:
      writer.scalars(last, {'train/loss': loss(last), 'train/grad_norm': 0.3})
      values = {'eval/loss': loss(last), 'eval/bits_per_byte': 2.0}
      if parent is not None:
        values['eval/parent_loss'] = 1.41
      writer.scalars(last, values)
  meta = {'step': last, 'tokens_seen': last * 256}
  if parent is not None:
    meta['parent'] = parent
  write_meta(path, last, meta)


def write_meta(path, step, meta):
  folder = path / 'checkpoints' / str(step) / 'meta'
  folder.mkdir(parents=True)
  (folder / 'metadata').write_text(json.dumps(meta))


def write_conversion(path, source, num_kv_heads, method, grouping, damage):
  path.mkdir(parents=True)
  thorough = method == 'low_rank'
  how = {
    'method': method,
    'grouping': grouping,
    'sequential': thorough,
    'refit': thorough,
    'reconstruct_steps': 0,
    'seed': 0,
  }
  losses = {'loss_before': 1.38, 'loss_after': 1.38 + damage}
  layers = [
    {
      'layer': i,
      'num_kv_heads': num_kv_heads,
      'key_similarity': 0.04 + 0.03 * i + 0.1 * thorough,
      'key_similarity_aligned': 0.45 + 0.05 * i,
      'value_similarity': 0.01 + 0.02 * i,
      'value_similarity_aligned': 0.58 + 0.04 * i,
    }
    for i in range(SHAPE['num_layers'])
  ]
  result = {
    'what': 'convert',
    'source': str(source),
    'target': str(path),
    'num_kv_heads': num_kv_heads,
    'parent_kv_heads': HEADS,
    **losses,
    **how,
    'calibration': {'held_out_text': 'train tokens of data/shakespeare'},
    'seconds': 3.5,
    'layers': layers,
  }
  (path / 'convert.json').write_text(json.dumps(result))
  workdir_lib.save_config(path, config_of(num_kv_heads))
  parent = {'path': str(source), 'step': STEPS, 'steps': STEPS, **how, **losses}
  write_meta(path, 0, {'step': 0, 'parent': parent})
  return {**parent, 'path': str(path), 'parent': parent}


def write_uptrained(root, converted, num_kv_heads, alpha, seed, damage, parent):
  steps = max(round(40 * alpha * 10) // 2 * 2, 0)
  config = config_of(num_kv_heads, seed, init_from=str(converted))
  config['uptrain'] |= {'alpha': alpha, 'parent_steps': 10 * STEPS}
  config['train']['num_steps'] = steps
  floor = 1.42 + 0.04 * math.log2(HEADS / num_kv_heads) + 0.01 * seed

  def loss(step):
    return floor + damage * math.exp(-step / 6)

  name = f'{converted.name}-a{alpha:g}-s{seed}'
  write_run(root / name, config, loss, steps, parent=parent)


class FakeRun:
  """Takes the predicted time and a fifth more; runs out of memory never."""

  def __init__(self, cell, params):
    self.cell, self.turn = cell, 0
    self.info = {
      'cache_bytes': cell.cache_bytes,
      'weight_bytes': cell.weight_bytes,
      'compile_seconds': 1.0,
    }

  def prefill(self):
    return 0.5

  def decode(self):
    self.turn += 1
    seconds = self.cell.predict(**FakeMachine.LIMITS).seconds
    return self.cell.steps * (seconds * (1.2 + 0.03 * self.turn) + 2e-5)

  def close(self):
    pass


class FakeMachine:
  LIMITS = {'bandwidth': 25e9, 'peak': 200e9}

  def __init__(self, dtypes, read_bytes):
    pass

  def sample(self):
    pass

  clear = sample

  def row(self, dtype):
    return {'read_bandwidth': 25e9, 'matrix_flops': 200e9}


def write_benchmark(path, monkeypatch, **overrides):
  """Rows of the benchmark itself, on a machine that is made up."""
  monkeypatch.setattr(measure, 'Run', FakeRun)
  monkeypatch.setattr(measure, 'make_params', lambda *a: None)
  monkeypatch.setattr(limits, 'Machine', FakeMachine)
  config = decode_cost.get_config()
  config.model.update(**SHAPE)
  config.grid.num_kv_heads = (8, 4, 2, 1)
  config.grid.batch_size = (1, 8)
  config.grid.context = (512, 2048)
  config.update_from_flattened_dict(overrides)
  benchmark.run(config, str(path))


def write_positions(path):
  cached = [2e-3 + 1e-6 * i for i in range(200)]
  uncached = [3e-3 + 1e-4 * i for i in range(200)]
  row = {
    'what': 'cached_vs_uncached',
    'work': {
      'prompt_len': 24,
      'config': {'num_layers': 12, 'embed_dim': 768, 'dtype': 'float32'},
    },
    'device': {'platform': 'cpu', 'kind': 'made up'},
    'cached_seconds': sum(cached),
    'uncached_seconds': sum(uncached),
    'cached_token_seconds': cached,
    'uncached_token_seconds': uncached,
  }
  path.write_text(json.dumps(row) + '\n')


def write_sweep(path):
  """One point done, one failed at its start, one that never began."""
  points = [
    layout.Point(i, name, name, 'train', 'x.py', {'seed': i}, (), 'command')
    for i, name in enumerate(['000-a', '001-b', '002-c', '003-d'])
  ]
  sweep = layout.make_sweep(path, 'x.py', '', str(path), points)
  for point, state, code in zip(
    points,
    ['done', 'failed', 'waiting', 'failed'],
    [0, 1, None, 1],
    strict=True,
  ):
    layout.write_json(
      sweep.directory(point) / 'state.json',
      {'state': state, 'attempts': 1, 'exit_code': code},
    )
  layout.write_results(sweep)
  config = config_of(4, seed=5)
  config['optim']['learning_rate'] = 0.5
  for name, last, spike in (('000-a', STEPS, 0), ('003-d', 30, 11)):
    folder = path / name
    files = {f.name: f.read_bytes() for f in folder.iterdir()}
    for file in folder.iterdir():
      file.unlink()
    folder.rmdir()
    write_run(folder, config, lambda s: loss_at(s, 4, 5), last, spike)
    for file, content in files.items():
      (folder / file).write_bytes(content)


def build(root, monkeypatch):
  """Everything that a report can show, and what is broken beside it."""
  for heads in (8, 4, 2, 1):
    for seed in range(3):
      write_run(
        root / f'scratch/kv{heads}-s{seed}',
        config_of(heads, seed),
        lambda s, heads=heads, seed=seed: loss_at(s, heads, seed),
      )
    if heads < HEADS:
      config = config_of(heads, **{'model.match_params': True})
      write_run(
        root / f'scratch/kv{heads}-matched',
        config,
        lambda s, heads=heads: loss_at(s, heads) - 0.02,
      )
  small = config_of(4, **{'model.num_heads': 4, 'model.embed_dim': 64})
  small['model']['mlp_dim'] = 176
  write_run(root / 'scratch/small', small, lambda s: loss_at(s, 8) + 0.2)
  parent = root / 'scratch/kv8-s0'
  for heads in (4, 2, 1):
    for method, grouping, damage in (
      ('mean', 'contiguous', 2.1),
      ('first', 'contiguous', 2.6),
      ('low_rank', 'similarity', 0.5),
    ):
      damage = damage * math.log2(HEADS / heads) / 3
      path = root / f'converted/{method}-kv{heads}'
      meta = write_conversion(path, parent, heads, method, grouping, damage)
      if method == 'first' or (method == 'mean' and heads != 1):
        continue
      for alpha in ALPHAS:
        for seed in range(2):
          write_uptrained(
            root / 'uptrained', path, heads, alpha, seed, damage, meta
          )
  write_benchmark(root / 'decode', monkeypatch)
  write_benchmark(
    root / 'capacity',
    monkeypatch,
    **{
      'grid.batch_size': (1,),
      'grid.context': (2048,),
      'grid.fill_memory': True,
      'memory_limit': 200_000_000,
    },
  )
  write_positions(root / 'cached_vs_uncached.jsonl')
  speed = {
    'system': 'gqa',
    'shape': 't10',
    'tokens_per_second': 3000.0,
    'low': 2900.0,
    'high': 3100.0,
    'share_of_float32_peak': 0.6,
    'run': 1,
  }
  (root / 'training_speed.jsonl').write_text(json.dumps(speed) + '\n')
  write_sweep(root / 'sweep')
  write_run(
    root / 'broken/killed', config_of(2, 7), lambda s: loss_at(s, 2), last=30
  )
  with open(root / 'broken/killed/metrics.jsonl', 'a') as file:
    file.write('{"step": 31, "train/lo')
  write_run(
    root / 'broken/diverged',
    config_of(1, 8),
    lambda s: loss_at(s, 1),
    last=40,
    spike=21,
  )
  empty = root / 'broken/empty'
  empty.mkdir()
  workdir_lib.save_config(empty, config_of(8, 9))
  unreadable = root / 'broken/unreadable'
  unreadable.mkdir()
  (unreadable / 'config.json').write_text('{"model": ')
  return root


def model_of(path):
  """The model of a run, read anew."""
  config = json.loads((path / 'config.json').read_text())
  return ModelConfig.from_dict(config['model'])
