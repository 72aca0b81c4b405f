"""How fast is a training step beside PyTorch's, and beside the machine's limit?

  python -m experiments.training_speed --shape=t10 [--rounds=7] [--steps=4]

Every system runs the same update (forward, backward, AdamW) on the same shape
in a process of its own, and the processes take turns, so that a change in the
machine's speed meets all alike. Printed are medians and spread of tokens per
second, ratios to the best peer, and the share of the matrix peak that was
measured in the same run. Needs the extra `peers`.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
import types

from absl import app, flags

SHAPES = {
  't10': types.SimpleNamespace(
    embed=256, layers=6, heads=8, mlp=704, vocab=8192, length=256, batch=16
  ),
  'm110': types.SimpleNamespace(
    embed=768, layers=12, heads=12, mlp=2048, vocab=32000, length=512, batch=4
  ),
  # configs/tiny.py, and an eighth of its batch.
  'tiny': types.SimpleNamespace(
    embed=128, layers=4, heads=8, mlp=352, vocab=258, length=256, batch=16
  ),
  'tiny_eighth': types.SimpleNamespace(
    embed=128, layers=4, heads=8, mlp=352, vocab=258, length=128, batch=4
  ),
}
SYSTEMS = {
  # name: (program, options)
  'gqa': ('gqa', {}),
  'gqa, 1 of all KV heads': ('gqa', {'num_kv_heads': 1}),
  'gqa, 3 seeds together': ('gqa', {'seeds': 3}),
  'gqa bf16': ('gqa', {'dtype': 'bfloat16'}),
  'transformers': ('transformers', {}),
  'transformers, kept memory': ('transformers', {'keep_memory': True}),
  'torch': ('torch', {}),
  'torch, kept memory': ('torch', {'keep_memory': True}),
  'torch compiled': ('torch', {'compile': True}),
  'torch compiled, kept memory': (
    'torch',
    {'compile': True, 'keep_memory': True},
  ),
  'torch bf16': ('torch', {'dtype': 'bfloat16', 'keep_memory': True}),
}


def gqa_program(shape, options):
  """Returns a function that makes n updates and waits for them."""
  import jax
  import numpy as np

  from configs import base
  from gqa import runtime, sharding, update
  from gqa.config import ModelConfig

  config = base.get_config()
  config.compilation_cache = ''
  config.train.batch_size, config.train.seq_len = shape.batch, shape.length
  config.model.update(
    vocab_size=shape.vocab,
    num_layers=shape.layers,
    embed_dim=shape.embed,
    num_heads=shape.heads,
    num_kv_heads=options.get('num_kv_heads', shape.heads),
    head_dim=shape.embed // shape.heads,
    mlp_dim=shape.mlp,
    dtype=options.get('dtype', 'float32'),
  )
  runtime.start(config)
  model_config = ModelConfig.from_dict(config.model.to_dict())
  mesh = sharding.make_mesh(config.mesh)
  optimizer, step = update.make_train_step(config, model_config)
  key = jax.random.key(0)
  make = lambda: update.init_state(model_config, optimizer, key)
  shardings = sharding.state_shardings(jax.eval_shape(make), mesh, model_config)
  seeds = options.get('seeds', 1)
  steps = update.Steps(step, mesh, shardings, seeds)
  init = jax.jit(make, out_shardings=shardings)
  state = steps.join([init() for _ in range(seeds)])
  keys = steps.keys([key] * seeds)
  rng = np.random.default_rng(0)
  size = (1, shape.batch, shape.length)
  tokens = rng.integers(0, shape.vocab, size, dtype=np.int32)
  batch = {
    'tokens': tokens,
    'targets': np.roll(tokens, -1, axis=-1),
    'positions': np.broadcast_to(np.arange(size[-1], dtype=np.int32), size),
    'segments': np.ones(size, np.int32),
    'weights': np.ones(size, np.float32),
  }
  batch = steps.put([batch] * seeds)

  def run():
    nonlocal state
    with jax.set_mesh(mesh):
      for _ in range(options['steps']):
        state, values = steps.update(state, batch, keys)
      return float(values['train/loss'][-1].mean())

  return run


def torch_program(shape, options, hugging_face=False):
  """The same for PyTorch: a plain decoder, or transformers' own."""
  import torch

  if options.get('keep_memory'):
    from gqa import runtime

    runtime.keep_freed_memory()
  torch.manual_seed(0)
  make = _transformers_model if hugging_face else _torch_model
  model = make(shape)
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
  tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length + 1))
  half = options.get('dtype') == 'bfloat16'

  def loss_of(tokens):
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(
      logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
    )

  if options.get('compile'):
    loss_of = torch.compile(loss_of)

  def run():
    for _ in range(options['steps']):
      with torch.autocast('cpu', torch.bfloat16, enabled=half):
        loss = loss_of(tokens)
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())

  return run


