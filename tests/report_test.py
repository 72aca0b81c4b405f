"""A report shows what was recorded, all of it, and needs nothing else."""

import csv
import html.parser
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys

import pytest
import recorded
from tensorboard.backend.event_processing import event_accumulator

from gqa import cost, results
from gqa.config import ModelConfig
from gqa.report import __main__ as report
from gqa.report import join, read, recipes

PLOTS = [f'P{i}' for i in range(1, 11)]
TABLES = [f'T{i}' for i in range(1, 10)]
CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  with pytest.MonkeyPatch.context() as monkeypatch:
    yield recorded.build(tmp_path_factory.mktemp('workdir'), monkeypatch)


@pytest.fixture(scope='module')
def written(workdir):
  """The folder of a report of everything."""
  return report.write([workdir]).parent


@pytest.fixture(scope='module')
def found(workdir):
  return read.read([workdir])


@pytest.fixture
def one_run(tmp_path):
  config = recorded.config_of(2)
  recorded.write_run(
    tmp_path / 'runs/one', config, lambda step: recorded.loss_at(step, 2)
  )
  return tmp_path / 'runs'


def rows_of(folder, key):
  with open(folder / f'{key}.csv', newline='') as file:
    return list(csv.DictReader(file))


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def final_loss(run):
  """As a reader of the file would find it."""
  lines = lines_of(run / 'metrics.jsonl')
  return [line['eval/loss'] for line in lines if 'eval/loss' in line][-1]


def test_every_plot_and_table_is_there(written):
  summary = json.loads((written / 'report.json').read_text())
  assert summary['plots'] == PLOTS
  assert summary['tables'][: len(TABLES)] == TABLES
  assert summary['not_drawn'] == []
  for key in PLOTS:
    assert (written / f'{key}.png').read_bytes().startswith(b'\x89PNG')
    assert '<svg' in (written / f'{key}.svg').read_text()
  for key in (*PLOTS, *TABLES):
    assert rows_of(written, key)


def test_losses_are_means_and_deviations_of_the_files(workdir, written):
  rows = {row['recipe']: row for row in rows_of(written, 'T1')}
  row = rows['8 KV heads (multi-head), from scratch']
  losses = [final_loss(workdir / f'scratch/kv8-s{seed}') for seed in range(3)]
  assert float(row['loss']) == pytest.approx(statistics.mean(losses))
  assert float(row['loss_sd']) == pytest.approx(statistics.stdev(losses))
  assert row['seeds'] == '3'


def test_sizes_and_speedups_are_those_of_the_files(workdir, written):
  model = recorded.model_of(workdir / 'scratch/kv1-s0')
  row = next(
    row
    for row in rows_of(written, 'T1')
    if 'scratch/kv1-s0' in row['runs'].split('; ')
  )
  assert int(row['parameters']) == cost.param_count(model)
  assert int(row['kv_bytes_per_token']) == 2 * 4 * model.num_layers * 16
  timed = {}
  for line in lines_of(workdir / 'decode' / results.FILE):
    key = line['num_kv_heads'], line['batch_size'], line['context']
    timed[key] = line['step_seconds']
  for i in (1, 2):
    where = int(row[f'batch_size_{i}']), int(row[f'context_{i}'])
    if (1, *where) in timed:
      assert float(row[f'ms_{i}']) == pytest.approx(1e3 * timed[1, *where])
      speedup = timed[8, *where] / timed[1, *where]
      assert float(row[f'speedup_{i}']) == pytest.approx(speedup)


