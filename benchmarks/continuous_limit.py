"""How trained models move to their continuous limit, by family.

    python benchmarks/continuous_limit.py [MODELS ...] --golden tests/data/golden
        [--tokens 16] [--tolerance 1e-5] [--out FILE.md]

The embedded model (trained and untrained) comes first, then every MODEL (a folder, hub id or .gguf
file), then, in a table by family, the tiny random checkpoint of every family in --golden. Weights
over depth are constant within a layer, and linear between layers. Text: `svflow.data.PASSAGE`; the
references' own ids for folders with a reference.npz.

Columns: the distance |x - y| / |y| of the last state from the limit y at the steps 1 (the model's
own layers), 1/2, 1/4 and 1/8; the order between the last two; layers, and evaluations of the
velocity by Tsit5 at ten times the tolerance and at the tolerance; how far apart these two are; the
cross-entropy of the next token in nats, of the model, then of its limit; the error of adjoint
gradients (backwards in time, nothing stored) against those through the steps; how far from the
start the state comes out that was solved backwards with them, |x - x0| / |x0|, or that it did not
arrive within 1024 steps; and the cosine of the gradient through the model's layers with that of the
limit. The gradient is that of the last state's inner product with a fixed random direction. By
family: first with weights constant within a layer, then linear between layers.

Small models are computed in float64, and MODELS in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pages import write_tables

import svflow as sv
from svflow.portrait import loss_absent
from svflow.score.limit import distance, gradients, limit

DTS = (1, 0.5, 0.25, 0.125)
STEPS = 1024  # Of an adaptive solve with gradients.


def ids_of(source: str, tokens: int) -> np.ndarray:
    reference = Path(source) / "reference.npz"
    if reference.exists():
        return np.load(reference)["input_ids"][0][:tokens]
    return np.asarray(sv.load_tokenizer(source).encode(sv.data.PASSAGE))[:tokens]


def loss(model, x, ids) -> float | None:
    if loss_absent(model.config) is not None:
        return None
    dtype = model.embedding.tokens[...].dtype
    scores = jax.nn.log_softmax(model.unembed(jnp.asarray(x[:-1], dtype)), axis=-1)
    return float(-jnp.mean(scores[jnp.arange(len(ids) - 1), jnp.asarray(ids[1:])]))


def study(name: str, model, ids, tolerance: float) -> list[dict[str, Any]]:
    x0 = model.embed(ids)
    end = sv.simulate(model.flow, x0, ts=[float(model.flow.depth)]).xs[-1]
    rows, limits = [], {}
    for kind in ("constant", "linear"):
        try:
            flow = model.flow.interpolated(kind)
            found = limit(flow, x0, dts=DTS, tolerance=tolerance)
        except ValueError as error:
            print(f"{name}, {kind}: {error}", flush=True)
            continue
        limits[kind] = found.xs[-1]
        row: dict[str, Any] = dict(
            model=name,
            family=model.config.family,
            norms=model.config.placement,
            dtype=str(x0.dtype),
            weights=kind,
            layers=model.flow.depth,
            gap=found.gap[:, -1].tolist(),
            gap_along_depth=found.gap[0].tolist(),
            order=float(found.order[-1]),
            evaluations=[found.coarse_evaluations, found.evaluations],
            reference_gap=float(found.reference_gap[-1]),
            loss=loss(model, np.asarray(end), ids),
            limit_loss=loss(model, found.xs[-1], ids),
        )
        cotangent = jax.random.normal(jax.random.key(0), x0.shape, x0.dtype)
        g = gradients(flow, x0, cotangent, tolerance=tolerance, max_steps=STEPS)
        arrived = bool(np.isfinite(g.drift))
        row |= dict(adjoint_error=g.error if arrived else None, cosine=g.cosine)
        row |= dict(start_missed_by=g.drift if arrived else None)
        rows.append(row)
        print(line(row), flush=True)
    if len(limits) == 2:
        apart = float(distance(limits["linear"], limits["constant"]))
        for row in rows:
            row["limits_apart"] = apart
    return rows


def number(value) -> str:
    return "" if value is None else f"{value:.3g}"


def joined(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def cells_of(row) -> list[str]:
    missed = row["start_missed_by"]
    return [
        *(number(g) for g in row["gap"]),
        f"{row['order']:.2f}",
        f"{row['layers']} / {row['evaluations'][0]} / {row['evaluations'][1]}",
        number(row["reference_gap"]),
        " → ".join(number(row[key]) for key in ("loss", "limit_loss") if row[key] is not None),
        number(row["adjoint_error"]),
        "did not arrive" if missed is None else number(missed),
        number(row["cosine"]),
    ]


def line(row) -> str:
    return joined([row["model"], row["weights"], *cells_of(row)])


def by_family(rows) -> list[str]:
    """One line per family, weights constant, then linear."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        first = mine[0]
        pairs = zip(*(cells_of(row) for row in mine))
        # Where layers share their weights both are the same.
        cells = [" ; ".join(dict.fromkeys(pair)) for pair in pairs]
        lines.append(joined([first["family"], first["norms"], *cells]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows: list[dict[str, Any]] = []

    def add(name, model, ids):
        rows.extend(study(name, model, ids, given.tolerance))

    embedded = str(sv.data.default_model_path())
    ids = ids_of(embedded, given.tokens)
    model = sv.load(embedded, dtype=jnp.float64)
    add("embedded", model, ids)
    rngs = nnx.Rngs(sv.data.training_record()["init_seed"])
    add("embedded, untrained", sv.Transformer(model.config, rngs=rngs, dtype=jnp.float64), ids)
    for source in given.models:
        add(Path(source).stem, sv.load(source), ids_of(source, given.tokens))
    count = len(rows)
    for folder in sorted(given.golden.iterdir()) if given.golden else []:
        model = sv.load(folder, dtype=jnp.float64)
        add(f"golden {folder.name}", model, ids_of(str(folder), given.tokens))
    if given.out is None:
        return
    head = [*(f"dt {dt:g}" for dt in DTS), "order", "layers / evaluations", "reference off"]
    head += ["loss", "adjoint error", "start missed by", "gradient cosine"]
    rule = "|---" * (len(head) + 2) + "|"
    lines = [joined(["model", "weights", *head]), rule, *map(line, rows[:count])]
    if rows[count:]:
        lines += ["", "By family, tiny random checkpoints:", ""]
        lines += [joined(["family", "norms", *head]), rule, *by_family(rows[count:])]
    write_tables(given.out, lines)
    record = dict(jax=jax.__version__, tokens=given.tokens, tolerance=given.tolerance, rows=rows)
    given.out.with_suffix(".json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
