"""Functional ops whose in-place variant was declared: written where they are, or left alone with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.compiling import Verified

RULE, INPUT = "call_inplace_variant", "write_input_in_place"
LIBRARY = torch.library.Library("graphex_variants", "DEF")
LIBRARY.define("scale(Tensor x, float by) -> Tensor")
LIBRARY.define("scale_(Tensor(a!) x, float by) -> ()")
LIBRARY.define("scale_back_(Tensor(a!) x, float by) -> Tensor(a!)")
LIBRARY.define("step(Tensor g, Tensor w, *, Tensor m, float lr=0.5) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("step_(Tensor g, Tensor(a!) w, *, Tensor(b!) m, float lr=0.5) -> Tensor")
LIBRARY.define("two(Tensor x, Tensor k) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("two_(Tensor x, Tensor(a!) k) -> (Tensor, Tensor)")
LIBRARY.define("reversed_(Tensor(a!) x, float by) -> Tensor")
LIBRARY.define("listed(Tensor x, Tensor[] ks) -> Tensor")
LIBRARY.define("listed_(Tensor x, Tensor(a!)[] ks) -> ()")
LIBRARY.define("several(Tensor x) -> Tensor")
LIBRARY.define("several.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
ops = torch.ops.graphex_variants


def _implement(name: str, function: Any) -> None:
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def _scale_(x: Tensor, by: float) -> None:
    x.mul_(by)


def _step_(g: Tensor, w: Tensor, *, m: Tensor, lr: float = 0.5) -> Tensor:
    m.mul_(0.5).add_(g)
    w.sub_(m * lr)
    return g * 2


def _step(g: Tensor, w: Tensor, *, m: Tensor, lr: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    w, m = w.clone(), m.clone()
    return _step_(g, w, m=m, lr=lr), w, m


def _two_(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    k.add_(x)
    return x * 2, x * 3


def _two(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, x * 3, k + x


_implement("scale", lambda x, by: x * by)
_implement("scale_", _scale_)
_implement("scale_back_", lambda x, by: x.mul_(by))
_implement("step", _step)
_implement("step_", _step_)
_implement("two", _two)
_implement("two_", _two_)

X, W, M, K = (torch.randn(6, 4) for _ in range(4))


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with (
        graphex.register_inplace_variant(ops.scale, ops.scale_, mutated=["x"]),
        graphex.register_inplace_variant(ops.step, ops.step_, mutated=["w", "m"]),
        graphex.register_inplace_variant(ops.two, ops.two_),
    ):
        yield


class Final(Verified):
    """And what the memory stage made of the graph."""

    def added(self, op: Any) -> int:
        """How many calls of `op` the memory stage added (or, negative, removed)."""
        name = str(op.default)
        ran = [record for record in self.journal.passes if record.stage in ("memory", "tidy")]
        return sum(record.added.get(name, 0) - record.removed.get(name, 0) for record in ran)


# -- intermediates -------------------------------------------------------------------------------------------------


def test_a_dead_intermediate_is_written_over():
    final = Final(lambda x: ops.scale(x + 1, 2.0).sum(), X)
    assert final.added(ops.scale_) == 1
    assert final.added(ops.scale) == -1
    (record,) = [record for record in final.journal.rewrites if record.rule == RULE]
    assert record.certificate is not None
    assert record.certificate.storage == "add"
    assert record.certificate.bytes_saved == X.numel() * 4


def test_a_chain_uses_one_memory():
    final = Final(lambda x: ops.scale(ops.scale(ops.scale(x + 1, 2.0), 3.0).relu(), 4.0), X)
    assert final.added(ops.scale_) == 3
    assert final.made("compute_in_place") == 1


def test_several_results_become_what_they_were():
    """Bug 3 of the original: the parts of a result were taken from inside the tensor that was written."""

    def f(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        out, new_w, new_m = ops.step(x, w + 1, m=m * 2, lr=0.25)
        return out + 1, new_w.sum(0), new_m.cos()

    final = Final(f, X, W, M)
    assert final.added(ops.step_) == 1
    assert final.added(ops.step) == -1
    assert final.made(RULE) == 2


def test_results_of_their_own_stay_parts_of_a_tuple():
    def f(x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        one, two, new = ops.two(x, k * 2)
        return one + two, new

    assert Final(f, X, K).added(ops.two_) == 1


def test_a_result_that_nobody_takes_is_no_obstacle():
    assert Final(lambda x, k: ops.two(x, k * 2)[0], X, K).added(ops.two_) == 1


def test_the_only_result_is_reused_in_turn():
    """The one tensor that the variant returns is the graph's own, and stands for itself."""
    final = Final(lambda x, w, m: ops.step(x, w + 1, m=m + 1)[0].relu() + 1, X, W, M)
    assert final.added(ops.step_) == 1
    assert final.made("compute_in_place") == 2


