"""The residual stream as a signed graph, and what the Jacobians of layers do to its communities.

Nodes are the stream's coordinates, edges their strongest correlations over states.

- Graphs: `correlation` of states in one pass (`Correlation`), the k strongest of each node, `graph`
  (`Graph`).
- Communities (`svflow[topology]`): signed Leiden, `communities` (`Communities`); `modularity`, and
  how far partitions agree, `adjusted_rand_index`.
- Roles of nodes, for both signs (`Signed`): `participation`, `within_module_z`.
- Coupling: whether the communities that a layer amplifies are those that reach into others,
  `coupling` (`Coupling`, `Tested`), with the gains of `squared_gains` by `GAINS` and `SIGNS`, and
  the confounding `norm_weights`.
- What to compare with: `rewired` edges, `shuffled_weights`, `permuted_labels`.
- Over one text beside an untrained model: `panel` (`Panel`, `Topology`, `Options`). Over many:
  `study` (`Study`), which resumes, its `table`, and what its file holds, `load_study` and
  `load_correlation`. Pictures: `svflow.topology.topology_plot`.

Source: Fernando and Guitchounts, "Dynamics of the Transformer Residual Stream: Coupling Spectral
Geometry to Network Topology", arXiv 2605.14258; the statistics are derived in
`svflow.topology.coupling`.
"""

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
