"""The cells of gqa.benchmark on other systems: a process that is told what to do.

Started by `python -m gqa.benchmark --peers`, once for each of the config's
peers.systems; the protocol is that of gqa/workers.py. The work is gqa's: a
random model of the same shape reads as many tokens, and each step takes the
likeliest token of each row. What a system cannot do in the same types it
refuses.

Needs the extra `peers`; for llama.cpp also llama-cpp-python and gguf.
"""

import importlib.metadata
import json
import os
import signal
import sys

from experiments.peers.common import Missing, Unsupported
from experiments.peers.llama_cpp import LlamaCpp
from experiments.peers.transformers import Transformers

SYSTEMS = {
  'transformers-dynamic': lambda threads: Transformers(threads, static=False),
  'transformers-static': lambda threads: Transformers(threads, static=True),
  'transformers-compiled': lambda threads: Transformers(
    threads, static=True, compiled=True
  ),
  'llama.cpp': LlamaCpp,
}


class Service:
  """Answers the requests of one process."""

  def __init__(self):
    self.system, self.runs = None, {}

  def start(self, system, keep_memory, threads):
    """Loads a system."""
    if system not in SYSTEMS:
      raise Unsupported(
        f'{system!r} is unknown; choose among {tuple(SYSTEMS)}.'
      )
    if keep_memory:
      from gqa import runtime

      runtime.keep_freed_memory()
    cores = len(os.sched_getaffinity(0))
    self.system = SYSTEMS[system](threads or cores)
    packages = self.system.packages
    return {
      'versions': {name: importlib.metadata.version(name) for name in packages}
    }

  def open(self, id, cell):
    """Prepares a cell."""
    self.runs[id] = self.system.open(cell)
    return self.runs[id].info

  def prefill(self, id):
    """Reads a cell's prompts."""
    return self.runs[id].prefill()

  def decode(self, id):
    """Makes a cell's steps."""
    return self.runs[id].decode()

  def close(self, id):
    """Frees a cell."""
    self.runs.pop(id).close()
    return {}


def main():
  # What a library prints is not an answer.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
  service = Service()
  for line in sys.stdin:
    request = json.loads(line)
    try:
      answer = {'ok': getattr(service, request.pop('do'))(**request)}
    except Missing as error:
      answer = {'missing': str(error)}
    except Unsupported as error:
      answer = {'unsupported': str(error)}
    except Exception as error:
      answer = {'error': f'{type(error).__name__}: {error}'}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
