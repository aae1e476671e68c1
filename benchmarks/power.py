"""The power flow against loops, and its attention in chunks against its bounds.

- power/runs: independent runs as one jitted call (`jax.lax.map` of `jax.vmap` over a batch, which
  keeps a batch's scores in the caches), against the loop over runs, layers and heads in NumPy (a
  few runs), NumPy batched over the runs of a chunk, and PyTorch's bmm. Peers run ten layers.
- power/long: full attention over very many tokens, against its matrix products alone, on the same
  shapes, and as many exponentials; equality with the dense path where that fits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks.rows import Case, Peer, row
from svflow import attention
from svflow.power.flow import PowerFlow

WIDTH = 64
SAMPLE = 8  # Runs of the NumPy loop.
SHORT = 10  # Layers of the peers: the directions of rounding grow over many.


def weights_of(heads: int, seed: int = 0) -> list[np.ndarray]:
    random, head = np.random.default_rng(seed), WIDTH // heads
    shapes = [(heads, WIDTH, head)] * 3 + [(heads, head, WIDTH)]
    return [(random.normal(size=s) / s[-2] ** 0.5).astype(np.float32) for s in shapes]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def numpy_loop(weights, x0, layers: int):
    query, key, value, output = weights
    scale = np.asarray(query.shape[-1] ** -0.5, x0.dtype)
    ends = []
    for x in x0:
        for _ in range(layers):
            update = np.zeros_like(x)
            for h in range(len(query)):
                a = softmax((x @ query[h]) @ (x @ key[h]).T * scale)
                update += a @ (x @ value[h]) @ output[h]
            x = unit(x + update)
        ends.append(x)
    return np.stack(ends)


def numpy_batched(weights, x0, layers: int, batch: int):
    query, key, value, output = weights
    scale = np.asarray(query.shape[-1] ** -0.5, x0.dtype)
    ends = []
    for start in range(0, len(x0), batch):
        x = x0[start : start + batch]
        for _ in range(layers):
            y = x[:, None]
            a = softmax((y @ query) @ (y @ key).swapaxes(-1, -2) * scale)
            x = unit(x + (a @ (y @ value) @ output).sum(axis=1))
        ends.append(x)
    return np.concatenate(ends)


def torch_batched(weights, x0, layers: int, batch: int):
    import torch

    query, key, value, output = (torch.tensor(w) for w in weights)
    heads, width, head = query.shape
    merged = torch.cat([w.permute(1, 0, 2).reshape(width, -1) for w in (query, key, value)], 1)
    out = output.reshape(-1, width)
    ends = []
    with torch.no_grad():
        for start in range(0, len(x0), batch):
            x = torch.tensor(x0[start : start + batch])
            runs, tokens, _ = x.shape

            def split(a, runs=runs, tokens=tokens):
                a = a.reshape(runs, tokens, heads, head).transpose(1, 2)
                return a.reshape(runs * heads, tokens, head)

            for _ in range(layers):
                q, k, v = map(split, (x @ merged).split(heads * head, dim=-1))
                a = torch.softmax(torch.bmm(q * head**-0.5, k.transpose(1, 2)), dim=-1)
                mixed = torch.bmm(a, v).reshape(runs, heads, tokens, head).transpose(1, 2)
                x = x + mixed.reshape(runs, tokens, -1) @ out
                x = x / x.norm(dim=-1, keepdim=True)
            ends.append(x)
    return torch.cat(ends).numpy()


@functools.partial(jax.jit, static_argnames="batch")
def ends_of(flow, x0, batch: int):
    def end(x):
        return sv.simulate(flow, x, ts=[float(flow.depth)]).xs[-1]

    return jax.lax.map(end, x0, batch_size=batch) if batch else jax.vmap(end)(x0)


def apart(a, b) -> float:
    """The largest difference of states on the unit sphere."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def runs(count, layers, batch, tokens=64, heads=4) -> Case:
    weights = weights_of(heads)
    x0 = unit(np.random.default_rng(1).normal(size=(count, tokens, WIDTH))).astype(np.float32)
    few, short = x0[:SAMPLE], min(layers, SHORT)
    flow = PowerFlow(*weights, depth=layers)

    def error(_, theirs):
        some = x0[: len(theirs)]
        return apart(ends_of(flow.repeated(short), some, min(batch, len(some))), theirs)

    def torch():
        import torch  # noqa: F401

        return lambda: torch_batched(weights, x0, short, batch)

    share = layers / short
    return Case(
        ours=lambda: ends_of(flow, x0, batch),
        peers={
            "NumPy loop": Peer(
                lambda: lambda: numpy_loop(weights, few, short),
                1 / 20,
                error,
                times=share * count / len(few),
            ),
            "NumPy batched": Peer(
                lambda: lambda: numpy_batched(weights, x0, short, batch), None, error, times=share
            ),
            "PyTorch batched": Peer(torch, 1.0, error, times=share),
        },
    )


