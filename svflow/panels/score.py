"""The layers as a score flow: what attention's posterior is, and how far from its mixture's."""

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
from svflow.score.metrics import Metrics
from svflow.score.panel import Panel, panel

KEY = "score"
TITLE = "The layers as a score flow"
ABSENT = "The metrics of the score flow"
OPTIONS = ()
EXTRA = None
LEAST = (2, 3)
SWITCH = "leave out the metrics of the score flow: their memory grows as heads x tokens^2"

_SOURCE = "The flow: Liao, arXiv 2604.23740; the metric, derived here"

SCORE = {
    "entropy": Measure(
        "Entropy of attention’s posterior",
        "share of the largest possible",
        r"entropy / $\log$ (keys in sight)",
        "entropy",
        "− Σ<sub><i>j</i></sub> <i>a<sub>ij</sub></i> log <i>a<sub>ij</sub></i> / log "
        "<i>n<sub>i</sub></i>",
        "1 where a head averages over all <i>n<sub>i</sub></i> tokens that it may see, 0 where it "
        "picks one.",
        _SOURCE,
    ),
    "consistency": Measure(
        "Consistency gap",
        "nats",
        r"KL( $a_i$ || $p_i$ )  (nats)",
        "gap",
        "KL( <i>a<sub>i</sub></i> ‖ <i>p<sub>i</sub></i> ), &ensp;<i>p<sub>ij</sub></i> ∝ "
        "<i>C<sub>d</sub></i>(<i>κ<sub>ij</sub></i>) exp <i>s<sub>ij</sub></i>",
        "How far the softmax is from the exact posterior of the von Mises–Fisher mixture with the "
        "same logits and a uniform prior. Zero where all keys have one length, the variational "
        "bound is then tight.",
        _SOURCE,
    ),
    "dispersion": Measure(
        "Dispersion of the scores",
        "squared norm",
        r"$\Sigma_j\,a_{ij}\,|\,\eta_j-\bar\eta_i\,|^2$",
        "spread",
        "Σ<sub><i>j</i></sub> <i>a<sub>ij</sub></i> |<i>η<sub>j</sub></i> − <i>η̄<sub>i</sub></i>|"
        "<sup>2</sup>",
        "How much the scores, what a head would write for each token that it reads, differ under "
        "its posterior: zero where it reads one token, or all say the same.",
        _SOURCE,
    ),
    "cosine_score": Measure(
        "Alignment with the free energy’s gradient",
        "cosine",
        r"cosine of $v$ and $\nabla\log\,\Sigma_j\,e^{s_{ij}}$",
        "cos",
        "cos( <i>P<sub>x</sub> v<sub>i</sub></i> , <i>P<sub>x</sub></i> ∇<i><sub>x</sub></i> log "
        "Σ<sub><i>j</i></sub> exp <i>s<sub>ij</sub></i> )",
        "1 where a head moves a token up its own free energy, as it would with values tied to the "
        "keys; −1 where down, 0 where unrelated.",
        _SOURCE,
    ),
    "radial_fraction": Measure(
        "Radial fraction of a head’s update",
        "cosine",
        r"$x\cdot v\;/\;(\sqrt{d}\,\|\,v\,\|)$",
        "radial",
        "⟨<i>x<sub>i</sub></i>, <i>v<sub>i</sub></i>⟩ / ( √<i>d</i> ‖<i>v<sub>i</sub></i>‖ )",
        "The part of a head’s update along the state, which only changes its length.",
        _SOURCE,
    ),
    "free_energy": Measure(
        "Free energy",
        "nats",
        r"$-\log\,\Sigma_j\,e^{s_{ij}}$  (nats)",
        "free E",
        "− log Σ<sub><i>j</i></sub> exp <i>s<sub>ij</sub></i>",
        "The depth of the well that a head’s keys dig at the token.",
        _SOURCE,
    ),
}
"""The metrics in the order they are shown, by their key in the document."""

PICTURES = tuple(SCORE)
_FIELD = {"cosine_score": "cosine", "radial_fraction": "head_radial"}


measure = panel


def document(found: Panel) -> dict[str, Any]:
    return dict(
        seed=found.seed,
        heads=found.model.entropy.shape[1],
        measures={
            key: dict(
                title=one.title,
                unit=one.unit,
                start=1,
                lines=dict(
                    **_quartiles(found.model, key),
                    untrained=_quartiles(found.untrained, key)["median"],
                ),
            )
            for key, one in SCORE.items()
        },
    )


