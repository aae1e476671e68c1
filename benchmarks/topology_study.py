"""The topology study of real checkpoints beside their untrained selves, as Markdown tables.

    python benchmarks/topology_study.py CORPUS --folder FOLDER [MODELS ...] [--passages 200]
        [--untrained-passages N ...] [--tokens 128] [--resolutions 1 4] [--runs 10] [--out FILE.md]

The embedded model comes first: its checkpoints over training, and the weights that training began
with; then every MODEL (a folder, hub id or .gguf file) and `controls.initialisation` of it. The
passages are cut from the text file CORPUS at even distances, TOKENS ids each; each MODEL's
untrained self can have fewer of them, the first. A folder with
vocab.txt and no tokenizer.json is a model of chemistry: its passages are amide couplings.

The studies are .npz files in FOLDER, and a run that was killed continues from them; so do more
PASSAGES. The pictures beside them are those of the last checkpoint of every model, and
`embedded_film`, what training does. With --out the
tables take the place of everything after the line "## Tables" of that file.

In the summary, per resolution: the gradient is Spearman's rho of a measure with depth; rank is the
effective rank of the product of all layers' Jacobians; Q and n are means over layers, of modularity
and of the number of communities; rho is that of the columns of J and participation in positive
weights, its mean over layers; the last columns are the verdicts, for participation in positive and
in negative weights: how many couplings are found positive and negative, of all layers and the four
gains, raw -> partial.
"""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from pages import write_tables
from power_study import longest_pieces
from scipy.stats import spearmanr
from tqdm import tqdm

import svflow as sv
from svflow import topology
from svflow.plotting import style
from svflow.spectra import controls
from svflow.topology.topology_plot import topology_picture, training_film

ACIDS = (
    "CC", "CCC", "CC(C)C", "CC(C)(C)OC(=O)NC", "c1ccccc1", "c1ccc(F)cc1", "Cc1ccccc1", "COc1ccccc1",
    "C1CCCCC1", "C1CCOCC1", "O=C(OCc1ccccc1)NC", "c1ccncc1", "c1ccc2ccccc2c1", "FC(F)(F)C", "N#CC",
)  # fmt: skip
AMINES = (
    "C", "CC", "C(C)C", "Cc1ccccc1", "c1ccccc1", "c1ccc(Cl)cc1", "c1ccc(Br)cc1Cl", "CCO", "CCOC",
    "C1CCCCC1", "C1CC1", "c1ccncc1", "CCN(C)C", "Cc1ccco1", "CC(F)(F)F",
)  # fmt: skip


def reactions() -> list[str]:
    """Amides from an acid and an amine, as SMILES: reactants, >>, product."""
    return [f"O=C(O){acid}.N{amine}>>O=C(N{amine}){acid}" for acid in ACIDS for amine in AMINES]


def passages(source: str, corpus: str, count: int, tokens: int) -> list[np.ndarray]:
    """Ids; shorter than `tokens` only in chemistry."""
    vocabulary = Path(source) / "vocab.txt"
    if vocabulary.exists() and not (Path(source) / "tokenizer.json").exists():
        places = {piece: place for place, piece in enumerate(vocabulary.read_text().split())}
        ends = places["[CLS]"], places["[SEP]"]
        found = [[ends[0], *longest_pieces(text, places), ends[1]] for text in reactions()]
        chosen = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
        # One compilation per length: all are cut to the shortest.
        size = min(tokens, min(map(len, found)))
        return [np.array(found[place][:size]) for place in chosen]
    tokenizer, cut = sv.load_tokenizer(source), []
    for start in np.linspace(0, len(corpus) - 12 * tokens, count).astype(int):
        start = corpus.index(" ", start) + 1
        ids = tokenizer.encode(corpus[start : start + 12 * tokens])[:tokens]
        if len(ids) == tokens:
            cut.append(np.asarray(ids))
    return cut


def models(sources: list[str]):
    """(name, where its tokenizer is, model, whether its full table is printed)."""
    record, path = sv.data.training_record(), sv.data.default_model_path()
    config = sv.load(path).config
    untrained = sv.Transformer(config, rngs=nnx.Rngs(record["init_seed"]))
    yield "embedded, untrained", str(path), untrained, True
    for step in record["checkpoints"]:
        last = step == record["checkpoints"][-1]
        model = sv.load(sv.data.default_model_path(step))
        yield f"embedded, {step} steps", str(path), model, last
    for source in sources:
        name, model = Path(source).stem, sv.load(source)
        yield f"{name}, untrained", source, controls.initialisation(jax.random.key(0), model), True
        yield name, source, model, True


def summary(name: str, study: topology.Study) -> str:
    mean = {key: values.mean(axis=0) for key, values in study.samples.items()}
    depth = np.arange(study.settings["layers"])
    found = study.topology

    def gradient(key):
        return f"{spearmanr(depth, mean[key]).statistic:+.2f}"

    def verdicts(weights):
        cells = []
        for tested in (found.coupling.raw, found.coupling.partial):
            signs = [int(np.sum(tested.verdict[weights] == s)) for s in ("positive", "negative")]
            cells.append(f"{signs[0]}+ {signs[1]}-")
        return " → ".join(cells)

    cells = [
        name,
        str(study.states),
        gradient("self_alignment"),
        gradient("henrici_departure"),
        gradient("update_ratio"),
        f"{mean['cumulative_effective_rank'][-1]:.1f}",
        f"{np.mean([one.modularity for one in found.communities]):.2f}",
        f"{np.mean(found.null_modularity['rewired']):.2f}",
        f"{np.mean([one.number for one in found.communities]):.1f}",
        f"{np.mean([one.stability for one in found.communities]):.2f}",
        f"{np.mean(found.coupling.raw.rho[0, 0]):+.2f} → "
        f"{np.mean(found.coupling.partial.rho[0, 0]):+.2f}",
        verdicts(0),
        verdicts(1),
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "checkpoint", "states", "aligned, gradient", "Henrici, gradient", "update, gradient", "rank",
    "Q", "Q rewired", "n", "stable", "mean rho", "found, positive weights",
    "found, negative weights",
)  # fmt: skip


