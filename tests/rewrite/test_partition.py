"""The linear partitioner: partitions are convex, wait for each other in no circle, and there cannot be fewer."""

from __future__ import annotations

import cProfile
import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase, any_chain, chain, create_op_support

from graphex.analysis.graphs import origins
from graphex.rewrite.metadata import stamp_origins
from graphex.rewrite.partition import Partitioner
from tests.harness.compiling import trace

aten = torch.ops.aten
SUPPORTED, OTHER = aten.add.Tensor, aten.mul.Tensor


class Supports(OperatorSupportBase):
    def __init__(self, *targets: Any) -> None:
        self.targets = targets

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node.op == "call_function" and node.target in self.targets


def graph_of(steps: list[tuple[bool, int, int]]) -> GraphModule:
    """A graph with one call for each step: supported or not, and which earlier values it adds or multiplies."""
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for supported, first, second in steps:
        args = (values[first % len(values)], values[second % len(values)])
        values.append(graph.call_function(SUPPORTED if supported else OTHER, args))
    graph.output(tuple(values[2:]))
    return GraphModule(torch.nn.Module(), graph)


def reaches(start: set[Node]) -> set[Node]:
    """Everything that uses what is in `start`, directly or not."""
    found: set[Node] = set()
    waiting = [user for node in start for user in node.users]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.users)
    return found


def longest_alternation(gm: GraphModule) -> int:
    """The most supported stretches, with something unsupported between them, on one path."""
    best: dict[Node, tuple[int, bool]] = {}
    for node in gm.graph.nodes:
        is_supported = node.target is SUPPORTED
        counts = [0]
        for value in node.all_input_nodes:
            count, was = best[value]
            counts.append(count + (was and not is_supported))
        best[node] = (max(counts), is_supported)
    return len({count for count, supported in best.values() if supported})


programs = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(programs, st.booleans())
def test_partitions_are_convex_complete_and_as_few_as_possible(steps, apart):
    gm = graph_of(steps)
    found = Partitioner(gm, Supports(SUPPORTED), True, skip_horizontal_fusion=apart).propose_partitions()
    everything = [node for partition in found for node in partition.nodes]
    assert sorted(everything) == [node for node in gm.graph.nodes if node.target is SUPPORTED]
    for partition in found:
        inside = set(partition.nodes)
        outside = {user for node in inside for user in node.users} - inside
        assert not (reaches(outside) | outside) & inside, "a path leaves the partition and comes back"
    if not apart:
        assert len(found) == longest_alternation(gm)


