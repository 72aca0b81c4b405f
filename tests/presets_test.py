"""Published models and devices: exact sizes, and names that are found."""

import re

import pytest

from gqa import cost, devices, presets

# As published with the checkpoints; of Falcon 7B and 40B without a second copy
# of the tied embedding, of T5-XXL its 11,135,332,352 less the encoder.
PARAMETERS = {
  'llama-7b': 6_738_415_616,
  'llama-13b': 13_015_864_320,
  'llama-33b': 32_528_943_616,
  'llama-65b': 65_285_660_672,
  'llama2-7b': 6_738_415_616,
  'llama2-13b': 13_015_864_320,
  'llama2-70b': 68_976_648_192,
  'llama3-8b': 8_030_261_248,
  'llama3-70b': 70_553_706_496,
  'llama3.1-8b': 8_030_261_248,
  'llama3.1-70b': 70_553_706_496,
  'llama3.1-405b': 405_853_388_800,
  'llama3.2-1b': 1_235_814_400,
  'llama3.2-3b': 3_212_749_824,
  'mistral-7b': 7_241_732_096,
  'mistral-v0.3-7b': 7_248_023_552,
  'qwen2-0.5b': 494_032_768,
  'qwen2-1.5b': 1_543_714_304,
  'qwen2-7b': 7_615_616_512,
  'qwen2-72b': 72_706_203_648,
  'qwen2.5-0.5b': 494_032_768,
  'qwen2.5-1.5b': 1_543_714_304,
  'qwen2.5-3b': 3_085_938_688,
  'qwen2.5-7b': 7_615_616_512,
  'qwen2.5-14b': 14_770_033_664,
  'qwen2.5-32b': 32_763_876_352,
  'qwen2.5-72b': 72_706_203_648,
  'qwen3-0.6b': 596_049_920,
  'qwen3-1.7b': 1_720_574_976,
  'qwen3-4b': 4_022_468_096,
  'qwen3-8b': 8_190_735_360,
  'qwen3-14b': 14_768_307_200,
  'qwen3-32b': 32_762_123_264,
  'gemma-2b': 2_506_172_416,
  'gemma-7b': 8_537_680_896,
  'gemma2-2b': 2_614_341_888,
  'gemma2-9b': 9_241_705_984,
  'gemma2-27b': 27_227_128_320,
  'gemma3-1b': 999_885_952,
  'gemma3-4b': 3_880_099_328,
  'gemma3-12b': 11_765_788_416,
  'gemma3-27b': 27_009_002_240,
  'falcon-7b': 6_921_720_704,
  'falcon-40b': 41_303_293_952,
  'gpt2-small': 124_439_808,
  'gpt2-medium': 354_823_168,
  'gpt2-large': 774_030_080,
  'gpt2-xl': 1_557_611_200,
  'pythia-70m': 70_426_624,
  'pythia-160m': 162_322_944,
  'pythia-410m': 405_334_016,
  'pythia-1b': 1_011_781_632,
  'pythia-1.4b': 1_414_647_808,
  'pythia-2.8b': 2_775_208_960,
  'pythia-6.9b': 6_857_302_016,
  'pythia-12b': 11_846_072_320,
  't5-xxl-decoder': 11_135_332_352 - 4_630_714_368,
}
# Chowdhery et al. (2022), table 1, in billions.
PALM = {'palm-8b': 8.63, 'palm-62b': 62.50, 'palm-540b': 540.35}


def test_presets_have_the_published_number_of_parameters():
  counts = {
    name: cost.param_count(preset.shape)
    for name, preset in presets.PRESETS.items()
  }
  palm = {name: counts.pop(name) for name in PALM}
  assert counts == PARAMETERS
  for name, count in palm.items():
    assert count == pytest.approx(PALM[name] * 1e9, rel=3e-4)


def test_windows_are_in_their_layers():
  for name, first in (
    ('gemma2-9b', (4_096, None)),
    ('gemma3-1b', (*[512] * 5, None)),
    ('gemma3-27b', (*[1_024] * 5, None)),
    ('mistral-7b', (4_096,)),
    ('llama2-7b', (None,)),
  ):
    windows = presets.PRESETS[name].shape.config.windows
    assert windows == (first * len(windows))[: len(windows)]


@pytest.mark.parametrize(
  'name', ['llama2-13b', 'LLaMA-2 13B', 'llama_2_13b', 'Llama-2-13B']
)
def test_names_are_found_in_any_punctuation(name):
  assert presets.find(name) is presets.PRESETS['llama2-13b']


def test_every_title_finds_its_preset():
  for preset in presets.PRESETS.values():
    assert presets.find(preset.title) is preset


@pytest.mark.parametrize(
  ('name', 'near'),
  [
    ('lama2-13b', 'LLaMA-2 13B'),
    ('qwen3-7b', 'Qwen3'),
    ('gpt2', 'GPT-2'),
    ('no such thing at all', None),
  ],
)
def test_an_unknown_model_names_a_near_one_and_all(name, near):
  message = presets.unknown(name)
  assert presets.find(name) is None
  assert all(known in message for known in presets.PRESETS)
  found = re.search(r'did you mean (.*?)\? ', message)
  assert found[1].startswith(near) if near else found is None


def test_devices_are_found_by_name_and_alias():
  assert devices.find('H100') is devices.DEVICES['h100']
  assert devices.find('tpu-v5e') is devices.DEVICES['v5e']
  assert devices.find('A100') is devices.DEVICES['a100-80']
  with pytest.raises(ValueError, match=r'did you mean h200\?.*v6e, cpu'):
    devices.find('h20')


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('NVIDIA A100-SXM4-80GB', 'a100-80'),
    ('NVIDIA A100-SXM4-40GB', 'a100-40'),
    ('NVIDIA H100 80GB HBM3', 'h100'),
    ('NVIDIA H100 PCIe', 'h100-pcie'),
    ('NVIDIA GH200 480GB', 'gh200'),
    ('TPU v5 lite', 'v5e'),
    ('TPU v5', 'v5p'),
  ],
)
def test_devices_are_known_by_what_jax_calls_them(kind, name):
  assert devices.by_kind(kind) is devices.DEVICES[name]


def test_ridge_points_are_the_published_ones():
  """FLOPs per byte above which products decide; v5e and H100 are known."""
  ridge = lambda name: devices.find(name).flops / devices.find(name).bandwidth
  assert ridge('v5e') == pytest.approx(240, abs=1)
  assert ridge('h100') == pytest.approx(295, abs=1)


def test_this_machine_is_measured_once():
  device = devices.find('cpu')
  assert device is devices.find('CPU')
  assert device.memory > 1e8
  assert device.bandwidth > 1e7
  assert device.flops == device.float32_flops > 1e8
