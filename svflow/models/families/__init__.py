"""The families of checkpoints that svflow reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from svflow.models.families.base import Family
from svflow.models.families.bert import ALBERT, BERT, ROBERTA
from svflow.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from svflow.models.families.gpt2 import GPT2, GPT_NEO
from svflow.models.families.gpt_neox import GPT_NEOX
from svflow.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from svflow.models.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from svflow.models.families.olmo import OLMO, OLMO2, OLMO3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        GPT_NEO,
        GPT_NEOX,
        BERT,
        ROBERTA,
        ALBERT,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        OLMO,
        OLMO2,
        OLMO3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config. Raises ValueError for an unknown one, by name."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"the config's 'model_type' is {name!r}, not a name")
    if name in FAMILIES:
        return FAMILIES[name]
    if name == "gemma3":
        raise ValueError(
            "'gemma3' is a multimodal checkpoint: svflow reads its text model only where it was "
            "saved by itself, as model_type 'gemma3_text'"
        )
    if name.startswith(("gemma3n", "gemma4")):
        raise ValueError(
            f"{name!r} is not supported: of the Gemmas, svflow reads 1, 2 and 3 (text)"
        )
    raise ValueError(
        f"unknown architecture {name!r} ({config.get('architectures')}); "
        f"svflow reads {', '.join(sorted(FAMILIES))}"
    )
