"""A node that stands for many nodes: its contract, and the passes that ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.operator_support import OperatorSupportBase

import graphex
from graphex.analysis import Aliases, is_effectful, written_arguments
from graphex.analysis.effects import RegionContract, declare_region, region_of
from graphex.analysis.memory import contract_of, predicted_peak
from graphex.errors import Refusal
from graphex.rewrite.partition import Partitioner

aten = torch.ops.aten


def trace(fn: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(fn, decomposition_table={}, tracing_mode="fake")(*inputs)


class Supports(OperatorSupportBase):
    def __init__(self, *ops: Any) -> None:
        self.ops = ops

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node.target in self.ops


class MakeRegions:
    """A user's pass: what it supports becomes submodules, with the contracts of their graphs or without."""

    name = "make_regions"

    def __init__(self, *ops: Any, declared: bool) -> None:
        self.ops, self.declared = ops, declared
        self.regions = 0

    def __call__(self, gm: GraphModule) -> None:
        Partitioner(gm, Supports(*self.ops), True).partition_and_fuse()
        for node in gm.graph.find_nodes(op="call_module"):
            self.regions += 1
            if self.declared:
                contract = contract_of(gm.get_submodule(str(node.target)))
                assert isinstance(contract, RegionContract)
                declare_region(node, contract)


