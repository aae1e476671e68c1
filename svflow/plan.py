"""What a study of a large model takes, computed without allocating it.

    python -m svflow.plan [MODEL ...] [--samples 1000] [--tokens 128] [--devices 1 8]

prints, for shapes of 7 to 12 billion parameters, the memory, operations and time of
`svflow.spectra.study`: states of every text, the frozen Jacobian of its last token in every layer,
and every measure of these. `plan` computes one row for any config and mesh.

How. Parameters are those of `jax.eval_shape`. One layer of each kind, with the weights' type and
split as `svflow.shard` splits them, is compiled by XLA for this machine's CPU from shapes alone,
and XLA's cost analysis of that program gives operations, bytes moved and memory of one device; a
model is its layers, whose programs differ by kind only (window, mixture). Loops over layers are
therefore not in what is compiled: XLA counts a loop's body once. A mixture, which loops over its
experts, counts as a dense layer as wide as those that it visits. Communication is what the compiled
program's collectives say, those of a loop as often as it runs.

Time is the larger of operations over the accelerator's peak and of bytes over its bandwidth, plus
bytes sent over the link's, each divided by `EFFICIENCY`. Assumptions, all of them bounds that a
measurement on the accelerator replaces:

- The CPU's program is fused less than a GPU's, so bytes moved and scratch are upper bounds.
- States are computed in the weights' type; of a forward pass, bytes are the weights once a text.
- Jacobians are in float32 at the highest precision: a GPU's float32 peak, not TF32's.
- Narrow weights are widened a layer at a time, as the programs say. (XLA for the CPU, which has
  no bfloat16, widens what a loop reads beforehand: there a whole model takes float32's memory.)
- Of a collective the result is sent once: a ring's all-reduce takes about twice as long.
- LAPACK runs in float64 on the host, see `Host`; `LAPACK` counts its operations.

The peaks of `ACCELERATORS` are NVIDIA's, from its data sheets of the H100 SXM (bfloat16 without
sparsity) and the A100 SXM 80 GB; links are NVLink's, one direction.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from svflow.integers import positive
from svflow.memory import readable
from svflow.models.config import TransformerConfig
from svflow.models.loading import parameter_bytes
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.sharding import DATA, MODEL, auto, local_bytes, on_mesh, shardings
from svflow.spectra.jacobians import jacobian

EFFICIENCY = 0.5
"""The share of its peak that an accelerator is taken to reach."""


class Accelerator(NamedTuple):
    """What a device can do.

    Arguments:
        memory: bytes.
        flops: per second by type.
        bandwidth: of its memory, bytes per second.
        link: to its neighbours, bytes per second.
    """

    memory: float
    flops: dict[str, float]
    bandwidth: float
    link: float


ACCELERATORS = {
    "H100": Accelerator(
        80e9, {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}, 3.35e12, 450e9
    ),
    "A100": Accelerator(
        80e9, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}, 2.039e12, 300e9
    ),
}


class Host(NamedTuple):
    """What LAPACK runs on: cores, and float64 operations per second of one in its solvers.

    The rate is an assumption; on two cores of an AMD EPYC all measures of matrices 576 wide, by
    the counts of `LAPACK`, run at about 20e9, and wider matrices at less.
    """

    cores: int = 64
    flops: float = 10e9


LAPACK = {"eigenvalues": 10, "singular values and vectors": 21, "Schur form": 25, "product": 44}
"""Operations in units of width³, of each matrix.

