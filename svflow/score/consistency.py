r"""How far a posterior is from the one that its scores imply.

Axes: `tokens`; `heads`; `components` of a mixture; `draws`, independent repetitions.

For a mixture p(x) = sum_z pi_z p(x|z) and any posterior q, log p - ELBO = KL(q || p(z|x)), and with
B = max_z |grad_x log p(x|z)| Pinsker's inequality gives

    |E_q[grad log p(x|z)] - grad log p(x)| <= B sqrt(2 KL(q || p(z|x))).

Source: Liao, arXiv 2604.23740 ("variational consistency"); its exact measures are not known to us:
those here are derived here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from svflow import geometry
from svflow.flow import Context
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.score import bessel
from svflow.score.correspondence import transformer_flow, written_values
from svflow.score.kernel import HIGHEST, Kernel, Parts, assemble, parts, unturned
from svflow.score.mixtures import StateMixture, check_posterior, negative_entropy


def divergence(
    posterior: Float[Array, "*tokens components"], log_target: Float[Array, "*tokens components"]
) -> Float[Array, "*tokens"]:
    """KL(q || p) = sum_z q_z (log q_z - log p_z) over the last axis, 0 log 0 = 0.

    States of no probability under q may have log p = -inf. Differentiable in both.
    """
    some = posterior > 0
    log_target = jnp.where(some, log_target, 0)
    cross = jnp.sum(jnp.where(some, posterior, 0) * log_target, axis=-1)
    return negative_entropy(posterior) - cross


def consistency_loss(
    mixture: StateMixture,
    x: Float[Array, "tokens width"],
    posterior: Float[Array, "tokens components"],
) -> Float[Array, ""]:
    """L_cons = mean_x KL(q(z|x) || p(z|x)), in nats.

    Differentiable in the posterior, the mixture and x; to train the posterior alone, give
    `jax.lax.stop_gradient` of the others.

    Arguments:
        mixture: p(z) and p(x|z).
        x: (tokens, width) states.
        posterior: (tokens, components) q(z|x), of a router for example.

    Raises:
        ValueError: a posterior of the wrong shape, or (outside jit) whose rows do not sum to 1.
    """
    q = check_posterior(posterior, (x.shape[0], mixture.components))
    target = mixture.log_posterior(x)
    return jnp.mean(divergence(q.astype(target.dtype), target))


class Gap(NamedTuple):
    """A posterior against a mixture's own.

    Arguments:
        kl: (tokens,) KL(q || p(z|x)) in nats: log p(x) - ELBO.
        field: (tokens,) |E_q[score] - grad log p|, tangent to the mixture's manifold.
        bound: (tokens,) B sqrt(2 kl), which the field gap cannot exceed.
    """

    kl: Float[Array, " tokens"]
    field: Float[Array, " tokens"]
    bound: Float[Array, " tokens"]


def gap(
    mixture: StateMixture,
    x: Float[Array, "tokens width"],
    posterior: Float[Array, "tokens components"],
) -> Gap:
    """How far a posterior and its field are from the mixture's. Raises as `consistency_loss`."""
    q = check_posterior(posterior, (x.shape[0], mixture.components))
    target = mixture.log_posterior(x)
    q = q.astype(target.dtype)
    kl = divergence(q, target)
    field = mixture.field(x, q) - mixture.score(x)
    each = jnp.eye(mixture.components, dtype=q.dtype)

    def size(z):  # of the score of one component
        return _length(mixture.field(x, jnp.broadcast_to(z, q.shape)))

    largest = jnp.max(jax.lax.map(size, each), axis=0)
    return Gap(kl, _length(field), largest * jnp.sqrt(2 * jnp.maximum(kl, 0)))


class Consistency(NamedTuple):
    r"""One layer's attention against the vMF mixture of its keys, per token and head.

    a_ij is the layer's softmax, p_ij ~ C_d(kappa_ij) exp(s_ij) the Bayes posterior of a uniform
    prior, m_ij the keys as `Kernel` has them, and eta_j what the head writes for token j.

    Arguments:
        kl: KL(a_i || p_i) in nats; zero where |m_ij| does not depend on j.
        field: |P_x sum_j (a_ij - p_ij) m_ij|, how far the velocity of values tied to the keys is
            from the mixture's score.
        bound: max_j |m_ij| sqrt(2 kl), which the field gap cannot exceed but for rounding.
        tied: sum_j a_ij |eta_j - m_ij|^2 / sum_j a_ij (|eta_j|^2 + |m_ij|^2), in [0, 2]: 0 for
            values that are the keys, 1 for unrelated ones, 2 for opposite ones. Values are those
            before any norm on the output, less their mean over the width where norms are
            LayerNorms. None for QK-norm: there m_ij is no vector of the stream.
    """

    kl: Float[Array, "tokens heads"]
    field: Float[Array, "tokens heads"]
    bound: Float[Array, "tokens heads"]
    tied: Float[Array, "tokens heads"] | None


