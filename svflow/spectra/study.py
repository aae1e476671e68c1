"""Spectral measures over many sequences, in one file that a killed run continues from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from svflow.integers import is_integer
from svflow.models.transformer import Transformer
from svflow.resumable import Arrays, check_sequences, digest, over_sequences, read
from svflow.sharding import gathered, mesh_of
from svflow.spectra.jacobians import SCOPES, text_jacobians
from svflow.spectra.measures import SCALARS, check_top, measures
from svflow.spectra.products import cumulative
from svflow.spectra.schur import schur_normal

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PRODUCTS = ("cumulative_effective_rank", "cumulative_participation_ratio")
TOTAL = "sum_of_jacobians"
NORMAL = tuple(f"{name}_of_schur_normal" for name in PRODUCTS)


class Study(NamedTuple):
    """Measures of the layers' Jacobians over sequences.

    Arguments:
        samples: by name, (sequences, layers): the measures of `Measures`; the effective rank and
            participation ratio of the products J_l ... J_1 of each sequence; and of the products
            of `schur_normal` of every factor.
        ginibre: by name, (sequences, layers): what a Gaussian matrix of the same width and norm
            gives, see `Measures.ginibre`.
        mean: by name, (layers,): of the samples.
        quantiles: by name, (5, layers): at 0.05, 0.25, 0.5, 0.75 and 0.95.
        product_of_means: by name, (layers,): effective rank and participation ratio of the products
            of the mean Jacobians. That is another quantity than the mean over samples; empty
            without `mean_product`.
        settings: token, scope and the rest of what the study was asked.
    """

    samples: dict[str, Float[np.ndarray, "sequences layers"]]
    ginibre: dict[str, Float[np.ndarray, "sequences layers"]]
    mean: dict[str, Float[np.ndarray, " layers"]]
    quantiles: dict[str, Float[np.ndarray, "quantiles layers"]]
    product_of_means: dict[str, Float[np.ndarray, " layers"]]
    settings: dict[str, Any]


def study(
    model: Transformer,
    sequences: Sequence[Sequence[int] | np.ndarray],
    out: str | os.PathLike[str],
    *,
    token: int = -1,
    scope: str = "frozen",
    top: int | None = None,
    tau: float = 1e-6,
    normal: bool = True,
    mean_product: bool = True,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Study:
    """Measures of every layer's Jacobian for every sequence, their means and quantiles.

    The file is replaced by a longer one after each sequence, so that a run that was killed
    continues after the last sequence that it finished, and so does a call with more sequences. Each
    new length compiles for seconds: cut sequences to few lengths.

    What random matrices give stands in `ginibre`; a finding needs the same study of
    `controls.initialisation(key, model)` beside it, in a file of its own.

    Arguments:
        model: the model.
        sequences: token ids, each long enough to have `token`.
        out: the .npz file, made or continued; `load_study` reads it.
        token, scope: whose Jacobian, see `jacobian`; "isolated" or "frozen".
        top, tau: see `measures`.
        normal: also the products of `schur_normal` of every factor.
        mean_product: also the products of the mean Jacobians, whose sum (layers, width, width) in
            float64 the file then holds.
        progress: wraps the range over sequences, for example `tqdm.tqdm`.

    Raises:
        ValueError: a sequence or a setting that does not fit, with the sequence's number, before
            anything is computed; a file that was made by another model, with other settings or
            from other sequences; a Jacobian that is not finite.
    """
    ids, common = asked(model, sequences, token=token, scope=scope, top=top, tau=tau)
    settings = dict(common, normal=bool(normal), mean_product=bool(mean_product))

    def measure(ids: np.ndarray, carried: Arrays) -> tuple[Arrays, Arrays]:
        row, J = measured(model, ids, settings)
        if not mean_product:
            return row, carried
        total = carried[TOTAL] + J if carried else J
        return row, {TOTAL: total}

    over_sequences(out, settings, ids, measure, progress=progress)
    return load_study(out)


def load_study(path: str | os.PathLike[str]) -> Study:
    """The study in a file, finished or not. Raises ValueError for a file that holds none."""
    settings, sequences, samples, carried = read(path)
    products: dict[str, np.ndarray] = {}
    if TOTAL in carried:
        found = cumulative(jnp.asarray(carried[TOTAL] / len(sequences)))
        pair = (found.effective_rank, found.participation_ratio)
        products = {name: np.asarray(value) for name, value in zip(PRODUCTS, pair)}
    samples, ginibre = without_ginibre(samples)
    return Study(
        samples=samples,
        ginibre=ginibre,
        mean={name: values.mean(axis=0) for name, values in samples.items()},
        quantiles={
            name: np.quantile(values, QUANTILES, axis=0) for name, values in samples.items()
        },
        product_of_means=products,
        settings=settings,
    )


def asked(
    model: Transformer,
    sequences: Sequence[Sequence[int] | np.ndarray],
    *,
    token: int,
    scope: str,
    top: int | None,
    tau: float,
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The sequences as arrays, and the settings of any study of Jacobians; raises as `study`."""
    if not isinstance(model, Transformer):
        raise ValueError(f"a study needs a Transformer, got {type(model).__name__}")
    if scope not in SCOPES[:2]:
        raise ValueError(f"scope must be one of {SCOPES[:2]}, got {scope!r}")
    if not is_integer(token):
        raise ValueError(f"token must be an int, got {token!r}")
    if not 0 <= tau < np.inf:
        raise ValueError(f"tau must be finite and not negative, got {tau}")
    layers, width = model.flow.depth, model.flow.width
    top = check_top(top, width)
    checked = check_sequences(sequences, model)
    for number, ids in enumerate(checked):
        if not -ids.size <= token < ids.size:
            raise ValueError(f"sequence {number} has {ids.size} tokens, and no token {token}")
    settings = dict(model=digest(model), family=model.config.family, layers=layers, width=width)
    return checked, dict(settings, token=int(token), scope=scope, top=top, tau=float(tau))


def without_ginibre(rows: Arrays) -> tuple[Arrays, Arrays]:
    """The measures in rows of `measured`, and those of a Gaussian matrix."""
    prefix = "ginibre_"
    own = {name: values for name, values in rows.items() if not name.startswith(prefix)}
    return own, {name.removeprefix(prefix): rows[name] for name in rows if name not in own}


def measured(model, ids, settings) -> tuple[Arrays, np.ndarray]:
    """A sequence's row of measures, and the Jacobians (layers, width, width) in float64."""
    J = text_jacobians(model, ids, token=settings["token"], scope=settings["scope"])
    if mesh_of(J) is not None:
        J = jnp.asarray(gathered(J))  # whole: what follows is mostly LAPACK's, on the host
    found = measures(J, top=settings["top"], tau=settings["tau"])
    row = {name: np.asarray(getattr(found, name), np.float64) for name in SCALARS}
    row |= {f"ginibre_{name}": value for name, value in found.ginibre.items()}
    for names, factors in (
        (PRODUCTS, J),
        (NORMAL, schur_normal(J) if settings["normal"] else None),
    ):
        if factors is not None:
            product = cumulative(factors)
            pair = (product.effective_rank, product.participation_ratio)
            row |= {name: np.asarray(value, np.float64) for name, value in zip(names, pair)}
    return row, np.asarray(J, np.float64)
