r"""The layers of a transformer as posterior-weighted scores.

Axes: `tokens`; `factors` of a product latent, heads or one; `states` of each factor: the tokens
attended to, units or experts; `width`, the residual stream; `head`, the width of a head.

Each function returns posterior and scores whose mean is the update that the layer adds to the
stream (`Flow.branch`); a norm after the addition is the retraction and no part of it. These are
re-parametrisations: they hold for every layer, trained or not. What may be false of a model is
that its posterior is the one its scores imply: see `svflow.score.consistency`.

Source: Liao, arXiv 2604.23740; the product latent, the signed posterior and the norms on outputs,
derived here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow import geometry
from svflow.attention import attention_weights
from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_context
from svflow.models.layers import Norm, activate
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.score.mixtures import check_states


class Correspondence(NamedTuple):
    r"""A layer's update as the mean of scores under a posterior.

    The latent is z = (z_1, ..., z_F), one state per factor, with the posterior
    q_i(z) = prod_f posterior[i, f, z_f] of token i and the scores

        eta_i(z) = offset_i + scale_i sum_f sign[i, f, z_f] scores[f, z_f],

    so that E_q[eta] = offset + scale sum_f sum_s posterior sign scores, `update`.

    Arguments:
        posterior: (tokens, factors, states) of sum 1.
        scores: (factors, states, width) where all tokens share them, or with tokens in front.
        sign: (tokens, factors, states) -1, 0 or 1; None for ones.
        scale: (tokens,); None for ones.
        offset: (width,) biases, which every state shares; or with tokens in front.
    """

    posterior: Float[Array, "tokens factors states"]
    scores: Float[Array, "*tokens factors states width"]
    sign: Float[Array, "tokens factors states"] | None
    scale: Float[Array, " tokens"] | None
    offset: Float[Array, "*tokens width"]

    def update(self) -> Float[Array, "tokens width"]:
        """The layer's update: the posterior's mean of the scores."""
        weights = self.posterior if self.sign is None else self.posterior * self.sign
        which = "ifs,ifsw->iw" if self.scores.ndim == 4 else "ifs,fsw->iw"
        mean = jnp.einsum(which, weights, self.scores, precision=jax.lax.Precision.HIGHEST)
        return self.offset + (mean if self.scale is None else self.scale[:, None] * mean)


def attention(
    model: Transformer | TransformerFlow,
    layer,
    x: Float[Array, "tokens width"],
    context: Context | None = None,
) -> Correspondence:
    r"""Multi-head attention as the mean over a product latent, one attended token per head:

        q_i(z) = prod_h a^h_{i z_h},   eta(z) = sum_h W_O^h v^h_{z_h} + b_O.

    Arguments:
        model: a transformer or its flow.
        layer: which layer; it may be traced.
        x: (tokens, width) the state before it.
        context: positions and padding.

    Returns:
        The posterior (tokens, heads, keys), the softmax weights; the scores (heads, keys, width),
        the values as each head writes them to the stream. The output bias is the offset. A norm on
        the output (OLMo 2, Gemma 2) is a factor per token and a gain: it is in scale and scores.

    Raises:
        ValueError: what is not a transformer, a layer it does not have, a wrong state or context.
    """
    flow = transformer_flow(model, layer, x, context)
    config, tokens = flow.config, x.shape[0]
    index, part = flow._time(layer)
    query, key, value = flow._project(index, part, x, context)
    weights = attention_weights(
        query,
        [key],
        flow._allowed(index, tokens, context),
        scale=jnp.asarray(config.scales, x.dtype)[index],
        softcap=config.attention_softcap,
    )
    posterior = weights.reshape(config.heads, tokens, tokens).transpose(1, 0, 2)
    output = flow._pick("attention", index, part).output
    raw = Correspondence(
        posterior, written_values(flow, output, value), None, None, _bias(output, config.width)
    )
    return _normed(flow, "attention_post_norm", index, part, raw)


def feed_forward(
    model: Transformer | TransformerFlow, layer, x: Float[Array, "tokens width"]
) -> Correspondence:
    r"""A feed-forward layer as the mean over a signed posterior of its units:

        A_i = sum_m |a_im|,   q_im = |a_im| / A_i,   eta_im = A_i sgn(a_im) w_m + b,

    a the activations (of a gated layer act(gate) up) and w_m the rows of the down projection.
    Where no unit is active the posterior is uniform and A = 0.

    Arguments:
        model, layer, x: as for `attention`; in models that mix dense layers and mixtures of
            experts the layer must be a Python int.

    Returns:
        The posterior (tokens, 1, units), the scores w (1, units, width), sign, and scale A.

    Raises:
        ValueError: as `attention`, and for a layer that is a mixture of experts.
    """
    flow = transformer_flow(model, layer, x)
    module, y, index, part = _hidden(flow, layer, x, sparse=False)
    up = module.up(y)
    if module.gate is None:
        activations = activate(module.activation, up)
    else:
        activations = activate(module.activation, module.gate(y)) * up
    size = jnp.abs(activations)
    scale = jnp.sum(size, axis=-1)
    idle = scale == 0
    posterior = jnp.where(
        idle[:, None], 1 / size.shape[-1], size / jnp.where(idle, 1, scale)[:, None]
    )
    raw = Correspondence(
        posterior[:, None],
        module.down.kernel[...][None],
        jnp.sign(activations)[:, None],
        scale,
        _bias(module.down, flow.width),
    )
    return _normed(flow, "hidden_post_norm", index, part, raw)


def mixture(
    model: Transformer | TransformerFlow, layer, x: Float[Array, "tokens width"]
) -> Correspondence:
    r"""A top-k mixture of experts as the mean of the experts' outputs under the router's posterior.

    Where the router's weights of the chosen experts are not rescaled to sum 1 (OLMoE), their sum
    is the scale. All experts are computed, for every token.

    Arguments:
        model, layer, x: as for `feed_forward`.

    Returns:
        The posterior (tokens, 1, experts), zero for those not chosen; the scores
        (tokens, 1, experts, width), the outputs E_e(x_i).

    Raises:
        ValueError: as `attention`, and for a layer that is no mixture of experts.
    """
    flow = transformer_flow(model, layer, x)
    module, y, index, part = _hidden(flow, layer, x, sparse=True)
    weights = module.weights(y)
    scale = jnp.sum(weights, axis=-1)
    outputs = jax.vmap(lambda expert: expert(y), out_axes=1)(module.experts)
    raw = Correspondence(
        (weights / scale[:, None])[:, None],
        outputs[:, None],
        None,
        scale,
        jnp.zeros((flow.width,), x.dtype),
    )
    return _normed(flow, "hidden_post_norm", index, part, raw)


def transformer_flow(
    model: Any, layer: Any, x: Any, context: Context | None = None
) -> TransformerFlow:
    """The flow of a transformer, once it, the layer and the state are checked."""
    flow = getattr(model, "flow", model)
    if not isinstance(flow, TransformerFlow):
        raise ValueError(f"this is about a transformer's layers, got {type(model).__name__}")
    check_layer(flow, layer)
    check_states(x, flow.width)
    check_weights(flow, x, "x")
    check_context(context, x.shape[0])
    return flow


def check_layer(flow: Flow, layer: Any) -> None:
    """Raises ValueError for a layer that is not a whole number or, where known, not the flow's."""
    kinds = (int, np.integer, jax.Array, np.ndarray)
    whole = isinstance(layer, kinds) and (
        jnp.ndim(layer) == 0 and jnp.issubdtype(jnp.result_type(layer), jnp.integer)
    )
    known = not isinstance(layer, jax.core.Tracer)
    if not whole or (known and not 0 <= layer < flow.depth):
        raise ValueError(f"layer must be an integer, one of 0 .. {flow.depth - 1}, got {layer!r}")


