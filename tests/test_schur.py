"""The normal part of a matrix by its real Schur form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from scipy.optimize import linear_sum_assignment

from svflow.spectra import schur
from svflow.spectra.schur import schur_normal, schur_parts

EPS = float(jnp.finfo(jnp.float64).eps)


def gaussian(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def size(J):
    return np.linalg.norm(J, axis=(-2, -1), keepdims=True)


def close(a, b, tolerance):
    """|a - b| against |b|, as Frobenius norms."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert (size(a - b) <= tolerance * size(b)).all()


def check_normal(A, tolerance):
    A_T = np.swapaxes(A, -2, -1)
    assert (size(A @ A_T - A_T @ A) <= tolerance * size(A) ** 2).all()


def check_same_set(a, b, tolerance):
    distance = np.abs(np.asarray(a)[:, None] - np.asarray(b)[None])
    assert distance[linear_sum_assignment(distance)].max() <= tolerance


def henrici(A):
    """The departure from normality, by the eigenvalues."""
    share = np.sum(np.abs(np.linalg.eigvals(A)) ** 2, axis=-1) / size(A)[..., 0, 0] ** 2
    return np.sqrt(np.maximum(0, 1 - share))


MATRICES = {
    "gaussian": gaussian(0, 24, 24),
    "odd": gaussian(1, 17, 17),
    "residual": np.eye(20) + gaussian(2, 20, 20) / np.sqrt(20),
    "1x1": np.asarray([[-3.0]]),
    "real pair": np.asarray([[1.0, 5.0], [0.1, -2.0]]),
    "complex pair": np.asarray([[1.0, 5.0], [-2.0, 3.0]]),
    "other sign": np.asarray([[1.0, -5.0], [0.1, 1.0]]),
    "triangular": np.triu(gaussian(3, 12, 12)),
    "jordan": 2 * np.eye(6) + np.eye(6, k=1),
    "zero": np.zeros((4, 4)),
    "huge": 1e200 * gaussian(4, 10, 10),
    "minute": 1e-200 * gaussian(5, 10, 10),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_normal_part(name):
    J = MATRICES[name]
    Z, D, N = map(np.asarray, schur_parts(J))
    close(Z @ Z.T, np.eye(len(J)), 50 * EPS)
    # D has the form [[a, w], [-w, a]] in its blocks, exactly; N is triangular outside of them.
    block = np.diag(D, -1) != 0
    assert not (block[1:] & block[:-1]).any()
    assert np.array_equal(np.diag(D, -1), -np.diag(D, 1))
    assert np.array_equal(np.diag(D)[1:][block], np.diag(D)[:-1][block])
    assert np.array_equal(np.tril(D, -2), np.triu(D, 2))
    assert not np.tril(N, -2).any()
    assert not np.diag(N).any()
    assert not np.diag(N, -1)[~block].any()
    # w has its block's signs: 1 + N / D there is a ratio of moduli.
    assert (np.diag(N, 1)[block] / np.diag(D, 1)[block] > -1).all()
    scale = np.abs(J).max() or 1.0
    A = np.asarray(schur_normal(J)) / scale
    check_normal(A, 20 * EPS)
    check_same_set(np.linalg.eigvals(A), np.linalg.eigvals(J / scale), 1e-13)
    for one in (1.0, 1, np.float32(1), jnp.asarray(1.0)):
        close(schur_normal(J, one) / scale, J / scale, 50 * EPS)


def test_a_pair_by_hand():
    # Trace 4 and determinant 13: 2 +- 3i.
    A = np.asarray(schur_normal(MATRICES["complex pair"]))
    close(A, [[2.0, 3.0], [-3.0, 2.0]], 1e-14)
    # (5 - 3)^2 + (3 - 2)^2 + 2 (1 - 2)^2 is what was taken away.
    assert abs(size(MATRICES["complex pair"] - A)[0, 0] ** 2 - 7) < 1e-13


NORMAL = {
    "symmetric": lambda G: G + G.T,
    "skew": lambda G: G - G.T,
    "orthogonal": lambda G: np.linalg.qr(G)[0],
    "circulant": lambda G: scipy.linalg.circulant(G[0]),
    "shifted": lambda G: np.eye(len(G)) + 3 * (G - G.T),
    "projection": lambda G: np.linalg.qr(G)[0][:, :4] @ np.linalg.qr(G)[0][:, :4].T,
}


@pytest.mark.parametrize("name", NORMAL)
@pytest.mark.parametrize("d", [9, 30])
def test_normal_matrices_are_left_as_they_are(name, d):
    J = NORMAL[name](gaussian(d, d, d))
    for amount in (0.0, 0.3, 1.0):
        close(schur_normal(J, amount), J, 100 * EPS)


def test_a_defective_matrix_in_any_basis():
    Q = np.linalg.qr(gaussian(0, 6, 6))[0]
    J = Q @ MATRICES["jordan"] @ Q.T
    A = np.asarray(schur_normal(J))
    check_normal(A, 20 * EPS)
    # Six equal eigenvalues move by (eps |J|)^{1/6} under rounding, whatever the algorithm.
    check_same_set(np.linalg.eigvals(A), np.full(6, 2.0), 5 * (EPS * 6) ** (1 / 6))
    close(schur_normal(J, 1.0), J, 50 * EPS)
    # In its own basis nothing is rounded.
    assert np.array_equal(schur_normal(MATRICES["jordan"]), 2 * np.eye(6))


def test_departures_from_normality():
    J = gaussian(0, 8, 32, 32)
    assert henrici(J).min() > 0.6  # 1/sqrt(2) for noise
    assert henrici(np.asarray(schur_normal(J))).max() < 1e-7
    sweep = [henrici(np.asarray(schur_normal(J, t))) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert (np.diff(sweep, axis=0) > 0).all()
    np.testing.assert_allclose(sweep[-1], henrici(J), atol=1e-13)


def test_the_sweep_is_linear_and_moves_imaginary_parts_as_it_says():
    J, t = gaussian(7, 16, 16), 0.4
    normal, swept = schur_normal(J), schur_normal(J, t)
    close(swept, (1 - t) * np.asarray(normal) + t * J, 50 * EPS)
    _, D, N = map(np.asarray, schur_parts(J))
    real, pairs = [], []
    for i in range(len(J)):
        w = D[i, i + 1] if i + 1 < len(J) else 0
        if w:
            s = (w + N[i, i + 1]) / w
            w = abs(w) * np.sqrt(1 + t * (1 - t) * (s - 1) ** 2 / s)
            pairs += [D[i, i] + 1j * w, D[i, i] - 1j * w]
        elif not (i and D[i, i - 1]):
            real.append(D[i, i])
    assert len(pairs) >= 8
    check_same_set(np.linalg.eigvals(swept), real + pairs, 1e-12)
    moved = np.sort(np.linalg.eigvals(swept).imag) - np.sort(np.linalg.eigvals(J).imag)
    assert np.abs(moved).max() > 1e-2


def test_a_sweep_costs_one_factorisation(monkeypatch):
    calls, dgees = [], schur._dgees
    monkeypatch.setattr(schur, "_dgees", lambda J: calls.append(1) or dgees(J))
    J, amounts = jnp.asarray(gaussian(0, 6, 6)), jnp.linspace(0, 1, 5)
    sweep = jax.vmap(schur_normal, (None, 0))
    swept = jax.block_until_ready([sweep(J, amounts), jax.jit(sweep)(J, amounts)])
    assert len(calls) == 2  # one for each call
    for amount, eager, jitted in zip(amounts, *swept):
        close(eager, schur_normal(J, amount), 10 * EPS)
        close(jitted, eager, 10 * EPS)


def test_stacks_and_transforms():
    J = jnp.asarray(gaussian(0, 2, 3, 7, 7))
    stacked = schur_normal(J, 0.5)
    assert stacked.shape == J.shape
    for index in np.ndindex(2, 3):
        close(stacked[index], schur_normal(J[index], 0.5), 10 * EPS)
    close(jax.jit(schur_normal)(J, 0.5), stacked, 10 * EPS)
    close(jax.vmap(jax.vmap(lambda J: schur_normal(J, 0.5)))(J), stacked, 10 * EPS)
    close(jax.lax.map(lambda J: schur_normal(J, 0.5), J), stacked, 10 * EPS)
    assert schur_normal(J[:0]).shape == (0, 3, 7, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_types(dtype):
    J = jnp.asarray(gaussian(0, 12, 12), dtype)
    for amount in (0.0, 0.5, jnp.asarray(0.5), jnp.asarray(0.5, dtype)):
        A = schur_normal(J, amount)
        assert A.dtype == jnp.float32
        close(A, schur_normal(J.astype(jnp.float64), amount), 1e-6)
        assert jax.jit(schur_normal)(J, amount).dtype == jnp.float32


def test_derivatives():
    J = jnp.asarray(gaussian(0, 8, 8))
    Z, _, N = schur_parts(J)
    close(jax.jacfwd(schur_normal, 1)(J, 0.3), Z @ N @ Z.T, 1e-14)
    close(jax.jacrev(schur_normal, 1)(J, 0.3), Z @ N @ Z.T, 1e-14)
    for derivative in (jax.jacfwd, jax.jacrev):
        with pytest.raises(NotImplementedError, match="Schur form cannot be differentiated: its"):
            derivative(schur_normal)(J)


def test_bad_input_is_named():
    J = gaussian(0, 2, 3, 4, 4)
    J[1, 2, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"J\[1, 2\] is not finite"):
        schur_normal(J)
    under_jit = np.isnan(np.asarray(jax.jit(schur_normal)(J)))
    assert under_jit[1, 2].all()
    assert under_jit.sum() == 16
    J[1, 2, 0, 0] = np.inf
    with pytest.raises(ValueError, match=r"J is not finite"):
        schur_parts(J[1, 2])
    with pytest.raises(ValueError, match=r"square matrices.*\(2, 3\)"):
        schur_normal(np.ones((2, 3)))
    with pytest.raises(ValueError, match="real floating point, got complex128"):
        schur_normal(np.ones((2, 2), complex))
    with pytest.raises(ValueError, match=r"amount must be a scalar, got shape \(3,\)"):
        schur_normal(np.eye(2), jnp.linspace(0, 1, 3))
