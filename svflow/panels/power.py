"""The layers as a power method: do the tokens turn to the layers' principal directions?"""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from svflow import plotting
from svflow.panels.markup import blocks, depths, html_number, html_rows
from svflow.panels.measure import Column, Measure, number, numbers
from svflow.power.matrices import SHIFTS
from svflow.power.panel import Panel, panel
from svflow.power.study import Study
from svflow.power.theory import Regime

KEY = "power"
TITLE = "The layers as a power method"
ABSENT = "The layers’ principal directions"
OPTIONS = ()
EXTRA = None
LEAST = (2, 1)
SWITCH = "leave out the layers' principal directions: their time grows as layers x width^3"

_NAMED = "Statistic by name: Li and Altafini, arXiv 2605.25619; formula and controls, here"

POWER = {
    "gap": Measure(
        "Gap of the first eigenvalue",
        "ratio of moduli",
        r"$|\lambda_1|/|\lambda_2|$,  $|1+\lambda_1|/|1+\lambda_2|$",
        "gap",
        "|<i>λ</i><sub>1</sub>| / |<i>λ</i><sub>2</sub>|, &ensp;|1 + <i>λ</i><sub>1</sub>| / |1 + "
        "<i>λ</i><sub>2</sub>|",
        "How far the first eigenvalue of a layer’s matrix <i>F</i> = Σ <i>O<sup>h</sup> "
        "V<sup>h</sup></i> is ahead of the next that is not its conjugate. Near 1, one layer "
        "hardly tells the two directions apart.",
        "Definition",
    ),
    "gamma": Measure(
        "Alignment with the principal direction",
        "mean norm of a unit token’s projection",
        r"$\gamma$  (mean $|\,v_1\cdot x\,|$)",
        "γ",
        "<i>γ</i> = mean<sub><i>i</i></sub> |<i>v</i><sub>1</sub> · <i>x<sub>i</sub></i>|",
        "How much of a token, at unit norm after the layer, lies along that layer’s first "
        "eigenvector; of a complex one, in its plane. A random direction gives the chance level, "
        "but tokens of a trained model crowd a few directions: the table has what the other "
        "layers’ eigenvectors give too.",
        _NAMED,
    ),
    "rho": Measure(
        "Share of tokens that turn to it",
        "share of tokens",
        r"$\rho$  (share of tokens)",
        "ρ",
        "<i>ρ</i> = #{ <i>i</i> : |<i>v</i><sub>1</sub> · <i>x<sub>i</sub></i>′| &gt; "
        "|<i>v</i><sub>1</sub> · <i>x<sub>i</sub></i>| } / tokens",
        "How many tokens the layer brings closer to its first eigenvector, of those whose "
        "projection it changes. The band is one half and two standard deviations of as many "
        "independent tokens: those of one text are not independent, which makes it too narrow.",
        _NAMED,
    ),
    "span": Measure(
        "Tokens in the span of the first eigenvectors",
        "mean norm of a unit token’s projection",
        "mean norm of the projection",
        "span",
        "mean<sub><i>i</i></sub> ‖<i>P x<sub>i</sub></i>‖",
        "The part of a token, at unit norm after the layer, in the span of the first eigenvectors: "
        "two real dimensions, or three where a real one is followed by a pair.",
        _NAMED,
    ),
    "consensus": Measure(
        "Agreement of the tokens",
        "norm of the mean of unit tokens",
        r"$\|\,\mathrm{mean}_i\;x_i\,\|$",
        "agree",
        "‖ mean<sub><i>i</i></sub> <i>x<sub>i</sub></i> ‖",
        "1 where all tokens point the same way; 1 / √tokens, the chance level, for independent "
        "random directions. The power method brings tokens together; a model may not.",
        "Definition",
    ),
}
"""The measures in the order they are shown, by their key in the document."""

PICTURES = tuple(POWER)
_ORDERINGS = {"modulus": r"by $|\,\lambda\,|$", "residual": r"by $|1+\lambda\,|$"}
_HTML = {"modulus": "by |λ|", "residual": "by |1 + λ|", "tokens": "all tokens"}


measure = panel


