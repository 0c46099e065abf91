"""Attention joins the rotary embedding and the cache writes before it, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import graphex
from examples.tiny_llama import TinyLlama
from tests.harness.compiling import Verified, trace
from tests.harness.idioms import half, interleaved

ops = torch.ops.graphex
RULE, PASS = "rotary_attention", "join_rotary_and_attention"
BATCH, HEADS, WIDTH, ROOM = 2, 2, 8, 16


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


Between = Callable[..., Any]


def nothing(*_: Tensor) -> None:
    return None


def step(between: Between = nothing, turn: Callable[..., Tensor] = half, layers: int = 2) -> Callable[..., Any]:
    """A decode step; `between` happens to (keys, values, q, x, at, cos) after the writes and before attention."""

    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, mask: Tensor | None, caches: list[Tensor]) -> Any:
        more = []
        for layer in range(layers):
            keys, values = caches[2 * layer : 2 * layer + 2]
            q, k = turn(torch.cat((x, x + 1), 1), cos, sin), turn(x * 2, cos, sin)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, x - 1)
            more.append(between(keys, values, q, x, at, cos))
            x = x + attend(q, keys, values, mask)[:, :HEADS]
        return x, [each for each in more if each is not None]

    return model


def inputs(
    tokens: int = 1, layers: int = 2, dtype: torch.dtype = torch.float32, masked: bool = True
) -> tuple[Any, ...]:
    angle = torch.randn(1, 1, tokens, WIDTH)
    at = torch.arange(5, 5 + tokens)
    mask = (torch.arange(ROOM) <= at[:, None])[None, None] if masked else None
    caches = [torch.randn(BATCH, HEADS, ROOM, WIDTH).to(dtype) for _ in range(2 * layers)]
    x = torch.randn(BATCH, HEADS, tokens, WIDTH).to(dtype)
    return x, angle.cos().to(dtype), angle.sin().to(dtype), at, mask, caches


def compiled(f: Callable[..., Any], *given: Any, exact: bool = False, **options: Any) -> Verified:
    """Not exact: with a mask, eager's attention is another kernel than that of the op's reference."""
    return Verified(f, *given, exact=exact, **{"lift_idioms": "always", **options})


def joined(ran: Verified) -> int:
    """How often the rule applied; each time there is one such op in the graph that runs."""
    made = ran.made(RULE)
    assert ran.running().count(ops.rotary_attention_.default) == made
    assert ran.running().count(ops.rotary_qkv_write_.default) == ran.made("rotary_qkv_write") - made
    return made


def refused(f: Callable[..., Any], *given: Any, layers: int = 2, **options: Any) -> str:
    """Why the rule did not apply, the same for each layer; the ops stay as they were."""
    ran = compiled(f, *given, **options)
    assert joined(ran) == 0
    assert len(ran.reasons(RULE)) == layers
    return ran.reasons(RULE)[0]


# -- what is joined ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("turn", [half, interleaved])
def test_every_layer_of_a_decode_step_is_one_op(turn, masked):
    ran = compiled(step(turn=turn), *inputs(masked=masked))
    assert joined(ran) == 2
    assert ran.running().count(ops.attention.default) == ran.running().count(ops.rotary_qkv_write_.default) == 0


class HeadNorm(torch.nn.Module):
    """A layer as Qwen 3 and Gemma 3 write it: query and key are normalised over a head, then transposed."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.gains = torch.nn.ParameterList([torch.rand(WIDTH) + 0.5 for _ in range(2)])
        self.also = also

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return gain * scaled.to(x.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, mask: Any, caches: list[Tensor]) -> Any:
        keys, values = caches
        query, key = self.norm(x * 3, self.gains[0]), self.norm(x * 2, self.gains[1])
        q, k = half(query.transpose(1, 2), cos, sin), half(key.transpose(1, 2), cos, sin)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, x.transpose(1, 2) - 1)
        found = attend(q, keys, values, mask)
        return (found, query) if self.also == "norm" else found


@pytest.mark.parametrize(("also", "norms"), [("", 0), ("norm", 2)])
def test_norms_of_query_and_key_go_along_if_nothing_else_reads_them(also, norms):
    x, cos, sin, at, mask, caches = inputs(layers=1)
    with torch.no_grad():
        ran = compiled(HeadNorm(also), x.transpose(1, 2).contiguous(), cos, sin, at, mask, caches)
    assert joined(ran) == 1
    assert ran.made("norm_rotary_attention") == (0 if also else 1)
    assert ran.running().count(ops.rms_norm.default) == norms


