"""What MkDocs generates here: references, notebooks, results, formulas; and what it checks.

In a page's Markdown, on lines of their own,

    {{ readme }}                the README up to its first section
    {{ readme: Set up }}        one of its sections
    {{ api: svflow.power }}     the public names of a package with their docstrings
    {{ results }}               a list of the pages of benchmarks/results

and a code span such as `sv.power.predict` is a link to that name's docstring; a name that is not
public is a warning, which is an error in a strict build. Formulas, `$...$` and `$$...$$`, become
MathML. Nothing is imported: what is public, and where it is, is read from the sources.
"""

from __future__ import annotations

import ast
import base64
import functools
import html
import json
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOTEBOOKS = ROOT / "notebooks"
ALIASES = {"sv": "svflow", "ut": "universal"}
PARTS = [f"svflow.{name}" for name in ("power", "score", "spectra", "topology")]
MODULES = [  # As public names.
    *PARTS,
    *(f"svflow.{name}" for name in ("data", "geometry", "sharding", "spectra.controls")),
]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}  # Of a notebook's outputs.
LINK = re.compile(r"""(\]\(|\b(?:src|srcset)=")([^)\s"#:]+)""")

log = logging.getLogger("mkdocs.hooks")


# Pages that are made of other files.


def on_config(config):
    notebooks = [f"notebooks/{path.stem}.md" for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    if notebooks:
        place = next(i for i, entry in enumerate(config.nav) if "Parts" in entry)
        config.nav.insert(place, {"Notebooks": notebooks})
    measured = next(entry["Measured"] for entry in config.nav if "Measured" in entry)
    measured.extend(f"measured/{path.name}" for path in sorted(RESULTS.glob("*.md")))
    return config


def on_files(files, config):
    def add(uri, **source):
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, **source))

    for name, uri in PAGES.items():
        add(uri, abs_src_path=str(ROOT / name))
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.png")]):
        add(f"measured/{path.name}", abs_src_path=str(path))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = notebook(path)
        add(f"notebooks/{path.stem}.md", content=text)
        for name, data in pictures.items():
            add(f"notebooks/{name}", content=data)
    for name in ("README.md", *PAGES):  # What these show lies beside them in the site, too.
        for _, target in LINK.findall((ROOT / name).read_text(encoding="utf-8")):
            if (ROOT / target).is_file() and Path(target).suffix not in (".md", ".ipynb"):
                add(target, abs_src_path=str(ROOT / target))
    return files


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures that it shows by name."""
    parts, pictures = [], {}
    for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"````python\n{source}\n````")
        printed = ""
        for j, output in enumerate(cell.get("outputs", ())):
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next((kind for kind in PICTURES if kind in data), None)
            if kind is None:
                printed += "".join(data.get("text/plain", ""))
                continue
            name, content = f"{path.stem}_{i}_{j}.{PICTURES[kind]}", "".join(data[kind])
            is_text = kind.endswith("xml")
            pictures[name] = content.encode() if is_text else base64.b64decode(content)
            parts.append(f"![Output of the cell above]({name})")
        if printed.strip():
            parts.append(f"````text\n{printed.rstrip()}\n````")
    return "\n\n".join(parts) + "\n", pictures


# What stands in a page's Markdown.


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    lines, fence = [], None
    for line in markdown.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence is None and (found := re.fullmatch(r"\{\{ (\w+)(?:: (.+))? \}\}", line)):
            text = directive(*found.groups())
            lines.append(on_page_markdown(text, page, config, files))
            continue
        if mark and (fence is None or line.strip() == fence):
            fence = mark[1] if fence is None else None
        elif fence is None and not line.startswith("    "):
            line = LINK.sub(relink, line) if "/" not in uri else line
            line = re.sub(r"(?<!\[)`((?:sv|ut)\.[\w.]*\w)`", functools.partial(refer, uri), line)
        lines.append(line)
    return "\n".join(lines)


def directive(name: str, argument: str | None) -> str:
    if name == "readme":
        return readme(argument)
    if name == "api" and argument:
        return reference(argument)
    if name == "results":
        pages = sorted(RESULTS.glob("*.md"))
        return "\n".join(f"- [{title(p)}](measured/{p.name})" for p in pages)
    raise PluginError(f"there is no directive {name!r}")


def title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").lstrip().splitlines()[0]
    return first[2:] if first.startswith("# ") else path.stem.replace("_", " ").capitalize()


def readme(section: str | None) -> str:
    """A section of the README, with its heading; None for what stands before the first."""
    text = re.split(r"^(?=## )", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    if section is None:
        return text[0]
    for part in text[1:]:
        if part.partition("\n")[0] == f"## {section}":
            return part
    raise PluginError(f"README.md has no section {section!r}")


def relink(match: re.Match) -> str:
    """A link of the README or its neighbours to a file of the repository, as one of the site."""
    opening, target = match.groups()
    for folder, place in (("benchmarks/results/", "measured/"), ("notebooks/", "notebooks/")):
        if target.startswith(folder) and target.endswith((".md", ".ipynb")):
            name = target.removeprefix(folder).removesuffix(".ipynb").removesuffix(".md")
            return f"{opening}{place}{name}.md"
    return opening + {**PAGES, "README.md": "index.md"}.get(target, target)


def refer(uri: str, match: re.Match) -> str:
    alias, *names = match[1].split(".")
    path = ALIASES[alias]
    for name in names:
        if name not in public(path):
            log.warning("%s: %s is not public", uri, match[1])
            return match[0]
        path = where(path, name)
    return f"[{match[0]}][{path}]"


# References.


@functools.cache
def tree(module: str) -> ast.Module:
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def is_module(path: str) -> bool:
    place = ROOT / Path(*path.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def public(module: str) -> list[str]:
    """`__all__` of a module, or what it defines under names without an underscore."""
    if not is_module(module):
        return []
    names = []
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__":
                return ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names


def where(module: str, name: str) -> str:
    """The module or the definition that a public name stands for: what griffe knows it by."""
    for node in tree(module).body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if any((alias.asname or alias.name) == name for alias in node.names):
            path = f"{node.module}.{name}"
            return path if path in MODULES else where(node.module, name)
    return f"{module}.{name}"


def reference(module: str) -> str:
    """The public names of a module: a table of what they are, then their docstrings.

    Modules among them have sections of their own, and svflow leaves its spectra to their page.
    """
    names = public(module)
    if module == "svflow":
        names = [name for name in names if name not in public("svflow.spectra")]
    paths = {name: path for name in names if (path := where(module, name)) not in MODULES}
    found = {name: definition(path) for name, path in paths.items()}

    def order(name):
        kinds = (ast.FunctionDef, ast.ClassDef)
        kind = next((i for i, k in enumerate(kinds) if isinstance(found[name], k)), len(kinds))
        return kind, name.lower()

    short = {path: alias for alias, path in ALIASES.items()}.get(module)
    if short is None and module in MODULES:
        short = module.replace("svflow.", "sv.").replace("spectra.controls", "controls")
    rows, blocks = ["| name | |", "|---|---|"], []
    for name in sorted(paths, key=order):
        rows.append(f"| [`{name}`][{paths[name]}] | {summary(found[name])} |")
        blocks.append(
            f"::: {paths[name]}\n    options:\n      heading: {short or module}.{name}\n"
            f"      toc_label: {name}\n"
        )
    return "\n".join([*rows, "", *blocks])


def definition(path: str) -> ast.AST:
    """The node that defines a name; of a constant, what is said below it."""
    module, name = path.rsplit(".", 1)
    body = tree(module).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return after if isinstance(after, ast.Expr) else node
    raise PluginError(f"{path} is not defined")


def summary(node: ast.AST) -> str:
    """The first sentence of what a node says of itself, as a cell of a table."""
    if isinstance(node, ast.Expr):
        text = ast.literal_eval(node.value)
    else:
        text = ast.get_docstring(node) if hasattr(node, "body") else None
    first = re.split(r"\n\n|(?<=[^.]\.)\s+(?=[A-Z\"`])", (text or "").strip(), maxsplit=1)[0]
    return " ".join(first.rstrip(":,").split()).replace("|", r"\|").replace("*", r"\*")


# Formulas.


def on_page_content(content, page, config, files):
    def mathml(match):
        display = match[1] == "div"
        latex = html.unescape(match[2]).strip()[2:-2]
        formula = convert(latex, display="block" if display else "inline")
        if "\\" in formula:
            log.warning("%s: not all of %s is understood", page.file.src_uri, latex)
        bar = '<mo stretchy="false"'  # A bar of |x| is no operator between two things.
        return formula.replace(f"{bar}>&#x0007C;", f'{bar} lspace="0" rspace="0">&#x0007C;')

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', mathml, content, flags=re.DOTALL)


# What the built site has to be: every link leads somewhere, and nothing comes from the network.


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.update(found[key] for key in ("id", "name") if found.get(key))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag in ("link", "script", "img", "source", "iframe"):
            relation = found.get("rel") or ""
            if "canonical" not in relation:
                self.loads.extend(found[key] for key in ("href", "src") if found.get(key))


def on_post_build(config):
    site = Path(config.site_dir)
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, found in pages.items():
        name = path.relative_to(site)
        for link in found.loads:
            if urlsplit(link).scheme in ("http", "https") or link.startswith("//"):
                log.warning("%s loads %s from the network", name, link)
        for link in (*found.links, *found.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                log.warning("%s links to %s, which does not exist", name, link)
            elif target in pages and unquote(parts.fragment) not in {"", *pages[target].ids}:
                log.warning("%s links to %s, which has no such anchor", name, link)
