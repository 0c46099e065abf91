"""Which calls can raise on the host, asked of single nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from graphex.analysis.dependencies import can_raise, lost_without

aten, ops = torch.ops.aten, torch.ops.graphex
FLOATS, WHOLE, INDEX = (4, torch.float32), (4, torch.int64), (2, torch.int64)


def call(op: Any, *args: Any, device: str = "cpu") -> Node:
    """A node that calls `op`; a pair of a size and a type stands for a tensor."""
    graph, mode = Graph(), FakeTensorMode()

    def tensor(kind: Any) -> Node:
        node = graph.placeholder("x")
        with mode:
            node.meta["val"] = torch.empty(kind[0], dtype=kind[1], device=device)
        return node

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(each) for each in value]
        return tensor(value) if isinstance(value, tuple) else value

    node = graph.call_function(op, tuple(map(given, args)))
    node.meta["val"] = next((each.meta["val"] for each in node.all_input_nodes), None)
    return node


INDEXED = [
    (aten.index.Tensor, FLOATS, [INDEX]),
    (aten.index_put.default, FLOATS, [INDEX], FLOATS),
    (aten.index_copy_.default, FLOATS, 0, INDEX, FLOATS),
    (aten.index_select.default, FLOATS, 0, INDEX),
    (aten.embedding.default, FLOATS, INDEX),
    (aten.gather.default, FLOATS, 0, INDEX),
    (aten.scatter_add.default, FLOATS, 0, INDEX, FLOATS),
    (aten.take.default, FLOATS, INDEX),
    (aten.binary_cross_entropy.default, FLOATS, FLOATS),
    (aten.remainder.Tensor, WHOLE, WHOLE),
    (aten.div.Tensor_mode, WHOLE, WHOLE),
]
EVERYWHERE = [
    (aten._local_scalar_dense.default, FLOATS),
    (aten._assert_async.msg, FLOATS, "no"),
    (aten._assert_scalar.default, 1, "no"),
    (aten.multinomial.default, FLOATS, 1),
    (aten.linalg_inv_ex.default, FLOATS),
    (aten.histogram.bin_ct, FLOATS, 4),
    (aten.fake_quantize_per_channel_affine_cachemask.default, FLOATS, FLOATS, WHOLE, 0, 0, 255),
]
NEVER = [
    (aten.add.Tensor, FLOATS, 1),
    (aten.binary_cross_entropy_with_logits.default, FLOATS, FLOATS),
    (aten.copy_.default, FLOATS, FLOATS),
    (aten.div.Tensor, FLOATS, FLOATS),
    (aten.mm.default, FLOATS, FLOATS),
    (aten.nonzero.default, FLOATS),
    (aten.relu_.default, FLOATS),
    (aten.searchsorted.Tensor, FLOATS, FLOATS),
    (aten.slice_scatter.default, FLOATS, FLOATS),
    (aten.view.default, FLOATS, [2, 2]),
    (ops.event_record.default, "done", "side", 0),
]


def named(calls: list[Any]) -> Any:
    return pytest.mark.parametrize("given", calls, ids=[str(each[0]) for each in calls])


@named(INDEXED)
def test_indices_and_divisors_raise_on_the_host_alone(given):
    assert can_raise(call(*given))
    assert not can_raise(call(*given, device="cuda"))


@named(EVERYWHERE)
def test_what_reads_its_data_raises_everywhere(given):
    assert can_raise(call(*given))
    assert can_raise(call(*given, device="cuda"))


@named(NEVER)
def test_what_depends_on_sizes_alone_was_checked_before(given):
    assert not can_raise(call(*given))


def test_nobody_knows_what_a_custom_op_does():
    with torch.library._scoped_library("graphex_raising_table", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        assert can_raise(call(torch.ops.graphex_raising_table.unknown.default, FLOATS, device="cuda"))


def test_what_is_lost_with_a_value():
    graph = Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    found = graph.call_function(aten.index.Tensor, (x, [i]))
    turned = graph.call_function(aten.relu.default, (found,))
    copy = graph.call_function(aten.copy.default, (turned, x))
    assert lost_without(copy, turned) is found
    graph.output((copy, found))
    assert lost_without(copy, turned) is None
