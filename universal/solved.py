"""What a learnt program does: a sequence that it answers, its attention, the spectra of its tables.

Axes: `layers`; `heads`; `tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from svflow.integers import positive
from universal.components import Blocks
from universal.evaluation import check_fits
from universal.learnt import Trained, embedded, logits
from universal.tasks import Task


class Solved(NamedTuple):
    """One sequence with every token that is asked for answered rightly.

    Arguments:
        seed: the place of the program among those that were learnt.
        ids: (tokens,).
        symbols: (tokens,) how they are written.
        labels: (tokens,) the right answers, -1 where none is asked for.
        attention: (layers, heads, tokens, tokens).
    """

    seed: int
    ids: Int[np.ndarray, " tokens"]
    symbols: tuple[str, ...]
    labels: Int[np.ndarray, " tokens"]
    attention: Float[np.ndarray, "layers heads tokens tokens"]


def singular_values_of(learnt: Trained) -> Float[np.ndarray, " rank"]:
    """Those of E, the tables of tokens and places one below the other, of the best program."""
    tokens, positions, _ = map(np.asarray, learnt.program(learnt.best)[0])
    return np.linalg.svd(np.concatenate([tokens, positions]), compute_uv=False)


def solved(
    learnt: Trained, task: Task, *, tokens: int = 24, draws: int = 512, seed: int = 0
) -> Solved | None:
    """The longest sequence, cut to so many tokens, that the best program answers; None if none is.

    A cut needs a machine in which tokens attend only to their past: what is in front of it is then
    what it was.

    Arguments:
        learnt: of `train`, with a machine of a `Recipe`.
        task: that it was trained on, or of the same tables.
        tokens, draws: the most tokens that are kept, and how many sequences are tried.
        seed: of the draw.

    Raises:
        ValueError: what is not `Trained` or no task; a task that does not fit the tables; a machine
            that has no attention matrices, or that sees both sides of a token; numbers that are not
            positive integers.
    """
    check_fits(learnt, task)
    place = learnt.best
    embedding, flow = learnt.program(place)
    if not isinstance(flow, Blocks):
        raise ValueError(f"a {type(flow).__name__} has no attention matrices that are known here")
    if not flow.causal:
        raise ValueError("a sequence is cut, which a machine that sees both sides of it notices")
    size = min(positive("tokens", tokens), task.tokens)
    drawn = task.draw(jax.random.key(seed), positive("draws", draws))
    ids, labels, mask = (np.asarray(part) for part in drawn)
    inside = ~mask[:, size:].any(axis=1) if task.padding is not None else np.ones(len(ids), bool)
    ids, labels, mask = (part[:, :size] for part in (ids, labels, mask))
    found = np.asarray(jax.jit(jax.vmap(lambda one: logits(embedding, flow, one)))(ids))
    right = ((found.argmax(axis=-1) == labels) | ~mask).all(axis=1) & mask.any(axis=1) & inside
    lengths = np.sum(ids != (-1 if task.padding is None else task.padding), axis=1)
    if not right.any():
        return None
    chosen = int(np.argmax(np.where(right, lengths, 0)))
    size = int(lengths[chosen])
    row = ids[chosen, :size]
    names = task.symbols or tuple(map(str, range(task.vocab)))
    return Solved(
        seed=place,
        ids=row,
        symbols=tuple(names[one] for one in row),
        labels=np.where(mask, labels, -1)[chosen, :size],
        attention=_attention(embedding, flow, row),
    )


def _attention(embedding, flow: Blocks, ids) -> np.ndarray:
    x = embedded(embedding, jnp.asarray(ids))
    found = []
    for layer in range(flow.depth):
        found.append(np.asarray(flow.attention_at(layer, x)))
        x = flow.step(layer, x)
    return np.stack(found)
