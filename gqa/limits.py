"""What this machine can do at best: bytes read and FLOPs in a second.

Both are measured, because a shared machine's bandwidth changes by the minute:
take samples between the measurements that are to be judged by them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from gqa import peaks

_WIDTH = 4096  # of the matrix that is read
_SIZES = {'cpu': (1024, 768, 4096)}  # m, k, n of the matrix product
_OTHER_SIZES = (8192, 8192, 8192)


class Machine:
  """Samples of the limits of the first device.

  Args:
    dtypes: compute types whose matrix peak is measured.
    read_bytes: of the array that is read; many times the last-level cache.
  """

  def __init__(self, dtypes: Iterable[str], read_bytes: int):
    self._read = _reader(read_bytes)
    self._products = {dtype: _product(dtype) for dtype in dtypes}
    self._bandwidth: list[float] = []
    self._peaks: dict[str, list[float]] = {d: [] for d in self._products}

  def sample(self) -> None:
    """Measures each limit once more."""
    self._bandwidth.append(self._read())
    for dtype, measure in self._products.items():
      self._peaks[dtype].append(measure())

  def clear(self) -> None:
    """Forgets the samples."""
    self._bandwidth.clear()
    for samples in self._peaks.values():
      samples.clear()

  def row(self, dtype: str) -> dict[str, float]:
    """Medians and ranges of bytes and of FLOPs of a type, per second."""
    return spread('read_bandwidth', self._bandwidth) | spread(
      'matrix_flops', self._peaks[dtype]
    )


def spread(name: str, samples: Sequence[float]) -> dict[str, float]:
  """Gives median, lowest, highest and interquartile range under names."""
  quartiles = [samples[0]] * 3
  if len(samples) > 1:
    quartiles = statistics.quantiles(samples, n=4, method='inclusive')
  return {
    name: statistics.median(samples),
    f'{name}_low': min(samples),
    f'{name}_high': max(samples),
    f'{name}_iqr': quartiles[2] - quartiles[0],
  }


def describe_device() -> dict[str, str | int]:
  """Names what computes."""
  device = jax.local_devices()[0]
  described = {'platform': device.platform, 'kind': device.device_kind}
  if device.platform == 'cpu':
    described['kind'] = _cpu_name()
    described['cores'] = _cores()
  return described


def timed(function: Callable, *args) -> tuple[float, object]:
  """Returns the seconds of a call, until its result is there, and it."""
  begun = time.perf_counter()
  result = jax.block_until_ready(function(*args))
  return time.perf_counter() - begun, result


def _reader(num_bytes: int) -> Callable[[], float]:
  """Returns a function that reads an array and gives bytes per second."""
  rows = max(num_bytes // (4 * _WIDTH), 1)
  array = jnp.ones((rows, _WIDTH), jnp.float32)
  row, column = jnp.ones((1, rows)), jnp.ones((_WIDTH, 1))
  # XLA adds up an array on one core of a CPU, but multiplies by it on all.
  add, multiply = jax.jit(jnp.sum), jax.jit(jnp.matmul)
  ways = ((add, array), (multiply, row, array), (multiply, array, column))
  for way in ways:
    timed(*way)
  return lambda: array.nbytes / min(timed(*way)[0] for way in ways)


def _product(dtype: str) -> Callable[[], float]:
  """Returns a function that multiplies matrices and gives FLOPs per second."""
  platform = jax.local_devices()[0].platform
  if platform == 'cpu' and dtype == 'float32':
    return peaks.measured_cpu_flops
  m, k, n = _SIZES.get(platform, _OTHER_SIZES)
  a, b = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
  multiply = jax.jit(
    lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32)
  )
  timed(multiply, a, b)
  return lambda: 2 * m * k * n / min(timed(multiply, a, b)[0] for _ in range(3))


def _cpu_name() -> str:
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as f:
      for line in f:
        if line.startswith('model name'):
          return line.partition(':')[2].strip()
  except OSError:
    pass
  return 'cpu'


def _cores() -> int:
  """How many this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
