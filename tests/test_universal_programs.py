"""Programs: for any shape and input, over token ids, for checkpoints, and what they hold."""

import functools
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_model
from flows import fast, normal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from universal_cases import formula, relative, target, tokens

import svflow as sv
import universal as ut
from universal.paths import path_columns, path_sources, slots
from universal.sizes import KINDS
from universal.tree_plot import path_tree

quick = settings(deadline=None, database=None, derandomize=True)


@st.composite
def pairs(draw):
    """A kind, sizes, and whether the target is tied and causal."""
    kind = draw(st.sampled_from(KINDS))
    heads = 1 if kind in KINDS[:2] else draw(st.integers(1, 3))
    sizes = (draw(st.integers(1, 4)), heads, *(draw(st.integers(1, n)) for n in (8, 4, 3)))
    return kind, sizes, draw(st.booleans()), draw(st.booleans())


def sequence(random, count, width, repeats):
    """Tokens of which `repeats` kinds occur, so that there are equal ones."""
    return random.normal(size=(repeats, width))[random.integers(0, repeats, count)]


@settings(quick, max_examples=80)
@given(pairs(), st.integers(0, 2**32 - 1), st.integers(1, 50), st.integers(1, 50))
@example(("looped", (4, 3, 8, 4, 3), True, True), 1, 50, 1)
@example(("compressed", (1, 1, 2, 2, 1), True, True), 1, 1, 1)
def test_any_shape(pair, seed, count, repeats):
    kind, sizes, causal, tied = pair
    wanted = target(seed, sizes, tied=tied, causal=causal, residual=kind == "residual")
    machine = ut.sparse(*sizes, kind=kind, causal=causal, scale=0.7)
    x = sequence(np.random.default_rng(seed), count, sizes[2], repeats)
    E = np.asarray(ut.program(machine, wanted))
    _, attention, output = formula(machine, x @ E)
    _, attention_wanted, output_wanted = formula(wanted, x)
    assert relative(output, output_wanted) < 1e-12
    assert np.abs(attention - attention_wanted).max() < 1e-12


LONGEST = 50
ENGINE = {
    "looped": ((2, 2, 4, 3, 2), True),
    "residual": ((2, 2, 3, 2, 2), False),
}


@functools.cache
def runner(kind):
    """A machine, and the program that runs it and a target over sequences up to the longest."""
    sizes, causal = ENGINE[kind]
    machine = ut.sparse(*sizes, kind=kind, causal=causal)

    @fast
    def both(wanted, x, E, count):
        context = sv.Context(mask=jnp.arange(LONGEST) < count)
        return ut.run(machine, x @ E, context), ut.run(wanted, x, context)

    return machine, both


@settings(quick, max_examples=60)
@given(
    st.sampled_from(sorted(ENGINE)),
    st.integers(0, 2**32 - 1),
    st.integers(1, LONGEST),
    st.integers(1, LONGEST),
    st.floats(-3, 3),
)
@example("looped", 0, LONGEST, 3, 3.0)
@example("residual", 1, 1, 1, -3.0)
def test_any_input_through_the_engine(kind, seed, count, repeats, size):
    # Logits from 1e-3 to 1e3, flat to one-hot; equal tokens; a length below the padded one.
    sizes, causal = ENGINE[kind]
    wanted = target(seed, sizes, causal=causal, residual=kind == "residual", gain=10 ** (size / 2))
    machine, both = runner(kind)
    x = sequence(np.random.default_rng(seed), LONGEST, sizes[2], repeats)
    ours, theirs = both(wanted, x, ut.program(machine, wanted), count)
    # Rounding of a logit is in units of its size; a layer hands it on in these units.
    allowed = 1e-13 * (1 + 10 * 10**size) ** (sizes[0] - 1)
    assert relative(ours[:count], theirs[:count]) < max(1e-12, allowed)
    expected = formula(wanted, x[:count])[2]
    assert relative(theirs[:count], expected) < max(1e-12, allowed)


