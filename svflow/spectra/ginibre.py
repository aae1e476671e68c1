"""What each spectral measure is for a matrix of noise: the baselines of a real Ginibre matrix.

J = F G / |G| is d x d, G with independent standard normal entries. J's eigenvalues fill a disc of
radius r = F / sqrt(d) (the circular law), and its singular values a quarter circle of radius 2r.
G / |G| and |G| are independent, so that the expectation of a ratio such as |G + G^T|^2 / |G|^2 is
the ratio of the expectations.

A function takes the width d, at least 1, where the measure depends on it, and the radius r >= 0, a
number or an array; anything else raises a ValueError. They are NumPy in float64, without
derivatives. "Exact" is at every d; norms are Frobenius norms.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy import integrate, special

from svflow.integers import is_integer


def real_eigenvalues(d: int) -> float:
    """The expected number of real eigenvalues, exact:

        1 + sqrt(2) sum_{k=1}^{(d-1)/2} (4k-3)!!/(4k-2)!!  for odd d,
        sqrt(2) sum_{k=0}^{d/2-1} (4k-1)!!/(4k)!!  for even d,

    about sqrt(2d/pi) + 1/2. Both sums are over binom(2m, m) / 4^m, m = d - 2, d - 4, ... >= 0.

    Source: Edelman, Kostlan and Shub 1994, "How many eigenvalues of a random matrix are real?".
    """
    m = np.arange(1, _width(d))
    terms = np.cumprod(np.concatenate([[1.0], (2 * m - 1) / (2 * m)]))[:-1]
    return float(d % 2 + np.sqrt(2) * terms[::-2].sum())


def complex_fraction(d: int) -> float:
    """The expected share of eigenvalues that are not real, exact: 1 - `real_eigenvalues` / d.

    About 1 - sqrt(2 / (pi d)) - 1 / (2d).
    """
    return 1 - real_eigenvalues(d) / d


def complex_fraction_deviation(d: int) -> float:
    """The standard deviation of that share: sqrt((2 - sqrt(2)) E) / d, E = `real_eigenvalues`.

    To leading order, of the variance of the number of real eigenvalues; exact at d = 1, where it is
    0, and at d = 2, where that number is 0 or 2.

    Source: Forrester and Nagao 2007, "Eigenvalue statistics of the real Ginibre ensemble".
    """
    return float(np.sqrt((2 - np.sqrt(2)) * real_eigenvalues(d)) / d) if _width(d) > 1 else 0.0


def spectral_radius(d: int, r: Float[ArrayLike, "*radii"] = 1.0) -> Float[np.ndarray, "*radii"]:
    """The expected largest |lambda|: r to leading order, here with the correction at finite d.

    The squared moduli of a complex Ginibre matrix's eigenvalues are independent Gamma(k) variables,
    k = 1..d. Of a real one's, the complex come in pairs, so that there are half as many to choose
    from, and the real are missing among them. With N(u) the expected number of real eigenvalues
    outside of [-u, u],

        P(max |lambda(G)| < u) = (prod_k P(Gamma(k) < u^2) e^{-N(u)})^{1/2}.

    An approximation: by Monte Carlo it is 0.5 % low at d = 16 and 0.1 to 0.2 % at 64 and 128, where
    r is 6.4, 5.2 and 4.4 % low.

    Source: Kostlan 1992 for the moduli; Edelman, Kostlan and Shub 1994, corollary 4.3, for the
    density of the real eigenvalues; the combination is derived here. Its limit is Gumbel's law, as
    in Rider and Sinclair 2014.
    """
    if _width(d) == 1:
        return _radius(r)
    u = np.sqrt(d) + np.linspace(max(-np.sqrt(d), -3), 4, 400)
    reals = special.gammaincc(d - 1, u**2) / np.sqrt(2 * np.pi) + special.gammainc(
        (d - 1) / 2, u**2 / 2
    ) * np.exp(special.xlogy(d - 1, u) - u**2 / 2 - special.gammaln(d / 2) - d / 2 * np.log(2))
    outside = 2 * integrate.cumulative_simpson(reals[::-1], x=-u[::-1], initial=0)[::-1]
    moduli = special.gammainc(np.arange(1, d + 1)[:, None], u**2)
    below = np.sqrt(np.prod(moduli, axis=0) * np.exp(-outside))
    largest = u[0] + integrate.simpson(1 - below, x=u)
    return _radius(r) * np.sqrt(d) * largest / _frobenius(d)


def expanding_eigenvalues(r: Float[ArrayLike, "*radii"]) -> Float[np.ndarray, "*radii"]:
    """The share of eigenvalues with |lambda| > 1, to leading order: max(0, 1 - 1/r^2).

    They are uniform on the disc of radius r (the circular law: Ginibre 1965, Girko 1985).
    """
    return 1 - 1 / np.maximum(_radius(r), 1) ** 2


def expanding_singular_values(r: Float[ArrayLike, "*radii"]) -> Float[np.ndarray, "*radii"]:
    """The share of singular values above 1, to leading order:

        1 - (2/pi) (arcsin x + x sqrt(1 - x^2)),   x = min(1, 1/(2r)).

    Their density is sqrt(4r^2 - s^2) / (pi r^2) on [0, 2r] (Marchenko and Pastur 1967).
    """
    x = 1 / np.maximum(2 * _radius(r), 1)
    return 1 - 2 / np.pi * (np.arcsin(x) + x * np.sqrt(1 - x**2))


def condition_number(d: int) -> float:
    """exp of the expected logarithm of the condition number, to leading order: d e^{1.537}.

    Its own expectation is infinite. At d = 1 it is 1. Source: Edelman 1988, "Eigenvalues and
    condition numbers of random matrices", section 7.
    """
    return _width(d) * np.exp(1.537) if _width(d) > 1 else 1.0


def henrici_departure(d: int) -> float:
    """Root mean square of sqrt(|J|^2 - sum |lambda|^2) / |J|, exact: sqrt(1 - S/d^2), where

        S = E sum |lambda(G)|^2 = d + sum_{i=0}^{d-2} b_i t_i (t_i + 1),   t_i = floor((d - i) / 2),

    and sum_i b_i v^i = sqrt(2) (1 - v)^{3/2} - 1 + 3v. About
    sqrt(1/2 - sqrt(2/pi) d^{-3/2}), so 1/sqrt(2) to leading order.

    Source: derived here. E tr G^2 = d makes S = d + 2 E sum (Im lambda)^2, and the density of the
    complex eigenvalues (Edelman 1997, "The probability that a random real Gaussian matrix has k
    real eigenvalues, related distributions, and the circular law"),

        sqrt(2/pi) |y| e^{y^2 - x^2} erfc(|y| sqrt(2)) sum_{k=0}^{d-2} (x^2 + y^2)^k / k!,

    makes the latter sum_{k=0}^{d-2} of the coefficients of v^k in

        (sqrt(2) (1 - v)^{3/2} - 1 + 3v) / (1 - v^2)^2.
    """
    i = np.arange(_width(d) - 1)
    t = (d - i) // 2
    b = np.sqrt(2) * special.binom(1.5, i) * (-1.0) ** i - (i == 0) + 3 * (i == 1)
    return float(np.sqrt(1 - (d + np.sum(b * t * (t + 1))) / d**2))


def symmetric_part(d: int) -> float:
    """The expected |(J + J^T)/2|^2 / |J|^2, exact: (d + 1) / (2d). Source: derived here."""
    return (_width(d) + 1) / (2 * d)


def self_alignment(d: int, k: int) -> float:
    """The expected |U_k^T V_k|^2 / k of the top k singular subspaces, exact: k/d.

    U and V are Haar and independent. Source: derived here.

    Raises:
        ValueError: a k that is not in 1..d.
    """
    if not 1 <= k <= _width(d):
        raise ValueError(f"k must be in 1..{d}, got {k}")
    return k / d


def update_ratio(r: Float[ArrayLike, "*radii"]) -> Float[np.ndarray, "*radii"]:
    """|J - I| / |J|, to leading order: sqrt(1 + d/F^2) = sqrt(1 + 1/r^2), above 1 at every scale.

    The trace, of mean 0, is left out. Source: derived here.
    """
    with np.errstate(divide="ignore"):
        return np.hypot(1, 1 / _radius(r))


def effective_rank(d: int) -> float:
    """exp of the entropy of sigma / sum sigma, to leading order: (2 / (3 pi)) e^{4/3} d = 0.805 d.

    The quarter circle's moments E sigma^p = (2/pi) (2r)^p B((p+1)/2, 3/2) give
    E sigma = 8r/(3 pi) and E sigma log sigma / E sigma = log(4r) - 4/3. It is about 0.2 less at
    d = 16 to 512 (Monte Carlo), and 1 at d = 1. Source: derived here.
    """
    return 2 / (3 * np.pi) * np.exp(4 / 3) * d if _width(d) > 1 else 1.0


def participation_ratio(d: int) -> float:
    """(sum sigma^2)^2 / sum sigma^4, exact as the harmonic mean: (d^2 + 2) / (2d + 1).

    About d/2. From E |G|^4 = d^2 (d^2 + 2) and E tr (G G^T)^2 = d^2 (2d + 1). Source: derived here.
    """
    return (_width(d) ** 2 + 2) / (2 * d + 1)


def _frobenius(d: int) -> float:
    """E |G|, the mean of a chi variable with d^2 degrees of freedom."""
    return np.sqrt(2) * special.poch(d**2 / 2, 0.5)


def _width(d: int) -> int:
    if not is_integer(d, 1):
        raise ValueError(f"the width d must be a positive whole number, got {d!r}")
    return int(d)


def _radius(r):
    r = np.asarray(r, np.float64)
    if not (np.isfinite(r) & (r >= 0)).all():
        raise ValueError(f"the radius r = F / sqrt(d) must be finite and not negative, got {r}")
    return r
