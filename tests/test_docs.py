"""Every public name is documented, examples run, and what the documentation names exists."""

import ast
import doctest
import importlib.util
import inspect
import itertools
import json
import re
import sys
import types
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from configs import FAMILY_CONFIGS, tiny_model

import svflow as sv
import universal as ut
from svflow.models.families import FAMILIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "notebooks" / "docs"
SOURCES = sorted(path for name in ("svflow", "universal") for path in (ROOT / name).rglob("*.py"))
PICTURES = (
    "svflow.plotting",
    "svflow.power.steering_plot",
    "svflow.score.shuffle_plot",
    "svflow.topology.topology_plot",
    "universal.bounds_plot",
    "universal.training_plot",
    "universal.tree_plot",
)


def public(module):
    """`__all__`, or the functions and classes that a module defines."""
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def modules():
    """What is public: the two packages, the modules in their `__all__`, and pictures, by name."""
    found, waiting = {}, [sv, ut, *map(importlib.import_module, PICTURES)]
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            values = (getattr(module, name) for name in public(module))
            waiting.extend(value for value in values if isinstance(value, types.ModuleType))
    return found


MODULES = modules()
MAPS = ("svflow", "svflow.power", "svflow.score", "svflow.spectra", "svflow.topology", "universal")


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def constants():
    """Names that are assigned in a module and have a string below them."""
    found = set()
    for path in SOURCES:
        body = tree(path).body
        for node, after in itertools.pairwise(body):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(after, ast.Expr) and isinstance(targets[0], ast.Name):
                found.add(targets[0].id)
    return found


def undocumented(name, value):
    """The names without a docstring in a public object: itself, its methods and properties."""
    if isinstance(value, types.ModuleType):
        return []  # One of MODULES.
    if not callable(value):
        return [] if name in constants() else [name]
    missing = []
    # What NamedTuple and dataclass write by themselves says nothing.
    if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}("):
        missing.append(name)
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        is_method = inspect.isfunction(member) or isinstance(
            member, property | classmethod | staticmethod
        )
        # A method that a base class defines is documented there.
        if is_method and not key.startswith("_") and not inspect.getdoc(getattr(value, key)):
            missing.append(f"{name}.{key}")
    return missing


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    module = MODULES[module]
    assert module.__doc__
    names = public(module)
    assert names
    missing = [one for name in names for one in undocumented(name, getattr(module, name))]
    assert not missing


def test_what_has_no_docstring_is_found():
    class Bare:
        @property
        def size(self):
            return 0

        def order(self):
            """Documented."""

    assert undocumented("Bare", Bare) == ["Bare", "Bare.size"]
    assert undocumented("THING", (1, 2)) == ["THING"]


def documented(text):
    """The names that a docstring's "Arguments:" describe: "a, b: what", indented once."""
    section = re.search(r"^Arguments:\n((?: {4}.*\n|\n)*)", text + "\n", re.M)
    lines = section[1].splitlines() if section else ()
    heads = (re.match(r" {4}((?:\w+(?:, )?)+): ", line) for line in lines)
    return {name for head in heads if head for name in head[1].split(", ")}


@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_those_of_the_signature(module):
    for name in public(MODULES[module]):
        value = getattr(MODULES[module], name)
        if not callable(value) or value.__module__.startswith("jax"):
            continue
        signed = value.__init__ if inspect.isclass(value) else value
        parameters = set(inspect.signature(signed).parameters)
        fields = set(getattr(value, "__annotations__", ()))
        assert documented(inspect.getdoc(value)) <= parameters | fields, name


@pytest.mark.parametrize("module", MAPS)
def test_a_packages_docstring_is_its_map(module):
    module = MODULES[module]
    assert not [name for name in module.__all__ if f"`{name}`" not in module.__doc__]


def examples():
    return [path for path in SOURCES if ">>> " in path.read_text(encoding="utf-8")]


@pytest.fixture
def compiled_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("path", examples(), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    # No example is overlooked, for instance of a jitted function.
    written = re.findall(r"^ *>>> ", path.read_text(encoding="utf-8"), re.M)
    assert sum(len(test.examples) for test in found) == len(written)
    output = []
    for test in found:
        doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert not output, "".join(output)


def test_where_one_starts_there_is_an_example():
    names = """
        sv.load sv.simulate sv.geometry.polar sv.jacobian sv.layer_jacobians sv.eigvals sv.measures
        sv.cumulative sv.schur_normal sv.power.PowerFlow sv.power.predict sv.score.VMFMixture
        sv.score.ScoreFlow sv.topology.graph ut.sparse ut.program ut.machine_width ut.k_hop ut.train
    """
    for name in names.split():
        assert ">>> " in resolve(name).__doc__, name


@pytest.mark.usefixtures("compiled_fast")
def test_the_first_hour_runs():
    text = (DOCS / "first_hour.md").read_text(encoding="utf-8")
    namespace: dict = {"__name__": "first_hour"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, "first_hour.md", "exec"), namespace)
    assert namespace["Js"].shape == (12, 6, 2, 6, 2)
    order = np.linalg.norm(namespace["xs"].mean(axis=1), axis=-1)
    assert (np.diff(order) > 0).all()
    assert order[-1] > 0.99


# Pages.


def resolve(name):
    alias, *names = name.split(".")
    value = {"sv": sv, "ut": ut}[alias]
    for one in names:
        assert one in public(value), f"{name} is not public"
        value = getattr(value, one)
    return value


def prose(path):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


MARKDOWN = sorted(
    path
    for pattern in ("*.md", "benchmarks/**/*.md", "notebooks/**/*.md", "tests/data/*.md")
    for path in ROOT.glob(pattern)
)
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]


