"""What every grouping costs on a device, and which one meets a need.

  python -m gqa.plan --model=llama2-13b --device=h100 --context=32768 \\
      --batch=16 --target_ms=20

A model is a preset, a config file, or the workdir of a run. Everything is
predicted from shapes (cost.py) and the limits of a device (roofline.py), at
once and on any machine. `--audit` computes well-known claims instead.

`make_plan` is the same for notebooks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from gqa import (
  claims,
  cli,
  cost,
  devices,
  plan_text,
  presets,
  relatives,
  roofline,
)
from gqa.config import ModelConfig, divisors
from gqa.cost import Setting, Shape
from gqa.devices import Device
from gqa.roofline import Limits


def make_plan(
  shape: Shape,
  device: Device,
  setting: Setting,
  *,
  limits: Limits = roofline.BEST,
  num_kv_heads: Sequence[int | tuple[int, ...]] | None = None,
  target_ms: float | None = None,
  quality: Mapping[int, Sequence[float | None]] | None = None,
  title: str = 'the model',
  with_relatives: bool = False,
) -> dict[str, Any]:
  """Predicts every grouping; the result is ready for JSON.

  Args:
    shape: the model; its own num_kv_heads is marked in the rows.
    device: each of the devices.
    setting: batch, context, cache and devices.
    limits: how much of a device a program gets.
    num_kv_heads: groupings; unset, all divisors of num_heads and the model's.
    target_ms: the longest step that will do; unset, it need only fit.
    quality: what `read_quality` returns.
    title: of the model.
    with_relatives: whether other ways to a small cache are counted too.
  """
  if target_ms is not None and not 0 < target_ms < math.inf:
    raise ValueError(f'target_ms={target_ms} must be positive and finite.')
  config = shape.config
  own = config.num_kv_heads or config.num_heads
  if num_kv_heads is None:
    num_kv_heads = divisors(config.num_heads)
    if own not in num_kv_heads:
      num_kv_heads = [own, *num_kv_heads]
  if quality and not set(quality) & set(num_kv_heads):
    raise ValueError(
      f'losses are known of num_kv_heads={sorted(quality)}, none of which is '
      f'in {list(num_kv_heads)}; give --num_kv_heads.'
    )
  rows = {}
  for kind in _kinds(shape, setting):
    tried = setting
    if kind != setting.kind:
      tried = dataclasses.replace(setting, kind=kind, cache_dtype=None)
    rows[kind] = [
      _row(shape.with_kv_heads(k), device, tried, limits, target_ms)
      | {'own': k == own, 'above_own': _total(k, config) > sum(config.kv_heads)}
      | _quality(k, quality)
      for k in num_kv_heads
    ]
  main_rows = rows[setting.kind]
  for i, row in enumerate(main_rows):
    row['by_kind'] = {
      kind: {
        name: rows[kind][i][name]
        for name in ('kv_bytes_per_token', 'kv_bytes_per_sequence')
      }
      for kind in rows
    }
  plan = {
    'model': {
      'title': title,
      'config': config.to_dict(),
      'cross_attention': shape.cross_attention,
    },
    'device': dataclasses.asdict(device),
    'setting': dataclasses.asdict(setting)
    | {'dtype': cost.compute_dtype(shape, setting)},
    'limits': dataclasses.asdict(limits)
    | {'room': roofline.room(device, limits)},
    'target_ms': target_ms,
    'rows': main_rows,
    'choices': {kind: choose(rows[kind]) for kind in rows},
  }
  if with_relatives:
    plan['relatives'] = relatives.rows(shape, device, setting)
  return plan


def choose(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
  """The best row that meets the need, or None.

  It is the one of the lowest mean loss where losses are known, of groupings
  none of whose runs has failed. Else it is that of the most KV heads that can
  be converted to, which keeps the most of the model.
  """
  meeting = [row for row in rows if row['meets']]
  if any(row['loss'] is not None for row in rows):
    meeting = [
      row
      for row in meeting
      if row['loss'] is not None and not row['failed_runs']
    ]
    key = lambda row: row['loss']
  else:
    meeting = [row for row in meeting if not row['above_own']]
    key = lambda row: -row['kv_bytes_per_token']
  return min(meeting, key=key, default=None)


def read_quality(path: str) -> dict[int, list[float | None]]:
  """Reads the losses of runs by num_kv_heads from JSON lines with both.

  A loss that is null or not finite is of a failed run, None here.

  Raises:
    ValueError: a line is not of that form, or there is none.
  """
  losses = {}
  with open(path, encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        fields = json.loads(line)
        heads, loss = fields['num_kv_heads'], fields['loss']
        loss = math.nan if loss is None else float(loss)
        if type(heads) is not int:
          raise TypeError
      except (ValueError, TypeError, KeyError):
        raise ValueError(
          f'{path}, line {number} must be a JSON object with an int '
          'num_kv_heads and a number loss.'
        ) from None
      losses.setdefault(heads, []).append(loss if math.isfinite(loss) else None)
  if not losses:
    raise ValueError(f'{path} is empty; give the results of a sweep.')
  return losses


def parse_bytes(size: str) -> float:
  """Reads a size such as 80GB, 32GiB or 8e10."""
  match = re.fullmatch(
    r'(\d+\.?\d*(?:e\d+)?) ?([kmgt]?)(i?)b?', size.strip().lower()
  )
  number = float(match[1]) if match else 0.0
  if not 0 < number < math.inf:
    raise ValueError(
      f'memory={size!r} is no size; write 80GB, 32GiB or a number of bytes.'
    )
  power = ['', 'k', 'm', 'g', 't'].index(match[2])
  return number * (1024 if match[3] else 1000) ** power


def load_model(name: str) -> tuple[str, Shape]:
  """Title and shape of a preset, a config file or the workdir of a run."""
  preset = presets.find(name)
  if preset is not None:
    return preset.title, preset.shape
  path = pathlib.Path(name).expanduser().absolute()
  if path.suffix == '.py' and path.is_file():
    module = cli.load_config_file(str(path))
    try:
      fields = module.get_config().model.to_dict()
    except Exception as error:  # A config file may raise anything.
      raise ValueError(
        f'{path} is not a config of a run: {type(error).__name__}: {error}.'
      ) from error
  elif path.is_dir():
    fields = _workdir_fields(path)
  else:
    raise ValueError(presets.unknown(name))
  return path.stem, Shape(ModelConfig.from_dict(fields))


def main(argv):
  """Prints the plan of the flags."""
  del argv
  flag = flags.FLAGS
  if flag.audit:
    print(plan_text.render_audit(claims.audit(), flag.format))
    return
  if flag.model is None or flag.device is None:
    raise ValueError(
      'give --model=PRESET|CONFIG.py|WORKDIR and --device=NAME, or --audit. '
      f'Presets are {", ".join(presets.PRESETS)}; devices are '
      f'{", ".join(devices.NAMES)}.'
    )
  title, shape = load_model(flag.model)
  device = devices.find(flag.device)
  if flag.memory is not None:
    device = dataclasses.replace(device, memory=parse_bytes(flag.memory))
  plan = make_plan(
    shape,
    device,
    Setting(
      batch_size=flag.batch,
      context=flag.context,
      source_len=flag.source_len,
      kind=flag.cache,
      dtype=flag.dtype,
      weight_dtype=flag.weight_dtype,
      cache_dtype=flag.cache_dtype,
      tensor_parallel=flag.tensor_parallel,
      kv_split=flag.kv_split,
    ),
    limits=Limits(
      efficiency=flag.efficiency,
      overhead=flag.overhead_ms / 1e3,
      workspace=flag.workspace,
    ),
    num_kv_heads=_numbers(flag.num_kv_heads),
    target_ms=flag.target_ms,
    quality=read_quality(flag.quality) if flag.quality else None,
    title=title,
    with_relatives=flag.relatives,
  )
  print(plan_text.render(plan, flag.format))


def _kinds(shape, setting):
  """Kinds of cache that the model can have, the setting's first."""
  kinds = [setting.kind]
  for kind in cost.KINDS:
    if kind != 'ring' or any(shape.config.windows):
      kinds.append(kind)
  return list(dict.fromkeys(kinds))


