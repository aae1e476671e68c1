r"""What a transformer reads from its input along every path of heads.

A path p = ((l_1, h_1), (l_2, h_2), ...) goes through one head of each layer, or, with a residual,
of any layers in ascending order. With V_p the product of its value matrices the state is

    X^l = sum_p P_p X V_p,   P_p = ... A^{l_2,h_2} A^{l_1,h_1},

so that all a transformer computes from X are the columns V_p W_Q, V_p W_K (paths that end before
the layer of the head that reads) and V_p W_U (paths through all layers), the P_p being attention
between those. A program E makes a machine read the same: E R_p R_Q = V_p W_Q, and so on.

Axes: `width`; `columns`, all of these side by side, in the order that `slots` gives.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423; the form as linear
equations is derived here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from universal.maps import Map, Routing, at_layer, matrices
from universal.transformer import AttentionTransformer


class Slot(NamedTuple):
    """What one path reads.

    Arguments:
        kind: "query", "key" or "output".
        layer, head: which read it; None for the output.
        path: the (layer, head) pairs before, in order.
    """

    kind: str
    layer: int | None
    head: int | None
    path: tuple[tuple[int, int], ...]


def slots(transformer: AttentionTransformer) -> list[Slot]:
    """Every path's query, key and output, breadth-first from the output."""
    found = [Slot("output", None, None, ())]
    heads = range(transformer.heads)
    for layer in reversed(range(transformer.depth)):
        longer = [s._replace(path=((layer, head), *s.path)) for head in heads for s in found]
        found = (found if transformer.residual else []) + longer
        found += [Slot(kind, layer, head, ()) for kind in ("query", "key") for head in heads]
    return found


def is_routed(transformer: AttentionTransformer) -> bool:
    """Whether all maps are `Routing`s."""
    return all(isinstance(kernel, Routing) for kernel in transformer.maps)


def path_sources(machine: AttentionTransformer) -> np.ndarray:
    """Of a machine of routings: the column of its state that each column is, -1 for none."""

    def of(kernel: Map, layer: int = 0, base: int = 3) -> np.ndarray:
        return at_layer(kernel, layer, base)

    def through(values: np.ndarray, found: np.ndarray) -> np.ndarray:
        return np.where(found < 0, -1, values[found])

    return _collect(machine, of, through, 1)


def path_columns(transformer: AttentionTransformer, query_factor: float = 1.0) -> np.ndarray:
    """The columns in float64, (width, columns), the queries times a factor.

    Each layer multiplies all columns found behind it by its value matrices; no V_p is formed.
    """
    return _collect(transformer, matrices, np.matmul, query_factor)


def _collect(
    transformer: AttentionTransformer,
    of: Callable[..., np.ndarray],
    through: Callable[[np.ndarray, np.ndarray], np.ndarray],
    query_factor: float,
) -> np.ndarray:
    """The columns in the order of `slots`; `through` carries those found over a head's values."""
    found = of(transformer.unembedding, base=2)
    for layer in reversed(range(transformer.depth)):
        longer = [through(values, found) for values in of(transformer.value, layer)]
        query, key = of(transformer.query, layer), of(transformer.key, layer)
        parts = [found] if transformer.residual else []
        found = np.concatenate([*parts, *longer, *(query_factor * query), *key], axis=-1)
    return found
