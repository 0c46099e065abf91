"""No-op removal: every rule fires where it must, is refused where the user could tell, and leaves the rest alone."""

from __future__ import annotations

import pytest
import torch

import graphex
from tests.harness.comparing import assert_same_to_user
from tests.harness.compiling import Optimised, aten, trace

prims = torch.ops.prims

X = torch.randn(3, 4)
WHOLE = torch.arange(12).view(3, 4)
IMAGE = torch.randn(1, 3, 4, 4)

ROUNDING = {"ceil": aten.ceil, "floor": aten.floor, "round": aten.round, "trunc": aten.trunc}

# rule, op as called, an input: each returns its input unchanged
NOOPS = {
    "full_slice": ("full_slice", lambda x: aten.slice.Tensor(x, 0, 0, 3), X),
    "full_slice, end beyond the size": ("full_slice", lambda x: aten.slice.Tensor(x, 1, 0, 2**63 - 1), X),
    "full_slice, negative dim": ("full_slice", lambda x: aten.slice.Tensor(x, -1, 0, 4), X),
    "full_slice, defaults": ("full_slice", lambda x: aten.slice.Tensor(x), X),
    "full_slice, the last of one": ("full_slice", lambda x: aten.slice.Tensor(x, 1, -1, 2**63 - 1), X[:, :1].clone()),
    "full_slice, from before the start": ("full_slice", lambda x: aten.slice.Tensor(x, 0, -9, 3), X),
    "full_scatter": ("full_scatter", lambda x: aten.slice_scatter.default(torch.zeros_like(x), x, 0, 0, 3), X),
    "repeat_once": ("repeat_once", lambda x: aten.repeat.default(x, [1, 1]), X),
    "pad_nothing": ("pad_nothing", lambda x: aten.constant_pad_nd.default(x, [0, 0, 0, 0]), X),
    "same_type": ("same_type", lambda x: prims.convert_element_type.default(x, torch.float32), X),
    "same_device": ("same_device", lambda x: prims.device_put.default(x, torch.device("cpu")), X),
    "same_cast": ("same_cast", lambda x: aten._to_copy.default(x, dtype=torch.float32), X),
    **{f"round_integer, {name}": ("round_integer", op.default, WHOLE) for name, op in ROUNDING.items()},
    "power_one": ("power_one", lambda x: aten.pow.Tensor_Scalar(x, 1), X),
    "power_one, float": ("power_one", lambda x: aten.pow.Tensor_Scalar(x, 1.0), X),
    "single_cat": ("single_cat", lambda x: aten.cat.default([x]), X),
    "single_cat, dim 1": ("single_cat", lambda x: aten.cat.default([x], 1), X),
    "single_cat, empty parts": ("single_cat", lambda x: aten.cat.default([x[:, :0], x, x[:, :0]], 1), X),
    "same_view": ("same_view", lambda x: aten.view.default(x, [3, 4]), X),
    "same_view, inferred": ("same_view", lambda x: aten.view.default(x, [3, -1]), X),
    "same_view, unsafe": ("same_view", lambda x: aten._unsafe_view.default(x, [3, 4]), X),
    "same_view, expand": ("same_view", lambda x: aten.expand.default(x, [3, 4]), X),
    "same_copy": ("same_copy", lambda x: aten.copy.default(torch.zeros_like(x), x), X),
    "plain_copy, clone": ("plain_copy", aten.clone.default, X),
    "plain_copy, alias": ("plain_copy", aten.alias.default, X),
    "plain_copy, detach": ("plain_copy", aten.detach.default, X),
    "plain_copy, lift_fresh_copy": ("plain_copy", aten.lift_fresh_copy.default, X),
    "plain_copy, same format": (
        "plain_copy",
        lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
        X,
    ),
}
VIEWS = [
    name for name in NOOPS if name.startswith(("full_slice", "same_view", "plain_copy, alias", "plain_copy, detach"))
]
VIEWS.remove("same_view, unsafe")  # its schema says it is a copy
COPIES = [name for name in NOOPS if name not in (*VIEWS, "same_view, unsafe")]
COPIES.remove("same_device")  # its schema says it is a copy; on the same device it is the input itself
# called with a number that fits one size
FOR_ONE_SIZE = ("full_slice", "full_slice, negative dim", "full_slice, from before the start", "full_scatter")
FOR_ANY_SIZE = [name for name in NOOPS if name not in FOR_ONE_SIZE and not name.startswith("same_view")]
every_noop = pytest.mark.parametrize("name", NOOPS)

