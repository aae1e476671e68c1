r"""Steering: a rank-one change of a layer's output matrix that turns its tokens to a direction.

The attention of a layer adds O m_i to token i, m_i the heads' mixed values of what it reads, y. Its
output matrix becomes O + l w^T, so that the token gets l (w . m_i) on top. Where all tokens agree,
m = V y + b_V, and the layer's matrix F = O V becomes F + l (V^T w)^T. For a unit direction z:

| variant | l           | w        | F + l (V^T w)^T                        |
|---------|-------------|----------|----------------------------------------|
| basic   | a z         | V^-T z   | F + a z z^T                            |
| exact   | a z - F z   | V^-T z   | has the eigenpair (a, z)               |
| mean    | a z         | V^-T mu  | F + a z mu^T, mu the mean token's unit |

"basic" and "exact" send a token to +z or -z by the sign of w . m_i; "mean" sends those that share
the mean's side to sgn(a) z. A negative strength a steers away from z.

V^-T is the pseudo-inverse where V has none, as with key/value heads that several query heads share:
then V^T w = P z (or P mu), P the projector to V's row space, and `Perturbation.reach` says how much
that leaves. "exact" divides l by |P z|^2 and keeps its eigenpair. What is orthogonal to the row
space cannot be reached and is refused, unless the strength is 0.

What the formulas do not know: heads that mix different tokens weigh them by their own part of w
(they hold for tokens that agree); a bias of the values adds the constant l (w . b_V); a norm on the
output or after the addition bounds the step and multiplies z by its gain; the feed-forward layer
comes after. `steering_effect` measures what is left.

Source: Li and Altafini, arXiv 2605.25619: a rank-one perturbation of the last layer's output
matrix; the formulas, derived here.

Axes: `width`, the residual stream; `inner`, all heads' values; `tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from svflow.dtypes import at_least_float32
from svflow.flow import Context
from svflow.integers import is_integer
from svflow.models.config import TransformerConfig
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.power.directions import known, polar, real_tracer, reals, unit
from svflow.simulate import simulate

VARIANTS = ("basic", "exact", "mean")
STREAM = "stream"
"""The baseline of `dose_response`: a constant vector on the residual stream."""
COSINES = ("cosine", "size", "positive")
STAND_IN = 64  # Tokens of the text that stands in where no mean is given.


class Perturbation(NamedTuple):
    """A rank-one change l w^T of an output matrix.

    Arguments:
        left: (width,) l.
        right: (inner,) w.
        reach: () |P z|^2, or |P mu|^2: the part of it in the row space of V; 1 where V has full
            column rank.
    """

    left: Float[Array, " width"]
    right: Float[Array, " inner"]
    reach: Float[Array, ""]


def rank_one(
    value: Float[Array, "inner width"],
    output: Float[Array, "width inner"],
    direction: Float[ArrayLike, " width"],
    strength: Float[ArrayLike, ""],
    variant: str = "mean",
    *,
    mean: Float[ArrayLike, " width"] | None = None,
    rcond: float | None = None,
) -> Perturbation:
    """The change of O that a variant makes, for column vectors; see the module.

    Arguments:
        value, output: V and O of all heads, F = O V.
        direction: z; normalised here.
        strength: a.
        variant: "basic", "exact" or "mean".
        mean: mu, for "mean"; normalised here.
        rcond: singular values of V up to this share of the largest count as zero, 0 <= rcond < 1.
            None for max(inner, width) eps, the rule of `numpy.linalg.matrix_rank`, with V's own
            inner and width and the eps of its type, float32 at least: what rounding does not tell
            from zero.

    At strength 0 the change is zero, for "exact" too, where its limit would be a projection.

    Raises:
        ValueError: an unknown variant, a vector that is zero, not finite or of the wrong shape, a
            strength that is no single real number, an rcond out of range, weights or a change
            that are not finite (in float32 at least), or a direction (for "mean": a mean) that is
            orthogonal to V's row space, all as far as values are known: traced, they give nan.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    dtype = at_least_float32(value.dtype)
    for name, weights in (("value", value), ("output", output)):
        values = known(weights)
        if values is not None and not np.isfinite(values).all():
            raise ValueError(f"the layer's {name} weights are not finite")
    value, output = value.astype(dtype), output.astype(dtype)
    width = value.shape[1]
    z = unit(direction, width, "direction", dtype)[0]
    strength, cut = _number(strength, dtype), _cut(rcond, value)
    if variant == "mean":
        if mean is None:
            raise ValueError("variant 'mean' needs the mean that attention reads: mean_read")
        source = unit(mean, width, "mean", dtype)[0]
    else:
        source = z
    found = _rank_one(value, output, z, strength, source, variant, cut)
    reach = known(found.reach)
    if reach is not None and known(strength):
        if reach <= _least(z):
            raise ValueError(
                f"the {'mean' if variant == 'mean' else 'direction'} is orthogonal to the row "
                "space of the layer's values: no change of its output matrix reaches it"
            )
        if not all(np.isfinite(np.asarray(part)).all() for part in found):
            raise ValueError(f"strength {strength} makes a change that is not finite in {dtype}")
    return found


