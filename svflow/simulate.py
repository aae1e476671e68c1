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
from svflow.flow import Context, Flow, check_context, check_flow
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
    its steps costs; it is for explicit solvers with fixed steps, which cannot fail. Reverse mode
    keeps the state before each step and computes the step again; with `checkpoint=False` it keeps
    what the step computed instead: faster, and more memory.
    """

    checkpoint: bool = eqx.field(static=True, default=True)

    def loop(
        self, *, solver, max_steps, throw, passed_solver_state, passed_controller_state, **kwargs
    ) -> Any:
        if getattr(solver, "scan_kind", "") is None:
            # The loop over stages that Diffrax takes by default has no forward mode.
            solver = eqx.tree_at(
                lambda s: s.scan_kind, solver, "bounded", is_leaf=lambda s: s is None
            )

        def outer(cond_fun, body_fun, init_val, *, max_steps, buffers):
            body = jax.checkpoint(body_fun, prevent_cse=False) if self.checkpoint else body_fun
            return jax.lax.scan(lambda state, _: (body(state), None), init_val, length=max_steps)[0]

        return self._loop(
            solver=solver,
            max_steps=max_steps,
            inner_while_loop=functools.partial(eqxi.while_loop, kind="bounded"),
            outer_while_loop=outer,
            **kwargs,
        )


class _Grid(diffrax.StepTo):
    """`StepTo` without its checks at run time: `step_times` has made them, and each is a callback
    to the host, which takes compile time and keeps a program out of JAX's compilation cache.
    """

    def wrap(self, direction):
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        return self.ts[1], 2


@dataclass(frozen=True)
class VectorField:
    """A field of a flow given as Diffrax's `args`: never a closure over its weights.

    Arguments:
        dtype: of the flow's states. Diffrax carries a narrow state in its time's type.
        substep: of the splitting; None for the velocity.
    """

    dtype: np.dtype
    substep: int | None = None

    def __call__(self, t, x, args):
        flow, context = args
        state = x.astype(self.dtype)
        if self.substep is None:
            v = flow.velocity(t, state, context)
        else:
            v = flow.field(self.substep, t, state, context)
        moves = f"{type(flow).__name__} moves a {state.dtype} state of shape {state.shape}"
        if v.shape != state.shape:
            raise ValueError(f"{moves} by an update of shape {v.shape}")
        if v.dtype != state.dtype:
            raise ValueError(f"{moves} by a {v.dtype}; x0 needs the dtype of the weights")
        return v.astype(x.dtype)


@dataclass(frozen=True)
class _Retraction:
    """The flow's retraction, and the rounding to the type of its states."""

    dtype: np.dtype

    def __call__(self, args, x):
        y = args[0].retract(x.astype(self.dtype)).astype(x.dtype)
        if x.dtype == self.dtype:
            return y
        # Not a pair of casts, which XLA may drop as excess precision.
        narrow = jnp.finfo(self.dtype)
        return jax.lax.reduce_precision(y, narrow.nexp, narrow.nmant)


SLACK = 1e-9  # Of times, in layers: what rounding may do to a user's dt and ts.


def step_times(t0: float, t1: float, dt: float) -> np.ndarray:
    """The grid of a fixed-step solve, from t0 to t1: (steps + 1,) float64, exact at integers.

    Computed as t0 + i (t1 - t0) / steps, not by adding dt up: a sum of rounded steps drifts off
    the layer boundaries and evaluates the wrong layer there.
    """
    steps = round((t1 - t0) / dt)
    if steps < 1 or abs(steps * dt - (t1 - t0)) > SLACK * (t1 - t0):
        raise ValueError(f"dt = {dt} does not divide the span from {t0} to {t1}")
    # From a fractional start they may still miss a boundary, or t1, by rounding.
    times = _at_layers(t0 + np.arange(steps + 1) * (t1 - t0) / steps)
    times[-1] = t1
    return times


def _at_layers(times):
    layers = np.rint(times)
    return np.where(np.abs(times - layers) < SLACK, layers, times)


def _layer_times(t0: float, t1: float) -> np.ndarray:
    inner = np.arange(np.floor(t0) + 1, np.ceil(t1))
    return np.concatenate([[t0], inner, [t1]])


def _saved_times(ts, t0: float, t1: float) -> np.ndarray:
    if ts is None:
        return _layer_times(t0, t1)
    times = np.asarray(ts, np.float64)
    if times.ndim != 1 or times.size == 0 or not np.all(np.diff(times) > 0):
        raise ValueError(f"ts must be increasing times, got {ts}")
    if not (t0 - SLACK <= times[0] and times[-1] <= t1 + SLACK):
        raise ValueError(f"ts must lie within [{t0}, {t1}], got {times[0]} to {times[-1]}")
    return np.clip(times, t0, t1)


