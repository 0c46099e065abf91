"""The rotary embedding of a key is written where its cache is, once that write is in place; with value and query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphex
from tests.harness.compiling import Verified, trace
from tests.harness.idioms import half, interleaved

ops, aten = torch.ops.graphex, torch.ops.aten
ONE, ALL = "rotary_write", "rotary_qkv_write"
HEADS, WIDTH, ROOM = 2, 8, 16


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def by_index_copy(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache.index_copy_(2, at, rows)


def by_index_put(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache[:, :, at] = rows


def by_slice(cache: Tensor, at: Tensor, rows: Tensor) -> None:
    cache[:, :, 5 : 5 + rows.shape[2]] = rows


Write = Callable[[Tensor, Tensor, Tensor], None]
writes = pytest.mark.parametrize("write", [by_index_copy, by_index_put, by_slice])


def step(write: Write, turn: Callable[..., Tensor] = half, layers: int = 2) -> Callable[..., Tensor]:
    """A decode step of a few layers: the attention of each reads its caches after they were written."""

    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        for layer in range(layers):
            keys, values = caches[2 * layer : 2 * layer + 2]
            q = torch.cat((x, x + 1), 1)
            k, v = x * 2, x - 1
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            write(keys, at, k)
            write(values, at, v)
            x = x + attend(q, keys, values)[:, :HEADS]
        return x

    return model


def angles(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.randn(1, 1, tokens, WIDTH)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def given(tokens: int = 1, layers: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    caches = [torch.randn(1, HEADS, ROOM, WIDTH).to(dtype) for _ in range(2 * layers)]
    at = torch.arange(5, 5 + tokens)
    return torch.randn(1, HEADS, tokens, WIDTH).to(dtype), *angles(tokens, dtype), at, caches


def compiled(f: Callable[..., Any], *inputs: Any, disable_rules: Sequence[str] = (), **options: Any) -> Verified:
    """Without what comes next: attention, which would take the query, the key and the value in."""
    disabled = [*disable_rules, "rotary_attention"]
    return Verified(f, *inputs, **{"lift_idioms": "always", "disable_rules": disabled, **options})


def joined(ran: Verified) -> dict[str, int]:
    """Rule -> how often it applied; each time there is one such op in the graph that runs."""
    made = {rule: ran.made(rule) for rule in (ONE, ALL)}
    assert made == {
        ONE: ran.running().count(ops.rotary_write_.default),
        ALL: ran.running().count(ops.rotary_qkv_write_.default),
    }
    return {rule: count for rule, count in made.items() if count}


# -- what is joined ----------------------------------------------------------------------------------------------------


@writes
@pytest.mark.parametrize("tokens", [1, 3])
def test_query_key_and_value_of_every_layer_are_one_op(write: Write, tokens: int) -> None:
    ran = compiled(step(write), *given(tokens))
    assert joined(ran) == {ALL: 2}
    writing = (aten.index_copy_.default, aten.index_put_.default, aten.copy_.default, ops.rotary_qk.default)
    assert [ran.running().count(op) for op in writing] == [0, 0, 0, 0]


def test_positions_of_all_layers_are_made_once() -> None:
    assert compiled(step(by_slice), *given()).running().count(aten.arange.default) == 1
    assert compiled(step(by_index_put), *given()).running().count(aten.where.self) == 1


def test_negative_positions_count_from_the_end() -> None:
    x, cos, sin, _, caches = given(tokens=2)
    assert joined(compiled(step(by_index_put), x, cos, sin, torch.tensor([-1, 3]), caches)) == {ALL: 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    assert joined(compiled(step(by_index_copy), *given(3, dtype=dtype))) == {ALL: 2}


def test_the_interleaved_form() -> None:
    assert joined(compiled(step(by_index_copy, interleaved), *given(3))) == {ALL: 2}


@pytest.mark.parametrize(
    ("write", "reason"),
    [(by_index_copy, ""), (by_slice, ""), (by_index_put, "it is not known that there is one position")],
)
def test_any_number_of_tokens(write: Write, reason: str) -> None:
    """By index_put a row may be written to many positions: where both numbers are symbolic, nobody knows."""
    model = step(write)
    run = torch.compile(model, backend="graphex", options={"lift_idioms": "always", "verify": True})
    for tokens in (3, 4, 7):
        x, cos, sin, at, caches = given(tokens)
        for tensor, dim in ((x, 2), (cos, 2), (sin, 2), (at, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        theirs = [cache.clone() for cache in caches]
        torch.testing.assert_close(run(x, cos, sin, at, caches), model(x, cos, sin, at, theirs), rtol=0, atol=0)
        torch.testing.assert_close(caches, theirs, rtol=0, atol=0)
    journal = graphex.journal(run)
    assert [record.rule for record in journal.rewrites].count(ALL) == (0 if reason else 2)
    assert any(reason in record.reason for record in journal.refusals if record.rule == ALL) or not reason
    assert [verdict.status for verdict in journal.verifications] == ["equal"]
    assert len(journal.graphs) == 1


def test_another_number_of_positions_than_rows_is_an_error_as_in_eager() -> None:
    run = torch.compile(step(by_index_copy), backend="graphex", options={"lift_idioms": "always"})
    for tokens, wrong in ((3, False), (4, False), (5, True)):
        x, cos, sin, at, caches = given(tokens)
        for tensor, dim in ((x, 2), (cos, 2), (sin, 2), (at, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        if not wrong:
            run(x, cos, sin, at, caches)
            continue
        before = [cache.clone() for cache in caches]
        with pytest.raises(Exception, match=r"(?i)number of indices|index_copy|must be"):
            run(x, cos, sin, at[:-1], caches)
        torch.testing.assert_close(caches, before, rtol=0, atol=0)


def one_key(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
    keys.index_copy_(2, at, half(x, cos, sin))
    return keys.sum()


def key(tokens: int = 1) -> tuple[Tensor, ...]:
    x, cos, sin, at, caches = given(tokens)
    return x, cos, sin, at, caches[0]


def test_a_key_alone() -> None:
    assert joined(compiled(one_key, *key(3))) == {ONE: 1}


def test_a_buffer_of_a_module() -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, HEADS, ROOM, WIDTH))

        def forward(self, *inputs: Tensor) -> Tensor:
            return one_key(*inputs, self.keys)  # type: ignore[arg-type]

    assert joined(compiled(Cached(), *key()[:4])) == {ONE: 1}


def test_a_second_key_in_the_cache_that_the_first_write_returned() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        written = keys.index_copy_(2, at, ops.rotary(x, cos, sin))
        return written.index_copy_(2, at + 1, ops.rotary(x + 1, cos, sin)).relu()

    inputs = key()
    run = graphex.compile_fx(trace(model, *inputs), options={"lift_idioms": "always"})
    mine, theirs = ([each.clone() for each in inputs] for _ in range(2))
    torch.testing.assert_close(run(*mine), model(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [record.rule for record in graphex.journal(run).rewrites].count(ONE) == 2


def writing(values: Callable[..., Any], query: Callable[[Tensor], Tensor] = lambda x: torch.cat((x, x + 1), 1)) -> Any:
    """A decode step of one layer: `values(keys, values, q, x, at)` comes after the write of the key."""

    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, caches: list[Tensor]) -> Any:
        q, k = half(query(x), cos, sin), half(x * 2, cos, sin)
        caches[0].index_copy_(2, at, k)
        used = values(*caches, q, x, at)
        return attend(q, *caches), used

    return model


def test_values_at_other_positions_are_written_by_themselves() -> None:
    def elsewhere(keys: Tensor, values: Tensor, q: Tensor, x: Tensor, at: Tensor) -> None:
        values.index_copy_(2, at + 1, x)

    ran = compiled(writing(elsewhere), *given(layers=1))
    assert joined(ran) == {ONE: 1}
    assert ran.running().count(ops.rotary.default) == ran.running().count(aten.index_copy_.default) == 1


def test_a_cache_with_heads_behind_tokens() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
        q, k = half(torch.cat((x, x + 1), 2), cos, sin), half(x * 2, cos, sin)
        keys[:, at] = k
        values[:, at] = x
        return q.sum() + keys.sum() + values.sum()

    x, cos, sin, at, caches = given(3)
    inputs = [each.transpose(1, 2).contiguous() for each in (x, caches[0], caches[1])]
    assert joined(compiled(model, inputs[0], cos, sin, at, *inputs[1:])) == {ALL: 1}


# -- what is not -------------------------------------------------------------------------------------------------------


def refused(f: Callable[..., Any], *inputs: Any, rule: str = ONE, **options: Any) -> str:
    """Why a rule did not apply; the ops stay as they were."""
    ran = compiled(f, *inputs, **options)
    assert ran.made(rule) == 0
    return " ".join(ran.reasons(rule))


@pytest.mark.parametrize(
    ("end", "reason"),
    [(lambda k, keys: k, "also returned"), (lambda k, keys: (k * 2).sum() + keys.sum(), "also used by")],
    ids=["returned", "read by attention beside the cache"],
)
def test_a_key_that_is_used_elsewhere(end: Callable[..., Tensor], reason: str) -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        k = half(x, cos, sin)
        keys.index_copy_(2, at, k)
        return end(k, keys)

    assert reason in refused(model, *key())


def between(use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Something is made of (keys, x, q) between the write of the key and that of the value, which it is."""

    def write(keys: Tensor, values: Tensor, q: Tensor, x: Tensor, at: Tensor) -> Tensor:
        values.index_copy_(2, at, used := use(keys, x, q))
        return used

    return write


