"""The power-method study of a checkpoint: do its tokens turn to its layers' principal directions?

Axes: `layers`; `states`, the embedding and the state after each layer, so layers + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from svflow.models.transformer import Transformer
from svflow.power.flow import PowerFlow
from svflow.power.matrices import (
    SHIFTS,
    Alignment,
    Principal,
    aligned,
    chance,
    directions_of,
    layer_matrices,
    plane,
    principal,
)
from svflow.simulate import simulate
from svflow.spectra.lapack import in_threads


class Measured(NamedTuple):
    """Tokens and the leading directions of each layer, in one ordering of eigenvalues.

    Arguments:
        alignment: with the first eigenvector, see `Alignment`.
        other: (layers,) gamma of the same states with the first eigenvectors of the layers that
            have another matrix, those of its kind (real or complex), their mean: a control that
            has the tokens' own anisotropy; nan where there is none, as where all layers share one
            matrix. Compare it with gamma over the layers where it is a number.
        span: (layers,) the mean norm of the tokens' projection onto the span of the first
            eigenvectors, as many as give two real dimensions (three, where a pair comes second).
        span_chance: (layers,) what that is for a random subspace.
    """

    alignment: Alignment
    other: Float[np.ndarray, " layers"]
    span: Float[np.ndarray, " layers"]
    span_chance: Float[np.ndarray, " layers"]


class Dynamics(NamedTuple):
    """A trajectory in both orderings.

    Arguments:
        modulus, residual: by |lambda| and by |1 + lambda|, see `Principal`.
        consensus: (states,) the norm of the mean of the tokens at unit norm: 1 where all agree,
            about 1 / sqrt(tokens) for independent random directions.
    """

    modulus: Measured
    residual: Measured
    consensus: Float[np.ndarray, " states"]


class Study(NamedTuple):
    """A checkpoint's layers as a power method, on one text.

    Arguments:
        family: of the model; shared: whether all layers share one matrix.
        width, tokens: sizes.
        principal: of every layer's matrix, norm gains not folded.
        real: the model's own states, with feed-forward layers, norms and positions.
        reduced: those of `PowerFlow.from_model`, from the embeddings at unit norm.
    """

    family: str
    shared: bool
    width: int
    tokens: int
    principal: Principal
    real: Dynamics
    reduced: Dynamics


def study(model: Transformer, ids: Int[ArrayLike, " tokens"]) -> Study:
    """Principal directions of every layer, and how a text's tokens lie to them.

    In the model's own dynamics and, from the same embeddings, in the reduced system that the theory
    is about. Norms are left out of the matrices, biases as well.

    Raises:
        ValueError: what is not a transformer, ids that it does not take, or a state that is zero
            or not finite.

    Source: Li and Altafini, arXiv 2605.25619: the statistics by name; formulas and controls, here.
    """
    F = layer_matrices(model)
    # By value: a block may be a copy of another, as `steer` makes them.
    same = np.array([hash(matrix.tobytes()) for matrix in np.asarray(F)])
    shared = len(set(same)) == 1
    distinct = F[:1] if shared else F
    pairs = principal(distinct)
    with jax.default_matmul_precision("highest"):
        x = model.embed(ids)
        reduced = PowerFlow.from_model(model)
        paths = [simulate(model.flow, x).xs, simulate(reduced, reduced.retract(x)).xs]
    spans = {name: in_threads(_leading(shift), list(np.asarray(distinct, np.float64)))
             for name, shift in SHIFTS.items()}  # fmt: skip
    return Study(
        family=model.config.family,
        shared=shared,
        width=model.flow.width,
        tokens=x.shape[0],
        principal=jax.tree.map(lambda a: jnp.broadcast_to(a, (len(F), *a.shape[1:])), pairs),
        real=_dynamics(pairs, spans, same, paths[0]),
        reduced=_dynamics(pairs, spans, same, paths[1]),
    )


def _leading(shift):
    """An orthonormal basis of the first eigenvectors, two real dimensions or three."""

    def basis(matrix):
        values, vectors = np.linalg.eig(matrix)
        found: list[np.ndarray] = []
        for place in np.argsort(-np.abs(shift + values), kind="stable"):
            if len(found) >= min(2, len(values)):
                break
            if values[place].imag >= 0:  # of a pair, one
                vector = vectors[:, place]
                found += [vector.real, vector.imag][: 1 + bool(values[place].imag > 0)]
        return np.linalg.qr(np.stack(found, axis=1))[0].T

    return basis


def _dynamics(pairs, spans, same, xs) -> Dynamics:
    x, eps = directions_of(xs)
    host = np.asarray(x, np.float64)
    layers = len(host) - 1
    parts = {}
    for name in SHIFTS:
        pair = getattr(pairs, name)
        frames = np.asarray(plane(pair.vector, pair.real), np.float64)
        real = np.asarray(pair.real)
        other = np.full(layers, np.nan)
        if len(frames) == layers:
            for layer in range(layers):
                like = (real == real[layer]) & (same != same[layer])
                if like.any():
                    found = np.einsum("lpd,td->ltp", frames[like], host[layer + 1])
                    other[layer] = np.linalg.norm(found, axis=-1).mean()
        bases = [spans[name][layer if len(frames) == layers else 0] for layer in range(layers)]
        span = [np.linalg.norm(after @ basis.T, axis=-1).mean()
                for after, basis in zip(host[1:], bases)]  # fmt: skip
        parts[name] = Measured(
            alignment=aligned(pair.vector, pair.real, x, eps),
            other=other,
            span=np.asarray(span),
            span_chance=np.asarray([chance(host.shape[-1], len(basis)) for basis in bases]),
        )
    return Dynamics(**parts, consensus=np.linalg.norm(host.mean(axis=1), axis=-1))


def table(study: Study) -> str:
    """A study as plain text, at most 100 columns.

    One block per ordering and one line per layer: the first eigenvalue, its gap ratio, and for the
    model's own dynamics and the reduced one gamma, its signed version, rho with its p-value, and
    between them gamma's level by chance and with the other layers' directions.
    """
    kind = "one matrix for all layers" if study.shared else "a matrix per layer"
    lines = [
        f"{study.family}: {len(study.real.consensus) - 1} layers ({kind}), width {study.width}, "
        f"{study.tokens} tokens"
    ]
    for name, how in (("modulus", "|lambda|"), ("residual", "|1 + lambda|")):
        pair = getattr(study.principal, name)
        both = [getattr(dynamics, name) for dynamics in (study.real, study.reduced)]
        head = f"first eigenvalue by {how}"
        lines += [
            "",
            f"{head:<37}|{'the model itself':^35}|{'the reduced system':^26}",
            f"{'layer':>5} {'lambda_1':>16} {'gap':>6} {'chance':>6} |"
            f"{'gamma':>6} {'signed':>6} {'other':>6} {'rho':>5} {'p':>6}  |"
            f"{'gamma':>6} {'signed':>6} {'rho':>5} {'p':>6}",
        ]
        for layer in range(len(pair.value)):
            real, reduced = (one.alignment for one in both)
            lines.append(
                f"{layer + 1:>5} {_complex(pair.value[layer]):>16} {_short(pair.gap_ratio[layer])} "
                f"{real.chance[layer]:>6.3f} |{_aligned(real, layer, both[0].other)}  |"
                f"{_aligned(reduced, layer, None)}"
            )
        for label, one in zip(("model", "reduced system"), both):
            a = one.alignment
            counts = [int(np.sum(test)) for test in (a.rho > 0.5, a.gamma > a.chance)]
            line = f"{label}: rho > 1/2 in {counts[0]} layers, gamma above chance in {counts[1]}"
            if not study.shared:
                beside = np.isfinite(one.other)  # nan where no other layer is of its kind
                count = int(np.sum(np.asarray(a.gamma)[beside] > one.other[beside]))
                line += f", above other layers' in {count}"
                line += "" if beside.all() else f" of {beside.sum()}"
            lines.append(line)
            lines.append(
                f"  at the end {one.span[-1]:.3f} of a token lies in the span of the first "
                f"eigenvectors (chance {one.span_chance[-1]:.3f})"
            )
    begin, end = (
        ", ".join(f"{d.consensus[k]:.3f}" for d in (study.real, study.reduced)) for k in (0, -1)
    )
    lines += ["", f"norm of the mean token, model and reduced system: {begin} before, {end} after"]
    return "\n".join(lines)


def _complex(value: Any) -> str:
    """In at most 16 characters, of as many as three significant digits."""
    value = complex(value)
    for digits in (3, 2, 1):
        imaginary = f"±{abs(value.imag):.{digits}g}i" if value.imag else ""
        text = f"{value.real:.{digits}g}{imaginary}"
        if len(text) <= 16:
            break
    return text


def _short(value: Any) -> str:
    return f"{value:>6.3f}" if value < 100 else f"{value:>6.0e}"


def _aligned(alignment, layer, other) -> str:
    p = float(alignment.p_value[layer])
    signed = float(alignment.signed[layer])
    cells = [f"{alignment.gamma[layer]:>6.3f}", "     -" if np.isnan(signed) else f"{signed:>6.3f}"]
    if other is not None:
        cells.append("     -" if np.isnan(other[layer]) else f"{other[layer]:>6.3f}")
    cells += [
        f"{alignment.rho[layer]:>5.2f}" if alignment.rho[layer] >= 0 else "    -",
        f"{p:>6.3f}" if p >= 0.001 else f"{p:>6.0e}" if p else "<1e-37",
    ]
    return " ".join(cells)