def _quartiles(metrics: Metrics, key: str) -> dict[str, list[float | None]]:
    """Over heads and tokens, those left out where a metric does not exist."""
    values = np.asarray(getattr(metrics, _FIELD.get(key, key)), np.float64)
    rows = values.reshape(len(values), -1)
    found = []
    for row in rows:
        known = row[np.isfinite(row)]
        found.append(np.quantile(known, [0.25, 0.5, 0.75]) if known.size else np.full(3, np.nan))
    low, middle, high = np.transpose(found)
    parts = dict(median=middle, lower_quartile=low, upper_quartile=high)
    return {name: numbers(part) for name, part in parts.items()}


def figures(doc: Mapping[str, Any], theme: str) -> dict[str, Figure]:
    return {key: _draw(doc, key, theme) for key in SCORE}


def _draw(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
    line = doc[KEY]["measures"][key]["lines"]
    part = {field: np.array(values, float) for field, values in line.items()}
    shown = np.concatenate([part["median"], part["untrained"]])
    shown = shown[np.isfinite(shown)]
    log = shown.size and shown.min() > 0 and shown.max() > 30 * shown.min()
    chance = np.zeros(len(part["median"])) if key in _FIELD else None
    figure = Figure()
    axes = plotting.over_depth(
        figure.add_subplot(),
        1 + np.arange(len(part["median"])),
        [
            plotting.Series(
                "median of heads and tokens",
                2,
                part["median"],
                np.maximum(part["lower_quartile"], shown.min() / 10)
                if log
                else part["lower_quartile"],
                part["upper_quartile"],
                companion=part["untrained"],
                noise=chance,
            )
        ],
        theme=theme,
        title=SCORE[key].title,
        label=f"{SCORE[key].label}  (log scale)" if log else SCORE[key].label,
        scale="log" if log else "linear",
        companion="untrained",
        noise="chance",
        first=1,
    )
    plotting.flush_left(axes)
    return figure


def columns(doc: Mapping[str, Any]) -> list[Column]:
    measures = doc[KEY]["measures"]
    found: list[Column] = []
    for key, one in SCORE.items():
        line = measures[key]["lines"]
        found.append((one.short, "median", line["median"]))
        if key in ("entropy", "consistency", "cosine_score"):
            found.append((one.short, "untr.", line["untrained"]))
    return found


def notes(doc: Mapping[str, Any]) -> list[str]:
    gap = doc[KEY]["measures"]["consistency"]["lines"]
    largest = [max(filter(None, gap[name]), default=0.0) for name in ("median", "untrained")]
    return [
        "The score flow reads attention’s weights as a posterior over the tokens in sight and what "
        f"each head writes for them as scores; medians are over {doc[KEY]['heads']} heads and all "
        "tokens. That a layer is such a mean holds for every layer, trained or not. What can be "
        "false is that the softmax is the exact posterior of a mixture whose scores those are: the "
        f"consistency gap, whose median is at most {number(largest[0])} nats here and "
        f"{number(largest[1])} untrained (seed {doc[KEY]['seed']}), and the alignment of what is "
        "written with the gradient, which values tied to the keys would make 1."
    ]


def cards(doc: Mapping[str, Any]) -> str:
    line = doc[KEY]["measures"]["consistency"]["lines"]
    middle, other = (
        float(np.nanmedian(np.array(line[name], float)))
        if any(value is not None for value in line[name])
        else math.nan
        for name in ("median", "untrained")
    )
    shown, beside = (html_number(v if math.isfinite(v) else None) for v in (middle, other))
    return (
        '<div><p class="what">Consistency gap (nats)</p><p class="value">'
        f'{shown}</p><p class="where">median layer; untrained {beside}</p></div>'
    )


def section(doc: Mapping[str, Any], image: Callable[..., str]) -> str:
    pictures = "\n".join(image(key, SCORE[key]) for key in SCORE)
    return f"""<section>
<h2>{TITLE}</h2>
<p class="prose">A state that follows the mean of conditional scores under a posterior,
d<i>x</i>/d<i>t</i> = E<sub><i>q</i></sub>[∇ log <i>p</i>(<i>x</i>|<i>z</i>)], climbs a likelihood;
attention is such a mean, its weights <i>a<sub>ij</sub></i> the posterior. Lines are medians over
heads and tokens, bands run from the lower to the upper quartile; dashed, the same architecture
untrained on the same text.</p>
<div class="figures">
{pictures}
</div>
<h3>The score flow by layer</h3>
<div class="scroll">{html_rows(columns(doc), depths(doc)[1:])}</div>
<details><summary>Every measure: median, quartiles, untrained</summary>
{_all(doc)}
</details>
</section>
"""


def _all(doc: Mapping[str, Any]) -> str:
    measures = doc[KEY]["measures"].values()
    return blocks([(one["title"], one["unit"], one["lines"]) for one in measures], depths(doc)[1:])
