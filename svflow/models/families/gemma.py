"""Gemma, Gemma 2 and the text model of Gemma 3.

Facts: Hugging Face transformers 5.24, modeling_gemma, modeling_gemma2 and modeling_gemma3.
"""

from __future__ import annotations

from typing import Any

from svflow.models.families.base import Family, Keys, norm
from svflow.models.families.llama import COMMON_RULES, DEFAULTS, NORM_RULES, SHARED, read_llama
from svflow.models.rope import ropes_by_type


def _read_gemma(keys: Keys) -> dict:
    # Files of the first release say "gelu" and mean its tanh form: configuration_gemma.
    if keys.get("hidden_act") == "gelu":
        keys.config["hidden_act"] = "gelu_pytorch_tanh"
    return _gemma(keys)


def _gemma(keys: Keys, **options) -> dict:
    fields = read_llama(keys, **options)
    return {**fields, "norm_offset": 1.0, "embedding_scale": fields["width"] ** 0.5}


def _sandwich(keys: Keys, **options) -> dict:
    keys.get("hidden_act")  # which is not heeded here
    fields = _gemma(keys, activation="hidden_activation", **options)
    scale = keys.number("query_pre_attn_scalar")
    return {
        **fields,
        "placement": "sandwich",
        "scales": (scale**-0.5,) * fields["depth"],
        "logit_softcap": keys.bound("final_logit_softcapping"),
    }


def _read_gemma2(keys: Keys) -> dict:
    fields = _sandwich(keys)
    depth = fields["depth"]
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(depth)]
    return {
        **fields,
        "attention_softcap": keys.bound("attn_logit_softcapping"),
        "windows": keys.windows(keys.layer_types(depth, default)),
    }


def _read_gemma3(keys: Keys) -> dict:
    fields = _sandwich(keys, rope=False)
    depth, every = fields["depth"], keys.size("sliding_window_pattern")
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    types = keys.layer_types(depth, default)
    ropes = ropes_by_type(
        keys,
        fields["head_width"],
        types,
        full=keys.get("rope_theta"),
        sliding=keys.get("rope_local_base_freq"),
    )
    # Hugging Face reads `attn_logit_softcapping` here too, and does not apply it.
    return {**fields, "query_key_norm": "head", "windows": keys.windows(types), **ropes}


SANDWICH_RULES = [
    *norm("{layer}.input_layernorm", "flow.layers.attention_norm"),
    *norm("{layer}.post_attention_layernorm", "flow.layers.attention_post_norm"),
    *norm("{layer}.pre_feedforward_layernorm", "flow.layers.hidden_norm"),
    *norm("{layer}.post_feedforward_layernorm", "flow.layers.hidden_post_norm"),
]

GEMMA_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
}

SANDWICH_DEFAULTS: dict[str, Any] = {
    **GEMMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

GEMMA = Family(
    model_type="gemma",
    read=_read_gemma,
    defaults={**GEMMA_DEFAULTS, "num_key_value_heads": 16},
    rules=[*COMMON_RULES, *NORM_RULES],
    **SHARED,
)

GEMMA2 = Family(
    model_type="gemma2",
    read=_read_gemma2,
    defaults={
        **SANDWICH_DEFAULTS,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    rules=[*COMMON_RULES, *SANDWICH_RULES],
    **SHARED,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    read=_read_gemma3,
    defaults={
        **SANDWICH_DEFAULTS,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    rules=[*COMMON_RULES, *SANDWICH_RULES],
    **SHARED,
)
