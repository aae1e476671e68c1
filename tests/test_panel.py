"""The spectral panel against the direct calls, with and without a mask, wide and narrow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flax import nnx

import svflow as sv
from svflow.panels import spectra
from svflow.spectra import controls
from svflow.spectra.measures import SCALARS
from svflow.spectra.panel import CONTROLS, DRAWS, SOURCES, panel

IDS = np.array([3, 7, 1, 12, 12, 20])


@pytest.mark.parametrize(("family", "dtype"), [("bert", "float64"), ("mixtral", "bfloat16")])
def test_the_numbers_are_those_of_the_direct_calls(family, dtype):
    model, seen = tiny_model(family, dtype), []

    def watch(steps):
        for step in steps:
            seen.append(step)
            yield step

    found = panel(model, IDS, seed=3, draws=2, progress=watch)
    assert seen == list(range(2 + 2 * len(CONTROLS)))
    assert (found.token, found.seed) == (5, 3)
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    close = dict(rtol=1e-7 if wide == np.float64 else 1e-4)
    key, factors = jax.random.key(3), {}
    untrained = sv.Transformer(model.config, rngs=nnx.Rngs(key), dtype=jnp.dtype(dtype))
    for name, one in dict(model=model, untrained=untrained).items():
        with jax.default_matmul_precision("highest"):
            states = sv.simulate(one.flow, one.embed(IDS)).xs
        factors[name] = sv.layer_jacobians(one.flow, states, scope="frozen")
        expected, got = sv.measures(factors[name]), getattr(found, name)
        for measure in SCALARS:
            value = getattr(got, measure)
            assert isinstance(value, np.ndarray)
            assert value.dtype == wide
            np.testing.assert_allclose(value, getattr(expected, measure), **close, err_msg=measure)
        for values in (got.eigenvalues, expected.eigenvalues):
            assert values.shape == (one.flow.depth, one.flow.width)
        np.testing.assert_allclose(got.eigenvalues, expected.eigenvalues, **close, atol=1e-5)
    assert not np.allclose(factors["model"], factors["untrained"])
    factors = {name: [J] for name, J in factors.items()}
    stream = jax.random.fold_in(key, DRAWS)
    keys = [jax.random.fold_in(stream, draw) for draw in range(2)]
    for name in CONTROLS:
        factors[name] = [getattr(controls, name)(one, factors["model"][0]) for one in keys]
    assert tuple(found.effective_rank) == tuple(factors) == SOURCES
    for name, drawn in factors.items():
        assert found.effective_rank[name].shape == (len(drawn), 2, model.flow.depth)
        for (before, after), J in zip(found.effective_rank[name], drawn, strict=True):
            np.testing.assert_allclose(before, sv.cumulative(J).effective_rank, **close)
            normal = sv.schur_normal(J)
            np.testing.assert_allclose(after, sv.cumulative(normal).effective_rank, **close)
    expected = sv.measures(jnp.stack(factors["random_update"]))
    for measure in SCALARS:
        value = getattr(found.random_update, measure)
        assert value.shape == (2, model.flow.depth)
        np.testing.assert_allclose(value, getattr(expected, measure), **close, err_msg=measure)
    # What it keeps of the model: |R| / |J|.
    own = np.broadcast_to(found.model.update_ratio, value.shape)
    np.testing.assert_allclose(found.random_update.update_ratio, own, **close)
    assert (found.random_update.top, found.random_update.on_host) == (found.model.top, True)


def test_another_token_another_seed():
    model = tiny_model("gemma3_text")
    last, third = panel(model, IDS), panel(model, IDS, token=2, seed=1)
    assert (third.token, third.model.on_host) == (2, True)
    states = sv.simulate(model.flow, model.embed(IDS)).xs
    expected = sv.measures(sv.layer_jacobians(model.flow, states, token=2)).singular_values
    np.testing.assert_allclose(third.model.singular_values, expected, rtol=1e-8)
    assert not np.allclose(third.model.singular_values, last.model.singular_values)
    reseeded = panel(model, IDS, seed=1)
    for name in SOURCES:
        same = np.allclose(reseeded.effective_rank[name], last.effective_rank[name])
        assert same == (name == "model"), name


def test_draws():
    """Each is another, whatever their number; narrow matrices have five, wide ones one."""
    model = tiny_model("bert")
    five, two = panel(model, IDS).effective_rank, panel(model, IDS, draws=2).effective_rank
    for name in SOURCES:
        assert len(five[name]) == (5 if name in CONTROLS else 1)
        np.testing.assert_array_equal(five[name][:2], two[name])
    ends = np.array([five[name][:, 0, -1] for name in CONTROLS])
    assert (np.ptp(ends, axis=1) > 1e-6).all()


def test_what_each_control_keeps():
    """At the first layer, where the product is one factor."""
    found = panel(tiny_model("gemma3_text"), IDS)
    first = {name: pairs[..., 0].T for name, pairs in found.effective_rank.items()}
    own = first["model"][:, 0]
    assert abs(own[1] - own[0]) > 0.1
    np.testing.assert_allclose(first["haar_similarity"], own[:, None] + np.zeros(5), rtol=1e-6)
    np.testing.assert_allclose(first["haar_factors"][0], own[0], rtol=1e-9)
    np.testing.assert_allclose(own[0], found.model.effective_rank[0], rtol=1e-9)
    for name in ("haar_update", "random_update", "untrained"):
        assert (abs(first[name][0] - own[0]) > 1e-3).all(), name
    # haar_basis of the factors is in law what removal leaves of haar_similarity: same moduli.
    modulus = np.abs(found.model.eigenvalues[0])
    np.testing.assert_allclose(own[1], sv.spectra.effective_rank(jnp.asarray(modulus)), rtol=1e-6)


def test_what_is_refused():
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match="a panel needs a Transformer, got "):
        panel(model.flow, IDS)
    with pytest.raises(ValueError, match="id 23 is outside the vocabulary of 23"):
        panel(model, [1, 23])
    with pytest.raises(ValueError, match="token 6 is not one of 6 tokens"):
        panel(model, IDS, token=6)
    with pytest.raises(ValueError, match="draws must be a positive integer, got 0"):
        panel(model, IDS, draws=0)


def test_an_untrained_model_that_is_not_finite_says_so(monkeypatch):
    model = tiny_model("bert")

    def broken(key, model):
        return jax.tree.map(lambda leaf: leaf * jnp.nan, model)

    monkeypatch.setattr(controls, "initialisation", broken)
    with pytest.raises(ValueError, match=r"the same architecture untrained: .* not finite"):
        panel(model, IDS)


def test_every_source_and_measure_has_its_words():
    assert tuple(spectra.KEEPS) == SOURCES
    shown = {name for key in spectra.SPECTRA for name in spectra.scalars(key).values()}
    assert shown == set(SCALARS) - {"effective_rank", "participation_ratio"}
