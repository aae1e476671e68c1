"""What a text's states show of the score flow, along depth: one compiled pass over a model.

Axes: `layers`; `states`, the embedding and the state after each layer; `tokens`; `heads`, as
`groups` (key and value heads) times `shared`; `head`, the width of one head; `substeps` and
`branches` of a layer, see `Flow.splitting`; `width`, d in formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from svflow import attention, geometry
from svflow.dtypes import at_least_float32
from svflow.memory import check_memory
from svflow.models.rope import Rope
from svflow.models.transformer import Transformer
from svflow.score.bessel import cumulant
from svflow.score.kernel import Reading, gain_of, reading
from svflow.score.rotary import rotated_forms

PER_HEAD = (
    "entropy",
    "free_energy",
    "consistency",
    "dispersion",
    "cosine",
    "head_field",
    "head_radial",
)
"""The metrics of one head and token."""


class Metrics(NamedTuple):
    r"""The metrics of one text. Of head h and token i, with x the direction of the state that
    attention reads (on the sphere of radius sqrt(d); where the flow is `centered`, of the state
    less its mean):

    - s_ij, the logits that the softmax takes: scaled, soft-capped, over the keys that i may see;
      a_ij, the posterior that it gives;
    - eta_ij = W_O v_j, the score of key j as it reaches the residual stream: a norm on the output
      acts with its gain and its denominator at i (so only through the latter on i), and the output
      bias belongs to no key; v_i = sum_j a_ij eta_ij, the head's share of the update;
    - kappa_ij, the concentration of the kernel exp(s_ij), as in `Kernel`: of the normalised state
      that the logits are linear in, or where queries are normalised (QK-norm) of that query, so in
      the width of one head. Soft-caps and clips are in s_ij and not in kappa_ij.

    Arguments:
        substeps, branches: their names, as in `Portrait`.
        entropy: (layers, heads, tokens) -sum_j a_ij log a_ij over the log of the number of keys
            that i may see; nan where that is one.
        free_energy: (layers, heads, tokens) -log sum_j exp s_ij.
        consistency: (layers, heads, tokens) KL(a_i || p_i), nats, where p_ij ~ C(kappa_ij) exp s_ij
            is the exact posterior of the mixture under a uniform prior; 0 where all kappa are one.
        dispersion: (layers, heads, tokens) sum_j a_ij |eta_ij - v_i|^2, to rounding of
            sum_j a_ij |eta_ij|^2.
        cosine: (layers, heads, tokens) between v_i and the gradient of log sum_j exp s_ij by x_i,
            keys held, both tangent to the sphere. The gradient is the true one: soft-caps, query
            norms and clipping are differentiated.
        head_field: (layers, heads, tokens) |P_x v_i| / sqrt(d) of one head.
        head_radial: (layers, heads, tokens) the radial fraction of one head, x . v_i / (sqrt(d)
            |v_i|), from -1 to 1; nan where v_i is zero.
        field: (layers, branches, tokens) |P_x v| / sqrt(d), v the whole branch's raw update,
            biases and the norm on the output included.
        radial: (layers, branches, tokens) the radial fraction c sqrt(d) / |v|, c = x . v / d.
        dt: (layers, substeps, tokens) the step on the sphere 1 / (rho + c), see `geometry.polar`;
            nan where rho + c <= 0.
        angle: (layers, tokens) the angle between the states before and after a layer, radians.
        path: (states, tokens) the geodesic path length, the sum of the angles so far.

    All in float32 at least.
    """

    substeps: tuple[str, ...]
    branches: tuple[str, ...]
    entropy: Float[Array, "layers heads tokens"]
    free_energy: Float[Array, "layers heads tokens"]
    consistency: Float[Array, "layers heads tokens"]
    dispersion: Float[Array, "layers heads tokens"]
    cosine: Float[Array, "layers heads tokens"]
    head_field: Float[Array, "layers heads tokens"]
    head_radial: Float[Array, "layers heads tokens"]
    field: Float[Array, "layers branches tokens"]
    radial: Float[Array, "layers branches tokens"]
    dt: Float[Array, "layers substeps tokens"]
    angle: Float[Array, "layers tokens"]
    path: Float[Array, "states tokens"]


def metrics(model: Transformer, ids: Int[ArrayLike, " tokens"]) -> Metrics:
    """All metrics of one text without padding, in one compiled pass that moves the states itself.

    The attention weights are those of the forward pass; sums over keys of what is width-wide are
    taken within one head's width, through W_O^T W_O and its like, so that nothing here costs
    tokens^2 times the width. Rotary kernels have a length for every pair of tokens, see
    `rotated_forms`. Matrix products run at the highest precision of the device.

    Arguments:
        model: any `Transformer`, causal or not, trained or not.
        ids: (tokens,).

    Raises:
        ValueError: what is not a transformer, ids that it does not take, a norm of queries that
            removes their mean, or a state that is not finite.
        MemoryError: scores that do not fit.

    Source: the flow, Liao, arXiv 2604.23740; the metrics' exact form, defined and derived here.
    """
    rows, end = exactly(_pass, model, check_ids(model, ids))
    if not bool(jnp.isfinite(end).all()):
        raise ValueError(f"the last state is not finite in {end.dtype}; try a wider dtype")
    return Metrics(*names_of(model), **rows)


def names_of(model: Transformer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a layer's substeps and of its branches."""
    splitting = model.flow.splitting
    return tuple(" + ".join(s) for s in splitting), tuple(name for s in splitting for name in s)


