"""npugraph_ex's scenarios 37 to 46: streams, events and core limits, by the names of torch.npu and torchair."""

from __future__ import annotations

import pytest
import torch
import torchair

import graphex
from graphex.records import DeadlockChecked
from tests.harness.ascend import Compiled, called, on_npu

aten = torch.ops.aten


def schedule(compiled: Compiled) -> dict[str, tuple[str, ...]]:
    """The nodes of each stream, events left out, as they run."""
    (record,) = compiled.journal.streams
    return record.streams


def streams_of(compiled: Compiled) -> int:
    return len(schedule(compiled))


def test_scenario_37_nested_streams_are_closed_by_events():
    def f(x):
        with torchair.scope.npu_stream_switch("outer"):
            a = x @ x
            with torchair.scope.npu_stream_switch("inner"):
                b = a.relu()
            c = a + b
        return c.sin()

    compiled = called(f, 4, 4)
    assert streams_of(compiled) == 3
    assert compiled.journal.streams[0].added_events >= 3
    assert compiled.captures() == ["captured"]


def test_scenario_38_work_of_another_stream_is_preceded_by_a_wait():
    def f(x, y):
        a = x @ y
        with torchair.scope.npu_stream_switch("side"):
            b = a @ y
        return b @ x

    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(3, 3), torch.randn(3, 3)))
    ops = [op for op in compiled.ops() if "mm" in op or "event" in op]
    products = [place for place, op in enumerate(ops) if "mm" in op]
    assert all("event_wait" in "".join(ops[max(place - 3, 0) : place]) for place in products[1:])


def test_scenario_39_record_stream_of_model_code():
    side = torch.npu.Stream()

    def f(x):
        y = x + 1
        y.record_stream(side)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y * 2
        torch.npu.current_stream().wait_stream(side)
        return z + 1

    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(3)))


def test_scenario_40_streams_that_are_entered_are_left_in_their_order():
    first, second = torch.npu.Stream(), torch.npu.Stream()

    def f(x):
        first.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(first):
            a = x.sin()
            second.wait_stream(first)
            with torch.npu.stream(second):
                b = a.cos()
            first.wait_stream(second)
            c = b + a
        torch.npu.current_stream().wait_stream(first)
        return c * 2

    compiled = Compiled(f)
    before = torch.npu.current_stream()
    for _ in range(3):
        compiled(*on_npu(torch.randn(3)))
    assert torch.npu.current_stream() == before
    assert streams_of(compiled) == 3


def test_scenario_40_set_stream_places_what_follows_until_it_is_set_back():
    side = torch.npu.Stream()

    def f(x):
        current = torch.npu.current_stream()
        side.wait_stream(current)
        torch.npu.set_stream(side)
        y = x.sin()
        torch.npu.set_stream(current)
        current.wait_stream(side)
        return y * 2

    compiled = called(f, 3)
    assert streams_of(compiled) == 2


def test_scenario_40_a_stream_that_is_not_set_back_is_an_error():
    side = torch.npu.Stream()

    def f(x):
        torch.npu.set_stream(side)
        return x.sin()

    with pytest.raises(graphex.GraphexError, match="set_stream"):
        torch.compile(f, backend="npugraph_ex")(*on_npu(torch.randn(3)))


def test_scenario_40_a_scope_that_is_not_left_is_an_error():
    def enter_only(gm, example_inputs, config):
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        with gm.graph.inserting_before(first):
            gm.graph.call_function(torch.ops.air.scope_enter.default, (["_user_stream_label"], ["side"]))

    compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex", options={"post_grad_custom_pre_pass": enter_only})
    with pytest.raises(graphex.GraphexError, match="scope"):
        compiled(torch.ones(2))


def test_scenario_41_nothing_grows_from_call_to_call():
    def f(x):
        with torchair.scope.npu_stream_switch("side"):
            y = x @ x
        return y + x

    compiled = called(f, 3, 3)
    before = len(compiled.journal.records)
    for _ in range(5):
        compiled(*on_npu(torch.randn(3, 3)))
    assert len(compiled.journal.records) == before


