"""The paper's system as a flow: its layer, its continuous version, and attention in chunks."""

import itertools
import pickle
from dataclasses import replace

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import fast, normal

import svflow as sv
from svflow import attention
from svflow.power.flow import PowerFlow

HEADS, WIDTH, HEAD, VALUE, TOKENS, LAYERS = 3, 6, 4, 2, 7, 3
EPS = float(np.finfo(np.float64).eps)


def arrays(seed=0, lead=(), size=0.8, dtype=jnp.float64):
    shapes = [(HEADS, WIDTH, HEAD)] * 2 + [(HEADS, WIDTH, VALUE), (HEADS, VALUE, WIDTH)]
    return [normal(4 * seed + i, *lead, *shape, scale=size) for i, shape in enumerate(shapes)]


def make(kind="shared", seed=0, causal=False, **options):
    if kind == "shared":
        return PowerFlow(*arrays(seed), depth=LAYERS, causal=causal, **options)
    return PowerFlow(*arrays(seed, (LAYERS,)), causal=causal, **options)


def tokens_of(seed=9, tokens=TOKENS):
    x = np.asarray(normal(seed, tokens, WIDTH))
    return jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def layer(weights, x, causal, scale):
    """The formula, token by token and head by head."""
    query, key, value, output = (np.asarray(array) for array in weights)
    x, out = np.asarray(x), np.array(x)
    for i in range(len(x)):
        seen = x[: i + 1] if causal else x
        for h in range(len(query)):
            scores = scale * (seen @ key[h]) @ (query[h].T @ x[i])
            a = np.exp(scores - scores.max())
            F = (value[h] @ output[h]).T
            out[i] += F @ (a / a.sum() @ seen)
    return out / np.linalg.norm(out, axis=1, keepdims=True)


