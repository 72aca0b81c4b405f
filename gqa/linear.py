"""Products with kernels, and their gradients in the order that is fastest.

XLA copies a product's left operand when its contracted axes do not come last.
A kernel's gradient contracts the long axis of both its operands, so one of
them is copied: here always the narrower one.

Training keeps a kernel [*in, *out]. Decoding on CPU keeps its rows [*out, *in]:
as the left operand of a float32 product with few columns they are read at up to
1.6 times the speed, and with many (a prompt) at the same.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SAVED = 'projection'  # what a policy of rematerialisation may keep
ROW_PARTS = 4  # of a product with one row, on CPU
ROWS_LEFT = 512  # tokens up to which rows are a product's left operand, on CPU
# More than 4 tokens are filled up to one of these, on CPU: XLA multiplies them in
# less time than most that are fewer. A step of M110 with 6, 12 and 28 rows takes
# 0.85, 0.87 and 0.73 of the time without (experiments/decode_cost.py against FULL
# of (), 4 KV heads, 128 tokens; 2 cores of an AMD EPYC (Zen 4), 2026-12-01).
FULL = (8, 16, 20, 24, 32, 40, 48, 64)
PLATFORM_KERNELS = {'cpu': 'rows'}  # of decoding; elsewhere as in training


def project(x: jax.Array, kernel: jax.Array, inputs: int = 1) -> jax.Array:
  """Contracts the trailing `inputs` axes of x with the first of the kernel.

  Args:
    x: [..., *in], in the compute dtype.
    kernel: [*in, *out] float32; it is cast to x's dtype.
    inputs: the number of input axes.

  Returns:
    [..., *out] in x's dtype. Gradients of kernels are float32.
  """
  leading, size = x.shape[: x.ndim - inputs], math.prod(kernel.shape[:inputs])
  y = _matmul(x.reshape(*leading, size), kernel.reshape(size, -1))
  y = checkpoint_name(y, SAVED)
  return y.reshape(*leading, *kernel.shape[inputs:])


@jax.custom_vjp
def _matmul(x, kernel):
  """x [..., I] and kernel [I, O] -> [..., O] in x's dtype."""
  return _times(x, kernel.astype(x.dtype), 0).astype(x.dtype)


def _matmul_fwd(x, kernel):
  return _matmul(x, kernel), (x, kernel)


def _matmul_bwd(residuals, grad):
  x, kernel = residuals
  dx = _dot(grad, kernel.astype(x.dtype), x.ndim - 1, 1).astype(x.dtype)
  rows = tuple(range(x.ndim - 1))
  if x.shape[-1] <= grad.shape[-1]:
    dkernel = _dot(x, grad, rows, rows)
  else:
    dkernel = transposed(_dot(grad, x, rows, rows))
  return dx, dkernel.astype(kernel.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def project_rows(x: jax.Array, rows: jax.Array, inputs: int = 1) -> jax.Array:
  """`project` with a kernel's rows [*out, *in]; it is not for training."""
  leading, size = x.shape[: x.ndim - inputs], math.prod(rows.shape[-inputs:])
  matrix = rows.reshape(-1, size).astype(x.dtype)
  y = against_rows(x.reshape(*leading, size), matrix).astype(x.dtype)
  return y.reshape(*leading, *rows.shape[:-inputs])


def rows_of(kernel: jax.Array, inputs: int = 1) -> jax.Array:
  """The rows [*out, *in] of a kernel [*in, *out]."""
  axes = range(kernel.ndim)
  return kernel.transpose(*axes[inputs:], *axes[:inputs])


def against_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  """Float32 products [..., R] of x [..., D] with each of rows [R, D]."""
  return _times(x, rows, 1)


def _times(x, matrix, axis):
  """Contracts x [..., I] with an axis of a matrix of the same type."""
  # Of more axes XLA would make two and, in a decoding loop, copy the matrix.
  flat = x.reshape(-1, x.shape[-1])
  cpu = jax.default_backend() == 'cpu'
  if cpu and flat.shape[0] == 1 and x.ndim > 1:
    y = _row_times(flat[0], matrix, axis)
  elif (
    cpu and axis == 1 and x.dtype == jnp.float32 and flat.shape[0] <= ROWS_LEFT
  ):
    # Without the barriers XLA would turn it back. In bfloat16 it would take a
    # float32 copy of the matrix.
    columns = lax.optimization_barrier(_filled(flat).T)
    y = transposed(_dot(matrix, columns, 1, 0))[: flat.shape[0]]
  else:
    y = _dot(flat, matrix, 1, axis)
  return y.reshape(*x.shape[:-1], -1)


def _filled(tokens):
  """Tokens [T, I] and zeros, as many as FULL says."""
  count = tokens.shape[0]
  size = next((size for size in FULL if size >= count > 4), count)
  return jnp.pad(tokens, ((0, size - count), (0, 0)))


def _row_times(row, matrix, axis):
  """`_times` of one row [I], as XLA on CPU is fastest: [O].

  Such a product is limited by the reading of its matrix. Of float32 its parts
  read side by side; of bfloat16 one row takes longer than two.
  """
  if matrix.dtype == jnp.bfloat16:
    return _dot(jnp.stack([row, row]), matrix, 1, axis)[0]
  parts = ROW_PARTS if matrix.shape[0] % ROW_PARTS == 0 else 1
  split = matrix.reshape(parts, -1, matrix.shape[1])
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  if axis == 0:
    return einsum('si,sio->so', row.reshape(parts, -1), split).sum(axis=0)
  rows = jnp.broadcast_to(row, (parts, *row.shape))
  return einsum('si,soi->so', rows, split).reshape(-1)


def transposed(product: jax.Array) -> jax.Array:
  """Swaps the last two axes of a product, as a step of its own.

  Folded into the product, which XLA would do, it would cost more, and in
  bfloat16 would not compile on CPU.
  """
  return lax.optimization_barrier(product).swapaxes(-1, -2)


def _dot(a, b, a_axes, b_axes):
  as_tuple = lambda axes: axes if isinstance(axes, tuple) else (axes,)
  return lax.dot_general(
    a,
    b,
    ((as_tuple(a_axes), as_tuple(b_axes)), ((), ())),
    preferred_element_type=jnp.float32,
  )
