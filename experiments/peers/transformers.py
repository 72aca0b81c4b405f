"""Cells on `LlamaForCausalLM` of Hugging Face transformers under PyTorch.

The model is called directly: `generate` would add its own work to each step.
"""

import inspect
import time

from experiments.peers.common import (
  Missing,
  Shared,
  Unsupported,
  check,
)


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
    if cell['cache_len'] and not self.static:
      raise Unsupported('its cache grows with its tokens')
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
      max_cache_len=cell['slots'],
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
