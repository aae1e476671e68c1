"""Signed communities: planted ones are found, again and again; modularity and its edges by hand."""

import builtins
import itertools

import numpy as np
import pytest

from svflow import topology


def planted(seed, width=120, groups=4, states=400, loading=0.5):
    """Coordinates of a factor per group, which exclude each other, and the groups.

    x_j = a f_c(j) + sqrt(1 - a^2) noise with a = 0.5: a quarter of the variance is the group's, so
    that r is .25 within a group; -.083 between groups, as the factors sum to zero; and 0.05, or
    1 / sqrt(400), of it is sampling noise. Which node is in which group is drawn.
    """
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(width) % groups)
    factors = random.normal(size=(states, groups))
    factors -= factors.mean(axis=1, keepdims=True)
    factors *= np.sqrt(groups / (groups - 1))
    noise = random.normal(size=(states, width))
    return loading * factors[:, labels] + np.sqrt(1 - loading**2) * noise, labels


def block_graph(seed, width=80, groups=4, degree=40, wrong=0.1):
    """A random graph whose signs say the groups, + within and - between, one in ten turned."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(width) % groups)
    i, j = np.triu_indices(width, 1)
    chosen = random.random(len(i)) < degree / width
    edges = np.stack([i[chosen], j[chosen]], axis=1)
    signs = np.where(labels[edges[:, 0]] == labels[edges[:, 1]], 1, -1)
    signs = np.where(random.random(len(signs)) < wrong, -signs, signs)
    weights = signs * random.uniform(0.5, 1, len(signs))
    return topology.Graph(edges, weights, np.ones(width), 100), labels


@pytest.mark.parametrize("seed", range(20))
def test_planted_partitions_are_recovered(seed):
    x, labels = planted(seed)
    found = topology.communities(topology.graph(x, 10), seed, runs=3)
    assert topology.adjusted_rand_index(found.labels, labels) >= 0.95
    graph, labels = block_graph(seed)
    found = topology.communities(graph, seed, runs=3)
    assert topology.adjusted_rand_index(found.labels, labels) >= 0.95


def test_negative_edges_alone_tell_groups_apart():
    """All edges within groups and between them are there; the signs differ."""
    graph, labels = block_graph(0, width=40, groups=2, degree=40, wrong=0)
    blind = graph._replace(weights=np.abs(graph.weights))
    with_signs = topology.communities(graph, 0, runs=1).labels
    assert topology.adjusted_rand_index(with_signs, labels) == 1
    without = topology.communities(blind, 0, runs=1).labels
    assert topology.adjusted_rand_index(without, labels) < 0.3


def test_a_result_is_one_of_its_runs_and_repeats(seed):
    x = np.random.default_rng(seed).normal(size=(60, 50))
    graph = topology.graph(x, 4)
    found = topology.communities(graph, seed, runs=6)
    again = topology.communities(graph, seed, runs=6)
    other = topology.communities(graph, seed + 1, runs=6)
    np.testing.assert_array_equal(found.runs, again.runs)
    assert (found.runs != other.runs).any()
    indices = np.ones((6, 6))
    for a, b in itertools.permutations(range(6), 2):
        indices[a, b] = topology.adjusted_rand_index(found.runs[a], found.runs[b])
    np.testing.assert_allclose(found.stability, (indices.sum() - 6) / 30, rtol=1e-12)
    assert found.stability < 0.95
    best = np.argmax(indices.sum(axis=0))
    assert topology.adjusted_rand_index(found.labels, found.runs[best]) == 1
    assert found.modularity == topology.modularity(graph, found.labels)
    sizes = np.bincount(found.labels)
    assert (np.diff(sizes) <= 0).all()
    assert found.number == len(sizes)
    # Only for what is noise do runs differ.
    x, _ = planted(seed)
    assert topology.communities(topology.graph(x, 10), seed, runs=3).stability > 0.9


def test_a_larger_resolution_makes_more_communities(seed):
    graph = topology.graph(planted(seed)[0], 10)
    one, three, nine = (
        topology.communities(graph, 0, resolution=resolution, runs=1).number
        for resolution in (1, 3, 9)
    )
    assert 4 == one < three < nine


def hand():
    """Two triangles of weight 1, joined by an edge of -0.5; node 6 is isolated."""
    edges = np.array([[0, 1], [0, 2], [1, 2], [2, 3], [3, 4], [3, 5], [4, 5]])
    weights = np.array([1, 1, 1, -0.5, 1, 1, 1])
    return topology.Graph(edges, weights, np.ones(7), 100)


def test_by_hand():
    graph = hand()
    found = topology.communities(graph, 0, runs=2)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1, -1]
    assert (found.number, found.stability) == (2, 1)
    # w+ = 6, k+ sums to 6 in each triangle; w- = 0.5, k- to 0.5 in each.
    # 2 w+ within - (36 + 36) / 12 = 6;  0 - (0.25 + 0.25) / 1 = -0.5;  2 w+ + 2 w- = 13.
    np.testing.assert_allclose(found.modularity, (12 - 6 + 0.5) / 13, rtol=1e-15)
    both = topology.modularity(graph, [0] * 7, resolution=0.5)
    np.testing.assert_allclose(both, (12 - 6 - (1 - 1)) / 13, rtol=1e-15)
    alone = topology.modularity(graph, np.full(7, -1))
    strengths = np.array([2, 2, 2, 2, 2, 2]) ** 2
    np.testing.assert_allclose(alone, (-strengths.sum() / 12 + 0.5) / 13, rtol=1e-15)


def test_modularity_is_its_definition(seed):
    graph, labels = block_graph(seed)
    A = np.zeros((80, 80))
    A[tuple(graph.edges.T)] = graph.weights
    A += A.T
    expected, same = A.copy(), labels[:, None] == labels
    for sign in (1, -1):
        part = np.maximum(sign * A, 0)
        k = part.sum(axis=1)
        expected -= sign * (1.7 if sign > 0 else 1) * np.outer(k, k) / k.sum()
    expected = expected[same].sum() / np.abs(A).sum()
    found = topology.modularity(graph, labels, resolution=1.7)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_no_edges_and_one_sign():
    none = topology.Graph(np.zeros((0, 2), int), np.zeros(0), np.zeros(4), 9)
    found = topology.communities(none, 0, runs=3)
    assert found.labels.tolist() == [-1] * 4
    assert (found.number, found.modularity, found.stability) == (0, 0, 1)
    graph = hand()
    positive = graph._replace(edges=graph.edges[[0, 1, 2]], weights=np.ones(3))
    assert topology.communities(positive, 0).labels.tolist() == [0, 0, 0, -1, -1, -1, -1]
    negative = topology.communities(positive._replace(weights=-np.ones(3)), 0)
    assert sorted(negative.labels.tolist()) == [-1, -1, -1, -1, 0, 1, 2]
    assert np.isnan(topology.communities(graph, 0, runs=1).stability)


@pytest.mark.parametrize("unit", [1e-300, 1e-30, 1e300])
def test_the_unit_of_the_weights_does_not_matter(unit, seed):
    """Whose squares vanish or overflow; and sums below Leiden's smallest gain, which is absolute"""
    graph, labels = block_graph(seed)
    other = graph._replace(weights=graph.weights * unit)
    expected, found = (topology.communities(one, seed, runs=2) for one in (graph, other))
    assert topology.adjusted_rand_index(expected.labels, labels) > 0.9
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.modularity, expected.modularity, rtol=1e-12)
    for function in (topology.participation, topology.within_module_z):
        for a, b in zip(function(other, labels), function(graph, labels)):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_labels_are_names(seed):
    """Any integers from 0: no table as long as the largest is made."""
    graph, labels = block_graph(seed)
    names = np.array([7, 10**15, 0, 3 * 10**12])[labels]
    np.testing.assert_allclose(
        topology.modularity(graph, names), topology.modularity(graph, labels), rtol=1e-13
    )
    for function in (topology.participation, topology.within_module_z):
        for a, b in zip(function(graph, names), function(graph, labels)):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_adjusted_rand_index():
    """Against the count of pairs; and the levels that it is made for."""
    a, b = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    # Pairs together in a 6, in b 3, in both 2; expected 6 * 3 / 15.
    np.testing.assert_allclose(
        topology.adjusted_rand_index(a, b), (2 - 1.2) / (4.5 - 1.2), rtol=1e-15
    )
    assert topology.adjusted_rand_index(a, 7 - a) == 1
    assert topology.adjusted_rand_index([0, 0], [5, 5]) == 1
    assert topology.adjusted_rand_index([0, 1], [1, 0]) == 1
    assert topology.adjusted_rand_index([0, 0], [0, 1]) == 0
    assert topology.adjusted_rand_index([], []) == 1
    random = np.random.default_rng(0)
    chance = [topology.adjusted_rand_index(*random.integers(0, 4, (2, 100))) for _ in range(100)]
    assert abs(np.mean(chance)) < 0.01
    with pytest.raises(ValueError, match=r"labels of \(2,\) and of \(3,\) nodes"):
        topology.adjusted_rand_index([0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(seed=-1), "seed must be an integer from 0, got -1"),
        (dict(seed=0.5), "seed must be an integer from 0, got 0.5"),
        (dict(seed=0, runs=0), "runs must be a positive integer, got 0"),
        (dict(seed=0, resolution=-1), "resolution must be finite and not negative"),
        (dict(seed=0, resolution=np.nan), "resolution must be finite and not negative"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        topology.communities(hand(), **settings)


def test_bad_labels_are_named():
    for labels, message in (
        ([0] * 6, r"labels must have shape \(7,\), got \(6,\)"),
        ([0.0] * 7, "labels must be integers from -1"),
        ([-2] * 7, "labels must be integers from -1"),
    ):
        with pytest.raises(ValueError, match=message):
            topology.modularity(hand(), labels)


def test_without_the_extra_it_is_named(monkeypatch):
    def refuse(name, *rest, real=builtins.__import__):
        if name == "leidenalg":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'svflow\[topology\]'"):
        topology.communities(hand(), 0)
