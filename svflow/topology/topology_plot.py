"""Communities, participation and coupling: arrays in, matplotlib axes out; computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from svflow.plotting import COLOURS, MARKERS, PLAIN, THEMES


def ordered_correlation(
    axes: Axes,
    matrix: np.ndarray,
    labels: np.ndarray,
    *,
    theme: str,
    title: str,
    limit: float = 1.0,
) -> Axes:
    """A correlation matrix with its coordinates ordered by community, each framed.

    Arguments:
        matrix: (nodes, nodes).
        labels: (nodes,) communities; -1, in none, come last.
        theme: "light" or "dark".
        title: of the picture.
        limit: the correlation of full colour.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    order = np.argsort(np.where(labels < 0, labels.max(initial=0) + 1, labels), kind="stable")
    colourmap = LinearSegmentedColormap.from_list("", [colours[0], tone["paper"], colours[1]])
    image = axes.imshow(
        matrix[np.ix_(order, order)], cmap=colourmap, vmin=-limit, vmax=limit,
        interpolation="nearest" if len(labels) <= 600 else "antialiased", aspect="equal",
    )  # fmt: skip
    begin = 0
    for size in np.bincount(labels[labels >= 0]):
        x = np.array([0, 1, 1, 0, 0]) * size + begin - 0.5
        y = np.array([0, 0, 1, 1, 0]) * size + begin - 0.5
        axes.plot(x, y, color=tone["ink"], lw=0.7)
        begin += size
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, pad=6, size=9.5)
    bar = axes.figure.colorbar(
        image, ax=axes, fraction=0.045, pad=0.03, ticks=[-limit, 0, limit],
        format=lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"),
    )  # fmt: skip
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=7.5)
    return axes


def participation_gain(
    axes: Axes,
    participation: np.ndarray,
    gain: np.ndarray,
    sizes: np.ndarray,
    *,
    theme: str,
    title: str,
    label: str = "community gain",
    hue: int = 0,
) -> Axes:
    """One disc per community, its area by its number of nodes.

    Arguments:
        participation, gain, sizes: (communities,).
        theme: "light" or "dark".
        title: of the picture.
        label: of the vertical axis.
        hue: which of the theme's colours.
    """
    colour = COLOURS[theme][hue]
    area = 260 * sizes / sizes.max(initial=1) + 6
    axes.scatter(participation, gain, s=area, color=colour, alpha=0.55, lw=0.8, edgecolor=colour)
    axes.set_title(title, pad=6, size=9.5)
    axes.set_xlabel("mean participation")
    axes.set_ylabel(label)
    axes.margins(0.14)
    axes.grid()
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    return axes


