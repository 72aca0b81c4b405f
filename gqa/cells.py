"""What one measurement of decoding is: the cells of a grid, and their groups."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from gqa import cache as cache_lib
from gqa import config as config_lib
from gqa import cost, roofline
from gqa.config import ModelConfig
from gqa.devices import Device

SAME = 'same'  # as a type of weights or cache: that of compute
_FIELDS = (
  'seed',
  'memory_limit',
  'read_bytes',
  'steps',
  'rounds',
  'warmup',
  'prefill',
  'grid',
  'model',
  'peers',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """What is measured: cells that are equal need one measurement."""

  system: str  # 'gqa', or the name of a peer
  model: ModelConfig  # with this cell's num_kv_heads and compute dtype
  batch_size: int
  context: int  # tokens of each row before the first measured step
  cache_len: int  # tokens of each row that the cache has room for; 0: all
  cache_kind: str
  cache_dtype: str
  weights_dtype: str
  prefill: str  # 'measured': the prompt is read; 'filled': its cache made up
  prefill_rounds: int
  prefill_chunk: int | None  # tokens read at a time
  steps: int  # of one call
  rounds: int
  warmup: int  # rounds before those that count
  seed: int

  @property
  def slots(self) -> int:
    """Tokens of each row that the cache has room for."""
    if self.cache_len:
      return self.cache_len
    needed = self.context + self.steps
    return cache_lib.whole_tiles(needed) if self.system == 'gqa' else needed

  @property
  def weights(self) -> Any:
    """Equal for cells that can share their parameters."""
    model = dataclasses.replace(self.model, dtype='float32')
    return self.system, model, self.weights_dtype, self.seed

  @property
  def weight_bytes(self) -> int:
    """Bytes of all parameters, by formula."""
    return cost.weight_bytes(self.model, self._setting(self.slots))

  @property
  def cache_bytes(self) -> int:
    """Bytes of the cache, by formula."""
    dtype = None if self.cache_kind == 'int8' else self.cache_dtype
    return cache_lib.predicted_bytes(
      self.model, self.batch_size, self.slots, self.cache_kind, dtype
    )

  @property
  def prefill_flops(self) -> float:
    """FLOPs of reading the prompts, with the head for each token."""
    per_token = cost.train_flops_per_token(self.model, self.context) / 3
    return self.batch_size * self.context * per_token

  def predict(self, bandwidth: float, peak: float) -> roofline.Step:
    """Predicts a step from a machine's bytes and FLOPs per second.

    The first step that is measured sees context + 1 tokens, its own with them,
    and each later one a token more: this is the step in the middle.
    """
    device = Device('measured', 0.0, bandwidth, peak, peak)
    middle = self.context + (self.steps + 1) // 2
    return roofline.step(self.model, device, self._setting(middle))

  def to_dict(self) -> dict[str, Any]:
    """Values as JSON gives them back."""
    fields = dataclasses.asdict(self)
    fields['num_kv_heads'] = self.model.num_kv_heads
    fields['dtype'] = self.model.dtype
    fields['slots'] = self.slots
    return json.loads(json.dumps(fields))

  def _setting(self, context: int) -> cost.Setting:
    return cost.Setting(
      batch_size=self.batch_size,
      context=context,
      kind=self.cache_kind,
      weight_dtype=self.weights_dtype,
      cache_dtype=None if self.cache_kind == 'int8' else self.cache_dtype,
    )


def heads(num_kv_heads: int | Sequence[int]) -> str:
  """KV heads as one types them."""
  if isinstance(num_kv_heads, int):
    return str(num_kv_heads)
  return ','.join(map(str, num_kv_heads))


def from_config(config, peers: bool = False) -> list[Cell]:
  """The cells of a config's grid; those that are compared follow each other.

  Args:
    config: as in experiments/decode_cost.py.
    peers: whether each is there for other systems too.

  Raises:
    ValueError: a field breaks a rule; the message names it.
  """
  for name in _FIELDS:
    if name not in config:
      raise ValueError(
        f'the config has no field {name}; start from that of '
        'experiments/decode_cost.py.'
      )
  _check_numbers(config)
  grid, systems = config.grid, ['gqa']
  if peers:
    systems += _names('peers', config.peers, 'systems')
  cells = [
    _cell(config, *values)
    for values in itertools.product(
      _numbers(grid, 'batch_size'),
      _numbers(grid, 'context'),
      _numbers(grid, 'cache_len', least=0),
      _listed(grid, 'num_kv_heads'),
      _choices(grid, 'cache_kind', cache_lib.KINDS),
      _dtypes(grid),
      systems,
    )
  ]
  if grid.fill_memory:
    larger = (
      dataclasses.replace(cell, batch_size=size)
      for cell in cells
      for size in _larger_batches(cell, config.memory_limit)
    )
    cells = [_prefilled(config, cell) for cell in (*cells, *larger)]
    cells.sort(key=lambda cell: (cell.batch_size, cell.context))
  return list(dict.fromkeys(cells))


def groups(cells: Sequence[Cell], limit: int) -> Iterator[list[Cell]]:
  """Splits cells, in their order, into lists that fit into memory together.

  Cells of one batch and context stay together if the limit allows it.
  """
  group: list[Cell] = []
  for _, block in itertools.groupby(
    cells, lambda cell: (cell.batch_size, cell.context)
  ):
    block = list(block)
    if group and memory_bytes(group + block) > limit:
      yield group
      group = []
    for cell in block:
      if group and memory_bytes([*group, cell]) > limit:
        yield group
        group = []
      group.append(cell)
  if group:
    yield group


def memory_bytes(cells: Sequence[Cell]) -> int:
  """Bytes of the caches of cells, and of the weights that they share."""
  weights = {cell.weights: cell.weight_bytes for cell in cells}
  return sum(weights.values()) + sum(cell.cache_bytes for cell in cells)


def _check_numbers(config) -> None:
  for name, value, least in (
    ('memory_limit', config.memory_limit, 1),
    ('read_bytes', config.read_bytes, 1),
    ('steps', config.steps, 1),
    ('rounds', config.rounds, 1),
    ('warmup', config.warmup, 0),
    ('prefill.max_tokens', config.prefill.max_tokens, 0),
    ('prefill.rounds', config.prefill.rounds, 0),
    ('prefill.chunk_size', config.prefill.chunk_size, 1),
    ('peers.threads', config.peers.threads, 0),
  ):
    if value is not None and value < least:
      raise ValueError(f'{name}={value} must be at least {least}.')


def _check(cell: Cell) -> None:
  """Raises where a cell's model or cache cannot be made."""
  window = cell.model.sliding_window
  if cell.cache_kind == 'ring' and window is None:
    raise ValueError(
      "grid.cache_kind='ring' keeps a sliding window, but model."
      'sliding_window is unset; set it, or leave ring out.'
    )
  tokens = f'grid.context={cell.context} and steps={cell.steps}'
  room = cell.cache_len or cell.context + cell.steps
  if room < cell.context + cell.steps:
    raise ValueError(
      f'{tokens} do not fit into a cache of grid.cache_len={cell.cache_len}; '
      'raise that, or 0 for a cache that fits.'
    )
  if room > cell.model.max_len:
    if cell.cache_len:
      tokens = f'grid.cache_len={cell.cache_len}'
    raise ValueError(
      f'{tokens}: {room} tokens are more than model.max_len='
      f'{cell.model.max_len}; raise that.'
    )


