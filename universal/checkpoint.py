"""The attention of a loaded checkpoint as a target.

Axes: `layers`, `heads`, `width`, `head`, `out`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from svflow import Transformer, TransformerFlow
from svflow.integers import positive
from svflow.memory import check_memory
from svflow.power import PowerFlow
from universal.transformer import AttentionTransformer


def attention_of(
    model: Transformer | TransformerFlow,
    layers: int | None = None,
    *,
    unembed: Float[ArrayLike, "width out"] | None = None,
    residual: bool = False,
) -> AttentionTransformer:
    """The target that the attention kernels of a model's first layers define.

    Value and output matrices are merged, keys and values repeated over the query heads that share
    them, and the model's scales kept. Left out: feed-forward layers, norms and their gains,
    biases, positions and rotary embeddings, windows, soft-caps, query-key norms and clips: this is
    a transformer with the checkpoint's attention weights, not the checkpoint.

    The width of a machine for it grows as heads^layers (`machine_width`), so few layers are
    affordable.

    Arguments:
        model: a `svflow.Transformer`, or its flow.
        layers: how many, from the first on; None for all.
        unembed: the output matrix; None for the identity, whose output is the last state itself.
        residual: whether layers add to the state, as the model's do.

    Raises:
        ValueError: what is not a model, or a number of layers that it does not have.
        MemoryError: where the merged matrices do not fit.
    """
    flow = getattr(model, "flow", model)
    if not isinstance(flow, TransformerFlow):
        raise ValueError(f"attention_of takes a Transformer, got {type(model).__name__}")
    config = flow.config
    layers = config.depth if layers is None else positive("layers", layers)
    if layers > config.depth:
        raise ValueError(f"the model has {config.depth} layers, not {layers}")
    entries = layers * config.heads * config.width * (2 * config.width + 2 * config.head_width)
    dtype = flow.layers.attention.query.kernel[...].dtype
    check_memory(f"the merged attention of {layers} layers", entries * dtype.itemsize, None)
    power = PowerFlow.from_model(flow)
    arrays = [getattr(power, name)[...] for name in ("query", "key", "value", "output")]
    scales = np.asarray(power.scale)
    if not power.shared:
        arrays, scales = [array[:layers] for array in arrays], scales[:layers]
    query, key, value, output = arrays
    if (scales != scales[0]).any():
        query = query * jnp.asarray(scales / scales[0], dtype)[:, None, None, None]
    return AttentionTransformer(
        query,
        key,
        jnp.matmul(value, output, precision="highest"),
        jnp.eye(config.width, dtype=dtype) if unembed is None else unembed,
        depth=layers if power.shared else None,
        causal=power.causal,
        residual=residual,
        scale=float(scales[0]),
    )