def _stored_steps(grid: np.ndarray, saved: np.ndarray) -> diffrax.SaveAt | None:
    """How to store states at evenly many steps as they are; None if that takes interpolation."""
    for start in (0, 1):
        count = len(saved) - start
        stride = (len(grid) - 1) // count if count else 0
        if stride:
            stored = np.concatenate([grid[:start], grid[stride::stride]])
            if stored.shape == saved.shape and np.all(np.abs(stored - saved) < SLACK):
                return diffrax.SaveAt(t0=bool(start), steps=stride)
    return None


def started(
    flow: Flow, x0: Float[Array, "tokens width"], context: Context | None
) -> Float[Array, "tokens width"]:
    """The state that `simulate` starts from. Raises ValueError for what is none of the flow's."""
    if jnp.ndim(x0) != 2 or jnp.shape(x0)[1] != flow.width or jnp.shape(x0)[0] < 1:
        raise ValueError(
            f"x0 must have shape (tokens, {flow.width}) with at least one token, got "
            f"{jnp.shape(x0)}; batches go through jax.vmap"
        )
    x0 = jnp.asarray(x0)
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise ValueError(f"x0 must be floating point, got {x0.dtype}")
    check_context(context, x0.shape[0])
    return flow.check_start(x0, context)


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
        dt: the step in layers; it has to divide the span. A step across a layer boundary, such as
            0.4, costs methods of higher order their order. With an adaptive
            `stepsize_controller`, the first step.
        ts: the times of the result, increasing; None for t0, every layer boundary, and t1. A time
            between two steps is interpolated.
        t0, t1: the span in layers, within [0, depth]; by default all of it.
        context: positions and padding, see `Context`.
        adjoint: how to differentiate. None serves forward and reverse mode alike.
        stepsize_controller: an adaptive Diffrax controller, for example
            `diffrax.PIDController(rtol, atol)`, with a solver that estimates its error; it is told
            of the flow's jumps.
        max_steps: bounds an adaptive solve.

    Returns:
        The times, the states at them, and how the solve ended. A solve that fails, for example at
        `max_steps`, returns the states that it reached, infinity for the rest, and its status.
        Explicit fixed steps do not fail: a state that overflows is returned as the layers compute
        it, inf or nan, with all steps taken.

    Raises:
        ValueError: a wrong shape or type of x0 or the context, dt <= 0, a dt that does not divide
            the span, a span outside the flow's depth, times outside the span or out of order, an
            adaptive controller with a solver that has no error estimate, or what the flow's
            `check_start` refuses, such as a state off the sphere it lives on.

    Examples:
        >>> import jax.numpy as jnp
        >>> import svflow as sv
        >>> class Decay(sv.Flow):
        ...     depth, width = 4, 1
        ...
        ...     def velocity(self, t, x, context=None):
        ...         return -x / 2
        >>> x0 = jnp.ones((1, 1))
        >>> sv.simulate(Decay(), x0).xs[:, 0, 0].tolist()  # a layer is an Euler step
        [1.0, 0.5, 0.25, 0.125, 0.0625]
        >>> fine = sv.simulate(Decay(), x0, solver=diffrax.Tsit5(), dt=1 / 4).xs[-1, 0, 0]
        >>> bool(abs(fine - jnp.exp(-2)) < 1e-4)  # and smaller steps go to exp(-depth / 2)
        True
    """
    check_flow(flow, "simulate takes")
    if solver is not None and not isinstance(solver, diffrax.AbstractSolver):
        raise ValueError(f"solver must be an instance of a Diffrax solver, got {solver!r}")
    for name, value, kind in (
        ("stepsize_controller", stepsize_controller, diffrax.AbstractAdaptiveStepSizeController),
        ("adjoint", adjoint, diffrax.AbstractAdjoint),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a diffrax.{kind.__name__}, got {value!r}")
    x0 = started(flow, x0, context)
    for name, given in dict(t0=t0, t1=0.0 if t1 is None else t1, dt=dt).items():
        number = isinstance(given, jax.core.Tracer) or np.asarray(given).dtype.kind in "iuf"
        if not number or np.ndim(given):
            raise ValueError(f"{name} must be a number, got {given!r}")
    t0, t1 = float(_at_layers(t0)), float(_at_layers(flow.depth if t1 is None else t1))
    if not 0 <= t0 < t1 <= flow.depth:
        raise ValueError(
            f"the span must run forwards within [0, {flow.depth}], got t0 = {t0}, t1 = {t1}"
        )
    if not (np.isfinite(dt) and dt > 0):
        raise ValueError(f"dt must be positive and finite, got {dt}")
    saved = _saved_times(ts, t0, t1)
    time = at_least_float32(x0.dtype)
    solver = LieTrotter() if solver is None else solver
    if isinstance(solver, SplittingSolver) and (
        time != x0.dtype or type(flow).retract is not Flow.retract
    ):
        solver = replace(solver, retraction=_Retraction(x0.dtype))

    stored = first = None
    last = t1
    jumps = np.asarray([t for t in flow.jumps if t0 < t < t1], time)
    at_starts = isinstance(solver, (SplittingSolver, diffrax.Euler))
    if not at_starts and t1 in flow.jumps:
        # Runge-Kutta methods evaluate the end of a step; there the next layer has begun.
        last = np.nextafter(np.asarray(t1, time), np.asarray(-np.inf, time))
    if stepsize_controller is None:
        if isinstance(adjoint, diffrax.BacksolveAdjoint):
            raise ValueError("BacksolveAdjoint needs an adaptive stepsize_controller")
        grid = step_times(t0, t1, float(dt))
        if at_starts:
            stored = _stored_steps(grid, saved)
        else:
            grid = _split_at_jumps([*grid[:-1], last], jumps)
        if not np.all(np.diff(np.asarray(grid, time)) > 0):
            raise ValueError(f"dt = {dt} is too small for times in {time}")
        max_steps = len(grid) - 1
        stepsize_controller = _Grid(jnp.asarray(grid, time))
        implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
        if adjoint is None:
            adjoint = diffrax.DirectAdjoint() if implicit else ScanAdjoint()
    else:
        if not isinstance(solver, diffrax.AbstractAdaptiveSolver):
            raise ValueError(
                f"{type(solver).__name__} has no error estimate for an adaptive controller"
            )
        stepsize_controller = diffrax.ClipStepSizeController(
            stepsize_controller, jump_ts=jnp.asarray(jumps) if jumps.size else None
        )
        adjoint = diffrax.DirectAdjoint() if adjoint is None else adjoint
        first = jnp.asarray(dt, time)
    # Diffrax's modules hold functions too, which are no arguments of a compiled program.
    leaves, method = jax.tree.flatten((solver, stepsize_controller, adjoint))
    arrays = [leaf if eqx.is_array(leaf) else None for leaf in leaves]
    static = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
    return _solve(
        flow,
        x0,
        context,
        jnp.asarray(saved, time),
        jnp.asarray([t0, last], time),
        first,
        arrays,
        method=method,
        static=static,
        stored=stored,
        max_steps=max_steps,
    )


def _split_at_jumps(grid: Sequence[float], jumps: np.ndarray) -> np.ndarray:
    """The grid with each of its jumps t met twice, as the float before t and as t itself.

    A Runge-Kutta method evaluates the end of its step; there it must see the layer that ends.
    """
    times = np.asarray(grid, jumps.dtype)
    at = np.intersect1d(jumps, times)
    return np.union1d(times, np.nextafter(at, np.asarray(-np.inf, times.dtype)))


@functools.partial(jax.jit, static_argnames=("method", "static", "stored", "max_steps"))
def _solve(
    flow, x0, context, saved, span, first, arrays, *, method, static, stored, max_steps
) -> Trajectory:
    leaves = [a if s is None else s for a, s in zip(arrays, static)]
    solver, controller, adjoint = jax.tree.unflatten(method, leaves)
    if isinstance(solver, SplittingSolver):
        fields = (VectorField(x0.dtype, k) for k in range(len(flow.splitting)))
        terms: diffrax.AbstractTerm = diffrax.MultiTerm(*map(diffrax.ODETerm, fields))
    else:
        terms = diffrax.ODETerm(VectorField(x0.dtype))
    solution = diffrax.diffeqsolve(
        terms,
        solver,
        t0=span[0],
        t1=span[1],
        dt0=first,
        y0=x0,
        args=(flow, context),
        saveat=diffrax.SaveAt(ts=jnp.minimum(saved, span[1])) if stored is None else stored,
        stepsize_controller=controller,
        adjoint=adjoint,
        max_steps=max_steps,
        throw=False,
    )
    return Trajectory(saved, solution.ys.astype(x0.dtype), solution.result)
