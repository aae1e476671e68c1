"""Products over depth, against arithmetic of hundreds of digits, and the effective ranks."""

import ctypes

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import scipy.linalg
import scipy.special
from jax.test_util import check_grads

from svflow.spectra import products
from svflow.spectra.products import cumulative, effective_rank, participation_ratio

EPS = np.finfo(np.float64).eps
DEPTHS = 32, 64, 128


def gaussian(rng, d):
    return rng.standard_normal((DEPTHS[-1], d, d))


def orthogonal(rng, d):
    return np.linalg.qr(gaussian(rng, d))[0]


def residual(rng, d):
    return np.eye(d) + gaussian(rng, d) / np.sqrt(d)


def clustered(rng, d):
    return orthogonal(rng, d) * (1 + 1e-3 * gaussian(rng, d))


def graded(rng, d):
    """Rows over six orders of magnitude, the largest anywhere: the largest anywhere."""
    scales = [rng.permutation(10.0 ** -np.linspace(0, 6, d)) for _ in range(DEPTHS[-1])]
    return np.array(scales)[:, :, None] * gaussian(rng, d)


def drifting(rng, d):
    """Rows in one order of size, the smallest first: the scales add up, to 1e400 and more."""
    return 10.0 ** np.linspace(-3, 3, d)[:, None] * gaussian(rng, d)


def jordan(rng, d):
    return np.broadcast_to(np.eye(d) + np.eye(d, k=1), (DEPTHS[-1], d, d))


def turning(rng, d):
    """S Q S^-1 with one ill-conditioned S and orthogonal Q: nothing grows with depth."""
    S = np.linalg.qr(rng.standard_normal((d, d)))[0] * 10.0 ** -np.linspace(0, 4, d)
    return S @ orthogonal(rng, d) @ np.linalg.inv(S)


FAMILIES = [gaussian, residual, clustered, graded, drifting, jordan, turning]


def exact(Js):
    """log sigma_i of the partial products at DEPTHS and of the whole; the condition of the last,

    sum_l |J_l| |left_l u_i| |right_l v_i| / sigma_i.
    """
    factors = [mp.matrix(J.tolist()) for J in Js]
    right = [mp.eye(Js.shape[-1])]
    for J in factors:
        right.append(J * right[-1])
    partial = [logarithms(mp.svd_r(right[n], compute_uv=False)) for n in DEPTHS if n < len(Js)]
    U, S, Vt = mp.svd_r(right[-1])
    condition, V = np.zeros(Js.shape[-1]), Vt.T
    for J, norm, before in zip(factors[::-1], np.linalg.norm(Js, 2, (1, 2))[::-1], right[-2::-1]):
        condition = condition + norm * columns(U) * columns(before * V) / np.array(list(S))
        U = J.T * U
    return [*partial, logarithms(S)], condition.astype(np.float64)


def logarithms(sigma):
    return np.array([mp.log(value) for value in sigma])


def columns(A):
    return np.array([mp.norm(A[:, i]) for i in range(A.cols)])


def difference(logs, expected):
    return np.array(
        [float(abs(mp.mpf(a) - b)) for a, b in zip(np.asarray(logs).tolist(), expected)]
    )


