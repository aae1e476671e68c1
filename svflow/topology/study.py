"""Spectra of a checkpoint's layers beside the topology of its residual stream, over many sequences.

Axes: `sequences`; `layers`; `width`, the residual stream, whose coordinates are the nodes; `gains`,
see `svflow.topology.coupling.GAINS`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from svflow.integers import is_integer
from svflow.memory import check_memory
from svflow.models.transformer import Transformer
from svflow.resumable import Arrays, Rows, over_sequences, read
from svflow.simulate import simulate
from svflow.spectra.study import asked, measured, without_ginibre
from svflow.topology.analysis import DEFAULT, Options, Topology, norm_weights, topology
from svflow.topology.coupling import GAINS, squared_gains
from svflow.topology.graphs import Correlation, Moments


class Study(NamedTuple):
    """Spectra and topology of every layer.

    Arguments:
        samples: by name, (sequences, layers): the measures of `svflow.spectra.Measures`, and the
            effective rank and participation ratio of the products J_l ... J_1.
        ginibre: by name, (sequences, layers): what a Gaussian matrix of the same width and norm
            gives.
        gain: (gains, layers, width) root mean squares over sequences.
        topology: of the states before each layer, those of all sequences, and these gains.
        states: how many states there were.
        settings: token, scope, skip and the rest of what the file was made with.
        options: how the topology was found.
    """

    samples: dict[str, Float[np.ndarray, "sequences layers"]]
    ginibre: dict[str, Float[np.ndarray, "sequences layers"]]
    gain: Float[np.ndarray, "gains layers width"]
    topology: Topology
    states: int
    settings: dict[str, Any]
    options: Options


def study(
    model: Transformer,
    sequences: Sequence[Sequence[int] | np.ndarray],
    out: str | os.PathLike[str],
    *,
    token: int = -1,
    scope: str = "frozen",
    skip: int = 1,
    top: int | None = None,
    tau: float = 1e-6,
    options: Options = DEFAULT,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Study:
    """Spectral measures and gains of every layer's Jacobian beside the communities of its states.

    What takes long stands in the file, which is replaced after each sequence: a run that was killed
    continues after the last one it finished, and so does a call with more sequences. The topology
    is found from it at the end, so that `load_study` with other `options` computes no Jacobian.

    A finding needs the same study of `controls.initialisation(key, model)` beside it, in a file of
    its own; `table` takes both.

    Arguments:
        model: the model.
        sequences: token ids, each long enough to have `token` and more than `skip`. With fewer
            states than the width in all, correlations are of deficient rank, and mostly noise of
            size 1 / sqrt(states).
        out: the .npz file, made or continued. It holds float64 sums of layers * width^2.
        token, scope: whose Jacobian, see `svflow.jacobian`; "isolated" or "frozen".
        skip: how many tokens at the beginning are left out of the correlations. By default the
            first: in trained models its state is often many times longer than all others, along few
            coordinates, and then decides their correlations by itself.
        top, tau: see `svflow.measures`.
        options: how the topology is found.
        progress: wraps the range over sequences, and then that over layers; `tqdm.tqdm`, say.

    Raises:
        ValueError: a sequence or a setting that does not fit, before anything is computed; a file
            that was made by another model, with other settings or from other sequences; a Jacobian
            that is not finite.
        MemoryError: sums that do not fit.
        ImportError: without the extra `topology`.
    """
    if not is_integer(skip):
        raise ValueError(f"skip must be an int, got {skip!r}")
    if skip < 0:
        raise ValueError(f"skip must not be negative, got {skip}")
    ids, common = asked(model, sequences, token=token, scope=scope, top=top, tau=tau)
    layers, width = model.flow.depth, model.flow.width
    options.check(width)
    for number, one in enumerate(ids):
        if one.size <= skip:
            raise ValueError(
                f"sequence {number} has {one.size} tokens, and none after the first {skip}"
            )
    if sum(one.size - skip for one in ids) < 2:
        raise ValueError("correlations need at least two states, got 1")
    check_memory(f"correlations of {layers} layers", 3 * 8 * layers * width * width, None)
    settings = dict(common, skip=int(skip), normal=False)
    over_sequences(out, settings, ids, functools.partial(_row, model, settings), progress=progress)
    return load_study(out, options=options, progress=progress)


def load_study(
    path: str | os.PathLike[str],
    *,
    options: Options = DEFAULT,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Study:
    """The study in a file, finished or not, its topology found by these options.

    Raises:
        ValueError: a file that holds no study of topology, or options that are none.
        ImportError: without the extra `topology`.
    """
    found = _read(path)
    options.check(found.settings["width"])
    squares = found.carried["squares"] / len(found.sequences)

    def correlations(layer: int) -> Correlation:
        return _moments(found.carried, layer).correlation()

    samples, ginibre = without_ginibre(found.rows)
    norms = found.carried["norm_weights"]
    return Study(
        samples=samples,
        ginibre=ginibre,
        gain=np.sqrt(squares),
        topology=topology(correlations, squares, norms, options, progress=progress),
        states=int(found.carried["count"]),
        settings=found.settings,
        options=options,
    )


def load_correlation(path: str | os.PathLike[str], layer: int) -> Correlation:
    """The correlations of the states before a layer, from 0, in the file of a study.

    Raises:
        ValueError: a file that holds no study of topology, or a layer that it does not have.
    """
    found = _read(path)
    layers = found.settings["layers"]
    if not is_integer(layer, 0, layers - 1):
        raise ValueError(f"layer must be one of 0 .. {layers - 1}, got {layer!r}")
    return _moments(found.carried, layer).correlation()


def _read(path: str | os.PathLike[str]) -> Rows:
    found = read(path)
    if "scatter" not in found.carried:
        raise ValueError(f"{path} holds a study, but none of topology")
    return found


def _row(
    model: Transformer, settings: dict[str, Any], ids: np.ndarray, carried: Arrays
) -> tuple[Arrays, Arrays]:
    """A sequence's spectral measures; gains and moments joined to what is carried."""
    layers, width = settings["layers"], settings["width"]
    with jax.default_matmul_precision("highest"):
        xs = simulate(model.flow, model.embed(ids)).xs
    row, J = measured(model, ids, settings)
    if not carried:
        carried = dict(
            count=np.zeros((), np.int64),
            first=np.zeros((layers, width)),
            mean=np.zeros((layers, width)),
            scatter=np.zeros((layers, width, width)),
            squares=np.zeros((len(GAINS), layers, width)),
            norm_weights=norm_weights(model),
        )
    for layer in range(layers):
        moments = _moments(carried, layer)
        moments.add(np.asarray(xs[layer])[settings["skip"] :])
        for name in ("first", "mean"):
            carried[name][layer] = getattr(moments, name)
        carried["scatter"][layer] = moments.scatter.T
    carried["count"] = np.asarray(moments.count, np.int64)
    carried["squares"] += squared_gains(J)
    return row, carried


def _moments(carried: Arrays, layer: int) -> Moments:
    return Moments(
        int(carried["count"]),
        carried["first"][layer].copy(),
        carried["mean"][layer].copy(),
        carried["scatter"][layer].T,
    )
