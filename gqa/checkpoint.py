"""Checkpoints of a run: written in the background, read strictly.

All use of orbax is here. A workdir holds
`checkpoints/<step>/{params,opt_state,data,meta}`; `params` is an item of its
own, so that a checkpoint opens without its optimizer. Nothing is padded, cut
or cast to fit: tree, shapes and types are compared before an array is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gqa import matching
from gqa import model as model_lib
from gqa import sharding as sharding_lib
from gqa import workdir as workdir_lib
from gqa.config import ModelConfig

Path = str | os.PathLike[str]

# Bytes that are gathered in memory before they are written to a file.
_DATA_FILE_SIZE = 1 << 24


def _is_shown(record: logging.LogRecord) -> bool:
  # What orbax reports with a traceback it also raises.
  quiet = record.levelno < logging.ERROR or record.exc_info
  return not (quiet and 'orbax' in record.pathname)


logging.getLogger('absl').addFilter(_is_shown)


def steps(path: Path) -> list[int]:
  """List the steps of which a workdir holds a complete checkpoint."""
  return _list_steps(workdir_lib.locate(path)[0] / 'checkpoints')[0]


def load_params(
  path: Path,
  step: int | str | None = None,
  template: Any = None,
  sharding: jax.sharding.Sharding | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Read the parameters of a checkpoint, and nothing of its optimizer.

  Args:
    path: a workdir, or one of its `checkpoints/<step>`.
    step: 'latest' (or None), 'best' by validation loss, or a step.
    template: tree of arrays or `jax.ShapeDtypeStruct` that the checkpoint must
      match; without one, what is there is read as a nested dict. Parameters
      that were imported in half precision are widened, which is exact.
    sharding: where arrays go, unless the template says so; one device unless
      given. The devices that saved play no part.

  Returns:
    The parameters and the `meta` of the checkpoint.

  Raises:
    ValueError: there is no such checkpoint, it does not match, or is damaged.
  """
  directory = _find(path, step)
  saved = _saved_leaves(directory, 'params')
  if template is None:
    template = _nest(saved)
  expected = _flatten(template)
  widened = {
    path: expected[path]
    if matching.is_wider(expected.get(path), leaf)
    else leaf
    for path, leaf in saved.items()
  }
  matching.check_match(directory, {'params': (widened, expected)})
  sharding = sharding or jax.sharding.SingleDeviceSharding(
    jax.local_devices()[0]
  )
  target = jax.tree.map(lambda leaf: _target(leaf, sharding), template)
  with _reading(directory):
    with ocp.StandardCheckpointer() as reader:
      params = reader.restore(directory / 'params', target)
  return params, _read_json(directory, 'meta')


def load_on_mesh(
  path: Path, step: str, config: ModelConfig, mesh: jax.sharding.Mesh
) -> tuple[model_lib.Params, dict[str, Any]]:
  """Read the parameters of a model onto a mesh, as they are split over it.

  Args:
    path: a workdir, or one of its checkpoints/<step>.
    step: 'latest', 'best', or a number.
    config: what the checkpoint must hold.
    mesh: where parameters go.

  Returns:
    The parameters, and the checkpoint's `meta`.

  Raises:
    ValueError: as `load_params`.
  """
  shapes = jax.eval_shape(
    lambda: model_lib.init_params(config, jax.random.key(0))
  )
  template = jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
    ),
    shapes,
    sharding_lib.param_specs(shapes, mesh, config),
  )
  if step.isdecimal():
    step = int(step)
  return load_params(path, step, template)


def load_meta(path: Path, step: int | str | None = None) -> dict[str, Any]:
  """Read what a checkpoint says of itself, and none of its arrays.

  Arguments and errors are those of `load_params`.
  """
  return _read_json(_find(path, step), 'meta')


def trained_steps(meta: Mapping[str, Any]) -> int:
  """Count the updates behind a checkpoint, by it and those it came from."""
  parent = meta.get('parent') or {}
  return meta['step'] + parent.get('steps', 0)


def save_params(
  path: Path, params: Any, meta: Mapping[str, Any], step: int = 0
):
  """Write a checkpoint without an optimizer, such as a converted model.

  It takes little memory besides that of parameters that are jax arrays; of
  numpy arrays orbax makes a copy first.

  Raises:
    ValueError: the workdir has a checkpoint of that step.
    OSError: it cannot be written.
  """
  root = workdir_lib.absolute(path) / 'checkpoints'
  if step in _list_steps(root)[0]:
    raise ValueError(
      f'{root / str(step)} exists already; choose another target.'
    )
  items = ocp.args.Composite(
    params=ocp.args.PyTreeSave(
      params, ocdbt_target_data_file_size=_DATA_FILE_SIZE
    ),
    meta=ocp.args.JsonSave({**meta, 'step': step}),
  )
  options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
  with _writing(root, step):
    with ocp.CheckpointManager(root, options=options) as manager:
      manager.save(step, args=items, force=True)


