"""Building the graph of a residual stream against the matrix products it contains; its memory.

- products: X_b^T X_b of all blocks of 1024 states that it contains, in float64, from blocks that
  are there already, as general products;
- symmetric: the same products as symmetric ones into one matrix: half the work, and what is used.

The streamed correlations of the first 4096 states are NumPy's, and a graph from uneven chunks is
that of the whole array.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import blas

from benchmarks.rows import Case, Peer, row
from svflow import topology
from svflow.topology.graphs import BLOCK

K = 10


def states(count: int, width: int) -> np.ndarray:
    """Correlated, float32, made in parts."""
    random = np.random.default_rng(0)
    shared = random.normal(size=(32, width)).astype(np.float32)
    x = np.empty((count, width), np.float32)
    for start in range(0, count, 4096):
        rows = x[start : start + 4096]
        rows[:] = random.standard_normal(rows.shape, np.float32)
        rows += random.standard_normal((len(rows), 32), np.float32) @ shared / 8
    return x


def check(x: np.ndarray) -> float:
    """The largest difference from NumPy's correlations; 1 where graphs of uneven chunks differ."""
    few = x[:4096].astype(np.float64)
    error = float(np.abs(topology.correlation(few).matrix - np.corrcoef(few.T)).max())
    cuts = np.cumsum([1, len(few) // 6, len(few) // 3])
    whole, parts = topology.graph(few, K), topology.graph(np.split(few, cuts), K)
    pairs = ((whole.edges, parts.edges), (whole.weights, parts.weights))
    return error if all(np.array_equal(a, b) for a, b in pairs) else 1.0


def products(block: np.ndarray, other: np.ndarray, count: int) -> None:
    for _ in range(count):
        block.T @ other


def symmetric(block: np.ndarray, count: int, into: np.ndarray) -> None:
    for _ in range(count):
        blas.dsyrk(1.0, block.T, beta=1.0, c=into, overwrite_c=1)


def case(width, count) -> Case:
    x = states(count, width)
    blocks = -(-count // BLOCK)

    def general():
        block = x[:BLOCK].astype(np.float64)
        other = block.copy()  # NumPy would see that a product of a matrix with itself is symmetric
        return lambda: products(block, other, blocks)

    def half():
        block, into = x[:BLOCK].astype(np.float64), np.zeros((width, width), order="F")
        return lambda: symmetric(block, blocks, into)

    return Case(
        ours=lambda: topology.graph(x, K),
        peers={
            "its products": Peer(general, 2.0, None),
            "its products as symmetric ones": Peer(half, None, None),
        },
        check=lambda _: check(x),
    )


row(
    "topology/graph",
    "graph of 4096 coordinates over 100 000 states",
    case,
    full=dict(width=4096, count=100_000),
    quick=dict(width=40, count=3000),
    tolerance=1e-12,
    most_peak=4e9,
    rounds=2,
)
