"""From correlations and gains of every layer to its graph, communities and coupling.

Axes: `layers`; `nodes`, the residual coordinates; `gains`, see `svflow.topology.coupling.GAINS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from svflow.integers import is_integer
from svflow.models.transformer import Transformer
from svflow.topology.coupling import Coupling, check_test, coupled
from svflow.topology.graphs import Correlation, Graph, graph
from svflow.topology.leiden import Communities, check_leiden, communities
from svflow.topology.nulls import rewired, shuffled_weights
from svflow.topology.roles import Signed, participation

NULLS = {"shuffled_weights": shuffled_weights, "rewired": rewired}
"""The null models whose modularity stands beside a graph's."""


class Options(NamedTuple):
    """How the topology is found, see `graph`, `communities` and `coupling`.

    Arguments:
        k: edges per node.
        seed: of the communities, the null models and the permutations.
        resolution, runs: of the communities.
        permutations, correction, alpha: of the coupling.
    """

    k: int = 10
    seed: int = 0
    resolution: float = 1.0
    runs: int = 10
    permutations: int = 4999
    correction: str = "holm"
    alpha: float = 0.05

    def check(self, width: int) -> None:
        """Raises ValueError for an option that is none here, ImportError without the extra."""
        if not is_integer(self.k, 1, width - 1):
            raise ValueError(f"k must be one of 1 .. {width - 1} at width {width}, got {self.k!r}")
        check_leiden(self.seed, self.resolution, self.runs)
        check_test(self.permutations, self.seed, self.correction, self.alpha)


DEFAULT = Options()


class Topology(NamedTuple):
    """Every layer's graph, of the states that enter it, and what its Jacobian does to it.

    Arguments:
        graphs: per layer.
        communities: per layer.
        participation: (layers, nodes) each.
        null_modularity: by name in `NULLS`, (layers,) the modularity that one run of Leiden finds
            in a null model of the graph, one draw. To be compared with that of single runs.
        coupling: of all layers.
    """

    graphs: tuple[Graph, ...]
    communities: tuple[Communities, ...]
    participation: Signed
    null_modularity: dict[str, Float[np.ndarray, " layers"]]
    coupling: Coupling

    @property
    def labels(self) -> Int[np.ndarray, "layers nodes"]:
        """The community of every node of every layer, from 0; -1 for a node in none."""
        return np.stack([one.labels for one in self.communities])

    @property
    def mean_participation(self) -> Signed:
        """(layers,) each, the mean over nodes that are in a community; 0 where none is."""
        inside = self.labels >= 0
        count = np.maximum(inside.sum(axis=1), 1)
        return Signed(*((each * inside).sum(axis=1) / count for each in self.participation))


def topology(
    correlations: Callable[[int], Correlation],
    squares: Float[np.ndarray, "gains layers nodes"],
    norms: Float[np.ndarray, "layers norms nodes"],
    options: Options,
    *,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Topology:
    """The topology of all layers.

    Arguments:
        correlations: a layer's number to the correlations of its states: one at a time, as all of
            them may not fit.
        squares: of the gains, such as their mean over samples.
        norms: the layers' norm weights, see `norm_weights`.
        options: see `Options`.
        progress: wraps the range over layers.
    """
    graphs, found = [], []
    nulls: dict[str, list[float]] = {name: [] for name in NULLS}
    for layer in progress(range(squares.shape[1])):
        one = graph(correlations(layer), options.k)
        choice = dict(resolution=options.resolution)
        found.append(communities(one, options.seed, runs=options.runs, **choice))
        for name, null in NULLS.items():
            drawn = null(one, options.seed)
            nulls[name].append(communities(drawn, options.seed, runs=1, **choice).modularity)
        graphs.append(one)
    labels = [one.labels for one in found]
    roles = [participation(one, own) for one, own in zip(graphs, labels)]
    return Topology(
        graphs=tuple(graphs),
        communities=tuple(found),
        participation=Signed(*(np.stack(sign) for sign in zip(*roles))),
        null_modularity={name: np.asarray(values) for name, values in nulls.items()},
        coupling=coupled(
            squares,
            graphs,
            np.stack(labels),
            norm_weights=norms,
            permutations=options.permutations,
            seed=options.seed,
            correction=options.correction,
            alpha=options.alpha,
        ),
    )


def norm_weights(model: Transformer) -> Float[np.ndarray, "layers norms width"]:
    """The factors by which every layer's norms scale coordinates, all norms that have weights."""
    layers, config = model.flow.layers, model.config
    norms: Sequence = (
        layers.attention_norm,
        layers.hidden_norm,
        layers.attention_post_norm,
        layers.hidden_post_norm,
    )
    weights = [
        np.asarray(norm.weight[...], np.float64) + norm.offset
        for norm in norms
        if norm is not None and norm.weight is not None
    ]
    stacked = np.stack([w[list(config.blocks)] for w in weights]) if weights else np.empty(0)
    return stacked.reshape(-1, config.depth, config.width).swapaxes(0, 1)
