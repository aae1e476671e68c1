"""universal: fixed transformers, and the programs that make them simulate any other.

A machine is a transformer whose weights are fixed; a program E is an embedding with which it
computes what a target does:

    target = ut.AttentionTransformer(query, key, value, unembed)
    machine = ut.sparse(layers, heads, width, head_width, out_width)   # or ut.random(key, ...)
    E = ut.program(machine, target)
    ut.run(machine, x @ E)                                             # is ut.run(target, x)

Transformers: `AttentionTransformer`, an `svflow.Flow`; `run` and `attention_matrices`; `Routing`,
a map that only copies columns. Machines: `sparse`, `random`, and their widths, `machine_width` and
`square_width`. Programs: `program`; `solve` and its `Solution`, which tell how well conditioned
they are; `reprogram`, a machine over token ids; `attention_of`, a checkpoint's attention as a
target. What a program holds: `registers` and their `register_table`, `attention_matching` for
layers and heads, and `universal.tree_plot`. Shapes are single-example; batches are `jax.vmap`.
"""

from universal.checkpoint import attention_of
from universal.interpret import (
    Matching,
    Register,
    attention_matching,
    register_table,
    registers,
)
from universal.maps import Routing
from universal.paths import Slot
from universal.program import Solution, program, solve
from universal.random_machine import random
from universal.sizes import machine_width, square_width
from universal.sparse import sparse
from universal.tables import TableMachine, reprogram
from universal.transformer import AttentionTransformer, attention_matrices, run

__all__ = [
    "AttentionTransformer",
    "Matching",
    "Register",
    "Routing",
    "Slot",
    "Solution",
    "TableMachine",
    "attention_matching",
    "attention_matrices",
    "attention_of",
    "machine_width",
    "program",
    "random",
    "register_table",
    "registers",
    "reprogram",
    "run",
    "solve",
    "sparse",
    "square_width",
]
