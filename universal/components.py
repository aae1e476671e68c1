"""A transformer's other components around its attention, and the machines that are trained.

Axes: `layers`; `width`, the state; `hidden`, of the feed-forward layer; `tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from svflow import Context, Flow
from svflow.dtypes import at_least_float32
from svflow.integers import positive
from svflow.memory import check_memory
from universal.maps import Routing, live_columns
from universal.random_machine import random
from universal.sizes import check_kind, machine_width
from universal.sparse import sparse
from universal.transformer import AttentionTransformer, check_transformer

MACHINES = ("sparse", "random", "full")
ROUTINGS = ("single", "untied", "looped", "residual")
EPS = 1e-5  # Of LayerNorm.


class Blocks(Flow):
    r"""An attention transformer, with LayerNorm before it and feed-forward layers between:

        x <- a(n(x)) or x + a(n(x)),   x <- x + gelu(n(x) W_up) W_down,   output n(x^L) W_U

    where a is a layer of the attention, with its residual or without, and n LayerNorm, or the
    identity.

    Arguments:
        attention: the attention, of which the residual is too.
        norm: whether there is LayerNorm.
        gain, bias: of LayerNorm, (layers, 1 or 2, width): before attention, before the feed-forward
            layer; and `final`, (2, width), gain and bias of the last one. None for 1 and 0.
        up, down: (layers, width, hidden), (layers, hidden, width); None for no feed-forward layer.

    Raises:
        ValueError: shapes that do not fit; a feed-forward layer without a residual, which would
            replace the state; gain, bias or final without LayerNorm.
    """

    def __init__(
        self,
        attention: AttentionTransformer,
        *,
        norm: bool = False,
        gain: Float[Array, "layers norms width"] | None = None,
        bias: Float[Array, "layers norms width"] | None = None,
        final: Float[Array, "2 width"] | None = None,
        up: Float[Array, "layers width hidden"] | None = None,
        down: Float[Array, "layers hidden width"] | None = None,
    ):
        check_transformer(attention, "attention")
        self.depth, self.width = attention.depth, attention.width
        self.attention, self.norm = attention, bool(norm)
        self._check(gain, bias, final, up, down)
        self.gain, self.bias, self.final, self.up, self.down = (
            None if array is None else nnx.Param(array) for array in (gain, bias, final, up, down)
        )

    def _check(self, gain, bias, final, up, down) -> None:
        depth, width = self.depth, self.width
        if (up is None) != (down is None):
            raise ValueError("a feed-forward layer needs both up and down")
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = dict(final=(final, (2, width)))
        norms = (depth, 1 if up is None else 2, width)
        wanted |= dict(gain=(gain, norms), bias=(bias, norms))
        if up is not None and down is not None:
            if not self.attention.residual:
                raise ValueError("feed-forward layers need a residual: they add to the state")
            hidden = jnp.shape(up)[-1]
            wanted |= dict(up=(up, (depth, width, hidden)), down=(down, (depth, hidden, width)))
        for name, (array, shape) in wanted.items():
            if array is not None and jnp.shape(array) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {jnp.shape(array)}")
        if not self.norm and any(array is not None for array in (gain, bias, final)):
            raise ValueError("gain, bias and final belong to LayerNorm: norm is False")

    @property
    def splitting(self) -> tuple[tuple[str, ...], ...]:
        return (("attention",),) if self.up is None else (("attention",), ("mlp",))

    @property
    def jumps(self) -> tuple[float, ...]:
        alone = self.up is None and self.gain is None and self.bias is None
        return self.attention.jumps if alone else super().jumps

    @property
    def centered(self) -> bool:
        return self.norm

    @property
    def causal(self) -> bool:
        return self.attention.causal

    @property
    def routed(self) -> bool:
        """Whether attention is made of routings, so that each layer is a program of its own."""
        return any(isinstance(kernel, Routing) for kernel in self.attention.maps[:3])

    def field(self, substep, t, x, context=None):
        layer = self._layer(t)
        y = self._entering(substep, layer, x)
        if substep == 0:
            update = self.attention.field(0, t, y, context)
            return update if self.attention.residual or not self.norm else update + y - x
        with jax.default_matmul_precision("highest"):
            hidden = jax.nn.gelu(y @ _at(self.up, layer), approximate=False)
            return hidden @ _at(self.down, layer)

    def step(self, layer, x, context=None):
        if self.attention.residual:
            return super().step(layer, x, context)
        # A layer that replaces the state, and is alone.
        return self.attention.step(layer, self._entering(0, self._layer(layer), x), context)

    def attention_at(
        self, layer, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "heads tokens keys"]:
        """The attention matrices of one layer at the state that enters it."""
        return self.attention.attention(layer, self._entering(0, self._layer(layer), x), context)

    def read(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """What the output is read from: the last state, behind LayerNorm where there is one."""
        gain, bias = (None, None) if self.final is None else self.final[...]
        return self._normed(x, gain, bias)

    def _layer(self, t):
        if not isinstance(t, jax.core.Tracer):
            return min(max(int(np.floor(np.asarray(t))), 0), self.depth - 1)
        return jnp.clip(jnp.floor(t), 0, self.depth - 1).astype(jnp.int32)

    def _entering(self, substep, layer, x):
        """x behind the LayerNorm of a substep, where there is one."""
        return self._normed(x, *(_at(array, layer, substep) for array in (self.gain, self.bias)))

    def _normed(self, x, gain, bias):
        if not self.norm:
            return x
        wide = x.astype(at_least_float32(x.dtype))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        y = (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)
        y = y if gain is None else y * gain
        return y if bias is None else y + bias


def _at(array: nnx.Param | None, *place) -> Any:
    return None if array is None else array[...][place]


@dataclass(frozen=True)
class Recipe:
    """A machine of one shape, to be drawn from a key.

    Arguments:
        kind: "sparse"; "random", of the same width and frozen; "full", the same as that and
            trained.
        layers, heads, head_width: of the attention.
        out_width: how many columns the sparse machine keeps for its output; all kinds are as wide.
        routing: the kind of `sparse`. "residual" has columns for paths that go around layers;
            the others can have a residual too, but no columns for those.
        residual, norm: whether there are.
        hidden: of the feed-forward layers; 0 for none.
        causal: whether tokens attend only to themselves and their past.

    Raises:
        ValueError: an unknown kind or routing, numbers that are not positive, parts that do not go
            together.
    """

    kind: str
    layers: int
    heads: int
    head_width: int
    out_width: int
    routing: str = "untied"
    residual: bool = False
    norm: bool = False
    hidden: int = 0
    causal: bool = True

    def __post_init__(self):
        check_kind(self.kind, MACHINES)
        # Python's own numbers, which JSON can hold.
        for name in ("layers", "heads", "head_width", "out_width"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        for name in ("residual", "norm", "causal"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {value!r}")
            object.__setattr__(self, name, bool(value))
        hidden = positive("hidden", self.hidden) if self.hidden else 0
        object.__setattr__(self, "hidden", hidden)
        check_kind(self.routing, ROUTINGS, "routing")
        if self.routing == "residual" and not self.residual:
            raise ValueError("routing = 'residual' needs residual=True")
        # Whatever else does not go together is said here, without anything being drawn.
        jax.eval_shape(self.build, jax.random.key(0))

    @property
    def width(self) -> int:
        """The columns of the state, for every kind."""
        sizes = self.layers, self.heads, self.head_width, self.out_width
        return machine_width(*sizes, self.routing)

    def build(self, key: Array) -> Blocks:
        """The machine. A sparse one depends on the key only in its feed-forward layers.

        Random and full machines have entries N(0, 1/fan-in) everywhere.
        """
        attend, first, second = jax.random.split(key, 3)
        sizes = self.layers, self.heads, self.head_width, self.head_width, self.out_width
        if self.kind == "sparse":
            made = sparse(*sizes, kind=self.routing)
        else:
            kind = "untied" if self.routing == "single" else self.routing
            made = random(attend, *sizes, slack=1.0, kind=kind)
        width, depth, dtype = made.width, made.depth, jnp.result_type(float)
        maps: list[Any] = [k if isinstance(k, Routing) else k[...] for k in made.maps]
        attention = AttentionTransformer(
            maps[0],
            maps[1],
            maps[2],
            Routing(np.arange(self.out_width), width),  # no leaf: the output is learnt elsewhere
            depth=depth if made.tied else None,
            causal=self.causal,
            residual=self.residual,
            scale=made.scale,
        )
        arrays: dict[str, Array] = {}
        if self.hidden:
            size = 2 * depth * width * self.hidden
            check_memory(f"feed-forward layers of {size} entries", 8 * size, None)
            arrays["up"] = _normal(first, (depth, width, self.hidden), dtype)
            arrays["down"] = _normal(second, (depth, self.hidden, width), dtype)
        if self.norm and self.kind == "full":
            shape = (depth, 2 if self.hidden else 1, width)
            arrays |= dict(gain=jnp.ones(shape, dtype), bias=jnp.zeros(shape, dtype))
            arrays["final"] = jnp.stack([jnp.ones(width, dtype), jnp.zeros(width, dtype)])
        return Blocks(attention, norm=self.norm, **arrays)


def _normal(key, shape: tuple[int, ...], dtype) -> Array:
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


def read_columns(flow: Flow) -> int:
    """How many columns of the last state can be other than zero."""
    if not isinstance(flow, Blocks) or flow.norm or flow.attention.residual:
        return flow.width
    value = flow.attention.value
    if not isinstance(value, Routing):
        return flow.width
    return len(live_columns(value, flow.depth, False)[-1].to)


def reader(flow: Flow) -> Callable[[Array], Array]:
    """`Blocks.read`, or the identity for any other flow."""
    return flow.read if isinstance(flow, Blocks) else lambda x: x
