"""Learning programs: what is trained, what is not, and that a run can be repeated and continued."""

import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flows import LinearFlow, fast
from scipy.special import erf
from universal_cases import formula, relative

import svflow as sv
import universal as ut
from universal import evaluation, saved, training
from universal.bounds import random_target
from universal.components import read_columns

RECIPE = ut.Recipe("random", 2, 2, 3, 2, residual=True, norm=True, hidden=7)
TASK = ut.k_hop_task(5, 3, (0, 1))
SETTINGS = ut.Settings(steps=6, batch=7, warmup=1, every=4, validation=14, test=14)
SEEDS = (3, 11)
run = functools.partial(ut.train, RECIPE, TASK, SETTINGS, seeds=SEEDS)


@pytest.fixture(autouse=True, scope="module")
def _compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def whole():
    return run()


def same(a, b):
    a, b = (jax.tree.leaves(tuple(x)[:6]) for x in (a, b))
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def norm(x, gain=1.0, bias=0.0):
    x = x - x.mean(axis=-1, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) + bias


def reference(embedding, flow, ids):
    """The logits in NumPy, layer by layer."""
    x = embedding.tokens[ids] + embedding.positions[: len(ids)]
    one, places = flow.attention, range(flow.depth)
    at = lambda array, *place: np.asarray(array[...])[place]  # noqa: E731
    gain = lambda layer, k: (  # noqa: E731
        () if flow.gain is None else (at(flow.gain, layer, k), at(flow.bias, layer, k))
    )
    for layer in places:
        y = norm(x, *gain(layer, 0)) if flow.norm else x
        arrays = [np.asarray(kernel[...]) for kernel in one.maps[:3]]
        arrays = [array[None] if one.tied else array[layer, None] for array in arrays]
        alone = ut.AttentionTransformer(*arrays, np.eye(flow.width), causal=one.causal)
        after = formula(alone, y)[0][1]
        x = x + after if one.residual else after
        if flow.up is not None:
            x = x + gelu(norm(x, *gain(layer, 1)) @ at(flow.up, layer)) @ at(flow.down, layer)
    last = () if flow.final is None else np.asarray(flow.final[...])
    return (norm(x, *last) if flow.norm else x) @ embedding.unembed


def pick(tree, place):
    return jax.tree.map(lambda leaf: leaf[place], tree)


CASES = {
    "norm": dict(norm=True),
    "all": dict(residual=True, norm=True, hidden=7),
}


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def tables_of(width, vocab=5, tokens=6, classes=3):
    shapes = (vocab, width), (tokens, width), (width, classes)
    return ut.Embedding(*(draw(k, *shape) for k, shape in enumerate(shapes)))


def test_the_machines_are_the_formula():
    # Full machines with gains and biases that are not 1 and 0; and sparse ones.
    pairs, wanted = [], []
    ids = np.asarray([4, 0, 2, 1, 2, 0])
    for options in CASES.values():
        flow = ut.Recipe("full", 2, 2, 3, 2, **options).build(jax.random.key(1))
        leaves, tree = jax.tree.flatten(flow)
        leaves = [leaf + 0.3 * draw(k, *leaf.shape) for k, leaf in enumerate(leaves)]
        flow = jax.tree.unflatten(tree, leaves)
        assert flow.causal
        assert flow.centered == bool(options.get("norm"))
        pairs.append((tables_of(flow.width), flow))
        wanted.append(reference(pairs[-1][0], flow, ids))
    # With LayerNorm, what a looped machine has shifted out does not stay zero.
    for options in (dict(), dict(residual=True, norm=True), dict(routing="looped", norm=True)):
        flow = ut.Recipe("sparse", 3, 2, 2, 2, **options).build(jax.random.key(1))
        assert jax.tree.leaves(flow) == []
        assert read_columns(flow) == (flow.width if options else 2)
        pairs.append((tables_of(flow.width), flow))
        dense = ut.Blocks(flow.attention.dense(), norm=flow.norm)
        wanted.append(reference(pairs[-1][0], dense, ids))
    last = pairs[1][1]  # simulated states are its steps, as of every flow
    x = draw(9, 6, last.width)
    assert last.splitting == (("attention",), ("mlp",))

    @fast
    def all_of(pairs, flow, x):
        found = [ut.logits(*pair, jnp.asarray(ids)) for pair in pairs]
        return found, sv.simulate(flow, x, ts=[2.0]).xs[-1], flow.step(1, flow.step(0, x))

    ours, end, stepped = all_of(pairs, last, x)
    for one, other in zip(ours, wanted):
        assert relative(one, other) < 1e-13
    for a, b in itertools.pairwise(ours):  # every switch does something
        assert relative(a, b) > 1e-2
    assert relative(end, stepped) < 1e-14


