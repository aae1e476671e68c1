"""The metrics against their definitions, in full width and by automatic differentiation."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from configs import tiny_config, tiny_model
from flax import nnx
from flows import fast

import svflow as sv
from svflow import attention, geometry
from svflow.score.correspondence import attention as latent
from svflow.score.kernel import kernel
from svflow.score.metrics import PER_HEAD, measured, metrics
from svflow.score.rotary import rotated_forms

# The function of the same name shadows the module in its package.
module = importlib.import_module("svflow.score.metrics")

IDS = np.array([3, 7, 1, 12, 12, 20])


@functools.cache
def program(interpolated=True):
    """Compiled fast: the metrics are the same, and each family is compiled once."""
    return fast(functools.partial(measured, interpolated=interpolated))


@pytest.fixture(autouse=True)
def compiled_fast(monkeypatch):
    monkeypatch.setattr(module, "_pass", lambda *given, interpolated: program(interpolated)(*given))


@fast
def defined(model, xs):
    """By layer, from the posterior, the scores in full width and the kernel of every pair."""
    flow = model.flow

    def one(layer, x):
        def read(a):
            return geometry.center(a) if flow.centered else a

        pairs, product = kernel(flow, layer, x), latent(flow, layer, x)
        a = product.posterior
        eta = read(product.scores)
        eta = jnp.broadcast_to(eta, (len(x), *eta.shape[-3:]))
        if product.scale is not None:
            eta = eta * product.scale[:, None, None, None]
        v = jnp.einsum("ihj,ihjw->ihw", a, eta)

        def energy(x):
            query, _, _ = flow._project(layer, None, x, None)
            key = jnp.repeat(keys, flow.config.heads // flow.config.kv_heads, axis=1)
            s = jnp.einsum("ihk,jhk->hij", query, key)
            s = s * jnp.asarray(flow.config.scales)[layer]
            if flow.config.attention_softcap is not None:
                s = flow.config.attention_softcap * jnp.tanh(s / flow.config.attention_softcap)
            allowed = flow._allowed(layer, len(x), None)
            return jax.nn.logsumexp(jnp.where(allowed, s, -jnp.inf), axis=-1)

        keys = flow._project(layer, None, x, None)[1]
        # A token's own state alone moves its queries: the sum over tokens separates.
        slope = jax.jacrev(lambda x: jnp.sum(energy(x), axis=1))(x).transpose(1, 0, 2)
        n = geometry.sphere(read(x))[:, None]
        v_t, g_t = geometry.tangent(n, v), geometry.tangent(n, read(slope))
        length = functools.partial(jnp.linalg.norm, axis=-1)
        log_a = pairs.log_posterior()
        seen = a > 0
        gap = jnp.sum(jnp.where(seen, a * (log_a - pairs.log_bayes()), 0), axis=-1)
        entropy = -jnp.sum(jnp.where(seen, a * log_a, 0), axis=-1)
        spread = jnp.sum(a * jnp.sum((eta - v[:, :, None]) ** 2, axis=-1), axis=-1)
        count = jnp.sum(pairs.allowed, axis=-1)[:, None].astype(a.dtype)
        field, radial, dt, y = [], [], [], x
        for substep, names in enumerate(flow.splitting):
            h, updates = read(y), [read(flow.branch(name, layer, y)) for name in names]
            for update in updates:
                part = geometry.polar(h, update)
                field.append(length(part.tangential) / flow.width**0.5)
                radial.append(part.radial * flow.width**0.5 / length(update))
            dt.append(geometry.polar(h, sum(updates[1:], start=updates[0])).dt)
            y = y + flow.field(substep, layer, y)
        return dict(
            field=jnp.stack(field),
            radial=jnp.stack(radial),
            dt=jnp.stack(dt),
            angle=jnp.arccos(
                jnp.sum(read(x) * read(y), axis=-1) / length(read(x)) / length(read(y))
            ),
            entropy=(entropy / jnp.log(count)).T,
            free_energy=-energy(x),
            consistency=gap.T,
            dispersion=spread.T,
            cosine=(jnp.sum(v_t * g_t, axis=-1) / (length(v_t) * length(g_t))).T,
            head_field=length(v_t).T / flow.width**0.5,
            head_radial=(jnp.sum(n * v, axis=-1) / length(v)).T / flow.width**0.5,
        )

    return jax.vmap(one)(jnp.arange(flow.depth), xs)


def clipped(model, bound):
    """With queries, keys and values clipped, as OLMo's."""
    model = jax.tree.map(lambda leaf: leaf, model)
    model.flow.config = dataclasses.replace(model.flow.config, projection_clip=bound)
    return model


def check(found, expected, tolerance=1e-10):
    for name in PER_HEAD:
        a, b = np.asarray(found[name]), np.asarray(expected[name])
        scale = np.nanmax(np.abs(b)) if name in ("free_energy", "dispersion") else 1
        several = ~np.isnan(np.asarray(found["entropy"]))
        assert (np.isfinite(a) | ~several).all(), name
        # One key alone has no gradient to compare the field with but its own.
        np.testing.assert_allclose(a[several], b[several], 0, tolerance * scale, err_msg=name)
    for name in ("field", "radial", "dt", "angle"):
        np.testing.assert_allclose(found[name], expected[name], 1e-10, 1e-12, err_msg=name)
    path = np.cumsum(np.asarray(found["angle"]), axis=0)
    np.testing.assert_allclose(found["path"][1:], path, rtol=1e-12)
    assert (np.asarray(found["path"])[0] == 0).all()


