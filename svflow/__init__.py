"""svflow: a transformer as a dynamical system.

A model is `embed`, a flow over depth, and `unembed`; a layer is one step of the flow:

    model = sv.load(sv.data.default_model_path())    # or a folder, a hub id, a .gguf file
    ids = sv.load_tokenizer(sv.data.default_model_path()).encode("Call me Ishmael.")
    path = sv.simulate(model.flow, model.embed(ids))   # path.xs[l]: the state after layer l
    logits = model.unembed(path.xs[-1])

Models: `load`, `save`, `load_tokenizer` and its `Tokenizer`, `Transformer`, `TransformerConfig`,
`TransformerFlow`; the small one that comes with the package, `data`. More than one device: `shard`,
and the rest of `sharding`. More than fits a device: `stream` and its `StreamedTransformer`; what a
study takes, `python -m svflow.plan`.
Flows: `Flow` to define one's own, `Context` for positions and padding, `simulate` and its
`Trajectory`, the splitting solvers `LieTrotter` and `Strang`, the adjoint `ScanAdjoint`.
Local linear dynamics: `jacobian` and `layer_jacobians`, `eigvals`, `measures` (`Measures`),
`causal_spectrum`, `partial_spectrum` (`PartialSpectrum`), `cumulative` products over depth
(`Cumulative`), `schur_normal`, `controls`, and the rest of `spectra`. Layers as a power method, and
steering: `power`. Layers as posterior-weighted scores: `score`. The residual stream's coordinates
as a graph: `topology`.
Measures: `portrait` and its `Portrait`, and `geometry`, the polar form of a step.
Shapes are single-example; batches are `jax.vmap`.
"""

from svflow import data, geometry, power, score, sharding, spectra, topology
from svflow.flow import Context, Flow
from svflow.models.config import TransformerConfig
from svflow.models.loading import load, save
from svflow.models.tokenizer import Tokenizer, load_tokenizer
from svflow.models.transformer import Transformer, TransformerFlow
from svflow.portrait import Portrait, portrait
from svflow.sharding import shard
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
from svflow.streaming import StreamedTransformer, stream

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
    "StreamedTransformer",
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
    "shard",
    "sharding",
    "simulate",
    "spectra",
    "stream",
    "topology",
]
