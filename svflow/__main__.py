"""`python -m svflow`: the portrait of a model's dynamics, as a table, a page and a JSON file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from svflow import page, report
from svflow.data import PASSAGE, default_model_path
from svflow.models.config import TransformerConfig
from svflow.models.loading import load, opened
from svflow.models.tokenizer import load_tokenizer
from svflow.models.transformer import Transformer, indices_of
from svflow.panels import PANELS, depth
from svflow.portrait import portrait
from svflow.spectra.controls import untrained

FILES = (
    "index.html",
    "portrait.json",
    *(
        f"{key}{place}.png"
        for panel in (depth, *PANELS.values())
        for key in panel.PICTURES
        for place in ("", ".2")
    ),
)
"""Every name that is written; nothing else in the folder is touched."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; 0, or 2 for bad input, or 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except (ValueError, OSError) as error:
        print(f"svflow: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("svflow: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="svflow",
        description="The portrait of a transformer's dynamics on one text: a table by layer, "
        "an HTML page with figures, and every number as JSON.",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a folder with config.json and weights, a .gguf file, or a Hugging Face hub id; "
        "by default the small model that comes with svflow; two are shown side by side",
    )
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="the model beside the same architecture with random weights, of seed 1: the untrained "
        "companions inside a portrait have seed 0",
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--text",
        help="the text, by default a built-in passage; no begin-of-text token is added, but "
        "special tokens that are written out, such as <s>, are recognised",
    )
    given.add_argument(
        "--ids", help="token ids instead of a text, separated by commas: needs no tokenizer"
    )
    parser.add_argument("--out", default="portrait", type=Path, help="folder (default: portrait)")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="cut the text to its first N tokens"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="of weights and states (default: float32)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="of each random control of the spectra (default: 640 / width, from 1 to 5)",
    )
    for panel in PANELS.values():
        parser.add_argument(f"--no-{panel.KEY}", action="store_true", help=panel.SWITCH)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        raise ValueError(f"--max-tokens must be at least 2, got {arguments.max_tokens}")
    if arguments.draws is not None and arguments.draws < 1:
        raise ValueError(f"--draws must be at least 1, got {arguments.draws}")
    if len(arguments.models) > 2:
        raise ValueError(f"one model, or two to compare, not {len(arguments.models)}")
    if arguments.untrained and len(arguments.models) > 1:
        raise ValueError("--untrained compares one model with itself, and two were given")
    with _publish(arguments.out) as scratch:
        if arguments.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        texts = []  # of every model, before the first is measured
        for given in arguments.models or [None]:
            try:
                texts.append(_text(default_model_path() if given is None else given, arguments))
            except ValueError as error:
                several = len(arguments.models) > 1
                raise ValueError(f"{_name(given)}: {error}" if several else error) from error
        docs = []
        for given, (source, ids, said) in zip(arguments.models or [None], texts):
            model, name = load(source, dtype=jnp.dtype(arguments.dtype)), _name(given)
            docs.append(_document(model, ids, arguments, name=name, **said))
            if arguments.untrained:
                fresh = untrained(1, model)
                docs.append(_document(fresh, ids, arguments, name=f"{name}, untrained", **said))
        light, dark = page.pictures(docs, "light"), page.pictures(docs, "dark")
        for place, drawn in zip(("", ".2"), light):
            for key, png in drawn.items():
                (scratch / f"{key}{place}.png").write_bytes(png)
        whole = docs[0] if len(docs) == 1 else report.comparison(docs)
        (scratch / "portrait.json").write_text(_json(whole) + "\n", encoding="utf-8")
        (scratch / "index.html").write_text(page.page(docs, light, dark), encoding="utf-8")
    for doc in docs:
        model = doc["model"]
        print(
            f"{model['name']}: {model['family']}, {model['layers']} layers, width "
            f"{model['width']}, {len(doc['ids'])} tokens, {arguments.dtype} on {doc['device']}"
            f"\n\n{report.table(doc)}\n"
        )
    count = sum(map(len, light))
    print(f"{arguments.out / 'index.html'}, portrait.json and {count} figures")


def _document(
    model: Transformer, ids: np.ndarray, arguments: argparse.Namespace, **said: Any
) -> dict[str, Any]:
    """The portrait of one model; `said` is its name, text, pieces and what was cut."""
    bar = functools.partial(tqdm, desc="layers", delay=2, leave=False, disable=None)
    found = portrait(model, ids, progress=bar)
    panels = {
        key: _measured(panel, model, ids, arguments)
        for key, panel in PANELS.items()
        if not getattr(arguments, f"no_{key}")
        and _installed(panel)
        and _fits(panel, len(ids), model.flow.width)
    }
    return report.document(found, model, ids, panels=panels, **said)


