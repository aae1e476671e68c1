"""The embedded default model: a small language model in GPT-2's format, trained by this project.

It is trained by `benchmarks/train_default.py` on two public-domain English texts; `training.json`
beside the weights records the corpus' sha256, every setting, and the loss curve.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

PASSAGE = (
    "It was a clear morning when the ship left the harbour, and the old captain stood upon the "
    "deck without a word. He had seen the whale once before, far out upon the southern sea, and "
    "he knew that he would see it again. The men looked to the horizon, where the water met the "
    "sky, and there was nothing but the long white line of the waves. At last the captain turned "
    "to his mate and said that they would sail on through the night, whatever the wind might do, "
    "for there was no harbour in the world where a man could hide from the thing he had sworn to "
    "find."
)
"""The built-in text of `python -m svflow`, written for it: in neither training text."""


def default_model_path(step: int | None = None) -> Path:
    """The folder of the embedded model, or of its checkpoint after `step` steps of training.

    The untrained weights are not stored: they are
    `Transformer(config, rngs=nnx.Rngs(training_record()["init_seed"]))`.

    Raises:
        ValueError: a step of which no checkpoint is kept.
    """
    kept = training_record()["checkpoints"]
    if step is None or step == kept[-1]:
        return HERE / "default"
    if step not in kept:
        raise ValueError(f"no checkpoint after {step} steps; there are {kept}")
    return HERE / f"default_step_{step}"


def training_record() -> dict[str, Any]:
    """How the embedded model was trained: settings, corpus sha256, loss curve, checkpoints."""
    return json.loads((HERE / "default" / "training.json").read_text())
