"""The film: the graphs of one journal, as given and after each pass that changed one, as plain data.

It is taken only where somebody will look at it (`explain`, debug files, `graphex explain`). A node that several graphs
hold without change is stored once, so the film of 20 passes is hardly longer than that of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph

from graphex.analysis import Aliases
from graphex.evidence.report.nodes import NodeFacts, facts_of


@dataclass
class Reel:
    """One graph through all passes: its distinct nodes, and for each picture which of them it holds, in order."""

    nodes: list[NodeFacts] = field(default_factory=list)
    pictures: list[list[int]] = field(default_factory=list)
    _places: dict[NodeFacts, int] = field(default_factory=dict)

    def add(self, facts: list[NodeFacts]) -> None:
        picture = []
        for each in facts:
            place = self._places.setdefault(each, len(self.nodes))
            if place == len(self.nodes):
                self.nodes.append(each)
            picture.append(place)
        self.pictures.append(picture)


class Film:
    """One reel for each graph of a journal."""

    def __init__(self) -> None:
        self.reels: dict[str, Reel] = {}
        self._input_names: dict[str, list[str]] = {}

    def name_inputs(self, compile_id: str, names: list[str]) -> None:
        """Take note of what the user calls the inputs of the graphs of one compilation.

        DDP's buckets are several graphs of one compilation: which inputs a backward's are is not known then.
        """
        if self._input_names.setdefault(compile_id, names) != names:
            self._input_names[compile_id] = []

    def take(self, graph_name: str, graph: Graph, aliases: Aliases) -> None:
        """A picture of the graph as it stands."""
        names = self._input_names.get(graph_name.split(" ")[0], [])
        self.reels.setdefault(graph_name, Reel()).add([facts_of(node, aliases, names) for node in graph.nodes])
