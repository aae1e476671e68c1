"""A portrait as a JSON document, and that document as a table.

The document is the only source of the table and of `svflow.page`, so that they show the same
numbers:

    format          "svflow portrait 2"
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
    measures        by key, in the order of `MEASURES`:
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
        measures    by key, in the order of `SPECTRA`, of every layer's Jacobian:
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
"""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from svflow.models.transformer import Transformer
from svflow.portrait import Portrait, loss_absent, summary
from svflow.spectra import ginibre
from svflow.spectra.panel import CONTROLS, Panel

FORMAT = "svflow portrait 2"


class Measure(NamedTuple):
    """How a measure is titled, labelled and explained; `formula` and `meaning` are HTML."""

    title: str
    unit: str
    label: str
    short: str
    formula: str
    meaning: str
    source: str


_LAYER_THEOREM = "Layer theorem, derived here after Liao, arXiv 2604.23740"

MEASURES = {
    "norm": Measure(
        "Residual norm",
        "root mean square per coordinate",
        r"$\rho$  (rms per coordinate)",
        "norm",
        "<i>ρ</i> = ‖<i>h</i>‖ / √<i>d</i>",
        "How large a token’s state <i>h</i> is after each layer; its direction is "
        "<i>x</i> = <i>h</i> / <i>ρ</i>.",
        _LAYER_THEOREM,
    ),
    "step": Measure(
        "Effective step",
        "dimensionless",
        r"$1\,/\,(\rho + c)$",
        "step",
        "Δ<i>t</i> = 1 / (<i>ρ</i> + <i>c</i>)",
        "How far one unit of tangential update moves the direction. As the norm grows, the same "
        "update turns the token less.",
        _LAYER_THEOREM,
    ),
    "radial": Measure(
        "Radial part",
        "root mean square per coordinate, signed",
        r"$c$  (signed, rms per coordinate)",
        "radial",
        "<i>c</i> = ⟨<i>x</i>, <i>v</i>⟩ / <i>d</i>",
        "The part of an update <i>v</i> along the state: above zero it lengthens the state, "
        "below zero it shortens it.",
        _LAYER_THEOREM,
    ),
    "tangential": Measure(
        "Tangential part",
        "root mean square per coordinate",
        r"$\|\,P_x v\,\|\;/\;\sqrt{d}$  (rms per coordinate)",
        "tangent",
        "‖<i>P<sub>x</sub> v</i>‖ / √<i>d</i>, &ensp;<i>P<sub>x</sub> v</i> = <i>v</i> − "
        "<i>c x</i>",
        "The part of an update across the state, the only part that turns it.",
        _LAYER_THEOREM,
    ),
    "path": Measure(
        "Geodesic path length",
        "radians",
        "cumulative angle (rad)",
        "path",
        "Σ 2 arctan( ‖<i>x</i> − <i>x</i>′‖ / ‖<i>x</i> + <i>x</i>′‖ )",
        "The angles between the directions <i>x</i>, <i>x</i>′ before and after each layer, "
        "added up.",
        "Angle formula: Kahan, How Futile are Mindless Assessments of Roundoff, 2006",
    ),
    "cosine": Measure(
        "Alignment of successive updates",
        "cosine",
        "cosine",
        "cosine",
        "cos(<i>u<sub>l</sub></i>, <i>u<sub>l</sub></i><sub>−1</sub>), &ensp;"
        "<i>u<sub>l</sub></i> = <i>h<sub>l</sub></i> − <i>h<sub>l</sub></i><sub>−1</sub>",
        "Whether a layer carries on where the one before pointed (1), turns aside (0), or "
        "takes it back (−1).",
        "Definition",
    ),
    "refined": Measure(
        "Distance to the refined flow",
        "relative to the norm of the state",
        r"$\|\,h_l - y_l\,\|\;/\;\|\,h_l\,\|$",
        "refined",
        "‖<i>h<sub>l</sub></i> − <i>y<sub>l</sub></i>‖ / ‖<i>h<sub>l</sub></i>‖",
        "",
        "Splitting: Trotter, On the Product of Semi-groups of Operators, 1959",
    ),
    "loss": Measure(
        "Next-token loss by depth",
        "nats",
        "cross-entropy (nats)",
        "loss",
        "− log softmax( unembed(<i>h<sub>l</sub></i>) )<sub>next token</sub>",
        "Every state read out as though it were the last, final norm included. The value at "
        "the last layer is the model’s own loss.",
        "Logit lens: nostalgebraist, 2020",
    ),
}
"""The measures in the order they are shown, by their key in the document."""

