"""How often learnt programs are right, on sequences from streams of keys of their own.

Axes: `seeds`; `count`, sequences; `tokens`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from svflow.integers import is_integer, positive
from svflow.sharding import gathered, over_data
from universal.accuracy import CLAIM, Accuracy
from universal.learnt import Trained, logits
from universal.tasks import Batch, Task, check_task

TRAIN, VALIDATION, TEST, START, MACHINE = range(5)  # Streams of keys of one seed.


TOGETHER = 20
"""Batches of a training that are drawn as one program."""
PATIENCE = 100
"""Draws, for each sequence that is wanted, after which unseen ones count as not to be had."""


@functools.partial(jax.jit, static_argnames=("task", "count", "axis"))
def _answers(embedding, flow, keys, *, task: Task, count: int, axis):
    """(5, seeds, count) of each sequence: tokens that are right, asked for, ids and labels that are
    none, and answers that are not finite. And, (seeds, count, tokens), all ids, and the labels, -1
    where none is asked for."""

    def one(embedding, flow, key):
        batch = jax.tree.map(over_data, task.draw(key, count))
        ids, labels, mask = batch
        scores = jax.vmap(functools.partial(logits, embedding, flow))(ids)
        counted = (
            (jnp.argmax(scores, axis=-1).astype(labels.dtype) == labels) & mask,
            mask,
            *outside(task, batch),
            mask & ~jnp.all(jnp.isfinite(scores), axis=-1),
        )
        counts = jnp.stack([jnp.sum(part, axis=1, dtype=jnp.int32) for part in counted])
        return counts, ids, jnp.where(mask, labels, -1)

    return jax.vmap(one, in_axes=(0, axis, 0), out_axes=(1, 0, 0))(embedding, flow, keys)


def outside(
    task: Task, batch: Batch
) -> tuple[Bool[Array, "batch tokens"], Bool[Array, "batch tokens"]]:
    """Which ids are none of the task's, and which labels that are asked for."""
    ids, labels, mask = batch
    strange = (labels < 0) | (labels >= task.classes)
    return (ids < 0) | (ids >= task.vocab), mask & strange


@functools.partial(jax.jit, static_argnames=("task", "batch"))
def _ids(keys, *, task: Task, batch: int):
    """(steps, batch, tokens) of the batches of these keys."""
    return jax.lax.map(lambda key: task.draw(key, batch).ids, keys)


@jax.jit
def _keys(seeds: Int[Array, " seeds"], path: Int[Array, " path"]) -> Array:
    """A key of every seed, at the end of a path of numbers that begins with the stream."""

    def one(seed):
        return jax.lax.fori_loop(
            0, path.shape[0], lambda k, key: jax.random.fold_in(key, path[k]), jax.random.key(seed)
        )

    return jax.vmap(one)(seeds)


def stream_of(seeds: Sequence[int], stream: int, step: int = 0, number: int = 0) -> Array:
    return _keys(np.asarray(seeds, np.uint32), np.asarray([stream, step, number], np.uint32))


def evaluate(
    learnt: Trained,
    task: Task,
    *,
    sequences: int = CLAIM,
    batch: int = 256,
    seeds: Sequence[int] | None = None,
    unseen: bool = False,
) -> tuple[Accuracy, ...]:
    """The accuracies of learnt programs on fresh draws, one per program.

    The draws are of keys that no training has used. Where a task has few strings, as Dyck-1 of few
    pairs, many of them are strings that the training has drawn too: `unseen` leaves those out.

    Arguments:
        learnt: of `train`.
        task: it may be another than that of the training, with ids that the tables have.
        sequences: at least so many, whole batches.
        batch: how many of them at a time.
        seeds: of the sequences, one for each program; by default those of the training, whose own
            last test, in batches of `Settings.batch`, was of the same sequences.
        unseen: whether only sequences count of which the training has drawn no equal, all ids
            compared. All of its batches are drawn again, and as many of the test as are needed.

    Raises:
        ValueError: what is not `Trained` or no task; a task that does not fit the tables, or that
            asks for nothing; numbers that are not positive integers; seeds that are not different
            integers, one for each program; too few unseen sequences among a hundred times as many
            draws as are asked for.
        FloatingPointError: answers that are not finite.
    """
    check_fits(learnt, task)
    own = learnt.settings["seeds"]
    chosen = check_seeds(own if seeds is None else seeds)
    if len(chosen) != len(own):
        raise ValueError(f"{len(chosen)} seeds for {len(own)} programs")
    sequences, batch = positive("sequences", sequences), positive("batch", batch)
    training = len(learnt.losses), learnt.settings["training"]["batch"]
    but = [drawn(learnt.task, seed, *training) for seed in own] if unseen else None
    return accuracies(
        learnt.embedding, learnt.flow, task, chosen, sequences, batch=batch, stream=TEST,
        axis=None if learnt.shared else 0, but=but,
    )  # fmt: skip


