"""The vMF normaliser in all dimensions, and mixtures: densities, posteriors, scores, samples."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from flows import fast, normal

from svflow import geometry, score
from svflow.score.sampling import von_mises_fisher

EPS = float(jnp.finfo(jnp.float64).eps)
CONCENTRATIONS = (0.0, 1e-6, 0.01, 1.0, 7.0, 24.0, 90.0, 1e3, 3e4, 1e6)
# Both parities, both sides of the order at which the recurrence ends (d = 50), and the ends.
DIMENSIONS = (2, 3, 49, 576, 8192)


@functools.cache
def reference(dimension, concentration):
    """log C_d(0) - log C_d, log C_d, A_d and A_d' in 50 digits."""
    with mpmath.workdps(60):
        nu, k = mpmath.mpf(dimension) / 2 - 1, mpmath.mpf(concentration)
        uniform = mpmath.loggamma(nu + 1) - mpmath.log(2) - (nu + 1) * mpmath.log(mpmath.pi)
        if concentration == 0:
            return mpmath.mpf(0), uniform, mpmath.mpf(0), mpmath.mpf(1) / dimension
        bessel, following = (mpmath.besseli(nu + i, k, maxterms=10**6) for i in (0, 1))
        log_c = nu * mpmath.log(k) - (nu + 1) * mpmath.log(2 * mpmath.pi) - mpmath.log(bessel)
        ratio = following / bessel
        slope = 1 - ratio**2 - (dimension - 1) * ratio / k
        return tuple(mpmath.mpf(value) for value in (uniform - log_c, log_c, ratio, slope))


def derivatives(dimension, k):
    """cumulant, log_normaliser, and the derivatives of the first by forward and reverse mode."""
    cumulant = functools.partial(score.cumulant, dimension)
    each = jax.vmap(jax.grad(cumulant)), jax.vmap(jax.jacfwd(jax.grad(cumulant)))
    return cumulant(k), score.log_normaliser(dimension, k), *(f(k) for f in each)


@functools.cache
def computed(dimension, dtype):
    k = jnp.asarray(CONCENTRATIONS, dtype)
    return fast(functools.partial(derivatives, dimension))(k)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_normaliser_and_its_derivatives(dimension):
    double, single = computed(dimension, "float64"), computed(dimension, "float32")
    assert all(values.dtype == jnp.float32 for values in single)
    for place, k in enumerate(CONCENTRATIONS):
        exact = reference(dimension, k)
        # What float32 makes of the concentration.
        rounded = reference(dimension, float(np.float32(k)))
        uniform = abs(exact[0] + exact[1])
        for values, exact_values, tolerance in ((double, exact, 1e-13), (single, rounded, 5e-6)):
            for i, value in enumerate(exact_values):
                # log C = log C(0) - cumulant crosses zero, where it has no relative accuracy.
                size = uniform + k if i == 1 else abs(value) or 1e-300
                error = abs(mpmath.mpf(float(values[i][place])) - value) / size
                assert error < tolerance, (k, i, float(error))


def test_the_normaliser_is_relatively_accurate_away_from_its_zero():
    for dimension in DIMENSIONS:
        for place, k in enumerate(CONCENTRATIONS):
            exact = reference(dimension, k)[1]
            if abs(exact) > 0.1 * max(1, k):
                value = mpmath.mpf(float(computed(dimension, "float64")[1][place]))
                assert abs(value - exact) < 1e-12 * abs(exact), (dimension, k)


