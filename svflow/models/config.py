"""What differs between transformers: one frozen config for all families."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from svflow.models.rope import Rope

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
"""Hugging Face's names of activations and ours."""


@dataclass(frozen=True)
class TransformerConfig:
    """The architecture of a transformer, in one vocabulary for every family.

    Made by `TransformerConfig.from_hf` from the content of a Hugging Face `config.json`, which it
    keeps, so that a model can be saved in its own family's format.

    Arguments:
        family: the Hugging Face `model_type`.
        vocab_size, width, depth: V, d and the number of layers.
        heads, kv_heads, head_width: query heads, key/value heads, and the width of one head.
        hidden: the width of the feed-forward layer.
        activation: see `ACTIVATIONS`; `gated`: act(gate(x)) * up(x) instead of act(up(x)).
        causal: whether a token attends only to itself and its past.
        norm: "layer" (mean removed) or "rms"; `norm_eps`; `norm_offset` is added to the stored
            weight; `norm_weight`, `norm_bias`: which parameters exist.
        placement: where the norms are. "pre": x + f(n(x)). "post": n(x + f(x)).
            "output": x + n(f(x)). "sandwich": x + n(f(n(x))).
        parallel: attention and feed-forward read the same state and are added at once.
        final_norm: a norm before the head.
        scales: the attention scale of each layer.
        windows: the sliding window of each layer, its own token included; 0 for none.
        ropes: the distinct rotary embeddings; `rope_of`: which one each layer uses, -1 for none.
        query_key_bias, value_bias, output_bias, hidden_bias: which projections have biases
            (`hidden_bias`: those of the feed-forward layer).
        query_key_norm: None, "head" (per head) or "full" (over all heads together).
        projection_clip: queries, keys and values are clipped to +- this.
        attention_softcap, logit_softcap: c tanh(s / c) on scores and on logits.
        positions: rows of the learned position table, 0 for none; `position_offset`: the row of
            position 0; `pad_token`: where set, positions count the ids that differ from it.
        segments: rows of the token-type table, 0 for none.
        embedding_width: width of the token table where a projection to `width` follows it, else 0.
        embedding_scale: factor on the embeddings; `embedding_norm`: a norm on them.
        tied: whether the head is the token table; `head`: "linear", "masked" (dense, activation,
            norm, decoder) or None; `head_bias`; `head_activation`, where it is not `activation`.
        experts, experts_per_token, expert_hidden: the mixture's size, 0 without one;
            `expert_normalize`: whether the chosen experts' weights are rescaled to sum 1;
            `sparse`: which layers are mixtures.
        blocks: which stored block each layer uses; layers that name the same block share weights.
        initializer_range: standard deviation of untrained weights; `residual_init_scale`: factor
            on it for the projections that write to the stream.
        source: the Hugging Face config, as JSON.
    """

    family: str
    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    activation: str
    gated: bool
    causal: bool
    norm: str
    norm_eps: float
    placement: str
    scales: tuple[float, ...]
    windows: tuple[int, ...]
    rope_of: tuple[int, ...]
    blocks: tuple[int, ...]
    sparse: tuple[bool, ...]
    source: str
    norm_offset: float = 0.0
    norm_weight: bool = True
    norm_bias: bool = False
    parallel: bool = False
    final_norm: bool = True
    ropes: tuple[Rope, ...] = ()
    query_key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    hidden_bias: bool = False
    query_key_norm: str | None = None
    projection_clip: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    positions: int = 0
    position_offset: int = 0
    pad_token: int | None = None
    segments: int = 0
    embedding_width: int = 0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    tied: bool = True
    head: str | None = "linear"
    head_bias: bool = False
    head_activation: str | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    expert_normalize: bool = True
    initializer_range: float = 0.02
    residual_init_scale: float = 1.0

    def __post_init__(self):
        for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.family}: {name} must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.family}: {self.heads} heads are not a multiple of {self.kv_heads} "
                "key/value heads"
            )
        for name in ("scales", "windows", "rope_of", "blocks", "sparse"):
            if len(getattr(self, name)) != self.depth:
                raise ValueError(f"{self.family}: {name} needs one entry per layer")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.family}: {self.experts_per_token} experts per token of {self.experts}"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, has_head: bool = True) -> TransformerConfig:
        """The config of a Hugging Face `config.json`, of either generation of its layout.

        Arguments:
            config: the content of config.json.
            has_head: False for a checkpoint whose head is missing.

        Raises:
            ValueError: an unknown architecture, a missing key, or a key that changes the result
                and is not handled, by name.
        """
        from svflow.models.families import family_of

        return family_of(config).config(config, has_head)

    def layer(self, layer: int) -> TransformerConfig:
        """The config of one layer by itself; equal for layers that differ in weights alone."""
        return replace(
            self,
            depth=1,
            blocks=(0,),
            scales=self.scales[layer : layer + 1],
            windows=self.windows[layer : layer + 1],
            rope_of=self.rope_of[layer : layer + 1],
            sparse=self.sparse[layer : layer + 1],
        )

    @property
    def dense_blocks(self) -> tuple[int, ...]:
        """The blocks with a plain feed-forward layer, in the order in which they are stacked."""
        return tuple(sorted({b for b, sparse in zip(self.blocks, self.sparse) if not sparse}))

    @property
    def sparse_blocks(self) -> tuple[int, ...]:
        """The blocks with a mixture of experts, in the order in which they are stacked."""
        return tuple(sorted({b for b, sparse in zip(self.blocks, self.sparse) if sparse}))

    @property
    def hf(self) -> dict[str, Any]:
        """The Hugging Face config this was made from."""
        return json.loads(self.source)
