"""Calls of scaled_dot_product_attention stay one op in a decode step; what must not be lifted is not, and says why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphex
from graphex.frontend import dynamo_graph as frontend
from tests.harness.compiling import Lifted, rand

ATTENTION = torch.ops.graphex.attention
RULE = "lift_attention"


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def heads(batch: int = 2, query: int = 4, shared: int = 4, positions: int = 1, length: int = 12, width: int = 16):
    return (
        rand(batch, query, positions, width),
        rand(batch, shared, length, width),
        rand(batch, shared, length, width),
    )


@torch.no_grad()
def lifted(fn: Any, *inputs: Any, **options: Any) -> Lifted:
    return Lifted(fn, *inputs, **options)


def refusals(found: Lifted) -> list[str]:
    return [record.reason for record in found.journal.refusals if record.rule == RULE]


MASKS = {
    "none": None,
    "boolean": torch.arange(12)[None] < 7,
    "added": torch.zeros(2, 1, 1, 12).masked_fill(torch.arange(12) > 7, -1e9),
    "for each head": torch.rand(2, 4, 1, 12) > 0.3,
    "nothing": torch.zeros(1, 12, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("fn", [attend, grouped])
def test_a_decode_step_is_one_op(fn, mask):
    inputs = heads(shared=2 if fn is grouped else 4)
    found = lifted(fn, *inputs, *([] if mask is None else [mask]))
    assert found.count(ATTENTION) == 1
    assert found.fused == {RULE: 1}
    (record,) = (record for record in found.journal.rewrites if record.rule == RULE)
    assert "functional.scaled_dot_product_attention(" in record.line


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    assert lifted(attend, *(x.to(dtype) for x in heads())).count(ATTENTION) == 1


def test_arguments_of_the_call_reach_the_op():
    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3)

    assert lifted(fn, *heads(positions=5)).count(ATTENTION) == 1


def test_the_result_is_laid_out_for_the_projection_that_follows():
    def fn(q, k, v):
        return attend(q, k, v).transpose(1, 2).reshape(2, 3, 64)

    found = lifted(fn, *heads(positions=3))
    assert torch.ops.aten.clone.default not in found.seen.targets


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
@pytest.mark.parametrize(
    ("device", "shared", "width", "dtype", "times"),
    [
        ("cuda", 4, 16, torch.bfloat16, 1),
        ("cuda", 4, 16, torch.float16, 1),
        ("cuda", 4, 16, torch.float32, 0),
        ("cpu", 4, 16, torch.bfloat16, 0),
        ("cuda", 4, 512, torch.bfloat16, 0),
        ("cuda", 1, 16, torch.bfloat16, 0),
    ],
    ids=["bfloat16", "float16", "float32", "cpu", "wide", "rows"],
)
def test_it_is_lifted_where_there_is_a_kernel(device, shared, width, dtype, times):
    def fn(q, k, v):
        return frontend.attend(q, k, v, enable_gqa=True, call="attention", forced=False)

    with FakeTensorMode(), torch.device(device):
        keys = (torch.empty(2, shared, 19, width, dtype=dtype) for _ in range(2))
        inputs = torch.empty(2, 8, 16, width, dtype=dtype), *keys
    targets = [node.target for node in make_fx(fn)(*inputs).graph.nodes]
    assert targets.count(ATTENTION.default) == times


def test_symbolic_sizes_are_lifted_and_cost_no_guard():
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="graphex", options={"lift_idioms": "always"}, fullgraph=True)
    for batch, positions, length in [(2, 3, 12), (5, 7, 20), (3, 40, 40), (4, 2, 9)]:
        inputs = heads(batch, positions=positions, length=length)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    journal = graphex.journal(compiled)
    assert len(journal.graphs) == 1
    assert [tried.matches for tried in journal.rules if tried.rule == RULE] == [1]


# -- not lifted, and why --------------------------------------------------------------------------------------------


def test_many_query_positions_are_left_to_torch():
    found = lifted(attend, *heads(positions=17, length=17))
    assert found.count(ATTENTION) == 0
    assert refusals(found) == ["17 query positions are more than the 16 of a decode step"]
    assert [tried for tried in found.journal.rules if tried.rule == RULE] == []


def test_a_gradient_is_left_to_torch():
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="graphex", options={"lift_idioms": "always"})
    inputs = [x.requires_grad_() for x in heads()]
    compiled(*inputs).sum().backward()
    mine = inputs[0].grad.clone()
    inputs[0].grad = None
    attend(*inputs).sum().backward()
    torch.testing.assert_close(mine, inputs[0].grad)
    journal = graphex.journal(compiled)
    assert [(r.graph, r.reason) for r in journal.refusals if r.rule == RULE] == [
        ("attend forward", "its gradient is needed")
    ]


def test_dropout_is_left_to_torch():
    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="graphex", options={"lift_idioms": "always"})
    with torch.no_grad():
        compiled(*heads())
    assert [r.reason for r in graphex.journal(compiled).refusals if r.rule == RULE] == ["it drops out"]


def test_a_backend_chosen_by_hand_is_kept():
    def fn(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v)

    found = lifted(fn, *heads())
    assert found.count(ATTENTION) == 0
    assert refusals(found) == ["its backend was chosen by hand"]


def test_autocast_decides_on_the_type():
    def fn(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v)

    found = lifted(fn, *heads())
    assert found.count(ATTENTION) == 0
    assert refusals(found) == ["autocast decides on its type"]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (tuple(x[0] for x in heads()), "four dimensions"),
        (tuple(x.double() for x in heads()), "float64"),
        ((rand(2, 4, 1, 16), rand(1, 4, 9, 16), rand(1, 4, 9, 16)), "do not fit"),
    ],
    ids=["rank", "type", "broadcast"],
)
def test_tensors_that_the_op_does_not_take(inputs, reason):
    found = lifted(attend, *inputs)
    assert found.count(ATTENTION) == 0
    (said,) = refusals(found)
    assert reason in said


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_vmap_the_call_is_torchs():
    def fn(q, k, v):
        return torch.vmap(attend)(q, k, v)

    found = lifted(fn, *(x[None].expand(3, *x.shape).contiguous() for x in heads()))
    assert found.count(ATTENTION) == 0
    assert refusals(found) == ["it is inside a functorch transform"]


@pytest.mark.parametrize(
    "options",
    [
        {"lift_idioms": "never"},
        {"lift_idioms": "auto"},
        {"pattern_fusion_pass": False},
        {"disable_rules": [RULE]},
        {"disable_passes": [RULE]},
    ],
    ids=str,
)
def test_it_can_be_switched_off(options):
    found = lifted(attend, *heads(), **options)
    assert found.count(ATTENTION) == 0
    assert RULE not in [record.rule for record in (*found.journal.rewrites, *found.journal.refusals)]


def test_a_module_of_torch_that_attends_by_itself_stays_as_it_is():
    """Dynamo does not look into it: there is no call to lift."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()

    def fn(x, memory):
        return module(x, memory, memory, need_weights=False)[0]

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="graphex", options={"lift_idioms": "always"})
    x, memory = rand(2, 1, 32), rand(2, 9, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, memory), fn(x, memory))
    assert not graphex.journal(compiled).fallbacks


