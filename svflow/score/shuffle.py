"""Prefix shuffling: how the metrics at a text's last tokens follow the order of those before.

Axes: `prompts`; `fractions` of the prefix that are permuted; `draws` of permutations; `layers`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Float, Int
from scipy.stats import rankdata
from scipy.stats import t as student

from svflow.dtypes import at_least_float32
from svflow.integers import is_integer
from svflow.models.config import TransformerConfig
from svflow.models.transformer import Transformer
from svflow.portrait import loss_absent
from svflow.score.metrics import PER_HEAD, check_ids, exactly, measured, names_of
from svflow.spectra import controls

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
FEWEST = 4
"""Prompts below which no rank correlation is given."""

ROUNDING = 4
"""In epsilons, twice what float32 was off float64 by in means over 32 tokens of small models."""


class Shuffle(NamedTuple):
    """A prefix-shuffling study of one model.

    A metric is the mean over heads (or is of one branch or substep, by name) and over the suffix's
    tokens where it is finite. Its change is (metric - metric_0) / metric_0, metric_0 that of the
    text as it is: the change of a metric that is negative, such as free energy can be, has the
    other sign. What is within `rounding` of zero is taken for it: a difference, whose change is
    then 0, and metric_0, whose change is then no number.

    Arguments:
        family: of the model; tokens, suffix: how many tokens a prompt has, and how many of them
            stay.
        fractions: (fractions,).
        metric: by name, (prompts, fractions, draws, layers).
        unshuffled: by name, (prompts, layers).
        change: by name, (prompts, fractions, draws, layers); nan where metric_0 is zero to
            rounding.
        loss: (prompts, fractions, draws) the mean cross-entropy in nats of the suffix's tokens but
            the first, predicted from the suffix's tokens; None for a model without a next-token
            loss.
        unshuffled_loss: (prompts,).
        rho: by name, (fractions, layers) Spearman's rank correlation, over prompts, of the change
            (its mean over draws) with the change of the loss; nan where either is constant, or of
            fewer than four prompts; empty without a loss.
        p_value: by name, (fractions, layers) two-sided, by Student's t with prompts - 2 degrees of
            freedom; of one test, not of all of them together.
        untrained: the same of `controls.initialisation`, on the same permutations; None without.
    """

    family: str
    tokens: int
    suffix: int
    fractions: Float[np.ndarray, " fractions"]
    metric: dict[str, Float[np.ndarray, "prompts fractions draws layers"]]
    unshuffled: dict[str, Float[np.ndarray, "prompts layers"]]
    change: dict[str, Float[np.ndarray, "prompts fractions draws layers"]]
    loss: Float[np.ndarray, "prompts fractions draws"] | None
    unshuffled_loss: Float[np.ndarray, " prompts"] | None
    rho: dict[str, Float[np.ndarray, "fractions layers"]]
    p_value: dict[str, Float[np.ndarray, "fractions layers"]]
    untrained: Shuffle | None


def prefix_shuffle(
    model: Transformer,
    ids: Int[ArrayLike, "prompts tokens"] | Int[ArrayLike, " tokens"],
    *,
    suffix: int,
    fractions: Sequence[float] = FRACTIONS,
    seeds: int = 5,
    seed: int = 0,
    control: bool = True,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Shuffle:
    """Permutes a part of every prompt's prefix in place and measures the suffix.

    Every text has the same length and runs through one compiled program. A fraction of 0 is the
    text itself, to the bit.

    Arguments:
        model: any transformer.
        ids: prompts of one length, (prompts, tokens), or one of them.
        suffix: how many tokens at the end stay in place, and are measured; at least two, and two
            fewer than there are.
        fractions: which part of the prefix's tokens is permuted among themselves, see `shuffled`.
        seeds: how many permutations of each prompt and fraction.
        seed: of all of them.
        control: the same of the untrained architecture as well.
        progress: wraps the range over prompts, of the model and then of the control.

    Raises:
        ValueError: a suffix longer than the text or that leaves no prefix to permute, fractions
            outside [0, 1], seeds that are no whole numbers or none, prompts of several lengths, and
            what `metrics` refuses, with the prompt's number.

    Source: the experiment, Liao, arXiv 2604.23740; the protocol, ours.
    """
    prompts = _prompts(model, ids)
    tokens = prompts.shape[1]
    _check_whole(suffix=suffix, seeds=seeds, seed=seed)
    if suffix > tokens:
        raise ValueError(f"a suffix of {suffix} tokens is longer than the text of {tokens}")
    if not 2 <= suffix <= tokens - 2:
        raise ValueError(
            f"a suffix of {suffix} of {tokens} tokens: it needs two, and two before it to permute"
        )
    rates = np.asarray(fractions)
    if rates.dtype.kind not in "iuf" or rates.ndim != 1 or not rates.size:
        raise ValueError(f"fractions must be numbers from 0 to 1, got {fractions!r}")
    rates = rates.astype(np.float64)
    if not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"fractions must be numbers from 0 to 1, got {fractions!r}")
    if seeds < 1 or seed < 0:
        raise ValueError(f"seeds must be at least 1 and the seed 0, got {seeds} and {seed}")
    make = dict(suffix=int(suffix), rates=rates, draws=int(seeds), seed=int(seed))
    untrained = None
    found = _study(model, prompts, **make, progress=progress)
    if control:
        other = controls.untrained(seed, model)
        untrained = _study(other, prompts, **make, progress=progress)
    return found._replace(untrained=untrained)


def shuffled(
    ids: Int[ArrayLike, " tokens"], *, suffix: int, fraction: float, seed: Sequence[int] | int
) -> Int[np.ndarray, " tokens"]:
    """The ids with round(fraction * prefix) tokens of the prefix permuted among their places.

    Places and their order are drawn uniformly; of one seed, those of a larger fraction contain
    those of a smaller. They come from the raw 64-bit stream of NumPy's PCG64, computed on the host:
    the same on every device, and with every version of NumPy and JAX.

    Raises:
        ValueError: ids that are no sequence, a suffix longer than they are, or a fraction outside
            [0, 1].
    """
    ids = np.array(ids)
    _check_whole(suffix=suffix)
    if ids.ndim != 1 or not 0 <= suffix <= len(ids):
        raise ValueError(f"a suffix of {suffix} tokens, and ids of shape {ids.shape}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction must be from 0 to 1, got {fraction}")
    prefix = len(ids) - suffix
    count = round(fraction * prefix)
    draws = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(2 * prefix)
    places = np.argsort(draws[:prefix], kind="stable")[:count]
    ids[places] = ids[places[np.argsort(draws[prefix : prefix + count], kind="stable")]]
    return ids


def twins(
    config: TransformerConfig, *, seed: int = 0, dtype: Any = jnp.float32
) -> tuple[Transformer, Transformer]:
    """Two untrained models of one config, the first with a norm of queries and keys per head, the
    second without; all other weights are the same.

    Raises:
        ValueError: a config whose norms remove the mean, which norms of queries do not.
    """
    if config.norm == "layer":
        raise ValueError(f"{config.family} has LayerNorms; norms of queries are RMSNorms")
    kind = config.query_key_norm or "head"
    pair = [dataclasses.replace(config, query_key_norm=name) for name in (kind, None)]
    one, other = (Transformer(c, rngs=nnx.Rngs(seed), dtype=dtype) for c in pair)
    return one, other


def _check_whole(**values: Any) -> None:
    for name, value in values.items():
        if not is_integer(value):
            raise ValueError(f"{name} must be an int, got {value!r}")


def _prompts(model, ids) -> np.ndarray:
    try:
        prompts = np.asarray(ids)
    except ValueError as error:
        raise ValueError("prompts must all have the same number of tokens") from error
    prompts = prompts[None] if prompts.ndim == 1 else prompts
    if prompts.ndim != 2 or not prompts.size:
        raise ValueError(f"ids must be (prompts, tokens) or (tokens,), got {np.shape(ids)}")
    for number, prompt in enumerate(prompts):
        try:
            check_ids(model, prompt)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return prompts


@functools.partial(jax.jit, static_argnames=("suffix", "with_loss", "interpolated"))
def _suffix(model, ids, *, suffix, with_loss, interpolated):
    """(((metrics, (columns, layers)), loss, finite), close); columns as in `_columns`."""
    (rows, end), close = measured(model, ids, interpolated=interpolated)
    last = {name: a[..., -suffix:] for name, a in rows.items()}
    parts = [jnp.nanmean(last[name], axis=(1, 2))[None] for name in PER_HEAD]
    parts += [jnp.nanmean(last[name], axis=2).T for name in ("field", "radial", "dt")]
    parts += [jnp.mean(last["angle"], axis=1)[None], jnp.mean(last["path"][1:], axis=1)[None]]
    loss = jnp.asarray(jnp.nan)
    if with_loss:
        with jax.default_matmul_precision("highest"):
            logits = model.unembed(end[-suffix:-1])
        scores = jax.nn.log_softmax(logits.astype(at_least_float32(logits.dtype)), axis=-1)
        loss = -jnp.mean(jnp.take_along_axis(scores, ids[1 - suffix :, None], axis=-1))
    return (jnp.concatenate(parts), loss, jnp.all(jnp.isfinite(end))), close


def _columns(model) -> list[str]:
    substeps, branches = names_of(model)
    names = [*PER_HEAD, *(f"field of {name}" for name in branches)]
    names += [*(f"radial of {name}" for name in branches), *(f"dt of {name}" for name in substeps)]
    return [*names, "angle", "path"]


def _study(model, prompts, *, suffix, rates, draws, seed, progress) -> Shuffle:
    names, with_loss = _columns(model), loss_absent(model.config) is None
    run = functools.partial(_suffix, suffix=suffix, with_loss=with_loss)
    shape = (len(prompts), len(rates), draws)
    metric = np.empty((*shape, len(names), model.flow.depth))
    loss = np.empty(shape)
    first, first_loss = np.empty((len(prompts), *metric.shape[3:])), np.empty(len(prompts))
    for number in progress(range(len(prompts))):

        def at(ids, number=number):
            row, value, finite = exactly(run, model, jnp.asarray(ids))
            if not bool(finite):
                raise ValueError(f"prompt {number}: the last state is not finite")
            return np.asarray(row, np.float64), float(value)

        prompt = prompts[number]
        first[number], first_loss[number] = at(prompt)
        for i, fraction in enumerate(rates):
            for draw in range(draws):
                ids = shuffled(prompt, suffix=suffix, fraction=fraction, seed=(seed, number, draw))
                same = np.array_equal(ids, prompt)
                pair = (first[number], first_loss[number]) if same else at(ids)
                metric[number, i, draw], loss[number, i, draw] = pair
    eps = float(jnp.finfo(model.embedding.tokens.dtype).eps)
    base, floor = first[:, None, None], rounding(names, first, eps)[:, None, None]
    change = np.full(metric.shape, np.nan)
    np.divide(_apart(metric, base, floor), base, out=change, where=np.abs(base) > floor)
    rho: dict[str, np.ndarray] = {}
    p_value: dict[str, np.ndarray] = {}
    if with_loss:
        base = first_loss[:, None, None]
        worse = np.mean(_apart(loss, base, ROUNDING * eps * np.abs(base)), axis=2)
        for column, name in enumerate(names):
            mean = np.mean(change[:, :, :, column], axis=2)
            rho[name], p_value[name] = spearman(mean, np.broadcast_to(worse[..., None], mean.shape))
    return Shuffle(
        family=model.config.family,
        tokens=prompts.shape[1],
        suffix=suffix,
        fractions=rates,
        metric={name: metric[:, :, :, column] for column, name in enumerate(names)},
        unshuffled={name: first[:, column] for column, name in enumerate(names)},
        change={name: change[:, :, :, column] for column, name in enumerate(names)},
        loss=loss if with_loss else None,
        unshuffled_loss=first_loss if with_loss else None,
        rho=rho,
        p_value=p_value,
        untrained=None,
    )


def rounding(
    names: Sequence[str], values: Float[np.ndarray, "*prompts metrics layers"], eps: float
) -> Float[np.ndarray, "*prompts metrics layers"]:
    """What rounding may do to means of metrics over tokens: `ROUNDING` eps times

    - for fractions of lengths and cosines, 1;
    - for what is made of the logarithm of a sum (free energy, entropy, the consistency KL), 1 and
      the size of the free energy: the logits are of that size;
    - for the others, their own size.
    """
    size = np.abs(values)
    depth = 1 + size[..., names.index("free_energy"), :]
    for column, name in enumerate(names):
        if name in ("free_energy", "entropy", "consistency"):
            size[..., column, :] = depth
        elif name in ("cosine", "head_radial") or name.startswith("radial of"):
            size[..., column, :] = 1
    return ROUNDING * eps * size


def _apart(values, base, floor):
    """values - base, 0 where that is rounding."""
    apart = values - base
    return np.where(np.abs(apart) <= floor, 0, apart)


def medians(change: Float[np.ndarray, "prompts draws layers"]) -> Float[np.ndarray, " layers"]:
    """Over prompts and draws, those left out that have no value; nan where none has."""
    rows = change.reshape(-1, change.shape[-1]).T
    known = [row[np.isfinite(row)] for row in rows]
    return np.asarray([np.median(row) if row.size else np.nan for row in known])


def spearman(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank correlations over the first axis, and their two-sided p-values by Student's t, though
    not below 2 / samples!, the chance of one order or its reverse.

    Arguments:
        x, y: (samples, ...) of one shape.

    Returns:
        rho and p, (...). Ties have their mean rank. nan where a side is constant or not finite,
        and below four samples.
    """
    count = len(x)
    known = np.isfinite(x).all(axis=0) & np.isfinite(y).all(axis=0) & (count >= FEWEST)
    ranks = [rankdata(np.where(known, a, 0), axis=0) - (count + 1) / 2 for a in (x, y)]
    sizes = [np.sqrt(np.sum(a * a, axis=0)) for a in ranks]
    product = sizes[0] * sizes[1]
    known &= product > 0
    rho = np.sum(ranks[0] * ranks[1], axis=0) / np.where(known, product, 1)
    rho = np.clip(rho, -1, 1)
    degrees = max(count - 2, 1)
    with np.errstate(divide="ignore"):
        score = np.abs(rho) * np.sqrt(degrees / (1 - rho * rho))
    p = np.maximum(2 * student.sf(score, degrees), 2 / math.factorial(min(count, 170)))
    return np.where(known, rho, np.nan), np.where(known, p, np.nan)


