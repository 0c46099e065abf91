"""Compute into memory that is not needed any more.

    before:  a = mul(x, y); b = add(a, x); c = relu(b)
    after:   a = mul(x, y); b = add_(a, x); c = relu_(a)

An op that has an in-place variant writes over its first argument if the graph has allocated it (it is no input and no
tensor that a custom op has returned), it is alone in its storage, has the result's layout, is not read afterwards (not
through a view either), shares no memory with the other arguments and is not in use: no op in flight works on it, and no
custom op may have kept it. An op with a declared in-place variant writes over the arguments that the declaration names:

    before:  t = update(x, k, v); y = t[0]; new_k = t[1]; new_v = t[2]
    after:   y = update_(x, k, v)                                             and k, v stand for new_k, new_v

Both memory passes call declared variants. `restore_input_writes` marks the arguments that are inputs to be written
where they are; `reuse_dead_memory` takes intermediate values that are not read afterwards. An argument of a marked call
that is neither is copied first, as the functional op would have done.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import is_random, same_layout
from graphex.analysis.inplace_variants import DeclaredVariant, declared_variant, inplace_variant
from graphex.analysis.memory import bytes_of, why_not_reusable
from graphex.analysis.shapes import known_contiguous
from graphex.rewrite.base import GraphPass, Refusal, Work, inherit

COMPUTE, VARIANT = "compute_in_place", "call_inplace_variant"

_DIRECT = "graphex_written_directly"


def updated_argument(step: Node) -> Node | None:
    """The argument of a declared op that `step`, one of its results, is the new version of; None for anything else."""
    call = call_of(step)
    variant = declared_variant(call.target)
    if variant is None or variant.returns_tuple != (call is not step):
        return None
    place = _index(step, variant) - variant.outs if variant.returns_tuple else 0
    values = variant.written_values(call)
    found = values[place] if 0 <= place < len(values) else None
    return found if isinstance(found, Node) else None


def call_of(step: Node) -> Node:
    """The call that a result belongs to."""
    if step.target is operator.getitem and isinstance(step.args[0], Node):
        return step.args[0]
    return step


def why_not_called(call: Node, directly: Node | None) -> str | None:
    """Why a call cannot become one of its variant that writes to `directly`; None if it can.

    Whatever else the variant writes may have to be copied for it, so that must be certain to give the same layout.
    """
    variant = declared_variant(call.target)
    assert variant is not None
    if variant.returns_tuple and any(user.target is not operator.getitem for user in call.users):
        return "its results are passed on as a tuple"
    for value, after in zip(variant.written_values(call), variant.new_versions(call), strict=True):
        known = value.meta.get("val") if isinstance(value, Node) else None
        if not isinstance(value, Node) or not isinstance(known, torch.Tensor) or not same_layout(after, known):
            return "a new version has another layout than the argument it would be written over"
        if directly is not None and value is not directly and not known_contiguous(known):
            return f"'{value.name}' might have to be copied first, and is not contiguous"
    return None


def write_directly(step: Node, target: Node) -> None:
    """Let the variant write to `target` itself where `step` is the new version of an argument."""
    call, old = call_of(step), updated_argument(step)
    variant = declared_variant(call.target)
    assert variant is not None
    assert old is not None
    call.meta.setdefault(_DIRECT, set()).add(variant.written_values(call).index(old))
    call.replace_input_with(old, target)


def call_marked_variants(work: Work) -> None:
    """Turn every call that is to write to an input into one of its variant, with the copies that are still needed."""
    for call in list(work.graph.nodes):
        direct: set[int] | None = call.meta.pop(_DIRECT, None)
        if direct is None:
            continue
        variant = declared_variant(call.target)
        assert variant is not None
        work.rewired(call, rule=VARIANT, because="an input that it updates is written where it is")
        for place in range(len(variant.written)):
            if place not in direct and work.config.inplace_pass and _why_not_dead(work, call, variant, place) is None:
                _certify(work, call, variant, place)
                direct.add(place)
        _call_variant(work, call, variant, direct)


def reuse_dead_arguments(work: Work, call: Node) -> None:
    """Call the in-place variant if the values it would write over are not needed any more."""
    variant = declared_variant(call.target)
    assert variant is not None
    places = range(len(variant.written))
    refusal = Refusal(reason) if (reason := why_not_called(call, None)) is not None else None
    if refusal is None:
        refusals = (_why_not_dead(work, call, variant, place) for place in places)
        refusal = next((each for each in refusals if each is not None), None)
    if refusal is not None:
        moved = sum(bytes_of(value) for value in variant.written_values(call) if isinstance(value, Node))
        work.refuse(call, refusal, rule=VARIANT, bytes_moved=2 * moved)
        return
    for place in places:
        _certify(work, call, variant, place)
    _call_variant(work, call, variant, set(places))


def _why_not_dead(work: Work, call: Node, variant: DeclaredVariant, place: int) -> Refusal | None:
    dead, after = variant.written_values(call)[place], variant.new_versions(call)[place]
    results = [call] if not variant.returns_tuple else _results(call, variant).get(variant.outs + place, [])
    return why_not_reusable(work.aliases, work.order, call, dead, after, results[0] if results else None)


def _certify(work: Work, call: Node, variant: DeclaredVariant, place: int) -> None:
    dead = variant.written_values(call)[place]
    proof = work.certificate(dead, call, bytes_of(dead))
    work.rewired(call, rule=VARIANT, because=f"'{dead.name}' is not read after this", certificate=proof)


def _call_variant(work: Work, call: Node, variant: DeclaredVariant, direct: set[int]) -> None:
    """Change the call, and let the arguments it writes (or copies of them) stand for their new versions."""
    for place, version in enumerate(variant.new_versions(call)):
        if place not in direct:
            _copy_first(work, call, variant, place, version)
    written = variant.written_values(call)
    if variant.returns_tuple:
        for index, results in _results(call, variant).items():
            for result in results:
                if index >= variant.outs:
                    _stand_for(work, result, written[index - variant.outs])
                elif len(variant.inplace._schema.returns) == 1:
                    work.aliases.adopt(call, result)
                    _stand_for(work, result, call)
    else:
        work.aliases.join(call, written[0])
        call.replace_all_uses_with(written[0])
    _retarget(call, variant, written)


def _stand_for(work: Work, result: Node, kept: Node) -> None:
    if kept is not call_of(result):
        work.aliases.join(result, kept)
    result.replace_all_uses_with(kept)
    inherit(kept, result)
    work.graph.erase_node(result)


def _retarget(call: Node, variant: DeclaredVariant, written: list[Any]) -> None:
    own = list(call.meta["val"][: variant.outs]) if variant.returns_tuple else []
    values = [*own, *(value.meta["val"] for value in written)][: len(variant.inplace._schema.returns)]
    call.target = variant.inplace
    call.meta["val"] = tuple(values) if len(values) > 1 else values[0] if values else None
    call.meta.pop("tensor_meta", None)


def _copy_first(work: Work, call: Node, variant: DeclaredVariant, place: int, version: Any) -> None:
    """Let the call write to a copy of an argument that is still needed."""
    position = variant.written[place]
    name = variant.functional._schema.arguments[position].name
    with work.graph.inserting_before(call):
        copy = work.graph.call_function(torch.ops.aten.clone.default, (variant.written_values(call)[place],))
    copy.meta["val"] = version
    if "custom" in call.meta:
        copy.meta["custom"] = call.meta["custom"]
    inherit(copy, call)
    if position < len(call.args):
        call.update_arg(position, copy)
    else:
        call.update_kwarg(name, copy)


def _results(call: Node, variant: DeclaredVariant) -> dict[int, list[Node]]:
    """The nodes that take the parts of a call's result, by part."""
    found: dict[int, list[Node]] = {}
    for user in call.users:
        found.setdefault(_index(user, variant), []).append(user)
    return found


