"""The study's parent: a byte-level multi-head model of books in the public domain.

  python -m gqa.data --source=BOOKS.txt.bz2 --valid=VALID.txt.bz2 \
      --target=data/books
  python -m gqa.train --config=configs/books.py --workdir=runs/books

Any large English text serves; a form feed separates documents. One step is
4,096 tokens; --config.train.num_steps sets how far it goes: a second or two a
step on 2 CPU cores.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.data.path = 'data/books'

  model = config.model
  model.num_layers = 6
  model.embed_dim = 256
  model.num_heads = 8
  model.head_dim = 32
  model.mlp_dim = 704
  model.max_len = 1024

  train = config.train
  train.num_steps = 12_000
  train.batch_size = 8
  train.seq_len = 512
  train.log_every = 10

  config.optim.learning_rate = 2e-3
  config.optim.warmup_steps = 50
  config.optim.schedule = 'wsd'
  config.optim.end_fraction = 0.0
  config.eval.every_steps = 500
  config.eval.num_batches = 50
  config.checkpoint.every_steps = 500
  return config
