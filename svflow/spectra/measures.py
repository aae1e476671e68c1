"""Measures of a Jacobian's spectrum, and what a matrix of noise gives for each.

Axes: `stack`, any leading axes, the last of them layers; `width`, twice: J[i, j] = d y_i / d x_j.

Source: the measures of Fernando and Guitchounts, arXiv 2605.14258; the departure from normality is
Henrici's, Numer. Math. 4, 1962; effective rank: Roy and Vetterli, EUSIPCO 2007.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from svflow.dtypes import at_least_float32
from svflow.integers import is_integer
from svflow.spectra import eigenvalues, ginibre, lapack
from svflow.spectra.products import effective_rank, participation_ratio


class Measures(NamedTuple):
    r"""The spectrum of each matrix J of a stack, R = J - I, J = U diag(sigma) V^T.

    Arguments:
        eigenvalues: lambda, by decreasing modulus.
        singular_values: sigma, descending.
        complex_fraction: the share of eigenvalues with |Im lambda| > tau |lambda|.
        spectral_radius: max |lambda|.
        condition_number: sigma_1 / sigma_d, infinite for a singular matrix and nan for zero; above
            one over the rounding of J's own arithmetic (8e6 in float32) it says no more than that.
        expanding_eigenvalues, expanding_singular_values: the shares with |lambda| > 1, sigma > 1,
            by more than rounding may give of 1: d eps sigma_1, in the type they are computed in.
        henrici_departure: sqrt(|J|_F^2 - sum |lambda|^2) / |J|_F, 0 for a normal matrix.
        symmetric_part: |(J + J^T) / 2|_F^2 / |J|_F^2, 1 for a symmetric matrix.
        self_alignment: |U_k^T V_k|_F^2 / k for the `top` = k largest singular values: whether the
            directions that come out largest are those that go in largest.
        forward_alignment: |U_k^T V'_k|_F^2 / k with V' of the next matrix along the stack's last
            axis: whether what a layer makes large the next one reads; nan for the last.
        update_ratio: |R|_F / |J|_F; infinite for the zero matrix.
        effective_rank: exp of the entropy of sigma / sum sigma.
        participation_ratio: (sum sigma^2)^2 / sum sigma^4.
        top: k.
        on_host: whether LAPACK on the host computed the eigenvalues, see `backend`.
    """

    eigenvalues: Complex[Array, "*stack width"]
    singular_values: Float[Array, "*stack width"]
    complex_fraction: Float[Array, "*stack"]
    spectral_radius: Float[Array, "*stack"]
    condition_number: Float[Array, "*stack"]
    expanding_eigenvalues: Float[Array, "*stack"]
    expanding_singular_values: Float[Array, "*stack"]
    henrici_departure: Float[Array, "*stack"]
    symmetric_part: Float[Array, "*stack"]
    self_alignment: Float[Array, "*stack"]
    forward_alignment: Float[Array, "*stack"]
    update_ratio: Float[Array, "*stack"]
    effective_rank: Float[Array, "*stack"]
    participation_ratio: Float[Array, "*stack"]
    top: int
    on_host: bool

    @property
    def ginibre(self) -> dict[str, np.ndarray]:
        """Each measure's expectation for a Gaussian matrix of the same width and norm, by name."""
        return baseline(self.singular_values, int(np.ravel(self.top)[0]))

    @property
    def excess(self) -> dict[str, np.ndarray]:
        """Each measure less that expectation, by name; the condition number over it."""
        found = {name: np.asarray(getattr(self, name)) - e for name, e in self.ginibre.items()}
        condition = np.asarray(self.condition_number) / self.ginibre["condition_number"]
        return found | {"condition_number": condition}


SCALARS = Measures._fields[2:-2]
"""The names of the measures that are one number per matrix."""


