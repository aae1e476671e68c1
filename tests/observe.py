"""Everything that the tests look at in one flow, computed by one program."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from configs import FAMILY_CONFIGS, tiny_model
from flows import fast, normal, small_flows

import svflow as sv

STEP = 1e-3
LAYER = 1


class Observed(NamedTuple):
    """Axes: layers, substeps, tokens, width.

    Arguments:
        before, after: the states around each substep; branch: the sum of its branches there;
            field: its field there.
        start: the state before each layer; velocity: the velocity there, at float times.
        apart: the sum of the fields at the same state, at integer times.
        step, slope: the step of LAYER from start[LAYER] and its derivative along a direction.
        stepped: LAYER's step from start[LAYER] and from four states around it, as one batch.
        simulated: what `simulate` returns.
    """

    before: Any
    branch: Any
    field: Any
    after: Any
    start: Any
    velocity: Any
    apart: Any
    step: Any
    slope: Any
    stepped: Any
    simulated: Any


@fast
def observe(flow: sv.Flow, x, direction, context=None) -> Observed:
    substeps = range(len(flow.splitting))

    def layer_of(start, layer):
        t, x, rows = layer.astype(x0.dtype), start, []
        for k in substeps:
            branches = [flow.branch(name, layer, x, context) for name in flow.splitting[k]]
            field = flow.field(k, layer, x, context)
            after = flow.retract(x + field)
            rows.append((x, sum(branches[1:], start=branches[0]), field, after))
            x = after
        velocity = flow.velocity(t, start, context)
        fields = [flow.field(k, layer, start, context) for k in substeps]
        stacked = tuple(jnp.stack(column) for column in zip(*rows))
        return x, (*stacked, start, velocity, sum(fields[1:], start=fields[0]))

    x0 = x
    _, scanned = jax.lax.scan(layer_of, x0, jnp.arange(flow.depth))
    here = scanned[4][LAYER]
    layer = jnp.asarray(LAYER)

    def step(x):
        return flow.step(layer, x, context)

    step_here, slope = jax.jvp(step, (here,), (direction,))
    around = jnp.stack([here + s * STEP * direction for s in (0, 1, -1, 2, -2)])
    return Observed(
        *scanned,
        step_here,
        slope,
        jax.vmap(step)(around),
        sv.simulate(flow, x0, context=context),
    )


ALL = (*small_flows(), *FAMILY_CONFIGS)


def make(name: str, dtype: str = "float64", seed: int = 0):
    """A flow of this name and a state for it."""
    if name in FAMILY_CONFIGS:
        model = tiny_model(name, dtype, seed)
        return model.flow, model.embed(jnp.asarray([3, 1, 4, 1, 5]))
    flow = small_flows(jnp.dtype(dtype))[name]
    x = flow.retract(normal(seed + 7, 5, flow.width))
    return flow, x.astype(dtype)


@functools.cache
def observed(name: str, seed: int = 0) -> tuple[sv.Flow, Observed]:
    flow, x = make(name, seed=seed)
    return flow, observe(flow, x, normal(11, *x.shape))
