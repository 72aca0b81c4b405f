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
) -> list[pathlib.Path]:
  """Writes task files and a script that launches them; returns all of them.

  Args:
    sweep: whose commands have MOUNT in place of its workdir.
    bucket: a name for it, or the URL of one that exists.
    resources: SkyPilot's own fields, such as accelerators and use_spot.
  """
  local = sweep.workdir
  directory = local / 'cloud'
  directory.mkdir(exist_ok=True)
  written = []
  for group in _components(sweep.points):
    name = group[0].name if len(group) == 1 else f'{group[0].index:03}-pipeline'
    tasks = [_task(p, local, bucket, resources) for p in group]
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


def _task(point, local, bucket, resources) -> dict[str, Any]:
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
  entry = f'{MOUNT}/{point.name}'
  return {
    'name': _job_name(local, point.name),
    'workdir': os.getcwd(),
    'resources': {**resources, 'job_recovery': recovery},
    'file_mounts': {
      MOUNT: storage,
      '/tmp/sweep.json': str(local / 'sweep.json'),
    },
    'setup': f'pip install -e .[{"tpu" if tpu else "gpu"}]',
    'run': '\n'.join(
      [
        f'mkdir -p {shlex.quote(entry)}',
        f'cp -n /tmp/sweep.json {MOUNT}/sweep.json',
        'python -m gqa.launch.runner --patience=120 '
        f'--directory={shlex.quote(entry)}',
      ]
    ),
  }


def _components(points: Sequence[layout.Point]) -> list[list[layout.Point]]:
  """Points that hang together, in the sweep's order."""
  group = {point.index: {point.index} for point in points}
  for point in points:
    for index in point.after:
      joined = group[point.index] | group[index]
      group |= dict.fromkeys(joined, joined)
  unique = {min(members): sorted(members) for members in group.values()}
  return [[points[i] for i in unique[first]] for first in sorted(unique)]


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
