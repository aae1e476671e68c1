"""svflow: a transformer as a dynamical system."""

from svflow import data as data
from svflow import geometry as geometry
from svflow.flow import Context as Context
from svflow.flow import Flow as Flow
from svflow.models.config import TransformerConfig as TransformerConfig
from svflow.models.loading import load as load
from svflow.models.loading import save as save
from svflow.models.tokenizer import Tokenizer as Tokenizer
from svflow.models.tokenizer import load_tokenizer as load_tokenizer
from svflow.models.transformer import Transformer as Transformer
from svflow.portrait import Portrait as Portrait
from svflow.portrait import portrait as portrait
from svflow.simulate import ScanAdjoint as ScanAdjoint
from svflow.simulate import Trajectory as Trajectory
from svflow.simulate import simulate as simulate
from svflow.solvers import LieTrotter as LieTrotter
from svflow.solvers import Strang as Strang
