"""A lock that the death of its holder releases, also across machines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import threading
import time

BEAT = 10.0  # seconds between the signs of life of a holder
LAPSE = 60.0  # a holder on another machine without one for so long is dead


class Lock:
  """A lock file, held by a process and those of its children that keep `fd`.

  The kernel releases it when the last of them ends, however that comes about.
  Some shared file systems keep locks to one machine; so the holder also writes
  who it is into the file and touches it, and another machine believes that.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._path = pathlib.Path(path)
    self._stop = threading.Event()
    self.fd: int | None = None

  def acquire(self, patience: float = 0.0) -> bool:
    """Takes the lock, trying for `patience` seconds; returns whether it did."""
    deadline = time.monotonic() + patience
    while not self._try():
      if time.monotonic() >= deadline:
        return False
      time.sleep(min(0.5, patience))
    os.ftruncate(self.fd, 0)
    os.pwrite(self.fd, f'{socket.gethostname()}:{os.getpid()}'.encode(), 0)
    threading.Thread(target=self._beat, daemon=True).start()
    return True

  def release(self) -> None:
    """Gives the lock back."""
    self._stop.set()
    os.ftruncate(self.fd, 0)
    fcntl.flock(self.fd, fcntl.LOCK_UN)  # for children that kept it too
    os.close(self.fd)
    self.fd = None

  def _try(self) -> bool:
    fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
    if _flock(fd) and not _alive_elsewhere(fd):
      self.fd = fd
      return True
    os.close(fd)
    return False

  def _beat(self) -> None:
    while not self._stop.wait(BEAT):
      with contextlib.suppress(OSError):
        os.utime(self._path)


def holder(path: str | os.PathLike[str]) -> str | None:
  """HOST:PID of who holds a lock, or None if nobody does."""
  try:
    fd = os.open(path, os.O_RDWR)
  except OSError:
    return None
  try:
    if _flock(fd) and not _alive_elsewhere(fd):
      return None
    return _content(fd) or 'another process'
  finally:
    os.close(fd)


def _flock(fd: int) -> bool:
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def _alive_elsewhere(fd: int) -> bool:
  """Whether a process of another machine gave a sign of life of late."""
  host = _content(fd).rpartition(':')[0]
  if host in ('', socket.gethostname()):
    return False
  return time.time() - os.fstat(fd).st_mtime < LAPSE


def _content(fd: int) -> str:
  return os.pread(fd, 200, 0).decode(errors='replace')