def _row(shape, device, setting, limits, target_ms):
  """Everything that is predicted of one grouping."""
  config = shape.config
  seconds, bound, traffic = roofline.step(shape, device, setting, limits)
  held = roofline.device_bytes(shape, setting)
  largest = roofline.largest_batch(shape, device, setting, limits)
  row = {
    'num_kv_heads': config.num_kv_heads,
    'kind': setting.kind,
    'parameters': cost.param_count(shape),
    'weight_bytes': cost.weight_bytes(
      shape, dataclasses.replace(setting, tensor_parallel=1)
    ),
    'kv_bytes_per_token': cost.token_bytes(shape, setting),
    'kv_bytes_per_sequence': cost.sequence_bytes(shape, setting),
    'kv_copies': cost.kv_copies(shape, setting),
    'device_weight_bytes': cost.weight_bytes(shape, setting),
    'device_cache_bytes': cost.device_cache_bytes(shape, setting),
    'device_bytes': held,
    'fits': held <= roofline.room(device, limits),
    'step_ms': 1e3 * seconds,
    'bound': bound,
    'flops_per_byte': traffic.flops / (traffic.weight_bytes + traffic.kv_bytes),
    'tokens_per_second': setting.batch_size / seconds,
    'balance_tokens': roofline.balance_tokens(shape, setting),
    'largest_batch': largest,
    'largest_batch_tokens_per_second': None,
    'largest_context': roofline.largest_context(shape, device, setting, limits),
    'largest_batch_in_time': None,
    'share_of_target': None,
  }
  if largest:
    full = dataclasses.replace(setting, batch_size=largest)
    row['largest_batch_tokens_per_second'] = largest / roofline.step_time(
      shape, device, full, limits
    )
  row['meets'] = row['fits']
  if target_ms is not None:
    row['share_of_target'] = row['step_ms'] / target_ms
    row['meets'] &= row['step_ms'] <= target_ms
    row['largest_batch_in_time'] = roofline.largest_batch(
      shape, device, setting, limits, target_ms / 1e3
    )
  return row


