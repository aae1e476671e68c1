"""Targets of every shape, and the transformer's formula in NumPy, head by head."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import svflow as sv
import universal as ut


def target(seed, sizes, *, tied=False, gain=1.2, dtype=np.float64, **options):
    """Gaussian weights with which states keep their size; logits grow as the gain's square."""
    layers, heads, width, head_width, out_width = sizes
    random, lead = np.random.default_rng(seed), (heads,) if tied else (layers, heads)

    def draw(*shape, size=1.0):
        return (size * random.normal(size=shape) / width**0.5).astype(dtype)

    return ut.AttentionTransformer(
        draw(*lead, width, head_width, size=gain),
        draw(*lead, width, head_width, size=gain),
        draw(*lead, width, width, size=heads**-0.5),
        draw(width, out_width),
        depth=layers if tied else None,
        **options,
    )


def tokens(seed, count, width, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(dtype)


def formula(transformer, x):
    """States (layers + 1, ...), attention (layers, heads, ...) and output, by a loop in NumPy."""
    xs, attention = [x], []
    for layer in range(transformer.depth):
        after = x if transformer.residual else np.zeros_like(x)
        weights = []
        for head in range(transformer.heads):
            q, k, v = (
                times(x, kernel, layer, head)
                for kernel in (transformer.query, transformer.key, transformer.value)
            )
            scores = x.dtype.type(transformer.scale) * q @ k.T
            if transformer.causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            a = np.exp(scores - scores.max(axis=1, keepdims=True))
            a /= a.sum(axis=1, keepdims=True)
            after = after + a @ v
            weights.append(a)
        x = after
        xs.append(x)
        attention.append(weights)
    return np.stack(xs), np.asarray(attention), times(x, transformer.unembedding)


def times(x, kernel, *place):
    """x R, of an array or a routing, with or without a layer axis."""
    routed = isinstance(kernel, ut.Routing)
    values = kernel.sources if routed else np.asarray(kernel[...])
    if place:
        values = values[place] if kernel.ndim == 4 else values[place[1]]
    if not routed:
        return x @ values
    return np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)[:, values]


def relative(found, wanted) -> float:
    """The largest difference in units of the largest entry."""
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def observe(transformer, x, context=None):
    """States, attention and output, from one simulation."""
    xs = sv.simulate(transformer, x, context=context).xs
    layers = range(transformer.depth)
    attention = jnp.stack([transformer.attention(k, xs[k], context) for k in layers])
    return xs, attention, transformer.unembed(xs[-1])
