"""The theory itself: states that follow a posterior's mean of conditional scores."""

from svflow.score.bessel import bessel_ratio, cumulant, log_normaliser
from svflow.score.consistency import (
    Consistency,
    Gap,
    consistency,
    consistency_loss,
    divergence,
    gap,
    key_spread,
)
from svflow.score.correspondence import Correspondence, attention, feed_forward, mixture
from svflow.score.flow import ScoreFlow, SoftmaxPosterior, elbo, energy
from svflow.score.kernel import Kernel, kernel
from svflow.score.mixtures import GaussianMixture, StateMixture, VMFMixture
from svflow.score.polar import Splitting, polar, splitting_gap

__all__ = [
    "Consistency",
    "Correspondence",
    "Gap",
    "GaussianMixture",
    "Kernel",
    "ScoreFlow",
    "SoftmaxPosterior",
    "Splitting",
    "StateMixture",
    "VMFMixture",
    "attention",
    "bessel_ratio",
    "consistency",
    "consistency_loss",
    "cumulant",
    "divergence",
    "elbo",
    "energy",
    "feed_forward",
    "gap",
    "kernel",
    "key_spread",
    "log_normaliser",
    "mixture",
    "polar",
    "splitting_gap",
]
