"""Every family against Hugging Face transformers: states, logits, configs, and the way back.

The models are tiny and random in every parameter, saved by Hugging Face and compared in float64.
"""

import functools
import importlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from compare import batched, error
from flax import nnx

import svflow as sv
from svflow.models.checkpoint import write_checkpoint
from svflow.models.config import ACTIVATIONS
from svflow.models.families import FAMILIES
from svflow.models.families.base import Keys
from svflow.models.layers import activate
from svflow.models.rope import flat_rope


def peer(name):
    """The module; skipped where it is not installed, but an error with SVFLOW_PEERS set."""
    return (
        importlib.import_module(name)
        if os.environ.get("SVFLOW_PEERS")
        else pytest.importorskip(name)
    )


torch, hf = peer("torch"), peer("transformers")

# Hugging Face's norms, softmax and rotary angles round to float32 inside.
TOLERANCE = 2e-5
TOKENS = 23
VOCAB = 61

TORSO = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
)
GROUPED = {**TORSO, "num_key_value_heads": 2, "head_dim": 10}
ENDS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=None)
SHORT = {**TORSO, **ENDS, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}


def sliding(*pattern):
    return {"layer_types": [f"{kind}_attention" for kind in pattern]}


def rope(kind="default", theta=10000.0, **parameters):
    return {"rope_theta": theta, "rope_type": kind, **parameters}


LLAMA3 = rope(
    "llama3",
    theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)
LONG = rope(
    "longrope",
    original_max_position_embeddings=16,
    short_factor=[1.0, 1.1, 1.3, 1.7],
    long_factor=[1.5, 2.0, 3.0, 6.0],
)

