"""Checkpoints to models and back."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from svflow.memory import check_memory
from svflow.models.checkpoint import (
    WEIGHT_DTYPES,
    Checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from svflow.models.config import TransformerConfig
from svflow.models.families import family_of
from svflow.models.families.base import Family, Rule
from svflow.models.slices import read_part
from svflow.models.transformer import Transformer
from svflow.sharding import auto, local_bytes, path_name, shardings

# An architecture of this name promises a head, so a file without one is broken.
PROMISES_HEAD = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining")


class Opened(NamedTuple):
    """A checkpoint that was checked, before its weights are read.

    Arguments:
        checkpoint: the files.
        config: the model's.
        dtype: of the parameters.
        shapes: of every parameter, by path, in the order of `treedef`.
        treedef: of the `Transformer`.
        plan: which tensor (by its name in the file) goes where: the rule that splits it, and the
            leading indices of the parameters that it fills.
    """

    checkpoint: Checkpoint
    config: TransformerConfig
    dtype: np.dtype
    shapes: dict[str, jax.ShapeDtypeStruct]
    treedef: Any
    plan: list[tuple[str, Rule, tuple[int, ...]]]


def load(source: str | os.PathLike, *, dtype=jnp.float32, mesh: Mesh | None = None) -> Transformer:
    """A model from a checkpoint.

    Arguments:
        source: a folder with config.json and safetensors (single or sharded), or with
            pytorch_model.bin where torch is installed; a .gguf file; or a Hugging Face hub id.
        dtype: of the parameters; float32, float64 (with jax_enable_x64), bfloat16 or float16.
            A conversion to a wider type is exact.
        mesh: of `jax.make_mesh`; the weights are then split as `svflow.shard` splits them, and
            every host reads only what its devices hold (`svflow.models.slices`: from safetensors).

    Every tensor of the file is used exactly once. Tensors are read one at a time.

    Raises:
        FileNotFoundError: a path, config or shard that is missing.
        ValueError: an unknown architecture, a config key that changes the result and is not
            handled, or a tensor that is missing, unused, of the wrong shape, unreadable or beyond
            the range of `dtype`; a mesh with other axes than `data` and `model`.
        MemoryError: weights that do not fit; `svflow.stream` reads them a layer at a time.

    Examples:
        >>> import svflow as sv
        >>> model = sv.load(sv.data.default_model_path())
        >>> model.config.family, model.flow.depth, model.flow.width
        ('gpt2', 8, 128)
    """
    found = opened(source, dtype)
    _, _, dtype, shapes, treedef, plan = found
    mesh = None if mesh is None else auto(mesh)
    abstract = jax.tree.unflatten(treedef, shapes.values())
    if mesh is None:
        size = parameter_bytes(shapes.values())
    else:
        own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        shared = any(d.platform == "cpu" for d in own)  # one memory for all of them
        size = local_bytes(abstract, mesh) * (len(own) if shared else 1)
    check_memory("the weights", size, jnp.zeros(()))
    if mesh is not None:
        return _load_sliced(found, shardings(abstract, mesh))
    leaves: dict[str, jax.Array] = {}
    for name, rule, index in plan:
        for path, part in parts_of(found, name, rule):
            value = jnp.asarray(part)
            if index:
                if path not in leaves:
                    leaves[path] = jnp.zeros(shapes[path].shape, dtype)
                value = _put(leaves[path], value, *index)
            # One tensor at a time: the next is not read before this one is in its place.
            leaves[path] = value.block_until_ready()
    return jax.tree.unflatten(treedef, [leaves[path] for path in shapes])


def parts_of(found: Opened, name: str, rule: Rule) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters that one tensor of the file fills, by path, each in the model's type."""
    parts = rule.split(found.checkpoint.read(name), found.config)
    for path, part in zip(rule.ours, parts):
        yield path, narrowed(np.asarray(part), found.dtype, name)


