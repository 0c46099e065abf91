"""What has to run before what, whoever runs it."""

from __future__ import annotations

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import PURE_NAMESPACES, is_effectful, is_random, operator_of, written_arguments
from graphex.analysis.raising import can_raise
from graphex.analysis.synchronisation import synchronisation


def what_runs_before(graph: Graph, aliases: Aliases) -> dict[Node, set[Node]]:
    """For every node, others that have to run before it: values, uses of one memory, everything with an effect, and
    writes that the caller sees where something raises.

    Events are left out: what they order is the matter of `graphex.analysis.turns`.
    """
    before: dict[Node, set[Node]] = {}
    last_write: dict[Storage, Node] = {}
    reads: dict[Storage, list[Node]] = {}
    last_effect: Node | None = None
    last_seen: Node | None = None  # the last write to memory of the caller
    raising: list[Node] = []  # what may raise since then
    for node in graph.nodes:
        found = set(node.all_input_nodes)
        written = {storage for value in written_arguments(node) for storage in aliases.storages(value)}
        read = {storage for value in node.all_input_nodes for storage in aliases.storages(value)}
        for storage in read | written:
            if storage in last_write:
                found.add(last_write[storage])
        for storage in written:
            found.update(reads.pop(storage, ()))
            last_write[storage] = node
        for storage in read - written:
            reads.setdefault(storage, []).append(node)
        if any(map(aliases.lives_in_input, written_arguments(node))):
            found.update(raising)
            last_seen, raising = node, []
        if can_raise(node):
            found.update([] if last_seen is None else [last_seen])
            raising.append(node)
        if keeps_its_turn(node):
            if last_effect is not None:
                found.add(last_effect)
            last_effect = node
        before[node] = found - {node}
    return before


def keeps_its_turn(node: Node) -> bool:
    """Whether the node has an effect besides writing to memory that it says it writes to."""
    if node.op in ("placeholder", "output") or not is_effectful(node) or synchronisation(node) is not None:
        return False
    op = operator_of(node)
    return op is None or op.namespace not in PURE_NAMESPACES or is_random(node) or not op._schema.is_mutable
