"""Ten training steps of a sparse machine against gather-and-attend in PyTorch, see `training`."""

from __future__ import annotations

from benchmarks.rows import Case, Peer, row


def case(batch, pairs) -> Case:
    import torch

    from benchmarks import training

    # As XLA does: on one batch the softmax saturates, and denormal numbers take torch four times
    # as long.
    torch.set_flush_denormal(True)
    sides, errors = training.contestants(batch, pairs)
    return Case(
        ours=sides["step"],
        peers={
            "PyTorch eager": Peer(lambda: sides["torch"], 1 / 3, None),
            "the same, its batch drawn within": Peer(lambda: sides["drawn"], None, None),
        },
        check=lambda _: max(errors.values()),  # of the loss and of every gradient
    )


row(
    "training_steps/dyck1",
    "ten training steps of a sparse machine of 256 columns on Dyck-1, batch 256, length 63",
    case,
    full=dict(batch=256, pairs=30),
    quick=dict(batch=4, pairs=3),
    tolerance=1e-5,
)