def opened(source: str | os.PathLike, dtype) -> Opened:
    """Opens a checkpoint and makes every complaint about it that reading does not take.

    Raises what `load` raises.
    """
    given = dtype
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in WEIGHT_DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(WEIGHT_DTYPES.values())}, got {given!r}")
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    checkpoint = open_checkpoint(source)
    family = family_of(checkpoint.config)
    names = _canonical_names(checkpoint, family)
    promised = any(
        str(name).endswith(PROMISES_HEAD) for name in checkpoint.config.get("architectures") or ()
    )
    has_head = promised or any(_matches(name, family.head) for name in names)
    config = family.config(checkpoint.config)
    if not has_head and (config.head == "masked" or not config.tied):
        config = family.config(checkpoint.config, has_head=False)
    shapes, treedef = _parameters(config, dtype)
    plan = _plan(family, config, shapes, names, checkpoint)
    return Opened(checkpoint, config, dtype, shapes, treedef, plan)


def parameter_bytes(shapes: Iterable[jax.ShapeDtypeStruct]) -> int:
    """How many bytes parameters take."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)


def _load_sliced(found: Opened, layout: Transformer) -> Transformer:
    """The model with shardings like `layout`, of which every host reads its own slices."""
    sources: dict[str, list[tuple[str, Rule, int, tuple[int, ...]]]] = {}
    for name, rule, index in found.plan:
        for place, path in enumerate(rule.ours):
            sources.setdefault(path, []).append((name, rule, place, index))

    def one(path: str, sharding) -> jax.Array:
        shape = found.shapes[path].shape

        @functools.cache  # devices that hold the same slices ask one after another
        def block(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
            out = np.empty([stop - start for start, stop in bounds], found.dtype)
            for name, rule, place, index in sources[path]:
                rest = bounds[len(index) :]
                if not all(a <= i < b for i, (a, b) in zip(index, bounds)):
                    continue
                inner = tuple(slice(start, stop) for start, stop in rest)

                def part(tensor, rule=rule, place=place, inner=inner):
                    return rule.split(tensor, found.config)[place][inner]

                value = narrowed(read_part(found.checkpoint, name, part), found.dtype, name)
                out[tuple(i - a for i, (a, _) in zip(index, bounds))] = value
            return out

        def shard(index):
            return block(tuple(s.indices(n)[:2] for s, n in zip(index, shape)))

        return jax.make_array_from_callback(shape, sharding, shard, dtype=found.dtype)

    leaves = [one(path, sharding) for path, sharding in zip(found.shapes, jax.tree.leaves(layout))]
    return jax.tree.unflatten(found.treedef, leaves)


def narrowed(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """A tensor in another type; raises ValueError for values beyond its range."""
    if np.can_cast(tensor.dtype, dtype):
        return tensor.astype(dtype)
    with np.errstate(over="ignore"):
        narrow = tensor.astype(dtype)
    if np.any(np.isinf(narrow) & np.isfinite(tensor)):
        raise ValueError(
            f"tensor {name!r} has values beyond the range of {dtype}; try a wider dtype"
        )
    return narrow


@jax.jit(donate_argnums=0)
def _put(stack, value, *index):
    return stack.at[index].set(value)


def save(model: Transformer, folder: str | os.PathLike) -> None:
    """Writes config.json and model.safetensors in the model's own family's Hugging Face format.

    Raises:
        ValueError: what is not a `Transformer` (a flow of its layers, for example), or one whose
            config no longer says what its Hugging Face config says.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"save needs a Transformer, got {type(model).__name__}")
    config = model.config
    family = family_of(config.hf)
    if family.config(config.hf, config.head is not None) != config:
        raise ValueError(
            "the model's config differs from the Hugging Face config it was made from; "
            "make it with TransformerConfig.from_hf"
        )
    leaves, _ = flatten(model)
    dtype = next(iter(leaves.values())).dtype
    drop = {"dtype", "torch_dtype"}
    if config.head is None:
        drop.add("architectures")  # which may promise a head
    hf = {key: value for key, value in config.hf.items() if key not in drop}
    write_checkpoint(folder, {**hf, "dtype": str(dtype)}, _tensors(family, config, leaves))