def _index(getitem: Node, variant: DeclaredVariant) -> int:
    index = getitem.args[1]
    assert isinstance(index, int)
    return index + len(variant.functional._schema.returns) if index < 0 else index


class ReuseDeadMemory(GraphPass):
    name = "reuse_dead_memory"
    option = "inplace_pass"
    moves_writes = True
    rule_names = (COMPUTE, VARIANT)

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            if node.op != "call_function" or is_random(node):
                continue
            if declared_variant(node.target) is not None and work.allows(VARIANT):
                reuse_dead_arguments(work, node)
            elif work.allows(COMPUTE):
                self._reuse_first_argument(work, node)

    def _reuse_first_argument(self, work: Work, node: Node) -> None:
        variant = inplace_variant(node.target)
        if variant is None or not node.args or not isinstance(node.args[0], Node):
            return
        dead = node.args[0]
        refusal = why_not_reusable(work.aliases, work.order, node, dead, node.meta.get("val"), node)
        if refusal is not None and not refusal.expected:
            work.refuse(node, refusal, rule=COMPUTE, bytes_moved=bytes_of(node))
        if refusal is None:
            proof = work.certificate(dead, node, bytes_of(node))
            work.aliases.join(node, dead)
            node.target = variant
            node.meta["val"] = dead.meta["val"]
            work.rewired(node, rule=COMPUTE, because=f"'{dead.name}' is not read after this", certificate=proof)