@pytest.mark.parametrize("d", [3, 8, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_singular_value_against_exact_arithmetic(family, d, seed):
    Js = family(np.random.default_rng(seed), d)
    logs = np.asarray(cumulative(Js).log_singular_values)
    with mp.workdps(30 + int(1.1 * np.ptp(logs) / np.log(10))):
        expected, condition = exact(Js)
        errors = [difference(logs[depth - 1], row) for depth, row in zip(DEPTHS, expected)]
    expected = np.array(expected).astype(np.float64)
    assert (errors < 1e-6 * np.abs(expected)).all()
    # To first order a change of eps |J_l| in every factor moves log sigma_i by eps condition_i,
    # and an orthogonal transform of d columns changes a factor by a few d eps. g, a logarithm, is
    # rounded once or twice a layer.
    logarithm = 2 * DEPTHS[-1] * (1 + np.abs(expected).max())
    assert (errors[-1] <= EPS * (d * condition + logarithm)).all()
    if family in (graded, drifting):  # the rows' scales do not count
        assert np.max(errors) < 1e-10
    if family is drifting:
        assert np.ptp(expected[-1]) > 400 * np.log(10)


def test_the_middle_factor_stays_well_conditioned(seed):
    # The proof of the windows needs cond(T) < 2e5. Without the second QR step it is 1e7 here.
    for family in FAMILIES:
        for state in products._graded(family(np.random.default_rng(seed), 24)):
            rows = np.linalg.norm(state.lower, axis=1, keepdims=True)
            assert np.linalg.cond(state.lower / rows) < 100
            assert (np.diff(state.logs) <= 0).all()
            assert not np.triu(state.lower, 1).any()


def test_windows_change_nothing(monkeypatch, seed):
    Js = residual(np.random.default_rng(seed), 20)
    whole = cumulative(Js).log_singular_values
    sizes = []
    jacobi = products._jacobi

    def counted(A):
        sizes.append(len(A))
        return jacobi(A)

    monkeypatch.setattr(products, "_jacobi", counted)
    monkeypatch.setattr(products, "CORE", 10.0)
    np.testing.assert_allclose(cumulative(Js).log_singular_values, whole, rtol=0, atol=1e-13)
    assert len(sizes) > 3 * len(Js)
    assert min(sizes) < 20
    # A margin of 1 nat is too narrow: the windows do overlap for a reason.
    monkeypatch.setattr(products, "MARGIN", 1.0)
    assert np.abs(cumulative(Js).log_singular_values - whole).max() > 1e-9


def test_values_are_in_order_across_windows(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    Js, jacobi = orthogonal(rng, 20)[:4], products._jacobi
    monkeypatch.setattr(products, "CORE", 0.0)  # a window for every value, each rounded in its way
    monkeypatch.setattr(products, "_jacobi", lambda A: jacobi(A) + 1e-15 * rng.normal())
    assert (np.diff(cumulative(Js).log_singular_values) <= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_singular_values_add_up_to_the_determinant(family, seed):
    Js = family(np.random.default_rng(seed), 9)
    logs = np.asarray(cumulative(Js).log_singular_values)
    determinants = np.cumsum(np.linalg.slogdet(Js)[1])
    condition = np.cumsum(np.linalg.cond(Js))
    assert (
        np.abs(logs.sum(-1) - determinants) < 9 * EPS * (condition + 128 * np.abs(logs).max())
    ).all()
    assert (np.diff(logs) <= 0).all()


def test_transposed_and_reversed_is_the_same_product(seed):
    Js = residual(np.random.default_rng(seed), 10)
    there, back = (cumulative(A).log_singular_values for A in (Js, Js[::-1].swapaxes(-1, -2)))
    np.testing.assert_allclose(there[-1], back[-1], rtol=0, atol=1e-10)
    assert np.abs(there[-2] - back[-2]).max() > 1e-3


def test_orthogonal_factors_change_nothing(seed):
    result = cumulative(orthogonal(np.random.default_rng(seed), 30))
    np.testing.assert_allclose(result.log_singular_values, 0, atol=1e-13)
    np.testing.assert_allclose(result.effective_rank, 30, rtol=1e-12)
    np.testing.assert_allclose(result.participation_ratio, 30, rtol=1e-12)


@pytest.mark.parametrize("c", [3.0, 1e-300, 1e300])
def test_scaling_a_factor_adds_a_logarithm(c, seed):
    Js = residual(np.random.default_rng(seed), 5)[:7]
    plain, scaled = cumulative(Js), cumulative(np.concatenate([Js[:3], c * Js[3:4], Js[4:]]))
    expected = np.asarray(plain.log_singular_values) + np.log(c) * (np.arange(7) >= 3)[:, None]
    np.testing.assert_allclose(scaled.log_singular_values, expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(scaled.effective_rank, plain.effective_rank, rtol=1e-11)


def test_factors_at_the_end_of_the_range():
    H = scipy.linalg.hadamard(4, float)
    for c in (1.5e308, 1e-307):
        logs = cumulative(jnp.asarray(c * np.stack([H, H, H]))).log_singular_values
        expected = np.arange(1, 4) * (np.log(c) + np.log(2))
        np.testing.assert_allclose(logs, np.repeat(expected[:, None], 4, 1), rtol=1e-15)


def test_diagonal_factors_are_exact(seed):
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-900, 900, (40, 7))
    Js = np.ldexp(1.0, exponents)[:, :, None] * np.eye(7)
    expected = -np.sort(-np.log(2) * np.cumsum(exponents, axis=0))
    logs = np.asarray(cumulative(Js).log_singular_values)
    largest = np.log(2) * np.abs(np.cumsum(exponents, axis=0)).max()
    np.testing.assert_allclose(logs, expected, rtol=0, atol=2 * 40 * EPS * largest)


def test_the_first_layer_is_its_svd(seed):
    J = np.random.default_rng(seed).standard_normal((1, 50, 50))
    result = cumulative(J)
    sigma = np.linalg.svd(J[0], compute_uv=False)
    np.testing.assert_allclose(np.exp(result.log_singular_values[0]), sigma, rtol=1e-12)
    np.testing.assert_allclose(result.effective_rank[0], effective_rank(sigma), rtol=1e-13)
    np.testing.assert_allclose(
        result.participation_ratio[0], participation_ratio(sigma), rtol=1e-13
    )


def test_one_dimension():
    result = cumulative(jnp.array([2.0, -3.0, 0.5])[:, None, None])
    expected = np.log([[2.0], [6.0], [3.0]])
    np.testing.assert_allclose(result.log_singular_values, expected, rtol=1e-15)
    np.testing.assert_allclose(result.effective_rank, 1)


@pytest.mark.parametrize("place", [0, 2])
def test_exactly_lost_directions(place, seed):
    rng = np.random.default_rng(seed)
    Js = rng.standard_normal((6, 7, 7))
    Js[place, 3] = 0  # a row
    Js[4, :, [1, 5]] = 0  # columns
    logs = np.asarray(cumulative(Js).log_singular_values)
    # Rank 6, then at most 5: what the columns lose may hold what the row has lost.
    lost = [max(1 * (layer >= place), 2 * (layer >= 4)) for layer in range(6)]
    assert np.isneginf(logs).sum(-1).tolist() == lost
    with mp.workdps(200):
        P = mp.eye(7)
        for J, row, n in zip(Js, logs, lost):
            P = mp.matrix(J.tolist()) * P
            expected = logarithms(mp.svd_r(P, compute_uv=False)[: 7 - n])
            assert difference(row[: 7 - n], expected).max() < 1e-11


def test_zero_factors_lose_everything():
    Js = np.stack([np.eye(3), np.diag([2.0, 0, 1]), np.zeros((3, 3)), np.eye(3)])
    result = cumulative(Js)
    expected = [[0, 0, 0], [np.log(2), 0, -np.inf], [-np.inf] * 3, [-np.inf] * 3]
    np.testing.assert_allclose(result.log_singular_values, expected, atol=1e-15)
    np.testing.assert_allclose(result.effective_rank[:2], [3, 3 / 2 ** (2 / 3)], rtol=1e-15)
    np.testing.assert_allclose(result.participation_ratio[:2], [3, 25 / 17], rtol=1e-15)
    assert np.isnan(result.effective_rank[2:]).all()
    assert np.isnan(result.participation_ratio[2:]).all()


def nearly_dependent(rng):
    A = rng.standard_normal((6, 5))
    A[:, 1] = A[:, 0] * (1 - 1e-9) + 1e-9 * A[:, 1]
    return A


@pytest.mark.parametrize("matrix", ["random", "dependent", "equal"])
def test_the_graded_qr(matrix, seed):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((6, 5)) if matrix == "random" else nearly_dependent(rng)
    if matrix == "equal":
        A[:, :2] = np.array([1.0, 0, 0, 0, 0, 0])[:, None]
    g = np.array([3.0, 2, 1, -4, -9])
    Q, h, M = products._graded_qr(A, g)
    assert len(h) == 4 + (matrix != "equal")
    np.testing.assert_allclose(Q.T @ Q, np.eye(len(h)), atol=1e-14)
    assert (np.diff(h) <= 0).all()
    product = Q @ (np.exp(h)[:, None] * M)
    error = np.abs(product - A * np.exp(g)).max(axis=0) / np.exp(g)
    assert (error < 1e-14).all()  # in every column to its own scale
    assert np.abs(M).max() < (100 if matrix == "random" else 1 + 1e-12)


def test_factors_that_need_pivoting(seed):
    Js = np.random.default_rng(seed).standard_normal((8, 6, 6))
    Js[:, :, 1] = Js[:, :, 0] + 1e-5 * Js[:, :, 1]
    logs = cumulative(Js).log_singular_values[-1]
    with mp.workdps(200):
        (expected,), condition = exact(Js)
        assert (difference(logs, expected) <= 6 * EPS * condition).all()


def test_a_sum_of_diagonals_of_r_is_not_the_answer():
    # P_l = [[1, l], [0, 1]]: QR of each factor has R = J, whose diagonal is 1.
    Js = np.broadcast_to(np.array([[1.0, 1], [0, 1]]), (50, 2, 2))
    logs = np.asarray(cumulative(Js).log_singular_values)
    expected = np.arcsinh(np.arange(1, 51) / 2)
    np.testing.assert_allclose(logs, np.stack([expected, -expected], 1), rtol=1e-13)
    Q, naive = np.eye(2), np.zeros(2)
    for J in Js:
        Q, R = np.linalg.qr(J @ Q)
        naive += np.log(np.abs(np.diag(R)))
    assert np.abs(naive).max() < 1e-13
    assert logs[-1, 0] > 3.9


def test_lyapunov_exponents_of_gaussian_factors(seed):
    # C. M. Newman, Commun. Math. Phys. 103 (1986): r_ii^2 is chi^2 of d - i + 1 degrees of freedom
    # over d, so lambda_i = (log(2 / d) + psi((d - i + 1) / 2)) / 2 per layer, with the variance
    # psi'((d - i + 1) / 2) / 4. The second half of the layers: the first has a start to forget.
    d, samples, half = 4, 40, 50
    Js = np.random.default_rng(seed).standard_normal((samples, 2 * half, d, d)) / np.sqrt(d)
    result = cumulative(Js)
    logs = np.asarray(result.log_singular_values)
    freedom = np.arange(d, 0, -1) / 2
    expected = (np.log(2 / d) + scipy.special.digamma(freedom)) / 2
    deviation = np.sqrt(scipy.special.polygamma(1, freedom) / 4 / (samples * half))
    found = (logs[:, -1] - logs[:, half - 1]).mean(0) / half
    assert (np.abs(found - expected) < 5 * deviation).all()
    depths = np.arange(1, 2 * half + 1)[:, None]
    np.testing.assert_allclose(result.lyapunov_exponents, logs / depths, rtol=1e-15)


def test_batches_jit_and_vmap_equal_the_loop(seed):
    Js = np.random.default_rng(seed).standard_normal((2, 3, 5, 4, 4))
    loop = [cumulative(sample) for sample in Js.reshape(6, 5, 4, 4)]
    loop = jax.tree.map(lambda *rows: np.stack(rows).reshape(2, 3, *rows[0].shape), *loop)
    for function in (cumulative, jax.jit(cumulative), jax.vmap(jax.jit(jax.vmap(cumulative)))):
        result = function(jnp.asarray(Js))
        assert isinstance(result, products.Cumulative)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), result, loop
        )
    mean = cumulative(Js.mean((0, 1)))
    assert np.abs(mean.effective_rank - loop.effective_rank.mean((0, 1))).max() > 0.05


def test_the_result_is_in_the_widest_type(seed):
    Js = np.random.default_rng(seed).standard_normal((4, 3, 3)).astype(np.float32)
    wide = cumulative(Js)
    assert {leaf.dtype for leaf in wide} == {jnp.dtype(jnp.float64)}
    np.testing.assert_array_equal(wide[0], cumulative(Js.astype(np.float64))[0])
    rounded = jnp.asarray(Js, jnp.bfloat16)
    np.testing.assert_array_equal(cumulative(rounded)[0], cumulative(rounded.astype(float))[0])
    with jax.enable_x64(False):
        for function in (cumulative, jax.jit(cumulative)):
            narrow = function(jnp.asarray(Js))
            assert {leaf.dtype for leaf in narrow} == {jnp.dtype(jnp.float32)}
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7), narrow, wide)


