"""Read-only facts about a graph. Everything here is linear in the number of nodes and never changes the graph.

Passes ask; none keeps its own idea of what aliases what. Where a fact is not known, the answer is the one that blocks
a rewrite. In the order to read:

    graphs            the toolbox: arguments by schema name, subgraphs, topological order
    source, shapes    source lines, streams and formatting of nodes; questions about sizes that add no guard
    contract          what a node that stands for many nodes does to memory (`regions` derives it from a graph)
    effects           what a node does besides computing its value; which nodes launch kernels and order streams
    inplace_variants  functional ops and their in-place variants, known or declared
    asynchronous      ops that work on after they have returned, ops that may keep their arguments, memory so in use
    aliasing          which values share memory, which nodes write to it, and when
    memory            sizes, last uses, and whether memory may be written over
    program           when the user's program wrote to its inputs, and which nodes can raise
    tails             a large product at the end of a graph, and the graph without it
    dependencies      what has to run before what, stream epochs included
    happens_before    the order of nodes on several streams; `races` finds what events are missing
    row_independence  whether a graph treats the rows of its inputs separately
"""

from graphex.analysis.aliasing import Aliases
from graphex.analysis.effects import is_collective, is_effectful, is_random, written_arguments
from graphex.analysis.memory import last_uses
from graphex.analysis.shapes import known_equal, known_true, same_layout
from graphex.analysis.source import node_line, placement

__all__ = [
    "Aliases",
    "is_collective",
    "is_effectful",
    "is_random",
    "known_equal",
    "known_true",
    "last_uses",
    "node_line",
    "placement",
    "same_layout",
    "written_arguments",
]
