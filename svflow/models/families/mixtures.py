"""Mixtures of experts: Mixtral, Qwen3-MoE and OLMoE.

Facts: Hugging Face transformers 5.24, modeling_mixtral, modeling_qwen3_moe, modeling_olmoe, and
conversion_mapping for the two layouts of the experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from svflow.models.config import TransformerConfig
from svflow.models.families.base import Arrays, Family, Keys, Rule, transposed
from svflow.models.families.llama import (
    COMMON_RULES,
    DEFAULTS,
    MISTRAL_DEFAULTS,
    NORM_RULES,
    QWEN_DEFAULTS,
    SHARED,
    one_window,
    read_llama,
)

EXPERTS = "flow.layers.mixture.experts"


def _read_mixtral(keys: Keys) -> dict:
    fields = read_llama(keys, bias=False)
    return {
        **fields,
        "windows": one_window(keys, fields["depth"]),
        "experts": keys.size("num_experts", keys.size("num_local_experts")),
        "experts_per_token": keys.size("num_experts_per_tok"),
        "expert_hidden": fields["hidden"],
        "sparse": (True,) * fields["depth"],
    }


def _read_qwen3_moe(keys: Keys) -> dict:
    if not keys.flag("use_sliding_window"):
        keys.config["sliding_window"] = None
    fields = read_llama(keys)
    depth, every = fields["depth"], keys.size("decoder_sparse_step")
    dense = keys.get("mlp_only_layers", [], list)
    sparse = tuple(i not in dense and (i + 1) % every == 0 for i in range(depth))
    return {
        **fields,
        "windows": one_window(keys, depth),
        "query_key_norm": "head",
        "experts": keys.size("num_local_experts", keys.size("num_experts")),
        "experts_per_token": keys.size("num_experts_per_tok"),
        "expert_hidden": keys.size("moe_intermediate_size"),
        "expert_normalize": keys.flag("norm_topk_prob"),
        "sparse": sparse,
    }


def _read_olmoe(keys: Keys) -> dict:
    fields = read_llama(keys)
    return {
        **fields,
        "query_key_norm": "full",
        "projection_clip": keys.bound("clip_qkv"),
        "experts": keys.size("num_local_experts", keys.size("num_experts")),
        "experts_per_token": keys.size("num_experts_per_tok"),
        "expert_hidden": fields["hidden"],
        "expert_normalize": keys.flag("norm_topk_prob"),
        "sparse": (True,) * fields["depth"],
    }


def _each(prefix: str, gate: str, up: str, down: str) -> list[Rule]:
    """One tensor per expert and projection: what files on disk have."""
    return [
        transposed(f"{prefix}.gate.weight", "flow.layers.mixture.router.kernel"),
        transposed(f"{prefix}.experts.{{expert}}.{gate}.weight", f"{EXPERTS}.gate.kernel"),
        transposed(f"{prefix}.experts.{{expert}}.{up}.weight", f"{EXPERTS}.up.kernel"),
        transposed(f"{prefix}.experts.{{expert}}.{down}.weight", f"{EXPERTS}.down.kernel"),
    ]


def _fused(prefix: str) -> list[Rule]:
    """All experts in one tensor, (experts, out, in), gate above up: what models in memory have."""

    def split(a: np.ndarray, c: TransformerConfig) -> Arrays:
        return tuple(part.swapaxes(-1, -2) for part in np.split(a, 2, axis=-2))

    def join(a: Arrays, c: TransformerConfig) -> np.ndarray:
        return np.concatenate([part.swapaxes(-1, -2) for part in a], axis=-2)

    both = (f"{EXPERTS}.gate.kernel", f"{EXPERTS}.up.kernel")
    return [
        Rule(f"{prefix}.experts.gate_up_proj", both, split, join),
        Rule(
            f"{prefix}.experts.down_proj",
            (f"{EXPERTS}.down.kernel",),
            lambda a, c: (a.swapaxes(-1, -2),),
            lambda a, c: a[0].swapaxes(-1, -2),
        ),
    ]


QWEN_LAYOUT: dict[str, Any] = dict(
    rules=[
        *COMMON_RULES,
        *NORM_RULES,
        *_each("{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
    ],
    instead=_fused("{layer}.mlp"),
    **SHARED,
)

MIXTRAL = Family(
    model_type="mixtral",
    read=_read_mixtral,
    defaults={
        **MISTRAL_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    rules=[*COMMON_RULES, *NORM_RULES, *_each("{layer}.block_sparse_moe", "w1", "w3", "w2")],
    instead=_fused("{layer}.block_sparse_moe"),
    spellings={r"(?<=\.)mlp(?=\.(gate|experts)\.)": "block_sparse_moe"},
    **SHARED,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    read=_read_qwen3_moe,
    defaults={
        **QWEN_DEFAULTS,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    **QWEN_LAYOUT,
)

OLMOE = Family(
    model_type="olmoe",
    read=_read_olmoe,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    **QWEN_LAYOUT,
)
