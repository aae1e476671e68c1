"""One file for one run: replaced as a whole, and continued by the next run of the same settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from svflow import Flow
from svflow.resumable import locked, replace
from universal.maps import Routing

DAMAGED = AttributeError, KeyError, TypeError, ValueError
"""What reading raises where JSON or arrays are other than what was written."""


class Saved:
    """The state of a run in an .npz file, or nowhere.

    Arguments:
        path: the file, or None.
        settings: what JSON can hold; a file of other settings is not continued.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path, self.settings = path, json.loads(json.dumps(settings))

    def read(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """What was written last; None where nothing was.

        Raises ValueError for a file that holds no run, or a run of other settings.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = dict(file)
            head = json.loads(str(arrays.pop("run")))
            before = head.pop("settings")
            one, other = flat(before), flat(self.settings)
        except (*DAMAGED, EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} holds no run: {error}") from error
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                raise ValueError(
                    f"{self.path} was made with {name} = {one.get(name)!r}, not "
                    f"{other.get(name)!r}; give a new file"
                )
        return head, arrays

    def write(self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces the file: whoever is killed meanwhile leaves the one before."""
        if self.path is None:
            return
        run = np.asarray(json.dumps(dict(head, settings=self.settings)))
        replace(self.path, dict(run=run, **arrays))


@contextlib.contextmanager
def saving(out: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> Iterator[Saved]:
    """A `Saved` that no other run writes meanwhile.

    Raises ValueError for a path that is a folder, or a file that another run writes.
    """
    if out is None:
        yield Saved(None, settings)
        return
    with locked(out) as path:
        yield Saved(path, settings)


def digest(flow: Flow) -> dict[str, Any]:
    """What tells a flow from another: its type, its sizes, its arrays, and all that is static."""
    found = hashlib.sha256()
    leaves, structure = jax.tree.flatten(flow)
    for leaf in leaves:
        found.update(f"{leaf.shape}{leaf.dtype}".encode() + np.asarray(leaf).tobytes())
    return dict(
        type=type(flow).__name__,
        depth=int(flow.depth),
        width=int(flow.width),
        arrays=found.hexdigest(),
        static=hashlib.sha256(_static(structure).encode()).hexdigest(),
    )


def _static(value: Any) -> str:
    """As text, the same in every process: hashes and addresses are not."""
    if isinstance(value, jax.tree_util.PyTreeDef):
        return f"{_static(value.node_data())}[{','.join(map(_static, value.children()))}]"
    if isinstance(value, Routing):
        return f"{_static(value.sources)} of {value.width}"
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.dtype}{value.tobytes().hex()}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_static(name)}:{_static(of)}' for name, of in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_static, value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
