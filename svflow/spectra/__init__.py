"""Local linear dynamics: the Jacobians of layers, their spectra, and their products over depth.

- Jacobians J[i, j] = dy_i / dx_j in three scopes: `jacobian` of one layer, `layer_jacobians` along
  a trajectory; from each layer to the end, averaged over tokens, `averaged_jacobians`.
- Spectra: `eigvals` and what computes them, `backend`; the `principal` eigenpair (`Principal`);
  twelve `measures` (`Measures`) with what noise gives for each; of all tokens to all,
  `causal_spectrum` and `full_spectrum`.
- Without forming matrices: `partial_spectrum` (`PartialSpectrum`), and singular values of a span of
  depth, `propagator_singular_values` (`LeadingSingular`).
- Products J_l ... J_1: `cumulative` (`Cumulative`), with `effective_rank` and
  `participation_ratio`.
- Non-normality: `schur_parts` (`SchurParts`), and J with some of it removed, `schur_normal`.
- What to compare with: `controls`, random matrices that keep some of J's invariants.
- One text beside these: `panel` (`Panel`). Many: `study` (`Study`), which resumes, and
  `load_study`.

Source: Fernando and Guitchounts, arXiv 2605.14258, for the questions; every module says what is
derived here.
"""

from svflow.spectra import controls
from svflow.spectra.averages import averaged_jacobians
from svflow.spectra.causal import causal_spectrum, full_spectrum
from svflow.spectra.eigenvalues import Principal, backend, eigvals, principal
from svflow.spectra.jacobians import jacobian, layer_jacobians
from svflow.spectra.measures import Measures, measures
from svflow.spectra.panel import Panel, panel
from svflow.spectra.partial import (
    LeadingSingular,
    PartialSpectrum,
    partial_spectrum,
    propagator_singular_values,
)
from svflow.spectra.products import Cumulative, cumulative, effective_rank, participation_ratio
from svflow.spectra.schur import SchurParts, schur_normal, schur_parts
from svflow.spectra.study import Study, load_study, study

__all__ = [
    "Cumulative",
    "LeadingSingular",
    "Measures",
    "Panel",
    "PartialSpectrum",
    "Principal",
    "SchurParts",
    "Study",
    "averaged_jacobians",
    "backend",
    "causal_spectrum",
    "controls",
    "cumulative",
    "effective_rank",
    "eigvals",
    "full_spectrum",
    "jacobian",
    "layer_jacobians",
    "load_study",
    "measures",
    "panel",
    "partial_spectrum",
    "participation_ratio",
    "principal",
    "propagator_singular_values",
    "schur_normal",
    "schur_parts",
    "study",
]