def measures(
    J: Float[Array, "*stack width width"], *, top: int | None = None, tau: float = 1e-6
) -> Measures:
    """Every measure of every matrix of a stack, see `Measures`.

    Arguments:
        J: the matrices.
        top: how many singular directions the alignments compare; by default a 32nd of the width,
            at least one. By chance they are top / width.
        tau: from which relative imaginary part on an eigenvalue counts as complex.

    Derivatives: those of eigenvalues (see `eigvals`) and of singular values. Where eigenvalues are
    repeated none exists for this function as a whole; `effective_rank` and `participation_ratio`
    of singular values are then still differentiable by themselves.

    Raises:
        ValueError: what is not a stack of square real matrices, a matrix that is not finite (by
            its index), or a `top` outside 1 .. width.
        RuntimeError: differentiated where a measure has no derivative.

    Examples:
        >>> turn = measures(jnp.asarray([[0.0, -2.0], [2.0, 0.0]]))
        >>> print(turn.complex_fraction, turn.spectral_radius.round(3), turn.symmetric_part)
        1.0 2.0 0.0
        >>> shear = measures(jnp.asarray([[1.0, 9.0], [0.0, 1.0]]))
        >>> print(shear.spectral_radius, shear.henrici_departure > 0.9)  # far from normal
        1.0 True
    """
    J = lapack.check_matrices(J)
    lapack.check_finite(J)
    width = J.shape[-1]
    top = check_top(top, width)
    if not 0 <= tau < np.inf:
        raise ValueError(f"tau must be finite and not negative, got {tau}")
    J = J.astype(at_least_float32(J.dtype))
    found = _measures(J, eigenvalues.eigvals(J), *_svd(top, J), top, float(tau))
    return Measures(**found, top=top, on_host=eigenvalues.backend(J) == eigenvalues.HOST)


@functools.partial(jax.jit, static_argnames=("top", "tau"))
def _measures(J, values, U, sigma, V, top, tau):
    # Squares stay in range on a scale on which the largest entry is near one.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(J), axis=(-2, -1), keepdims=True))
    exponent = jnp.frexp(largest)[1]
    unit = jnp.ldexp(J, -exponent)
    identity = jnp.ldexp(jnp.eye(J.shape[-1], dtype=J.dtype), -exponent)
    sigmas = jnp.ldexp(sigma, -exponent[..., 0])
    squares = jnp.sum(sigmas**2, axis=-1)
    modulus = jnp.abs(values)
    departure = squares - jnp.sum(jnp.ldexp(modulus, -exponent[..., 0]) ** 2, axis=-1)
    forward = jnp.full(J.shape[:-2], jnp.nan, sigma.dtype)
    if J.ndim > 2:
        forward = forward.at[..., :-1].set(_alignment(V[..., 1:, :, :], U[..., :-1, :, :]))
    # Where J has 1 itself, as many of them would be above it as rounding likes.
    above = 1 + J.shape[-1] * jnp.finfo(J.dtype).eps.astype(J.dtype) * sigma[..., :1]
    symmetric = (unit + jnp.swapaxes(unit, -1, -2)) / 2
    return dict(
        eigenvalues=values,
        singular_values=sigma,
        complex_fraction=_share(jnp.abs(values.imag) > tau * modulus, sigma.dtype),
        spectral_radius=jnp.max(modulus, axis=-1),
        condition_number=sigma[..., 0] / sigma[..., -1],
        expanding_eigenvalues=_share(modulus > above, sigma.dtype),
        expanding_singular_values=_share(sigma > above, sigma.dtype),
        henrici_departure=_root(departure) / jnp.sqrt(squares),
        symmetric_part=jnp.sum(symmetric**2, axis=(-2, -1)) / squares,
        self_alignment=_alignment(V, U),
        forward_alignment=forward,
        update_ratio=_root(jnp.sum((unit - identity) ** 2, axis=(-2, -1))) / jnp.sqrt(squares),
        effective_rank=effective_rank(sigma),
        participation_ratio=participation_ratio(sigma),
    )


