"""What the journal says would help: the edit of the model, and, to those who wrote the rule, the edit of the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphex
import graphex.ops
from tests.harness.compiling import Fused, Lifted, Optimised, rand

npu = torch.ops.npu


def add_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    x = x1 + x2
    return npu.npu_rms_norm(x, gamma)[0], x


def fused_add_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
    return y, x


def norm_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.randn(16)


def norm_rule() -> Any:
    return graphex.replacement(add_norm, fused_add_norm, (torch.empty(2, 8), torch.empty(2, 8), torch.empty(8)))


def told(journal: graphex.Journal, rule: str) -> list[tuple[str, str]]:
    """(reason, edit) of every place where the rule nearly applied, or was refused."""
    return [(r.reason, r.edit) for r in (*journal.near_misses, *journal.refusals) if r.rule == rule]


def told_of_norm(model: Callable[..., Any], *inputs: Any, **options: Any) -> list[tuple[str, str]]:
    fused = Fused(model, *(inputs or norm_inputs()), fusion_rules=[norm_rule()], **options)
    assert fused.fusions() == []
    return told(fused.journal, "add_norm")


# -- near misses -------------------------------------------------------------------------------------------------------


def test_a_value_that_comes_in_from_outside() -> None:
    _, x2, gamma = norm_inputs()
    [(reason, edit)] = told_of_norm(lambda x, gamma: npu.npu_rms_norm(x, gamma)[0] + x, x2, gamma)
    assert "the input" in reason
    assert edit == "compute the add inside of what is compiled, and not outside"


@pytest.mark.parametrize(
    ("between", "edit"),
    [
        (lambda x: x.half().float(), "do not cast the value here (the model then computes something else)"),
        (lambda x: x.transpose(0, 1), "do not permute the value here (the model then computes something else)"),
        (lambda x: x.flatten(0, 1), "do not reshape the value here (the model then computes something else)"),
    ],
    ids=["cast", "transpose", "reshape"],
)
def test_an_op_in_between_that_only_moves_or_casts(between: Callable[[Tensor], Tensor], edit: str) -> None:
    def model(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        x = x1 + x2
        return npu.npu_rms_norm(between(x), gamma)[0], x

    assert [said for _, said in told_of_norm(model)] == [edit]


def test_another_constant_of_a_users_rule_is_for_model_and_rule() -> None:
    def model(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        x = x1 + x2
        return npu.npu_rms_norm(x, gamma, 1e-8)[0], x

    [(_, edit)] = told_of_norm(model)
    assert (
        edit == "use epsilon=1e-06 (the model then computes something else), or make it a scalar argument of the rule"
    )


def test_another_constant_of_our_rule_is_for_the_model_alone() -> None:
    def fourth_power(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6))

    [(_, edit)] = told(Lifted(fourth_power, rand(3, 16), rand(16)).journal, "lift_rms_norm")
    assert edit == "use exponent=2 (the model then computes something else)"


def test_a_cast_that_is_missing() -> None:
    rule = graphex.replacement(
        lambda x: x.float().exp() + 1, lambda x: 1 + x.float().exp(), (torch.empty(3).half(),), name="wide"
    )
    fused = Fused(lambda x: x.exp() + 1, torch.randn(4).half(), fusion_rules=[rule])
    [(reason, edit)] = told(fused.journal, "wide")
    assert reason == "the input 'arg0_1' stands where the rule has cast"
    assert edit == "cast the value to float32 here (the model then computes something else)"


def one_value_twice(x: Tensor, y: Tensor) -> Tensor:
    d = x - y
    return d.relu() * d.sigmoid()


def test_two_values_where_the_rule_has_one() -> None:
    rule = graphex.replacement(
        one_value_twice, lambda x, y: one_value_twice(x, y) * 1, (torch.empty(3), torch.empty(3)), name="twice"
    )
    fused = Fused(lambda x, y: (x - y).relu() * (y - x).sigmoid(), torch.randn(4), torch.randn(4), fusion_rules=[rule])
    [(reason, edit)] = told(fused.journal, "twice")
    assert reason == "'sub_1' (sub) stands where the rule has 'sub' (sub) again"
    assert edit == "use one and the same value in both places (the model then computes something else)"


def test_a_tensor_where_the_rule_has_a_number() -> None:
    rule = graphex.replacement(
        lambda x, s: x.relu() * s,
        lambda x, s: (x * s).relu() if s > 0 else x.relu() * s,
        (torch.empty(3), 2.0),
        name="s",
    )
    fused = Fused(lambda x, s: x.relu() * s, torch.randn(4), torch.tensor(3.0), fusion_rules=[rule])
    [(reason, edit)] = told(fused.journal, "s")
    assert reason == "'s' is a tensor, which it is not in the rule"
    assert edit == "pass a number for 's', or give a tensor as the rule's example for it"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_value_that_is_used_elsewhere_and_that_a_users_rule_could_return() -> None:
    def model(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x1 + x2
        y, rstd = npu.npu_rms_norm(x, gamma)
        return y, x, rstd

    [(reason, edit)] = told_of_norm(model)
    assert "would disappear" in reason
    assert edit == "let the rule return it too"


def variance_is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6)), variance


def variance_is_computed_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    norm = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    return norm, x.pow(2).mean(-1, keepdim=True)


def test_a_value_that_is_used_elsewhere_is_computed_once_more_for_a_lift() -> None:
    [(reason, edit)] = told(Lifted(variance_is_returned, rand(3, 16), rand(16)).journal, "lift_rms_norm")
    assert "also returned" in reason
    assert edit == "compute it once more for the other use"
    assert Lifted(variance_is_computed_twice, rand(3, 16), rand(16)).fused == {"lift_rms_norm": 1}


def test_two_streams() -> None:
    def move(gm: Any, inputs: Any, config: Any) -> None:
        for node in gm.graph.nodes:
            if node.target is npu.npu_rms_norm.default:
                node.meta["custom"] = {"stream": 1}

    [(_, edit)] = told_of_norm(add_norm, post_grad_custom_pre_pass=move)
    assert edit == "put them on one stream"


def test_a_write_in_between() -> None:
    def model(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        x = x1 + x2
        x1.add_(1)
        return npu.npu_rms_norm(x, gamma)[0], x

    optimised = Optimised(model, *norm_inputs(), fusion_rules=[norm_rule()])
    assert "move it before or behind all of them" in [r.edit for r in optimised.journal.refusals]


def test_a_question_about_a_symbolic_size() -> None:
    def search(x: Tensor) -> Tensor:
        return x.relu() * 2

    def replace(x: Tensor) -> Tensor:
        return x.relu() * 2 if x.shape[0] % 3 == 0 else (x * 2).relu()

    rule = graphex.replacement(search, replace, (torch.empty(3, 4),), self_test=False)
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    fused = Fused(search, fusion_rules=[rule])
    fused(x)
    [(_, edit)] = told(fused.journal, "search")
    assert "torch._dynamo.mark_static" in edit


def test_the_edit_of_a_users_own_check() -> None:
    def check(match: Any) -> graphex.Refusal:
        return graphex.Refusal("too narrow for the kernel", match.nodes[0], "pad the rows to 64")

    rule = graphex.replacement(
        add_norm, fused_add_norm, (torch.empty(2, 8), torch.empty(2, 8), torch.empty(8)), extra_check=check
    )
    fused = Fused(add_norm, *norm_inputs(), fusion_rules=[rule])
    assert told(fused.journal, "add_norm") == [("too narrow for the kernel", "pad the rows to 64")]


def norm_and_quant(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
    return *npu.npu_dynamic_quant(y), x


def test_a_type_that_the_fused_op_does_not_take() -> None:
    fused = Fused(norm_and_quant, *norm_inputs())
    [(reason, edit)] = told(fused.journal, "add_rms_norm_dynamic_quant")
    assert "float16 or bfloat16" in reason
    assert edit == "give 'x1' and 'x2' one of these types (the model then computes something else)"


def test_a_lift_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphex.passes.fuse._has_kernels", lambda graph: True)  # as beside a tensor on a GPU
    fused = Fused(lambda a, b: functional.silu(a) * b, torch.randn(3, 8), torch.randn(3, 8))
    assert told(fused.journal, "lift_silu_mul")[0][1] == "lift_idioms='always' lifts it all the same"


def test_explain_prints_what_would_help() -> None:
    report = graphex.explain(variance_is_returned, (rand(3, 16), rand(16)), options={"lift_idioms": "always"})
    assert {"would", "help", "compute", "once", "more"} <= set(str(report).split())
