"""Pictures of a prefix-shuffling study: arrays in, matplotlib axes out; computes nothing but means.

Axes: `prompts`; `fractions`; `draws`; `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from svflow.plotting import COLOURS, MARKERS, THEMES, WIDE
from svflow.score.shuffle import Shuffle, medians

SHOWN = {
    "entropy": "posterior entropy",
    "free_energy": "free energy",
    "consistency": "consistency KL",
    "dispersion": "score dispersion",
    "field of attention": "field of attention",
    "path": "geodesic path length",
}


def change_over_depth(
    axes: Axes,
    fractions: np.ndarray,
    change: np.ndarray,
    *,
    theme: str,
    title: str,
    control: np.ndarray | None = None,
    rho: np.ndarray | None = None,
) -> Axes:
    """The median change in percent over layers, one line per fraction, on axes of a `style`.

    Arguments:
        fractions: (fractions,), at most four of them above zero.
        change: (prompts, fractions, draws, layers), nan where it has no value.
        theme: "light" or "dark".
        title: the name of the metric.
        control: the same of the untrained model, dashed.
        rho: (layers,) at the largest fraction; the largest stands above the axes.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    layers = np.arange(1, change.shape[-1] + 1)
    axes.axhline(0, color=tone["pale"], lw=0.8)
    order = np.argsort(fractions)
    for hue, place in enumerate([i for i in order if fractions[i] > 0][-4:]):
        line: dict[str, Any] = dict(color=colours[hue])
        axes.plot(
            layers, 100 * medians(change[:, place]), marker=MARKERS[hue], ms=3, mew=0, lw=1.4,
            markevery=-(-len(layers) // 20), **line,
        )  # fmt: skip
        if control is not None:
            other = 100 * medians(control[:, place])
            axes.plot(layers, other, lw=0.9, ls=(0, (4, 2)), alpha=0.8, **line)
    axes.set_title(title, pad=6, size=10)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    edge = 0.03 * len(layers)
    axes.set_xlim(1 - edge, len(layers) + edge)
    if rho is not None and np.isfinite(rho).any():
        best = int(np.nanargmax(np.abs(rho)))
        note = f"$\\rho$ {rho[best]:.2f} in layer {best + 1}"
        axes.text(1, 1.03, note, transform=axes.transAxes, ha="right", size=8, color=tone["pale"])
    return axes


def shuffle_picture(
    figure: Figure,
    study: Shuffle,
    *,
    theme: str,
    title: str,
    metrics: Sequence[str] = tuple(SHOWN),
) -> list[Axes]:
    """One panel per metric: its change along depth, fractions as lines, the untrained dashed.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        study: with or without its control.
        theme: "light" or "dark".
        title: of the whole.
        metrics: at most six names of the study's metrics.
    """
    names = [name for name in metrics if name in study.change]
    rows = -(-len(names) // 3)
    height = 0.95 + 2.15 * rows
    figure.set_size_inches(WIDE, height)
    figure.subplots_adjust(
        left=0.055, right=0.99, bottom=0.45 / height, top=1 - 0.95 / height, wspace=0.2, hspace=0.36
    )
    panels = list(np.ravel(figure.subplots(rows, 3)))
    largest = int(np.argmax(study.fractions))
    for axes, name in zip(panels, names):
        control = None if study.untrained is None else study.untrained.change[name]
        change_over_depth(
            axes, study.fractions, study.change[name], theme=theme,
            title=SHOWN.get(name, name), control=control,
            rho=study.rho[name][largest] if study.rho else None,
        )  # fmt: skip
    for axes in panels[-3:]:
        axes.set_xlabel("layer")
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    shown = sorted(f for f in study.fractions if f > 0)[-4:]
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=4, mew=0, label=f"{fraction:g} permuted")
        for fraction, colour, marker in zip(shown, COLOURS[theme], MARKERS)
    ]
    if study.untrained is not None:
        dashes: Any = (0, (4, 2))
        handles.append(
            Line2D([], [], color=THEMES[theme]["pale"], lw=0.9, ls=dashes, label="untrained")
        )
    head = f"{title}: change in percent"
    figure.text(0.006, 1 - 0.12 / height, head, size=11, weight="bold", va="top")
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.006, 1 - 0.36 / height),
        ncols=len(handles), borderaxespad=0, borderpad=0,
    )  # fmt: skip
    return panels
