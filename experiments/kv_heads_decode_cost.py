"""How does the time of a token fall with the number of KV heads?

  python -m gqa.benchmark --config=experiments/kv_heads_decode_cost.py \
      --workdir=runs/kv_heads_decode_cost
  python -m gqa.report --workdir=runs/kv_heads_decode_cost

Figure 6 of Ainslie et al. 2023, with every number of KV heads that M110's 12
query heads allow: a quarter of an hour on 2 CPU cores and up to 12 GB. The
paper times each at the largest batch that fits, up to 32 sequences a chip, so
that speed and room are one number. Here all have the same batches; with

  --config.grid.fill_memory --config.grid.batch_size=1 \
      --config.grid.context=2048 --config.memory_limit=4_000_000_000

each is also measured at its own largest batch, and the report states the two
apart. Everything else is as in decode_cost.py.
"""

from experiments import decode_cost


def get_config():
  config = decode_cost.get_config()
  config.grid.num_kv_heads = (12, 6, 4, 3, 2, 1)
  config.grid.batch_size = (1, 8)
  return config
