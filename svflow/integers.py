"""Numbers that count something, or name a place."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether it is an integer of Python or NumPy within these bounds; truth values are none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(least <= value <= most)


def positive(name: str, value: Any) -> int:
    """The value as an int; ValueError unless it is a positive integer."""
    if not is_integer(value, 1):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)
