"""Tests run in x64 with strict dtype promotion, and check the shapes in signatures.

The checked modules are those that public functions have checked the input of: there a wrong shape
is our own fault.
"""

import gc
import os

# The workers share the cores: threads of BLAS that wait for one another would only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from jaxtyping import install_import_hook

CHECKED = ["svflow.attention", "svflow.models.layers"]
install_import_hook(CHECKED, "beartype.beartype")

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """What a module compiled goes with it.

    A compiled program holds several memory maps, of which Linux gives a process 65530
    (`vm.max_map_count`): the whole suite in one process comes near, and past it the compiler
    crashes.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def seed(request):
    """One seed per test, printed so that a failure can be repeated."""
    value = sum(map(ord, request.node.name)) % 2**16
    print(f"seed = {value}")
    return value
