"""npugraph_ex's scenarios 19 to 30: passes, on the simulated npu, by the names of npugraph_ex."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.ascend import Compiled, on_npu

IN_PLACE = "write_input_in_place"


def test_scenario_19_intermediates_and_inputs_are_computed_in_place():
    def f(x, y):
        y.mul_(2)
        return x.clone().add(1).relu() + y

    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(3), torch.randn(3)))
    assert "aten.mul_.Tensor" in compiled.ops()
    assert "aten.relu_.default" in compiled.ops()
    assert "aten.copy_.default" not in compiled.ops()


def test_scenario_20_a_written_slice_of_an_input():
    def f(x, y):
        x[:, 1:3].add_(y)
        return x.sum(0)

    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(3, 4), torch.randn(3, 2)))
    assert IN_PLACE in compiled.rules()


def test_scenario_21_a_chain_of_updates_keeps_no_copy():
    """There: one copy_ of the whole stays. Here: none."""
    compiled = Compiled(lambda x: x.mul_(2).add_(1).sum())
    compiled(*on_npu(torch.randn(4)))
    assert "aten.copy_.default" not in compiled.ops()


def test_scenario_22_input_inplace_pass_can_be_turned_off():
    compiled = Compiled(lambda x: x.mul_(2).sum(), input_inplace_pass=False)
    compiled(*on_npu(torch.randn(4)))
    assert IN_PLACE not in compiled.rules()
    assert "aten.copy_.default" in compiled.ops()


@torch.library.custom_op("graphex_scenarios::add_to", mutates_args=("a", "rest"))
def add_to(a: Tensor, rest: list[Tensor], value: Tensor) -> None:
    a.add_(value)
    for each in rest:
        each.mul_(2)


def test_scenario_23_a_custom_op_that_writes_copies_only_what_is_read_later():
    def f(a, b, c, value):
        add_to(a, [b, c], value)
        return a + 1, b.sum()

    def still_read(a, b, c, value):
        old = a[:]
        before = old + 0
        add_to(a, [b, c], value)
        return before, b.sum() + c.sum()

    for fn in (f, still_read):
        torch._dynamo.reset()
        compiled = Compiled(fn)
        compiled(*on_npu(*(torch.randn(3) for _ in range(4))))
        assert "aten.clone.default" not in compiled.ops()
        assert "aten.copy_.default" not in compiled.ops()


library = torch.library.Library("graphex_scenarios", "FRAGMENT")
library.define("both(Tensor a, Tensor b) -> (Tensor, Tensor)")
library.define("both_(Tensor(a!) a, Tensor(b!) b) -> ()")
library.impl("both", lambda a, b: (a + 1, b * 2), "CompositeExplicitAutograd")


def both_(a, b):
    a.add_(1)
    b.mul_(2)


library.impl("both_", both_, "CompositeExplicitAutograd")


@pytest.mark.parametrize("later", [False, True])
def test_scenario_24_several_results_in_place_unless_an_old_value_is_read_later(later):
    ops = torch.ops.graphex_scenarios

    def f(x, y):
        a, b = x.relu(), y.relu()
        c, d = ops.both(a, b)
        return (c, d, a.sum()) if later else (c, d)

    with graphex.register_inplace_variant(ops.both.default, ops.both_.default, {0: "a", 1: "b"}):
        compiled = Compiled(f)
        compiled(*on_npu(torch.randn(3), torch.randn(3)))
    assert ("graphex_scenarios.both_.default" in compiled.ops()) == (not later)


def twice(x):
    x.copy_(x)
    x.copy_(x)
    return x + 1


def between(x):
    old = x.clone()
    seen = x.sum()
    x.copy_(old)
    return seen + x


@pytest.mark.parametrize("f", [
    lambda x: x.copy_(x).sum(),
    lambda x: x.copy_(x.clone()).sum(),
    lambda x: x.copy_(x.to(x.dtype)) + 1,
    twice,
    between,
])  # fmt: skip
def test_scenario_25_a_copy_to_itself_is_dropped(f):
    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(2, 3)))
    assert "aten.copy_.default" not in compiled.ops()
    assert "self_copy" in compiled.rules()


def test_scenario_25_a_copy_from_another_tensor_stays():
    compiled = Compiled(lambda x, y: x.copy_(y).sum())
    compiled(*on_npu(torch.randn(3), torch.randn(3)))
    assert "aten.copy_.default" in compiled.ops()


NOOPS = {
    "slice": lambda x: x[0:],
    "slice_scatter": lambda x: torch.slice_scatter(x, x + 0.5, 0, 0, 4) - 0.5,
    "repeat": lambda x: x.repeat(1, 1),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "convert": lambda x: x.to(torch.float32, copy=False),
    "ceil": lambda x: x.long().ceil().float(),
    "pow": lambda x: x.pow(1),
    "cat": lambda x: torch.cat([x]),
    "clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", NOOPS)
def test_scenario_26_what_changes_nothing_goes(name):
    compiled = Compiled(lambda x: NOOPS[name](x.sin()) * 2)
    compiled(*on_npu(torch.randn(4, 3)))
    gone = {"pad": "constant_pad_nd", "convert": "_to_copy"}.get(name, name)
    assert not any(op.split(".")[1] == gone for op in compiled.ops() if op.startswith("aten") and name != "ceil")
    assert name != "ceil" or "aten.ceil.default" not in compiled.ops()


def test_scenario_26_a_returned_clone_is_a_clone_and_the_option_turns_it_off():
    compiled = Compiled(lambda x: x.clone())
    (x,) = on_npu(torch.randn(3))
    assert compiled(x).data_ptr() != x.data_ptr()
    off = Compiled(lambda x: x.sin().clone() + 1, remove_noop_ops=False, inplace_pass=False)
    off(x)
    assert "aten.clone.default" in off.ops()


def test_scenario_26_a_clone_that_is_written_to():
    def f(x):
        y = x.clone()
        y.add_(1)
        return y * x

    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(3)))


def test_scenario_27_what_is_dead_goes():
    compiled = Compiled(lambda x: (torch.zeros_like(x), x + 1)[1])
    compiled(*on_npu(torch.randn(3)))
    assert compiled.ops() == ["aten.add.Tensor"]


def joined(x, y):
    return torch.cat([x @ y, y @ x]) + 1


@pytest.mark.parametrize("f", [
    joined,
    lambda x, y: torch.cat([y.mm(x), x.mm(y)]) + 1,
    lambda x, y: torch.cat([x.mm(y), torch.addmm(x, x, y), (x * y).relu()]) + 1,
], ids=["basic", "reversed", "mixed"])  # fmt: skip
def test_scenario_28_parts_of_a_cat_are_computed_in_place(f):
    compiled = Compiled(f)
    compiled(*on_npu(torch.randn(256, 256), torch.randn(256, 256)))
    assert "aten.cat.default" not in compiled.ops()


def test_scenario_28_parts_along_the_last_dimension_too_and_a_part_without_out_stays():
    """There: only dim 0, and int + float crashes. Here: proven parts of any kind, and types are respected."""
    types = Compiled(lambda x, y: torch.cat([x.mm(y), (x > 0).long()]) * 2)
    types(*on_npu(torch.randn(4, 4), torch.randn(4, 4)))
    off = Compiled(joined, remove_cat_ops=False)
    off(*on_npu(torch.randn(4, 4), torch.randn(4, 4)))
    assert "aten.cat.default" in off.ops()


def test_scenario_29_an_update_through_a_view_is_in_place_again():
    def f(cache, indices, updates):
        return torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, 2), indices, updates).sum()

    def read_before(cache, indices, updates):
        old = cache * 1
        torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, 2), indices, updates)
        return old

    inputs = torch.zeros(2, 3, 2), torch.tensor([[1], [4]]), torch.ones(2, 2)
    for fn in (f, read_before):
        torch._dynamo.reset()
        compiled = Compiled(fn)
        compiled(*on_npu(*inputs))
        assert "aten.copy_.default" not in compiled.ops()


def test_scenario_30_the_journal_has_what_each_pass_added_and_removed():
    """There: phrases in a log. Here: records."""
    compiled = Compiled(lambda x: x.clone() + 1)
    compiled(*on_npu(torch.randn(3)))
    record = next(record for record in compiled.journal.passes if record.name == "remove_noops")
    assert (record.status, record.removed, record.added) == ("changed", {"aten.clone.default": 1}, {})
    assert record.nodes_before == record.nodes_after + 1