_MEASURE_SOURCE = "Measure: Fernando and Guitchounts, arXiv 2605.14258"

SPECTRA = {
    "complex_fraction": Measure(
        "Complex fraction",
        "share of eigenvalues",
        "share of eigenvalues",
        "complex",
        "#{ <i>i</i> : |Im <i>λ<sub>i</sub></i>| &gt; 10<sup>−6</sup> |<i>λ<sub>i</sub></i>| } / "
        "<i>d</i>",
        "How many eigenvalues come in rotating pairs. Nearly all do in a matrix of noise, about "
        "1 − √(2 / π<i>d</i>): read the excess over it, not the share. The band is two standard "
        "deviations of a Gaussian matrix’s share to either side.",
        f"{_MEASURE_SOURCE}. Expectation: Edelman, Kostlan and Shub, How many eigenvalues of a "
        "random matrix are real?, 1994; deviation: Forrester and Nagao, Eigenvalue statistics of "
        "the real Ginibre ensemble, 2007",
    ),
    "spectral_radius": Measure(
        "Spectral radius",
        "dimensionless",
        r"$\max\;|\,\lambda\,|$",
        "radius",
        "max |<i>λ<sub>i</sub></i>|",
        "The growth of the fastest eigendirection, were the layer applied again and again.",
        f"{_MEASURE_SOURCE}. Expectation: circular law with the correction at finite width, after "
        "Kostlan, 1992",
    ),
    "condition_number": Measure(
        "Condition number",
        "dimensionless",
        r"$\sigma_1\,/\,\sigma_d$",
        "cond",
        "<i>σ</i><sub>1</sub> / <i>σ<sub>d</sub></i>",
        "How unevenly the layer stretches. Noise has about 4.65 <i>d</i>; a layer near the "
        "identity has far less.",
        f"{_MEASURE_SOURCE}. Expectation: Edelman, Eigenvalues and condition numbers of random "
        "matrices, 1988",
    ),
    "expanding": Measure(
        "Expanding fractions",
        "share of directions",
        "share of directions",
        "expand",
        "#{ <i>i</i> : |<i>λ<sub>i</sub></i>| &gt; 1 } / <i>d</i>, &ensp;"
        "#{ <i>i</i> : <i>σ<sub>i</sub></i> &gt; 1 } / <i>d</i>",
        "How many directions grow, by eigenvalues (repeated application) and by singular values "
        "(one application).",
        f"{_MEASURE_SOURCE}. Expectations: circular law, and Marchenko and Pastur, 1967",
    ),
    "henrici_departure": Measure(
        "Henrici departure",
        "relative to the norm",
        "relative to the norm",
        "Henrici",
        "√( ‖<i>J</i>‖<sup>2</sup> − Σ |<i>λ<sub>i</sub></i>|<sup>2</sup> ) / ‖<i>J</i>‖",
        "How far the layer is from a normal matrix (0), whose eigenvectors are orthogonal. Noise "
        "is near 1 / √2.",
        f"{_MEASURE_SOURCE}; Henrici, Numer. Math. 4, 1962. Expectation derived here",
    ),
    "symmetric_part": Measure(
        "Symmetric part",
        "share of the squared norm",
        "share of the squared norm",
        "symm",
        "‖(<i>J</i> + <i>J</i><sup>T</sup>) / 2‖<sup>2</sup> / ‖<i>J</i>‖<sup>2</sup>",
        "1 for the identity and every symmetric matrix, one half for noise, 0 for a pure "
        "infinitesimal rotation.",
        f"{_MEASURE_SOURCE}. Expectation derived here",
    ),
    "alignment": Measure(
        "Alignment of singular directions",
        "mean squared cosine",
        "mean squared cosine",
        "align",
        "‖<i>U<sub>k</sub></i><sup>T</sup> <i>V<sub>k</sub></i>‖<sup>2</sup> / <i>k</i>, &ensp;"
        "‖<i>U<sub>k</sub></i><sup>T</sup> <i>V</i>&thinsp;′<sub><i>k</i></sub>‖<sup>2</sup> / "
        "<i>k</i>",
        "",
        f"{_MEASURE_SOURCE}. Expectation <i>k</i> / <i>d</i>, derived here",
    ),
    "update_ratio": Measure(
        "Weight of the update",
        "ratio of norms",
        r"$\|\;J-I\;\|\;/\;\|\;J\;\|$",
        "|R|/|J|",
        "‖<i>R</i>‖ / ‖<i>J</i>‖, &ensp;<i>R</i> = <i>J</i> − <i>I</i>",
        "How much of the layer’s derivative is not the identity of the residual stream. Noise is "
        "above 1 at every scale.",
        f"{_MEASURE_SOURCE}. Expectation derived here",
    ),
}
"""The spectral measures of single layers in the order they are shown, by key in the document."""

