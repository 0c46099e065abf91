"""Streams together with the other passes: closing, in-place writes, fusion, sorting, deadlocks, model code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # defines torch.ops.streams
from torch.fx import GraphModule

import graphex
from tests.harness.compiling import trace
from tests.harness.streams import Finished, aten, events, find, in_scope, ours, scoped

X = torch.randn(4, 4)


# -- closing ---------------------------------------------------------------------------------------------------------


def test_nested_streams_are_closed_by_events_and_only_by_those_that_are_needed():
    def fn(x):
        a = x @ x
        b = a @ x
        c = b @ x
        return c, x.cos()

    def placing(gm, example_inputs, config):
        products = [node for node in gm.graph.nodes if node.target is aten.mm.default]
        for label, product in zip("abc", products, strict=True):
            product.meta["custom"] = {"graphex_stream": label}

    done = Finished(fn, X, passes=placing)
    # one to start with, each product behind the one before, the end behind the last of them
    assert done.waits() == [("begin", "a"), ("mm", "b"), ("mm_1", "c"), ("mm_2", "(current)")]
    assert len(events(done.gm, ours.event_record.default)) == 4


def test_each_product_is_behind_its_wait():
    def fn(x):
        return [(x + i) @ x for i in range(3)]

    def placing(gm, example_inputs, config):
        for product in [node for node in gm.graph.nodes if node.target is aten.mm.default]:
            with gm.graph.inserting_before(product):
                gm.graph.call_function(ours.scope_enter.default, (["_user_stream_label"], ["side"]))
                gm.graph.call_function(ours.wait.default, ([product.args[0]],))
            with gm.graph.inserting_after(product):
                gm.graph.call_function(ours.scope_exit.default, ())

    done = Finished(fn, X, passes=placing, stream_safety="auto")
    order = done.order()
    for place, name in enumerate(order):
        if name.startswith("mm"):
            assert order[place - 1].startswith("wait add")


# -- writes in place -------------------------------------------------------------------------------------------------


def two_readers(x):
    made = x * 2
    return made.cos(), made.relu()  # relu could overwrite what cos reads


def record(gm: GraphModule, op: Any, tag: str, stream: str | None) -> None:
    with gm.graph.inserting_after(find(gm, op)):
        node = gm.graph.call_function(ours.tagged_event_record.default, (tag,))
    node.meta.update(val=None, custom={"graphex_stream": stream} if stream else {})


def wait(gm: GraphModule, op: Any, tag: str, stream: str | None) -> None:
    with gm.graph.inserting_before(find(gm, op)):
        node = gm.graph.call_function(ours.tagged_event_wait.default, (tag,))
    node.meta.update(val=None, custom={"graphex_stream": stream} if stream else {})


@pytest.mark.parametrize("protection", ["event", "chained", "too early", "nothing"])
def test_memory_is_reused_only_where_events_protect_the_reader(protection):
    gm = trace(two_readers, X)
    find(gm, aten.cos.default).meta["custom"] = {"graphex_stream": "side"}
    if protection == "event":
        record(gm, aten.cos.default, "read", "side")
        wait(gm, aten.relu.default, "read", None)
    elif protection == "chained":
        record(gm, aten.cos.default, "read", "side")
        wait(gm, aten.relu.default, "read", "third")
        with gm.graph.inserting_before(find(gm, aten.relu.default)):
            node = gm.graph.call_function(ours.tagged_event_record.default, ("passed on",))
        node.meta.update(val=None, custom={"graphex_stream": "third"})
        wait(gm, aten.relu.default, "passed on", None)
    elif protection == "too early":
        record(gm, aten.mul.Tensor, "made", None)
        wait(gm, aten.cos.default, "made", "side")
    done = Finished(gm)
    made = {rewrite.rule for rewrite in done.journal.rewrites}
    assert ("compute_in_place" in made) is (protection in ("event", "chained"))
    assert not graphex.random_orders(done.gm, [X]).differences
    for got, wanted in zip(done.run(X.clone()), two_readers(X), strict=True):
        assert torch.equal(got, wanted)


def test_a_cache_is_written_behind_its_readers_or_not_at_all():
    def fn(x, cache):
        seen = cache.cos()
        cache.add_(x)
        return seen

    side = in_scope("side", aten.cos.default)
    with pytest.raises(graphex.StreamError, match="'cos' on stream 'side' may still be reading") as caught:
        Finished(fn, X, X + 1, passes=side)
    assert "test_scenarios.py" in str(caught.value)

    def protected(gm, example_inputs, config):
        side(gm, example_inputs, config)
        with gm.graph.inserting_before(find(gm, aten.add.Tensor)):
            gm.graph.call_function(ours.wait.default, ([find(gm, aten.cos.default)],))

    assert not graphex.random_orders(Finished(fn, X, X + 1, passes=protected).gm, [X, X + 1]).differences


# -- fusion and sorting ----------------------------------------------------------------------------------------------


def squared_sum(x, y):
    return (x * y) + y


def fused(x, y):
    return torch.addcmul(y, x, y)


RULE = graphex.replacement(squared_sum, fused, (torch.randn(2, 2), torch.randn(2, 2)), name="addcmul")


def pair(x, y):
    a = x * y
    b = a + y
    return b.relu(), x.cos()


def sort(gm, example_inputs, config):
    """A topological sort that knows nothing of streams: everything that can be late is."""
    order: list[Any] = []
    done: set[Any] = set()

    def visit(node):
        if node not in done:
            done.add(node)
            for value in node.all_input_nodes:
                visit(value)
            order.append(node)

    nodes = list(gm.graph.nodes)
    for node in [n for n in nodes if n.op == "placeholder"] + [n for n in nodes if not n.users and n.op != "output"]:
        visit(node)
    visit(nodes[-1])
    for node, following in pairwise(order):
        node.append(following)


def recorded_scope(gm, example_inputs, config):
    scoped(gm, "side", aten.mul.Tensor, aten.add.Tensor)
    with gm.graph.inserting_after(find(gm, aten.add.Tensor)):
        gm.graph.call_function(ours.tagged_event_record.default, ("done",))
    with gm.graph.inserting_before(find(gm, aten.cos.default)):
        gm.graph.call_function(ours.tagged_event_wait.default, ("done",))


def test_a_match_and_a_sort_keep_every_node_on_its_stream_and_before_its_record():
    done = Finished(pair, X, X + 1, passes=recorded_scope, after=sort, fusion_rules=[RULE])
    assert [rule.matches for rule in done.journal.rules if rule.rule == "addcmul"] == [1]
    assert done.streams == {"side": ("addcmul_default",), "(current)": ("relu", "cos")}
    order = done.order()
    assert order.index("addcmul_default") < order.index("record done") < order.index("wait done on (current)")
    assert order.index("wait done on (current)") < order.index("cos")
    torch.testing.assert_close(done.results, pair(X, X + 1))


def test_a_match_crosses_neither_streams_nor_events():
    across = Finished(pair, X, X + 1, passes=in_scope("side", aten.mul.Tensor), fusion_rules=[RULE])

    def between(gm, example_inputs, config):
        scoped(gm, "side", aten.mul.Tensor, aten.add.Tensor)
        with gm.graph.inserting_after(find(gm, aten.mul.Tensor)):
            gm.graph.call_function(ours.tagged_event_record.default, ("done",))
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ours.tagged_event_wait.default, ("done",))

    parted = Finished(pair, X, X + 1, passes=between, fusion_rules=[RULE])
    for done, reason in ((across, "run on different streams"), (parted, "their stream records or waits between")):
        assert any(reason in refusal.reason for refusal in done.journal.refusals)
        assert not any(rule.matches for rule in done.journal.rules if rule.rule == "addcmul")


def test_parts_of_a_cat_are_computed_in_place_on_their_own_stream():
    big = torch.randn(64, 64)

    def fn(x):
        return torch.cat([x @ x, x @ x.t(), x.sin() @ x])

    done = Finished(fn, big, passes=in_scope("side", aten.sin.default))
    assert not graphex.random_orders(done.gm, [big]).differences
    torch.testing.assert_close(done.results, fn(big))
