"""Which values share memory, and what may stand for what."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases
from tests.harness.compiling import aten, trace

X, Y = torch.randn(4, 4), torch.randn(4, 4)


@torch.library.custom_op("graphex_test::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x + 2


@pair.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("graphex_test::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


class Facts:
    """The facts of one graph, asked for by node name."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes: dict[str, Node] = {node.name: node for node in gm.graph.nodes}
        self.aliases = Aliases(gm.graph)

    def joined(self, left: str, right: str) -> bool:
        return self.aliases.may_alias(self.nodes[left], self.nodes[right])

    def written(self, name: str) -> bool:
        return self.aliases.is_written(self.nodes[name])

    def why_not(self, name: str, kept: str) -> str | None:
        return self.aliases.why_not_same(self.nodes[name], self.nodes[kept])


def facts(fn, *inputs: Tensor) -> Facts:
    return Facts(trace(fn, *(inputs or (X, Y))))


def test_each_input_has_memory_of_its_own():
    assert not facts(lambda x, y: aten.add.Tensor(x, y)).joined("x_1", "y_1")


def test_results_in_a_list_of_ours_have_memory_of_their_own():
    found = facts(lambda x, y: torch.ops.graphex.linears(x, [x, y], [None, None]))
    assert not found.joined("getitem", "getitem_1")
    assert not found.joined("getitem", "x_1")
    assert found.joined("getitem", "linears")


def test_results_in_a_list_of_others_may_be_parts_of_one_memory():
    assert facts(lambda x, y: aten.unsafe_split.Tensor(x, 2)).joined("getitem", "getitem_1")


def test_inputs_that_are_views_of_one_tensor_share_memory():
    gm = trace(lambda x, y: aten.add.Tensor(x, y), X, Y)
    x, y = (node for node in gm.graph.nodes if node.op == "placeholder")
    y.meta["val"] = x.meta["val"][:]
    assert Facts(gm).joined("x_1", "y_1")


def test_an_op_returns_fresh_memory():
    found = facts(lambda x, y: aten.add.Tensor(x, y))
    assert not found.joined("add", "x_1")
    assert not found.joined("add", "y_1")


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda x: aten.view.default(x, [16]), "view"),
        (lambda x: aten.slice.Tensor(x, 0, 1, 2), "slice_1"),
        (lambda x: aten.transpose.int(x, 0, 1), "transpose"),
        (lambda x: aten.expand.default(x, [2, 4, 4]), "expand"),
        (lambda x: aten.as_strided.default(x, [2], [1], 0), "as_strided"),
        (aten.detach.default, "detach"),
        (aten.alias.default, "alias"),
    ],
)
def test_a_view_shares_the_memory_of_what_it_looks_at(op, name):
    assert facts(lambda x, y: op(x), X, Y).joined(name, "x_1")


def test_a_view_of_a_view_shares_memory_with_the_first():
    found = facts(lambda x, y: aten.view.default(aten.transpose.int(aten.add.Tensor(x, y), 0, 1), [4, 4]))
    assert found.joined("view", "add")
    assert not found.joined("view", "x_1")


def test_an_op_that_writes_in_place_returns_its_first_argument():
    found = facts(lambda x, y: aten.add_.Tensor(x, y))
    assert found.joined("add_", "x_1")
    assert found.written("x_1")
    assert not found.written("y_1")


def test_a_write_to_a_view_is_a_write_to_the_whole():
    found = facts(lambda x, y: aten.zero_.default(aten.slice.Tensor(x, 0, 0, 1)))
    assert found.written("x_1")


def test_a_write_to_the_whole_is_a_write_to_the_view():
    def fn(x, y):
        part = aten.slice.Tensor(x, 0, 0, 1)
        aten.zero_.default(x)
        return aten.neg.default(part)

    assert facts(fn).written("slice_1")


def test_results_of_one_op_are_told_apart():
    found = facts(lambda x, y: aten.topk.default(x, 2))
    assert not found.joined("getitem", "getitem_1")


def test_taking_one_result_reads_no_other():
    found = facts(lambda x, y: [aten.neg.default(each) for each in aten.topk.default(x, 2)])
    users = found.aliases.users_of_memory(found.nodes["getitem"])
    assert [node.name for node in users] == ["topk", "getitem", "neg"]


def test_results_of_a_custom_op_are_told_apart():
    found = facts(lambda x, y: torch.ops.graphex_test.pair(x))
    assert not found.joined("getitem", "getitem_1")
    assert not found.joined("getitem", "x_1")


def test_a_custom_op_writes_what_its_schema_says():
    def fn(x, y):
        torch.ops.graphex_test.bump(x)
        return aten.neg.default(x)

    found = facts(fn)
    assert found.written("x_1")
    assert not found.written("y_1")


def test_the_parts_of_a_split_share_memory_with_the_whole():
    found = facts(lambda x, y: aten.split.Tensor(x, 2))
    assert found.joined("getitem", "x_1")
    assert found.joined("getitem", "getitem_1")


def test_a_list_of_copies_does_not_share_memory_with_the_whole():
    found = facts(lambda x, y: aten.split_copy.Tensor(x, 2))
    assert not found.joined("getitem", "x_1")


def test_auto_functionalized_results_are_fresh():
    graph = Graph()
    x = graph.placeholder("x")
    functional = torch._higher_order_ops.auto_functionalize.auto_functionalized
    node = graph.call_function(functional, (torch.ops.graphex_test.bump.default,), {"x": x})
    graph.output(node)
    found = Facts(GraphModule(torch.nn.Module(), graph))
    assert not found.joined("auto_functionalized", "x")
    assert not found.written("x")


