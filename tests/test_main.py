"""`python -m svflow`: what it prints, what it writes, and how it ends."""

# ruff: noqa: RUF001

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import browser
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, pre_tokenizers, trainers

import svflow as sv
import svflow.__main__ as command
from svflow import page as webpage
from svflow import report
from svflow.data import PASSAGE
from svflow.panels import PANELS, depth, power, score, spectra, topology
from svflow.panels.measure import number
from svflow.portrait import Portrait, portrait, summary
from svflow.power.matrices import SHIFTS
from svflow.power.panel import panel as power_panel
from svflow.spectra.panel import CONTROLS, SOURCES, Panel, _measured, panel

DATA = Path(__file__).parent / "data"
LLAMA, ALBERT = DATA / "golden" / "llama", DATA / "real" / "rxnmapper_albert"
TEXT = "The captain turned the ship <b>north</b> & went below, for there was nothing to see."
MOLECULE = "12,34,56,34,78,90,12,5"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """An untrained GPT-2 with a tokenizer, saved."""
    folder = tmp_path_factory.mktemp("tiny gpt2")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    config = dict(model_type="gpt2", vocab_size=280, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    config = sv.TransformerConfig.from_hf(config | dict(initializer_range=0.2))
    sv.save(sv.Transformer(config, rngs=nnx.Rngs(0)), folder)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def run(capsys, *arguments):
    status = command.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def read(out):
    doc = json.loads((out / "portrait.json").read_text(encoding="utf-8"))
    return doc, (out / "index.html").read_text(encoding="utf-8")


def check_outputs(out, printed):
    """What holds for every portrait: the four outputs agree, and the page stands alone."""
    doc, page = read(out)
    present = [panel for key, panel in PANELS.items() if doc[key]]
    keys = [*doc["measures"], *(key for panel in present for key in panel.PICTURES)]
    formulas = depth.MEASURES | spectra.SPECTRA | {"rank": spectra.RANK} | power.POWER
    formulas |= score.SCORE | topology.TOPOLOGY
    written = {"index.html", "portrait.json", *(f"{key}.png" for key in keys)}
    assert {path.name for path in out.iterdir()} == written
    assert doc["format"] == report.FORMAT
    for key in keys:
        png = (out / f"{key}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert f'src="data:image/png;base64,{base64.b64encode(png).decode()}"' in page
        assert key in ("eigenvalues", "communities") or formulas[key].formula in page
        assert f'<figure id="{key}">' in page
    assert page.count("<source srcset=") == len(keys)
    bare = re.sub(r'"data:image/png;base64,[A-Za-z0-9+/=]+"', '"data:"', page)
    assert not re.search(r"https?:|//|@import|url\(|<script|<iframe", bare)
    assert set(re.findall(r'(?:src|srcset|href)="([^"]*)"', bare)) == {"data:", "data:,"}
    lines = printed.splitlines()
    assert max(map(len, lines[:-1])) <= 100  # the last line names the folder
    names = ["embed", *map(str, range(1, doc["model"]["layers"] + 1))]
    check_table(lines, page, "By depth", depth.columns(doc), names)
    below = lines[lines.index("") + 1 :]
    for key, one in PANELS.items():
        assert one.TITLE in page
        assert (f"<code>--no-{key}</code> adds them" in page) == (doc[key] is None)
        if doc[key]:
            below = below[below.index("") + 1 :]  # the tables stand between empty lines
            after = page[page.index(one.TITLE) :]
            check_table(below, after, "Every measure", one.columns(doc), names[1:], before=True)
    if doc["spectra"]:
        check_spectra(doc, page)
    if doc["power"]:
        check_power(doc, page)
    if doc["score"]:
        check_score(doc, page)
    if doc["topology"]:
        check_topology(doc, page)
    for note in report.notes(doc):
        assert html.escape(note) in page
        assert note in " ".join(printed.split())
    for fact in (
        doc["model"]["name"],
        doc["model"]["dtype"],
        doc["device"],
        f"{len(doc['ids'])} tokens",
    ):
        assert html.escape(fact) in page
        assert fact in printed
    for library, version in doc["versions"].items():
        assert version is None or f"{library} {version}" in page
    return doc, page


def check_table(lines, page, heading, columns, names, before=False):
    """The next table in print, and the first on the page after a heading or the last before it."""
    start = next(place for place, line in enumerate(lines) if line.startswith("─")) + 1
    table = [line.split() for line in lines[start : start + len(names)]]
    expected = [[number(values[row]) for *_, values in columns] for row in range(len(names))]
    assert [row[1:] for row in table] == expected
    assert [row[0] for row in table] == names
    at = page.index(heading)
    at = page.rindex("<table>", 0, at) if before else page.index("<table>", at)
    cells = [
        [cell.replace("−", "-") for cell in re.findall("<td>(.*?)</td>", row)]
        for row in re.findall("<tr>(.*?)</tr>", page[at : page.index("</table>", at)])
    ]
    assert [row for row in cells if row] == expected


def check_spectra(doc, page):
    """Shapes, and every number of the table after the last layer."""
    found, layers, width = doc["spectra"], doc["model"]["layers"], doc["model"]["width"]
    assert list(found["measures"]) == list(spectra.SPECTRA)
    for measure in found["measures"].values():
        for line in measure["lines"].values():
            assert list(line)[:4] == ["model", "untrained", "gaussian", "random_update"]
            assert {len(values) for values in line.values()} == {layers}
    (noise,) = found["measures"]["complex_fraction"]["lines"].values()
    assert list(noise)[4:] == ["excess", "deviation"]
    deviation = number(sv.spectra.ginibre.complex_fraction_deviation(width))
    assert f"with a standard deviation of {deviation}." in page
    for values in found["eigenvalues"].values():
        assert np.shape(values) == (layers, width, 2)
    assert tuple(found["rank"]["lines"]) == SOURCES
    at = page.index("After the last layer")
    table = page[at : page.index("</table>", at)]
    rows = re.findall("<tr>(.*?)</tr>", table)[1:]
    for row, (source, line) in zip(rows, found["rank"]["lines"].items(), strict=True):
        assert (f"<code>{source}</code>" in row) == (source in CONTROLS)
        for key, cell in zip(
            ("before", "after", "gain"), re.findall("<td>(.*?)</td>", row), strict=True
        ):
            drawn = sorted(one[-1] for one in line[key])
            assert len(drawn) == (found["draws"] if source in CONTROLS else 1)
            shown = [number(one) for one in (np.median(drawn), drawn[0], drawn[-1])]
            assert re.findall(r"[^ ()–]+", cell) == shown[: 3 if drawn[-1] > drawn[0] else 1]
        assert html.escape(line["keeps"]) in row
    gains = [one[-1] for name in CONTROLS for one in found["rank"]["lines"][name]["gain"]]
    least, largest = number(min(gains)), number(max(gains))
    assert f"by {least} to {largest} over {found['draws']} draw" in page
    assert f"random controls {least} to {largest}" in page  # at a glance


def check_power(doc, page):
    """Shapes, what is counted in the sentences, and the card."""
    found, layers = doc["power"], doc["model"]["layers"]
    assert list(found["measures"]) == list(power.POWER)
    for key, measure in found["measures"].items():
        assert list(measure["lines"]) == (["tokens"] if key == "consensus" else list(SHIFTS))
        for line in measure["lines"].values():
            assert list(line)[:2] == ["model", "untrained"]
            assert {len(values) for values in line.values()} == {layers + 1 - measure["start"]}
    for shift, name in (("modulus", "|λ|"), ("residual", "|1 + λ|")):
        assert np.shape(found["eigenvalues"][shift]) == (layers, 2)
        rho, gamma = (found["measures"][key]["lines"][shift] for key in ("rho", "gamma"))
        turned = sum((share or 0) > 0.5 for share in rho["model"])
        above = sum(a > b for a, b in zip(gamma["model"], gamma["chance"], strict=True))
        said = f"by {name}: ρ above one half in {turned} of {layers} layers, γ above chance in "
        assert f"{said}{above}" in page
        if not found["shared"]:
            pairs = zip(gamma["model"], gamma["other"], strict=True)
            found_others = [a > b for a, b in pairs if b is not None]
            of = "" if len(found_others) == layers else f" of {len(found_others)}"
            assert f"above what the other layers’ give in {sum(found_others)}{of}." in page
    assert (found["regime"] is None) == (not found["shared"])
    gamma = found["measures"]["gamma"]["lines"]["modulus"]["model"][-1]
    assert f'by |λ|</p><p class="value">{number(gamma)}</p>' in page


def check_score(doc, page):
    """Shapes, and the gap that the sentences and the card name."""
    found, layers = doc["score"], doc["model"]["layers"]
    assert list(found["measures"]) == list(score.SCORE)
    for measure in found["measures"].values():
        line = measure["lines"]
        assert list(line) == ["median", "lower_quartile", "upper_quartile", "untrained"]
        assert {len(values) for values in line.values()} == {layers}
        known = [row for row in zip(*line.values(), strict=True) if None not in row]
        assert all(low <= middle <= high for middle, low, high, _ in known)
    gap = found["measures"]["consistency"]["lines"]
    largest = [number(max(gap[name])) for name in ("median", "untrained")]
    assert f"whose median is at most {largest[0]} nats here and {largest[1]} untrained" in page
    middle = number(float(np.median(gap["median"])))
    assert f'Consistency gap (nats)</p><p class="value">{middle}</p>' in page


def check_topology(doc, page):
    """Shapes, and the verdicts that the sentences count."""
    found, layers, width = doc["topology"], doc["model"]["layers"], doc["model"]["width"]
    assert list(found["measures"]) == list(topology.TOPOLOGY)
    for measure in found["measures"].values():
        assert {len(values) for values in measure["lines"].values()} == {layers}
    size = min(width, topology.MOST)
    for one in found["shown"]:
        assert np.shape(one["correlations"]) == (size, size)
        assert np.all(np.abs(one["correlations"]) <= 1)
        assert len(one["coordinates"]) == len(one["labels"]) == size
        assert len(one["sizes"]) == found["number"]["model"][one["layer"] - 1]
    for kind, gains in found["coupling"].items():
        assert list(gains) == list(sv.topology.GAINS)
        for line in gains.values():
            assert {len(values) for values in line.values()} == {layers}
        verdicts = gains["columns"]["verdict"]
        counts = [verdicts.count(sign) for sign in ("positive", "negative")]
        name = "J" if kind == "raw" else "J, partial"
        assert f"{name} {counts[0]} positive and {counts[1]} negative (untrained" in page
    assert f"over {found['states']} tokens (the first left out)" in page
    assert found["states"] == len(doc["ids"]) - 1


LEFT_OUT = ("--no-spectra", "--no-power", "--no-score", "--no-topology")


def test_gpt2(gpt2, tmp_path, capsys):
    out = tmp_path / "a" / "portrait"
    options = ("--out", out, "--dtype", "float64", *LEFT_OUT)
    status, printed, errors = run(capsys, gpt2, "--text", TEXT, *options)
    assert (status, errors) == (0, "")
    doc, page = check_outputs(out, printed)
    assert all(doc[key] is None for key in PANELS)
    assert "jacobian" not in printed.lower()
    assert list(doc["measures"]) == list(depth.MEASURES)
    assert doc["text"] == TEXT == "".join(doc["pieces"])
    assert doc["model"]["name"] == gpt2.name
    assert doc["model"]["parameters"] == 280 * 32 + 64 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64
    assert doc["states"] == "centered"
    assert "states and updates are measured less" in printed
    assert "".join(f"<span>{html.escape(piece)}</span>" for piece in doc["pieces"]) in page

    # The file holds the summaries of the portrait, to the last bit.
    found = portrait(sv.load(gpt2, dtype=jnp.float64), np.array(doc["ids"]))
    arrays = dict(norm=found.norm, path=found.path, cosine=found.cosine, loss=found.loss)
    lines = {(key, None): values for key, values in arrays.items()}
    for place, name in enumerate(("attention", "feed_forward")):
        lines["step", name] = found.step[:, place]
        lines["radial", name] = found.radial[:, place]
        lines["tangential", name] = found.tangential[:, place]
    lines["refined", "distance"] = found.refined
    lines["refined", "uncertainty"] = found.refined_error
    stored = sum(len(measure["lines"]) for measure in doc["measures"].values())
    assert len(lines) == stored
    for (key, name), values in lines.items():
        measure = doc["measures"][key]
        (line,) = [v for k, v in measure["lines"].items() if name in (None, k)]
        got = summary(values)
        assert measure["start"] == 3 - len(values)
        for field, statistic in dict(
            mean="mean", median="median", lower="lower_quartile", upper="upper_quartile",
            first="first_token", tokens="tokens",
        ).items():  # fmt: skip
            expected = np.asarray(getattr(got, field), float)
            np.testing.assert_array_equal(np.array(line[statistic], float), expected)


def test_the_default_model_in_its_own_process(tmp_path):
    """As a user runs it: without the tests' x64 and strict promotion; over an older portrait."""
    (tmp_path / "portrait").mkdir()
    (tmp_path / "portrait" / "index.html").write_text("old")
    ended = subprocess.run(
        [sys.executable, "-m", "svflow"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sv.__file__).parents[1]), "PYTHONUTF8": "1"},
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    doc, page = check_outputs(tmp_path / "portrait", ended.stdout)
    if browser.BROWSER is not None:
        for width in browser.WIDTHS:
            browser.check(page, width, page.count("<img "), tmp_path)
    assert doc["text"] == PASSAGE
    assert doc["model"]["dtype"] == "float32"
    assert doc["spectra"]["resolution"] == 2.0**23
    assert doc["spectra"]["token"] == len(doc["ids"]) - 1
    assert doc["spectra"]["draws"] == 5
    loss = doc["measures"]["loss"]["lines"]["next token"]["mean"]
    assert loss[-1] < np.log(doc["model"]["vocabulary"]) - 2
    assert loss[-1] == min(loss)


def test_llama_and_a_text_that_is_cut(tmp_path, capsys):
    ids = ("--ids", "5, 71 3,3,44,18,90,11", "--max-tokens", 7, "--draws", 2)
    status, printed, errors = run(capsys, LLAMA, *ids, "--dtype", "float64", "--out", tmp_path)
    assert (status, errors) == (0, "svflow: 8 tokens, cut to the first 7\n")
    doc, page = check_outputs(tmp_path, printed)
    assert list(doc["measures"]) == list(depth.MEASURES)
    assert doc["states"] == "whole"
    assert doc["ids"] == [5, 71, 3, 3, 44, 18, 90]
    assert (doc["cut_from"], doc["pieces"]) == (8, ["5", "71", "3", "3", "44", "18", "90"])
    assert doc["text"] is None
    assert "Given as token ids." in page
    assert "at token 7, id 90, with" in page
    assert "The text has 8 tokens and was cut to the first 7." in printed
    model, ids = sv.load(LLAMA, dtype=jnp.float64), np.array(doc["ids"])
    check_document(doc, panel(model, ids, draws=2))
    check_power_document(doc, power_panel(model, ids))


def check_document(doc, found):
    """The file holds the panel, to the last bit."""
    parts = doc["spectra"]
    assert (parts["token"], parts["seed"]) == (found.token, found.seed) == (6, 0)
    assert parts["resolution"] == 2.0**52
    for key, measure in parts["measures"].items():
        for line, name in spectra.scalars(key).items():
            values = {k: np.array(v, float) for k, v in measure["lines"][line].items()}
            for source in ("model", "untrained"):
                expected = getattr(getattr(found, source), name)
                np.testing.assert_array_equal(values[source], expected, err_msg=name)
            drawn = getattr(found.random_update, name)
            mean = drawn.prod(0) ** 0.5 if key == "condition_number" else (drawn[0] + drawn[1]) / 2
            np.testing.assert_allclose(values["random_update"], mean, rtol=1e-13, err_msg=name)
            known = ~np.isnan(found.model.excess[name])
            if key == "complex_fraction":
                np.testing.assert_array_equal(values["excess"], found.model.excess[name])
            expected = np.where(known, found.model.ginibre[name], np.nan)
            np.testing.assert_array_equal(values["gaussian"], expected)
    for source, pairs in parts["eigenvalues"].items():
        re_im = np.moveaxis(np.array(pairs), -1, 0)
        values = getattr(found, source).eigenvalues
        np.testing.assert_array_equal(re_im, [values.real, values.imag])
    for source, line in parts["rank"]["lines"].items():
        before, after = np.moveaxis(found.effective_rank[source], 1, 0)
        np.testing.assert_array_equal(line["before"], before)
        np.testing.assert_array_equal(line["after"], after)
        np.testing.assert_array_equal(line["gain"], after / before)


def check_power_document(doc, found):
    """The file holds the power panel, to the last bit."""
    own, fresh = found.model, found.untrained
    for shift in SHIFTS:
        lines = {key: one["lines"].get(shift) for key, one in doc["power"]["measures"].items()}
        pairs = [getattr(one.principal, shift) for one in (own, fresh)]
        real, drawn, reduced = (getattr(one, shift) for one in (own.real, fresh.real, own.reduced))
        values = np.asarray(pairs[0].value)
        re_im = np.transpose(doc["power"]["eigenvalues"][shift])
        np.testing.assert_array_equal(re_im, [values.real, values.imag])
        for line, field, expected in (
            ("gap", "model", pairs[0].gap_ratio),
            ("gap", "untrained", pairs[1].gap_ratio),
            ("gamma", "model", real.alignment.gamma),
            ("gamma", "untrained", drawn.alignment.gamma),
            ("gamma", "reduced", reduced.alignment.gamma),
            ("gamma", "chance", real.alignment.chance),
            ("gamma", "other", real.other),
            ("gamma", "signed", real.alignment.signed),
            ("rho", "model", real.alignment.rho),
            ("rho", "p_value", real.alignment.p_value),
            ("span", "model", real.span),
            ("span", "chance", real.span_chance),
        ):
            got = np.array(lines[line][field], float)
            np.testing.assert_array_equal(got, np.asarray(expected, float), err_msg=field)
    lines = doc["power"]["measures"]["consensus"]["lines"]["tokens"]
    np.testing.assert_array_equal(lines["model"], own.real.consensus)
    np.testing.assert_array_equal(lines["reduced"], own.reduced.consensus)
    assert lines["chance"] == [len(doc["ids"]) ** -0.5] * len(own.real.consensus)


def test_a_model_that_sees_both_sides(tmp_path, capsys):
    """No loss, said everywhere; an older portrait's figures do not stay; nor is more removed."""
    for name in ("loss.png", "notes.txt", "norm.png", "rank.png", "spectral_radius.png"):
        (tmp_path / name).write_text("old")
    options = ("--out", tmp_path, "--dtype", "bfloat16", "--no-spectra", "--no-topology")
    status, printed, errors = run(capsys, ALBERT, "--ids", MOLECULE, *options)
    assert (status, errors) == (0, "")
    assert (tmp_path / "notes.txt").read_text() == "old"
    (tmp_path / "notes.txt").unlink()
    doc, page = check_outputs(tmp_path, printed)
    assert list(doc["measures"]) == [key for key in depth.MEASURES if key != "loss"]
    assert "both sides" in doc["loss_absent"]
    assert doc["model"]["dtype"] == "bfloat16"
    assert doc["power"]["shared"]
    assert "layers share one matrix. The theory of the reduced system then predicts:" in printed
    for said in (printed, html.unescape(page)):
        said = " ".join(said.split())
        assert "No next-token loss: its attention sees both sides" in said
        assert "A norm follows each addition" in said
        assert "logit lens" not in said.lower()


def test_one_layer_has_no_cosine():
    """No layer has one before it."""
    config = dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    model = sv.Transformer(sv.TransformerConfig.from_hf(config), rngs=nnx.Rngs(0))
    two = ("attention", "feed_forward")
    states, layers, parts = np.ones((2, 3)), np.ones((1, 3)), np.ones((1, 2, 3))
    found = Portrait(
        two, two, states, parts, parts, parts, layers, states, layers[:0], states, states,
        states[:, :2], 0.125,
    )  # fmt: skip
    doc = report.document(found, model, [7, 7, 7], name="m", text=None, pieces=["7"] * 3)
    assert list(doc["measures"]) == [key for key in depth.MEASURES if key != "cosine"]
    page = webpage.page([doc], webpage.pictures([doc], "light"), webpage.pictures([doc], "dark"))
    assert 'id="cosine"' not in page
    assert report.table(doc).splitlines()[4].count("1.000") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing/model"], "missing/model"),
        (["./missing.gguf"], "there is no file or folder ./missing.gguf"),
        ([ALBERT], "no tokenizer.json .* or give token ids with --ids"),
        (["{gpt2}", "--text", ""], "the text is empty"),
        (["{gpt2}", "--text", " \n"], "the text is empty"),
        (["{gpt2}", "--text", "T"], "at least two tokens, got one"),
        (["{gpt2}", "--ids", "4,280"], "id 280 is outside the vocabulary of 280"),
        (["{gpt2}", "--ids", "4,-1"], "id -1 is outside the vocabulary"),
        (["{gpt2}", "--ids", "4,x"], "integers separated by commas, got '4,x'"),
        (["{gpt2}", "--ids", "9" * 30], "is outside every vocabulary"),
        (["{gpt2}", "--text", "abc " * 70], "but the model has 64 positions; --max-tokens 64 cuts"),
        ([LLAMA, "--ids", ",".join("5" * 513)], "513 tokens, but the model has 512 positions"),
        # Before the first of two is measured, and by name.
        ([LLAMA, "{gpt2}", "--ids", ",".join("5" * 70)], "tiny gpt2.*: 70 tokens, .* 64 positions"),
        (["{gpt2}", "missing/model", "--ids", "1,2"], "missing/model"),
        ([LLAMA.parent], "config.json"),
        (["{gpt2}", "--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        (["{gpt2}", "--draws", "0"], "--draws must be at least 1, got 0"),
        (["{gpt2}", "--out", LLAMA / "config.json"], "config.json is a file, not a folder"),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments, message, gpt2, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    status, printed, errors = run(capsys, *(str(a).format(gpt2=gpt2) for a in arguments))
    assert (status, printed) == (2, "")
    assert re.fullmatch(rf"svflow: .*{message}.*\n", errors), errors
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_a_text_is_too_short_for_is_left_out(gpt2, tmp_path, capsys):
    given = [gpt2, "--ids", "5,7", "--no-spectra", "--no-score", "--out", tmp_path / "out"]
    status, _, errors = run(capsys, *map(str, given))
    assert status == 0
    assert "svflow: topology is left out: it needs 3 tokens and a width of 11, not 2 and" in errors
    doc, _ = read(tmp_path / "out")
    assert (doc["topology"], doc["power"]["shared"]) == (None, False)


def test_the_passage_is_cut_to_the_models_room(gpt2, capsys):
    source, ids, said = command._text(gpt2, command._parser().parse_args([str(gpt2)]))
    assert (source, len(ids), len(said["pieces"])) == (gpt2, 64, 64)
    assert said["cut_from"] > 64
    assert f"{said['cut_from']} tokens, cut to the first 64" in capsys.readouterr().err


def test_an_interrupt_leaves_what_was_there(gpt2, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for name in ("__main__.portrait", "panels.spectra.measure", "page.page"):
        with monkeypatch.context() as patch:
            patch.setattr(f"svflow.{name}", interrupt)
            old = tmp_path / "old"
            old.mkdir(exist_ok=True)
            (old / "norm.png").write_text("old")
            for out in (old, tmp_path / "new"):
                arguments = ("--text", TEXT, "--dtype", "float64", "--out", out)
                if name == "page.page":
                    arguments += LEFT_OUT
                status, printed, errors = run(capsys, gpt2, *arguments)
                assert (status, printed) == (130, "")
                assert errors == "svflow: interrupted, nothing was written\n"
            assert [path.name for path in tmp_path.iterdir()] == ["old"]
            assert [path.name for path in old.iterdir()] == ["norm.png"]
            assert (old / "norm.png").read_text() == "old"


STATISTICS = ("mean", "median", "lower_quartile", "upper_quartile", "first_token")


def example():
    """A document as of a model of two layers whose numbers are small integers."""

    def line(count, **more):
        numbers = {stat: [float(i + 1) for i in range(count)] for stat in STATISTICS}
        return {**numbers, "tokens": [4] * count, **more}

    measures = dict(
        norm=dict(start=0, lines=dict(state=line(3))),
        step=dict(start=1, lines=dict(attention=line(2, outside=[0, 0]))),
        path=dict(start=0, lines=dict(state=line(3))),
        refined=dict(start=0, lines=dict(distance=line(3), uncertainty=line(3))),
    )
    for key, measure in measures.items():
        measure.update(title=depth.MEASURES[key].title, unit=depth.MEASURES[key].unit)
    return dict(
        format=report.FORMAT,
        model=dict(name="<m>", family="f", layers=2, width=8, vocabulary=9, parameters=7,
                   dtype="float32", norm="rms", placement="pre", causal=True),
        text="a", ids=[1, 2, 3, 4], pieces=["<s>", "a", "b", "c"], cut_from=None, states="whole",
        dt=0.125, device="cpu (cpu)", versions=dict(jax="1"), loss_absent="it has no head",
        measures=measures, **dict.fromkeys(PANELS),
    )  # fmt: skip


def example_with_spectra(J):
    """The same of a model whose two Jacobians are J, with a text of one token."""
    measured = Panel(
        0, 0, *(_measured(jnp.asarray(a)) for a in (J, np.eye(len(J[0])) + 0 * J, J[None])),
        {source: np.array([[[4.0, 2.0], [4.0, 3.0]]]) for source in SOURCES},
    )  # fmt: skip
    doc = example()
    doc["model"]["width"] = len(J[0])
    return doc | dict(spectra=spectra.document(measured))


def test_spectra_that_do_not_exist_are_null(seed):
    """A singular matrix, an identity, and no layer after the last."""
    noise = np.random.default_rng(seed).normal(size=(8, 8))
    singular = np.diag([1.0, 1, 1, 1, 2, 2, 2, 0]) + np.triu(noise, 5)
    doc = example_with_spectra(np.stack([singular, np.eye(8)]))
    doc = json.loads(command._json(doc))
    measures = doc["spectra"]["measures"]
    assert measures["condition_number"]["lines"]["layer"]["model"] == [None, 1.0]
    assert measures["condition_number"]["lines"]["layer"]["random_update"] == [None, 1.0]
    for field, values in measures["alignment"]["lines"]["forward"].items():
        assert (values[0] is None, values[1]) == (False, None), field
    assert measures["update_ratio"]["lines"]["layer"]["model"][1] == 0
    rows = [row.split() for row in report.table(doc).splitlines()[10:12]]
    assert [row[4] for row in rows] == ["·", "1.000"]
    assert [row[-2:] for row in rows] == [["4.000", "4.000"], ["2.000", "3.000"]]
    said = " ".join(report.table(doc).split())
    assert "The condition number of 1 of 2 layers is above 1 / eps = 4.5e15" in said
    assert (
        "multiplies it by 1.500 here (after layer 1 alone by 1.000), by 1.500 untrained, and by "
        "1.500 to 1.500 over 1 draw of each control: haar_similarity 1.500, haar_factors" in said
    )
    assert f"This model is within {', '.join(CONTROLS)}." in said
    for gain, where in ((0.96, "below"), (1.51, "above")):
        doc["spectra"]["rank"]["lines"]["model"]["gain"] = [[0.9, gain]]
        said = " ".join(report.table(doc).split())
        assert f"by {gain:.3f} here (after layer 1 alone by 0.900)" in said
        assert f"This model is {where} {', '.join(CONTROLS)}." in said
    assert "it is no derivative of the whole model" not in said
    doc["model"]["causal"] = False
    assert "it is no derivative of the whole model" in " ".join(report.table(doc).split())
    pictures = webpage.pictures([doc], "light"), webpage.pictures([doc], "dark")
    page = webpage.page([doc], *pictures)
    assert "token 1, “&lt;s&gt;”" in page
    assert "Infinity" not in page


def test_eigenvalues_in_frames(seed):
    """Alike layers share a frame; one of another size has its own, and rare ones fall outside."""
    random = np.random.default_rng(seed)
    real, imag = np.clip(random.normal(size=(2, 6, 400)), -3, 3)
    values = 1 + 0.3 * (real + 1j * imag)
    values[2] *= 10
    values[4, 0] = 30
    frames = spectra._frames(values)
    assert [shared for _, shared in frames] == [True, True, False, True, True, True]
    assert len({frame for frame, shared in frames if shared}) == 1
    for layer, ((low, high, up), _) in enumerate(frames):
        one = values[layer]
        inside = (low < one.real) & (one.real < high) & (np.abs(one.imag) < up)
        assert np.sum(~inside) == (layer == 4), layer
        assert 1 <= (high - low) / (2 * up) <= 2 + 1e-9
    # All at one point, as of layers that do nothing, is a frame too.
    (((low, high, up), shared),) = spectra._frames(np.ones((1, 5), complex))
    assert shared
    assert low < 1 < high
    assert up > 0


def test_lists_of_numbers_are_lines_of_the_file():
    doc = {"a": [1.5, None, -2e-7], "pairs": [[1, 2], [3, 4]], "text": "[\n 1,\n 2\n]", "b": ["x"]}
    text = command._json(doc)
    assert json.loads(text) == doc
    assert '"a": [1.5, null, -2e-07],' in text
    assert "[1, 2],\n" in text


def test_pairs_without_a_step_are_counted():
    doc = example()
    step = doc["measures"]["step"]["lines"]["attention"]
    assert "ρ + c" not in report.table(doc)
    step["outside"], step["tokens"] = [0, 3], [4, 1]
    said = " ".join(report.table(doc).split())
    assert "Attention: ρ + c ≤ 0 for 3 of 8 (token, layer) pairs, in layer 2." in said
    doc["measures"]["norm"]["lines"]["state"]["tokens"] = [4, 4, 2]
    assert "Residual norm (state): 2 values are not finite and left out." in report.table(doc)


def test_values_that_do_not_exist_are_dots_and_gaps():
    doc = example()
    for stat in STATISTICS:
        doc["measures"]["step"]["lines"]["attention"][stat] = [None, None]
    rows = report.table(doc).splitlines()[3:6]
    assert [row.split() for row in rows] == [
        ["embed", "1.000", "·", "1.000", "1.000"],
        ["1", "2.000", "·", "2.000", "2.000"],
        ["2", "3.000", "·", "3.000", "3.000"],
    ]  # fmt: skip
    pictures = webpage.pictures([doc], "light"), webpage.pictures([doc], "dark")
    page = webpage.page([doc], *pictures)
    assert "<m>" not in page
    assert "&lt;m&gt;" in page
    assert "<span>&lt;s&gt;</span>" in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "·"),
        (0.0, "0.000"),
        (-0.25, "-0.250"),
        (12.345, "12.35"),
        (-123.456, "-123.5"),
        (1234.5, "1234"),
        (-9999.9, "-1.0e4"),
        (123456.0, "1.2e5"),
        (-5.7e-6, "-5.7e-6"),
        (-5.7e-10, "-6e-10"),
        (1e-30, "1.0e-30"),
        (12, "12"),
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown
    assert len(shown) <= 7
