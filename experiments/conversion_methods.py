"""Which way of merging KV heads loses least, before and after uptraining?

Ainslie et al. 2023, Figure 4, for every number of KV heads and grouping, and
with the methods that came after it:

  python -m gqa.sweep --config=experiments/conversion_methods.py \
      --workdir=runs/conversion_methods [--sweep.parent=DIR]
  python -m gqa.report --workdir=runs/conversion_methods

Each point is converted once and uptrained for `alpha` of the parent's steps;
step 0 of that run is the loss right after conversion. Without a parent one is
trained as tiny.py says, on data/shakespeare. By default 35 conversions and as
many runs of 20 steps of 4,096 tokens: about an hour on 2 CPU cores, most of it
compilation and evaluation. The parent's 8 heads become 4, 2 and 1; give
--sweep.num_kv_heads for another parent.
"""

from configs import tiny
from gqa import points

METHODS = (
  'mean',
  'first',
  'random',
  'mean_renorm',
  'medoid',
  'aligned',
  'low_rank',
)


def get_config():
  """The parent's, unless one is given."""
  return tiny.get_config()


def sweep(
  parent='',
  alpha=0.05,
  num_kv_heads=(4, 2, 1),
  methods=METHODS,
  groupings=('contiguous', 'similarity'),
  num_seeds=1,
  eval_batches=20,
):
  source = parent or points.Step('train', {})
  for heads in num_kv_heads:
    # One group has no other grouping.
    for grouping in groupings if heads > 1 else groupings[:1]:
      for method in methods:
        yield from uptrained(
          {
            'source': source,
            'num_kv_heads': heads,
            'method': method,
            'grouping': grouping,
          },
          points.seeds(num_seeds),
          {'uptrain.alpha': alpha, 'eval.num_batches': eval_batches},
        )


def uptrained(conversion, seeds, fields):
  """A run of uptraining for each seed, from one conversion."""
  for seed in seeds:
    # Random heads are the only ones that a seed decides.
    drawn = seed if conversion['method'] == 'random' else {}
    converted = points.Step('convert', conversion | drawn)
    yield points.Step(
      'train',
      {'init_from': converted} | fields | seed,
      config='configs/uptrain.py',
    )
