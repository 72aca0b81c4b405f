"""What all peers share: what they refuse, and models that cells share."""

import dataclasses
import json

from gqa.config import ModelConfig

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


class Missing(Exception):
  """A package is not installed."""


class Unsupported(Exception):
  """The system does not do what a cell asks for."""


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
