r"""How wide a machine has to be, measured: from below by rank, from above by solving.

Below: where a machine attends as its target does, its output is sum_p P_p X E R_p U over the paths
p, and the target's sum_p P_p X V_p W_U. With states of width 1 the V_p are numbers v_p. If the
functions X -> P_p X are linearly independent, E R_p U = v_p for every p; and if the vectors
(v_p)_p of all targets span R^(H^L), the m columns of E have to do so too: m >= H^L. Both ranks can
be measured. Above: random machines of m columns, and whether their programs exist.

Axes: `layers`, `heads`, `paths`; `tokens`, `width`; `targets`, `widths` and `seeds`, draws.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423, Theorem 4.1, the
lower bound; how it is measured, and all about random machines, is derived here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.integers import positive
from svflow.memory import check_memory
from universal.program import solve
from universal.random_machine import KINDS, random
from universal.sizes import check_kind, machine_width
from universal.transformer import (
    AttentionTransformer,
    attention_matrices,
    check_state,
    check_transformer,
    run,
)

SLACKS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
WORKS = 1e-6
"""The relative error of its output up to which a program counts as one."""
ROUNDING = 1e-13
"""The relative singular value that rounding may make of zero."""
QUICK = {"xla_backend_optimization_level": 0}
"""For programs that run once on the CPU: compiling them fast matters more than running them."""


def path_functions(
    transformer: AttentionTransformer, x: Float[Array, "tokens width"]
) -> Float[Array, "paths tokens width"]:
    """P_p x for every path p, the products of attention matrices along it applied to the input.

    Paths come in the order of the output's `universal.Slot`s: the head of the first layer varies
    slowest, and with a residual going around a layer comes before its heads. Of a machine with
    x @ E they are those of its target times E.

    Raises:
        ValueError: as `universal.run`.
    """
    check_transformer(transformer)
    x = jnp.asarray(x)
    check_state(transformer, x)
    found = x[None]
    for matrices in attention_matrices(transformer, x):
        longer = jnp.einsum("hij,pjd->phid", matrices, found, precision="highest")
        if transformer.residual:
            longer = jnp.concatenate([found[:, None], longer], axis=1)
        found = longer.reshape(-1, *x.shape)
    return found


def random_target(
    key: Array,
    layers: int,
    heads: int,
    width: int,
    head_width: int,
    out_width: int,
    *,
    gain: float = 1.2,
    causal: bool = False,
    residual: bool = False,
) -> AttentionTransformer:
    """A target of independent Gaussian weights of variance 1 / width, queries and keys `gain` times
    that size."""
    each = [(layers, heads, width, out) for out in (head_width, head_width, width)]
    shapes: list[tuple[int, ...]] = [*each, (width, out_width)]
    counts = [math.prod(shape) for shape in shapes]
    # One draw, and NumPy for the rest: compiling each step takes longer than all of them.
    entries = width**-0.5 * np.asarray(jax.random.normal(key, (sum(counts),)))
    parts = np.split(entries, np.cumsum(counts)[:-1])
    query, keys, value, unembed = (part.reshape(shape) for part, shape in zip(parts, shapes))
    size = entries.dtype.type(gain)
    return AttentionTransformer(
        size * query, size * keys, value, unembed, causal=causal, residual=residual
    )


class PathRank(NamedTuple):
    """Singular values of what spans the lower bound, each in units of the largest.

    Arguments:
        layers, heads: of the targets, whose states are 1 wide.
        functions: (paths,) of the functions X -> P_p X of all targets together: values at tokens
            of random inputs as rows, paths as columns.
        each: (targets, paths) of those of each target.
        values: (paths,) of the products v_p of value weights, targets as rows.
    """

    layers: int
    heads: int
    functions: Float[np.ndarray, " paths"]
    each: Float[np.ndarray, "targets paths"]
    values: Float[np.ndarray, " paths"]

    @property
    def rank(self) -> int:
        """How many path functions are independent, by their singular values above rounding."""
        return int(np.sum(self.functions > ROUNDING))

    @property
    def independent(self) -> int:
        """How many of the targets have, each alone, as many path functions as paths, above
        rounding. They are analytic in its weights: what one has, almost all have."""
        return int(np.sum(self.each[:, -1] > ROUNDING))

    @property
    def bound(self) -> int:
        """The width that these ranks force upon a machine: of the path functions of one target, or
        of the products of values where that is smaller."""
        alone = int(np.sum(self.each > ROUNDING, axis=1).max())
        return min(alone, int(np.sum(self.values > ROUNDING)))


def path_rank(
    key: Array,
    layers: int,
    heads: int,
    *,
    targets: int = 64,
    inputs: int = 16,
    tokens: int = 8,
    gain: float = 2.0,
) -> PathRank:
    """The ranks of the lower bound m >= H^L over random targets of width 1, in float64.

    Arguments:
        key: of the draws.
        layers, heads: of the targets.
        targets: how many; those of the bound need as many as paths, heads^layers.
        inputs, tokens: for each target, Gaussian.
        gain: of queries and keys. Where logits are small, attention is close to the mean, and the
            functions of all paths are close to one another.

    Raises:
        ValueError: numbers that are not positive, or too few targets or rows to tell the rank.
        MemoryError: where the functions do not fit.
    """
    sizes = dict(layers=layers, heads=heads, targets=targets, inputs=inputs, tokens=tokens)
    layers, heads, targets, inputs, tokens = (positive(*item) for item in sizes.items())
    paths = heads**layers
    if min(targets, inputs * tokens) < paths:
        raise ValueError(
            f"{heads}^{layers} paths take at least {paths} targets and {paths} tokens of inputs, "
            f"not {targets} and {inputs} x {tokens}"
        )
    check_memory(f"{paths} path functions", 32 * targets * inputs * tokens * paths, None)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        ours, theirs = jax.random.split(key)
        drawn = jax.tree.map(
            lambda *leaves: np.stack(leaves),
            *(
                random_target(one, layers, heads, 1, 1, 1, gain=gain)
                for one in jax.random.split(ours, targets)
            ),
        )
        x = jax.random.normal(theirs, (targets, inputs, tokens, 1))
        rows = np.asarray(_all_path_functions(drawn, x))
    rows = np.moveaxis(rows[..., 0], 2, -1).reshape(targets, -1, paths)
    products = np.ones((targets, 1))
    for values in np.moveaxis(np.asarray(drawn.value[...]), 1, 0):
        products = (products[:, :, None] * values[:, None, :, 0, 0]).reshape(targets, -1)
    return PathRank(
        layers,
        heads,
        _relative(rows.reshape(-1, paths)),
        _relative(rows),
        _relative(products),
    )


def _relative(matrices: np.ndarray) -> np.ndarray:
    sigma = np.linalg.svd(matrices, compute_uv=False)
    return sigma / sigma[..., :1]


@functools.partial(jax.jit, compiler_options=QUICK)
def _all_path_functions(targets, x):
    """(targets, inputs, paths, tokens, 1)."""
    one = jax.vmap(path_functions, in_axes=(None, 0))
    return jax.vmap(one)(targets, x)


def path_rank_table(found: Sequence[PathRank]) -> str:
    """Ranks and smallest relative singular values as lines of text, a line for each shape."""
    rows = [("L", "H", "H^L", "rank", "smallest", "values", "bound", "N", "alone", "median alone")]
    for one in found:
        least = machine_width(one.layers, one.heads, 1, 1)
        rows.append(
            (f"{one.layers}", f"{one.heads}", f"{one.heads**one.layers}", f"{one.rank}",
             f"{one.functions[-1]:.1e}", f"{one.values[-1]:.1e}", f"{one.bound}", f"{least}",
             f"{one.independent}/{len(one.each)}", f"{np.median(one.each[:, -1]):.0e}")
        )  # fmt: skip
    return aligned(rows)


class Phase(NamedTuple):
    """Programs of random machines of several widths, each for a random target.

    Arguments:
        sizes: layers, heads, width, head width and output width of the targets.
        kind: of the machines.
        least: N, the number of equations.
        widths: (widths,) m, ascending.
        condition, residual: (widths, seeds) as in `Solution`.
        error: (widths, seeds) the largest difference of the machine's output from the target's,
            relative to its largest entry, in float64.
        single: (widths, seeds) the same of a float32 run with the same program, rounded.
        target_single: (seeds,) that of the target itself in float32.
    """

    sizes: tuple[int, int, int, int, int]
    kind: str
    least: int
    widths: np.ndarray
    condition: Float[np.ndarray, "widths seeds"]
    residual: Float[np.ndarray, "widths seeds"]
    error: Float[np.ndarray, "widths seeds"]
    single: Float[np.ndarray, "widths seeds"]
    target_single: Float[np.ndarray, " seeds"]

    @property
    def first(self) -> int | None:
        """The least of the widths from which on every seed's program works; None if none is."""
        fails = np.flatnonzero((~(self.error <= WORKS)).any(axis=1))
        place = fails[-1] + 1 if fails.size else 0
        return int(self.widths[place]) if place < len(self.widths) else None