# the same ops where they do something
WORK = {
    "slice from 1": (lambda x: aten.slice.Tensor(x, 0, 1, 3), X),
    "slice to 2": (lambda x: aten.slice.Tensor(x, 0, 0, 2), X),
    "slice to -1": (lambda x: aten.slice.Tensor(x, 0, 0, -1), X),
    "slice with step 2": (lambda x: aten.slice.Tensor(x, 1, 0, 4, 2), X),
    "scatter into a part": (lambda x: aten.slice_scatter.default(torch.zeros(6, 4), x, 0, 0, 3), X),
    "scatter broadcast": (lambda x: aten.slice_scatter.default(torch.zeros_like(x), aten.expand(x[:1], [3, 4])), X),
    "repeat 2": (lambda x: aten.repeat.default(x, [2, 1]), X),
    "repeat into a new dim": (lambda x: aten.repeat.default(x, [1, 1, 1]), X),
    "pad 1": (lambda x: aten.constant_pad_nd.default(x, [0, 1]), X),
    "pad -1 and 1": (lambda x: aten.constant_pad_nd.default(x, [-1, 1]), X),
    "another type": (lambda x: aten._to_copy.default(x, dtype=torch.float64), X),
    "another element type": (lambda x: prims.convert_element_type.default(x, torch.bfloat16), X),
    "another format": (lambda x: aten._to_copy.default(x, memory_format=torch.channels_last), IMAGE),
    "channels_last clone": (lambda x: aten.clone.default(x, memory_format=torch.channels_last), IMAGE),
    "clone of a transposed tensor made contiguous": (
        lambda x: aten.clone.default(aten.transpose.int(x, 0, 1), memory_format=torch.contiguous_format),
        X,
    ),
    "ceil of floats": (aten.ceil.default, X),
    "floor of floats": (aten.floor.default, X),
    "round of floats": (aten.round.default, X),
    "trunc of floats": (aten.trunc.default, X),
    "power 2": (lambda x: aten.pow.Tensor_Scalar(x, 2), X),
    "power 0": (lambda x: aten.pow.Tensor_Scalar(x, 0), X),
    "power 1.0 of integers": (lambda x: aten.pow.Tensor_Scalar(x, 1.0), WHOLE),
    "cat of two": (lambda x: aten.cat.default([x, x]), X),
    "cat with an empty part of another type": (lambda x: aten.cat.default([x, x[:0].double()]), X),
    "view of another shape": (lambda x: aten.view.default(x, [4, 3]), X),
    "expand": (lambda x: aten.expand.default(x, [2, 3, 4]), X),
    "copy of a broadcast": (lambda x: aten.copy.default(torch.zeros(2, 3, 4), x), X),
    "copy into another type": (lambda x: aten.copy.default(torch.zeros(3, 4, dtype=torch.int64), x), X),
}


def used_inside(op):
    """The op between two others: nobody outside can see what it returned."""
    return lambda x: aten.mul.Tensor(op(aten.add.Tensor(x, 1)), 2)


@every_noop
def test_noop_inside_a_graph_is_removed(name):
    rule, op, given = NOOPS[name]
    made = Optimised(used_inside(op), given)
    assert rule in made.cleaned()
    assert [node.op for node in made.seen.gm.graph.nodes].count("call_function") == 2


@pytest.mark.parametrize("name", FOR_ANY_SIZE)
def test_noop_of_dynamic_shape_is_removed(name):
    rule, op, given = NOOPS[name]
    made = Optimised(used_inside(op), given, dynamic=True)
    assert rule in made.cleaned()
    larger = torch.cat([given, given])
    assert_same_to_user(made.run, used_inside(op), larger)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.view.default(x, [x.shape[0], x.shape[1]]),
        lambda x: aten.expand.default(x, [x.shape[0], x.shape[1]]),
        lambda x: aten.slice.Tensor(x, 0, 0, x.shape[0]),
        lambda x: aten.slice.Tensor(x, 0, 0, x.shape[0] + 1),
        lambda x: aten.slice_scatter.default(torch.zeros_like(x), x, 0, 0, x.shape[0]),
    ],
    ids=["view", "expand", "slice", "slice beyond", "slice_scatter"],
)
def test_sizes_are_compared_as_expressions(op):
    made = Optimised(used_inside(op), X, dynamic=True)
    assert len(made.cleaned()) == 1
    assert_same_to_user(made.run, used_inside(op), torch.randn(7, 5))


def test_a_slice_that_covers_only_some_sizes_is_kept():
    def first_three(x):
        return aten.mul.Tensor(aten.slice.Tensor(x, 0, 0, 3), 2)

    made = Optimised(first_three, X, dynamic=True)
    assert made.cleaned() == []
    assert_same_to_user(made.run, first_three, torch.randn(7, 4))


@pytest.mark.parametrize("name", WORK)
def test_op_that_does_something_is_kept(name):
    op, given = WORK[name]
    before = [node.target for node in trace(used_inside(op), given).graph.nodes]
    made = Optimised(used_inside(op), given)
    assert made.cleaned() == []
    assert made.seen.targets == before


@pytest.mark.parametrize("name", COPIES)
def test_returned_copy_of_an_input_is_kept(name):
    rule, op, given = NOOPS[name]
    made = Optimised(op, given)
    assert made.reasons(rule) == ["an output would begin to share memory with an input"]
    assert rule not in made.cleaned()


