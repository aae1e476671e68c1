"""What `test_sharding` runs in a process of its own, which has eight devices.

    JAX_NUM_CPU_DEVICES=8 JAX_ENABLE_X64=1 JAX_NUMPY_DTYPE_PROMOTION=strict \
        python tests/mesh_cases.py FOLDER [CASE ...]

prints one JSON object: the results of every case, by its name. FOLDER is for files.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from compare import error
from configs import FAMILY_CONFIGS, tiny_config, tiny_model
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import svflow as sv
import universal as ut
from svflow import attention, sharding
from svflow.plan import collectives, cost, plan

GOLDEN = Path(__file__).parent / "data" / "golden"


def mesh_of(data: int, model: int):
    # As users make it: its axes are of the explicit kind, which `shard` takes all the same.
    return jax.make_mesh((data, model), ("data", "model"))


def weights(model) -> set[tuple[int, ...]]:
    """The shapes of all matrices of a model, of one layer or of all."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(model)}
    return {s for shape in shapes for s in (shape, shape[1:], (1, *shape[1:])) if len(s) > 1}


def gathers_weights(compiled, model) -> list:
    matrices = {tuple(sorted(n for n in shape if n > 1)) for shape in weights(model)}
    return [
        (name, shape)
        for name, _, shape in collectives(compiled)
        if name != "all-reduce" and tuple(sorted(n for n in shape if n > 1)) in matrices
    ]


def families():
    """Embedding, a layer and head of a batch; for half of them heads do not divide."""
    ids = np.arange(24).reshape(4, 6) % 23
    found = {}
    for number, family in enumerate(FAMILY_CONFIGS):
        mesh = mesh_of(4, 2) if number % 2 else mesh_of(2, 4)
        model = tiny_model(family)
        sharded = sharding.shard(model, mesh)

        def logits(model, ids):
            return model.unembed(model.flow.step(1, model.embed(ids)))

        program = jax.jit(jax.vmap(logits, in_axes=(None, 0)))
        one = program.lower(model, ids).compile()(model, ids)
        batch = sharding.shard_batch(ids, mesh)
        compiled = program.lower(sharded, batch).compile()
        split = [leaf for leaf in jax.tree.leaves(sharded) if any(leaf.sharding.spec)]
        found[family] = dict(
            error=error(compiled(sharded, batch), one),
            gathers=gathers_weights(compiled, model),
            share=sum(leaf.size for leaf in split)
            / sum(leaf.size for leaf in jax.tree.leaves(model)),
        )
    return found


def wide_config(**changes):
    config = dict(
        model_type="llama",
        vocab_size=4096,
        hidden_size=512,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=1536,
    )
    return sv.TransformerConfig.from_hf(config | changes)


def shapes_on(config, mesh):
    model = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))
    if mesh is None:
        return model
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        model,
        sharding.shardings(model, mesh),
    )


def array_on(shape, dtype, mesh, *spec):
    s = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=s)


def forward(config, mesh, batch):
    def logits(model, ids):
        return model.unembed(sv.simulate(model.flow, model.embed(ids)).xs[-1])

    ids = array_on(batch, jnp.int32, mesh, "data")
    return jax.jit(jax.vmap(logits, in_axes=(None, 0))).lower(shapes_on(config, mesh), ids)


def jacobians(config, mesh, batch):
    """Of one text, its columns over `data`; or of several, which are over it."""

    def all_layers(flow, xs):
        return sv.layer_jacobians(flow, xs)

    shape = (config.depth + 1, batch[-1], config.width)
    flow = shapes_on(config, mesh).flow
    if len(batch) == 1:
        with sharding.on_mesh(mesh):
            return jax.jit(all_layers).lower(flow, array_on(shape, jnp.float32, mesh))
    xs = array_on((batch[0], *shape), jnp.float32, mesh, "data")
    return jax.jit(jax.vmap(all_layers, in_axes=(None, 0))).lower(flow, xs)


