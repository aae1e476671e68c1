"""The local linear dynamics along a text: spectra of the layers' Jacobians beside baselines."""

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
from svflow.panels.markup import blocks, depths, html_number, html_rows
from svflow.panels.measure import Column, Measure, number, numbers, over_draws, ranged
from svflow.spectra import ginibre
from svflow.spectra.panel import CONTROLS, Panel, panel

KEY = "spectra"
TITLE = "Local linear dynamics"
ABSENT = "The spectra of the layers’ Jacobians"
OPTIONS = ("draws",)
EXTRA = None
LEAST = (2, 1)
SWITCH = (
    "leave out the spectra of the layers' Jacobians: their time grows as draws x layers x width^3, "
    "to minutes at a width of 768 and far more at some thousands"
)
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


measure = panel


def document(found: Panel) -> dict[str, Any]:
    """The document's `spectra`."""
    gaussian, excess = found.model.ginibre, found.model.excess
    measures: dict[str, dict[str, Any]] = {}
    for key, measure in SPECTRA.items():
        spectral = {
            line: dict(
                model=numbers(np.asarray(getattr(found.model, name))),
                untrained=numbers(np.asarray(getattr(found.untrained, name))),
                gaussian=numbers(np.where(np.isnan(excess[name]), np.nan, gaussian[name])),
                random_update=numbers(_mean(key, np.asarray(getattr(found.random_update, name)))),
            )
            for line, name in scalars(key).items()
        }
        measures[key] = dict(title=measure.title, unit=measure.unit, start=1, lines=spectral)
    layers, width = found.model.singular_values.shape
    deviation = ginibre.complex_fraction_deviation(width)
    measures["complex_fraction"]["lines"]["layer"].update(
        excess=numbers(excess["complex_fraction"]), deviation=[deviation] * layers
    )
    lines: dict[str, dict[str, Any]] = {
        source: dict(
            keeps=KEEPS[source][1],
            before=[numbers(one) for one in pairs[:, 0]],
            after=[numbers(one) for one in pairs[:, 1]],
            gain=[numbers(one) for one in pairs[:, 1] / pairs[:, 0]],
        )
        for source, pairs in found.effective_rank.items()
    }
    kind = found.model.singular_values.dtype
    return dict(
        token=found.token,
        scope="frozen",
        seed=found.seed,
        draws=len(found.effective_rank[CONTROLS[0]]),
        top=found.model.top,
        on_host=found.model.on_host,
        resolution=float(1 / np.finfo(kind).eps),
        measures=measures,
        eigenvalues=dict(
            model=_pairs(found.model.eigenvalues), untrained=_pairs(found.untrained.eigenvalues)
        ),
        rank=dict(title=RANK.title, unit=RANK.unit, start=1, lines=lines),
    )


def scalars(key: str) -> dict[str, str]:
    """By the line of a measure in `SPECTRA`, its field of `Measures`."""
    return _SCALARS.get(key, {"layer": key})


def _mean(key: str, drawn: np.ndarray) -> np.ndarray:
    """Over the draws; geometric where the expectation itself is infinite."""
    return np.exp(np.log(drawn).mean(0)) if key == "condition_number" else drawn.mean(0)


def _pairs(values) -> list[list[list[float]]]:
    """[re, im] of (layers, width) complex numbers, each in the shortest digits of its type."""
    parts = np.stack([values.real, values.imag], axis=-1)
    return [[[float(str(x)) for x in pair] for pair in layer] for layer in parts]


def columns(doc: Mapping[str, Any]) -> list[Column]:
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


def notes(doc: Mapping[str, Any]) -> list[str]:
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


PICTURES = ("eigenvalues", *SPECTRA, "rank")
"""The keys of the pictures of the spectra."""


_LINES = {
    "layer": "this model",
    "eigenvalues": r"$|\,\lambda\,| > 1$",
    "singular values": r"$\sigma > 1$",
    "self": "self",
    "forward": "forward",
}


