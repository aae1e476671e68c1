"""Singular values of products of Jacobians over depth, as logarithms, and their effective ranks.

The partial product P_l = J_l ... J_1 spans more orders of magnitude than a float has digits, soon
more than it has exponents, so P_l is never formed. Two steps, both on the host in float64:

1. P_l = U diag(e^g) T times an orthogonal matrix on the right, which no singular value sees. U is
   orthogonal, g real and descending, T lower triangular and well conditioned. A layer is a QR
   decomposition of J U with columns sorted by size; QR commutes with the scaling of columns, so
   e^g enters only as differences of logarithms. A second QR step keeps T near the identity: the
   rows of T alone would collect the condition of all layers.
2. The singular values of diag(e^g) T by one-sided Jacobi on windows of g, to a relative accuracy
   of eps cond(T) each, however far they are apart.

Sources: the first step is the stabilised product of determinant quantum Monte Carlo (E. Y. Loh
and J. E. Gubernatis, 1992; sorted instead of pivoted: A. Tomas et al., 2012). Jacobi after two QR
decompositions: Z. Drmac and K. Veselic, SIAM J. Matrix Anal. Appl. 29 (2008), LAPACK's dgejsv.
QR with sorted rows: A. J. Cox and N. J. Higham (1998). The windows: derived here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.spectra.lapack import check_finite, check_matrices, cores, in_threads, routine


class Cumulative(NamedTuple):
    """Of every partial product P_l = J_l ... J_1, l = 1..L.

    Arguments:
        log_singular_values: (..., L, d) natural logarithms, descending; -inf where the singular
            value is exactly zero.
        effective_rank: (..., L) `effective_rank` of P_l; nan if P_l is zero.
        participation_ratio: (..., L) `participation_ratio` of P_l; nan if P_l is zero.

    In JAX's widest floating type, whatever the factors' is.
    """

    log_singular_values: Float[Array, "*samples layers d"]
    effective_rank: Float[Array, "*samples layers"]
    participation_ratio: Float[Array, "*samples layers"]

    @property
    def lyapunov_exponents(self) -> Float[Array, "*samples layers d"]:
        """The finite-depth Lyapunov exponents (log sigma_i of P_l) / l, in nats per layer."""
        logs = self.log_singular_values
        return logs / jnp.arange(1, logs.shape[-2] + 1, dtype=logs.dtype)[:, None]


def cumulative(Js: Float[Array, "*samples layers d d"]) -> Cumulative:
    """Singular values of the partial products P_l = J_l ... J_1, J_1 = Js[..., 0, :, :].

    Leading axes are samples, each with a product of its own; `cumulative(Js.mean(0))` is the
    product of the mean Jacobians. The two differ: the mean of products is no product of means,
    and averaging damps what varies between samples.

    The factors are taken as exact. The computed values are those of factors changed by
    c eps |J_l|, c a small multiple of d, so that log sigma_i moves by

        c eps sum_l |J_l| |(J_L ... J_{l+1})^T u_i| |J_{l-1} ... J_1 v_i| / sigma_i

    to first order, u_i and v_i its singular vectors. So a factor's own singular values below
    eps |J_l| are rounding noise of the factor, unless its rows' sizes account for them, and what
    a product shrinks below eps only to grow it back, as M^k M^-k does, is noise too. Rows or
    columns of zeros lose directions exactly: log sigma = -inf, the other values unharmed.

    Arguments:
        Js: (..., layers, d, d).

    Raises:
        ValueError: not square matrices over layers, not floating point, or a factor that is not
            finite, by its index (under a transform: nan for that sample).
        NotImplementedError: differentiated.

    Examples:
        >>> factors = jnp.stack([jnp.diag(jnp.asarray([1e3, 1e-3]))] * 200)
        >>> last = cumulative(factors).log_singular_values[-1]  # beyond the range of any float
        >>> print(jnp.round(last / jnp.log(10)).astype(int))
        [ 600 -600]
    """
    Js = check_matrices(Js, "Js")
    if Js.ndim < 3 or Js.shape[-3] == 0:
        raise ValueError(f"Js must be (..., layers, d, d), layers >= 1, got shape {Js.shape}")
    check_finite(Js)
    return Cumulative(*_cumulative(Js))


def effective_rank(singular_values: Float[Array, "*stack d"]) -> Float[Array, "*stack"]:
    """exp(-sum_i p_i log p_i), p = sigma / sum sigma: from 1 (rank one) to d (all equal).

    O. Roy and M. Vetterli, "The effective rank", EUSIPCO 2007. Of sigma, not of sigma^2.

    At a singular value of exactly zero 0 log 0 = 0, but the derivative is infinite.

    Arguments:
        singular_values: (..., d), not negative, in any order and on any scale.

    Raises:
        ValueError: negative, not finite, or all zero, where the values are known (otherwise nan).
        RuntimeError: differentiated where a singular value is zero.
    """
    return _effective_rank(_relative(singular_values), _x_log_x, jnp.exp)


def participation_ratio(singular_values: Float[Array, "*stack d"]) -> Float[Array, "*stack"]:
    """(sum sigma^2)^2 / sum sigma^4: from 1 (rank one) to d (all equal).

    Arguments:
        singular_values: (..., d), not negative, in any order and on any scale.

    Raises:
        ValueError: negative, not finite, or all zero, where the values are known (otherwise nan).
    """
    return _participation_ratio(_relative(singular_values))


def _effective_rank(relative, x_log_x, exp):
    return exp(-x_log_x(relative / relative.sum(-1, keepdims=True)).sum(-1))


def _participation_ratio(relative):
    return (relative**2).sum(-1) ** 2 / (relative**4).sum(-1)


def _relative(singular_values):
    """Singular values divided by the largest, which is a constant: neither measure sees scale."""
    sigma = jnp.asarray(singular_values)
    if sigma.ndim == 0 or sigma.shape[-1] == 0 or not jnp.issubdtype(sigma.dtype, jnp.floating):
        raise ValueError(
            f"singular_values must be (..., d) floating point, got {sigma.dtype} {sigma.shape}"
        )
    if not isinstance(sigma, jax.core.Tracer):
        known = np.asarray(sigma)
        if not (np.isfinite(known) & (known >= 0)).all():
            raise ValueError("singular_values must be finite and not negative")
        if not (known > 0).any(axis=-1).all():
            raise ValueError("singular_values are all zero: a zero matrix has no effective rank")
    sigma = sigma.astype(at_least_float32(sigma.dtype))
    return sigma / jax.lax.stop_gradient(sigma.max(axis=-1, keepdims=True))


@jax.custom_jvp
def _x_log_x(p):
    return jax.scipy.special.xlogy(p, p)


@_x_log_x.defjvp
def _(primals, tangents):
    (p,), (dp,) = primals, tangents
    p = eqx.error_if(
        p,
        p == 0,
        "effective_rank cannot be differentiated where a singular value is zero: the derivative of "
        "p log p is infinite at p = 0. Leave those out, or use participation_ratio",
    )
    return _x_log_x(p), (1 + jnp.log(p)) * dp


@jax.custom_jvp
def _cumulative(Js):
    if not isinstance(Js, jax.core.Tracer):
        return tuple(map(jnp.asarray, _products(jnp.result_type(float), Js)))
    dtype, rows = jnp.result_type(float), Js.shape[:-2]
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((*rows, Js.shape[-1]), rows, rows)]
    return tuple(
        jax.pure_callback(
            functools.partial(_products, dtype), tuple(shapes), Js, vmap_method="expand_dims"
        )
    )


@_cumulative.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "cumulative cannot be differentiated: the logarithms of singular values below the "
        "product's rounding have no derivative in floating point. Differentiate effective_rank or "
        "participation_ratio of the singular values of an explicit product instead"
    )


def _products(dtype, Js):
    """On the host: log singular values, effective rank and participation ratio."""
    Js = np.asarray(Js)
    finite = np.isfinite(Js).all(axis=(-3, -2, -1), keepdims=True)
    Js = np.where(finite, Js, 0)  # under a transform, where nothing can be raised
    samples = list(Js.reshape(-1, *Js.shape[-3:]))
    if len(samples) >= cores():
        found = in_threads(lambda sample: list(map(_log_singular_values, _graded(sample))), samples)
    else:  # few samples: their products one after the other, the layers' values in threads
        found = [in_threads(_log_singular_values, list(_graded(sample))) for sample in samples]
    logs = np.where(finite[..., 0], np.array(found).reshape(Js.shape[:-1]), np.nan)
    with np.errstate(invalid="ignore"):  # nan of a zero product
        relative = np.exp(logs - logs[..., :1])
        ranks = (
            _effective_rank(relative, lambda p: scipy.special.xlogy(p, p), np.exp),
            _participation_ratio(relative),
        )
    return tuple(result.astype(dtype) for result in (logs, *ranks))


class _Graded(NamedTuple):
    """diag(e^g) T, which has the singular values of a partial product.

    Arguments:
        width: d.
        logs: (r,) g, descending; r < d where directions were lost exactly.
        lower: (r, r) T, lower triangular and well conditioned.
    """

    width: int
    logs: np.ndarray
    lower: np.ndarray


def _graded(Js: np.ndarray) -> Iterator[_Graded]:
    """Every partial product of (layers, d, d)."""
    d = Js.shape[-1]
    U, g, T = np.eye(d), np.zeros(d), np.eye(d)
    for J in Js.astype(np.float64):
        # Room for sums above and for digits below; most factors need none.
        exponent = np.frexp(np.abs(J).max())[1] if J.any() else 0
        exponent -= np.clip(exponent, -900, 900)
        J, g = np.ldexp(J, -exponent), g + exponent * np.log(2)
        # What meets a column of zeros is lost before J mixes it with rounding.
        seen = J.any(axis=0)
        for factor in [J] if seen.all() else [np.diag(seen.astype(J.dtype)), J]:
            U, g, T = _multiply(factor, U, g, T)
        yield _Graded(d, g, T)


def _multiply(J, U, g, T):
    """J U diag(e^g) T as another such U, g, T, up to an orthogonal matrix on the right."""
    if len(g):
        U, g, M = _graded_qr(J @ U, g)
    if not len(g):  # all is zero
        return np.empty((len(J), 0)), np.empty(0), np.empty((0, 0))
    T = _lower(M @ T)
    # diag(e^g) T = W diag(e^g) with W lower triangular. g descends, so no entry of W is larger
    # than T's, and a second QR step takes out of T what the layers before left in it.
    Q, g, M = _graded_qr(_scaled(T, -g, -g), g)
    return U @ Q, g, _lower(M)


def _graded_qr(A: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, h, M with A diag(e^g) = Q diag(e^h) M: Q's columns orthonormal, h descending.

    The columns are sorted by size, and the rows of R divided by its diagonal. Sorted rows keep the
    error in every row of A relative to that row. Sorting is pivoting in advance: where it fails,
    a column being nearly in the span of those before it, the columns are pivoted in fact. A zero
    on the diagonal is then an exactly lost direction, and left out.
    """
    rows = np.argsort(-np.abs(A).max(axis=1), kind="stable")
    order = np.argsort(-(_log_norms(A) + g), kind="stable")
    Q, R = np.linalg.qr(A[np.ix_(rows, order)])
    h, M = _divided(R, g[order])
    if len(h) < len(g) or np.abs(M).max() > 100:
        Q, R, order = _pivoted_qr(A[rows], g)
        h, M = _divided(R, g[order])
    largest = np.argsort(-h, kind="stable")
    basis, mixing = np.empty((len(A), len(h))), np.empty((len(h), len(g)))
    basis[rows] = Q[:, largest]
    mixing[:, order] = M[largest]
    return basis, h[largest], mixing


