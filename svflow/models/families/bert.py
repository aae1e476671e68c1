"""BERT, RoBERTa and ALBERT.

Facts: Hugging Face transformers 5.24, modeling_bert, modeling_roberta and modeling_albert.
"""

from __future__ import annotations

from typing import Any

from svflow.models.config import TransformerConfig
from svflow.models.families.base import Family, Keys, Rule, linear, norm, same


def _read_bert(keys: Keys) -> dict:
    width, depth, heads = (
        keys.size("hidden_size"),
        keys.size("num_hidden_layers"),
        keys.size("num_attention_heads"),
    )
    return dict(
        vocab_size=keys.size("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        head_width=keys.quotient(width, heads),
        hidden=keys.size("intermediate_size"),
        activation=keys.activation("hidden_act"),
        gated=False,
        causal=keys.flag("is_decoder"),
        norm_eps=keys.number("layer_norm_eps"),
        norm_bias=True,
        placement="post",
        final_norm=False,
        query_key_bias=True,
        value_bias=True,
        output_bias=True,
        hidden_bias=True,
        positions=keys.size("max_position_embeddings"),
        segments=keys.size("type_vocab_size"),
        embedding_norm=True,
        tied=keys.flag("tie_word_embeddings"),
        head="masked",
        head_bias=True,
        initializer_range=keys.number("initializer_range"),
    )


def _read_roberta(keys: Keys) -> dict:
    pad = keys.get("pad_token_id")
    if type(pad) is not int or pad < 0:
        raise ValueError(f"{keys.family}: positions count from 'pad_token_id', which is {pad!r}")
    # RoBERTa's head has the exact GELU whatever `hidden_act` says.
    fields = _read_bert(keys)
    return {**fields, "head_activation": "gelu", "pad_token": pad, "position_offset": pad + 1}


def _read_albert(keys: Keys) -> dict:
    layers, groups, inner = (
        keys.size("num_hidden_layers"),
        keys.size("num_hidden_groups"),
        keys.size("inner_group_num"),
    )
    if groups > layers:
        raise ValueError(f"{keys.family}: {groups} hidden groups for {layers} hidden layers")
    # A hidden layer is a pass through the layers of its group, each of which is one of ours.
    blocks = [
        int(layer / (layers / groups)) * inner + place
        for layer in range(layers)
        for place in range(inner)
    ]
    return {
        **_read_bert(keys),
        "causal": False,  # this family has no decoder: `is_decoder` changes nothing
        "depth": layers * inner,
        "blocks": tuple(blocks),
        "embedding_width": keys.size("embedding_size"),
    }


def _albert_layer(config: TransformerConfig, block: int) -> str:
    inner = int(config.hf.get("inner_group_num", 1))
    group, place = divmod(block, inner)
    return f"albert.encoder.albert_layer_groups.{group}.albert_layers.{place}"


def _embeddings(model: str) -> list[Rule]:
    return [
        same(f"{model}.embeddings.word_embeddings.weight", "embedding.tokens"),
        same(f"{model}.embeddings.position_embeddings.weight", "embedding.positions"),
        same(f"{model}.embeddings.token_type_embeddings.weight", "embedding.segments"),
        *norm(f"{model}.embeddings.LayerNorm", "embedding.norm"),
    ]


def _head(dense: str, norm_name: str, prefix: str) -> list[Rule]:
    # An untied head has its own bias, and the one beside it is then out of use.
    return [
        *linear(dense, "head.dense"),
        *norm(norm_name, "head.norm"),
        same(f"{prefix}.bias", "head.bias", tied=True),
        same(f"{prefix}.decoder.weight", "head.kernel", tied=False),
        same(f"{prefix}.decoder.bias", "head.bias", tied=False),
    ]


BERT_LAYER_RULES = [
    *linear("{layer}.attention.self.query", "flow.layers.attention.query"),
    *linear("{layer}.attention.self.key", "flow.layers.attention.key"),
    *linear("{layer}.attention.self.value", "flow.layers.attention.value"),
    *linear("{layer}.attention.output.dense", "flow.layers.attention.output"),
    *norm("{layer}.attention.output.LayerNorm", "flow.layers.attention_post_norm"),
    *linear("{layer}.intermediate.dense", "flow.layers.feed_forward.up"),
    *linear("{layer}.output.dense", "flow.layers.feed_forward.down"),
    *norm("{layer}.output.LayerNorm", "flow.layers.hidden_post_norm"),
]

ALBERT_LAYER_RULES = [
    *linear("{layer}.attention.query", "flow.layers.attention.query"),
    *linear("{layer}.attention.key", "flow.layers.attention.key"),
    *linear("{layer}.attention.value", "flow.layers.attention.value"),
    *linear("{layer}.attention.dense", "flow.layers.attention.output"),
    *norm("{layer}.attention.LayerNorm", "flow.layers.attention_post_norm"),
    *linear("{layer}.ffn", "flow.layers.feed_forward.up"),
    *linear("{layer}.ffn_output", "flow.layers.feed_forward.down"),
    *norm("{layer}.full_layer_layer_norm", "flow.layers.hidden_post_norm"),
]


def _shared(model: str, head: str, extra: tuple[str, ...]) -> dict[str, Any]:
    escaped = head.replace(".", r"\.")
    return dict(
        prefix=f"{model}.",
        spellings={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
        unused=(
            rf"{model}\.embeddings\.(position_ids|token_type_ids)",
            rf"{model}\.pooler\..*",
            rf"{escaped}\.bias",
            *extra,
        ),
        copies={
            f"{head}.decoder.weight": f"{model}.embeddings.word_embeddings.weight",
            f"{head}.decoder.bias": f"{head}.bias",
        },
        head=(rf"{escaped}\..*",),
    )


DEFAULTS: dict[str, Any] = dict(
    hidden_act="gelu",
    max_position_embeddings=512,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
    tie_word_embeddings=True,
    initializer_range=0.02,
)

BERT = Family(
    model_type="bert",
    read=_read_bert,
    defaults=DEFAULTS,
    layer=lambda config, block: f"bert.encoder.layer.{block}",
    rules=[
        *_embeddings("bert"),
        *BERT_LAYER_RULES,
        *_head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions",
        ),
    ],
    **_shared("bert", "cls.predictions", (r"cls\.seq_relationship\..*",)),
)

ROBERTA = Family(
    model_type="roberta",
    read=_read_roberta,
    defaults={**DEFAULTS, "pad_token_id": 1},
    layer=lambda config, block: f"roberta.encoder.layer.{block}",
    rules=[
        *_embeddings("roberta"),
        *BERT_LAYER_RULES,
        *_head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    ],
    **_shared("roberta", "lm_head", ()),
)

ALBERT = Family(
    model_type="albert",
    read=_read_albert,
    defaults={
        **DEFAULTS,
        "hidden_act": "gelu_new",
        "embedding_size": 128,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    },
    layer=_albert_layer,
    rules=[
        *_embeddings("albert"),
        *linear("albert.encoder.embedding_hidden_mapping_in", "embedding.projection"),
        *ALBERT_LAYER_RULES,
        *_head("predictions.dense", "predictions.LayerNorm", "predictions"),
    ],
    **_shared("albert", "predictions", (r"sop_classifier\..*",)),
)