def check_weights(flow: Flow, x: Array, name: str) -> None:
    """Raises ValueError for states of a type that a transformer has no weights of."""
    if isinstance(flow, TransformerFlow):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(flow)}
        if x.dtype not in dtypes:
            weights = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"{name} is {x.dtype}, the model's weights are {weights}: convert one")


def written_values(
    flow: TransformerFlow, output: Any, value: Float[Array, "tokens groups head"]
) -> Float[Array, "heads tokens width"]:
    """W_O^h v_j^h: what each head writes to the stream for each token that it reads."""
    config = flow.config
    value = jnp.repeat(value, config.heads // config.kv_heads, axis=1)
    kernel = (
        output.kernel[...]
        .astype(value.dtype)
        .reshape(config.heads, config.head_width, config.width)
    )
    return jnp.einsum("jhc,hcw->hjw", value, kernel, precision=jax.lax.Precision.HIGHEST)


def _bias(linear, width):
    return jnp.zeros((width,), linear.kernel.dtype) if linear.bias is None else linear.bias[...]


def _hidden(flow, layer, x, *, sparse):
    """The module of one layer after attention, and what it reads."""
    config = flow.config
    kinds = set(config.sparse) if isinstance(layer, jax.core.Tracer) else {config.sparse[layer]}
    if kinds != {sparse}:
        wanted, other = (
            ("`mixture`", "`feed_forward`") if sparse else ("`feed_forward`", "`mixture`")
        )
        if len(kinds) > 1:
            raise ValueError("layers of two kinds: the layer must be a Python int")
        raise ValueError(f"layer {layer} is not one of {wanted}: use {other}")
    index, part = flow._time(layer)
    module = flow._pick_hidden("mixture" if sparse else "feed_forward", index, part)
    return module, flow._pre("hidden_norm", index, part, x), index, part


def _normed(flow, name, index, part, raw: Correspondence) -> Correspondence:
    """With the norm on the output, where the family has one: linear, but for a factor per token."""
    if flow.config.placement not in ("output", "sandwich"):
        return raw
    norm: Norm = flow._pick(name, index, part)
    scores, offset, update = raw.scores, raw.offset, raw.update()
    if norm.kind == "layer":
        scores, offset, update = (geometry.center(a) for a in (scores, offset, update))
    wide = update.astype(at_least_float32(update.dtype))
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + norm.eps).astype(update.dtype)
    offset = factor[:, None] * offset
    if norm.weight is not None:
        gain = norm.weight[...] + np.asarray(norm.offset, update.dtype)
        scores, offset = scores * gain, offset * gain
    if norm.bias is not None:
        offset = offset + norm.bias[...]
    scale = factor if raw.scale is None else factor * raw.scale
    return raw._replace(scores=scores, offset=offset, scale=scale)
