"""Convert a multi-head model, or train with fewer KV heads from the start?

What Ainslie et al. 2023 name as a limit of theirs: at an equal number of tokens
in all. A model with fewer heads is trained from scratch for (1 + alpha) times
the parent's steps; the other is the parent, converted and uptrained for alpha:

  python -m gqa.sweep --config=experiments/from_scratch_vs_uptrained.py \
      --workdir=runs/from_scratch_vs_uptrained
  python -m gqa.report --workdir=runs/from_scratch_vs_uptrained

The multi-head model trained for (1 + alpha) times the steps is there too. One
parent for each seed, as tiny.py says, on data/shakespeare. By default 3 seeds
of 5 trainings of 400 to 440 steps and 6 runs of 40: about an hour and a quarter
on 2 CPU cores.
"""

from configs import tiny
from gqa import points


def get_config():
  return tiny.get_config()


def sweep(
  num_kv_heads=(4, 2, 1),
  methods=('mean', 'low_rank'),
  num_steps=400,
  alpha=0.1,
  num_seeds=3,
):
  per_call = get_config().train.steps_per_call
  longer = round((1 + alpha) * num_steps / per_call) * per_call
  every = {'eval.every_steps': longer}
  for seed in points.seeds(num_seeds):
    parent = points.Step('train', {'train.num_steps': num_steps} | every | seed)
    yield parent
    for heads in (get_config().model.num_heads, *num_kv_heads):
      fields = {'model.num_kv_heads': heads, 'train.num_steps': longer}
      yield points.Step('train', fields | every | seed)
    for heads in num_kv_heads:
      for method in methods:
        converted = points.Step(
          'convert', {'source': parent, 'num_kv_heads': heads, 'method': method}
        )
        yield points.Step(
          'train',
          {'init_from': converted, 'uptrain.alpha': alpha} | seed,
          config='configs/uptrain.py',
        )
