"""What became of the user's calls of `scaled_dot_product_attention`: `graphex::attention`, or what torch makes of them.

    F.scaled_dot_product_attention(q, k, v, mask) -> graphex.attention(q, k, v, mask, scale)

torch takes such a call apart while it is traced, so it is replaced before (`graphex.frontend.attention`), where no
graph has a name yet. What was decided is noted on the nodes that came of the call; this pass takes it to the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphex.config import CompilerConfig
from graphex.records import RuleTried
from graphex.rewrite.base import GraphPass, Refusal, Work

_KEY = "graphex_attention"


@dataclass(frozen=True)
class Decided:
    """A call of attention, by its name in Dynamo's graph, and why it was left as it is (empty: it was lifted)."""

    call: str
    refusal: str = ""
    nothing_lost: bool = False  # torch's own kernels are as good for it

    def as_note(self) -> dict[str, Decided]:
        """What to annotate the nodes with that are made for the call."""
        return {_KEY: self}


class LiftAttention(GraphPass):
    """Say which calls of attention were lifted, and why others were not."""

    name = "lift_attention"
    option = "pattern_fusion_pass"
    rule = "lift_attention"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and config.lift_idioms != "never" and self.rule not in config.disable_rules

    def concerns(self, graph: Graph) -> bool:
        return any(_note(node) is not None for node in graph.nodes)

    def apply(self, work: Work) -> None:
        last: dict[Decided, Node] = {}  # of all nodes that a call came to, the last one has its result
        for node in work.graph.nodes:
            if (decided := _note(node)) is not None:
                last[decided] = node
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != _KEY}
        if work.phase == "backward":  # the forward graph has told it
            return
        lifted = 0
        candidates = sum(not decided.nothing_lost for decided in last)
        for decided, node in last.items():
            if decided.refusal:
                work.refuse(node, Refusal(decided.refusal, nothing_lost=decided.nothing_lost), rule=self.rule)
                continue
            lifted += 1
            work.rewired(node, rule=self.rule, because=f"'{decided.call}' was not taken apart while it was traced")
        if candidates:
            work.note(lambda graph, name: RuleTried(graph, name, self.rule, lifted, candidates))


def _note(node: Node) -> Decided | None:
    custom = node.meta.get("custom")
    found = custom.get(_KEY) if isinstance(custom, dict) else None
    return found if isinstance(found, Decided) else None
