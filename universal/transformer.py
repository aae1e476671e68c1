"""The attention transformer: target and machine alike.

Axes: `layers`; `heads`; `width`, the state; `head`, the width of queries and keys; `out`, the
width of the output; `tokens`; `rows`, some of the tokens as queries; `keys`, the tokens attended
to.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float

from svflow import Context, Flow, simulate
from svflow.attention import allowed_keys, attention_weights, query_chunk
from svflow.dtypes import at_least_float32
from svflow.flow import check_context
from svflow.integers import positive
from svflow.memory import check_memory
from universal.maps import Map, Routing, gather, read, sources_of, spread

NAMES = ("query", "key", "value", "unembed")


class AttentionTransformer(Flow):
    r"""A transformer of nothing but attention, as a flow:

        X' = sum_h A^h X V^h,   A^h = softmax_j( scale (X W_Q^h)(X W_K^h)^T ),   T(X) = X^L W_U

    or X' = X + ... with a residual. Without one the displacement of a layer is X' - X, so that X'
    is rounded in units of |X| where it is smaller; `step` gives X' itself.

    A target holds arrays, with the value and output matrices merged into V. A machine holds
    `Routing`s, arrays, or some of each. Both are simulated by `svflow.simulate`, and `run` is that
    and the output.

    Arguments:
        query, key: ([layers,] heads, width, head).
        value: ([layers,] heads, width, width).
        unembed: (width, out).
        depth: the number of layers, where none of the arrays has a layer axis; else None.
        causal: whether tokens attend only to themselves and their past.
        residual: whether a layer adds to the state instead of replacing it.
        scale: of the logits; 1 / sqrt(head) by default.
        hardmax: attention to the largest logit alone, or in equal parts to those that agree with
            it to rounding; its derivative by the logits is zero.

    Of a context the mask holds as everywhere; positions have no meaning here.

    Raises:
        ValueError: maps of wrong or mismatched shapes, arrays of different or other than floating
            types, or not finite; a depth missing or in the way; a scale that is not finite in the
            arrays' type.
    """

    def __init__(
        self,
        query: Float[ArrayLike, "*layers heads width head"] | Routing,
        key: Float[ArrayLike, "*layers heads width head"] | Routing,
        value: Float[ArrayLike, "*layers heads width width"] | Routing,
        unembed: Float[ArrayLike, "width out"] | Routing,
        *,
        depth: int | None = None,
        causal: bool = False,
        residual: bool = False,
        scale: float | None = None,
        hardmax: bool = False,
    ):
        given = (query, key, value, unembed)
        maps = [a if isinstance(a, Routing) else jnp.asarray(a) for a in given]
        self.depth = _check(maps, depth)
        self.heads, self.width, self.head_width = maps[0].shape[-3:]
        self.out_width = maps[3].shape[-1]
        self.scale = _scale(scale, self.head_width)
        if not all(isinstance(a, Routing) for a in maps):
            dtype = next(a.dtype for a in maps if not isinstance(a, Routing))
            _fits(self.scale, at_least_float32(dtype) if hardmax else dtype)
        self.only_past, self.residual, self.hardmax = bool(causal), bool(residual), bool(hardmax)
        self.query, self.key, self.value, self.unembedding = (
            a if isinstance(a, Routing) else nnx.Param(a) for a in maps
        )

    @property
    def maps(self) -> tuple[Map, Map, Map, Map]:
        """Query, key, value and unembedding."""
        return self.query, self.key, self.value, self.unembedding

    @property
    def dtype(self):
        """Of the arrays; JAX's default floating type where all maps are routings."""
        arrays = (kernel for kernel in self.maps if not isinstance(kernel, Routing))
        return next((array[...].dtype for array in arrays), jnp.result_type(float))

    @property
    def tied(self) -> bool:
        """Whether all layers share their weights."""
        return all(kernel.ndim == 3 for kernel in self.maps[:3])

    @property
    def splitting(self) -> tuple[tuple[str, ...], ...]:
        return (("attention",),)

    @property
    def jumps(self) -> tuple[float, ...]:
        return () if self.tied else super().jumps

    @property
    def causal(self) -> bool:
        return self.only_past

    def dense(self, dtype=None) -> AttentionTransformer:
        """The same with every routing written out as a matrix of zeros and ones.

        Arguments:
            dtype: of those matrices; that of the arrays, or JAX's default type, by default.

        Raises:
            MemoryError: where they do not fit.
        """
        dtype = self.dtype if dtype is None else dtype
        size = sum(np.prod([float(n) for n in kernel.shape]) for kernel in self.maps)
        check_memory(
            f"the dense view of a machine of {self.width} columns",
            int(2 * size * jnp.dtype(dtype).itemsize),
            None,
        )
        written = (
            kernel.dense(dtype) if isinstance(kernel, Routing) else kernel[...]
            for kernel in self.maps
        )
        return AttentionTransformer(
            *written,
            depth=self.depth if self.tied else None,
            causal=self.causal,
            residual=self.residual,
            scale=self.scale,
            hardmax=self.hardmax,
        )

    def unembed(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens out"]:
        """The output that a state holds, x W_U."""
        if isinstance(self.unembedding, Routing):
            return gather(x, self.unembedding.sources)
        with jax.default_matmul_precision("highest"):
            return x @ self.unembedding[...]

    def reads(
        self, layer, x: Float[Array, "tokens width"]
    ) -> tuple[Float[Array, "tokens heads head"], Float[Array, "tokens heads head"]]:
        """The queries and keys of one layer at the state that enters it."""
        return self._at(_integer(layer), self._queries, x, None)

    def attention(
        self, layer, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "heads tokens keys"]:
        """The attention matrices of one layer at the state that enters it."""
        check_context(context, x.shape[0])
        mask = None if context is None else context.mask
        return self._at(_integer(layer), self._matrices, x, mask)

    def field(self, substep, t, x, context=None):
        update = self._mixed(t, x, context)
        return update if self.residual else update - x

    def step(self, layer, x, context=None):
        update = self._mixed(layer, x, context)  # X' itself: x + (X' - x) would round, and costs
        return x + update if self.residual else update

    def velocity(self, t, x, context=None):
        return self.field(0, t, x, context)

    def _mixed(self, t, x, context):
        return self._at(t, self._update, x, None if context is None else context.mask)

    def _at(self, t, function, x, mask):
        """function(layer, x, mask) of the layer that holds at time t."""
        # A known layer, and arrays, are indexed; routing is part of the program, so that where it
        # has a layer axis a layer that is not known is one of several programs.
        if not isinstance(t, jax.core.Tracer):
            return function(min(max(int(np.floor(np.asarray(t))), 0), self.depth - 1), x, mask)
        if not jnp.issubdtype(t.dtype, jnp.integer):
            t = jnp.floor(t)
        t = jnp.clip(t, 0, self.depth - 1).astype(jnp.int32)
        if not any(isinstance(kernel, Routing) and kernel.ndim == 4 for kernel in self.maps[:3]):
            return function(t, x, mask)

        def of(layer):
            return lambda x, mask: function(layer, x, mask)

        return jax.lax.switch(t, [of(layer) for layer in range(self.depth)], x, mask)

    def _queries(self, layer, x, mask):
        with jax.default_matmul_precision("highest"):
            return read(self.query, layer, x), read(self.key, layer, x)

    def _matrices(self, layer, x, mask):
        with jax.default_matmul_precision("highest"):
            query, key = self._queries(layer, x, mask)
            return self._weights(query, key, None, mask)

    def _update(self, layer, x, mask):
        """sum_h A^h x V^h; of wide x V^h one product, [A^1 ... A^H] with them stacked."""
        tokens = x.shape[0]
        chunk = query_chunk(tokens, self.heads)
        with jax.default_matmul_precision("highest"):
            query, key = self._queries(layer, x, mask)
            stack = sources_of(self.value, layer, x)

            def mixed(query, rows):
                weights = self._weights(query, key, rows, mask)
                # Of the weights and the heads' products the smaller is moved in memory.
                if stack.shape[-1] <= stack.shape[-2]:
                    return jnp.sum(weights @ stack, axis=0)
                weights = weights.transpose(1, 0, 2).reshape(query.shape[0], -1)
                return weights @ stack.reshape(-1, stack.shape[-1])

            if chunk == tokens:
                whole = mixed(query, None)
            else:  # all heads of some rows at a time; reverse mode computes them again
                chunk = max(1, chunk // self.heads)
                chunks = -(-tokens // chunk)
                query = jnp.pad(query, ((0, chunks * chunk - tokens), (0, 0), (0, 0)))
                # The rows that fill up the last chunk repeat the last one, and are cut off again.
                rows = jnp.minimum(jnp.arange(chunks * chunk), tokens - 1)
                parts = (query.reshape(chunks, chunk, *query.shape[1:]), rows.reshape(chunks, -1))
                whole = jax.lax.map(jax.checkpoint(lambda part: mixed(*part)), parts)
                whole = whole.reshape(chunks * chunk, -1)[:tokens]
        return spread(self.value, layer, whole)

    def _weights(self, query, key, rows, mask):
        """The attention of some rows of queries: (heads, rows, keys)."""
        allowed = allowed_keys(key.shape[0], causal=self.causal, mask=mask, rows=rows)
        if self.hardmax:
            return _hardmax(query, key, allowed, self.scale)
        _fits(self.scale, query.dtype)
        scale = jnp.asarray(self.scale, query.dtype)
        return attention_weights(query, [key], allowed, scale=scale)[:, 0]


def run(
    transformer: AttentionTransformer,
    x: Float[Array, "tokens width"],
    context: Context | None = None,
) -> Float[Array, "tokens out"]:
    """T(X): the output of the last state, simulated from x; a batch is `jax.vmap`.

    Arguments:
        transformer: a target with its x; or a machine, with x @ E of a program E.
        x: (tokens, width).
        context: padding.

    Raises:
        ValueError: x of another width, by the width that is needed, or of a wrong type.
    """
    check_transformer(transformer)
    x = jnp.asarray(x)
    check_state(transformer, x)
    end = simulate(transformer, x, ts=[float(transformer.depth)], context=context).xs[-1]
    return transformer.unembed(end)


def attention_matrices(
    transformer: AttentionTransformer,
    x: Float[Array, "tokens width"],
    context: Context | None = None,
) -> Float[Array, "layers heads tokens keys"]:
    """A^{l,h} of every layer and head along the simulation from x.

    Raises:
        ValueError: as `run`.
    """
    check_transformer(transformer)
    x = jnp.asarray(x)
    check_state(transformer, x)
    xs = simulate(transformer, x, context=context).xs
    depth = transformer.depth
    return jnp.stack([transformer.attention(layer, xs[layer], context) for layer in range(depth)])


def check_transformer(transformer: object, name: str = "transformer") -> None:
    """Raises ValueError for what is not an `AttentionTransformer`."""
    if not isinstance(transformer, AttentionTransformer):
        raise ValueError(
            f"{name} must be an AttentionTransformer, got {type(transformer).__name__}"
        )


def check_state(transformer: AttentionTransformer, x: Any) -> None:
    """Raises ValueError for what is not an array of the transformer's width and type."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(f"x must be an array, got {type(x).__name__}")
    if x.ndim != 2 or x.shape[1] != transformer.width:
        raise ValueError(
            f"x must have shape (tokens, {transformer.width}), got {x.shape}; a machine takes "
            f"x @ E with a program E of {transformer.width} columns, and a batch is jax.vmap"
        )
    check_type(transformer, "x", jax.dtypes.canonicalize_dtype(x.dtype))


def check_type(transformer: AttentionTransformer, name: str, dtype: Any) -> None:
    """Raises ValueError for states of another type than the weights; without any, all will do."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got {dtype}")
    weights = not all(isinstance(kernel, Routing) for kernel in transformer.maps)
    if weights and jax.dtypes.canonicalize_dtype(transformer.dtype) != dtype:
        raise ValueError(f"{name} is {dtype}, but the transformer's weights {transformer.dtype}")


def _hardmax(query, key, allowed, scale: float):
    """Equal weights on the keys whose logits agree with the largest to rounding."""
    narrow, dtype = query.dtype, at_least_float32(query.dtype)
    _fits(scale, dtype)
    query, key = (jax.lax.stop_gradient(a).astype(dtype) for a in (query, key))
    query = query * jnp.asarray(scale, dtype)
    wide = query.transpose(1, 0, 2) @ key.transpose(1, 2, 0)
    lowest = jnp.finfo(wide.dtype).min
    top = jnp.max(jnp.where(allowed, wide, lowest), axis=-1, keepdims=True)
    size = jnp.max(jnp.where(allowed, jnp.abs(wide), 0), axis=-1, keepdims=True)
    # Repeated tokens tie, and a target and its machine round their logits differently.
    near = 1024 * jnp.finfo(dtype).eps.astype(dtype) * size
    chosen = (allowed & (wide >= top - near)).astype(wide.dtype)
    return (chosen / jnp.sum(chosen, axis=-1, keepdims=True)).astype(narrow)


def _check(maps: list[Any], depth: int | None) -> int:
    """The depth; ValueError for maps that do not fit one another."""
    for name, kernel in zip(NAMES, maps):
        axes = (2,) if name == "unembed" else (3, 4)
        if kernel.ndim not in axes:
            kind = "(width, out)" if name == "unembed" else "([layers,] heads, width, ...)"
            raise ValueError(f"{name} must have shape {kind}, got {kernel.shape}")
        if 0 in kernel.shape:
            raise ValueError(f"{name} has no values: shape {kernel.shape}")
    arrays = {n: kernel for n, kernel in zip(NAMES, maps) if not isinstance(kernel, Routing)}
    first = next(iter(arrays), "")
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
        if array.dtype != arrays[first].dtype:
            raise ValueError(f"{name} is {array.dtype}, but {first} is {arrays[first].dtype}")
        if not isinstance(array, jax.core.Tracer) and not np.isfinite(np.asarray(array)).all():
            raise ValueError(f"{name} is not finite")
    query, key, value, unembed = (kernel.shape for kernel in maps)
    if key[-3:] != query[-3:]:
        raise ValueError(f"key has shape {key}, but query {query}")
    heads, width = query[-3:-1]
    if value[-3:] != (heads, width, width):
        raise ValueError(
            f"value has shape {value}, not ([layers,] {heads}, {width}, {width}) as query's "
            f"{query} asks; the value and output matrices are merged"
        )
    if unembed[0] != width:
        raise ValueError(f"unembed has shape {unembed}, but the state is {width} wide")
    layers = {n: kernel.shape[0] for n, kernel in zip(NAMES, maps) if kernel.ndim == 4}
    if len(set(layers.values())) > 1:
        raise ValueError(f"the maps have different numbers of layers: {layers}")
    if layers:
        count = next(iter(layers.values()))
        if depth is not None:
            raise ValueError(f"depth = {depth} was given, but the maps have {count} layers")
        return count
    if depth is None:
        raise ValueError("maps without a layer axis need depth, the number of layers")
    return positive("depth", depth)


def _scale(scale: float | None, head_width: int) -> float:
    value = np.asarray(head_width**-0.5 if scale is None else scale, np.float64)
    if value.ndim or not np.isfinite(value):
        raise ValueError(f"scale must be one finite number, got {scale!r}")
    return float(value)


def _fits(scale: float, dtype) -> None:
    if abs(scale) > float(jnp.finfo(dtype).max):
        raise ValueError(f"scale = {scale:.3g} is not finite in {jnp.dtype(dtype)}")


def _integer(layer: Any) -> Any:
    """The layer itself; ValueError where it is none."""
    known = None if isinstance(layer, jax.core.Tracer) else np.asarray(layer)
    dtype, shape = (layer.dtype, layer.shape) if known is None else (known.dtype, known.shape)
    if shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"layer must be one integer, got {layer!r}")
    return layer
