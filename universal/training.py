"""Learning programs: tables of tokens and places and an output matrix, around frozen weights.

Axes: `seeds`; `batch`; `tokens`; `vocab`; `width`, the machine's state; `classes`.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423, whose experiments
train the embeddings and U alone.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from svflow import Flow
from svflow.dtypes import at_least_float32
from svflow.flow import check_flow
from svflow.integers import positive
from svflow.sharding import gathered, over_data
from universal.accuracy import CLAIM, Accuracy
from universal.bounds import QUICK
from universal.components import Recipe, read_columns
from universal.devices import spread
from universal.evaluation import (
    MACHINE,
    START,
    TEST,
    TRAIN,
    VALIDATION,
    accuracies,
    check_ids,
    check_seeds,
    outside,
    stream_of,
)
from universal.learnt import Embedding, Trained, floating, logits
from universal.saved import DAMAGED, described, saving
from universal.tasks import Batch, Task, check_task


@dataclass(frozen=True)
class Settings:
    """How a program is learnt: AdamW with clipped gradients, a warm-up and a cosine to zero.

    Arguments:
        steps, batch: how many steps, of how many sequences each.
        learning_rate, warmup, weight_decay, clip: of the optimiser; `clip` bounds the norm of the
            gradient.
        scale: the standard deviation of the first embeddings' entries, of token and place together.
        every: steps between two evaluations, which are what a killed run loses at most.
        validation: fresh sequences of each evaluation.
        stop_at: the accuracy that ends a run when all seeds have it at two evaluations in a row;
            None for never.
        test: fresh sequences of the last evaluation; below `CLAIM` it is no claim.

    Raises:
        ValueError: numbers that make no sense.
    """

    steps: int = 4000
    batch: int = 256
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 1e-3
    clip: float = 1.0
    scale: float = 1.0
    every: int = 200
    validation: int = 1024
    stop_at: float | None = 1.0
    test: int = CLAIM

    def __post_init__(self):
        kept: dict[str, Any] = {}  # Python's own numbers, which JSON can hold
        for name in ("steps", "batch", "every", "validation", "test"):
            kept[name] = positive(name, getattr(self, name))
        for name in ("learning_rate", "clip", "scale"):
            kept[name] = value = _real(getattr(self, name))
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)!r}")
        kept["warmup"] = 0 if self.warmup == 0 else positive("warmup", self.warmup)
        if not 0 <= kept["warmup"] < kept["steps"]:
            raise ValueError(f"warmup must be within 0 .. {self.steps - 1}, got {self.warmup!r}")
        kept["weight_decay"] = decay = _real(self.weight_decay)
        if not (math.isfinite(decay) and decay >= 0):
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay!r}")
        if self.stop_at is not None:
            kept["stop_at"] = share = _real(self.stop_at)
            if not 0 < share <= 1:
                raise ValueError(f"stop_at must be within (0, 1], got {self.stop_at!r}")
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @property
    def together(self) -> int:
        """How many steps are one program: the most up to 20 that evaluations and the end allow."""
        common = math.gcd(self.every, self.steps)
        return max(n for n in range(1, 21) if common % n == 0)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after a clip of the gradient's norm, with a warm-up and a cosine to zero."""
        rate: Any = self.learning_rate
        rate = optax.warmup_cosine_decay_schedule(0.0 if self.warmup else rate, rate, self.warmup,
                                                  self.steps)  # fmt: skip
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(rate, weight_decay=self.weight_decay),
        )


def _real(value: Any) -> float:
    """As a float; nan, which no bound lets through, for what is no real number."""
    real = isinstance(value, int | float | np.integer | np.floating)
    return float(value) if real and not isinstance(value, bool) else math.nan


