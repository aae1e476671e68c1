"""What every flow promises, and every family of models."""

import itertools
import pickle

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import FAMILY_CONFIGS
from observe import ALL, LAYER, STEP, make, observe, observed

import svflow as sv
from svflow.geometry import Polar
from svflow.models.families import FAMILIES


def close(a, b, tolerance):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def test_every_family_is_here():
    assert set(FAMILY_CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_types(name):
    for dtype in ("float32", "float64", "bfloat16"):
        flow, x = make(name, dtype)
        names = [name for substep in flow.splitting for name in substep]

        def everything(flow, x, flow_names=names):
            times = (0, jnp.asarray(0.5, jnp.float32))
            return (
                [flow.velocity(t, x) for t in times],
                [flow.field(k, t, x) for t in times for k in range(len(flow.splitting))],
                [flow.branch(name, t, x) for t in times for name in flow_names],
                flow.step(jnp.asarray(1), x),
                flow.retract(x),
            )

        for leaf in jax.tree.leaves(jax.eval_shape(everything, flow, x)):
            assert (leaf.shape, leaf.dtype) == (x.shape, x.dtype)
    # The last of them, bfloat16, is narrower than time.
    trajectory = jax.eval_shape(sv.simulate, flow, x)
    assert trajectory.xs.shape == (flow.depth + 1, *x.shape)
    assert trajectory.xs.dtype == x.dtype
    assert trajectory.ts.dtype == jnp.float32


@pytest.mark.parametrize("name", ALL)
def test_the_layer_is_the_composition_of_its_substeps(name):
    flow, seen = observed(name)
    close(seen.step, seen.after[LAYER, -1], 1e-14)
    states = np.concatenate([seen.start[:1], seen.after[:, -1]])
    close(seen.simulated.xs, states, 1e-14)
    assert seen.simulated.result == diffrax.RESULTS.successful
    # Every layer does something, and not the same.
    moves = np.abs(np.diff(states, axis=0)).max(axis=(1, 2))
    assert moves.min() > 1e-3
    if name not in FAMILY_CONFIGS or flow.config.placement != "post":
        assert np.array_equal(seen.branch, seen.field)


@pytest.mark.parametrize("name", ALL)
def test_the_velocity_is_the_sum_of_the_fields(name):
    # The one at float times, the others at integers: the same layer.
    _, seen = observed(name)
    close(seen.velocity, seen.apart, 1e-14)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_the_loop(name):
    _, seen = observed(name)
    close(seen.stepped[0], seen.step, 1e-14)


@pytest.mark.parametrize("name", ALL)
def test_the_derivative_is_the_limit_of_differences(name):
    _, seen = observed(name)
    _, up, down, up2, down2 = np.asarray(seen.stepped)
    differences = (8 * (up - down) - (up2 - down2)) / (12 * STEP)
    # Fourth order: the truncation is about STEP^4, the rounding eps / STEP, both below 1e-9 of
    # derivatives of higher order that reach some hundreds here.
    close(seen.slope, differences, 1e-6)
    assert np.abs(seen.slope).max() > 1e-2


@pytest.mark.parametrize("name", ALL)
def test_new_weights_are_arguments_of_the_same_program(name):
    _, first = observed(name)
    size = observe._cache_size()
    flow, x = make(name, seed=1)
    if name not in FAMILY_CONFIGS:
        flow = jax.tree.map(lambda leaf: 1.5 * leaf, flow)
    second = observe(flow, x, jnp.ones_like(x))
    assert observe._cache_size() == size
    assert np.abs(second.simulated.xs - first.simulated.xs)[-1].max() > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_a_flow_is_a_pytree_and_pickles(name):
    flow, _ = make(name)
    leaves, treedef = jax.tree.flatten(flow)
    assert leaves
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, flow)
    copies = (
        jax.tree.unflatten(treedef, leaves),
        pickle.loads(pickle.dumps(flow)),
        jax.tree.map(lambda leaf: leaf / 2, doubled),
    )
    for copy in copies:
        assert type(copy) is type(flow)
        assert jax.tree.structure(copy) == treedef
        assert (copy.depth, copy.width, copy.splitting) == (flow.depth, flow.width, flow.splitting)
        assert all(np.array_equal(a, b) for a, b in zip(leaves, jax.tree.leaves(copy)))
    assert jax.tree.structure(doubled) == treedef
    assert not np.array_equal(leaves[0], jax.tree.leaves(doubled)[0])


def test_public_pytrees_have_distinct_treedefs():
    # Equal treedefs of two classes would run the compiled code of one for the other.
    class Twin(sv.Flow):
        depth, width = 2, 3

        def velocity(self, t, x, context=None):
            return x

    class OtherTwin(sv.Flow):
        depth, width = 2, 3

        def velocity(self, t, x, context=None):
            return -x

    zero = jnp.zeros(())
    trees = [make(name)[0] for name in ALL]
    trees += [make("gpt2")[0].interpolated("linear"), Twin(), OtherTwin()]
    trees += [sv.LieTrotter(), sv.Strang(), sv.ScanAdjoint(), sv.ScanAdjoint(checkpoint=False)]
    trees += [sv.Context(), sv.Context(mask=zero), sv.Context(positions=zero)]
    trees += [sv.Trajectory(zero, zero, zero), Polar(*[zero] * 6), (zero,) * 3, (zero,) * 6]
    treedefs = [jax.tree.structure(tree) for tree in trees]
    for a, b in itertools.combinations(range(len(trees)), 2):
        assert treedefs[a] != treedefs[b], (trees[a], trees[b])
    # And so two flows without weights are two programs.
    x = jnp.ones((1, 3))
    assert np.array_equal(sv.simulate(Twin(), x).xs[-1], 4 * x)
    assert np.array_equal(sv.simulate(OtherTwin(), x).xs[-1], 0 * x)


def test_a_velocity_is_a_whole_flow():
    flow, x = make("velocity")
    assert flow.splitting == (("velocity",),)
    assert np.array_equal(flow.step(1, x), x + flow.velocity(1, x))
    assert np.array_equal(flow.branch("velocity", 1, x), flow.field(0, 1, x))
    assert np.array_equal(flow.retract(x), x)
    assert sv.Flow.jumps.fget(flow) == (1.0, 2.0, 3.0)


def test_a_flow_without_a_velocity_and_an_unknown_branch_are_refused():
    class Empty(sv.Flow):
        depth, width = 1, 2

    with pytest.raises(TypeError, match="Empty defines neither"):
        Empty().velocity(0, jnp.ones((1, 2)))
    for name in ("velocity", "split", "gpt2"):
        flow, x = make(name)
        with pytest.raises(ValueError, match="no branch 'nonsense'"):
            flow.branch("nonsense", 0, x)
