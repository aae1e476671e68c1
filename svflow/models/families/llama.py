"""Llama and the models laid out like it.

Facts: Hugging Face transformers 5.24, modeling_llama.
"""

from __future__ import annotations

from typing import Any

from svflow.models.families.base import Family, Keys, linear, norm, same
from svflow.models.rope import rope_from_hf


def rope_parameters(keys: Keys, *, base: float) -> dict:
    """A config's rope parameters in the newer spelling, from either generation of the layout."""
    new = keys.get("rope_parameters")
    old = keys.get("rope_scaling") or {}
    theta = keys.get("rope_theta", base)
    partial = keys.get("partial_rotary_factor", 1.0)
    original = keys.get("original_max_position_embeddings")
    parameters = {"rope_theta": theta, "partial_rotary_factor": partial, **(new or old)}
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    return parameters


def read_llama(keys: Keys) -> dict:
    """What every model of this layout has in its config."""
    width, depth, heads = (
        keys.need("hidden_size"),
        keys.need("num_hidden_layers"),
        keys.need("num_attention_heads"),
    )
    head_width = keys.get("head_dim", width // heads)
    bias = keys.get("attention_bias", False)
    rope = rope_from_hf(
        rope_parameters(keys, base=10000.0),
        head_width=head_width,
        max_positions=keys.get("max_position_embeddings", 2048),
        name=str(keys.family),
    )
    return dict(
        vocab_size=keys.need("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=keys.get("num_key_value_heads", heads),
        head_width=head_width,
        hidden=keys.need("intermediate_size"),
        activation=keys.activation("hidden_act", "silu"),
        gated=True,
        causal=True,
        norm="rms",
        norm_eps=keys.get("rms_norm_eps", 1e-6),
        placement="pre",
        ropes=(rope,),
        query_key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        hidden_bias=keys.get("mlp_bias", False),
        tied=keys.get("tie_word_embeddings", False),
        initializer_range=keys.get("initializer_range", 0.02),
    )


LAYER_RULES = [
    *norm("{layer}.input_layernorm", "flow.layers.attention_norm"),
    *linear("{layer}.self_attn.q_proj", "flow.layers.attention.query"),
    *linear("{layer}.self_attn.k_proj", "flow.layers.attention.key"),
    *linear("{layer}.self_attn.v_proj", "flow.layers.attention.value"),
    *linear("{layer}.self_attn.o_proj", "flow.layers.attention.output"),
    *norm("{layer}.post_attention_layernorm", "flow.layers.hidden_norm"),
    *linear("{layer}.mlp.gate_proj", "flow.layers.feed_forward.gate"),
    *linear("{layer}.mlp.up_proj", "flow.layers.feed_forward.up"),
    *linear("{layer}.mlp.down_proj", "flow.layers.feed_forward.down"),
]

OUTER_RULES = [
    same("model.embed_tokens.weight", "embedding.tokens"),
    *norm("model.norm", "head.norm"),
    same("lm_head.weight", "head.kernel"),
]

SHARED: dict[str, Any] = dict(
    prefix="model.",
    layer=lambda config, block: f"model.layers.{block}",
    unused=(r".*\.rotary_emb\.inv_freq",),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    head=(r"lm_head\..*",),
)

LLAMA = Family(
    model_types=("llama",), read=read_llama, rules=[*OUTER_RULES, *LAYER_RULES], **SHARED
)
