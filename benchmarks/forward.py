"""Forward pass with all layer states against Hugging Face, TransformerLens and its own products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks import models
from benchmarks.rows import GGUF, Case, Peer, row


@jax.jit
def states(net, ids):
    return sv.simulate(net.flow, net.embed(ids)).xs


@jax.jit
def products(flow, x):
    """Every matrix product of the layers, with nothing between them but the heads' layout."""
    config, tokens = flow.config, len(x)

    def split(a):
        return a.reshape(tokens, -1, config.head_width).transpose(1, 0, 2)

    def layer(x, weights):
        attention, hidden = weights
        q, k, v = (
            split(x @ w.kernel[...]) for w in (attention.query, attention.key, attention.value)
        )
        q = q.reshape(len(k), -1, config.head_width)  # the query heads of a group in one product
        mixed = (q @ k.transpose(0, 2, 1)) @ v
        mixed = mixed.reshape(config.heads, tokens, -1).transpose(1, 0, 2).reshape(tokens, -1)
        x = mixed @ attention.output.kernel[...]
        y = x @ hidden.up.kernel[...]
        if hidden.gate is not None:
            y = y + x @ hidden.gate.kernel[...]
        x = y @ hidden.down.kernel[...]
        return x, x

    return jax.lax.scan(layer, x, (flow.layers.attention, flow.layers.feed_forward))[1]


def error(ours, theirs) -> float:
    """The largest distance of two states, in units of the state's norm.

    Trained models have coordinates, and first tokens, a thousand times as large as the others.
    """
    wanted = np.stack([np.asarray(tensor)[0] for tensor in theirs])
    apart = np.linalg.norm(np.asarray(ours) - wanted, axis=-1)
    return float((apart / np.linalg.norm(wanted, axis=-1)).max())


def case(source, tokens, of_eager, of_products=None) -> Case:
    net = models.model(source)
    ids = models.ids_of(net, tokens)
    array = jnp.asarray(ids, jnp.int32)

    def eager():
        import torch

        theirs, tensor = models.hugging_face(net), torch.tensor(ids)[None]

        def run():
            with torch.inference_mode():
                return theirs(tensor, output_hidden_states=True, use_cache=False).hidden_states

        return run

    def lens():
        import torch

        theirs, tensor = models.bridge(net), torch.tensor(ids)[None]
        names = [f"blocks.{layer}.hook_out" for layer in range(net.config.depth)]

        def run():
            with torch.inference_mode():
                # All blocks, and no logits.
                _, cache = theirs.run_with_cache(
                    tensor,
                    names_filter=names,
                    stop_at_layer=net.config.depth,
                    return_type=None,
                )
            return [cache[name] for name in names]

        return run

    def bound():
        x = net.embed(ids)
        return lambda: products(net.flow, x)

    return Case(
        ours=lambda: states(net, array),
        peers={
            # Its last hidden state is after the final norm, ours before it.
            "Hugging Face eager": Peer(
                eager, of_eager, lambda xs, theirs: error(xs[:-1], theirs[:-1])
            ),
            "TransformerLens with cache": Peer(lens, 1.0, lambda xs, theirs: error(xs[1:], theirs)),
            "its matrix products": Peer(bound, of_products, None),
        },
    )


CLAIM = "forward pass with all layer states, {}, {} tokens"
for tokens in (64, 512):
    row(
        f"forward/gpt2-{tokens}",
        CLAIM.format("GPT-2-small shape", tokens),
        case,
        full=dict(source=models.GPT2, tokens=tokens, of_eager=0.9, of_products=1.2),
        quick=dict(source=models.GPT2_TINY, tokens=7, of_eager=0.9),
        tolerance=1e-4,
    )
    row(
        f"forward/smollm2-{tokens}",
        CLAIM.format("SmolLM2-135M", tokens),
        case,
        full=dict(source=GGUF, tokens=tokens, of_eager=1.0),
        quick=dict(source=models.LLAMA_TINY, tokens=7, of_eager=1.0),
        tolerance=1e-4,
    )