def check_ids(model: Transformer, ids: Int[ArrayLike, " tokens"]) -> Int[Array, " tokens"]:
    """The ids as an array. Raises as `metrics` does before it computes anything."""
    if not isinstance(model, Transformer):
        raise ValueError(f"metrics are those of a Transformer, got {type(model).__name__}")
    config = model.config
    if config.query_key_norm is not None and config.norm == "layer":
        raise ValueError("norms of queries that remove their mean are not handled")
    spheres = [(config.norm, config.width - (config.norm == "layer"))]
    spheres += [("query", config.head_width)] if config.query_key_norm == "head" else []
    for name, dimension in spheres:
        if dimension < 2:
            raise ValueError(
                f"scores need spheres in two dimensions and more: what the {name} norm of this "
                f"model leaves has {dimension}"
            )
    ids = np.asarray(ids)
    jax.eval_shape(lambda model: model.embed(ids), model)
    table = model.embedding.tokens[...]
    size = at_least_float32(table.dtype).itemsize
    check_memory(f"scores of {ids.size} tokens", 8 * size * config.heads * ids.size**2, table)
    return jnp.asarray(ids)


def exactly(program: Callable[..., Any], *arguments: Any) -> Any:
    """(result) of a program that returns (result, close), see `measured`."""
    result, close = program(*arguments, interpolated=True)
    return result if bool(close) else program(*arguments, interpolated=False)[0]


@functools.partial(jax.jit, static_argnames="interpolated")
def _pass(model, ids, *, interpolated):
    return measured(model, ids, interpolated=interpolated)


def measured(model: Transformer, ids: Int[Array, " tokens"], *, interpolated: bool):
    """((the arrays of `Metrics` by name, the last state), close), within a compiled program.

    `interpolated` takes the normalisers of kernels without rotations from few lengths of states,
    which is exact to rounding where `close`; otherwise from every one, and `close` is True.
    """
    flow = model.flow
    with jax.default_matmul_precision("highest"):
        x = model.embed(ids)
        end, rows = jax.lax.scan(
            lambda x, layer: _layer(flow, layer, x, interpolated and not flow.config.ropes),
            x,
            jnp.arange(flow.depth, dtype=jnp.int32),
        )
    close = jnp.all(rows.pop("close"))
    path = jnp.cumsum(rows["angle"], axis=0)
    rows["path"] = jnp.concatenate([jnp.zeros_like(path[:1]), path])
    return (rows, end), close


def _read(flow, x):
    return geometry.norm_input(x, centered=flow.centered)


def _layer(flow, layer, x, interpolated):
    """(the state after a layer, its row of metrics)."""
    row: dict[str, Any] = {}
    field, radial, dt = [], [], []
    y = x
    for substep, names in enumerate(flow.splitting):
        h, updates = _read(flow, y), []
        for name in names:
            if name == "attention":
                update, heads = _attention(flow, layer, y, interpolated)
                row |= heads
            else:
                update = flow.branch(name, layer, y)
            v = _read(flow, update)
            part = geometry.polar(h, v)
            field.append(geometry.rms(part.tangential))
            radial.append(_ratio(part.radial, geometry.rms(v)))
            updates.append(update)
        total = functools.reduce(jnp.add, updates)
        dt.append(geometry.polar(h, _read(flow, total)).dt)
        y = y + total
        if flow.config.placement == "post":
            y = flow._pick(("attention_post_norm", "hidden_post_norm")[substep], layer, None)(y)
    row |= dict(field=jnp.stack(field), radial=jnp.stack(radial), dt=jnp.stack(dt))
    row["angle"] = geometry.geodesic(_read(flow, x), _read(flow, y))
    return y, row


