"""One transformer for all families: embedding, a flow over depth, and a head.

Axes: `tokens`; `width`, the residual stream; `vocab`. Those of a layer: `svflow.models.layers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from svflow import attention
from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_context
from svflow.models.config import TransformerConfig
from svflow.models.layers import Layers, Linear, Norm, activate
from svflow.simulate import simulate


class _Frozen(NamedTuple):
    """The context of one token among others that stand still.

    Arguments:
        positions: (1,) the token's position.
        length: the largest position of all tokens, + 1, on which some rotations depend.
        allowed: (1, tokens + 1) which of the tokens' keys it attends to, and of its own, the last.
        key, value: (tokens, groups, head) before the token moves.
    """

    positions: Int[Array, " one"]
    length: Int[Array, ""]
    allowed: Bool[Array, "one keys"]
    key: Float[Array, "tokens groups head"]
    value: Float[Array, "tokens groups head"]


class TransformerFlow(Flow):
    """The layers of a transformer as a flow.

    A serial block is split into attention and feed-forward; a parallel block is one substep with
    both branches. A norm after the addition ("post" placement) makes the substep's displacement
    n(x + f(x)) - x: with gain and bias the norm is no retraction (it is not the identity on its
    own image), so it belongs to the field, and dt -> 0 then has a limit.

    Weights over depth are piecewise constant, or with `interpolated("linear")` linear between
    layers, layer l's weights at t = l. Windows, rotary embeddings and attention scales stay
    piecewise constant.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        self.depth, self.width = config.depth, config.width
        self.interpolation = "constant"
        self.computed_in: str | None = None
        self.layers = Layers(config, rngs, dtype)

    def interpolated(self, kind: str) -> TransformerFlow:
        """The same flow with weights over depth "constant" or "linear" between layers."""
        if kind not in ("constant", "linear"):
            raise ValueError(f"interpolation is 'constant' or 'linear', got {kind!r}")
        if kind == "linear" and len(set(self.config.sparse)) > 1:
            raise ValueError("weights of dense and mixture layers cannot be interpolated")
        flow = jax.tree.map(lambda leaf: leaf, self)
        flow.interpolation = kind
        return flow

    def widened(self, dtype) -> TransformerFlow:
        """The same flow computing in a wider type, its weights stored as they are.

        Each layer's are converted when it is their turn: all at once would take more memory than
        they do.
        """
        flow = jax.tree.map(lambda leaf: leaf, self)
        flow.computed_in = jnp.dtype(dtype).name
        return flow

    @property
    def splitting(self) -> tuple[tuple[str, ...], ...]:
        names = ("attention", "feed_forward")
        return (names,) if self.config.parallel else tuple((name,) for name in names)

    @property
    def centered(self) -> bool:
        return self.config.norm == "layer"

    @property
    def causal(self) -> bool:
        return self.config.causal

    def branch(self, name, t, x, context=None):
        index, part = self._time(t)
        if name == "attention":
            return self._attention(index, part, x, context)
        if name == "feed_forward":
            return self._feed_forward(index, part, x)
        raise ValueError(f"no branch {name!r}; a transformer has {self.splitting}")

    def field(self, substep, t, x, context=None):
        update = sum(
            (self.branch(name, t, x, context) for name in self.splitting[substep]),
            start=jnp.zeros((), x.dtype),
        )
        if self.config.placement != "post":
            return update
        name = ("attention_post_norm", "hidden_post_norm")[substep]
        return self._pick(name, *self._time(t))(x + update) - x

    def _time(self, t):
        """(layer, how far into it); None for a whole number of layers."""
        if not isinstance(t, jax.Array):
            t = jnp.asarray(t)
        if jnp.issubdtype(t.dtype, jnp.integer):
            return t, None
        index = jnp.clip(jnp.floor(t), 0, self.depth - 1)
        part = jnp.clip(t - index, 0, 1) if self.interpolation == "linear" else None
        return index.astype(jnp.int32), part

    def _pick(self, name, index, part, *, stack=None):
        """The parameters `name` of one layer, or between two."""
        module = getattr(self.layers, name)
        blocks = jnp.asarray(self.config.blocks if stack is None else stack)

        def at(block):
            one = jax.tree.map(lambda leaf: _at(leaf, block), module)
            if self.computed_in is None:
                return one
            return jax.tree.map(lambda leaf: leaf.astype(self.computed_in), one)

        here = at(blocks[index])
        if part is None:
            return here
        following = jnp.minimum(index + 1, self.depth - 1)
        there = at(blocks[following])

        def between(a, b):
            share = part.astype(a.dtype)
            return (1 - share) * a + share * b

        return jax.tree.map(between, here, there)

    def _pre(self, name, index, part, x):
        return x if getattr(self.layers, name) is None else self._pick(name, index, part)(x)

    def _post(self, name, index, part, update):
        if self.config.placement in ("output", "sandwich"):
            return self._pick(name, index, part)(update)
        return update

    def frozen(self, layer, x, token, context=None):
        index, part = self._time(layer)
        _, key, value = self._project(index, part, x, context)
        rows = jnp.atleast_1d(token)
        allowed = self._allowed(index, x.shape[0], context)[rows]
        positions = token_positions(x.shape[0], context)
        fixed: Any = _Frozen(
            positions=positions[rows],
            length=jnp.max(positions) + 1,
            allowed=jnp.concatenate([allowed.at[:, rows].set(False), allowed[:, rows]], axis=1),
            key=key,
            value=value,
        )
        if jnp.ndim(token):
            return lambda moved: self.step(layer, moved, fixed)
        return lambda row: self.step(layer, row[None], fixed)[0]

    def _attention(self, index, part, x, context):
        config = self.config
        q, k, v = self._project(index, part, x, context)
        keys, values = [k], [v]
        if isinstance(context, _Frozen):
            allowed, keys, values = context.allowed, [context.key, k], [context.value, v]
        else:
            allowed = self._allowed(index, x.shape[0], context)
        weights = attention.attention_weights(
            q,
            keys,
            allowed,
            scale=jnp.asarray(config.scales, x.dtype)[index],
            softcap=config.attention_softcap,
        )
        mixed = attention.mix_values(weights, values).reshape(x.shape[0], -1)
        output = self._pick("attention", index, part).output
        return self._post("attention_post_norm", index, part, output(mixed))

    def _project(self, index, part, x, context):
        """Queries, keys and values, (tokens, heads, head) each, rotated."""
        config = self.config
        tokens = x.shape[0]
        layer = self._pick("attention", index, part)
        y = self._pre("attention_norm", index, part, x)
        q, k, v = layer.query(y), layer.key(y), layer.value(y)
        if config.query_key_norm == "full":
            q, k = layer.query_norm(q), layer.key_norm(k)
        clip = config.projection_clip
        if clip is not None:
            q, k, v = (jnp.clip(a, -clip, clip) for a in (q, k, v))
        q = q.reshape(tokens, config.heads, config.head_width)
        k = k.reshape(tokens, config.kv_heads, config.head_width)
        v = v.reshape(tokens, config.kv_heads, config.head_width)
        if config.query_key_norm == "head":
            q, k = layer.query_norm(q), layer.key_norm(k)
        if config.ropes:
            q, k = self._rotate(index, q, k, context)
        return q, k, v

    def _allowed(self, index, tokens, context):
        windows = self.config.windows
        return attention.allowed_keys(
            tokens,
            causal=self.config.causal,
            window=jnp.asarray(windows)[index] if any(windows) else None,
            mask=None if context is None else context.mask,
        )

    def _rotate(self, index, q, k, context):
        wide = at_least_float32(q.dtype)
        positions = token_positions(q.shape[0], context)
        length = context.length if isinstance(context, _Frozen) else None
        which = jnp.asarray(self.config.rope_of)[index]

        def turn(rope):
            return lambda q, k: tuple(
                attention.rotate(a, rope.angles(positions, wide, length), rope.amplitude)
                for a in (q, k)
            )

        kinds = [turn(rope) for rope in self.config.ropes]
        if -1 in self.config.rope_of:
            kinds, which = [lambda q, k: (q, k), *kinds], which + 1
        return kinds[0](q, k) if len(kinds) == 1 else jax.lax.switch(which, kinds, q, k)

    def _pick_hidden(self, name, index, part):
        """The "feed_forward" or the "mixture" of one layer, which has to be of that kind."""
        config = self.config
        # Each kind of layer is stacked apart: where a layer's block stands within its kind.
        stack = [
            (config.sparse_blocks if sparse else config.dense_blocks).index(block)
            for block, sparse in zip(config.blocks, config.sparse)
        ]
        return self._pick(name, index, part, stack=stack)

    def _feed_forward(self, index, part, x):
        config, layers = self.config, self.layers
        y = self._pre("hidden_norm", index, part, x)

        def dense(y):
            return self._pick_hidden("feed_forward", index, part)(y)

        def mixture(y):
            return self._pick_hidden("mixture", index, part)(y)

        if layers.mixture is None:
            update = dense(y)
        elif layers.feed_forward is None:
            update = mixture(y)
        else:
            update = jax.lax.cond(jnp.asarray(config.sparse)[index], mixture, dense, y)
        return self._post("hidden_post_norm", index, part, update)


