"""Whether an array fits, before it is made."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import jax

CGROUPS = Path("/sys/fs/cgroup")


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
    return min([*rooms, *_group_limits()], default=None)


def _group_limits(groups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The limits of the process's control group and of those above it, of either version."""
    lines = []
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
    files = []
    for line in lines:  # number:controllers:path, without controllers in version 2
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = groups, "memory.max"
        if controllers:
            folder, name = groups / "memory", "memory.limit_in_bytes"
        inner = folder / path.lstrip("/")
        files += [one / name for one in (inner, *inner.parents) if one.is_relative_to(folder)]
    found = []
    for file in files:
        with contextlib.suppress(ValueError, OSError):  # "max" where there is no limit
            found.append(int(file.read_text()))
    return found


def readable(size: float) -> str:
    if size >= 10**24:  # integers have no largest
        return f"10^{math.log10(size):.0f} bytes"
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
