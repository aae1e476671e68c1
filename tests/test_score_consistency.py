"""How far attention is from Bayes on its keys, and its values from its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import fast, normal

import svflow as sv
from svflow import geometry, score

# theory: mean KL(softmax || uniform-prior Bayes), log-sd of the key norms; d = 64, 20 keys.
TABLE = {0.0: 0.0, 0.05: 0.013, 0.1: 0.050, 0.2: 0.232, 0.4: 1.25}


def test_the_table_of_gaps_against_the_spread_of_key_norms():
    # Norms have median 2 in the units of scores x . m with |x| = sqrt(d) = 8, concentrations of
    # median 16 on the unit sphere. The gaps of single draws scatter by about their mean; the
    # table's means are taken to be of 100 draws or more, so within 3 standard errors of those.
    @fast
    def spread(cases):
        key = jax.random.key(0)
        return jax.lax.map(lambda case: score.key_spread(key, case[0], norm=case[1]), cases)

    cases = [*((deviation, 2.0) for deviation in TABLE), (0.4, 0.25)]
    seen = np.asarray(spread(jnp.asarray(cases)))
    for draws, expected in zip(seen, TABLE.values()):
        assert draws.min() > -1e-12
        assert abs(draws.mean() - expected) <= 3 * draws.std() / 10 + 1e-12
    means = seen.mean(axis=1)
    # To leading order a gap is half the posterior's variance of |m|^2 / 2: quadratic.
    np.testing.assert_allclose(means[2] / means[1], 4, rtol=0.1)
    # On a unit concentration (norm 2 / 8) nothing of it would be seen.
    assert means[-1] < 1e-3


def one_layer(family, seed=0, tokens=5):
    model = tiny_model(family)
    return model, normal(seed, tokens, model.config.width)


def normalised(model, x):
    """What the norm before attention returns without gain and bias."""
    config = model.config
    y = np.asarray(x)
    if config.norm == "layer":
        y = y - y.mean(axis=-1, keepdims=True)
    if config.placement in ("pre", "sandwich"):
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + config.norm_eps)
    return y


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma2", "bert"])
def test_concentrations_are_the_lengths_of_the_keys(family):
    # The last token's kernel is linear in its state, the others' keys fixed: its keys m are what
    # solves dots = x . m for more states than unknowns.
    model, x = one_layer(family)
    config = model.config
    many = normal(5, 2 * config.width, config.width)
    kernels = fast(
        lambda flow, x, many: jax.vmap(
            lambda last: score.kernel(flow, jnp.asarray(1), x.at[-1].set(last))
        )(many)
    )(model.flow, x, many)
    states = normalised(model, many)
    dots = np.asarray(kernels.dots)[:, -1, :, :-1].reshape(len(many), -1)
    m, _, rank, _ = np.linalg.lstsq(states, dots, rcond=1e-10)
    assert rank == config.width - (config.norm == "layer")
    np.testing.assert_allclose(states @ m, dots, atol=1e-12 * np.abs(dots).max())
    lengths = np.linalg.norm(m, axis=0)
    radius = np.linalg.norm(states, axis=1)[:, None]
    found = np.asarray(kernels.concentrations)[:, -1, :, :-1].reshape(len(many), -1)
    np.testing.assert_allclose(found, radius * lengths, rtol=1e-11)
    np.testing.assert_allclose(np.asarray(kernels.radius)[:, -1, 0], radius[:, 0], rtol=1e-13)
    cumulants = np.asarray(kernels.cumulants)[:, -1, :, :-1].reshape(len(many), -1)
    np.testing.assert_allclose(cumulants, score.cumulant(int(rank), found), rtol=1e-13)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_with_normed_queries_the_sphere_is_that_of_the_query(family):
    model, x = one_layer(family)
    config, layers = model.config, model.flow.layers
    k = fast(lambda flow, x: score.kernel(flow, 1, x))(model.flow, x)
    full = config.query_key_norm == "full"
    dimension = 16 if full else config.head_width
    np.testing.assert_allclose(k.radius, dimension**0.5, rtol=1e-3)  # less the epsilon
    np.testing.assert_allclose(k.cumulants, score.cumulant(dimension, k.concentrations), 1e-13)
    np.testing.assert_allclose(k.dots, np.where(np.isfinite(k.scores), k.scores, k.dots), 1e-12)
    # Token 0 stands at position 0, where nothing turns: its key for itself by hand.
    index = jnp.asarray(1)
    key = np.asarray(model.flow._project(index, None, x, None)[1])[0, 0]
    gain = np.asarray(layers.attention.query_norm.weight[...])[1]
    gain = gain.reshape(-1, config.head_width) + np.zeros((config.heads, 1))
    length = config.scales[1] * np.linalg.norm(gain * key, axis=1)
    np.testing.assert_allclose(k.concentrations[0, :, 0], k.radius[0] * length, rtol=1e-12)


def explicit(model, x, layer=0):
    """Keys m (heads, tokens, width) and values of a model without rotations, by hand."""
    config, layers = model.config, model.flow.layers
    weights = jax.tree.map(lambda leaf: np.asarray(leaf[layer]), layers.attention)
    norm = jax.tree.map(lambda leaf: np.asarray(leaf[layer]), layers.attention_norm)
    y = normalised(model, x) * norm.weight[...] + norm.bias[...]
    key, value = (
        y @ w.kernel[...] + (0 if w.bias is None else w.bias[...])
        for w in (weights.key, weights.value)
    )
    heads = (config.heads, config.head_width)
    query = (norm.weight[...][:, None] * weights.query.kernel[...]).reshape(16, *heads)
    m = config.scales[layer] * np.einsum("whc,jhc->hjw", query, key.reshape(-1, *heads))
    output = weights.output.kernel[...].reshape(*heads, 16)
    eta = np.einsum("jhc,hcw->hjw", value.reshape(-1, *heads), output)
    return tuple(a - a.mean(axis=-1, keepdims=True) for a in (m, eta))


def test_gap_bound_and_tied_distance_by_hand():
    model, x = one_layer("gpt_neo")
    c, k = fast(lambda flow, x: (score.consistency(flow, 0, x), score.kernel(flow, 0, x)))(
        model.flow, x
    )
    m, eta = explicit(model, x)
    states = normalised(model, x)
    np.testing.assert_allclose(k.dots, np.einsum("iw,hjw->ihj", states, m), atol=1e-12)
    a, p = np.exp(k.log_posterior()), np.exp(k.log_bayes())
    some = a > 0
    kl = np.sum(np.where(some, a * np.log(np.where(some, a / np.where(some, p, 1), 1)), 0), axis=-1)
    np.testing.assert_allclose(c.kl, kl, atol=1e-13)
    apart = np.einsum("ihj,hjw->ihw", a - p, m)
    radial = np.einsum("ihw,iw->ih", apart, states) / np.sum(states**2, axis=1)[:, None]
    field = np.linalg.norm(apart - radial[..., None] * states[:, None], axis=-1)
    np.testing.assert_allclose(c.field, field, atol=1e-11)
    sizes = np.sum(m**2, axis=-1)
    largest = np.asarray([sizes[:, : i + 1].max(axis=1) for i in range(5)])
    np.testing.assert_allclose(c.bound, np.sqrt(largest * 2 * np.maximum(kl, 0)), atol=1e-12)
    apart = np.sum((eta - m) ** 2, axis=-1)
    both = sizes + np.sum(eta**2, axis=-1)
    tied = np.einsum("ihj,hj->ih", a, apart) / np.einsum("ihj,hj->ih", a, both)
    np.testing.assert_allclose(c.tied, tied, rtol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_consistency_in_bfloat16_and_of_a_state_of_zero(family):
    measure = fast(lambda flow, x: score.consistency(flow, 0, x))
    model, narrow = tiny_model(family), tiny_model(family, "bfloat16")
    x = normal(0, 5, model.config.width).at[2].set(0)
    exact, rounded = measure(model.flow, x), measure(narrow.flow, x.astype(jnp.bfloat16))
    for values, near in zip(exact, rounded):
        assert np.isfinite(values).all()
        assert near.dtype == jnp.float32
        np.testing.assert_allclose(near, values, atol=0.05 * np.abs(values).max())
    assert np.all(exact.field <= exact.bound + 1e-12)
    # The bound of the zero state is the limit of those of small ones.
    close = measure(model.flow, x.at[2].set(1e-9 * x[1]))
    np.testing.assert_allclose(exact.bound[2], close.bound[2], atol=1e-6)


def test_tied_values_are_found_with_rotations_too():
    # The distance with rotations against keys by the kernel's own linearity, as above.
    model, x = one_layer("llama")
    many = normal(5, 32, 16)
    flow = model.flow

    @fast
    def everything(flow, x, many):
        def kernel(last):
            return score.kernel(flow, 1, x.at[-1].set(last)).dots[-1]

        return (
            jax.vmap(kernel)(many),
            score.consistency(flow, 1, x),
            score.attention(flow, 1, x),
            score.kernel(flow, 1, x),
        )

    dots, c, attention, k = everything(flow, x, many)
    states = normalised(model, many)
    m = np.linalg.lstsq(states, np.asarray(dots)[:, :, :-1].reshape(32, -1))[0]
    m = m.T.reshape(2, 4, 16)
    # The token's own key moves with it: left out here, its share of the sums added by hand.
    a, eta = np.asarray(attention.posterior)[-1], np.asarray(attention.scores)
    sizes = np.square(np.asarray(k.concentrations / k.radius[..., None])[-1])
    np.testing.assert_allclose(sizes[:, :-1], np.sum(m**2, axis=-1), rtol=1e-11)
    own = model.flow._project(jnp.asarray(1), None, x, None)[1][-1]
    position = jnp.asarray([4])
    back = flow.config.ropes[0].angles(-position, jnp.float64)
    key = np.asarray(sv.attention.rotate(own[None], back))[0, 0]
    weights = np.asarray(flow.layers.attention.query.kernel[...])[1].reshape(16, 2, 8)
    gain = np.asarray(flow.layers.attention_norm.weight[...])[1]
    last = flow.config.scales[1] * np.einsum("w,whc,c->hw", gain, weights, key)
    m = np.concatenate([m, last[:, None]], axis=1)
    apart = np.sum((eta - m) ** 2, axis=-1)
    both = np.sum(m**2, axis=-1) + np.sum(eta**2, axis=-1)
    expected = np.sum(a * apart, axis=-1) / np.sum(a * both, axis=-1)
    np.testing.assert_allclose(c.tied[-1], expected, rtol=1e-11)


def test_values_that_are_the_keys_have_distance_zero():
    model, x = one_layer("gpt_neo")
    flow = jax.tree.map(lambda leaf: leaf, model.flow)
    module, norm = flow.layers.attention, flow.layers.attention_norm
    module.value = jax.tree.map(lambda leaf: leaf, module.key)
    query = norm.weight[...][:, :, None] * module.query.kernel[...]
    scales = jnp.asarray(flow.config.scales)[:, None, None]
    module.output.kernel[...] = scales * query.swapaxes(1, 2)
    c = fast(lambda flow, x: score.consistency(flow, 0, x))(flow, x)
    np.testing.assert_allclose(c.tied, 0, atol=1e-13)
    module.output.kernel[...] = -module.output.kernel[...]
    c = fast(lambda flow, x: score.consistency(flow, 0, x))(flow, x)
    np.testing.assert_allclose(c.tied, 2, atol=1e-13)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo3"])
def test_the_bound_holds_in_every_head(family):
    model, x = one_layer(family, tokens=6)
    context = sv.Context(mask=jnp.asarray([True] * 5 + [False]))

    @fast
    def layers(flow, x, context):
        # The layer is traced.
        return jax.lax.map(lambda layer: score.consistency(flow, layer, x, context), jnp.arange(3))

    c = layers(model.flow, 3 * x, context)
    assert c.kl.shape == (3, 6, 2)
    assert c.kl.max() > 1e-4
    assert c.kl.min() > -1e-14
    assert np.all(c.field <= c.bound + 1e-12)
    # The first token has one key, its own: nothing to be inconsistent with.
    assert np.all(np.abs(c.kl[:, 0]) < 1e-14)
    assert np.all(np.abs(c.field[:, 0]) < 1e-12)
    if model.config.query_key_norm is None:
        assert np.all((c.tied >= 0) & (c.tied <= 2))
    else:
        assert c.tied is None


def test_the_divergence_and_its_derivative():
    log_p = jax.nn.log_softmax(normal(0, 4, 6))
    q = jax.nn.softmax(normal(1, 4, 6)).at[0].set(jnp.eye(6)[2])
    ours = score.divergence(q, log_p)
    q_ = np.asarray(q)[1:]
    np.testing.assert_allclose(ours[1:], np.sum(q_ * (np.log(q_) - log_p[1:]), axis=1), rtol=1e-12)
    np.testing.assert_allclose(ours[0], -log_p[0, 2], rtol=1e-14)
    # A target that excludes what q excludes is no infinity, and no nan in a derivative.
    zero = log_p.at[0, 0].set(-jnp.inf)
    assert np.isfinite(score.divergence(q, zero)).all()
    for argument in (0, 1):
        gradient = fast(jax.grad(lambda *a: jnp.sum(score.divergence(*a)), argument))(q, zero)
        assert np.isfinite(gradient).all()
    assert score.divergence(q, log_p.at[1, 0].set(-jnp.inf))[1] == np.inf


def test_the_consistency_loss_trains_a_router_to_bayes():
    mixture = score.VMFMixture.from_natural(normal(0, 4, 5) * jnp.asarray([[0.3], [0.6], [1], [2]]))
    x = geometry.sphere(normal(1, 64, 5))
    router = score.SoftmaxPosterior(normal(2, 4, 5))

    @fast
    def train(router, mixture, x):
        def loss(router):
            return score.consistency_loss(mixture, x, router(x))

        def step(router, _):
            value, gradient = jax.value_and_grad(loss)(router)
            return jax.tree.map(lambda w, g: w - g, router, gradient), value

        return jax.lax.scan(step, router, length=400)

    trained, losses = train(router, mixture, x)
    assert losses[0] > 0.1
    assert np.all(np.diff(losses) < 0)
    assert losses[-1] < 1e-2 * losses[0]
    np.testing.assert_allclose(
        score.consistency_loss(mixture, x, mixture.posterior(x)), 0, atol=1e-14
    )
    # Bayes itself: keys eta, offsets -log(C(0) / C(kappa)), up to a constant.
    exact = -score.cumulant(5, mixture.concentrations)
    offsets = trained.offsets[...] - trained.offsets[...].mean() - (exact - exact.mean())
    assert np.abs(offsets).max() < 0.3 * np.abs(exact - exact.mean()).max()
    with pytest.raises(ValueError, match="that of token 0 sums to 2"):
        score.consistency_loss(mixture, x, 2 * mixture.posterior(x))