# Name: the class of the model, and its config.
CASES = {
    "gpt2": (
        hf.GPT2LMHeadModel,
        dict(
            vocab_size=VOCAB,
            n_embd=24,
            n_layer=3,
            n_head=3,
            n_inner=50,
            n_positions=40,
            activation_function="relu",
            scale_attn_by_inverse_layer_idx=True,
            scale_attn_weights=False,
            layer_norm_epsilon=1e-3,
            tie_word_embeddings=False,
            **ENDS,
        ),
    ),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        dict(
            vocab_size=VOCAB,
            hidden_size=24,
            num_layers=3,
            num_heads=3,
            intermediate_size=50,
            attention_types=[[["local", "global"], 1], [["local"], 1]],
            window_size=3,
            max_position_embeddings=40,
            layer_norm_epsilon=1e-3,
            **ENDS,
        ),
    ),
    "gpt_neox": (
        hf.GPTNeoXForCausalLM,
        dict(**TORSO, **ENDS, rope_parameters=rope(theta=500.0, partial_rotary_factor=0.7)),
    ),
    "gpt_neox-serial": (
        hf.GPTNeoXForCausalLM,
        dict(
            **TORSO,
            **ENDS,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_new",
        ),
    ),
    "bert": (
        hf.BertForPreTraining,
        dict(**TORSO, type_vocab_size=3, hidden_act="gelu_new", layer_norm_eps=1e-3),
    ),
    "bert-decoder-untied": (
        hf.BertLMHeadModel,
        dict(**TORSO, is_decoder=True, tie_word_embeddings=False),
    ),
    "roberta": (
        hf.RobertaForMaskedLM,
        dict(**TORSO, pad_token_id=4, type_vocab_size=1, hidden_act="relu"),
    ),
    "albert": (
        hf.AlbertForPreTraining,
        dict(**{**TORSO, "num_hidden_layers": 5}, embedding_size=12, num_hidden_groups=2)
        | dict(inner_group_num=2),
    ),
    "llama": (
        hf.LlamaForCausalLM,
        dict(**GROUPED, **ENDS, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    ),
    "llama-linear": (
        hf.LlamaForCausalLM,
        dict(**SHORT, rope_parameters=rope("linear", factor=3.0)),
    ),
    "llama-dynamic": (
        hf.LlamaForCausalLM,
        dict(**SHORT, max_position_embeddings=16, rope_parameters=rope("dynamic", factor=2.0)),
    ),
    "llama-yarn": (
        hf.LlamaForCausalLM,
        dict(**SHORT, max_position_embeddings=64, rope_parameters=YARN),
    ),
    "llama-longrope": (
        hf.LlamaForCausalLM,
        dict(**SHORT, max_position_embeddings=64, rope_parameters=LONG),
    ),
    "llama-llama3": (
        hf.LlamaForCausalLM,
        dict(**SHORT, max_position_embeddings=64, rope_parameters=LLAMA3),
    ),
    "mistral": (hf.MistralForCausalLM, dict(**GROUPED, **ENDS, sliding_window=5)),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        dict(**TORSO, **ENDS, num_key_value_heads=1, use_sliding_window=True, sliding_window=4)
        | dict(max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": (
        hf.Qwen3ForCausalLM,
        dict(**GROUPED, **ENDS, attention_bias=True, use_sliding_window=True, sliding_window=6)
        | sliding("full", "sliding", "full"),
    ),
    "olmo": (
        hf.OlmoForCausalLM,
        dict(**TORSO, **ENDS, num_key_value_heads=2, clip_qkv=0.8, attention_bias=True),
    ),
    "olmo2": (
        hf.Olmo2ForCausalLM,
        dict(**TORSO, **ENDS, num_key_value_heads=2, attention_bias=True),
    ),
    "olmo3": (
        hf.Olmo3ForCausalLM,
        dict(
            **{**TORSO, "num_hidden_layers": 4, "num_key_value_heads": 2},
            **ENDS,
            **sliding("full", "sliding", "sliding", "full"),
            sliding_window=5,
            max_position_embeddings=64,
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": rope(theta=300.0),
            },
        ),
    ),
    "gemma": (
        hf.GemmaForCausalLM,
        dict(**GROUPED, **ENDS, hidden_act="gelu", attention_bias=True, rms_norm_eps=1e-3),
    ),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        dict(
            **{**GROUPED, "num_hidden_layers": 3},
            **ENDS,
            query_pre_attn_scalar=5,
            attn_logit_softcapping=0.7,
            final_logit_softcapping=1.3,
            sliding_window=4,
            **sliding("full", "sliding", "sliding"),
        ),
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        dict(
            **{**GROUPED, "num_hidden_layers": 8},
            **ENDS,
            sliding_window=4,
            query_pre_attn_scalar=7,
            final_logit_softcapping=2.0,
            rope_parameters={
                "full_attention": rope("linear", theta=5000.0, factor=8.0),
                "sliding_attention": rope(theta=200.0),
            },
        ),
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        dict(**GROUPED, **ENDS, num_local_experts=5, num_experts_per_tok=2, sliding_window=7),
    ),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        dict(
            **{**GROUPED, "num_hidden_layers": 6},
            **ENDS,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=14,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            attention_bias=True,
        ),
    ),
    "olmoe": (
        hf.OlmoeForCausalLM,
        dict(
            **TORSO,
            **ENDS,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            clip_qkv=0.9,
        ),
    ),
}


# Not SDPA, which leaves out Gemma 2's soft-cap; not grouped experts, which have no float64.
EAGER = dict(attn_implementation="eager", experts_implementation="eager")


def build(name, **implementation):
    """A random model: norms near one (Gemma's near zero), everything else centered."""
    kind, options = CASES[name]
    model = kind(kind.config_class(**options, **(implementation or EAGER))).double().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            one = "norm" in path.lower() and path.endswith("weight") and "gemma" not in name
            gpt = ".ln_" in path and path.endswith("weight")
            parameter.copy_(0.25 * noise + (1.0 if one or gpt else 0.0))
    return model


def layers_of(model):
    """The modules that are one layer of ours, in order."""
    base = model.base_model
    if "albert" in model.config.model_type:
        return [
            layer for group in base.encoder.albert_layer_groups for layer in group.albert_layers
        ]
    if hasattr(base, "encoder"):
        return list(base.encoder.layer)
    return list(base.h if hasattr(base, "h") else base.layers)


