"""Arrays in, matplotlib axes out; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

# Blue and vermilion keep their contrast under every common colour blindness. Source: Okabe and
# Ito, "Color universal design", 2008; lighter on dark paper. Markers tell them apart as well.
THEMES = {
    "light": dict(paper="#ffffff", ink="#22272e", pale="#8a929c", rule="#e7e9ec"),
    "dark": dict(paper="#15181c", ink="#e3e6ea", pale="#8d96a1", rule="#2a2f36"),
}
COLOURS = {
    "light": ("#0072b2", "#d55e00", "#00795a", "#9a4f80"),
    "dark": ("#56b4e9", "#f0a03c", "#2cc295", "#d48fb9"),
}
MARKERS = ("o", "s", "^", "D")
FONTS = ("Inter", "Source Sans 3", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans")


class Series(NamedTuple):
    """One line over depth.

    Arguments:
        label: its name in the legend.
        hue: which of the theme's four `COLOURS`, and of the `MARKERS`.
        line: (points,) the values; nan leaves a gap.
        low, high: (points,) the edges of the band around it.
        first: (points,) a thin dashed companion, the first token.
    """

    label: str
    hue: int
    line: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    first: np.ndarray | None = None


def style(theme: str) -> dict[Any, Any]:
    """The rcParams of a theme, "light" or "dark", for `matplotlib.rc_context`."""
    tone = THEMES[theme]
    known = {font.name for font in font_manager.fontManager.ttflist}
    return {
        "font.family": [font for font in FONTS if font in known],
        "font.size": 9.5,
        "mathtext.fontset": "dejavusans",
        "text.color": tone["ink"],
        "axes.labelcolor": tone["ink"],
        "axes.edgecolor": tone["pale"],
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlepad": 27,
        "axes.facecolor": tone["paper"],
        "figure.facecolor": tone["paper"],
        "figure.figsize": (5.2, 3.4),
        "figure.dpi": 200,
        "figure.subplot.left": 0.14,
        "figure.subplot.right": 0.985,
        "figure.subplot.bottom": 0.135,
        "figure.subplot.top": 0.8,
        "xtick.color": tone["pale"],
        "ytick.color": tone["pale"],
        "xtick.labelcolor": tone["ink"],
        "ytick.labelcolor": tone["ink"],
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "lines.linewidth": 1.7,
        "lines.markersize": 3.4,
        "grid.color": tone["rule"],
        "grid.linewidth": 0.7,
    }


def over_depth(
    axes: Axes,
    depth: np.ndarray,
    series: Sequence[Series],
    *,
    theme: str,
    title: str,
    label: str,
    scale: str | float = "linear",
    level: tuple[str, float] | None = None,
) -> Axes:
    """Lines over depth, each with its band and its dashed companion, on axes of a `style`.

    Arguments:
        depth: (points,) where the points are, in layers.
        series: the lines.
        theme: "light" or "dark".
        title, label: of the figure and of the vertical axis, with its unit.
        scale: of the vertical axis: "linear", "log", or a number s for an axis that is linear
            within +-s and logarithmic beyond.
        level: the name and height of a horizontal line to compare with.
    """
    tone = THEMES[theme]
    for one in series:
        colour = COLOURS[theme][one.hue]
        if one.low is not None and one.high is not None:
            axes.fill_between(depth, one.low, one.high, color=colour, alpha=0.17, lw=0)
        if one.first is not None:
            axes.plot(depth, one.first, color=colour, lw=1, ls=(0, (4, 2)), alpha=0.8)
        axes.plot(
            depth,
            one.line,
            color=colour,
            marker=MARKERS[one.hue] if len(depth) <= 40 else None,
            label=one.label,
            markeredgewidth=0,
        )
    if level is not None:
        axes.axhline(level[1], color=tone["pale"], lw=1.2, ls=(0, (1, 1)), label=level[0])
    if any(one.first is not None for one in series):
        axes.plot([], [], color=tone["pale"], lw=1, ls=(0, (4, 2)), label="first token")
    if isinstance(scale, float):
        axes.set_yscale("symlog", linthresh=scale, linscale=2)
        note = f"linear within ±{scale:g}"
        axes.text(1, 1.03, note, transform=axes.transAxes, ha="right", color=tone["pale"], size=8)
    elif scale == "log":
        axes.set_yscale("log")
    if scale != "linear":
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))
        )
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title)
    axes.set_xlabel("depth (layers)")
    axes.set_ylabel(label)
    axes.set_xlim(-0.02 * depth[-1], 1.02 * depth[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.6,
        handlelength=1.8,
        columnspacing=1.4,
        handletextpad=0.5,
        borderpad=0,
    )
    return axes


def flush_left(axes: Axes) -> None:
    """Moves the title and the legend from the left edge of the axes to that of the figure."""
    box = axes.get_position()
    edge = -box.x0 / box.width
    # The legend stands a little off its anchor: the title with it.
    axes.set_title(axes.get_title(loc="left"), x=edge + 0.013)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_bbox_to_anchor((edge, 1.0))
