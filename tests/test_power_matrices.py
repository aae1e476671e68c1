"""Layer matrices against attention and against files; principal pairs and alignment."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from configs import FAMILY_CONFIGS, tiny_model
from flows import LinearFlow, fast
from safetensors.numpy import load_file

import svflow as sv
from svflow import power
from svflow.power.flow import PowerFlow
from svflow.power.matrices import chance

GOLDEN = Path(__file__).parent / "data" / "golden"
EPS = float(jnp.finfo(jnp.float64).eps)
TOKENS = 5


@fast
def attention_on_consensus(flow, rows):
    """The attention branch of every layer where all tokens are that layer's row."""

    def one(layer_and_row):
        layer, row = layer_and_row
        x = jnp.broadcast_to(row, (TOKENS, flow.width))
        return flow.branch("attention", layer, x)

    return jax.lax.map(one, (jnp.arange(flow.depth), rows))


def normed(norm, block, x, *, gain=True):
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean()
    x = x / np.sqrt(np.mean(x * x) + norm.eps)
    if not gain:
        return x
    if norm.weight is not None:
        x = x * (np.asarray(norm.weight[...][block]) + norm.offset)
    return x if norm.bias is None else x + np.asarray(norm.bias[...][block])


def bias_of(attention, block, config):
    """O b_V + b_O, value heads repeated as queries read them."""
    total = np.zeros(config.width)
    if attention.value.bias is not None:
        values = np.asarray(attention.value.bias[...][block]).reshape(config.kv_heads, -1)
        values = values[np.arange(config.heads) // (config.heads // config.kv_heads)]
        total = values.reshape(-1) @ np.asarray(attention.output.kernel[...][block])
    if attention.output.bias is not None:
        total = total + np.asarray(attention.output.bias[...][block])
    return total


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_matrix_is_attention_where_all_tokens_agree(family):
    model = tiny_model(family)
    flow, config, layers = model.flow, model.config, model.flow.layers
    F, folded = power.layer_matrices(model), power.layer_matrices(model, fold_norms=True)
    assert F.shape == (config.depth, config.width, config.width)
    rows = np.random.default_rng(1).normal(size=(config.depth, config.width))
    found = np.asarray(attention_on_consensus(flow, jnp.asarray(rows)))
    for layer, block in enumerate(config.blocks):
        y = normed(layers.attention_norm, block, rows[layer])
        if config.projection_clip is not None:
            value = y @ np.asarray(layers.attention.value.kernel[...][block])
            assert np.abs(value).max() < config.projection_clip
        bias = bias_of(layers.attention, block, config)
        update = np.asarray(F[layer]) @ y + bias
        expected = update
        if config.placement in ("output", "sandwich"):
            expected = normed(layers.attention_post_norm, block, update)
        assert found[layer].shape == (TOKENS, config.width)
        np.testing.assert_allclose(found[layer], np.tile(expected, (TOKENS, 1)), atol=1e3 * EPS)

        plain = normed(layers.attention_norm, block, rows[layer], gain=False)
        if config.placement in ("output", "sandwich"):
            assert not bias.any()
            size = np.sqrt(np.mean(update**2) + config.norm_eps)
            np.testing.assert_allclose(folded[layer] @ plain / size, expected, atol=1e3 * EPS)
        else:
            norm = layers.attention_norm
            if norm is not None and norm.bias is not None:
                bias = bias + np.asarray(F[layer] @ norm.bias[...][block])
            np.testing.assert_allclose(folded[layer] @ plain + bias, expected, atol=1e3 * EPS)


def test_matrices_are_the_checkpoints_own():
    def check(name, formula):
        tensors = load_file(GOLDEN / name / "model.safetensors")
        model = sv.load(GOLDEN / name, dtype=jnp.float64)
        tensors = {key: np.asarray(value, np.float64) for key, value in tensors.items()}
        F = power.layer_matrices(model)
        for layer in range(model.config.depth):
            expected = formula(tensors, layer, model.config)
            np.testing.assert_allclose(F[layer], expected, atol=1e3 * EPS * np.abs(expected).max())

    def find(tensors, end):
        (name,) = [key for key in tensors if key.endswith(end)]
        return tensors[name]

    def albert(t, layer, config):
        start = "albert_layer_groups.0.albert_layers.0.attention"
        return find(t, f"{start}.dense.weight") @ find(t, f"{start}.value.weight")

    def gpt2(t, layer, config):  # Conv1D stores (in, out)
        start, d = f"h.{layer}.attn", config.width
        return find(t, f"{start}.c_proj.weight").T @ find(t, f"{start}.c_attn.weight")[:, 2 * d :].T

    def gpt_neo(t, layer, config):
        start = f"h.{layer}.attn.attention"
        return find(t, f"{start}.out_proj.weight") @ find(t, f"{start}.v_proj.weight")

    def llama(t, layer, config):
        start, repeats = f"layers.{layer}.self_attn", config.heads // config.kv_heads
        assert repeats > 1
        value = find(t, f"{start}.v_proj.weight").reshape(config.kv_heads, -1, config.width)
        value = np.repeat(value, repeats, axis=0).reshape(-1, config.width)
        return find(t, f"{start}.o_proj.weight") @ value

    for name, formula in dict(albert=albert, gpt2=gpt2, gpt_neo=gpt_neo, llama=llama).items():
        check(name, formula)


def test_only_transformers_have_layer_matrices():
    with pytest.raises(ValueError, match="LinearFlow"):
        power.layer_matrices(LinearFlow(jnp.zeros((1, 2, 2))))
    model = tiny_model("gpt2")
    np.testing.assert_array_equal(power.layer_matrices(model), power.layer_matrices(model.flow))


def of_eigenvalues(*blocks, seed=0):
    """A matrix with real eigenvalues and pairs (complex numbers) as given, and its basis."""
    diagonal = scipy.linalg.block_diag(
        *(np.array([[b.real, -b.imag], [b.imag, b.real]]) if isinstance(b, complex) else b
          for b in blocks)
    )  # fmt: skip
    basis = np.random.default_rng(seed).normal(size=diagonal.shape)
    return jnp.asarray(basis @ diagonal @ np.linalg.inv(basis)), basis


def test_the_two_orderings_disagree():
    F, basis = of_eigenvalues(1.0, -1.5, 0.2)
    by_modulus, by_residual = power.principal(F)
    np.testing.assert_allclose(by_modulus.value, -1.5, rtol=1e3 * EPS)
    np.testing.assert_allclose(by_modulus.gap_ratio, 1.5, rtol=1e3 * EPS)
    np.testing.assert_allclose(by_residual.value, 1.0, rtol=1e3 * EPS)
    np.testing.assert_allclose(by_residual.gap_ratio, 2 / 1.2, rtol=1e3 * EPS)
    for pair, column in ((by_modulus, 1), (by_residual, 0)):
        assert bool(pair.real)
        expected = basis[:, column] / np.linalg.norm(basis[:, column])
        expected = expected * np.sign(expected[np.argmax(np.abs(expected))])
        np.testing.assert_allclose(pair.vector, expected, atol=1e4 * EPS)


def test_a_pair_is_compared_with_what_follows_its_conjugate():
    F, _ = of_eigenvalues(0.9 + 1.2j, 1.1, -0.3)
    pairs = power.principal(F)
    for pair, shift in zip(pairs, (0, 1)):
        assert not bool(pair.real)
        np.testing.assert_allclose(pair.value, 0.9 + 1.2j, rtol=1e4 * EPS)
        expected = abs(shift + 0.9 + 1.2j) / (shift + 1.1)
        np.testing.assert_allclose(pair.gap_ratio, expected, rtol=1e4 * EPS)
        moved = F.astype(complex) @ pair.vector
        np.testing.assert_allclose(moved, pair.value * pair.vector, atol=1e4 * EPS)


def test_gaps_at_the_edge():
    alone = power.principal(jnp.asarray([[2.0]]))
    assert np.isinf(alone.modulus.gap_ratio)
    assert np.isinf(alone.residual.gap_ratio)
    only_pair = power.principal(jnp.asarray([[0.0, -1.0], [1.0, 0.0]]))
    assert np.isinf(only_pair.modulus.gap_ratio)
    rank_one = power.principal(jnp.outer(jnp.arange(1.0, 4), jnp.ones(3)))
    assert rank_one.modulus.gap_ratio > 1e12
    np.testing.assert_allclose(rank_one.residual.gap_ratio, 7, rtol=1e3 * EPS)
    for zeros in (jnp.zeros((3, 3)), jnp.eye(3, k=1)):
        assert np.isnan(power.principal(zeros).modulus.gap_ratio)


def test_principal_of_a_stack_and_under_jit():
    F = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 5, 5)))
    stacked, jitted = power.principal(F), jax.jit(power.principal)(F)
    for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(jitted)):
        np.testing.assert_array_equal(one, other)
    single = power.principal(F[1, 2])
    for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(single)):
        np.testing.assert_array_equal(one[1, 2], other)
    with pytest.raises(ValueError, match="square"):
        power.principal(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"J\[1\] is not finite"):
        power.principal(jnp.asarray([np.eye(2), [[np.nan, 0], [0, 1]]]))