def document(found: Panel) -> dict[str, Any]:
    tokens = found.model.tokens
    measures = {
        key: dict(
            title=one.title,
            unit=one.unit,
            start=0 if key == "consensus" else 1,
            lines={"tokens": _consensus(found)}
            if key == "consensus"
            else {shift: _line(key, found, shift) for shift in SHIFTS},
        )
        for key, one in POWER.items()
    }
    prediction = found.prediction
    return dict(
        seed=found.seed,
        shared=found.model.shared,
        regime=None
        if prediction is None
        else dict(
            name=prediction.regime.value,
            rate=_number(prediction.rate),
            angle=_number(prediction.angle),
        ),
        deviation=0.5 / math.sqrt(tokens),
        eigenvalues={
            shift: [
                [float(value.real), float(value.imag)]
                for value in np.asarray(getattr(found.model.principal, shift).value)
            ]
            for shift in SHIFTS
        },
        measures=measures,
    )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _line(key: str, found: Panel, shift: str) -> dict[str, list[float | None]]:
    """A measure over layers in one ordering of the eigenvalues."""

    def of(study: Study, dynamics: str) -> np.ndarray:
        if key == "gap":
            return np.asarray(getattr(study.principal, shift).gap_ratio)
        measured = getattr(getattr(study, dynamics), shift)
        return np.asarray(measured.span if key == "span" else getattr(measured.alignment, key))

    own = getattr(found.model.real, shift)
    line = dict(model=of(found.model, "real"), untrained=of(found.untrained, "real"))
    if key != "gap":
        line["reduced"] = of(found.model, "reduced")
    if key == "gamma":
        line |= dict(chance=own.alignment.chance, other=own.other, signed=own.alignment.signed)
    if key == "rho":
        line |= dict(chance=np.full(len(line["model"]), 0.5), p_value=own.alignment.p_value)
    if key == "span":
        line |= dict(chance=own.span_chance)
    return {name: numbers(np.asarray(values, float)) for name, values in line.items()}


def _consensus(found: Panel) -> dict[str, list[float | None]]:
    states = [found.model.real, found.untrained.real, found.model.reduced]
    line = dict(zip(("model", "untrained", "reduced"), (one.consensus for one in states)))
    line["chance"] = np.full(len(states[0].consensus), found.model.tokens**-0.5)
    return {name: numbers(np.asarray(values, float)) for name, values in line.items()}


def figures(doc: Mapping[str, Any], theme: str) -> dict[str, Figure]:
    return {key: _draw(doc, key, theme) for key in POWER}


