"""Cells on llama.cpp: its C functions, on a file made for the purpose.

One `llama_decode` takes a token of each row. Its caches hold real tokens even
where those of gqa are made up: it reads one row and copies it to the others.
"""

import ctypes
import pathlib
import tempfile
import time

import numpy as np

from experiments.peers.common import (
  Missing,
  Shared,
  Unsupported,
  check,
)

CHUNK = 2048  # tokens that it is given at a time


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
    params.n_ctx = self.rows * -(-cell['slots'] // 256) * 256
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