def run(model, ids, **options):
    """What enters the first layer, what each layer returns, and the logits."""
    entering, returned = [], []

    def before(module, args, kwargs):
        entering.append(args[0] if args else kwargs["hidden_states"])

    def after(module, args, output):
        returned.append(output[0] if isinstance(output, tuple) else output)

    hooks = []
    for layer in layers_of(model):
        hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(layer.register_forward_hook(after))
    with torch.no_grad():
        output = model(torch.tensor(np.asarray(ids), dtype=torch.long), use_cache=False, **options)
    for hook in hooks:
        hook.remove()
    logits = output.logits if "logits" in output else output.prediction_logits
    return entering[0].numpy(), torch.stack(returned, 1).numpy(), logits.numpy()


def tokens(seed, shape=(2, TOKENS)):
    return np.random.default_rng(seed).integers(5, VOCAB, shape)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(name, Hugging Face's model, its folder, ours)."""
    model = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder, sv.load(folder, dtype=jnp.float64)


def test_states_and_logits(case, seed):
    name, model, _, ours = case
    ids = tokens(seed)
    if name == "roberta":
        ids[1, [0, 7, 22]] = 4  # pads do not count
    embedded, outputs, logits = batched(ours, jnp.asarray(ids), None)
    expected = run(model, ids)
    assert error(embedded, expected[0]) < TOLERANCE
    assert outputs.shape[1] == expected[1].shape[1] == ours.config.depth
    for layer in range(ours.config.depth):
        assert error(outputs[:, layer], expected[1][:, layer]) < TOLERANCE, f"layer {layer}"
    assert error(logits, expected[2]) < TOLERANCE
    print("largest error:", max(error(a, b) for a, b in zip((embedded, outputs, logits), expected)))


def test_the_way_back(case, tmp_path, seed):
    _, model, folder, ours = case
    sv.save(ours, tmp_path)
    read = functools.partial(type(model).from_pretrained, dtype=torch.float64, **EAGER)
    back, info = read(tmp_path, output_loading_info=True)
    # What ours does not have is what takes no part: poolers, and the bias beside an untied head.
    harmless = ("pooler", "seq_relationship", "sop_classifier", "cls.predictions.bias")
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert all(any(word in key for word in harmless) for key in info["missing_keys"])
    ids = tokens(seed)
    logits = [run(m.eval(), ids)[2] for m in (back, read(folder))]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-12)

    again = sv.load(tmp_path, dtype=jnp.float64)
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(ours))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(ours)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_bare_model(case, tmp_path):
    """Saved without its head, a model has the same parameters; a head of its own is missing."""
    _, model, _, ours = case
    model.base_model.save_pretrained(tmp_path)
    assert not any(name.startswith(f"{model.base_model_prefix}.") for name in names_in(tmp_path))
    bare = sv.load(tmp_path, dtype=jnp.float64)
    assert (bare.config.head is None) == (ours.config.head == "masked" or not ours.config.tied)
    whole = dict(jax.tree_util.tree_leaves_with_path(ours))
    for path, leaf in jax.tree_util.tree_leaves_with_path(bare):
        np.testing.assert_array_equal(leaf, whole[path])


