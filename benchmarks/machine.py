"""The machine that a table was made on, and who else was using it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax

PACKAGES = (
    *("svflow", "jax", "jaxlib", "flax", "diffrax", "numpy", "scipy"),
    *("torch", "transformers", "transformer-lens", "torchdiffeq"),
)
BUSY = 0.25  # Cores used by others from which on a result is marked.


def description() -> dict[str, Any]:
    """CPU, cores, accelerators, and versions of what takes part; None: not installed."""
    return dict(
        cpu=_cpu(),
        cores=cores(),
        platform=platform.platform(),
        device=jax.devices()[0].device_kind,
        devices=len(jax.devices()),
        backend=jax.default_backend(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
    )


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Others:
    """Load within a `with`.

    `before` and `after` are the system's averages over a minute, which count this process too;
    `cores` is how many cores others kept busy meanwhile, from the kernel's own counters; None where
    there are none. The time of processes that this one waited for is its own.
    """

    def __enter__(self) -> Others:
        self.before = _load()
        self.after: float | None = None
        self.cores: float | None = None
        self._start = _counters()
        return self

    def __exit__(self, *exception: object) -> None:
        self.after = _load()
        end = _counters()
        if self._start is not None and end is not None and end[0] > self._start[0]:
            wall, busy, own = (b - a for a, b in zip(self._start, end))
            self.cores = max(0.0, (busy - own) / wall)

    @property
    def busy(self) -> bool:
        """Whether others took enough to be seen in a time."""
        return (self.cores or 0.0) > BUSY


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _counters() -> tuple[float, float, float] | None:
    """Wall seconds, busy core seconds of the machine, and those of this process."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
    ticks = [int(word) for word in line.split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, sum(os.times()[:4])
