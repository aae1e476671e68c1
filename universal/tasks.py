"""Tasks to learn programs on: fresh sequences from a key, with exact labels.

Axes: `batch`; `tokens`, the whole input; `letters`, its part that a rule is about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from svflow.integers import is_integer, positive

PAD, OPEN, CLOSE, ASK = range(4)
"""The ids of `dyck1`."""
MUTATIONS = 10
"""The most swaps, and the most flips, of one sequence of `dyck1`."""
SYMBOLS = 2**20
"""The most letters, and the most hops, of `k_hop`: each is a row of a table."""


class Batch(NamedTuple):
    """Sequences and what is asked of them.

    Arguments:
        ids: (batch, tokens) int32.
        labels: (batch, tokens) int32, the class of each token; it has a meaning where `mask` is.
        mask: (batch, tokens) the tokens whose class is asked for, the only ones that a loss and an
            accuracy count.
    """

    ids: Int[Array, "batch tokens"]
    labels: Int[Array, "batch tokens"]
    mask: Bool[Array, "batch tokens"]


class Task(NamedTuple):
    """A generator and its sizes.

    Arguments:
        name: with everything that the generator depends on: a checkpoint is of one task.
        draw: (key, batch) -> `Batch`, a pure function.
        vocab: how many ids there are.
        tokens: the length of a sequence.
        classes: how many labels there are.
        padding: the id of tokens that fill a sequence up, if there is one.
        symbols: (vocab,) how the ids are written; None for their numbers.
    """

    name: str
    draw: Callable[[Array, int], Batch]
    vocab: int
    tokens: int
    classes: int
    padding: int | None = None
    symbols: tuple[str, ...] | None = None


class Summary(NamedTuple):
    """What a batch is made of.

    Arguments:
        classes: (classes,) the share of each label among the tokens that are asked for.
        lengths: (tokens + 1,) the share of sequences with n tokens that are not padding.
        asked: (tokens + 1,) the share of sequences with n tokens that are asked for.
    """

    classes: Float[np.ndarray, " classes"]
    lengths: Float[np.ndarray, " lengths"]
    asked: Float[np.ndarray, " lengths"]


@functools.partial(jax.jit, static_argnums=1, static_argnames="pairs")
def dyck1(key: Array, batch: int, *, pairs: int = 30) -> Batch:
    """Is a string of parentheses balanced? Asked once, at the "?" behind it.

    One sequence in three is uniform: a length in 1 .. 2 pairs, then symbols. The others begin as
    a balanced string of 1 .. `pairs` pairs, drawn recursively: "(" u ")" v, where u has a uniform
    share of the pairs that are left, v the others. Half of these stay; the rest have symbols
    swapped, symbols flipped, or both, one time in three each, their number geometric with mean 2
    (and at most `MUTATIONS`). They may still be balanced: every label is computed from the symbols.

    Arguments:
        key: of the draw.
        batch: how many sequences.
        pairs: the most pairs.

    Returns:
        ids of 2 pairs + 3 tokens, padded behind the "?"; labels 1 for balanced, else 0.

    Raises:
        ValueError: numbers that are not positive integers.

    Source: after Zhong and Andreas, "Algorithmic capabilities of random transformers", 2024, whose
    sequences have room for the answer behind the "?"; the recursion's law is a choice made here.
    """
    batch, pairs = positive("batch", batch), positive("pairs", pairs)
    # One draw for all: each is a program of hundreds of operations.
    shares = jax.random.uniform(key, (batch, 4 * pairs + 6 + 3 * MUTATIONS), jnp.float32)
    return jax.vmap(functools.partial(_dyck1, pairs=pairs))(shares)


def _below(share, count):
    """A share in [0, 1) as an integer in 0 .. count - 1."""
    scaled = share * jnp.asarray(count, share.dtype)
    return jnp.minimum(scaled.astype(jnp.int32), jnp.asarray(count, jnp.int32) - 1)


def _dyck1(shares, pairs: int) -> Batch:
    most = 2 * pairs
    noise, inside, single, places = jnp.split(shares, [most, 2 * most, 2 * most + 6])
    count = 1 + _below(single[0], pairs)
    source = _below(single[1], 6)  # 0, 1: uniform; 2, 3: unchanged; 4, 5: mutated
    length = jnp.where(source < 2, 1 + _below(single[2], most), 2 * count)
    opens = jnp.where(source < 2, noise < 0.5, _balanced(inside, count))
    mutated = _mutated(opens, _below(places.reshape(3, MUTATIONS), length), single[3:])
    opens = jnp.where(source < 4, opens, mutated)
    place = jnp.arange(most + 3, dtype=jnp.int32)
    symbol = jnp.pad(jnp.where(opens, OPEN, CLOSE), (0, 3))
    ids = jnp.where(place < length, symbol, jnp.where(place == length, ASK, PAD))
    step = jnp.where(symbol == OPEN, 1, -1)
    height = jnp.cumsum(jnp.where(place < length, step, 0))
    label = (jnp.min(height) >= 0) & (height[-1] == 0)
    asked = place == length
    return Batch(ids.astype(jnp.int32), (asked & label).astype(jnp.int32), asked)


def _balanced(shares, count):
    """A balanced string of `count` pairs, True for "(", in the first 2 count places.

    A stack holds what is still to be written: n > 0 for a string of n pairs, -1 for a ")".
    """
    stack = jnp.zeros(shares.shape[0] + 3, jnp.int32).at[0].set(count)

    def write(state, share):
        stack, top = state
        n = stack[top]
        opens = n > 0
        inside = _below(share, n)
        behind = n - 1 - inside
        # v first, which comes last; a string of no pairs is not kept.
        below = top + jnp.where(behind > 0, 1, 0)
        above = below + jnp.where(inside > 0, 1, 0)
        grown = stack.at[top].set(behind).at[below].set(-1).at[below + 1].set(inside)
        # Below its bottom the top stays -1, a place that is never filled: no more is opened.
        after = jnp.where(opens, above, jnp.maximum(top - 1, -1))
        return (jnp.where(opens, grown, stack), after), opens

    return jax.lax.scan(write, (stack, jnp.int32(0)), shares)[1]


def _mutated(opens, places, shares):
    """Swaps of the places of two rows, and flips of those of the third."""
    kind = _below(shares[0], 3)  # swaps, flips, both
    # Of a geometric number more than n with probability 2^-n.
    number = jnp.arange(MUTATIONS, dtype=jnp.int32)
    swaps, flips = (share < 0.5 ** number.astype(share.dtype) for share in shares[1:])

    def swap(opens, turn):
        wanted, i, j = turn
        return jnp.where(wanted, opens.at[i].set(opens[j]).at[j].set(opens[i]), opens), None

    opens = jax.lax.scan(swap, opens, (swaps & (kind != 1), places[0], places[1]))[0]
    turns = (flips & (kind != 0)).astype(jnp.int32)
    times = jnp.sum(
        jnp.where(
            jnp.arange(opens.shape[0], dtype=jnp.int32) == places[2][:, None], turns[:, None], 0
        ),
        0,
    )
    return opens ^ (times % 2 == 1)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("length", "alphabet", "hops"))
def k_hop(
    key: Array,
    batch: int,
    *,
    length: int = 100,
    alphabet: int = 4,
    hops: tuple[int, int] = (0, 16),
) -> Batch:
    r"""Induction heads in a row: from each letter, k times to the letter behind its last one.

        find_1(i) = max({0} u {j <= i : X_{j-1} = X_i}),   find_k = find_1 o find_{k-1},

    with places from 1 on and find_1(0) = 0; the label of place i is X_{find_k(i)}, or "none" where
    find_k(i) = 0, which is not asked for. Of b a e b c a b e b d e a the label of the last letter
    is b for k = 1 and c for k = 2.

    Arguments:
        key: of the draw.
        batch: how many sequences.
        length: of the string X, which repeats no letter right away.
        alphabet: how many letters there are, at least two.
        hops: the least and the largest k, drawn uniformly for each sequence.

    Returns:
        ids of 1 + length tokens: alphabet + k, then the letters 0 .. alphabet - 1. Labels: a
        letter, or `alphabet` for "none".

    Raises:
        ValueError: wrong numbers.

    Source: Sanford, Hsu and Telgarsky, "Transformers, parallel computation, and logarithmic
    depth", 2024.

    Examples:
        >>> batch = k_hop(jax.random.key(0), 2, length=9, hops=(1, 2))
        >>> batch.ids.shape, sorted({int(i) for i in batch.ids[:, 0]} | {5, 6})  # 4 letters, then k
        ((2, 10), [5, 6])
    """
    batch, length = positive("batch", batch), positive("length", length)
    alphabet, (least, most) = _letters(alphabet), _hops(hops)
    draw = functools.partial(_k_hop, alphabet=alphabet, least=least, most=most)
    return jax.vmap(draw)(jax.random.uniform(key, (batch, length + 1), jnp.float32))


def _letters(alphabet) -> int:
    if positive("alphabet", alphabet) < 2:
        raise ValueError("alphabet must be at least 2: the string repeats no letter right away")
    if alphabet > SYMBOLS:
        raise ValueError(f"alphabet must be at most {SYMBOLS}, got {alphabet}")
    return int(alphabet)


def _hops(hops) -> tuple[int, int]:
    pair = isinstance(hops, tuple) and len(hops) == 2 and all(is_integer(k, 0) for k in hops)
    if not pair or hops[0] > hops[1]:
        raise ValueError(f"hops must be two numbers, (the least, the largest k), got {hops!r}")
    if hops[1] > SYMBOLS:
        raise ValueError(f"hops must be at most {SYMBOLS}, got {hops!r}")
    return int(hops[0]), int(hops[1])


def _k_hop(shares, alphabet: int, least: int, most: int) -> Batch:
    length = shares.shape[0] - 1
    k = least + _below(shares[0], most - least + 1)
    moves = (1 + _below(shares[1:], alphabet - 1)).at[0].set(_below(shares[1], alphabet))
    letters = jnp.cumsum(moves).astype(jnp.int32) % alphabet
    # find_1 as a table over the places 0 .. length, 0 for none.
    place = jnp.arange(1, length + 1, dtype=jnp.int32)
    same = (letters[:, None] == letters[None, :]) & (place[None, :] < place[:, None])
    find = jnp.max(jnp.where(same, place[None, :] + 1, 0), axis=1)
    find = jnp.pad(find, (1, 0))

    def hop(at, number):
        return jnp.where(number < k, find[at], at), None

    at = jax.lax.scan(hop, place, jnp.arange(most, dtype=jnp.int32))[0]
    found = jnp.pad(letters, (1, 0), constant_values=alphabet)[at]
    labels = jnp.pad(found, (1, 0), constant_values=alphabet)
    ids = jnp.concatenate([(alphabet + k)[None], letters])
    return Batch(ids, labels, labels < alphabet)


def dyck1_task(pairs: int = 30) -> Task:
    """`dyck1` as a task of two classes."""
    return _dyck1_task(positive("pairs", pairs))


@functools.cache
def _dyck1_task(pairs: int) -> Task:
    draw = functools.partial(dyck1, pairs=pairs)
    return Task(f"dyck1(pairs={pairs})", draw, 4, 2 * pairs + 3, 2, PAD, ("", "(", ")", "?"))


def k_hop_task(length: int = 100, alphabet: int = 4, hops: tuple[int, int] = (0, 16)) -> Task:
    """`k_hop` as a task; with hops = (k, k) it asks a model of larger hops for one k."""
    return _k_hop_task(positive("length", length), _letters(alphabet), _hops(hops))


@functools.cache
def _k_hop_task(length: int, alphabet: int, hops: tuple[int, int]) -> Task:
    draw = functools.partial(k_hop, length=length, alphabet=alphabet, hops=hops)
    name = f"k_hop(length={length}, alphabet={alphabet}, hops={hops})"
    letters = (chr(ord("a") + n) if alphabet <= 26 else f"x{n}" for n in range(alphabet))
    symbols = (*letters, *(str(k) for k in range(hops[1] + 1)))
    vocab = len(symbols)
    return Task(name, draw, vocab, length + 1, alphabet, symbols=symbols)


def summary(task: Task, key: Array, batch: int = 10_000) -> Summary:
    """The balance of classes and the distribution of lengths, over one draw of a task."""
    ids, labels, mask = (np.asarray(part) for part in task.draw(key, positive("batch", batch)))
    lengths = np.sum(ids != (-1 if task.padding is None else task.padding), axis=1)
    asked = np.sum(mask, axis=1)
    return Summary(
        np.bincount(labels[mask], minlength=task.classes) / max(mask.sum(), 1),
        np.bincount(lengths, minlength=task.tokens + 1) / batch,
        np.bincount(asked, minlength=task.tokens + 1) / batch,
    )


def check_task(task) -> None:
    """Raises ValueError for what is no task, and where its batches are not what it says."""
    if not isinstance(task, Task):
        raise ValueError(f"task must be a Task, such as dyck1_task(), got {type(task).__name__}")
    if not isinstance(task.name, str):
        raise ValueError(f"a task's name must be a str, got {task.name!r}")
    try:
        hash(task)
    except TypeError as error:
        raise ValueError(f"{task.name} has a field that cannot be hashed: {error}") from error
    for name in ("vocab", "tokens", "classes"):
        positive(f"{task.name}: {name}", getattr(task, name))
    if not callable(task.draw):
        raise ValueError(f"{task.name}: draw must be a function of (key, batch), got {task.draw!r}")
    drawn = jax.eval_shape(lambda key: task.draw(key, 2), jax.random.key(0))
    if not isinstance(drawn, Batch):
        raise ValueError(f"{task.name} draws a {type(drawn).__name__}, not a Batch")
    shapes = [part.shape for part in drawn]
    if shapes != [(2, task.tokens)] * 3:
        raise ValueError(
            f"{task.name} draws ids, labels and a mask of {shapes} for a batch of 2, not of "
            f"{(2, task.tokens)}"
        )
    types = [part.dtype for part in drawn]
    for name, dtype, kind in zip(Batch._fields, types, (jnp.integer, jnp.integer, jnp.bool_)):
        if not jnp.issubdtype(dtype, kind):
            raise ValueError(f"{task.name} draws {name} of {dtype}, not of {kind.__name__}")
