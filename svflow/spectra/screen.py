"""Which of many matrices can have an eigenvalue outside of a circle: from products with all.

Axes: `matrices`; `size`, of each; `m`, the steps taken.

From a standard normal g, Arnoldi's process makes p(A) g, p monic of degree m, whose zeros are the
Ritz values theta_i and whose norm is |g| h_21 h_32 ... h_m+1,m. For an eigenvalue lambda of A and
its left vector w of unit length

    |p(A) g| >= |w^H p(A) g| = |p(lambda)| |w^H g|,

and |w^H g| < delta has a probability below 1.2 delta, so that but for that luck

    prod_i |lambda - theta_i| <= |g| h_21 ... h_m+1,m / delta.

Outside of a circle around all theta_i, where |p(z)| / |z|^m takes its least value on the circle, so
does |p|: an inequality that fails on the whole circle fails everywhere outside. Derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from svflow.spectra.lapack import in_threads

STEPS = 32  # between two looks at the Ritz values, which take as long as some steps
POINTS = 1024  # on the half circle: spectra of real matrices are symmetric
DELTA = 1e-6


class Screen:
    """Krylov spaces of many real matrices of one size, grown together.

    Arguments:
        apply: (matrices, size) -> (matrices, size), every matrix on its own row.
        shape: (matrices, size).
        rng: of the starts.
        limit: the most steps.
    """

    def __init__(
        self,
        apply: Callable[[np.ndarray], np.ndarray],
        shape: tuple[int, int],
        rng: np.random.Generator,
        *,
        limit: int,
    ):
        count, size = shape
        self.apply, self.steps, self.limit = apply, 0, min(limit, size)
        start = rng.standard_normal(shape)
        length = np.linalg.norm(start, axis=1)
        self.basis = np.zeros((count, self.limit + 1, size))
        self.basis[:, 0] = start / length[:, None]
        self.hessenberg = np.zeros((count, self.limit + 1, self.limit))
        self.log_norm = np.log(length)  # of p(A) g
        self.shift = np.zeros(count)
        self.ritz: list[np.ndarray] = [np.zeros(0)] * count
        self.dimension = np.zeros(count, int)
        self.closed = np.zeros(count, bool)  # whose space is invariant: it can grow no more

    def grow(self, which: Iterable[int], steps: int = STEPS) -> None:
        """Up to `steps` more steps for the matrices `which`, and then their Ritz values.

        Raises ValueError for a matrix that an earlier call left behind.
        """
        which = [i for i in which if not self.closed[i]]
        if behind := [i for i in which if self.dimension[i] < self.steps]:
            raise ValueError(f"matrices {behind} were left behind by an earlier step")
        for _ in range(steps):
            going = [i for i in which if not self.closed[i]]
            if self.steps == self.limit or not going:
                break
            self._step(going)
        found = in_threads(self._ritz_values, which)
        for i, values in zip(which, found):
            self.ritz[i] = values

    def _step(self, which):
        m, q = self.steps, self.basis[:, self.steps]
        # A - sI has the Krylov spaces of A; a residual layer without its I is far from the last q.
        # With s of A's own size, so that no scale of A is lost beside it.
        images = self.apply(q)
        if m == 0:
            self.shift = np.sum(q * images, axis=1)
        images = images - self.shift[:, None] * q
        for i in which:
            Q, v = self.basis[i, : m + 1], images[i]
            before = after = float(np.linalg.norm(v))
            for _ in range(2):
                share = Q @ v
                v = v - share @ Q
                self.hessenberg[i, : m + 1, m] += share
                last, after = after, float(np.linalg.norm(v))
                if after > 0.7 * last:  # nothing cancelled: it is orthogonal
                    break
            self.hessenberg[i, m + 1, m] = after
            self.log_norm[i] += math.log(after) if after > 0 else -math.inf
            self.dimension[i] = m + 1
            if after <= 1e-14 * max(abs(self.shift[i]), before):
                self.closed[i] = True
            else:
                self.basis[i, m + 1] = v / after
        self.steps += 1

    def _ritz_values(self, i):
        m = self.dimension[i]
        return self.shift[i] + np.linalg.eigvals(self.hessenberg[i, :m, :m])

    def radius(self, i: int) -> float:
        """The largest modulus of a Ritz value of matrix i: about its spectral radius."""
        return float(np.abs(self.ritz[i]).max(initial=0))

    def finished(self, i: int) -> bool:
        """Whether matrix i's space cannot grow."""
        return bool(self.closed[i]) or self.steps == self.limit

    def excludes(self, i: int, radius: float) -> bool:
        """Whether matrix i has no eigenvalue of a modulus of `radius` or more."""
        values = self.ritz[i]
        if not len(values) or not self.radius(i) < radius:
            return False
        angles = math.pi * (np.arange(POINTS) + 0.5) / POINTS
        # The points of the circle are this close to one of these, so that nothing hides between.
        between = radius * math.pi / (2 * POINTS)
        apart = np.abs(radius * np.exp(1j * angles)[:, None] - values) - between
        least = np.log(np.maximum(apart, 1e-300)).sum(axis=1).min()
        return bool(least > self.log_norm[i] - math.log(DELTA))