def _divided(R: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """h, M with R diag(e^g) = diag(e^h) M and |M_ii| = 1, of the rows before R's first r_ii = 0."""
    diagonal = np.abs(np.diag(R))
    kept = np.argmin(diagonal) if 0 in diagonal else len(diagonal)
    h = np.log(diagonal[:kept]) + g[:kept]
    return h, _scaled(np.triu(R)[:kept], h, g)


def _scaled(A: np.ndarray, h: np.ndarray, g: np.ndarray) -> np.ndarray:
    """diag(e^-h) A diag(e^g), whose entries may be in range where the scales are not."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.sign(A) * np.exp(np.log(np.abs(A)) + (g - h[:, None]))


def _lower(A: np.ndarray) -> np.ndarray:
    """The lower triangular L of A = L Q."""
    return np.tril(np.asarray(np.linalg.qr(A.T, mode="r")).T)


def _log_norms(A: np.ndarray) -> np.ndarray:
    """log |A e_j|, in range."""
    largest = np.abs(A).max(axis=0)
    with np.errstate(divide="ignore"):
        return np.log(largest) + np.log(np.linalg.norm(A / np.where(largest, largest, 1), axis=0))


def _pivoted_qr(A: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, R and order of A[:, order] = Q R, pivoting the columns of A diag(e^g) by Householder.

    LAPACK pivots by the columns' own size and would need e^g in range.
    """
    d, n = A.shape
    Q, R, order = np.eye(d), A.copy(), np.arange(n)
    for i in range(n):
        k = i + int(np.argmax(_log_norms(R[i:, i:]) + g[order[i:]]))
        R[:, [i, k]], order[[i, k]] = R[:, [k, i]], order[[k, i]]
        largest = np.abs(R[i:, i]).max()
        if largest == 0:  # and with it all that is left
            break
        v = R[i:, i] / largest
        v[0] += np.copysign(np.linalg.norm(v), v[0])
        tau = 2 / (v @ v)
        R[i:, i:] -= tau * np.outer(v, v @ R[i:, i:])
        Q[:, i:] -= tau * np.outer(Q[:, i:] @ v, v)
    return Q[:, :n], np.triu(R[:n]), order


CORE, MARGIN = 160.0, 30.0  # nats


def _log_singular_values(product: _Graded) -> np.ndarray:
    """Of M = diag(e^g) T, descending, by windows of g that fit into the range of a float.

    Proof that a window is enough. Cut M = [[A, 0], [C, B]] after index k. For i <= k, drop the
    lower rows [C B]:

        sigma_i(A)^2 <= sigma_i(M)^2 <= sigma_i(A)^2 + |[C B]|^2,   |[C B]| <= |T| e^{g_{k+1}},

    by interlacing and Weyl's inequality for M^T M. For i > k do the same with the columns of
    M^-1 = T^-1 diag(e^-g), whose lower right block is B^-1 (indices of B as in M):

        sigma_i(B)^-2 <= sigma_i(M)^-2 <= sigma_i(B)^-2 + (|T^-1| e^{-g_k})^2.

    T moves singular values by |T| or 1 / |T^-1| at most (Ostrowski), so |log sigma_i - g_i| is
    below log cond(T), and a cut m nats away from g_i changes log sigma_i by less than
    cond(T)^2 e^{-2m} / 2: at 30 nats below eps for cond(T) < 2e5. It is seldom above 10.
    """
    d, g, T = product
    logs = np.full(d, -np.inf)
    start = 0
    while start < len(g):
        stop = np.searchsorted(-g, -(g[start] - CORE), side="right")
        window = slice(
            np.searchsorted(-g, -(g[start] + MARGIN)),
            np.searchsorted(-g, -(g[stop - 1] - MARGIN), side="right"),
        )
        middle = (g[window][0] + g[window][-1]) / 2
        values = _jacobi(np.exp(g[window] - middle)[:, None] * T[window, window])
        logs[start:stop] = middle + values[start - window.start : stop - window.start]
        start = stop
    return -np.sort(-logs)


def _jacobi(A: np.ndarray) -> np.ndarray:
    """The log singular values of A = D B, descending, to eps cond(B). A is overwritten.

    A's memory is its transpose, B^T D, in column-major order. Nothing may be out of e^(+-300).
    """
    A = np.ascontiguousarray(A)
    n = len(A)
    values, work = np.empty(n), np.empty(7 + 66 * n + n * n)
    iwork, info = np.empty(4 * n + 3, np.intc), np.zeros(1, np.intc)
    size, lwork = np.array([n], np.intc), np.array([len(work)], np.intc)
    # C: relative accuracy for B^T D. N, N: no vectors. R: |log sigma| < 354, not 708.
    options = [ctypes.c_char_p(letter) for letter in (b"C", b"N", b"N", b"R", b"N", b"N")]
    arrays = (size, size, A, size, values, A, size, A, size, work, lwork, iwork, info)
    routine("dgejsv", 19)(*options, *(array.ctypes.data for array in arrays))
    if info[0]:
        raise ArithmeticError(f"LAPACK's dgejsv did not converge (info = {info[0]})")
    return np.log(values)  # in this range dgejsv undoes its own scaling: work[0] == work[1]
