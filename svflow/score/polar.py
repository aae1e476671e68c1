"""The layer theorem along a trajectory, and what splitting a layer into substeps changes.

Axes: `layers`; `substeps` of one layer, see `Flow.splitting`; `tokens`; `width`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from svflow import geometry
from svflow.flow import Context, Flow, check_context, check_flow
from svflow.score.correspondence import check_layer, check_weights
from svflow.score.mixtures import check_states


def polar(
    flow: Flow,
    xs: Float[Array, "states tokens width"],
    *,
    context: Context | None = None,
    strict: bool = True,
) -> geometry.Polar:
    r"""Every substep of a trajectory in polar form, each a retracted step on the sphere:

        h' = h + v,  h = rho x:   n(h') = R_x(dt P_x v),  dt = 1 / (rho + c),  c = x . v / d.

    v is the substep's update (`Flow.branch`), before any norm that follows the addition: with one
    the next state is n(h') with its gain and bias. For a flow with `centered` norms it holds on
    the complement of the ones vector, the mean apart. An epsilon in the norm that a block reads
    through changes v, not the identity: the read state is h / rho_eps with
    rho_eps^2 = |h|^2 / d + eps.

    The identity is a re-parametrisation: it holds for every residual block, trained or not.

    Arguments:
        flow: any flow.
        xs: (depth + 1, tokens, width) the states before each layer and the last, as `simulate`
            returns them; the last is not used.
        context: positions and padding.
        strict: whether a step with rho + c <= 0, for which the theorem does not hold, is an error;
            otherwise, and under jit, its dt is nan.

    Returns:
        A `geometry.Polar` with leading axes (layers, substeps).

    Raises:
        ValueError: wrong shapes, or a step of a real token that leaves the hemisphere, by its
            layer and token.
    """
    check_flow(flow)
    if not isinstance(xs, (jax.Array, np.ndarray)):
        raise ValueError(f"xs must be an array, got {type(xs).__name__}")
    if xs.ndim != 3 or xs.shape[0] != flow.depth + 1 or xs.shape[2] != flow.width:
        raise ValueError(
            f"xs must have shape ({flow.depth + 1}, tokens, {flow.width}): the state before each "
            f"layer and the last, got {xs.shape}"
        )
    check_weights(flow, xs, "xs")
    check_context(context, xs.shape[1])
    steps = _polar(flow, xs, context)
    if strict and not isinstance(steps.dt, jax.core.Tracer):
        _check_forward(flow, steps, None if context is None else context.mask)
    return steps


@jax.jit
def _polar(flow, xs, context):
    def layer(_, inputs):
        index, x = inputs
        rows = []
        for k, names in enumerate(flow.splitting):
            updates = [flow.branch(name, index, x, context) for name in names]
            v = functools.reduce(jnp.add, updates)
            rows.append(geometry.polar(x, v, centered=flow.centered))
            x = flow.retract(x + flow.field(k, index, x, context))
        return None, jax.tree.map(lambda *parts: jnp.stack(parts), *rows)

    return jax.lax.scan(layer, None, (jnp.arange(flow.depth), xs[:-1]))[1]


def _check_forward(flow, steps, mask):
    total = np.asarray(steps.rho, np.float64) + np.asarray(steps.radial, np.float64)
    wrong = ~(total > 0)
    if mask is not None:
        wrong &= np.asarray(mask)
    if wrong.any():
        layer, substep, token = (int(i) for i in np.argwhere(wrong)[0])
        name = " + ".join(flow.splitting[substep])
        raise ValueError(
            f"the polar form needs rho + c > 0: in layer {layer} ({name}) it is "
            f"{total[layer, substep, token]:.4g} for token {token}, and so for {wrong.sum()} of "
            f"{wrong.size} steps"
        )


class Splitting(NamedTuple):
    """How a layer in two substeps differs from a parallel one.

    Arguments:
        difference: (tokens, width) the split step less the unsplit one, both of size dt.
        leading: (tokens, width) dt^2 Dv_2(x) v_1(x), which it is to first order in dt.
    """

    difference: Float[Array, "tokens width"]
    leading: Float[Array, "tokens width"]


def splitting_gap(
    flow: Flow, layer, x: Float[Array, "tokens width"], dt, *, context: Context | None = None
) -> Splitting:
    r"""Attention and then feed-forward, against both at once as a parallel block has them:

        dt v_2(x + dt v_1(x)) - dt v_2(x) = dt^2 Dv_2(x) v_1(x) + O(dt^3).

    Arguments:
        flow: one whose layers have two substeps, in R^d.
        layer, x: the layer and the state before it.
        dt: the step; 1 is the layer.

    Raises:
        ValueError: a flow that has another number of substeps, or a retraction; a layer it does
            not have, or a wrong state or context.

    Source: derived here.
    """
    check_flow(flow)
    if len(flow.splitting) != 2:
        raise ValueError(
            f"splitting is compared for two substeps; {type(flow).__name__} has "
            f"{len(flow.splitting)}"
        )
    if type(flow).retract is not Flow.retract:
        raise ValueError(f"{type(flow).__name__} retracts its states: it is not split in R^d")
    check_layer(flow, layer)
    check_states(x, flow.width)
    check_weights(flow, x, "x")
    check_context(context, x.shape[0])
    dt = jnp.asarray(dt, x.dtype)
    first = flow.field(0, layer, x, context)

    def second(x):
        return flow.field(1, layer, x, context)

    here, slope = jax.jvp(second, (x,), (first,))
    return Splitting(dt * (second(x + dt * first) - here), dt * dt * slope)
