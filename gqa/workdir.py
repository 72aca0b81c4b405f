"""The directory of a run: made, told from others, and its config.

It holds `config.json`, `checkpoints/<step>` (see checkpoint.py), metrics, and
a tokenizer.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from gqa import points

Path = str | os.PathLike[str]

# Fields that may differ when a run is resumed: what they change is what is
# seen and kept, never a parameter.
FREE_FIELDS = (
  'compilation_cache',
  'train.log_every',
  'train.profile',
  'eval.',
  'checkpoint.',
)


def resolve_workdir(path: Path) -> pathlib.Path:
  """Make a directory for a run and prove that it can be written to.

  Returns the absolute path, with `~` expanded.

  Raises:
    ValueError: `path` is a URL, or is or lies below a plain file.
    OSError: it cannot be made or written to.
  """
  workdir = absolute(path)
  for parent in (workdir, *workdir.parents):
    if parent.exists() and not parent.is_dir():
      raise ValueError(
        f'workdir={str(path)!r}: {parent} is a file, not a directory; '
        'choose another workdir.'
      )
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=workdir, prefix='.write_test') as file:
      file.write(bytes(1 << 16))
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    raise OSError(
      f'workdir={str(path)!r} cannot be written to: {error.strerror or error}; '
      'choose a directory on a disk with space and write permission.'
    ) from error
  return workdir


def contents(workdir: Path) -> list[str]:
  """List what a workdir holds but for hidden files and those of a launcher."""
  workdir = pathlib.Path(workdir)
  names = os.listdir(workdir) if workdir.exists() else []
  return sorted(
    name
    for name in names
    if not name.startswith('.') and name not in points.LAUNCHER_FILES
  )


def save_config(workdir: Path, config: Mapping[str, Any]):
  """Write `config.json`; it is there whole or not at all."""
  path = pathlib.Path(workdir) / 'config.json'
  temporary = path.with_name(f'.config.{os.getpid()}.tmp')
  temporary.write_text(json.dumps(config, indent=2) + '\n')
  os.replace(temporary, path)


def load_config(workdir: Path) -> dict[str, Any]:
  """Read the config of a run from its workdir or one of its checkpoints.

  Raises:
    ValueError: there is none, or it is not JSON.
  """
  path = locate(workdir)[0] / 'config.json'
  try:
    return json.loads(path.read_text())
  except (FileNotFoundError, NotADirectoryError):
    raise ValueError(
      f'{path} does not exist; give the workdir of a run.'
    ) from None
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} is not valid JSON: {error}.') from None


def check_same_config(
  workdir: Path, config: Mapping[str, Any], allow: bool = False
):
  """Refuse to resume a run under another config.

  Fields in `FREE_FIELDS` may differ. A workdir without visible files is new
  and takes any config.

  Args:
    workdir: directory of the run.
    config: what it is to run now, nested.
    allow: let any field differ.

  Raises:
    ValueError: fields differ, or the directory holds something else.
  """
  workdir = pathlib.Path(workdir)
  if not (workdir / 'config.json').exists():
    if others := contents(workdir):
      raise ValueError(
        f'{workdir} is not empty and has no config.json, so it is not a run '
        f'(it holds {listed(others)}); choose another workdir.'
      )
    return
  if allow:
    return
  saved = flat_config(load_config(workdir))
  given = flat_config(json.loads(json.dumps(config)))
  differing = [
    f'{name}: {_shown_value(saved, name)} -> {_shown_value(given, name)}'
    for name in dict.fromkeys([*saved, *given])
    if _shown_value(saved, name) != _shown_value(given, name)
    and not name.startswith(FREE_FIELDS)
  ]
  if differing:
    raise ValueError(
      f'{workdir} was made with another config ({"; ".join(differing)}); '
      'choose another workdir, or give --allow_config_change.'
    )


def flat_config(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Give the fields of a nested config by dotted name."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      flat |= flat_config(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def _shown_value(config: Mapping[str, Any], name: str) -> str:
  return repr(config[name]) if name in config else '(absent)'


def absolute(path: Path) -> pathlib.Path:
  """Give a path from the root, with `~` expanded; refuse a URL."""
  text = os.fspath(path)
  if '://' in text:
    raise ValueError(
      f'{text!r} is a URL; mount the bucket and give a path on this machine.'
    )
  return pathlib.Path(os.path.abspath(os.path.expanduser(text)))


def locate(path: Path) -> tuple[pathlib.Path, int | None]:
  """Split a path into the workdir and the step it points at, if any."""
  path = absolute(path)
  if path.name == 'checkpoints':
    return path.parent, None
  if path.parent.name == 'checkpoints' and path.name.isdigit():
    return path.parent.parent, int(path.name)
  return path, None


def listed(values: Sequence[Any]) -> str:
  """Give the first of some values for a message."""
  shown = ', '.join(str(value) for value in values[:10])
  return f'{shown}, ...' if len(values) > 10 else shown
