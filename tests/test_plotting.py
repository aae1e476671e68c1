"""Every picture is drawn on the axes or the figure that it is given, and is lines and letters."""

import xml.etree.ElementTree as ET

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from svflow import plotting
from svflow.topology import topology_plot
from universal import training_plot

SVG = "{http://www.w3.org/2000/svg}"


def over_depth(axes, theme):
    line = np.array([0.5, np.nan, 0.25, 0.75])
    series = plotting.Series("of this", 0, line, line - 0.1, line + 0.1, noise=line / 2)
    return plotting.over_depth(
        axes, np.arange(4), [series], theme=theme, title="Title", label="label (unit)"
    )


def spectra(figure, theme):
    values = np.exp(1j * np.arange(6))
    one = plotting.Spectrum(values, values / 2, (-1.5, 1.5, 1.5), True)
    return plotting.spectra(figure, [one, one], theme=theme, title="Title", behind="noise")


def pairs(figure, theme):
    lines = np.array([[1.0, 2], [2, 3], [3, 4]])
    parts = [plotting.Pair("one", "code", "note", lines, lines / 2)] * 2
    return plotting.pairs(
        figure, parts, theme=theme, title="Title", label="label", before="before", after="after",
        limits=(0.1, 10),
    )  # fmt: skip


def participation_gain(axes, theme):
    part = np.array([0.1, 0.5, 0.6])
    return topology_plot.participation_gain(
        axes, part, 2 * part, np.array([4, 5, 6]), theme=theme, title="Title"
    )


def coupling_over_depth(axes, theme):
    rho = np.array([[0.1, 0.4, -0.2]])
    verdicts = np.array([["none", "positive", "negative"]])
    return topology_plot.coupling_over_depth(
        axes, rho, verdicts, ["columns"], theme=theme, title="Title"
    )


def accuracy_over_steps(axes, theme):
    curve = np.array([0, 100, 200]), np.array([[0.5, 0.6], [0.7, 0.8], [0.9, 1.0]])
    return training_plot.accuracy_over_steps(axes, {"sparse": curve}, theme=theme, title="Title")


def singular_values(axes, theme):
    return training_plot.singular_values(axes, {"sparse": np.array([2.0, 1, 0.5])}, theme=theme)


ON_AXES = (
    over_depth, participation_gain, coupling_over_depth, accuracy_over_steps, singular_values,
)  # fmt: skip
ON_FIGURES = (spectra, pairs)


@pytest.mark.parametrize("theme", sorted(plotting.THEMES))
@pytest.mark.parametrize("draw", [*ON_AXES, *ON_FIGURES], ids=lambda draw: draw.__name__)
def test_pictures_are_vectors_where_they_are_put(draw, theme, tmp_path):
    with plt.rc_context(plotting.style(theme)):
        figure = Figure(figsize=(6, 4))
        if draw in ON_AXES:
            axes = figure.add_subplot()
            assert draw(axes, theme) is axes
            assert figure.axes == [axes]
        else:
            found = draw(figure, theme)
            assert found == figure.axes
            assert all(isinstance(one, Axes) for one in found)
        for kind in ("svg", "pdf"):
            figure.savefig(tmp_path / f"picture.{kind}")
    assert not plt.get_fignums()  # nothing of pyplot's own
    root = ET.parse(tmp_path / "picture.svg").getroot()
    assert len(root.findall(f".//{SVG}path")) > 5
    assert not root.findall(f".//{SVG}image")
    assert (tmp_path / "picture.pdf").read_bytes().startswith(b"%PDF")
    assert b"/Subtype /Image" not in (tmp_path / "picture.pdf").read_bytes()