def twice(keys: Tensor, values: Tensor, q: Tensor, x: Tensor, at: Tensor) -> None:
    keys.index_copy_(2, at, x)
    values.index_copy_(2, at, x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (writing(between(lambda keys, x, q: x * keys.sum())), "uses"),
        (writing(between(lambda keys, x, q: keys.mul_(2)[:, :, :1] * x)), "uses"),
        (writing(between(lambda keys, x, q: q[:, :HEADS] * 2)), "rotated query is used"),
        (
            writing(between(lambda keys, x, q: x.index_select(0, torch.zeros(1, dtype=torch.int64)))),
            "may raise between",
        ),
        (writing(between(lambda keys, x, q: q), query=lambda x: x), "rotated query is used"),
        (writing(twice), "share memory"),
    ],
    ids=[
        "the cache is read",
        "the cache is written",
        "the query is used",
        "an index is looked up",
        "the query is also the value",
        "two writes to one cache keep their order",
    ],
)
def test_what_happens_between_the_writes_keeps_them_apart(model: Any, reason: str) -> None:
    ran = compiled(model, *given(layers=1))
    assert joined(ran) == {ONE: 1}
    assert reason in " ".join(ran.reasons(ALL))


def test_an_angle_that_is_overwritten_before_the_write() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        k = half(x, cos, sin)
        cos.add_(1)
        keys.index_copy_(2, at, k)
        return keys.sum() + cos.sum()

    assert "is written between" in refused(model, *key())


