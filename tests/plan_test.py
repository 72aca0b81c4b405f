"""The plan of a model: what it says, in which form, and to which errors."""

import csv
import io
import json
import math
import pathlib
import subprocess
import sys

import pytest

from gqa import (
  claims,
  cost,
  devices,
  plan,
  plan_text,
  presets,
  roofline,
  tables,
)
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig
from gqa.cost import Setting, Shape

ROOT = pathlib.Path(__file__).parents[1]
LLAMA = presets.find('llama2-13b').shape
H100 = devices.find('h100')
NEED = Setting(batch_size=16, context=32_768)
SMALL = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=8,
  num_kv_heads=(4, 2),
  head_dim=4,
  mlp_dim=64,
  max_len=16,
  sliding_window=8,
)


def rows_of(result):
  return {row['num_kv_heads']: row for row in result['rows']}


def command(*arguments):
  """Runs the command in a process that then tells what it has imported."""
  program = (
    'import runpy, sys\n'
    f'sys.argv = ["plan", *{list(arguments)!r}]\n'
    'try:\n'
    '  runpy.run_module("gqa.plan", run_name="__main__", alter_sys=True)\n'
    'finally:\n'
    '  bad = {"jax", "jaxlib", "flax", "orbax", "numpy"} & set(sys.modules)\n'
    '  assert not bad, bad\n'
  )
  return subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )


def test_how_many_kv_heads_for_16_sequences_of_32k_on_an_h100_in_20_ms():
  """Neither jax nor NumPy is imported for the answer."""
  result = command(
    '--model=llama2-13b',
    '--device=h100',
    '--batch=16',
    '--context=32768',
    '--target_ms=20',
    '--relatives',
  )
  assert not result.returncode, result.stderr
  assert 'Answer: num_kv_heads=4, the most that meets the need' in result.stdout
  assert 'With an int8 cache: num_kv_heads=8' in result.stdout
  assert 'none of them is built here' in result.stdout
  line = next(x for x in result.stdout.splitlines() if x.split()[:1] == ['4'])
  assert (
    line.split()[1:]
    == (
      '81,920 2.68 GB 22.3 GB 42.9 GB 65.2 GB 19.4 826 KV 267,690 20 886 41,002 '
      '16 97% meets it'
    ).split()
  )


def test_a_config_file_needs_no_jax_and_errors_are_one_line():
  result = command(
    '--model=configs/llama_1b.py', '--device=v5e', '--format=json'
  )
  assert not result.returncode, result.stderr
  assert json.loads(result.stdout)['model']['title'] == 'llama_1b'
  result = command('--model=lama2-13b', '--device=h100')
  assert result.returncode == 1 and not result.stdout
  assert result.stderr.startswith("error: model 'lama2-13b' is neither")
  assert 'did you mean LLaMA-2 13B? Presets are llama-7b,' in result.stderr
  assert result.stderr.count('\n') == 1


def test_the_audit_imports_no_jax():
  result = command('--audit', '--format=json')
  assert not result.returncode, result.stderr
  assert len(json.loads(result.stdout)) == len(claims.audit())


def test_rows_by_hand():
  result = plan.make_plan(LLAMA, H100, NEED, target_ms=20)
  rows = rows_of(result)
  assert list(rows) == [40, 20, 10, 8, 5, 4, 2, 1]
  row = rows[8]
  kernels = 2 * 40 * 5120 * 128 * (40 - 8)
  assert row['parameters'] == 13_015_864_320 - kernels
  assert row['weight_bytes'] == 2 * row['parameters']
  assert row['kv_bytes_per_token'] == 163_840
  assert row['kv_bytes_per_sequence'] == 32_768 * 163_840
  assert row['device_bytes'] == row['weight_bytes'] + 16 * 32_768 * 163_840 + 68
  read = row['device_bytes'] - 68 - 2 * 32_000 * 5120
  assert row['step_ms'] == pytest.approx(read / 3.35e9)
  assert row['tokens_per_second'] == pytest.approx(16 * 3.35e12 / read)
  assert row['share_of_target'] == pytest.approx(row['step_ms'] / 20)
  room = 0.95 * 80e9 - row['weight_bytes'] - 4
  assert row['largest_batch'] == room // (32_768 * 163_840 + 4)
  assert row['largest_context'] == (room - 64) // (16 * 163_840)
  in_time = 20e-3 * 3.35e12 - (read - 16 * 32_768 * 163_840)
  assert row['largest_batch_in_time'] == in_time // (32_768 * 163_840)
  assert row['by_kind']['int8']['kv_bytes_per_token'] == 2 * 40 * 8 * 132
  assert [k for k, r in rows.items() if r['own']] == [40]
  assert [k for k, r in rows.items() if r['meets']] == [4, 2, 1]