def _total(num_kv_heads, config):
  """KV heads of all layers."""
  if isinstance(num_kv_heads, int):
    return num_kv_heads * config.num_layers
  return sum(num_kv_heads)


def _quality(num_kv_heads, quality):
  losses = (quality or {}).get(num_kv_heads, [])
  good = [loss for loss in losses if loss is not None]
  return {
    'loss': statistics.mean(good) if good else None,
    'loss_sd': statistics.stdev(good) if len(good) > 1 else None,
    'runs': len(losses),
    'failed_runs': len(losses) - len(good),
  }


def _workdir_fields(path):
  """The model's fields in the config.json of a run, or of its checkpoint."""
  for parent in (path, *path.parents[:2]):
    file = parent / 'config.json'
    if file.is_file():
      try:
        return json.loads(file.read_text())['model']
      except (ValueError, TypeError, KeyError):
        raise ValueError(f'{file} is not the config of a run.') from None
  raise ValueError(
    f'{path / "config.json"} does not exist; give the workdir of a run.'
  )


def _numbers(values):
  try:
    return [int(value) for value in values] or None
  except ValueError:
    raise ValueError(
      f'--num_kv_heads={",".join(values)} must be numbers such as 1,8,40.'
    ) from None


def _define_flags():
  flags.DEFINE_string('model', None, 'preset, config file or workdir of a run')
  flags.DEFINE_string('device', None, "such as h100 or v5e; 'cpu' measures")
  flags.DEFINE_integer('context', 4096, 'tokens of each sequence in the cache')
  flags.DEFINE_integer('batch', 1, 'sequences')
  flags.DEFINE_list('num_kv_heads', [], 'such as 1,8,40; all divisors')
  flags.DEFINE_enum('cache', 'full', cost.KINDS, 'kind of the cache')
  flags.DEFINE_enum(
    'dtype', None, cost.COMPUTE_DTYPES, "of compute; the model's"
  )
  flags.DEFINE_enum(
    'weight_dtype', None, list(cost.ITEMSIZE), 'of the weights; dtype'
  )
  flags.DEFINE_enum(
    'cache_dtype', None, list(cost.ITEMSIZE), 'of the cache; dtype'
  )
  flags.DEFINE_integer('tensor_parallel', 1, 'devices that split the model')
  flags.DEFINE_enum(
    'kv_split',
    'heads',
    cost.KV_SPLITS,
    'how devices split the cache: by heads or not at all, as this library '
    'does; the heads that each needs; or by batch',
  )
  flags.DEFINE_integer('source_len', 0, 'tokens of the source, for a T5')
  flags.DEFINE_float('target_ms', None, 'the longest step that will do')
  flags.DEFINE_string('memory', None, "of a device, such as 80GB; the device's")
  flags.DEFINE_float('workspace', 0.05, 'part of the memory that stays free')
  flags.DEFINE_float('efficiency', 1.0, "part of the device's limits reached")
  flags.DEFINE_float('overhead_ms', 0.0, 'of a step, beside the roofline')
  flags.DEFINE_string('quality', None, 'JSON lines with num_kv_heads and loss')
  flags.DEFINE_bool('relatives', False, 'add MLA, GTA, GLA, TPA, CLA and MLKV')
  flags.DEFINE_bool('audit', False, 'compute well-known claims instead')
  flags.DEFINE_enum('format', 'table', plan_text.FORMATS, 'of the output')


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
