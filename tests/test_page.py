"""The portrait's page: two models side by side, and what a browser makes of it."""

# ruff: noqa: RUF001

import base64
import html
import io
import json
import re
from pathlib import Path

import browser
import matplotlib.pyplot as plt
import numpy as np
import pytest

import svflow as sv
import svflow.__main__ as command
from svflow import plotting, report
from svflow.panels import PANELS, depth

GOLDEN = Path(__file__).parent / "data" / "golden"
LLAMA, QWEN = GOLDEN / "llama", GOLDEN / "qwen2"
LEFT_OUT = [f"--no-{key}" for key in PANELS]
IDS = "5,7,1,33,44,18"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a comparison of two families on the same ids."""
    out = tmp_path_factory.mktemp("two")
    given = [str(LLAMA), str(QWEN), "--ids", IDS, "--out", str(out), *LEFT_OUT]
    assert command.main(given) == 0
    return out


def test_two_models_stand_side_by_side(two):
    doc = json.loads((two / "portrait.json").read_text(encoding="utf-8"))
    assert doc["format"] == report.COMPARISON
    names = [one["model"]["name"] for one in doc["portraits"]]
    assert names == ["llama", "qwen2"]
    text = (two / "index.html").read_text(encoding="utf-8")
    keys = [key for key in depth.PICTURES if key in doc["portraits"][0]["measures"]]
    written = {f"{key}{place}.png" for key in keys for place in ("", ".2")}
    assert {path.name for path in two.iterdir()} == written | {"index.html", "portrait.json"}
    ids = re.findall(r'<figure id="([^"]+)">', text)
    assert sorted(ids) == sorted([*keys, *(f"{key}-2" for key in keys)])
    for key in keys:
        for place, name in (("", key), (".2", f"{key}-2")):
            png = base64.b64encode((two / f"{key}{place}.png").read_bytes()).decode()
            at = text.index(f'<figure id="{name}">')
            assert f'src="data:image/png;base64,{png}"' in text[at : text.index("</figure>", at)]
    # Each model's document is that of its own portrait.
    for place, source in enumerate((LLAMA, QWEN)):
        model = sv.load(source, dtype=np.float32)
        found = sv.portrait(model, np.array(list(map(int, IDS.split(",")))))
        wanted = depth.document(found)["norm"]["lines"]
        assert doc["portraits"][place]["measures"]["norm"]["lines"] == wanted
        assert f"<dd>{model.config.depth} layers × {model.config.width}</dd>" in text
    for one in doc["portraits"]:
        for note in report.notes(one):
            assert text.count(html.escape(note)) == 1


def test_the_untrained_model_beside_it(tmp_path, capsys):
    given = [str(LLAMA), "--untrained", "--ids", IDS, "--out", str(tmp_path), *LEFT_OUT]
    assert command.main(given) == 0
    printed = capsys.readouterr().out
    assert printed.count("layer    norm") == 2
    doc = json.loads((tmp_path / "portrait.json").read_text(encoding="utf-8"))
    one, other = doc["portraits"]
    assert other["model"]["name"] == "llama, untrained"
    assert one["model"]["parameters"] == other["model"]["parameters"]
    assert one["ids"] == other["ids"]
    assert one["measures"] != other["measures"]
    # A portrait of one model takes its place, and leaves no picture of the second.
    assert command.main([str(LLAMA), "--ids", IDS, "--out", str(tmp_path), *LEFT_OUT]) == 0
    assert not [path for path in tmp_path.iterdir() if ".2." in path.name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([LLAMA, QWEN, LLAMA], "one model, or two to compare, not 3"),
        ([LLAMA, QWEN, "--untrained"], "--untrained compares one model with itself, and two were"),
    ],
)
def test_what_cannot_be_compared(given, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main([*map(str, given), "--ids", IDS, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_compared_axes_hold_what_both_show():
    def drawn(values, scale):
        figure, (left, right) = plt.subplots(1, 2)
        left.plot(range(len(values)), values)
        left.set_yscale(scale)
        left.set_ylabel(scale)
        right.imshow(np.eye(len(values)))
        return figure

    for one, other, scale in (
        (drawn([1, 2, 3], "linear"), drawn([-5, 9], "linear"), "linear"),
        (drawn([1, 2, 3], "linear"), drawn([1e-2, 1e3], "log"), "log"),
        (drawn([-1, 2, 3], "linear"), drawn([1e-2, 1e3], "log"), "linear"),
    ):
        ends = [axes.get_ylim() for axes in (one.axes[0], other.axes[0])]
        pictures = [figure.axes[1].get_xlim() for figure in (one, other)]
        plotting.share_limits([one, other])
        for figure in (one, other):
            low, high = figure.axes[0].get_ylim()
            assert (low, high) == (min(e[0] for e in ends), max(e[1] for e in ends))
            assert figure.axes[0].get_yscale() == figure.axes[0].get_ylabel() == scale
        assert [figure.axes[1].get_xlim() for figure in (one, other)] == pictures
        assert one.axes[0].get_xlim() == other.axes[0].get_xlim()
    plt.close("all")


@browser.needed
@pytest.mark.parametrize("width", browser.WIDTHS)
def test_a_browser_draws_both(width, two, tmp_path):
    docs = json.loads((two / "portrait.json").read_text(encoding="utf-8"))["portraits"]
    text = (two / "index.html").read_text(encoding="utf-8")
    browser.check(text, width, sum(len(one["measures"]) for one in docs), tmp_path)


@browser.needed
def test_the_check_of_pages_can_fail(tmp_path):
    """What it says of pages that are wrong, one after the other."""
    png = "data:image/png;base64," + base64.b64encode(_wide_png()).decode()
    good = f'<html><head></head><body><p>text</p><img src="{png}" width="480"></body></html>'
    browser.check(good, 500, 1, tmp_path)
    for bad, pictures in (
        (good, 2),
        (good.replace(png, "data:image/png;base64,AAAA"), 1),
        (good.replace("<p>", '<p style="width: 900px">'), 1),
        (good.replace("<p>text", "<p>" + "m" * 400), 1),
        (good.replace("<p>", "<script>console.log('said')</script><p>"), 1),
        (good.replace("<p>", "<script>nothing.there()</script><p>"), 1),
    ):
        with pytest.raises(AssertionError):
            browser.check(bad, 500, pictures, tmp_path)


def _wide_png() -> bytes:
    buffer = io.BytesIO()
    plt.imsave(buffer, np.zeros((2, 600)))
    return buffer.getvalue()
