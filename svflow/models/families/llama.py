"""Llama and the models laid out like it: Mistral, Qwen2 and Qwen3.

Facts: Hugging Face transformers 5.24, modeling_llama, modeling_mistral, modeling_qwen2 and
modeling_qwen3.
"""

from __future__ import annotations

from typing import Any

from svflow.models.families.base import Family, Keys, linear, norm, same
from svflow.models.rope import flat_rope


def read_llama(
    keys: Keys, *, rope: bool = True, bias: bool | None = None, activation: str = "hidden_act"
) -> dict:
    """What every model of this layout has in its config.

    Arguments:
        keys: the config.
        rope: whether all layers have one rotary embedding, read here.
        bias: of the attention's projections; None reads `attention_bias`.
        activation: the key of the feed-forward layers' activation.
    """
    width, depth, heads = (
        keys.size("hidden_size"),
        keys.size("num_hidden_layers"),
        keys.size("num_attention_heads"),
    )
    given = keys.get("head_dim") is not None
    head_width = keys.size("head_dim") if given else keys.quotient(width, heads)
    bias = keys.flag("attention_bias") if bias is None else bias
    return dict(
        vocab_size=keys.size("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=keys.size("num_key_value_heads", heads),
        head_width=head_width,
        hidden=keys.size("intermediate_size"),
        activation=keys.activation(activation),
        gated=True,
        causal=True,
        norm="rms",
        norm_eps=keys.number("rms_norm_eps"),
        placement="pre",
        ropes=(flat_rope(keys, head_width),) if rope else (),
        query_key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        tied=keys.flag("tie_word_embeddings"),
        initializer_range=keys.number("initializer_range"),
    )


def one_window(keys: Keys, depth: int) -> tuple[int, ...]:
    """The same window in every layer, or none where `sliding_window` is null."""
    slides = keys.get("sliding_window") is not None
    return keys.windows(["sliding_attention" if slides else "full_attention"] * depth)


def _read_llama(keys: Keys) -> dict:
    return {**read_llama(keys), "hidden_bias": keys.flag("mlp_bias")}


def _read_mistral(keys: Keys) -> dict:
    fields = read_llama(keys, bias=False)
    # With layer types Hugging Face takes the model for a Ministral: configuration_auto.
    if keys.get("layer_types") is not None:
        return {**fields, "windows": keys.windows(keys.layer_types(fields["depth"]))}
    return {**fields, "windows": one_window(keys, fields["depth"])}


def _qwen_windows(keys: Keys, depth: int) -> tuple[int, ...]:
    if not keys.flag("use_sliding_window"):
        keys.config["sliding_window"] = None
    slides = keys.get("sliding_window") is not None
    first = keys.get("max_window_layers", kind=int) if slides else depth
    if first is None:
        raise ValueError(f"{keys.family}: the config has no 'max_window_layers'")
    default = ["full_attention" if i < first else "sliding_attention" for i in range(depth)]
    return keys.windows(keys.layer_types(depth, default))


def _read_qwen2(keys: Keys) -> dict:
    fields = read_llama(keys, bias=True)
    return {**fields, "output_bias": False, "windows": _qwen_windows(keys, fields["depth"])}


def _read_qwen3(keys: Keys) -> dict:
    fields = read_llama(keys)
    windows = _qwen_windows(keys, fields["depth"])
    return {**fields, "query_key_norm": "head", "windows": windows}


ATTENTION_RULES = [
    *linear("{layer}.self_attn.q_proj", "flow.layers.attention.query"),
    *linear("{layer}.self_attn.k_proj", "flow.layers.attention.key"),
    *linear("{layer}.self_attn.v_proj", "flow.layers.attention.value"),
    *linear("{layer}.self_attn.o_proj", "flow.layers.attention.output"),
    same("{layer}.self_attn.q_norm.weight", "flow.layers.attention.query_norm.weight"),
    same("{layer}.self_attn.k_norm.weight", "flow.layers.attention.key_norm.weight"),
]

DENSE_RULES = [
    *linear("{layer}.mlp.gate_proj", "flow.layers.feed_forward.gate"),
    *linear("{layer}.mlp.up_proj", "flow.layers.feed_forward.up"),
    *linear("{layer}.mlp.down_proj", "flow.layers.feed_forward.down"),
]

NORM_RULES = [
    *norm("{layer}.input_layernorm", "flow.layers.attention_norm"),
    *norm("{layer}.post_attention_layernorm", "flow.layers.hidden_norm"),
]

OUTER_RULES = [
    same("model.embed_tokens.weight", "embedding.tokens"),
    *norm("model.norm", "head.norm"),
    same("lm_head.weight", "head.kernel"),
]

# What all families of this layout share but for their norms.
COMMON_RULES = [*OUTER_RULES, *ATTENTION_RULES, *DENSE_RULES]

SHARED: dict[str, Any] = dict(
    prefix="model.",
    layer=lambda config, block: f"model.layers.{block}",
    unused=(r".*\.rotary_emb\.inv_freq",),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

DEFAULTS: dict[str, Any] = dict(
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    initializer_range=0.02,
)

MISTRAL_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}

QWEN_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def _family(model_type: str, read, **defaults) -> Family:
    rules = [*COMMON_RULES, *NORM_RULES]
    return Family(model_type=model_type, read=read, defaults=defaults, rules=rules, **SHARED)


LLAMA = _family("llama", _read_llama, **DEFAULTS, mlp_bias=False)
MISTRAL = _family("mistral", _read_mistral, **MISTRAL_DEFAULTS, sliding_window=4096)
QWEN2 = _family("qwen2", _read_qwen2, **QWEN_DEFAULTS, num_key_value_heads=32, max_window_layers=28)
QWEN3 = _family(
    "qwen3",
    _read_qwen3,
    **QWEN_DEFAULTS,
    num_key_value_heads=32,
    head_dim=128,
    max_window_layers=28,
)
