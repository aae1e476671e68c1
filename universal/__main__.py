"""`python -m universal`: programs learnt for fixed machines, as a table, JSON and pictures."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from filelock import FileLock
from matplotlib.figure import Figure
from tqdm import tqdm

from svflow.plotting import style
from svflow.resumable import replaced
from universal.accuracy import Accuracy
from universal.components import Recipe
from universal.evaluation import evaluate
from universal.learnt import Trained
from universal.presets import PAPER, PRESETS, Cell
from universal.saved import described
from universal.solved import singular_values_of, solved
from universal.training import train
from universal.training_plot import accuracy_over_steps, attention_maps, singular_values


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; 0, or 2 for bad input, or 130 when interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(_parser().parse_args(given), given)
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        print(f"universal: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("universal: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="universal",
        description="Learns programs (embeddings and output) for fixed transformers, on Dyck-1 and "
        "k-hop, for machines with and without other components: accuracy on fresh sequences, mean "
        "and spread over seeds.",
    )
    parser.add_argument(
        "--preset",
        default="small",
        help=f"one of {', '.join(PRESETS)} (default: small, minutes on two cores)",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=lambda path: Path(path).expanduser(),
        help="of results and of what a killed run continues from (default: programs/PRESET)",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="only cells whose name contains this; a name is the "
        "task (dyck-1, k-hop), the machine (sparse, random, full; trained, shuffled, initialised) "
        "and the components (attention, norm, mlp; blocks), as in dyck-1-sparse-attention",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="how many, instead of the preset's")
    return parser


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> None:
    if arguments.preset not in PRESETS:
        names = ", ".join(map(repr, PRESETS))
        raise ValueError(f"there is no preset {arguments.preset!r}: there are {names}")
    if arguments.seeds is not None and not 1 <= arguments.seeds <= 1000:  # all train at once
        raise ValueError(f"--seeds must be within 1 .. 1000, got {arguments.seeds}")
    make = PRESETS[arguments.preset]
    preset = make() if arguments.seeds is None else make(arguments.seeds)
    cells = [cell for cell in preset.cells if (arguments.only or "") in cell.name]
    if not cells:
        names = ", ".join(cell.name for cell in preset.cells)
        raise ValueError(f"no cell's name contains {arguments.only!r}: there are {names}")
    out = arguments.out or Path("programs") / arguments.preset
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder")
    run = dict(
        command=shlex.join(["python", "-m", "universal", *given]),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
    )
    results = out / "results.json"
    doc = _kept(results, arguments.preset, preset.cells)
    drawn = ["accuracy.png", "singular_values.png"]
    for cell in cells:
        bar = functools.partial(tqdm, desc=cell.name, delay=2, leave=False, disable=None)
        path = out / f"{cell.name}.npz"
        try:
            learnt = train(
                cell.recipe, cell.sequences, cell.settings, seeds=range(preset.seeds), out=path,
                progress=bar,
            )  # fmt: skip
            before = next((one for one in doc["cells"] if one["name"] == cell.name), None)
            now = run | entry(cell, learnt, before)
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"{cell.name}: {error}") from error
        with FileLock(out / ".results.json.lock"):  # other runs add cells of their own
            doc = _kept(results, arguments.preset, preset.cells)
            kept = {one["name"]: one for one in [*doc["cells"], now]}
            doc["cells"] = [kept[one.name] for one in preset.cells if one.name in kept]
            with replaced(results) as file:
                file.write((json.dumps(doc, indent=1) + "\n").encode())
            pictures(doc["cells"], out)
        drawn += attention_picture(cell, learnt, out)
    print(table(doc))
    print(f"\n{results}, a file of each cell, {', '.join(drawn)}")


def _kept(path: Path, preset: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """The table of earlier runs of a preset: of those of its cells that are what they are now.

    Raises ValueError for a file that is none, or is of another preset.
    """
    doc: dict[str, Any] = dict(preset=preset, cells=[])
    if not path.exists():
        return doc
    asked = {cell.name: json.loads(json.dumps(_asked(cell))) for cell in cells}
    try:
        before = json.loads(path.read_text())
        other = before["preset"]
        known = [one for one in before["cells"] if one["name"] in asked]
        doc["cells"] = [one for one in known if one | asked[one["name"]] == one]
        for one in doc["cells"]:
            _check_kept(one)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of this command: {error}") from error
    if other != preset:
        raise ValueError(f"{path} is of preset {other!r}, not {preset!r}; give another --out")
    return doc


def _check_kept(cell: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where a table or a picture would fail on a cell."""
    table(dict(cells=[cell]))
    for name in ("command", "seconds", "test", "unseen"):
        cell[name]
    names = "validation", "evaluated", "singular_values"
    curves, steps, values = (np.asarray(cell[name], float) for name in names)
    fits = steps.ndim == 1 and curves.shape == (len(steps), len(cell["seeds"]))
    if not fits or values.ndim != 1 or not (values[:1] > 0).any():
        raise ValueError(f"{cell['name']} has no curves")


def _asked(cell: Cell) -> dict[str, Any]:
    """What a cell is, whatever it has learnt."""
    recipe = cell.recipe
    return dict(
        name=cell.name,
        task=cell.task,
        components=cell.components,
        machine=cell.machine,
        draws=cell.sequences.name,
        width=(recipe[0] if isinstance(recipe, tuple) else recipe).width,
        recipe=described(recipe),
        settings=asdict(cell.settings),
    )