class Checkpointer:
  """Saves and restores the training state of one run; a context manager.

  A state is a `flax.struct` dataclass with `step`, `params`, `opt_state`,
  `nonfinite` and `skipped`. The three counters are kept as JSON integers in
  `meta`, so that none is rounded.

  Args:
    workdir: as `resolve_workdir` returns it.
    every_steps: how often `save` saves; 0: only when forced.
    keep_latest: how many of the newest to keep; 0 is 1, as a run needs one to
      resume; None: all.
    keep_best: how many of those with the lowest validation loss to keep
      besides; 0 or None: none. Without a loss a checkpoint is never the best.
  """

  def __init__(
    self,
    workdir: Path,
    every_steps: int,
    keep_latest: int | None,
    keep_best: int | None,
  ):
    self._root = pathlib.Path(workdir) / 'checkpoints'
    self._every_steps = every_steps
    self._pending = None  # step that is being written
    if jax.process_index() == 0:
      self._set_aside_incomplete()
    self._retention = _Retention(keep_latest, keep_best)
    self._manager = ocp.CheckpointManager(
      self._root,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._retention,
        cleanup_tmp_directories=True,
        # Where making one in the background fails, the threads that wait for
        # it hold up the end of the process for minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      ),
    )
    for step in self._manager.all_steps():
      self._retention.losses[step] = _eval_loss(self._root / str(step))

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback):
    try:
      self.close()
    except OSError as failure:
      if error is None:
        raise
      error.add_note(str(failure))

  def latest_step(self) -> int | None:
    """Give the step of the newest checkpoint, one being written included."""
    return self._manager.latest_step()

  def should_save(self, step: int) -> bool:
    """Tell whether `save` would save, without waiting for the device.

    True where a multiple of `every_steps` was reached or passed since the
    newest checkpoint.
    """
    latest = self.latest_step() or 0
    every = self._every_steps
    return every > 0 and step // every > latest // every

  def save(
    self,
    state: Any,
    data_state: Mapping[str, Any],
    meta: Mapping[str, Any],
    eval_loss: float | None = None,
    force: bool = False,
  ) -> bool:
    """Save in the background, where it is time to or `force` is set.

    The state may be donated to the next update as soon as this returns. A step
    that was saved before is not saved again.

    Args:
      state: the training state.
      data_state: position in the data, JSON, the same on every process.
      meta: what else to remember, JSON.
      eval_loss: validation loss of this very state.
      force: save at any step.

    Returns:
      Whether it saves.

    Raises:
      OSError: this save or the one before failed; the message names the step.
    """
    step = int(state.step)
    due = force or self.should_save(step)
    if not due or step in self._manager.all_steps():
      return False
    self.wait()
    loss = None if eval_loss is None else float(eval_loss)
    if loss is not None and not math.isfinite(loss):
      loss = None
    self._retention.losses[step] = loss
    counters = {
      'step': step,
      'eval_loss': loss,
      'nonfinite': int(state.nonfinite),
      'skipped': int(state.skipped),
    }
    items = ocp.args.Composite(
      params=ocp.args.StandardSave(state.params),
      opt_state=ocp.args.StandardSave(state.opt_state),
      data=ocp.args.JsonSave(dict(data_state)),
      meta=ocp.args.JsonSave({**meta, **counters}),
    )
    with _writing(self._root, step):
      self._manager.save(step, args=items, force=True)
    self._pending = step
    return True

  def wait(self):
    """Wait until everything is on disk.

    Raises:
      OSError: a save failed; the message names the step.
    """
    step, self._pending = self._pending, None
    if step is not None:
      with _writing(self._root, step):
        self._manager.wait_until_finished()
        if step not in _list_steps(self._root)[0]:
          raise OSError('it is not there after being written')

  def close(self):
    """Wait, then release what saving holds.

    Raises:
      OSError: a save failed; the message names the step.
    """
    try:
      self.wait()
    finally:
      # A failure that `wait` raised comes up here again.
      with contextlib.suppress(Exception):
        self._manager.close()

  def restore(
    self, template: Any, step: int | None = None
  ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Read a training state onto the devices that `template` names.

    Args:
      template: the state as arrays or `jax.ShapeDtypeStruct` with shardings;
        any number of devices, whatever number saved.
      step: the newest unless given.

    Returns:
      The state, the position in the data and `meta`, as they were saved.

    Raises:
      ValueError: there is no such checkpoint, it does not match, or is damaged.
    """
    self.wait()
    directory = _find(self._root.parent, step)
    if not (directory / 'opt_state').exists():
      raise ValueError(
        f'{directory} has no optimizer state, so no run can resume from it; '
        'start a new run from its parameters with --config.init_from.'
      )
    trees = {'params': template.params, 'opt_state': template.opt_state}
    matching.check_match(
      directory,
      {
        item: (_saved_leaves(directory, item), _flatten(tree))
        for item, tree in trees.items()
      },
    )
    with _reading(directory), ocp.StandardCheckpointer() as reader:
      restored = {
        item: reader.restore(directory / item, jax.tree.map(_target, tree))
        for item, tree in trees.items()
      }
    meta = _read_json(directory, 'meta')
    counters = {
      name: _place(meta[name], getattr(template, name))
      for name in ('step', 'nonfinite', 'skipped')
    }
    state = template.replace(**restored, **counters)
    return state, _read_json(directory, 'data'), meta

  def _set_aside_incomplete(self):
    """Rename what a crash left half deleted, so that its step is free."""
    for step in _list_steps(self._root)[1]:
      aside = self._root / f'{step}.incomplete'
      shutil.rmtree(aside, ignore_errors=True)
      os.replace(self._root / str(step), aside)


class _Retention:
  """Orbax's preservation policy: the newest, and the best by loss."""

  def __init__(self, keep_latest: int | None, keep_best: int | None):
    self._keep_latest = keep_latest
    self._keep_best = keep_best or 0
    self.losses: dict[int, float | None] = {}

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any):
    """Tell of each checkpoint, oldest first, whether it stays."""
    del context
    present = [checkpoint.step for checkpoint in checkpoints]
    latest = present
    if self._keep_latest is not None:
      latest = present[-max(self._keep_latest, 1) :]
    measured = [s for s in present if self.losses.get(s) is not None]
    best = sorted(measured, key=self.losses.get)[: self._keep_best]
    return [step in latest or step in best for step in present]