def test_a_layer_may_have_its_own_number_of_kv_heads():
  result = plan.make_plan(Shape(SMALL), H100, Setting(context=16, kind='ring'))
  first = result['rows'][0]
  assert first['num_kv_heads'] == (4, 2) and first['own']
  assert first['kv_bytes_per_sequence'] == 2 * 4 * 4 * (4 + 2) * 8
  assert set(first['by_kind']) == {'ring', 'full', 'int8'}
  # What has more than the model's 6 cannot be made of it.
  assert [row['above_own'] for row in result['rows']] == [
    *(False, True, True, False, False)
  ]
  assert result['choices']['full']['num_kv_heads'] == (4, 2)
  for style in plan_text.FORMATS:
    assert '4' in plan_text.render(result, style)


def test_the_answer_is_the_most_kv_heads_that_the_model_has():
  shape = presets.find('llama3-8b').shape
  result = plan.make_plan(shape, H100, Setting())
  assert rows_of(result)[32]['meets']
  assert result['choices']['full']['num_kv_heads'] == 8


@pytest.mark.parametrize(
  ('losses', 'best'),
  [
    ({4: [3.0, 3.2], 2: [3.3], 1: [3.4], 40: [2.9]}, 4),
    ({4: [3.0, 3.6], 2: [3.1], 1: [3.4]}, 2),
    ({4: [2.0, None], 2: [3.5], 1: [3.4]}, 1),
    ({4: [None], 2: [3.5]}, 2),
    ({40: [3.0]}, None),
  ],
)
def test_with_losses_the_lowest_that_meets_the_need_is_chosen(
  tmp_path, losses, best
):
  path = tmp_path / 'results.jsonl'
  path.write_text(
    ''.join(
      json.dumps({'num_kv_heads': k, 'loss': loss, 'seed': i}) + '\n'
      for k, values in losses.items()
      for i, loss in enumerate(values)
    )
  )
  quality = plan.read_quality(path)
  assert quality == losses
  result = plan.make_plan(LLAMA, H100, NEED, target_ms=20, quality=quality)
  chosen = result['choices']['full']
  assert (chosen and chosen['num_kv_heads']) == best
  text = plan_text.render(result, 'table')
  failed = sum(values.count(None) for values in losses.values())
  assert text.count(' failed') == failed
  if best is not None and not failed:
    assert f'num_kv_heads={best}, the lowest loss that meets' in text
  json.loads(plan_text.render(result, 'json'))


def test_losses_have_a_mean_and_a_spread():
  quality = {4: [3.0, 3.2], 2: [3.5]}
  rows = rows_of(plan.make_plan(LLAMA, H100, NEED, quality=quality))
  assert rows[4]['loss'] == pytest.approx(3.1)
  assert rows[4]['loss_sd'] == pytest.approx(math.sqrt(0.02))
  assert (rows[2]['loss_sd'], rows[2]['runs'], rows[1]['runs']) == (None, 1, 0)


def test_diverged_runs_count_as_failed(tmp_path):
  path = tmp_path / 'results.jsonl'
  path.write_text('{"num_kv_heads": 4, "loss": NaN}\n\n')
  assert plan.read_quality(path) == {4: [None]}


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'is empty'),
    ('{"num_kv_heads": 4, "loss": 3.0}\nnonsense', 'line 2 must be'),
    ('{"num_kv_heads": "4", "loss": 3.0}', 'line 1 must be'),
    ('{"loss": 3.0}', 'line 1 must be'),
    ('[1]', 'line 1 must be'),
  ],
)
def test_results_that_cannot_be_read_name_the_line(tmp_path, text, message):
  path = tmp_path / 'results.jsonl'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    plan.read_quality(path)


