"""What a headless Chromium makes of a page."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for found in map(shutil.which, NAMES) if found), None)
WIDTHS = (500, 1280)
"""The narrowest window that headless Chromium makes, and a usual one."""
needed = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")
REPORT = """<script>
window.errors = [];
window.addEventListener("error", e => window.errors.push(String(e.message)));
window.addEventListener("load", () => {
  const scrolls = e => { for (; e; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true; return false; };
  const wide = document.documentElement.clientWidth;
  const over = [...document.querySelectorAll("body *")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.right > wide + 1 || box.left < -1) && !scrolls(e);
  }).map(e => e.tagName + " " + (e.textContent || e.id).slice(0, 40));
  const cut = [...document.querySelectorAll("p, h1, h2, h3, dd, li, figcaption")].filter(
    e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !scrolls(e)
  ).map(e => e.textContent.slice(0, 40));
  const images = [...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]);
  document.body.innerHTML = "";
  const said = document.createElement("pre");
  said.id = "report";
  said.textContent = JSON.stringify({wide, over, cut, images, errors: window.errors});
  document.body.append(said);
});
</script>"""


def check(text: str, width: int, pictures: int, folder: Path) -> None:
    """The page draws so many pictures, nothing leaves it or is cut, and the console is silent."""
    path = folder / f"page at {width}.html"
    path.write_text(text.replace("<head>", f"<head>{REPORT}"), encoding="utf-8")
    ended = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},2000", "--virtual-time-budget=10000", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in ended.stderr
    said = re.search(r'<pre id="report">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert said, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(said[1]))
    assert found["wide"] == width
    assert found["over"] == found["cut"] == found["errors"] == []
    assert len(found["images"]) == pictures
    assert all(done and natural > 500 and shown > 200 for done, natural, shown in found["images"])
