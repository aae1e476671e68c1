"""Shares of right answers, with their intervals."""

from __future__ import annotations

import math
from typing import NamedTuple

from svflow.integers import positive

CLAIM = 10_000
"""The least number of fresh sequences that an accuracy is claimed from."""


class Accuracy(NamedTuple):
    """Right answers among fresh sequences.

    Arguments:
        right, asked: tokens.
        sequences: those with a token that is asked for.
        squares: the sum over sequences of the squared number of tokens that are asked for.
        draws: all sequences that were drawn, of which those that the training has drawn may not
            count.
        commonest: tokens whose right answer is the commonest one.
    """

    right: int
    asked: int
    sequences: int
    squares: int
    draws: int
    commonest: int

    @property
    def value(self) -> float:
        """right / asked."""
        return self.right / self.asked

    @property
    def guess(self) -> float:
        """commonest / asked: what the best constant answer gets."""
        return self.commonest / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %: Wilson's, as if all answers in one sequence were right or wrong together.

        The share's variance is then that of (sum_i m_i)^2 / sum_i m_i^2 independent trials, m_i
        answers in sequence i: as many as there are sequences where all ask for the same number.

        Source: L. Kish, "Survey Sampling", 1965, on clusters.
        """
        return wilson(self.value, self.asked**2 // self.squares)

    @property
    def claim(self) -> bool:
        """Whether there are enough sequences."""
        return self.sequences >= CLAIM


def wilson(share: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share of right answers.

    Raises:
        ValueError: a share outside 0 .. 1, or a number of trials that is not positive.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    1927.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be within 0 .. 1, got {share!r}")
    trials = positive("trials", trials)
    middle = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    total = 1 + z**2 / trials
    return max(0.0, (middle - half) / total), min(1.0, (middle + half) / total)
