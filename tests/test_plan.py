"""What a study takes, against formulas and against whole programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import tiny_config
from flax import nnx

import svflow as sv
from svflow import plan as planning
from svflow.plan import ACCELERATORS, LAPACK, MODELS, Host, cost, plan

CONFIG = tiny_config(
    "llama",
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=256,
    num_hidden_layers=4,
    vocab_size=256,
)


def layer_weights(config) -> int:
    inner = config.heads * config.head_width
    groups = config.kv_heads * config.head_width
    return config.width * (2 * inner + 2 * groups + 3 * config.hidden)


@pytest.fixture(autouse=True, scope="module")
def _compiled_once():
    planning.one_layer, compiles = functools.cache(planning.one_layer), planning.one_layer
    yield
    planning.one_layer = compiles


@pytest.fixture(scope="module")
def found():
    return plan(CONFIG, tokens=32, dtype=jnp.float32)


def test_operations_are_those_of_the_matrix_products(found):
    """2 a weight and token, 4 tokens² a head's width; in a Jacobian a column for a token."""
    tokens, width, weights = 32, CONFIG.width, layer_weights(CONFIG)
    forward = CONFIG.depth * (2 * tokens * weights + 4 * tokens**2 * width)
    assert found.forward.flops == pytest.approx(forward, rel=0.15)
    context = 2 * tokens * 2 * width * width  # keys and values of the others
    columns = CONFIG.depth * (2 * width * weights + 4 * width * tokens * width + context)
    assert found.jacobians.flops == pytest.approx(columns, rel=0.25)
    assert found.lapack[0] == CONFIG.depth * width**3 * 31
    assert found.lapack[1] == CONFIG.depth * width**3 * (31 + 25 + 88)
    assert sum(LAPACK.values()) == 100


def test_memory_is_that_of_the_whole_program(found):
    model = jax.eval_shape(lambda: sv.Transformer(CONFIG, rngs=nnx.Rngs(0)))
    xs = jax.ShapeDtypeStruct((CONFIG.depth + 1, 32, CONFIG.width), jnp.float32)
    program = jax.jit(lambda flow, xs: sv.layer_jacobians(flow, xs)).lower(model.flow, xs)
    memory = program.compile().memory_analysis()
    outside = model.embedding.tokens.size + model.head.kernel.size + CONFIG.width
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes + 4 * outside
    assert found.weights == 4 * found.parameters
    assert found.peak == pytest.approx(whole + memory.temp_size_in_bytes, rel=0.15)


