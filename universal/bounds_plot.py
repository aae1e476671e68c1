"""Bounds and robustness: results in, matplotlib axes out; computes nothing but medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from svflow.plotting import COLOURS, MARKERS, PLAIN, THEMES, WIDE
from universal.bounds import PathRank, Phase
from universal.robustness import Quantised, Robustness

DASHED: Any = (0, (3, 1.5))
DOTTED: Any = (0, (1, 1))
NAMES = {
    "bfloat16": "bfloat16",
    "int8 per column": "int8\nper column",
    "int8 per row": "int8\nper row",
}


def path_picture(
    figure: Figure,
    found: Sequence[PathRank],
    *,
    theme: str,
    title: str = "Singular values of the path functions",
) -> Axes:
    """Those of all targets together and of the median target alone.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        found: of at most four numbers of heads and four depths.
        theme: "light" or "dark".
        title: of the picture.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    figure.set_size_inches(5.2, 3.7)
    figure.subplots_adjust(top=0.74)
    axes = figure.add_subplot()
    heads, depths = (sorted({getattr(one, n) for one in found}) for n in ("heads", "layers"))
    for one in found:
        colour, marker = colours[heads.index(one.heads)], MARKERS[depths.index(one.layers)]
        place = np.arange(1, 1 + len(one.functions))
        alone = np.median(one.each, axis=0)
        label = f"L = {one.layers}, H = {one.heads}"
        axes.plot(place, one.functions, color=colour, marker=marker, mew=0, label=label)
        axes.plot(place, alone, color=colour, marker=marker, mew=0, ms=2.2, lw=0.9, ls=DASHED)
    axes.plot([], [], color=tone["pale"], lw=0.9, ls=DASHED, label="one target, median")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_title(title, pad=38)
    axes.set_xlabel("place, up to $H^L$")
    axes.set_ylabel("singular value / largest")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _grid(axes)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.6, handlelength=1.8,
        columnspacing=1.2, handletextpad=0.5, borderpad=0,
    )  # fmt: skip
    return axes


def phase_picture(
    figure: Figure,
    found: Sequence[Phase],
    *,
    theme: str,
    title: str = "From which width on random machines have programs",
) -> list[Axes]:
    """Error, residual and condition over the width, medians and ranges of seeds.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        found: at most four shapes.
        theme: "light" or "dark".
        title: of the picture.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    panels = _panels(figure, 3)
    parts = ("error", "residual", "condition")
    names = ("error of the output", "residual of the equations", "condition number")
    handles = []
    for axes, part, name in zip(panels, parts, names):
        for hue, one in enumerate(found):
            values = getattr(one, part)
            share = one.widths / one.least
            chosen = np.isfinite(values).all(axis=1)
            _band(axes, share[chosen], values[chosen], colours[hue], MARKERS[hue])
            if axes is panels[0]:
                layers, heads, _, head, _ = one.sizes
                label = f"L = {layers}, H = {heads}, $d_k$ = {head}: N = {one.least}"
                handles.append(_handle(colours[hue], MARKERS[hue], label))
        axes.axvline(1, color=tone["pale"], lw=0.9, ls=DOTTED, zorder=1)
        axes.set_title(name, pad=8, size=10)
        axes.set_xlabel("m / N")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_xlim(panels[0].get_xlim())
        _grid(axes)
    place = panels[2].get_xaxis_transform()
    panels[2].text(0.95, 0.5, "infinite below N", transform=place, ha="right", size=8.5,
                   color=tone["pale"])  # fmt: skip
    handles.append(Line2D([], [], color=tone["pale"], lw=0.9, ls=DOTTED, label="m = N"))
    _head(figure, title, handles, "median and range of seeds", theme)
    return panels


def conditioning_picture(
    figure: Figure,
    depths: Sequence[int],
    slacks: Sequence[float],
    condition: np.ndarray,
    error: np.ndarray,
    single: np.ndarray,
    target_single: np.ndarray,
    *,
    theme: str,
    title: str = "Random machines over depth",
) -> list[Axes]:
    """Condition numbers and errors over depth for several slacks, medians and ranges of seeds.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        depths, slacks: what is measured, at most four slacks.
        condition, error, single: (slacks, depths, seeds) as in `Phase`.
        target_single: (depths, seeds).
        theme: "light" or "dark".
        title: of the picture.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    panels = _panels(figure, 3)
    names = ("condition number", "error in float64", "error in float32, same program")
    for axes, values, name in zip(panels, (condition, error, single), names):
        for hue, several in enumerate(values):
            _band(axes, np.asarray(depths), several, colours[hue], MARKERS[hue])
        axes.set_title(name, pad=8, size=10)
        axes.set_xlabel("layers")
        axes.set_xticks(depths)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)
        _grid(axes)
    middle = np.median(target_single, axis=1)
    panels[2].plot(depths, middle, color=tone["pale"], lw=1.2, ls=DOTTED)
    handles = [
        _handle(colours[hue], MARKERS[hue], "m = N" if slack == 1 else f"m = {slack:g} N")
        for hue, slack in enumerate(slacks)
    ]
    handles.append(
        Line2D([], [], color=tone["pale"], lw=1.2, ls=DOTTED, label="the target itself in float32")
    )
    _head(figure, title, handles, "median and range of seeds", theme)
    return panels


