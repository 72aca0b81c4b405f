"""How much training does a converted model need to get back to its parent?

Ainslie et al. 2023, Figure 5: the loss after alpha of the parent's steps, for
each method and number of KV heads, over seeds:

  python -m gqa.sweep --config=experiments/uptraining_proportion.py \
      --workdir=runs/uptraining_proportion [--sweep.parent=DIR]
  python -m experiments.recovery --workdir=runs/uptraining_proportion

The second line prints the loss for each alpha, and the tokens that each method
needs to recover 95% of the gap. Each alpha is a run of its own, as its learning
rate goes to zero at its end; alpha 0 is an evaluation. Without a parent one is
trained as tiny.py says, on data/shakespeare. A seed is an order of the data. By
default 9 conversions, and 90 runs of 4, 20 and 40 steps of 4,096 tokens or of
none: about two hours on 2 CPU cores. For each method and number of KV heads
the tokens are 0.16 times the parent's, and once more for each further seed.
"""

from configs import tiny
from gqa import points


def get_config():
  """The parent's, unless one is given."""
  return tiny.get_config()


def sweep(
  parent='',
  num_kv_heads=(4, 2, 1),
  methods=('mean', 'aligned', 'low_rank'),
  alphas=(0.0, 0.01, 0.05, 0.1),
  num_seeds=3,
  distill=0.0,
  every_steps=4,
  eval_batches=20,
):
  source = parent or points.Step('train', {})
  for heads in num_kv_heads:
    for method in methods:
      converted = points.Step(
        'convert', {'source': source, 'num_kv_heads': heads, 'method': method}
      )
      for alpha in alphas:
        # Without training there is nothing that a seed decides.
        for seed in points.seeds(num_seeds if alpha else 1):
          yield points.Step(
            'train',
            {
              'init_from': converted,
              'uptrain.alpha': alpha,
              'uptrain.distill': distill,
              'eval.every_steps': every_steps,
              'eval.num_batches': eval_batches,
            }
            | seed,
            config='configs/uptrain.py',
          )
