"""How long decoding takes and how much fits, predicted from a device's limits.

A step reads the weights once and the cache of every sequence, and takes at
least the time of those bytes and at least that of its products (the roofline
of Williams et al. 2009):

  seconds = max(bytes / bandwidth, FLOPs / peak) / efficiency + overhead

Attention over a bfloat16 cache makes as many FLOPs of a byte as query heads
share a KV head, where devices want some hundreds: bytes decide. KV traffic
passes that of the weights at batch x context = weight bytes / KV bytes per
token; below that, fewer KV heads gain little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from gqa import cost
from gqa.cost import Model, Setting
from gqa.devices import Device

UNBOUNDED = 2**40  # a batch or context that is found to fit has no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How much of a device a program gets.

  Attributes:
    efficiency: the part of bandwidth and peak that is reached.
    overhead: seconds that a step takes besides.
    workspace: the part of memory that weights and cache leave free, for
      activations and the runtime.
  """

  efficiency: float = 1.0
  overhead: float = 0.0
  workspace: float = 0.05

  def __post_init__(self):
    if not 0 < self.efficiency <= 1:
      raise ValueError(
        f'efficiency={self.efficiency} must be above 0 and at most 1.'
      )
    if self.overhead < 0:
      raise ValueError(f'overhead={self.overhead} must be at least 0.')
    if not 0 <= self.workspace < 1:
      raise ValueError(
        f'workspace={self.workspace} must be at least 0 and below 1.'
      )


BEST = Limits()


class Step(NamedTuple):
  """One step of decoding, a token for each sequence."""

  seconds: float
  bound: str  # 'weights', 'KV' or 'compute': what takes the most of it
  traffic: cost.Traffic


def step(
  model: Model, device: Device, setting: Setting, limits: Limits = BEST
) -> Step:
  """Predicts one step; see `cost.step_traffic` for what is left out."""
  traffic = cost.step_traffic(model, setting)
  moving = (traffic.weight_bytes + traffic.kv_bytes) / device.bandwidth
  computing = traffic.flops / peak(model, device, setting)
  bound = 'weights' if traffic.weight_bytes >= traffic.kv_bytes else 'KV'
  if computing > moving:
    bound = 'compute'
  seconds = max(moving, computing) / limits.efficiency + limits.overhead
  return Step(seconds, bound, traffic)


def step_time(
  model: Model, device: Device, setting: Setting, limits: Limits = BEST
) -> float:
  """Predicts the seconds of one step."""
  return step(model, device, setting, limits).seconds


def peak(model: Model, device: Device, setting: Setting) -> float:
  """FLOP/s of a device in the type of the products."""
  if cost.compute_dtype(model, setting) == 'float32':
    return device.float32_flops
  return device.flops


def balance_tokens(model: Model, setting: Setting) -> float:
  """The batch x context at which KV traffic equals that of the weights.

  Windows bound what a sequence adds; the batch is what varies here.
  """
  devices = setting.tensor_parallel
  even = dataclasses.replace(setting, batch_size=devices)
  traffic = cost.step_traffic(model, even)
  return devices * setting.context * traffic.weight_bytes / traffic.kv_bytes


def device_bytes(model: Model, setting: Setting) -> int:
  """Bytes of weights and cache on each device."""
  weights = cost.weight_bytes(model, setting)
  return weights + cost.device_cache_bytes(model, setting)


def room(device: Device, limits: Limits = BEST) -> float:
  """Bytes of a device that weights and cache may take."""
  return device.memory * (1 - limits.workspace)


def largest_batch(
  model: Model,
  device: Device,
  setting: Setting,
  limits: Limits = BEST,
  seconds: float | None = None,
) -> int | None:
  """The most sequences that fit, in steps of at most `seconds` if given.

  0: not one does. None: there is no limit.
  """
  space = room(device, limits) - cost.weight_bytes(model, setting)

  def possible(batch_size):
    tried = dataclasses.replace(setting, batch_size=batch_size)
    if cost.device_cache_bytes(model, tried) > space:
      return False
    if seconds is None:
      return True
    return step_time(model, device, tried, limits) <= seconds

  return _largest(possible)


def largest_context(
  model: Model, device: Device, setting: Setting, limits: Limits = BEST
) -> int | None:
  """The longest sequences of which the batch fits; 0 and None likewise."""
  space = room(device, limits) - cost.weight_bytes(model, setting)

  def possible(context):
    tried = dataclasses.replace(setting, context=context)
    return cost.device_cache_bytes(model, tried) <= space

  return _largest(possible)


def _largest(possible: Callable[[int], bool]) -> int | None:
  """The largest number that is possible, as all below it are."""
  if not possible(1):
    return 0
  low = 1
  while possible(2 * low):
    low *= 2
    if low >= UNBOUNDED:
      return None
  high = 2 * low
  while high - low > 1:
    middle = (low + high) // 2
    if possible(middle):
      low = middle
    else:
      high = middle
  return low
