r"""The normaliser of the von Mises-Fisher density and its derivatives, in any dimension.

With nu = d/2 - 1 and the Bessel function I_nu, the density C_d(kappa) exp(kappa mu . u) of u on the
unit sphere in R^d, |mu| = 1, has

    C_d(kappa) = kappa^nu / ((2 pi)^(d/2) I_nu(kappa)),   d/dkappa log C_d = -A_d(kappa),
    A_d(kappa) = I_(nu+1)(kappa) / I_nu(kappa) = E[mu . u].

Everything comes from the uniform (Debye) expansion at an order N >= 24: with S = sqrt(N^2 + k^2)
and t = N/S,

    I_N(k) ~ (2 pi S)^(-1/2) exp(S) (k / (N + S))^N sum_j U_j(t) N^-j,

written so that nothing cancels at either end of k; smaller orders follow from larger ones by the
downward recurrence r_(n-1) = k / (2n + k r_n) of the ratios r_n = I_(n+1) / I_n, which damps
errors.

Source: NIST DLMF 10.41 (U_j, V_j, the expansions), 10.29 (the recurrence); the forms without
cancellation, derived here. Mardia and Jupp, "Directional Statistics", 2000, for the density.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from svflow.dtypes import at_least_float32
from svflow.integers import is_integer

ORDER = 24  # The smallest order at which the expansion is used, and
TERMS = 11  # so many of its terms: the next is below 1e-16 from that order on.


class _Debye(NamedTuple):
    """The expansion at order N as polynomials in t, lowest power first.

    Arguments:
        order: N.
        steps: how often the recurrence goes down from N to nu.
        series: sum_j U_j(t) N^-j.
        quotient: (series(t) - series(1)) / (t - 1).
        slope: sum_j (U_j / 2 + t U_j') N^-(j+1): what the expansion of I_N' takes off.
        rest: (N slope - series / 2) / t.
    """

    order: float
    steps: int
    series: tuple[float, ...]
    quotient: tuple[float, ...]
    slope: tuple[float, ...]
    rest: tuple[float, ...]


@functools.cache
def _terms() -> list[list[Fraction]]:
    """U_0, U_1, ...: U_(j+1) = t^2 (1 - t^2) U_j' / 2 + (1/8) int_0^t (1 - 5 s^2) U_j ds."""
    terms = [[Fraction(1)]]
    for _ in range(TERMS):
        u = terms[-1]
        following = [Fraction(0)] * (len(u) + 3)
        for p, c in enumerate(u):
            following[p + 1] += c * (Fraction(p, 2) + Fraction(1, 8 * (p + 1)))
            following[p + 3] -= c * (Fraction(p, 2) + Fraction(5, 8 * (p + 3)))
        terms.append(following)
    return terms


@functools.cache
def _debye(dimension: int) -> _Debye:
    nu = Fraction(dimension, 2) - 1
    steps = max(0, math.ceil(ORDER - nu))
    order = nu + steps
    size = 3 * TERMS + 1
    series, slope = [Fraction(0)] * size, [Fraction(0)] * size
    for j, u in enumerate(_terms()[: TERMS + 1]):
        for p, c in enumerate(u):
            series[p] += c / order**j
            slope[p] += c * (Fraction(1, 2) + p) / order ** (j + 1)
    # Synthetic division by t - 1.
    quotient, carry = [], Fraction(0)
    for c in reversed(series[1:]):
        carry += c
        quotient.append(carry)
    quotient.reverse()

    def rounded(polynomial):
        kept = [float(c) for c in polynomial]
        while len(kept) > 1 and abs(kept[-1]) < 1e-18 * abs(kept[0] or 1):
            kept.pop()
        return tuple(kept)

    rest = [order * b - a / 2 for a, b in zip(series, slope)][1:]
    return _Debye(float(order), steps, *map(rounded, (series, quotient, slope, rest)))


def _value(polynomial, t):
    total = jnp.full_like(t, polynomial[-1])
    for c in reversed(polynomial[:-1]):
        total = total * t + np.asarray(c, t.dtype)
    return total


def _descend(debye: _Debye, step, state):
    """The state after `step(n, state)` for n = N, N - 1, ..., nu + 1."""
    if not debye.steps:
        return state
    orders = debye.order - np.arange(debye.steps, dtype=jax.tree.leaves(state)[0].dtype)
    return jax.lax.scan(lambda state, n: (step(n, state), None), state, orders)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _root(k, order: float):
    """sqrt(k^2 + N^2), also where the square overflows."""
    return jnp.hypot(k, order)


@_root.defjvp
def _root_jvp(order, primals, tangents):
    S = _root(*primals, order)
    return S, primals[0] / S * tangents[0]


def _capped(k):
    """k, or what is infinite to rounding and can still be added."""
    return jnp.minimum(k, _cap(k.dtype))


def _cap(dtype) -> float:
    return float(jnp.finfo(dtype).max) / 8


def _small(k, debye):
    """The part of A_(2N+2)(k) that is small: A = k / (N + S) - this."""
    S = _root(k, debye.order)
    t = debye.order / S
    return k / S * t * _value(debye.slope, t) / _value(debye.series, t)


@functools.partial(jax.jit, static_argnums=0)
def _ratio(dimension: int, k):
    """A_d(k)."""
    debye, k = _debye(dimension), _capped(k)
    r = k / (debye.order + _root(k, debye.order)) - _small(k, debye)
    return jnp.clip(_descend(debye, lambda n, r: k / (2 * n + k * r), r), 0, 1)


@functools.partial(jax.jit, static_argnums=0)
def _ratio_slope(dimension: int, k):
    """A_d'(k), by the derivative of each step: from the Riccati equation it would cancel."""
    debye, all_k = _debye(dimension), _capped(k)
    # For k >> N each step halves k^2 r' and keeps its error; there r' comes from the tail.
    border = 2 * debye.order
    k, far = jnp.minimum(all_k, border), jnp.maximum(all_k, border)
    S = _root(k, debye.order)
    small, slope = jax.jvp(lambda k: _small(k, debye), (k,), (jnp.ones_like(k),))

    def down(n, state):
        r, dr = state
        below = 2 * n + k * r
        return k / below, (2 * n - k * k * dr) / (below * below)

    top = k / (debye.order + S) - small, debye.order / (S * (debye.order + S)) - slope
    _, dr = _descend(debye, down, top)
    w, dw = jax.jvp(lambda k: _tail(k, debye), (far,), (jnp.ones_like(k),))
    tail = ((dimension - 1) / 2 - dw + 2 * w / far) / far / far
    return jnp.where(all_k > border, tail, dr)


def _tail(k, debye):
    """w_n of r_n = 1 - (n + 1/2) / k - w_n / k^2, which is bounded for large k."""
    N = debye.order
    S = _root(k, N)
    t = N / S
    rest = (k / S) ** 2 * _value(debye.rest, t) / _value(debye.series, t)
    w = k * (t * rest - N * N / (S + k) - t * t / 2)

    def down(n, w):
        a = n - 0.5
        return -(w + a * (a - w / k)) / (1 + (a - w / k) / k)

    return _descend(debye, down, w)


@functools.partial(jax.jit, static_argnums=0)
def _growth(dimension: int, k):
    """log C_d(0) - log C_d(k)."""
    debye, all_k = _debye(dimension), k
    N, k = debye.order, _capped(k)
    S = _root(k, N)
    rise = k * (k / (N + S))  # S - N
    at_one = np.asarray(sum(debye.series), S.dtype)
    correction = -(rise / S) * _value(debye.quotient, N / S) / at_one
    total = (rise - N * jnp.log1p(rise / (2 * N)) - jnp.log1p(rise / N) / 2) + jnp.log1p(correction)

    def down(n, state):
        total, r = state
        return total + jnp.log1p(k * r / (2 * n)), k / (2 * n + k * r)

    total = _descend(debye, down, (total, k / (N + S) - _small(k, debye)))[0]
    return jnp.where(all_k > _cap(k.dtype), all_k, total)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cumulant(dimension, k):
    return _growth(dimension, k)


@_cumulant.defjvp
def _cumulant_jvp(dimension, primals, tangents):
    return _cumulant(dimension, *primals), _bessel_ratio(dimension, *primals) * tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bessel_ratio(dimension, k):
    return _ratio(dimension, k)


@_bessel_ratio.defjvp
def _bessel_ratio_jvp(dimension, primals, tangents):
    return _bessel_ratio(dimension, *primals), _ratio_slope(dimension, *primals) * tangents[0]


def cumulant(
    dimension: int, concentration: Float[ArrayLike, "*shape"], /
) -> Float[Array, "*shape"]:
    r"""log E[exp(kappa mu . u)] over uniform u on the unit sphere: log C_d(0) - log C_d(kappa).

    It is about kappa^2 / (2d) for kappa much less than d and kappa for much more. To machine
    precision relative to itself (1e-15 in float64), which log C_d is not where that crosses zero:
    what compares concentrations, as a posterior does, takes this. So are its derivative, the
    Bessel ratio, and (to 50 roundings) the second one.

    Arguments:
        dimension: d >= 2, an int.
        concentration: kappa >= 0, also infinite; under jit, a negative one gives nan.

    Raises:
        ValueError: a dimension that is not an int of at least 2, a concentration that is negative
            or no real number.
    """
    return _cumulant(*_checked(dimension, concentration))


def log_normaliser(
    dimension: int, concentration: Float[ArrayLike, "*shape"], /
) -> Float[Array, "*shape"]:
    r"""log C_d(kappa) of the density C_d(kappa) exp(kappa mu . u) on the unit sphere in R^d.

    C_d(0) is one over the sphere's area, Gamma(d/2) / (2 pi^(d/2)). The error is a few units of
    rounding of |log C_d(0)| + kappa. Arguments and errors as those of `cumulant`.
    """
    dimension, k = _checked(dimension, concentration)
    return np.asarray(log_uniform(dimension), k.dtype) - _cumulant(dimension, k)


def bessel_ratio(
    dimension: int, concentration: Float[ArrayLike, "*shape"], /
) -> Float[Array, "*shape"]:
    r"""A_d(kappa) = I_(d/2)(kappa) / I_(d/2-1)(kappa), the mean of mu . u, in [0, 1].

    It solves A' = 1 - A^2 - (d - 1) A / kappa. Arguments and errors as those of `cumulant`.
    """
    return _bessel_ratio(*_checked(dimension, concentration))


def log_uniform(dimension: int) -> float:
    """log C_d(0): less the logarithm of the area of the unit sphere in R^d."""
    return math.lgamma(dimension / 2) - math.log(2) - dimension / 2 * math.log(math.pi)


def _checked(dimension: int, concentration: Any) -> tuple[int, Array]:
    if not is_integer(dimension):
        raise ValueError(f"the dimension must be an int, got {dimension!r}")
    if dimension < 2:
        raise ValueError(f"a sphere needs a dimension of at least 2, got {dimension}")
    check_concentrations(concentration)
    k = jnp.asarray(concentration)
    if not jnp.issubdtype(k.dtype, jnp.floating):
        k = k.astype(jnp.result_type(float))
    k = k.astype(at_least_float32(k.dtype))
    return int(dimension), jnp.where(k < 0, jnp.nan, k)


def check_concentrations(concentration: Any) -> None:
    """Raises ValueError for concentrations that are no real numbers or, where known, negative."""
    traced = isinstance(concentration, jax.core.Tracer)
    values = concentration if traced else np.asarray(concentration)
    if not any(jnp.issubdtype(values.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise ValueError(f"a concentration must be a real number, got {values.dtype}")
    if traced:
        return
    if np.any(values < 0):
        raise ValueError(f"a concentration must not be negative, got {values.min()}")
