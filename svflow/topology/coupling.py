r"""Whether the communities that a layer amplifies are those whose nodes reach into others.

Axes: `layers`; `width`, the residual stream, whose coordinates are the nodes; `communities`;
`signs`, of the participation coefficient, see `SIGNS`; `gains`, see `GAINS`.

A community's gain is |J P_c|_F / sqrt(|c|), the root mean square of its columns' norms |J e_j|;
likewise for rows, and for the update R = J - I.

What is permuted. Under the null hypothesis the gains of the nodes are exchangeable given the graph,
its communities and their participation: so they are permuted over the nodes, which is to permute
labels and participation together. The statistic is computed anew from every arrangement, so that
p-values are exact for any sizes of communities; to permute the gains of communities would not be,
as small communities' gains scatter more. Small communities' gains also lie lower in the median, so
that rho by chance is not 0 where participation goes with size: distances are measured from its
mean over the arrangements, where that can be told from 0.

The partial version. Gains and participation are ranked over the nodes, and what is linear in the
ranks of the confounds (norm weights, variance) is taken out of both; the communities' means of what
is left are compared. Residuals of q confounds are not exchangeable, as they lie in a space of
width - 1 - q dimensions; permuted ones are projected into it again (Freedman and Lane, J. Business
and Economic Statistics 1, 1983). On noise that is uniform up to O(q / width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Int
from scipy.stats import false_discovery_control, rankdata

from svflow.integers import positive
from svflow.spectra.lapack import check_finite, check_matrices
from svflow.topology.graphs import Graph
from svflow.topology.leiden import check_labels, check_seed
from svflow.topology.roles import participation

GAINS = ("columns", "rows", "update_columns", "update_rows")
"""Of J what goes in and what comes out at a node, and the same of R = J - I."""

SIGNS = ("positive", "negative")
"""Of a graph's weights, each counted by itself."""

CORRECTIONS = ("holm", "benjamini-hochberg")

BLOCK = 256
"""Arrangements at a time."""


class Tested(NamedTuple):
    """Spearman's rho over a layer's communities, (signs, gains, layers) each.

    Arguments:
        rho: 0 where either side is the same in all communities, or there are fewer than two.
        chance: its mean over the arrangements; 0 where that is within three of its standard
            errors, so that rho and -rho, all that three communities have, tie whatever was drawn.
        p_value: two-sided, (1 + #{|rho' - chance| >= |rho - chance|}) / (1 + permutations): ties
            count in full, so that P(p <= a) <= a.
        tie: the part of `p_value` that ties make. Few communities have few values of rho, and p
            then is coarse; p_value - u tie with u uniform on [0, 1] is uniform under the null.
        least: the smallest p that the arrangements of this layer's communities have: where it is
            above alpha, there are too few communities for any verdict.
        adjusted: p_value corrected over layers.
        verdict: "positive" or "negative" by the sign of rho - chance where adjusted <= alpha,
            else "none".
    """

    rho: Float[np.ndarray, "signs gains layers"]
    chance: Float[np.ndarray, "signs gains layers"]
    p_value: Float[np.ndarray, "signs gains layers"]
    tie: Float[np.ndarray, "signs gains layers"]
    least: Float[np.ndarray, "signs gains layers"]
    adjusted: Float[np.ndarray, "signs gains layers"]
    verdict: np.ndarray


class Coupling(NamedTuple):
    """Community gain against mean participation, per layer.

    Arguments:
        raw: as they are.
        partial: without what the ranks of norm weights and variance explain.
        sizes: per layer, (communities,) their nodes.
        gain: per layer, (gains, communities).
        participation: per layer, (signs, communities) the mean over each.
        correction, alpha: of the verdicts.
    """

    raw: Tested
    partial: Tested
    sizes: tuple[Int[np.ndarray, " communities"], ...]
    gain: tuple[Float[np.ndarray, "gains communities"], ...]
    participation: tuple[Float[np.ndarray, "signs communities"], ...]
    correction: str
    alpha: float


def squared_gains(J: Float[ArrayLike, "*layers width width"]) -> Float[np.ndarray, "g *layers w"]:
    """(gains, ..., width) the squares of every node's `GAINS`, in float64.

    Raises:
        ValueError: what is not a stack of square real matrices, or not finite, or whose squares
            are not.
    """
    J = _matrices(J)
    check_finite(J)
    flat = J.reshape(-1, *J.shape[-2:])
    found = np.empty((len(GAINS), *flat.shape[:2]))
    with np.errstate(over="ignore"):
        for place, one in enumerate(flat):  # one at a time: float64 copies of all would not fit
            matrix = np.asarray(one, np.float64)
            for first in (0, 2):
                found[first, place] = np.einsum("ij,ij->j", matrix, matrix)
                found[first + 1, place] = np.einsum("ij,ij->i", matrix, matrix)
                matrix = matrix - np.eye(len(matrix))
    if not np.isfinite(found).all():
        raise ValueError("squares of the Jacobians' entries overflow")
    return found.reshape(len(GAINS), *J.shape[:-1])


