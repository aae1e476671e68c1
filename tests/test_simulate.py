"""`simulate`: the layer loop itself, its derivatives, what it compiles, and what it refuses."""

from concurrent.futures import ThreadPoolExecutor

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from configs import tiny_model
from flax import nnx
from flows import LayerRecorder, LinearFlow, VelocityFlow, fast, normal, small_flows

import svflow as sv
from svflow.simulate import step_times

IDS = jnp.asarray([3, 1, 4, 1, 5])
EPS = float(jnp.finfo(jnp.float64).eps)


def close(a, b, tolerance):
    """max |a - b| against the size of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def layer_loop(flow, x, context=None):
    """The states before and after every layer, by the bare loop over `flow.step`."""

    def body(x, layer):
        x = flow.step(layer, x, context)
        return x, x

    _, xs = jax.lax.scan(body, x, jnp.arange(flow.depth))
    return jnp.concatenate([x[None], xs])


# The layer loop


class Affine(sv.Flow):
    """x <- x + w_l x + w_l: the maps of two layers do not commute."""

    def __init__(self, weights):
        self.depth, self.width, self.weights = len(weights), 1, nnx.Param(weights)

    def velocity(self, t, x, context=None):
        weight = self.weights[...][jnp.floor(t).astype(int)]
        return weight * x + weight


WEIGHTS = np.random.default_rng(0).normal(size=128) / 4


def affine_states(layers, dt, dtype):
    weights, states = WEIGHTS.astype(dtype), [dtype(1)]
    for layer in layers:
        states.append(states[-1] + dtype(dt) * (weights[layer] * states[-1] + weights[layer]))
    return np.asarray(states)


def affine_simulation(depth, dtype, **options):
    run = fast(lambda flow, x: sv.simulate(flow, x, **options).xs)
    flow = Affine(jnp.asarray(WEIGHTS[:depth].astype(dtype)))
    return np.asarray(run(flow, jnp.asarray(np.ones((1, 1), dtype))))[:, 0, 0]


def test_it_is_the_layer_loop_at_every_depth():
    depths = range(1, 129)
    # XLA compiles outside of the interpreter's lock.
    with ThreadPoolExecutor(2) as pool:
        simulated = list(pool.map(lambda depth: affine_simulation(depth, np.float64), depths))
    for depth, xs in zip(depths, simulated):
        np.testing.assert_allclose(
            xs, affine_states(range(depth), 1, np.float64), rtol=1e-14, atol=1e-14, err_msg=depth
        )


@pytest.mark.parametrize("depth", [1, 2, 31, 41, 47, 62, 127, 128])
def test_it_is_the_layer_loop_in_float32(depth):
    xs = affine_simulation(depth, np.float32)
    assert xs.dtype == jnp.float32
    close(xs, affine_states(range(depth), 1, np.float32), 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 10, 64])
def test_every_step_starts_in_its_layer_at_every_depth(dtype, parts):
    for depth in range(1, 129):
        starts = step_times(0.0, float(depth), 1 / parts).astype(dtype)
        assert np.array_equal(np.floor(starts[:-1]), np.arange(depth * parts) // parts), depth
        assert starts[-1] == depth


@pytest.mark.parametrize("start", [0.1, 0.3, 1 / 3, 0.7, 2.9])
def test_steps_from_a_fractional_start_meet_the_boundaries(start):
    times = step_times(start, start + 50, 0.1)
    near = np.abs(times - np.rint(times)) < 1e-6
    assert np.array_equal(times[near], np.rint(times[near]))
    assert near.sum() == (50 if start != 1 / 3 else 0)


def test_steps_begin_and_end_where_the_span_does():
    random = np.random.default_rng(0)
    for _ in range(1000):
        t0 = random.uniform(0, 3)
        t1 = t0 + random.uniform(0.1, 100)
        times = step_times(t0, t1, (t1 - t0) / random.integers(1, 50))
        assert (times[0], times[-1]) == (t0, t1)
        assert np.all(np.diff(times) > 0)


@pytest.mark.parametrize("depth", [1, 41, 62, 128])
@pytest.mark.parametrize("parts", [2, 3, 10])
def test_the_right_weights_are_used_by_smaller_steps(depth, parts):
    layers = np.arange(depth * parts) // parts
    xs = affine_simulation(depth, np.float64, dt=1 / parts)
    np.testing.assert_allclose(
        xs, affine_states(layers, 1 / parts, np.float64)[::parts], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("solver", "parts"), [(None, 3), (sv.Strang(), 3), (diffrax.Heun(), 1), (diffrax.Tsit5(), 3)]
)
def test_every_layer_acts_for_one_unit_of_time(solver, parts):
    flow = LayerRecorder(11)
    xs = fast(lambda x: sv.simulate(flow, x, solver=solver, dt=1 / parts).xs)(jnp.zeros((1, 11)))
    np.testing.assert_allclose(xs[-1], 1, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gpt2", "float64"),
        ("gpt2", "float32"),
        ("gpt2", "bfloat16"),
        ("gpt2", "float16"),
        ("bert", "float64"),
        ("gpt_neox", "float32"),
        ("qwen3_moe", "float32"),
    ],
)
def test_it_is_the_model(family, dtype):
    model = tiny_model(family, dtype)
    x0 = model.embed(IDS)
    trajectory = fast(sv.simulate)(model.flow, x0)
    assert trajectory.xs.dtype == x0.dtype == jnp.dtype(dtype)
    assert trajectory.xs.shape == (model.flow.depth + 1, *x0.shape)
    assert np.array_equal(trajectory.ts, np.arange(model.flow.depth + 1))
    assert trajectory.result == diffrax.RESULTS.successful
    tolerance = {"float32": 1e-6, "float64": 1e-14}.get(dtype, 8 * float(jnp.finfo(dtype).eps))
    close(trajectory.xs, fast(layer_loop)(model.flow, x0), tolerance)


class Sum(sv.Flow):
    """Two substeps that add constants: every sum has one rounding and no other."""

    splitting = (("a",), ("b",))

    def __init__(self, terms):
        self.depth, _, self.width = terms.shape
        self.terms = nnx.Param(terms)

    def field(self, substep, t, x, context=None):
        return jnp.broadcast_to(self.terms[...][jnp.floor(t).astype(int), substep], x.shape)


def test_narrow_states_are_rounded_after_every_substep():
    terms = normal(0, 20, 2, 6, dtype=jnp.bfloat16)
    states = [np.asarray(normal(1, 3, 6, dtype=jnp.bfloat16))]
    for layer in np.asarray(terms):
        states.append((states[-1] + layer[0]) + layer[1])
    xs = sv.simulate(Sum(terms), jnp.asarray(states[0])).xs
    assert xs.dtype == jnp.bfloat16
    assert np.array_equal(xs, states)


# Times and spans


def test_stored_and_interpolated_times():
    flow, x0 = small_flows()["velocity"], normal(0, 2, 6)
    every = sv.simulate(flow, x0, dt=0.25, ts=np.arange(17) / 4)
    assert np.array_equal(every.xs[0], x0)
    for ts in (None, [0.0, 2.0, 4.0], [2.0, 4.0], [4.0], [0.0], [0.0, 0.25, 4.0]):
        some = sv.simulate(flow, x0, dt=0.25, ts=ts)
        expected = np.arange(5.0) if ts is None else np.asarray(ts)
        assert np.array_equal(some.ts, expected)
        close(some.xs, every.xs[(expected * 4).astype(int)], 2 * EPS)
    # Between two steps: linear.
    between = sv.simulate(flow, x0, dt=0.25, ts=[0.125, 0.25, 0.3])
    close(between.xs[0], (every.xs[0] + every.xs[1]) / 2, 2 * EPS)
    close(between.xs[1], every.xs[1], 2 * EPS)
    close(between.xs[2], 0.8 * every.xs[1] + 0.2 * every.xs[2], 4 * EPS)


def test_times_off_by_rounding_are_the_steps_they_mean():
    flow, x0 = small_flows()["velocity"], normal(0, 2, 6)
    ts = np.cumsum(np.full(40, 0.1))
    assert ts[-1] > 4 - 1e-12
    assert ts[-1] != 4
    sums = sv.simulate(flow, x0, dt=0.1, ts=ts)
    grid = sv.simulate(flow, x0, dt=0.1, ts=np.arange(1, 41) / 10)
    assert np.array_equal(sums.xs, grid.xs)
    # 0.1 * 30 > 3.
    assert np.array_equal(sv.simulate(flow, x0, t1=0.1 * 30).xs, sv.simulate(flow, x0, t1=3).xs)


@pytest.mark.parametrize(("solver", "dt"), [(None, 0.5), (None, 1 / 3), (diffrax.Tsit5(), 0.5)])
def test_spans_compose(solver, dt):
    flow, x0 = small_flows()["constant"], normal(0, 2, 6)

    def run(x, **span):
        return fast(lambda x: sv.simulate(flow, x, dt=dt, solver=solver, **span))(x)

    whole, first = run(x0), run(x0, t1=1)
    rest = run(first.xs[-1], t0=1)
    assert np.array_equal(first.ts, [0, 1])
    assert np.array_equal(rest.ts, [1, 2, 3])
    xs = np.concatenate([first.xs, rest.xs[1:]])
    # A step of 1/3 is rounded differently from each start.
    tolerance = 0 if solver is None and dt == 0.5 else 8 * EPS
    close(xs, whole.xs, tolerance)


def test_a_span_off_the_boundaries_keeps_them_in_its_times():
    flow, x0 = small_flows()["constant"], normal(0, 2, 6)
    part = sv.simulate(flow, x0, dt=0.5, t0=0.5, t1=2.5)
    assert np.array_equal(part.ts, [0.5, 1, 2, 2.5])
    by_hand = x0
    for layer in (0, 1, 1, 2):
        by_hand = by_hand + 0.5 * flow.velocity(layer, by_hand)
    close(part.xs[-1], by_hand, 4 * EPS)


# Derivatives

ADJOINTS = {
    "default": {},
    "stored": dict(adjoint=sv.ScanAdjoint(checkpoint=False)),
    "adaptive": dict(
        solver=diffrax.Tsit5(),
        stepsize_controller=diffrax.PIDController(rtol=1e-11, atol=1e-11),
    ),
    "strang": dict(solver=sv.Strang(), dt=0.5, ts=[0.3, 3.0]),
}


def end(options):
    def final(flow, x):
        return jnp.sum(jnp.sin(sv.simulate(flow, x, **options).xs[-1]))

    return final


def loop_end(flow, x):
    return jnp.sum(jnp.sin(layer_loop(flow, x)[-1]))


def directional(f, x, v):
    """Central differences, fourth order: truncation and rounding are below 1e-9 here."""
    h = 1e-3

    def at(s):
        return f(jax.tree.map(lambda a, b: a + s * h * b, x, v))

    return jax.tree.map(
        lambda a, b, c, d: (8 * (a - b) - (c - d)) / (12 * h), at(1), at(-1), at(2), at(-2)
    )


def dot(a, b):
    return sum(jnp.vdot(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def noise_like(tree, seed):
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [normal(seed + i, *a.shape) for i, a in enumerate(leaves)])


@pytest.mark.parametrize("name", ADJOINTS)
def test_derivatives_agree(name):
    options = ADJOINTS[name]
    flow, x = LinearFlow(normal(0, 3, 4, 4, scale=0.3)), normal(1, 2, 4)
    f = end(options)
    reverse = fast(jax.grad(f, argnums=(0, 1)))
    by_flow, by_x = reverse(flow, x)
    assert isinstance(by_flow, LinearFlow)
    forward = fast(jax.jacfwd(f, argnums=1))(flow, x)
    tolerance = 1e-13 if name != "adaptive" else 1e-8
    close(forward, by_x, tolerance)
    # With respect to everything at once: jvp, reverse mode and finite differences.
    v = (noise_like(flow, 5), noise_like(x, 9))
    _, pushed = fast(lambda p, v: jax.jvp(lambda p: f(*p), (p,), (v,)))((flow, x), v)
    close(pushed, dot((by_flow, by_x), v), tolerance)
    close(pushed, directional(fast(lambda p: f(*p)), (flow, x), v), 1e-8)
    if name in ("default", "stored"):
        loop_flow, loop_x = fast(jax.grad(loop_end, argnums=(0, 1)))(flow, x)
        close(by_x, loop_x, 1e-13)
        close(by_flow.matrices[...], loop_flow.matrices[...], 1e-13)


@pytest.mark.parametrize("name", ["default", "adaptive"])
def test_second_derivatives_and_batches(name):
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    f = end(ADJOINTS[name])
    v = normal(2, 2, 6)
    gradient = fast(jax.grad(f, argnums=1))
    hvp = fast(lambda x, v: jax.jvp(lambda x: jax.grad(f, argnums=1)(flow, x), (x,), (v,))[1])
    second = hvp(x, v)
    close(second, directional(lambda x: gradient(flow, x), x, v), 1e-7)
    # The Hessian is symmetric: u H v = v H u.
    u = normal(3, 2, 6)
    tolerance = 1e-12 if name != "adaptive" else 1e-7
    close(jnp.vdot(u, second), jnp.vdot(v, hvp(x, u)), tolerance)
    batch = normal(4, 3, 2, 6)
    batched = fast(jax.vmap(jax.grad(f, argnums=1), in_axes=(None, 0)))(flow, batch)
    one = jnp.stack([gradient(flow, x) for x in batch])
    # In a batch an adaptive step is rejected or not for each example on its own.
    close(batched, one, tolerance)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_derivatives_of_a_transformer_are_those_of_its_loop(family):
    flow = tiny_model(family).flow
    x = tiny_model(family).embed(IDS)
    ours = fast(jax.value_and_grad(end({}), argnums=(0, 1)))(flow, x)
    loop = fast(jax.value_and_grad(loop_end, argnums=(0, 1)))(flow, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(loop), strict=True):
        close(a, b, 1e-12)
    assert float(jnp.abs(ours[1][0].layers.attention.query.kernel[...]).max()) > 1e-3


def test_the_jacobian_of_a_linear_flow_is_its_propagator():
    flow, x = LinearFlow(normal(0, 3, 4, 4, scale=0.3)), normal(1, 1, 4)
    propagator = np.linalg.multi_dot([np.eye(4) + a for a in flow.matrices[...][::-1]])

    def final(x):
        return sv.simulate(flow, x).xs[-1, 0]

    for jacobian in (jax.jacfwd, jax.jacrev):
        close(fast(jacobian(final))(x)[:, 0], propagator, 1e-14)


@pytest.mark.parametrize("solver", [diffrax.Heun(), diffrax.Tsit5()])
def test_both_modes_go_through_a_runge_kutta_method(solver):
    flow, x = small_flows()["velocity"], normal(1, 2, 6)

    def final(x):
        return sv.simulate(flow, x, solver=solver, dt=0.5).xs[-1]

    close(fast(jax.jacfwd(final))(x), fast(jax.jacrev(final))(x), 1e-13)


def test_other_adjoints_serve_the_mode_they_are_for():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    expected = fast(jax.grad(loop_end, argnums=1))(flow, x)
    reverse = end(dict(adjoint=diffrax.RecursiveCheckpointAdjoint()))
    close(fast(jax.grad(reverse, argnums=1))(flow, x), expected, 1e-13)
    forward = end(dict(adjoint=diffrax.ForwardMode()))
    close(fast(jax.jacfwd(forward, argnums=1))(flow, x), expected, 1e-13)


def test_backsolve_needs_and_takes_an_adaptive_controller():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    options = dict(ADJOINTS["adaptive"], adjoint=diffrax.BacksolveAdjoint())
    ours = fast(jax.grad(end(options), argnums=1))(flow, x)
    close(ours, fast(jax.grad(end(ADJOINTS["adaptive"]), argnums=1))(flow, x), 1e-7)
    with pytest.raises(ValueError, match="BacksolveAdjoint needs an adaptive"):
        sv.simulate(flow, x, adjoint=diffrax.BacksolveAdjoint())


class DeepFlow(VelocityFlow):
    """A field that reverse mode needs three intermediate states of."""

    def velocity(self, t, x, context=None):
        for _ in range(3):
            x = super().velocity(t, x, context)
        return x


def test_reverse_mode_keeps_one_state_a_step():
    flow, x = DeepFlow(normal(0, 64, 64), 60), normal(1, 100, 64)

    def states(checkpoint):
        adjoint = sv.ScanAdjoint(checkpoint=checkpoint)

        def f(flow, x):
            return jnp.sum(sv.simulate(flow, x, ts=[60.0], adjoint=adjoint).xs)

        program = jax.jit(jax.grad(f, argnums=1)).lower(flow, x).compile()
        return program.memory_analysis().temp_size_in_bytes / x.nbytes

    # One for each step and a few besides; not one buffer of all states for each step.
    assert 55 < states(True) < 75
    assert states(False) > states(True) + 60


# Compilation


@pytest.mark.parametrize("name", ["default", "adaptive"])
def test_a_second_call_compiles_nothing(name):
    options = ADJOINTS[name]
    model, other = tiny_model("gpt2"), tiny_model("gpt2", seed=1)
    x, y = model.embed(IDS), model.embed(IDS + 1)
    context = sv.Context(mask=jnp.ones(5, bool))
    masked = sv.Context(mask=jnp.arange(5) > 1)
    with Compilations() as first:
        before = sv.simulate(model.flow, x, context=context, **options).xs
    assert first.count > 0
    with Compilations() as later:
        sv.simulate(model.flow, x, context=context, **options)
        new_weights = sv.simulate(other.flow, x, context=context, **options).xs
        new_state = sv.simulate(model.flow, y, context=context, **options).xs
        sv.simulate(model.flow, x, context=masked, **options)
    assert later.count == 0
    # And the new weights and states were used, not constants of the first program.
    assert np.abs(new_weights - before)[-1].max() > 1e-3
    assert np.abs(new_state - before)[-1].max() > 1e-3


def test_flows_that_differ_in_structure_do_not_share_a_program():
    flow, x = tiny_model("gpt2").flow, tiny_model("gpt2").embed(IDS)
    plain = sv.simulate(flow, x, dt=0.5)
    linear = sv.simulate(flow.interpolated("linear"), x, dt=0.5)
    again = sv.simulate(flow, x, dt=0.5)
    assert np.array_equal(plain.xs, again.xs)
    assert np.abs(plain.xs - linear.xs).max() > 1e-3


def test_the_program_does_not_grow_with_depth():
    def instructions(depth):
        flow = LinearFlow(normal(0, depth, 4, 4))
        text = jax.jit(sv.simulate).lower(flow, normal(1, 2, 4)).compile().as_text()
        return sum(" = " in line for line in text.splitlines())

    # XLA unrolls nothing: the counts differ by no more than its choice of fusions.
    assert abs(instructions(48) - instructions(12)) <= 0.02 * instructions(12)


def test_a_program_has_no_callbacks_to_the_host():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    assert "callback" not in jax.jit(sv.simulate).lower(flow, x).as_text()


# Failure


def adaptive(**options):
    return dict(
        solver=diffrax.Tsit5(),
        stepsize_controller=diffrax.PIDController(rtol=1e-9, atol=1e-9),
        **options,
    )


def test_a_solve_that_runs_out_of_steps_returns_what_it_reached():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    whole = sv.simulate(flow, x, **adaptive())
    assert whole.result == diffrax.RESULTS.successful
    part = jax.jit(lambda x: sv.simulate(flow, x, **adaptive(max_steps=25)))(x)
    assert part.result == diffrax.RESULTS.max_steps_reached
    reached = np.isfinite(part.xs).all(axis=(1, 2))
    assert 1 < reached.sum() < 5
    assert np.array_equal(reached, np.sort(reached)[::-1])
    assert np.all(np.isposinf(part.xs[~reached]))
    assert np.array_equal(part.xs[reached], whole.xs[reached])


def test_in_a_batch_each_solve_fails_on_its_own():
    flow = LinearFlow(-jnp.eye(3)[None].repeat(3, axis=0))
    gentle, stiff = normal(1, 2, 3), 1e6 * normal(1, 2, 3)
    options = dict(
        solver=diffrax.Tsit5(),
        stepsize_controller=diffrax.PIDController(rtol=1e-30, atol=1e-3),
        max_steps=25,
    )
    both = jax.vmap(lambda x: sv.simulate(flow, x, **options))(jnp.stack([gentle, stiff]))
    assert np.array_equal(both.result == diffrax.RESULTS.successful, [True, False])
    assert np.array_equal(both.result == diffrax.RESULTS.max_steps_reached, [False, True])
    assert np.isfinite(both.xs[0]).all()
    assert np.isposinf(both.xs[1][-1]).all()


class Blowup(sv.Flow):
    """dx/dt = x^2 e^(50 t)."""

    depth, width = 4, 1

    def velocity(self, t, x, context=None):
        return jnp.exp(50.0 * jnp.asarray(t, x.dtype)) * x**2


def test_fixed_steps_return_an_overflow_as_the_layers_compute_it():
    x = jnp.full((1, 1), 1e70)
    trajectory = sv.simulate(Blowup(), x)
    assert trajectory.result == diffrax.RESULTS.successful
    expected = [x]
    for layer in range(4):
        expected.append(Blowup().step(layer, expected[-1]))
    assert np.array_equal(trajectory.xs, jnp.stack(expected), equal_nan=True)
    assert not np.isfinite(trajectory.xs[-1]).any()


def test_an_implicit_solver_that_does_not_converge_stops():
    root_finder = diffrax.VeryChord(rtol=1e-8, atol=1e-8, norm=jnp.linalg.norm)
    solver = diffrax.ImplicitEuler(root_finder=root_finder)
    failed = sv.simulate(Blowup(), jnp.ones((1, 1)), solver=solver)
    assert failed.result != diffrax.RESULTS.successful
    assert np.isposinf(failed.xs[-1]).all()


# Refusals


def sized(**sizes):
    flow = sv.Flow()
    for name, value in {"depth": 4, "width": 6, **sizes}.items():
        setattr(flow, name, value)
    return flow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x0=jnp.zeros(6)), "shape"),
        (dict(x0=jnp.zeros((2, 3, 6))), "jax.vmap"),
        (dict(x0=jnp.zeros((3, 5))), r"\(tokens, 6\)"),
        (dict(x0=jnp.zeros((0, 6))), "at least one token"),
        (dict(x0=jnp.zeros((3, 6), int)), "floating point, got int"),
        (dict(x0=jnp.zeros((3, 6), complex)), "floating point, got complex"),
        (dict(x0=jnp.zeros((3, 6), jnp.float32)), "dtype"),
        (dict(dt=0), "dt must be positive"),
        (dict(dt=-1.0), "dt must be positive"),
        (dict(dt=float("nan")), "dt must be positive and finite"),
        (dict(dt=float("inf")), "dt must be positive and finite"),
        (dict(dt=0.3), "does not divide"),
        (dict(dt=5.0), "does not divide"),
        (dict(dt=0.5, t1=1.25), "does not divide"),
        (dict(ts=[]), "increasing"),
        (dict(ts=[1.0, 1.0]), "increasing"),
        (dict(ts=[2.0, 1.0]), "increasing"),
        (dict(ts=[0.0, float("nan")]), "increasing"),
        (dict(ts=[float("nan")]), "within"),
        (dict(ts=[[0.0, 1.0]]), "increasing"),
        (dict(ts=2.0), "increasing"),
        (dict(ts=[-0.5, 1.0]), "within"),
        (dict(ts=[0.0, 4.5]), "within"),
        (dict(t0=1.0, ts=[0.0, 2.0]), "within"),
        (dict(t0=3.999, dt=1e-8, x0=jnp.zeros((3, 6), jnp.float32)), "too small for times"),
        (dict(t0=2.0, t1=1.0), "forwards"),
        (dict(t0=2.0, t1=2.0), "forwards"),
        (dict(t0=-1.0), r"within \[0, 4\]"),
        (dict(t1=5.0), r"within \[0, 4\]"),
        (dict(t1=float("nan")), "forwards"),
        (dict(context=sv.Context(mask=jnp.ones(2, bool))), "context.mask has shape"),
        (dict(context=sv.Context(mask=jnp.ones(3))), "context.mask has type .*, not booleans"),
        (dict(context=sv.Context(mask=[True, True, True])), "context.mask must be an array"),
        (dict(context=jnp.ones(3, bool)), "context must be an svflow.Context"),
        (dict(solver=sv.Strang), "solver must be an instance"),
        (dict(adjoint=sv.ScanAdjoint), "adjoint must be a diffrax.AbstractAdjoint"),
        (dict(stepsize_controller=diffrax.ConstantStepSize()), "stepsize_controller must be a"),
        (dict(dt=None), "dt must be a number, got None"),
        (dict(t1="3"), "t1 must be a number, got '3'"),
        (dict(flow=jnp.ones(3)), "simulate takes an svflow.Flow"),
        (dict(flow=sv.Flow()), "does not set `depth`"),
        (dict(flow=sized(depth=1.5)), "sets depth = 1.5, which must be a positive integer"),
        (dict(flow=sized(depth=0)), "sets depth = 0"),
        (dict(flow=sized(width="6")), "sets width = '6'"),
        (dict(context=sv.Context(positions=jnp.ones((1, 3), int))), "positions has shape"),
        (dict(context=sv.Context(positions=jnp.ones(3))), "positions has type"),
        (dict(stepsize_controller=diffrax.PIDController(1e-3, 1e-3)), "no error estimate"),
        (dict(adaptive(), t0=2.0, t1=1.0), "forwards"),
        (dict(adaptive(), dt=-0.1), "dt must be positive"),
    ],
)
def test_bad_input_is_refused_by_name(changes, message):
    arguments = {"flow": small_flows()["velocity"], "x0": jnp.zeros((3, 6)), **changes}
    flow, x0 = arguments.pop("flow"), arguments.pop("x0")
    # Standard promotion is what users have; there a wrong dtype is not an error of JAX itself.
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match=message):
            sv.simulate(flow, x0, **arguments)
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x: sv.simulate(flow, x, **arguments))(x0)


def test_a_layer_that_is_none_is_refused():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    for layer in (-1, flow.depth, 99):
        with pytest.raises(ValueError, match=rf"layer {layer} is not one of 0 \.\. 3"):
            flow.step(layer, x)


def test_an_adaptive_solve_needs_no_dt_that_divides_the_span():
    flow, x = small_flows()["velocity"], normal(1, 2, 6)
    a = sv.simulate(flow, x, dt=0.3, **adaptive())
    b = sv.simulate(flow, x, dt=0.01, **adaptive())
    close(a.xs, b.xs, 1e-7)


def test_a_model_is_not_a_flow():
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match=r"got Transformer; pass its `\.flow`"):
        sv.simulate(model, jnp.zeros((3, model.flow.width)))
    with pytest.raises(ValueError, match="Rngs"):
        sv.Transformer(model.config, rngs=0)


def test_a_flow_of_the_wrong_shape_is_refused():
    class Wrong(sv.Flow):
        depth, width = 2, 3

        def velocity(self, t, x, context=None):
            return x[:1]

    with pytest.raises(ValueError, match="Wrong moves a float64 state"):
        sv.simulate(Wrong(), jnp.zeros((2, 3)))
