"""Prefix shuffling: what is permuted, what is measured, and what the statistics say."""

import functools

import jax
import numpy as np
import pytest
from compilations import Compilations
from configs import tiny_config, tiny_model
from flows import fast
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats

import svflow as sv
from svflow.score import shuffle as module
from svflow.score.metrics import PER_HEAD, measured
from svflow.score.shuffle import prefix_shuffle, shuffled, spearman, table, twins
from svflow.score.shuffle_plot import SHOWN, shuffle_picture

PROMPTS = np.random.default_rng(0).integers(0, 23, (5, 12))


@given(
    length=st.integers(4, 40),
    share=st.floats(0, 1),
    fraction=st.floats(0, 1),
    seed=st.tuples(st.integers(0, 2**31), st.integers(0, 99)),
)
def test_only_the_asked_fraction_of_the_prefix_moves(length, share, fraction, seed):
    suffix = max(2, round(share * (length - 2)))
    ids = np.arange(length)
    found = shuffled(ids, suffix=suffix, fraction=fraction, seed=seed)
    np.testing.assert_array_equal(found[length - suffix :], ids[length - suffix :])
    np.testing.assert_array_equal(np.sort(found), ids)
    moved = np.flatnonzero(found != ids)
    count = round(fraction * (length - suffix))
    assert len(moved) <= count
    if count == 0:
        np.testing.assert_array_equal(found, ids)
    np.testing.assert_array_equal(found, shuffled(ids, suffix=suffix, fraction=fraction, seed=seed))


def test_places_of_a_larger_fraction_contain_those_of_a_smaller():
    """Over many seeds, 10 and 20 of 40: a place that moves in the smaller alone stays by luck."""
    ids, lost = np.arange(42), []
    for seed in range(200):
        small, large = (
            {*np.flatnonzero(shuffled(ids, suffix=2, fraction=share, seed=seed) != ids)}
            for share in (0.25, 0.5)
        )
        lost.append(len(small - large))
    # A permutation of 20 has one fixed point on average, half of those among the 10.
    assert np.mean(lost) < 1
    independent = 10 * (1 - 20 / 40)  # were the places drawn anew
    assert np.mean(lost) < independent / 4


def test_a_permutation_needs_a_prefix_and_a_fraction():
    for ids, suffix in ((np.arange(5), 6), (np.arange(5), -1), (PROMPTS, 2)):
        with pytest.raises(ValueError, match=f"a suffix of {suffix} tokens, and ids of shape"):
            shuffled(ids, suffix=suffix, fraction=1, seed=0)
    for fraction in (-0.5, 2, np.nan):
        with pytest.raises(ValueError, match="a fraction must be from 0 to 1"):
            shuffled(np.arange(5), suffix=2, fraction=fraction, seed=0)
    with pytest.raises(ValueError, match=r"suffix must be an int, got 2\.0"):
        shuffled(np.arange(5), suffix=2.0, fraction=1, seed=0)


def test_a_seed_gives_this_permutation_everywhere():
    """Computed on the host from a stream that NumPy keeps: written down once."""
    found = shuffled(np.arange(12), suffix=3, fraction=1, seed=(0, 1, 2))
    np.testing.assert_array_equal(found, EXPECTED)
    assert not np.array_equal(found, shuffled(np.arange(12), suffix=3, fraction=1, seed=(0, 1, 3)))


EXPECTED = [3, 0, 7, 6, 5, 4, 8, 2, 1, 9, 10, 11]


def test_all_permutations_are_as_likely():
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        found = tuple(int(i) for i in shuffled(np.arange(5), suffix=2, fraction=1, seed=seed)[:3])
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.fixture(scope="module")
def study():
    patch = pytest.MonkeyPatch()
    patch.setattr(
        module,
        "_suffix",
        jax.jit(
            module._suffix.__wrapped__,
            static_argnames=("suffix", "with_loss", "interpolated"),
            compiler_options={"xla_backend_optimization_level": 0},
        ),
    )
    model = tiny_model("llama", gain=0.5)
    with Compilations() as compilations:
        found = prefix_shuffle(model, PROMPTS, suffix=4, fractions=(0, 0.5, 1), seeds=2, seed=7)
    yield model, found, compilations.count
    patch.undo()


def test_fraction_zero_changes_nothing_to_the_bit(study):
    _, found, _ = study
    for one in (found, found.untrained):
        for name, change in one.change.items():
            assert (change[:, 0] == 0).all(), name
            np.testing.assert_array_equal(one.metric[name][:, 0, 0], one.unshuffled[name])
            assert np.abs(change[:, 1:]).max() > 0, name
        np.testing.assert_array_equal(one.loss[:, 0, 1], one.unshuffled_loss)