def _matrices(J: Any) -> np.ndarray:
    """Checked, and in float64 where they are: without x64 JAX would round J before I is taken."""
    with jax.enable_x64(True):
        return np.asarray(check_matrices(J))


def coupling(
    J: Float[ArrayLike, "layers width width"],
    graph: Graph | Sequence[Graph],
    labels: Int[ArrayLike, "layers width"],
    *,
    norm_weights: Float[ArrayLike, "layers norms width"] | None = None,
    permutations: int = 4999,
    seed: int = 0,
    correction: str = "holm",
    alpha: float = 0.05,
) -> Coupling:
    """Spearman's rho between community gain and mean participation, with permutation p-values.

    Nodes labelled -1 are left out. K communities have a p of about 2 / K! at least, so that four or
    fewer hardly give a verdict at alpha = 0.05, see `Tested.least`; a higher resolution makes more.

    Arguments:
        J: (layers, width, width) Jacobians, or one (width, width).
        graph: one per layer, or one for J.
        labels: (layers, width) the communities, or (width,).
        norm_weights: (layers, norms, width) the factors of the layer's norms, or (norms, width).
            The column j of a norm's Jacobian scales with its w_j: an artefact that `partial` takes
            out by its ranks, with the variance of the coordinate, which is `graph.variance`.
        permutations: how many; the smallest p is 1 / (1 + permutations), which a correction over
            many layers multiplies.
        seed: of the permutations; the layer's number goes in as well.
        correction: over layers, "holm" (any dependence between them) or "benjamini-hochberg"
            (false discovery rate).
        alpha: of the verdicts.

    Raises:
        ValueError: sizes that do not fit each other, a matrix that is not finite, or settings that
            are none.

    Source: Fernando and Guitchounts, arXiv 2605.14258, for gain and participation; the test and the
    partial version are derived here.
    """
    J = _matrices(J)
    if J.ndim == 2:
        labels = np.asarray(labels)[None]
        norm_weights = None if norm_weights is None else np.asarray(norm_weights)[None]
        J = J[None]
    graphs = [graph] if isinstance(graph, Graph) else list(graph)
    return coupled(
        squared_gains(J),
        graphs,
        labels,
        norm_weights=norm_weights,
        permutations=permutations,
        seed=seed,
        correction=correction,
        alpha=alpha,
    )


def coupled(
    squares: Float[np.ndarray, "gains layers width"],
    graphs: Sequence[Graph],
    labels: Int[ArrayLike, "layers width"],
    *,
    norm_weights: Float[ArrayLike, "layers norms width"] | None = None,
    permutations: int = 4999,
    seed: int = 0,
    correction: str = "holm",
    alpha: float = 0.05,
) -> Coupling:
    """`coupling` from the squares of gains, such as their mean over samples."""
    layers, width = squares.shape[1:]
    labels = np.asarray(labels)
    if not layers:
        raise ValueError("a coupling needs at least one layer, got none")
    if len(graphs) != layers or any(graph.nodes != width for graph in graphs):
        nodes = [graph.nodes for graph in graphs]
        raise ValueError(f"{layers} layers of width {width} need as many graphs, got {nodes} nodes")
    if labels.shape != (layers, width):
        raise ValueError(f"labels must have shape {(layers, width)}, got {labels.shape}")
    if norm_weights is None:
        norm_weights = np.empty((layers, 0, width))
    given = np.asarray(norm_weights)
    if given.dtype.kind in "cOSU":
        raise ValueError(f"norm_weights must be real numbers, got {given.dtype}")
    norms = given.astype(np.float64)
    if norms.ndim != 3 or norms.shape[::2] != (layers, width) or not np.isfinite(norms).all():
        raise ValueError(
            f"norm_weights must be finite, ({layers}, norms, {width}), got shape {norms.shape}"
        )
    check_test(permutations, seed, correction, alpha)
    found: list[Any] = []
    for layer, graph in enumerate(graphs):
        own = check_labels(labels[layer], width)
        inside = own >= 0
        roles = np.stack(participation(graph, own))[:, inside]
        confounds = np.vstack([np.abs(norms[layer]), graph.variance])[:, inside]
        random = np.random.default_rng([int(seed), layer])
        names, own = np.unique(own[inside], return_inverse=True)
        found.append(
            _one_layer(
                squares[:, layer][:, inside], roles, confounds, own, len(names),
                int(permutations), random,
            )
        )  # fmt: skip
    raw, partial, sizes, gain, mean = zip(*found)
    return Coupling(
        raw=_tested(raw, correction, alpha),
        partial=_tested(partial, correction, alpha),
        sizes=sizes,
        gain=gain,
        participation=mean,
        correction=correction,
        alpha=float(alpha),
    )


def check_test(permutations: Any, seed: Any, correction: str, alpha: float) -> None:
    """What `coupling` raises for settings."""
    positive("permutations", permutations)
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {CORRECTIONS}, got {correction!r}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    check_seed(seed)


