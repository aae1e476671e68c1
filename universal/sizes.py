"""How wide a machine is: the number of columns of its state."""

from __future__ import annotations

from svflow.integers import positive

KINDS = ("single", "compressed", "untied", "looped", "residual")


def machine_width(
    layers: int,
    heads: int,
    head_width: int,
    out_width: int,
    kind: str = "untied",
    *,
    width: int | None = None,
) -> int:
    r"""The width of the sparse machine of a kind, with k = head_width and o = out_width:

        single      2 L k + o                           one head
        compressed  (L + 1) d + o                       one head, of width d = `width`
        untied      2 H k (1 + H + ... + H^(L-1)) + o H^L
        looped      the same
        residual    2 k ((H + 1)^L - 1) + o (H + 1)^L

    For untied, looped and residual it is also the number of equations that a program solves, so
    the least width of a random machine.

    Arguments:
        layers, heads, head_width, out_width: of the targets.
        kind: one of `KINDS`.
        width: of the targets, which only "compressed" depends on; head_width by default.

    Raises:
        ValueError: an unknown kind, a number that is not a positive integer, or several heads for
            a kind of one.

    Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423, up to the exact
    numbers, which are derived here.

    Examples:
        >>> machine_width(2, 2, 3, 4, "untied")  # 2 H k (H^L - 1) / (H - 1) + o H^L
        52
    """
    check_kind(kind, KINDS)
    layers = positive("layers", layers)
    heads = positive("heads", heads)
    head_width = positive("head_width", head_width)
    out_width = positive("out_width", out_width)
    width = head_width if width is None else positive("width", width)
    if kind in ("single", "compressed") and heads != 1:
        raise ValueError(
            f"a {kind} machine has one head, not {heads}; the kinds for several are 'untied', "
            "'looped' and 'residual'"
        )
    if kind == "single":
        return 2 * layers * head_width + out_width
    if kind == "compressed":
        return (layers + 1) * width + out_width
    children = heads + (kind == "residual")
    inner = _geometric(children, layers)
    return 2 * heads * head_width * inner + out_width * children**layers


def square_width(layers: int, heads: int, width: int, out_width: int) -> int:
    r"""The least width at which a machine with square R_Q, R_K has as many unknowns as equations:

        m = d H (1 + H^2 + ... + H^(2 (L-1))) + o H^L

    The logits of each layer and head compare every two paths, d^2 equations each, and the output
    d o for each path; a program has d m entries. Derived here.
    """
    layers, heads = positive("layers", layers), positive("heads", heads)
    width, out_width = positive("width", width), positive("out_width", out_width)
    return width * heads * _geometric(heads**2, layers) + out_width * heads**layers


def _geometric(base: int, terms: int) -> int:
    """1 + base + base^2 + ..."""
    return terms if base == 1 else (base**terms - 1) // (base - 1)


def check_kind(kind: str, kinds: tuple[str, ...], name: str = "kind") -> None:
    """Raises ValueError, by the name, for what is none of these kinds."""
    if kind not in kinds:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, kinds))}, got {kind!r}")
