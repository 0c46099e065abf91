"""Rotary embeddings as transformers writes them, for one tensor and for query and key together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness.compiling import Lifted, rand
from tests.harness.idioms import BF16, angles, cases, half, half_by_chunk, interleaved, rotate_half, unequal_parts, ways

ops = torch.ops.graphex


def half_the_other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (sin * rotate_half(x)) + (cos * x)


def pairs_made_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    return half(
        x.view(batch, heads, length, width // 2, 2).transpose(4, 3).reshape(batch, heads, length, width), cos, sin
    )


def part_of_the_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, passed = x[..., :4], x[..., 4:]
    return torch.cat((half(rotated, cos[..., :4], sin[..., :4]), passed), dim=-1)


def narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-OSS writes it: cos and sin are half as wide as x."""
    cos, sin = cos[..., :4], sin[..., :4]
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@ways
@cases(half, half_by_chunk, half_the_other_way, interleaved, narrow, pairs_made_halves, part_of_the_head)
def test_an_embedding_is_lifted(fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool) -> None:
    lifted = Lifted(fn, rand(2, 3, 5, 8, dtype=dtype), *angles(dtype), dynamic=dynamic)
    assert lifted.fused == {"lift_rotary": 1}
    assert lifted.count(ops.rotary) == 1


def test_float32_angles_promote_a_bfloat16_query_as_the_model_does() -> None:
    assert Lifted(half, rand(2, 3, 5, 8, dtype=BF16), *angles()).fused == {"lift_rotary": 1}


def test_narrow_float32_angles_of_a_bfloat16_query_are_left_alone() -> None:
    assert Lifted(narrow, rand(2, 3, 5, 8, dtype=BF16), *angles()).fused == {}


def not_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (torch.cat((x[..., 4:], x[..., :4]), -1) * sin)


def other_half_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (torch.cat((x[..., 4:], -x[..., :4]), -1) * sin)


def another_dimension(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (torch.cat((-x[:, :, 2:4], x[:, :, :3]), -2) * sin)


def two_tensors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x + 1) * sin)


def sum_of_the_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos[..., :4] + b * sin[..., :4], b * cos[..., :4] + a * sin[..., :4]], dim=-1)


def rotation_is_returned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = rotate_half(x)
    return (x * cos) + (turned * sin), turned


def angles_larger_than_the_query(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x[:1], cos.expand(2, 1, 5, 8), sin.expand(2, 1, 5, 8))


@cases(
    not_negated,
    other_half_negated,
    unequal_parts,
    another_dimension,
    two_tensors,
    sum_of_the_pairs,
    rotation_is_returned,
    angles_larger_than_the_query,
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_only_looks_like_an_embedding_is_left_alone(fn: Callable[..., Tensor], dynamic: bool) -> None:
    assert Lifted(fn, rand(2, 3, 5, 8), *angles(), dynamic=dynamic).fused == {}


@pytest.mark.parametrize(("fn", "dynamic"), [(half, True), (interleaved, False)], ids=["half", "interleaved"])
def test_query_and_key_share_one_op_in_every_layer(fn: Callable[..., Tensor], dynamic: bool) -> None:
    """The angles are the same in all layers: a query must not be paired with the key of another layer."""

    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(2):
            turned_query, turned_key = fn(query, cos, sin), fn(key, cos, sin)
            query, key = query + turned_key, key * turned_query.sum(1, keepdim=True)
        return query + key

    query, key = rand(2, 3, 5, 8, dtype=BF16), rand(2, 1, 5, 8, dtype=BF16)
    lifted = Lifted(model, query, key, *angles(BF16), dynamic=dynamic)
    assert lifted.fused == {"lift_rotary": 4, "rotary_qk": 2}
    assert lifted.count(ops.rotary) == 0


def test_an_embedding_alone_and_two_with_other_angles_stay_apart() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return half(query, cos, sin), half(key, sin, cos)

    assert Lifted(model, rand(2, 3, 5, 8), rand(2, 1, 5, 8), *angles()).fused == {"lift_rotary": 2}
    assert Lifted(half, rand(2, 3, 5, 8), *angles()).fused == {"lift_rotary": 1}
