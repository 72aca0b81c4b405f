"""The benchmark measures each cell once, on the same work, and says so."""

import dataclasses
import json
import sys
import textwrap

import numpy as np
import pytest

from experiments import cached_vs_uncached, decode_cost
from gqa import benchmark, cells, limits, measure, results, workers
from gqa import cache as cache_lib
from gqa.config import ModelConfig

L, N, H, V = 2, 4, 4, 31


def tiny(**overrides):
  """A config whose cells take no time."""
  config = decode_cost.get_config()
  config.model.update(
    vocab_size=V,
    num_layers=L,
    embed_dim=16,
    num_heads=N,
    head_dim=H,
    mlp_dim=24,
    max_len=64,
  )
  config.grid.update(num_kv_heads=(4, 1), batch_size=(1, 2), context=(6,))
  config.prefill.max_tokens = 8
  config.update(steps=3, rounds=2, read_bytes=4096)
  config.update_from_flattened_dict(overrides)
  return config


class FakeRun:
  """Takes a second for each step, without computing."""

  log = []

  def __init__(self, cell, params):
    self.cell = cell
    self.info = {'cache_bytes': cell.cache_bytes, 'seed': 'not mine'}
    self.log.append(('open', cell))

  def prefill(self):
    self.log.append(('prefill', self.cell))
    return 2.0

  def decode(self):
    self.log.append(('decode', self.cell))
    return float(self.cell.steps)

  def close(self):
    self.log.append(('close', self.cell))


class FakeMachine:
  """10 bytes and 100 FLOPs per second."""

  def __init__(self, dtypes, read_bytes):
    pass

  def sample(self):
    pass

  clear = sample

  def row(self, dtype):
    return {'read_bandwidth': 10.0, 'matrix_flops': 100.0}


@pytest.fixture
def calls(monkeypatch):
  """Replaces all that computes; returns the calls that were made."""
  monkeypatch.setattr(FakeRun, 'log', [])
  monkeypatch.setattr(measure, 'Run', FakeRun)
  monkeypatch.setattr(measure, 'make_params', lambda *a: None)
  monkeypatch.setattr(limits, 'Machine', FakeMachine)
  return FakeRun.log


def opened(calls):
  return [cell for what, cell in calls if what == 'open']


def lines(workdir):
  return (workdir / results.FILE).read_text().splitlines()


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """Rows of real cells, of which one layer says enough."""
  config = tiny(
    **{
      'model.num_layers': 1,
      'model.sliding_window': 4,
      'grid.num_kv_heads': (1,),
      'grid.batch_size': (1, 2),
      'grid.cache_len': (16,),
      'grid.cache_kind': ('ring', 'int8'),
      'grid.cache_dtype': ('bfloat16',),
    }
  )
  ends = []

  class Watched(measure.Run):
    def decode(self):
      seconds = super().decode()
      ends.append(int(self._state.cache.length))
      return seconds

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(measure, 'Run', Watched)
    rows = benchmark.run(config, tmp_path_factory.mktemp('benchmark'))
  return rows, ends


def test_every_call_starts_at_the_context(measured):
  assert measured[1] == [6 + 3] * 4 * (1 + 2)


def test_measured_bytes_are_those_of_the_formula(measured):
  rows, _ = measured
  assert len(rows) == 4
  for row in rows:
    assert row['cache_bytes'] == row['cache_bytes_by_formula'] > 0
    assert row['weight_bytes'] == row['weight_bytes_by_formula'] > 0
  # Four slots of a window; two bytes for each number of K and V.
  assert rows[0]['cache_bytes'] == 4 * 2 * H * 2 + 8
  # Room for 16 tokens; one byte for each number, four for each scale.
  assert rows[1]['cache_bytes'] == 16 * 2 * (H + 4) + 8


def test_a_made_up_cache_lies_where_the_empty_one_did():
  config = cells.from_config(tiny())[0].model
  empty = cache_lib.init_cache(config, 2, 16, 'int8')
  made_up = measure.fill(empty, 0)
  for before, after in zip(empty.layers, made_up.layers, strict=True):
    assert before.k.is_deleted() and before.v.is_deleted()
    assert np.unique(after.k).size > 100 and np.unique(after.v).size > 100


