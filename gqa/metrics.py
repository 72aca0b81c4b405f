"""What a run says about itself: curves, texts, tables and figures.

`Writer` puts TensorBoard events and `metrics.jsonl` side by side in the
workdir, with the `tensorboard` wheel alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
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