def brute_force(F, xs, shift):
    """gamma, signed and rho of one layer, token by token."""
    values, vectors = np.linalg.eig(F)
    place = np.argmax(np.abs(shift + values))
    v = vectors[:, place]
    if values[place].imag:
        frame = scipy.linalg.orth(np.stack([v.real, v.imag], axis=1))
    else:
        v = v.real * np.sign(v.real[np.argmax(np.abs(v.real))])
        frame = v[:, None] / np.linalg.norm(v)
    sizes, signs = [], []
    for x in xs:
        x = x / np.linalg.norm(x, axis=-1, keepdims=True)
        sizes.append([np.linalg.norm(frame.T @ token) for token in x])
        signs.append([frame[:, 0] @ token for token in x])
    signed = np.nan if values[place].imag else np.mean(signs[1])
    return np.mean(sizes[1]), signed, np.mean(np.array(sizes[1]) > np.array(sizes[0]))


@pytest.mark.parametrize("ordering", ["modulus", "residual"])
def test_alignment_token_by_token(ordering):
    random = np.random.default_rng(5)
    matrices = [of_eigenvalues(1.0, -1.5, 0.2, seed=1)[0], of_eigenvalues(0.3 + 2j, 0.2, seed=2)[0]]
    F, xs = jnp.stack(matrices), jnp.asarray(random.normal(size=(3, 40, 3)))
    found = power.alignment(F, xs, ordering=ordering)
    np.testing.assert_array_equal(found.real, [True, False])
    for layer in range(2):
        expected = brute_force(F[layer], xs[layer : layer + 2], float(ordering == "residual"))
        here = (found.gamma[layer], found.signed[layer], found.rho[layer])
        np.testing.assert_allclose(here, expected, atol=1e4 * EPS)
        risen = round(float(found.rho[layer]) * 40)
        test = scipy.stats.binomtest(risen, 40, 0.5)
        np.testing.assert_allclose(found.p_value[layer], test.pvalue, rtol=1e-10)
    scaled = power.alignment(F, xs * jnp.asarray(random.uniform(0.1, 9, (3, 40, 1))),
                             ordering=ordering)  # fmt: skip
    np.testing.assert_allclose(scaled.gamma, found.gamma, rtol=1e3 * EPS)
    np.testing.assert_array_equal(scaled.rho, found.rho)


