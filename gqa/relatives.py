"""Other ways to a small KV cache, in cost only: none of them is built here.

Each is counted as if it replaced the attention of every layer of a model,
with the sizes its authors use: what a token keeps in the cache, what a step
reads of it, and how many FLOPs it makes of a byte. Elements per token and
layer, with N query heads, K KV heads of dimension H:

  MLA    4 H + H / 2, one latent and a rotary part for all heads
         (DeepSeek-V2, section 2.1)
  GLA-2  the same in two latents of 2 H, each for half of the heads, so that
         two devices split it (Zadouri et al. 2025)
  GTA    K H + H / 2: values are whole tied states, keys half of them and a
         rotary half for all heads (Zadouri et al. 2025)
  TPA    (2 + 2) (N + H): keys and values of rank two (Zhang et al. 2025)
  CLA2   2 K H in every other layer, whose neighbour reads it again
         (Brandon et al. 2024): memory is halved, traffic is not
  MLKV   2 H, one KV head, in one layer of six, read by all six
         (Zuhri et al. 2024)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gqa import cost, roofline
from gqa.config import divisors
from gqa.cost import Model, Setting
from gqa.devices import Device

TPA_RANK = 2  # of keys, and of values
MLKV_LAYERS = 6  # that share one KV head
LABEL = 'cost only'


class _Relative(NamedTuple):
  """Numbers of one token in all layers."""

  name: str
  detail: str
  kept: int
  read: int  # by a step
  flops: int  # of a step
  shared: int = 0  # of `kept`, what every device holds
  parts: int = 1  # into which the rest can be split


def rows(
  model: Model, device: Device, setting: Setting
) -> list[dict[str, Any]]:
  """Predicts each relative of a model, for the setting's batch and context."""
  config = cost.as_shape(model).config
  dtype = setting.cache_dtype or cost.compute_dtype(model, setting)
  itemsize = cost.ITEMSIZE[dtype]
  devices = setting.tensor_parallel
  tokens = setting.batch_size * setting.context
  peak = devices * roofline.peak(model, device, setting)
  per_kv_head = 2 * config.head_dim * config.num_layers
  found = []
  for r in _relatives(config):
    ways = max(d for d in divisors(devices) if r.parts % d == 0)
    held = (r.kept - r.shared) / ways + r.shared
    reading = tokens * r.read * itemsize * held / r.kept / device.bandwidth
    found.append(
      {
        'method': r.name,
        'label': LABEL,
        'detail': r.detail,
        'kv_bytes_per_token': r.kept * itemsize,
        'kv_bytes_per_sequence': r.kept * itemsize * setting.context,
        'device_kv_bytes_per_token': held * itemsize,
        'same_as_kv_heads': r.kept / per_kv_head,
        'flops_per_byte': r.flops / (r.read * itemsize),
        'attention_ms': 1e3 * max(reading, tokens * r.flops / peak),
      }
    )
  return found


def _relatives(config):
  L, N, H = config.num_layers, config.num_heads, config.head_dim
  K = max(d for d in divisors(N) if d <= min(8, *config.kv_heads))
  latent, rotary = 4 * H, H // 2
  tpa = 2 * TPA_RANK * L
  plain = 4 * L * N * H  # scores, and mixing of values
  return [
    _Relative(
      'MLA',
      f'latent {latent}, rotary {rotary}',
      kept=L * (latent + rotary),
      read=L * (latent + rotary),
      flops=2 * L * N * (2 * latent + rotary),
      shared=L * (latent + rotary),
    ),
    _Relative(
      'GLA-2',
      f'2 latents of {latent // 2}, rotary {rotary}',
      kept=L * (latent + rotary),
      read=L * (latent + rotary),
      flops=2 * L * N * (latent + rotary),
      shared=L * rotary,
      parts=2,
    ),
    _Relative(
      f'GTA-{K}',
      f'{K} tied heads, rotary {rotary}',
      kept=L * (K * H + rotary),
      read=L * (K * H + rotary),
      flops=plain,
      shared=L * rotary,
      parts=K,
    ),
    _Relative(
      'TPA',
      f'keys and values of rank {TPA_RANK}',
      kept=tpa * (N + H),
      read=tpa * (N + H),
      flops=2 * tpa * N * (H + 1),
      shared=tpa * H,
      parts=N,
    ),
    _Relative(
      f'CLA2, GQA-{K}',
      f'{K} KV heads in every other layer',
      kept=2 * K * H * -(-L // 2),
      read=2 * K * H * L,
      flops=plain,
      parts=K,
    ),
    _Relative(
      'MLKV',
      f'1 KV head for every {MLKV_LAYERS} layers',
      kept=2 * H * -(-L // MLKV_LAYERS),
      read=2 * H * L,
      flops=plain,
      shared=2 * H * -(-L // MLKV_LAYERS),
    ),
  ]