def long(tokens, dense_tokens, chunk=None) -> Case:
    random = np.random.default_rng(3)
    flow = PowerFlow(*weights_of(1), depth=1)
    x0 = jnp.asarray(unit(random.normal(size=(tokens, WIDTH))), jnp.float32)
    step = jax.jit(lambda flow, x: flow.step(0, x))

    def check(end):
        """Chunks against all scores at once, and that the step ends on the sphere."""
        q, k, v = (
            jnp.asarray(random.normal(size=(dense_tokens, 1, WIDTH)), jnp.float32) for _ in "qkv"
        )
        scale = jnp.asarray(WIDTH**-0.5, jnp.float32)
        allowed = attention.allowed_keys(dense_tokens, causal=False)
        weights = attention.attention_weights(q, [k], allowed, scale=scale)
        parts = attention.attend(q, k, v, scale=scale, chunk=dense_tokens // 8)
        off = jnp.abs(jnp.linalg.norm(end, axis=-1) - 1).max()
        return max(apart(parts, attention.mix_values(weights, [v])), float(off))

    # A chunk's two products and its exponentials in a loop over several chunks whose results stay
    # in one buffer.
    rows = min(tokens, attention.query_chunk(tokens, 1)) if chunk is None else chunk
    count = max(1, min(8, tokens // rows))
    q = jnp.asarray(random.normal(size=(count, rows, WIDTH)), jnp.float32)
    k, v = (jnp.asarray(random.normal(size=(tokens, WIDTH)), jnp.float32) for _ in "kv")

    @jax.jit
    def bound(q, k, v):
        def one(total, q):
            # The first product's result is used whole, at little cost.
            scores = jax.lax.optimization_barrier(q @ k.T)
            share = jax.lax.optimization_barrier(jnp.exp(-scores))
            return total + jax.lax.optimization_barrier(share @ v), None

        return jax.lax.scan(one, jnp.zeros((rows, WIDTH), q.dtype), q)[0]

    return Case(
        ours=lambda: step(flow, x0),
        peers={
            "its products and exponentials": Peer(
                lambda: lambda: bound(q, k, v), 2.0, None, times=tokens / (rows * count)
            )
        },
        check=check,
    )


row(
    "power/runs",
    "1000 runs of a power flow, 64 tokens of width 64, 4 heads, 500 layers, in one call",
    runs,
    full=dict(count=1000, layers=500, batch=50),
    quick=dict(count=12, layers=12, batch=4, tokens=8),
    tolerance=1e-4,
    rounds=3,
)
row(
    "power/long",
    "one layer of a power flow over 65 536 tokens of width 64, full attention",
    long,
    full=dict(tokens=65536, dense_tokens=2048),
    quick=dict(tokens=64, dense_tokens=32, chunk=16),
    tolerance=1e-5,
    most_peak=1.5e9,
    rounds=3,
)
