"""In-place variants of functional ops: those of ATen that are known, and those that the author of an op has declared.

    index_copy(cache, 2, at, k)    ->    index_copy_(cache, 2, at, k)

The in-place variant has the same arguments by schema and, which no schema says, gives the same bits: `mul.Scalar` and
`mul_.Scalar` round differently in bfloat16. So `SAME_BITS` lists the ops, and a test compares each with its in-place
variant over types and sizes. `register_inplace_variant` declares pairs of custom ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch.fx import Node

from graphex.errors import InputError
from graphex.ops import INPLACE, SPECS
from graphex.torch_private.graphs import overload_of, written_places

# `aten` overloads whose in-place variant computes the same bits (tests/analysis/test_inplace_variants.py), except on
# complex numbers.
SAME_BITS = frozenset(
    """
    abs.default acos.default acosh.default add.Tensor addcdiv.default addcmul.default asin.default asinh.default
    atan.default atan2.default atanh.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor ceil.default clamp.Tensor clamp.default clamp_max.Tensor clamp_max.default
    clamp_min.Tensor clamp_min.default copy.default copysign.Tensor cos.default cosh.default digamma.default
    div.Tensor elu.default eq.Tensor erf.default erfc.default erfinv.default exp.default exp2.default
    expm1.default fill.Scalar fill.Tensor floor.default fmod.Tensor frac.default ge.Tensor gelu.default gt.Tensor
    hardsigmoid.default hardswish.default hardtanh.default hypot.default index_add.default index_copy.default
    index_fill.int_Scalar index_fill.int_Tensor index_put.default le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor
    lgamma.default log.default log10.default log1p.default log2.default logical_and.default logical_not.default
    logical_or.default logical_xor.default lt.Tensor masked_fill.Scalar masked_fill.Tensor
    masked_scatter.default mish.default mul.Tensor nan_to_num.default ne.Tensor neg.default reciprocal.default
    relu.default remainder.Tensor round.default rsqrt.default scatter.reduce scatter.src scatter.value
    scatter.value_reduce scatter_add.default scatter_reduce.two
    sgn.default sigmoid.default sign.default silu.default sin.default sinh.default sqrt.default sub.Tensor
    tan.default tanh.default threshold.default tril.default triu.default trunc.default xlogy.Tensor zero.default
    """.split()  # noqa: SIM905  (a hundred lines otherwise)
)


@cache
def inplace_variant(target: Any) -> torch._ops.OpOverload | None:
    """`index_copy` -> `index_copy_`: the overload that takes the same arguments and writes its result to the first."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    return _variant_by_schema(target) if f"{name}.{target._overloadname}" in SAME_BITS else None


@cache
def has_unproven_variant(target: Any) -> bool:
    """Whether an overload writes the result to the first argument, and is not known to give the same bits."""
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target.namespace != "aten"
        or inplace_variant(target) is not None
    ):
        return False
    return _variant_by_schema(target) is not None


@cache
def functional_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`gelu_` -> `gelu`: the overload that makes a new tensor of what this one writes to its first argument."""
    name = target._schema.name.removeprefix("aten::")
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    variant: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    return variant if variant is not None and _variant_by_schema(variant) is target else None


def _variant_by_schema(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, f"{name}_", None)
    variant: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    if variant is None or len(variant._schema.arguments) != len(target._schema.arguments):
        return None
    pairs = zip(target._schema.arguments, variant._schema.arguments, strict=True)
    same = all((mine.name, str(mine.type)) == (its.name, str(its.type)) for mine, its in pairs)
    return variant if same and [place for place, _ in written_places(variant)] == [0] else None


# -- declared pairs ----------------------------------------------------------------------------------------------------
#
#     functional:  ns::update(Tensor x, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)      out, new k, new v
#     in-place:    ns::update_(Tensor x, Tensor(a!) k, Tensor(b!) v) -> Tensor               out
#
# A declaration says what no schema does: both compute the same bits, the functional op returns memory that no other
# code holds on to, and its last results are the new versions of the arguments that the in-place variant writes, in the
# order they are named. The declaration is checked against the schemas.


Op = torch._ops.OpOverload


@dataclass(frozen=True)
class DeclaredVariant:
    """A pair of ops: the variant, which arguments it writes, and how the results of the two correspond.

    The functional op returns `outs` results of its own, then one new version for each of `written`.
    """

    functional: Op
    inplace: Op
    written: tuple[int, ...]  # places among the arguments
    outs: int

    @property
    def returns_tuple(self) -> bool:
        return len(self.functional._schema.returns) > 1

    def written_values(self, node: Node) -> list[Any]:
        """The values that `node`, a call of either op, is given for the arguments that are written."""
        arguments = self.functional._schema.arguments
        return [
            node.args[place] if place < len(node.args) else node.kwargs.get(arguments[place].name)
            for place in self.written
        ]

    def new_versions(self, node: Node) -> list[Any]:
        """The (fake) values that the functional op returns for the arguments its variant writes."""
        value = node.meta.get("val")
        return list(value[self.outs :]) if isinstance(value, (list, tuple)) else [value]


_declared: dict[Op, DeclaredVariant] = {}


def declared_variant(target: Any) -> DeclaredVariant | None:
    return _declared.get(target) if isinstance(target, Op) else None


def is_declared(op: Op) -> bool:
    """Whether the op is one of a pair: what it returns is the caller's alone."""
    return op in _declared or any(variant.inplace is op for variant in _declared.values())


def declarations() -> list[str]:
    """The pairs of ops that users have declared, as text."""
    return sorted(f"{op} is written in place by {each.inplace}, {each.written}" for op, each in _declared.items())


