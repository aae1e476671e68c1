"""Eigenvalues of nonsymmetric matrices, and the principal eigenvector, with their derivatives."""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Complex, Float

from svflow.spectra import lapack

HOST = "LAPACK on the host"


def eigvals(J: Float[Array, "*stack width width"]) -> Complex[Array, "*stack width"]:
    r"""The eigenvalues of each matrix of a stack, by decreasing modulus.

    Conjugate pairs stand together, the one with positive imaginary part first. On the CPU it is
    LAPACK's geev in float64, the matrices in parallel threads; on an accelerator the native solver
    where JAX has one, otherwise the host: `backend` says which.

    The derivative is d lambda_i = y_i^H dJ x_i / y_i^H x_i, with the left and right eigenvectors;
    it exists for simple eigenvalues.

    Raises:
        ValueError: what is not a stack of square real matrices, or is not finite (by its index,
            where its values are known; under jit the eigenvalues are nan).
        RuntimeError: differentiated where an eigenvalue is repeated to working precision.

    Examples:
        >>> print(eigvals(jnp.asarray([[0.0, -2.0], [2.0, 0.0]])))
        [0.+2.j 0.-2.j]
    """
    J = lapack.check_matrices(J)
    lapack.check_finite(J)
    return _eigvals(J)


def backend(J: Float[Array, "*stack width width"]) -> str:
    """What computes the eigenvalues of an array: `HOST` or the name of the array's platform."""
    return platform(J) if _native(platform(J)) else HOST


@functools.cache
def _native(platform: str) -> bool:
    """Whether JAX has a nonsymmetric eigensolver for an accelerator."""
    if platform == "cpu":
        return False
    one = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    try:
        jax.jit(jnp.linalg.eigvals).trace(one).lower(lowering_platforms=(platform,))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


class Principal(NamedTuple):
    """An eigenpair J x = value x.

    Arguments:
        value: () complex; of a conjugate pair, the one with positive imaginary part.
        vector: (width,) complex, of unit norm, its entry of largest modulus real and positive.
    """

    value: Complex[Array, "*stack"]
    vector: Complex[Array, "*stack width"]


def principal(J: Float[Array, "*stack width width"], *, shift: float = 0.0) -> Principal:
    r"""The eigenpair with the largest |shift + lambda| of each matrix.

    With shift 0 it is the dominant pair of x -> J x; with shift 1, of the residual map
    x -> x + J x.

    Its derivative is that of the implicit equations J x = lambda x, x^H x = 1, the phase kept:

        [ J - lambda I   -x ] [ dx      ]   [ -dJ x ]
        [ x^H             0 ] [ dlambda ] = [   0   ]

    which has a solution for a simple eigenvalue.

    Raises:
        ValueError: as `eigvals`.
        RuntimeError: differentiated where the eigenvalue is repeated to working precision.
    """
    J = lapack.check_matrices(J)
    lapack.check_finite(J)
    if not np.isfinite(shift):
        raise ValueError(f"shift must be finite, got {shift}")
    return Principal(*_principal(float(shift), J))


def _solved(solve, matrix):
    try:
        return solve(matrix)
    except np.linalg.LinAlgError as error:
        raise FloatingPointError(f"LAPACK's geev did not converge: {error}") from error


def _geev(matrix):
    return (_solved(np.linalg.eigvals, matrix),)


def _geev_vectors(matrix):
    """Eigenvalues, dual left and unit right eigenvectors in columns, and how simple each is.

    The dual ones have y^H x = 1. `simple` is the distance to the nearest other eigenvalue and
    y^H x of unit vectors, the lesser, in units of what rounding does to them: above 1 for a simple
    eigenvalue.
    """
    # Scaled by a power of two: SciPy's geev scales too, and does not undo it.
    exponent = int(np.frexp(np.abs(matrix).max())[1])
    matrix = np.ldexp(matrix, -exponent)
    values, left, right = _solved(lambda a: scipy.linalg.eig(a, left=True, right=True), matrix)
    overlap = np.sum(left.conj() * right, axis=0)
    apart = np.abs(values[:, None] - values)
    np.fill_diagonal(apart, np.inf)
    size = np.linalg.norm(matrix)
    simple = np.minimum(apart.min(axis=1) / (size or 1), np.abs(overlap))
    with np.errstate(divide="ignore", invalid="ignore"):
        dual = left / overlap.conj()
    values.real, values.imag = (np.ldexp(part, exponent) for part in (values.real, values.imag))
    return values, dual, right, simple / (len(matrix) * np.finfo(np.float64).eps)


