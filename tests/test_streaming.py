"""Models read layer by layer are the models in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import error
from compilations import Compilations
from configs import tiny_config, tiny_model
from flax import nnx
from safetensors.numpy import load_file, save_file

import svflow as sv
from svflow import memory
from svflow.streaming import stream

IDS = np.arange(6)


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast():
    """What runs once is compiled fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe", "albert"])
def test_states_logits_and_jacobians_are_those_of_the_model(family, tmp_path):
    """Scales by layer, windows that alternate, dense layers among mixtures, shared blocks."""
    sv.save(tiny_model(family), tmp_path)
    model = sv.load(tmp_path, dtype=jnp.float64)
    streamed = stream(tmp_path, dtype=jnp.float64)
    x = model.embed(IDS)
    assert jnp.array_equal(streamed.embed(IDS), x)
    path, found = sv.simulate(model.flow, x), streamed.simulate(x)
    assert jnp.array_equal(found.ts, path.ts)
    assert error(found.xs, path.xs) < 1e-13
    assert error(streamed.unembed(path.xs[-1]), model.unembed(path.xs[-1])) < 1e-13
    if family == "gpt2":
        Js = sv.layer_jacobians(model.flow, path.xs, token=2)
        assert error(streamed.layer_jacobians(path.xs, token=2), Js) < 1e-12
    assert streamed.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def test_layers_alike_are_one_program_and_narrow_weights_stay_narrow(tmp_path):
    sv.save(tiny_model("llama", "bfloat16"), tmp_path)
    streamed = stream(tmp_path, dtype=jnp.bfloat16)
    assert {flow.config for flow in streamed.layers()} == {streamed.config.layer(0)}
    x = streamed.embed(IDS)
    xs = streamed.simulate(x).xs
    assert xs.dtype == jnp.bfloat16
    assert streamed.layer_jacobians(xs).dtype == jnp.float32
    with Compilations() as compilations:
        streamed.simulate(x)
        streamed.layer_jacobians(xs)
    assert compilations.count == 0


def test_what_is_wrong_is_said(tmp_path, monkeypatch):
    model = tiny_model("llama", "float32")
    sv.save(model, tmp_path)
    streamed = stream(tmp_path)
    xs = jnp.ones((4, 6, 16), jnp.float32)
    with pytest.raises(ValueError, match="4 states of simulate"):
        streamed.layer_jacobians(xs[:3])
    with pytest.raises(ValueError, match="the state before layer 1 is not finite"):
        streamed.layer_jacobians(xs.at[1].set(jnp.nan))
    with pytest.raises(ValueError, match=r"^token 6 is not one of 6 tokens"):
        streamed.layer_jacobians(xs, token=6)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        streamed.embed([99])
    with monkeypatch.context() as patch:
        patch.setattr(type(streamed), "layers", None)  # nothing is read
        with pytest.raises(ValueError, match=r"x0 must have shape \(tokens, 16\)"):
            streamed.simulate(xs)
        with pytest.raises(ValueError, match=r"context must be an svflow\.Context"):
            streamed.simulate(xs[0], context=5)
    for one in (streamed, model.flow, {}):
        with pytest.raises(ValueError, match=f"save needs a Transformer, got {type(one).__name__}"):
            sv.save(one, tmp_path)


def test_a_model_without_a_head_is_saved_as_one(tmp_path):
    hf = tiny_config("llama").hf | dict(architectures=["LlamaForCausalLM"])
    hf["id2label"] = {number: f"{number}" for number in range(12)}  # as a dict of Python, not JSON
    config = sv.TransformerConfig.from_hf(hf | dict(tie_word_embeddings=False), has_head=False)
    model = sv.Transformer(config, rngs=nnx.Rngs(0))
    sv.save(model, tmp_path)
    again = sv.load(tmp_path)
    assert again.config.head is None
    ids = jnp.arange(3)
    np.testing.assert_array_equal(again.embed(ids), model.embed(ids))


