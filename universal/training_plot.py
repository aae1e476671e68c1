"""Pictures of learnt programs: arrays in, matplotlib axes out; computes nothing but means.

Axes: `evaluations`; `seeds`; `layers`; `heads`; `tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from svflow.plotting import COLOURS, MARKERS, PLAIN, THEMES, WIDE


def accuracy_over_steps(
    axes: Axes,
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    theme: str,
    title: str,
) -> Axes:
    """The mean accuracy over training steps, and the band of all seeds, on axes of a `style`.

    Arguments:
        curves: by machine, (evaluations,) steps and (evaluations, seeds) accuracies; four at most.
        theme: "light" or "dark".
        title: of the picture.

    Raises:
        ValueError: more than four machines.
    """
    _check_few(curves)
    for (name, (steps, values)), colour, marker in zip(curves.items(), COLOURS[theme], MARKERS):
        low, high = 100 * values.min(axis=1), 100 * values.max(axis=1)
        axes.fill_between(steps, low, high, color=colour, alpha=0.17, lw=0)
        axes.plot(
            steps, 100 * values.mean(axis=1), color=colour, marker=marker, mew=0, label=name,
            markevery=-(-len(steps) // 20), clip_on=False,
        )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_xlabel("steps")
    axes.set_ylabel("accuracy (%)")
    axes.set_title(title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    _legend(axes)
    return axes


def singular_values(
    axes: Axes,
    values: Mapping[str, Float[np.ndarray, " rank"]],
    *,
    theme: str,
    title: str = "Singular values of the learnt embedding",
) -> Axes:
    """The singular values of learnt tables in units of the largest, on axes of a `style`.

    Arguments:
        values: by machine, in descending order, the largest above zero; four machines at most.
        theme: "light" or "dark".
        title: of the picture.

    Raises:
        ValueError: more than four machines.
    """
    _check_few(values)
    for (name, sigma), colour, marker in zip(values.items(), COLOURS[theme], MARKERS):
        places = np.arange(1, len(sigma) + 1)
        axes.plot(
            places, np.asarray(sigma) / sigma[0], color=colour, marker=marker, mew=0, label=name,
            markevery=-(-len(sigma) // 20),
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("number")
    axes.set_ylabel(r"$\sigma_i\,/\,\sigma_1$")
    axes.set_title(title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    _legend(axes)
    return axes


def attention_maps(
    figure: Figure,
    attention: Float[np.ndarray, "layers heads tokens tokens"],
    tokens: Sequence[str],
    *,
    theme: str,
    title: str,
) -> list[Axes]:
    """Every layer's and head's attention on one sequence, queries downwards, of a `style`.

    Arguments:
        tokens: what stands at each place.
        theme: "light" or "dark".
        title: of the whole.
    """
    tone, colour = THEMES[theme], COLOURS[theme][0]
    layers, heads = attention.shape[:2]
    scale = LinearSegmentedColormap.from_list("attention", [tone["paper"], colour])
    left, right, top, bottom, gap = 0.45, 0.12, 0.85, 0.12, 0.42
    side = min(3.2, (WIDE - left - right - gap * (heads - 1)) / heads)
    width = left + right + heads * side + (heads - 1) * gap
    height = top + bottom + layers * side + (layers - 1) * gap
    figure.set_size_inches(max(width, 5.2), height)
    width = max(width, 5.2)
    for layer in range(layers):
        for head in range(heads):
            x = left + head * (side + gap)
            y = height - top - (layer + 1) * side - layer * gap
            axes = figure.add_axes((x / width, y / height, side / width, side / height))
            axes.imshow(attention[layer, head], cmap=scale, vmin=0, vmax=1, aspect="auto")
            axes.set_title(f"layer {layer + 1}, head {head + 1}", size=8.5, weight="normal", pad=14)
            size = float(np.clip(62 * side / len(tokens), 3, 8))
            axes.set_xticks(range(len(tokens)), tokens, size=size)
            axes.set_yticks(range(len(tokens)), tokens, size=size)
            axes.xaxis.tick_top()
            axes.tick_params(length=0, pad=1)
            axes.spines[:].set_visible(True)
            axes.spines[:].set_color(tone["rule"])
    figure.text(0.06 / width, 1 - 0.12 / height, title, size=11, weight="bold", va="top")
    return list(figure.axes)


def _check_few(machines: Mapping[str, object]) -> None:
    if len(machines) > len(MARKERS):
        raise ValueError(f"{len(machines)} machines: a picture has {len(MARKERS)} colours")


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, borderaxespad=0.6, handlelength=1.8,
        columnspacing=1.2, handletextpad=0.5, borderpad=0,
    )  # fmt: skip
