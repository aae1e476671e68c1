"""Programs that were learnt, and what they answer.

Axes: `seeds`; `tokens`; `vocab`; `width`, the machine's state; `classes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from svflow import Flow, ScanAdjoint, simulate
from svflow.integers import is_integer
from universal.accuracy import Accuracy
from universal.components import Blocks, reader
from universal.tasks import Task


class Embedding(NamedTuple):
    """What is learnt: x_i = tokens[id_i] + positions[i], and the output U.

    Arguments:
        tokens: (vocab, width); positions: (tokens, width); unembed: (width, classes).
    """

    tokens: Float[Array, "vocab width"]
    positions: Float[Array, "tokens width"]
    unembed: Float[Array, "width classes"]


class Trained(NamedTuple):
    """Programs that were learnt, one per seed.

    Arguments:
        embedding: what was learnt, with a leading axis of seeds.
        flow: the machine, with a leading axis of seeds on its arrays; of one `Flow` that was given,
            that flow.
        test: the accuracy on fresh sequences at the end, one per seed.
        losses: (steps, seeds) of the steps that were taken.
        evaluated: (evaluations,) after how many steps they were made, 0 the first.
        validation: (evaluations, seeds) their accuracies.
        seconds: what training took, over all runs that it was continued in.
        settings: what `train` was asked.
        task: that of the training.
    """

    embedding: Embedding
    flow: Flow
    test: tuple[Accuracy, ...]
    losses: Float[np.ndarray, "steps seeds"]
    evaluated: Int[np.ndarray, " evaluations"]
    validation: Float[np.ndarray, "evaluations seeds"]
    seconds: float
    settings: dict[str, Any]
    task: Task

    @property
    def shared(self) -> bool:
        """Whether the flow is one that was given, which all seeds share."""
        return "arrays" in self.settings["machine"]

    @property
    def best(self) -> int:
        """The place of the most accurate program."""
        return int(np.argmax([one.value for one in self.test]))

    def program(self, place: int) -> tuple[Embedding, Flow]:
        """One of the programs and its machine, what `logits` takes; its axes are without seeds.

        Raises:
            ValueError: a place that is not one of 0 .. seeds - 1.
        """
        if not is_integer(place, 0, len(self.test) - 1):
            raise ValueError(f"place must be one of 0 .. {len(self.test) - 1}, got {place!r}")
        embedding = jax.tree.map(lambda table: table[place], self.embedding)
        if self.shared:
            return embedding, self.flow
        return embedding, jax.tree.map(lambda array: array[place], self.flow)


def embedded(embedding: Embedding, ids: Int[Array, " tokens"]) -> Float[Array, "tokens width"]:
    """The state that enters the first layer.

    Raises:
        ValueError: more ids than the tables have places.
    """
    if ids.shape[0] > embedding.positions.shape[0]:
        raise ValueError(
            f"{ids.shape[0]} ids, but the tables have {embedding.positions.shape[0]} places"
        )
    with jax.default_matmul_precision("highest"):
        # As a product: the derivative of a gather is a scatter, which is slow on every device.
        one_hot = jax.nn.one_hot(ids, embedding.tokens.shape[0], dtype=embedding.tokens.dtype)
        return one_hot @ embedding.tokens + embedding.positions[: ids.shape[0]]


def logits(
    embedding: Embedding, flow: Flow, ids: Int[Array, " tokens"]
) -> Float[Array, "tokens classes"]:
    """The output of every token of one sequence, simulated from its embedding.

    Arguments:
        embedding, flow: of one seed.
        ids: at most as many as the tables have places; one that the table of tokens has not is a
            row of zeros.

    Raises:
        ValueError: more ids than places.
    """
    x = embedded(embedding, ids)
    x = x.astype(floating(flow) or x.dtype)
    if isinstance(flow, Blocks) and flow.routed:
        # Layers of routings are programs of their own: known ones, so that none is chosen at run
        # time.
        for layer in range(flow.depth):
            x = flow.step(layer, x)
    else:
        adjoint = ScanAdjoint(checkpoint=False)
        x = simulate(flow, x, ts=[float(flow.depth)], adjoint=adjoint).xs[-1]
    with jax.default_matmul_precision("highest"):
        return reader(flow)(x).astype(embedding.unembed.dtype) @ embedding.unembed


def floating(flow: Any) -> Any:
    """The type of a flow's weights; None where there are none."""
    types = (leaf.dtype for leaf in jax.tree.leaves(flow))
    return next((dtype for dtype in types if jnp.issubdtype(dtype, jnp.floating)), None)
