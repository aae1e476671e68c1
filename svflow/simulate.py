"""`simulate`: a flow from its start to its end, on Diffrax."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow
from svflow.solvers import LieTrotter, SplittingSolver


class Trajectory(NamedTuple):
    """The states of a flow along depth.

    Arguments:
        ts: (times,) the times, counted in layers.
        xs: (times, tokens, width) the state at each of them; after a failed solve, the entries
            that were not reached are infinite.
        result: how the solve ended, a `diffrax.RESULTS`.
    """

    ts: Float[Array, " times"]
    xs: Float[Array, "times tokens width"]
    result: diffrax.RESULTS


class ScanAdjoint(diffrax.AbstractAdjoint):
    """Differentiates a solve of a known number of steps, in forward and in reverse mode.

    Diffrax's own adjoints serve one mode each, or pay for an unknown number of steps. Here the
    loop is one `jax.lax.scan` without a stopping test, so a solve costs what the bare loop over
    its steps costs. Reverse mode keeps the state before each step and computes the step again;
    with `checkpoint=False` it keeps what the step computed instead: faster, and more memory.
    """

    checkpoint: bool = eqx.field(static=True, default=True)

    def loop(
        self, *, max_steps, throw, passed_solver_state, passed_controller_state, **kwargs
    ) -> Any:
        def outer(cond_fun, body_fun, init_val, *, max_steps, buffers):
            body = jax.checkpoint(body_fun, prevent_cse=False) if self.checkpoint else body_fun
            return jax.lax.scan(lambda state, _: (body(state), None), init_val, length=max_steps)[0]

        return self._loop(
            max_steps=max_steps,
            inner_while_loop=functools.partial(eqxi.while_loop, kind="bounded"),
            outer_while_loop=outer,
            **kwargs,
        )


@dataclass(frozen=True)
class _Velocity:
    """The vector field of a flow given as Diffrax's `args`: never a closure over its weights."""

    def __call__(self, t, x, args):
        flow, context = args
        return flow.velocity(t, x, context)


@dataclass(frozen=True)
class _Field:
    """The vector field of one substep of the splitting."""

    substep: int

    def __call__(self, t, x, args):
        flow, context = args
        return flow.field(self.substep, t, x, context)


def _retract(args, x):
    return args[0].retract(x)


def step_times(t0: float, t1: float, dt: float) -> np.ndarray:
    """The grid of a fixed-step solve, from t0 to t1: (steps + 1,) float64, exact at integers.

    Computed as t0 + i (t1 - t0) / steps, not by adding dt up: a sum of rounded steps drifts off
    the layer boundaries and evaluates the wrong layer there.
    """
    if not (np.isfinite(dt) and dt > 0):
        raise ValueError(f"dt must be positive and finite, got {dt}")
    if not (np.isfinite(t0) and np.isfinite(t1) and t0 < t1):
        raise ValueError(f"the span must run forwards, got t0 = {t0}, t1 = {t1}")
    steps = round((t1 - t0) / dt)
    if steps < 1 or abs(steps * dt - (t1 - t0)) > 1e-9 * (t1 - t0):
        raise ValueError(f"dt = {dt} does not divide the span from {t0} to {t1}")
    return t0 + np.arange(steps + 1) * (t1 - t0) / steps


def _layer_times(t0: float, t1: float) -> np.ndarray:
    inner = np.arange(np.floor(t0) + 1, np.ceil(t1))
    return np.concatenate([[t0], inner, [t1]])