def table(study: Shuffle) -> str:
    """A study as plain text, at most 100 columns, one line per metric, changes in percent.

    Medians over prompts, permutations and layers: of the size of the change at half the largest
    fraction and at the largest; there also of the change itself in each third of the layers; the
    same of the untrained control; and the layer whose change follows the loss most closely, with
    how many layers have p < 0.05 (by chance, one in twenty).
    """
    largest = int(np.argmax(study.fractions))
    some = np.where(study.fractions > 0, study.fractions, np.inf)
    half = int(np.argmin(np.abs(some - study.fractions[largest] / 2)))
    prompts, _, draws, layers = next(iter(study.change.values())).shape
    lines = [
        f"{study.family}: {layers} layers, {prompts} prompts of {study.tokens} tokens, suffix "
        f"{study.suffix}, {draws} permutations each"
    ]
    for name, one in (("loss of the suffix, nats", study), ("untrained", study.untrained)):
        if one is not None and one.loss is not None and one.unshuffled_loss is not None:
            values = ", ".join(
                f"{one.loss[:, i].mean():.3f} at {fraction:g}"
                for i, fraction in enumerate(one.fractions)
            )
            lines.append(f"{name}: {one.unshuffled_loss.mean():.3f} as it is; {values}")
    low, high = (f"at {study.fractions[i]:g}" for i in (half, largest))
    lines += [
        "",
        f"{'change, %':<22}|{low:^6}|{high:^24}|{'untrained, ' + high:^23}|{'with the loss':^21}",
        f"{'':<22}| size | size   layers' thirds  | size   layers' thirds |  rho  at     p p<.05",
    ]
    for name in study.change:
        cells = [_percent(np.abs(study.change[name][:, half])), _cells(study, name, largest)]
        control = study.untrained
        cells.append(" " * 23 if control is None else _cells(control, name, largest))
        label = name.replace("attention + feed_forward", "the block")
        lines.append(f"{label:<22}|{' |'.join(cells)}|{_closest(study, name, largest)}")
    return "\n".join(lines)


def _cells(study: Shuffle, name: str, place: int) -> str:
    change = study.change[name][:, place]
    parts = [np.abs(change), *np.array_split(change, 3, axis=-1)]
    return " ".join(_percent(part) for part in parts)


def _percent(part) -> str:
    known = part[np.isfinite(part)]
    if not known.size:
        return f"{'-':>5}"
    value = 100 * float(np.median(known))
    return f"{value:>5.1f}" if abs(value) < 99.95 else f"{value:>5.0f}"


def _closest(study: Shuffle, name: str, place: int) -> str:
    if not study.rho or not np.isfinite(study.rho[name][place]).any():
        return f"{'-':>5}"
    rho, p = study.rho[name][place], study.p_value[name][place]
    layer = int(np.nanargmax(np.abs(rho)))
    below = f"{int(np.sum(p < 0.05))}/{int(np.isfinite(p).sum())}"
    return f"{rho[layer]:>5.2f} {layer + 1:>3} {p[layer]:>5.1g} {below:>5}"