_VALUES = lapack.Solver(_geev, lambda shape: [(shape[:1], True)], "eigvals", "see eigvals")
_VECTORS = lapack.Solver(
    _geev_vectors,
    lambda shape: [(shape[:1], True), (shape, True), (shape, True), (shape[:1], False)],
    "a derivative of eigenvalues",
    "second derivatives of nonsymmetric eigenproblems are not provided",
)


@jax.custom_jvp
def _eigvals(J):
    values = jnp.linalg.eigvals(J) if _native(platform(J)) else lapack.on_host(_VALUES, J)[0]
    # Moduli of a conjugate pair are exactly equal: a stable sort leaves pairs together.
    order = jnp.argsort(-jnp.abs(values), axis=-1, stable=True)
    return jnp.take_along_axis(values, order, axis=-1)


@_eigvals.defjvp
def _(primals, tangents):
    (J,), (dJ,) = primals, tangents
    values, dual, right, simple = lapack.on_host(_VECTORS, J)
    dual = _simple(dual, simple, values)
    order = jnp.argsort(-jnp.abs(values), axis=-1, stable=True)
    with jax.default_matmul_precision("highest"):
        moved = jnp.sum(jnp.conj(dual) * (dJ.astype(right.dtype) @ right), axis=-2)
    return tuple(jnp.take_along_axis(a, order, axis=-1) for a in (values, moved))


def _simple(dual, simple, values):
    """The dual vectors, raising where an eigenvalue is not simple to working precision."""
    why = (
        "is repeated to working precision: it has no derivative. Differentiate a symmetric "
        "function of the matrix, such as its trace or singular values, instead"
    )
    bad = ~(simple > 1)
    if not isinstance(bad, jax.core.Tracer):
        if bad.any():
            place = tuple(np.argwhere(np.asarray(bad))[0].tolist())
            where = f" of J{list(place[:-1])}" if len(place) > 1 else ""
            raise RuntimeError(f"the eigenvalue {complex(values[place]):.6g}{where} {why}")
        return dual
    return eqx.error_if(dual, jnp.any(bad), f"an eigenvalue {why}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _principal(shift, J):
    return _principal_full(shift, J)[:2]


def _principal_full(shift, J):
    values, dual, right, simple = lapack.on_host(_VECTORS, J)
    place = _largest(shift, values)
    value, x, y = _at(values, place), _at(right, place), _at(dual, place)
    largest = jnp.argmax(jnp.abs(x), axis=-1, keepdims=True)
    entry = jnp.take_along_axis(x, largest, axis=-1)
    phase = jnp.conj(entry) / jnp.abs(entry).astype(x.dtype)
    return value, x * phase, y * phase, largest, _at(simple, place)


def _largest(shift, values):
    """Where |shift + lambda| is largest; of a pair the first, with positive imaginary part."""
    return jnp.argmax(jnp.abs(values + jnp.asarray(shift, values.dtype)), axis=-1)


def _at(array, place):
    """Entry or column `place` of each member of a stack."""
    if array.ndim == place.ndim + 1:
        return jnp.take_along_axis(array, place[..., None], axis=-1)[..., 0]
    return jnp.take_along_axis(array, place[..., None, None], axis=-1)[..., 0]


@_principal.defjvp
def _(shift, primals, tangents):
    (J,), (dJ,) = primals, tangents
    value, x, y, largest, simple = _principal_full(shift, J)
    y = _simple(y, simple[..., None], value[..., None])
    width = x.shape[-1]
    with jax.default_matmul_precision("highest"):
        moved = (dJ.astype(x.dtype) @ x[..., None])[..., 0]
        dvalue = jnp.sum(jnp.conj(y) * moved, axis=-1, keepdims=True)
        shifted = J.astype(x.dtype) - value[..., None, None] * jnp.eye(width, dtype=x.dtype)
        bordered = jnp.concatenate([shifted, -x[..., None]], axis=-1)
        last = jnp.concatenate([jnp.conj(x), jnp.zeros_like(x[..., :1])], axis=-1)
        bordered = jnp.concatenate([bordered, last[..., None, :]], axis=-2)
        right_side = jnp.concatenate([-moved, jnp.zeros_like(x[..., :1])], axis=-1)
        dx = jnp.linalg.solve(bordered, right_side[..., None])[..., :width, 0]
    # The solution keeps x^H dx = 0; the phase convention keeps the largest entry real.
    turned = jnp.take_along_axis(dx, largest, axis=-1).imag
    entry = jnp.take_along_axis(x, largest, axis=-1).real
    dx = dx - (jax.lax.complex(jnp.zeros_like(turned), turned / entry)) * x
    return (value, x), (dvalue[..., 0], dx)


def platform(J) -> str:
    """Where an array is; under a transform, where its values will be."""
    if isinstance(J, jax.core.Tracer):
        return jax.default_backend()
    return min(jnp.asarray(J).devices(), key=lambda device: device.id).platform