def _transformers_model(shape):
  import torch
  import transformers

  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=shape.vocab,
      hidden_size=shape.embed,
      intermediate_size=shape.mlp,
      num_hidden_layers=shape.layers,
      num_attention_heads=shape.heads,
      num_key_value_heads=shape.heads,
      max_position_embeddings=shape.length,
      tie_word_embeddings=True,
      use_cache=False,
    )
  )

  class Logits(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.model = model

    def forward(self, tokens):
      return self.model(tokens).logits

  return Logits()


def _torch_model(shape):
  import torch
  from torch import nn
  from torch.nn import functional

  heads, head_dim = shape.heads, shape.embed // shape.heads
  positions = torch.arange(shape.length)[:, None]
  frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
  angles = positions * frequencies
  cos, sin = angles.cos(), angles.sin()

  def rotate(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
      [first * cos - second * sin, second * cos + first * sin], dim=-1
    )

  class Layer(nn.Module):
    def __init__(self):
      super().__init__()
      self.attention_norm = nn.RMSNorm(shape.embed)
      self.mlp_norm = nn.RMSNorm(shape.embed)
      self.qkv = nn.Linear(shape.embed, 3 * shape.embed, bias=False)
      self.out = nn.Linear(shape.embed, shape.embed, bias=False)
      self.gate_up = nn.Linear(shape.embed, 2 * shape.mlp, bias=False)
      self.down = nn.Linear(shape.mlp, shape.embed, bias=False)

    def forward(self, x):
      batch, length, embed = x.shape
      qkv = self.qkv(self.attention_norm(x))
      q, k, v = qkv.view(batch, length, 3, heads, head_dim).unbind(2)
      q, k, v = (t.transpose(1, 2) for t in (q, k, v))
      mixed = functional.scaled_dot_product_attention(
        rotate(q), rotate(k), v, is_causal=True
      )
      x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, embed))
      gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
      return x + self.down(functional.silu(gate) * up)

  class Decoder(nn.Module):
    def __init__(self):
      super().__init__()
      self.embed = nn.Embedding(shape.vocab, shape.embed)
      nn.init.normal_(self.embed.weight, std=0.02)
      self.layers = nn.ModuleList(Layer() for _ in range(shape.layers))
      self.norm = nn.RMSNorm(shape.embed)

    def forward(self, tokens):
      x = self.embed(tokens)
      for layer in self.layers:
        x = layer(x)
      return functional.linear(self.norm(x), self.embed.weight)

  return Decoder()


def peak_program(shape, options):
  """Matrix products alone, by whichever library is faster here."""
  del shape, options
  import torch

  from gqa import peaks, runtime

  runtime.keep_freed_memory()
  a, b = torch.rand(1024, 768), torch.rand(768, 4096)

  def run():
    start = time.perf_counter()
    for _ in range(20):
      a @ b
    ours = 20 * 2 * 1024 * 768 * 4096 / (time.perf_counter() - start)
    return max(ours, peaks.measured_cpu_flops())

  return run


PROGRAMS = {
  'gqa': gqa_program,
  'torch': torch_program,
  'transformers': lambda *a: torch_program(*a, hugging_face=True),
  'peak': peak_program,
}


