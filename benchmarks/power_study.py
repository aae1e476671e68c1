"""The power-method study of real checkpoints, and what steering does, as Markdown tables.

    python benchmarks/power_study.py [MODELS ...] [--out FILE.md]

The embedded model comes first: its checkpoints over training, and its untrained self; then every
MODEL (a folder, hub id or .gguf file) and its untrained self. The text is `svflow.data.PASSAGE`;
for a folder with vocab.txt and no tokenizer.json, a chemical reaction. Then steering: the theory's
table on random layers, and dose and response on the embedded model.

With --out the tables take the place of everything after the line "## Tables" of that file, and a
picture of dose and response per steered layer is written beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from pages import write_tables

import svflow as sv
from svflow import plotting, power
from svflow.power.flow import PowerFlow
from svflow.power.steering import VARIANTS
from svflow.power.steering_plot import dose_picture

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
CUTS = (None, 0.003, 0.01, 0.03, 0.1, 0.3)
# An amide coupling as SMILES, for models of chemistry: a vocab.txt of atoms and bonds.
REACTION = (
    "CC(C)(C)OC(=O)N1CCC(C(=O)O)CC1.Nc1ccc(Cl)cc1Br>>CC(C)(C)OC(=O)N1CCC(C(=O)Nc2ccc(Cl)cc2Br)CC1"
)
SUMMARY = (
    "system", "real", "gap", "gamma", "chance", "compared", "others", "rho", "rising", "mean token",
)  # fmt: skip


def text_of(source: str) -> np.ndarray:
    vocabulary = Path(source) / "vocab.txt"
    if vocabulary.exists() and not (Path(source) / "tokenizer.json").exists():
        places = {piece: place for place, piece in enumerate(vocabulary.read_text().split())}
        return np.array([places["[CLS]"], *longest_pieces(REACTION, places), places["[SEP]"]])
    return sv.load_tokenizer(source).encode(sv.data.PASSAGE)


def longest_pieces(text: str, places: dict[str, int]) -> list[int]:
    """Ids of a text cut into the longest pieces of a vocabulary, from the left."""
    ids = []
    while text:
        size = next(n for n in range(len(text), 0, -1) if text[:n] in places)
        ids.append(places[text[:size]])
        text = text[size:]
    return ids


def row(name: str, study: power.Study, system: str, ordering: str) -> str:
    """Means over layers; gamma is compared with others' over the layers that have others."""
    dynamics = getattr(study, system)
    found, pair = getattr(dynamics, ordering), getattr(study.principal, ordering)
    a = found.alignment
    some = np.isfinite(found.other)
    compared = [np.mean(np.asarray(part)[some]) if some.any() else np.nan
                for part in (a.gamma, found.other)]  # fmt: skip
    cells = [
        name,
        "model" if system == "real" else "reduced",
        f"{int(np.sum(a.real))}/{len(a.real)}",
        f"{np.median(pair.gap_ratio):.2f}",
        f"{np.mean(a.gamma):.3f}",
        f"{np.mean(a.chance):.3f}",
        *("" if np.isnan(mean) else f"{mean:.3f}" for mean in compared),
        f"{np.nanmean(a.rho):.2f}",
        f"{int(np.sum(np.asarray(a.rho) > 0.5))}/{len(a.rho)}",
        f"{dynamics.consensus[0]:.2f} → {dynamics.consensus[-1]:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def studies(sources: list[str]):
    """(name, study, whether its full table is printed)."""
    record = sv.data.training_record()
    ids = text_of(str(sv.data.default_model_path()))
    for step in record["checkpoints"]:
        model = sv.load(sv.data.default_model_path(step))
        last = step == record["checkpoints"][-1]
        yield f"embedded, {step} steps", power.study(model, ids), last
    untrained = sv.Transformer(model.config, rngs=nnx.Rngs(record["init_seed"]))
    yield "embedded, untrained", power.study(untrained, ids), True
    for source in sources:
        ids, name = text_of(source), Path(source).stem
        model = sv.load(source)
        yield name, power.study(model, ids), True
        untrained = sv.Transformer(model.config, rngs=nnx.Rngs(0))
        del model
        yield f"{name}, untrained", power.study(untrained, ids), False


def study_lines(sources: list[str]) -> list[str]:
    rows: dict[str, list[str]] = {"modulus": [], "residual": []}
    full = []
    for name, study, printed in studies(sources):
        for ordering, lines in rows.items():
            lines += [row(name, study, system, ordering) for system in ("real", "reduced")]
        if printed:
            full += ["", f"### {name}", "", "```text", power.table(study), "```"]
        print(name, flush=True)
    lines = ["", "### Means over layers"]
    for ordering, how in (("modulus", "|lambda|"), ("residual", "|1 + lambda|")):
        head = ("checkpoint", *SUMMARY)
        lines += ["", f"First eigenvector by {how}:", "", "| " + " | ".join(head) + " |"]
        lines += ["|" + "---|" * len(head), *rows[ordering]]
    return lines + full


def random_layers(width: int, layers: int, draws: int = 200, tokens: int = 32, heads: int = 4):
    """|cos| and share with +z of the last of `layers` random layers, steered, means over draws."""
    head = width // heads

    def draw(key):
        keys = jax.random.split(key, 6)
        shape = (layers, heads, width, head)
        q, k, v, o = (jax.random.normal(keys[i], shape) / width**0.5 for i in range(4))
        o = o.transpose(0, 1, 3, 2)
        flow = PowerFlow(q, k, v, o)
        x = flow.retract(jax.random.normal(keys[4], (tokens, width)))
        z = jax.random.normal(keys[5], (width,))
        x = sv.simulate(flow, x).xs[layers - 1]
        mean = jnp.mean(x, axis=0)
        value = v[-1].transpose(0, 2, 1).reshape(width, width)
        output = o[-1].reshape(width, width).T
        found = []
        for variant in ("basic", "exact", "mean"):
            for strength in (10.0, 100.0):
                change = power.rank_one(value, output, z, strength, variant, mean=mean)
                last = (output + jnp.outer(change.left, change.right)).T
                flow.output[...] = o.at[-1].set(last.reshape(heads, head, width))
                cosine = flow.step(layers - 1, x) @ (z / jnp.linalg.norm(z))
                found.append((jnp.mean(jnp.abs(cosine)), jnp.mean(cosine > 0)))
        return jnp.asarray(found), jnp.linalg.norm(mean)

    found, agreement = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), draws))
    return np.mean(found, axis=0), float(np.mean(agreement))


