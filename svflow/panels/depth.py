"""The motion of a text's tokens by depth: norms, steps, angles, the refined flow, the loss."""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from svflow import plotting
from svflow.panels.markup import depths, html_number, html_rows
from svflow.panels.measure import Column, Measure, number, numbers
from svflow.portrait import Portrait, summary

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

PICTURES = tuple(MEASURES)


_LABELS = {"feed_forward": "feed-forward"}


_SHORT = {"attention": "attn", "feed_forward": "ffn", "attention + feed_forward": "both"}


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
        mean=numbers(found.mean),
        median=numbers(found.median),
        lower_quartile=numbers(found.lower),
        upper_quartile=numbers(found.upper),
        first_token=numbers(found.first),
        tokens=found.tokens.tolist(),
    )
    if key == "step":
        statistics["outside"] = (values.shape[-1] - found.tokens).tolist()
    return statistics


def document(portrait: Portrait) -> dict[str, Any]:
    """The document's `measures`."""
    return {
        key: dict(
            title=MEASURES[key].title,
            unit=MEASURES[key].unit,
            start=start,
            lines={line: _statistics(key, values) for line, values in lines.items()},
        )
        for key, (start, lines) in _lines(portrait).items()
    }


def shown(key: str) -> str:
    """The statistic of a measure in tables and as the line of its figure."""
    return "mean" if key == "loss" else "median"


def columns(doc: Mapping[str, Any]) -> list[Column]:
    """The table's columns: a measure's short name, a line's, and a value per depth."""
    found: list[Column] = []
    for key, measure in doc["measures"].items():
        lines = dict(measure["lines"])
        lines.pop("uncertainty", None)
        for name, line in lines.items():
            values = [None] * measure["start"] + line[shown(key)]
            short = str(_SHORT.get(name, name)) if len(lines) > 1 or key == "step" else ""
            found.append((MEASURES[key].short, short, values))
    return found


def label_of(name: str) -> str:
    return " + ".join(_LABELS.get(part, part.replace("_", " ")) for part in name.split(" + "))


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


def figures(doc: Mapping[str, Any], theme: str) -> dict[str, Figure]:
    return {key: _draw(doc, key, theme) for key in doc["measures"]}


