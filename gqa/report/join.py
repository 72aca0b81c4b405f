"""What belongs together, by recorded fields alone.

Runs that differ in their seed are one recipe. A run that started from a
converted checkpoint has in its own checkpoint how that was made. A benchmark's
row is of a recipe if it holds the same model, field by field.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gqa.config import ModelConfig
from gqa.report import recipes
from gqa.report.read import Found, Row, Run
from gqa.report.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Timing:
  """A measured row of a benchmark, and where it is from."""

  benchmark: str
  row: Row
  model: ModelConfig | None

  @property
  def heads(self) -> str:
    """KV heads, as one types them."""
    return recipes.heads(self.row['num_kv_heads'])

  @property
  def setting(self) -> tuple:
    """Equal where only the model differs."""
    row = self.row
    return (row['batch_size'], row['context'], *self.types)

  @property
  def types(self) -> tuple:
    """Cache, types, steps, room of the cache, machine and system."""
    names = ('cache_kind', 'dtype', 'weights_dtype', 'cache_dtype', 'steps')
    row = self.row
    return (
      *(row.get(name) for name in names),
      row.get('cache_len') or 0,  # not in rows of early versions
      json.dumps(row.get('device')),
      row['system'],
    )

  @property
  def subject(self) -> tuple:
    """Equal where only KV heads, batch and context differ, in one file."""
    model = str(self.row.get('model'))
    if self.model is not None:
      model = recipes.family(self.model)
    return (self.benchmark, model, *self.types)

  @property
  def title(self) -> str:
    """Of its subject."""
    row = self.row
    model = row.get('model') if self.model is None else recipes.size(self.model)
    kinds = [row.get(name) for name in ('cache_kind', 'dtype', 'cache_dtype')]
    kinds = ' '.join(dict.fromkeys(str(kind) for kind in kinds if kind))
    if row.get('cache_len'):
      kinds += f' of {row["cache_len"]:,} tokens'
    device = row.get('device') or {}
    machine = device.get('kind', '') if isinstance(device, dict) else device
    return f'{model}, {kinds}, {machine}, {self.benchmark}'

  def get(self, name: str) -> Any:
    """A field, or None."""
    return self.row.get(name)


@dataclasses.dataclass
class Data:
  """What tables and plots are made of.

  Attributes:
    timings: of this library.
    peers: of other systems.
    refused: rows without numbers.
  """

  found: Found
  recipes: list[Recipe]
  timings: list[Timing]
  peers: list[Timing]
  refused: list[Timing]

  def matching(self, recipe: Recipe) -> list[Timing]:
    """Timings of the model of a recipe, the latest of each setting."""
    wanted = recipes.shape_key(recipe.model)
    latest = {
      t.setting: t
      for t in sorted(self.timings, key=lambda t: t.get('date') or '')
      if t.model and recipes.shape_key(t.model) == wanted
    }
    return list(latest.values())

  def parent_run(self, run: Run) -> Run | None:
    """The trained run that a run descends from."""
    for path in run.parent_paths[::-1]:
      parent = self.found.run_at(path)
      if parent is not None and parent is not run:
        return parent
    return None

  def parent_loss(self, run: Run) -> float | None:
    """Validation loss of the run it descends from, if that is known."""
    if run.parent_loss is not None:
      return run.parent_loss
    parent = self.parent_run(run)
    return None if parent is None else parent.loss

  def largest_batches(self, recipe: Recipe) -> dict[int, int]:
    """The largest batch that memory allowed, by context."""
    timed = collections.defaultdict(set)
    for timing in self.matching(recipe):
      timed[timing.row['context']].add(timing.row['batch_size'])
    wanted = recipes.shape_key(recipe.model)
    refused = {
      t.row['context']
      for t in self.refused
      if t.model
      and recipes.shape_key(t.model) == wanted
      and t.get('obstacle') == 'memory'
    }
    return {context: max(timed[context]) for context in refused & set(timed)}


def join(found: Found) -> Data:
  """Ties together what was read."""
  timings, peers, refused = [], [], []
  for benchmark, row in found.decode_rows():
    timing = Timing(benchmark.name, row, _row_model(row))
    if row['status'] != 'measured':
      refused.append(timing)
    else:
      (timings if row['system'] == 'gqa' else peers).append(timing)
  return Data(found, recipes.make(found), timings, peers, refused)


def _row_model(row: Row) -> ModelConfig | None:
  if not isinstance(row.get('model'), Mapping):
    return None
  try:
    return ModelConfig.from_dict(row['model'])
  except (ValueError, TypeError):
    return None
