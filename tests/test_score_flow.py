"""Flows of posterior-weighted scores: energy, ELBO, solvers, posteriors of every kind."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from flows import fast, normal

import svflow as sv
from svflow import geometry, score

ACCURATE = dict(
    solver=diffrax.Tsit5(),
    stepsize_controller=diffrax.PIDController(rtol=1e-12, atol=1e-12),
    dt=0.01,
)


class Router(nnx.Module):
    """A small network from states to probabilities."""

    def __init__(self, width, components, seed=0):
        self.first = nnx.Param(normal(seed, width, 8))
        self.second = nnx.Param(normal(seed + 1, 8, components))

    def __call__(self, x):
        first, second = (w[...].astype(x.dtype) for w in (self.first, self.second))
        return jax.nn.softmax(jnp.tanh(x @ first) @ second)


class Unnormalised(Router):
    def __call__(self, x):
        return 1.1 * super().__call__(x)


def keys(seed=0, components=5, width=6, norm=4.0):
    """Natural parameters whose lengths differ."""
    directions = geometry.sphere(normal(seed, components, width)) / width**0.5
    return norm * directions * jnp.linspace(0.5, 1, components)[:, None]


def states(width=6, tokens=3, seed=9):
    return geometry.sphere(normal(seed, tokens, width))


def gaussian():
    return score.GaussianMixture(normal(1, 4, 3), jnp.asarray([0.5, 1.0, 1.0, 2.0]))


def test_the_energy_falls_at_the_rate_of_the_squared_velocity():
    for flow, x in (
        (score.ScoreFlow(score.VMFMixture.from_natural(keys()), depth=2), states()),
        (score.ScoreFlow(gaussian(), depth=2), normal(2, 3, 3, scale=2.0)),
    ):

        @fast
        def everything(flow, x):
            ts, solver = np.arange(5) / 256, diffrax.Tsit5()
            path = sv.simulate(flow, x, solver=solver, dt=1 / 256, t1=1 / 64, ts=ts).xs
            here = flow.retract(path[2])  # the solver drifts off the sphere by its error
            v = flow.velocity(0, here)
            _, rate = jax.jvp(lambda x: score.energy(flow, x), (here,), (v,))
            return path, v, rate, score.energy(flow, path), score.elbo(flow, path)

        path, v, rate, energy, elbo = everything(flow, x)
        squares = np.sum(np.square(v), axis=1)
        assert squares.min() > 1e-3
        np.testing.assert_allclose(rate, -squares, rtol=0, atol=1e-12)
        # Along the trajectory, by the fourth-order difference of step h = 1/256: its error is
        # h^4 / 30 = 1e-11 times the fifth derivative.
        difference = (8 * (energy[3] - energy[1]) - (energy[4] - energy[0])) * 256 / 12
        np.testing.assert_allclose(difference, -squares, rtol=0, atol=1e-8)
        np.testing.assert_allclose(elbo, -energy, rtol=1e-14)
        if flow.manifold == "sphere":
            np.testing.assert_allclose(np.mean(np.square(path), axis=-1), 1, rtol=1e-11)


def climb(natural, x, dt):
    """How much the energy changes in one Euler step on the sphere."""
    flow = score.ScoreFlow(score.VMFMixture.from_natural(natural))
    after = flow.retract(x + jnp.asarray(dt, x.dtype) * flow.velocity(0, x))
    return jnp.max(score.energy(flow, after) - score.energy(flow, x))


climbs = fast(climb)


@pytest.mark.parametrize("width", [2, 16])
def test_euler_steps_descend_where_dt_kappa_is_small(width):
    def one(key):
        a, b, c = jax.random.split(key, 3)
        directions = geometry.sphere(jax.random.normal(a, (4, width))) / width**0.5
        sizes = jax.random.uniform(b, (4, 1))
        x = geometry.sphere(jax.random.normal(c, (8, width)))
        largest = jnp.max(sizes)
        # |eta| <= 6 at the small steps, and the edge of what is proved at dt = 1.
        edge = 2 * width**0.5 * sizes / largest
        small = [climb(6 * directions * sizes, x, dt) for dt in (0.01, 0.1)]
        return jnp.stack([*small, climb(directions * edge, x, 1.0)])

    seen = np.asarray(fast(jax.vmap(one))(jax.random.split(jax.random.key(0), 1000)))
    # Energies are of order 10, so their rounding is of order 1e-15.
    assert seen.max() < 1e-13


def test_larger_steps_may_climb():
    # In the plane |eta| = 6 at dt = 1/2: a = dt |eta| / sqrt(2) = 2.12 > 2, past the mean and
    # farther from it than before; so in any width at that a.
    for width in (2, 16):
        size = 6.0 if width == 2 else 2.12 * 2 * width**0.5
        mean = jnp.zeros(width).at[0].set(1.0)
        near = geometry.sphere(mean.at[1].set(0.1))[None]
        eta = size * mean[None]
        assert climbs(eta, near, 0.5) > 1e-4
        assert climbs(eta, near, 0.1) < 0


def test_a_softmax_kernel_is_bayes_with_the_prior_that_undoes_the_normalisers():
    natural, x = keys(), states()
    equal = score.VMFMixture(geometry.sphere(natural), jnp.full(5, 7.0))

    @fast
    def everything(natural, equal, x):
        kernel, uniform = score.SoftmaxPosterior(natural), score.VMFMixture.from_natural(natural)
        cumulant = score.cumulant(6, uniform.concentrations)
        prior = score.VMFMixture.from_natural(natural, jax.nn.softmax(cumulant))
        offset = score.SoftmaxPosterior(natural, -cumulant)
        plain = score.SoftmaxPosterior(equal.natural[...])
        pairs = [
            (kernel(x), prior.posterior(x)),
            (offset(x), uniform.posterior(x)),
            # Equal concentrations need no such prior.
            (plain(x), equal.posterior(x)),
        ]
        flows = [score.ScoreFlow(equal, posterior=q, depth=2) for q in (None, plain)]
        return [*pairs, tuple(sv.simulate(flow, x).xs[-1] for flow in flows)]

    seen = everything(natural, equal, x)
    for ours, exact in seen:
        np.testing.assert_allclose(ours, exact, rtol=1e-13)
    assert np.abs(seen[0][0] - seen[1][1]).max() > 1e-2


def test_one_step_is_attention_on_the_sphere():
    # x' = n(x + P_x sum_j softmax_j(x . m_j) m_j), by hand.
    natural, x = np.asarray(keys()), np.asarray(states())
    flow = score.ScoreFlow(
        score.VMFMixture.from_natural(natural), posterior=score.SoftmaxPosterior(natural)
    )
    weights = np.exp(x @ natural.T)
    v = weights / weights.sum(axis=1, keepdims=True) @ natural
    v = v - x * (x * v).sum(axis=1, keepdims=True) / 6
    expected = (x + v) * 6**0.5 / np.linalg.norm(x + v, axis=1, keepdims=True)
    np.testing.assert_allclose(flow.step(0, jnp.asarray(x)), expected, rtol=1e-13)


def test_a_mixture_of_one_space_on_the_manifold_of_the_other():
    flow, x = score.ScoreFlow(gaussian(), manifold="sphere"), states(3)

    @fast
    def ends(flow, x):
        options = (ACCURATE, dict(dt=1 / 64), dict(dt=1 / 128))
        return [sv.simulate(flow, x, **option).xs[-1] for option in options]

    exact, coarse, fine = ends(flow, x)
    errors = [np.abs(end - exact).max() for end in (coarse, fine)]
    assert 1e-6 < errors[1] < errors[0] < 0.1
    assert abs(np.log2(errors[0] / errors[1]) - 1) < 0.2  # Euler, of order 1 with the retraction
    for end in (exact, coarse):
        np.testing.assert_allclose(np.mean(np.square(end), axis=-1), 1, rtol=1e-11)
    vmf, x = score.VMFMixture.from_natural(keys()), states()
    flat = score.ScoreFlow(vmf, manifold="euclidean")
    np.testing.assert_allclose(flat.step(0, x), x + vmf.posterior(x) @ vmf.natural[...], rtol=1e-13)


def test_a_router_is_part_of_the_flow_and_its_gap_is_the_divergence():
    mixture = score.VMFMixture.from_natural(keys())
    flow, x = score.ScoreFlow(mixture, posterior=Router(6, 5), depth=3), states()

    @fast
    def everything(flow, x):
        xs = sv.simulate(flow, x).xs
        q = jax.vmap(flow.probabilities)(xs)
        gaps = jax.vmap(lambda x, q: score.gap(flow.mixture, x, q))(xs, q)

        def end(flow):
            return jnp.sum(score.energy(flow, sv.simulate(flow, x).xs[-1]))

        return score.energy(flow, xs), score.elbo(flow, xs), gaps, jax.grad(end)(flow)

    energy, elbo, gaps, gradient = everything(flow, x)
    assert energy.shape == elbo.shape == (4, 3)
    np.testing.assert_allclose(-energy - elbo, gaps.kl, atol=1e-12)
    assert gaps.kl.min() > 1e-3
    assert np.all(gaps.field <= gaps.bound)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient))
    # The next weights are arguments of the same program.
    other = score.ScoreFlow(mixture, posterior=Router(6, 5, seed=3), depth=3)
    with Compilations() as compilations:
        changed = everything(other, x)
    assert compilations.count == 0
    assert np.abs(changed[0] - energy).max() > 1e-3


def test_a_trajectory_starts_on_the_manifold():
    flow, x = score.ScoreFlow(score.VMFMixture.from_natural(keys())), states()
    assert flow.depth == 1
    for factor, norm in ((1.5, r"3\.67423"), (0.0, "0"), (jnp.nan, "nan")):
        off = x.at[1].multiply(factor)
        message = rf"starts on the sphere of radius sqrt\(6\): token 1 has norm {norm}$"
        with pytest.raises(ValueError, match=message):
            sv.simulate(flow, off)
        with pytest.raises(ValueError, match=message):
            sv.score.limit(flow, off)
    program = jax.jit(sv.simulate)
    with pytest.raises(Exception, match="and a token is not there"):
        jax.block_until_ready(program(flow, 1.5 * x))
    end = program(flow, x).xs[-1]
    # What a solver drifts by, and rounding in a narrow type.
    near = sv.simulate(flow, x * (1 + 1e-4)).xs[-1]
    np.testing.assert_allclose(near, end, atol=1e-3)
    assert flow.check_start(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    padding = sv.Context(mask=jnp.asarray([True, False, True]))
    flow.check_start(x.at[1].set(0), padding)
    with pytest.raises(ValueError, match="token 2 has norm 0"):
        flow.check_start(x.at[1:].set(0), padding)
    flat = score.ScoreFlow(flow.mixture, manifold="euclidean")
    assert np.isfinite(sv.simulate(flat, 1.5 * x).xs).all()


def test_flows_refuse_what_is_wrong():
    mixture = score.VMFMixture.from_natural(keys())
    with pytest.raises(ValueError, match="mixture must be a StateMixture, got Router"):
        score.ScoreFlow(Router(6, 5))
    with pytest.raises(ValueError, match=r"callable nnx\.Module, got function"):
        score.ScoreFlow(mixture, posterior=lambda x: x)
    with pytest.raises(ValueError, match="manifold is one of"):
        score.ScoreFlow(mixture, manifold="torus")
    with pytest.raises(ValueError, match="depth must be a positive int, got 0"):
        score.ScoreFlow(mixture, depth=0)
    x = states()
    with pytest.raises(ValueError, match=r"floats of shape \(3, 5\)"):
        score.ScoreFlow(mixture, posterior=Router(6, 4)).velocity(0, x)
    wrong = score.ScoreFlow(mixture, posterior=Unnormalised(6, 5))
    with pytest.raises(ValueError, match=r"that of token 0 sums to 1\.1"):
        wrong.velocity(0, x)
    with pytest.raises(ValueError, match=r"that of token 0 sums to 1\.1"):
        sv.simulate(wrong, x)
    with pytest.raises(Exception, match="Unnormalised gives rows that do not sum to 1"):
        jax.block_until_ready(jax.jit(sv.simulate)(wrong, x))
    with pytest.raises(ValueError, match="posterior, depth and manifold by name: got int without"):
        score.ScoreFlow(mixture, 20)
    with pytest.raises(ValueError, match="got Router"):
        score.energy(Router(6, 5), x)
    with pytest.raises(ValueError, match=r"\(\.\.\., tokens, 6\)"):
        score.elbo(wrong, x[:, :4])
    with pytest.raises(ValueError, match="xs must be an array, got list"):
        score.energy(wrong, x.tolist())
    with pytest.raises(ValueError, match=r"keys must be floats of shape \(components, width\)"):
        score.SoftmaxPosterior(jnp.ones(3))
    with pytest.raises(ValueError, match=r"offsets must be float64 of shape \(5,\)"):
        score.SoftmaxPosterior(keys(), jnp.ones(4))
