"""Scopes, records and waits in a graph: what they do, and what is said about those that cannot be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import graphex
from tests.harness.streams import Finished, aten, find, in_scope, ours, scoped

X = torch.randn(4, 4)


def two(x):
    return x.sin() + 1, x.cos() * 2


def branches(x):
    left = (x @ x).relu()
    right = x.cos()
    return left + right


@pytest.mark.parametrize("namespace", ["graphex", "air", "npugraph_ex"])
def test_the_ops_exist_under_three_names(namespace):
    ops = getattr(torch.ops, namespace)

    def placing(gm, example_inputs, config):
        with gm.graph.inserting_before(find(gm, aten.sin.default)):
            gm.graph.call_function(ops.scope_enter.default, (["_user_stream_label"], ["side"]))
        with gm.graph.inserting_after(find(gm, aten.sin.default)):
            gm.graph.call_function(ops.scope_exit.default, ())
            gm.graph.call_function(ops.tagged_event_record.default, ("ready",))
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ops.tagged_event_wait.default, ("ready",))

    done = Finished(two, X, passes=placing)
    assert done.streams == {"side": ("sin",), "(current)": ("add", "cos", "mul")}
    assert ("ready", "(current)") in done.waits()
    assert torch.equal(done.results[0], two(X)[0])


def test_scopes_nest_and_the_inner_one_wins():
    def placing(gm, example_inputs, config):
        scoped(gm, "outer", aten.mm.default, aten.cos.default)
        scoped(gm, "inner", aten.relu.default, aten.relu.default)

    done = Finished(branches, X, passes=placing)
    assert done.streams == {"outer": ("mm", "cos"), "inner": ("relu",), "(current)": ("add",)}
    assert torch.equal(done.results, branches(X))


def test_a_value_can_be_waited_for():
    def placing(gm, example_inputs, config):
        scoped(gm, "side", aten.sin.default, aten.sin.default)
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ours.wait.default, ([find(gm, aten.sin.default)],))

    done = Finished(two, X, passes=placing)
    order = done.order()
    assert order.index("record sin") < order.index("wait sin on (current)") < order.index("cos")


def test_one_stream_needs_no_events():
    def placing(gm, example_inputs, config):
        with gm.graph.inserting_after(find(gm, aten.sin.default)):
            moment = gm.graph.call_function(ours.record.default, ())
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ours.wait.default, ([moment],))

    done = Finished(two, X, passes=placing)
    assert not done.journal.streams
    assert not any(name.startswith(("record", "wait")) for name in done.order())


def enter(gm: GraphModule, *args: Any) -> None:
    with gm.graph.inserting_before(find(gm, aten.sin.default)):
        gm.graph.call_function(ours.scope_enter.default, args)


def test_what_cannot_be_right_is_said_with_the_node_and_the_pass():
    label = ["_user_stream_label"]

    def an_exit_alone(gm, example_inputs, config):
        with gm.graph.inserting_after(find(gm, aten.sin.default)):
            gm.graph.call_function(ours.scope_exit.default, ())

    def never_left(gm, example_inputs, config):
        enter(gm, label, ["side"])

    def never_recorded(gm, example_inputs, config):
        with gm.graph.inserting_before(find(gm, aten.sin.default)):
            gm.graph.call_function(ours.tagged_event_wait.default, ("ready",))

    def nothing_to_wait_for(gm, example_inputs, config):
        with gm.graph.inserting_before(find(gm, aten.sin.default)):
            gm.graph.call_function(ours.wait.default, ([],))

    def lists_that_differ(gm, example_inputs, config):
        enter(gm, label, [])

    def no_label(gm, example_inputs, config):
        enter(gm, label, [""])

    def no_cores(gm, example_inputs, config):
        enter(gm, ["_op_aicore_num"], ["0"])

    def two_priorities(gm, example_inputs, config):
        for op, priority in ((aten.sin.default, "0"), (aten.cos.default, "-1")):
            with gm.graph.inserting_before(find(gm, op)):
                keys = ["_user_stream_label", "_user_stream_priority"]
                gm.graph.call_function(ours.scope_enter.default, (keys, ["side", priority]))
            with gm.graph.inserting_after(find(gm, op)):
                gm.graph.call_function(ours.scope_exit.default, ())

    said = {
        an_exit_alone: "'scope_exit_default' .* leaves a scope that was never entered",
        never_left: "'scope_enter_default' .* enters a scope that is never left",
        never_recorded: "waits for the event 'ready', which nothing before it records",
        nothing_to_wait_for: "waits for nothing",
        lists_that_differ: "takes a list of keys and a list of as many values",
        no_label: "sets '_user_stream_label' to ''",
        no_cores: "sets '_op_aicore_num' to '0'.* 1",
        two_priorities: "'side' the priority -1; it already has 0",
    }
    for placing, sentence in said.items():
        with pytest.raises(graphex.StreamError, match=sentence) as caught:
            Finished(two, X, passes=placing, strict=False)
        if "priority" not in sentence:
            assert f"of your pass '{placing.__name__}'" in str(caught.value)


def test_a_key_that_means_nothing_is_on_record():
    def placing(gm, example_inputs, config):
        enter(gm, ["_user_stream_label", "_super_kernel"], ["side", "x"])
        with gm.graph.inserting_after(find(gm, aten.sin.default)):
            gm.graph.call_function(ours.scope_exit.default, ())

    done = Finished(two, X, passes=placing)
    assert any("'_super_kernel' means nothing here" in refusal.reason for refusal in done.journal.refusals)


def test_core_limits_are_carried_and_said_not_to_be_applied():
    def placing(gm, example_inputs, config):
        keys = (["_op_aicore_num", "_op_vectorcore_num"], ["4", "8"])
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ours.scope_enter.default, keys)
        with gm.graph.inserting_after(find(gm, aten.mul.Tensor)):
            gm.graph.call_function(ours.scope_exit.default, ())
        scoped(gm, "side", aten.mul.Tensor, aten.mul.Tensor)

    with pytest.warns(graphex.GraphexWarning, match="core limits are not applied"):
        done = Finished(two, X, passes=placing)
    limited = [node.name for node in done.gm.graph.nodes if (node.meta.get("custom") or {}).get("graphex_cores")]
    assert limited == ["cos", "mul"]  # the switch to another stream keeps the limit
    assert [(fallback.what, fallback.node) for fallback in done.journal.fallbacks] == [
        ("core limits are not applied", "cos")
    ]


def test_dead_code_goes_and_its_events_stay():
    def fn(x):
        return (x.sin() * 2).relu(), x.cos()

    def placing(gm, example_inputs, config):
        scoped(gm, "side", aten.sin.default, aten.mul.Tensor)
        with gm.graph.inserting_after(find(gm, aten.mul.Tensor)):
            gm.graph.call_function(aten.exp.default, (find(gm, aten.mul.Tensor),))

    done = Finished(fn, X, passes=placing)
    assert "exp" not in " ".join(done.order())
    assert done.waits() == [("begin", "side"), ("mul", "(current)")]


def test_equal_calls_and_views_do_not_cross_streams():
    def fn(x):
        return x.t().sin() + x.cos(), x.cos() * 2

    def placing(gm, example_inputs, config):
        scoped(gm, "side", aten.sin.default, aten.cos.default)

    done = Finished(fn, X, passes=placing)
    assert done.streams["side"] == ("sin", "cos")
    assert "cos_1" in done.streams["(current)"]
    assert ("t", "side") not in done.waits()  # a view is no work: nothing waits for it


def test_strict_names_the_event_that_is_missing():
    with pytest.raises(graphex.StreamError, match="'add' on the current stream uses what 'relu' makes"):
        Finished(branches, X, passes=in_scope("side", aten.mm.default, aten.relu.default), stream_safety="strict")

    def with_events(gm, example_inputs, config):
        scoped(gm, "side", aten.mm.default, aten.relu.default)
        with gm.graph.inserting_after(find(gm, aten.relu.default)):
            moment = gm.graph.call_function(ours.record.default, ())
        with gm.graph.inserting_before(find(gm, aten.add.Tensor)):
            gm.graph.call_function(ours.wait.default, ([moment],))

    assert torch.equal(Finished(branches, X, passes=with_events, stream_safety="strict").results, branches(X))


def test_a_later_pass_can_wait_for_the_tag_of_an_earlier_one():
    def recording(gm, example_inputs, config):
        scoped(gm, "side", aten.sin.default, aten.sin.default)
        keys = (["_user_stream_label"], ["side"])
        with gm.graph.inserting_before(find(gm, aten.add.Tensor)):
            gm.graph.call_function(ours.scope_enter.default, keys)
            gm.graph.call_function(ours.tagged_event_record.default, ("ready",))
            gm.graph.call_function(ours.scope_exit.default, ())

    def waiting(gm, example_inputs, config):
        with gm.graph.inserting_before(find(gm, aten.cos.default)):
            gm.graph.call_function(ours.tagged_event_wait.default, ("ready",))

    done = Finished(two, X, passes=recording, after=waiting)
    order = done.order()
    assert order.index("record ready") < order.index("wait ready on (current)", order.index("add")) < order.index("cos")


def test_a_graph_without_inputs_has_a_beginning():
    def fn():
        with graphex.scope.stream("side"):
            y = torch.arange(4) * 2
        return y + torch.arange(4)

    done = Finished(fn)
    assert ("begin", "side") in done.waits()
    assert torch.equal(done.results, fn())