def _list_steps(root: pathlib.Path) -> tuple[list[int], list[int]]:
  """List the steps of complete checkpoints, and of incomplete ones."""
  complete, incomplete = [], []
  if root.is_dir():
    for entry in root.iterdir():
      if entry.name.isdigit():
        marks = ('_CHECKPOINT_METADATA', 'params/_METADATA', 'meta/metadata')
        whole = all((entry / mark).exists() for mark in marks)
        (complete if whole else incomplete).append(int(entry.name))
  return sorted(complete), sorted(incomplete)


def _find(path: Path, step: int | str | None) -> pathlib.Path:
  """Find the directory of a checkpoint, or say what there is instead."""
  workdir, named = workdir_lib.locate(path)
  root = workdir / 'checkpoints'
  if named is not None:
    if step not in (None, named):
      raise ValueError(
        f'{path} is step {named}, but step={step!r} was asked for; give the '
        'workdir to choose a step.'
      )
    step = named
  complete, incomplete = _list_steps(root)
  partial = (
    f' (incomplete: {workdir_lib.listed(incomplete)})' if incomplete else ''
  )
  if not complete:
    raise ValueError(
      f'{workdir} has no checkpoint{partial}; give the workdir of a run, or '
      'one of its checkpoints/<step>.'
    )
  if step in (None, 'latest'):
    step = complete[-1]
  elif step == 'best':
    losses = {s: _eval_loss(root / str(s)) for s in complete}
    losses = {s: loss for s, loss in losses.items() if loss is not None}
    if not losses:
      raise ValueError(
        f'No checkpoint of {workdir} has a validation loss, so none is the '
        "best; use step='latest'."
      )
    step = min(losses, key=losses.get)
  if step not in complete:
    raise ValueError(
      f'{workdir} has no checkpoint of step={step!r}{partial}; choose one of '
      f"{workdir_lib.listed(complete)}, 'latest' or 'best'."
    )
  return root / str(step)


def _eval_loss(directory: pathlib.Path) -> float | None:
  return _read_json(directory, 'meta').get('eval_loss')


def _read_json(directory: pathlib.Path, item: str) -> dict[str, Any]:
  with _reading(directory):
    return json.loads((directory / item / 'metadata').read_text())


@contextlib.contextmanager
def _reading(directory: pathlib.Path):
  """Turn whatever goes wrong in reading into one line about the checkpoint."""
  try:
    yield
  except Exception as error:
    raise ValueError(
      f'{directory} is damaged and cannot be read ({_first_line(error)}); '
      'use another step.'
    ) from error


@contextlib.contextmanager
def _writing(root: pathlib.Path, step: int):
  """Turn whatever goes wrong in writing into one line that names the step."""
  try:
    yield
  except Exception as error:
    raise OSError(
      f'Saving the checkpoint of step {step} in {root} failed: '
      f'{_first_line(error)}'
    ) from error


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [''])[0] or type(error).__name__


def _saved_leaves(directory: pathlib.Path, item: str) -> dict[tuple, Any]:
  """Read path, shape and type of each saved array, but no array."""
  with _reading(directory), ocp.StandardCheckpointer() as reader:
    tree = reader.metadata(directory / item).item_metadata.tree
  return {
    path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for path, leaf in _flatten(tree).items()
  }


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
  """List leaves by path, spelled alike for dicts, tuples and named tuples."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
    for path, leaf in leaves
  }


def _nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    branch = tree
    for key in path[:-1]:
      branch = branch.setdefault(key, {})
    branch[path[-1]] = leaf
  return tree


def _target(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, 'sharding', None) or sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _place(number: int, template: Any) -> jax.Array:
  value = np.asarray(number, template.dtype)
  return jax.device_put(value, getattr(template, 'sharding', None))
