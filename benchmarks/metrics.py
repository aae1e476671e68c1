"""The metrics of the score flow against a forward pass of the same model and text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks.rows import GGUF, Case, Peer, relative, row
from svflow.score.metrics import _pass, exactly


@jax.jit
def forward(net, ids):
    return net(ids)


def case(source, tokens) -> Case:
    source = source or sv.data.default_model_path()
    net = sv.load(source)
    text = " ".join([sv.data.PASSAGE] * 8)
    ids = jnp.asarray(sv.load_tokenizer(source).encode(text)[:tokens], jnp.int32)
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, not {tokens}")

    def check(result):
        with jax.default_matmul_precision("highest"):
            wanted = sv.simulate(net.flow, net.embed(np.asarray(ids))).xs[-1]
        return relative(result[1], wanted)

    return Case(
        ours=lambda: exactly(_pass, net, ids),
        peers={"a forward pass": Peer(lambda: lambda: forward(net, ids), 2.0, None)},
        check=check,
    )


for tokens in (128, 256):
    for name, label, source in (
        ("embedded", "the embedded model", None),
        ("smollm2", "SmolLM2-135M", GGUF),
    ):
        row(
            f"metrics/{name}-{tokens}",
            f"all metrics of the score flow in one pass, {label}, {tokens} tokens",
            case,
            full=dict(source=source, tokens=tokens),
            quick=dict(source=None, tokens=8),
            tolerance=1e-3,
        )
