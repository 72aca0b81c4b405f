"""Plots of decoding: time, bandwidth and throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gqa.report import axes as axes_lib
from gqa.report import decode_series, recipes, style
from gqa.report.axes import Rows
from gqa.report.join import Timing
from gqa.report.recipes import heads_order

_LINES = 7  # of a panel


def by_heads(rows: Rows):
  """A line for each batch and context, and what was predicted of it."""
  groups = _of_several_heads(rows)
  if not groups:
    return None
  panels = {
    subject: dict(
      axes_lib.ends(
        axes_lib.split(points, 'context', 'batch_size'),
        _LINES,
        lambda key: key[0] * key[1],
      )
    )
    for (subject,), points in axes_lib.most(groups)
  }
  styles = style.styles(sorted({key for p in panels.values() for key in p}))
  figure, axes = axes_lib.make(len(panels), 3.6)
  for axis, (subject, lines) in zip(axes, panels.items(), strict=True):
    points = [row for line in lines.values() for row in line]
    heads = sorted({r['kv_heads'] for r in points}, key=heads_order)
    for key in sorted(lines, key=lambda k: -max(r['ms'] for r in lines[k])):
      line = sorted(lines[key], key=lambda r: heads_order(r['kv_heads']))
      x = [heads_order(r['kv_heads'])[0] for r in line]
      context, batch = key
      look = styles[key]
      axis.errorbar(
        x,
        [r['ms'] for r in line],
        yerr=axes_lib.error(line, 'ms', 'ms_low', 'ms_high'),
        capsize=2.5,
        elinewidth=0.9,
        label=f'batch {batch:,}, {context:,} tokens',
        **look,
      )
      if all(r['predicted_ms'] is not None for r in line):
        axis.plot(
          x, [r['predicted_ms'] for r in line], color=look['color'], lw=0.7
        )
    axis.set_yscale('log')
    axes_lib.plain(axis.yaxis)
    axes_lib.log2(axis.xaxis, [heads_order(h)[0] for h in heads])
    axis.set(
      xlabel='KV heads', ylabel='ms per step', title=axes_lib.short(subject)
    )
  axes_lib.legend_below(figure, axes)
  return figure


def positions(rows: Rows):
  """Time of each token and in all, and time against the context."""
  by_position = [r for r in rows if 'way' in r]
  by_context = [r for r in rows if 'way' not in r]
  panels = []
  if by_position:
    panels += [('ms', by_position), ('total_seconds', by_position)]
  if by_context:
    panels += [
      (f'{key[0]}, batch {key[1]:,}', group)
      for key, group in axes_lib.most(
        axes_lib.split(by_context, 'subject', 'batch_size')
      )
    ]
  if not panels:
    return None
  figure, axes = axes_lib.make(len(panels), 3.4)
  looks = style.styles(['cached', 'uncached'])
  names = {'cached': 'KV cache', 'uncached': 'prefix read again'}
  for axis, (what, points) in zip(axes, panels, strict=True):
    if what in ('ms', 'total_seconds'):
      for (way, _), line in axes_lib.split(points, 'way', 'runs').items():
        # The first token of both ways reads the prompt.
        line = line[1:] if what == 'ms' else line
        axis.plot(
          [r['position'] for r in line],
          [r[what] for r in line],
          label=names[way],
          **style.kept(looks[way], 'color', 'linestyle'),
        )
      label = 'ms per token' if what == 'ms' else 'seconds in all'
      r = points[0]
      axis.set(
        xlabel='position, tokens before it',
        ylabel=label,
        title=f'{r["num_layers"]} x {r["embed_dim"]}, {r["dtype"]}, batch 1',
      )
    else:
      styles = axes_lib.heads_styles(by_context)
      for (heads,), line in axes_lib.split(points, 'kv_heads').items():
        axis.errorbar(
          [r['context'] for r in line],
          [r['ms'] for r in line],
          yerr=axes_lib.error(line, 'ms', 'ms_low', 'ms_high'),
          capsize=2.5,
          elinewidth=0.9,
          label=axes_lib.count(heads),
          **styles[heads],
        )
      axis.set_xscale('log', base=2)
      axes_lib.log2(axis.xaxis, [r['context'] for r in points])
      axis.set(
        xlabel='tokens in the cache',
        ylabel='ms per step',
        title=axes_lib.short(what),
      )
    axis.set_yscale('log')
    axes_lib.plain(axis.yaxis)
  for axis in axes:
    axis.legend()
  return figure


def roofline(rows: Rows):
  """What was reached of the bandwidth and the peak."""
  if not rows:
    return None
  chosen = axes_lib.most(axes_lib.split(rows, 'subject'))
  rows = [r for _, group in chosen for r in group]
  styles = axes_lib.heads_styles(rows)
  figure, (left, right) = axes_lib.make(2, 3.8)
  bandwidth = _median([r['read_bandwidth'] for r in rows])
  peaks = {
    dtype: _median([r['matrix_flops'] for r in group])
    for (dtype,), group in axes_lib.split(rows, 'dtype').items()
  }
  x = [r['flops_per_byte'] for r in rows]
  ends = min(x) / 2, 4 * max([*x, max(peaks.values()) / bandwidth])
  for i, (dtype, peak) in enumerate(peaks.items()):
    corner = peak / bandwidth
    left.plot(
      [ends[0], corner, ends[1]],
      [bandwidth * ends[0] / 1e9, peak / 1e9, peak / 1e9],
      color=style.INK,
      lw=1.1,
      linestyle=style.DASHES[i],
      label=f'limits, {dtype}',
    )
  right.axhline(
    bandwidth / 1e9, color=style.INK, lw=1.1, label='bandwidth of reading'
  )
  for heads, look in styles.items():
    points = [r for r in rows if r['kv_heads'] == heads]
    look = style.kept(look, 'color', 'marker') | {'linestyle': 'none'}
    left.plot(
      [r['flops_per_byte'] for r in points],
      [r['flops_per_second'] / 1e9 for r in points],
      label=axes_lib.count(heads),
      alpha=0.85,
      **look,
    )
    right.plot(
      [r['batch_size'] * r['context'] for r in points],
      [r['bandwidth'] / 1e9 for r in points],
      alpha=0.85,
      **look,
    )
  left.set(
    xscale='log',
    yscale='log',
    xlabel='FLOPs per byte of a step',
    ylabel='GFLOP/s reached',
    title='Roofline',
  )
  right.set(
    xscale='log',
    xlabel='batch x context, tokens',
    ylabel='GB/s of weights and cache',
    title='Bytes that a step reads, over its time',
    ylim=(0, None),
  )
  axes_lib.tokens(right.xaxis)
  axes_lib.plain(left.xaxis)
  axes_lib.plain(left.yaxis)
  axes_lib.legend_below(figure, [left, right])
  return figure


def _median(values):
  values = sorted(values)
  return values[len(values) // 2]


def throughput(rows: Rows):
  """Tokens per second until memory ends."""
  groups = {
    key: group
    for key, group in axes_lib.split(rows, 'subject', 'context').items()
    if len({r['batch_size'] for r in group}) > 2
    or any(r['largest'] for r in group)
  }
  if not groups:
    return None
  groups = axes_lib.most(groups)
  styles = axes_lib.heads_styles(rows)
  figure, axes = axes_lib.make(len(groups), 3.5)
  for axis, ((subject, context), points) in zip(axes, groups, strict=True):
    for (heads,), line in axes_lib.split(points, 'kv_heads').items():
      look = styles[heads]
      axis.errorbar(
        [r['batch_size'] for r in line],
        [r['tokens_per_second'] for r in line],
        yerr=axes_lib.error(
          line,
          'tokens_per_second',
          'tokens_per_second_low',
          'tokens_per_second_high',
        ),
        capsize=2,
        elinewidth=0.9,
        label=axes_lib.count(heads),
        **look,
      )
      for r in line:
        if r['largest']:
          axis.plot(
            r['batch_size'],
            r['tokens_per_second'],
            'x',
            color=look['color'],
            ms=11,
            mew=2,
          )
    axis.set_xscale('log', base=2)
    axes_lib.powers(axis.xaxis)
    axis.set(
      xlabel='sequences of a batch',
      ylabel='tokens per second',
      title=f'{axes_lib.short(subject)}, {context:,} tokens',
      ylim=(0, None),
    )
    axes_lib.tokens(axis.yaxis)
  axes_lib.legend_below(figure, axes)
  return figure


def crossover(rows: Rows, timings: Sequence[Timing]):
  """Predicted and measured speedups over tokens and KV heads."""
  groups = _of_several_heads(rows)
  if not groups:
    return None
  from matplotlib import colors

  groups = axes_lib.most(groups)
  figure, axes = axes_lib.make(len(groups), 3.7)
  image = None
  for axis, ((subject,), points) in zip(axes, groups, strict=True):
    base = next(
      t for t in timings if t.title == subject and recipes.multi_head(t.model)
    )
    powers = range(
      math.floor(math.log2(min(r['tokens'] for r in points))) - 1,
      math.ceil(math.log2(max(r['tokens'] for r in points))) + 2,
    )
    tokens = [2.0 ** (p + f / 8) for p in powers for f in range(8)]
    tokens = [n for n in tokens if n >= 1]
    found = decode_series.crossover(base, tokens)
    top = max(2.0, max(r['speedup'] for r in points), found.speedup[0][-1])
    norm = colors.LogNorm(1, top)

    image = axis.pcolormesh(
      tokens,
      range(len(found.heads)),
      found.speedup,
      norm=norm,
      cmap='cividis',
      shading='nearest',
      linewidth=0,
    )
    axis.set_xscale('log', base=10)
    axes_lib.tokens(axis.xaxis)
    left, right = tokens[0], tokens[-1]
    on_map = [(n, i) for i, n in enumerate(found.balance) if left <= n <= right]
    if on_map:
      axis.plot(
        *zip(*on_map, strict=True),
        color='#ffffff',
        linestyle='--',
        lw=1.6,
        marker='.',
      )
    for (at, heads), cells in axes_lib.split(
      points, 'tokens', 'kv_heads'
    ).items():
      if heads.isdecimal() and int(heads) in found.heads:
        y = found.heads.index(int(heads))
        _measured(axis, at, y, [r['speedup'] for r in cells], norm)
    axis.set_yticks(range(len(found.heads)), [str(k) for k in found.heads])
    axis.grid(False)
    axis.set_xlim(left, right)
    axis.set(
      xlabel='batch x context, tokens',
      ylabel='KV heads',
      title=axes_lib.short(subject),
    )
  bar = figure.colorbar(image, ax=axes, label='times as fast as multi-head')
  axes_lib.plain(bar.ax.yaxis)
  return figure


def _measured(axis, tokens: float, y: int, speedups: Sequence[float], norm):
  """A circle and its number; of several batches and contexts the range."""
  low, high = min(speedups), max(speedups)
  axis.scatter(
    tokens,
    y,
    c=[high],
    norm=norm,
    cmap='cividis',
    edgecolors='#ffffff',
    s=70,
    linewidths=1.2,
    zorder=3,
  )
  if high != 1.0 or low != 1.0:  # of multi-head it is always 1
    text = f'{low:.1f}' if len(speedups) == 1 else f'{low:.1f} to {high:.1f}'
    axis.annotate(
      text,
      (tokens, y),
      xytext=(0, 6.5),
      textcoords='offset points',
      ha='center',
      fontsize=6.5,
      color='#ffffff' if norm(high) < 0.55 else '#000000',
    )


def _of_several_heads(rows: Rows):
  """Models that were measured with more than one number of KV heads."""
  return {
    subject: group
    for subject, group in axes_lib.split(rows, 'subject').items()
    if len({r['kv_heads'] for r in group}) > 1
  }
