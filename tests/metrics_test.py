import dataclasses
import io
import json
import math
import sys
import time
import types
import urllib.request

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
from tensorboard import default, program
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from gqa import cost, metrics, peaks
from gqa import model as model_lib
from gqa import progress as progress_lib
from gqa.config import ModelConfig

CONFIG = ModelConfig(
  vocab_size=11,
  num_layers=2,
  embed_dim=6,
  num_heads=4,
  num_kv_heads=(4, 1),
  head_dim=2,
  mlp_dim=5,
  max_len=16,
)


def read_lines(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def load_events(workdir):
  events = event_accumulator.EventAccumulator(
    str(workdir), size_guidance={event_accumulator.TENSORS: 0}
  )
  events.Reload()
  return events


def read_curve(workdir, tag='loss'):
  """Steps, values and wall times as a reader of the directory sees them."""
  points = load_events(workdir).Tensors(tag)
  values = [float(tensor_util.make_ndarray(p.tensor_proto)) for p in points]
  return [p.step for p in points], values, [p.wall_time for p in points]


def event_files(workdir):
  return sorted(workdir.glob('events.out.tfevents.*'))


def tear(path, num_bytes):
  path.write_bytes(path.read_bytes()[:-num_bytes])


def write_life(workdir, steps, offset=0.0, first_step=0):
  writer = metrics.Writer(workdir, first_step)
  for step in steps:
    writer.scalars(step, {'loss': step + offset})
    if step % 5 == 0:
      writer.scalars(step, {'eval/loss': step + offset})
  writer.flush()
  return writer


@pytest.mark.parametrize('torn', [0, 7])
def test_resuming_an_older_step_leaves_each_step_once(tmp_path, torn):
  write_life(tmp_path, range(1, 16)).close()  # a checkpoint at 10, a crash
  if torn:
    tear(event_files(tmp_path)[0], torn)
    tear(tmp_path / 'metrics.jsonl', torn)
  write_life(tmp_path, range(11, 21), offset=0.5, first_step=11).close()

  steps, values, times = read_curve(tmp_path)
  expected = [s + 0.5 * (s > 10) for s in range(1, 21)]
  assert steps == list(range(1, 21))
  assert values == expected
  assert times == sorted(times)
  assert read_curve(tmp_path, 'eval/loss')[0] == [5, 10, 15, 20]
  lines = [line for line in read_lines(tmp_path) if 'loss' in line]
  assert [line['step'] for line in lines] == list(range(1, 21))
  assert [line['loss'] for line in lines] == expected


def test_a_tag_that_is_written_seldom_keeps_no_stale_point(tmp_path):
  write_life(tmp_path, range(1, 16)).close()
  write_life(tmp_path, range(11, 13), first_step=11).close()
  assert read_curve(tmp_path, 'eval/loss')[0] == [5, 10]


def test_a_torn_tail_is_healed_and_nothing_else_is_lost(tmp_path):
  write_life(tmp_path, range(1, 6)).close()
  whole = event_files(tmp_path)[0].read_bytes()
  lines = (tmp_path / 'metrics.jsonl').read_bytes()
  with open(event_files(tmp_path)[0], 'ab') as file:
    file.write(whole[:9])
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"step": 6, "lo')
  metrics.Writer(tmp_path, first_step=6).close()
  assert event_files(tmp_path)[0].read_bytes() == whole
  assert (tmp_path / 'metrics.jsonl').read_bytes() == lines


def test_starting_again_from_nothing_forgets_everything(tmp_path):
  write_life(tmp_path, range(1, 6)).close()
  write_life(tmp_path, [1], offset=0.5).close()
  assert read_curve(tmp_path)[:2] == ([1], [1.5])
  assert [line['loss'] for line in read_lines(tmp_path)] == [1.5]


def test_the_file_of_a_later_life_is_read_later(tmp_path):
  write_life(tmp_path, [1]).close()
  name = event_files(tmp_path)[0].name.split('.')
  earlier = tmp_path / '.'.join([*name[:3], str(int(time.time())), 'z'])
  event_files(tmp_path)[0].rename(earlier)
  write_life(tmp_path, [2], first_step=2).close()
  assert event_files(tmp_path)[0] == earlier


def test_resuming_opens_a_session_at_its_first_step(tmp_path):
  write_life(tmp_path, [1]).close()
  write_life(tmp_path, [2], first_step=2).close()
  starts = []
  for path in event_files(tmp_path):
    loader = metrics.event_file_loader.RawEventFileLoader(str(path))
    for record in loader.Load():
      event = metrics.event_pb2.Event.FromString(record)
      if event.HasField('session_log'):
        starts.append(event.step)
  assert starts == [0, 2]


def test_lines_are_strict_json_also_for_infinite_numbers(tmp_path):
  values = {
    'a': math.nan,
    'b': -math.inf,
    'c': jnp.float32(0.5),
    'd': np.int64(3),
    'e': jnp.inf,
  }
  with metrics.Writer(tmp_path) as writer:
    writer.scalars(1, values)

  def refuse(constant):
    raise ValueError(constant)

  line = json.loads(
    (tmp_path / 'metrics.jsonl').read_text(), parse_constant=refuse
  )
  assert line.pop('wall_time') > 0
  assert line == {
    'step': 1,
    'a': 'NaN',
    'b': '-Infinity',
    'c': 0.5,
    'd': 3,
    'e': 'Infinity',
  }
  assert float(line['b']) == -math.inf
  assert math.isnan(read_curve(tmp_path, 'a')[1][0])


def test_text_and_figures_are_read_back(tmp_path):
  figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
  figure.add_subplot().plot([1, 2])
  with metrics.Writer(tmp_path) as writer:
    writer.text(0, 'config', metrics.markdown_table({'a.b': 1, 'c': 'x|y'}))
    writer.figure(3, 'curve', figure)
  events = load_events(tmp_path)
  text = tensor_util.make_ndarray(events.Tensors('config')[0].tensor_proto)
  assert text[0].decode().splitlines()[2:] == [
    '| a.b | `1` |',
    '| c | `x\\|y` |',
  ]
  image = events.Tensors('curve')[0]
  width, height, png = tensor_util.make_ndarray(image.tensor_proto)
  assert (width, height, png[:4]) == (b'100', b'50', b'\x89PNG')
  assert image.step == 3
  plugins = [
    events.SummaryMetadata(tag).plugin_data.plugin_name
    for tag in ('config', 'curve')
  ]
  assert plugins == ['text', 'images']


@pytest.fixture
def serve(tmp_path):
  """Ask TensorBoard's own HTTP backend about `tmp_path`."""
  server = program.TensorBoard(plugins=default.get_plugins())
  arguments = ['--logdir', str(tmp_path), '--load_fast=false', '--port=0']
  server.configure([None, *arguments])
  url = []

  def ask(path, request):
    if not url:
      url.append(server.launch().rstrip('/'))
    body = json.dumps(request).encode()
    post = urllib.request.Request(
      f'{url[0]}/data/plugin/{path}',
      body,
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(post, timeout=30) as reply:
      return json.load(reply)

  return ask


def write_hparams(workdir, group, kv_heads, loss, ok=True, first_step=0):
  workdir.mkdir(exist_ok=True)
  with metrics.Writer(workdir, first_step) as writer:
    values = {'kv_heads': kv_heads, 'norm': 'rmsnorm', 'tied': True, 'w': None}
    writer.hparams(values, group)
    writer.scalars(first_step + 1, {'eval/loss': loss, 'loss': 9.0})
    if ok is not None:
      writer.session_end(ok)


def test_tensorboard_shows_a_row_for_each_run(tmp_path, serve):
  write_hparams(tmp_path / 'a', 'sweep/a', 2, 3.0, ok=False)
  write_hparams(tmp_path / 'a', 'sweep/a', 2, 2.0, first_step=2)  # resumed
  write_hparams(tmp_path / 'b', 'sweep/b', 1, 2.5, ok=False)
  write_hparams(tmp_path / 'c', 'sweep/c', 4, 7.0, ok=None)

  experiment = serve('hparams/experiment', {'experimentName': ''})
  assert {c['name']: c['type'] for c in experiment['hparamInfos']} == {
    'kv_heads': 'DATA_TYPE_FLOAT64',
    'norm': 'DATA_TYPE_STRING',
    'tied': 'DATA_TYPE_BOOL',
    'w': 'DATA_TYPE_STRING',
  }
  tags = [m['name']['tag'] for m in experiment['metricInfos']]
  assert tags == ['eval/loss']

  found = serve(
    'hparams/session_groups',
    {
      'experimentName': '',
      'allowedStatuses': [
        'STATUS_SUCCESS',
        'STATUS_FAILURE',
        'STATUS_RUNNING',
        'STATUS_UNKNOWN',
      ],
      'colParams': [{'hparam': 'kv_heads'}],
      'startIndex': 0,
      'sliceSize': 100,
    },
  )
  rows = {
    group['name']: (
      group['hparams']['kv_heads'],
      group['metricValues'][0]['value'],
      group['sessions'][0]['status'],
    )
    for group in found['sessionGroups']
  }
  assert rows == {
    'sweep/a': (2.0, 2.0, 'STATUS_SUCCESS'),
    'sweep/b': (1.0, 2.5, 'STATUS_FAILURE'),
    'sweep/c': (4.0, 7.0, 'STATUS_UNKNOWN'),
  }


def test_a_run_that_resumes_no_longer_counts_as_ended(tmp_path):
  write_hparams(tmp_path, 'a', 2, 3.0, ok=False)
  assert '_hparams_/session_end_info' in load_events(tmp_path).Tags()['tensors']
  metrics.Writer(tmp_path, first_step=2).close()
  tags = load_events(tmp_path).Tags()['tensors']
  assert '_hparams_/session_end_info' not in tags
  assert '_hparams_/session_start_info' in tags


def test_only_process_0_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  with metrics.make_writer(tmp_path) as writer:
    writer.scalars(1, {'loss': 1.0})
    writer.hparams({'a': 1}, group='a')
    writer.session_end(True)
  stream = io.StringIO()
  progress_lib.Progress(10, stream=stream).update(5)
  assert not list(tmp_path.iterdir())
  assert not stream.getvalue()
  monkeypatch.setattr(jax, 'process_index', lambda: 0)
  with metrics.make_writer(tmp_path) as writer:
    writer.scalars(1, {'loss': 1.0})
  assert len(read_lines(tmp_path)) == 1


def test_tensorflow_is_not_imported(tmp_path):
  write_life(tmp_path, [1]).close()
  assert 'tensorflow' not in sys.modules


@pytest.mark.parametrize('window', [None, 3])
@pytest.mark.parametrize('mlp', ['swiglu', 'gelu'])
def test_flops_are_six_per_weight_and_pair(window, mlp):
  config = dataclasses.replace(CONFIG, sliding_window=window, mlp=mlp)
  seq_len = 8
  weights = 11 * 6  # the head
  for num_kv_heads in (4, 1):
    weights += 6 * 4 * 2 * 2 + 6 * num_kv_heads * 2 * 2
    weights += 6 * 5 * (3 if mlp == 'swiglu' else 2)
  t, s = np.indices((seq_len, seq_len))
  pairs = ((s <= t) & (t - s < (window or seq_len))).sum()
  attention = 2 * 4 * 2 * 2 * pairs  # scores and mixing, 4 heads of 2, 2 layers
  expected = 6 * (weights * seq_len + attention) / seq_len
  assert cost.train_flops_per_token(config, seq_len) == pytest.approx(
    expected, rel=1e-12
  )


def test_cache_bytes_count_the_kv_heads_of_each_layer():
  assert cost.kv_bytes_per_token(CONFIG, 2) == 2 * 2 * 2 * (4 + 1)


@pytest.mark.parametrize(
  'kind, peak',
  [
    ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H200', 989e12),
    ('NVIDIA B200', 2250e12),
    ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('TPU v5p', 459e12),
    ('TPU v6 lite', 918e12),
    ('TPU v4 lite', None),
    ('NVIDIA GeForce RTX 4090', None),
  ],
)
def test_peak_follows_the_kind_of_device(kind, peak):
  device = types.SimpleNamespace(platform='gpu', device_kind=kind)
  assert peaks.peak_flops(device) == peak
  total = peaks.total_peak_flops([device, device])
  assert total == (peak and 2 * peak)
  assert peaks.mfu(1e9, 1e3, peak) == (peak and 1e12 / peak)


def test_cpu_peak_is_measured_once_for_all_its_devices():
  peak = peaks.peak_flops(jax.devices()[0])
  assert peak > 1e8
  assert peaks.peak_flops(jax.devices()[1]) == peak
  assert peaks.total_peak_flops(jax.devices()) == peak


def test_throughput_leaves_out_compiling_and_pauses():
  now = [0.0]
  throughput = progress_lib.Throughput(
    tokens_per_step=100, clock=lambda: now[0]
  )

  def work(seconds, steps):
    now[0] += seconds
    throughput.step(steps)

  assert throughput.rate() == {}
  work(60.0, 1)  # compiles
  assert throughput.rate() == {}
  work(2.0, 1)
  with throughput.paused():
    now[0] += 30.0
  work(4.0, 2)
  assert throughput.rate() == {'step_time': 2.0, 'tokens_per_second': 50.0}
  work(1.0, 1)
  throughput.pause()
  now[0] += 9.0
  assert throughput.rate() == {'step_time': 1.0, 'tokens_per_second': 100.0}
  now[0] += 9.0
  throughput.resume()
  work(4.0, 1)
  assert throughput.rate() == {'step_time': 4.0, 'tokens_per_second': 25.0}


def test_a_pause_before_the_first_step_costs_nothing():
  now = [0.0]
  throughput = progress_lib.Throughput(tokens_per_step=1, clock=lambda: now[0])
  with throughput.paused():
    throughput.step()
    now[0] += 5.0
  now[0] += 1.0
  throughput.step()
  assert throughput.rate()['step_time'] == 1.0


def test_progress_is_a_line_for_each_log_point():
  stream = io.StringIO()
  with progress_lib.Progress(20, stream=stream) as progress:
    progress.update(10, loss=2.5, tokens_per_second=12345.6)
    progress.update(15)
    progress.message('saved')
    progress.update(20, loss=1.0)
  lines = stream.getvalue().splitlines()
  assert lines[0] == 'step 10/20  loss 2.5000  tokens/s 12,346  eta ?'
  assert lines[1].startswith('step 15/20  eta 00:')
  assert lines[2:] == ['saved', 'step 20/20  loss 1.0000  eta 0:00']


def test_progress_is_a_bar_on_a_terminal():
  stream = io.StringIO()
  stream.isatty = lambda: True
  with progress_lib.Progress(20, first=10, stream=stream) as progress:
    progress.update(15, loss=2.5)
    progress.message('saved')
  shown = stream.getvalue()
  assert '15/20' in shown and 'loss=2.5000' in shown and 'saved' in shown
  assert '\r' in shown


def test_memory_is_positive_bytes():
  stats = peaks.memory_stats()
  assert stats['memory/host_peak_bytes'] > 1e7
  assert all(isinstance(value, int) for value in stats.values())


def test_parameters_are_counted_from_arrays_or_shapes():
  params = {'a': jnp.ones((2, 3)), 'b': {'c': jnp.ones(4), 'd': jnp.ones(())}}
  assert model_lib.param_count(params) == 11
  assert model_lib.param_count(jax.eval_shape(lambda: params)) == 11