def test_the_numbers_are_those_of_the_metrics_and_of_the_loss(study):
    model, found, _ = study
    ids = shuffled(PROMPTS[3], suffix=4, fraction=0.5, seed=(7, 3, 1))
    assert not np.array_equal(ids, PROMPTS[3])
    (rows, _), _ = fast(functools.partial(measured, interpolated=True))(model, ids)
    place = (3, 1, 1)
    for name in PER_HEAD:
        expected = np.asarray(rows[name])[..., -4:].mean(axis=(1, 2))
        np.testing.assert_allclose(found.metric[name][place], expected, rtol=1e-10)
    for column, name in enumerate(("attention", "feed_forward")):
        for kind in ("field", "radial", "dt"):
            expected = np.asarray(rows[kind])[:, column, -4:].mean(axis=-1)
            np.testing.assert_allclose(found.metric[f"{kind} of {name}"][place], expected, 1e-10)
    np.testing.assert_allclose(found.metric["path"][place], rows["path"][1:, -4:].mean(-1), 1e-10)
    np.testing.assert_allclose(found.metric["angle"][place], rows["angle"][:, -4:].mean(-1), 1e-10)
    logits = fast(lambda model, ids: model(ids))(model, ids)
    scores = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    expected = -np.mean([scores[t, ids[t + 1]] for t in range(8, 11)])
    np.testing.assert_allclose(found.loss[place], expected, rtol=1e-10)
    base = found.unshuffled["entropy"][3]
    change = (found.metric["entropy"][place] - base) / base
    np.testing.assert_allclose(found.change["entropy"][place], change, rtol=1e-12)
    worse = (found.loss - found.unshuffled_loss[:, None, None]).mean(axis=2)[:, 2]
    means = found.change["entropy"].mean(axis=2)[:, 2]
    for layer in range(3):
        expected = stats.spearmanr(means[:, layer], worse)
        np.testing.assert_allclose(found.rho["entropy"][2, layer], expected.statistic, rtol=1e-12)
        p = max(expected.pvalue, 2 / 120)
        np.testing.assert_allclose(found.p_value["entropy"][2, layer], p, rtol=1e-9)
    assert np.isnan(found.rho["entropy"][0]).all()


def test_one_program_for_all_texts_and_the_control(study):
    model, found, count = study
    assert count > 0
    with Compilations() as compilations:
        again = prefix_shuffle(model, PROMPTS[:2], suffix=4, fractions=(1,), seeds=1, seed=7)
    assert compilations.count == 0
    np.testing.assert_array_equal(again.change["path"][:, 0, 0], found.change["path"][:2, 2, 0])
    assert np.isnan(again.rho["path"]).all()  # of two prompts
    shapes = {a.shape for a in again.metric.values()}
    assert shapes == {(2, 1, 1, 3)}
    control = sv.spectra.controls.initialisation(jax.random.key(7), model)
    alone = prefix_shuffle(
        control, PROMPTS, suffix=4, fractions=(0, 0.5, 1), seeds=2, seed=7, control=False
    )
    assert alone.untrained is None
    for name in PER_HEAD:
        np.testing.assert_array_equal(alone.metric[name], found.untrained.metric[name])


def test_the_table_fits_and_names_every_metric(study):
    _, found, _ = study
    for one in (found, found._replace(untrained=None)):
        lines = table(one).splitlines()
        assert max(map(len, lines)) <= 100
        for name in found.change:
            assert any(row.startswith(f"{name:<22}|") for row in lines), name


def test_the_picture_draws_every_fraction_and_the_control(study):
    _, found, _ = study
    figure = Figure()
    panels = shuffle_picture(figure, found, theme="dark", title="a study")
    assert len(panels) == 6
    for axes, name in zip(panels, SHOWN):
        _, half, control_half, whole, control = axes.lines
        for line, one, place in (
            (half, found, 1), (control_half, found.untrained, 1),
            (whole, found, 2), (control, found.untrained, 2),
        ):  # fmt: skip
            expected = 100 * np.nanmedian(one.change[name][:, place], axis=(0, 1))
            np.testing.assert_allclose(line.get_ydata(), expected)
            np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])


def test_without_a_next_token_there_is_no_loss(monkeypatch):
    run = fast(functools.partial(module._suffix.__wrapped__, suffix=4, with_loss=False,
                                 interpolated=False))  # fmt: skip
    monkeypatch.setattr(module, "_suffix", lambda model, ids, **_: run(model, ids))
    found = prefix_shuffle(
        tiny_model("bert"), PROMPTS[0], suffix=4, fractions=(1,), seeds=1, control=False
    )
    assert found.loss is None
    assert (found.rho, found.untrained) == ({}, None)
    assert found.change["entropy"].shape == (1, 1, 1, 3)
    assert table(found)


@pytest.fixture(scope="module")
def narrow():
    """A model with norms of queries in float32, and the same in float64."""
    model, _ = twins(tiny_config("llama"), seed=3)
    run = fast(functools.partial(module._suffix.__wrapped__, suffix=4, with_loss=True,
                                 interpolated=False))  # fmt: skip
    return model, run


