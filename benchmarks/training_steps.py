"""Training steps of a sparse machine, against gather-and-attend in PyTorch eager.

Dyck-1, 2 layers, 2 heads of width 16, a state of 256 columns; losses at the answer. Both sides run
the same step: forward, backward by the embeddings and the output, AdamW. PyTorch gathers the
columns of every R_V as they are, zeros included, and attends with each head. The loss and all
gradients are compared from equal weights on equal sequences. Beside it stands svflow's step as
`ut.train` takes it, with the batch drawn inside.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import universal as ut
from benchmarks.rows import Case, Peer, row
from universal import training
from universal.evaluation import MACHINE, START, TRAIN, stream_of

RECIPE = ut.Recipe("sparse", 2, 2, 16, 16)
RATE, DECAY = 3e-3, 1e-3
TOGETHER = 10
"""Steps of each turn."""


def reference(torch, attention: ut.AttentionTransformer, tables):
    """loss(ids, labels, place) of the sparse machine as gathers and attention."""
    query, key, value = (
        torch.tensor(np.asarray(kernel.sources), dtype=torch.long) for kernel in attention.maps[:3]
    )
    value = torch.where(value < 0, attention.width, value)  # a column of zeros behind the last one

    def loss(ids, labels, place):
        tokens, positions, unembed = tables
        x = tokens[ids] + positions[: ids.shape[1]]
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in range(attention.depth):
            q = x[..., query[layer]].transpose(1, 2)
            k = x[..., key[layer]].transpose(1, 2)
            scores = (attention.scale * q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)
            padded = torch.nn.functional.pad(x, (0, 1))
            v = padded[..., value[layer]].transpose(1, 2)
            x = (scores.softmax(-1) @ v).sum(1)
        answers = (x @ unembed)[torch.arange(len(ids)), place]
        return torch.nn.functional.cross_entropy(answers, labels)

    return loss


def case(batch, pairs) -> Case:
    import torch

    # As XLA does: on one batch the softmax saturates, and denormal numbers take torch four times
    # as long.
    torch.set_flush_denormal(True)
    task = ut.dyck1_task(pairs)
    settings = ut.Settings(
        batch=batch, learning_rate=RATE, weight_decay=DECAY, clip=1e9, steps=10**6
    )
    flow = RECIPE.build(jax.random.key(0))
    start = training._starts(
        stream_of((0,), START), task=task, width=flow.width,
        columns=RECIPE.out_width, scale=1.0, dtype=jnp.float32,
    )  # fmt: skip
    embedding = jax.tree.map(lambda table: table[0], start)
    drawn = task.draw(jax.random.key(2), batch)
    slope = jax.jit(jax.value_and_grad(training.loss_of, has_aux=True))
    (ours, _), (gradient, _) = slope((embedding, None), flow, drawn)

    tables = [torch.nn.Parameter(torch.tensor(np.asarray(table))) for table in embedding]
    loss_of = reference(torch, flow.attention, tables)
    ids = torch.tensor(np.asarray(drawn.ids), dtype=torch.long)
    place = torch.tensor(np.argmax(np.asarray(drawn.mask), axis=1))
    labels = torch.tensor(np.asarray(drawn.labels), dtype=torch.long)[torch.arange(batch), place]
    loss = loss_of(ids, labels, place)
    loss.backward()
    errors = [abs(float(ours) / float(loss.detach()) - 1)]
    for own, other in zip(gradient, tables):
        wanted = other.grad.numpy()
        errors.append(float(np.abs(np.asarray(own) - wanted).max() / np.abs(wanted).max()))
    adam = torch.optim.AdamW(tables, lr=RATE, weight_decay=DECAY)

    def torch_steps():
        for _ in range(TOGETHER):
            adam.zero_grad(set_to_none=True)
            loss = loss_of(ids, labels, place)
            loss.backward()
            adam.step()
        return loss.item()

    # As in `ut.train`: several steps are one program.
    options = dict(settings=settings, axis=0)
    flows = training._machines(stream_of((0,), MACHINE), machine=RECIPE)
    number = [0]

    def steps_of(task):
        run = [
            jax.tree.map(jnp.copy, (start, None)),
            training._states((start, None), settings=settings),
        ]

        def steps():
            number[0] += 1
            keys = [stream_of((0,), TRAIN, number[0], k) for k in range(TOGETHER)]
            run[:], (value, _) = training._update(
                *run, flows, jnp.stack(keys), task=task, **options
            )
            return value

        return steps

    there = task._replace(name="there", draw=lambda key, count: drawn)
    return Case(
        ours=steps_of(there),
        peers={
            "PyTorch eager": Peer(lambda: torch_steps, 1 / 3, None),
            "the same, its batch drawn within": Peer(lambda: steps_of(task), None, None),
        },
        check=lambda _: max(errors),  # of the loss and of every gradient
    )


row(
    "training_steps/dyck1",
    "ten training steps of a sparse machine of 256 columns on Dyck-1, batch 256, length 63",
    case,
    full=dict(batch=256, pairs=30),
    quick=dict(batch=4, pairs=3),
    tolerance=1e-5,
)
