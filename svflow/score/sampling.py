"""Sampling directions of von Mises-Fisher densities.

Axes: `count`, the samples; `width`, d.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def tangent_normal(key, directions: Float[Array, "count width"]) -> Float[Array, "count width"]:
    """A uniform unit vector orthogonal to each unit vector."""
    noise = jax.random.normal(key, directions.shape, directions.dtype)
    for _ in range(2):  # the second removes the rounding of the first, as in Gram-Schmidt
        along = jnp.sum(noise * directions, axis=-1, keepdims=True)
        noise = noise - along * directions
        noise = noise / jnp.linalg.norm(noise, axis=-1, keepdims=True)
    return noise


def von_mises_fisher(
    key: jax.Array,
    directions: Float[Array, "count width"],
    concentrations: Float[Array, " count"],
) -> Float[Array, "count width"]:
    r"""One unit vector u per row, with density C_d(kappa) exp(kappa mu . u), for any d >= 2.

    w = mu . u has the density exp(kappa w) (1 - w^2)^((d-3)/2), drawn by rejection: with Z from
    Beta((d-1)/2, (d-1)/2), w = (1 - (1+b) Z) / (1 - (1-b) Z) is accepted where
    kappa w + (d-1) log(1 - x w) - c >= log U. At least 0.65 of them are, at any kappa and d.
    The rest of u is uniform. Computed in 1 - w, which is what is small at large kappa.

    Source: A. T. A. Wood, "Simulation of the von Mises Fisher distribution", 1994, after Ulrich.
    """
    dtype, m = concentrations.dtype, directions.shape[-1] - 1
    k = jnp.minimum(concentrations, float(jnp.finfo(dtype).max) / 64)  # to rounding infinite
    b = m / (2 * k + jnp.hypot(2 * k, float(m)))
    away = 2 * b / (1 + b)  # 1 - x
    x = 1 - away
    top = jnp.log(away) + jnp.log1p(x)  # log(1 - x^2)

    def more(state):
        return ~jnp.all(state[2])

    def draw(state):
        key, far, done = state
        key, beta, uniform = jax.random.split(key, 3)
        z = jax.random.beta(beta, m / 2, m / 2, k.shape, dtype)
        new = jnp.minimum(2 * b * z / (1 - (1 - b) * z), 2)  # 1 - w, where z rounds to 1 too
        level = k * (away - new) + m * (jnp.log(away + x * new) - top)
        log_u = jnp.log(jax.random.uniform(uniform, k.shape, dtype))
        # What is not a number is not drawn again: it would be for ever.
        accepted = (level >= log_u) | jnp.isnan(level)
        return key, jnp.where(done, far, new), done | accepted

    rest, key = jax.random.split(key)
    start = (key, jnp.zeros_like(k), jnp.zeros(k.shape, bool))
    _, far, _ = jax.lax.while_loop(more, draw, start)
    far = far[:, None]
    across = jnp.sqrt(far * (2 - far))
    return (1 - far) * directions + across * tangent_normal(rest, directions)
