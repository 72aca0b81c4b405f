"""A table: rows of numbers, and how they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gqa import tables

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows with numbers as they were read, and columns of them in words.

  Attributes:
    key: such as 'T1'; names its files.
    columns: head and text of a row, for each.
    rows: those of the CSV file.
    needs: what it would take to have rows.
    note: what a reader should know.
  """

  key: str
  title: str
  columns: Sequence[tuple[str, Callable[[Row], str]]]
  rows: Sequence[Row]
  needs: str = ''
  note: str = ''

  @property
  def head(self) -> list[str]:
    """Of the columns."""
    return [name for name, _ in self.columns]

  @property
  def cells(self) -> list[list[str]]:
    """Of the rows, as they read."""
    return [[text(row) for _, text in self.columns] for row in self.rows]

  def csv(self) -> str:
    """All fields of the rows."""
    return tables.csv_text(self.rows)


def number(name: str, form: str, scale: float = 1) -> Callable[[Row], str]:
  """Text of a number, or a dash."""

  def text(row):
    value = row.get(name)
    return '-' if value is None else format(value * scale, form)

  return text


def spread(name: str, sd: str) -> Callable[[Row], str]:
  """Text of a mean and its standard deviation."""

  def text(row):
    if row.get(name) is None:
      return '-'
    more = '' if row.get(sd) is None else f' \u00b1 {row[sd]:.3f}'
    return f'{row[name]:.3f}{more}'

  return text


loss_text = spread('loss', 'loss_sd')