def _tensors(
    family: Family, config: TransformerConfig, leaves: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    for rule in family.rules:
        if _holds(rule, config, leaves):
            for name, index in _places(rule, family, config):
                parts = tuple(np.asarray(leaves[path][index]) for path in rule.ours)
                yield name, np.ascontiguousarray(rule.join(parts, config))


def flatten(model) -> tuple[dict[str, Any], Any]:
    """The parameters by path, such as "flow.layers.attention.query.kernel", in tree order."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(model)
    return {path_name(path): leaf for path, leaf in flat}, treedef


def _parameters(config: TransformerConfig, dtype) -> tuple[dict[str, Any], Any]:
    return flatten(jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype)))


def _matches(name: str, patterns) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _canonical_names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """The file's tensors by the names of the family's rules.

    Files differ in the bare model's prefix and in spellings.
    """
    bare = not any(name.startswith(family.prefix) for name in checkpoint.shapes)
    names: dict[str, str] = {}
    for name in checkpoint.shapes:
        canonical = name
        for pattern, spelling in family.spellings.items():
            canonical = re.sub(pattern, spelling, canonical)
        if bare and not _matches(canonical, family.head):
            canonical = family.prefix + canonical
        if canonical in names:
            raise ValueError(
                f"{checkpoint.source}: {name!r} and {names[canonical]!r} are the same tensor"
            )
        names[canonical] = name
    return names


def _holds(rule: Rule, config: TransformerConfig, paths) -> bool:
    """Whether a model of this config has what the rule is about."""
    return rule.tied in (None, config.tied) and all(path in paths for path in rule.ours)


def blocks_of(path: str, config: TransformerConfig) -> tuple[int, ...]:
    """The blocks that a parameter of the layers has, in the order of its stack."""
    stacks = {"mixture": config.sparse_blocks, "feed_forward": config.dense_blocks}
    return stacks.get(path.split(".")[2], tuple(range(max(config.blocks) + 1)))


def _places(
    rule: Rule, family: Family, config: TransformerConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a rule stands for, and where it goes in our stacks."""
    if "{layer}" not in rule.hf:
        yield rule.hf, ()
        return
    for place, block in enumerate(blocks_of(rule.ours[0], config)):
        name = rule.hf.replace("{layer}", family.layer(config, block))
        if "{expert}" in name:
            for expert in range(config.experts):
                yield name.replace("{expert}", str(expert)), (place, expert)
        else:
            yield name, (place,)


def _plan(
    family: Family,
    config: TransformerConfig,
    shapes: dict[str, Any],
    names: dict[str, str],
    checkpoint: Checkpoint,
) -> list[tuple[str, Rule, tuple[int, ...]]]:
    """Which tensor goes where; every complaint about the file comes before any of it is read."""
    plan, used, missing = [], set(), []
    instead = [
        rule
        for rule in family.instead
        if _holds(rule, config, shapes)
        and any(name in names for name, _ in _places(rule, family, config))
    ]
    replaced = {path for rule in instead for path in rule.ours}
    for rule in [*instead, *(r for r in family.rules if not replaced & set(r.ours))]:
        if not _holds(rule, config, shapes):
            continue
        for name, index in _places(rule, family, config):
            if name not in names:
                missing.append(name)
                continue
            used.add(name)
            _check_shape(checkpoint, rule, config, shapes, index, names[name])
            plan.append((names[name], rule, index))
    if missing:
        raise ValueError(f"{checkpoint.source}: missing {_few(missing)}")
    rest = [n for n in names if n not in used and not _matches(n, family.unused)]
    for name in [n for n in rest if n in family.copies]:
        original = names[family.copies[name]]
        if not _equal(checkpoint.read(names[name]), checkpoint.read(original)):
            raise ValueError(
                f"{checkpoint.source}: the config ties {names[name]!r} to {original!r}, "
                "but they differ"
            )
        rest.remove(name)
    if rest:
        raise ValueError(f"{checkpoint.source}: unused {_few([names[n] for n in rest])}")
    return plan


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # By their bytes, which no copy is made of.
    a, b = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (a, b))
    return a.data == b.data


def _few(names: list[str]) -> str:
    tensors = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{tensors} {', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}"


def _check_shape(checkpoint, rule, config, shapes, index, name):
    expected = [tuple(shapes[path].shape[len(index) :]) for path in rule.ours]
    # Stand-ins without memory: the shape that our parameters would have in the file.
    stand_ins = tuple(np.broadcast_to(np.zeros((), np.int8), shape) for shape in expected)
    wanted = rule.join(stand_ins, config).shape
    found = tuple(checkpoint.shapes[name])
    if found != wanted:
        raise ValueError(
            f"{checkpoint.source}: tensor {name!r} has shape {found}, and by the config {wanted}"
        )