def _at(leaf, index):
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def token_positions(tokens: int, context: Context | None) -> Int[Array, " tokens"]:
    """The positions of a context: given, or counted over its real tokens, or 0..tokens - 1."""
    if context is not None and context.positions is not None:
        return _at_least_int32(context.positions)
    if context is not None and context.mask is not None:
        return jnp.maximum(jnp.cumsum(context.mask.astype(jnp.int32)) - 1, 0)
    return jnp.arange(tokens)


def _at_least_int32(values):
    """Narrower integers would overflow where they are counted or shifted."""
    return values if values.dtype.itemsize >= 4 else values.astype(jnp.int32)


def indices_of(values, size: int, name: str, table: str) -> Int[Array, " tokens"]:
    """Indices into a table of `size` rows, checked as far as they are known at this time."""
    if not isinstance(values, jax.core.Tracer):
        values = np.asarray(values)  # without x64 JAX would wrap wide integers into the table
        if values.dtype.kind in "US":
            raise ValueError(f"{name}s must be integers, got text: encode it first")
    if values.ndim != 1 or not values.size:
        raise ValueError(
            f"{name}s must be a sequence that is not empty, got shape {values.shape}; batches go "
            "through jax.vmap"
        )
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name}s must be integers, got {values.dtype}")
    if isinstance(values, np.ndarray):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise ValueError(f"{name} {bad} is outside the {table} of {size}")
        values = jnp.asarray(values, jnp.int32)
    return _at_least_int32(values)


