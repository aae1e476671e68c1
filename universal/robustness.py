r"""What becomes of a simulation when the program or the machine is a little off.

A program solves E Gamma = Delta. A change of E by a share eps of its norm changes what the machine
reads by up to eps |E| |Gamma|: in units of Delta, by up to eps times the condition number of Gamma.
The output then changes as the target's own output does when its weights are off. In a sparse
machine the condition number is 1.

Axes: `width`, `tokens`, of the target; `machine`, the width of the machine; `epsilons`; `draws`.

Source: derived here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from svflow.integers import positive
from svflow.memory import check_memory
from universal.bounds import QUICK, aligned
from universal.interpret import Matching, attention_matching
from universal.program import program as program_of
from universal.program import solve
from universal.sizes import check_kind
from universal.transformer import AttentionTransformer, check_state, check_transformer, run

EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FORMATS = ("bfloat16", "int8 per column", "int8 per row")


class Sensitivity(NamedTuple):
    """What random perturbations of one thing do to the output.

    Arguments:
        epsilon: (epsilons,) their size: the Frobenius norm of the change of every matrix, in units
            of the matrix's own.
        error: (epsilons, draws) the largest change of the output, relative to its largest entry.
        amplification: (draws,) the limit of error / epsilon for small epsilon, by differentiation.
    """

    epsilon: Float[np.ndarray, " epsilons"]
    error: Float[np.ndarray, "epsilons draws"]
    amplification: Float[np.ndarray, " draws"]

    @property
    def slope(self) -> float:
        """d log(error) / d log(epsilon) of the medians, from the smallest epsilon to the next."""
        order = np.argsort(self.epsilon)[:2]
        error, epsilon = np.median(self.error[order], axis=1), self.epsilon[order]
        return float(np.diff(np.log(error))[0] / np.diff(np.log(epsilon))[0])


class Robustness(NamedTuple):
    """How a simulation answers to random perturbations.

    Arguments:
        condition: that of the program, as in `Solution`.
        program: perturbations of E.
        machine: of all maps of the machine, routings written out as matrices.
        target: of all maps of the target, to compare with.
    """

    condition: float
    program: Sensitivity
    machine: Sensitivity
    target: Sensitivity


def robustness(
    machine: AttentionTransformer,
    target: AttentionTransformer,
    x: Float[Array, "tokens width"],
    *,
    key: Array,
    epsilons: Sequence[float] = EPSILONS,
    draws: int = 16,
) -> Robustness:
    """Perturbs the program, the machine and the target, each alone and in float64.

    Every matrix W gets W + epsilon |W| G / |G| with G Gaussian, the norms Frobenius's.

    Arguments:
        machine, target: as in `program`.
        x: (tokens, width) the target's input.
        key: of the draws.
        epsilons: sizes, at least two different ones.
        draws: perturbations of each.

    Raises:
        ValueError: as `program` and `run`, epsilons or draws that are not positive.
        MemoryError: a machine too wide to be written out, or to be perturbed that often.
    """
    for name, transformer in (("machine", machine), ("target", target)):
        check_transformer(transformer, name)
    x = jnp.asarray(x)
    check_state(target, x)
    draws = positive("draws", draws)
    sizes = np.asarray(epsilons, np.float64)
    if sizes.ndim != 1 or np.unique(sizes).size < 2 or not (np.isfinite(sizes) & (sizes > 0)).all():
        raise ValueError(f"epsilons must be two or more positive numbers, got {epsilons!r}")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        ours, theirs, E, start = (
            jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)
            for tree in (machine, target, np.eye(target.width), x)
        )
        found = solve(ours, theirs)
        ours = ours.dense(jnp.float64)
        entries = sum(leaf.size for leaf in jax.tree.leaves(ours))
        check_memory(f"{draws} perturbations of the machine", 8 * 4 * draws * entries, None)
        cases = [
            ((ours, found.program), (0.0, 1.0)),
            ((ours, found.program), (1.0, 0.0)),
            ((theirs, E), (1.0, 0.0)),
        ]
        measured = []
        for one, (simulation, moving) in zip(jax.random.split(key, 3), cases):
            keys = jax.random.split(one, draws)
            error, slope = _changes(simulation, start, keys, jnp.asarray(sizes), moving)
            measured.append(Sensitivity(sizes, np.asarray(error).T, np.asarray(slope)))
    return Robustness(found.condition, *measured)


@functools.partial(jax.jit, compiler_options=QUICK)
def _changes(simulation, x, keys, epsilons, moving):
    """Errors (draws, epsilons) and amplifications (draws,) of a transformer and its E.

    `moving`: 1 or 0 for either, whether it is perturbed.
    """

    leaves, structure = jax.tree.flatten(simulation)
    ends = np.cumsum([leaf.size for leaf in leaves])

    def direction(key):
        # One draw for all matrices: compiling each takes longer than the rest.
        noise = jnp.split(jax.random.normal(key, (int(ends[-1]),)), ends[:-1])
        noise = [part.reshape(leaf.shape) for part, leaf in zip(noise, leaves)]
        parts = [part * (_norm(leaf) / _norm(part)) for part, leaf in zip(noise, leaves)]
        return [
            jax.tree.map(lambda part, on=on: on * part, tree)
            for on, tree in zip(moving, jax.tree.unflatten(structure, parts))
        ]

    def one(key):
        towards = tuple(direction(key))

        def output(epsilon):
            transformer, E = jax.tree.map(lambda leaf, d: leaf + epsilon * d, simulation, towards)
            return run(transformer, jnp.matmul(x, E, precision="highest"))

        # With no perturbation first, where the derivative is wanted as well.
        steps = jnp.concatenate([jnp.zeros(1), epsilons])
        outputs, slopes = jax.lax.map(
            lambda epsilon: jax.jvp(output, (epsilon,), (jnp.ones_like(epsilon),)), steps
        )
        size = jnp.max(jnp.abs(outputs[0]))
        error = jnp.max(jnp.abs(outputs[1:] - outputs[0]), axis=(1, 2))
        return error / size, jnp.max(jnp.abs(slopes[0])) / size

    return jax.vmap(one)(keys)


def _norm(matrices):
    return jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True)


def robustness_table(found: Mapping[str, Robustness]) -> str:
    """Condition, slopes and median amplifications as lines of text, a line for each name."""
    parts = ("program", "machine", "target")
    rows = [("", "condition", *parts, *(f"slope of {part}" for part in parts))]
    for name, one in found.items():
        three = one.program, one.machine, one.target
        rows.append(
            (name, f"{one.condition:.1e}", *(f"{np.median(s.amplification):.2g}" for s in three),
             *(f"{s.slope:.4f}" for s in three))
        )  # fmt: skip
    return aligned(rows)


def quantise(E: Float[ArrayLike, "width machine"], form: str) -> Float[Array, "width machine"]:
    """E rounded to the numbers of a narrower format, to the nearest of them, in its own type.

    Arguments:
        E: a program.
        form: "bfloat16"; "int8 per column": -127 .. 127 times a scale for every column of E, so for
            every column of the machine's state, its largest entry over 127; "int8 per row": times
            one for every row, so for every coordinate of the target's state.

    Raises:
        ValueError: an unknown format, or a program that is not a matrix of finite floats.
    """
    check_kind(form, FORMATS, "form")
    E = jnp.asarray(E)
    if E.ndim != 2 or 0 in E.shape or not jnp.issubdtype(E.dtype, jnp.floating):
        raise ValueError(f"E must be a matrix of floats, got {E.dtype} of shape {E.shape}")
    if not isinstance(E, jax.core.Tracer) and not np.isfinite(np.asarray(E)).all():
        raise ValueError("E is not finite")
    if form == "bfloat16":
        narrow = jnp.finfo(jnp.bfloat16)
        return jax.lax.reduce_precision(E, narrow.nexp, narrow.nmant)
    top = jnp.max(jnp.abs(E), axis=0 if form == "int8 per column" else 1, keepdims=True)
    scale = top / jnp.asarray(127, E.dtype)
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)  # also of what is too small to scale
    return jnp.round(E / scale) * scale


class Quantised(NamedTuple):
    """What rounding the program to a format does.

    Arguments:
        form: the format; "none" for the program as it was.
        change: |dE| / |E|, in Frobenius norms.
        matching: layers, heads and output against the target's.
    """

    form: str
    change: float
    matching: Matching


def quantisation(
    machine: AttentionTransformer,
    target: AttentionTransformer,
    x: Float[Array, "tokens width"],
    *,
    program: Float[Array, "width machine"] | None = None,
) -> list[Quantised]:
    """The simulation with the program as it is and rounded to each of `FORMATS`.

    Only E is rounded: the machine and all that it computes keep their type.

    Arguments, raises: as `attention_matching`.
    """
    E = program_of(machine, target) if program is None else program
    exact = np.asarray(E).astype(np.float64)
    found = []
    for form in ("none", *FORMATS):
        rounded = E if form == "none" else quantise(E, form)
        change = np.linalg.norm(np.asarray(rounded).astype(np.float64) - exact)
        matching = attention_matching(machine, target, x, program=rounded)
        found.append(Quantised(form, float(change / np.linalg.norm(exact)), matching))
    return found


def quantisation_table(found: Mapping[str, Sequence[Quantised]]) -> str:
    """Changes of E, attention, logits and output as lines of text, a line for name and format."""
    rows: list[tuple[str, ...]] = [("", "format", "of E", "of logits", "of attention", "of output")]
    for name, several in found.items():
        for form, change, matching in several:
            largest = matching.logits.max(), matching.attention.max(), matching.output
            rows.append((name, form, *(f"{value:.1e}" for value in (change, *largest))))
    return aligned(rows)
