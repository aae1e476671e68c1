"""Sparse machines against their targets and against themselves as dense matrices; programs.

- machines/run: the machine against its target at its own width plus the machine's gathers alone
  (those of every layer, the spreading of what it wrote and the displacement of the state), and
  against the same machine as dense matrices. A target of H heads mixes H d columns a layer and
  projects them; the machine projects nothing and mixes as many columns as are live, of which a
  deep one has far more than its target.
- machines/program: a wide program against the matrix products alone, float64, and its memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import universal as ut
from benchmarks.rows import Case, Peer, row
from universal import maps


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


def error(ours, theirs) -> float:
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def simulation(sizes, tokens) -> Case:
    layers, _, width, _, _ = sizes
    target, machine = target_of(*sizes), ut.sparse(*sizes)
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(tokens, width)), jnp.float32)
    z = x @ ut.program(machine, target)

    def both():
        live = [len(layer.to) for layer in maps.live_columns(machine.value, layers, False)]
        blocks = [jnp.asarray(random.normal(size=(tokens, n)), jnp.float32) for n in live]
        plan = Plan(machine)
        return lambda: (run(target, x), gathers(plan, z, blocks))

    def dense():
        matrices = machine.dense(jnp.float32)
        return lambda: run(matrices, z)

    return Case(
        ours=lambda: run(machine, z),
        peers={
            "its target, and the gathers": Peer(both, 1.5, lambda a, b: error(a, b[0])),
            "itself as dense matrices": Peer(dense, 1 / 20, error),
        },
    )


def program(sizes, path) -> Case:
    layers, heads, width, head_width, out_width = sizes
    target, machine = target_of(*sizes), ut.sparse(*sizes)
    values = np.asarray(target.value[...], np.float64)

    def check(E):
        """One path's columns, multiplied out."""
        columns = next(
            r.columns
            for r in ut.registers(machine)
            if r.slot.kind == "output" and tuple(head for _, head in r.slot.path) == path
        )
        V = functools.reduce(np.matmul, [values[layer, head] for layer, head in enumerate(path)])
        return error(np.asarray(E)[:, columns], V @ np.asarray(target.unembedding[...], np.float64))

    def products():
        counts, count = [], out_width
        for _ in range(layers):
            counts.append(count)
            count = heads * (count + 2 * head_width)
        random = np.random.default_rng(2)
        found = [random.normal(size=(width, n)) for n in counts]
        return lambda: [V @ C for C in found for V in values[0]]

    return Case(
        ours=lambda: ut.program(machine, target),
        peers={"its matrix products": Peer(products, None, None)},
        check=check,
    )


for sizes in ((1, 8, 512, 64, 384), (2, 2, 512, 256, 256)):
    row(
        f"machines/run-{sizes[0]}",
        f"sparse machine of 4096 columns, {sizes[0]} layers, {sizes[1]} heads, 256 tokens",
        simulation,
        full=dict(sizes=sizes, tokens=256),
        quick=dict(sizes=(sizes[0], 2, 6, 3, 4), tokens=7),
        tolerance=1e-4,
    )
row(
    "machines/program",
    "program of 20 000 columns",
    program,
    full=dict(sizes=(3, 4, 400, 100, 50), path=(1, 2, 3)),
    quick=dict(sizes=(3, 2, 6, 3, 4), path=(1, 0, 1)),
    tolerance=1e-6,
    most_peak=2e9,
)
