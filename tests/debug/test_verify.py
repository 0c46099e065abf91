"""verify=True: what is compared, what is found, who is blamed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.compiling import trace
from tests.harness.processes import python

aten = torch.ops.aten
X, Y = torch.randn(4, 4), torch.randn(4, 4)


@torch.library.custom_op("graphex_test::float32_only", mutates_args=())
def float32_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x * 2


float32_only.register_fake(torch.empty_like)


@torch.library.custom_op("graphex_test::float64_after_all", mutates_args=())
def float64_after_all(x: Tensor) -> Tensor:
    return x.double()


float64_after_all.register_fake(torch.empty_like)


@torch.library.custom_op("graphex_test::nothing_in_float64", mutates_args=())
def nothing_in_float64(x: Tensor) -> Tensor:
    return x * float("nan") if x.dtype == torch.float64 else x * 2


nothing_in_float64.register_fake(torch.empty_like)


def verified(fn, *passes, **options):
    return torch.compile(
        fn, backend="graphex", options={"verify": True, "post_grad_custom_pre_pass": list(passes), **options}
    )


def verdict(fast):
    (record,) = graphex.journal(fast).verifications
    return record


def inserted_after(target, new, *args, name):
    """A pass that puts `new(node, *args)` after every `target`."""

    @graphex.graph_pass(name=name)
    def insert(gm):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            with gm.graph.inserting_after(node):
                added = gm.graph.call_function(new, (node, *args))
            node.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)

    return insert


def harmless(name="harmless"):
    return inserted_after(aten.sin.default, aten.mul.Tensor, 1.0, name=name)


def harmful(name="harmful", by=1.01):
    return inserted_after(aten.sin.default, aten.mul.Tensor, by, name=name)


def expect_mismatch(fast, *args):
    with pytest.warns(graphex.GraphexWarning, match="verification (left out|rolled back)"):
        return fast(*args)


# -- equal ---------------------------------------------------------------------------------------------------------


def test_our_own_passes_are_equal_to_the_original_graph():
    fast = verified(lambda x, y: (x.sin().clone() + y.sin() + x.sin(), x[:].clone()))
    fast(X, Y)
    assert (verdict(fast).status, verdict(fast).pass_name) == ("equal", "")


def test_floats_are_measured_against_float64():
    fast = verified(lambda x: x.sin().clone() @ x)
    fast(X)
    assert verdict(fast).reference == "float64"
    assert 0 < verdict(fast).worst_error < 1e-5


def test_products_of_groups_of_rows_are_measured_against_float64():
    def f(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=ends) * 2

    given = torch.randn(6, 16, dtype=torch.bfloat16), torch.randn(3, 16, 8, dtype=torch.bfloat16)
    fast = verified(f)
    fast(*given, torch.tensor([2, 2, 6], dtype=torch.int32))
    assert verdict(fast).reference == "float64"


def test_only_the_first_call_is_verified():
    fast = verified(lambda x: x.sin())
    for _ in range(3):
        fast(X)
    assert len(graphex.journal(fast).verifications) == 1


def test_every_graph_is_verified():
    fast = verified(lambda x: x.sin())
    fast(X)
    fast(X.double())
    assert len(graphex.journal(fast).verifications) == 2


def test_forward_and_backward_are_verified():
    fast = verified(lambda x: (x.sin() * x.cos()).sum())
    fast(X.clone().requires_grad_()).backward()
    records = graphex.journal(fast).verifications
    assert [record.status for record in records] == ["equal", "equal"]
    assert records[0].graph != records[1].graph


def test_a_pass_that_rounds_differently_but_as_well_is_equal():
    """(x * 3) * 5 and x * 15 are different in float32, and as near to the truth."""

    def reassociate(gm):
        first, second = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        second.args = (first.args[0], 15)

    fast = verified(lambda x: (x * 3) * 5, reassociate)
    fast(X)
    assert verdict(fast).status == "equal"


def test_a_more_exact_pass_is_equal():
    def widen(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        with gm.graph.inserting_before(node):
            a, b = (gm.graph.call_function(aten._to_copy.default, (v,), {"dtype": torch.float32}) for v in node.args)
            wide = gm.graph.call_function(aten.mm.default, (a, b))
            narrow = gm.graph.call_function(aten._to_copy.default, (wide,), {"dtype": torch.bfloat16})
        node.replace_all_uses_with(narrow)

    fast = verified(lambda x: x @ x, widen)
    fast(torch.randn(16, 16).bfloat16())
    assert verdict(fast).status == "equal"


def test_random_graphs_are_compared_from_the_same_random_state():
    def draw(x):
        return torch.rand_like(x) + x.sin().clone(), torch.dropout(x, 0.5, True)

    fast = verified(draw)
    torch.manual_seed(3)
    ours = fast(X)
    torch.manual_seed(3)
    theirs = torch.compile(draw, backend="aot_eager")(X)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert verdict(fast).status == "equal"
    assert "random" in verdict(fast).reference


def test_inputs_are_written_once_although_the_graph_runs_several_times():
    def count(x):
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    fast = verified(count)
    fast(x)
    fast(x)
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert verdict(fast).status == "equal"


def test_an_op_without_float64_is_compared_with_the_original_graph():
    fast = verified(lambda x: torch.ops.graphex_test.float32_only(x).sin())
    fast(X)
    assert verdict(fast).status == "equal"
    assert "float32 only" in verdict(fast).reference


def test_nan_and_infinity_are_equal_to_themselves():
    fast = verified(lambda x: x / 0)
    fast(torch.tensor([1.0, -1.0, 0.0]))
    assert verdict(fast).status == "equal"


def test_dynamic_shapes_are_verified():
    fast = torch.compile(lambda x: x.sin().clone() + 1, backend="graphex", dynamic=True, options={"verify": True})
    fast(torch.randn(3, 5))
    fast(torch.randn(7, 2))
    assert [record.status for record in graphex.journal(fast).verifications] == ["equal"]


# -- mismatch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_the_first_pass_that_broke_the_graph_is_named(place):
    passes = [harmless(f"harmless_{index}") for index in range(3)]
    passes.insert(place, harmful())
    fast = verified(lambda x: x.sin() + 1, *passes)
    result = expect_mismatch(fast, X)
    assert (verdict(fast).status, verdict(fast).pass_name) == ("mismatch", "harmful")
    assert torch.equal(result, X.sin() + 1)


def test_two_broken_passes_are_named_in_their_order():
    fast = verified(lambda x: x.sin(), harmful("one", 2.0), harmful("two", 0.5))
    fast(X)
    assert verdict(fast).status == "equal"  # together they break nothing
    fast = verified(lambda x: x.sin(), harmful("one", 2.0), harmful("two", 3.0))
    assert torch.equal(expect_mismatch(fast, X), X.sin())
    assert [record.pass_name for record in graphex.journal(fast).verifications] == ["one", "two"]


def test_a_broken_pass_after_ours_is_named():
    fast = verified(lambda x: x.sin().clone(), post_grad_custom_post_pass=harmful())
    assert torch.equal(expect_mismatch(fast, X), X.sin())
    assert verdict(fast).pass_name == "harmful"


def test_later_calls_run_the_graph_without_the_broken_pass():
    fast = verified(lambda x: x.sin(), harmful())
    expect_mismatch(fast, X)
    assert torch.equal(fast(Y), Y.sin())
    assert len(graphex.journal(fast).verifications) == 1


def test_integers_are_compared_exactly():
    shift = inserted_after(aten.mul.Tensor, aten.add.Tensor, 1, name="shift")
    fast = verified(lambda x: x * 2, shift)
    assert torch.equal(expect_mismatch(fast, torch.arange(5)), torch.arange(5) * 2)
    assert "integers" in verdict(fast).reason


def test_another_type_of_result_than_its_fake_promised_is_found():
    """One that is honest about it is refused without running it."""
    widen = inserted_after(aten.sin.default, torch.ops.graphex_test.float64_after_all.default, name="widen")
    fast = verified(lambda x: x.sin(), widen)
    assert expect_mismatch(fast, X).dtype == torch.float32
    assert verdict(fast).pass_name == "widen"


def test_other_strides_of_a_result_are_found():
    def relay(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        output = gm.graph.output_node()
        with gm.graph.inserting_after(node):
            turned = gm.graph.call_function(aten.transpose.int, (node, 0, 1))
        with gm.graph.inserting_after(turned):
            flat = gm.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        with gm.graph.inserting_after(flat):
            back = gm.graph.call_function(aten.transpose.int, (flat, 0, 1))
        output.replace_input_with(node, back)

    fast = verified(lambda x: x.sin(), relay)
    assert expect_mismatch(fast, X).stride() == (4, 1)
    assert "strides" in verdict(fast).reason


@torch.no_grad()
def test_the_stride_of_a_single_row_is_no_difference():
    """It leads nowhere, and an op that works in place hands on another one than an op that does not."""

    def model(x):
        return ((x[:1].float() / 2).round() + 1).to(torch.int8)

    x = torch.randn(3, 2, 8).half().transpose(0, 1)
    fast = verified(model)
    assert torch.equal(fast(x), model(x))
    assert verdict(fast).status == "equal"
    assert graphex.journal(fast).fallbacks == []


def test_nan_where_there_was_none_is_found():
    fast = verified(lambda x: x.sin(), harmful(by=float("nan")))
    assert torch.equal(expect_mismatch(fast, X), X.sin())
    assert verdict(fast).worst_error == float("inf")
    json.loads(graphex.journal(fast).to_json(), parse_constant=pytest.fail)  # any parser can read it


def test_values_that_float64_has_none_for_are_compared_with_the_original_graph():
    fast = verified(lambda x: nothing_in_float64(x.sin()), harmful())
    assert torch.equal(expect_mismatch(fast, X), X.sin() * 2)
    fast = verified(lambda x: nothing_in_float64(x.sin()), harmless())
    fast(X)
    assert verdict(fast).status == "equal"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64], ids=str)
def test_results_of_every_type_are_compared(dtype):
    x = torch.tensor([0.5, 1.5, 2.5])
    fast = verified(lambda x: (x.sin() * 10).to(dtype), harmful(by=0.0))
    found = expect_mismatch(fast, x)
    assert torch.equal(found.to(torch.complex64), (x.sin() * 10).to(dtype).to(torch.complex64))


def test_the_other_infinity_is_found():
    fast = verified(lambda x: x.sin() / 0, harmful(by=-1.0))
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(expect_mismatch(fast, x), x.sin() / 0)


def test_a_changed_write_to_an_input_is_found():
    def step(x):
        x.copy_(x.sin())
        return x.cos()

    def double_the_write(gm):
        (write,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        with gm.graph.inserting_before(write):
            doubled = gm.graph.call_function(aten.mul.Tensor, (write.args[1], 2))
        write.args = (write.args[0], doubled)

    fast = verified(step, double_the_write)
    x = X.clone()
    expect_mismatch(fast, x)
    assert torch.equal(x, X.sin())
    assert "input 0" in verdict(fast).reason


def test_a_dropped_write_to_an_input_is_found():
    def drop_the_write(gm):
        (write,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        write.replace_all_uses_with(write.args[1])
        gm.graph.erase_node(write)

    fast = verified(lambda x: x.add_(1).sum(), drop_the_write)
    x = torch.zeros(3)
    assert expect_mismatch(fast, x) == 3.0
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_results_that_begin_to_share_memory_are_found():
    def share(gm):
        first, second = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)

    fast = verified(lambda x: (x.sin(), x.sin()), share)
    first, second = expect_mismatch(fast, X)
    assert first.data_ptr() != second.data_ptr()
    assert "share memory" in verdict(fast).reason


def test_a_result_that_begins_to_share_memory_with_an_input_is_found():
    def share(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    fast = verified(lambda x: x.clone(), share)
    assert expect_mismatch(fast, X).data_ptr() != X.data_ptr()


def test_a_graph_that_fails_when_it_runs_is_rolled_back():
    @torch.library.custom_op("graphex_test::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("out of luck")

    @fails.register_fake
    def _(x):
        return torch.empty_like(x)

    broken = inserted_after(aten.sin.default, torch.ops.graphex_test.fails.default, name="broken")
    fast = verified(lambda x: x.sin(), broken)
    assert torch.equal(expect_mismatch(fast, X), X.sin())
    assert "out of luck" in verdict(fast).reason


def test_random_numbers_that_a_pass_adds_are_found():
    noise = inserted_after(aten.sin.default, aten.rand_like.default, name="noise")
    fast = verified(lambda x: x.sin(), noise)
    assert torch.equal(expect_mismatch(fast, X), X.sin())


def test_a_pass_that_draws_more_random_numbers_is_found():
    """Its own result is unused, but what is drawn after it differs."""

    def draw_first(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.rand_like.default)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(aten.rand_like.default, node.args, node.kwargs)

    fast = verified(lambda x: torch.rand_like(x) + x, draw_first)
    expect_mismatch(fast, X)
    assert verdict(fast).pass_name == "draw_first"


def test_the_backward_is_blamed_by_itself():
    def only_backward(gm):
        if any("tangents" in str(node.target) for node in gm.graph.nodes):
            for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
                node.args = (node.args[0], 2)

    x = X.clone().requires_grad_()
    fast = verified(lambda x: x.sin().sum(), only_backward)
    loss = fast(x)
    with pytest.warns(graphex.GraphexWarning, match="only_backward"):
        loss.backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert [record.status for record in graphex.journal(fast).verifications] == ["equal", "mismatch"]


# -- passes that change results on purpose -------------------------------------------------------------------------


# -- what is left out, and what is kept ----------------------------------------------------------------------------


def rule(name, search, replace):
    return graphex.replacement(search, replace, [torch.ones(4, 4)], name=name, self_test=False)


def right(name="right"):
    return rule(name, lambda x: x.neg().neg(), lambda x: x * 1.0)


def wrong(name="wrong"):
    return rule(name, lambda x: x.cos().sin(), lambda x: x.sin().cos())


def model_of_rules(x):
    return x.neg().neg() + x.cos().sin(), (x + 1).neg().neg()


def expect_report(*rules, **options):
    with pytest.warns(graphex.GraphexWarning, match="verification left out"):
        return graphex.explain(model_of_rules, (X,), options={"verify": True, "fusion_rules": list(rules), **options})


def test_one_wrong_rule_is_left_out_and_the_others_are_kept():
    report = expect_report(right(), wrong())
    (record,) = report.journal.verifications
    assert (record.pass_name, record.rules) == ("fuse_patterns", ("wrong",))
    assert record.runs in {ran.graph for ran in report.journal.passes}
    assert report.rule("right").matched == 2
    assert report.rule("wrong").matched == 0
    assert report.worst_difference == 0.0


def test_the_summary_counts_nothing_that_was_left_out():
    summary = expect_report(right(), wrong()).summary()
    assert "2 of 2 right sites fused." in summary
    assert "wrong sites fused" not in summary
    assert "0 of 1 wrong sites: left out by verification." in summary
    assert "Verification: mismatch by rule 'wrong' of 'fuse_patterns', which was left out" in summary
    assert "Verified: 1 of 1 graphs equal the original, without rule 'wrong' of 'fuse_patterns'." in summary


def test_a_rule_that_was_left_out_applies_nowhere_and_says_why():
    report = expect_report(right(), wrong())
    counts = {each.rule: (each.matches, each.candidates) for each in report.journal.rules}
    assert len(counts) == len(report.journal.rules)
    assert counts == {"right": (2, 2), "wrong": (0, 1)}
    assert [each.rule for each in report.journal.rewrites if each.rule in counts] == ["right"] * 2
    (remark,) = report.rule("wrong").remarks
    assert remark == f"verification left it out: {report.journal.verifications[0].reason}"


def test_two_wrong_rules_are_both_left_out():
    report = expect_report(wrong("a"), right(), rule("b", lambda x: x + 1, lambda x: x + 2))
    (record,) = report.journal.verifications
    assert set(record.rules) == {"a", "b"}
    assert "Verified: 1 of 1 graphs equal the original, without rules 'a', 'b'" in report.summary()


def test_the_script_that_shows_a_wrong_rule_has_its_name(capsys, tmp_path_factory):
    (record,) = expect_report(right(), wrong()).journal.verifications
    assert Path(record.repro).name == "repro_wrong.py"
    assert Path(record.repro).is_relative_to(tmp_path_factory.getbasetemp())  # tests leave nothing elsewhere
    runpy.run_path(record.repro, run_name="__main__")
    assert capsys.readouterr().out.startswith("the graphs before and after rule 'wrong' disagree")


def test_a_broken_pass_is_dropped_and_the_passes_after_it_run():
    fast = verified(lambda x: x.sin() + x.sin() + x[:], harmful())
    expect_mismatch(fast, X)
    (record,) = graphex.journal(fast).verifications
    made = [each.rule for each in graphex.journal(fast).rewrites if each.graph == record.runs]
    assert "equal_calls" in made


def test_a_rule_of_ours_that_was_undone_does_not_count_as_made():
    with pytest.warns(graphex.GraphexWarning, match="verification left out pass 'harmful'"):
        report = graphex.explain(
            lambda x: x.sin() + x.sin(), (X,), options={"verify": True, "post_grad_custom_post_pass": harmful()}
        )
    assert report.rule("equal_calls").matched == 1


def on_purpose(custom):
    custom.preserves_results = False
    return custom


def test_a_pass_that_changes_results_on_purpose_becomes_part_of_the_reference():
    fast = verified(lambda x: x.sin().clone() + 1, on_purpose(harmful(by=2.0)))
    torch.testing.assert_close(fast(X), X.sin() * 2 + 1)
    assert verdict(fast).status == "equal"


@pytest.mark.parametrize("first", [True, False])
def test_a_broken_pass_before_or_after_one_with_a_purpose_is_found(first):
    passes = [harmful("broken", 1.5), on_purpose(harmful("meant", 2.0))]
    fast = verified(lambda x: x.sin(), *(passes if first else reversed(passes)))
    expect_mismatch(fast, X)
    assert verdict(fast).pass_name == "broken"


def test_what_was_meant_before_a_broken_pass_stays():
    fast = verified(lambda x: x.sin(), on_purpose(harmful("meant", 2.0)), harmful("broken", 1.5))
    torch.testing.assert_close(expect_mismatch(fast, X), X.sin() * 2)


# -- refused -------------------------------------------------------------------------------------------------------


def test_collectives_are_not_run_twice():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = next(iter(trace(lambda x: x.sin(), X).graph.nodes)).meta["val"]
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    total.meta["val"] = x.meta["val"]
    graph.output((total,))
    run = graphex.compile_fx(torch.fx.GraphModule(torch.nn.Module(), graph), options={"verify": True})
    with pytest.raises(Exception, match=r"(?i)group"):  # there is no process group here
        run(X)
    (record,) = run.journal.verifications
    assert record.status == "refused"
    assert "communicates" in record.reason


def test_the_repro_script_is_named_in_the_journal():
    fast = verified(lambda x: x.sin(), harmful())
    expect_mismatch(fast, X)
    with open(verdict(fast).repro) as script:
        text = script.read()
    compile(text, "repro", "exec")
    assert "import graphex" not in text


def test_the_repro_script_prints_outputs_and_the_inputs_that_differ(tmp_path):
    fast = verified(lambda x, y: x.sin() + y, harmful())
    expect_mismatch(fast, X, Y)
    said = python(verdict(fast).repro, cwd=tmp_path).stdout
    assert "output 0 largest difference" in said
    assert "input" not in said
