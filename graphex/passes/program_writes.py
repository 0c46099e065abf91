"""Keep writes to inputs where the program had them, among the nodes that can raise.

    program      st.add_(1); y = t[i]                       new = st + 1; y = t[i]; st.copy_(new)
    as traced    a = add(st, 1); y = index(t, [i]);         a = add(st, 1); y = index(t, [i]); c = copy(st, a);
                 copy_(st, a)                               copy_(st, c)

Every write of the program has left a node at its place: the op without its underscore, made from the version before
it. So the first program writes before `index` and the second behind it. This is noted before the first pass, because
`c` is a no-op and does not stay. A write is put back in place only where every node that can raise finds what it would
have found in the program; a copy at the end moves up to the first node that would have found it written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line
from graphex.analysis.declared_twins import declared_twin
from graphex.analysis.program import NEVER, WRITES, Program, Writes, writes_to
from graphex.analysis.raising import can_raise
from graphex.passes import inplace_twins
from graphex.passes.base import Refusal, Work
from graphex.passes.updates import Chain, Update, find_chain

aten = torch.ops.aten


def note_program_writes(
    graph: Graph, *, has_out: bool = False, is_own: Callable[[Node], bool] = lambda node: False
) -> None:
    """Note on each input when the program wrote to it.

    `has_out`: some call of the program may have an `out=`, whose result is a version of an input without being made
    from the one before. `is_own` tells the program's own copies over an input from those by functionalisation.
    """
    nodes = list(graph.nodes)
    program = Program(
        {node.name: time for time, node in enumerate(nodes)},
        {node.name: node.target for node in nodes if can_raise(node)},
    )
    for node in nodes:
        node.meta.pop(WRITES, None)
    for epilogue in filter(is_copy_over_input, nodes):
        target = epilogue.args[0]
        assert isinstance(target, Node)
        if is_own(epilogue) or target.meta.get(WRITES) is not None:
            target.meta[WRITES] = Writes(program, (program.time[epilogue.name],), 1, {epilogue.name: 0})
        else:
            target.meta[WRITES] = _writes(epilogue, program, only_last=has_out)


def is_copy_over_input(node: Node) -> bool:
    if node.op != "call_function" or node.target is not aten.copy_.default or len(node.args) < 2:
        return False
    target, value = node.args[:2]
    is_input = isinstance(target, Node) and target.op in ("placeholder", "get_attr")
    return is_input and isinstance(value, Node)


def _writes(epilogue: Node, program: Program, *, only_last: bool) -> Writes:
    chain, value = find_chain(epilogue, (), declared=False), epilogue.args[1]
    assert isinstance(value, Node)
    if chain is None:
        return Writes(program, (program.time[value.name],), 1, {value.name: 0})
    updates = chain.updates[-1:] if only_last else chain.updates
    times = tuple(max(program.time[place.node.name] for place in update.places) for update in updates)
    number = {place.node.name: number for number, update in enumerate(updates) for place in update.places}
    return Writes(program, times, len(updates), number)


def why_seen(work: Work, chain: Chain) -> tuple[Refusal, Update] | None:
    """What may raise and leave the input of a chain in a state that it never had there in the program."""
    writes = writes_to(chain.target) or Writes(Program({}, {}), (), 0)
    starts = [work.aliases.position(inplace_twins.call_of(step)) for step in chain.steps]
    ends = [*(start + 1 for start in starts[1:]), work.aliases.position(chain.epilogue)]  # a write raises before it is
    for update, start, end in zip(chain.updates, starts, ends, strict=True):
        step, call = update.made.node, inplace_twins.call_of(update.made.node)
        if _may_stop_halfway(call) and not writes.is_own(step):
            return Refusal(f"'{call.name}' may raise when it has written a part of '{chain.target.name}'", step), update
        if (raiser := _who_sees(work, writes, update, start, end)) is not None:
            where = f" ({line})" if (line := node_line(raiser)) else ""
            reason = f"'{raiser.name}'{where} may raise, and '{chain.target.name}' would be another than in the program"
            return Refusal(reason, step), update
    return None


def _who_sees(work: Work, writes: Writes, update: Update, start: int, end: int) -> Node | None:
    """A node between two positions that may raise and expects other writes than those up to `update`."""
    done = writes.last_by(*(place.node for place in update.places))
    if done is None:
        return next(iter(work.raising.between(start, end)), None)
    if (early := work.raising.first_before(writes.times[done], start, end)) is not None:
        return early
    if done + 1 == len(writes.times):
        return None
    later = writes.times[done + 1]
    return next((node for node in work.raising.between(start, end) if work.raising.time_of(node)[1] > later), None)


def _may_stop_halfway(call: Node) -> bool:
    """Whether an op that writes may raise in the middle of it. A declared twin checks what it is given first."""
    return declared_twin(call.target) is None and can_raise(call)


def move_copies_up(work: Work) -> None:
    """Let the copies that are left at the end stand before the first node that would have found them done."""
    if not work.order.one_stream:
        return
    for copy in filter(is_copy_over_input, list(work.graph.nodes)):
        if work.aliases.knows(copy) and (place := _place_of(work, copy)) is not None:
            place.prepend(copy)


def _place_of(work: Work, copy: Node) -> Node | None:
    target, value = copy.args[:2]
    assert isinstance(target, Node)
    assert isinstance(value, Node)
    aliases, raising, writes = work.aliases, work.raising, writes_to(target)
    if writes is None or not writes.times or not aliases.knows(value) or len(aliases.writes(target)) != 1:
        return None
    start, end, written = aliases.position(value), aliases.position(copy), writes.times[-1]
    after = [node for node in raising.between(start, end) if raising.time_of(node)[0] > written]
    if not after or raising.first_before(written, aliases.position(after[0]) - 1, end) is not None:
        return None
    before = after[0].prev
    while not aliases.knows(before):
        before = before.prev
    is_read = aliases.readers_after(target, before, until=end)
    return None if is_read or aliases.written_between(value, before, NEVER) else after[0]
