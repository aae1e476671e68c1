"""Dose and response of steering: arrays in, matplotlib axes out; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from svflow.plotting import COLOURS, MARKERS, THEMES

NAMES = {
    "basic": "basic: a z z^T",
    "exact": "exact eigenpair",
    "mean": "mean direction: a z mu^T",
    "stream": "vector on the stream",
}


def over_strength(
    axes: Axes,
    strengths: np.ndarray,
    lines: np.ndarray,
    *,
    theme: str,
    title: str,
    companions: np.ndarray | None = None,
    level: float | None = None,
    scale: str = "linear",
) -> Axes:
    """One line per variant over strengths, on axes of a `svflow.plotting.style`.

    Arguments:
        strengths: (strengths,) positive, on a logarithmic axis; those at zero or below are left
            out.
        lines: (variants, strengths), at most four.
        theme: "light" or "dark".
        title: of the quantity.
        companions: (variants, strengths) thin dashed lines of the same colours.
        level: a horizontal line to compare with, such as the value without steering.
        scale: of the vertical axis, "linear" or "log".
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    drawn = np.asarray(strengths) > 0
    x = np.asarray(strengths)[drawn]
    if level is not None:
        axes.axhline(level, color=tone["pale"], lw=1.2, ls=(0, (6, 1.5, 1, 1.5)))
    for hue, line in enumerate(np.asarray(lines)):
        if companions is not None:
            dash: Any = (0, (4, 2))
            axes.plot(x, np.asarray(companions)[hue][drawn], color=colours[hue], lw=1, ls=dash)
        axes.plot(x, line[drawn], color=colours[hue], marker=MARKERS[hue], markeredgewidth=0)
    axes.set_xscale("log")
    axes.set_yscale(scale)
    axes.set_title(title, pad=9, size=10)
    axes.set_xlabel("strength a")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return axes


def dose_picture(
    figure: Figure,
    strengths: np.ndarray,
    variants: Sequence[str],
    *,
    cosine: np.ndarray,
    size: np.ndarray,
    positive: np.ndarray,
    kl: np.ndarray,
    unsteered: tuple[float, float],
    theme: str,
    title: str,
) -> list[Axes]:
    """Three pictures over strength: cosine with the direction, share with its sign, and cost.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        strengths, variants, cosine, size, positive, kl: of a `DoseResponse` and its `Effect`.
        unsteered: the cosine and the share without steering.
        theme: "light" or "dark".
        title: of the whole.
    """
    figure.set_size_inches(10.8, 3.5)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.14, top=0.72, wspace=0.18)
    panels = figure.subplots(1, 3)
    make: dict[str, Any] = dict(theme=theme)
    over_strength(
        panels[0], strengths, cosine, title="mean cosine with z (dashed: modulus)",
        companions=size, level=unsteered[0], **make,
    )  # fmt: skip
    over_strength(
        panels[1], strengths, positive, title="share of tokens on the side of +z",
        level=unsteered[1], **make,
    )  # fmt: skip
    panels[1].set_ylim(-0.03, 1.03)
    if np.isfinite(kl).any():
        cost = np.where(np.asarray(kl) > 0, kl, np.nan)
        over_strength(
            panels[2], strengths, cost, title="KL to the unsteered, nats per token",
            scale="log", **make,
        )  # fmt: skip
    else:
        panels[2].set_visible(False)
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=4, mew=0, label=NAMES.get(name, name))
        for name, colour, marker in zip(variants, COLOURS[theme], MARKERS)
    ]
    handles.append(
        Line2D(
            [], [], color=THEMES[theme]["pale"], lw=1.2, ls=(0, (6, 1.5, 1, 1.5)), label="unsteered"
        )
    )
    figure.text(0.006, 0.965, title, size=11, weight="bold", va="top")
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.006, 0.89), ncols=len(handles),
        borderaxespad=0, borderpad=0,
    )  # fmt: skip
    return list(panels)