@pytest.mark.parametrize("name", COPIES)
def test_returned_copy_of_another_result_is_kept(name):
    rule, op, given = NOOPS[name]

    def both(x):
        y = aten.add.Tensor(x, 1)
        return y, op(y)

    assert Optimised(both, given).reasons(rule) == ["two outputs would begin to share memory"]


@pytest.mark.parametrize("name", VIEWS)
def test_returned_view_that_changes_nothing_is_replaced_by_what_it_looks_at(name):
    rule, op, given = NOOPS[name]
    assert Optimised(op, given).cleaned() == [rule]


def the_only_copy_of_an_intermediate(x):
    return aten.clone.default(aten.add.Tensor(x, 1))


def read_before_the_original_is_overwritten(x):
    result = aten.mul.Tensor(aten.clone.default(x), 2)
    aten.add_.Tensor(x, 1)
    return result


def copied_three_times(x):
    y = aten.add.Tensor(x, 1)
    for _ in range(3):
        y = aten.clone.default(y)
    return aten.mul.Tensor(y, 2)


def returned_twice(x):
    y = aten.add.Tensor(x, 1)
    return aten.clone.default(y), aten.clone.default(y)


def viewed_and_returned(x):
    return aten.view.default(aten.clone.default(x), [12])


def written_to(x):
    y = aten.clone.default(x)
    aten.add_.Tensor(y, 1)
    return aten.mul.Tensor(x, y)


def written_to_through_a_view(x):
    y = aten.clone.default(x)
    aten.zero_.default(aten.slice.Tensor(y, 0, 0, 1))
    return aten.mul.Tensor(x, y)


def read_after_the_original_is_overwritten(x):
    old = aten.clone.default(x)
    aten.add_.Tensor(x, 1)
    return aten.mul.Tensor(old, 2)


def addressed_by_as_strided(x):
    part = aten.clone.default(aten.slice.Tensor(x, 0, 1, 2))
    return aten.mul.Tensor(aten.as_strided.default(part, [2], [1], 0), 2)


OVERWRITTEN = "the original is written to while the copy is still read"


@pytest.mark.parametrize(
    ("fn", "removed", "reasons"),
    [
        (the_only_copy_of_an_intermediate, 1, []),
        (read_before_the_original_is_overwritten, 1, []),
        (copied_three_times, 3, []),
        (returned_twice, 1, ["two outputs would begin to share memory"]),
        (viewed_and_returned, 0, ["an output would begin to share memory with an input"]),
        (written_to, 0, ["the copy is written to later"]),
        (written_to_through_a_view, 0, ["the copy is written to later"]),
        (read_after_the_original_is_overwritten, 0, [OVERWRITTEN]),
        (addressed_by_as_strided, 0, ["as_strided addresses the copy's own storage"]),
    ],
)
def test_a_copy_is_removed_where_a_caller_cannot_tell(fn, removed, reasons):
    made = Optimised(fn, X)
    assert made.cleaned() == ["plain_copy"] * removed
    assert made.reasons("plain_copy") == reasons


def test_refusal_names_the_node_and_the_users_line():
    report = graphex.explain(lambda x: x.clone(), (X,), calls=1)
    (miss,) = report.rule("plain_copy").near_misses
    assert miss.node == "clone"
    assert miss.line.startswith("test_noop.py:")
    assert "x.clone()" in miss.line


def test_rewrite_names_both_nodes_the_reason_and_the_line():
    report = graphex.explain(lambda x: x.sin().clone().cos(), (X,), calls=1)
    (made,) = report.rule("plain_copy").rewrites
    assert (made.nodes, made.into) == (("clone",), ("sin",))
    assert made.because
    assert ".clone()" in made.line


def test_through_torch_compile_a_returned_clone_is_still_a_clone():
    fast = torch.compile(lambda x: (x.clone(), x[:], x.sin().contiguous()), backend="graphex")
    assert_same_to_user(fast, lambda x: (x.clone(), x[:], x.sin().contiguous()), X)


def test_remove_noop_ops_false_keeps_everything():
    made = Optimised(used_inside(aten.clone.default), X, remove_noop_ops=False)
    assert made.count(aten.clone.default) == 1
    assert "remove_noops" not in [record.name for record in made.journal.passes]


@every_noop
def test_a_disabled_rule_does_not_fire(name):
    rule, op, given = NOOPS[name]
    assert rule not in Optimised(used_inside(op), given, disable_rules=[rule]).cleaned()


def test_disabling_one_rule_leaves_the_others():
    def both(x):
        return aten.mul.Tensor(aten.pow.Tensor_Scalar(aten.clone.default(aten.add.Tensor(x, 1)), 1), 2)

    assert Optimised(both, X, disable_rules=["plain_copy"]).cleaned() == ["power_one"]
