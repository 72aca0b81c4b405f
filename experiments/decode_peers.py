"""The cells of gqa.benchmark on other systems: a process that is told what to do.

Started by `python -m gqa.benchmark --peers`, once for each of SYSTEMS; the
protocol is that of gqa/workers.py. The work is gqa's: a random model of the
same shape reads the same number of tokens, and each step takes the likeliest
token of each row. What a system cannot do in the same types it refuses.

transformers-*: `LlamaForCausalLM` of Hugging Face transformers under PyTorch,
called directly: `generate` would add its own work to each step.
llama.cpp: its C functions through llama-cpp-python, on a file made for it;
one `llama_decode` takes a token of each row. Its caches hold real tokens even
where gqa's are made up: it reads one row and copies it.

Needs the extra `peers`; for llama.cpp also llama-cpp-python and gguf.
"""

import ctypes
import dataclasses
import importlib.metadata
import inspect
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

import numpy as np

from gqa.config import ModelConfig

CHUNK = 2048  # tokens that llama.cpp is given at a time


class Missing(Exception):
  """A package is not installed."""


class Unsupported(Exception):
  """The system does not do what a cell asks for."""


# Fields of the model that may have any value here.
FREE = {
  'vocab_size',
  'num_layers',
  'embed_dim',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'mlp_dim',
  'max_len',
  'rope_theta',
  'norm_eps',
  'tie_embeddings',
  'dtype',
  'attention',  # how gqa computes, as the next
  'remat',
}


def check(cell):
  """Refuses models that are not Llama's, and caches of another kind."""
  model = ModelConfig.from_dict(cell['model'])
  for field in dataclasses.fields(model):
    value = getattr(model, field.name)
    if field.name not in FREE and value != field.default:
      raise Unsupported(
        f'peers run models with {field.name}={field.default!r} here'
      )
  if not isinstance(cell['num_kv_heads'], int):
    raise Unsupported('it has as many KV heads in every layer')
  if cell['cache_kind'] != 'full':
    raise Unsupported('peers run full caches here')
  if cell['weights_dtype'] != cell['dtype']:
    raise Unsupported('it computes in the type of its weights')


class Transformers:
  """Cells on Hugging Face transformers."""

  packages = ('torch', 'transformers')

  def __init__(self, threads, static, compiled=False):
    try:
      import torch
      import transformers
    except ImportError as error:
      raise Missing(f'{error}; pip install -e .[peers]') from error
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    self.static, self.compiled = static, compiled
    self.torch, self.transformers = torch, transformers
    self.models = Shared(self.make_model)

  def make_model(self, cell):
    """A random model, in the type of the cell."""
    shape = cell['model']
    self.torch.manual_seed(cell['seed'])
    config = self.transformers.LlamaConfig(
      vocab_size=shape['vocab_size'],
      hidden_size=shape['embed_dim'],
      intermediate_size=shape['mlp_dim'],
      num_hidden_layers=shape['num_layers'],
      num_attention_heads=shape['num_heads'],
      num_key_value_heads=shape['num_kv_heads'],
      head_dim=shape['head_dim'],
      max_position_embeddings=shape['max_len'],
      rms_norm_eps=shape['norm_eps'],
      rope_parameters={
        'rope_type': 'default',
        'rope_theta': shape['rope_theta'],
      },
      tie_word_embeddings=shape['tie_embeddings'],
      bos_token_id=None,
      eos_token_id=None,
    )
    model = self.transformers.LlamaForCausalLM(config)
    return model.to(getattr(self.torch, cell['dtype'])).eval()

  def open(self, cell):
    """Prepares a cell."""
    check(cell)
    if cell['cache_dtype'] != cell['dtype']:
      raise Unsupported('its cache has the type of its weights')
    return TransformersRun(self, cell)


