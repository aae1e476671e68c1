"""What a flow over depth is: the one interface that solvers, spectra and scores know.

Axes: `tokens`, the sequence; `width`, the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from svflow.integers import is_integer


class Context(NamedTuple):
    """What a layer knows of its tokens besides their states.

    Arguments:
        positions: (tokens,) integer positions; None derives them from `mask`, and without a mask
            they are 0, 1, ..., tokens - 1.
        mask: (tokens,) booleans, True for a real token and False for padding; None: no padding.
            A padded token is seen by no other token; what it is does not matter as long as its
            state is finite.
    """

    positions: Int[Array, " tokens"] | None = None
    mask: Bool[Array, " tokens"] | None = None


def check_flow(flow: object, wanted: str = "flow must be") -> None:
    """Raises ValueError for what is not a flow, saying where it is, or does not set its size."""
    if not isinstance(flow, Flow):
        hint = "; pass its `.flow`" if isinstance(getattr(flow, "flow", None), Flow) else ""
        raise ValueError(f"{wanted} an svflow.Flow, got {type(flow).__name__}{hint}")
    for name in ("depth", "width"):
        if not hasattr(flow, name):
            raise ValueError(f"{type(flow).__name__} does not set `{name}`")
        value = getattr(flow, name)
        if not is_integer(value, 1):
            raise ValueError(
                f"{type(flow).__name__} sets {name} = {value!r}, which must be a positive integer"
            )


def check_context(context: Context | None, tokens: int) -> None:
    """Raises ValueError for positions or a mask of the wrong shape or type, by name."""
    if context is None:
        return
    if not isinstance(context, Context):
        raise ValueError(f"context must be an svflow.Context, got {type(context).__name__}")
    for name, kind in (("positions", jnp.integer), ("mask", jnp.bool_)):
        array = getattr(context, name)
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise ValueError(f"context.{name} must be an array, got {type(array).__name__}")
        if jnp.shape(array) != (tokens,):
            raise ValueError(f"context.{name} has shape {jnp.shape(array)}, not ({tokens},)")
        if not jnp.issubdtype(jnp.result_type(array), kind):
            wanted = "booleans" if kind is jnp.bool_ else "integers"
            raise ValueError(f"context.{name} has type {array.dtype}, not {wanted}")


class Flow(nnx.Module):
    r"""A dynamical system over depth, dx/dt = v(t, x) for t in [0, depth], tokens as rows of x.

    Time is counted in layers: layer l holds from t = l to l + 1, the last one at t = depth too. A
    subclass sets `depth` and `width` and defines `velocity`; that is
    a whole flow, and its layer is the Euler step x + v(layer, x).

    A flow whose layer is a composition says so with `splitting`: one entry per substep, each the
    names of the branches that the substep adds to the stream. Then `field(k, t, x)` is the
    displacement of substep k, the velocity is the sum of the fields, and the layer is their
    Lie-Trotter composition

        x <- retract(x + field(k, layer, x)),   k = 0, 1, ...

    `branch(name, t, x)` is one raw update before any norm that follows the addition; it equals
    the field wherever no such norm exists.

    `causal` says that no token's update depends on a later token; spectra then use it.

    `retract` maps back to the manifold the flow lives on, and is the identity in R^d. It must be
    the identity on the manifold and the fields must be tangent to it, or the order is lost.
    """

    depth: int
    width: int

    @property
    def splitting(self) -> tuple[tuple[str, ...], ...]:
        """The substeps of one layer, each the names of the branches that it adds."""
        return (("velocity",),)

    @property
    def jumps(self) -> tuple[float, ...]:
        """Times inside (0, depth) at which the velocity may jump: where one layer ends."""
        return tuple(float(layer) for layer in range(1, self.depth))

    @property
    def centered(self) -> bool:
        """Whether the norms that read the state remove its mean, as LayerNorm does."""
        return False

    @property
    def causal(self) -> bool:
        """Whether no token's update depends on a later token."""
        return False

    def velocity(
        self, t, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """The continuous field v(t, x): the sum of the substeps' fields at the same state."""
        if type(self).field is Flow.field:
            raise TypeError(f"{type(self).__name__} defines neither `velocity` nor `field`")
        fields = [self.field(k, t, x, context) for k in range(len(self.splitting))]
        return sum(fields[1:], start=fields[0])

    def field(
        self, substep: int, t, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """The displacement of one substep of the splitting."""
        return self.velocity(t, x, context)

    def branch(
        self, name: str, t, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """One named additive update of the stream, before any norm that follows the addition."""
        for substep, names in enumerate(self.splitting):
            if names == (name,):
                return self.field(substep, t, x, context)
        raise ValueError(f"no branch {name!r}; this flow has {self.splitting}")

    def retract(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Back to the flow's manifold; the identity unless the flow lives on one."""
        return x

    def check_start(
        self, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """The state x as the start of a trajectory: itself, unless the flow cannot start there.

        A flow that lives on a manifold may refuse states off it: by a ValueError where x is known,
        and where x is traced by returning `equinox.error_if(x, ...)`.
        """
        return x

    def widened(self, dtype) -> Flow:
        """The same flow computing in a floating type at least as wide as its own.

        Narrow weights are exact in the wider type. By default they are all converted at once.
        """

        def widen(leaf):
            narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and (
                jnp.finfo(leaf.dtype).bits < jnp.finfo(dtype).bits
            )
            return leaf.astype(dtype) if narrow else leaf

        return jax.tree.map(widen, self)

    def step(
        self, layer, x: Float[Array, "tokens width"], context: Context | None = None
    ) -> Float[Array, "tokens width"]:
        """The discrete layer: the Lie-Trotter composition of the substeps at dt = 1.

        Raises:
            ValueError: a known layer that the flow has not.
        """
        if is_integer(layer) and not 0 <= layer < self.depth:
            raise ValueError(f"layer {layer} is not one of 0 .. {self.depth - 1}")
        for k in range(len(self.splitting)):
            x = self.retract(x + self.field(k, layer, x, context))
        return x

    def frozen(
        self, layer, x: Float[Array, "tokens width"], token, context: Context | None = None
    ) -> Callable[[Float[Array, "*rows width"]], Float[Array, "*rows width"]]:
        """The discrete layer as a map of one token's state, the others' states before it fixed.

        `token` may also be the (rows,) places of several, each once: a map of their states
        together. What the other tokens contribute may be computed once, here.
        """
        return lambda row: self.step(layer, x.at[token].set(row), context)[token]
