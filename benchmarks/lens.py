"""The averaged Jacobian from every layer to the last, against TransformerLens's Jacobian lens.

For a text with the tokens V = first, ..., T - 2 (the last one has no next token to predict),

    J_l = 1/|V|  sum_{s in V}  sum_{t in V, t >= s}  d x_L[t] / d x_l[s],    l = 1 .. L - 1.

Source: the estimator of `transformer_lens.tools.analysis.JacobianLens.fit` 4.3.0, after W. Gurnee
et al., "Verbalizable representations form a global workspace in language models", 2026.

No path from a token in V to one in V visits an earlier token, so that those stand still here: their
keys and values are computed once, and cotangents pass through |V| tokens instead of all. The peer
pulls the cotangents of all tokens back, `together` rows of the Jacobian at a time: 64 take it a
third of the time of its default, 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks import models
from benchmarks.forward import states
from benchmarks.rows import GGUF, Case, Peer, row

SKIP = 16
"""First tokens that are left out, as there by default."""


def averaged(net, ids, *, first: int):
    """(layers - 1, width, width): J_1 .. J_{L-1} as above."""
    with jax.default_matmul_precision("highest"):
        xs = states(net, ids[:-1])
    return sv.spectra.averaged_jacobians(net.flow, xs, first=first)[1:]


def case(source, tokens, first, together) -> Case:
    net = models.model(source)
    ids = models.ids_of(net, tokens)
    array = jnp.asarray(ids, jnp.int32)

    def lens():
        import torch
        from transformer_lens.tools.analysis import JacobianLens

        theirs, tensor = models.bridge(net), torch.tensor(ids)[None]
        theirs.to_tokens = lambda _: tensor  # the same ids on both sides
        options = dict(dim_batch=together, skip_first_positions=first, show_progress=False)

        def run():
            return JacobianLens.fit(theirs, ["ids"], corpus="random ids", **options).jacobians

        return run

    def error(ours, theirs):
        wanted = np.stack([theirs[layer].numpy() for layer in range(net.config.depth - 1)])
        size = np.abs(wanted).max(axis=(1, 2))
        return float((np.abs(np.asarray(ours) - wanted).max(axis=(1, 2)) / size).max())

    return Case(
        ours=lambda: averaged(net, array, first=first),
        peers={"TransformerLens's Jacobian lens": Peer(lens, 1 / 5, error)},
    )


row(
    "lens/smollm2",
    f"averaged Jacobian of every layer to the last, SmolLM2-135M, 19 tokens, {SKIP} left out",
    case,
    full=dict(source=GGUF, tokens=19, first=SKIP, together=64),
    quick=dict(source=models.LLAMA_TINY, tokens=9, first=4, together=8),
    tolerance=1e-4,
    rounds=3,
)