def test_narrow_weights_are_widened_layer_by_layer():
    """No program converts a stack: in float32 it would take twice what the weights do."""
    model = jax.eval_shape(lambda: sv.Transformer(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    xs = jax.ShapeDtypeStruct((CONFIG.depth + 1, 32, CONFIG.width), jnp.bfloat16)
    text = jax.jit(lambda flow, xs: sv.layer_jacobians(flow, xs)).lower(model.flow, xs).as_text()
    converts = [line for line in text.splitlines() if "stablehlo.convert" in line]
    assert converts
    assert not [line for line in converts if "tensor<4x64x256xbf16>" in line]
    assert [line for line in converts if "tensor<64x256xbf16>" in line]


def test_time_is_the_larger_of_operations_and_bytes(found):
    slow = ACCELERATORS["H100"]._replace(bandwidth=1.0)
    narrow = plan(CONFIG, samples=10, tokens=32, dtype=jnp.float32, accelerator=slow)
    moved = found.weights + found.jacobians.moved
    assert narrow.seconds == pytest.approx(10 * moved / planning.EFFICIENCY)
    small = slow._replace(memory=found.peak - 1)
    host = Host(cores=2, flops=1e9)
    beyond = plan(CONFIG, samples=7, tokens=32, dtype=jnp.float32, accelerator=small, host=host)
    assert found.fits
    assert not beyond.fits
    assert beyond.host_seconds[0] == pytest.approx(7 * found.lapack[0] / 2e9)


def test_every_expert_that_is_visited_counts():
    """All of them by many tokens, the chosen ones in a token's Jacobian."""
    config = tiny_config(
        "qwen3_moe",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        vocab_size=64,
    )
    assert all(config.sparse)
    found, tokens, width = plan(config, tokens=32, dtype=jnp.float32), 32, config.width
    attention, expert = 4 * width**2, 3 * width * config.expert_hidden
    each = 2 * tokens * (attention + 8 * expert) + 4 * tokens**2 * width
    assert found.forward.flops == pytest.approx(config.depth * each, rel=0.1)
    each = 2 * width * (attention + 2 * expert) + 4 * width**2 * tokens + 4 * tokens * width**2
    assert found.jacobians.flops == pytest.approx(config.depth * each, rel=0.15)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama 3.1 8B", 8.03), ("OLMo 3 7B", 7.30), ("Gemma 2 9B", 9.24), ("Gemma 3 12B", 11.77)],
)
def test_shapes_have_as_many_parameters_as_are_published(name, billions):
    config = sv.TransformerConfig.from_hf(MODELS[name])
    shapes = jax.eval_shape(lambda: sv.Transformer(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e9 == pytest.approx(
        billions, abs=0.006
    )


def test_the_plan_of_eight_billion_parameters():
    """Computed here, allocated nowhere."""
    found = plan(sv.TransformerConfig.from_hf(MODELS["Llama 3.1 8B"]))
    assert found.fits
    assert found.weights == 2 * found.parameters
    weights = 32 * layer_weights(sv.TransformerConfig.from_hf(MODELS["Llama 3.1 8B"]))
    assert found.jacobians.flops == pytest.approx(2 * 4096 * weights, rel=0.05)
    assert found.streamed < 0.3 * found.peak


def test_the_command_prints_a_row_for_each(capsys, monkeypatch):
    monkeypatch.setattr(planning, "MODELS", {"tiny": CONFIG.hf})
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    planning.main(["--devices", "1", "--tokens", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| tiny | 1 | ")
    with pytest.raises(SystemExit):
        planning.main(["GPT-5"])
    assert "no shapes of GPT-5" in capsys.readouterr().err
    for wrong in (["--devices", "0"], ["--devices", "1", "-3"], ["--samples", "0"]):
        with pytest.raises(SystemExit):
            planning.main(wrong)
        assert f"{wrong[0]} must be positive" in capsys.readouterr().err


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="tokens must be a positive integer"):
        plan(CONFIG, tokens=0)
    with pytest.raises(ValueError, match=r"samples must be a positive integer, got 1\.5"):
        plan(CONFIG, samples=1.5)
    for dtype, said in ((np.float64, "no peak of .*float64"), ("fp8", "no peak of 'fp8'")):
        with pytest.raises(ValueError, match=said):
            plan(CONFIG, dtype=dtype)
    with pytest.raises(ValueError, match=r"a mesh has axes .* got \('x',\)"):
        plan(CONFIG, mesh=jax.make_mesh((1,), ("x",)))


def test_collectives_are_read_from_programs():
    text = """
%inner (p: f32[7]) -> f32[7] {
  %d = f32[7]{0} all-reduce(%p), to_apply=%add
}

%outer (p: f32[7]) -> f32[7] {
  %e = f32[7]{0} while(%p), condition=%c, body=%inner, x={"known_trip_count":{"n":"5"}}
  ROOT %f = f32[6]{0} collective-permute(%p), channel_id=1
}

ENTRY %main (p: f32[7]) -> f32[9] {
  %a = f32[4,8]{1,0} all-gather(%p), dimensions={0}
  %b = (f32[2]{0}, bf16[3,5]{1,0}) all-reduce-start(%q, %r), to_apply=%add
  %c = f32[9]{0} fusion(%all-reduce), kind=kLoop
  %g = f32[7]{0} while(%p), condition=%c, body=%outer, x={"known_trip_count":{"n":"3"}}
}
"""

    class Compiled:
        def as_text(self):
            return text

    assert planning.collectives(Compiled()) == {
        ("all-gather", "f32", (4, 8)): 1,
        ("all-reduce", "f32", (2,)): 1,
        ("all-reduce", "bf16", (3, 5)): 1,
        ("all-reduce", "f32", (7,)): 15,
        ("collective-permute", "f32", (6,)): 3,
    }
    assert planning._bytes("bf16", (3, 5)) == 30
    program = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    assert cost(program).flops == 2 * 8**3