def test_one_matrix_for_all_layers():
    F = of_eigenvalues(1.0, -1.5, 0.2)[0]
    xs = jnp.asarray(np.random.default_rng(6).normal(size=(4, 7, 3)))
    for one, other in zip(power.alignment(F, xs), power.alignment(jnp.stack([F] * 3), xs)):
        np.testing.assert_allclose(one, other, rtol=1e3 * EPS)


@pytest.mark.parametrize("tokens", [1, 2, 9, 60])
def test_p_values_are_binomial(tokens):
    # Tokens that turn to the first axis, or from it: every count.
    F, near, far = jnp.diag(jnp.asarray([2.0, 1.0])), [1.0, 0.1], [0.1, 1.0]
    for risen in range(tokens + 1):
        before = [far] * risen + [near] * (tokens - risen)
        after = [near] * risen + [far] * (tokens - risen)
        found = power.alignment(F, jnp.asarray([before, after]))
        np.testing.assert_allclose(found.rho, [risen / tokens])
        expected = scipy.stats.binomtest(risen, tokens, 0.5).pvalue
        np.testing.assert_allclose(found.p_value, [expected], rtol=1e-10)


def test_ties_do_not_count():
    F, near, far = jnp.diag(jnp.asarray([2.0, 1.0])), [1.0, 0.1], [0.1, 1.0]
    xs = jnp.asarray([[far] * 3 + [near] * 6, [near] * 3 + [far] + [near] * 5])
    found = power.alignment(F, xs)
    np.testing.assert_allclose(found.rho, [3 / 4])
    np.testing.assert_allclose(found.p_value, [scipy.stats.binomtest(3, 4).pvalue])
    # A layer that does nothing, and a width without directions.
    still = power.alignment(F, jnp.stack([xs[0], xs[0]]))
    for one in (still, power.alignment(jnp.ones((1, 1)), jnp.ones((2, 9, 1)))):
        assert np.isnan(one.rho).all()
        np.testing.assert_array_equal(one.p_value, [1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_rounding_is_no_motion(dtype):
    F = jnp.diag(jnp.asarray([2.0, 1.0, 0.5]))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(400, 3)))
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    still = power.alignment(F, jnp.stack([x, x * 1.001]).astype(dtype))
    assert np.isnan(still.rho).all()
    np.testing.assert_array_equal(still.p_value, [1])
    step = 64 * float(jnp.finfo(dtype).eps)  # towards the first direction, by more than rounding
    moved = power.alignment(
        F, jnp.stack([x, x + step * jnp.sign(x[:, :1]) * jnp.eye(3)[0]]).astype(dtype)
    )
    assert moved.rho > 0.99


