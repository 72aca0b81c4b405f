"""How soon does a real model recover, converted well and converted plainly?

  bash scripts/smollm2.sh
  python -m gqa.data --source=BOOKS.txt --valid=OTHER_BOOKS.txt \
      --tokenizer=runs/smollm2/tokenizer.json --target=data/smollm2
  python -m gqa.sweep --config=experiments/smollm2_uptraining.py \
      --workdir=runs/smollm2_uptraining --sweep.calibration=BOOKS.txt
  python -m gqa.report --workdir=runs/smollm2_uptraining

SmolLM2-135M, of 9 query and 3 KV heads, is converted to one KV head by
`low_rank` with its defaults, calibrated on text, and by the mean of its heads,
as the paper does it; both are trained on the same tokens with the same recipe.
The report draws loss against tokens. By default 98,304 tokens each: half an
hour on 2 CPU cores, and 8.4 GB (measured over 4 steps, 2026-11-30).
"""

from configs import uptrain
from gqa import points

PLAIN = {
  'grouping': 'contiguous',
  'calibration': 'none',
  'sequential': False,
  'refit': False,
}


def get_config():
  config = uptrain.get_config()
  config.data.path = 'data/smollm2'
  config.uptrain.alpha = 1.0  # of the steps that are given here
  config.train.batch_size = 8
  config.train.seq_len = 256
  config.train.log_every = 1
  config.optim.learning_rate = 3e-4
  config.eval.every_steps = 8
  config.eval.num_batches = 4
  return config


def sweep(
  source='runs/smollm2',
  calibration='',
  methods=('low_rank', 'mean'),
  num_steps=48,
  seeds=1,
):
  for method in methods:
    text = {'calibration': calibration} if calibration else {}
    options = PLAIN if method == 'mean' else text
    converted = points.Step(
      'convert',
      {'source': source, 'num_kv_heads': 1, 'method': method, **options},
    )
    for seed in points.seeds(seeds):
      yield points.Step(
        'train',
        {'init_from': converted, 'uptrain.parent_steps': num_steps, **seed},
      )
