"""The continuous limit of a flow: how far its layers are from dt -> 0, and what the limit costs.

Axes: `steps`, the sizes of a step; `states`, the start and the state after each layer; `tokens`;
`width`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow.dtypes import at_least_float32
from svflow.flow import Context, Flow, check_flow
from svflow.simulate import simulate


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
    x0 = jnp.asarray(x0)
    for dt in dts:
        if not (0 < dt <= 1 and abs(1 / dt - round(1 / dt)) < 1e-9):
            raise ValueError(f"a step must be one over an integer, got {dt}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    solved = []
    for rtol in (tolerance, 10 * tolerance):
        options = adaptive(rtol, x0)
        path, count = _counted(flow, x0, **options, dt=0.25, context=context, max_steps=max_steps)
        if path.result != diffrax.RESULTS.successful:
            raise ValueError(
                f"the adaptive solution to {rtol:g} did not reach the end in {max_steps} steps"
            )
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
            nothing stored.
        layers: (tokens, width) through the flow's own layers, dt = 1.
        error: |backsolve - direct| / |direct|.
        cosine: of layers and direct.
    """

    direct: Float[np.ndarray, "tokens width"]
    backsolve: Float[np.ndarray, "tokens width"]
    layers: Float[np.ndarray, "tokens width"]
    error: float
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
    the adjoint's promise a model keeps.

    Raises:
        ValueError: as `limit`.
    """
    check_flow(flow, "gradients takes")
    if jnp.shape(cotangent) != jnp.shape(x0):
        raise ValueError(f"a cotangent of shape {jnp.shape(cotangent)}, not {jnp.shape(x0)}")
    x0 = jnp.asarray(x0)
    make = dict(**adaptive(tolerance, x0), dt=0.25, max_steps=max_steps)
    ways: tuple[dict[str, Any], ...] = (
        dict(make, adjoint=diffrax.RecursiveCheckpointAdjoint()),
        dict(make, adjoint=diffrax.BacksolveAdjoint()),
        {},
    )
    end = [float(flow.depth)]

    def one(options):
        def value(x0, flow, cotangent):
            return jnp.sum(simulate(flow, x0, ts=end, **options).xs[-1] * cotangent)

        return np.asarray(jax.jit(jax.grad(value))(x0, flow, cotangent), np.float64)

    direct, backsolve, layers = (one(options) for options in ways)
    size_of = np.linalg.norm
    return Gradients(
        direct,
        backsolve,
        layers,
        error=float(size_of(backsolve - direct) / size_of(direct)),
        cosine=float(np.sum(layers * direct) / (size_of(layers) * size_of(direct))),
    )


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

    def velocity(self, t, x, context=None):
        jax.debug.callback(_tick)
        return self.flow.velocity(t, x, context)


def _counted(flow, x0, **options):
    """(the trajectory, evaluations of the velocity)."""
    _COUNT[0] = 0
    path = jax.block_until_ready(simulate(_Counted(flow), x0, **options))
    jax.effects_barrier()
    return path, _COUNT[0]
