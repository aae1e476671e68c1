"""The leading eigenvalues of a causal layer from its tokens' blocks, and which are ruled out."""

import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import normal

import svflow as sv
from svflow.spectra import partial
from svflow.spectra.screen import Screen

EPS = float(np.finfo(np.float64).eps)
TOL = EPS ** (2 / 3)
TOKENS, WIDTH = 6, 60


def gaussian(random, *shape):
    return random.normal(size=shape) / np.sqrt(shape[-1])


def triangular(random, n):
    return np.diag(random.normal(size=n)) + 0.3 * np.triu(random.normal(size=(n, n)), 1)


def radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


def products(blocks):
    return lambda v: np.einsum("tij,tj->ti", blocks, v)


@pytest.fixture
def solved(monkeypatch):
    """The blocks that were solved, by dense solvers; the whole is screened."""
    calls, pairs = [], partial._pairs
    monkeypatch.setattr(partial, "_is_dense", lambda n, k: n <= WIDTH)

    def counted(A, *arguments):
        calls.append(A)
        return pairs(A, *arguments)

    monkeypatch.setattr(partial, "_pairs", counted)
    return calls


def union(blocks, k, **options):
    tokens, width = blocks.shape[:2]
    whole = partial._Operator(None, None, tokens * width, EPS)
    block = lambda token: partial._matrix(blocks[token], EPS)  # noqa: E731
    found = partial._union(whole, (tokens, width), products(blocks), block, k, **options)
    return partial.PartialSpectrum(*found)


def check(blocks, found):
    """Values, vectors, residuals, order and pairs against dense solutions of the blocks."""
    tokens, width = blocks.shape[:2]
    exact, k = np.linalg.eigvals(blocks).ravel(), len(found.values)
    size = np.linalg.norm(blocks, 2, axis=(1, 2)).max()
    assert found.converged.all()
    moduli = np.sort(np.abs(exact))[::-1][:k]
    np.testing.assert_allclose(np.abs(found.values), moduli, rtol=0, atol=1e-11 * size)
    gaps = np.abs(found.values[:, None] - exact)
    assert gaps[partial.linear_sum_assignment(gaps)].max() <= 1e-11 * size
    vectors = found.vectors.reshape(k, tokens, width)
    images = np.einsum("tij,ktj->kti", blocks, vectors) - found.values[:, None, None] * vectors
    np.testing.assert_allclose(np.linalg.norm(images, axis=(1, 2)), found.residuals, atol=1e-13)
    assert found.residuals.max() <= 1e-9 * size
    assert np.all((np.abs(vectors).max(axis=2) > 0).sum(axis=1) == 1)  # each of one token
    upper = np.flatnonzero(found.values.imag > 0)
    upper = upper[upper < k - 1]
    np.testing.assert_array_equal(found.values[upper + 1], found.values[upper].conj())
    whole = 2 * len(upper) + (found.values[-1].imag > 0)
    assert np.sum(found.values.imag != 0) == whole


@pytest.mark.parametrize("k", [1, 10, WIDTH + 15])
def test_the_union_of_the_blocks(k, solved, seed):
    random = np.random.default_rng(seed)
    scales = np.array([1, 0.3, 2.5, 0.2, 2.4, 0.1])
    blocks = np.eye(WIDTH) + scales[:, None, None] * gaussian(random, TOKENS, WIDTH, WIDTH)
    check(blocks, union(blocks, k))
    # The others' eigenvalues are smaller, and that was seen without solving them.
    assert len(solved) <= (2 if k <= 10 else 3)


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e-15, 1e30])
def test_no_scale_is_lost(scale, solved, seed):
    """Blocks that differ by 1 in 1000, whatever their size."""
    random = np.random.default_rng(seed)
    blocks = np.stack([gaussian(random, WIDTH, WIDTH)] * 4) * scale
    blocks *= np.array([0.3, 0.999, 1, 0.2])[:, None, None]
    found = union(blocks, 3)
    wanted = np.sort(np.abs(np.linalg.eigvals(blocks)).ravel())[::-1][:3]
    np.testing.assert_allclose(np.abs(found.values), wanted, rtol=1e-11)
    assert found.converged.all()
    assert len(solved) == 2


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize("krylov", [True, False])
def test_blocks_with_the_same_eigenvalues(k, krylov, monkeypatch, seed):
    monkeypatch.setattr(partial, "_is_dense", lambda n, k: n <= WIDTH and not krylov)
    block = gaussian(np.random.default_rng(seed), WIDTH, WIDTH)
    block[:2, :2] += 3 * np.array([[0.6, 0.8], [-0.8, 0.6]])
    blocks = np.stack([block, 0.1 * block, block])
    check(blocks, union(blocks, k))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e30])
@pytest.mark.usefixtures("solved")
def test_multiples_of_the_identity(value):
    found = union(value * np.stack([np.eye(WIDTH)] * 3), 4)
    assert found.converged.all()
    np.testing.assert_allclose(found.values, value, rtol=1e-13)


