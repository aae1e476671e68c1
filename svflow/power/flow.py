"""The system of transformer layers without feed-forward: a power method on the unit sphere.

Axes: `layers`; `heads`; `width`, the residual stream; `head`, the width of a head's queries and
keys; `value`, that of its values; `tokens`.

Source: Li and Altafini, "Analogies between Transformer Layers and Power Method", arXiv 2605.25619;
the continuous version: Geshkovski et al., "A mathematical perspective on transformers", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Float

from svflow import attention
from svflow.flow import Flow
from svflow.integers import is_integer
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.power.directions import known, polar, reals
from svflow.sharding import DATA

NAMES = ("query", "key", "value", "output")


class PowerFlow(Flow):
    r"""Attention with a residual and L2 normalisation, tokens on the unit sphere:

        x_i' = Norm( x_i + v_i(x) ),   v_i(x) = sum_h O^h V^h sum_j a_ij^h x_j,
        a_ij^h = softmax_j( scale (W_Q^h)^T x_i . (W_K^h)^T x_j )

    and its continuous version dx_i/dt = P_x v_i(x), with P_x y = y - x (x . y).

    Where all tokens agree it is the power method on I + F, F = sum_h O^h V^h (`layer_matrix`).

    `field` is the raw update v and not tangent: so the Lie-Trotter step with dt = 1, what
    `simulate` does by default, is the layer itself, Norm(x + v). (A tangent field with the same
    layer is P_x v / (1 + x . v), which is singular where a layer turns a token by a right angle.)
    Hence `velocity` is the tangent part of the field, not the field. Smaller steps converge to
    the flow of `velocity` all the same, at the solver's order: off the sphere the field is
    continued as |y| v(y / |y|), homogeneous of degree one, so that rays go to rays and the
    solution of dy/dt = field(y), projected to the sphere, solves dx/dt = P_x v. That also makes
    a layer a function of its tokens' directions: their norms do not matter.

    Arguments:
        query, key: ([layers,] heads, width, head) projections x @ W of rows.
        value: ([layers,] heads, width, value); output: ([layers,] heads, value, width).
        depth: the number of layers, for weights without a layer axis, which all layers share;
            else None: the arrays say it.
        causal: whether tokens attend only to themselves and their past.
        scale: of the scores, one number or one per layer of the arrays; 1 / sqrt(head) by default.

    Of a context the mask holds as everywhere; positions have no meaning here. A padded token may
    be zero; any other zero token has no direction, and makes nan of itself and of all that see it.

    Raises:
        ValueError: arrays of wrong, mismatched or empty shapes, of different or other than
            floating types, or not finite; a depth missing or in the way; a scale that is not one
            real number or one per layer, or not finite in the arrays' type.

    Examples:
        >>> import svflow as sv
        >>> F = jnp.diag(jnp.asarray([1.0, -1.5, 0.0]))[None]  # one head
        >>> flow = PowerFlow(0 * F, 0 * F, F, jnp.eye(3)[None], depth=60)
        >>> tokens = sv.geometry.sphere(jnp.asarray([[1.0, 3.0, 2.0], [2.0, 3.0, 1.0]])) / 3**0.5
        >>> print(abs(sv.simulate(flow, tokens).xs[-1]).round(3))  # not to the eigenvalue -1.5
        [[1. 0. 0.]
         [1. 0. 0.]]
    """

    mesh: Mesh | None = None
    """Set by `svflow.shard`: tokens are split over its axis `data` where they divide by it."""

    def __init__(
        self,
        query: Float[ArrayLike, "*layers heads width head"],
        key: Float[ArrayLike, "*layers heads width head"],
        value: Float[ArrayLike, "*layers heads width value"],
        output: Float[ArrayLike, "*layers heads value width"],
        *,
        depth: int | None = None,
        causal: bool = False,
        scale: float | Sequence[float] | None = None,
    ):
        arrays = [jnp.asarray(array) for array in (query, key, value, output)]
        _check(arrays)
        shape = arrays[0].shape
        self.shared = len(shape) == 3
        self.depth = _depth(depth, None if self.shared else shape[0])
        self.width, self.heads = shape[-2], shape[-3]
        self.scale = _scales(scale, shape[-1], 1 if self.shared else self.depth, arrays[0].dtype)
        self.only_past = bool(causal)
        self.query, self.key, self.value, self.output = map(nnx.Param, arrays)

    @classmethod
    def from_model(cls, model: Transformer | TransformerFlow) -> PowerFlow:
        """The system that a model's attention kernels define, one layer for each of its layers.

        Keys and values are repeated over the query heads that share them, and scales are the
        model's own. Layers that share one block (ALBERT) become shared weights; where several
        blocks are used more than once, they are repeated. Left out: biases, rotary embeddings,
        windows, soft-caps, query-key norms, clips and the feed-forward layers; the gains of
        norms are not folded into the kernels.

        Raises:
            ValueError: what is not a model, or weights that are not finite.
        """
        flow = getattr(model, "flow", model)
        if not isinstance(flow, TransformerFlow):
            raise ValueError(f"from_model takes a Transformer, got {type(model).__name__}")
        config, layer = flow.config, flow.layers.attention
        one = len(set(config.blocks)) == 1 and len(set(config.scales)) == 1
        blocks = config.blocks[0] if one else np.asarray(config.blocks)
        head, times = config.head_width, config.heads // config.kv_heads

        def split(linear):
            kernel = linear.kernel[...][blocks]
            parts = kernel.reshape(*kernel.shape[:-1], -1, head)
            return jnp.moveaxis(parts, -2, -3)

        output = layer.output.kernel[...][blocks]
        return cls(
            split(layer.query),
            jnp.repeat(split(layer.key), times, axis=-3),
            jnp.repeat(split(layer.value), times, axis=-3),
            output.reshape(*output.shape[:-2], config.heads, head, config.width),
            depth=config.depth if one else None,
            causal=config.causal,
            scale=config.scales[0] if one else config.scales,
        )

    def repeated(self, depth: int) -> PowerFlow:
        """The same shared weights over another number of layers; ValueError if they differ."""
        if not self.shared:
            raise ValueError("the layers of this PowerFlow differ: they cannot be repeated")
        depth = _depth(depth, None)
        flow = jax.tree.map(lambda leaf: leaf, self)
        flow.depth = depth
        return flow

    @property
    def splitting(self) -> tuple[tuple[str, ...], ...]:
        return (("attention",),)

    @property
    def jumps(self) -> tuple[float, ...]:
        return () if self.shared else super().jumps

    @property
    def causal(self) -> bool:
        return self.only_past

    def layer_matrix(self, layer: int = 0) -> Float[Array, "width width"]:
        """F = sum_h O^h V^h of one layer, for column vectors: F = sum_h (W_V^h W_O^h)^T.

        Raises:
            ValueError: a layer that is not an integer of 0 .. depth - 1.
        """
        if not is_integer(layer, 0, self.depth - 1):
            raise ValueError(f"layer must be one of 0 .. {self.depth - 1}, got {layer!r}")
        value, output = self._weights(jnp.asarray(layer))[2:]
        return jnp.einsum("hdv,hve->ed", value, output, precision=jax.lax.Precision.HIGHEST)

    def field(self, substep, t, x, context=None):
        direction, norm, lost = _seen(x, context)
        # Where there is no direction any will do: the next state then has one.
        return jnp.where(lost, 1, self._update(t, direction, context) * norm)

    def velocity(self, t, x, context=None):
        direction, norm, _ = _seen(x, context)
        v = self._update(t, direction, context)
        radial = jnp.sum(direction * v, axis=-1, keepdims=True)
        return (v - direction * radial) * norm

    def retract(self, x):
        """x / |x| for every token; nan for a token that is zero, which has no direction."""
        return polar(x)[0]

    def _weights(self, t):
        """The four arrays of the layer that holds at time t."""
        arrays = [getattr(self, name)[...] for name in NAMES]
        return arrays if self.shared else [array[self._index(t)] for array in arrays]

    def _index(self, t):
        t = jnp.asarray(t)
        if jnp.issubdtype(t.dtype, jnp.integer):
            return t
        return jnp.clip(jnp.floor(t), 0, self.depth - 1).astype(jnp.int32)

    def _update(self, t, x, context):
        query, key, value, output = self._weights(t)
        scale = jnp.asarray(self.scale, x.dtype)[0 if self.shared else self._index(t)]

        def project(kernel):  # one product for all heads
            heads, width, head = kernel.shape
            merged = kernel.transpose(1, 0, 2).reshape(width, heads * head)
            return (x @ merged).reshape(-1, heads, head)

        mask = None if context is None else context.mask
        attend = functools.partial(attention.attend, causal=self.causal)
        count = 1 if self.mesh is None else self.mesh.shape.get(DATA, 1)
        if count > 1 and x.shape[0] % count == 0:
            attend = _spread(attend, self.mesh)
        mixed = attend(project(query), project(key), project(value), scale=scale, mask=mask)
        return mixed.reshape(x.shape[0], -1) @ output.reshape(-1, self.width)


def _spread(attend, mesh):
    """`attend` with every device of the axis `data` doing its part of the queries."""

    def part(query, key, value, scale, mask):
        rows = jnp.arange(query.shape[0])
        rows = rows + jax.lax.axis_index(DATA).astype(rows.dtype) * query.shape[0]
        return attend(query, key, value, scale=scale, mask=mask, rows=rows)

    split, whole = PartitionSpec(DATA), PartitionSpec()
    each = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(split, whole, whole, whole, whole),
        out_specs=split,
        axis_names={DATA},
    )
    return jax.jit(lambda query, key, value, *, scale, mask: each(query, key, value, scale, mask))


def _seen(x: Float[Array, "tokens width"], context):
    """Directions and norms, and which tokens are padding without a direction: zero, not nan, for
    these, since a weight of 0 does not take a nan out of a sum."""
    direction, norm = polar(x)
    lost = jnp.zeros((len(x), 1), bool)
    if context is not None and context.mask is not None:
        lost = jnp.isnan(direction[:, :1]) & ~context.mask[:, None]
    return jnp.where(lost, 0, direction), norm, lost


def _check(arrays: list[Any]) -> None:
    for name, array in zip(NAMES, arrays):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
        if array.dtype != arrays[0].dtype:
            raise ValueError(f"{name} is {array.dtype}, but query is {arrays[0].dtype}")
        if array.ndim not in (3, 4):
            kind = "(heads, value, width)" if name == "output" else "(heads, width, head)"
            raise ValueError(
                f"{name} must have shape {kind}, or a layer axis in front, got {array.shape}"
            )
        if 0 in array.shape:
            raise ValueError(f"{name} has no values: shape {array.shape}")
    query, key, value, output = (array.shape for array in arrays)
    if key != query:
        raise ValueError(f"key has shape {key}, but query {query}")
    if value[:-1] != query[:-1]:
        raise ValueError(f"value has shape {value}, which must be {query[:-1]} and a width")
    if output != (*value[:-2], value[-1], value[-2]):
        raise ValueError(
            f"output has shape {output}, not {(*value[:-2], value[-1], value[-2])} as value's "
            f"{value} asks"
        )
    for name, array in zip(NAMES, arrays):
        values = known(array)
        if values is not None and not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite in {array.dtype}")


def _depth(depth: int | None, layers: int | None) -> int:
    if layers is not None:
        if depth is not None:
            raise ValueError(f"depth = {depth} was given, but the arrays have {layers} layers")
        return layers
    if not is_integer(depth, 1):
        raise ValueError(f"weights without a layer axis need depth, a positive int, got {depth!r}")
    return int(depth)


def _scales(scale: Any, head: int, layers: int, dtype) -> tuple[float, ...]:
    """One scale per layer."""
    values = reals(head**-0.5 if scale is None else scale, "scale")
    if values.ndim > 1 or (values.ndim and values.shape != (layers,)):
        raise ValueError(
            f"scale must be one number, or {layers} (one per layer of the arrays), got {scale!r}"
        )
    if not (np.abs(values) <= float(jnp.finfo(dtype).max)).all():
        raise ValueError(f"scale must be finite in {dtype}, got {scale!r}")
    return tuple(map(float, np.broadcast_to(values, (layers,))))