def test_losses_of_other_groupings_are_refused():
  with pytest.raises(ValueError, match=r'num_kv_heads=\[3\].*--num_kv_heads'):
    plan.make_plan(LLAMA, H100, NEED, quality={3: [1.0]})


@pytest.mark.parametrize('devices_', [1, 8])
def test_every_form_holds_every_row(devices_):
  setting = Setting(tensor_parallel=devices_, context=1000)
  result = plan.make_plan(
    LLAMA, H100, setting, target_ms=9.5, with_relatives=True
  )
  groupings = [40, 20, 10, 8, 5, 4, 2, 1]
  loaded = json.loads(plan_text.render(result, 'json'))
  assert [row['num_kv_heads'] for row in loaded['rows']] == groupings
  lines = list(csv.DictReader(io.StringIO(plan_text.render(result, 'csv'))))
  assert [row['num_kv_heads'] for row in lines[:8]] == list(map(str, groupings))
  assert float(lines[0]['step_ms']) == result['rows'][0]['step_ms']
  assert int(lines[0]['kv_bytes_per_token_int8']) == 2 * 40 * 40 * 132
  assert {row['label'] for row in lines[8:]} == {'cost only'}
  assert len(lines) == 8 + 6
  table = plan_text.render(result, 'table')
  markdown = plan_text.render(result, 'md')
  for text in (table, markdown):
    for words in (
      '819,200',
      '40*',
      'GLA-2',
      'cost only',
      'Answer: ',
      'verdict',
    ):
      assert words in text
    assert ('per device' in text.replace('\n', ' ')) == (devices_ > 1)
  sizes = {}
  for block in markdown.split('\n\n'):
    columns = [line.count('|') for line in block.splitlines()]
    if block.startswith('|'):
      assert len(set(columns)) == 1
      sizes[len(sizes)] = len(columns)
  assert list(sizes.values()) == [10, 10, 8]


def test_a_need_that_nothing_meets_is_told_with_what_would():
  result = plan.make_plan(LLAMA, H100, NEED, target_ms=7)
  assert result['choices']['full'] is None
  text = plan_text.render(result, 'table')
  most = roofline.largest_batch(
    LLAMA.with_kv_heads(1), H100, NEED, seconds=7e-3
  )
  assert (
    'Answer: no grouping meets the need. With num_kv_heads=1 '
    f'{most} sequences do.'
  ) in text
  large = plan.make_plan(presets.find('llama2-70b').shape, H100, NEED)
  text = plan_text.render(large, 'table')
  assert 'no grouping fits. With num_kv_heads=1 not one does.' in text


def test_limits_that_are_reached_in_part_are_in_the_answer():
  limits = roofline.Limits(efficiency=0.8, overhead=2e-3, workspace=0.5)
  result = plan.make_plan(LLAMA, H100, NEED, limits=limits, target_ms=20)
  rows = rows_of(result)
  assert rows[2]['step_ms'] == pytest.approx(12.89 / 0.8 + 2, abs=0.02)
  assert not rows[2]['fits'] and rows[1]['fits']  # of 40 GB
  text = plan_text.render(result, 'table')
  assert 'if the device reaches 54% of its limits' in text
  assert 'floors' not in text


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('80GB', 80e9),
    ('32 GiB', 2**35),
    ('8e10', 8e10),
    ('1.5kB', 1500),
    ('24gb', 24e9),
    ('512MiB', 2**29),
    ('7', 7),
  ],
)
def test_sizes_are_read(text, expected):
  assert plan.parse_bytes(text) == expected


@pytest.mark.parametrize('text', ['', 'GB', '0GB', '-1', '8 apples', '1e400GB'])
def test_sizes_that_are_none_are_refused(text):
  with pytest.raises(ValueError, match='write 80GB'):
    plan.parse_bytes(text)


