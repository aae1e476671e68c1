"""Participation and z against hand and definition; what null models keep and what they change."""

import numpy as np
import pytest
from test_topology_communities import block_graph

from svflow import topology


def hand():
    """Node 0 has weights 1 and 2 to its own community, 1 to another, and -2 and -1 to both.

    Nodes 0, 1, 2 | 3, 4 | 5, which has no edge.
    """
    edges = np.array([[0, 1], [0, 2], [0, 3], [0, 4], [1, 2], [1, 4], [3, 4]])
    weights = np.array([1.0, 2, 1, -2, -1, -3, 4])
    return topology.Graph(edges, weights, np.ones(6), 100), np.array([0, 0, 0, 1, 1, -1])


def test_by_hand():
    graph, labels = hand()
    found = topology.participation(graph, labels)
    # Positive weights to the two communities: (3, 1), (1, 0), (2, 0), (1, 4), (0, 4).
    expected = [1 - (9 + 1) / 16, 0, 0, 1 - (1 + 16) / 25, 0, 0]
    np.testing.assert_allclose(found.positive, expected, rtol=0, atol=1e-15)
    # Negative: (0, 2), (1, 3), (1, 0), none, (5, 0).
    expected = [0, 1 - (1 + 9) / 16, 0, 0, 0, 0]
    np.testing.assert_allclose(found.negative, expected, rtol=0, atol=1e-15)
    z = topology.within_module_z(graph, labels)
    # Within: 3, 1, 2 of mean 2 and standard deviation sqrt(2 / 3); 4, 4.
    expected = [np.sqrt(1.5), -np.sqrt(1.5), 0, 0, 0, 0]
    np.testing.assert_allclose(z.positive, expected, rtol=0, atol=1e-15)
    # Within: 0, 1, 1 of mean 2 / 3 and standard deviation sqrt(2) / 3; 0, 0.
    expected = [-np.sqrt(2), np.sqrt(0.5), np.sqrt(0.5), 0, 0, 0]
    np.testing.assert_allclose(z.negative, expected, rtol=0, atol=2e-15)


def test_against_the_definitions(seed):
    """Written with a dense matrix and loops, as in the Brain Connectivity Toolbox's formulas."""
    graph, labels = block_graph(seed)
    A = np.zeros((80, 80))
    A[tuple(graph.edges.T)] = graph.weights
    A += A.T
    P, z = topology.participation(graph, labels), topology.within_module_z(graph, labels)
    for sign, found_p, found_z in ((1, P.positive, z.positive), (-1, P.negative, z.negative)):
        W = np.maximum(sign * A, 0)
        for i in range(80):
            shares = [W[i, labels == c].sum() / W[i].sum() for c in range(4)]
            np.testing.assert_allclose(found_p[i], 1 - np.sum(np.square(shares)), atol=1e-12)
            own = labels == labels[i]
            within = W[np.ix_(own, own)].sum(axis=1)
            expected = (W[i, own].sum() - within.mean()) / within.std()
            np.testing.assert_allclose(found_z[i], expected, atol=1e-12)


def test_equal_strengths_have_no_z():
    """0.1 three times has a mean that is not 0.1."""
    edges = np.array([[0, 1], [0, 2], [1, 2]])
    graph = topology.Graph(edges, np.full(3, 0.1), np.ones(3), 9)
    assert topology.within_module_z(graph, np.zeros(3, int)).positive.tolist() == [0, 0, 0]


def test_extremes_of_participation():
    """A node with one neighbour in each of n communities: 1 - 1/n."""
    n = 7
    edges = np.stack([np.zeros(n, int), np.arange(1, n + 1)], axis=1)
    graph = topology.Graph(edges, np.full(n, -0.3), np.ones(n + 1), 9)
    found = topology.participation(graph, np.r_[0, np.arange(n)])
    np.testing.assert_allclose(found.negative[0], 1 - 1 / n, rtol=1e-14)
    assert not found.positive.any()
    none = topology.Graph(np.zeros((0, 2), int), np.zeros(0), np.ones(3), 9)
    for labels in ([0, 0, 1], [-1, -1, -1]):
        for function in (topology.participation, topology.within_module_z):
            assert not np.any(function(none, np.array(labels)))


