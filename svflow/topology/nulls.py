"""Random graphs and labels that keep some of a graph's: what a finding is to be compared with.

Axes: `nodes`; `edges`. Each draw is seeded; no graph is changed in place.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import ArrayLike, Int

from svflow.integers import is_integer
from svflow.topology.graphs import Graph
from svflow.topology.leiden import check_labels, check_seed

__all__ = ["permuted_labels", "rewired", "shuffled_weights"]


def shuffled_weights(graph: Graph, seed: int) -> Graph:
    """The same edges, their weights with their signs permuted among them.

    Keeps which nodes are joined, so every degree, and the set of weights.
    """
    check_seed(seed)
    return graph._replace(weights=np.random.default_rng(seed).permutation(graph.weights))


def rewired(graph: Graph, seed: int, *, sweeps: int = 20) -> Graph:
    """The edges of each sign swapped at random: i - j and k - l become i - l and k - j.

    Keeps every node's number of positive and of negative edges, and the set of weights, each with
    its edge's sign; no loop and no second edge between two nodes arises, of either sign. In each
    sweep the edges of a sign are paired at random and all swaps made that are allowed.

    Arguments:
        sweeps: an edge is offered one swap in each.

    Source: Maslov and Sneppen, Science 296, 2002, for unsigned graphs; signs apart as in Rubinov
    and Sporns, NeuroImage 56, 2011.
    """
    check_seed(seed)
    if not is_integer(sweeps, 0):
        raise ValueError(f"sweeps must be an integer from 0, got {sweeps!r}")
    random = np.random.default_rng(seed)
    edges, nodes = graph.edges.copy(), graph.nodes
    signs = [np.nonzero(sign * graph.weights > 0)[0] for sign in (1, -1)]
    for _ in range(sweeps):
        for places in signs:
            pairs = random.permutation(places)[: len(places) // 2 * 2].reshape(2, -1)
            first, second = edges[pairs[0]], edges[pairs[1]]
            turned = random.random(len(second)) < 0.5
            second = np.where(turned[:, None], second[:, ::-1], second)
            new = np.stack(
                [
                    np.stack([first[:, 0], second[:, 1]], axis=1),
                    np.stack([second[:, 0], first[:, 1]], axis=1),
                ]
            )
            new.sort(axis=-1)
            codes = new[..., 0] * nodes + new[..., 1]
            _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
            once = counts[inverse].reshape(codes.shape) == 1
            there = np.isin(codes, edges[:, 0] * nodes + edges[:, 1])
            allowed = (once & ~there & (new[..., 0] != new[..., 1])).all(axis=0)
            edges[pairs[:, allowed]] = new[:, allowed]
    order = np.lexsort((edges[:, 1], edges[:, 0]))
    return graph._replace(edges=edges[order], weights=graph.weights[order])


def permuted_labels(labels: Int[ArrayLike, " nodes"], seed: int) -> Int[np.ndarray, " nodes"]:
    """The labels of the nodes that have one, permuted among them: communities keep their sizes."""
    check_seed(seed)
    labels = check_labels(labels, np.size(labels)).copy()
    inside = labels >= 0
    labels[inside] = np.random.default_rng(seed).permutation(labels[inside])
    return labels
