"""How plots look: for print, for dark screens, and without telling colours.

What differs differs in colour, in marker and in dashes. Colours are those of
Okabe and Ito (2008), which colour-blind readers tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

COLORS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#8A6D3B',
)
MARKERS = 'osD^vPX*<>'
DASHES = (
  'solid',
  (0, (5, 1.5)),
  (0, (1.2, 1.2)),
  (0, (5, 1.5, 1.2, 1.5)),
  (0, (8, 1.5)),
)
HATCHES = ('', '///', '...', 'xxx', '\\\\\\', '+++')
INK = '#1b1f24'  # text and axes; the page's own colour where it is inline
SETTINGS = {
  'axes.edgecolor': INK,
  'axes.grid': True,
  'axes.labelcolor': INK,
  'axes.labelsize': 9,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlecolor': INK,
  'axes.titlesize': 9.5,
  'figure.constrained_layout.use': True,
  'figure.dpi': 150,
  'font.family': 'DejaVu Sans',
  'font.size': 9,
  'grid.alpha': 0.3,
  'grid.linewidth': 0.6,
  'hatch.linewidth': 0.6,
  'legend.fontsize': 8,
  'legend.frameon': False,
  'lines.linewidth': 1.5,
  'lines.markersize': 5,
  'svg.fonttype': 'none',
  'text.color': INK,
  'xtick.color': INK,
  'xtick.labelsize': 8,
  'ytick.color': INK,
  'ytick.labelsize': 8,
}
_FONTS = "'DejaVu Sans', Verdana, sans-serif"


def styles(keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
  """Colour, marker and dashes for each of some keys, in their order."""
  return {
    key: {
      'color': COLORS[i % len(COLORS)],
      'marker': MARKERS[i % len(MARKERS)],
      'linestyle': DASHES[i % len(DASHES)],
    }
    for i, key in enumerate(dict.fromkeys(keys))
  }


def png(figure) -> bytes:
  """The figure on white."""
  file = io.BytesIO()
  figure.savefig(file, format='png', facecolor='white')
  return file.getvalue()


def svg(figure, key: str) -> str:
  """The figure as a file of its own, the same for the same figure."""
  import matplotlib

  file = io.StringIO()
  with matplotlib.rc_context({'svg.hashsalt': key}):
    figure.savefig(
      file, format='svg', metadata={'Date': None}, transparent=True
    )
  return file.getvalue().replace("'DejaVu Sans'", _FONTS)


def inline(svg: str, title: str) -> str:
  """An SVG file as a part of a page, in the colours of its text."""
  body = svg[svg.index('<svg') :]
  body = re.sub(r'<metadata>.*?</metadata>', '', body, flags=re.DOTALL)
  body = body.replace(INK, 'currentColor')
  body = re.sub(
    r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"',
    rf'<svg role="img" aria-label="{title}" style="max-width:\2pt" \1',
    body,
    count=1,
  )
  return body


def escape(text: str) -> str:
  """Text for HTML and for attributes in it."""
  return (
    str(text)
    .replace('&', '&amp;')
    .replace('<', '&lt;')
    .replace('>', '&gt;')
    .replace('"', '&quot;')
  )


def kept(style: Mapping[str, Any], *names: str) -> dict[str, Any]:
  """Some entries of a style."""
  return {name: style[name] for name in names}