def test_layer_matrices_of_narrow_weights_are_of_float32():
    model = tiny_model("gemma2", "bfloat16")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    for fold in (False, True):
        F = power.layer_matrices(model, fold_norms=fold)
        assert F.dtype == jnp.float32
        np.testing.assert_array_equal(F, power.layer_matrices(wide, fold_norms=fold))


def test_p_values_of_many_tokens_in_single_precision():
    tokens, near, far = 65536, np.float32([1.0, 0.1]), np.float32([0.1, 1.0])
    counts = (32769, 33000)
    # The first of them rise, the others fall.
    rise, again = (np.where((np.arange(tokens) < count)[:, None], near, far) for count in counts)
    with jax.enable_x64(False):
        F = jnp.diag(jnp.asarray([2.0, 1.0]))
        found = [power.alignment(F, np.stack([x[:, ::-1], x])) for x in (rise, again)]
    for one, count, expected in zip(found, counts, (0.997, 0.0705)):
        exact = scipy.stats.binomtest(count, tokens).pvalue
        np.testing.assert_allclose(one.rho, count / tokens, rtol=1e-6)
        np.testing.assert_allclose(one.p_value, exact, rtol=1e-6)
        assert abs(exact - expected) < 1e-3


@pytest.mark.parametrize("width", [2, 3, 17])
def test_chance_is_that_of_random_directions(width):
    x = np.random.default_rng(7).normal(size=(200_000, width))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    for dimension in range(1, min(width, 3) + 1):
        sizes = np.linalg.norm(x[:, :dimension], axis=1)
        error = sizes.std() / np.sqrt(len(sizes))
        assert abs(chance(width, dimension) - sizes.mean()) < 5 * error + 1e-12
    if width > 2:
        F = jnp.stack([of_eigenvalues(3.0, *[0.1] * (width - 1))[0],
                       of_eigenvalues(3.0j, *[0.1] * (width - 2))[0]])  # fmt: skip
        found = power.alignment(F, jnp.asarray(x[: 3 * 2000].reshape(3, 2000, width)))
        np.testing.assert_allclose(found.chance, [chance(width, 1), chance(width, 2)])
        np.testing.assert_allclose(found.gamma, found.chance, rtol=0.08)
    np.testing.assert_allclose(chance(4096, 1), np.sqrt(2 / np.pi / 4096), rtol=1e-3)


