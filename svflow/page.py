"""A portrait's document, see `svflow.report`, as pictures and one HTML page."""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import base64
import html
import io
import math
import struct
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from svflow import plotting
from svflow.report import (
    KEEPS,
    MEASURES,
    RANK,
    SPECTRA,
    Measure,
    columns,
    label_of,
    notes,
    number,
    over_draws,
    ranged,
    shown,
    spectral_columns,
)
from svflow.spectra.panel import CONTROLS

SPECTRAL = ("eigenvalues", *SPECTRA, "rank")
"""The keys of the pictures of the spectra."""


def pictures(doc: Mapping[str, Any], theme: str) -> dict[str, bytes]:
    """One PNG per measure, by its key, and those of `SPECTRAL` where the document has spectra.

    `theme` is "light" or "dark".
    """
    found = {}
    with matplotlib.rc_context(plotting.style(theme)):
        for key in doc["measures"]:
            found[key] = _png(_draw_measure(doc, key, theme))
        if doc["spectra"] is not None:
            found["eigenvalues"] = _png(_draw_eigenvalues(doc, theme))
            for key in SPECTRA:
                found[key] = _png(_draw_spectral(doc, key, theme))
            found["rank"] = _png(_draw_rank(doc, theme))
    return found


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_measure(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
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


_LINES = {
    "layer": "this model",
    "eigenvalues": r"$|\,\lambda\,| > 1$",
    "singular values": r"$\sigma > 1$",
    "self": "self",
    "forward": "forward",
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


def page(doc: Mapping[str, Any], light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    """One HTML page that needs nothing else: the pictures are inside, in both themes."""
    model = doc["model"]
    name = html.escape(model["name"])
    tokens = len(doc["ids"])
    facts = {
        "Model": f"{name} <small>({html.escape(model['family'])})</small>",
        "Shape": f"{model['layers']} layers × {model['width']}",
        "Parameters": f"{model['parameters']:,}",
        "Text": f"{tokens} tokens",
        "Precision": html.escape(model["dtype"]),
        "Device": html.escape(doc["device"]),
    }
    versions = " · ".join(f"{lib} {v}" for lib, v in doc["versions"].items() if v is not None)
    figures = "\n".join(_figure(doc, key, light[key], dark[key]) for key in doc["measures"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Portrait of {name}</title>
<style>{_CSS}</style>
</head>
<body>
<header>
<p class="kicker">svflow portrait</p>
<h1>{name}</h1>
<p class="lead">A transformer moves the state of each token through its layers in discrete steps.
This page shows that motion for one text: how long the states are, how far each layer turns them,
and how close the steps come to a continuous flow.</p>
<dl class="facts">
{"".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())}
</dl>
</header>
<main>
<section>
<h2>The text</h2>
{_text(doc)}
</section>
<section>
<h2>At a glance</h2>
<div class="cards">{_cards(doc)}</div>
</section>
<section>
<h2>By depth</h2>
<p class="prose">Lines are medians over tokens{
        " (for the loss, the mean)" if doc["loss_absent"] is None else ""
    }, bands run from the lower to the upper quartile. The dashed line is the first token alone: in
many trained models it is a sink of attention with an outsized norm (Xiao et al., arXiv 2309.17453;
Sun et al., arXiv 2402.17762), which would dominate a mean over tokens. Depth 0 is the
embedding.</p>
<div class="figures">
{figures}
</div>
</section>
<section>
<h2>By layer</h2>
<div class="scroll">{_html_table(doc)}</div>
<details><summary>Every statistic: mean, quartiles, first token, number of tokens</summary>
{_all_statistics(doc)}
</details>
</section>
{_spectra(doc, light, dark)}<section class="prose">
<h2>How to read it</h2>
<ul>
{"".join(f"<li>{html.escape(note)}</li>" for note in notes(doc))}
<li>A state of {model["width"]} coordinates is <i>h</i> = <i>ρ x</i>, its direction <i>x</i> on the
sphere of radius √<i>d</i>. Adding an update <i>v</i> = <i>c x</i> + <i>P<sub>x</sub> v</i> moves
the direction to that of <i>x</i> + Δ<i>t P<sub>x</sub> v</i>. This holds for every residual block,
trained or not: it describes the motion and claims nothing about it.</li>
<li>Norms and parts are root mean squares per coordinate, so they compare across widths.</li>
<li>The text is read as it is: no begin-of-text token is added.</li>
<li>Matrix products run at the highest precision of the device; the measures are computed in
float32 at least. All numbers are in <code>portrait.json</code>, beside this page.</li>
</ul>
</section>
</main>
<footer>{html.escape(versions)}</footer>
</body>
</html>
"""


def _text(doc: Mapping[str, Any]) -> str:
    pieces = "".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
    if doc["text"] is None:
        pieces = " ".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
        return f'<p class="prose">Given as token ids.</p><div class="tokens">{pieces}</div>'
    return f'<div class="tokens">{pieces}</div>'


def _cards(doc: Mapping[str, Any]) -> str:
    cards = []
    for key in ("norm", "step", "path", "loss" if doc["loss_absent"] is None else "refined"):
        measure = doc["measures"][key]
        name, line = next(iter(measure["lines"].items()))
        values = line[shown(key)]
        part = f", {label_of(name)}" if key == "step" and len(measure["lines"]) > 1 else ""
        part += {"path": " (rad)", "loss": " (nats)"}.get(key, "")
        span = {0: "embedding", 1: "first layer"}[measure["start"]] + " to last layer"
        ends = f"{_html_number(values[0])}<span> → </span>{_html_number(values[-1])}"
        if key in ("path", "refined"):  # they start at zero
            ends = _html_number(values[-1])
            span = "at the last layer" if key == "refined" else span
        cards.append(
            f'<div><p class="what">{measure["title"]}{part}</p><p class="value">{ends}</p>'
            f'<p class="where">{shown(key)}, {span}</p></div>'
        )
    if doc["spectra"] is not None:
        lines = doc["spectra"]["rank"]["lines"]
        drawn = np.array([over_draws(lines[source]["gain"])[:, -1] for source in CONTROLS])
        span = f"random controls {_html_number(drawn.min())} to {_html_number(drawn.max())}"
        cards.append(
            '<div><p class="what">Rank gain, non-normality removed</p><p class="value">'
            f"<span>× </span>{_html_number(lines['model']['gain'][0][-1])}</p>"
            f'<p class="where">{span if np.isfinite(drawn).all() else "over all layers"}</p></div>'
        )
    return "".join(cards)


def _spectra(doc: Mapping[str, Any], light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    spectra = doc["spectra"]
    if spectra is None:
        return """<section>
<h2>Local linear dynamics</h2>
<p class="prose">The spectra of the layers’ Jacobians were left out; the same command without
<code>--no-spectra</code> adds them here.</p>
</section>
"""
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
        f"{_html_number(top / width)}."
    )
    draws = f"{spectra['draws']} draw{'s' * (spectra['draws'] > 1)}"
    figures = []
    for key in SPECTRA:
        measure = SPECTRA[key]
        if key == "alignment":
            measure = measure._replace(meaning=alignment)
        figures.append(_image(key, measure, light[key], dark[key]))
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
<h2>Local linear dynamics</h2>
<p class="prose">What a layer does to a small change of one token’s state: the Jacobian
{_LAYER_J} of layer <i>l</i> at token {place + 1}, {piece}, with the other tokens’ states before the
layer held. Much of what such spectra show, matrices of noise show too. So three companions stand
beside each measure: dotted, a Gaussian matrix of the same width and norm; with hollow markers, the
identity and Gaussian noise with the layer’s trace, |<i>R</i>| and |<i>J</i>|, where <i>R</i> =
<i>J</i> − <i>I</i> (<code>random_update</code>, mean over {draws}), the closer one for layers near
the identity; dashed, the same architecture untrained on the same text (one draw). Only what differs
from all of them can be a finding. The seed is {spectra["seed"]}.</p>
{_image("eigenvalues", eigenvalues, light["eigenvalues"], dark["eigenvalues"], wide=True)}
<div class="figures">
{"".join(figures)}
</div>
{_image("rank", rank, light["rank"], dark["rank"], wide=True)}
<h3>After the last layer</h3>
<div class="scroll">{_rank_table(doc)}</div>
<h3>Spectra by layer</h3>
<div class="scroll">{_html_rows(spectral_columns(doc), _layers(doc)[1:])}</div>
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
    spectra, blocks = doc["spectra"], []
    for measure in spectra["measures"].values():
        for name, line in measure["lines"].items():
            part = f" — {name}" if len(measure["lines"]) > 1 else ""
            blocks.append((measure["title"] + part, measure["unit"], line))
    rank = spectra["rank"]
    for source, line in rank["lines"].items():
        named = f"{KEEPS[source][0]} ({source})" if source in CONTROLS else KEEPS[source][0]
        values = {
            f"{field} {draw}" if len(line[field]) > 1 else field: one
            for field in ("before", "after", "gain")
            for draw, one in enumerate(line[field], 1)
        }
        blocks.append((f"{rank['title']} — {named}", rank["unit"], values))
    return "".join(
        f"<h3>{html.escape(title)} <small>{html.escape(unit)}</small></h3>"
        '<div class="scroll">'
        + _html_rows([(_FIELDS.get(f, f), "", v) for f, v in line.items()], _layers(doc)[1:])
        + "</div>"
        for title, unit, line in blocks
    )


def _layers(doc: Mapping[str, Any]) -> list[str]:
    return ["embed", *map(str, range(1, doc["model"]["layers"] + 1))]


def _figure(doc: Mapping[str, Any], key: str, light: bytes, dark: bytes) -> str:
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
    return _image(key, measure, light, dark)


def _image(key: str, measure: Measure, light: bytes, dark: bytes, *, wide: bool = False) -> str:
    title = html.escape(measure.title)
    width, height = struct.unpack(">II", light[16:24])  # of PNG's first chunk
    picture = f"""<picture>
<source srcset="{_data_uri(dark)}" media="(prefers-color-scheme: dark)">
<img src="{_data_uri(light)}" alt="{title} over depth" width="{width}" height="{height}">
</picture>"""
    if wide:
        picture = f'<div class="scroll wide">{picture}</div>'
    return f"""<figure id="{key}">
{picture}
<figcaption><p class="formula">{measure.formula}</p><p>{measure.meaning}</p>
<p class="source">{measure.source}.</p></figcaption>
</figure>"""


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _html_number(value: float | None) -> str:
    return number(value).replace("-", "−")


def _html_table(doc: Mapping[str, Any]) -> str:
    return _html_rows(columns(doc), _layers(doc))


def _html_rows(found, names: list[str]) -> str:
    groups: list[list[Any]] = []
    for measure, *_ in found:
        if groups and groups[-1][0] == measure:
            groups[-1][1] += 1
        else:
            groups.append([measure, 1])
    top = "".join(
        f'<th scope="colgroup" colspan="{span}"{" class=group" * (span > 1)}>'
        f"{html.escape(measure)}</th>"
        for measure, span in groups
    )
    under = "".join(f'<th scope="col">{html.escape(line)}</th>' for _, line, _ in found)
    rows = []
    for depth, name in enumerate(names):
        cells = "".join(f"<td>{_html_number(values[depth])}</td>" for *_, values in found)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f'<table><thead><tr><th rowspan="2" scope="col">layer</th>{top}</tr><tr>{under}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


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
                    f"<td>{v if isinstance(v, int) else _html_number(v)}</td>" for v in values
                )
                rows.append(f'<tr><th scope="row">{depth or "embed"}</th>{cells}</tr>')
            blocks.append(
                f"<h3>{html.escape(measure['title'] + part)} <small>"
                f"{html.escape(measure['unit'])}</small></h3>"
                '<div class="scroll"><table><thead><tr><th scope="col">layer</th>'
                f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
            )
    return "".join(blocks)


_CSS = """
:root { --paper: #ffffff; --ink: #22272e; --soft: #5b6470; --rule: #e7e9ec; --wash: #f6f7f8;
  --accent: #0072b2; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e3e6ea; --soft: #9aa3ae; --rule: #2a2f36; --wash: #1c2025;
    --accent: #56b4e9; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system,
     "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 64px; }
.kicker { margin: 0; color: var(--accent); font-size: 14px; letter-spacing: .04em; }
h1 { margin: 4px 0 12px; font-size: clamp(30px, 5vw, 46px); line-height: 1.12; font-weight: 650;
  letter-spacing: -.02em; overflow-wrap: anywhere; }
.lead { max-width: 700px; margin: 0; font-size: 18.5px; line-height: 1.55; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 16px 24px;
  margin: 36px 0 0; padding: 18px 0; border-top: 1px solid var(--rule);
  border-bottom: 1px solid var(--rule); }
dt { font-size: 13px; color: var(--soft); }
dd { margin: 0; font-size: 15px; overflow-wrap: anywhere; }
small { font-size: .85em; font-weight: 400; color: var(--soft); }
section { margin-top: 52px; }
h2 { margin: 0 0 14px; font-size: 23px; font-weight: 620; letter-spacing: -.01em; }
h3 { margin: 30px 0 8px; font-size: 16px; font-weight: 600; }
.prose, .prose ul { max-width: 740px; }
.prose ul { padding-left: 1.1em; margin: 0; }
.prose li { margin: 0 0 10px; }
p.prose { margin: 0 0 26px; color: var(--soft); }
.tokens { max-width: 860px; max-height: 262px; overflow: auto; padding: 18px 22px;
  border-radius: 8px; background: var(--wash); font: 17px/1.75 Georgia, "Times New Roman", serif;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens span { border-bottom: 1.5px solid transparent; }
.tokens span:nth-child(even) { border-color: var(--accent); }
.tokens span:nth-child(odd) { border-color: color-mix(in srgb, var(--soft) 45%, transparent); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(196px, 1fr)); gap: 14px; }
.cards > div { padding: 16px 18px; border: 1px solid var(--rule); border-radius: 8px; }
.cards p { margin: 0; }
.what { font-size: 14px; }
.value { font-size: 21px; line-height: 1.5; font-weight: 600; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.value span { color: var(--soft); font-weight: 400; }
.where { font-size: 13px; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 44px 40px; }
figure { margin: 0; min-width: 0; }
img { display: block; width: 100%; height: auto; }
figcaption { padding-top: 8px; font-size: 14.5px; line-height: 1.5; color: var(--soft); }
figcaption p { margin: 0 0 4px; }
section > figure { margin: 44px 0; }
.wide img { min-width: 760px; }
table .words { text-align: left; }
.formula { color: var(--ink); font: 16.5px/1.5 Georgia, "Times New Roman", serif; }
.source { font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 9px; text-align: right; white-space: nowrap; }
thead th { font-weight: 600; border-bottom: 1px solid var(--rule); }
thead tr + tr th { font-weight: 400; color: var(--soft); }
thead .group { text-align: center; padding-left: 26px; }
thead tr:has(+ tr) th:not([rowspan]) { border-bottom: 0; }
tbody th { font-weight: 400; color: var(--soft); }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
tbody tr:hover > * { background: var(--wash); }
details { margin-top: 22px; }
summary { cursor: pointer; color: var(--accent); }
code { font-size: .92em; }
footer { margin-top: 60px; padding-top: 18px; padding-bottom: 48px; font-size: 13px;
  color: var(--soft); }
"""
