"""The notebooks run from top to bottom, and what is kept of them can be read without running."""

import base64
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_is_one_per_paper_and_three_more():
    names = [path.stem for path in NOTEBOOKS]
    assert names == [
        "00_first_hour", "01_score_flow", "02_power_method", "03_residual_jacobians",
        "04_universal", "05_your_own_flow", "06_your_own_model",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept(path):
    assert path.stat().st_size < 1_000_000
    text = path.read_text(encoding="utf-8")
    bare = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"/(home|root|work|tmp|Users|usr)/|[A-Z]:\\\\", bare)
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Run once, in order: no state of an earlier run is hidden in what is shown.
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    drawn = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert drawn
    assert all(base64.b64decode(one).startswith(b"\x89PNG") for one in drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::DeprecationWarning")
    notebook = nbformat.read(path, as_version=4)
    kept = [len(cell.get("outputs", [])) for cell in notebook.cells]
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    for cell, before in zip(notebook.cells, kept, strict=True):
        # What was there is there again: a picture, or something printed.
        assert bool(cell.get("outputs", [])) == bool(before), cell.source
