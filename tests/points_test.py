"""Properties of the algebra of sweeps."""

import ast
import pathlib
import sys

import pytest

from gqa import points
from gqa.points import Step

HEADS = points.over('model.num_kv_heads', [4, 2])
RATES = points.over('optim.learning_rate', [1e-3, 3e-3, 1e-2])


def test_a_product_has_every_combination_and_the_last_list_varies_fastest():
  assert points.product(HEADS, points.seeds(2)) == [
    {'model.num_kv_heads': 4, 'seed': 0},
    {'model.num_kv_heads': 4, 'seed': 1},
    {'model.num_kv_heads': 2, 'seed': 0},
    {'model.num_kv_heads': 2, 'seed': 1},
  ]
  assert len(points.product(HEADS, RATES, points.seeds(5))) == 2 * 3 * 5
  assert points.product() == [{}]
  assert points.product(HEADS, []) == []


def test_lists_that_are_zipped_go_hand_in_hand():
  assert points.zipped(HEADS, points.seeds(2, first=7)) == [
    {'model.num_kv_heads': 4, 'seed': 7},
    {'model.num_kv_heads': 2, 'seed': 8},
  ]
  with pytest.raises(ValueError, match=r'lists of \[2, 3\] points'):
    points.zipped(HEADS, RATES)


def test_a_chain_is_one_list_after_the_other():
  assert points.chain(HEADS, RATES) == [*HEADS, *RATES]


def test_generators_serve_as_lists():
  assert points.product(iter(HEADS), (p for p in RATES)) == points.product(
    HEADS, RATES
  )


@pytest.mark.parametrize('combine', [points.product, points.zipped])
def test_a_field_that_two_lists_set_is_refused(combine):
  with pytest.raises(ValueError, match='model.num_kv_heads is set by two'):
    combine(HEADS, HEADS)


def test_points_do_not_share_their_dicts():
  combined = points.product(HEADS, points.seeds(2))
  combined[0]['seed'] = 9
  assert combined[1]['seed'] == 1 and HEADS[0] == {'model.num_kv_heads': 4}


def test_equal_steps_are_one_and_the_order_of_overrides_is_no_matter():
  a = Step('train', {'seed': 1, 'model.num_kv_heads': (4, 2)})
  b = Step('train', {'model.num_kv_heads': [4, 2], 'seed': 1})
  assert a == b and len({a, b}) == 1
  converted = [
    Step('convert', {'source': s, 'num_kv_heads': 1}) for s in (a, b)
  ]
  assert len(set(converted)) == 1


@pytest.mark.parametrize(
  'other',
  [
    Step('train', {'seed': 2}),
    Step('train', {'seed': 1.0}),
    Step('train', {'seed': True}),
    Step('train', {'seed': '1'}),
    Step('train', {'seed': 1}, config='configs/tiny.py'),
    Step('train', {}),
    Step('benchmark', {'seed': 1}),
  ],
)
def test_steps_that_differ_are_not_one(other):
  assert other != Step('train', {'seed': 1})


def test_a_step_waits_for_the_steps_among_its_values():
  parent = Step('train', {})
  converted = Step('convert', {'source': parent, 'num_kv_heads': 2})
  assert converted.after == [parent] and parent.after == []
  both = Step('evaluate', {'checkpoint': converted, 'data': parent})
  assert both.after == [converted, parent]


def test_a_step_does_not_change_with_the_dict_it_was_made_of():
  overrides = {'seed': 1}
  step = Step('train', overrides)
  overrides['seed'] = 2
  assert step.overrides == {'seed': 1}


def test_a_wrong_step_is_refused():
  with pytest.raises(ValueError, match="verb='trian' is unknown"):
    Step('trian', {})
  with pytest.raises(ValueError, match='convert takes flags'):
    Step('convert', {}, config='configs/tiny.py')


def test_the_module_needs_the_standard_library_only():
  tree = ast.parse(pathlib.Path(points.__file__).read_text())
  names = {
    (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
    for node in ast.walk(tree)
    if isinstance(node, ast.Import | ast.ImportFrom)
  }
  assert {name.partition('.')[0] for name in names} <= sys.stdlib_module_names
