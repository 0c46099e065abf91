"""Put a replacement where a match was, and leave the graph as if it had always been there.

Values, source line, stream and origins of the new nodes are those of what they replace; a result whose strides differ
changes the values of what is computed from it, and what can no longer be computed takes the rewrite back. What the
graph returns is copied into the strides that it had.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import Aliases, known_equal, same_layout
from graphex.fusion.calls import is_nothing
from graphex.fusion.matching import FusionPlan, Site
from graphex.rewrite.base import Refusal
from graphex.rewrite.metadata import evaluate, inherit_all
from graphex.torch_private.symbolic import FakeTensorMode

# -- strides of results ------------------------------------------------------------------------------------------------
# Results of a graph keep the strides that its user knows, whatever a rule has put in the place of what made them.
#
#     before:  bmm(a, b) -> transpose(0, 1) -> output                        strides (N, M * N, 1)
#     after:   npu_transpose_batchmatmul(a, b) -> [permute, clone, permute] -> output
#
# A caller can tell: code behind a graph break calls `view`, and that needs the strides it was written for.


aten = torch.ops.aten

READ_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype})
"""Ops whose elements are others if the strides of what they read are."""

_PERMUTE, _CLONE = aten.permute.default, aten.clone.default
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_MOST_DIMENSIONS = 5


@dataclass(frozen=True)
class Restored:
    """A result of the graph, and the dimensions in the order in which they lie in memory, outermost first."""

    node: Node
    order: tuple[int, ...]

    def restore(self, gm: GraphModule, now: Node, mode: FakeTensorMode) -> None:
        """Return a copy of `now`, which stands for the result, with the strides of old."""
        output = gm.graph.output_node()
        back = [self.order.index(dim) for dim in range(len(self.order))]
        copied = now
        for target, *args in ((_PERMUTE, list(self.order)), (_CLONE,), (_PERMUTE, back)):
            if target is _PERMUTE and back == sorted(back):
                continue
            with gm.graph.inserting_before(output):
                copied = gm.graph.call_function(target, (copied, *args), _CONTIGUOUS if target is _CLONE else {})
            inherit_all(copied, [now])
            copied.meta["val"] = evaluate(gm, copied, mode)
        output.replace_input_with(now, copied)


def to_restore(graph: Graph, changed: Collection[Node]) -> list[Restored] | Refusal:
    """The results of the graph among `changed`, whose values still have the strides of old."""
    results = list(dict.fromkeys(graph.output_node().all_input_nodes))
    concerned = [result for result in results if result in changed]
    if not concerned:
        return []
    found, aliases = [], Aliases(graph)
    for node in concerned:
        if any(aliases.may_alias(node, other) for other in results if other is not node):
            return Refusal("a result that shares its memory with another would change its strides", node)
        order = _order(node.meta["val"])
        if order is None:
            return Refusal("a result would change its strides", node)
        found.append(Restored(node, order))
    return found


def _order(value: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous, with these strides exactly."""
    if value.dim() > _MOST_DIMENSIONS:
        return None
    return next((order for order in permutations(range(value.dim())) if _lies_in(value, order)), None)


def _lies_in(value: Tensor, order: Sequence[int]) -> bool:
    step: Any = 1
    for dim in reversed(order):
        if not known_equal(value.stride(dim), step):
            return False
        step = step * value.shape[dim]
    return True


def splice(gm: GraphModule, plan: FusionPlan, site: Site, mode: FakeTensorMode) -> list[Node] | Refusal:
    """Carry out a plan: the nodes that are new, or why it had to be taken back."""
    if (refusal := _begins_to_share(gm, plan)) is not None:
        return refusal
    made, results = _insert(gm, plan, mode)
    pairs = [(old, new) for old, new in zip(plan.outputs, results, strict=True) if old is not None]
    after = _afterwards(gm, pairs, mode, site)
    if isinstance(after, Refusal):
        for node in reversed(made):
            gm.graph.erase_node(node)
        return after
    changed, returned = after
    for node, value in changed.items():
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
    site.calls.forget(changed)
    for old, new in pairs:
        site.calls.forget(old.users)
        old.replace_all_uses_with(new)
    for each in returned:
        each.restore(gm, dict(pairs).get(each.node, each.node), mode)
    _move_behind(made[-1] if made else None, plan.later)
    _erase(plan)
    return _used(made)


