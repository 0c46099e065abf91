"""Write inputs where they are: undo functionalisation's "new value, then copy it over the input".

    before:  new = index_copy(cache, 2, pos, k); y = attend(q, new); copy_(cache, new)
    after:   new = index_copy_(cache, 2, pos, k); y = attend(q, new)

    before:  new = slice_scatter(cache, k, 2, a, b); copy_(cache, new)
    after:   window = slice(cache, 2, a, b); copy_(window, k)

A chain of updates becomes a chain of writes. It is done only if nobody reads an older version of the memory after it
is overwritten, no update reads the memory it writes, and the new value is not handed out as an output of its own (a
view of the input that the user gets back is none); the refusal names the read that is in the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import node_line, same_layout
from graphex.analysis.aliasing import Storage
from graphex.analysis.memory import bytes_of
from graphex.analysis.shapes import same_offset
from graphex.analysis.twins import in_place_twin
from graphex.passes import inplace_twins
from graphex.passes.base import GraphPass, Refusal, Work, inherit
from graphex.passes.mutable_ops import RULE as MUTABLE_OPS
from graphex.passes.mutable_ops import unwrap_mutable_ops
from graphex.torch_private.mutable_ops import WRAPPER, base_of_result, write_directly

aten = torch.ops.aten

# op that returns its input with a window replaced -> the view that is this window
WINDOWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}


@dataclass(frozen=True)
class Chain:
    """The versions of one input: `steps[0]` updates `target`, each further one the step before it."""

    target: Node
    steps: list[Node]
    epilogue: Node


class RestoreInputWrites(GraphPass):
    name = "restore_input_writes"
    option = "input_inplace_pass"
    rule = "write_input_in_place"
    moves_writes = True

    def rules(self) -> tuple[str, ...]:
        return (self.rule, MUTABLE_OPS, inplace_twins.RULE)

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            chain = _chain(work, node) if work.allows(self.rule) else None
            if chain is None:
                continue
            refusal = _why_not(work, chain)
            if refusal is not None:
                work.refuse(refusal.node or node, refusal, rule=self.rule, bytes_moved=_bytes_moved(chain))
                continue
            names = ", ".join(f"'{step.name}'" for step in chain.steps)
            because = f"nobody reads '{chain.target.name}' as it was before {names} after that point"
            proof = work.certificate(chain.target, _writer(chain.steps[0]), _bytes_moved(chain))
            work.rewired(chain.steps[-1], rule=self.rule, because=because, certificate=proof)
            _write_in_place(work, chain)
        inplace_twins.call_marked_twins(work)
        unwrap_mutable_ops(work, self.name)


def _chain(work: Work, node: Node) -> Chain | None:
    """The updates that lead from an input to the value that is copied over it; None if this is no such copy."""
    if node.op != "call_function" or node.target is not aten.copy_.default or len(node.args) < 2:
        return None
    target, value = node.args[0], node.args[1]
    if not isinstance(target, Node) or target.op not in ("placeholder", "get_attr"):
        return None
    steps: list[Node] = []
    while isinstance(value, Node) and value is not target:
        steps.append(value)
        value = _updated(work, value)
    return Chain(target, steps[::-1], node) if value is target and steps else None


def _bytes_moved(chain: Chain) -> int:
    """What functionalisation costs a call: each step, and the copy back, reads and writes the whole tensor."""
    return 2 * bytes_of(chain.target) * (len(chain.steps) + 1)


def _updated(work: Work, step: Node) -> Any:
    """The value that a node is a new version of; None if it is not one."""
    if work.allows(inplace_twins.RULE) and (declared := inplace_twins.updated_argument(step)) is not None:
        return declared
    if not step.args:
        return None
    if in_place_twin(step.target) is not None or step.target in WINDOWS:
        return step.args[0]
    if step.target is operator.getitem and isinstance(step.args[0], Node) and step.args[0].target is WRAPPER:
        return base_of_result(step.args[0], int(step.args[1]))  # type: ignore[arg-type]
    return None


def _writer(step: Node) -> Node:
    """The node that will do the writing: the step itself, or the op whose result it is."""
    return inplace_twins.call_of(step)


def _why_not(work: Work, chain: Chain) -> Refusal | None:
    aliases = work.aliases
    if len(aliases.writes(chain.target)) != 1:
        return Refusal(f"'{chain.target.name}' is written to more than once", chain.epilogue)
    versions = [chain.target, *chain.steps]
    memory = frozenset().union(*map(aliases.storages, versions))
    end = aliases.position(chain.epilogue)
    for old, step in zip(versions, chain.steps, strict=False):
        if not same_layout(step.meta.get("val"), chain.target.meta.get("val")):
            return Refusal("the new value has another layout than the input", step)
        if aliases.is_absolute(step) and not same_offset(step.meta.get("val"), chain.target.meta.get("val")):
            return Refusal("the new value is addressed from the start of its storage, and the input begins later", step)
        if inplace_twins.updated_argument(step) is not None and (
            reason := inplace_twins.why_not_called(_writer(step), old)
        ):
            return Refusal(reason, step)
        if _operands_share(work, step, memory):
            return Refusal("the update reads the memory it would write", step)
        last = end if old is chain.target else None
        for reader in aliases.readers_after(old, _writer(step), until=last):
            if reader is not chain.epilogue:
                where = f" ({line})" if (line := node_line(reader)) else ""
                return Refusal(f"the old value is read later by '{reader.name}'{where}", step)
    if any(aliases.is_handed_out(step, chain.target) for step in chain.steps):
        return Refusal("an output would begin to share memory with an input", chain.steps[-1])
    if any(aliases.is_written(step) for step in chain.steps):
        return Refusal("the new value is written to", chain.steps[-1])
    return None


def _operands_share(work: Work, step: Node, memory: frozenset[Storage]) -> bool:
    """Whether an argument besides the one that is updated may live in the memory of any version."""
    old, writer = _updated(work, step), _writer(step)
    if work.aliases.shares_with_operands(writer, old):
        return True
    operands = [value for value in writer.all_input_nodes if value is not old]
    return any(not work.aliases.storages(value).isdisjoint(memory) for value in operands)


def _write_in_place(work: Work, chain: Chain) -> None:
    value = chain.target.meta["val"]
    for step in (*chain.steps[1:], chain.target):
        work.aliases.join(step, chain.steps[0])
    chain.epilogue.replace_all_uses_with(chain.steps[-1])
    work.graph.erase_node(chain.epilogue)
    for step in chain.steps:
        twin = in_place_twin(step.target)
        if inplace_twins.updated_argument(step) is not None:
            inplace_twins.write_directly(step, chain.target)
        elif step.target is operator.getitem:
            old = _updated(work, step)
            _writer(step).replace_input_with(old, chain.target)
            write_directly(_writer(step), chain.target)
        elif twin is not None:
            step.target = twin
            step.args = (chain.target, *step.args[1:])
            step.meta["val"] = value
        else:
            _write_window(work, step, chain)


def _write_window(work: Work, step: Node, chain: Chain) -> None:
    """Replace a scatter by a write into the window it describes."""
    target, versions = chain.target, [chain.target, *chain.steps]
    with work.graph.inserting_before(step):
        window = _view(work, WINDOWS[step.target], target, step.args[2:], step.kwargs, step)
        content, old = step.args[1], step.args[0]
        while (inner := _same_window(content, old, window)) is not None:
            source = inner.args[1]
            if not isinstance(source, Node) or any(work.aliases.may_alias(source, version) for version in versions):
                break  # what is written may lie in the memory it is written to
            old, content = inner.args[0], inner.args[1]
            window = _view(work, WINDOWS[inner.target], window, inner.args[2:], inner.kwargs, inner)
        write = work.graph.call_function(aten.copy_.default, (window, content))
        write.meta["val"] = window.meta["val"]
        inherit(write, step)
    step.replace_all_uses_with(target)
    work.graph.erase_node(step)


def _same_window(content: Any, old: Any, window: Node) -> Node | None:
    """x[1, 2:4] = k arrives as a scatter into a view of x, scattered into x: the inner one, if it is that view."""
    if not isinstance(content, Node) or content.target not in WINDOWS or len(content.users) != 1:
        return None
    seen = content.args[0]
    if not isinstance(seen, Node) or seen.target is not window.target or seen.args[0] is not old:
        return None
    return content if (seen.args[1:], seen.kwargs) == (window.args[1:], window.kwargs) else None


def _view(work: Work, op: Any, base: Node, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Node) -> Node:
    node = work.graph.call_function(op, (base, *args), kwargs)
    inherit(node, origin)
    fake: Callable[[Node], Any] = lambda value: value.meta.get("val")  # noqa: E731
    given, named = torch.fx.map_arg(((base, *args), kwargs), fake)
    node.meta["val"] = op(*given, **named)
    return node
