"""One file for one run: replaced as a whole, and continued by the next run of the same settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from svflow import Flow
from svflow.resumable import locked, replace
from universal.components import Recipe
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


def described(machine: Any) -> dict[str, Any]:
    """What JSON keeps of a machine: a recipe's fields, or what tells flows from others."""
    if isinstance(machine, Recipe):
        return dataclasses.asdict(machine)
    if isinstance(machine, Flow):
        return digest(machine)
    return dict(flows=[digest(one) for one in machine])


def _static(value: Any, above: tuple[int, ...] = ()) -> str:
    """As text, the same in every process: hashes and addresses are not, nor is the order of a set.

    `above`: the ids of what it is within, for objects that hold themselves.
    """
    if id(value) in above:
        return f"{above.index(id(value))} above"
    text = functools.partial(_static, above=(*above, id(value)))
    name = type(value).__qualname__
    if isinstance(value, jax.tree_util.PyTreeDef):
        return f"{text(value.node_data())}[{','.join(map(text, value.children()))}]"
    if isinstance(value, Routing):
        return f"{text(value.sources)} of {value.width}"
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        held = text(array.tolist()) if array.dtype == object else array.tobytes().hex()
        return f"{array.shape}{array.dtype}{held}"
    if isinstance(value, Mapping):
        return f"{name}{{{','.join(f'{text(key)}:{text(of)}' for key, of in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(text, value))})"
    if isinstance(value, set | frozenset):
        return f"{name}{{{','.join(sorted(map(text, value)))}}}"
    if isinstance(value, functools.partial):
        return f"{name}{text((value.func, value.args, value.keywords))}"
    if isinstance(value, types.MethodType):
        return f"{text(value.__func__)} of {text(value.__self__)}"
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        bound = value.__code__, cells, value.__defaults__, value.__kwdefaults__
        return f"{value.__module__}.{value.__qualname__}{text(bound)}"
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()}{text((value.co_consts, value.co_names))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{name}{text(tuple(fields))}"
    if type(value).__repr__ is object.__repr__:
        return f"{name}{text(getattr(value, '__dict__', {}))}"
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