def test_narrow_types():
    model, given = step(), inputs(dtype=torch.bfloat16)
    run = torch.compile(model, backend="graphex", options={"lift_idioms": "always"})
    apart = torch.compile(model, backend="graphex", options={"lift_idioms": "always", "disable_rules": [RULE]})
    mine, theirs = ([each.clone() for each in given[5]] for _ in range(2))
    torch.testing.assert_close(run(*given[:5], mine), apart(*given[:5], theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [record.rule for record in graphex.journal(run).rewrites].count(RULE) == 2
    assert [record.rule for record in graphex.journal(apart).rewrites].count(RULE) == 0


def test_the_journal_says_what_was_joined_and_why():
    ran = compiled(step(), *inputs())
    record = next(record for record in ran.journal.rewrites if record.rule == RULE)
    assert len(record.nodes) == 2
    assert "used for nothing but to attend" in record.because
    assert "test_rotary_attention.py" in record.line


def test_what_does_not_touch_the_caches_may_happen_in_between():
    assert joined(compiled(step(lambda keys, values, q, x, at, cos: x * 3), *inputs())) == 2


def ending_in(end: Callable[..., Any]) -> Callable[..., Any]:
    """A decode step of one layer: `end` makes something of (q, caches, at) after the writes to the first two caches."""

    def model(x, cos, sin, at, caches):
        q, k = half(torch.cat((x, x + 1), 1), cos, sin), half(x * 2, cos, sin)
        caches[0].index_copy_(2, at, k)
        caches[1].index_copy_(2, at, x)
        return end(q, caches, at)

    return model


def of_one_layer() -> tuple[Any, ...]:
    x, cos, sin, at, _, caches = inputs()
    return x, cos, sin, at, caches[:3]


def test_a_mask_that_is_made_after_the_write():
    mask = lambda at: (torch.arange(ROOM) <= at).view(1, 1, 1, -1)  # noqa: E731
    assert joined(compiled(ending_in(lambda q, caches, at: attend(q, *caches[:2], mask(at))), *of_one_layer())) == 1


@pytest.mark.parametrize(
    "between",
    [
        lambda keys, values, q, x, at, cos: keys.sum(),
        lambda keys, values, q, x, at, cos: at.add_(0).clone(),
    ],
    ids=["a cache is read", "the position is written"],
)
def test_attention_moves_to_the_writes_where_they_may_not_move_to_it(between):
    assert joined(compiled(step(between, layers=1), *inputs(layers=1))) == 1


# -- what is not -------------------------------------------------------------------------------------------------------


def test_a_rotated_query_that_is_used_twice():
    assert "rotated query is also used by" in refused(step(lambda k, v, q, x, at, cos: q * 2), *inputs())


def test_a_rotated_query_that_is_returned():
    assert "rotated query is also" in refused(step(lambda k, v, q, x, at, cos: q, layers=1), *inputs(), layers=1)


def test_more_than_one_token():
    assert "more than one token" in refused(step(), *inputs(3))


def test_a_number_of_tokens_that_is_not_known():
    model = step()
    run = torch.compile(model, backend="graphex", options={"lift_idioms": "always"})
    for tokens in (3, 4):
        x, cos, sin, at, mask, caches = inputs(tokens)
        for tensor, dim in ((x, 2), (cos, 2), (sin, 2), (at, 0), (mask, 2)):
            torch._dynamo.mark_dynamic(tensor, dim)
        run(x, cos, sin, at, mask, caches)
    reasons = [record.reason for record in graphex.journal(run).refusals if record.rule == RULE]
    assert set(reasons) == {"there is, or may be, more than one token"}


def test_a_cache_that_is_written_again_in_between():
    def between(keys, values, q, x, at, cos):
        keys.index_fill_(2, at, 0.5)

    assert refused(step(between), *inputs())


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda keys, values, at, x: x.relu(), ""),
        (lambda keys, values, at, x: keys.sum(), ""),
        (lambda keys, values, at, x: at.add_(1), ""),
        (lambda keys, values, at, x: keys.mul_(2), "other caches"),
        (lambda keys, values, at, x: values[:, :, 3].zero_(), "before attention does"),
    ],
    ids=["something else", "keys are read", "the position is written", "keys are written", "a value is written"],
)
def test_a_program_of_the_ops_themselves(between, reason):
    def model(q, k, v, cos, sin, keys, values, at):
        turned = ops.rotary_qkv_write_(q, k, v, cos, sin, keys, values, at)
        return between(keys, values, at, q), ops.attention(turned, keys, values, None, scale=0.3, softcap=4.0)

    x, cos, sin, at, _, caches = inputs(layers=1)
    given = torch.cat((x, x + 1), 1), x * 2, x - 1, cos, sin, *caches, at
    run = graphex.compile_fx(trace(model, *given), options={"lift_idioms": "always"})
    mine, theirs = ([each.clone() for each in given] for _ in range(2))
    torch.testing.assert_close(run(*mine), model(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    journal = graphex.journal(run)
    assert [record.rule for record in journal.rewrites].count(RULE) == (0 if reason else 1)
    assert all(reason in record.reason for record in journal.refusals if record.rule == RULE)


WIDE, TABLE = torch.zeros(1, 1, 1, ROOM), torch.zeros(ROOM)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda q, caches, at: attend(q, *caches[:2], caches[0].sum() + WIDE), "before attention does"),
        (lambda q, caches, at: attend(q, *caches[:2], TABLE[at] + WIDE), "may raise before"),
        (lambda q, caches, at: attend(q, caches[2], caches[1]), "other caches"),
        (lambda q, caches, at: attend(q, *(each[:, :, :8] for each in caches[:2])), "other caches"),
        (
            lambda q, caches, at: attend(q, *caches[:2], caches[0][:1, :1, :, 0].unsqueeze(2)),
            "memory of a cache",
        ),
    ],
    ids=[
        "a cache is read for the mask",
        "a mask that may raise finds the caches written",
        "attention to other caches",
        "attention to a part of a cache",
        "a mask in the memory of a cache",
    ],
)
def test_what_attention_reads_keeps_it_apart(end, reason):
    assert reason in refused(ending_in(end), *of_one_layer(), layers=1)