def names_in(folder):
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        return list(file.keys())


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_token_types(name, tmp_path, seed):
    model = build(name)
    model.save_pretrained(tmp_path)
    ids, types = tokens(seed, (TOKENS,)), np.random.default_rng(seed).integers(0, 2, TOKENS)
    theirs = run(model, ids[None], token_type_ids=torch.tensor(types)[None])[0][0]
    ours = sv.load(tmp_path, dtype=jnp.float64)
    assert error(ours.embed(jnp.asarray(ids), segments=jnp.asarray(types)), theirs) < TOLERANCE
    assert error(ours.embed(jnp.asarray(ids)), theirs) > 0.1


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_in_one_tensor(name, tmp_path):
    """The layout of models in memory loads as the layout of files does."""
    model = build(name)
    model.save_pretrained(tmp_path / "file")
    config = json.loads((tmp_path / "file" / "config.json").read_text())
    memory = {key: value.numpy() for key, value in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in memory)
    write_checkpoint(tmp_path / "memory", config, memory.items())
    file, memory = (sv.load(tmp_path / name, dtype=jnp.float64) for name in ("file", "memory"))
    for a, b in zip(jax.tree.leaves(file), jax.tree.leaves(memory), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    x = np.linspace(-6, 6, 201)
    theirs = hf.activations.ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(activate(ACTIVATIONS[name], jnp.asarray(x)), theirs, atol=1e-9)


PADDED = ["gpt2", "bert", "gpt_neox", "llama", "mistral", "olmo3", "gemma3"]


@pytest.mark.parametrize("name", PADDED)
def test_left_padding(name, tmp_path, seed):
    # Eager attention in float64 gives nan at rows without a key.
    model = build(name, attn_implementation="sdpa")
    model.save_pretrained(tmp_path)
    ours = sv.load(tmp_path, dtype=jnp.float64)
    ids, lengths = tokens(seed, (2, TOKENS)), np.array([TOKENS, 14])
    mask = np.arange(TOKENS) >= TOKENS - lengths[:, None]
    context = sv.Context(mask=jnp.asarray(mask))
    positions = torch.tensor(np.maximum(np.cumsum(mask, 1) - 1, 0))
    _, _, logits = batched(ours, jnp.asarray(ids), context)
    expected = run(model, ids, attention_mask=torch.tensor(mask).long(), position_ids=positions)
    assert np.isfinite(logits).all()
    assert error(np.asarray(logits)[mask], expected[2][mask]) < TOLERANCE
    # Padding changes nothing: the tokens by themselves give the same.
    alone = run(model, ids[1:, TOKENS - 14 :])[2][0]
    assert error(np.asarray(logits)[1, TOKENS - 14 :], alone) < TOLERANCE


ROPES = {
    "default": {},
    "linear": rope("linear", factor=2.5),
    "dynamic": rope("dynamic", factor=4.0, original_max_position_embeddings=8),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-plain": rope("yarn", factor=4.0),
    "yarn-exact": {**YARN, "truncate": False, "beta_slow": 0.5},
    "yarn-scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn-one-scale": {**YARN, "mscale": 0.7},
    "yarn-attention": {**YARN, "attention_factor": 1.7},
    "yarn-no-factor": {**YARN, "factor": None},
    "longrope": LONG,
    "longrope-factor": {**LONG, "factor": 8.0},
    "longrope-one": {**LONG, "factor": 1.0},
    "longrope-attention": {**LONG, "attention_factor": 1.3},
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope(name, spelling):
    """Angles and amplitudes at lengths on both sides of the original one."""
    parameters = dict(ROPES[name])
    options = {**SHORT, "max_position_embeddings": 32, "model_type": "llama"}
    if spelling == "rope_parameters":
        options["rope_parameters"] = {"rope_theta": 10000.0, **parameters}
    else:
        options["rope_theta"] = parameters.pop("rope_theta", 10000.0)
        if spelling == "type" and parameters:
            parameters["type"] = parameters.pop("rope_type")
        options["rope_scaling"] = parameters or None
        if "original_max_position_embeddings" in parameters and name == "longrope":
            options["original_max_position_embeddings"] = 12  # goes before the one inside
    theirs = hf.LlamaConfig(**json.loads(json.dumps(options)))
    rotary = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = flat_rope(Keys(options, FAMILIES["llama"].defaults), 8)
    for length in (5, 13, 20, 32, 50, 20, 5):
        angles = ours.angles(jnp.arange(length), jnp.float64)
        cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
        for function, expected in ((np.cos, cos), (np.sin, sin)):
            half = expected[0].numpy()[:, :4]
            np.testing.assert_allclose(function(angles) * ours.amplitude, half, atol=1e-5)


# What the files of older releases say.
OLD = {
    "gpt_neox": dict(**TORSO, rotary_pct=0.7, rotary_emb_base=777, torch_dtype="float16"),
    "bert": dict(**TORSO, gradient_checkpointing=False, position_embedding_type="absolute"),
    "roberta": dict(**TORSO, position_embedding_type="absolute", max_position_embeddings=514),
    "albert": dict(**TORSO, embedding_size=12, net_structure_type=0, gap_size=0),
    "llama": dict(
        **TORSO,
        rope_theta=500000.0,
        rope_scaling={k: v for k, v in LLAMA3.items() if k != "rope_theta"},
        torch_dtype="bfloat16",
        pretraining_tp=1,
    ),
    "mistral": dict(**TORSO, num_key_value_heads=2, rope_theta=1e6, sliding_window=None),
    "qwen2": dict(
        **TORSO, num_key_value_heads=2, rope_theta=1e6, sliding_window=8, max_window_layers=2
    ),
    "qwen2-": dict(**TORSO, num_key_value_heads=2, sliding_window=8, max_window_layers=2)
    | dict(use_sliding_window=True),
    "qwen3": dict(
        **GROUPED,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "olmo": dict(**TORSO, rope_theta=5000.0, rope_scaling=None, clip_qkv=None),
    "olmo2": dict(**TORSO, rope_theta=500000, rope_scaling=None),
    "olmo3": dict(
        **TORSO,
        rope_theta=500000,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        sliding_window=4,
    ),
    "gemma": dict(**GROUPED, rope_theta=10000.0, hidden_act="gelu", hidden_activation=None),
    "gemma2": dict(**GROUPED, rope_theta=10000.0, cache_implementation="hybrid"),
    "gemma3_text": dict(
        **{**GROUPED, "num_hidden_layers": 7},
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "mixtral": dict(**GROUPED, rope_theta=1e6, num_local_experts=4, sliding_window=None),
    "qwen3_moe": dict(**GROUPED, num_experts=6, num_experts_per_tok=2, rope_theta=1e6),
    "olmoe": dict(**TORSO, num_experts=6, num_experts_per_tok=2, rope_theta=1e4, clip_qkv=None),
    "gpt2": dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_ctx=1024),
    "gpt_neo": dict(vocab_size=VOCAB, hidden_size=24, num_layers=24, num_heads=4),
}


def config_class(model_type):
    return type(hf.AutoConfig.for_model(model_type))


def same_reading(model_type, options):
    """Ours of a file equals ours of what Hugging Face makes of that file, but for the file."""
    ours = sv.TransformerConfig.from_hf({"model_type": model_type, **options})
    theirs = config_class(model_type)(**json.loads(json.dumps(options))).to_dict()
    theirs = sv.TransformerConfig.from_hf({**theirs, "model_type": model_type})
    a, b = ({**vars(config), "source": None} for config in (ours, theirs))
    assert a == b


@pytest.mark.parametrize("name", OLD)
def test_configs_of_older_files(name):
    assert {key.strip("-") for key in OLD} == set(FAMILIES)
    same_reading(name.strip("-"), OLD[name])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults(model_type):
    """A key that is left out has the value that Hugging Face's class gives it."""
    family, fields = FAMILIES[model_type], config_class(model_type).__dataclass_fields__
    for key, value in family.defaults.items():
        # The rest are keys of older files, which `same_reading` is about.
        if key in fields and fields[key].default is not None:
            assert fields[key].default == value, key
    # A config of nothing but sizes, those that have to be there.
    required = {
        key: field.default
        for key, field in fields.items()
        if type(field.default) is int and key not in family.defaults and "token_id" not in key
    }
    same_reading(model_type, required)


# Attributes that change no forward pass: dropout, losses, caches, labels, token ids and the like.
HARMLESS = {
    "_name_or_path",
    "_output_attentions",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "classifier_dropout",
    "classifier_dropout_prob",
    "embd_pdrop",
    "embed_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",  # a row of the embedding without gradient; RoBERTa's positions ask for it
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "pretraining_tp",
    "model_type",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "reorder_and_upcast_attn",
    "_sliding_window_pattern",
}
# Attributes that one family's class has and its model does not read.
UNREAD = {
    "gpt_neox": {"is_decoder"},
    "gpt_neo": {"attention_types"},  # the types that `attention_layers` spells out
    "gemma3_text": {"attn_logit_softcapping"},
    "qwen2": {"max_window_layers"},  # read where `layer_types` is not given
    "qwen3": {"max_window_layers"},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_attribute_is_accounted_for(model_type):
    config = config_class(model_type)().to_dict()
    family = FAMILIES[model_type]
    keys = Keys(config, family.defaults)
    family.read(keys)
    accounted = keys._asked | HARMLESS | UNREAD.get(model_type, set()) | set(Keys.REFUSED)
    assert not set(config) - accounted
    assert not UNREAD.get(model_type, set()) & keys._asked
