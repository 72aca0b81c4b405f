"""What does a model lose that is trained with fewer KV heads from the start?

  python -m gqa.sweep --config=experiments/kv_heads_from_scratch.py \
      --workdir=runs/kv_heads_from_scratch --parallel=2

Multi-head attention, two groupings and multi-query attention, each as it is,
which makes the model smaller, and with the MLP widened by what the heads saved
(Shazeer 2019, section 4.1), and everything with three seeds: 21 runs.

  --sweep.size=tiny   configs/tiny.py, 400 steps of 4,096 tokens; the data of the
                      quickstart
  --sweep.size=books  configs/books.py, 800 steps of 4,096 tokens; ten hours on
                      2 CPU cores
  --sweep.seeds=1     a third of the runs
"""

from configs import tiny
from gqa import points

_SIZES = {
  'tiny': ('configs/tiny.py', {}),
  'books': (
    'configs/books.py',
    {
      'train.num_steps': 800,
      'eval.every_steps': 200,
      'checkpoint.every_steps': 200,
    },
  ),
}


def get_config():
  return tiny.get_config()


def sweep(size='tiny', seeds=3):
  if size not in _SIZES:
    raise ValueError(f'size={size!r} is unknown; choose one of {list(_SIZES)}.')
  config, length = _SIZES[size]
  heads = points.over('model.num_kv_heads', [8, 4, 2, 1])
  groupings = points.chain(
    heads,
    points.product(heads[1:], points.over('model.match_params', [True])),
  )
  for point in points.product(groupings, [length], points.seeds(seeds)):
    yield points.Step('train', point, config=config)
