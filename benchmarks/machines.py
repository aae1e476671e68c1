"""A sparse machine against its target and against itself as dense matrices; and its programs.

    python benchmarks/machines.py [--part run] [--part program] [--tokens 256] [--rounds 7]
        [--case 2,2,512,256,256] [--out FILE.json]

Equality is checked first; the contestants are interleaved in one run on the same cores, medians
over rounds. float32, the programs in float64.

- run: machines of 4096 columns (or each --case: layers, heads, width, head width, output width).
  The machine, its target at its own width, the machine's gathers alone (those of every layer, the
  spreading of what it wrote and the displacement of the state), its products [A^1 ... A^H] S alone,
  and the same machine as dense matrices. A target of H heads mixes H d columns a layer and projects
  them; the machine projects nothing and mixes as many columns as are live, of which a deep one has
  far more than its target.
- program: 20 000 columns, in a process of its own: seconds and peak memory, against the matrix
  products alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from timing import race, seconds

import universal as ut
from universal import maps

CASES = ("1,8,512,64,384", "2,2,512,256,256", "6,2,32,16,1")
PROGRAM = (3, 4, 400, 100, 50)  # 20 000 columns


def target_of(layers, heads, width, head_width, out_width, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(layers, heads, width, k) for k in (head_width, head_width, width)]
    arrays = [random.normal(size=s) / width**0.5 for s in (*shapes, (width, out_width))]
    return ut.AttentionTransformer(*(array.astype(dtype) for array in arrays))


run = jax.jit(ut.run)


@functools.partial(jax.jit, static_argnums=0)
def gathers(plan, x, mixed):
    """All that a machine does to its state besides attention: what is read, routed and written."""
    machine = plan.machine
    kept = []
    for layer in range(machine.depth):
        query, key = (maps.read(m, layer, x) for m in (machine.query, machine.key))
        stack = maps.sources_of(machine.value, layer, x)
        wrote = maps.spread(machine.value, layer, mixed[layer])
        x = x + (wrote - x)
        kept.append((query, key, stack))
    return x, jax.lax.optimization_barrier(kept)


class Plan:
    """A machine without leaves as a static argument."""

    def __init__(self, machine):
        self.machine = machine


@jax.jit
def products(weights, stacks):
    return [w @ s for w, s in zip(weights, stacks)]


def run_case(sizes, tokens: int, rounds: int) -> dict:
    layers, heads, width, _, _ = sizes
    target, machine = target_of(*sizes), ut.sparse(*sizes)
    E = ut.program(machine, target)
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(tokens, width)), jnp.float32)
    z, dense = x @ E, machine.dense(jnp.float32)
    compile_s = seconds(lambda: run(machine, z))
    wanted = np.asarray(run(target, x), np.float64)
    size = np.abs(wanted).max()
    errors = {
        name: float(np.abs(np.asarray(run(one, z)) - wanted).max() / size)
        for name, one in (("sparse", machine), ("dense", dense))
    }
    if max(errors.values()) > 1e-4:
        raise SystemExit(f"the machine differs from its target: {errors}")
    live = [len(layer.to) for layer in maps.live_columns(machine.value, layers, False)]
    blocks = [jnp.asarray(random.normal(size=(tokens, n)), jnp.float32) for n in live]
    stacks = [jnp.asarray(random.normal(size=(heads * tokens, n)), jnp.float32) for n in live]
    weights = [
        jnp.asarray(random.uniform(size=(tokens, heads * tokens)), jnp.float32) for _ in live
    ]
    plan = Plan(machine)
    medians = race(
        dict(
            sparse=lambda: run(machine, z),
            target=lambda: run(target, x),
            gathers=lambda: gathers(plan, z, blocks),
            products=lambda: products(weights, stacks),
            dense=lambda: run(dense, z),
        ),
        rounds,
    )
    return dict(
        sizes=sizes,
        tokens=tokens,
        columns=machine.width,
        columns_mixed=sum(heads * n for n in live),
        columns_mixed_by_target=layers * heads * width,
        sparse_error=errors["sparse"],
        dense_error=errors["dense"],
        compile_and_first_s=compile_s,
        **{f"{name}_s": t for name, t in medians.items()},
        sparse_over_target_and_gathers=medians["sparse"] / (medians["target"] + medians["gathers"]),
        dense_over_sparse=medians["dense"] / medians["sparse"],
    )


def memory(field: str) -> int:
    # Not getrusage: its maximum is inherited from the parent across exec.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024


def program(rounds: int) -> dict:
    layers, heads, width, head_width, out_width = PROGRAM
    target, machine = target_of(*PROGRAM), ut.sparse(*PROGRAM)
    jax.block_until_ready(jnp.zeros(8) + 1)
    before = memory("VmRSS")
    E = np.asarray(ut.program(machine, target), np.float64)
    peak = memory("VmHWM") - before
    # One path's columns, multiplied out.
    values = np.asarray(target.value[...], np.float64)
    path = (1, 2, 3)
    columns = next(
        r.columns
        for r in ut.registers(machine)
        if r.slot.kind == "output" and tuple(head for _, head in r.slot.path) == path
    )
    V = functools.reduce(np.matmul, [values[layer, head] for layer, head in enumerate(path)])
    wanted = V @ np.asarray(target.unembedding[...], np.float64)
    error = float(np.abs(E[:, columns] - wanted).max() / np.abs(wanted).max())
    if error > 1e-6:
        raise SystemExit(f"the program is wrong: {error:.1e}")
    counts, count = [], out_width
    for _ in range(layers):
        counts.append(count)
        count = heads * (count + 2 * head_width)
    random = np.random.default_rng(2)
    found = [random.normal(size=(width, n)) for n in counts]
    medians = race(
        dict(
            program=lambda: ut.program(machine, target),
            products=lambda: [V @ C for C in found for V in values[0]],
        ),
        rounds,
    )
    flops = 2 * width**2 * heads * sum(counts)
    return dict(
        columns=machine.width,
        width=width,
        error=error,
        peak_gb=peak / 1e9,
        **{f"{name}_s": t for name, t in medians.items()},
        products_gflops=flops / medians["products"] / 1e9,
        program_over_products=medians["program"] / medians["products"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=["run", "program"])
    parser.add_argument("--case", action="append")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(program(options.rounds)))
        return
    rows = {}
    for part in options.part or ["run", "program"]:
        if part == "run":
            for case in options.case or CASES:
                sizes = tuple(map(int, case.split(",")))
                rows[f"run {case}"] = run_case(sizes, options.tokens, options.rounds)
        else:
            command = [sys.executable, __file__, "--child", "--rounds", str(options.rounds)]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows["program"] = json.loads(child.stdout.splitlines()[-1])
    for name, row in rows.items():
        print(name, "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "sizes"), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(dict(jax=jax.__version__, numpy=np.__version__, **rows), file, indent=1)


if __name__ == "__main__":
    main()
