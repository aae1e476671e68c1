"""A portrait as a JSON document, and that document as a table.

The document is the only source of the table and of `svflow.page`, so that they show the same
numbers:

    format          "svflow portrait 1"
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

FORMAT = "svflow portrait 1"


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
        r"$\|P_x v\|\,/\,\sqrt{d}$  (rms per coordinate)",
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
        r"$\|h_l - y_l\|\,/\,\|h_l\|$",
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
) -> dict[str, Any]:
    """The portrait as the JSON document that this module's docstring describes."""
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
    )


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


def table(doc: Mapping[str, Any]) -> str:
    """The measures by layer, for a terminal of 100 columns."""
    found = columns(doc)
    top, under = [f"{'layer':>5}"], [f"{'':>5}"]
    previous = None
    for measure, line, _ in found:
        top.append(f"{measure if measure != previous else '':>7}")
        under.append(f"{line[:7]:>7}")
        previous = measure
    rows = [" ".join(top), " ".join(under)]
    rows.append("─" * len(rows[0]))
    for depth in range(doc["model"]["layers"] + 1):
        name = str(depth) if depth else "embed"
        rows.append(" ".join([f"{name:>5}", *(f"{number(v[depth]):>7}" for *_, v in found)]))
    return "\n".join([*rows, "", *(_wrap(note) for note in notes(doc))])


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
    return found


def label_of(name: str) -> str:
    return " + ".join(_LABELS.get(part, part.replace("_", " ")) for part in name.split(" + "))
