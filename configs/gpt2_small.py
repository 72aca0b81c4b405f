"""GPT-2 small's shape (124M parameters), multi-head, for one GPU or a few.

  python -m gqa.data --source=TEXT --tokenizer=TOKENIZER.json --target=data/web
  python -m gqa.train --config=configs/gpt2_small.py --workdir=runs/gpt2_small

Tokens are those of a tokenizer of at most 50,257 ids; the vocabulary is padded
to a multiple of 128. Not run on its hardware: shapes and sharding are tested
without it.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.data.path = 'data/web'

  model = config.model
  model.vocab_size = 50_304
  model.num_layers = 12
  model.embed_dim = 768
  model.num_heads = 12
  model.head_dim = 64
  model.mlp_dim = 3_072
  model.max_len = 1_024
  model.position = 'learned'
  model.norm = 'layernorm'
  model.norm_eps = 1e-5
  model.mlp = 'gelu'
  model.qkv_bias = True
  model.out_bias = True
  model.mlp_bias = True
  model.dtype = 'bfloat16'

  train = config.train
  train.num_steps = 20_000
  train.batch_size = 512
  train.seq_len = 1_024
  train.grad_accum = 8

  config.optim.learning_rate = 6e-4
  config.optim.warmup_steps = 700
  config.eval.every_steps = 1_000
  config.eval.num_batches = 20
  config.checkpoint.every_steps = 1_000
  return config