The first three: G. Golub and C. Van Loan, Matrix Computations (4th ed., sections 7.5.6 and 8.6.4).
The last is `svflow.cumulative`, a layer: 3 matrix products, 4 QR decompositions, two of them with
Q, and about 30 for the Jacobi sweeps. A study takes two products: of the Jacobians and without
their non-normality.
"""

# Shapes as in the models' published config.json. Rotary scalings are left out: they cost nothing.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": dict(  # meta-llama/Llama-3.1-8B
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    "OLMo 3 7B": dict(  # allenai/Olmo-3-1025-7B
        model_type="olmo3",
        vocab_size=100278,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
        sliding_window=4096,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
    ),
    "Gemma 2 9B": dict(  # google/gemma-2-9b
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=3584,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        intermediate_size=14336,
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "Gemma 3 12B": dict(  # google/gemma-3-12b, its text model
        model_type="gemma3_text",
        vocab_size=262208,
        hidden_size=3840,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        intermediate_size=15360,
        query_pre_attn_scalar=256,
        sliding_window=1024,
    ),
}


class Cost(NamedTuple):
    """Of a compiled program, on one device.

    Arguments:
        flops: operations.
        moved: bytes read and written, before any cache.
        sent: bytes of collectives' results, each as often as it runs.
        scratch: bytes that it allocates beside arguments and results.
    """

    flops: float
    moved: float
    sent: float
    scratch: float


class Plan(NamedTuple):
    """What a study takes; bytes and operations of one device.

    Arguments:
        parameters: of the model, a count.
        weights: bytes.
        peak: bytes of weights, all layers' Jacobians, states and scratch together.
        streamed: the same with two layers or a table of tokens in place of the weights, as
            `svflow.stream` has them; None with a mesh.
        forward, jacobians: one text's.
        seconds: of the device for all samples.
        lapack: float64 operations of one text on the host: all measures, and with products.
        host_seconds: of the host for all samples: all measures, and with products.
        fits: whether `peak` is within the device's memory.
    """

    parameters: int
    weights: int
    peak: float
    streamed: float | None
    forward: Cost
    jacobians: Cost
    seconds: float
    lapack: tuple[float, float]
    host_seconds: tuple[float, float]
    fits: bool


def plan(
    config: TransformerConfig,
    *,
    samples: int = 1000,
    tokens: int = 128,
    mesh: Mesh | None = None,
    dtype=jnp.bfloat16,
    accelerator: Accelerator = ACCELERATORS["H100"],
    host: Host | None = None,
) -> Plan:
    """The cost of `svflow.spectra.study` over some texts.

    Arguments:
        config: of the model, `TransformerConfig.from_hf`.
        samples, tokens: how many texts, of how many tokens each.
        mesh: of devices of this machine that stand for the accelerators, such as the CPU's
            (`jax.config.update("jax_num_cpu_devices", 8)` before anything else); None for one.
        dtype: of the weights.
        accelerator: with the peaks to compute time from.
        host: for LAPACK; `Host()` by default.

    Raises:
        ValueError: numbers that are not positive integers, a type that the accelerator has no peak
            for, or another kind of mesh.
    """
    host, given = Host() if host is None else host, dtype
    samples, tokens = positive("samples", samples), positive("tokens", tokens)
    mesh = None if mesh is None else auto(mesh)
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in accelerator.flops:
        known = ", ".join(accelerator.flops)
        raise ValueError(f"no peak of {given!r} is known, only of {known}")
    shapes = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype))
    leaves = jax.tree.leaves(shapes)
    weights = parameter_bytes(leaves) if mesh is None else local_bytes(shapes, mesh)
    kinds = Counter(config.layer(layer) for layer in range(config.depth))
    forward = _total(
        [(_layer_cost(kind, tokens, dtype, mesh, step=True), n) for kind, n in kinds.items()]
    )
    jacobians = _total([(_layer_cost(kind, tokens, dtype, mesh), n) for kind, n in kinds.items()])
    shares = 1 if mesh is None else mesh.shape.get(DATA, 1)
    width, item = config.width, 4
    results = config.depth * width**2 * item // shares + (config.depth + 1) * tokens * width * item
    scratch = max(forward.scratch, jacobians.scratch)
    layers = [_layer_bytes(kind, dtype) for kind in kinds]
    table = config.vocab_size * (config.embedding_width or width) * dtype.itemsize
    peak = weights + results + scratch
    seconds = samples * (
        max(forward.flops / accelerator.flops[dtype.name], weights / accelerator.bandwidth)
        + forward.sent / accelerator.link
        + max(
            jacobians.flops / accelerator.flops["float32"],
            jacobians.moved / accelerator.bandwidth,
        )
        + jacobians.sent / accelerator.link
    )
    cubes = config.depth * float(width) ** 3
    measures = cubes * (LAPACK["eigenvalues"] + LAPACK["singular values and vectors"])
    products = measures + cubes * (LAPACK["Schur form"] + 2 * LAPACK["product"])
    rate = host.cores * host.flops
    return Plan(
        parameters=sum(leaf.size for leaf in leaves),
        weights=weights,
        peak=peak,
        streamed=max(2 * max(layers), table) + results + scratch if mesh is None else None,
        forward=forward,
        jacobians=jacobians,
        seconds=seconds / EFFICIENCY,
        lapack=(measures, products),
        host_seconds=(samples * measures / rate, samples * products / rate),
        fits=peak <= accelerator.memory,
    )


def _total(parts: Sequence[tuple[Cost, int]]) -> Cost:
    return Cost(
        flops=sum(n * cost.flops for cost, n in parts),
        moved=sum(n * cost.moved for cost, n in parts),
        sent=sum(n * cost.sent for cost, n in parts),
        scratch=max(cost.scratch for cost, _ in parts),
    )


def _layer_bytes(config: TransformerConfig, dtype) -> int:
    return parameter_bytes(jax.tree.leaves(_layer(config, dtype)))


def _layer(config: TransformerConfig, dtype) -> TransformerFlow:
    return jax.eval_shape(lambda: TransformerFlow(config, rngs=nnx.Rngs(0), dtype=dtype))


def _placed(tree: Any, mesh: Mesh | None) -> Any:
    """Shapes with the shardings of `svflow.shard`."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh),
    )


def _layer_cost(
    config: TransformerConfig, tokens: int, dtype, mesh: Mesh | None, *, step: bool = False
) -> Cost:
    """`one_layer`, with the experts that a mixture's loop visits one after another."""
    found = one_layer(config, tokens, dtype, mesh, step=step)
    if not config.sparse[0]:
        return found
    # Of a Jacobian only one token's experts are visited; of few tokens this is an upper bound.
    visited = min(config.experts, config.experts_per_token * (tokens if step else 1))
    wide = replace(config, sparse=(False,), hidden=visited * config.expert_hidden)
    dense = one_layer(wide, tokens, dtype, mesh, step=step)
    moved = max(dense.moved, found.moved)
    return Cost(dense.flops, moved, found.sent, found.scratch)


