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
The report draws loss against tokens; alpha is their share of the two trillion
that its authors trained it on. By default 98,304 tokens each: half an
hour on 2 CPU cores, and 8.4 GB (measured over 4 steps, 2026-11-30).
"""

from configs import uptrain
from gqa import points

PARENT_TOKENS = 2 * 10**12  # as its model card states
STEPS = 48
PLAIN = {
  'grouping': 'contiguous',
  'calibration': 'none',
  'sequential': False,
  'refit': False,
}


def get_config():
  config = uptrain.get_config()
  config.data.path = 'data/smollm2'
  config.train.batch_size = 8
  config.train.seq_len = 256
  config.uptrain.parent_steps = PARENT_TOKENS // (8 * 256)
  config.uptrain.alpha = STEPS / config.uptrain.parent_steps
  config.train.log_every = 1
  config.optim.learning_rate = 3e-4
  config.eval.every_steps = 8
  config.eval.num_batches = 4
  return config


def sweep(
  source='runs/smollm2',
  calibration='',
  methods=('low_rank', 'mean'),
  num_steps=STEPS,
  seeds=1,
):
  alpha = num_steps / get_config().uptrain.parent_steps
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
        {'init_from': converted, 'uptrain.alpha': alpha, **seed},
      )
