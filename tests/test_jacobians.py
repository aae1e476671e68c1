"""Jacobians of layers against automatic differentiation of the layer, and a closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import FAMILY_CONFIGS, tiny_config, tiny_model
from flax import nnx
from flows import fast, normal
from observe import ALL, LAYER, make

import svflow as sv
from svflow import memory
from svflow.spectra import jacobians

TEN_THOUSAND = dict(rope_theta=1e4)
# Sums of some hundred products of order 1, computed in another order.
ROUNDING = 1e-12

ALONE = ("constant", "linear", "split", "sphere", "score", "kernel")
"""Flows whose tokens do not see each other."""


def close(a, b, tolerance=ROUNDING):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@fast
def every_scope(flow, x, context=None):
    layer, tokens = jnp.asarray(LAYER), jnp.arange(len(x))

    def block(token, scope):
        move = jacobians.token_map(flow, layer, x, token, scope, context)
        return jacobians.columns_of(move, x[token], None)

    return (
        jax.jacfwd(lambda y: flow.step(layer, y, context))(x),
        jax.lax.map(lambda token: block(token, "frozen"), tokens),
        jax.lax.map(lambda token: block(token, "isolated"), tokens),
        jax.lax.map(lambda y: jax.jacfwd(lambda y: flow.step(layer, y))(y), x[:, None]),
    )


def check(flow, x, context=None):
    full, frozen, isolated, alone = every_scope(flow, x, context)
    close(frozen, np.stack([full[t, :, t] for t in range(len(x))]))
    close(isolated, alone[:, 0, :, 0])
    return np.asarray(full), np.asarray(frozen), np.asarray(isolated)


@pytest.mark.parametrize("name", ALL)
def test_the_scopes_are_blocks_of_the_derivative_of_the_layer(name):
    flow, x = make(name)
    full, frozen, isolated = check(flow, x)
    later = np.abs([full[i, :, j] for i in range(len(x)) for j in range(i + 1, len(x))]).max()
    assert (later == 0) == flow.causal or name in ALONE
    if name in FAMILY_CONFIGS:
        assert np.abs(frozen[-1] - isolated[-1]).max() > 1e-3
        assert np.abs(frozen[0] - isolated[0]).max() > 1e-3 or flow.causal


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bert"])
def test_the_scopes_know_of_padding_and_positions(name):
    flow, x = make(name)
    mask = jnp.arange(len(x)) > 0
    full, _, _ = check(flow, x, sv.Context(mask=mask))
    assert np.abs(full[1:, :, 0]).max() == 0
    if name == "llama":
        moved, _, _ = check(flow, x, sv.Context(positions=jnp.asarray([0, 3, 4, 9, 20])))
        assert np.abs(moved[1:] - full[1:]).max() > 1e-3


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="dynamic", factor=4.0),
        dict(rope_type="longrope", original_max_position_embeddings=2, short_factor=[1.0] * 4,
             long_factor=[2.0, 3.0, 5.0, 7.0]),
    ],
)  # fmt: skip
def test_rotations_that_depend_on_the_length_are_those_of_the_whole_sequence(rope):
    """Of a token before the last, and of some tokens together, with the others held."""
    config = tiny_config("llama", max_position_embeddings=3, rope_parameters=rope | TEN_THOUSAND)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64))
    flow = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), shapes).flow
    x = normal(0, 6, flow.width)
    full = jax.jacfwd(lambda y: flow.step(LAYER, y))(x)
    for token in (1, 2, 5):
        close(sv.jacobian(flow, LAYER, x, token=token), full[token, :, token], 1e-11)
    rows = jnp.asarray([1, 3])
    close(flow.frozen(LAYER, x, rows)(x[rows]), flow.step(LAYER, x)[rows], 1e-11)


def test_isolated_is_the_closed_form():
    # (I + J_mlp J_n2)(I + W_O rep(W_V) J_n1), as in the module's docstring.
    model = tiny_model("llama")
    flow, config = model.flow, model.config
    h = model.embed(jnp.asarray([3, 1, 4]))[-1]
    parts = jax.tree.map(lambda leaf: np.asarray(leaf[LAYER]), flow.layers)
    eye = np.eye(config.width)

    def norm(norm, h):
        s = np.sqrt(np.mean(h * h) + config.norm_eps)
        w = np.asarray(norm.weight[...])
        return w * h / s, (np.diag(w) - np.outer(w * h, h) / (len(h) * s**2)) / s

    h = np.asarray(h)
    y, J_n1 = norm(parts.attention_norm, h)
    W_V = np.asarray(parts.attention.value.kernel[...])
    W_O = np.asarray(parts.attention.output.kernel[...])
    shared = config.heads // config.kv_heads
    W_V = W_V.reshape(config.width, config.kv_heads, -1).repeat(shared, axis=1)
    OV = (W_V.reshape(config.width, -1) @ W_O).T
    first = eye + OV @ J_n1
    h = h + OV @ y
    y, J_n2 = norm(parts.hidden_norm, h)
    gate, up, down = (
        np.asarray(getattr(parts.feed_forward, name).kernel[...]) for name in ("gate", "up", "down")
    )
    a, b = y @ gate, y @ up
    logistic = 1 / (1 + np.exp(-a))
    slope = logistic * (1 + a * (1 - logistic))
    J_mlp = down.T @ (np.diag(a * logistic) @ up.T + np.diag(b * slope) @ gate.T)
    x = model.embed(jnp.asarray([3, 1, 4]))
    found = sv.jacobian(flow, LAYER, x, scope="isolated")
    close(found, (eye + J_mlp @ J_n2) @ first, 1e-12)


def test_jacobian_is_the_block_and_chunks_change_nothing():
    flow, x = make("constant")
    J = jnp.eye(flow.width) + flow.matrices[...][LAYER]
    for scope in jacobians.SCOPES:
        found = [sv.jacobian(flow, LAYER, x, scope=scope, chunk=c) for c in (None, 1, 4, 1000)]
        for one in found:
            want = J if scope != "full" else jnp.einsum("st,ij->sitj", jnp.eye(len(x)), J)
            close(one, want, 1e-15)
    flow, x = make("llama")
    full, frozen, isolated, _ = every_scope(flow, x)
    close(sv.jacobian(flow, LAYER, x, token=-2), frozen[-2])
    close(sv.jacobian(flow, LAYER, x, token=1, scope="isolated", chunk=5), isolated[1])
    close(sv.jacobian(flow, LAYER, x, scope="full", chunk=7), full)


def test_chunks_take_less_memory():
    flow, x = make("gpt2")

    def peak(chunk):
        lowered = jacobians._jacobian.lower(flow, 0, x, 0, None, "full", chunk)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert peak(4) < peak(None) / 4  # of what is left half is a copy of the result


@pytest.mark.parametrize("name", ["gpt2", "velocity"])
def test_layers_are_those_of_the_trajectory(name):
    flow, x = make(name)
    xs = sv.simulate(flow, x).xs
    for scope in ("isolated", "frozen"):
        found = sv.layer_jacobians(flow, xs, token=2, scope=scope)
        assert found.shape == (flow.depth, flow.width, flow.width)
        each = [
            sv.jacobian(flow, layer, xs[layer], token=2, scope=scope) for layer in range(flow.depth)
        ]
        close(found, np.stack(each), 1e-14)
    assert sv.layer_jacobians(flow, xs, scope="full").shape == (flow.depth, *x.shape, *x.shape)


def test_a_known_state_within_a_transform():
    flow, x = make("gpt2")
    here = jax.jit(lambda flow: sv.jacobian(flow, np.int64(LAYER), x, token=np.int64(2)))(flow)
    close(here, sv.jacobian(flow, LAYER, np.asarray(x).tolist(), token=2), 1e-14)
    spectrum = jax.jit(lambda flow: sv.causal_spectrum(flow, LAYER, x))(flow)
    close(spectrum, sv.causal_spectrum(flow, LAYER, x), 1e-13)


def test_isolated_keeps_the_tokens_own_context():
    class Placed(sv.Flow):
        depth, width = 1, 2

        def velocity(self, t, x, context=None):
            real = context.mask.astype(x.dtype) * context.positions.astype(x.dtype)
            return x * real[:, None]

    context = sv.Context(positions=jnp.asarray([5, 6, 7]), mask=jnp.asarray([False, True, True]))
    for scope in ("isolated", "frozen"):
        J = sv.jacobian(Placed(), 0, jnp.ones((3, 2)), token=2, scope=scope, context=context)
        assert np.array_equal(J, 8 * np.eye(2))


def test_the_product_over_layers_is_the_derivative_of_simulate():
    flow, x = make("llama")
    xs = sv.simulate(flow, x).xs
    size = x.size
    product = np.eye(size)
    for J in np.asarray(sv.layer_jacobians(flow, xs, scope="full")):
        product = J.reshape(size, size) @ product
    whole = jax.jacrev(lambda x: sv.simulate(flow, x).xs[-1])(x)
    close(product, whole.reshape(size, size))


@pytest.mark.parametrize("first", [0, 2])
def test_averages_to_the_end_are_those_of_the_product_over_layers(first):
    flow, x = make("gemma2")
    context = sv.Context(mask=jnp.arange(len(x)) != 1)
    xs = sv.simulate(flow, x, context=context).xs
    found = sv.spectra.averaged_jacobians(flow, xs, first=first, context=context)
    product = np.eye(x.size)
    full = np.asarray(sv.layer_jacobians(flow, xs, scope="full", context=context))
    for layer in reversed(range(flow.depth)):
        product = product @ full[layer].reshape(x.size, x.size)
        real = np.arange(first, len(x))
        real = real[real != 1]  # padding is no token
        summed = product.reshape(*x.shape, *x.shape)[real][:, :, real].sum(axis=(0, 2))
        close(found[layer], summed / len(real), 1e-11)


def test_padding_behind_changes_no_average():
    flow, x = make("llama")
    alone = sv.spectra.averaged_jacobians(flow, sv.simulate(flow, x).xs)
    more = jnp.concatenate([x, x[:2]])
    context = sv.Context(mask=jnp.arange(len(more)) < len(x))
    xs = sv.simulate(flow, more, context=context).xs
    close(sv.spectra.averaged_jacobians(flow, xs, context=context), alone, 1e-11)
    with pytest.raises(ValueError, match="all tokens from 5 on are padding"):
        sv.spectra.averaged_jacobians(flow, xs, first=len(x), context=context)


def test_bad_input_to_the_averages_is_named():
    flow, x = make("llama")
    xs = sv.simulate(flow, x).xs
    averaged = sv.spectra.averaged_jacobians
    for message, given in {
        "is not causal": (make("bert")[0], xs),
        "xs must be the 4 states": (flow, xs[:-1]),
        "state before layer 1 is not finite": (flow, xs.at[1].set(jnp.nan)),
    }.items():
        with pytest.raises(ValueError, match=message):
            averaged(*given)
    for first, message in ((5, "first must be from 0 to 4, got 5"), (1.5, "must be an integer")):
        with pytest.raises(ValueError, match=message):
            averaged(flow, xs, first=first)


def test_a_narrow_flow_is_differentiated_in_float32():
    flow, x = make("llama", "bfloat16")
    J = sv.jacobian(flow, LAYER, x)
    assert J.dtype == jnp.float32
    wide, y = jax.tree.map(lambda a: a.astype(jnp.float32), (flow, x))
    close(J, sv.jacobian(wide, LAYER, y), 1e-5)


def test_another_layer_token_or_model_compiles_nothing():
    flow, x = make("gpt2")
    sv.jacobian(flow, 0, x, token=0)
    size = jacobians._jacobian._cache_size()
    other, y = make("gpt2", seed=1)
    for token in (0, -1):
        assert np.isfinite(sv.jacobian(other, 2, y, token=token)).all()
    assert jacobians._jacobian._cache_size() == size


def test_it_is_differentiable_in_weights_and_state():
    flow, x = make("gpt2")
    direction = normal(3, *x.shape)
    step = 1e-5

    def size(flow, x):
        return jnp.sum(sv.jacobian(flow, LAYER, x) ** 2)

    @fast
    def both(flow, x):
        around = jnp.stack([x + step * direction, x - step * direction])
        return jax.grad(size, argnums=(0, 1))(flow, x), jax.vmap(lambda x: size(flow, x))(around)

    (by_weights, by_state), (up, down) = both(flow, x)
    slope = jnp.sum(by_state * direction)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_weights))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_router_is_fixed_at_its_choice(name):
    flow, x = make(name)
    step, row = 1e-6, normal(5, flow.width)

    @fast
    def slopes(flow, x):
        move = flow.frozen(jnp.asarray(LAYER), x, 4)
        around = move(x[4] + step * row) - move(x[4] - step * row)
        return sv.jacobian(flow, LAYER, x) @ row, around / (2 * step)

    close(*slopes(flow, x), 1e-7)


BAD = {
    "layer must be one of 0 .. 2, got 3": dict(layer=3),
    "layer must be one of 0 .. 2, got -1": dict(layer=-1),
    "layer must be an int, got True": dict(layer=True),
    "token must be an int, got 1.5": dict(token=1.5),
    "token 5 is not one of 5 tokens": dict(token=5),
    "token -6 is not one of 5 tokens": dict(token=-6),
    "scope must be one of": dict(scope="whole"),
    "chunk must be a positive": dict(chunk=0),
    "x must have shape": dict(x=jnp.ones((5, 3))),
    "x must be floating point": dict(x=jnp.ones((5, 16), int)),
    "context.mask has shape": dict(context=sv.Context(mask=jnp.ones(4, bool))),
    "the state before layer 1 is not finite": dict(x=jnp.full((5, 16), jnp.nan)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    flow, x = make("llama")
    given = dict(flow=flow, layer=1, x=x) | BAD[message]
    with pytest.raises(ValueError, match=message):
        sv.jacobian(**given)


def test_what_is_not_finite_is_named_by_its_layer():
    flow, x = make("llama")
    xs = sv.simulate(flow, x).xs
    with pytest.raises(ValueError, match="the state before layer 2 is not finite"):
        sv.layer_jacobians(flow, xs.at[2, 0, 0].set(jnp.inf))
    flow = jax.tree.map(lambda leaf: leaf, flow)
    weight = flow.layers.feed_forward.down.kernel
    weight[...] = weight[...].at[1, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="the Jacobian of layer 1 is not finite"):
        sv.layer_jacobians(flow, xs)
    with pytest.raises(ValueError, match=r"xs must be the 4 states"):
        sv.layer_jacobians(flow, xs[:-1])
    for function, states in ((sv.jacobian, (0, x)), (sv.layer_jacobians, (xs,))):
        with pytest.raises(ValueError, match=r"pass its `\.flow`"):
            function(tiny_model("llama"), *states)
    with pytest.raises(ValueError, match=r"pass its `\.xs`"):
        sv.layer_jacobians(flow, sv.simulate(flow, x))
    with pytest.raises(ValueError, match="token must be an int, not traced"):
        jax.vmap(lambda token: sv.jacobian(flow, 0, x, token=token))(jnp.arange(2))


def test_what_does_not_fit_says_how_much_it_takes(monkeypatch):
    flow, x = make("llama")
    monkeypatch.setattr(memory, "_host", lambda: 10_000)
    with pytest.raises(MemoryError, match=r"full Jacobian of 80 x 80 would take .* kB .* of 10 kB"):
        sv.jacobian(flow, 0, x, scope="full")
    with pytest.raises(MemoryError, match="the Jacobian of 80 x 80 and its dense solution"):
        sv.partial_spectrum(*make("bert")[:1], 0, x, 2)
    with pytest.raises(MemoryError, match="80 eigenvectors of 80 coordinates"):
        sv.partial_spectrum(flow, 0, x, 80)
    with pytest.raises(MemoryError, match="16 cotangents of 5 tokens"):
        sv.spectra.averaged_jacobians(flow, sv.simulate(flow, x).xs)
    with pytest.raises(MemoryError, match="3 frozen Jacobians of 16 x 16"):
        sv.layer_jacobians(flow, sv.simulate(flow, x).xs)


def test_causal_spectrum_is_that_of_the_full_jacobian():
    flow, x = make("llama")
    union = np.asarray(sv.causal_spectrum(flow, LAYER, x)).ravel()
    dense = np.asarray(sv.spectra.full_spectrum(flow, LAYER, x))
    assert union.shape == dense.shape == (x.size,)
    apart = np.abs(union[:, None] - dense[None])
    # A dense solve moves an eigenvalue by its condition times the rounding of the matrix.
    assert max(apart.min(0).max(), apart.min(1).max()) < 1e-8 * np.abs(dense).max()


def test_a_bidirectional_model_has_no_causal_spectrum():
    for name in ("bert", "velocity"):
        flow, x = make(name)
        with pytest.raises(ValueError, match=r"is not causal.*full_spectrum"):
            sv.causal_spectrum(flow, LAYER, x)
    with pytest.raises(ValueError, match="chunk must be a positive"):
        sv.causal_spectrum(*make("llama")[:1], LAYER, make("llama")[1], chunk=0)
    flow, x = make("bert")
    spectrum = np.asarray(sv.spectra.full_spectrum(flow, LAYER, x))
    J = np.asarray(sv.jacobian(flow, LAYER, x, scope="full")).reshape(x.size, x.size)
    close(np.sum(spectrum), np.trace(J))
    blocks = np.concatenate(
        [np.linalg.eigvals(sv.jacobian(flow, LAYER, x, token=t)) for t in range(len(x))]
    )
    assert np.abs(np.sort(np.abs(blocks)) - np.sort(np.abs(spectrum))).max() > 1e-2
