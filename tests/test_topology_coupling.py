"""The coupling by its definition, its p-values on noise, what confounds it, degenerate ones."""

import functools

import jax
import numpy as np
import pytest
from scipy.stats import kstest, rankdata, spearmanr

from svflow import topology
from svflow.topology.coupling import CORRECTIONS, adjusted

COUNT = 200


def noise_graph(random, width=96, states=200, k=3):
    """Of independent coordinates, and its communities, of which there are about 15."""
    graph = topology.graph(random.normal(size=(states, width)), k)
    labels = topology.communities(graph, int(random.integers(1000)), runs=1).labels
    return graph, labels


@functools.cache
def on_noise(confounded):
    """p and the part of ties, (runs, raw or partial, signs, gains), of J independent of the graph.

    With `confounded`, columns of J scale with norm weights, and these with participation: raw p are
    then those of the artefact, partial ones those of noise.
    """
    rows, permutations = [], 199
    for seed in range(COUNT):
        random = np.random.default_rng([seed, confounded])
        graph, labels = noise_graph(random)
        weights = random.normal(size=(2, graph.nodes))
        J = random.normal(size=(graph.nodes, graph.nodes))
        if confounded:
            role = topology.participation(graph, labels).positive
            weights[0] = np.exp(0.5 * random.normal(size=graph.nodes) + 4 * role)
            J = J * weights[0]
        found = topology.coupling(
            J, graph, labels, norm_weights=weights, permutations=permutations, seed=seed
        )
        rows.append([(one.p_value[..., 0], one.tie[..., 0]) for one in (found.raw, found.partial)])
    return np.array(rows).transpose(2, 0, 1, 3, 4)


@pytest.mark.parametrize("version", [0, 1], ids=["raw", "partial"])
def test_on_noise_p_values_are_uniform(version):
    """By Kolmogorov and Smirnov, for every gain and sign, as they are and with ties resolved."""
    p, tie = (part[:, version] for part in on_noise(False))
    resolved = p - np.random.default_rng(0).random(p.shape) * tie
    assert (resolved >= 0).all()
    for values in (p, resolved):
        found = [kstest(values[:, s, g], "uniform").pvalue for s in range(2) for g in range(4)]
        assert min(found) > 0.01 / 8, found  # Bonferroni over the eight
        # One test of all: below alpha as often as said.
        for alpha in (0.05, 0.2):
            assert abs((values <= alpha).mean() - alpha) < 4 * np.sqrt(alpha / COUNT / 2)


def test_the_partial_version_removes_norm_weights():
    p, tie = on_noise(True)
    raw, partial = p[:, 0, 0, 0], p[:, 1, 0, 0]
    assert (raw <= 0.05).mean() > 0.8
    resolved = partial - np.random.default_rng(0).random(COUNT) * tie[:, 1, 0, 0]
    assert kstest(resolved, "uniform").pvalue > 0.01
    assert (partial <= 0.05).mean() < 0.1


def test_few_communities_have_valid_and_coarse_p_values():
    """Three: never below alpha more often than alpha, and uniform once ties are resolved."""
    p, tie, least = [], [], []
    for seed in range(COUNT):
        random = np.random.default_rng(seed)
        graph, _ = noise_graph(random, width=30)
        labels = random.integers(0, 3, 30)
        found = topology.coupling(
            random.normal(size=(30, 30)), graph, labels, permutations=199, seed=seed
        ).raw
        for values, part in ((p, found.p_value), (tie, found.tie), (least, found.least)):
            values.append(part[0, 0, 0])
    p, tie, least = (np.array(values) for values in (p, tie, least))
    assert kstest(p, "uniform").pvalue < 1e-6
    assert kstest(p, "uniform", alternative="greater").pvalue > 0.01
    assert kstest(p - np.random.default_rng(1).random(COUNT) * tie, "uniform").pvalue > 0.01
    assert (p >= least).all()
    assert least.min() > 0.05


