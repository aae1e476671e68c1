"""A study of topology as plain text."""

from __future__ import annotations

import numpy as np

from svflow.topology.coupling import GAINS, SIGNS, Tested
from svflow.topology.study import Study

MARKS = {"positive": "+", "negative": "-", "none": " "}


def table(study: Study, untrained: Study | None = None) -> str:
    """A study as plain text, at most 100 columns; with the same architecture untrained below it.

    First, one line per layer: means over sequences of |R|/|J|, the Henrici departure, the
    self-alignment (with what noise gives) and the effective rank of the product so far; then the
    communities, their modularity with those of two null models, their stability, and the mean
    participation in positive and in negative weights. Then, for each sign of participation, rho of
    every gain with its corrected p-value, raw and partial, and behind it the verdict as + or -, or
    ? where there are too few communities for one.

    Raises:
        ValueError: studies of different shapes or options, which cannot be compared.
    """
    parts = {"": study} if untrained is None else {"trained": study, "untrained": untrained}
    if untrained is not None:
        same = {name for name in study.settings if name not in ("model", "family")}
        if study.options != untrained.options or any(
            study.settings[name] != untrained.settings[name] for name in same
        ):
            raise ValueError("the two studies were made with different settings or options")
    lines = []
    for name, one in parts.items():
        head = f"{one.settings['family']}{name and f', {name}'}"
        lines += ["", *_layers(head, one), *_couplings(name, one)]
    return "\n".join(lines[1:])


def _layers(head: str, study: Study) -> list[str]:
    settings, options = study.settings, study.options
    mean = {name: values.mean(axis=0) for name, values in study.samples.items()}
    chance = study.ginibre["self_alignment"].mean(axis=0)
    topology = study.topology
    nulls = topology.null_modularity
    sequences = len(study.samples["update_ratio"])
    few = "" if study.states > settings["width"] else ", no more than nodes: correlations are noisy"
    lines = [
        f"{head}: {settings['layers']} layers, width {settings['width']}, {sequences} sequences",
        f"correlations of {study.states} states{few}; {options.k} edges per node, resolution "
        f"{options.resolution:g}, {options.runs} runs",
        "",
        f"{'':>3} |{'Jacobians':^38}|{'communities':^42}",
        f"{'':>3} |{'|R|/|J|':>8}{'Henrici':>8}{'aligned':>8}{'chance':>7}{'rank':>7}"
        f"|{'n':>4}{'Q':>6}{'shuffl.':>8}{'rewired':>8}{'stable':>7}{'P+':>5}{'P-':>5}",
    ]
    for layer, found in enumerate(topology.communities):
        stable = "-" if np.isnan(found.stability) else f"{found.stability:.2f}"
        roles = [mean[layer] for mean in topology.mean_participation]
        lines.append(
            f"{layer + 1:>3} |{mean['update_ratio'][layer]:>8.3f}"
            f"{mean['henrici_departure'][layer]:>8.3f}{mean['self_alignment'][layer]:>8.3f}"
            f"{chance[layer]:>7.3f}{mean['cumulative_effective_rank'][layer]:>7.1f}|"
            f"{found.number:>4}{found.modularity:>6.2f}{nulls['shuffled_weights'][layer]:>8.2f}"
            f"{nulls['rewired'][layer]:>8.2f}{stable:>7}{roles[0]:>5.2f}{roles[1]:>5.2f}"
        )
    return lines


def _couplings(name: str, study: Study) -> list[str]:
    both = study.topology.coupling
    lines = []
    for sign, label in enumerate(SIGNS):
        head = "|".join([f"{'columns':>10}" + f"{'rows':>12}{'R columns':>12}{'R rows':>12} "] * 2)
        lines += [
            "",
            f"coupling of gain to participation in {label} weights: rho and p ({both.correction}), "
            f"+ or - where p <= {both.alpha:g},",
            "? where there are too few communities for any p so small",
            f"{'':>4}|{'raw':^47}|{'partial':^46}",
            f"{'':>4}|{head}".rstrip(),
        ]
        for layer in range(len(both.sizes)):
            cells = [
                "".join(
                    _cell(tested, both.alpha, (sign, gain, layer)) for gain in range(len(GAINS))
                )
                for tested in (both.raw, both.partial)
            ]
            lines.append(f"{layer + 1:>3} |{'|'.join(cells)}".rstrip())
        for kind, tested in (("raw", both.raw), ("partial", both.partial)):
            counts = [
                f"{int(np.sum(tested.verdict[sign, gain] == 'positive'))}+ "
                f"{int(np.sum(tested.verdict[sign, gain] == 'negative'))}-"
                for gain in range(len(GAINS))
            ]
            lines.append(f"{name + ' ' if name else ''}{kind}, layers by gain: {', '.join(counts)}")
    return lines


def _cell(tested: Tested, alpha: float, at: tuple[int, int, int]) -> str:
    """Of 12 columns, 11 in the first of a row."""
    mark = "?" if tested.least[at] > alpha else MARKS[str(tested.verdict[at])]
    p = "1.00" if tested.adjusted[at] > 0.9995 else f"{tested.adjusted[at]:.3f}"[1:]
    return f"{tested.rho[at]:+.2f} {p}{mark}".rjust(12 if at[1] else 11)