def worker(program, shape, options):
  """Serves one system: a line in is a run, a line out its seconds and value."""
  run = PROGRAMS[program](SHAPES[shape], json.loads(options))
  run()
  run()
  print('ready', flush=True)
  for _ in sys.stdin:
    start = time.perf_counter()
    value = run()
    print(json.dumps([time.perf_counter() - start, value]), flush=True)


class Worker:
  """A process that runs one system when it is told to."""

  def __init__(self, program, shape, options):
    command = [sys.executable, '-m', 'experiments.training_speed', '--worker']
    self._process = subprocess.Popen(
      [*command, program, shape, json.dumps(options)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._read('ready')

  def _read(self, what):
    line = self._process.stdout.readline()
    if not line:
      sys.exit(f'error: the process for {what} died')
    return line

  def run(self):
    """Returns (seconds, value) of one run."""
    self._process.stdin.write('\n')
    self._process.stdin.flush()
    return json.loads(self._read('a run'))

  def close(self):
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()


def main(argv):
  del argv
  f = flags.FLAGS
  shape = SHAPES[f.shape]
  wanted = f.systems or list(SYSTEMS)
  workers = {}
  for name in wanted:
    print(f'starting {name}', file=sys.stderr, flush=True)
    program, options = SYSTEMS[name]
    workers[name] = Worker(program, f.shape, options | {'steps': f.steps})
  peak = Worker('peak', f.shape, {})
  seconds = {name: [] for name in wanted}
  peaks, losses = [], {}
  tokens = shape.batch * shape.length * f.steps
  for i in range(f.rounds):
    peaks.append(peak.run()[1])
    for name, one in workers.items():
      elapsed, losses[name] = one.run()
      seconds[name].append(elapsed)
      speed = tokens * SYSTEMS[name][1].get('seeds', 1) / elapsed
      text = f'round {i + 1} of {f.rounds}: {name}, {speed:,.0f} tokens/s'
      print(text, file=sys.stderr, flush=True)
  for one in (peak, *workers.values()):
    one.close()
  report(f, shape, seconds, losses, peaks)


def report(f, shape, seconds, losses, peaks):
  """Prints one JSON line for each system."""
  tokens = {
    n: shape.batch * shape.length * f.steps * SYSTEMS[n][1].get('seeds', 1)
    for n in seconds
  }
  speed = {n: tokens[n] / statistics.median(s) for n, s in seconds.items()}
  peers = [v for n, v in speed.items() if 'gqa' not in n and 'bf16' not in n]
  flops = flops_per_token(shape)
  for name in seconds:
    row = {
      'system': name,
      'shape': f.shape,
      'tokens_per_second': round(speed[name], 1),
      'low': round(tokens[name] / max(seconds[name]), 1),
      'high': round(tokens[name] / min(seconds[name]), 1),
      'over_best_float32_peer': round(speed[name] / max(peers), 3)
      if peers
      else None,
      'share_of_float32_peak': round(
        speed[name] * flops / statistics.median(peaks), 3
      ),
      'loss': round(losses[name], 4),
      'rounds': f.rounds,
      'steps': f.steps,
      'machine': f'{platform.machine()}, {platform.python_version()}',
      'peak_gflops': round(statistics.median(peaks) / 1e9, 1),
    }
    print(json.dumps(row), flush=True)


def flops_per_token(shape):
  """As `cost.train_flops_per_token` counts them."""
  from gqa import cost
  from gqa.config import ModelConfig

  config = ModelConfig(
    vocab_size=shape.vocab,
    num_layers=shape.layers,
    embed_dim=shape.embed,
    num_heads=shape.heads,
    head_dim=shape.embed // shape.heads,
    mlp_dim=shape.mlp,
    max_len=shape.length,
  )
  return cost.train_flops_per_token(config, shape.length)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--worker']:
    worker(*sys.argv[2:])
    sys.exit()
  flags.DEFINE_enum('shape', 't10', list(SHAPES), 'model and batch')
  flags.DEFINE_multi_enum('systems', None, list(SYSTEMS), 'which; all')
  flags.DEFINE_integer('rounds', 7, 'runs of each system', lower_bound=1)
  flags.DEFINE_integer('steps', 4, 'updates of one run', lower_bound=1)
  app.run(main)
