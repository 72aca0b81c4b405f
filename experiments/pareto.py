"""Which number of KV heads is worth its time?

  python -m gqa.sweep --config=experiments/pareto.py --workdir=runs/pareto
  python -m gqa.report --workdir=runs/pareto

Figure 3 of Ainslie et al. 2023, from nothing: for each seed a multi-head model
and a smaller one are trained on Shakespeare's plays (configs/tiny.py), the
first is converted to fewer KV heads and uptrained for alpha of its steps, and
all shapes are timed while they decode. The report joins loss and time where
the model is the same, field by field. About half an hour on 2 CPU cores;
--config.data.path=DIR takes another text.

A model this small has its weights in a CPU's caches: the first batch and
context show that, the second, whose multi-head cache takes half a gigabyte,
what KV heads are about. Contexts may be longer than the text it was trained
on, as what is timed is a shape.
"""

from configs import tiny
from experiments import decode_cost
from gqa import points

SMALL = {
  'model.embed_dim': 64,
  'model.num_heads': 4,
  'model.mlp_dim': 176,
}
# Fields of the model that the benchmark sets itself, or has no use for.
_OTHER = ('num_kv_heads', 'dtype', 'max_len', 'match_params')


def get_config():
  return tiny.get_config()


def sweep(
  seeds=3,
  num_kv_heads=(4, 2, 1),
  method='low_rank',
  alpha=0.05,
  batch_size=(1, 32),
  context=(128, 4096),
):
  for seed in range(seeds):
    yield {'seed': seed, **SMALL}
    parent = points.Step('train', {'seed': seed})
    yield parent
    for heads in num_kv_heads:
      converted = points.Step(
        'convert', {'source': parent, 'num_kv_heads': heads, 'method': method}
      )
      yield points.Step(
        'train',
        {'init_from': converted, 'uptrain.alpha': alpha, 'seed': seed},
        config='configs/uptrain.py',
      )
  for overrides, fewer in (({}, num_kv_heads), (SMALL, ())):
    config = get_config()
    config.update_from_flattened_dict(overrides)
    yield points.Step(
      'benchmark',
      {
        **_shape(config.model),
        'grid.num_kv_heads': (config.model.num_heads, *fewer),
        'grid.batch_size': batch_size,
        'grid.context': context,
        'grid.dtype': config.model.dtype,
      },
      config='experiments/decode_cost.py',
    )


def _shape(model):
  """What the benchmark's model is to be changed in to be this one."""
  other = decode_cost.get_config().model
  return {
    f'model.{name}': value
    for name, value in model.items()
    if name not in _OTHER and value != other[name]
  }