def _least(z) -> float:
    """The reach that counts as none."""
    return z.size * float(jnp.finfo(z.dtype).eps)


def _cut(rcond: Any, value) -> float:
    """rcond as a number."""
    if rcond is None:
        return max(value.shape) * float(jnp.finfo(value.dtype).eps)
    found = reals(rcond, "rcond")
    if found.shape or not 0 <= found < 1:
        raise ValueError(f"rcond must be None or one number with 0 <= rcond < 1, got {rcond!r}")
    return float(found)


@functools.partial(jax.jit, static_argnames=("variant", "rcond"))
def _rank_one(value, output, z, strength, source, variant, rcond):
    with jax.default_matmul_precision("highest"):
        right = jnp.linalg.pinv(value.T, rtol=rcond) @ source
        projected = right @ value
        reach = projected @ projected  # as P z . z, but its rounding errors are squared
        left = strength * z
        if variant == "exact":
            moved = jnp.where(strength == 0, 0, output @ (value @ z))
            along = projected @ z
            left = (left - moved) / jnp.where(along == 0, 1, along)
    lost = (reach <= _least(z)) & (strength != 0)
    return Perturbation(jnp.where(lost, jnp.nan, left), right, reach)


def perturbation(
    model: Transformer,
    direction: Float[ArrayLike, " width"],
    strength: Float[ArrayLike, ""],
    variant: str = "mean",
    *,
    layer: int = -1,
    mean: Float[ArrayLike, " width"] | None = None,
    rcond: float | None = None,
) -> Perturbation:
    """What `steer` would add to the output matrix, and its reach; the arguments are the same."""
    layer = _layer(model, layer)
    if variant == "mean" and mean is None:
        mean = mean_read(model, layer=layer)
    value, output, repeats = _projections(model.flow, layer)
    found = rank_one(value, output, direction, strength, variant, mean=mean, rcond=rcond)
    # With R the repetition of value heads over query heads, R^T R = repeats: the pseudo-inverse of
    # (R V)^T is R V^-T / repeats.
    return found._replace(right=_repeat(found.right, model.config) / repeats)


def steer(
    model: Transformer,
    direction: Float[ArrayLike, " width"],
    strength: Float[ArrayLike, ""],
    variant: str = "mean",
    *,
    layer: int = -1,
    mean: Float[ArrayLike, " width"] | None = None,
    rcond: float | None = None,
) -> Transformer:
    """The model with one layer's output matrix changed so that tokens turn to a direction.

    The result is a model of its own in the family's file format: `save` writes it. Strength and
    direction may be traced: a gradient goes through the whole model. Nothing of the caller's
    changes, and at strength 0 every bit is that of the model.

    A layer of an ALBERT that shares its weights gets a copy of its own first: the result has as
    many groups (`num_hidden_groups`) as that takes, which repeats weights in memory and in files.

    Arguments:
        model: the model.
        direction: (width,) z of the residual stream, for example `unembedding_direction` or
            `difference_direction`; normalised, so that z and 3 z give the same.
        strength: a, in the units of F's eigenvalues: a token that reads y gets a step of
            a (mu . y) along z.
        variant: "basic", "exact" or "mean", see `svflow.power.steering`.
        layer: which; negative ones count from the last.
        mean: (width,) for "mean", see `mean_read`, which without it reads a stand-in text.
        rcond: see `rank_one`. Small singular values of V make w large, and it then takes little
            disagreement of the heads to drown z, or to send tokens to -z; a cut, such as 0.01,
            trades that against reach.

    Raises:
        ValueError: what `rank_one` refuses, a layer that does not exist, what is not a
            Transformer, a layer that shares its weights in a family whose files could not hold
            a copy, or a strength that takes the output matrix beyond its type.
    """
    layer = _layer(model, layer)
    change = perturbation(model, direction, strength, variant, layer=layer, mean=mean, rcond=rcond)
    steered = _changed(_unshared(model, layer), layer, change.left, change.right)
    whole = steered.flow.layers.attention.output.kernel[...]
    kernel = known(whole[steered.config.blocks[layer]])
    if kernel is not None and not np.isfinite(kernel).all():
        raise ValueError(
            f"strength {strength} makes the output matrix of layer {layer} not finite in "
            f"{kernel.dtype}"
        )
    return steered


