"""GPT-2. Facts: Hugging Face transformers 5.24, modeling_gpt2."""

from __future__ import annotations

import numpy as np

from svflow.models.families.base import Family, Keys, Rule, norm, same

QKV = tuple(f"flow.layers.attention.{name}" for name in ("query", "key", "value"))


def _read(keys: Keys) -> dict:
    width, depth, heads = keys.need("n_embd"), keys.need("n_layer"), keys.need("n_head")
    head_width = width // heads
    scale = head_width**-0.5 if keys.get("scale_attn_weights", True) else 1.0
    by_layer = keys.get("scale_attn_by_inverse_layer_idx", False)
    return dict(
        vocab_size=keys.need("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        head_width=head_width,
        hidden=keys.get("n_inner", 4 * width),
        activation=keys.activation("activation_function", "gelu_new"),
        gated=False,
        causal=True,
        norm_eps=keys.get("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        placement="pre",
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(depth)),
        query_key_bias=True,
        value_bias=True,
        output_bias=True,
        hidden_bias=True,
        positions=keys.get("n_positions", 1024),
        tied=keys.get("tie_word_embeddings", True),
        initializer_range=keys.get("initializer_range", 0.02),
        residual_init_scale=(2 * depth) ** -0.5,
    )


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


GPT2 = Family(
    model_types=("gpt2",),
    read=_read,
    prefix="transformer.",
    layer=lambda config, block: f"transformer.h.{block}",
    rules=[
        same("transformer.wte.weight", "embedding.tokens"),
        same("transformer.wpe.weight", "embedding.positions"),
        *norm("{layer}.ln_1", "flow.layers.attention_norm"),
        _fused("{layer}.attn.c_attn.weight", "kernel"),
        _fused("{layer}.attn.c_attn.bias", "bias"),
        *_conv1d("{layer}.attn.c_proj", "flow.layers.attention.output"),
        *norm("{layer}.ln_2", "flow.layers.hidden_norm"),
        *_conv1d("{layer}.mlp.c_fc", "flow.layers.feed_forward.up"),
        *_conv1d("{layer}.mlp.c_proj", "flow.layers.feed_forward.down"),
        *norm("transformer.ln_f", "head.norm"),
        same("lm_head.weight", "head.kernel"),
    ],
    unused=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
    copies={"lm_head.weight": "transformer.wte.weight"},
    head=(r"lm_head\..*",),
)
