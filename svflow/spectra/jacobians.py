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
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_context, check_flow
from svflow.memory import check_memory
from svflow.models.transformer import Transformer
from svflow.sharding import DATA, gathered, mesh_of, on_mesh, over_data
from svflow.simulate import Trajectory, simulate

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

    By forward mode over one token (all tokens for "full"): the keys and values of the others are
    computed once. A mixture's router is fixed at the experts it chooses here; their weights are
    differentiated. Computed in float32 at least, matrix products at the highest precision.

    Arguments:
        flow: the flow.
        layer: which layer, from 0.
        x: (tokens, width) the states before it, as `simulate` gives them.
        token: whose Jacobian; negative counts from the end. Not used by "full".
        scope: "isolated", "frozen" or "full", see `svflow.spectra.jacobians`.
        context: positions and padding.
        chunk: how many columns to compute at a time, by default all: less memory, the same result
            to rounding.

    Returns:
        (width, width), or (tokens, width, tokens, width) for "full".

    Raises:
        ValueError: a layer, a token or a scope that does not exist, states of the wrong shape, or
            a state or a Jacobian that is not finite (where its values are known).
        MemoryError: a Jacobian that does not fit, with the bytes it needs.

    Examples:
        >>> import svflow as sv
        >>> class Shear(sv.Flow):
        ...     depth, width = 1, 2
        ...
        ...     def velocity(self, t, x, context=None):
        ...         return x @ jnp.asarray([[0.0, 0.0], [5.0, 0.0]])
        >>> sv.jacobian(Shear(), 0, jnp.ones((1, 2))).tolist()  # J[i, j] = dy_i / dx_j
        [[1.0, 5.0], [0.0, 1.0]]
    """
    layer, x, token = check_state(flow, layer, x, token, scope, context)
    check_chunk(flow, x, scope, chunk, count=1)
    with on_mesh(mesh_of(flow)):
        J = _jacobian(flow, np.int32(layer), x, np.int32(token), context, scope, chunk)
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

    Examples:
        >>> import svflow as sv
        >>> F = jnp.asarray([[[0.0, 2.0], [1.0, 1.0]]])
        >>> flow = sv.power.PowerFlow(F, F, F, F, depth=2)
        >>> xs = sv.simulate(flow, jnp.asarray([[1.0, 0.0]])).xs
        >>> Js = sv.layer_jacobians(flow, xs)
        >>> Js.shape
        (2, 2, 2)
        >>> bool(abs(Js[0] @ xs[0, 0]).max() < 1e-6)  # what it does to a token's length: nothing
        True
    """
    check_flow(flow)
    xs = check_states(xs, flow.depth, flow.width)
    place = 0
    for layer in range(flow.depth):
        _, _, place = check_state(flow, layer, xs[layer], token, scope, context)
    check_chunk(flow, xs[0], scope, chunk, count=flow.depth)
    with on_mesh(mesh_of(flow)):
        J = _layer_jacobians(flow, xs[:-1], np.int32(place), context, scope, chunk)
    _check_result(J, range(flow.depth))
    return J


def check_states(xs, depth: int, width: int) -> Float[Array, "states tokens width"]:
    """The states of a trajectory; raises ValueError for what is not of this shape."""
    if isinstance(xs, Trajectory):
        raise ValueError("xs must be the states of a trajectory; pass its `.xs`")
    if jnp.ndim(xs) != 3 or len(xs) != depth + 1:
        raise ValueError(
            f"xs must be the {depth + 1} states of simulate, (states, tokens, {width}), "
            f"got shape {jnp.shape(xs)}"
        )
    return jnp.asarray(xs)


def text_jacobians(
    model: Transformer, ids: Int[ArrayLike, " tokens"], *, token: int = -1, scope: str = "frozen"
) -> Float[Array, "layers width width"]:
    """The `layer_jacobians` of a model along a text, its states at the highest precision too."""
    with jax.default_matmul_precision("highest"):
        xs = simulate(model.flow, model.embed(ids)).xs
    return layer_jacobians(model.flow, xs, token=token, scope=scope)


def token_map(
    flow: Flow, layer, x: Float[Array, "tokens width"], token, scope: str, context: Context | None
) -> Callable[[Float[Array, " width"]], Float[Array, " width"]]:
    """A layer as a map of one token's state, "isolated" or "frozen"."""
    if scope == "frozen":
        return flow.frozen(layer, x, token, context)
    alone = None
    if context is not None:
        alone = jax.tree.map(lambda part: part[token][None], context)
    return flow.frozen(layer, x[token][None], 0, alone)