def figures(doc: Mapping[str, Any], theme: str) -> dict[str, Figure]:
    return {
        "eigenvalues": _draw_eigenvalues(doc, theme),
        **{key: _draw_spectral(doc, key, theme) for key in SPECTRA},
        "rank": _draw_rank(doc, theme),
    }


def _draw_spectral(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
    spectra = doc["spectra"]
    measure = spectra["measures"][key]
    series = []
    for hue, (name, line) in enumerate(measure["lines"].items()):
        part = {field: np.array(values, float) for field, values in line.items()}
        series.append(
            plotting.Series(
                _LINES[name],
                hue,
                part["model"],
                companion=part["untrained"],
                noise=part["gaussian"],
                spread=2 * part["deviation"] if "deviation" in part else None,
                update=part["random_update"],
            )
        )
    drawn = np.concatenate([[one.line, one.companion, one.noise, one.update] for one in series])
    drawn = drawn[np.isfinite(drawn)]
    spread = drawn.max() / drawn.min() if drawn.size and drawn.min() > 0 else 1.0
    log = key == "condition_number" or (key == "spectral_radius" and spread > 4)
    over = key == "condition_number" and drawn.size and drawn.max() > spectra["resolution"]
    figure = Figure()
    axes = plotting.over_depth(
        figure.add_subplot(),
        measure["start"] + np.arange(len(series[0].line)),
        series,
        theme=theme,
        title=measure["title"],
        label=f"{SPECTRA[key].label}  (log scale)" if log else SPECTRA[key].label,
        scale="log" if log else "linear",
        level=("1 / eps", spectra["resolution"]) if over else None,
        companion="untrained",
        first=1,
    )
    plotting.flush_left(axes)
    return figure


def _draw_eigenvalues(doc: Mapping[str, Any], theme: str) -> Figure:
    values = _eigenvalues(doc, "model")
    behind = _eigenvalues(doc, "untrained")
    figure = Figure()
    plotting.spectra(
        figure,
        [plotting.Spectrum(*one) for one in zip(values, behind, *zip(*_frames(values)))],
        theme=theme,
        title="Eigenvalues of the layers’ Jacobians",
        behind="untrained",
    )
    return figure


def _eigenvalues(doc: Mapping[str, Any], source: str) -> np.ndarray:
    pairs = np.array(doc["spectra"]["eigenvalues"][source], float)
    return pairs[..., 0] + 1j * pairs[..., 1]


def _frames(values: np.ndarray) -> list[tuple[tuple[float, float, float], bool]]:
    """Each layer's frame, and whether it is the common one.

    Layers whose extent is within a factor of 4 of the median layer's share one. A frame holds the
    central 98 % of its layers' real and imaginary parts, and what else lies within half as much
    again around them.
    """
    low, high, up = np.transpose([_central(one) for one in values])
    extent = np.maximum(high - low, 2 * up)
    middle = np.median(extent)
    shared = (extent <= 4 * middle) & (extent >= middle / 4)
    frames = []
    for layer in range(len(values)):
        among = values[shared] if shared[layer] else values[layer]
        least, most, top = _central(among)
        size = max(most - least, 2 * top) / 4
        near = among[
            (among.real >= least - size)
            & (among.real <= most + size)
            & (np.abs(among.imag) <= top + size)
        ]
        least, most, top = near.real.min(), near.real.max(), np.abs(near.imag).max()
        size = max(most - least, 2 * top) or 1.0
        least, most, top = least - size / 8, most + size / 8, top + size / 8
        # Neither flat nor tall: a picture is at most square and at least half as high as wide.
        top = max(top, (most - least) / 4)
        wider = max(0.0, 2 * top - (most - least)) / 2
        frames.append(
            ((float(least - wider), float(most + wider), float(top)), bool(shared[layer]))
        )
    return frames


def _central(values: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(values.real, [0.01, 0.99])
    return low, high, np.quantile(np.abs(values.imag), 0.98)


def _draw_rank(doc: Mapping[str, Any], theme: str) -> Figure:
    lines = doc["spectra"]["rank"]["lines"]
    parts = [
        plotting.Pair(
            KEEPS[source][0],
            source if source in CONTROLS else "",
            line["keeps"],
            over_draws(line["before"]),
            over_draws(line["after"]),
        )
        for source, line in lines.items()
    ]
    figure = Figure()
    drawn = np.array([[one.before, one.after] for one in parts])
    least = np.nanmin(drawn) if np.isfinite(drawn).any() else 1.0
    width = doc["model"]["width"]
    plotting.pairs(
        figure,
        parts,
        theme=theme,
        title=RANK.title,
        label=f"{RANK.label}  (log scale)",
        before="as it is",
        after="non-normality removed",
        limits=(least / 1.15, 1.1 * width),
    )
    return figure


def section(doc: Mapping[str, Any], image: Callable[..., str]) -> str:
    spectra = doc[KEY]
    width, place = doc["model"]["width"], spectra["token"]
    frames = _frames(_eigenvalues(doc, "model"))
    own = [str(layer) for layer, (_, shared) in enumerate(frames, 1) if not shared]
    scale = (
        f"All but layer{'s' * (len(own) > 1)} {', '.join(own)} have one scale."
        if own
        else "All layers have one scale."
    )
    values = _eigenvalues(doc, "model")
    beyond = any(
        (one.real < low).any() or (one.real > high).any() or (np.abs(one.imag) > up).any()
        for one, ((low, high, up), _) in zip(values, frames)
    )
    triangles = (
        " A triangle on an edge stands for eigenvalues of this model beyond it, +<i>n</i> for how "
        "many there are."
        if beyond
        else ""
    )
    eigenvalues = Measure(
        "Eigenvalues of the layers’ Jacobians", "", "", "",
        f"det( {_LAYER_J} − <i>λ I</i> ) = 0, &ensp;{_LAYER_J} = ∂<i>h<sub>l</sub></i> / "
        "∂<i>h<sub>l</sub></i><sub>−1</sub>",
        f"{width} eigenvalues a layer in the complex plane, with the unit circle and the real "
        "axis; a layer that did nothing would have all of them at 1. Behind them in grey, the same "
        f"architecture untrained, as far as it lies within. {scale}{triangles}",
        "Definition; Fernando and Guitchounts, arXiv 2605.14258",
    )  # fmt: skip
    top = spectra["top"]
    chance = f"<i>k</i> = {top}: the largest {top} of {width} directions, by chance "
    alignment = (
        "Whether the directions that a layer makes largest are those it stretches most itself "
        "(self) or those the next layer stretches most (forward). "
        f"{chance if top > 1 else f'<i>k</i> = 1 of {width} directions, by chance '}"
        f"{html_number(top / width)}."
    )
    draws = f"{spectra['draws']} draw{'s' * (spectra['draws'] > 1)}"
    figures = []
    for key in SPECTRA:
        measure = SPECTRA[key]
        if key == "alignment":
            measure = measure._replace(meaning=alignment)
        figures.append(image(key, measure))
    rank = RANK._replace(
        meaning=f"{RANK.meaning} <b>The removal changes random factors as well</b>, so its effect "
        "alone says nothing about training: only a difference from every control can. Each control "
        f"draws every factor anew, {draws}, and keeps what stands above it; lines are medians and "
        "bands hold all draws. <i>U</i>, <i>V</i> and <i>Q</i> are random orthogonal matrices "
        "(Haar), <i>G</i> is Gaussian less its trace, <i>λ</i> and <i>σ</i> are eigenvalues and "
        "singular values, <i>R</i> = <i>J</i> − <i>I</i> is the update. "
        "<code>haar_similarity</code> without its departure has the law of <code>haar_basis</code>,"
        " which is therefore not shown. Grey lines, in all pictures but the first, repeat this "
        "model."
    )
    piece = html.escape(doc["pieces"][place])
    piece = f"“{piece}”" if doc["text"] is not None else f"id {piece}"
    return f"""<section>
<h2>{TITLE}</h2>
<p class="prose">What a layer does to a small change of one token’s state: the Jacobian
{_LAYER_J} of layer <i>l</i> at token {place + 1}, {piece}, with the other tokens’ states before the
layer held. Much of what such spectra show, matrices of noise show too. So three companions stand
beside each measure: dotted, a Gaussian matrix of the same width and norm; with hollow markers, the
identity and Gaussian noise with the layer’s trace, |<i>R</i>| and |<i>J</i>|, where <i>R</i> =
<i>J</i> − <i>I</i> (<code>random_update</code>, mean over {draws}), the closer one for layers near
the identity; dashed, the same architecture untrained on the same text (one draw). Only what differs
from all of them can be a finding. The seed is {spectra["seed"]}.</p>
{image("eigenvalues", eigenvalues, wide=True)}
<div class="figures">
{"".join(figures)}
</div>
{image("rank", rank, wide=True)}
<h3>After the last layer</h3>
<div class="scroll">{_rank_table(doc)}</div>
<h3>Spectra by layer</h3>
<div class="scroll">{html_rows(columns(doc), depths(doc)[1:])}</div>
<details><summary>Every measure of this model and its companions</summary>
{_all_spectra(doc)}
</details>
</section>
"""


_LAYER_J = "<i>J<sub>l</sub></i>"


def _rank_table(doc: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row" class="words">{html.escape(KEEPS[source][0])}'
        f"{f'<br><code>{source}</code>' if source in CONTROLS else ''}</th>"
        f'<td class="words">{html.escape(line["keeps"])}</td>'
        + "".join(
            f"<td>{ranged(*over_draws(line[k])[:, -1])}</td>" for k in ("before", "after", "gain")
        )
        + "</tr>"
        for source, line in doc["spectra"]["rank"]["lines"].items()
    )
    return (
        '<table><thead><tr><th scope="col" class="words">factors</th>'
        '<th scope="col" class="words">what is kept</th><th scope="col">rank as it is</th>'
        '<th scope="col">non-normality removed</th><th scope="col">gain</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


_FIELDS = {
    "model": "this model",
    "gaussian": "Gaussian",
    "random_update": "identity + Gaussian",
    "deviation": "Gaussian sd",
}


def _all_spectra(doc: Mapping[str, Any]) -> str:
    spectra, found = doc["spectra"], []
    for measure in spectra["measures"].values():
        for name, line in measure["lines"].items():
            part = f" — {name}" if len(measure["lines"]) > 1 else ""
            found.append((measure["title"] + part, measure["unit"], line))
    rank = spectra["rank"]
    for source, line in rank["lines"].items():
        named = f"{KEEPS[source][0]} ({source})" if source in CONTROLS else KEEPS[source][0]
        values = {
            f"{field} {draw}" if len(line[field]) > 1 else field: one
            for field in ("before", "after", "gain")
            for draw, one in enumerate(line[field], 1)
        }
        found.append((f"{rank['title']} — {named}", rank["unit"], values))
    return blocks(found, depths(doc)[1:], _FIELDS)


def cards(doc: Mapping[str, Any]) -> str:
    lines = doc[KEY]["rank"]["lines"]
    drawn = np.array([over_draws(lines[source]["gain"])[:, -1] for source in CONTROLS])
    span = f"random controls {html_number(drawn.min())} to {html_number(drawn.max())}"
    return (
        '<div><p class="what">Rank gain, non-normality removed</p><p class="value">'
        f"<span>× </span>{html_number(lines['model']['gain'][0][-1])}</p>"
        f'<p class="where">{span if np.isfinite(drawn).all() else "over all layers"}</p></div>'
    )
