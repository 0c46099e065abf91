"""The version counters of inputs after a call: autograd sees the writes that the program has made, and no more."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.capture import compile_it, replays

WRITES = {
    "add_": lambda x: x.add_(1),
    "column": lambda x: x[:, 1].mul_(2),
    "copy_": lambda x: x.copy_(x + 1),
    "far": lambda x: x.copy_((x + 1) * 2),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), x[:1] * 2),
    "read": lambda x: x.sum(),
    "row": lambda x: x[0].add_(1),
    "setitem": lambda x: x.__setitem__(0, 3.0),
    "turned": lambda x: x.t().mul_(2),
    "zero_": lambda x: x.zero_(),
}


def counted(f, x: Tensor) -> int:
    before = x._version
    f(x)
    return x._version - before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_two_writes_are_two(mode):
    def f(x):
        x.add_(1)
        x[0].mul_(2)

    run = torch.compile(f, backend="graphex")
    with mode():
        assert [counted(run, torch.ones(3, 3)) for _ in range(3)] == [2, 2, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(WRITES)), min_size=1, max_size=5), st.booleans())
def test_random_programs_count_what_eager_counts(names, is_grad):
    def f(x):
        found = [WRITES[name](x) for name in names]
        return x * 1, *(each for each in found if each is not None and each.dim() == 0)

    torch._dynamo.reset()
    run = torch.compile(f, backend="graphex")
    with torch.set_grad_enabled(is_grad):
        for _ in range(2):
            assert counted(run, torch.ones(3, 3)) == counted(f, torch.ones(3, 3))


@torch.no_grad()
def test_replays_count_the_same(where):
    def f(x, y):
        x.add_(y)
        x[0].mul_(2)
        return x + y

    run, y = compile_it(f), torch.ones(3, device=where)
    x = torch.zeros(3, device=where)
    for _ in range(6):
        assert counted(lambda x: run(x, y), x) == 2
    assert replays(run) >= 4


@pytest.mark.parametrize("is_grad", [False, True])
def test_a_saved_tensor_that_was_written_is_found(is_grad):
    run = torch.compile(lambda c, x: (c.add_(1), (x * 2).sum())[1], backend="graphex")
    for _ in range(2):
        saved, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
        product = weight * saved
        run(saved, torch.ones(3, requires_grad=is_grad))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_inputs_without_a_counter():
    run = torch.compile(lambda x: x.add_(1).mul_(2) * 1, backend="graphex")
    with torch.inference_mode():
        x = torch.zeros(3)
        for _ in range(2):
            run(x)
        assert x.tolist() == [6.0, 6.0, 6.0]


def test_a_call_that_raises_counts_what_was_written():
    def f(x, table, index):
        x.add_(1)
        rows = table[index]
        x.mul_(2)
        return rows

    run, table = torch.compile(f, backend="graphex"), torch.ones(3)
    run(torch.zeros(3), table, torch.tensor([0]))
    for call in (f, run):
        x = torch.zeros(3)
        with pytest.raises(IndexError):
            call(x, table, torch.tensor([9]))
        assert x._version == 1
