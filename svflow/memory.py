"""Whether an array fits, before it is made."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import jax


def check_memory(what: str, size: int, like: jax.Array | None) -> None:
    """Raises MemoryError where `size` bytes exceed the memory of the device that holds `like`.

    On the CPU, or without `like`, that is the machine's, or the control group's where it is
    smaller.
    """
    room = _room(like)
    if room is not None and size > room:
        raise MemoryError(
            f"{what} would take {readable(size)} with what computes them, of {readable(room)}"
        )


def magnitude(count: int) -> str:
    """A count as text; a power of ten where it has more digits than one reads."""
    return str(count) if count < 10**18 else f"about 10^{math.log10(count):.0f}"


def _room(like) -> int | None:
    if isinstance(like, jax.core.Tracer) or not isinstance(like, jax.Array):
        return _host()
    here = [device for device in like.devices() if device.process_index == jax.process_index()]
    device = min(here, key=lambda device: device.id)
    if device.platform == "cpu":
        return _host()
    return (device.memory_stats() or {}).get("bytes_limit")


def _host() -> int | None:
    rooms = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        rooms.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):  # "max" where there is no limit
        rooms.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(rooms, default=None)


def readable(size: float) -> str:
    if size >= 10**24:  # integers have no largest
        return f"10^{math.log10(size):.0f} bytes"
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
