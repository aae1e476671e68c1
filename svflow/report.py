"""A portrait as a JSON document, and that document as a table.

The document is the only source of the table and of `svflow.page`, so that they show the same
numbers:

    format          "svflow portrait 3"
    model           name, family, layers, width, vocabulary, parameters, dtype, norm, placement,
                    causal
    text            the text, null where token ids were given
    ids, pieces     the token ids, and the readable piece of each
    cut_from        the number of tokens before --max-tokens cut them, null if it did not
    states          "whole", or "centered": measured less their mean over the width
    dt              the step of the refined trajectory, in layers
    device          platform and kind
    versions        of Python and of the libraries
    loss_absent     why there is no loss, null where there is one
    measures        by key, in the order of `panels.depth.MEASURES`:
        title, unit
        start       the depth of the first entry: 0, the embedding; 1 or 2, the layer
        lines       by name, lists over depth: mean, median, lower_quartile, upper_quartile,
                    first_token, and tokens, how many the statistics are over; null for a
                    statistic over no token, or a value that is not finite. `outside` is the number
                    of tokens with rho + c <= 0, for the step only.
    spectra         the local linear dynamics, see `svflow.spectra.panel`; null where left out:
        token       whose Jacobians, its place from 0
        scope       "frozen"
        seed        of the untrained model and of the controls
        draws       of each control
        top         k, how many singular directions the alignments compare
        on_host     whether LAPACK on the host computed the eigenvalues
        resolution  1 / eps of the Jacobians' type: condition numbers above it are rounding
        measures    by key, in the order of `panels.spectra.SPECTRA`, of every layer's Jacobian:
            title, unit
            start   1: the first entry is of layer 1
            lines   by name, lists over layers: model; untrained, the same architecture and ids;
                    gaussian, the expectation for a Gaussian matrix of the same width and norm as
                    the model's; random_update, the mean over the draws of that control, the
                    identity and Gaussian noise (the geometric mean of a condition number). Of the
                    complex fraction also excess, model - gaussian, and deviation, the standard
                    deviation of a Gaussian matrix's. null for what is infinite, or does not exist
                    as the forward alignment of the last layer
        eigenvalues model and untrained: by layer, the [re, im] of every eigenvalue by decreasing
                    modulus, in the shortest digits that tell it from its neighbours in its type.
                    They are most of the file: 32 layers of width 4096 take about 12 MB
        rank        the effective rank of the partial products J_l ... J_1:
            title, unit, start
            lines   by source (`svflow.spectra.panel.SOURCES`): keeps, what it has in common with
                    the model; and lists over draws, one of them of the model and the untrained, of
                    lists over layers: before and after the removal of every factor's departure from
                    normality, and gain, after / before
    power           the layers as a power method, see `svflow.power.panel`; null where left out:
        seed        of the untrained model
        shared      whether all layers share one matrix
        regime      where they do, what is predicted of the reduced system: name, rate and angle
                    per layer, see `svflow.power.Prediction`; else null
        deviation   the standard deviation of rho for independent tokens
        eigenvalues by ordering, "modulus" (|lambda|) and "residual" (|1 + lambda|): the [re, im]
                    of every layer's first
        measures    by key, in the order of `panels.power.POWER`:
            title, unit
            start   0 for the agreement of the tokens, over states; else 1
            lines   by ordering, or "tokens": lists: model; untrained; reduced, the system of
                    attention, residual and L2 normalisation; chance; and for gamma other, the mean
                    over the other layers' eigenvectors, and signed; for rho p_value. null for what
                    is infinite or does not exist

Two models side by side are one document of theirs:

    format          "svflow comparison 1"
    portraits       two documents as above
"""

from __future__ import annotations

import importlib.metadata
import platform
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from svflow.models.transformer import Transformer
from svflow.panels import PANELS, depth
from svflow.panels.markup import depths
from svflow.panels.measure import rows_of
from svflow.portrait import Portrait, loss_absent

FORMAT = "svflow portrait 3"
COMPARISON = "svflow comparison 1"

LIBRARIES = ("svflow", "jax", "flax", "diffrax", "numpy", "matplotlib")


def document(
    portrait: Portrait,
    model: Transformer,
    ids: Sequence[int] | np.ndarray,
    *,
    name: str,
    text: str | None,
    pieces: Sequence[str],
    cut_from: int | None = None,
    panels: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The portrait as the JSON document that this module's docstring describes.

    Arguments:
        portrait: of `model` and `ids`.
        panels: by key in `svflow.panels.PANELS`, what its `measure` found; none is needed.
        name, text, pieces, cut_from: as in the document.
    """
    config = model.config
    leaves = jax.tree.leaves(model)
    (device, *_) = leaves[0].devices()
    found = panels or {}
    return dict(
        format=FORMAT,
        model=dict(
            name=name,
            family=config.family,
            layers=config.depth,
            width=config.width,
            vocabulary=config.vocab_size,
            parameters=sum(leaf.size for leaf in leaves),
            dtype=str(leaves[0].dtype),
            norm=config.norm,
            placement=config.placement,
            causal=config.causal,
        ),
        text=text,
        ids=np.asarray(ids).tolist(),
        pieces=list(pieces),
        cut_from=cut_from,
        states="centered" if model.flow.centered else "whole",
        dt=portrait.dt,
        device=f"{device.platform} ({device.device_kind})",
        versions=dict(
            python=platform.python_version(), **{lib: _version(lib) for lib in LIBRARIES}
        ),
        loss_absent=loss_absent(config),
        measures=depth.document(portrait),
        **{
            key: panel.document(found[key]) if key in found else None
            for key, panel in PANELS.items()
        },
    )


def comparison(docs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of several portraits side by side."""
    return dict(format=COMPARISON, portraits=list(docs))


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return None


def table(doc: Mapping[str, Any]) -> str:
    """The measures by layer, for a terminal of 100 columns."""
    rows = []
    for panel in shown(doc):
        names = depths(doc) if panel is depth else depths(doc)[1:]
        rows += [*rows_of(panel.columns(doc), names), ""]
    return "\n".join(
        rows + [textwrap.fill(note, 96, break_on_hyphens=False) for note in notes(doc)]
    )


def notes(doc: Mapping[str, Any]) -> list[str]:
    """What a reader has to know of this portrait, in sentences."""
    return [note for panel in shown(doc) for note in panel.notes(doc)]


def shown(doc: Mapping[str, Any]) -> list[ModuleType]:
    """The panels that the document has."""
    return [depth, *(panel for key, panel in PANELS.items() if doc[key] is not None)]
