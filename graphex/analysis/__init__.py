"""Read-only facts about a graph: aliasing, mutation and effects, liveness, sizes, source lines.

Everything here is linear in the number of nodes and never changes the graph. Passes ask; none keeps its own idea of
what aliases what. Where a fact is not known, the answer is the one that blocks a rewrite.
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