def test_conversions_and_alphas_are_those_of_the_files(workdir, written):
  rows = {
    (row['kv_heads'], row['method'].split(',')[0]): row
    for row in rows_of(written, 'T2')
  }
  result = json.loads((workdir / 'converted/mean-kv1/convert.json').read_text())
  row = rows['1', 'mean']
  assert float(row['converted']) == result['loss_after']
  assert float(row['parent']) == result['loss_before']
  runs = [workdir / f'uptrained/mean-kv1-a0.05-s{seed}' for seed in range(2)]
  losses = [final_loss(run) for run in runs]
  assert float(row['alpha 0.05']) == pytest.approx(statistics.mean(losses))
  drawn = [
    row
    for row in rows_of(written, 'P3')
    if row['kv_heads'] == '1' and row['method'].startswith('mean')
  ]
  assert [float(row['alpha']) for row in drawn] == list(recorded.ALPHAS)
  assert {row['parent_loss'] for row in drawn} == {'1.41'}


def test_equal_tokens_are_compared_among_runs_that_are_done(written):
  tokens = recorded.STEPS * 4 * 64
  for row in rows_of(written, 'T3'):
    assert 'killed' not in row['scratch']
    assert int(row['scratch_tokens']) == tokens
    assert int(row['total_tokens']) > tokens


def test_matched_parameters_are_compared_at_equal_fields(workdir, written):
  for row in rows_of(written, 'T4'):
    heads = row['kv_heads']
    plain = [final_loss(workdir / f'scratch/kv{heads}-s{i}') for i in range(3)]
    matched = final_loss(workdir / f'scratch/kv{heads}-matched')
    assert float(row['plain_loss']) == pytest.approx(statistics.mean(plain))
    assert float(row['matched_loss']) == pytest.approx(matched)
  assert [row['kv_heads'] for row in rows_of(written, 'T4')] == ['4', '2', '1']


def test_equal_and_largest_batch_are_apart(workdir, written):
  lines = lines_of(workdir / 'capacity' / results.FILE)
  measured = [line for line in lines if line['status'] == 'measured']
  rows = [r for r in rows_of(written, 'T7') if r['runs'] == 'capacity']
  for row in rows:
    heads = int(row['kv_heads'])
    own = [x for x in measured if x['num_kv_heads'] == heads]
    largest = max(own, key=lambda line: line['batch_size'])
    assert int(row['largest_batch']) == largest['batch_size']
    assert float(row['largest_tokens_per_second']) == pytest.approx(
      largest['tokens_per_second']
    )
    assert row['memory_ended'] == 'True'
  assert {row['equal_batch'] for row in rows} == {'16'}


def test_the_largest_batch_fills_the_memory(workdir):
  limit = 200_000_000
  lines = lines_of(workdir / 'capacity' / results.FILE)
  for heads in (8, 4, 2, 1):
    own = [line for line in lines if line['num_kv_heads'] == heads]
    most = max(x['batch_size'] for x in own if x['status'] == 'measured')
    refused = [x for x in own if x['status'] == 'skipped']
    assert [x['batch_size'] for x in refused] == [most + 1]
    assert {x['obstacle'] for x in refused} == {'memory'}
    line = next(x for x in own if x['batch_size'] == most)
    model = ModelConfig.from_dict(line['model'])
    slot = 2 * 4 * sum(model.kv_heads) * model.head_dim
    weights = 4 * cost.param_count(model)
    per_row = slot * line['slots'] + 4  # and its start
    assert most == (limit - weights - 4) // per_row


@pytest.mark.parametrize(
  ('where', 'state', 'why'),
  [
    ('broken/killed', 'unfinished', 'step 29 of 60'),
    ('broken/diverged', 'diverged', 'training loss is nan at step 39'),
    ('broken/empty', 'empty', 'nothing was logged'),
    ('broken/unreadable', 'failed', 'config.json cannot be read'),
    ('broken/killed/metrics.jsonl', 'unreadable', 'is torn'),
    ('sweep/001-b', 'failed', 'exit code 1'),
    ('sweep/002-c', 'waiting', ''),
    ('sweep/003-d', 'diverged', 'exit code 1'),
  ],
)
def test_what_is_not_whole_is_listed(written, where, state, why):
  row = next(r for r in rows_of(written, 'incomplete') if r['where'] == where)
  assert row['state'] == state
  assert why in row['why']
  for page in ('index.html', 'index.md'):
    text = (written / page).read_text()
    assert text.index(where) < text.index('P1: ')


