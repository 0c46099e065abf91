"""Rules that users register: what they match, what they refuse, and what is told about it."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, MultiOutputPattern, fwd_only, joint_fwd_bwd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import graphex
import graphex.ops
from tests.harness.compiling import Fused, Optimised

npu = torch.ops.npu
BOTH = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def add_norm(x1, x2, gamma):
    x = torch.add(x1, x2)
    y, _ = npu.npu_rms_norm(x, gamma)
    return y, x


def fused_add_norm(x1, x2, gamma):
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
    return y, x


def norm_examples():
    with FakeTensorMode():
        rows = functools.partial(torch.empty, (1, 1, 2), dtype=torch.float16)
        return rows(), rows(), torch.empty(2, dtype=torch.float16)


def norm_rule(**options):
    return graphex.replacement(add_norm, fused_add_norm, norm_examples(), **options)


def norm_inputs(width=16):
    return torch.randn(2, 3, width), torch.randn(2, 3, width), torch.randn(width)


def of_width_7168(match):
    x1 = match.kwargs.get("x1")
    return x1.meta["val"].shape[-1] == 7168


def residual_norm(width):
    """A model of this width and two inputs for it: only their rows are dynamic."""
    gamma = torch.nn.Parameter(torch.randn(width))
    x1, x2, _ = norm_inputs(width)
    return lambda x1, x2: add_norm(x1, x2, gamma), x1, x2


# -- the documented example --------------------------------------------------------------------------------------------


@BOTH
def test_the_documented_example(dynamic):
    with graphex.register_replacement(
        search_fn=add_norm, replace_fn=fused_add_norm, example_inputs=norm_examples(), extra_check=of_width_7168
    ):
        fused = Fused(*residual_norm(7168), dynamic=dynamic)
        assert fused.fusions() == ["add_norm"]
        assert fused.ops() == ["npu_add_rms_norm"]
        torch._dynamo.reset()
        kept = Fused(*residual_norm(512), dynamic=dynamic)
        assert kept.fusions() == []
        assert kept.ops() == ["add", "npu_rms_norm"]
        [refusal] = [r for r in kept.journal.refusals if r.rule == "add_norm"]
        assert "of_width_7168" in refusal.reason
        assert "npu_rms_norm" in refusal.line


def test_a_handle_takes_the_registration_back():
    handle = graphex.register_replacement(add_norm, fused_add_norm, norm_examples())
    assert Fused(add_norm, *norm_inputs()).fusions() == ["add_norm"]
    handle.remove()
    torch._dynamo.reset()
    assert Fused(add_norm, *norm_inputs()).fusions() == []


def test_a_rule_can_belong_to_one_configuration():
    assert Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule()]).fusions() == ["add_norm"]
    torch._dynamo.reset()
    assert Fused(add_norm, *norm_inputs()).fusions() == []


def test_duplicates_are_an_error_or_skipped():
    with graphex.register_replacement(add_norm, fused_add_norm, norm_examples()) as first:
        with pytest.raises(graphex.RuleError, match=r"Duplicate pattern: .* registered already .* Call remove\(\)"):
            graphex.register_replacement(add_norm, fused_add_norm, norm_examples())
        again = graphex.register_replacement(add_norm, fused_add_norm, norm_examples(), skip_duplicates=True)
        assert first
        assert not again
        again.remove()
        assert Fused(add_norm, *norm_inputs()).fusions() == ["add_norm"]


def test_a_rule_does_not_take_the_name_of_one_of_graphexs_own():
    with graphex.register_replacement(add_norm, fused_add_norm, norm_examples(), name="linears"):
        with pytest.raises(graphex.RuleError, match="your rule 'linears' has the name of a rule of graphex's own"):
            graphex.explain(add_norm, norm_inputs())
    with graphex.register_replacement(add_norm, fused_add_norm, norm_examples(), name="my_norm"):
        assert graphex.explain(add_norm, norm_inputs()).rule("my_norm").matched


# -- what matches ------------------------------------------------------------------------------------------------------


def gated(a, b):
    return functional.silu(a) * b


def gated_in_one(a, b):
    return torch.ops.graphex.silu_mul(a, b)


@BOTH
def test_a_composite_op_is_traced_as_in_the_graph(dynamic):
    rule = graphex.replacement(gated, gated_in_one, (torch.empty(2, 8), torch.empty(2, 8)))
    fused = Fused(gated, torch.randn(3, 4), torch.randn(3, 4), dynamic=dynamic, fusion_rules=[rule])
    assert fused.fusions() == ["gated"]


def test_operands_match_in_either_order():
    rule = graphex.replacement(gated, gated_in_one, (torch.empty(2, 8), torch.empty(2, 8)))
    other = Fused(lambda a, b: b * functional.silu(a), torch.randn(3, 4), torch.randn(3, 4), fusion_rules=[rule])
    assert other.fusions() == ["gated"]


@BOTH
def test_a_layer_norm_pattern_matches_a_layer_norm(dynamic):
    def search(x, w, b):
        return functional.layer_norm(x, (x.shape[-1],), w, b, 1e-5) + 1

    def replace(x, w, b):
        return functional.layer_norm(x, (x.shape[-1],), w, b + 1, 1e-5)

    rule = graphex.replacement(search, replace, (torch.empty(2, 8), torch.empty(8), torch.empty(8)))
    inputs = torch.randn(3, 16), torch.randn(16), torch.randn(16)
    assert Fused(search, *inputs, dynamic=dynamic, fusion_rules=[rule]).fusions() == ["search"]


@BOTH
def test_views_are_compared_by_what_they_come_to(dynamic):
    def search(x):
        return x.view(-1, x.shape[-1]).relu()

    def replace(x):
        return x.relu().view(-1, x.shape[-1])

    rule = graphex.replacement(search, replace, (torch.empty(2, 3, 8),))

    def model(a):
        return a.reshape(a.shape[0] * a.shape[1], a.shape[2]).relu()

    assert Fused(model, torch.randn(4, 5, 6), dynamic=dynamic, fusion_rules=[rule]).fusions() == ["search"]


def test_a_default_and_its_value_are_the_same():
    def explicit(x1, x2, gamma):
        x = x1 + x2
        return npu.npu_rms_norm(x, gamma, epsilon=1e-6)[0], x

    assert Fused(explicit, *norm_inputs(), fusion_rules=[norm_rule()]).fusions() == ["add_norm"]


def test_a_scalar_is_a_variable_that_reaches_the_replacement():
    def search(x, gamma, eps):
        return npu.npu_rms_norm(x, gamma, eps)[0] * 2

    def replace(x, gamma, eps):
        return npu.npu_rms_norm(x, gamma * 2, eps)[0]

    examples = torch.empty(2, 8), torch.empty(8)
    by_example = graphex.replacement(search, replace, (*examples, 1e-6), name="by_example")
    by_workaround = graphex.replacement(
        search, replace, examples, scalar_workaround={"eps": 0.113377}, name="by_workaround"
    )
    for rule in (by_example, by_workaround):
        for eps in (1e-6, 1e-5, 0.5, 1):
            torch._dynamo.reset()

            def model(x, gamma, eps=eps):
                return npu.npu_rms_norm(x, gamma, eps)[0] * 2

            assert Fused(model, torch.randn(3, 8), torch.randn(8), fusion_rules=[rule]).fusions() == [rule.name], eps


def test_examples_that_overflow_decide_nothing():
    """`torch.empty` is a usual example, and holds any number."""
    largest = torch.full((4,), 3e38)

    def search(x):
        return (x * 2) * 0.5 + x

    assert graphex.replacement(search, lambda x: x + x, (largest,), name="twice").name == "twice"
    with pytest.raises(graphex.RuleError, match="random inputs"):
        graphex.replacement(search, lambda x: x * 3, (largest,), name="thrice")


def test_a_pattern_in_torchs_own_classes():
    add = CallFunction(torch.ops.aten.add.Tensor, KeywordArg("x1"), KeywordArg("x2"), _users=2)
    norm = CallFunction(npu.npu_rms_norm.default, add, KeywordArg("gamma"))
    pattern = MultiOutputPattern([CallFunction(operator.getitem, norm, 0), add])

    def unused(x1, x2, gamma):
        raise AssertionError("the search function only says what the arguments are called")

    rule = graphex.replacement(unused, fused_add_norm, norm_examples(), search_fn_pattern=pattern, name="by_hand")
    assert Fused(add_norm, *norm_inputs(), fusion_rules=[rule]).fusions() == ["by_hand"]


def test_the_larger_pattern_and_the_users_rule_come_first():
    def quantised(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *npu.npu_dynamic_quant(y), x

    def mine(x):
        return npu.npu_dynamic_quant(x)

    def mine_instead(x):
        q, scale = npu.npu_dynamic_quant(x * 1)
        return q, scale

    inputs = [tensor.half() for tensor in norm_inputs(32)]
    assert Fused(quantised, *inputs).fusions() == ["add_rms_norm_dynamic_quant"]
    rule = graphex.replacement(mine, mine_instead, (torch.empty(2, 32, dtype=torch.float16),))
    torch._dynamo.reset()
    assert Fused(quantised, *inputs, fusion_rules=[rule]).fusions() == ["mine"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "reversed"])
def test_rules_run_to_a_fixed_point(order):
    """add and norm fuse first, and what comes out fuses with the quantisation."""

    def norm_quant(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *npu.npu_dynamic_quant(y), x

    def norm_quant_in_one(x1, x2, gamma):
        q, _, x, scale, _ = npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, output_mask=[True, False])
        return q, scale, x

    half = [torch.empty(2, 8, dtype=torch.float16), torch.empty(2, 8, dtype=torch.float16), torch.empty(8).half()]
    rules = [norm_rule(), graphex.replacement(norm_quant, norm_quant_in_one, half)]

    def model(x1, x2, gamma):
        x = x1 + x2
        y, _ = npu.npu_rms_norm(x, gamma)
        return *npu.npu_dynamic_quant(y), x

    inputs = [tensor.half() for tensor in norm_inputs(32)]
    fused = Fused(model, *inputs, fusion_rules=[rules[i] for i in order])
    assert fused.fusions() == ["add_norm", "norm_quant"]
    assert fused.ops() == ["npu_add_rms_norm_dynamic_quant"]


def test_a_rule_that_feeds_itself_ends():
    def search(x):
        return x.relu()

    def replace(x):
        return x.relu().relu()

    rule = graphex.replacement(search, replace, (torch.empty(2),))
    assert Fused(lambda x: x.relu(), torch.randn(4), fusion_rules=[rule]).fusions() == ["search"]


def test_a_result_nobody_asks_for_may_be_missing():
    def model(x1, x2, gamma):
        y, _, _x = npu.npu_add_rms_norm(x1, x2, gamma)
        return y.to(torch.float32)

    assert Fused(model, *[t.half() for t in norm_inputs()]).fusions() == ["add_rms_norm_cast"]


# -- what must not happen ----------------------------------------------------------------------------------------------


def test_an_input_that_is_defined_late_is_waited_for():
    def model(x1, x2, gamma):
        x = x1 + x2
        early = x * 3
        late = gamma * 2
        return npu.npu_rms_norm(x, late)[0], x, early

    assert Fused(model, *norm_inputs(), fusion_rules=[norm_rule()]).fusions() == ["add_norm"]


def test_an_input_that_needs_a_result_is_a_cycle():
    def model(x1, x2):
        x = x1 + x2
        return npu.npu_rms_norm(x, x[0, 0] * 2)[0], x

    x1, x2, _ = norm_inputs()
    fused = Fused(model, x1, x2, fusion_rules=[norm_rule()])
    assert fused.fusions() == []
    assert any("computed from its result" in reason for reason in fused.reasons("add_norm"))


def test_the_rstd_in_use_blocks_a_rule_that_does_not_return_it():
    def model(x1, x2, gamma):
        x = x1 + x2
        y, rstd = npu.npu_rms_norm(x, gamma)
        return y, x, rstd

    fused = Fused(model, *norm_inputs(), fusion_rules=[norm_rule()])
    assert fused.fusions() == []
    assert any("would disappear" in reason for reason in fused.reasons("add_norm"))


def test_a_replacement_of_another_dtype_is_refused_where_it_would_matter():
    def search(x):
        return x.relu() + 1.0

    def replace(x):
        return (x.relu() + 1.0).to(torch.float32)

    rule = graphex.replacement(search, replace, (torch.empty(2, 2),))
    fused = Fused(search, torch.randn(3, 3).half(), fusion_rules=[rule])
    assert fused.fusions() == []
    assert any("float32[3, 3] instead of float16[3, 3]" in reason for reason in fused.reasons("search"))


def test_new_nodes_carry_what_the_old_ones_had():
    def model(x1, x2, gamma):
        with torch.fx.traceback.annotate({"mark": "here"}):
            return add_norm(x1, x2, gamma)

    fused = Fused(model, *norm_inputs(), fusion_rules=[norm_rule()])
    assert fused.fusions() == ["add_norm"]
    metas = [meta for name, meta in fused.seen.metas.items() if "npu_add_rms_norm" in name]
    assert metas
    for meta in metas:
        assert meta["custom"]["mark"] == "here"
        assert "test_register.py" in meta["stack_trace"]


@contextmanager
def warnings_logged_by(name):
    logged, logger = [], logging.getLogger(name)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def test_no_new_guards():
    """A rule whose replacement asks about a symbolic size is refused; the model is not compiled again for it."""

    def search(x):
        return x.relu() * 2

    def replace(x):
        return x.relu() * 2 if x.shape[0] % 3 == 0 else (x * 2).relu()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rule = graphex.replacement(search, replace, (torch.empty(3, 4),))
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with warnings_logged_by("torch.fx.experimental.symbolic_shapes") as logged:
        fused = Fused(search, fusion_rules=[rule])
        fused(x)
    assert logged == []
    assert fused.fusions() == []
    assert any("not known for every size" in reason for reason in fused.reasons("search"))
    fused(torch.randn(7, 4))
    assert len(fused.journal.graphs) == 1


# -- the silent misses of others, told ---------------------------------------------------------------------------------


def test_a_match_across_a_write_is_told():
    def model(x1, x2, gamma):
        x = x1 + x2
        x1.add_(1)
        return npu.npu_rms_norm(x, gamma)[0], x

    optimised = Optimised(model, *norm_inputs(), fusion_rules=[norm_rule()])
    assert any("writes to" in reason for reason in optimised.reasons("add_norm"))


def test_a_match_across_streams_is_told():
    def move(gm, inputs, config):
        for node in gm.graph.nodes:
            if node.target is npu.npu_rms_norm.default:
                node.meta["custom"] = {"stream": 1}

    fused = Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule()], post_grad_custom_pre_pass=move)
    assert fused.fusions() == []
    assert any("different streams" in reason for reason in fused.reasons("add_norm"))


def test_a_match_that_a_check_refuses_is_told_with_its_reason():
    def check(match):
        return graphex.Refusal("too narrow for the kernel", match.nodes[0])

    fused = Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule(extra_check=check)])
    assert fused.reasons("add_norm") == ["too narrow for the kernel"]


def test_one_tensor_for_two_arguments_is_an_error():
    x = torch.empty(2, 8)
    with pytest.raises(graphex.RuleError, match="'x1' and 'x2' were given the same tensor"):
        graphex.replacement(add_norm, fused_add_norm, (x, x, torch.empty(8)))


@pytest.mark.parametrize("eps", [1e-8, 9.99999997e-07, 1e-5], ids=str)
def test_another_constant_is_told_with_both_values(eps):
    def model(x1, x2, gamma):
        x = x1 + x2
        return npu.npu_rms_norm(x, gamma, eps)[0], x

    fused = Fused(model, *norm_inputs(), fusion_rules=[norm_rule()])
    assert fused.fusions() == []
    [miss] = [miss for miss in fused.journal.near_misses if miss.rule == "add_norm"]
    assert str(eps) in miss.reason
    assert "1e-06" in miss.reason
    assert "scalar argument" in miss.edit
    assert "npu_rms_norm" in miss.line


def test_a_cast_in_between_is_told_with_the_edit():
    def model(a, b):
        return functional.silu(a).half() * b

    rule = graphex.replacement(gated, gated_in_one, (torch.empty(2, 8), torch.empty(2, 8)))
    fused = Fused(model, torch.randn(2, 4), torch.randn(2, 4).half(), fusion_rules=[rule])
    [miss] = [miss for miss in fused.journal.near_misses if miss.rule == "gated"]
    assert "cast" in miss.reason
    assert "do not cast" in miss.edit
    assert (miss.matched, miss.ops) == (1, 2)


def test_a_rule_whose_op_is_not_there_says_so():
    fused = Fused(lambda x: x.relu(), torch.randn(3), fusion_rules=[norm_rule()])
    [tried] = fused.journal.rules
    assert (tried.matches, tried.candidates) == (0, 0)
    assert "npu_rms_norm" in tried.remark


def test_a_place_that_is_as_good_as_it_is_is_no_candidate():
    def check(match):
        return graphex.Refusal("nothing to gain", match.nodes[0], nothing_lost=True)

    fused = Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule(extra_check=check)])
    [tried] = fused.journal.rules
    assert (tried.matches, tried.candidates) == (0, 0)
    [refusal] = fused.journal.refusals
    assert refusal.reason == "nothing to gain"


def test_candidates_are_counted():
    def model(x1, x2, gamma):
        y, x = add_norm(x1, x2, gamma)
        return y, x, npu.npu_rms_norm(x1, gamma)[0]

    fused = Fused(model, *norm_inputs(), fusion_rules=[norm_rule()])
    [tried] = fused.journal.rules
    assert (tried.matches, tried.candidates) == (1, 2)
    [miss] = fused.journal.near_misses
    assert "stands where the rule has add" in miss.reason


# -- the self-test -----------------------------------------------------------------------------------------------------


def test_a_replacement_with_other_values_is_refused():
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda x: x.relu() * 2, lambda x: x.relu() * 3, (torch.empty(4, 4),), name="wrong")
    rule = graphex.replacement(
        lambda x: x.relu() * 2, lambda x: x.relu() * 3, (torch.empty(4, 4),), name="wrong", self_test=False
    )
    assert rule.name == "wrong"


def test_a_replacement_that_writes_to_an_argument_is_refused_where_it_would_be_made():
    rule = graphex.replacement(
        lambda a, b: a + b, lambda a, b: a.add_(b), (torch.empty(2), torch.empty(2)), name="writes", self_test=False
    )
    x = torch.randn(4)
    before = x.clone()
    found = Fused(lambda a, b: (a + b, a * 2), x, torch.randn(4), fusion_rules=[rule])
    assert found.fusions() == []
    assert found.reasons("writes") == ["the replacement writes to an argument (aten.copy_.default)"]
    assert torch.equal(x, before)


def test_a_replacement_with_another_shape_is_refused():
    with pytest.raises(graphex.RuleError, match="result 0 is"):
        graphex.replacement(lambda x: x.relu() * 2, lambda x: x.relu()[:1], (torch.empty(4, 4),), name="wrong")


def test_a_replacement_with_fewer_results_is_refused():
    with pytest.raises(graphex.RuleError, match="returns 1 tensors, the search function 2"):
        graphex.replacement(lambda x: (x.relu(), x.sin()), lambda x: x.relu(), (torch.empty(4),), name="wrong")


def test_a_rule_without_an_op_can_never_match():
    with pytest.raises(graphex.RuleError, match="never match"):
        graphex.replacement(lambda x: x, lambda x: x, (torch.empty(4),), name="nothing")


def test_a_scalar_that_does_not_reach_an_op_is_refused():
    with pytest.raises(graphex.RuleError, match="'eps' does not reach an op"):
        graphex.replacement(lambda x, eps: x + eps * 2, lambda x, eps: x + eps + eps, (torch.empty(4), 1e-6), name="x")


def test_a_scalar_that_the_replacement_ignores_is_told():
    with pytest.warns(graphex.GraphexWarning, match="'eps'.*does not use it"):
        graphex.replacement(
            lambda x, eps: npu.npu_rms_norm(x, x[0], eps)[0],
            lambda x, eps: npu.npu_rms_norm(x, x[0], 0.5)[0],
            (torch.zeros(2, 4), 1e-6),
            name="deaf",
        )


@pytest.mark.parametrize(
    ("examples", "said"),
    [((torch.empty(2),), "no example input"), ([torch.empty(2)] * 1 + [torch.empty(2)] * 3, "more example inputs")],
    ids=["too few", "too many"],
)
def test_the_wrong_number_of_examples_is_an_error(examples, said):
    fresh = [torch.empty(2) for _ in examples]
    with pytest.raises(graphex.RuleError, match=said):
        graphex.replacement(add_norm, fused_add_norm, fresh)


def test_a_search_function_that_cannot_be_traced_is_an_error_with_its_line():
    def search(x):
        return x.no_such_method()

    with pytest.raises(graphex.RuleError, match=r"cannot be traced.*\(test_register\.py:\d+: return x.no_such_method"):
        graphex.replacement(search, search, (torch.empty(2),))


def decides(x):
    if x.sum() > 0:
        return x.relu()
    return x


@pytest.mark.parametrize(
    ("functions", "which"),
    [((decides, lambda x: x.relu()), "search"), ((lambda x: x.relu(), decides), "replace")],
    ids=["search", "replace"],
)
def test_a_function_that_decides_by_a_value_is_an_error_that_names_it_and_the_line(functions, which):
    said = rf"the {which} function 'decides' needs the value of a tensor \(test_register\.py:\d+: if x\.sum\(\) > 0:\)"
    with pytest.raises(graphex.RuleError, match=said) as caught:
        graphex.register_replacement(*functions, [torch.empty(2)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": 3}, "the name of a rule"),
        ({"trace_fn": "forward"}, "trace_fn must be a function"),
        ({"extra_check": lambda: True}, "extra_check must be a function of a Match"),
        ({"search_fn_pattern": 3}, "search_fn_pattern must be a pattern"),
        ({"scalar_workaround": [1]}, "scalar_workaround must be a dictionary"),
        ({"scalar_workaround": {"y": 1.0}}, r"'y', which is no argument of the search function \(x\)"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_arguments_of_another_kind_are_refused(wrong, said):
    with pytest.raises(graphex.RuleError, match=said):
        graphex.replacement(lambda x: x.sin(), lambda x: x.sin(), [torch.empty(2)], **wrong)


def test_a_search_function_without_names_of_its_arguments_is_refused():
    with pytest.raises(graphex.RuleError, match="must be a function in Python"):
        graphex.replacement(torch.relu, torch.relu, [torch.empty(2)])


def test_node_info_is_about_a_node():
    with pytest.raises(graphex.InputError, match="a node of a graph, got int"):
        graphex.node_info(3)


@pytest.mark.parametrize("enabled", [True, False], ids=["collecting", "not collecting"])
@pytest.mark.parametrize("raises", [False, True], ids=["fused", "raised"])
def test_the_garbage_collector_is_left_as_it_was(enabled, raises):
    def check(match):
        if raises:
            raise ValueError("no")
        return True

    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(graphex.RuleError) if raises else nullcontext():
            Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule(extra_check=check)])
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_check_that_raises_stops_compilation_with_its_name():
    def broken(match):
        return match.kwargs["nothing"]

    with pytest.raises(Exception, match="the check 'broken' of rule 'add_norm' raised KeyError"):
        Fused(add_norm, *norm_inputs(), fusion_rules=[norm_rule(extra_check=broken)])


# -- training ----------------------------------------------------------------------------------------------------------


def test_a_rule_for_training_sees_the_joint_graph():
    def search(x, y):
        return (x * y).tanh()

    def replace(x, y):
        return torch.tanh(y * x + 0)

    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    examples = torch.empty(2, 2, requires_grad=True), torch.empty(2, 2, requires_grad=True)
    rule = graphex.replacement(search, replace, examples, trace_fn=joint_fwd_bwd)
    compiled = torch.compile(search, backend="graphex", options={"fusion_rules": [rule]})
    wanted = torch.autograd.grad(search(x, y).sum(), (x, y))
    found = torch.autograd.grad(compiled(x, y).sum(), (x, y))
    torch.testing.assert_close(found, wanted)
    journal = graphex.journal(compiled)
    assert [r.rule for r in journal.rewrites if r.pass_name == "fuse_joint_patterns"] == ["search"]


def test_a_rule_for_inference_does_not_change_gradients():
    x1, x2, gamma = norm_inputs()
    for tensor in (x1, x2, gamma):
        tensor.requires_grad_()
    compiled = torch.compile(add_norm, backend="graphex", options={"fusion_rules": [norm_rule()]})
    wanted = torch.autograd.grad(sum(t.sum() for t in add_norm(x1, x2, gamma)), (x1, x2, gamma))
    found = torch.autograd.grad(sum(t.sum() for t in compiled(x1, x2, gamma)), (x1, x2, gamma))
    torch.testing.assert_close(found, wanted)


def test_node_info_tells_a_check_where_a_node_is_from():
    seen = []

    def check(match):
        seen.append(graphex.node_info(match.nodes[0]))
        return True

    class Model(torch.nn.Module):
        def forward(self, x1, x2, gamma):
            return add_norm(x1, x2, gamma)

    Fused(Model(), *norm_inputs(), fusion_rules=[norm_rule(extra_check=check)])
    info = seen[0]
    assert info.stream is None
    assert "test_register.py" in info.source
    assert info.origins


def test_fwd_only_is_what_it_is_without_being_named():
    rule = graphex.replacement(add_norm, fused_add_norm, norm_examples(), fwd_only)
    assert Fused(add_norm, *norm_inputs(), fusion_rules=[rule]).fusions() == ["add_norm"]


# -- what a search function may look like ------------------------------------------------------------------------------


class Doubled:
    def search(self, x):
        return x.relu() * 2

    def replace(self, x):
        return (x * 2).relu()


def test_methods_can_be_a_rule():
    rule = graphex.replacement(Doubled().search, Doubled().replace, (torch.empty(2, 2),), name="doubled")
    fused = Fused(Doubled().search, torch.randn(3, 4), fusion_rules=[rule])
    assert fused.fusions() == ["doubled"]
    assert fused.journal.near_misses == []  # what the rule itself has made is no candidate


def test_results_may_be_a_dictionary():
    rule = graphex.replacement(
        lambda x: {"y": x.relu() * 2}, lambda x: {"y": (x * 2).relu()}, (torch.empty(2, 2),), name="named"
    )
    assert Fused(lambda x: x.relu() * 2, torch.randn(3, 4), fusion_rules=[rule]).fusions() == ["named"]


def test_a_default_of_the_search_function_is_an_example():
    def search(x, gamma, eps=1e-6):
        return npu.npu_rms_norm(x, gamma, eps)[0] * 2

    def replace(x, gamma, eps=1e-6):
        return npu.npu_rms_norm(x, gamma * 2, eps)[0]

    rule = graphex.replacement(search, replace, (torch.empty(2, 8), torch.empty(8)))
    model = Fused(lambda x, gamma: search(x, gamma, 0.5), torch.randn(3, 8), torch.randn(8), fusion_rules=[rule])
    assert model.fusions() == ["search"]


def test_a_list_of_tensors_is_refused_with_advice():
    with pytest.raises(graphex.RuleError, match="'xs' is a list"):
        graphex.replacement(lambda xs: torch.cat(xs), lambda xs: torch.cat(xs), ([torch.empty(2)],), name="list")