def _ratio(a, b):
    """a / b, nan where b is zero."""
    return jnp.where(b == 0, jnp.nan, a / jnp.where(b == 0, 1, b))


def _attention(flow, layer, x, interpolated):
    """(attention's raw update, its metrics by head)."""
    config, dtype = flow.config, x.dtype
    wide = at_least_float32(dtype)
    tokens, groups = x.shape[0], config.kv_heads
    shared = config.heads // groups
    module = flow._pick("attention", layer, None)
    q, k, v = flow._project(layer, None, x, None)
    allowed = flow._allowed(layer, tokens, None)
    scale = jnp.asarray(config.scales, dtype)[layer]

    scores = _scores(q * scale, k)
    slope = None
    if config.attention_softcap is not None:
        squashed = jnp.tanh(scores / config.attention_softcap)
        scores, slope = config.attention_softcap * squashed, 1 - squashed.astype(wide) ** 2
    scores = scores.astype(wide)
    top = jnp.max(jnp.where(allowed, scores, -jnp.inf), axis=-1, keepdims=True)
    shifted = jnp.where(allowed, scores - top, jnp.finfo(wide).min)
    share = jnp.exp(shifted)
    total = jnp.sum(share, axis=-1, keepdims=True)
    a = share / total
    log_total = jnp.log(total[..., 0])

    narrow, q, k, v, scale = v, *(b.astype(wide) for b in (q, k, v, scale))
    kernel = _kernel(flow, layer, x)
    output = _output(flow, layer, module)
    gram = jnp.einsum("hkd,hld->hkl", output, output)
    values = jnp.repeat(v, shared, axis=1)
    lengths = _form(gram, values, values).reshape(tokens, groups, shared)
    interpolated = interpolated and slope is None
    if interpolated:
        weight, nodes, close = _interpolation(kernel, config.heads, k, scale)
    else:
        nodes, close = jnp.zeros((tokens, config.heads, 0), wide), jnp.asarray(True)
    # One product for all that is averaged over keys.
    columns = [v, k, lengths, nodes.reshape(tokens, groups, -1)]
    means = attention.mix_values(a, [jnp.concatenate(columns, axis=-1)])
    ends = np.cumsum([part.shape[-1] for part in columns[:-1]])
    mixed, mean_key, length, mean_nodes = jnp.split(means, ends, axis=-1)
    length, mean_nodes = (_own(part, groups) for part in (length, mean_nodes))
    plain = mixed if dtype == wide else attention.mix_values(a.astype(dtype), [narrow])
    plain = module.output(plain.reshape(tokens, -1))
    update = flow._post("attention_post_norm", layer, None, plain)
    if slope is None:
        level = _by_query(scale * jnp.sum(q * mean_key, axis=-1), groups)
        mean_slope = mean_key
    else:
        level = jnp.sum(a * jnp.where(allowed, scores, 0), axis=-1)
        mean_slope = attention.mix_values(a * slope, [k])
    entropy = log_total + (top[..., 0] - level)
    count = jnp.sum(allowed, axis=-1).astype(wide)

    if interpolated:
        growth = _scores(weight, nodes).reshape(scores.shape)
        level = _by_query(jnp.sum(weight * mean_nodes, axis=-1), groups)
    else:
        growth = _growths(flow, layer, kernel, k, scale)
        level = jnp.sum(a * growth, axis=-1)
    tilted = jnp.where(allowed, shifted + (level[..., None] - growth), -jnp.inf)
    highest = jnp.max(tilted, axis=-1, keepdims=True)
    gap = jnp.log(jnp.sum(jnp.exp(tilted - highest), axis=-1)) + (highest[..., 0] - log_total)

    x_v = jnp.sum(jnp.einsum("td,hkd->thk", kernel.direction, output) * mixed, axis=-1)
    v_v = _form(gram, mixed, mixed)
    x_g, g_g, v_g = _gradient(flow, layer, module, kernel, mean_slope * scale, mixed, output)
    damp = _damp(flow, layer, plain)

    width = flow.width
    v_t, g_t = (jnp.maximum(b - c * c / width, 0) for b, c in ((v_v, x_v), (g_g, x_g)))
    cosine = _ratio(v_g - x_v * x_g / width, jnp.sqrt(v_t * g_t))
    found = dict(
        entropy=_ratio(jnp.maximum(entropy, 0), jnp.log(count)),
        free_energy=-(log_total + top[..., 0]),
        consistency=jnp.maximum(gap, 0),
        dispersion=jnp.maximum(length[..., 0] - v_v, 0).T * damp**2,
        cosine=jnp.clip(cosine, -1, 1).T,
        head_field=jnp.sqrt(v_t / width).T * damp,
        head_radial=jnp.clip(_ratio(x_v, jnp.sqrt(v_v * width)), -1, 1).T,
    )
    found = {name: f.reshape(config.heads, tokens) for name, f in found.items()}
    return update, found | {"close": close}


