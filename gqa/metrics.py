"""What a run says about itself: curves, tables, speed, memory and progress.

`Writer` puts TensorBoard events and `metrics.jsonl` side by side in the
workdir, with the `tensorboard` wheel alone. What FLOPs and KV bytes count is
stated in cost.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import (
  api_pb2,
  plugin_data_pb2,
)
from tensorboard.plugins.hparams import (
  metadata as hparams_metadata,
)
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer import event_file_writer, record_writer
from tensorboard.util import tensor_util

from gqa import devices
from gqa.cost import kv_bytes_per_token as kv_bytes_per_token
from gqa.cost import train_flops_per_token as train_flops_per_token

_RECORD_OVERHEAD = 16  # bytes around each event in a file: length and checksums


class Writer:
  """Events and `metrics.jsonl` of one life of a run.

  Each line of `metrics.jsonl` is one `scalars` call: `step`, `wall_time` and
  the values. It is strict JSON: numbers that are not finite are the strings
  'NaN', 'Infinity' and '-Infinity', which `float` reads.

  Args:
    workdir: directory of the run, which must exist.
    first_step: the first step that this life will write, after a restore one
      more than the restored step. Points at or after it, left by an earlier
      life, are dropped from both places.
  """

  def __init__(self, workdir: str | os.PathLike[str], first_step: int = 0):
    workdir = pathlib.Path(workdir)
    self._tags: set[str] = set()
    _drop_events(workdir, first_step)
    _drop_lines(workdir / 'metrics.jsonl', first_step)
    self._lines = open(workdir / 'metrics.jsonl', 'a', encoding='utf-8')
    self._events = event_file_writer.EventFileWriter(
      str(workdir), max_queue_size=1000, flush_secs=10
    )
    # At step 0 too: readers take only a second START for a restart.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._event(first_step, session_log=start)

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def scalars(self, step: int, values: Mapping[str, Any]):
    """Write numbers, or arrays of one number, under their tags."""
    now = time.time()
    numbers = {tag: np.asarray(value).item() for tag, value in values.items()}
    line = {'step': int(step), 'wall_time': now}
    line |= {tag: _strict(number) for tag, number in numbers.items()}
    self._lines.write(json.dumps(line, allow_nan=False) + '\n')
    self._lines.flush()
    metadata = scalar_metadata.create_summary_metadata('', '')
    self._values(
      step, {tag: np.float32(n) for tag, n in numbers.items()}, metadata, now
    )

  def text(self, step: int, tag: str, markdown: str):
    """Write Markdown; see `markdown_table`."""
    metadata = text_metadata.create_summary_metadata('', '')
    self._values(step, {tag: _strings(markdown.encode())}, metadata)

  def figure(self, step: int, tag: str, figure: Any):
    """Write a Matplotlib figure as an image; closing it is left to the caller."""
    png = io.BytesIO()
    figure.savefig(png, format='png')
    width, height = (
      str(int(inches * figure.dpi)).encode()
      for inches in figure.get_size_inches()
    )
    metadata = image_metadata.create_summary_metadata(
      '', '', converted_to_tensor=True
    )
    image = _strings(width, height, png.getvalue())
    self._values(step, {tag: image}, metadata)

  def charts(self, charts: Mapping[str, Sequence[str]]):
    """Lay out curves that belong on one plot, in the CUSTOM SCALARS tab.

    Args:
      charts: the tags on each plot, by its title.
    """
    layout = layout_pb2.Layout()
    category = layout.category.add(title='charts')
    for title, tags in charts.items():
      # Tags are matched as regular expressions.
      whole = [f'^{re.escape(tag)}$' for tag in tags]
      category.chart.add(
        title=title, multiline=layout_pb2.MultilineChartContent(tag=whole)
      )
    tag = layout_metadata.CONFIG_SUMMARY_TAG
    text = _strings(layout.SerializeToString()).reshape(())
    metadata = layout_metadata.create_summary_metadata()
    self._values(0, {tag: text}, metadata)

  def hparams(
    self,
    values: Mapping[str, Any],
    group: str,
    metrics: Sequence[str] = ('eval/loss',),
  ):
    """Write the row of this run in the HPARAMS tab.

    Args:
      values: flat; a value other than a bool, number or string becomes one.
      group: the row. The same in each life of a run, and different in every
        run that may be shown together: '<sweep>/<run>'.
      metrics: scalar tags whose last value is shown in the row.
    """
    row = plugin_data_pb2.SessionStartInfo(
      group_name=group, start_time_secs=time.time()
    )
    columns = []
    for name, value in values.items():
      kind, field, value = _hparam(value)
      setattr(row.hparams[name], field, value)
      # No domain: it would hide the rows of other runs with other values.
      columns.append(api_pb2.HParamInfo(name=name, type=kind))
    header = api_pb2.Experiment(
      hparam_infos=columns,
      metric_infos=[
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics
      ],
      time_created_secs=time.time(),
    )
    self._hparams_event(hparams_metadata.EXPERIMENT_TAG, experiment=header)
    self._hparams_event(
      hparams_metadata.SESSION_START_INFO_TAG, session_start_info=row
    )

  def session_end(self, ok: bool):
    """Mark the row of this run as finished, or as failed."""
    end = plugin_data_pb2.SessionEndInfo(
      status=api_pb2.STATUS_SUCCESS if ok else api_pb2.STATUS_FAILURE,
      end_time_secs=time.time(),
    )
    self._hparams_event(
      hparams_metadata.SESSION_END_INFO_TAG, session_end_info=end
    )

  def flush(self):
    """Put everything written so far on disk."""
    self._lines.flush()
    self._events.flush()

  def close(self):
    """Flush and close; a second call does nothing."""
    if not self._lines.closed:
      self._lines.close()
      self._events.close()

  def _hparams_event(self, tag: str, **data: Any):
    metadata = hparams_metadata.create_summary_metadata(
      plugin_data_pb2.HParamsPluginData(**data)
    )
    value = summary_pb2.Summary.Value(
      tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR
    )
    self._event(0, summary=summary_pb2.Summary(value=[value]))

  def _values(self, step, arrays, metadata, now=None):
    summary = summary_pb2.Summary()
    for tag, array in arrays.items():
      summary.value.add(
        tag=tag,
        metadata=None if tag in self._tags else metadata,
        tensor=tensor_util.make_tensor_proto(array),
      )
    self._tags.update(arrays)
    self._event(step, now, summary=summary)

  def _event(self, step, now=None, **content):
    self._events.add_event(
      event_pb2.Event(wall_time=now or time.time(), step=int(step), **content)
    )


class NullWriter:
  """Takes what `Writer` takes and writes nothing."""

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    pass

  def _ignore(self, *args, **kwargs):
    pass

  scalars = text = figure = charts = hparams = _ignore
  session_end = flush = close = _ignore


def make_writer(
  workdir: str | os.PathLike[str], first_step: int = 0
) -> Writer | NullWriter:
  """Open a `Writer` on process 0 and a `NullWriter` on the others."""
  if jax.process_index() == 0:
    return Writer(workdir, first_step)
  return NullWriter()


def markdown_table(values: Mapping[str, Any]) -> str:
  """Lay out names and values as a table for `Writer.text`."""
  lines = ['| field | value |', '| --- | --- |']
  for name, value in values.items():
    text = str(value).replace('|', '\\|').replace('\n', ' ')
    lines.append(f'| {name} | `{text}` |')
  return '\n'.join(lines)


def peak_flops(device: jax.Device) -> float | None:
  """Give the FLOP/s of a device at best, or None where it is not known.

  Of an accelerator: dense bfloat16, as its maker states it. Of a CPU: measured
  once by a float32 matrix multiplication over all its cores.
  """
  if device.platform == 'cpu':
    return _cpu_flops()
  known = devices.by_kind(device.device_kind)
  return known and known.flops


def total_peak_flops(devices: Sequence[jax.Device]) -> float | None:
  """Sum `peak_flops`; the CPU devices of one process share one machine."""
  cpus = {d.process_index: d for d in devices if d.platform == 'cpu'}
  chips = [d for d in devices if d.platform != 'cpu']
  peaks = [peak_flops(device) for device in [*cpus.values(), *chips]]
  return None if None in peaks else sum(peaks)


def measured_cpu_flops() -> float:
  """Measure float32 FLOP/s of this CPU: a median over a fraction of a second."""
  m, k, n = 1024, 768, 4096
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    a, b = jnp.ones((m, k)), jnp.ones((k, n))
    matmul = jax.jit(jnp.matmul)
    matmul(a, b).block_until_ready()
    seconds = []
    for _ in range(5):
      start = time.perf_counter()
      matmul(a, b).block_until_ready()
      seconds.append(time.perf_counter() - start)
  return 2 * m * k * n / statistics.median(seconds)


_cpu_flops = functools.cache(measured_cpu_flops)


def mfu(
  flops_per_token: float, tokens_per_second: float, peak: float | None
) -> float | None:
  """Give the fraction of `peak` that training uses; None without a peak."""
  return flops_per_token * tokens_per_second / peak if peak else None


def memory_stats() -> dict[str, int]:
  """Give bytes: the host's peak, and the first device's where it keeps count."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == 'darwin' else 1024
  stats = {'memory/host_peak_bytes': peak * unit}
  device = jax.local_devices()[0].memory_stats() or {}
  for name in ('bytes_in_use', 'peak_bytes_in_use'):
    if name in device:
      stats[f'memory/device_{name}'] = device[name]
  return stats


