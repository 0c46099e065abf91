"""When a value is used for the last time, and when its memory may be given back."""

from __future__ import annotations

from torch.fx import Graph, Node

from graphex.analysis.accesses import Access, Memory, accesses
from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.asynchronous import launch_of
from graphex.analysis.clocks import Clocks, Stream
from graphex.analysis.source import placement
from graphex.analysis.synchronisation import Sync


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the values that nobody needs after it, in the order they were defined.

        before:  a = f(x); b = g(a); c = h(a, b)
        result:  {b: [], c: [a, b]}        (and x dies at a)

    A value that is never used dies where it is defined. What the output returns never dies. What an op in flight was
    given lives until that is waited for, or to the end.
    """
    dying: dict[Node, list[Node]] = {}
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            last[value] = node
    _hold_what_is_in_flight(graph, last)
    for value in graph.nodes:
        if value.op == "output":
            continue
        user = last.get(value, value)
        if user.op != "output":
            dying.setdefault(user, []).append(value)
    return dying


def _hold_what_is_in_flight(graph: Graph, last: dict[Node, Node]) -> None:
    if all(launch_of(node) is None for node in graph.nodes):
        return
    for value, wait in Aliases(graph).in_use.arguments_in_flight().items():
        last[value] = max(last[value], wait or graph.output_node())


def frees(graph: Graph, memory: Memory | None = None) -> dict[Node, list[Node]]:
    """`last_uses` for a graph with several streams: for each node, the values to let go of behind it.

    Memory belongs to the stream it was allocated on, whose next allocation may take it. So a value is kept until that
    stream waits for everybody who uses the memory:

        a = sin(x)  side;  b = cos(a)  main;  c = exp(x)  side           `a` stays: `exp` could be given its memory
        ...                event: side waits for b                       here it may go
    """
    memory = memory or Aliases(graph)
    dying = last_uses(graph)
    clocks = Clocks()
    used: dict[Storage, dict[Stream, int]] = {}  # the last use of a memory on each stream
    held: list[Node] = []
    free: dict[Node, list[Node]] = {}
    for position, (node, what) in enumerate(accesses(graph, memory)):
        if isinstance(what, Access):
            clocks.run(what.stream, position)
            for storage in what.reads | what.writes:
                used.setdefault(storage, {})[what.stream] = position
        elif isinstance(what, Sync):
            (clocks.record if what.kind == "record" else clocks.wait)(what.what, what.stream)
        asked = [*held, *dying.get(node, ())] if isinstance(what, Sync) else dying.get(node, [])
        going = [value for value in asked if _nobody_else_runs(memory.storages(value), used, clocks)]
        if going:
            free[node] = going
        if isinstance(what, Sync):
            held = []
        held += [value for value in asked if value not in going]
    return free


def _nobody_else_runs(storages: frozenset[Storage], used: dict[Storage, dict[Stream, int]], clocks: Clocks) -> bool:
    """Whether the streams that own some memory have waited for every use of it."""
    return all(
        clocks.knows(placement(owner), stream, position)
        for owner, _ in storages
        for storage in storages
        for stream, position in used.get(storage, {}).items()
    )