def test_the_statistic_is_its_definition(seed):
    """Against |J P_c|_F, ranks and `spearmanr`, with a dense projection for the partial version."""
    random = np.random.default_rng(seed)
    graph, labels = noise_graph(random)
    d = graph.nodes
    J, weights = random.normal(size=(3, d, d)), random.normal(size=(3, 2, d))
    found = topology.coupling(
        J, [graph] * 3, [labels] * 3, norm_weights=weights, permutations=99, seed=7
    )
    count = labels.max() + 1
    roles = np.stack(topology.participation(graph, labels))
    for layer in range(3):
        matrices = (J[layer], J[layer].T, J[layer] - np.eye(d), (J[layer] - np.eye(d)).T)
        Z = np.vstack(
            [np.ones(d), rankdata(np.abs(weights[layer]), axis=1), rankdata(graph.variance)]
        )
        out = np.eye(d) - Z.T @ np.linalg.pinv(Z.T)
        for g, matrix in enumerate(matrices):
            gain = []
            for c in range(count):
                P = np.eye(d)[:, labels == c]
                gain.append(np.linalg.norm(matrix @ P) / np.sqrt(P.shape[1]))
            np.testing.assert_allclose(found.gain[layer][g], gain, rtol=1e-12)
            left = out @ rankdata(np.linalg.norm(matrix, axis=0))
            for s in range(2):
                mean = [roles[s, labels == c].mean() for c in range(count)]
                np.testing.assert_allclose(found.participation[layer][s], mean, rtol=1e-12)
                np.testing.assert_allclose(
                    found.raw.rho[s, g, layer], spearmanr(mean, gain).statistic, rtol=1e-12
                )
                role = out @ rankdata(roles[s])
                both = [[x[labels == c].mean() for c in range(count)] for x in (role, left)]
                np.testing.assert_allclose(
                    found.partial.rho[s, g, layer], spearmanr(*both).statistic, rtol=1e-12
                )
        np.testing.assert_array_equal(found.sizes[layer], np.bincount(labels))
    p = found.raw.p_value * 100
    np.testing.assert_allclose(p, np.round(p), atol=1e-9)  # (1 + a count) / (1 + 99)
    assert p.min() >= 1 - 1e-9
    again = topology.coupling(
        J, [graph] * 3, [labels] * 3, norm_weights=weights, permutations=99, seed=7
    )
    np.testing.assert_array_equal(again.partial.p_value, found.partial.p_value)


def test_p_counts_arrangements_that_are_projected_again(seed):
    """Against dense projections of the arrangements that the seed draws, one by one."""
    random = np.random.default_rng(seed)
    graph, labels = noise_graph(random, width=40)
    d, count = graph.nodes, labels.max() + 1
    J, weights = random.normal(size=(d, d)), random.normal(size=(9, d))
    found = topology.coupling(J, graph, labels, norm_weights=weights, permutations=99, seed=seed)
    Z = np.vstack([np.ones(d), rankdata(np.abs(weights), axis=1), rankdata(graph.variance)])
    out = np.eye(d) - Z.T @ np.linalg.pinv(Z.T)
    order = np.random.default_rng([seed, 0]).permuted(np.tile(np.arange(d), (100, 1)), axis=1)
    order[0] = np.arange(d)
    gain, role = (J**2).sum(0), topology.participation(graph, labels).positive
    left = out @ rankdata(gain)
    pairs = (
        (found.raw, role, gain[order]),
        (found.partial, out @ rankdata(role), left[order] @ out),
    )
    for tested, x, moved in pairs:
        means = [[v[labels == c].mean() for c in range(count)] for v in (x, *moved)]
        rho = np.array([spearmanr(means[0], one).statistic for one in means[1:]])
        chance = rho.mean() if abs(rho.mean()) > 3 * rho.std() / len(rho) ** 0.5 else 0
        distance = np.abs(rho - chance)
        np.testing.assert_allclose(tested.chance[0, 0, 0], chance, rtol=0, atol=1e-12)
        expected = (distance >= distance[0] - 1e-9).mean()
        np.testing.assert_allclose(tested.p_value[0, 0, 0], expected, rtol=1e-12)


