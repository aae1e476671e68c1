"""Machines over token ids: a program is a table of tokens.

Axes: `tokens`; `vocab`; `width`, the machine's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from svflow import Context
from svflow.flow import check_context
from svflow.models.transformer import indices_of, rows_of, token_positions
from universal.transformer import AttentionTransformer, check_transformer, check_type, run


class TableMachine(nnx.Module):
    """An attention transformer over token ids, x = tokens[id] + positions[place].

    The transformer is `flow`, as of a `svflow.Transformer`, and `embed` what it starts from.

    Arguments: those of `reprogram`.
    """

    def __init__(
        self,
        flow: AttentionTransformer,
        token_table: Float[Array, "vocab width"],
        position_table: Float[Array, "places width"] | None,
    ):
        self.flow = flow
        self.tokens = nnx.Param(token_table)
        self.positions = None if position_table is None else nnx.Param(position_table)

    def embed(
        self, ids: Int[ArrayLike, " tokens"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """The state that enters the first layer.

        Raises:
            ValueError: what is not a sequence of ids, a wrong context, or (outside jit) an id or a
                place that has no row in its table. Under jit, such a token's state is nan.
        """
        indices = indices_of(ids, self.tokens.shape[0], "id", "vocabulary")
        check_context(context, indices.size)
        x = rows_of(self.tokens, indices)
        if self.positions is None:
            return x
        places = token_positions(indices.size, context)
        room = self.positions.shape[0]
        return x + rows_of(self.positions, indices_of(places, room, "position", "position table"))

    def unembed(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens out"]:
        """The output that a state holds."""
        return self.flow.unembed(x)

    def __call__(
        self, ids: Int[ArrayLike, " tokens"], context: Context | None = None
    ) -> Float[Array, "tokens out"]:
        """The output of every token."""
        return run(self.flow, self.embed(ids, context), context)


def reprogram(
    machine: AttentionTransformer,
    token_table: Float[ArrayLike, "vocab width"],
    position_table: Float[ArrayLike, "places width"] | None = None,
    *,
    program: Float[ArrayLike, "target width"] | None = None,
) -> TableMachine:
    """The machine over token ids: programs are linear, so that they compose with tables.

    Arguments:
        machine: the machine, or any other attention transformer.
        token_table: (vocab, width) what each token starts from; position_table: (places, width)
            what each place adds.
        program: E, where the tables are those of a target; they are then table @ E.

    Raises:
        ValueError: tables or a program of wrong shapes, by the width that is needed, of different
            types, or not finite.
    """
    check_transformer(machine, "machine")
    tokens = _table("token_table", token_table, machine, program)
    if position_table is None:
        return TableMachine(machine, tokens, None)
    places = _table("position_table", position_table, machine, program)
    if places.dtype != tokens.dtype:
        raise ValueError(f"position_table is {places.dtype}, but token_table is {tokens.dtype}")
    return TableMachine(machine, tokens, places)


def _table(name: str, given, machine: AttentionTransformer, program) -> Array:
    """A table of the machine's width."""
    table = jnp.asarray(given)
    if table.ndim != 2 or 0 in table.shape or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be a table of floating-point rows, got {table.dtype} {table.shape}"
        )
    _finite(name, table)
    check_type(machine, name, table.dtype)
    if program is not None:
        E = jnp.asarray(program)
        if E.shape != (table.shape[1], machine.width):
            raise ValueError(
                f"program must have shape ({table.shape[1]}, {machine.width}) for this {name} and "
                f"machine, got {E.shape}"
            )
        if E.dtype != table.dtype:
            raise ValueError(f"program is {E.dtype}, but {name} is {table.dtype}")
        _finite("program", E)
        table = jnp.matmul(table, E, precision="highest")
    if table.shape[1] != machine.width:
        raise ValueError(
            f"{name} has {table.shape[1]} columns, and the machine reads {machine.width}: pass "
            "table @ E, or the program E as well"
        )
    return table


def _finite(name: str, array: Array) -> None:
    if not isinstance(array, jax.core.Tracer) and not np.isfinite(np.asarray(array)).all():
        raise ValueError(f"{name} is not finite")
