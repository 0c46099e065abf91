"""The subgraph rewriter: a pattern and a replacement, both plain functions over ATen ops; filters say where it fits."""

from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import ReplacedPatterns, replace_pattern_with_filters
from tracing import aten_graph, ops, through_the_pipeline

import graphex

aten = torch.ops.aten


def pattern(x: Any, y: Any) -> Any:
    return aten.mul.Tensor(aten.add.Tensor(x, y), y)


def replacement(x: Any, y: Any) -> Any:
    """(x + y) * y  ->  x * y + y * y"""
    return aten.add.Tensor(aten.mul.Tensor(x, y), aten.mul.Tensor(y, y))


def y_is_a_vector(match: InternalMatch, original: Graph, pattern: Graph) -> bool:
    """A filter sees a match before it is replaced: this one checks the shape of the node matched by `y`."""
    _, y = match.placeholder_nodes
    return y.meta["val"].dim() == 1


def rewrite(gm: GraphModule) -> list[ReplacedPatterns]:
    return replace_pattern_with_filters(gm, pattern, replacement, [y_is_a_vector])


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * y - (x + x) * x  # `x` is a matrix: the second place does not fit


if __name__ == "__main__":
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])

    gm = aten_graph(f, x, y)
    (replaced,) = rewrite(gm)
    # What was found and what came in its place: the anchor is the last node of the match, nodes_map leads from the
    # nodes of the pattern to those of the graph, and `replacements` are the new ones.
    assert replaced.anchor.target is aten.mul.Tensor
    assert {node.name for node in replaced.nodes_map if node.op == "placeholder"} == {"x", "y"}
    assert len(replaced.replacements) == 3
    assert ops(gm.graph).count("add.Tensor") == 2
    assert torch.equal(gm(x, y), f(x, y))

    # New nodes have no metadata of their own. `nodes_map` says which nodes they stand for.
    for node in replaced.replacements:
        node.meta.setdefault("stack_trace", replaced.anchor.meta.get("stack_trace"))

    # Through the pipeline it is done for you: values, source lines and origins are filled in.
    kept = graphex.Rewrite(pattern, replacement, [y_is_a_vector], name="distribute")
    assert torch.equal(through_the_pipeline(f, kept, x, y), f(x, y))
    assert len(kept.replaced) == 1
    assert torch.equal(through_the_pipeline(f, (pattern, replacement), x, y), f(x, y))