def test_a_planted_coupling_is_found_with_its_sign():
    """Gain of columns grows with the community's participation, that of rows falls."""
    random = np.random.default_rng(0)
    graph, labels = noise_graph(random, width=200)
    roles = topology.participation(graph, labels).positive
    mean = (np.bincount(labels, roles) / np.bincount(labels))[labels]
    J = random.normal(size=(4, 200, 200))
    J[1:] *= np.exp(mean)
    J[1:] /= np.exp(2 * mean)[:, None]
    found = topology.coupling(J, [graph] * 4, [labels] * 4, permutations=999)
    for tested in (found.raw, found.partial):
        assert tested.verdict[0, 0].tolist() == ["none", "positive", "positive", "positive"]
        assert tested.verdict[0, 1].tolist() == ["none", "negative", "negative", "negative"]
        np.testing.assert_allclose(tested.p_value[0, 0, 1:], 0.001)
        # Holm over four layers, three of them at 0.001.
        np.testing.assert_allclose(tested.adjusted[0, 0, 1:], 0.004)
        assert (tested.verdict == "none").mean() > 0.2
    strict = topology.coupling(J, [graph] * 4, [labels] * 4, permutations=999, alpha=0.003)
    assert (strict.raw.verdict == "none").all()
    rate = topology.coupling(
        J, [graph] * 4, [labels] * 4, permutations=999, correction="benjamini-hochberg"
    )
    np.testing.assert_allclose(rate.raw.adjusted[0, 0, 1:], 0.001 * 4 / 3)


def test_chance_is_not_zero_where_sizes_go_with_participation():
    """The root mean square of few numbers is smaller in the median: rho by chance follows sizes."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), [1, 1, 1, 1, 24, 24, 24, 24])
    graph = topology.graph(random.normal(size=(300, 100)), 4)
    J = random.normal(size=(100, 100)) * np.exp(random.normal(size=100))
    found = topology.coupling(J, graph, labels, permutations=1999).raw
    mean = topology.participation(graph, labels).positive
    assert mean[:4].mean() > mean[4:].mean()
    assert found.chance[0, 0, 0] < -0.12  # of which 2000 arrangements are off by 0.01
    assert abs(found.chance[0, 1, 0]) < 0.08  # the rows' norms scatter little


def test_three_communities_have_two_p_values():
    """Of three ranks |rho| is 1 in a third of all orders, and 1/2 in the others."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)
    graph = topology.graph(random.normal(size=(300, 60)), 4)
    J = random.normal(size=(12, 60, 60))
    exact = {1.0: 1 / 3, 0.5: 1.0}
    for seed in range(4):
        found = topology.coupling(J, [graph] * 12, [labels] * 12, permutations=999, seed=seed).raw
        wanted = [exact[size] for size in np.abs(found.rho[0, 0]).round(6)]
        assert set(wanted) == set(exact.values())
        # A share of 1000 arrangements: four of its standard deviations.
        np.testing.assert_allclose(found.p_value[0, 0], wanted, atol=4 * (2 / 9 / 1000) ** 0.5)


def test_adjusted_by_hand():
    p = np.array([[0.01, 0.04, 0.03, 0.005], [0.5, 0.9, 0.02, 0.02]])
    holm = [[0.03, 0.06, 0.06, 0.02], [1, 1, 0.08, 0.08]]
    np.testing.assert_allclose(adjusted(p, "holm"), holm, rtol=1e-14)
    rate = [[0.02, 0.04, 0.04, 0.02], [2 / 3, 0.9, 0.04, 0.04]]
    np.testing.assert_allclose(adjusted(p, "benjamini-hochberg"), rate, rtol=1e-14)
    for correction in CORRECTIONS:
        np.testing.assert_array_equal(adjusted(p[:, :1], correction), p[:, :1])