def _draw(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
    measure, series = doc[KEY]["measures"][key], []
    for hue, (name, line) in enumerate(measure["lines"].items()):
        part = {field: np.array(values, float) for field, values in line.items()}
        banded = key == "rho" and hue == 0
        series.append(
            plotting.Series(
                _ORDERINGS.get(name, "this model"),
                hue,
                part["model"],
                companion=part["untrained"],
                noise=part.get("chance") if key != "rho" or banded else None,
                spread=np.full(len(part["model"]), 2 * doc[KEY]["deviation"]) if banded else None,
                update=part.get("reduced"),
            )
        )
    drawn = np.concatenate([[one.line, one.companion] for one in series])
    drawn = drawn[np.isfinite(drawn)]
    log = key == "gap" and drawn.size and drawn.min() > 0 and drawn.max() > 10 * drawn.min()
    figure = Figure()
    axes = plotting.over_depth(
        figure.add_subplot(),
        measure["start"] + np.arange(len(series[0].line)),
        series,
        theme=theme,
        title=measure["title"],
        label=f"{POWER[key].label}  (log scale)" if log else POWER[key].label,
        scale="log" if log else "linear",
        companion="untrained",
        noise="chance",
        update="reduced",
        first=measure["start"],
    )
    plotting.flush_left(axes)
    return figure


def columns(doc: Mapping[str, Any]) -> list[Column]:
    measures = doc[KEY]["measures"]

    def column(key: str, shift: str, field: str = "model", under: str = "") -> Column:
        return POWER[key].short, under or _HTML[shift][3:].replace(" ", ""), measures[key]["lines"][
            shift
        ][field]  # fmt: skip

    first = [complex(*pair) for pair in doc[KEY]["eigenvalues"]["modulus"]]
    return [
        ("λ₁", "|λ|", [abs(value) for value in first]),
        ("λ₁", "arg λ", [float(np.angle(value)) for value in first]),
        column("gap", "modulus"),
        column("gap", "residual"),
        column("gamma", "modulus"),
        column("gamma", "modulus", "chance", "chance"),
        column("gamma", "modulus", "other", "others"),
        column("gamma", "residual"),
        column("gamma", "residual", "chance", "chance"),
        column("rho", "modulus"),
        column("rho", "residual"),
    ]


def notes(doc: Mapping[str, Any]) -> list[str]:
    power = doc[KEY]
    line = {key: power["measures"][key]["lines"] for key in ("gamma", "rho")}
    layers = doc["model"]["layers"]

    def count(field: str, shift: str) -> str:
        gamma = line["gamma"][shift]
        pairs = [
            (one, other)
            for one, other in zip(gamma["model"], gamma[field])
            if one is not None and other is not None
        ]
        above = sum(one > other for one, other in pairs)
        return f"{above}" if len(pairs) == layers else f"{above} of {len(pairs)}"

    found = [
        "λ₁ and v₁ are the first eigenvalue and eigenvector of F, each layer’s value and output "
        "matrices multiplied and added over heads, without norm gains and biases: by |λ| as in the "
        "paper, and by |1 + λ|, which is what a layer with a residual iterates. γ and ρ are of the "
        "model’s own states, with feed-forward layers and norms; the reduced system has attention "
        "(without rotations, biases and windows), residual and L2 normalisation only. The "
        f"untrained weights have seed {power['seed']}."
    ]
    for shift in SHIFTS:
        turned = sum(value is not None and value > 0.5 for value in line["rho"][shift]["model"])
        said = (
            f"First eigenvector {_HTML[shift]}: ρ above one half in {turned} of {layers} layers, "
            f"γ above chance in {count('chance', shift)}"
        )
        if not power["shared"]:
            said += f", above what the other layers’ give in {count('other', shift)}"
        found.append(f"{said}.")
    if power["regime"] is not None:
        name = power["regime"]["name"]
        says = {
            Regime.CONSENSUS: "consensus of all tokens on v₁, at a rate of {rate} per layer",
            Regime.ROTATION: "agreement in a plane, in which all tokens turn by {angle} rad per "
            "layer, at a rate of {rate}",
            Regime.BIPARTITE: "two groups of tokens at ±v can be stable",
            Regime.NONE: "agreement does not attract",
            Regime.UNDETERMINED: "the largest two are equal, the limit depends on the start",
        }[Regime(name)]
        values = {key: number(power["regime"][key]) for key in ("rate", "angle")}
        one = "All layers share one matrix. " if layers > 1 else ""
        found.append(
            f"{one}The theory of the reduced system then predicts: {says.format(**values)}."
        )
    return found


def cards(doc: Mapping[str, Any]) -> str:
    line = doc[KEY]["measures"]["gamma"]["lines"]["modulus"]
    others = line["other"][-1]
    beside = f", other layers’ {html_number(others)}" if others is not None else ""
    return (
        '<div><p class="what">Alignment γ with v₁, by |λ|</p><p class="value">'
        f"{html_number(line['model'][-1])}</p>"
        f'<p class="where">at the last layer; chance {html_number(line["chance"][-1])}{beside}</p>'
        "</div>"
    )


def section(doc: Mapping[str, Any], image: Callable[..., str]) -> str:
    pictures = "\n".join(image(key, POWER[key]) for key in POWER)
    return f"""<section>
<h2>{TITLE}</h2>
<p class="prose">Where all tokens agree, attention with a residual multiplies them by <i>I</i> +
<i>F</i>, and layer after layer that is a power method: tokens turn to the eigenvector of the
largest |1 + <i>λ</i>|. Whether a model with norms, feed-forward layers and a matrix per layer does
so is a question, asked here of every layer. Dashed, the same architecture untrained on the same
text; with hollow markers, the reduced system that the theory is about, from the same embeddings:
this model’s attention kernels without rotations, biases, windows and norms, a residual and L2
normalisation; dotted, chance.</p>
<div class="figures">
{pictures}
</div>
<h3>Principal directions by layer</h3>
<div class="scroll">{html_rows(columns(doc), depths(doc)[1:])}</div>
<details><summary>Every measure of this model and its companions</summary>
{_all(doc)}
</details>
</section>
"""


_FIELDS = {
    "model": "this model",
    "reduced": "reduced",
    "other": "other layers’",
    "p_value": "p",
}


def _all(doc: Mapping[str, Any]) -> str:
    layers = depths(doc)[1:]
    found = [
        (f"First eigenvalue — {_HTML[shift]}", "", dict(zip(("Re λ", "Im λ"), zip(*pairs))))
        for shift, pairs in doc[KEY]["eigenvalues"].items()
    ]
    shown = blocks(found, layers)
    for measure in doc[KEY]["measures"].values():
        found = [
            (f"{measure['title']} — {_HTML[name]}", measure["unit"], line)
            for name, line in measure["lines"].items()
        ]
        shown += blocks(found, depths(doc)[measure["start"] :], _FIELDS)
    return shown
