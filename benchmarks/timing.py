"""Timing contestants in turns."""

from __future__ import annotations

import time

import jax
import numpy as np

PAUSE = 0.3  # Seconds: torch's idle OpenMP threads spin for up to 0.2 s and would slow the next.


def seconds(f) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def race(contestants, rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds):
        for place in range(len(contestants)):
            name = list(contestants)[(round_ + place) % len(contestants)]
            time.sleep(PAUSE)
            if times[name] == [] or np.median(times[name]) < 2:
                seconds(contestants[name])  # its own caches and threads, not its neighbour's
            times[name].append(seconds(contestants[name]))
    return {name: float(np.median(t)) for name, t in times.items()}
