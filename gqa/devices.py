"""What devices can hold, move and compute, as their makers state it.

Memory and bandwidth are decimal, as on the data sheets, and FLOP/s are dense.
Interconnects are left out: nothing here predicts communication.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import time


@dataclasses.dataclass(frozen=True)
class Device:
  """One accelerator, or the CPU of a machine.

  Attributes:
    title: what people call it.
    memory: bytes.
    bandwidth: bytes/s between memory and the chip.
    flops: FLOP/s of bfloat16 products.
    float32_flops: FLOP/s of float32 products as jax makes them unless told
      otherwise: TF32 on NVIDIA GPUs, one bfloat16 pass on TPUs.
    kind: pattern of jax's `device_kind`.
  """

  title: str
  memory: float
  bandwidth: float
  flops: float
  float32_flops: float
  kind: str = ''


def _gpu(title, memory, bandwidth, flops, tf32, kind):
  return Device(title, memory * 1e9, bandwidth * 1e9, flops * 1e12, tf32, kind)


def _tpu(title, memory, bandwidth, flops, kind):
  flops *= 1e12
  return Device(title, memory, bandwidth * 1e9, flops, flops, kind)


# The more special patterns come first.
DEVICES = {
  # NVIDIA A100 Tensor Core GPU data sheet, SXM columns.
  'a100-80': _gpu('A100 SXM 80 GB', 80, 2039, 312, 156e12, r'A100.*80GB'),
  'a100-40': _gpu('A100 SXM 40 GB', 40, 1555, 312, 156e12, r'A100\b'),
  # NVIDIA H100 Tensor Core GPU data sheet, halved where it says "with
  # sparsity".
  'h100-pcie': _gpu('H100 PCIe', 80, 2000, 756, 378e12, r'H100 PCIe'),
  'h100-nvl': _gpu('H100 NVL', 94, 3900, 835, 417.5e12, r'H100 NVL'),
  'h100': _gpu('H100 SXM', 80, 3350, 989, 494.5e12, r'H100\b'),
  # NVIDIA GH200 Grace Hopper Superchip data sheet, with HBM3.
  'gh200': _gpu('GH200', 96, 4000, 989, 494.5e12, r'GH200\b'),
  # NVIDIA H200 Tensor Core GPU data sheet, SXM column.
  'h200': _gpu('H200 SXM', 141, 4800, 989, 494.5e12, r'H200\b'),
  # NVIDIA DGX B200 data sheet, an eighth of 1,440 GB and 64 TB/s; FLOP/s of
  # the HGX B200 platform, halved likewise.
  'b200': _gpu('B200', 180, 8000, 2250, 1100e12, r'B200\b'),
  # NVIDIA RTX A6000 data sheet, halved likewise.
  'a6000': _gpu('RTX A6000', 48, 768, 154.8, 77.4e12, r'RTX A6000\b'),
  # Google Cloud documentation, system architecture of each version.
  'v4': _tpu('TPU v4', 32 * 2**30, 1200, 275, r'TPU v4$'),
  'v5e': _tpu('TPU v5e', 16e9, 819, 197, r'TPU (v5 lite|v5e)$'),
  'v5p': _tpu('TPU v5p', 95e9, 2765, 459, r'TPU v5p?$'),
  'v6e': _tpu('TPU v6e', 32e9, 1638, 918, r'TPU (v6 lite|v6e)$'),
}
ALIASES = {'a100': 'a100-80', 'h100-sxm': 'h100', 'h200-sxm': 'h200'}
CPU = 'cpu'
NAMES = (*DEVICES, CPU)


def find(name: str) -> Device:
  """The device of a name; 'cpu' measures this machine.

  Raises:
    ValueError: there is none; the message names a near one and all.
  """
  key = re.sub(r'[\s_]', '-', name.strip().lower()).removeprefix('tpu-')
  key = ALIASES.get(key, key)
  if key == CPU:
    return measured_cpu()
  if key not in DEVICES:
    near = difflib.get_close_matches(key, NAMES, n=1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ValueError(
      f'device {name!r} is unknown; {hint}Known are {", ".join(NAMES)}.'
    )
  return DEVICES[key]


def by_kind(device_kind: str) -> Device | None:
  """The device that jax calls so, or None where it is not known."""
  for device in DEVICES.values():
    if re.search(rf'\b{device.kind}', device_kind, re.IGNORECASE):
      return device
  return None


@functools.cache
def measured_cpu() -> Device:
  """Measures this machine with NumPy, over all cores, for half a second.

  Bandwidth is that of a float32 matrix-vector product far larger than caches,
  FLOP/s those of a matrix product; the best of a few, as they are limits.
  """
  import numpy as np

  matrix, vector = np.ones((8192, 4096), np.float32), np.ones(4096, np.float32)
  bandwidth = matrix.nbytes / _best_seconds(lambda: matrix @ vector)
  a, b = matrix[:1024, :1024].copy(), matrix[:1024].copy()
  flops = 2 * 1024 * 1024 * 4096 / _best_seconds(lambda: a @ b)
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  title = f'this machine ({os.cpu_count()} CPUs, measured)'
  return Device(title, memory, bandwidth, flops, flops)


def _best_seconds(run) -> float:
  seconds = []
  for _ in range(5):
    begun = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - begun)
  return min(seconds)
