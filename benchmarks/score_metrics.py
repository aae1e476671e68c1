"""The metrics of the score flow against a forward pass of the same model and text.

    python benchmarks/score_metrics.py [MODELS ...] [--tokens 128 256] [--rounds 5] [--out FILE]

The embedded model comes first, then every MODEL (a folder, hub id or .gguf file). Equality first:
the state that the metrics' pass ends in is the forward pass's to rounding. Then both, jitted, take
turns on the same cores; medians over rounds. float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import race, seconds

import svflow as sv
from svflow.score.metrics import _pass, exactly


@jax.jit
def forward(model, ids):
    return model(ids)


def measure(source: str, tokens: int, rounds: int) -> dict:
    model = sv.load(source)
    tokenizer = sv.load_tokenizer(source)
    ids = np.asarray(tokenizer.encode(" ".join([sv.data.PASSAGE] * 8)))
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, not {tokens}")
    ids = jnp.asarray(ids[:tokens])
    first = seconds(lambda: exactly(_pass, model, ids))
    (_, end) = exactly(_pass, model, ids)
    with jax.default_matmul_precision("highest"):
        expected = sv.simulate(model.flow, model.embed(ids)).xs[-1]
    error = float(jnp.max(jnp.abs(end - expected)) / jnp.sqrt(jnp.mean(expected**2)))
    if not error < 1e-3:
        raise SystemExit(f"the states differ: {error}")
    medians = race(
        dict(
            metrics=lambda: exactly(_pass, model, ids),
            forward=lambda: forward(model, ids),
        ),
        rounds,
    )
    return dict(
        model="embedded" if source == str(sv.data.default_model_path()) else Path(source).stem,
        tokens=tokens,
        metrics_s=medians["metrics"],
        forward_s=medians["forward"],
        ratio=medians["metrics"] / medians["forward"],
        compile_s=first,
        state_error=error,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for source in [str(sv.data.default_model_path()), *given.models]:
        for tokens in given.tokens:
            rows.append(measure(source, tokens, given.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        head = dict(jax=jax.__version__, device=jax.devices()[0].device_kind)
        given.out.write_text(json.dumps(head | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
