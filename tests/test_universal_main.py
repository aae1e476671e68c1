"""`python -m universal`, and the pictures of learnt programs."""

import json

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

import svflow as sv
import universal as ut
from svflow.plotting import style
from universal import __main__ as command
from universal.presets import PAPER, PRESETS
from universal.solved import singular_values_of, solved
from universal.training_plot import accuracy_over_steps, attention_maps, singular_values


@pytest.fixture(autouse=True)
def _compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_a_table_is_trained_and_continued(tmp_path, capsys):
    given = ["--preset", "tiny", "--only", "dyck-1-sparse", "--out", str(tmp_path / "new")]
    assert command.main(given) == 0
    first = capsys.readouterr().out
    names = {path.name for path in (tmp_path / "new").iterdir()}
    always = {"results.json", "accuracy.png", "singular_values.png", "dyck-1-sparse-attention.npz"}
    always |= {".results.json.lock"}
    assert always <= names <= always | {"dyck-1-sparse-attention.attention.png"}
    doc = json.loads((tmp_path / "new" / "results.json").read_text())
    (cell,) = doc["cells"]
    assert cell["command"].startswith("python -m universal --preset tiny --only dyck-1-sparse ")
    assert len(cell["singular_values"]) == cell["width"]
    assert (cell["task"], cell["machine"], cell["paper"]) == ("Dyck-1", "sparse", "100")
    assert (cell["seeds"], cell["steps"], cell["evaluated"]) == ([0, 1], 4, [0, 2, 4])
    shares = [one["right"] / one["asked"] for one in cell["test"]]
    assert np.isclose(cell["mean"], np.mean(shares))
    assert np.isclose(cell["spread"], abs(shares[0] - shares[1]) / 2**0.5)
    assert cell["low"] <= min(shares) <= max(shares) <= cell["high"]
    assert not cell["claim"]
    # Of these short strings many were drawn by the training.
    unseen = cell["unseen"]
    asked = sum(one["asked"] for one in unseen["test"])
    assert asked / sum(one["draws"] for one in unseen["test"]) == unseen["share"] < 0.9
    assert min(one["sequences"] for one in unseen["test"]) >= 16
    assert np.isclose(unseen["mean"], np.mean([o["right"] / o["asked"] for o in unseen["test"]]))
    common = sum(one["commonest"] for one in unseen["test"]) / asked
    assert common == unseen["guess"] >= 0.5
    shown = f"{100 * unseen['low']:.1f}..{100 * unseen['high']:.1f} {{guess {100 * common:.1f}, of "
    assert shown + f"{100 * unseen['share']:.1f}}}" in first
    assert "the same, on draws alone that the training has not drawn:" in first
    assert f"{100 * cell['mean']:.1f}* ± " in first
    assert "no claim" in first
    before = (tmp_path / "new" / "results.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "evaluate", None)
        assert command.main(given) == 0  # nothing is left to do
    assert capsys.readouterr().out == first
    assert (tmp_path / "new" / "results.json").read_bytes() == before
    # Another cell joins the table, in the preset's order.
    assert command.main([*given[:3], "dyck-1-random", *given[4:]]) == 0
    both = json.loads((tmp_path / "new" / "results.json").read_text())["cells"]
    assert [one["machine"] for one in both] == ["sparse", "random"]
    assert both[0] == cell
    assert command.main([*given[:3], "dyck-1-sparse", *given[4:]]) == 0
    again = json.loads((tmp_path / "new" / "results.json").read_text())["cells"]
    assert again == both
    # A cell that the preset has no more, or has with other settings, is no part of its table.
    stale = both[1] | dict(settings=both[1]["settings"] | dict(steps=5))
    gone = both[1] | dict(name="of-old")
    text = json.dumps(dict(preset="tiny", cells=[both[0], stale, gone]))
    (tmp_path / "new" / "results.json").write_text(text)
    assert command.main([*given[:3], "dyck-1-sparse", *given[4:]]) == 0
    assert json.loads((tmp_path / "new" / "results.json").read_text())["cells"] == both[:1]
    results = tmp_path / "new" / "results.json"
    kept = results.read_text()
    results.write_text(kept.replace('"tiny"', '"medium"'))
    assert command.main([*given[:3], "dyck-1-sparse", *given[4:]]) == 2
    assert "is of preset 'medium', not 'tiny'; give another --out" in capsys.readouterr().err
    assert "medium" in results.read_text()
    for change, message in (
        (dict(mean="much"), "is no table of this command: Unknown format code"),
        (dict(singular_values=[]), "is no table of this command: dyck-1-sparse-attention has"),
        (dict(singular_values=["a"]), "is no table of this command: could not convert"),
        (dict(singular_values=[0.0]), "is no table of this command: dyck-1-sparse-attention has"),
        (dict(unseen={}), "is no table of this command: 'share'"),
        (dict(evaluated=[[0, 2, 4]]), "is no table of this command: dyck-1-sparse-attention has"),
        (dict(validation=[0.5]), "is no table of this command: dyck-1-sparse-attention has"),
    ):
        results.write_text(json.dumps(dict(preset="tiny", cells=[both[0] | change])))
        assert command.main([*given[:3], "dyck-1-sparse", *given[4:]]) == 2
        assert message in capsys.readouterr().err
    for name in ("spread", "unseen", "evaluated", "seconds"):
        less = {field: value for field, value in both[0].items() if field != name}
        results.write_text(json.dumps(dict(preset="tiny", cells=[less])))
        assert command.main([*given[:3], "dyck-1-sparse", *given[4:]]) == 2
        assert f"is no table of this command: '{name}'" in capsys.readouterr().err
    results.write_text(kept)
    assert command.main([*given, "--seeds", "3"]) == 2
    assert "dyck-1-sparse-attention: " in (error := capsys.readouterr().err)
    assert "seeds = [0, 1], not [0, 1, 2]" in error


def test_two_runs_share_a_folder(tmp_path, capsys):
    """What another run adds while a cell is trained stays."""
    given = ["--preset", "tiny", "--out", str(tmp_path), "--only"]
    alone = tmp_path / "alone"
    command.main([*given[:3], str(alone), "--only", "dyck-1-random"])
    other = json.loads((alone / "results.json").read_text())
    train = command.train

    def slow(*args, **kwargs):
        found = train(*args, **kwargs)
        (tmp_path / "results.json").write_text(json.dumps(other))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "train", slow)
        assert command.main([*given, "dyck-1-sparse"]) == 0
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["machine"] for cell in cells] == ["sparse", "random"]


