"""The numbers of a portrait, against identities and against NumPy."""

import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import svflow as sv
from svflow import geometry
from svflow.portrait import Portrait, loss_absent, portrait, summary

GOLDEN = Path(__file__).parent / "data" / "golden"
IDS = np.array([5, 71, 3, 3, 44, 18, 90])
PAIR = np.array([0, 0])
NEOX = dict(
    model_type="gpt_neox",
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.2,
)


@pytest.fixture(scope="module")
def portraits():
    """Serial LayerNorm, serial RMSNorm, norm after the addition, and parallel branches."""
    models = {name: sv.load(GOLDEN / name, dtype=jnp.float64) for name in ("gpt2", "llama", "bert")}
    config = sv.TransformerConfig.from_hf(NEOX)
    models["gpt_neox"] = sv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64)
    with ThreadPoolExecutor(2) as pool:  # most of the time is XLA's, outside Python's lock
        found = pool.map(lambda model: portrait(model, IDS), models.values())
        return dict(zip(models, zip(models.values(), found)))


@pytest.fixture(scope="module")
def states(portraits):
    """The models' states, from the simulation and not from the portrait."""
    return {name: sv.simulate(m.flow, m.embed(IDS)).xs for name, (m, _) in portraits.items()}


def read(model, x):
    x = np.asarray(x)
    return x - x.mean(-1, keepdims=True) if model.flow.centered else x


def rms(x):
    return np.sqrt(np.mean(x * x, axis=-1))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gpt_neox"])
