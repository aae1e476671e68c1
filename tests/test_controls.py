"""Random controls: what each keeps, what it does not, and what noise alone shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_config, tiny_model
from flax import nnx
from scipy.optimize import linear_sum_assignment

import svflow as sv
from svflow.spectra import controls
from svflow.spectra.schur import schur_normal

EPS = float(jnp.finfo(jnp.float64).eps)
TYPED, LEGACY = jax.random.key(0), jax.random.PRNGKey(0)


def gaussian(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def transpose(J):
    return np.swapaxes(J, -2, -1)


def norm(J):
    return np.linalg.norm(J, axis=(-2, -1))


def residual(seed, *shape, ratio=0.7):
    """I + R with Gaussian R, |R|/|J| about the ratio."""
    d = shape[-1]
    return np.eye(d) + gaussian(seed, *shape, d) * ratio / np.sqrt((1 - ratio**2) * d)


# The invariants: functions of a stack, without an order of their own.


def sigma(J):
    return np.linalg.svd(J, compute_uv=False)


def self_alignment(J):
    U, _, V_T = np.linalg.svd(J)
    return np.sum((transpose(U[..., :3]) @ transpose(V_T)[..., :3]) ** 2, axis=(-2, -1)) / 3


INVARIANTS = {
    "eigenvalues": np.linalg.eigvals,
    "trace": lambda J: np.trace(J, axis1=-2, axis2=-1),
    "determinant": np.linalg.det,
    "modulus of determinant": lambda J: np.abs(np.linalg.det(J)),
    "singular values": sigma,
    "norm": norm,
    "update's singular values": lambda J: sigma(J - np.eye(J.shape[-1])),
    "update's norm": lambda J: norm(J - np.eye(J.shape[-1])),
    "update ratio": lambda J: norm(J - np.eye(J.shape[-1])) / np.maximum(norm(J), 1e-300),
    "commutator": lambda J: norm(J @ transpose(J) - transpose(J) @ J),
    "symmetric part": lambda J: norm(J + transpose(J)),
    "self-alignment": self_alignment,
    "entries": lambda J: J,
}
ONE_MATRIX = {*INVARIANTS} - {"entries"}  # all that a rotation of the axes keeps
SINGULAR = {"singular values", "norm", "modulus of determinant"}
KEPT = {
    "haar_basis": {"eigenvalues", "trace", "determinant", "modulus of determinant"},
    "haar_factors": SINGULAR,
    "haar_similarity": ONE_MATRIX,
    "haar_update": {"update's singular values", "update's norm"},
    "random_update": {"trace", "norm", "update's norm", "update ratio"},
}


def change(name, before, after):
    """The largest difference of an invariant over a stack; eigenvalues as a set."""
    a, b = (INVARIANTS[name](np.asarray(J, np.float64)) for J in (before, after))
    if name != "eigenvalues":
        return np.abs(a - b).max()
    distances = [np.abs(x[:, None] - y[None]) for x, y in zip(a, b)]
    return max(d[linear_sum_assignment(d)].max() for d in distances)


def test_the_table_of_controls():
    assert set(KEPT) == set(controls.CONTROLS)
    assert all(getattr(controls, name) is f for name, f in controls.CONTROLS.items())
    assert set(controls.__all__) == {
        *KEPT,
        "CONTROLS",
        "beside_untrained",
        "haar",
        "initialisation",
        "shuffled",
        "untrained",
    }


@pytest.mark.parametrize("name", KEPT)
def test_a_control_keeps_what_it_says_and_nothing_else(name):
    J = residual(0, 6, 12)  # of six determinants some change their sign
    after = controls.CONTROLS[name](TYPED, J)
    assert after.shape == J.shape
    assert after.dtype == jnp.float64
    for invariant in INVARIANTS:
        moved = change(invariant, J, after)
        if invariant in KEPT[name]:
            assert moved < 1e-11, invariant
        else:
            assert moved > 1e-2, invariant


def test_the_haar_basis_is_normal():
    after = controls.haar_basis(TYPED, residual(0, 3, 12))
    assert INVARIANTS["commutator"](np.asarray(after)).max() < 1e-12
    moduli = np.sort(np.abs(np.linalg.eigvals(after)))[..., ::-1]
    np.testing.assert_allclose(moduli, sigma(after), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["haar_factors", "haar_update"])
def test_the_two_haar_factors_are_independent(name):
    J = np.broadcast_to(residual(0, 12), (2000, 12, 12))
    after = np.asarray(controls.CONTROLS[name](TYPED, J))
    found = self_alignment(after - np.eye(12) if name == "haar_update" else after)
    assert abs(found.mean() - 3 / 12) < 4 * found.std() / np.sqrt(2000)  # k/d, and 1 if U = V


def test_the_random_update_is_isotropic():
    # Its traceless part has no direction: the mean over draws vanishes as 1/sqrt(draws).
    J = residual(1, 8)
    traceless = J - np.trace(J) / 8 * np.eye(8)
    drawn = jax.vmap(controls.random_update, (0, None))(jax.random.split(TYPED, 2000), J)
    mean = np.asarray(drawn).mean(axis=0) - np.trace(J) / 8 * np.eye(8)
    assert norm(mean) < 2 * norm(traceless) / np.sqrt(2000)
    assert norm(mean) > norm(traceless) / np.sqrt(2000) / 2


@pytest.mark.parametrize("name", KEPT)
def test_draws_are_independent_over_a_stack_and_over_keys(name):
    control = controls.CONTROLS[name]
    J = np.broadcast_to(residual(0, 6), (2, 3, 6, 6))
    drawn = np.asarray(control(TYPED, J)).reshape(6, 36)
    again = np.asarray(control(jax.random.key(1), J)).reshape(6, 36)
    rows = np.concatenate([drawn, again])
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=-1) + np.eye(12)
    assert apart.min() > 0.1
    np.testing.assert_array_equal(drawn, np.asarray(control(TYPED, J)).reshape(6, 36))
    # New and old keys of one seed are one key.
    np.testing.assert_array_equal(drawn, np.asarray(control(LEGACY, J)).reshape(6, 36))


@pytest.mark.parametrize("name", KEPT)
def test_transforms_and_types(name):
    control = controls.CONTROLS[name]
    J, keys = jnp.asarray(residual(0, 3, 6)), jax.random.split(TYPED, 3)
    single = [control(key, one) for key, one in zip(keys, J)]
    np.testing.assert_allclose(jax.jit(jax.vmap(control))(keys, J), single, rtol=0, atol=1e-13)
    for dtype in ("float32", "bfloat16"):
        narrow = J[0].astype(dtype)
        after = control(TYPED, narrow)
        assert after.dtype == jnp.float32
        for invariant in KEPT[name]:
            moved = change(invariant, narrow.astype(jnp.float64)[None], after[None])
            assert moved < 2e-5, invariant


@pytest.mark.parametrize("name", KEPT)
def test_degenerate_matrices(name):
    control = controls.CONTROLS[name]
    for J in (np.zeros((3, 3)), np.eye(3), 2 * np.eye(3), np.asarray([[-0.5]]), np.ones((3, 3))):
        after = control(TYPED, J)
        assert np.isfinite(after).all()
        for invariant in KEPT[name]:
            assert change(invariant, J[None], after[None]) < 1e-7, invariant
    assert control(TYPED, np.zeros((0, 3, 3))).shape == (0, 3, 3)


@pytest.mark.parametrize("name", KEPT)
def test_bad_matrices_are_named(name):
    control = controls.CONTROLS[name]
    J = residual(0, 3, 4)
    J[2, 1, 0] = np.inf
    with pytest.raises(ValueError, match=r"J\[2\] is not finite"):
        control(TYPED, J)
    for bad in (np.ones((2, 3)), np.ones(3), np.ones((0, 0))):
        with pytest.raises(ValueError, match="J must be square matrices"):
            control(TYPED, bad)
    with pytest.raises(ValueError, match="J must be real floating point, got int64"):
        control(TYPED, np.eye(3, dtype=np.int64))


# Haar matrices


def test_haar_matrices_are_orthogonal_and_uniform():
    d, number = 5, 4000
    Q = np.asarray(controls.haar(TYPED, d, jnp.float64, (number,)))
    np.testing.assert_allclose(Q @ transpose(Q), np.broadcast_to(np.eye(d), Q.shape), atol=1e-14)
    # Moments of O(d), Diaconis and Shahshahani 1994: tr Q is standard normal up to its fourth
    # moment, tr Q^2 has mean 1. A QR without its signs fixed fails them.
    trace, square = (np.trace(M, axis1=1, axis2=2) for M in (Q, Q @ Q))
    for sample, expected in ((trace, 0), (trace**2, 1), (trace**4, 3), (square, 1)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / np.sqrt(number)
    # An entry squared is Beta(1/2, (d-1)/2), with the mean 1/d and the fourth moment 3/(d(d+2)).
    for power, expected in ((1, 0), (2, 1 / d), (4, 3 / (d * (d + 2)))):
        error = 4 * (Q**power).std(axis=0) / np.sqrt(number)
        assert (np.abs((Q**power).mean(axis=0) - expected) < 1.2 * error).all()
    assert abs(np.mean(np.linalg.det(Q) > 0) - 0.5) < 4 * 0.5 / np.sqrt(number)


def test_haar_arguments():
    assert controls.haar(TYPED, 3).dtype == jnp.float32
    assert controls.haar(TYPED, 3, jnp.bfloat16).dtype == jnp.float32
    assert controls.haar(LEGACY, 1, jnp.float64, (2, 3)).shape == (2, 3, 1, 1)
    with pytest.raises(ValueError, match="d must be a positive integer, got 0"):
        controls.haar(TYPED, 0)


# The same architecture untrained


def test_initialisation_is_the_architecture_untrained():
    model = tiny_model("gpt2", "float64")
    fresh = controls.initialisation(TYPED, model)
    assert fresh.config == model.config == tiny_config("gpt2")
    assert jax.tree.structure(fresh) == jax.tree.structure(model)
    for new, old in zip(jax.tree.leaves(fresh), jax.tree.leaves(model)):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)

    def kernel(model):
        return np.asarray(model.flow.layers.attention.query.kernel[...]).ravel()

    std = model.config.initializer_range
    assert abs(kernel(fresh).std() - std) < 4 * std / np.sqrt(2 * kernel(fresh).size)
    untrained = sv.Transformer(model.config, rngs=nnx.Rngs(TYPED), dtype=jnp.float64)
    for same in (untrained, controls.initialisation(LEGACY, model)):
        assert np.array_equal(kernel(same), kernel(fresh))
    for other in (model, controls.initialisation(jax.random.key(1), model)):
        correlation = np.corrcoef(kernel(other), kernel(fresh))[0, 1]
        assert abs(correlation) < 4 / np.sqrt(kernel(fresh).size)


def test_initialisation_refuses_what_is_no_model():
    with pytest.raises(ValueError, match="needs a Transformer, got TransformerFlow"):
        controls.initialisation(TYPED, tiny_model("gpt2").flow)


def test_a_model_is_not_compared_with_itself():
    model = tiny_model("gpt2", "float64")
    drawn = controls.initialisation(jax.random.key(3), model)
    tokens = [
        np.asarray(controls.untrained(seed, one).embedding.tokens[...])
        for seed, one in ((3, model), (3, drawn), (4, model))
    ]
    assert np.array_equal(tokens[0], drawn.embedding.tokens[...])
    assert np.array_equal(tokens[1], tokens[2])
    assert not np.array_equal(tokens[0], tokens[1])


def test_shuffled_keeps_the_entries_of_every_layer():
    model = tiny_model("gpt2", "float64")
    mixed = controls.shuffled(TYPED, model)
    assert mixed.config == model.config
    assert jax.tree.structure(mixed) == jax.tree.structure(model)
    moved = []
    for new, old in zip(jax.tree.leaves(mixed.flow), jax.tree.leaves(model.flow)):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        flat = np.asarray(new).reshape(len(new), -1), np.asarray(old).reshape(len(old), -1)
        np.testing.assert_array_equal(*(np.sort(one, axis=1) for one in flat))
        moved.append((flat[0] != flat[1]).mean())
    assert max(moved) > 0.9
    assert np.array_equal(mixed.embedding.tokens[...], model.embedding.tokens[...])
    layers = np.asarray(mixed.flow.layers.attention.query.kernel[...])
    assert abs(np.corrcoef(layers[0].ravel(), layers[1].ravel())[0, 1]) < 0.2
    with pytest.raises(ValueError, match="shuffled needs a Transformer, got TransformerFlow"):
        controls.shuffled(TYPED, model.flow)


# What noise alone shows


def product(factors):
    """J_{L-1} ... J_0 over the first axis, each step scaled to norm 1."""
    total = np.eye(factors.shape[-1])
    for J in np.asarray(factors):
        total = J @ total
        total = total / norm(total)[..., None, None]
    return total


def effective_rank(J):
    p = sigma(J) / np.sum(sigma(J), axis=-1, keepdims=True)
    return np.exp(-np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1))


@functools.cache
def factors():
    """16 layers of 20 samples of noise of width 32, |R|/|J| = 0.7."""
    J = residual(0, 16, 20, 32)
    ratio = norm(J - np.eye(32)) / norm(J)
    assert abs(ratio.mean() - 0.7) < 0.01
    return J


def test_removing_non_normality_of_noise_recovers_effective_rank():
    before = effective_rank(product(factors()))
    after = effective_rank(product(schur_normal(factors())))
    # 7.62 and 10.80 of 32 with standard errors below 0.25, and in every one of the samples.
    assert abs(before.mean() - 7.6) < 1
    assert abs(after.mean() - 10.8) < 1
    assert (after > 1.1 * before).all()


def test_a_part_of_the_recovery_needs_part_of_the_removal():
    sweep = [effective_rank(product(schur_normal(factors(), t))).mean() for t in (0, 0.5, 1)]
    assert sweep[0] > sweep[1] + 0.5
    assert sweep[1] > sweep[2] + 0.5


def test_the_recovery_of_each_control():
    # The rank of the product of controls, then with each made normal. Standard errors: 0.25.
    expected = {
        "haar_basis": (10.3, 10.3),  # it is normal; what J's own basis gives is 10.8
        "haar_factors": (7.6, 16.9),  # no identity is left to align the factors
        "haar_similarity": (7.8, 11.1),
        "haar_update": (7.8, 10.6),
        "random_update": (7.6, 10.7),
    }
    for name, (before, after) in expected.items():
        J = controls.CONTROLS[name](TYPED, factors())
        found = effective_rank(product(J)).mean(), effective_rank(product(schur_normal(J))).mean()
        assert abs(found[0] - before) < 1, name
        assert abs(found[1] - after) < 1.3, name


def test_the_product_of_means_is_not_the_mean_of_products():
    # 16 layers, a part of R common to 100 samples and twice as much of each sample's own:
    # effective ranks 7.3 and 14.3 of 32.
    own, common = gaussian(1, 16, 100, 32, 32), gaussian(2, 16, 1, 32, 32)
    J = np.eye(32) + (common + 2 * own) / (2 * np.sqrt(32))
    per_sample = effective_rank(product(J)).mean()
    of_means = effective_rank(product(J.mean(axis=1)))
    assert abs(per_sample - 7.3) < 1
    assert abs(of_means - 14.3) < 2.5
    assert of_means > 1.6 * per_sample


def test_no_batch_reaches_lapack():
    # Two batches at once wait for ever on two cores (see `_orthogonal`).
    J, keys = gaussian(0, 5, 6, 6), jax.random.split(TYPED, 3)
    draw = jax.vmap(lambda key: (controls.haar(key, 6, stack=(5,)), controls.haar_factors(key, J)))
    text = jax.jit(draw).lower(keys).as_text()
    calls = [line for line in text.splitlines() if "geqrf" in line and "custom_call" in line]
    assert calls
    assert all("tensor<6x6x" in line for line in calls)
    assert not any("x6x6x" in line for line in calls)
