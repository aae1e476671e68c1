"""The signed graph of correlations between residual coordinates.

Axes: `states`, of all tokens of all samples; `nodes`, the residual coordinates, d in formulas;
`edges`, each pair of nodes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int
from scipy.linalg import blas

from svflow.integers import is_integer
from svflow.memory import check_memory

BLOCK = 1024
"""States at a time: the d x d sums are then read and written once per so many outer products."""

LEAST = np.finfo(np.float64).tiny / np.finfo(np.float64).eps
"""About 1e-292: below it products of deviations are denormal, and lose digits."""


class Correlation(NamedTuple):
    """Pearson's correlations of the coordinates.

    Arguments:
        matrix: (nodes, nodes) r, symmetric; 0 in the rows and columns of constant coordinates,
            which are those whose squared deviations sum to less than `LEAST`.
        variance: (nodes,) over the states, divided by their number.
        states: how many there were.
    """

    matrix: Float[np.ndarray, "nodes nodes"]
    variance: Float[np.ndarray, " nodes"]
    states: int


class Graph(NamedTuple):
    """A signed undirected graph without loops.

    Arguments:
        edges: (edges, 2) pairs i < j, each once, in lexicographic order.
        weights: (edges,) signed, none of them zero.
        variance: (nodes,) of the coordinates.
        states: how many states the weights are estimated from.
    """

    edges: Int[np.ndarray, "edges 2"]
    weights: Float[np.ndarray, " edges"]
    variance: Float[np.ndarray, " nodes"]
    states: int

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.variance)

    @property
    def isolated(self) -> np.ndarray:
        """(nodes,) whether a node has no edge, as constant coordinates have none."""
        return np.bincount(self.edges.ravel(), minlength=self.nodes) == 0


@dataclass
class Moments:
    """Mean and scatter sum (x - mean)(x - mean)^T of states that come in parts, in float64.

    Each part is centred by itself and joined with what was there by

        S = S_a + S_b + (n_a n_b / (n_a + n_b)) delta delta^T,   delta = mean_b - mean_a,

    as one symmetric product with delta as a further row. All is measured from the first state: a
    constant coordinate is then exactly zero, and one that hardly moves keeps its digits.

    Source: Chan, Golub and LeVeque, The American Statistician 37, 1983.
    """

    count: int
    first: np.ndarray
    mean: np.ndarray
    scatter: np.ndarray
    """(nodes, nodes), in Fortran's order; only the upper triangle is used."""

    @classmethod
    def none(cls, width: int) -> Moments:
        """Of no states."""
        check_width(width)
        return cls(0, np.zeros(width), np.zeros(width), np.zeros((width, width), order="F"))

    def add(self, states: Float[ArrayLike, "states nodes"]) -> None:
        """Joins further states, at least one."""
        rows = np.asarray(states)
        if self.count == 0:
            self.first = rows[0].astype(np.float64)
        count = len(rows)
        part = np.empty((count + 1, rows.shape[1]))
        total = self.count + count
        with np.errstate(over="ignore", invalid="ignore"):  # `correlation` refuses such sums
            np.subtract(rows, self.first, out=part[:count], dtype=np.float64, casting="unsafe")
            mean = part[:count].mean(axis=0)
            part[:count] -= mean
            part[count] = (mean - self.mean) * np.sqrt(self.count / total * count)
        self.mean += (mean - self.mean) * (count / total)
        self.scatter = blas.dsyrk(1.0, part.T, beta=1.0, c=self.scatter, overwrite_c=1)
        self.count = total

    def correlation(self) -> Correlation:
        """Raises ValueError for fewer than two states, or sums that overflowed."""
        if self.count < 2:
            raise ValueError(f"correlations need at least two states, got {self.count}")
        squares = np.diagonal(self.scatter).copy()
        if not np.isfinite(squares).all():
            raise ValueError("squares of the activations overflow")
        inverse = np.zeros_like(squares)
        moving = squares >= LEAST
        np.divide(1, np.sqrt(squares), out=inverse, where=moving)
        r = np.triu(self.scatter, 1)
        r *= inverse
        r *= inverse[:, None]
        np.clip(r, -1, 1, out=r)
        r += r.T  # scaled before, so that both halves are rounded alike
        np.fill_diagonal(r, moving)
        return Correlation(r, squares / self.count, self.count)


def check_width(width: int) -> None:
    """Raises MemoryError where the d x d sums, and what is made of them, do not fit."""
    check_memory(f"correlations of {width} coordinates", 4 * 8 * width * width, None)


