"""Real Schur forms: the normal part of a matrix, and the sweep from it back to the matrix.

Axes: `stack`, any leading axes; `width`, of a square matrix, d in formulas.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from svflow.spectra.lapack import Solver, check_matrices, on_host, routine


class SchurParts(NamedTuple):
    """J = Z (D + N) Z^T, in the type of J or float32 if that is narrower.

    Arguments:
        basis: (..., d, d) Z, orthogonal.
        normal: (..., d, d) D, block diagonal and normal, with the eigenvalues of J.
        departure: (..., d, d) N, zero below the diagonal but within 2x2 blocks.
    """

    basis: Float[Array, "*stack width width"]
    normal: Float[Array, "*stack width width"]
    departure: Float[Array, "*stack width width"]


def schur_parts(J: Float[Array, "*stack width width"]) -> SchurParts:
    """The real Schur form J = Z T Z^T with T = D + N, D the normal part of T.

    T is upper triangular up to 2x2 blocks on its diagonal, one for each complex pair a +- iw of
    eigenvalues. LAPACK makes each of them [[a, b], [c, a]] with bc < 0, so w^2 = |bc|, and D has
    [[a, w], [-w, a]] in its place, w with the sign of b. Keeping only the diagonal of a complex
    Schur form would give a normal matrix with the same eigenvalues too, but not a real one: the
    two columns of its basis that belong to a conjugate pair are not conjugate.

    The blocks of D are J's own; their order is LAPACK's, and Z D Z^T depends on it as well.

    Arguments:
        J: (..., d, d) real matrices. They are factorised in float64 on the host, and the outcome
            is rounded to their type.

    Raises:
        ValueError: what is not a stack of square real matrices, or outside of a transform (where
            it gives nan) one that is not finite, by its index.
        NotImplementedError: differentiated.

    Source: Golub and Van Loan, Matrix Computations, 4th ed., theorem 7.4.1; LAPACK's DLANV2.
    """
    return SchurParts(*on_host(_SCHUR, check_matrices(J)))


def schur_normal(
    J: Float[Array, "*stack width width"], amount: Float[ArrayLike, ""] = 0.0
) -> Float[Array, "*stack width width"]:
    """Z (D + amount N) Z^T, with `schur_parts`: J with its departure from normality scaled.

    0 gives a normal matrix with the eigenvalues of J, 1 gives J. In between the matrix is linear
    in the amount t; real eigenvalues and the real parts of all are those of J, but the imaginary
    parts are only at the two ends: the block [[a, ws], [-w/s, a]] of T has a +- iw, the block of
    the sweep has, in the place of w^2,

        w^2 (1 + t (1 - t) (s - 1)^2 / s).

    To sweep without factorising again, call `jax.vmap(schur_normal, (None, 0))(J, amounts)`.

    Arguments:
        J: (..., d, d) real matrices.
        amount: a real scalar, the share of N that stays. Derivatives with respect to it exist,
            with respect to J they do not.

    Raises:
        ValueError: as `schur_parts`, or an amount that is not a scalar.
        NotImplementedError: differentiated with respect to J.

    Source: derived here.

    Examples:
        >>> print(schur_normal(jnp.asarray([[1.0, 9.0], [0.0, 2.0]])))
        [[1. 0.]
         [0. 2.]]
    """
    if jnp.ndim(amount):
        raise ValueError(f"amount must be a scalar, got shape {jnp.shape(amount)}")
    basis, normal, departure = schur_parts(J)
    return rotated(basis, normal + jnp.asarray(amount, normal.dtype) * departure)


def rotated(
    Q: Float[Array, "*stack width width"], M: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """Q M Q^T."""
    return jnp.einsum("...ij,...jk,...lk->...il", Q, M, Q, precision=jax.lax.Precision.HIGHEST)


def _dgees(J):
    """Z and T of J = Z T Z^T by LAPACK."""
    n = len(J)
    T, Z = np.array(J, np.float64, order="F"), np.empty((n, n), order="F")
    real, imaginary, work = np.empty(n), np.empty(n), np.empty(66 * n)
    size, lwork = np.array([n], np.intc), np.array([len(work)], np.intc)
    selected, info = np.zeros(1, np.intc), np.zeros(1, np.intc)
    options = [ctypes.c_char_p(letter) for letter in (b"V", b"N")]  # Z too, in any order
    arrays = (size, T, size, selected, real, imaginary, Z, size, work, lwork)
    pointers = [array.ctypes.data for array in arrays]
    routine("dgees", 15)(*options, None, *pointers, None, info.ctypes.data)
    if info[0]:
        raise ArithmeticError(f"LAPACK's dgees did not converge (info = {info[0]})")
    return Z, T


def _solve(J):
    Z, T = _dgees(J)
    b, c = np.diag(T, 1), np.diag(T, -1)
    # Between blocks c, and so w, is 0; the product bc could leave the range of floats.
    w = np.sign(b) * np.sqrt(np.abs(b)) * np.sqrt(np.abs(c))
    D = np.diag(np.diag(T)) + np.diag(w, 1) - np.diag(w, -1)
    return Z, D, T - D


_SCHUR = Solver(
    solve=_solve,
    outputs=lambda shape: [(shape, False)] * 3,
    name="the real Schur form",
    derivative="its basis depends on the order of the eigenvalues, and is no function of J alone",
)