def test_a_row_has_what_one_needs_to_judge_it(measured):
  for row in measured[0]:
    assert row == json.loads(json.dumps(row))
    assert len(row['step_seconds_samples']) == row['rounds'] == 2
    low, high = row['step_seconds_low'], row['step_seconds_high']
    assert 0 < low <= row['step_seconds'] <= high
    assert row['tokens_per_second'] == row['batch_size'] / row['step_seconds']
    assert row['relative_error'] == pytest.approx(
      row['step_seconds'] / row['predicted_step_seconds'] - 1
    )
    assert row['compile_seconds'] > 0
    assert row['read_bandwidth'] > 0 and row['matrix_flops'] > 0
    assert row['versions']['jax'] and row['device']['platform'] == 'cpu'
    assert {'git_revision', 'seed', 'date', 'model', 'group'} <= set(row)
    # Twelve tokens are more than max_tokens: their caches were made up.
    assert row['prefill'] == ('measured', 'filled')[row['batch_size'] - 1]
    assert ('prefill_seconds' in row) == (row['prefill'] == 'measured')


def test_the_bytes_of_a_step_are_weights_once_and_live_keys_and_values(
  calls, tmp_path
):
  config = tiny(**{'grid.num_kv_heads': (1,), 'grid.batch_size': (2,)})
  (row,) = benchmark.run(config, tmp_path)
  # Of the three steps, the one in the middle sees 6 + 2 tokens.
  assert row['step_kv_bytes'] == 2 * (6 + 2) * L * 2 * 1 * H * 4
  # The embedding is read as the head.
  layer = 16 * H * (2 * N + 2 * 1) + 3 * 16 * 24 + 2 * 16
  assert row['step_weight_bytes'] == 4 * (V * 16 + 16 + L * layer)
  moved = row['step_weight_bytes'] + row['step_kv_bytes']
  assert row['bandwidth'] == moved  # in a second
  assert row['kv_bandwidth'] == row['step_kv_bytes']
  assert row['predicted_step_seconds'] == max(
    moved / 10, row['step_flops'] / 100
  )


def test_cells_of_a_group_take_turns(calls, tmp_path):
  config = tiny(**{'grid.context': (4, 6)})
  rows = benchmark.run(config, tmp_path)
  assert {row['group'] for row in rows} == {1}
  assert {row['group_cells'] for row in rows} == {8}
  order = opened(calls)
  assert [c for what, c in calls if what == 'decode'] == order * 3
  read = [cell for cell in order if cell.prefill == 'measured']
  assert [c for what, c in calls if what == 'prefill'] == read * 2
  assert [c for what, c in calls if what == 'close'] == order


def test_groups_fit_into_memory_and_keep_compared_cells_together(tmp_path):
  config = tiny(**{'grid.context': (4, 6, 8), 'grid.batch_size': (1,)})
  all_cells = cells.from_config(config)
  limit = cells.memory_bytes(all_cells) - 1
  groups = list(cells.groups(all_cells, limit))
  assert sum(groups, []) == all_cells
  assert len(groups) == 2
  for group in groups:
    assert cells.memory_bytes(group) <= limit
    assert {cell.model.num_kv_heads for cell in group} == {4, 1}
  alone = max(cells.memory_bytes([cell]) for cell in all_cells)
  assert [len(g) for g in cells.groups(all_cells, alone)] == [1] * 6


def test_cells_share_weights_whatever_they_compute_in():
  config = tiny(**{'grid.dtype': ('float32', 'bfloat16')})
  config.grid.update(weights_dtype=('float32',), num_kv_heads=(1,))
  first, second, *_ = cells.from_config(config)
  assert first.model.dtype != second.model.dtype
  alone = cells.memory_bytes([second])
  more = cells.memory_bytes([first, second]) - cells.memory_bytes([first])
  assert more == alone - second.weight_bytes == second.cache_bytes