def rows_of(table: nnx.Param, indices: Int[Array, " tokens"]) -> Float[Array, "tokens width"]:
    """The rows of a table; nan for one that it does not have."""
    size = table.shape[0]
    # JAX would wrap negative indices around, and those of 64 bits to 32.
    indices = jnp.where((indices < 0) | (indices >= size), size, indices)
    return table[...].at[indices].get(mode="fill", fill_value=jnp.nan)


class Embedding(nnx.Module):
    """Token ids to the state that enters the first layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        std, narrow = config.initializer_range, config.embedding_width or config.width

        def table(rows):
            return nnx.Param(std * jax.random.normal(rngs.params(), (rows, narrow), dtype))

        self.tokens = table(config.vocab_size)
        self.positions = table(config.positions) if config.positions else None
        self.segments = table(config.segments) if config.segments else None
        self.norm = Norm((narrow,), config, dtype=dtype) if config.embedding_norm else None
        make = dict(bias=True, std=std, rngs=rngs, dtype=dtype)
        self.projection = Linear((narrow, config.width), **make) if config.embedding_width else None

    def __call__(self, ids, context=None, segments=None):
        config = self.config
        x = rows_of(self.tokens, ids)
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + rows_of(self.positions, self._position_rows(ids, context))
        if self.segments is not None:
            x = x + rows_of(self.segments, jnp.zeros_like(ids) if segments is None else segments)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.projection is None else self.projection(x)

    def _position_rows(self, ids, context):
        config = self.config
        given = context is not None and any(part is not None for part in context)
        if config.pad_token is None or given:
            return token_positions(ids.shape[0], context) + config.position_offset
        real = (ids != config.pad_token).astype(ids.dtype)
        return jnp.cumsum(real) * real + config.pad_token


class Head(nnx.Module):
    """The last state of a token to its logits; the kernel is the token table where tied."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        std, narrow = config.initializer_range, config.embedding_width or config.width
        masked = config.head == "masked"
        normed = narrow if masked else config.width if config.final_norm else 0
        self.norm = Norm((normed,), config, dtype=dtype) if normed else None
        make = dict(bias=True, std=std, rngs=rngs, dtype=dtype)
        self.dense = Linear((config.width, narrow), **make) if masked else None
        shape = (config.vocab_size, narrow)
        own = config.head is not None and not config.tied
        self.kernel = (
            nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype)) if own else None
        )
        bias = config.head is not None and config.head_bias
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), dtype)) if bias else None

    def __call__(self, x, table):
        if self.config.head is None:
            raise ValueError(f"this {self.config.family} checkpoint has no head: no logits")
        if self.dense is not None:
            x = activate(self.config.head_activation or self.config.activation, self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits = x @ (table if self.kernel is None else self.kernel[...]).T
        if self.bias is not None:
            logits = logits + jnp.broadcast_to(self.bias[...], logits.shape)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Transformer(nnx.Module):
    """A transformer: `embed`, then the `flow` over depth, then `unembed`.

    Arguments:
        config: what the architecture is.
        rngs: for the untrained weights (normal, `initializer_range`).
        dtype: of the parameters and of everything computed from them.

    Everything is single-example; batches are `jax.vmap`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(f"rngs must be flax's nnx.Rngs(seed), got {rngs!r}")
        self.config = config
        self.embedding = Embedding(config, rngs=rngs, dtype=dtype)
        self.flow = TransformerFlow(config, rngs=rngs, dtype=dtype)
        self.head = Head(config, rngs=rngs, dtype=dtype)

    def embed(
        self,
        ids: Int[ArrayLike, " tokens"],
        context: Context | None = None,
        *,
        segments: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens width"]:
        """The state that enters the first layer.

        Arguments:
            ids: (tokens,) token ids, each in [0, vocab_size).
            context: positions and padding.
            segments: (tokens,) token types, for families that have them; default 0.

        Raises:
            ValueError: an empty sequence, what is not a sequence of integers, a wrong context, a
                sequence longer than the learned positions, or (outside jit) an id, a segment or a
                position that has no row in its table. Under jit, such a token's state is nan.
        """
        config = self.config
        indices = indices_of(ids, config.vocab_size, "id", "vocabulary")
        check_context(context, indices.size)
        if config.positions:
            room = config.positions - config.position_offset
            given = None if context is None else context.positions
            if given is not None:
                indices_of(given, room, "position", "learned positions")
            elif indices.size > room:
                raise ValueError(
                    f"{indices.size} tokens, but {config.family} has {room} learned positions"
                )
        if segments is not None:
            if not config.segments:
                raise ValueError(f"{config.family} has no token types")
            segments = indices_of(segments, config.segments, "segment", "token types")
            if segments.shape != indices.shape:
                raise ValueError(f"{segments.size} segments for {indices.size} ids")
        return self.embedding(indices, context, segments)

    def unembed(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens vocab"]:
        """The logits of a state, the final norm included. Raises ValueError without a head."""
        return self.head(x, self.embedding.tokens[...])

    def __call__(
        self,
        ids: Int[ArrayLike, " tokens"],
        context: Context | None = None,
        *,
        segments: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens vocab"]:
        """The logits of every token."""
        x = self.embed(ids, context, segments=segments)
        end = [float(self.config.depth)]
        return self.unembed(simulate(self.flow, x, ts=end, context=context).xs[-1])