def widened(flow: Flow, x: Array) -> tuple[Flow, Array]:
    """A flow and a state in float32 at least: derivatives need the digits."""
    wide = at_least_float32(x.dtype)
    return (flow, x) if wide == x.dtype else (flow.widened(wide), x.astype(wide))


def check_state(flow, layer, x, token, scope, context) -> tuple[int, Array, int]:
    """What `jacobian` raises for, but for memory and the result; layer, x, and token from 0."""
    check_flow(flow)
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
    layer = _index("layer", layer)
    if not 0 <= layer < flow.depth:
        raise ValueError(f"layer must be one of 0 .. {flow.depth - 1}, got {layer}")
    x = jnp.asarray(x)
    if x.ndim != 2 or x.shape[1] != flow.width or x.shape[0] < 1:
        raise ValueError(
            f"x must have shape (tokens, {flow.width}) with at least one token, got {x.shape}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, got {x.dtype}")
    tokens = x.shape[0]
    token = _index("token", token)
    if not -tokens <= token < tokens:
        raise ValueError(f"token {token} is not one of {tokens} tokens")
    check_context(context, tokens)
    # In NumPy: within a trace JAX would stage what it does to a known array as well.
    if not isinstance(x, jax.core.Tracer) and not np.isfinite(gathered(x)).all():
        raise ValueError(f"the state before layer {layer} is not finite")
    return layer, x, token % tokens


def _index(name: str, value) -> int:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be an int, not traced by a transform")
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None


def check_chunk(flow, x, scope, chunk, *, count):
    """Raises for a chunk that is none, and for `count` Jacobians that do not fit."""
    size = x.size if scope == "full" else flow.width
    if chunk is not None and _index("chunk", chunk) < 1:
        raise ValueError(f"chunk must be a positive number of columns, got {chunk!r}")
    item = at_least_float32(x.dtype).itemsize
    # The result, and what the columns of one chunk pass through: 4 widths in the feed-forward
    # layer, several times over.
    columns = min(size, chunk or size)
    mesh = mesh_of(flow)
    shares = 1 if mesh is None else mesh.shape.get(DATA, 1)
    check_memory(
        f"{count} {scope} Jacobian{'s' * (count > 1)} of {size} x {size}",
        item * size * (count * size + 16 * columns) // shares,
        x,
    )


def _check_result(J, layers):
    if isinstance(J, jax.core.Tracer):
        return
    finite = np.isfinite(gathered(J)).reshape(len(layers), -1).all(axis=-1)
    if not finite.all():
        layer = layers[int(np.argmin(finite))]
        raise ValueError(f"the Jacobian of layer {layer} is not finite in {J.dtype}")


@functools.partial(jax.jit, static_argnames=("scope", "chunk"))
def _jacobian(flow, layer, x, token, context, scope, chunk):
    flow, x = widened(flow, x)
    with jax.default_matmul_precision("highest"):
        if scope == "full":
            return columns_of(lambda y: flow.step(layer, y, context), x, chunk)
        return columns_of(token_map(flow, layer, x, token, scope, context), x[token], chunk)


@functools.partial(jax.jit, static_argnames=("scope", "chunk"))
def _layer_jacobians(flow, xs, token, context, scope, chunk):
    def one(layer_and_state):
        return _jacobian(flow, *layer_and_state, token, context, scope, chunk)

    return jax.lax.map(one, (jnp.arange(len(xs), dtype=jnp.int32), xs))


def columns_of(function, x, chunk):
    """d function / d x by columns, the shape of x twice."""
    _, push = jax.linearize(function, x)

    def column(place):
        return push((jnp.arange(x.size) == place).astype(x.dtype).reshape(x.shape))

    chunk = x.size if chunk is None else min(chunk, x.size)
    if chunk == x.size:
        columns = jax.vmap(column, out_axes=-1)(over_data(jnp.arange(x.size)))
    else:
        # The last chunk may reach past the end: columns of zeros, which are cut off.
        places = jnp.arange(-(-x.size // chunk) * chunk).reshape(-1, chunk)
        columns = jax.lax.map(lambda some: jax.vmap(column)(over_data(some)), places)
        columns = jnp.moveaxis(columns.reshape(-1, *x.shape)[: x.size], 0, -1)
    return columns.reshape(*x.shape, *x.shape)