def test_tokens_of_the_reduced_system_go_to_the_first_by_residual():
    # The reduced system with one matrix whose first eigenvector by |1 + lambda| is real.
    one = of_eigenvalues(1.0, -1.5, 0.2, -0.1)[0]
    flow = PowerFlow(*[jnp.zeros((1, 4, 2))] * 2, jnp.eye(4)[None], one.T[None], depth=40)
    xs = sv.simulate(
        flow, flow.retract(jnp.asarray(np.random.default_rng(8).normal(size=(6, 4))))
    ).xs
    by_residual = power.alignment(one, xs, ordering="residual")
    by_modulus = power.alignment(one, xs, ordering="modulus")
    np.testing.assert_allclose(by_residual.gamma[-1], 1, rtol=1e-7)
    assert by_modulus.gamma[-1] < 0.99
    np.testing.assert_array_equal(by_residual.real, True)


def test_alignment_keeps_the_states_precision_and_differentiates():
    F = of_eigenvalues(1.0, -1.5, 0.2)[0]
    xs = jnp.asarray(np.random.default_rng(9).normal(size=(2, 5, 3)))
    narrow = power.alignment(F.astype(jnp.float32), xs.astype(jnp.bfloat16))
    assert narrow.gamma.dtype == narrow.chance.dtype == narrow.p_value.dtype == jnp.float32
    np.testing.assert_allclose(narrow.gamma, power.alignment(F, xs).gamma, atol=0.02)

    def gamma(F):
        return power.alignment(F, xs).gamma[0]

    for size in (1e20, 1e-20):
        scaled = xs.astype(jnp.float32) * jnp.asarray(size, jnp.float32)
        found = power.alignment(F.astype(jnp.float32), scaled)
        np.testing.assert_allclose(found.gamma, power.alignment(F, xs).gamma, rtol=1e-5)
    # A token that is orthogonal to v, as at a kink of |v . x|.
    slopes = fast(jax.grad(lambda xs: power.alignment(jnp.diag(jnp.arange(3.0)), xs).gamma[0]))
    assert np.isfinite(slopes(xs.at[1, 2].set(jnp.asarray([1.0, 0.0, 0.0])))).all()

    direction = jnp.asarray(np.random.default_rng(10).normal(size=(3, 3)))
    step = 1e-6
    slope = (gamma(F + step * direction) - gamma(F - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(fast(jax.grad(gamma))(F), direction), slope, rtol=1e-6)


def test_alignment_refuses():
    F, xs = jnp.eye(3) * jnp.arange(1.0, 4), jnp.ones((3, 4, 3))
    for bad, message in (
        (lambda: power.alignment(F, xs, ordering="size"), "ordering"),
        (lambda: power.alignment(F[:2, :2], xs), "do not fit"),
        (lambda: power.alignment(jnp.stack([F] * 3), xs), "need 4 states, got 3"),
        (lambda: power.alignment(F, xs[0]), "xs must be"),
        (lambda: power.alignment(F, xs[:1]), "xs must be"),
        (lambda: power.alignment(F, jnp.ones((3, 4, 3), int)), "floating point"),
        (lambda: power.alignment(F, xs.at[1, 2].set(0)), r"xs\[1, 2\] is zero"),
        (lambda: power.alignment(F, xs.at[2, 0, 1].set(jnp.nan)), r"xs\[2, 0\] is zero or not"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
