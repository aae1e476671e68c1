"""Tests run in x64 with strict dtype promotion."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def seed(request):
    """One seed per test, printed so that a failure can be repeated."""
    value = sum(map(ord, request.node.name)) % 2**16
    print(f"seed = {value}")
    return value
