"""One text's layers as a power method, of a model and of the same architecture untrained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jax.typing import ArrayLike
from jaxtyping import Int

from svflow.models.transformer import Transformer
from svflow.power.flow import PowerFlow
from svflow.power.study import Study, study
from svflow.power.theory import Prediction, predict
from svflow.spectra.controls import beside_untrained


class Panel(NamedTuple):
    """What a portrait shows of the power method.

    Arguments:
        seed: the untrained weights are of `jax.random.key(seed)`.
        model, untrained: the `study` of both on the same ids.
        prediction: where all layers share one matrix, the long run of the reduced system; else
            None.
    """

    seed: int
    model: Study
    untrained: Study
    prediction: Prediction | None


def panel(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"],
    *,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Panel:
    """The power-method study of a model and of its architecture at initialisation.

    Arguments:
        model: any family.
        ids: (tokens,).
        seed: of the untrained weights.
        progress: wraps the range over the two, for example `tqdm.tqdm`.

    Dense solvers on the host take layers * width^3, twice.

    Raises:
        ValueError: as `study`, of the model or of the untrained one.

    Source: Li and Altafini, arXiv 2605.25619, see `study`.
    """
    own, untrained = beside_untrained(lambda model: study(model, ids), model, seed, progress)
    flow = PowerFlow.from_model(model)
    prediction = predict(flow, tokens=own.tokens) if flow.shared and flow.width > 1 else None
    return Panel(int(seed), own, untrained, prediction)