def test_closed_forms_and_types():
    # d = 3: C = k / (4 pi sinh k), A = coth k - 1 / k.
    k = jnp.asarray([0.5, 2.0, 20.0])
    np.testing.assert_allclose(
        score.log_normaliser(3, k), np.log(k / (4 * np.pi * np.sinh(k))), rtol=1e-13
    )
    np.testing.assert_allclose(score.bessel_ratio(3, k), 1 / np.tanh(k) - 1 / k, rtol=1e-13)
    # The approximation of theory: log C ~ c - k^2 / (2 d), its error of order k^4 / d^3.
    np.testing.assert_allclose(score.cumulant(64, 4.0), 16 / 128, rtol=16 / 64**2)
    assert np.isfinite(score.cumulant(8192, jnp.asarray(1e6, jnp.float32)))
    assert score.cumulant(64, 2).dtype == jnp.float64
    assert score.cumulant(64, jnp.asarray(2, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_concentrations_whose_square_overflows(dtype):
    root, largest = (float(jnp.finfo(dtype).max) ** p for p in (0.5, 1))
    k = jnp.asarray([2 * root, 1e3 * root, largest / 2, np.inf], dtype)
    for dimension in (2, 8192):
        values = fast(functools.partial(derivatives, dimension))(k)
        np.testing.assert_allclose(values[0], k, rtol=1e-6)
        np.testing.assert_allclose(values[1], -k, rtol=1e-6)
        assert np.array_equal(values[2], [1] * 4)
        assert np.array_equal(score.bessel_ratio(dimension, k), [1] * 4)
        assert np.all((values[3] >= 0) & (values[3] < 1e-30))
    ratios = score.bessel_ratio(2, jnp.asarray(10.0 ** np.arange(6, 12), dtype))
    assert np.all((ratios > 1 - 1e-6) & (ratios <= 1))


def test_wrong_concentrations_and_dimensions_are_refused():
    assert score.cumulant(np.int64(3), 1.0) == score.cumulant(3, 1.0)
    for function in (score.cumulant, score.log_normaliser, score.bessel_ratio):
        with pytest.raises(ValueError, match=r"must not be negative, got -0\.5"):
            function(4, jnp.asarray([1.0, -0.5]))
        with pytest.raises(ValueError, match="at least 2, got 1"):
            function(1, 2.0)
        with pytest.raises(ValueError, match=r"must be an int, got 2\.0"):
            function(2.0, 2.0)
        for wrong in ("a", None, 1 + 1j, True):
            with pytest.raises(ValueError, match="must be a real number"):
                function(4, wrong)
        with pytest.raises(ValueError, match="must be a real number, got complex128"):
            jax.eval_shape(functools.partial(function, 4), jnp.asarray(1 + 1j))
        values = jax.jit(functools.partial(function, 4))(jnp.asarray([1.0, -0.5, jnp.nan]))
        assert np.array_equal(np.isnan(values), [False, True, True])


def vmf(width=5, components=4, seed=0, dtype=jnp.float64):
    means = geometry.sphere(normal(seed, components, width)).astype(dtype)
    concentrations = jnp.linspace(0.5, 2.0 * width, components).astype(dtype)
    weights = jnp.arange(1, components + 1).astype(dtype) / (components * (components + 1) / 2)
    return score.VMFMixture(means, concentrations, weights)


def gaussian(width=5, components=4, seed=0, dtype=jnp.float64):
    means = normal(seed, components, width, dtype=dtype)
    deviations = jnp.linspace(0.5, 1.5, components).astype(dtype)
    weights = jnp.arange(1, components + 1).astype(dtype) / (components * (components + 1) / 2)
    return score.GaussianMixture(means, deviations, weights)


def test_densities_integrate_to_one():
    angle = np.arange(256) * 2 * np.pi / 256
    circle = np.sqrt(2) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    # The trapezoidal rule converges faster than any power on a period.
    total = np.exp(log_density(vmf(2), jnp.asarray(circle))).sum() * 2 * np.pi / 256
    np.testing.assert_allclose(total, 1, rtol=1e-13)
    height, measure = np.polynomial.legendre.leggauss(64)
    across = np.sqrt(1 - height**2)[:, None]
    ball = np.stack(
        [across * np.cos(angle), across * np.sin(angle), height[:, None] + 0 * angle], axis=-1
    )
    density = np.exp(log_density(vmf(3), jnp.asarray(np.sqrt(3) * ball.reshape(-1, 3))))
    total = (density.reshape(64, 256).sum(axis=1) * 2 * np.pi / 256) @ measure
    np.testing.assert_allclose(total, 1, rtol=1e-13)
    line = np.linspace(-20, 20, 4001)
    total = np.exp(log_density(gaussian(1), jnp.asarray(line[:, None]))).sum() * 0.01
    np.testing.assert_allclose(total, 1, rtol=1e-13)


@pytest.mark.parametrize("make", [vmf, gaussian])
def test_posterior_score_and_elbo(make):
    mixture = make()
    x = normal(3, 6, 5)
    x = geometry.sphere(x) if mixture.manifold == "sphere" else x
    q = jax.nn.softmax(normal(4, 6, 4, scale=2.0))
    q = q.at[0].set(jnp.asarray([0, 0.25, 0.75, 0]))

    @fast
    def everything(mixture, x, q):
        gradient = jax.grad(lambda x: jnp.sum(mixture.log_density(x)))(x)
        held = jax.grad(lambda x: jnp.sum(mixture.elbo(x, q)))(x)
        p = mixture.posterior(x)
        joint = mixture.log_likelihoods(x) + mixture.log_prior  # the constant included
        return dict(
            score=(mixture.score(x), gradient),
            field=(mixture.field(x, q), held),
            ambient=(mixture.ambient(x, p), gradient),
            bayes=(jnp.exp(joint - mixture.log_density(x)[:, None]), p),
            log_posterior=(mixture.log_posterior(x), jnp.log(p)),
            gap=(mixture.log_density(x) - mixture.elbo(x, q), score.gap(mixture, x, q).kl),
            tight=(mixture.elbo(x, p), mixture.log_density(x)),
            free=(mixture.free_energy(x, q), -mixture.elbo(x, q)),
            least=(mixture.free_energy(x), -mixture.log_density(x)),
        )

    seen = everything(mixture, x, q)
    if mixture.manifold == "sphere":
        for name in ("score", "field"):
            mine, ambient = seen[name]
            seen[name] = mine, geometry.tangent(x, ambient)
            np.testing.assert_allclose(np.sum(mine * x, axis=1), 0, atol=1e-13)
    for name, (ours, expected) in seen.items():
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12, err_msg=name)
    kl = np.asarray(seen["gap"][0])
    assert kl.min() > 1e-3
    np.testing.assert_allclose(seen["bayes"][1].sum(axis=1), 1, rtol=4 * EPS)


def test_posterior_bound_holds_and_can_be_tight():
    def one(key):
        a, b, c = jax.random.split(key, 3)
        mixture = score.VMFMixture.from_natural(3 * jax.random.normal(a, (5, 4)))
        x = geometry.sphere(jax.random.normal(b, (1, 4)))
        q = jax.nn.softmax(4 * jax.random.normal(c, (1, 5)))
        s = mixture.score(x)
        return score.gap(mixture, x, q), jnp.linalg.norm(s), jnp.sum(s * mixture.field(x, q))

    seen, size, rate = fast(jax.vmap(one))(jax.random.split(jax.random.key(0), 2000))
    assert np.all(seen.field <= seen.bound)
    assert np.all(seen.kl >= 0)
    # Hence d/dt log p >= |s| (|s| - B sqrt(2 KL)) along the field of any posterior.
    assert np.all(rate >= size * (size - seen.bound[:, 0]) - 1e-12)
    # Pinsker's inequality leaves at most a factor of about 2 for two opposite components.
    mixture = score.VMFMixture.from_natural(jnp.asarray([[0.0, 3.0], [0.0, -3.0]]))
    x = jnp.asarray([[2.0**0.5, 0.0]])
    near = score.gap(mixture, x, jnp.asarray([[0.51, 0.49]]))
    np.testing.assert_allclose(near.field / near.bound, 1, rtol=1e-3)


def test_natural_parameters_are_the_other_way_in():
    mixture = vmf()
    x = geometry.sphere(normal(5, 3, 5))

    @fast
    def everything(mixture, x):
        again = score.VMFMixture.from_natural(mixture.natural[...], jnp.exp(mixture.log_prior))
        k = mixture.concentrations
        means = mixture.natural[...] * 5 / k[:, None]
        cosines = jnp.cos(geometry.geodesic(means, x[:1]))
        densities = mixture.log_density(x), again.log_density(x)
        return *densities, k, means, mixture.natural[...] @ x[0], k * cosines

    ours, again, k, means, dots, expected = everything(mixture, x)
    np.testing.assert_allclose(ours, again, rtol=1e-14)
    np.testing.assert_allclose(k, np.linspace(0.5, 10.0, 4), rtol=1e-14)
    # The means are states: eta . x = kappa cos(mu, x).
    np.testing.assert_allclose(np.sum(means**2, axis=1), 5, rtol=1e-14)
    np.testing.assert_allclose(dots, expected, rtol=1e-12)
    # At kappa = 0 the density is uniform and has a derivative.
    flat = score.VMFMixture.from_natural(jnp.zeros((1, 3)))
    state = geometry.sphere(normal(6, 1, 3))
    value, gradient = fast(jax.value_and_grad(lambda m, x: m.log_density(x).sum()))(flat, state)
    np.testing.assert_allclose(value, -np.log(4 * np.pi), rtol=1e-14)
    np.testing.assert_allclose(gradient.natural[...], state, rtol=1e-14)


@functools.cache
def sampler(count):
    return fast(lambda mixture, key: mixture.sample(key, count))


def draw(mixture, seed, count):
    return np.asarray(sampler(count)(mixture, jax.random.key(seed)))


@fast
def log_density(mixture, x):
    return mixture.log_density(x)


@pytest.mark.parametrize(
    ("dimension", "count", "concentrations"),
    [(2, 4000, (0.0, 0.7, 50.0)), (3, 4000, (2.0, 1e5)), (8192, 64, (1e4,))],
)
def test_samples_have_the_moments_of_the_density(dimension, count, concentrations):
    means = geometry.sphere(normal(1, 1, dimension))
    for place, k in enumerate(concentrations):
        mixture = score.VMFMixture(means, jnp.asarray([k]))
        x = draw(mixture, place, count)
        assert x.shape == (count, dimension)
        np.testing.assert_allclose(np.sum(x * x, axis=1), dimension, rtol=1e-13)
        w = x @ np.asarray(means[0]) / dimension
        ratio = float(score.bessel_ratio(dimension, k))
        variance = 1 / dimension if k == 0 else 1 - ratio**2 - (dimension - 1) * ratio / k
        if k == 1e5:  # 1 - w is a gamma variate of mean (d - 1) / (2 k), here exponential
            variance = k**-2
        assert abs(w.mean() - ratio) < 5 * np.sqrt(variance / count)
        # The fourth moment of what is between a uniform and an exponential is at most 9.
        assert abs(w.var() / variance - 1) < 5 * np.sqrt(8 / count)
        # Around the mean they are uniform: their mean there is a random walk's.
        around = x - w[:, None] * np.asarray(means)
        spread = np.sum(around**2) / count**2
        assert np.sum(np.mean(around, axis=0) ** 2) < spread * (1 + 5 * np.sqrt(2))


def test_samples_of_mixtures():
    mixture = score.VMFMixture(
        geometry.sphere(jnp.asarray([[1.0, 1.0], [-1.0, -1.0]])),
        jnp.asarray([200.0, 200.0]),
        jnp.asarray([0.2, 0.8]),
    )
    x = draw(mixture, 0, 4000)
    assert abs(np.mean(x[:, 0] < 0) - 0.8) < 5 * np.sqrt(0.16 / 4000)
    assert np.array_equal(x, draw(mixture, 0, 4000))
    assert not np.array_equal(x, draw(mixture, 1, 4000))
    wide = gaussian(3, 2)
    y = draw(wide, 0, 4000)
    prior = np.exp(wide.log_prior)[:, None]
    means, square = np.asarray(wide.means[...]), np.exp(2 * wide.log_deviations[...])[:, None]
    mean = np.sum(prior * means, axis=0)
    variance = np.sum(prior * (square + means**2), axis=0) - mean**2
    assert np.all(np.abs(y.mean(axis=0) - mean) < 5 * np.sqrt(variance / 4000))
    assert np.all(np.abs(y.var(axis=0) / variance - 1) < 5 * np.sqrt(8 / 4000))


@pytest.mark.parametrize(("dtype", "k"), [("float32", 1e19), ("float64", 1e154)])
def test_the_sharpest_mixtures_can_be_sampled_and_sharper_ones_are_refused(dtype, k):
    mean = jnp.asarray([[2, 0, 0, 0]], dtype)
    mixture = score.VMFMixture(mean, jnp.asarray([k], dtype))
    x = draw(mixture, 0, 512)
    # |x - mean|^2 = 8 (1 - w), and kappa (1 - w) has the mean (d - 1) / 2 up to its noise.
    apart = np.asarray(x[:, 1:], np.float64) * k**0.5
    assert abs(np.mean(np.sum(apart**2, axis=1)) / 12 - 1) < 0.15
    np.testing.assert_allclose(x[:, 0], 2, rtol=1e-6)
    for make in (
        lambda k: score.VMFMixture(mean, k),
        lambda k: score.VMFMixture.from_natural(mean * k[:, None] / 4),
    ):
        with pytest.raises(ValueError, match=f"are too large for {dtype}, in which squares"):
            make(jnp.asarray([10 * k], dtype))


def test_samples_end_at_any_concentration():
    k = jnp.asarray([1e19, 1e20, 3e38, np.inf, np.nan], jnp.float32)
    directions = jnp.broadcast_to(jnp.eye(3, dtype=jnp.float32)[0], (5, 3))
    x = fast(von_mises_fisher)(jax.random.key(0), directions, k)
    np.testing.assert_allclose(x[:4], directions[:4], atol=1e-6)
    assert np.isnan(x[4]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_the_device_takes_for_zero(dtype):
    weights = jnp.asarray(np.asarray([1e-40, 1], np.float64), dtype)
    means = normal(0, 2, 3, dtype=dtype)
    mixture = score.GaussianMixture(means, jnp.ones(2, dtype), weights)
    least = float(np.log(np.asarray(weights, np.float64)[0]))
    np.testing.assert_allclose(mixture.log_prior, [least, 0], rtol=4e-3)
    q = jnp.asarray([[0.0, 1.0], [0.5, 0.5]], jnp.float32)
    elbo = mixture.elbo(means, q)
    assert np.isfinite(elbo).all()
    np.testing.assert_allclose(elbo[0], mixture.log_likelihoods(means)[0, 1], rtol=1e-6)


def test_the_elbo_where_a_component_is_beyond_the_type():
    means = jnp.asarray([[1e200, 0.0], [0.0, 0.0]])
    mixture = score.GaussianMixture(means, jnp.ones(2))
    x, q = means[1:], jnp.asarray([[0.0, 1.0]])
    np.testing.assert_allclose(mixture.elbo(x, q), mixture.log_density(x), rtol=1e-14)
    assert mixture.elbo(-means[:1], q) == -np.inf


def test_posteriors_of_sharp_mixtures_in_float32():
    # Concentrations at which log C alone, of size 3e4, would lose all that tells components apart.
    natural = normal(0, 6, 8192, scale=2 / 8192**0.5) * jnp.linspace(0.8, 1.2, 6)[:, None]
    x = geometry.sphere(normal(1, 3, 8192))
    single, x_single = natural.astype(jnp.float32), x.astype(jnp.float32)

    @fast
    def log_posterior(natural, x):
        return score.VMFMixture.from_natural(natural).log_posterior(x)

    exact = log_posterior(single.astype(jnp.float64), x_single.astype(jnp.float64))
    np.testing.assert_allclose(log_posterior(single, x_single), exact, atol=2e-5)


def test_one_concentration_is_that_of_all():
    means = geometry.sphere(normal(0, 3, 4, dtype=jnp.float32))
    whole = score.VMFMixture(means, jnp.full(3, 4.0, jnp.float32))
    wide = score.GaussianMixture(means, jnp.full(3, 0.5, jnp.float32))
    for one in (4.0, 4, np.float64(4), jnp.asarray(4.0)):
        found = score.VMFMixture(means, one)
        assert found.natural.dtype == jnp.float32
        np.testing.assert_array_equal(found.natural[...], whole.natural[...])
        found = score.GaussianMixture(means, one / 8)
        np.testing.assert_array_equal(found.log_deviations[...], wide.log_deviations[...])
    traced = jax.jit(lambda k: score.VMFMixture(means, k).natural[...])(4.0)
    np.testing.assert_array_equal(traced, whole.natural[...])
    with pytest.raises(ValueError, match="must not be negative, got -4"):
        score.VMFMixture(means, -4.0)
    with pytest.raises(ValueError, match="deviations must be positive, got 0"):
        score.GaussianMixture(means, 0.0)
    with pytest.raises(ValueError, match=r"weights must be float32 of shape \(3,\)"):
        score.VMFMixture(means, 4.0, 0.5)


def test_mixtures_refuse_what_is_wrong():
    means, k = geometry.sphere(normal(0, 3, 4)), jnp.ones(3)
    with pytest.raises(ValueError, match=r"radius sqrt\(4\): that of component 1 has norm 1"):
        score.VMFMixture(means.at[1].mul(0.5), k)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        score.VMFMixture(means, -k)
    with pytest.raises(ValueError, match=r"must be float64 of shape \(3,\)"):
        score.VMFMixture(means, jnp.ones(2))
    with pytest.raises(ValueError, match="means are not finite"):
        score.VMFMixture(means.at[0, 0].set(jnp.nan), k)
    with pytest.raises(ValueError, match="width of at least 2"):
        score.VMFMixture(means[:, :1], k)
    with pytest.raises(ValueError, match="means must be floating point"):
        score.GaussianMixture(means.astype(int), k)
    with pytest.raises(ValueError, match="deviations must be positive, got 0"):
        score.GaussianMixture(means, k.at[0].set(0))
    for weights in (jnp.asarray([0.5, 0.25, 0.5]), jnp.asarray([0.0, 0.5, 0.5])):
        with pytest.raises(ValueError, match="weights must be positive and sum to 1"):
            score.GaussianMixture(means, k, weights)
    mixture = score.VMFMixture(means, k)
    q = jnp.full((3, 3), 1 / 3)
    with pytest.raises(ValueError, match=r"that of token 1 sums to 1\.33"):
        mixture.elbo(means, q.at[1, 0].set(2 / 3))
    with pytest.raises(ValueError, match=r"its least is -0\.1"):
        mixture.free_energy(means, jnp.asarray([[-0.1, 0.6, 0.5]] * 3))
    with pytest.raises(ValueError, match=r"floats of shape \(3, 3\)"):
        mixture.elbo(means, q[:2])
    with pytest.raises(ValueError, match="sums to nan"):
        score.consistency_loss(mixture, means, q * jnp.nan)
    for which in (mixture, score.GaussianMixture(means, k), score.SoftmaxPosterior(means)):
        density = getattr(which, "log_density", which)
        for wrong in (means[:, :3], means[0], means.astype(int)):
            with pytest.raises(ValueError, match=r"x must be floats of shape \(tokens, 4\)"):
                density(wrong)
        with pytest.raises(ValueError, match="x must be an array, got list"):
            density([[1.0] * 4])
    with pytest.raises(ValueError, match=r"x must be floats of shape \(tokens, 4\)"):
        mixture.elbo(means[:, :3], q)
