"""Machines of random weights: almost every one of them is universal.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423; that the least width
is the number of equations, and why, is derived here.
"""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jaxtyping import Array

from svflow.integers import positive
from svflow.memory import check_memory, magnitude
from svflow.spectra.controls import haar
from universal.sizes import check_kind, machine_width, square_width
from universal.transformer import AttentionTransformer

KINDS = ("untied", "looped", "residual")
LAWS = ("gaussian", "uniform", "orthogonal")


def random(
    key: Array,
    layers: int,
    heads: int,
    width: int,
    head_width: int,
    out_width: int,
    *,
    slack: float = 1.25,
    kind: str = "untied",
    law: str = "gaussian",
    square: bool = False,
    causal: bool = False,
    scale: float | None = None,
    hardmax: bool = False,
) -> AttentionTransformer:
    r"""A machine of ceil(slack N) columns with independent random maps, N from `machine_width`.

    A program solves N equations in each row of E. Their determinant is a polynomial in the
    machine's entries that is not zero at the sparse machine, so it is zero with probability 0.

    Arguments:
        key: of the draw.
        layers, heads, width, head_width, out_width: of the targets.
        slack: the width in units of N. Below 1 there are more equations than unknowns; at 1 they
            are ill conditioned; 1.25 is well above.
        kind: "untied", "looped" or "residual", as in `sparse`.
        law: "gaussian": entries N(0, 1/m). "uniform": of the same variance. "orthogonal": each map
            has orthonormal columns, uniform by Haar's measure.
        square: R_Q and R_K are (m, m), for quadratic equations (see `solve`), and N is the width
            at which these have as many unknowns; needs `width`, which nothing else depends on.
        causal, hardmax: as the targets.
        scale: of the machine's logits; 1 / sqrt of the width of its queries by default.

    Raises:
        ValueError: an unknown kind or law, numbers that are not positive, square with a kind
            other than "untied", orthonormal columns more than the machine is wide.
        MemoryError: where the weights do not fit.
    """
    check_kind(kind, KINDS)
    check_kind(law, LAWS, "law")
    if not (math.isfinite(slack) and slack > 0):
        raise ValueError(f"slack must be positive and finite, got {slack!r}")
    least = machine_width(layers, heads, head_width, out_width, kind)
    if square:
        if kind != "untied":
            raise ValueError(f"square machines are of kind 'untied', not {kind!r}")
        least = square_width(layers, heads, width, out_width)
    width = positive("width", width)
    # slack may be a quotient by N, rounded; in integers, as N may exceed what floats can hold.
    m = max(1, math.ceil((Fraction(float(slack)) - Fraction(1, 10**9)) * least))
    lead = (heads,) if kind == "looped" else (layers, heads)
    read = m if square else head_width
    if law == "orthogonal" and m < max(read, out_width):
        raise ValueError(
            f"orthonormal columns need a machine at least as wide as there are: "
            f"{max(read, out_width)} columns, not {magnitude(m)}; slack = {slack:.3g} is too small"
        )
    dtype = jnp.result_type(float)
    entries = math.prod(lead) * m * (m + 2 * read) + m * out_width
    check_memory(f"a random machine of {magnitude(m)} columns", 2 * entries * dtype.itemsize, None)
    keys = jax.random.split(key, 4)
    shapes = [(*lead, m, read), (*lead, m, read), (*lead, m, m), (m, out_width)]
    return AttentionTransformer(
        *(_draw(one, shape, law, dtype) for one, shape in zip(keys, shapes)),
        depth=layers if kind == "looped" else None,
        causal=causal,
        residual=kind == "residual",
        scale=scale,
        hardmax=hardmax,
    )


def _draw(key, shape: tuple[int, ...], law: str, dtype) -> Array:
    """Columns of mean square length 1."""
    *lead, m, out = shape
    if law == "orthogonal":
        return haar(key, m, dtype, tuple(lead))[..., :out]
    if law == "uniform":
        half = (3 / m) ** 0.5
        return jax.random.uniform(key, shape, dtype, -half, half)
    return jax.random.normal(key, shape, dtype) * m**-0.5
