"""Pages of results: a reading, which somebody wrote, and tables, which a script writes below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MARK = "## Tables\n"


def write_tables(page: Path, lines: Sequence[str]) -> None:
    """Puts the lines in the place of everything below the page's line "## Tables"; makes a page."""
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    text = before.split(MARK)[0] + MARK + "\n" + "\n".join(lines).strip("\n") + "\n"
    page.write_text(text, encoding="utf-8")