def test_a_folder_may_begin_with_a_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command.main(["--preset", "tiny", "--only", "dyck-1-sparse", "--out=~/runs"]) == 0
    assert (tmp_path / "runs" / "results.json").exists()


def test_every_preset_has_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["--preset", "tiny", "--only", "dyck-1-sparse"]) == 0
    assert (tmp_path / "programs" / "tiny" / "results.json").exists()


def test_a_claim_has_no_star():
    cell = dict(task="k-hop", components="attention only", machine="random", paper="30-40")
    cell |= dict(mean=0.351, spread=0.012, low=0.33, high=0.37, claim=True)
    cell |= dict(unseen=dict(share=0.995, mean=0.1))  # so few that this says nothing
    lines = command.table(dict(cells=[cell])).splitlines()
    assert lines[0].split() == ["random"]
    assert lines[2].split("only")[1].strip() == "35.1 ± 1.2, 33.0..37.0 (30-40)"
    assert "no claim" not in lines[-1]
    assert "not drawn" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--preset", "huge"],
            "there is no preset 'huge': there are 'tiny', 'small', 'medium', 'paper'",
        ),
        (["--preset", "tiny", "--only", "xor"], "no cell's name contains 'xor': there are dyck-1-"),
        (["--seeds", "0"], "--seeds must be within 1 .. 1000, got 0"),
        (["--seeds", "5000000000"], "--seeds must be within 1 .. 1000, got 5000000000"),
        (["--out", __file__], "is a file, not a folder"),
    ],
)
def test_bad_input_is_told(given, message, capsys):
    assert command.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "reprogram"])
def test_presets_are_the_papers_table(name):
    preset = PRESETS[name]()
    names = [cell.name for cell in preset.cells]
    assert len(set(names)) == len(names) == 11
    assert set(PAPER) <= {(c.task, c.components, c.machine) for c in preset.cells}
    widths = {}
    for cell in preset.cells:
        recipe = cell.recipe
        assert recipe.kind == cell.machine
        assert recipe.residual == recipe.norm == (cell.components != "attention only")
        assert bool(recipe.hidden) == (cell.components == "+ frozen random MLP")
        widths.setdefault(cell.task, set()).add(recipe.width)
        assert name == "tiny" or cell.settings.test >= 10_000
    assert all(len(of) == 1 for of in widths.values())  # machines of one task are equally wide


