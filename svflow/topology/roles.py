"""What part a node plays between and within communities.

Axes: `nodes`. Conventions where nothing is defined are those of the Brain Connectivity Toolbox.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Int

from svflow.topology.graphs import Graph
from svflow.topology.leiden import check_labels, compressed, scaled


class Signed(NamedTuple):
    """A quantity over positive weights, and over the sizes of negative ones: (nodes,) each."""

    positive: Float[np.ndarray, " nodes"]
    negative: Float[np.ndarray, " nodes"]


def participation(graph: Graph, labels: Int[ArrayLike, " nodes"]) -> Signed:
    r"""How evenly a node's weight is spread over communities, for both signs.

        P_i = 1 - sum_c (k_ic / k_i)^2

    with k_ic the weight of i's edges to community c and k_i their sum: 0 where all of it goes to
    one community, towards 1 - 1/communities where it goes to all alike; 0 for a node without edges
    of that sign.

    Arguments:
        graph: the graph.
        labels: (nodes,) communities; a node labelled -1 is in none, and its edges count to none.

    Raises:
        ValueError: labels that do not fit.

    Source: Guimerà and Amaral, Nature 433, 2005; for both signs, Rubinov and Sporns, NeuroImage 56,
    2011.
    """
    labels = compressed(check_labels(labels, graph.nodes))

    def one(k):
        total = k.sum(axis=1)
        share = np.divide(k, total[:, None], out=np.zeros_like(k), where=total[:, None] > 0)
        return np.where(total > 0, 1 - np.sum(share**2, axis=1), 0)

    return Signed(*map(one, _to_communities(graph, labels)))


def within_module_z(graph: Graph, labels: Int[ArrayLike, " nodes"]) -> Signed:
    r"""A node's weight to its own community, as a z-score among the members, for both signs.

        z_i = (k_ic - mean_c k) / std_c k,   c the community of i, over its members

    with the standard deviation of a whole population; 0 where it is 0, and for a node labelled -1.

    Raises:
        ValueError: labels that do not fit.

    Source: Guimerà and Amaral, Nature 433, 2005.
    """
    labels = compressed(check_labels(labels, graph.nodes))
    inside = labels >= 0
    own = labels[inside]
    counts = np.maximum(np.bincount(own), 1)

    def one(k):
        z = np.zeros(graph.nodes)
        within = k[inside, own]
        apart = within - (np.bincount(own, within) / counts)[own]
        deviation = np.sqrt(np.bincount(own, apart**2) / counts)[own]
        # What is 0 but for rounding is 0.
        some = deviation > 1e-12 * np.abs(within)
        z[inside] = np.divide(apart, deviation, out=np.zeros_like(within), where=some)
        return z

    return Signed(*map(one, _to_communities(graph, labels)))


def _to_communities(graph: Graph, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nodes, communities) the weight of each node's edges to each community, for both signs.

    In units of a power of two, which shares and scores do not depend on.
    """
    count = int(labels.max(initial=-1)) + 1
    here = np.concatenate([graph.edges[:, 0], graph.edges[:, 1]])
    there = labels[np.concatenate([graph.edges[:, 1], graph.edges[:, 0]])]
    weights = np.tile(scaled(graph.weights), 2)
    found = []
    for sign in (1, -1):
        chosen = (sign * weights > 0) & (there >= 0)
        codes = here[chosen] * count + there[chosen]
        k = np.bincount(codes, np.abs(weights[chosen]), minlength=graph.nodes * count)
        # Of no edges bincount makes integers.
        found.append(k.reshape(graph.nodes, count).astype(np.float64))
    return found[0], found[1]
