"""The tree of paths of a program: registers in, matplotlib axes out; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from svflow.plotting import COLOURS, THEMES
from universal.interpret import Register, spans

MOST = 96  # Leaves that still have room for their columns.
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)))  # of heads that share a colour


def path_tree(
    axes: Axes, registers: Sequence[Register], *, theme: str, title: str = "Program"
) -> Axes:
    """Every path of heads as a way through a tree, with the columns of E that its end reads.

    Depth runs to the right. A node is a path of heads so far: its columns are the queries and keys
    that the next layer reads there, of all its heads; at a leaf they are the output.

    Arguments:
        axes: of a `svflow.plotting.style`; the figure should be about 1.4 inches high, and 0.16
            more for each leaf.
        registers: of `universal.registers`.
        theme: "light" or "dark".
        title: of the picture.

    Raises:
        ValueError: more paths than can be told apart.
    """
    tone, colours = THEMES[theme], COLOURS[theme]
    leaves = sorted({slot.path for slot, _ in registers if slot.kind == "output"})
    if len(leaves) > MOST:
        raise ValueError(f"{len(leaves)} paths are too many to draw; {MOST} are the most")
    depth = max((slot.layer for slot, _ in registers if slot.layer is not None), default=-1) + 1
    held: dict[tuple[int, tuple], list[np.ndarray]] = {}
    for slot, columns in registers:
        place = depth if slot.layer is None else slot.layer
        held.setdefault((place, slot.path), []).append(columns)
    # With a residual a path may go around a layer: a node is a layer and the path before it.
    heads = sorted({step[1] for path in leaves for step in path})
    around = any(len(path) < depth for path in leaves)
    order = sorted(leaves, key=lambda path: _digits(path, depth))
    height = {(depth, path): -float(row) for row, path in enumerate(order)}
    for layer in reversed(range(depth)):
        below: dict[tuple, list[float]] = {}
        for (level, path), y in height.items():
            if level == layer + 1:
                below.setdefault(tuple(s for s in path if s[0] < layer), []).append(y)
        height |= {(layer, path): float(np.mean(ys)) for path, ys in below.items()}
    for (level, path), y in height.items():
        if level:
            before = tuple(step for step in path if step[0] < level - 1)
            skipped = before == path
            head = None if skipped else path[-1][1]
            axes.plot(
                [level - 1, level],
                [height[level - 1, before], y],
                color=tone["pale"] if head is None else colours[head % len(colours)],
                ls=DASHES[0 if head is None else head // len(colours) % len(DASHES)],
                lw=0.8 if head is None else 1.3,
                zorder=1,
            )
    for (level, path), y in height.items():
        axes.plot([level], [y], "o", ms=3.5, color=tone["ink"], mew=0, zorder=2)
        if (level, path) in held:
            axes.annotate(
                spans(np.concatenate(held[level, path])),
                (level, y),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                size=7,
                bbox=dict(boxstyle="square,pad=0.15", fc=tone["paper"], ec="none"),
            )
    names = [f"layer {layer}" for layer in range(depth)]
    axes.set_xticks(range(depth + 1), [*names, "output"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-0.1, depth + 0.45)
    axes.set_ylim(-len(leaves), 1)
    axes.set_title(title)
    lines = [
        Line2D(
            [], [], color=colours[head % len(colours)], lw=1.3,
            ls=DASHES[head // len(colours) % len(DASHES)], label=f"head {head}",
        )
        for head in heads
    ]  # fmt: skip
    if around:
        lines.append(Line2D([], [], color=tone["pale"], lw=0.8, label="around the layer"))
    axes.legend(
        handles=lines, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, borderaxespad=0.6,
        handlelength=1.8, columnspacing=1.2, handletextpad=0.5, borderpad=0,
    )  # fmt: skip
    return axes


def _digits(path: Sequence[tuple[int, int]], depth: int) -> list[int]:
    """The head of each layer, -1 where the path goes around it."""
    through = dict(path)
    return [through.get(layer, -1) for layer in range(depth)]
