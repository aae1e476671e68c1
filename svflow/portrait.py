"""The numbers of a portrait: what one text's states do on their way through a model's layers.

Axes: `tokens`; `states`, the embedding and the state after each layer, so layers + 1; `layers`;
`substeps` and `branches` of one layer, see `Flow.splitting`; `width`, the residual stream.

Norms are root mean squares per coordinate, |h| / sqrt(width). Where `flow.centered`, every number
but the loss is measured on states less their mean over the width, which is what LayerNorm reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from svflow import geometry
from svflow.dtypes import at_least_float32
from svflow.models.config import TransformerConfig
from svflow.models.transformer import Transformer
from svflow.simulate import simulate


class Portrait(NamedTuple):
    r"""The dynamics of one text, token by token.

    A branch's update v at the state h, with x = n(h) its direction, rho = |h| / sqrt(d) and
    c = x . v / d, is v = c x + P_x v; see `geometry.polar`.

    Arguments:
        substeps: the name of each substep: its branches, joined by " + " where there are several.
        branches: the name of each branch.
        norm: (states, tokens) rho.
        step: (layers, substeps, tokens) the step on the sphere 1 / (rho + c), c of all the
            substep's branches together; nan where rho + c <= 0.
        radial: (layers, branches, tokens) c, signed.
        tangential: (layers, branches, tokens) |P_x v| / sqrt(d), so that
            radial^2 + tangential^2 = |v|^2 / d.
        angle: (layers, tokens) the angle between the states before and after, in radians.
        path: (states, tokens) the geodesic path length: the sum of the angles so far.
        cosine: (layers - 1, tokens) of the angle between a layer's displacement of the state and
            the displacement by the layer before.
        refined: (states, tokens) |x - y| / |x|, x the model's state and y that of the same field
            in steps of `dt` instead of 1: `simulate` with the flow's own splitting.
        refined_error: (states, tokens) |y - y2| / |x|, y2 in steps of 2 dt: about how far y still
            is from dt -> 0, for a method of order 1.
        loss: (states, tokens - 1) the cross-entropy of the next token in nats, every state read
            out as if it were the last (the logit lens); None for a model
            without a head or whose attention is not causal.
        dt: the step of the refined trajectory, in layers.
    """

    substeps: tuple[str, ...]
    branches: tuple[str, ...]
    norm: Float[np.ndarray, "states tokens"]
    step: Float[np.ndarray, "layers substeps tokens"]
    radial: Float[np.ndarray, "layers branches tokens"]
    tangential: Float[np.ndarray, "layers branches tokens"]
    angle: Float[np.ndarray, "layers tokens"]
    path: Float[np.ndarray, "states tokens"]
    cosine: Float[np.ndarray, "between tokens"]
    refined: Float[np.ndarray, "states tokens"]
    refined_error: Float[np.ndarray, "states tokens"]
    loss: Float[np.ndarray, "states predicted"] | None
    dt: float


def portrait(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"],
    *,
    dt: float = 0.125,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Portrait:
    """Measures how a model moves one text, without padding, from its embedding to its last layer.

    Arguments:
        model: what `embed`s ids, has a `flow`, and `unembed`s states.
        ids: (tokens,) at least two.
        dt: the step of the refined trajectory; 1 / dt is an even number.
        progress: wraps the range over layers, for example `tqdm.tqdm`.

    Matrix products run at the highest precision of the device, the measures in float32 at least.
    The measures are a re-parametrisation of the layers and hold for untrained models as well; the
    polar form is derived here after Liao, arXiv 2604.23740. Logit lens: nostalgebraist,
    "interpreting GPT: the logit lens", 2020.

    Raises:
        ValueError: what is no model, ids that the model does not take or fewer than two of them, a
            dt that does not fit, or a state that is not finite.
    """
    if not 0 < dt <= 0.5 or abs(1 / dt - 2 * round(0.5 / dt)) > 1e-9:
        raise ValueError(f"dt must be one over an even number, got {dt}")
    if not hasattr(model, "flow"):
        raise ValueError(f"a portrait is of a transformer, got {type(model).__name__}")
    flow = model.flow
    with jax.default_matmul_precision("highest"):
        state = model.embed(ids)  # checks ids before they become an array of fewer bits
        ids = jnp.asarray(ids)
        if state.shape[0] < 2:
            raise ValueError("a portrait needs at least two tokens, got one")
        _check_finite(state, 0)
        fine = coarse = state
        update = jnp.ones(state.shape, at_least_float32(state.dtype))  # before the first: any
        with_loss = loss_absent(model.config) is None
        norms, rows, gaps = [_norm(flow, state)], [], [_gaps(flow, state, fine, coarse)]
        losses = [_loss(model, state, ids)] if with_loss else []
        for layer in progress(range(flow.depth)):
            row, state, update = _measure(flow, jnp.asarray(layer, jnp.int32), state, update)
            _check_finite(state, layer + 1)
            end = layer + 1.0
            fine = simulate(flow, fine, dt=dt, t0=layer, t1=end, ts=[end]).xs[0]
            coarse = simulate(flow, coarse, dt=2 * dt, t0=layer, t1=end, ts=[end]).xs[0]
            rows.append(row)
            norms.append(_norm(flow, state))
            gaps.append(_gaps(flow, state, fine, coarse))
            if with_loss:
                losses.append(_loss(model, state, ids))
    step, radial, tangential, angle, cosine = (np.stack(column) for column in zip(*rows))
    refined, refined_error = (np.stack(column) for column in zip(*gaps))
    start = np.zeros_like(angle[:1])
    return Portrait(
        substeps=tuple(" + ".join(names) for names in flow.splitting),
        branches=tuple(name for names in flow.splitting for name in names),
        norm=np.stack(norms),
        step=step,
        radial=radial,
        tangential=tangential,
        angle=angle,
        path=np.concatenate([start, np.cumsum(angle, axis=0)]),
        cosine=cosine[1:],
        refined=refined,
        refined_error=refined_error,
        loss=np.stack(losses) if with_loss else None,
        dt=float(dt),
    )


def loss_absent(config: TransformerConfig) -> str | None:
    """Why a model has no next-token loss; None where it has one."""
    if config.head is None:
        return "the checkpoint has no head"
    if not config.causal:
        return "its attention sees both sides of a token, so there is no next token to predict"
    return None


class Summary(NamedTuple):
    """A measure over tokens: (...) each, the tokens' axis gone.

    Arguments:
        mean, median, lower, upper: over the tokens whose value is finite; lower and upper are the
            quartiles; nan where no token's is.
        first: the first token's own value. In trained models it is often an outlier.
        tokens: how many tokens' values are finite.
    """

    mean: Float[np.ndarray, "*lead"]
    median: Float[np.ndarray, "*lead"]
    lower: Float[np.ndarray, "*lead"]
    upper: Float[np.ndarray, "*lead"]
    first: Float[np.ndarray, "*lead"]
    tokens: Int[np.ndarray, "*lead"]


def summary(values: Float[np.ndarray, "*lead tokens"]) -> Summary:
    """The mean, the quartiles and the first token of a measure, in float64."""
    finite = np.isfinite(values)
    values = np.where(finite, np.asarray(values, np.float64), np.nan)
    some = finite.any(axis=-1)
    known = np.where(some[..., None], values, 0)  # numpy warns of rows that are all nan
    found = (np.nanmean(known, -1), *np.nanquantile(known, [0.5, 0.25, 0.75], axis=-1))
    mean, median, lower, upper = (np.where(some, a, np.nan) for a in found)
    return Summary(mean, median, lower, upper, values[..., 0], finite.sum(axis=-1))


def _read(flow, x):
    return geometry.norm_input(x, centered=flow.centered)


@jax.jit
def _norm(flow, x):
    return geometry.rms(_read(flow, x))


@jax.jit
def _measure(flow, layer, x, previous):
    """One layer's (step, radial, tangential, angle, cosine), the state after it, its update."""
    step, radial, tangential = [], [], []
    y = x
    for substep, names in enumerate(flow.splitting):
        h = _read(flow, y)
        updates = [_read(flow, flow.branch(name, layer, y)) for name in names]
        step.append(geometry.polar(h, functools.reduce(jnp.add, updates)).dt)
        parts = [geometry.polar(h, update) for update in updates]
        radial += [part.radial for part in parts]
        tangential += [geometry.rms(part.tangential) for part in parts]
        y = flow.retract(y + flow.field(substep, layer, y))
    before, after = _read(flow, x), _read(flow, y)
    update = after - before
    cosine = jnp.mean(update * previous, axis=-1) / (geometry.rms(update) * geometry.rms(previous))
    angle = geometry.geodesic(before, after)
    return (jnp.stack(step), jnp.stack(radial), jnp.stack(tangential), angle, cosine), y, update


@jax.jit
def _gaps(flow, x, fine, coarse):
    x, fine, coarse = (_read(flow, a) for a in (x, fine, coarse))
    return geometry.rms(x - fine) / geometry.rms(x), geometry.rms(fine - coarse) / geometry.rms(x)


@jax.jit
def _loss(model, x, ids):
    logits = model.unembed(x[:-1])
    scores = jax.nn.log_softmax(logits.astype(at_least_float32(logits.dtype)), axis=-1)
    return -jnp.take_along_axis(scores, ids[1:, None], axis=-1)[:, 0]


def _check_finite(state, layer):
    if not bool(jnp.isfinite(state).all()):
        where = f"after layer {layer}" if layer else "that enters the first layer"
        raise ValueError(f"the state {where} is not finite in {state.dtype}; try a wider dtype")
