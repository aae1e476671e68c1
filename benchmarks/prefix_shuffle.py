"""Prefix shuffling of checkpoints and of twins with and without norms of queries.

    python benchmarks/prefix_shuffle.py [MODELS ...] --corpus TEXT.txt [--prompts 16] [--tokens 128]
        [--suffix 32] [--seeds 5] [--pictures FOLDER] [--out FILE.md]

The embedded model comes first, then every MODEL (a folder, hub id or .gguf file), each with its
untrained self; then two random-weight twins of a small Qwen3 shape that differ only in QK-norm, at
the usual initial weights (standard deviation 0.02) and at larger ones (0.1). Prompts are cut from
the text at equal distances, each with its tokens as they are.

Numbers are medians over prompts and permutations. With --out the tables take the place of
everything after the line "## Tables" of that file, and the numbers go to FILE.json beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pages import write_tables

import svflow as sv
from svflow import plotting
from svflow.score.shuffle import Shuffle, medians, prefix_shuffle, table, twins
from svflow.score.shuffle_plot import shuffle_picture


def prompts_of(source: str, text: str, count: int, tokens: int) -> np.ndarray:
    """(count, tokens) ids from places at equal distances, the start and the end left out."""
    tokenizer = sv.load_tokenizer(source)
    places = np.linspace(0.05, 0.95, count) * len(text)
    rows = []
    for place in places:
        start = text.index(" ", int(place))
        ids = np.asarray(tokenizer.encode(text[start : start + 12 * tokens]))
        if len(ids) < tokens:
            raise SystemExit(f"the text is too short for {tokens} tokens from {start}")
        rows.append(ids[:tokens])
    return np.stack(rows)


def twin_config(spread: float) -> sv.TransformerConfig:
    return sv.TransformerConfig.from_hf(
        dict(
            model_type="qwen3",
            vocab_size=2048,
            hidden_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=384,
            hidden_act="silu",
            max_position_embeddings=1024,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            initializer_range=spread,
        )
    )


def short(values) -> Any:
    """Four digits, nested; None where there is no value."""
    if np.ndim(values):
        return [short(value) for value in values]
    return float(f"{values:.4g}") if np.isfinite(values) else None


def numbers(study: Shuffle | None) -> dict | None:
    """By metric and fraction, the median change per layer; and the correlations."""
    if study is None:
        return None

    def over(change):
        return [medians(change[:, place]) for place in range(len(study.fractions))]

    return dict(
        tokens=study.tokens,
        suffix=study.suffix,
        prompts=len(next(iter(study.metric.values()))),
        draws=next(iter(study.metric.values())).shape[2],
        fractions=study.fractions.tolist(),
        unshuffled={name: short(v.mean(axis=0)) for name, v in study.unshuffled.items()},
        change={name: short(over(v)) for name, v in study.change.items()},
        size={name: short(over(np.abs(v))) for name, v in study.change.items()},
        loss=None if study.loss is None else short(study.loss.mean(axis=(0, 2))),
        rho={name: short(v) for name, v in study.rho.items()},
        p_value={name: short(v) for name, v in study.p_value.items()},
        untrained=numbers(study.untrained),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--suffix", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = given.corpus.read_text()
    embedded = str(sv.data.default_model_path())

    def prompts(source):
        return prompts_of(source, text, given.prompts, given.tokens)

    make = dict(suffix=given.suffix, seeds=given.seeds)
    lines: list[str] = []
    results: dict[str, dict | None] = {}

    def add(name, study, picture=False):
        lines.extend(["", f"### {name}", "", "```text", table(study), "```"])
        results[name] = numbers(study)
        print(table(study), flush=True)
        if picture and given.pictures is not None:
            given.pictures.mkdir(parents=True, exist_ok=True)
            with matplotlib.rc_context(plotting.style("light")):
                figure = Figure()
                shuffle_picture(figure, study, theme="light", title=f"Prefix shuffling: {name}")
                figure.savefig(given.pictures / f"prefix_shuffle_{name.split()[0].lower()}.png")

    for source in [embedded, *given.models]:
        start = time.perf_counter()
        study = prefix_shuffle(sv.load(source), prompts(source), **make)
        name = "embedded model" if source == embedded else Path(source).stem
        add(name, study, picture=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    ids = prompts(embedded)
    for spread in (0.02, 0.1):
        for model, what in zip(twins(twin_config(spread)), ("with", "without")):
            study = prefix_shuffle(model, ids, **make, control=False)
            add(f"random weights of sd {spread}, {what} QK-norm", study)
    if given.out is None:
        return
    write_tables(given.out, lines)
    head = dict(jax=jax.__version__, device=jax.devices()[0].device_kind, corpus=given.corpus.name)
    given.out.with_suffix(".json").write_text(json.dumps(head | dict(studies=results)) + "\n")


if __name__ == "__main__":
    main()