def _gradient(flow, layer, module, kernel: _Kernel, slope, mixed, output):
    """x . g, |g|^2 and v . g per token and head, g the gradient by x of a head's log-sum-exp but
    for the length that x is read with; `slope` is the gradient by the rotated queries."""
    config = flow.config
    raw, maps = kernel.read.raw, kernel.read.maps
    gain = kernel.read.gain if config.query_key_norm == "full" else None
    inner = raw if gain is None else module.query_norm(raw)
    slope = jax.vjp(lambda q: _turned(flow, layer, module, q), inner)[1](slope)[0]
    slope = slope.reshape(mixed.shape[0], config.heads, -1)
    raw = raw.reshape(slope.shape)
    if gain is not None:
        size = jnp.mean(raw * raw, axis=(1, 2), keepdims=True)
        size = jax.lax.rsqrt(size + module.query_norm.eps)
        slope = slope * gain.reshape(raw.shape[1:]) * size
    cross = jnp.einsum("hkd,dhl->hkl", output, maps)
    x_g = jnp.sum(kernel.part * slope, axis=-1)
    g_g = _form(kernel.gram, slope, slope)
    v_g = _form(cross, mixed, slope)
    if gain is not None:
        # One denominator for all heads: each head's gradient moves the queries of all.
        share = jnp.sum(raw * slope, axis=-1) * size[..., 0] ** 2 / raw[0].size
        whole = jnp.einsum("thk,dhk->td", raw, maps)
        back = jnp.einsum("td,dhk->thk", whole, maps)
        x_g = x_g - share * jnp.sum(kernel.part * raw, axis=(1, 2))[:, None]
        g_g = g_g - 2 * share * jnp.sum(back * slope, axis=-1)
        g_g = g_g + share**2 * jnp.sum(whole * whole, axis=-1)[:, None]
        v_g = v_g - share * jnp.sum(jnp.einsum("td,hkd->thk", whole, output) * mixed, axis=-1)
    return x_g, g_g, v_g


def _own(means, groups):
    """Of what every head of a group has averaged for all of them, its own."""
    tokens, heads, _ = means.shape
    shared = heads // groups
    if shared == 1:
        return means
    means = means.reshape(tokens, groups, shared, shared, -1)
    return jnp.einsum("tgssm->tgsm", means).reshape(tokens, heads, -1)


def _by_query(values, groups):
    """(tokens, heads) to (groups, shared, tokens)."""
    return values.T.reshape(groups, -1, values.shape[0])