def test_states(name, portraits, states):
    model, found = portraits[name]
    xs = read(model, states[name])
    np.testing.assert_allclose(found.norm, rms(xs), rtol=1e-12)
    layers = range(model.flow.depth)
    angles = np.stack([geometry.geodesic(xs[i], xs[i + 1]) for i in layers])
    np.testing.assert_allclose(found.angle, angles, rtol=1e-10)
    np.testing.assert_allclose(found.path[1:], np.cumsum(angles, axis=0), rtol=1e-10)
    assert np.all(found.path[0] == 0)
    u = np.diff(xs, axis=0)
    cosine = np.sum(u[1:] * u[:-1], -1) / np.linalg.norm(u[1:], axis=-1)
    np.testing.assert_allclose(found.cosine, cosine / np.linalg.norm(u[:-1], axis=-1), atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_parts_add_up(name, portraits, states):
    """radial^2 + tangential^2 = |v|^2 / d, for the first branch, which reads the layer's state."""
    model, found = portraits[name]
    layers, xs = jnp.arange(model.flow.depth), read(model, states[name])
    branch = jax.jit(jax.vmap(lambda layer, x: model.flow.branch("attention", layer, x)))
    v = read(model, branch(layers, states[name][:-1]))
    whole = found.radial[:, 0] ** 2 + found.tangential[:, 0] ** 2
    np.testing.assert_allclose(whole, rms(v) ** 2, rtol=1e-10)
    c = np.mean(xs[:-1] * v, axis=-1) / rms(xs[:-1])
    np.testing.assert_allclose(found.radial[:, 0], c, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_parts_make_the_next_norm(name, portraits):
    """rho'^2 = (rho + c)^2 + tangential^2 for each substep, so the numbers chain to the next."""
    _, found = portraits[name]
    assert found.substeps == found.branches == ("attention", "feed_forward")
    ahead = 1 / found.step  # rho + c
    np.testing.assert_allclose(
        ahead[:, 0], found.norm[:-1] + found.radial[:, 0], rtol=1e-12, err_msg="attention"
    )
    middle = np.sqrt(ahead[:, 0] ** 2 + found.tangential[:, 0] ** 2)
    np.testing.assert_allclose(ahead[:, 1], middle + found.radial[:, 1], rtol=1e-12)
    after = np.sqrt(ahead[:, 1] ** 2 + found.tangential[:, 1] ** 2)
    np.testing.assert_allclose(found.norm[1:], after, rtol=1e-12)


def test_parallel_branches_share_one_step(portraits):
    """The step of both updates together, and nan where together they take the state back."""
    _, found = portraits["gpt_neox"]
    assert found.substeps == ("attention + feed_forward",)
    assert found.branches == ("attention", "feed_forward")
    ahead = found.norm[:-1] + found.radial.sum(axis=1)
    assert 0 < np.sum(ahead <= 0) < ahead.size / 4
    step = np.where(ahead > 0, 1 / ahead, np.nan)
    np.testing.assert_allclose(found.step[:, 0], step, rtol=1e-9)


def test_norm_after_the_addition(portraits):
    """The direction before the norm's gain and bias is n(h + v): the retracted step."""
    model, found = portraits["bert"]
    h = model.embed(IDS)
    v = geometry.center(model.flow.branch("attention", jnp.asarray(0), h))
    x = geometry.sphere(geometry.center(h))
    dt = jnp.asarray(found.step[0, 0])[:, None]
    there = geometry.retract(x, dt * geometry.tangent(x, v))
    np.testing.assert_allclose(there, geometry.sphere(geometry.center(h) + v), atol=1e-10)


def test_loss(portraits):
    """At the last layer it is the loss of the model's own logits."""
    model, found = portraits["gpt2"]
    logits = np.asarray(model(IDS))[:-1]
    chosen = logits[np.arange(len(IDS) - 1), IDS[1:]]
    expected = np.log(np.exp(logits).sum(-1)) - chosen
    np.testing.assert_allclose(found.loss[-1], expected, rtol=1e-9)
    assert found.loss.shape == (model.flow.depth + 1, len(IDS) - 1)


def test_which_models_have_a_loss(portraits):
    reasons = {name: loss_absent(model.config) for name, (model, _) in portraits.items()}
    assert "both sides" in reasons.pop("bert")
    assert portraits["bert"][1].loss is None
    assert set(reasons.values()) == {None}
    assert all(portraits[name][1].loss is not None for name in reasons)
    headless = types.SimpleNamespace(head=None, causal=True)
    assert loss_absent(headless) == "the checkpoint has no head"


def test_refined_is_the_simulation(portraits, states):
    model, found = portraits["bert"]
    x0, x = model.embed(IDS), read(model, states["bert"])
    y = read(model, sv.simulate(model.flow, x0, dt=1 / 8).xs)
    np.testing.assert_allclose(found.refined, rms(x - y) / rms(x), rtol=1e-9, atol=1e-12)
    assert np.all(found.refined[0] == 0)
    assert np.all(found.refined[1:] > 1e-3)


def test_refined_converges_at_order_one():
    """Halving dt halves the uncertainty, which bounds how far the distance moves."""
    model = own_model(0.2, jnp.arange(1.0, 9.0).reshape(2, 4))
    coarse, fine = (portrait(model, PAIR, dt=dt) for dt in (1 / 8, 1 / 16))
    np.testing.assert_allclose(coarse.refined_error[1:] / fine.refined_error[1:], 2, atol=0.1)
    moved = np.abs(coarse.refined - fine.refined)[1:]
    np.testing.assert_allclose(moved, fine.refined_error[1:])
    assert moved.min() > 1e-4


def gpt2_in_numpy(folder, ids):
    """Every state and update of a GPT-2 from its file, in plain NumPy."""
    w = {name: a.astype(np.float64) for name, a in load_file(folder / "model.safetensors").items()}
    heads, layers, d = 4, 3, 32

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    states, updates, losses = [x], [], []
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        q, k, v = np.split(linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn"), 3, axis=-1)
        mixed = np.zeros_like(x)
        for head in range(heads):
            part = slice(head * d // heads, (head + 1) * d // heads)
            scores = q[:, part] @ k[:, part].T / np.sqrt(d / heads)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            weights = np.exp(scores)
            mixed[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
        attention = linear(mixed, f"{block}.attn.c_proj")
        x = x + attention
        a = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        a = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
        hidden = linear(a, f"{block}.mlp.c_proj")
        updates.append((x - attention, attention, x, hidden))
        x = x + hidden
        states.append(x)
    for x in states:
        logits = norm(x, "transformer.ln_f")[:-1] @ w["transformer.wte.weight"].T
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        losses.append(-np.log(p[np.arange(len(ids) - 1), ids[1:]]))
    return np.stack(states), updates, np.stack(losses)


def test_against_numpy(portraits):
    _, found = portraits["gpt2"]
    states, updates, losses = gpt2_in_numpy(GOLDEN / "gpt2", IDS)
    close = dict(rtol=1e-5, atol=1e-6)  # the model takes norms in float64, its file is float32
    np.testing.assert_allclose(found.loss, losses, **close)
    states = states - states.mean(-1, keepdims=True)
    np.testing.assert_allclose(found.norm, states.std(-1), **close)
    unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
    angle = np.arccos(np.sum(unit[1:] * unit[:-1], axis=-1))
    np.testing.assert_allclose(found.path[-1], angle.sum(0), **close)
    for layer, (before, attention, middle, hidden) in enumerate(updates):
        for branch, pair in enumerate([(before, attention), (middle, hidden)]):
            h, v = (a - a.mean(-1, keepdims=True) for a in pair)
            x = h / h.std(-1, keepdims=True)
            c = np.sum(x * v, -1) / h.shape[-1]
            np.testing.assert_allclose(found.radial[layer, branch], c, **close)
            across = (v - c[:, None] * x).std(-1)
            np.testing.assert_allclose(found.tangential[layer, branch], across, **close)
            np.testing.assert_allclose(found.step[layer, branch], 1 / (h.std(-1) + c), **close)


def test_layernorm_models_do_not_see_the_mean(portraits):
    """A constant added to every coordinate of the embedding changes no number."""
    model, found = portraits["gpt2"]
    moved = jax.tree.map(lambda leaf: leaf, model)
    moved.embedding.positions[...] = model.embedding.positions[...] + 3.0
    assert not np.allclose(model.embed(IDS), moved.embed(IDS))
    shifted = portrait(moved, IDS)
    for name in ("norm", "step", "radial", "tangential", "path", "cosine", "refined", "loss"):
        np.testing.assert_allclose(
            getattr(shifted, name), getattr(found, name), rtol=1e-8, atol=1e-10, err_msg=name
        )


def test_narrow_types_are_measured_in_float32():
    x0 = jnp.asarray([[1.0, 2.0, 3.0, 4.0], [500.0, 600.0, 700.0, 800.0]], jnp.float16)
    found = portrait(own_model(0.5, x0), PAIR)
    for name, value in found._asdict().items():
        if isinstance(value, np.ndarray):
            assert value.dtype == np.float32, name
    # The squares of the second row overflow float16.
    expected = rms(np.asarray(x0, np.float64)) * 1.5 ** np.arange(4)[:, None]
    np.testing.assert_allclose(found.norm, expected, rtol=2e-3)


def test_a_second_text_compiles_nothing(portraits, caplog):
    model, _ = portraits["gpt2"]
    with jax.log_compiles():
        portrait(model, IDS[::-1].copy())
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1.0)
    assert [record for record in caplog.records if "Compiling" in record.getMessage()]


class Linear(sv.Flow):
    """dx/dt = rate x."""

    def __init__(self, rate, depth=3, width=4):
        self.rate, self.depth, self.width = jnp.asarray(rate), depth, width

    def velocity(self, t, x, context=None):
        return self.rate.astype(x.dtype) * x


def own_model(rate, x0):
    config = types.SimpleNamespace(head=None, causal=True)
    return types.SimpleNamespace(flow=Linear(rate), config=config, embed=lambda ids: x0)


def test_a_flow_of_ones_own():
    """x' = x + v with v = -2 x turns back on itself: no step is defined, and it is not hidden."""
    x0 = jnp.arange(1.0, 9.0).reshape(2, 4)
    found = portrait(own_model(-2.0, x0), PAIR)
    assert isinstance(found, Portrait)
    assert found.substeps == found.branches == ("velocity",)
    assert found.loss is None
    assert np.all(np.isnan(found.step))
    assert np.all(summary(found.step).tokens == 0)
    np.testing.assert_allclose(found.radial[:, 0], -2 * np.tile(rms(np.asarray(x0)), (3, 1)))
    np.testing.assert_allclose(found.tangential, 0, atol=1e-14)
    np.testing.assert_allclose(found.path, np.pi * np.arange(4)[:, None] * np.ones(2))
    np.testing.assert_allclose(found.cosine, -1)
    # Steps of dt shrink x by (1 - 2 dt) each: 8 of them a layer, and 4 of twice the size.
    layers = np.arange(4)[:, None]
    fine, coarse = (1 - 2 / 8) ** (8 * layers), (1 - 2 / 4) ** (4 * layers)
    np.testing.assert_allclose(found.refined, abs((-1.0) ** layers - fine) * np.ones(2))
    np.testing.assert_allclose(found.refined_error, abs(fine - coarse) * np.ones(2))


def test_progress_is_over_the_layers():
    seen = []

    def watch(layers):
        for layer in layers:
            seen.append(layer)
            yield layer

    portrait(own_model(0.5, jnp.ones((2, 4))), PAIR, progress=watch)
    assert seen == [0, 1, 2]


def test_summary(seed):
    values = np.random.default_rng(seed).normal(size=(3, 2, 11))
    values[0, 0, 4], values[1, 1, 0], values[2, 0] = np.nan, np.inf, np.nan
    found = summary(values)
    assert found.tokens.tolist() == [[10, 11], [11, 10], [0, 11]]
    for row in np.ndindex(3, 2):
        known = values[row][np.isfinite(values[row])]
        expected = (
            [known.mean(), *np.quantile(known, [0.5, 0.25, 0.75])] if known.size else [np.nan] * 4
        )
        got = [found.mean[row], found.median[row], found.lower[row], found.upper[row]]
        np.testing.assert_allclose(got, expected)
    np.testing.assert_array_equal(found.first[0], values[0, :, 0])
    assert np.isnan(found.first[1, 1])


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty|integers"),
        ([4], {}, "at least two tokens, got one"),
        ([4, 97], {}, "id 97 is outside the vocabulary of 97"),
        ([4, -1], {}, "id -1"),
        ([[4, 5]], {}, "jax.vmap"),
        ([4, 5], dict(dt=0.3), "one over an even number, got 0.3"),
        ([4, 5], dict(dt=1.0), "one over an even number"),
        ([4, 5], dict(dt=1 / 3), "one over an even number"),
        ([4, 5], dict(dt=-0.125), "one over an even number"),
        ([4, 5], dict(dt=float("nan")), "one over an even number"),
    ],
)
def test_what_is_refused(ids, options, message, portraits):
    with pytest.raises(ValueError, match=message):
        portrait(portraits["gpt2"][0], np.array(ids), **options)


def test_a_flow_alone_has_no_portrait(portraits):
    with pytest.raises(ValueError, match="a portrait is of a transformer, got TransformerFlow"):
        portrait(portraits["gpt2"][0].flow, np.array([1, 2]))


def test_wide_ids_do_not_wrap_into_the_vocabulary(portraits):
    # As without x64, where JAX makes 1 of 2^32 + 1.
    with jax.enable_x64(False), pytest.raises(ValueError, match="is outside the vocabulary"):
        portrait(portraits["gpt2"][0], np.array([1, 2**32 + 1]))


def test_states_that_overflow_are_refused_by_layer():
    x0 = jnp.ones((2, 4), jnp.float16)
    with pytest.raises(ValueError, match="state after layer 2 is not finite in float16"):
        portrait(own_model(300.0, x0), PAIR)
    with pytest.raises(ValueError, match="enters the first layer is not finite"):
        portrait(own_model(300.0, x0 * jnp.inf), PAIR)