def test_every_public_module_is_on_a_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    shown = re.findall(r"^\{\{ api: (\S+) \}\}$", text, re.M)
    assert sorted(shown) == sorted(MODULES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_prose_are_public(path):
    for name in re.findall(r"`((?:sv|ut)\.[\w.]*\w)`", prose(path)):
        resolve(name)


def defined(path):
    return {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}


def test_claims_name_tests_that_exist():
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    tests = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(tests) > 30
    for file, name in tests:
        assert name in defined(ROOT / "tests" / file), f"{file}::{name}"
    for row in rows:  # claim, function, test, number, verdict
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 5, row
        assert all(cells), row
        if cells[0] != "claim":
            assert cells[1] == "the same" or re.search(r"`(sv|ut)\.", cells[1]), row
            assert cells[2] == "the same" or "::" in cells[2], row


def test_claimed_numbers_are_those_of_the_page_that_is_linked():
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([^|]*)\(measured/(\w+)\.md\)", text)
    assert len(rows) > 3
    for cell, page in rows:
        found = (ROOT / "benchmarks" / "results" / f"{page}.md").read_text(encoding="utf-8")
        numbers = {float(number) for number in re.findall(r"\d*\.?\d+", found)}
        for number in re.findall(r"\d*\.?\d+", cell.partition("[")[0]):
            assert float(number) in numbers, f"{number} is not in {page}.md"


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = prose(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if path.is_relative_to(DOCS) and not place.exists():
            # Pages that the site makes of other files: see notebooks/docs/hooks.py.
            folder, name = Path(file).parent.name, Path(file).name
            place = {
                "measured": ROOT / "benchmarks" / "results" / name,
                "notebooks": (ROOT / "notebooks" / name).with_suffix(".ipynb"),
                "": ROOT / name.upper().replace(".MD", ".md"),
            }[folder]
        assert place.exists(), target
        if anchor and not path.is_relative_to(DOCS):
            headings = re.findall(r"^#+ (.*)$", prose(place), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_files_that_the_tour_names_exist():
    text = prose(ROOT / "CONTRIBUTING.md")
    named = re.findall(r"`((?:svflow|universal|tests|benchmarks|notebooks|\.ci)/[\w./-]*)`", text)
    assert len(named) > 40
    new = "svflow/models/families/smollm3.py"
    assert not [name for name in named if name != new and not (ROOT / name).exists()]


def test_the_family_that_is_worked_out_reads_and_writes(monkeypatch, tmp_path):
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    namespace = {"__name__": "smollm3"}
    exec(compile(block[1], "smollm3.py", "exec"), namespace)
    monkeypatch.setitem(FAMILIES, "smollm3", namespace["SMOLLM3"])
    hf = {**FAMILY_CONFIGS["llama"], "model_type": "smollm3", "no_rope_layer_interval": 2}
    config = sv.TransformerConfig.from_hf(hf)
    assert config.rope_of == (0, -1, 0)
    sliding = sv.TransformerConfig.from_hf({**hf, "use_sliding_window": True, "sliding_window": 3})
    assert sliding.windows == (0, 3, 0)
    with pytest.raises(ValueError, match="'no_rope_layers' has 2 entries for 3 layers"):
        sv.TransformerConfig.from_hf({**hf, "no_rope_layers": [1, 0]})
    # The same tensors under either name: only the positions of the second layer differ.
    sv.save(tiny_model("llama"), tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(config.source)
    model = sv.load(tmp_path / "llama", dtype=np.float64)
    assert model.config == config
    sv.save(model, tmp_path / "again")
    first, second = (tmp_path / name / "model.safetensors" for name in ("llama", "again"))
    assert first.read_bytes() == second.read_bytes()


# The module that makes pages of sources, without importing them.


@pytest.fixture
def hooks(monkeypatch):
    """`notebooks/docs/hooks.py` without what only a build needs."""
    for name, given in (
        ("latex2mathml", {}),
        ("latex2mathml.converter", {"convert": lambda latex, display: f"<math>{latex}</math>"}),
        ("mkdocs", {}),
        ("mkdocs.exceptions", {"PluginError": ValueError}),
        ("mkdocs.structure", {}),
        ("mkdocs.structure.files", {"File": None}),
    ):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**given))
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_references_are_of_every_public_name(hooks):
    for name, module in MODULES.items():
        assert sorted(hooks.public(name)) == sorted(public(module))
        text = hooks.reference(name)
        for one in public(module):
            path = hooks.where(name, one)
            if isinstance(getattr(module, one), types.ModuleType):
                assert path == getattr(module, one).__name__
                continue
            place, _, last = path.rpartition(".")
            assert getattr(importlib.import_module(place), last) is getattr(module, one), path
            assert hooks.summary(hooks.definition(path)), path
            there = name != "svflow" or one not in sv.spectra.__all__
            assert (f"::: {path}\n" in text) == there, path


def test_pages_of_other_files(hooks, caplog):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))

    def made(text):
        return hooks.on_page_markdown(text, page, None, None)

    assert made("`sv.power.predict`, `sv.topology`") == (
        "[`sv.power.predict`][svflow.power.theory.predict], [`sv.topology`][svflow.topology]"
    )
    assert made("```\n`sv.power`\n```") == "```\n`sv.power`\n```"
    assert not caplog.records
    made("`sv.nothing`")
    assert "page.md: sv.nothing is not public" in caplog.text
    assert made("[a](benchmarks/results/a.md) [b](notebooks/b.ipynb) [c](CHANGELOG.md)") == (
        "[a](measured/a.md) [b](notebooks/b.md) [c](changelog.md)"
    )
    assert made("{{ readme }}").startswith("# svflow\n")
    with pytest.raises(ValueError, match=r"README\.md has no section 'Nothing'"):
        made("{{ readme: Nothing }}")
    with pytest.raises(ValueError, match="there is no directive 'nothing'"):
        made("{{ nothing }}")


