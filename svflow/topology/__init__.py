"""The residual stream as a signed graph, and what the Jacobians of layers do to its communities."""

from svflow.topology.analysis import Options, Topology, norm_weights
from svflow.topology.coupling import GAINS, SIGNS, Coupling, Tested, coupling, squared_gains
from svflow.topology.graphs import Correlation, Graph, correlation, graph
from svflow.topology.leiden import Communities, adjusted_rand_index, communities, modularity
from svflow.topology.nulls import permuted_labels, rewired, shuffled_weights
from svflow.topology.panel import Panel, panel
from svflow.topology.roles import Signed, participation, within_module_z
from svflow.topology.study import Study, load_correlation, load_study, study
from svflow.topology.table import table

__all__ = [
    "GAINS",
    "SIGNS",
    "Communities",
    "Correlation",
    "Coupling",
    "Graph",
    "Options",
    "Panel",
    "Signed",
    "Study",
    "Tested",
    "Topology",
    "adjusted_rand_index",
    "communities",
    "correlation",
    "coupling",
    "graph",
    "load_correlation",
    "load_study",
    "modularity",
    "norm_weights",
    "panel",
    "participation",
    "permuted_labels",
    "rewired",
    "shuffled_weights",
    "squared_gains",
    "study",
    "table",
    "within_module_z",
]
