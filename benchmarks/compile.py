"""Compile time against depth: the layers are one loop, so it must not grow with their number.

    python benchmarks/compile.py [--depths 12 48] [--rounds 5]

Each round lowers and compiles `sv.simulate` of an untrained GPT-2-small-shaped model afresh, the
depths in turn. What a user waits for is the sum: tracing in Python and compiling in XLA.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import svflow as sv


def model_of(depth: int) -> sv.Transformer:
    hf = dict(
        model_type="gpt2", vocab_size=1024, n_positions=64, n_embd=768, n_layer=depth, n_head=12
    )
    config = sv.TransformerConfig.from_hf(hf)
    return jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))


def compile_seconds(model: sv.Transformer) -> float:
    jax.clear_caches()
    x0 = jax.ShapeDtypeStruct((64, 768), jnp.float32)
    start = time.perf_counter()
    jax.jit(lambda flow, x0: sv.simulate(flow, x0).xs).lower(model.flow, x0).compile()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs=2, default=[12, 48])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    models = {depth: model_of(depth) for depth in options.depths}
    times: dict[int, list[float]] = {depth: [] for depth in models}
    for _ in range(options.rounds + 1):
        for depth, model in models.items():
            times[depth].append(compile_seconds(model))
    medians = {depth: float(np.median(t[1:])) for depth, t in times.items()}
    shallow, deep = medians.values()
    for depth, median in medians.items():
        print(f"{depth:3d} layers: {median:.3f} s")
    print(f"ratio {deep / shallow:.3f}")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(dict(jax=jax.__version__, seconds=medians, ratio=deep / shallow), file)


if __name__ == "__main__":
    main()
