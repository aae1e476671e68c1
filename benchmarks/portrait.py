"""The main job, `python -m svflow`, compilation included."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import jax
import numpy as np

import svflow as sv
from benchmarks.rows import Case, relative, row
from svflow.__main__ import main


def case(options) -> Case:
    folder = tempfile.TemporaryDirectory()

    def run():
        jax.clear_caches()
        out = Path(folder.name) / "portrait"
        with contextlib.redirect_stdout(io.StringIO()):
            status = main(["--out", str(out), *options])
        if status:
            raise ValueError(f"python -m svflow ended with {status}")
        return json.loads((out / "portrait.json").read_text())

    def check(document):
        net = sv.load(sv.data.default_model_path())
        xs = sv.simulate(net.flow, net.embed(np.asarray(document["ids"]))).xs
        states = np.asarray(xs, np.float64)
        states -= states.mean(axis=-1, keepdims=True)  # as its norms see them
        wanted = np.sqrt(np.mean(states**2, axis=-1)).mean(axis=-1)
        return relative(document["measures"]["norm"]["lines"]["state"]["mean"], wanted)

    return Case(ours=run, check=check)


row(
    "portrait/default",
    "python -m svflow on the embedded model, compilation included",
    case,
    full=dict(options=()),
    quick=dict(
        options=("--max-tokens", "8", "--no-spectra", "--no-power", "--no-score", "--no-topology")
    ),
    tolerance=1e-4,
    most_seconds=60,
    rounds=2,
)
