"""Plots of quality: what a model lost, and what it took to win it back."""

from __future__ import annotations

import math

from gqa.report import axes as axes_lib
from gqa.report import series, style
from gqa.report.axes import Rows

_SETTING = ('batch_size', 'context', 'cache_len', 'cache_kind')
_SETTING += ('dtype', 'cache_dtype')


def pareto(rows: Rows):
  """Loss against the time of a step, with what nothing else beats."""
  if not rows:
    return None
  studies = axes_lib.most(axes_lib.split(rows, 'study'))
  groups = [
    (key, points)
    for _, group in studies
    for key, points in axes_lib.ends(
      axes_lib.split(group, 'study', *_SETTING), 2, lambda k: k[1] * k[2]
    )
  ]
  rows = [row for _, group in groups for row in group]
  colors = axes_lib.heads_styles(rows)
  markers = style.styles(r['kind'] for r in rows)
  figure, axes = axes_lib.make(len(groups), 3.6)
  for axis, (key, points) in zip(axes, groups, strict=True):
    for point in points:
      axis.errorbar(
        point['ms'],
        point['loss'],
        xerr=_bar(point, 'ms', 'ms_low', 'ms_high'),
        yerr=point['loss_sd'],
        capsize=2.5,
        elinewidth=0.9,
        color=colors[point['kv_heads']]['color'],
        marker=markers[point['kind']]['marker'],
        markeredgecolor=style.INK,
        markeredgewidth=0.5,
        markersize=6.5,
      )
    front = _front([(p['ms'], p['loss']) for p in points])
    axis.plot(
      *zip(*front, strict=True), color=style.INK, lw=0.8, alpha=0.6, zorder=1
    )
    study, batch, context, room, kind, dtype, cache = key
    axis.set(
      xlabel='ms per step',
      ylabel='validation loss, nats per token',
      title=f'batch {batch:,}, {context:,} tokens, {dtype}, {kind} cache'
      + ('' if cache == dtype else f' of {cache}')
      + (f' for {room:,}' if room else '')
      + ('\n' + study.replace(', w', ',\nw') if len(studies) > 1 else ''),
    )
    axis.margins(0.12)
  entries = {
    axes_lib.count(heads): _mark(look['color'], 's')
    for heads, look in colors.items()
  }
  entries |= {
    kind: _mark('none', look['marker']) for kind, look in markers.items()
  }
  axes_lib.legend_of(figure, entries)
  return figure


def _mark(color, marker):
  return {
    'linestyle': 'none',
    'marker': marker,
    'markerfacecolor': color,
    'markeredgecolor': style.INK,
    'markersize': 6.5,
  }


def _bar(point, value, low, high):
  lengths = axes_lib.error([point], value, low, high)
  return None if lengths is None else [[lengths[0][0]], [lengths[1][0]]]


def _front(points):
  """Points that no other beats in both, by the first number."""
  best, front = math.inf, []
  for x, y in sorted(points):
    if y < best:
      front.append((x, y))
      best = y
  return front


def bars(rows: Rows):
  """What each method lost, right after it and after uptraining."""
  rows = [r for r in rows if r['parent_loss'] is not None]
  if not rows:
    return None
  groups = axes_lib.most(axes_lib.split(rows, 'model', 'kv_heads'))
  several = len({r['model'] for r in rows}) > 1
  stages = sorted({(r['alpha'], r['stage']) for r in rows})
  widest = max(len({r['method'] for r in group}) for _, group in groups)
  columns = 1 if widest > 6 else 2
  figure, axes = axes_lib.make(len(groups), 3.3, columns)
  for axis, ((model, heads), group) in zip(axes, groups, strict=True):
    methods = list(dict.fromkeys(r['method'] for r in group))
    width = 0.84 / max(len(stages), 3)
    for place, method in enumerate(methods):
      own = [r for r in group if r['method'] == method]
      for i, row in enumerate(sorted(own, key=lambda r: r['alpha'])):
        j = stages.index((row['alpha'], row['stage']))
        axis.bar(
          place + (i + 0.5 - len(own) / 2) * width,
          row['loss'] - row['parent_loss'],
          width * 0.92,
          yerr=row['loss_sd'],
          capsize=2,
          color=style.COLORS[j % len(style.COLORS)],
          edgecolor=style.INK,
          linewidth=0.5,
          hatch=style.HATCHES[j % len(style.HATCHES)],
          label='right after conversion' if row['alpha'] == 0 else row['stage'],
          error_kw={'ecolor': style.INK, 'elinewidth': 0.9},
        )
    axis.axhline(0, color=style.INK, lw=0.8)
    axis.set_xticks(range(len(methods)), [_wrapped(m) for m in methods])
    axis.set_xlim(-0.6, len(methods) - 0.4)
    axis.grid(False, axis='x')
    axis.set(
      ylabel="nats per token above the parent's",
      title=(f'{model}\n' if several else '') + f'to {axes_lib.count(heads)}',
    )
  axes_lib.legend_below(figure, axes)
  return figure


