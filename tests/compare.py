"""A model's states against references, in units of the reference's root mean square."""

import jax
import numpy as np

import svflow as sv


def states(model, ids, context=None):
    """What enters the first layer, every layer's output, and the logits (None without a head)."""
    x = model.embed(ids, context)
    xs = sv.simulate(model.flow, x, context=context).xs
    return x, xs[1:], None if model.config.head is None else model.unembed(xs[-1])


# (batch, ...), (batch, layers, ...), (batch, ...)
batched = jax.jit(jax.vmap(states, in_axes=(None, 0, 0)))


def error(ours, reference) -> float:
    """max |ours - reference| / rms(reference); infinite where shapes or finiteness differ."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    if ours.shape != reference.shape or not np.isfinite(ours).all():
        return np.inf
    return float(np.abs(ours - reference).max() / np.sqrt(np.mean(reference**2)))