def test_programs_compose_with_tables():
    wanted = target(1, (2, 2, 4, 3, 2), causal=True)
    machine = ut.sparse(2, 2, 4, 3, 2, causal=True)
    E = ut.program(machine, wanted)
    table, places = normal(1, 7, 4), normal(2, 6, 4)
    ids = jnp.asarray([3, 0, 3, 6, 5])
    ready = ut.reprogram(machine, table, places, program=E)
    again = ut.reprogram(machine, table @ E, places @ E)
    plain = ut.reprogram(wanted, table)
    later = sv.Context(positions=jnp.asarray([1, 2, 3, 4, 5]))

    @fast
    def all_of(ready, again, plain):
        bad = ids.at[1].set(7)
        return ready(ids), plain(ids), again.embed(ids), ready.embed(ids, later), ready.embed(bad)

    found = all_of(ready, again, plain)
    x = np.asarray(table)[ids]
    starts = x + places[:5], x
    for output, start in zip(found, starts):
        assert relative(output, formula(wanted, np.asarray(start))[2]) < 1e-12
    for start, expected in zip(found[2:], (starts[0] @ E, (x + places[1:]) @ E)):
        assert relative(start, expected) < 1e-14
    assert np.array_equal(np.isnan(found[4]).any(axis=1), np.arange(5) == 1)
    assert [leaf.shape for leaf in jax.tree.leaves(ready)] == [(6, 44), (7, 44)]
    assert ready.embed([1]).shape == (1, 44)
    with pytest.raises(ValueError, match="id 7 is outside the vocabulary of 7"):
        ready([7])
    with pytest.raises(ValueError, match="position 6 is outside the position table of 6"):
        ready([0] * 7)
    with pytest.raises(ValueError, match="token_table has 4 columns, and the machine reads 44"):
        ut.reprogram(machine, table)
    with pytest.raises(ValueError, match="position_table has 4 columns, and the machine reads 44"):
        ut.reprogram(machine, table @ E, places)
    with pytest.raises(ValueError, match=r"program must have shape \(4, 44\).*got \(4, 43\)"):
        ut.reprogram(machine, table, program=E[:, 1:])
    with pytest.raises(ValueError, match="token_table must be a table of floating-point rows"):
        ut.reprogram(machine, jnp.ones((3, 44), int))
    narrow = table.astype(jnp.float32)
    for call, message in (
        (lambda: ut.reprogram(machine, table.at[1].set(jnp.nan) @ E), "token_table is not finite"),
        (lambda: ut.reprogram(machine, table @ E, places @ E * jnp.inf), "position_table is not f"),
        (lambda: ut.reprogram(machine, table, program=E * jnp.nan), "program is not finite"),
        (
            lambda: ut.reprogram(machine, narrow, program=E),
            "program is float64, but token_table is",
        ),
        (
            lambda: ut.reprogram(machine, narrow @ E.astype(jnp.float32), places @ E),
            "position_table is float64, but token_table is float32",
        ),
        (
            lambda: ut.reprogram(wanted, narrow),
            "token_table is float32, but the transformer's weights float64",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    # Lists will do.
    listed = ut.reprogram(machine, table.tolist(), program=E.tolist())
    assert np.array_equal(listed.tokens[...], ut.reprogram(machine, table, program=E).tokens[...])


@pytest.mark.parametrize("family", ["llama", "albert"])
def test_the_attention_of_a_checkpoint_is_a_target(family):
    model = tiny_model(family)
    config = model.config
    wanted = ut.attention_of(model, 2, residual=family == "llama")
    assert (wanted.depth, wanted.heads, wanted.head_width) == (2, config.heads, config.head_width)
    assert wanted.causal == config.causal
    assert wanted.tied == (family == "albert")
    # Against the model's own branch without biases and norms, every token at place 0.
    bare = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (0 if "bias" in jax.tree_util.keystr(path) else 1), model.flow
    )
    bare.layers.attention_norm = None
    x = tokens(3, 3, config.width)
    still = sv.Context(positions=jnp.zeros(3, int))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    branch = fast(lambda bare, x: bare.branch("attention", jnp.asarray(0), x, still))(bare, x)
    update = formula(wanted, x)[0][1] - (x if wanted.residual else 0)
    assert relative(update, branch) < 1e-12
    # And it can be programmed.
    kind = "residual" if wanted.residual else "untied"
    machine = ut.sparse(
        2, config.heads, config.width, config.head_width, config.width, kind=kind,
        causal=config.causal,
    )  # fmt: skip
    E = np.asarray(ut.program(machine, wanted))
    assert relative(formula(machine, x @ E)[2], formula(wanted, x)[2]) < 1e-12


def test_wrong_checkpoints_are_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="takes a Transformer, got int"):
        ut.attention_of(3)
    with pytest.raises(ValueError, match="the model has 3 layers, not 4"):
        ut.attention_of(model, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svflow.memory._host", lambda: 10**4)
        with pytest.raises(MemoryError, match=r"merged attention of 3 layers would take .* 10 kB"):
            ut.attention_of(model)


def test_scales_that_differ_between_layers_go_into_the_queries():
    model = tiny_model("gpt2", seed=1)
    flow = jax.tree.map(lambda leaf: leaf, model.flow)
    flow.config = replace(flow.config, scales=(0.5, 0.25, 0.125))
    ours, plain = ut.attention_of(flow), ut.attention_of(model.flow)
    assert ours.scale == 0.5
    for layer, share in enumerate((1, 0.5, 0.25)):
        assert relative(ours.query[layer], share * plain.query[layer]) < 1e-15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=3), r"3 layers, not 2: ut.sparse\(3, 2, 4, 3, 2\) is one, 100 columns wide"),
        (dict(heads=3), "3 heads in each layer, not 2: .* 90 columns wide"),
        (dict(head_width=5), "5 columns of queries and keys, not 3: .* 68 columns wide"),
        (dict(out_width=3), "3 columns of output, not 2: .* 48 columns wide"),
        (dict(causal=True), "causal=True, not False"),
        (dict(residual=True), r'residual=True, not False: .*kind="residual"\) is one, 66 columns'),
        (dict(hardmax=True, layers=1), "1 layers, not 2; hardmax=True, not False"),
    ],
)
@pytest.mark.parametrize("make", ["looped", "untied", "random"])
def test_mismatches_say_what_is_needed(make, options, message):
    sizes = dict(layers=2, heads=2, width=4, head_width=3, out_width=2)
    machine = other(make)
    sizes |= {k: v for k, v in options.items() if k in sizes}
    wanted = target(
        0, tuple(sizes.values()), **{k: v for k, v in options.items() if k not in sizes}
    )
    with pytest.raises(ValueError, match=message) as refused:
        ut.program(machine, wanted)
    # And what it says is so.
    hint = re.search(r"ut\.sparse\((.*)\) is one, (\d+) columns", str(refused.value))
    numbers = [int(n) for n in re.findall(r"(?<!\w)\d+", hint[1])]
    named = {k: json.loads(v.lower()) for k, v in re.findall(r"(\w+)=([^,]+)", hint[1])}
    advised = ut.sparse(*numbers, **named)
    assert advised.width == int(hint[2])
    assert ut.solve(advised, wanted).residual == 0


