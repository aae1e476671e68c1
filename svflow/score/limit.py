"""The continuous limit of a flow: how far its layers are from dt -> 0, and what the limit costs.

Axes: `steps`, the sizes of a step; `states`, the start and the state after each layer; `tokens`;
`width`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_flow
from svflow.simulate import VectorField, simulate


class Limit(NamedTuple):
    """A flow in smaller and smaller steps of its own splitting, against an adaptive solution.

    A distance of two states is |x - y| / |y| over all tokens and the width, y of the reference.

    Arguments:
        dts: (steps,) the steps, in layers; 1 is the flow's own layers.
        gap: (steps, states) the distance from the reference.
        order: (steps - 1,) log(gap ratio) / log(dt ratio) at the last state: 1 for a
            Lie-Trotter splitting once dt is small.
        xs: (states, tokens, width) of the reference.
        reference_gap: (states,) its distance from the solution of ten times the tolerance: about
            how far the reference itself is off, and more.
        evaluations: of the velocity, by the reference; a layer loop has one per layer.
        coarse_evaluations: by the solution of ten times the tolerance.
    """

    dts: Float[np.ndarray, " steps"]
    gap: Float[np.ndarray, "steps states"]
    order: Float[np.ndarray, " between"]
    xs: Float[np.ndarray, "states tokens width"]
    reference_gap: Float[np.ndarray, " states"]
    evaluations: int
    coarse_evaluations: int


def limit(
    flow: Flow,
    x0: Float[Array, "tokens width"],
    *,
    dts: Sequence[float] = (1, 0.5, 0.25, 0.125),
    tolerance: float = 1e-5,
    context: Context | None = None,
    max_steps: int = 65536,
) -> Limit:
    """How a trajectory moves as dt -> 0.

    The reference is Tsit5 with adaptive steps, which meets every layer boundary and integrates the
    unsplit velocity. A flow with weights between layers is another flow, with a limit of its own:
    give `flow.interpolated("linear")`.

    Arguments:
        flow: any flow.
        x0: (tokens, width).
        dts: steps that divide a layer.
        tolerance: rtol of the reference, and atol relative to the root mean square of x0.
        context: positions and padding.
        max_steps: of the reference.

    Raises:
        ValueError: what `simulate` refuses, a step that does not divide a layer, or an adaptive
            solution that did not reach the end within max_steps.
    """
    check_flow(flow, "limit takes")
    x0 = _floats(x0)
    if not len(dts):
        raise ValueError("no steps are given")
    for dt in dts:
        if isinstance(dt, str) or not (0 < dt <= 1 and abs(1 / dt - round(1 / dt)) < 1e-9):
            raise ValueError(f"a step must be one over an integer, got {dt}")
    _check_tolerance(tolerance)
    solved = []
    for rtol in (tolerance, 10 * tolerance):
        options = adaptive(rtol, x0)
        path, count = _counted(flow, x0, **options, dt=0.25, context=context, max_steps=max_steps)
        _check_reached(path, rtol, max_steps)
        solved.append((np.asarray(path.xs, np.float64), count))
    (reference, evaluations), (coarse, coarse_evaluations) = solved
    gaps = []
    for dt in dts:
        xs = simulate(flow, x0, dt=dt, context=context).xs
        gaps.append(distance(np.asarray(xs, np.float64), reference))
    steps, gap = np.asarray(dts, np.float64), np.stack(gaps)
    with np.errstate(all="ignore"):
        order = np.diff(np.log(gap[:, -1])) / np.diff(np.log(steps))
    return Limit(
        dts=steps,
        gap=gap,
        order=order,
        xs=reference,
        reference_gap=distance(coarse, reference),
        evaluations=evaluations,
        coarse_evaluations=coarse_evaluations,
    )


def _floats(x0):
    x0 = jnp.asarray(x0)
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise ValueError(f"x0 must be floating point, got {x0.dtype}")
    return x0


def _check_tolerance(tolerance):
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")


def _check_reached(path, tolerance, max_steps):
    if path.result != diffrax.RESULTS.successful:
        raise ValueError(
            f"the adaptive solution to {tolerance:g} did not reach the end in {max_steps} steps"
        )


def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| / |y| over the last two axes."""
    size = np.linalg.norm(y, axis=(-2, -1))
    return np.linalg.norm(x - y, axis=(-2, -1)) / np.where(size == 0, 1, size)


def adaptive(rtol: float, x0: Float[Array, "tokens width"]) -> dict[str, Any]:
    """Tsit5 with adaptive steps, as arguments of `simulate`; atol is rtol times the root mean
    square of x0."""
    wide = x0.astype(at_least_float32(x0.dtype))
    # Arrays: another tolerance is not another program.
    tolerance = jnp.asarray(rtol, wide.dtype)
    atol = tolerance * jnp.sqrt(jnp.mean(wide * wide))
    controller = diffrax.PIDController(rtol=tolerance, atol=atol)
    return dict(solver=diffrax.Tsit5(), stepsize_controller=controller)


