"""Models, batches and Jacobians on more than one device.

    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = sv.shard(sv.load(source), mesh)      # or sv.load(source, mesh=mesh): reads slices only
    path = sv.simulate(model.flow, model.embed(ids))
    Js = sv.layer_jacobians(model.flow, path.xs)  # columns over `data`
    ids = sv.sharding.shard_batch(ids, mesh)      # sequences over `data`
    logits = jax.jit(jax.vmap(type(model).__call__, in_axes=(None, 0)))(model, ids)

A mesh has an axis `model`, over which weights are split, or `data`, over which batches, Jacobian
columns or the tokens of a `PowerFlow` are, or both. The functions are those of one device: arrays
carry shardings (`jax.sharding.NamedSharding`), and XLA's partitioner does the rest.

`RULES` is the one table. The first matrices of attention and feed-forward layers are split by
their outputs (whole heads; hidden units), the second ones by their inputs, so that a layer takes
two sums over `model` of (tokens, width) and no weight travels; tables of tokens are split by their
rows (M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053). Where heads, or a vocabulary, do not
divide by the axis, the matrix is split along its other side, which costs one more sum; where no
side divides, it is whole on every device. A mixture's experts are split like feed-forward layers,
each over all devices. Norms, biases of second matrices, routers and small tables are whole.

More than one host: every process runs the same program, and begins with

    jax.distributed.initialize("host0:1234", num_processes=2, process_id=rank)

(without arguments under Slurm, on TPU pods and the like). `jax.devices()` is then every host's,
and so is a mesh of it; `sv.load(source, mesh=mesh)` on each host reads what its own devices hold.
On CPUs, which need a library to talk, first
`jax.config.update("jax_cpu_collectives_implementation", "gloo")`. Inputs such as token ids are the
same on every process; `gathered` makes a NumPy array of what is spread over hosts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from svflow.flow import Flow

DATA, MODEL = "data", "model"

_T = TypeVar("_T")


class Side(NamedTuple):
    """An axis of a parameter that may be split over `model`.

    Arguments:
        axis: counted from the end.
        units: the field of `TransformerConfig` that counts what has to stay whole on it, "heads"
            or "kv_heads"; None: every index stands alone.
    """

    axis: int
    units: str | None = None


Choices = tuple[Side, ...]

RULES: Mapping[str, Choices] = {
    # A transformer's, under any prefix.
    r"(.*\.)?attention\.query\.kernel": (Side(-1, "heads"), Side(-2)),
    r"(.*\.)?attention\.(key|value)\.kernel": (Side(-1, "kv_heads"), Side(-2)),
    r"(.*\.)?attention\.query\.bias": (Side(-1, "heads"),),
    r"(.*\.)?attention\.(key|value)\.bias": (Side(-1, "kv_heads"),),
    r"(.*\.)?attention\.output\.kernel": (Side(-2, "heads"), Side(-1)),
    r"(.*\.)?(feed_forward|experts)\.(gate|up)\.kernel": (Side(-1), Side(-2)),
    r"(.*\.)?(feed_forward|experts)\.(gate|up)\.bias": (Side(-1),),
    r"(.*\.)?(feed_forward|experts)\.down\.kernel": (Side(-2), Side(-1)),
    r"embedding\.tokens|head\.kernel": (Side(-2), Side(-1)),
    r"head\.bias": (Side(-1),),
    # Arrays (..., heads, width, head): `PowerFlow`, `universal.AttentionTransformer`.
    r"query|key|value|output": (Side(-3),),
}
"""Path of a parameter -> the sides along which it may be split over `model`; the first that
divides is. What no pattern matches is whole on every device."""


def partition(
    path: str, shape: tuple[int, ...], config: Any, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """How one parameter is split, by `RULES`.

    Arguments:
        path: such as "flow.layers.attention.query.kernel".
        shape: of the parameter.
        config: the model's `TransformerConfig`; None where nothing counts units.
        mesh: with an axis `model` or without.
    """
    count = mesh.shape.get(MODEL, 1)
    choices: Choices = next((c for rule, c in RULES.items() if re.fullmatch(rule, path)), ())
    for side in choices if count > 1 else ():
        if len(shape) + side.axis < 0:
            continue
        units = getattr(config, side.units, 1) if side.units else shape[side.axis]
        if units % count == 0:
            spec: list[str | None] = [None] * len(shape)
            spec[side.axis] = MODEL
            return PartitionSpec(*spec)
    return PartitionSpec()


def shardings(model: _T, mesh: Mesh | AbstractMesh) -> _T:
    """A tree like the model of the `NamedSharding` of every parameter.

    Arguments:
        model: a `Transformer`, its flow or another `Flow`; of arrays or of their shapes
            (`jax.eval_shape`).
        mesh: with axes `data`, `model` or both.

    Raises:
        ValueError: another kind of model or mesh.
    """
    mesh = checked(mesh)
    if not (isinstance(model, Flow) or isinstance(getattr(model, "flow", None), Flow)):
        raise ValueError(f"shard takes a Transformer or a Flow, got {type(model).__name__}")
    config = getattr(model, "config", None)

    def one(path, leaf):
        return NamedSharding(mesh, partition(path_name(path), leaf.shape, config, mesh))

    return jax.tree_util.tree_map_with_path(one, model)


def shard(model: _T, mesh: Mesh) -> _T:
    """The model with its weights split over the axis `model` of a mesh, by `RULES`.

    Every function takes it as it takes the model on one device, and gives the same values to
    rounding. With an axis `data`, `jacobian` and `layer_jacobians` split their columns over it,
    and a `PowerFlow` its tokens where they divide. On several hosts the weights given are
    the same on each; `sv.load(source, mesh=mesh)` never has the whole on one.

    Arguments:
        model: a `Transformer`, its flow or another `Flow`, of any family.
        mesh: of `jax.make_mesh`, with axes `data`, `model` or both.

    Raises:
        ValueError: another kind of model or mesh.
    """
    mesh = auto(mesh)
    placed = jax.tree.map(place, model, shardings(model, mesh))
    # Of flows whose class says that it has none yet; a user's own `mesh` may be anything.
    if isinstance(placed, Flow) and getattr(type(placed), "mesh", mesh) is None:
        flow: Any = placed
        flow.mesh = mesh
    return placed


def shard_batch(tree: _T, mesh: Mesh) -> _T:
    """Arrays with their first axis split over the axis `data` of a mesh.

    Raises:
        ValueError: a first axis that does not divide by `data`, or a mesh without it.
    """
    mesh = auto(mesh)
    if DATA not in mesh.shape:
        raise ValueError(f"a batch needs a mesh with an axis 'data', got {mesh.axis_names}")
    count = mesh.shape[DATA]

    def one(leaf):
        shape = np.shape(leaf)
        if not shape or shape[0] % count:
            raise ValueError(
                f"a batch of shape {shape} does not divide by the mesh's {count} along 'data'"
            )
        return place(leaf, NamedSharding(mesh, PartitionSpec(DATA)))

    return jax.tree.map(one, tree)


def checked(mesh: Any) -> Any:
    """The mesh; raises ValueError for what is none, or for axes that mean nothing here."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    unknown = [name for name in mesh.axis_names if name not in (DATA, MODEL)]
    if unknown or not mesh.axis_names:
        raise ValueError(
            f"a mesh has axes 'data' (batches, Jacobian columns, tokens) and 'model' (weights), "
            f"got {mesh.axis_names}"
        )
    return mesh