def loss(embedding: Embedding, flow: Flow, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The mean cross-entropy in nats of the tokens that are asked for, and how many there are."""
    found = jax.vmap(functools.partial(logits, embedding, flow))(batch.ids)
    labels = jnp.where(batch.mask, batch.labels, 0)  # elsewhere they may be no class
    each = optax.softmax_cross_entropy_with_integer_labels(found, labels)
    asked = jnp.sum(batch.mask, dtype=jnp.int32)
    total = jnp.sum(jnp.where(batch.mask, each, 0))
    return total / jnp.maximum(asked, 1).astype(total.dtype), asked


def loss_of(trained, frozen, batch: Batch):
    """`loss` with what is trained apart from what is frozen: (Embedding, flow or None), the rest.

    Derivatives are by the first argument alone, so that none by frozen weights exists.
    """
    embedding, flow = trained
    return loss(embedding, frozen if flow is None else flow, batch)


@functools.partial(
    jax.jit, static_argnames=("task", "settings", "axis"), donate_argnames=("trained", "state")
)
def _update(trained, state, frozen, keys, *, task: Task, settings: Settings, axis):
    """Steps of every seed, keys (steps, seeds), each on a batch that depends on its key alone.

    Several in one program share their memory: fresh pages would take a third of each step's time.
    Returns what is trained, its state, and of each step and seed the loss and three counts: tokens
    that are asked for, ids and labels that are none of the task's.
    """

    def one(trained, state, frozen, key):
        batch = jax.tree.map(over_data, task.draw(key, settings.batch))
        slope = jax.value_and_grad(loss_of, has_aux=True)
        (value, asked), gradient = slope(trained, frozen, batch)
        with jax.numpy_dtype_promotion("standard"):  # which optax counts on
            updates, state = settings.optimizer.update(gradient, state, trained)
            trained = optax.apply_updates(trained, updates)
        strange = [jnp.sum(part, dtype=jnp.int32) for part in outside(task, batch)]
        return trained, state, value, jnp.stack([asked, *strange])

    def step(carry, keys):
        each = jax.vmap(one, in_axes=(0, 0, axis, 0))
        trained, state, value, counts = each(carry[0], carry[1], frozen, keys)
        return (trained, state), (value, counts)

    return jax.lax.scan(step, (trained, state), keys)


def train(
    machine: Recipe | Flow | Sequence[Flow],
    task: Task,
    settings: Settings | None = None,
    *,
    seeds: Sequence[int] = (0,),
    out: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Trained:
    """Learns a program for a machine: its embeddings and output, and nothing else.

    All seeds train as one program. A seed decides the machine, where that is drawn, the first
    embeddings and all sequences; those of training, of evaluations and of the last test come from
    streams of their own: equal strings are chance, likely where there are few. The same call gives
    the same numbers to the last bit on one device, whether or not it was interrupted.

    Arguments:
        machine: a `Recipe`, of which kind "full" trains all its weights too; or a flow, which all
            seeds share and which is frozen; or several, one for each seed, that differ in the
            values of their arrays alone.
        task: of `dyck1_task` or `k_hop_task`, or one's own.
        settings: `Settings()` by default.
        seeds: integers, each once.
        out: an .npz file, made or continued, and replaced at every evaluation. Of one that is
            finished, the same call returns what was learnt.
        mesh: of `jax.make_mesh`: its axis `data` takes the seeds where they divide by it, and the
            sequences of every batch otherwise. The numbers are the same to rounding.
        progress: wraps the range of steps, `Settings.together` at a time, for example `tqdm.tqdm`,
            which is told the accuracies.

    Raises:
        ValueError: what is no machine or task; flows that are not one for each seed, or not of one
            structure; seeds that are not different integers; a mesh
            without an axis `data`, or of a size there that divides neither seeds nor batch; a file
            that another run writes, or was made with other settings or of other shapes; a task that
            asks for nothing, or whose ids or labels its sizes do not cover; an empty mask; a
            `progress` that ends early.
        FloatingPointError: a loss, weights or answers that are not finite, with step and seed; the
            file stays as it was after the last evaluation.

    Examples:
        >>> import universal as ut
        >>> recipe = ut.Recipe(kind="sparse", layers=1, heads=1, head_width=2, out_width=2)
        >>> short = Settings(steps=2, batch=4, warmup=0, every=2, validation=8, test=8)
        >>> found = train(recipe, ut.dyck1_task(pairs=2), short)
        >>> found.losses.shape, found.test[0].asked
        ((2, 1), 8)
    """
    settings = Settings() if settings is None else settings
    seeds = _check(machine, task, settings, seeds)
    put, on_mesh = spread(mesh, len(seeds), settings.batch)
    shared = isinstance(machine, Flow)
    narrow = (None if isinstance(machine, Recipe) else floating(machine)) or jnp.result_type(float)
    dtype = at_least_float32(narrow)  # in bfloat16 small steps would be rounded away
    asked = dict(
        machine=described(machine),
        task=task.name,
        training=asdict(settings),
        seeds=list(seeds),
        dtype=str(narrow),
    )
    with saving(out, asked) as file, on_mesh:
        before = file.read()
        flow: Any = machine
        if isinstance(machine, Recipe):
            flow = put(_machines(stream_of(seeds, MACHINE), machine=machine))
        elif not isinstance(machine, Flow):
            flow = put(jax.tree.map(lambda *arrays: jnp.stack(arrays), *list(machine)))
        everything = isinstance(machine, Recipe) and machine.kind == "full"
        frozen = None if everything else flow
        start = _starts(
            stream_of(seeds, START), task=task, width=flow.width, columns=read_columns(flow),
            scale=settings.scale, dtype=dtype,
        )  # fmt: skip
        trained = put((start, flow if everything else None))
        state = put(_states(trained, settings=settings))
        axis = None if shared else 0

        def judged(sequences: int, stream: int, step: int = 0) -> tuple[Accuracy, ...]:
            now = flow if trained[1] is None else trained[1]
            return accuracies(
                trained[0], now, task, seeds, sequences, batch=settings.batch, stream=stream,
                step=step, axis=axis,
            )  # fmt: skip

        def store() -> None:
            leaves = {f"leaf {k}": x for k, x in enumerate(jax.tree.leaves((trained, state)))}
            file.write(head, records | jax.device_get(leaves))

        begin = time.perf_counter()
        if before is None:
            head: dict[str, Any] = dict(seconds=0.0, test=None)
            found = judged(settings.validation, VALIDATION)
            records = dict(
                losses=np.zeros((0, len(seeds)), dtype),
                evaluated=np.zeros(1, np.int64),
                validation=np.asarray([[one.value for one in found]]),
            )
        else:
            head, records, kept = _restored(before, (trained, state), len(seeds), dtype, file.path)
            trained, state = put(kept)
        pending: list[Any] = []
        steps = settings.steps if not _solved(records["validation"], settings) else 0
        together = settings.together
        bar: Any = progress(range(len(records["losses"]), steps, together))
        for first in bar:
            done = first + together
            keys = jnp.stack([stream_of(seeds, TRAIN, step) for step in range(first, done)])
            (trained, state), values = _update(
                trained, state, frozen, keys, task=task, settings=settings, axis=axis
            )
            pending.append(values)
            if done % settings.every and done < steps:
                continue
            losses = _losses(pending, len(records["losses"]), seeds, task)
            _check_finite(trained, done, seeds)
            pending = []
            shares = [one.value for one in judged(settings.validation, VALIDATION, done)]
            for name, more in zip(RECORDS, (losses, [done], [shares])):
                records[name] = np.concatenate([records[name], more])
            head["seconds"] += time.perf_counter() - begin
            begin = time.perf_counter()
            store()
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(accuracy=f"{np.mean(shares):.4f}", loss=f"{losses[-1].mean():.4f}")
            if _solved(records["validation"], settings):
                break
        if hasattr(bar, "close"):
            bar.close()
        taken = len(records["losses"])
        if taken < steps and not _solved(records["validation"], settings):
            raise ValueError(f"progress ended before step {steps}; evaluated last at {taken}")
        if head["test"] is None:
            head["test"] = judged(settings.test, TEST)
            store()
    return Trained(
        embedding=trained[0],
        flow=flow if trained[1] is None else trained[1],
        test=head["test"],
        seconds=head["seconds"],
        settings=file.settings,
        task=task,
        **records,
    )


RECORDS = ("losses", "evaluated", "validation")


@functools.partial(jax.jit, static_argnames="machine", compiler_options=QUICK)
def _machines(keys, *, machine: Recipe) -> Flow:
    """A machine of every seed."""
    return jax.vmap(machine.build)(keys)


@functools.partial(
    jax.jit,
    static_argnames=("task", "width", "columns", "scale", "dtype"),
    compiler_options=QUICK,
)
def _starts(keys, *, task: Task, width: int, columns: int, scale: float, dtype) -> Embedding:
    """Gaussian tables of one scale, and an output of the size of one column; of every seed."""
    sizes = scale / 2**0.5, scale / 2**0.5, columns**-0.5
    counts = task.vocab, task.tokens, task.classes

    def one(key):
        drawn = jax.random.normal(key, (sum(counts), width), dtype)
        tables = jnp.split(drawn, np.cumsum(counts)[:2])
        tokens, positions, unembed = (size * part for size, part in zip(sizes, tables))
        return Embedding(tokens, positions, unembed.T)

    return jax.vmap(one)(keys)


@functools.partial(jax.jit, static_argnames="settings", compiler_options=QUICK)
def _states(trained, *, settings: Settings):
    """The optimiser's first state of every seed."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(settings.optimizer.init)(trained)


def _solved(validation: np.ndarray, settings: Settings) -> bool:
    if settings.stop_at is None or len(validation) < 2:
        return False
    return bool((validation[-2:] >= settings.stop_at).all())


def _losses(pending, first: int, seeds: tuple[int, ...], task: Task) -> np.ndarray:
    """(steps, seeds); raises for a batch that is none, and for a loss that is not finite."""
    losses, counts = (np.concatenate(jax.device_get(parts)) for parts in zip(*pending))
    check_ids(task, counts[..., 1], counts[..., 2])
    for bad, error, text in (
        (counts[..., 0] == 0, ValueError, "no token of the batch is asked for: its mask is empty"),
        (~np.isfinite(losses), FloatingPointError, "the loss is not finite"),
    ):
        if bad.any():
            step, place = np.argwhere(bad)[0]
            value = losses[step, place]
            raise error(f"step {first + step}, seed {seeds[place]}: {text} (loss {value})")
    return losses


@jax.jit
def _finite(trained) -> Array:
    """(seeds,) whether all numbers are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(trained) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    each = [jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in leaves]
    return functools.reduce(jnp.logical_and, each)


def _check_finite(trained, step: int, seeds: tuple[int, ...]) -> None:
    finite = gathered(_finite(trained))
    if not finite.all():
        seed = seeds[int(np.argmin(finite))]
        raise FloatingPointError(f"step {step - 1}, seed {seed}: weights are not finite after it")


def _restored(before, like, seeds: int, dtype, path):
    """Head, `RECORDS` and the trees of a file; raises ValueError for what is not of such a run."""
    head, arrays = before
    try:
        tested = head["test"] and tuple(Accuracy(*map(int, one)) for one in head["test"])
        if tested and not (len(tested) == seeds and all(0 <= one.value <= 1 for one in tested)):
            raise ValueError(f"its test is not of shares of {seeds} programs")
        head = dict(seconds=float(head["seconds"]), test=tested)
    except (*DAMAGED, ZeroDivisionError) as error:
        raise ValueError(f"{path} holds no run: {error!r}") from error
    leaves, structure = jax.tree.flatten(like)
    shapes = {f"leaf {k}": (leaf.shape, leaf.dtype) for k, leaf in enumerate(leaves)}
    steps, made = (np.shape(arrays.get(name))[:1] for name in RECORDS[:2])
    sizes = (*steps, seeds), made, (*made, seeds)
    shapes |= zip(RECORDS, zip(sizes, map(np.dtype, (dtype, np.int64, np.float64))))
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"{path} holds a run of another shape: {name} is {found.get(name)}, not "
                f"{shapes.get(name)}"
            )
    records = {name: arrays.pop(name) for name in RECORDS}
    if not made[0] or records["evaluated"][-1] != len(records["losses"]):
        raise ValueError(f"{path} holds no run: its last evaluation is not of its last step")
    kept = [jnp.asarray(arrays[f"leaf {k}"]) for k in range(len(leaves))]
    trees = jax.tree.unflatten(structure, kept)
    return head, records, trees


def _check(machine, task, settings, seeds) -> tuple[int, ...]:
    several = isinstance(machine, list | tuple)
    if not isinstance(machine, Recipe):
        for one in machine if several else [machine]:
            check_flow(one, "machine must be a Recipe, several flows or")
    check_task(task)
    if not isinstance(settings, Settings):
        raise ValueError(f"settings must be Settings, got {type(settings).__name__}")
    numbers = check_seeds(seeds)
    if several and len(machine) != len(numbers):
        raise ValueError(f"{len(machine)} flows for {len(numbers)} seeds")
    if several and len({_structure(one) for one in machine}) > 1:
        raise ValueError("the flows of the seeds differ in more than the values of their arrays")
    return numbers


def _structure(flow: Flow) -> tuple:
    """All of a flow but the values of its arrays."""
    leaves, tree = jax.tree.flatten(flow)
    return tree, *((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
