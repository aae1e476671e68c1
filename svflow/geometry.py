"""The sphere of radius sqrt(d) that norms put states on, and the polar form of a residual step.

Source: the layer theorem, derived in the project from Liao, arXiv 2604.23740.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def sphere(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
    """n(h) = sqrt(d) h / |h|: the direction of a state, on the sphere of radius sqrt(d)."""
    return h * (jnp.sqrt(jnp.asarray(h.shape[-1], h.dtype)) / _norm(h)[..., None])


def tangent(
    x: Float[Array, "*tokens width"], v: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens width"]:
    """P_x v = v - x (x . v) / d, for x on the sphere of radius sqrt(d)."""
    return v - x * jnp.mean(x * v, axis=-1, keepdims=True)


def retract(
    x: Float[Array, "*tokens width"], u: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens width"]:
    """R_x(u) = sqrt(d) (x + u) / |x + u|."""
    return sphere(x + u)


def center(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
    """h - mean(h): the part of a state that LayerNorm sees, orthogonal to the ones vector."""
    return h - jnp.mean(h, axis=-1, keepdims=True)


def geodesic(
    x: Float[Array, "*tokens width"], y: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens"]:
    """The angle between two states, in radians: 2 atan2(|x - y|, |x + y|) of their directions.

    Unlike arccos of the cosine it is accurate for small angles (W. Kahan, "How futile are mindless
    assessments of roundoff", 2006).
    """
    x, y = sphere(x), sphere(y)
    return 2 * jnp.arctan2(_norm(x - y), _norm(x + y))


class Polar(NamedTuple):
    """A residual step h' = h + v in polar form, h = rho x with x on the sphere.

    Arguments:
        direction: (..., width) x = n(h).
        rho: (...) |h| / sqrt(d).
        radial: (...) c = x . v / d; the radial part of v has norm |c| sqrt(d).
        tangential: (..., width) P_x v.
        dt: (...) 1 / (rho + c): the step on the sphere. Where rho + c <= 0 the step leaves the
            hemisphere of x, the theorem does not hold and dt is nan.
        rho_next: (...) |h + v| / sqrt(d) by rho'^2 = rho^2 + 2 rho c + |v|^2 / d.
    """

    direction: Float[Array, "*tokens width"]
    rho: Float[Array, "*tokens"]
    radial: Float[Array, "*tokens"]
    tangential: Float[Array, "*tokens width"]
    dt: Float[Array, "*tokens"]
    rho_next: Float[Array, "*tokens"]


def polar(
    h: Float[Array, "*tokens width"], v: Float[Array, "*tokens width"], *, centered: bool = False
) -> Polar:
    r"""The layer theorem: the residual step h' = h + v is one retracted step on the sphere,

        n(h') = R_x(dt P_x v),   dt = 1 / (rho + c),   rho'^2 = rho^2 + 2 rho c + |v|^2 / d,

    for any v, wherever rho + c > 0. A block with a norm after the addition returns the norm of
    h', so its direction before gain and bias is the same n(h').

    Arguments:
        h: (..., width) the state before the step.
        v: (..., width) the raw update, `Flow.branch`.
        centered: on the complement of the ones vector, as LayerNorm sees the state. The mean is
            dropped; d stays the full width, as in LayerNorm's own norm.

    The identity is a re-parametrisation: it holds for every residual block, trained or not.
    """
    if centered:
        h, v = center(h), center(v)
    width = h.shape[-1]
    x = sphere(h)
    rho = _norm(h) / jnp.sqrt(jnp.asarray(width, h.dtype))
    c = jnp.mean(x * v, axis=-1)
    forward = rho + c > 0
    dt = jnp.where(forward, 1 / jnp.where(forward, rho + c, 1), jnp.nan)
    rho_next = jnp.sqrt(jnp.maximum(rho**2 + 2 * rho * c + jnp.mean(v * v, axis=-1), 0))
    return Polar(x, rho, c, tangent(x, v), dt, rho_next)


def _norm(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens"]:
    return jnp.sqrt(jnp.sum(h * h, axis=-1))
