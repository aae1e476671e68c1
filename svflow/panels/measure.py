"""What panels have in common: how a measure is titled, and how numbers and tables are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Column = tuple[str, str, list[float | None]]
"""Of a table: a measure's short name, a line's, and a value per row."""


class Measure(NamedTuple):
    """How a measure is titled, labelled and explained; `formula` and `meaning` are HTML."""

    title: str
    unit: str
    label: str
    short: str
    formula: str
    meaning: str
    source: str


def numbers(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def number(value: float | None) -> str:
    """Four significant digits in at most seven characters; a dot where there is no value.

    A count, which is an int, has all its digits.
    """
    if value is None:
        return "·"
    if isinstance(value, int):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 0.001 or size >= 9999.5):
        short = [f"{m}e{int(e)}" for m, e in (f"{value:.{n}e}".split("e") for n in (1, 0))]
        return short[0] if len(short[0]) <= 7 else short[1]
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:.{digits}f}"


def ranged(least: float, median: float, largest: float) -> str:
    """A median and, of more than one value, the range around it."""
    span = f" ({number(least)}\N{EN DASH}{number(largest)})" if largest > least else ""
    return f"{number(median if math.isfinite(median) else None)}{span}"


def over_draws(values: Sequence[Sequence[float | None]]) -> np.ndarray:
    """(3, layers) of lists over draws: the least, the median and the largest; nan for a null."""
    drawn = np.array(values, float)
    return np.stack([drawn.min(0), np.median(drawn, 0), drawn.max(0)])


def rows_of(found, names: Sequence[str]) -> list[str]:
    top, under = [f"{'layer':>5}"], [f"{'':>5}"]
    previous = None
    for measure, line, _ in found:
        top.append(f"{measure if measure != previous else '':>7}")
        under.append(f"{line[:7]:>7}")
        previous = measure
    rows = [" ".join(top), " ".join(under)]
    rows.append("─" * len(rows[0]))
    for place, name in enumerate(names):
        rows.append(" ".join([f"{name:>5}", *(f"{number(v[place]):>7}" for *_, v in found)]))
    return rows
