"""Random matrices that keep some of J's invariants: a finding that they show too is due to those.

Each control keeps what its docstring says, to rounding, and draws the rest anew, each matrix of a
stack by itself. Keys are of either kind, `jax.random.key` or `jax.random.PRNGKey`. Results are in
the type of J, or float32 if that is narrower. J must be a stack of square real matrices, finite:
anything else raises a ValueError, except that under a JAX transform values are not checked.

Axes: `stack`, any leading axes; `width`, of a square matrix, d in formulas.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.integers import positive
from svflow.models.transformer import Transformer
from svflow.spectra.lapack import check_finite, check_matrices
from svflow.spectra.schur import rotated, schur_parts

T = TypeVar("T")

__all__ = [
    "CONTROLS",
    "beside_untrained",
    "haar",
    "haar_basis",
    "haar_factors",
    "haar_similarity",
    "haar_update",
    "initialisation",
    "random_update",
    "shuffled",
    "untrained",
]


def haar(
    key: Array, d: int, dtype=jnp.float32, stack: tuple[int, ...] = ()
) -> Float[Array, "*stack width width"]:
    """Orthogonal matrices, uniform on O(d) by Haar's measure.

    Arguments:
        d: the width, at least 1.
        dtype: of the matrices, float32 if it is narrower.
        stack: the leading axes, each matrix drawn by itself.

    Raises:
        ValueError: a width below 1.
    """
    draw = functools.partial(_orthogonal, positive("d", d), at_least_float32(dtype))
    drawn = jax.lax.map(draw, jax.random.split(key, math.prod(stack)))
    return drawn.reshape(*stack, d, d)


def haar_basis(
    key: Array, J: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """Q D Q^T, Q Haar and D the normal part of J's real Schur form (`schur_parts`).

    Keeps the eigenvalues, so the trace, the determinant and the spectral radius. It is normal:
    the singular values become |lambda|.
    """
    return _rotated_by_haar(key, schur_parts(J).normal)


def haar_factors(
    key: Array, J: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """U diag(sigma) V^T, U and V Haar and independent, sigma the singular values of J.

    Keeps the singular values, so the norms, |det J|, the condition number and the effective rank;
    small ones to rounding of the largest.
    """
    J = _checked(J)
    d, stack = J.shape[-1], J.shape[:-2]
    left, right = (haar(part, d, J.dtype, stack) for part in jax.random.split(key))
    # One batch at a time (see `_orthogonal`): two such calls may be in flight.
    sigma = jax.block_until_ready(jnp.linalg.svd(J, compute_uv=False))
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("...ik,...k,...jk->...ij", left, sigma, right, precision=highest)


def haar_similarity(
    key: Array, J: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """Q J Q^T, Q Haar.

    Keeps whatever one matrix says by itself: the eigenvalues, the singular values, the Henrici
    departure, the symmetric part, the alignment of the singular subspaces with each other. What
    goes is the alignment with the residual stream's axes and with other layers.
    """
    return _rotated_by_haar(key, _checked(J))


def haar_update(
    key: Array, J: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """I + U diag(sigma) V^T, U and V Haar and independent, sigma those of the update R = J - I.

    Keeps the singular values of R, so |R|.
    """
    J = _checked(J)
    identity = jnp.eye(J.shape[-1], dtype=J.dtype)
    return identity + haar_factors(key, J - identity)


def random_update(
    key: Array, J: Float[Array, "*stack width width"]
) -> Float[Array, "*stack width width"]:
    """(1 + tau) I + |R_0| G_0 / |G_0|, where R = J - I = tau I + R_0 with R_0 traceless.

    tau is tr R / d, and G_0 is Gaussian with its trace removed in the same way. Keeps the trace
    and the Frobenius norms |R| and |J|, as |J|^2 = |R|^2 + 2 tr R + d; so |R|/|J|.
    """
    J = _checked(J)
    # The traceless parts of J and of J - I are the same.
    part, noise = (_traceless(M) for M in (J, jax.random.normal(key, J.shape, J.dtype)))
    size = _norm(noise)
    noise = noise / jnp.where(size == 0, 1, size)  # of a 1x1 matrix nothing is left
    return J - part + _norm(part) * noise


def initialisation(key: Array, model: Transformer) -> Transformer:
    """The same architecture untrained, in the model's type.

    Keeps the config, so also what `TransformerConfig` says of the initial weights.

    Raises:
        ValueError: what is not a `Transformer`.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"initialisation needs a Transformer, got {type(model).__name__}")
    dtype = model.embedding.tokens[...].dtype
    return Transformer(model.config, rngs=nnx.Rngs(key), dtype=dtype)