class TransformersRun:
  """One cell: model, cache and the last token of each row."""

  def __init__(self, system, cell):
    torch = self.torch = system.torch
    self.system, self.cell, self.cache = system, cell, None
    self.model = system.models.take(self, cell)
    self.step = self.model
    if system.compiled:
      self.step = torch.compile(self.model, dynamic=False)
    # Earlier transformers know it by another name.
    names = inspect.signature(self.model.forward).parameters
    self.cache_name = 'cache' if 'cache' in names else 'past_key_values'
    generator = torch.Generator().manual_seed(cell['seed'])
    self.prompts = torch.randint(
      cell['model']['vocab_size'],
      (cell['batch_size'], cell['context']),
      generator=generator,
    )
    if cell['prefill'] == 'filled':
      self.fill()
    else:
      self.prefill()
    self.token = self.prompts[:, -1]
    begun = time.perf_counter()
    self.decode()
    compile_seconds = time.perf_counter() - begun if system.compiled else None
    self.info = {
      'compile_seconds': compile_seconds,
      'cache_bytes': sum(
        x.nbytes
        for layer in self.cache.layers
        for x in (layer.keys, layer.values)
      ),
      'weight_bytes': sum(x.nbytes for x in self.model.parameters()),
    }

  def empty_cache(self):
    """Makes an empty cache, or empties one of a fixed size."""
    if not self.system.static:
      self.cache = self.system.transformers.DynamicCache(
        config=self.model.config
      )
      return
    if self.cache is not None:
      self.cache.reset()
      return
    cell, shape = self.cell, self.cell['model']
    self.cache = self.system.transformers.StaticCache(
      config=self.model.config,
      max_cache_len=cell['context'] + cell['steps'],
    )
    self.cache.early_initialization(
      batch_size=cell['batch_size'],
      num_heads=shape['num_kv_heads'],
      head_dim=shape['head_dim'],
      dtype=self.model.dtype,
      device=self.model.device,
    )

  def fill(self):
    """Makes up the keys and values of all tokens before the first step."""
    cell, shape = self.cell, self.cell['model']
    size = (
      cell['batch_size'],
      shape['num_kv_heads'],
      cell['context'],
      shape['head_dim'],
    )
    self.empty_cache()
    for layer in range(shape['num_layers']):
      k, v = (self.torch.randn(size).to(self.model.dtype) for _ in range(2))
      self.cache.update(k, v, layer)

  def prefill(self):
    """Reads the prompts; returns the seconds."""
    self.empty_cache()
    chunk = self.cell['prefill_chunk'] or self.cell['context']
    begun = time.perf_counter()
    for tokens in self.prompts.split(chunk, dim=1):
      logits = self.forward(self.model, tokens)
    self.token = logits.argmax(-1)
    return {'seconds': time.perf_counter() - begun}

  def decode(self):
    """Makes the steps, from the context on."""
    extra = int(self.cache.get_seq_length()) - self.cell['context']
    if extra:
      self.cache.crop(-extra)
    tokens, token = [], self.token
    begun = time.perf_counter()
    for _ in range(self.cell['steps']):
      logits = self.forward(self.step, token[:, None])
      token = logits.argmax(-1)
      tokens.append(token)
    seconds = time.perf_counter() - begun
    count = sum(token.numel() for token in tokens)
    return {'seconds': seconds, 'tokens': count, 'logits': list(logits.shape)}

  def forward(self, model, tokens):
    """Logits [B, V] after the last of tokens [B, T]."""
    out = model(
      tokens,
      use_cache=True,
      logits_to_keep=1,
      **{self.cache_name: self.cache},
    )
    return out.logits[:, -1]

  def close(self):
    """Frees the cache, and the model if no other cell has it."""
    self.system.models.drop(self)
    self.cache = self.model = self.step = None


class LlamaCpp:
  """Cells on llama.cpp."""

  packages = ('llama_cpp_python', 'gguf')

  def __init__(self, threads):
    try:
      import gguf
      import llama_cpp
    except ImportError as error:
      raise Missing(
        f"{error}; CMAKE_ARGS='-DGGML_NATIVE=ON' pip install gguf "
        'llama-cpp-python'
      ) from error
    self.gguf, self.c, self.threads = gguf, llama_cpp, threads
    # It reports every tensor on standard error.
    self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    self.models = Shared(self.make_model, llama_cpp.llama_model_free)

  def make_model(self, cell):
    """Writes a random model of the cell's shape and loads it."""
    with tempfile.TemporaryDirectory() as directory:
      path = pathlib.Path(directory) / 'model.gguf'
      write_gguf(self.gguf, path, cell)
      params = self.c.llama_model_default_params()
      params.use_mmap = False  # the file goes
      params.n_gpu_layers = 0
      model = self.c.llama_model_load_from_file(str(path).encode(), params)
    if not model:
      raise RuntimeError('llama.cpp did not load the file made for it')
    return model

  def open(self, cell):
    """Prepares a cell."""
    check(cell)
    if cell['batch_size'] > self.c.llama_max_parallel_sequences():
      raise Unsupported(
        f'it has {self.c.llama_max_parallel_sequences()} rows at most'
      )
    return LlamaCppRun(self, cell)


