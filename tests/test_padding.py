"""Padding changes nothing: left, right, or a whole row of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import fast, normal

import svflow as sv
from svflow.attention import allowed_keys

FAMILIES = {
    "gpt2": "causal, learned positions",
    "gpt_neo": "causal, windowed, learned positions",
    "bert": "bidirectional, learned positions",
    "roberta": "bidirectional, positions that count from the padding token",
    "mistral": "causal, windowed, rotary",
    "gemma3_text": "two rotary embeddings, windowed",
    "qwen3_moe": "rotary, a mixture beside a dense layer",
}
IDS = [3, 2, 4, 11, 5]
REAL, PADDED = len(IDS), 8
LEFT = np.arange(PADDED) >= PADDED - REAL
RIGHT = np.arange(PADDED) < REAL
NONE = np.zeros(PADDED, bool)


def simulated(model, ids, context=None):
    return sv.simulate(model.flow, model.embed(ids, context), context=context).xs


states = fast(simulated)
batched_states = fast(
    jax.vmap(lambda m, ids, mask: simulated(m, ids, sv.Context(mask=mask)), in_axes=(None, 0, 0))
)


def pad(mask, fill):
    ids = np.full(PADDED, fill)
    ids[mask] = IDS[: mask.sum()]
    return ids


@functools.cache
def everything(family):
    """The states of the unpadded sequence, and of six padded ones as one batch."""
    model = tiny_model(family)
    token = model.config.pad_token or 0
    rows = [(LEFT, token), (LEFT, 9), (LEFT, 17), (RIGHT, token), (RIGHT, 9), (NONE, token)]
    ids = jnp.asarray(np.stack([pad(mask, fill) for mask, fill in rows]))
    masks = jnp.asarray(np.stack([mask for mask, _ in rows]))
    return states(model, jnp.asarray(IDS)), batched_states(model, ids, masks)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_state(family):
    plain, batch = everything(family)
    size = np.abs(plain).max()
    for row, mask in ((0, LEFT), (3, RIGHT)):
        # Rotary angles and sums over more keys round differently: some hundreds of eps.
        np.testing.assert_allclose(batch[row][:, mask], plain, rtol=0, atol=1e-13 * size)
    assert np.isfinite(batch).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_of_padding_do_not_matter(family):
    _, batch = everything(family)
    assert np.array_equal(batch[0][:, LEFT], batch[1][:, LEFT])
    assert np.array_equal(batch[0][:, LEFT], batch[2][:, LEFT])
    assert np.array_equal(batch[3][:, RIGHT], batch[4][:, RIGHT])
    # They are not the same input: the padded tokens' own states differ.
    assert np.abs(batch[1] - batch[2]).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_has_no_gradient_and_no_nan(family):
    model = tiny_model(family)
    weights = normal(0, PADDED, model.flow.width)

    @fast
    def gradients(flow, x, mask):
        def real(flow, x):
            end = sv.simulate(flow, x, context=sv.Context(mask=mask)).xs[-1]
            return jnp.sum(jnp.where(mask[:, None], weights * end, 0))

        return jax.vmap(jax.grad(real, argnums=(0, 1)), in_axes=(None, 0))(flow, x)

    x = normal(1, PADDED, model.flow.width)
    loud = jnp.where(LEFT[:, None], x, 1e3 * x)
    both = jnp.stack([x, loud])
    by_flow, by_x = gradients(model.flow, both, jnp.asarray(LEFT))
    assert np.array_equal(by_x[:, ~LEFT], np.zeros_like(by_x[:, ~LEFT]))
    assert np.abs(by_x[:, LEFT]).min(axis=(1, 2)).all()
    assert np.array_equal(by_x[0], by_x[1])
    for leaf in jax.tree.leaves(by_flow):
        assert np.isfinite(leaf).all()
    # A row of nothing but padding: no nan, and no gradient.
    by_flow, by_x = gradients(model.flow, both, jnp.asarray(NONE))
    for leaf in jax.tree.leaves((by_flow, by_x)):
        assert np.array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_explicit_positions_are_the_derived_ones(family):
    model = tiny_model(family)
    ids, mask = jnp.asarray(pad(LEFT, 0)), jnp.asarray(LEFT)
    positions = jnp.asarray(np.maximum(np.cumsum(LEFT) - 1, 0))
    derived = states(model, ids, sv.Context(mask=mask))
    explicit = states(model, ids, sv.Context(positions=positions, mask=mask))
    assert np.array_equal(derived, explicit)
    # And alone of its batch it is what it is within it, up to how a batch is multiplied.
    _, batch = everything(family)
    np.testing.assert_allclose(derived, batch[0], rtol=0, atol=1e-13 * np.abs(derived).max())
    # Without padding: 0, 1, ...; others give something else.
    plain = states(model, jnp.asarray(IDS))
    counted = states(model, jnp.asarray(IDS), sv.Context(positions=jnp.arange(REAL)))
    assert np.array_equal(plain, counted)
    spread = states(model, jnp.asarray(IDS), sv.Context(positions=2 * jnp.arange(REAL)))
    assert np.abs(spread - plain).max() > 1e-3


def test_a_mask_without_padding_is_no_mask():
    model = tiny_model("bert")
    plain, _ = everything("bert")
    masked = states(model, jnp.asarray(IDS), sv.Context(mask=jnp.ones(REAL, bool)))
    assert np.array_equal(plain, masked)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 1, 3])
@pytest.mark.parametrize("padded", [True, False])
def test_allowed_keys_are_those_of_the_definition(causal, window, padded):
    mask = [False, True, True, False, True, True] if padded else [True] * 6
    allowed = allowed_keys(
        6,
        causal=causal,
        window=None if window is None else jnp.asarray(window),
        mask=jnp.asarray(mask) if padded else None,
    )
    for i in range(6):
        for j in range(6):
            past = j <= i or not causal
            near = not window or abs(i - j) < window
            assert allowed[i, j] == ((past and near and mask[j]) or i == j)
