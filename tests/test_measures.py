"""Eigenvalues and the measures of spectra, on matrices whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flows import fast, normal

import svflow as sv
from svflow.spectra import controls, eigenvalues
from svflow.spectra.measures import SCALARS

EPS = np.finfo(np.float64).eps


def as_set(a, b):
    """The Hausdorff distance of two sets of numbers."""
    apart = np.abs(np.asarray(a)[:, None] - np.asarray(b)[None])
    return max(apart.min(0).max(), apart.min(1).max())


@pytest.mark.parametrize("width", [1, 2, 7, 40])
def test_eigenvalues_are_those_of_numpy_in_order(width):
    J = normal(width, 2, 3, width, width)
    found = np.asarray(sv.eigvals(J))
    assert found.shape == (2, 3, width)
    for one, matrix in zip(found.reshape(-1, width), np.asarray(J).reshape(-1, width, width)):
        assert as_set(one, np.linalg.eigvals(matrix)) == 0
        assert np.all(np.diff(np.abs(one)) <= 0)
        for place, value in enumerate(one):
            if value.imag > 0:  # its conjugate follows
                assert one[place + 1] == value.conj()
    for other in (jax.jit(sv.eigvals)(J), jax.vmap(sv.eigvals)(J), jax.lax.map(sv.eigvals, J)):
        assert np.array_equal(found, other)


def test_float32_matrices_are_solved_in_float64():
    J = normal(0, 30, 30, dtype=jnp.float32)
    found = sv.eigvals(J)
    assert found.dtype == jnp.complex64
    exact = np.linalg.eigvals(np.asarray(J, np.float64))
    assert as_set(found, exact) <= np.finfo(np.float32).eps * np.abs(exact).max()
    assert sv.spectra.backend(J) == "LAPACK on the host"


def test_the_derivative_of_eigenvalues():
    J, direction = normal(1, 3, 9, 9), normal(2, 3, 9, 9)

    def some(J):
        values = sv.eigvals(J)
        return jnp.sum(jnp.abs(values) ** 2 + values.imag**4 + jnp.cos(values.real))

    step = 1e-6
    difference = (some(J + step * direction) - some(J - step * direction)) / (2 * step)
    slope = jnp.sum(jax.grad(some)(J) * direction)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)
    np.testing.assert_allclose(jax.jvp(some, (J,), (direction,))[1], slope, rtol=1e-12)
    np.testing.assert_allclose(
        jax.jit(jax.grad(some))(J), jax.grad(some)(J), rtol=0, atol=1e-12 * np.abs(slope)
    )
    # d sum lambda = d tr J.
    trace = jax.grad(lambda J: jnp.sum(sv.eigvals(J).real))(J)
    np.testing.assert_allclose(trace, np.broadcast_to(np.eye(9), J.shape), atol=1e-12)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_principal_eigenpair_and_its_derivative(shift):
    J, direction = normal(4, 5, 8, 8), normal(5, 5, 8, 8)
    found = sv.spectra.principal(J, shift=shift)
    residual = np.einsum("sij,sj->si", J, found.vector) - found.value[:, None] * found.vector
    assert np.abs(residual).max() < 100 * EPS
    sizes = np.abs(shift + np.linalg.eigvals(J)).max(axis=-1)
    np.testing.assert_allclose(np.abs(shift + found.value), sizes, rtol=1e-14)
    assert np.all(found.value.imag >= 0)
    assert (found.value.imag > 0).any()
    assert (found.value.imag == 0).any()
    largest = np.take_along_axis(
        np.asarray(found.vector), np.abs(found.vector).argmax(-1)[:, None], axis=-1
    )
    assert np.abs(largest.imag).max() < EPS
    assert largest.real.min() > 0

    def pair(J):
        return sv.spectra.principal(J, shift=shift)

    step = 1e-6
    up, down = pair(J + step * direction), pair(J - step * direction)
    slope = jax.jvp(pair, (J,), (direction,))[1]
    for a, b, tangent in zip(up, down, slope):
        # Second differences are of order 1 / gap^2, times step^2; rounding eps / step.
        np.testing.assert_allclose(tangent, (a - b) / (2 * step), atol=1e-6 * np.abs(tangent).max())
    # The sign or phase of an eigenvector cannot be learned, its direction can.
    target = normal(6, 8)

    def aligned(J):
        return jnp.sum(jnp.abs(pair(J[0]).vector @ target.astype(complex)) ** 2)

    slope = jnp.sum(jax.grad(aligned)(J) * direction)
    difference = (aligned(J + step * direction) - aligned(J - step * direction)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-6)


@pytest.mark.parametrize(
    "matrix", [jnp.eye(4), jnp.asarray([[1.0, 1.0], [0.0, 1.0]]), jnp.zeros((3, 3))]
)
def test_what_has_no_derivative_raises_and_says_why(matrix):
    with pytest.raises(RuntimeError, match="repeated to working precision"):
        jax.grad(lambda J: jnp.sum(jnp.abs(sv.eigvals(J))))(matrix)
    with pytest.raises(RuntimeError, match="repeated to working precision"):
        jax.grad(lambda J: jnp.sum(jnp.abs(sv.spectra.principal(J).vector)))(matrix)


def test_eigenvalues_near_one_are_simple_in_float32_too():
    # As a layer's are: many within 1e-3 of each other, far above the rounding of the solve.
    J = (jnp.eye(64) + 0.01 * normal(3, 2, 64, 64) / 8).astype(jnp.float32)
    slope = jax.grad(lambda J: jnp.sum(sv.measures(J).henrici_departure))(J)
    assert np.isfinite(slope).all()
    with pytest.raises(RuntimeError, match=r"the eigenvalue 1\+0j of J\[1\] is repeated"):
        jax.grad(lambda J: jnp.sum(jnp.abs(sv.eigvals(J))))(J.at[1].set(jnp.eye(64, dtype=J.dtype)))


def test_second_derivatives_and_bad_matrices_are_refused():
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(lambda J: jnp.sum(sv.eigvals(J).real ** 2))(normal(0, 3, 3))
    for function in (sv.eigvals, sv.measures, sv.spectra.principal):
        with pytest.raises(ValueError, match="must be square matrices"):
            function(jnp.ones((3, 4)))
        with pytest.raises(ValueError, match="must be real floating point"):
            function(jnp.ones((3, 3), int))
        with pytest.raises(ValueError, match=r"J\[1, 2\] is not finite"):
            function(jnp.ones((2, 3, 4, 4)).at[1, 2, 0, 1].set(jnp.inf))
        with pytest.raises(ValueError, match=r"^J is not finite"):
            function(jnp.full((4, 4), jnp.nan))
    for top in (0, 4, 2.5, "a", True):
        with pytest.raises(ValueError, match=r"top must be one of 1 \.\. 3"):
            sv.measures(jnp.eye(3), top=top)
    with pytest.raises(ValueError, match="tau must be finite"):
        sv.measures(jnp.eye(3), tau=np.nan)
    with pytest.raises(ValueError, match="shift must be finite"):
        sv.spectra.principal(jnp.eye(3), shift=np.nan)


def test_measures_by_hand():
    # Eigenvalues 2 and +-i; singular values 4, 2, 1/4.
    J = jnp.asarray([[2.0, 0, 0], [0, 0, -4], [0, 0.25, 0]])
    found = sv.measures(J)
    assert as_set(found.eigenvalues, [2, 1j, -1j]) < 10 * EPS
    np.testing.assert_allclose(found.singular_values, [4, 2, 0.25], rtol=1e-15)
    squares = 16 + 4 + 1 / 16
    sigma = np.asarray([4, 2, 0.25]) / 6.25
    want = dict(
        complex_fraction=2 / 3,
        spectral_radius=2,
        condition_number=16,
        expanding_eigenvalues=1 / 3,
        expanding_singular_values=2 / 3,
        henrici_departure=np.sqrt((squares - 6) / squares),
        symmetric_part=(4 + 2 * (3.75 / 2) ** 2) / squares,
        self_alignment=0,  # the largest comes in along the third axis and out along the second
        update_ratio=np.sqrt((1 + 1 + 1 + 16 + 1 / 16) / squares),
        effective_rank=np.exp(-np.sum(sigma * np.log(sigma))),
        participation_ratio=squares**2 / (256 + 16 + 1 / 256),
    )
    for name, value in want.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-14, atol=1e-15)
    assert np.isnan(found.forward_alignment)
    assert set(want) | {"forward_alignment"} == set(SCALARS)


def test_special_matrices():
    assert np.isnan(sv.measures(jnp.zeros((3, 3))).effective_rank)
    eye = sv.measures(jnp.eye(6))
    zeros = ("complex_fraction", "henrici_departure", "update_ratio", "expanding_eigenvalues")
    assert all(getattr(eye, name) == 0 for name in zeros)
    assert eye.symmetric_part == eye.condition_number == 1
    np.testing.assert_allclose((eye.effective_rank, eye.participation_ratio), 6, rtol=1e-14)
    rotation = sv.measures(controls.haar(jax.random.key(0), 6))
    assert rotation.henrici_departure < 1e-7  # the root of a rounding
    singular = sv.measures(jnp.diag(jnp.asarray([1.0, 0.0])))
    assert singular.condition_number == np.inf
    assert singular.effective_rank == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_what_is_one_does_not_expand(dtype):
    """Attention alone adds a matrix of low rank: all other values are 1, in any rounding."""
    U, V = normal(0, 64, 8), normal(1, 8, 64)
    J = jnp.eye(64) + 0.3 * U @ V / 8
    exact = np.linalg.eigvals(0.3 * np.asarray(V @ U) / 8) + 1
    found = sv.measures(J.astype(dtype))
    assert float(found.expanding_eigenvalues) * 64 == np.sum(np.abs(exact) > 1)
    # Of I + U V the values of a plane of 16 dimensions differ from 1, half of them upwards.
    assert float(found.expanding_singular_values) * 64 == 8
    turn = sv.measures(controls.haar(jax.random.key(0), 64, dtype))
    assert turn.expanding_eigenvalues == turn.expanding_singular_values == 0


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e30), ("float64", 1e250)])
def test_measures_know_no_scale(dtype, scale):
    J = normal(1, 5, 5).astype(dtype)
    one, big, small = (sv.measures((s * J).astype(dtype)) for s in (1, scale, 1 / scale))
    eps = np.finfo(dtype).eps
    for name in ("henrici_departure", "symmetric_part", "effective_rank", "participation_ratio"):
        for other in (big, small):
            np.testing.assert_allclose(getattr(other, name), getattr(one, name), rtol=100 * eps)
    np.testing.assert_allclose(big.update_ratio, 1, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-250, 1e-140, 1e140, 1e300])
def test_eigenpairs_know_no_scale(scale):
    J = normal(2, 6, 6)
    one, other = (sv.spectra.principal(s * J) for s in (1, scale))
    np.testing.assert_allclose(other.value / scale, one.value, rtol=1e-13)
    np.testing.assert_allclose(other.vector, one.vector, atol=1e-13)
    slopes = [jax.grad(lambda J: jnp.sum(sv.eigvals(J).imag ** 2) ** 0.5)(s * J) for s in (1, 1e9)]
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-9)


def test_alignments_over_a_stack():
    J = normal(7, 4, 12, 12)
    for top in (1, 3, 12):
        found = sv.measures(J, top=top)
        for layer in range(4):
            U, _, Vh = np.linalg.svd(J[layer])
            own = np.sum((Vh[:top] @ U[:, :top]) ** 2) / top
            np.testing.assert_allclose(found.self_alignment[layer], own, rtol=1e-12)
            if layer < 3:
                following = np.linalg.svd(J[layer + 1])[2][:top]
                forward = np.sum((following @ U[:, :top]) ** 2) / top
                np.testing.assert_allclose(found.forward_alignment[layer], forward, rtol=1e-12)
        assert np.isnan(found.forward_alignment[-1])
    np.testing.assert_allclose(found.self_alignment, 1, rtol=1e-13)  # of whole spaces
    # A layer whose outputs are the next one's inputs.
    pair = jnp.stack([J[0], J[1] @ jnp.linalg.svd(J[1])[2].T @ jnp.linalg.svd(J[0])[0].T])
    np.testing.assert_allclose(sv.measures(pair, top=2).forward_alignment[0], 1, rtol=1e-12)


def test_the_baseline_is_what_noise_gives():
    J = jnp.eye(64) * 0 + normal(8, 20, 64, 64) * 0.3
    found = sv.measures(J)
    assert set(found.ginibre) == set(found.excess) == set(SCALARS)
    for name, excess in found.excess.items():
        values, expected = np.asarray(getattr(found, name)), found.ginibre[name]
        difference = values / expected if name == "condition_number" else values - expected
        np.testing.assert_array_equal(excess, difference)
        assert excess.shape == expected.shape == (20,)
        if name == "forward_alignment":
            values, expected = values[:-1], expected[:-1]
        if name == "condition_number":  # heavy tails: the logarithm has a mean
            values, expected = np.log(values), np.log(expected)
        error = 4 * np.std(values) / np.sqrt(len(values)) + 0.02 * np.abs(expected).mean()
        assert abs(np.mean(values - expected)) < error, name
    # A trained-like matrix stands out of it.
    assert sv.measures(jnp.eye(64) + 0.1 * J[0]).excess["symmetric_part"] > 0.3


def test_under_jit_and_without():
    J = normal(9, 3, 8, 8)
    eager, jitted = sv.measures(J), jax.jit(sv.measures)(J)
    for a, b in zip(eager, jitted):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    one = jax.vmap(sv.measures)(J)
    np.testing.assert_allclose(one.condition_number, eager.condition_number, rtol=1e-12)
    assert np.array_equal(one.ginibre["self_alignment"], eager.ginibre["self_alignment"])
    assert np.array_equal(jitted.ginibre["spectral_radius"], eager.ginibre["spectral_radius"])
    assert eager.on_host


DIFFERENTIABLE = (
    "spectral_radius",
    "condition_number",
    "henrici_departure",
    "symmetric_part",
    "self_alignment",
    "update_ratio",
    "effective_rank",
    "participation_ratio",
)


def test_derivatives_of_measures():
    J, direction, step = normal(10, 6, 6), normal(11, 6, 6), 1e-6

    @fast
    def slopes(J):
        return jax.jacrev(lambda J: [getattr(sv.measures(J, top=2), n) for n in DIFFERENTIABLE])(J)

    up, down = (sv.measures(J + s * step * direction, top=2) for s in (1, -1))
    for name, slope in zip(DIFFERENTIABLE, slopes(J)):
        difference = (getattr(up, name) - getattr(down, name)) / (2 * step)
        np.testing.assert_allclose(jnp.sum(slope * direction), difference, rtol=1e-6, err_msg=name)


def test_the_derivative_of_alignments_needs_only_the_gap_at_the_cut():
    turn = jnp.eye(6)[jnp.asarray([1, 2, 3, 4, 5, 0])]
    J = turn @ jnp.diag(jnp.asarray([4.0, 3, 2, 1.5, 1, 1])) + 0.1 * turn @ turn
    direction, step = normal(12, 6, 6), 1e-6
    repeated = jnp.linalg.svd(J)[0] @ jnp.diag(jnp.asarray([4.0, 4, 2, 2, 1, 1])) @ turn
    for matrix, top in ((J, 1), (repeated, 2), (repeated, 4)):

        def alignment(J, top=top):
            found = sv.measures(jnp.stack([J, J @ J]), top=top)
            return jnp.sum(found.self_alignment) + found.forward_alignment[0]

        slope = jnp.sum(jax.jit(jax.grad(alignment))(matrix) * direction)
        value = jax.jit(alignment)
        up, down = (value(matrix + s * step * direction) for s in (1, -1))
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-5, atol=1e-8)
    for transform in (lambda f: f, jax.jit):
        with pytest.raises(RuntimeError, match="singular values 1 and 2 are equal"):
            transform(jax.grad(lambda J: sv.measures(J, top=1).self_alignment))(repeated)


def test_under_a_transform_small_singular_values_stay():
    rows = 10.0 ** -jnp.arange(0, 16, 0.5)
    J = (jnp.tril(normal(13, 32, 32)) * rows[:, None]).astype(jnp.float32)
    exact = np.linalg.cond(np.asarray(J, np.float64))
    assert exact > 1e12
    for function in (sv.measures, jax.jit(sv.measures)):
        np.testing.assert_allclose(function(J).condition_number, exact, rtol=1e-3)


def test_a_known_matrix_within_a_transform():
    J = normal(14, 4, 4)
    sigma = jnp.linalg.svd(J, compute_uv=False)
    for function in (
        lambda s: s * jnp.abs(sv.eigvals(J)).max(),
        lambda s: s * sv.measures(J).condition_number,
        lambda s: s * sv.cumulative(J[None]).effective_rank[0],
        lambda s: s * sv.spectra.effective_rank(sigma),
        lambda s: s * jnp.abs(sv.spectra.principal(J).value),
        lambda s: s * sv.schur_normal(J)[0, 0],
        lambda s: s * controls.haar_similarity(jax.random.key(0), J)[0, 0],
        lambda s: s * controls.random_update(jax.random.key(0), J)[0, 0],
    ):
        np.testing.assert_allclose(jax.jit(function)(2.0), function(2.0), rtol=1e-12)


def test_effective_rank_needs_singular_values_only():
    def rank(J):
        return sv.spectra.effective_rank(jnp.linalg.svd(J, compute_uv=False))

    for J in (jnp.eye(5), jnp.diag(jnp.asarray([2.0, 2, 1, 1, 1]))):
        assert np.isfinite(jax.grad(rank)(J)).all()
    with pytest.raises(RuntimeError, match="repeated to working precision"):
        jax.grad(lambda J: sv.measures(J).spectral_radius)(jnp.eye(5))
    normal_matrix = jnp.diag(jnp.asarray([3.0, 2.0, 1.0]))
    with pytest.raises(RuntimeError, match="no derivative: it is a norm's kink"):
        jax.grad(lambda J: sv.measures(J).henrici_departure)(normal_matrix)


def test_an_accelerator_without_a_solver_uses_the_host():
    assert not eigenvalues._native("cpu")
    assert not eigenvalues._native("tpu")