class LlamaCppRun:
  """One cell: model, context and a batch of a token of each row."""

  def __init__(self, system, cell):
    c = self.c = system.c
    self.system, self.cell = system, cell
    self.model = system.models.take(self, cell)
    self.rows, self.length = cell['batch_size'], cell['context']
    rng = np.random.default_rng(cell['seed'])
    self.vocab_size = cell['model']['vocab_size']
    self.prompts = rng.integers(self.vocab_size, size=(self.rows, self.length))
    params = c.llama_context_default_params()
    slots = self.length + cell['steps']
    params.n_ctx = self.rows * -(-slots // 256) * 256
    params.n_seq_max = self.rows
    params.n_batch = max(CHUNK, self.rows)
    params.n_threads = params.n_threads_batch = system.threads
    params.kv_unified = False  # a cache of its own for each row, as in gqa
    params.offload_kqv = False
    kind = ggml_type(system.gguf, cell['cache_dtype'])
    params.type_k = params.type_v = kind
    self.context = c.llama_init_from_model(self.model, params)
    if not self.context:
      raise RuntimeError('llama.cpp made no context for this cell')
    self.memory = c.llama_get_memory(self.context)
    self.batch = c.llama_batch_init(params.n_batch, 0, 1)
    self.token = self.prompts[:, -1].copy()
    if cell['prefill'] == 'filled':
      self.fill()
    else:
      self.prefill()
    self.decode()
    self.info = {
      'compile_seconds': None,
      'cache_bytes': None,
      'weight_bytes': c.llama_model_size(self.model),
    }

  def fill(self):
    """Reads the first row and copies its cache to the others."""
    self.read(0)
    for row in range(1, self.rows):
      self.c.llama_memory_seq_cp(self.memory, 0, row, -1, -1)

  def prefill(self):
    """Reads the prompts; returns the seconds."""
    self.c.llama_memory_clear(self.memory, False)
    begun = time.perf_counter()
    for row in range(self.rows):
      logits = self.read(row)
      self.token[row] = logits.argmax()
    return {'seconds': time.perf_counter() - begun}

  def read(self, row):
    """Reads one row's prompt; returns the logits [V] after it."""
    for first in range(0, self.length, CHUNK):
      last = min(first + CHUNK, self.length)
      for i, position in enumerate(range(first, last)):
        self.put(i, self.prompts[row, position], position, row)
        self.batch.logits[i] = position == self.length - 1
      self.run(last - first)
    logits = self.c.llama_get_logits_ith(self.context, -1)
    return np.ctypeslib.as_array(logits, (self.vocab_size,))

  def decode(self):
    """Makes the steps, from the context on."""
    for row in range(self.rows):
      self.c.llama_memory_seq_rm(self.memory, row, self.length, -1)
    token, count = self.token, 0
    begun = time.perf_counter()
    for step in range(self.cell['steps']):
      for row in range(self.rows):
        self.put(row, token[row], self.length + step, row)
        self.batch.logits[row] = True
      self.run(self.rows)
      logits = np.ctypeslib.as_array(
        self.c.llama_get_logits(self.context), (self.rows, self.vocab_size)
      )
      token = logits.argmax(-1)
      count += token.size
    seconds = time.perf_counter() - begun
    return {'seconds': seconds, 'tokens': count, 'logits': list(logits.shape)}

  def put(self, i, token, position, row):
    """Places a token in the batch."""
    self.batch.token[i], self.batch.pos[i] = int(token), position
    self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row

  def run(self, count):
    """Runs the first tokens of the batch."""
    self.batch.n_tokens = count
    code = self.c.llama_decode(self.context, self.batch)
    if code:
      raise RuntimeError(f'llama_decode returned {code}')

  def close(self):
    """Frees the context, and the model if no other cell has it."""
    self.c.llama_batch_free(self.batch)
    self.c.llama_free(self.context)
    self.system.models.drop(self)


class Shared:
  """Models, each kept as long as a cell has it."""

  def __init__(self, make, free=lambda model: None):
    self.make, self.free = make, free
    self.models, self.users = {}, {}

  def take(self, user, cell):
    """The model of a cell."""
    model = cell['model'] | {'dtype': None}
    key = json.dumps([model, cell['weights_dtype']], sort_keys=True)
    if key not in self.models:
      self.models[key] = self.make(cell)
    self.users[id(user)] = key
    return self.models[key]

  def drop(self, user):
    """A cell needs its model no longer."""
    key = self.users.pop(id(user))
    if key not in self.users.values():
      self.free(self.models.pop(key))


def ggml_type(gguf, dtype):
  """The number of a type in llama.cpp."""
  names = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}
  return gguf.GGMLQuantizationType[names[dtype]]


