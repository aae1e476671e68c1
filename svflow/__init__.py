"""svflow: a transformer as a dynamical system.

A model is `embed`, a flow over depth, and `unembed`; a layer is one step of the flow:

    model = sv.load(sv.data.default_model_path())    # or a folder, a hub id, a .gguf file
    ids = sv.load_tokenizer(sv.data.default_model_path()).encode("Call me Ishmael.")
    path = sv.simulate(model.flow, model.embed(ids))   # path.xs[l]: the state after layer l
    logits = model.unembed(path.xs[-1])

Models: `load`, `save`, `load_tokenizer`, `Transformer`, `TransformerConfig`, `TransformerFlow`.
Flows: `Flow` to define one's own, `Context` for positions and padding, `simulate` and its
`Trajectory`, the splitting solvers `LieTrotter` and `Strang`, the adjoint `ScanAdjoint`.
Local linear dynamics: `jacobian` and `layer_jacobians`, `eigvals`, `measures`, `causal_spectrum`,
`partial_spectrum`, `cumulative` products over depth, `schur_normal`, `controls`, and the rest of
`spectra`. Layers as a power method, and steering: `power`. Layers as posterior-weighted scores:
`score`. The residual stream's coordinates as a graph: `topology`.
Measures: `portrait` and its `Portrait`, and `geometry`, the polar form of a step.
Shapes are single-example; batches are `jax.vmap`.
"""

from svflow import data, geometry, power, score, spectra, topology
from svflow.flow import Context, Flow
from svflow.models.config import TransformerConfig
from svflow.models.loading import load, save
from svflow.models.tokenizer import Tokenizer, load_tokenizer
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.portrait import Portrait, portrait
from svflow.simulate import ScanAdjoint, Trajectory, simulate
from svflow.solvers import LieTrotter, Strang
from svflow.spectra import (
    Cumulative,
    Measures,
    PartialSpectrum,
    causal_spectrum,
    controls,
    cumulative,
    eigvals,
    jacobian,
    layer_jacobians,
    measures,
    partial_spectrum,
    schur_normal,
)

__all__ = [
    "Context",
    "Cumulative",
    "Flow",
    "LieTrotter",
    "Measures",
    "PartialSpectrum",
    "Portrait",
    "ScanAdjoint",
    "Strang",
    "Tokenizer",
    "Trajectory",
    "Transformer",
    "TransformerConfig",
    "TransformerFlow",
    "causal_spectrum",
    "controls",
    "cumulative",
    "data",
    "eigvals",
    "geometry",
    "jacobian",
    "layer_jacobians",
    "load",
    "load_tokenizer",
    "measures",
    "partial_spectrum",
    "portrait",
    "power",
    "save",
    "schur_normal",
    "score",
    "simulate",
    "spectra",
    "topology",
]