def _changed(model, layer, left, right):
    """A copy of a model with l w^T added to the output matrix of a layer's block."""
    copy = jax.tree.map(lambda leaf: leaf, model)
    kernel, block = copy.flow.layers.attention.output.kernel, model.config.blocks[layer]
    whole = kernel[...]
    # Rows are inputs here: the kernel is O^T.
    kernel[...] = whole.at[block].set(_plus(whole[block], jnp.outer(right, left)))
    return copy


@jax.custom_jvp
def _plus(kernel, change):
    """kernel + change; where the change is zero, bit for bit the kernel, which x + 0 is not."""
    total = (kernel.astype(change.dtype) + change).astype(kernel.dtype)
    return jnp.where(change == 0, kernel, total)


@_plus.defjvp
def _(primals, tangents):
    kernel, change = primals
    total = tangents[0].astype(change.dtype) + tangents[1]
    return _plus(kernel, change), total.astype(kernel.dtype)


def mean_read(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"] | None = None,
    *,
    layer: int = -1,
    context: Context | None = None,
) -> Float[Array, " width"]:
    """The mean over a text's tokens of what a layer's attention reads, not normalised.

    That is the state before the layer, through the norm that attention has before it, if any, its
    gain and bias included: what the value kernel is multiplied by. Tokens that `context` masks do
    not count.

    Arguments:
        ids: the text. None for a stand-in that no tokenizer is needed for: 64 ids (or as many as
            there are, or fit) that stand evenly over the vocabulary.
        layer: which; negative ones count from the last.

    Raises:
        ValueError: ids that the model does not take, a mask without a token, or a layer that does
            not exist.
    """
    layer, config = _layer(model, layer), model.config
    mask = None if context is None or context.mask is None else known(context.mask)
    if mask is not None and not mask.any():
        raise ValueError("context.mask leaves no token to take the mean of")
    if ids is None:
        room = config.positions - config.position_offset if config.positions else STAND_IN
        ids = np.linspace(0, config.vocab_size - 1, min(STAND_IN, config.vocab_size, room))
        ids = ids.astype(np.int32)
    x = _states(model, _checked(model, ids, context), context)[layer]
    return _mean(read(model.flow, layer, x), context)


def read(
    flow: TransformerFlow, layer: int, x: Float[Array, "tokens width"]
) -> Float[Array, "tokens width"]:
    """What a layer's attention reads of the states before it."""
    norm = flow.layers.attention_norm
    if norm is None:
        return x
    return jax.tree.map(lambda leaf: leaf[flow.config.blocks[layer]], norm)(x)


def unembedding_direction(model: Transformer, token: int) -> Float[Array, " width"]:
    """The direction of the last state that raises a token's logit: its row of the unembedding.

    The row is pulled back to the residual stream through what the head has before it, to first
    order and without biases: the gain of the final norm, or for masked models the transform's
    norm gain and dense kernel (its activation left out).

    Raises:
        ValueError: a token outside the vocabulary, or a model without a head.
    """
    config, head = model.config, model.head
    if config.head is None:
        raise ValueError(f"this {config.family} checkpoint has no head: no unembedding")
    if not is_integer(token):
        raise ValueError(f"token must be one id, got {token!r}")
    if not 0 <= token < config.vocab_size:
        raise ValueError(f"token {token} is outside the vocabulary of {config.vocab_size}")
    table = model.embedding.tokens if head.kernel is None else head.kernel
    row = table[...][token]
    if head.norm is not None and head.norm.weight is not None:
        row = row * (head.norm.weight[...] + head.norm.offset)
    return row if head.dense is None else head.dense.kernel[...] @ row


