"""One tiny Hugging Face config per family, and untrained models of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svflow import Transformer, TransformerConfig

# Weights of this size make attention sharp and the layers nonlinear; 0.02 would not.
STD = 0.4

_COMMON = dict(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    initializer_range=STD,
)
_BERT = dict(
    _COMMON, hidden_act="gelu", max_position_embeddings=32, type_vocab_size=2, layer_norm_eps=1e-12
)
_LLAMA = dict(
    _COMMON,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
_GEMMA = dict(
    _LLAMA,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    head_dim=8,
    query_pre_attn_scalar=8,
    tie_word_embeddings=True,
)
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}

FAMILY_CONFIGS: dict[str, dict] = {
    "gpt2": dict(
        vocab_size=23, n_embd=16, n_layer=3, n_head=2, n_positions=32, initializer_range=STD
    ),
    "gpt_neo": dict(
        vocab_size=23,
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        max_position_embeddings=32,
        attention_types=[[["global", "local", "global"], 1]],
        window_size=3,
        initializer_range=STD,
    ),
    "gpt_neox": dict(
        _COMMON,
        hidden_act="gelu",
        rotary_pct=0.5,
        rotary_emb_base=10000,
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
        max_position_embeddings=64,
    ),
    "bert": _BERT,
    "roberta": dict(_BERT, max_position_embeddings=34, pad_token_id=1, type_vocab_size=1),
    "albert": dict(_BERT, num_hidden_layers=4, num_hidden_groups=1, embedding_size=8),
    "llama": _LLAMA,
    "mistral": dict(_LLAMA, sliding_window=3),
    "qwen2": dict(_LLAMA, sliding_window=3, use_sliding_window=True, max_window_layers=1),
    "qwen3": dict(_LLAMA, head_dim=8),
    "olmo": dict(_LLAMA, clip_qkv=4.0),
    "olmo2": _LLAMA,
    "olmo3": dict(_LLAMA, layer_types=_SLIDING, sliding_window=3, rope_parameters=_ROPES),
    "gemma": dict(_GEMMA),
    "gemma2": dict(
        _GEMMA,
        layer_types=_SLIDING,
        sliding_window=3,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": dict(_GEMMA, layer_types=_SLIDING, sliding_window=3, rope_parameters=_ROPES),
    "mixtral": dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(
        _LLAMA,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "olmoe": dict(_LLAMA, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
}


def tiny_config(family: str, **changes) -> TransformerConfig:
    return TransformerConfig.from_hf({"model_type": family, **FAMILY_CONFIGS[family], **changes})


@functools.cache
def tiny_model(family: str, dtype: str = "float64", seed: int = 0, gain: float = 1.0):
    """An untrained model whose every parameter is random, biases and norms too.

    `gain` scales the kernels. Made in NumPy: nothing to compile.
    """
    config, random = tiny_config(family), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64))

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = random.normal(size=leaf.shape)
        if "bias" in name:
            value = 0.1 * noise
        elif "weight" in name:
            value = 1 - config.norm_offset + 0.1 * noise
        else:
            value = gain * STD * noise
        return jnp.asarray(value, dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)
