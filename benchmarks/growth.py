"""How time and memory grow, beside what the operations and bytes grow by.

    python -m benchmarks.growth [--rounds 5] [--quick] [--out benchmarks/results/growth]

Writes FILE.json and FILE.png, where --out is FILE. One size of an untrained GPT-2 shape is changed
at a time: depth, width, tokens, samples (texts at once), heads; and the width of a frozen Jacobian.
Times are medians of interleaved calls; memory is what XLA plans for temporaries and the result, the
same on every machine. Exponents are the slopes of least-squares lines through logarithms. What is
expected is the slope of a line through the counted operations, or bytes, of the same sizes: where
two terms matter, as for tokens, it lies between theirs.

"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

import svflow as sv
from benchmarks import machine, models, rows, timing
from svflow import plotting


class Shape(NamedTuple):
    """What is changed, one at a time."""

    depth: int = 4
    width: int = 256
    tokens: int = 128
    samples: int = 1
    heads: int = 4


class Curve(NamedTuple):
    """One size against time and memory.

    Arguments:
        name: what grows.
        task: "states" or "jacobian".
        base: the other sizes.
        values: of the size that changes.
    """

    name: str
    task: str
    base: Shape
    values: tuple[int, ...]


CURVES = (
    Curve("depth", "states", Shape(), (4, 8, 16, 32, 64)),
    Curve("width", "states", Shape(tokens=64, heads=8), (256, 512, 1024, 2048)),
    Curve("tokens", "states", Shape(depth=2), (64, 128, 256, 512, 1024, 2048)),
    Curve("samples", "states", Shape(), (1, 2, 4, 8, 16, 32)),
    Curve("heads", "states", Shape(depth=2, tokens=1024), (1, 2, 4, 8, 16, 32)),
    Curve("width", "jacobian", Shape(depth=1, tokens=64, heads=8), (256, 512, 1024, 2048)),
)
QUICK = tuple(
    curve._replace(
        base=Shape(depth=curve.base.depth if curve.task == "jacobian" else 2, width=16, tokens=8),
        values=(8, 16) if curve.name == "width" else (1, 2),
    )
    for curve in CURVES
)


def operations(task: str, shape: Shape) -> float:
    """Multiplications and additions of the matrix products, and the scores' exponentials.

    A layer's weights are 12 width^2; a column of a Jacobian meets the keys and values of every
    token once more.
    """
    depth, width, tokens, samples, heads = shape
    if task == "jacobian":
        return 2 * width * (12 * width**2 + 2 * tokens * width) + heads * tokens
    scores = 4 * tokens**2 * width + heads * tokens**2
    return samples * depth * (24 * tokens * width**2 + scores)


def held(task: str, shape: Shape) -> float:
    """Bytes of the result and of the largest temporaries in float32.

    All states; one layer's weights, which the loop takes out of the stack; and of one layer, at
    its widest, the scores and their softmax or the feed-forward layer's units before and after
    their activation. Of a Jacobian, its columns on their way through that layer.
    """
    depth, width, tokens, samples, heads = shape
    if task == "jacobian":
        return 4 * (width**2 + max(2 * 4 * width, 2 * heads * tokens) * width)
    layer = max(2 * heads * tokens**2, 2 * 4 * width * tokens)
    return 4 * (samples * ((depth + 1) * tokens * width + layer) + 12 * width**2)


def program(task: str, shape: Shape) -> tuple[Any, tuple[Any, ...]]:
    """A jitted function, and its arguments."""
    size = dict(n_embd=shape.width, n_layer=shape.depth, n_head=shape.heads)
    flow = models.model(models.GPT2 | size | dict(vocab_size=8, n_positions=8)).flow
    key = jax.random.key(0)
    x = jax.random.normal(key, (shape.samples, shape.tokens, shape.width), jnp.float32)
    if task == "jacobian":
        return jax.jit(lambda flow, x: sv.jacobian(flow, 0, x[0])), (flow, x)
    return jax.jit(jax.vmap(lambda flow, x: sv.simulate(flow, x).xs, (None, 0))), (flow, x)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of values ~ sizes^p by least squares in logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def measured(curve: Curve, rounds: int) -> dict[str, Any]:
    """Sizes, seconds and bytes, with the fitted exponents and the expected ones."""
    shapes = [curve.base._replace(**{curve.name: value}) for value in curve.values]
    calls, sizes, compile_s = {}, [], []
    for value, shape in zip(curve.values, shapes):
        function, arguments = program(curve.task, shape)
        with timing.Compiling() as compiling:
            compiled = function.lower(*arguments).compile()
        compile_s.append(compiling.seconds)
        plan = compiled.memory_analysis()
        sizes.append(plan.temp_size_in_bytes + plan.output_size_in_bytes)
        calls[str(value)] = functools.partial(compiled, *arguments)
    with machine.Others() as others:
        times = timing.race(calls, rounds)
    taken = [times[str(value)] for value in curve.values]
    counted = [operations(curve.task, shape) for shape in shapes]
    expected = [held(curve.task, shape) for shape in shapes]
    return dict(
        name=curve.name,
        task=curve.task,
        base=curve.base._asdict(),
        values=curve.values,
        seconds=taken,
        bytes=sizes,
        compile_s=compile_s,
        operations=counted,
        expected_bytes=expected,
        time_exponent=slope(curve.values, taken),
        time_expected=slope(curve.values, counted),
        memory_exponent=slope(curve.values, sizes),
        memory_expected=slope(curve.values, expected),
        load=dict(others=others.cores, busy=others.busy),
    )


def title(curve: dict[str, Any]) -> str:
    what = {"states": "Forward pass", "jacobian": "Frozen Jacobian"}[curve["task"]]
    return f"{what}, {curve['name']}"


def table(curves: Sequence[dict[str, Any]]) -> str:
    head = ("curve", "sizes", "time ~ size^", "expected", "memory ~ size^", "expected", "")
    cells = [head] + [
        (
            title(c), f"{c['values'][0]} .. {c['values'][-1]}",
            *(f"{c[f'{a}_{b}']:.2f}" for a in ("time", "memory") for b in ("exponent", "expected")),
            "! under load" if c["load"]["busy"] else "",
        )
        for c in curves
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(x, widths)).rstrip() for x in cells)


def picture(figure: Figure, curves: Sequence[dict[str, Any]], *, theme: str) -> None:
    """Time above, memory below, a column for each curve; the slope that is expected dashed."""
    colours = plotting.COLOURS[theme]
    figure.set_size_inches(2.0 * plotting.WIDE / 1.6, 5.2)
    grid = figure.subplots(2, len(curves), squeeze=False)
    for column, curve in enumerate(curves):
        sizes = np.asarray(curve["values"], float)
        parts = (
            ("time", np.asarray(curve["seconds"]), np.asarray(curve["operations"]), "Seconds"),
            ("memory", np.asarray(curve["bytes"]), np.asarray(curve["expected_bytes"]), "Bytes"),
        )
        for line, (kind, found, model, unit) in enumerate(parts):
            axes = grid[line, column]
            scale = np.exp(np.mean(np.log(found) - np.log(model)))
            pale = plotting.THEMES[theme]["pale"]
            expectation = "counted operations" if kind == "time" else "counted bytes"
            axes.plot(sizes, scale * model, "--", color=pale, lw=1.2, label=expectation)
            axes.plot(
                sizes, found, color=colours[line], marker=plotting.MARKERS[line], ms=4,
                label="measured" if kind == "time" else "the compiled program's",
            )  # fmt: skip
            low, high = found.min() / 1.5, found.max() * 1.5
            spare = max(1.0, np.sqrt(10 * low / high))  # a decade at least: noise stays small
            axes.set(xscale="log", yscale="log", ylim=(low / spare, high * spare))
            axes.set_xticks(sizes, [f"{value:g}" for value in sizes], rotation=45)
            axes.minorticks_off()
            fitted, expected = curve[f"{kind}_exponent"], curve[f"{kind}_expected"]
            text = f"{fitted:.2f}, expected {expected:.2f}"
            axes.set_title(
                f"{title(curve)}\n{text}" if line == 0 else text,
                fontsize="small",
                loc="left",
            )
            if column == 0:
                axes.set_ylabel(unit)
                axes.legend(loc="upper left", fontsize="x-small", handlelength=1.5)
            if line == 1:
                axes.set_xlabel(curve["name"].capitalize())
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "growth")
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    try:
        rows.check_writable(given.out.with_suffix(".json"))
    except OSError as error:
        parser.error(f"--out: {error}")
    curves = []
    for curve in QUICK if given.quick else CURVES:
        curves.append(measured(curve, 1 if given.quick else given.rounds))
        print(table(curves[-1:]).splitlines()[-1], flush=True)
    document = dict(machine=machine.description(), quick=given.quick, curves=curves)
    given.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    with matplotlib.rc_context(plotting.style("light")):
        figure = Figure()
        picture(figure, curves, theme="light")
        figure.savefig(given.out.with_suffix(".png"))
    print("\n" + table(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
