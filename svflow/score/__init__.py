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
from svflow.score.limit import Gradients, Limit, gradients, limit
from svflow.score.metrics import Metrics, metrics
from svflow.score.mixtures import GaussianMixture, StateMixture, VMFMixture
from svflow.score.panel import Panel, panel
from svflow.score.polar import Splitting, polar, splitting_gap
from svflow.score.shuffle import Shuffle, prefix_shuffle, shuffled, table, twins

__all__ = [
    "Consistency",
    "Correspondence",
    "Gap",
    "GaussianMixture",
    "Gradients",
    "Kernel",
    "Limit",
    "Metrics",
    "Panel",
    "ScoreFlow",
    "Shuffle",
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
    "gradients",
    "kernel",
    "key_spread",
    "limit",
    "log_normaliser",
    "metrics",
    "mixture",
    "panel",
    "polar",
    "prefix_shuffle",
    "shuffled",
    "splitting_gap",
    "table",
    "twins",
]