def param_count(params: Any) -> int:
  """Count the numbers in a tree of arrays or of their shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class Throughput:
  """Step time and tokens per second between two log points.

  The first `step` call only starts the clock, so compilation is left out, and
  so is what happens between `pause` and `resume`: evaluation, checkpoints.
  Dispatch is asynchronous, so wait for the device before `rate` and `pause`.
  """

  def __init__(
    self,
    tokens_per_step: int,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._tokens_per_step = tokens_per_step
    self._clock = clock
    self._start = None  # of the window; None before the first step
    self._paused_at = None
    self._steps = 0

  def step(self, num_steps: int = 1):
    """Count updates that were made."""
    if self._start is None:
      self._start = self._clock()
    else:
      self._steps += num_steps

  def pause(self):
    """Stop the clock, if it runs."""
    if self._paused_at is None:
      self._paused_at = self._clock()

  def resume(self):
    """Let the clock run again."""
    if self._paused_at is not None and self._start is not None:
      self._start += self._clock() - max(self._paused_at, self._start)
    self._paused_at = None

  @contextlib.contextmanager
  def paused(self):
    """Keep the clock stopped in a `with` block."""
    self.pause()
    try:
      yield
    finally:
      self.resume()

  def rate(self) -> dict[str, float]:
    """Give the speed since the last call that had one; {} without a step."""
    if not self._steps:
      return {}
    now = self._clock() if self._paused_at is None else self._paused_at
    step_time = (now - self._start) / self._steps
    self._start, self._steps = now, 0
    return {
      'step_time': step_time,
      'tokens_per_second': self._tokens_per_step / step_time,
    }


class Progress:
  """How far a run is: a bar on a terminal, else a line for each log point.

  Args:
    total: steps of the whole run.
    first: steps done before this life began.
    stream: where it shows; standard error unless given.
    enabled: whether it shows at all; process 0 only unless given.
    name: of the run, before each line, where several show at once.
  """

  def __init__(
    self,
    total: int,
    first: int = 0,
    stream: TextIO | None = None,
    enabled: bool | None = None,
    name: str = '',
  ):
    self._total = total
    self._name = name
    self._stream = sys.stderr if stream is None else stream
    self._enabled = jax.process_index() == 0 if enabled is None else enabled
    self._origin = None  # (step, time) of the first update
    self._bar = None
    if self._enabled and self._stream.isatty():
      self._bar = tqdm.tqdm(
        total=total,
        initial=first,
        file=self._stream,
        unit='step',
        desc=name or None,
        dynamic_ncols=True,
      )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def update(
    self,
    step: int,
    loss: float | None = None,
    tokens_per_second: float | None = None,
  ):
    """Show that `step` of the total are done."""
    if not self._enabled:
      return
    shown = {}
    if loss is not None:
      shown['loss'] = f'{float(loss):.4f}'
    if tokens_per_second is not None:
      shown['tokens/s'] = f'{float(tokens_per_second):,.0f}'
    if self._bar is not None:
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update(step - self._bar.n)
      return
    parts = [f'step {step}/{self._total}']
    parts += [f'{name} {value}' for name, value in shown.items()]
    self.message('  '.join([*parts, f'eta {self._eta(step)}']))

  def message(self, text: str):
    """Show a line, above the bar where there is one."""
    if self._name:
      text = f'{self._name}: {text}'
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    elif self._enabled:
      print(text, file=self._stream, flush=True)

  def close(self):
    """Leave the bar as it stands."""
    if self._bar is not None:
      self._bar.close()

  def _eta(self, step: int) -> str:
    now = time.monotonic()
    if self._origin is None:
      self._origin = (step, now)
    first, start = self._origin
    if step >= self._total:
      return '0:00'
    if step <= first:
      return '?'
    seconds = (now - start) / (step - first) * (self._total - step)
    return tqdm.tqdm.format_interval(seconds)


def _strict(number: Any) -> Any:
  if isinstance(number, float) and not math.isfinite(number):
    return 'NaN' if math.isnan(number) else f'{"-" * (number < 0)}Infinity'
  return number


def _strings(*values: bytes) -> np.ndarray:
  return np.array(values, dtype=object)


def _hparam(value: Any) -> tuple[int, str, bool | float | str]:
  if isinstance(value, bool):
    return api_pb2.DATA_TYPE_BOOL, 'bool_value', value
  if isinstance(value, int | float):
    return api_pb2.DATA_TYPE_FLOAT64, 'number_value', value
  return api_pb2.DATA_TYPE_STRING, 'string_value', str(value)


def _drop_events(workdir: pathlib.Path, first_step: int):
  """Rewrite event files without what the coming life will write again."""
  paths = sorted(workdir.glob('events.out.tfevents.*'))
  for path in paths:
    kept = []
    for record in event_file_loader.RawEventFileLoader(str(path)).Load():
      if not _is_stale(event_pb2.Event.FromString(record), first_step):
        kept.append(record)
    size = sum(len(record) + _RECORD_OVERHEAD for record in kept)
    if size != path.stat().st_size:  # also where the last record is torn
      with _replacing(path) as file:
        records = record_writer.RecordWriter(file)
        for record in kept:
          records.write(record)
  if paths:
    # Readers order files by name, which begins with the second of opening.
    last = re.match(r'events\.out\.tfevents\.(\d+)', paths[-1].name)
    deadline = time.time() + 2
    while last and int(time.time()) <= int(last[1]) and time.time() < deadline:
      time.sleep(0.05)


def _is_stale(event: event_pb2.Event, first_step: int) -> bool:
  """Tell whether an event repeats, or speaks for a life that goes on."""
  if not event.HasField('summary'):
    return False
  ended = any(
    value.tag == hparams_metadata.SESSION_END_INFO_TAG
    for value in event.summary.value
  )
  return ended or event.step >= first_step


def _drop_lines(path: pathlib.Path, first_step: int):
  """Rewrite `metrics.jsonl` likewise; lines that are not whole go too."""
  if not path.exists():
    return
  content = path.read_bytes()
  kept = []
  for line in content.splitlines():
    try:
      if json.loads(line)['step'] < first_step:
        kept.append(line + b'\n')
    except (ValueError, TypeError, KeyError):
      continue
  if content != b''.join(kept):
    with _replacing(path) as file:
      file.write(b''.join(kept))


@contextlib.contextmanager
def _replacing(path: pathlib.Path):
  """Open a file that takes the place of `path` once it is whole."""
  # A name that no reader of event files picks up.
  temporary = path.with_name('.rewritten.tmp')
  with open(temporary, 'wb') as file:
    yield file
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
