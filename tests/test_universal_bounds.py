"""Bounds of a machine's width, measured, and what small errors do to a simulation."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from compilations import Compilations
from flows import fast
from matplotlib.figure import Figure
from universal_cases import formula, relative, target, tokens

import universal as ut
from svflow import plotting
from universal import bounds_plot
from universal.bounds import _all_path_functions, random_target
from universal.paths import slots

PATHS = ((2, 2), (3, 2), (4, 2), (2, 3), (3, 3))
SHAPE = (2, 2, 3, 1, 1)
LEAST = 16
WIDE = (2, 2, 32, 2, 2)


@pytest.fixture(scope="module")
def ranks():
    return [ut.path_rank(jax.random.key(0), *shape, targets=48) for shape in PATHS]


@pytest.fixture(scope="module")
def around():
    return ut.phase(jax.random.key(0), *SHAPE, slacks=(0.75, 1.25, 2), seeds=8)


@pytest.fixture(scope="module")
def wanted():
    """As wide as its machine, so that both are run by one program."""
    return target(3, WIDE)


@pytest.fixture(scope="module")
def perturbed(wanted):
    machines = {
        "sparse": ut.sparse(*WIDE),
        "random": ut.random(jax.random.key(1), *WIDE, slack=1),
    }
    x, key = tokens(1, 6, 32), jax.random.key(5)
    return {n: ut.robustness(m, wanted, x, key=key, draws=6) for n, m in machines.items()}


@pytest.mark.parametrize("kind", ["untied", "residual"])
def test_path_functions_make_up_the_states(kind):
    wanted = target(1, (2, 2, 3, 2, 2), residual=kind == "residual")
    machine = ut.sparse(2, 2, 3, 2, 2, kind=kind)
    x, E = tokens(2, 5, 3), np.asarray(ut.program(machine, wanted))
    found, ours = fast(lambda *a: tuple(map(ut.path_functions, (wanted, machine), a)))(x, x @ E)
    xs, attention, _ = formula(wanted, x)
    value, total = np.asarray(wanted.value[...]), 0
    paths = [slot.path for slot in slots(wanted) if slot.kind == "output"]
    assert len(found) == len(paths) == (9 if kind == "residual" else 4)
    for function, path in zip(np.asarray(found), paths):
        along, product = x, np.eye(3)
        for layer, head in path:
            along, product = attention[layer, head] @ along, product @ value[layer, head]
        np.testing.assert_allclose(function, along, atol=1e-14)
        total = total + function @ product
    np.testing.assert_allclose(total, xs[-1], atol=1e-13)
    # A machine attends along all its paths as its target does.
    np.testing.assert_allclose(ours, np.asarray(found) @ E, atol=1e-13)


def test_the_lower_bound_is_the_number_of_paths(ranks):
    print(ut.path_rank_table(ranks))
    for one, (layers, heads) in zip(ranks, PATHS):
        paths = heads**layers
        assert one.functions.shape == one.values.shape == (paths,)
        assert one.each.shape == (48, paths)
        assert one.rank == one.bound == paths
        assert one.independent > 24
        assert (np.diff(one.functions) <= 0).all()
        assert one.functions[0] == 1
        # By far: the theory asks for more than rounding.
        assert one.functions[-1] > 1e-7
        assert one.values[-1] > 1e-3
        assert one.bound <= ut.machine_width(layers, heads, 1, 1)
    line = ut.path_rank_table(ranks).splitlines()[-1].split()
    assert line[:4] == ["3", "3", "27", "27"]


def test_heads_that_agree_are_no_paths_of_their_own(ranks):
    """Known ranks: equal heads leave one path a layer, zero logits one in all."""
    drawn = [target(seed, (3, 2, 1, 1, 1), gain=2) for seed in range(48)]
    all_drawn = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    for kernel in (all_drawn.query, all_drawn.key):
        weights = kernel[...]
        weights[12:24, :, 1] = weights[12:24, :, 0]
        weights[24:36, 0, 1] = weights[24:36, 0, 0]
        weights[36:] = 0
    x = tokens(3, 48 * 16 * 8, 1).reshape(48, 16, 8, 1)
    with jax.default_device(jax.devices("cpu")[0]), Compilations() as made:
        found = np.asarray(_all_path_functions(all_drawn, x))[..., 0]
    assert made.count == 0
    sigma = np.linalg.svd(np.moveaxis(found, 2, -1).reshape(48, -1, 8), compute_uv=False)
    rank = np.sum(sigma > 1e-13 * sigma[:, :1], axis=1).reshape(4, 12)
    np.testing.assert_array_equal(rank.max(axis=1), [8, 1, 4, 1])


def test_programs_exist_from_the_number_of_equations_on(around):
    print(ut.phase_table([around]))
    assert around.least == around.first == LEAST
    lost = around._replace(error=np.where(around.widths[:, None] == LEAST, np.nan, around.error))
    assert lost.first != LEAST  # what is no number does not work
    np.testing.assert_array_equal(around.widths, [12, 15, 16, 20, 32])
    below = around.widths < LEAST
    assert around.error.shape == (5, 8)
    # One column too few is as good as none.
    assert around.residual[below].min() > 1e-3
    assert np.median(around.error[1]) > 1e-2
    assert (around.condition[below] == np.inf).all()
    assert around.residual[~below].max() < 1e-11
    assert around.error[~below].max() < 1e-9
    middle = np.median(around.condition[~below], axis=1)
    assert (np.diff(middle) < 0).all()
    assert middle[-1] < 20
    # The same programs in float32, and the target itself.
    assert np.median(around.single[3:], axis=1).max() < 1e-4
    assert around.single.min() > 1e-9
    assert 1e-9 < np.median(around.target_single) < np.median(around.single[2])
    lines = ut.phase_table([around]).splitlines()
    assert lines[2].split()[3:8] == ["16", "15", "0.94", "0/8", lines[2].split()[7]]
    assert lines[3].split()[6] == "8/8"


def test_narrowed_machines_are_random_machines(around):
    """The first m rows and columns of a wider one, rescaled, are a machine of m columns."""
    key = jax.random.split(jax.random.key(0), 8)[0]
    ours, theirs, inputs = jax.random.split(key, 3)
    with jax.default_device(jax.devices("cpu")[0]):  # where all this is compiled already
        wide = ut.random(ours, *SHAPE, slack=2)
        wanted = random_target(theirs, *SHAPE)
        x = np.asarray(jax.random.normal(inputs, (8, 3)))
    m = 20
    query, key, value, unembed = ((32 / m) ** 0.5 * np.asarray(w[...]) for w in wide.maps)
    narrow = ut.AttentionTransformer(
        query[:, :, :m], key[:, :, :m], value[:, :, :m, :m], unembed[:m]
    )
    solved = ut.solve(narrow, wanted)
    place = around.widths.tolist().index(m)
    np.testing.assert_allclose(solved.condition, around.condition[place, 0], rtol=1e-9)
    output = formula(narrow, x @ np.asarray(solved.program))[2]
    assert relative(output, formula(wanted, x)[2]) < 1e-11
    lengths = np.sum(value[:, :, :m, :m] ** 2, axis=-2)
    assert abs(lengths.mean() - 1) < 0.2


def test_the_second_call_compiles_nothing(around, perturbed, ranks, wanted):
    with Compilations() as made:
        ut.path_rank(jax.random.key(9), 3, 2, targets=48)
        ut.phase(jax.random.key(9), *SHAPE, slacks=(0.8, 1.5, 2), seeds=8)
        machine = ut.random(jax.random.key(9), *WIDE, slack=1)
        ut.robustness(machine, wanted, tokens(1, 6, 32), key=jax.random.key(8), draws=6)
    assert made.count == 0


def test_errors_are_linear_in_perturbations(perturbed):
    print(ut.robustness_table(perturbed))
    for one in perturbed.values():
        for part in (one.program, one.machine, one.target):
            assert part.error.shape == (7, 6)
            assert abs(part.slope - 1) < 1e-3
            # error / epsilon -> |derivative|, with an error that is itself linear in epsilon.
            off = np.abs(part.error / part.epsilon[:, None] / part.amplification - 1)
            assert off[0].max() < 1e-3
            np.testing.assert_allclose(off[3] / off[2], 10, rtol=0.2)
    sparse, random = perturbed["sparse"], perturbed["random"]
    assert sparse.condition == 1
    assert random.condition > 20
    np.testing.assert_allclose(
        np.median(sparse.target.amplification), np.median(random.target.amplification), rtol=1e-12
    )
    # No more than the condition number lies between a machine and its target.
    for one in (sparse, random):
        most = 5 * one.condition * np.median(one.target.amplification)
        assert one.program.amplification.max() < most
        assert one.machine.amplification.max() < most
    assert np.median(random.program.amplification) > np.median(sparse.program.amplification)
    line = ut.robustness_table(perturbed).splitlines()[1].split()
    assert line[:2] == ["sparse", "1.0e+00"]
    assert line[-3:] == ["1.0000"] * 3


def test_rounding_is_within_half_a_unit():
    random = np.random.default_rng(0)
    E = random.normal(size=(40, 30)) * 10.0 ** random.uniform(-6, 6, size=(40, 30))
    E[:, 3] = 0
    E[5] = 0
    rounded = np.asarray(ut.quantise(E, "bfloat16"))
    np.testing.assert_array_equal(rounded, E.astype(jnp.bfloat16).astype(np.float64))
    _, exponent = np.frexp(E)  # 8 bits of significand: units of 2^(e - 8)
    off = np.abs(rounded - E) / 2.0 ** (exponent - 8)
    assert 0.49 < off.max() <= 0.5
    for form, axis in (("int8 per column", 0), ("int8 per row", 1)):
        rounded = np.asarray(ut.quantise(E, form))
        top = np.abs(E).max(axis=axis, keepdims=True)
        unit = np.where(top == 0, 1, top / 127)
        steps = rounded / unit
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-12)
        assert np.abs(steps).max() < 127.5
        off = np.abs(rounded - E) / unit
        assert 0.45 < off.max() <= 0.5 + 1e-12
        np.testing.assert_allclose(np.abs(rounded).max(axis=axis), top.squeeze(), rtol=1e-15)
    tiny = np.asarray([[1e-44, -3e-44], [1.0, 0.5]], np.float32)  # a row below what 127 divides
    assert np.isfinite(ut.quantise(tiny, "int8 per row")).all()
    once = ut.quantise(E.astype(np.float32), "int8 per row")
    assert once.dtype == jnp.float32
    np.testing.assert_allclose(ut.quantise(once, "int8 per row"), once, rtol=1e-6)


def test_rounded_programs(wanted, perturbed):
    machine, x = ut.sparse(*WIDE), tokens(1, 6, 32)
    found = ut.quantisation(machine, wanted, x)
    print(ut.quantisation_table({"sparse": found}))
    assert [one.form for one in found] == ["none", "bfloat16", "int8 per column", "int8 per row"]
    exact, *rounded = found
    assert exact.change == 0
    assert exact.matching.output < 1e-13
    assert exact.matching.attention.max() < 1e-13
    most = perturbed["sparse"].program.amplification.max()
    for one in rounded:
        assert 1e-4 < one.change < 2e-2
        # A perturbation like any other: what is read is off by about as much, and the output.
        assert one.change / 20 < one.matching.output < 5 * most * one.change
        assert one.matching.attention.shape == (2, 2)
        assert 1e-4 < one.matching.attention.max() < 5 * most * one.change
    # What is rounded is the program that is given.
    E = ut.program(machine, wanted)
    same = ut.quantisation(machine, wanted, x, program=ut.quantise(E, "bfloat16"))
    assert same[1].change == 0
    assert same[0].matching.output == same[1].matching.output == found[1].matching.output
    assert len(ut.quantisation_table({"sparse": found}).splitlines()) == 5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures(ranks, around, perturbed, wanted, theme):
    rounded = {
        name: [
            ut.Quantised(form, 0.01, ut.Matching(np.ones((2, 2)), np.full((2, 2), 0.2), 0.1))
            for form in ("none", "bfloat16", "int8 per column", "int8 per row")
        ]
        for name in perturbed
    }
    condition, error, single = (
        np.stack([a[2:], a[2:]], axis=1) for a in (around.condition, around.error, around.single)
    )
    own = np.stack([around.target_single] * 2)
    with matplotlib.rc_context(plotting.style(theme)):
        axes = bounds_plot.path_picture(Figure(), ranks, theme=theme)
        assert len(axes.lines) == 2 * len(ranks) + 1
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), ranks[0].functions)
        error_axes, _, last = bounds_plot.phase_picture(Figure(), [around], theme=theme)
        np.testing.assert_array_equal(
            error_axes.lines[0].get_ydata(), np.median(around.error, axis=1)
        )
        assert len(last.lines[0].get_ydata()) == 3  # infinite condition numbers are left out
        panels = bounds_plot.conditioning_picture(
            Figure(), (2, 3), (1, 1.25, 2), condition, error, single, own, theme=theme
        )
        assert [len(panel.lines) for panel in panels] == [3, 3, 4]
        panels = bounds_plot.robustness_picture(Figure(), perturbed, rounded, theme=theme)
        np.testing.assert_allclose(panels[2].lines[0].get_ydata(), 0.1)
        np.testing.assert_allclose(panels[2].lines[1].get_ydata(), 0.2)
        for panel in panels:
            assert panel.get_yscale() == "log"


def test_wrong_questions_are_refused(wanted):
    key, machine, x = jax.random.key(0), ut.sparse(*WIDE), tokens(1, 6, 32)
    for call, message in (
        (lambda: ut.path_functions(wanted, x[:, :2]), r"x must have shape \(tokens, 32\)"),
        (lambda: ut.path_rank(key, 0, 2), "layers must be a positive integer, got 0"),
        (lambda: ut.path_rank(key, 3, 3, targets=8), r"3\^3 paths take at least 27 targets"),
        (lambda: ut.path_rank(key, 3, 3, inputs=2), r"27 tokens of inputs, not 64 and 2 x 8"),
        (lambda: ut.phase(key, *SHAPE, seeds=0), "seeds must be a positive integer, got 0"),
        (lambda: ut.phase(key, *SHAPE, slacks=(1, 0)), r"slacks must be positive .*got \(1, 0\)"),
        (lambda: ut.phase(key, *SHAPE, kind="single"), "kind must be one of 'untied'"),
        (lambda: ut.robustness(machine, wanted, x, key=key, draws=0), "draws must be a positive"),
        (
            lambda: ut.robustness(machine, wanted, x, key=key, epsilons=[0.1, -1]),
            "epsilons must be two or more positive numbers",
        ),
        (lambda: ut.robustness(x, wanted, x, key=key), "machine must be an AttentionTransformer"),
        (lambda: ut.quantise(x, "int4"), "form must be one of 'bfloat16', .* got 'int4'"),
        (lambda: ut.quantise(x[0], "bfloat16"), r"E must be a matrix of floats, got .* \(32,\)"),
        (lambda: ut.quantise(x / np.zeros(()), "bfloat16"), "E is not finite"),
    ):
        with np.errstate(divide="ignore"), pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(MemoryError, match=r"\d+ random machines of \d+ columns would take"):
        ut.phase(key, 6, 8, 64, 64, 64)
    with pytest.raises(MemoryError, match="path functions would take"):
        ut.path_rank(key, 12, 4, targets=4**12, inputs=4**12)