def picture(dose: power.DoseResponse, title: str, file: Path) -> None:
    effect = jax.tree.map(np.asarray, dose.effect)
    with matplotlib.rc_context(plotting.style("light")):
        figure = Figure()
        dose_picture(
            figure,
            np.asarray(dose.strengths),
            dose.variants,
            cosine=effect.cosine,
            size=effect.size,
            positive=effect.positive,
            kl=effect.kl,
            unsteered=(effect.unsteered_cosine[0, 0], effect.unsteered_positive[0, 0]),
            theme="light",
            title=title,
        )
        figure.savefig(file, dpi=120, metadata={"Software": None})


def condition(model, layer: int) -> str:
    """The singular values of the layer's V that matter here, as text."""
    value = np.asarray(model.flow.layers.attention.value.kernel[...][layer])
    sigma = np.linalg.svd(value, compute_uv=False)
    return (
        f"{len(sigma)}: the largest over the smallest is {sigma[0] / sigma[-1]:.0f}, the last two "
        f"are {sigma[-2] / sigma[0]:.1g} and {sigma[-1] / sigma[0]:.1g} of it"
    )


def steering_lines(folder: Path | None) -> list[str]:
    lines = ["", "### Steering the last of random layers (reduced system, 200 draws)", ""]
    names = [f"{v} {a}" for v in VARIANTS for a in (10, 100)]
    lines += ["Mean of |cos(token, z)| and share of tokens with +z.", ""]
    lines += ["| width | layers | mean token | " + " | ".join(names) + " |", "|---" * 9 + "|"]
    for width, layers in ((16, 1), (16, 13), (20, 13), (32, 13), (64, 13)):
        found, agreement = random_layers(width, layers)
        cells = [f"{size:.2f}, {share:.2f}" for size, share in found]
        lines.append(f"| {width} | {layers} | {agreement:.2f} | " + " | ".join(cells) + " |")
    source = sv.data.default_model_path()
    model, tokenizer = sv.load(source), sv.load_tokenizer(source)
    ids = tokenizer.encode(sv.data.PASSAGE)
    z = power.unembedding_direction(model, int(tokenizer.encode(" whale")[0]))
    for layer in (model.flow.depth // 2, model.flow.depth - 1):
        dose = power.dose_response(model, z, STRENGTHS, ids, layer=layer)
        e, unsteered = dose.effect, jax.tree.map(lambda a: float(a[0, 0]), dose.effect)
        title = f'Steering layer {layer + 1} of {model.flow.depth}, embedded model, to " whale"'
        lines += [
            "",
            f"### {title}",
            "",
            f"Unsteered: cosine {unsteered.unsteered_cosine:.2f}, share "
            f"{unsteered.unsteered_positive:.2f}, loss {unsteered.loss_before:.2f}. |ybar| = "
            f"{float(dose.scale):.2f}. Each cell: cosine / |cosine| / share with +z / KL.",
            "",
            "| variant | reach | " + " | ".join(f"{a:g}" for a in STRENGTHS) + " |",
            "|---" * (2 + len(STRENGTHS)) + "|",
        ]
        for i, variant in enumerate(dose.variants):
            cells = [
                f"{e.cosine[i, j]:.2f} / {e.size[i, j]:.2f} / {e.positive[i, j]:.2f} / "
                f"{e.kl[i, j]:.2f}"
                for j in range(len(STRENGTHS))
            ]
            reach = "" if np.isnan(dose.reach[i]) else f"{dose.reach[i]:.3f}"
            lines.append(f"| {variant} | {reach} | " + " | ".join(cells) + " |")
        if folder is not None:
            file = folder / f"steering_layer_{layer + 1}.png"
            picture(dose, title, file)
            lines += ["", f"![Dose and response, layer {layer + 1}]({file.name})"]
        lines += ["", "At strength 10, small singular values of V cut off, of which there are "]
        lines[-1] += f"{condition(model, layer)}. Each cell: cosine / share with +z / KL."
        lines += ["", "| rcond | reach | " + " | ".join(VARIANTS) + " |", "|---" * 5 + "|"]
        for rcond in CUTS:
            cut = power.dose_response(model, z, [10.0], ids, VARIANTS, layer=layer, rcond=rcond)
            e = cut.effect
            cells = [
                f"{e.cosine[i, 0]:.2f} / {e.positive[i, 0]:.2f} / {e.kl[i, 0]:.2f}"
                for i in range(len(VARIANTS))
            ]
            lines.append(f"| {rcond} | {cut.reach[-1]:.3f} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = None if given.out is None else given.out.parent
    lines = [*study_lines(given.models), *steering_lines(folder)]
    if given.out is None:
        print("\n".join(lines))
    else:
        write_tables(given.out, lines)


if __name__ == "__main__":
    main()