def test_nothing_else_is_listed_as_not_whole(written):
  assert len(rows_of(written, 'incomplete')) == 9  # the config twice


def test_runs_that_are_not_done_are_in_no_mean(workdir, written):
  recipe = {row['run']: row['recipe'] for row in rows_of(written, 'runs')}
  label = recipe['broken/killed']
  assert label == recipe['scratch/kv2-s0']
  row = next(r for r in rows_of(written, 'T1') if r['recipe'] == label)
  assert (row['seeds'], row['not_done']) == ('3', '1')
  curves = {row['run'] for row in rows_of(written, 'P8')}
  assert {'broken/killed', 'broken/diverged', 'sweep/003-d'} <= curves


def test_every_run_is_in_the_inventory(found, written):
  assert {r['run'] for r in rows_of(written, 'runs')} == {
    run.name for run in found.runs
  }
  assert len(rows_of(written, 'conversions')) == 9
  assert len(rows_of(written, 'points')) == 4


def test_figures_name_their_runs(written):
  page = (written / 'index.html').read_text()
  for key, name in (
    ('P2', 'converted/first-kv4'),
    ('P4', 'decode'),
    ('P5', 'cached_vs_uncached.jsonl'),
    ('P8', 'broken/killed'),
  ):
    figure = page[page.index(f'id="{key}"') :]
    caption = figure[figure.index('<figcaption>') : figure.index('</figure>')]
    assert name in caption


def test_recipes_differ_in_more_than_the_seed(found):
  labels = [recipe.label for recipe in recipes.make(found)]
  assert len(labels) == len(set(labels))
  matched = [label for label in labels if 'matched' in label or 'M' in label]
  assert matched


def test_a_benchmark_is_joined_by_the_model_alone(workdir, found):
  data = join.join(found)
  recipe = next(r for r in data.recipes if r.runs[0].name == 'scratch/kv4-s0')
  assert {t.row['num_kv_heads'] for t in data.matching(recipe)} == {4}
  widened = next(
    r for r in data.recipes if r.runs[0].name == 'scratch/kv4-matched'
  )
  assert data.matching(widened) == []


def test_times_with_unused_room_in_the_cache_are_apart(tmp_path):
  config = recorded.config_of(2)
  recorded.write_run(
    tmp_path / 'one', config, lambda step: recorded.loss_at(step, 2)
  )
  row = {
    'status': 'measured',
    'system': 'gqa',
    'model': config['model'],
    'num_kv_heads': 2,
    'batch_size': 1,
    'context': 200,
    'tokens_per_second': 100.0,
    'step_seconds': 0.01,
  }
  rooms = [{}, {'cache_len': 0}, {'cache_len': 8192}]  # {}: an early version
  (tmp_path / 'two').mkdir()
  (tmp_path / 'two/results.jsonl').write_text(
    ''.join(json.dumps({'what': 'decode', **row, **r}) + '\n' for r in rooms)
  )
  data = join.join(read.read([tmp_path]))
  (recipe,) = data.recipes
  times = data.matching(recipe)
  assert [t.get('cache_len') for t in times] == [0, 8192]
  assert len({t.title for t in times}) == len({t.subject for t in times}) == 2


class Links(html.parser.HTMLParser):
  """What a page would load, and what it has."""

  def __init__(self):
    super().__init__()
    self.loaded, self.tags, self.ids = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    for name, value in attrs:
      if name == 'id':
        self.ids.append(value)
      if name in ('src', 'srcset', 'data', 'poster', 'xlink:href'):
        self.loaded.append(value)
      if name == 'href' and tag != 'a':
        self.loaded.append(value)


