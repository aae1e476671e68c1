"""Splitting methods as Diffrax solvers.

Both take a `diffrax.MultiTerm` with one `ODETerm` per substep (or a single `ODETerm`). Time is
frozen within a step, at its start (Lie-Trotter) or its middle (Strang), so that a field that is
piecewise constant over depth is never evaluated across a jump.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax.numpy as jnp


def _no_retraction(args, y):
    return y


class SplittingSolver(diffrax.AbstractSolver):
    """Steps of a field that is a sum of terms, one term at a time.

    `retraction(args, y)` is applied after each substep: back to the manifold the flow lives on.
    """

    retraction: Callable[[Any, Any], Any] = eqx.field(static=True, default=_no_retraction)

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = diffrax.LocalLinearInterpolation

    def init(self, terms, t0, t1, y0, args):
        return None

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)

    def _substep(self, term, t, dt, y, args):
        raise NotImplementedError

    def _sweep(self, terms, t0, t1):
        """The (term, time of evaluation, share of the step) of each substep, in order."""
        raise NotImplementedError

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        y = y0
        for term, t, share in self._sweep(terms, t0, t1):
            dt = jnp.asarray(share * term.contr(t0, t1), y.dtype)
            y = self.retraction(args, self._substep(term, t, dt, y, args))
        return y, None, dict(y0=y0, y1=y), None, diffrax.RESULTS.successful


def _parts(terms) -> tuple:
    return terms.terms if isinstance(terms, diffrax.MultiTerm) else (terms,)


class LieTrotter(SplittingSolver):
    """Lie-Trotter splitting with an Euler step per term: order 1; with dt = 1, the layer.

        y <- R(y + dt f_k(t, y)),   k = 1, 2, ...

    Source: H. F. Trotter, "On the product of semi-groups of operators", 1959.
    """

    def order(self, terms):
        return 1

    def _sweep(self, terms, t0, t1):
        return [(term, t0, 1) for term in _parts(terms)]

    def _substep(self, term, t, dt, y, args):
        return y + dt * term.vf(t, y, args)


class Strang(SplittingSolver):
    """Strang splitting with a Heun step per term: order 2.

    Half a step of each term but the last, a whole step of the last, and the halves in reverse,
    all at the middle of the step's time. Two evaluations a substep.

    Source: G. Strang, "On the construction and comparison of difference schemes", 1968.
    """

    def order(self, terms):
        return 2

    def _sweep(self, terms, t0, t1):
        t = t0 + (t1 - t0) / 2
        *first, last = _parts(terms)
        halves = [(term, t, 0.5) for term in first]
        return [*halves, (last, t, 1), *reversed(halves)]

    def _substep(self, term, t, dt, y, args):
        slope = term.vf(t, y, args)
        return y + dt / 2 * (slope + term.vf(t, y + dt * slope, args))