def test_the_same_command_continues(calls, tmp_path):
  first = benchmark.run(tiny(**{'grid.batch_size': (1,)}), tmp_path)
  before = lines(tmp_path)
  calls.clear()
  again = benchmark.run(tiny(**{'grid.batch_size': (1,)}), tmp_path)
  assert again == first
  assert lines(tmp_path) == before
  assert not calls
  more = benchmark.run(tiny(), tmp_path)
  assert more[:2] == first
  assert [cell.batch_size for cell in opened(calls)] == [2, 2]
  assert more[2]['group'] == 2


@pytest.mark.parametrize(
  'change',
  [{'steps': 4}, {'seed': 1}, {'rounds': 3}, {'model.mlp_dim': 32}],
)
def test_what_defines_a_cell_makes_another_cell(calls, tmp_path, change):
  benchmark.run(tiny(), tmp_path)
  calls.clear()
  benchmark.run(tiny(**change), tmp_path)
  assert len(opened(calls)) == 4


def test_a_torn_line_is_measured_again(calls, tmp_path):
  benchmark.run(tiny(), tmp_path)
  path = tmp_path / results.FILE
  path.write_bytes(path.read_bytes()[:-20])
  calls.clear()
  rows = benchmark.run(tiny(), tmp_path)
  assert len(opened(calls)) == 1
  assert len(rows) == len(lines(tmp_path)) == 4
  path.write_text('{"no": "row"}\n')
  with pytest.raises(ValueError, match='line 1 is no row'):
    benchmark.run(tiny(), tmp_path)


def test_what_does_not_fit_is_recorded_until_it_does(calls, tmp_path, capsys):
  small, large = (cells.from_config(tiny())[i] for i in (0, 2))
  limit = cells.memory_bytes([large]) - 1
  assert cells.memory_bytes([small]) < limit
  rows = benchmark.run(tiny(memory_limit=limit), tmp_path)
  skipped = [row for row in rows if row['status'] == 'skipped']
  assert [(r['num_kv_heads'], r['batch_size']) for r in skipped] == [(4, 2)]
  assert f'memory_limit={limit}' in skipped[0]['reason']
  assert skipped[0]['reason'] in capsys.readouterr().err
  assert skipped[0]['reason'] in results.table(rows)
  before = lines(tmp_path)
  benchmark.run(tiny(memory_limit=limit), tmp_path)
  assert lines(tmp_path) == before
  rows = benchmark.run(tiny(), tmp_path)
  assert {row['status'] for row in rows} == {'measured'}


def test_a_cell_that_runs_out_of_memory_leaves_the_others(
  calls, tmp_path, monkeypatch
):
  def decode(self):
    if self.cell.batch_size == 2:
      raise benchmark.jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 1 GiB')
    return 1.0

  monkeypatch.setattr(FakeRun, 'decode', decode)
  rows = benchmark.run(tiny(), tmp_path)
  status = [row['status'] for row in rows]
  assert status == ['measured', 'measured', 'skipped', 'skipped']
  assert 'out of memory' in rows[2]['reason']


