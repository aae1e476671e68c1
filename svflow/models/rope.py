"""Rotary frequencies and their scalings.

Facts: Hugging Face transformers 5.24, modeling_rope_utils; Peng et al., "YaRN", 2023; Ding et al.,
"LongRoPE", 2024; Llama 3.1's frequency bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from svflow.models.families.base import Keys


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: inverse frequencies base^(-2k/width), 2k < width, and their scaling.

    Arguments:
        width: how many coordinates of a head turn.
        base: the base of the geometric progression.
        kind: "default", "linear", "dynamic", "yarn", "longrope" or "llama3".
        factor: the factor by which the context is stretched.
        original: the context length before stretching.
        low, high: llama3's band factors; yarn's beta_slow and beta_fast.
        truncate: yarn rounds its correction range to whole planes.
        amplitude: the attention factor on the rotated coordinates.
        short, long: longrope's factors per plane.
    """

    width: int
    base: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True
    amplitude: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def angles(
        self, positions: Int[Array, " tokens"], dtype, length: Int[Array, ""] | None = None
    ) -> Float[Array, "tokens pairs"]:
        """The angle of every plane at every position, in `dtype`.

        "dynamic" and "longrope" depend on the length of the sequence, the largest position + 1,
        which has to be given where these positions are not those of the whole sequence.
        """
        length = jnp.max(positions) + 1 if length is None else length
        if self.kind == "dynamic":
            stretched = self.factor * length.astype(dtype) / self.original - (self.factor - 1)
            stretched = jnp.maximum(stretched, 1)
            k = jnp.arange(0, self.width, 2).astype(dtype) / self.width
            base = self.base * stretched ** (self.width / (self.width - 2))
            inverse = base ** (-k)
        elif self.kind == "longrope":
            plain = _inverse(self.base, self.width)
            short, long = plain / np.asarray(self.short), plain / np.asarray(self.long)
            inverse = jnp.where(
                length > self.original, jnp.asarray(long, dtype), jnp.asarray(short, dtype)
            )
        else:
            inverse = jnp.asarray(self._scaled(), dtype)
        return positions.astype(dtype)[:, None] * inverse[None, :]

    def _scaled(self) -> np.ndarray:
        plain = _inverse(self.base, self.width)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            wavelength = 2 * np.pi / plain
            smooth = (self.original / wavelength - self.low) / (self.high - self.low)
            smooth = np.clip(smooth, 0, 1)
            return (1 - smooth) * plain / self.factor + smooth * plain
        if self.kind == "yarn":
            first, last = (self._plane(turns) for turns in (self.high, self.low))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.width - 1)
            last = last + 0.001 if first == last else last
            ramp = np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)
        raise ValueError(f"unknown rope kind {self.kind!r}")

    def _plane(self, turns: float) -> float:
        """The plane that turns `turns` times within the original context."""
        return (
            self.width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))
        )


