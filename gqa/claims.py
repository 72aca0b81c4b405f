"""Well-known claims about KV heads, computed anew in their own setting.

Each row has the claim, what was measured where, the published number and ours,
and what follows. Ours are counted and predicted (roofline.py), never measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gqa import cost, devices, presets, roofline
from gqa.cost import Setting

WHOLE_MEMORY = roofline.Limits(workspace=0.0)


def audit() -> list[dict[str, Any]]:
  """Computes every claim."""
  return [
    *_llama2_13b(),
    *_pope_context(),
    _pope_latency(),
    *_fireworks(),
    *_ainslie_figure_6(),
    _deepseek_v2(),
  ]


def _row(claim, source, setting, theirs, ours, verdict, **values):
  return {
    'claim': claim,
    'source': source,
    'setting': setting,
    'theirs': theirs,
    'ours': ours,
    'verdict': verdict,
    'values': values,
  }


def _llama2_13b():
  shape = presets.find('llama2-13b').shape
  source = 'blog posts on KV caching'
  per_token = cost.kv_bytes_per_token(shape.config, 2)
  total = cost.sequence_bytes(shape, Setting(context=4000))
  device = devices.find('a100-80')
  times = [
    1e3 * roofline.step_time(shape, device, Setting(context=context))
    for context in (1, 4_000, 32_000)
  ]
  balance = roofline.balance_tokens(shape, Setting())
  return [
    _row(
      'LLaMA-2 13B caches 1 MB per token',
      source,
      '2-byte cache, 40 KV heads',
      '1 MB',
      f'{per_token / 1e6:.2f} MB',
      f'rounded up by {1e6 / per_token - 1:.0%}',
      bytes_per_token=per_token,
    ),
    _row(
      'and 4 GB at 4,000 tokens',
      source,
      'the same, one sequence',
      '4 GB',
      f'{total / 1e9:.2f} GB',
      f'rounded up by {4e9 / total - 1:.0%}',
      bytes=total,
    ),
    _row(
      'with a cache, each token takes the same time',
      source,
      '1 sequence on one A100 80 GB, at token 1, 4,000 and 32,000',
      'constant',
      ', '.join(f'{t:.1f}' for t in times) + ' ms',
      f'nearly, while weights are most of the traffic: up to batch x context '
      f'of {balance:,.0f} tokens',
      step_ms=times,
      balance_tokens=balance,
    ),
  ]


def _pope_context():
  """64 chips, with 30% of their memory for the cache."""
  palm = presets.find('palm-540b').shape
  # The 48 heads are padded so that chips divide them; a multi-head model with
  # heads of 128 has about as many parameters as this one with 256.
  heads = {'num_heads': 64, 'num_kv_heads': 64, 'head_dim': 128}
  multi_head = dataclasses.replace(palm.config, **heads)
  multi_query = dataclasses.replace(palm.config, num_heads=64)
  space = 0.3 * devices.find('v4').memory
  found, longest = [], []
  for name, config, kv_split, theirs in (
    ('multi-head', multi_head, 'heads', (1_320, 330)),
    ('multi-query, split by heads', multi_query, 'heads', (660, 165)),
    ('multi-query, split by batch', multi_query, 'batch', (43_000, 10_700)),
  ):
    ours = []
    for batch_size in (128, 512):
      setting = Setting(
        batch_size=batch_size, tensor_parallel=64, kv_split=kv_split
      )
      one, two = (
        cost.device_cache_bytes(
          config, dataclasses.replace(setting, context=context)
        )
        for context in (1, 2)
      )
      ours.append(int(space // (two - one)))
    longest.append(ours[0])
    error = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    found.append(
      _row(
        f'longest context of PaLM 540B, {name}',
        'Pope et al. 2022, table 1',
        '64 TPU v4, 30% of memory for the cache, batch 128 and 512',
        f'{theirs[0]:,} and {theirs[1]:,}',
        f'{ours[0]:,} and {ours[1]:,}',
        f'within {error:.1%}',
        contexts=ours,
      )
    )
  ratio, naive = longest[2] / longest[0], longest[1] / longest[0]
  found.append(
    _row(
      'multi-query attention allows 32 times the context',
      'Pope et al. 2022, abstract',
      'the same',
      '32 times',
      f'{ratio:.1f} times',
      'by the split by batch: 64 padded heads of 128 against one of 256. Split '
      f'by heads it is {naive:.1f} times, as each chip holds that one',
      ratio=ratio,
      ratio_split_by_heads=naive,
    )
  )
  return found


def _pope_latency():
  palm = presets.find('palm-540b').shape
  config = dataclasses.replace(palm.config, num_heads=64)
  setting = Setting(
    batch_size=64,
    context=2048,
    weight_dtype='int8',
    tensor_parallel=64,
    kv_split='batch',
  )
  ms = 1e3 * roofline.step_time(config, devices.find('v4'), setting)
  return _row(
    'a token of PaLM 540B in 29 ms',
    'Pope et al. 2022, abstract',
    '64 TPU v4, int8 weights, batch 64, 2,048 tokens of history',
    '29 ms',
    f'at least {ms:.1f} ms',
    'the floor of memory and products; what remains is communication, which '
    'is not predicted here',
    step_ms=ms,
  )


def _fireworks():
  """One grouped model whose cache is stored once, or for each query head."""
  falcon = presets.find('falcon-40b').shape
  weights = cost.weight_bytes(falcon, Setting(weight_dtype='int8'))
  found = []
  for name, context, theirs in (
    ('a6000', 2048, '11 times'),
    ('a100-80', 4096, 'about 3 times'),
  ):
    device = devices.find(name)
    stored = {
      k: cost.sequence_bytes(falcon.with_kv_heads(k), Setting(context=context))
      for k in (falcon.config.num_kv_heads, falcon.config.num_heads)
    }
    shared, repeated = stored.values()
    most, few = (
      int((device.memory - weights) // n) for n in (shared, repeated)
    )

    def rate(batch_size, sequence, device=device):
      return batch_size * device.bandwidth / (weights + batch_size * sequence)

    equal = rate(few, shared) / rate(few, repeated)
    largest = rate(most, shared) / rate(few, repeated)
    found.append(
      _row(
        'shared KV heads give 11 times the throughput',
        'Fireworks.ai 2023',
        f'Falcon-40B, int8, one {device.title}, its 8 KV heads stored once or '
        f'for 128 query heads; here {context:,} tokens each',
        theirs,
        f'{equal:.1f} times at an equal batch ({few}), {largest:.0f} times at '
        f'the largest ({few} and {most})',
        f'a capacity effect: {repeated / shared:.0f} times as many tokens fit '
        'into what the weights leave; the load decides how much of it is used',
        equal_batch_ratio=equal,
        largest_batch_ratio=largest,
        batches=[few, most],
      )
    )
  return found


def _ainslie_figure_6():
  """Seconds of decoding for a sample and chip, at the largest batch."""
  t5 = presets.find('t5-xxl-decoder').shape
  device, chips, steps = devices.find('v4'), 8, 512
  theirs = {64: 2.531, 8: 0.514, 1: 0.489}
  ours = {}
  for num_kv_heads in theirs:
    shape = t5.with_kv_heads(num_kv_heads)
    setting = Setting(
      context=steps, source_len=2048, tensor_parallel=chips, kv_split='batch'
    )
    most = roofline.largest_batch(shape, device, setting, WHOLE_MEMORY)
    batch_size = min(most, 32 * chips)
    middle = dataclasses.replace(
      setting, batch_size=batch_size, context=steps // 2
    )
    seconds = steps * roofline.step_time(shape, device, middle)
    ours[num_kv_heads] = seconds * chips / batch_size
  return [
    _row(
      f'T5-XXL with {few} of 64 KV heads decodes faster',
      'Ainslie et al. 2023, figure 6',
      '8 TPU v4, 2,048 tokens in, 512 out, up to 32 sequences a chip',
      f'{theirs[64] / theirs[few]:.1f} times ({theirs[64]:.2f} and '
      f'{theirs[few]:.2f} s a sample)',
      f'{ours[64] / ours[few]:.1f} times ({ours[64]:.2f} and '
      f'{ours[few]:.2f} s)',
      verdict,
      ratio=ours[64] / ours[few],
      seconds=[ours[64], ours[few]],
    )
    for few, verdict in (
      (8, 'a floor of decoding alone: no encoder, no communication'),
      (1, 'theirs hardly falls below 8: KV traffic is no longer what it takes'),
    )
  ]


def _deepseek_v2():
  head_dim = 128
  ours = (4 * head_dim + head_dim // 2) / (2 * head_dim)
  return _row(
    'MLA caches as much as 2.25 KV heads',
    'DeepSeek-V2, section 2.1',
    'latent 512, rotary 64, heads of 128',
    '2.25',
    f'{ours:.2f}',
    'agrees',
    kv_heads=ours,
  )
