"""The residual stream's coordinates as a graph, and which of its communities the layers amplify."""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from svflow import plotting
from svflow.panels.markup import blocks, depths, html_number, html_rows
from svflow.panels.measure import Column, Measure, numbers
from svflow.topology.analysis import Topology
from svflow.topology.coupling import GAINS
from svflow.topology.panel import Panel, panel
from svflow.topology.topology_plot import topology_picture

KEY = "topology"
TITLE = "The residual stream as a graph"
ABSENT = "The communities of the residual stream’s coordinates"
OPTIONS = ()
EXTRA = ("topology", ("leidenalg", "igraph"))
LEAST = (3, 11)
SWITCH = "leave out the communities of the residual stream's coordinates"

MOST = 128
"""Coordinates of a correlation matrix in the document."""

_SOURCE = "Fernando and Guitchounts, arXiv 2605.14258; controls derived here"

TOPOLOGY = {
    "modularity": Measure(
        "Signed modularity of the communities",
        "dimensionless, at most 1",
        r"signed modularity $Q$",
        "modul.",
        "<i>Q</i> = Σ<sub><i>ij</i></sub> ( <i>w<sub>ij</sub></i> − expected ) [ "
        "<i>c<sub>i</sub></i> = <i>c<sub>j</sub></i> ] / 2<i>w</i>",
        "How much the strongest correlations fall into communities, positive ones inside and "
        "negative ones between. The algorithm finds communities in noise as well: dotted, the same "
        "states with every coordinate’s values permuted over the tokens; with hollow markers, this "
        "graph rewired, degrees and signs kept.",
        f"{_SOURCE}. Signed modularity: Gómez, Jensen and Arenas, 2009; Leiden: Traag, Waltman and "
        "van Eck, 2019",
    ),
    "stability": Measure(
        "Agreement of the algorithm’s runs",
        "adjusted Rand index",
        "mean adjusted Rand index",
        "stable",
        "mean over pairs of runs of the adjusted Rand index",
        "1 where every run finds the same communities, 0 where they agree as random ones do. Where "
        "it is low there is no one partition to speak of.",
        "Hubert and Arabie, Comparing partitions, 1985",
    ),
    "participation": Measure(
        "Mean participation",
        "from 0 to 1",
        "mean participation",
        "partic.",
        "<i>P<sub>i</sub></i> = 1 − Σ<sub><i>c</i></sub> ( <i>k<sub>ic</sub></i> / "
        "<i>k<sub>i</sub></i> )<sup>2</sup>",
        "How evenly a coordinate’s positive weight is spread over communities: 0 where all is in "
        "one.",
        f"{_SOURCE}. Guimerà and Amaral, 2005",
    ),
}
"""The measures of the graphs in the order they are shown, by their key in the document."""

PICTURES = ("communities", *TOPOLOGY)

_LINES = {
    ("raw", "columns"): "J",
    ("partial", "columns"): "J, partial",
    ("raw", "update_columns"): "R",
    ("partial", "update_columns"): "R, partial",
}
"""What of the coupling is drawn: test and gain."""


measure = panel


def document(found: Panel) -> dict[str, Any]:
    model, untrained, options = found.model, found.untrained, found.options
    shown = []
    for layer, matrix in zip(found.shown, found.matrices):
        labels = model.labels[layer]
        order = np.argsort(np.where(labels < 0, labels.max(initial=0) + 1, labels), kind="stable")
        some = order[np.linspace(0, len(order) - 1, min(MOST, len(order))).round().astype(int)]
        shown.append(
            dict(
                layer=layer + 1,
                coordinates=some.tolist(),
                labels=labels[some].tolist(),
                correlations=[
                    [round(r, 3) for r in row] for row in matrix[np.ix_(some, some)].tolist()
                ],
                sizes=model.coupling.sizes[layer].tolist(),
                gain=numbers(model.coupling.gain[layer][0]),
                participation=numbers(model.coupling.participation[layer][0]),
            )
        )
    lines: dict[str, dict[str, np.ndarray]] = dict(
        modularity=dict(
            model=_each(model, "modularity"),
            untrained=_each(untrained, "modularity"),
            noise=found.noise,
            rewired=model.null_modularity["rewired"],
            shuffled_weights=model.null_modularity["shuffled_weights"],
        ),
        stability=dict(model=_each(model, "stability"), untrained=_each(untrained, "stability")),
        participation=dict(
            model=model.mean_participation.positive,
            untrained=untrained.mean_participation.positive,
        ),
    )
    return dict(
        token=found.token,
        states=found.states,
        k=options.k,
        seed=options.seed,
        resolution=options.resolution,
        runs=options.runs,
        permutations=options.permutations,
        correction=options.correction,
        alpha=options.alpha,
        number=dict(
            model=[one.number for one in model.communities],
            untrained=[one.number for one in untrained.communities],
        ),
        shown=shown,
        measures={
            key: dict(
                title=one.title,
                unit=one.unit,
                start=1,
                lines={name: numbers(np.asarray(v, float)) for name, v in lines[key].items()},
            )
            for key, one in TOPOLOGY.items()
        },
        coupling={
            kind: {gain: _coupling(model, untrained, kind, gain) for gain in GAINS}
            for kind in ("raw", "partial")
        },
    )


