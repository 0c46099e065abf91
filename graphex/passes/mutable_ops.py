"""Let custom ops that write to their arguments do so.

    before:  new = auto_functionalized_v2(bump, x=..., _all_bases=[cache])[1]; copy_(cache, new)
    after:   bump(cache, x)

AOTAutograd wraps such ops so that they write to copies. `restore_input_writes` finds the inputs that can be written
directly; here the same is found for intermediate values that nobody reads afterwards, and the wrappers are replaced
by the ops and the copies that remain.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from graphex.analysis.beginnings import whose_place_it_keeps
from graphex.analysis.memory import bytes_of
from graphex.passes.base import Refusal, Work
from graphex.passes.metadata import Watch, fake_mode_of, repair
from graphex.torch_private.mutable_ops import (
    WRAPPER,
    WRAPPERS,
    finds_views_by_offset,
    unwrap,
    write_directly,
    written_bases,
)

aten = torch.ops.aten

RULE = "write_argument_in_place"


def unwrap_mutable_ops(work: Work, pass_name: str) -> None:
    """Replace the wrappers of a graph. Part of the pass that marks them: a marked wrapper is not correct by itself."""
    wrapped = [node for node in work.graph.nodes if node.target in WRAPPERS]
    mode = fake_mode_of(work.gm)
    if not wrapped or mode is None:
        return
    for node in wrapped:
        if node.target is WRAPPER and work.config.inplace_pass and work.allows(RULE):
            for base in written_bases(node):
                if not isinstance(base, Node) or not _is_unread(work, node, base):
                    continue
                if use := work.aliases.in_use.why(base, node):
                    refusal = Refusal(f"'{base.name}' is not free: {use.reason}", node, use.edit)
                    work.refuse(node, refusal, rule=RULE, bytes_moved=2 * bytes_of(base))
                else:
                    write_directly(node, base)
                    work.rewired(node, rule=RULE, because=f"'{base.name}' is not read after this")
    known = set(work.graph.nodes)
    with Watch(work.gm) as watch:
        unwrap(work.graph, mode)
        for node in [node for node in work.graph.nodes if node not in known and node.target is aten.as_strided.default]:
            _count_from_the_input(node)
    repair(work.gm, watch, pass_name)
    work.changes += len(wrapped)


def _count_from_the_input(view: Node) -> None:
    """Let a view of an input begin as far behind the input as in the example; a call may give one that begins later."""
    base, size, stride, *offset = view.args
    assert isinstance(base, Node)
    traced = base.meta["val"].storage_offset()
    if base.op != "placeholder" or not offset or not isinstance(offset[0], int) or not isinstance(traced, int):
        return
    with view.graph.inserting_before(view):
        begin = view.graph.call_function(aten.sym_storage_offset.default, (base,))
        begin.meta["val"] = traced
        if offset[0] != traced:
            begin = view.graph.call_function(operator.add, (begin, offset[0] - traced))
            begin.meta["val"] = offset[0]
    view.args = (base, size, stride, begin)


def _is_unread(work: Work, node: Node, base: Node) -> bool:
    """Whether nobody needs `base` as it was, and what the op writes of it is found there as it would be in a copy."""
    aliases = work.aliases
    if finds_views_by_offset(node) and whose_place_it_keeps(base) is not None:
        return False  # tracing has counted from the start of a copy; this begins where another value does
    readers = (value for each in aliases.readers_after(base, node) for value in each.all_input_nodes)
    if aliases.is_owned_elsewhere(base) or any(aliases.may_alias(value, base) for value in readers):
        return False
    return not aliases.shares_with_operands(node, base)