def test_a_value_read_later_is_not_overwritten_and_the_read_is_named():
    """Bug 3 of the original: the check for later uses was skipped."""

    def f(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        old = w + 1
        out, new_w, _ = ops.step(x, old, m=m * 2)
        return out, new_w, old.cos()

    final = Final(f, X, W, M)
    assert final.added(ops.step_) == 0
    (reason,) = final.reasons(RULE)
    assert "is read later by 'cos'" in reason
    assert "return out, new_w, old.cos()" in reason


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, w: ops.scale(x, 2.0), "the caller still holds"),
        (lambda x, w: ops.scale(x.t(), 2.0), "the caller still holds"),
        (lambda x, w: (lambda y: (y, ops.scale(y, 2.0)))(x + 1), "is read later by 'output'"),
        (lambda x, w: (lambda y: (y[0], ops.scale(y, 2.0)))(x + 1), "is read later by 'output'"),
        (lambda x, w: (lambda y: ops.scale(y, 2.0) + y[0].cos())(x + 1), "is read later by"),
        (lambda x, w: ops.scale((x + 1)[1:], 2.0), "a part of a larger memory"),
        (lambda x, w: ops.scale((x[0] + 1).expand(6, 4), 2.0), "another layout"),
        (lambda x, w: (lambda y: ops.step(x, y, m=y)[1])(w + 1), "another argument may share memory"),
        (lambda x, w: (lambda y: ops.two(y[0], y)[2])(w + 1), "another argument may share memory"),
    ],
    ids=[
        "input", "view of an input", "returned", "view returned", "view read later", "window", "expanded",
        "given twice", "view given too",
    ],
)  # fmt: skip
def test_what_is_still_needed_is_not_overwritten(f, reason):
    final = Final(f, X, W)
    assert final.made(RULE) == 0
    assert any(reason in each for each in final.reasons(RULE))


# -- inputs --------------------------------------------------------------------------------------------------------


