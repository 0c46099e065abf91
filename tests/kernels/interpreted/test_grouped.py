"""Products of groups of rows and the way back from experts, of any size, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.ops.definition import SPECS
from tests.harness.kernels.compare import launcher

NAMES = ("npu::npu_grouped_matmul", "npu::npu_quant_matmul", "npu::npu_moe_finalize_routing")
grouped, quant, finalize = (launcher(name) for name in NAMES)
by_reference = {name: SPECS[name].reference for name in NAMES}


def weights(count: int, size: int, width: int, *, transposed: bool, is_bytes: bool) -> Tensor:
    shape = (count, width, size) if transposed else (count, size, width)
    made = torch.randint(-128, 128, shape, dtype=torch.int8) if is_bytes else torch.randn(shape).half() / 8
    return made.transpose(1, 2) if transposed else made


def check(x: Tensor, weight: Tensor, **options: Any) -> None:
    found, wanted = grouped([x], [weight], **options), by_reference[NAMES[0]]([x], [weight], **options)
    assert not isinstance(found, Refusal), found
    assert (found[0].shape, found[0].dtype) == (wanted[0].shape, wanted[0].dtype)
    assert found[0].is_contiguous()
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-3, atol=2e-3)


# Where the groups end: empty ones, rows behind the last, one for all, one larger than a tile of rows.
ENDS = [[1, 1, 5], [0, 0, 0], [7, 7, 7], [3, 30, 40]]


@pytest.mark.parametrize(("ends", "transposed"), [*((ends, False) for ends in ENDS), (ENDS[0], True)], ids=str)
def test_groups_of_rows(ends, transposed):
    x = torch.randn(ends[-1] + 2, 40).half()
    bias = {"bias": [torch.randn(3, 70).half()]} if transposed else {}
    weight = weights(3, 40, 70, transposed=transposed, is_bytes=False)
    check(x, weight, group_list=torch.tensor(ends), split_item=3, group_type=0, **bias)


@pytest.mark.parametrize(("scaled_by", "transposed"), [("columns", False), ("columns and rows", True)])
def test_groups_of_bytes(scaled_by, transposed):
    counts = torch.tensor([0, 18, 4])
    x = torch.randint(-128, 128, (25, 200), dtype=torch.int8)
    rows = torch.rand(25).index_fill(0, torch.arange(22, 25), torch.nan)  # nothing is known of rows without a group
    options: dict[str, Any] = {"scale": [torch.rand(3, 33) / 1000], "output_dtype": torch.float16}
    if scaled_by == "columns":
        options["bias"] = [torch.randint(-999, 999, (3, 33), dtype=torch.int32)]
    else:
        options |= {"per_token_scale": [rows], "bias": [torch.randn(3, 33)]}
    weight = weights(3, 200, 33, transposed=transposed, is_bytes=True)
    check(x, weight, group_list=counts, group_list_type=1, split_item=3, group_type=0, **options)


@pytest.mark.parametrize(
    ("rows", "size", "width", "dtype"),
    [(1, 64, 16, torch.float16), (20, 130, 70, torch.float32), (150, 32, 130, torch.float16), (20, 130, 70, None)],
)
def test_one_matrix_of_bytes(rows, size, width, dtype):
    x = torch.randint(-128, 128, (rows, size), dtype=torch.int8)
    weight = weights(1, size, width, transposed=rows == 20, is_bytes=True)[0]
    options: dict[str, Any] = {"output_dtype": dtype, "bias": torch.randint(-999, 999, (width,), dtype=torch.int32)}
    if dtype is None:
        options["offset"] = torch.randn(width)
        scale = torch.rand(1) / 1000
    else:
        options["pertoken_scale"] = torch.rand(rows)
        scale = torch.rand(width) / 100
    found = quant(x, weight, scale, **options)
    torch.testing.assert_close(found, by_reference[NAMES[1]](x, weight, scale, **options), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("width", [8, 700])
def test_rows_come_back_to_their_tokens(mode, width):
    tokens, times = 5, 3
    rows, scales = torch.randn(tokens * times, width).half(), torch.rand(tokens, times)
    places = torch.randperm(tokens * times).int()
    places[4] = -1
    experts = torch.randint(0, 4, (tokens, times)).int()
    skips = torch.randn(tokens, width).half(), torch.randn(tokens, width).half()
    given = (rows, *skips, torch.randn(4, width).half(), scales, places, experts, mode)
    torch.testing.assert_close(finalize(*given), by_reference[NAMES[2]](*given), rtol=1e-3, atol=1e-3)


def test_a_place_that_is_none_of_a_row_stops():
    given = (torch.randn(4, 8), None, None, None, torch.rand(2, 2), torch.tensor([0, 1, 2, 9]), None)
    with pytest.raises(Exception, match="outside"):
        finalize(*given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": [torch.zeros(40, 70).half()]}, "one stack"),
        ({"group_list": None}, "list of groups"),
        ({"act_type": 1}, "activations"),
        ({"x": [torch.zeros(3, 40)]}, "float32"),
        ({"bias": [torch.zeros(3, 69).half()]}, "one for each column"),
        ({"output_dtype": torch.float32}, "the result is"),
    ],
)
def test_what_the_kernel_does_not_take_is_declined(change, reason):
    given = {"x": [torch.zeros(3, 40).half()], "weight": [torch.zeros(3, 40, 70).half()]}
    given |= {"group_list": torch.tensor([1, 1, 3]), **change}
    found = grouped(given.pop("x"), given.pop("weight"), **given)
    assert isinstance(found, Refusal)
    assert reason in found.reason
