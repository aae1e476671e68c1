"""Multi-head attention as functions of arrays.

Axes: `tokens` (queries; `rows`: some of them), `keys` (the tokens attended to), `heads`, `groups`
(key/value heads; each serves heads/groups query heads), `head` (the width of one head), `pairs`
(rotated planes).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from svflow.dtypes import at_least_float32


def allowed_keys(
    tokens: int,
    *,
    causal: bool,
    window: Int[Array, ""] | None = None,
    mask: Bool[Array, " keys"] | None = None,
    rows: Int[Array, " rows"] | None = None,
) -> Bool[Array, "rows keys"]:
    """Which keys each query may attend to.

    `causal`: keys up to the query. `window`: only the last `window` keys, the query's own
    included; a window of 0 is no window. `mask`: real tokens; a padded token is seen by none but
    itself, so every row has a key and softmax stays finite. `rows`: the places of the queries that
    are asked for; None for all.
    """
    query = (jnp.arange(tokens) if rows is None else rows)[:, None]
    key = jnp.arange(tokens)[None, :]
    allowed = key <= query if causal else jnp.ones((query.shape[0], tokens), bool)
    if window is not None:
        near = (query - key < window) if causal else (jnp.abs(query - key) < window)
        allowed = allowed & (near | (window == 0))
    if mask is not None:
        allowed = (allowed & mask[None, :]) | (query == key)
    return allowed


def attention_weights(
    query: Float[Array, "tokens heads head"],
    keys: Sequence[Float[Array, "_ groups head"]],
    allowed: Bool[Array, "tokens keys"],
    *,
    scale: Float[Array, ""],
    softcap: float | None = None,
) -> Float[Array, "groups shared tokens keys"]:
    """softmax_j( cap(scale q_i . k_j) ) over the allowed keys, cap(s) = softcap tanh(s / softcap).

    Query head h reads key group h // (heads / groups); the result's axes are (groups, heads per
    group). The softmax is taken in float32 at least. `keys` come in blocks, one after another: a
    derivative by one block then costs nothing for the others.
    """
    tokens, heads, head = query.shape
    groups = keys[0].shape[1]
    shared = heads // groups
    # As matrix products in this order XLA transposes the narrow operands and never the scores.
    query = (query * scale).reshape(tokens, groups, shared, head).transpose(1, 2, 0, 3)
    query = query.reshape(groups, shared * tokens, head)
    blocks = [query @ key.transpose(1, 2, 0) for key in keys]
    scores = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=-1)
    scores = scores.reshape(groups, shared, tokens, -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    wide = scores.astype(at_least_float32(scores.dtype))
    wide = jnp.where(allowed[None, None], wide, jnp.finfo(wide.dtype).min)
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def mix_values(
    weights: Float[Array, "groups shared tokens keys"],
    values: Sequence[Float[Array, "_ groups head"]],
) -> Float[Array, "tokens heads head"]:
    """sum_j a_ij v_j for every head, the values in blocks like the keys."""
    groups, shared, tokens, keys = weights.shape
    weights = weights.reshape(groups, shared * tokens, keys)
    ends = np.cumsum([value.shape[0] for value in values])
    parts = jnp.split(weights, ends[:-1], axis=-1) if len(values) > 1 else [weights]
    products = [part @ value.transpose(1, 0, 2) for part, value in zip(parts, values)]
    mixed = functools.reduce(jnp.add, products)
    mixed = mixed.reshape(groups, shared, tokens, -1).transpose(2, 0, 1, 3)
    return mixed.reshape(tokens, groups * shared, -1)


SCORES = 2**25  # How many scores `attend` holds at once: 128 MiB in float32.


def query_chunk(tokens: int, heads: int, queries: int | None = None) -> int:
    """How many queries `attend` takes at a time: all, or as many of one head as `SCORES` allows.

    A few hundred rows keep the matrix products as fast as they get; more than 1024 gain nothing.
    """
    queries = tokens if queries is None else queries
    if heads * queries * tokens <= SCORES:
        return queries
    chunk = max(1, min(1024, SCORES // tokens))
    return chunk - 1 if chunk == queries > 1 else chunk  # all queries would be those of all heads


def attend(
    query: Float[Array, "rows heads head"],
    key: Float[Array, "tokens heads head"],
    value: Float[Array, "tokens heads value"],
    *,
    scale: Float[Array, ""],
    causal: bool = False,
    mask: Bool[Array, " tokens"] | None = None,
    chunk: int | None = None,
    rows: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows heads value"]:
    """sum_j softmax_j( scale q_i . k_j ) v_j for every head, without the matrix of all scores.

    Rows of queries are independent, so `chunk` of them (by default `query_chunk`), of one head at
    a time, have their scores in memory; reverse mode computes these again. The softmax is taken
    in float32 at least, and divided by its sum after the values are mixed. `rows`: which tokens the
    queries are of; None for all of them in order.
    """
    tokens, queries, heads = key.shape[0], *query.shape[:2]
    chunk = query_chunk(tokens, heads, queries) if chunk is None else min(chunk, queries)
    if rows is None:
        rows = jnp.arange(tokens)
    q, k, v = (query * scale).transpose(1, 0, 2), key.transpose(1, 2, 0), value.transpose(1, 0, 2)

    def mixed(q, k, v, rows):
        scores = q @ k
        wide = scores.astype(at_least_float32(scores.dtype))
        if causal or mask is not None:
            allowed = allowed_keys(tokens, causal=causal, mask=mask, rows=rows)
            wide = jnp.where(allowed, wide, jnp.finfo(wide.dtype).min)
        # The shift drops out of the quotient, and so out of its derivative.
        top = jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
        share = jnp.exp(wide - top)
        total = jnp.sum(share, axis=-1, keepdims=True)
        # Undivided, the sum of many values may be out of a narrow type's range.
        mix = jnp.matmul(share.astype(v.dtype), v, preferred_element_type=total.dtype)
        return (mix / total).astype(v.dtype)

    if chunk == queries:
        return mixed(q, k, v, rows).transpose(1, 0, 2)
    chunks = -(-queries // chunk)
    missing = chunks * chunk - queries  # rows that are cut off again
    q = jnp.pad(q, ((0, 0), (0, missing), (0, 0))).reshape(heads * chunks, chunk, -1)
    rows = jnp.pad(rows, (0, missing)).reshape(chunks, chunk)

    @jax.checkpoint
    def one(place):
        head = place // chunks
        return mixed(q[place], k[head], v[head], rows[place % chunks])

    out = jax.lax.map(one, jnp.arange(heads * chunks))
    return out.reshape(heads, chunks * chunk, -1)[:, :queries].transpose(1, 0, 2)


def rotate(
    x: Float[Array, "tokens heads head"],
    angles: Float[Array, "tokens pairs"],
    amplitude: Float[Array, ""] | float = 1.0,
) -> Float[Array, "tokens heads head"]:
    """Rotary position embedding: plane (k, k + pairs) of each head turned by angles[:, k].

    Only the first 2 * pairs coordinates turn; `amplitude` scales the turned coordinates (the
    attention factor of YaRN and LongRoPE).
    Source: Su et al., "RoFormer", 2021; the split-half layout of Hugging Face checkpoints.
    """
    pairs = angles.shape[-1]
    cos = (jnp.cos(angles) * amplitude).astype(x.dtype)[:, None, :]
    sin = (jnp.sin(angles) * amplitude).astype(x.dtype)[:, None, :]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
