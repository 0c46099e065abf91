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

from graphex.analysis.aliasing import Aliases as Aliases
from graphex.analysis.effects import is_collective as is_collective
from graphex.analysis.effects import is_effectful as is_effectful
from graphex.analysis.effects import is_random as is_random
from graphex.analysis.effects import written_arguments as written_arguments
from graphex.analysis.graphs import node_line as node_line
from graphex.analysis.graphs import placement as placement
from graphex.analysis.memory import last_uses as last_uses
from graphex.analysis.shapes import known_equal as known_equal
from graphex.analysis.shapes import known_true as known_true
from graphex.analysis.shapes import same_layout as same_layout