def _scores(q, k):
    """q_i . k_j, (groups, shared, tokens, tokens)."""
    tokens, heads, head = q.shape
    groups = k.shape[1]
    q = q.reshape(tokens, groups, -1, head).transpose(1, 2, 0, 3).reshape(groups, -1, head)
    return (q @ k.transpose(1, 2, 0)).reshape(groups, heads // groups, tokens, tokens)


def _form(matrix, left, right):
    """left^T M right per token and head."""
    return jnp.sum(jnp.einsum("thk,hkl->thl", left, matrix) * right, axis=-1)


def _turned(flow, layer, module, raw):
    """The rotated queries of what the query's projection gave, and a norm of all heads: the rest
    of `_project`."""
    config, q = flow.config, raw
    if config.projection_clip is not None:
        q = jnp.clip(q, -config.projection_clip, config.projection_clip)
    q = q.reshape(-1, config.heads, config.head_width)
    if config.query_key_norm == "head":
        q = module.query_norm(q)
    return flow._rotate(layer, q, q, None)[0] if config.ropes else q


class _Kernel(NamedTuple):
    """What the logits are as functions of the state.

    Arguments:
        direction: (tokens, width) x.
        part: (tokens, heads, head) of x in the queries before their norm and rotation, but for the
            length that x is read with.
        gram: (heads, head, head) of their derivative's columns.
        radius: (heads or 1, tokens) the length of the state that the logits are linear in.
        read: what attention reads.
    """

    direction: Array
    part: Array
    gram: Array
    radius: Array
    read: Reading


def _kernel(flow, layer, x) -> _Kernel:
    read, direction = reading(flow, layer, None, x), geometry.sphere(_read(flow, x))
    part = jnp.einsum("td,dhk->thk", direction, read.maps)
    gram = jnp.einsum("dhk,dhl->hkl", read.maps, read.maps)
    return _Kernel(direction, part, gram, read.radius().T, read)


def _growths(flow, layer, kernel: _Kernel, k, scale):
    """log C(0) - log C(kappa_ij), (groups, shared, tokens, tokens)."""
    config = flow.config
    tokens, groups = k.shape[:2]

    def forms(rope: Rope | None):
        if rope is None:
            return lambda form, k: rotated_forms(form, k, ())
        turned = np.arange(config.head_width) < rope.width
        size = jnp.asarray(np.where(turned, rope.amplitude, 1.0), k.dtype)
        with jax.ensure_compile_time_eval():
            angles = np.asarray(rope.angles(jnp.arange(tokens), k.dtype), np.float64)
        # Of the last position, for its digits; one token turns by nothing.
        turns = tuple(float(t) for t in angles[-1] / max(tokens - 1, 1))
        return lambda form, k: rotated_forms(form * size * size[:, None], k, turns)

    kinds = [forms(rope) for rope in config.ropes]
    if -1 in config.rope_of or not kinds:
        kinds = [forms(None), *kinds]
    which = jnp.asarray(config.rope_of)[layer] + (len(kinds) - len(config.ropes))
    form, size = kernel.read.grams, scale * kernel.radius
    found = kinds[0](form, k) if len(kinds) == 1 else jax.lax.switch(which, kinds, form, k)
    size = jnp.broadcast_to(size, (config.heads, tokens)).reshape(groups, -1, tokens, 1)
    return cumulant(kernel.read.dimension, size * jnp.sqrt(jnp.maximum(found, 0)))


WIDEST = 1.5
"""The largest ratio of radii over which `_interpolation` is exact."""


def _interpolation(kernel: _Kernel, heads: int, k, scale):
    """Weights (tokens, heads, nodes) and nodes (tokens, heads, nodes) whose inner products are
    log C(0) - log C(radius_i length_j) where the keys do not turn, and whether they are exact.

    The radii behind a norm are close to one another: the growth is interpolated between Chebyshev
    points of the radius. Its singularities lie on the imaginary axis, so that over a ratio of radii
    of 1.5 n points are within about 9.9^-n (L. N. Trefethen, "Approximation theory and
    approximation practice", 2013, theorem 8.2).
    """
    keys = jnp.repeat(k, heads // k.shape[1], axis=1)
    lengths = scale * jnp.sqrt(jnp.maximum(_form(kernel.read.grams, keys, keys), 0))
    radius = jnp.broadcast_to(kernel.radius, (heads, k.shape[0])).T
    low, high = jnp.min(radius, axis=0), jnp.max(radius, axis=0)
    count = 8 if jnp.finfo(k.dtype).bits < 64 else 17
    angle = np.pi * (np.arange(count) + 0.5) / count
    order = np.arange(count)
    half = (high - low)[:, None] / 2
    points = low[:, None] + half * jnp.asarray(1 + np.cos(angle), k.dtype)
    values = cumulant(kernel.read.dimension, points * lengths[..., None])
    transform = np.cos(order * angle[:, None]) * np.where(order == 0, 1, 2) / count
    unit = (radius - low)[..., None] / jnp.where(half == 0, 1, half) - 1
    weights = jnp.cos(jnp.asarray(order, k.dtype) * jnp.arccos(jnp.clip(unit, -1, 1)))
    close = jnp.all((high <= WIDEST * low) & (low > 0))
    return weights, values @ jnp.asarray(transform, k.dtype), close


def _output(flow, layer, module):
    """(heads, head, width) what a head writes per unit of its mixed values, but for `_damp`."""
    config = flow.config
    output = module.output.kernel[...]
    output = output.astype(at_least_float32(output.dtype))
    if config.placement in ("output", "sandwich"):
        norm = flow._pick("attention_post_norm", layer, None)
        output = geometry.center(output) if norm.kind == "layer" else output
        output = output * gain_of(norm, config.width, output.dtype)
    if flow.centered:
        output = geometry.center(output)
    return output.reshape(config.heads, config.head_width, -1)


def _damp(flow, layer, plain):
    """The factor per token of a norm on the output, its denominator held."""
    wide = at_least_float32(plain.dtype)
    if flow.config.placement not in ("output", "sandwich"):
        return jnp.ones(plain.shape[0], wide)
    norm = flow._pick("attention_post_norm", layer, None)
    plain = plain.astype(wide)
    plain = geometry.center(plain) if norm.kind == "layer" else plain
    return jax.lax.rsqrt(jnp.mean(plain * plain, axis=-1) + norm.eps)