run = fast(lambda flow, x, context=None: sv.simulate(flow, x, context=context).xs)
step = fast(lambda flow, k, x: flow.step(k, x))
retract = fast(lambda flow, x: flow.retract(x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["shared", "layers"])
def test_the_layer_is_the_formula(kind, causal):
    scale = 0.7 if causal else None
    flow, x = make(kind, causal=causal, scale=scale), tokens_of()
    assert (flow.depth, flow.width, flow.heads, flow.causal) == (LAYERS, WIDTH, HEADS, causal)
    weights = arrays(lead=() if kind == "shared" else (LAYERS,))
    expected = [np.asarray(x)]
    for k in range(LAYERS):
        here = weights if kind == "shared" else [array[k] for array in weights]
        expected.append(layer(here, expected[-1], causal, 0.7 if causal else HEAD**-0.5))
    np.testing.assert_allclose(run(flow, x), expected, rtol=0, atol=1e-14)
    if not causal:
        x = run(flow, x)[1]
        np.testing.assert_allclose(step(flow, 1, x), expected[2], rtol=0, atol=1e-14)


def test_scales_may_differ_between_layers():
    scales = (0.2, 1.0, 3.0)
    xs, weights = run(make("layers", scale=scales), tokens_of()), arrays(lead=(LAYERS,))
    for k, scale in enumerate(scales):
        expected = layer([array[k] for array in weights], xs[k], False, scale)
        np.testing.assert_allclose(xs[k + 1], expected, rtol=0, atol=1e-14)


def test_the_layer_matrix_is_the_consensus_map():
    flow = make("layers")
    x = normal(3, WIDTH)
    for k in range(LAYERS):
        F = np.asarray(flow.layer_matrix(k))
        value, output = (np.asarray(a[k]) for a in arrays(lead=(LAYERS,))[2:])
        np.testing.assert_allclose(F, sum((v @ o).T for v, o in zip(value, output)), atol=1e-14)
        y = np.asarray(x + F @ x)
        agreed = jnp.tile(x / jnp.linalg.norm(x), (TOKENS, 1))
        expected = np.tile(y / np.linalg.norm(y), (TOKENS, 1))
        np.testing.assert_allclose(step(flow, k, agreed), expected, rtol=0, atol=1e-14)
    for wrong in (LAYERS, -1, 1.5, True):
        with pytest.raises(ValueError, match=rf"layer must be one of 0 \.\. 2, got {wrong}"):
            flow.layer_matrix(wrong)


def test_the_velocity_is_the_tangent_part_of_the_field():
    flow, x = make("layers"), tokens_of()

    @fast
    def look(flow, x):
        at = (jnp.asarray(1.5), jnp.asarray(1))
        fields = [flow.field(0, t, x) for t in at]
        return (
            fields,
            flow.velocity(at[0], x),
            flow.field(0, at[0], 3 * x),
            flow.branch("attention", at[1], x),
        )

    (at_float, at_layer), velocity, scaled, branch = look(flow, x)
    assert np.array_equal(at_float, at_layer)
    assert np.array_equal(branch, at_layer)
    radial = np.sum(np.asarray(x) * at_float, axis=1, keepdims=True)
    np.testing.assert_allclose(velocity, at_float - x * radial, rtol=0, atol=1e-14)
    assert np.abs(radial).max() > 0.1  # the field is not tangent
    assert np.abs(np.sum(np.asarray(x) * velocity, axis=1)).max() < 1e-15
    # Homogeneous of degree one: a layer knows directions only.
    np.testing.assert_allclose(scaled, 3 * np.asarray(at_float), rtol=1e-13)


def test_small_steps_converge_to_the_flow_of_the_velocity():
    flow, x = make(), tokens_of()
    assert flow.jumps == ()
    assert make("layers").jumps == (1.0, 2.0)

    def solve(solver, steps):
        options = dict(solver=solver, dt=1 / steps, ts=[1.0], t1=1.0)
        return fast(lambda flow, x: sv.simulate(flow, x, **options).xs[-1])(flow, x)

    reference = solve(diffrax.Tsit5(), 64)
    assert np.abs(np.linalg.norm(reference, axis=1) - 1).max() < 1e-10
    for solver, order, steps in ((None, 1, 64), (sv.Strang(), 2, 32)):
        coarse, fine = (np.abs(solve(solver, n) - reference).max() for n in (steps, 2 * steps))
        assert abs(np.log2(coarse / fine) - order) < 0.1
        assert coarse < 0.1 / order**4


def test_causal_tokens_see_only_their_past():
    x = tokens_of()
    moved = x.at[-1].set(-x[-1])
    for causal in (True, False):
        flow = make(causal=causal)
        apart = np.abs(run(flow, moved)[-1] - run(flow, x)[-1]).max(axis=1)
        assert (apart[:-1].max() == 0) == causal
    # and the first of them nothing at all: the power method.
    flow = make(causal=True)
    y = np.asarray(x[0])
    for _ in range(LAYERS):
        y = y + np.asarray(flow.layer_matrix()) @ y
        y = y / np.linalg.norm(y)
    np.testing.assert_allclose(run(flow, x)[-1, 0], y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_not_seen(causal):
    flow, x = make(causal=causal), tokens_of()
    context = sv.Context(mask=jnp.arange(TOKENS) < 4)
    padded = run(flow, x, context)[:, :4]
    np.testing.assert_allclose(padded, run(flow, x[:4]), rtol=0, atol=1e-14)
    if not causal:
        assert np.abs(padded - run(flow, x)[:, :4]).max() > 1e-3
    # Zeros are the usual padding.
    zeros = run(flow, x.at[4:].set(0), context)
    np.testing.assert_array_equal(zeros[:, :4], padded)
    assert np.isfinite(zeros).all()


def test_zero_padding_leaves_no_nan_in_gradients():
    @fast
    @jax.grad
    def slopes(both):
        flow, x = both
        xs = sv.simulate(flow, x, context=sv.Context(mask=jnp.arange(TOKENS) < 4)).xs
        return jnp.sum(jnp.where(xs[-1, :4] > 0, xs[-1, :4], 0))

    x = tokens_of().at[4:].set(0)
    # F = -I takes a token that sees only itself to zero: after it, padding without a direction.
    lines = jnp.eye(WIDTH).reshape(HEADS, VALUE, WIDTH)
    away = PowerFlow(*arrays()[:2], lines.transpose(0, 2, 1), -lines, depth=LAYERS)
    for flow in (make(), away):
        found = jax.tree.leaves(slopes((flow, x)))
        assert all(np.isfinite(leaf).all() for leaf in found)
        assert any(np.abs(leaf).max() > 1e-3 for leaf in found)


def test_no_size_of_states_or_weights_over_or_underflows():
    x = tokens_of()
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), make())
    for flow, sizes in ((make(), (1e200, 1e-160)), (low, (1e19, 1e-19))):
        start = x.astype(flow.query.dtype)
        expected, eps = step(flow, 0, start), float(jnp.finfo(start.dtype).eps)
        for size in sizes:
            here = step(flow, 0, start * jnp.asarray(size, start.dtype))
            np.testing.assert_allclose(here, expected, rtol=0, atol=50 * eps)
    for name in ("value", "output"):
        kernel = getattr(low, name)
        kernel[...] = kernel[...] * jnp.asarray(1e10, jnp.float32)
    norms = np.linalg.norm(np.asarray(step(low, 0, x.astype(jnp.float32)), np.float64), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "bert", "albert", "llama"])
