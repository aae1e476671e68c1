"""Machines of zeros and ones: every map copies columns of the state.

A program for one of them holds, in columns of its own, the query, the key and the output of every
path of heads through the target: V_p W_Q, V_p W_K and V_p W_U, where V_p is the product of the
value matrices along the path p. A layer attends to them and moves what the next layer has to read
to where it reads.

Source: derived here, after Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423.
"""

from __future__ import annotations

import numpy as np

from svflow.integers import positive
from svflow.memory import check_memory, magnitude
from universal.maps import Routing
from universal.sizes import machine_width
from universal.transformer import AttentionTransformer


def sparse(
    layers: int,
    heads: int,
    width: int,
    head_width: int,
    out_width: int,
    *,
    kind: str = "untied",
    causal: bool = False,
    scale: float | None = None,
    hardmax: bool = False,
) -> AttentionTransformer:
    """The sparse machine for the targets of one shape.

    Arguments:
        layers, heads, width, head_width, out_width: of the targets. A machine serves targets of
            every width, except the compressed one.
        kind: "single": one head; R_V is the identity, and queries, keys and output are blocks that
            each layer reads in turn. "compressed": one head, all keys are the tokens themselves.
            "untied": any number of heads. "looped": all layers share their maps; for tied and
            untied targets. "residual": for targets with a residual.
        causal, hardmax: as the targets.
        scale: of the machine's logits; 1 / sqrt(head_width) by default. A program makes up for
            another scale of a target.

    Raises:
        ValueError: an unknown kind or wrong numbers, see `machine_width`.
        MemoryError: where the machine and a program for it do not fit.

    Examples:
        >>> machine = sparse(2, 2, 6, 3, 4)
        >>> machine.width, machine.depth
        (52, 2)
    """
    width = positive("width", width)
    size = machine_width(layers, heads, head_width, out_width, kind, width=width)
    check_memory(
        f"the {kind} machine of {magnitude(size)} columns and a program for it",
        size * (8 * layers * heads + 24 * width),
        None,
    )
    if kind in ("single", "compressed"):
        maps = _one_head(layers, width, head_width, out_width, size, kind)
    elif kind == "looped":
        maps = _looped(layers, heads, head_width, out_width, size)
    else:
        maps = _tree(layers, heads, head_width, out_width, size, kind == "residual")
    return AttentionTransformer(
        *(Routing(sources, size) for sources in maps),
        depth=layers if kind == "looped" else None,
        causal=causal,
        residual=kind == "residual",
        scale=head_width**-0.5 if scale is None else scale,
        hardmax=hardmax,
    )


def _one_head(layers, width, head_width, out_width, size, kind):
    """Blocks that stay where they are: [Q_1 | K_1 | Q_2 | ... | O], or [I | G_1 | ... | G_L | O].

    The compressed machine's logits are x G_l x^T, G_l = M_l W_Q W_K^T M_l^T.
    """
    value = np.arange(size)[None]
    unembed = size - out_width + np.arange(out_width)
    if kind == "single":
        blocks = np.arange(2 * layers * head_width).reshape(layers, 2, 1, head_width)
        return blocks[:, 0], blocks[:, 1], value, unembed
    tokens, *grams = np.arange((layers + 1) * width).reshape(layers + 1, 1, width)
    return np.asarray(grams), tokens, value, unembed


def _tree(layers, heads, head_width, out_width, size, residual):
    """The tree of paths in depth-first order.

    A node is [queries of all heads | keys of all heads | child 0 | child 1 | ...], a leaf is the
    output. A child is the rest of the path after the next head; with a residual child 0 is the
    rest of the path that goes around the layer. A layer reads its node's queries and keys, lets
    head g attend to child g, and writes the sum of all to child 0: the node of the next layer.
    """
    own = heads * head_width
    children = heads + residual
    value = np.full((layers, heads, size), -1)
    query = np.empty((layers, heads, head_width), int)
    start = 0
    for layer in range(layers):
        query[layer] = start + np.arange(own).reshape(heads, head_width)
        start += 2 * own
        size = (size - 2 * own) // children
        child = start + np.arange(size)
        for head in range(heads):
            value[layer, head, child] = child + (head + residual) * size
    return query, query + own, value, start + np.arange(out_width)


def _looped(layers, heads, head_width, out_width, size):
    """Words of heads that every layer shortens by their first letter.

    Queries and keys: words of 0 .. L - 1 letters, the short ones first, those of one length in
    order with the first letter the highest digit; a slot holds the queries and keys of all heads.
    Head g copies the slot of g w to that of w, and all layers read the empty word. Output: words
    of L letters, the first letter the lowest digit; head g copies slot g + H r to slot r.
    """
    own = heads * head_width
    value = np.full((heads, size), -1)
    start = 0
    for letters in range(layers - 1):
        slots, count = np.arange(2 * own * heads**letters), heads**letters
        for head in range(heads):
            value[head, start + slots] = start + 2 * own * (count + head * count) + slots
        start += len(slots)
    start += 2 * own * heads ** (layers - 1)
    rest = np.arange(heads ** (layers - 1))[:, None]
    columns = np.arange(out_width)
    for head in range(heads):
        to, source = (start + out_width * r + columns for r in (rest, heads * rest + head))
        value[head, to] = source
    query = np.arange(own).reshape(heads, head_width)
    return query, query + own, value, start + columns
