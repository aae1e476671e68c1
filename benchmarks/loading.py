"""Peak memory and time of `sv.load`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import svflow as sv
from benchmarks import models
from benchmarks.rows import GGUF, Case, Peer, row


def shape(width: int, depth: int) -> dict:
    return dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=16 * width,
        hidden_size=width,
        intermediate_size=int(2.75 * width),
        num_hidden_layers=depth,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )


def write_shards(net: sv.Transformer, folder: Path, count: int) -> None:
    """As `sv.save`, in several files with an index."""
    from safetensors.numpy import load_file, save_file

    sv.save(net, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {}
    for shard in range(count):
        name = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = sorted(tensors)[shard::count]
        save_file({n: tensors[n] for n in part}, folder / name)
        where.update(dict.fromkeys(part, name))
    index = dict(metadata={}, weight_map=where)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def case(width, depth, dtype, shards) -> Case:
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name)
    stored = jax.tree.map(lambda a: a.astype(dtype), models.model(shape(width, depth)))
    if shards == 1:
        sv.save(stored, source)
    else:
        write_shards(stored, source, shards)
    count = sum(leaf.size for leaf in jax.tree.leaves(stored))
    exact = Path(folder.name) / "expected"
    exact.mkdir()
    np.savez(exact / "leaves.npz", *(np.asarray(a, np.float32) for a in jax.tree.leaves(stored)))
    del stored

    def check(found):
        leaves = jax.tree.leaves(found)
        with np.load(exact / "leaves.npz") as file:
            pairs = zip(leaves, file.files, strict=True)
            return max(float(np.abs(np.asarray(a) - file[name]).max()) for a, name in pairs)

    def error(ours, theirs):
        table = theirs.get_input_embeddings().weight.detach().numpy()
        return float(np.abs(np.asarray(ours.embedding.tokens[...]) - table).max())

    def hugging_face():
        import torch
        import transformers

        kind = transformers.AutoModelForCausalLM
        return lambda: kind.from_pretrained(folder.name, dtype=torch.float32)

    return Case(
        ours=lambda: sv.load(source),
        peers={"Hugging Face": Peer(hugging_face, None, error)},
        check=check,
        weights=4 * count,
    )


def gguf_case(source) -> Case:
    import gguf

    tensors = gguf.GGUFReader(source).tensors

    def check(found):
        table = next(t for t in tensors if t.name == "token_embd.weight")
        wanted = gguf.dequantize(table.data, table.tensor_type)
        return float(np.abs(np.asarray(found.embedding.tokens[...]) - wanted).max())

    return Case(
        ours=lambda: sv.load(source),
        check=check,
        weights=4 * sum(int(tensor.n_elements) for tensor in tensors),
    )


CLAIM = "loading float32 weights of a Llama shape from {}: peak memory over the weights"
for name, kind, dtype, shards in (
    ("float32", "one float32 file", jnp.float32, 1),
    ("bfloat16", "one bfloat16 file", jnp.bfloat16, 1),
    ("shards", "four float32 files", jnp.float32, 4),
):
    row(
        f"loading/{name}",
        CLAIM.format(kind),
        case,
        full=dict(width=1024, depth=24, dtype=dtype, shards=shards),
        quick=dict(width=32, depth=2, dtype=dtype, shards=shards),
        tolerance=0.0,
        most_peak=1.3,
        rounds=3,
    )
row(
    "loading/gguf",
    "loading SmolLM2-135M from its GGUF file: peak memory over the weights",
    gguf_case,
    full=dict(source=GGUF),
    quick=dict(source=GGUF),
    tolerance=0.0,
    most_peak=1.3,
    rounds=3,
)
