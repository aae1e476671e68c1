"""How a training is spread over devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from svflow.sharding import DATA, auto, on_mesh, place, shard_batch


def spread(
    mesh: Mesh | None, seeds: int, batch: int
) -> tuple[Callable[[Any], Any], contextlib.AbstractContextManager]:
    """What puts a tree of arrays, seeds first, on the devices, and a context to train in.

    The axis `data` of the mesh takes the seeds where they divide by it; otherwise the arrays are
    whole on every device, and in the context `svflow.sharding.over_data` splits batches over it.

    Raises:
        ValueError: where neither divides, or what is no mesh with an axis `data`.
    """
    if mesh is None:
        return (lambda tree: tree), contextlib.nullcontext()
    mesh = auto(mesh)
    count = mesh.shape.get(DATA, 1)
    if seeds % count == 0:
        return functools.partial(shard_batch, mesh=mesh), contextlib.nullcontext()
    if batch % count:
        raise ValueError(
            f"neither {seeds} seeds nor batches of {batch} divide by the mesh's {count} along "
            "'data'"
        )
    whole = NamedSharding(mesh, PartitionSpec())

    def put(tree):
        return jax.tree.map(lambda leaf: place(leaf, whole), tree)

    return put, on_mesh(mesh)