def update_both(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    out, new_w, new_m = ops.step(x, w, m=m)
    w.copy_(new_w)
    m.copy_(new_m)
    return out + w.sum()


def update_one(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    out, new_w, new_m = ops.step(x, w, m=m)
    w.copy_(new_w)
    return out + new_m.sum()


def update_twice(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    first, new_w, new_m = ops.step(x, w, m=m)
    w.copy_(new_w)
    m.copy_(new_m)
    second, newer_w, newer_m = ops.step(x + 1, w, m=m)
    w.copy_(newer_w * 2)
    m.copy_(newer_m)
    return first + second


def update_after_both(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    first, new_w, new_m = ops.step(x, w, m=m)
    second, newer_w, newer_m = ops.step(x + 1, new_w, m=new_m)
    w.copy_(newer_w)
    m.copy_(newer_m)
    return first + second


def copies(final: Final) -> int:
    return final.added(torch.ops.aten.clone)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inputs_are_written_where_they_are(dynamic):
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        final = Final(update_both, X, W, M)
    assert final.added(ops.step_) == 1
    assert final.added(torch.ops.aten.copy_) == -2
    assert copies(final) == 0
    assert final.made(INPUT) == 2
    assert all(record.certificate is not None for record in final.journal.rewrites if record.rule == INPUT)


def test_two_updates_of_the_same_inputs():
    final = Final(update_twice, X, W, M)
    assert final.added(ops.step_) == 2
    assert final.added(torch.ops.aten.copy_) == -2
    assert copies(final) == 0


def test_inputs_stay_as_they_are_until_the_last_op_that_may_raise():
    final = Final(update_after_both, X, W, M)
    assert final.added(torch.ops.aten.copy_) == 0
    reasons = final.reasons(INPUT)
    assert len(reasons) == 2
    assert all("'step_1' may raise" in reason or "'step_1' (" in reason for reason in reasons)


def test_an_input_that_is_not_updated_is_copied_first():
    final = Final(update_one, X, W, M)
    assert final.added(ops.step_) == 1
    assert final.added(torch.ops.aten.copy_) == -1
    assert copies(final) == 1


def test_an_input_and_a_dead_intermediate_together_need_no_copy():
    def f(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        out, new_w, new_m = ops.step(x, w, m=m * 2)
        w.copy_(new_w)
        return out + new_m.sum()

    final = Final(f, X, W, M)
    assert final.added(ops.step_) == 1
    assert copies(final) == 0


def test_a_single_result_that_updates_an_input():
    def f(x: Tensor) -> Tensor:
        x.copy_(ops.scale(x, 2.0))
        return x.sum()

    final = Final(f, X)
    assert final.added(ops.scale_) == 1
    assert final.added(torch.ops.aten.copy_) == -1


def old_weight_read_later(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    out, new_w, _ = ops.step(x, w, m=m + 1)
    late = w.cos()
    w.copy_(new_w)
    return out + late


def other_versions_swapped(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    out, new_w, new_m = ops.step(x, w, m=m)
    w.copy_(new_m)
    m.copy_(new_w)
    return out


def weight_is_also_the_gradient(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    out, new_w, _ = ops.step(w, w, m=m + 1)
    w.copy_(new_w)
    return out


def new_weight_returned(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    _, new_w, _ = ops.step(x, w, m=m + 1)
    w.copy_(new_w)
    return new_w


@pytest.mark.parametrize(
    "hazard",
    [old_weight_read_later, other_versions_swapped, weight_is_also_the_gradient, new_weight_returned],
    ids=lambda f: f.__name__,
)
def test_a_hazard_keeps_the_functional_op(hazard):
    final = Final(hazard, X, W, M)
    assert final.added(ops.step_) == 0
    assert final.made(INPUT) == 0


def test_a_part_that_must_be_copied_and_lies_otherwise_in_memory_is_refused():
    final = Final(update_one, X, W, torch.randn(4, 6).t())
    assert final.added(ops.step_) == 0
    assert any("is not contiguous" in each for each in final.reasons(INPUT))


# -- declaring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"disable_rules": [RULE]}, {"inplace_pass": False, "input_inplace_pass": False}],
    ids=["rule", "options"],
)
def test_it_can_be_turned_off(options):
    assert Final(update_both, X, W, M, **options).added(ops.step_) == 0


def test_either_pass_uses_it_alone():
    assert Final(update_both, X, W, M, inplace_pass=False).added(ops.step_) == 1
    torch._dynamo.reset()
    assert Final(lambda x: ops.scale(x + 1, 2.0).sum(), X, input_inplace_pass=False).added(ops.scale_) == 1


@torch.library.custom_op("graphex_variants::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)


@torch.library.custom_op("graphex_variants::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


def test_a_declaration_that_was_removed_is_forgotten():
    handle = graphex.register_inplace_variant(double, double_)
    assert Final(lambda x: double(x + 1).sum(), X).added(ops.double_) == 1
    handle.remove()
    handle.remove()
    torch._dynamo.reset()
    assert Final(lambda x: double(x + 1).sum(), X).added(ops.double_) == 0


def test_a_variant_that_hands_back_what_it_wrote():
    LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
    _implement("scaled", lambda x, by: x * by)
    with graphex.register_inplace_variant(ops.scaled, ops.scale_back_, mutated=[0]):
        assert Final(lambda x: ops.scaled(x + 1, 2.0).relu(), X).added(ops.scale_back_) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((ops.scale, ops.scale_back_), "has an in-place variant"),
        ((ops.scale_, ops.scale_), "must be functional"),
        ((lambda x: x, ops.scale_), "not one operator"),
        ((ops.several, ops.scale_), "not one operator"),
        ((ops.scale_back_, ops.scale_), "must be functional"),
        ((ops.listed, ops.step_), "take 2 and 4 arguments"),
        ((torch.ops.aten.mul.Tensor, ops.scale_), "'Tensor self' of the first is 'Tensor x' in the second"),
        ((torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Tensor), "declares no argument as written"),
        ((torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor, ["other"]), "declares ['self'] as written"),
        ((torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor, ["cache"]), "is no argument of"),
        ((torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor, [7]), "is no argument of"),
        ((ops.listed, ops.listed_), "Only single tensors can be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pair_that_does_not_fit_is_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(graphex.InputError) as raised:
        graphex.register_inplace_variant(*arguments)
    assert sentence in str(raised.value)


def test_a_variant_with_too_many_results_is_refused():
    LIBRARY.define("unscaled(Tensor x, float by) -> Tensor")
    with pytest.raises(graphex.InputError, match="must return 0 new tensors"):
        graphex.register_inplace_variant(ops.unscaled, ops.reversed_)


def test_the_old_name_of_a_declaration_still_works_and_says_the_new_one():
    with pytest.warns(DeprecationWarning, match="register_inplace_variant"):
        assert graphex.register_inplace_twin is graphex.register_inplace_variant