class Handle:
    """A declaration or registration that can be taken back; as a context manager it holds for the block."""

    def __init__(self, text: str, take_back: Callable[[], object]) -> None:
        self._text, self._take_back = text, take_back

    def remove(self) -> None:
        """Take it back. Graphs compiled from now on go without it; those that are compiled stay as they are."""
        self._take_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self._text}>"


def register_inplace_variant(functional: Any, inplace: Any, mutated: Sequence[str | int] | None = None) -> Handle:
    """Declare that `inplace` does what `functional` does, writing its new versions over the arguments `mutated`.

    Operators are given as `torch.ops.ns.name`, as one of its overloads, or as what `torch.library.custom_op` returned.
    `mutated` names arguments, or counts them from 0, in the order in which `functional` returns their new versions,
    after its other results. Without it they are taken from the schema of `inplace`, in the order they stand there.
    """
    one, other = _operator(functional, "functional op"), _operator(inplace, "in-place op")
    who = f"register_inplace_variant({one}, {other})"
    if one in _declared:
        raise InputError(
            f"{who}: '{one}' has an in-place variant, '{_declared[one].inplace}'. Remove that declaration first."
        )
    _check_functional(who, one)
    _check_arguments(who, one, other)
    written = _written(who, other, mutated)
    outs = _check_results(who, one, other, written)
    pair = _declared[one] = DeclaredVariant(one, other, written, outs)

    def take_back() -> None:
        if _declared.get(one) is pair:
            del _declared[one]

    return Handle(f"{other} is the in-place variant of {one}", take_back)


def _operator(given: Any, role: str) -> Op:
    found = overload_of(given)
    if found is None:
        raise InputError(
            f"register_inplace_variant: the {role} is {given!r}, which is not one operator. "
            "Give an operator such as torch.ops.ns.name, or one of its overloads."
        )
    return found


def _check_functional(who: str, op: Op) -> None:
    schema = op._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        raise InputError(f"{who}: '{op}' writes to its arguments or returns views of them. It must be functional.")
    if not schema.returns or any(str(result.type) != "Tensor" for result in schema.returns):
        raise InputError(f"{who}: '{op}' must return tensors and nothing else; it returns {_types(schema.returns)}.")


def _check_arguments(who: str, one: Op, other: Op) -> None:
    mine, its = _arguments(one), _arguments(other)
    if mine == its:
        return
    if len(mine) != len(its):
        raise InputError(f"{who}: the ops take {len(mine)} and {len(its)} arguments. They must take the same ones.")
    left, right = next(pair for pair in zip(mine, its, strict=True) if pair[0] != pair[1])
    raise InputError(f"{who}: argument '{' '.join(left)}' of the first is '{' '.join(right)}' in the second.")


def _written(who: str, op: Op, mutated: Sequence[str | int] | None) -> tuple[int, ...]:
    arguments = op._schema.arguments
    declared = [place for place, _ in written_places(op)]
    if not declared:
        raise InputError(f"{who}: the schema of '{op}' declares no argument as written. Declare it as Tensor(a!).")
    chosen = declared if mutated is None else [_place(who, op, each) for each in mutated]
    if sorted(chosen) != declared:
        names = [[str(arguments[place].name) for place in places] for places in (chosen, declared)]
        raise InputError(f"{who}: mutated={names[0]}, but the schema of '{op}' declares {names[1]} as written.")
    for place in chosen:
        if str(arguments[place].type) != "Tensor":
            raise InputError(
                f"{who}: argument '{arguments[place].name}' of '{op}' is written and is a {arguments[place].type}. "
                "Only single tensors can be."
            )
    return tuple(chosen)


def _place(who: str, op: Op, given: str | int) -> int:
    names = [argument.name for argument in op._schema.arguments]
    if isinstance(given, str) and given in names:
        return names.index(given)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        return given
    raise InputError(f"{who}: mutated has {given!r}, which is no argument of '{op}'. It has {', '.join(names)}.")


def _check_results(who: str, one: Op, other: Op, written: tuple[int, ...]) -> int:
    """How many results the functional op has besides the new versions."""
    results = other._schema.returns
    outs = len(one._schema.returns) - len(written)
    if outs < 0:
        raise InputError(
            f"{who}: '{one}' returns {len(one._schema.returns)} tensors, and '{other}' writes {len(written)}. "
            "It must return a new version of each, after its other results."
        )
    own, handed_back = results[:outs], results[outs:]
    fresh = len(own) == outs and all(str(each.type) == "Tensor" and each.alias_info is None for each in own)
    if not fresh or (handed_back and not _hands_back(other, handed_back, written)):
        raise InputError(
            f"{who}: '{other}' returns {_types(results) or 'nothing'}. It must return {outs} new tensors (the results "
            f"of '{one}' before the new versions), and after them nothing or the written arguments in their order."
        )
    return outs


def _hands_back(op: Op, results: Sequence[Any], written: tuple[int, ...]) -> bool:
    returned = [_alias_set(result) for result in results]
    return returned == [_alias_set(op._schema.arguments[place]) for place in written]


def _alias_set(declared: Any) -> set[str]:
    return set(declared.alias_info.before_set) if declared.alias_info is not None else set()


def _arguments(op: Op) -> list[tuple[str, str]]:
    return [(str(argument.type), argument.name) for argument in op._schema.arguments]


def _types(results: Sequence[Any]) -> str:
    return ", ".join(str(result.type) for result in results)


def _declare_ours() -> None:
    """The pairs among torch_npu's ops that are defined here; where torch_npu defines them, their schemas may differ."""
    for functional, inplace in INPLACE:
        if SPECS[f"npu::{functional}"].defined_here and SPECS[f"npu::{inplace}"].defined_here:
            register_inplace_variant(getattr(torch.ops.npu, functional), getattr(torch.ops.npu, inplace))


_declare_ours()
