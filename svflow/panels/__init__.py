"""The parts of a portrait. A panel is a module with

    KEY                     its key in the document
    TITLE, ABSENT           of its section; and what is left out where the document has null for it
    SWITCH                  the help of --no-KEY
    EXTRA                   the optional extra of svflow that it needs and what that has; or None
    LEAST                   the fewest tokens and the least width that it takes
    PICTURES                the keys of its figures
    measure(model, ids, *, progress)            what it shows, computed
    OPTIONS                 the options of the command that `measure` takes besides
    document(found)         that as a JSON value, the only source of what follows
    figures(doc, theme)     {key: matplotlib figure} in `svflow.plotting.style(theme)`
    columns(doc)            its table by layer
    notes(doc)              what a reader has to know, in sentences
    cards(doc)              what stands at a glance, HTML
    section(doc, image)     its section, HTML; image(key, measure, wide=False) gives a figure

where doc is the whole document, see `svflow.report`. A new panel is a new module and its name in
`PANELS`. `depth` is always there, and its `document` is `measures`.
"""

from __future__ import annotations

from types import ModuleType

from svflow.panels import depth, power, score, spectra, topology

PANELS: dict[str, ModuleType] = {panel.KEY: panel for panel in (spectra, power, score, topology)}
"""Those that can be left out, in the order they are shown."""

__all__ = ["PANELS", "depth", "power", "score", "spectra", "topology"]
