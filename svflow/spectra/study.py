"""Spectral measures over many sequences, in one file that a killed run continues from."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Float

from svflow.models.transformer import Transformer
from svflow.spectra.jacobians import SCOPES, text_jacobians
from svflow.spectra.measures import SCALARS, check_top, measures
from svflow.spectra.products import cumulative
from svflow.spectra.schur import schur_normal

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PRODUCTS = ("cumulative_effective_rank", "cumulative_participation_ratio")
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
    path = Path(out).expanduser().resolve()
    if not isinstance(model, Transformer):
        raise ValueError(f"a study needs a Transformer, got {type(model).__name__}")
    if scope not in SCOPES[:2]:
        raise ValueError(f"scope must be one of {SCOPES[:2]}, got {scope!r}")
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise ValueError(f"token must be an int, got {token!r}")
    if not 0 <= tau < np.inf:
        raise ValueError(f"tau must be finite and not negative, got {tau}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file")
    top = check_top(top, model.flow.width)
    ids = [_checked(number, sequence, model, token) for number, sequence in enumerate(sequences)]
    if not ids:
        raise ValueError("a study needs at least one sequence")
    settings = dict(
        model=_digest(model),
        family=model.config.family,
        layers=model.flow.depth,
        width=model.flow.width,
        token=int(token),
        scope=scope,
        top=top,
        tau=float(tau),
        normal=bool(normal),
        mean_product=bool(mean_product),
    )
    digests = [hashlib.sha256(one.tobytes()).hexdigest() for one in ids]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another run is writing {path}") from error
    try:
        rows, total = _continued(path, settings, digests)
        for number in progress(range(len(rows), len(ids))):
            try:
                row, J = _measure(model, ids[number], settings)
            except ValueError as error:
                raise ValueError(f"sequence {number}: {error}") from error
            rows.append(row)
            if mean_product:
                total = J if total is None else total + J
            _write(path, settings, digests[: len(rows)], rows, total)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
    return load_study(path)


def load_study(path: str | os.PathLike[str]) -> Study:
    """The study in a file, finished or not. Raises ValueError for a file that holds none."""
    settings, _, samples, total = _read(Path(path))
    products: dict[str, np.ndarray] = {}
    count = len(next(iter(samples.values())))
    if total is not None:
        found = cumulative(jnp.asarray(total / count))
        pair = (found.effective_rank, found.participation_ratio)
        products = {name: np.asarray(value) for name, value in zip(PRODUCTS, pair)}
    ginibre = {
        name.removeprefix("ginibre_"): samples.pop(name)
        for name in list(samples)
        if name.startswith("ginibre_")
    }
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


def _checked(number, sequence, model, token):
    ids = np.asarray(sequence)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise ValueError(f"sequence {number} is not a sequence of token ids")
    if not -ids.size <= token < ids.size:
        raise ValueError(f"sequence {number} has {ids.size} tokens, and no token {token}")
    try:
        jax.eval_shape(lambda model: model.embed(ids), model)
    except ValueError as error:
        raise ValueError(f"sequence {number}: {error}") from error
    return ids.astype(np.int64)


def _digest(model) -> str:
    """Of the weights and the config: another model's file is not continued."""
    found = hashlib.sha256(repr(model.config).encode())
    for leaf in jax.tree.leaves(model):
        found.update(f"{leaf.shape}{leaf.dtype}{zlib.crc32(np.asarray(leaf).tobytes())}".encode())
    return found.hexdigest()


def _measure(model, ids, settings) -> tuple[dict[str, np.ndarray], np.ndarray]:
    J = text_jacobians(model, ids, token=settings["token"], scope=settings["scope"])
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


def _continued(path, settings, digests):
    """The rows that the file has already, and the sum of its Jacobians."""
    if not path.exists():
        return [], None
    before, done, samples, total = _read(path)
    for name, value in settings.items():
        if before.get(name) != value:
            what = f"{name} = {before.get(name)!r}, not {value!r}"
            what = "another model" if name == "model" else what
            raise ValueError(f"{path} was made with {what}; give a new file")
    if done != digests[: len(done)]:
        raise ValueError(f"{path} was made from other sequences, or more; give a new file")
    rows = [{name: values[k] for name, values in samples.items()} for k in range(len(done))]
    return rows, total


def _read(path: Path) -> tuple[dict[str, Any], list[str], dict[str, np.ndarray], np.ndarray | None]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        head = json.loads(str(arrays.pop("study")))
        settings, digests = dict(head["settings"]), list(head["sequences"])
        if not digests:
            raise ValueError("it has no sequence")
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no study: {error}") from error
    total = arrays.pop("sum_of_jacobians", None)
    return settings, digests, arrays, total


def _write(
    path: Path,
    settings: Mapping[str, Any],
    digests: Sequence[str],
    rows: Sequence[Mapping[str, np.ndarray]],
    total: np.ndarray | None,
) -> None:
    """The file, replaced as a whole: whoever is killed leaves the one before."""
    arrays: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    if total is not None:
        arrays["sum_of_jacobians"] = total
    head = json.dumps(dict(settings=settings, sequences=digests))
    scratch = path.with_name(f".{path.name}.writing")  # of the one run that holds the lock
    with scratch.open("wb") as file:
        np.savez(file, study=np.asarray(head), **arrays)
    os.replace(scratch, path)
