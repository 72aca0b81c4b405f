"""What the machine could do, what of it is used, and its memory.

What FLOPs count is stated in cost.py.
"""

from __future__ import annotations

import functools
import resource
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gqa import devices


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