def test_dynamos_graph_is_given_back_as_it_was():
    seen: list[list[Any]] = []

    class Keeping(graphex.Backend):
        def __call__(self, gm, example_inputs, **kwargs):
            before = [(node.target, node.kwargs) for node in gm.graph.nodes]
            compiled = super().__call__(gm, example_inputs, **kwargs)
            seen.append([before, [(node.target, node.kwargs) for node in gm.graph.nodes]])
            return compiled

    torch._dynamo.reset()
    backend = Keeping(graphex.CompilerConfig(lift_idioms="always"))
    with torch.no_grad():
        torch.compile(attend, backend=backend)(*heads())
    (pair,) = seen
    assert pair[0] == pair[1]
    assert [tried.matches for tried in backend.journal.rules] == [1]


def test_results_are_verified():
    found = lifted(grouped, *heads(shared=2), verify=True)
    assert [verdict.status for verdict in found.journal.verifications] == ["equal"]


def test_padded_rows_stay_separate():
    """Rows of a batch do not meet in attention: `capture_sizes` may pad them."""
    torch._dynamo.reset()
    options = {"lift_idioms": "always", "capture_sizes": [4, 8]}
    compiled = torch.compile(grouped, backend="graphex", dynamic=False, options=options)
    for batch in (3, 5):
        inputs = heads(batch, shared=2)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), grouped(*inputs))
    journal = graphex.journal(compiled)
    assert not [record for record in journal.fallbacks if "capture_sizes" in record.what]
    assert not journal.fallbacks
