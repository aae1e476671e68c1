"""Layers as posterior-weighted scores, in polar form, split and unsplit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import FAMILY_CONFIGS, tiny_config, tiny_model
from flax import nnx
from flows import VelocityFlow, fast, normal, small_flows

import svflow as sv
from svflow import geometry, score
from svflow.score.correspondence import Correspondence

IDS = jnp.asarray([3, 1, 4, 1, 5])
PADDED = sv.Context(mask=jnp.asarray([True, True, True, True, False]))


def close(a, b, tolerance):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def expanded(c: Correspondence):
    """The scores of every token, factor and state, without the offset."""
    scores = c.scores if c.scores.ndim == 4 else c.scores[None]
    scores = np.broadcast_to(scores, (*c.posterior.shape, scores.shape[-1]))
    sign = 1 if c.sign is None else np.asarray(c.sign)[..., None]
    scale = 1 if c.scale is None else np.asarray(c.scale)[:, None, None, None]
    return scale * sign * scores


@fast
def both(flow, x, context):
    """Correspondences of one attention layer and of a layer of each kind after it."""
    after = [score.attention(flow, jnp.asarray(1), x, context)]
    expected = [flow.branch("attention", 1, x, context)]
    for kind in dict.fromkeys(flow.config.sparse):
        layer = flow.config.sparse.index(kind)
        after.append((score.mixture if kind else score.feed_forward)(flow, layer, x))
        expected.append(flow.branch("feed_forward", layer, x))
    return after, expected, [c.update() for c in after]


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_branch_of_every_family_is_a_posterior_mean_of_scores(family):
    model = tiny_model(family)
    config = model.config
    x = normal(7, 5, config.width)
    found, expected, updates = both(model.flow, x, PADDED)
    assert len(found) == 1 + len(set(config.sparse))
    for c, update, branch in zip(found, updates, expected):
        close(update, branch, 1e-12)
        posterior = np.asarray(c.posterior)
        assert posterior.min() >= 0
        np.testing.assert_allclose(posterior.sum(axis=-1), 1, rtol=1e-14)
        mean = np.einsum("ifs,ifsw->iw", posterior, expanded(c)) + np.asarray(c.offset)
        close(mean, branch, 1e-12)
    attention = found[0]
    assert attention.posterior.shape == (5, config.heads, 5)
    assert np.all(attention.posterior[:4, :, 4] == 0)
    for c, kind in zip(found[1:], dict.fromkeys(config.sparse)):
        if kind:
            chosen = (np.asarray(c.posterior) > 0).sum(axis=-1)
            assert np.all(chosen == config.experts_per_token)
            if config.expert_normalize and config.placement == "pre":
                np.testing.assert_allclose(c.scale, 1, rtol=1e-14)
        else:
            signs = set(np.unique(c.sign))
            assert signs == {-1.0, 1.0} or (config.activation == "relu" and signs == {0.0, 1.0})


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_attention_is_the_mean_over_its_product_latent(family):
    model = tiny_model(family)
    x = normal(7, 3, 16)
    c, branch = fast(lambda flow, x: (score.attention(flow, 1, x), flow.branch("attention", 1, x)))(
        model.flow, x
    )
    posterior, scores = np.asarray(c.posterior), expanded(c)
    offset = np.broadcast_to(c.offset, (3, 16))
    for token in range(3):
        total, mean = 0.0, np.zeros(16)
        for z in itertools.product(range(3), repeat=2):
            probability = np.prod([posterior[token, h, z[h]] for h in range(2)])
            eta = offset[token] + sum(scores[token, h, z[h]] for h in range(2))
            total, mean = total + probability, mean + probability * eta
        np.testing.assert_allclose(total, 1, rtol=1e-14)
        close(mean, branch[token], 1e-13)


def test_an_idle_layer_has_a_uniform_posterior_and_no_update():
    zero = jax.tree.map(jnp.zeros_like, tiny_model("gpt2").flow)

    @fast
    def idle(flow, x):
        c = score.feed_forward(flow, 1, x)
        return c.posterior, c.update()

    posterior, update = idle(zero, normal(0, 2, 16))
    np.testing.assert_allclose(posterior, 1 / 64)
    assert np.array_equal(update, np.zeros((2, 16)))


def test_correspondences_are_differentiable():
    model = tiny_model("mixtral")
    x, direction = normal(7, 3, 16), normal(8, 3, 16)

    @fast
    def slopes(flow, x, direction):
        def ours(x):
            return score.attention(flow, 0, x).update() + score.mixture(flow, 0, x).update()

        def theirs(x):
            return flow.branch("attention", 0, x) + flow.branch("feed_forward", 0, x)

        return [jax.jvp(f, (x,), (direction,))[1] for f in (ours, theirs)]

    ours, theirs = slopes(model.flow, x, direction)
    close(ours, theirs, 1e-12)


def test_wrong_layers_and_states_are_refused():
    model, mixed = tiny_model("gpt2"), tiny_model("qwen3_moe")
    x = normal(0, 3, 16)
    for function in (score.attention, score.feed_forward, score.kernel, score.consistency):
        with pytest.raises(ValueError, match="about a transformer's layers, got VelocityFlow"):
            function(VelocityFlow(normal(0, 16, 16), 3), 0, x)
        with pytest.raises(ValueError, match=r"an integer, one of 0 \.\. 2, got 3"):
            function(model, 3, x)
        for layer in (0.5, 1.0, jnp.asarray(0.5), jnp.arange(2), True, -1, "0"):
            with pytest.raises(ValueError, match="layer must be an integer, one of"):
                function(model, layer, x)
        with pytest.raises(ValueError, match=r"\(tokens, 16\), got float64 \(3, 15\)"):
            function(model, 0, x[:, :15])
        with pytest.raises(ValueError, match="x must be an array, got list"):
            function(model, 0, x.tolist())
        with pytest.raises(ValueError, match="x is float32, the model's weights are float64"):
            function(model, 0, x.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"context\.mask has shape"):
        score.attention(model, 0, x, PADDED)
    with pytest.raises(ValueError, match="layer 0 is not one of `mixture`: use `feed_forward`"):
        score.mixture(model, 0, x)
    with pytest.raises(ValueError, match="layer 0 is not one of `feed_forward`: use `mixture`"):
        score.feed_forward(mixed, 0, x)
    with pytest.raises(ValueError, match="layers of two kinds: the layer must be a Python int"):
        jax.eval_shape(lambda layer: score.mixture(mixed, layer, x), 0)


def mean_of(h):
    return np.mean(h, axis=-1, keepdims=True)


@fast
def polar_of(flow, x):
    xs = sv.simulate(flow, x).xs
    within = [xs[:-1]]
    for k in range(len(flow.splitting) - 1):
        layers = jnp.arange(flow.depth)
        field = jax.vmap(lambda layer, x, k=k: flow.field(k, layer, x))(layers, within[-1])
        within.append(jax.vmap(flow.retract)(within[-1] + field))
    steps = score.polar(flow, xs)
    return (
        xs,
        jnp.stack(within, axis=1),
        steps,
        geometry.retract(steps.direction, steps.dt[..., None] * steps.tangential),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", "float64"),
        ("llama", "float32"),
        ("bert", "float64"),
        ("epsilon", "float64"),
    ],
)
def test_a_trajectory_in_polar_form(name, dtype):
    tolerance = 1e-12 if dtype == "float64" else 1e-6
    model = tiny_model("llama" if name == "epsilon" else name, dtype)
    if name == "epsilon":  # as large as the states
        config = tiny_config("llama", rms_norm_eps=0.5)
        leaves = jax.tree.leaves(model)
        empty = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0), dtype=dtype))
        model = jax.tree.unflatten(jax.tree.structure(empty), leaves)
    flow, config = model.flow, model.config
    # States longer than the updates: every step goes forward.
    x = 20 * normal(3, 4, config.width, dtype=dtype)
    xs, within, steps, after = (
        np.asarray(a, np.float64) if i < 2 else a for i, a in enumerate(polar_of(flow, x))
    )
    assert steps.dt.shape == (3, len(flow.splitting), 4)
    forward = np.isfinite(steps.dt)
    # Layers after a norm have states of the updates' size, and may turn some of them around.
    assert forward[0, 0].all()
    assert config.placement == "post" or forward.all()
    following = np.concatenate([within[:, 1:], xs[1:, None]], axis=1)
    predicted = np.asarray(steps.rho_next)[..., None] * np.asarray(after)
    if config.placement == "post":
        norms = (flow.layers.attention_post_norm, flow.layers.hidden_post_norm)
        gain, bias = (
            np.stack([np.asarray(getattr(n, a)[...]) for n in norms], axis=1)[:, :, None]
            for a in ("weight", "bias")
        )
        # n(h') with gain and bias; its epsilon is 1e-12.
        predicted = gain * np.asarray(after) + bias
    elif flow.centered:
        # The mean apart: it moves by the update's.
        updates = following - within
        predicted = predicted + mean_of(within) + mean_of(updates)
    scale = np.sqrt(np.mean(following**2, axis=-1, keepdims=True))
    error = np.abs(predicted - following) / scale
    assert error[forward].max() < (10 * tolerance if config.placement == "post" else tolerance)
    if name == "epsilon":
        # What attention reads is h / rho_eps, well inside the sphere, and the identity the same.
        rho_eps = np.sqrt(np.mean(within**2, axis=-1, keepdims=True) + 0.5)
        norm = jax.tree.map(lambda leaf: leaf[0], flow.layers.attention_norm)
        read = np.asarray(norm(jnp.asarray(within[0, 0], dtype))) / np.asarray(norm.weight[...])
        np.testing.assert_allclose(rho_eps[0, 0] * read, within[0, 0], atol=20 * tolerance)


def test_tangent_updates_on_the_sphere_are_steps_of_dt_one():
    flow = score.ScoreFlow(score.VMFMixture.from_natural(normal(0, 3, 5)), depth=2)
    xs = geometry.sphere(normal(1, 3, 4, 5))  # any states: each step is measured on its own
    steps = score.polar(flow, xs)
    assert steps.dt.shape == (2, 1, 4)
    np.testing.assert_allclose(steps.dt, 1, rtol=1e-14)


def test_steps_that_leave_the_hemisphere_are_named():
    class Flip(sv.Flow):
        depth, width = 3, 4

        def velocity(self, t, x, context=None):
            late = jnp.asarray(t == 2, x.dtype)
            return -1.5 * late * x.at[0].set(0)

    x = normal(0, 3, 4)
    flow = Flip()
    xs = sv.simulate(flow, x).xs
    with pytest.raises(ValueError, match=r"in layer 2 \(velocity\) it is -.* for token 1, and so"):
        score.polar(flow, xs)
    dt = score.polar(flow, xs, strict=False).dt
    assert np.array_equal(np.isnan(dt[:, 0]), [[False] * 3, [False] * 3, [False, True, True]])
    assert np.isnan(jax.jit(lambda xs: score.polar(flow, xs).dt)(xs)).sum() == 2
    # Padding does not count.
    padded = sv.Context(mask=jnp.asarray([True, False, False]))
    assert np.isnan(score.polar(flow, xs, context=padded).dt).sum() == 2
    with pytest.raises(ValueError, match=r"xs must have shape \(4, tokens, 4\)"):
        score.polar(flow, xs[1:])
    with pytest.raises(ValueError, match="xs must be an array, got list"):
        score.polar(flow, xs.tolist())
    with pytest.raises(ValueError, match="xs is float32, the model's weights are float64"):
        score.polar(tiny_model("gpt2").flow, jnp.zeros((4, 3, 16), jnp.float32))
    with pytest.raises(ValueError, match=r"flow must be an svflow\.Flow"):
        score.polar(object(), xs)


@fast
def gaps_of(flow, x, steps):
    return jax.vmap(lambda dt: score.splitting_gap(flow, 1, x, dt))(steps)


def test_splitting_differs_from_the_parallel_block_at_second_order():
    model = tiny_model("gpt2", gain=0.5)
    split = small_flows()["split"]
    for flow in (model.flow, split):
        x = normal(2, 3, flow.width)
        steps = 2.0 ** -np.arange(4, 9)
        gaps = gaps_of(flow, x, jnp.asarray(steps))
        size = np.abs(gaps.difference).max(axis=(1, 2))
        slopes = np.diff(np.log2(size)) / np.diff(np.log2(steps))
        assert np.abs(slopes - 2).max() < 0.1
        remainder = np.abs(gaps.difference - gaps.leading).max(axis=(1, 2))
        if flow is split:  # linear: nothing of third order
            assert remainder.max() < 1e-14
        else:
            slopes = np.diff(np.log2(remainder)) / np.diff(np.log2(steps))
            assert np.abs(slopes[-1] - 3) < 0.1
    # At dt = 1 it is the layer against the parallel block with the same weights.
    x = normal(2, 3, 16)
    one, expected = fast(
        lambda flow, x: (
            score.splitting_gap(flow, 1, x, 1).difference,
            flow.step(1, x) - (x + flow.velocity(1, x)),
        )
    )(model.flow, x)
    close(one, expected, 1e-13)
    with pytest.raises(ValueError, match="two substeps; TransformerFlow has 1"):
        score.splitting_gap(tiny_model("gpt_neox").flow, 0, x, 0.5)
    for layer in (9, -1, 0.5):
        with pytest.raises(ValueError, match=r"an integer, one of 0 \.\. 2, got"):
            score.splitting_gap(model.flow, layer, x, 0.5)
    with pytest.raises(ValueError, match="x must be an array, got list"):
        score.splitting_gap(model.flow, 0, x.tolist(), 0.5)
    with pytest.raises(ValueError, match="x is float32, the model's weights are float64"):
        score.splitting_gap(model.flow, 0, x.astype(jnp.float32), 0.5)
    sphere = small_flows()["sphere"]
    with pytest.raises(ValueError, match="SphereFlow retracts its states"):
        score.splitting_gap(sphere, 0, normal(2, 3, 6), 0.5)