# Norms before, after, on the output and on both; learned positions and one or two rotations, of
# whole heads and of halves; soft-caps, clips, windows, biases, groups, norms of queries per head
# and of all heads; parallel blocks.
@pytest.mark.parametrize("family", ["bert", "gpt_neox", "gemma2", "olmo3", "qwen3"])
def test_the_metrics_are_what_their_definitions_say(family):
    model = tiny_model(family)
    if family == "gpt_neox":
        model = clipped(model, 1.0)
    (found, end), close = program()(model, jnp.asarray(IDS))
    assert bool(close)
    xs = sv.simulate(model.flow, model.embed(IDS)).xs
    np.testing.assert_allclose(end, xs[-1], rtol=1e-12, atol=1e-12)
    check(found, defined(model, xs[:-1]))
    keys = np.minimum(np.arange(6) + 1, 10**9) if model.config.causal else np.full(6, 6)
    alone = np.isnan(np.asarray(found["entropy"])).any(axis=(0, 1))
    np.testing.assert_array_equal(alone, keys == 1)


def test_another_models_weights_are_arguments():
    found = metrics(tiny_model("gemma2"), IDS)
    assert found.substeps == found.branches == ("attention", "feed_forward")
    other = tiny_model("gemma2", seed=1)
    with Compilations() as compilations:
        again = metrics(other, IDS)
        jax.block_until_ready(again.path)
    assert compilations.count == 0
    assert not np.allclose(again.entropy, found.entropy, equal_nan=True)


def test_states_of_very_different_length_take_every_normaliser():
    """A state that the norm's epsilon shrinks: interpolating over lengths would not be exact."""
    model = jax.tree.map(lambda leaf: leaf, tiny_model("gpt2"))
    for table, row in ((model.embedding.tokens, 7), (model.embedding.positions, 1)):
        table[...] = table[...].at[row].multiply(1e-3)
    ids = jnp.asarray(IDS)
    assert not bool(program()(model, ids)[1])
    (expected, _), close = program(False)(model, ids)
    assert bool(close)
    found = metrics(model, ids)
    np.testing.assert_allclose(found.consistency, expected["consistency"], rtol=1e-9, atol=1e-12)
    check(expected, defined(model, sv.simulate(model.flow, model.embed(ids)).xs[:-1]))


def test_one_token_sees_itself_alone():
    (found, _), _ = program()(tiny_model("llama"), jnp.asarray(IDS[:1]))
    assert np.isnan(found["entropy"]).all()
    np.testing.assert_allclose(found["consistency"], 0, atol=1e-12)
    np.testing.assert_allclose(found["dispersion"], 0, atol=1e-12)


def test_narrow_models_are_measured_in_float32():
    model = tiny_model("gemma2", "bfloat16")
    (found, end), _ = jax.eval_shape(functools.partial(measured, interpolated=True), model, IDS)
    assert end.dtype == jnp.bfloat16
    shapes = {name: a.shape for name, a in found.items()}
    assert {a.dtype for a in found.values()} == {jnp.dtype("float32")}
    assert {shapes[name] for name in PER_HEAD} == {(3, 2, 6)}
    assert (shapes["field"], shapes["dt"], shapes["path"]) == ((3, 2, 6), (3, 2, 6), (4, 6))


@pytest.mark.parametrize(("width", "planes", "heads"), [(8, 4, 4), (9, 3, 1), (6, 1, 2)])
def test_rotated_forms_are_lengths(width, planes, heads, seed):
    """|A R_i^T k_j|^2, whole heads and parts turning, an odd coordinate standing still."""
    random, tokens, groups = np.random.default_rng(seed), 40, min(2, heads)
    A = random.normal(size=(heads, 11, width))
    key = random.normal(size=(tokens, groups, width))
    turns = tuple(float(t) for t in 1e4 ** -(np.arange(planes) / planes))
    rotate, forms = fast(attention.rotate), fast(functools.partial(rotated_forms, turns=turns))
    expected = []
    for i in range(tokens):
        angles = jnp.broadcast_to(-i * jnp.asarray(turns), (tokens, planes))
        turned = np.repeat(rotate(jnp.asarray(key), angles), heads // groups, axis=1)
        expected.append(np.sum(np.einsum("hdk,jhk->hjd", A, turned) ** 2, axis=-1))
    expected = np.stack(expected, axis=1)
    gram = np.einsum("hdk,hdl->hkl", A, A)
    for dtype, tolerance in ((jnp.float64, 1e-13), (jnp.float32, 3e-6)):
        found = forms(jnp.asarray(gram, dtype), jnp.asarray(key, dtype))
        assert found.dtype == dtype
        found = found.reshape(heads, tokens, tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * expected.max())


def test_what_is_refused(monkeypatch):
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match=r"metrics are those of a Transformer, got Transformer"):
        metrics(model.flow, IDS)
    with pytest.raises(ValueError, match="id 23 is outside the vocabulary of 23"):
        metrics(model, [1, 23])
    centred = dataclasses.replace(tiny_config("gpt2"), query_key_norm="head")
    with pytest.raises(ValueError, match="norms of queries that remove their mean"):
        metrics(jax.eval_shape(lambda: sv.Transformer(centred, rngs=nnx.Rngs(0))), IDS)
    monkeypatch.setattr("svflow.memory._room", lambda like: 1000)
    with pytest.raises(MemoryError, match="scores of 6 tokens"):
        metrics(model, IDS)
    monkeypatch.undo()
    broken = jax.tree.map(lambda leaf: leaf * jnp.inf, tiny_model("bert"))
    monkeypatch.setattr(module, "_pass", lambda *given, interpolated: program(interpolated)(*given))
    with pytest.raises(ValueError, match="last state is not finite in float64"):
        metrics(broken, IDS)