def _draw(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
    measure = doc["measures"][key]
    # The refined flow starts in the model's own state: a zero says nothing there.
    skip = 1 if key == "refined" else 0
    series = []
    for hue, (name, line) in enumerate(measure["lines"].items()):
        part = {stat: np.array(values[skip:], float) for stat, values in line.items()}
        band = name != "uncertainty"
        label = {
            "state": "median token",
            "update": "median token",
            "distance": "median token",
            "uncertainty": "uncertainty",
            "next token": "mean",
        }.get(name, label_of(name))
        series.append(
            plotting.Series(
                label,
                hue if key in ("step", "radial", "tangential") else hue + 2,
                part[shown(key)],
                part["lower_quartile"] if band else None,
                part["upper_quartile"] if band else None,
                part["first_token"] if band else None,
            )
        )
    depth = measure["start"] + skip + np.arange(len(series[0].line))
    drawn = np.concatenate(
        [[one.line, one.companion] for one in series if one.companion is not None]
    )
    drawn = drawn[np.isfinite(drawn)]
    scale: str | float = "linear"
    if drawn.size and drawn.min() > 0 and drawn.max() > 30 * drawn.min():
        scale = "log"
    elif key == "radial":
        # The first token alone can be hundreds of times the others: both should be legible.
        bulk = np.nanmax([np.abs(np.array([one.low, one.high], float)) for one in series])
        if np.abs(drawn).max() > 10 * bulk > 0:
            scale = 10.0 ** math.ceil(math.log10(bulk))
    vocabulary = doc["model"]["vocabulary"]
    figure = Figure()
    axes = plotting.over_depth(
        figure.add_subplot(),
        depth,
        series,
        theme=theme,
        title=measure["title"],
        label=MEASURES[key].label,
        scale=scale,
        level=("uniform guess", math.log(vocabulary)) if key == "loss" else None,
    )
    plotting.flush_left(axes)
    return figure


def cards(doc: Mapping[str, Any]) -> str:
    cards = []
    for key in ("norm", "step", "path", "loss" if doc["loss_absent"] is None else "refined"):
        measure = doc["measures"][key]
        name, line = next(iter(measure["lines"].items()))
        values = line[shown(key)]
        part = f", {label_of(name)}" if key == "step" and len(measure["lines"]) > 1 else ""
        part += {"path": " (rad)", "loss": " (nats)"}.get(key, "")
        span = {0: "embedding", 1: "first layer"}[measure["start"]] + " to last layer"
        ends = f"{html_number(values[0])}<span> → </span>{html_number(values[-1])}"
        if key in ("path", "refined"):  # they start at zero
            ends = html_number(values[-1])
            span = "at the last layer" if key == "refined" else span
        cards.append(
            f'<div><p class="what">{measure["title"]}{part}</p><p class="value">{ends}</p>'
            f'<p class="where">{shown(key)}, {span}</p></div>'
        )
    return "".join(cards)


def _explained(doc: Mapping[str, Any], key: str) -> Measure:
    measure = MEASURES[key]
    if key == "refined":
        steps = round(1 / doc["dt"])
        split = len(doc["measures"]["step"]["lines"]) > 1
        how = "attention and feed-forward in turn (Lie–Trotter splitting)" if split else "Euler"
        meaning = (
            f"How far the model is from the flow it discretises: <i>y</i> moves through the same "
            f"field in steps of 1/{steps} layer, {how}. The uncertainty, between steps of "
            f"1/{steps} and 1/{steps // 2}, is about how far <i>y</i> itself still is from the "
            "limit of small steps; where it is not small, the flow is not resolved."
        )
        measure = measure._replace(meaning=meaning)
    return measure


def _all_statistics(doc: Mapping[str, Any]) -> str:
    blocks = []
    for measure in doc["measures"].values():
        for name, line in measure["lines"].items():
            part = f" — {label_of(name)}" if len(measure["lines"]) > 1 else ""
            head = "".join(f'<th scope="col">{stat.replace("_", " ")}</th>' for stat in line)
            rows = []
            for place, values in enumerate(zip(*line.values())):
                depth = place + measure["start"]
                cells = "".join(
                    f"<td>{v if isinstance(v, int) else html_number(v)}</td>" for v in values
                )
                rows.append(f'<tr><th scope="row">{depth or "embed"}</th>{cells}</tr>')
            blocks.append(
                f"<h3>{html.escape(measure['title'] + part)} <small>"
                f"{html.escape(measure['unit'])}</small></h3>"
                '<div class="scroll"><table><thead><tr><th scope="col">layer</th>'
                f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
            )
    return "".join(blocks)


def section(doc: Mapping[str, Any], image: Callable[..., str]) -> str:
    pictures = "\n".join(image(key, _explained(doc, key)) for key in doc["measures"])
    return f"""<section>
<h2>By depth</h2>
<p class="prose">Lines are medians over tokens{
        " (for the loss, the mean)" if doc["loss_absent"] is None else ""
    }, bands run from the lower to the upper quartile. The dashed line is the first token alone: in
many trained models it is a sink of attention with an outsized norm (Xiao et al., arXiv 2309.17453;
Sun et al., arXiv 2402.17762), which would dominate a mean over tokens. Depth 0 is the
embedding.</p>
<div class="figures">
{pictures}
</div>
</section>
<section>
<h2>By layer</h2>
<div class="scroll">{html_rows(columns(doc), depths(doc))}</div>
<details><summary>Every statistic: mean, quartiles, first token, number of tokens</summary>
{_all_statistics(doc)}
</details>
</section>
"""
