"""Orders of convergence, towards exact solutions and towards an adaptive solution."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import LinearFlow, VelocityFlow, fast, normal, small_flows

import svflow as sv
from svflow import geometry

ACCURATE = dict(
    solver=diffrax.Dopri8(),
    stepsize_controller=diffrax.PIDController(rtol=1e-12, atol=1e-12),
    dt=0.05,
    max_steps=2048,
)


def simulate(flow, x0, **options):
    return fast(lambda flow, x0: sv.simulate(flow, x0, **options))(flow, x0)


def error(flow, x0, exact, solver, parts):
    xs = simulate(flow, x0, solver=solver, dt=1 / parts, ts=[float(flow.depth)]).xs
    return float(jnp.abs(xs[-1] - exact).max())


def order(flow, x0, exact, solver, coarse):
    """The slope of log error over log dt between dt = 1/coarse and half of it."""
    errors = [error(flow, x0, exact, solver, parts) for parts in (coarse, 2 * coarse)]
    assert errors[1] > 1e-13, "rounding, not the order, is measured"
    return np.log2(errors[0] / errors[1])


# error = c dt^p (1 + O(dt)), so a slope differs from p by O(dt).
TOLERANCE = 0.2


@pytest.mark.parametrize(
    ("name", "solver", "expected", "coarse"),
    [
        ("constant", sv.LieTrotter(), 1, 16),
        ("constant", diffrax.Euler(), 1, 16),
        ("constant", sv.Strang(), 2, 8),
        ("constant", diffrax.Heun(), 2, 8),
        ("constant", diffrax.Midpoint(), 2, 8),
        # Without steps that end just before a jump these would be of order 1.
        ("constant", diffrax.Bosh3(), 3, 4),
        ("commuting", sv.LieTrotter(), 1, 16),
        ("commuting", sv.Strang(), 2, 8),
        ("commuting", diffrax.Bosh3(), 3, 4),
        ("split", sv.LieTrotter(), 1, 16),
        ("split", sv.Strang(), 2, 8),
    ],
)
def test_orders_on_linear_flows(name, solver, expected, coarse):
    if name == "commuting":
        speeds = jnp.asarray([1.0, -0.5, 2.0])
        flow = LinearFlow(speeds[:, None, None] * normal(8, 6, 6, scale=0.3), linear=True)
    else:
        flow = small_flows()[name]
    x0 = normal(9, 2, 6)
    exact = flow.solution(x0, 3.0)
    assert abs(order(flow, x0, exact, solver, coarse) - expected) < TOLERANCE


@pytest.mark.parametrize("solver", [diffrax.Heun(), diffrax.Bosh3()])
def test_the_order_holds_in_spans_that_end_or_start_at_a_jump(solver):
    flow, x0 = small_flows()["constant"], normal(9, 2, 6)
    exact = flow.solution(x0, 2.0)
    expected = solver.order(None)

    def errors(parts):
        xs = simulate(flow, x0, solver=solver, dt=1 / parts, t1=2, ts=[1.0, 2.0]).xs
        return np.abs(xs[-1] - exact).max()

    assert abs(np.log2(errors(8) / errors(16)) - expected) < TOLERANCE


@pytest.mark.parametrize("name", ["constant", "linear", "velocity", "split"])
def test_adaptive_solutions_are_exact(name):
    flow, x0 = small_flows()[name], normal(9, 2, 6)
    solution = simulate(flow, x0, **ACCURATE)
    assert solution.result == diffrax.RESULTS.successful
    if name in ("constant", "split"):
        exact = jnp.stack([flow.solution(x0, t) for t in solution.ts])
        np.testing.assert_allclose(solution.xs, exact, rtol=0, atol=1e-10)
        # A span that ends at a jump sees nothing of the next layer.
        part = simulate(flow, x0, **ACCURATE, t1=1, ts=[0.5, 1.0])
        np.testing.assert_allclose(part.xs[-1], exact[1], rtol=0, atol=1e-10)
    else:
        other = dict(ACCURATE, solver=diffrax.Tsit5())
        np.testing.assert_allclose(solution.xs, simulate(flow, x0, **other).xs, rtol=0, atol=1e-9)


def test_an_adaptive_solve_of_one_layer_has_no_jumps():
    flow, x0 = LinearFlow(normal(0, 1, 6, 6, scale=0.3)), normal(9, 2, 6)
    assert flow.jumps == ()
    end = simulate(flow, x0, **ACCURATE).xs[-1]
    np.testing.assert_allclose(end, flow.solution(x0, 1.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "weights"),
    [("gpt2", "linear"), ("llama", "linear"), ("bert", "linear"), ("gpt2", "constant")],
)
def test_refined_transformers_converge_to_the_flow_of_their_velocity(family, weights):
    # Gentler than the tests' sharp weights, so that these steps are in the regime of the order.
    model = tiny_model(family, gain=0.5)
    flow = model.flow.interpolated(weights)
    x0 = model.embed(jnp.asarray([3, 1, 4]))
    solution = simulate(flow, x0, **ACCURATE)
    assert solution.result == diffrax.RESULTS.successful
    exact = solution.xs[-1]
    assert np.abs(exact - x0).max() > 0.1
    assert abs(order(flow, x0, exact, sv.LieTrotter(), 32) - 1) < TOLERANCE
    assert abs(order(flow, x0, exact, sv.Strang(), 32) - 2) < TOLERANCE


def test_a_parallel_block_is_an_euler_step():
    model = tiny_model("gpt_neox")
    x0 = model.embed(jnp.asarray([3, 1, 4, 1]))
    ours = simulate(model.flow, x0, dt=0.5).xs
    euler = simulate(model.flow, x0, dt=0.5, solver=diffrax.Euler()).xs
    np.testing.assert_allclose(ours, euler, rtol=0, atol=1e-14 * np.abs(euler).max())
    serial = tiny_model("gpt2")
    x0 = serial.embed(jnp.asarray([3, 1, 4, 1]))
    ours = simulate(serial.flow, x0).xs
    euler = simulate(serial.flow, x0, solver=diffrax.Euler()).xs
    assert np.abs(ours - euler).max() > 1e-2


def test_the_sphere_keeps_its_order():
    flow = small_flows()["sphere"]
    x0 = geometry.sphere(normal(9, 2, 6))
    exact = simulate(flow, x0, **ACCURATE).xs[-1]
    np.testing.assert_allclose(np.mean(np.square(exact), axis=-1), 1, rtol=0, atol=1e-11)
    assert abs(order(flow, x0, exact, sv.LieTrotter(), 32) - 1) < TOLERANCE
    assert abs(order(flow, x0, exact, sv.Strang(), 16) - 2) < TOLERANCE


@pytest.mark.parametrize("solver", [sv.LieTrotter(), sv.Strang()])
def test_splittings_are_diffrax_solvers_of_one_term_or_many(solver):
    first, second = normal(0, 4, 4, scale=0.3), normal(1, 4, 4, scale=0.3)
    y0 = normal(2, 4)
    one = diffrax.ODETerm(lambda t, y, args: (first + second) @ y)
    two = diffrax.MultiTerm(
        *(diffrax.ODETerm(lambda t, y, args, a=a: a @ y) for a in (first, second))
    )

    def solve(terms, solver):
        return fast(lambda y: diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 1 / 64, y).ys[-1])(y0)

    exact = jax.scipy.linalg.expm(first + second) @ y0
    assert solver.order(two) == {"LieTrotter": 1, "Strang": 2}[type(solver).__name__]
    # c dt^p with a constant of order 1.
    assert np.abs(solve(two, solver) - exact).max() < 2 * 64.0 ** -solver.order(two)
    same = {"LieTrotter": diffrax.Euler(), "Strang": diffrax.Heun()}[type(solver).__name__]
    np.testing.assert_allclose(solve(one, solver), solve(one, same), rtol=0, atol=1e-14)


def test_strang_is_second_order_in_time_too():
    flow, x0 = VelocityFlow(normal(3, 6, 6, scale=0.3), 2), normal(9, 2, 6)
    exact = simulate(flow, x0, **ACCURATE).xs[-1]
    assert abs(order(flow, x0, exact, sv.Strang(), 16) - 2) < TOLERANCE
    assert abs(order(flow, x0, exact, sv.LieTrotter(), 64) - 1) < TOLERANCE