def test_key_and_value_in_one_memory() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, both: Tensor) -> Tensor:
        q, k = half(torch.cat((x, x + 1), 1), cos, sin), half(x * 2, cos, sin)
        both[:, :HEADS].index_copy_(2, at, k)
        both[:, 1 : 1 + HEADS].index_copy_(2, at, x)
        return q.sum() + both.sum()

    x, cos, sin, at, _ = given()
    assert compiled(model, x, cos, sin, at, torch.randn(1, 2 * HEADS, ROOM, WIDTH)).made(ALL) == 0


def test_a_cache_whose_rows_are_not_adjacent() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, turned: Tensor) -> Tensor:
        return one_key(x, cos, sin, at, turned.transpose(2, 3))

    x, cos, sin, at, keys = key()
    assert compiled(model, x, cos, sin, at, keys.transpose(2, 3).contiguous()).made(ONE) == 0


def test_a_cache_of_another_type() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor) -> Tensor:
        keys[:, :, 5:6] = half(x, cos, sin)
        return keys.sum()

    x, cos, sin, _, keys = key()
    assert compiled(model, x, cos, sin, keys.bfloat16()).made(ONE) == 0


def test_a_write_that_is_not_in_place() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        return keys.index_copy(2, at, half(x, cos, sin))

    assert "not proven to write in place" in refused(model, *key())


def test_a_key_that_lives_in_the_cache() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        return one_key(keys[:, :, :1], cos, sin, at, keys)

    refused(model, *key())


def test_what_runs_on_another_stream() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        keys, values = caches
        q, k = half(torch.cat((x, x + 1), 1), cos, sin), half(x * 2, cos, sin)
        keys.index_copy_(2, at, k)
        with torch.fx.traceback.annotate({"stream": 1}):
            values.index_copy_(2, at, x)
        return q.sum() + keys.sum()

    ran = compiled(model, *given(layers=1), verify=False)
    assert joined(ran) == {ONE: 1}
    assert "different streams" in " ".join(ran.reasons(ALL))


def test_a_write_into_the_rotated_key_itself() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        k = half(x, cos, sin)
        return k.index_copy(2, at, k)

    assert joined(compiled(model, *key()[:3], torch.tensor([0]))) == {}


def test_the_cpu_has_no_kernel_for_it() -> None:
    assert joined(Verified(step(by_index_copy), *given())) == {}


@pytest.mark.parametrize(("rule", "left"), [(ONE, ALL), (ALL, ONE)])
def test_a_rule_can_be_switched_off(rule: str, left: str) -> None:
    assert joined(compiled(step(by_index_copy), *given(), disable_rules=[rule])) == {left: 2}