def test_curves_are_written_once(calls, tmp_path):
  config = tiny(**{'grid.context': (4, 6), 'grid.batch_size': (1,)})
  benchmark.run(config, tmp_path)
  benchmark.run(config, tmp_path)
  points = [
    json.loads(line)
    for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()
  ]
  tag = 'step_ms_by_context/gqa_kv1_full_float32_batch_size1'
  assert [p['step'] for p in points if tag in p] == [4, 6]
  tag = 'step_ms_by_batch_size/gqa_kv1_full_float32_context6'
  assert [p['step'] for p in points if tag in p] == [1]
  assert len(list(tmp_path.glob('events.out.tfevents.*'))) == 2


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'grid.num_kv_heads': (3,)}, 'num_kv_heads=3 must divide num_heads=4'),
    ({'grid.batch_size': (0,)}, 'grid.batch_size has 0'),
    ({'grid.context': ()}, 'grid.context is empty'),
    ({'grid.cache_kind': ('half',)}, "grid.cache_kind has 'half'; choose"),
    ({'grid.cache_kind': ('ring',)}, 'model.sliding_window is unset'),
    ({'grid.dtype': ('float32,int8',)}, "grid.dtype has 'int8'"),
    ({'grid.cache_dtype': ('fp8',)}, "grid.cache_dtype has 'fp8'"),
    ({'grid.context': (62,)}, 'more than model.max_len=64; raise that'),
    ({'model.num_kv_heads': 2}, 'model.num_kv_heads=2 is not read; set grid'),
    (
      {'grid.cache_len': (8,)},
      'grid.context=6 and steps=3 do not fit into a cache of grid.cache_len=8',
    ),
    ({'grid.cache_len': (65,)}, 'grid.cache_len=65: 65 tokens are more than'),
    ({'grid.cache_len': (-1,)}, 'grid.cache_len has -1; .* at least 0'),
    ({'steps': 0}, 'steps=0 must be at least 1'),
    ({'rounds': 0}, 'rounds=0 must be at least 1'),
    ({'prefill.chunk_size': 0}, 'prefill.chunk_size=0 must be at least 1'),
    ({'memory_limit': 0}, 'memory_limit=0 must be at least 1'),
    ({'peers.systems': ()}, 'peers.systems is empty'),
    ({'peers.module': 'no.such.module'}, "peers.module='no.such.module'"),
  ],
)
def test_bad_input_is_refused_before_anything_is_done(
  calls, tmp_path, change, message
):
  with pytest.raises(ValueError, match=message):
    benchmark.run(tiny(**change), tmp_path / 'new', peers=True)
  assert not calls
  assert not (tmp_path / 'new').exists()


def test_a_config_of_another_kind_is_refused(tmp_path):
  config = tiny()
  del config.grid
  with pytest.raises(ValueError, match='no field grid'):
    benchmark.run(config, tmp_path)


def test_words_of_the_command_line_are_split_at_commas():
  config = tiny(**{'grid.dtype': ('float32,bfloat16',)})
  assert len(cells.from_config(config)) == 8


def test_spread_names_median_range_and_quartiles():
  assert limits.spread('x', [5.0, 1.0, 3.0, 2.0, 4.0]) == {
    'x': 3.0,
    'x_low': 1.0,
    'x_high': 5.0,
    'x_iqr': 2.0,
  }
  assert limits.spread('x', [2.0])['x_iqr'] == 0.0


