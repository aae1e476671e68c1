r"""Programs for machines whose R_Q and R_K are square.

Only the products of queries and keys matter: the logits of a machine with R_Q, R_K (m x m) are
those of the target if, for every layer and head and every two paths p and p' before it,

    scale_M E R_p R_Q R_K^T R_p'^T E^T = scale_T V_p W_Q W_K^T V_p'^T,

quadratic equations in E; the output's are linear, E R_p U = V_p W_U. They are solved together by
the method of Levenberg and Marquardt, from Gaussian starts: some of them end in a local minimum.

Axes: `paths`; `width`; `machine`, the state of the machine.

Source: derived here, after Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optimistix

from svflow.memory import check_memory
from universal.maps import matrices

STEPS = 500
STARTS = 5
OFF = 1e-9
"""The relative residual up to which equations count as solved."""


def solve_square(machine, target, factor: float):
    """E, the condition number, the relative residual, the rank and the number of equations.

    Arguments:
        machine, target: of the same depth and heads.
        factor: scale_T / scale_M.

    Raises:
        MemoryError: a Jacobian that does not fit.
    """
    d, m = target.width, machine.width
    equations = square_equations(target)
    check_memory(
        f"the Jacobian of a program's {equations} equations in {d * m} unknowns",
        8 * 4 * equations * d * m,
        None,
    )
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        wanted = _wanted(jnp.eye(d), _arrays(target), target.residual, jnp.asarray(factor))
        args = (_arrays(machine), wanted)
        function = _Mismatch(machine.residual)
        solver: Any = optimistix.LevenbergMarquardt(rtol=1e-13, atol=1e-13)
        size = np.linalg.norm(np.asarray(wanted)) or 1.0
        residual = np.inf
        for seed in range(STARTS):
            start = jnp.asarray(np.random.default_rng(seed).normal(size=(d, m)))
            end: Any = optimistix.least_squares(
                function, solver, start, args, max_steps=STEPS, throw=False
            )
            off = float(np.linalg.norm(np.asarray(function(end.value, args))) / size)
            if seed == 0 or off < residual:
                best, residual = end.value, off
            if residual <= OFF:
                break
        E, J = np.asarray(best), np.asarray(_jacobian(function, best, args))
    sigma = np.linalg.svd(J.reshape(equations, d * m), compute_uv=False)
    rank = int(np.sum(sigma > sigma[0] * max(equations, d * m) * np.finfo(np.float64).eps))
    condition = float(sigma[0] / sigma[-1]) if rank == equations else np.inf
    return E, condition, residual, rank, equations


def square_equations(target) -> int:
    """The number of equations: of every two paths before each layer, and of the outputs."""
    paths, d = target.heads + target.residual, target.width
    pairs = sum(paths ** (2 * layer) for layer in range(target.depth))
    return d * (d * target.heads * pairs + target.out_width * paths**target.depth)


class _Mismatch:
    """What is left of the equations: a function that equals its like, so it compiles once."""

    def __init__(self, residual: bool):
        self.residual = residual

    def __call__(self, E, args):
        arrays, wanted = args
        return _products(E, arrays, self.residual, 1.0) - wanted

    def __eq__(self, other):
        return isinstance(other, _Mismatch) and self.residual == other.residual

    def __hash__(self):
        return hash((_Mismatch, self.residual))


def _arrays(transformer):
    """Query, key and value of each layer, and the unembedding, in float64."""
    maps = transformer.query, transformer.key, transformer.value
    layers = [
        tuple(jnp.asarray(matrices(kernel, layer)) for kernel in maps)
        for layer in range(transformer.depth)
    ]
    return layers, jnp.asarray(matrices(transformer.unembedding, base=2))


def _products(E, arrays, residual: bool, factor):
    """Every product of a query and a key, times a factor, and every output, in one vector."""
    layers, unembed = arrays
    paths, found = E[None], []
    for query, key, value in layers:
        rows = paths.reshape(-1, paths.shape[-1])
        found.append(factor * (rows @ query) @ (rows @ key).swapaxes(-1, -2))
        longer = (paths[:, None] @ value).reshape(-1, *paths.shape[1:])
        paths = jnp.concatenate([paths, longer]) if residual else longer
    found.append(paths @ unembed)
    return jnp.concatenate([part.reshape(-1) for part in found])


_wanted = jax.jit(_products, static_argnums=2)


@functools.partial(jax.jit, static_argnums=0)
def _jacobian(function, E, args):
    return jax.jacrev(function)(E, args)