def test_attention_on_another_stream():
    def beside(q, caches, at):
        with torch.fx.traceback.annotate({"stream": 1}):
            return attend(q, *caches[:2])

    assert compiled(ending_in(beside), *of_one_layer(), verify=False).made(RULE) == 0


def test_the_cpu_has_no_kernel_for_it():
    assert joined(Verified(step(), *inputs(), exact=False)) == 0


@pytest.mark.parametrize("options", [{"disable_rules": [RULE]}, {"disable_passes": [PASS]}])
def test_it_can_be_switched_off(options):
    ran = compiled(step(), *inputs(), **options)
    assert joined(ran) == 0
    assert ran.running().count(ops.rotary_qkv_write_.default) == ran.running().count(ops.attention.default) == 2


# -- decoding ----------------------------------------------------------------------------------------------------------


def decoded(model: TinyLlama, tokens: list[int], **options: Any) -> tuple[list[Tensor], list[Any], graphex.Journal]:
    """The logits of each step, the caches in the end, the journal."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="graphex", fullgraph=True, options={"lift_idioms": "always", **options})
    caches = model.new_caches(2)
    given = [(torch.full((2, 1), token), torch.tensor([at])) for at, token in enumerate(tokens)]
    with torch.no_grad():
        return [run(*each, caches) for each in given], caches, graphex.journal(run)


def test_a_decode_loop_equals_the_one_of_separate_ops():
    model = TinyLlama().bfloat16()
    found, caches, journal = decoded(model, [3, 1, 4, 1, 5])
    wanted, their_caches, _ = decoded(model, [3, 1, 4, 1, 5], disable_rules=[RULE])
    torch.testing.assert_close((found, caches), (wanted, their_caches), rtol=0, atol=0)
    assert [record.rule for record in journal.rewrites].count(RULE) == model.shape.layers
    assert not [record for record in journal.refusals if record.rule == RULE]
    assert not journal.fallbacks


HAPPENS: dict[str, Between] = {
    "nothing": nothing,
    "reads keys": lambda keys, values, q, x, at, cos: keys.sum(),
    "reads values": lambda keys, values, q, x, at, cos: values[:, :, 1:].mean(),
    "writes keys": lambda keys, values, q, x, at, cos: keys.mul_(2).sum(),
    "writes values": lambda keys, values, q, x, at, cos: values[:, :, 2].add_(1).sum(),
    "writes angles": lambda keys, values, q, x, at, cos: cos.add_(0.5).sum(),
    "writes the position": lambda keys, values, q, x, at, cos: at.add_(1).sum(),
    "reads the query": lambda keys, values, q, x, at, cos: q.sum(),
    "looks at keys": lambda keys, values, q, x, at, cos: keys.transpose(1, 2).shape[0] * x,
}


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(sorted(HAPPENS)), min_size=1, max_size=2), st.sampled_from([1, 2]), st.booleans())
def test_whatever_happens_in_between(names, tokens, masked):
    torch._dynamo.reset()
    torch.manual_seed(0)

    def between(*given: Tensor) -> Tensor:
        return torch.stack(
            [(HAPPENS[name](*given) * given[3]).sum() for name in names if name != "nothing"] or [given[3].sum()]
        )

    model = step(between)
    ran = compiled(model, *inputs(tokens, masked=masked))
    assert joined(ran) <= (2 if tokens == 1 else 0)
