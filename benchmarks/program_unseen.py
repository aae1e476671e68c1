"""How many of the strings that learnt programs were tested on their training had drawn.

    python benchmarks/program_unseen.py [medium paper]

Draws again, from their keys, the training and the test of every cell of programs_PRESET.json in
benchmarks/results. Prints the share of the test's draws that the training had not drawn, what the
best constant answer gets on them, and the least accuracy on them that the kept number of wrong
answers allows: if all of those were given there. Mean over seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from universal.evaluation import TEST, digests, drawn, stream_of
from universal.presets import PRESETS

RESULTS = Path(__file__).parent / "results"


def seen(cell, task, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the test's draws, -1 where none is asked for, and which draws are unseen."""
    batch, number = cell["settings"]["batch"], 0
    old = drawn(task, seed, cell["steps"], batch)
    labels, unseen = [], []
    while number * batch < cell["settings"]["test"]:
        parts = task.draw(stream_of((seed,), TEST, 0, number)[0], batch)
        ids, classes, mask = map(np.asarray, parts)
        labels.append(np.where(mask, classes, -1))
        unseen += [one not in old for one in digests(ids, task)]
        number += 1
    return np.concatenate(labels), np.asarray(unseen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", default=["medium", "paper"])
    for preset in parser.parse_args().presets:
        doc = json.loads((RESULTS / f"programs_{preset}.json").read_text())
        tasks = {cell.name: cell.sequences for cell in PRESETS[preset]().cells}
        for cell in doc["cells"]:
            found = []
            for seed, test in zip(cell["seeds"], cell["test"]):
                labels, unseen = seen(cell, tasks[cell["name"]], seed)
                assert np.sum(labels >= 0) == test["asked"], "these are not the test's draws"
                asked = labels[unseen]
                counts = np.bincount(asked[asked >= 0])
                least = 1 - (test["asked"] - test["right"]) / counts.sum()
                found.append([unseen.mean(), counts.max() / counts.sum(), max(least, 0)])
            share, guess, least = 100 * np.mean(found, axis=0)
            print(
                f"{preset} {cell['name']}: {share:.1f} % unseen; of those a guess is right of "
                f"{guess:.1f} %, the program of at least {least:.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
