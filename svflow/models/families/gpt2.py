"""GPT-2 and GPT-Neo.

Facts: Hugging Face transformers 5.24, modeling_gpt2 and modeling_gpt_neo.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from svflow.models.families.base import Family, Keys, Rule, linear, norm, same, transposed

QKV = tuple(f"flow.layers.attention.{name}" for name in ("query", "key", "value"))


def _read(keys: Keys, *, width: str, depth: str, heads: str, hidden: str, positions: str) -> dict:
    """What both have in their configs, under these names of keys."""
    d, h = keys.size(width), keys.size(heads)
    return dict(
        vocab_size=keys.size("vocab_size"),
        width=d,
        depth=keys.size(depth),
        heads=h,
        head_width=keys.quotient(d, h),
        hidden=keys.size(hidden, 4 * d),
        activation=keys.activation("activation_function"),
        gated=False,
        causal=True,
        norm_eps=keys.number("layer_norm_epsilon"),
        norm_bias=True,
        placement="pre",
        output_bias=True,
        hidden_bias=True,
        positions=keys.size(positions),
        tied=keys.flag("tie_word_embeddings"),
        initializer_range=keys.number("initializer_range"),
    )


def _read_gpt2(keys: Keys) -> dict:
    fields = _read(
        keys,
        width="n_embd",
        depth="n_layer",
        heads="n_head",
        hidden="n_inner",
        positions="n_positions",
    )
    depth = fields["depth"]
    scale = fields["head_width"] ** -0.5 if keys.flag("scale_attn_weights") else 1.0
    by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
    return {
        **fields,
        "scales": tuple(scale / (layer + 1 if by_layer else 1) for layer in range(depth)),
        "query_key_bias": True,
        "value_bias": True,
        "residual_init_scale": (2 * depth) ** -0.5,
    }


# GPT-Neo's projections of queries, keys and values have no bias, and its scores no scale.
def _read_gpt_neo(keys: Keys) -> dict:
    fields = _read(
        keys,
        width="hidden_size",
        depth="num_layers",
        heads="num_heads",
        hidden="intermediate_size",
        positions="max_position_embeddings",
    )
    depth = fields["depth"]
    types = keys.get("attention_layers", kind=list)
    if types is None:
        pairs = keys.get("attention_types", [], kind=list)
        try:
            types = [kind for kinds, times in pairs for kind in list(kinds) * times]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{keys.family}: 'attention_types' must be pairs (types, count), got {pairs!r}"
            ) from error
    unknown = sorted({str(t) for t in types} - {"global", "local"})
    if unknown:
        raise ValueError(f"{keys.family}: unknown attention types {unknown}")
    if len(types) != depth:
        raise ValueError(f"{keys.family}: {len(types)} attention types for {depth} layers")
    return {
        **fields,
        "scales": (1.0,) * depth,
        "windows": tuple(keys.size("window_size") if t == "local" else 0 for t in types),
    }


def _conv1d(hf: str, ours: str) -> list[Rule]:
    # GPT-2's Conv1D stores (in, out): no transpose.
    return [same(f"{hf}.weight", f"{ours}.kernel"), same(f"{hf}.bias", f"{ours}.bias")]


def _fused(hf: str, part: str) -> Rule:
    return Rule(
        hf,
        tuple(f"{name}.{part}" for name in QKV),
        lambda a, c: tuple(np.split(a, 3, axis=-1)),
        lambda a, c: np.concatenate(a, axis=-1),
    )


OUTER_RULES = [
    same("transformer.wte.weight", "embedding.tokens"),
    same("transformer.wpe.weight", "embedding.positions"),
    *norm("{layer}.ln_1", "flow.layers.attention_norm"),
    *norm("{layer}.ln_2", "flow.layers.hidden_norm"),
    *norm("transformer.ln_f", "head.norm"),
    same("lm_head.weight", "head.kernel"),
]

SHARED: dict[str, Any] = dict(
    prefix="transformer.",
    layer=lambda config, block: f"transformer.h.{block}",
    unused=(r".*\.attn\.(attention\.)?(bias|masked_bias)",),
    copies={"lm_head.weight": "transformer.wte.weight"},
)

DEFAULTS: dict[str, Any] = dict(
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=True,
)

GPT2 = Family(
    model_type="gpt2",
    read=_read_gpt2,
    defaults={**DEFAULTS, "n_positions": 1024, "scale_attn_weights": True},
    rules=[
        *OUTER_RULES,
        _fused("{layer}.attn.c_attn.weight", "kernel"),
        _fused("{layer}.attn.c_attn.bias", "bias"),
        *_conv1d("{layer}.attn.c_proj", "flow.layers.attention.output"),
        *_conv1d("{layer}.mlp.c_fc", "flow.layers.feed_forward.up"),
        *_conv1d("{layer}.mlp.c_proj", "flow.layers.feed_forward.down"),
    ],
    **SHARED,
)

GPT_NEO = Family(
    model_type="gpt_neo",
    read=_read_gpt_neo,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 12]],
        "window_size": 256,
    },
    rules=[
        *OUTER_RULES,
        transposed("{layer}.attn.attention.q_proj.weight", f"{QKV[0]}.kernel"),
        transposed("{layer}.attn.attention.k_proj.weight", f"{QKV[1]}.kernel"),
        transposed("{layer}.attn.attention.v_proj.weight", f"{QKV[2]}.kernel"),
        *linear("{layer}.attn.attention.out_proj", "flow.layers.attention.output"),
        *linear("{layer}.mlp.c_fc", "flow.layers.feed_forward.up"),
        *linear("{layer}.mlp.c_proj", "flow.layers.feed_forward.down"),
    ],
    **SHARED,
)
