"""Models larger than the memory of a device: one layer after another from disk.

    model = sv.stream(source, dtype=jnp.bfloat16)
    path = model.simulate(model.embed(ids))       # sv.simulate(model.flow, ...)
    Js = model.layer_jacobians(path.xs)           # sv.layer_jacobians(model.flow, path.xs)
    logits = model.unembed(path.xs[-1])

Two layers are in memory at a time: the one that computes, and the next one, which a thread reads
meanwhile. The table of tokens and the head are read when they are needed, and not kept. So memory
peaks at two layers or at the larger of those two tables.

One pass reads the whole model, so many sequences share one: `layers` gives each layer as a flow
of depth 1, for whatever is to be done with it.

    step = jax.jit(jax.vmap(sv.Flow.step, in_axes=(None, None, 0)))
    for flow in model.layers():
        xs = step(flow, 0, xs)                    # (sequences, tokens, width)

Axes: `tokens`; `width`, the residual stream; `layers`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from svflow.flow import Context
from svflow.memory import check_memory
from svflow.models.config import TransformerConfig
from svflow.models.families.base import Rule
from svflow.models.loading import (
    Opened,
    blocks_of,
    flatten,
    opened,
    parameter_bytes,
    parts_of,
)
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.simulate import Trajectory, simulate, started
from svflow.spectra.jacobians import check_chunk, check_state, check_states, layer_jacobians

LAYERS = "flow.layers."


def stream(source: str | os.PathLike, *, dtype=jnp.float32) -> StreamedTransformer:
    """A model from a checkpoint that is read layer by layer whenever it is used.

    Arguments:
        source, dtype: as for `svflow.load`.

    Raises:
        FileNotFoundError, ValueError: as `svflow.load`; those about values when they are read, and
            then for a file that has changed since it was opened.
        MemoryError: where not even two layers, or a table of tokens, fit.
    """
    return StreamedTransformer(opened(source, dtype))


class StreamedTransformer:
    """A `Transformer` whose weights stay on disk; made by `stream`.

    Arguments:
        found: the checkpoint, opened.
    """

    def __init__(self, found: Opened):
        self._found, self._source = found, Path(found.checkpoint.source).resolve()
        self._files = _weight_files(self._source)
        self.config: TransformerConfig = found.config
        self.depth, self.width = self.config.depth, self.config.width
        check_memory("two layers, or the table of tokens", self.peak_bytes, jnp.zeros(()))

    @property
    def bytes(self) -> int:
        """What the weights would take in memory."""
        return parameter_bytes(self._found.shapes.values())

    @property
    def peak_bytes(self) -> int:
        """What they take at most: two layers, the embedding, or the head with a tied table."""
        shapes = self._found.shapes
        kinds = {self.config.layer(layer) for layer in range(self.depth)}
        layers = [
            parameter_bytes(_layer_shapes(kind, self._found.dtype)[0].values()) for kind in kinds
        ]
        outer = (
            parameter_bytes(leaf for path, leaf in shapes.items() if keep(path))
            for keep in (_embeds, self._unembeds)
        )
        return max(2 * max(layers), *outer)

    def layers(self) -> Iterator[TransformerFlow]:
        """Every layer in turn as a flow of depth 1, the next one being read meanwhile.

        Layers whose configs are equal but for their weights are one compiled program.
        """
        config, sources = self.config, self._sources()
        kinds = [(config.blocks[layer], config.layer(layer)) for layer in range(self.depth)]
        # The thread only reads: JAX's contexts, jax.enable_x64 among them, are a thread's own.
        layouts = {kind: _layer_shapes(kind, self._found.dtype) for _, kind in kinds}

        def read(kind):
            return self._read_layer(sources[kind[0]], layouts[kind[1]][0])

        def flow_of(kind, leaves):
            shapes, treedef = layouts[kind[1]]
            return jax.tree.unflatten(treedef, [jnp.asarray(leaves.pop(path)) for path in shapes])

        flow = flow_of(kinds[0], read(kinds[0]))
        with ThreadPoolExecutor(1) as pool:
            for kind, following in itertools.pairwise(kinds):
                if kind == following:  # ALBERT's layers share their weights
                    yield flow
                    continue
                coming = pool.submit(read, following)
                yield flow
                flow = flow_of(following, coming.result())
            yield flow

    def embed(
        self,
        ids: Int[ArrayLike, " tokens"],
        context: Context | None = None,
        *,
        segments: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens width"]:
        """`Transformer.embed`; reads the embedding's parameters."""
        return self._outer(_embeds).embed(ids, context, segments=segments)

    def unembed(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens vocab"]:
        """`Transformer.unembed`; reads the head's parameters."""
        self._check_head()
        return self._outer(self._unembeds).unembed(x)

    def __call__(
        self,
        ids: Int[ArrayLike, " tokens"],
        context: Context | None = None,
        *,
        segments: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens vocab"]:
        """The logits of every token. Raises ValueError without a head, before anything is read."""
        self._check_head()
        x = self.embed(ids, context, segments=segments)
        return self.unembed(self.simulate(x, context=context).xs[-1])

    def simulate(
        self, x0: Float[Array, "tokens width"], *, context: Context | None = None
    ) -> Trajectory:
        """`svflow.simulate(model.flow, x0, context=context)`: every layer's state.

        Raises:
            ValueError: as `svflow.simulate`, before anything is read.
        """
        xs = [started(self._whole(), x0, context)]
        for flow in self.layers():
            path = simulate(flow, xs[-1], ts=[1.0], context=context)
            xs.append(path.xs[-1].block_until_ready())
        times = jnp.arange(self.depth + 1).astype(path.ts.dtype)
        return Trajectory(times, jnp.stack(xs), path.result)

    def layer_jacobians(
        self,
        xs: Float[Array, "states tokens width"],
        *,
        token: int = -1,
        scope: str = "frozen",
        context: Context | None = None,
        chunk: int | None = None,
    ) -> Float[Array, "layers width width"] | Float[Array, "layers tokens width tokens width"]:
        """`svflow.layer_jacobians(model.flow, xs, ...)`.

        Raises:
            ValueError, MemoryError: as `svflow.layer_jacobians`, before anything is read but for a
            Jacobian that is not finite.
        """
        xs = check_states(xs, self.depth, self.width)
        whole = self._whole()
        for layer in range(self.depth):
            check_state(whole, layer, xs[layer], token, scope, context)
        check_chunk(whole, xs[0], scope, chunk, count=self.depth)
        found: Any = None
        for layer, flow in enumerate(self.layers()):
            try:
                J = layer_jacobians(
                    flow,
                    xs[layer : layer + 2],
                    token=token,
                    scope=scope,
                    context=context,
                    chunk=chunk,
                )
            except ValueError as error:
                raise ValueError(f"layer {layer} by itself: {error}") from error
            if found is None:
                found = jnp.zeros((self.depth, *J.shape[1:]), J.dtype)
            # In place: all of them twice would be more than a device of two layers may hold.
            found = _put(found, J, np.int32(layer)).block_until_ready()
        return found

    def _whole(self) -> TransformerFlow:
        """All layers, of shapes alone."""
        return jax.tree.unflatten(self._found.treedef, self._found.shapes.values()).flow

    def _check_head(self):
        if self.config.head is None:
            raise ValueError(f"this {self.config.family} checkpoint has no head: no logits")

    def _unembeds(self, path: str) -> bool:
        untied = "head.kernel" in self._found.shapes
        return path.startswith("head.") or (path == "embedding.tokens" and not untied)

    def _outer(self, keep: Callable[[str], bool]) -> Transformer:
        """The model of which only some parameters outside its layers are there."""
        self._check_files()
        found, nothing = self._found, jnp.zeros((0,), self._found.dtype)
        leaves = {path: nothing for path in found.shapes}
        for name, rule, _ in found.plan:
            if any(map(keep, rule.ours)):
                for path, part in parts_of(found, name, rule):
                    leaves[path] = jnp.asarray(part)
        return jax.tree.unflatten(found.treedef, leaves.values())

    def _sources(self) -> dict[int, list[tuple[str, Rule, tuple[int, ...]]]]:
        """By block: its tensors, and where each stands within the layer."""
        sources: dict[int, list[tuple[str, Rule, tuple[int, ...]]]] = {}
        for name, rule, index in self._found.plan:
            if rule.ours[0].startswith(LAYERS):
                block = blocks_of(rule.ours[0], self.config)[index[0]]
                sources.setdefault(block, []).append((name, rule, (0, *index[1:])))
        return sources

    def _read_layer(self, sources, shapes) -> dict[str, np.ndarray]:
        """A block's parameters by path, on the host."""
        self._check_files()
        leaves = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
        for name, rule, index in sources:
            for path, part in parts_of(self._found, name, rule):
                leaves[path.removeprefix("flow.")][index] = part
        return leaves

    def _check_files(self):
        """Raises ValueError for weights that are others than those that were opened."""
        now = _weight_files(self._source)
        for name, state in self._files.items():
            if now.get(name) != state:
                raise ValueError(f"{name} has changed since it was opened: stream it again")


@jax.jit(donate_argnums=0)
def _put(stack, rows, start):
    return jax.lax.dynamic_update_slice_in_dim(stack, rows, start, axis=0)


def _weight_files(source: Path) -> dict[Path, tuple[int, ...]]:
    """The files that hold weights, each with what tells that it is another one."""
    inside = (file for kind in ("*.safetensors", "*.bin") for file in source.glob(kind))
    stats = {file: file.stat() for file in (inside if source.is_dir() else [source])}
    return {file: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for file, s in stats.items()}


def _embeds(path: str) -> bool:
    return path.startswith("embedding.")


def _layer_shapes(config: TransformerConfig, dtype):
    """The parameters of a flow, by path."""
    return flatten(jax.eval_shape(lambda: TransformerFlow(config, rngs=nnx.Rngs(0), dtype=dtype)))
