"""Why routers need balancing and attention does not: a small mixture of experts, trained.

    python benchmarks/collapse.py [--steps 3000] [--seeds 5] [--rates 1 10 100] [--out FILE.md]
        [--picture FILE.png]

The task: x in R^16 from eight Gaussian clusters of the same weight; the target is a fixed linear
map of x, another for every cluster. The model is a mixture of eight affine experts E_e with a
posterior q(e|x), all trained from scratch by Adam on fresh batches. What differs is q:

- none: a router q = softmax(W x + b), top-1: the output is q_e E_e(x) of the likeliest expert; no
  regulariser;
- switch: the same with .01 times the Switch loss, experts sum_e f_e qbar_e, f_e the share of x that
  go to e and qbar_e the mean of q_e (Fedus et al., "Switch transformers", 2021);
- consistency: the same with .1 L_cons, L_cons = E_x KL(q(e|x) || p(e|x)), p the exact posterior of
  eight Gaussians of equal weight, whose means and deviations are learned beside it by maximum
  likelihood and are no part of the task's loss;
- attention: q is the kernel's posterior, q_e ~ exp(m_e . x - |m_e|^2 / 2) with learned keys m_e,
  and the output the mean over all experts; no regulariser.

Two more tell the kernel from the averaging: "soft router" is the router of "none" with the mean
over all experts, "top-1 kernel" the kernel of "attention" with the likeliest expert alone.

--rates multiplies the learning rate of router or keys: one that moves faster than its experts
locks in its first choices. All rates and seeds of one variant run in one program, in which the
rates share their data; two variants run at a time. All take some two minutes of one core's time.

Measured on 4096 fresh points: the entropy of mean usage over log 8, where usage is the share of x
that go to an expert (of top-1) or its mean weight (of means over all); dead experts, with less than
1% of usage; the task's loss relative to the target's variance; and the mutual information of the
likeliest expert and the cluster, over log 8.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from pages import write_tables

from svflow import plotting
from svflow.plotting import COLOURS, MARKERS, THEMES
from svflow.score.consistency import consistency_loss
from svflow.score.mixtures import GaussianMixture

WIDTH, CLUSTERS, EXPERTS, BATCH, FRESH = 16, 8, 8, 256, 4096
KINDS = ("none", "switch", "consistency", "attention", "soft router", "top-1 kernel")
KERNEL, SOFT = ("attention", "top-1 kernel"), ("attention", "soft router")
SWITCH, CONSISTENCY, RATE = 0.01, 0.1, 3e-3
KEPT = 30  # How many times usage is measured.
SPREAD, NOISE = 1.0, 0.6  # Deviations of the clusters' centres, and within a cluster.


class Task(NamedTuple):
    """The centres of the clusters and their maps."""

    centres: jax.Array
    maps: jax.Array

    def draw(self, key, count):
        """(x, target, cluster)."""
        which, noise = jax.random.split(key)
        z = jax.random.randint(which, (count,), 0, CLUSTERS)
        x = self.centres[z] + NOISE * jax.random.normal(noise, (count, WIDTH))
        return x, jnp.einsum("bd,bde->be", x, self.maps[z]), z


def task(key) -> Task:
    centre, maps = jax.random.split(key)
    return Task(
        SPREAD * jax.random.normal(centre, (CLUSTERS, WIDTH)),
        jax.random.normal(maps, (CLUSTERS, WIDTH, WIDTH)) / WIDTH**0.5,
    )


class Experts(nnx.Module):
    """Eight affine experts, what chooses among them, and the Gaussians of L_cons."""

    def __init__(self, rngs: nnx.Rngs):
        def normal(*shape, size):
            return nnx.Param(size * jax.random.normal(rngs.params(), shape))

        self.maps = normal(EXPERTS, WIDTH, WIDTH, size=WIDTH**-0.5)
        self.biases = nnx.Param(jnp.zeros((EXPERTS, WIDTH)))
        self.router = normal(EXPERTS, WIDTH, size=WIDTH**-0.5)
        self.router_bias = nnx.Param(jnp.zeros((EXPERTS,)))
        means = SPREAD * jax.random.normal(rngs.params(), (EXPERTS, WIDTH))
        self.mixture = GaussianMixture(means, jnp.full((EXPERTS,), 2.0))

    def __call__(self, x, kind):
        """(the output, q, usage)."""
        logits = x @ self.router[...].T
        if kind in KERNEL:
            logits = logits - jnp.sum(self.router[...] ** 2, axis=-1) / 2
        else:
            logits = logits + self.router_bias[...]
        q = jax.nn.softmax(logits)
        usage = q if kind in SOFT else jax.nn.one_hot(jnp.argmax(q, axis=-1), EXPERTS)
        weight = q if kind in SOFT else q * usage
        # One product for all experts.
        maps = self.maps[...].transpose(1, 0, 2).reshape(WIDTH, -1)
        outputs = (x @ maps).reshape(len(x), EXPERTS, WIDTH) + self.biases[...]
        return jnp.einsum("be,beo->bo", weight, outputs), q, usage


def loss_of(model, kind, x, target):
    output, q, usage = model(x, kind)
    loss = jnp.mean((output - target) ** 2) / jnp.mean(target**2)
    if kind == "switch":
        loss = loss + SWITCH * EXPERTS * jnp.sum(jnp.mean(usage, axis=0) * jnp.mean(q, axis=0))
    if kind == "consistency":
        held = jax.lax.stop_gradient(model.mixture)
        loss = loss + CONSISTENCY * consistency_loss(held, x, q)
        loss = loss - jnp.mean(model.mixture.log_density(x)) / WIDTH
    return loss


def measure(model, kind, problem, key):
    x, target, cluster = problem.draw(key, FRESH)
    output, q, usage = model(x, kind)
    mean = jnp.mean(usage, axis=0)
    chosen = jax.nn.one_hot(jnp.argmax(q, axis=-1), EXPERTS)
    joint = chosen.T @ jax.nn.one_hot(cluster, CLUSTERS) / FRESH

    def entropy(p):
        return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0))

    shared = entropy(joint.sum(axis=0)) + entropy(joint.sum(axis=1)) - entropy(joint)
    return dict(
        entropy=entropy(mean) / np.log(EXPERTS),
        dead=jnp.sum(mean < 0.01),
        loss=jnp.mean((output - target) ** 2) / jnp.mean(target**2),
        information=shared / np.log(CLUSTERS),
    )


@functools.partial(
    jax.jit,
    static_argnames=("kind", "steps"),
    # Compiles in two thirds of the time, and runs as fast.
    compiler_options={"xla_backend_optimization_level": 1},
)
def train(keys, rates, *, kind, steps):
    """The measures of every rate and seed, (rates, seeds, KEPT + 1)."""

    def one(rate, key):
        problem_key, init, data, fresh = jax.random.split(key, 4)
        problem, model = task(problem_key), Experts(nnx.Rngs(init))
        optimiser = optax.adam(RATE)

        def paced(path, update):
            name = jax.tree_util.keystr(path)
            return update * (rate if "router" in name else 0.0 if "log_weights" in name else 1.0)

        def step(state, number):
            model, memory = state
            x, target, _ = problem.draw(jax.random.fold_in(data, number), BATCH)
            slope = jax.grad(loss_of)(model, kind, x, target)
            updates, memory = optimiser.update(slope, memory)
            updates = jax.tree_util.tree_map_with_path(paced, updates)
            return (optax.apply_updates(model, updates), memory), None

        def block(state, number):
            size = steps // KEPT
            following, _ = jax.lax.scan(step, state, number * size + jnp.arange(size))
            return following, state[0]

        state, models = jax.lax.scan(block, (model, optimiser.init(model)), jnp.arange(KEPT))
        models = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), models, state[0])
        return jax.lax.map(lambda model: measure(model, kind, problem, fresh), models)

    # The data do not depend on the rate: mapped over outside, they are drawn once for all of them.
    seeds = jax.vmap(one, in_axes=(None, 0))
    return jax.vmap(seeds, in_axes=(0, None))(rates, keys)


def picture(results, steps, rate, path) -> None:
    """Usage entropy, dead experts and loss over training; the median seed and the range."""
    at = np.linspace(0, steps // KEPT * KEPT, KEPT + 1)
    titles = dict(
        entropy="entropy of usage / log 8", dead="dead experts of 8", loss="loss / variance"
    )
    with matplotlib.rc_context(plotting.style("light")):
        figure = Figure(figsize=(plotting.WIDE, 3.4))
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.15, top=0.72, wspace=0.2)
        panels = figure.subplots(1, 3)
        handles = []
        for axes, (name, title) in zip(panels, titles.items()):
            for hue, kind in enumerate(KINDS[:4]):
                values = np.asarray(results[kind][name])
                colour = COLOURS["light"][hue]
                axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.13, lw=0)
                (line,) = axes.plot(
                    at, np.median(values, axis=0), color=colour, marker=MARKERS[hue], mew=0,
                    markevery=5, label=kind,
                )  # fmt: skip
                if axes is panels[0]:
                    handles.append(line)
            axes.set_title(title, pad=8, size=10)
            axes.set_xlabel("step")
            axes.grid(axis="y")
            axes.set_axisbelow(True)
        panels[2].set_yscale("log")
        head = f"Eight experts, learning rate of router or keys {rate:g} times the experts'"
        figure.text(0.006, 0.965, head, size=11, weight="bold", va="top")
        figure.text(
            0.994, 0.955, "median and range of seeds", size=8.5, va="top", ha="right",
            color=THEMES["light"]["pale"],
        )  # fmt: skip
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.006, 0.88), ncols=4,
            borderaxespad=0, borderpad=0,
        )  # fmt: skip
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), given.seeds)
    lines = [
        "| rate | q | usage entropy | dead experts | seeds with a dead one | loss | information |",
        "|---" * 7 + "|",
    ]
    record: dict[str, dict] = {}
    start, found = time.perf_counter(), {}
    rates = jnp.asarray(given.rates)

    def one(kind):
        measured = train(keys, rates, kind=kind, steps=given.steps)
        return {name: np.asarray(a, np.float64) for name, a in measured.items()}

    with ThreadPoolExecutor(2) as pool:  # each keeps one core busy
        for kind, measures in zip(KINDS, pool.map(one, KINDS)):
            found[kind] = measures
            print(f"{kind}: {time.perf_counter() - start:.0f} s", flush=True)
    for place, rate in enumerate(given.rates):
        results = {
            kind: {name: a[place] for name, a in measures.items()}
            for kind, measures in found.items()
        }
        for kind in KINDS:
            last = {name: a[:, -1] for name, a in results[kind].items()}
            cells = [
                f"{rate:g}",
                kind,
                *(f"{last[n].mean():.3f} ({last[n].min():.2f} to {last[n].max():.2f})"
                  for n in ("entropy",)),
                f"{last['dead'].mean():.1f}",
                f"{int((last['dead'] > 0).sum())}/{given.seeds}",
                f"{last['loss'].mean():.3f} ({last['loss'].min():.3f} to {last['loss'].max():.3f})",
                f"{last['information'].mean():.2f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        record[f"{rate:g}"] = {
            kind: {name: np.round(a, 4).tolist() for name, a in measures.items()}
            for kind, measures in results.items()
        }
        if given.picture is not None and rate == given.rates[0]:
            picture(results, given.steps, rate, given.picture)
    if given.out is not None:
        write_tables(given.out, lines)
        head = dict(jax=jax.__version__, steps=given.steps, seeds=given.seeds, kept=KEPT)
        given.out.with_suffix(".json").write_text(json.dumps(head | dict(rates=record)) + "\n")


if __name__ == "__main__":
    main()