def coupling_over_depth(
    axes: Axes,
    rho: np.ndarray,
    verdicts: np.ndarray,
    names: Sequence[str],
    *,
    theme: str,
    title: str,
    untrained: np.ndarray | None = None,
) -> Axes:
    """Spearman's rho over layers, a filled marker where there is a verdict, hollow where none.

    Arguments:
        rho: (lines, layers), at most four lines.
        verdicts: (lines, layers) "positive", "negative" or "none".
        names: of the lines.
        theme: "light" or "dark".
        title: of the picture.
        untrained: (layers,) rho of the first line's kind in the untrained model.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    depth = np.arange(1, 1 + rho.shape[1])
    axes.axhline(0, color=tone["pale"], lw=0.8)
    if untrained is not None:
        dotted: Any = (0, (1, 1))
        axes.plot(depth, untrained, color=tone["pale"], lw=1.2, ls=dotted, label="untrained")
    for hue, (line, found, name) in enumerate(zip(rho, verdicts, names)):
        colour, marker = colours[hue], MARKERS[hue]
        axes.plot(depth, line, color=colour, lw=1.2, label=name)
        for chosen, face in ((found != "none", colour), (found == "none", tone["paper"])):
            axes.plot(
                depth[chosen], line[chosen], ls="", marker=marker, ms=5, mew=1, mec=colour, mfc=face
            )
    axes.plot([], [], ls="", marker="o", ms=5, mew=1, mec=tone["pale"], mfc=tone["pale"],
              label="verdict")  # fmt: skip
    axes.set_ylim(-1.08, 1.08)
    axes.set_title(title, pad=24, size=9.5)
    axes.set_xlabel("layer")
    axes.set_ylabel(r"Spearman's $\rho$")
    axes.xaxis.set_major_locator(MaxNLocator(min(len(depth), 10), integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, borderaxespad=0.4, handlelength=1.6,
        columnspacing=1.0, handletextpad=0.5, borderpad=0,
    )  # fmt: skip
    return axes


def topology_picture(
    figure: Figure,
    matrices: np.ndarray,
    labels: np.ndarray,
    layers: Sequence[int],
    *,
    participation: Sequence[np.ndarray],
    gain: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
    rho: np.ndarray,
    verdicts: np.ndarray,
    names: Sequence[str],
    untrained: np.ndarray | None,
    theme: str,
    title: str,
    label: str,
) -> list[Axes]:
    """Ordered correlations and participation against gain for some layers, coupling by depth below.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        matrices, labels: (shown, nodes, nodes) and (shown, nodes) of the layers that are shown.
        layers: their numbers, from 0.
        participation, gain, sizes: of each shown layer, (communities,).
        rho, verdicts, names, untrained: see `coupling_over_depth`.
        theme: "light" or "dark".
        title: of the whole.
        label: of the gain.
    """
    count = len(layers)
    figure.set_size_inches(10.8, 9.4)
    edges: dict[str, Any] = dict(left=0.07, right=0.965, wspace=0.32)
    grids = [
        figure.add_gridspec(1, count, top=0.9, bottom=0.635, **edges),
        figure.add_gridspec(1, count, top=0.585, bottom=0.385, **edges),
        figure.add_gridspec(1, 1, top=0.275, bottom=0.06, **edges),
    ]
    limit = float(np.quantile(np.abs(matrices), 0.99)) or 1.0
    limit = min(1.0, np.ceil(10 * limit) / 10)
    found = []
    for place, layer in enumerate(layers):
        found.append(
            ordered_correlation(
                figure.add_subplot(grids[0][place]), matrices[place], labels[place],
                theme=theme, title=f"before layer {layer + 1}: correlations", limit=limit,
            )
        )  # fmt: skip
        found.append(
            participation_gain(
                figure.add_subplot(grids[1][place]), participation[place], gain[place],
                sizes[place], theme=theme, title=f"layer {layer + 1}: communities", label=label,
            )
        )  # fmt: skip
    found.append(
        coupling_over_depth(
            figure.add_subplot(grids[2][0]), rho, verdicts, names, theme=theme,
            title="coupling by depth", untrained=untrained,
        )
    )  # fmt: skip
    figure.text(0.006, 0.985, title, size=11, weight="bold", va="top")
    disc: dict[str, Any] = dict(ls="", marker="o", color=COLOURS[theme][0], alpha=0.6)
    figure.legend(
        handles=[Line2D([], [], ms=8, label="a community, area by its nodes", **disc)],
        loc="upper left", bbox_to_anchor=(0.006, 0.962), borderaxespad=0, borderpad=0,
    )  # fmt: skip
    return found


def training_film(
    figure: Figure,
    steps: Sequence[int],
    profiles: Mapping[str, np.ndarray],
    courses: Mapping[str, Mapping[str, np.ndarray]],
    *,
    theme: str,
    title: str,
) -> list[Axes]:
    """Layers at every checkpoint of a training above, numbers of the whole over its steps below.

    Arguments:
        figure: of a `svflow.plotting.style`; its size is set here.
        steps: (checkpoints,) after how many steps, in order; 0 for the untrained model.
        profiles: by what is measured, (checkpoints, layers): one line per checkpoint.
        courses: by what is measured, by the name of a line, (checkpoints,), or (checkpoints, 3) for
            a line and the lower and upper edge of a band. As many as there are profiles.
        theme: "light" or "dark".
        title: of the whole.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    count = len(profiles)
    figure.set_size_inches(3.6 * count, 6.6)
    edges: dict[str, Any] = dict(left=0.062, right=0.985, wspace=0.27)
    grids = [
        figure.add_gridspec(1, count, top=0.87, bottom=0.535, **edges),
        figure.add_gridspec(1, count, top=0.385, bottom=0.075, **edges),
    ]
    late = LinearSegmentedColormap.from_list("", [tone["rule"], colours[0], tone["ink"]])
    tones = [late(place) for place in np.linspace(0.15, 1, len(steps))]
    found = []
    for place, (label, values) in enumerate(profiles.items()):
        axes = figure.add_subplot(grids[0][place])
        depth = np.arange(1, 1 + values.shape[1])
        for line, colour, marker in zip(values, tones, itertools.cycle(MARKERS)):
            axes.plot(depth, line, color=colour, marker=marker, mew=0, lw=1.4)
        axes.set_title(label, pad=8, size=9.5)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(min(len(depth), 10), integer=True, min_n_ticks=1))
        found.append(axes)
    for place, (label, lines) in enumerate(courses.items()):
        axes = figure.add_subplot(grids[1][place])
        for (name, values), colour, marker in zip(lines.items(), colours, MARKERS):
            whole = np.asarray(values, float)
            line = whole if whole.ndim == 1 else whole[:, 0]
            if whole.ndim == 2:
                axes.fill_between(steps, whole[:, 1], whole[:, 2], color=colour, alpha=0.17, lw=0)
            axes.plot(steps, line, color=colour, marker=marker, mew=0, label=name)
        axes.set_title(label, pad=22, size=9.5)
        axes.set_xlabel("training steps")
        # From nothing to thousands: evenly enough, and 0 has a place.
        axes.set_xscale("symlog", linthresh=min((s for s in steps if s > 0), default=1))
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.3,
            handlelength=1.5, columnspacing=1.0, handletextpad=0.5, borderpad=0,
        )  # fmt: skip
        found.append(axes)
    for axes in found:
        low, high = axes.get_ylim()
        if low < 0 < high:
            axes.axhline(0, color=tone["pale"], lw=0.8, zorder=1)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(PLAIN)
    figure.text(0.006, 0.985, title, size=11, weight="bold", va="top")
    handles = [
        Line2D([], [], color=colour, marker=marker, mew=0, lw=1.4, label=f"{step} steps")
        for step, colour, marker in zip(steps, tones, itertools.cycle(MARKERS))
    ]
    figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.985, 0.99), ncols=len(steps),
        borderaxespad=0, borderpad=0, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip
    return found
