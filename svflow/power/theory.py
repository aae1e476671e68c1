r"""What shared weights do to tokens in the long run: predicted from the layer matrix, and measured.

Axes: `tokens`; `heads`; `width`; `rank`, 1 for a direction and 2 for a plane.

Where all tokens agree, x_i = x, every head averages to x and a layer is x -> (I + F) x / |.|, the
power method on I + F: the dominant eigenvalue lambda_1 is that of largest |1 + lambda|, not of
largest |lambda|. A change of the attention weights there changes nothing to first order, since
they sum to one; so x_i = v_1 + eps_i gives

    eps_i' = P (eps_i + F sum_j a_ij eps_j) / (1 + lambda_1),   P = I - v_1 v_1^T,

with a_ij = 1/T, or 1/i for j <= i with causal attention. P F has the eigenvalues of F on the
complement, so the modes are, k = 2, 3, ...,

    full:    (1 + lambda_k) / (1 + lambda_1) of the mean and 1 / (1 + lambda_1) of the T - 1
             disagreements,
    causal:  (1 + lambda_k / i) / (1 + lambda_1) of token i = 1, 2, ...: I + F / i lies between I
             and I + F, so |1 + lambda_k / i| is largest at the first or the last token.

For a complex lambda_1 tokens that agree end in span{Re v, Im v}: x = Re(z v), and z turns by
arg(1 + lambda_1) per layer. Out of the plane the modes are as above, k over the eigenvalues other
than the pair. In the plane the phase of token i against that of the first is multiplied by

    Re w + s(phase) Im w,   w = (1 + lambda_1 / i) / (1 + lambda_1), or 1 / (1 + lambda_1) for full,

where s = d log|z| / d phase along the unit circle of the plane. Its geometric mean over phases is
J(Re w, B |w|) / J(1, B), B = |v^T v|, with J(a, b) the geometric mean of |a + b cos|, by Jensen's
formula (|a| + sqrt(a^2 - b^2)) / 2, or |b| / 2 where that is complex; it is at most |w|. (If
arg(1 + lambda_1) is a rational multiple of pi, the orbit visits only some of the phases.)

Source: Li and Altafini, "Analogies between Transformer Layers and Power Method", arXiv
2605.25619; the modes, rates and conditions are derived here.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from svflow.dtypes import at_least_float32
from svflow.integers import positive
from svflow.power.directions import normalised, reals
from svflow.power.flow import PowerFlow
from svflow.simulate import simulate


class Regime(enum.StrEnum):
    """The long run of tokens that start close to each other.

    CONSENSUS: all tokens end at v_1, or at -v_1, or alternate between them where
        1 + lambda_1 < 0.
    ROTATION: all tokens agree and turn in the plane span{Re v_1, Im v_1}.
    BIPARTITE: two groups at +v and -v are stable, for v an eigenvector of the only head; whether
        tokens end so is decided by where they start, and the other fields of the prediction say
        what tokens of one group do.
    NONE: agreement does not attract: it is unstable or, at a rate of exactly 1, neutral, as for
        F = 0, which moves nothing.
    UNDETERMINED: two eigenvalues share the largest |1 + lambda|: what tokens agree on depends on
        where they start. Where they are one eigenvalue with too few eigenvectors (a Jordan block)
        it does not: the limit is v_1, at a distance like 1 / layers, slower than any rate.
    """

    CONSENSUS = "aligned consensus"
    ROTATION = "rotation in a plane"
    BIPARTITE = "bipartite candidate"
    NONE = "no consensus"
    UNDETERMINED = "undetermined"


class Bipartite(NamedTuple):
    r"""The state x_i = s_i v, s_i = +-1, under one layer.

    A head's scores there are s_i s_j sigma_h, sigma_h = scale (W_Q^T v) . (W_K^T v), so that it
    averages to s_i gamma_i^h v with gamma_i^h = s_i sum_j a_ij^h s_j (tanh sigma_h for groups of
    equal size). The layer keeps the state where v is an eigenvector of sum_h gamma_i^h O^h V^h for
    every i; with one head every real eigenvector of F is.

    Arguments:
        value: the eigenvalue lambda of v.
        vector: (width,) v.
        gain: (tokens, heads) gamma.
        drift: (tokens,) the angle between s_i v and the token's next state, up to one sign for all
            tokens: 0 where the state holds.
        rate: for one head, the modulus of the slowest mode, eps_i' = P (eps_i + F sum_j a_ij s_i
            s_j eps_j) / (1 + gamma_i lambda): stable below 1. nan for several heads, where the
            change of the attention weights counts too.
    """

    value: float
    vector: Float[np.ndarray, " width"]
    gain: Float[np.ndarray, "tokens heads"]
    drift: Float[np.ndarray, " tokens"]
    rate: float


class Prediction(NamedTuple):
    """The long run of a `PowerFlow` with shared weights.

    Arguments:
        regime: see `Regime`.
        value: lambda_1, the eigenvalue of F with the largest |1 + lambda|; of a pair, the one
            with positive imaginary part.
        vector: (width,) v_1, of unit norm.
        limit: (rank, width) an orthonormal basis of what tokens tend to: v_1, or the plane.
        rate: the factor per layer by which the distance to the limit, and between tokens, shrinks
            in the end: the larger of the next two. Agreement is stable where it is below 1.
        mean_rate: |1 + lambda_2| / |1 + lambda_1|, of tokens that agree, the power method's.
        disagreement_rate: of the distance between tokens; 0 for a single token.
        angle: arg(1 + lambda_1), by which tokens that agree turn per layer: 0, pi where they
            flip, or the rotation.
        bipartite: for one head, the state of two groups of alternating tokens, so as equal as
            their number allows, at the real eigenvector where it is most stable (with full
            attention, gain and drift of one token of each group); None for several heads, without
            real eigenvectors, or where no such state holds.
    """

    regime: Regime
    value: complex
    vector: Complex[np.ndarray, " width"]
    limit: Float[np.ndarray, "rank width"]
    rate: float
    mean_rate: float
    disagreement_rate: float
    angle: float
    bipartite: Bipartite | None


class Convergence(NamedTuple):
    """A run of a `PowerFlow` beside its prediction.

    Arguments:
        prediction: see `Prediction`.
        predicted_rate: the rate of what the run ended in: the prediction's, or for one head that
            of the two groups of `signs` at the eigenvector that they stand at, which need not be
            v_1; nan for other groups.
        state: (tokens, width) the last state.
        signs: (tokens,) +1, or -1 for tokens opposite to the first.
        limit: (rank, width) an orthonormal basis of what the last states, the signs removed, span:
            their principal direction, or the principal plane of the last two.
        cosine: the least, over tokens, between the last state and the predicted limit.
        agreement: the least cosine between measured and predicted limit (of planes: of their
            largest principal angle).
        error: (layers + 1,) the largest distance of a token from the span of the predicted limit.
        disagreement: (layers + 1,) the largest distance of a token, turned to the first's side,
            from the first.
        rate, mean_rate, disagreement_rate: what `Prediction` names so, measured: the factors by
            which small displacements of the last state shrink through as many layers again
            (those of all tokens alike, seen from outside the limit, and those between tokens). nan
            where the run has not reached the predicted limit, or two groups that stand; of
            groups, only `rate` has a meaning.
        angles: (layers,) the angle by which tokens turn in each layer, in the coordinates of the
            predicted limit; angle: its mean over the last quarter.
    """

    prediction: Prediction
    predicted_rate: float
    state: Float[np.ndarray, "tokens width"]
    signs: Float[np.ndarray, " tokens"]
    limit: Float[np.ndarray, "rank width"]
    cosine: float
    agreement: float
    error: Float[np.ndarray, " times"]
    disagreement: Float[np.ndarray, " times"]
    rate: float
    mean_rate: float
    disagreement_rate: float
    angles: Float[np.ndarray, " layers"]
    angle: float


TIE = 1e-9  # Moduli this close, relatively, count as equal.
GROUPS = 64  # Of tokens, in a search for two groups of causal attention: later ones are alike.
FITTED = 24  # Layers that a measured mode is fitted to.


def predict(flow: PowerFlow, *, tokens: int | None = None) -> Prediction:
    """The long run of a flow with shared weights, from its layer matrix; see `Prediction`.

    Stability is local: it speaks of tokens that start near the limit. Runs on the host in float64.

    Arguments:
        flow: weights that all layers share.
        tokens: how many; None for the slowest rate over all numbers from two. It matters for
            causal attention, and for a single token.

    Raises:
        ValueError: weights that differ between layers, no PowerFlow, a width of 1, a layer matrix
            that overflows, or a number of tokens that is not a positive integer.

    Examples:
        >>> F = jnp.diag(jnp.asarray([1.0, -1.5, 0.0]))[None]
        >>> found = predict(PowerFlow(0 * F, 0 * F, F, jnp.eye(3)[None], depth=60))
        >>> found.regime.value, found.rate  # disagreement halves in every layer: 1 / |1 + 1.0|
        ('aligned consensus', 0.5)
    """
    _check_flow(flow)
    if tokens is not None:
        positive("tokens", tokens)
    F = _matrix(flow)
    value, vector, others = _dominant(F)
    plane = value.imag > 0
    first = abs(1 + value)
    size = np.abs(1 + others)
    # No division by zero where even the dominant 1 + lambda vanishes: nothing is stable then.
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_rate = float(np.max(size, initial=0.0) / first)
        disagreement = _disagreement(value, vector, others, flow.causal, tokens)
    rate = max(mean_rate, disagreement)
    groups = _candidate(flow, F, tokens) if flow.heads == 1 and tokens != 1 else None
    if groups is not None and groups.rate < 1 - TIE:
        regime = Regime.BIPARTITE
    elif mean_rate >= 1 - TIE and disagreement < 1 - TIE:
        regime = Regime.UNDETERMINED
    elif not rate < 1 - TIE:
        regime = Regime.NONE
    else:
        regime = Regime.ROTATION if plane else Regime.CONSENSUS
    parts = np.stack([vector.real, vector.imag] if plane else [vector.real])
    return Prediction(
        regime=regime,
        value=value,
        vector=vector,
        limit=np.linalg.svd(parts, full_matrices=False)[2] if plane else parts,
        rate=rate,
        mean_rate=mean_rate,
        disagreement_rate=disagreement,
        angle=float(np.angle(1 + value)),
        bipartite=groups,
    )


def modes(flow: PowerFlow, tokens: int) -> Complex[np.ndarray, "tokens modes"]:
    """The modes of the linearised layer where all tokens are v_1, for a real lambda_1.

    Returns:
        (tokens, width - 1). Full attention: the mean's in the first row, the disagreements' in
        the others. Causal attention: row i - 1 is token i's, (1 + lambda_k / i) / (1 + lambda_1).

    Raises:
        ValueError: as `predict`, or a complex lambda_1.
    """
    _check_flow(flow)
    positive("tokens", tokens)
    value, _, others = _dominant(_matrix(flow))
    if value.imag:
        raise ValueError(f"lambda_1 = {value:.4g} is complex: there is no fixed point")
    rows = np.arange(1, tokens + 1)[:, None]
    share = 1 / rows if flow.causal else (rows == 1).astype(float)
    return (1 + others * share) / (1 + value)


def bipartite(
    flow: PowerFlow, signs: Float[Array, " tokens"], vector: Float[Array, " width"] | None = None
) -> Bipartite:
    """Whether two groups of tokens at +v and -v stay; see `Bipartite`.

    Arguments:
        flow: weights that all layers share.
        signs: (tokens,) the group of each token, +1 or -1.
        vector: (width,) v, a real eigenvector of F, to the precision of its own type or of the
            flow's; None for v_1.

    Raises:
        ValueError: as `predict`; signs other than +-1; a vector that is no eigenvector; a complex
            lambda_1 where no vector is given; a layer that takes a token to zero.
    """
    _check_flow(flow)
    s = reals(signs, "signs")
    if s.ndim != 1 or not s.size or not np.all(np.abs(s) == 1):
        raise ValueError(f"signs must be a sequence of +1 and -1, got {signs}")
    F = _matrix(flow)
    if vector is None:
        value, found, _ = _dominant(F)
        if value.imag:
            raise ValueError(f"lambda_1 = {value:.4g} is complex: give a real eigenvector")
        v = found.real
    else:
        v = reals(vector, "vector")
        if v.shape != (flow.width,) or not np.isfinite(v).all() or not v.any():
            raise ValueError(f"vector must be {flow.width} finite numbers, not all zero")
        v = normalised(v)
        size = np.max(np.abs(F)) or 1.0
        scaled = F / size
        rest = np.linalg.norm(scaled @ v - (v @ scaled @ v) * v)
        # What an eigensolver leaves, relative to the matrix; F is exact here.
        types = [flow.query.dtype, getattr(vector, "dtype", np.dtype(np.float64))]
        eps = max(_eps(dtype) for dtype in types if jnp.issubdtype(dtype, jnp.floating))
        if rest > 100 * flow.width**0.5 * eps * np.linalg.norm(scaled):
            raise ValueError("vector is no eigenvector of the layer matrix")
    state = _bipartite(flow, F, s, float(v @ F @ v), v)
    if not np.isfinite(state.drift).all():
        raise ValueError("the layer takes a token of this state to zero, which has no direction")
    return state


def _bipartite(flow, F, s, eigenvalue, v, sizes=1) -> Bipartite:
    """`bipartite` of a known eigenpair; with full attention a token may stand for `sizes` equal
    ones. Where the layer takes a token to zero, drift is nan and the rate infinite."""
    query, key, value, output = _weights(flow)
    sigma = flow.scale[0] * np.einsum("hdk,hek,d,e->h", query, key, v, v)
    scores = sigma[:, None, None] * s[:, None] * s
    if flow.causal:
        scores = np.where(np.tri(len(s), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * sizes
    weights /= weights.sum(axis=-1, keepdims=True)
    mixing = weights * s[:, None] * s
    gain = mixing.sum(axis=-1).T
    each = np.einsum("hdv,hve,d->he", value, output, v)
    moved = v + gain @ each  # in the frame of each token's sign
    rounding = 64 * _eps(np.float64) * (1 + np.abs(gain) @ np.max(np.abs(each), axis=-1))
    moved[np.max(np.abs(moved), axis=-1) <= rounding] = 0
    moved = normalised(moved) * (np.sign(moved[0] @ v) or 1.0)
    drift = 2 * np.arctan2(np.linalg.norm(moved - v, axis=-1), np.linalg.norm(moved + v, axis=-1))
    rate = np.nan
    if np.isnan(drift).any():
        rate = np.inf
    elif flow.heads == 1:
        others = _without(np.linalg.eigvals(F), eigenvalue)[:, None]
        own = 1 / (1 + gain[:, 0] * eigenvalue)
        if flow.causal:
            found = (1 + others * mixing[0].diagonal()) * own
        else:
            # Rows are equal within a group: two of its mean, and what differs from the mean.
            _, first = np.unique(s, return_index=True)
            groups = s[:, None] == s[first]
            count = (groups * np.reshape(sizes, (-1, 1))).sum(axis=0)
            mean = mixing[0][first] @ groups
            linear = (np.eye(len(first)) + others[..., None] * mean) * own[first, None]
            alone = own[first] * (count > 1)
            found = np.concatenate([np.linalg.eigvals(linear).ravel(), alone])
        rate = float(np.abs(found).max())
    return Bipartite(eigenvalue, v, gain, drift, rate)


def convergence(flow: PowerFlow, x0: Float[Array, "tokens width"], layers: int) -> Convergence:
    """Runs a flow with shared weights and sets what it does beside `predict`.

    All states are kept.

    Arguments:
        flow: the flow; its own depth does not matter here.
        x0: (tokens, width) the start; only directions count.
        layers: how many to run.

    Raises:
        ValueError: as `predict` and `simulate`; a start that is not finite, or a token that is
            zero, which has no direction, at the start or by a layer; fewer than one layer.
    """
    _check_flow(flow)
    flow = flow.repeated(layers)
    start = reals(x0, "x0")
    if start.ndim != 2 or start.shape[1] != flow.width or not len(start):
        raise ValueError(f"x0 must have shape (tokens, {flow.width}), got {start.shape}")
    if not np.isfinite(start).all():
        raise ValueError("x0 is not finite")
    zero = np.flatnonzero(~start.any(axis=1))
    if zero.size:
        raise ValueError(f"x0[{zero[0]}] is zero: a token without a direction")
    eps = float(jnp.finfo(flow.query.dtype).eps)
    prediction = predict(flow, tokens=len(start))
    # Normalised before the cast, which it may not survive, and after: to float64's precision.
    dtype = jnp.asarray(x0).dtype
    run = simulate(flow, jnp.asarray(normalised(start), dtype))
    xs = normalised(np.asarray(run.xs, np.float64))
    lost = np.argwhere(np.isnan(xs).any(axis=-1))
    if len(lost):
        layer, token = lost[0]
        raise ValueError(f"layer {layer - 1} takes token {token} to zero, or beyond {dtype}")
    v, plane = prediction.vector, len(prediction.limit) == 2

    z = _coordinates(xs, v)
    with np.errstate(divide="ignore", invalid="ignore"):
        angles = np.angle((z[1:] / z[:-1]).sum(axis=1))
    signs = np.where(np.einsum("ltd,ld->lt", xs, xs[:, 0]) < 0, -1.0, 1.0)
    out = xs - xs @ prediction.limit.T @ prediction.limit
    error = np.linalg.norm(out, axis=-1).max(axis=-1)
    apart = signs[..., None] * xs
    disagreement = np.linalg.norm(apart - apart[:, :1], axis=-1).max(axis=-1)
    divided = bool((signs[-1] < 0).any())
    # Two groups may stand elsewhere than at v_1: what stands is what a layer turns by one sign.
    turned = np.sign(xs[-1, 0] @ xs[-2, 0])
    away = np.linalg.norm(xs[-1] - turned * xs[-2], axis=-1).max() if divided else error[-1]
    reached = max(away, disagreement[-1]) < 10 * eps**0.5
    rates = _measured(flow, xs[-1], prediction, divided) if reached else (np.nan,) * 3

    last = xs[-2:] * signs[-2:, :, None] if plane else xs[-1:] * signs[-1:, :, None]
    limit = np.linalg.svd(last.reshape(-1, flow.width), full_matrices=False)[2][: 1 + plane]
    predicted = prediction.rate
    if divided:
        u, F = xs[-1, 0], _matrix(flow)
        alone = flow.heads == 1 and reached
        predicted = _bipartite(flow, F, signs[-1], float(u @ F @ u), u).rate if alone else np.nan
    return Convergence(
        prediction=prediction,
        predicted_rate=predicted,
        state=xs[-1],
        signs=signs[-1],
        limit=limit,
        cosine=float(np.sqrt(max(0.0, 1 - error[-1] ** 2))),
        agreement=float(np.linalg.svd(limit @ prediction.limit.T, compute_uv=False)[-1]),
        error=error,
        disagreement=disagreement,
        rate=rates[0],
        mean_rate=rates[1],
        disagreement_rate=rates[2],
        angles=angles,
        angle=float(np.angle(np.exp(1j * angles[-max(1, layers // 4) :]).sum())),
    )


def _measured(flow, x, prediction: Prediction, divided: bool) -> tuple[float, float, float]:
    """rate, mean_rate and disagreement_rate of `Convergence`."""
    v, dtype = prediction.vector, flow.query.dtype
    eps = float(jnp.finfo(dtype).eps)
    start = np.random.default_rng(0).normal(size=(3, *x.shape))
    arrays = (jnp.asarray(array, dtype) for array in (x, prediction.limit, start))
    found = _tangents(flow, *arrays, flow.depth)
    growth, first, displacements, grown = (np.asarray(array, np.float64) for array in found)
    if divided:
        return _mode(displacements[:, 2], grown[:, 2], eps), np.nan, np.nan
    if prediction.value.imag:
        # Divided by |z|, which breathes with the orbit, what is outside the plane has constant
        # modes; what is inside has not.
        breath = np.diff(np.log(np.abs(_coordinates(first, v))))
        mean, between = _mode(displacements[:, 0], grown[:, 0] - breath, eps), _slope(growth[:, 1])
    else:
        mean, between = (_mode(displacements[:, k], grown[:, k], eps) for k in (0, 1))
    return max(mean, between), mean, between


def _coordinates(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """z of x = Re(z v), in the sense of least squares; real where v is."""
    if not v.imag.any():
        return x @ v.real + 0j
    z = x @ np.linalg.pinv(np.stack([v.real, -v.imag]))
    return z[..., 0] + 1j * z[..., 1]


def _check_flow(flow) -> None:
    if not isinstance(flow, PowerFlow):
        raise ValueError(f"the theory is of a PowerFlow, got {type(flow).__name__}")
    if not flow.shared:
        raise ValueError("the layers of this PowerFlow differ: the theory is of shared weights")
    if flow.width < 2:
        raise ValueError("a width of 1 has no directions to tell apart")


def _eps(dtype) -> float:
    return float(jnp.finfo(at_least_float32(dtype)).eps)


def _weights(flow: PowerFlow) -> list[np.ndarray]:
    arrays = (flow.query, flow.key, flow.value, flow.output)
    return [np.asarray(array[...], np.float64) for array in arrays]


def _matrix(flow: PowerFlow) -> np.ndarray:
    _, _, value, output = _weights(flow)
    with np.errstate(over="ignore", invalid="ignore"):
        F = np.einsum("hdv,hve->ed", value, output)
    if not np.isfinite(F).all():
        raise ValueError("the layer matrix sum_h O^h V^h overflows")
    return F


def _dominant(F: np.ndarray) -> tuple[complex, np.ndarray, np.ndarray]:
    """lambda_1 and v_1 by |1 + lambda|, and the eigenvalues that are not of the pair.

    As `svflow.spectra.principal` with shift 1, in float64 whatever JAX is configured to.
    """
    values, vectors = np.linalg.eig(F)
    place = int(np.argmax(np.abs(1 + values)))  # of a pair the first, with positive imaginary part
    value, v = complex(values[place]), vectors[:, place].astype(np.complex128)
    largest = v[np.argmax(np.abs(v))]
    others = _without(values, value)
    if value.imag:
        others = _without(others, value.conjugate())
    return value, v * largest.conjugate() / abs(largest), others


def _without(values: np.ndarray, value: complex) -> np.ndarray:
    return np.delete(values, np.argmin(np.abs(values - value)))


def _disagreement(value, vector, others, causal: bool, tokens: int | None) -> float:
    """The slowest mode of the distance between tokens."""
    if tokens == 1:
        return 0.0
    first = 1 + value
    if causal:
        # From the second token on; moduli are convex in 1 / i, so the ends decide out of a plane.
        i = np.arange(2, 4097 if tokens is None else tokens + 1)
        shares = np.concatenate([1 / i, [0.0] if tokens is None else []])
    else:
        shares = np.zeros(1)
    found = [np.abs(1 + others[:, None] * shares[[0, -1]]) / abs(first)]
    if value.imag:
        w = (1 + value * shares) / first
        B = abs(np.sum(vector**2))
        found.append(_jensen(w.real, B * np.abs(w)) / _jensen(1.0, B))
    return float(max(np.max(f, initial=0.0) for f in found))


def _jensen(a, b):
    """The geometric mean of |a + b cos| over a period, b >= 0."""
    a = np.abs(a)
    return np.where(a > b, (a + np.sqrt(np.maximum(a * a - b * b, 0))) / 2, b / 2)


def _candidate(flow, F, tokens: int | None) -> Bipartite | None:
    """The most stable state of two groups, over the real eigenvectors of the only head."""
    # With full attention only the groups' sizes matter; None is any even number.
    count = min(tokens or GROUPS, GROUPS) if flow.causal else 2
    signs = np.where(np.arange(count) % 2, -1.0, 1.0)
    half = (tokens or GROUPS) // 2
    sizes = 1 if flow.causal else np.array([(tokens or GROUPS) - half, half])
    values, vectors = np.linalg.eig(F)
    best = None
    for value, v in zip(values, vectors.T):
        if value.imag == 0:
            with np.errstate(divide="ignore", invalid="ignore"):
                found = _bipartite(flow, F, signs, float(value.real), v.real, sizes)
            holds = np.isfinite(found.rate) and found.drift.max() < TIE**0.5
            if holds and (best is None or found.rate < best.rate):
                best = found
    return best


@functools.partial(jax.jit, static_argnames="layers")
def _tangents(flow, x, limit, start, layers: int):
    """Displacements of the state x through more layers, each kept in its class and normalised:
    of all tokens alike and outside the limit, of tokens against the first, and any.

    Returns:
        (layers, 3) the logarithms of the factors by which they grew, and of the `FITTED`
        layers after these the first token's states, the displacements, and the logarithms; the
        first two with the values before those layers.
    """

    def kept(d):
        alike = jnp.mean(d[0], axis=0)
        alike = alike - (alike @ limit.T) @ limit
        d = jnp.stack([jnp.broadcast_to(alike, d[0].shape), d[1] - d[1, :1], d[2]])
        size = jnp.sqrt(jnp.sum(d * d, axis=(1, 2)))
        return d / jnp.where(size > 0, size, 1)[:, None, None], size

    def layer(carry, late):
        x, d = carry

        def push(tangent):
            return jax.jvp(lambda x: flow.step(0, x), (x,), (tangent,))

        y, pushed = jax.vmap(push, out_axes=(None, 0))(d)
        after, size = kept(pushed)
        return (y, after), (jnp.log(size), (y[0], after) if late else None)

    before, (growth, _) = jax.lax.scan(
        lambda carry, _: layer(carry, False), (x, kept(start)[0]), length=layers
    )
    _, (grown, seen) = jax.lax.scan(lambda carry, _: layer(carry, True), before, length=FITTED)
    first, displacements = (
        jnp.concatenate([one[None], rest]) for one, rest in zip((before[0][0], before[1]), seen)
    )
    return growth, first, displacements, grown


def _slope(growth: np.ndarray) -> float:
    """The mean factor over the later half of the layers, for modes whose factor varies."""
    total = np.cumsum(growth)[len(growth) // 2 :]
    if len(total) < 2 or not np.isfinite(total).all():
        return float(np.exp(growth[-1]))
    return float(np.exp(np.polyfit(np.arange(len(total)), total, 1)[0]))


def _mode(displacements: np.ndarray, growth: np.ndarray, eps: float) -> float:
    """The modulus of the slowest mode: the largest eigenvalue of the map from each displacement,
    its norm put back, to the next, on the directions that they span (dynamic mode decomposition:
    P. Schmid, J. Fluid Mech. 656, 2010)."""
    if not np.isfinite(growth).all():  # they vanish
        return 0.0
    mean = growth.mean()
    sizes = np.exp(np.concatenate([[0.0], np.cumsum(growth - mean)]))
    y = (displacements.reshape(len(sizes), -1) * sizes[:, None]).T
    U, sigma, Vh = np.linalg.svd(y[:, :-1], full_matrices=False)
    rank = int(np.sum(sigma > eps**0.5 * sigma[0]))
    linear = (U.T[:rank] @ y[:, 1:] @ Vh[:rank].T) / sigma[:rank]
    return float(np.exp(mean) * np.abs(np.linalg.eigvals(linear)).max())