def test_what_is_refused():
    Js = jnp.ones((5, 3, 3)) + jnp.eye(3)
    with pytest.raises(ValueError, match=r"J\[3\] is not finite"):
        cumulative(Js.at[3, 0, 1].set(jnp.inf))
    with pytest.raises(ValueError, match=r"J\[1, 3\] is not finite"):
        cumulative(jnp.stack([Js, Js.at[3, 0, 1].set(jnp.nan)]))
    for wrong in (jnp.eye(3), jnp.ones((5, 3, 2)), jnp.ones((0, 3, 3)), jnp.ones((5, 0, 0))):
        with pytest.raises(ValueError, match=r"Js must be .* got shape"):
            cumulative(wrong)
    with pytest.raises(ValueError, match="floating point"):
        cumulative(jnp.ones((5, 3, 3), int))
    for transform in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="explicit product"):
            transform(lambda Js: cumulative(Js).effective_rank[-1])(Js)


def test_under_a_transform_a_sample_that_is_not_finite_is_nan(monkeypatch):
    jacobi, seen = products._jacobi, []

    def watched(A):
        seen.append(np.isfinite(A).all())
        return jacobi(A)

    monkeypatch.setattr(products, "_jacobi", watched)
    Js = jnp.stack(
        [jnp.ones((5, 3, 3)).at[3, 0, 1].set(jnp.inf), jnp.broadcast_to(jnp.eye(3), (5, 3, 3))]
    )
    result = jax.jit(cumulative)(Js)
    assert all(seen)  # LAPACK may not come back from a nan
    assert len(seen) == 5
    assert all(np.isnan(leaf[0]).all() for leaf in result)
    np.testing.assert_allclose(result.log_singular_values[1], 0, atol=1e-15)
    np.testing.assert_allclose(result.effective_rank[1], 3)