def auto(mesh: Any) -> Mesh:
    """The mesh with axes that XLA partitions by itself; `jax.make_mesh` makes others by default."""
    if not isinstance(checked(mesh), Mesh):
        raise ValueError("arrays need a mesh of devices, not an AbstractMesh")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array, the same on every process, with a sharding."""
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    known = np.asarray(leaf)
    return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])


def path_name(path) -> str:
    """A parameter's path in a module, such as "flow.layers.attention.query.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are on; None for one device, or within a transform."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None
        traced = isinstance(leaf, jax.core.Tracer)
        if not traced and isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """A context in which `over_data` splits over a mesh, if there is one."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def over_data(x: jax.Array) -> jax.Array:
    """The array with its first axis split over the axis `data` of the mesh around, if any.

    Of one that XLA partitions: in a user's `jax.set_mesh` of the explicit kind nothing is moved.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if mesh.shape.get(DATA, 1) == 1 or kinds[DATA] != AxisType.Auto:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(DATA)))


def gathered(x: Any) -> np.ndarray:
    """The whole of an array in NumPy, also where other hosts hold parts of it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def local_bytes(model: Any, mesh: Mesh | AbstractMesh) -> int:
    """How many bytes of a model's parameters one device of a mesh holds."""
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(shardings(model, mesh)))
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in leaves
    )