RANK = Measure(
    "Cumulative effective rank",
    "directions, from 1 to the width",
    "effective rank",
    "rank",
    "exp( − Σ <i>p<sub>i</sub></i> log <i>p<sub>i</sub></i> ), &ensp;<i>p<sub>i</sub></i> = "
    "<i>σ<sub>i</sub></i> / Σ <i>σ<sub>j</sub></i>, &ensp;<i>σ</i> of <i>J<sub>l</sub></i> ⋯ "
    "<i>J</i><sub>1</sub>",
    "How evenly the product of the first <i>l</i> layers’ Jacobians stretches, as a number of "
    "directions: the width where every <i>σ</i> is the same, 1 where one outweighs the rest. It is "
    "an entropy, no count: small <i>σ</i> still tell directions apart. Once with the Jacobians as "
    "they are, and once with the departure from normality removed from each: <i>J</i> = <i>Z</i> "
    "(<i>D</i> + <i>N</i>) <i>Z</i><sup>T</sup> becomes <i>Z D Z</i><sup>T</sup>, which has the "
    "same eigenvalues.",
    "Effective rank: Roy and Vetterli, EUSIPCO 2007; removal: Fernando and Guitchounts, arXiv "
    "2605.14258; real Schur form: Golub and Van Loan, Matrix Computations; controls derived here",
)

KEEPS = {
    "model": ("this model", "J, the factors themselves"),
    "untrained": ("untrained", "the same architecture and text"),
    "haar_similarity": ("random bases", "Q J Qᵀ: each factor’s λ, σ and departure"),
    "haar_factors": ("random directions", "U Σ Vᵀ: each factor’s σ"),
    "haar_update": ("identity + random directions", "I + U Σ Vᵀ: each update’s σ"),
    "random_update": ("identity + Gaussian", "(tr J / d) I + G: each factor’s trace, |R| and |J|"),
}
"""The name of each source of a product, and what of the model it keeps."""

_SCALARS: dict[str, dict[str, str]] = {
    "expanding": {
        "eigenvalues": "expanding_eigenvalues",
        "singular values": "expanding_singular_values",
    },
    "alignment": {"self": "self_alignment", "forward": "forward_alignment"},
}

LIBRARIES = ("svflow", "jax", "flax", "diffrax", "numpy", "matplotlib")
_LABELS = {"feed_forward": "feed-forward"}
_SHORT = {"attention": "attn", "feed_forward": "ffn", "attention + feed_forward": "both"}


def document(
    portrait: Portrait,
    model: Transformer,
    ids: Sequence[int] | np.ndarray,
    *,
    name: str,
    text: str | None,
    pieces: Sequence[str],
    cut_from: int | None = None,
    spectra: Panel | None = None,
) -> dict[str, Any]:
    """The portrait as the JSON document that this module's docstring describes.

    Arguments:
        portrait, spectra: of `model` and `ids`; spectra None where they are left out.
        name, text, pieces, cut_from: as in the document.
    """
    config = model.config
    leaves = jax.tree.leaves(model)
    (device, *_) = leaves[0].devices()
    measures = {}
    for key, (start, lines) in _lines(portrait).items():
        measure = MEASURES[key]
        measures[key] = dict(
            title=measure.title,
            unit=measure.unit,
            start=start,
            lines={line: _statistics(key, values) for line, values in lines.items()},
        )
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
        measures=measures,
        spectra=None if spectra is None else spectral_document(spectra),
    )


