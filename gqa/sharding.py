"""How batch, parameters and activations are divided over devices.

Devices form a mesh of three axes. `data` and `fsdp` split the batch; `fsdp`
also splits parameters and optimizer moments, which are gathered where they are
used; `model` splits heads, MLP and vocabulary. Two tables say it all: RULES,
from the logical name of an array axis to mesh axes, and PARAMETERS, from a
parameter to its logical axes.

An axis that does not divide is an error before anything is computed, never
dropped silently. The one exception is on purpose: KV heads that `model` does
not divide are replicated over it. A multi-query model keeps its one KV head on
every device of `model`, and its query heads are still split.
"""

import math
import os

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MESH_AXES = ('data', 'fsdp', 'model')

# Logical axis -> the mesh axes that split it.
RULES = {
  # A device computes its own sequences; gradients are summed over both.
  'batch': ('data', 'fsdp'),
  # Every kernel and embedding has this axis, and with it so do its moments.
  'embed': ('fsdp',),
  # A head attends alone: attention needs no communication, and the output
  # projection ends in one sum over the devices.
  'heads': ('model',),
  # Query head n reads KV head n // G: each device holds the KV heads of its
  # own query heads, if `model` divides the KV heads of every layer. Otherwise
  # all are replicated, even with a common divisor (2 KV heads on 4 devices):
  # to split `model` in two for it saves memory only, and there K and V are
  # small.
  'kv_heads': ('model',),
  # Column-parallel, then row-parallel: one sum for each MLP.
  'mlp': ('model',),
  # The largest matrix and the largest activation of a small model.
  'vocab': ('model',),
  # A sum over head_dim in each attention logit would need communication.
  'head_dim': (),
  'length': (),
}

# Parameter -> logical axes. All norms share the entry 'norm'.
PARAMETERS = {
  'embed/embedding': ('vocab', 'embed'),
  'position_embed/embedding': (None, 'embed'),
  'query/kernel': ('embed', 'heads', 'head_dim'),
  'query/bias': ('heads', 'head_dim'),
  'key/kernel': ('embed', 'kv_heads', 'head_dim'),
  'key/bias': ('kv_heads', 'head_dim'),
  'value/kernel': ('embed', 'kv_heads', 'head_dim'),
  'value/bias': ('kv_heads', 'head_dim'),
  'key_mix/scale': (None,),
  'value_mix/scale': (None,),
  'out/kernel': ('heads', 'head_dim', 'embed'),
  'out/bias': ('embed',),
  'gate/kernel': ('embed', 'mlp'),
  'gate/bias': ('mlp',),
  'up/kernel': ('embed', 'mlp'),
  'up/bias': ('mlp',),
  'down/kernel': ('mlp', 'embed'),
  'down/bias': ('embed',),
  'head/kernel': ('embed', 'vocab'),
  'head/bias': ('vocab',),
  'norm/scale': (None,),
  'norm/bias': (None,),
}

# The config field that sets the size of a logical axis.
_FIELDS = {
  'batch': 'batch_size',
  'embed': 'model.embed_dim',
  'heads': 'model.num_heads',
  'mlp': 'model.mlp_dim',
  'vocab': 'model.vocab_size',
}


def set_cpu_devices(count: int) -> None:
  """Divides the CPU into `count` XLA devices; call it before any computation."""
  if count < 1:
    raise ValueError(f'mesh.cpu_devices={count} must be at least 1; set it.')
  try:
    jax.config.update('jax_num_cpu_devices', count)
  except RuntimeError as error:  # the backend has started
    started = jax.local_device_count(backend='cpu')
    if started != count:
      raise ValueError(
        f'mesh.cpu_devices={count}, but this process has already started '
        f'with {started} CPU devices; use that number or a new process.'
      ) from error