def robustness_picture(
    figure: Figure,
    found: Mapping[str, Robustness],
    rounded: Mapping[str, Sequence[Quantised]],
    *,
    theme: str,
    title: str = "Programs and machines that are a little off",
) -> list[Axes]:
    """Error over the size of perturbations of E and of the machine, and of E in narrow formats.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        found: at most four simulations of one target, by name.
        rounded: the same names.
        theme: "light" or "dark".
        title: of the picture.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    panels = _panels(figure, 3)
    handles = []
    for axes, part, name in zip(panels, ("program", "machine"), ("E", "machine")):
        for hue, (label, one) in enumerate(found.items()):
            two = getattr(one, part)
            _band(axes, two.epsilon, two.error, colours[hue], MARKERS[hue])
            if axes is panels[0]:
                handles.append(_handle(colours[hue], MARKERS[hue], label))
        of = next(iter(found.values())).target
        middle = np.median(of.error, axis=1)
        axes.plot(of.epsilon, middle, color=tone["pale"], lw=1.2, ls=DOTTED)
        axes.set_title(f"error of the output, {name} perturbed", pad=8, size=10)
        axes.set_xlabel(r"$\epsilon$, relative to each matrix")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN)
    last = panels[2]
    for hue, several in enumerate(rounded.values()):
        narrow = [one for one in several if one.form in NAMES]
        place = np.arange(len(narrow)) + 0.2 * (hue - (len(rounded) - 1) / 2)
        style: dict[str, Any] = dict(ls="", marker=MARKERS[hue], color=colours[hue], ms=4.5)
        last.plot(place - 0.04, [one.matching.output for one in narrow], **style, mew=0)
        most = [one.matching.attention.max() for one in narrow]
        last.plot(place + 0.04, most, **style, mfc=tone["paper"], mew=1)
    last.set_xticks(range(len(NAMES)), list(NAMES.values()))
    last.set_xlim(-0.5, len(NAMES) - 0.5)
    last.set_title("the same, E rounded", pad=8, size=10)
    for axes in panels:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)
        _grid(axes)
    handles += [
        Line2D([], [], color=tone["pale"], lw=1.2, ls=DOTTED, label="the target perturbed"),
        Line2D([], [], ls="", marker="o", ms=4.5, color=tone["pale"], mfc=tone["paper"],
               label="change of attention weights"),
    ]  # fmt: skip
    _head(figure, title, handles, "median and range of draws", theme)
    return panels


def _panels(figure: Figure, count: int) -> list[Axes]:
    figure.set_size_inches(WIDE, 3.5)
    figure.subplots_adjust(left=0.055, right=0.99, bottom=0.15, top=0.74, wspace=0.24)
    return list(figure.subplots(1, count))


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, colour: str, marker: str) -> None:
    """The median of the last axis, and its range."""
    least, most = values.min(axis=-1), values.max(axis=-1)
    axes.fill_between(x, least, most, color=colour, alpha=0.15, lw=0)
    axes.plot(x, np.median(values, axis=-1), color=colour, marker=marker, mew=0)


def _handle(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, mew=0, label=label)


def _grid(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _head(figure: Figure, title: str, handles: list[Line2D], note: str, theme: str) -> None:
    figure.text(0.006, 0.97, title, size=11, weight="bold", va="top")
    pale = THEMES[theme]["pale"]
    figure.text(0.99, 0.965, note, size=8.5, va="top", ha="right", color=pale)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.006, 0.9), ncols=len(handles),
        borderaxespad=0, borderpad=0, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip
