"""Read-only facts about a graph. Everything here is linear in the number of nodes and never changes the graph.

Passes ask; none keeps its own idea of what aliases what. Where a fact is not known, the answer is the one that blocks
a rewrite. In the order to read:

    graphs            the toolbox: arguments by schema name, subgraphs, order; source lines, streams and texts of nodes
    effects           what a node does besides computing its value; contracts of nodes that stand for many
    shapes            questions about sizes, strides and storage offsets that add no guard
    inplace_variants  functional ops and their in-place variants, known or declared
    asynchronous      ops that work on after they have returned, ops that may keep their arguments, memory so in use
    aliasing          which values share memory, which nodes write to it, and when
    happens_before    the order of nodes on several streams, and the races that its events leave
    memory            sizes, last uses, whether memory may be written over; the contract of a graph, and its tail
    dependencies      what has to run before what: nodes that can raise, writes of the program, stream epochs
    row_independence  whether a graph treats the rows of its inputs separately
"""

from graphex.analysis.aliasing import Aliases
from graphex.analysis.effects import is_collective, is_effectful, is_random, written_arguments
from graphex.analysis.graphs import node_line, placement
from graphex.analysis.memory import last_uses
from graphex.analysis.shapes import known_equal, known_true, same_layout

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