def correlation(
    activations: Float[ArrayLike, "states nodes"] | Iterable[Float[ArrayLike, "states nodes"]],
) -> Correlation:
    """Pearson's correlations of coordinates over states, in float64, one pass, in blocks.

    The result is the same to the last bit however the states are cut into chunks.

    Arguments:
        activations: an array (states, nodes), or an iterable of such chunks, of any lengths.

    Raises:
        ValueError: fewer states than two, chunks of different widths or that are no real numbers,
            or what is not finite, with the chunk's number.
        MemoryError: d x d sums that do not fit.
    """
    moments = None
    for block in _blocks(activations):
        if moments is None:
            moments = Moments.none(block.shape[1])
        moments.add(block)
    if moments is None:
        raise ValueError("correlations need at least two states, got none")
    return moments.correlation()


def graph(
    activations: Correlation
    | Float[ArrayLike, "states nodes"]
    | Iterable[Float[ArrayLike, "states nodes"]],
    k: int,
) -> Graph:
    """The k strongest correlations of every coordinate.

    An edge i - j is there where j is among the k largest |r_ij| of i, or i among those of j (the
    union: a node has k edges or more), with weight r_ij. Of equal |r| the lower coordinate comes
    first. A correlation that is exactly zero is no edge: a constant coordinate is isolated.

    Arguments:
        activations: as for `correlation`, or its result.
        k: from 1 to nodes - 1.

    Raises:
        ValueError: a k outside, and as `correlation`.

    Examples:
        >>> a, b = np.random.default_rng(0).normal(size=(2, 500))
        >>> found = graph(np.stack([a, b, -a, b + a / 2], axis=1), k=1)
        >>> found.edges.tolist(), found.weights.round(1).tolist()
        ([[0, 2], [1, 3]], [-1.0, 0.9])
    """
    found = activations if isinstance(activations, Correlation) else correlation(activations)
    nodes = len(found.variance)
    if nodes < 2:
        raise ValueError("a graph needs at least two coordinates, got 1")
    if not is_integer(k, 1, nodes - 1):
        raise ValueError(f"k must be one of 1 .. {nodes - 1} for {nodes} coordinates, got {k!r}")
    codes = []
    for start in range(0, nodes, BLOCK):
        size = np.abs(found.matrix[start : start + BLOCK])
        i, j = np.nonzero(_largest(size, start, int(k)))
        i = i + start
        codes.append(np.minimum(i, j) * nodes + np.maximum(i, j))
    i, j = np.divmod(np.unique(np.concatenate(codes)), nodes)
    return Graph(np.stack([i, j], axis=1), found.matrix[i, j], found.variance, found.states)


def _largest(size: np.ndarray, start: int, k: int) -> np.ndarray:
    """Where the k largest of each row are, those that are zero and the diagonal left out."""
    size[np.arange(len(size)), start + np.arange(len(size))] = 0
    bound = np.partition(size, -k, axis=1)[:, -k, None]
    above, equal = size > bound, size == bound
    room = k - above.sum(axis=1, keepdims=True)
    return (above | (equal & (np.cumsum(equal, axis=1) <= room))) & (size > 0)


def _blocks(activations) -> Iterator[np.ndarray]:
    """Checked chunks as float64 blocks of BLOCK states, the last of fewer."""
    whole = hasattr(activations, "shape")
    if not whole and not isinstance(activations, Iterable):
        raise ValueError(
            "activations must be an array (states, coordinates) or an iterable of such chunks, got "
            f"{type(activations).__name__}"
        )
    chunks: Iterable[Any] = [activations] if whole else activations
    buffer, filled = np.empty((0, 0)), 0
    for number, chunk in enumerate(chunks):
        name = "activations" if whole else f"chunk {number}"
        array = _checked(chunk, name)
        if not buffer.size:
            check_width(array.shape[1])
            buffer = np.empty((BLOCK, array.shape[1]))
        if array.shape[1] != buffer.shape[1]:
            raise ValueError(f"{name} has {array.shape[1]} coordinates, not {buffer.shape[1]}")
        for start in range(0, len(array), BLOCK):  # checked in parts: no copy of the whole
            if not np.isfinite(array[start : start + BLOCK].astype(np.float64)).all():
                raise ValueError(f"{name} is not finite")
        start = 0
        while start < len(array):
            taken = min(BLOCK - filled, len(array) - start)
            buffer[filled : filled + taken] = array[start : start + taken]
            filled, start = filled + taken, start + taken
            if filled == BLOCK:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _checked(chunk: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(chunk)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} must have shape (states, coordinates): {error}") from error
    dtype: Any = array.dtype
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"{name} must have shape (states, coordinates), got {array.shape}")
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(f"{name} must be real numbers, got {dtype}")
    return array