class Gradients(NamedTuple):
    """The gradient of cotangent . x(T) by x0, computed in three ways.

    Arguments:
        direct: (tokens, width) through the steps that the adaptive solver took.
        backsolve: (tokens, width) by the adjoint equation, solved backwards in time with the state,
            nothing stored; nan where that solve did not reach the start.
        layers: (tokens, width) through the flow's own layers, dt = 1.
        error: |backsolve - direct| / |direct|.
        drift: |x - x0| / |x0|, x the start that the backward solve comes to; nan as `backsolve`.
        cosine: of layers and direct.
    """

    direct: Float[np.ndarray, "tokens width"]
    backsolve: Float[np.ndarray, "tokens width"]
    layers: Float[np.ndarray, "tokens width"]
    error: float
    drift: float
    cosine: float


def gradients(
    flow: Flow,
    x0: Float[Array, "tokens width"],
    cotangent: Float[Array, "tokens width"],
    *,
    tolerance: float = 1e-5,
    max_steps: int = 4096,
) -> Gradients:
    """Adjoint gradients against direct ones, in the continuous limit and in the layers.

    Solving the state backwards is unstable where the flow contracts: the error says how much of
    the adjoint's promise a model keeps. That solve is of the adjoint by the state alone, and so
    are the steps that it takes.

    Raises:
        ValueError: as `limit`.
    """
    check_flow(flow, "gradients takes")
    x0, cotangent = _floats(x0), jnp.asarray(cotangent)
    if cotangent.shape != x0.shape or cotangent.dtype != x0.dtype:
        raise ValueError(
            f"a cotangent is {x0.dtype} of shape {x0.shape}, got {cotangent.dtype} "
            f"{cotangent.shape}"
        )
    _check_tolerance(tolerance)
    fine = dict(**adaptive(tolerance, x0), dt=0.25, max_steps=max_steps)

    def through(options):
        def value(x0, flow, cotangent):
            path = simulate(flow, x0, ts=[float(flow.depth)], **options)
            return jnp.sum(path.xs[-1] * cotangent), path

        slope, path = jax.jit(jax.grad(value, has_aux=True))(x0, flow, cotangent)
        return np.asarray(slope, np.float64), path

    direct, path = through(dict(fine, adjoint=diffrax.RecursiveCheckpointAdjoint()))
    _check_reached(path, tolerance, max_steps)
    layers, _ = through({})
    controller = fine["stepsize_controller"]
    start, backsolve, result = _backwards(
        flow, path.xs[-1], cotangent, controller.rtol, controller.atol, max_steps=max_steps
    )
    reached = result == diffrax.RESULTS.successful
    start, backsolve = (
        np.where(reached, np.asarray(a, np.float64), np.nan) for a in (start, backsolve)
    )
    size_of = np.linalg.norm
    return Gradients(
        direct,
        backsolve,
        layers,
        error=float(size_of(backsolve - direct) / size_of(direct)),
        drift=float(distance(start, np.asarray(x0, np.float64))),
        cosine=float(np.sum(layers * direct) / (size_of(layers) * size_of(direct))),
    )


@functools.partial(jax.jit, static_argnames="max_steps")
def _backwards(flow, end, cotangent, rtol, atol, *, max_steps):
    """(x, a, how it ended) at the start, by dx/dt = v and da/dt = -(dv/dx)^T a from x, a at the
    end. `diffrax.BacksolveAdjoint` solves for the gradient by the weights with them, and does not
    say how it ended."""
    field, wide = VectorField(end.dtype), rtol.dtype

    def both(t, pair, args):
        x, a = pair
        v, pull = jax.vjp(lambda x: field(t, x, args), x)
        return v, -pull(a)[0]

    controller: diffrax.AbstractStepSizeController = diffrax.PIDController(rtol=rtol, atol=atol)
    if flow.jumps:
        controller = diffrax.ClipStepSizeController(
            controller, jump_ts=jnp.asarray(flow.jumps, wide)
        )
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(both),
        diffrax.Tsit5(),
        t0=jnp.asarray(flow.depth, wide),
        t1=jnp.asarray(0, wide),
        dt0=jnp.asarray(-0.25, wide),
        y0=(end.astype(wide), cotangent.astype(wide)),
        args=(flow, None),
        stepsize_controller=controller,
        max_steps=max_steps,
        throw=False,
    )
    x, a = solution.ys
    return x[-1], a[-1], solution.result


_COUNT = [0]


def _tick():
    _COUNT[0] += 1


class _Counted(Flow):
    """A flow that counts how often its velocity is computed."""

    def __init__(self, flow: Flow):
        self.depth, self.width = flow.depth, flow.width
        self.flow = flow

    @property
    def jumps(self):
        return self.flow.jumps

    def check_start(self, x, context=None):
        return self.flow.check_start(x, context)

    def velocity(self, t, x, context=None):
        jax.debug.callback(_tick)
        return self.flow.velocity(t, x, context)


def _counted(flow, x0, **options):
    """(the trajectory, evaluations of the velocity)."""
    _COUNT[0] = 0
    path = jax.block_until_ready(simulate(_Counted(flow), x0, **options))
    jax.effects_barrier()
    return path, _COUNT[0]