def simulate(
    flow: Flow,
    x0: Float[Array, "tokens width"],
    *,
    solver: diffrax.AbstractSolver | None = None,
    dt: float = 1.0,
    ts: Sequence[float] | np.ndarray | None = None,
    t0: float = 0.0,
    t1: float | None = None,
    context: Context | None = None,
    adjoint: diffrax.AbstractAdjoint | None = None,
    stepsize_controller: diffrax.AbstractStepSizeController | None = None,
    max_steps: int = 4096,
) -> Trajectory:
    r"""The trajectory of dx/dt = v(t, x) from x(t0) = x0.

    With the defaults it is the model itself: Lie-Trotter splitting with a step of one layer, so
    that xs[l] is the state after layer l. Smaller steps, or another solver, refine it towards the
    flow of `flow.velocity`.

    Arguments:
        flow: the flow; its weights are an argument of the compiled program.
        x0: (tokens, width) the state at t0. Batches are `jax.vmap`.
        solver: None for the flow's own splitting (`LieTrotter()`); `Strang()`; or any Diffrax
            solver, which then integrates the unsplit velocity.
        dt: the step in layers; it has to divide the span. With an adaptive `stepsize_controller`,
            the first step.
        ts: the times of the result, increasing; None for t0, every layer boundary, and t1. A time
            between two steps is interpolated.
        t0, t1: the span in layers; by default 0 and `flow.depth`.
        context: positions and padding, see `Context`.
        adjoint: how to differentiate. None serves forward and reverse mode alike.
        stepsize_controller: an adaptive Diffrax controller, for example
            `diffrax.PIDController(rtol, atol)`; it is told of the flow's jumps.
        max_steps: bounds an adaptive solve.

    Returns:
        The times, the states at them, and how the solve ended. A solve that fails, for example at
        `max_steps`, returns the states that it reached, infinity for the rest, and its status.

    Raises:
        ValueError: a wrong shape of x0, dt <= 0, a dt that does not divide the span, or times
            outside the span or out of order.
    """
    if jnp.ndim(x0) != 2 or jnp.shape(x0)[1] != flow.width or jnp.shape(x0)[0] < 1:
        raise ValueError(
            f"x0 must have shape (tokens, {flow.width}) with at least one token, got "
            f"{jnp.shape(x0)}; batches go through jax.vmap"
        )
    x0 = jnp.asarray(x0)
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise ValueError(f"x0 must be floating point, got {x0.dtype}")
    t0, t1 = float(t0), float(flow.depth if t1 is None else t1)
    grid = step_times(t0, t1, float(dt)) if stepsize_controller is None else None
    solver = LieTrotter() if solver is None else solver
    if isinstance(solver, SplittingSolver) and type(flow).retract is not Flow.retract:
        solver = replace(solver, retraction=_retract)

    saved = _layer_times(t0, t1) if ts is None else np.asarray(ts, np.float64)
    if saved.ndim != 1 or saved.size == 0 or np.any(np.diff(saved) <= 0):
        raise ValueError(f"ts must be increasing times, got {ts}")
    if saved[0] < t0 or saved[-1] > t1:
        raise ValueError(f"ts must lie within [{t0}, {t1}], got {saved[0]} to {saved[-1]}")

    time = at_least_float32(x0.dtype)
    every = 0
    if grid is not None:
        stride = (len(grid) - 1) // (len(saved) - 1) if len(saved) > 1 else 0
        # States at evenly many steps are stored as they are, without interpolation.
        every = stride if stride and np.array_equal(grid[::stride], saved) else 0
        if not isinstance(solver, (SplittingSolver, diffrax.Euler)):
            grid, every = _split_at_jumps(grid, flow.jumps, time), 0
        adjoint = ScanAdjoint() if adjoint is None else adjoint
    else:
        jumps = np.asarray([t for t in flow.jumps if t0 < t < t1])
        stepsize_controller = diffrax.ClipStepSizeController(
            stepsize_controller, jump_ts=jnp.asarray(jumps, time)
        )
        adjoint = diffrax.DirectAdjoint() if adjoint is None else adjoint
    return _solve(
        flow,
        x0,
        context,
        None if grid is None else jnp.asarray(grid, time),
        jnp.asarray(saved, time),
        jnp.asarray([t0, t1, dt], time),
        solver,
        stepsize_controller,
        adjoint,
        every=every,
        max_steps=max_steps if grid is None else len(grid) - 1,
    )


def _split_at_jumps(grid: np.ndarray, jumps: tuple[float, ...], dtype) -> np.ndarray:
    """The grid with each jump t met twice, as the float before t and as t itself.

    A Runge-Kutta method evaluates the end of its step; there it must see the layer that ends.
    """
    grid = grid.astype(dtype)
    inside = np.asarray([t for t in jumps if grid[0] < t < grid[-1]], grid.dtype)
    at = np.intersect1d(inside, grid)
    return np.union1d(grid, np.nextafter(at, np.asarray(-np.inf, grid.dtype)))


@functools.partial(jax.jit, static_argnames=("every", "max_steps"))
def _solve(
    flow, x0, context, grid, saved, span, solver, controller, adjoint, *, every, max_steps
) -> Trajectory:
    if isinstance(solver, SplittingSolver):
        fields = (diffrax.ODETerm(_Field(k)) for k in range(len(flow.splitting)))
        terms: diffrax.AbstractTerm = diffrax.MultiTerm(*fields)
    else:
        terms = diffrax.ODETerm(_Velocity())
    solution = diffrax.diffeqsolve(
        terms,
        solver,
        t0=span[0],
        t1=span[1],
        dt0=span[2] if grid is None else None,
        y0=x0,
        args=(flow, context),
        saveat=diffrax.SaveAt(t0=True, steps=every) if every else diffrax.SaveAt(ts=saved),
        stepsize_controller=diffrax.StepTo(ts=grid) if grid is not None else controller,
        adjoint=adjoint,
        max_steps=max_steps,
        throw=False,
    )
    return Trajectory(saved, solution.ys, solution.result)
