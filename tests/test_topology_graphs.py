"""Correlations in one pass against NumPy's, the choice of edges by hand, and what is degenerate."""

import jax.numpy as jnp
import numpy as np
import pytest

from svflow import topology
from svflow.topology import graphs


def states(seed, count=300, width=12):
    random = np.random.default_rng(seed)
    return random.normal(size=(count, width)) @ random.normal(size=(width, width)) + 3


def cut(array, *lengths):
    return np.split(array, np.cumsum(lengths))


def test_streamed_is_dense(seed, monkeypatch):
    monkeypatch.setattr(graphs, "BLOCK", 64)  # several blocks, and rows in several parts
    x = states(seed, width=100)
    expected, dense = np.corrcoef(x.T), topology.correlation(x)
    np.testing.assert_allclose(dense.matrix, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(dense.variance, x.var(axis=0), rtol=1e-12)
    assert dense.states == 300
    np.testing.assert_array_equal(dense.matrix, dense.matrix.T)
    for chunks in (cut(x, 1, 2, 100, 0, 64), iter(cut(x, 150)), [jnp.asarray(x)]):
        found = topology.correlation(chunks)
        np.testing.assert_array_equal(found.matrix, dense.matrix)
        np.testing.assert_array_equal(found.variance, dense.variance)
    whole = topology.graph(x, 7)
    for name, value in topology.graph(dense, 7)._asdict().items():
        np.testing.assert_array_equal(value, getattr(whole, name))


def test_a_drifting_mean_and_a_far_one_cost_no_digits(seed, monkeypatch):
    """The textbook sums of squares would lose 16 digits here."""
    monkeypatch.setattr(graphs, "BLOCK", 32)
    x = states(seed)
    expected = np.corrcoef(x.T)
    found = topology.correlation(x + 2.0**27).matrix  # the shift itself costs 8 digits of 16
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    steps = 1e4 * np.repeat(np.arange(10.0), 30)[:, None]
    drifting = x + steps * np.linspace(0, 1, 12)
    found = topology.correlation(drifting).matrix
    np.testing.assert_allclose(found, np.corrcoef(drifting.T), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_narrow_types_are_summed_in_float64(dtype, seed):
    x = jnp.asarray(states(seed), dtype)
    expected = np.corrcoef(np.asarray(x, np.float64).T)
    found = topology.correlation(x)
    np.testing.assert_allclose(found.matrix, expected, rtol=0, atol=1e-12)
    assert found.matrix.dtype == np.float64


def test_edges_by_hand():
    r = np.eye(5)
    for i, j, value in ((0, 1, 0.9), (0, 2, -0.5), (1, 2, 0.4), (2, 3, 0.1), (0, 3, 0.3)):
        r[i, j] = r[j, i] = value
    given = topology.Correlation(r, np.array([1.0, 2, 3, 4, 0]), 50)
    one = topology.graph(given, 1)
    # 0 and 1 choose each other, 2 chooses 0, 3 chooses 0; 4 correlates with nothing.
    assert one.edges.tolist() == [[0, 1], [0, 2], [0, 3]]
    assert one.weights.tolist() == [0.9, -0.5, 0.3]
    assert (one.nodes, one.states, one.variance.tolist()) == (5, 50, [1, 2, 3, 4, 0])
    assert one.isolated.tolist() == [False] * 4 + [True]
    two = topology.graph(given, 2)
    assert two.edges.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [2, 3]]
    assert topology.graph(given, 4).edges.tolist() == two.edges.tolist()  # zeros are no edges


def test_of_equal_correlations_the_lower_coordinate_is_chosen():
    r = np.full((4, 4), 0.5)
    found = topology.graph(topology.Correlation(r, np.ones(4), 9), 1)
    assert found.edges.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_edges_are_those_of_a_sort(seed):
    x = states(seed, width=60)
    r = np.corrcoef(x.T)
    np.fill_diagonal(r, 0)
    expected = set()
    for i, order in enumerate(np.argsort(-np.abs(r), axis=1)[:, :5]):
        expected |= {(min(i, int(j)), max(i, int(j))) for j in order}
    found = topology.graph(x, 5)
    assert set(map(tuple, found.edges.tolist())) == expected
    np.testing.assert_allclose(found.weights, r[tuple(found.edges.T)], rtol=0, atol=1e-12)


def test_constant_and_duplicate_coordinates(seed):
    x = states(seed)
    x[:, 3] = 0.1  # whose mean, in rounded arithmetic, is not 0.1
    x[:, 5], x[:, 6] = x[:, 4], -x[:, 4]
    found = topology.correlation(cut(x, 100, 77))
    assert found.variance[3] == 0
    assert not found.matrix[3].any()
    assert not found.matrix[:, 3].any()
    np.testing.assert_allclose(found.matrix[4, 4:7], [1, 1, -1], rtol=0, atol=1e-15)
    assert np.abs(found.matrix).max() <= 1
    built = topology.graph(found, 2)
    assert np.nonzero(built.isolated)[0].tolist() == [3]
    every = topology.graph(np.ones((9, 4)), 2)
    assert (len(every.edges), every.isolated.all()) == (0, True)
    # Squares of its deviations would be denormal: it counts as constant, the others are exact.
    tiny = x * np.where(np.arange(12) == 8, 1e-155, 1e-140)
    expected = np.corrcoef(np.delete(x, (3, 8), axis=1).T)
    matrix = topology.correlation(tiny).matrix
    assert not matrix[[3, 8]].any()
    left = np.delete(np.delete(matrix, (3, 8), axis=0), (3, 8), axis=1)
    np.testing.assert_allclose(left, expected, rtol=0, atol=1e-12)
    # A coordinate that moves by the last bit is not constant.
    x[7, 3] = np.nextafter(0.1, 1)
    assert topology.correlation(x).matrix[3, 3] == 1


def test_two_states_are_all_correlated():
    found = topology.correlation([[[1.0, 2, 3]], [[2.0, 1, 3]]]).matrix
    np.testing.assert_allclose(found, [[1, -1, 0], [-1, 1, 0], [0, 0, 0]], rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        (np.ones((1, 3)), "at least two states, got 1"),
        ([], "at least two states, got none"),
        (np.ones((0, 3)), "at least two states, got none"),
        (np.ones(3), r"activations must have shape \(states, coordinates\), got \(3,\)"),
        ([np.ones((2, 3)), np.ones((2, 4))], "chunk 1 has 4 coordinates, not 3"),
        ([np.ones((2, 3)), np.ones(3)], "chunk 1 must have shape"),
        (np.ones((2, 3), bool), "activations must be real numbers, got bool"),
        (np.ones((2, 3), complex), "activations must be real numbers, got complex128"),
        (np.array([[1.0, np.nan], [0, 1]]), "activations is not finite"),
        ([np.eye(2), np.array([[1, np.inf]])], "chunk 1 is not finite"),
        (np.array([[1e200, 0], [-1e200, 1]]), "squares of the activations overflow"),
        (np.array([[1.7e308, 0], [-1.7e308, 1]]), "squares of the activations overflow"),
        (None, "activations must be an array .* got NoneType"),
        ([[[1.0, 2], [3]]], r"chunk 0 must have shape \(states, coordinates\): "),
    ],
)
def test_bad_activations_are_named(activations, message):
    with pytest.raises(ValueError, match=message):
        topology.correlation(activations)


@pytest.mark.parametrize("k", [0, 3, 4, 1.0, True])
def test_bad_k_is_named(k):
    with pytest.raises(ValueError, match=r"k must be one of 1 \.\. 2 for 3 coordinates, got"):
        topology.graph(np.eye(3), k)


def test_what_cannot_be_a_graph():
    with pytest.raises(ValueError, match="at least two coordinates, got 1"):
        topology.graph(np.eye(3)[:, :1], 1)
    with pytest.raises(MemoryError, match="correlations of 10000000 coordinates"):
        topology.correlation(np.broadcast_to(np.float64(1), (2, 10**7)))
