"""The layer theorem and the sphere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import FAMILY_CONFIGS
from flows import normal, small_flows
from observe import observed

import svflow as sv
from svflow import geometry

EPS = float(jnp.finfo(jnp.float64).eps)


def close(a, b, tolerance):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.nanmax(np.abs(b))))


def rho(h):
    return np.sqrt(np.mean(np.square(np.asarray(h, np.float64)), axis=-1))


def check_theorem(h, v, centered, tolerance):
    """n(h + v) = R_x(dt P_x v) and |h + v|^2 / d where rho + c > 0; minus it where not."""
    p = jax.jit(geometry.polar, static_argnames="centered")(h, v, centered=centered)
    after = np.asarray(h, np.float64) + np.asarray(v, np.float64)
    if centered:
        h, after = geometry.center(h), geometry.center(after)
    after_direction = after / rho(after)[..., None]
    forward = np.asarray(p.rho + p.radial > 0)
    assert np.array_equal(np.isfinite(p.dt), forward)
    dt = jnp.where(forward, p.dt, 1 / (p.rho + p.radial)).astype(h.dtype)
    retracted = geometry.retract(p.direction, dt[..., None] * p.tangential)
    close(np.where(forward[..., None], retracted, -retracted), after_direction, tolerance)
    close(p.rho_next, rho(after), tolerance)
    close(p.rho[..., None] * p.direction, h, tolerance)
    close(rho(p.direction), 1, tolerance)
    # Radial and tangential parts are orthogonal and add up to v.
    v = geometry.center(v) if centered else v
    close(p.radial[..., None] * p.direction + p.tangential, v, tolerance)
    close(np.mean(p.direction * p.tangential, axis=-1), 0, tolerance * max(1, rho(v).max()))
    return forward


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_the_layer_theorem_for_every_substep_of_every_family(family):
    flow, seen = observed(family)
    assert flow.centered == (flow.config.norm == "layer")
    forward = check_theorem(seen.before, seen.branch, flow.centered, 1e-12)
    assert forward.any()
    check_theorem(
        seen.before.astype(jnp.float32), seen.branch.astype(jnp.float32), flow.centered, 1e-5
    )
    if flow.config.placement != "post":
        close(seen.before + seen.branch, seen.after, 1e-13)
        return
    # The norm after the addition returns n(h + v) with its gain and bias.
    for k, norm in enumerate((flow.layers.attention_post_norm, flow.layers.hidden_post_norm)):
        gain, bias = (a[...][jnp.asarray(flow.config.blocks)] for a in (norm.weight, norm.bias))
        bare = (seen.after[:, k] - bias[:, None]) / gain[:, None]
        h = geometry.center(seen.before[:, k] + seen.branch[:, k])
        close(geometry.sphere(bare), geometry.sphere(h), 1e-11)


def test_backward_steps_are_reported_not_returned():
    # rho = 1 and c = -1/2, -1, -3/2.
    h = jnp.ones((3, 4))
    v = jnp.asarray([[-0.5], [-1.0], [-1.5]]) + jnp.asarray([1.0, -1.0, 0.0, 0.0])
    p = geometry.polar(h, v)
    assert np.array_equal(np.isnan(p.dt), [False, True, True])
    assert np.isfinite(p.rho_next).all()
    gradient = jax.grad(lambda v: jnp.nansum(geometry.polar(h, v).dt))(v)
    assert np.isfinite(gradient).all()
    assert np.array_equal(gradient[1:], np.zeros((2, 4)))


def test_the_theorem_for_any_vectors_of_either_sign():
    h, v = normal(0, 1000, 8), normal(1, 1000, 8, scale=3.0)
    for centered in (False, True):
        forward = check_theorem(h, v, centered, 1e-11)
        assert 100 < forward.sum() < 900


def test_an_epsilon_in_the_norm_moves_no_direction():
    # With rho_eps^2 = |h|^2 / d + eps and y = h / rho_eps: h = rho_eps y, and
    # rho_eps'^2 = rho_eps^2 + 2 rho_eps (y . v) / d + |v|^2 / d, for any eps.
    h, v, eps = normal(0, 50, 8, scale=1e-2), normal(1, 50, 8, scale=1e-2), 1e-3
    rho_eps, next_eps = (np.sqrt(rho(a) ** 2 + eps) for a in (h, h + v))
    y = h / rho_eps[:, None]
    close(geometry.sphere(y), geometry.sphere(h), 1e-14)
    close(rho_eps**2 + 2 * rho_eps * np.mean(y * v, axis=-1) + rho(v) ** 2, next_eps**2, 1e-15)


def test_cancellation_leaves_the_next_radius_accurate():
    h = normal(0, 20, 8)
    v = -h * (1 - 1e-9)
    close(geometry.polar(h, v).rho_next / rho(h + v), 1, 1e-6)


# Splitting


def slope(errors, ratio):
    return np.log(errors[0] / errors[1]) / np.log(ratio)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_splitting_and_parallel_steps_differ_by_the_commutator_term(family):
    flow, seen = observed(family)
    x = seen.start[1]

    @jax.jit
    def differences(x):
        def split(dt):
            y = x + dt * flow.field(0, 1, x)
            return y + dt * flow.field(1, 1, y) - (x + dt * flow.velocity(1, x))

        first = flow.field(0, 1, x)
        leading = jax.jvp(lambda x: flow.field(1, 1, x), (x,), (first,))[1]
        return split(1e-3), split(5e-4), leading

    coarse, fine, leading = differences(x)
    size = [np.abs(coarse).max(), np.abs(fine).max()]
    # dt^2 D v_F v_A + O(dt^3): the slope is 2 + O(dt).
    assert abs(slope(size, 2) - 2) < 0.02
    # Richardson: the extrapolated term is the jvp up to O(dt^2).
    extrapolated = 2 * fine / 5e-4**2 - coarse / 1e-3**2
    close(extrapolated / np.abs(leading).max(), leading / np.abs(leading).max(), 1e-3)


def test_on_the_sphere_the_leading_term_is_the_covariant_derivative():
    # Each substep retracted: R(R(x + dt a) + dt b) - R(x + dt (a + b)) = dt^2 P_x Db a + O(dt^3).
    flow = small_flows()["sphere"]
    x = geometry.sphere(normal(3, 5, 6))

    def difference(dt):
        y = flow.retract(x + dt * flow.field(0, 0, x))
        y = flow.retract(y + dt * flow.field(1, 0, y))
        return (y - flow.retract(x + dt * flow.velocity(0, x))) / dt**2

    first = flow.field(0, 0, x)
    derivative = jax.jvp(lambda x: flow.field(1, 0, x), (x,), (first,))[1]
    leading = geometry.tangent(x, derivative)
    close(2 * difference(5e-4) - difference(1e-3), leading, 1e-5)
    assert np.abs(derivative - leading).max() > 0.1


# The sphere


def test_direction_and_tangent():
    h, v = normal(0, 40, 8), normal(1, 40, 8)
    x = geometry.sphere(h)
    close(rho(x), 1, 4 * EPS)
    close(geometry.sphere(x), x, 4 * EPS)
    u = geometry.tangent(x, v)
    close(np.sum(x * u, axis=-1), 0, 1e-13)
    close(geometry.tangent(x, u), u, 1e-14)
    # n(x + e v) = x + e P_x v + O(e^2): the defect falls fourfold when e halves.
    defects = [np.abs(geometry.sphere(x + e * v) - x - e * u).max() for e in (1e-3, 5e-4)]
    assert abs(slope(defects, 2) - 2) < 0.02
    # So the projection is the derivative of the norm on the sphere.
    close(jax.jvp(geometry.sphere, (x,), (v,))[1], u, 1e-13)
    close(geometry.retract(x, 0 * x), x, 4 * EPS)
    close(jax.jvp(lambda u: geometry.retract(x, u), (0 * x,), (u,))[1], u, 1e-13)
    close(np.mean(geometry.center(h), axis=-1), 0, 1e-15)


@pytest.mark.parametrize("angle", [1e-12, 1e-9, 1e-6, 1e-3, 1.0, 3.0])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_geodesic_is_accurate_at_both_ends(angle, dtype):
    x, y = np.zeros((2, 8))
    x[0], y[0], y[1] = 1, np.cos(angle), np.sin(angle)
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    # The rounding of the states' directions, where arccos would err by sqrt(eps).
    error = 4 * float(jnp.finfo(dtype).eps)
    assert abs(float(geometry.geodesic(3 * x, y / 2)) - angle) <= error
    assert abs(float(geometry.geodesic(-x, y)) - (np.pi - angle)) <= error


def test_the_geodesic_of_random_states():
    x, y = normal(0, 50, 8), normal(1, 50, 8)
    cosine = np.sum(x * y, axis=-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    close(geometry.geodesic(x, y), np.arccos(cosine), 1e-14)
    close(geometry.geodesic(x, x), 0, 4 * EPS)
    close(geometry.geodesic(x, -x), np.pi, 4 * EPS)
    # Normalising rounds: two random states closer than eps are not told apart, and no worse.
    near = geometry.geodesic(x, x + 1e-10 * y)
    u = geometry.tangent(geometry.sphere(x), 1e-10 * y)
    close(near, np.sqrt(np.sum(u**2, -1)) / np.linalg.norm(x, axis=-1), 4 * EPS)


def test_narrow_types_are_measured_in_float32():
    h = jnp.full((1, 512), 300.0, jnp.float16)  # Its sum of squares overflows float16.
    v = jnp.ones((1, 512), jnp.float16)
    p = geometry.polar(h, v)
    assert p.direction.dtype == p.tangential.dtype == jnp.float16
    assert {a.dtype for a in (p.rho, p.radial, p.dt, p.rho_next)} == {jnp.dtype("float32")}
    close(p.direction, 1, 1e-3)
    close(p.rho_next, 301, 1e-5)
    assert geometry.geodesic(h, v).dtype == jnp.float32


def test_the_zero_state_is_nan_without_spoiling_gradients():
    h, v = normal(0, 3, 8).at[1].set(0), normal(1, 3, 8)
    p = geometry.polar(h, v)
    assert np.isnan(geometry.sphere(h)[1]).all()
    assert np.isnan(p.dt[1])
    assert p.rho[1] == 0
    assert np.isfinite(jax.tree.map(lambda a: a[::2], p).dt).all()
    row = jnp.asarray([True, False, True])

    def masked(h):
        p = geometry.polar(h, v)
        scalars = p.dt + p.rho + p.radial + p.rho_next + geometry.geodesic(h, v)
        vectors = jnp.sum(p.direction + p.tangential, axis=-1)
        return jnp.sum(jnp.where(row, scalars + vectors, 0))

    gradient = jax.grad(masked)(h)
    assert np.isfinite(gradient).all()
    assert np.array_equal(gradient[1], np.zeros(8))
    # At angles 0 and pi there is no derivative; 0 is returned.
    for sign in (1, -1):
        gradient = jax.grad(lambda a, s=sign: jnp.sum(geometry.geodesic(a, s * v[:1])))(v[:1])
        assert np.array_equal(gradient, np.zeros((1, 8)))


def test_the_sphere_flow_stays_on_it():
    flow = small_flows()["sphere"]
    x = geometry.sphere(normal(0, 4, 6))
    for solver in (sv.LieTrotter(), sv.Strang()):
        xs = sv.simulate(flow, x, solver=solver, dt=0.125).xs
        close(rho(xs), 1, 1e-14)