def test_blocks_of_a_language_model_are_trained_around():
    preset = PRESETS["reprogram"]()
    assert [cell.name for cell in preset.cells] == [
        f"{task}-{machine}-blocks"
        for task in ("dyck-1", "k-hop")
        for machine in ("trained", "shuffled", "initialised")
    ]
    trained, mixed, untrained = (cell.recipe for cell in preset.cells[:3])
    assert len(mixed) == len(untrained) == preset.seeds == 2
    assert len(PRESETS["reprogram"](3).cells[1].recipe) == 3
    for several in (mixed, untrained):  # every seed has another one
        one, other = (jax.tree.leaves(flow) for flow in several)
        assert any((a != b).any() for a, b in zip(one, other, strict=True))
    initialised = untrained[0]
    assert trained.width == initialised.width == sv.load(sv.data.default_model_path()).config.width
    for one, other in zip(jax.tree.leaves(trained), jax.tree.leaves(initialised), strict=True):
        assert one.shape == other.shape
    assert preset.cells[3].recipe is trained
    for cell, flows in zip(preset.cells[4:], (mixed, untrained)):
        assert all(one is other for one, other in zip(cell.recipe, flows, strict=True))
    # And the column of flows in the table, with no recipe to tell of.
    cell = preset.cells[2]._replace(
        sequences=ut.dyck1_task(2), settings=ut.Settings(steps=2, batch=4, warmup=1, every=1,
                                                      validation=4, test=4)
    )  # fmt: skip
    learnt = ut.train(cell.recipe, cell.sequences, cell.settings, seeds=(0, 1))
    kept = command.entry(cell, learnt)
    assert [one["type"] for one in kept["recipe"]["flows"]] == ["TransformerFlow"] * 2
    assert kept["width"] == trained.width
    with pytest.raises(ValueError, match="a TransformerFlow has no attention matrices that are"):
        solved(learnt, cell.sequences)
    assert len(singular_values_of(learnt)) == min(4 + cell.sequences.tokens, trained.width)


@pytest.mark.parametrize("parts", [{}, dict(residual=True, norm=True)])
def test_a_solved_sequence_is_solved(parts):
    # No hops: the answer is the letter itself.
    task = ut.k_hop_task(6, 3, (0, 0))
    settings = ut.Settings(
        steps=60, batch=32, learning_rate=3e-2, warmup=5, every=60, validation=32, test=64
    )
    learnt = ut.train(ut.Recipe("sparse", 2, 1, 4, 4, **parts), task, settings, seeds=(3, 4))
    assert max(one.value for one in learnt.test) > 0.5
    found = solved(learnt, task, tokens=5)
    assert found.symbols[0] == "0"
    assert set(found.symbols[1:]) <= set("abc")
    assert found.labels.tolist() == [-1, *found.ids[1:].tolist()]
    embedding, flow = learnt.program(learnt.best)
    whole = ut.logits(embedding, flow, jax.numpy.asarray(found.ids)).argmax(axis=-1)
    assert whole[1:].tolist() == found.labels[1:].tolist()
    x = embedding.tokens[found.ids] + embedding.positions[:5]
    if parts:
        y = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        wanted = [flow.attention.attention(0, y)]
    else:
        wanted = ut.attention_matrices(flow.attention, x)
    np.testing.assert_allclose(found.attention[: len(wanted)], wanted, atol=1e-12)
    assert learnt.test[learnt.best].value == max(one.value for one in learnt.test)
    for place in (-1, 2, 0.0):
        with pytest.raises(ValueError, match=r"place must be one of 0 \.\. 1, got"):
            learnt.program(place)
    for draws, tokens in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match=r"(draws|tokens) must be a positive integer"):
            solved(learnt, task, draws=draws, tokens=tokens)
    once = ut.Settings(steps=1, batch=4, warmup=0, every=1, validation=4, test=4)
    both = ut.train(ut.Recipe("sparse", 2, 1, 4, 4, causal=False), task, once)
    with pytest.raises(ValueError, match="sees both sides"):
        solved(both, task)


def test_pictures_show_their_arrays():
    steps, values = np.arange(0, 50, 10), np.linspace(0.5, 0.9, 10).reshape(5, 2)
    with matplotlib.rc_context(style("dark")):
        axes = Figure().add_subplot()
        accuracy_over_steps(axes, {"sparse": (steps, values)}, theme="dark", title="Dyck-1")
        line = next(line for line in axes.lines if line.get_label() == "sparse")
        np.testing.assert_allclose(line.get_ydata(), 100 * values.mean(axis=1))
        assert np.array_equal(line.get_xdata(), steps)
        few = Figure().add_subplot()
        accuracy_over_steps(few, {"a": (steps[:2] // 10, values[:2])}, theme="dark", title="")
        for one in (axes, few):  # there is no half of a step
            assert (one.get_xticks() % 1 == 0).all()
        assert [text.get_text() for text in axes.get_legend().texts] == ["sparse"]
        axes = Figure().add_subplot()
        singular_values(axes, {"random": np.asarray([4.0, 2.0, 1.0])}, theme="dark")
        np.testing.assert_allclose(axes.lines[0].get_ydata(), [1, 0.5, 0.25])
        many = {str(k): (steps, values) for k in range(5)}
        with pytest.raises(ValueError, match="5 machines: a picture has 4 colours"):
            accuracy_over_steps(axes, many, theme="dark", title="")
        with pytest.raises(ValueError, match="5 machines: a picture has 4 colours"):
            singular_values(axes, dict.fromkeys(many, np.ones(2)), theme="dark")
        figure = Figure()
        maps = np.random.default_rng(0).uniform(size=(2, 3, 4, 4))
        attention_maps(figure, maps, list("(()?"), theme="dark", title="Attention")
        images = [axes.images[0].get_array() for axes in figure.axes]
        np.testing.assert_allclose(images, maps.reshape(6, 4, 4))
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list("(()?")
