"""Leading eigenvalues and singular values: against dense solvers, and how honest the flags are."""

import tracemalloc

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from compilations import Compilations
from configs import tiny_model
from flax import nnx
from flows import LinearFlow, VelocityFlow, fast, normal, small_flows

import svflow as sv
from svflow.spectra import partial
from svflow.spectra.partial import partial_spectrum, propagator_singular_values

EPS = float(np.finfo(np.float64).eps)
TOL = EPS ** (2 / 3)
N = 90
IDS = jnp.asarray([3, 1, 4, 1, 5])


@pytest.fixture
def krylov(monkeypatch):
    """Krylov methods even where a dense solver would do."""
    monkeypatch.setattr(partial, "_is_dense", lambda n, k: False)


@pytest.fixture(params=["dense", "krylov"])
def either(request, monkeypatch):
    monkeypatch.setattr(partial, "_is_dense", lambda n, k: request.param == "dense")


def operator(matrix, eps=EPS):
    return partial._Operator(lambda v: matrix @ v, lambda u: matrix.T @ u, len(matrix), eps)


def eigenpairs(matrix, k, **options):
    return sv_spectrum(partial._eigenpairs(operator(matrix), k, **options))


def sv_spectrum(fields):
    return partial.PartialSpectrum(*fields)


def singular_triplets(matrix, k, **options):
    return partial.LeadingSingular(*partial._singular_triplets(operator(matrix), k, **options))


def similar(blocks, random, size=0.3):
    """X blocks X^-1 with X well conditioned."""
    n = len(blocks)
    X = np.eye(n) + size * random.normal(size=(n, n)) / np.sqrt(n)
    return X @ blocks @ np.linalg.inv(X)


def jordan(value, m, random, rest=0.5):
    blocks = np.diag(np.linspace(0, rest, N))
    blocks[:m, :m] = value * np.eye(m) + np.eye(m, k=1)
    return similar(blocks, random)


