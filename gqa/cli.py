"""What every command line shares: one clear line for a failure, exit code 1.

Flags are absl's; a run's config file is an ml_collections flag, `--config`.
With GQA_TRACEBACK=1 in the environment a failure keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence

from absl import app, flags, logging

FAILURES = (ValueError, TypeError, OSError, FloatingPointError)


def run(main: Callable[[Sequence[str]], int | None]) -> None:
  """Runs `main(argv)` under absl; its failures end in one line and exit 1.

  Failures are the exceptions a user can cause, `FAILURES`. Others are faults
  of the program and keep their traceback.
  """
  logging.set_verbosity(logging.WARNING)
  flags.FLAGS.set_default('logtostderr', True)
  app.run(lambda argv: _guarded(main, argv), flags_parser=parse_flags)


def parse_flags(
  argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> Sequence[str]:
  """Parses flags and returns the other arguments, or fails in one line.

  After --help and its like it exits with 0.
  """
  try:
    return read_flags(argv, flag_values)
  except Exception as error:
    if _keep_traceback():
      raise
    fail(reason(error))


def read_flags(
  argv: Sequence[str], flag_values: flags.FlagValues
) -> Sequence[str]:
  """Parses flags and returns the other arguments.

  After --help and its like the process exits with 0.

  Raises:
    Exception: whatever the config file raises, or an `flags.Error`.
  """
  problem = None
  try:
    rest = flag_values(argv)
  except SystemExit:
    sys.exit(0)
  except Exception as error:  # A config file may raise anything.
    problem = error
  _check_config(argv, flag_values)
  if problem is not None:
    raise problem
  return rest


def load_config_file(path: str) -> types.ModuleType:
  """Runs a config file and returns it as a module.

  Raises:
    ValueError: it fails; the message names the file's line.
  """
  module = types.ModuleType('config_file')
  module.__file__ = path
  try:
    with open(path, 'rb') as f:
      source = f.read()
  except OSError as error:
    raise ValueError(f'--config={path}: {error.strerror}.') from error
  sys.modules[module.__name__] = module  # as dataclasses in it expect
  with line_named(path):
    code = compile(source, path, 'exec', dont_inherit=True)
    exec(code, module.__dict__)
  if not hasattr(module, 'get_config'):
    raise ValueError(f'--config={path} defines no get_config().')
  return module


def fail(message: object) -> None:
  """Prints one line on standard error and exits with code 1."""
  print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
  sys.exit(1)


def _guarded(main, argv) -> None:
  try:
    code = main(argv)
    sys.stdout.flush()
  except BrokenPipeError:
    # Who read the output wants no more of it, as in `... | head`.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 1
  except FAILURES as error:
    if _keep_traceback():
      raise
    fail(reason(error))
  sys.exit(code)


def _keep_traceback() -> bool:
  return os.environ.get('GQA_TRACEBACK') == '1'


def reason(error: Exception) -> str:
  """Says in words what the exceptions of Python and absl say in code."""
  if isinstance(error, OSError) and error.filename is not None:
    return f'{error.strerror}: {error.filename}'
  if isinstance(error, KeyError) and error.args:
    return str(error.args[0])
  message = str(error)
  if not isinstance(error, flags.Error):
    return message
  missing = re.findall(r'Flag (--\S+) must have a value', message)
  if missing:
    return f'{" and ".join(missing)} must be given; see --help.'
  return message.removeprefix('flag ')


def _check_config(argv: Sequence[str], flag_values: flags.FlagValues) -> None:
  """Raises ValueError for a config file or field that cannot be used.

  The flag itself puts off the error of a missing file until the config is
  used, and names neither the line of other errors nor the near field.
  """
  if 'config' not in flag_values:
    return
  if flag_values['config'].flag_type() != 'config object':
    return
  argv = flag_values.read_flags_from_files(list(argv[1:]), force_gnu=False)
  path, fields = _config_arguments(argv)
  if path is None:
    if fields and flag_values['config'].default is None:
      raise ValueError(f'--config.{fields[0]} needs --config=FILE before it.')
    return
  path, *argument = path.split(':', 1)
  module = load_config_file(path)
  with line_named(path):
    config = module.get_config(*argument)
  for field in fields:
    _check_field(config, field)


def _config_arguments(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """Returns the value of --config and the fields of --config.FIELD flags."""
  path, fields = None, []
  for i, argument in enumerate(argv):
    name, equals, value = argument.partition('=')
    if name in ('--config', '-config'):
      path = value if equals else ''.join(argv[i + 1 : i + 2])
    elif match := re.fullmatch(r'--?(?:no)?config\.(.+)', name):
      fields.append(match[1])
  return path, fields


def _check_field(config, path: str) -> None:
  node, at = config, '--config'
  for part in re.sub(r'\[.*', '', path).split('.'):
    if not hasattr(node, 'keys'):
      raise ValueError(f'--config.{path}: {at} has no fields.')
    names = list(node.keys())
    if part not in names:
      near = difflib.get_close_matches(part, names, n=1)
      hint = f'did you mean {near[0]}?' if near else f'known are {names}.'
      raise ValueError(f'--config.{path}: {part} is not a field; {hint}')
    node, at = node[part], f'{at}.{part}'


@contextlib.contextmanager
def line_named(path: str):
  """Turns what a config file raises into a ValueError that names its line."""
  try:
    yield
  except SyntaxError as error:
    raise ValueError(
      f'{error.filename}, line {error.lineno}: {error.msg}'
    ) from error
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f'{path}, line {lines[-1]}' if lines else path
    kind = type(error).__name__
    raise ValueError(f'{where}: {kind}: {reason(error)}') from error