def _begins_to_share(gm: GraphModule, plan: FusionPlan) -> Refusal | None:
    """A result that lies in memory of an argument, or of another result, where it did not: someone may see a write."""
    replacement, outputs = plan.replacement, plan.outputs
    found = [(index, plan.inputs[place], "its argument") for index, place in replacement.shared_with_inputs]
    found += [(index, outputs[other], f"result {other}") for index, other in replacement.shared_results]
    aliases = Aliases(gm.graph) if found else None
    for index, other, what in found:
        old = outputs[index]
        if aliases is None or old is None or not isinstance(other, Node) or aliases.may_alias(old, other):
            continue
        if (reason := aliases.why_not_same(old, other)) is not None:
            said = f"result {index} of the replacement lies in the memory of {what} '{other.name}': {reason}"
            return Refusal(said, old, "let the replacement return a clone of it")
    return None


def _insert(gm: GraphModule, plan: FusionPlan, mode: FakeTensorMode) -> tuple[list[Node], list[Node]]:
    graph = gm.graph
    made: list[Node] = []
    env: dict[Node, Any] = {}
    inputs = iter(plan.inputs)
    first = min(node for node in plan.outputs if node is not None)
    place = first if plan.after is None else plan.after.next
    with graph.inserting_before(place):
        for node in plan.replacement.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                env[node] = graph.get_attr(_attribute(gm, plan.replacement.module, str(node.target)))
                made.append(env[node])
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = graph.call_function(node.target, args, kwargs)
                made.append(env[node])
    for node in made[:1]:
        inherit_all(node, plan.nodes)
    for node in made[1:]:
        node.meta.update(made[0].meta)
    for traced, node in env.items():
        if isinstance(node, Node) and traced.op != "placeholder":
            value = plan.replacement.value_for(traced, node)
            node.meta["val"] = evaluate(gm, node, mode) if value is None else value
    return made, [env[node] for node in plan.replacement.results]


def _attribute(gm: GraphModule, replacement: GraphModule, target: str) -> str:
    """A constant of the replacement becomes one of the graph."""
    value = getattr(replacement, target)
    name, number = f"fused{target}", 0
    while hasattr(gm, name):
        if getattr(gm, name) is value:
            return name
        number += 1
        name = f"fused{target}_{number}"
    setattr(gm, name, value)
    return name


def _afterwards(
    gm: GraphModule, pairs: list[tuple[Node, Node]], mode: FakeTensorMode, site: Site
) -> tuple[dict[Node, Any], list[Restored]] | Refusal:
    """The values downstream that change, and what the graph returns with other strides than before."""
    changed = _values_after(gm, pairs, mode, site)
    if isinstance(changed, Refusal):
        return changed
    after = {**{old: new.meta["val"] for old, new in pairs}, **changed}
    others = {node for node, value in after.items() if not _alike(node.meta.get("val"), value)}
    returned = to_restore(gm.graph, others)
    return returned if isinstance(returned, Refusal) else (changed, returned)


def _values_after(
    gm: GraphModule, pairs: list[tuple[Node, Node]], mode: FakeTensorMode, site: Site
) -> dict[Node, Any] | Refusal:
    """The values of nodes downstream that change because a result has other strides than before."""
    overlay = {old: new.meta["val"] for old, new in pairs}
    pending = sorted({user for old, new in pairs if not _alike(old.meta["val"], overlay[old]) for user in old.users})
    changed: dict[Node, Any] = {}
    while pending:
        node = pending.pop(0)
        if node.op == "output":
            if not site.may_change_strides_of_outputs:
                return Refusal("a saved result would change its strides")
            continue
        if node.target in READ_STRIDES:
            return Refusal(f"'{node.name}' depends on the strides of the result, which would change", node)
        try:
            value = evaluate(gm, node, mode, {**overlay, **changed})
        except Exception as problem:
            edit = "use reshape() instead of view() here" if node.target is torch.ops.aten.view.default else ""
            return Refusal(f"'{node.name}' cannot work on the strides of the new result ({problem})", node, edit)
        if not _alike(node.meta.get("val"), value):
            changed[node] = value
            pending = sorted({*pending, *node.users})
    return changed


def _alike(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(map(_alike, before, after))
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return same_layout(before, after)
    return True


def _move_behind(place: Node | None, nodes: list[Node]) -> None:
    for node in nodes:
        if place is not None:
            place.append(node)
        place = node


def _used(made: list[Node]) -> list[Node]:
    """Drop results without users: as users of the new op they would stand in the way of the next rule."""
    unused = [node for node in made if node.target is operator.getitem and not node.users]
    for node in unused:
        node.graph.erase_node(node)
    return [node for node in made if node not in unused]


def _erase(plan: FusionPlan) -> None:
    """Drop the nodes that were matched, and no-ops before, between and behind them, if they have no users."""
    doomed = set(plan.nodes)
    for node in plan.nodes:
        around = [*node.users, *node.all_input_nodes]
        doomed.update(near for near in around if near.op == "call_function" and is_nothing(near))
    for node in sorted(doomed, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
