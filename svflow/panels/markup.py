"""Measures and tables as HTML."""

# The page is typeset: its minus signs are meant.
# ruff: noqa: RUF001

from __future__ import annotations

import base64
import html
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from svflow.panels.measure import Measure, number


def image(key: str, measure: Measure, light: bytes, dark: bytes, *, wide: bool = False) -> str:
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


def html_number(value: float | None) -> str:
    return number(value).replace("-", "−")


def html_rows(found, names: list[str]) -> str:
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
        cells = "".join(f"<td>{html_number(values[depth])}</td>" for *_, values in found)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f'<table><thead><tr><th rowspan="2" scope="col">layer</th>{top}</tr><tr>{under}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def depths(doc: Mapping[str, Any]) -> list[str]:
    return ["embed", *map(str, range(1, doc["model"]["layers"] + 1))]


def blocks(
    found: Iterable[tuple[str, str, Mapping[str, Any]]],
    names: list[str],
    words: Mapping[str, str] | None = None,
) -> str:
    """A table per (title, unit, values by field), its fields in other words where there are."""
    words = {} if words is None else words
    return "".join(
        f"<h3>{html.escape(title)} <small>{html.escape(unit)}</small></h3>"
        '<div class="scroll">'
        + html_rows(
            [(words.get(f, f.replace("_", " ")), "", values) for f, values in line.items()], names
        )
        + "</div>"
        for title, unit, line in found
    )
