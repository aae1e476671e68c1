"""How trained models move to their continuous limit, by family.

    python benchmarks/continuous_limit.py [MODELS ...] --golden tests/data/golden
        [--tokens 24] [--tolerance 1e-5] [--no-gradients] [--out FILE.md]

The embedded model (trained and untrained) comes first, then every MODEL (a folder, hub id or .gguf
file), then the tiny random checkpoint of every family in --golden. Weights over depth are constant
within a layer, and linear between layers. Text: `svflow.data.PASSAGE`; the references' own ids for
folders with a reference.npz.

Columns: the distance |x - y| / |y| of the last state from the limit y at the steps 1 (the model's
own layers), 1/2, 1/4 and 1/8; the order between the last two; layers, and evaluations of the
velocity by Tsit5 at ten times the tolerance and at the tolerance; how far apart these two are; the
cross-entropy of the next token in nats, of the model, then of its limit; the error of adjoint
gradients (backwards in time, nothing stored) against those through the steps, and the cosine of the
gradient through the model's layers with that of the limit. The gradient is that of the last state's
inner product with a fixed random direction.

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

import svflow as sv
from svflow.portrait import loss_absent
from svflow.score.limit import distance, gradients, limit

DTS = (1, 0.5, 0.25, 0.125)


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


def study(name: str, model, ids, tolerance: float, with_gradients: bool) -> list[dict[str, Any]]:
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
        if with_gradients:
            cotangent = jax.random.normal(jax.random.key(0), x0.shape, x0.dtype)
            try:
                g = gradients(flow, x0, cotangent, tolerance=tolerance)
                row |= dict(adjoint_error=g.error, cosine=g.cosine)
            except (ValueError, RuntimeError) as error:
                print(f"{name}, {kind}: gradients: {error}", flush=True)
        rows.append(row)
        print(line(row), flush=True)
    if len(limits) == 2:
        apart = float(distance(limits["linear"], limits["constant"]))
        for row in rows:
            row["limits_apart"] = apart
    return rows


def number(value) -> str:
    return "" if value is None else f"{value:.3g}"


def line(row) -> str:
    cells = [
        row["model"],
        row["weights"],
        *(number(g) for g in row["gap"]),
        f"{row['order']:.2f}",
        f"{row['layers']} / {row['evaluations'][0]} / {row['evaluations'][1]}",
        number(row["reference_gap"]),
        " → ".join(number(row[key]) for key in ("loss", "limit_loss") if row[key] is not None),
        number(row.get("adjoint_error")),
        number(row.get("cosine")),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows: list[dict[str, Any]] = []

    def add(name, model, ids, with_gradients=True):
        with_gradients = with_gradients and not given.no_gradients
        rows.extend(study(name, model, ids, given.tolerance, with_gradients))

    embedded = str(sv.data.default_model_path())
    ids = ids_of(embedded, given.tokens)
    model = sv.load(embedded, dtype=jnp.float64)
    add("embedded", model, ids)
    rngs = nnx.Rngs(sv.data.training_record()["init_seed"])
    add("embedded, untrained", sv.Transformer(model.config, rngs=rngs, dtype=jnp.float64), ids)
    for source in given.models:
        model = sv.load(source)
        small = model.flow.width * model.flow.depth < 4000
        add(Path(source).stem, model, ids_of(source, given.tokens), small)
    for folder in sorted(given.golden.iterdir()) if given.golden else []:
        model = sv.load(folder, dtype=jnp.float64)
        add(f"golden {folder.name}", model, ids_of(str(folder), given.tokens))
    if given.out is None:
        return
    head = ["model", "weights", *(f"dt {dt:g}" for dt in DTS), "order", "layers / evaluations"]
    head += ["reference off", "loss", "adjoint error", "gradient cosine"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *map(line, rows)]
    before = given.out.read_text() if given.out.exists() else ""
    body = "\n" + "\n".join(lines) + "\n"
    given.out.write_text(before.split("## Tables\n")[0] + "## Tables\n" + body)
    record = dict(jax=jax.__version__, tokens=given.tokens, tolerance=given.tolerance, rows=rows)
    given.out.with_suffix(".json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
