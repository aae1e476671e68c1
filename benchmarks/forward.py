"""Forward pass with all layer states at GPT-2-small shape: svflow, Hugging Face, and the bound.

    python benchmarks/forward.py [--tokens 64 512] [--rounds 15] [--out FILE.json]

Three contestants, equality checked first, then interleaved in one run on the same cores, the
order turning from round to round, each timed call after an untimed one of its own:
- `simulate`: embed, then `sv.simulate` with all 13 states through Diffrax, jitted;
- `eager`: Hugging Face's GPT2Model, eager attention, output_hidden_states, torch.inference_mode;
- `products`: the matrix products of that forward pass alone, compiled by XLA in the same loop over
  stacked weights: the bound of what the layers could cost.
Times are medians over rounds, the best beside them; compile time is its own column.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import svflow as sv


def products(flow, x):
    """Every matrix product of the layers, with nothing between them but the heads' layout."""
    config = flow.config
    tokens, heads, head = x.shape[0], config.heads, config.head_width

    def layer(x, weights):
        attention, hidden = weights
        q, k, v = (x @ w.kernel[...] for w in (attention.query, attention.key, attention.value))
        q, k, v = (a.reshape(tokens, heads, head).transpose(1, 0, 2) for a in (q, k, v))
        mixed = ((q @ k.transpose(0, 2, 1)) @ v).transpose(1, 0, 2).reshape(tokens, -1)
        x = (mixed @ attention.output.kernel[...]) @ hidden.up.kernel[...]
        x = x @ hidden.down.kernel[...]
        return x, x

    return jax.lax.scan(layer, x, (flow.layers.attention, flow.layers.feed_forward))[1]


PAUSE = 0.3  # Seconds: torch's idle OpenMP threads spin for up to 0.2 s and would slow the next.


def seconds(f) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    options = parser.parse_args()

    torch.manual_seed(0)
    theirs = transformers.GPT2Model(transformers.GPT2Config(attn_implementation="eager")).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = sv.load(folder)
    states = jax.jit(lambda model, ids: sv.simulate(model.flow, model.embed(ids)).xs)
    bound = jax.jit(lambda model, x: products(model.flow, x))
    rows = []
    for tokens in options.tokens:
        ids = np.random.default_rng(tokens).integers(0, 50257, tokens)
        tensor, array = torch.tensor(ids)[None], jnp.asarray(ids)

        def eager(tensor=tensor):
            with torch.inference_mode():
                return theirs(tensor, output_hidden_states=True).hidden_states

        compile_s = seconds(lambda array=array: states(ours, array))
        # Hugging Face's last hidden state is after the final norm, ours before it.
        reference = np.stack([h[0].numpy() for h in eager()[:-1]])
        found = np.asarray(states(ours, array))[:-1]
        error = float(np.abs(found - reference).max() / np.sqrt(np.mean(reference**2)))
        if error > 1e-4:
            raise SystemExit(f"the states differ: {error:.1e} of their rms")
        x = ours.embed(array)
        contestants = {
            "simulate": lambda array=array: states(ours, array),
            "eager": eager,
            "products": lambda x=x: bound(ours, x),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for round_ in range(options.rounds):
            for place in range(len(contestants)):
                name = list(contestants)[(round_ + place) % len(contestants)]
                time.sleep(PAUSE)
                seconds(contestants[name])  # its own caches and threads, not its neighbour's
                times[name].append(seconds(contestants[name]))
        medians = {name: float(np.median(t)) for name, t in times.items()}
        row = dict(
            tokens=tokens,
            max_error_of_rms=error,
            compile_s=compile_s,
            **{f"{name}_ms": 1e3 * t for name, t in medians.items()},
            **{f"{name}_best_ms": 1e3 * min(t) for name, t in times.items()},
            of_eager=medians["simulate"] / medians["eager"],
            of_products=medians["simulate"] / medians["products"],
        )
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    if options.out:
        versions = dict(
            jax=jax.__version__, torch=torch.__version__, transformers=transformers.__version__
        )
        with open(options.out, "w") as file:
            json.dump(dict(versions, threads=torch.get_num_threads(), rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