def write_gguf(gguf, path, cell):
  """Writes a random Llama of a cell's shape, without a tokenizer."""
  shape, rng = cell['model'], np.random.default_rng(cell['seed'])
  D, F, H = shape['embed_dim'], shape['mlp_dim'], shape['head_dim']
  N, K, V = shape['num_heads'], shape['num_kv_heads'], shape['vocab_size']
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_context_length(shape['max_len'])
  writer.add_embedding_length(D)
  writer.add_block_count(shape['num_layers'])
  writer.add_feed_forward_length(F)
  writer.add_head_count(N)
  writer.add_head_count_kv(K)
  writer.add_key_length(H)
  writer.add_value_length(H)
  writer.add_rope_dimension_count(H)
  writer.add_rope_freq_base(shape['rope_theta'])
  writer.add_layer_norm_rms_eps(shape['norm_eps'])
  writer.add_vocab_size(V)
  writer.add_tokenizer_model('no_vocab')
  kind = ggml_type(gguf, cell['weights_dtype'])

  def matrix(name, rows, columns):
    x = rng.standard_normal((rows, columns), np.float32) * columns**-0.5
    data = gguf.quants.quantize(x, kind)
    writer.add_tensor(f'{name}.weight', data, raw_dtype=kind)

  def norm(name):
    writer.add_tensor(f'{name}.weight', np.ones(D, np.float32))

  matrix('token_embd', V, D)
  norm('output_norm')
  if not shape['tie_embeddings']:
    matrix('output', V, D)
  for i in range(shape['num_layers']):
    layer = f'blk.{i}'
    norm(f'{layer}.attn_norm')
    matrix(f'{layer}.attn_q', N * H, D)
    matrix(f'{layer}.attn_k', K * H, D)
    matrix(f'{layer}.attn_v', K * H, D)
    matrix(f'{layer}.attn_output', D, N * H)
    norm(f'{layer}.ffn_norm')
    matrix(f'{layer}.ffn_gate', F, D)
    matrix(f'{layer}.ffn_up', F, D)
    matrix(f'{layer}.ffn_down', D, F)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


SYSTEMS = {
  'transformers-dynamic': lambda threads: Transformers(threads, static=False),
  'transformers-static': lambda threads: Transformers(threads, static=True),
  'transformers-compiled': lambda threads: Transformers(
    threads, static=True, compiled=True
  ),
  'llama.cpp': LlamaCpp,
}


class Service:
  """Answers the requests of one process."""

  def __init__(self):
    self.system, self.runs = None, {}

  def start(self, system, keep_memory, threads):
    """Loads a system."""
    if system not in SYSTEMS:
      raise Unsupported(
        f'{system!r} is unknown; choose among {tuple(SYSTEMS)}.'
      )
    if keep_memory:
      from gqa import runtime

      runtime.keep_freed_memory()
    cores = len(os.sched_getaffinity(0))
    self.system = SYSTEMS[system](threads or cores)
    packages = self.system.packages
    return {
      'versions': {name: importlib.metadata.version(name) for name in packages}
    }

  def open(self, id, cell):
    """Prepares a cell."""
    self.runs[id] = self.system.open(cell)
    return self.runs[id].info

  def prefill(self, id):
    """Reads a cell's prompts."""
    return self.runs[id].prefill()

  def decode(self, id):
    """Makes a cell's steps."""
    return self.runs[id].decode()

  def close(self, id):
    """Frees a cell."""
    self.runs.pop(id).close()
    return {}


def main():
  # What a library prints is not an answer.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
  service = Service()
  for line in sys.stdin:
    request = json.loads(line)
    try:
      answer = {'ok': getattr(service, request.pop('do'))(**request)}
    except Missing as error:
      answer = {'missing': str(error)}
    except Unsupported as error:
      answer = {'unsupported': str(error)}
    except Exception as error:
      answer = {'error': f'{type(error).__name__}: {error}'}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