def test_squared_gains(seed):
    J = np.random.default_rng(seed).normal(size=(2, 3, 5, 5))
    found = topology.squared_gains(J)
    R = J - np.eye(5)
    expected = [(J**2).sum(-2), (J**2).sum(-1), (R**2).sum(-2), (R**2).sum(-1)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    near = np.eye(5, dtype=np.float32) + np.float32(1e-4) * np.eye(5, dtype=np.float32)[::-1]
    update = topology.squared_gains(near)[2]
    np.testing.assert_allclose(update[:2], 1e-8, rtol=1e-6)  # nothing cancels


def test_float64_is_kept_where_jax_has_float32_only():
    R = 1e-9 * np.random.default_rng(0).normal(size=(6, 6))
    with jax.enable_x64(False):
        found = topology.squared_gains(np.eye(6) + R)
    np.testing.assert_allclose(found[2], (R**2).sum(0), rtol=1e-6)
    graph = topology.Graph(np.array([[0, 1], [2, 3]]), np.ones(2), np.ones(6), 9)
    with jax.enable_x64(False):
        gain = topology.coupling(np.eye(6) + R, graph, np.arange(6), permutations=1).gain
    np.testing.assert_allclose(gain[0][2], np.sqrt((R**2).sum(0)), rtol=1e-6)


def test_degenerate_ones_have_p_one():
    """No communities, one, gains that are all the same, participation that is all the same."""
    random = np.random.default_rng(0)
    graph, labels = noise_graph(random)
    d = graph.nodes
    J = random.normal(size=(d, d))
    none = topology.Graph(np.zeros((0, 2), int), np.zeros(0), np.ones(d), 9)
    for matrix, one, own in (
        (J, graph, np.full(d, -1)),
        (J, graph, np.zeros(d, int)),
        (3 * np.eye(d), graph, labels),
        (np.eye(d), graph, labels),
        (J, none, labels),
    ):
        found = topology.coupling(matrix, one, own, permutations=49)
        for tested in (found.raw, found.partial):
            assert not tested.rho.any()
            for values in (tested.p_value, tested.tie, tested.least, tested.adjusted):
                np.testing.assert_array_equal(values, 1)
            assert (tested.verdict == "none").all()
    assert [len(sizes) for sizes in found.sizes] == [labels.max() + 1]


def test_nodes_in_no_community_are_left_out():
    random = np.random.default_rng(1)
    graph, labels = noise_graph(random)
    J = random.normal(size=(graph.nodes, graph.nodes))
    out = np.where(labels == 2, -1, labels)
    found = topology.coupling(J, graph, out, permutations=9)
    np.testing.assert_array_equal(found.sizes[0], np.delete(np.bincount(labels), 2))
    whole = topology.coupling(J, graph, labels, permutations=9)
    np.testing.assert_array_equal(found.gain[0], np.delete(whole.gain[0], 2, axis=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(J=np.ones((3, 4))), "J must be square matrices"),
        (dict(J=np.full((4, 4), np.nan)), r"J\[0\] is not finite"),
        (dict(J=1e200 * np.eye(4)), "squares of the Jacobians' entries overflow"),
        (dict(J=np.ones((0, 4, 4)), labels=np.ones((0, 4), int)), "at least one layer, got none"),
        (dict(norm_weights=np.ones((1, 4), complex)), "must be real numbers, got complex128"),
        (dict(J=np.ones((5, 5))), r"1 layers of width 5 need as many graphs, got \[4\] nodes"),
        (dict(J=np.ones((2, 4, 4))), r"2 layers of width 4 need as many graphs, got \[4\] nodes"),
        (dict(labels=[0, 1]), r"labels must have shape \(1, 4\), got \(1, 2\)"),
        (dict(labels=[0.5] * 4), "labels must be integers from -1"),
        (dict(norm_weights=np.ones(4)), r"norm_weights must be finite, \(1, norms, 4\)"),
        (dict(norm_weights=np.full((1, 4), np.inf)), "norm_weights must be finite"),
        (dict(permutations=0), "permutations must be a positive integer, got 0"),
        (dict(permutations=9.5), "permutations must be a positive integer, got 9.5"),
        (dict(seed=-3), "seed must be an integer from 0, got -3"),
        (dict(correction="bonferroni"), r"correction must be one of \('holm', 'benj"),
        (dict(alpha=1), "alpha must lie between 0 and 1, got 1"),
    ],
)
def test_bad_input_is_named(change, message):
    edges = np.array([[0, 1], [2, 3]])
    given = dict(J=np.eye(4), labels=[0, 0, 1, 1]) | change
    graph = topology.Graph(edges, np.ones(2), np.ones(4), 9)
    with pytest.raises(ValueError, match=message):
        topology.coupling(given.pop("J"), graph, given.pop("labels"), **given)
