"""Directions of vectors of any size, and known numbers on the host.

The square of a number vanishes or overflows long before the number does, so every vector is
divided by its largest entry before it is measured. Known vectors are normalised in NumPy in
float64 whatever JAX is configured to: what they are cast to afterwards is of unit norm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32


def polar(x: Float[Array, "*stack width"]) -> tuple[Array, Array]:
    """x / |x| and |x|, (*stack, 1).

    A zero vector has no direction: it is nan there, |x| is 0, and neither has a derivative, so
    that a row that is masked out afterwards leaves no nan in a gradient. What is below the
    smallest normal number, which XLA may flush, counts as zero, and so does a row with a nan.
    """
    wide = x.astype(at_least_float32(x.dtype))
    # The scale drops out of the result, and so out of its derivative.
    top = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    there = top >= jnp.finfo(wide.dtype).tiny
    scaled = jnp.where(there, wide, 1) / jnp.where(there, top, 1)
    size = jnp.sqrt(jnp.sum(scaled * scaled, axis=-1, keepdims=True))
    direction = jnp.where(there, scaled / size, jnp.nan)
    return direction.astype(x.dtype), jnp.where(there, size * top, 0).astype(x.dtype)


def normalised(x: np.ndarray) -> np.ndarray:
    """x / |x| over the last axis, on the host; nan for a zero vector."""
    with np.errstate(invalid="ignore"):
        x = x / np.max(np.abs(x), axis=-1, keepdims=True)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def known(array: Any) -> np.ndarray | None:
    """The values of an array, None where they are traced: jnp's tests under jit are traced too."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def reals(values: Any, name: str) -> np.ndarray:
    """Known numbers in float64. ValueError by name for what are none: text, complex, booleans."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be real numbers, got {values!r}") from error
    if not any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise ValueError(f"{name} must be real numbers, got {found.dtype}")
    return found.astype(np.float64)


def unit(vector: Any, width: int, name: str, dtype) -> tuple[Array, Array]:
    """A vector at unit norm, and its norm, (), which may be beyond the type.

    Raises:
        ValueError: by name, what is no vector of real numbers, zero, or not finite; zero gives nan
            where the vector is traced.
    """
    if isinstance(vector, jax.core.Tracer):
        _check_shape(vector, width, name)
        direction, norm = polar(real_tracer(vector, name, dtype))
        return direction.astype(dtype), norm[0].astype(dtype)
    values = reals(vector, name)
    _check_shape(values, width, name)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} is not finite")
    top = np.max(np.abs(values))
    if not top:
        raise ValueError(f"{name} is zero")
    with np.errstate(over="ignore"):
        norm = jnp.asarray(top * np.linalg.norm(values / top), dtype)
    return jnp.asarray(normalised(values), dtype), norm


def real_tracer(array: jax.core.Tracer, name: str, dtype) -> Array:
    """A traced array as floating point of float32 at least, `dtype` for integers.

    ValueError by name for complex numbers and booleans.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or array.dtype == jnp.bool_:
        raise ValueError(f"{name} must be real numbers, got {array.dtype}")
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(at_least_float32(array.dtype if floating else dtype))


def _check_shape(vector: Any, width: int, name: str) -> None:
    if vector.shape != (width,):
        raise ValueError(f"{name} must have shape ({width},), got {vector.shape}")