def test_what_rounding_does_is_no_change(narrow, monkeypatch):
    model, run = narrow
    monkeypatch.setattr(module, "_suffix", lambda model, ids, **_: run(model, ids))
    found = prefix_shuffle(model, PROMPTS[:2], suffix=4, fractions=(1,), seeds=1, control=False)
    # Its kernels have one concentration: the KL is zero, and a change of it is no number.
    assert max(np.abs(v).max() for v in (found.metric["consistency"],)) < 1e-5
    assert np.isnan(found.change["consistency"]).all()
    assert np.isfinite(found.change["entropy"]).all()
    row = next(row for row in table(found).splitlines() if row.startswith("consistency"))
    assert set(row.removeprefix("consistency")) == {" ", "|", "-"}
    shuffle_picture(Figure(), found, theme="light", title="a study")


def test_rounding_is_about_what_float32_is_off(narrow):
    model, run = narrow
    names = module._columns(model)
    wide = jax.tree.map(lambda leaf: leaf.astype("float64"), model)
    for prompt in PROMPTS[:3]:
        values, exact = (np.asarray(run(m, prompt)[0][0], np.float64) for m in (model, wide))
        floor = module.rounding(names, exact, float(np.finfo(np.float32).eps))
        for column, name in enumerate(names):
            error = np.abs(values[column] - exact[column])
            if not name.startswith("dt"):  # it has a pole
                assert (error <= 2 * floor[column]).all(), name
        assert np.abs(values - exact).max() > 0


def test_rounding_by_metric():
    names = ["free_energy", "entropy", "cosine", "radial of attention", "angle"]
    values = np.array([[-3.0], [0.5], [-0.1], [0.2], [0.5]])
    expected = 4 * 0.125 * np.array([[4], [4], [1], [1], [0.5]])
    np.testing.assert_array_equal(module.rounding(names, values, 0.125), expected)
    base = np.array([1.0, 1.0, 1.0])
    apart = module._apart(np.array([1.4, 1.6, 0.4]), base, 0.5 * base)
    np.testing.assert_allclose(apart, [0, 0.6, -0.6])
    change = np.array([[[1.0, np.nan, np.nan], [3.0, 2.0, np.nan]]])
    np.testing.assert_array_equal(module.medians(change), [2, 2, np.nan])


def test_rank_correlations():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 30, 4))
    y[:, 1] += x[:, 1]
    x[:, 2] = np.round(x[:, 2])  # ties
    rho, p = spearman(x, y)
    for column in range(4):
        expected = stats.spearmanr(x[:, column], y[:, column])
        np.testing.assert_allclose(rho[column], expected.statistic, rtol=1e-12)
        np.testing.assert_allclose(p[column], expected.pvalue, rtol=1e-9)
    rho, p = spearman(np.arange(5.0), np.arange(5.0) ** 3)
    np.testing.assert_allclose((rho, p), (1, 2 / 120), rtol=1e-12)
    for worse in (np.ones(5), np.array([1, 2, np.nan, 4, 5])):
        assert np.isnan(spearman(np.arange(5.0), worse)).all()


def test_twins_differ_in_norms_of_queries_alone():
    one, other = fast(lambda: twins(tiny_config("llama"), seed=3))()
    assert (one.config.query_key_norm, other.config.query_key_norm) == ("head", None)
    shared = dict(jax.tree_util.tree_leaves_with_path(other))
    extra = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if path in shared:
            np.testing.assert_array_equal(leaf, shared[path])
        else:
            extra += 1
            assert (leaf == 1).all()
    assert extra == 2
    kinds = [tiny_config("olmo2").query_key_norm]
    jax.eval_shape(lambda: [kinds.append(m.config.query_key_norm)
                            for m in twins(tiny_config("olmo2"))] and None)  # fmt: skip
    assert kinds == ["full", "full", None]
    with pytest.raises(ValueError, match="gpt2 has LayerNorms"):
        twins(tiny_config("gpt2"))


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (PROMPTS, dict(suffix=13), "a suffix of 13 tokens is longer than the text of 12"),
        (PROMPTS, dict(suffix=11), "a suffix of 11 of 12 tokens: it needs two, and two before"),
        (PROMPTS, dict(suffix=1), "a suffix of 1 of 12 tokens"),
        (PROMPTS, dict(suffix=4.0), r"suffix must be an int, got 4\.0"),
        (PROMPTS, dict(suffix=4, fractions=(0, 1.5)), "numbers from 0 to 1"),
        (PROMPTS, dict(suffix=4, fractions=()), "numbers from 0 to 1"),
        (PROMPTS, dict(suffix=4, fractions="ab"), "numbers from 0 to 1"),
        (PROMPTS, dict(suffix=4, fractions=(0.5, np.nan)), "numbers from 0 to 1"),
        (PROMPTS, dict(suffix=4, seeds=0), "seeds must be at least 1 and the seed 0, got 0 and 0"),
        (PROMPTS, dict(suffix=4, seed=-1), "got 5 and -1"),
        (PROMPTS, dict(suffix=4, seeds=2.5), r"seeds must be an int, got 2\.5"),
        (PROMPTS, dict(suffix=4, seed=True), "seed must be an int, got True"),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4]], dict(suffix=2), "the same number of tokens"),
        ([[1, 2, 3, 4], [1, 2, 3, 23]], dict(suffix=2), "prompt 1: id 23 is outside"),
    ],
)
def test_what_is_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        prefix_shuffle(tiny_model("llama"), ids, **options)