def _each(topology: Topology, field: str) -> np.ndarray:
    return np.array([getattr(one, field) for one in topology.communities])


def _coupling(model: Topology, untrained: Topology, kind: str, gain: str) -> dict[str, list]:
    """Of positive participation."""
    place = GAINS.index(gain)
    own, other = (getattr(one.coupling, kind) for one in (model, untrained))
    return dict(
        rho=numbers(own.rho[0, place]),
        chance=numbers(own.chance[0, place]),
        p_value=numbers(own.p_value[0, place]),
        least=numbers(own.least[0, place]),
        adjusted=numbers(own.adjusted[0, place]),
        verdict=[str(one) for one in own.verdict[0, place]],
        untrained_rho=numbers(other.rho[0, place]),
        untrained_verdict=[str(one) for one in other.verdict[0, place]],
    )


def figures(doc: Mapping[str, Any], theme: str) -> dict[str, Figure]:
    return {
        "communities": _draw_communities(doc, theme),
        **{key: _draw(doc, key, theme) for key in TOPOLOGY},
    }


def _draw_communities(doc: Mapping[str, Any], theme: str) -> Figure:
    topology, figure = doc[KEY], Figure()
    shown = topology["shown"]
    lines = [topology["coupling"][kind][gain] for kind, gain in _LINES]
    topology_picture(
        figure,
        np.array([one["correlations"] for one in shown]),
        np.array([one["labels"] for one in shown]),
        [one["layer"] - 1 for one in shown],
        participation=[np.array(one["participation"], float) for one in shown],
        gain=[np.array(one["gain"], float) for one in shown],
        sizes=[np.array(one["sizes"]) for one in shown],
        rho=np.array([line["rho"] for line in lines], float),
        verdicts=np.array([line["verdict"] for line in lines]),
        names=list(_LINES.values()),
        untrained=np.array(lines[0]["untrained_rho"], float),
        theme=theme,
        title="Communities of the residual stream, and what the layers do to them",
        label="community gain",
    )
    return figure


def _draw(doc: Mapping[str, Any], key: str, theme: str) -> Figure:
    measure = doc[KEY]["measures"][key]
    part = {name: np.array(values, float) for name, values in measure["lines"].items()}
    figure = Figure()
    axes = plotting.over_depth(
        figure.add_subplot(),
        1 + np.arange(len(part["model"])),
        [
            plotting.Series(
                "this model",
                0,
                part["model"],
                companion=part["untrained"],
                noise=part.get("noise"),
                update=part.get("rewired"),
            )
        ],
        theme=theme,
        title=measure["title"],
        label=TOPOLOGY[key].label,
        companion="untrained",
        noise="permuted states",
        update="rewired",
        first=1,
    )
    plotting.flush_left(axes)
    return figure


def columns(doc: Mapping[str, Any]) -> list[Column]:
    topology = doc[KEY]
    measures, coupling = topology["measures"], topology["coupling"]
    found: list[Column] = [
        ("commun.", "number", topology["number"]["model"]),
        ("modul.", "model", measures["modularity"]["lines"]["model"]),
        ("modul.", "noise", measures["modularity"]["lines"]["noise"]),
        ("stable", "", measures["stability"]["lines"]["model"]),
    ]
    for (kind, gain), name in _LINES.items():
        if gain == "columns" or kind == "raw":
            short = name.replace(", partial", " part")
            found.append((f"ρ {short}", "", coupling[kind][gain]["rho"]))
            found.append((f"ρ {short}", "p", coupling[kind][gain]["adjusted"]))
    return found