def check_top(top: int | None, width: int) -> int:
    """How many singular directions, by default a 32nd; raises ValueError outside 1 .. width."""
    if top is None:
        return max(1, width // 32)
    if not is_integer(top, 1, width):
        raise ValueError(f"top must be one of 1 .. {width}, got {top!r}")
    return int(top)


def baseline(singular_values: Float[Array, "*stack width"], top: int) -> dict[str, np.ndarray]:
    """What `svflow.spectra.ginibre` expects of each measure, at these widths and norms."""
    sigma = np.asarray(singular_values, np.float64)
    d = sigma.shape[-1]
    r = np.sqrt(np.mean(sigma**2, axis=-1))  # |J|_F / sqrt(d), the radius of the circular law
    constant = {
        "complex_fraction": ginibre.complex_fraction(d),
        "condition_number": ginibre.condition_number(d),
        "henrici_departure": ginibre.henrici_departure(d),
        "symmetric_part": ginibre.symmetric_part(d),
        "self_alignment": ginibre.self_alignment(d, top),
        "forward_alignment": ginibre.self_alignment(d, top),
        "effective_rank": ginibre.effective_rank(d),
        "participation_ratio": ginibre.participation_ratio(d),
    }
    scaled = {
        "spectral_radius": ginibre.spectral_radius(d, r),
        "expanding_eigenvalues": ginibre.expanding_eigenvalues(r),
        "expanding_singular_values": ginibre.expanding_singular_values(r),
        "update_ratio": ginibre.update_ratio(r),
    }
    found = {name: np.broadcast_to(value, r.shape) for name, value in constant.items()} | scaled
    return {name: np.asarray(found[name]) for name in SCALARS}


def _share(condition, dtype):
    return jnp.mean(condition.astype(dtype), axis=-1)


def _alignment(V, U):
    product = jnp.matmul(jnp.swapaxes(V, -1, -2), U, precision="highest")
    return jnp.sum(product**2, axis=(-2, -1)) / U.shape[-1]


@jax.custom_jvp
def _root(x):
    """sqrt(max(x, 0)): what is 0 but for rounding may be below it."""
    return jnp.sqrt(jnp.maximum(x, 0))


@_root.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    y = _root(x)
    message = "a departure or an update that is zero has no derivative: it is a norm's kink"
    return y, dx / (2 * eqx.error_if(y, y == 0, message))


_SVD = lapack.Solver(
    np.linalg.svd,
    lambda shape: [(shape, False), (shape[:1], False), (shape, False)],
    "a derivative of singular values",
    "second derivatives of singular values are not provided",
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _svd(top, J):
    """The leading left singular vectors, all singular values, the leading right vectors."""
    U, sigma, Vh = _full_svd(J)
    return U[..., :top], sigma, jnp.swapaxes(Vh[..., :top, :], -1, -2)


def _full_svd(J):
    if eigenvalues.backend(J) == eigenvalues.HOST:
        return lapack.on_host(_SVD, J)
    return tuple(jnp.linalg.svd(J))


@_svd.defjvp
def _(top, primals, tangents):
    """Singular values by u^T dJ v, which needs no gaps; subspaces by the gap below the last.

    A subspace moves out of itself only: with A = U^T dJ V, and i beyond j <= top,

        u_i . du_j = (s_j A_ij + s_i A_ji) / (s_j^2 - s_i^2),   v_i . dv_j with A transposed.

    How vectors turn within their subspace is left out: no function of the subspace sees it.
    """
    (J,), (dJ,) = primals, tangents
    U, sigma, Vh = _full_svd(J)
    V = jnp.swapaxes(Vh, -1, -2)
    with jax.default_matmul_precision("highest"):
        A = jnp.swapaxes(U, -1, -2) @ dJ @ V
        inside, outside = sigma[..., None, :top], sigma[..., top:, None]
        gap = _gap((inside - outside) * (inside + outside), sigma, top)
        below, across = A[..., top:, :top], jnp.swapaxes(A[..., :top, top:], -1, -2)
        dU = U[..., top:] @ ((inside * below + outside * across) / gap)
        dV = V[..., top:] @ ((outside * below + inside * across) / gap)
    values = (U[..., :top], sigma, V[..., :top])
    return values, (dU, jnp.diagonal(A, axis1=-2, axis2=-1), dV)


def _gap(gap, sigma, top):
    """The gaps of squares across the cut, raising where singular values at it are equal."""
    if top == sigma.shape[-1]:
        return gap
    small = sigma.shape[-1] * np.finfo(sigma.dtype).eps * sigma[..., 0]
    bad = sigma[..., top - 1] - sigma[..., top] <= small
    why = (
        f"singular values {top} and {top + 1} are equal to working precision: the subspace of the "
        f"`top` = {top} largest, and the alignments, have no derivative"
    )
    if isinstance(bad, jax.core.Tracer):
        return eqx.error_if(gap, bad.any(), why)
    if np.any(bad):
        raise RuntimeError(why)
    return gap
