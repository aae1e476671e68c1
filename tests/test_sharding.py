"""Models on eight devices, which are threads of one CPU in a process of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from configs import FAMILY_CONFIGS, tiny_config
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import svflow as sv
import universal as ut
from svflow import sharding

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    "JAX_PLATFORMS": "cpu",
}
EIGHT = {
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_ENABLE_X64": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of `mesh_cases.py`."""
    command = [sys.executable, str(HERE / "mesh_cases.py"), str(tmp_path_factory.mktemp("mesh"))]
    done = subprocess.run(
        command, env=ENVIRONMENT | EIGHT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_family_is_the_same_on_eight_devices(found, family):
    case = found["families"][family]
    assert case["error"] < 1e-12
    assert case["gathers"] == []
    # Everything but norms, small tables and the biases of what is summed.
    assert case["share"] > 0.7


def test_the_same_functions_give_the_same_values(found):
    for name, value in found["same_functions"].items():
        if name.startswith("columns"):
            assert value, name
        else:
            assert value < (1e-12 if "llama" in name else 1e-5), name


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        ("few tokens, weights", 6),
        ("Jacobians of many texts, batch", 6),
        # Square matrices times as many columns: neither axis splits all that is read.
        ("Jacobians, both", 3),
    ],
)
def test_a_device_does_its_share(found, case, moved):
    numbers = found["costs"][case]
    assert numbers["flops"] >= 6
    assert numbers["moved"] >= moved
    assert numbers["gathers"] == []


def test_a_weight_that_travels_is_seen(found):
    assert found["costs"]["asked for whole"] == [["all-gather", [3, 512, 512]]]


def test_a_study_is_the_same(found):
    assert found["study"]["worst"] < 1e-8  # of measures such as condition numbers
    assert found["study"]["same_model"]  # so that a file goes on, on whatever devices


def test_the_tokens_of_a_power_flow_are_split(found):
    power = found["power"]
    assert power.pop("split")
    assert max(power.values()) < 1e-12


def test_programs_are_learnt_the_same_over_seeds_and_over_batches(found):
    training = found["training"]
    assert training["seeds split"]
    assert training["batch split"]
    assert max(training["seeds"], training["batch"]) < 1e-12


def test_slices_of_a_checkpoint_are_the_checkpoint(found):
    assert len(found["loading"]) > 10
    assert "one memory" in found["loading"]
    assert all(found["loading"].values()), found["loading"]


def test_meshes_are_taken_as_users_make_them(found):
    meshes = found["users_meshes"]
    assert max(meshes["around"], meshes["sharded"]) < 1e-12
    assert meshes["planned"] > 2  # a device has less than half of the weights
    assert meshes["sent"] == meshes["reduced"]
    assert meshes["kept"] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("axes", "axes 'data' .* got \\('tensor',\\)"),
        ("kind", "takes a Transformer or a Flow, got dict"),
        ("mesh", "must be a jax.sharding.Mesh, got int"),
        ("batch", "shape \\(7, 3\\) does not divide by the mesh's 2"),
        ("no data", "an axis 'data', got \\('model',\\)"),
        ("seeds", "neither 1 seeds nor batches of 9 divide"),
    ],
)
def test_what_is_wrong_is_said(found, case, says):
    with pytest.raises(ValueError, match=says):
        raise ValueError(found["mistakes"][case])


def specs(family, model=2, **changes):
    """The specs of a model's parameters by path, and their shapes."""
    config = tiny_config(family, **changes)
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))
    flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
    mesh = AbstractMesh((model,), ("model",))
    return {
        sharding.path_name(path): (
            sharding.partition(sharding.path_name(path), leaf.shape, config, mesh),
            leaf.shape,
        )
        for path, leaf in flat
    }


def test_whole_heads_are_split_and_what_does_not_divide_the_other_way():
    attention = "flow.layers.attention."
    found = specs("llama", num_key_value_heads=2)
    assert found[attention + "query.kernel"][0] == PartitionSpec(None, None, "model")
    assert found[attention + "key.kernel"][0] == PartitionSpec(None, None, "model")
    assert found[attention + "output.kernel"][0] == PartitionSpec(None, "model", None)
    assert found["head.norm.weight"][0] == PartitionSpec()
    # One key/value head for two devices; a vocabulary of 23.
    found = specs("llama")
    assert found[attention + "key.kernel"][0] == PartitionSpec(None, "model", None)
    assert found["embedding.tokens"][0] == PartitionSpec(None, "model")
    # 2 heads, a width of 16 and 24 hidden units by 5: nothing divides.
    assert {spec for spec, _ in specs("llama", model=5).values()} == {PartitionSpec()}


def test_heads_of_a_machine_are_split():
    arrays = np.ones((2, 4, 6, 3)), np.ones((2, 4, 6, 3)), np.ones((2, 4, 6, 6)), np.ones((6, 5))
    machine = ut.AttentionTransformer(*arrays)
    found = jax.tree.leaves(sharding.shardings(machine, AbstractMesh((2, 2), ("data", "model"))))
    heads = PartitionSpec(None, "model", None, None)
    assert sorted(map(str, (one.spec for one in found))) == sorted(
        map(str, [heads, heads, heads, PartitionSpec()])
    )


def test_no_spec_names_an_axis_that_does_not_divide():
    for family in FAMILY_CONFIGS:
        for path, (spec, shape) in specs(family, model=4).items():
            for name, size in zip(spec, shape):
                assert name is None or size % 4 == 0, (family, path)


HOST = """
import os, sys
import jax
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
port, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(
    f"localhost:{port}", num_processes=2, process_id=rank, initialization_timeout=120
)
import svflow as sv
from svflow import sharding
from svflow.models.loading import load

def read():
    with open("/proc/self/io") as file:
        return int(file.read().split()[1])

mesh = jax.make_mesh((1, 4), ("data", "model"))
load(folder, mesh=mesh)  # once before, for what Python reads itself
before = read()
model = load(folder, mesh=mesh)
taken = read() - before
path = sv.simulate(model.flow, model.embed(np.arange(5)))
Js = sv.layer_jacobians(model.flow, path.xs)
if rank == 0:
    done = dict(taken=taken, devices=len(jax.devices()))
else:
    done = dict(taken=taken)
np.savez(f"{folder}/{rank}.npz", xs=sharding.gathered(path.xs), Js=sharding.gathered(Js), **done)
jax.distributed.shutdown()
"""


def test_two_processes_are_one_machine(tmp_path):
    config = tiny_config(
        "llama",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1024,
        vocab_size=512,
    )
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: np.asarray(random.normal(size=leaf.shape) / 16, np.float32), shapes
    )
    sv.save(model, tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(rank), str(tmp_path)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [run.communicate(timeout=300)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], said
    model = sv.load(tmp_path)
    path = sv.simulate(model.flow, model.embed(np.arange(5)))
    Js = sv.layer_jacobians(model.flow, path.xs)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as own:
            np.testing.assert_allclose(own["xs"], path.xs, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(own["Js"], Js, rtol=1e-5, atol=1e-5)
            # Half of the weights and, twice, the file's header and config.
            assert own["taken"] < 0.52 * size
            assert rank or own["devices"] == 4