def initialize_distributed() -> None:
  """Joins the processes of one run; does nothing for a single process.

  Processes are announced by GQA_COORDINATOR (host:port of process 0),
  GQA_NUM_PROCESSES and GQA_PROCESS_ID, or by `srun` with more than one task;
  GQA_COORDINATOR=auto leaves it to jax, which knows TPU pods.
  Call it before anything uses a device. Under srun jax gives each task the one
  GPU of its local rank: start as many tasks on a node as it has GPUs.
  """
  if jax.distributed.is_initialized():
    return
  env = os.environ
  if env.get('GQA_COORDINATOR') == 'auto':
    jax.distributed.initialize()
  elif 'GQA_COORDINATOR' in env:
    address = env['GQA_COORDINATOR']
    local = address.startswith(('127.', 'localhost:'))
    jax.distributed.initialize(
      address,
      _env_int('GQA_NUM_PROCESSES', 'the number of processes'),
      _env_int('GQA_PROCESS_ID', 'the rank of this process, from 0'),
      cluster_detection_method='deactivate',
      coordinator_bind_address=address if local else None,
    )
  # Not SLURM_NTASKS: a batch script has it as well, and is one process.
  elif int(env.get('SLURM_STEP_NUM_TASKS', '1')) > 1:
    jax.distributed.initialize()


def make_mesh(config, devices=None) -> jax.sharding.Mesh:
  """Returns the mesh of `config.mesh` over `devices`, by default all."""
  devices = jax.devices() if devices is None else devices
  sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
  text = ', '.join(f'mesh.{axis}={size}' for axis, size in sizes.items())
  if any(size < 1 and size != -1 for size in sizes.values()):
    raise ValueError(
      f'{text}: each must be at least 1, or -1 for all devices that remain; '
      'set 1 for an axis that is not used.'
    )
  unknown = [axis for axis, size in sizes.items() if size == -1]
  if len(unknown) > 1:
    raise ValueError(
      f'{text}: only one may be -1 (all devices that remain); set the others.'
    )
  product = math.prod(size for size in sizes.values() if size != -1)
  if unknown and len(devices) % product == 0:
    sizes[unknown[0]] = len(devices) // product
  elif product != len(devices):
    rule = 'divide' if unknown else 'equal'
    raise ValueError(
      f'{text}: the product {product} must {rule} the number of devices, '
      f'{len(devices)}; change the mesh (on a CPU, or mesh.cpu_devices).'
    )
  # Auto: the compiler places what `constrain` leaves open.
  return jax.make_mesh(
    tuple(sizes.values()),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
    devices=devices,
  )


def param_specs(params, mesh, model_config):
  """Returns a PartitionSpec for each parameter of a tree of arrays or shapes.

  Key and value kernels are split over `model` if it divides the KV heads of
  every layer, so that all layers are laid out alike.
  """
  replicate = any(k % mesh.shape['model'] for k in model_config.kv_heads)

  def decide(path, param):
    path = _name(path)
    module, _, leaf = path.rpartition('/')
    module = module.rpartition('/')[2]
    module = 'norm' if module.endswith('_norm') else module
    axes = PARAMETERS.get(f'{module}/{leaf}')
    if axes is None or len(axes) != len(param.shape):
      raise ValueError(
        f'parameter {path} of shape {tuple(param.shape)} must have logical '
        f'axes of its rank in sharding.PARAMETERS, which has {axes}; add it.'
      )
    if replicate:
      axes = tuple(None if axis == 'kv_heads' else axis for axis in axes)
    return _spec(axes, param.shape, mesh, f'parameter {path}')

  return jax.tree_util.tree_map_with_path(decide, params)


def state_shardings(abstract_state, mesh, model_config):
  """Returns a sharding for each leaf of a train state of shapes.

  A leaf whose path ends in the path of a parameter and that has its shape, as
  the moments have, is divided like the parameter. Everything else is
  replicated: counters, and the row and column sums of Adafactor.
  """
  params = abstract_state.params
  specs = param_specs(params, mesh, model_config)
  known = {
    _name(path): (param.shape, spec)
    for (path, param), spec in zip(
      jax.tree_util.tree_leaves_with_path(params),
      jax.tree.leaves(specs),
      strict=True,
    )
  }

  def decide(path, leaf):
    names = _name(path).split('/')
    for first in range(len(names)):
      shape, spec = known.get('/'.join(names[first:]), (None, None))
      if shape == leaf.shape:
        return NamedSharding(mesh, spec)
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(decide, abstract_state)


