"""Sparse machines: they are what they say, and simulate every target of their shape."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flows import fast
from universal_cases import formula, observe, relative, target, tokens

import svflow as sv
import universal as ut
from universal.maps import live_columns, routed_columns
from universal.sizes import KINDS

LAYERS, HEADS, WIDTHS = range(1, 7), range(1, 5), range(1, 9)
FOUR = list(itertools.product((False, True), repeat=2))  # causal and tied


def shapes(kind):
    """(layers, heads, width, head width, output width) of the grid.

    Every number of layers with every number of heads that the kind has. Up to 64 paths with all
    widths 1..8, beyond that (up to 4^6, or 5^6 with a residual) with a width of 1 or more by turns.
    """
    for layers, heads in itertools.product(LAYERS, HEADS if kind in KINDS[2:] else [1]):
        few = (heads + (kind == "residual")) ** layers <= 64
        for width in WIDTHS if few else [1 + (layers * heads) % 8]:
            yield layers, heads, width, 1 + width % 3, 1 + (width + layers) % 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_simulates_every_target(kind):
    # In NumPy, whose loop over heads knows nothing of live columns: the machine and the program.
    # The four of causal and tied by turns, so that each meets every depth and number of heads.
    seen, worst = set(), {}
    for turn, sizes in enumerate(shapes(kind)):
        causal, tied = FOUR[(turn + sizes[0]) % 4]
        options = dict(causal=causal, scale=0.8 if turn % 3 else None)
        wanted = target(turn, sizes, tied=tied, residual=kind == "residual", **options)
        machine = ut.sparse(*sizes, kind=kind, causal=causal)
        layers, heads, width, head_width, out_width = sizes
        assert machine.width == ut.machine_width(
            layers, heads, head_width, out_width, kind, width=width
        )
        E = np.asarray(ut.program(machine, wanted))
        assert E.shape == (width, machine.width)
        for dtype in (np.float64, np.float32):
            x = tokens(turn, 3, width).astype(dtype)
            _, attention, output = formula(machine, x @ E.astype(dtype))
            _, attention_wanted, output_wanted = formula(wanted, x.astype(np.float64))
            off = relative(output, output_wanted), np.abs(attention - attention_wanted).max()
            worst[dtype] = max(worst.get(dtype, (0, ())), (max(off), (sizes, causal, tied)))
        seen.add((causal, tied, layers))
    print(worst)
    assert len(seen) == 4 * len(LAYERS)
    assert worst[np.float64][0] < 1e-12
    assert worst[np.float32][0] < 1e-4


ENGINE = [
    ("single", (2, 1, 5, 2, 3), True, False),
    ("compressed", (3, 1, 4, 2, 3), False, False),
    ("untied", (2, 3, 5, 2, 1), True, True),
    ("looped", (3, 2, 4, 3, 2), True, False),
    ("residual", (2, 2, 4, 3, 2), False, False),
    ("residual", (2, 3, 2, 1, 3), True, True),
]


@pytest.mark.parametrize(("kind", "sizes", "causal", "tied"), ENGINE)
def test_the_engine_runs_machines_and_targets_by_the_formula(kind, sizes, causal, tied):
    wanted = target(5, sizes, causal=causal, tied=tied, residual=kind == "residual")
    machine = ut.sparse(*sizes, kind=kind, causal=causal)
    x, E = tokens(6, 5, sizes[2]), np.asarray(ut.program(machine, wanted))

    written = machine.dense() if kind == "untied" and tied else None
    narrow = kind in ("looped", "residual") and not tied

    @fast
    def all_of(wanted, written, x, E):
        found = [observe(wanted, x), observe(machine, x @ E)]
        if written is not None:
            found.append(observe(written, x @ E))
        if narrow:
            found.append(observe(machine, x.astype(jnp.float32) @ E.astype(jnp.float32)))
        return found

    ours, *machines = all_of(wanted, written, x, E)
    reference = formula(machine, x @ E)
    for found, expected in zip((ours, *machines), (formula(wanted, x), reference, reference)):
        rounding = 2e-14 if found[0].dtype == jnp.float64 else 1e-5
        for a, b in zip(found, expected):
            assert relative(a, b) < rounding
    # Attention and output of the machine are the target's.
    for found in machines:
        for a, b in zip(found[1:], ours[1:]):
            assert relative(a, b) < (1e-12 if a.dtype == jnp.float64 else 1e-4)
    assert len(machines) == 1 + narrow + (written is not None)
    # And not because nothing happens.
    attention = np.asarray(ours[1])
    assert np.abs(attention[0, 0] - attention[-1, 0]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_zero_or_one(kind):
    machine = ut.sparse(3, 1 if kind in KINDS[:2] else 2, 3, 2, 2, kind=kind)
    dense = machine.dense()
    assert jax.tree.leaves(machine) == []
    for kernel in (dense.query, dense.key, dense.value, dense.unembedding):
        entries = np.asarray(kernel[...])
        assert set(np.unique(entries)) == {0.0, 1.0}
        assert entries.sum(axis=-2).max() == 1  # each column copies one, or none
    if kind == "looped":  # literally one layer's weights
        assert machine.tied
        assert machine.query.shape == (2, machine.width, 2)
        assert machine.value.shape == (2, machine.width, machine.width)
        assert machine.jumps == ()
    else:
        assert machine.query.shape[0] == 3
    # What has been read is zero then: after layer j, of N columns there are those of paths to go.
    live = [len(layer.to) for layer in live_columns(machine.value, 3, machine.residual)]
    # Of 2 heads with 2 columns a query and 2 an output: 8 of queries and keys at every node.
    if kind in ("untied", "looped"):
        assert machine.width == 8 + 16 + 32 + 16
        assert live == [8 + 16 + 8, 8 + 4, 2]
    if kind == "residual":
        assert machine.width == 8 * (1 + 3 + 9) + 2 * 27
        assert live == [8 * (1 + 3) + 2 * 9, 8 + 2 * 3, 2]
    if kind in ("single", "compressed"):
        assert live == [machine.width] * 3
    # Each layer routes what it writes of any state; a looped machine's does not wear out.
    routed = [len(layer.to) for layer in routed_columns(machine.value)]
    assert routed == (live if machine.value.ndim == 4 else live[:1])


@pytest.mark.parametrize("kind", ["single", "untied", "looped", "residual"])
def test_velocities_are_those_of_the_dense_view(kind):
    # At any time and state, not only at the whole layers of a program's simulation.
    machine = ut.sparse(3, 1 if kind == "single" else 2, 2, 2, 2, kind=kind)
    y = tokens(0, 4, machine.width)

    @fast
    def all_of(dense, y):
        found = []
        for flow in (machine, dense):
            velocities = [flow.velocity(t, y) for t in (0, 0.7, 1, 2)]
            velocities.append(jax.vmap(flow.velocity, (0, None))(jnp.arange(-1, 4), y))
            halves, late = sv.simulate(flow, y, dt=0.5).xs, sv.simulate(flow, y, t0=1).xs
            found.append([*velocities, halves, late])
        return found

    ours, dense = all_of(machine.dense(), y)
    for a, b in zip(ours, dense):
        assert relative(a, b) < 1e-14
    for part, layer in zip(ours[4], (0, 0, 1, 2, 2)):  # out of range: the first and the last
        assert relative(part, machine.velocity(layer, jnp.asarray(y))) < 1e-14


def test_widths():
    # The numbers of the formulas, written out.
    assert ut.machine_width(3, 1, 4, 5, "single") == 2 * 3 * 4 + 5
    assert ut.machine_width(3, 1, 4, 4, "single") == 7 * 4  # (2L + 1) d
    assert ut.machine_width(3, 1, 2, 5, "compressed", width=4) == 4 * 4 + 5
    assert ut.machine_width(3, 2, 4, 5) == 2 * 2 * 4 * 7 + 5 * 8
    assert ut.machine_width(3, 2, 4, 5, "looped") == ut.machine_width(3, 2, 4, 5)
    assert ut.machine_width(5, 1, 4, 3) == 2 * 5 * 4 + 3
    assert ut.machine_width(3, 2, 4, 5, "residual") == 2 * 4 * (27 - 1) + 5 * 27
    assert ut.square_width(2, 3, 4, 5) == 4 * 3 * (1 + 9) + 5 * 9
    for layers, heads, head, out in itertools.product(LAYERS, (2, 3, 4), (1, 8), (1, 3)):
        closed = 2 * heads * head * (heads**layers - 1) // (heads - 1) + out * heads**layers
        assert ut.machine_width(layers, heads, head, out) == closed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ut.sparse(2, 2, 3, 3, 3, kind="single"), "single machine has one head, not 2"),
        (lambda: ut.sparse(2, 2, 3, 3, 3, kind="dense"), "kind must be one of 'single', "),
        (lambda: ut.sparse(0, 2, 3, 3, 3), "layers must be a positive integer, got 0"),
        (lambda: ut.sparse(2, 2, 3, 2.5, 3), "head_width must be a positive integer, got 2.5"),
        (lambda: ut.machine_width(2, True, 3, 2), "heads must be a positive integer, got True"),
    ],
)
def test_wrong_machines_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_says_what_it_would_take():
    with pytest.raises(MemoryError, match=r"8092576988671488 columns.* TB"):
        ut.sparse(12, 12, 768, 64, 768)
    # 2 4 64^200 + 4 64^200 columns, and so on: more than a float can hold, or than has few digits.
    with pytest.raises(MemoryError, match=r"of about 10\^362 columns.* 10\^367 bytes"):
        ut.sparse(200, 64, 4, 4, 4)
    with pytest.raises(MemoryError, match=r"of about 10\^7226 columns.* 10\^7232 bytes"):
        ut.sparse(8000, 8, 4, 4, 4)
