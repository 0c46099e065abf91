"""Every form a custom pass can take, and every way it can be broken."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Transformer
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.fx.passes.infra.pass_manager import PassManager
from torch.fx.passes.operator_support import OperatorSupportBase

import graphex
from graphex.analysis.graphs import origins
from tests.harness.compiling import Observer
from tests.harness.processes import python

aten = torch.ops.aten

X, Y = torch.randn(3, 3), torch.randn(3, 3)


def model(x, y):
    return torch.relu(x + y) * y


def multiplied(x, y):
    """What `model` computes once its add is a mul."""
    return torch.relu(x * y) * y


def compiled(*, pre=None, post=None, fn=model, **options):
    options |= {"post_grad_custom_pre_pass": pre, "post_grad_custom_post_pass": post}
    return torch.compile(fn, backend="graphex", options=options)


def status(fast: Any, name: str) -> str:
    return next(record.status for record in graphex.journal(fast).passes if record.name == name)


def adds(gm: GraphModule):
    return [node for node in gm.graph.nodes if node.target == aten.add.Tensor]


# -- passes, one of each form ------------------------------------------------------------------------------------


def in_place_with_three_arguments(gm, example_inputs, config):
    for node in adds(gm):
        node.target = aten.mul.Tensor
    return "ignored"


def takes_a_scale(gm, example_inputs, config, scale):
    in_place_with_three_arguments(gm, example_inputs, config)


def in_place_with_one_argument(gm):
    for node in adds(gm):
        node.target = aten.mul.Tensor


def returns_the_module(gm):
    in_place_with_one_argument(gm)
    return gm


def returns_a_new_module(gm):
    copy = GraphModule(gm, gm.graph)
    in_place_with_one_argument(copy)
    return copy


def returns_a_pass_result(gm):
    in_place_with_one_argument(gm)
    return PassResult(gm, True)


class ReplaceAddWithMul(Transformer):
    def call_function(self, target, args, kwargs):
        if target != aten.add.Tensor:
            return super().call_function(target, args, kwargs)
        return super().call_function(aten.mul.Tensor, args, kwargs)


class MulBase(PassBase):
    def call(self, graph_module):
        in_place_with_one_argument(graph_module)
        return PassResult(graph_module, True)


class CallableObject:
    def __call__(self, gm, example_inputs, config):
        in_place_with_one_argument(gm)


def scaled_by(scale):
    """A decorator that fills in an argument of the pass."""

    def decorated(scaled):
        @functools.wraps(scaled)
        def takes_no_scale(gm, example_inputs, config):
            scaled(gm, example_inputs, config, scale)

        return takes_no_scale

    return decorated


@scaled_by(2)
def filled_in(gm, example_inputs, config, scale):
    takes_a_scale(gm, example_inputs, config, scale)


def handed_on(wrapped):
    @functools.wraps(wrapped)
    def as_given(*args, **kwargs):
        return wrapped(*args, **kwargs)

    return as_given


@handed_on
def with_one_argument_handed_on(gm):
    in_place_with_one_argument(gm)


class HousePass(graphex.GraphPass):
    name = "house_pass"

    def apply(self, work):
        in_place_with_one_argument(work.gm)


def add_pattern(x, y):
    return aten.add.Tensor(x, y)


def mul_replacement(x, y):
    return aten.mul.Tensor(x, y)


FORMS = {
    "in_place_with_three_arguments": in_place_with_three_arguments,
    "in_place_with_one_argument": in_place_with_one_argument,
    "returns_the_module": returns_the_module,
    "returns_a_new_module": returns_a_new_module,
    "returns_a_pass_result": returns_a_pass_result,
    "ReplaceAddWithMul": ReplaceAddWithMul,
    "MulBase": MulBase(),
    "PassManager": PassManager(passes=[MulBase()], run_checks_after_each_pass=True),
    "CallableObject": CallableObject(),
    "takes_a_scale": functools.partial(takes_a_scale, scale=2),
    "filled_in": filled_in,
    "with_one_argument_handed_on": with_one_argument_handed_on,
    "house_pass": HousePass(),
    "add_pattern": (add_pattern, mul_replacement),
    "add_pattern/filters": (add_pattern, mul_replacement, [lambda match, original, pattern: True]),
    "add_pattern/Rewrite": graphex.Rewrite(add_pattern, mul_replacement),
}


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pass_does_what_it_says(form, place):
    fast = compiled(**{place: FORMS[form]})
    assert torch.equal(fast(X, Y), multiplied(X, Y))
    assert status(fast, form.split("/")[0]) == "changed"
    assert not graphex.journal(fast).fallbacks


class DropAddZero(graphex.GraphPass):
    option = "remove_noop_ops"

    def rules(self):
        return ("add_zero",)

    def concerns(self, graph):
        return any(node.target is aten.add.Tensor for node in graph.nodes)

    def apply(self, work):
        for node in list(work.graph.nodes):
            if node.target is aten.add.Tensor and node.args[1] == 0 and work.allows("add_zero"):
                work.replace(node, node.args[0], rule="add_zero", because="nothing is added")


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({}, 1),
        ({"disable_rules": ["add_zero"]}, 0),
        ({"disable_passes": ["DropAddZero"]}, 0),
        ({"remove_noop_ops": False}, 0),
    ],
    ids=str,
)
def test_a_graph_pass_of_a_users_has_rules_and_switches_like_ours(options, dropped):
    options = {"post_grad_custom_pre_pass": DropAddZero(), **options}
    report = graphex.explain(lambda x: (x * 2 + 0) * 3, (X,), options=options)
    assert report.rule("add_zero").matched == dropped


def test_a_graph_pass_of_a_users_leaves_alone_what_does_not_concern_it():
    report = graphex.explain(torch.relu, (X,), options={"post_grad_custom_pre_pass": DropAddZero()})
    assert "DropAddZero" not in [ran.name for ran in report.journal.passes]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pass_leaves_nodes_with_value_line_and_origin(form):
    seen = Observer()
    compiled(pre=FORMS[form], post=seen)(X, Y)
    for name, meta in seen.metas.items():
        if name == "output":
            continue
        assert "val" in meta, name
        assert meta["graphex_origins"], name
    calls = [meta for meta, op in zip(seen.metas.values(), seen.ops, strict=True) if op == "call_function"]
    assert len(calls) == 3
    assert all("return torch.relu(x + y) * y" in meta["stack_trace"] for meta in calls)


@pytest.mark.parametrize("form", FORMS)
def test_the_new_node_comes_from_the_node_it_replaced(form):
    seen = Observer()
    compiled(pre=FORMS[form], post=seen)(X, Y)
    first = next(node for node in seen.gm.graph.nodes if node.target == aten.mul.Tensor)
    assert "add" in origins(first)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pass_works_on_dynamic_shapes(form):
    fast = torch.compile(model, backend="graphex", dynamic=True, options={"post_grad_custom_pre_pass": FORMS[form]})
    for size in (3, 5):
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        assert torch.equal(fast(x, y), multiplied(x, y))
    assert len(graphex.journal(fast).graphs) == 1


def test_a_list_of_passes_runs_in_order():
    order = []

    def first(gm, example_inputs, config):
        order.append("first")

    def second(gm):
        order.append("second")

    compiled(pre=[first, second])(X, Y)
    assert order == ["first", "second"]


def test_a_list_mixes_forms():
    def double_relu(gm):
        for node in gm.graph.nodes:
            if node.target == aten.relu.default:
                node.target = aten.neg.default

    fast = compiled(pre=[(add_pattern, mul_replacement), ReplaceAddWithMul, double_relu])
    assert torch.equal(fast(X, Y), -(X * Y) * Y)


def test_pre_runs_before_ours_and_post_after():
    fast = compiled(pre=graphex.graph_pass(name="early")(lambda gm: None), post=Observer())
    fast(X, Y)
    names = [record.name for record in graphex.journal(fast).passes]
    assert names.index("early") < names.index("remove_noops") < names.index("observer")


def test_pass_sees_fake_example_inputs_and_the_whole_config():
    seen = Observer()
    compiled(pre=seen, strict=False, mode="eager")(X, Y)
    assert [type(value).__name__ for value in seen.example_inputs] == ["FakeTensor", "FakeTensor"]
    assert [tuple(value.shape) for value in seen.example_inputs] == [(3, 3), (3, 3)]
    assert isinstance(seen.config, graphex.CompilerConfig)
    assert (seen.config.mode, seen.config.strict, seen.config.remove_noop_ops) == ("eager", False, True)


def test_pass_may_not_change_the_config():
    def greedy(gm, example_inputs, config):
        config.verify = True

    with pytest.raises(graphex.PassError, match="greedy") as caught:
        compiled(pre=greedy)(X, Y)
    assert isinstance(caught.value.__cause__, graphex.OptionError)


def test_a_module_returned_by_the_three_argument_form_is_ignored():
    def returns_another(gm, example_inputs, config):
        return ReplaceAddWithMul(gm).transform()

    fast = compiled(pre=returns_another)
    assert torch.equal(fast(X, Y), model(X, Y))
    assert status(fast, "returns_another") == "unchanged"


def test_a_pass_that_changes_nothing_is_recorded_as_unchanged():
    fast = compiled(pre=lambda gm: gm)
    fast(X, Y)
    assert status(fast, "<lambda>") == "unchanged"


def test_a_pass_is_named_by_its_name_attribute():
    def anonymous(gm):
        return None

    anonymous.name = "clear name"
    fast = compiled(pre=anonymous)
    fast(X, Y)
    assert status(fast, "clear name") == "unchanged"


def test_what_a_pass_did_is_counted_by_op():
    fast = compiled(pre=ReplaceAddWithMul)
    fast(X, Y)
    ran = next(record for record in graphex.journal(fast).passes if record.name == "ReplaceAddWithMul")
    assert (ran.stage, ran.removed, ran.added) == ("pre", {"aten.add.Tensor": 1}, {"aten.mul.Tensor": 1})


# -- the transformers of PyTorch's guide -------------------------------------------------------------------------


class ReplaceAddWithMulSub(Transformer):
    def call_function(self, target, args, kwargs):
        if target != aten.add.Tensor:
            return super().call_function(target, args, kwargs)
        _, y = args
        product = super().call_function(aten.mul.Tensor, args, {})
        return super().call_function(aten.sub.Tensor, (product, y), {})


class RemoveRelu(Transformer):
    def call_function(self, target, args, kwargs):
        if target != aten.relu.default:
            return super().call_function(target, args, kwargs)
        assert len(args) == 1
        return args[0]


class ScalarToTensor(Transformer):
    def call_function(self, target, args, kwargs):
        def coerced(value, declared):
            is_number = isinstance(value, (float, int, bool))
            return torch.tensor(value) if is_number and isinstance(declared.type, torch.TensorType) else value

        schema = target._schema.arguments
        new = tuple(coerced(value, declared) for value, declared in zip(args, schema, strict=False))
        return super().call_function(target, new, kwargs)


def test_one_node_becomes_two():
    fast = compiled(pre=ReplaceAddWithMulSub)
    assert torch.equal(fast(X, Y), torch.relu(X * Y - Y) * Y)


def test_both_nodes_of_one_to_two_come_from_the_replaced_one():
    seen = Observer()
    compiled(pre=ReplaceAddWithMulSub, post=seen)(X, Y)
    new = [node for node in seen.gm.graph.nodes if node.op == "call_function"][:2]
    assert [node.target for node in new] == [aten.mul.Tensor, aten.sub.Tensor]
    assert all(origins(node) == ("add",) for node in new)
    assert all(node.meta["val"].shape == (3, 3) and "x + y" in node.meta["stack_trace"] for node in new)


def test_one_node_becomes_none():
    fast = compiled(pre=RemoveRelu)
    assert torch.equal(fast(X, Y), (X + Y) * Y)


def test_scalars_become_tensors():
    seen = Observer()
    fast = compiled(pre=ScalarToTensor, post=seen, fn=lambda x, y: x * 2 + y)
    assert torch.equal(fast(X, Y), X * 2 + Y)
    assert not graphex.journal(fast).fallbacks
    constants = [node for node in seen.gm.graph.nodes if node.op == "get_attr"]
    assert constants
    assert all(node.meta["val"].shape == () for node in constants)


def test_a_transformer_keeps_the_metadata_of_nodes_it_copies():
    before, after = Observer(), Observer()
    compiled(pre=[before, ReplaceAddWithMul], post=after)(X, Y)
    for name in ("relu", "mul"):
        old = before.metas[name]
        new = next(node for node in after.gm.graph.nodes if origins(node) == (name,))
        assert new.meta["stack_trace"] == old["stack_trace"]
        assert new.meta["val"].shape == old["val"].shape
        assert new.meta.get("seq_nr") == old.get("seq_nr")


def test_a_transformer_that_changes_a_shape_changes_every_value_downstream():
    class Widen(Transformer):
        def call_function(self, target, args, kwargs):
            result = super().call_function(target, args, kwargs)
            if target != aten.add.Tensor:
                return result
            return super().call_function(aten.cat.default, ([result, result],), {})

    seen = Observer()
    compiled(pre=Widen, post=seen, fn=lambda x: (torch.relu(x + 1)).sum())(X)
    relu = next(node for node in seen.gm.graph.nodes if node.target == aten.relu.default)
    assert relu.meta["val"].shape == (6, 3)


# -- PassManager -------------------------------------------------------------------------------------------------


def test_pass_manager_runs_all_its_passes():
    def relu_to_neg(gm):
        for node in gm.graph.nodes:
            if node.target == aten.relu.default:
                node.target = aten.neg.default
        return PassResult(gm, True)

    fast = compiled(pre=PassManager(passes=[MulBase(), relu_to_neg]))
    assert torch.equal(fast(X, Y), -(X * Y) * Y)


def test_a_check_of_a_pass_manager_that_raises_stops_compilation():
    def no_mul(gm):
        if any(node.target == aten.mul.Tensor for node in gm.graph.nodes):
            raise ValueError("target should not be mul")

    manager = PassManager(passes=[MulBase()], run_checks_after_each_pass=True, suppress_check_failures=False)
    manager.add_checks(no_mul)
    with pytest.raises(graphex.PassError, match="PassManager") as caught:
        compiled(pre=manager)(X, Y)
    assert isinstance(caught.value.__cause__, ValueError)


# -- the subgraph rewriter ---------------------------------------------------------------------------------------


def test_replaced_patterns_can_be_reached():
    rewrite = graphex.Rewrite(add_pattern, mul_replacement)
    compiled(pre=rewrite)(X, Y)
    (match,) = rewrite.replaced
    assert match.nodes_map[match.anchor].name == "add"
    assert [node.target for node in match.replacements] == [aten.mul.Tensor]


def test_a_filter_that_says_no_keeps_the_pattern():
    rewrite = graphex.Rewrite(add_pattern, mul_replacement, [lambda match, original, pattern: False])
    fast = compiled(pre=rewrite)
    assert torch.equal(fast(X, Y), model(X, Y))
    assert rewrite.replaced == []
    assert status(fast, "add_pattern") == "unchanged"


def test_many_nodes_become_one_that_remembers_them():
    def pattern(x, y):
        return aten.relu.default(aten.add.Tensor(x, y))

    seen = Observer()
    fast = compiled(pre=(pattern, mul_replacement), post=seen)
    assert torch.equal(fast(X, Y), X * Y * Y)
    new = next(node for node in seen.gm.graph.nodes if node.op == "call_function")
    assert set(origins(new)) == {"add", "relu"}


def test_the_inside_of_a_replacement_has_values_too():
    def replacement(x, y):
        return aten.neg.default(aten.neg.default(aten.add.Tensor(x, y)))

    seen = Observer()
    fast = compiled(pre=(lambda x, y: aten.add.Tensor(x, y), replacement), post=seen)
    assert torch.equal(fast(X, Y), model(X, Y))
    negs = [node for node in seen.gm.graph.nodes if node.target == aten.neg.default]
    assert len(negs) == 2
    assert all("val" in node.meta and "add" in origins(node) for node in negs)


@pytest.mark.parametrize("bad", [(add_pattern,), (add_pattern, mul_replacement, [], []), (add_pattern, "no")])
def test_a_tuple_of_another_shape_is_refused(bad):
    with pytest.raises(graphex.OptionError, match="pattern, replacement"):
        compiled(pre=bad)(X, Y)


# -- the capability partitioner ----------------------------------------------------------------------------------


class AddReluSupport(OperatorSupportBase):
    def is_node_supported(self, submodules, node):
        return node.op == "call_function" and node.target in (aten.add.Tensor, aten.relu.default)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_partitions_become_call_module_nodes_that_run(place):
    fast = compiled(**{place: AddReluSupport()})
    assert torch.equal(fast(X, Y), model(X, Y))
    assert torch.equal(fast(Y, X), model(Y, X))
    ran = next(record for record in graphex.journal(fast).passes if record.name == "AddReluSupport")
    assert ran.status == "changed"
    assert ran.removed == {"aten.add.Tensor": 1, "aten.relu.default": 1}
    assert not graphex.journal(fast).fallbacks


def test_later_stages_keep_a_partition_and_give_it_a_value():
    seen = Observer()
    compiled(pre=AddReluSupport(), post=seen)(X, Y)
    module = next(node for node in seen.gm.graph.nodes if node.op == "call_module")
    assert module.meta["val"].shape == (3, 3)
    assert set(origins(module)) == {"add", "relu"}


def test_a_partitioner_that_the_pass_drives_itself_is_accepted():
    def partition(gm):
        partitioner = CapabilityBasedPartitioner(gm, AddReluSupport(), allows_single_node_partition=True)
        return partitioner.fuse_partitions(partitioner.propose_partitions())

    seen = Observer()
    fast = compiled(pre=partition, post=seen)
    assert torch.equal(fast(X, Y), model(X, Y))
    assert "call_module" in seen.ops


def test_a_partition_with_two_results_runs():
    def two(x, y):
        a = x + y
        b = torch.relu(a)
        return a * y, b * y

    seen = Observer()
    fast = compiled(pre=AddReluSupport(), post=seen, fn=two, verify=True)
    assert torch.equal(fast(X, Y)[1], two(X, Y)[1])
    assert "call_module" in seen.ops
    assert graphex.journal(fast).verifications[0].status == "equal"


def test_a_partition_of_dynamic_shapes_runs():
    fast = torch.compile(
        model, backend="graphex", dynamic=True, options={"post_grad_custom_pre_pass": AddReluSupport()}
    )
    for size in (3, 5):
        x = torch.randn(size, 2)
        assert torch.equal(fast(x, x), model(x, x))


# -- the joint graph ---------------------------------------------------------------------------------------------


def test_a_pass_can_ask_for_the_joint_graph():
    phases = []

    @graphex.graph_pass(stage="joint")
    def look(gm):
        phases.append([node.name for node in gm.graph.nodes if node.op == "placeholder"])

    fast = compiled(pre=look)
    x = X.clone().requires_grad_()
    fast(x, Y).sum().backward()
    assert len(phases) == 1
    assert any("tangents" in name for name in phases[0])
    assert [record.stage for record in graphex.journal(fast).passes if record.name == "look"] == ["joint"]
    assert {graph.phase for graph in graphex.journal(fast).graphs} == {"joint", "forward", "backward"}


def test_a_joint_pass_changes_the_gradient():
    @graphex.graph_pass(stage="joint", preserves_results=False)
    def double_gradients(gm):
        output = next(node for node in gm.graph.nodes if node.op == "output")
        (results,) = output.args
        forward, gradient = results[0], results[1]
        with gm.graph.inserting_before(output):
            doubled = gm.graph.call_function(aten.mul.Tensor, (gradient, 2))
            doubled.meta.update(gradient.meta)
        output.args = ((forward, doubled, *results[2:]),)

    x = X.clone().requires_grad_()
    compiled(pre=double_gradients)(x, Y).sum().backward()
    eager = X.clone().requires_grad_()
    model(eager, Y).sum().backward()
    assert torch.equal(x.grad, 2 * eager.grad)


def test_a_joint_pass_is_not_run_for_inference():
    @graphex.graph_pass(stage="joint")
    def look(gm):
        raise AssertionError("there is no joint graph")

    assert torch.equal(compiled(pre=look)(X, Y), model(X, Y))


def test_an_unknown_stage_is_refused():
    with pytest.raises(graphex.OptionError, match=r"stage 'joint'.*or for none.*'backward'"):
        graphex.graph_pass(stage="backward")


def test_an_unknown_stage_on_a_pass_itself_is_refused():
    class Late(graphex.GraphPass):
        name, stage = "late", "fuse"

        def apply(self, work):
            pass

    with pytest.raises(graphex.OptionError, match=r"stage 'joint'.*'late' asks for 'fuse'"):
        graphex.CompilerConfig(post_grad_custom_pre_pass=Late())


@pytest.mark.parametrize("given", ["joint", lambda gm: None], ids=["a stage", "a pass"])
def test_what_is_declared_of_a_pass_is_declared_by_name(given):
    with pytest.raises(graphex.OptionError, match=r"by name: @graph_pass\(stage='joint'\)"):
        graphex.graph_pass(given)


@pytest.mark.parametrize("wrong", [{"name": 3}, {"name": ""}, {"preserves_results": "no"}], ids=str)
def test_declarations_of_another_kind_are_refused(wrong):
    with pytest.raises(graphex.OptionError, match="|".join(("the name of a pass", "preserves_results is True or"))):
        graphex.graph_pass(**wrong)


def test_nothing_is_declared_of_what_is_no_pass():
    with pytest.raises(graphex.OptionError, match="takes a function, a class or an instance"):
        graphex.graph_pass(stage="joint")((torch.sin, torch.cos))


class CalledWithNothing:
    def __call__(self):
        pass


class AppliesNothing(graphex.GraphPass):
    name = "applies_nothing"

    def apply(self):
        pass


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        (lambda: None, r"parameters \(\)"),
        (lambda gm, example_inputs: None, r"parameters \(gm, example_inputs\)"),
        (lambda gm, example_inputs, config, more: None, "more"),
        (lambda gm, *, depth: None, r"\*, depth"),
        (lambda **everything: None, "everything"),
        (CalledWithNothing(), "'CalledWithNothing'"),
        (AppliesNothing(), "apply of a GraphPass takes the Work"),
    ],
)
def test_a_pass_with_other_parameters_is_refused_where_it_is_given(custom, said):
    with pytest.raises(graphex.OptionError, match=said) as caught:
        graphex.CompilerConfig(post_grad_custom_post_pass=[lambda gm: None, custom])
    assert "\n" not in str(caught.value)


def test_a_pass_with_other_parameters_is_refused_where_it_is_declared():
    with pytest.raises(graphex.OptionError, match=r"'look' has the parameters \(gm, example_inputs\)"):

        @graphex.graph_pass(stage="joint")
        def look(gm, example_inputs):
            pass


@pytest.mark.parametrize(
    "custom",
    [lambda gm, depth=1: None, lambda gm, *, depth=1: None, lambda *given: None, lambda gm, inputs, more=1: None],
)
def test_parameters_that_need_not_be_given_are_allowed(custom):
    assert graphex.CompilerConfig(post_grad_custom_pre_pass=custom)


def test_a_rewrite_of_what_is_no_function_is_refused():
    with pytest.raises(graphex.OptionError, match="pattern and replacement, got int and builtin"):
        graphex.Rewrite(3, torch.sin)
    with pytest.raises(graphex.OptionError, match="filters of a rewrite are a list of functions, got 3"):
        graphex.CompilerConfig(post_grad_custom_pre_pass=(torch.sin, torch.cos, 3))


# -- broken passes -----------------------------------------------------------------------------------------------


def raising(gm, example_inputs, config):
    for node in adds(gm):
        node.target = aten.mul.Tensor
    raise LookupError("no idea what to do")


def using_before_definition(gm):
    add, relu = (next(n for n in gm.graph.nodes if n.target == t) for t in (aten.add.Tensor, aten.relu.default))
    add.prepend(relu)


def erasing_a_used_node(gm):
    (add,) = adds(gm)
    add.graph._erased = True
    users = dict(add.users)
    add.users.clear()
    gm.graph.erase_node(add)
    assert users


def dropping_an_output(gm):
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = ((),)


def adding_an_input(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("extra")


def swapping_the_inputs(gm):
    first, second = (node for node in gm.graph.nodes if node.op == "placeholder")
    second.append(first)


def nesting_the_outputs(gm):
    output = gm.graph.output_node()
    output.args = ([output.args[0]],)


def returning_none(gm):
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(None for _ in output.args[0]),)


def breaking_a_shape(gm):
    (add,) = adds(gm)
    with gm.graph.inserting_before(add):
        wide = gm.graph.call_function(aten.cat.default, ([add.args[0]] * 3, 1))
    add.args = (wide, add.args[1])


def halving_an_output(gm):
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        half = gm.graph.call_function(aten._to_copy.default, (output.args[0][0],), {"dtype": torch.float16})
    output.args = ((half,),)


def cutting_an_output(gm):
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        cut = gm.graph.call_function(aten.slice.Tensor, (output.args[0][0], 0, 0, 1))
    output.args = ((cut,),)


def returning_a_number(gm):
    return 3


BROKEN = {
    raising: "no idea what to do",
    using_before_definition: "'relu'.*'add'.*before it is defined",
    erasing_a_used_node: "'relu'.*'add'.*not in the graph any more",
    dropping_an_output: "outputs",
    adding_an_input: "inputs",
    swapping_the_inputs: "inputs in another order",
    nesting_the_outputs: "nested in another way",
    returning_none: "None where there was a value",
    breaking_a_shape: "'add'.*cannot be evaluated",
    halving_an_output: r"output 0 as float16\[.*it was float32",
    cutting_an_output: r"output 0 as float32\[1, .*it was float32",
    returning_a_number: "returned int",
}
broken_passes = pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.__name__)


@broken_passes
def test_a_broken_pass_stops_compilation_with_its_name_and_the_problem(broken):
    with pytest.raises(graphex.PassError, match=f"(?s){broken.__name__}.*{BROKEN[broken]}"):
        compiled(pre=broken)(X, Y)


@broken_passes
def test_a_broken_pass_is_rolled_back_when_not_strict(broken):
    fast = compiled(pre=broken, strict=False)
    with pytest.warns(graphex.GraphexWarning, match=broken.__name__):
        result = fast(X, Y)
    assert torch.equal(result, model(X, Y))
    assert status(fast, broken.__name__) == "rolled back"
    (record,) = graphex.journal(fast).fallbacks
    assert broken.__name__ in record.what
    assert record.reason


@broken_passes
def test_after_a_roll_back_our_passes_still_run(broken):
    seen = Observer()
    fast = compiled(pre=broken, post=seen, strict=False, fn=lambda x, y: torch.relu(x + y).clone() * y)
    with pytest.warns(graphex.GraphexWarning):
        fast(X, Y)
    assert aten.clone.default not in seen.targets


@pytest.mark.parametrize("kind", [HousePass, MulBase, AddReluSupport])
def test_a_class_instead_of_an_instance_is_refused(kind):
    with pytest.raises(graphex.OptionError, match=rf"give an instance of it, {kind.__name__}\(\)"):
        compiled(pre=kind)(X, Y)


def test_a_symbolic_size_as_an_argument_is_refused():
    def view_again(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            with gm.graph.inserting_before(node):
                flat = gm.graph.call_function(aten.view.default, (node.args[0], [-1]))
                node.args = (gm.graph.call_function(aten.view.default, (flat, list(node.meta["val"].shape))),)

    fast = torch.compile(
        model, backend="graphex", dynamic=True, options={"post_grad_custom_pre_pass": view_again, "strict": True}
    )
    with pytest.raises(graphex.PassError, match=r"'view_again' left node '.*' with the symbolic value .*sym_size"):
        fast(X, Y)


def test_the_users_exception_is_the_cause():
    with pytest.raises(graphex.PassError) as caught:
        compiled(pre=raising)(X, Y)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_pass_that_raises_is_in_the_journal_as_failed():
    fast = compiled(pre=raising)
    with pytest.raises(graphex.PassError):
        fast(X, Y)
    ran = next(record for record in graphex.journal(fast).passes if record.name == "raising")
    assert ran.status == "failed"
    assert "no idea what to do" in ran.reason


def test_a_broken_pass_names_the_users_line():
    with pytest.raises(graphex.PassError, match=r"test_adapter\.py:\d+"):
        compiled(pre=using_before_definition)(X, Y)


def test_a_broken_pass_in_the_backward_is_named_too():
    def breaks_backward(gm, example_inputs, config):
        if any("tangents" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("not this graph")

    fast = compiled(pre=breaks_backward)
    loss = fast(X.clone().requires_grad_(), Y).sum()
    with pytest.raises(graphex.PassError, match="breaks_backward"):
        loss.backward()


def test_one_warning_for_one_reason():
    with pytest.warns(graphex.GraphexWarning) as warned:
        fast = compiled(pre=raising, strict=False)
        fast(X, Y)
        fast(X.double(), Y.double())
    assert len([warning for warning in warned if warning.category is graphex.GraphexWarning]) == 1
    assert len(graphex.journal(fast).fallbacks) == 2


def drop_all_metadata(gm):
    for node in gm.graph.nodes:
        node.meta.clear()


def drop_metadata_and_change(gm):
    in_place_with_one_argument(gm)
    drop_all_metadata(gm)


@pytest.mark.parametrize("dropping", [drop_all_metadata, drop_metadata_and_change], ids=lambda each: each.__name__)
def test_metadata_that_a_pass_drops_is_restored(dropping):
    before, after = Observer(), Observer()
    compiled(pre=[before, dropping], post=after)(X, Y)
    for name, meta in before.metas.items():
        if name == "output":
            continue
        assert after.metas[name]["val"].shape == meta["val"].shape
        assert after.metas[name]["graphex_origins"] == meta["graphex_origins"]
        assert after.metas[name].get("stack_trace") == meta.get("stack_trace")


def test_a_pass_that_drops_metadata_is_named():
    fast = compiled(pre=drop_all_metadata)
    fast(X, Y)
    ran = next(record for record in graphex.journal(fast).passes if record.name == "drop_all_metadata")
    assert (ran.status, ran.reason) == ("unchanged", "dropped the metadata of 5 nodes; it was restored")


# -- results that change -----------------------------------------------------------------------------------------


def off_by_a_little(gm):
    for node in gm.graph.nodes:
        if node.target == aten.relu.default:
            with gm.graph.inserting_after(node):
                scaled = gm.graph.call_function(aten.mul.Tensor, (node, 1.001))
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)


def test_changed_results_are_rolled_back_and_named():
    fast = compiled(pre=off_by_a_little, verify=True)
    with pytest.warns(graphex.GraphexWarning, match="off_by_a_little"):
        result = fast(X, Y)
    assert torch.equal(result, model(X, Y))
    assert torch.equal(fast(Y, X), model(Y, X))
    (verdict,) = graphex.journal(fast).verifications
    assert (verdict.status, verdict.pass_name) == ("mismatch", "off_by_a_little")


def test_the_repro_script_shows_the_difference_by_itself(tmp_path):
    fast = compiled(pre=off_by_a_little, verify=True)
    with pytest.warns(graphex.GraphexWarning):
        result = fast(X, Y)
    script = graphex.journal(fast).verifications[0].repro
    ran = python("-I", script, cwd=tmp_path)
    shown = next(float(line.split()[-1]) for line in ran.stdout.splitlines() if line.startswith("output 0"))
    assert shown == pytest.approx(float(result.abs().max()) * 0.001, rel=1e-2)


def test_without_verify_the_users_pass_has_the_last_word():
    assert not torch.equal(compiled(pre=off_by_a_little)(X, Y), model(X, Y))
