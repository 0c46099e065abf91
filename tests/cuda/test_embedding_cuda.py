"""Rows of tables on a real GPU: bit for bit those of ATen, alone and in compiled models; an index outside stops it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex.kernels.tokens import MOST_INDICES
from graphex.ops import declined
from graphex.ops.tokens import COPIED, INDICES
from tests.harness.processes import run

pytestmark = pytest.mark.cuda

OP = torch.ops.graphex.embedding
WIDTHS = (1, 2, 3, 64, 100, 1023, 4096, 7168, 16385)


def any_bits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(256, (rows, columns * dtype.itemsize), dtype=torch.uint8, device="cuda").view(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def indices_of(*shape: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(rows, shape, dtype=dtype, device="cuda")


def check(weight: Tensor, indices: Tensor) -> None:
    before = declined()
    found, wanted = OP(weight, indices), torch.ops.aten.embedding.default(weight, indices)
    assert declined() == before
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert torch.equal(bits(found.reshape(-1)), bits(wanted.reshape(-1)))


@pytest.mark.parametrize("dtype", sorted(COPIED, key=str), ids=str)
@pytest.mark.parametrize("index_dtype", INDICES, ids=str)
def test_every_type_and_width(dtype, index_dtype):
    for columns in WIDTHS:
        weight = any_bits(37, columns, dtype)
        for count in (1, 2, 16, 17, MOST_INDICES):
            check(weight, indices_of(count, rows=37, dtype=index_dtype))


def test_strides_and_shapes():
    wide = any_bits(50, 300, torch.bfloat16)
    tables = (wide, wide[:, 8:200], wide[:, 3:203], wide[3::2], wide[:1].expand(50, 300))
    tokens = indices_of(4, 10, rows=20)
    parts = tokens[:, -1:], tokens[:, 3:5], tokens[:, ::3], tokens[:, :0], tokens[0, 0]
    for weight in tables:
        for indices in (tokens, tokens.t(), *parts):
            check(weight, indices)


def test_a_row_beyond_what_an_int32_counts():
    weight = torch.empty(2**19 + 3, 2**13, device="cuda", dtype=torch.int8)
    weight[-3:] = any_bits(3, 2**13, torch.int8)
    check(weight, torch.tensor([2**19 + 2, 0, 2**19], device="cuda"))


def test_many_indices_are_left_to_aten():
    weight, indices = any_bits(50, 64, torch.float16), indices_of(MOST_INDICES + 1, rows=50)
    key = "graphex::embedding", f"more than {MOST_INDICES} indices"
    before = declined().get(key, 0)
    assert torch.equal(bits(OP(weight, indices)), bits(weight[indices]))
    assert declined()[key] == before + 1


OUTSIDE = """
import sys, torch, graphex.ops
weight = torch.randn(8, 4096, device="cuda")
found = torch.ops.graphex.embedding(weight, torch.tensor([1, int(sys.argv[1])], device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("stopped", flush=True)
"""


@pytest.mark.parametrize("index", [8, -1, 2**32 + 1])
def test_an_index_outside_of_the_table_stops_the_device(index):
    """In a process of its own: nothing runs on the device after it."""
    ended = run("-c", OUTSIDE, str(index))
    assert "stopped" in ended.stdout, ended.stderr[-2000:]


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 256, **options)
        self.layer = nn.Linear(256, 256)

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.layer(self.table(indices)).tanh()
        return found


def lookups_lifted(compiled: Callable[..., Any]) -> int:
    return sum(tried.matches for tried in graphex.journal(compiled).rules if tried.rule == "lift_embedding")


@torch.no_grad()
def test_a_compiled_model_of_any_number_of_tokens():
    model = Model().cuda()
    compiled = torch.compile(model, backend="graphex", dynamic=True, fullgraph=True)
    for shape in ((2, 3), (16, 2), (5, 100), (2, 3)):
        indices = indices_of(*shape, rows=64)
        for _ in range(2):
            torch.testing.assert_close(compiled(indices), model(indices))
    assert lookups_lifted(compiled) == 1
    assert graphex.journal(compiled).fallbacks == []
    assert "embedding_kernel" in str(graphex.explain(model, (indices_of(2, 3, rows=64),)))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_a_training_step(options):
    model = Model(**options).cuda()
    other, indices = copy.deepcopy(model), torch.tensor([[2, 3, 2], [63, 2, 0]], device="cuda")
    compiled = torch.compile(model, backend="graphex", fullgraph=True)
    gradients = []
    for call, owner in ((compiled, model), (other, other)):
        call(indices).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in owner.named_parameters()})
    torch.testing.assert_close(*gradients)
    assert lookups_lifted(compiled) == 1
