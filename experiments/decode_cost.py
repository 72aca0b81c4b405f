"""What does a step of decoding cost, for each number of KV heads?

  python -m gqa.benchmark --config=experiments/decode_cost.py --workdir=runs/decode_cost

A model of 110M parameters (M110), batches of 1, 8 and 32, contexts of 128,
2,048 and 8,192 tokens: about a quarter of an hour on 2 CPU cores and up to
14 GB. One question at a time, each in a workdir of its own:

  --peers --config.grid.context=128        beside transformers and llama.cpp
  --peers --config.grid.context=2048 --config.grid.batch_size=1,8
  --config.grid.dtype=float32,bfloat16     bfloat16 weights, compute and cache
  --config.grid.cache_dtype=same,bfloat16  a smaller cache alone
  --config.grid.cache_kind=full,int8
  --config.grid.cache_kind=full,ring --config.model.sliding_window=1024
  --config.grid.context=1024 --config.grid.batch_size=1 --config.prefill.rounds=5
                                           reading a prompt
  --config.grid.context=200 --config.grid.cache_len=256,8192
                                           what room costs that is not used
  --config.grid.batch_size=1 --config.grid.context=2048
      --config.grid.fill_memory --config.memory_limit=4_000_000_000
                                           throughput until memory ends

On the command line a list is 1,8,32 or float32,bfloat16.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = config_dict.ConfigDict()
  config.seed = 0  # of weights and prompts
  # Bytes of weights and caches, of all systems, at the same time. A cell that
  # takes more alone is recorded as skipped.
  config.memory_limit = 12 * 2**30
  config.read_bytes = 2**29  # of the array that measures the bandwidth
  config.steps = 8  # decoding steps in one call, from the context on
  config.rounds = 5  # calls of each cell that count
  config.warmup = 1  # rounds before them that do not

  prefill = config.prefill = config_dict.ConfigDict()
  # Longer prompts (batch times context) are not read: their caches are made up
  # and prefill is not measured.
  prefill.max_tokens = 4_096
  prefill.rounds = 2  # of reading the prompts, besides the first
  prefill.chunk_size = config_dict.placeholder(int)  # tokens; unset: all

  grid = config.grid = config_dict.ConfigDict()  # every combination is a cell
  # Each an int, or a tuple of one int per layer.
  grid.num_kv_heads = (12, 4, 1)
  grid.batch_size = (1, 8, 32)
  grid.context = (128, 2_048, 8_192)  # tokens in the cache at the first step
  # Tokens that a cache has room for; 0: those of the context and of all steps.
  grid.cache_len = (0,)
  # Batches are doubled from there as long as memory_limit allows it, and the
  # largest that does is measured too.
  grid.fill_memory = False
  grid.cache_kind = ('full',)  # 'full', 'ring' or 'int8'
  grid.dtype = ('float32',)  # of compute
  grid.weights_dtype = ('same',)  # as compute, or a type
  grid.cache_dtype = ('same',)

  peers = config.peers = config_dict.ConfigDict()  # with --peers
  peers.module = 'experiments.decode_peers'  # started as python -m MODULE
  peers.systems = ('transformers-dynamic', 'transformers-static', 'llama.cpp')
  peers.keep_memory = True  # they get our allocator settings
  peers.threads = 0  # 0: all cores

  model = config.model = base.get_config().model
  model.vocab_size = 32_000
  model.num_layers = 12
  model.embed_dim = 768
  model.num_heads = 12
  model.head_dim = 64
  model.mlp_dim = 2_048
  model.max_len = 16_384
  del model.dtype
  model.dtype = config_dict.placeholder(str)  # stays unset: see grid
  return config
