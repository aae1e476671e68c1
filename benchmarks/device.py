"""Whether this device agrees with the CPU in float64: precision, eigenvalues, random numbers.

Every line is computed twice by the same public functions from the same weights: on the default
device in float32, and on the CPU in float64. Where the default device is the CPU, that compares its
float32 with its float64, and says that no accelerator was there. Random bits, and what
is made of them by comparing and dividing, are the same bit by bit: error 0 or 1. Normal draws go
through a function that devices round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import svflow as sv
import universal as ut
from benchmarks import models
from benchmarks.rows import relative
from benchmarks.spectra import hausdorff, largest

TOKENS = 24
SHAPE = models.GPT2_TINY | dict(n_embd=64, n_layer=4)


class Line(NamedTuple):
    """One comparison.

    Arguments:
        name: what is compared.
        run: of a dtype, on the device that is the default.
        error: of the device's result and the CPU's.
        tolerance: of it.
        narrow: whether the CPU runs in float32 too, as random numbers differ between types.
    """

    name: str
    run: Callable[[Any], Any]
    error: Callable[[Any, Any], float] = relative
    tolerance: float = 1e-4
    narrow: bool = False


def same(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return 0.0 if all(np.array_equal(a, b) for a, b in pairs) else 1.0


def weights(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs)


def trained(dtype):
    return sv.load(sv.data.default_model_path(), dtype=dtype)


def path(dtype):
    net = trained(dtype)
    with jax.default_matmul_precision("highest"):
        return net, sv.simulate(net.flow, net.embed(np.arange(TOKENS))).xs


def jacobians(dtype):
    net, xs = path(dtype)
    return sv.layer_jacobians(net.flow, xs)


def matrices(dtype):
    """The same on both sides, so that only the solver is compared."""
    random = np.random.default_rng(0)
    return jnp.asarray((random.normal(size=(3, 64, 64)) / 8).astype(np.float32), dtype)


def values(ours, theirs) -> float:
    return max(hausdorff(a, b) for a, b in zip(np.asarray(ours), np.asarray(theirs)))


def tokens(dtype):
    found = sv.power.PowerFlow.from_model(trained(dtype))
    x0 = trained(dtype).embed(np.arange(TOKENS))
    with jax.default_matmul_precision("highest"):
        return sv.simulate(found, found.retract(x0)).xs


def machine(dtype):
    random = np.random.default_rng(0)
    shapes = [(2, 2, 6, 3), (2, 2, 6, 3), (2, 2, 6, 6), (6, 4)]
    target = ut.AttentionTransformer(*(jnp.asarray(random.normal(size=s), dtype) for s in shapes))
    sparse = ut.sparse(2, 2, 6, 3, 4)
    x = jnp.asarray(random.normal(size=(9, 6)), dtype)
    with jax.default_matmul_precision("highest"):
        return ut.run(sparse, x @ ut.program(sparse, target))


def initial(dtype):
    return sv.Transformer(sv.TransformerConfig.from_hf(SHAPE), rngs=nnx.Rngs(0), dtype=dtype)


LINES = (
    Line("states of the embedded model", lambda d: path(d)[1]),
    Line("its logits, default precision", lambda d: trained(d)(np.arange(TOKENS)), tolerance=2e-2),
    Line("its frozen Jacobians", jacobians, largest),
    Line("singular values of random matrices", lambda d: sv.measures(matrices(d)).singular_values),
    Line("eigenvalues of random matrices", lambda d: sv.eigvals(matrices(d)), values),
    Line(
        "leading eigenvalues of a layer, matrix-free",
        lambda d: sv.partial_spectrum(path(d)[0].flow, 3, path(d)[1][3], 4, scope="frozen").values,
        hausdorff,
    ),
    Line("states of its power flow", tokens),
    Line("run of a sparse machine and its program", machine),
    Line("untrained weights of a seed", initial, weights, 1e-5, narrow=True),
    Line(
        "permutation of a seed",
        lambda d: jax.random.permutation(jax.random.key(0), 1000),
        same,
        0.0,
        narrow=True,
    ),
    Line(
        "bits and uniform draws of a seed",
        lambda d: [
            draw(jax.random.key(0), (999,)) for draw in (jax.random.bits, jax.random.uniform)
        ],
        same,
        0.0,
        narrow=True,
    ),
    Line("training sequences of a seed", lambda d: ut.dyck1(jax.random.key(0), 8), same, 0.0, True),
)


def compare(chosen: Sequence[Line] = LINES) -> dict[str, Any]:
    """Every line, and in words what it was run on."""
    cpu, here = jax.devices("cpu")[0], jax.devices()[0]
    lines = []
    for line in chosen:
        with jax.enable_x64(False), jax.default_device(here):
            ours = jax.device_get(line.run(jnp.float32))
        with jax.enable_x64(not line.narrow), jax.default_device(cpu):
            theirs = jax.device_get(line.run(jnp.float32 if line.narrow else jnp.float64))
        error = float(line.error(ours, theirs))
        lines.append(
            dict(
                name=line.name,
                dtype=f"{here.platform} float32",
                error=error,
                tolerance=line.tolerance,
                right=error <= line.tolerance,
            )
        )
    about = (
        "No accelerator is here: the CPU's float32 beside its own float64."
        if here.platform == "cpu"
        else f"{here.device_kind} in float32 beside the CPU in float64."
    )
    return dict(about=about, accelerator=here.platform != "cpu", lines=lines)
