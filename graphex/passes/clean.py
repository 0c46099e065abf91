"""Compute nothing twice and nothing in vain: no-ops, casts that lose nothing, copies, unused values, equal calls.

    before:  a = slice(x, 0, 0, max); b = add(a, 1)                                               no-ops
    after:   b = add(x, 1)

    before:  a = to(x_bf16, float32); b = to(a, bfloat16); c = to(a, float64); copy_(x, x)        redundant copies
    after:   b is x_bf16;                                  c = to(x_bf16, float64)

    before:  s = sum(x_bf16, 0, dtype=float32); b = to(view(s), bfloat16)                         one rounding
    after:   s = sum(x_bf16, 0);                b = view(s)

    before:  a = mul(x, 2); b = add(x, 1); return b                                               dead code
    after:                  b = add(x, 1); return b

    before:  a = mul(x, 2); b = mul(x, 2); c = add(a, b)                                          common subexpressions
    after:   a = mul(x, 2);                c = add(a, a)

A no-op is one line of `NOOPS`: when does this op return its first argument? Whether dropping it is safe is then asked
of the alias facts, the same way for all: an operation that returns fresh memory is kept where the user could tell,
so no output ever begins to share memory with an input or with another output.

A cast through a type that holds every value of the first one exactly is as if it was not made. Only such casts are
removed: float32 -> bfloat16 -> float32 rounds, and stays. A sum of 16-bit values may be rounded by the op instead of by
a cast behind it, which a backward that is traced in autocast has for each bias.

Dead code never includes effects: writes, random ops (the next one would draw other numbers), asserts, collectives,
scopes, events and every op that is not known to be pure.

Two calls are equal if the op, its arguments and its stream are, nothing they read was written in between, and the op
is known to be a pure function. Where both results reach the user, or one of them is written to, merging would let the
user see shared memory. A rule may take one of the calls apart again: `MERGED` on the call that is kept says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import is_effectful, known_equal, known_true, placement, same_layout
from graphex.analysis.dependencies import lost_without
from graphex.analysis.effects import UNINITIALISED, operator_of
from graphex.analysis.graphs import MERGED, argument, value_key
from graphex.passes.input_reinplace import first_write_in_place
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.metadata import evaluate, fake_mode_of

# -- no-ops ------------------------------------------------------------------------------------------------------------


aten = torch.ops.aten
prims = torch.ops.prims

MAXIMUM = torch.iinfo(torch.int64).max  # how `x[a:]` says "to the end"


@dataclass(frozen=True)
class Noop:
    """A rule about an op: where `holds` is true of a call, its result is argument number `keeps`."""

    rule: str
    reason: str
    holds: Callable[[Node], bool]
    keeps: int = 0


def _value(node: Node, name: str) -> Any:
    """An argument by its schema name; the (fake) value of one that is a node."""
    given = argument(node, name)
    return given.meta.get("val") if isinstance(given, Node) else given


def _always(node: Node) -> bool:
    return True


def _scatters_everything(node: Node) -> bool:
    """slice_scatter(x, src, dim, 0, size or more, 1) is src"""
    tensor, dim = _value(node, "self"), _value(node, "dim")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return False
    start, end, size = _value(node, "start"), _value(node, "end"), tensor.shape[dim]
    from_zero = start is None or known_equal(start, 0)
    to_end = end is None or known_equal(end, MAXIMUM) or known_true(end >= size)
    return from_zero and to_end and known_equal(_value(node, "step"), 1)


def _all_ones(node: Node) -> bool:
    return all(known_equal(repeat, 1) for repeat in _value(node, "repeats"))


def _all_zeros(node: Node) -> bool:
    return all(known_equal(pad, 0) for pad in _value(node, "pad"))


def _integer_input(node: Node) -> bool:
    tensor = _value(node, "self")
    return isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())


def _exponent_one(node: Node) -> bool:
    exponent = _value(node, "exponent")
    return isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and exponent == 1


def _single_tensor(node: Node) -> bool:
    return isinstance(node.args[0], Sequence) and len(_with_elements(node.args[0])) == 1


def _with_elements(parts: Sequence[Any]) -> list[Any]:
    """The parts of a concatenation, but for those that are known to be empty."""
    values = [part.meta.get("val") if isinstance(part, Node) else None for part in parts]
    empty = [value is not None and any(known_equal(size, 0) for size in value.shape) for value in values]
    return [part for part, is_empty in zip(parts, empty, strict=True) if not is_empty]


def _row(rule: str, reason: str, holds: Callable[[Node], bool], *ops: Any, keeps: int = 0) -> dict[Any, Noop]:
    return {op: Noop(rule, reason, holds, keeps) for op in ops}


_ROUND = "an integer is already round"
_LAYOUT = "the result has the input's shape, strides and type"

NOOPS: dict[Any, Noop] = {
    **_row("full_slice", "the slice covers the whole dimension", _always, aten.slice.Tensor),  # it has the same shape
    **_row("full_scatter", "all is overwritten", _scatters_everything, aten.slice_scatter.default, keeps=1),
    **_row("repeat_once", "every repeat is 1", _all_ones, aten.repeat.default),
    **_row("pad_nothing", "every pad is 0", _all_zeros, aten.constant_pad_nd.default),
    **_row("same_type", "the tensor has this type already", _always, prims.convert_element_type.default),
    **_row("same_device", "the tensor is on this device already", _always, prims.device_put.default),
    **_row("same_cast", "type, device and layout stay the same", _always, aten._to_copy.default),
    **_row(
        "round_integer",
        _ROUND,
        _integer_input,
        aten.ceil.default,
        aten.floor.default,
        aten.round.default,
        aten.trunc.default,
    ),
    **_row("power_one", "the exponent is 1", _exponent_one, aten.pow.Tensor_Scalar),
    **_row("single_cat", "there is nothing to concatenate", _single_tensor, aten.cat.default),
    **_row(
        "same_view",
        _LAYOUT,
        _always,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
    ),
    **_row("same_copy", "all is overwritten", _always, aten.copy.default, keeps=1),
    **_row(
        "plain_copy",
        "the original holds the same values wherever the copy is read",
        _always,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
    ),
}


class RemoveNoops(GraphPass):
    """Drop operations that return their input unchanged."""

    name = "remove_noops"
    option = "remove_noop_ops"

    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(noop.rule for noop in NOOPS.values()))

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            noop = NOOPS.get(node.target) if node.op == "call_function" else None
            if noop is None or not work.allows(noop.rule):
                continue
            kept = _kept_value(node, noop)
            if kept is None or not same_layout(node.meta.get("val"), kept.meta.get("val")) or not noop.holds(node):
                continue
            if reason := work.aliases.why_not_same(node, kept) or _why_needed(work, node, kept) or _why_run(node, noop):
                work.refuse(node, reason, rule=noop.rule)
            else:
                work.replace(node, kept, rule=noop.rule, because=noop.reason)


def _why_needed(work: Work, node: Node, kept: Node) -> str:
    """Why a copy stays; empty if it need not. A copy of an input as it was lets the input be updated where it is, which
    saves two copies.
    """
    aliases = work.aliases
    if node.target is not aten.clone.default or not work.config.input_inplace_pass or not aliases.is_written(kept):
        return ""
    for write in aliases.writes(kept):
        first = first_write_in_place(work, write)
        if first is not None and aliases.position(node) < aliases.position(first) < aliases.last_read(node):
            return "the original is updated in place while the copy is still read"
    return ""


def _why_run(node: Node, noop: Noop) -> str:
    """Why a value that is overwritten is computed all the same: the user would no longer see it raise. Empty if not."""
    overwritten = node.args[0] if noop.keeps else None
    raiser = lost_without(node, overwritten) if isinstance(overwritten, Node) else None
    return "" if raiser is None else f"'{raiser.name}' may raise, and no other node reads its result"


def _kept_value(node: Node, noop: Noop) -> Node | None:
    value = node.args[noop.keeps] if len(node.args) > noop.keeps else None
    if isinstance(value, Sequence) and len(parts := _with_elements(value)) == 1:  # cat([x])
        value = parts[0]
    return value if isinstance(value, Node) else None


# -- redundant copies --------------------------------------------------------------------------------------------------


cast = aten._to_copy.default
_COPIES: dict[object, int] = {aten.clone.default: 0, aten.copy.default: 1}  # and which argument they copy

_SMALL_FLOATS = (torch.float16, torch.bfloat16)
_SUMS: tuple[Any, ...] = (aten.sum.dim_IntList, aten.sum.default)
_RESHAPED: tuple[Any, ...] = (aten.view.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
_REACHED = 2**31  # bytes of float32 that one launch adds up
_ROUNDED_ONCE_ON = ("cuda",)  # devices where a sum of 16-bit values is the same one in float32, rounded

# type -> the types that hold each of its values exactly
EXACT_IN: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.bool: frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}
    ),
    torch.uint8: frozenset({torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}),
    torch.int8: frozenset({torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}),
    torch.int16: frozenset({torch.int32, torch.int64, torch.float32, torch.float64}),
    torch.int32: frozenset({torch.int64, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}


class RemoveRedundantCopies(GraphPass):
    """Drop casts that lose nothing, and copies of values to where they are already."""

    name = "remove_redundant_copies"
    moves_writes = True  # it takes some away
    rule_names = ("cast_back", "cast_through", "round_sum", "self_copy")

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            if node.target is aten.copy_.default and work.allows("self_copy") and _writes_what_is_there(work, node):
                target = node.args[0]
                assert isinstance(target, Node)
                node.replace_all_uses_with(target)
                work.erase(node, rule="self_copy", because="the memory has these values already")
                continue
            if (chain := _rounded_sum(node)) and work.allows("round_sum"):
                self._round_once(work, node, chain)
                continue
            detour = _detour(node)
            if detour is None:
                continue
            source, middle = detour
            origin, through, result = (value.meta["val"] for value in (source, middle, node))
            if through.dtype not in EXACT_IN.get(origin.dtype, ()):
                continue
            exact = f"{origin.dtype} values are exact in {through.dtype}"
            if result.dtype == origin.dtype and same_layout(result, origin) and work.allows("cast_back"):
                if reason := _why_not_source(work, node, source, middle):
                    work.refuse(node, reason, rule="cast_back")
                else:
                    work.replace(node, source, rule="cast_back", because=exact)
            elif result.is_floating_point() and origin.is_floating_point() and result.dtype != origin.dtype:
                self._skip_middle(work, node, source, middle, exact)

    def _round_once(self, work: Work, node: Node, chain: list[Node]) -> None:
        """Let a sum round its result; `chain` leads from the sum to what is cast."""
        rule = "round_sum"
        if any(map(work.aliases.is_written, chain)):
            work.refuse(node, "the value in between is written to in this graph", rule=rule)
        elif reason := work.aliases.why_not_same(node, chain[-1]):
            work.refuse(node, reason, rule=rule)
        else:
            mode = fake_mode_of(work.gm)
            assert mode is not None
            chain[0].kwargs = {}
            for each in chain:
                each.meta["val"] = evaluate(work.gm, each, mode)
            work.replace(node, chain[-1], rule=rule, because="the sum is rounded by the op itself")

    def _skip_middle(self, work: Work, node: Node, source: Node, middle: Node, exact: str) -> None:
        rule = "cast_through"
        if not work.allows(rule):
            return
        if work.aliases.is_written(source):
            work.refuse(node, "the original is written to in this graph", rule=rule)
            return
        if work.aliases.is_written(middle):
            work.refuse(node, "the value in between is written to in this graph", rule=rule)
            return
        node.replace_input_with(middle, source)
        work.rewired(node, rule=rule, because=exact)


def _writes_what_is_there(work: Work, node: Node) -> bool:
    """copy_(x, x), or copy_(x, c) where c is a copy of x and neither was written to since it was made."""
    target, source = node.args[:2]
    if source is target:
        return True
    if not (isinstance(target, Node) and isinstance(source, Node)) or source.target not in _COPIES:
        return False
    aliases = work.aliases
    is_copy = source.args[_COPIES[source.target]] is target and same_layout(source.meta.get("val"), target.meta["val"])
    written = aliases.is_written(source) or aliases.written_between(target, source, aliases.position(node) - 1)
    return is_copy and not written


def _why_not_source(work: Work, node: Node, source: Node, middle: Node) -> str:
    """Why the source of a cast of a cast cannot take its place; empty if it can."""
    if work.aliases.written_between(source, middle, work.aliases.last_read(node)):
        return "the original is written to after it was read"
    if work.aliases.is_written(middle):
        return "the value in between is written to in this graph"
    return work.aliases.why_not_same(node, source) or ""


def _detour(node: Node) -> tuple[Node, Node] | None:
    """(source, middle) if the node is a plain cast of a plain cast: only the type differs."""
    if not _is_plain_cast(node):
        return None
    middle = node.args[0]
    assert isinstance(middle, Node)
    if not _is_plain_cast(middle):
        return None
    source = middle.args[0]
    assert isinstance(source, Node)
    return source, middle


def _rounded_sum(node: Node) -> list[Node]:
    """The sum in float32, and views of it, that a node casts to the 16 bits of what was summed; empty if it does not.

    On a GPU the op adds the same numbers in the same order, whatever the type of its result. A sum over more than one
    launch reaches is left alone: a result of 16 bits is rounded in between. Nothing else may read the sum.
    """
    if not _is_plain_cast(node, also=("layout", "device")) or node.meta["val"].device.type not in _ROUNDED_ONCE_ON:
        return []
    chain = [node.all_input_nodes[0]]
    while chain[0].target in _RESHAPED:
        chain.insert(0, chain[0].all_input_nodes[0])
    if chain[0].target not in _SUMS or chain[0].kwargs != {"dtype": torch.float32}:
        return []
    if any(len(each.users) > 1 for each in chain):
        return []
    summed = chain[0].all_input_nodes[0].meta["val"]
    is_rounded = summed.dtype in _SMALL_FLOATS and node.meta["val"].dtype == summed.dtype
    sizes = (*summed.shape, *summed.stride())
    if not is_rounded or not all(isinstance(size, int) for size in sizes):
        return []
    reached = sum((size - 1) * step for size, step in zip(summed.shape, summed.stride(), strict=True) if size)
    return chain if 4 * reached < _REACHED else []


def _is_plain_cast(node: Node, also: tuple[str, ...] = ()) -> bool:
    """Whether a node casts and changes nothing but the type; keywords other than `also` are not looked into."""
    if node.op != "call_function" or node.target is not cast or not isinstance(node.args[0], Node):
        return False
    if any(value is not None for key, value in node.kwargs.items() if key not in ("dtype", "non_blocking", *also)):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    if before.layout != torch.strided or before.is_conj() or before.is_neg():
        return False
    if before.device != after.device or after.layout != torch.strided:
        return False
    return known_equal(before.stride(), after.stride())


# -- dead code ---------------------------------------------------------------------------------------------------------


class RemoveDeadCode(GraphPass):
    """Drop nodes without users and without effects."""

    name = "remove_dead_code"
    rule = "unused"

    def apply(self, work: Work) -> None:
        for node in reversed(list(work.graph.nodes)):
            if not node.users and not is_effectful(node):
                work.erase(node, rule=self.rule, because="no node reads the value")


# -- common subexpressions ---------------------------------------------------------------------------------------------


class MergeCommonSubexpressions(GraphPass):
    """Compute equal calls once."""

    name = "merge_common_subexpressions"
    rule = "equal_calls"

    def apply(self, work: Work) -> None:
        first_seen: dict[Hashable, Node] = {}
        anywhere: dict[Hashable, Node] = {}  # on whichever stream
        positions = {node: index for index, node in enumerate(work.graph.nodes)}
        for node in list(work.graph.nodes):
            if not _is_mergeable(node):
                continue
            key = _key(node)
            kept = first_seen.setdefault((key, repr(placement(node))), node)
            if kept is node:
                elsewhere = anywhere.setdefault(key, node)
                if elsewhere is not node and placement(elsewhere) != placement(node):
                    work.refuse(node, f"equal to '{elsewhere.name}', but on another stream", rule=self.rule)
                continue
            if _reads_changed_memory(work, kept, positions[node]):
                first_seen[key, repr(placement(node))] = node
            elif reason := work.aliases.why_not_same(node, kept) or work.aliases.why_not_same(kept, node):
                work.refuse(node, f"equal to '{kept.name}', but {reason}", rule=self.rule)
            else:
                work.replace(node, kept, rule=self.rule, because=f"computes the same as '{kept.name}'")
                kept.meta[MERGED] = True


def _is_mergeable(node: Node) -> bool:
    if node.op == "get_attr":
        return False
    op = operator_of(node)
    if op is not None and op._schema.name in UNINITIALISED:
        return False
    return not is_effectful(node)


def _reads_changed_memory(work: Work, kept: Node, until: int) -> bool:
    return any(work.aliases.written_between(value, kept, until) for value in kept.all_input_nodes)


def _key(node: Node) -> Hashable:
    """A key that is equal for equal calls."""
    return value_key(node.target), value_key(node.args), value_key(node.kwargs)
