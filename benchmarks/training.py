"""Training steps a second of a sparse machine, against gather-and-attend in PyTorch eager.

    python benchmarks/training.py [--batch 256] [--pairs 30] [--rounds 7] [--threads N]
        [--out FILE.json]

Dyck-1, 2 layers, 2 heads of width 16, a state of 256 columns; losses at the answer. Both sides run
the same step: forward, backward by the embeddings and the output, AdamW. PyTorch gathers the
columns of every R_V as they are, zeros included, and attends with each head. Equality of the loss
and of all gradients is checked first, from equal weights on equal sequences; then the contestants
take turns on the same cores, medians over rounds of ten steps. float32.

- step: on one batch that is there, both sides alike.
- drawn: svflow's step as `ut.train` takes it, with the batch drawn inside.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import torch
from timing import race, seconds

import universal as ut
from universal import training

RECIPE = ut.Recipe("sparse", 2, 2, 16, 16)
RATE, DECAY = 3e-3, 1e-3
TOGETHER = 10
"""Steps of each turn."""


class Reference(torch.nn.Module):
    """The sparse machine as gathers and attention."""

    def __init__(self, attention: ut.AttentionTransformer, embedding: ut.Embedding):
        super().__init__()
        self.layers, self.scale = attention.depth, attention.scale
        self.tables = torch.nn.ParameterList(
            torch.nn.Parameter(torch.tensor(np.asarray(table))) for table in embedding
        )
        query, key, value = (
            torch.tensor(np.asarray(kernel.sources), dtype=torch.long)
            for kernel in attention.maps[:3]
        )
        # A column of zeros behind the last one.
        self.value = torch.where(value < 0, attention.width, value)
        self.query, self.key = query, key

    def loss(self, ids, labels, place):
        tokens, positions, unembed = self.tables
        x = tokens[ids] + positions[: ids.shape[1]]
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in range(self.layers):
            q = x[..., self.query[layer]].transpose(1, 2)
            k = x[..., self.key[layer]].transpose(1, 2)
            scores = (self.scale * q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)
            padded = torch.nn.functional.pad(x, (0, 1))
            v = padded[..., self.value[layer]].transpose(1, 2)
            x = (scores.softmax(-1) @ v).sum(1)
        answers = (x @ unembed)[torch.arange(len(ids)), place]
        return torch.nn.functional.cross_entropy(answers, labels)


def contestants(batch: int, pairs: int):
    task = ut.dyck1_task(pairs)
    settings = ut.Settings(
        batch=batch, learning_rate=RATE, weight_decay=DECAY, clip=1e9, steps=10**6
    )
    flow = RECIPE.build(jax.random.key(0))
    start = training._starts(
        training._stream((0,), training.START), task=task, width=flow.width,
        columns=RECIPE.out_width, scale=1.0, dtype=jnp.float32,
    )  # fmt: skip
    embedding = jax.tree.map(lambda table: table[0], start)
    drawn = task.draw(jax.random.key(2), batch)
    slope = jax.jit(jax.value_and_grad(training.loss_of, has_aux=True))
    (ours, _), (gradient, _) = slope((embedding, None), flow, drawn)

    theirs = Reference(flow.attention, embedding)
    ids = torch.tensor(np.asarray(drawn.ids), dtype=torch.long)
    place = torch.tensor(np.argmax(np.asarray(drawn.mask), axis=1))
    labels = torch.tensor(np.asarray(drawn.labels), dtype=torch.long)[torch.arange(batch), place]
    loss = theirs.loss(ids, labels, place)
    loss.backward()
    errors = {"loss": abs(float(ours) - float(loss.detach())) / abs(float(loss.detach()))}
    for name, own, other in zip(embedding._fields, gradient, theirs.tables):
        wanted = other.grad.numpy()
        errors[name] = float(np.abs(np.asarray(own) - wanted).max() / np.abs(wanted).max())
    if not max(errors.values()) < 1e-5:
        raise SystemExit(f"losses or gradients differ: {errors}")

    torch_adam = torch.optim.AdamW(theirs.parameters(), lr=RATE, weight_decay=DECAY)

    def torch_steps():
        for _ in range(TOGETHER):
            torch_adam.zero_grad(set_to_none=True)
            loss = theirs.loss(ids, labels, place)
            loss.backward()
            torch_adam.step()
        return loss.item()

    # As in `ut.train`: several steps are one program.
    options = dict(task=task, settings=settings, axis=0)
    flows = training._machines(training._stream((0,), training.MACHINE), machine=RECIPE)
    number = [0]

    def steps_of(task):
        run = [
            jax.tree.map(jnp.copy, (start, None)),
            training._states((start, None), settings=settings),
        ]

        def steps():
            number[0] += 1
            keys = [training._stream((0,), training.TRAIN, number[0], k) for k in range(TOGETHER)]
            run[:], (value, _) = training._update(
                *run, flows, jnp.stack(keys), **options | dict(task=task)
            )
            return value

        return steps

    there = task._replace(name="there", draw=lambda key, count: drawn)
    return dict(step=steps_of(there), drawn=steps_of(task), torch=torch_steps), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # As XLA does: on one batch the softmax saturates, and denormal numbers take torch four times
    # as long.
    torch.set_flush_denormal(True)
    sides, errors = contestants(options.batch, options.pairs)
    compile_s = {name: seconds(side) for name, side in sides.items()}
    medians = race(sides, options.rounds)
    row = dict(
        jax=jax.__version__,
        torch=torch.__version__,
        batch=options.batch,
        tokens=2 * options.pairs + 3,
        columns=RECIPE.width,
        threads=options.threads,
        errors=errors,
        first_s=compile_s,
        steps_per_second={name: TOGETHER / t for name, t in medians.items()},
        step_over_torch=medians["torch"] / medians["step"],
        drawn_over_torch=medians["torch"] / medians["drawn"],
    )
    print(json.dumps(row, indent=1))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(row, file, indent=1)


if __name__ == "__main__":
    main()