def test_models_come_from_files_and_runs(tmp_path):
  title, shape = plan.load_model('configs/tiny.py')
  assert (title, shape.config.num_heads) == ('tiny', 8)
  run = tmp_path / 'run'
  step = run / 'checkpoints' / '7'
  step.mkdir(parents=True)
  workdir_lib.save_config(run, {'model': SMALL.to_dict(), 'seed': 0})
  assert plan.load_model(str(run)) == ('run', Shape(SMALL))
  assert plan.load_model(str(step))[1] == Shape(SMALL)
  with pytest.raises(ValueError, match='config.json does not exist'):
    plan.load_model(str(tmp_path))
  (tmp_path / 'config.json').write_text('{"layers": 3}')
  with pytest.raises(ValueError, match='is not the config of a run'):
    plan.load_model(str(tmp_path))
  (tmp_path / 'x.py').write_text('def get_config():\n  return 1 / 0\n')
  with pytest.raises(ValueError, match='x.py is not a config .*ZeroDivision'):
    plan.load_model(str(tmp_path / 'x.py'))
  with pytest.raises(ValueError, match='neither a preset nor a config file'):
    plan.load_model(str(tmp_path / 'missing.py'))


def test_a_target_must_be_positive():
  with pytest.raises(ValueError, match='target_ms=0 must be'):
    plan.make_plan(LLAMA, H100, NEED, target_ms=0)


def test_limits_must_be_possible():
  for field, value in (('efficiency', 1.5), ('overhead', -1), ('workspace', 1)):
    with pytest.raises(ValueError, match=f'{field}={value}'):
      roofline.Limits(**{field: value})


def test_claims_are_computed_in_their_own_setting():
  values = {}
  for row in claims.audit():
    values.setdefault(row['claim'], []).append(row['values'])
  assert len(claims.audit()) == sum(map(len, values.values()))
  (found,) = values['LLaMA-2 13B caches 1 MB per token']
  assert found['bytes_per_token'] == 819_200
  (found,) = values['and 4 GB at 4,000 tokens']
  assert found['bytes'] == 3_276_800_000
  # Pope et al., table 1: the roofs of 64 chips, by hand.
  share = 0.3 * 2**35
  for name, per_token, published in (
    ('multi-head', 2 * 118 * 128 * 2, (1_320, 330)),
    ('multi-query, split by heads', 2 * 118 * 256 * 2, (660, 165)),
    ('multi-query, split by batch', 2 * 118 * 4 * 2, (43_000, 10_700)),
  ):
    (found,) = values[f'longest context of PaLM 540B, {name}']
    batches = (128, 512)
    assert found['contexts'] == [
      int(share // (per_token * batch)) for batch in batches
    ]
    assert found['contexts'] == pytest.approx(published, rel=0.01)
  (found,) = values['multi-query attention allows 32 times the context']
  assert found['ratio'] == pytest.approx(32, rel=0.01)
  assert found['ratio_split_by_heads'] == pytest.approx(0.5, rel=0.01)
  # At an equal batch there is little of the 11 times: it is capacity.
  small, large = values['shared KV heads give 11 times the throughput']
  assert small['equal_batch_ratio'] < 1.2 < 11 < small['largest_batch_ratio']
  few, most = large['batches']
  assert 15 < most / few < 20
  (found,) = values['MLA caches as much as 2.25 KV heads']
  assert found['kv_heads'] == 2.25


@pytest.mark.parametrize('style', plan_text.FORMATS)
def test_the_audit_shows_theirs_beside_ours(style):
  text = plan_text.render_audit(claims.audit(), style)
  for words in ('theirs', 'ours', '0.82 MB', '3.28 GB', '32.0 times'):
    assert words in text
  if style == 'csv':
    assert len(list(csv.DictReader(io.StringIO(text)))) == len(claims.audit())


@pytest.mark.parametrize(
  ('number', 'text'),
  [
    (None, '-'),
    (0, '0 B'),
    (7, '7 B'),
    (0.5, '0.50 B'),
    (999, '999 B'),
    (999.6, '1.00 kB'),
    (99.96, '100 B'),
    (819_200, '819 kB'),
    (26_031_728_640, '26.0 GB'),
    (9_999_999, '10.0 MB'),
  ],
)
def test_quantities_have_three_digits(number, text):
  assert tables.quantity(number, 'B') == text


def test_columns_are_aligned_under_their_heads():
  text = tables.text(['a\nlong head', 'b'], [['1', 'x y'], ['23', 'z']])
  assert text == (
    '        a\nlong head  b\n---------  ---\n        1  x y\n       23  z'
  )


def test_kinds_of_caches_are_those_of_the_cache():
  from gqa import cache

  assert cost.KINDS == cache.KINDS