def test_the_page_loads_nothing(written):
  text = (written / 'index.html').read_text()
  links = Links()
  links.feed(text)
  assert links.tags.count('svg') == len(PLOTS)
  assert 'script' not in links.tags and 'iframe' not in links.tags
  outside = [x for x in links.loaded if not x.startswith(('#', 'data:'))]
  assert outside == []
  assert not re.search(r'@import|url\((?!#)', text)
  anchors = set(re.findall(r'<a href="#([^"]+)"', text))
  assert anchors <= set(links.ids)


def test_the_page_is_for_dark_screens_and_paper(written):
  text = (written / 'index.html').read_text()
  assert 'prefers-color-scheme: dark' in text and '@media print' in text
  assert 'currentColor' in text


@pytest.mark.skipif(CHROMIUM is None, reason='needs chromium')
def test_the_page_opens_in_a_browser_without_a_network(written, tmp_path):
  run = subprocess.run(
    [
      CHROMIUM,
      '--headless',
      '--no-sandbox',
      '--disable-gpu',
      '--host-resolver-rules=MAP * ~NOTFOUND',
      f'--user-data-dir={tmp_path}',
      '--dump-dom',
      f'file://{written}/index.html',
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  links = Links()
  links.feed(run.stdout)
  assert links.tags.count('svg') == len(PLOTS)
  assert set(PLOTS) <= set(links.ids)
  # Axes and marks are there, and not an empty frame.
  assert links.tags.count('path') > 20 * len(PLOTS)


def test_tensorboard_has_plots_tables_and_a_layout(written):
  events = event_accumulator.EventAccumulator(str(written))
  events.Reload()
  tags = events.Tags()['tensors']
  for key in PLOTS:
    assert any(tag.startswith(f'report/{key}: ') for tag in tags)
  assert any(tag.startswith('report/T1: ') for tag in tags)
  assert 'custom_scalars__config__' in tags
  assert not (written / 'metrics.jsonl').exists()


def test_a_report_is_not_reported(workdir, written):
  again = read.read([workdir])
  assert not any('report' in run.name for run in again.runs)


def test_the_same_results_give_the_same_files(one_run, tmp_path):
  first, second = (
    report.write([one_run], tmp_path / name, tensorboard=False).parent
    for name in ('first', 'second')
  )
  names = sorted(path.name for path in first.iterdir())
  assert names == sorted(path.name for path in second.iterdir())
  for name in names:
    assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_what_is_not_there_is_said_with_what_it_needs(one_run):
  folder = report.write([one_run], tensorboard=False).parent
  summary = json.loads((folder / 'report.json').read_text())
  assert summary['plots'] == ['P8']
  absent = {entry['what']: entry['needs'] for entry in summary['not_drawn']}
  assert 'experiments/pareto.py' in absent['P1: Quality against latency']
  page = (folder / 'index.html').read_text()
  assert all(key in page for key in PLOTS)


def test_a_report_replaces_an_older_one(one_run):
  folder = report.write([one_run], tensorboard=False).parent
  recorded.write_positions(one_run / 'positions.jsonl')
  report.write([one_run], tensorboard=False)
  assert (folder / 'P5.svg').exists()
  (one_run / 'positions.jsonl').unlink()
  report.write([one_run], tensorboard=False)
  assert not (folder / 'P5.svg').exists()


def test_nothing_that_is_read_is_changed(workdir, written):
  torn = workdir / 'broken/killed/metrics.jsonl'
  assert torn.read_text().endswith('"train/lo')


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda path: path / 'nowhere', 'No such file or directory'),
    (lambda path: path, 'has no run, sweep, conversion or benchmark'),
  ],
)
def test_a_wrong_directory_is_one_line(tmp_path, make, message):
  run = subprocess.run(
    [sys.executable, '-m', 'gqa.report', f'--workdir={make(tmp_path)}'],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert run.returncode == 1
  assert run.stderr.startswith('error: ') and message in run.stderr
  assert run.stderr.count('\n') == 1


def test_values_that_are_no_numbers_are_read(found):
  run = next(r for r in found.runs if r.name == 'broken/diverged')
  assert math.isnan(run.last('train/loss'))