def test_an_unknown_function_may_return_any_of_its_arguments():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(max, (x, y)))
    found = Facts(GraphModule(torch.nn.Module(), graph))
    assert found.joined("max_1", "x")
    assert found.joined("max_1", "y")


def test_a_higher_order_op_may_return_any_of_its_arguments():
    def fn(x, y):
        return torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (x, y))

    gm = trace(fn, X, Y)
    name = next(node.name for node in gm.graph.nodes if node.target is torch.ops.higher_order.cond)
    found = Facts(gm)
    assert found.joined(name, "x_1")
    assert not found.written("x_1")


def test_a_size_has_no_memory():
    gm = trace(lambda x: aten.view.default(x, [x.shape[0] * x.shape[1]]), X, dynamic=True)
    aliases = Aliases(gm.graph)
    sizes = [node for node in gm.graph.nodes if node.target in (aten.sym_size.int,) or "mul" in node.name]
    assert sizes
    assert all(aliases.storages(node) == frozenset() for node in sizes)


def test_memory_of_inputs_and_constants_belongs_to_the_caller():
    graph = Graph()
    x, constant = graph.placeholder("x"), graph.get_attr("constant")
    view = graph.call_function(aten.view.default, (constant, [16]))
    fresh = graph.call_function(aten.add.Tensor, (x, constant))
    graph.output((view, fresh))
    aliases = Aliases(graph)
    assert [aliases.lives_in_input(node) for node in (x, constant, view, fresh)] == [True, True, True, False]


@pytest.mark.parametrize("op", [aten.reshape.default, aten.atleast_1d.default, aten.contiguous.default], ids=str)
def test_an_op_made_of_others_may_return_a_view_or_a_copy(op):
    graph = Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(op, (x, [16]) if op is aten.reshape.default else (x,)) for _ in range(2))
    graph.output((first, second))
    aliases = Aliases(graph)
    assert aliases.may_alias(first, x)
    assert aliases.why_not_same(second, first)


def test_what_reaches_the_output_is_known_through_views():
    def fn(x, y):
        a = aten.add.Tensor(x, y)
        b = aten.mul.Tensor(x, y)
        return aten.view.default(a, [16]), aten.sum.default(b)

    found = facts(fn)
    assert found.aliases.reaches_output(found.nodes["add"])
    assert not found.aliases.reaches_output(found.nodes["mul"])


def test_writes_are_known_by_place():
    def fn(x, y):
        first = aten.sin.default(x)
        aten.add_.Tensor(x, 1)
        second = aten.cos.default(x)
        return aten.add.Tensor(first, second)

    found = facts(fn)
    end = found.aliases.last_read(found.nodes["x_1"])
    assert found.aliases.written_between(found.nodes["x_1"], found.nodes["sin"], end)
    assert not found.aliases.written_between(found.nodes["x_1"], found.nodes["cos"], end)


# -- may one stand for the other? ----------------------------------------------------------------------------------


def test_a_copy_used_inside_may_be_replaced():
    assert facts(lambda x, y: aten.neg.default(aten.clone.default(x))).why_not("clone", "x_1") is None


def test_a_view_may_always_be_replaced_by_its_equal():
    assert facts(lambda x, y: aten.alias.default(x)).why_not("alias", "x_1") is None


def test_a_returned_copy_of_an_input_may_not_be_replaced():
    found = facts(lambda x, y: aten.clone.default(x))
    assert found.why_not("clone", "x_1") == "an output would begin to share memory with an input"


def test_a_returned_copy_of_a_returned_value_may_not_be_replaced():
    def fn(x, y):
        a = aten.add.Tensor(x, y)
        return a, aten.clone.default(a)

    assert facts(fn).why_not("clone", "add") == "two outputs would begin to share memory"


def test_after_a_join_facts_hold_for_both():
    def fn(x, y):
        a = aten.add.Tensor(x, y)
        b, c = aten.clone.default(a), aten.clone.default(a)
        return b, c

    found = facts(fn)
    assert found.why_not("clone", "add") is None
    found.aliases.join(found.nodes["clone"], found.nodes["add"])
    assert found.joined("clone", "add")
    assert found.why_not("clone_1", "add") == "two outputs would begin to share memory"


def test_cost_is_linear_in_the_number_of_nodes():
    graph = Graph()
    node = graph.placeholder("x")
    for _ in range(20_000):
        node = graph.call_function(aten.alias.default, (node,))
    graph.output(node)
    aliases = Aliases(graph)
    assert len(aliases.storages(node)) == 1


def steps_of(question: Callable[[], object]) -> int:
    """How many calls a question takes."""
    question()  # facts that are gathered once
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1

    sys.setprofile(count)
    try:
        question()
    finally:
        sys.setprofile(None)
    return taken


@pytest.mark.parametrize("returned", [True, False])
def test_a_question_about_outputs_takes_as_long_for_many_as_for_few(returned):
    def steps(outputs: int) -> int:
        graph = Graph()
        x = graph.placeholder("x")
        *made, last = [graph.call_function(aten.relu.default, (x,)) for _ in range(outputs)]
        copy = graph.call_function(aten.clone.default, (last,))
        graph.output((*made, copy) if returned else tuple(made))
        aliases = Aliases(graph)
        return steps_of(lambda: (aliases.reaches_output(copy), aliases.why_not_same(copy, last)))

    assert steps(10) == steps(400)
