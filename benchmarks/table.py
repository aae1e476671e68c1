"""The table as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.rows import Row

HEAD = ("row", "against", "ours", "theirs", "ratio", "wanted", "error", "compile", "peak", "")


def listing(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:{width}}  {row.claim}" for row in rows)


def machine(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in found["versions"].items() if v is not None)
    missing = ", ".join(n for n, v in found["versions"].items() if v is None)
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['devices']} x {found['device']}\n"
        f"Python {found['python']}, {versions}" + (f"; not installed: {missing}" if missing else "")
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows in columns, a line for each peer."""
    cells = [HEAD, *(line for row in rows for line in _cells(row))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def page(document: dict[str, Any]) -> list[str]:
    """Machine and rows of a file of `python -m benchmarks --json`, as preformatted Markdown."""
    text = f"{machine(document['machine'])}\n\n{table(document['rows'])}"
    return [f"    {line}".rstrip() for line in text.splitlines()]


def lines(row: dict[str, Any]) -> str:
    """One row as it is finished."""
    return "\n".join("  ".join(cell for cell in line if cell) for line in _cells(row))


def _cells(row: dict[str, Any]) -> list[tuple[str, ...]]:
    own = (_seconds(row["compile_s"]), _size(row["peak_bytes"]))
    mark = "!" if (row["load"] or {}).get("busy") else ""
    if row["status"] == "missing":
        return [(row["name"], "", *[""] * 7, row["missing"])]
    notes = [] if row["status"] == "right" else [row["status"].upper() + ", not timed"]
    if "holds_peak" in row:
        notes.append(_limit("peak", _size(row["most_peak_bytes"]), row["holds_peak"]))
    if "holds_s" in row:
        notes.append(_limit("ours", _seconds(row["most_s"]), row["holds_s"]))
    first = (
        row["name"], "", _seconds(row["median_s"]), "", "", "", _error(row["error"]), *own,
        "  ".join([mark, *notes]).strip(),
    )  # fmt: skip
    found: list[tuple[str, ...]] = [first]
    for peer in row["peers"]:
        if peer["missing"] is not None:
            found.append(("", peer["name"], *[""] * 7, peer["missing"]))
            continue
        wanted = "" if peer["most"] is None else f"<= {peer['most']:.3g}"
        verdict = {None: "", True: "", False: "NOT HELD"}[peer["holds"]]
        ratio = "" if peer["ratio"] is None else f"{peer['ratio']:.3g}"
        scaled = "" if peer.get("times", 1) == 1 else f", timed 1/{peer['times']:.4g}"
        found.append((
            "", peer["name"] + scaled, "", _seconds(peer["median_s"]), ratio, wanted,
            _error(peer["error"]), "", _size(peer["peak_bytes"]), verdict,
        ))  # fmt: skip
    return found


def _limit(what: str, most: str, holds: bool) -> str:
    return f"{what} <= {most}" + ("" if holds else ": NOT HELD")


def device(found: dict[str, Any]) -> str:
    """What was compared with the CPU's float64."""
    head = ("result", "on", "error", "tolerance", "")
    cells = [head] + [
        (
            line["name"], line["dtype"], _error(line["error"]), f"{line['tolerance']:.0e}",
            "" if line["right"] else "WRONG",
        )
        for line in found["lines"]
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]
    return "\n".join([found["about"], *text])


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _size(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1e9:
        return f"{value / 1e9:.2f} GB"
    return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
