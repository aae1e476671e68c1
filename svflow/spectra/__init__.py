"""Local linear dynamics: the Jacobians of layers, their spectra, and their products over depth."""

from svflow.spectra import controls
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
