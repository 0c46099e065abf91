"""What nobody uses goes; what has an effect stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.compiling import Optimised, aten

X = torch.randn(3, 4)
LOG: list[str] = []


@torch.library.custom_op("graphex_test::logs", mutates_args=())
def logs(x: Tensor) -> Tensor:
    LOG.append("ran")
    return x.clone()


logs.register_fake(torch.empty_like)


def unused(*ops):
    """A function that calls `ops` and returns something else."""

    def fn(x):
        for op in ops:
            op(x)
        return aten.neg.default(x)

    return fn


@pytest.mark.parametrize(
    "op",
    [aten.sin.default, lambda x: aten.topk.default(x, 2)[0], lambda x: aten.view.default(x, [12]), lambda x: x[0]],
    ids=["sin", "topk", "view", "select"],
)
def test_unused_pure_calls_go(op):
    assert Optimised(unused(op), X).seen.ops.count("call_function") == 1


def test_a_whole_unused_chain_goes():
    made = Optimised(unused(lambda x: aten.cos.default(aten.sin.default(aten.exp.default(x)))), X)
    assert made.seen.ops.count("call_function") == 1
    assert [record.rule for record in made.journal.rewrites].count("unused") == 3


@pytest.mark.parametrize(
    "op",
    [
        aten.rand_like.default,
        aten.randn_like.default,
        lambda x: aten.bernoulli.p(x, 0.5),
        lambda x: aten.native_dropout.default(x, 0.5, True)[0],
    ],
    ids=["rand_like", "randn_like", "bernoulli", "dropout"],
)
def test_unused_random_calls_stay_so_that_the_next_draws_the_same(op):
    def fn(x):
        op(x)
        return aten.rand_like.default(x)

    Optimised(fn, X)


def test_attention_without_dropout_draws_nothing_and_goes():
    def fn(x):
        q = aten.view.default(x, [1, 1, 3, 4])
        aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0, False)
        return aten.neg.default(x)

    assert Optimised(fn, X).seen.ops.count("call_function") == 1


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.add_.Tensor(x, 1),
        lambda x: aten.copy_.default(x, aten.sin.default(x)),
        lambda x: aten.sin.out(x, out=x),
        lambda x: aten.zero_.default(aten.slice.Tensor(x, 0, 0, 1)),
    ],
    ids=["add_", "copy_", "out=", "through a view"],
)
def test_writes_stay(op):
    Optimised(unused(op), X)


def test_custom_ops_that_nobody_called_pure_stay():
    made = Optimised(unused(torch.ops.graphex_test.logs), X)
    LOG.clear()
    made.run(X)
    assert LOG == ["ran"]


def test_asserts_stay():
    def fn(x):
        aten._assert_async.msg(aten.all.default(aten.gt.Scalar(x, -100.0)), "too small")
        return aten.neg.default(x)

    made = Optimised(fn, X)
    with pytest.raises(RuntimeError, match="too small"):
        made.run(torch.full_like(X, -200.0))


def test_dead_code_that_a_users_pass_left_goes_too():
    def disconnect(gm):
        for node in gm.graph.nodes:
            if node.target == aten.cos.default:
                node.args = (node.graph.find_nodes(op="placeholder")[0],)

    fast = torch.compile(lambda x: x.sin().cos(), backend="graphex", options={"post_grad_custom_post_pass": disconnect})
    assert torch.equal(fast(X), X.cos())
    (record,) = [record for record in graphex.journal(fast).rewrites if record.rule == "unused"]
    assert record.nodes == ("sin",)


@pytest.mark.parametrize("off", [{"disable_rules": ["unused"]}, {"disable_passes": ["remove_dead_code"]}], ids=str)
def test_it_can_be_disabled(off):
    assert Optimised(unused(aten.sin.default), X, **off).count(aten.sin.default) == 1
