"""GGUF files written here by llama.cpp's conventions, against the Hugging Face tensors in them."""

import functools
import random
import sys

import gguf
import numpy as np
import pytest
from smollm2 import smollm2_gguf

from svflow.models.checkpoint import open_checkpoint

KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def permuted(weights, heads):
    """Rows for RoPE on interleaved pairs: llama.cpp, conversion/llama.py, `permute`."""
    pairs = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path,
    arch,
    *,
    kind="F32",
    tied=True,
    biases=(),
    width=64,
    hidden=96,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=None,
    vocab=50,
    embeddings="token_embd.weight",
    metadata=(),
    without=(),
    extra=(),
    rope_factors=None,
):
    """Write a random model. Returns its Hugging Face tensors, as they are after quantisation.

    metadata: (key after the architecture, value), added or in place of the usual ones; without:
    keys left out; extra: (name, array), further tensors.
    """
    rng = np.random.default_rng(0)
    head_dim = head_dim or width // heads
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": layers,
        "context_length": 1024,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": 5e5,
        **dict(metadata),
    }
    for key, value in values.items():
        if key not in without:
            full = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{arch}.{key}"
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }[type(value)]
            add(full, value)

    hugging_face = {}

    def add(name, shape, theirs, *, norm=False, permute=0):
        data = rng.standard_normal(shape).astype(np.float32)
        stored_as = KINDS["F32" if len(shape) == 1 else kind]
        stored = data + 1 if norm and arch == "gemma3" else data
        stored = permuted(stored, permute) if permute and arch == "llama" else stored
        stored = gguf.quantize(stored, stored_as)
        writer.add_tensor(name, stored, raw_dtype=stored_as)
        # Quantisation is by rows, so that it commutes with their permutation.
        back = gguf.dequantize(gguf.quantize(data, stored_as), stored_as)
        hugging_face[theirs] = (data + 1) - 1 if norm and arch == "gemma3" else back

    def linear(layer, part, theirs, rows, columns, permute=0):
        name, theirs = f"blk.{layer}.{part}", f"model.layers.{layer}.{theirs}"
        add(f"{name}.weight", (rows, columns), f"{theirs}.weight", permute=permute)
        if part in biases:
            add(f"{name}.bias", (rows,), f"{theirs}.bias", permute=permute)

    add(embeddings, (vocab, width), "model.embed_tokens.weight")
    for i in range(layers):
        rows = {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads}
        for part, theirs in ATTENTION.items():
            if part == "attn_output":
                linear(i, part, f"self_attn.{theirs}", width, heads * head_dim)
            else:
                permute = rows[part] if part != "attn_v" else 0
                linear(i, part, f"self_attn.{theirs}", rows[part] * head_dim, width, permute)
        for part, theirs in MLP.items():
            shape = (width, hidden) if part == "ffn_down" else (hidden, width)
            linear(i, part, f"mlp.{theirs}", *shape)
        for part, theirs in (GEMMA_NORMS if arch == "gemma3" else NORMS).items():
            add(f"blk.{i}.{part}.weight", (width,), f"model.layers.{i}.{theirs}.weight", norm=True)
        if arch in ("qwen3", "gemma3"):
            for part in "qk":
                theirs = f"model.layers.{i}.self_attn.{part}_norm.weight"
                add(f"blk.{i}.attn_{part}_norm.weight", (head_dim,), theirs, norm=True)
    add("output_norm.weight", (width,), "model.norm.weight", norm=True)
    if not tied:
        add("output.weight", (vocab, width), "lm_head.weight")
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    for name, array in extra:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hugging_face


QWEN_BIASES = ("attn_q", "attn_k", "attn_v")
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"biases": QWEN_BIASES},
    "qwen3": {"head_dim": 32},
    "gemma3": {"head_dim": 32, "layers": 7, "metadata": [("attention.sliding_window", 8)]},
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_are_those_of_hugging_face(tmp_path, arch, kind):
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, arch, kind=kind, tied=False, **ARCHITECTURES[arch])
    checkpoint = open_checkpoint(path)
    assert checkpoint.source == str(path)
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in expected.items()}
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, tensor, err_msg=name)
        read[...] = np.nan  # it is the caller's own
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


