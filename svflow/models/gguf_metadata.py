"""The metadata of a GGUF file, and the Hugging Face config that it stands for.

Facts are from llama.cpp (conversion/, src/models/, src/llama-model.cpp) and its `gguf` package.
"""

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}


_NEEDED: Any = object()  # the default of a key that has to be there


class GgufFile(NamedTuple):
    """The metadata and the tensor table of a GGUF file."""

    path: Path
    fields: dict[str, gguf.ReaderField]
    tensors: list[gguf.ReaderTensor]

    def get(self, key: str, kind: type, default: Any = _NEEDED) -> Any:
        """The value of a metadata key, or the default.

        Raises:
            ValueError: there is no such key and no default, or the value is not of this kind.
        """
        if key not in self.fields and default is not _NEEDED:
            return default
        return self.typed(key, self.value(key), kind)

    def get_list(self, key: str, kind: type) -> list[Any]:
        """The value of a metadata key that is an array of this kind, [] where it is empty."""
        return [self.typed(key, item, kind) for item in self.get(key, list)]

    def value(self, key: str) -> Any:
        """The value of a metadata key. A float32 becomes the decimal that it came from: a file
        holds 9.99999997e-06 for 1e-05."""
        if key not in self.fields:
            raise ValueError(f"{self.path} has no metadata key {key}")
        field = self.fields[key]
        try:
            value = field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {key} is not text: {error}") from error
        if field.types == [gguf.GGUFValueType.FLOAT32]:
            return float(str(np.float32(value)))
        return value

    def typed(self, key: str, value: Any, kind: type) -> Any:
        """The value, which has to be of this kind; an integer will do for a float."""
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ValueError(
                f"{self.path}: {key} is {value!r}, which is not of type {kind.__name__}"
            )
        return value


class _Reader(gguf.GGUFReader):
    """Refuses to read past the end, where the package's own reader goes on with nothing: an array
    that claims 2^50 bytes would fill the memory."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, *arguments: Any, **options: Any) -> Any:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends early")
        return super()._get(offset, dtype, count, *arguments, **options)


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's metadata and tensor table.

    Raises:
        ValueError: the file cannot be read as GGUF, or is of the other byte order; it is named.
    """
    try:
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is not a GGUF file, or is damaged: {error}") from error
    if reader.byte_order == "S":
        raise ValueError(f"{path} has the other byte order than this machine")
    for tensor in reader.tensors:
        if not tensor.n_elements:
            raise ValueError(f"{path}: the tensor {tensor.name} is empty")
    return GgufFile(path, dict(reader.fields), reader.tensors)