def entry(cell: Cell, learnt: Trained, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """What JSON keeps of a cell; `before` is what it has kept of it, if anything."""
    test = _judged(learnt.test)
    if before is not None and before["test"] == test["test"]:  # nothing is drawn again
        unseen = before["unseen"]
    else:
        found = evaluate(
            learnt, cell.sequences, sequences=cell.settings.test, batch=cell.settings.batch,
            unseen=True,
        )  # fmt: skip
        unseen = dict(
            _judged(found),
            share=sum(one.sequences for one in found) / sum(one.draws for one in found),
            guess=sum(one.commonest for one in found) / sum(one.asked for one in found),
        )
    return _asked(cell) | dict(
        seeds=learnt.settings["seeds"],
        paper=PAPER.get((cell.task, cell.components, cell.machine)),
        **test,
        unseen=unseen,
        steps=len(learnt.losses),
        seconds=learnt.seconds,
        evaluated=learnt.evaluated.tolist(),
        validation=learnt.validation.tolist(),
        last_loss=learnt.losses[-1].tolist(),
        singular_values=singular_values_of(learnt).tolist(),
    )


def _judged(test: Sequence[Accuracy]) -> dict[str, Any]:
    """Mean and spread over seeds, and the ends of their intervals."""
    shares = np.asarray([one.value for one in test])
    return dict(
        mean=float(shares.mean()),
        spread=float(shares.std(ddof=1)) if len(shares) > 1 else None,
        low=min(one.interval[0] for one in test),
        high=max(one.interval[1] for one in test),
        claim=all(one.claim for one in test),
        test=[dict(one._asdict(), interval=[*one.interval]) for one in test],
    )


def table(doc: dict[str, Any]) -> str:
    """The paper's table with its numbers in brackets, in percent; and of unseen strings alone."""
    cells = doc["cells"]
    note = (
        "accuracy in %, mean ± sd over seeds on fresh draws; from the lowest to the highest end of "
        "the seeds' 95 % intervals (Wilson)"
    )
    if any(c["paper"] for c in cells):
        note += "; (paper's number, at its own sizes)"
    if not all(c["claim"] for c in cells):
        note += "; * from fewer than 10 000 sequences: no claim"
    lines = [*_grid(cells, lambda c: _shown(c) + (f" ({c['paper']})" if c["paper"] else ""))]
    few = [c for c in cells if "unseen" in c and c["unseen"]["share"] < 0.99]
    if few:
        lines += ["", "the same, on draws alone that the training has not drawn:", ""]
        lines += _grid(few, lambda c: _shown(c["unseen"]) + _context(c["unseen"]))
        note += "; {guess: what the best constant answer gets on these, of: their share of draws}"
    return "\n".join([*lines, "", note])


def _grid(cells: Sequence[dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> list[str]:
    """Tasks and components by machines."""
    texts = {(c["task"], c["components"], c["machine"]): shown(c) for c in cells}
    machines = list(dict.fromkeys(machine for _, _, machine in texts))
    rows = [["", *machines]]
    for place in dict.fromkeys((task, components) for task, components, _ in texts):
        rows.append([", ".join(place), *(texts.get((*place, m), "") for m in machines)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)) for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return [line.rstrip() for line in lines]


def _shown(judged: dict[str, Any]) -> str:
    """What `_judged` makes, as text."""
    spread = "" if judged["spread"] is None else f" ± {100 * judged['spread']:.1f}"
    star = "" if judged["claim"] else "*"
    interval = f"{100 * judged['low']:.1f}..{100 * judged['high']:.1f}"
    return f"{100 * judged['mean']:.1f}{star}{spread}, {interval}"


def _context(unseen: dict[str, Any]) -> str:
    return f" {{guess {100 * unseen['guess']:.1f}, of {100 * unseen['share']:.1f}}}"


def pictures(cells: Sequence[dict[str, Any]], folder: Path) -> None:
    """Accuracy over steps and singular values of E, of all cells of a table."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(f"{cell['task']}, {cell['components']}", []).append(cell)
    grids: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Any]], Any]]] = {
        "accuracy.png": (
            accuracy_over_steps,
            lambda cell: (np.asarray(cell["evaluated"]), np.asarray(cell["validation"])),
        ),
        "singular_values.png": (
            singular_values,
            lambda cell: np.asarray(cell["singular_values"]),
        ),
    }
    with matplotlib.rc_context(style("light")):
        for name, (draw, values) in grids.items():
            columns = min(2, len(groups))
            rows = -(-len(groups) // columns)
            figure = Figure(figsize=(5.2 * columns, 3.2 * rows), dpi=150)
            for place, (title, group) in enumerate(groups.items()):
                curves = {cell["machine"]: values(cell) for cell in group}
                axes = figure.add_subplot(rows, columns, place + 1)
                draw(axes, curves, theme="light", title=title)
            figure.tight_layout()
            _save(figure, folder / name)


def attention_picture(cell: Cell, learnt: Trained, folder: Path) -> list[str]:
    """The attention on a solved sequence; its name, or none of a flow or where none is solved."""
    one = solved(learnt, cell.sequences) if isinstance(cell.recipe, Recipe) else None
    if one is None:
        return []
    path = folder / f"{cell.name}.attention.png"
    with matplotlib.rc_context(style("light")):
        figure = Figure(dpi=150)
        heading = f"{cell.task}, {cell.components}, {cell.machine}: attention"
        attention_maps(figure, one.attention, one.symbols, theme="light", title=heading)
        _save(figure, path)
    return [path.name]


def _save(figure: Figure, path: Path) -> None:
    with replaced(path) as file:
        figure.savefig(file, format="png")


if __name__ == "__main__":
    sys.exit(main())
