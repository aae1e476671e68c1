r"""What attention compares: the vMF kernel between a token's state and the keys of the others.

Axes: `tokens` (queries); `heads`; `keys`; `width`; `head`, the width of a head; `groups` of heads
that share keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from svflow import geometry
from svflow.dtypes import at_least_float32
from svflow.flow import Context
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.score import bessel
from svflow.score.correspondence import transformer_flow

HIGHEST = jax.lax.Precision.HIGHEST


class Kernel(NamedTuple):
    r"""One layer's attention as vMF densities of the state, one per head and attended token.

    The scores are s_ij = cap(x_i . m_ij + o_ij): linear in the normalised state x_i, with

        m_ij = scale diag(gamma) W_Q R_i^T R_j k_j,

    gamma the gain of the norm that attention reads through and R the rotations; o_ij comes from
    biases. With x_i on a sphere, exp(x_i . m_ij) is a vMF density but for its normaliser, of
    concentration kappa_ij = |x_i| |m_ij|.

    Where norms are LayerNorms the sphere is that of the complement of the ones vector, and x_i and
    m_ij are the parts there. With a norm of the queries (QK-norm) x_i is the normalised query
    instead, of one head or of all together: m_ij = scale diag(gain) R_i^T R_j k_j. Without any
    norm before attention (one after the addition, or on the output) x_i is the state itself, on
    the sphere of its own radius. What is not linear, a soft-cap or clipped queries, is in s alone.

    Arguments:
        scores: (tokens, heads, keys) s_ij, -inf where not allowed.
        dots: (tokens, heads, keys) x_i . m_ij, without biases, caps and clips.
        concentrations: (tokens, heads, keys) kappa_ij.
        cumulants: (tokens, heads, keys) log C_d(0) - log C_d(kappa_ij), d that of the sphere's
            space.
        radius: (tokens, heads) |x_i|.
        allowed: (tokens, keys) who attends to whom.
        norms: (tokens, heads, keys) |m_ij|.
    """

    scores: Float[Array, "tokens heads keys"]
    dots: Float[Array, "tokens heads keys"]
    concentrations: Float[Array, "tokens heads keys"]
    cumulants: Float[Array, "tokens heads keys"]
    radius: Float[Array, "tokens heads"]
    allowed: Bool[Array, "tokens keys"]
    norms: Float[Array, "tokens heads keys"]

    def log_posterior(self) -> Float[Array, "tokens heads keys"]:
        """log a_ij, the softmax that the layer uses."""
        return jax.nn.log_softmax(self.scores, axis=-1)

    def log_bayes(self) -> Float[Array, "tokens heads keys"]:
        r"""log p(j|x_i) of the vMF mixture of the same scores, with a uniform prior:

            p(j|x_i) ~ C_d(kappa_ij) exp(s_ij) over the allowed tokens.

        What is added to x_i . m_ij (biases) or done to it (caps, clips) is in both posteriors, so
        that they differ by the concentrations alone.
        """
        return jax.nn.log_softmax(self.scores - self.cumulants, axis=-1)


class Reading(NamedTuple):
    """What a layer's logits read of a state, in float32 at least.

    Arguments:
        state: (tokens, heads or one, dimensions) x_i on its sphere.
        raw: (tokens, heads * head) the queries before their norm, clip and rotation.
        maps: (width, heads, head) the derivative of `raw` by the normalised state.
        gain: (dimensions,) of the norm of the queries; None without one.
        grams: (heads, head, head) |m_ij|^2 = scale^2 z . gram z at z = R_i^T k_j.
        dimension: d of the vMF density.
    """

    state: Float[Array, "tokens any dimensions"]
    raw: Float[Array, "tokens all"]
    maps: Float[Array, "width heads head"]
    gain: Float[Array, " dimensions"] | None
    grams: Float[Array, "heads head head"]
    dimension: int

    def radius(self) -> Float[Array, "tokens any"]:
        """|x_i|."""
        return jnp.sqrt(jnp.sum(self.state * self.state, axis=-1))


def reading(flow: TransformerFlow, index, part, x: Float[Array, "tokens width"]) -> Reading:
    """What attention reads of the state x before a layer."""
    config, wide = flow.config, at_least_float32(x.dtype)
    shape = config.heads, config.head_width
    module, norm = flow._pick("attention", index, part), None
    if flow.layers.attention_norm is not None:
        norm = flow._pick("attention_norm", index, part)
    raw = module.query(x if norm is None else norm(x)).astype(wide)
    weights = gain_of(norm, config.width, wide)[:, None] * module.query.kernel[...].astype(wide)
    if flow.centered:
        weights = weights - jnp.mean(weights, axis=0, keepdims=True)
    maps = weights.reshape(config.width, *shape)
    if config.query_key_norm is None:
        state = geometry.norm_input(x, centered=flow.centered)
        state = state if norm is None else _scaled(norm, state)
        grams = jnp.einsum("wha,whb->hab", maps, maps, precision=HIGHEST)
        return Reading(state[:, None], raw, maps, None, grams, config.width - flow.centered)
    # The sphere is that of the normalised queries, of all heads together or of each.
    size = raw.shape[1] if config.query_key_norm == "full" else config.head_width
    state = raw.reshape(len(x), -1, size)
    state = _scaled(module.query_norm, geometry.center(state) if flow.centered else state)
    dimension = state.shape[-1]
    gain = gain_of(module.query_norm, dimension, wide)
    gains = jnp.broadcast_to(gain.reshape(-1, config.head_width), shape)
    grams = gains[:, :, None] * jnp.eye(config.head_width, dtype=wide) * gains[:, None]
    if flow.centered:
        grams = grams - gains[:, :, None] * gains[:, None] / dimension
    return Reading(state, raw, maps, gain, grams, dimension - flow.centered)


class Parts(NamedTuple):
    """What a kernel is made of, in float32 at least.

    Arguments:
        radius: (tokens, heads) |x_i|.
        query, key: (tokens, heads, head) rotated, the key of each head.
        bare: (tokens, heads, head) the query without biases and clips.
        value: (tokens, groups, head).
        maps: (heads, width, head) what takes R_i^T k_j to m_ij / scale; None for QK-norm.
        grams: (heads, head, head) |m_ij|^2 = scale^2 z . gram z at z = R_i^T k_j.
        turn: R_i of each token's vectors (tokens, any, head).
        scale: the layer's.
        dimension: d of the vMF density.
    """

    radius: Float[Array, "tokens heads"]
    query: Float[Array, "tokens heads head"]
    bare: Float[Array, "tokens heads head"]
    key: Float[Array, "tokens heads head"]
    value: Float[Array, "tokens groups head"]
    maps: Float[Array, "heads width head"] | None
    grams: Float[Array, "heads head head"]
    turn: Callable[[Array], Array]
    scale: Float[Array, ""]
    dimension: int


def kernel(
    model: Transformer | TransformerFlow,
    layer,
    x: Float[Array, "tokens width"],
    context: Context | None = None,
) -> Kernel:
    """The vMF kernel of one layer's attention.

    With rotations |m_ij| differs for every pair of tokens, and takes tokens^2 heads head^2 / 2
    multiplications.

    Arguments:
        model: a transformer or its flow.
        layer: which layer; it may be traced.
        x: (tokens, width) the state before it.
        context: positions and padding.

    Raises:
        ValueError: what is not a transformer, a layer it does not have, a wrong state or context.

    Source: derived here, after Liao, arXiv 2604.23740.
    """
    flow = transformer_flow(model, layer, x, context)
    return assemble(flow, layer, parts(flow, layer, x, context), context)


def assemble(flow: TransformerFlow, layer, p: Parts, context: Context | None) -> Kernel:
    """The kernel of its parts."""
    config, tokens = flow.config, p.query.shape[0]
    allowed = flow._allowed(flow._time(layer)[0], tokens, context)
    scores, dots = (
        p.scale * jnp.einsum("ihc,jhc->ihj", q, p.key, precision=HIGHEST) for q in (p.query, p.bare)
    )
    if config.attention_softcap is not None:
        scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
    squares = _key_squares(flow, p)
    norms = p.scale * jnp.sqrt(jnp.where(squares > 0, squares, 0))
    concentrations = p.radius[..., None] * norms
    return Kernel(
        _masked(scores, allowed),
        dots,
        concentrations,
        bessel.cumulant(p.dimension, concentrations),
        p.radius,
        allowed,
        norms,
    )


def parts(flow, layer, x, context) -> Parts:
    """The pieces of a kernel, in float32 at least."""
    config, wide = flow.config, at_least_float32(x.dtype)
    index, part = flow._time(layer)
    tokens, heads = x.shape[0], config.heads
    query, key, value = flow._project(index, part, x, context)
    read = reading(flow, index, part, x)

    def turn(a):
        return flow._rotate(index, a, a, context)[0] if config.ropes else a

    # The query without biases and clips.
    if read.gain is None:
        bare = jnp.einsum("iw,whc->ihc", read.state[:, 0], read.maps, precision=HIGHEST)
    else:
        bare = (read.state * read.gain).reshape(tokens, heads, config.head_width)
    return Parts(
        jnp.broadcast_to(read.radius(), (tokens, heads)),
        query.astype(wide),
        turn(bare),
        jnp.repeat(key.astype(wide), heads // config.kv_heads, axis=1),
        value.astype(wide),
        read.maps.transpose(1, 0, 2) if read.gain is None else None,
        read.grams,
        turn,
        jnp.asarray(config.scales, wide)[index],
        read.dimension,
    )


def unturned(p: Parts, vectors: Float[Array, "tokens heads head"]) -> Array:
    """R_i^T of each token's vectors."""
    return jax.linear_transpose(p.turn, vectors)(vectors)[0]