@settings(max_examples=25, deadline=None)
@given(programs, st.booleans())
def test_the_fused_module_computes_the_same(steps, apart):
    gm, x = graph_of(steps), torch.randn(2, 2, dtype=torch.float64)
    wanted = gm(x, x + 1)
    partitioner = Partitioner(gm, Supports(SUPPORTED), True, skip_horizontal_fusion=apart)
    fused = partitioner.partition_and_fuse()
    assert not any(node.target is SUPPORTED for node in fused.graph.nodes)
    torch.testing.assert_close(fused(x, x + 1), wanted, rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(programs)
def test_there_are_never_more_partitions_than_torch_finds(steps):
    theirs = CapabilityBasedPartitioner(graph_of(steps), Supports(SUPPORTED), True).propose_partitions()
    ours = Partitioner(graph_of(steps), Supports(SUPPORTED), True).propose_partitions()
    assert len(ours) <= len(theirs)


def test_a_graph_of_twice_the_nodes_takes_twice_the_steps_and_few_for_each():
    def function_calls(nodes: int) -> int:
        steps = [(n % 5 != 4, n + 1, max(n - 3, 0) if n % 7 else 0) for n in range(nodes)]
        partitioner, profile = Partitioner(graph_of(steps), Supports(SUPPORTED), True), cProfile.Profile()
        assert len(profile.runcall(partitioner.propose_partitions)) > 100
        return sum(entry.callcount for entry in profile.getstats())

    assert function_calls(3000) < min(2.5 * function_calls(1500), 100 * 3000)


def test_a_single_node_is_a_partition_only_where_it_is_allowed():
    def proposed(**kwargs: Any) -> int:
        return len(Partitioner(graph_of([(True, 0, 1)]), Supports(SUPPORTED), **kwargs).propose_partitions())

    assert proposed() == 0
    assert proposed(allows_single_node_partition=True) == 1
    assert proposed(allowed_single_node_partition_ops=["torch.ops.aten.add.Tensor"]) == 1


def test_ops_that_compute_nothing_do_not_make_a_partition_and_are_taken_off_its_ends():
    def f(x):
        return ((x.view(-1) + 1).relu() * 2).view(2, 2)

    view = "torch.ops.aten.view.default"
    gm = trace(f, torch.ones(2, 2))
    supports = Supports(aten.view.default, aten.add.Tensor, aten.relu.default, aten.mul.Tensor)
    partitioner = Partitioner(gm, supports, non_compute_ops=[view])
    (partition,) = partitioner.propose_partitions()
    assert len(partition.nodes) == 5
    partitioner.remove_bookend_non_compute_ops([partition])
    assert [node.target for node in sorted(partition.nodes)] == [aten.add.Tensor, aten.relu.default, aten.mul.Tensor]
    assert Partitioner(gm, Supports(aten.view.default), non_compute_ops=[view]).propose_partitions() == []


def test_a_part_of_a_tuple_goes_with_the_tuple():
    gm = trace(lambda x: x.topk(2)[0] + 1, torch.randn(4))
    (partition,) = Partitioner(gm, Supports(aten.topk.default), True).propose_partitions()
    assert {node.target for node in partition.nodes} == {aten.topk.default, operator.getitem}


def test_reads_and_writes_keep_their_order():
    def f(x, cache):
        seen = cache + 1  # reads the old values
        cache.mul_(2)
        again = cache + 1  # reads the new ones
        return seen, again

    x, cache = torch.zeros(3), torch.arange(3.0)
    gm = trace(f, x, cache)
    fused = Partitioner(gm, Supports(aten.add.Tensor), True).partition_and_fuse()
    assert sum(node.op == "call_module" for node in fused.graph.nodes) == 2
    found = fused(x, cache.clone())
    torch.testing.assert_close(found, f(x, cache.clone()))


def test_random_numbers_are_drawn_in_the_same_order():
    def f(x):
        a = torch.rand_like(x)
        b = torch.randn_like(x) + 1
        return torch.rand_like(x) * 2, a, b

    gm, x = trace(f, torch.ones(3)), torch.ones(3)
    fused = Partitioner(gm, Supports(aten.rand_like.default), True).partition_and_fuse()
    torch.manual_seed(3)
    wanted = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(fused(x), wanted)


def test_fused_nodes_keep_values_lines_and_origins():
    gm = trace(lambda x: ((x + 1).relu() * 2, (x + 1).relu()), torch.ones(3))
    stamp_origins(gm.graph)
    fused = Partitioner(gm, Supports(aten.add.Tensor, aten.relu.default)).partition_and_fuse()
    (call,) = (node for node in fused.graph.nodes if node.op == "call_module")
    assert {name.partition("_")[0] for name in origins(call)} == {"add", "relu"}
    for node in fused.graph.nodes:
        assert node.op == "output" or node.meta["val"] is not None


@pytest.mark.parametrize("combine", [chain, any_chain])
def test_support_is_combined_with_the_functions_of_torch(combine: Callable[..., OperatorSupportBase]):
    both = combine(Supports(aten.add.Tensor, aten.relu.default), create_op_support(lambda _, n: "relu" not in n.name))
    (partition,) = Partitioner(trace(lambda x: (x + 1).relu() * 2, torch.ones(3)), both, True).propose_partitions()
    found = {node.target for node in partition.nodes}
    assert found == ({aten.add.Tensor} if combine is chain else {aten.add.Tensor, aten.relu.default, aten.mul.Tensor})


def test_partitions_that_are_not_convex_are_refused():
    gm = graph_of([(True, 0, 1), (False, 2, 2), (True, 3, 3)])
    partitioner = Partitioner(gm, Supports(SUPPORTED), True)
    first, second = partitioner.propose_partitions()
    first.nodes.update(second.nodes)
    with pytest.raises(ValueError, match="not convex"):
        partitioner.fuse_partitions([first])


def test_the_module_is_found_by_its_deprecated_name_too():
    assert import_module("graphex.passes.partition").Partitioner is Partitioner
