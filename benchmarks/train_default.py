"""Trains the embedded default model: a small GPT-2 on two public-domain English texts.

    python benchmarks/train_default.py CORPUS_FOLDER [--out svflow/data]

The folder holds moby-dick.txt and state-of-the-union.txt; their sha256 is recorded. A run that was
stopped goes on from its last saved state and ends with the same weights on the same machine: step
k's batch and the initial weights depend on seeds alone. Writes the final model and its tokenizer to
OUT/default, checkpoints along training to OUT/default_step_N, and the record to
OUT/default/training.json.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import svflow as sv

FILES = ("moby-dick.txt", "state-of-the-union.txt")
SETTINGS = dict(
    init_seed=0,
    data_seed=1,
    vocab_size=2048,
    context=256,
    batch=8,
    steps=3000,
    checkpoints=[100, 400, 1200, 3000],
    learning_rate=2e-3,
    warmup=200,
    weight_decay=0.1,
    b2=0.98,
    clip=1.0,
    held_out=0.05,
)
MODEL = dict(
    model_type="gpt2",
    architectures=["GPT2LMHeadModel"],
    activation_function="gelu_new",
    vocab_size=SETTINGS["vocab_size"],
    n_positions=SETTINGS["context"],
    n_embd=128,
    n_layer=8,
    n_head=4,
    layer_norm_epsilon=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def read_corpus(folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """The sha256 of each file, and the training and held-out parts (the end of each file)."""
    digests, train, held = {}, [], []
    for name in FILES:
        data = (folder / name).read_bytes()
        digests[name] = hashlib.sha256(data).hexdigest()
        text = data.decode("utf-8")
        cut = int(len(text) * (1 - SETTINGS["held_out"]))
        train.append(text[:cut])
        held.append(text[cut:])
    return digests, train, held


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE, trained on the training part alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SETTINGS["vocab_size"],
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.split("\n\n")), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream of ids, each begun by the end-of-text token."""
    return np.concatenate([[0, *tokenizer.encode(text).ids] for text in texts]).astype(np.int32)


def loss(model: sv.Transformer, batch: jax.Array) -> jax.Array:
    """Mean next-token cross-entropy in nats of a (batch, context + 1) array of ids."""

    def one(ids):
        x0 = model.embed(ids[:-1])
        end = [float(model.flow.depth)]
        adjoint = sv.ScanAdjoint(checkpoint=False)
        logits = model.unembed(sv.simulate(model.flow, x0, ts=end, adjoint=adjoint).xs[-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:]).mean()

    return jax.vmap(one)(batch).mean()


def decayed(model: sv.Transformer) -> sv.Transformer:
    """Weight decay on the kernels of the layers, not on biases, norms and tables."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "kernel" in jax.tree_util.keystr(path), model
    )


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(SETTINGS["clip"]),
    optax.adamw(
        optax.warmup_cosine_decay_schedule(
            0.0, SETTINGS["learning_rate"], SETTINGS["warmup"], SETTINGS["steps"],
            SETTINGS["learning_rate"] / 20,
        ),
        b2=SETTINGS["b2"],
        weight_decay=SETTINGS["weight_decay"],
        mask=decayed,
    ),
)  # fmt: skip


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(model, state, stream, step):
    """One step on a batch of random windows that depends on the step's number alone."""
    key = jax.random.fold_in(jax.random.key(SETTINGS["data_seed"]), step)
    span = SETTINGS["context"] + 1
    starts = jax.random.randint(key, (SETTINGS["batch"],), 0, stream.shape[0] - span)
    batch = jax.vmap(lambda start: jax.lax.dynamic_slice(stream, (start,), (span,)))(starts)
    value, gradient = jax.value_and_grad(loss)(model, batch)
    updates, state = OPTIMIZER.update(gradient, state, model)
    return optax.apply_updates(model, updates), state, value


@jax.jit
def _loss(model, batch):
    return loss(model, batch)


def evaluate(model, stream: np.ndarray) -> float:
    """Mean loss over consecutive windows of a stream."""
    span = SETTINGS["context"] + 1
    count = len(stream) // span // SETTINGS["batch"] * SETTINGS["batch"]
    batches = stream[: count * span].reshape(-1, SETTINGS["batch"], span)
    return float(np.mean([float(_loss(model, jnp.asarray(batch))) for batch in batches]))


def store(model, tokenizer: Tokenizer, folder: Path) -> None:
    """The model in float16, which halves the file; what is stored is what svflow ships."""
    sv.save(jax.tree.map(lambda leaf: leaf.astype(jnp.float16), model), folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, default=Path("svflow/data"))
    parser.add_argument("--every", type=int, default=200, help="steps between saved states")
    options = parser.parse_args()

    digests, train, held = read_corpus(options.corpus)
    tokenizer = train_tokenizer(train)
    stream, held_stream = jnp.asarray(encode(tokenizer, train)), encode(tokenizer, held)
    config = sv.TransformerConfig.from_hf(MODEL)
    model = sv.Transformer(config, rngs=nnx.Rngs(SETTINGS["init_seed"]))
    state = OPTIMIZER.init(model)
    record = dict(
        SETTINGS,
        corpus_sha256=digests,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
        train_tokens=int(stream.size),
        held_out_tokens=int(held_stream.size),
        held_out_bytes_per_token=len("".join(held).encode()) / held_stream.size,
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        seconds=0.0,
        loss=[],
        held_out_loss={"0": evaluate(model, held_stream)},
    )
    saved = options.out / "default_training_state.msgpack"
    leaves, treedef = jax.tree.flatten((model, state))
    if saved.exists():
        kept = flax.serialization.msgpack_restore(saved.read_bytes())
        if kept["corpus_sha256"] != digests:
            raise SystemExit(f"{saved} belongs to another corpus")
        record = json.loads(kept["record"])
        leaves = [jnp.asarray(kept["leaves"][str(i)]) for i in range(len(leaves))]
        model, state = jax.tree.unflatten(treedef, leaves)
    begin = time.perf_counter()
    first = len(record["loss"])
    for step in (bar := tqdm(range(first, SETTINGS["steps"]), initial=first)):
        model, state, value = update(model, state, stream, step)
        record["loss"].append(round(float(value), 4))
        done = step + 1
        if done in SETTINGS["checkpoints"]:
            last = done == SETTINGS["steps"]
            folder = options.out / ("default" if last else f"default_step_{done}")
            store(model, tokenizer, folder)
            record["held_out_loss"][str(done)] = evaluate(model, held_stream)
        if done % options.every == 0 or done == SETTINGS["steps"]:
            now = time.perf_counter()
            record["seconds"] += now - begin
            begin = now
            kept = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves((model, state)))}
            content = dict(corpus_sha256=digests, record=json.dumps(record), leaves=kept)
            part = saved.with_suffix(".part")
            part.write_bytes(flax.serialization.msgpack_serialize(content))
            part.replace(saved)
            bar.set_postfix(loss=f"{np.mean(record['loss'][-options.every :]):.3f}")
    (options.out / "default" / "training.json").write_text(json.dumps(record) + "\n")
    saved.unlink()
    print(json.dumps(record["held_out_loss"]))


if __name__ == "__main__":
    main()
