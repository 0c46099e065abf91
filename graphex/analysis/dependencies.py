"""What has to run before what, whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import PURE_NAMESPACES, is_effectful, is_random, operator_of
from graphex.analysis.raising import can_raise
from graphex.analysis.synchronisation import synchronisation


def what_runs_before(graph: Graph, aliases: Aliases) -> dict[Node, set[Node]]:
    """For every node, others that have to run before it: values, uses of one memory, everything with an effect, and
    writes that the caller sees where something raises.

    Events are left out: what they order is the matter of `graphex.analysis.turns`.
    """
    before = {node: set(node.all_input_nodes) for node in graph.nodes}
    last_effect: Node | None = None
    for node in graph.nodes:
        if keeps_its_turn(node):
            if last_effect is not None:
                before[node].add(last_effect)
            last_effect = node
    for earlier, later in (*hazards(graph, aliases), *seen_when_raising(graph, aliases)):
        before[later].add(earlier)
    return before


def hazards(graph: Graph, aliases: Aliases) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes of which the first reads or writes memory before the second writes or reads it.

    A custom op may read all that was kept before it, so it keeps its place among the writes to that.
    """
    if not aliases.has_writes():
        return
    last_write: dict[Storage, Node] = {}
    reads: dict[Storage, list[Node]] = {}
    last_keeper: Node | None = None
    to_kept: list[Node] = []  # writes to kept memory since the last op that may keep things
    for node in graph.nodes:
        read, written = aliases.read_by(node), aliases.written_by(node)
        earlier = [last_write[storage] for storage in read | written if storage in last_write]
        for storage in written:
            earlier += reads.pop(storage, ())
            last_write[storage] = node
        for storage in read - written:
            reads.setdefault(storage, []).append(node)
        if aliases.in_use.may_keep(node):
            earlier += to_kept
            last_keeper, to_kept = node, []
        elif last_keeper is not None and any(aliases.in_use.was_kept(storage, node) for storage in written):
            earlier.append(last_keeper)
            to_kept.append(node)
        yield from ((other, node) for other in dict.fromkeys(earlier) if other is not node)


def seen_when_raising(graph: Graph, aliases: Aliases) -> Iterator[tuple[Node, Node]]:
    """Pairs of a node that may raise and a write to memory of the caller, in their order."""
    if not aliases.has_writes():
        return
    last_write: Node | None = None
    raising: list[Node] = []
    for node in graph.nodes:
        if aliases.writes_for_caller(node):
            yield from ((raiser, node) for raiser in raising)
            last_write, raising = node, []
        if can_raise(node):
            if last_write is not None and last_write is not node:
                yield last_write, node
            raising.append(node)


def keeps_its_turn(node: Node) -> bool:
    """Whether the node has an effect besides writing to memory that it says it writes to."""
    if node.op in ("placeholder", "output") or not is_effectful(node) or synchronisation(node) is not None:
        return False
    op = operator_of(node)
    return op is None or op.namespace not in PURE_NAMESPACES or is_random(node) or not op._schema.is_mutable
