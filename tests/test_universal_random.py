"""Random machines: universal from their least width on, better conditioned above it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flows import fast
from universal_cases import formula, relative, target, tokens

import universal as ut
from universal.random_machine import KINDS, LAWS

SIZES = (2, 2, 3, 2, 2)
SEEDS = 100


@functools.cache
def maker(sizes, items):
    return fast(lambda key: ut.random(key, *sizes, **dict(items)))


def machine(seed, slack=1.25, sizes=SIZES, **options):
    return maker(sizes, (("slack", slack), *options.items()))(jax.random.key(seed))


def error(found, wanted, x):
    """Of the output, in NumPy."""
    E = np.asarray(found.program)
    return lambda m: relative(formula(m, x @ E)[2], formula(wanted, x)[2])


def test_a_hundred_machines_simulate_a_hundred_targets():
    least = ut.machine_width(2, 2, 2, 2)
    keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
    all_machines = fast(jax.vmap(lambda key: ut.random(key, *SIZES)))(keys)
    machines = [
        jax.tree.map(lambda leaf, n=n: np.asarray(leaf)[n], all_machines) for n in range(SEEDS)
    ]
    targets = [target(seed, SIZES) for seed in range(SEEDS)]
    solved = [ut.solve(m, t) for m, t in zip(machines, targets)]
    assert all(m.width == -(-5 * least // 4) for m in machines)
    assert all(s.rank == s.equations == least for s in solved)
    x = [tokens(seed, 6, 3) for seed in range(SEEDS)]
    starts = np.stack([x @ np.asarray(s.program) for x, s in zip(x, solved)])
    found = fast(jax.vmap(ut.run))(all_machines, starts)
    theirs = [formula(t, x)[2] for t, x in zip(targets, x)]
    errors = [relative(a, b) for a, b in zip(found, theirs)]
    print(
        f"m = ceil(1.25 N) = {machines[0].width}: the largest of {SEEDS} errors {max(errors):.1e}"
    )
    assert max(errors) < 1e-9
    assert max(s.residual for s in solved) < 1e-11
    conditions = [s.condition for s in solved]
    assert min(conditions) > 1
    assert max(conditions) < 1e4
    # In float32 with E from float64.
    for n, m in enumerate(machines):
        narrow = jax.tree.map(lambda leaf: leaf.astype(np.float32), m)
        output = formula(narrow, starts[n].astype(np.float32))[2]
        assert output.dtype == np.float32
        assert relative(output, theirs[n]) < 1e-4


def test_one_column_too_few_fails():
    least, x = ut.machine_width(2, 2, 2, 2), tokens(1, 6, 3)
    errors, at_least = [], []
    for seed in range(20):
        wanted = target(seed, SIZES)
        narrow = machine(seed, (least - 1) / least)
        assert narrow.width == least - 1
        found = ut.solve(narrow, wanted)
        assert found.rank == least - 1
        assert found.residual > 1e-3
        errors.append(error(found, wanted, x)(narrow))
        exact = machine(seed, 1)
        assert exact.width == least
        at_least.append(error(ut.solve(exact, wanted), wanted, x)(exact))
    print(f"m = N - 1: errors {min(errors):.1e} to {max(errors):.1e}; m = N: {max(at_least):.1e}")
    assert min(errors) > 1e-4
    assert np.median(errors) > 1e-2
    assert max(at_least) < 1e-8
    with pytest.warns(
        UserWarning, match=r"residual is .*of its 32 equations 31 .*takes 32 columns"
    ):
        ut.program(narrow, wanted)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_law(kind, law):
    wanted = target(3, SIZES, residual=kind == "residual", causal=True, scale=0.3)
    found = machine(4, 1.25, kind=kind, law=law, causal=True)
    assert found.tied == (kind == "looped")
    assert found.width == -(-5 * ut.machine_width(2, 2, 2, 2, kind) // 4)
    # Columns of mean square length 1, whatever the law.
    for kernel in (found.query, found.key, found.value, found.unembedding):
        lengths = np.sum(np.asarray(kernel[...]) ** 2, axis=-2)
        assert abs(lengths.mean() - 1) < (1e-12 if law == "orthogonal" else 0.4)
    if law == "orthogonal":
        square = np.asarray(found.value[...])
        product = square @ square.swapaxes(-1, -2)
        np.testing.assert_allclose(
            product, np.broadcast_to(np.eye(found.width), product.shape), atol=1e-13
        )
    if law == "uniform":
        assert np.abs(found.value[...]).max() <= (3 / found.width) ** 0.5
    solved = ut.solve(found, wanted)
    assert error(solved, wanted, tokens(1, 6, 3))(found) < 1e-11


def test_a_looped_machine_simulates_tied_targets_too():
    wanted, found = target(3, SIZES, tied=True), machine(4, 1.25, kind="looped")
    assert error(ut.solve(found, wanted), wanted, tokens(1, 6, 3))(found) < 1e-11


def test_ill_conditioned_programs_are_reported():
    # A row scaled down to 1e-13: the width counts, but hardly.
    wanted, found = target(3, SIZES), machine(4, 1)
    arrays = [np.array(kernel[...]) for kernel in found.maps]
    for array in arrays:
        array[..., 0, :] *= 1e-13
    weak = ut.AttentionTransformer(*arrays)
    assert ut.solve(weak, wanted).condition > 1e12
    with pytest.warns(UserWarning, match=r"ill conditioned: condition number \d\.\de\+1"):
        ut.program(weak, wanted)


def test_a_dense_sparse_machine_has_the_routed_program():
    wanted, routed = target(3, SIZES), ut.sparse(*SIZES)
    solved = ut.solve(routed.dense(), wanted)
    np.testing.assert_allclose(solved.program, ut.program(routed, wanted), rtol=0, atol=1e-14)
    assert abs(solved.condition - 1) < 1e-12
    exact = ut.solve(routed, wanted)
    assert (exact.condition, exact.residual, exact.rank) == (1, 0, routed.width)


def test_square_queries_and_keys():
    sizes = (2, 2, 2, 2, 1)
    wanted = target(3, sizes, scale=0.6)
    found = machine(1, sizes=sizes, square=True)
    equations = 2 * ut.square_width(2, 2, 2, 1)
    assert found.query.shape == (2, 2, found.width, found.width)
    assert found.width == -(-5 * ut.square_width(2, 2, 2, 1) // 4)
    solved = ut.solve(found, wanted)
    assert solved.residual < 1e-12
    assert solved.rank == solved.equations == equations
    assert error(solved, wanted, tokens(1, 6, 2))(found) < 1e-11
    # A machine that forgets its tokens has no program.
    empty = jax.tree.map(lambda leaf: leaf, found)
    empty.value = nnx.Param(0 * found.value[...])
    with pytest.warns(UserWarning, match="are independent; its equations are dependent"):
        ut.program(empty, wanted)
    narrow = machine(1, 0.5, sizes=sizes, square=True)
    with pytest.warns(UserWarning, match=f"square R_Q and R_K that takes {equations // 2} col"):
        ut.program(narrow, wanted)


def test_square_machines_as_wide_as_the_targets_heads():
    sizes = (1, 1, 1, 5, 2)
    wanted, found = target(0, sizes), machine(1, 5 / 3, sizes=sizes, square=True)
    assert found.width == found.head_width == wanted.head_width == 5
    solved = ut.solve(found, wanted)
    assert solved.residual < 1e-13
    assert solved.rank == solved.equations == 3
    assert error(solved, wanted, tokens(1, 6, 1))(found) < 1e-11


def test_local_minima_are_left_for_another_start(monkeypatch):
    sizes, turns = (1, 1, 2, 1, 1), range(12)
    pairs = [(machine(n, 1, sizes=sizes, square=True), target(n, sizes)) for n in turns]
    several = np.array([ut.solve(*pair).residual for pair in pairs])
    monkeypatch.setattr("universal.square.STARTS", 1)
    single = np.array([ut.solve(*pair).residual for pair in pairs])
    print(single, several)
    assert ((single > 1e-9) & (several < 1e-9)).any()
    assert np.array_equal(single[single < 1e-9], several[single < 1e-9])
    assert (several <= single).all()


def test_dependent_equations_have_no_finite_condition_number():
    wanted, found = target(3, SIZES), machine(4)
    arrays = [np.array(kernel[...]) for kernel in found.maps]
    arrays[1] = arrays[0]  # keys are queries
    solved = ut.solve(ut.AttentionTransformer(*arrays), wanted)
    assert solved.rank < solved.equations <= found.width
    assert solved.condition == np.inf
    with pytest.warns(UserWarning, match="are independent; its equations are dependent"):
        ut.program(ut.AttentionTransformer(*arrays), wanted)
    assert ut.solve(machine(4, 0.5), wanted).condition == np.inf


def test_programs_that_the_targets_type_cannot_hold_are_refused():
    wanted = target(3, SIZES, dtype=np.float16)
    weak = ut.sparse(*SIZES, scale=1e-7)
    with pytest.raises(ValueError, match=r"program is not finite in float16.* reach \d\.\de\+0"):
        ut.program(weak, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="single"), "kind must be one of 'untied', 'looped', 'residual', got 'single'"),
        (dict(law="cauchy"), "law must be one of 'gaussian', 'uniform', 'orthogonal'"),
        (dict(slack=0), "slack must be positive and finite, got 0"),
        (
            dict(law="orthogonal", slack=1 / 32),
            "there are: 2 columns, not 1; slack = 0.0312 is too",
        ),
        (dict(kind="looped", square=True), "square machines are of kind 'untied', not 'looped'"),
    ],
)
def test_wrong_machines_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        machine(0, **options)


def test_what_does_not_fit_says_what_it_would_take():
    with pytest.raises(MemoryError, match=r"a random machine of \d+ columns would take .* TB"):
        ut.random(jax.random.key(0), 6, 8, 64, 64, 64)
    with pytest.raises(MemoryError, match=r"of about 10\^362 columns would take 10\^730 bytes"):
        ut.random(jax.random.key(0), 200, 64, 4, 4, 4)