def shuffled(key: Array, model: Transformer) -> Transformer:
    """The model with the entries of each layer's arrays in another order, each array by itself.

    Keeps how large the entries of every array of every layer are, and the embeddings and the head:
    what the untrained model has not and this has is due to sizes, what neither has to the order.

    Raises:
        ValueError: what is not a `Transformer`.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"shuffled needs a Transformer, got {type(model).__name__}")
    leaves, structure = jax.tree.flatten(model.flow)
    keys = jax.random.split(key, len(leaves))
    mixed = [
        jax.random.permutation(one, leaf.reshape(len(leaf), -1), axis=1, independent=True)
        for one, leaf in zip(keys, leaves)
    ]
    mixed = [a.reshape(leaf.shape) for a, leaf in zip(mixed, leaves)]
    return eqx.tree_at(lambda one: one.flow, model, jax.tree.unflatten(structure, mixed))


def untrained(seed: int, model: Transformer) -> Transformer:
    """`initialisation(jax.random.key(seed), model)`, what a model is compared with.

    Where that is the model itself, which was drawn in the same way, it is that of the next seed.
    """
    fresh = initialisation(jax.random.key(seed), model)
    leaves = zip(jax.tree.leaves(fresh), jax.tree.leaves(model))
    if all(bool(jnp.array_equal(one, other)) for one, other in leaves):
        return initialisation(jax.random.key(seed + 1), model)
    return fresh


def beside_untrained(
    measure: Callable[[Transformer], T],
    model: Transformer,
    seed: int,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> tuple[T, T]:
    """`measure` of a model, and of its architecture `untrained`.

    Arguments:
        progress: wraps the range over the two.

    Raises:
        ValueError: as `measure`, saying of which model.
    """
    steps = iter(progress(range(2)))
    next(steps, None)
    own = measure(model)
    next(steps, None)
    with of_the_untrained():
        other = measure(untrained(seed, model))
    next(steps, None)  # so that a progress bar sees its end
    return own, other


@contextlib.contextmanager
def of_the_untrained() -> Iterator[None]:
    """Says of a ValueError that it is of the untrained model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the same architecture untrained: {error}") from error


CONTROLS: dict[str, Callable[[Array, Array], Array]] = {
    "haar_basis": haar_basis,
    "haar_factors": haar_factors,
    "haar_similarity": haar_similarity,
    "haar_update": haar_update,
    "random_update": random_update,
}
"""The controls of matrices, by name."""


def _orthogonal(d, dtype, key):
    """One matrix, which stays one under vmap.

    jaxlib's LAPACK waits for its threads on one of them where it is given a batch: as many batches
    at once as there are threads (of two draws on two cores, say) wait for ever, seen with 0.10.2.
    """
    return jax.custom_batching.sequential_vmap(
        lambda key: jax.random.orthogonal(key, d, (), dtype)
    )(key)


def _rotated_by_haar(key, M):
    return rotated(haar(key, M.shape[-1], M.dtype, M.shape[:-2]), M)


def _checked(J):
    J = check_matrices(J)
    check_finite(J)
    return J.astype(at_least_float32(J.dtype))


def _traceless(M):
    d = M.shape[-1]
    mean = jnp.trace(M, axis1=-2, axis2=-1)[..., None, None] / d
    return M - mean * jnp.eye(d, dtype=M.dtype)


def _norm(M):
    largest = jnp.max(jnp.abs(M), axis=(-2, -1), keepdims=True)
    unit = M / jnp.where(largest == 0, 1, largest)  # whose squares stay in range
    return largest * jnp.linalg.norm(unit, axis=(-2, -1), keepdims=True)
