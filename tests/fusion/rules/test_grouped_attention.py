"""Keys and values that are repeated for grouped heads, and attention that caps its scores, as models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphex
from tests.harness.compiling import Lifted, rand

ATTENTION = torch.ops.graphex.attention
REPEATS = "grouped_attention"
CAPPED = "lift_capped_attention"
SINKS = "lift_sink_attention"


def expanded(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def interleaved(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1)


def tiled(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1, 1)


def expanded_before(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, None].expand(batch, times, heads, length, width).reshape(batch, heads * times, length, width)


def positions_repeated(x: Tensor, times: int) -> Tensor:
    """As many heads in the end, made of neighbouring positions."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads, times, length // times, width).repeat_interleave(times, 3).flatten(1, 2)


def attend(repeat: Callable[[Tensor, int], Tensor], *, only_keys: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return functional.scaled_dot_product_attention(
            q, repeat(k, times), v if only_keys else repeat(v, times), attn_mask=mask
        )

    return fn


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, cap: float = 5.0) -> Tensor:
    times = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, expanded(k, times).transpose(2, 3)) * 0.25
    scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, expanded(v, times)).transpose(1, 2).contiguous()


def sinking(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None = None, kept: int = -1, dropout: bool = True
) -> Tensor:
    """As GPT-OSS writes it."""
    times = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, expanded(k, times).transpose(2, 3)) * 0.25
    if mask is not None:
        scores = scores + mask
    more = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, more], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = functional.softmax(combined, dim=-1, dtype=combined.dtype)[..., :kept]
    weights = functional.dropout(weights, p=0.0, training=False) if dropout else weights
    return torch.matmul(weights, expanded(v, times)).transpose(1, 2).contiguous()


def heads(shared: int, dtype: torch.dtype = torch.float32, positions: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    cache = rand(2, shared, 12, 16, dtype=dtype), rand(2, shared, 12, 16, dtype=dtype)
    return rand(2, 4, positions, 16, dtype=dtype), *cache


MASK = torch.arange(12)[None] < 7


@torch.no_grad()
def lifted(fn: Any, *inputs: Any, **options: Any) -> Lifted:
    return Lifted(fn, *inputs, **options)


@pytest.mark.parametrize("repeat", [expanded, interleaved])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_read_where_it_is(repeat, shared, mask, dtype):
    found = lifted(attend(repeat), *heads(shared, dtype), *([] if mask is None else [mask]))
    assert found.fused == {"lift_attention": 1, REPEATS: 1}
    assert torch.ops.aten.clone.default not in found.seen.targets
    assert torch.ops.aten.expand.default not in found.seen.targets


def test_sizes_may_be_symbolic():
    torch._dynamo.reset()
    compiled = torch.compile(attend(expanded), backend="graphex", options={"lift_idioms": "always"}, fullgraph=True)
    for batch, length in [(2, 12), (3, 30), (5, 7)]:
        inputs = rand(batch, 4, 1, 16), rand(batch, 2, length, 16), rand(batch, 2, length, 16)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        for x in inputs[1:]:
            torch._dynamo.mark_dynamic(x, 2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), attend(expanded)(*inputs))
    journal = graphex.journal(compiled)
    assert len(journal.graphs) == 1
    assert [tried.matches for tried in journal.rules if tried.rule == REPEATS] == [1]


@pytest.mark.parametrize("repeat", [tiled, expanded_before, positions_repeated])
def test_another_order_of_heads_is_not_taken_for_groups(repeat):
    found = lifted(attend(repeat), *heads(2), MASK)
    assert REPEATS not in found.fused
    assert found.count(ATTENTION) == 1


def test_keys_that_are_used_elsewhere_too_are_still_copied():
    def fn(q, k, v, mask):
        keys = expanded(k, 2)
        return functional.scaled_dot_product_attention(q, keys, expanded(v, 2), mask), keys

    found = lifted(fn, *heads(2), MASK)
    assert found.count(ATTENTION) == 1
    assert REPEATS not in found.fused


def test_it_can_be_switched_off():
    assert REPEATS not in lifted(attend(expanded), *heads(2), MASK, disable_rules=[REPEATS]).fused


# -- capped scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_attention_is_one_op(shared, masked, dtype):
    mask = torch.zeros(2, 1, 1, 12, dtype=dtype).masked_fill(~MASK, torch.finfo(dtype).min)
    found = lifted(capped, *heads(shared, dtype), *([mask] if masked else []))
    assert found.fused == {CAPPED: 1} | ({REPEATS: 1} if shared == 2 else {})
    assert torch.ops.aten.bmm.default not in found.seen.targets


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (MASK.expand(1, 1, 1, 12), "'mask' is bool"),  # it is added: 1 where True
        (torch.zeros(3, 1, 1, 12), "larger than the scores"),
    ],
    ids=["bool", "batch"],
)
def test_a_mask_that_the_op_takes_otherwise(mask, reason):
    inputs = rand(1, 4, 1, 16), rand(1, 2, 12, 16), rand(1, 2, 12, 16)
    found = lifted(capped, *inputs, mask)
    assert found.count(ATTENTION) == 0
    assert reason in found.why


def test_a_long_query_keeps_its_matrix_products():
    found = lifted(capped, *heads(4, positions=17))
    assert found.count(ATTENTION) == 0
    assert "17 query positions" in found.why


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: torch.tanh(torch.matmul(q, k.mT) / 5.0) * 4.0,  # two caps
        lambda q, k, v: torch.sigmoid(torch.matmul(q, k.mT) * 0.25 / 5.0) * 5.0,
    ],
    ids=["caps", "sigmoid"],
)
def test_other_scores_are_not_taken_for_capped_ones(change):
    def fn(q, k, v):
        return torch.matmul(functional.softmax(change(q, k, v), -1, dtype=torch.float32).to(q.dtype), v)

    assert lifted(fn, *heads(4)).count(ATTENTION) == 0


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_sinks_is_one_op(masked, dropout):
    mask = torch.zeros(2, 1, 1, 12).masked_fill(~MASK, -3e38) if masked else None
    found = lifted(lambda *given: sinking(*given, mask=mask, dropout=dropout), *heads(2), rand(4))
    assert found.fused == {SINKS: 1, REPEATS: 1}
    assert found.count(ATTENTION) == 1
    assert torch.ops.aten.expand.default not in found.seen.targets


def test_more_columns_than_the_sinks_that_are_dropped_are_no_sinks():
    found = lifted(lambda q, k, v, sinks: sinking(q, k, v[:, :, :11], sinks, kept=-2), *heads(2), rand(4))
    assert SINKS not in found.fused
