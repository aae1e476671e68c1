"""The table of claims: what it refuses, what it times, and some rows at their quick sizes."""

import dataclasses
import importlib
import json
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import __main__, device, growth, machine, rows, table, timing
from benchmarks.pages import MARK, write_tables

RESULTS = Path(__main__.__file__).parent / "results"

# Some that need no other library; `python -m benchmarks --quick` runs them all.
QUICK = (
    "power/runs",
    "machines/program",
    "topology/graph",
)
ROW = {
    *("name", "claim", "status", "tolerance", "error", "compile_s", "median_s", "best_s"),
    *("peak_bytes", "most_peak_bytes", "most_s", "load", "rounds", "seconds", "peers"),
}
PEER = {
    *("name", "missing", "error", "median_s", "best_s", "peak_bytes", "ratio", "most", "holds"),
    *("times", "seconds"),
}


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What other tests have compiled; and nothing waits."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(timing, "PAUSE", 0.0)


@pytest.fixture
def calls():
    return dict(ours=0, theirs=0)


def made(calls, theirs=1.0, **options):
    """A row whose result is 1."""

    def side(name, value):
        def run():
            calls[name] += 1
            return np.asarray([value, 1.0])

        return run

    def case():
        peer = rows.Peer(lambda: side("theirs", theirs), most=0.5, **options.pop("peer", {}))
        return rows.Case(side("ours", 1.0), dict(them=peer), **options.pop("case", {}))

    settings = dict(full={}, quick={}, tolerance=1e-4) | options.pop("row", {})
    return rows.Row("made/up", "a claim", case, **settings)


def slower(monkeypatch, ours, theirs):
    """Times that the race would give."""
    found = {"": [ours, 2 * ours, 9 * ours], "them": [theirs, 2 * theirs, 9 * theirs]}
    monkeypatch.setattr(timing, "turns", lambda sides, rounds, known: {k: found[k] for k in sides})


@pytest.mark.parametrize("name", QUICK)
def test_quick_rows_are_right(name):
    found = rows.measured(rows.all_rows()[name], quick=True)
    assert found["status"] == "right"
    errors = [found["error"], *(peer["error"] for peer in found["peers"])]
    assert max(e for e in errors if e is not None) <= found["tolerance"]
    assert found["median_s"] is None


def test_rows_are_declared_once_and_in_words():
    found = rows.all_rows()
    assert {name.split("/")[0] for name in found} == set(rows.MODULES)
    assert all(row.claim for row in found.values())
    with pytest.raises(ValueError, match="two rows are called 'forward/gpt2-64'"):
        rows.row("forward/gpt2-64", "", rows.Case, full={}, quick={}, tolerance=0)
    assert [row.name for row in rows.chosen(["lens", "spectra/causal"])] == [
        "spectra/causal",
        "lens/smollm2",
    ]


@pytest.mark.parametrize("theirs", [1.001, float("nan")])
def test_a_wrong_result_is_not_timed(calls, theirs, monkeypatch):
    monkeypatch.setattr(timing, "turns", None)  # would fail
    found = rows.measured(made(calls, theirs=theirs, case=dict(check=lambda result: 0.0)))
    assert found["status"] == "wrong"
    assert found["peers"][0]["ratio"] is None
    if theirs == 1.001:
        # 1e-3 / sqrt((1.001² + 1) / 2)
        assert found["peers"][0]["error"] == pytest.approx(9.995e-4, rel=1e-4)
    assert "WRONG, not timed" in table.lines(found)
    assert rows.measured(made(calls, theirs=1.00001), quick=True)["status"] == "right"


def test_a_check_of_ours_counts_as_well(calls):
    checked = dict(case=dict(check=lambda result: 1.0))
    assert rows.measured(made(calls, **checked))["status"] == "wrong"


def test_what_nothing_can_check_is_not_timed(calls, monkeypatch):
    monkeypatch.setattr(timing, "turns", None)
    found = rows.measured(made(calls, peer=dict(error=None)))
    assert found["status"] == "unchecked"


def test_ratios_and_limits(calls, monkeypatch):
    slower(monkeypatch, 0.1, 0.2)
    limits = dict(row=dict(most_peak=1e9, most_seconds=0.1))
    found = rows.measured(made(calls, peer=dict(times=3.0), **limits))
    peer = found["peers"][0]
    assert (found["median_s"], found["best_s"]) == pytest.approx((0.2, 0.1))
    assert (peer["median_s"], peer["best_s"]) == pytest.approx((1.2, 0.6))
    assert peer["ratio"] == pytest.approx(1 / 6)
    assert peer["seconds"] == pytest.approx([0.6, 1.2, 5.4])
    assert found["seconds"] == [0.1, 0.2, 0.9]
    assert "them, timed 1/3  1.2 s" in table.lines(found)
    assert peer["holds"] is True
    assert found["holds_peak"] is True
    assert found["holds_s"] is False
    assert "ours <= 100 ms: NOT HELD" in table.lines(found)
    assert "peak <= 1.00 GB  ours" in table.lines(found)
    slower(monkeypatch, 0.1, 0.15)
    found = rows.measured(made(calls))
    assert found["peers"][0]["holds"] is False
    assert "NOT HELD" in table.table([found])