def phase(
    key: Array,
    layers: int,
    heads: int,
    width: int,
    head_width: int,
    out_width: int,
    *,
    slacks: Sequence[float] = SLACKS,
    seeds: int = 10,
    tokens: int = 8,
    kind: str = "untied",
) -> Phase:
    r"""From which width on random machines have programs, and how well conditioned these are.

    The Gaussian machine of each seed is drawn once, at the largest width M. One of m columns is its
    first m rows and columns times sqrt(M / m), which has the law of `random` at that width. So all
    widths are run by one program, a row that is not there being zero.

    Arguments:
        key: of the draws.
        layers, heads, width, head_width, out_width: of the targets, which are Gaussian.
        slacks: widths in units of N; N - 1 and N are always among them.
        seeds: how many machines, each with a target and an input of its own.
        tokens: of an input.
        kind: of the machines, as in `random`.

    Raises:
        ValueError: an unknown kind, or numbers that are not positive.
        MemoryError: where the machines do not fit.
    """
    check_kind(kind, KINDS)
    seeds, tokens = positive("seeds", seeds), positive("tokens", tokens)
    shares = np.asarray(slacks, np.float64)
    if shares.ndim != 1 or not (np.isfinite(shares) & (shares > 0)).all():
        raise ValueError(f"slacks must be positive and finite, got {slacks!r}")
    least = machine_width(layers, heads, head_width, out_width, kind)
    counts = np.maximum(np.ceil(shares * least - 1e-9 * least).astype(int), 1)
    widths = np.unique([max(least - 1, 1), least, *counts])
    most = int(widths[-1])
    size = seeds * layers * heads * most * (most + 2 * head_width)
    check_memory(f"{seeds} random machines of {most} columns", 8 * 6 * size, None)
    sizes = layers, heads, positive("width", width), head_width, out_width
    rows = np.sqrt(most / widths)[:, None] * (np.arange(most) < widths[:, None])
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        draws = []
        for one in jax.random.split(key, seeds):
            ours, theirs, inputs = jax.random.split(one, 3)
            machine = random(ours, *sizes, slack=most / least, kind=kind)
            target = random_target(theirs, *sizes, residual=machine.residual)
            draws.append((machine, target, jax.random.normal(inputs, (tokens, width))))
        solved = [
            [solve(_narrowed(machine, row), target) for row in rows] for machine, target, _ in draws
        ]
        programs = np.array([[np.asarray(one.program) for one in line] for line in solved])
        drawn = jax.tree.map(lambda *leaves: np.stack(leaves), *draws)
        *outputs, wanted, theirs = map(np.asarray, _outputs(*drawn, programs, rows))
    scale = np.abs(wanted).max(axis=(-2, -1))
    double, single = (
        (np.abs(found - wanted[:, None]).max(axis=(-2, -1)) / scale[:, None]).T for found in outputs
    )
    condition, residual = (
        np.array([[getattr(one, name) for one in line] for line in solved]).T
        for name in ("condition", "residual")
    )
    return Phase(
        sizes,
        kind,
        least,
        widths,
        condition,
        residual,
        double,
        single,
        np.abs(theirs - wanted).max(axis=(-2, -1)) / scale,
    )