def test_what_no_block_is_sure_of_is_flagged(monkeypatch, seed):
    monkeypatch.setattr(partial, "_is_dense", lambda n, k: False)
    random, n = np.random.default_rng(seed), 200  # more than ARPACK's basis
    for outlier in (False, True):
        orthogonal = np.linalg.qr(random.normal(size=(n, n)))[0]
        blocks = np.stack([0.9 * gaussian(random, n, n), orthogonal, np.eye(n, k=1)])
        blocks[0, 0, 0] += 9 * outlier
        found = union(blocks, 3, max_iterations=1)
        exact = np.concatenate([*np.linalg.eigvals(blocks[:2]), np.zeros(n)])
        # The orthogonal block's eigenvalues are not found; above all of them one can be sure.
        assert found.converged.tolist() == [outlier, False, False]
        if outlier:
            assert abs(exact[np.abs(exact).argmax()] - found.values[0]) < 1e-11


KINDS = {
    "gaussian": lambda random: gaussian(random, WIDTH, WIDTH),
    "residual": lambda random: np.eye(WIDTH) + gaussian(random, WIDTH, WIDTH),
    "orthogonal": lambda random: np.linalg.qr(random.normal(size=(WIDTH, WIDTH)))[0],
    "triangular": lambda random: triangular(random, WIDTH),
    "shift": lambda random: np.eye(WIDTH, k=1),
    "jordan": lambda random: np.eye(WIDTH) + np.eye(WIDTH, k=1) * (np.arange(WIDTH) < 2),
    "one outlier": lambda random: np.diag(np.linspace(0, 1, WIDTH) + 1.0 * (np.arange(WIDTH) == 7)),
}


def test_nothing_is_excluded_that_is_there(seed):
    random = np.random.default_rng(seed)
    blocks = np.stack([make(random) for make in KINDS.values() for _ in range(3)])
    largest = np.array([radius(block) for block in blocks])
    largest[[i for i, name in enumerate(np.repeat(list(KINDS), 3)) if name == "shift"]] = 0
    largest[[i for i, name in enumerate(np.repeat(list(KINDS), 3)) if name == "jordan"]] = 1
    screen = Screen(products(blocks), blocks.shape[:2], random, limit=40)
    first = np.full(len(blocks), 99)
    while screen.steps < 40:
        screen.grow(range(len(blocks)), 4)
        for i, exact in enumerate(largest):
            assert not screen.excludes(i, exact * (1 - 1e-9))
            if screen.excludes(i, 1.3 * exact + 0.1):
                first[i] = min(first[i], screen.steps)
    assert np.all(first[:6] <= 40)  # of a size of 60


def test_a_polynomial_grows_as_said(seed):
    # |p(A) g| = |g| prod h, p the polynomial of the Ritz values.
    random = np.random.default_rng(seed)
    block = gaussian(random, 1, WIDTH, WIDTH)
    screen = Screen(products(block), (1, WIDTH), np.random.default_rng(5), limit=9)
    screen.grow([0])
    v = np.random.default_rng(5).normal(size=(1, WIDTH))[0].astype(complex)
    for theta in screen.ritz[0]:
        v = block[0] @ v - theta * v
    np.testing.assert_allclose(np.log(np.linalg.norm(v)), screen.log_norm[0], rtol=1e-10)
    q = screen.basis[0]
    np.testing.assert_allclose(q @ q.T, np.eye(10), atol=1e-14)


def test_who_was_left_behind_stays_there():
    blocks = np.stack([np.diag(np.arange(4.0))] * 2)
    screen = Screen(products(blocks), (2, 4), np.random.default_rng(0), limit=3)
    screen.grow([0], 1)
    with pytest.raises(ValueError, match=r"matrices \[1\] were left behind"):
        screen.grow([0, 1], 1)


# On flows


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_a_causal_layer(family, solved):
    model = tiny_model(family)
    x = model.embed(jnp.asarray([3, 1, 4, 1, 5]))
    context = sv.Context(mask=jnp.arange(5) > 0) if family == "gemma3_text" else None
    exact = np.sort_complex(np.asarray(sv.causal_spectrum(model.flow, 1, x, context=context)))
    exact = exact.ravel()[np.argsort(-np.abs(exact.ravel()), kind="stable")]
    push = partial._frozen_tangents(model.flow, np.int32(1), x, context)
    rows = normal(3, 5, 16)
    blocks = [sv.jacobian(model.flow, 1, x, token=t, context=context) for t in range(5)]
    expected = np.einsum("tij,tj->ti", np.stack(blocks), rows)
    size = np.linalg.norm(np.stack(blocks), 2, axis=(1, 2)).max()
    np.testing.assert_allclose(partial._push(push, rows), expected, rtol=0, atol=1e-13 * size)
    for k in (1, 5, 21):
        found = sv.partial_spectrum(model.flow, 1, x, k, context=context)
        assert found.converged.all()
        np.testing.assert_allclose(np.abs(found.values), np.abs(exact[:k]), atol=1e-11 * size)
        gaps = np.abs(np.asarray(found.values)[:, None] - exact)
        assert gaps[partial.linear_sum_assignment(gaps)].max() <= 1e-11 * size
    assert len(solved) < 3 * 5  # tokens


class Broken(sv.Flow):
    """A causal flow whose derivative is infinite at zero."""

    depth, width, causal = 3, 4, True

    def velocity(self, t, x, context=None):
        return jnp.sqrt(jnp.abs(x))


@pytest.mark.usefixtures("solved")
@pytest.mark.parametrize("tokens", [2, 20])
def test_a_derivative_that_is_not_finite_is_named(tokens):
    with pytest.raises(ValueError, match="Jacobian of layer 2 is not finite"):
        sv.partial_spectrum(Broken(), 2, jnp.zeros((tokens, 4)), 1)