def difference_direction(
    model: Transformer,
    ids_a: Int[ArrayLike, " tokens"],
    ids_b: Int[ArrayLike, " others"],
    *,
    layer: int = -1,
) -> Float[Array, " width"]:
    """The mean state after a layer on text a, less that on text b.

    Raises:
        ValueError: ids that the model does not take, or a layer that does not exist.
    """
    end = _layer(model, layer) + 1
    a, b = (_states(model, _checked(model, ids))[end] for ids in (ids_a, ids_b))
    return _mean(a) - _mean(b)


class Effect(NamedTuple):
    """What steering did to a text.

    Arguments:
        layer_cosine: the mean over tokens of cos(state, z) after the steered layer.
        layer_size: the mean of its modulus. Steering to +z and -z alike has a large size and a
            small mean.
        layer_positive: the share of tokens with a positive cosine.
        cosine, size, positive: the same after the last layer.
        unsteered_cosine, unsteered_size, unsteered_positive: the same after the last layer of the
            model that was not steered.
        kl: KL(unsteered || steered) of the next-token distributions, in nats, the mean over
            tokens; nan without a head.
        loss_before, loss_after: the mean cross-entropy of the text's next tokens in nats; nan for
            a model without a head or whose attention is not causal.
    """

    layer_cosine: Float[Array, "*doses"]
    layer_size: Float[Array, "*doses"]
    layer_positive: Float[Array, "*doses"]
    cosine: Float[Array, "*doses"]
    size: Float[Array, "*doses"]
    positive: Float[Array, "*doses"]
    unsteered_cosine: Float[Array, "*doses"]
    unsteered_size: Float[Array, "*doses"]
    unsteered_positive: Float[Array, "*doses"]
    kl: Float[Array, "*doses"]
    loss_before: Float[Array, "*doses"]
    loss_after: Float[Array, "*doses"]


def steering_effect(
    model: Transformer,
    steered: Transformer,
    ids: Int[ArrayLike, " tokens"],
    direction: Float[ArrayLike, " width"],
    *,
    layer: int = -1,
) -> Effect:
    """How a model and the same model after `steer` differ on a text.

    Arguments:
        layer: the layer that was steered.

    Raises:
        ValueError: models of different shapes, ids that they do not take, a layer that does not
            exist, or a direction that is not one.
    """
    layer = _layer(model, layer)
    if (steered.flow.depth, steered.flow.width) != (model.flow.depth, model.flow.width):
        raise ValueError("model and steered are not models of one shape")
    (before, logits), (after, changed) = (_run(one, _checked(one, ids)) for one in (model, steered))
    z = unit(direction, model.flow.width, "direction", at_least_float32(before.dtype))[0]
    ids = jnp.asarray(ids)
    return _effect(model.config, z, ids, before, after[layer + 1], after[-1], logits, changed)


def _checked(model, ids, context=None) -> Int[Array, " tokens"]:
    """Ids that the model takes: under jit it could not say so."""
    jax.eval_shape(lambda model: model.embed(ids, context), model)
    return jnp.asarray(ids)


class DoseResponse(NamedTuple):
    """`Effect` over strengths and variants.

    Arguments:
        variants: their names.
        strengths: (strengths,).
        effect: every entry (variants, strengths).
        reach: (variants,) see `Perturbation`; nan for "stream".
        scale: |mean of what attention reads|, which the strengths of "stream" are multiplied by.
    """

    variants: tuple[str, ...]
    strengths: Float[Array, " strengths"]
    effect: Effect
    reach: Float[Array, " variants"]
    scale: Float[Array, ""]


