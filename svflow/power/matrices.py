"""The matrices that attention applies to a consensus of its tokens, and their principal directions.

Axes: `layers`; `width`, the residual stream, twice, for column vectors: y = F x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex, Float
from scipy.special import bdtr, gammaln

from svflow.dtypes import at_least_float32
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.power.directions import known, polar
from svflow.spectra.eigenvalues import eigvals
from svflow.spectra.eigenvalues import principal as principal_pair


def layer_matrices(
    model: Transformer | TransformerFlow, *, fold_norms: bool = False
) -> Float[Array, "layers width width"]:
    """F_l = sum_h O_l^h V_l^h of every layer, in the column-vector convention.

    Value heads are repeated over the query heads that share them; biases are left out. Where all
    tokens are one, x_i = x, each head averages to its value of x, and attention is x -> F x on the
    input y that it reads: F y + O b_V + b_O, with the biases that a family has. (Values that are
    clipped, as OLMo can, and a norm on the output are not linear, and are left out.)

    Arguments:
        model: a transformer or its flow.
        fold_norms: multiply the gains in: F_l diag(w) with w of the norm that attention reads
            through, and diag(w) F_l with that of a norm on its output. Off by default, as in the
            paper. The gain of a norm after the addition scales the whole stream, not F alone, and
            is left out, as is what norms do besides their gains.

    Raises:
        ValueError: anything but a transformer.

    Source: Li and Altafini, arXiv 2605.25619; the repetition over groups, derived here.
    """
    flow = getattr(model, "flow", model)
    if not isinstance(flow, TransformerFlow):
        raise ValueError(f"layer matrices are those of a transformer, got {type(model).__name__}")
    config, layers = flow.config, flow.layers
    heads, groups = config.heads, config.kv_heads
    wide = at_least_float32(layers.attention.value.kernel.dtype)
    value = layers.attention.value.kernel[...].astype(wide)
    value = value.reshape(*value.shape[:-1], groups, config.head_width)
    value = jnp.repeat(value, heads // groups, axis=-2).reshape(*value.shape[:2], -1)
    output = layers.attention.output.kernel[...].astype(wide)
    F = jnp.matmul(value, output, precision="highest").swapaxes(-1, -2)
    if fold_norms:
        before, after = layers.attention_norm, layers.attention_post_norm
        if before is not None and before.weight is not None:
            F = F * (before.weight[...].astype(wide) + before.offset)[:, None, :]
        if config.placement in ("output", "sandwich") and after.weight is not None:
            F = F * (after.weight[...].astype(wide) + after.offset)[:, :, None]
    return F[np.asarray(config.blocks)]


SHIFTS = {"modulus": 0.0, "residual": 1.0}
"""The orderings of eigenvalues: by |shift + lambda|."""


class Pair(NamedTuple):
    """The first eigenpair of F in one ordering of its eigenvalues.

    Arguments:
        value: of a conjugate pair, the one with positive imaginary part.
        vector: of unit norm, its largest entry real and positive.
        gap_ratio: how far the first is ahead, |lambda_1| / |lambda_2| or
            |1 + lambda_1| / |1 + lambda_2|, lambda_2 the next that is not the conjugate of the
            first; infinite where that is zero or there is none, nan where both are zero, as for
            the zero matrix and, by |lambda|, every nilpotent one.
        real: whether the value is real.
    """

    value: Complex[Array, "*stack"]
    vector: Complex[Array, "*stack width"]
    gap_ratio: Float[Array, "*stack"]
    real: Bool[Array, "*stack"]


class Principal(NamedTuple):
    """The first eigenpair in both orderings.

    Arguments:
        modulus: by |lambda|, as in the paper: of the power method x -> F x.
        residual: by |1 + lambda|: of what a layer does, x -> x + F x.
    """

    modulus: Pair
    residual: Pair


def principal(F: Float[Array, "*stack width width"]) -> Principal:
    """The principal eigenpairs of layer matrices, by |lambda| and by |1 + lambda|.

    Differentiable where the eigenvalue is simple, see `svflow.spectra.principal`.

    Raises:
        ValueError: what is not a stack of square real matrices, or is not finite.

    Source: Li and Altafini, arXiv 2605.25619; the second ordering, derived here: where all tokens
    agree, a layer is the power method on I + F.
    """
    values = eigvals(F)
    return Principal(*(_pair(F, values, shift) for shift in SHIFTS.values()))


def _pair(F, values, shift):
    value, vector = principal_pair(F, shift=shift)
    return Pair(value, vector, *_gap(values, value, shift))


@jax.jit
def _gap(values, value, shift):
    sizes = jnp.sort(jnp.abs(values + jnp.asarray(shift, values.dtype)), axis=-1)[..., ::-1]
    real = value.imag == 0
    # A conjugate takes the second place.
    width = sizes.shape[-1]
    one, two = (sizes[..., k] if k < width else jnp.zeros_like(sizes[..., 0]) for k in (1, 2))
    return sizes[..., 0] / jnp.where(real, one, two), real


class Alignment(NamedTuple):
    """How the tokens of a trajectory lie to the principal direction of each layer.

    Arguments:
        gamma: (layers,) the mean over tokens of |v . x_i| after the layer, tokens at unit norm; for
            a complex v, of the norm of the projection onto span{Re v, Im v}.
        signed: (layers,) the mean of v . x_i, v's largest entry positive; nan for a complex v.
        rho: (layers,) the share of tokens whose projection the layer made larger, of those whose
            projection it changed by more than `rounded` may; nan where it changed none.
        p_value: (layers,) of rho against 1/2, binomial, two-sided: a sign test, so that ties do
            not count; 1 where all are. Tokens of one text are not independent, which makes it too
            small.
        chance: (layers,) what gamma is for a random direction, exactly: with B = Gamma(d / 2) /
            Gamma((d + 1) / 2), B / sqrt(pi), which is about sqrt(2 / (pi d)), for a real v, and
            B sqrt(pi) / 2 for a plane.
        real: (layers,) whether v is real.
    """

    gamma: Float[Array, " layers"]
    signed: Float[Array, " layers"]
    rho: Float[Array, " layers"]
    p_value: Float[Array, " layers"]
    chance: Float[Array, " layers"]
    real: Bool[Array, " layers"]


def alignment(
    F: Float[Array, "*layers width width"],
    xs: Float[Array, "states tokens width"],
    *,
    ordering: str = "modulus",
) -> Alignment:
    """gamma_t and rho_t of a trajectory against the principal direction of each layer's matrix.

    Arguments:
        F: (layers, width, width), or (width, width) where all layers share it.
        xs: (layers + 1, tokens, width) the states, as `simulate` gives them; of any norm.
        ordering: "modulus" or "residual", see `Principal`.

    Raises:
        ValueError: shapes that do not fit, a zero state, which has no direction, or values that
            are not finite (where they are known).

    Source: Li and Altafini, arXiv 2605.25619, by name; these formulas are ours.
    """
    if ordering not in SHIFTS:
        raise ValueError(f"ordering must be one of {tuple(SHIFTS)}, got {ordering!r}")
    (xs, eps), F = directions_of(xs), jnp.asarray(F)
    if F.ndim not in (2, 3) or F.shape[-1] != xs.shape[-1]:
        raise ValueError(f"layer matrices {F.shape} do not fit states {xs.shape}")
    if F.ndim == 3 and len(F) != len(xs) - 1:
        raise ValueError(f"{len(F)} layer matrices need {len(F) + 1} states, got {len(xs)}")
    value, vector = principal_pair(F, shift=SHIFTS[ordering])
    return aligned(vector, value.imag == 0, xs, eps)


def directions_of(xs: Any) -> tuple[Float[Array, "states tokens width"], float]:
    """The states of a trajectory at unit norm, and the eps of the type that they are given in.

    Raises ValueError for what has no direction.
    """
    xs = jnp.asarray(xs)
    if xs.ndim != 3 or len(xs) < 2 or not xs.size:
        raise ValueError(f"xs must be (layers + 1, tokens, width) states, got shape {xs.shape}")
    if not jnp.issubdtype(xs.dtype, jnp.floating):
        raise ValueError(f"xs must be real floating point, got {xs.dtype}")
    eps = float(jnp.finfo(xs.dtype).eps)
    xs = xs.astype(at_least_float32(xs.dtype))
    values = known(xs)
    if values is not None:
        top = np.max(np.abs(values), axis=-1)
        bad = np.argwhere(~((top >= np.finfo(top.dtype).tiny) & np.isfinite(top)))
        if len(bad):
            place = bad[0].tolist()
            raise ValueError(f"xs{place} is zero or not finite: it has no direction")
    return polar(xs)[0], eps


@jax.jit
def aligned(
    vector: Complex[Array, "*layers width"],
    real: Bool[Array, "*layers"],
    x: Float[Array, "states tokens width"],
    eps: float,
) -> Alignment:
    """`alignment` with the directions given, one per layer or one for all, and unit states."""
    layers, width = len(x) - 1, x.shape[-1]
    basis = plane(vector, real).astype(x.dtype)
    basis = jnp.broadcast_to(basis, (layers, 2, width))
    real = jnp.broadcast_to(real, (layers,))
    with jax.default_matmul_precision("highest"):
        before = jnp.einsum("lpd,ltd->ltp", basis, x[:-1])
        after = jnp.einsum("lpd,ltd->ltp", basis, x[1:])
    sizes = [polar(part)[1][..., 0] for part in (before, after)]
    apart = jnp.abs(sizes[1] - sizes[0]) > rounded(basis, x, sizes[1], eps)
    larger = jnp.sum(apart & (sizes[1] > sizes[0]), axis=-1)
    changed = jnp.sum(apart, axis=-1)
    line, flat = (jnp.asarray(chance(width, k), x.dtype) for k in (1, 2))
    return Alignment(
        gamma=jnp.mean(sizes[1], axis=-1),
        signed=jnp.where(real, jnp.mean(after[..., 0], axis=-1), jnp.nan),
        rho=larger.astype(x.dtype) / changed.astype(x.dtype),
        p_value=_binomial(larger, changed, x.dtype),
        chance=jnp.where(real, line, flat),
        real=real,
    )


def rounded(
    basis: Float[Array, "layers 2 width"],
    x: Float[Array, "states tokens width"],
    size: Float[Array, "layers tokens"],
    eps: float,
) -> Float[Array, "layers tokens"]:
    r"""How far two projections of size |P x| may be apart by rounding alone:

        4 (eps sqrt(sum_{p,j} (b_pj x_j)^2) + eps' |P x|),

    b the basis of P. Coordinates are rounded to nearest each by itself, in the states' type: a
    standard deviation of up to .29 eps b_pj x_j, of the difference of two .41 of the root, so that
    4 is ten of them. Norms and products are in the type of x, with the eps' of that.
    """
    narrow = jnp.sqrt(jnp.einsum("lpd,ltd->lt", basis**2, jnp.maximum(x[1:] ** 2, x[:-1] ** 2)))
    return 4 * (eps * narrow + float(jnp.finfo(x.dtype).eps) * size)


def plane(
    vector: Complex[Array, "*stack width"], real: Bool[Array, "*stack"]
) -> Float[Array, "*stack 2 width"]:
    """An orthonormal basis of span{Re v, Im v}; its second vector is zero for a real v."""
    first, second = vector.real, vector.imag
    first = first / jnp.linalg.norm(first, axis=-1, keepdims=True)
    second = second - jnp.sum(first * second, axis=-1, keepdims=True) * first
    square = jnp.sum(second * second, axis=-1, keepdims=True)
    flat = real[..., None] | (square == 0)
    second = jnp.where(flat, 0, second / jnp.sqrt(jnp.where(flat, 1, square)))
    return jnp.stack([first, second], axis=-2)


def chance(width: int, dimension: int) -> float:
    """The mean norm of a unit vector's projection onto a random subspace.

    Its square has the law Beta(k / 2, (d - k) / 2), so it is
    Gamma((k + 1) / 2) Gamma(d / 2) / ( Gamma(k / 2) Gamma((d + 1) / 2) ).
    """
    if dimension >= width:
        return 1.0
    gammas = (dimension + 1) / 2, width / 2, dimension / 2, (width + 1) / 2
    up, more, down, less = map(float, gammaln(gammas))
    return math.exp(up + more - down - less)


def _binomial(successes, trials, dtype):
    """The two-sided p-value of so many successes at odds 1/2; 1 without a trial.

    On the host in float64: JAX's incomplete beta function in float32 loses two digits at 65 536
    trials.
    """

    def tails(successes, trials):
        successes, trials = np.asarray(successes), np.asarray(trials)
        tail = bdtr(np.minimum(successes, trials - successes), trials, 0.5)
        return np.minimum(1.0, 2 * tail).astype(dtype)

    shape = jax.ShapeDtypeStruct(successes.shape, dtype)
    return jax.pure_callback(tails, shape, successes, trials, vmap_method="expand_dims")
