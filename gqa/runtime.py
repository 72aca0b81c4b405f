"""The process: settings before its first computation, and what it runs on."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import mmap
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from gqa import sharding

# glibc mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy')


def start(config) -> None:
  """Prepares allocator, devices, processes and compilation cache of a run.

  Args:
    config: a run's config; `mesh.cpu_devices` and `compilation_cache` are
      read.
  """
  keep_freed_memory()
  sharding.set_cpu_devices(config.mesh.cpu_devices)
  # Devices of one CPU share its threads: programs that run at the same time
  # can each hold the thread that the other one's collective waits for.
  if config.mesh.cpu_devices > 1:
    jax.config.update('jax_cpu_enable_async_dispatch', False)
  sharding.initialize_distributed()
  cache_compiled_programs(config.compilation_cache)


def keep_freed_memory() -> None:
  """Lets freed memory be used again instead of returning it to the system.

  XLA on CPU takes its temporary buffers from malloc in each call. glibc maps
  those above 32 MiB anew each time, and the page faults of fresh mappings
  cost more than the arithmetic on them. Memory also comes in huge pages, where
  Linux has them for who asks: what reads all weights in each step would spend
  a twentieth of its time on looking up small ones. Elsewhere this does nothing.
  """
  if platform.libc_ver()[0] != 'glibc':
    return
  libc = ctypes.CDLL(None)
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
  # Only the main arena can hold blocks of any size.
  libc.mallopt(_M_ARENA_MAX, 1)
  _reserve_huge_pages(libc)


def return_freed_memory() -> None:
  """Returns to the system what is free now, also under `keep_freed_memory`."""
  if platform.libc_ver()[0] == 'glibc':
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    _reserve_huge_pages(libc)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
  """Extends the heap, untouched, and asks for huge pages where it is used.

  What is allocated later lies in there. A page counts once it is touched.
  """
  advice = getattr(mmap, 'MADV_HUGEPAGE', None)
  commits = pathlib.Path('/proc/sys/vm/overcommit_memory')
  # Under 2 what is reserved counts as used.
  if advice is None or not commits.exists() or commits.read_text()[0] == '2':
    return
  libc.malloc.restype = ctypes.c_void_p
  libc.malloc.argtypes = [ctypes.c_size_t]
  libc.free.argtypes = [ctypes.c_void_p]
  libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  pages = os.sysconf('SC_PHYS_PAGES') // 2
  size = pages * mmap.PAGESIZE
  start = libc.malloc(size)
  if not start:
    return  # a limit on the process forbids it
  first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
  libc.madvise(first, size - mmap.PAGESIZE, advice)
  libc.free(start)


def cache_compiled_programs(directory: str) -> None:
  """Keeps compiled programs in `directory` ('' for none) for later runs."""
  if not directory:
    return
  path = pathlib.Path(os.path.expanduser(directory)).absolute()
  jax.config.update('jax_compilation_cache_dir', str(path))


def circumstances() -> dict[str, Any]:
  """What a result needs besides its numbers: versions, git revision, date."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    'versions': {'python': platform.python_version()} | versions,
    'git_revision': git_revision(),
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
  }


def git_revision() -> str:
  """The source's commit, '' where there is none."""
  try:
    return subprocess.run(
      ['git', 'rev-parse', 'HEAD'],
      cwd=os.path.dirname(__file__),
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return ''
