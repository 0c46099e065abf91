"""What a model does with the result of attention comes to the same whether the call is lifted or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphex
from tests.harness.comparing import assert_same_to_user
from tests.harness.compiling import Observer, rand

ATTENTION, CLONE = torch.ops.graphex.attention.default, torch.ops.aten.clone.default
RULE = "lift_attention"
NO_HEADS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12), reason="torch 2.11 ends the process, in eager too"
)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def heads(positions: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, 4, positions, 16), rand(2, 4, 12, 16), rand(2, 4, 12, 16)


def side_by_side(result: Tensor) -> Tensor:
    return result.transpose(1, 2).reshape(2, -1, 64)


def viewed(q, k, v):
    return attend(q, k, v).view(2, -1, 16)


def in_place_behind_a_reshape(q, k, v):
    result = attend(q, k, v)
    joined = side_by_side(result)  # a copy
    joined.mul_(2)
    return joined, result


def in_place_on_one_of_two_reshapes(q, k, v):
    turned = attend(q, k, v).transpose(1, 2)
    one, two = turned.reshape(2, -1, 64), turned.reshape(2, -1, 64)  # two copies
    one.mul_(2)
    return one, two


def in_place_on_contiguous(q, k, v):
    result = attend(q, k, v)
    same = result.contiguous()  # no copy
    same.mul_(2)
    return same, result


def positions_first(q, k, v):
    return attend(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))


USES = [
    attend,
    viewed,
    in_place_behind_a_reshape,
    in_place_on_one_of_two_reshapes,
    in_place_on_contiguous,
    positions_first,
    lambda q, k, v: side_by_side(attend(q, k, v)).mul_(2),
    lambda q, k, v: attend(q, k, v).mul_(2).transpose(1, 2),
    lambda q, k, v: attend(q, k, v).reshape(2, 4, -1, 8, 2),
    lambda q, k, v: attend(q, k, v).as_strided((4, 4), (16, 1)),
]


def compiled_by(fn, **options):
    torch._dynamo.reset()
    options = {"lift_idioms": "always", "verify": True} | options
    return torch.compile(fn, backend="graphex", options=options)


@torch.no_grad()
@pytest.mark.parametrize("fn", USES, ids=lambda fn: fn.__name__)
def test_nobody_can_tell_that_it_is_lifted(fn):
    compiled = compiled_by(fn)
    assert_same_to_user(compiled, fn, *heads())
    journal = graphex.journal(compiled)
    assert journal.fallbacks == []
    assert [tried.matches for tried in journal.rules if tried.rule == RULE] == [1]


@torch.no_grad()
def test_code_behind_a_graph_break_finds_the_strides_it_knows():
    def fn(q, k, v):
        result = attend(q, k, v)
        torch._dynamo.graph_break()
        return result.view(2, -1, 16) * 2

    assert_same_to_user(compiled_by(fn), fn, *heads())


@torch.no_grad()
@pytest.mark.parametrize(
    ("fn", "positions", "copies"),
    [
        (attend, 3, 1),
        (attend, 1, 0),
        (lambda q, k, v: side_by_side(attend(q, k, v)), 3, 0),
        (lambda q, k, v: attend(q, k, v).permute(0, 2, 1, 3).flatten(2), 3, 0),
        (lambda q, k, v: attend(q, k, v).transpose(-2, 1).contiguous().view(2, -1, 64), 3, 0),
    ],
    ids=["returned", "one position", "reshape", "flatten", "contiguous"],
)
def test_it_is_copied_only_where_someone_can_tell(fn, positions, copies):
    seen = Observer()
    compiled = compiled_by(fn, post_grad_custom_post_pass=seen)
    torch.testing.assert_close(compiled(*(inputs := heads(positions))), fn(*inputs))
    assert seen.targets.count(ATTENTION) == 1
    assert seen.targets.count(CLONE) == copies


@torch.no_grad()
@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        pytest.param([(2, 0, 3, 16), (2, 0, 12, 16)], "there is nothing to attend with", marks=NO_HEADS, id="no heads"),
        pytest.param([(2, 4, 3, 0), (2, 4, 12, 0)], "there is nothing to attend with", id="no columns"),
    ],
)
def test_nothing_to_attend_with_is_left_to_torch(shapes, reason):
    q, k, v = rand(*shapes[0]), rand(*shapes[1]), rand(*shapes[1])
    compiled = compiled_by(attend)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    journal = graphex.journal(compiled)
    assert journal.fallbacks == []
    assert [record.reason for record in journal.refusals if record.rule == RULE] == [reason]


@torch.no_grad()
def test_code_that_asks_for_the_layout_alone_compiles():
    def fn(q, k, v):
        return attend(q, k, v).is_contiguous(), q + 1

    compiled = compiled_by(fn)
    found, wanted = compiled(*(inputs := heads())), fn(*inputs)
    assert found[0] is wanted[0]
    assert graphex.journal(compiled).fallbacks == []
