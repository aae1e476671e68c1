"""One text's score flow: the metrics of a model and of the same architecture untrained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jax.typing import ArrayLike
from jaxtyping import Int

from svflow.models.transformer import Transformer
from svflow.score.metrics import Metrics, metrics
from svflow.spectra.controls import beside_untrained


class Panel(NamedTuple):
    """What a portrait shows of the score flow.

    Arguments:
        seed: the untrained weights are of `jax.random.key(seed)`.
        model, untrained: the `metrics` of both on the same ids.
    """

    seed: int
    model: Metrics
    untrained: Metrics


def panel(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"],
    *,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Panel:
    """The metrics of a model and of its architecture at initialisation.

    Arguments:
        model: any family.
        ids: (tokens,).
        seed: of the untrained weights.
        progress: wraps the range over the two, for example `tqdm.tqdm`.

    Raises:
        ValueError, MemoryError: as `metrics`, of the model or of the untrained one.

    Source: Liao, arXiv 2604.23740, see `metrics`.
    """
    own, untrained = beside_untrained(lambda model: metrics(model, ids), model, seed, progress)
    return Panel(int(seed), own, untrained)
