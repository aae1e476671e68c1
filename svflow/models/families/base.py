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
        tied: where not None, the rule holds only for models whose head is (not) tied.
    """

    hf: str
    ours: tuple[str, ...]
    split: Callable[[np.ndarray, TransformerConfig], Arrays]
    join: Callable[[Arrays, TransformerConfig], np.ndarray]
    tied: bool | None = None


def same(hf: str, ours: str, tied: bool | None = None) -> Rule:
    """The tensor is the parameter."""
    return Rule(hf, (ours,), lambda a, c: (a,), lambda a, c: a[0], tied)


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
        model_type: the `model_type` it reads.
        read: its config reader.
        defaults: what Hugging Face's config class takes for a key that a file leaves out.
        rules: its key map, as files are written.
        prefix: what every name of the bare model begins with, left out in some files.
        layer: the prefix of one block's tensors.
        instead: rules of another layout; where the file has their tensors, they take the place of
            those in `rules` for the same parameters.
        spellings: patterns in the names of some files and how `rules` spell them.
        unused: patterns of tensors that do not take part in the forward pass (buffers, poolers).
        copies: names of tensors that repeat another one, and that one's name.
        head: patterns of the head's own tensors.
    """

    model_type: str
    read: Callable[[Keys], dict[str, Any]]
    defaults: Mapping[str, Any]
    rules: Sequence[Rule]
    prefix: str
    layer: Callable[[TransformerConfig, int], str]
    instead: Sequence[Rule] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    head: tuple[str, ...] = (r"lm_head\..*",)

    def config(self, hf: Mapping[str, Any], has_head: bool = True) -> TransformerConfig:
        """The family's reading of a Hugging Face config."""
        hf = json.loads(json.dumps(hf))  # as in a file: integers that are keys are text there
        keys = Keys(hf, self.defaults)
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
            family=self.model_type, source=json.dumps(hf, sort_keys=True), **fields
        )


class Keys:
    """Reads a Hugging Face config and remembers which keys were asked for.

    A key that Hugging Face's own classes heed, that changes the result and that nothing asked for
    is refused by name; any other key passes, as it does there.
    """

    # Keys that Hugging Face heeds in whatever family they are found, and the values that leave the
    # forward pass as it is. What a family handles it asks for; then the entry here does not apply.
    REFUSED: Mapping[str, tuple[Any, ...]] = {
        "add_cross_attention": (False, None),
        "is_causal": (True, None),
        "is_encoder_decoder": (False, None),
        "partial_rotary_factor": (None, 1, 1.0),
        "per_layer_config": ({}, None),
        "position_embedding_type": ("absolute", None),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
        "use_bidirectional_attention": (False, None),
    }

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.config = {**defaults, **config}
        self.family = config.get("model_type")
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None, kind: type = object) -> Any:
        """The value of a key, which has to be of this kind; `default` where it is null, or absent
        and without a default."""
        self._asked.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise ValueError(f"{self.family}: {key!r} must be a {kind.__name__}, got {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """The value of a key that has to be a positive integer."""
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.family}: the config has no {key!r}")
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.family}: {key!r} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str) -> float:
        """The value of a key that has to be a positive number."""
        value = self.get(key)
        if type(value) not in (int, float) or not value > 0:
            raise ValueError(f"{self.family}: {key!r} must be a positive number, got {value!r}")
        return value

    def bound(self, key: str) -> float | None:
        """The value of a key that has to be a positive number or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """The value of a key that has to be true or false; false where it is absent."""
        self._asked.add(key)
        value = self.config.get(key, False)
        if type(value) is not bool:
            raise ValueError(f"{self.family}: {key!r} must be true or false, got {value!r}")
        return value

    def quotient(self, width: int, heads: int) -> int:
        """The width of one head where the config has no word of its own for it."""
        if width % heads:
            raise ValueError(f"{self.family}: the width {width} is not a multiple of {heads} heads")
        return width // heads

    def activation(self, key: str) -> str:
        """The value of an activation's key, in our names."""
        name = self.get(key, kind=str)
        if name not in ACTIVATIONS:
            raise ValueError(f"{self.family}: unknown activation {key} = {name!r}")
        return ACTIVATIONS[name]

    def layer_types(self, depth: int, default: Sequence[str] | None = None) -> list[str]:
        """The attention type of each layer: "full_attention" or "sliding_attention"."""
        types = self.get("layer_types", default, list)
        # "attention" is an older spelling: transformers 5.24, configuration_utils.
        types = ["full_attention" if t == "attention" else t for t in types]
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"{self.family}: unknown types {unknown} in 'layer_types'")
        if len(types) != depth:
            raise ValueError(
                f"{self.family}: 'layer_types' has {len(types)} entries for {depth} layers"
            )
        return types

    def windows(self, types: Sequence[str]) -> tuple[int, ...]:
        """The window of each layer: `sliding_window` where its attention slides, 0 elsewhere."""
        return tuple(self.size("sliding_window") if t == "sliding_attention" else 0 for t in types)

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
