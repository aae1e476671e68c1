"""How wide a machine has to be, how well conditioned its programs are, and what rounding them does.

    python benchmarks/machine_bounds.py [--seeds 10] [--out results/universal_bounds]

Writes the tables of FILE.md, everything below its line "## Tables", FILE.json with all numbers and
FILE_*.png with the pictures, where --out is FILE. The machine that runs it does not matter: nothing
is timed.

- paths: ranks of the path functions of random targets of width 1 (`ut.path_rank`);
- widths: random machines around their least width N (`ut.phase`);
- depth: the same shape with more and more layers, m = N to 2 N;
- robustness: perturbed and rounded programs of one target (`ut.robustness`, `ut.quantisation`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pages import write_tables

import universal as ut
from svflow import plotting
from universal import bounds_plot
from universal.bounds import random_target

PATHS = ((2, 2), (3, 2), (4, 2), (2, 3), (3, 3))
SHAPES = ((2, 2, 3, 1, 1), (2, 2, 3, 4, 1), (3, 2, 3, 1, 1), (2, 3, 3, 2, 1))
OTHERS = (("looped", (2, 2, 3, 1, 1)), ("residual", (2, 2, 3, 1, 1)))
DEPTHS, SLACKS = (1, 2, 3, 4, 5), (1.0, 1.1, 1.25, 2.0)
TARGET, TOKENS = (2, 2, 16, 4, 4), 16
NOTES = {
    "Path functions": (
        "Targets of width 1, 64 of each shape, float64. `smallest`: the smallest singular value of "
        "the functions X -> P_p X of all targets together, in units of the largest; `values`: that "
        "of the products of value weights; `bound`: the width they force; N: the least width of a "
        "random machine that has programs; `alone`: in how many targets their own functions are "
        "independent above rounding (1e-13), and the median of the smallest singular value there."
    ),
    "Width": (
        "`works`: output within 1e-6; medians over seeds but for `largest`, the largest error. "
        "`float32`: a run in float32 with the program solved in float64; `of target`: the target "
        "itself in float32."
    ),
    "Perturbed": (
        "Layers, heads, width, head width and output width of the target: 2, 2, 16, 4, 4. Medians "
        "of error / epsilon for small epsilon, all maps of the machine or the target perturbed at "
        "once, and the slope of the error from the smallest epsilon, 1e-7, to the next."
    ),
    "Rounded": (
        "Only E is rounded. int8 is symmetric, -127 to 127, with a scale for every column of E (a "
        "column of the machine's state) or for every row (a coordinate of the target's state). "
        "`of E` is |dE| / |E|; logits and output are relative to their largest entries."
    ),
}


def drawn(draw, path: Path) -> None:
    """Saves the figure that `draw` fills."""
    with matplotlib.rc_context(plotting.style("light")):
        figure = Figure()
        draw(figure)
        figure.savefig(path)


def plain(value):
    """What JSON takes: arrays as lists of four digits, named tuples as dictionaries."""
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.4g}") if np.isfinite(value) else None
    return value


def depth_picture(figure: Figure, found: list[ut.Phase]) -> None:
    places = [[int(np.argmax(one.widths >= s * one.least - 1e-6)) for one in found] for s in SLACKS]
    condition, error, single = (
        np.array([[getattr(o, name)[p] for o, p in zip(found, line)] for line in places])
        for name in ("condition", "error", "single")
    )
    own = np.array([one.target_single for one in found])
    bounds_plot.conditioning_picture(
        figure, DEPTHS, SLACKS, condition, error, single, own, theme="light"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    out = Path(__file__).parent / "results" / "universal_bounds"
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    key, out = jax.random.key(0), given.out
    parts, record = [], {}

    def add(title: str, text: str, picture: str | None, result) -> None:
        note = NOTES.get(title)
        parts.append(
            f"### {title}\n\n" + (f"{note}\n\n" if note else "") + f"```text\n{text}\n```\n"
        )
        if picture is not None:
            parts.append(f"![{title}]({out.name}_{picture}.png)\n")
        record[title] = plain(result)
        print(f"{title}\n{text}\n", flush=True)

    ranks = [ut.path_rank(key, *shape) for shape in PATHS]
    drawn(lambda f: bounds_plot.path_picture(f, ranks, theme="light"), f"{out}_paths.png")
    add("Path functions", ut.path_rank_table(ranks), "paths", ranks)

    phases = [ut.phase(key, *shape, seeds=given.seeds) for shape in SHAPES]
    drawn(lambda f: bounds_plot.phase_picture(f, phases, theme="light"), f"{out}_widths.png")
    add("Width", ut.phase_table(phases), "widths", phases)
    others = [ut.phase(key, *shape, seeds=given.seeds, kind=kind) for kind, shape in OTHERS]
    add("Width, looped and residual", ut.phase_table(others), None, others)

    deep = [
        ut.phase(key, layers, 2, 3, 1, 1, slacks=SLACKS, seeds=given.seeds) for layers in DEPTHS
    ]
    drawn(lambda f: depth_picture(f, deep), f"{out}_depth.png")
    add("Depth", ut.phase_table(deep), "depth", deep)

    target = random_target(key, *TARGET)
    x = jax.random.normal(jax.random.key(1), (TOKENS, TARGET[2]))
    machines = {"sparse": ut.sparse(*TARGET)}
    for slack in (1.0, 1.25, 2.0):
        label = f"random, m = {'' if slack == 1 else f'{slack:g} '}N"
        machines[label] = ut.random(jax.random.key(2), *TARGET, slack=slack)
    found = {n: ut.robustness(m, target, x, key=jax.random.key(3)) for n, m in machines.items()}
    more = {
        f"random, m = {slack:g} N, seed {seed}": ut.robustness(
            ut.random(jax.random.key(seed), *TARGET, slack=slack), target, x, key=jax.random.key(3)
        )
        for slack in (1, 1.25)
        for seed in range(10, 14)
    }
    rounded = {n: ut.quantisation(m, target, x) for n, m in machines.items()}
    drawn(
        lambda f: bounds_plot.robustness_picture(f, found, rounded, theme="light"),
        f"{out}_robustness.png",
    )
    add("Perturbed", ut.robustness_table(found | more), "robustness", found | more)
    add("Rounded", ut.quantisation_table(rounded), None, rounded)

    write_tables(out.with_suffix(".md"), parts)
    head = dict(jax=jax.__version__, numpy=np.__version__, seeds=given.seeds)
    out.with_suffix(".json").write_text(json.dumps(head | record) + "\n")


if __name__ == "__main__":
    main()
