"""Rotary frequencies and their scalings.

Facts: Hugging Face transformers 5.24, modeling_rope_utils; Peng et al., "YaRN", 2023; Ding et al.,
"LongRoPE", 2024; Llama 3.1's frequency bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: inverse frequencies base^(-2k/width), k < width/2, and their scaling.

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

    def angles(self, positions: Int[Array, " tokens"], dtype) -> Float[Array, "tokens pairs"]:
        """The angle of every plane at every position, in `dtype`.

        "dynamic" and "longrope" depend on the length of the sequence, the largest position + 1.
        """
        length = jnp.max(positions) + 1
        if self.kind == "dynamic":
            stretched = self.factor * length / self.original - (self.factor - 1)
            stretched = jnp.maximum(stretched, 1).astype(dtype)
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
            ramp = np.clip((np.arange(self.width // 2) - first) / (last - first), 0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)
        raise ValueError(f"unknown rope kind {self.kind!r}")

    def _plane(self, turns: float) -> float:
        """The plane that turns `turns` times within the original context."""
        return (
            self.width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))
        )


def _inverse(base: float, width: int) -> np.ndarray:
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def rope_from_hf(parameters: dict, *, head_width: int, max_positions: int, name: str) -> Rope:
    """A `Rope` from the `rope_parameters` of a Hugging Face config (one layer type's).

    Raises:
        ValueError: an unknown `rope_type`, or a missing parameter, by name.
    """
    parameters = dict(parameters)
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    kind = {"su": "longrope"}.get(kind, kind)
    base = float(parameters.pop("rope_theta"))
    width = int(head_width * parameters.pop("partial_rotary_factor", 1.0))
    if width < 2 or width % 2:
        raise ValueError(f"{name}: rope needs an even number of coordinates, got {width}")
    original = parameters.pop("original_max_position_embeddings", None)

    def need(key):
        if parameters.get(key) is None:
            raise ValueError(f"{name}: rope_type {kind!r} needs {key!r}")
        return parameters[key]

    if kind == "default":
        return Rope(width, base)
    if kind == "linear":
        return Rope(width, base, kind, float(need("factor")))
    if kind == "dynamic":
        return Rope(width, base, kind, float(need("factor")), max_positions)
    if kind == "llama3":
        return Rope(
            width,
            base,
            kind,
            float(need("factor")),
            int(original or max_positions),
            low=float(need("low_freq_factor")),
            high=float(need("high_freq_factor")),
        )
    if kind == "yarn":
        original = int(original or max_positions)
        factor = float(need("factor"))
        amplitude = parameters.get("attention_factor")
        scale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if amplitude is None:
            if scale and all_dim:
                amplitude = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dim)
            else:
                amplitude = _yarn_scale(factor, 1)
        return Rope(
            width,
            base,
            kind,
            factor,
            original,
            low=float(parameters.get("beta_slow") or 1),
            high=float(parameters.get("beta_fast") or 32),
            truncate=bool(parameters.get("truncate", True)),
            amplitude=float(amplitude),
        )
    if kind == "longrope":
        original = int(original or max_positions)
        factor = parameters.get("factor") or max_positions / original
        amplitude = parameters.get("attention_factor")
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short = tuple(map(float, need("short_factor")))
        long = tuple(map(float, need("long_factor")))
        for key, factors in (("short_factor", short), ("long_factor", long)):
            if len(factors) != width // 2:
                raise ValueError(f"{name}: {key!r} needs {width // 2} factors, got {len(factors)}")
        return Rope(
            width, base, kind, original=original, amplitude=float(amplitude), short=short, long=long
        )
    raise ValueError(f"{name}: unknown rope_type {kind!r}")


def _yarn_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
