"""Transformer layers as a power method: their matrices, their alignment, and steering.

Without feed-forward layers, and with L2 norms, a layer is x_i' = Norm(x_i + sum_h O^h V^h sum_j
a_ij^h x_j). Where all tokens agree it is the power method on I + F, F = sum_h O^h V^h, which goes
to the eigenvalue of largest |1 + lambda|.

- Of a checkpoint: `layer_matrices` F of every layer; their first eigenpairs by |lambda| and by
  |1 + lambda|, `principal` (`Principal`, two of `Pair`); how the states of a text lie to them,
  `alignment` (`Alignment`). All at once: `study` (`Study`, `Dynamics`, `Measured`) and its `table`.
- The system itself: `PowerFlow`, of weights or of a model's attention. What it does in the long
  run: `predict` (`Prediction`, `Regime`), its linearisation's `modes`, two groups of opposite sign,
  `bipartite` (`Bipartite`); a run beside that, `convergence` (`Convergence`).
- Steering by a rank-one change of an output matrix: `steer`, along `unembedding_direction` or
  `difference_direction`; the change alone, `perturbation` (`Perturbation`) and its formulas,
  `rank_one`; the mean token that one variant needs, `mean_read`; what it does to a text,
  `steering_effect` (`Effect`), and over strengths, `dose_response` (`DoseResponse`).
- Pictures: `svflow.power.steering_plot`.

Source: Li and Altafini, "Analogies between Transformer Layers and Power Method", arXiv 2605.25619;
the theory of the long run is derived in `svflow.power.theory`, steering in `svflow.power.steering`.
"""

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
