"""One text's residual stream as a graph, and what the layers' Jacobians do to its communities.

Axes: `layers`; `shown`, some of them; `nodes`, the residual coordinates. All is dimensionless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from svflow.integers import is_integer
from svflow.models.transformer import Transformer
from svflow.simulate import simulate
from svflow.spectra import controls
from svflow.spectra.jacobians import layer_jacobians
from svflow.topology.analysis import DEFAULT, Options, Topology, norm_weights, topology
from svflow.topology.coupling import squared_gains
from svflow.topology.graphs import correlation, graph
from svflow.topology.leiden import communities


class Panel(NamedTuple):
    """Topology of the states of one text, and the coupling of one token's Jacobians to it.

    A text has few states: their correlations have a rank of at most states - 1, and independent
    coordinates are correlated by about 1 / sqrt(states). So the graph may be noise: `noise` says
    what that looks like, with the same number of states. p-values of the coupling hold for any
    graph; that there is none says little then.

    Arguments:
        token: whose Jacobians, its place in the text, from 0.
        states: how many there are, those of the tokens after the first `skip`.
        shown: (shown,) the layers of `matrices`, from 0.
        matrices: (shown, nodes, nodes) the correlations before those layers.
        model: of the model.
        untrained: of `controls.untrained(seed, model)` on the same ids.
        noise: (layers,) the modularity of the graph from the same states with every coordinate's
            values permuted over the tokens by itself; one run, to be compared with single runs.
        options: how all was found.
    """

    token: int
    states: int
    shown: tuple[int, ...]
    matrices: Float[np.ndarray, "shown nodes nodes"]
    model: Topology
    untrained: Topology
    noise: Float[np.ndarray, " layers"]
    options: Options


def panel(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"],
    *,
    token: int = -1,
    skip: int = 1,
    shown: Sequence[int] | None = None,
    options: Options = DEFAULT,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Panel:
    """The topology of one text, beside an untrained model's and that of noise.

    Arguments:
        model: with or without a causal mask.
        ids: (tokens,).
        token: whose Jacobians ("frozen"); negative counts from the end.
        skip: how many tokens at the beginning are left out of the correlations, see `study`.
        shown: layers whose correlations are kept, from 0; by default the first, the middle and the
            last.
        options: how the topology is found.
        progress: wraps the range over layers, twice as many: the model's and the untrained one's.

    Raises:
        ValueError: what is not a `Transformer`, ids or a token that it does not take, fewer than
            two states, options or layers that are none, or what is not finite.
        ImportError: without the extra `topology`.

    Source: Fernando and Guitchounts, arXiv 2605.14258; the controls are derived here.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"a panel needs a Transformer, got {type(model).__name__}")
    depth = model.flow.depth
    options.check(model.flow.width)
    layers = np.asarray(sorted({0, depth // 2, depth - 1}) if shown is None else shown)
    whole = layers.ndim == 1 and layers.size and np.issubdtype(layers.dtype, np.integer)
    if not whole or layers.min() < 0 or layers.max() >= depth:
        raise ValueError(f"shown must be layers of 0 .. {depth - 1}, got {shown}")
    if not is_integer(skip):
        raise ValueError(f"skip must be an int, got {skip!r}")
    if skip < 0:
        raise ValueError(f"skip must not be negative, got {skip}")
    steps = iter(progress(range(2 * depth)))
    xs, found = _topology(model, ids, token, skip, options, steps)
    with controls.of_the_untrained():
        fresh = controls.untrained(options.seed, model)
        _, other = _topology(fresh, ids, token, skip, options, steps)
    next(steps, None)  # so that a progress bar sees its end
    random = np.random.default_rng(options.seed)
    noise = []
    for states in xs:
        drawn = graph(random.permuted(states, axis=0), options.k)
        choice = dict(resolution=options.resolution)
        noise.append(communities(drawn, options.seed, runs=1, **choice).modularity)
    return Panel(
        token=int(token) % np.size(ids),
        states=xs.shape[1],
        shown=tuple(layers.tolist()),
        matrices=np.stack([correlation(xs[layer]).matrix for layer in layers]),
        model=found,
        untrained=other,
        noise=np.asarray(noise),
        options=options,
    )


def _topology(model, ids, token, skip, options, steps) -> tuple[np.ndarray, Topology]:
    """The states before every layer, (layers, states, nodes), and their topology."""
    with jax.default_matmul_precision("highest"):
        xs = simulate(model.flow, model.embed(ids)).xs
    if xs.shape[1] < skip + 2:
        raise ValueError(
            f"correlations need at least two states, got {xs.shape[1]} tokens less the first {skip}"
        )
    squares = squared_gains(layer_jacobians(model.flow, xs, token=token))
    states = np.asarray(xs[:-1, skip:], np.float64)

    def each(layers):
        for layer in layers:
            next(steps, None)
            yield layer

    return states, topology(
        lambda layer: correlation(states[layer]),
        squares,
        norm_weights(model),
        options,
        progress=each,
    )
