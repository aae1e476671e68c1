"""Compile time against depth: the layers are one loop, so it must not grow with their number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks import models
from benchmarks.rows import Case, Peer, relative, row


def case(shape, depths, tokens) -> Case:
    nets = [models.model(shape | dict(n_layer=depth)) for depth in depths]
    random = np.random.default_rng(0)
    x0 = jnp.asarray(random.normal(size=(tokens, shape["n_embd"])), jnp.float32)

    def compiled(flow):
        """From nothing: what a user waits for, tracing in Python and compiling in XLA."""
        jax.clear_caches()
        return jax.jit(lambda flow, x0: sv.simulate(flow, x0).xs).lower(flow, x0).compile()

    shallow, deep = (net.flow for net in nets)

    def check(program):
        x, wanted = x0, [x0]
        step = jax.jit(lambda flow, layer, x: flow.step(layer, x))
        for layer in range(deep.depth):
            x = step(deep, jnp.asarray(layer, jnp.int32), x)
            wanted.append(x)
        return relative(program(deep, x0), jnp.stack(wanted))

    return Case(
        ours=lambda: compiled(deep),
        peers={f"{depths[0]} layers": Peer(lambda: lambda: compiled(shallow), 1.2, None)},
        check=check,
    )


row(
    "compiling/depth",
    "compiling a simulation of 48 layers against one of 12, GPT-2-small shape, and the states",
    case,
    full=dict(shape=models.GPT2 | dict(vocab_size=1024), depths=(12, 48), tokens=64),
    quick=dict(shape=models.GPT2_TINY, depths=(2, 5), tokens=7),
    tolerance=1e-5,
)