def costs():
    """Operations and bytes of one device against those without a mesh."""
    whole = jax.jit(
        lambda model: model.flow.layers.attention.query.kernel[...],
        out_shardings=NamedSharding(sharding.auto(mesh_of(1, 8)), PartitionSpec()),
    ).lower(shapes_on(wide_config(), mesh_of(1, 8)))
    found = {"asked for whole": gathers_weights(whole.compile(), shapes_on(wide_config(), None))}
    narrow = wide_config(hidden_size=128, num_attention_heads=8, intermediate_size=384)
    cases = {
        "few tokens, weights": (forward, wide_config(), (1, 8), (1, 8)),
        "Jacobians of many texts, batch": (jacobians, narrow, (32, 16), (8, 1)),
        "Jacobians, both": (jacobians, wide_config(), (16,), (2, 4)),
    }
    for name, (program, config, batch, axes) in cases.items():
        mesh = sharding.auto(mesh_of(*axes))
        one, each = (program(config, m, batch).compile() for m in (None, mesh))
        a, b = cost(one), cost(each)
        found[name] = dict(
            flops=a.flops / b.flops,
            moved=a.moved / b.moved,
            gathers=gathers_weights(each, shapes_on(config, None)),
        )
    return found


def same_functions():
    """Eager calls as users make them, on eight devices and on one."""
    found = {}
    mesh = mesh_of(2, 4)
    for family, dtype, chunks in (("llama", "float64", (None, 6)), ("gpt2", "float32", ())):
        model = tiny_model(family, dtype)
        sharded = sharding.shard(model, mesh)
        ids = np.arange(7)
        one, each = (sv.simulate(m.flow, m.embed(ids)).xs for m in (model, sharded))
        found[f"states {family}"] = error(each, one)
        J = sv.layer_jacobians(model.flow, one, token=3) if chunks else None
        for chunk in chunks:
            K = sv.layer_jacobians(sharded.flow, one, token=3, chunk=chunk)
            found[f"Jacobians {family} {chunk}"] = error(K, J)
            if chunk is None:
                found[f"columns {family}"] = "data" in str(K.sharding.spec)
    return found


def study(folder):
    model, mesh = tiny_model("llama"), mesh_of(2, 4)
    texts = [np.arange(5), np.arange(5) + 3]
    one = sv.spectra.study(model, texts, folder / "one.npz")
    each = sv.spectra.study(sharding.shard(model, mesh), texts, folder / "each.npz")
    pairs = [(each.samples[name], values) for name, values in one.samples.items()]
    worst = max(error(*map(np.nan_to_num, pair)) for pair in pairs)
    return dict(worst=worst, same_model=one.settings["model"] == each.settings["model"])


def power():
    """Tokens over `data`, heads over `model`, causal and with padding, in chunks of queries."""
    key = jax.random.split(jax.random.key(0), 5)
    shapes = [(3, 4, 16, 4)] * 3 + [(3, 4, 4, 16)]
    arrays = [jax.random.normal(k, s) for k, s in zip(key, shapes)]
    flow, mesh = sv.power.PowerFlow(*arrays, causal=True), mesh_of(2, 4)
    x = flow.retract(jax.random.normal(key[4], (64, 16)))
    context = sv.Context(mask=jnp.arange(64) > 2)
    sharded, tokens = sharding.shard(flow, mesh), sharding.shard_batch(x, mesh)

    def slope(flow, x):
        return jax.grad(lambda x: sv.simulate(flow, x, context=context).xs[-1].sum())(x)

    one, gradient = sv.simulate(flow, x, context=context).xs, slope(flow, x)
    each = sv.simulate(sharded, tokens, context=context).xs
    found = dict(whole=error(each, one), split=each.sharding.spec[1] == "data")
    attention.SCORES = 2**9
    jax.clear_caches()
    found["chunks"] = error(sv.simulate(sharded, tokens, context=context).xs, one)
    found["gradient"] = error(slope(sharded, tokens), gradient)
    return found


def training():
    task = ut.k_hop_task(8, 4, (1, 1))
    settings = ut.Settings(steps=2, batch=8, every=2, warmup=1, validation=8, test=8)
    machine = ut.Recipe("random", layers=1, heads=1, head_width=4, out_width=4)
    found = {}
    one = ut.train(machine, task, settings, seeds=(3, 4))
    for name, devices in (("seeds", 2), ("batch", 4)):  # two seeds do not divide by four
        mesh = jax.make_mesh((devices,), ("data",))
        each = ut.train(machine, task, settings, seeds=(3, 4), mesh=mesh)
        found[name] = error(each.losses, one.losses)
        found[f"{name} split"] = each.embedding.tokens.sharding.spec == (
            PartitionSpec("data") if name == "seeds" else PartitionSpec()
        )
    return found