def test_formulas(hooks, caplog):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    text = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p>'
    assert hooks.on_page_content(text, page, None, None) == "<p><math>a < b</math></p>"
    text = '<div class="arithmatex">\\[\\nothing\\]</div>'
    hooks.on_page_content(text, page, None, None)
    assert "not all of" in caplog.text


def test_a_notebook_as_a_page(hooks, tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": "f(1)",
            "outputs": [
                {"output_type": "stream", "text": ["one\n"]},
                {"data": {"text/plain": "<Figure>", "image/png": "AAEC"}},
                {"data": {"image/svg+xml": ["<svg/>"], "text/plain": "<Figure>"}},
                {"output_type": "stream", "text": ["two\n"]},
            ],
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    text, pictures = hooks.notebook(tmp_path / "a.ipynb")
    assert text.split("\n\n") == [
        "# Title\ntext",
        "````python\nf(1)\n````",
        "![Output of the cell above](a_1_1.png)",
        "![Output of the cell above](a_1_2.svg)",
        "````text\none\ntwo\n````\n",
    ]
    assert pictures == {"a_1_1.png": bytes([0, 1, 2]), "a_1_2.svg": b"<svg/>"}


def test_a_built_site_is_checked(hooks, tmp_path, caplog):
    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="b.html#y"></a><a href="#x"></a><a href="https://e.org"></a>'
        '<link rel="canonical" href="https://e.org">'
    )
    (tmp_path / "b.html").write_text('<h1 id="y"></h1>')
    site = types.SimpleNamespace(site_dir=tmp_path)
    hooks.on_post_build(site)
    assert not caplog.records
    (tmp_path / "c.html").write_text(
        '<a href="d.html"></a><a href="b.html#z"></a><script src="https://e.org/a.js"></script>'
    )
    hooks.on_post_build(site)
    assert [record.getMessage() for record in caplog.records] == [
        "c.html loads https://e.org/a.js from the network",
        "c.html links to d.html, which does not exist",
        "c.html links to b.html#z, which has no such anchor",
    ]
