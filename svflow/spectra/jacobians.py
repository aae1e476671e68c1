"""Jacobians of single layers.

Axes: `layers`; `tokens`; `width`, the residual stream, twice: J[i, j] = d y_i / d x_j.

Three contexts of one token's state h_l -> h_{l+1}:

    isolated   the token alone in its sequence: one key, so that softmax is 1 and RoPE drops out.
               With RMSNorm, gate-free notation and J_n = (1/s)(diag(w) - (w*h) h^T / (d s^2)),
               s^2 = mean(h^2) + eps, a pre-norm layer has
               J = (I + J_mlp J_n2)(I + W_O rep(W_V) J_n1)
    frozen     the token in its real context, the other tokens' states before the layer fixed, and
               so their keys and values: the diagonal block of `full`
    full       all tokens to all tokens

The first is the one of Fernando and Guitchounts, arXiv 2605.14258; the closed form and the others
are derived here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_context
from svflow.memory import check_memory
from svflow.simulate import Trajectory

SCOPES = ("isolated", "frozen", "full")


def jacobian(
    flow: Flow,
    layer: int,
    x: Float[Array, "tokens width"],
    *,
    token: int = -1,
    scope: str = "frozen",
    context: Context | None = None,
    chunk: int | None = None,
) -> Float[Array, "width width"] | Float[Array, "tokens width tokens width"]:
    """The Jacobian of one layer at a state.

    By reverse mode over one token (all tokens for "full"): the keys and values of the others are
    computed once. A mixture's router is fixed at the experts it chooses here; their weights are
    differentiated. Computed in float32 at least, matrix products at the highest precision.

    Arguments:
        flow: the flow.
        layer: which layer, from 0.
        x: (tokens, width) the states before it, as `simulate` gives them.
        token: whose Jacobian; negative counts from the end. Not used by "full".
        scope: "isolated", "frozen" or "full", see `svflow.spectra.jacobians`.
        context: positions and padding.
        chunk: how many rows to compute at a time, by default all: less memory, the same result to
            rounding.

    Returns:
        (width, width), or (tokens, width, tokens, width) for "full".

    Raises:
        ValueError: a layer, a token or a scope that does not exist, states of the wrong shape, or
            a state or a Jacobian that is not finite (where its values are known).
        MemoryError: a Jacobian that does not fit, with the bytes it needs.
    """
    check_state(flow, layer, x, token, scope, context)
    x = jnp.asarray(x)
    _check_chunk(flow, x, scope, chunk, count=1)
    J = _jacobian(flow, jnp.asarray(layer, jnp.int32), x, token % len(x), context, scope, chunk)
    _check_result(J, [layer])
    return J


def layer_jacobians(
    flow: Flow,
    xs: Float[Array, "states tokens width"],
    *,
    token: int = -1,
    scope: str = "frozen",
    context: Context | None = None,
    chunk: int | None = None,
) -> Float[Array, "layers width width"] | Float[Array, "layers tokens width tokens width"]:
    """The Jacobian of every layer along a trajectory, one after another in one program.

    Arguments:
        xs: (depth + 1, tokens, width) the states of `simulate(flow, x0).xs`.
        flow, token, scope, context, chunk: as for `jacobian`.

    Raises:
        ValueError, MemoryError: as `jacobian`, with the layer's number.
    """
    _check_flow(flow)
    if isinstance(xs, Trajectory):
        raise ValueError("xs must be the states of a trajectory; pass its `.xs`")
    if jnp.ndim(xs) != 3 or len(xs) != flow.depth + 1:
        raise ValueError(
            f"xs must be the {flow.depth + 1} states of simulate, (states, tokens, {flow.width}), "
            f"got shape {jnp.shape(xs)}"
        )
    for layer in range(flow.depth):
        check_state(flow, layer, xs[layer], token, scope, context)
    xs = jnp.asarray(xs)
    _check_chunk(flow, xs[0], scope, chunk, count=flow.depth)
    J = _layer_jacobians(flow, xs[:-1], token % xs.shape[1], context, scope, chunk)
    _check_result(J, range(flow.depth))
    return J


def token_map(
    flow: Flow, layer, x: Float[Array, "tokens width"], token, scope: str, context: Context | None
) -> Callable[[Float[Array, " width"]], Float[Array, " width"]]:
    """A layer as a map of one token's state, "isolated" or "frozen"."""
    if scope == "frozen":
        return flow.frozen(layer, x, token, context)
    alone = None
    if context is not None and context.positions is not None:
        alone = Context(positions=context.positions[token][None])
    return flow.frozen(layer, x[token][None], 0, alone)


