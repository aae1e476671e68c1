"""OLMo, OLMo 2 and OLMo 3.

Facts: Hugging Face transformers 5.24, modeling_olmo, modeling_olmo2 and modeling_olmo3.
"""

from __future__ import annotations

from svflow.models.families.base import Family, Keys, norm
from svflow.models.families.llama import COMMON_RULES, DEFAULTS, SHARED, read_llama
from svflow.models.rope import ropes_by_type


def _read_olmo(keys: Keys) -> dict:
    return {
        **read_llama(keys),
        "norm": "layer",
        "norm_weight": False,
        "norm_eps": 1e-5,
        "projection_clip": keys.bound("clip_qkv"),
    }


def _read_olmo2(keys: Keys) -> dict:
    return {**read_llama(keys), "placement": "output", "query_key_norm": "full"}


def _read_olmo3(keys: Keys) -> dict:
    fields = read_llama(keys, rope=False)
    depth = fields["depth"]
    default = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(depth)]
    types = keys.layer_types(depth, default)
    theta = keys.get("rope_theta")
    if theta != OLMO3.defaults["rope_theta"] and not keys.get("rope_parameters"):
        raise ValueError(
            f"{keys.family}: releases of Hugging Face transformers disagree on which layers a "
            f"rope_theta of {theta} is for; give rope_parameters for each layer type"
        )
    return {
        **fields,
        "placement": "output",
        "query_key_norm": "full",
        "windows": keys.windows(types),
        **ropes_by_type(keys, fields["head_width"], types, full=theta, sliding=theta),
    }


OUTPUT_NORM_RULES = [
    *norm("{layer}.post_attention_layernorm", "flow.layers.attention_post_norm"),
    *norm("{layer}.post_feedforward_layernorm", "flow.layers.hidden_post_norm"),
]

OLMO = Family(
    model_type="olmo",
    read=_read_olmo,
    defaults=DEFAULTS,
    rules=COMMON_RULES,
    **SHARED,
)

OLMO2 = Family(
    model_type="olmo2",
    read=_read_olmo2,
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
    rules=[*COMMON_RULES, *OUTPUT_NORM_RULES],
    **SHARED,
)

OLMO3 = Family(
    model_type="olmo3",
    read=_read_olmo3,
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    rules=[*COMMON_RULES, *OUTPUT_NORM_RULES],
    **SHARED,
)
