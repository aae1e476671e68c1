"""Peak memory of `sv.load`, against the size of the weights it returns.

    python benchmarks/memory.py [--width 1024] [--depth 24] [--gguf FILE.gguf]

Each case is its own process: the peak is the high-water mark of its resident memory, less what it
held before the load (interpreter, libraries, an initialised jax). The files are written first by a
Llama-shaped untrained model, single and sharded, in float32 and bfloat16; all are loaded as
float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys
import jax
import jax.numpy as jnp
import svflow as sv

def memory(field):
    # Not getrusage: its maximum is inherited from the parent across exec.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024

jax.jit(lambda x: x + 1)(jnp.zeros(8)).block_until_ready()
before = memory("VmRSS")
model = jax.block_until_ready(sv.load(sys.argv[1]))
peak = memory("VmHWM")
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
print(json.dumps(dict(weights=weights, peak=peak - before)))
"""


def measure(source: Path) -> dict:
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(source)], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def write_cases(folder: Path, width: int, depth: int) -> dict[str, Path]:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from safetensors import safe_open
    from safetensors.flax import save_file

    import svflow as sv

    config = sv.TransformerConfig.from_hf(
        dict(
            model_type="llama",
            vocab_size=16 * width,
            hidden_size=width,
            intermediate_size=int(2.75 * width),
            num_hidden_layers=depth,
            num_attention_heads=16,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    )
    model = sv.Transformer(config, rngs=nnx.Rngs(0))
    cases = {"float32": folder / "float32", "bfloat16": folder / "bfloat16"}
    sv.save(model, cases["float32"])
    sv.save(jax.tree.map(lambda a: a.astype(jnp.bfloat16), model), cases["bfloat16"])
    sharded = cases["float32, 4 shards"] = folder / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((cases["float32"] / "config.json").read_text())
    where = {}
    with safe_open(cases["float32"] / "model.safetensors", framework="flax") as file:
        names = sorted(file.keys())
        for shard in range(4):
            name = f"model-{shard + 1:05d}-of-00004.safetensors"
            part = names[shard::4]
            save_file({n: file.get_tensor(n) for n in part}, sharded / name)
            where.update(dict.fromkeys(part, name))
    (sharded / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = write_cases(Path(folder), options.width, options.depth)
        if options.gguf:
            cases["gguf"] = options.gguf
        for name, source in cases.items():
            found = measure(source)
            rows.append(dict(case=name, **found, ratio=found["peak"] / found["weights"]))
            print(
                f"{name:20s} weights {found['weights'] / 2**20:7.0f} MiB  "
                f"peak {found['peak'] / 2**20:7.0f} MiB  ratio {rows[-1]['ratio']:.3f}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