def test_a_tensor_of_many_pieces(tmp_path):
    """More than the piece that is dequantised at once, and not a multiple of it."""
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, "llama", kind="Q8_0", width=256, vocab=9001, layers=1)
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(open_checkpoint(path).read(name), expected[name])


def test_llama_biases_are_permuted_like_their_weights(tmp_path):
    path = tmp_path / "model.gguf"
    every = (*ATTENTION, *MLP)
    expected = write_gguf(path, "llama", biases=every)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.config["mlp_bias"] is True
    for name in expected:
        np.testing.assert_array_equal(checkpoint.read(name), expected[name], err_msg=name)


COMMON = {
    "dtype": "float32",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 5e5}
CONFIGS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "rope_parameters": ROPE,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "rope_parameters": ROPE,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "hidden_act": "silu",
        "rope_parameters": ROPE,
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": [
            *["sliding_attention"] * 5,
            "full_attention",
            "sliding_attention",
        ],
        "rope_parameters": {
            "full_attention": ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_config_is_that_of_hugging_face(tmp_path, arch):
    path = tmp_path / "model.gguf"
    write_gguf(path, arch, **ARCHITECTURES[arch])
    assert open_checkpoint(path).config == COMMON | CONFIGS[arch]


def config_of(path, arch="llama", **options):
    write_gguf(path, arch, **options)
    return open_checkpoint(path).config


def test_defaults_of_keys_that_are_left_out(tmp_path):
    left_out = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
    )
    config = config_of(tmp_path / "a.gguf", kv_heads=4, without=left_out)
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


def test_the_head_and_the_special_tokens(tmp_path):
    metadata = [
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
        ("tokenizer.ggml.padding_token_id", 3),
    ]
    config = config_of(tmp_path / "a.gguf", tied=False, metadata=metadata)
    assert config["tie_word_embeddings"] is False
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 3]


