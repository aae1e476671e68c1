"""Baselines of Gaussian matrices, against Monte Carlo and against closed forms."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
from scipy import integrate, special

from svflow.spectra import ginibre

DRAWS = {16: 4000, 64: 700, 128: 250}
RADII = np.asarray([0.6, 1.0, 1.7])


class Draws(NamedTuple):
    """Matrices of Frobenius norm sqrt(d), so of radius 1, and what LAPACK says of them."""

    J: np.ndarray
    eigenvalues: np.ndarray
    left: np.ndarray
    sigma: np.ndarray
    right: np.ndarray


@functools.cache
def draws(d, number=None):
    G = np.random.default_rng(d).normal(size=(number or DRAWS[d], d, d))
    J = np.sqrt(d) * G / np.linalg.norm(G, axis=(1, 2), keepdims=True)
    U, sigma, V_T = np.linalg.svd(J)
    return Draws(J, np.linalg.eigvals(J), U, sigma, np.swapaxes(V_T, 1, 2))


def check(samples, expected, bias=0.0):
    """The mean of the samples is as expected, to four standard errors and a stated share of it.

    And the errors are small enough to say something: a tenth of what is expected at most.
    """
    error = 4 * np.std(samples, axis=0) / np.sqrt(len(samples))
    assert (error <= 0.1 * np.abs(expected)).all()
    distance = np.abs(np.mean(samples, axis=0) - expected)
    assert (distance <= error + bias * np.abs(expected) + 1e-12).all(), (distance, error)


widths = pytest.mark.parametrize("d", DRAWS)


# Real eigenvalues


def test_real_eigenvalues_in_closed_form():
    small = [1, np.sqrt(2), 1 + np.sqrt(2) / 2, 11 * np.sqrt(2) / 8, 1 + 13 * np.sqrt(2) / 16]
    found = [ginibre.real_eigenvalues(d) for d in range(1, 6)]
    np.testing.assert_allclose(found, small, rtol=1e-15)


@pytest.mark.parametrize("d", [2, 7, 64])
def test_real_eigenvalues_are_the_integral_of_their_density(d):
    # The same sums by another way: Edelman, Kostlan and Shub's corollary 4.3.
    def density(x):
        power = special.xlogy(d - 1, x) - x**2 / 2 - special.gammaln(d / 2) - d / 2 * np.log(2)
        first = special.gammaincc(d - 1, x**2) / np.sqrt(2 * np.pi)
        return first + np.exp(power) * special.gammainc((d - 1) / 2, x**2 / 2)

    total = 2 * integrate.quad(density, 0, np.sqrt(d) + 9, limit=200)[0]
    assert abs(total - ginibre.real_eigenvalues(d)) < 1e-9


@pytest.mark.parametrize(
    ("d", "real", "fraction"),
    [(64, 6.8456, 0.89304), (768, 22.6008, 0.97057), (4096, 51.5599, 0.98741)],
)
def test_the_complex_fraction_at_widths_of_models(d, real, fraction):
    assert abs(ginibre.real_eigenvalues(d) - real) < 1e-4
    assert abs(ginibre.complex_fraction(d) - fraction) < 1e-5
    # sqrt(2d/pi) alone misses half an eigenvalue; with it what is left is of order d^{-1/2}.
    rest = ginibre.real_eigenvalues(d) - np.sqrt(2 * d / np.pi) - 0.5
    assert abs(rest + 3 / 8 * np.sqrt(2 / (np.pi * d))) < 0.1 / d


@widths
def test_the_complex_fraction(d):
    check(np.sum(draws(d).eigenvalues.imag == 0, axis=1), ginibre.real_eigenvalues(d))
    share = np.mean(draws(d).eigenvalues.imag != 0, axis=1)
    check(share, ginibre.complex_fraction(d))
    # Of about normal numbers the deviation is known to 1 / sqrt(2 n).
    ratio = np.std(share) / ginibre.complex_fraction_deviation(d)
    assert abs(ratio - 1) < 4 / np.sqrt(2 * DRAWS[d])


def test_the_deviation_of_the_complex_fraction_in_closed_form():
    # d = 2: both are real with probability p = 1 / sqrt(2), or neither.
    expected = np.sqrt((1 - 1 / np.sqrt(2)) / np.sqrt(2))
    assert abs(ginibre.complex_fraction_deviation(2) - expected) < 1e-15
    assert ginibre.complex_fraction_deviation(1) == 0


# Eigenvalues


@pytest.mark.parametrize(("d", "bias"), [(2, 0.015), (16, 0.006), (64, 0.003), (128, 0.003)])
def test_the_spectral_radius(d, bias):
    largest = np.abs(draws(d, 3000 if d == 2 else None).eigenvalues).max(axis=1)
    check(largest[:, None] * RADII, ginibre.spectral_radius(d, RADII), bias)
    # The leading order alone is outside of what the draws allow.
    if d > 2:
        with pytest.raises(AssertionError):
            check(largest, 1.0, bias)


def test_the_spectral_radius_of_wide_matrices_tends_to_the_circular_law():
    excess = np.asarray([ginibre.spectral_radius(d) for d in (64, 256, 1024, 4096)]) - 1
    # As sqrt(log d / d) up to slower terms, Rider and Sinclair 2014.
    assert (excess[1:] < 0.8 * excess[:-1]).all()
    assert (excess[1:] > 0.5 * excess[:-1]).all()
    assert ginibre.spectral_radius(1, 3.0) == 3
    assert ginibre.spectral_radius(1, RADII).shape == RADII.shape


@widths
def test_expanding_eigenvalues(d):
    share = np.mean(np.abs(draws(d).eigenvalues)[..., None] * RADII > 1, axis=1)
    expected = ginibre.expanding_eigenvalues(RADII)
    np.testing.assert_allclose(expected, [0, 0, 1 - 1 / 1.7**2], rtol=1e-15)
    check(share[:, 2], expected[2], 1 / d)
    # At and below the edge the share is 0 to leading order, and of order d^{-1/2} at radius 1.
    assert share[:, 0].mean() < 1e-3
    assert 0.1 < share[:, 1].mean() * np.sqrt(d) < 0.5


@widths
def test_the_henrici_departure(d):
    share = np.sum(np.abs(draws(d).eigenvalues) ** 2, axis=1) / d
    check(1 - share, ginibre.henrici_departure(d) ** 2)
    check(np.sqrt(1 - share), ginibre.henrici_departure(d), 1 / d**2)


def test_the_henrici_departure_in_closed_form():
    # d = 2: the density of the complex eigenvalues is that of the docstring with its sum 1.
    def square(y, x):
        return y**2 * np.sqrt(2 / np.pi) * y * np.exp(y**2 - x**2) * special.erfc(np.sqrt(2) * y)

    above = integrate.dblquad(square, -6, 6, 0, 9)[0]
    expected = 1 - (2 + 4 * above) / 4
    assert abs(ginibre.henrici_departure(2) ** 2 - expected) < 1e-7
    assert abs(ginibre.henrici_departure(2) ** 2 - (1 - 1 / np.sqrt(2))) < 1e-15
    assert ginibre.henrici_departure(1) == 0
    for d in (100, 1000, 4000):
        rest = ginibre.henrici_departure(d) ** 2 - (0.5 - np.sqrt(2 / np.pi) * d**-1.5)
        assert abs(rest - 1 / (4 * d**2)) < d**-2.5


# Singular values


@widths
def test_expanding_singular_values(d):
    share = np.mean(draws(d).sigma[..., None] * RADII > 1, axis=1)
    check(share, ginibre.expanding_singular_values(RADII), 1 / d)
    assert np.array_equal(ginibre.expanding_singular_values([0.0, 0.3, 0.5]), [0, 0, 0])


def test_expanding_singular_values_are_the_integral_of_their_density():
    for r in (0.51, 0.8, 1.0, 3.0):
        above = integrate.quad(lambda s: np.sqrt(4 * r**2 - s**2) / (np.pi * r**2), 1, 2 * r)[0]  # noqa: B023
        assert abs(ginibre.expanding_singular_values(r) - above) < 1e-7


@widths
def test_the_condition_number(d):
    logarithm = np.log(draws(d).sigma[:, 0] / draws(d).sigma[:, -1])
    # Of E log kappa - log d = 1.537 some is missing at finite d: 0.08 at d = 16.
    check(logarithm, np.log(ginibre.condition_number(d)), 0.5 / d)


@widths
def test_effective_rank_and_participation_ratio(d):
    p = draws(d).sigma / np.sum(draws(d).sigma, axis=1, keepdims=True)
    rank = np.exp(-np.sum(p * np.log(p), axis=1))
    check(rank, ginibre.effective_rank(d) - 0.19, 1e-3)
    check(rank, ginibre.effective_rank(d), 0.3 / d)
    squares = np.sum(draws(d).sigma ** 2, axis=1)
    fourth = np.sum(draws(d).sigma ** 4, axis=1)
    check(fourth / squares**2, 1 / ginibre.participation_ratio(d))
    check(squares**2 / fourth, ginibre.participation_ratio(d), 1 / d**2)


def test_the_effective_rank_is_that_of_the_quarter_circle():
    def mean(f):
        return integrate.quad(lambda s: f(s) * np.sqrt(4 - s**2) / np.pi, 0, 2)[0]

    first = mean(lambda s: s)
    entropy = np.log(first) - mean(lambda s: special.xlogy(s, s)) / first
    assert abs(ginibre.effective_rank(7) / 7 - np.exp(entropy)) < 1e-7
    assert ginibre.effective_rank(1) == ginibre.condition_number(1) == 1  # of any number


# Both


@widths
def test_the_symmetric_part(d):
    J = draws(d).J
    part = np.sum(((J + np.swapaxes(J, 1, 2)) / 2) ** 2, axis=(1, 2)) / d
    check(part, ginibre.symmetric_part(d))
    assert ginibre.symmetric_part(1) == 1


@widths
def test_self_alignment(d):
    for k in (d // 8, d // 2, d):
        overlap = np.swapaxes(draws(d).left[..., :k], 1, 2) @ draws(d).right[..., :k]
        check(np.sum(overlap**2, axis=(1, 2)) / k, ginibre.self_alignment(d, k))


@widths
def test_the_update_ratio(d):
    for r in RADII:
        J = r * draws(d).J
        ratio = np.linalg.norm(J - np.eye(d), axis=(1, 2)) / np.linalg.norm(J, axis=(1, 2))
        check(ratio, ginibre.update_ratio(r), 1 / d**2)
    assert ginibre.update_ratio(0.0) == np.inf


def test_bad_input_is_named():
    of_width = (
        ginibre.real_eigenvalues,
        ginibre.complex_fraction,
        ginibre.complex_fraction_deviation,
        ginibre.spectral_radius,
        ginibre.condition_number,
        ginibre.henrici_departure,
        ginibre.symmetric_part,
        ginibre.effective_rank,
        ginibre.participation_ratio,
        lambda d: ginibre.self_alignment(d, 1),
    )
    for function in of_width:
        for d in (0, -3, 2.5, True):
            with pytest.raises(ValueError, match="width d must be a positive whole number"):
                function(d)
        assert function(np.int64(8)) == function(8)
    of_radius = (
        functools.partial(ginibre.spectral_radius, 4),
        functools.partial(ginibre.spectral_radius, 1),
        ginibre.expanding_eigenvalues,
        ginibre.expanding_singular_values,
        ginibre.update_ratio,
    )
    for function in of_radius:
        for r in (-1.0, np.nan, [1.0, np.inf]):
            with pytest.raises(ValueError, match="radius r"):
                function(r)
        np.testing.assert_array_equal(function(RADII), [function(r) for r in RADII])
    for k in (0, 5):
        with pytest.raises(ValueError, match=r"k must be in 1\.\.4"):
            ginibre.self_alignment(4, k)
