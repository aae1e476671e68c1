"""Portraits' documents, see `svflow.report`, as pictures and one HTML page."""

# The page is typeset: its dashes, minus signs, primes and Greek letters are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from svflow import plotting
from svflow.panels import PANELS, depth
from svflow.panels.markup import image
from svflow.panels.measure import Measure
from svflow.report import notes, shown

Doc = Mapping[str, Any]


def pictures(docs: Sequence[Doc], theme: str) -> list[dict[str, bytes]]:
    """For every document one PNG per figure of its panels, by its key.

    Figures of the same key have the same limits, so that they compare at sight. `theme` is "light"
    or "dark".
    """
    with matplotlib.rc_context(plotting.style(theme)):
        drawn = [
            {key: one for panel in shown(doc) for key, one in panel.figures(doc, theme).items()}
            for doc in docs
        ]
        for key in set.intersection(*map(set, drawn)) if len(drawn) > 1 else ():
            plotting.share_limits([figures[key] for figures in drawn])
        return [{key: _png(figure) for key, figure in figures.items()} for figures in drawn]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def page(
    docs: Sequence[Doc], light: Sequence[Mapping[str, bytes]], dark: Sequence[Mapping[str, bytes]]
) -> str:
    """One HTML page that needs nothing else: the pictures are inside, in both themes.

    Of two documents every part of one stands beside the other's.
    """
    names = [html.escape(doc["model"]["name"]) for doc in docs]
    title = " and ".join(names)
    present = [panel for panel in (depth, *PANELS.values()) if any(panel in shown(d) for d in docs)]
    parts = "".join(
        _beside(names, [_part(panel, place, docs, light, dark) for place in range(len(docs))])
        for panel in present
    )
    parts += "".join(_absent(panel) for panel in PANELS.values() if panel not in present)
    texts = [f"<section>\n<h2>The text</h2>\n{_text(doc)}\n</section>\n" for doc in docs]
    alike = len({text for text in texts}) == 1
    cards = [
        '<section>\n<h2>At a glance</h2>\n<div class="cards">'
        + "".join(panel.cards(doc) for panel in shown(doc))
        + "</div>\n</section>\n"
        for doc in docs
    ]
    said = list(dict.fromkeys(note for doc in docs for note in notes(doc)))
    versions = " · ".join(f"{lib} {v}" for lib, v in docs[0]["versions"].items() if v is not None)
    widths = list(dict.fromkeys(f"{doc['model']['width']}" for doc in docs))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Portrait of {title}</title>
<style>{_CSS}</style>
</head>
<body{' class="two"' * (len(docs) > 1)}>
<header>
<p class="kicker">svflow portrait</p>
<h1>{title}</h1>
<p class="lead">A transformer moves the state of each token through its layers in discrete steps.
This page shows that motion for one text: how long the states are, how far each layer turns them,
and how close the steps come to a continuous flow.{_LEAD * (len(docs) > 1)}</p>
{_beside(names, [_facts(doc) for doc in docs])}</header>
<main>
{texts[0] if alike else _beside(names, texts)}{_beside(names, cards)}{parts}<section class="prose">
<h2>How to read it</h2>
<ul>
{"".join(f"<li>{html.escape(note)}</li>" for note in said)}
<li>A state of {" or ".join(widths)} coordinates is <i>h</i> = <i>ρ x</i>, its direction <i>x</i>
on the sphere of radius √<i>d</i>. Adding an update <i>v</i> = <i>c x</i> + <i>P<sub>x</sub> v</i>
moves the direction to that of <i>x</i> + Δ<i>t P<sub>x</sub> v</i>. This holds for every residual
block, trained or not: it describes the motion and claims nothing about it.</li>
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


_LEAD = """ Two models stand side by side; pictures of the same
measure have the same axes."""


def _facts(doc: Doc) -> str:
    model = doc["model"]
    facts = {
        "Model": f"{html.escape(model['name'])} <small>({html.escape(model['family'])})</small>",
        "Shape": f"{model['layers']} layers × {model['width']}",
        "Parameters": f"{model['parameters']:,}",
        "Text": f"{len(doc['ids'])} tokens",
        "Precision": html.escape(model["dtype"]),
        "Device": html.escape(doc["device"]),
    }
    rows = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    return f'<dl class="facts">\n{rows}\n</dl>\n'


def _beside(names: Sequence[str], parts: Sequence[str]) -> str:
    """Parts of one model as they are, of two in columns under their names."""
    if len(parts) == 1:
        return parts[0]
    columns = "".join(
        f'<div><p class="kicker">{name}</p>{part}</div>' for name, part in zip(names, parts)
    )
    return f'<div class="beside">{columns}</div>\n'


def _part(
    panel: ModuleType,
    place: int,
    docs: Sequence[Doc],
    light: Sequence[Mapping[str, bytes]],
    dark: Sequence[Mapping[str, bytes]],
) -> str:
    """A panel's section of one of the documents."""
    if panel not in shown(docs[place]):
        return _absent(panel)

    def figure(key: str, measure: Measure, *, wide: bool = False) -> str:
        name = key if place == 0 else f"{key}-{place + 1}"
        return image(name, measure, light[place][key], dark[place][key], wide=wide)

    return panel.section(docs[place], figure)


def _absent(panel: ModuleType) -> str:
    extra = f" (it needs <code>svflow[{panel.EXTRA[0]}]</code>)" if panel.EXTRA else ""
    return f"""<section>
<h2>{panel.TITLE}</h2>
<p class="prose">{panel.ABSENT} were left out; the same command without
<code>--no-{panel.KEY}</code> adds them here{extra}.</p>
</section>
"""


def _text(doc: Doc) -> str:
    pieces = "".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
    if doc["text"] is None:
        pieces = " ".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"])
        return f'<p class="prose">Given as token ids.</p><div class="tokens">{pieces}</div>'
    return f'<div class="tokens">{pieces}</div>'


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
.two header, .two main, .two footer { max-width: 1720px; }
.beside { display: grid; gap: 0 56px; grid-template-columns: repeat(auto-fit,
  minmax(min(100%, 500px), 1fr)); }
.beside > div { min-width: 0; }
.beside > div > .kicker { margin-top: 40px; font-weight: 600; overflow-wrap: anywhere; }
.beside section { margin-top: 10px; }
.beside .facts { margin-top: 10px; }
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
@media print {
  body { font-size: 10.5pt; }
  header, main, footer { max-width: none; padding: 0; }
  header { padding-top: 0; }
  section { margin-top: 26px; }
  h2, h3, .kicker { break-after: avoid; }
  figure, .cards > div, tr, dl { break-inside: avoid; }
  thead { display: table-header-group; }
  .figures { grid-template-columns: 1fr 1fr; gap: 22px; }
  .beside .figures { grid-template-columns: 1fr; }
  .tokens { max-height: none; overflow: visible; font-size: 10.5pt; }
  .scroll { overflow: visible; }
  .wide img { min-width: 0; }
  table { font-size: 6.6pt; }
  th, td { padding: 2px 3px; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
