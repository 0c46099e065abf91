"""Everything that a compiled graph depends on makes a miss when it changes, and the record names it."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import Tensor

import graphex
from graphex.cache.sources import NoFingerprintError, fingerprint
from tests.harness.cached import asked, missed


def function(x: Tensor) -> Tensor:
    return (x * 2).relu()


def with_constant(value: float):
    def function(x):
        return x * value

    return function


def test_nothing_is_stored_for_a_new_function(run):
    assert missed(run(function, torch.ones(2))) == "nothing is stored for 'function' (inference)"


def test_a_size_that_changed_is_named(run):
    run(function, torch.ones(2))
    assert "the input 'arg0_1' differs" in missed(run(function, torch.ones(3)))


def test_a_type_that_changed_is_named(run):
    run(function, torch.ones(2))
    assert "float64" in missed(run(function, torch.ones(2, dtype=torch.double)))


def test_a_line_that_changed_is_named(run):
    run(with_constant(2.0), torch.ones(2))
    reason = missed(run(with_constant(3.0), torch.ones(2)))
    assert "test_keys.py:" in reason
    assert "return x * value" in reason
    assert "3.0" in reason


def test_an_option_that_changed_is_named(run):
    run(function, torch.ones(2))
    assert missed(run(function, torch.ones(2), inplace_pass=False)) == (
        "the option 'inplace_pass' was True and is False"
    )


def test_a_switch_of_the_process_that_changed_is_named(run):
    run(function, torch.ones(2))
    torch.use_deterministic_algorithms(True)
    try:
        assert missed(run(function, torch.ones(2))).startswith("the setting 'numerics' was ")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("part", ["torch", "Triton", "Python", "CPU", "graphex"])
def test_a_version_that_changed_is_named(run, monkeypatch, part):
    from graphex.cache import keys

    machine = keys._machine()
    run(function, torch.ones(2))
    monkeypatch.setattr(keys, "_machine", lambda: {**machine, part: "another"})
    assert missed(run(function, torch.ones(2))) == f"{part} was {machine[part]} and is another"


def with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def with_other_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", "on")


def with_other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "another")


def with_other_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphex.cache.keys._device", lambda name: "another device")


def with_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphex.cache.keys.variant_declarations", lambda: ["aten.relu.default"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_threads, "the setting 'threads' was "),
        (with_other_tuning, "the environment's 'tuning' was off and is on"),
        (with_other_compiler, "the environment's 'C++ compiler' was "),
        (with_other_driver, "the device 'cpu' was cpu and is another device"),
        (with_declaration, "the declaration of 'aten.relu.default' is new"),
    ],
)
def test_a_part_of_the_surroundings_that_changed_is_named(run, monkeypatch, change, named):
    run(function, torch.ones(2))
    change(monkeypatch)
    assert missed(run(function, torch.ones(2))).startswith(named)


def test_strides_that_changed_are_named(run):
    run(function, torch.ones(2, 3))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="graphex")
    compiled(torch.ones(3, 2).t())
    reason = missed(graphex.journal(compiled))
    assert "the input 'arg0_1' differs" in reason
    assert "strides=(1, 2)" in reason


@pytest.mark.parametrize("made", [torch.clamp_min, torch.clamp], ids=["changed", "as it was"])
def test_a_decomposition_is_part_of_the_key(folder, made):
    def through(decompose):
        torch._dynamo.reset()
        table = {torch.ops.aten.relu.default: lambda x: decompose(x, 0)}
        compiled = torch.compile(function, backend=graphex.get_backend({}, custom_decompositions=table))
        compiled(torch.ones(2))
        return graphex.journal(compiled)

    through(torch.clamp)
    if made is torch.clamp:
        assert asked(through(made)) == ["hit"]
    else:
        assert "the decomposition of 'aten.relu.default' was changed" in missed(through(made))


# -- passes and rules --------------------------------------------------------------------------------------------------


LIMIT = 1


def helper() -> int:
    return LIMIT


def my_pass(gm: object, inputs: object, config: object) -> None:
    helper()


def test_a_pass_is_known_by_what_it_does(run, monkeypatch):
    options = {"post_grad_custom_post_pass": my_pass}
    run(function, torch.ones(2), **options)
    assert asked(run(function, torch.ones(2), **options)) == ["hit"]
    monkeypatch.setitem(globals(), "LIMIT", 2)
    assert missed(run(function, torch.ones(2), **options)) == "the pass 'my_pass' was changed"


def test_a_pass_that_cannot_be_told_apart_makes_no_entry_and_the_record_says_what_to_do(run):
    class Odd:
        def __init__(self) -> None:
            self.generator = torch.Generator()

        def __call__(self, gm, inputs, config):
            return None

    odd = Odd()
    (record,) = run(function, torch.ones(2), post_grad_custom_post_pass=odd).cache
    assert record.status == "uncacheable"
    assert "torch._C.Generator" in record.reason
    assert 'cache_version = "1"' in record.reason
    odd.cache_version = "1"
    assert asked(run(function, torch.ones(2), post_grad_custom_post_pass=odd)) == ["miss"]
    assert asked(run(function, torch.ones(2), post_grad_custom_post_pass=odd)) == ["hit"]


def test_a_rule_is_part_of_the_key(run):
    def rule(scale):
        return graphex.replacement(
            lambda x: torch.relu(x * 2.0), lambda x: torch.relu(x * scale), [torch.randn(2)], name="mine"
        )

    run(function, torch.ones(2))
    assert missed(run(function, torch.ones(2), fusion_rules=[rule(2.0)])) == "the rule 'mine' is new"
    assert asked(run(function, torch.ones(2), fusion_rules=[rule(2.0)])) == ["hit"]


# -- graphs that cannot be stored --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("verify", True), ("auto_streams", True), ("graph_dump_type", "txt"), ("deadlock_check", True)],
)
def test_an_option_about_the_passes_lets_them_run(run, tmp_path, option, value):
    (record,) = run(function, torch.ones(2), graph_dump_path=tmp_path, **{option: value}).cache
    assert record.status == "uncacheable"
    assert option in record.reason


def test_explain_shows_passes_whatever_is_stored(run):
    run(function, torch.ones(2))
    assert graphex.explain(function, (torch.ones(2),)).journal.passes


def test_a_higher_order_op_makes_no_entry(run):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    (record,) = run(function, torch.ones(2)).cache
    assert record.status == "uncacheable"


# -- fingerprints ------------------------------------------------------------------------------------------------------


def copy_of(made: types.FunctionType, **names: object) -> types.FunctionType:
    return types.FunctionType(made.__code__, {**made.__globals__, **names}, made.__name__, None, made.__closure__)


def test_equal_functions_have_equal_fingerprints():
    assert fingerprint(my_pass) == fingerprint(copy_of(my_pass))
    assert fingerprint(with_constant(1.0)) == fingerprint(with_constant(1.0))
    assert fingerprint(functools.partial(my_pass, 1)) == fingerprint(functools.partial(my_pass, 1))
    assert fingerprint({1, 2, 3}) == fingerprint({3, 2, 1})


def test_what_a_function_uses_is_part_of_it():
    assert fingerprint(with_constant(1.0)) != fingerprint(with_constant(2.0))
    assert fingerprint(my_pass) != fingerprint(copy_of(my_pass, helper=lambda: 3))
    assert fingerprint(functools.partial(my_pass, 1)) != fingerprint(functools.partial(my_pass, 2))
    assert fingerprint(torch.ones(2)) != fingerprint(torch.zeros(2))
    assert fingerprint(1) != fingerprint(1.0) != fingerprint(True)


@pytest.mark.parametrize("value", [torch.Generator(), open(__file__), iter([1]), torch.empty(2**20)])  # noqa: SIM115
def test_what_cannot_be_told_apart_has_none(value):
    with pytest.raises(NoFingerprintError):
        fingerprint([value])
