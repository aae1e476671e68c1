"""The attention transformer as a flow: its layer, its limits, and what it refuses."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flows import fast, normal
from observe import LAYER, STEP
from observe import observe as protocol
from universal_cases import formula, observe, relative, target, tokens

import svflow as sv
import universal as ut
from svflow import attention
from universal.maps import gather

SIZES = (3, 2, 4, 3, 2)


def test_a_routed_machine_keeps_what_every_flow_promises():
    # tests/test_protocol.py is for flows with weights, and a routed machine has none.
    machine = ut.sparse(*SIZES)
    x = normal(1, 5, machine.width)
    seen = protocol(machine, x, normal(2, *x.shape))
    states = np.concatenate([seen.start[:1], seen.after[:, -1]])
    assert relative(seen.simulated.xs, states) < 1e-14
    assert relative(states, formula(machine, np.asarray(x))[0]) < 1e-14
    assert relative(seen.velocity, seen.apart) < 1e-14
    assert np.array_equal(seen.branch, seen.field)
    assert relative(seen.step, seen.after[LAYER, -1]) < 1e-14
    assert relative(seen.stepped[0], seen.step) < 1e-14
    _, up, down, up2, down2 = np.asarray(seen.stepped)
    differences = (8 * (up - down) - (up2 - down2)) / (12 * STEP)
    assert relative(seen.slope, differences) < 1e-7
    assert np.abs(seen.slope).max() > 1e-2
    assert machine.splitting == (("attention",),)
    assert machine.jumps == (1.0, 2.0)


def test_machines_without_leaves_are_different_programs():
    machines = [ut.sparse(2, 1, 2, 2, 2, kind=kind) for kind in ("single", "untied", "looped")]
    machines += [ut.sparse(2, 1, 2, 2, 2, causal=True), ut.sparse(2, 1, 2, 2, 2, scale=0.1)]
    machines += [ut.sparse(2, 1, 2, 2, 2, hardmax=True)]
    trees = [jax.tree.structure(machine) for machine in machines]
    for a, b in itertools.combinations(trees, 2):
        assert a != b
    for machine, tree in zip(machines, trees):
        copy = pickle.loads(pickle.dumps(machine))
        assert jax.tree.structure(copy) == tree
        assert hash(jax.tree.structure(copy)) == hash(tree)
        assert copy.value == machine.value
        assert not copy.value.sources.flags.writeable
    # The same machine made again runs the program that is there.
    run, x = fast(ut.run), jnp.ones((3, 10))
    run(machines[1], x)
    with Compilations() as compiled:
        run(ut.sparse(2, 1, 2, 2, 2), x)
        assert compiled.count == 0
        run(machines[2], x)
        assert compiled.count > 0


def test_routing_copies_columns():
    routing = ut.Routing([[2, -1, 0], [0, 0, 1]], 3)
    assert routing.shape == (2, 3, 3)
    assert np.array_equal(
        routing.dense(int), [[[0, 0, 1], [0, 0, 0], [1, 0, 0]], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]]
    )
    x = jnp.arange(6.0).reshape(2, 3)
    assert np.array_equal(gather(x, routing.sources[0]), [[2, 0, 0], [5, 0, 3]])
    # A layer that writes nothing leaves the state, or zeros.
    none = ut.Routing(np.full((1, 1, 3), -1), 3)
    read = ut.Routing(np.zeros((1, 1, 1), int), 3)
    for residual in (True, False):
        idle = ut.AttentionTransformer(read, read, none, np.eye(3), residual=residual)
        assert np.array_equal(ut.run(idle, x), x if residual else 0 * x)
    assert routing == ut.Routing(routing.sources, 3)
    assert routing != ut.Routing(routing.sources, 4)
    assert routing != ut.Routing(routing.sources, 3).dense(int)
    for sources, message in (
        ([3], "source 3 is not a column of 3"),
        ([-2], "source -2 is not a column of 3"),
        ([0.0], "must be integers, got float64"),
        ([], "must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            ut.Routing(sources, 3)


@pytest.mark.parametrize("hardmax", [False, True])
def test_a_long_sequence_goes_in_chunks(monkeypatch, hardmax):
    # 7 tokens in chunks of 4, the last one filled up. One layer: `simulate` has caches of its own.
    machine = ut.sparse(2, 2, 4, 3, 2, causal=not hardmax, hardmax=hardmax)
    x, mask = normal(1, 7, machine.width), sv.Context(mask=jnp.arange(7) != 2)

    def layer(x):
        def loss(x):
            y = machine.step(0, x, mask)
            return jnp.sum(y**2), y

        (_, y), slope = jax.value_and_grad(loss, has_aux=True)(x)
        return y, slope

    whole = fast(lambda x: layer(x))(x)
    monkeypatch.setattr(attention, "SCORES", 60)
    assert attention.query_chunk(7, 2) // 2 == 4
    monkeypatch.setattr(attention, "SCORES", 49)  # one head's queries, and not those of both
    assert attention.query_chunk(7, 2) == 6
    monkeypatch.setattr(attention, "SCORES", 60)
    lowered = jax.jit(lambda x: layer(x))
    assert "4x14x" in lowered.lower(x).as_text()  # four rows of both heads' weights at a time
    for a, b in zip(fast(lambda x: layer(x))(x), whole):
        assert relative(a, b) < 1e-14


@fast
def observed(transformers, inputs, context):
    return [observe(t, x, context) for t, x in zip(transformers, inputs)]


def test_hardmax_shares_ties_and_machines_agree():
    options = dict(hardmax=True, causal=True)
    wanted = target(2, (2, 2, 4, 3, 2), **options)
    machine = ut.sparse(2, 2, 4, 3, 2, **options)
    x = tokens(1, 6, 4)[[0, 1, 2, 1, 0, 1]]  # repeated tokens: exact ties
    E = ut.program(machine, wanted)
    (_, weights, output), (_, ours, ours_output) = observed((wanted, machine), (x, x @ E), None)
    assert set(np.round(np.unique(weights), 12)) <= {0, 0.333333333333, 0.5, 1}
    assert np.unique(weights).size > 2
    assert np.array_equal(weights, ours)
    assert relative(ours_output, output) < 1e-13
    # The limit of softmax at a large scale.
    arrays = [np.asarray(kernel[...]) for kernel in wanted.maps]
    sharp = ut.AttentionTransformer(*arrays, causal=True, scale=1e6)
    np.testing.assert_allclose(formula(sharp, x)[1], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_hardmax_of_a_narrow_type_attends_to_the_largest_logit(dtype):
    wanted = target(2, (1, 2, 4, 3, 2), dtype=dtype, hardmax=True)
    x = jnp.asarray(tokens(1, 6, 4), dtype)[np.array([0, 1, 2, 3, 4, 1])]
    query, key = (np.asarray(a, np.float64) for a in fast(wanted.reads)(0, x))
    logits = np.einsum("ihk,jhk->hij", query, key)
    largest = logits == logits.max(axis=-1, keepdims=True)
    weights = fast(lambda x: wanted.attention(0, x))(x)
    assert weights.dtype == dtype
    assert np.array_equal(np.asarray(weights, float), largest / largest.sum(-1, keepdims=True))
    assert largest.sum(axis=-1).max() == 2  # the token that occurs twice


def test_padding_is_not_seen():
    wanted, machine = target(2, (2, 2, 4, 3, 2)), ut.sparse(2, 2, 4, 3, 2)
    x, E = tokens(1, 6, 4), ut.program(machine, wanted)
    real = np.array([True, True, False, True, True, False])
    context = sv.Context(mask=jnp.asarray(real))
    found = observed((wanted, machine), (x, x @ E), context)
    for (xs, weights, output), (transformer, start) in zip(
        found, ((wanted, x), (machine, np.asarray(x @ E)))
    ):
        states, attended, wanted_output = formula(transformer, start[real])
        assert relative(xs[:, real], states) < 1e-14
        assert relative(output[real], wanted_output) < 1e-13
        assert relative(weights[:, :, real][..., real], attended) < 1e-13
        assert not weights[:, :, real][..., ~real].any()
    assert relative(output[real], formula(machine, np.asarray(x @ E))[2][real]) > 1e-3


def test_it_is_differentiable_and_batched():
    wanted, machine = target(2, (2, 2, 4, 3, 2)), ut.sparse(2, 2, 4, 3, 2)
    E, x = ut.program(machine, wanted), jnp.asarray(tokens(1, 3, 4))

    @fast
    def all_of(wanted, machine, x, E):
        forward = jax.jacfwd(lambda x: ut.run(machine, x @ E))(x)
        reverse = jax.jacrev(lambda x: ut.run(wanted, x))(x)
        batch = jax.vmap(ut.run, (None, 0))(machine, jnp.stack([x, 2 * x]) @ E)
        by_program = jax.grad(lambda E: jnp.sum(ut.run(machine, x @ E)))(E)
        return forward, reverse, batch, by_program

    forward, reverse, batch, by_program = all_of(wanted, machine, x, E)
    assert relative(forward, reverse) < 1e-12
    for found, start in zip(batch, (x, 2 * x)):
        assert relative(found, formula(wanted, np.asarray(start))[2]) < 1e-12
    assert np.abs(by_program).max(axis=0).min() > 0  # every column counts


def test_a_layer_goes_by_its_number():
    machine = ut.sparse(2, 2, 4, 3, 2)
    x = normal(3, 3, machine.width)

    @fast
    def all_of(x):
        layers = jnp.arange(2)
        steps = jax.vmap(lambda layer: machine.step(layer, x))(layers)
        fields = jax.vmap(lambda t: machine.field(0, t, x))(layers.astype(x.dtype) + 0.5)
        return steps, fields, machine.step(1, x), ut.attention_matrices(machine, x)

    steps, fields, known, weights = all_of(x)
    states, attended, _ = formula(machine, np.asarray(x))
    assert relative(steps[0], states[1]) < 1e-14
    assert relative(steps[1], known) < 1e-14
    assert relative(fields, steps - x) < 1e-14
    assert relative(weights, attended) < 1e-13
    # Outside a trace.
    assert relative(machine.step(jnp.asarray(1), x), known) < 1e-14
    # Out of range, where arrays are indexed: the first and the last.
    dense = machine.dense()
    layers = jnp.arange(-2, 5)
    found = fast(jax.vmap(lambda layer, x: dense.reads(layer, x)[0], (0, None)))(layers, x)
    for query, layer in zip(found, (0, 0, 0, 1, 1, 1, 1)):
        assert relative(query, dense.reads(layer, x)[0]) < 1e-14
    # Lists will do.
    assert np.array_equal(ut.run(machine, x.tolist()), ut.run(machine, x))


def arrays(**shapes):
    base = dict(query=(2, 3, 4, 2), key=(2, 3, 4, 2), value=(2, 3, 4, 4), unembed=(4, 5))
    return [np.ones(shape) for shape in (base | shapes).values()]


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (dict(query=(4, 2)), {}, r"query must have shape \(\[layers,\] heads, width, ...\)"),
        (dict(unembed=(2, 4, 5)), {}, r"unembed must have shape \(width, out\), got \(2, 4, 5\)"),
        (dict(key=(2, 3, 4, 1)), {}, r"key has shape \(2, 3, 4, 1\), but query \(2, 3, 4, 2\)"),
        (dict(value=(2, 3, 4, 2)), {}, r"not \(\[layers,\] 3, 4, 4\) as query's"),
        (dict(unembed=(3, 5)), {}, r"unembed has shape \(3, 5\), but the state is 4 wide"),
        (
            dict(value=(1, 3, 4, 4)),
            {},
            "different numbers of layers: {'query': 2, 'key': 2, 'value': 1}",
        ),
        (dict(unembed=(4, 0)), {}, "unembed has no values"),
        ({}, dict(depth=2), "depth = 2 was given, but the maps have 2 layers"),
        ({}, dict(scale=np.inf), "scale must be one finite number, got inf"),
        ({}, dict(scale=[1.0, 2.0]), "scale must be one finite number"),
        (dict(query=(3, 4, 2), key=(3, 4, 2), value=(3, 4, 4)), {}, "need depth"),
        (
            dict(query=(3, 4, 2), key=(3, 4, 2), value=(3, 4, 4)),
            dict(depth=0),
            "depth must be a pos",
        ),
    ],
)
def test_wrong_maps_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        ut.AttentionTransformer(*arrays(**shapes), **options)


def test_wrong_values_and_inputs_are_refused():
    bad = arrays()
    bad[1] = bad[1].astype(np.float32)
    with pytest.raises(ValueError, match="key is float32, but query is float64"):
        ut.AttentionTransformer(*bad)
    with pytest.raises(ValueError, match="value must be floating point, got int64"):
        ut.AttentionTransformer(*bad[:1], bad[0], np.ones((2, 3, 4, 4), int), bad[3])
    bad = arrays()
    bad[2][0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="value is not finite"):
        ut.AttentionTransformer(*bad)
    machine = ut.sparse(*SIZES)
    with pytest.raises(
        ValueError, match=r"x must have shape \(tokens, 100\), got \(5, 4\).*100 col"
    ):
        ut.run(machine, np.ones((5, 4)))
    with pytest.raises(
        ValueError, match="transformer must be an AttentionTransformer, got ndarray"
    ):
        ut.run(np.ones(3), np.ones((5, 4)))
    narrow = [a.astype(np.float32) for a in arrays()]
    with pytest.raises(ValueError, match=r"scale = 1e\+39 is not finite in float32"):
        ut.AttentionTransformer(*narrow, scale=1e39)
    with pytest.raises(ValueError, match=r"scale = 1e\+39 is not finite in float32"):
        ut.sparse(*SIZES, scale=1e39).attention(0, jnp.ones((2, 100), jnp.float32))
    with pytest.raises(ValueError, match="x is float64, but the transformer's weights float32"):
        ut.run(ut.AttentionTransformer(*narrow), np.ones((5, 4)))
    for layer in (0.5, jnp.asarray(1.0), [0]):
        with pytest.raises(ValueError, match="layer must be one integer, got"):
            machine.attention(layer, jnp.ones((5, 100)))
        with pytest.raises(ValueError, match="layer must be one integer, got"):
            machine.reads(layer, jnp.ones((5, 100)))
    with pytest.raises(ValueError, match=r"context.mask has shape \(4,\)"):
        machine.attention(0, jnp.ones((5, 100)), sv.Context(mask=jnp.ones(4, bool)))
    with pytest.raises(MemoryError, match="the dense view of a machine of 1024 columns"):
        patched(ut.sparse(2, 4, 4, 8, 44))


def patched(machine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svflow.memory._host", lambda: 10**6)
        return machine.dense()
