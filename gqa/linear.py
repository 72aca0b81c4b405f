"""Products with kernels, and their gradients in the order that is fastest.

XLA copies a product's left operand when its contracted axes do not come last.
A kernel's gradient contracts the long axis of both its operands, so one of
them is copied: here always the narrower one. Kernels that read the same input
are applied as one product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SAVED = 'projection'  # what a policy of rematerialisation may keep


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


def project_all(
  x: jax.Array, kernels: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
  """`project(x, kernel)` for kernels of one shape, as one product.

  The kernels are stacked on a new axis, so that each keeps its sharding.
  """
  stacked = jnp.stack(kernels, axis=1)  # [in, kernels, *out]
  return _unstack(project(x, stacked), x.ndim - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unstack(y, axis):
  # Its transpose by itself would be a sum of padded arrays.
  return tuple(
    lax.index_in_dim(y, i, axis, keepdims=False) for i in range(y.shape[axis])
  )


def _unstack_fwd(y, axis):
  return _unstack(y, axis), None


def _unstack_bwd(axis, _, grads):
  return (jnp.stack(grads, axis=axis),)


_unstack.defvjp(_unstack_fwd, _unstack_bwd)


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


def against_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  """Float32 products [..., R] of x [..., D] with each of rows [R, D]."""
  return _times(x, rows, 1)


def _times(x, matrix, axis):
  """Contracts x [..., I] with an axis of a matrix of the same type.

  XLA on CPU multiplies one row of bfloat16 8 times slower than two.
  """
  one = x.size == x.shape[-1] and x.ndim > 1 and x.dtype == jnp.bfloat16
  if one and jax.default_backend() == 'cpu':
    return _dot(jnp.concatenate([x, x]), matrix, x.ndim - 1, axis)[:1]
  return _dot(x, matrix, x.ndim - 1, axis)


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
