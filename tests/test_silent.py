"""Where a value can be wrong silently: each such place, and each refusal that guards one."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compare import batched
from configs import FAMILY_CONFIGS
from flax import nnx
from safetensors.numpy import load_file

import svflow as sv
from svflow import attention
from svflow.models.checkpoint import write_checkpoint
from svflow.models.families import FAMILIES
from svflow.models.families.base import Keys
from svflow.models.layers import Norm, activate

GOLDEN = Path(__file__).parent / "data" / "golden"


def golden_config(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def edited(folder, name, *, config=(), without=(), tensors=None, rename=lambda name: name):
    """A golden checkpoint with other config keys, other tensors or other names of tensors."""
    changed = {**golden_config(name), **dict(config)}
    old = load_file(GOLDEN / name / "model.safetensors")
    new = {**old, **(tensors(old) if tensors else {})}
    new = {rename(key): value for key, value in new.items() if value is not None}
    changed = {key: value for key, value in changed.items() if key not in without}
    write_checkpoint(folder, changed, new.items())
    return folder


def same_parameters(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# Tensors


def test_a_missing_tensor(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"missing tensor '{name}'"):
        sv.load(edited(tmp_path, "llama", tensors=lambda old: {name: None}))


def test_an_unused_tensor(tmp_path):
    name, extra = "model.layers.1.self_attn.q_proj.bias", np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=f"unused tensor '{name}'"):
        sv.load(edited(tmp_path, "llama", tensors=lambda old: {name: extra}))


def test_a_layer_too_many(tmp_path):
    with pytest.raises(ValueError, match=r"unused .*model\.layers\.2"):
        sv.load(edited(tmp_path, "llama", config={"num_hidden_layers": 2}))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.down_proj.weight"),
    ],
)
def test_a_transposed_tensor(tmp_path, name, tensor):
    shape = load_file(GOLDEN / name / "model.safetensors")[tensor].shape
    with pytest.raises(ValueError, match="shape") as error:
        sv.load(edited(tmp_path, name, tensors=lambda old: {tensor: old[tensor].T}))
    assert tensor in str(error.value)
    assert str(shape) in str(error.value)


def test_a_tied_head_that_differs(tmp_path):
    def other(old):
        return {"lm_head.weight": old["model.embed_tokens.weight"] + np.float32(1e-3)}

    with pytest.raises(ValueError, match=r"ties 'lm_head.weight' to 'model.embed_tokens.weight'"):
        sv.load(edited(tmp_path, "llama", tensors=other))


def test_a_tied_head_that_is_repeated(tmp_path):
    def copy(old):
        return {"lm_head.weight": old["model.embed_tokens.weight"]}

    same_parameters(sv.load(edited(tmp_path, "llama", tensors=copy)), sv.load(GOLDEN / "llama"))


def test_an_untied_head_is_its_own(tmp_path):
    """With `tie_word_embeddings` false the same file has no head, and says so."""
    config = {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match=r"missing tensor 'lm_head.weight'"):
        sv.load(edited(tmp_path, "llama", config=config))
    model = sv.load(edited(tmp_path, "llama", config={**config, "architectures": ["LlamaModel"]}))
    with pytest.raises(ValueError, match="no head"):
        model.unembed(jnp.zeros((1, 32), jnp.float32))

    def head(old):
        return {"lm_head.weight": 2 * old["model.embed_tokens.weight"]}

    untied = sv.load(edited(tmp_path, "llama", config=config, tensors=head))
    x = jnp.linspace(-1, 1, 64, dtype=jnp.float32).reshape(2, 32)
    tied = sv.load(GOLDEN / "llama")
    np.testing.assert_allclose(untied.unembed(x), 2 * tied.unembed(x), rtol=1e-5)


def test_a_masked_head_that_is_missing(tmp_path):
    def bare(old):
        return {key: None for key in old if key.startswith("cls.")}

    config = {"architectures": ["BertModel"]}
    model = sv.load(edited(tmp_path, "bert", config=config, tensors=bare))
    with pytest.raises(ValueError, match="no head"):
        model.unembed(jnp.zeros((1, 32), jnp.float32))
    with pytest.raises(ValueError, match="missing"):
        sv.load(edited(tmp_path, "bert", tensors=bare))


# Names


def test_names_of_published_gpt2(tmp_path):
    """No prefix, and causal masks among the tensors."""

    def buffers(old):
        mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
        return {f"transformer.h.{i}.attn.{name}": mask for i in range(3) for name in ("bias",)} | {
            "transformer.h.0.attn.masked_bias": np.float32(-1e4).reshape(1)
        }

    folder = edited(
        tmp_path,
        "gpt2",
        tensors=buffers,
        rename=lambda name: name.removeprefix("transformer."),
    )
    same_parameters(sv.load(folder), sv.load(GOLDEN / "gpt2"))


def test_names_of_published_bert(tmp_path):
    """gamma and beta, poolers, and a head that repeats the embedding and its own bias."""

    def old_tensors(old):
        return {
            "bert.pooler.dense.weight": np.ones((32, 32), np.float32),
            "bert.pooler.dense.bias": np.ones(32, np.float32),
            "cls.seq_relationship.weight": np.ones((2, 32), np.float32),
            "cls.seq_relationship.bias": np.ones(2, np.float32),
            "cls.predictions.decoder.weight": old["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": old["cls.predictions.bias"],
        }

    def rename(name):
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return name.replace("LayerNorm.bias", "LayerNorm.beta")

    folder = edited(tmp_path, "bert", tensors=old_tensors, rename=rename)
    assert any(key.endswith("LayerNorm.gamma") for key in load_file(folder / "model.safetensors"))
    same_parameters(sv.load(folder), sv.load(GOLDEN / "bert"))


def test_one_tensor_under_two_names(tmp_path):
    name = "bert.embeddings.LayerNorm"

    def both(old):
        return {f"{name}.gamma": old[f"{name}.weight"]}

    with pytest.raises(ValueError, match="are the same tensor"):
        sv.load(edited(tmp_path, "bert", tensors=both))


def test_rotary_buffers(tmp_path):
    def buffers(old):
        return {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(3)}

    same_parameters(sv.load(edited(tmp_path, "llama", tensors=buffers)), sv.load(GOLDEN / "llama"))


def test_transposes():
    """GPT-2's Conv1D stores (in, out), torch's Linear (out, in), and square ones hide it."""
    file = load_file(GOLDEN / "gpt2" / "model.safetensors")
    ours = sv.load(GOLDEN / "gpt2").flow.layers.attention
    np.testing.assert_array_equal(ours.output.kernel[1], file["transformer.h.1.attn.c_proj.weight"])
    fused = file["transformer.h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(ours.key.kernel[1], fused[:, 32:64])
    file = load_file(GOLDEN / "llama" / "model.safetensors")
    ours = sv.load(GOLDEN / "llama").flow.layers.attention
    weight = file["model.layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(ours.output.kernel[1], weight.T)


def test_bfloat16_bits(tmp_path):
    """bfloat16 to bfloat16 keeps the bits, and to a wider type is exact."""

    def narrow(old):
        return {key: value.astype(ml_dtypes.bfloat16) for key, value in old.items()}

    folder = edited(tmp_path, "llama", tensors=narrow)
    file = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert file.dtype == ml_dtypes.bfloat16
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        table = sv.load(folder, dtype=dtype).embedding.tokens[...]
        assert table.dtype == dtype
        np.testing.assert_array_equal(np.asarray(table, np.float64), file.astype(np.float64))


def test_a_narrower_type_that_a_weight_does_not_fit(tmp_path):
    """An infinite weight would be silent; what the file itself holds is taken as it is."""
    name = "model.layers.1.mlp.up_proj.weight"
    weight = 1e6 * load_file(GOLDEN / "llama" / "model.safetensors")[name]
    for wide in (weight, weight.astype(ml_dtypes.bfloat16)):
        large = edited(tmp_path, "llama", tensors=lambda old, wide=wide: {name: wide})
        assert np.isfinite(sv.load(large).flow.layers.feed_forward.up.kernel).all()
        with pytest.raises(ValueError, match=rf"'{name}' .*float16"):
            sv.load(large, dtype=jnp.float16)
    infinite = edited(tmp_path, "llama", tensors=lambda old: {name: old[name] * np.float32(np.inf)})
    assert np.isinf(sv.load(infinite, dtype=jnp.float16).flow.layers.feed_forward.up.kernel).any()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn", "flaot32"])
def test_types_that_no_model_has(dtype):
    with pytest.raises(ValueError, match=dtype):
        sv.load(GOLDEN / "llama", dtype=dtype)


# Ids, positions and segments

KINDS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("jit", [False, True])
def test_ids_of_every_integer_type(jit):
    """RoBERTa counts its ids, and 150 of them are more than an int8 holds."""
    config = {**golden_config("bert"), "model_type": "roberta", "max_position_embeddings": 160}
    config = sv.TransformerConfig.from_hf({**config, "pad_token_id": 4})
    model = sv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64)
    ids = np.random.default_rng(0).integers(4, 97, 150)
    positions = np.arange(100, 127)
    embed = jax.jit(model.embed) if jit else model.embed
    expected, given = embed(ids), embed(ids[:27], sv.Context(positions=jnp.asarray(positions)))
    assert np.isfinite(expected).all()
    for kind in KINDS:
        np.testing.assert_array_equal(embed(ids.astype(kind)), expected)
        context = sv.Context(positions=jnp.asarray(positions.astype(kind)))
        np.testing.assert_array_equal(embed(ids[:27].astype(kind), context), given)
    if not jit:
        np.testing.assert_array_equal(embed(ids.tolist()), expected)


def test_indices_without_a_row():
    """Neither wrapped around nor clamped: refused, or nan where they are traced."""
    bert = sv.load(GOLDEN / "bert", dtype=jnp.float64)
    room, good = bert.config.positions, jnp.array([1, 2])
    for bad in (-1, 97, 2**31, 2**32 + 1, 2**40):
        for ids in ([1, bad], np.array([1, bad])):
            # As without x64, where JAX makes 1 of 2^32 + 1.
            with jax.enable_x64(False), pytest.raises(ValueError, match=f"id {bad} is outside"):
                bert.embed(ids)
        assert list(np.isnan(jax.jit(bert.embed)(np.array([1, bad]))).all(axis=1)) == [False, True]
    for bad in (-1, room):
        context = sv.Context(positions=jnp.array([0, bad]))
        with pytest.raises(ValueError, match=f"position {bad} is outside"):
            bert.embed(good, context)
        found = jax.jit(bert.embed)(good, context)
        assert list(np.isnan(found).all(axis=1)) == [False, True]
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=f"segment {bad} is outside"):
            bert.embed(good, segments=np.array([0, bad]))
        found = jax.jit(lambda ids, s: bert.embed(ids, segments=s))(good, jnp.array([0, bad]))
        assert list(np.isnan(found).all(axis=1)) == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ids=[]), "not empty"),
        (dict(ids=3), "sequence"),
        (dict(ids=[[1, 2]]), "jax.vmap"),
        (dict(ids=[1.0]), "integers, got float64"),
        (dict(ids="Call me"), "ids must be integers, got text: encode it first"),
        (dict(ids=[True]), "integers, got bool"),
        (dict(ids=[1, 2**70]), "integers, got object"),
        (dict(segments=[0]), "1 segments for 2 ids"),
        (dict(segments=[0.0, 1.0]), "segments must be integers"),
        (dict(context=sv.Context(mask=np.array([True]))), "context.mask has shape"),
        (dict(context=sv.Context(mask=np.array([1, 2]))), "context.mask has type"),
        (dict(context=sv.Context(positions=np.array([0.5, 1.0]))), "context.positions has type"),
    ],
)
def test_what_is_no_sequence_of_ids(options, message):
    bert = sv.load(GOLDEN / "bert")
    with pytest.raises(ValueError, match=message):
        bert.embed(**{"ids": [1, 2], **options})


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3", "qwen3_moe"])
def test_strict_settings_of_jax(name):
    """The same without x64, where ranks must match, and where a nan is an error."""
    ids = [3, 1, 4, 1, 5]
    expected = sv.load(GOLDEN / name, dtype=jnp.float64)(ids)
    with jax.enable_x64(False), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        model = sv.load(GOLDEN / name)
        np.testing.assert_allclose(model(ids), expected, atol=1e-4)
        if name == "bert":
            assert np.isfinite(sv.portrait(model, ids).angle).all()


# Values


@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("gemma2", 1.0), ("gemma3", 1.0)])
def test_norm_weights(name, offset):
    """Stored as w, or as w of 1 + w."""
    config = sv.TransformerConfig.from_hf(golden_config(name))
    norm = Norm((3,), config, dtype=jnp.float64)
    np.testing.assert_array_equal(norm.weight[...] + offset, np.ones(3))
    norm.weight[...] = jnp.array([0.5, -1.0, 2.0])
    x = np.array([[1.0, 2.0, -4.0]])
    expected = x / np.sqrt(np.mean(x**2) + 1e-6) * (np.array([0.5, -1.0, 2.0]) + offset)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-12)


def test_olmo_norms_have_no_weights():
    config = FAMILIES["olmo"].config(dict(OLMO, rms_norm_eps=0.5))
    norm = Norm((3,), config, dtype=jnp.float64)
    assert norm.weight is None
    assert norm.bias is None
    x = np.array([1.0, 2.0, -4.0])
    expected = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_embedding_scale_is_of_the_working_dtype(dtype):
    model = sv.load(GOLDEN / "gemma2", dtype=dtype)
    ids = jnp.array([3, 1, 4])
    table = np.asarray(model.embedding.tokens[...])[np.asarray(ids)]
    scale = np.asarray(32**0.5, table.dtype)
    if dtype == jnp.bfloat16:
        assert float(scale) == 5.65625
    np.testing.assert_array_equal(np.asarray(model.embed(ids)), table * scale)


def test_gelu_is_the_exact_one_or_its_tanh_form():
    x = np.array([-2.3, -0.4, 0.9, 3.1])
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.abs(exact - tanh).max() > 1e-4
    for name, expected in (("gelu", exact), ("gelu_new", tanh), ("gelu_pytorch_tanh", tanh)):
        config = sv.TransformerConfig.from_hf({**golden_config("bert"), "hidden_act": name})
        np.testing.assert_allclose(activate(config.activation, jnp.asarray(x)), expected, rtol=1e-9)
    # Gemma's first files say gelu and mean the tanh form; RoBERTa's head is exact regardless.
    gemma = {**OLMO, "model_type": "gemma", "hidden_act": "gelu", "num_key_value_heads": 4}
    assert sv.TransformerConfig.from_hf(gemma).activation == "gelu_tanh"
    roberta = {**golden_config("bert"), "model_type": "roberta", "hidden_act": "relu"}
    config = sv.TransformerConfig.from_hf(roberta)
    assert (config.activation, config.head_activation) == ("relu", "gelu")


@pytest.mark.parametrize(
    ("name", "change", "scales"),
    [
        ("llama", {}, [8**-0.5] * 3),
        ("qwen3", {}, [16**-0.5] * 3),
        ("gpt_neo", {}, [1.0] * 4),
        ("gemma2", {"query_pre_attn_scalar": 50}, [50**-0.5] * 4),
        ("gpt2", {}, [8**-0.5] * 3),
        ("gpt2", {"scale_attn_weights": False}, [1.0] * 3),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, [8**-0.5 / k for k in (1, 2, 3)]),
    ],
)
def test_attention_scale(name, change, scales):
    config = sv.TransformerConfig.from_hf({**golden_config(name), **change})
    np.testing.assert_allclose(config.scales, scales, rtol=1e-15)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gpt_neo", [0, 5, 0, 5]),
        ("gemma2", [6, 0, 6, 0]),
        ("gemma3", [6, 6, 6, 6, 6, 0, 6]),
        ("olmo3", [6, 6, 6, 0]),
        ("qwen2", [0, 0, 0]),
        ("llama", [0, 0, 0]),
    ],
)
def test_windows(name, windows):
    assert list(sv.TransformerConfig.from_hf(golden_config(name)).windows) == windows


def test_window_counts_the_token_itself():
    mask = attention.allowed_keys(6, causal=True, window=jnp.asarray(3))
    for query in range(6):
        assert list(np.flatnonzero(mask[query])) == [k for k in range(6) if query - 3 < k <= query]


def test_softcaps():
    """cap tanh(s / cap), on the scaled scores before the softmax, and on the logits."""
    generator = np.random.default_rng(3)
    q, k = generator.normal(size=(4, 2, 3)), generator.normal(size=(4, 1, 3))
    allowed = attention.allowed_keys(4, causal=True)
    ours = attention.attention_weights(
        jnp.asarray(q), [jnp.asarray(k)], allowed, scale=jnp.asarray(0.7), softcap=0.5
    )
    scores = 0.5 * np.tanh(0.7 * np.einsum("thd,sgd->hts", q, k) / 0.5)
    scores = np.exp(np.where(np.tri(4, dtype=bool), scores, -np.inf))
    np.testing.assert_allclose(ours[0], scores / scores.sum(-1, keepdims=True), rtol=1e-12)

    capped = sv.load(GOLDEN / "gemma2", dtype=jnp.float64)
    x = jnp.linspace(-3, 3, 64).reshape(2, 32)
    normed = capped.head.norm(x) @ capped.embedding.tokens[...].T
    np.testing.assert_allclose(capped.unembed(x), 30 * np.tanh(normed / 30), rtol=1e-12)


def test_softcaps_that_are_left_out_or_null():
    """Gemma 2 has them unless they are null; Gemma 3 only where they are given."""
    config = golden_config("gemma2")
    absent = {k: v for k, v in config.items() if "softcapping" not in k}
    null = {k: None if "softcapping" in k else v for k, v in config.items()}
    a, b = (sv.TransformerConfig.from_hf(c) for c in (absent, null))
    assert (a.attention_softcap, a.logit_softcap) == (50.0, 30.0)
    assert (b.attention_softcap, b.logit_softcap) == (None, None)
    assert sv.TransformerConfig.from_hf(golden_config("gemma3")).logit_softcap is None


def test_query_key_norm_is_per_head_or_over_all_heads():
    heads = sv.load(GOLDEN / "qwen3").flow.layers.attention
    full = sv.load(GOLDEN / "olmo3").flow.layers.attention
    assert heads.query_norm.weight.shape == heads.key_norm.weight.shape == (3, 16)
    assert full.query_norm.weight.shape == (4, 32)
    assert full.key_norm.weight.shape == (4, 16)


def test_head_width_is_not_the_quotient(tmp_path):
    config = sv.TransformerConfig.from_hf(golden_config("qwen3"))
    assert (config.head_width, config.width // config.heads) == (16, 8)
    with pytest.raises(ValueError, match=r"q_proj.weight' has shape \(64, 32\)"):
        sv.load(edited(tmp_path, "qwen3", config={"head_dim": 8}))


def test_biases_that_the_config_does_not_announce(tmp_path):
    bias = np.ones(32, np.float32)

    def biased(old):
        return {f"model.layers.{i}.self_attn.o_proj.bias": bias for i in range(3)}

    with pytest.raises(ValueError, match="unused"):
        sv.load(edited(tmp_path, "llama", tensors=biased))
    with pytest.raises(ValueError, match=r"missing .*q_proj\.bias"):
        sv.load(edited(tmp_path, "llama", config={"attention_bias": True}, tensors=biased))


def old_layout(name):
    """A golden config as older releases wrote it: no nested rope, no layer types."""
    config = golden_config(name)
    parameters = config.pop("rope_parameters")
    if name == "gemma3":
        config["rope_theta"] = parameters["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 6
    elif name == "olmo3":
        config["rope_theta"] = parameters["full_attention"]["rope_theta"]
    else:
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "qwen3_moe", "olmo2", "olmo3", "gemma2", "gemma3"]
)
def test_both_generations_of_the_layout(name):
    new, old = (
        {**vars(sv.TransformerConfig.from_hf(c)), "source": None}
        for c in (golden_config(name), old_layout(name))
    )
    assert new == old
    # And every word of the older layout counts.
    for key in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern"):
        changed = old_layout(name)
        if key in changed and name != "olmo3":
            changed[key] = 2 if key == "sliding_window_pattern" else changed[key] * 2
            assert {**vars(sv.TransformerConfig.from_hf(changed)), "source": None} != old


def test_olmo3_base_that_releases_read_differently():
    with pytest.raises(ValueError, match="rope_theta"):
        sv.TransformerConfig.from_hf({**old_layout("olmo3"), "rope_theta": 10000.0})


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_left_padding(name):
    """Logits of real tokens are those of the tokens without padding, and nothing is nan."""
    model = sv.load(GOLDEN / name, dtype=jnp.float64)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 97, (1, 12)))
    padded = jnp.concatenate([jnp.full((1, 5), 7), ids], axis=1)
    context = sv.Context(mask=jnp.arange(17)[None] >= 5)
    _, states, logits = batched(model, padded, context)
    assert np.isfinite(states).all()
    np.testing.assert_allclose(logits[:, 5:], batched(model, ids, None)[2], rtol=1e-9, atol=1e-12)


def test_albert_layers_share_their_block():
    config = {**golden_config("albert"), "num_hidden_layers": 5, "num_hidden_groups": 2}
    config = sv.TransformerConfig.from_hf({**config, "inner_group_num": 2})
    assert config.depth == 10
    assert config.blocks == (0, 1, 0, 1, 0, 1, 2, 3, 2, 3)


def test_dense_layers_among_mixtures():
    config = {**golden_config("qwen3_moe"), "num_hidden_layers": 6, "decoder_sparse_step": 2}
    config = sv.TransformerConfig.from_hf({**config, "mlp_only_layers": [3]})
    assert config.sparse == (False, True, False, False, False, True)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_whether_experts_weights_sum_to_one(name, normalize):
    config = {**golden_config("qwen3_moe"), "model_type": name, "norm_topk_prob": normalize}
    config.pop("head_dim")
    assert sv.TransformerConfig.from_hf(config).expert_normalize is normalize


# Refusals

OLMO = dict(
    model_type="olmo",
    vocab_size=9,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
)
SIZES = dict(
    gpt2=("vocab_size", "n_embd", "n_layer", "n_head"),
    gpt_neo=("vocab_size", "hidden_size", "num_layers", "num_heads"),
    bert=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    albert=("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    llama=("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    gemma3=("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"),
    qwen3_moe=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
)


def refuses(config, *words):
    with pytest.raises(ValueError, match=words[0]) as error:
        sv.TransformerConfig.from_hf(config)
    assert all(str(word) in str(error.value) for word in words)


@pytest.mark.parametrize(("name", "key"), [(n, key) for n in SIZES for key in SIZES[n]])
def test_sizes_that_are_missing_or_no_sizes(name, key):
    config = golden_config(name)
    refuses({k: v for k, v in config.items() if k != key}, key)
    for value in (None, 0, -3, 2.5, "32"):
        refuses({**config, key: value}, key)


NOT_NEUTRAL = {
    "add_cross_attention": True,
    "is_causal": False,
    "is_encoder_decoder": True,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"1": {"sliding_window": 3}},
    "position_embedding_type": "relative_key",
    "pruned_heads": {"0": [1]},
    "quantization_config": {"quant_method": "gptq"},
    "use_bidirectional_attention": True,
}


@pytest.mark.parametrize("key", Keys.REFUSED)
def test_refused_keys(key):
    refuses({**golden_config("llama"), key: NOT_NEUTRAL[key]}, key, NOT_NEUTRAL[key])
    for neutral in Keys.REFUSED[key]:
        sv.TransformerConfig.from_hf({**golden_config("llama"), key: neutral})


def test_keys_that_change_nothing_pass():
    plain = sv.TransformerConfig.from_hf(golden_config("llama"))
    extra = {
        "use_cache": False,
        "attention_dropout": 0.3,
        "my_notes": {"a": 1},
        "sliding_window": 4,
    }
    config = sv.TransformerConfig.from_hf({**golden_config("llama"), **extra})
    assert {**vars(config), "source": None} == {**vars(plain), "source": None}


def test_unknown_architectures():
    refuses({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'", "Mamba")
    refuses({}, "model_type")
    refuses({"model_type": "gemma3"}, "'gemma3'", "multimodal", "text model", "gemma3_text")
    for name in ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"):
        refuses({"model_type": name}, name, "not supported")


def test_values_that_do_not_fit_together():
    llama, gemma2 = golden_config("llama"), golden_config("gemma2")
    no_head_dim = {k: v for k, v in llama.items() if k != "head_dim"}
    refuses({**no_head_dim, "num_attention_heads": 6, "num_key_value_heads": 6}, "32", "6")
    refuses({**llama, "num_key_value_heads": 3}, "3 key/value heads")
    refuses({**llama, "hidden_act": "gelo"}, "'gelo'", "hidden_act")
    refuses({**llama, "tie_word_embeddings": None}, "tie_word_embeddings")
    refuses({**llama, "attention_bias": "false"}, "attention_bias", "'false'")
    refuses({**llama, "rms_norm_eps": None}, "rms_norm_eps")
    refuses({**llama, "rms_norm_eps": "1e-6"}, "rms_norm_eps", "'1e-6'")
    refuses({**gemma2, "layer_types": ["full_attention"] * 3}, "layer_types", "3", "4")
    refuses({**gemma2, "layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "linear_att")
    refuses({**gemma2, "sliding_window": None}, "sliding_window")
    refuses({**gemma2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar")
    refuses({**golden_config("gpt_neo"), "attention_layers": ["global"] * 3}, "3 attention types")
    refuses({**golden_config("gpt_neo"), "attention_layers": ["globe"] * 4}, "globe")
    refuses({**golden_config("albert"), "num_hidden_groups": 9}, "9 hidden groups")
    refuses({**golden_config("qwen3_moe"), "num_experts_per_tok": 7}, "7 experts per token of 6")
    refuses(
        {**golden_config("bert"), "model_type": "roberta", "pad_token_id": None}, "pad_token_id"
    )


def test_values_of_the_wrong_kind():
    llama, gemma2, gemma3 = (golden_config(name) for name in ("llama", "gemma2", "gemma3"))
    refuses({**llama, "model_type": ["llama"]}, "model_type")
    refuses({**llama, "hidden_act": ["silu"]}, "hidden_act", "str")
    for key in ("rope_parameters", "rope_scaling"):
        refuses({**llama, key: [1]}, key, "dict")
        refuses({**gemma3, key: 5}, key, "dict")
    refuses({**gemma3, "rope_parameters": {"full_attention": 5}}, "rope_parameters")
    refuses({**gemma2, "layer_types": 5}, "layer_types", "list")
    refuses({**golden_config("gpt_neo"), "attention_layers": 5}, "attention_layers", "list")
    refuses({**golden_config("qwen3_moe"), "mlp_only_layers": 1}, "mlp_only_layers", "list")
    for value in (0, -5.0, "50"):
        refuses({**gemma2, "attn_logit_softcapping": value}, "attn_logit_softcapping", repr(value))
        refuses({**gemma3, "final_logit_softcapping": value}, "final_logit_softcapping")
        refuses({**OLMO, "clip_qkv": value}, "clip_qkv")
        refuses({**llama, "rope_parameters": {"rope_theta": value}}, "rope_theta", repr(value))
        yarn = {"rope_type": "yarn", "factor": 2.0}
        for key in ("factor", "beta_fast", "attention_factor", "original_max_position_embeddings"):
            refuses({**llama, "rope_scaling": {**yarn, key: value}}, key, repr(value))


def test_ropes_that_are_not_known():
    llama, gemma3 = golden_config("llama"), golden_config("gemma3")
    refuses({**llama, "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'")
    refuses({**llama, "rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'")
    refuses({**llama, "rope_scaling": {"type": "linear"}}, "'factor'")
    refuses({**llama, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor")
    refuses({**llama, "rope_scaling": {"rope_type": "linear", "factor": "2"}}, "'factor'", "'2'")
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
    refuses({**llama, "rope_scaling": long}, "long_factor", "4", "3")
    good = [1.0] * (llama["hidden_size"] // llama["num_attention_heads"] // 2)
    long = {"rope_type": "longrope", "short_factor": good, "long_factor": [*good[1:], "a"]}
    refuses({**llama, "rope_scaling": long}, "long_factor", "positive", "'a'")
    long |= dict(long_factor=good, original_max_position_embeddings=1)
    refuses({**llama, "rope_scaling": long}, "longrope", "original length above 1")
    yarn = {"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1.0}
    refuses({**llama, "rope_scaling": yarn}, "mscale", "'1'")
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}
    refuses({**llama, "rope_scaling": yarn}, "original_max_position_embeddings", "at least 1")
    narrow = {**llama, "head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    refuses(narrow, "dynamic", "got 2")
    neo = golden_config("gpt_neo")
    for types in (None, [["global", 2]], [[["global"], "2"]]):
        refuses({**neo, "attention_layers": None, "attention_types": types}, "attention")
    sliding = {**golden_config("qwen2"), "use_sliding_window": True, "sliding_window": 4}
    refuses({**sliding, "max_window_layers": None, "layer_types": None}, "max_window_layers")
    refuses({**golden_config("gemma2"), "hidden_activation": "a"}, "hidden_activation", "'a'")
    neox = {"model_type": "gpt_neox", **FAMILY_CONFIGS["gpt_neox"]}
    refuses({**neox, "head_dim": 999}, "head_dim", "999")
    refuses({**llama, "rope_parameters": gemma3["rope_parameters"]}, "one rope")
    refuses({**gemma3, "rope_parameters": llama["rope_parameters"]}, "per layer type")
    refuses({**llama, "rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor")
    yarn = {"rope_type": "yarn", "factor": 2.0, "truncate": False}
    refuses({**gemma3, "rope_parameters": {"full_attention": yarn}}, "truncate")
