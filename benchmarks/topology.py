"""Building the graph of a residual stream: time against the matrix products it contains, memory.

    python benchmarks/topology.py [--width 4096] [--states 100000] [--rounds 3] [--out FILE.json]

Equality comes first: the streamed correlations of the first 4096 states against NumPy's `corrcoef`,
and a graph from uneven chunks against that of the whole array. Then, interleaved, each timed call
after an untimed one of its own, medians over rounds:

- graph: float32 states to the graph of the 10 strongest correlations per node;
- products: the products X_b^T X_b of all blocks of 1024 states that it contains, in float64, from
  blocks that are there already, as general products;
- symmetric: the same products as symmetric ones into one matrix: half the work, and what is used.

Memory is the peak of a process of its own that does nothing else, its states in float32 included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import numpy as np
from scipy.linalg import blas
from timing import race

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
    """The largest difference from NumPy's correlations; raises where graphs differ."""
    few = x[:4096].astype(np.float64)
    error = float(np.abs(topology.correlation(few).matrix - np.corrcoef(few.T)).max())
    cuts = np.cumsum([1, 700, 1500])
    whole, parts = topology.graph(few, K), topology.graph(np.split(few, cuts), K)
    np.testing.assert_array_equal(whole.edges, parts.edges)
    np.testing.assert_array_equal(whole.weights, parts.weights)
    return error


def products(block: np.ndarray, other: np.ndarray, count: int) -> None:
    for _ in range(count):
        block.T @ other


def symmetric(block: np.ndarray, count: int, into: np.ndarray) -> None:
    for _ in range(count):
        blas.dsyrk(1.0, block.T, beta=1.0, c=into, overwrite_c=1)


def memory(count: int, width: int) -> None:
    """Prints the peak of this process, in GB."""
    topology.graph(states(count, width), K)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--states", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--memory", action="store_true", help="only print the peak, in GB")
    given = parser.parse_args()
    if given.memory:
        memory(given.states, given.width)
        return
    command = [sys.executable, __file__, "--memory", f"--width={given.width}"]
    command.append(f"--states={given.states}")
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    x = states(given.states, given.width)
    row = dict(
        width=given.width,
        states=given.states,
        error=check(x),
        peak_gb=peak,
        of_it_states_gb=x.nbytes / 1e9,
    )
    block = x[:BLOCK].astype(np.float64)
    count = -(-given.states // BLOCK)
    into = np.zeros((given.width, given.width), order="F")
    other = block.copy()  # NumPy would see that a product of a matrix with itself is symmetric
    medians = race(
        {
            "graph": lambda: topology.graph(x, K),
            "products": lambda: products(block, other, count),
            "symmetric": lambda: symmetric(block, count, into),
        },
        given.rounds,
    )
    row |= {f"{name}_s": value for name, value in medians.items()}
    row["of_products"] = medians["graph"] / medians["products"]
    row["of_symmetric"] = medians["graph"] / medians["symmetric"]
    print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if given.out:
        with open(given.out, "w") as file:
            json.dump(dict(numpy=np.__version__, **row), file, indent=1)


if __name__ == "__main__":
    main()