def one_layer(
    config: TransformerConfig, tokens: int, dtype, mesh: Mesh | None, *, step: bool = False
) -> Cost:
    """The frozen Jacobian of a layer at the last token, or the layer itself; of a mixture, with one
    expert's.

    Arguments:
        config: of the layer, `TransformerConfig.layer`.
    """
    flow: Any = _placed(_layer(config, dtype), mesh)
    x = _state(tokens, config.width, dtype, mesh)
    program = (lambda flow, x: flow.step(0, x)) if step else (lambda flow, x: jacobian(flow, 0, x))
    with on_mesh(mesh):
        return cost(jax.jit(program).lower(flow, x).compile())


def _state(tokens: int, width: int, dtype, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((tokens, width), dtype, sharding=whole)


def cost(compiled: jax.stages.Compiled) -> Cost:
    """What XLA says of a compiled program; of a loop, operations and bytes moved count once."""
    found: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    sent = sum(_bytes(dtype, shape) for _, dtype, shape in collectives(compiled).elements())
    return Cost(found["flops"], found["bytes accessed"], sent, memory.temp_size_in_bytes)


# As XLA names them; "-start" is the asynchronous form.
_COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<name>all-gather|all-reduce|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast)(-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")


# A computation begins with its name at the margin; others name it as what they call.
_COMPUTATION = re.compile(r"(?:ENTRY )?(%[\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations|\w+_computation)=\{?([^}\s]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def collectives(compiled: jax.stages.Compiled) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """How often a compiled program runs each collective: name, type and shape of a result.

    Those in a loop count as often as XLA knows that it runs, and once where it does not.
    """
    found: list[tuple[str, tuple[str, str, tuple[int, ...]]]] = []
    callers: dict[str, tuple[str, int]] = {}
    here = ""
    for line in (compiled.as_text() or "").splitlines():
        if start := _COMPUTATION.match(line):
            here = start[1]
        elif match := _COLLECTIVE.search(line):
            for array in _ARRAY.finditer(match["results"]):
                shape = tuple(int(n) for n in array["shape"].split(",") if n)
                found.append((here, (match["name"], array["dtype"], shape)))
        elif called := _CALLED.findall(line):
            trips = _TRIPS.search(line)
            for name in ",".join(called).split(","):
                callers[name] = here, int(trips[1]) if trips else 1

    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for place, collective in found:
        times = 1
        while place in callers:
            place, trips_of_place = callers[place]
            times *= trips_of_place
        counts[collective] += times
    return counts


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = int(re.sub(r"\D", "", dtype) or 8)
    return int(np.prod(shape, dtype=np.int64)) * max(1, bits // 8)


COLUMNS = (
    "model",
    "devices",
    "parameters",
    "weights",
    "peak",
    "streamed",
    "forward",
    "Jacobians",
    "device time",
    "LAPACK",
    "host time",
)
"""Bytes of one device and its operations for one text; times for all."""


def table(rows: Sequence[tuple[str, str, Plan]]) -> str:
    """Plans as Markdown: (the model's name, the mesh in words, its plan) a row."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, devices, found in rows:
        lines.append(
            (
                name,
                devices,
                f"{found.parameters / 1e9:.2f} billion",
                readable(found.weights),
                readable(found.peak) + ("" if found.fits else " (does not fit)"),
                readable(found.streamed) if found.streamed else "",
                f"{found.forward.flops / 1e12:.3g} TFLOP",
                f"{found.jacobians.flops / 1e12:.3g} TFLOP",
                _duration(found.seconds),
                " / ".join(f"{flops / 1e12:.3g}" for flops in found.lapack) + " TFLOP",
                " / ".join(_duration(seconds) for seconds in found.host_seconds),
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m svflow.plan",
        description="Memory, operations and time of a spectral study, computed without allocating.",
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=ACCELERATORS["H100"].flops, default="bfloat16")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="H100")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"no shapes of {', '.join(unknown)}; there are {', '.join(MODELS)}")
    for name in ("samples", "tokens", "devices"):
        if min(np.atleast_1d(getattr(options, name))) < 1:
            parser.error(f"--{name} must be positive")
    # The CPU's devices stand for the accelerators; nothing runs on them.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rows = []
    for name in options.models or MODELS:
        config = TransformerConfig.from_hf(MODELS[name])
        for devices in options.devices:
            for axis in (DATA, MODEL) if devices > 1 else (None,):
                mesh = None if axis is None else Mesh(np.array(jax.devices()[:devices]), (axis,))
                found = plan(
                    config,
                    samples=options.samples,
                    tokens=options.tokens,
                    mesh=mesh,
                    dtype=options.dtype,
                    accelerator=ACCELERATORS[options.accelerator],
                )
                rows.append((name, f"{devices}" if axis is None else f"{devices} `{axis}`", found))
    print(table(rows))


if __name__ == "__main__":
    main()