def constrain(x, logical_axes):
  """Lays out an activation by RULES on the mesh of `jax.set_mesh`, if one is.

  Outside a mesh, or on a mesh of one device, `x` is returned as it is.

  Args:
    x: an array of any rank.
    logical_axes: one name of RULES, or None (not split), for each axis of x:
      ('batch', 'length', None) for the residual stream, whose embed axis must
      stay whole as `fsdp` already splits the batch.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  spec = _spec(logical_axes, x.shape, mesh, f'activation {logical_axes}')
  return jax.lax.with_sharding_constraint(x, spec)


def check_batch(batch_size: int, mesh, grad_accum: int = 1) -> None:
  """Raises ValueError unless each device gets as many sequences."""
  parts = mesh.shape['data'] * mesh.shape['fsdp']
  if batch_size < 1 or batch_size % (parts * grad_accum):
    raise ValueError(
      f'train.batch_size={batch_size} must be a multiple of mesh.data='
      f'{mesh.shape["data"]} x mesh.fsdp={mesh.shape["fsdp"]} x '
      f'train.grad_accum={grad_accum} = {parts * grad_accum}; '
      'change one of them.'
    )


def batch_sharding(mesh, axis: int = 0) -> NamedSharding:
  """Returns the sharding of an array whose axis `axis` counts sequences."""
  return NamedSharding(
    mesh, PartitionSpec(*[None] * axis, _entry(RULES['batch']))
  )


def process_rows(mesh) -> tuple[int, int]:
  """Returns (index, count): this process reads sequences index::count.

  Processes that share sequences, because `model` spans them, have the same
  index: they must feed the same data.
  """
  rows = mesh.devices.reshape(-1, mesh.shape['model'])
  owners = [frozenset(d.process_index for d in row) for row in rows]
  groups = list(dict.fromkeys(owners))
  sizes = {owners.count(group) for group in groups}
  if sum(map(len, groups)) != len(frozenset().union(*groups)) or len(sizes) > 1:
    raise ValueError(
      f'mesh.model={mesh.shape["model"]} splits processes unevenly: the '
      f'processes of each part of the batch are {list(map(sorted, groups))}; '
      'use a mesh.model that divides the devices of a process, or is a '
      'multiple of them.'
    )
  here = jax.process_index()
  index = next(i for i, group in enumerate(groups) if here in group)
  return index, len(groups)


def put_batch(batch, mesh, axis: int = 0):
  """Moves a batch to the devices of the mesh, divided by sequence.

  Args:
    batch: a tree of host arrays; with several processes, the sequences that
      `process_rows` gives to this one.
    mesh: the mesh of the run.
    axis: the axis of every array that counts sequences.
  """
  sharding = batch_sharding(mesh, axis)
  if jax.process_count() == 1:
    return jax.device_put(batch, sharding)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
    batch,
  )


def _spec(logical_axes, shape, mesh, what):
  """Returns the PartitionSpec of one array; `what` names it in errors."""
  if len(logical_axes) != len(shape):
    raise ValueError(
      f'{what} of shape {tuple(shape)} has {len(logical_axes)} logical axes '
      f'for {len(shape)} axes; give one for each.'
    )
  entries = []
  for axis, size in zip(logical_axes, shape, strict=True):
    mesh_axes = RULES[axis] if axis else ()
    parts = math.prod(mesh.shape[name] for name in mesh_axes)
    if size % parts and axis == 'kv_heads':
      mesh_axes = ()
    elif size % parts:
      by = ' x '.join(f'mesh.{name}={mesh.shape[name]}' for name in mesh_axes)
      fits = [d for d in range(1, parts) if size % d == 0]
      raise ValueError(
        f'{_FIELDS[axis]}={size} must be a multiple of {by} ({what} of shape '
        f'{tuple(shape)}); use {size + -size % parts}, or split it over '
        f'{" or ".join(map(str, fits))}.'
      )
    entries.append(_entry(mesh_axes))
  return PartitionSpec(*entries)


def _entry(mesh_axes):
  """Returns mesh axes as one entry of a PartitionSpec."""
  if len(mesh_axes) > 1:
    return mesh_axes
  return mesh_axes[0] if mesh_axes else None


def _name(path):
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _env_int(name, meaning):
  value = os.environ.get(name, '')
  if not value.isdecimal():
    raise ValueError(
      f'{name}={value!r} must be {meaning}, as GQA_COORDINATOR is set; set '
      'it to an integer, or unset GQA_COORDINATOR.'
    )
  return int(value)