YARN = [
    ("rope.scaling.type", "yarn"),
    ("rope.scaling.factor", 4.0),
    ("rope.scaling.original_context_length", 256),
]
YARN_CONFIG = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([("rope.scaling.type", "none")], {}),
        ([("rope.scaling.type", "none"), ("rope.scaling.factor", 4.0)], {}),
        ([("rope.scaling.factor", 1.0)], {}),
        (
            [("rope.scaling.type", "linear"), ("rope.scaling.factor", 8.0)],
            {"rope_type": "linear", "factor": 8.0},
        ),
        ([("rope.scaling.factor", 8.0)], {"rope_type": "linear", "factor": 8.0}),
        ([("rope.scale_linear", 2.0)], {"rope_type": "linear", "factor": 2.0}),
        (
            [("rope.scale_linear", 2.0), ("rope.scaling.factor", 4.0)],
            {"rope_type": "linear", "factor": 4.0},
        ),
        (YARN, YARN_CONFIG),
        (
            [
                *YARN,
                ("rope.scaling.yarn_beta_fast", 16.0),
                ("rope.scaling.yarn_beta_slow", 2.0),
                ("rope.scaling.yarn_attn_factor", 1.25),
                ("rope.scaling.yarn_ext_factor", 1.0),
            ],
            YARN_CONFIG | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    config = config_of(tmp_path / "a.gguf", metadata=metadata)
    assert config["rope_parameters"] == ROPE | expected


def test_llama3_factors_are_a_longrope(tmp_path):
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    path = tmp_path / "a.gguf"
    config = config_of(path, rope_factors=factors)
    assert config["rope_parameters"] == {
        "rope_type": "longrope",
        "rope_theta": 5e5,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 1024,
    }
    assert not any("rope" in name for name in open_checkpoint(path).shapes)


def test_gemma3_windows_and_scales(tmp_path):
    def gemma(*metadata, **options):
        path = tmp_path / "a.gguf"
        return config_of(path, "gemma3", **{"head_dim": 32, **options}, metadata=metadata)

    window = ("attention.sliding_window", 8)
    full, sliding = "full_attention", "sliding_attention"
    assert gemma()["sliding_window"] is None
    assert gemma()["layer_types"] == [full] * 3
    assert gemma(window, layers=6)["layer_types"] == [sliding] * 5 + [full]
    pattern = "attention.sliding_window_pattern"
    assert gemma(window, (pattern, 2))["layer_types"] == [sliding, full, sliding]
    listed = gemma(window, (pattern, [True, True, False]))
    assert listed["layer_types"] == [sliding, sliding, full]
    with pytest.raises(ValueError, match=r"sliding_window_pattern is 0"):
        gemma(window, (pattern, 0))
    with pytest.raises(ValueError, match="window pattern has 2 of 3 layers"):
        gemma(window, (pattern, [True, False]))
    scaled = gemma(
        window,
        ("rope.freq_base_swa", 2e4),
        ("rope.scaling.type", "linear"),
        ("rope.scaling.factor", 8.0),
        ("final_logit_softcapping", 30.0),
    )
    assert scaled["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert scaled["final_logit_softcapping"] == 30.0
    # The 27B model scales by width / heads, unlike the others.
    assert gemma(window, layers=62)["query_pre_attn_scalar"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' is not handled"),
        ({"arch": "gemma2"}, "architecture 'gemma2' is not handled"),
        ({"metadata": [("general.type", "adapter")]}, "general.type is 'adapter'"),
        ({"metadata": [("split.count", 2)]}, "one of 2 parts"),
        ({"metadata": [("expert_count", 8)]}, "llama.expert_count is 8; only 0"),
        ({"metadata": [("attention.value_length", 8)]}, "llama.attention.value_length is 8"),
        ({"metadata": [("rope.dimension_count", 8)]}, "llama.rope.dimension_count is 8"),
        ({"metadata": [("attention.causal", False)]}, "llama.attention.causal is False"),
        ({"metadata": [("rope.scaling.attn_factor", 2.0)]}, "attn_factor is 2.0"),
        ({"metadata": [("rope.scaling.yarn_ext_factor", 0.5)]}, "yarn_ext_factor is 0.5"),
        ({"metadata": [("rope.scaling.type", "longrope")]}, "type 'longrope' is not handled"),
        ({"metadata": [("logit_scale", 2.0)]}, "key llama.logit_scale is not handled"),
        ({"metadata": [("attention.scale", 2.0)]}, "key llama.attention.scale is not handled"),
        ({"metadata": [("attention.sliding_window", 4)]}, "attention.sliding_window is not"),
        ({"metadata": [("feed_forward_length", [96, 96, 64])]}, "differs between layers"),
        ({"metadata": [("attention.head_count", 8)]}, "64 rows, which are not 8 heads"),
        ({"metadata": [("block_count", 2)]}, "block_count is 2, but it holds 3"),
        ({"metadata": [("block_count", 2**31)]}, "block_count is 2147483648, but it holds 3"),
        (
            {"metadata": [("block_count", "many")]},
            "block_count is 'many', which is not of type int",
        ),
        ({"metadata": [("attention.head_count", 0)]}, "llama.attention.head_count is 0"),
        ({"without": ["block_count"]}, "no metadata key llama.block_count"),
        ({"without": ["attention.layer_norm_rms_epsilon"]}, "rms_epsilon"),
        ({"embeddings": "output.weight"}, r"no tensor token_embd\.weight"),
        ({"biases": ("attn_q",), "arch": "qwen3"}, r"blk\.0\.attn_q\.bias of a qwen3"),
        ({"biases": ("attn_output",), "arch": "qwen2"}, r"attn_output\.bias of a qwen2"),
        ({"rope_factors": [1.0] * 4}, "4 factors of type F32 for 8"),
        ({"rope_factors": [1.0] * 8, "metadata": YARN}, "with 'yarn' scaling"),
        ({"rope_factors": [1.0] * 8, "arch": "qwen2"}, r"rope_freqs\.weight of a qwen2"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, options, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, **{"arch": "llama", **options})
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.1.attn_qkv.weight",
        "blk.1.attn_q.scale",
        "blk.0.attn_norm.bias",
        "blk.0.attn_q_norm.weight",
        "output_norm.bias",
        "v.patch_embd.weight",
        "rope_factors_long.weight",
    ],
)
def test_unknown_tensors_are_refused_by_name(tmp_path, name):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", extra=[(name, np.zeros((4, 8), np.float32))])
    with pytest.raises(ValueError, match=f"the tensor {name} of a llama model is not handled"):
        open_checkpoint(path)


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", extra=[("output.weight", np.zeros((4, 8), np.int32))])
    with pytest.raises(ValueError, match=r"output\.weight is stored as I32"):
        open_checkpoint(path)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError, match=r"model\.gguf"):
        open_checkpoint(path)
    for content in (b"", b"GGUF", b"not a model at all" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file"):
            open_checkpoint(path)


def test_every_truncation_is_noticed(tmp_path):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", width=32, hidden=32, layers=1, vocab=3)
    content = whole.read_bytes()
    path = tmp_path / "model.gguf"
    for length in [*range(0, 2600, 7), *range(2600, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            open_checkpoint(path)


def test_an_array_that_claims_more_than_the_file_is_refused_at_its_end(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", metadata=[("feed_forward_length", [96, 96, 96])])
    length = np.uint64(3).tobytes()
    content = path.read_bytes()
    place = content.index(length, content.index(b"llama.feed_forward_length"))
    path.write_bytes(content[:place] + np.uint64(2**20).tobytes() + content[place + 8 :])
    with pytest.raises(ValueError, match=r"model\.gguf .* ends early"):
        open_checkpoint(path)


def test_damaged_headers_raise_nothing_but_value_errors(tmp_path, seed):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", width=32, hidden=32, layers=1, vocab=3)
    content = whole.read_bytes()
    path = tmp_path / "model.gguf"
    rng = random.Random(seed)
    refused = []
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(2400)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.shapes:
                checkpoint.read(name)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("model.gguf" in message for message in refused)


def test_the_other_byte_order_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    writer = functools.partial(gguf.GGUFWriter, endianess=other)
    monkeypatch.setattr(gguf, "GGUFWriter", writer)
    write_gguf(path, "qwen3")
    with pytest.raises(ValueError, match=r"model\.gguf has the other byte order"):
        open_checkpoint(path)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"model\.gguf ends within output_norm\.weight"):
        checkpoint.read("model.norm.weight")


def test_smollm2_is_read_as_hugging_face_would_name_it():
    path = smollm2_gguf()
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert len(checkpoint.shapes) == 2 + 30 * 9
    assert sum(int(np.prod(shape)) for shape in checkpoint.shapes.values()) == 134_515_008

    # By hand: a block of Q8_0 is a float16 scale and 32 int8; of Q4_1 a scale, a minimum and 16
    # bytes of two nibbles, the low ones first.
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    row = np.array(tensors["token_embd.weight"].data[123]).reshape(-1, 34)
    by_hand = row[:, :2].copy().view(np.float16).astype(np.float32) * row[:, 2:].view(np.int8)
    embedding = checkpoint.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(embedding[123], by_hand.ravel())
    # row (head 2, half 1, frequency 5) is stored at (head 2, frequency 5, half 1)
    row = np.array(tensors["blk.7.attn_k.weight"].data[2 * 64 + 5 * 2 + 1]).reshape(-1, 20)
    scale, low = (row[:, :4].copy().view(np.float16).astype(np.float32)[:, [i]] for i in (0, 1))
    nibbles = np.concatenate([row[:, 4:] & 15, row[:, 4:] >> 4], axis=1)
    key = checkpoint.read("model.layers.7.self_attn.k_proj.weight")
    np.testing.assert_array_equal(key[2 * 64 + 32 + 5], (scale * nibbles + low).ravel())
