"""The models of the rows, ours and as their peers load them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import svflow as sv

GPT2 = dict(
    model_type="gpt2",
    architectures=["GPT2LMHeadModel"],
    vocab_size=50257,
    n_positions=1024,
    n_embd=768,
    n_layer=12,
    n_head=12,
)
GPT2_TINY = GPT2 | dict(
    vocab_size=97,
    n_positions=64,
    n_embd=24,
    n_layer=3,
    n_head=4,
    bos_token_id=0,
    eos_token_id=1,
)
LLAMA_TINY = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=97,
    max_position_embeddings=64,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    hidden_act="silu",
    tie_word_embeddings=True,
)


def model(source: dict[str, Any] | Path, **options: Any) -> sv.Transformer:
    """From a file, or of a shape, untrained."""
    if not isinstance(source, dict):
        return sv.load(source, **options)
    return sv.Transformer(sv.TransformerConfig.from_hf(source), rngs=nnx.Rngs(0), **options)


def ids_of(net: sv.Transformer, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, net.config.vocab_size, tokens)


def hugging_face(net: sv.Transformer, kind: str = "AutoModel") -> Any:
    """The same model in Hugging Face transformers, eager attention, through its own files."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        sv.save(net, folder)
        found = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager")
    return found.eval()


def causal_mask(tokens: int) -> Any:
    """What Hugging Face's eager attention adds to the scores, when one of its parts runs alone."""
    import torch

    return torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]


def block(net: sv.Transformer, layer: int) -> Any:
    """A block of a GPT-2 in Hugging Face, as a map of states, (tokens, width) to the same."""
    theirs = hugging_face(net).h[layer]

    def step(x):
        out = theirs(x[None], attention_mask=causal_mask(len(x)))
        return (out if hasattr(out, "shape") else out[0])[0]

    return step


def bridge(net: sv.Transformer) -> Any:
    """The same model in TransformerLens, on weights that it has not processed."""
    import tokenizers
    import torch
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    # It wants a tokenizer, here without use: both sides are given ids.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    found = TransformerBridge.boot_transformers(
        "local",
        hf_model=hugging_face(net, "AutoModelForCausalLM"),
        device="cpu",
        dtype=torch.float32,
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="a", pad_token="a"
        ),
    )
    return found.eval()