def degrees(graph, sign):
    chosen = sign * graph.weights > 0
    return np.bincount(graph.edges[chosen].ravel(), minlength=graph.nodes)


def codes(graph):
    return graph.edges[:, 0] * graph.nodes + graph.edges[:, 1]


def test_rewired_keeps_signed_degrees_and_no_more(seed):
    graph, labels = block_graph(seed)
    found = topology.rewired(graph, seed)
    for sign in (1, -1):
        np.testing.assert_array_equal(degrees(found, sign), degrees(graph, sign))
    np.testing.assert_array_equal(np.sort(found.weights), np.sort(graph.weights))
    assert (found.edges[:, 0] < found.edges[:, 1]).all()
    assert (np.diff(codes(found)) > 0).all()  # in order, and none twice
    kept = np.isin(codes(found), codes(graph)).mean()
    density = len(graph.edges) / (80 * 79 / 2)
    assert abs(kept - density) < 0.08  # as many of the old edges as by chance
    assert topology.modularity(found, labels) < 0.1 < topology.modularity(graph, labels)
    np.testing.assert_array_equal(codes(graph), codes(block_graph(seed)[0]))  # not in place
    again = topology.rewired(graph, seed)
    np.testing.assert_array_equal(again.edges, found.edges)
    assert (topology.rewired(graph, seed + 1).edges != found.edges).any()


def test_rewired_is_fair():
    """The perfect matchings of four nodes: from one edge pair, each of the three alike."""
    start = topology.Graph(np.array([[0, 1], [2, 3]]), np.ones(2), np.ones(4), 9)
    counts: dict[tuple, int] = {}
    for seed in range(600):
        key = tuple(codes(topology.rewired(start, seed, sweeps=7)))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 3
    # Three counts of binomial(600, 1/3), standard deviation 11.5.
    assert all(abs(count - 200) < 50 for count in counts.values())


def test_rewired_where_nothing_can_move():
    full = np.stack(np.triu_indices(5, 1), axis=1)
    graph = topology.Graph(full, np.linspace(-1, 1, 10) + 0.01, np.ones(5), 9)
    found = topology.rewired(graph, 0)
    np.testing.assert_array_equal(found.edges, graph.edges)
    np.testing.assert_array_equal(found.weights, graph.weights)
    none = topology.Graph(np.zeros((0, 2), int), np.zeros(0), np.ones(3), 9)
    assert not len(topology.rewired(none, 0).edges)
    np.testing.assert_array_equal(topology.rewired(graph, 0, sweeps=0).edges, graph.edges)


def test_shuffled_weights_and_permuted_labels(seed):
    graph, labels = block_graph(seed)
    found = topology.shuffled_weights(graph, seed)
    np.testing.assert_array_equal(found.edges, graph.edges)
    np.testing.assert_array_equal(np.sort(found.weights), np.sort(graph.weights))
    assert (found.weights != graph.weights).mean() > 0.9
    labels[:3] = -1
    moved = topology.permuted_labels(labels, seed)
    assert (moved[:3] == -1).all()
    np.testing.assert_array_equal(np.bincount(moved[3:]), np.bincount(labels[3:]))
    assert (moved != labels).mean() > 0.5
    assert labels[:3].tolist() == [-1] * 3
    for function, given in ((topology.rewired, graph), (topology.permuted_labels, labels)):
        with pytest.raises(ValueError, match="seed must be an integer from 0"):
            function(given, -1)
    with pytest.raises(ValueError, match="sweeps must be an integer from 0, got -1"):
        topology.rewired(graph, 0, sweeps=-1)
