"""Steering: the three variants' formulas, what a copy keeps, files, effects and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from configs import FAMILY_CONFIGS, tiny_config, tiny_model
from flax import nnx
from flows import fast, normal
from matplotlib.figure import Figure

import svflow as sv
from svflow import plotting, power
from svflow.power.flow import PowerFlow
from svflow.power.steering import VARIANTS, read
from svflow.power.steering_plot import dose_picture

EPS = float(jnp.finfo(jnp.float64).eps)
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
Z = np.random.default_rng(0).normal(size=16)
MU = np.random.default_rng(1).normal(size=16)


def values(model, layer):
    """V of a layer, heads repeated as queries read them: (inner, width)."""
    config = model.config
    kernel = np.asarray(model.flow.layers.attention.value.kernel[...])[config.blocks[layer]]
    heads = kernel.T.reshape(config.kv_heads, config.head_width, config.width)
    return np.repeat(heads, config.heads // config.kv_heads, axis=0).reshape(-1, config.width)


def unit(v):
    return np.asarray(v) / np.linalg.norm(v)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_variant_changes_the_layers_matrix_as_it_says(family):
    model, z, mu, a = tiny_model(family), unit(Z), unit(MU), 2.5
    layer = 1
    V = values(model, layer)
    onto = np.linalg.pinv(V) @ V  # the projector to the row space
    F = np.asarray(power.layer_matrices(model))
    grouped = model.config.kv_heads < model.config.heads
    for variant, source in (("basic", z), ("exact", z), ("mean", mu)):
        settings = dict(layer=layer, mean=MU if variant == "mean" else None)
        steered = power.steer(model, 3 * Z, a, variant, **settings)
        found = np.asarray(power.layer_matrices(steered))
        reach = float(power.perturbation(model, Z, a, variant, **settings).reach)
        np.testing.assert_allclose(reach, source @ onto @ source, rtol=1e4 * EPS)
        assert (reach < 0.95) if grouped else np.isclose(reach, 1)
        if variant == "exact":
            np.testing.assert_allclose(found[layer] @ z, a * z, atol=1e5 * EPS)
            change = np.linalg.svd(found[layer] - F[layer], compute_uv=False)
            assert change[1] < 1e5 * EPS * change[0]
        else:
            expected = F[layer] + a * np.outer(z, onto @ source)
            np.testing.assert_allclose(found[layer], expected, atol=1e5 * EPS)
        np.testing.assert_array_equal(np.delete(found, layer, 0), np.delete(F, layer, 0))


def test_rank_one_is_the_notes_formula_for_invertible_values():
    V, O = normal(2, 6, 6), normal(3, 6, 6)  # noqa: E741
    z, mu, a = unit(Z[:6]), unit(MU[:6]), 10.0
    F, inverse = O @ V, np.linalg.inv(V.T)
    lefts = dict(basic=a * z, exact=a * z - F @ z, mean=a * z)
    for variant in VARIANTS:
        found = power.rank_one(V, O, z, a, variant, mean=mu)
        np.testing.assert_allclose(found.left, lefts[variant], atol=1e4 * EPS)
        source = mu if variant == "mean" else z
        np.testing.assert_allclose(found.right, inverse @ source, atol=1e4 * EPS)
        np.testing.assert_allclose(found.reach, 1, atol=1e4 * EPS)


@fast
def step(flow, layer, x):
    return flow.step(layer, x)


@fast
def branch(flow, layer, x):
    return flow.branch("attention", layer, x)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tokens_that_agree_get_what_the_formula_says(family):
    """The step is a z (P mu . y), and with biased values a z (w . b_V) more."""
    model, layer, a = tiny_model(family), 1, 2.5
    x = jnp.broadcast_to(normal(6, 16), (4, 16))
    y = np.asarray(read(model.flow, layer, x))[0]
    change = power.perturbation(model, Z, a, layer=layer, mean=MU)
    steered = power.steer(model, Z, a, layer=layer, mean=MU)
    step = branch(steered.flow, layer, x) - branch(model.flow, layer, x)
    V = values(model, layer)
    push = unit(MU) @ np.linalg.pinv(V) @ V @ y
    bias = model.flow.layers.attention.value.bias
    if bias is not None:
        constant = change.right @ bias[...][layer]
        assert abs(constant) > 1e-3
        push = push + constant
    np.testing.assert_allclose(step, np.tile(a * push * unit(Z), (4, 1)), atol=1e5 * EPS)


def leaves(model):
    return {jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(model)}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_strength_zero_changes_no_bit(dtype):
    model = jax.tree.map(lambda leaf: leaf, tiny_model("gpt2", dtype))
    kernel = model.flow.layers.attention.output.kernel
    kernel[...] = kernel[...].at[-1, :3].set(-0.0)  # x + 0 would lose the sign
    before = {name: np.asarray(leaf).tobytes() for name, leaf in leaves(model).items()}
    for variant in VARIANTS:
        for strength in (0, -0.0, jnp.asarray(0, jnp.float32)):
            steered = power.steer(model, Z, strength, variant, mean=MU)
            after = {name: np.asarray(leaf).tobytes() for name, leaf in leaves(steered).items()}
            assert after == before
        assert kernel.dtype == steered.flow.layers.attention.output.kernel.dtype == dtype


def test_the_callers_arrays_stay_and_only_one_kernel_changes():
    model, direction = tiny_model("gpt2"), Z.copy()
    before = {name: np.array(leaf) for name, leaf in leaves(model).items()}
    steered = power.steer(model, direction, 2.0, layer=1, mean=MU)
    np.testing.assert_array_equal(direction, Z)
    changed = [name for name, leaf in leaves(steered).items()
               if not np.array_equal(leaf, before[name])]  # fmt: skip
    (name,) = changed
    assert "attention" in name
    assert "output" in name
    assert "kernel" in name
    np.testing.assert_array_equal(leaves(steered)[name][::2], before[name][::2])
    for name, leaf in leaves(model).items():
        np.testing.assert_array_equal(leaf, before[name])
    assert steered.config == model.config


@pytest.mark.parametrize("variant", VARIANTS)
def test_length_does_not_matter_and_sign_does(variant):
    V, O = normal(2, 6, 6), normal(3, 6, 6)  # noqa: E741
    z, mu = Z[:6], MU[:6]

    def change(direction, mean=mu, strength=2.0):
        found = power.rank_one(V, O, direction, strength, variant, mean=mean)
        return np.outer(found.left, found.right)

    one = change(z)
    for other in (3 * z, 1e-200 * z, 1e300 * z / np.abs(z).max()):
        np.testing.assert_allclose(change(other), one, rtol=1e4 * EPS)
    np.testing.assert_allclose(change(z, 7 * mu), one, rtol=1e4 * EPS)
    flip = -1 if variant == "mean" else 1
    np.testing.assert_allclose(change(-z), flip * one, rtol=1e4 * EPS)
    if variant != "exact":
        np.testing.assert_allclose(change(z, strength=-2.0), -one, rtol=1e4 * EPS)
    integers = change(np.arange(1, 7))
    np.testing.assert_allclose(integers, change(np.arange(1.0, 7.0)), rtol=1e4 * EPS)


def test_what_cannot_be_steered_is_named():
    model = tiny_model("gpt2")
    wide = np.ones(17)
    for bad, message in (
        (lambda: power.steer(model, 0 * Z, 1.0), "direction is zero"),
        (lambda: power.steer(model, Z * np.nan, 1.0), "direction is not finite"),
        (lambda: power.steer(model, wide, 1.0), r"direction must have shape \(16,\), got \(17,\)"),
        (lambda: power.steer(model, Z[None], 1.0), "direction must have shape"),
        (lambda: power.steer(model, Z * 1j, 1.0), "direction must be real"),
        (lambda: power.steer(model, Z, np.inf), "strength must be finite"),
        (lambda: power.steer(model, Z, [1.0, 2.0]), "strength must be one number"),
        (lambda: power.steer(model, Z, 1j), "strength must be real"),
        (lambda: power.steer(model, Z, "3"), "strength must be real"),
        (lambda: power.steer(model, Z, True), "strength must be real"),
        (lambda: power.steer(model, [*map(str, Z)], 1.0), "direction must be real"),
        (lambda: power.steer(model, Z.astype(object), 1.0), "direction must be real"),
        (lambda: power.steer(model, Z > 0, 1.0), "direction must be real"),
        (lambda: power.mean_read(model, IDS, context=sv.Context(mask=jnp.zeros(8, bool))),
         "mask leaves no token"),
        (lambda: power.steer(model, Z, 1.0, "median"), "variant must be one of .*'median'"),
        (lambda: power.steer(model, Z, 1.0, layer=3), "layer 3 does not exist: the model has 3"),
        (lambda: power.steer(model, Z, 1.0, layer=-4), "layer -4 does not exist"),
        (lambda: power.steer(model, Z, 1.0, layer=1.0), "layer must be an integer"),
        (lambda: power.steer(model, Z, 1.0, mean=0 * MU), "mean is zero"),
        (lambda: power.steer(model, Z, 1.0, mean=wide), "mean must have shape"),
        (lambda: power.steer(model.flow, Z, 1.0), "takes a Transformer, got TransformerFlow"),
        (lambda: power.mean_read(model, [99]), "id 99"),
        (lambda: power.rank_one(jnp.eye(2), jnp.eye(2), Z[:2], 1.0), "needs the mean"),
        (lambda: power.rank_one(jnp.eye(2) * jnp.nan, jnp.eye(2), Z[:2], 1.0, "basic"),
         "layer's value weights are not finite"),
        (lambda: power.rank_one(jnp.eye(2), jnp.eye(2) * jnp.inf, Z[:2], 1.0, "exact"),
         "layer's output weights are not finite"),
        (lambda: power.dose_response(model, Z, ["1"], IDS), "strengths must be real"),
        (lambda: power.dose_response(model, Z, [1j], IDS), "strengths must be real"),
        (lambda: power.dose_response(model, Z, [], IDS), "strengths"),
        (lambda: power.dose_response(model, Z, [1.0, np.nan], IDS), "strengths"),
        (lambda: power.dose_response(model, Z, [1.0], IDS, ["basic", "other"]), "'other'"),
        (lambda: power.dose_response(model, Z, [1.0], [99]), "id 99"),
        (lambda: power.dose_response(model, 0 * Z, [1.0], IDS), "direction is zero"),
        (lambda: power.steering_effect(model, tiny_model("albert"), IDS, Z), "one shape"),
        (lambda: power.unembedding_direction(model, 23), "token 23 is outside"),
        (lambda: power.unembedding_direction(model, -1), "token -1 is outside"),
        (lambda: power.difference_direction(model, IDS, IDS, layer=5), "layer 5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bad()
    for bad in (np.nan, 2.0, 1.0, True, -1.0, [0.1], "0.1"):
        with pytest.raises(ValueError, match="rcond must be"):
            power.steer(model, Z, 1.0, mean=MU, rcond=bad)
    traced = jax.jit(lambda z: power.rank_one(jnp.eye(2), jnp.eye(2), z, 1.0, "basic"))
    assert np.isnan(traced(jnp.zeros(2)).left).all()


def test_what_the_values_do_not_read_cannot_be_steered_to():
    half, eye, lost = jnp.diag(jnp.asarray([1.0, 0.0])), jnp.eye(2), np.array([0.0, 1.0])
    for variant, name in (("basic", "direction"), ("exact", "direction"), ("mean", "mean")):

        def change(direction, strength, V=half, variant=variant):
            return power.rank_one(V, eye, direction, strength, variant, mean=direction)

        for V in (half, 0 * eye):
            with pytest.raises(ValueError, match=f"the {name} is orthogonal to the row space"):
                change(lost, 1.0, V)
            assert not np.any(change(lost, 0.0, V).left)
        traced = jax.jit(change)
        assert np.isnan(traced(jnp.asarray(lost), 1.0).left).all()
        assert not np.any(traced(jnp.asarray(lost), 0.0).left)
        part = change([1.0, 1.0], 1.0)
        np.testing.assert_allclose(part.reach, 0.5)
        np.testing.assert_allclose(traced(jnp.ones(2), 1.0).left, part.left)
    # The mean has to be read; the direction need not.
    found = power.rank_one(half, eye, lost, 2.0, mean=[1.0, 0.0])
    np.testing.assert_allclose(np.outer(found.left, found.right), [[0, 0], [2, 0]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rcond_cuts_what_it_says(dtype):
    eye, z = jnp.eye(2, dtype=dtype), [0.0, 1.0]

    def reach(small, rcond):
        V = jnp.diag(jnp.asarray([1.0, small], dtype))
        return power.rank_one(V, eye, [1.0, 1.0], 1.0, "basic", rcond=rcond).reach

    rounding = 2 * float(jnp.finfo(dtype).eps)
    for rcond, cut in ((None, rounding), (0.1, 0.1), (np.array(0.1), 0.1)):
        np.testing.assert_allclose(reach(1.1 * cut, rcond), 1, rtol=1e-6)
        np.testing.assert_allclose(reach(0.9 * cut, rcond), 0.5, rtol=1e-6)
    np.testing.assert_allclose(reach(1e-3 * rounding, 0), 1, rtol=1e-6)
    with pytest.raises(ValueError, match="orthogonal"):
        power.rank_one(jnp.diag(jnp.asarray([1.0, 0.05], dtype)), eye, z, 1.0, "basic", rcond=0.1)


def test_no_size_of_a_direction_over_or_underflows():
    z = np.abs(Z[:6]) + 0.1
    for x64 in (True, False):
        with jax.enable_x64(x64):
            V, O = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6, 6)))  # noqa: E741
            change = lambda z, mean: power.rank_one(V, O, z, 2.0, mean=mean)  # noqa: B023, E731
            one = change(z, z)
            for size in (1e38, 1e39, 1e-40, 1e-200, 1e-310):
                vector = z * size
                for found in (change(vector, z), change(z, vector)):
                    for part, expected in zip(found, one):
                        np.testing.assert_allclose(part, expected, rtol=1e-5)
            whole, last = change(np.full(6, 2**40), z), change(np.ones(6), z)
            np.testing.assert_allclose(whole.left, last.left, rtol=1e-6)
            np.testing.assert_array_equal(change(np.full(6, 5e-324), z).left, last.left)
            np.testing.assert_array_equal(change(z.astype(">f8"), z).left, one.left)
            if not x64:
                with pytest.raises(ValueError, match="strength must be finite in float32"):
                    power.rank_one(V, O, z, 1e39, mean=z)
                V = jnp.diag(jnp.asarray([1.0, 0.1]))
                with pytest.raises(ValueError, match="change that is not finite in float32"):
                    power.rank_one(V, jnp.eye(2), [0.1, 1.0], 3e38, "exact", rcond=0.5)
    half = tiny_model("gpt2", "float16")
    with pytest.raises(ValueError, match=r"strength 1.* not finite in float16"):
        power.steer(half, Z, 1e8, mean=MU)


@fast
def logits_of(model, ids):
    return model(ids)


@fast
def states_of(model, ids):
    return sv.simulate(model.flow, model.embed(ids)).xs


SAVED = ["llama", "albert", "gpt2", "gemma", "bert", "qwen3_moe", "olmo2", "gpt_neox"]


@pytest.mark.parametrize("family", SAVED)
def test_a_steered_model_is_saved_and_loaded(family, tmp_path):
    model = tiny_model(family)
    steered = power.steer(model, Z, 5.0, layer=1, mean=MU)
    sv.save(steered, tmp_path)
    loaded = sv.load(tmp_path, dtype=jnp.float64)
    ours, theirs = leaves(steered), leaves(loaded)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name])
    config = dataclasses.replace(loaded.config, source=steered.config.source)
    assert config == steered.config
    if family in SAVED[:2]:
        found = logits_of(loaded, IDS)
        np.testing.assert_array_equal(logits_of(steered, IDS), found)
        assert np.abs(logits_of(model, IDS) - found).max() > 1e-3


def random_model(config):
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64))
    random = np.random.default_rng(4)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), shapes)


@pytest.mark.parametrize(("layers", "groups", "inner"), [(5, 2, 1), (3, 1, 2)])
def test_a_shared_layer_gets_a_copy_of_its_own(layers, groups, inner):
    config = tiny_config(
        "albert", num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner
    )
    model = random_model(config)
    F = power.layer_matrices(model)
    for layer in range(config.depth):
        steered = power.steer(model, Z, 2.0, "basic", layer=layer)
        blocks = steered.config.blocks
        assert blocks.count(blocks[layer]) == 1
        assert max(blocks) < config.depth
        found = power.layer_matrices(steered)
        np.testing.assert_array_equal(np.delete(found, layer, 0), np.delete(F, layer, 0))
        expected = F[layer] + 2 * np.outer(unit(Z), unit(Z))
        np.testing.assert_allclose(found[layer], expected, atol=1e6 * EPS)
        # All else is a copy, and the config one that its file can say.
        for name, leaf in leaves(steered.flow.layers).items():
            if "output" not in name:
                old = leaves(model.flow.layers)[name]
                for here, there in zip(blocks, config.blocks):
                    np.testing.assert_array_equal(leaf[here], old[there])
        assert steered.config == sv.TransformerConfig.from_hf(steered.config.hf)
        assert steered.flow.config == steered.embedding.config == steered.head.config
    assert model.config == config


def test_albert_at_strength_zero_is_the_same_function():
    model = tiny_model("albert")
    steered = power.steer(model, Z, 0.0, mean=MU)
    assert steered.config.blocks != model.config.blocks
    np.testing.assert_array_equal(logits_of(steered, IDS), logits_of(model, IDS))


def test_other_families_have_no_file_for_a_copy():
    config = dataclasses.replace(tiny_config("gpt2"), blocks=(0, 0, 1))
    model = random_model(config)
    with pytest.raises(ValueError, match=r"layer 1 shares its weights .* gpt2 file cannot hold"):
        power.steer(model, Z, 1.0, "basic", layer=1)
    power.steer(model, Z, 1.0, "basic", layer=2)


def test_mean_read_is_what_the_value_kernel_is_multiplied_by():
    model = tiny_model("gpt2")
    for layer in (0, -1):
        x = np.asarray(states_of(model, IDS)[layer % 3])
        norm = model.flow.layers.attention_norm
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + norm.eps)
        x = x * norm.weight[...][layer] + norm.bias[...][layer]
        found = power.mean_read(model, IDS, layer=layer)
        np.testing.assert_allclose(found, x.mean(axis=0), atol=1e4 * EPS)
    # Padded tokens do not count; without a norm before it, attention reads the states.
    mask = jnp.asarray(np.arange(8) < 5)
    padded = power.mean_read(model, IDS, context=sv.Context(mask=mask))
    y = np.asarray(read(model.flow, 2, states_of(model, IDS)[2]))
    np.testing.assert_allclose(padded, y[:5].mean(axis=0), atol=1e4 * EPS)
    np.testing.assert_array_equal(read(tiny_model("bert").flow, 1, y), y)


def test_the_stand_in_text_is_the_whole_of_a_small_vocabulary():
    model = tiny_model("gpt2")
    expected = power.mean_read(model, np.arange(23))
    np.testing.assert_array_equal(power.mean_read(model), expected)
    found, given = (power.perturbation(model, Z, 1.0, mean=mean) for mean in (None, expected))
    np.testing.assert_allclose(found.right, given.right, atol=1e4 * EPS)


def test_directions_of_tokens_and_texts():
    for family in ("gpt2", "llama", "albert"):
        model = tiny_model(family)
        z = power.unembedding_direction(model, 7)
        head, table = model.head, model.embedding.tokens[...]
        table = table if head.kernel is None else head.kernel[...]
        row = table[7] * head.norm.weight[...]
        expected = row if head.dense is None else head.dense.kernel[...] @ row
        np.testing.assert_allclose(z, expected, rtol=1e2 * EPS)
        assert z.shape == (16,)
    model = tiny_model("gpt2")
    x = np.asarray(normal(5, 1, 16))
    # A step along it, in what the final norm gives, raises the logit of token 7 as z . step.
    grad = jax.grad(lambda x: model.unembed(x)[0, 7])(jnp.asarray(x))[0]
    z = np.asarray(power.unembedding_direction(model, 7))
    x = x[0] - x.mean()
    z, size = z - z.mean(), np.sqrt(np.mean(x**2) + model.head.norm.eps)
    np.testing.assert_allclose(grad, (z - x * (x @ z) / 16 / size**2) / size, atol=1e4 * EPS)
    for layer, state in ((0, 1), (-1, 3)):
        means = [states_of(model, ids)[state].mean(axis=0)
                 for ids in (IDS, IDS[::-1])]  # fmt: skip
        found = power.difference_direction(model, IDS, IDS[::-1], layer=layer)
        np.testing.assert_allclose(found, means[0] - means[1], atol=1e4 * EPS)


def test_the_effect_is_measured_as_it_says():
    model = tiny_model("gpt2")
    steered = power.steer(model, Z, 3.0, layer=1, mean=MU)
    found = power.steering_effect(model, steered, IDS, Z, layer=1)
    xs, ys = (np.asarray(states_of(one, IDS)) for one in (model, steered))
    for prefix, states in (("layer_", ys[2]), ("", ys[3]), ("unsteered_", xs[3])):
        cosine = np.array([unit(x) @ unit(Z) for x in states])
        for name, value in (("cosine", cosine), ("size", abs(cosine)), ("positive", cosine > 0)):
            np.testing.assert_allclose(getattr(found, prefix + name), value.mean(), atol=1e4 * EPS)
    p, q = (np.asarray(jax.nn.softmax(model.unembed(jnp.asarray(s[3])))) for s in (xs, ys))
    np.testing.assert_allclose(found.kl, np.sum(p * np.log(p / q), axis=1).mean(), rtol=1e-9)
    for name, probabilities in (("loss_before", p), ("loss_after", q)):
        expected = -np.log([row[token] for row, token in zip(probabilities, IDS[1:])]).mean()
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9)
    masked = power.steering_effect(tiny_model("albert"), tiny_model("albert"), IDS, Z)
    assert np.isnan(masked.loss_before)
    assert abs(masked.kl) < 1e3 * EPS


def test_a_dose_is_a_steered_model():
    model, layer, strengths = tiny_model("albert"), 1, [0.0, 4.0]
    found = power.dose_response(model, Z, strengths, IDS, layer=layer)
    assert found.variants == ("basic", "exact", "mean", "stream")
    assert found.effect.kl.shape == (4, 2)
    mean = power.mean_read(model, IDS, layer=layer)
    np.testing.assert_allclose(found.scale, np.linalg.norm(mean), rtol=1e4 * EPS)
    for row, variant in enumerate(VARIANTS):
        steered = power.steer(model, Z, strengths[1], variant, layer=layer, mean=mean)
        expected = power.steering_effect(model, steered, IDS, Z, layer=layer)
        for one, other in zip(found.effect, expected):
            np.testing.assert_allclose(one[row, 1], other, atol=1e6 * EPS)
    np.testing.assert_allclose(found.reach[:3], 1, atol=1e5 * EPS)
    assert np.isnan(found.reach[3])
    for kl in found.effect.kl[:, 0]:
        assert abs(kl) < 1e3 * EPS
    with pytest.raises(ValueError, match=r"strength 1e\+308 of 'basic' makes weights or states"):
        power.dose_response(model, Z, [0.0, 1e308], IDS, layer=layer)
    # The baseline: a |ybar| z on every token after the layer.
    end = layer + 1
    x = states_of(model, IDS)[end]
    x = x + strengths[1] * found.scale * unit(Z)
    cosine = np.mean([unit(row) @ unit(Z) for row in np.asarray(x)])
    np.testing.assert_allclose(found.effect.layer_cosine[3, 1], cosine, atol=1e5 * EPS)
    for after in range(end, model.flow.depth):
        x = step(model.flow, after, x)
    cosine = np.mean([unit(row) @ unit(Z) for row in np.asarray(x)])
    np.testing.assert_allclose(found.effect.cosine[3, 1], cosine, atol=1e5 * EPS)


def test_the_pinned_variants_send_tokens_to_either_side_and_the_mean_to_one():
    """The last of 13 random layers: tokens nearly agree, so each draw goes one way."""
    width, heads, head, layers, draws = 16, 4, 4, 13, 100

    def draw(key):
        keys = jax.random.split(key, 6)
        shape = (layers, heads, width, head)
        q, k, v, o = (jax.random.normal(one, shape) / 4 for one in keys[:4])
        flow = PowerFlow(q, k, v, o.transpose(0, 1, 3, 2))
        x = flow.retract(jax.random.normal(keys[4], (16, width)))
        x = sv.simulate(flow, x, t1=layers - 1, ts=[layers - 1]).xs[0]
        z, mean = jax.random.normal(keys[5], (width,)), jnp.mean(x, axis=0)
        V = v[-1].transpose(0, 2, 1).reshape(width, width)
        O = o[-1].transpose(0, 2, 1).reshape(width, width).T  # noqa: E741
        found = []
        for variant in VARIANTS:
            for strength in (10.0, 100.0):
                change = power.rank_one(V, O, z, strength, variant, mean=mean)
                last = (O + jnp.outer(change.left, change.right)).T
                flow.output[...] = flow.output[...].at[-1].set(last.reshape(heads, head, width))
                cosine = flow.step(layers - 1, x) @ (z / jnp.linalg.norm(z))
                found.append((jnp.mean(jnp.abs(cosine)), jnp.mean((cosine > 0).astype(x.dtype))))
        return jnp.asarray(found)

    found = np.asarray(fast(jax.vmap(draw))(jax.random.split(jax.random.key(0), draws)))
    size, share = found.mean(axis=0).T
    np.testing.assert_allclose(size, [0.75, 0.96, 0.73, 0.96, 0.99, 1.0], atol=0.08)
    np.testing.assert_allclose(share[:4], 0.5, atol=0.2)
    np.testing.assert_allclose(share[4:], 1, atol=0.02)
    one_way = np.maximum(found[:, :4, 1], 1 - found[:, :4, 1])
    assert one_way.mean() > 0.9


def test_a_gradient_steers_the_embedded_model_to_a_token():
    path = sv.data.default_model_path()
    model, tokenizer = sv.load(path), sv.load_tokenizer(path)
    ids, token = tokenizer.encode("The captain said that the"), int(tokenizer.encode(" sea")[0])
    mean = power.mean_read(model, ids)
    start = dict(direction=power.difference_direction(model, ids, ids[::-1]),
                 strength=jnp.zeros((), jnp.float32))  # fmt: skip

    def loss(parameters, model):
        steered = power.steer(model, **parameters, mean=mean)
        return -jax.nn.log_softmax(steered(ids)[-1])[token]

    optimiser = optax.adam(0.2)

    @fast
    def update(parameters, state, model):
        value, gradient = jax.value_and_grad(loss)(parameters, model)
        with jax.numpy_dtype_promotion("standard"):  # optax's own
            changes, state = optimiser.update(gradient, state)
            return optax.apply_updates(parameters, changes), state, value, gradient

    parameters, state, history = start, optimiser.init(start), []
    for _ in range(30):
        parameters, state, value, gradient = update(parameters, state, model)
        history.append(float(value))
        if len(history) == 1:
            assert float(gradient["strength"]) != 0  # also where steering begins, at zero
    before, after = np.exp(-history[0]), np.exp(-history[-1])
    print(f"probability {before:.4f} to {after:.4f}")
    assert after > 0.5 > 10 * before


def test_one_program_for_all_strengths():
    traced = []

    @jax.jit
    def kernel(model, strength, direction):
        traced.append(1)
        steered = power.steer(model, direction, strength, mean=MU)
        return steered.flow.layers.attention.output.kernel[...]

    model = tiny_model("gpt2")
    for strength in (0.0, 1.0, -3.0):
        found = kernel(model, jnp.asarray(strength), jnp.asarray(Z))
        plain = power.steer(model, Z, strength, mean=MU).flow.layers.attention.output.kernel[...]
        np.testing.assert_allclose(found, plain, atol=1e4 * EPS)
    assert len(traced) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_picture(theme, tmp_path):
    strengths, lines = np.geomspace(0.1, 100, 5), np.random.default_rng(5).random((3, 5))
    with plt.rc_context(plotting.style(theme)):
        figure = Figure()
        panels = dose_picture(
            figure, np.append(0, strengths), VARIANTS,
            **dict.fromkeys(("cosine", "size", "positive", "kl"),
                            np.concatenate([np.zeros((3, 1)), lines], axis=1)),
            unsteered=(0.1, 0.4), theme=theme, title="Steering",
        )  # fmt: skip
        figure.savefig(tmp_path / "dose.png")
    assert (tmp_path / "dose.png").stat().st_size > 10_000
    solid = [line for line in panels[1].lines if len(line.get_xdata()) == 5]
    assert len(solid) == 3
    for line, expected in zip(solid, lines):
        np.testing.assert_array_equal(line.get_xdata(), strengths)
        np.testing.assert_array_equal(line.get_ydata(), expected)
