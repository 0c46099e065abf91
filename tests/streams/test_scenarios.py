"""Streams together with the other passes: closing, in-place writes, fusion, sorting, deadlocks, model code."""

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
from graphex.device import Cores, Device
from tests.streams.support import Finished, aten, events, find, in_scope, ours, scoped, trace

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

    done = Finished(fn, X, X + 1, passes=protected)
    assert not graphex.random_orders(done.gm, [X, X + 1]).differences


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
    for node, following in zip(order, order[1:], strict=False):
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


# -- model code ------------------------------------------------------------------------------------------------------


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

    for wrap in (False, True):
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


def test_a_tensor_recorded_on_a_stream_counts_as_used_there():
    gm = trace(lambda x: (x.sin().cos(), x.exp()), X)
    find(gm, aten.cos.default).meta["custom"] = {"stream": 1}
    with gm.graph.inserting_after(find(gm, aten.sin.default)):
        gm.graph.call_function(torch.ops.streams.record_stream.default, (find(gm, aten.sin.default), 2))
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


def test_bad_scopes_are_refused_at_once():
    with pytest.raises(graphex.InputError, match="label is a word"):
        graphex.scope.stream("")
    with pytest.raises(graphex.InputError, match="priority of stream 'a'"):
        graphex.scope.stream("a", priority=True)
    for cores in ((0, 1), (1, 0), (1, 10**6), (1.0, 1), (True, 1)):
        with pytest.raises(graphex.InputError, match="from 1 to"):
            graphex.scope.limit_core_num(*cores)


# -- deadlocks -------------------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("streams_test", "DEF")
LIBRARY.define("exchange(Tensor x) -> Tensor")
LIBRARY.impl("exchange", lambda x: x + 1, "CompositeExplicitAutograd")
torch.library.register_fake("streams_test::exchange", torch.empty_like, lib=LIBRARY)
exchange = torch.ops.streams_test.exchange


def three(x):
    return exchange(x), exchange(x * 2), exchange(x * 3)


def spread(gm, example_inputs, config):
    calls = [node for node in gm.graph.nodes if node.target is exchange.default]
    for label, node in zip("abc", calls, strict=True):
        node.meta["custom"] = {"graphex_stream": label}


@pytest.mark.parametrize(("need", "sets"), [(20, {2: 3}), (16, {3: 1}), (10, {})])
def test_kernels_that_need_too_many_cores_together_are_reported(monkeypatch, need, sets, recwarn):
    monkeypatch.setattr(Device, "cores", lambda self: Cores(24, 32))
    graphex.register_core_need(exchange, vectorcore=need)
    done = Finished(three, X, passes=spread, deadlock_check=True)
    (verdict,) = done.journal.deadlock_checks
    assert verdict.status == ("risk" if sets else "clean")
    sizes = [len(risk.nodes) for risk in verdict.risks]
    assert {size: sizes.count(size) for size in sizes} == sets
    text = str(verdict)
    assert ("'exchange' on a: 0 aicores" in text) if sets else ("no deadlock risk among 3 ops" in text)
    data = [record for record in json.loads(done.journal.to_json())["records"] if record["kind"] == "deadlock check"]
    assert len(data[0]["risks"]) == sum(sets.values())
    assert bool([warning for warning in recwarn if "may wait for each other" in str(warning.message)]) is bool(sets)


def test_order_and_limits_take_the_risk_away(monkeypatch):
    monkeypatch.setattr(Device, "cores", lambda self: Cores(24, 32))
    graphex.register_core_need(exchange, vectorcore=32)

    def limited(gm, example_inputs, config):
        spread(gm, example_inputs, config)
        for node in gm.graph.nodes:
            if node.target is exchange.default:
                node.meta["custom"]["graphex_cores"] = (24, 10)

    def one_after_the_other(gm, example_inputs, config):
        spread(gm, example_inputs, config)
        calls = [node for node in gm.graph.nodes if node.target is exchange.default]
        for first, second in zip(calls, calls[1:], strict=False):
            with gm.graph.inserting_before(second):
                node = gm.graph.call_function(ours.wait.default, ([first],))
            node.meta["custom"] = dict(second.meta["custom"])

    for placing in (limited, one_after_the_other):
        (verdict,) = Finished(three, X, passes=placing, deadlock_check=True).journal.deadlock_checks
        assert verdict.status == "clean"


def test_a_device_of_unknown_cores_is_not_checked_and_says_so():
    (verdict,) = Finished(three, X, passes=spread, deadlock_check=True).journal.deadlock_checks
    assert verdict.status == "not checked"
    assert "cores of the device 'cpu'" in str(verdict)


def test_a_bad_need_is_refused():
    with pytest.raises(graphex.InputError, match="takes an operator"):
        graphex.register_core_need("exchange", vectorcore=1)
    with pytest.raises(graphex.InputError, match="number of cores"):
        graphex.register_core_need(exchange, vectorcore=-1)
    with pytest.raises(graphex.InputError, match="says nothing"):
        graphex.register_core_need(exchange)
