"""Products against numpy's, for as many rows as they have special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa import linear

TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-2}


def arrays(rows, inputs, outputs, dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(1, rows, inputs)), dtype)
  matrix = jnp.asarray(rng.normal(size=(inputs, outputs)), dtype)
  exact = np.float64(x) @ np.float64(matrix)
  return x, matrix, exact


# 6 inputs and 10 outputs are no multiples of the parts of a row's product.
@pytest.mark.parametrize('sizes', [(8, 12), (6, 10)])
@pytest.mark.parametrize('rows', [1, 2, 9, linear.ROWS_LEFT + 1])
@pytest.mark.parametrize('dtype', TOLERANCE)
def test_products_of_one_row_and_of_several_are_those_of_numpy(
  dtype, rows, sizes
):
  x, matrix, exact = arrays(rows, *sizes, dtype)
  within = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
  project = jax.jit(linear.project)(x, matrix.astype(jnp.float32))
  assert project.dtype == dtype
  np.testing.assert_allclose(np.float64(project), exact, **within)
  by_rows = jax.jit(linear.project_rows)(x, linear.rows_of(matrix))
  assert by_rows.dtype == dtype
  np.testing.assert_allclose(np.float64(by_rows), exact, **within)
  against = jax.jit(linear.against_rows)(x, matrix.T)
  assert against.dtype == jnp.float32
  np.testing.assert_allclose(against, exact, **within)


@pytest.mark.parametrize(
  'rows, multiplied', [(4, 4), (5, 8), (9, 16), (20, 20), (64, 64), (65, 65)]
)
def test_few_rows_are_filled_up_on_cpu_to_a_number_that_is_faster(
  rows, multiplied, monkeypatch
):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  x, matrix, _ = arrays(rows, 8, 12, 'float32')
  program = str(jax.make_jaxpr(linear.against_rows)(x, matrix.T))
  assert f'f32[12,{multiplied}] = dot_general' in program


@pytest.mark.parametrize('inputs', [1, 2])
def test_rows_have_the_outputs_first_whatever_their_axes(inputs):
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(3, 4, 5)).astype(np.float32)
  x = rng.normal(size=(2, 2, *kernel.shape[:inputs])).astype(np.float32)
  rows = linear.rows_of(kernel, inputs)
  actual = linear.project_rows(jnp.asarray(x), jnp.asarray(rows), inputs)
  expected = np.tensordot(x, kernel, inputs)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('rows', [1, 3])
def test_gradients_are_the_transposed_products(rows):
  x, kernel, _ = arrays(rows, 8, 12, 'float32')
  _, pull = jax.vjp(linear.project, x, kernel)
  grad = np.random.default_rng(1).normal(size=(1, rows, 12)).astype(np.float32)
  dx, dkernel = pull(jnp.asarray(grad))
  np.testing.assert_allclose(dx, grad @ np.asarray(kernel).T, rtol=1e-5)
  np.testing.assert_allclose(
    dkernel, np.asarray(x)[0].T @ grad[0], rtol=1e-5, atol=1e-6
  )