PEER = """
import json, os, sys
for line in sys.stdin:
  request = json.loads(line)
  do, cell = request['do'], request.get('cell')
  answer = {'ok': {}}
  if do == 'start':
    answer['ok'] = {'versions': {'fake': '1.0'}}
    if request['system'] == 'absent':
      answer = {'missing': 'absent is not installed'}
    if request['system'] == 'unknown':
      answer = {'error': 'there is no unknown'}
    name = request['system']
  if do == 'open':
    answer['ok'] = {'cache_bytes': 1}
    if cell['batch_size'] == 2:
      answer = {'unsupported': 'one row is enough'}
    else:
      last = cell
  if do == 'prefill':
    answer['ok'] = {'seconds': 1.0}
  if do == 'decode':
    if name == 'dying':
      sys.exit()
    rows = last['batch_size']
    count = rows * last['steps'] - (name == 'lazy')
    shape = [rows, last['model']['vocab_size']]
    answer['ok'] = {'seconds': 6.0, 'tokens': count, 'logits': shape}
  print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peers(calls, tmp_path, monkeypatch):
  """Runs a peer of a name beside gqa and returns the rows of both."""
  (tmp_path / 'fake_peer.py').write_text(textwrap.dedent(PEER))
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])

  def run(name, **changes):
    config = tiny(**{'grid.num_kv_heads': (1,)} | changes)
    config.peers.update(module='fake_peer', systems=(name,))
    rows = benchmark.run(config, tmp_path / 'run', peers=True)
    gqa, peer = (
      [r for r in rows if (r['system'] == 'gqa') == ours] for ours in (1, 0)
    )
    assert {row['status'] for row in gqa} == {'measured'}
    return gqa, peer

  return run


def test_a_peer_runs_the_same_cells_in_the_same_rounds(peers):
  gqa, (peer, refused) = peers('fake')
  assert peer['status'] == 'measured'
  assert peer['step_seconds'] == 2.0
  assert peer['group'] == gqa[0]['group']
  assert peer['versions']['fake'] == '1.0'
  # A peer has as much room as it needs, we have whole tiles.
  assert (peer['slots'], gqa[0]['slots']) == (9, 64)
  for row in (peer, gqa[0]):
    assert row['cache_bytes_by_formula'] == 64 * row['slots'] + 8
  assert refused['status'] == 'skipped'
  assert refused['reason'] == 'one row is enough'
  ratios = [
    line.split()[-4] for line in results.table([gqa[0], peer]).splitlines()
  ]
  assert ratios[-2:] == ['1.00', '2.00']


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('absent', 'absent is not installed'),
    ('dying', 'ended when told to decode'),
    ('lazy', 'tokens are 2, not 3: not the same work'),
  ],
)
def test_a_peer_that_fails_is_recorded_and_does_not_stop_the_run(
  peers, name, reason
):
  _, rows = peers(name, **{'grid.batch_size': (1,)})
  (row,) = rows
  assert row['status'] == 'skipped'
  assert reason in row['reason']


def test_an_unknown_peer_is_refused(peers):
  with pytest.raises(ValueError, match='peers.systems: there is no unknown'):
    peers('unknown')


@pytest.mark.parametrize(
  ('system', 'package'),
  [
    ('transformers-dynamic', 'transformers'),
    ('transformers-static', 'transformers'),
    ('llama.cpp', 'llama_cpp'),
  ],
)
def test_real_peers_do_the_same_work(calls, tmp_path, system, package):
  pytest.importorskip('torch')
  pytest.importorskip(package)
  config = tiny(**{'grid.num_kv_heads': (2,), 'grid.batch_size': (1, 2)})
  config.model.update(embed_dim=32, head_dim=8, mlp_dim=32)
  config.grid.update(dtype=('float32', 'bfloat16'), cache_kind=('full', 'int8'))
  config.peers.systems = (system,)
  rows = benchmark.run(config, tmp_path, peers=True)
  rows = [row for row in rows if row['system'] == system]
  for row in rows:
    assert (row['status'] == 'measured') == (row['cache_kind'] == 'full')
    if row['cache_kind'] == 'full' and row['cache_bytes'] is not None:
      counters = 4 + 4 * row['batch_size']
      assert row['cache_bytes'] <= row['cache_bytes_by_formula'] - counters
  assert len(rows) == 8


def test_cached_and_uncached_give_the_same_text(tmp_path):
  work = cached_vs_uncached.Work(
    config=ModelConfig(
      vocab_size=V,
      num_layers=L,
      embed_dim=16,
      num_heads=N,
      head_dim=H,
      mlp_dim=24,
      max_len=16,
    ),
    prompt_len=5,
    new_tokens=10,
    steps=3,
    bucket=8,
    repeats=2,
  )
  path = tmp_path / 'lines.jsonl'
  about = {'work': dataclasses.asdict(work)}
  log = cached_vs_uncached.Log(about, path)
  result = cached_vs_uncached.compare(work, log)
  assert result['same_tokens'] == 10
  assert len(result['cached_token_seconds']) == 10
  assert len(result['uncached_token_seconds']) == 10
  before = path.read_text()
  again = cached_vs_uncached.Log(json.loads(json.dumps(about)), path)
  assert cached_vs_uncached.compare(work, again) == result
  assert path.read_text() == before
  cached_vs_uncached.plot(work, result, tmp_path / 'plot.svg')
  assert 'without a cache' in (tmp_path / 'plot.svg').read_text()


def test_the_protocol_survives_what_is_no_json(tmp_path, monkeypatch):
  (tmp_path / 'chatty_peer.py').write_text("print('hello', flush=True)")
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
  with pytest.raises(ValueError, match="said 'hello' when told to start"):
    workers.Worker('chatty_peer', 'any', False, 0)