def test_the_system_of_a_model_is_its_attention_without_the_rest(family):
    model = tiny_model(family)
    config, layers = model.config, model.flow.layers
    flow = PowerFlow.from_model(model)
    assert (flow.depth, flow.width, flow.heads) == (config.depth, config.width, config.heads)
    assert flow.causal == config.causal
    assert flow.shared == (family == "albert")
    assert flow.scale == tuple(config.scales[: len(flow.scale)])
    # Without biases and norms, and with every token at position 0 (no rotation), the model's own
    # attention is the field.
    bare = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (0 if "bias" in jax.tree_util.keystr(path) else 1), model.flow
    )
    bare.layers.attention_norm = None
    x = normal(5, TOKENS, config.width)
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    still = sv.Context(positions=jnp.zeros(TOKENS, int))

    @fast
    def both(flow, bare, x):
        k = jnp.asarray(1)
        return flow.field(0, k, x), bare.branch("attention", k, x, still)

    ours, theirs = both(flow, bare, x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)
    assert np.abs(ours).max() > 0.1
    # The layer matrix from the kernels, grouped values repeated.
    kernel = np.asarray(layers.attention.value.kernel[...][config.blocks[1]])
    value = kernel.reshape(config.width, config.kv_heads, config.head_width)
    value = np.repeat(value, config.heads // config.kv_heads, axis=1).reshape(config.width, -1)
    output = np.asarray(layers.attention.output.kernel[...][config.blocks[1]])
    np.testing.assert_allclose(flow.layer_matrix(1), (value @ output).T, rtol=0, atol=1e-13)


def test_blocks_that_are_used_twice_are_repeated():
    model = tiny_model("albert")
    scales = tuple(0.1 * (k + 1) for k in range(4))
    model = jax.tree.map(lambda leaf: leaf, model.flow)
    model.config = replace(model.config, scales=scales)
    flow = PowerFlow.from_model(model)
    assert not flow.shared
    assert flow.scale == scales
    assert np.array_equal(flow.layer_matrix(0), flow.layer_matrix(3))


def test_one_program_for_all_weights_and_runs():
    def end(flow, x):
        return sv.simulate(flow, x, ts=[float(flow.depth)]).xs[-1]

    program = fast(end)
    x = jnp.stack([tokens_of(s) for s in range(3)])
    each = [program(make(seed=s), x[s]) for s in range(3)]
    assert program._cache_size() == 1
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make(seed=s) for s in range(3)))
    np.testing.assert_allclose(fast(jax.vmap(end))(stacked, x), each, rtol=0, atol=1e-14)
    built = fast(jax.vmap(lambda w, x: end(PowerFlow(*w, depth=LAYERS), x)))
    weights = [jnp.stack(parts) for parts in zip(*(arrays(s) for s in range(3)))]
    np.testing.assert_allclose(built(weights, x), each, rtol=0, atol=1e-14)


def test_known_weights_are_checked_within_a_trace_too():
    weights = [jnp.asarray(array) for array in arrays()]
    shape = jax.eval_shape(lambda: PowerFlow(*weights, depth=2).layer_matrix())
    assert shape.shape == (WIDTH, WIDTH)
    weights[2] = weights[2].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="value is not finite"):
        jax.eval_shape(lambda: PowerFlow(*weights, depth=2).layer_matrix())


def test_it_is_a_pytree_that_pickles_and_keeps_its_types():
    flow = make("layers")
    leaves, treedef = jax.tree.flatten(flow)
    assert len(leaves) == 4
    copy = pickle.loads(pickle.dumps(flow))
    assert jax.tree.structure(copy) == treedef != jax.tree.structure(make(causal=True))
    assert all(np.array_equal(a, b) for a, b in zip(leaves, jax.tree.leaves(copy)))
    for dtype in ("bfloat16", "float32"):
        low = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), flow)
        x = tokens_of().astype(dtype)
        shapes = jax.eval_shape(
            lambda flow, x: (flow.velocity(0.5, x), flow.field(0, 1, x), flow.step(1, x)), low, x
        )
        assert all((out.shape, out.dtype) == (x.shape, x.dtype) for out in shapes)