def _installed(panel: ModuleType) -> bool:
    if panel.EXTRA is None or all(map(importlib.util.find_spec, panel.EXTRA[1])):
        return True
    print(
        f"svflow: {panel.KEY} is left out: it needs pip install 'svflow[{panel.EXTRA[0]}]'",
        file=sys.stderr,
    )
    return False


def _fits(panel: ModuleType, tokens: int, width: int) -> bool:
    if tokens >= panel.LEAST[0] and width >= panel.LEAST[1]:
        return True
    print(
        f"svflow: {panel.KEY} is left out: it needs {panel.LEAST[0]} tokens and a width of "
        f"{panel.LEAST[1]}, not {tokens} and {width}",
        file=sys.stderr,
    )
    return False


def _measured(
    panel: ModuleType, model: Transformer, ids: np.ndarray, arguments: argparse.Namespace
) -> Any:
    bar = functools.partial(tqdm, desc=panel.KEY, delay=2, leave=False, disable=None)
    options = {name: getattr(arguments, name) for name in panel.OPTIONS}
    try:
        return panel.measure(model, ids, progress=bar, **options)
    except (ValueError, MemoryError) as error:
        raise ValueError(f"{error}; --no-{panel.KEY} leaves this part out") from error


def _json(doc: dict[str, Any]) -> str:
    """Indented, but every list of numbers on one line."""
    text = json.dumps(doc, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a JSON string, where it is written \\n.
    return re.sub(
        r"\[\n\s*([^][{}\"]+?)\n\s*\]",
        lambda match: f"[{' '.join(match[1].split())}]",
        text,
    )


def _name(model: str | None) -> str:
    if model is None:
        return "svflow's default model"
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def _text(source, arguments) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """The source, the ids that fit its model, and the text, pieces and what was cut.

    Nothing but the head of its files is read.
    """
    config = opened(source, jnp.dtype(arguments.dtype)).config
    text, ids, pieces = _tokens(source, arguments)
    most = arguments.max_tokens
    own = arguments.text is None and arguments.ids is None
    ids, cut_from = _fit(config, ids, most, cuts=own and most is None)
    indices_of(ids, config.vocab_size, "id", "vocabulary")
    if len(ids) < 2:
        raise ValueError("a portrait needs at least two tokens, got one")
    return source, ids, dict(text=text, pieces=pieces[: len(ids)], cut_from=cut_from)


def _tokens(source, arguments) -> tuple[str | None, np.ndarray, list[str]]:
    """The text (None for ids), its ids, and a readable piece for each."""
    if arguments.ids is not None:
        if not re.fullmatch(r"\s*-?\d+(\s*[,\s]\s*-?\d+)*\s*", arguments.ids):
            raise ValueError(f"--ids are integers separated by commas, got {arguments.ids!r}")
        numbers = [int(word) for word in re.findall(r"-?\d+", arguments.ids)]
        if max(map(abs, numbers)) >= 2**31:
            raise ValueError(f"id {max(numbers, key=abs)} is outside every vocabulary")
        return None, np.array(numbers, np.int32), [str(number) for number in numbers]
    text = PASSAGE if arguments.text is None else arguments.text
    if not text.strip():
        raise ValueError("the text is empty")
    try:
        tokenizer = load_tokenizer(source)
    except FileNotFoundError as error:
        if not Path(source).expanduser().exists():
            raise
        raise FileNotFoundError(f"{error}; or give token ids with --ids") from error
    ids = tokenizer.encode(text)
    return text, ids, tokenizer.tokens(ids)


def _fit(
    config: TransformerConfig, ids: np.ndarray, most: int | None, *, cuts: bool
) -> tuple[np.ndarray, int | None]:
    """The ids that fit, and how many there were if they were cut; `cuts`: to the model's room."""
    room = config.hf.get("max_position_embeddings")
    if config.positions:
        room = config.positions - config.position_offset
    if cuts:
        most = room
    if most is not None and len(ids) > most:
        print(f"svflow: {len(ids)} tokens, cut to the first {most}", file=sys.stderr)
        ids, cut_from = ids[:most], len(ids)
    else:
        cut_from = None
    if room is not None and len(ids) > room:
        raise ValueError(
            f"{len(ids)} tokens, but the model has {room} positions; --max-tokens {room} cuts the "
            "text"
        )
    return ids, cut_from


@contextlib.contextmanager
def _publish(out: Path) -> Iterator[Path]:
    """A folder to write into; its files go to `out` together once the block has ended well.

    Files of ours that are there already are replaced, or removed where this run has none by that
    name: an old figure must not stand beside new ones.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder")
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=out) as scratch:
            yield Path(scratch)
            for name in FILES:
                new = Path(scratch, name)
                if new.exists():
                    os.replace(new, out / name)
                else:
                    (out / name).unlink(missing_ok=True)
    except BaseException:
        if fresh:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


if __name__ == "__main__":
    sys.exit(main())
