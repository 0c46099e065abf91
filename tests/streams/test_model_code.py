"""Streams and events in model code: torch's own, and `graphex.scope`."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # defines torch.ops.streams
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx import GraphModule

import graphex
from graphex.frontend.dynamo_graph import keep_stream_calls
from tests.harness.compiling import trace
from tests.harness.paper import PaperDevice
from tests.harness.processes import python
from tests.harness.streams import Finished, aten, find, ours
from tests.harness.tape import run_on

X = torch.randn(4, 4)


def test_a_stream_of_torch_in_model_code_is_a_stream_of_the_graph():
    side = torch.Stream(device="cpu")

    def fn(x):
        with side:
            y = x.sin()
        return y + x.cos()

    done = Finished(fn, X)
    assert sorted(done.streams.values()) == [("cos", "add"), ("sin",)]
    assert torch.equal(done.results, fn(X))


def wrapped(gm: GraphModule, op: Any, *numbers: int, after: Any) -> None:
    """torch 2.12 and newer: the op in a graph of its own, with the value that must be there before it."""
    value = find(gm, after)
    inner = torch.fx.Graph()
    given = inner.placeholder("dep_0")
    inner.output((inner.call_function(op, numbers), given))
    name = f"subgraph_{len(gm._modules)}"
    setattr(gm, name, GraphModule(torch.nn.Module(), inner))
    with gm.graph.inserting_after(value):
        body = gm.graph.get_attr(name)
    with gm.graph.inserting_after(body):
        both = gm.graph.call_function(control_deps, ((value,), body, value))
    both.meta["val"] = (None, value.meta["val"])
    with gm.graph.inserting_after(both):
        passed = gm.graph.call_function(operator.getitem, (both, 1))
    passed.meta["val"] = value.meta["val"]
    value.replace_all_uses_with(passed, delete_user_cb=lambda user: user not in (both, passed))


def test_events_of_torch_arrive_bare_and_wrapped():
    streams = torch.ops.streams

    def fn(x):
        return x.sin() + x.cos()

    for wrap in (False, True) if hasattr(streams, "synchronize_stream") else (False,):
        gm = trace(fn, X)
        find(gm, aten.sin.default).meta["custom"] = {"stream": 1}
        find(gm, aten.cos.default).meta["custom"] = {"stream": 2}
        find(gm, aten.add.Tensor).meta["custom"] = {"stream": 2}
        if wrap:
            wrapped(gm, streams.record_event.default, 7, 1, after=aten.sin.default)
            wrapped(gm, streams.wait_event.default, 7, 2, after=aten.cos.default)
        else:
            with gm.graph.inserting_after(find(gm, aten.sin.default)):
                gm.graph.call_function(streams.record_event.default, (7, 1))
            with gm.graph.inserting_after(find(gm, aten.cos.default)):
                gm.graph.call_function(streams.wait_event.default, (7, 2))
        done = Finished(gm, stream_safety="strict")
        assert ("torch event 7", "torch stream 2") in done.waits()
        assert not any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in done.gm.graph.nodes)
        assert torch.equal(done.run(X), fn(X))


def with_events(stream: int) -> GraphModule:
    """`sin` on stream 1; an event recorded on `stream` and waited for on the current one."""
    gm = trace(lambda x: x.sin() + x.cos(), X)
    find(gm, aten.sin.default).meta["custom"] = {"stream": 1}
    with gm.graph.inserting_after(find(gm, aten.cos.default)):
        gm.graph.call_function(torch.ops.streams.wait_event.default, (7, 1))
    with gm.graph.inserting_after(find(gm, aten.sin.default)):
        gm.graph.call_function(torch.ops.streams.record_event.default, (7, stream))
    return gm


def test_a_stream_with_events_and_no_work_has_a_lane(monkeypatch):
    run_on(monkeypatch, PaperDevice())
    done = Finished(with_events(2))
    assert ("torch event 7", "torch stream 1") in done.waits()
    assert torch.equal(done.run(X), X.sin() + X.cos())


def test_events_that_nobody_has_read_are_an_error():
    with pytest.raises(graphex.StreamError, match="place_nodes"):
        Finished(with_events(1), disable_passes=["place_nodes"])


def test_a_tensor_recorded_on_a_stream_counts_as_used_there():
    gm = trace(lambda x: (x.sin().cos(), x.exp()), X)
    find(gm, aten.cos.default).meta["custom"] = {"stream": 1}
    with gm.graph.inserting_after(find(gm, aten.sin.default)):
        recorded = gm.graph.call_function(torch.ops.streams.record_stream.default, (find(gm, aten.sin.default), 2))
    recorded.meta["val"] = None
    done = Finished(gm)
    assert any(node.target is ours.used_on.default for node in done.gm.graph.nodes)
    assert any(stream == "torch stream 2" for _, stream in done.waits())  # it takes part, so it is closed too
    assert torch.equal(done.run(X)[0], X.sin().cos())


def test_scopes_of_model_code_reach_the_backward_too():
    def fn(x, w):
        with graphex.scope.stream("experts"):
            y = (x @ w).relu()
        return y + x.cos()

    x, w = X.clone().requires_grad_(), torch.randn(4, 4, requires_grad=True)
    run = torch.compile(fn, backend="graphex", options={"stream_safety": "shuffle"})
    got = torch.autograd.grad(run(x, w).sum(), [x, w])
    wanted = torch.autograd.grad(fn(x, w).sum(), [x, w])
    torch.testing.assert_close(got, wanted)
    journal = graphex.journal(run)
    assert ["experts" in record.streams for record in journal.streams] == [True, True]
    assert sum(counts["orders"] for counts in journal.counts.values()) == 16


def test_warming_up_a_program_that_is_tried_in_other_orders_leaves_its_inputs_as_they_were():
    def fn(x, count):
        with graphex.scope.stream("experts"):
            y = x.relu()
        count.add_(1)
        return y + x.cos()

    run, count = torch.compile(fn, backend="graphex", options={"stream_safety": "shuffle"}), torch.zeros(())
    graphex.warm_up(run, [(X, count)])
    assert count == 0
    run(X, count)
    assert count == 1


def test_bad_scopes_are_refused_at_once():
    with pytest.raises(graphex.InputError, match="label is a word"):
        graphex.scope.stream("")
    with pytest.raises(graphex.InputError, match="priority of stream 'a'"):
        graphex.scope.stream("a", priority=True)
    for cores in ((0, 1), (1, 0), (1, 10**6), (1.0, 1), (True, 1)):
        with pytest.raises(graphex.InputError, match="from 1 to"):
            graphex.scope.limit_core_num(*cores)


def test_a_host_that_waits_is_kept_and_is_not_captured():
    synchronize = getattr(torch.ops.streams, "synchronize_stream", None)
    if synchronize is None:
        pytest.skip("torch 2.11 calls a method; see below")
    gm = trace(lambda x: x.sin() + x.cos(), X)
    find(gm, aten.sin.default).meta["custom"] = {"stream": 1}
    with gm.graph.inserting_after(find(gm, aten.sin.default)):
        gm.graph.call_function(synchronize.default, (1,))
    done = Finished(gm)
    assert "host_wait_default" in " ".join(done.order())
    assert not done.journal.fallbacks
    assert torch.equal(done.run(X), X.sin() + X.cos())


def test_methods_that_tracing_would_lose_become_ops():
    """torch 2.11 leaves `s.wait_stream(t)` as a call on objects, which AOTAutograd would run once and forget."""
    look_up = torch._dynamo.graph_bytecode_inputs.get_external_object_by_index
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(look_up, (number,)) for number in (3, 5))
    graph.call_method("wait_stream", (first, second))
    graph.call_method("record_event", (first, second))
    graph.call_method("wait_event", (first, second))
    graph.call_method("synchronize", (first,))
    graph.call_method("record_stream", (x, second))
    graph.call_method("wait_stream", (x, first))  # not a stream that is known
    graph.output(x)
    gm = GraphModule(torch.nn.Module(), graph)
    keep_stream_calls(gm)
    streams = torch.ops.streams
    assert [(node.target, node.args) for node in gm.graph.nodes if node.op == "call_function"][2:] == [
        (streams.wait_stream.default, (3, 5)),
        (streams.record_event.default, (5, 3)),
        (streams.wait_event.default, (5, 3)),
        (ours.host_wait.default, ()),
        (ours.record_tagged_stream.default, (x, "torch stream 5")),
    ]
    assert [node.target for node in gm.graph.nodes if node.op == "call_method"] == ["wait_stream"]


@pytest.mark.parametrize("restored", [True, False])
def test_set_stream_places_what_follows_and_has_to_be_set_back(monkeypatch, restored):
    monkeypatch.setattr("graphex.frontend.dynamo_graph.is_current_stream", lambda number: number == 0)
    look_up = torch._dynamo.graph_bytecode_inputs.get_external_object_by_index
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first, second, current = (graph.call_function(look_up, (number,)) for number in (1, 2, 0))
    before = graph.call_function(torch.sin, (x,))
    for stream in (first, second, first, current)[: 4 if restored else 3]:
        graph.call_function(torch.cuda.set_stream, (stream,))
        graph.call_function(torch.cos, (before,))
    graph.output(before)
    gm = GraphModule(torch.nn.Module(), graph)
    if not restored:
        with pytest.raises(graphex.StreamError, match="does not set the stream it was called on back"):
            keep_stream_calls(gm)
        return
    keep_stream_calls(gm)
    calls = [node for node in gm.graph.nodes if node.target in (torch.sin, torch.cos, torch.cuda.set_stream)]
    assert [(node.meta.get("custom") or {}).get("stream") for node in calls] == [None, 1, 2, 1, None]


def test_left_out_passes_leave_one_stream():
    def fn(x):
        with graphex.scope.stream("side"):
            y = x.sin()
        return y + x.cos()

    for left_out in (["place_nodes"], ["schedule_streams"], ["place_nodes", "schedule_streams"]):
        done = Finished(fn, X, disable_passes=left_out)
        assert not done.journal.streams
        assert torch.equal(done.results, fn(X))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ran = python("-W", "ignore", "-m", "tests.streams.simulated")
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def test_results_are_right_and_nothing_falls_back(found):
    assert all(each["right"] for each in found.values())
    assert not any(each["fallbacks"] for each in found.values())


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="before, the current stream is known by comparing, and all are equal here"
)
def test_work_is_on_its_stream_behind_the_users_events(found):
    for name, each in found.items():
        assert sorted(each["streams"][0]) == [["cos", "add"], ["sin"]], name
    assert found["with_events"]["events"] == [[2, 0]]
    assert found["with_wait_stream"]["events"] == [[2, 0]]
    assert found["with_set_stream"]["events"] == [[0, 2]]
    assert found["with_nothing"]["events"] == [[0, 2]]
