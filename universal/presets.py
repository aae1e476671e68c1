"""What `python -m universal` trains: tasks by machines by components."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
from flax import nnx

import svflow as sv
from svflow.spectra.controls import shuffled
from universal.components import Recipe
from universal.tasks import Task, dyck1_task, k_hop_task
from universal.training import Settings

ATTENTION, NORMED, MLP = "attention only", "+ residual + LayerNorm", "+ frozen random MLP"
BLOCKS = "a language model's blocks"
PAPER = {
    ("Dyck-1", ATTENTION, "sparse"): "100",
    ("Dyck-1", ATTENTION, "random"): "94.4",
    ("Dyck-1", ATTENTION, "full"): "comparable",
    ("k-hop", ATTENTION, "sparse"): "30-40",
    ("k-hop", ATTENTION, "random"): "30-40",
    ("k-hop", ATTENTION, "full"): "99",
    ("k-hop", NORMED, "sparse"): "100",
    ("k-hop", NORMED, "random"): "85.7-96.1",
    ("k-hop", MLP, "random"): "better still",
}
"""Accuracies in percent. Source: Andoni, Hsu and Liu, arXiv 2605.31423."""


class Cell(NamedTuple):
    """One entry of the table.

    Arguments:
        task, components, machine: its names.
        sequences: what is trained on.
        recipe: of the machine of every seed; or a flow, one for all, or one for each.
        settings: of the training.
    """

    task: str
    components: str
    machine: str
    sequences: Task
    recipe: Recipe | sv.Flow | tuple[sv.Flow, ...]
    settings: Settings

    @property
    def name(self) -> str:
        """Of its file, and what a filter is compared with."""
        short = {ATTENTION: "attention", NORMED: "norm", MLP: "mlp", BLOCKS: "blocks"}
        return f"{self.task.lower()}-{self.machine}-{short[self.components]}"


class Preset(NamedTuple):
    """A table.

    Arguments:
        cells: in the order in which they are trained.
        seeds: how many there are of each.
    """

    cells: tuple[Cell, ...]
    seeds: int


FULL = 1e-3
"""The learning rate of fully trained machines: weights of all layers want smaller steps than
embeddings alone. With attention only some collapse at it late in a long training on k-hop."""


def _table(dyck: tuple, hop: tuple, hidden: int, hop_full: float = FULL) -> tuple[Cell, ...]:
    """The paper's table.

    Arguments:
        dyck, hop: task, settings, recipe of a sparse machine.
        hidden: of the feed-forward layers.
        hop_full: the learning rate of the fully trained machine with attention only on k-hop.
    """
    cells = []
    for name, (task, settings, recipe), components in (
        ("Dyck-1", dyck, ATTENTION),
        ("k-hop", hop, ATTENTION),
        ("k-hop", hop, NORMED),
        ("k-hop", hop, MLP),
    ):
        if components != ATTENTION:
            recipe = replace(recipe, residual=True, norm=True)
        if components == MLP:
            recipe = replace(recipe, hidden=hidden)
        for kind in ("sparse", "random") if components == MLP else ("sparse", "random", "full"):
            full = hop_full if (name, components) == ("k-hop", ATTENTION) else FULL
            own = replace(settings, learning_rate=full) if kind == "full" else settings
            made = replace(recipe, kind=kind)
            cells.append(Cell(name, components, kind, task, made, own))
    return tuple(cells)


def _tiny(seeds: int = 2) -> Preset:
    settings = Settings(steps=4, batch=8, warmup=1, every=2, validation=16, test=16)
    recipe = Recipe("sparse", 1, 1, 2, 2)
    dyck = dyck1_task(3), settings, recipe
    return Preset(_table(dyck, (k_hop_task(6, 3, (0, 1)), settings, recipe), 4), seeds)


def _small(seeds: int = 2) -> Preset:
    """Shorter sequences, fewer hops, narrower machines: minutes on two cores."""
    settings = Settings(
        steps=500, batch=64, learning_rate=3e-2, warmup=50, every=100, validation=512
    )
    dyck = dyck1_task(15), settings, Recipe("sparse", 2, 2, 4, 4)
    hop = k_hop_task(20, 3, (0, 2)), settings, Recipe("sparse", 3, 2, 4, 4)
    return Preset(_table(dyck, hop, 64), seeds)


def _medium(seeds: int = 2) -> Preset:
    """Dyck-1 at the paper's length, k-hop with few hops: hours on two cores."""
    dyck = (
        dyck1_task(30),
        Settings(steps=6000, batch=128, learning_rate=1e-2, warmup=200, every=500),
        Recipe("sparse", 2, 2, 16, 16),
    )
    hop = (
        k_hop_task(30, 4, (0, 2)),
        Settings(steps=12_000, batch=64, learning_rate=1e-2, warmup=200, every=500),
        Recipe("sparse", 3, 2, 8, 8),
    )
    return Preset(_table(dyck, hop, 256, hop_full=3e-4), seeds)


def _paper(seeds: int = 4) -> Preset:
    """The tasks at the sizes of the papers that they come from."""
    dyck = (
        dyck1_task(30),
        Settings(steps=10_000, batch=256, learning_rate=1e-2, warmup=500, every=250),
        Recipe("sparse", 2, 2, 16, 16),
    )
    hop = (
        k_hop_task(100, 4, (0, 16)),
        Settings(steps=100_000, batch=32, learning_rate=1e-2, warmup=1000, every=1000),
        Recipe("sparse", 6, 2, 4, 4),
    )
    return Preset(_table(dyck, hop, 1024, hop_full=3e-4), seeds)


def language_models(count: int) -> dict[str, sv.Flow | tuple[sv.Flow, ...]]:
    """The blocks of the embedded language model; and of each array shuffled, and of initialisations
    (its own the first), several."""
    first, path = sv.data.training_record()["init_seed"], sv.data.default_model_path()
    trained = sv.load(path)
    mixed = [shuffled(jax.random.key(seed), trained) for seed in range(count)]
    config = trained.config
    untrained = [sv.Transformer(config, rngs=nnx.Rngs(first + seed)) for seed in range(count)]
    several = dict(shuffled=mixed, initialised=untrained)
    return dict(
        trained=trained.flow,
        **{name: tuple(model.flow for model in models) for name, models in several.items()},
    )


def _reprogram(seeds: int = 2) -> Preset:
    """The embedded language model's blocks, trained, shuffled and as initialised."""
    settings = Settings(
        steps=1500, batch=64, learning_rate=1e-1, warmup=100, every=100, validation=512
    )
    models = language_models(seeds)
    cells = [
        Cell(name, BLOCKS, machine, task, flow, settings)
        for name, task in (("Dyck-1", dyck1_task(8)), ("k-hop", k_hop_task(20, 3, (0, 2))))
        for machine, flow in models.items()
    ]
    return Preset(tuple(cells), seeds)


PRESETS = {
    "tiny": _tiny,
    "small": _small,
    "medium": _medium,
    "paper": _paper,
    "reprogram": _reprogram,
}
