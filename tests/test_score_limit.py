"""The continuous limit against exact solutions, its orders, and its gradients."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import LinearFlow, VelocityFlow, normal

import svflow as sv
from svflow.score.limit import distance, gradients, limit

# The function of the same name shadows the module in its package.
module = importlib.import_module("svflow.score.limit")

X = normal(9, 5, 6)
FLOW = LinearFlow(normal(0, 3, 6, 6, scale=0.3))


def test_the_limit_is_the_exact_solution_and_steps_go_to_it_with_order_one():
    found = limit(FLOW, X, dts=(1, 0.125, 0.0625), tolerance=1e-8)
    exact = np.stack([np.asarray(FLOW.solution(X, t)) for t in range(4)])
    error = distance(found.xs, exact)
    assert error.max() < 1e-7
    # Ten times the tolerance is further off, and says so.
    assert error.max() < found.reference_gap.max() < 1e-6
    np.testing.assert_allclose(found.order[1], 1, atol=0.05)
    layers = np.asarray(sv.simulate(FLOW, X).xs)
    np.testing.assert_allclose(found.gap[0], distance(layers, found.xs), rtol=1e-12)
    assert found.gap.shape == (3, 4)
    assert found.gap[:, 0].max() == 0
    # Six stages a step, the first of each stretch between jumps on its own.
    assert found.evaluations > found.coarse_evaluations > 18


def test_evaluations_are_counted():
    _, count = module._counted(FLOW, X, solver=module.diffrax.Euler(), dt=0.5)
    assert count == 6


def test_adjoint_gradients_are_those_through_the_steps_and_exact():
    cotangent = normal(3, 5, 6)
    found = gradients(FLOW, X, cotangent, tolerance=1e-9)
    assert found.error < 1e-7
    whole = np.asarray(FLOW.solution(jnp.eye(6), 3))
    np.testing.assert_allclose(found.direct, cotangent @ whole.T, rtol=1e-6, atol=1e-8)
    euler = np.eye(6)
    for layer in range(3):
        euler = (np.eye(6) + np.asarray(FLOW.matrix(layer))) @ euler
    np.testing.assert_allclose(found.layers, cotangent @ euler, rtol=1e-12, atol=1e-13)
    assert found.drift < 1e-7
    direct = found.direct / np.linalg.norm(found.direct)
    size = np.linalg.norm(found.layers)
    np.testing.assert_allclose(found.cosine, np.sum(direct * found.layers) / size, rtol=1e-12)


class Well(sv.Flow):
    """dx/dt = -40 x - x^3: every state falls to 0, and backwards what is off it blows up."""

    depth, width = 1, 6

    def velocity(self, t, x, context=None):
        return -40 * x - x**3


def test_a_backward_solve_that_does_not_arrive_says_so():
    found = gradients(Well(), X, jnp.ones_like(X), tolerance=1e-4, max_steps=200)
    assert np.isfinite(found.direct).all()
    assert np.isnan(found.backsolve).all()
    assert np.isnan([found.error, found.drift]).all()
    # Its layer, a step of 1, is far from it.
    np.testing.assert_allclose(found.layers, 1 - 40 - 3 * np.square(X), rtol=1e-12)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"limit takes an svflow.Flow, got Transformer; pass its"):
        limit(tiny_model("gpt2"), X)
    with pytest.raises(ValueError, match=r"one over an integer, got 0\.4"):
        limit(FLOW, X, dts=(0.4,))
    with pytest.raises(ValueError, match="no steps are given"):
        limit(FLOW, X, dts=())
    for function in (limit, lambda flow, x: gradients(flow, x, x)):
        with pytest.raises(ValueError, match="x0 must be floating point, got int64"):
            function(FLOW, jnp.ones((5, 6), int))
    with pytest.raises(ValueError, match="tolerance must be positive, got 0"):
        limit(FLOW, X, tolerance=0)
    with pytest.raises(ValueError, match="did not reach the end in 3 steps"):
        limit(VelocityFlow(normal(5, 6, 6), 4), X, max_steps=3)
    with pytest.raises(ValueError, match=r"a cotangent is float64 of shape \(5, 6\), got float32"):
        gradients(FLOW, X, jnp.ones((5, 6), jnp.float32))
    with pytest.raises(ValueError, match=r"shape \(5, 6\), got float64 \(5,\)"):
        gradients(FLOW, X, jnp.ones(5))
    with pytest.raises(ValueError, match="tolerance must be positive, got -1"):
        gradients(FLOW, X, X, tolerance=-1)
