"""Equal calls become one, unless they are random, read changed memory, or the user could see shared memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.comparing import assert_same_to_user
from tests.harness.compiling import Optimised, aten, trace

X = torch.randn(3, 4)
WHOLE = torch.arange(12).view(3, 4)


@torch.library.custom_op("graphex_test::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)


@torch.library.custom_op("graphex_test::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


unknown.register_fake(torch.empty_like)


def twice(op):
    return lambda x: aten.sub.Tensor(op(x), aten.mul.Tensor(op(x), 3))


@pytest.mark.parametrize(
    "op",
    [
        aten.sin.default,
        lambda x: aten.mul.Tensor(x, 2),
        lambda x: aten.sum.dim_IntList(x, [0, 1], True),
        lambda x: aten.view.default(x, [12]),
        lambda x: aten.topk.default(x, 2)[1],
        lambda x: aten.cat.default([x, x]),
        lambda x: aten._to_copy.default(x, dtype=torch.float64),
        lambda x: aten.full.default([3, 4], 2.0, device="cpu"),
        lambda x: aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0],
    ],
    ids=["unary", "scalar", "list", "view", "parts", "cat", "keyword", "constant", "layer_norm"],
)
def test_equal_calls_become_one(op):
    made = Optimised(twice(op), X)
    assert "equal_calls" in made.cleaned()
    assert len(made.seen.targets) < len(trace(twice(op), X).graph.nodes)


def test_equal_chains_become_one_chain():
    made = Optimised(twice(lambda x: aten.cos.default(aten.sin.default(aten.add.Tensor(x, 1)))), X)
    assert made.cleaned() == ["equal_calls"] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: aten.mul.Tensor(x, 1), lambda x: aten.mul.Tensor(x, 1.0)),
        (lambda x: aten.mul.Tensor(x, 1), lambda x: aten.mul.Tensor(x, True)),
        (lambda x: aten.mul.Tensor(x, 0.0), lambda x: aten.mul.Tensor(x, -0.0)),
        (lambda x: aten.mul.Tensor(x, 0.0), lambda x: aten.mul.Tensor(x, 0)),
        (lambda x: aten.mul.Tensor(x, complex(1, 0.0)), lambda x: aten.mul.Tensor(x, complex(1, -0.0))),
        (lambda x: aten.add.Tensor(x, 1), lambda x: aten.add.Tensor(x, 1, alpha=2)),
        (lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.sum.dim_IntList(x, [1])),
        (lambda x: aten.add.Tensor(x, 1), lambda x: aten.sub.Tensor(x, 1)),
        (
            lambda x: aten._to_copy.default(x, dtype=torch.float64),
            lambda x: aten._to_copy.default(x, dtype=torch.float16),
        ),
    ],
    ids=["1 1.0", "1 True", "0.0 -0.0", "0.0 0", "complex zeros", "keyword", "dims", "op", "dtype"],
)
@pytest.mark.parametrize("given", [X, WHOLE], ids=["float", "int"])
def test_calls_that_differ_in_any_argument_stay_two(one, other, given):
    def both(x):
        return aten.sin.default(one(x)), aten.sin.default(other(x))

    assert Optimised(both, given).cleaned() == []


@pytest.mark.parametrize(
    "op",
    [aten.rand_like.default, lambda x: aten.bernoulli.p(x, 0.5), lambda x: torch.ops.graphex_test.noisy(x)],
    ids=["rand_like", "bernoulli", "custom op tagged nondeterministic_seeded"],
)
def test_random_ops_are_never_merged(op):
    assert Optimised(twice(op), X).cleaned() == []


def test_dropout_through_torch_compile_draws_twice():
    def dropped(x):
        return torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)

    fast = torch.compile(dropped, backend="graphex")
    assert_same_to_user(fast, torch.compile(dropped, backend="aot_eager"), X)
    first, second = fast(X)
    assert not torch.equal(first, second)


def test_custom_ops_that_nobody_called_pure_are_not_merged():
    assert Optimised(twice(torch.ops.graphex_test.unknown), X).cleaned() == []


def uninitialised_memory(x):
    a, b = aten.empty_like.default(x), aten.empty_like.default(x)
    aten.fill_.Scalar(a, 1.0)
    aten.fill_.Scalar(b, 2.0)
    return aten.sub.Tensor(a, b)


def a_write_in_between(x):
    before = aten.sin.default(x)
    aten.add_.Tensor(x, 1)
    return aten.sub.Tensor(before, aten.sin.default(x))


def a_write_through_a_view_in_between(x):
    before = aten.sin.default(x)
    aten.zero_.default(aten.slice.Tensor(x, 0, 0, 1))
    return aten.sub.Tensor(before, aten.sin.default(x))


def equal_calls_after_a_write(x):
    before = aten.sin.default(x)
    aten.add_.Tensor(x, 1)
    return aten.add.Tensor(before, aten.mul.Tensor(aten.sin.default(x), aten.sin.default(x)))


def a_result_that_is_written_to(x):
    a, b = aten.sin.default(x), aten.sin.default(x)
    aten.add_.Tensor(a, 1)
    return aten.sub.Tensor(a, b)


def two_returned_results(x):
    return aten.sin.default(x), aten.sin.default(x)


def two_returned_views_of_equal_results(x):
    return aten.view.default(aten.sin.default(x), [12]), aten.view.default(aten.sin.default(x), [4, 3])


def one_returned_and_one_used_inside(x):
    return aten.sin.default(x), aten.mul.Tensor(aten.sin.default(x), 2)


def equal_views_of_an_input(x):
    return aten.view.default(x, [12]), aten.view.default(x, [12])


SHARED = "equal to 'sin', but two outputs would begin to share memory"


@pytest.mark.parametrize(
    ("fn", "merged", "reason"),
    [
        (uninitialised_memory, 0, ""),
        (a_write_in_between, 0, ""),
        (a_write_through_a_view_in_between, 0, ""),
        (equal_calls_after_a_write, 1, ""),
        (a_result_that_is_written_to, 0, "is written to"),
        (two_returned_results, 0, SHARED),
        (two_returned_views_of_equal_results, 0, SHARED),
        (one_returned_and_one_used_inside, 1, ""),
        (equal_views_of_an_input, 0, ""),
    ],
)
def test_calls_are_merged_where_a_caller_cannot_tell(fn, merged, reason):
    made = Optimised(fn, X)
    assert made.cleaned() == ["equal_calls"] * merged
    assert reason in " ".join(made.reasons("equal_calls"))


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.reshape.default(aten.transpose.int(x, 0, 1), [12]),
        lambda x: aten.contiguous.default(aten.transpose.int(x, 0, 1)),
        lambda x: aten.to.dtype(x, torch.float64),
    ],
    ids=["reshape", "contiguous", "to"],
)
def test_ops_that_may_copy_are_not_taken_for_views(op):
    """A graph that somebody wrote by hand may hold ops that return a view or a copy, as it happens."""
    graph = torch.fx.symbolic_trace(lambda x: (op(x), op(x)))
    run = graphex.compile_fx(graph, [X])
    assert_same_to_user(run, graph, X)


def test_calls_on_different_streams_stay_two():
    def place(gm, example_inputs, config):
        for stream, node in enumerate(node for node in gm.graph.nodes if node.target == aten.sin.default):
            node.meta["custom"] = {"stream": stream}

    apart = Optimised(twice(aten.sin.default), X, post_grad_custom_pre_pass=place)
    assert apart.cleaned() == []
    assert apart.count(aten.sin.default) == 2


def test_calls_on_one_stream_become_one():
    def place(gm, example_inputs, config):
        for node in gm.graph.nodes:
            node.meta["custom"] = {"stream": 1}

    assert Optimised(twice(aten.sin.default), X, post_grad_custom_pre_pass=place).cleaned() == ["equal_calls"]


def test_equal_calls_of_dynamic_shape_become_one():
    made = Optimised(twice(lambda x: aten.view.default(x, [x.shape[0] * x.shape[1]])), X, dynamic=True)
    assert "equal_calls" in made.cleaned()
    assert_same_to_user(made.run, twice(lambda x: x.view(-1)), torch.randn(5, 6))


def test_the_kept_node_remembers_both():
    made = Optimised(twice(aten.sin.default), X)
    kept = next(node for node in made.seen.gm.graph.nodes if node.target == aten.sin.default)
    assert kept.meta["graphex_origins"] == ("sin", "sin_1")


@pytest.mark.parametrize(
    "off", [{"disable_rules": ["equal_calls"]}, {"disable_passes": ["merge_common_subexpressions"]}], ids=str
)
def test_it_can_be_disabled(off):
    assert Optimised(twice(aten.sin.default), X, **off).count(aten.sin.default) == 2
