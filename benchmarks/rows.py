"""What a row of the table is, and how one is measured.

A claim is declared once, at the end of the module that can check it:

    row("forward/gpt2-64", "...", case, full=dict(...), quick=dict(...), tolerance=1e-4)

`case(**full)` makes our side and its peers; `case(**quick)` the same at sizes that take a second.
A peer is another library that computes the same, or a bound: work that ours has to contain.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import machine, timing

MODULES = (
    *("forward", "compiling", "loading", "flows", "spectra", "lens", "power", "metrics"),
    *("machines", "training_steps", "topology", "portrait"),
)
OPTIONAL = ("torch", "transformers", "transformer_lens", "torchdiffeq", "igraph", "leidenalg")


class Missing(Exception):
    """What a row or a peer needs and does not have."""


class File:
    """Stands for the file that --gguf names, in the sizes of a row."""


GGUF = File()


def relative(ours: Any, theirs: Any) -> float:
    """The largest difference, in units of the root mean square of `theirs`."""
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape:
        raise ValueError(f"ours has shape {a.shape}, theirs {b.shape}")
    wide = np.result_type(b.dtype, np.float64)
    a, b = a.astype(wide), b.astype(wide)
    return float(np.abs(a - b).max() / np.sqrt(np.mean(np.abs(b) ** 2)))


@dataclass(frozen=True)
class Peer:
    """The other side.

    Arguments:
        build: imports what it needs and returns what is called.
        most: what ours / theirs should not exceed, in time; None: no claim.
        error: of our result and theirs, as a pure number; None for a bound, which has no result.
        times: how many of its calls equal one of ours.
    """

    build: Callable[[], Callable[[], Any]]
    most: float | None = None
    error: Callable[[Any, Any], float] | None = relative
    times: float = 1.0


@dataclass(frozen=True)
class Case:
    """Both sides of a row at one size.

    Arguments:
        ours: what is called.
        peers: by name.
        check: how far our result is from what is known, where no peer can tell.
        weights: bytes that our peak is to be compared with, see `Row.most_peak`.
    """

    ours: Callable[[], Any]
    peers: Mapping[str, Peer] = field(default_factory=dict)
    check: Callable[[Any], float] | None = None
    weights: int | None = None


@dataclass(frozen=True)
class Row:
    """A claim.

    Arguments:
        name: "group/what".
        claim: in words.
        case: makes the sides from the sizes in `full`, or in `quick`.
        tolerance: of every error; a row beyond it is wrong and is not timed.
        most_peak: bytes that ours may take; where the case has `weights`, multiples of them.
        most_seconds: what one call of ours may take.
        rounds: at most, for slow rows.
        x64: whether it is about float64.
    """

    name: str
    claim: str
    case: Callable[..., Case]
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    tolerance: float
    most_peak: float | None = None
    most_seconds: float | None = None
    rounds: int = 1000
    x64: bool = False


ROWS: dict[str, Row] = {}


def row(name: str, claim: str, case: Callable[..., Case], **options: Any) -> None:
    """Adds a row to the table."""
    if name in ROWS:
        raise ValueError(f"two rows are called {name!r}")
    ROWS[name] = Row(name, claim, case, **options)


def all_rows() -> dict[str, Row]:
    """Every row, in the order of the table."""
    for name in MODULES:
        importlib.import_module(f"benchmarks.{name}")
    return ROWS


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these names or groups; all without any. ValueError for one that is neither."""
    rows = all_rows()
    for name in names:
        if not any(name in (r, r.split("/")[0]) for r in rows):
            raise ValueError(f"no row or group {name!r}; there are {', '.join(rows)}")
    return [r for n, r in rows.items() if not names or n in names or n.split("/")[0] in names]


