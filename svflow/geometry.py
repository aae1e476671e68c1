"""The sphere of radius sqrt(d) that norms put states on, and the polar form of a residual step.

The zero state has no direction: what needs one is nan there, and its derivative zero, so that a
row that is masked out afterwards leaves no nan in a gradient. Sums run in float32 at least.

Source: the layer theorem, derived here after Liao, arXiv 2604.23740.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32


def sphere(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
    """n(h) = sqrt(d) h / |h|: the direction of a state, on the sphere of radius sqrt(d)."""
    rho = rms(h)[..., None]
    zero = rho == 0
    wide = h.astype(rho.dtype) / jnp.where(zero, 1, rho)
    return jnp.where(zero, jnp.nan, wide).astype(h.dtype)


def tangent(
    x: Float[Array, "*tokens width"], v: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens width"]:
    """P_x v = v - x (x . v) / d, for x on the sphere of radius sqrt(d)."""
    return v - x * _mean(x, v)[..., None].astype(x.dtype)


def retract(
    x: Float[Array, "*tokens width"], u: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens width"]:
    """R_x(u) = sqrt(d) (x + u) / |x + u|."""
    return sphere(x + u)


def center(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
    """h - mean(h): the part of a state that LayerNorm sees, orthogonal to the ones vector."""
    wide = h.astype(at_least_float32(h.dtype))
    return (wide - jnp.mean(wide, axis=-1, keepdims=True)).astype(h.dtype)


def norm_input(
    h: Float[Array, "*tokens width"], *, centered: bool
) -> Float[Array, "*tokens width"]:
    """What a norm reads of a state, in float32 at least: less its mean where `centered`."""
    wide = h.astype(at_least_float32(h.dtype))
    return center(wide) if centered else wide


def rms(h: Float[Array, "*tokens width"]) -> Float[Array, "*tokens"]:
    """The root mean square |h| / sqrt(d), in float32 at least; its derivative at 0 taken as 0."""
    square = _mean(h, h)
    zero = square == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))


def geodesic(
    x: Float[Array, "*tokens width"], y: Float[Array, "*tokens width"]
) -> Float[Array, "*tokens"]:
    """The angle between two states, in radians: 2 atan2(|x - y|, |x + y|) of their directions.

    Unlike arccos of the cosine it is accurate for small angles and near pi (W. Kahan, "How futile
    are mindless assessments of roundoff", 2006). Where the angle is 0 or pi it has no derivative;
    the one returned is 0.
    """
    wide = at_least_float32(x.dtype)
    u, w = sphere(x.astype(wide)), sphere(y.astype(wide))
    return 2 * jnp.arctan2(rms(u - w), rms(u + w))


class Polar(NamedTuple):
    """A residual step h' = h + v in polar form, h = rho x with x on the sphere.

    Arguments:
        direction: (..., width) x = n(h).
        rho: (...) |h| / sqrt(d).
        radial: (...) c = x . v / d; the radial part of v has norm |c| sqrt(d).
        tangential: (..., width) P_x v.
        dt: (...) 1 / (rho + c): the step on the sphere. Where rho + c <= 0 the step leaves the
            hemisphere of x, the theorem does not hold and dt is nan; so it is at h = 0.
        rho_next: (...) |h + v| / sqrt(d), by rho'^2 = (rho + c)^2 + |P_x v|^2 / d; nan at h = 0.

    The scalars are in float32 at least.
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

        n(h') = R_x(dt P_x v),   dt = 1 / (rho + c),
        rho'^2 = (rho + c)^2 + |P_x v|^2 / d = rho^2 + 2 rho c + |v|^2 / d,

    for any v, wherever rho + c > 0. A block with a norm after the addition returns the norm of
    h', so its direction before gain and bias is the same n(h').

    Arguments:
        h: (..., width) the state before the step.
        v: (..., width) the raw update, `Flow.branch`.
        centered: on the complement of the ones vector, as LayerNorm sees the state. The mean is
            dropped; d stays the full width, as in LayerNorm's own norm.

    The identity is a re-parametrisation: it holds for every residual block, trained or not.

    Examples:
        >>> h, v = jnp.asarray([3.0, 4.0]), jnp.asarray([1.0, 2.0])
        >>> step = polar(h, v)
        >>> u = step.dt * tangent(sphere(h), v)  # a step of dt along P_x v, and back to the sphere
        >>> print(retract(sphere(h), u).round(4), sphere(h + v).round(4))
        [0.7845 1.1767] [0.7845 1.1767]
    """
    if centered:
        h, v = center(h), center(v)
    x, rho = sphere(h), rms(h)
    u, c = tangent(x, v), _mean(x, v)
    forward = rho + c > 0
    dt = jnp.where(forward, 1 / jnp.where(forward, rho + c, 1), jnp.nan)
    # The sum of squares: the other form loses digits where h and v nearly cancel.
    return Polar(x, rho, c, u, dt, jnp.hypot(rho + c, rms(u)))


def _mean(x: Float[Array, "*tokens width"], y: Float[Array, "*tokens width"]):
    """x . y / d."""
    wide = at_least_float32(x.dtype)
    return jnp.mean(x.astype(wide) * y.astype(wide), axis=-1)