def test_derivatives_are_limits_of_differences():
    flow, x = make(), tokens_of()
    direction, h = normal(4, *x.shape), 1e-5

    @fast
    def look(flow, x, direction):
        points = jnp.stack([x + h * direction, x - h * direction])
        step = lambda x: flow.step(0, x)  # noqa: E731
        return jax.jvp(step, (x,), (direction,))[1], jax.vmap(step)(points)

    slope, (up, down) = look(flow, x, direction)
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=0, atol=1e-8)
    assert np.abs(slope).max() > 0.1


# Chunks of queries.


@pytest.mark.parametrize(("causal", "masked"), list(itertools.product([False, True], repeat=2)))
def test_chunks_are_the_dense_attention(causal, masked):
    q, k, v = (normal(i, 50, HEADS, width) for i, width in enumerate((HEAD, HEAD, VALUE)))
    mask = jnp.arange(50) % 5 > 0 if masked else None
    scale = jnp.asarray(0.9)

    def chunked(chunk):
        def loss(q, k, v):
            out = attention.attend(q, k, v, scale=scale, causal=causal, mask=mask, chunk=chunk)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

        return fast(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    ((_, dense), slopes), ((_, parts), slopes_of_parts) = chunked(None), chunked(7)
    allowed = attention.allowed_keys(50, causal=causal, mask=mask)

    @fast
    def held(q, k, v):
        return attention.mix_values(attention.attention_weights(q, [k], allowed, scale=scale), [v])

    reference = held(q, k, v)
    np.testing.assert_allclose(dense, reference, rtol=0, atol=1e-14)
    np.testing.assert_allclose(parts, reference, rtol=0, atol=1e-14)
    for a, b in zip(slopes, slopes_of_parts):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
        assert np.abs(a).max() > 1e-2


def test_sums_beyond_the_range_of_half_precision():
    q, v = jnp.zeros((2048, 1, 4), jnp.float16), jnp.full((2048, 1, 4), 40, jnp.float16)
    for chunk in (2048, 512):
        out = attention.attend(q, q, v, scale=jnp.asarray(1.0, jnp.float16), chunk=chunk)
        assert out.dtype == jnp.float16
        np.testing.assert_allclose(out, 40, rtol=1e-3)


def test_scores_beyond_the_range_of_exp():
    q = 1e3 * normal(0, 9, 1, 4)
    out = fast(lambda q: attention.attend(q, q, q, scale=jnp.asarray(1.0), chunk=4))(q)
    # The largest score takes all the weight.
    rows = np.asarray(q[:, 0])
    np.testing.assert_allclose(out[:, 0], rows[np.argmax(rows @ rows.T, axis=1)], rtol=1e-13)


def test_2048_tokens_in_chunks_equal_the_dense_path(monkeypatch):
    x, dtypes = tokens_of(tokens=2048).astype(jnp.float32), (jnp.float32, jnp.float64)
    pairs = [
        (PowerFlow(*(a.astype(dtype) for a in arrays()), depth=2), x.astype(dtype))
        for dtype in dtypes
    ]
    assert attention.query_chunk(2048, 2) == 2048
    dense = [fast(lambda flow, x: flow.step(0, x))(*pair) for pair in pairs]
    monkeypatch.setattr(attention, "SCORES", 2**17)
    assert attention.query_chunk(2048, HEADS) == 64
    chunked = [fast(lambda flow, x: flow.step(0, x))(*pair) for pair in pairs]
    for one in (*dense, *chunked):
        # Sums over 2048 keys, in an order that each processor has its own of: rounding errors add
        # like a random walk.
        tolerance = 2048**0.5 * float(jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose(np.asarray(one, float), dense[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("heads", [1, 4])
def test_65536_tokens_fit(heads):
    # What the compiled layer allocates; running it is for the benchmark.
    head = 64 // heads
    shape = (heads, 64, head)
    weights = [jnp.zeros(s, jnp.float32) for s in (shape, shape, shape, (heads, head, 64))]
    flow = PowerFlow(*weights, depth=1)
    x = jax.ShapeDtypeStruct((65536, 64), jnp.float32)
    compiled = jax.jit(lambda flow, x: flow.step(0, x)).lower(flow, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5e9  # all scores: 17e9 a head
    slope = jax.jit(jax.grad(lambda flow, x: jnp.sum(flow.step(0, x)))).lower(flow, x).compile()
    assert slope.memory_analysis().temp_size_in_bytes < 1.5e9


# What is refused.

SHAPES = [(HEADS, WIDTH, HEAD)] * 2 + [(HEADS, WIDTH, VALUE), (HEADS, VALUE, WIDTH)]


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (WIDTH, HEAD), r"query must have shape \(heads, width, head\)"),
        (3, (1, 1, HEADS, VALUE, WIDTH), r"output must have shape \(heads, value, width\)"),
        (1, (HEADS, WIDTH, HEAD + 1), r"key has shape \(3, 6, 5\), but query \(3, 6, 4\)"),
        (1, (1, HEADS, WIDTH, HEAD), "key has shape"),
        (2, (HEADS, WIDTH + 1, VALUE), r"value has shape \(3, 7, 2\)"),
        (2, (HEADS + 1, WIDTH, VALUE), "value has shape"),
        (3, (HEADS, VALUE + 1, WIDTH), r"output has shape \(3, 3, 6\), not \(3, 2, 6\)"),
        (3, (HEADS, VALUE, WIDTH + 1), "output has shape"),
        (2, (HEADS, WIDTH, 0), "value has no values"),
    ],
)
def test_wrong_shapes_are_named(place, shape, message):
    weights = [np.ones(s) for s in SHAPES]
    weights[place] = np.ones(shape)
    with pytest.raises(ValueError, match=message):
        PowerFlow(*weights, depth=2)


def test_wrong_values_and_options_are_named():
    weights = [np.ones(s) for s in SHAPES]
    for place, name in enumerate(("query", "key", "value", "output")):
        bad = [w.copy() for w in weights]
        bad[place][0, 1, 1] = np.nan
        with pytest.raises(ValueError, match=f"{name} is not finite"):
            PowerFlow(*bad, depth=2)
        with pytest.raises(ValueError, match=f"{name} must be floating point"):
            PowerFlow(*(w.astype(int) if w is weights[place] else w for w in weights), depth=2)
    with pytest.raises(ValueError, match="key is float32, but query is float64"):
        PowerFlow(weights[0], weights[1].astype(np.float32), *weights[2:], depth=2)
    for depth in (None, 0, 1.5, True):
        with pytest.raises(ValueError, match="need depth, a positive int"):
            PowerFlow(*weights, depth=depth)
    stacked = [np.stack([w, w]) for w in weights]
    with pytest.raises(ValueError, match="depth = 2 was given, but the arrays have 2 layers"):
        PowerFlow(*stacked, depth=2)
    for scale in ([1.0, 2.0], [[1.0]]):
        with pytest.raises(ValueError, match="scale must be one number, or 1"):
            PowerFlow(*weights, depth=2, scale=scale)
    with pytest.raises(ValueError, match="scale must be one number, or 2"):
        PowerFlow(*stacked, scale=[1.0, 2.0, 3.0])
    low = [w.astype(np.float32) for w in weights]
    for scale, arrays in ((np.inf, weights), (np.nan, weights), (1e39, low)):
        with pytest.raises(ValueError, match="scale must be finite in float"):
            PowerFlow(*arrays, depth=2, scale=scale)
    assert PowerFlow(*weights, depth=2, scale=1e39).scale == (1e39,)
    for scale in (1j, "1", True):
        with pytest.raises(ValueError, match="scale must be real numbers"):
            PowerFlow(*weights, depth=2, scale=scale)
    with pytest.raises(ValueError, match="from_model takes a Transformer, got list"):
        PowerFlow.from_model([])
    with pytest.raises(ValueError, match="cannot be repeated"):
        PowerFlow(*stacked).repeated(5)
    assert PowerFlow(*weights, depth=2).repeated(5).depth == 5
    with pytest.raises(ValueError, match=r"x0 must have shape \(tokens, 6\)"):
        sv.simulate(PowerFlow(*weights, depth=2), jnp.ones((3, 5)))


def test_a_zero_token_has_no_direction_and_leaves_no_nan_in_gradients():
    flow, x = make(), tokens_of().at[2].set(0)
    y = retract(flow, x)
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[:2]).all()
    kept = (jnp.arange(TOKENS) != 2)[:, None]
    cubes = fast(jax.grad(lambda x: jnp.sum(jnp.where(kept, flow.retract(x) ** 3, 0))))
    assert np.isfinite(cubes(x)).all()
