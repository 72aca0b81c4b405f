"""A Llama-style model of 1.1B parameters with 4 of 32 KV heads, for 8 devices.

  python -m gqa.data --source=TEXT --tokenizer=TOKENIZER.json --target=data/web
  python -m gqa.train --config=configs/llama_1b.py --workdir=runs/llama_1b

Parameters and moments (13 GB in float32) are split over `mesh.fsdp`; change
the mesh to what there is. Not run on its hardware: shapes and sharding are
tested without it.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.data.path = 'data/web'

  model = config.model
  model.vocab_size = 32_000
  model.num_layers = 22
  model.embed_dim = 2_048
  model.num_heads = 32
  model.num_kv_heads = 4
  model.head_dim = 64
  model.mlp_dim = 5_632
  model.max_len = 2_048
  model.norm_eps = 1e-5
  model.tie_embeddings = False
  model.dtype = 'bfloat16'
  model.remat = 'dots'

  train = config.train
  train.num_steps = 50_000
  train.batch_size = 512
  train.seq_len = 2_048
  train.grad_accum = 8

  config.optim.learning_rate = 4e-4
  config.optim.warmup_steps = 2_000
  config.eval.every_steps = 1_000
  config.eval.num_batches = 20
  config.checkpoint.every_steps = 1_000
  config.mesh.fsdp = 8
  return config
