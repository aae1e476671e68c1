"""Local linear dynamics: the Jacobians of layers, their spectra, and their products over depth."""

from svflow.spectra import controls
from svflow.spectra.causal import causal_spectrum, full_spectrum
from svflow.spectra.eigenvalues import Principal, backend, eigvals, principal
from svflow.spectra.jacobians import jacobian, layer_jacobians

__all__ = [
    "Principal",
    "backend",
    "causal_spectrum",
    "controls",
    "eigvals",
    "full_spectrum",
    "jacobian",
    "layer_jacobians",
    "principal",
]
