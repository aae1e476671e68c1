"""Programs: the embedding with which a machine simulates a target.

Axes: `width`, of the target; `machine`, the width of the machine; `columns`, what the target reads
along all its paths, see `universal.paths`.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423; the equations are
derived here.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, ArrayLike, Float

from svflow.memory import check_memory, magnitude
from universal.paths import is_routed, path_columns, path_sources
from universal.sizes import machine_width
from universal.square import OFF, solve_square, square_equations
from universal.transformer import AttentionTransformer, check_transformer

ILL = 1e12
"""The condition number above which `program` warns."""


class Solution(NamedTuple):
    """A program and how well its equations are solved.

    Arguments:
        program: (width, machine) E, in the target's type; solved for in float64.
        condition: the condition number of the equations in E: 1 where each is one of E's columns;
            infinite where they are dependent, their rank below their number. With square R_Q, R_K
            that of their Jacobian at E.
        residual: |E Gamma - Delta| / |Delta| in Frobenius norms, before E is rounded to its type.
        rank: how many of the equations are independent.
        equations: how many there are for each row of E, the columns of Gamma: the least width
            that serves every target of this shape. With square R_Q and R_K, of all of E.
    """

    program: Float[ArrayLike, "width machine"]
    condition: float
    residual: float
    rank: int
    equations: int


def program(
    machine: AttentionTransformer, target: AttentionTransformer
) -> Float[Array, "width machine"]:
    """E, with which `run(machine, x @ E)` is `run(target, x)` for every x.

    Warns where the equations are not solved or are ill conditioned; `solve` gives the numbers.

    Arguments:
        machine: of `sparse` or `random`, or any other attention transformer.
        target: with as many layers and heads, of any width.

    Returns:
        (width of the target, width of the machine) in the target's type.

    Raises:
        ValueError: a target that this machine does not serve, with what it would take; entries
            that are not finite in the target's type.
        MemoryError: equations that do not fit.

    Examples:
        >>> import universal as ut
        >>> draw = np.random.default_rng(0).normal
        >>> query, key, value = draw(size=(3, 2, 2, 3, 3)).astype("float32")
        >>> unembed, x = draw(size=(2, 3, 3)).astype("float32")
        >>> target = ut.AttentionTransformer(query, key, value, unembed)
        >>> machine = ut.sparse(2, 2, 3, 3, 3)  # its weights are zeros and ones
        >>> E = ut.program(machine, target)
        >>> E.shape, bool(jnp.allclose(ut.run(machine, x @ E), ut.run(target, x), rtol=1e-3))
        ((3, 48), True)
    """
    found = solve(machine, target)
    if not found.residual <= OFF:
        warnings.warn(
            f"this machine of width {machine.width} does not simulate the target: the relative "
            f"residual is {found.residual:.1e}, and of its {found.equations} equations "
            f"{found.rank} are independent; {_advice(machine, target, found)}",
            stacklevel=2,
        )
    elif not found.condition <= ILL:
        warnings.warn(
            f"the program is ill conditioned: condition number {found.condition:.1e}, relative "
            f"residual {found.residual:.1e}; {_advice(machine, target, found)}",
            stacklevel=2,
        )
    return jnp.asarray(found.program)


def solve(machine: AttentionTransformer, target: AttentionTransformer) -> Solution:
    r"""The program and the numbers that tell how good it is.

    The equations E R_p R_Q = V_p W_Q, E R_p R_K = V_p W_K, E R_p U = V_p W_U over all paths p are
    E Gamma = Delta. In a machine of routings each of them is one column of E. Otherwise E is their
    least-squares solution of least norm, by the singular value decomposition in float64 on the
    host. Two kinds of machine only need the right products of queries and keys: compressed ones,
    whose keys are the tokens themselves, and those with square R_Q and R_K, where the equations
    are quadratic (`universal.square`).

    Arguments, raises: as `program`, without its warnings.
    """
    for name, transformer in (("machine", machine), ("target", target)):
        check_transformer(transformer, name)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(transformer)):
            raise ValueError(f"the {name}'s weights must be known: a program is solved on the host")
    sources = path_sources(machine) if is_routed(machine) else np.empty(0, int)
    compressed = _is_compressed(machine, target, sources)
    square = _is_square(machine)
    _check_pair(machine, target, any_head_width=compressed or square)
    # Equal logits are all it takes: the program makes up for another scale.
    factor = target.scale / machine.scale if target.scale else 0.0
    count = _equations(target)
    check_memory(f"a program of {magnitude(count)} columns", 24 * count * target.width, None)
    if compressed:
        found = _compressed(machine, target, factor, sources)
    elif machine.head_width != target.head_width:
        found = Solution(*solve_square(machine, target, factor))
    elif sources.size and _distinct(sources):
        E = np.zeros((target.width, machine.width))
        E[:, sources] = path_columns(target, factor)
        found = Solution(E, 1.0, 0.0, count, count)
    else:
        found = _least_squares(machine, target, factor)
        if square and not found.residual <= OFF:  # the products take less than both factors
            found = Solution(*solve_square(machine, target, factor))
    with np.errstate(over="ignore"):
        E = np.asarray(found.program).astype(target.dtype)
    if not np.isfinite(E).all():
        raise ValueError(
            f"the program is not finite in {E.dtype}, the target's type: its entries reach "
            f"{np.abs(found.program).max():.1e}; a machine of a larger scale, or a target of a "
            "wider type, has another"
        )
    return found._replace(program=jnp.asarray(E))


def _is_square(machine: AttentionTransformer) -> bool:
    return machine.head_width == machine.width


def _advice(machine: AttentionTransformer, target: AttentionTransformer, found: Solution) -> str:
    needed, about = _equations(target), ""
    if _is_square(machine):
        needed = square_equations(target) // target.width
        about = "with square R_Q and R_K "
    if machine.width < needed:
        return f"{about}that takes {magnitude(needed)} columns, or somewhat more"
    if found.rank < found.equations:
        return "its equations are dependent"
    if not found.residual <= OFF:
        return f"{about}the search ended in local minima: a wider machine has fewer"
    return "a wider machine has a better one"


def _equations(target: AttentionTransformer) -> int:
    kind = "residual" if target.residual else "untied"
    return machine_width(target.depth, target.heads, target.head_width, target.out_width, kind)


def _distinct(sources: np.ndarray) -> bool:
    return bool(sources.min() >= 0) and np.unique(sources).size == sources.size


def _one_head(columns: np.ndarray, out_width: int, depth: int):
    """Output (..., out), queries and keys (layers, ..., head) of the only path of one head."""
    out, rest = np.split(columns, [out_width], axis=-1)
    blocks = np.moveaxis(rest.reshape(*columns.shape[:-1], depth, 2, -1), (-3, -2), (0, 1))
    blocks = blocks[::-1]  # they come with the last layer first
    return out, blocks[:, 0], blocks[:, 1]


def _is_compressed(machine, target, sources: np.ndarray) -> bool:
    """Whether all layers read their keys from one block, as wide as the target.

    Where one layer does so by itself, queries and keys are as well those of any other machine.
    """
    if not sources.size or machine.heads > 1 or machine.residual:
        return False
    if machine.head_width != target.width or (
        _distinct(sources) and (machine.head_width == target.head_width)
    ):
        return False
    out, query, key = _one_head(sources, machine.out_width, machine.depth)
    return bool((key == key[0]).all()) and _distinct(np.r_[out, query.reshape(-1), key[0]])


def _compressed(machine, target, factor, sources: np.ndarray) -> Solution:
    """E = [I | M_0 W_Q W_K^T M_0^T | ... | M_L W_U], so that logits are x G_l x^T."""
    places = _one_head(sources, machine.out_width, machine.depth)
    out, query, key = _one_head(path_columns(target, factor), target.out_width, target.depth)
    E = np.zeros((target.width, machine.width))
    E[:, places[0]] = out
    E[:, places[1]] = np.moveaxis(query @ key.swapaxes(-1, -2), 0, 1)
    E[:, places[2][0]] = np.eye(target.width)
    count = places[0].size + places[1].size + target.width
    return Solution(E, 1.0, 0.0, count, count)


def _least_squares(machine, target, factor) -> Solution:
    count = _equations(target)
    check_memory(
        f"the equations of a program, {count} columns of {machine.width},",
        32 * count * machine.width,
        None,
    )
    Gamma, Delta = path_columns(machine), path_columns(target, factor)
    X, _, rank, sigma = scipy.linalg.lstsq(Gamma.T, Delta.T, check_finite=False)
    E = X.T
    size = np.linalg.norm(Delta)
    residual = np.linalg.norm(E @ Gamma - Delta) / (size if size else 1)
    condition = sigma[0] / sigma[-1] if rank == count else np.inf
    return Solution(E, float(condition), float(residual), int(rank), count)


def _check_pair(machine, target, *, any_head_width: bool) -> None:
    """Raises ValueError where no program could make this machine simulate the target."""
    wrong = []
    for name, what in (
        ("depth", "layers"),
        ("heads", "heads in each layer"),
        ("out_width", "columns of output"),
        ("head_width", "columns of queries and keys"),
    ):
        has, needs = getattr(machine, name), getattr(target, name)
        if has != needs and not (any_head_width and name == "head_width"):
            wrong.append(f"{needs} {what}, not {has}")
    for name in ("causal", "residual", "hardmax"):
        has, needs = getattr(machine, name), getattr(target, name)
        if has != needs:
            wrong.append(f"{name}={needs}, not {has}")
    if machine.scale == 0 and target.scale != 0:
        wrong.append("a scale other than 0")
    if wrong:
        sizes = target.depth, target.heads, target.width, target.head_width, target.out_width
        options = ['kind="residual"'] if target.residual else []
        options += [f"{name}=True" for name in ("causal", "hardmax") if getattr(target, name)]
        call = ", ".join([*map(str, sizes), *options])
        raise ValueError(
            f"the target needs a machine of {'; '.join(wrong)}: ut.sparse({call}) is one, "
            f"{magnitude(_equations(target))} columns wide"
        )
