"""Transformer layers as a power method: their matrices, their alignment, and steering."""

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

__all__ = [
    "Alignment",
    "DoseResponse",
    "Dynamics",
    "Effect",
    "Measured",
    "Pair",
    "Perturbation",
    "Principal",
    "Study",
    "alignment",
    "difference_direction",
    "dose_response",
    "layer_matrices",
    "mean_read",
    "perturbation",
    "principal",
    "rank_one",
    "steer",
    "steering_effect",
    "study",
    "table",
    "unembedding_direction",
]