def loading():
    """Checkpoints read in slices are those read whole, bit for bit."""
    found = {}
    sv.models.slices.PIECE = 1000  # bytes, so that slices take several reads, as those of 2 GiB do
    for folder in sorted(GOLDEN.iterdir()):
        mesh = mesh_of(2, 4)
        one = sv.load(folder, dtype=jnp.bfloat16)
        each = sv.models.loading.load(folder, dtype=jnp.bfloat16, mesh=mesh)
        wanted = jax.tree.leaves(sharding.shardings(one, sharding.auto(mesh)))
        found[folder.name] = all(
            bool((np.asarray(a) == np.asarray(b)).all()) and b.sharding == s
            for a, b, s in zip(jax.tree.leaves(one), jax.tree.leaves(each), wanted)
        )
    # The devices of one host share its memory: all of the shares have to fit.
    size = sharding.local_bytes(one, mesh)
    with mock.patch.object(sv.memory, "_host", return_value=3 * size):
        try:
            sv.load(folder, dtype=jnp.bfloat16, mesh=mesh)
        except MemoryError as error:
            found["one memory"] = "the weights would take" in str(error)
    return found


class OnGrid(sv.Flow):
    """A flow whose `mesh` is something else."""

    depth, width, mesh = 1, 16, (0.0, 0.5)

    def velocity(self, t, x, context=None):
        return x * self.mesh[1]


def users_meshes():
    """Meshes of the explicit kind, as `jax.make_mesh` makes them, and what is called a mesh."""
    model, mesh = tiny_model("llama"), mesh_of(2, 4)
    xs = sv.simulate(model.flow, model.embed(np.arange(5))).xs
    J = sv.layer_jacobians(model.flow, xs)
    with jax.set_mesh(mesh):
        found = dict(
            around=error(sv.layer_jacobians(model.flow, xs), J),
            sharded=error(sv.layer_jacobians(sharding.shard(model, mesh).flow, xs), J),
        )
    each, one = (plan(model.config, tokens=8, dtype=jnp.float32, mesh=m) for m in (mesh, None))
    found["planned"] = one.weights / each.weights
    mixture = tiny_config("qwen3_moe", num_attention_heads=4, num_key_value_heads=4)
    found["sent"] = plan(mixture, tokens=64, dtype=jnp.float32, mesh=mesh).forward.sent
    # After attention and after every expert, of which 64 tokens visit all.
    reduced = sum(1 + (mixture.experts if sparse else 1) for sparse in mixture.sparse)
    found["reduced"] = reduced * 64 * mixture.width * 4
    found["kept"] = sharding.shard(OnGrid(), mesh).mesh
    return found


def mistakes():
    """What is wrong, and what is said."""
    model, mesh = tiny_model("llama"), mesh_of(2, 4)
    cases = {
        "axes": lambda: sharding.shard(model, jax.make_mesh((8,), ("tensor",))),
        "kind": lambda: sharding.shard({"weight": jnp.ones(8)}, mesh),
        "mesh": lambda: sharding.shard(model, 8),
        "batch": lambda: sharding.shard_batch(jnp.ones((7, 3)), mesh),
        "no data": lambda: sharding.shard_batch(jnp.ones(8), jax.make_mesh((8,), ("model",))),
        "seeds": lambda: ut.train(
            ut.Recipe("random", layers=1, heads=1, head_width=4, out_width=4),
            ut.k_hop_task(8, 4, (1, 1)),
            ut.Settings(batch=9),
            seeds=(0,),
            mesh=mesh,
        ),
    }
    said = {}
    for name, case in cases.items():
        try:
            case()
        except ValueError as problem:
            said[name] = str(problem)
    return said


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cases = dict(
        families=families,
        costs=costs,
        same_functions=same_functions,
        study=lambda: study(folder),
        power=power,
        training=training,
        loading=loading,
        users_meshes=users_meshes,
        mistakes=mistakes,
    )
    results = {}
    for name in sys.argv[2:] or cases:
        # What runs once is compiled fast; what XLA makes of a program is counted as users get it.
        jax.config.update("jax_disable_most_optimizations", name != "costs")
        start = time.process_time()
        results[name] = cases[name]()
        print(f"{name}: {time.process_time() - start:.1f} s", file=sys.stderr)
    print(json.dumps(results))