def widened(flow: Flow, x: Array) -> tuple[Flow, Array]:
    """A flow and a state of a type narrower than float32 in float32: derivatives need the digits.

    The narrow weights are exact in the wider type.
    """
    wide = at_least_float32(x.dtype)
    if wide == x.dtype:
        return flow, x

    def widen(leaf):
        return leaf.astype(wide) if leaf.dtype == x.dtype else leaf

    return jax.tree.map(widen, flow), x.astype(wide)


def check_state(flow, layer, x, token, scope, context) -> None:
    """What `jacobian` raises for, but for memory and the result."""
    _check_flow(flow)
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
    for name, value in (("layer", layer), ("token", token)):
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"{name} must be an int, not traced by a transform"
            )
    if not isinstance(layer, int | np.integer) or not 0 <= layer < flow.depth:
        raise ValueError(f"layer must be one of 0 .. {flow.depth - 1}, got {layer!r}")
    shape = jnp.shape(x)
    if len(shape) != 2 or shape[1] != flow.width or shape[0] < 1:
        raise ValueError(
            f"x must have shape (tokens, {flow.width}) with at least one token, got {shape}"
        )
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"x must be floating point, got {jnp.result_type(x)}")
    if not isinstance(token, int | np.integer) or not -shape[0] <= token < shape[0]:
        raise ValueError(f"token {token!r} is not one of {shape[0]} tokens")
    check_context(context, shape[0])
    if not isinstance(x, jax.core.Tracer) and not bool(jnp.isfinite(x).all()):
        raise ValueError(f"the state before layer {layer} is not finite")


def _check_flow(flow) -> None:
    if not isinstance(flow, Flow):
        hint = "; pass its `.flow`" if isinstance(getattr(flow, "flow", None), Flow) else ""
        raise ValueError(f"flow must be an svflow.Flow, got {type(flow).__name__}{hint}")


def _check_chunk(flow, x, scope, chunk, *, count):
    size = x.size if scope == "full" else flow.width
    if chunk is not None and (not isinstance(chunk, int | np.integer) or chunk < 1):
        raise ValueError(f"chunk must be a positive number of rows, got {chunk!r}")
    item = at_least_float32(x.dtype).itemsize
    # The result, and what one chunk of cotangents passes through; the widest is some 4 widths.
    rows = min(size, chunk or size)
    check_memory(
        f"{count} {scope} Jacobian{'s' * (count > 1)} of {size} x {size}",
        item * size * (count * size + 6 * rows),
        x,
    )


def _check_result(J, layers):
    if isinstance(J, jax.core.Tracer):
        return
    finite = np.asarray(jnp.isfinite(J).reshape(len(layers), -1).all(axis=-1))
    if not finite.all():
        layer = layers[int(np.argmin(finite))]
        raise ValueError(f"the Jacobian of layer {layer} is not finite in {J.dtype}")


@functools.partial(jax.jit, static_argnames=("scope", "chunk"))
def _jacobian(flow, layer, x, token, context, scope, chunk):
    flow, x = widened(flow, x)
    with jax.default_matmul_precision("highest"):
        if scope == "full":
            return rows_of(lambda y: flow.step(layer, y, context), x, chunk)
        return rows_of(token_map(flow, layer, x, token, scope, context), x[token], chunk)


@functools.partial(jax.jit, static_argnames=("scope", "chunk"))
def _layer_jacobians(flow, xs, token, context, scope, chunk):
    def one(layer_and_state):
        return _jacobian(flow, *layer_and_state, token, context, scope, chunk)

    return jax.lax.map(one, (jnp.arange(len(xs), dtype=jnp.int32), xs))


def rows_of(function, x, chunk):
    """d function / d x by rows, the shape of x twice."""
    _, pullback = jax.vjp(function, x)
    cotangents = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)

    def row(cotangent):
        return pullback(cotangent)[0]

    rows = (
        jax.vmap(row)(cotangents)
        if chunk is None
        else jax.lax.map(row, cotangents, batch_size=chunk)
    )
    return rows.reshape(*x.shape, *x.shape)