def picture(path: Path, study: topology.Study, title: str) -> None:
    """Beside the file, light and dark."""
    depth = study.settings["layers"]
    shown = sorted({0, depth // 2, depth - 1})
    found = study.topology.coupling
    for theme in ("light", "dark"):
        with plt.rc_context(style(theme)):
            topology_picture(
                figure := plt.figure(),
                np.stack([topology.load_correlation(path, layer).matrix for layer in shown]),
                study.topology.labels[shown],
                shown,
                participation=[found.participation[layer][0] for layer in shown],
                gain=[found.gain[layer][0] for layer in shown],
                sizes=[found.sizes[layer] for layer in shown],
                rho=np.stack([found.raw.rho[0, 0], found.partial.rho[0, 0]]),
                verdicts=np.stack([found.raw.verdict[0, 0], found.partial.verdict[0, 0]]),
                names=["raw", "partial"],
                untrained=None,
                theme=theme,
                title=title,
                label=r"$|J P_c|_F\,/\,\sqrt{|c|}$",
            )
            figure.savefig(path.with_suffix(f".{theme}.png"))
            plt.close(figure)


def film(folder: Path, studies: dict[int, list[topology.Study]], resolutions: list[float]) -> None:
    """What training does, by steps: of each, one study per resolution. Light and dark."""
    steps = sorted(studies)
    first = [studies[step][0] for step in steps]
    mean = [{key: v.mean(axis=0) for key, v in one.samples.items()} for one in first]
    depth = np.arange(first[0].settings["layers"])
    names = dict(self_alignment="alignment", henrici_departure="Henrici", update_ratio="|R|/|J|")

    def gradients(key):
        return np.array([spearmanr(depth, one[key]).statistic for one in mean])

    def coupled(tested: str):
        rho = [
            [getattr(one.topology.coupling, tested).rho[0, 0] for one in studies[step]]
            for step in steps
        ]
        each = np.array([row[-1] for row in rho])
        return np.stack([each.mean(axis=1), each.min(axis=1), each.max(axis=1)], axis=1)

    rank = np.array([one["cumulative_effective_rank"] for one in mean])
    last = f"resolution {resolutions[-1]:g}"
    for theme in ("light", "dark"):
        with plt.rc_context(style(theme)):
            training_film(
                figure := plt.figure(),
                steps,
                {
                    "alignment of singular directions": np.array(
                        [one["self_alignment"] for one in mean]
                    ),
                    "effective rank of the layers' product": rank,
                    f"coupling, raw, {last}": np.array(
                        [studies[step][-1].topology.coupling.raw.rho[0, 0] for step in steps]
                    ),
                },
                {
                    "rank correlation with depth": {
                        name: gradients(key) for key, name in names.items()
                    },
                    "effective rank after all layers": {"product of Jacobians": rank[:, -1]},
                    "coupling: mean, range over layers": {
                        name: coupled(name) for name in ("raw", "partial")
                    },
                },
                theme=theme,
                title="The embedded model's training: Jacobians and graph",
            )
            figure.savefig(folder / f"embedded_film.{theme}.png")
            plt.close(figure)


def lines(given) -> list[str]:
    corpus = given.corpus.read_text()
    rows: dict[float, list[str]] = {resolution: [] for resolution in given.resolutions}
    full = []
    trained: dict[int, list[topology.Study]] = {}
    fewer = dict(itertools.zip_longest(given.models, given.untrained_passages))
    for name, source, model, printed in models(given.models):
        ids = passages(source, corpus, given.passages, given.tokens)
        if name.endswith("untrained") and source in given.models:
            ids = ids[: fewer[source]]
        path = given.folder / (name.replace(", ", "_").replace(" ", "_") + ".npz")
        for place, resolution in enumerate(given.resolutions):
            options = topology.Options(resolution=resolution, runs=given.runs)
            if place == 0:
                found = topology.study(model, ids, path, options=options, progress=tqdm)
            else:
                found = topology.load_study(path, options=options, progress=tqdm)
            rows[resolution].append(summary(name, found))
            if name.startswith("embedded"):
                trained.setdefault(int(re.sub(r"\D", "", name) or 0), []).append(found)
            if printed:
                head = f"### {name}, resolution {resolution:g}"
                full += ["", head, "", "```text", topology.table(found), "```"]
        if printed:
            picture(path, found, f"{name}: topology of the residual stream")
        print(name, flush=True)
    film(given.folder, trained, given.resolutions)
    text = []
    for resolution, body in rows.items():
        text += ["", f"### Summary, resolution {resolution:g}", "", "| " + " | ".join(HEAD) + " |"]
        text += ["|" + "---|" * len(HEAD), *body]
    return text + full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=200)
    parser.add_argument(
        "--untrained-passages", type=int, nargs="+", metavar="N", default=[],
        help="of each MODEL in order (default: all)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--resolutions", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    tables = lines(given)
    if given.out is None:
        print("\n".join(tables))
    else:
        write_tables(given.out, tables)


if __name__ == "__main__":
    main()