def dose_response(
    model: Transformer,
    direction: Float[ArrayLike, " width"],
    strengths: Sequence[float] | Float[ArrayLike, " strengths"],
    ids: Int[ArrayLike, " tokens"],
    variants: Sequence[str] = (*VARIANTS, STREAM),
    *,
    layer: int = -1,
    mean: Float[ArrayLike, " width"] | None = None,
    rcond: float | None = None,
) -> DoseResponse:
    """The effect of steering one layer on a text, over strengths.

    The variant "stream" is the usual baseline beside those of `steer`: the same vector added to
    every token's state after the layer, x + a |ybar| z, with ybar the mean that attention reads.
    At equal strength a that is the step of "mean" for a token whose heads read ybar.

    Arguments:
        variants: of `steer`, and "stream".
        mean: ybar; None for that of `ids` itself.

    Raises:
        ValueError: what `steer` refuses, no strengths, an unknown variant, or a strength whose
            weights or states are not finite.
    """
    layer = _layer(model, layer)
    unknown = [name for name in variants if name not in (*VARIANTS, STREAM)]
    if unknown or not len(variants):
        raise ValueError(f"variants must be some of {(*VARIANTS, STREAM)}, got {unknown}")
    given = reals(strengths, "strengths")
    if given.ndim != 1 or not given.size or not np.isfinite(given).all():
        raise ValueError(f"strengths must be a list of finite numbers, got {strengths}")
    ids = _checked(model, ids)
    before, logits = _run(model, ids)
    dtype = at_least_float32(before.dtype)
    largest = given[np.argmax(np.abs(given))]
    _number(largest, dtype)
    doses, z = jnp.asarray(given, dtype), unit(direction, model.flow.width, "direction", dtype)[0]
    if mean is None:
        mean = _mean(read(model.flow, layer, before[layer]))
    mu, scale = unit(mean, model.flow.width, "mean", dtype)
    inner = model.config.heads * model.config.head_width
    changes = []
    for name in variants:
        if name == STREAM:
            shift = doses[:, None] * scale * z
            none = jnp.zeros((doses.size, inner), dtype)
            changes.append((jnp.zeros_like(shift), none, shift, jnp.asarray(jnp.nan, dtype)))
            continue

        def change(dose, name=name):
            found = perturbation(model, z, dose, name, layer=layer, mean=mu, rcond=rcond)
            return tuple(found)

        change(largest)  # complains where it is impossible
        found = jax.vmap(change, out_axes=(0, None, None))(doses)
        left, right, reach = found
        right = jnp.broadcast_to(right, (doses.size, inner))
        changes.append((left, right, jnp.zeros_like(left), reach))
    *parts, reach = (jnp.stack(part) for part in zip(*changes))
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    own = _unshared(model, layer)
    effect, fine = _responses(own, layer, z, ids, before, logits, *flat)
    shape = (len(variants), doses.size)
    finite = known(fine)
    if finite is not None and not finite.all():
        row, column = np.argwhere(~finite.reshape(shape))[0]
        raise ValueError(
            f"strength {given[column]:g} of {variants[row]!r} makes weights or states that are not "
            f"finite in {before.dtype}"
        )
    effect = jax.tree.map(lambda found: found.reshape(shape), effect)
    return DoseResponse(tuple(variants), doses, effect, reach, scale)


@jax.jit
def _states(model, ids, context=None):
    return simulate(model.flow, model.embed(ids, context), context=context).xs


@jax.jit
def _run(model, ids):
    """The states of a text, and its logits, None without a head."""
    xs = _states(model, ids)
    return xs, None if model.config.head is None else model.unembed(xs[-1])


@functools.partial(jax.jit, static_argnames="layer")
def _responses(model, layer, z, ids, before, logits, lefts, rights, shifts):
    """The effect of every change, and whether its weights and states are finite; what comes before
    the layer is the same for all."""
    end = layer + 1

    def one(change):
        left, right, shift = change
        flow = _changed(model, layer, left, right).flow
        kernel = flow.layers.attention.output.kernel[...][model.config.blocks[layer]]
        here = simulate(flow, before[layer], t0=layer, t1=end, ts=[end]).xs[0]
        here = (here.astype(z.dtype) + shift).astype(here.dtype)
        x = here
        if end < flow.depth:
            x = simulate(flow, here, t0=end, ts=[flow.depth]).xs[0]
        changed = None if model.config.head is None else model.unembed(x)
        fine = jnp.all(jnp.stack([jnp.isfinite(part).all() for part in (kernel, here, x)]))
        return _effect(model.config, z, ids, before, here, x, logits, changed), fine

    return jax.lax.map(one, (lefts, rights, shifts))


