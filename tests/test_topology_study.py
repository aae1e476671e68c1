"""The study of a model beside direct calls, a file that continues, table, panel and pictures."""

import importlib
import json

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from configs import FAMILY_CONFIGS, tiny_model
from filelock import FileLock

import svflow as sv
from svflow import topology
from svflow.plotting import style
from svflow.spectra import controls
from svflow.topology.topology_plot import topology_picture, training_film

module = importlib.import_module("svflow.topology.study")  # the name is the function too
SEQUENCES = [np.random.default_rng(n).integers(0, 23, 12).tolist() for n in range(3)]
OPTIONS = topology.Options(k=3, seed=5, resolution=1.5, runs=2, permutations=49)


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("topology") / "whole.npz"
    return path, topology.study(model, SEQUENCES, path, options=OPTIONS)


def assert_equal(found, expected, **close):
    """Of named tuples, strings and arrays, all the way down."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_equal(one, other, **close)
    elif isinstance(expected, dict):
        assert_equal(tuple(found.values()), tuple(expected.values()), **close)
        assert found.keys() == expected.keys()
    elif isinstance(expected, str) or np.asarray(expected).dtype.kind in "US":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_it_holds_what_the_direct_calls_give(model, whole):
    path, study = whole
    with jax.default_matmul_precision("highest"):
        xs = [sv.simulate(model.flow, model.embed(np.array(ids))).xs for ids in SEQUENCES]
    J = np.stack([sv.layer_jacobians(model.flow, x) for x in xs])
    for number in range(3):
        found = sv.measures(J[number])
        for name, values in study.ginibre.items():
            np.testing.assert_allclose(study.samples[name][number], getattr(found, name))
            np.testing.assert_allclose(values[number], found.ginibre[name])
        rank = sv.cumulative(J[number]).effective_rank
        np.testing.assert_allclose(study.samples["cumulative_effective_rank"][number], rank)
    squares = np.mean([topology.squared_gains(one) for one in J], axis=0)
    np.testing.assert_allclose(study.gain**2, squares, rtol=1e-12)
    assert study.states == 33
    layers = model.flow.layers
    weights = np.stack(
        [np.asarray(norm.weight) for norm in (layers.attention_norm, layers.hidden_norm)], axis=1
    )
    np.testing.assert_array_equal(topology.norm_weights(model), weights)
    graphs, labels = [], []
    for layer, one in enumerate(study.topology.communities):
        states = [np.asarray(x[layer, 1:]) for x in xs]
        graphs.append(topology.graph(states, 3))
        assert_equal(study.topology.graphs[layer], graphs[-1])
        found = topology.communities(graphs[-1], 5, resolution=1.5, runs=2)
        assert_equal(one, found)
        labels.append(found.labels)
        roles = topology.participation(graphs[-1], found.labels)
        for sign in range(2):
            np.testing.assert_allclose(study.topology.participation[sign][layer], roles[sign])
        for name, values in study.topology.null_modularity.items():
            null = getattr(topology, name)(graphs[-1], 5)
            single = topology.communities(null, 5, resolution=1.5, runs=1)
            np.testing.assert_allclose(values[layer], single.modularity)
        np.testing.assert_allclose(
            topology.load_correlation(path, layer).matrix,
            topology.correlation(states).matrix,
            rtol=0,
            atol=1e-12,
        )
    np.testing.assert_array_equal(study.topology.labels, labels)
    with pytest.raises(ValueError, match=r"layer must be one of 0 \.\. 2, got 3"):
        topology.load_correlation(path, 3)
    with pytest.raises(ValueError, match=r"layer must be one of 0 \.\. 2, got 0\.5"):
        topology.load_correlation(path, 0.5)
    # The root mean square over sequences is the gain of their Jacobians one below the other.
    last = [np.linalg.norm(J[:, 2][..., labels[2] == c]) for c in range(labels[2].max() + 1)]
    sizes = np.bincount(labels[2])
    expected = np.array(last) / np.sqrt(3 * sizes)
    np.testing.assert_allclose(study.topology.coupling.gain[2][0], expected, rtol=1e-12)


def test_a_killed_run_is_continued_and_computes_nothing_twice(model, whole, tmp_path, monkeypatch):
    path = tmp_path / "some" / "study.npz"
    computed = []

    def measure(model, ids, settings, real=module.measured):
        if len(computed) == 2 and "killed" not in computed:
            computed.append("killed")
            raise KeyboardInterrupt
        computed.append(ids.tolist())
        return real(model, ids, settings)

    monkeypatch.setattr(module, "measured", measure)
    with pytest.raises(KeyboardInterrupt):
        topology.study(model, SEQUENCES, path, options=OPTIONS)
    assert len(topology.load_study(path, options=OPTIONS).samples["spectral_radius"]) == 2
    shown = []

    def watch(items):
        shown.append(list(items))
        return shown[-1]

    found = topology.study(model, SEQUENCES, path, options=OPTIONS, progress=watch)
    assert computed == [*SEQUENCES[:2], "killed", SEQUENCES[2]]
    assert shown == [[2], [0, 1, 2]]
    assert_equal(found.samples, whole[1].samples)
    assert_equal(found.topology, whole[1].topology)
    assert_equal(topology.study(model, SEQUENCES, path, options=OPTIONS).gain, found.gain)
    assert len(computed) == 4
    assert [file.name for file in path.parent.iterdir()] == ["study.npz"]


def test_other_options_need_no_jacobians(whole, monkeypatch):
    monkeypatch.setattr(module, "measured", None)
    path, study = whole
    other = topology.load_study(path, options=OPTIONS._replace(k=5))
    assert other.options.k == 5
    assert len(other.topology.graphs[0].edges) > len(study.topology.graphs[0].edges)
    np.testing.assert_array_equal(other.gain, study.gain)


def test_options_take_numpy_integers():
    topology.Options(k=np.int64(3), seed=np.int64(1), runs=np.int64(2)).check(16)
    with pytest.raises(ValueError, match=r"k must be one of 1 \.\. 15"):
        topology.Options(k=np.int64(16)).check(16)


def test_the_first_token_is_left_out_or_not(model, tmp_path):
    every = topology.study(model, SEQUENCES, tmp_path / "all.npz", options=OPTIONS, skip=0)
    assert every.states == 36
    with jax.default_matmul_precision("highest"):
        xs = [sv.simulate(model.flow, model.embed(np.array(ids))).xs for ids in SEQUENCES]
    expected = topology.graph([np.asarray(x[1]) for x in xs], 3)
    assert_equal(every.topology.graphs[1], expected)


def test_another_model_setting_or_text_is_refused(model, whole):
    path, _ = whole
    with pytest.raises(ValueError, match="made with another model"):
        topology.study(tiny_model("gpt2", "float64", 1), SEQUENCES, path, options=OPTIONS)
    with pytest.raises(ValueError, match="made with skip = 1, not 2"):
        topology.study(model, SEQUENCES, path, skip=2, options=OPTIONS)
    for other in (SEQUENCES[:2], [*SEQUENCES[:2], [1, 2]]):
        with pytest.raises(ValueError, match="made from other sequences, or more"):
            topology.study(model, other, path, options=OPTIONS)


def test_bad_input_is_named_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measured", None)
    path = tmp_path / "study.npz"
    for change, message in (
        (dict(sequences=[]), "at least one sequence"),
        (dict(sequences=[[1, 2], [1, 99]]), "sequence 1: id 99 is outside the vocabulary"),
        (dict(sequences=[[1, 2], [0.5]]), "sequence 1 is not a sequence of token ids"),
        (dict(sequences=[[1, 2], [3]]), "sequence 1 has 1 tokens, and none after the first 1"),
        (dict(sequences=[[1, 2]]), "at least two states, got 1"),
        (dict(token=12), "sequence 0 has 12 tokens, and no token 12"),
        (dict(token=0.5), "token must be an int, got 0.5"),
        (dict(skip=True), "skip must be an int, got True"),
        (dict(skip=-1), "skip must not be negative, got -1"),
        (dict(scope="full"), "scope must be one of"),
        (dict(tau=np.nan), "tau must be finite"),
        (dict(top=99), r"top must be one of 1 \.\. 16"),
        (dict(model=model.flow), "a study needs a Transformer"),
        (dict(out=tmp_path), "is a folder, not a file"),
        (dict(options=OPTIONS._replace(k=16)), r"k must be one of 1 \.\. 15 at width 16, got 16"),
        (dict(options=OPTIONS._replace(runs=0)), "runs must be a positive integer"),
        (dict(options=OPTIONS._replace(alpha=0)), "alpha must lie between 0 and 1"),
    ):
        given = dict(model=model, sequences=SEQUENCES, out=path, options=OPTIONS) | change
        with pytest.raises(ValueError, match=message):
            topology.study(**given)
    with FileLock(tmp_path / ".study.npz.lock"), pytest.raises(ValueError, match="another run"):
        topology.study(model, SEQUENCES, path, options=OPTIONS)
    assert not path.exists()
    np.savez(tmp_path / "array.npz", x=np.ones(3))
    with pytest.raises(ValueError, match="holds no study"):
        topology.load_study(tmp_path / "array.npz")
    with pytest.raises(FileNotFoundError):
        topology.load_study(tmp_path / "none.npz")
    head = json.dumps(dict(settings={}, sequences=["a"], carried=[]))
    np.savez(tmp_path / "other.npz", study=np.asarray(head), x=np.ones((1, 3)))
    with pytest.raises(ValueError, match="a study, but none of topology"):
        topology.load_study(tmp_path / "other.npz")


def test_what_is_not_finite_names_sequence_and_layer(model, tmp_path):
    broken = jax.tree.map(lambda leaf: leaf, model)
    weight = broken.flow.layers.feed_forward.down.kernel
    weight[...] = weight[...].at[1, 0, 0].set(np.nan)
    with pytest.raises(ValueError, match="sequence 0: the state before layer 2 is not finite"):
        topology.study(broken, SEQUENCES, tmp_path / "study.npz", options=OPTIONS)


@pytest.mark.parametrize("family", sorted(FAMILY_CONFIGS))
def test_norm_weights_of_every_family(family):
    model = tiny_model(family)
    norms = topology.norm_weights(model)
    config = model.config
    assert norms.shape[0::2] == (config.depth, config.width)
    count = {"olmo": 0, "gemma2": 4, "gemma3_text": 4}.get(family, 2)
    assert norms.shape[1] == count
    if count:  # the tiny models' are 1 with noise of 0.1, stored so or less one
        assert abs(np.mean(norms) - 1) < 0.1


def test_table(model, whole, tmp_path):
    _, study = whole
    untrained = topology.study(
        controls.initialisation(jax.random.key(0), model),
        SEQUENCES,
        tmp_path / "untrained.npz",
        options=OPTIONS,
    )
    text = topology.table(study, untrained)
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100
    assert lines[0] == "gpt2, trained: 3 layers, width 16, 3 sequences"
    assert "correlations of 33 states; 3 edges per node, resolution 1.5, 2 runs" in text
    assert "gpt2, untrained: 3 layers" in text
    alone = topology.table(study)
    assert alone.split("\n")[0] == "gpt2: 3 layers, width 16, 3 sequences"
    first = next(line for line in lines if line.startswith("  1 |"))
    number = study.topology.communities[0].number
    assert first.split("|")[2].split()[0] == str(number)
    coupling = study.topology.coupling
    row = [line for line in lines if line.startswith("  2 |")][1].split("|")
    for part, tested in zip(row[1:], (coupling.raw, coupling.partial)):
        values = [float(cell) for cell in part.split()[::2]]
        np.testing.assert_allclose(values, tested.rho[0, :, 1], atol=0.0051)
    few = study._replace(states=16)
    assert "no more than nodes: correlations are noisy" in topology.table(few)
    with pytest.raises(ValueError, match="different settings or options"):
        topology.table(study, untrained._replace(options=OPTIONS._replace(k=4)))


def test_verdicts_in_the_table(whole):
    """+ and - where there is one, ? where there are too few communities."""
    _, study = whole
    coupling = study.topology.coupling
    verdict, least = coupling.raw.verdict.copy(), np.zeros_like(coupling.raw.least)
    verdict[:] = "none"
    verdict[0, 0] = ["positive", "negative", "none"]
    least[0, 0, 2] = 0.3
    raw = coupling.raw._replace(verdict=verdict, least=least)
    topology_ = study.topology._replace(coupling=coupling._replace(raw=raw))
    lines = topology.table(study._replace(topology=topology_)).split("\n")
    for layer, mark in enumerate("+-?"):
        row = [line for line in lines if line.startswith(f"  {layer + 1} |")][1]
        assert row.split("|")[1][10:11] == mark, row
    assert "raw, layers by gain: 1+ 1-, 0+ 0-, 0+ 0-, 0+ 0-" in lines


def test_panel():
    model = tiny_model("bert")
    ids, seen = np.array(SEQUENCES[0]), []

    def watch(steps):
        for step in steps:
            seen.append(step)
            yield step

    found = topology.panel(model, ids, options=OPTIONS, progress=watch)
    depth = model.flow.depth
    assert seen == list(range(2 * depth))
    assert (found.token, found.states, found.shown) == (11, 11, (0, 1, 2))
    for name, one in (
        ("model", model),
        ("untrained", controls.initialisation(jax.random.key(5), model)),
    ):
        with jax.default_matmul_precision("highest"):
            xs = sv.simulate(one.flow, one.embed(ids)).xs
        got = getattr(found, name)
        graphs = [topology.graph(np.asarray(x[1:]), 3) for x in xs[:-1]]
        assert_equal(got.graphs, tuple(graphs))
        direct = topology.coupling(
            sv.layer_jacobians(one.flow, xs), graphs, got.labels,
            norm_weights=topology.norm_weights(one), permutations=49, seed=5,
        )  # fmt: skip
        assert_equal(got.coupling, direct)
        if name == "model":
            matrix = topology.correlation(np.asarray(xs[1, 1:])).matrix
            np.testing.assert_allclose(found.matrices[1], matrix, atol=1e-9)
    assert found.noise.shape == (depth,)
    assert (found.noise > 0).all()
    third = topology.panel(model, ids, token=2, skip=0, shown=[2], options=OPTIONS)
    assert (third.token, third.states, third.shown, third.matrices.shape) == (
        2,
        12,
        (2,),
        (1, 16, 16),
    )


def test_what_a_panel_refuses(model):
    for change, message in (
        (dict(model=model.flow), "a panel needs a Transformer"),
        (dict(ids=[1, 2]), "at least two states, got 2 tokens less the first 1"),
        (dict(ids=[1, 2, 3, 99]), "id 99 is outside the vocabulary"),
        (dict(shown=[3]), r"shown must be layers of 0 \.\. 2, got \[3\]"),
        (dict(shown=[]), "shown must be layers"),
        (dict(shown=[0.5]), "shown must be layers"),
        (dict(shown=1), "shown must be layers"),
        (dict(skip=-1), "skip must not be negative"),
        (dict(skip=0.5), "skip must be an int, got 0.5"),
        (dict(options=OPTIONS._replace(k=0)), r"k must be one of 1 \.\. 15"),
    ):
        given = dict(model=model, ids=[1, 2, 3, 4], options=OPTIONS) | change
        with pytest.raises(ValueError, match=message):
            topology.panel(**given)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures(whole, theme):
    """They show the numbers: framed communities, a disc for each, a filled marker for a verdict."""
    _, study = whole
    found = study.topology.coupling
    shown = (0, 2)
    verdicts = np.array([["positive", "none", "none"], ["none", "negative", "none"]])
    labels = study.topology.labels[list(shown)]
    labels[0, -2:] = -1
    with plt.rc_context(style(theme)):
        axes = topology_picture(
            figure := plt.figure(),
            np.stack([np.eye(16)] * 2),
            labels,
            shown,
            participation=[found.participation[layer][0] for layer in shown],
            gain=[found.gain[layer][0] for layer in shown],
            sizes=[found.sizes[layer] for layer in shown],
            rho=found.raw.rho[0, :2],
            verdicts=verdicts,
            names=["columns", "rows"],
            untrained=found.raw.rho[0, 0],
            theme=theme,
            title="Topology",
            label="gain",
        )
        figure.canvas.draw()
    matrices, discs, depth = axes[::2][:2], axes[1::2][:2], axes[-1]
    for place, (matrix, disc) in enumerate(zip(matrices, discs)):
        np.testing.assert_array_equal(matrix.images[0].get_array(), np.eye(16))
        own = labels[place]
        assert len(matrix.lines) == len(np.unique(own[own >= 0]))
        offsets = disc.collections[0].get_offsets()
        np.testing.assert_allclose(offsets[:, 1], found.gain[shown[place]][0])
        np.testing.assert_allclose(offsets[:, 0], found.participation[shown[place]][0])
    filled = [
        line.get_xdata()
        for line in depth.lines
        if line.get_linestyle() == "None" and len(line.get_xdata())
        and line.get_markerfacecolor() == line.get_markeredgecolor()
    ]  # fmt: skip
    assert [list(x) for x in filled] == [[1], [2]]
    plt.close(figure)


def test_a_training_is_shown_by_checkpoint_and_by_step():
    steps, random = [0, 10, 1000], np.random.default_rng(0)
    profile, course, band = (random.normal(size=shape) for shape in ((3, 5), 3, (3, 3)))
    band.sort(axis=1)
    with plt.rc_context(style("dark")):
        axes = training_film(
            figure := plt.figure(),
            steps,
            {"rank": profile},
            {"over steps": {"one": course, "another": band[:, [1, 0, 2]]}},
            theme="dark",
            title="Training",
        )
        figure.canvas.draw()
    above, below = axes
    lines = [line.get_ydata() for line in above.lines if len(line.get_ydata()) == 5]
    np.testing.assert_array_equal(lines, profile)
    drawn = {line.get_label(): line for line in below.lines}
    np.testing.assert_array_equal(drawn["one"].get_ydata(), course)
    np.testing.assert_array_equal(drawn["one"].get_xdata(), steps)
    np.testing.assert_array_equal(drawn["another"].get_ydata(), band[:, 1])
    vertices = below.collections[0].get_paths()[0].vertices
    assert {y for _, y in vertices} == set(band[:, [0, 2]].ravel())
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["0", "10", "1000"]
    names = [text.get_text() for text in figure.legends[0].texts]
    assert names == ["0 steps", "10 steps", "1000 steps"]
    plt.close(figure)
