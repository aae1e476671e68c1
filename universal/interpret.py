"""What the columns of a program hold, and whether a machine attends as its target does.

Axes: `layers`, `heads`, `tokens`, `width`; `machine`, the width of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow import Context, simulate
from universal.paths import Slot, is_routed, path_sources, slots
from universal.program import program as program_of
from universal.transformer import AttentionTransformer, check_state, check_transformer, check_type


class Register(NamedTuple):
    """Columns of a program, and what they hold.

    Arguments:
        slot: the query, key or output, and the path along which it is read, see `Slot`.
        columns: their places in E and in the state that enters the first layer.
    """

    slot: Slot
    columns: np.ndarray


def registers(machine: AttentionTransformer) -> list[Register]:
    """Where a program holds what: one register per path and query, key or output, by its place.

    E[:, columns] is V_p W_Q, V_p W_K or V_p W_U with V_p the product of the value matrices along
    the path. In a compressed machine the key of every layer is one and the same identity, and the
    queries are V_p W_Q W_K^T V_p^T.

    Raises:
        ValueError: a machine that is not made of routings: there each of these is a combination
            of all columns.
    """
    check_transformer(machine, "machine")
    if not is_routed(machine):
        raise ValueError(
            "only in a machine of routings has every query, key and output columns of its own"
        )
    found = slots(machine)
    widths = [machine.out_width if slot.kind == "output" else machine.head_width for slot in found]
    places = np.split(path_sources(machine), np.cumsum(widths)[:-1])
    return sorted(map(Register, found, places), key=lambda register: register.columns[0])


def register_table(found: Sequence[Register]) -> str:
    """The registers as lines of text: columns, what they hold, and the path.

    Layers and heads count from 0; a path is written layer.head > layer.head > ...
    """
    lines: list[tuple[str, ...]] = [("columns", "holds", "layer", "head", "path")]
    for slot, columns in found:
        reader = [str(n) for n in (slot.layer, slot.head) if n is not None] or ["", ""]
        path = " > ".join(f"{layer}.{head}" for layer, head in slot.path)
        lines.append((spans(columns), slot.kind, *reader, path or "(none)"))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def spans(columns: np.ndarray) -> str:
    """Columns as text, runs of them as first-last."""
    columns = np.unique(columns)
    runs = np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)
    return ", ".join(f"{run[0]}" if run.size == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class Matching(NamedTuple):
    """How far a machine is from its target, in what each layer computes from the state before it.

    Arguments:
        logits: (layers, heads) the largest difference, relative to the target's largest logit.
        attention: (layers, heads) the largest difference of attention weights.
        output: the largest difference of the output, relative to its largest entry.
    """

    logits: Float[np.ndarray, "layers heads"]
    attention: Float[np.ndarray, "layers heads"]
    output: float


def attention_matching(
    machine: AttentionTransformer,
    target: AttentionTransformer,
    x: Float[Array, "tokens width"],
    *,
    program: Float[Array, "width machine"] | None = None,
    context: Context | None = None,
) -> Matching:
    """Simulates both and compares them layer by layer and head by head.

    Arguments:
        machine, target: as in `universal.program`.
        x: (tokens, width) the target's input.
        program: E; by default it is solved for.
        context: padding; padded tokens are compared as well.

    Raises:
        ValueError: as `universal.program` and `universal.run`; a program of another type.
    """
    E = program_of(machine, target) if program is None else jnp.asarray(program)
    x = jnp.asarray(x)
    check_state(target, x)
    if E.shape != (target.width, machine.width):
        raise ValueError(
            f"program must have shape ({target.width}, {machine.width}), got {E.shape}"
        )
    if E.dtype != x.dtype:
        raise ValueError(f"program is {E.dtype}, but x is {x.dtype}")
    check_type(machine, "program", E.dtype)
    entering = jnp.matmul(x, E, precision="highest")
    ours, theirs = _look(machine, entering, context), _look(target, x, context)
    logits, attention, output = (np.abs(a - b) for a, b in zip(ours, theirs))
    sizes = [np.abs(b).max(axis=axes) for b, axes in ((theirs[0], (2, 3)), (theirs[2], None))]
    sizes = [np.where(size == 0, 1, size) for size in sizes]
    return Matching(
        logits.max(axis=(2, 3)) / sizes[0],
        attention.max(axis=(2, 3)),
        float(output.max() / sizes[1]),
    )


def _look(transformer, x, context) -> list[np.ndarray]:
    """Logits and attention of every layer and head, and the output."""
    found = _observe(transformer, x, context)
    return [np.asarray(array).astype(np.float64) for array in found]


@jax.jit
def _observe(transformer, x, context):
    xs = simulate(transformer, x, context=context).xs
    scale = jnp.asarray(transformer.scale, x.dtype)
    logits, attention = [], []
    for layer in range(transformer.depth):
        query, key = transformer.reads(layer, xs[layer])
        product = jnp.einsum("ihk,jhk->hij", query, key, precision="highest")
        logits.append(scale * product)
        attention.append(transformer.attention(layer, xs[layer], context))
    return jnp.stack(logits), jnp.stack(attention), transformer.unembed(xs[-1])