def test_what_cannot_be_is_said_before_anything_is_read(tmp_path, monkeypatch):
    sv.save(tiny_model("bert"), tmp_path)  # has no head once its config promises none
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("cls.")}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    streamed = stream(tmp_path, dtype=jnp.float64)
    monkeypatch.setattr(type(streamed), "_check_files", None)  # every reading begins with it
    with pytest.raises(ValueError, match="bert checkpoint has no head"):
        streamed(IDS)
    xs = jnp.ones((4, 6, 16))
    # All layers' Jacobians have to fit, not one of them.
    one, all_of_them = (8 * 16 * (16 * layers + 16 * 16) for layers in (1, 3))
    monkeypatch.setattr(memory, "_room", lambda like: (one + all_of_them) // 2)
    with pytest.raises(MemoryError, match="3 frozen Jacobians of 16 x 16"):
        streamed.layer_jacobians(xs)


@pytest.mark.parametrize("how", ["renamed", "written", "cut"])
def test_a_file_that_changes_while_it_is_streamed_is_named(how, tmp_path):
    """Half of one model and half of another would have the right shapes."""
    sv.save(tiny_model("gpt2"), tmp_path)
    sv.save(jax.tree.map(lambda leaf: 2 * leaf, tiny_model("gpt2")), tmp_path / "other")
    file, other = (path / "model.safetensors" for path in (tmp_path, tmp_path / "other"))
    layers = stream(tmp_path, dtype=jnp.float64).layers()
    next(layers)
    if how == "renamed":
        os.replace(other, file)
    elif how == "written":
        file.write_bytes(other.read_bytes())
    else:
        os.truncate(file, 2000)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since it was opened"):
        list(layers)


def test_every_layer_is_of_the_type_that_its_context_allows(tmp_path):
    """The thread that reads ahead knows nothing of the contexts of the one that asks."""
    sv.save(tiny_model("gpt2"), tmp_path)
    jax.config.update("jax_enable_x64", False)
    try:
        with jax.enable_x64(True):
            streamed = stream(tmp_path, dtype=jnp.float64)
            types = {leaf.dtype for flow in streamed.layers() for leaf in jax.tree.leaves(flow)}
    finally:
        jax.config.update("jax_enable_x64", True)
    assert types == {jnp.dtype(jnp.float64)}


def test_a_model_that_does_not_fit_is_streamed(tmp_path, monkeypatch):
    """With room for three layers of twelve."""
    shapes = jax.eval_shape(
        lambda: sv.Transformer(
            tiny_config("llama", num_hidden_layers=12), rngs=nnx.Rngs(0), dtype=jnp.float64
        )
    )
    random = np.random.default_rng(0)
    model = jax.tree.map(lambda leaf: random.normal(size=leaf.shape) / 4, shapes)
    sv.save(model, tmp_path)
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(model.flow)) // 12
    monkeypatch.setattr(memory, "_room", lambda like: 3 * layer)
    with pytest.raises(MemoryError, match="the weights would take"):
        sv.load(tmp_path, dtype=jnp.float64)
    streamed = stream(tmp_path, dtype=jnp.float64)
    assert streamed.peak_bytes == 2 * layer
    assert streamed.bytes > 12 * layer
    found = streamed.simulate(streamed.embed(IDS)).xs
    monkeypatch.undo()
    whole = sv.load(tmp_path, dtype=jnp.float64)
    assert error(found, sv.simulate(whole.flow, whole.embed(IDS)).xs) < 1e-12
    monkeypatch.setattr(memory, "_room", lambda like: layer)
    with pytest.raises(MemoryError, match="two layers"):
        stream(tmp_path, dtype=jnp.float64)


PEAK = """
import json, sys
import numpy as np
from svflow.streaming import stream

def memory(field):
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(field))

streamed = stream(sys.argv[1])
x = streamed.embed(np.arange(5))
streamed.simulate(x)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")  # the peak is from here on
before = memory("VmRSS")
streamed.simulate(x)
print(json.dumps(dict(peak=memory("VmHWM") - before, weights=streamed.bytes)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_of_memory_stays_far_below_the_weights(tmp_path):
    config = tiny_config("gpt2", n_embd=384, n_head=6, n_layer=24, n_positions=16)
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    model = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32) / 50, shapes)
    sv.save(model, tmp_path)
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] > 150e6
    assert found["peak"] < 0.5 * found["weights"]