def spectral_document(panel: Panel) -> dict[str, Any]:
    """The document's `spectra`."""
    gaussian, excess = panel.model.ginibre, panel.model.excess
    measures: dict[str, dict[str, Any]] = {}
    for key, measure in SPECTRA.items():
        spectral = {
            line: dict(
                model=_numbers(np.asarray(getattr(panel.model, name))),
                untrained=_numbers(np.asarray(getattr(panel.untrained, name))),
                gaussian=_numbers(np.where(np.isnan(excess[name]), np.nan, gaussian[name])),
                random_update=_numbers(_mean(key, np.asarray(getattr(panel.random_update, name)))),
            )
            for line, name in scalars(key).items()
        }
        measures[key] = dict(title=measure.title, unit=measure.unit, start=1, lines=spectral)
    layers, width = panel.model.singular_values.shape
    deviation = ginibre.complex_fraction_deviation(width)
    measures["complex_fraction"]["lines"]["layer"].update(
        excess=_numbers(excess["complex_fraction"]), deviation=[deviation] * layers
    )
    lines: dict[str, dict[str, Any]] = {
        source: dict(
            keeps=KEEPS[source][1],
            before=[_numbers(one) for one in pairs[:, 0]],
            after=[_numbers(one) for one in pairs[:, 1]],
            gain=[_numbers(one) for one in pairs[:, 1] / pairs[:, 0]],
        )
        for source, pairs in panel.effective_rank.items()
    }
    kind = panel.model.singular_values.dtype
    return dict(
        token=panel.token,
        scope="frozen",
        seed=panel.seed,
        draws=len(panel.effective_rank[CONTROLS[0]]),
        top=panel.model.top,
        on_host=panel.model.on_host,
        resolution=float(1 / np.finfo(kind).eps),
        measures=measures,
        eigenvalues=dict(
            model=_pairs(panel.model.eigenvalues), untrained=_pairs(panel.untrained.eigenvalues)
        ),
        rank=dict(title=RANK.title, unit=RANK.unit, start=1, lines=lines),
    )


def scalars(key: str) -> dict[str, str]:
    """By the line of a measure in `SPECTRA`, its field of `Measures`."""
    return _SCALARS.get(key, {"layer": key})


def _mean(key: str, drawn: np.ndarray) -> np.ndarray:
    """Over the draws; geometric where the expectation itself is infinite."""
    return np.exp(np.log(drawn).mean(0)) if key == "condition_number" else drawn.mean(0)


def over_draws(values: Sequence[Sequence[float | None]]) -> np.ndarray:
    """(3, layers) of lists over draws: the least, the median and the largest; nan for a null."""
    drawn = np.array(values, float)
    return np.stack([drawn.min(0), np.median(drawn, 0), drawn.max(0)])


def _pairs(values) -> list[list[list[float]]]:
    """[re, im] of (layers, width) complex numbers, each in the shortest digits of its type."""
    parts = np.stack([values.real, values.imag], axis=-1)
    return [[[float(str(x)) for x in pair] for pair in layer] for layer in parts]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return None


def _lines(portrait: Portrait) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
    """By key: the depth of the first entry, and by name the (depth, tokens) values."""

    def split(names, values):
        return {name: values[:, place] for place, name in enumerate(names)}

    lines = {
        "norm": (0, {"state": portrait.norm}),
        "step": (1, split(portrait.substeps, portrait.step)),
        "radial": (1, split(portrait.branches, portrait.radial)),
        "tangential": (1, split(portrait.branches, portrait.tangential)),
        "path": (0, {"state": portrait.path}),
        "cosine": (2, {"update": portrait.cosine}),
        "refined": (0, {"distance": portrait.refined, "uncertainty": portrait.refined_error}),
    }
    if len(portrait.cosine) == 0:  # one layer has no layer before it
        del lines["cosine"]
    if portrait.loss is not None:
        lines["loss"] = (0, {"next token": portrait.loss})
    return lines


def _statistics(key: str, values: np.ndarray) -> dict[str, list]:
    found = summary(values)
    statistics: dict[str, list] = dict(
        mean=_numbers(found.mean),
        median=_numbers(found.median),
        lower_quartile=_numbers(found.lower),
        upper_quartile=_numbers(found.upper),
        first_token=_numbers(found.first),
        tokens=found.tokens.tolist(),
    )
    if key == "step":
        statistics["outside"] = (values.shape[-1] - found.tokens).tolist()
    return statistics


