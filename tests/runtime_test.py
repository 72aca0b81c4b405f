"""The allocator's settings, in processes of their own."""

import pathlib
import platform
import subprocess
import sys

import pytest

ENABLED = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
TOUCH = """
import ctypes, sys
from gqa import runtime

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def kilobytes(name):
  with open('/proc/self/smaps_rollup') as file:
    return next(int(l.split()[1]) for l in file if l.startswith(name))

def used():
  return [kilobytes('Rss:') >> 10, kilobytes('AnonHugePages:') >> 10]

def touched():
  block = libc.malloc(256 << 20)
  ctypes.memset(block, 1, 256 << 20)
  return block

rows = [used()]
runtime.keep_freed_memory()
rows.append(used())
block = touched()
rows.append(used())
libc.free(block)
rows.append(used())
runtime.return_freed_memory()
rows.append(used())
touched()
rows.append(used())
print(rows)
"""


@pytest.mark.skipif(
  platform.libc_ver()[0] != 'glibc' or not ENABLED.exists(),
  reason='needs glibc on Linux',
)
def test_freed_memory_is_kept_in_huge_pages_and_returned_when_asked():
  done = subprocess.run(
    [sys.executable, '-c', TOUCH], capture_output=True, text=True, check=True
  )
  before, reserved, full, kept, returned, again = eval(done.stdout)
  resident = lambda row: row[0] - before[0]  # MiB
  assert resident(reserved) < 32  # what is reserved is not touched
  assert resident(full) > 250 and resident(kept) > 250
  assert resident(returned) < 64 and resident(again) > 250
  if '[never]' not in ENABLED.read_text():
    for row in (full, kept, again):
      assert row[1] > 200, (before, reserved, full, kept, returned, again)
