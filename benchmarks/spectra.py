"""Jacobians and spectra against their peers and their bounds.

- spectra/frozen: the frozen Jacobian of the last token in a GPT-2 block, against
  `torch.func.jacrev` on Hugging Face's block and the twelve width^3 products that it contains.
- spectra/causal: all tokens to all tokens, float64, against the dense Jacobian, built and solved.
- spectra/leading: the leading eigenvalues of a whole layer against ARPACK over `torch.func.jvp`.
- spectra/smollm2: every frozen last-token Jacobian of a model, full spectra and all measures,
  against LAPACK alone on the same matrices, one after another and in the same threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigs

import svflow as sv
from benchmarks import models
from benchmarks.forward import states
from benchmarks.rows import GGUF, Case, Peer, row
from svflow.spectra.lapack import in_threads


def hausdorff(a, b) -> float:
    """The distance of two sets of eigenvalues, in units of the spectral radius of the second."""
    a, b = np.asarray(a).ravel(), np.asarray(b).ravel()
    apart = np.abs(a[:, None] - b[None])
    return float(max(apart.min(0).max(), apart.min(1).max()) / np.abs(b).max())


def largest(a, b) -> float:
    """The largest difference, in units of the largest entry of b."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / np.abs(b).max())


@jax.jit
def twelve_products(weights, x):
    """The twelve width^3 products of a block's Jacobian, as they follow each other."""
    up, down, output, query, key, value = weights
    x = ((x @ down.T) @ up.T) @ output.T
    return x @ query.T + x @ key.T + x @ value.T


def frozen(shape, tokens) -> Case:
    net = models.model(shape | dict(n_layer=2))
    x = states(net, jnp.asarray(models.ids_of(net, tokens), jnp.int32))[1]

    def jacrev():
        import torch

        step, state = models.block(net, 1), torch.tensor(np.asarray(x))

        def last(token):
            return step(torch.cat([state[:-1], token[None]]))[-1]

        return lambda: torch.func.jacrev(last)(state[-1]).detach().numpy()

    def products():
        layers, width = net.flow.layers, net.flow.width
        hidden, attention = layers.feed_forward, layers.attention
        assert hidden is not None
        linears = (
            hidden.up, hidden.down, attention.output, attention.query, attention.key,
            attention.value,
        )  # fmt: skip
        weights = [linear.kernel[...][1] for linear in linears]
        start = jax.random.normal(jax.random.key(1), (width, width), jnp.float32)
        return lambda: twelve_products(weights, start)

    return Case(
        ours=lambda: sv.jacobian(net.flow, 1, x),
        peers={
            "torch.func.jacrev on Hugging Face": Peer(jacrev, 1 / 100, largest),
            "its twelve products": Peer(products, 1.5, None),
        },
    )


def causal(shape, tokens) -> Case:
    net = models.model(shape | dict(n_layer=2), dtype=jnp.float64)
    x = states(net, jnp.asarray(models.ids_of(net, tokens), jnp.int32))[1]

    def dense():
        J = sv.jacobian(net.flow, 1, x, scope="full")
        return np.linalg.eigvals(np.asarray(J).reshape(x.size, x.size))

    return Case(
        ours=lambda: sv.causal_spectrum(net.flow, 1, x),
        peers={"dense Jacobian and NumPy": Peer(lambda: dense, 1 / 8, hausdorff)},
    )


def leading(shape, tokens, count) -> Case:
    net = models.model(shape | dict(n_layer=2))
    x = states(net, jnp.asarray(models.ids_of(net, tokens), jnp.int32))[1]

    def arpack():
        import torch

        step, state = models.block(net, 1), torch.tensor(np.asarray(x))

        def apply(v):
            with torch.no_grad():
                tangent = torch.tensor(v.reshape(x.shape), dtype=state.dtype)
                return torch.func.jvp(step, (state,), (tangent,))[1].numpy().ravel()

        A = LinearOperator((x.size, x.size), matvec=apply, dtype=np.float64)
        tol = float(np.finfo(np.float32).eps) ** (2 / 3)  # the default of ours
        start = np.random.default_rng(0).normal(size=x.size)
        return lambda: eigs(A, count, which="LM", tol=tol, v0=start, return_eigenvectors=False)

    def error(ours, theirs):
        # Of a pair that the count cuts either side may have either member.
        return hausdorff(*(np.real(v) + 1j * np.abs(np.imag(v)) for v in (ours.values, theirs)))

    return Case(
        ours=lambda: sv.partial_spectrum(net.flow, 1, x, count),
        peers={"ARPACK over torch.func.jvp": Peer(arpack, 1 / 5, error)},
        check=lambda ours: 1 - ours.converged.mean(),  # the share that is not certified
    )


def whole(source, tokens) -> Case:
    net = models.model(source)
    ids = jnp.asarray(models.ids_of(net, tokens), jnp.int32)

    def ours():
        J = sv.layer_jacobians(net.flow, states(net, ids))
        return J, sv.measures(J)

    def lapack(a):
        return np.linalg.eigvals(a), np.linalg.svd(a)

    def error(result, solved):
        found = result[1]
        pairs = zip(np.asarray(found.eigenvalues), np.asarray(found.singular_values), solved)
        return max(
            max(hausdorff(values, wanted), largest(sigma, svd.S))
            for values, sigma, (wanted, svd) in pairs
        )

    def alone():
        J = np.asarray(ours()[0])
        return lambda: [lapack(a) for a in J]

    def threads():
        wide = np.asarray(ours()[0], np.float64)
        return lambda: in_threads(lapack, list(wide))

    return Case(
        ours=ours,
        peers={
            "LAPACK, one matrix after another": Peer(alone, 1.3, None),
            "LAPACK, in the same threads": Peer(threads, 1.3, error),
        },
    )


row(
    "spectra/frozen",
    "frozen Jacobian of the last of 64 tokens, GPT-2-small block",
    frozen,
    full=dict(shape=models.GPT2, tokens=64),
    quick=dict(shape=models.GPT2_TINY, tokens=7),
    tolerance=1e-5,
)
row(
    "spectra/causal",
    "spectrum of all of 4 tokens to all, width 768, float64",
    causal,
    full=dict(shape=models.GPT2, tokens=4),
    quick=dict(shape=models.GPT2_TINY, tokens=3),
    tolerance=1e-8,
    rounds=3,
    x64=True,
)
row(
    "spectra/leading",
    "ten largest eigenvalues of a whole layer, all certified, GPT-2-small shape, 16 tokens",
    leading,
    full=dict(shape=models.GPT2, tokens=16, count=10),
    quick=dict(shape=models.GPT2_TINY, tokens=12, count=2),
    tolerance=1e-4,
    rounds=3,
)
row(
    "spectra/smollm2",
    "SmolLM2-135M, 18 tokens: 30 frozen Jacobians, full spectra and all measures",
    whole,
    full=dict(source=GGUF, tokens=18),
    quick=dict(source=models.LLAMA_TINY, tokens=7),
    tolerance=1e-6,
)
