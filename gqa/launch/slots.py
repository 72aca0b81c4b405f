"""Which part of this machine each of the points has that run at once."""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

# Chips of one process, as libtpu wants them: x, y and z.
_TPU_BOUNDS = {1: '1,1,1', 2: '1,2,1', 4: '2,2,1'}
_TPU_PORT = 8476


@dataclasses.dataclass(frozen=True)
class Slot:
  """What one point may use.

  Attributes:
    environment: variables that say so.
    cores: of the CPU; () for all.
  """

  environment: Mapping[str, str]
  cores: tuple[int, ...] = ()


def divide(parallel: int, devices: str) -> list[Slot]:
  """Divides the machine into `parallel` equal parts.

  Args:
    parallel: points that run at once.
    devices: 'auto', the GPUs or TPU chips that are found, or else CPU cores;
      'none', nothing is divided; or GPUs by number, such as '0,1,2,3'.

  Raises:
    ValueError: they cannot be divided.
  """
  if parallel < 1:
    raise ValueError(f'parallel={parallel} must be at least 1.')
  if devices == 'none':
    return [Slot({})] * parallel
  if devices != 'auto':
    return _gpus(parallel, devices.split(','))
  if gpus := _found_gpus():
    return _gpus(parallel, gpus)
  if chips := glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'):
    return _tpus(parallel, len(chips))
  return _cpus(parallel)


def _gpus(parallel: int, gpus: Sequence[str]) -> list[Slot]:
  return [
    Slot({'CUDA_VISIBLE_DEVICES': ','.join(part)})
    for part in _parts(parallel, gpus, 'GPUs')
  ]


def _tpus(parallel: int, count: int) -> list[Slot]:
  if parallel == 1:
    return [Slot({})]
  slots = []
  for i, part in enumerate(_parts(parallel, range(count), 'TPU chips')):
    if len(part) not in _TPU_BOUNDS:
      raise ValueError(
        f'parallel={parallel} leaves {len(part)} TPU chips to each point; '
        f'choose one that leaves {sorted(_TPU_BOUNDS)}.'
      )
    port = str(_TPU_PORT + i)
    slots.append(
      Slot(
        {
          'TPU_VISIBLE_CHIPS': ','.join(map(str, part)),
          'TPU_CHIPS_PER_PROCESS_BOUNDS': _TPU_BOUNDS[len(part)],
          'TPU_PROCESS_BOUNDS': '1,1,1',
          'TPU_MESH_CONTROLLER_ADDRESS': f'localhost:{port}',
          'TPU_MESH_CONTROLLER_PORT': port,
        }
      )
    )
  return slots


def _cpus(parallel: int) -> list[Slot]:
  """Equal numbers of cores, where there are enough and one can choose."""
  if not hasattr(os, 'sched_getaffinity'):
    return [Slot({})] * parallel
  cores = sorted(os.sched_getaffinity(0))
  share = len(cores) // parallel
  if parallel == 1 or not share:
    return [Slot({})] * parallel
  return [
    Slot({}, tuple(cores[i * share : (i + 1) * share])) for i in range(parallel)
  ]


def _parts(parallel: int, devices: Sequence, what: str) -> list[Sequence]:
  if len(devices) % parallel:
    possible = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    raise ValueError(
      f'parallel={parallel} must divide the {len(devices)} {what}; choose one '
      f'of {possible}, or let points share them by --devices=none.'
    )
  share = len(devices) // parallel
  return [devices[i * share : (i + 1) * share] for i in range(parallel)]


def _found_gpus() -> list[str]:
  visible = os.environ.get('CUDA_VISIBLE_DEVICES')
  if visible is not None:
    return [name for name in visible.split(',') if name]
  if shutil.which('nvidia-smi') is None:
    return []
  listed = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True)
  count = sum(line.startswith('GPU ') for line in listed.stdout.splitlines())
  return list(map(str, range(count)))
