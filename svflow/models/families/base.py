"""What a family of checkpoints is: how its config reads, and which of its tensors is which of ours.

A family is data: `Rule`s name a tensor of the file, the parameters of ours that it holds, and how
to go from one to the other and back. One set of rules serves loading and saving.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from svflow.models.config import ACTIVATIONS, TransformerConfig

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Rule:
    """A tensor of the file and the parameters that it holds.

    Arguments:
        hf: its name; "{layer}" stands for the layer's prefix and "{expert}" for its number.
        ours: paths in `Transformer`; under `flow.layers` without the leading block (and expert).
        split: from the tensor to our parameters, in the order of `ours`.
        join: back.
    """

    hf: str
    ours: tuple[str, ...]
    split: Callable[[np.ndarray, TransformerConfig], Arrays]
    join: Callable[[Arrays, TransformerConfig], np.ndarray]


def same(hf: str, ours: str) -> Rule:
    """The tensor is the parameter."""
    return Rule(hf, (ours,), lambda a, c: (a,), lambda a, c: a[0])


def transposed(hf: str, ours: str) -> Rule:
    """The tensor is the parameter's transpose: torch's Linear stores (out, in)."""
    return Rule(hf, (ours,), lambda a, c: (a.T,), lambda a, c: a[0].T)


def linear(hf: str, ours: str) -> list[Rule]:
    """A torch Linear: weight (out, in) and bias."""
    return [
        transposed(f"{hf}.weight", f"{ours}.kernel"),
        same(f"{hf}.bias", f"{ours}.bias"),
    ]


def norm(hf: str, ours: str) -> list[Rule]:
    """A norm's weight and bias."""
    return [same(f"{hf}.weight", f"{ours}.weight"), same(f"{hf}.bias", f"{ours}.bias")]


@dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Arguments:
        model_types: the `model_type`s it reads.
        read: its config reader.
        rules: its key map.
        prefix: what every name of the bare model begins with, left out in some files.
        layer: the prefix of one block's tensors.
        unused: patterns of tensors that do not take part in the forward pass (buffers, poolers).
        copies: names of tensors that repeat another one, and that one's name.
        head: patterns of the head's own tensors.
    """

    model_types: tuple[str, ...]
    read: Callable[[Keys], dict[str, Any]]
    rules: Sequence[Rule]
    prefix: str
    layer: Callable[[TransformerConfig, int], str]
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    head: tuple[str, ...] = ()

    def config(self, hf: Mapping[str, Any], has_head: bool = True) -> TransformerConfig:
        """The family's reading of a Hugging Face config."""
        keys = Keys(hf)
        fields = self.read(keys)
        keys.refuse_the_rest()
        if not has_head:
            fields["head"] = None
        depth = fields["depth"]
        per_layer: dict[str, Any] = dict(
            windows=(0,) * depth,
            rope_of=(0 if fields.get("ropes") else -1,) * depth,
            blocks=tuple(range(depth)),
            sparse=(False,) * depth,
            scales=(fields["head_width"] ** -0.5,) * depth,
        )
        fields = {"kv_heads": fields["heads"], "norm": "layer", **per_layer, **fields}
        return TransformerConfig(
            family=hf["model_type"], source=json.dumps(hf, sort_keys=True), **fields
        )


class Keys:
    """Reads a Hugging Face config and remembers which keys were asked for.

    A key that Hugging Face's own classes heed, that changes the result and that nothing asked for
    is refused by name; any other key passes, as it does there.
    """

    # Keys that change the forward pass of some of these families, and the values that leave it
    # as it is. What a family handles it asks for, and then the entry here does not apply.
    REFUSED: Mapping[str, tuple[Any, ...]] = {
        "add_cross_attention": (False, None),
        "is_decoder": (False, None),
        "is_encoder_decoder": (False, None),
        "position_embedding_type": ("absolute", None),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
        "use_bidirectional_attention": (False, None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "qkv_bias": (True, None),
        "use_qk_norm": (False, None),
        "clip_qkv": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "logit_scale": (None, 1, 1.0),
        "embedding_multiplier": (None, 1, 1.0),
        "partial_rotary_factor": (None, 1, 1.0),
        "rope_scaling": (None,),
        "sliding_window": (None,),
        "layer_types": (None,),
        "auto_map": (None,),
        "adapters": (None,),
    }

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.family = config.get("model_type")
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is absent or null."""
        self._asked.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of a key that has to be there."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.family}: the config has no {key!r}")
        return value

    def activation(self, key: str, default: str) -> str:
        """The value of an activation's key, in our names."""
        name = self.get(key, default)
        if name not in ACTIVATIONS:
            raise ValueError(f"{self.family}: unknown activation {key} = {name!r}")
        return ACTIVATIONS[name]

    def ignore(self, *keys: str) -> None:
        """These keys do not change this family's result."""
        self._asked.update(keys)

    def refuse_the_rest(self) -> None:
        """Raises ValueError for a key that changes the result and that nothing asked for."""
        for key, neutral in self.REFUSED.items():
            if key not in self.config or key in self._asked:
                continue
            if not any(self.config[key] == value for value in neutral):
                raise ValueError(
                    f"{self.family}: config key {key} = {self.config[key]!r} changes the "
                    "result and is not handled"
                )
