"""`python -m universal`, and the pictures of learnt programs."""

import json

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from svflow.plotting import style
from universal import __main__ as command
from universal.presets import PAPER, PRESETS
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
    assert names == {"results.json", "accuracy.png", "dyck-1-sparse-attention.npz"}
    doc = json.loads((tmp_path / "new" / "results.json").read_text())
    assert doc["command"].startswith("python -m universal --preset tiny --only dyck-1-sparse ")
    (cell,) = doc["cells"]
    assert (cell["task"], cell["machine"], cell["paper"]) == ("Dyck-1", "sparse", "100")
    assert (cell["seeds"], cell["steps"], cell["evaluated"]) == ([0, 1], 4, [0, 2, 4])
    shares = [one["right"] / one["asked"] for one in cell["test"]]
    assert np.isclose(cell["mean"], np.mean(shares))
    assert np.isclose(cell["spread"], abs(shares[0] - shares[1]) / 2**0.5)
    assert cell["low"] <= min(shares) <= max(shares) <= cell["high"]
    assert not cell["claim"]
    assert f"{100 * cell['mean']:.1f}* ± " in first
    assert "no claim" in first
    before = (tmp_path / "new" / "results.json").read_bytes()
    assert command.main(given) == 0  # nothing is left to do
    assert capsys.readouterr().out == first
    assert (tmp_path / "new" / "results.json").read_bytes() == before
    assert command.main([*given, "--seeds", "3"]) == 2
    assert "dyck-1-sparse-attention: " in (error := capsys.readouterr().err)
    assert "seeds = [0, 1], not [0, 1, 2]" in error


def test_a_claim_has_no_star():
    cell = dict(task="k-hop", components="attention only", machine="random", paper="30-40")
    cell |= dict(mean=0.351, spread=0.012, low=0.33, high=0.37, claim=True)
    lines = command.table(dict(cells=[cell])).splitlines()
    assert lines[0].split() == ["sparse", "random", "full"]
    assert lines[2].split("only")[1].strip() == "35.1 ± 1.2, 33.0..37.0 (30-40)"
    assert "no claim" not in lines[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--preset", "huge"], "there is no preset 'huge': there are 'tiny', 'small', 'paper'"),
        (["--preset", "tiny", "--only", "xor"], "no cell's name contains 'xor': there are dyck-1-"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--out", __file__], "is a file, not a folder"),
    ],
)
def test_bad_input_is_told(given, message, capsys):
    assert command.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers_table(name):
    preset = PRESETS[name]()
    names = [cell.name for cell in preset.cells]
    assert len(set(names)) == len(names) == 11
    assert set(PAPER) <= {(c.task, c.components, c.machine) for c in preset.cells}
    widths = {}
    for cell in preset.cells:
        assert cell.recipe.kind == cell.machine
        assert cell.recipe.residual == cell.recipe.norm == (cell.components != "attention only")
        assert bool(cell.recipe.hidden) == (cell.components == "+ frozen random MLP")
        widths.setdefault(cell.task, set()).add(cell.recipe.width)
        assert name == "tiny" or cell.settings.test >= 10_000
    assert all(len(of) == 1 for of in widths.values())  # machines of one task are equally wide


def test_pictures_show_their_arrays():
    steps, values = np.arange(0, 50, 10), np.linspace(0.5, 0.9, 10).reshape(5, 2)
    with matplotlib.rc_context(style("dark")):
        axes = Figure().add_subplot()
        accuracy_over_steps(
            axes, {"sparse": (steps, values)}, theme="dark", title="Dyck-1", chance=0.5
        )
        line = next(line for line in axes.lines if line.get_label() == "sparse")
        np.testing.assert_allclose(line.get_ydata(), 100 * values.mean(axis=1))
        assert np.array_equal(line.get_xdata(), steps)
        assert {text.get_text() for text in axes.get_legend().texts} == {"sparse", "guess"}
        axes = Figure().add_subplot()
        singular_values(axes, {"random": np.asarray([4.0, 2.0, 1.0])}, theme="dark")
        np.testing.assert_allclose(axes.lines[0].get_ydata(), [1, 0.5, 0.25])
        figure = Figure()
        maps = np.random.default_rng(0).uniform(size=(2, 3, 4, 4))
        attention_maps(figure, maps, list("(()?"), theme="dark", title="Attention")
        images = [axes.images[0].get_array() for axes in figure.axes]
        np.testing.assert_allclose(images, maps.reshape(6, 4, 4))
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list("(()?")
