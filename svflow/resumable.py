"""Rows of numbers over many sequences, in one file that a killed run continues from.

Axes: `sequences`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from filelock import FileLock, Timeout

from svflow.models.transformer import Transformer
from svflow.sharding import gathered

Arrays = dict[str, np.ndarray]


class Rows(NamedTuple):
    """What a file holds.

    Arguments:
        settings: what the study was asked.
        sequences: a digest of each sequence that is done, in order.
        rows: by name, (sequences, ...).
        carried: by name, what is summed over sequences.
    """

    settings: dict[str, Any]
    sequences: list[str]
    rows: Arrays
    carried: Arrays


def over_sequences(
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
    sequences: Sequence[np.ndarray],
    measure: Callable[[np.ndarray, Arrays], tuple[Arrays, Arrays]],
    *,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> None:
    """Measures every sequence that the file does not have yet, and replaces it after each.

    Arguments:
        out: the .npz file, made or continued.
        settings: what JSON can hold; a file of other settings is not continued.
        sequences: of `check_sequences`.
        measure: a sequence and what is carried so far ({} at first) to its row, arrays of the same
            shapes for every sequence, and what is carried then.
        progress: wraps the range over sequences.

    Raises:
        ValueError: a path that is a folder, a file that another run writes, that holds no study,
            or one of another model, other settings or sequences; and what `measure` raises, with
            the sequence's number.
    """
    digests = [hashlib.sha256(one.tobytes()).hexdigest() for one in sequences]
    with locked(out) as path:
        rows, carried = _continued(path, settings, digests)
        for number in progress(range(len(rows), len(sequences))):
            try:
                row, carried = measure(sequences[number], carried)
            except ValueError as error:
                raise ValueError(f"sequence {number}: {error}") from error
            rows.append(row)
            _write(path, settings, digests[: len(rows)], rows, carried)


@contextlib.contextmanager
def locked(out: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a file that no other run writes meanwhile; its folder is made.

    Raises ValueError for a path that is a folder, or a file that another run writes.
    """
    path = Path(out).expanduser().resolve()
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another run is writing {path}") from error
    try:
        yield path
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """To write what takes a file's place as a whole: whoever is killed leaves the one before.

    For the one run that holds the lock.
    """
    scratch = path.with_name(f".{path.name}.writing")
    with scratch.open("wb") as file:
        yield file
    os.replace(scratch, path)


def replace(path: Path, arrays: Mapping[str, Any]) -> None:
    """An .npz file, `replaced`."""
    named: dict[str, Any] = dict(arrays)
    with replaced(path) as file:
        np.savez(file, **named)


def check_sequences(sequences: Iterable[Any], model: Transformer) -> list[np.ndarray]:
    """The sequences as arrays of int64.

    Raises ValueError with the number of one that is no sequence of ids that the model takes, or
    where there is none.
    """
    checked = []
    for number, sequence in enumerate(sequences):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
            raise ValueError(f"sequence {number} is not a sequence of token ids")
        try:
            jax.eval_shape(lambda model, ids=ids: model.embed(ids), model)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from error
        checked.append(ids.astype(np.int64))
    if not checked:
        raise ValueError("a study needs at least one sequence")
    return checked


def digest(model: Transformer) -> str:
    """Of the weights and the config: another model's file is not continued."""
    found = hashlib.sha256(repr(model.config).encode())
    for leaf in jax.tree.leaves(model):
        found.update(f"{leaf.shape}{leaf.dtype}{zlib.crc32(gathered(leaf).tobytes())}".encode())
    return found.hexdigest()


def read(path: str | os.PathLike[str]) -> Rows:
    """What a file holds, finished or not. Raises ValueError for a file that holds no study."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        head = json.loads(str(arrays.pop("study")))
        carried = {name: arrays.pop(name) for name in head["carried"]}
        found = Rows(dict(head["settings"]), list(head["sequences"]), arrays, carried)
        if not found.sequences:
            raise ValueError("it has no sequence")
        if any(len(values) != len(found.sequences) for values in found.rows.values()):
            raise ValueError("its rows are not as many as its sequences")
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no study: {error}") from error
    return found


def _continued(path: Path, settings: Mapping[str, Any], digests: list[str]):
    """The rows that the file has already, and what it carries."""
    if not path.exists():
        return [], {}
    before = read(path)
    for name, value in settings.items():
        if before.settings.get(name) != value:
            what = f"{name} = {before.settings.get(name)!r}, not {value!r}"
            what = "another model" if name == "model" else what
            raise ValueError(f"{path} was made with {what}; give a new file")
    done = before.sequences
    if done != digests[: len(done)]:
        raise ValueError(f"{path} was made from other sequences, or more; give a new file")
    rows = [{name: values[k] for name, values in before.rows.items()} for k in range(len(done))]
    return rows, before.carried


def _write(
    path: Path,
    settings: Mapping[str, Any],
    digests: Sequence[str],
    rows: Sequence[Arrays],
    carried: Arrays,
) -> None:
    arrays: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    arrays |= carried
    head = json.dumps(dict(settings=settings, sequences=digests, carried=list(carried)))
    replace(path, dict(study=np.asarray(head), **arrays))
