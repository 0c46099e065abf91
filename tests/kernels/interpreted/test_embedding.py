"""Rows of tables: any size, any type, any stride, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.tokens import MOST_INDICES
from graphex.ops.definition import SPECS
from graphex.ops.tokens import COPIED, INDICES
from tests.harness.kernels.compare import launcher
from tests.harness.properties import effort

embedding = launcher("graphex::embedding")
dtypes = st.sampled_from(sorted(COPIED, key=str))
counts = st.lists(st.integers(0, 4), max_size=3)
widths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 511, 513, 1030, 2100]))


def any_bits(rows: int, columns: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A table of all that its type can hold, infinities and numbers that are none among it."""
    size = dtype.itemsize
    return torch.randint(256, (rows, (columns + gap) * size), dtype=torch.uint8).view(dtype)[:, :columns]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


def check(weight: Tensor, indices: Tensor) -> None:
    found, wanted = embedding(weight, indices), SPECS["graphex::embedding"].reference(weight, indices)
    assert isinstance(found, Tensor)
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert torch.equal(bits(found.reshape(-1)), bits(wanted.reshape(-1)))


@given(counts, st.integers(1, 9), widths, st.integers(0, 3), dtypes, st.sampled_from(INDICES), st.integers(0, 2))
@effort(60)
def test_rows_are_those_of_the_table(shape, rows, width, gap, dtype, index_dtype, spread):
    """`spread` dimensions of the indices are every second one of something larger."""
    torch.manual_seed(0)
    spread = min(spread, len(shape))
    larger = [2 * size for size in shape[:spread]] + shape[spread:]
    indices = torch.randint(rows, larger, dtype=index_dtype)[tuple([slice(None, None, 2)] * spread)]
    check(any_bits(rows, width, dtype, gap), indices)


def test_columns_and_expanded_indices_are_rows_too():
    weight = any_bits(8, 24, torch.bfloat16)
    check(weight, torch.randint(8, (4, 6))[:, -1:])
    check(weight, torch.randint(8, (4, 6)).t())
    check(weight, torch.randint(8, (3, 1)).expand(3, 5))
    check(weight[:1].expand(4, 24), torch.tensor([3, 0]))
    check(weight[2:, :1], torch.tensor([[5]]))


def test_as_many_indices_as_it_takes():
    weight = any_bits(5, 3, torch.float16)
    check(weight, torch.randint(5, (MOST_INDICES,)))


@pytest.mark.parametrize("index", [5, -1, 2**31, 2**32 + 1, -(2**63)])
def test_an_index_outside_of_the_table_is_not_read(index):
    with pytest.raises(Exception, match="outside of the table"):
        embedding(torch.randn(5, 8), torch.tensor([1, index]))


@pytest.mark.parametrize(
    ("weight", "indices", "reason"),
    [
        (torch.randn(4, 6).t(), torch.tensor([1]), "not adjacent"),
        (torch.randn(4, 6)[:, ::2], torch.tensor([1]), "not adjacent"),
        (torch.randn(4, 6).to(torch.complex64), torch.tensor([1]), "complex64"),
        (torch.ones(4, 6, dtype=torch.bool), torch.tensor([1]), "bool"),
        (torch.randn(4, 6), torch.tensor([1], dtype=torch.int16), "int16"),
        (torch.randn(4, 0), torch.tensor([1]), "no row"),
        (torch.randn(0, 6), torch.tensor([], dtype=torch.int64), "no row"),
        (torch.randn(4, 6), torch.tensor([1], device="meta"), "different devices"),
        (torch.randn(4, 6), torch.zeros(MOST_INDICES + 1, dtype=torch.int64), f"more than {MOST_INDICES}"),
    ],
)
def test_what_is_declined_is_declined_with_a_reason(weight, indices, reason):
    found = embedding(weight, indices)
    assert isinstance(found, Refusal)
    assert reason in found.reason