def measured(row: Row, *, quick: bool = False, gguf: Any = None, rounds: int = 7) -> dict[str, Any]:
    """One row: correctness first, then, unless `quick`, both sides in turns.

    Returns:
        What the JSON file holds of it, see `benchmarks.__main__`. `status` is "right", "wrong"
        (an error above the tolerance, nothing timed), "unchecked" (no peer is there that could
        tell, nothing timed) or "missing" (the row itself lacks something).
    """
    found: dict[str, Any] = dict(
        name=row.name, claim=row.claim, status="right", tolerance=row.tolerance, error=None,
        compile_s=None, median_s=None, best_s=None, peak_bytes=None, most_peak_bytes=None,
        most_s=row.most_seconds, load=None, seconds=None, peers=[],
    )  # fmt: skip
    if not quick:
        jax.clear_caches()
        gc.collect()  # what earlier rows held, so that it is not given back within a call
    with jax.enable_x64(row.x64):
        try:
            case = row.case(**_sizes(row, quick, gguf))
        except (Missing, ImportError) as error:
            return found | dict(status="missing", missing=_lacking(error))
        if row.most_peak is not None:
            found["most_peak_bytes"] = row.most_peak * (case.weights or 1)
        with timing.Compiling() as compiling:
            jax.block_until_ready(case.ours())
        if not quick:
            found["compile_s"] = compiling.seconds
        result, took, found["peak_bytes"] = timing.peak(case.ours)
        sides, known = {"": case.ours}, {"": took}
        errors = [] if case.check is None else [float(case.check(result))]
        found["error"] = errors[0] if errors else None
        for name, peer in case.peers.items():
            line: dict[str, Any] = dict(
                name=name, missing=None, error=None, median_s=None, best_s=None, peak_bytes=None,
                ratio=None, most=peer.most, holds=None, times=peer.times, seconds=None,
            )  # fmt: skip
            found["peers"].append(line)
            try:
                sides[name] = peer.build()
            except (Missing, ImportError) as error:
                line["missing"] = _lacking(error)
                continue
            theirs, known[name], line["peak_bytes"] = timing.peak(sides[name])
            if peer.error is not None:
                errors.append(float(peer.error(result, theirs)))
                line["error"] = errors[-1]
            del theirs
        del result
        if not errors:
            return found | dict(status="unchecked")
        if not all(error <= row.tolerance for error in errors):  # nan is wrong too
            return found | dict(status="wrong")
        if not quick:
            _race(found, case, sides, known, min(rounds, row.rounds))
    return found


def check_writable(file: Path) -> None:
    """Raises OSError for a file that cannot be written, before there is anything to write."""
    there = file.exists()
    with file.open("a"):
        pass
    if not there:
        file.unlink()


def _lacking(error: Exception) -> str:
    """What is not there, or too old; raises again where it is none of the packages that may be."""
    if not isinstance(error, ImportError):
        return str(error)
    root = (error.name or "").split(".")[0]
    if root not in OPTIONAL:
        raise error
    if isinstance(error, ModuleNotFoundError) and error.name == root:
        return f"{root} is not installed"
    return f"{root} cannot be used: {error}"


def _sizes(row: Row, quick: bool, gguf: Any) -> dict[str, Any]:
    sizes = dict(row.quick if quick else row.full)
    for name, value in sizes.items():
        if value is GGUF:
            if gguf is None:
                raise Missing("needs --gguf FILE")
            sizes[name] = gguf
    return sizes


def _race(found: dict[str, Any], case: Case, sides, known, rounds: int) -> None:
    with machine.Others() as others:
        times = timing.turns(sides, rounds, known)
    found["load"] = dict(
        before=others.before, after=others.after, others=others.cores, busy=others.busy
    )
    found["rounds"] = rounds
    found["seconds"] = times[""]
    found["median_s"], found["best_s"] = float(np.median(times[""])), min(times[""])
    for line in found["peers"]:
        if line["name"] not in times:
            continue
        line["seconds"] = [line["times"] * taken for taken in times[line["name"]]]
        line["median_s"], line["best_s"] = float(np.median(line["seconds"])), min(line["seconds"])
        line["ratio"] = found["median_s"] / line["median_s"]
        if line["most"] is not None:
            line["holds"] = line["ratio"] <= line["most"]
    if found["most_s"] is not None:
        found["holds_s"] = found["median_s"] <= found["most_s"]
    if found["most_peak_bytes"] is not None and found["peak_bytes"] is not None:
        found["holds_peak"] = found["peak_bytes"] <= found["most_peak_bytes"]