def rotations(radii, angles):
    blocks = np.zeros((2 * len(radii),) * 2)
    for i, (radius, angle) in enumerate(zip(radii, angles)):
        c, s = radius * np.cos(angle), radius * np.sin(angle)
        blocks[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    return blocks


def with_values(first, rest=0.5):
    return np.diag(np.concatenate([first, np.linspace(0, rest, N - len(first))]))


def gaussian(random):
    return random.normal(size=(N, N)) / np.sqrt(N)


def identity_and_rank_2(random):
    """Of eigenvalues 3, 2, 1, 1, ..., symmetric."""
    Q = np.linalg.qr(random.normal(size=(N, 2)))[0]
    return np.eye(N) + Q @ np.diag([2.0, 1.0]) @ Q.T


ANGLES = np.linspace(0.3, 2.8, N // 2)

# Matrices with the k that is asked for and the moduli that are right, exactly.
EXACT = {
    "identity": (lambda random: np.eye(N), [1] * 4),
    "identity and rank 2": (identity_and_rank_2, [3, 2, 1, 1]),
    "zero": (lambda random: np.zeros((N, N)), [0] * 4),
    "repeated": (lambda random: similar(with_values([3.0, 3, 3, 2]), random), [3, 3, 3, 2]),
    "repeated, diagonal": (lambda random: with_values([3.0, 3, 3, 3, 3]), [3] * 4),
    "opposite": (lambda random: similar(with_values([3.0, -3, 2, -2]), random), [3, 3, 2, 2]),
    "rotation": (lambda random: np.kron(np.eye(N // 2), rotations([1], [0.9])), [1] * 4),
    "repeated pairs": (
        lambda random: similar(rotations([2, 2, *[0.5] * (N // 2 - 2)], [0.9] * (N // 2)), random),
        [2] * 4,
    ),
    "pairs": (
        lambda random: similar(rotations(np.linspace(2, 0, N // 2), ANGLES), random),
        [2, 2, *[np.linspace(2, 0, N // 2)[1]] * 2],
    ),
    "rank 2": (lambda random: identity_and_rank_2(random) - np.eye(N), [2, 1, 0, 0]),
    "clustered": (
        lambda random: similar(with_values(1 + 1e-9 * np.arange(4.0)), random),
        1 + 1e-9 * np.arange(3, -1, -1),
    ),
    "small update": (lambda random: np.eye(N) + 1e-8 * np.diag(np.arange(N)), 1 + 1e-8 * 89),
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", EXACT)
def test_known_spectra_are_found_and_flagged(name, seed):
    make, moduli = EXACT[name]
    matrix, k = make(np.random.default_rng(seed)), np.size(moduli)
    found = eigenpairs(matrix, k)
    assert found.converged.all()
    size = np.linalg.norm(matrix, 2)
    np.testing.assert_allclose(np.abs(found.values), moduli, rtol=0, atol=1e-12 * max(size, 1))
    check_identities(matrix, found)


def check_identities(matrix, found):
    """The residuals, lengths, pairs and order are what is said of them, wherever found."""
    size, here = np.linalg.norm(matrix, 2), np.isfinite(found.values)
    values, vectors = found.values[here], found.vectors[here]
    assert np.all(here == np.isfinite(found.residuals))
    assert not found.converged[~here].any()
    residuals = np.linalg.norm(vectors @ matrix.T - values[:, None] * vectors, axis=1)
    np.testing.assert_allclose(found.residuals[here], residuals, rtol=0, atol=1e-14 * size)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-12)
    assert np.all(np.diff(np.abs(values)) <= 1e-15 * size)
    upper = np.flatnonzero(values.imag > 0)
    upper = upper[upper < len(values) - 1]
    np.testing.assert_array_equal(values[upper + 1], values[upper].conj())
    assert np.sum(values.imag != 0) == 2 * len(upper) + (len(values) > 0 and values[-1].imag > 0)


HARD = {
    "gaussian": gaussian,
    "symmetric": lambda random: gaussian(random) + gaussian(random).T,
    "small gaussian update": lambda random: np.eye(N) + 0.01 * gaussian(random),
    "orthogonal": lambda random: np.linalg.qr(gaussian(random))[0],
    "outlier and orthogonal": lambda random: (
        np.linalg.qr(gaussian(random))[0] + 9 * np.outer(*[np.eye(N)[0]] * 2)
    ),
    "shift": lambda random: np.eye(N, k=1),
    "nilpotent of rank 1": lambda random: np.outer(*np.linalg.qr(gaussian(random))[0][:2]),
    "jordan 2": lambda random: jordan(1, 2, random),
    "jordan 3": lambda random: jordan(1, 3, random),
    "jordan 5 of zero": lambda random: jordan(0, 5, random, 0.0),
    "nearly defective": lambda random: similar(
        np.eye(N, k=1) * (np.arange(N) == 0)[:, None] + with_values([1.0, 1 + 1e-6]), random
    ),
    "triangular": lambda random: np.triu(random.normal(size=(N, N))),
    "mildly triangular": lambda random: (
        np.diag(random.normal(size=N)) + 0.1 * np.triu(random.normal(size=(N, N)), 1)
    ),
    "reflection": lambda random: np.diag((-1.0) ** np.arange(N)),
    "ties at the cut": lambda random: similar(with_values([2.0, 1, 1, 1, -1, -1]), random),
}


def distances(values, exact):
    """The distances of values to as many different exact ones, in the best assignment."""
    gaps = np.abs(values[:, None] - exact[None])
    return gaps[partial.linear_sum_assignment(gaps)]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", HARD)
def test_a_value_that_is_off_is_flagged(name, seed):
    random, flagged = np.random.default_rng(seed), 0
    for trial in range(3):
        matrix = HARD[name](random)
        size = np.linalg.norm(matrix, 2)
        exact = exact_eigenvalues(name, matrix)
        for k in (1, 4):
            found = eigenpairs(matrix, k, seed=trial, max_iterations=20)
            check_identities(matrix, found)
            good = np.flatnonzero(found.converged)
            flagged += k - len(good)
            # Each flagged True is an eigenvalue, no two are the same one, and none is missing.
            assert distances(found.values[good], exact).max(initial=0) <= 2 * TOL * size
            for i in good:
                above = np.sum(np.abs(exact) > np.abs(found.values[i]) + 3 * TOL * size)
                assert above <= i
    always = ("shift", "jordan 2", "jordan 3", "jordan 5 of zero")
    assert flagged == 15 if name in always[:1] else flagged >= (3 if name in always else 0)


def exact_eigenvalues(name, matrix):
    if name in ("shift", "nilpotent of rank 1", "jordan 5 of zero"):
        return np.zeros(N)
    if name.startswith("jordan"):
        m = int(name[-1])
        return np.concatenate([np.ones(m), np.linspace(0, 0.5, N)[m:]])
    if "triangular" in name:
        return np.diag(matrix)
    return np.linalg.eigvals(matrix)


@pytest.mark.usefixtures("krylov")
@pytest.mark.parametrize("name", ["gaussian", "symmetric", "mildly triangular"])
def test_ordinary_matrices_converge(name, seed):
    random = np.random.default_rng(seed)
    for trial in range(3):
        found = eigenpairs(HARD[name](random), 4, seed=trial)
        assert found.converged.all()


@pytest.mark.usefixtures("krylov")
def test_an_outlier_is_verified_though_the_rest_never_converges(seed):
    matrix = np.linalg.qr(np.random.default_rng(seed).normal(size=(200, 200)))[0]
    matrix[0, 0] += 9
    found = eigenpairs(matrix, 3, max_iterations=10)
    assert found.converged.tolist() == [True, False, False]
    exact = np.linalg.eigvals(matrix)
    assert abs(found.values[0] - exact[np.abs(exact).argmax()]) < 1e-12


@pytest.mark.usefixtures("krylov")
def test_a_value_that_the_first_run_missed_is_found(monkeypatch, seed):
    random, arpack, calls = np.random.default_rng(seed), partial._arpack, []

    def forgetful(*arguments):
        values, vectors, complete = arpack(*arguments)
        calls.append(len(values))
        if len(calls) == 1:  # as a Krylov space of one vector holds one copy of a repeated value
            keep = np.argsort(-np.abs(values))[1:]
            values, vectors = values[keep], vectors[:, keep]
        return values, vectors, complete

    monkeypatch.setattr(partial, "_arpack", forgetful)
    matrix = similar(with_values([5.0, 4, 3, 2, 1]), random)
    found = eigenpairs(matrix, 3)
    np.testing.assert_allclose(found.values, [5, 4, 3], atol=1e-12)
    assert found.converged.all()
    assert len(calls) > 2


@pytest.mark.usefixtures("either")
def test_condition_numbers_are_those_of_the_eigenvalues(seed):
    random = np.random.default_rng(seed)
    matrix = similar(with_values([3.0, 2, 1.5, 1]), random, 1.0)
    found = eigenpairs(matrix, 3)
    values, right = np.linalg.eig(matrix)
    order = np.argsort(-np.abs(values))[:3]
    exact = np.linalg.norm(np.linalg.inv(right), axis=1)[order]
    np.testing.assert_allclose(found.condition, exact, rtol=1e-8)
    # Of a normal matrix they are 1; eigenvectors of a multiple value need not be orthogonal.
    condition = eigenpairs(with_values([3.0, 2, 1, 1, 1]), 5).condition
    np.testing.assert_allclose(condition[:2], 1, rtol=1e-10)
    assert np.all((condition > 1 - 1e-10) & (condition < 100))
    change = random.normal(size=(N, N))
    change *= 1e-7 / np.linalg.norm(change, 2)
    moved = np.abs(eigenpairs(matrix + change, 3).values - found.values)
    assert np.all(moved <= 1.01e-7 * found.condition)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e290])
def test_no_scale_is_special(scale, seed):
    matrix = gaussian(np.random.default_rng(seed))
    exponent = np.ldexp(1.0, round(np.log2(scale)))
    one, other = eigenpairs(matrix, 3), eigenpairs(exponent * matrix, 3)
    assert other.converged.all()
    np.testing.assert_allclose(other.values / exponent, one.values, rtol=1e-11)
    assert np.all(other.residuals / exponent < 1e-12)
    one, other = singular_triplets(matrix, 3), singular_triplets(exponent * matrix, 3)
    assert other.converged.all()
    np.testing.assert_allclose(other.values / exponent, one.values, rtol=1e-12)


def singular_matrix(values, random):
    U, V = (np.linalg.qr(random.normal(size=(N, N)))[0] for _ in range(2))
    return U * np.concatenate([values, np.zeros(N - len(values))]) @ V.T


SINGULAR = {
    "identity": lambda random: np.eye(N),
    "zero": lambda random: np.zeros((N, N)),
    "orthogonal": lambda random: np.linalg.qr(gaussian(random))[0],
    "gaussian": gaussian,
    "repeated": lambda random: singular_matrix([3.0, 3, 3, 2, 2, 1], random),
    "rank 2": lambda random: singular_matrix([2.0, 1], random),
    "below the root of eps": lambda random: singular_matrix(10.0 ** -np.arange(0, 30, 3), random),
    "graded": lambda random: singular_matrix(2.0 ** -np.arange(N), random),
    "clustered": lambda random: singular_matrix(1 + 1e-9 * np.arange(N), random),
    "shift": lambda random: np.eye(N, k=1),
    "identity and rank 2": identity_and_rank_2,
}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_values(name, seed):
    matrix = SINGULAR[name](np.random.default_rng(seed))
    found, size = singular_triplets(matrix, 5), np.linalg.norm(matrix, 2)
    assert found.converged.all()
    exact = np.linalg.svd(matrix, compute_uv=False)[:5]
    np.testing.assert_allclose(found.values, exact, rtol=0, atol=1e-11 * size)
    for vectors in (found.left, found.right):
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-8)
    np.testing.assert_allclose(
        found.right @ matrix.T, found.values[:, None] * found.left, atol=1e-12 * size
    )
    assert found.residuals.max() <= TOL * size


@pytest.mark.usefixtures("krylov")
def test_singular_values_that_do_not_converge_are_flagged(seed):
    matrix = singular_matrix(1 - 1e-7 * np.arange(N) ** 2, np.random.default_rng(seed))
    matrix = np.kron(np.eye(3), matrix) + np.diag(1e-9 * np.arange(3 * N))
    exact = np.linalg.svd(matrix, compute_uv=False)
    for tol in (1e-13, 1e-6):
        found = singular_triplets(matrix, 8, max_iterations=1, tol=tol)
        good = np.flatnonzero(found.converged)
        assert np.all(np.abs(found.values[good] - exact[good]) <= 3 * tol)


# On flows


def dense_jacobian(flow, layer, x, scope, token, context=None):
    @fast
    def jacobian(flow, x):
        if scope == "full":
            return jax.jacrev(lambda y: flow.step(layer, y, context))(x).reshape(x.size, x.size)
        if scope == "frozen":
            step = lambda row: flow.step(layer, x.at[token].set(row), context)[token]  # noqa: E731
        else:
            step = lambda row: flow.step(layer, row[None])[0]  # noqa: E731
        return jax.jacrev(step)(x[token])

    return np.asarray(jacobian(flow, x), np.float64)


def check_spectrum(found, matrix, tol):
    size = np.linalg.norm(matrix, 2)
    exact = np.linalg.eigvals(matrix)
    assert found.converged.all()
    assert distances(np.asarray(found.values), exact).max() <= 2 * tol * size
    moduli = np.sort(np.abs(exact))[::-1][: len(found.values)]
    np.testing.assert_allclose(np.abs(found.values), moduli, rtol=0, atol=2 * tol * size)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("family", "scope"), [("gpt2", "full"), ("llama", "isolated"), ("bert", "full")]
)
def test_a_layer_of_a_transformer(family, scope):
    model = tiny_model(family)
    x = model.embed(IDS)
    found = partial_spectrum(model.flow, 1, x, 5, scope=scope, token=2)
    matrix = dense_jacobian(model.flow, 1, x, scope, 2)
    check_spectrum(found, matrix, TOL)
    if model.flow.causal and scope == "full":  # the vectors are those of single tokens
        matrix = scipy.linalg.block_diag(
            *(matrix[i : i + 16, i : i + 16] for i in range(0, 80, 16))
        )
    check_identities(matrix, sv_spectrum(map(np.asarray, found)))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", ["constant", "velocity"])
def test_a_layer_of_a_small_flow(name):
    flow, x = small_flows()[name], normal(1, 3, 6)
    found = partial_spectrum(flow, 2, x, 2, scope="full")
    # Without coupling of tokens every eigenvalue is there three times.
    check_spectrum(found, dense_jacobian(flow, 2, x, "full", 0), TOL)


@pytest.mark.usefixtures("either")
def test_the_mask_of_a_context_is_used():
    model, x = tiny_model("llama"), tiny_model("llama").embed(IDS)
    values = []
    for mask in (jnp.arange(5) > 1, jnp.ones(5, bool)):
        context = sv.Context(mask=mask)
        found = partial_spectrum(model.flow, 0, x, 2, context=context, scope="frozen", token=-1)
        check_spectrum(found, dense_jacobian(model.flow, 0, x, "frozen", -1, context), TOL)
        values.append(found.values)
    assert np.abs(values[0] - values[1]).max() > 1e-4


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_types_are_honest(dtype):
    flow, x = small_flows(jnp.dtype(dtype))["velocity"], normal(1, 3, 6, dtype=dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), flow)
    matrix = dense_jacobian(wide, 1, x.astype(jnp.float64), "full", 0)
    tol = float(np.finfo(np.float32).eps) ** (2 / 3)
    found = partial_spectrum(flow, 1, x, 3)
    assert found.values.dtype == found.vectors.dtype == jnp.complex64
    assert found.residuals.dtype == jnp.float32
    check_spectrum(found, matrix, tol)
    # The rounding is not hidden by asking for more than the type has.
    assert not partial_spectrum(flow, 1, x, 3, tol=1e-8).converged.any()
    singular = propagator_singular_values(flow, x, 2)
    exact = np.linalg.svd(dense_propagator(wide, x.astype(jnp.float64)), compute_uv=False)
    assert singular.converged.all()
    assert singular.values.dtype == jnp.float32
    np.testing.assert_allclose(singular.values, exact[:2], rtol=0, atol=tol * exact[0])


def dense_propagator(flow, x, token=None, **options):
    @fast
    def jacobian(flow, x):
        def end(y):
            return sv.simulate(flow, y, **options).xs[-1]

        if token is None:
            return jax.jacrev(end)(x).reshape(x.size, x.size)
        return jax.jacrev(lambda row: end(x.at[token].set(row))[token])(x[token])

    return np.asarray(jacobian(flow, x))


def check_singular(found, matrix):
    exact = np.linalg.svd(matrix, compute_uv=False)
    assert found.converged.all()
    k = len(found.values)
    np.testing.assert_allclose(found.values, exact[:k], rtol=0, atol=1e-11 * exact[0])
    left, right = np.asarray(found.left), np.asarray(found.right)
    np.testing.assert_allclose(
        right @ matrix.T, np.asarray(found.values)[:, None] * left, atol=1e-11 * exact[0]
    )


@pytest.mark.usefixtures("either")
def test_the_propagator_of_a_transformer():
    model = tiny_model("gpt2")
    x = model.embed(IDS)
    found = propagator_singular_values(model.flow, x, 3)
    check_singular(found, dense_propagator(model.flow, x))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("solver", "token"), [(sv.Strang(), None), (diffrax.Tsit5(), None), (None, -1)]
)
def test_the_propagator_of_a_small_flow(solver, token):
    options = dict(t0=1.0, t1=2.5, dt=0.5, solver=solver, token=token)
    flow, x = small_flows()["velocity"], normal(1, 3, 6)
    found = propagator_singular_values(flow, x, 2, **options)
    check_singular(found, dense_propagator(flow, x, **options))


@pytest.mark.usefixtures("either")
def test_a_flow_that_stands_still():
    flow, x = LinearFlow(jnp.zeros((2, 6, 6))), normal(0, 5, 6)
    spectrum = partial_spectrum(flow, 0, x, 3)
    singular = propagator_singular_values(flow, x, 3)
    for found in (spectrum, singular):
        assert found.converged.all()
        np.testing.assert_allclose(found.values, 1, rtol=1e-14)


# Compilation and memory


@pytest.mark.usefixtures("krylov")
def test_a_second_call_compiles_nothing():
    model, other = tiny_model("gpt2"), tiny_model("gpt2", seed=1)
    x = model.embed(IDS[:4])
    small, different = (VelocityFlow(normal(i, 6, 6, scale=0.3), 3) for i in range(2))
    y = normal(2, 4, 6)

    def run(flow, small, layer, token):
        return (
            partial_spectrum(flow, layer, x, 2).values,
            partial_spectrum(small, layer, y, 2, scope="frozen", token=token).values,
            propagator_singular_values(small, y, 2, token=token).values,
        )

    with Compilations() as first:
        before = run(model.flow, small, 0, 1)
    assert first.count >= 6
    with Compilations() as later:
        new_weights = run(other.flow, different, 0, 1)
        run(model.flow, small, 1, 2)
    assert later.count == 0
    for old, new in zip(before, new_weights):
        assert np.abs(old - new).max() > 1e-3


class Diagonal(sv.Flow):
    """dx/dt = a x, elementwise: nothing of it is larger than the state."""

    def __init__(self, rates):
        self.depth, self.width, self.rates = 1, rates.shape[1], nnx.Param(rates)

    def velocity(self, t, x, context=None):
        return self.rates[...] * x


def test_no_matrix_is_formed():
    rates = np.zeros((20, 200))
    rates.flat[:3] = 5.0, 4.0, -4.5
    flow, x = Diagonal(jnp.asarray(rates)), jnp.ones((20, 200))
    programs = (
        partial._step_jvp.lower(flow, jnp.int32(0), x, jnp.int32(0), None, x, scope="full"),
        partial._step_vjp.lower(flow, jnp.int32(0), x, jnp.int32(0), None, x, scope="full"),
    )
    for program in programs:
        assert program.compile().memory_analysis().temp_size_in_bytes < 10 * x.nbytes
    tracemalloc.start()
    found = partial_spectrum(flow, 0, x, 3)
    singular = propagator_singular_values(flow, x, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.size**2 * 8 / 4
    np.testing.assert_allclose(found.values, [6, 5, -3.5], atol=1e-11)
    np.testing.assert_allclose(singular.values, [6, 5, 3.5], atol=1e-11)
    assert found.converged.all()
    assert singular.converged.all()


@pytest.mark.usefixtures("krylov")
def test_the_same_seed_gives_the_same_result(seed):
    matrix = gaussian(np.random.default_rng(seed))
    for a, b in zip(eigenpairs(matrix, 3, seed=3), eigenpairs(matrix, 3, seed=3)):
        np.testing.assert_array_equal(a, b)


# What is refused


class Broken(sv.Flow):
    """A step whose derivative is infinite at zero."""

    depth, width = 3, 4

    def velocity(self, t, x, context=None):
        return jnp.sqrt(jnp.abs(x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (dict(k=0), {}, "k must be from 1 to 18"),
        (dict(k=19), {}, "k must be from 1 to 18"),
        (dict(k=7), dict(scope="frozen"), "k must be from 1 to 6"),
        (dict(k=1.5), {}, "k must be an integer"),
        (dict(layer=4), {}, "layer must be one of 0 .. 3"),
        (dict(layer=-1), {}, "layer must be one of 0 .. 3"),
        (dict(flow="x"), {}, "must be an svflow.Flow"),
        (dict(x=jnp.zeros((3, 5))), {}, r"shape \(tokens, 6\)"),
        (dict(x=jnp.zeros((3, 6), int)), {}, "floating point"),
        (dict(x=jnp.full((3, 6), jnp.nan)), {}, "state before layer 0 is not finite"),
        ({}, dict(scope="all"), "scope must be one of"),
        ({}, dict(token=3), "is not one of 3 tokens"),
        ({}, dict(tol=0), "tol must be"),
        ({}, dict(tol=float("nan")), "tol must be"),
        ({}, dict(max_iterations=0), "max_iterations"),
        ({}, dict(context=sv.Context(mask=jnp.ones(2, bool))), "context.mask"),
    ],
)
def test_bad_input_to_the_spectrum(arguments, options, message):
    given = dict(flow=small_flows()["velocity"], layer=0, x=normal(0, 3, 6), k=2)
    given.update(arguments)
    with pytest.raises(ValueError, match=message):
        partial_spectrum(**given, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=0), "k must be from 1 to 18"),
        (dict(token=5), "is not one of 3 tokens"),
        (dict(t0=2.0, t1=1.0), "the span must run forwards"),
        (dict(dt=0.3), "does not divide"),
        (dict(tol=-1.0), "tol must be"),
    ],
)
def test_bad_input_to_the_propagator(options, message):
    given = dict(flow=small_flows()["velocity"], x=normal(0, 3, 6), k=2)
    with pytest.raises(ValueError, match=message):
        propagator_singular_values(**{**given, **options})


@pytest.mark.usefixtures("either")
def test_a_derivative_that_is_not_finite_is_named():
    x = jnp.zeros((2, 4))
    with pytest.raises(ValueError, match="Jacobian of layer 2 is not finite"):
        partial_spectrum(Broken(), 2, x, 1)
    with pytest.raises(ValueError, match="propagator from t = 0 to 3 is not finite"):
        propagator_singular_values(Broken(), x, 1)


def test_under_a_transform_it_says_so():
    flow = small_flows()["velocity"]
    with pytest.raises(ValueError, match="not under a JAX transform"):
        jax.jit(lambda x: partial_spectrum(flow, 0, x, 1))(normal(0, 3, 6))


@pytest.mark.usefixtures("krylov")
def test_an_interrupt_passes_through():
    calls = []

    def apply(v):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return np.arange(N) * v

    A = partial._Operator(apply, apply, N, EPS)
    with pytest.raises(KeyboardInterrupt):
        partial._eigenpairs(A, 2)
    assert len(calls) == 30