def _key_squares(flow, p: Parts) -> Float[Array, "tokens heads keys"]:
    """z^T gram z at z = R_i^T k_j, for every pair, at any positions (`rotated_forms` does it faster
    where these are 0, 1, ...).

    It is the inner product of R_i gram R_i^T with k_j k_j^T, so one matrix product per head; of
    the symmetric pair only one half is kept.
    """
    config = flow.config
    if not config.ropes:
        squares = jnp.einsum("jha,hab,jhb->hj", p.key, p.grams, p.key, precision=HIGHEST)
        return jnp.broadcast_to(squares, (p.query.shape[0], *squares.shape))
    rows, columns = _entries(config)
    twice = np.where(rows == columns, 1, 2)

    def one(head):
        gram, key = head
        turned = jnp.broadcast_to(gram, (key.shape[0], *gram.shape))
        turned = p.turn(p.turn(turned).swapaxes(1, 2))
        left = turned[:, rows, columns] * jnp.asarray(twice, gram.dtype)
        return jnp.matmul(left, (key[:, rows] * key[:, columns]).T, precision=HIGHEST)

    return jax.lax.map(one, (p.grams, p.key.transpose(1, 0, 2))).transpose(1, 0, 2)


def _entries(config) -> tuple[np.ndarray, np.ndarray]:
    """The entries of one half of a rotated gram matrix that can differ from zero."""
    head = config.head_width
    if config.query_key_norm is None or config.norm == "layer":
        return np.triu_indices(head)
    # A diagonal one mixes only the two coordinates of a plane.
    places = {(a, a) for a in range(head)}
    for rope in config.ropes:
        pairs = rope.width // 2
        places |= {(a, a + pairs) for a in range(pairs)}
    rows, columns = np.asarray(sorted(places)).T
    return rows, columns


def _masked(scores, allowed):
    return jnp.where(allowed[:, None], scores, -jnp.inf)


def _scaled(norm, y):
    """What a norm makes of a state, centred where it has to be, without its gain and bias."""
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.eps)


def gain_of(norm, size, dtype) -> Float[Array, " size"]:
    """The gain of a norm, ones where it has none."""
    if norm is None or norm.weight is None:
        return jnp.ones((size,), dtype)
    return norm.weight[...].astype(dtype) + np.asarray(norm.offset, dtype)
