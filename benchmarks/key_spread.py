"""The consistency gap of a softmax against the spread of its keys' norms, as a Markdown table.

    python benchmarks/key_spread.py [--draws N] [--width D] [--keys N]

See `svflow.score.key_spread`: the mean of KL(softmax || uniform-prior Bayes) over random keys and
states, in nats, with its standard error. Rows are median norms of keys m in scores x . m with
|x| = sqrt(d); columns are standard deviations of the norms' logarithm.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

from svflow import score

DEVIATIONS = (0.0, 0.05, 0.1, 0.2, 0.4)
NORMS = (0.5, 1.0, 2.0, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--keys", type=int, default=20)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| median norm | " + " | ".join(f"sd {d}" for d in DEVIATIONS) + " |")
    print("|---" * (len(DEVIATIONS) + 1) + "|")
    for norm in NORMS:
        cells = []
        for deviation in DEVIATIONS:
            gaps = np.asarray(
                score.key_spread(
                    jax.random.key(0),
                    deviation,
                    width=arguments.width,
                    keys=arguments.keys,
                    norm=norm,
                    draws=arguments.draws,
                )
            )
            cells.append(f"{gaps.mean():.4f} ± {gaps.std() / len(gaps) ** 0.5:.4f}")
        print(f"| {norm} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