def _wrapped(method: str) -> str:
  return method.replace(', ', '\n')


def alphas(rows: Rows):
  """Loss against alpha, with the parent's line; a panel for each model."""
  rows = [r for r in rows if r['alpha'] is not None]
  models = {
    model: points
    for model, points in axes_lib.split(rows, 'model').items()
    if len({r['alpha'] for r in points}) > 1
  }
  if not models:
    return None
  models = axes_lib.most(models)
  lines = [axes_lib.split(points, *series.LINE) for _, points in models]
  styles = style.styles(
    dict.fromkeys(key[1:] for keys in lines for key in keys)
  )
  figure, axes = axes_lib.make(len(models), 3.6)
  for axis, ((model,), points), keys in zip(axes, models, lines, strict=True):
    for key, line in keys.items():
      _alpha_line(axis, line, _line_label(key), styles[key[1:]])
    parents = {r['parent_loss'] for r in points if r.get('stage') is None}
    parents -= {None}
    if parents:
      mean = sum(parents) / len(parents)
      axis.axhline(mean, color=style.INK, ls=':', lw=1.2, label='parent')
    values = sorted({r['alpha'] for r in points})
    least = min(v for v in values if v > 0)
    axis.set_xscale('symlog', linthresh=least)
    axis.set_xticks(values, [_alpha_tick(v, points) for v in values])
    axis.minorticks_off()
    axis.set_xlim(-0.15 * least, 1.35 * values[-1])
    axis.set(
      xlabel="alpha, steps over the parent's (tokens below it)",
      ylabel='loss, nats per token',
      title=model if len(models) > 1 else '',
    )
  axes_lib.legend_below(figure, axes)
  return figure


def _alpha_line(axis, points, label, look):
  axis.errorbar(
    [p['alpha'] for p in points],
    [p['loss'] for p in points],
    yerr=[p['loss_sd'] or 0.0 for p in points],
    capsize=2.5,
    elinewidth=0.9,
    label=label,
    **look,
  )
  for p in points:
    if p.get('stage') == 'converted':
      axis.plot(
        p['alpha'], p['loss'], look['marker'], color=look['color'], mfc='w'
      )


def _line_label(key) -> str:
  _, heads, method = key
  return ', '.join([axes_lib.count(heads)] + ([method] if method else []))


def _alpha_tick(alpha, rows):
  tokens = {r['tokens'] for r in rows if r['alpha'] == alpha}
  return f'{alpha:g}\n{axes_lib.compact(max(tokens))}'


def training(rows: Rows):
  """Losses and gradient norms against tokens, whatever became of a run."""
  rows = [r for r in rows if r['longest'] and math.isfinite(r['value'])]
  panels = axes_lib.split(rows, 'scratch')
  if not panels:
    return None
  figure, axes = axes_lib.make(2 * len(panels), 3.3)
  colors = axes_lib.heads_styles(rows)
  looks = style.styles(r['kind'] for r in rows)
  for i, ((scratch,), points) in enumerate(sorted(panels.items())[::-1]):
    loss, norm = axes[2 * i : 2 * i + 2]
    for (heads, kind, _, state), lines in axes_lib.split(
      points, 'kv_heads', 'kind', 'run', 'state'
    ).items():
      look = style.kept(looks[kind], 'linestyle', 'marker')
      look['color'] = colors[heads]['color']
      curves = {
        tag: ([r['tokens'] for r in line], [r['value'] for r in line])
        for (tag,), line in axes_lib.split(lines, 'tag').items()
      }
      if 'train/loss' in curves:
        loss.plot(*curves['train/loss'], color=look['color'], lw=0.6, alpha=0.4)
      if 'eval/loss' in curves:
        loss.plot(*curves['eval/loss'], ms=4.5, **look)
      if 'train/grad_norm' in curves:
        x, y = curves['train/grad_norm']
        norm.plot(x, y, lw=0.9, alpha=0.8, **(look | {'marker': None}))
      for axis, tag in ((loss, 'train/loss'), (norm, 'train/grad_norm')):
        if state != 'done' and tag in curves:
          x, y = curves[tag]
          axis.plot(x[-1], y[-1], 'x', color=style.INK, ms=8, mew=1.6, zorder=4)
    for parent in {r['parent_loss'] for r in points} - {None}:
      loss.axhline(parent, color=style.INK, linestyle=':', lw=1.1)
    name = 'from scratch' if scratch else 'uptrained'
    loss.set(ylabel='nats per token', title=f'{name}: loss', yscale='log')
    norm.set(
      ylabel='norm of the gradient', title=f'{name}: gradient', yscale='log'
    )
    for axis in (loss, norm):
      axis.set_xlabel('tokens of training')
      axes_lib.plain(axis.yaxis)
      axes_lib.tokens(axis.xaxis)
  _training_legend(figure, colors, looks, rows)
  return figure


