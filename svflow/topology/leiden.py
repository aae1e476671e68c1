"""Communities of a signed graph, by Leiden.

Axes: `nodes`; `edges`; `runs`.

leidenalg and igraph are the optional extra `topology`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Int

from svflow.integers import is_integer, positive
from svflow.topology.graphs import Graph


class Communities(NamedTuple):
    """A partition of the nodes, and how far the runs agree on it.

    Arguments:
        labels: (nodes,) the community of each node, 0 .. number - 1 by decreasing size; -1 for a
            node without edges, which is in none.
        number: how many communities.
        modularity: of `labels`, see `modularity`.
        stability: the mean adjusted Rand index of every two runs, over the nodes that have edges: 1
            where all agree, 0 as if they were independent; nan for a single run.
        runs: (runs, nodes) the partition of each, labelled in the same way.
    """

    labels: Int[np.ndarray, " nodes"]
    number: int
    modularity: float
    stability: float
    runs: Int[np.ndarray, "runs nodes"]


def communities(graph: Graph, seed: int, *, resolution: float = 1.0, runs: int = 10) -> Communities:
    r"""The partition that maximises signed modularity, by several runs and their consensus.

    Each run is Leiden's algorithm on two layers, of positive and of negative edges, that count
    with opposite signs: it maximises `modularity`. The consensus is the run whose adjusted Rand
    index with all others is largest in the mean, of equal ones that of larger modularity. So it is
    a partition that Leiden found, as coarse as the runs are; what most runs keep together falls
    into the more pieces the less they agree, and models could not be compared by it.

    Arguments:
        graph: of which.
        seed: of the runs; the same seed gives the same partition.
        resolution: gamma of `modularity`; more makes smaller communities.
        runs: how many.

    Raises:
        ValueError: a seed, a resolution or a number of runs that is none.
        ImportError: without the extra.

    Source: Traag, Waltman and van Eck, Scientific Reports 9, 2019 (Leiden); Gómez, Jensen and
    Arenas, Physical Review E 80, 2009 (signed modularity).
    """
    check_leiden(seed, resolution, runs)
    seeds = np.random.SeedSequence(seed).generate_state(runs) >> 1
    alone = graph.isolated
    found = np.stack([_ordered(_leiden(graph, int(s), resolution), alone) for s in seeds])
    quality = [modularity(graph, labels, resolution=resolution) for labels in found]
    agreement = np.eye(runs)
    for a, b in itertools.combinations(range(runs), 2):
        agreement[a, b] = agreement[b, a] = adjusted_rand_index(found[a, ~alone], found[b, ~alone])
    best = np.lexsort((quality, np.round(agreement.sum(axis=1), 12)))[-1]
    others = agreement[~np.eye(runs, dtype=bool)]
    return Communities(
        labels=found[best],
        number=int(found[best].max(initial=-1)) + 1,
        modularity=quality[best],
        stability=float(others.mean()) if others.size else float("nan"),
        runs=found,
    )


def modularity(graph: Graph, labels: Int[ArrayLike, " nodes"], *, resolution: float = 1.0) -> float:
    r"""How much more positive and less negative weight lies within communities than by chance.

        Q = 1 / (2 w+ + 2 w-) sum_ij [ w_ij - gamma k+_i k+_j / 2 w+ + k-_i k-_j / 2 w- ] 1(i ~ j)

    with w+ and w- the sums of positive weights and of the sizes of negative ones, k+ and k- those
    at a node. 0 for a graph without edges. A node labelled -1 is a community by itself. The
    resolution gamma is that of positive weights only: what is expected of negative ones brings
    nodes together, and where both are alike one gamma of both would cancel.

    Source: Gómez, Jensen and Arenas, Physical Review E 80, 2009; resolutions of each sign: Traag
    and Bruggeman, Physical Review E 80, 2009.
    """
    labels = compressed(check_labels(labels, graph.nodes))
    weights = scaled(graph.weights)
    weight = np.abs(weights).sum()
    if not weight:
        return 0.0
    total = 0.0
    within = same(labels, graph.edges)
    for sign in (1, -1):
        chosen = sign * weights > 0
        sizes = np.abs(weights[chosen])
        strength = np.bincount(
            graph.edges[chosen].ravel(), np.repeat(sizes, 2), minlength=graph.nodes
        )
        if not sizes.size:
            continue
        sums = np.bincount(labels[labels >= 0], strength[labels >= 0])
        expected = (np.sum(sums**2) + np.sum(strength[labels < 0] ** 2)) / (2 * sizes.sum())
        gamma = resolution if sign > 0 else 1
        total += sign * (2 * sizes[within[chosen]].sum() - gamma * expected)
    return float(total / (2 * weight))


def adjusted_rand_index(a: Int[ArrayLike, " nodes"], b: Int[ArrayLike, " nodes"]) -> float:
    """How far two partitions agree on pairs of nodes: 1 for the same, 0 in the mean by chance.

    Source: Hubert and Arabie, Journal of Classification 2, 1985.
    """
    a, b = (np.unique(np.asarray(labels), return_inverse=True)[1] for labels in (a, b))
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"labels of {a.shape} and of {b.shape} nodes cannot be compared")

    def pairs(counts):
        return float(np.sum(counts * (counts - 1.0)) / 2)

    both = pairs(np.unique(np.stack([a, b]), axis=1, return_counts=True)[1])
    first, second = pairs(np.bincount(a)), pairs(np.bincount(b))
    every = len(a) * (len(a) - 1) / 2
    expected = first * second / every if every else 0.0
    most = (first + second) / 2
    # Both all in one, or both all apart: the same partition.
    return 1.0 if most == expected else (both - expected) / (most - expected)


def same(labels: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(edges,) whether an edge lies within a community."""
    ends = labels[edges]
    return (ends[:, 0] == ends[:, 1]) & (ends[:, 0] >= 0)