def consistency(
    model: Transformer | TransformerFlow,
    layer,
    x: Float[Array, "tokens width"],
    context: Context | None = None,
) -> Consistency:
    """How far one layer's attention is from Bayes on its keys, and its values from its keys.

    Arguments:
        model: a transformer or its flow.
        layer: which layer; it may be traced.
        x: (tokens, width) the state before it.
        context: positions and padding.

    Raises:
        ValueError: what is not a transformer, a layer it does not have, a wrong state or context.
    """
    flow = transformer_flow(model, layer, x, context)
    p = parts(flow, layer, x, context)
    k = assemble(flow, layer, p, context)
    posterior = jnp.exp(k.log_posterior())
    target = k.log_bayes()
    kl = jnp.maximum(divergence(posterior, target), 0)  # where it is rounding
    bound = jnp.max(jnp.where(k.allowed[:, None], k.norms, 0), axis=-1)
    return Consistency(
        kl,
        _field_gap(p, k, posterior - jnp.exp(target)),
        bound * jnp.sqrt(2 * kl),
        None if p.maps is None else _tied(flow, layer, p, k, posterior),
    )


def _field_gap(p: Parts, k: Kernel, apart) -> Float[Array, "tokens heads"]:
    mixed = unturned(p, jnp.einsum("ihj,jhc->ihc", apart, p.key, precision=HIGHEST))
    square = jnp.einsum("iha,hab,ihb->ih", mixed, p.grams, mixed, precision=HIGHEST)
    # At the origin no direction is radial.
    radial = jnp.sum(apart * k.dots, axis=-1) / jnp.where(k.radius > 0, k.radius, 1)
    square = p.scale**2 * square - radial**2
    return jnp.sqrt(jnp.where(square > 0, square, 0))


def _tied(flow, layer, p: Parts, k: Kernel, posterior) -> Float[Array, "tokens heads"]:
    index, part = flow._time(layer)
    output = flow._pick("attention", index, part).output
    values = written_values(flow, output, p.value)
    if flow.centered:
        values = geometry.center(values)
    # eta_j . m_ij = scale (maps^T eta_j) . R_i^T k_j, summed over j before it is turned.
    back = jnp.einsum("hwc,hjw->jhc", p.maps, values, precision=HIGHEST)

    def one(head):
        weights, key, back = head
        outer = jnp.einsum("ij,jb,jc->icb", weights, key, back, precision=HIGHEST)
        return jnp.trace(unturned(p, outer), axis1=1, axis2=2)

    heads = (posterior.swapaxes(0, 1), p.key.swapaxes(0, 1), back.swapaxes(0, 1))
    cross = p.scale * jax.lax.map(one, heads).T
    norms = jnp.sum(values * values, axis=-1) + jnp.square(k.norms)
    total = jnp.sum(posterior * norms, axis=-1)
    return 1 - 2 * cross / jnp.where(total > 0, total, 1)


def _length(vectors: Float[Array, "tokens width"]) -> Float[Array, " tokens"]:
    return jnp.sqrt(jnp.sum(vectors * vectors, axis=-1))


def key_spread(
    key: jax.Array,
    deviation: float | Array,
    *,
    width: int = 64,
    keys: int = 20,
    norm: float | Array = 2.0,
    draws: int = 4000,
) -> Float[Array, " draws"]:
    r"""KL(softmax || uniform-prior Bayes) of random keys whose norms spread, in nats.

    Directions of the state and the keys are uniform on the sphere of radius sqrt(d) and the unit
    sphere; the norms are log-normal, |m_j| = norm exp(deviation z_j), z_j ~ N(0, 1), so that
    `norm` is their median: in the units of scores x . m with |x| = sqrt(d). The concentrations
    are sqrt(d) |m_j|.

    Arguments:
        key: of the random numbers.
        deviation: of the logarithm of the norms.
        width, keys: d and how many keys.
        draws: how many independent states and sets of keys.
    """
    direction, spread, state = jax.random.split(key, 3)
    m = jax.random.normal(direction, (draws, keys, width))
    m = m / jnp.linalg.norm(m, axis=-1, keepdims=True)
    norms = norm * jnp.exp(deviation * jax.random.normal(spread, (draws, keys)))
    x = geometry.sphere(jax.random.normal(state, (draws, width)))
    scores = norms * jnp.einsum("bjd,bd->bj", m, x, precision=HIGHEST)
    bayes = scores - bessel.cumulant(width, width**0.5 * norms)
    return divergence(jax.nn.softmax(scores, axis=-1), jax.nn.log_softmax(bayes, axis=-1))
