"""Parts of a checkpoint's tensors, without reading the rest of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from svflow.models.checkpoint import Checkpoint, Place

PIECE = 2**30
"""Bytes of one read: Linux gives less than 2 GiB at a time."""


def read_part(
    checkpoint: Checkpoint, name: str, part: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """part(tensor), in the file's type, of which only that part is read where that is possible.

    It is where the file is safetensors and `part` transposes, splits and slices; what rearranges
    the tensor so that NumPy copies it (GPT-NeoX's interleaved queries, keys and values), and
    other files, take the whole tensor through memory.

    Arguments:
        name: of the tensor.
        part: a function of the tensor.

    Raises:
        ValueError: a tensor that is not floating point, or a damaged file, by name.
    """
    if checkpoint.place is not None:
        place = checkpoint.place(name)
        # Memory that is never touched takes none: it only tells where the part lies.
        whole = np.empty(checkpoint.shapes[name], place.dtype)
        wanted = part(whole)
        if np.may_share_memory(wanted, whole):
            return _read(place, whole, wanted, name)
    return part(checkpoint.read(name))


def _read(place: Place, whole: np.ndarray, wanted: np.ndarray, name: str) -> np.ndarray:
    """The bytes of a view of the tensor, in runs that are contiguous in the file."""
    order = np.argsort([-stride for stride in wanted.strides], kind="stable")
    ordered = wanted.transpose(order)
    run, outer = ordered.itemsize, ordered.ndim
    while outer and (ordered.shape[outer - 1] == 1 or ordered.strides[outer - 1] == run):
        outer -= 1
        run *= ordered.shape[outer]
    out = np.empty(ordered.shape, ordered.dtype)
    rows = out.view(np.uint8).reshape(-1, run)
    start = place.offset + _address(ordered) - _address(whole)
    steps = np.asarray(ordered.strides[:outer], np.int64)
    with place.file.open("rb", buffering=0) as file:
        for row, index in zip(rows, np.ndindex(*ordered.shape[:outer])):
            at, done = start + int(np.dot(index, steps)), 0
            while done < run:
                got = os.preadv(file.fileno(), [row.data[done : done + PIECE]], at + done)
                if got == 0:
                    raise ValueError(f"{place.file} is damaged: it ends within {name}")
                done += got
    return out.transpose(np.argsort(order))


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
