"""The theory itself: states that follow a posterior's mean of conditional scores.

dx/dt = E_q(z|x)[grad log p(x|z)], which is grad log p(x) where q is the exact posterior p(z|x). A
layer is an Euler step of such a flow; that is a re-parametrisation and holds for every layer. What
can be false of a model is that its posterior is the one its scores imply.

- Mixtures p(z), p(x|z): `VMFMixture` on the sphere and `GaussianMixture` in R^d, both a
  `StateMixture`; normalisers in any dimension, `log_normaliser`, `cumulant`, `bessel_ratio`.
- Flows: `ScoreFlow`, with the exact posterior, a `SoftmaxPosterior` or a network; along it the
  `energy` -log p and the `elbo`.
- Layers as means of scores (`Correspondence`): `attention`, `feed_forward`, `mixture` of experts.
  The vMF `kernel` (`Kernel`) that attention compares by.
- How far a posterior is from Bayes: of a layer, `consistency` (`Consistency`); of any q, `gap`
  (`Gap`), `divergence`, and to train with, `consistency_loss`; of random keys, `key_spread`.
- Along depth: the layer theorem, `polar`; substeps against one step, `splitting_gap`
  (`Splitting`); all `metrics` of a text (`Metrics`), and beside an untrained model, `panel`
  (`Panel`).
- The continuous limit: `limit` (`Limit`) and its `gradients` (`Gradients`).
- Prefix shuffling: `prefix_shuffle` (`Shuffle`) and its `table`; one permutation, `shuffled`;
  random models with and without norms of queries, `twins`. Pictures: `svflow.score.shuffle_plot`.

Source: Liao, "Transformer as an Euler Discretization of Score-based Variational Flow", arXiv
2604.23740; what is derived here says so.
"""

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
