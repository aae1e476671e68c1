"""Checkpoints with references that Hugging Face transformers 5.24 computed in float64."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from compare import batched, error
from smollm2 import smollm2_gguf

import svflow as sv

DATA = Path(__file__).parent / "data"
GOLDEN = [
    "albert",
    "bert",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neo",
    "llama",
    "olmo2",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]


def test_every_golden_checkpoint_is_there():
    assert sorted(path.name for path in (DATA / "golden").iterdir()) == GOLDEN
    for name in GOLDEN:
        for file in ("config.json", "model.safetensors", "reference.npz"):
            assert (DATA / "golden" / name / file).is_file(), (name, file)


# Hugging Face's norms and softmax round to float32 inside, so that its float64 is about 1e-6 off.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float64, 2e-5), (jnp.float32, 1e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name, dtype, tolerance):
    folder = DATA / "golden" / name
    reference = np.load(folder / "reference.npz")
    model = sv.load(folder, dtype=dtype)
    embedded, outputs, logits = batched(model, jnp.asarray(reference["input_ids"]), None)
    assert embedded.dtype == outputs.dtype == logits.dtype == dtype
    assert error(embedded, reference["embedded"]) < tolerance
    expected = reference["block_outputs"]
    assert len(expected) == model.config.depth == outputs.shape[1]
    for layer, block in enumerate(expected):
        assert error(outputs[:, layer], block) < tolerance, f"layer {layer}"
    assert error(logits, reference["logits"]) < tolerance


def check_real(model, reference):
    """References in float32, of the last token's logits only."""
    ids = jnp.asarray(reference["input_ids"])
    embedded, outputs, logits = batched(model, ids, None)
    assert error(embedded, reference["embedded"]) < 5e-4
    assert outputs.shape[1] == len(reference["block_outputs"])
    for layer, block in enumerate(reference["block_outputs"]):
        assert error(outputs[:, layer], block) < 5e-4, f"layer {layer}"
    assert error(logits[:, -1], reference["last_logits"]) < 5e-4
    np.testing.assert_array_equal(np.argmax(logits, -1), reference["argmax"])


def test_trained_albert():
    folder = DATA / "real" / "rxnmapper_albert"
    check_real(sv.load(folder), np.load(folder / "reference.npz"))


def test_trained_smollm2():
    check_real(sv.load(smollm2_gguf()), np.load(DATA / "real" / "smollm2" / "reference.npz"))
