"""Compute into memory that nobody needs any more.

    before:  a = mul(x, y); b = add(a, x); c = relu(b)
    after:   a = mul(x, y); b = add_(a, x); c = relu_(a)

An op that has an in-place twin writes over its first argument if the graph has allocated it (it is no input and no
tensor that a custom op may have kept), it is alone in its storage, has the result's layout, is read by nobody
afterwards (not through a view either) and shares no memory with the other arguments.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from graphex.analysis import is_random, known_equal, known_true, same_layout
from graphex.analysis.memory import bytes_of
from graphex.analysis.twins import in_place_twin
from graphex.passes.base import GraphPass, Work


class ReuseDeadMemory(GraphPass):
    name = "reuse_dead_memory"
    option = "inplace_pass"
    rule = "compute_in_place"
    moves_writes = True

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
    value, aliases = dead.meta.get("val"), work.aliases
    if not isinstance(value, Tensor) or not same_layout(node.meta.get("val"), value) or value.is_complex():
        return False
    if not _fills_its_storage(value) or aliases.is_owned_elsewhere(dead) or aliases.is_absolute(dead):
        return False
    if aliases.reaches_output(node) and not all(known_true(size != 1) for size in value.shape):
        return False  # fake and real strides may differ where a dimension has one element, and the user can see them
    return not aliases.shares_with_operands(node, dead) and not aliases.readers_after(dead, node)


def _fills_its_storage(value: Tensor) -> bool:
    """A part of a larger storage would keep the whole alive, and its offset would show."""
    if any(stride == 0 for stride in value.stride()):
        return False
    size = value.numel() * value.element_size()
    return known_equal(value.storage_offset(), 0) and known_equal(value.untyped_storage().nbytes(), size)
