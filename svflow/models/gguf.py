"""GGUF files as checkpoints: the names, order and config of Hugging Face, dequantised to float32.

Facts are from llama.cpp (conversion/, src/models/, src/llama-model.cpp) and its `gguf` package. A
key of the file's architecture that is not understood is refused by name, and so is every tensor:
either could change the result.
"""

import math
import re
from pathlib import Path

import gguf
import numpy as np

from svflow.models.checkpoint import Checkpoint
from svflow.models.gguf_metadata import GgufFile, hugging_face_config, read_gguf

# The model_type, and the tensors of one block, of each architecture.
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FEED_FORWARD = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = {**_ATTENTION, **_FEED_FORWARD}
_BLOCKS = {
    "llama": {**_DENSE, **_TWO_NORMS},
    "qwen2": {**_DENSE, **_TWO_NORMS},
    "qwen3": {**_DENSE, **_TWO_NORMS, **_HEAD_NORMS},
    "gemma3": {**_DENSE, **_FOUR_NORMS, **_HEAD_NORMS},
}
_BIASES = {  # the tensors that may come with a bias
    "llama": {*_ATTENTION, *_FEED_FORWARD},
    "qwen2": {"attn_q", "attn_k", "attn_v"},
    "qwen3": set[str](),
    "gemma3": set[str](),
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# How many bytes of a tensor are dequantised at a time.
_PIECE = 1 << 20


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of the llama, qwen2, qwen3 or gemma3 architecture as a checkpoint.

    Tensors are dequantised to float32 as they are read. llama files hold the rows of W_Q and W_K
    permuted for RoPE on interleaved pairs; they are put back. gemma3 files hold 1 + w for every
    norm; w is returned.

    Raises:
        ValueError: the file is damaged, or its architecture, a metadata key, a tensor or a
            quantisation is not handled; it is named.
    """
    file = read_gguf(path)
    arch = file.get("general.architecture", str)
    if arch not in _BLOCKS:
        raise ValueError(
            f"{path}: the architecture {arch!r} is not handled, only {', '.join(_BLOCKS)}"
        )
    if (kind := file.get("general.type", str, "model")) != "model":
        raise ValueError(f"{path}: general.type is {kind!r}, not a model")
    if (parts := file.get("split.count", int, 0)) > 1:
        raise ValueError(f"{path} is one of {parts} parts: merge them with llama-gguf-split first")

    stored: dict[str, gguf.ReaderTensor] = {}
    for tensor in file.tensors:
        if tensor.name != "rope_freqs.weight" or arch != "llama":
            stored[_hugging_face_name(file, arch, tensor.name)] = tensor
    shapes = {name: tuple(reversed(t.shape.tolist())) for name, t in stored.items()}
    config = hugging_face_config(file, arch, shapes)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for name, tensor in stored.items():
        _check_type(file, tensor)
        projection = name.split(".")[-2]
        if projection in heads and shapes[name][0] != heads[projection] * config["head_dim"]:
            raise ValueError(
                f"{path}: {tensor.name} has {shapes[name][0]} rows, which are not "
                f"{heads[projection]} heads of width {config['head_dim']}"
            )
    # What reading needs, without the reader, whose map of the file would stay in memory.
    places = {name: (t.name, t.tensor_type, t.data_offset, t.n_bytes) for name, t in stored.items()}

    def read(name: str) -> np.ndarray:
        values = _dequantised(path, *places[name], shapes[name])
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            # row (head, frequency, half) of the file is row (head, half, frequency) of the original
            pairs = values.reshape(heads[projection], -1, 2, *values.shape[1:])
            return pairs.swapaxes(1, 2).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values -= 1
        return values

    if arch == "qwen2":  # Hugging Face's Qwen2Config has no such key: it is the quotient
        del config["head_dim"]
    return Checkpoint(config, shapes, read, str(path))


def _hugging_face_name(file: GgufFile, arch: str, name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if part in _BLOCKS[arch] and (kind == "weight" or part in _BIASES[arch]):
            return f"model.layers.{layer}.{_BLOCKS[arch][part]}.{kind}"
    elif name.removesuffix(".weight") in _OUTSIDE and name.endswith(".weight"):
        return f"{_OUTSIDE[name.removesuffix('.weight')]}.weight"
    raise ValueError(f"{file.path}: the tensor {name} of a {arch} model is not handled")


def _check_type(file: GgufFile, tensor: gguf.ReaderTensor) -> None:
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"{file.path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
            "package does not dequantise"
        ) from error


def _dequantised(
    path: Path,
    name: str,
    kind: gguf.GGMLQuantizationType,
    offset: int,
    size: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    """A tensor in float32. Blocks lie within rows, so that it is done a few rows at a time."""
    rows = math.prod(shape[:-1])
    values = np.empty((rows, shape[-1]), np.float32)
    step = max(1, _PIECE * rows // size)
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, rows, step):
            part = values[start : start + step]
            block = np.fromfile(file, np.uint8, len(part) * (size // rows))
            if block.size < len(part) * (size // rows):
                raise ValueError(f"{path} ends within {name}")
            part[:] = gguf.dequantize(block.reshape(len(part), -1), kind)
    return values.reshape(shape)