def compiled(fn: Callable[..., Any], *ops: Any, declared: bool, inputs: list[Tensor]) -> graphex.Journal:
    """The journal of a graph in which these ops are regions; its results are those of eager."""
    regions = MakeRegions(*ops, declared=declared)
    options = {"post_grad_custom_pre_pass": regions, "verify": True}
    run = graphex.compile_fx(trace(fn, *inputs), options=options)
    for _ in range(2):
        mine, theirs = ([each.clone() for each in inputs] for _ in range(2))
        torch.testing.assert_close(list(run(*mine)), list(fn(*theirs)), rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert regions.regions
    return graphex.journal(run)


def rewritten(journal: graphex.Journal, rule: str) -> list[str]:
    return [record.nodes[0] for record in journal.rewrites if record.rule == rule]


X = torch.randn(4, 6)


def around(x: Tensor) -> tuple[Tensor, ...]:
    h = x * 2
    y = (h.sin() * h.cos()).sin()
    return h.exp(), y.abs()


def test_neighbours_of_a_region_that_writes_nothing_are_computed_in_place():
    ops = (aten.sin.default, aten.cos.default)
    assert rewritten(compiled(around, *ops, declared=True, inputs=[X]), "compute_in_place") == ["mul_1", "exp", "abs_1"]


def test_without_a_contract_its_memory_may_be_anybodys():
    ops = (aten.sin.default, aten.cos.default)
    assert rewritten(compiled(around, *ops, declared=False, inputs=[X]), "compute_in_place") == ["exp"]


def written(x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    h = x * 2
    before = h.sum()
    h.add_(k)
    return before, h.sum(), k.sum(), k.sum() + 1


@pytest.mark.parametrize("declared", [True, False])
def test_a_write_of_a_region_is_respected(declared):
    journal = compiled(written, aten.add_.Tensor, declared=declared, inputs=[X, X + 1])
    assert rewritten(journal, "equal_calls") == ["sum_4"]  # of `k`, which is only read


def test_a_region_that_writes_an_input_of_the_graph_says_so():
    def f(c: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        first = c.sum()
        c.add_(k)
        return first, c.sum()

    journal = compiled(f, aten.add_.Tensor, declared=True, inputs=[X, X + 1])
    assert rewritten(journal, "equal_calls") == []


def region_in(gm: GraphModule, *args: Any, target: Any = torch.nn.functional.gelu, value: Any = None) -> Node:
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.call_function(target, args)
    node.meta["val"] = X if value is None else value
    return node


def opaque(*_: Tensor) -> Tensor:
    raise AssertionError


def test_a_callable_without_a_contract_writes_and_aliases_everything():
    gm = trace(lambda x, y: x + y, X, X)
    x, y = gm.graph.find_nodes(op="placeholder")
    node = region_in(gm, x, y, target=opaque)
    aliases = Aliases(gm.graph)
    assert written_arguments(node) == [x, y]
    assert is_effectful(node)
    assert aliases.may_alias(node, x)
    assert aliases.is_owned_elsewhere(node)


def test_a_contract_is_asked_for_writes_and_aliases():
    gm = trace(lambda x, y: x + y, X, X)
    x, y = gm.graph.find_nodes(op="placeholder")
    none = frozenset[int]()
    node = region_in(gm, x, y, target=opaque)
    declare_region(node, RegionContract(frozenset({1}), none, (none,), (frozenset({0}),)))
    aliases = Aliases(gm.graph)
    assert not is_effectful(node)
    assert written_arguments(node) == []
    assert not aliases.may_alias(node, x)
    assert not aliases.is_owned_elsewhere(node)
    assert aliases.read_by(node) == aliases.storages(y)
    declare_region(node, RegionContract(frozenset({1}), frozenset({0}), (frozenset({0}),), (none,)))
    aliases = Aliases(gm.graph)
    assert is_effectful(node)
    assert written_arguments(node) == [x]
    assert aliases.storages(node) == aliases.storages(x)


def test_a_contract_ends_when_the_node_calls_something_else():
    gm = trace(lambda x: x + 1, X)
    node = region_in(gm, *gm.graph.find_nodes(op="placeholder"), target=opaque)
    declare_region(node, RegionContract(frozenset({0}), frozenset(), (frozenset(),), (frozenset({0}),)))
    node.target = torch.nn.functional.gelu
    assert region_of(node) is None


def test_scratch_memory_counts_for_the_peak():
    gm = trace(lambda x: x + 1, X)
    node = region_in(gm, *gm.graph.find_nodes(op="placeholder"), target=opaque)
    none = frozenset[int]()
    declare_region(node, RegionContract(none, none, (none,), (frozenset({0}),)))
    before = predicted_peak(gm.graph, Aliases(gm.graph))
    declare_region(node, RegionContract(none, none, (none,), (frozenset({0}),), scratch=1000))
    assert predicted_peak(gm.graph, Aliases(gm.graph)) == before + 1000


def test_the_contract_of_a_graph():
    def f(c: Tensor, k: Tensor, x: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        c[0].copy_(k[0])
        y = x.sin()
        return c, y, y.view(-1), x.t()

    found = contract_of(trace(f, *(X.clone() for _ in range(4))))
    assert isinstance(found, RegionContract)
    assert found.reads >= {1, 2}
    assert 3 not in found.touched
    assert found.writes == {0}
    assert found.aliases == ({0}, frozenset(), frozenset(), {2})
    assert found.allocates == (frozenset(), {0}, {0}, frozenset())
    assert found.scratch == 0
    assert not found.may_raise


def test_the_scratch_of_a_graph_is_what_it_does_not_return():
    found = contract_of(trace(lambda x: (x.sin() @ x.cos().t()).sum(), X))
    assert isinstance(found, RegionContract)
    assert found.scratch == 2 * X.nbytes + 4 * 4 * 4 - 4


def test_a_graph_that_may_raise_says_so():
    found = contract_of(trace(lambda x, i: x[i], X, torch.tensor([1])))
    assert isinstance(found, RegionContract)
    assert found.may_raise


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: torch.rand_like(x) + x, "'rand_like' has an effect besides what it writes"),
        (lambda x: (CONSTANT + x, CONSTANT.add_(1)), "the constant '_tensor_constant0' is written or returned"),
    ],
)
def test_a_graph_with_other_effects_has_no_contract(fn, reason):
    found = contract_of(make_fx(fn, decomposition_table={})(X))
    assert isinstance(found, Refusal)
    assert found.reason == reason


CONSTANT = torch.ones(4, 6)


def test_a_contract_that_is_not_about_the_node_is_refused():
    gm = trace(lambda x: x + 1, X)
    (x,) = gm.graph.find_nodes(op="placeholder")
    none = frozenset[int]()
    with pytest.raises(ValueError, match="names inputs that it has not: it has 1"):
        declare_region(region_in(gm, x), RegionContract(frozenset({1}), none, (none,), (none,)))
    with pytest.raises(ValueError, match="no call with plain positional arguments"):
        declare_region(region_in(gm, [x]), RegionContract(none, frozenset({0}), (none,), (none,)))
    with pytest.raises(ValueError, match="is not about its 2 outputs"):
        declare_region(region_in(gm, x, value=(X, X)), RegionContract(none, none, (none,), (none,)))
    with pytest.raises(ValueError, match="its schema is its contract"):
        declare_region(region_in(gm, x, target=aten.sin.default), RegionContract(none, none, (none,), (none,)))
