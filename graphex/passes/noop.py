"""Drop operations that return their input unchanged.

    before:  a = slice(x, 0, 0, max); b = add(a, 1)
    after:   b = add(x, 1)

A rule is one line of `NOOPS`: when does this op return its first argument? Whether dropping it is safe is then asked
of the alias facts, the same way for all: an operation that returns fresh memory is kept where the user could tell,
so no output ever begins to share memory with an input or with another output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import known_equal, known_true, same_layout
from graphex.analysis.dependencies import lost_without
from graphex.analysis.graphs import argument
from graphex.passes.input_reinplace import first_write_in_place
from graphex.rewrite.base import GraphPass, Work

aten = torch.ops.aten
prims = torch.ops.prims

MAXIMUM = torch.iinfo(torch.int64).max  # how `x[a:]` says "to the end"


@dataclass(frozen=True)
class Noop:
    """When `holds`, the op's result is its argument number `keeps`."""

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
        "nobody can tell the copy from the original",
        _always,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
    ),
}


class RemoveNoops(GraphPass):
    name = "remove_noops"
    option = "remove_noop_ops"

    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(noop.rule for noop in NOOPS.values()))

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            noop = NOOPS.get(node.target) if node.op == "call_function" else None
            if noop is None or not work.allows(noop.rule):
                continue
            kept = _kept(node, noop)
            if kept is None or not same_layout(node.meta.get("val"), kept.meta.get("val")) or not noop.holds(node):
                continue
            if reason := work.aliases.why_not_same(node, kept) or _why_needed(work, node, kept) or _why_run(node, noop):
                work.refuse(node, reason, rule=noop.rule)
            else:
                work.replace(node, kept, rule=noop.rule, because=noop.reason)


def _why_needed(work: Work, node: Node, kept: Node) -> str | None:
    """A copy of an input as it was lets the input be updated where it is, which saves two copies."""
    aliases = work.aliases
    if node.target is not aten.clone.default or not work.config.input_inplace_pass or not aliases.is_written(kept):
        return None
    for write in aliases.writes(kept):
        first = first_write_in_place(work, write)
        if first is not None and aliases.position(node) < aliases.position(first) < aliases.last_read(node):
            return "the original is updated in place while the copy is still read"
    return None


def _why_run(node: Node, noop: Noop) -> str | None:
    """A value that is overwritten need not be computed, unless the user would no longer see it raise."""
    overwritten = node.args[0] if noop.keeps else None
    raiser = lost_without(node, overwritten) if isinstance(overwritten, Node) else None
    return None if raiser is None else f"'{raiser.name}' may raise, and nobody else uses what it makes"


def _kept(node: Node, noop: Noop) -> Node | None:
    value = node.args[noop.keeps] if len(node.args) > noop.keeps else None
    if isinstance(value, Sequence) and len(parts := _with_elements(value)) == 1:  # cat([x])
        value = parts[0]
    return value if isinstance(value, Node) else None