def check_labels(labels: Any, nodes: int) -> np.ndarray:
    """Raises ValueError for what is no integer from -1 per node."""
    labels = np.asarray(labels)
    if labels.shape != (nodes,):
        raise ValueError(f"labels must have shape ({nodes},), got {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < -1:
        raise ValueError("labels must be integers from -1")
    return labels.astype(np.int64)


def compressed(labels: np.ndarray) -> np.ndarray:
    """The same partition as 0, 1, ... in the labels' order; -1 stays. Tables of labels then fit."""
    inside = labels >= 0
    found = np.full(len(labels), -1)
    found[inside] = np.unique(labels[inside], return_inverse=True)[1]
    return found


def scaled(weights: np.ndarray) -> np.ndarray:
    """By a power of two, so nothing is rounded, to sizes of at most 1: squares neither overflow
    nor vanish, and Leiden's smallest gain, which is absolute, is one of the weights' order."""
    return np.ldexp(weights, -np.frexp(np.abs(weights).max(initial=0))[1])


def check_seed(seed: Any) -> None:
    """Raises ValueError for what is not an integer from 0."""
    if not is_integer(seed, 0):
        raise ValueError(f"seed must be an integer from 0, got {seed!r}")


def check_leiden(seed: Any, resolution: Any, runs: Any) -> None:
    """What `communities` raises for settings."""
    positive("runs", runs)
    if not 0 <= resolution < np.inf:
        raise ValueError(f"resolution must be finite and not negative, got {resolution}")
    check_seed(seed)
    _packages()


def _packages():
    try:
        import igraph
        import leidenalg
    except ImportError as error:
        raise ImportError(
            "communities need leidenalg and igraph: pip install 'svflow[topology]'"
        ) from error
    return igraph, leidenalg


def _leiden(graph: Graph, seed: int, resolution: float) -> Sequence[int]:
    igraph, leidenalg = _packages()
    layers, weights = [], scaled(graph.weights)
    for sign in (1, -1):
        chosen = sign * weights > 0
        layers.append(
            leidenalg.RBConfigurationVertexPartition(
                igraph.Graph(n=graph.nodes, edges=graph.edges[chosen]),
                weights=np.abs(weights[chosen]).tolist(),
                resolution_parameter=resolution if sign > 0 else 1.0,
            )
        )
    optimiser = leidenalg.Optimiser()
    optimiser.set_rng_seed(seed)
    optimiser.optimise_partition_multiplex(layers, layer_weights=[1, -1], n_iterations=-1)
    return layers[0].membership


def _ordered(labels: Any, alone: np.ndarray) -> np.ndarray:
    """Labels by decreasing size, of equal ones the first member's first; -1 where alone."""
    labels = np.asarray(labels, np.int64)
    ordered = np.full(len(labels), -1)
    _, first, inverse, sizes = np.unique(
        labels[~alone], return_index=True, return_inverse=True, return_counts=True
    )
    rank = np.empty(len(sizes), np.int64)
    rank[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    ordered[~alone] = rank[inverse.ravel()]
    return ordered
