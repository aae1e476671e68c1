"""The search for how programs are learnt: rates, scales and shapes, judged by validation alone.

    python benchmarks/program_search.py TASK MACHINE --folder FOLDER [--components PART]
        [--pairs 30 | --letters 100 --alphabet 4 --hops 16] [--layers 2] [--heads 2 4] [--widths 16]
        [--rates 1e-3 3e-3 1e-2] [--scales 0.3 1] [--decays 1e-3] [--steps 2000] [--batch 256]
        [--seeds 1] [--out FILE.json]

TASK is dyck-1 or k-hop, PART attention, norm or mlp, MACHINE sparse, random or full, or a language
model's blocks, whose sizes are their own: trained, shuffled or initialised. Every combination is
trained, in a file of its own in FOLDER, from which a killed search goes on; a combination that
FOLDER holds is read. The table is sorted by the best validation accuracy, mean over seeds;
validation sequences come from a stream of their own, and no test is looked at here. With --out the
rows join those of the file, a combination once.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
from pathlib import Path

import jax
from tqdm import tqdm

import universal as ut
from universal.components import MACHINES
from universal.presets import BLOCKS, language_models
from universal.saved import described

COLUMNS = ("task", "components", "machine", "layers", "heads", "head_width", "width", "rate",
           "scale", "decay", "batch", "steps", "best", "last", "seconds")  # fmt: skip


def combinations(given):
    """(row, recipe or flow, task, settings) of every combination."""
    if given.task == "dyck-1":
        task = ut.dyck1_task(given.pairs)
    else:
        task = ut.k_hop_task(given.letters, given.alphabet, (0, given.hops))
    for machine, rate, scale, decay in itertools.product(
        list(machines(given)), given.rates, given.scales, given.decays
    ):
        settings = ut.Settings(
            steps=given.steps, batch=given.batch, learning_rate=rate, scale=scale,
            warmup=min(given.warmup, given.steps // 10), weight_decay=decay, every=given.every,
            validation=1024, test=1,
        )  # fmt: skip
        drawn = isinstance(machine, ut.Recipe)
        one = machine[0] if isinstance(machine, tuple) else machine
        row = dict(
            task=task.name, components=given.components if drawn else BLOCKS,
            machine=given.machine, layers=one.layers if drawn else one.depth,
            heads=machine.heads if drawn else None,
            head_width=machine.head_width if drawn else None, width=one.width, rate=rate,
            scale=scale, decay=decay, batch=given.batch, steps=given.steps, seeds=given.seeds,
            recipe=described(machine),
            settings=dataclasses.asdict(settings),
        )  # fmt: skip
        yield row, machine, task, settings


def machines(given):
    """Recipes of every size, or the blocks of a language model."""
    if given.machine not in MACHINES:
        yield language_models(given.seeds)[given.machine]
        return
    parts = dict(residual=given.components != "attention", norm=given.components != "attention")
    parts["hidden"] = given.hidden if given.components == "mlp" else 0
    for layers, heads, width in itertools.product(given.layers, given.heads, given.widths):
        yield ut.Recipe(given.machine, layers, heads, width, width, **parts)


def key(row) -> str:
    """All that a row's numbers depend on."""
    return json.dumps([row[name] for name in ("task", "machine", "recipe", "settings", "seeds")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("dyck-1", "k-hop"))
    parser.add_argument("machine", choices=(*MACHINES, "trained", "shuffled", "initialised"))
    parser.add_argument("--components", choices=("attention", "norm", "mlp"), default="attention")
    parser.add_argument("--folder", type=Path, required=True)
    for name, default in dict(pairs=30, letters=100, alphabet=4, hops=16, hidden=256, steps=2000,
                              batch=256, warmup=200, every=200, seeds=1).items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, kind, values in (
        ("layers", int, [2]), ("heads", int, [2]), ("widths", int, [16]),
        ("rates", float, [1e-3, 3e-3, 1e-2]), ("scales", float, [1.0]), ("decays", float, [1e-3]),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=values)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for row, machine, task, settings in combinations(given):
        name = hashlib.sha256(key(row).encode()).hexdigest()[:12]
        path = given.folder / f"{given.task}_{given.machine}_{row['rate']:g}_{name}.npz"
        seeds = range(given.seeds)
        learnt = ut.train(machine, task, settings, seeds=seeds, out=path, progress=tqdm)
        curve = learnt.validation.mean(axis=1)
        row |= dict(best=float(curve.max()), last=float(curve[-1]), seconds=learnt.seconds)
        row |= dict(evaluated=learnt.evaluated.tolist(), validation=learnt.validation.tolist())
        rows.append(row)
        print({name: row[name] for name in COLUMNS}, flush=True)
    rows.sort(key=lambda row: -row["best"])
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name])
                         for name in COLUMNS))  # fmt: skip
    if given.out:
        old = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        fresh = {key(row) for row in rows}
        rows += [row for row in old if key(row) not in fresh]
        given.out.write_text(json.dumps(dict(jax=jax.__version__, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
