"""The page of learnt programs: its tables, from the numbers that are kept beside it.

    python benchmarks/programs_page.py

Reads the results.json of `python -m universal --preset PRESET`, kept as programs_PRESET.json in
benchmarks/results, and programs_search.json of `program_search.py`; writes everything below the
line "## Tables" of programs.md there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import write_tables

from universal.__main__ import table
from universal.presets import PRESETS

RESULTS = Path(__file__).parent / "results"
COLUMNS = dict(
    task="task", components="components", machine="machine", layers="layers", width="columns",
    rate="rate", scale="scale", batch="batch", steps="steps", best="best, %", last="last, %",
)  # fmt: skip


def lines(folder: Path) -> list[str]:
    found: list[str] = []
    for preset in PRESETS:
        path = folder / f"programs_{preset}.json"
        if path.exists():
            doc = json.loads(path.read_text())
            minutes = sum(cell["seconds"] for cell in doc["cells"]) / 60
            commands = dict.fromkeys(cell["command"] for cell in doc["cells"])
            found += ["", f"### {preset}", "", *(f"    {one}" for one in commands), ""]
            found += [f"{len(doc['cells'])} cells, {minutes:.0f} minutes of training.", ""]
            found += ["```text", *table(doc).splitlines(), "```"]
    rows = json.loads((folder / "programs_search.json").read_text())["rows"]
    rows.sort(key=lambda row: (row["task"], row["machine"], -row["best"]))
    found += ["", "### The search", "", _row(list(COLUMNS.values())), "|" + "---|" * len(COLUMNS)]
    return found + [_row([_cell(row, name) for name in COLUMNS]) for row in rows]


def _cell(row: dict[str, Any], name: str) -> str:
    return f"{100 * row[name]:.1f}" if name in ("best", "last") else f"{row[name]}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    write_tables(RESULTS / "programs.md", lines(RESULTS))