def _inverse(base: float, width: int) -> np.ndarray:
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def flat_rope(
    keys: Keys, head_width: int, *, base: str = "rope_theta", partial: float | None = None
) -> Rope:
    """The one rotary embedding of a model, from either generation of the config's layout.

    Arguments:
        keys: the config.
        head_width: the width of one head.
        base: the key of the base, where it is beside the other parameters.
        partial: the share of a head that turns, unless the parameters name it; None for families
            that turn whole heads.

    Raises:
        ValueError: an unknown `rope_type`, or a parameter that is missing or wrong, by name.
    """
    # The older spelling goes first, as in Hugging Face's modeling_rope_utils.
    given = keys.get("rope_scaling", {}, dict) or keys.get("rope_parameters", {}, dict)
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{keys.family}: this family has one rope for all layer types")
    parameters = {"rope_theta": keys.get(base), **given}
    original = keys.get("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    return _rope(keys, parameters, head_width, partial)


def ropes_by_type(
    keys: Keys, head_width: int, types: Sequence[str], *, full: float, sliding: float
) -> dict[str, Any]:
    """`ropes` and `rope_of` of a model with a rotary embedding per layer type.

    Arguments:
        keys: the config.
        head_width: the width of one head.
        types: the attention type of each layer.
        full, sliding: the bases of the types, where their parameters have none.

    Raises:
        ValueError: as `flat_rope`.
    """
    nested = keys.get("rope_parameters", {}, dict)
    types_of_rope = {"full_attention", "sliding_attention"}
    wrong = sorted(k for k, v in nested.items() if k not in types_of_rope or type(v) is not dict)
    if wrong:
        raise ValueError(
            f"{keys.family}: 'rope_parameters' are per layer type here, which {wrong} are not"
        )
    # The older layout scales the rope of the full-attention layers only.
    scaling = keys.get("rope_scaling", {}, dict)
    ropes = (
        {"rope_theta": full, **nested.get("full_attention", {}), **scaling},
        {"rope_theta": sliding, **nested.get("sliding_attention", {})},
    )
    if any(parameters.get("truncate") is False for parameters in ropes):
        raise ValueError(f"{keys.family}: 'truncate' per layer type is not handled")
    return dict(
        ropes=tuple(_rope(keys, parameters, head_width, None) for parameters in ropes),
        rope_of=tuple(int(t == "sliding_attention") for t in types),
    )


def _rope(keys: Keys, given: dict[str, Any], head_width: int, partial: float | None) -> Rope:
    name = keys.family
    max_positions = keys.size("max_position_embeddings")
    parameters = {key: value for key, value in given.items() if value is not None}
    kind = parameters.get("rope_type", parameters.get("type", "default"))

    def number(key: str, default: float = 0.0) -> float:
        value = parameters.get(key, default)
        if key in parameters and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ValueError(f"{name}: {key!r} must be a positive number, got {value!r}")
        return float(value)

    def need(key: str) -> float:
        if key not in parameters:
            raise ValueError(f"{name}: rope_type {kind!r} needs {key!r}")
        return number(key)

    base = need("rope_theta")
    share = number("partial_rotary_factor", 1.0 if partial is None else partial)
    if partial is None and share != 1:
        raise ValueError(f"{name}: partial_rotary_factor = {share} is not for this family")
    width = int(head_width * share)
    pairs = (width + 1) // 2  # an odd part of a head is rounded up to whole planes
    if width < 1 or 2 * pairs > head_width:
        raise ValueError(f"{name}: rope turns pairs of coordinates, got {width} of {head_width}")
    original = int(number("original_max_position_embeddings", max_positions))
    if original < 1:
        raise ValueError(f"{name}: 'original_max_position_embeddings' must be at least 1")
    if kind == "default":
        return Rope(width, base)
    if kind == "linear":
        return Rope(width, base, kind, need("factor"))
    if kind == "dynamic":
        if width < 3:
            raise ValueError(f"{name}: rope_type 'dynamic' needs a width above 2, got {width}")
        return Rope(width, base, kind, need("factor"), max_positions)
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        return Rope(width, base, kind, need("factor"), original, low=low, high=high)
    if kind not in ("yarn", "longrope"):
        raise ValueError(f"{name}: unknown rope_type {kind!r}")
    factor = need("factor") if "factor" in parameters else max_positions / original
    amplitude = number("attention_factor") if "attention_factor" in parameters else None
    if kind == "yarn":
        scales = (number(k) if parameters.get(k) else 0.0 for k in ("mscale", "mscale_all_dim"))
        scale, all_dim = scales
        if amplitude is None and scale and all_dim:
            amplitude = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dim)
        return Rope(
            width,
            base,
            kind,
            factor,
            original,
            low=number("beta_slow", 1),
            high=number("beta_fast", 32),
            truncate=bool(parameters.get("truncate", True)),
            amplitude=float(_yarn_scale(factor, 1) if amplitude is None else amplitude),
        )
    if amplitude is None and factor > 1 and original == 1:
        raise ValueError(f"{name}: rope_type 'longrope' needs an original length above 1")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = {}
    for key in ("short_factor", "long_factor"):
        listed = parameters.get(key, ())
        if not isinstance(listed, list | tuple) or len(listed) != pairs:
            got = len(listed) if isinstance(listed, list | tuple) else repr(listed)
            raise ValueError(f"{name}: {key!r} needs {pairs} factors, got {got}")
        if not all(type(one) in (int, float) and 0 < one < math.inf for one in listed):
            raise ValueError(f"{name}: {key!r} must be positive numbers, got {listed!r}")
        factors[key] = tuple(map(float, listed))
    return Rope(
        width,
        base,
        kind,
        original=original,
        amplitude=float(amplitude),
        short=factors["short_factor"],
        long=factors["long_factor"],
    )


def _yarn_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
