"""The continuous flow of a model against torchdiffeq on the same field, step by step alike."""

from __future__ import annotations

import diffrax
import jax
import numpy as np

import svflow as sv
from benchmarks import models
from benchmarks.rows import Case, Peer, relative, row


def case(shape, tokens, steps) -> Case:
    net = models.model(shape)
    x0 = net.embed(models.ids_of(net, tokens))
    times = np.arange(net.flow.depth + 1.0)
    # The midpoint rule evaluates the beginning and the middle of a step: never a layer's end,
    # where the field jumps.
    solve = jax.jit(
        lambda flow, x: sv.simulate(flow, x, solver=diffrax.Midpoint(), dt=1 / steps).xs
    )

    def torchdiffeq():
        import torch
        from torchdiffeq import odeint

        blocks = models.hugging_face(net).h
        mask = models.causal_mask(tokens)
        state, ts = torch.tensor(np.asarray(x0)), torch.tensor(times, dtype=torch.float32)

        def velocity(t, x):
            block = blocks[min(int(t), len(blocks) - 1)]
            y = x[None]
            return (block.attn(block.ln_1(y), attention_mask=mask)[0] + block.mlp(block.ln_2(y)))[0]

        def run():
            with torch.inference_mode():
                options = dict(step_size=1 / steps)
                return odeint(velocity, state, ts, method="midpoint", options=options)

        return run

    return Case(
        ours=lambda: solve(net.flow, x0),
        peers={"torchdiffeq on Hugging Face": Peer(torchdiffeq, None, relative)},
    )


row(
    "flows/torchdiffeq",
    "continuous flow of GPT-2-small shape, 64 tokens, midpoint rule, 4 steps a layer",
    case,
    full=dict(shape=models.GPT2, tokens=64, steps=4),
    quick=dict(shape=models.GPT2_TINY, tokens=7, steps=4),
    tolerance=1e-4,
    rounds=5,
)
