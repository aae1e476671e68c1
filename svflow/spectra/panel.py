"""One text's local linear dynamics: spectra of the layers' Jacobians, each beside its baselines.

Axes: `draws`; `layers`; `width`, the residual stream; `removal`: 0 the factors as they are, 1
without their departure from normality (`schur_normal`). All numbers are dimensionless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from svflow.integers import positive
from svflow.models.transformer import Transformer
from svflow.spectra import controls
from svflow.spectra.jacobians import text_jacobians
from svflow.spectra.measures import Measures, measures
from svflow.spectra.products import cumulative
from svflow.spectra.schur import schur_normal

CONTROLS = ("haar_similarity", "haar_factors", "haar_update", "random_update")
"""The controls whose products are taken. `haar_basis` is not one of them: it is normal already, and
the same in law as `haar_similarity` without its departure."""

SOURCES = ("model", "untrained", *CONTROLS)
"""Whose products of Jacobians a panel has."""

DRAWS = 2**31 - 1
"""What a seed's key is folded with for the controls; with small numbers it draws parameters."""


class Panel(NamedTuple):
    """The Jacobians J_l of one token's state through the layers, the others held ("frozen").

    Arguments:
        token: its place in the text, from 0.
        seed: of the untrained weights; draw i of every control is of
            `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DRAWS), i)`.
        model: the measures of every J_l, NumPy arrays (layers,), `eigenvalues` and
            `singular_values` (layers, width); `model.ginibre` is what Gaussian noise gives.
        untrained: the same of `controls.untrained(seed, model)` on the same ids, one draw.
        random_update: the same of `controls.random_update`, identity + Gaussian, with draws as the
            leading axis: what noise of the update gives, where `model.ginibre` is noise throughout.
        effective_rank: by name in `SOURCES`, (draws, removal, layers) of the partial products
            J_l ... J_1, from 1 to width; of a control's, with each factor drawn anew by itself. One
            draw of "model" and "untrained". In JAX's widest floating type.
    """

    token: int
    seed: int
    model: Measures
    untrained: Measures
    random_update: Measures
    effective_rank: dict[str, Float[np.ndarray, "draws removal layers"]]


def panel(
    model: Transformer,
    ids: Int[ArrayLike, " tokens"],
    *,
    token: int = -1,
    seed: int = 0,
    draws: int | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Panel:
    """Measures the Jacobians of one token along one text, and what they are compared with.

    Random factors change their effective rank as well where their departure from normality is
    removed: the change says nothing about a model, only its difference from that of every draw of
    the controls can.

    Arguments:
        model: with or without a causal mask.
        ids: (tokens,).
        token: whose Jacobians; negative counts from the end.
        seed: of the untrained weights and the controls.
        draws: of each control; by default 640 // width, at least 1 and at most 5: wide
            matrices average over themselves, narrow ones differ from draw to draw.
        progress: wraps the range over steps of about equal length, for example `tqdm.tqdm`.

    Computed in float32 at least. Dense solvers on the host take draws * layers * width^3: seconds
    at a width of 128, hours at some thousands.

    The token's product J_L ... J_1 is the derivative of its last state by its first where attention
    is causal; without a causal mask the other tokens' response is left out of it.

    Raises:
        ValueError: what is not a `Transformer`, fewer draws than one, ids or a token that the model
            does not take, or a state or a Jacobian that is not finite, of the model or of the
            untrained one.
        MemoryError: Jacobians that do not fit.

    Source: Fernando and Guitchounts, arXiv 2605.14258, for the measures and the removal; the
    controls are derived here.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"a panel needs a Transformer, got {type(model).__name__}")
    if draws is None:
        draws = max(1, min(5, 640 // model.flow.width))
    draws = positive("draws", draws)
    key = jax.random.fold_in(jax.random.key(seed), DRAWS)
    J = text_jacobians(model, ids, token=token)
    steps = [*SOURCES[:2], *(name for name in CONTROLS for _ in range(draws))]
    found, updates = {"model": _measured(J)}, []
    ranks: dict[str, list[np.ndarray]] = {name: [] for name in SOURCES}
    for step in progress(range(len(steps))):
        name, factors = steps[step], J
        if name == "untrained":
            with controls.of_the_untrained():
                factors = text_jacobians(controls.untrained(seed, model), ids, token=token)
            found[name] = _measured(factors)
        elif name != "model":
            factors = controls.CONTROLS[name](jax.random.fold_in(key, len(ranks[name])), J)
        if name == "random_update":
            updates.append(_measured(factors))
        # One call: two products run side by side.
        pair = cumulative(jnp.stack([factors, schur_normal(factors)]))
        ranks[name].append(np.asarray(pair.effective_rank))
    together: list[Any] = [np.stack(values) for values in zip(*(one[:-2] for one in updates))]
    together += updates[0][-2:]
    return Panel(
        token=int(token) % len(np.asarray(ids)),
        seed=int(seed),
        **found,
        random_update=Measures(*together),
        effective_rank={name: np.stack(pairs) for name, pairs in ranks.items()},
    )


def _measured(J: Float[Array, "layers width width"]) -> Measures:
    found: list[Any] = [np.asarray(v) if isinstance(v, jax.Array) else v for v in measures(J)]
    return Measures(*found)