def accuracies(
    embedding, flow, task: Task, seeds: Sequence[int], sequences: int, *, batch: int, stream: int,
    step: int = 0, axis: int | None, but: Sequence[Set[bytes]] | None = None,
) -> tuple[Accuracy, ...]:  # fmt: skip
    """On the sequences of a step of a stream; `axis` is that of the seeds in the flow's arrays.

    `but`: of each seed, digests of sequences that do not count.
    """
    size = min(batch, sequences)
    total, shape = np.zeros((5, len(seeds)), np.int64), np.zeros((2, len(seeds)), np.int64)
    classes = np.zeros((len(seeds), task.classes), np.int64)
    draws, kept = 0, np.zeros(len(seeds), np.int64)
    while kept.min() < sequences:
        if draws >= PATIENCE * sequences:
            raise ValueError(
                f"{task.name}: of {draws} draws {kept.min()} are sequences that the training of "
                f"seed {seeds[int(kept.argmin())]} has not drawn, {sequences} are asked for"
            )
        keys = stream_of(seeds, stream, step, draws // size)
        found = _answers(embedding, flow, keys, task=task, count=size, axis=axis)
        counts, ids, labels = map(gathered, found)
        each = counts.astype(np.int64)  # squares of what int32 holds need more
        draws += size
        kept += size
        if but is not None:
            pairs = zip(but, ids)
            old = np.asarray([[one in seen for one in digests(rows, task)] for seen, rows in pairs])
            each, labels = np.where(old, 0, each), np.where(old[..., None], -1, labels)
            kept -= old.sum(axis=1)
        total += each.sum(axis=-1)
        shape += np.stack([np.sum(each[1] > 0, axis=-1), np.sum(each[1] ** 2, axis=-1)])
        for place, row in enumerate(labels):
            known = row[(row >= 0) & (row < task.classes)]
            classes[place] += np.bincount(known, minlength=task.classes)
    check_ids(task, total[2], total[3])
    if not total[1].all():
        raise ValueError(f"{task.name} asks for no token: all masks are empty")
    if total[4].any():
        seed = seeds[int(np.argmax(total[4] > 0))]
        raise FloatingPointError(f"seed {seed}: answers are not finite")
    columns = [*total[:2], *shape, np.full(len(seeds), draws), classes.max(axis=1)]
    return tuple(Accuracy(*map(int, column)) for column in zip(*columns))


def drawn(task: Task, seed: int, steps: int, batch: int) -> set[bytes]:
    """Digests of all sequences that so many steps of the training of a seed have drawn."""
    found: set[bytes] = set()
    for first in range(0, steps, TOGETHER):
        # Beyond the last step too, so that there is one program; those are cut off again.
        keys = jnp.concatenate(
            [stream_of((seed,), TRAIN, step) for step in range(first, first + TOGETHER)]
        )
        ids = np.asarray(_ids(keys, task=task, batch=batch))[: steps - first]
        found.update(digests(ids.reshape(-1, ids.shape[-1]), task))
    return found


def digests(ids: np.ndarray, task: Task) -> Iterator[bytes]:
    """Of each row, without what fills it up: a string is the same in tasks of other lengths."""
    filled = np.ones(ids.shape, bool) if task.padding is None else ids != task.padding
    lengths = ids.shape[1] - np.argmax(filled[:, ::-1], axis=1)
    for row, length in zip(np.ascontiguousarray(ids, np.int64), lengths):
        yield hashlib.blake2b(row[:length].tobytes(), digest_size=16).digest()


def check_fits(learnt: Trained, task: Task) -> None:
    """Raises ValueError for what `train` has not returned, and where a task is too large."""
    if not isinstance(learnt, Trained):
        raise ValueError(f"learnt must be what train returns, got {type(learnt).__name__}")
    check_task(task)
    tables = learnt.embedding
    sizes = tables.tokens.shape[-2], tables.positions.shape[-2], tables.unembed.shape[-1]
    for name, has, needs in zip(
        ("ids", "tokens", "classes"), sizes, (task.vocab, task.tokens, task.classes)
    ):
        if has < needs:
            raise ValueError(f"{task.name} needs {needs} {name}, but the tables have {has}")


def check_ids(task: Task, ids, labels) -> None:
    """Raises ValueError where any ids or labels are counted that are outside the task's sizes."""
    for name, outside, count in (("ids", ids, task.vocab), ("labels", labels, task.classes)):
        if np.any(outside):
            raise ValueError(f"{task.name} draws {name} that are not within 0 .. {count - 1}")


def check_seeds(seeds) -> tuple[int, ...]:
    """As Python's integers; raises ValueError unless they are different ones."""
    given = seeds.tolist() if isinstance(seeds, jax.Array | np.ndarray) else seeds
    given = list(given) if isinstance(given, Iterable) else [given, given]
    numbers = [int(s) for s in given if is_integer(s, 0, 2**32 - 1)]
    if not numbers or len(numbers) < len(given) or len(set(numbers)) < len(given):
        raise ValueError(f"seeds must be different integers from 0 to 2^32 - 1, got {seeds!r}")
    return tuple(numbers)
