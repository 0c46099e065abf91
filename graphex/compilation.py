"""What one compilation carries from room to room: the options, the journal, and where debug files go."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from graphex.config import CompilerConfig
from graphex.errors import one_line
from graphex.evidence.dump import DebugFiles
from graphex.evidence.timelines import timelines_text
from graphex.quoting import remark
from graphex.records import FellBack, Journal

log = logging.getLogger("graphex")


@dataclass(frozen=True)
class Compilation:
    """One call of the backend. Several graphs (forward, backward, joint) can come out of it."""

    config: CompilerConfig
    journal: Journal
    compile_id: str
    decompositions: Mapping[Any, Any] = field(default_factory=dict)  # a user's, beyond the table `canonical`
    files: DebugFiles = field(default_factory=DebugFiles)
    is_whole: bool = True  # False where Python runs a part of the function, before or after what is compiled here

    def name_graph(self, phase: str) -> str:
        """A name for a new graph that no other graph of this journal has."""
        taken = {graph.graph for graph in self.journal.graphs}
        name, copy = f"{self.compile_id} {phase}", 1
        while name in taken:
            copy += 1
            name = f"{self.compile_id} {phase} #{copy}"
        return name

    def fall_back(self, graph: str, what: str, reason: object, *, node: str = "", line: str = "") -> None:
        self.journal.fall_back(FellBack(graph, what, one_line(reason), node, line))


def readable(gm: GraphModule) -> str:
    """A graph as text, with types, strides, devices and streams."""
    try:
        text: str = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    except Exception as error:  # an argument that a user's pass has put there may fail to print
        return f"# this graph cannot be written as text: {remark(one_line(error))}\n"
    return text + timelines_text(gm.graph)