def adjusted(p: Float[np.ndarray, "*lead layers"], correction: str) -> np.ndarray:
    """p-values corrected over the last axis.

    "holm" bounds the probability of one false finding or more under any dependence (Holm,
    Scandinavian J. of Statistics 6, 1979); "benjamini-hochberg" the expected share of false ones
    (J. Royal Statistical Society B 57, 1995).
    """
    if correction == "benjamini-hochberg":
        return false_discovery_control(p, axis=-1)
    order = np.argsort(p, axis=-1)
    factors = np.arange(p.shape[-1], 0, -1)
    found = np.empty_like(p)
    grown = np.maximum.accumulate(factors * np.take_along_axis(p, order, -1), axis=-1)
    np.put_along_axis(found, order, np.minimum(grown, 1), -1)
    return found


def _one_layer(squares, roles, confounds, own, count, permutations, random):
    """Raw and partial statistics of one layer, sizes, gains and mean participation."""
    nodes = squares.shape[1]
    sizes = np.bincount(own, minlength=count)
    means = np.zeros((nodes, count))  # x @ means: the communities' means of x
    means[np.arange(nodes), own] = 1 / sizes[own]
    basis = _basis(np.vstack([np.ones(nodes), _ranks(confounds)]))
    left = _ranks(np.vstack([_significant(squares), _significant(roles)]))
    left -= (left @ basis) @ basis.T
    gains_left, roles_left = left[: len(squares)], left[len(squares) :]
    # Means of what is left of an arrangement: (x - x B B^T) M = x M - (x B) (B^T M).
    both, back = np.hstack([means, basis]), basis.T @ means
    mean = roles @ means
    wanted = _unit_ranks(_significant(mean)), _unit_ranks(np.round(roles_left @ means, 10))
    rho: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for start in range(0, 1 + permutations, BLOCK):
        block = min(BLOCK, 1 + permutations - start)
        order = random.permuted(np.tile(np.arange(nodes), (block, 1)), axis=1)
        if start == 0:
            order[0] = np.arange(nodes)
        moved = gains_left[:, order] @ both
        kept = moved[..., :count] - moved[..., count:] @ back
        for place, values in enumerate(
            (_significant(squares[:, order] @ means), np.round(kept, 10))
        ):
            rho[place].append(np.einsum("sk,gbk->sgb", wanted[place], _unit_ranks(values)))
    gain = np.sqrt(squares @ means)
    return (*map(_of_arrangements, rho), sizes, gain, mean)


def _of_arrangements(blocks: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """(signs, gains) rho, chance, p, tie and least p of all arrangements, the real one first."""
    rho = np.concatenate(blocks, axis=-1)
    chance = rho.mean(axis=-1, keepdims=True)
    error = rho.std(axis=-1, keepdims=True) / rho.shape[-1] ** 0.5
    # A function of all arrangements alike, so that p stays exact.
    chance = np.where(np.abs(chance) <= 3 * error, 0, chance)
    distance = np.abs(rho - chance)
    beyond = distance - distance[..., :1]
    slack = 1e-9  # of rounding: rho of different arrangements are equal or further apart
    p, larger = ((beyond > bound).mean(axis=-1) for bound in (-slack, slack))
    least = (distance > distance.max(axis=-1, keepdims=True) - slack).mean(axis=-1)
    return rho[..., 0], chance[..., 0], p, p - larger, least


def _tested(layers, correction: str, alpha: float) -> Tested:
    rho, chance, p, tie, least = (np.stack(column, axis=-1) for column in zip(*layers))
    p_layers = adjusted(p, correction)
    signs = np.where(rho > chance, "positive", "negative")
    verdict = np.where(p_layers <= alpha, signs, "none")
    return Tested(rho, chance, p, tie, least, p_layers, verdict)


def _ranks(x: np.ndarray) -> np.ndarray:
    """Of the last axis, ties shared, centred and within +-1/2."""
    x = np.asarray(x)
    if not x.size:
        return np.zeros(x.shape)
    return (rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2) / x.shape[-1]


def _unit_ranks(x: np.ndarray) -> np.ndarray:
    """Centred ranks at unit norm, so that products are Spearman's rho; 0 where all are tied."""
    ranks = _ranks(x)
    norm = np.linalg.norm(ranks, axis=-1, keepdims=True)
    return np.divide(ranks, norm, out=np.zeros_like(ranks), where=norm > 0)


def _significant(x: np.ndarray) -> np.ndarray:
    """To 40 bits: what is equal but for the rounding of sums is tied."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, 40)), exponent - 40)


def _basis(rows: np.ndarray) -> np.ndarray:
    """(nodes, rank) orthonormal, of the span of the rows."""
    U, sizes, _ = np.linalg.svd(rows.T, full_matrices=False)
    return U[:, sizes > 1e-9 * sizes.max(initial=0)]
