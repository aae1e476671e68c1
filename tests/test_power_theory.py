"""The theory of shared weights: every statement with its number, over many seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flows import fast

import svflow as sv
from svflow.power.flow import PowerFlow
from svflow.power.theory import Regime, bipartite, convergence, modes, predict

WIDTH, TOKENS, LAYERS, SEEDS = 8, 6, 300, 8


def matrix(values, random, rest=(-0.4, 0.0), width=WIDTH):
    """A matrix with these eigenvalues (a complex one stands for its pair), not normal."""
    blocks, at = np.diag(np.linspace(*rest, width)), 0
    for value in values:
        if np.imag(value):
            a, b = np.real(value), np.imag(value)
            blocks[at : at + 2, at : at + 2] = [[a, -b], [b, a]]
        else:
            blocks[at, at] = value
        at += 2 if np.imag(value) else 1
    X = np.eye(width) + 0.4 * random.normal(size=(width, width)) / np.sqrt(width)
    return X @ blocks @ np.linalg.inv(X)


def flow_of(F, random, *, heads=4, causal=False, size=0.6, depth=1):
    """Random heads whose layer matrices add up to F."""
    width = len(F)
    each = 0.3 * random.normal(size=(heads, width, width)) / np.sqrt(width)
    each[-1] += F - each.sum(axis=0)
    query, key = size * random.normal(size=(2, heads, width, 3))
    value = np.tile(np.eye(width), (heads, 1, 1))
    return PowerFlow(query, key, value, each.transpose(0, 2, 1), depth=depth, causal=causal)


def self_similar(F, beta, depth=1):
    """One head whose scores are beta x_i . x_j."""
    eye = np.eye(len(F))
    return PowerFlow(eye[None], eye[None] * beta, eye[None], F.T[None], depth=depth, scale=1.0)


def start(random, tokens=TOKENS, width=WIDTH, near=None, size=1.0):
    x = random.normal(size=(tokens, width)) * size
    return x if near is None else x + near


def stack(flows):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *flows)


step = fast(lambda flow, x: flow.step(0, x))
steps = fast(jax.vmap(lambda flow, x: flow.step(0, x)))


@fast
@jax.vmap
def run(flow, x):
    """The state after LAYERS layers, and after one more."""
    x = jax.lax.fori_loop(0, LAYERS, lambda _, x: flow.step(0, x), x)
    return x, flow.step(0, x)


def runs(values, count=SEEDS, causal=False, rest=(-0.4, 0.0), size=0.6):
    """Flows with these eigenvalues, and random starts."""
    randoms = [np.random.default_rng(seed) for seed in range(count)]
    flows = [flow_of(matrix(values, r, rest), r, causal=causal, size=size) for r in randoms]
    return flows, np.stack([start(r) for r in randoms])


def cosines(x, v):
    return np.abs(np.asarray(x) @ v) / np.linalg.norm(x, axis=-1)


# Where all tokens agree.


def test_dominance_follows_one_plus_lambda():
    flows, x0 = runs([1.0, -1.5])
    ends, _ = run(stack(flows), x0)
    for flow, x in zip(flows, ends):
        F = np.asarray(flow.layer_matrix())
        values, vectors = np.linalg.eig(F)
        assert abs(np.abs(values).max() - 1.5) < 1e-12
        prediction = predict(flow)
        assert prediction.regime == Regime.CONSENSUS
        assert abs(prediction.value - 1.0) < 1e-12
        v = vectors[:, np.argmin(np.abs(values - 1.0))].real
        assert abs(abs(prediction.limit[0] @ v) - 1) < 1e-12
        assert cosines(x, v).min() > 1 - 1e-12
        other = vectors[:, np.argmin(np.abs(values + 1.5))].real
        assert cosines(x, other).max() < 0.9
        # The same pair as the spectra's.
        value, vector = sv.spectra.principal(jnp.asarray(F), shift=1.0)
        assert abs(value - prediction.value) < 1e-12
        np.testing.assert_allclose(vector, prediction.vector, atol=1e-12)


def test_the_linearisation():
    # eps_i' = P (eps_i + F sum_j a_ij eps_j) / (1 + lambda_1), with sharp attention too.
    tangents = fast(jax.vmap(lambda flow, x, e: jax.jvp(lambda x: flow.step(0, x), (x,), (e,))[1]))
    for value in (0.7, -3.0):
        for causal in (False, True):
            flows, eps = runs([value], causal=causal)
            v = np.stack([predict(flow).limit[0] for flow in flows])[:, None]
            F = np.stack([np.asarray(flow.layer_matrix()) for flow in flows])
            a = np.tri(TOKENS) / np.arange(1, TOKENS + 1)[:, None] if causal else 1 / TOKENS
            seen = np.broadcast_to(a, (TOKENS, TOKENS)) @ eps
            pushed = (eps + seen @ F.swapaxes(1, 2)) / abs(1 + value)
            pushed -= (pushed @ v.swapaxes(1, 2)) * v
            x = np.tile(v, (1, TOKENS, 1))
            np.testing.assert_allclose(tangents(stack(flows), x, eps), pushed, atol=1e-12)


def test_the_modes_are_the_eigenvalues_of_the_layer():
    jacobians = fast(jax.vmap(jax.jacfwd(lambda x, flow: flow.step(0, x)), in_axes=(0, 0)))
    for causal in (False, True):
        flows, _ = runs([0.7, 0.3 + 0.2j], causal=causal)
        v = np.stack([predict(flow).limit[0] for flow in flows])
        x = np.tile(v[:, None], (1, TOKENS, 1))
        for flow, J in zip(flows, jacobians(x, stack(flows))):
            found = np.linalg.eigvals(np.reshape(J, (TOKENS * WIDTH, -1)))
            expected = modes(flow, TOKENS)
            assert expected.shape == (TOKENS, WIDTH - 1)
            # and one zero per token: its norm.
            expected = np.concatenate([expected.ravel(), np.zeros(TOKENS)])
            apart = np.abs(found[:, None] - expected)
            assert max(apart.min(axis=0).max(), apart.min(axis=1).max()) < 1e-6
            prediction = predict(flow, tokens=TOKENS)
            assert abs(prediction.rate - np.abs(expected).max()) < 1e-12
            later = modes(flow, TOKENS)[1:]
            assert abs(prediction.disagreement_rate - np.abs(later).max()) < 1e-12
            assert abs(prediction.mean_rate - np.abs(modes(flow, 1)).max()) < 1e-12
            # Over all numbers of tokens the slowest is the limit of many, or few.
            many = [predict(flow, tokens=n).rate for n in (2, 3, 10, 1000)]
            assert max(many) <= predict(flow).rate + 1e-12
            assert predict(flow).rate < max(many) + 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_measured_rates_are_those_predicted(causal):
    # .8000: lambda_1 = .25 and the others below zero, so that disagreement is slowest.
    cases = [([0.25, -0.05], 0.0), ([1.0, -1.5], 0.0), ([-3.0], np.pi), ([3.0, 0.8 + 1j], 0.0)]
    for seed, (values, angle) in enumerate(cases):
        random = np.random.default_rng(seed)
        F = matrix(values, random, rest=(-0.6, -0.1))
        flow = flow_of(F, random, causal=causal)
        v = predict(flow).limit[0]
        found = convergence(flow, start(random, near=2 * v, size=0.5), LAYERS)
        prediction = found.prediction
        assert prediction.regime == Regime.CONSENSUS
        assert (found.signs == 1).all()
        assert 1 - found.cosine < 1e-6
        assert 1 - found.agreement < 1e-6
        assert found.predicted_rate == prediction.rate < 1
        assert abs(found.rate - prediction.rate) < 1e-3
        assert abs(found.mean_rate - prediction.mean_rate) < 1e-3
        assert abs(found.disagreement_rate - prediction.disagreement_rate) < 1e-3
        assert prediction.angle == angle
        assert abs(abs(found.angle) - angle) < 1e-6
        if values[0] == 0.25 and not causal:
            assert abs(found.disagreement_rate - 0.8) < 1e-6
            # And in the run itself: the distance between tokens shrinks by that factor.
            window = found.disagreement[(found.disagreement < 1e-3) & (found.disagreement > 1e-9)]
            assert abs((window[-1] / window[0]) ** (1 / (len(window) - 1)) - 0.8) < 1e-4


def test_consensus_over_many_seeds():
    for values in ([0.25], [1.0, -1.5], [-3.0], [3.0, 0.8 + 1j]):
        for causal in (False, True):
            flows, x0 = runs(values, SEEDS, causal)
            v = np.stack([predict(flow).limit[0] for flow in flows])
            ends, after = run(stack(flows), x0 + 3 * v[:, None])
            here, there = np.einsum("ntd,nd->nt", ends, v), np.einsum("ntd,nd->nt", after, v)
            assert 1 - np.abs(here).min() < 1e-6
            assert np.abs(np.sign(here).sum(axis=1)).min() == TOKENS  # all on one side,
            assert np.abs(there - here * np.sign(1 + values[0])).max() < 1e-6  # or changing it


def test_consensus_from_any_start():
    # Local stability promises nothing here, but with blunt attention it is what happens; and not
    # always with a sharp one, see below.
    for values in ([0.25], [1.0, -1.5], [3.0, 0.8 + 1j]):
        flows, x0 = runs(values, 2 * SEEDS, size=0.3)
        for flow, x in zip(flows, run(stack(flows), x0)[0]):
            along = x @ predict(flow).limit[0]
            assert 1 - np.abs(along).min() < 1e-6
            assert abs(np.sign(along).sum()) == TOKENS


def test_sharp_heads_may_hold_two_groups_elsewhere():
    # Not at an eigenvector of F: the two groups go by I + sum_h gamma^h O^h V^h, with gains that
    # depend on where they are, to a fixed direction or around.
    flows, x0 = runs([-3.0], 2 * SEEDS, size=1.0)
    ends, after = run(stack(flows), x0)
    found = 0
    for flow, x, y in zip(flows, np.asarray(ends), np.asarray(after)):
        signs = np.sign(x @ x[0])
        u = x[0]
        if abs(signs.sum()) == TOKENS or np.abs(signs[:, None] * x - u).max() > 1e-9:
            continue
        found += 1
        kernels = (flow.query, flow.key, flow.value, flow.output)
        query, key, value, output = (np.asarray(kernel[...]) for kernel in kernels)
        sigma = flow.scale[0] * np.einsum("hdk,hek,d,e->h", query, key, u, u)
        share = np.exp(sigma[:, None] * signs) / np.exp(sigma[:, None] * signs).sum(1)[:, None]
        moved = u + np.einsum("h,hdv,hve,d->e", share @ signs, value, output, u)
        np.testing.assert_allclose(moved / np.linalg.norm(moved), y[0], atol=1e-9)
        F = np.asarray(flow.layer_matrix())
        assert np.linalg.norm(F @ u - u * (u @ F @ u)) > 0.1
    assert 0 < found < SEEDS


def test_minus_a_third_reaches_no_consensus():
    # Agreement is unstable although it is the power method's fixed point: |1 + lambda_1| = .7.
    flows, x0 = runs([-0.3], 10, rest=(-0.9, -0.5))
    ends, _ = run(stack(flows), x0)
    for flow, x in zip(flows, ends):
        prediction = predict(flow)
        assert prediction.regime == Regime.NONE
        assert abs(prediction.value + 0.3) < 1e-12
        assert abs(prediction.rate - 1 / 0.7) < 1e-12
        assert prediction.mean_rate < 1
        assert np.linalg.norm(x - x[0], axis=-1).max() > 0.1
    # A single token has nobody to disagree with.
    assert predict(flows[0], tokens=1).regime == Regime.CONSENSUS
    found = convergence(flows[0], x0[0, :1], LAYERS)
    assert 1 - found.cosine < 1e-6
    assert abs(found.rate - found.prediction.rate) < 1e-3
    # A small displacement from agreement grows by that factor.
    v = predict(flows[0]).limit[0]
    x = v + 1e-7 * x0[0]
    after = step(flows[0], step(flows[0], x))

    def apart(x):
        x = np.asarray(x) / np.linalg.norm(x, axis=1, keepdims=True)
        return np.linalg.norm(x - x.mean(axis=0))

    assert abs((apart(after) / apart(x)) ** 0.5 - 1 / 0.7) < 1e-4


def test_few_causal_tokens_may_agree_where_many_cannot():
    # |1 + lambda_1| = .7, and |1 + lambda_k / i| < .7 only up to i = 3 for lambda_k = -1.2.
    random = np.random.default_rng(0)
    flow = flow_of(matrix([-0.3], random, rest=(-1.5, -1.2)), random, causal=True)
    regimes = [predict(flow, tokens=n).regime for n in (1, 2, 3, 4, 6, None)]
    assert regimes == [Regime.CONSENSUS] * 3 + [Regime.NONE] * 3
    v = predict(flow).limit[0]
    found = convergence(flow, start(random, 3, near=v, size=0.1), LAYERS)
    assert 1 - found.cosine < 1e-6
    assert abs(found.rate - predict(flow, tokens=3).rate) < 1e-3


# Rotation.

ROTATING = 1.75 + 1j  # arg(2.75 + i) = .34877


@pytest.mark.parametrize("causal", [False, True])
def test_a_complex_pair_rotates(causal):
    for seed in range(3):
        random = np.random.default_rng(seed)
        flow = flow_of(matrix([ROTATING], random), random, causal=causal)
        prediction = predict(flow, tokens=TOKENS)
        assert prediction.regime == Regime.ROTATION
        assert abs(prediction.angle - 0.34877) < 1e-5
        plane = prediction.limit
        np.testing.assert_allclose(plane @ plane.T, np.eye(2), atol=1e-14)
        F = np.asarray(flow.layer_matrix())
        moved = plane @ F.T
        np.testing.assert_allclose(moved @ plane.T @ plane, moved, atol=1e-12)
        x0 = start(random, near=2 * plane[0], size=0.3)
        found = convergence(flow, x0, LAYERS)
        assert 1 - found.cosine < 1e-6
        assert 1 - found.agreement < 1e-6
        assert abs(found.angle - prediction.angle) < 1e-6
        assert np.abs(found.angles[LAYERS // 2 :] - prediction.angle).max() < 1e-6
        assert abs(found.rate - prediction.rate) < 1e-3
        assert abs(found.mean_rate - prediction.mean_rate) < 1e-3
        assert abs(found.disagreement_rate - prediction.disagreement_rate) < 1e-3
        # In the plane itself the steps are even only after a change of basis: on average, though,
        # the angle is the same.
        z = np.asarray(sv.simulate(flow.repeated(LAYERS), jnp.asarray(x0)).xs)[:, 0] @ plane.T
        turned = np.unwrap(np.arctan2(z[:, 1], z[:, 0]))
        mean = abs(turned[-1] - turned[LAYERS // 2]) / (LAYERS - LAYERS // 2)
        assert abs(mean - prediction.angle) < 1e-2


def test_disagreement_within_the_plane():
    # With no other direction than the plane (full), or where it is slowest (causal), the in-plane
    # mode is seen: below |w|, and Re w on a circle.
    circle = np.array([[1.75, -1.0], [1.0, 1.75]])
    random = np.random.default_rng(0)
    w = 1 / (1 + ROTATING)
    assert abs(predict(flow_of(circle, random)).disagreement_rate - w.real) < 1e-12
    w = (1 + ROTATING / 2) / (1 + ROTATING)
    causal = flow_of(circle, random, causal=True)
    assert abs(predict(causal, tokens=2).disagreement_rate - w.real) < 1e-12
    assert w.real < abs(w) - 1e-3
    for seed in range(3):
        random = np.random.default_rng(seed)
        X = np.diag([1.0, 3.0]) + 0.3 * random.normal(size=(2, 2))
        F = X @ circle @ np.linalg.inv(X)
        for only_past in (False, True):
            flow = flow_of(F, random, causal=only_past)
            near = 2 * np.ones(2)
            found = convergence(flow, start(random, width=2, near=near, size=0.2), LAYERS)
            assert abs(found.disagreement_rate - found.prediction.disagreement_rate) < 1e-3
            assert found.prediction.mean_rate == 0
    # Agreement in a plane may hold even where |1 + lambda_1| < 1.
    held = flow_of(np.array([[-0.6, -0.8], [0.8, -0.6]]), np.random.default_rng(1))
    assert abs(abs(1 + predict(held).value) - 0.8**0.5) < 1e-12
    assert predict(held).regime == Regime.ROTATION
    assert abs(predict(held).rate - 0.5) < 1e-12


# Two groups.

SIGNS = np.array([1.0, -1, 1, 1, -1, 1])


def test_one_head_holds_two_groups():
    for seed in range(3):
        random = np.random.default_rng(seed)
        flow = self_similar(matrix([1.0], random), 4.0)
        prediction = predict(flow)
        assert prediction.regime == Regime.BIPARTITE
        assert prediction.bipartite.rate < 1
        assert np.abs(prediction.bipartite.gain - np.tanh(4.0)).max() < 1e-12
        state = bipartite(flow, SIGNS)
        v = state.vector
        assert abs(abs(v @ prediction.limit[0]) - 1) < 1e-12
        assert state.drift.max() < 1e-7
        np.testing.assert_allclose(step(flow, SIGNS[:, None] * v), SIGNS[:, None] * v, atol=1e-14)
        # and it comes back to them, at the predicted rate.
        found = convergence(flow, SIGNS[:, None] * v + start(random, size=0.02), LAYERS)
        assert np.array_equal(found.signs, SIGNS * SIGNS[0])
        assert 1 - found.cosine < 1e-6
        assert abs(found.predicted_rate - state.rate) < 1e-12
        assert abs(found.rate - found.predicted_rate) < 1e-3


def test_weak_attention_lets_two_groups_go():
    random = np.random.default_rng(0)
    flow = self_similar(matrix([1.0, 0.8], random), 0.1)
    state = bipartite(flow, SIGNS)
    assert state.drift.max() < 1e-7
    assert state.rate > 1
    assert predict(flow).regime == Regime.CONSENSUS
    found = convergence(flow, SIGNS[:, None] * state.vector + start(random, size=1e-3), LAYERS)
    assert (found.signs == 1).all()
    assert 1 - found.cosine < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_four_heads_drift_away_in_one_step(causal):
    flows, _ = runs([1.0], causal=causal)
    states = [bipartite(flow, SIGNS) for flow in flows]
    x = np.stack([SIGNS[:, None] * state.vector for state in states])
    for state, here, after in zip(states, x, steps(stack(flows), x)):
        turned = np.sign(np.sum(here[0] * after[0]))
        after = np.asarray(after) * turned
        apart = 2 * np.arctan2(
            np.linalg.norm(after - here, axis=1), np.linalg.norm(after + here, axis=1)
        )
        np.testing.assert_allclose(state.drift, apart, atol=1e-12)
        assert apart.max() > 1e-2
        assert np.isnan(state.rate)
        assert state.gain.shape == (TOKENS, 4)
    assert predict(flows[0]).bipartite is None


def test_the_modes_of_two_groups():
    jacobian = fast(jax.jacfwd(lambda x, flow: flow.step(0, x)))
    for causal in (False, True):
        random = np.random.default_rng(3)
        F = matrix([1.0, 0.3 + 0.4j], random)
        eye = np.eye(WIDTH)[None]
        flow = PowerFlow(eye, eye, eye, F.T[None], depth=1, causal=causal, scale=1.3)
        for vector in (None, np.linalg.eig(F)[1][:, -1].real):
            state = bipartite(flow, SIGNS, vector)
            J = jacobian(SIGNS[:, None] * state.vector, flow)
            found = np.linalg.eigvals(np.reshape(J, (TOKENS * WIDTH, -1)))
            assert abs(np.abs(found).max() - state.rate) < 1e-9


def test_two_groups_may_stand_where_agreement_does_not():
    # Attention to what is opposite: gamma = tanh(-4), so lambda = -1.5 gives 1 + gamma lambda > 2.
    random = np.random.default_rng(1)
    flow = self_similar(matrix([-1.5, -0.3], random, rest=(-0.9, -0.5)), -4.0)
    prediction = predict(flow)
    assert prediction.rate > 1
    assert prediction.regime == Regime.BIPARTITE
    assert abs(prediction.bipartite.value + 1.5) < 1e-9
    signs = np.array([1.0, -1, 1, -1, 1, -1])
    x = signs[:, None] * prediction.bipartite.vector
    for _ in range(60):
        x = step(flow, x + 1e-3 * random.normal(size=x.shape))
    assert np.min(signs * (x @ prediction.bipartite.vector)) > 0.99
    # A run that ends so is compared with these groups, not with those at v_1.
    x0 = x + 1e-3 * random.normal(size=x.shape)
    found = convergence(flow, 1e3 * x0, LAYERS)
    state = bipartite(flow, signs, prediction.bipartite.vector)
    assert np.array_equal(found.signs, signs)
    assert abs(found.predicted_rate - state.rate) < 1e-9
    assert abs(found.rate - state.rate) < 1e-3
    assert abs(state.rate - 0.714) < 1e-3
    assert found.agreement < 0.9


def test_groups_are_as_equal_as_the_number_of_tokens_allows():
    F = matrix([1.0], np.random.default_rng(0))
    for beta in (0.1, 0.2, 0.3, 1.0, 4.0):
        flow = self_similar(F, beta)
        for tokens in (2, 3, 4, 5, 12, 65):
            found = predict(flow, tokens=tokens)
            signs = np.where(np.arange(tokens) % 2, -1.0, 1.0)
            states = [bipartite(flow, signs, v.real)
                      for value, v in zip(*(part.T for part in np.linalg.eig(F)))
                      if value.imag == 0]  # fmt: skip
            rate = min(state.rate for state in states if state.drift.max() < 1e-6)
            assert abs(found.bipartite.rate - rate) < 1e-9
            assert (found.regime == Regime.BIPARTITE) == (rate < 1)
        assert predict(flow).bipartite.rate == predict(flow, tokens=64).bipartite.rate
    odd = self_similar(F, 0.2)
    assert abs(bipartite(odd, [1, -1, 1]).rate - 1.170) < 1e-3
    assert predict(odd, tokens=3).regime == Regime.CONSENSUS
    # Without other eigenvalues than negative ones, two tokens have no disagreement to slow them.
    quick = self_similar(matrix([1.0], np.random.default_rng(0), rest=(-0.6, -0.2)), 4.0)
    assert predict(quick, tokens=2).bipartite.rate < predict(quick, tokens=4).bipartite.rate - 0.01


# Ties, types, and what is refused.


def test_ties_are_undetermined():
    random = np.random.default_rng(0)
    for values in ([1.0, -3.0], [0.5, 0.5]):
        flow = flow_of(matrix(values, random), random)
        assert predict(flow).regime == Regime.UNDETERMINED
        assert abs(predict(flow).mean_rate - 1) < 1e-6
    nothing = flow_of(np.zeros((WIDTH, WIDTH)), random)
    assert predict(nothing).regime == Regime.NONE
    assert predict(flow_of(-np.eye(WIDTH), random)).regime == Regime.NONE


def test_a_jordan_block_goes_to_its_only_eigenvector_slowly():
    F = np.diag([1.0, 1, 0.2, 0.1]) + np.diag([1.0, 0, 0], 1)
    flow = flow_of(F, np.random.default_rng(0))
    prediction = predict(flow)
    assert prediction.regime == Regime.UNDETERMINED
    x, errors = np.array([0.3, 1.0, 0.5, 0.2]), []
    for layers in (1000, 1000):  # of tokens that agree
        for _ in range(layers):
            x = x + F @ x
            x = x / np.linalg.norm(x)
        errors.append(np.linalg.norm(x - prediction.limit[0] * (x @ prediction.limit[0])))
    assert abs(errors[0] / errors[1] - 2) < 0.02


def test_no_size_over_or_underflows():
    random = np.random.default_rng(0)
    flow = flow_of(matrix([1.0, -1.5], random), random)
    x = start(random, near=2 * predict(flow).limit[0], size=0.5)
    expected = convergence(flow, x, LAYERS)
    for size in (1e200, 1e-200, 1e-310):
        found = convergence(flow, x * size, LAYERS)
        assert abs(found.rate - expected.rate) < 1e-3
        assert 1 - found.cosine < 1e-6
    large = flow_of(matrix([1.0, -1.5], random), random)
    large.output[...] = large.output[...] * 1e200
    assert abs(predict(large).value) > 1e199
    # A layer is F alone, and goes to -1.5; agreement is reached at once.
    found = convergence(large, x, LAYERS)
    assert 1 - found.cosine < 1e-6
    assert abs(found.rate - found.prediction.rate) < 1e-3
    one = self_similar(np.asarray(large.layer_matrix()), 1.0)
    assert bipartite(one, SIGNS, predict(one).limit[0]).drift.max() < 1e-6
    large.value[...] = large.value[...] * 1e200
    with pytest.raises(ValueError, match=r"layer matrix .* overflows"):
        predict(large)


def test_what_a_layer_takes_to_zero_is_named():
    # F = -I: a token that sees itself alone vanishes.
    random = np.random.default_rng(0)
    away = -np.eye(WIDTH)
    eye = np.eye(WIDTH)[None]
    with pytest.raises(ValueError, match="takes token 0 to zero"):
        convergence(PowerFlow(eye, eye, eye, -eye, depth=1, causal=True), start(random), 3)
    alone = self_similar(away, 100.0)  # each group sees itself alone
    for signs in (np.ones(TOKENS), SIGNS):
        with pytest.raises(ValueError, match="to zero, which has no direction"):
            bipartite(alone, signs, np.eye(WIDTH)[0])
    assert predict(alone).regime == Regime.NONE
    assert predict(alone).bipartite is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_only_eigenvectors_hold_two_groups(dtype):
    random = np.random.default_rng(0)
    for size in (1.0, 1e-5):  # what counts is relative to the matrix
        flow = self_similar(matrix([1.0], random, rest=(-0.4, -0.1)), 1.0)
        flow.output[...] = flow.output[...] * size
        flow = jax.tree.map(lambda leaf: leaf.astype(dtype), flow)
        value, output = (np.asarray(a[...], np.float64) for a in (flow.value, flow.output))
        F = np.einsum("hdv,hve->ed", value, output)
        for vector in np.linalg.eig(F)[1].T[:3]:
            v = vector.real.astype(np.float64 if dtype == "float64" else np.float32)
            if not vector.imag.any():
                assert bipartite(flow, SIGNS, v).drift.max() < 1e-3
        for wrong in (np.ones(WIDTH), 1e-2 * np.eye(WIDTH)[0] + predict(flow).limit[0]):
            with pytest.raises(ValueError, match="no eigenvector"):
                bipartite(flow, SIGNS, wrong)


def test_float32_weights():
    random = np.random.default_rng(0)
    flow = flow_of(matrix([1.0, -1.5], random), random)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), flow)
    found = convergence(low, start(random).astype(np.float32), 60)
    assert abs(found.rate - found.prediction.rate) < 1e-3
    assert 1 - found.cosine < 1e-6
    assert found.state.dtype == np.float64
    assert (len(found.error), len(found.angles)) == (61, 60)


def test_wrong_input_is_named():
    random = np.random.default_rng(0)
    F = matrix([1.0], random)
    flow, x = flow_of(F, random), start(random)
    kernels = (flow.query, flow.key, flow.value, flow.output)
    layered = PowerFlow(*(kernel[...][None] for kernel in kernels))
    for call in (predict, lambda f: modes(f, 3), lambda f: bipartite(f, SIGNS)):
        with pytest.raises(ValueError, match="the layers of this PowerFlow differ"):
            call(layered)
        with pytest.raises(ValueError, match="the theory is of a PowerFlow, got int"):
            call(3)
    with pytest.raises(ValueError, match="the layers of this PowerFlow differ"):
        convergence(layered, x, 3)
    one = PowerFlow(*np.ones((4, 1, 1, 1)), depth=1)
    with pytest.raises(ValueError, match="a width of 1"):
        predict(one)
    for tokens in (0, -1, 2.5, "3", True):
        with pytest.raises(ValueError, match="tokens must be a positive integer"):
            predict(flow, tokens=tokens)
        with pytest.raises(ValueError, match="tokens must be a positive integer"):
            modes(flow, tokens)
    with pytest.raises(ValueError, match=r"x0 must have shape \(tokens, 8\), got \(6, 7\)"):
        convergence(flow, x[:, 1:], 3)
    x[2] = 0
    with pytest.raises(ValueError, match=r"x0\[2\] is zero: a token without a direction"):
        convergence(flow, x, 3)
    x[2] = np.inf
    with pytest.raises(ValueError, match="x0 is not finite"):
        convergence(flow, x, 3)
    for layers in (0, 2.5):
        with pytest.raises(ValueError, match="depth, a positive int"):
            convergence(flow, start(random), layers)
    for signs in ([1, 0.5], [], [[1, -1]]):
        with pytest.raises(ValueError, match="signs must be a sequence"):
            bipartite(flow, np.asarray(signs))
    for signs in ([1j, -1], ["1", "-1"]):
        with pytest.raises(ValueError, match="signs must be real numbers"):
            bipartite(flow, signs)
    with pytest.raises(ValueError, match="no eigenvector"):
        bipartite(flow, SIGNS, np.ones(WIDTH))
    with pytest.raises(ValueError, match="8 finite numbers, not all zero"):
        bipartite(flow, SIGNS, np.zeros(WIDTH))
    turning = flow_of(matrix([ROTATING], random), random)
    with pytest.raises(ValueError, match="is complex"):
        bipartite(turning, SIGNS)
    with pytest.raises(ValueError, match="is complex"):
        modes(turning, 3)
