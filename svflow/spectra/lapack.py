"""LAPACK on stacks of matrices: on the host, in float64, one matrix per thread.

What JAX has no kernel for (real Schur forms, nonsymmetric eigenvalues on most accelerators), or
runs one matrix after another, goes through here. float64 costs no more than float32 in these
solvers at the sizes where they matter, so the result is that of the matrix as given, rounded once.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg.cython_lapack
import threadpoolctl
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32


class Solver(NamedTuple):
    """A function of one matrix, and what comes out of it.

    Arguments:
        solve: a float64 NumPy matrix to a tuple of NumPy arrays, without the GIL.
        outputs: the shapes of the square matrix's axes to the shape of each output and whether
            it is complex.
        name: of what it computes, in messages.
        derivative: why it has none.
    """

    solve: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    outputs: Callable[[tuple[int, ...]], Sequence[tuple[tuple[int, ...], bool]]]
    name: str
    derivative: str


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _blas() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """[function(item) for item in items] in threads that share the cores, BLAS included.

    LAPACK's nonsymmetric solvers gain little from a threaded BLAS, so the cores go to different
    matrices first.
    """
    workers = max(1, min(len(items), cores()))
    if workers == 1:
        return [function(item) for item in items]
    with (
        _blas().limit(limits=max(1, cores() // workers), user_api="blas"),
        ThreadPoolExecutor(workers) as pool,
    ):
        return list(pool.map(function, items))


@functools.cache
def routine(name: str, arguments: int) -> Callable[..., None]:
    """A routine of SciPy's LAPACK by pointers, called without the GIL, which SciPy's own hold."""
    capsule = scipy.linalg.cython_lapack.__pyx_capi__[name]
    api = ctypes.pythonapi
    label = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    types = [ctypes.c_void_p] * arguments
    return ctypes.CFUNCTYPE(None, *types)(pointer(capsule, label(capsule)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def on_host(solver: Solver, J: Float[Array, "*stack n m"]) -> tuple[Array, ...]:
    """The solver's outputs for every matrix of a stack, each with the stack's axes in front.

    Under a JAX transform it is a callback to the host.

    Raises:
        ValueError: a matrix that is not finite, by its index, where the values are known.
        NotImplementedError: differentiated.
    """
    if not isinstance(J, jax.core.Tracer):
        check_finite(J)
        return tuple(map(jnp.asarray, _solve(solver, np.asarray(J))))
    dtypes = _dtypes(J.dtype)
    shapes = [
        jax.ShapeDtypeStruct((*J.shape[:-2], *shape), dtypes[is_complex])
        for shape, is_complex in solver.outputs(J.shape[-2:])
    ]
    return tuple(
        jax.pure_callback(
            functools.partial(_solve, solver), tuple(shapes), J, vmap_method="expand_dims"
        )
    )


@on_host.defjvp
def _(solver, primals, tangents):
    raise NotImplementedError(f"{solver.name} cannot be differentiated: {solver.derivative}")


def _dtypes(dtype) -> tuple[Any, Any]:
    real = at_least_float32(dtype)
    return real, np.result_type(real, np.complex64)


def _solve(solver, J):
    J = np.asarray(J)
    dtypes = _dtypes(J.dtype)
    stack, shape = J.shape[:-2], J.shape[-2:]

    def one(matrix):
        matrix = np.asarray(matrix, np.float64)
        if not np.isfinite(matrix).all():  # under a transform, where nothing can be raised
            return None
        return solver.solve(matrix)

    found = in_threads(one, list(J.reshape(-1, *shape)))
    results = []
    for place, (out, is_complex) in enumerate(solver.outputs(shape)):
        result = np.full((len(found), *out), np.nan, dtypes[is_complex])
        for row, outputs in zip(result, found):
            if outputs is not None:
                row[...] = outputs[place]
        results.append(result.reshape(*stack, *out))
    return tuple(results)


def check_matrices(J: Any, name: str = "J", *, square: bool = True) -> Float[Array, "*stack n m"]:
    """J as a floating-point array of at least two axes, the last two equal.

    Raises:
        ValueError: another shape or type, or without values.
    """
    J = jnp.asarray(J)
    if J.ndim < 2 or (square and J.shape[-1] != J.shape[-2]) or 0 in J.shape[-2:]:
        kind = "square matrices" if square else "matrices"
        raise ValueError(f"{name} must be {kind}, (..., d, d), got shape {J.shape}")
    if not jnp.issubdtype(J.dtype, jnp.floating):
        raise ValueError(f"{name} must be real floating point, got {J.dtype}")
    return J


def check_finite(J: Any, name: str = "J") -> None:
    """Raises ValueError with the index of the first matrix that is not finite, if it is known."""
    if isinstance(J, jax.core.Tracer):
        return
    # In NumPy: within a trace JAX would stage what it does to a known array as well.
    finite = np.isfinite(np.asarray(J)).all(axis=(-2, -1))
    if not finite.all():
        index = np.argwhere(~finite)[0].tolist()
        where = f"{name}{index}" if index else name
        raise ValueError(f"{where} is not finite")
