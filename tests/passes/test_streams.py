"""Memory is not shared between streams that nothing orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import graphex
from tests.harness.compiling import trace

aten = torch.ops.aten
X = torch.randn(8, 8)


def placed(gm: GraphModule, streams: dict[Any, int]) -> GraphModule:
    """Put the calls of some ops on streams."""
    for node in gm.graph.nodes:
        if node.target in streams:
            node.meta["custom"] = {"stream": streams[node.target]}
    return gm


def after(gm: GraphModule, target: Any, op: Any, *numbers: int | str) -> Node:
    """Insert a synchronisation after the first call of `target`."""
    node: Node = next(node for node in gm.graph.nodes if node.target is target)
    with gm.graph.inserting_after(node):
        made = gm.graph.call_function(op, numbers)
    made.meta["val"] = None
    return made


def rules(gm: GraphModule) -> tuple[list[str], list[str]]:
    """The rewrites that were made, and why others were not."""
    journal = graphex.journal(graphex.compile_fx(gm))
    return [record.rule for record in journal.rewrites], [record.reason for record in journal.refusals]


def two_readers(x: Tensor) -> tuple[Tensor, Tensor]:
    made = x * 2
    return made.cos(), made.relu()  # relu could overwrite what cos reads


def update(x: Tensor, cache: Tensor) -> Tensor:
    seen = cache.cos()
    cache.copy_(cache.relu())
    return seen


UNORDERED = "uses the same memory on another stream, and nothing orders the two"


def test_a_value_read_on_another_stream_is_not_overwritten():
    assert "compute_in_place" in rules(trace(two_readers, X))[0]
    made, refused = rules(placed(trace(two_readers, X), {aten.cos.default: 1}))
    assert "compute_in_place" not in made
    assert any(UNORDERED in reason and "'cos'" in reason for reason in refused)


def test_an_event_makes_it_safe():
    gm = placed(trace(two_readers, X), {aten.mul.Tensor: 2, aten.cos.default: 1, aten.relu.default: 2})
    after(gm, aten.mul.Tensor, torch.ops.streams.wait_stream.default, 1, 2)
    after(gm, aten.cos.default, torch.ops.streams.wait_stream.default, 2, 1)
    assert "compute_in_place" in rules(gm)[0]


def test_an_input_read_on_another_stream_is_not_written_in_place():
    assert "write_input_in_place" in rules(trace(update, X, X + 1))[0]
    gm = placed(trace(update, X, X + 1), {aten.cos.default: 1})
    after(gm, aten.cos.default, torch.ops.graphex.tagged_event_record.default, "read").meta["custom"] = {"stream": 1}
    after(gm, aten.relu.default, torch.ops.graphex.tagged_event_wait.default, "read")  # in time for the copy alone
    made, refused = rules(gm)
    assert "write_input_in_place" not in made
    assert any(UNORDERED in reason for reason in refused)


def test_a_write_that_nothing_orders_with_a_read_of_another_stream_is_refused():
    with pytest.raises(graphex.StreamError, match=r"'copy_' on the current stream writes .* which 'cos' on stream"):
        rules(placed(trace(update, X, X + 1), {aten.cos.default: 1}))


def test_equal_calls_on_two_streams_stay_two_and_the_journal_says_so():
    gm = trace(lambda x: x.cos() + x.cos(), X)
    first = next(node for node in gm.graph.nodes if node.target is aten.cos.default)
    first.meta["custom"] = {"stream": 1}
    made, refused = rules(gm)
    assert "equal_calls" not in made
    assert refused.count("equal to 'cos', but on another stream") == 1


def decode(q: Tensor, k: Tensor, v: Tensor, angle: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Any:
    turned_q, turned_k = torch.ops.graphex.rotary_qk(q, k, angle, angle)
    keys.index_copy_(2, at, turned_k)
    values.index_copy_(2, at, v)
    return turned_q.relu(), angle.sin()


def test_a_cache_write_is_not_moved_behind_an_event() -> None:
    """Whoever waits for the event expects the key in its cache."""
    rows, cache = [torch.randn(1, 2, 1, 8) for _ in range(4)], torch.randn(1, 2, 16, 8)
    for event in (False, True):
        gm = placed(trace(decode, *rows, torch.tensor([5]), cache, cache.clone()), {aten.sin.default: 1})
        if event:
            after(gm, aten.index_copy_.default, torch.ops.streams.record_event.default, 7, 0)
        journal = graphex.journal(graphex.compile_fx(gm, options={"lift_idioms": "always"}))
        made = [record.rule for record in journal.rewrites if "rotary" in record.rule]
        assert made == (["rotary_write"] if event else ["rotary_qkv_write"])