def _training_legend(figure, colors, looks, rows) -> None:
  entries = {
    axes_lib.count(heads): {'color': look['color'], 'lw': 3}
    for heads, look in colors.items()
  }
  ink = {'color': style.INK}
  entries |= {
    kind: style.kept(look, 'linestyle', 'marker') | ink
    for kind, look in looks.items()
  }
  if any(r['parent_loss'] is not None for r in rows):
    entries["the parent's loss"] = {'linestyle': ':', **ink}
  if any(r['state'] != 'done' for r in rows):
    entries['not come to its end'] = {
      'marker': 'x',
      'linestyle': 'none',
      'ms': 8,
      'mew': 1.6,
      **ink,
    }
  axes_lib.legend_of(figure, entries)


def similarities(rows: Rows):
  """A heat map of each conversion, layer by layer; equal ones are one."""
  panels = {}
  several = len({r['model'] for r in rows}) > 1
  for (_, model, heads, method), cells in axes_lib.split(
    rows, 'conversion', 'model', 'kv_heads', 'method'
  ).items():
    values = {(r['layer'], r['what']): r['similarity'] for r in cells}
    key = heads, tuple(sorted(values.items()))
    name = f'to {axes_lib.count(heads)}'
    name = f'{model.replace(" (", chr(10) + "(")}\n{name}' if several else name
    panels.setdefault(key, (name, values, {}))[2][method] = None
  if not panels:
    return None
  panels = list(panels.values())[: 2 * axes_lib.PANELS]
  layers = max(len({layer for layer, _ in v}) for _, v, _ in panels)
  figure, axes = axes_lib.make(len(panels), 2.0 + 0.13 * layers, 4)
  for axis, (name, values, methods) in zip(axes, panels, strict=True):
    image = _heat_map(axis, values)
    title = '\n'.join(list(methods)[:3])
    more = f', {len(methods) - 3} more' if len(methods) > 3 else ''
    axis.set_title(f'{name}\n{title}{more}', fontsize=7.5)
  figure.colorbar(image, ax=axes, label='cosine', shrink=0.8)
  return figure


def _heat_map(axis, values):
  columns = list(dict.fromkeys(what for _, what in values))
  lines = sorted({layer for layer, _ in values})
  grid = [[values.get((n, what), math.nan) for what in columns] for n in lines]
  image = axis.pcolormesh(
    range(len(columns) + 1),
    [line - 0.5 for line in (*lines, lines[-1] + 1)],
    grid,
    vmin=0,
    vmax=1,
    cmap='cividis',
    linewidth=0,
  )
  if len(lines) <= 16:
    for y, line in zip(lines, grid, strict=True):
      for x, value in enumerate(line):
        if math.isfinite(value):
          axis.text(
            x + 0.5,
            y,
            f'{value:.2f}',
            ha='center',
            va='center',
            fontsize=6.5,
            color='#ffffff' if value < 0.55 else '#000000',
          )
  axis.invert_yaxis()
  axis.grid(False)
  axis.set_xticks(
    [i + 0.5 for i in range(len(columns))],
    [c.replace(', ', '\n') for c in columns],
    rotation=90,
  )
  axis.set_ylabel('layer')
  axis.yaxis.get_major_locator().set_params(integer=True)
  return image
