"""The linear maps of an attention transformer: dense arrays, or routing, which copies columns.

Axes: `layers`; `heads`; `width`, the state; `out`, what a map reads from it; `tokens`; `live`, the
columns that a layer writes.

A map is an `nnx.Param` ([layers,] heads, width, out), or a `Routing` of as many columns. Without a
layer axis all layers share it. Everything that tells the two apart is in this file.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

SLICES = 64
"""The most runs of successive columns that are copied as slices."""


class Routing:
    """A matrix of zeros and ones with at most a single one in each column: y[:, c] = x[:, s_c].

    It is applied as a gather, never as a matrix product, and it is static: a routing belongs to a
    program as its shapes do, and is no array that transforms see.

    Arguments:
        sources: (..., out) integers, the column s_c that column c copies; -1 for a column of zeros.
        width: how many columns there are to copy from.

    Raises:
        ValueError: sources that are not integers within -1 .. width - 1, or none.
    """

    __slots__ = ("_hash", "sources", "width")

    def __init__(self, sources: Any, width: int):
        given = np.asarray(sources)
        if not np.issubdtype(given.dtype, np.integer) or given.ndim < 1 or not given.size:
            raise ValueError(
                f"a routing's sources must be integers, got {given.dtype} {given.shape}"
            )
        if given.min() < -1 or given.max() >= width:
            bad = given.min() if given.min() < -1 else given.max()
            raise ValueError(f"source {bad} is not a column of {width}, nor -1 for zeros")
        self.sources = np.array(given, np.int32)
        self.sources.flags.writeable = False
        self.width = int(width)
        self._hash = hash((self.sources.shape, self.sources.tobytes(), self.width))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices: (..., width, out)."""
        *lead, out = self.sources.shape
        return (*lead, self.width, out)

    @property
    def ndim(self) -> int:
        """The axes of the matrices that this stands for: those of the sources, and one more."""
        return self.sources.ndim + 1

    def dense(self, dtype) -> Float[np.ndarray, "*lead width out"]:
        """The matrices themselves."""
        columns = np.arange(self.width, dtype=np.int32)[:, None]
        return (columns == self.sources[..., None, :]).astype(dtype)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Routing)
            and self._hash == other._hash
            and self.width == other.width
            and np.array_equal(self.sources, other.sources)
        )

    def __reduce__(self):
        return Routing, (self.sources, self.width)

    def __repr__(self) -> str:
        return f"Routing{self.shape}"


Map = nnx.Param | Routing


def gather(x: Float[Array, "rows width"], sources: np.ndarray) -> Float[Array, "rows out"]:
    """The columns `sources` of x, zeros for -1."""
    if not len(sources):  # of a layer that writes no column
        return x[:, :0]
    # Slices, where there are few: their derivative is a pad, that of a gather is a scatter.
    pieces = runs(sources)
    if len(pieces) <= SLICES:
        parts = [
            jnp.zeros((x.shape[0], size), x.dtype) if start < 0 else x[:, start : start + size]
            for start, size in pieces
        ]
        return jnp.concatenate(parts, axis=1)
    # JAX would wrap -1 around to the last column.
    places = np.where(sources < 0, x.shape[1], sources)
    return x.at[:, places].get(mode="fill", fill_value=0)


def runs(sources: np.ndarray) -> list[tuple[int, int]]:
    """(first source, how many): the runs of successive sources; a first source of -1 is zeros."""
    inside = np.where(sources[:-1] < 0, sources[1:] < 0, sources[1:] == sources[:-1] + 1)
    first = np.flatnonzero(np.concatenate([[True], ~inside]))
    sizes = np.diff(first, append=len(sources))
    return [(int(sources[place]), int(size)) for place, size in zip(first, sizes)]


def at_layer(kernel: Map, layer, base: int = 3) -> Any:
    """The matrices of one layer, an array; or their sources, of a routing.

    `base`: how many axes the map has without that of the layers.
    """
    values = kernel.sources if isinstance(kernel, Routing) else kernel[...]
    return values[layer] if kernel.ndim > base else values


def matrices(kernel: Map, layer: int = 0, base: int = 3) -> Float[np.ndarray, ...]:
    """`at_layer` in float64, with routings written out."""
    values = at_layer(kernel, layer, base)
    if isinstance(kernel, Routing):
        return Routing(values, kernel.width).dense(np.float64)
    return np.asarray(values).astype(np.float64)


def read(kernel: Map, layer, x: Float[Array, "tokens width"]) -> Float[Array, "tokens heads out"]:
    """x R for every head: queries or keys."""
    here = at_layer(kernel, layer)
    if isinstance(kernel, Routing):
        return gather(x, here.reshape(-1)).reshape(x.shape[0], *here.shape)
    heads, width, out = here.shape
    merged = here.transpose(1, 0, 2).reshape(width, heads * out)  # one product for all heads
    return (x @ merged).reshape(-1, heads, out)


class Live(NamedTuple):
    """The columns that a routed layer writes; all others of its update are zero.

    Arguments:
        to: (live,) their places.
        sources: (heads, live) what each head's attention is applied to; -1 for nothing.
    """

    to: np.ndarray
    sources: np.ndarray


@functools.lru_cache(maxsize=64)
def routed_columns(value: Routing) -> tuple[Live, ...]:
    """What each layer routes, of any state; a single entry for layers that share their maps."""
    found = []
    for sources in value.sources.reshape(-1, *value.sources.shape[-2:]):
        written = np.any(sources >= 0, axis=0)
        found.append(Live(np.flatnonzero(written), sources[:, written]))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def live_columns(value: Routing, depth: int, residual: bool) -> tuple[Live, ...]:
    """Where the states after each of the layers 0, 1, ... can be other than zero, from any start.

    A routing without a layer axis wears out over depth all the same: in a looped machine what has
    been read is shifted out. It holds for whole layers in order, which a velocity knows nothing of.
    """
    found = []
    alive: np.ndarray = np.ones(value.width, bool)
    for layer in range(depth):
        sources = at_layer(value, layer)
        sources = np.where((sources >= 0) & alive[sources], sources, -1)
        written = np.any(sources >= 0, axis=0)
        found.append(Live(np.flatnonzero(written), sources[:, written]))
        alive = alive | written if residual else written
    return tuple(found)


def sources_of(
    value: Map, layer, x: Float[Array, "tokens width"]
) -> Float[Array, "heads tokens live"]:
    """x R_V of every head."""
    if isinstance(value, Routing):
        columns = routed_columns(value)[layer if value.ndim == 4 else 0].sources
        stack = gather(x, columns.reshape(-1)).reshape(x.shape[0], *columns.shape)
    else:
        here = at_layer(value, layer)
        stack = jnp.einsum("tm,hmn->thn", x, here)
    return stack.transpose(1, 0, 2)


def spread(value: Map, layer, mixed: Float[Array, "tokens live"]) -> Float[Array, "tokens width"]:
    """The columns that a layer wrote, in their places among zeros."""
    if not isinstance(value, Routing):
        return mixed
    to = routed_columns(value)[layer if value.ndim == 4 else 0].to
    back = np.full(value.width, -1)
    back[to] = np.arange(len(to))
    return gather(mixed, back)
