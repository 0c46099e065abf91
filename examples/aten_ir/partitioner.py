"""Partitioners: put the largest supported regions of a graph into submodules.

torch's `CapabilityBasedPartitioner` and graphex's `Partitioner` take the same arguments. The second needs linear time,
keeps reads and writes of memory in order, and keeps metadata on the nodes that call the submodules.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase, any_chain, chain
from tracing import aten_graph, through_the_pipeline

from graphex.rewrite.partition import Partitioner

aten = torch.ops.aten


class Calls(OperatorSupportBase):
    """Supports calls of some ops."""

    def __init__(self, *targets: Any) -> None:
        self.targets = targets

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node.op == "call_function" and node.target in self.targets


class OnMatrices(OperatorSupportBase):
    """Supports nodes that compute a matrix."""

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dim() == 2


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x + y) * y
    z = z.sort(-1).values  # not supported: it separates the parts before and after it
    return ((z + y) * 2).view(-1) + 1


ADD_AND_MUL = Calls(aten.add.Tensor, aten.mul.Tensor)
X, Y = torch.randn(2, 3), torch.randn(2, 3)


def parts(partitioner: type, support: OperatorSupportBase, **arguments: Any) -> list[int]:
    """How many nodes each proposed partition has."""
    proposed = partitioner(aten_graph(f, X, Y), support, **arguments).propose_partitions()
    return sorted(len(partition.nodes) for partition in proposed)


if __name__ == "__main__":
    for kind in (CapabilityBasedPartitioner, Partitioner):
        partitioner = kind(aten_graph(f, X, Y), ADD_AND_MUL)
        partitions = partitioner.propose_partitions()
        fused = partitioner.fuse_partitions(partitions)
        assert {node.target for node in fused.graph.nodes if node.op == "call_module"} == {"fused_0", "fused_1"}
        assert torch.equal(fused(X, Y), f(X, Y))

        # A partition of one node is left out, unless all may be alone, or its op may.
        only_mul, mul = Calls(aten.mul.Tensor), "torch.ops.aten.mul.Tensor"
        assert parts(kind, only_mul) == []
        assert parts(kind, only_mul, allows_single_node_partition=True) == [1, 1]
        assert parts(kind, only_mul, allowed_single_node_partition_ops=[mul]) == [1, 1]

        # Ops that compute nothing do not count, and can be taken off the ends of a partition.
        with_views, view = Calls(aten.view.default, aten.mul.Tensor), "torch.ops.aten.view.default"
        assert parts(kind, with_views) == [2]
        assert parts(kind, with_views, non_compute_ops=[view]) == []
        partitioner = kind(aten_graph(f, X, Y), with_views, True, non_compute_ops=[view])
        partitions = partitioner.propose_partitions()
        partitioner.remove_bookend_non_compute_ops(partitions)
        assert all(node.target is aten.mul.Tensor for partition in partitions for node in partition.nodes)

        # chain: all must support a node. any_chain: one is enough.
        assert parts(kind, chain(ADD_AND_MUL, OnMatrices()), allows_single_node_partition=True) == [2, 2]
        assert parts(kind, any_chain(Calls(aten.view.default), ADD_AND_MUL)) == [2, 4]

    call = next(node for node in Partitioner(aten_graph(f, X, Y), ADD_AND_MUL).partition_and_fuse().graph.nodes
                if node.op == "call_module")  # fmt: skip
    assert tuple(call.meta["val"].shape) == (2, 3)

    # The pipeline takes the operator support itself as a pass.
    assert torch.equal(through_the_pipeline(f, ADD_AND_MUL, X, Y), f(X, Y))
