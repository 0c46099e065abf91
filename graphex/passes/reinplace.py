"""Compute into memory that nobody needs any more.

    before:  a = mul(x, y); b = add(a, x); c = relu(b)
    after:   a = mul(x, y); b = add_(a, x); c = relu_(a)

An op that has an in-place twin writes over its first argument (an op whose twin was declared, over those that the
declaration names) if the graph has allocated it (it is no input and no tensor that a custom op has returned), it is
alone in its storage, has the result's layout, is read by nobody afterwards (not through a view either), shares no
memory with the other arguments and is not in use: no op in flight works on it, and no custom op may have kept it.
"""

from __future__ import annotations

from torch.fx import Node

from graphex.analysis import is_random
from graphex.analysis.declared_twins import declared_twin
from graphex.analysis.memory import bytes_of
from graphex.analysis.reuse import why_not_reusable
from graphex.analysis.twins import in_place_twin
from graphex.passes import inplace_twins
from graphex.passes.base import GraphPass, Refusal, Work


class ReuseDeadMemory(GraphPass):
    name = "reuse_dead_memory"
    option = "inplace_pass"
    rule = "compute_in_place"
    moves_writes = True

    def rules(self) -> tuple[str, ...]:
        return (self.rule, inplace_twins.RULE)

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            if node.op != "call_function" or is_random(node):
                continue
            if declared_twin(node.target) is not None and work.allows(inplace_twins.RULE):
                inplace_twins.reuse_dead_arguments(work, node)
            elif work.allows(self.rule):
                self._reuse_first_argument(work, node)

    def _reuse_first_argument(self, work: Work, node: Node) -> None:
        twin = in_place_twin(node.target)
        if twin is None or not node.args or not isinstance(node.args[0], Node):
            return
        dead = node.args[0]
        obstacle = why_not_reusable(work.aliases, work.order, node, dead, node.meta.get("val"), node)
        if obstacle is not None and obstacle.is_news:
            refusal = Refusal(obstacle.sentence(), node, obstacle.edit)
            work.refuse(node, refusal, rule=self.rule, bytes_moved=bytes_of(node))
        if obstacle is None:
            proof = work.certificate(dead, node, bytes_of(node))
            work.aliases.join(node, dead)
            node.target = twin
            node.meta["val"] = dead.meta["val"]
            work.rewired(node, rule=self.rule, because=f"'{dead.name}' is not read after this", certificate=proof)