def test_a_missing_peer_is_a_line_that_says_so(calls, monkeypatch):
    slower(monkeypatch, 0.1, 0.2)

    def build():
        raise ModuleNotFoundError("No module", name="torchdiffeq")

    def old():
        raise ImportError("cannot import name 'odeint'", name="torchdiffeq._impl")

    def case():
        peers = dict(them=rows.Peer(build), others=rows.Peer(old))
        return rows.Case(lambda: 1.0, peers, check=lambda _: 0.0)

    row = rows.Row("made/up", "a claim", case, full={}, quick={}, tolerance=0.0)
    found = rows.measured(row)
    assert found["status"] == "right"
    assert found["median_s"] == pytest.approx(0.2)
    assert found["peers"][0]["missing"] == "torchdiffeq is not installed"
    assert "torchdiffeq is not installed" in table.table([found])
    said = "torchdiffeq cannot be used: cannot import name 'odeint'"
    assert found["peers"][1]["missing"] == said

    def broken():
        raise ModuleNotFoundError("No module", name="benchmarks.nothing")

    with pytest.raises(ModuleNotFoundError):
        rows.measured(rows.Row("made/up", "", broken, full={}, quick={}, tolerance=0.0))


def test_a_row_without_its_file_says_so():
    found = rows.measured(rows.all_rows()["loading/gguf"], quick=True)
    assert (found["status"], found["missing"]) == ("missing", "needs --gguf FILE")
    assert "needs --gguf FILE" in table.lines(found)


def test_the_command(tmp_path, capsys, monkeypatch, calls):
    assert __main__.main(["--list", "topology"]) == 0
    assert capsys.readouterr().out.startswith("topology/graph  graph of 4096")
    assert __main__.main(["nothing"]) == 2
    assert "no row or group 'nothing'; there are forward/gpt2-64" in capsys.readouterr().err
    assert __main__.main(["--gguf", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err
    assert __main__.main(["--rounds", "0"]) == 2
    assert "--rounds must be at least 1" in capsys.readouterr().err

    nowhere = tmp_path / "no folder" / "found.json"
    with monkeypatch.context() as patched:
        patched.setattr(rows, "measured", None)  # so that nothing measured is lost
        for place in (tmp_path, nowhere):
            assert __main__.main(["--json", str(place)]) == 2
            assert str(place) in capsys.readouterr().err
    for wrong, said in ((["--out", str(nowhere)], str(nowhere)), (["--rounds", "0"], "--rounds")):
        with pytest.raises(SystemExit):
            growth.main(wrong)
        assert said in capsys.readouterr().err
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert __main__.main(["--gguf", str(tmp_path / "bad.gguf")]) == 2
    assert "bad.gguf" in capsys.readouterr().err

    file = tmp_path / "found.json"
    monkeypatch.setattr(rows, "chosen", lambda names: [made(calls)])
    assert __main__.main(["--json", str(file), "--rounds", "2"]) == 0
    assert re.search(r"made/up\n?.*them +\S+ \S+ +\S+ +<= 0.5", capsys.readouterr().out, re.DOTALL)
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "quick", "rows"}
    assert {"cpu", "cores", "device", "versions"} <= set(found["machine"])
    (row,) = found["rows"]
    assert set(row) == ROW
    assert set(row["peers"][0]) == PEER
    assert set(row["load"]) == {"before", "after", "others", "busy"}
    assert row["rounds"] == 2

    monkeypatch.setattr(rows, "chosen", lambda names: [made(calls, theirs=2.0)])
    assert __main__.main(["--json", str(file)]) == 1
    assert json.loads(file.read_text())["rows"][0]["status"] == "wrong"

    # Other rows of the same machine stay, in their places; a file of another is refused.
    other = dataclasses.replace(made(calls), name="made/other")
    monkeypatch.setattr(rows, "chosen", lambda names: [other])
    assert __main__.main(["--json", str(file)]) == 0
    monkeypatch.setattr(rows, "chosen", lambda names: [made(calls)])
    assert __main__.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    both = [("made/up", "right"), ("made/other", "right")]
    assert [(row["name"], row["status"]) for row in found["rows"]] == both
    found["machine"]["cores"] += 1
    file.write_text(json.dumps(found))
    assert __main__.main(["--json", str(file)]) == 2
    assert "found.json holds a table of another machine" in capsys.readouterr().err
    assert json.loads(file.read_text()) == found
    file.write_text("{}")
    assert __main__.main(["--json", str(file)]) == 2
    assert "found.json is no table of this command" in capsys.readouterr().err


def test_both_sides_take_turns():
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    times = timing.turns(sides, 2)
    assert order == list("aabbbbaa")  # each after an untimed one of its own
    assert [len(t) for t in times.values()] == [2, 2]
    order.clear()
    timing.turns(sides, 1, known=dict(a=3.0))
    assert order == list("abb")


def test_compile_seconds_count_nested_functions_once():
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    outer = jax.jit(lambda x: inner(x) * inner(x + 1))
    x = jnp.ones(3)
    start = time.perf_counter()
    with timing.Compiling() as compiling:
        outer(x).block_until_ready()
    assert 0 < compiling.seconds <= time.perf_counter() - start
    with timing.Compiling() as compiling:
        outer(x).block_until_ready()
    assert compiling.seconds == 0
    spans = timing.Compiling()
    spans._spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]
    assert spans.seconds == 6


