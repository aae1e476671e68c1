"""The families of checkpoints that svflow reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from svflow.models.families.base import Family
from svflow.models.families.gpt2 import GPT2
from svflow.models.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA)

KNOWN = {name: family for family in FAMILIES for name in family.model_types}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config. Raises ValueError for an unknown one, by name."""
    name = config.get("model_type")
    if name is None:
        raise ValueError("the config has no 'model_type'")
    if name not in KNOWN:
        raise ValueError(
            f"unknown architecture {name!r} ({config.get('architectures')}); "
            f"svflow reads {', '.join(sorted(KNOWN))}"
        )
    return KNOWN[name]
