"""The power flow against loops, and its attention in chunks against its bounds.

    python benchmarks/power.py [--part runs] [--part long] [--runs 1000] [--batch 50]
        [--run-layers 500] [--tokens 65536] [--layers 50] [--heads 1] [--rounds 5]
        [--out FILE.json]

Equality is checked first; the contestants are interleaved in one run on the same cores, medians
over rounds. float32 throughout, NumPy's own float64 besides.

- runs: independent runs of 64 tokens, width 64, 4 heads, as one jitted call (`jax.lax.map` of
  `jax.vmap` over --batch runs, which keeps a batch's scores in the caches; --batch 0: one
  `jax.vmap` of all), against the loop over runs, layers and heads in NumPy (timed on a few runs
  and layers, since all cost the same), NumPy batched over the runs of a chunk, and PyTorch's bmm.
- long: full attention over --tokens tokens of width 64, in a process of its own: seconds a layer
  and peak memory, against its matrix products alone at the rate measured on the same shapes and as
  many exponentials; and at 2048 tokens the equality with the dense path.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from timing import race, seconds

import svflow as sv
from svflow import attention
from svflow.power.flow import PowerFlow

WIDTH = 64
SAMPLE = 8  # Runs that the NumPy loop is timed on.
SAMPLE_LAYERS = 20  # Layers that the peers are timed on.


def weights_of(heads: int, seed: int = 0) -> list[np.ndarray]:
    random, head = np.random.default_rng(seed), WIDTH // heads
    shapes = [(heads, WIDTH, head)] * 3 + [(heads, head, WIDTH)]
    return [(random.normal(size=s) / s[-2] ** 0.5).astype(np.float32) for s in shapes]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def numpy_loop(weights, x0, layers: int):
    query, key, value, output = weights
    scale = np.asarray(query.shape[-1] ** -0.5, x0.dtype)
    ends = []
    for x in x0:
        for _ in range(layers):
            update = np.zeros_like(x)
            for h in range(len(query)):
                a = softmax((x @ query[h]) @ (x @ key[h]).T * scale)
                update += a @ (x @ value[h]) @ output[h]
            x = unit(x + update)
        ends.append(x)
    return np.stack(ends)


def numpy_batched(weights, x0, layers: int, batch: int):
    query, key, value, output = weights
    scale = np.asarray(query.shape[-1] ** -0.5, x0.dtype)
    ends = []
    for start in range(0, len(x0), batch):
        x = x0[start : start + batch]
        for _ in range(layers):
            y = x[:, None]
            a = softmax((y @ query) @ (y @ key).swapaxes(-1, -2) * scale)
            x = unit(x + (a @ (y @ value) @ output).sum(axis=1))
        ends.append(x)
    return np.concatenate(ends)


def torch_batched(weights, x0, layers: int, batch: int):
    import torch

    query, key, value, output = (torch.tensor(w) for w in weights)
    heads, width, head = query.shape
    merged = torch.cat([w.permute(1, 0, 2).reshape(width, -1) for w in (query, key, value)], 1)
    out = output.reshape(-1, width)
    ends = []
    with torch.no_grad():
        for start in range(0, len(x0), batch):
            x = torch.tensor(x0[start : start + batch])
            runs, tokens, _ = x.shape

            def split(a, runs=runs, tokens=tokens):
                a = a.reshape(runs, tokens, heads, head).transpose(1, 2)
                return a.reshape(runs * heads, tokens, head)

            for _ in range(layers):
                q, k, v = map(split, (x @ merged).split(heads * head, dim=-1))
                a = torch.softmax(torch.bmm(q * head**-0.5, k.transpose(1, 2)), dim=-1)
                mixed = torch.bmm(a, v).reshape(runs, heads, tokens, head).transpose(1, 2)
                x = x + mixed.reshape(runs, tokens, -1) @ out
                x = x / x.norm(dim=-1, keepdim=True)
            ends.append(x)
    return torch.cat(ends).numpy()


@functools.partial(jax.jit, static_argnames="batch")
def ends_of(flow, x0, batch: int):
    def end(x):
        return sv.simulate(flow, x, ts=[float(flow.depth)]).xs[-1]

    return jax.lax.map(end, x0, batch_size=batch) if batch else jax.vmap(end)(x0)


def runs(count: int, layers: int, batch: int, rounds: int, tokens: int = 64, heads: int = 4):
    import torch

    weights = weights_of(heads)
    random = np.random.default_rng(1)
    x0 = unit(random.normal(size=(count, tokens, WIDTH))).astype(np.float32)
    few = x0[:SAMPLE]
    flow = PowerFlow(*weights, depth=layers)
    size = min(batch or count, count)
    short = min(layers, SAMPLE_LAYERS)
    # Every path the same, in few layers: the directions of rounding grow over many.
    check = flow.repeated(min(layers, 10))
    reference = numpy_loop([w.astype(np.float64) for w in weights], few, check.depth)
    errors = {
        name: float(np.abs(np.asarray(found) - reference).max())
        for name, found in dict(
            svflow=ends_of(check, few, min(batch, len(few))),
            numpy_loop=numpy_loop(weights, few, check.depth),
            numpy_batched=numpy_batched(weights, few, check.depth, size),
            torch=torch_batched(weights, few, check.depth, size),
        ).items()
    }
    if max(errors.values()) > 1e-4:
        raise SystemExit(f"the runs differ: {errors}")
    compile_s = seconds(lambda: ends_of(flow, x0, batch))
    wide = [w.astype(np.float64) for w in weights]
    medians = race(
        dict(
            svflow=lambda: ends_of(flow, x0, batch),
            numpy_loop=lambda: numpy_loop(weights, few, short),
            numpy_loop_float64=lambda: numpy_loop(wide, few.astype(np.float64), short),
            numpy_batched=lambda: numpy_batched(weights, x0, short, size),
            torch=lambda: torch_batched(weights, x0, short, size),
        ),
        rounds,
    )
    share = layers / short  # of the layers timed, and for the loop of the runs
    for name in medians:
        if name != "svflow":
            medians[name] *= share * (count / len(few) if "loop" in name else 1)
    # Multiplications and additions: projections and output, scores and mixing.
    flops = count * layers * 2 * tokens * WIDTH * (4 * WIDTH + 2 * tokens)
    return dict(
        runs=count,
        layers=layers,
        batch=batch,
        tokens=tokens,
        heads=heads,
        threads=torch.get_num_threads(),
        compile_and_first_s=compile_s,
        **{f"{name}_error": error for name, error in errors.items()},
        **{f"{name}_s": t for name, t in medians.items()},
        **{f"{name}_over_svflow": t / medians["svflow"] for name, t in medians.items()},
        gflops=flops / medians["svflow"] / 1e9,
    )


def memory(field: str) -> int:
    # Not getrusage: its maximum is inherited from the parent across exec.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024


def equality(heads: int, tokens: int = 2048, chunk: int = 256) -> float:
    """The largest difference between the dense path and chunks, in one layer's attention."""
    random = np.random.default_rng(2)
    q, k, v = (jnp.asarray(random.normal(size=(tokens, heads, 64)), jnp.float32) for _ in range(3))
    scale = jnp.asarray(0.125, jnp.float32)

    def both(q, k, v):
        weights = attention.attention_weights(
            q, [k], attention.allowed_keys(tokens, causal=False), scale=scale
        )
        parts = attention.attend(q, k, v, scale=scale, chunk=chunk)
        return jnp.max(jnp.abs(attention.mix_values(weights, [v]) - parts))

    return float(jax.jit(both)(q, k, v))