def test_a_solver_that_fails_says_so(monkeypatch):
    def fail(*arguments):
        ctypes.c_int.from_address(arguments[-1]).value = 1

    monkeypatch.setattr(products, "routine", lambda *name: fail)
    with pytest.raises(ArithmeticError, match="did not converge"):
        cumulative(jnp.eye(3)[None])


def test_factors_near_underflow():
    J = np.random.default_rng(0).integers(-9, 10, (2, 3, 3)).astype(float)
    small = np.ldexp(J, -1065)  # exact: integers
    shift = 1065 * np.log(2) * np.arange(1, 3)[:, None]
    found = cumulative(jnp.asarray(J)).log_singular_values
    close = np.asarray(cumulative(small).log_singular_values) + shift
    np.testing.assert_allclose(close, found, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_effective_ranks_by_hand(scale):
    for sigma, effective, participation in [
        ([1, 1, 1, 1], 4, 4),
        ([0, 7, 0], 1, 1),
        ([1, 1, 0], 2, 2),
        ([2, 1, 1], 2**1.5, 2),
        ([1, 2], 3 / 2 ** (2 / 3), 25 / 17),
    ]:
        sigma = scale * jnp.asarray(sigma, float)
        np.testing.assert_allclose(effective_rank(sigma), effective, rtol=1e-14)
        np.testing.assert_allclose(participation_ratio(sigma), participation, rtol=1e-14)


def test_effective_ranks_of_stacks_and_types():
    sigma = jnp.array([[1.0, 1.0, 0.0], [2.0, 1.0, 1.0]])
    for measure in (effective_rank, participation_ratio):
        rows = [measure(row) for row in sigma]
        for result in (measure(sigma), jax.vmap(measure)(sigma), jax.jit(measure)(sigma)):
            np.testing.assert_allclose(result, rows, rtol=1e-15)
        assert measure(sigma.astype(jnp.float32)).dtype == jnp.float32
        assert measure(sigma.astype(jnp.bfloat16)).dtype == jnp.float32


def test_effective_ranks_are_differentiable(seed):
    sigma = jnp.asarray(np.random.default_rng(seed).uniform(0.1, 3, 6))
    for measure, order in [(effective_rank, 2), (participation_ratio, 1)]:
        check_grads(measure, (sigma,), order, atol=1e-5, rtol=1e-5)
        # Scale invariance: sigma . gradient = 0.
        np.testing.assert_allclose(sigma @ jax.grad(measure)(sigma), 0, atol=1e-14)


@pytest.mark.parametrize("measure", [effective_rank, participation_ratio])
def test_gradients_at_repeated_singular_values(measure, seed):
    def of(J):
        return measure(jnp.linalg.svd(J, compute_uv=False))

    # Equal singular values are the maximum.
    np.testing.assert_allclose(jax.grad(of)(jnp.eye(5)), 0, atol=1e-14)
    rng = np.random.default_rng(seed)
    U, V = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
    J, direction = U * np.array([2.0, 2, 1, 1]) @ V, rng.standard_normal((4, 4))
    gradient = jax.grad(of)(jnp.asarray(J))
    step = 1e-5
    slope = (of(J + step * direction) - of(J - step * direction)) / (2 * step)
    np.testing.assert_allclose(np.vdot(gradient, direction), slope, rtol=1e-7, atol=1e-8)


def test_the_derivative_at_a_zero_singular_value():
    sigma = jnp.array([2.0, 1.0, 0.0])
    for function in (jax.grad(effective_rank), jax.jit(jax.grad(effective_rank))):
        with pytest.raises(RuntimeError, match="singular value is zero"):
            jax.block_until_ready(function(sigma))
    gradient = jax.grad(participation_ratio)(sigma)
    np.testing.assert_allclose(gradient[:2], jax.grad(participation_ratio)(sigma[:2]), rtol=1e-14)
    assert gradient[2] == 0


def test_refused_singular_values():
    for measure in (effective_rank, participation_ratio):
        for wrong, message in [
            (jnp.zeros((2, 3)), "all zero"),
            (jnp.array([1.0, -1.0]), "not negative"),
            (jnp.array([1.0, jnp.nan]), "finite"),
            (jnp.array([1, 2]), "floating point"),
            (jnp.zeros(0), "floating point"),
        ]:
            with pytest.raises(ValueError, match=message):
                measure(wrong)
        assert np.isnan(jax.jit(measure)(jnp.zeros(3)))