@pytest.mark.parametrize(("norm", "least", "most"), [(False, 0, 1e-12), (True, 0.1, 10)])
def test_layer_norm_ends_a_residual_machines_exactness(norm, least, most):
    """A program keeps inner products and not norms: LayerNorm scales the two states differently."""
    sizes = 2, 2, 5, 3, 2
    target = random_target(jax.random.key(0), *sizes, residual=True)
    machine = ut.sparse(*sizes, kind="residual")
    x = draw(0, 7, 5)

    @fast
    def outputs(flows, states):
        ends = [sv.simulate(flow, state).xs[-1] for flow, state in zip(flows, states)]
        return [flow.attention.unembed(flow.read(end)) for flow, end in zip(flows, ends)]

    flows = [ut.Blocks(attention, norm=norm) for attention in (target, machine)]
    theirs, ours = outputs(flows, [x, x @ ut.program(machine, target)])
    assert least <= relative(ours, theirs) <= most


def products(jaxpr):
    """The sizes of the results of all matrix products, in every inner program too."""
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            sizes.append(math.prod(equation.outvars[0].aval.shape))
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, (jax.extend.core.ClosedJaxpr, jax.extend.core.Jaxpr)),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if isinstance(inner, jax.extend.core.Jaxpr):
                sizes += products(inner)
    return sizes


def test_no_gradient_by_frozen_weights_is_computed():
    flow = RECIPE.build(jax.random.key(0))
    width, heads, hidden = flow.width, 2, 7
    tables = ut.Embedding(
        jnp.ones((TASK.vocab, width)), jnp.ones((TASK.tokens, width)), jnp.ones((width, 3))
    )
    batch = TASK.draw(jax.random.key(0), 7)
    # Of values, queries or keys of all heads, and feed-forward weights, in one layer.
    weights = {heads * width * width, width * heads * 3, width * hidden}
    tokens = 7 * TASK.tokens
    assert len({*weights, tokens * hidden, tokens * width, TASK.vocab * width, 3 * width}) == 7
    slope = jax.grad(training.loss_of, has_aux=True)
    found = {}
    for name, trained, frozen in (("frozen", (tables, None), flow), ("full", (tables, flow), None)):
        found[name] = set(products(jax.make_jaxpr(slope)(trained, frozen, batch).jaxpr))
    assert not weights & found["frozen"]
    assert weights <= found["full"]
    assert {TASK.vocab * width, 3 * width} <= found["frozen"]  # of the tables and the output


def test_frozen_weights_stay_and_the_rest_is_trained(whole):
    drawn = training._machines(evaluation.stream_of(SEEDS, evaluation.MACHINE), machine=RECIPE)
    ours, drawn = jax.tree.leaves(whole.flow), jax.tree.leaves(drawn)
    assert len(ours) == len(drawn) == 5
    for a, b in zip(ours, drawn):
        assert np.array_equal(a, b)
        assert not np.array_equal(a[0], a[1])  # each seed has a machine of its own
    first = training._starts(
        evaluation.stream_of(SEEDS, evaluation.START), task=TASK, width=RECIPE.width,
        columns=RECIPE.width, scale=1.0, dtype=whole.embedding.tokens.dtype,
    )  # fmt: skip
    for a, b in zip(first, whole.embedding):
        assert a.shape == b.shape
        assert (np.asarray(a) != np.asarray(b)).mean() > 0.7  # ids that were not drawn stay
    assert whole.losses.shape == (6, 2)
    assert np.array_equal(whole.evaluated, [0, 4, 6])
    assert whole.validation.shape == (3, 2)
    assert (np.diff(whole.losses, axis=1) != 0).all()  # the seeds are different runs


def without(head, name):
    kept = json.loads(str(head))
    del kept[name]
    return np.asarray(json.dumps(kept))


def changed(head, **fields):
    return np.asarray(json.dumps(json.loads(str(head)) | fields))


