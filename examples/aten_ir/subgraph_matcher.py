"""`SubgraphMatcher`: find the places where a small graph occurs in a large one. Four flags say what counts as equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher
from tracing import aten_graph, through_the_pipeline

aten = torch.ops.aten


def matrices(count: int) -> list[torch.Tensor]:
    return [torch.randn(3, 3) for _ in range(count)]


def graph_of(fn: Callable[..., Any], inputs: int = 1) -> Graph:
    return aten_graph(fn, *matrices(inputs)).graph


def found(pattern: Graph, graph: Graph, **flags: bool) -> list[InternalMatch]:
    return SubgraphMatcher(pattern, **flags).match(graph)


def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(bias, x, weight))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight)


def record_linears(gm: GraphModule, seen: list[str]) -> None:
    """A pass that changes nothing: it records the names of the nodes that are a linear layer."""
    seen += [match.anchors[0].name for match in found(graph_of(linear, 3), gm.graph)]


if __name__ == "__main__":
    # A match: its anchors, the nodes of the graph for the nodes of the pattern, what stands for the inputs, and what
    # the pattern returns.
    (match,) = found(graph_of(linear, 3), graph_of(model, 3))
    assert match.anchors[0].target is aten.addmm.default
    assert len(match.placeholder_nodes) == 3
    assert [node.target for node in match.returning_nodes] == [aten.addmm.default]
    assert len(match.nodes_map) == 4

    # match_output: what the pattern returns must be what the graph returns.
    assert len(found(graph_of(linear, 3), graph_of(model, 3), match_output=True)) == 0
    assert len(found(graph_of(model, 3), graph_of(model, 3), match_output=True)) == 1

    # match_placeholder: inputs of the pattern must be inputs of the graph, and not just anything.
    assert len(found(graph_of(torch.relu), graph_of(model, 3))) == 1
    assert len(found(graph_of(torch.relu), graph_of(model, 3), match_placeholder=True)) == 0
    assert len(found(graph_of(torch.relu), graph_of(torch.relu), match_placeholder=True)) == 1

    # remove_overlapping_matches: of two matches that share a node only the first stays.
    twice, thrice = graph_of(lambda x: x.cos().cos()), graph_of(lambda x: x.cos().cos().cos())
    assert len(found(twice, thrice, remove_overlapping_matches=False)) == 2
    assert len(found(twice, thrice, remove_overlapping_matches=True)) == 1

    # ignore_literals: numbers need not be the same ones.
    plus_one, plus_two = graph_of(lambda x: x + 1), graph_of(lambda x: x + 2)
    assert len(found(plus_one, plus_two)) == 0
    assert len(found(plus_one, plus_two, ignore_literals=True)) == 1

    seen: list[str] = []
    through_the_pipeline(model, lambda gm: record_linears(gm, seen), *matrices(3))
    assert seen == ["addmm"]