@pytest.mark.parametrize("kind", ["wait", "wait_event", "record", "chained", "before"])
def test_scenario_42_events_of_model_code(kind):
    side, event = torch.npu.Stream(), torch.npu.Event()

    def f(x):
        current = torch.npu.current_stream()
        if kind == "before":
            event.record(current)
            event.wait(side)
        else:
            side.wait_stream(current)
        with torch.npu.stream(side):
            y = x.sin()
            if kind == "record":
                event.record(side)
            elif kind != "before":
                event.record()
        if kind == "wait":
            event.wait()
        elif kind in ("wait_event", "record"):
            current.wait_event(event)
        elif kind == "chained":
            event.wait(current)
        else:
            current.wait_stream(side)
        return y * 2

    called(f, 3)


def test_scenario_42_without_an_event_the_strict_setting_refuses():
    def f(x):
        with torchair.scope.npu_stream_switch("side"):
            y = x.sin()
        return y * 2

    compiled = torch.compile(f, backend="npugraph_ex", options={"stream_safety": "strict"})
    with pytest.raises(graphex.GraphexError, match="stream"):
        compiled(*on_npu(torch.randn(3)))


def test_scenario_43_streams_without_capture():
    def f(x):
        with torchair.scope.npu_stream_switch("side"):
            y = x @ x
        return y + 1

    compiled = called(f, 3, 3, force_eager=True)
    assert compiled.captures() == []
    assert streams_of(compiled) == 2


def placed(namespace):
    """The documented pass: the product and its absolute value on a stream, the difference after them."""

    def custom_pass(gm, example_inputs, config):
        graph, ops = gm.graph, getattr(torch.ops, namespace)
        for node in list(graph.nodes):
            if node.target is aten.mm.default:
                with graph.inserting_before(node):
                    graph.call_function(ops.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
            elif node.target is aten.abs.default:
                with graph.inserting_after(node):
                    record = graph.call_function(ops.record.default)
                with graph.inserting_after(record):
                    graph.call_function(ops.scope_exit.default)
            elif node.target is aten.sub.Tensor:
                with graph.inserting_before(node):
                    graph.call_function(ops.wait.default, ([record],))

    return custom_pass


@pytest.mark.parametrize("namespace", ["air", "npugraph_ex", "graphex"])
@pytest.mark.parametrize("option", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_scenario_44_scopes_of_a_custom_pass(namespace, option):
    def f(x):
        product = torch.mm(x, x)
        return torch.abs(product) + 1, x - product

    compiled = Compiled(f, **{option: placed(namespace), "inplace_pass": False})
    for _ in range(3):
        compiled(*on_npu(torch.randn(3, 3)))
    side = next(names for stream, names in schedule(compiled).items() if stream == "stream_1")
    assert [name for name in side if name in ("mm", "abs_1")] == ["mm", "abs_1"]
    assert not {"sub", "add"} & set(side)
    assert compiled.journal.streams[0].users_events >= 1


def test_scenario_45_core_limits_nest_and_are_inherited_by_streams():
    def f(x):
        with torchair.scope.limit_core_num(8, 16):
            a = x + 1
            with torchair.scope.limit_core_num(4, 8):
                b = a * 2
            with torchair.scope.npu_stream_switch("side"):
                c = a.sin()
        return b + c

    compiled = Compiled(f)
    with pytest.warns(graphex.GraphexWarning, match="core limits"):
        compiled(*on_npu(torch.randn(3)))


def test_scenario_46_the_deadlock_check_finds_nothing_in_a_small_graph():
    def f(x):
        with torchair.scope.npu_stream_switch("side"):
            y = x @ x
        return y + x.sin()

    compiled = called(f, 3, 3, deadlock_check=True)
    (record,) = compiled.journal.of(DeadlockChecked)
    assert (record.status, record.risks) == ("clean", ())