def test_a_run_repeats_and_a_killed_one_goes_on_to_the_last_bit(whole, tmp_path):
    class Killed(Exception):
        pass

    def until(last):
        def steps(range_):
            started.append(range_.start)
            for step in range_:
                if step == last:
                    raise Killed
                yield step

        return steps

    size = training._update._cache_size()
    out, started = tmp_path / "run.npz", []
    with pytest.raises(Killed):
        run(out=out, progress=until(2))  # before the first evaluation there is nothing
    assert not out.exists()
    with pytest.raises(Killed):
        run(out=out, progress=until(4))
    with np.load(out) as file:
        assert file["losses"].shape == (4, 2)
    again = run(out=out, progress=until(None))
    assert started == [0, 0, 4]
    assert same(again, whole)
    assert training._update._cache_size() == size  # all seeds of all runs are one program
    assert same(run(out=out, progress=until(0)), whole)  # it is done: no step, no test
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    # Other settings, by name; and a file whose arrays do not fit.
    for change, message in (
        (dict(seeds=(3, 12)), r"seeds = \[3, 11\], not \[3, 12\]"),
        (dict(seeds=(3,)), r"seeds = \[3, 11\], not \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            run(out=out, **change)
    other = ut.Recipe("random", 2, 2, 4, 2, residual=True, norm=True, hidden=7)
    with pytest.raises(ValueError, match=r"machine\.head_width = 3, not 4; give a new file"):
        ut.train(other, TASK, SETTINGS, seeds=SEEDS, out=out)
    with np.load(out) as file:
        arrays = dict(file)
    for change, message in (
        ({"leaf 0": arrays["leaf 0"][:, 1:]}, r"another shape: leaf 0 is \(\(2, 4, "),
        (dict(losses=arrays["losses"][:, :1]), r"another shape: losses is \(\(6, 1\)"),
        (dict(validation=arrays["validation"][1:]), r"another shape: validation is \(\(2, 2\)"),
        (dict(losses=arrays["losses"][:5]), "its last evaluation is not of its last step"),
        (dict(run=np.asarray('"text"')), "holds no run"),
        (dict(run=np.asarray('{"settings": 1}')), "holds no run"),
        (dict(run=without(arrays["run"], "test")), "holds no run: KeyError"),
        (dict(run=without(arrays["run"], "seconds")), "holds no run: KeyError"),
        (
            dict(run=changed(arrays["run"], test=[[1, 2, 2, 2, 2, 1]])),
            "is not of shares of 2 progr",
        ),
        (dict(run=changed(arrays["run"], test=[[1, 0, 2, 2, 2, 1]] * 2)), "holds no run: ZeroDiv"),
        (dict(run=changed(arrays["run"], test=[[3, 2, 2, 2, 2, 1]] * 2)), "is not of shares of 2"),
    ):
        np.savez(out, **arrays | change)
        with pytest.raises(ValueError, match=message):
            run(out=out)
    np.savez(out, **{name: array for name, array in arrays.items() if name != "evaluated"})
    with pytest.raises(ValueError, match="another shape: evaluated is None"):
        run(out=out)
    out.write_bytes(b"no file")
    with pytest.raises(ValueError, match="holds no run"):
        run(out=out)
    with pytest.raises(ValueError, match="is a folder, not a file"):
        run(out=tmp_path)


def test_steps_go_together_as_far_as_evaluations_allow():
    for steps, every, together in ((4000, 200, 20), (6, 4, 2), (97, 97, 1), (100, 30, 10)):
        assert ut.Settings(steps=steps, every=every, warmup=0).together == together


def test_no_evaluation_is_lost_by_steps_that_go_together():
    random = np.random.default_rng(0)
    for steps, every in random.integers(1, 300, (200, 2)):
        together = ut.Settings(steps=steps, every=every, warmup=0).together
        done = np.arange(together, steps + together, together)
        assert done[-1] == steps
        assert {*range(every, steps, every)} <= {*done.tolist()}


def test_an_accuracy_counts_fresh_sequences(whole):
    found, answers = [0, 0, 0, 0], np.zeros(3, int)
    embedding, flow = pick((whole.embedding, whole.flow), 1)
    for number in range(2):
        key = evaluation.stream_of(SEEDS, evaluation.TEST, 0, number)[1]
        ids, labels, mask = TASK.draw(key, 7)
        each = fast(jax.vmap(ut.logits, in_axes=(None, None, 0)))(embedding, flow, ids)
        right = (np.argmax(np.asarray(each), axis=-1) == np.asarray(labels)) & np.asarray(mask)
        asked = np.asarray(mask).sum(axis=1)
        answers += np.bincount(np.asarray(labels)[np.asarray(mask)], minlength=3)
        counts = right.sum(), asked.sum(), (asked > 0).sum(), (asked**2).sum()
        found = [a + int(b) for a, b in zip(found, counts)]
    assert (*found, 14, np.max(answers)) == tuple(whole.test[1])
    assert whole.test[1].guess == np.max(answers) / found[1]
    assert whole.test[1].value == found[0] / found[1]
    assert not whole.test[1].claim
    assert ut.Accuracy(9000, 10_000, 10_000, 10_000, 10_000, 5000).claim
    # The same again, and of the first program alone on another's sequences.
    assert ut.evaluate(whole, TASK, sequences=14, batch=7) == whole.test
    other = ut.evaluate(whole, ut.k_hop_task(4, 3, (1, 1)), sequences=8, seeds=(4, 5))
    assert [one.sequences for one in other] == [8, 8]
    # Streams of training, evaluations and test, their steps and batches: all keys are different.
    names = "TRAIN", "VALIDATION", "TEST", "START", "MACHINE"
    streams = [getattr(evaluation, name) for name in names]
    keys = [
        np.asarray(jax.random.key_data(evaluation.stream_of((0, 1), stream, step, number))).tolist()
        for stream in streams
        for step in (0, 1, 2)
        for number in (0, 1)
    ]
    assert len({tuple(key) for pair in keys for key in pair}) == 60


@functools.cache
def pairs(letters, *, padding=None, width=2):
    """Two letters, and zeros up to a width; right is the first letter's parity."""

    def draw(key, batch):
        ids = jax.random.randint(key, (batch, 2), 1, letters, jnp.int32)
        mask = jnp.arange(width) == jax.random.randint(key, (batch, 1), 0, 2)
        ids = jnp.pad(ids, ((0, 0), (0, width - 2)))
        return ut.Batch(ids, ids % 2, mask)

    return ut.Task(f"pairs({letters})", draw, letters, width, 2, padding)


def test_unseen_sequences_are_those_that_no_batch_of_training_had():
    task = pairs(12)  # 121 strings, of which 120 draws have about 75
    settings = ut.Settings(steps=12, batch=10, warmup=0, every=6, validation=8, test=8,
                           stop_at=None)  # fmt: skip
    flow = LinearFlow(draw(1, 1, 4, 4))
    learnt = ut.train(flow, task, settings, seeds=(3, 11))
    found = ut.evaluate(learnt, task, sequences=20, batch=6, unseen=True)
    plain = ut.evaluate(learnt, task, sequences=20, batch=6)
    assert [one.draws for one in plain] == [24, 24]
    number = found[0].draws // 6
    kept = []
    for place, seed in enumerate((3, 11)):
        old = set()
        for step in range(12):
            key = evaluation.stream_of((3, 11), evaluation.TRAIN, step)[place]
            old |= {tuple(row) for row in np.asarray(task.draw(key, 10).ids).tolist()}
        assert len(evaluation.drawn(task, seed, 12, 10)) == len(old) < 121
        embedding, _ = learnt.program(place)
        right, answers = 0, []
        for batch in range(number):
            key = evaluation.stream_of((seed,), evaluation.TEST, 0, batch)[0]
            ids, labels, mask = map(np.asarray, task.draw(key, 6))
            scores = np.asarray(jax.vmap(ut.logits, in_axes=(None, None, 0))(embedding, flow, ids))
            new = np.asarray([tuple(row) not in old for row in ids.tolist()])[:, None] & mask
            right += int((scores.argmax(axis=-1) == labels)[new].sum())
            answers += labels[new].tolist()
            kept.append((batch, len(answers)))
        count, most = len(answers), max(map(answers.count, (0, 1)))
        assert tuple(found[place]) == (right, count, count, count, 6 * number, most)
    # Batches go on until both programs have enough.
    assert min(count for batch, count in kept if batch == number - 1) >= 20
    assert min(count for batch, count in kept if batch == number - 2) < 20
    # Of few strings all were drawn. Another task's strings are compared without what fills them.
    with pytest.raises(ValueError, match=r"pairs\(3\): of 402 draws 0 are .* seed 3 has not drawn"):
        ut.evaluate(ut.train(flow, pairs(3), settings, seeds=(3, 11)), pairs(3), sequences=4,
                    batch=3, unseen=True)  # fmt: skip
    padded, longer = pairs(3, padding=0), pairs(3, padding=0, width=5)
    old = evaluation.drawn(padded, 3, 12, 10)
    rows = np.asarray(longer.draw(jax.random.key(0), 30).ids)
    assert set(evaluation.digests(rows, longer)) == old
    assert not set(evaluation.digests(rows, pairs(3, width=5))) & old


def look(embedding, flow, key):
    """Loss, share of right answers, and answers of each sequence, of a batch of 7, in NumPy."""
    ids, labels, mask = map(np.asarray, TASK.draw(key, 7))
    found = np.stack([reference(embedding, flow, row) for row in ids])
    log = found - np.log(np.exp(found).sum(axis=-1, keepdims=True))
    mean = -np.take_along_axis(log[mask], labels[mask][:, None], -1).mean()
    return mean, (found.argmax(axis=-1) == labels)[mask].mean(), mask.sum(axis=1)


def test_training_and_validation_draw_from_streams_of_their_own(whole):
    """Their first numbers, again in NumPy: the mean is over tokens that are asked for."""
    first = training._starts(
        evaluation.stream_of(SEEDS, evaluation.START), task=TASK, width=RECIPE.width,
        columns=RECIPE.width, scale=1.0, dtype=whole.embedding.tokens.dtype,
    )  # fmt: skip
    counts = []
    for place in range(2):
        embedding, flow = pick((first, whole.flow), place)
        embedding = ut.Embedding(*map(np.asarray, embedding))
        value, *_ = look(embedding, flow, evaluation.stream_of(SEEDS, evaluation.TRAIN, 0)[place])
        np.testing.assert_allclose(whole.losses[0, place], value, rtol=1e-13)
        batches = [
            look(embedding, flow, evaluation.stream_of(SEEDS, evaluation.VALIDATION, 0, n)[place])
            for n in range(2)
        ]
        _, shares, answers = zip(*batches)
        share = np.average(shares, weights=np.sum(answers, axis=1))
        np.testing.assert_allclose(whole.validation[0, place], share, rtol=1e-14)
        counts += answers
    assert any(np.ptp(count) for count in counts)  # sequences ask for different numbers of tokens


def test_the_optimiser_is_adamw_with_a_clip_a_warm_up_and_a_cosine():
    settings = ut.Settings(
        steps=8, batch=1, learning_rate=0.3, warmup=3, weight_decay=0.05, clip=2.0, every=1
    )
    x, first, second = np.asarray([1.0, -2.0, 0.5]), np.zeros(3), np.zeros(3)
    ours, state = jnp.asarray(x), settings.optimizer.init(jnp.asarray(x))
    sizes = []
    for step in range(8):
        g = draw(step, 3) * (4.0 if step % 2 else 0.5)
        sizes.append(np.linalg.norm(g))
        with jax.numpy_dtype_promotion("standard"):
            update, state = settings.optimizer.update(jnp.asarray(g), state, ours)
        ours = ours + update
        g = g * min(1.0, 2.0 / sizes[-1])
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        rate = 0.3 * (step / 3 if step < 3 else 0.5 + 0.5 * np.cos(np.pi * (step - 3) / 5))
        whole = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        x = x - rate * (whole[0] / (np.sqrt(whole[1]) + 1e-8) + 0.05 * x)
        np.testing.assert_allclose(ours, x, rtol=3 * EPS)  # optax's schedule is of float32
    assert min(sizes) < 2 < max(sizes)


def test_an_accuracy_counts_more_than_int32_holds():
    def draw(key, batch):
        ids = jnp.zeros((batch, 50_000), jnp.int32)
        return ut.Batch(ids, ids, jnp.ones(ids.shape, bool))

    long = ut.Task("long", draw, 2, 50_000, 2)
    tables = ut.Embedding(np.ones((1, 2, 2)), np.zeros((1, 50_000, 2)), np.eye(2)[None])
    found = evaluation.accuracies(
        tables, LINEAR, long, (0,), 2, batch=2, stream=evaluation.TEST, axis=None
    )
    assert found == (ut.Accuracy(100_000, 100_000, 2, 2 * 50_000**2, 2, 100_000),)


def test_an_interval_counts_sequences_by_their_weight():
    alike = ut.Accuracy(2700, 3000, 1000, 9 * 1000, 1000, 2000)
    assert alike.interval == ut.wilson(0.9, 1000)
    # 50 sequences with 100 answers, 50 with one, each right or wrong as a whole: 95 % of intervals
    # hold .9, by simulation within three standard errors of 2000 draws.
    random = np.random.default_rng(0)
    sizes = np.repeat([100, 1], 50)
    held = 0
    for _ in range(2000):
        right = int(sizes[random.uniform(size=100) < 0.9].sum())
        one = ut.Accuracy(right, int(sizes.sum()), 100, int((sizes**2).sum()), 100, 0)
        held += one.interval[0] <= 0.9 <= one.interval[1]
    assert abs(held / 2000 - 0.95) < 0.03  # and Wilson's own error at 52 trials


def test_wilson_is_the_interval_of_the_score():
    for right, trials in ((0, 10), (3, 10), (10, 10), (9_990, 10_000)):
        share = right / trials
        low, high = ut.wilson(share, trials)
        for end in (low, high):  # its ends are z standard deviations away, by their own variance
            if 1e-12 < end < 1 - 1e-12:
                assert abs(abs(share - end) / (end * (1 - end) / trials) ** 0.5 - 1.959964) < 1e-9
        assert low - 1e-12 <= share <= high + 1e-12
        assert 0 <= low < high <= 1


EPS = float(np.finfo(np.float32).eps)
LINEAR = LinearFlow(np.eye(2)[None])
TABLES = ut.Embedding(np.zeros((2, 2)), np.zeros((1, 2)), np.zeros((2, 2)))
SHORT = ut.Settings(
    steps=4, batch=4, warmup=0, every=2, validation=4, test=4, learning_rate=0.25, stop_at=None
)
QUICK = ut.Settings(steps=60, batch=4, warmup=0, every=4, validation=8, test=8, learning_rate=0.2)


@functools.cache
def custom(name, *, label=0, id_=0, asked=True, kind=jnp.int32):
    """Sequences of one token whose label is its id, but for what is asked of."""

    def draw(key, batch):
        ids = jax.random.randint(key, (batch, 1), 0, 2, jnp.int32)
        return ut.Batch(ids + id_, (ids + label).astype(kind), jnp.full((batch, 1), asked))

    return ut.Task(name, draw, 2, 1, 2)


def test_any_flow_serves_and_what_is_solved_stops():
    # The start is all that a linear flow needs. A frozen flow is shared by the seeds.
    found = ut.train(LINEAR, custom("copy"), QUICK, seeds=(0, 1, 2))
    assert len(found.losses) < 60
    assert len(found.losses) % 4 == 0
    assert (found.validation[-2:] == 1).all()
    assert (found.validation[-3] < 1).any() or len(found.validation) == 2
    assert np.array_equal(found.flow.matrices[...], LINEAR.matrices[...])
    assert found.settings["machine"]["type"] == "LinearFlow"
    assert all(one.value == 1 for one in found.test)


def test_each_seed_may_have_a_flow_of_its_own(tmp_path):
    flows = [LinearFlow(draw(seed, 2, 2, 2)) for seed in range(2)]
    task, out = custom("copy"), tmp_path / "run.npz"
    found = ut.train(flows, task, SHORT, seeds=(7, 8), out=out)
    assert not found.shared
    assert same(ut.train(tuple(flows), task, SHORT, seeds=(7, 8), out=out), found)
    for place, seed in enumerate((7, 8)):
        alone = ut.train(flows[place], task, SHORT, seeds=(seed,))
        np.testing.assert_allclose(alone.losses[:, 0], found.losses[:, place], rtol=1e-12)
        assert alone.test[0] == found.test[place]
        _, flow = found.program(place)
        assert np.array_equal(flow.matrices[...], flows[place].matrices[...])
    assert ut.evaluate(found, task, sequences=4, batch=4) == found.test
    with pytest.raises(ValueError, match=r"made with machine\.flows = "):
        ut.train(flows[::-1], task, SHORT, seeds=(7, 8), out=out)
    with pytest.raises(ValueError, match="2 flows for 1 seeds"):
        ut.train(flows, task, SHORT)
    for other in (LinearFlow(draw(0, 1, 2, 2)), LinearFlow(draw(0, 2, 2, 2).astype("float32"))):
        with pytest.raises(ValueError, match="differ in more than the values of their arrays"):
            ut.train([flows[0], other], task, SHORT, seeds=(7, 8))
    for wrong in ([], [flows[0], RECIPE]):
        with pytest.raises(
            ValueError, match=r"0 flows for 2|must be a Recipe, several flows or an"
        ):
            ut.train(wrong, task, SHORT, seeds=(7, 8))


def test_a_narrow_flow_is_continued(tmp_path):
    """Of bfloat16; its tables are of float32, as small steps would be rounded away."""
    flow = LinearFlow(jnp.eye(2, dtype=jnp.bfloat16)[None])
    whole = ut.train(flow, custom("copy"), SHORT)

    def one(range_):
        for step in range_:
            if step:
                raise KeyboardInterrupt
            yield step

    out = tmp_path / "run.npz"
    with pytest.raises(KeyboardInterrupt):
        ut.train(flow, custom("copy"), SHORT, out=out, progress=one)
    for _ in range(2):  # what was left, and then nothing
        found = ut.train(flow, custom("copy"), SHORT, out=out)
        assert same(found, whole)
        assert found.losses.dtype == found.embedding.tokens.dtype == jnp.float32
    assert found.settings["dtype"] == "bfloat16"
    assert found.flow.matrices[...].dtype == jnp.bfloat16
    state = ut.logits(pick(found.embedding, 0), flow, jnp.zeros(1, jnp.int32))
    assert state.dtype == jnp.float32
    # A step of 1e-3 of an entry is kept.
    small = ut.Settings(steps=1, batch=4, warmup=0, every=1, validation=4, test=4,
                        learning_rate=1e-4, weight_decay=0.0)  # fmt: skip
    one, other = (
        ut.train(flow, custom("copy"), dataclasses.replace(small, learning_rate=rate)).embedding
        for rate in (1e-4, 2e-4)
    )
    assert (one.tokens != other.tokens).all()


@dataclasses.dataclass(frozen=True, eq=False)
class Holder:
    array: object


class Plain:
    def __init__(self, number):
        self.number = number

    def values(self):
        return self.number


def adds(number):
    return lambda x: x + number


def test_a_flow_is_told_from_another_by_what_is_static(tmp_path):
    """Routings and switches are no arrays: machines without any would all be the same."""
    recipe = ut.Recipe("sparse", 2, 1, 2, 2)
    others = [
        ut.Recipe("sparse", 2, 1, 2, 2, **change)
        for change in (
            dict(causal=False),
            dict(residual=True),
            dict(norm=True),
            dict(routing="single"),
        )
    ]
    flow, *flows = (one.build(jax.random.key(0)) for one in (recipe, *others))
    assert jax.tree.leaves(flow) == []
    assert {one.width for one in (flow, *flows)} == {10}
    digests = [saved.digest(one) for one in (flow, *flows, recipe.build(jax.random.key(1)))]
    assert digests[0] == digests[-1]
    assert len({one["static"] for one in digests}) == 5
    # No address and no hash, which differ from process to process.
    kept = [object(), object()]
    assert saved._static(kept[0]) == saved._static(kept[1])
    routing = flow.attention.value
    text = saved._static(jax.tree.structure(flow))
    assert routing.sources.tobytes().hex() in text
    assert str(hash(routing)) not in text
    for one, other in (
        (frozenset("abcdef"), frozenset("abcdeg")),
        (Holder(np.arange(2000.0)), Holder(np.arange(2000.0) + (np.arange(2000) == 1000))),
        (Holder(jnp.arange(3)), Holder(jnp.arange(4))),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x + 1, lambda x: x - 1),
        (adds(1), adds(2)),
        (functools.partial(adds, 1), functools.partial(adds, 2)),
        (Plain(1).values, Plain(2).values),
        (np.asarray([{"a"}], object), np.asarray([{"b"}], object)),
    ):
        assert saved._static(one) != saved._static(other)
    assert saved._static(adds(1)) == saved._static(adds(1))
    endless = Plain(1)
    endless.itself = endless
    assert "above" in saved._static(endless)
    # The order of a set of strings is another in every process.
    text = 'print(saved._static((frozenset("abcdefgh"), lambda x: x in {"a", "b", "c"})))'
    said = {
        subprocess.run(
            [sys.executable, "-c", f"from universal import saved; {text}"],
            env=os.environ | dict(PYTHONHASHSEED=str(seed), JAX_PLATFORMS="cpu"),
            capture_output=True, check=True, text=True,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1
    task, out = ut.dyck1_task(2), tmp_path / "run.npz"
    ut.train(flow, task, SHORT, out=out)
    with pytest.raises(ValueError, match=r"made with machine\.static = "):
        ut.train(flows[0], task, SHORT, out=out)


def test_numpy_numbers_are_numbers(tmp_path):
    """They go into a file's JSON."""
    given = {
        name: np.asarray(value)[()] for name, value in asdict(SHORT).items() if value is not None
    }
    settings = ut.Settings(**given)
    assert settings.learning_rate == 0.25
    assert settings == ut.Settings(**given | dict(learning_rate=np.float32(0.25)))
    assert json.dumps(asdict(settings)) == json.dumps(asdict(SHORT) | dict(stop_at=1.0))
    # A flow's sizes may be NumPy's.
    flow = LinearFlow(np.eye(2)[None])
    flow.depth = np.int64(1)
    assert '"depth": 1' in json.dumps(saved.digest(flow))
    recipe = ut.Recipe("sparse", *map(np.int64, (2, 1, 2, 2)), norm=np.bool_(True))
    assert json.dumps(asdict(recipe)) == json.dumps(
        asdict(ut.Recipe("sparse", 2, 1, 2, 2, norm=True))
    )


def test_what_goes_wrong_says_so(tmp_path, whole):
    for task, message in (
        (custom("none", asked=False), "none asks for no token: all masks are empty"),
        (custom("ids", id_=1), r"ids draws ids that are not within 0 \.\. 1"),
        (custom("labels", label=-1), r"labels draws labels that are not within 0 \.\. 1"),
        (custom("long")._replace(tokens=3), r"long draws ids, labels and a mask of \[\(2, 1\)"),
        (custom("list")._replace(symbols=["a", "b"]), "list has a field that cannot be hashed"),
        (custom("float", asked=1.0), "float draws mask of float64, not of bool"),
        (custom("counts", asked=2), "counts draws mask of int64, not of bool"),
        (custom("half", kind=jnp.float32), "half draws labels of float32, not of integer"),
        (custom("two")._replace(vocab=2.0), r"two: vocab must be a positive integer, got 2\.0"),
        (custom("none")._replace(classes=0), "none: classes must be a positive integer, got 0"),
        (custom("what")._replace(draw=None), "what: draw must be a function"),
        (custom("bytes")._replace(name=b"x"), "name must be a str, got b'x'"),
        (
            custom("tuple")._replace(draw=lambda key, batch: (jnp.zeros((batch, 1)),) * 3),
            "tuple draws a tuple, not a Batch",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ut.train(LINEAR, task, QUICK)
    wild = ut.Settings(steps=8, batch=4, warmup=0, every=4, validation=8, learning_rate=1e300)
    out = tmp_path / "wild.npz"
    with pytest.raises(FloatingPointError, match=r"step [0-3], seed 5: the loss is not finite"):
        ut.train(LINEAR, custom("copy"), wild, seeds=(5,), out=out)
    assert not out.exists()
    last = ut.Settings(steps=1, batch=4, warmup=0, every=1, validation=8, test=8,
                       learning_rate=1.7e308, weight_decay=9.0)  # fmt: skip
    with pytest.raises(FloatingPointError, match="step 0, seed 5: weights are not finite after it"):
        ut.train(LINEAR, custom("copy"), last, seeds=(5,), out=out)
    assert not out.exists()
    nowhere = LinearFlow(np.full((1, 2, 2), np.nan))
    with pytest.raises(FloatingPointError, match="seed 5: answers are not finite"):
        ut.train(nowhere, custom("copy"), last, seeds=(5,))
    with pytest.raises(ValueError, match="progress ended before step 4; evaluated last at 2"):
        ut.train(LINEAR, custom("copy"), SHORT, out=out, progress=lambda steps: steps[:1])
    assert same(ut.train(LINEAR, custom("copy"), SHORT, out=out),
                ut.train(LINEAR, custom("copy"), SHORT))  # fmt: skip
    damaged = bytearray(out.read_bytes())
    damaged[damaged.index(b"PK\x01\x02") + 8] |= 1  # its first member says that it is encrypted
    out.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"holds no run: .*encrypted"):
        ut.train(LINEAR, custom("copy"), SHORT, out=out)
    count = np.zeros((2, 1, 2, 3), int)
    count[..., 0] = [[[3, 3]], [[3, 0]]]
    pending = list(zip(np.ones((2, 1, 2)), count))
    with pytest.raises(ValueError, match=r"step 11, seed 8: no token .* its mask is empty"):
        training._losses(pending, 10, (7, 8), TASK)
    for call, message in (
        (
            lambda: ut.train(object(), TASK),
            "machine must be a Recipe, several flows or an svflow.Flow",
        ),
        (lambda: ut.train(RECIPE, "dyck1"), "task must be a Task, such as dyck1_task"),
        (lambda: ut.train(RECIPE, TASK, {}), "settings must be Settings, got dict"),
        (lambda: ut.train(RECIPE, TASK, seeds=()), "seeds must be different integers"),
        (lambda: ut.train(RECIPE, TASK, seeds=(1, 1)), "seeds must be different integers"),
        (lambda: ut.train(RECIPE, TASK, seeds=(-1,)), "seeds must be different integers"),
        (lambda: ut.train(RECIPE, TASK, seeds=3), "seeds must be different integers.*got 3"),
        (lambda: ut.train(RECIPE, TASK, seeds=(True,)), "seeds must be different integers"),
        (lambda: ut.train(RECIPE, TASK, seeds=jnp.zeros(2)), "seeds must be different integers"),
        (lambda: ut.train(RECIPE, TASK, seeds=np.int64(3)), "seeds must be different integers"),
        (lambda: ut.solved(TABLES, TASK), "learnt must be what train returns, got Embedding"),
        (lambda: ut.solved(whole, ut.k_hop_task(6, 3)), r"needs 20 ids, but the tables have"),
        (lambda: ut.evaluate(TABLES, TASK), "learnt must be what train returns, got Embedding"),
        (lambda: ut.evaluate(whole, "dyck1"), "task must be a Task"),
        (lambda: ut.evaluate(whole, TASK, seeds=(0,)), "1 seeds for 2 programs"),
        (lambda: ut.evaluate(whole, TASK, seeds=(-1, 1)), "seeds must be different integers"),
        (lambda: ut.evaluate(whole, TASK, sequences=0), "sequences must be a pos"),
        (lambda: ut.evaluate(whole, TASK, batch=0), "batch must be a positive"),
        (lambda: ut.evaluate(whole, ut.k_hop_task(6, 3)), r"needs 20 ids, but the tables have"),
        (
            lambda: ut.logits(TABLES, LINEAR, jnp.zeros(2, jnp.int32)),
            "2 ids, but the tables have 1",
        ),
        (lambda: ut.wilson(0.5, 0), "trials must be a positive integer, got 0"),
        (lambda: ut.wilson(1.5, 9), r"share must be within 0 \.\. 1, got 1\.5"),
        (lambda: ut.Settings(learning_rate="a"), "learning_rate must be positive.*got 'a'"),
        (lambda: ut.Settings(clip=True), "clip must be positive and finite, got True"),
        (lambda: ut.Settings(warmup=0.5), "warmup must be a positive integer, got 0.5"),
        (lambda: ut.Recipe("sparse", 1, 1, 1, 1, norm="no"), "norm must be True or False"),
        (lambda: ut.Settings(steps=0), "steps must be a positive integer, got 0"),
        (lambda: ut.Settings(steps=5, warmup=5), r"warmup must be within 0 \.\. 4, got 5"),
        (lambda: ut.Settings(learning_rate=math.nan), "learning_rate must be positive"),
        (lambda: ut.Settings(weight_decay=-1.0), "weight_decay must not be negative"),
        (lambda: ut.Settings(stop_at=1.5), r"stop_at must be within \(0, 1\]"),
        (lambda: ut.Recipe("dense", 1, 1, 1, 1), "kind must be one of 'sparse', 'random', 'full'"),
        (
            lambda: ut.Recipe("sparse", 1, 1, 1, 1, routing="flat"),
            "routing must be one of 'single'",
        ),
        (lambda: ut.Recipe("sparse", 1, 1, 1, 1, routing="residual"), "needs residual=True"),
        (lambda: ut.Recipe("sparse", 1, 1, 1, 1, hidden=4), "feed-forward layers need a residual"),
        (lambda: ut.Recipe("sparse", 0, 1, 1, 1), "layers must be a positive integer"),
        (lambda: ut.Recipe("sparse", 2, 2, 1, 1, routing="single"), "has one head, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    flow = ut.sparse(2, 1, 1, 1, 1)
    for arrays, message in (
        (dict(up=jnp.ones((2, 5, 3))), "needs both up and down"),
        (dict(gain=jnp.ones((2, 1, 5))), "norm is False"),
        (dict(norm=True, gain=jnp.ones((1, 5))), r"gain must have shape \(2, 1, 5\), got \(1, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ut.Blocks(flow, **arrays)
