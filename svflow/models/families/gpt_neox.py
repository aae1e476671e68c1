"""GPT-NeoX and Pythia. Facts: Hugging Face transformers 5.24, modeling_gpt_neox."""

from __future__ import annotations

import numpy as np

from svflow.models.config import TransformerConfig
from svflow.models.families.base import Arrays, Family, Keys, Rule, linear, norm, same
from svflow.models.families.gpt2 import QKV
from svflow.models.rope import flat_rope


def _read(keys: Keys) -> dict:
    width, depth, heads = (
        keys.size("hidden_size"),
        keys.size("num_hidden_layers"),
        keys.size("num_attention_heads"),
    )
    head_width, bias = keys.quotient(width, heads), keys.flag("attention_bias")
    rotated = keys.get("head_dim", head_width)  # only the rotation heeds it, so it can be no other
    if rotated != head_width:
        raise ValueError(f"gpt_neox: 'head_dim' must be {head_width}, got {rotated!r}")
    # This family's own words for the base and for the share of a head that turns; where they are
    # spelled as elsewhere, Hugging Face does not read them.
    rope = flat_rope(keys, head_width, base="rotary_emb_base", partial=keys.number("rotary_pct"))
    keys.get("partial_rotary_factor")
    return dict(
        vocab_size=keys.size("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        head_width=head_width,
        hidden=keys.size("intermediate_size"),
        activation=keys.activation("hidden_act"),
        gated=False,
        causal=True,
        norm_eps=keys.number("layer_norm_eps"),
        norm_bias=True,
        placement="pre",
        parallel=keys.flag("use_parallel_residual"),
        ropes=(rope,),
        query_key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        hidden_bias=True,
        tied=keys.flag("tie_word_embeddings"),
        initializer_range=keys.number("initializer_range"),
    )


def _fused(part: str) -> Rule:
    """Rows (head, query or key or value, coordinate): each head's three blocks lie together."""

    def split(a: np.ndarray, c: TransformerConfig) -> Arrays:
        parts = a.reshape(c.heads, 3, c.head_width, *a.shape[1:])
        return tuple(parts[:, i].reshape(-1, *a.shape[1:]).T for i in range(3))

    def join(a: Arrays, c: TransformerConfig) -> np.ndarray:
        parts = [x.T.reshape(c.heads, c.head_width, *x.shape[:-1]) for x in a]
        return np.stack(parts, axis=1).reshape(-1, *a[0].shape[:-1])

    ours = tuple(f"{name}.{'kernel' if part == 'weight' else part}" for name in QKV)
    return Rule(f"{{layer}}.attention.query_key_value.{part}", ours, split, join)


GPT_NEOX = Family(
    model_type="gpt_neox",
    read=_read,
    defaults=dict(
        hidden_act="gelu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        rotary_emb_base=10000.0,
        rotary_pct=0.25,
        use_parallel_residual=True,
        attention_bias=True,
        tie_word_embeddings=False,
        initializer_range=0.02,
    ),
    prefix="gpt_neox.",
    layer=lambda config, block: f"gpt_neox.layers.{block}",
    rules=[
        same("gpt_neox.embed_in.weight", "embedding.tokens"),
        *norm("{layer}.input_layernorm", "flow.layers.attention_norm"),
        _fused("weight"),
        _fused("bias"),
        *linear("{layer}.attention.dense", "flow.layers.attention.output"),
        *norm("{layer}.post_attention_layernorm", "flow.layers.hidden_norm"),
        *linear("{layer}.mlp.dense_h_to_4h", "flow.layers.feed_forward.up"),
        *linear("{layer}.mlp.dense_4h_to_h", "flow.layers.feed_forward.down"),
        *norm("gpt_neox.final_layer_norm", "head.norm"),
        same("embed_out.weight", "head.kernel"),
    ],
    spellings={r"^lm_head\.": "embed_out."},
    unused=(r".*\.attention\.(bias|masked_bias)", r".*\.rotary_emb\.inv_freq"),
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    head=(r"embed_out\..*",),
)
