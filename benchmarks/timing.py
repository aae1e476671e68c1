"""Times, compile times and memory of calls."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

PAUSE = 0.3  # Seconds: torch's idle OpenMP threads spin for up to 0.2 s and would slow the next.
COMPILING = "/jax/core/compile/"


def seconds(f) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


SLOW = 2.0  # Seconds: a call that takes longer needs no other before it to warm up.


def turns(
    contestants: Mapping[str, Callable[[], Any]],
    rounds: int,
    known: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every call of each, in turns whose order turns from round to round.

    Each timed call comes after an untimed one of its own, but for slow ones: those that took long
    in an earlier round, or by the seconds that are `known`.
    """
    known = known or {}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds):
        for place in range(len(contestants)):
            name = list(contestants)[(round_ + place) % len(contestants)]
            time.sleep(PAUSE)
            expected = float(np.median(times[name])) if times[name] else known.get(name, 0.0)
            if expected < SLOW:
                seconds(contestants[name])  # its own caches and threads, not its neighbour's
            times[name].append(seconds(contestants[name]))
    return times


def race(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns."""
    return {name: float(np.median(t)) for name, t in turns(contestants, rounds).items()}


class Compiling:
    """Seconds in which JAX traces, lowers or compiles within a `with`, counted once each."""

    def __enter__(self) -> Compiling:
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILING):
            end = time.perf_counter()
            self._spans.append((end - duration_secs, end))

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def seconds(self) -> float:
        total, until = 0.0, -np.inf
        for start, end in sorted(self._spans):  # a function traced within another: one span
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total


class Peak(NamedTuple):
    """What a call returned, its seconds, and how far memory rose above what was held before it."""

    result: Any
    seconds: float
    bytes: int | None


def peak(f: Callable[[], Any]) -> Peak:
    """Calls f, twice unless it is slow; the peak of resident memory, or of the accelerator's.

    The first of two calls compiles, and its memory does not count. On Linux the kernel's high-water
    mark is set back before the call, and free memory given back to it. An accelerator's cannot be
    set back: there it is the peak since the start of the process. None where neither is known.
    """
    found = _peak(f)
    return _peak(f) if found.seconds < SLOW else found


def _peak(f: Callable[[], Any]) -> Peak:
    device = jax.default_backend() != "cpu"
    before = None if device else _settled()
    start = time.perf_counter()
    result = jax.block_until_ready(f())
    taken = time.perf_counter() - start
    if device:
        top = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    else:
        top = None if before is None else max(0, _status("VmHWM") - before)
    return Peak(result, taken, top)


def _settled() -> int | None:
    """Sets the high-water mark back to what is held, and returns that; None where one cannot."""
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024
