"""The embedded model and the record of its training."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import svflow as sv

RECORD = sv.data.training_record()


@jax.jit
def loss(model, ids):
    logits = model(ids[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:]).mean()


def test_the_record():
    assert len(RECORD["loss"]) == RECORD["steps"] == RECORD["checkpoints"][-1]
    assert [int(step) for step in RECORD["held_out_loss"]] == [0, *RECORD["checkpoints"]]
    for digest in RECORD["corpus_sha256"].values():
        assert re.fullmatch("[0-9a-f]{64}", digest)


def test_training_lowers_the_loss_on_a_text_it_has_not_seen():
    tokenizer = sv.load_tokenizer(sv.data.default_model_path())
    ids = jnp.asarray(tokenizer.encode(sv.data.PASSAGE))
    assert tokenizer.decode(ids) == sv.data.PASSAGE
    models = [sv.load(sv.data.default_model_path(step)) for step in RECORD["checkpoints"]]
    config = models[-1].config
    untrained = sv.Transformer(config, rngs=nnx.Rngs(RECORD["init_seed"]))
    losses = [float(loss(model, ids)) for model in [untrained, *models]]
    assert all(np.diff(losses) < 0), losses
    # Untrained logits are about 0, so that every token is as likely as any other.
    assert abs(losses[0] - np.log(config.vocab_size)) < 0.1
    assert losses[-1] < 4.5
    # Not trained on the passage, and no worse on it than on what was held out by much.
    assert abs(losses[-1] - RECORD["held_out_loss"]["3000"]) < 0.7
    assert sum(leaf.size for leaf in jax.tree.leaves(untrained)) == RECORD["parameters"]


def test_a_step_that_is_not_kept():
    assert sv.data.default_model_path(3000) == sv.data.default_model_path()
    with pytest.raises(ValueError, match="no checkpoint after 7 steps"):
        sv.data.default_model_path(7)