def _cell(
  config, batch_size, context, cache_len, num_kv_heads, kind, dtypes, system
):
  dtype, weights_dtype, cache_dtype = dtypes
  cell = Cell(
    system=system,
    model=_model(config, num_kv_heads, dtype),
    batch_size=batch_size,
    context=context,
    cache_len=cache_len,
    cache_kind=kind,
    cache_dtype='int8' if kind == 'int8' else cache_dtype,
    weights_dtype=weights_dtype,
    prefill='measured',
    prefill_rounds=config.prefill.rounds,
    prefill_chunk=config.prefill.chunk_size,
    steps=config.steps,
    rounds=config.rounds,
    warmup=config.warmup,
    seed=config.seed,
  )
  _check(cell)
  return _prefilled(config, cell)


def _prefilled(config, cell: Cell) -> Cell:
  """The cell, with a made-up cache where its prompts are too long to read."""
  if cell.batch_size * cell.context <= config.prefill.max_tokens:
    return cell
  return dataclasses.replace(cell, prefill='filled', prefill_rounds=0)


def _larger_batches(cell: Cell, limit: int) -> Iterator[int]:
  """Doubles the batch while it fits into memory; ends with the largest."""
  fits = lambda size: (
    memory_bytes([dataclasses.replace(cell, batch_size=size)]) <= limit
  )
  size = cell.batch_size
  if not fits(size):
    return
  while fits(2 * size):
    size *= 2
    yield size
  low, high = size, 2 * size
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  yield low
  yield high  # is recorded as what does not fit


def _model(config, num_kv_heads, dtype: str) -> ModelConfig:
  fields = config.model.to_dict()
  for name in ('num_kv_heads', 'dtype'):
    if fields.get(name) is not None:
      raise ValueError(
        f'model.{name}={fields[name]!r} is not read; set grid.{name}.'
      )
  fields |= {'num_kv_heads': num_kv_heads, 'dtype': dtype}
  return ModelConfig.from_dict(fields)


def _dtypes(grid) -> list[tuple[str, str, str]]:
  """Types of compute, weights and cache."""
  known = config_lib.DTYPES
  weights = _choices(grid, 'weights_dtype', (SAME, *known))
  caches = _choices(grid, 'cache_dtype', (SAME, *known))
  return [
    (dtype, *(dtype if other == SAME else other for other in others))
    for dtype in _choices(grid, 'dtype', known)
    for others in itertools.product(weights, caches)
  ]


def _listed(fields, name: str, where: str = 'grid') -> tuple:
  values = fields[name]
  if not values:
    raise ValueError(f'{where}.{name} is empty; give at least one value.')
  return tuple(values)


def _numbers(grid, name: str, least: int = 1) -> tuple[int, ...]:
  for value in _listed(grid, name):
    if type(value) is not int or value < least:
      raise ValueError(
        f'grid.{name} has {value!r}; each must be a whole number, at least '
        f'{least}.'
      )
  return _listed(grid, name)


def _names(where: str, fields, name: str) -> list[str]:
  """Words of a field; what the command line gives as 'a,b' is two."""
  values = _listed(fields, name, where)
  return [part.strip() for value in values for part in str(value).split(',')]


def _choices(grid, name: str, known: Sequence[str]) -> list[str]:
  values = _names('grid', grid, name)
  for value in values:
    if value not in known:
      raise ValueError(
        f'grid.{name} has {value!r}; choose among {tuple(known)}.'
      )
  return values