def notes(doc: Mapping[str, Any]) -> list[str]:
    topology, layers = doc[KEY], doc["model"]["layers"]
    said = []
    for (kind, gain), name in _LINES.items():
        line = topology["coupling"][kind][gain]
        counts = [
            sum(verdict == sign for verdict in line[field])
            for field in ("verdict", "untrained_verdict")
            for sign in ("positive", "negative")
        ]
        said.append(
            f"{name} {counts[0]} positive and {counts[1]} negative (untrained {counts[2]} and "
            f"{counts[3]})"
        )
    least = topology["coupling"]["raw"]["columns"]["least"]
    few = sum(value is not None and value > topology["alpha"] for value in least)
    return [
        f"The graph of a layer has the {doc['model']['width']} coordinates of the states before it "
        f"as nodes and, per node, its {topology['k']} strongest correlations over "
        f"{topology['states']} tokens (the first left out) as edges. One text has few tokens: such "
        "correlations are noisy, and only what exceeds the permuted states can be a finding.",
        "Coupling: Spearman’s ρ over communities between the gain of the Jacobian at token "
        f"{topology['token'] + 1} and the mean participation, tested against "
        f"{topology['permutations']} permutations, {topology['correction']} over layers at "
        f"{topology['alpha']:g}; partial: without what norm weights and variances explain. "
        f"Verdicts in {layers} layers: {'; '.join(said)}. In {few} there are too few communities "
        "for any.",
    ]


def cards(doc: Mapping[str, Any]) -> str:
    lines = doc[KEY]["measures"]["modularity"]["lines"]
    own, noise = (np.nanmedian(np.array(lines[name], float)) for name in ("model", "noise"))
    return (
        '<div><p class="what">Modularity of the coordinates</p><p class="value">'
        f'{html_number(float(own))}</p><p class="where">median layer; permuted states '
        f"{html_number(noise)}</p></div>"
    )


def section(doc: Mapping[str, Any], image: Callable[..., str]) -> str:
    topology, width = doc[KEY], doc["model"]["width"]
    less = f", {MOST} of the {width}, evenly spaced" if width > MOST else ""
    communities = Measure(
        "Communities, participation and coupling", "", "", "",
        "<i>g<sub>c</sub></i> = ‖<i>J P<sub>c</sub></i>‖ / √|<i>c</i>|, &ensp;<i>R</i> = "
        "<i>J</i> − <i>I</i>",
        f"Above, correlations of the coordinates ordered by community{less}. In the middle, every "
        "community’s gain, the root mean square of what the layer makes of a unit change of its "
        "coordinates, against the mean participation. Below, Spearman’s <i>ρ</i> of the two by "
        "layer, filled where there is a verdict; partial: without what norm weights and variances "
        "explain.",
        _SOURCE,
    )  # fmt: skip
    pictures = "\n".join(image(key, TOPOLOGY[key]) for key in TOPOLOGY)
    return f"""<section>
<h2>{TITLE}</h2>
<p class="prose">Coordinates of the residual stream that rise and fall together over tokens form
communities. Do layers amplify those that reach into others? The nodes are the {width} coordinates,
the edges the {topology["k"]} strongest correlations of each over {topology["states"]} tokens. One
text is few: the communities of noise stand beside them, and a study over many texts is
<code>svflow.topology.study</code>.</p>
{image("communities", communities, wide=True)}
<div class="figures">
{pictures}
</div>
<h3>The graph by layer</h3>
<div class="scroll">{html_rows(columns(doc), depths(doc)[1:])}</div>
<details><summary>Every measure, and every test of the coupling</summary>
{_all(doc)}
</details>
</section>
"""


def _all(doc: Mapping[str, Any]) -> str:
    topology = doc[KEY]
    found = [
        (measure["title"], measure["unit"], measure["lines"])
        for measure in topology["measures"].values()
    ]
    for kind, gains in topology["coupling"].items():
        for gain, line in gains.items():
            values = {name: v for name, v in line.items() if not name.endswith("verdict")}
            found.append((f"Coupling, {gain.replace('_', ' ')} — {kind}", "Spearman’s ρ", values))
    return blocks(found, depths(doc)[1:])
