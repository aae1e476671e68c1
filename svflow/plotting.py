"""Arrays in, matplotlib axes out; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

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
WIDE = 10.8
"""Inches: the width of a figure across the whole page; others have half of it."""
FONTS = ("Inter", "Source Sans 3", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans")


def _plain(value: float, _) -> str:
    """As people write it; a power of ten from 1e4 and below 1e-3."""
    if value > 0 and not 1e-3 <= value < 1e4:
        mantissa, exponent = f"{value:e}".split("e")
        times = "" if float(mantissa) == 1 else rf"{float(mantissa):g}\times"
        return rf"${times}10^{{{int(exponent)}}}$"
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


PLAIN = FuncFormatter(_plain)


class Series(NamedTuple):
    """One line over depth.

    Arguments:
        label: its name in the legend.
        hue: which of the theme's four `COLOURS`, and of the `MARKERS`.
        line: (points,) the values; nan leaves a gap.
        low, high: (points,) the edges of the band around it.
        companion: (points,) a thin dashed line of the same colour.
        noise: (points,) a dotted line, what chance gives.
        spread: (points,) half the height of a band around `noise`.
        update: (points,) a thin line with hollow markers, a closer companion.
    """

    label: str
    hue: int
    line: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    companion: np.ndarray | None = None
    noise: np.ndarray | None = None
    spread: np.ndarray | None = None
    update: np.ndarray | None = None


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
    companion: str = "first token",
    noise: str = "Gaussian",
    update: str = "identity + Gaussian",
    first: int = 0,
) -> Axes:
    """Lines over depth, each with its band and its companions, on axes of a `style`.

    Arguments:
        depth: (points,) where the points are, in layers.
        series: the lines.
        theme: "light" or "dark".
        title, label: of the figure and of the vertical axis, with its unit.
        scale: of the vertical axis: "linear", "log", or a number s for an axis that is linear
            within +-s and logarithmic beyond.
        level: the name and height of a horizontal line to compare with.
        companion, noise, update: the names of the dashed, the dotted and the hollow companions.
        first: where the horizontal axis begins, 1 for what only layers have.
    """
    tone = THEMES[theme]
    hollow: dict[str, Any] = dict(lw=0.9, mfc=tone["paper"], mew=0.9, ms=5.2)
    dotted: dict[str, Any] = dict(color=tone["pale"], lw=1.2, ls=(0, (1, 1)))
    several = sum(one.noise is not None for one in series) > 1
    for one in series:
        colour = COLOURS[theme][one.hue]
        if one.low is not None and one.high is not None:
            axes.fill_between(depth, one.low, one.high, color=colour, alpha=0.17, lw=0)
        if one.noise is not None and one.spread is not None:
            low, high = one.noise - one.spread, one.noise + one.spread
            axes.fill_between(depth, low, high, color=tone["pale"], alpha=0.17, lw=0)
        if one.noise is not None:
            axes.plot(depth, one.noise, **dotted | ({"color": colour} if several else {}))
        if one.companion is not None:
            axes.plot(depth, one.companion, color=colour, lw=1, ls=(0, (4, 2)), alpha=0.8)
        if one.update is not None:
            axes.plot(
                depth, one.update, color=colour, marker=MARKERS[one.hue],
                markevery=-(-len(depth) // 40), alpha=0.8, **hollow,
            )  # fmt: skip
        axes.plot(
            depth,
            one.line,
            color=colour,
            marker=MARKERS[one.hue] if len(depth) <= 40 else None,
            label=one.label,
            markeredgewidth=0,
        )
    if level is not None:
        name, height = level
        dashes = dict(ls=(0, (6, 1.5, 1, 1.5)))
        axes.axhline(height, **dotted | dashes, label=None if first else name)
        if first:  # the legend is full
            place = axes.get_yaxis_transform()
            axes.text(1, height, f"{name}\n", transform=place, ha="right", va="center", size=8)
    if any(one.companion is not None for one in series):
        axes.plot([], [], color=tone["pale"], lw=1, ls=(0, (4, 2)), label=companion)
    if any(one.noise is not None for one in series):
        band = any(one.spread is not None for one in series)
        axes.plot([], [], **dotted, label=f"{noise} ± 2 sd" if band else noise)
    if any(one.update is not None for one in series):
        axes.plot([], [], color=tone["pale"], marker="o", **hollow, label=update)
    if isinstance(scale, float):
        axes.set_yscale("symlog", linthresh=scale, linscale=2)
        note = f"linear within ±{scale:g}"
        axes.text(1, 1.03, note, transform=axes.transAxes, ha="right", color=tone["pale"], size=8)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif scale == "log":
        axes.set_yscale("log")
        _log_ticks(axes)
    else:  # no power of ten that stands by itself, above the axis
        axes.yaxis.set_major_formatter(PLAIN)
    axes.set_title(title)
    axes.set_ylabel(label)
    if first:
        _layers(axes, depth[-1], 12)
    else:
        axes.set_xlabel("depth (layers)")
        axes.set_xlim(-0.02 * depth[-1], 1.02 * depth[-1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=6,
        borderaxespad=0.6,
        handlelength=1.8,
        columnspacing=1.2,
        handletextpad=0.5,
        borderpad=0,
    )
    return axes


def _layers(axes: Axes, last: int, most: int) -> None:
    """A horizontal axis of the layers 1 .. last, with at most about so many numbers."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 10**9) if last <= most * s)
    axes.set_xticks(range(1, last + 1, step) if step < 5 else [1, *range(step, last + 1, step)])
    edge = 0.02 * (last - 1) or 0.5
    axes.set_xlim(1 - edge, last + edge)
    axes.set_xlabel("layer")