@functools.cache
def other(make):
    if make == "random":
        return fast(lambda: ut.random(jax.random.key(0), 2, 2, 4, 3, 2))()
    return ut.sparse(2, 2, 4, 3, 2, kind=make)


def test_other_mismatches():
    compressed = ut.sparse(2, 1, 4, 3, 2, kind="compressed")
    with pytest.raises(ValueError, match="3 columns of queries and keys, not 4"):
        ut.program(compressed, target(0, (2, 1, 5, 3, 2)))
    flat = ut.sparse(2, 2, 4, 3, 2, scale=0)
    with pytest.raises(ValueError, match="a scale other than 0"):
        ut.program(flat, target(0, (2, 2, 4, 3, 2)))
    wanted, machine = target(0, (2, 2, 4, 3, 2), scale=0), other("untied")
    E, x = np.asarray(ut.program(machine, wanted)), tokens(0, 3, 4)
    assert relative(formula(machine, x @ E)[2], formula(wanted, x)[2]) < 1e-13
    with pytest.raises(ValueError, match="target must be an AttentionTransformer, got Routing"):
        ut.program(machine, machine.query)
    with pytest.raises(ValueError, match="the target's weights must be known"):
        jax.eval_shape(lambda t: ut.program(machine, t), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svflow.memory._host", lambda: 10**4)
        with pytest.raises(MemoryError, match=r"equations of a program, 44 columns of 55, would"):
            ut.program(other("random"), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_registers_hold_what_they_say(kind):
    heads = 1 if kind in KINDS[:2] else 2
    wanted = target(4, (3, heads, 4, 3, 2), residual=kind == "residual", scale=0.5)
    machine = ut.sparse(3, heads, 4, 3, 2, kind=kind, scale=0.25)
    E = np.asarray(ut.program(machine, wanted))
    query, key, value, unembed = (np.asarray(kernel[...]) for kernel in wanted.maps)
    found = ut.registers(machine)
    held = np.unique(np.concatenate([columns for _, columns in found]))
    assert np.array_equal(held, np.arange(machine.width))
    first = [columns[0] for _, columns in found]
    assert first == sorted(first)
    for slot, columns in found:
        V = np.eye(4)
        for layer, head in slot.path:
            V = V @ value[layer, head]
        place = slot.layer, slot.head
        if slot.kind == "output":
            expected = V @ unembed
        elif kind == "compressed":
            product = 2 * V @ query[place] @ key[place].T @ V.T
            expected = product if slot.kind == "query" else np.eye(4)
        else:  # the program makes up for half the scale
            expected = 2 * V @ query[place] if slot.kind == "query" else V @ key[place]
        np.testing.assert_allclose(E[:, columns], expected, rtol=0, atol=1e-14)
    paths = {slot.path for slot, _ in found if slot.kind == "output"}
    assert len(paths) == (heads + (kind == "residual")) ** 3
    lines = ut.register_table(found).splitlines()
    assert len(lines) == 1 + len(found)
    if kind == "untied":
        assert lines[0].split() == ["columns", "holds", "layer", "head", "path"]
        assert lines[1].split() == ["0-2", "query", "0", "0", "(none)"]
        assert lines[-1].split(maxsplit=2) == ["98-99", "output", "0.1 > 1.1 > 2.1"]


def test_columns_are_those_of_the_slots_in_order():
    wanted = target(4, (2, 2, 4, 3, 2))
    columns, found = path_columns(wanted), slots(wanted)
    assert [s.kind for s in found].count("output") == 4
    assert found[0] == ut.Slot("output", None, None, ((0, 0), (1, 0)))
    value, unembed = np.asarray(wanted.value[...]), np.asarray(wanted.unembedding[...])
    np.testing.assert_allclose(columns[:, :2], value[0, 0] @ value[1, 0] @ unembed, atol=1e-15)
    machine = ut.sparse(2, 2, 4, 3, 2)
    assert np.array_equal(path_columns(machine), np.eye(44)[:, path_sources(machine)])
    with pytest.raises(ValueError, match="only in a machine of routings"):
        ut.registers(wanted)


def test_attention_matching_finds_the_head_that_differs():
    wanted, machine = target(4, (2, 2, 4, 3, 2)), ut.sparse(2, 2, 4, 3, 2)
    x = jnp.asarray(tokens(1, 5, 4))
    exact = ut.attention_matching(machine, wanted, x)
    assert exact.logits.shape == exact.attention.shape == (2, 2)
    assert max(exact.logits.max(), exact.attention.max(), exact.output) < 1e-13
    # The key that layer 1's head 0 reads along a path through head 1, left out.
    E = ut.program(machine, wanted)
    place = next(
        r.columns for r in ut.registers(machine) if r.slot == ut.Slot("key", 1, 0, ((0, 1),))
    )
    broken = ut.attention_matching(machine, wanted, x, program=E.at[:, place].set(0))
    for errors in (broken.logits, broken.attention):
        assert errors[1, 0] > 1e-3
        assert np.delete(errors.reshape(-1), 2).max() < 1e-13
    assert broken.output > 1e-4
    with pytest.raises(ValueError, match=r"program must have shape \(4, 44\), got \(4, 43\)"):
        ut.attention_matching(machine, wanted, x, program=E[:, 1:])
    with pytest.raises(ValueError, match="program is float32, but x is float64"):
        ut.attention_matching(machine, wanted, x, program=E.astype(jnp.float32))
    listed = ut.attention_matching(machine, wanted, x.tolist(), program=E.tolist())
    assert listed.output == exact.output


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_tree_shows_every_path(theme):
    for kind, leaves in (("untied", 8), ("residual", 27), ("looped", 8)):
        found = ut.registers(ut.sparse(3, 2, 4, 3, 2, kind=kind))
        axes = path_tree(Figure().subplots(), found, theme=theme, title=kind)
        children = 3 if kind == "residual" else 2
        edges = [line for line in axes.lines if len(line.get_xdata()) == 2]
        assert len(edges) == sum(children**level for level in (1, 2, 3))
        names = [text.get_text() for text in axes.texts]
        assert len(names) == len(set(names)) == len(edges) + 1
        assert sum(line.get_xdata()[-1] == 3 for line in edges) == leaves
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["head 0", "head 1"] + ["around the layer"] * (kind == "residual")
    found = ut.registers(ut.sparse(4, 4, 4, 3, 2))
    with pytest.raises(ValueError, match="256 paths are too many to draw"):
        path_tree(Figure().subplots(), found, theme=theme)