def _effect(config, z, ids, before, at_layer, at_end, logits, changed) -> Effect:
    def cosines(x):
        cosine = polar(x.astype(z.dtype))[0] @ z
        return jnp.mean(cosine), jnp.mean(jnp.abs(cosine)), jnp.mean((cosine > 0).astype(z.dtype))

    kl = loss_before = loss_after = jnp.asarray(jnp.nan, z.dtype)
    if logits is not None:
        was, now = (jax.nn.log_softmax(a.astype(z.dtype), axis=-1) for a in (logits, changed))
        kl = jnp.mean(jnp.sum(jnp.exp(was) * (was - now), axis=-1))
        if config.causal and len(ids) > 1:
            loss_before, loss_after = (
                -jnp.mean(jnp.take_along_axis(a[:-1], ids[1:, None], axis=-1)) for a in (was, now)
            )
    names = [f"{where}{what}" for where in ("layer_", "", "unsteered_") for what in COSINES]
    values = (*cosines(at_layer), *cosines(at_end), *cosines(before[-1]))
    return Effect(**dict(zip(names, values)), kl=kl, loss_before=loss_before, loss_after=loss_after)


def _number(strength: Any, dtype) -> Float[Array, ""]:
    traced = isinstance(strength, jax.core.Tracer)
    values: Any = strength if traced else reals(strength, "strength")
    if values.shape:
        raise ValueError(f"strength must be one number, got shape {values.shape}")
    if traced:
        return real_tracer(strength, "strength", dtype).astype(dtype)
    if not abs(values) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"strength must be finite in {dtype}, got {strength!r}")
    return jnp.asarray(values, dtype)


def _layer(model, layer) -> int:
    if not isinstance(model, Transformer):
        raise ValueError(f"steering takes a Transformer, got {type(model).__name__}")
    depth = model.config.depth
    if not is_integer(layer):
        raise ValueError(f"layer must be an integer, got {layer!r}")
    if not -depth <= layer < depth:
        raise ValueError(f"layer {layer} does not exist: the model has {depth}")
    return int(layer) % depth


def _projections(flow, layer):
    """V without repeated heads, O summed over the query heads that share a value head, repeats."""
    config, block = flow.config, flow.config.blocks[layer]
    value = flow.layers.attention.value.kernel[...][block].T
    output = flow.layers.attention.output.kernel[...][block].T
    repeats = config.heads // config.kv_heads
    output = output.reshape(config.width, config.kv_heads, repeats, config.head_width)
    output = jnp.sum(output.astype(at_least_float32(output.dtype)), axis=2)
    return value, output.reshape(config.width, -1), repeats


def _repeat(right, config: TransformerConfig):
    parts = right.reshape(config.kv_heads, config.head_width)
    return jnp.repeat(parts, config.heads // config.kv_heads, axis=0).reshape(-1)


def _mean(x, context=None):
    wide = x.astype(at_least_float32(x.dtype))
    if context is None or context.mask is None:
        return jnp.mean(wide, axis=0)
    real = context.mask.astype(wide.dtype)
    return real @ wide / jnp.sum(real)


def _unshared(model: Transformer, layer: int) -> Transformer:
    """A copy whose arrays are the model's, and in which no other layer uses this layer's block."""
    config = model.config
    copy = jax.tree.map(lambda leaf: leaf, model)
    if config.blocks.count(config.blocks[layer]) == 1:
        return copy
    new = _regrouped(config, layer)
    # The old block that each new one is a copy of.
    origin = [config.blocks[new.blocks.index(block)] for block in range(max(new.blocks) + 1)]
    copy.flow.layers = jax.tree.map(lambda leaf: leaf[np.asarray(origin)], copy.flow.layers)
    for module in (copy, copy.flow, copy.embedding, copy.head):
        module.config = new
    return copy


def _regrouped(config: TransformerConfig, layer: int) -> TransformerConfig:
    """The same ALBERT in the fewest groups that leave a layer's block to itself.

    Its files can only say how many groups there are, not which layer is in which.
    """
    groups = config.hf.get("num_hidden_groups", 1)
    layers = config.hf.get("num_hidden_layers")
    if config.family == "albert" and layers is not None:
        for count in range(groups + 1, layers + 1):
            hf = {**config.hf, "num_hidden_groups": count}
            new = TransformerConfig.from_hf(hf, has_head=config.head is not None)
            pairs = set(zip(new.blocks, config.blocks))
            alone = new.blocks.count(new.blocks[layer]) == 1
            if alone and len(pairs) == len(set(new.blocks)):
                return new
    raise ValueError(
        f"layer {layer} shares its weights with others, and a {config.family} file cannot hold "
        "a copy of its own for it"
    )