def _numbers(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def shown(key: str) -> str:
    """The statistic of a measure in tables and as the line of its figure."""
    return "mean" if key == "loss" else "median"


# The table


def columns(doc: Mapping[str, Any]) -> list[tuple[str, str, list[float | None]]]:
    """The table's columns: a measure's short name, a line's, and a value per depth."""
    found: list[tuple[str, str, list[float | None]]] = []
    for key, measure in doc["measures"].items():
        lines = dict(measure["lines"])
        lines.pop("uncertainty", None)
        for name, line in lines.items():
            values = [None] * measure["start"] + line[shown(key)]
            short = str(_SHORT.get(name, name)) if len(lines) > 1 or key == "step" else ""
            found.append((MEASURES[key].short, short, values))
    return found


def number(value: float | None) -> str:
    """Four significant digits in at most seven characters; a dot where there is no value."""
    if value is None:
        return "·"
    size = abs(value)
    if size != 0 and (size < 0.001 or size >= 9999.5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:.{digits}f}"


def ranged(least: float, median: float, largest: float) -> str:
    """A median and, of more than one value, the range around it."""
    span = f" ({number(least)}–{number(largest)})" if largest > least else ""
    return f"{number(median if math.isfinite(median) else None)}{span}"


def spectral_columns(doc: Mapping[str, Any]) -> list[tuple[str, str, list[float | None]]]:
    """As `columns`, of the spectra: a value per layer, none for the embedding."""
    measures = doc["spectra"]["measures"]

    def column(key, line="layer", field="model", under=""):
        values = measures[key]["lines"][line][field]
        return SPECTRA[key].short, under, values

    rank = doc["spectra"]["rank"]["lines"]["model"]
    return [
        column("complex_fraction"),
        column("complex_fraction", field="excess", under="excess"),
        column("spectral_radius"),
        column("condition_number"),
        column("expanding", "eigenvalues", under="λ"),
        column("expanding", "singular values", under="σ"),
        column("henrici_departure"),
        column("update_ratio"),
        (RANK.short, "before", rank["before"][0]),
        (RANK.short, "after", rank["after"][0]),
    ]


def table(doc: Mapping[str, Any]) -> str:
    """The measures by layer, for a terminal of 100 columns."""
    names = ["embed", *map(str, range(1, doc["model"]["layers"] + 1))]
    rows = _rows(columns(doc), names)
    if doc["spectra"] is not None:
        rows += ["", *_rows(spectral_columns(doc), names[1:])]
    return "\n".join([*rows, "", *(_wrap(note) for note in notes(doc))])


def _rows(found, names: Sequence[str]) -> list[str]:
    top, under = [f"{'layer':>5}"], [f"{'':>5}"]
    previous = None
    for measure, line, _ in found:
        top.append(f"{measure if measure != previous else '':>7}")
        under.append(f"{line[:7]:>7}")
        previous = measure
    rows = [" ".join(top), " ".join(under)]
    rows.append("─" * len(rows[0]))
    for place, name in enumerate(names):
        rows.append(" ".join([f"{name:>5}", *(f"{number(v[place]):>7}" for *_, v in found)]))
    return rows


def _wrap(text: str, width: int = 96) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def notes(doc: Mapping[str, Any]) -> list[str]:
    """What a reader has to know of this portrait, in sentences."""
    tokens = len(doc["ids"])
    found = [
        f"Medians over {tokens} tokens, the first included; the loss is a mean over the "
        f"{tokens - 1} that have a next token. Row l is layer l, counted from 1, and the state "
        "after it."
        if doc["loss_absent"] is None
        else f"Medians over {tokens} tokens, the first included. Row l is layer l, counted from "
        "1, and the state after it."
    ]
    if doc["cut_from"] is not None:
        found.append(f"The text has {doc['cut_from']} tokens and was cut to the first {tokens}.")
    if doc["states"] == "centered":
        found.append(
            "This model’s norms remove the mean of a state, so states and updates are measured "
            "less their mean over the width."
        )
    if doc["model"]["placement"] == "post":
        found.append(
            "A norm follows each addition: the state h is that norm’s output, and step, radial "
            "and tangential part describe the addition h + v that the norm reads."
        )
    if doc["loss_absent"] is not None:
        found.append(f"No next-token loss: {doc['loss_absent']}.")
    uncertainty = doc["measures"]["refined"]["lines"]["uncertainty"]["median"]
    largest = max(filter(None, uncertainty), default=0.0)
    found.append(
        f"Refined: the flow is followed in steps of {doc['dt']:g} layer, which leaves the distance "
        f"uncertain by a median of up to {number(largest)}; where that is not small against the "
        "distance, the flow is not resolved."
    )
    for name, line in doc["measures"]["step"]["lines"].items():
        layers = [str(layer) for layer, count in enumerate(line["outside"], 1) if count]
        if layers:
            found.append(
                f"{label_of(name).capitalize()}: ρ + c ≤ 0 for {sum(line['outside'])} of "
                f"{tokens * len(line['outside'])} (token, layer) pairs, in layer "
                f"{', '.join(layers)}. There the update turns the token by a right angle or more, "
                "the step is not defined, and its statistics leave the pair out."
            )
    for key, measure in doc["measures"].items():
        for name, line in measure["lines"].items():
            lost = sum(max(line["tokens"]) - count for count in line["tokens"])
            if key != "step" and lost:
                found.append(
                    f"{measure['title']} ({name}): {lost} values are not finite and left out."
                )
    if doc["spectra"] is not None:
        found += _spectral_notes(doc)
    return found


def _spectral_notes(doc: Mapping[str, Any]) -> list[str]:
    spectra, width = doc["spectra"], doc["model"]["width"]
    noise = spectra["measures"]["complex_fraction"]["lines"]["layer"]
    draws = f"{spectra['draws']} draw{'s' * (spectra['draws'] > 1)}"
    found = [
        f"Spectra are of each layer’s {width} × {width} Jacobian at token {spectra['token'] + 1}, "
        "the other tokens’ states before the layer held. Beside every measure stand a Gaussian "
        "matrix of that width and norm; the identity and Gaussian noise with the layer’s trace, "
        f"|R| and |J| (random_update, mean over {draws}); and the same architecture untrained on "
        f"the same ids (one draw). Seed {spectra['seed']}.",
        "Excess is over the Gaussian matrix, of whose eigenvalues a share of "
        f"{number(noise['gaussian'][0])} is complex, with a standard deviation of "
        f"{number(noise['deviation'][0])}.",
    ]
    gains = {
        source: over_draws(line["gain"])[:, -1] for source, line in spectra["rank"]["lines"].items()
    }
    own = gains["model"][1]
    drawn = np.array([gains[source] for source in CONTROLS])
    if math.isfinite(own) and np.isfinite(drawn).all():
        least, largest = drawn.min(), drawn.max()
        one = spectra["rank"]["lines"]["model"]["gain"][0]
        alone = f" (after layer 1 alone by {number(one[0])})" if len(one) > 1 and one[0] else ""
        each = ", ".join(f"{source} {ranged(*gains[source])}" for source in CONTROLS)
        # A product of one factor is the same for some controls, to rounding.
        placed: dict[str, list[str]] = {"above": [], "within": [], "below": []}
        for source in CONTROLS:
            low, _, high = gains[source] * (1 - 1e-4, 1, 1 + 1e-4)
            placed["below" if own < low else "above" if own > high else "within"].append(source)
        where = "; ".join(f"{how} {', '.join(which)}" for how, which in placed.items() if which)
        found.append(
            "Rank is the effective rank of the product of the Jacobians so far, before and after "
            "the removal of each one’s departure from normality. Over all layers the removal "
            f"multiplies it by {number(own)} here{alone}, by {ranged(*gains['untrained'])} "
            f"untrained, and by {number(least)} to {number(largest)} over {draws} of each control: "
            f"{each}. Random factors change too, so only a difference from all of them can say "
            f"something about training. This model is {where}."
        )
    if not doc["model"]["causal"]:
        found.append(
            "Attention sees both sides of a token, so the product of frozen Jacobians leaves out "
            "how the other tokens respond: it is no derivative of the whole model."
        )
    condition = spectra["measures"]["condition_number"]["lines"]["layer"]["model"]
    lost = sum(c is None or c > spectra["resolution"] for c in condition)
    if lost:
        found.append(
            f"The condition number of {lost} of {len(condition)} layers is above 1 / eps = "
            f"{number(spectra['resolution'])}: their smallest singular value is zero to rounding, "
            "and the number says no more than that."
        )
    return found


def label_of(name: str) -> str:
    return " + ".join(_LABELS.get(part, part.replace("_", " ")) for part in name.split(" + "))
