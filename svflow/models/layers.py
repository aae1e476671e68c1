"""The pieces of a transformer's layer and their parameters.

Axes: `tokens`; `width`, the residual stream; `heads` and `groups` (key/value heads) of width
`head`; `hidden`, the feed-forward layer; `experts`; `blocks`, the leading axis on which the layers'
parameters are stacked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.models.config import TransformerConfig


class Linear(nnx.Module):
    """x W + b, kernel of shape (..., in, out)."""

    def __init__(self, shape, *, bias: bool, std: float, rngs: nnx.Rngs, dtype):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((*shape[:-2], shape[-1]), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis; moments in float32 at least."""

    def __init__(self, shape, config: TransformerConfig, *, dtype, bias: bool | None = None):
        bias = config.norm_bias if bias is None else bias
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, config.norm_offset
        start = 1.0 - self.offset
        self.weight = nnx.Param(jnp.full(shape, start, dtype)) if config.norm_weight else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
        wide = at_least_float32(x.dtype)
        y = x.astype(wide)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        if self.weight is not None:
            y = y * jnp.broadcast_to(self.weight[...].astype(wide) + self.offset, y.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(wide), y.shape)
        return y.astype(x.dtype)


def activate(name: str, x: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens hidden"]:
    """The activation functions of `svflow.models.config.ACTIVATIONS`."""
    match name:
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "relu" | "silu" | "tanh" | "sigmoid":
            return getattr(jax.nn, name)(x)
    raise ValueError(f"unknown activation {name!r}")


class Attention(nnx.Module):
    """The projections of multi-head attention with grouped key/value heads."""

    def __init__(self, config: TransformerConfig, lead: tuple[int, ...], rngs: nnx.Rngs, dtype):
        std, width = config.initializer_range, config.width
        inner, groups = config.heads * config.head_width, config.kv_heads * config.head_width
        make = dict(std=std, rngs=rngs, dtype=dtype)
        self.query = Linear((*lead, width, inner), bias=config.query_key_bias, **make)
        self.key = Linear((*lead, width, groups), bias=config.query_key_bias, **make)
        self.value = Linear((*lead, width, groups), bias=config.value_bias, **make)
        make["std"] = std * config.residual_init_scale
        self.output = Linear((*lead, inner, width), bias=config.output_bias, **make)
        kind = config.query_key_norm

        def norm(full):
            shape = (*lead, full if kind == "full" else config.head_width)
            return Norm(shape, config, dtype=dtype, bias=False) if kind else None

        self.query_norm, self.key_norm = norm(inner), norm(groups)


class FeedForward(nnx.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where gated."""

    def __init__(self, config: TransformerConfig, lead, hidden: int, rngs: nnx.Rngs, dtype):
        std, width = config.initializer_range, config.width
        make = dict(bias=config.hidden_bias, rngs=rngs, dtype=dtype)
        self.activation = config.activation
        self.gate = Linear((*lead, width, hidden), std=std, **make) if config.gated else None
        self.up = Linear((*lead, width, hidden), std=std, **make)
        self.down = Linear((*lead, hidden, width), std=std * config.residual_init_scale, **make)

    def __call__(self, x: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
        if self.gate is None:
            return self.down(activate(self.activation, self.up(x)))
        return self.down(activate(self.activation, self.gate(x)) * self.up(x))


class Mixture(nnx.Module):
    """Mixture of experts: sum_e q_e(x) E_e(x) over the top-k experts of a softmax router.

    With `expert_normalize` the k weights are rescaled to sum 1.
    Source: Shazeer et al., "Outrageously large neural networks", 2017.
    """

    def __init__(self, config: TransformerConfig, lead, rngs: nnx.Rngs, dtype):
        self.chosen, self.normalize = config.experts_per_token, config.expert_normalize
        std = config.initializer_range
        self.router = Linear(
            (*lead, config.width, config.experts), bias=False, std=std, rngs=rngs, dtype=dtype
        )
        self.experts = FeedForward(
            config, (*lead, config.experts), config.expert_hidden, rngs, dtype
        )

    def weights(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens experts"]:
        """The router's posterior over experts, zero for those not chosen."""
        logits = self.router(x)
        wide = logits.astype(at_least_float32(x.dtype))
        posterior = jax.nn.softmax(wide, axis=-1)
        top, index = jax.lax.top_k(posterior, self.chosen)
        if self.normalize:
            top = top / jnp.sum(top, axis=-1, keepdims=True)
        tokens = jnp.arange(x.shape[0])[:, None]
        return jnp.zeros_like(posterior).at[tokens, index].set(top).astype(x.dtype)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        weights = self.weights(x)
        tokens, count = weights.shape
        if tokens * self.chosen < count:  # fewer to visit than there are
            chosen, experts = jax.lax.top_k(weights, self.chosen)

            def visit(total, choice):
                token, expert, weight = choice
                module = jax.tree.map(lambda leaf: leaf[expert], self.experts)
                return total.at[token].add(weight * module(x[token])), None

            each = jnp.repeat(jnp.arange(tokens), self.chosen)
            choices = (each, experts.reshape(-1), chosen.reshape(-1))
            return jax.lax.scan(visit, jnp.zeros_like(x), choices)[0]

        def add(total, expert_and_weight):
            expert, weight = expert_and_weight
            return total + weight[:, None] * expert(x), None

        return jax.lax.scan(add, jnp.zeros_like(x), (self.experts, weights.T))[0]


class Layers(nnx.Module):
    """The parameters of all layers, each leaf with a leading axis of blocks.

    Where dense and mixture layers alternate, each kind has its own stack.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, dtype):
        lead, width = (max(config.blocks) + 1,), config.width
        dense, sparse = len(config.dense_blocks), len(config.sparse_blocks)
        before = config.placement in ("pre", "sandwich")
        after = config.placement in ("post", "output", "sandwich")

        def norm(wanted):
            return Norm((*lead, width), config, dtype=dtype) if wanted else None

        self.attention_norm, self.hidden_norm = norm(before), norm(before)
        self.attention_post_norm, self.hidden_post_norm = norm(after), norm(after)
        self.attention = Attention(config, lead, rngs, dtype)
        self.feed_forward = (
            FeedForward(config, (dense,), config.hidden, rngs, dtype) if dense else None
        )
        self.mixture = Mixture(config, (sparse,), rngs, dtype) if sparse else None
