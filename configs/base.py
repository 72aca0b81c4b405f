"""Every field of a training run, with its meaning and unit.

Other files in this folder start from `get_config()` and assign; nothing is
configurable that is not listed here. On the command line any field is
`--config.SECTION.FIELD=VALUE`. A field whose default is a placeholder is
optional: unset means what its comment says.
"""

from ml_collections import config_dict


def get_config():
  config = config_dict.ConfigDict()
  config.seed = 0  # of parameters, data order and dropout
  # Workdir (or checkpoint) whose parameters a new run starts from.
  config.init_from = config_dict.placeholder(str)
  config.compilation_cache = '~/.cache/gqa'  # compiled programs; '' for none

  model = config.model = config_dict.ConfigDict()
  model.vocab_size = 258  # ids; at least the tokenizer's
  model.num_layers = 4
  model.embed_dim = 256
  model.num_heads = 8  # query heads
  # KV heads: an int, or a tuple with one int per layer; unset: num_heads.
  model.num_kv_heads = config_dict.placeholder(object)
  model.head_dim = 32  # need not be embed_dim / num_heads
  model.mlp_dim = 704
  model.match_params = False  # widen mlp_dim to offset fewer KV heads
  model.max_len = 1024  # longest sequence the model may see, tokens
  model.position = 'rope'  # 'rope' or 'learned'
  model.rope_theta = 10_000.0  # base of the RoPE wavelengths
  model.rope_fraction = 1.0  # part of head_dim that is rotated
  # How wavelengths are stretched for longer sequences: 'none'; 'linear', all
  # by rope_factor; 'llama3' or 'yarn', those that turn less than
  # rope_slow_turns times in rope_original_len tokens by rope_factor, those
  # that turn more than rope_fast_turns times not, and in between in part.
  model.rope_scaling = 'none'
  model.rope_factor = 1.0
  model.rope_original_len = config_dict.placeholder(int)  # tokens
  model.rope_slow_turns = 1.0
  model.rope_fast_turns = 32.0  # Llama 3 has 4
  model.rope_magnitude = 1.0  # factor of sines and cosines; 'yarn' only
  # Base in layers with a window, which are not scaled; unset: as in others.
  model.rope_local_theta = config_dict.placeholder(float)
  model.norm = 'rmsnorm'  # 'rmsnorm' or 'layernorm'
  model.norm_eps = 1e-6
  # On what enters a residual branch ('pre'), leaves it ('post'), or 'both'.
  model.norm_position = 'pre'
  model.norm_offset = False  # scales are kept as their difference from 1
  # 'swiglu', 'geglu', 'gelu' (both by tanh), 'gelu_exact' (by erf) or 'relu'
  model.mlp = 'swiglu'
  model.qkv_bias = False
  model.out_bias = False  # of the attention output projection
  model.mlp_bias = False
  model.qk_norm = False  # RMSNorm of queries and keys before RoPE
  model.qk_norm_axes = 'head'  # each head apart, or all 'heads' as one
  # Scores are divided by the root of this; unset: of head_dim.
  model.query_scale_dim = config_dict.placeholder(int)
  # Scores become softcap * tanh(scores / softcap); unset: none.
  model.attention_softcap = config_dict.placeholder(float)
  model.sliding_window = config_dict.placeholder(int)  # tokens; unset: all
  model.global_layers = ()  # layers without the window, from 0
  model.tie_embeddings = True  # the head is the embedding, transposed
  model.head_bias = False  # of the logits
  model.logit_softcap = config_dict.placeholder(float)  # unset: none
  model.embed_scale = False  # multiply embeddings by sqrt(embed_dim)
  model.parallel_residual = False  # attention and MLP read the same stream
  model.shared_norm = False  # the parallel MLP reads attention's normed stream
  model.dropout = 0.0  # probability, on embeddings and both residual branches
  model.dtype = 'float32'  # compute type; parameters are always float32
  # 'auto' is 'fused' on GPU, 'blockwise' elsewhere; 'einsum' is the reference.
  model.attention = 'auto'
  model.remat = 'none'  # recompute in backward: 'none', 'dots' or 'full'

  data = config.data = config_dict.ConfigDict()
  data.path = config_dict.placeholder(str)  # made by python -m gqa.data

  train = config.train = config_dict.ConfigDict()
  train.num_steps = 1_000  # optimizer updates
  train.batch_size = 16  # sequences in one update, over all devices
  train.seq_len = 256  # tokens
  train.grad_accum = 1  # micro-batches that one update is split into
  # Updates in one compiled call. On CPU more than one is a loss: the chains of
  # an update do not run side by side in a loop (tiny.py: two thirds as fast).
  train.steps_per_call = 1
  train.z_loss = 0.0  # weight of log(Z)^2 per token
  train.log_every = 10  # steps
  train.nonfinite_limit = 10  # consecutive skipped updates before giving up
  train.profile = ''  # 'FIRST:LAST' step of a profiler trace; '' for none

  uptrain = config.uptrain = config_dict.ConfigDict()
  # Go on from init_from for this fraction of its parent's steps, as uptrain.py
  # in this folder says; unset: an ordinary run.
  uptrain.alpha = config_dict.placeholder(float)
  # The parent's steps, where init_from does not record them.
  uptrain.parent_steps = config_dict.placeholder(int)
  # Peak learning rate over the parent's, where optim.learning_rate is unset.
  uptrain.peak_fraction = 0.5
  # Part of the steps that warm up, where optim.warmup_steps is unset.
  uptrain.warmup_fraction = 0.1
  # Part of the objective that is the divergence from a teacher, 0 to 1.
  uptrain.distill = 0.0
  uptrain.temperature = 1.0  # of teacher and student
  # Workdir of the teacher; unset: the model before conversion.
  uptrain.teacher = config_dict.placeholder(str)
  # Train the weights by which heads are merged, and the heads, from their mean.
  uptrain.learned_mixing = False

  optim = config.optim = config_dict.ConfigDict()
  optim.name = 'adamw'  # 'adamw', 'adafactor' or 'lion'
  optim.learning_rate = 1e-3  # peak
  optim.schedule = 'cosine'  # 'cosine', 'linear', 'wsd' or 'constant'
  optim.warmup_steps = 100  # linear from 0
  optim.decay_fraction = 0.2  # of num_steps, the last part of 'wsd'
  optim.end_fraction = 0.1  # final learning rate over peak
  optim.betas = (0.9, 0.95)  # of adamw and lion
  optim.eps = 1e-8  # of adamw
  optim.weight_decay = 0.1  # times the learning rate, kernels only
  optim.decay_embeddings = True  # whether it reaches the embeddings too
  optim.clip_norm = 1.0  # of the global gradient; 0 for none

  evaluation = config.eval = config_dict.ConfigDict()
  evaluation.every_steps = 200  # and after the last step
  # Batches of the validation text; unset: the whole text.
  evaluation.num_batches = config_dict.placeholder(int)

  checkpoint = config.checkpoint = config_dict.ConfigDict()
  checkpoint.every_steps = 200  # and after the last step
  checkpoint.keep_latest = 2
  checkpoint.keep_best = 1  # by validation loss, besides the latest

  mesh = config.mesh = config_dict.ConfigDict()
  mesh.data = -1  # devices that split the batch; -1: all that remain
  mesh.fsdp = 1  # devices that split batch, parameters and moments
  mesh.model = 1  # devices that split heads, MLP and vocabulary
  mesh.cpu_devices = 1  # XLA devices that a CPU is divided into
  return config