def long(tokens: int, layers: int, heads: int, rounds: int) -> dict:
    error = equality(heads)
    if error > 1e-5:
        raise SystemExit(f"chunks differ from the dense path: {error:.1e}")
    jax.jit(lambda x: x + 1)(jnp.zeros(8)).block_until_ready()
    before = memory("VmRSS")
    flow = PowerFlow(*weights_of(heads), depth=layers)
    random = np.random.default_rng(3)
    x0 = jnp.asarray(unit(random.normal(size=(tokens, WIDTH))), jnp.float32)
    one = jax.jit(lambda flow, x: flow.step(0, x))
    compile_s = seconds(lambda: one(flow, x0))
    start = time.perf_counter()
    end = jax.block_until_ready(sv.simulate(flow, x0, ts=[float(layers)]).xs[-1])
    total = time.perf_counter() - start
    peak = memory("VmHWM") - before
    if not bool(jnp.isfinite(end).all()):
        raise SystemExit("a state is not finite")

    # The two products of a chunk and its exponentials, each alone in a loop over several chunks
    # whose results stay in one buffer.
    chunk = min(tokens, attention.query_chunk(tokens, heads))
    head, count = WIDTH // heads, max(1, min(8, tokens // chunk))
    q = jnp.asarray(random.normal(size=(count, chunk, head)), jnp.float32)
    k, v = (jnp.asarray(random.normal(size=(tokens, head)), jnp.float32) for _ in range(2))
    scores = jnp.asarray(random.normal(size=(chunk, tokens)), jnp.float32)

    @jax.jit
    def products(q, k, v, scores):
        def both(total, q):
            # The first product's result is used whole, at little cost.
            s = jax.lax.optimization_barrier(q @ k.T)
            mixed = jax.lax.optimization_barrier(s @ v)
            return total + mixed, None

        return jax.lax.scan(both, jnp.zeros((q.shape[1], head), q.dtype), q)[0]

    @jax.jit
    def exponentials(scores):
        def again(s, _):
            return jax.lax.optimization_barrier(jnp.exp(-s)), None

        return jax.lax.scan(again, scores, length=count)[0]

    medians = race(
        dict(
            layer=lambda: one(flow, x0),
            products=lambda: products(q, k, v, scores),
            exponentials=lambda: exponentials(scores),
        ),
        rounds,
    )
    times = heads * tokens / (chunk * count)
    bound = times * (medians["products"] + medians["exponentials"])
    return dict(
        tokens=tokens,
        layers=layers,
        heads=heads,
        chunk=chunk,
        chunks_against_dense=error,
        compile_and_first_s=compile_s,
        total_s=total,
        layer_s=medians["layer"],
        products_s=times * medians["products"],
        exponentials_s=times * medians["exponentials"],
        layer_over_both=medians["layer"] / bound,
        run_over_both=total / layers / bound,
        products_gflops=4 * chunk * count * tokens * head / medians["products"] / 1e9,
        peak_gb=peak / 1e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=["runs", "long"])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--run-layers", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = long(options.tokens, options.layers, options.heads, options.rounds)
        print(json.dumps(row))
        return
    rows = {}
    for part in options.part or ["runs", "long"]:
        if part == "runs":
            row = runs(options.runs, options.run_layers, options.batch, options.rounds)
        else:
            command = [sys.executable, __file__, "--child"]
            for name in ("tokens", "layers", "heads", "rounds"):
                command += [f"--{name}", str(getattr(options, name))]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(child.stdout.splitlines()[-1])
        rows[part] = row
        print(part, "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(dict(jax=jax.__version__, numpy=np.__version__, **rows), file, indent=1)


if __name__ == "__main__":
    main()
