"""Spectra of whole layers, all tokens to all tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from svflow.flow import Context, Flow
from svflow.spectra.eigenvalues import eigvals
from svflow.spectra.jacobians import (
    check_chunk,
    check_state,
    columns_of,
    jacobian,
    token_map,
    widened,
)


def causal_spectrum(
    flow: Flow,
    layer: int,
    x: Float[Array, "tokens width"],
    *,
    context: Context | None = None,
    chunk: int | None = None,
) -> Complex[Array, "tokens width"]:
    """The eigenvalues of a causal layer's full Jacobian, those of each token's block in a row.

    A later token moves no earlier one, so that the Jacobian of all tokens to all tokens is block
    triangular and its spectrum is the union of those of its diagonal blocks, the `frozen` Jacobians
    of the tokens: T problems of width d in the place of one of width T d, and without the rounding
    that the blocks off the diagonal add to a dense solve. Derived here.

    Arguments:
        flow, layer, x, context, chunk: as for `jacobian`.

    Raises:
        ValueError: as `jacobian`, and for a flow that is not causal: the spectrum of its full
            Jacobian is no union, see `full_spectrum`.
    """
    layer, x, _ = check_state(flow, layer, x, -1, "frozen", context)
    if not flow.causal:
        raise ValueError(
            f"{type(flow).__name__} is not causal: its spectrum is no union of its tokens'. Use "
            f"svflow.spectra.full_spectrum, which solves all {jnp.size(x)} coordinates at once, or "
            "svflow.partial_spectrum for the leading part"
        )
    check_chunk(flow, x, "frozen", chunk, count=len(x))
    blocks = _blocks(flow, np.int32(layer), x, context, chunk)
    if not isinstance(blocks, jax.core.Tracer) and not np.isfinite(np.asarray(blocks)).all():
        raise ValueError(f"the Jacobian of layer {layer} is not finite in {blocks.dtype}")
    return eigvals(blocks)


def full_spectrum(
    flow: Flow,
    layer: int,
    x: Float[Array, "tokens width"],
    *,
    context: Context | None = None,
    chunk: int | None = None,
) -> Complex[Array, " values"]:
    """The tokens * width eigenvalues of a layer's full Jacobian, of any flow, by a dense solve.

    It takes some 25 (tokens * width)^3 operations: minutes at 6000 coordinates. For a causal flow
    `causal_spectrum` gives the same, faster and more accurately.

    Raises:
        ValueError, MemoryError: as `jacobian`.
    """
    J = jacobian(flow, layer, x, scope="full", context=context, chunk=chunk)
    size = J.shape[0] * J.shape[1]
    return eigvals(J.reshape(size, size))


@functools.partial(jax.jit, static_argnames=("chunk",))
def _blocks(flow, layer, x, context, chunk):
    flow, x = widened(flow, x)

    def block(token):
        return columns_of(token_map(flow, layer, x, token, "frozen", context), x[token], chunk)

    with jax.default_matmul_precision("highest"):
        return jax.lax.map(block, jnp.arange(len(x)))
