"""universal: fixed transformers, and the programs that make them simulate any other.

A machine is a transformer whose weights are fixed; a program E is an embedding with which it
computes what a target does:

    target = ut.AttentionTransformer(query, key, value, unembed)
    machine = ut.sparse(layers, heads, width, head_width, out_width)   # or ut.random(key, ...)
    E = ut.program(machine, target)
    ut.run(machine, x @ E)                                             # is ut.run(target, x)

- Transformers: `AttentionTransformer`, an `svflow.Flow`; `run` and `attention_matrices`;
  `Routing`, a map that only copies columns. Of a checkpoint's attention: `attention_of`.
- Machines: `sparse`, `random`, and how wide they are, `machine_width` and `square_width`.
- Programs: `program`; `solve` and its `Solution`, which tell how well conditioned they are. Over
  token ids: `reprogram` of a `TableMachine`.
- What a program holds: `registers` (`Register`, by `Slot`) and their `register_table`;
  `attention_matching` (`Matching`) for layers and heads; `universal.tree_plot`.
- How wide a machine has to be: `path_functions` and their rank, `path_rank` (`PathRank`,
  `path_rank_table`); random machines around their least width, `phase` (`Phase`, `phase_table`).
- What errors do: `robustness` (`Robustness`, `Sensitivity`, `robustness_table`); `quantise` and
  `quantisation` (`Quantised`, `quantisation_table`). Pictures: `universal.bounds_plot`.
- Learning programs: the tasks `dyck1` and `k_hop` (`Batch`), `dyck1_task` and `k_hop_task`, a
  `Task` of one's own, and `summary`; a `Recipe` for a machine, `Blocks` for the components around
  its attention; `train` with its `Settings` (`Trained`, `Embedding`), `logits`, `evaluate`
  (`Accuracy`, `wilson`), and `python -m universal` for the whole table. What was learnt: a
  sequence that is `solved` (`Solved`) with its attention, and `singular_values_of` the tables.
  Pictures: `universal.training_plot`.

Shapes are single-example; batches are `jax.vmap`.

Source: Andoni, Hsu and Liu, "Fixed Universal Transformers", arXiv 2605.31423.
"""

from universal.accuracy import Accuracy, wilson
from universal.bounds import (
    PathRank,
    Phase,
    path_functions,
    path_rank,
    path_rank_table,
    phase,
    phase_table,
)
from universal.checkpoint import attention_of
from universal.components import (
    Blocks,
    Recipe,
)
from universal.evaluation import evaluate
from universal.interpret import (
    Matching,
    Register,
    attention_matching,
    register_table,
    registers,
)
from universal.learnt import Embedding, Trained, logits
from universal.maps import Routing
from universal.paths import Slot
from universal.program import Solution, program, solve
from universal.random_machine import random
from universal.robustness import (
    Quantised,
    Robustness,
    Sensitivity,
    quantisation,
    quantisation_table,
    quantise,
    robustness,
    robustness_table,
)
from universal.sizes import machine_width, square_width
from universal.solved import Solved, singular_values_of, solved
from universal.sparse import sparse
from universal.tables import TableMachine, reprogram
from universal.tasks import (
    Batch,
    Task,
    dyck1,
    dyck1_task,
    k_hop,
    k_hop_task,
    summary,
)
from universal.training import Settings, train
from universal.transformer import AttentionTransformer, attention_matrices, run

__all__ = [
    "Accuracy",
    "AttentionTransformer",
    "Batch",
    "Blocks",
    "Embedding",
    "Matching",
    "PathRank",
    "Phase",
    "Quantised",
    "Recipe",
    "Register",
    "Robustness",
    "Routing",
    "Sensitivity",
    "Settings",
    "Slot",
    "Solution",
    "Solved",
    "TableMachine",
    "Task",
    "Trained",
    "attention_matching",
    "attention_matrices",
    "attention_of",
    "dyck1",
    "dyck1_task",
    "evaluate",
    "k_hop",
    "k_hop_task",
    "logits",
    "machine_width",
    "path_functions",
    "path_rank",
    "path_rank_table",
    "phase",
    "phase_table",
    "program",
    "quantisation",
    "quantisation_table",
    "quantise",
    "random",
    "register_table",
    "registers",
    "reprogram",
    "robustness",
    "robustness_table",
    "run",
    "singular_values_of",
    "solve",
    "solved",
    "sparse",
    "square_width",
    "summary",
    "train",
    "wilson",
]
