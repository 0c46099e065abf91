"""Rows of a table that are looked up become `graphex::embedding`, where there is a kernel, and nothing else changes."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import graphex
from tests.harness.compiling import Lifted, rand
from tests.harness.properties import effort

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
ours, theirs = torch.ops.graphex.embedding, torch.ops.aten.embedding
ONCE = {"lift_embedding": 1}


def embed(indices: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(indices, table) + 1


def indices_of(*shape: int, rows: int = 8, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(rows, shape, dtype=dtype)


# -- where it applies --------------------------------------------------------------------------------------------------


def journal_on(device: str, make: Callable[[], Tensor] | None = None) -> graphex.Journal:
    """What becomes of a graph with one lookup in a table. Graphs on CUDA are compiled, not run."""
    with FakeTensorMode(), torch.device(device):
        table = torch.empty(32, 16, dtype=torch.bfloat16) if make is None else make()
        inputs = torch.empty(3, 1, dtype=torch.int64), table
    return graphex.journal(graphex.compile_fx(make_fx(embed)(*inputs)))


def matches(journal: graphex.Journal) -> dict[str, int]:
    return {tried.rule: tried.matches for tried in journal.rules}


@needs_triton
def test_a_lookup_on_the_device_is_lifted() -> None:
    journal = journal_on("cuda")
    assert matches(journal) == ONCE
    assert journal.fallbacks == []


def test_a_lookup_on_the_host_stays() -> None:
    journal = journal_on("cpu")
    assert journal.rules == []
    assert journal.rewrites == []


@needs_triton
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(32, 16, dtype=torch.complex64), "the table is complex64"),
        (lambda: torch.empty(32, 16, dtype=torch.bool), "the table is bool"),
        (lambda: torch.empty(16, 32).t(), "the elements of a row are not adjacent"),
        (lambda: torch.empty_strided((32, 16), (32, 2)), "the elements of a row are not adjacent"),
    ],
)
def test_a_table_that_the_kernel_does_not_take_stays_and_says_why(make: Callable[[], Tensor], reason: str) -> None:
    journal = journal_on("cuda", make)
    assert matches(journal) == {"lift_embedding": 0}
    assert [refusal.reason for refusal in journal.refusals if refusal.rule == "lift_embedding"] == [reason]


@pytest.mark.parametrize(("count", "lifted"), [(64, True), (65, False)])
def test_more_indices_than_a_few_are_left_to_pytorch(count: int, lifted: bool) -> None:
    found = Lifted(embed, indices_of(count), rand(8, 4))
    assert found.count(ours) == lifted
    assert found.count(theirs) == (not lifted)
    assert found.why == ("" if lifted else "65 indices are more than 64: PyTorch's own kernel is as good")


def test_indices_that_are_certainly_many_are_left_to_pytorch_whatever_their_number() -> None:
    found = Lifted(embed, indices_of(3, 70), rand(8, 4), dynamic=True)
    assert found.count(theirs) == 1
    assert "indices are more than 64" in found.why


def test_a_prompt_is_no_problem_to_explain() -> None:
    def read(prompt: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        x = functional.embedding(prompt, table)
        heads = functional.linear(x, weight).view(1, -1, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads)

    given = indices_of(1, 100), rand(8, 8, dtype=torch.bfloat16), rand(8, 8, dtype=torch.bfloat16)
    report = graphex.explain(read, given, options={"lift_idioms": "always"})
    told = {refusal.rule for refusal in report.journal.refusals if refusal.nothing_lost}
    assert told == {"lift_embedding", "lift_attention", "linears"}
    assert not report.journal.rules
    assert "fused" not in report.summary()
    assert "as good as they are" in str(report)


@needs_triton
def test_rows_with_gaps_are_lifted() -> None:
    assert matches(journal_on("cuda", lambda: torch.empty_strided((32, 16), (40, 1)))) == ONCE


def test_it_can_be_switched_off() -> None:
    lifted = Lifted(embed, indices_of(3), rand(8, 4), disable_rules=["lift_embedding"])
    assert lifted.fused == {}
    assert lifted.count(theirs) == 1


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 4), (0,), (2, 0)], ids=str)
def test_indices_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lifted = Lifted(embed, indices_of(*shape, dtype=dtype), rand(8, 4, dtype=torch.bfloat16))
    assert lifted.fused == ONCE
    assert (lifted.count(ours), lifted.count(theirs)) == (1, 0)


def test_what_only_the_gradient_depends_on_does_not_matter() -> None:
    def embed(indices: Tensor, table: Tensor) -> Tensor:
        padded = functional.embedding(indices, table, padding_idx=2, sparse=True)
        return padded + functional.embedding(indices, table, scale_grad_by_freq=True)

    assert Lifted(embed, torch.tensor([2, 3, 2]), rand(8, 4)).fused == {"lift_embedding": 2}


def test_a_table_whose_rows_are_kept_small_is_written_before_it_is_read() -> None:
    def embed(indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        table = table * 2
        return functional.embedding(indices, table, max_norm=1.0), table

    assert Lifted(embed, torch.tensor([2, 3, 2]), rand(8, 4)).fused == ONCE


def test_symbolic_sizes_are_lifted_once_for_all() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(embed, backend="graphex", dynamic=True, options={"lift_idioms": "always"})
    table = rand(8, 4)
    for count in (3, 200, 64, 2):
        indices = indices_of(count)
        assert torch.equal(compiled(indices, table), embed(indices, table))
    assert matches(graphex.journal(compiled)) == ONCE


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    gap=st.integers(0, 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool]),
    padding=st.integers(-1, 0),
    turned=st.booleans(),
    dynamic=st.booleans(),
)
@effort(25)
def test_whatever_is_looked_up_is_what_eager_finds(
    shape: list[int],
    rows: int,
    columns: int,
    gap: int,
    dtype: torch.dtype,
    padding: int,
    turned: bool,
    dynamic: bool,
) -> None:
    def look_up(indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        table = table.t() if turned else table[:, : table.shape[1] - gap]
        found = functional.embedding(indices, table, padding_idx=padding if padding >= 0 else None)
        return found, found.reshape(-1)[:1]

    table = rand(columns, rows) if turned else rand(rows, columns + gap)
    table = (10 * table).to(dtype)
    fused = Lifted(look_up, indices_of(*shape, rows=rows), table, dynamic=dynamic).fused
    assert fused == ONCE or turned or dtype == torch.bool


# -- training ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Looks up, and learns the table, with a linear layer behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, **options)
        self.layer = nn.Linear(6, 6)

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.layer(self.table(indices)).tanh()
        return found


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_a_training_step_learns_what_eager_learns(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, indices = Model(**options), torch.tensor([[2, 3, 2], [7, 2, 0]])
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options={"lift_idioms": "always"})
    results = []
    for call, owner in ((compiled, model), (other, other)):
        loss = call(indices).square().sum()
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in owner.named_parameters()}))
    torch.testing.assert_close(*results)
    fused = {(tried.graph.split()[-1], tried.rule) for tried in graphex.journal(compiled).rules if tried.matches}
    assert ("forward", "lift_embedding") in fused
    assert ("backward", "lift_embedding") not in fused
    if options.get("padding_idx") is not None:
        assert not model.table.weight.grad[2].any()
