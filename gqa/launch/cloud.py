"""Writes task files for SkyPilot, which finds machines in clouds.

SkyPilot is not needed for writing them. A managed job on spot machines is
started anew when its machine is taken; the same command then goes on from the
newest checkpoint in the bucket. Points that wait for others share a file, a
pipeline of tasks one after the other.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gqa.launch import layout, runner

MOUNT = '/runs'  # where a machine sees the bucket
_RESTARTS = 3  # after errors, which are not a lost machine


def write(
  sweep: layout.Sweep,
  bucket: str,
  resources: Mapping[str, Any],
  together: bool = False,
) -> list[pathlib.Path]:
  """Writes task files and a script that launches them; returns all of them.

  Args:
    sweep: whose commands have MOUNT in place of its workdir.
    bucket: a name for it, or the URL of one that exists.
    resources: SkyPilot's own fields, such as accelerators and use_spot.
    together: whether a task runs all seeds of a config.
  """
  local = sweep.workdir
  directory = local / 'cloud'
  directory.mkdir(exist_ok=True)
  written = []
  for group in _components(sweep.units(together)):
    first, tasks = (
      group[0][0],
      [_task(u, local, bucket, resources) for u in group],
    )
    name = first.name if len(group) == 1 else f'{first.index:03}-pipeline'
    if len(group) > 1:
      tasks.insert(0, {'name': _job_name(local, name)})
    path = directory / f'{name}.yaml'
    path.write_text('---\n'.join(map(_yaml, tasks)))
    written.append(path)
  script = directory / 'launch.sh'
  lines = [
    '#!/usr/bin/env bash',
    'set -euo pipefail',
    *(f'sky jobs launch -y -d {shlex.quote(str(path))}' for path in written),
  ]
  script.write_text('\n'.join(lines) + '\n')
  return [*written, script]


def _task(unit, local, bucket, resources) -> dict[str, Any]:
  storage = {'mode': 'MOUNT_CACHED'}  # a plain mount cannot append to files
  if '://' in bucket:
    storage['source'] = bucket
  else:
    storage |= {'name': bucket}
  tpu = str(resources.get('accelerators', '')).startswith('tpu')
  recovery = {
    'max_restarts_on_errors': _RESTARTS,
    'recover_on_exit_codes': [runner.STOPPED],
  }
  entries = [shlex.quote(f'{MOUNT}/{point.name}') for point in unit]
  options = ' --seeds_together' if len(unit) > 1 else ''
  return {
    'name': _job_name(local, unit[0].name),
    'workdir': os.getcwd(),
    'resources': {**resources, 'job_recovery': recovery},
    'file_mounts': {
      MOUNT: storage,
      '/tmp/sweep.json': str(local / 'sweep.json'),
    },
    'setup': f'pip install -e .[{"tpu" if tpu else "gpu"}]',
    'run': '\n'.join(
      [
        f'mkdir -p {" ".join(entries)}',
        f'cp -n /tmp/sweep.json {MOUNT}/sweep.json',
        f'python -m gqa.launch.runner --patience=120{options} '
        f'--directory={entries[0]}',
      ]
    ),
  }


def _components(
  units: Sequence[tuple[layout.Point, ...]],
) -> list[list[tuple[layout.Point, ...]]]:
  """Units that hang together, in the sweep's order."""
  of = {point.index: i for i, unit in enumerate(units) for point in unit}
  group = {i: {i} for i in range(len(units))}
  for i, unit in enumerate(units):
    for index in unit[0].after:
      joined = group[i] | group[of[index]]
      group |= dict.fromkeys(joined, joined)
  unique = {min(members): sorted(members) for members in group.values()}
  return [[units[i] for i in unique[first]] for first in sorted(unique)]


def _job_name(local: pathlib.Path, name: str) -> str:
  """Letters, digits and dashes, beginning with a letter."""
  text = f'gqa-{local.name}-{name}'.lower()
  text = ''.join(c if c.isalnum() and c.isascii() else '-' for c in text)
  return '-'.join(part for part in text.split('-') if part)[:63].rstrip('-')


def _yaml(value: Mapping[str, Any], indent: int = 0) -> str:
  """Plain nested dicts as YAML; leaves as JSON, which YAML includes."""
  lines = []
  for name, child in value.items():
    margin = ' ' * indent
    if isinstance(child, Mapping):
      lines.append(f'{margin}{name}:\n{_yaml(child, indent + 2)}')
    elif isinstance(child, str) and '\n' in child:
      text = ''.join(f'{margin}  {line}\n' for line in child.split('\n'))
      lines.append(f'{margin}{name}: |\n{text}')
    else:
      lines.append(f'{margin}{name}: {json.dumps(child)}\n')
  return ''.join(lines)