def _narrowed(machine, row):
    """The machine that reads the state times `row`: what is written where that is 0 is not read."""
    return jax.tree.map(lambda leaf: leaf * row[:, None], machine)


@functools.partial(jax.jit, compiler_options=QUICK)
def _outputs(machines, targets, x, programs, rows):
    """Of the machines in float64 and float32, (seeds, widths, tokens, out); of the targets."""

    def outputs(dtype):
        def one(machine, target, x, programs):
            machine, target, x, programs, scales = jax.tree.map(
                lambda leaf: leaf.astype(dtype), (machine, target, x, programs, rows)
            )
            ours = jax.lax.map(
                lambda at: run(
                    _narrowed(machine, at[1]), jnp.matmul(x, at[0], precision="highest")
                ),
                (programs, scales),
            )
            return ours, run(target, x)

        return jax.vmap(one)(machines, targets, x, programs)

    (ours, wanted), (single, theirs) = outputs(jnp.float64), outputs(jnp.float32)
    return ours, single, wanted, theirs


def phase_table(found: Sequence[Phase]) -> str:
    """Medians and largest values over seeds as lines of text, a line for each shape and width."""
    rows = [("L", "H", "d_k", "N", "m", "m / N", "works", "error", "largest", "residual",
             "condition", "float32", "of target")]  # fmt: skip
    for one in found:
        layers, heads, _, head, _ = one.sizes
        for place, m in enumerate(one.widths):
            error = one.error[place]
            values = error, one.residual[place], one.condition[place], one.single[place]
            middle, residual, condition, single = (f"{np.median(v):.0e}" for v in values)
            rows.append(
                (f"{layers}", f"{heads}", f"{head}", f"{one.least}", f"{m}", f"{m / one.least:.2f}",
                 f"{np.sum(error <= WORKS)}/{error.size}", middle, f"{error.max():.0e}", residual,
                 condition, single, f"{np.median(one.target_single):.0e}")
            )  # fmt: skip
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells as lines of text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows
    )
