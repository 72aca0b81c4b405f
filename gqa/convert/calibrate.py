"""A text to convert by: its windows, what layers read of it, and its loss.

A text is a few windows of a token file, spread over it, in batches of one
shape. Sums over it are kept in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gqa import data, evaluate
from gqa import loss as loss_lib
from gqa import model as model_lib
from gqa.config import ModelConfig
from gqa.convert import layers
from gqa.convert.heads import Moments
from gqa.convert.layers import Batch, Place, Shape

_TARGETS = ('tokens', 'positions', 'segments', 'targets', 'weights')


@dataclasses.dataclass(frozen=True)
class Text:
  """Batches of windows to calibrate on, and others to measure the loss on."""

  calibration: Sequence[Batch]
  held_out: Sequence[Batch]
  source: data.TokenFile  # of `calibration`
  tokens: data.TokenFile  # of `held_out`


def open_text(
  tokens: data.TokenFile,
  seq_len: int,
  num_tokens: int,
  held_out_tokens: int,
  batch_size: int,
  held_out: data.TokenFile | None = None,
) -> Text:
  """Chooses windows of a token file.

  Without a file of its own the loss is measured on windows from the tail of
  the text, which are not calibrated on.

  Args:
    tokens: to calibrate on.
    seq_len: tokens of a window.
    num_tokens: to calibrate on, about; at most what there is.
    held_out_tokens: to measure the loss on, about.
    batch_size: windows in a batch, at most.
    held_out: another text to measure the loss on.
  """
  count = tokens.num_examples(seq_len)
  wanted = max(1, held_out_tokens // seq_len)
  tail = min(wanted, max(1, count // 4)) if held_out is None else 0
  if count - tail < 1:
    raise ValueError(
      f'the {tokens} are only {len(tokens)}, fewer than {1 + (tail > 0)} '
      f'windows of seq_len={seq_len} and a last target; use more text or a '
      'smaller --seq_len.'
    )
  last = np.arange(count - tail, count)
  other = tokens
  if held_out is not None:
    other = held_out
    last = _spread(wanted, max(1, held_out.num_examples(seq_len)))
  chosen = _spread(max(1, num_tokens // seq_len), count - tail)
  size = min(batch_size, len(chosen))
  return Text(
    calibration=_batches(tokens, chosen, seq_len, size),
    held_out=_batches(other, last, seq_len, size, whole=True),
    source=tokens,
    tokens=other,
  )


def _spread(wanted, count):
  """So many of the numbers below count, or all, at even distances."""
  wanted = min(wanted, count)
  return np.arange(wanted) * count // wanted


def _batches(tokens, index, seq_len, size, whole=False):
  """Batches of `size` windows; what does not fill one is dropped, or padded."""
  if whole:
    beyond = np.full(-len(index) % size, tokens.num_examples(seq_len) + 1)
    index = np.concatenate([index, beyond])
  index = index[: len(index) // size * size].reshape(-1, size)
  return [data.windows(tokens, rows, seq_len) for rows in index]


def loss(
  config: ModelConfig,
  params: model_lib.Params,
  batches: Sequence[Batch],
  tokens: data.TokenFile,
) -> dict[str, float]:
  """What `evaluate.evaluate` gives, layer by layer.

  The layers' programs serve for this too, where a program of the whole model
  would have to be compiled for the parent and again for the converted one.
  """
  entered = [layers.enter(config, params, batch) for batch in batches]
  for i, heads in enumerate(config.kv_heads):
    shape = layers.shape_of(config, i, heads)
    layer = params[f'layer_{i}']
    for b, (x, place) in enumerate(entered):
      entered[b] = layers.through(shape, layer, x, place)[1], place
  outer, nll = layers.outer_params(params), []
  for (x, _), batch in zip(entered, batches, strict=True):
    # Row by row: the logits of a batch would be larger than all else here.
    for row in range(len(x)):
      part = {k: batch[k][row : row + 1] for k in _TARGETS}
      nll.append(_nll(layers.exact(config), outer, x[row : row + 1], **part))
  count = math.fsum(float(batch['weights'].sum()) for batch in batches)
  return evaluate.summarize(math.fsum(map(float, nll)), count, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _nll(config, params, x, tokens, positions, segments, targets, weights):
  features = layers.without_layers(
    config, params, tokens, positions, segments, lambda *_: (x, None)
  )
  _, nll = loss_lib.cross_entropy(
    features,
    model_lib.head_rows(config, params),
    targets,
    weights,
    softcap=config.logit_softcap,
  )
  return nll.sum()


@functools.partial(jax.jit, static_argnums=0)
def _input_sums(shape, params, x, place):
  h = layers.run(shape, params, x, place)[1]['inputs']
  h = h.astype(jnp.float32).reshape(-1, h.shape[-1])
  return h.sum(axis=0), h.T @ h


def moments(
  shape: Shape,
  params: model_lib.Params,
  stream: Sequence[jax.Array],
  places: Sequence[Place],
  turns: np.ndarray,
) -> Moments:
  """Moments of a layer's projection inputs, a last 1 included under biases.

  Args:
    shape: of the layer.
    params: of the layer.
    stream: before the layer, [B, T, D] for each batch.
    places: of each batch.
    turns: [P], see `Moments`.
  """
  mean = second = 0.0
  for x, place in zip(stream, places, strict=True):
    sums = jax.device_get(_input_sums(shape, params, x, place))
    mean = mean + sums[0].astype(np.float64)
    second = second + sums[1].astype(np.float64)
  count = sum(x.shape[0] * x.shape[1] for x in stream)
  return _with_bias(shape.config, mean / count, second / count, turns)


def moments_without_text(
  config: ModelConfig, params: model_lib.Params
) -> Moments:
  """Moments of a norm's output if its entries were independent.

  What is known of a layer's input without a text: unit variance times the
  norm's scale, and its bias.
  """
  mean, scale = np.zeros(config.embed_dim), np.ones(config.embed_dim)
  if 'attention_norm' in params:
    norm = params['attention_norm']
    scale = np.asarray(norm['scale'], np.float64) + config.norm_offset
    if 'bias' in norm:
      mean = np.asarray(norm['bias'], np.float64)
  second = np.diag(scale**2) + np.outer(mean, mean)
  # How far a model attends is not known: every plane turns all the way.
  turns = np.full(config.rope_dim // 2, np.inf)
  return _with_bias(config, mean, second, turns)


def _with_bias(
  config: ModelConfig, mean: np.ndarray, second: np.ndarray, turns: np.ndarray
) -> Moments:
  """Moments of inputs [D], and of a last one that is 1 under biases."""
  if config.qkv_bias:
    second = np.block([[second, mean[:, None]], [mean[None], np.ones((1, 1))]])
    mean = np.append(mean, 1.0)
  return Moments(mean, second, turns)
