"""Jacobians and spectra against their peers and their bounds.

    python benchmarks/spectra.py [--gguf FILE] [--rounds 7] [--out FILE.json]

Equality is checked first; the contestants are interleaved in one run on the same cores, each timed
call after an untimed one of its own, medians over rounds.

- block: the frozen Jacobian of the last of 64 tokens in a block of GPT-2 small's shape, float32,
  against `torch.func.jacrev` on Hugging Face's block, and against the twelve width^3 matrix
  products that it contains, multiplied by JAX.
- causal: the spectrum of all tokens to all tokens at 4 tokens and width 768, float64, against the
  eigenvalues of the dense Jacobian, built and solved.
- model: with --gguf, every frozen last-token Jacobian of a model on one prompt, with full spectra
  and all measures, against LAPACK alone on the same matrices: eigenvalues and singular values, one
  matrix after another as NumPy does it, and in the same threads.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from timing import race, seconds

import svflow as sv
from svflow.spectra.lapack import in_threads


def products(weights, x):
    """The twelve width^3 products of a block's Jacobian, as they follow each other."""
    up, down, output, query, key, value = weights
    x = ((x @ down.T) @ up.T) @ output.T
    return x @ query.T + x @ key.T + x @ value.T


def block(rounds: int, tokens: int = 64) -> dict:
    torch.manual_seed(0)
    theirs = transformers.GPT2Model(
        transformers.GPT2Config(n_layer=2, attn_implementation="eager")
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = sv.load(folder)
    ids = np.random.default_rng(0).integers(0, 50257, tokens)
    x = sv.simulate(ours.flow, ours.embed(ids)).xs[1]
    state, layer = torch.tensor(np.asarray(x)), theirs.h[1]

    def last(row):
        out = layer(torch.cat([state[:-1], row[None]])[None])
        return (out if isinstance(out, torch.Tensor) else out[0])[0, -1]

    def jacrev():
        return torch.func.jacrev(last)(state[-1])

    def frozen():
        return sv.jacobian(ours.flow, 1, x)

    reference = jacrev().detach().numpy()
    compile_s = seconds(frozen)
    error = float(np.abs(np.asarray(frozen()) - reference).max() / np.abs(reference).max())
    if error > 1e-5:
        raise SystemExit(f"the Jacobians differ: {error:.1e}")
    layers = ours.flow.layers
    weights = [
        linear.kernel[...][1]
        for linear in (
            layers.feed_forward.up,
            layers.feed_forward.down,
            layers.attention.output,
            layers.attention.query,
            layers.attention.key,
            layers.attention.value,
        )
    ]
    bound = jax.jit(products)
    start = jnp.asarray(np.random.default_rng(1).normal(size=(768, 768)), jnp.float32)
    medians = race(dict(frozen=frozen, products=lambda: bound(weights, start)), 4 * rounds)
    slow = race(dict(jacrev=jacrev, frozen=frozen), 3)
    return dict(
        tokens=tokens,
        max_error_relative=error,
        compile_s=compile_s,
        frozen_ms=1e3 * medians["frozen"],
        products_ms=1e3 * medians["products"],
        jacrev_ms=1e3 * slow["jacrev"],
        of_products=medians["frozen"] / medians["products"],
        jacrev_over_frozen=slow["jacrev"] / slow["frozen"],
    )


def hausdorff(a, b) -> float:
    apart = np.abs(a[:, None] - b[None])
    return float(max(apart.min(0).max(), apart.min(1).max()))


def causal(rounds: int, tokens: int = 4) -> dict:
    with jax.enable_x64(True):
        config = transformers.GPT2Config(n_layer=2).to_dict()
        config = sv.TransformerConfig.from_hf(config | {"architectures": ["GPT2LMHeadModel"]})
        model = sv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float64)
        x = sv.simulate(model.flow, model.embed(np.arange(tokens))).xs[1]

        def union():
            return sv.causal_spectrum(model.flow, 1, x)

        def dense():
            J = sv.jacobian(model.flow, 1, x, scope="full")
            return np.linalg.eigvals(np.asarray(J).reshape(x.size, x.size))

        reference = dense()
        radius = np.abs(reference).max()
        # The transpose has the same eigenvalues: how far the dense solve itself is off.
        J = np.asarray(sv.jacobian(model.flow, 1, x, scope="full")).reshape(x.size, x.size)
        noise = hausdorff(np.linalg.eigvals(J.T), reference) / radius
        error = hausdorff(np.asarray(union()).ravel(), reference) / radius
        medians = race(dict(union=union, dense=dense), max(1, rounds // 3))
    return dict(
        tokens=tokens,
        hausdorff_over_radius=error,
        dense_against_its_transpose=noise,
        union_s=medians["union"],
        dense_s=medians["dense"],
        dense_over_union=medians["dense"] / medians["union"],
    )


def model(path: str, rounds: int) -> dict:
    loaded = sv.load(path)
    ids = sv.load_tokenizer(path).encode(
        "The ship drew on; had safely passed the chasm which some volcanic shock has made."
    )
    x0 = loaded.embed(ids)

    def ours():
        J = sv.layer_jacobians(loaded.flow, sv.simulate(loaded.flow, x0).xs)
        return J, sv.measures(J)

    J = np.asarray(ours()[0])

    def lapack(a):
        return np.linalg.eigvals(a), np.linalg.svd(a)

    wide = J.astype(np.float64)
    medians = race(
        {
            "ours": ours,
            "lapack": lambda: [lapack(a) for a in J],
            "lapack_float64_in_threads": lambda: in_threads(lapack, list(wide)),
        },
        rounds,
    )
    return dict(
        layers=len(J),
        width=J.shape[-1],
        tokens=len(ids),
        **{f"{name}_s": t for name, t in medians.items()},
        of_lapack=medians["ours"] / medians["lapack"],
        of_lapack_in_threads=medians["ours"] / medians["lapack_float64_in_threads"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = dict(block=block(options.rounds), causal=causal(options.rounds))
    if options.gguf:
        rows["model"] = model(options.gguf, options.rounds)
    for name, row in rows.items():
        print(name, "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    if options.out:
        versions = dict(
            jax=jax.__version__, torch=torch.__version__, transformers=transformers.__version__
        )
        with open(options.out, "w") as file:
            json.dump(dict(versions, threads=torch.get_num_threads(), **rows), file, indent=1)


if __name__ == "__main__":
    main()
