"""Compute into memory that nobody needs any more.

    before:  a = mul(x, y); b = add(a, x); c = relu(b)
    after:   a = mul(x, y); b = add_(a, x); c = relu_(a)

An op that has an in-place twin writes over its first argument if that is no input of the graph, has the result's
layout, is read by nobody afterwards (not through a view either) and shares no memory with the other arguments.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from graphex.analysis import is_random, same_layout
from graphex.analysis.memory import bytes_of
from graphex.analysis.twins import in_place_twin
from graphex.passes.base import GraphPass, Work


class ReuseDeadMemory(GraphPass):
    name = "reuse_dead_memory"
    option = "inplace_pass"
    rule = "compute_in_place"
    moves_writes = True

    def rules(self) -> tuple[str, ...]:
        return (self.rule,)

    def apply(self, work: Work) -> None:
        if not work.allows(self.rule):
            return
        for node in list(work.graph.nodes):
            twin = in_place_twin(node.target) if node.op == "call_function" else None
            if twin is None or is_random(node) or not node.args or not isinstance(node.args[0], Node):
                continue
            dead = node.args[0]
            if _is_reusable(work, node, dead):
                proof = work.certificate(dead, node, bytes_of(node))
                work.aliases.join(node, dead)
                node.target = twin
                node.meta["val"] = dead.meta["val"]
                work.rewired(node, rule=self.rule, because=f"'{dead.name}' is not read after this", certificate=proof)


def _is_reusable(work: Work, node: Node, dead: Node) -> bool:
    aliases = work.aliases
    value = dead.meta.get("val")
    if not isinstance(value, Tensor) or not same_layout(node.meta.get("val"), value):
        return False
    if aliases.lives_in_input(dead) or not aliases.storages(dead):
        return False
    if any(stride == 0 for stride in value.stride()):
        return False
    return not aliases.shares_with_operands(node, dead) and not aliases.readers_after(dead, node)