def test_the_peak_of_a_call():
    def big():
        np.ones(2**25)  # 256 MiB, given back
        return 1

    found = timing.peak(big)
    assert found.result == 1
    if found.bytes is None:
        pytest.skip("this kernel does not set its high-water mark back")
    assert found.bytes == pytest.approx(2**28, rel=0.1)
    assert (timing.peak(lambda: 1).bytes or 0) < 2**24


def test_others_are_not_oneself():
    with machine.Others() as others:
        total, until = 0.0, time.process_time() + 0.3
        while time.process_time() < until:
            total += 1
    if others.cores is None:
        pytest.skip("no /proc/stat")
    assert 0 <= others.cores <= (machine.cores() if others.cores < 64 else 4096)
    others._start = (0.0, 0.0, 0.0)
    others.cores = None
    assert not others.busy
    others.cores = 0.3
    assert others.busy


def test_relative_error():
    assert rows.relative([1.0, 3.0], [1.0, 2.0]) == pytest.approx(1 / np.sqrt(2.5))
    with pytest.raises(ValueError, match=r"shape \(2,\), theirs \(1, 2\)"):
        rows.relative([1.0, 3.0], [[1.0, 2.0]])


def test_growth(tmp_path, capsys):
    assert growth.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    # Twice the tokens: the products double, scores and their exponentials quadruple.
    one, two = (growth.operations("states", growth.Shape(1, 8, n, 1, 2)) for n in (4, 8))
    assert (one, two) == (24 * 4 * 64 + 4 * 16 * 8 + 32, 24 * 8 * 64 + 4 * 64 * 8 + 128)
    curve = growth.measured(growth.QUICK[0], 1)
    assert curve["values"] == (1, 2)
    assert len(curve["seconds"]) == len(curve["bytes"]) == 2
    assert curve["time_expected"] == pytest.approx(1)
    assert curve["time_exponent"] == pytest.approx(np.log2(np.divide(*curve["seconds"][::-1])))
    figure = Figure()
    growth.picture(figure, [curve], theme="light")
    labels = [axes.get_title(loc="left") for axes in figure.axes]
    assert labels[0].startswith("Forward pass, depth\n")
    assert f"{curve['memory_exponent']:.2f}, expected {curve['memory_expected']:.2f}" in labels[1]
    assert "Forward pass, depth" in growth.table([curve])


def test_the_device_against_the_cpu():
    names = (
        "eigenvalues of random matrices",
        "permutation of a seed",
        "training sequences of a seed",
    )
    lines = [line for line in device.LINES if line.name in names]
    found = device.compare(lines)
    assert all(line["right"] for line in found["lines"])
    assert found["lines"][0]["error"] > 0  # two types, not one result twice
    assert found["accelerator"] is (jax.default_backend() != "cpu")
    if not found["accelerator"]:
        assert table.device(found).startswith("No accelerator is here")
    wrong = device.Line("a wrong one", lambda dtype: jnp.full(3, 1 + (dtype == jnp.float32), dtype))
    found = device.compare([wrong])
    assert not found["lines"][0]["right"]
    assert "WRONG" in table.device(found)


def test_tables_take_the_place_of_tables(tmp_path):
    page = tmp_path / "page.md"
    write_tables(page, ["", "one"])
    assert page.read_text() == "## Tables\n\none\n"
    page.write_text("# Title\n\nA reading.\n\n" + page.read_text())
    write_tables(page, ["two", "three", ""])
    assert page.read_text() == "# Title\n\nA reading.\n\n## Tables\n\ntwo\nthree\n"
    assert __main__.main(["--page", str(page), "--list"]) == 2  # of what rows?


def test_the_page_of_programs_shows_the_kept_numbers(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    page = importlib.import_module("programs_page")
    shown = (RESULTS / "programs.md").read_text().split(MARK)[1].strip("\n").splitlines()
    assert shown == "\n".join(page.lines(RESULTS)).strip("\n").splitlines()
    assert "### small" in shown


def test_the_page_shows_the_kept_table():
    document = json.loads((RESULTS / "table.json").read_text())
    page = (RESULTS / "speed.md").read_text()
    assert page.split(MARK)[1].strip("\n").splitlines() == table.page(document)
    assert not any(row["load"]["busy"] for row in document["rows"])
    assert {row["name"] for row in document["rows"]} == set(rows.all_rows())
