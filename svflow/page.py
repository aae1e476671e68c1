"""A portrait's document, see `svflow.report`, as pictures and one HTML page."""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from svflow import plotting
from svflow.panels import PANELS
from svflow.panels.markup import image
from svflow.panels.measure import Measure
from svflow.report import notes, shown


def pictures(doc: Mapping[str, Any], theme: str) -> dict[str, bytes]:
    """One PNG per figure of the document's panels, by its key.

    `theme` is "light" or "dark".
    """
    with matplotlib.rc_context(plotting.style(theme)):
        return {
            key: _png(figure)
            for panel in shown(doc)
            for key, figure in panel.figures(doc, theme).items()
        }


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


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

    def figure(key: str, measure: Measure, *, wide: bool = False) -> str:
        return image(key, measure, light[key], dark[key], wide=wide)

    present = shown(doc)
    sections = "".join(panel.section(doc, figure) for panel in present)
    sections += "".join(_absent(panel) for panel in PANELS.values() if panel not in present)
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
<div class="cards">{"".join(panel.cards(doc) for panel in present)}</div>
</section>
{sections}<section class="prose">
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


def _absent(panel: ModuleType) -> str:
    extra = f" (it needs <code>svflow[{panel.EXTRA[0]}]</code>)" if panel.EXTRA else ""
    return f"""<section>
<h2>{panel.TITLE}</h2>
<p class="prose">{panel.ABSENT} were left out; the same command without
<code>--no-{panel.KEY}</code> adds them here{extra}.</p>
</section>
"""


def _text(doc: Mapping[str, Any]) -> str:
    pieces = "".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
    if doc["text"] is None:
        pieces = " ".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
        return f'<p class="prose">Given as token ids.</p><div class="tokens">{pieces}</div>'
    return f'<div class="tokens">{pieces}</div>'


_LAYER_J = "<i>J<sub>l</sub></i>"


_FIELDS = {
    "model": "this model",
    "gaussian": "Gaussian",
    "random_update": "identity + Gaussian",
    "deviation": "Gaussian sd",
}


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