def _log_ticks(axes: Axes) -> None:
    """A logarithmic axis' numbers, and more than the powers of ten below two decades."""
    low, high = axes.get_ylim()
    if high < 100 * low:
        subs = (1.0, 2.0, 5.0) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
    else:
        axes.yaxis.set_major_locator(LogLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())


def flush_left(axes: Axes) -> None:
    """Moves the title and the legend from the left edge of the axes to that of the figure."""
    box = axes.get_position()
    edge = -box.x0 / box.width
    # The legend stands a little off its anchor: the title with it.
    axes.set_title(axes.get_title(loc="left"), x=edge + 0.013)
    legend = axes.get_legend()
    if legend is not None:
        legend.set_bbox_to_anchor((edge, 1.0))


class Spectrum(NamedTuple):
    """One layer's eigenvalues in the complex plane.

    Arguments:
        values: (width,) complex.
        behind: (width,) complex, drawn behind them to compare with.
        frame: the least and largest real part, and the largest imaginary part, that are drawn.
        shared: whether most others have the same frame.
    """

    values: np.ndarray
    behind: np.ndarray
    frame: tuple[float, float, float]
    shared: bool


def spectra(
    figure: Figure, layers: Sequence[Spectrum], *, theme: str, title: str, behind: str
) -> list[Axes]:
    """A grid of eigenvalues in the complex plane, one picture per layer, of a `style`.

    Eigenvalues outside a frame stand as triangles on its edge, and their number above it.

    Arguments:
        theme: "light" or "dark".
        title: of the whole.
        behind: the name of what is drawn behind.
    """
    tone, (blue, vermilion, *_) = THEMES[theme], COLOURS[theme]
    columns = next(n for most, n in ((3, 3), (8, 4), (18, 6), (10**9, 8)) if len(layers) <= most)
    rows = -(-len(layers) // columns)
    # Numbers on every picture, or only on the outermost where they are the same.
    every = not all(one.shared for one in layers)
    gap_x, gap_y, left, right, top, bottom, width = 0.2, 0.4, 0.62, 0.12, 1.0, 0.52, WIDE
    if every:
        gap_x, gap_y = 0.46, 0.52
    side = (width - left - right - gap_x * (columns - 1)) / columns
    shared = next(one.frame for one in layers if one.shared)
    some_outside = False
    tall = side * 2 * shared[2] / (shared[1] - shared[0])
    height = top + bottom + rows * tall + (rows - 1) * gap_y
    figure.set_size_inches(width, height)
    dot = np.clip(24 / len(layers[0].values) ** 0.5, 0.9, 3) * (side / 2.3) ** 0.5
    for place, one in enumerate(layers):
        row, column = divmod(place, columns)
        axes = figure.add_axes(
            (
                (left + column * (side + gap_x)) / width,
                1 - (top + row * (tall + gap_y) + tall) / height,
                side / width,
                tall / height,
            )
        )
        low, high, up = one.frame
        if not one.shared:  # the same shape of picture
            middle, half = (low + high) / 2, max((high - low) / 2, up * side / tall)
            low, high, up = middle - half, middle + half, half * tall / side
        axes.set_xlim(low, high)
        axes.set_ylim(-up, up)
        axes.axhline(0, color=tone["pale"], lw=0.7, zorder=1, alpha=0.6)
        axes.add_patch(Circle((0, 0), 1, fill=False, ec=tone["pale"], lw=0.9, zorder=1))
        axes.plot(
            one.behind.real, one.behind.imag, "o", ms=0.7 * dot, mew=0, color=tone["pale"],
            alpha=0.6, zorder=2,
        )  # fmt: skip
        real, imag = one.values.real, one.values.imag
        inside = (real >= low) & (real <= high) & (np.abs(imag) <= up)
        axes.plot(real[inside], imag[inside], "o", ms=dot, mew=0, color=blue, alpha=0.75, zorder=3)
        for marker, side_of in (
            ("<", real < low), (">", real > high),
            ("^", (imag > up) & (real >= low) & (real <= high)),
            ("v", (imag < -up) & (real >= low) & (real <= high)),
        ):  # fmt: skip
            axes.plot(
                np.clip(real[side_of], low, high), np.clip(imag[side_of], -up, up), marker,
                ms=4.5, mew=0, color=vermilion, zorder=4, clip_on=False,
            )  # fmt: skip
        axes.spines[["top", "right"]].set_visible(True)
        for spine in axes.spines.values():
            spine.set_color(tone["rule"] if one.shared else tone["ink"])
        outside = len(inside) - int(inside.sum())
        some_outside |= outside > 0
        small: dict[str, Any] = dict(size=8.5, weight="normal", pad=4)
        axes.set_title(f"layer {place + 1}", **small)
        if outside:
            axes.set_title(f"+{outside}", loc="right", color=vermilion, **small)
        axes.xaxis.set_major_locator(MaxNLocator(5 if side > 1.4 else 2, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], symmetric=True))
        axes.xaxis.set_major_formatter(PLAIN)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.tick_params(length=2, pad=1.5, labelsize=7.5)
        last = place + columns >= len(layers)
        axes.tick_params(labelleft=every or column == 0, labelbottom=every or last)
        if column == 0:
            axes.set_ylabel(r"Im $\lambda$", size=8.5, labelpad=2)
        if last:
            axes.set_xlabel(r"Re $\lambda$", size=8.5, labelpad=2)
    handles = [
        Line2D([], [], ls="", marker="o", ms=4, mew=0, color=blue, label="this model"),
        Line2D([], [], ls="", marker="o", ms=2.6, mew=0, color=tone["pale"], label=behind),
        Line2D([], [], ls="", marker="o", ms=7, mfc="none", mec=tone["pale"],
               label=r"unit circle $|\,\lambda\,|=1$"),
    ]  # fmt: skip
    if not all(one.shared for one in layers):
        handles.append(
            Line2D([], [], ls="", marker="s", ms=7, mfc="none", mec=tone["ink"], label="own scale")
        )
    if some_outside:
        handles.append(
            Line2D([], [], ls="", marker=">", ms=5, mew=0, color=vermilion, label="+n beyond")
        )
    _headline(figure, title, handles)
    return list(figure.axes)