def hugging_face_config(
    file: GgufFile, arch: str, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The Hugging Face config (transformers 5.24, `rope_parameters` layout) of a GGUF file."""
    known = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}  # change no result

    def get(key: str, kind: type, default: Any = _NEEDED) -> Any:
        known.add(key)
        full = f"{arch}.{key}"
        if full not in file.fields and default is not _NEEDED:
            return default
        value = file.value(full)
        if isinstance(value, list) and kind is not list:  # one value for each layer
            if len(set(value)) != 1:
                raise ValueError(f"{file.path}: {full} differs between layers: {value}")
            value = value[0]
        value = file.typed(full, value, kind)
        if kind is int and value < (0 if default == 0 else 1):
            raise ValueError(f"{file.path}: {full} is {value}")
        return value

    layers, width = get("block_count", int), get("embedding_length", int)
    heads = get("attention.head_count", int)
    blocks = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    if len(blocks) != layers or any(int(block) >= layers for block in blocks):
        raise ValueError(f"{file.path}: {arch}.block_count is {layers}, but it holds {len(blocks)}")
    head_dim = get("attention.key_length", int, width // heads)
    expected = {
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    for key, value in expected.items():
        if (found := get(key, type(value), value)) != value:
            raise ValueError(f"{file.path}: {arch}.{key} is {found}; only {value} is handled")
    if "model.embed_tokens.weight" not in shapes:
        raise ValueError(f"{file.path} has no tensor token_embd.weight")

    context = get("context_length", int)
    rope = _rope_parameters(file, get, context, head_dim)
    config = {
        "architectures": [f"{_CLASSES[arch]}ForCausalLM"],
        "model_type": "gemma3_text" if arch == "gemma3" else arch,
        "dtype": "float32",
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_dropout": 0.0,
    }
    for name in ("bos", "eos", "padding"):
        key = f"{'pad' if name == 'padding' else name}_token_id"
        config[key] = file.get(f"tokenizer.ggml.{name}_token_id", int, None)
    if arch == "gemma3":
        config |= _gemma3(file, get, layers, width, heads, head_dim, rope)
    else:
        config["hidden_act"] = "silu"
    if arch == "llama":
        config["attention_bias"] = any(n.endswith("_proj.bias") and "attn" in n for n in shapes)
        config["mlp_bias"] = any(n.endswith("_proj.bias") and "mlp" in n for n in shapes)
    elif arch == "qwen3":
        config["attention_bias"] = False
    if arch.startswith("qwen"):
        config |= {"sliding_window": None, "use_sliding_window": False}
    for key in file.fields:
        if key.startswith(f"{arch}.") and key.removeprefix(f"{arch}.") not in known:
            raise ValueError(f"{file.path}: the metadata key {key} is not handled")
    return config


def _rope_parameters(file: GgufFile, get: Any, context: int, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": get("rope.freq_base", float, 10000.0),
    }
    factor, older = (get(f"rope.{key}", float, 0.0) for key in ("scaling.factor", "scale_linear"))
    factor = factor or older
    kind = get(
        "rope.scaling.type", str, "linear"
    )  # llama.cpp takes a factor without a type as linear
    original = get("rope.scaling.original_context_length", int, context)
    fast = get("rope.scaling.yarn_beta_fast", float, 32.0)
    slow = get("rope.scaling.yarn_beta_slow", float, 1.0)
    attention_factor = get("rope.scaling.yarn_attn_factor", float, 0.0)
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
        }
        if attention_factor:
            rope["attention_factor"] = attention_factor
    elif kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise ValueError(f"{file.path}: the rope scaling type {kind!r} is not handled")

    # llama 3 files hold its scaling as the numbers by which the inverse frequencies are divided
    for tensor in file.tensors:
        if tensor.name == "rope_freqs.weight":
            factors = np.asarray(tensor.data).tolist()
            kinds = (tensor.tensor_type.name, rope["rope_type"])
            if kinds != ("F32", "default") or len(factors) != head_dim // 2:
                raise ValueError(
                    f"{file.path}: rope_freqs.weight has {len(factors)} factors of type {kinds[0]} "
                    f"for {head_dim // 2} frequencies, with {kinds[1]!r} scaling"
                )
            rope |= {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
            }
    return rope


def _gemma3(
    file: GgufFile,
    get: Any,
    layers: int,
    width: int,
    heads: int,
    head_dim: int,
    rope: dict[str, Any],
) -> dict[str, Any]:
    window = get("attention.sliding_window", int, 0)
    key = "gemma3.attention.sliding_window_pattern"
    if key in file.fields and gguf.GGUFValueType.ARRAY in file.fields[key].types:
        sliding = [bool(one) for one in get("attention.sliding_window_pattern", list)]
    else:  # the last of every `pattern` layers is full
        pattern = get("attention.sliding_window_pattern", int, 6)
        sliding = [layer % pattern < pattern - 1 for layer in range(layers)]
    if len(sliding) != layers:
        raise ValueError(f"{file.path}: the window pattern has {len(sliding)} of {layers} layers")
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", float, 10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        # llama.cpp tells the 27B model, which scales by width / heads, by its 62 layers
        "query_pre_attn_scalar": width // heads if layers == 62 else head_dim,
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if window and one else "full_attention" for one in sliding
        ],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "final_logit_softcapping": get("final_logit_softcapping", float, 0.0) or None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
