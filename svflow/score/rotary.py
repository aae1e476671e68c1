"""Lengths of what a query's projection makes of rotated keys, for all pairs of tokens.

Axes: `tokens`; `heads`, `groups` (key heads) and `shared`, the query heads of one group; `head`,
the width of one head; `planes`, the pairs of coordinates that turn together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CHUNK = 128
"""Products of planes that share one basis: fewer cost more directions, more cost larger bases."""


class _Basis(NamedTuple):
    """The functions of a position that products of planes turn with, compressed.

    Arguments:
        first, second: (features,) the planes of each product; sign: +1 where it turns with the sum
            of their angles, -1 with the difference.
        chunks: per chunk of features, (directions, features) twice: the coordinates of the cosine
            and of the sine of its angle.
        positions: (tokens, all directions).
    """

    first: np.ndarray
    second: np.ndarray
    sign: np.ndarray
    chunks: tuple[tuple[np.ndarray, np.ndarray], ...]
    positions: np.ndarray


@functools.lru_cache(maxsize=16)
def _basis(turns: tuple[float, ...], tokens: int, dtype: np.dtype) -> _Basis:
    angle = np.asarray(turns)
    upper, strict = np.triu_indices(len(angle)), np.triu_indices(len(angle), 1)
    same = np.arange(len(angle))  # a plane with itself: a sum, and a difference that stands still
    first = np.concatenate([upper[0], strict[0], same])
    second = np.concatenate([upper[1], strict[1], same])
    sign = np.repeat([1.0, -1.0], [len(upper[0]), len(strict[0]) + len(same)])
    speed = angle[first] + sign * angle[second]
    order = np.argsort(np.abs(speed), kind="stable")  # neighbours need few directions together
    first, second, sign, speed = (a[order] for a in (first, second, sign, speed))
    chunks, positions = [], []
    for start in range(0, len(speed), CHUNK):
        phase = np.arange(tokens)[:, None] * speed[start : start + CHUNK]
        left, size, right = np.linalg.svd(
            np.concatenate([np.cos(phase), np.sin(phase)], axis=1), full_matrices=False
        )
        kept = size > np.finfo(dtype).eps * size[0]
        cosine, sine = np.split((size[:, None] * right)[kept], 2, axis=1)
        chunks.append((cosine.astype(dtype), sine.astype(dtype)))
        positions.append(left[:, kept])
    return _Basis(
        first, second, sign.astype(dtype), tuple(chunks), np.hstack(positions).astype(dtype)
    )


def rotated_forms(
    gram: Float[Array, "heads head head"],
    key: Float[Array, "tokens groups head"],
    turns: tuple[float, ...],
) -> Float[Array, "groups shared tokens tokens"]:
    r"""k_j^T R_i G R_i^T k_j for all queries i and keys j, at positions 0, 1, ..., tokens - 1.

    R_i turns plane p, the coordinates (p, p + planes), by i turns[p]; the rest stands still. With
    G = A^T A it is |A R_i^T k_j|^2, for a key k_j that is rotated already.

    With z_p the plane p of k_j as a complex number, the form is a sum of products z_p z_q or
    z_p conj(z_q), each turning with i at the sum or the difference of the planes' speeds:
    head^2 / 2 products, tokens^2 head^2 operations for all pairs. Most of the speeds are close to
    one another, so that on `tokens` positions the products span few directions; these are found
    once, by singular values down to rounding. The result is exact to rounding and takes
    tokens^2 times their number, which is below `tokens`.

    Derived here.
    """
    tokens, groups, head = key.shape
    shared = gram.shape[0] // groups
    if not any(turns):
        pulled = jnp.einsum("gskl,tgl->gstk", gram.reshape(groups, shared, head, head), key)
        still = jnp.sum(pulled * key.transpose(1, 0, 2)[:, None], axis=-1)
        return jnp.broadcast_to(still[:, :, None], (groups, shared, tokens, tokens))
    planes = len(turns)
    rest = np.arange(2 * planes, head)
    half = -(-len(rest) // 2)
    # What stands still makes planes too, an odd one of them with a coordinate of zeros.
    real = np.concatenate([np.arange(planes), rest[:half]])
    zero = np.full(len(rest) % 2, head)
    imaginary = np.concatenate([np.arange(planes, 2 * planes), rest[half:], zero])
    basis = _basis((*turns, *(0.0,) * half), tokens, np.dtype(key.dtype))
    p, q, sign = basis.first, basis.second, jnp.asarray(basis.sign)
    padded = jnp.pad(gram, ((0, 0), (0, 1), (0, 1)))
    a_p, a_q, b_p, b_q = real[p], real[q], imaginary[p], imaginary[q]
    twice = jnp.asarray(np.where(p == q, 0.5, 1.0), key.dtype)
    c_real = twice * (padded[:, a_p, a_q] - sign * padded[:, b_p, b_q])
    c_imaginary = -twice * (sign * padded[:, a_p, b_q] + padded[:, a_q, b_p])
    rows = jnp.pad(key, ((0, 0), (0, 0), (0, 1))).transpose(2, 1, 0)
    u_p, u_q, v_p, v_q = (rows[index] for index in (a_p, a_q, b_p, b_q))
    column = sign[:, None, None]
    z_real = u_p * u_q - column * v_p * v_q
    z_imaginary = v_p * u_q + column * u_p * v_q
    parts, start = [], 0
    for cosine, sine in basis.chunks:
        end = start + cosine.shape[1]
        x, y = (c[:, None, start:end] for c in (c_real, c_imaginary))
        weight = jnp.concatenate([cosine * x + sine * y, sine * x - cosine * y], axis=-1)
        feature = jnp.concatenate([z_real[start:end], z_imaginary[start:end]])
        weight = weight.reshape(groups, -1, weight.shape[-1])
        found = weight @ feature.transpose(1, 0, 2)
        parts.append(found.reshape(groups, shared, -1, tokens))
        start = end
    return jnp.asarray(basis.positions) @ jnp.concatenate(parts, axis=2)