class Pair(NamedTuple):
    """A quantity over layers before and after something is done.

    Arguments:
        title, code, note: its name, its name in code, and a line below.
        before, after: (3, points): the least, the median and the largest of the draws.
    """

    title: str
    code: str
    note: str
    before: np.ndarray
    after: np.ndarray


def pairs(
    figure: Figure,
    parts: Sequence[Pair],
    *,
    theme: str,
    title: str,
    label: str,
    before: str,
    after: str,
    limits: tuple[float, float],
) -> list[Axes]:
    """Pictures of pairs of lines on common axes, the first pair repeated in grey in the others.

    Arguments:
        theme: "light" or "dark".
        title, label: of the whole and of the vertical axes, which are logarithmic.
        before, after: the names of the lines.
        limits: of the vertical axes.
    """
    tone, (blue, vermilion, *_) = THEMES[theme], COLOURS[theme]
    columns = 3
    rows = -(-len(parts) // columns)
    gap_x, gap_y, left, right, top, bottom, width = 0.3, 0.72, 0.72, 0.12, 1.27, 0.5, WIDE
    side, tall = (width - left - right - gap_x * (columns - 1)) / columns, 1.85
    height = top + bottom + rows * tall + (rows - 1) * gap_y
    figure.set_size_inches(width, height)
    depth = np.arange(1, 1 + parts[0].before.shape[-1])
    ranges = any((one.before[0] < one.before[2]).any() for one in parts)
    for place, one in enumerate(parts):
        row, column = divmod(place, columns)
        axes = figure.add_axes(
            (
                (left + column * (side + gap_x)) / width,
                1 - (top + row * (tall + gap_y) + tall) / height,
                side / width,
                tall / height,
            )
        )
        marked = len(depth) <= 40
        if place:
            for values, dash in ((parts[0].before[1], "-"), (parts[0].after[1], (0, (3, 1.5)))):
                axes.plot(depth, values, color=tone["pale"], lw=1.1, ls=dash, alpha=0.75)
        for (least, values, largest), colour, marker in (
            (one.before, blue, MARKERS[0]),
            (one.after, vermilion, MARKERS[1]),
        ):
            axes.fill_between(depth, least, largest, color=colour, alpha=0.25, lw=0)
            axes.plot(depth, values, color=colour, marker=marker if marked else None, mew=0, ms=3.2)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        _log_ticks(axes)
        _layers(axes, depth[-1], 8)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(labelleft=column == 0, labelbottom=place + columns >= len(parts))
        axes.set_title(one.title, size=9.5, pad=18)
        axes.set_title(
            one.code, loc="right", size=8, pad=18, weight="normal", family="monospace",
            color=tone["pale"],
        )  # fmt: skip
        axes.text(0, 1.035, one.note, transform=axes.transAxes, size=8.5, color=tone["pale"])
        if column == 0:
            axes.set_ylabel(label)
        if place + columns < len(parts):
            axes.set_xlabel("")
    shape: dict[str, Any] = dict(mew=0, ms=4)
    handles = [
        Line2D([], [], color=blue, marker=MARKERS[0], label=before, **shape),
        Line2D([], [], color=vermilion, marker=MARKERS[1], label=after, **shape),
        Line2D([], [], color=tone["pale"], lw=1.1, label=f"{parts[0].title}, {before}"),
        Line2D([], [], color=tone["pale"], lw=1.1, ls=(0, (3, 1.5)),
               label=f"{parts[0].title}, {after}"),
    ]  # fmt: skip
    if ranges:
        handles.append(
            Line2D([], [], color=blue, lw=6, alpha=0.25, solid_capstyle="butt", label="all draws")
        )
    _headline(figure, title, handles)
    return list(figure.axes)


def _headline(figure: Figure, title: str, handles: Sequence[Line2D]) -> None:
    """Title and legend above a grid, flush with the figure's left edge."""
    width, height = figure.get_size_inches()
    x = 0.06 / width
    figure.text(x, 1 - 0.12 / height, title, size=11, weight="bold", va="top")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(x, 1 - 0.4 / height),
        ncols=len(handles),
        borderaxespad=0,
        borderpad=0,
        handlelength=1.8,
        handletextpad=0.5,
        columnspacing=1.6,
    )


def share_limits(figures: Sequence[Figure]) -> None:
    """Gives the axes of several figures, by their places, limits that hold what all show.

    Where one has a logarithmic scale and another a linear one, all get the logarithmic one, or the
    linear one where something is not positive. Axes with pictures, and figures of different numbers
    of axes, are left as they are.
    """
    if len({len(figure.axes) for figure in figures}) > 1:
        return
    for alike in zip(*(figure.axes for figure in figures)):
        if any(axes.images for axes in alike):
            continue
        for side in ("x", "y"):
            limits = [getattr(axes, f"get_{side}lim")() for axes in alike]
            low, high = min(low for low, _ in limits), max(high for _, high in limits)
            scales = {getattr(axes, f"get_{side}scale")(): axes for axes in alike}
            if side == "y" and set(scales) == {"linear", "log"}:
                scale = "log" if low > 0 else "linear"
                for axes in alike:
                    axes.set_yscale(scale)
                    axes.set_ylabel(scales[scale].get_ylabel())
            elif len(scales) > 1:
                continue
            for axes in alike:
                getattr(axes, f"set_{side}lim")(low, high)
                if side == "y" and axes.get_yscale() == "log":
                    _log_ticks(axes)
