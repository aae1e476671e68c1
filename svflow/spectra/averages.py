"""Jacobians from each layer to the end of the flow, averaged over tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_flow
from svflow.integers import is_integer
from svflow.memory import check_memory
from svflow.spectra.jacobians import check_state, check_states, widened


def averaged_jacobians(
    flow: Flow,
    xs: Float[Array, "states tokens width"],
    *,
    first: int = 0,
    context: Context | None = None,
) -> Float[Array, "layers width width"]:
    r"""What a token's state before each layer does to the last states from it on, on average.

    Over the tokens V = first, ..., T - 1 but for padding, with L the depth,

        J_l = 1/|V|  sum_{s in V}  sum_{t in V, t >= s}  d x_L[t] / d x_l[s],   l = 0 .. L - 1.

    In a causal flow no path from a token in V to one in V visits an earlier token, so that those
    stand still: what they contribute is computed once, and `width` cotangents are pulled back
    through |V| tokens, layer by layer. Computed in float32 at least, matrix products at the highest
    precision; a mixture's router is fixed at the experts it chooses.

    Arguments:
        flow: a causal flow.
        xs: (depth + 1, tokens, width) the states of `simulate(flow, x0).xs`.
        first: how many first tokens to leave out.
        context: positions and padding.

    Raises:
        ValueError: a flow that is not causal, states of the wrong shape or that are not finite,
            `first` outside of 0 .. tokens - 1, nothing but padding, or averages that are not finite
            (where their values are known).
        MemoryError: cotangents that do not fit.

    Source: the estimator of `transformer_lens.tools.analysis.JacobianLens.fit` 4.3.0, after W.
    Gurnee et al., "Verbalizable representations form a global workspace in language models", 2026;
    the still tokens, derived here.

    Examples:
        >>> import svflow as sv
        >>> class Shear(sv.Flow):
        ...     depth, width, causal = 2, 2, True
        ...
        ...     def velocity(self, t, x, context=None):
        ...         return x @ jnp.asarray([[0.0, 0.0], [5.0, 0.0]])
        >>> flow = Shear()
        >>> J = averaged_jacobians(flow, sv.simulate(flow, jnp.ones((3, 2))).xs)
        >>> J[:, 0, 1].tolist()  # two shears, and one
        [10.0, 5.0]
    """
    check_flow(flow)
    if not flow.causal:
        raise ValueError(
            f"{type(flow).__name__} is not causal: later tokens move what is averaged over"
        )
    xs = check_states(xs, flow.depth, flow.width)
    for layer in range(flow.depth):
        check_state(flow, layer, xs[layer], -1, "frozen", context)
    tokens = xs.shape[1]
    if not is_integer(first):
        raise ValueError(f"first must be an integer, got {first!r}")
    if not 0 <= first < tokens:
        raise ValueError(f"first must be from 0 to {tokens - 1}, got {first}")
    mask = None if context is None else context.mask
    if mask is not None and not isinstance(mask, jax.core.Tracer) and not np.any(mask[first:]):
        raise ValueError(f"all tokens from {first} on are padding: there is nothing to average")
    item = at_least_float32(xs.dtype).itemsize
    # The result, and the cotangents of |V| tokens with what they pass through, as in `jacobian`.
    size = flow.width**2 * (flow.depth + 16 * (tokens - first))
    check_memory(f"{flow.width} cotangents of {tokens - first} tokens", item * size, xs)
    J = _averaged(flow, xs[:-1], context, int(first))
    if not isinstance(J, jax.core.Tracer) and not np.isfinite(np.asarray(J)).all():
        raise ValueError(f"the averaged Jacobians are not finite in {J.dtype}")
    return J


@functools.partial(jax.jit, static_argnames="first")
def _averaged(flow, xs, context, first):
    flow, xs = widened(flow, xs)
    depth, tokens, width = xs.shape
    rows = jnp.arange(first, tokens)

    def back(C, layer_and_state):
        layer, x = layer_and_state
        _, pull = jax.vjp(flow.frozen(layer, x, rows, context), x[first:])
        C = jax.vmap(lambda c: pull(c)[0])(C)
        return C, jnp.tensordot(weights, C, axes=(0, 1))

    real = jnp.ones(len(rows)) if context is None or context.mask is None else context.mask[first:]
    real = real.astype(xs.dtype)
    weights = real / jnp.sum(real)
    with jax.default_matmul_precision("highest"):
        start = jnp.eye(width, dtype=xs.dtype)[:, None] * real[:, None]
        layers = jnp.arange(depth, dtype=jnp.int32)
        return jax.lax.scan(back, start, (layers, xs), reverse=True)[1]
