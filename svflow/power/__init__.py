"""Transformer layers as a power method: their matrices, their alignment, and steering."""

from svflow.power.flow import PowerFlow
from svflow.power.matrices import (
    Alignment,
    Pair,
    Principal,
    alignment,
    layer_matrices,
    principal,
)
from svflow.power.steering import (
    DoseResponse,
    Effect,
    Perturbation,
    difference_direction,
    dose_response,
    mean_read,
    perturbation,
    rank_one,
    steer,
    steering_effect,
    unembedding_direction,
)
from svflow.power.study import Dynamics, Measured, Study, study, table
from svflow.power.theory import (
    Bipartite,
    Convergence,
    Prediction,
    Regime,
    bipartite,
    convergence,
    modes,
    predict,
)

__all__ = [
    "Alignment",
    "Bipartite",
    "Convergence",
    "DoseResponse",
    "Dynamics",
    "Effect",
    "Measured",
    "Pair",
    "Perturbation",
    "PowerFlow",
    "Prediction",
    "Principal",
    "Regime",
    "Study",
    "alignment",
    "bipartite",
    "convergence",
    "difference_direction",
    "dose_response",
    "layer_matrices",
    "mean_read",
    "modes",
    "perturbation",
    "predict",
    "principal",
    "rank_one",
    "steer",
    "steering_effect",
    "study",
    "table",
    "unembedding_direction",
]
