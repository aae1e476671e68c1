"""The one rule of precision: what is accumulated or measured is so in float32 at least."""

from __future__ import annotations

import jax.numpy as jnp


def at_least_float32(dtype) -> jnp.dtype:
    """float32 for the narrower floating types, the type itself otherwise."""
    dtype = jnp.dtype(dtype)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
