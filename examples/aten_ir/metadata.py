"""Rewritten nodes keep the metadata of the old ones: value, source line, and the names of the replaced nodes."""

import torch
from torch.fx import GraphModule
from tracing import through_the_pipeline

import graphex

aten = torch.ops.aten


def rsqrt_instead(gm: GraphModule) -> None:
    """reciprocal(sqrt(x))  ->  rsqrt(x): the new nodes are created without metadata"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.reciprocal.default):
        (root,) = node.args
        if root.target is aten.sqrt.default and len(root.users) == 1:
            with gm.graph.inserting_after(node):
                made = gm.graph.call_function(aten.rsqrt.default, root.args)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            gm.graph.erase_node(root)


def look(gm: GraphModule) -> None:
    """A later pass sees nodes with complete metadata."""
    (made,) = gm.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    info = graphex.node_info(made)
    assert tuple(made.meta["val"].shape) == (2,)
    assert info.source.startswith("metadata.py:")
    assert set(info.origins) == {"sqrt", "reciprocal"}
    print(f"{made.name} stands for {', '.join(info.origins)} of {info.source}")


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sqrt().reciprocal()


if __name__ == "__main__":
    x = torch.tensor([4.0, 16.0])
    assert torch.equal(through_the_pipeline(f, [rsqrt_instead, look], x), torch.tensor([0.5, 0.25]))
