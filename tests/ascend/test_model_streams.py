"""Streams and events that a compiled function makes itself, by the names of torch.npu."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchair

import graphex
from tests.harness import ascend
from tests.harness.ascend import on_npu
from tests.harness.compiling import Observer


class Compiled(ascend.Compiled):
    """As one graph, or not at all."""

    fullgraph = True


def two_streams(x, w):
    """The matmuls run side by side, each on a stream of its own, ordered by events."""
    first, second = torch.npu.Stream(), torch.npu.Stream()
    ready, done = torch.npu.Event(), torch.npu.Event()
    a = torch.relu(x)
    ready.record()
    with torch.npu.stream(first):
        ready.wait(first)
        b = a @ w
        done.record(first)
    second.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(second):
        second.wait_event(ready)
        c = a.sin() @ w
    d = a + 1
    done.wait()
    torch.npu.current_stream().wait_stream(second)
    return b + c + d


def test_the_multi_stream_model_is_one_graph_with_its_streams():
    seen = Observer()
    compiled = Compiled(two_streams, post_grad_custom_post_pass=[seen])
    for _ in range(3):
        compiled(*on_npu(torch.randn(4, 4), torch.randn(4, 4)))
    (record,) = compiled.journal.streams
    assert sorted(record.streams.values()) == [("mm",), ("relu", "add", "add_1", "add_2"), ("sin", "mm_1")]
    assert compiled.captures() == ["captured"]
    assert not compiled.journal.breaks
    host = [torch.randn(4, 4), torch.randn(4, 4)]
    tried = graphex.random_orders(seen.graphs[-1], on_npu(*host), orders=200)
    assert tried.tried == 200
    assert not tried.differences, tried.differences[0]


def by_record_event(x, s):
    with torch.npu.stream(s):
        y = x.sin()
    s.record_event().wait()
    return y + 1


def by_set_stream(x, s):
    current = torch.npu.current_stream()
    torch.npu.set_stream(s)
    y = x.sin()
    torch.npu.set_stream(current)
    current.wait_stream(s)
    return y + 1


def by_with(x, s):
    with s:
        y = x.sin()
    torch.npu.current_stream().wait_stream(s)
    return y + 1


def by_record_stream(x, s):
    y = x * 2
    y.record_stream(s)
    s.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(s):
        z = y.sin()
    torch.npu.current_stream().wait_stream(s)
    return z + 1


@pytest.mark.parametrize(
    "use", [by_record_event, by_set_stream, by_with, by_record_stream], ids=lambda use: use.__name__
)
@pytest.mark.parametrize("made", ["plain", "for a device", "with a priority"])
def test_a_stream_is_used_in_every_way(use, made):
    def fn(x):
        if made == "plain":
            s = torch.npu.Stream()
        elif made == "for a device":
            s = torch.npu.Stream(device="npu:0")
        else:
            s = torch.npu.Stream(priority=-1)
        return use(x, s)

    torch._dynamo.reset()
    compiled = Compiled(fn)
    for _ in range(2):
        compiled(*on_npu(torch.randn(4)))
    assert len(compiled.journal.streams[0].streams) == 2
    assert compiled.captures() == ["captured"]


def test_a_stream_that_something_else_made_is_used_by_its_address():
    side = torch.npu.Stream()
    known = torch.npu.ExternalStream(side.npu_stream)
    assert known.npu_stream == side.npu_stream

    torch._dynamo.reset()
    compiled = Compiled(lambda x: by_record_stream(x, known))
    for _ in range(2):
        compiled(*on_npu(torch.randn(4)))
    assert len(compiled.journal.streams[0].streams) == 2
    assert compiled.captures() == ["captured"]


@pytest.mark.parametrize("what", ["stream", "event"])
def test_waiting_on_the_host_is_right_and_told(what):
    def fn(x):
        s, e = torch.npu.Stream(), torch.npu.Event()
        with torch.npu.stream(s):
            y = x.sin()
            e.record(s)
        (s if what == "stream" else e).synchronize()
        return y + 1

    torch._dynamo.reset()
    compiled = Compiled(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        compiled(*on_npu(torch.randn(4)))
    assert len(compiled.journal.streams[0].streams) == 2
    assert any("capture" in record.what for record in compiled.journal.fallbacks)


def test_calls_leave_nothing_behind():
    import torch._dynamo.graph_bytecode_inputs as objects

    def fn(x):
        s = torch.npu.Stream()
        with torch.npu.stream(s):
            y = x.sin()
        torch.npu.current_stream().wait_stream(s)
        return y + 1

    torch._dynamo.reset()
    compiled = Compiled(fn)
    x = torch.randn(4).npu()
    compiled(x)
    kept = len(objects.keep_alive)
    for _ in range(20):
        compiled(x)
    assert len(objects.keep_alive) == kept


def in_a_stream(x):
    s = torch.npu.Stream()
    with torch.npu.stream(s):
        y = x.sin()
        print("here")
    return y + 1


def in_a_scope(x):
    with torchair.scope.npu_stream_switch("side"):
        y = x.sin()
        print("here")
    return y + 1


@pytest.mark.parametrize("fn", [in_a_stream, in_a_scope], ids=lambda fn: fn.__name__)
def test_a_scope_that_breaks_a_graph_is_a_warning_with_the_line(fn):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="npugraph_ex")
    x = torch.randn(4).npu()
    with pytest.warns(graphex.GraphexWarning, match=r"breaks inside of a stream's scope.*print\(\"here\"\)"):
        result = compiled(x)
    assert torch.equal(result.cpu(), fn(x).cpu())
    assert any("test_model_streams.py" in record.line for record in graphex.journal(compiled).fallbacks)
